"""Makes the torture set: real headers that pydicom carries, with made patients' identifiers in every place.

``python -m tests.torture make --out DIR`` writes the files, ``plants.json`` (what is where) and ``key.json`` (what a
good de-identification keeps). No binary is committed.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pydicom
from pydicom import Dataset, config
from pydicom.data import get_testdata_file
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

from tests.torture.sower import Plant, Sower

PATIENTS: Final = {"MR": 0, "CT": 1}  # three made patients: of the MR files, of the CT files, of all others


@dataclass(frozen=True, slots=True)
class Patient:
    """A made person, the same in all files of one of the three."""

    family: str
    number: str
    born: str
    study: str  # Study Instance UID


_PEOPLE: Final = (
    Patient("Zwiebelquist", "PX84629173", "19430817", "2.999.7401.1943"),
    Patient("Ostrowarczyk", "PX55310928", "19510226", "2.999.7402.1951"),
    Patient("Brunnhagegard", "PX20774461", "19381104", "2.999.7403.1938"),
)


@dataclass(frozen=True, slots=True)
class Made:
    """One file of the set."""

    name: str
    data: bytes
    plants: tuple[Plant, ...]
    image: bool  # a picture that can be de-identified and used; anything else may be refused
    box: tuple[int, int, int, int] | None = None  # top, left, bottom, right of burned-in text
    study: str = ""  # pictures of one study share it


def bundled(name: str) -> pydicom.FileDataset:
    """A file of pydicom's own, parsed."""
    path = get_testdata_file(name, download=False)
    if not isinstance(path, str):
        raise FileNotFoundError(f"pydicom was installed without {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pydicom.dcmread(path)


def original(dataset: Dataset) -> Dataset:
    """Mark a picture as the scanner's own, which is what a hospital's rules let in."""
    rest = list(dataset.get("ImageType") or [])[2:]
    dataset.ImageType = ["ORIGINAL", "PRIMARY", *(str(v) for v in rest if str(v).strip())]
    return dataset


def person(modality: str) -> Patient:
    """Who is on the files of a modality."""
    return _PEOPLE[PATIENTS.get(modality, 2)]


def dress(dataset: Dataset, sower: Sower) -> None:
    """Give a file its patient, and instance, series and study UIDs to be told apart by."""
    who = person(str(dataset.get("Modality", "")))
    dataset.PatientName = f"{sower.known('PatientName', who.family)}^Testperson"
    dataset.PatientID = sower.known("PatientID", who.number)
    dataset.PatientBirthDate = sower.known("PatientBirthDate", who.born)
    dataset.StudyInstanceUID = sower.known("StudyInstanceUID", who.study, "rekeyed")
    dataset.SeriesInstanceUID = sower.uid("SeriesInstanceUID")
    dataset.SOPInstanceUID = sower.uid("SOPInstanceUID")
    dataset.AccessionNumber = sower.code("AccessionNumber")
    dataset.StudyDate = sower.day("StudyDate")
    dataset.ReferringPhysicianName = sower.name("ReferringPhysicianName")
    dataset.SeriesDescription = "AX T1 SE"  # harmless: see the answer key


def blank(dataset: Dataset) -> Dataset:
    """Remove a bundled file's own identifiers, so that every identifier in the set is one that was planted."""
    for element in list(dataset):
        if element.VR in ("DA", "DT") or element.keyword in _OWN or element.tag.is_private:
            del dataset[element.tag]
    return dataset


_OWN: Final = frozenset(
    {"OtherPatientIDs", "InstitutionName", "StationName", "StudyID", "DeviceSerialNumber", "OperatorsName"}
    | {"PerformingPhysicianName", "PhysiciansOfRecord", "NameOfPhysiciansReadingStudy", "PatientComments"}
    | {"DataSetTrailingPadding", "InstitutionAddress", "StudyDescription", "ImageComments", "ProtocolName"}
)


def encode(dataset: Dataset) -> bytes:
    """The bytes of a file in its transfer syntax; values that the standard forbids are written as they are."""
    meta = getattr(dataset, "file_meta", None)
    if meta is None:
        dataset.file_meta = meta = FileMetaDataset()
    if "TransferSyntaxUID" not in meta:
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


Maker = Callable[[], Made]


def carrier(
    name: str, base: str, plant: Callable[[Dataset, Sower], bytes | None], *, image: bool = True
) -> Callable[[], Made]:
    """A maker of one file: a real header, a patient, and what ``plant`` puts in. It may return the bytes itself."""

    def make() -> Made:
        sower, dataset = Sower(name), bundled(base)
        blank(dataset)
        if image:
            original(dataset)
        dress(dataset, sower)
        data = plant(dataset, sower)
        return Made(name, data if data is not None else encode(dataset), tuple(sower.plants), image)

    return make


@cache
def torture(*, pictures: bool = True) -> tuple[Made, ...]:
    """The whole set, the same at every start."""
    from tests.torture import pictures as burned  # the makers build on this module
    from tests.torture import streams, tagplants

    with unchecked():
        made = [make() for make in (*tagplants.MAKERS, *streams.MAKERS)]
        return tuple(made + (burned.burned_in() if pictures else []))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let pydicom read and write values that the standard forbids, and leave UN alone: files do both."""
    settings, un = config.settings, config.replace_un_with_known_vr
    before = (settings.reading_validation_mode, settings.writing_validation_mode)
    settings.reading_validation_mode = settings.writing_validation_mode = config.IGNORE
    config.replace_un_with_known_vr = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        settings.reading_validation_mode, settings.writing_validation_mode = before
        config.replace_un_with_known_vr = un


def write(folder: Path, made: tuple[Made, ...]) -> None:
    """Write the files and the list of plants."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in made:
        (folder / file.name).write_bytes(file.data)
    plants = [asdict(plant) for file in made for plant in file.plants]
    (folder.parent / f"{folder.name}-plants.json").write_text(json.dumps(plants, indent=1, ensure_ascii=False))
