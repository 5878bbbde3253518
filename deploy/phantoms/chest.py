"""Made-up patients of a chest clinic: frontal radiographs, in memory and as DICOM (Computed and Digital Radiography).

Ribs, heart, lungs, vessels, clavicles and spine are the person's and stay. What is found
(:mod:`deploy.phantoms.chest_findings`) is drawn anew at every visit, whoever it is, and so are the patient's place
under the tube and the exposure. Lengths are in half sides of the image, x to the right, y down.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import tau
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.uid import (
    UID,
    ComputedRadiographyImageStorage,
    DigitalXRayImageStorageForPresentation,
    ExplicitVRLittleEndian,
)

from deploy.phantoms.chest_findings import (
    FINDINGS,
    Finding,
    Floats,
    Shown,
    conditions,
    domes_with,
    heart_with,
    label_of,
    report,
    report_words,
    shadows,
    soft,
)
from deploy.phantoms.persons import Person, Planted, Visit, careless, item, shared, show, write

__all__ = [
    "FINDINGS",
    "ChestPatient",
    "Finding",
    "Thorax",
    "chest_patients",
    "conditions",
    "label_of",
    "radiograph",
    "report",
    "report_words",
    "stacked",
    "thorax",
    "write_clinic",
]

_RIBS: Final = 8
_WAVES: Final = 12
_VESSELS: Final = 7  # of a lung


@dataclass(frozen=True, slots=True, eq=False)
class Thorax:
    """What of a radiograph is the person's. Pairs are of the left and the right of the image."""

    body: Floats  # (2,) half width and half height
    lungs: Floats  # (2, 4) centre x and y, half width, half height
    domes: Floats  # (2,) where the diaphragm's top is
    heart: Floats  # (4,) centre x and y, half width, half height
    tilt: float  # of the heart, radians
    spine: Floats  # (3,) half width, bend, place
    ribs: Floats  # (2, _RIBS, 3) where each begins at the spine, slope, bend
    thick: float  # of a rib
    clavicles: Floats  # (2, 2) height and slope
    vessels: Floats  # (2, _VESSELS, 4) from each hilum: angle, bend, length, half width where it begins
    waves: Floats  # (w, 4) grain of the lungs: two frequencies, phase, height


@dataclass(frozen=True, slots=True, eq=False)
class ChestPatient:
    """One made-up person with one radiograph for each visit."""

    number: int  # from 0; a name for the person
    thorax: Thorax
    radiographs: tuple[NDArray[np.uint8], ...]  # (s, s) each, bright is dense
    findings: tuple[frozenset[Finding], ...]  # of each visit

    def __post_init__(self) -> None:
        """Findings for each radiograph."""
        if not len(self.radiographs) == len(self.findings) >= 1:
            raise ValueError("a patient has a radiograph, and findings for each")


def thorax(rng: np.random.Generator) -> Thorax:
    """Draw a person. Nothing here depends on a finding."""
    middle, wide = rng.normal(0.44, 0.035), rng.normal(0.32, 0.03)
    tall, spacing = rng.normal(0.66, 0.06), rng.normal(0.175, 0.026)
    lungs = np.array([(side * middle, rng.normal(-0.05, 0.03), wide, tall) for side in (-1, 1)])
    tops = -0.82 + rng.normal(0, 0.06) + spacing * np.arange(_RIBS)
    slope, bend = rng.normal(-0.25, 0.15), rng.normal(0.75, 0.22)
    ribs = np.stack([tops, np.full(_RIBS, slope), bend * np.linspace(0.7, 1.2, _RIBS)], axis=-1)
    fan = np.linspace(-1.25, 1.25, _VESSELS) + rng.normal(0, 0.13, (2, _VESSELS))
    branch = [
        fan,
        rng.normal(0, 0.7, fan.shape),
        rng.uniform(0.35, 0.75, fan.shape),
        rng.uniform(0.02, 0.04, fan.shape),
    ]
    waves = [*rng.normal(0, 11, (2, _WAVES)), rng.uniform(0, tau, _WAVES), rng.uniform(0.005, 0.02, _WAVES)]
    return Thorax(
        body=np.array((middle + wide + rng.uniform(0.10, 0.22), rng.normal(1.5, 0.1)), np.float32),
        lungs=(lungs + rng.normal(0, 0.018, (2, 4))).astype(np.float32),
        domes=(rng.normal(0.46, 0.06) + np.array((0.0, 0.05)) + rng.normal(0, 0.02, 2)).astype(np.float32),
        heart=rng.normal((0.14, 0.28, 0.34, 0.30), (0.03, 0.03, 0.045, 0.03)).astype(np.float32),
        tilt=float(rng.normal(0.5, 0.15)),
        spine=rng.normal((0.10, 0.0, 0.0), (0.018, 0.05, 0.03)).astype(np.float32),
        ribs=(ribs[None] + rng.normal(0, (0.016, 0.05, 0.06), (2, _RIBS, 3))).astype(np.float32),
        thick=float(rng.uniform(0.022, 0.04)),
        clavicles=rng.normal((-0.78, 0.22), (0.04, 0.10), (2, 2)).astype(np.float32),
        vessels=np.stack(branch, axis=-1).astype(np.float32),
        waves=np.stack(waves, axis=1).astype(np.float32),
    )


def radiograph(
    person: Thorax, findings: Collection[Finding] | Shown, size: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """One radiograph (size, size), bright is dense: the person, findings anew, another position and exposure.

    ``findings``: with how much of each shows, else all of it. Places and exposure do not depend on that.
    """
    label_of(findings)  # refuses what is none
    shown = findings if isinstance(findings, Mapping) else dict.fromkeys(findings, 1.0)
    if not size >= 16:
        raise ValueError("a radiograph of findings has 16 pixels a side or more")
    sides = rng.integers(0, 2, len(FINDINGS))
    person = replace(
        person,
        heart=heart_with(shown, person.heart, rng),
        domes=domes_with(shown, person.domes, int(sides[FINDINGS.index("atelectasis")]), rng),
    )
    finer = 4 if size <= 32 else 2 if size <= 256 else 1
    x, y = _grid(size * finer, rng)
    edge = 2.0 / size  # soft by a pixel of the result
    air, floor = _lungs(person, x, y, edge)
    inside = np.maximum(air[0], air[1])
    filled = shadows(shown, person.lungs, person.domes, sides, (x, y), rng)
    # what takes the place of the air also hides what stood out against it: the silhouette sign
    clear = inside * (1 - filled)
    body = _oval(x, y, (0, 0.3, *person.body), 0, 2 * edge)
    picture = 0.06 + 0.52 * body
    picture -= 0.36 * clear * (1 + _texture(person, x, y))
    picture += 0.10 * clear * _vessels(person, x, y, edge)
    spine = person.spine[0] - np.abs(x - person.spine[2] - person.spine[1] * y**2)
    picture += 0.20 * soft(spine, 2 * edge)
    above = soft(floor + 0.04 - y, 0.16)  # the heart lies on the diaphragm, and what is below it is as dense
    picture += 0.30 * _oval(x, y, tuple(person.heart), person.tilt, 2 * edge) * (0.4 + 0.6 * clear) * above
    picture += 0.10 * body * _bones(person, x, y, edge) * (0.35 + 0.65 * inside)
    picture = (picture * rng.normal(1, 0.05) + rng.normal(0, 0.02)).astype(np.float32)
    small = picture.reshape(size, finer, size, finer).mean(axis=(1, 3))
    small = small + rng.normal(0, 0.010, small.shape)
    levels: NDArray[np.uint8] = np.rint(np.clip(small, 0, 1) * 255).astype(np.uint8)
    return levels


def _grid(size: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Where in the person every pixel lies: nobody stands twice in the same way."""
    line = ((np.arange(size, dtype=np.float32) + 0.5) * 2 / size - 1).astype(np.float32)
    x, y = np.meshgrid(line, line)
    turn, scale = rng.normal(0, 0.02), rng.normal(1, 0.015)
    across, down = rng.normal(0, 0.02, 2)
    cos, sin = np.float32(np.cos(turn) / scale), np.float32(np.sin(turn) / scale)
    return cos * x - sin * y + np.float32(across), sin * x + cos * y + np.float32(down)


def _oval(x: Floats, y: Floats, place: tuple[float, ...], tilt: float, width: float) -> Floats:
    """An ellipse: centre x and y, half width, half height."""
    across, down = x - place[0], y - place[1]
    u, v = np.cos(tilt) * across + np.sin(tilt) * down, np.cos(tilt) * down - np.sin(tilt) * across
    return soft((1 - np.sqrt((u / place[2]) ** 2 + (v / place[3]) ** 2)) * min(place[2:]), width)


def _lungs(person: Thorax, x: Floats, y: Floats, edge: float) -> tuple[tuple[Floats, Floats], Floats]:
    """The air of the lungs, ovals that end on the domes of the diaphragm; and what the heart lies on."""
    air, floors = [], []
    for place, dome in zip(person.lungs, person.domes, strict=True):
        off = (x - place[0]) ** 2
        floors.append(dome + 0.4 * off)
        air.append(_oval(x, y, tuple(place), 0, 2 * edge) * soft(dome + 1.6 * off - y, 2 * edge))
    return (air[0], air[1]), np.minimum(*floors)


def _texture(person: Thorax, x: Floats, y: Floats) -> Floats:
    height = np.zeros_like(x)
    for fx, fy, phase, amount in person.waves:
        height += amount * np.cos(fx * x + fy * y + phase)
    return height


def _vessels(person: Thorax, x: Floats, y: Floats, edge: float) -> Floats:
    """Vessels that leave the hila like rays and get thinner: the most of any of them."""
    most = np.zeros_like(x)
    for side, lung, vessels in zip((-1, 1), person.lungs, person.vessels, strict=True):
        out, down = side * x - 0.5 * abs(float(lung[0])), y - float(lung[1]) - 0.02
        far, angle = np.hypot(out, down), np.arctan2(down, out)
        for direction, bend, length, thick in vessels:
            away = far * np.abs(angle - direction - bend * far)
            thin = thick * (1 - far / length)
            np.maximum(most, soft(thin - away, edge) * soft(length - far, 0.2), out=most)
    return most


def _bones(person: Thorax, x: Floats, y: Floats, edge: float) -> Floats:
    """Ribs and clavicles: the most of any of them."""
    most = np.zeros_like(x)
    for side, ribs, clavicle in zip((-1, 1), person.ribs, person.clavicles, strict=True):
        out = np.maximum(side * x, 0)
        beside = soft(side * x - 0.14, edge)  # the spine hides where they begin
        for top, slope, bend in ribs:
            middle = top + slope * out + bend * out**2
            away = np.abs(y - middle) / np.sqrt(1 + (slope + 2 * bend * out) ** 2)
            np.maximum(most, beside * soft(person.thick - away, edge), out=most)
        away = np.abs(y - clavicle[0] + clavicle[1] * out)
        np.maximum(most, 1.4 * beside * soft(0.03 - away, edge), out=most)
    return most


def chest_patients(
    count: int, rng: np.random.Generator, side: int = 64, visits: int = 1, most: int = 2
) -> list[ChestPatient]:
    """Draw patients, with one radiograph of each at every visit.

    Args:
        count: of patients.
        rng: draws everything; who a patient is and what is found are independent.
        side: of an image in pixels.
        visits: of each patient.
        most: findings of a visit. Every set of so many or fewer (:func:`conditions`) is as frequent as can be as any
            other, whoever the patient is: with 1, a sixth of the radiographs shows none.
    """
    if not (count >= 1 and visits >= 1):
        raise ValueError("patients and visits must be positive")
    sets = conditions(most)
    chosen = rng.permutation(np.arange(count * visits) % len(sets)).reshape(count, visits)
    patients = []
    for number, seed in enumerate(rng.integers(0, 2**63, count)):
        own = np.random.default_rng(seed)
        person, found = thorax(own), tuple(sets[one] for one in chosen[number])
        taken = tuple(radiograph(person, findings, side, own) for findings in found)
        patients.append(ChestPatient(number, person, taken, found))
    return patients


def stacked(patients: Sequence[ChestPatient]) -> tuple[Floats, NDArray[np.int64], NDArray[np.bool_]]:
    """All radiographs (n, s, s) in [0, 1], whose each is (n,), and what it shows (n, 5) in the order of FINDINGS."""
    images = np.stack([one for patient in patients for one in patient.radiographs]).astype(np.float32)
    owners = np.array([patient.number for patient in patients for _ in patient.radiographs], dtype=np.int64)
    shown = [[one in found for one in FINDINGS] for patient in patients for found in patient.findings]
    return images / np.float32(255), owners, np.array(shown, dtype=np.bool_)


def write_clinic(folder: Path, site: int, patients: Sequence[ChestPatient], rng: np.random.Generator) -> Planted:
    """Write one site's patients as DICOM, one folder for each patient and visit, and its label list.

    Patients of even numbers were seen by Computed Radiography, those of odd ones by Digital Radiography.

    Args:
        folder: made when it is not there.
        site: 0-based; names and numbers differ between sites.
        patients: whose radiographs are written; the label is what is found at that visit (:func:`label_of`).
        rng: draws the persons; the radiographs do not depend on it.
    Returns:
        Every identifying string that was written; the label of a person is the first visit's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planted, rows = [], []
    for patient in patients:
        person = Person.draw(site, patient.number, rng)
        strings, dates = [], []
        for number, (picture, findings) in enumerate(zip(patient.radiographs, patient.findings, strict=True)):
            visit = Visit.later(person, number, rng) if number else Visit.of(person)
            where = folder / f"{person.name.split('^', maxsplit=1)[0]}_{person.patient_id}" / visit.accession
            where.mkdir(parents=True, exist_ok=True)
            digital = patient.number % 2 == 1
            dataset = (_digital if digital else _computed)(person, visit, picture)
            write(dataset, where / f"{dataset.Modality}0000.dcm", ExplicitVRLittleEndian, person)
            rows.append((visit.instance(0), label_of(findings)))
            strings += [visit.instance(0), visit.study, visit.series, visit.accession]
            dates += [visit.date, visit.time]
        planted.append(person.planted(label_of(patient.findings[0]), strings, dates))
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("sop_instance_uid", "label"))
        writer.writerows(rows)
    return Planted(tuple(planted), shared(site))


def _computed(person: Person, visit: Visit, picture: NDArray[np.uint8]) -> Dataset:
    """One radiograph, with what the modules of its class ask for (PS3.3 A.2) and all that a careless export adds."""
    return _frontal(person, visit, picture, ComputedRadiographyImageStorage, "CR")


def _digital(person: Person, visit: Visit, picture: NDArray[np.uint8]) -> Dataset:
    """The same as Digital X-Ray - For Presentation (PS3.3 A.26): DX series, anatomy, image, detector."""
    dataset = _frontal(person, visit, picture, DigitalXRayImageStorageForPresentation, "DX")
    dataset.PresentationIntentType, dataset.ImageLaterality = "FOR PRESENTATION", "U"
    dataset.AnatomicRegionSequence = [
        item(CodeValue="51185008", CodingSchemeDesignator="SCT", CodeMeaning="Chest"),
    ]
    dataset.AcquisitionContextSequence = []
    dataset.PixelIntensityRelationship, dataset.PixelIntensityRelationshipSign = "LOG", -1
    dataset.RescaleIntercept, dataset.RescaleSlope, dataset.RescaleType = "0", "1", "US"
    dataset.PresentationLUTShape, dataset.LossyImageCompression, dataset.BurnedInAnnotation = "IDENTITY", "00", "NO"
    dataset.WindowCenter, dataset.WindowWidth = "128", "256"  # every grey value as it is (PS3.3 C.11.2.1.2)
    dataset.DetectorType, dataset.PositionerType = "SCINTILLATOR", "NONE"
    spacing = 400 / len(picture)  # of a detector of 40 cm
    dataset.ImagerPixelSpacing = [f"{spacing:.6g}", f"{spacing:.6g}"]
    return dataset


def _frontal(person: Person, visit: Visit, picture: NDArray[np.uint8], sop_class: UID, modality: str) -> Dataset:
    dataset = careless(person, visit, 0)
    dataset.SOPClassUID = sop_class
    dataset.ReferencedImageSequence[0].ReferencedSOPClassUID = sop_class
    study = dataset.RequestAttributesSequence[0].ReferencedStudySequence[0]
    study.ReferencedSOPClassUID = "1.2.840.10008.3.1.2.3.1"
    dataset.Modality, dataset.ImageType = modality, ["ORIGINAL", "PRIMARY"]
    dataset.Manufacturer, dataset.BodyPartExamined, dataset.ViewPosition = "Made-up Rays", "CHEST", "PA"
    dataset.PatientAge = f"{int(visit.date[:4]) - int(person.birth_date[:4]):03d}Y"
    dataset.PatientOrientation, dataset.KVP = ["L", "F"], "120"
    show(dataset, picture)
    return dataset
