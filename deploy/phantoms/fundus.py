"""Made-up patients of an eye clinic: both retinas, several visits, a grade of diabetic retinopathy.

In memory, as DICOM Ophthalmic Photography 8 Bit (PS3.3 A.41), and in the layouts of two public data sets.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydicom import Dataset
from pydicom.tag import Tag
from pydicom.uid import UID, ExplicitVRLittleEndian, OphthalmicPhotography8BitImageStorage

from deploy.phantoms.persons import Person, Planted, Visit, careless, item, shared, show, write
from deploy.phantoms.retina import GRADES, Anatomy, anatomy, photograph

Side = Literal["left", "right"]
SIDES: Final[tuple[Side, ...]] = ("left", "right")
EVEN: Final = (0.2,) * GRADES
APTOS_SHARES: Final = (0.49, 0.10, 0.27, 0.05, 0.09)  # of the 3,662 training photographs of APTOS 2019


@dataclass(frozen=True, slots=True, eq=False)
class Photograph:
    """One retina at one visit."""

    pixels: NDArray[np.uint8]  # (s, s, 3) RGB
    eye: Side
    visit: int  # from 0


@dataclass(frozen=True, slots=True, eq=False)
class FundusPatient:
    """One made-up person. The grade is the person's: of both eyes, at all visits."""

    number: int  # from 0; a name for the person
    grade: int  # 0 to 4
    anatomy: Anatomy
    photographs: tuple[Photograph, ...]


def fundus_patients(
    count: int,
    rng: np.random.Generator,
    side: int = 64,
    visits: int = 1,
    eyes: Sequence[Side] = SIDES,
    shares: Sequence[float] = EVEN,
) -> list[FundusPatient]:
    """Draw patients and photograph them: every eye at every visit, (left, right) of visit 0 first.

    Args:
        count: of patients.
        rng: draws everything; who a patient is and how ill are independent.
        side: of an image in pixels.
        visits: of each patient.
        eyes: which are photographed.
        shares: of the grades 0 to 4; the numbers of patients follow them as nearly as they can.
    """
    if not (count >= 1 and visits >= 1 and eyes) or len(shares) != GRADES or not min(shares) >= 0 < sum(shares):
        raise ValueError("patients, visits and eyes must be positive, and there are five shares")
    # the first of n equal intervals' middles: as near to the shares as whole patients can be
    ends = np.cumsum(shares) / np.sum(shares)
    grades = rng.permutation(np.searchsorted(ends, (np.arange(count) + 0.5) / count)).clip(0, GRADES - 1)
    seeds = rng.integers(0, 2**63, count)
    patients = []
    for number in range(count):
        own = np.random.default_rng(seeds[number])
        person, grade = anatomy(own), int(grades[number])
        taken = tuple(
            Photograph(photograph(person, eye, grade, side, own), eye, visit)
            for visit in range(visits)
            for eye in eyes
        )
        patients.append(FundusPatient(number, grade, person, taken))
    return patients


def stacked(
    patients: Sequence[FundusPatient],
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """All photographs (n, s, s, 3) in [0, 1], whose each is (n,), and the grades (n,)."""
    taken = [(photo.pixels, patient) for patient in patients for photo in patient.photographs]
    images = np.stack([pixels for pixels, _ in taken]).astype(np.float32) / np.float32(255)
    owners = np.array([patient.number for _, patient in taken], dtype=np.int64)
    return images, owners, np.array([patient.grade for _, patient in taken], dtype=np.int64)


def write_clinic(folder: Path, site: int, patients: Sequence[FundusPatient], rng: np.random.Generator) -> Planted:
    """Write one site's patients as DICOM, one folder for each patient and visit, and its label list.

    Args:
        folder: made when it is not there.
        site: 0-based; names and numbers differ between sites.
        patients: whose photographs are written; the label is the grade.
        rng: draws the persons; the photographs do not depend on it.
    Returns:
        Every identifying string that was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planted, rows = [], []
    for patient in patients:
        person = Person.draw(site, patient.number, rng)
        visits = [Visit.of(person)]
        visits += [Visit.later(person, n, rng) for n in range(1, 1 + max(p.visit for p in patient.photographs))]
        uids = []
        for index, photo in enumerate(patient.photographs):
            visit = visits[photo.visit]
            where = folder / f"{person.name.split('^', maxsplit=1)[0]}_{person.patient_id}" / visit.accession
            where.mkdir(parents=True, exist_ok=True)
            write(
                _instance(person, visit, index, photo), where / f"OP{index:04d}.dcm", ExplicitVRLittleEndian, person
            )
            uids.append(visit.instance(index))
        rows += [(uid, str(patient.grade)) for uid in uids]
        told = [part for visit in visits for part in (visit.study, visit.series, visit.accession)]
        dates = [part for visit in visits for part in (visit.date, visit.time)]
        planted.append(person.planted(str(patient.grade), [*uids, *told], dates))
    _table(folder / "labels.csv", ("sop_instance_uid", "label"), rows)
    return Planted(tuple(planted), shared(site))


def _instance(person: Person, visit: Visit, index: int, photo: Photograph) -> Dataset:
    """One photograph, with what the modules of its class ask for and all that a careless export adds."""
    dataset = careless(person, visit, index)
    dataset.SOPClassUID = OphthalmicPhotography8BitImageStorage
    dataset.ReferencedImageSequence[0].ReferencedSOPClassUID = OphthalmicPhotography8BitImageStorage
    dataset.Modality, dataset.ImageType = "OP", ["ORIGINAL", "PRIMARY", "", "COLOR"]
    dataset.Manufacturer, dataset.ManufacturerModelName = "Made-up Optics", "Phantom 45"
    dataset.DeviceSerialNumber, dataset.SoftwareVersions = "7741", "1"
    dataset.PatientAge = f"{int(visit.date[:4]) - int(person.birth_date[:4]):03d}Y"
    dataset.AcquisitionDateTime = visit.date + visit.time
    dataset.ImageLaterality = photo.eye[0].upper()
    dataset.BurnedInAnnotation, dataset.LossyImageCompression = "NO", "00"
    # one frame all the same has what a sequence of frames is timed by (C.7.6.6, C.7.4.2)
    dataset.NumberOfFrames, dataset.FrameTime = 1, "0"
    dataset.FrameIncrementPointer = Tag("FrameTime")
    dataset.SynchronizationFrameOfReferenceUID = UID(f"{visit.series}.0")
    dataset.SynchronizationTrigger, dataset.AcquisitionTimeSynchronized = "NO TRIGGER", "N"
    study = dataset.RequestAttributesSequence[0].ReferencedStudySequence[0]
    study.ReferencedSOPClassUID = "1.2.840.10008.3.1.2.3.1"
    dataset.PatientOrientation = None
    dataset.AnatomicRegionSequence = [_code("5665001", "Retina")]
    dataset.AcquisitionDeviceTypeCodeSequence = [_code("409898007", "Fundus Camera")]
    dataset.IlluminationTypeCodeSequence = []
    dataset.LightPathFilterTypeStackCodeSequence = []
    dataset.ImagePathFilterTypeStackCodeSequence = []
    dataset.LensesCodeSequence = []
    dataset.DetectorType = None
    dataset.PatientEyeMovementCommanded = "NO"
    dataset.HorizontalFieldOfView = 45.0
    dataset.RefractiveStateSequence = []
    dataset.EmmetropicMagnification = None
    dataset.IntraOcularPressure = None
    dataset.PupilDilated = "NO"
    show(dataset, photo.pixels)
    return dataset


def _code(value: str, meaning: str) -> Dataset:
    return item(CodeValue=value, CodingSchemeDesignator="SCT", CodeMeaning=meaning)


def write_aptos(folder: Path, patients: Iterable[FundusPatient]) -> None:
    """In the layout of APTOS 2019 Blindness Detection: train.csv (id_code,diagnosis) and train_images/<id>.png.

    An id there is an image's and not a person's, so which two are of one person is lost here as well.
    """
    images = folder / "train_images"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for patient in patients:
        for index, photo in enumerate(patient.photographs):
            name = f"{patient.number:08x}{index:04x}"
            Image.fromarray(_framed(photo.pixels, patient.number)).save(images / f"{name}.png")
            rows.append((name, str(patient.grade)))
    _table(folder / "train.csv", ("id_code", "diagnosis"), rows)


def write_eyepacs(folder: Path, patients: Iterable[FundusPatient]) -> None:
    """In the layout of EyePACS' Diabetic Retinopathy Detection: trainLabels.csv (image,level), train/10_left.jpeg.

    One photograph of each eye, the first: that data set has no second visit.
    """
    images = folder / "train"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for patient in patients:
        for photo in patient.photographs:
            if photo.visit == 0:
                name = f"{patient.number + 10}_{photo.eye}"
                framed = Image.fromarray(_framed(photo.pixels, patient.number))
                framed.save(images / f"{name}.jpeg", quality=95, subsampling=0)
                rows.append((name, str(patient.grade)))
    _table(folder / "trainLabels.csv", ("image", "level"), rows)


def _framed(pixels: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    """Within the black frame of one of three cameras: real photographs come in many sizes."""
    side = pixels.shape[0]
    above, beside = ((0, side // 4), (side // 16, side // 3), (side // 8, side // 8))[number % 3]
    return np.pad(pixels, ((above, above), (beside, beside), (0, 0)))


def _table(path: Path, head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(head)
        writer.writerows(rows)
