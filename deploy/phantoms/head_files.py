"""Head phantoms as files: NIfTI, DICOM series (MR, Enhanced MR, CT), and trees as public data sets have them.

Voxels are written in the order in which a scanner sends them (``codes``: where column, row and slice numbers grow
to), so that a reader has to turn them back. What is said of the patient is as careless as
:mod:`deploy.phantoms.persons` makes it.
"""

# nibabel has no annotations
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import nibabel
import numpy as np
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform
from numpy.typing import NDArray
from pydicom import Dataset, dcmread
from pydicom.uid import UID, CTImageStorage, EnhancedMRImageStorage, ExplicitVRLittleEndian, MRImageStorage

from agent.domain import Volume
from deploy.phantoms.heads import Contrast, Grid, HeadPhantoms, axial
from deploy.phantoms.persons import Person, Visit, careless, item, show, write

__all__ = ["SERIES", "Series", "bids", "enhanced", "localiser", "nifti", "series", "study", "turned"]

_ECHO: Final = {"T1": ("3", "2300", "GR"), "T2": ("95", "5200", "SE"), "FLAIR": ("120", "9000", "IR")}


@dataclass(frozen=True, slots=True)
class Series:
    """How one series of a study is made and sent."""

    name: str  # Series Description
    contrast: Contrast = "T1"
    codes: str = "LPS"  # where columns, rows and slices grow to
    grid: Grid | None = None  # none: isotropic
    mm: float = 1.0  # of an isotropic grid
    many_frames: bool = False  # Enhanced MR


SERIES: Final = (
    Series("MPRAGE SAG", "T1", "PIL"),
    Series("T2 TSE AX", "T2", "LPS", axial(1.0, 3.0)),
    Series("FLAIR AX 5MM", "FLAIR", "LPS", axial(1.0, 5.0)),
)


def turned(volume: Volume, codes: str) -> Volume:
    """The same voxels with axes that grow to ``codes``, e.g. LPS; in the same place."""
    ornt = ornt_transform(io_orientation(volume.affine), axcodes2ornt(tuple(codes)))
    values = nibabel.orientations.apply_orientation(volume.values, ornt)
    return Volume(np.ascontiguousarray(values), volume.affine @ inv_ornt_aff(ornt, volume.values.shape))


def nifti(path: Path, volume: Volume, codes: str = "RAS", dtype: str | None = None) -> None:
    """One NIfTI file; uint8 is scaled to the brightest voxel, other types hold the numbers as they are."""
    made = turned(volume, codes)
    values = made.values
    if dtype == "uint8":
        values = np.rint(values * (255 / max(1, values.max()))).astype(np.uint8)
    elif dtype is not None:
        values = values.astype(dtype)
    image = nibabel.Nifti1Image(values, made.affine)
    image.header.set_xyzt_units("mm", "sec")
    image.set_qform(made.affine, 1)
    image.set_sform(made.affine, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)


def _geometry(affine: NDArray[np.float64], index: int) -> tuple[list[str], list[str], list[str], str]:
    """Position, orientation, pixel spacing and slice thickness of one slice (PS3.3 C.7.6.2), from RAS+ to LPS+."""
    lps = np.diag((-1.0, -1.0, 1.0, 1.0)) @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    turn = lps[:3, :3] / spacing
    place = (lps @ (0, 0, index, 1))[:3]
    # of a pixel: the distance of rows first
    return _words(place), _words([*turn[:, 0], *turn[:, 1]]), _words(spacing[1::-1]), _words(spacing[2:])[0]


def _words(numbers: Iterable[float]) -> list[str]:
    return [f"{number:.8g}"[:16] if abs(number) > 1e-7 else "0" for number in numbers]


def _of_head(person: Person, visit: Visit, index: int, name: str, contrast: Contrast) -> Dataset:
    """What single frames and many have in common."""
    dataset = careless(person, visit, index)
    dataset.Modality, dataset.BodyPartExamined, dataset.PatientPosition = (
        "CT" if contrast == "CT" else "MR",
        "HEAD",
        "HFS",
    )
    dataset.FrameOfReferenceUID = UID(f"{visit.study}.9")
    dataset.SeriesDescription, dataset.SeriesNumber = name, visit.series.rsplit(".", 1)[1]
    dataset.PositionReferenceIndicator, dataset.Manufacturer = "", "Made-up Magnets"
    dataset.ManufacturerModelName, dataset.DeviceSerialNumber, dataset.SoftwareVersions = "Magnet 3", "7741", "1"
    dataset.PatientAge = f"{int(visit.date[:4]) - int(person.birth_date[:4]):03d}Y"
    dataset.AcquisitionNumber = "1"
    return dataset


def _classed(dataset: Dataset, contrast: Contrast, signed: bool) -> None:
    """The modules of MR Image (PS3.3 A.4) and CT Image (A.3) beyond the image."""
    dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL" if contrast == "CT" else "OTHER"]
    dataset.PixelRepresentation = int(signed)
    if contrast == "CT":
        dataset.SOPClassUID, dataset.KVP = CTImageStorage, "120"
        dataset.RescaleIntercept, dataset.RescaleSlope, dataset.RescaleType = "0", "1", "HU"
    else:
        echo, repetition, sequence = _ECHO[contrast]
        dataset.SOPClassUID, dataset.ScanningSequence, dataset.SequenceVariant = MRImageStorage, sequence, "SP"
        dataset.ScanOptions, dataset.MRAcquisitionType = "", "3D" if contrast == "T1" else "2D"
        dataset.EchoTime, dataset.RepetitionTime, dataset.EchoTrainLength = echo, repetition, "1"
        dataset.MagneticFieldStrength, dataset.FlipAngle = "3", "9"
    dataset.ReferencedImageSequence[0].ReferencedSOPClassUID = dataset.SOPClassUID
    dataset.RequestAttributesSequence[0].ReferencedStudySequence[0].ReferencedSOPClassUID = "1.2.840.10008.3.1.2.3.1"


def series(
    folder: Path, volume: Volume, who: tuple[Person, Visit], made: Series, leave_out: Sequence[int] = ()
) -> list[Path]:
    """One file for each slice, MR or CT.

    Args:
        folder: made when it is not there.
        volume: of the scan.
        who: the person and the visit; the series' UID is the visit's.
        made: name, contrast and order of voxels.
        leave_out: numbers of slices that got lost on the way.
    """
    sent = turned(volume, made.codes)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(sent.values.shape[2]):
        if index in leave_out:
            continue
        dataset = _of_head(*who, index, made.name, made.contrast)
        place, turn, spacing, thick = _geometry(sent.affine, index)
        dataset.ImagePositionPatient, dataset.ImageOrientationPatient = place, turn
        dataset.PixelSpacing, dataset.SliceThickness, dataset.SpacingBetweenSlices = spacing, thick, thick
        picture = np.ascontiguousarray(sent.values[:, :, index].T)
        show(dataset, picture.view(np.uint16))
        _classed(dataset, made.contrast, picture.dtype.kind == "i")
        paths.append(folder / f"{dataset.Modality}{index:04d}.dcm")
        write(dataset, paths[-1], ExplicitVRLittleEndian, who[0])
    return paths


def enhanced(path: Path, volume: Volume, who: tuple[Person, Visit], made: Series) -> Path:
    """All slices in one file (Enhanced MR Image, PS3.3 A.36), positions frame by frame."""
    sent = turned(volume, made.codes)
    dataset = _of_head(*who, 0, made.name, made.contrast)
    frames = np.moveaxis(sent.values, 2, 0).transpose(0, 2, 1)
    show(dataset, np.ascontiguousarray(frames[0]))
    dataset.SOPClassUID, dataset.NumberOfFrames = EnhancedMRImageStorage, str(len(frames))
    dataset.ImageType, dataset.PixelPresentation = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"], "MONOCHROME"
    dataset.VolumetricProperties, dataset.VolumeBasedCalculationTechnique = "VOLUME", "NONE"
    dataset.ComplexImageComponent, dataset.AcquisitionContrast = (
        "MAGNITUDE",
        made.contrast.replace("FLAIR", "FLUID_ATTENUATED"),
    )
    dataset.PixelData = np.ascontiguousarray(frames).astype("<u2").tobytes()
    _, turn, spacing, thick = _geometry(sent.affine, 0)
    common = item()
    common.PixelMeasuresSequence = [item(PixelSpacing=spacing, SliceThickness=thick, SpacingBetweenSlices=thick)]
    common.PlaneOrientationSequence = [item(ImageOrientationPatient=turn)]
    dataset.SharedFunctionalGroupsSequence = [common]
    per_frame = []
    for index in range(len(frames)):
        group = item()
        group.PlanePositionSequence = [item(ImagePositionPatient=_geometry(sent.affine, index)[0])]
        content = item(StackID="1", InStackPositionNumber=index + 1, DimensionIndexValues=[1, index + 1])
        group.FrameContentSequence = [content]
        per_frame.append(group)
    dataset.PerFrameFunctionalGroupsSequence = per_frame
    organization = UID(f"{who[1].series}.999")
    dataset.DimensionOrganizationSequence = [item(DimensionOrganizationUID=organization)]
    tags = ((0x00209056, "Stack ID"), (0x00209057, "In-Stack Position Number"))
    dataset.DimensionIndexSequence = [
        item(DimensionIndexPointer=tag, FunctionalGroupPointer=0x00209111, DimensionOrganizationUID=organization,
             DimensionDescriptionLabel=label)
        for tag, label in tags
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write(dataset, path, ExplicitVRLittleEndian, who[0])
    return path


def localiser(folder: Path, phantoms: HeadPhantoms, number: int, visit: int, who: tuple[Person, Visit]) -> list[Path]:
    """Three slices in each of three planes, 2 mm pixels and 8 mm thick, in one series: no volume, but a profile."""
    paths: list[Path] = []
    for plane, codes in enumerate(("LPS", "PIL", "LIA")):
        normal = {"LPS": 2, "PIL": 0, "LIA": 1}[codes]
        extent, step = np.array((224.0, 256.0, 256.0)), np.full(3, 2.0)
        step[normal], extent[normal] = 20.0, 60.0
        shape = tuple(int(n) for n in np.rint(extent / step))
        affine = np.diag((*step, 1.0))
        affine[:3, 3] = np.array((0, -8.0, -24.0)) - step * (np.array(shape) - 1) / 2
        scan = phantoms.scan(number, visit, grid=Grid(affine, (shape[0], shape[1], shape[2])))
        made = Series("LOCALISER", "T1", codes)
        for index, path in enumerate(series(folder / str(plane), scan.volume, who, made)):
            paths.append(_renumbered(path, folder, 3 * plane + index, who))
        (folder / str(plane)).rmdir()
    return paths


def _renumbered(path: Path, folder: Path, index: int, who: tuple[Person, Visit]) -> Path:
    dataset = dcmread(path)
    path.unlink()
    dataset.SOPInstanceUID, dataset.InstanceNumber = UID(who[1].instance(index)), str(index + 1)
    dataset.SliceThickness = "8"
    del dataset.file_meta
    new = folder / f"MR{index:04d}.dcm"
    write(dataset, new, ExplicitVRLittleEndian, who[0])
    return new


def study(
    folder: Path,
    phantoms: HeadPhantoms,
    number: int,
    visit: int,
    rng: np.random.Generator,
    made: Sequence[Series] = SERIES,
) -> tuple[Person, Visit]:
    """All series of one visit and a localiser, each in a folder, with one frame of reference.

    Args:
        folder: of the study.
        phantoms: the persons.
        number: of the person.
        visit: from 0.
        rng: draws the person's name and all that is careless.
        made: the series.
    """
    person = Person.draw(0, number, rng)
    met = Visit.later(person, visit, rng) if visit else Visit.of(person)
    for place, one in enumerate(made, start=2):
        own = replace(met, series=f"{met.series}.{place}")
        scan = phantoms.scan(number, visit, one.mm, one.contrast, one.grid)
        where = folder / f"{place}_{one.name.replace(' ', '_')}"
        if one.many_frames:
            enhanced(where / "MR0000.dcm", scan.volume, (person, own), one)
        else:
            series(where, scan.volume, (person, own), one)
    localiser(folder / "1_LOCALISER", phantoms, number, visit, (person, replace(met, series=f"{met.series}.1")))
    return person, met


def bids(folder: Path, phantoms: HeadPhantoms, persons: Sequence[int], visits: int = 2, mm: float = 4.0) -> None:
    """A BIDS tree of T1-weighted images, one session for each visit, as OASIS-3 is given out."""
    rows = ["participant_id\tage\tsex"]
    for number in persons:
        who = phantoms.person(number)
        name = f"sub-{number + 1:04d}"
        rows.append(f"{name}\t{who.age:.1f}\t{who.sex}")
        for visit in range(visits):
            session = f"ses-{visit + 1:02d}"
            stem = folder / name / session / "anat" / f"{name}_{session}_T1w"
            nifti(stem.with_suffix(".nii.gz"), phantoms.scan(number, visit, mm).volume, dtype="int16")
            _json(
                stem.with_suffix(".json"),
                {"Modality": "MR", "MagneticFieldStrength": 3, "PatientName": f"{name} Test"},
            )
    (folder / "participants.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    _json(folder / "dataset_description.json", {"Name": "Made-up heads", "BIDSVersion": "1.8.0"})


def _json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
