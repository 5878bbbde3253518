"""A made-up hospital: handwritten digits as the pictures of made-up patients, written as real DICOM.

The digits are those of scikit-learn (UCI Optical Recognition of Handwritten Digits, 1797 images of 8x8),
so every picture was drawn by a person once, and a patient's "finding" is the digit. Each image belongs to
one patient at one site, or to the public set, or to the held-out set, never to two of them.
"""

from __future__ import annotations

import csv
import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, FileDataset
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, ImplicitVRLittleEndian, SecondaryCaptureImageStorage
from scipy import ndimage
from sklearn.datasets import load_digits

CLASSES: Final = 10
PUBLIC_IMAGES: Final = 150
ISSUER: Final = "LAZARET DEMO"
_SPLIT_SEED: Final = 1797  # the split is part of the phantom, the same for everybody
_SCALE: Final = 4  # 8x8 -> 32x32

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


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Some of the digits."""

    images: NDArray[np.float32]  # (n, 8, 8), in [0, 1], read-only
    labels: NDArray[np.int64]  # (n,), 0 to 9, read-only

    def __post_init__(self) -> None:
        """Shared by everybody, so nobody may write to them."""
        self.images.setflags(write=False)
        self.labels.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Who has which digits. No image is in two places."""

    sites: tuple[Digits, ...]  # patient i of a site has images [i * m, (i + 1) * m), m images_per_patient
    public: Digits
    held_out: Digits


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


def split(sites: int, patients: int, images_per_patient: int, public: int = PUBLIC_IMAGES) -> Split:
    """Deal the digits out: public first, then patients of alternating classes, the rest is held out.

    Raises:
        ValueError: there are not that many digits.
    """
    if min(sites, patients, images_per_patient) < 1 or public < 0:
        raise ValueError("sites, patients and images_per_patient must be positive")
    data = load_digits()
    images, labels = (data.images / 16.0).astype(np.float32), data.target.astype(np.int64)
    rng = np.random.default_rng(_SPLIT_SEED)
    pools = [list(rng.permutation(np.flatnonzero(labels == c))) for c in range(CLASSES)]
    for_public = [_deal(pools, i % CLASSES, 1)[0] for i in range(public)]
    for_sites: list[list[int]] = [[] for _ in range(sites)]
    for i in range(sites * patients):
        # every site goes through the classes at its own offset
        site, turn = i % sites, i // sites
        for_sites[site] += _deal(pools, (turn + site) % CLASSES, images_per_patient)
    rest = sorted(i for pool in pools for i in pool)

    def take(chosen: list[int]) -> Digits:
        return Digits(images[chosen], labels[chosen])

    return Split(tuple(take(s) for s in for_sites), take(for_public), take(rest))


def _deal(pools: list[list[int]], wanted: int, count: int) -> list[int]:
    """``count`` images of one class: the wanted one, or else the one with most images left."""
    pool = pools[wanted]
    if len(pool) < count:
        pool = max(pools, key=len)
    if len(pool) < count:
        raise ValueError("there are not enough digits for so many patients")
    return [int(pool.pop()) for _ in range(count)]


def upsample(images: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(n, 8, 8) in [0, 1] to (n, 32, 32) uint8, by cubic splines on pixel areas."""
    large: NDArray[np.float32] = ndimage.zoom(images, (1, _SCALE, _SCALE), order=3, mode="nearest", grid_mode=True)
    pictures: NDArray[np.uint8] = np.rint(np.clip(large, 0.0, 1.0) * 255.0).astype(np.uint8)
    return pictures


def write_hospital(
    folder: Path,
    site: int,
    sites: int,
    patients: int,
    images_per_patient: int,
    rng: np.random.Generator,
) -> Planted:
    """Write one site's share of the digits as DICOM, one folder for each patient, and its label list.

    Args:
        site: 0-based, below ``sites``.
        rng: draws the persons; the digits do not depend on it.
    Returns:
        Every identifying string that was written.
    """
    if not 0 <= site < sites:
        raise ValueError("site must be at least 0 and below sites")
    digits = split(sites, patients, images_per_patient).sites[site]
    pictures = upsample(digits.images)
    folder.mkdir(parents=True, exist_ok=True)
    planted, rows = [], []
    for number in range(patients):
        person = _Person.draw(site, number, rng)
        where = folder / f"{person.name.split('^', maxsplit=1)[0]}_{person.patient_id}" / person.accession
        where.mkdir(parents=True, exist_ok=True)
        first = number * images_per_patient
        label = str(int(digits.labels[first]))
        uids = []
        for index in range(images_per_patient):
            dataset = _instance(person, index, pictures[first + index])
            syntax = ImplicitVRLittleEndian if (number + index) % 3 == 0 else ExplicitVRLittleEndian
            _write(dataset, where / f"IM{index:04d}.dcm", syntax, person)
            uids.append(str(dataset.SOPInstanceUID))
            rows.append((uids[-1], label))
        planted.append(person.planted(label, uids))
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("sop_instance_uid", "label"))
        writer.writerows(rows)
    return Planted(tuple(planted), _shared(site))


def _shared(site: int) -> frozenset[str]:
    names = {part for p in _PHYSICIANS for part in p.split("^")}
    return frozenset(names | {_HOSPITALS[site % len(_HOSPITALS)], f"SCANCAM-{site:02d}-7741", "Ward Telemetry B"})


@dataclass(frozen=True, slots=True)
class _Person:
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
    def draw(cls, site: int, number: int, rng: np.random.Generator) -> _Person:
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

    def planted(self, label: str, uids: list[str]) -> PlantedPatient:
        """The strings about this person in the files."""
        strings = {self.patient_id, self.address, self.phone, self.accession, *self.name.split("^"), *uids}
        strings |= {f"{self.uid_root}.1", f"{self.uid_root}.2", self.uid_root, f"ALT-{self.patient_id}"}
        return PlantedPatient(
            self.patient_id,
            label,
            frozenset(strings),
            frozenset({self.birth_date, self.study_date, self.study_time}),
        )


def _item(**values: object) -> Dataset:
    item = Dataset()
    for keyword, value in values.items():
        setattr(item, keyword, value)
    return item


def _instance(person: _Person, index: int, picture: NDArray[np.uint8]) -> Dataset:
    """One secondary capture, with all that a careless export has in it."""
    spoken = person.name.replace("^", " ")
    dataset = _item(
        SpecificCharacterSet="ISO_IR 192",
        SOPClassUID=SecondaryCaptureImageStorage,
        SOPInstanceUID=UID(f"{person.uid_root}.2.{index + 1}"),
        StudyInstanceUID=UID(f"{person.uid_root}.1"),
        SeriesInstanceUID=UID(f"{person.uid_root}.2"),
        ImageType=["DERIVED", "PRIMARY"],
        Modality="OT",
        ConversionType="WSD",
        StudyDate=person.study_date,
        ContentDate=person.study_date,
        StudyTime=person.study_time,
        ContentTime=person.study_time,
        AccessionNumber=person.accession,
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
        StudyID=person.accession[-8:],
        SeriesNumber="1",
        InstanceNumber=str(index + 1),
        StudyDescription=f"Follow-up of {spoken}",
        ImageComments=f"{spoken}, born {person.birth_date}, lives at {person.address}",
    )
    dataset.OtherPatientIDsSequence = [_item(PatientID=f"ALT-{person.patient_id}", TypeOfPatientID="TEXT")]
    step = _item(ScheduledProcedureStepDescription=f"control for {spoken}", RequestingPhysician=person.physician)
    step.ReferencedStudySequence = [_item(ReferencedSOPInstanceUID=UID(f"{person.uid_root}.1"))]
    dataset.RequestAttributesSequence = [step]
    dataset.ReferencedImageSequence = [
        _item(
            ReferencedSOPClassUID=SecondaryCaptureImageStorage,
            ReferencedSOPInstanceUID=UID(f"{person.uid_root}.2.{index + 1}"),
            PatientName=person.name,
        )
    ]
    private = dataset.private_block(0x0029, "WARD NOTES", create=True)
    private.add_new(0x01, "PN", person.name)
    private.add_new(0x02, "LO", "Ward Telemetry B")
    rows, columns = picture.shape
    for keyword, value in (("Rows", rows), ("Columns", columns), ("BitsAllocated", 8), ("BitsStored", 8)):
        setattr(dataset, keyword, value)
    dataset.HighBit, dataset.SamplesPerPixel, dataset.PixelRepresentation = 7, 1, 0
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.PixelData = picture.tobytes()
    return dataset


def _write(dataset: Dataset, path: Path, syntax: UID, person: _Person) -> None:
    """As a Part 10 file, with the sender's name in its file meta information."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = syntax
    meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    meta.SourceApplicationEntityTitle = f"SCANCAM-{person.site:02d}-7741"[:16]
    FileDataset(str(path), dataset, preamble=b"\0" * 128, file_meta=meta).save_as(path, enforce_file_format=True)
