"""Made-up patients of a chest clinic: frontal radiographs, in memory and as DICOM Computed Radiography.

Ribs, heart, lungs and spine are the person's and stay; the finding (none, effusion, opacity) lies elsewhere at every
visit, and so does the patient under the tube. Lengths are in half sides of the picture, x to the right, y down.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import tau
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian

from agent.phantoms.persons import Person, Planted, Visit, careless, shared, show, write

Floats = NDArray[np.float32]
Finding = Literal["none", "effusion", "opacity"]
FINDINGS: Final[tuple[Finding, ...]] = ("none", "effusion", "opacity")

_RIBS: Final = 8
_WAVES: Final = 12


@dataclass(frozen=True, slots=True, eq=False)
class Thorax:
    """What of a radiograph is the person's. Pairs are of the left and the right of the picture."""

    body: Floats  # (2,) half width and half height
    lungs: Floats  # (2, 4) centre x and y, half width, half height
    domes: Floats  # (2,) where the diaphragm's top is
    heart: Floats  # (4,) centre x and y, half width, half height
    tilt: float  # of the heart, radians
    spine: Floats  # (3,) half width, bend, place
    ribs: Floats  # (2, _RIBS, 3) where each begins at the spine, slope, bend
    thick: float  # of a rib
    clavicles: Floats  # (2, 2) height and slope
    waves: Floats  # (w, 4) texture of vessels: two frequencies, phase, height


@dataclass(frozen=True, slots=True, eq=False)
class ChestPatient:
    """One made-up person with one radiograph for each visit."""

    number: int  # from 0; a name for the person
    finding: Finding
    thorax: Thorax
    radiographs: tuple[NDArray[np.uint8], ...]  # (s, s) each, bright is dense


def thorax(rng: np.random.Generator) -> Thorax:
    """Draw a person. Nothing here depends on a finding."""
    middle, wide = rng.normal(0.44, 0.03), rng.normal(0.33, 0.03)
    tall, spacing = rng.normal(0.66, 0.06), rng.normal(0.175, 0.022)
    lungs = np.array([(side * middle, rng.normal(-0.05, 0.03), wide, tall) for side in (-1, 1)])
    tops = -0.82 + rng.normal(0, 0.06) + spacing * np.arange(_RIBS)
    slope, bend = rng.normal(-0.25, 0.15), rng.normal(0.75, 0.22)
    ribs = np.stack([tops, np.full(_RIBS, slope), bend * np.linspace(0.7, 1.2, _RIBS)], axis=-1)
    waves = [*rng.normal(0, 11, (2, _WAVES)), rng.uniform(0, tau, _WAVES), rng.uniform(0.005, 0.02, _WAVES)]
    return Thorax(
        body=np.array((rng.normal(0.92, 0.04), rng.normal(1.5, 0.1)), np.float32),
        lungs=(lungs + rng.normal(0, 0.012, (2, 4))).astype(np.float32),
        domes=(rng.normal(0.46, 0.06) + np.array((0.0, 0.05)) + rng.normal(0, 0.02, 2)).astype(np.float32),
        heart=rng.normal((0.14, 0.28, 0.34, 0.30), (0.03, 0.03, 0.045, 0.03)).astype(np.float32),
        tilt=float(rng.normal(0.5, 0.15)),
        spine=rng.normal((0.10, 0.0, 0.0), (0.015, 0.04, 0.02)).astype(np.float32),
        ribs=(ribs[None] + rng.normal(0, (0.012, 0.04, 0.05), (2, _RIBS, 3))).astype(np.float32),
        thick=float(rng.uniform(0.022, 0.04)),
        clavicles=rng.normal((-0.78, 0.22), (0.04, 0.10), (2, 2)).astype(np.float32),
        waves=np.stack(waves, axis=1).astype(np.float32),
    )


def radiograph(person: Thorax, finding: Finding, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One radiograph (size, size), bright is dense: the person, the finding anew, another position and exposure."""
    if finding not in FINDINGS or not size >= 16:
        raise ValueError("a finding is one of FINDINGS, and a radiograph has 16 pixels a side or more")
    finer = 4 if size <= 32 else 2 if size <= 256 else 1
    x, y = _grid(size * finer, rng)
    edge = 2.0 / size  # soft by a pixel of the result
    air = _lungs(person, x, y, edge)
    inside = np.maximum(air[0], air[1])
    body = _oval(x, y, (0, 0.3, *person.body), 0, 2 * edge)
    picture = 0.06 + 0.52 * body
    picture -= 0.36 * inside * (1 + _texture(person, x, y))
    spine = person.spine[0] - np.abs(x - person.spine[2] - person.spine[1] * y**2)
    picture += 0.20 * _soft(spine, 2 * edge)
    picture += 0.30 * _oval(x, y, tuple(person.heart), person.tilt, 2 * edge) * (0.4 + 0.6 * inside)
    picture += 0.10 * body * _bones(person, x, y, edge) * (0.35 + 0.65 * inside)
    picture += _found(person, finding, x, y, air, rng)
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


def _soft(inside: Floats, width: float) -> Floats:
    """0 to 1 where a distance to an edge goes from negative to positive."""
    share: Floats = (1 / (1 + np.exp(-np.clip(4 * inside / width, -40, 40)))).astype(np.float32)
    return share


def _oval(x: Floats, y: Floats, place: tuple[float, ...], tilt: float, width: float) -> Floats:
    """An ellipse: centre x and y, half width, half height."""
    across, down = x - place[0], y - place[1]
    u, v = np.cos(tilt) * across + np.sin(tilt) * down, np.cos(tilt) * down - np.sin(tilt) * across
    return _soft((1 - np.sqrt((u / place[2]) ** 2 + (v / place[3]) ** 2)) * min(place[2:]), width)


def _lungs(person: Thorax, x: Floats, y: Floats, edge: float) -> tuple[Floats, Floats]:
    """The air of the lungs: ovals that end on the domes of the diaphragm."""
    air = []
    for place, dome in zip(person.lungs, person.domes, strict=True):
        floor = dome + 1.6 * (x - place[0]) ** 2
        air.append(_oval(x, y, tuple(place), 0, 2 * edge) * _soft(floor - y, 2 * edge))
    return air[0], air[1]


def _texture(person: Thorax, x: Floats, y: Floats) -> Floats:
    height = np.zeros_like(x)
    for fx, fy, phase, amount in person.waves:
        height += amount * np.cos(fx * x + fy * y + phase)
    return height


def _bones(person: Thorax, x: Floats, y: Floats, edge: float) -> Floats:
    """Ribs and clavicles: the most of any of them."""
    most = np.zeros_like(x)
    for side, ribs, clavicle in zip((-1, 1), person.ribs, person.clavicles, strict=True):
        out = np.maximum(side * x, 0)
        beside = _soft(side * x - 0.14, edge)  # the spine hides where they begin
        for top, slope, bend in ribs:
            middle = top + slope * out + bend * out**2
            away = np.abs(y - middle) / np.sqrt(1 + (slope + 2 * bend * out) ** 2)
            np.maximum(most, beside * _soft(person.thick - away, edge), out=most)
        away = np.abs(y - clavicle[0] + clavicle[1] * out)
        np.maximum(most, 1.4 * beside * _soft(0.03 - away, edge), out=most)
    return most


def _found(
    person: Thorax, finding: Finding, x: Floats, y: Floats, air: tuple[Floats, Floats], rng: np.random.Generator
) -> Floats:
    """What the finding adds: fluid with a meniscus on a dome, or patches within a lung."""
    side = int(rng.integers(2))
    middle, height, wide, tall = (float(v) for v in person.lungs[side])
    added = np.zeros_like(x)
    if finding == "effusion":
        level = float(person.domes[side]) - rng.uniform(0.12, 0.32)
        # higher at the wall of the chest: the meniscus
        added = 0.42 * air[side] * _soft(y - level + 0.35 * np.abs(x - middle), 0.08)
    elif finding == "opacity":
        for _ in range(int(rng.integers(1, 4))):
            angle, far = rng.uniform(0, tau), np.sqrt(rng.uniform(0, 0.4))
            centre = (middle + far * wide * np.cos(angle), height - 0.1 + 0.7 * far * tall * np.sin(angle))
            radius = rng.uniform(0.07, 0.14)
            added += 0.38 * np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / (2 * radius**2))
        added = np.minimum(added, 0.42) * air[side]
    return added.astype(np.float32)


def chest_patients(count: int, rng: np.random.Generator, side: int = 64, visits: int = 1) -> list[ChestPatient]:
    """Draw patients with as many of each finding as can be, and one radiograph of each at every visit.

    Args:
        count: of patients.
        rng: draws everything; who a patient is and what is found are independent.
        side: of a picture in pixels.
        visits: of each patient.
    """
    if not (count >= 1 and visits >= 1):
        raise ValueError("patients and visits must be positive")
    findings = rng.permutation(np.arange(count) % len(FINDINGS))
    seeds = rng.integers(0, 2**63, count)
    patients = []
    for number in range(count):
        own, finding = np.random.default_rng(seeds[number]), FINDINGS[findings[number]]
        person = thorax(own)
        taken = tuple(radiograph(person, finding, side, own) for _ in range(visits))
        patients.append(ChestPatient(number, finding, person, taken))
    return patients


def stacked(patients: Sequence[ChestPatient]) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """All radiographs (n, s, s) in [0, 1], whose each is (n,), and the findings (n,) as indices of FINDINGS."""
    taken = [(picture, patient) for patient in patients for picture in patient.radiographs]
    images = np.stack([picture for picture, _ in taken]).astype(np.float32) / np.float32(255)
    owners = np.array([patient.number for _, patient in taken], dtype=np.int64)
    return images, owners, np.array([FINDINGS.index(patient.finding) for _, patient in taken], dtype=np.int64)


def write_clinic(folder: Path, site: int, patients: Sequence[ChestPatient], rng: np.random.Generator) -> Planted:
    """Write one site's patients as DICOM, one folder for each patient and visit, and its label list.

    Args:
        folder: made when it is not there.
        site: 0-based; names and numbers differ between sites.
        patients: whose radiographs are written; the label is the finding.
        rng: draws the persons; the radiographs do not depend on it.
    Returns:
        Every identifying string that was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planted, rows = [], []
    for patient in patients:
        person = Person.draw(site, patient.number, rng)
        strings, dates = [], []
        for number, picture in enumerate(patient.radiographs):
            visit = Visit.later(person, number, rng) if number else Visit.of(person)
            where = folder / f"{person.name.split('^', maxsplit=1)[0]}_{person.patient_id}" / visit.accession
            where.mkdir(parents=True, exist_ok=True)
            write(_instance(person, visit, picture), where / "CR0000.dcm", ExplicitVRLittleEndian, person)
            rows.append((visit.instance(0), patient.finding))
            strings += [visit.instance(0), visit.study, visit.series, visit.accession]
            dates += [visit.date, visit.time]
        planted.append(person.planted(patient.finding, strings, dates))
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("sop_instance_uid", "label"))
        writer.writerows(rows)
    return Planted(tuple(planted), shared(site))


def _instance(person: Person, visit: Visit, picture: NDArray[np.uint8]) -> Dataset:
    """One radiograph, with what the modules of its class ask for (PS3.3 A.2) and all that a careless export adds."""
    dataset = careless(person, visit, 0)
    dataset.SOPClassUID = ComputedRadiographyImageStorage
    dataset.ReferencedImageSequence[0].ReferencedSOPClassUID = ComputedRadiographyImageStorage
    study = dataset.RequestAttributesSequence[0].ReferencedStudySequence[0]
    study.ReferencedSOPClassUID = "1.2.840.10008.3.1.2.3.1"
    dataset.Modality, dataset.ImageType = "CR", ["ORIGINAL", "PRIMARY"]
    dataset.Manufacturer, dataset.BodyPartExamined, dataset.ViewPosition = "Made-up Rays", "CHEST", "PA"
    dataset.PatientAge = f"{int(visit.date[:4]) - int(person.birth_date[:4]):03d}Y"
    dataset.PatientOrientation, dataset.KVP = ["L", "F"], "120"
    show(dataset, picture)
    return dataset
