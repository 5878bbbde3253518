"""A made-up hospital: handwritten digits as the images of made-up patients, written as real DICOM.

The digits are those of scikit-learn (UCI Optical Recognition of Handwritten Digits, 1797 images of 8x8),
so every image was drawn by a person once, and a patient's "finding" is the digit. Each image belongs to
one patient at one site, or to the public set, or to the held-out set, never to two of them.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian, SecondaryCaptureImageStorage
from scipy import ndimage
from sklearn.datasets import load_digits

from deploy.phantoms.persons import ISSUER, Person, Planted, PlantedPatient, Visit, careless, shared, show, write

__all__ = [
    "CLASSES",
    "ISSUER",
    "PUBLIC_IMAGES",
    "Digits",
    "Planted",
    "PlantedPatient",
    "Split",
    "split",
    "upsample",
    "write_hospital",
    "write_new_patients",
]

CLASSES: Final = 10
PUBLIC_IMAGES: Final = 150
_SPLIT_SEED: Final = 1797  # the split is part of the phantom, the same for everybody
_SCALE: Final = 4  # 8x8 -> 32x32
_NEW: Final = 10_000  # numbers of new patients begin here: no hospital has so many


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
        person = Person.draw(site, number, rng)
        where = folder / f"{person.name.split('^', maxsplit=1)[0]}_{person.patient_id}" / person.accession
        where.mkdir(parents=True, exist_ok=True)
        first = number * images_per_patient
        label = str(int(digits.labels[first]))
        uids = []
        for index in range(images_per_patient):
            dataset = _instance(person, index, pictures[first + index])
            syntax = ImplicitVRLittleEndian if (number + index) % 3 == 0 else ExplicitVRLittleEndian
            write(dataset, where / f"IM{index:04d}.dcm", syntax, person)
            uids.append(str(dataset.SOPInstanceUID))
            rows.append((uids[-1], label))
        planted.append(person.planted(label, uids))
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("sop_instance_uid", "label"))
        writer.writerows(rows)
    return Planted(tuple(planted), shared(site))


def write_new_patients(folder: Path, site: int, digits: Digits, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Write each digit as the one image of a patient who is new to the hospital: ``new-01.dcm`` and so on.

    Args:
        site: 0-based; its other patients are those of :func:`write_hospital`.
        rng: draws the persons.
    Returns:
        SOP Instance UID and label of each, as in ``labels.csv``.
    """
    folder.mkdir(parents=True)
    rows = []
    for index, picture in enumerate(upsample(digits.images)):
        person = Person.draw(site, _NEW + index, rng)
        dataset = _instance(person, 0, picture)
        write(dataset, folder / f"new-{index + 1:02d}.dcm", ExplicitVRLittleEndian, person)
        rows.append((str(dataset.SOPInstanceUID), str(int(digits.labels[index]))))
    return rows


def _instance(person: Person, index: int, picture: NDArray[np.uint8]) -> Dataset:
    """One secondary capture, with all that a careless export has in it."""
    dataset = careless(person, Visit.of(person), index)
    dataset.SOPClassUID = SecondaryCaptureImageStorage
    dataset.ReferencedImageSequence[0].ReferencedSOPClassUID = SecondaryCaptureImageStorage
    dataset.ImageType = ["DERIVED", "PRIMARY"]
    dataset.Modality, dataset.ConversionType = "OT", "WSD"
    show(dataset, picture)
    return dataset
