"""Made-up persons, and every string about them that a careless export leaves in a file."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, FileDataset
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID

ISSUER: Final = "LAZARET DEMO"
_SURNAMES: Final = (
    *(
        "Abernathy",
        "Blomqvist",
        "Castellano",
        "Drummond",
        "Echeverria",
        "Fitzgerald",
        "Grünewald",
        "Holmström",
    ),
    *("Iwanowska", "Johannsen", "Kowalczyk", "Lindqvist", "Montgomery", "Nakamura", "Oyelaran", "Pettersen"),
    *(
        "Quintanilla",
        "Rasmussen",
        "Sørensen",
        "Thibodeaux",
        "Ullmann",
        "Villanueva",
        "Wojciechowski",
        "Zimmermann",
    ),
)
_GIVEN: Final = (
    *("Annabelle", "Bartholomew", "Clementine", "Desmond", "Eleonora", "Frederick", "Gwendolyn", "Horatio"),
    *("Isadora", "Jeremiah", "Katharina", "Leopold", "Marguerite", "Nathaniel", "Ottoline", "Percival"),
)
_STREETS: Final = (
    "Larchmont Avenue",
    "Kastanienallee",
    "Harbourside Row",
    "Rue des Tilleuls",
    "Old Mill Lane",
)
_CITIES: Final = ("Westerbrook", "Nordhaven", "Saint-Avold", "Millbridge", "Castelvecchio")
_PHYSICIANS: Final = (
    "Hathersage^Rosalind",
    "Brandenburg^Wilhelm",
    "Okonkwo-Reyes^Ifeoma",
    "Delacroix^Armand",
)
_HOSPITALS: Final = (
    "St. Cuthbert Infirmary",
    "Klinikum Eichenwald",
    "Hôpital du Vieux-Port",
    "Mercy Lakeside",
)


@dataclass(frozen=True, slots=True)
class PlantedPatient:
    """One made-up person and every string about them that is in the files."""

    patient_id: str
    label: str
    strings: frozenset[str]  # names, numbers, address, UIDs
    dates: frozenset[str]  # eight or six digits: inside a long number they may turn up by chance


@dataclass(frozen=True, slots=True)
class Planted:
    """What a leak test looks for."""

    patients: tuple[PlantedPatient, ...]
    shared: frozenset[str] = field(default_factory=frozenset)  # hospital, physicians, device

    @property
    def strings(self) -> frozenset[str]:
        """Every planted string that cannot turn up by chance."""
        return self.shared.union(*(p.strings for p in self.patients))

    @property
    def dates(self) -> frozenset[str]:
        """Every planted date and time."""
        return frozenset[str]().union(*(p.dates for p in self.patients))


def shared(site: int) -> frozenset[str]:
    """The strings of a hospital that are in the files of all its patients."""
    names = {part for p in _PHYSICIANS for part in p.split("^")}
    return frozenset(names | {_HOSPITALS[site % len(_HOSPITALS)], f"SCANCAM-{site:02d}-7741", "Ward Telemetry B"})


@dataclass(frozen=True, slots=True)
class Person:
    """A made-up patient with one study."""

    site: int
    patient_id: str
    name: str  # family^given
    birth_date: str
    sex: str
    address: str
    phone: str
    accession: str
    study_date: str
    study_time: str
    physician: str
    uid_root: str

    @classmethod
    def draw(cls, site: int, number: int, rng: np.random.Generator) -> Person:
        """One person; the number makes the identifiers unique inside a site."""
        name = f"{_SURNAMES[rng.integers(len(_SURNAMES))]}^{_GIVEN[rng.integers(len(_GIVEN))]}"
        birth = datetime.date(1935, 1, 1) + datetime.timedelta(days=int(rng.integers(25_000)))
        study = datetime.date(2021, 1, 4) + datetime.timedelta(days=int(rng.integers(1_400)))
        street = f"{rng.integers(2, 390)} {_STREETS[rng.integers(len(_STREETS))]}"
        return cls(
            site=site,
            patient_id=f"MRN{site}-{rng.integers(100, 999)}-{number:05d}",
            name=name,
            birth_date=birth.strftime("%Y%m%d"),
            sex="FM"[rng.integers(2)],
            address=f"{street}, {_CITIES[rng.integers(len(_CITIES))]}",
            phone=f"+44 20 7946 {rng.integers(1000, 9999)}",
            accession=f"ACC{site}{rng.integers(1000, 9999)}{number:05d}",
            study_date=study.strftime("%Y%m%d"),
            study_time=f"{rng.integers(7, 19):02d}{rng.integers(60):02d}{rng.integers(60):02d}",
            physician=_PHYSICIANS[rng.integers(len(_PHYSICIANS))],
            uid_root=f"1.2.826.0.1.3680043.8.498.{site + 1}.{number + 1}.{rng.integers(10**9, 10**10)}",
        )

    def planted(self, label: str, strings: Iterable[str], dates: Iterable[str] = ()) -> PlantedPatient:
        """The strings about this person in the files, and those that are told: UIDs, later dates."""
        found = {self.patient_id, self.address, self.phone, self.accession, *self.name.split("^"), *strings}
        found |= {f"{self.uid_root}.1", f"{self.uid_root}.2", self.uid_root, f"ALT-{self.patient_id}"}
        own = {self.birth_date, self.study_date, self.study_time, *dates}
        return PlantedPatient(self.patient_id, label, frozenset(found), frozenset(own))


@dataclass(frozen=True, slots=True)
class Visit:
    """One study of a person."""

    study: str  # UID
    series: str  # UID; those of its instances begin with it
    date: str
    time: str
    accession: str

    @classmethod
    def of(cls, person: Person) -> Visit:
        """The person's own, the first one."""
        root = person.uid_root
        return cls(f"{root}.1", f"{root}.2", person.study_date, person.study_time, person.accession)

    @classmethod
    def later(cls, person: Person, number: int, rng: np.random.Generator) -> Visit:
        """Visit 1, 2 and so on, about a year after the one before."""
        first = datetime.datetime.strptime(person.study_date, "%Y%m%d")
        day = first + datetime.timedelta(days=number * 365 + int(rng.integers(-40, 40)))
        root = f"{person.uid_root}.{10 + number}"
        time = f"{rng.integers(7, 19):02d}{rng.integers(60):02d}{rng.integers(60):02d}"
        return cls(f"{root}.1", f"{root}.2", day.strftime("%Y%m%d"), time, f"{person.accession}V{number}")

    def instance(self, index: int) -> str:
        """The SOP Instance UID of one of its images, from 0."""
        return f"{self.series}.{index + 1}"


def item(**values: object) -> Dataset:
    """A data set, or an item of a sequence, of keywords and values."""
    made = Dataset()
    for keyword, value in values.items():
        setattr(made, keyword, value)
    return made


def careless(person: Person, visit: Visit, index: int) -> Dataset:
    """What a careless export says of the person and the visit, all over an instance."""
    spoken = person.name.replace("^", " ")
    dataset = item(
        SpecificCharacterSet="ISO_IR 192",
        SOPInstanceUID=UID(visit.instance(index)),
        StudyInstanceUID=UID(visit.study),
        SeriesInstanceUID=UID(visit.series),
        StudyDate=visit.date,
        ContentDate=visit.date,
        StudyTime=visit.time,
        ContentTime=visit.time,
        AccessionNumber=visit.accession,
        ReferringPhysicianName=person.physician,
        InstitutionName=_HOSPITALS[person.site % len(_HOSPITALS)],
        StationName=f"SCANCAM-{person.site:02d}-7741",
        PatientName=person.name,
        PatientID=person.patient_id,
        IssuerOfPatientID=ISSUER,
        PatientBirthDate=person.birth_date,
        PatientSex=person.sex,
        PatientAddress=person.address,
        PatientTelephoneNumbers=person.phone,
        StudyID=visit.accession[-8:],
        SeriesNumber="1",
        InstanceNumber=str(index + 1),
        StudyDescription=f"Follow-up of {spoken}",
        ImageComments=f"{spoken}, born {person.birth_date}, lives at {person.address}",
    )
    dataset.OtherPatientIDsSequence = [item(PatientID=f"ALT-{person.patient_id}", TypeOfPatientID="TEXT")]
    step = item(ScheduledProcedureStepDescription=f"control for {spoken}", RequestingPhysician=person.physician)
    step.ReferencedStudySequence = [item(ReferencedSOPInstanceUID=UID(visit.study))]
    dataset.RequestAttributesSequence = [step]
    dataset.ReferencedImageSequence = [
        item(ReferencedSOPInstanceUID=UID(visit.instance(index)), PatientName=person.name)
    ]
    private = dataset.private_block(0x0029, "WARD NOTES", create=True)
    private.add_new(0x01, "PN", person.name)
    private.add_new(0x02, "LO", "Ward Telemetry B")
    return dataset


def show(dataset: Dataset, picture: NDArray[np.uint8] | NDArray[np.uint16]) -> None:
    """Put an image (h, w) or RGB (h, w, 3) into an instance, uncompressed."""
    rows, columns = picture.shape[:2]
    bits = 8 * picture.dtype.itemsize
    for keyword, value in (("Rows", rows), ("Columns", columns), ("BitsAllocated", bits), ("BitsStored", bits)):
        setattr(dataset, keyword, value)
    dataset.HighBit, dataset.PixelRepresentation = bits - 1, 0
    dataset.SamplesPerPixel = 3 if picture.ndim == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if picture.ndim == 3 else "MONOCHROME2"
    if picture.ndim == 3:
        dataset.PlanarConfiguration = 0
    data = picture.astype(picture.dtype.newbyteorder("<")).tobytes()
    dataset.PixelData = data + b"\0" * (len(data) % 2)


def write(dataset: Dataset, path: Path, syntax: UID, person: Person) -> None:
    """As a Part 10 file, with the sender's name in its file meta information."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = syntax
    meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    meta.SourceApplicationEntityTitle = f"SCANCAM-{person.site:02d}-7741"[:16]
    FileDataset(str(path), dataset, preamble=b"\0" * 128, file_meta=meta).save_as(path, enforce_file_format=True)
