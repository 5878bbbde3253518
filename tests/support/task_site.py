"""A site whose vault the product filled: chests, retinas, abdomens as series with masks and as volume files."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import Dataset

from agent.cli.main import main
from agent.domain import Volume
from deploy.phantoms.chest import chest_patients
from deploy.phantoms.chest import write_clinic as write_chests
from deploy.phantoms.chest_findings import FINDINGS
from deploy.phantoms.fundus import fundus_patients
from deploy.phantoms.fundus import write_clinic as write_eyes
from deploy.phantoms.head_files import nifti
from tests.support.ingest_site import ingest_site
from tests.support.instances import mr
from tests.support.segmentations import mask

RULES: Final = """
[rules]
colour_modalities = ["OP"]

[[segment]]
name = "liver"
code = "10200004"

[[segment]]
name = "mass"
code = "4147007"
"""
DEPTH, SIDE = 12, 64  # slices, and pixels of a slice, of an abdomen
MM: Final = (5.0, 1.5, 1.5)  # between slices, rows, columns


def abdomen_volume(seed: int) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """(k, h, w), feet to head, front to back, right to left: a body with liver (1), mass in it (2), spine, stomach.

    The liver is on the patient's right and reaches up, the spine is at the back, the stomach on the left: each axis
    shows whether it was turned.
    """
    rng = np.random.default_rng(seed)
    k, y, x = np.meshgrid(np.linspace(-1, 1, DEPTH), *2 * [np.linspace(-1, 1, SIDE)], indexing="ij")

    def ball(centre: tuple[float, float, float], radii: tuple[float, float, float]) -> NDArray[np.bool_]:
        found = sum(((at - c) / r) ** 2 for at, c, r in zip((k, y, x), centre, radii, strict=True))
        return np.asarray(found < 1)

    values = np.full(k.shape, 10.0)
    values[ball((0, 0, 0), (9, 0.75, 0.92))] = 300
    liver = ball((0.3, -0.1, -0.4), (0.8, 0.5 + 0.05 * rng.standard_normal(), 0.42))
    tumour = ball((0.3, -0.1 + 0.1 * rng.standard_normal(), -0.45), (0.3, 0.16, 0.16))
    values[liver], values[tumour] = 480, 640
    values[ball((0.2, -0.15, 0.45), (0.6, 0.3, 0.25))] = 180
    values[ball((0, 0.55, 0), (9, 0.16, 0.14))] = 900
    values[ball((-0.6, 0.3, -0.5), (0.3, 0.16, 0.12)) | ball((-0.5, 0.3, 0.5), (0.3, 0.16, 0.12))] = 560
    drawn = np.where(tumour, 2, np.where(liver, 1, 0)).astype(np.uint8)
    return (values + rng.normal(0, 12, k.shape)).clip(0).astype(np.int16), drawn


def abdomen_series(patient: str, number: int, values: NDArray[np.int16]) -> list[Dataset]:
    """The same as slices, from the feet up."""
    series = []
    for place, stored in enumerate(values):
        source = mr()
        source.PatientID, source.BodyPartExamined, source.SliceThickness = patient, "ABDOMEN", MM[0]
        source.ImageType = ["ORIGINAL", "PRIMARY", "OTHER"]
        source.PatientBirthDate, source.StudyDate, source.StudyTime = "19700101", "20200102", "101010"
        for keyword in ("StudyDescription", "SeriesDescription", "ProtocolName"):
            setattr(source, keyword, "")
        source.PixelSpacing = [MM[1], MM[2]]
        source.ImagePositionPatient, source.ImageOrientationPatient = [0, 0, MM[0] * place], [1, 0, 0, 0, 1, 0]
        source.StudyInstanceUID, source.SeriesInstanceUID = f"1.2.{number}", f"1.3.{number}"
        source.SOPInstanceUID = source.file_meta.MediaStorageSOPInstanceUID = f"1.5.{number}.{place}"
        source.FrameOfReferenceUID = f"1.4.{number}"
        source.PixelData = stored.tobytes()
        source.SmallestImagePixelValue, source.LargestImagePixelValue = int(stored.min()), int(stored.max())
        series.append(source)
    return series


def write_abdomens(folder: Path, numbers: Iterable[int], *, masked: bool = True) -> None:
    """A series of each patient A-n, and a DICOM SEG of liver and mass beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        values, drawn = abdomen_volume(number)
        series = abdomen_series(f"A-{number}", number, values)
        for place, one in enumerate(series):
            one.save_as(folder / f"a{number}-{place}.dcm", enforce_file_format=True)
        if masked:
            told = {"series_instance_uid": f"1.6.{number}", "sop_instance_uid": f"1.7.{number}"}
            mask(series, drawn, **told).save_as(folder / f"a{number}-mask.dcm", enforce_file_format=True)


def write_volume_files(folder: Path, numbers: Iterable[int]) -> None:
    """The abdomens of patients V-n as NIfTI, each stored in another orientation, and the list that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, codes in zip(numbers, ("RAS", "LPS", "PIL", "SRA"), strict=False):
        values, _ = abdomen_volume(number)
        as_ras = np.ascontiguousarray(values[:, ::-1, ::-1].transpose(2, 1, 0))
        nifti(folder / f"v{number}.nii.gz", Volume(as_ras, np.diag([MM[2], MM[1], MM[0], 1.0])), codes)
        rows.append((f"v{number}.nii.gz", f"V-{number}"))
    with (folder / "nifti.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("file", "patient_id"), *rows])


def write_chest_clinic(folder: Path, count: int, side: int = 96, visits: int = 1) -> Path:
    """Chests as CR and DX, and a table of their findings beside the folder, by accession, with its declaration."""
    patients = chest_patients(count, np.random.default_rng(3), side, visits)
    write_chests(folder, 0, patients, np.random.default_rng(4))
    found = [one for patient in patients for one in patient.findings]
    heads = [pydicom.dcmread(path, stop_before_pixels=True) for path in folder.rglob("*.dcm")]
    by_instance = {str(head.SOPInstanceUID): str(head.AccessionNumber) for head in heads}
    with (folder / "labels.csv").open(newline="") as stream:  # visit by visit, as the findings are
        accessions = [by_instance[row["sop_instance_uid"]] for row in csv.DictReader(stream)]
    table = folder.parent / "findings.csv"
    with table.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("accession", *FINDINGS, "age"))
        for at, (accession, findings) in enumerate(zip(accessions, found, strict=True)):
            known = ["" if (at + n) % 7 == 0 else int(one in findings) for n, one in enumerate(FINDINGS)]
            rows.writerow((accession, *known, 20 + 3 * at))
    columns = "".join(f'\n[columns.{one}]\nkind = "binary"\n' for one in FINDINGS)
    age = '\n[columns.age]\nkind = "number"\nunit = "a"\nlow = 0\nhigh = 120\n'
    table.with_suffix(".toml").write_text(f'[table]\nkey_column = "accession"\n{columns}{age}')
    return table


def write_eye_clinic(folder: Path, count: int, side: int = 96) -> None:
    """Colour photographs of both eyes, in one study of each patient."""
    write_eyes(folder, 1, fundus_patients(count, np.random.default_rng(5), side), np.random.default_rng(6))


def task_site(folder: Path, rules: str = RULES) -> Path:
    """The home of a site that takes all of these in, and an empty folder ``input`` beside it."""
    home = ingest_site(folder, "CR", "DX", "OP", "MR")
    (home / "ingest.toml").write_text(rules)
    return home


def ingest(home: Path, folder: Path) -> None:
    """Have the product take a folder in."""
    assert main(["--home", str(home), "ingest", "--folder", str(folder)]) == 0
