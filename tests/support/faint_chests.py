"""Faint chests: radiographs of :mod:`deploy.phantoms.chest` that hardly show their findings, of unlike hospitals.

As they are drawn, findings are so clear that logistic regression of 64 averages has an AUC of 0.95. Here each shows
with 12 to 60 % of its weight, every picture has a gamma of its own and noise, and of three hospitals one's pictures
are blurred and lighter, another's darker and noisier. The public chests are of other people at other machines:
narrower lungs, smaller hearts, thicker ribs, findings with another frequency, cropped, turned, blurred.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, rotate, zoom

from deploy.phantoms.chest import FINDINGS, Thorax, conditions, radiograph, thorax

SIDE: Final = 64
VISITS: Final = 2  # pictures of a patient
NOISE: Final = 0.045  # standard deviation, of a picture in [0, 1]
FAINT: Final = (0.12, 0.60)  # of a finding's weight
_PUBLIC_FAINT: Final = (0.25, 0.9)

Pair = tuple[float, float]  # drawn between


@dataclass(frozen=True, slots=True)
class Machine:
    """How a hospital's pictures come out."""

    gamma: Pair = (0.8, 1.25)
    blur: Pair = (0.0, 0.0)  # pixels
    noise: float = NOISE
    scale: float = 1.0
    shift: float = 0.0


MACHINES: Final = (
    Machine(),
    Machine(blur=(0.5, 0.9), scale=0.8, shift=0.15),  # blurred, lighter
    Machine(noise=1.5 * NOISE, scale=0.75, gamma=(1.0, 1.5)),  # darker, noisier
)
_PUBLIC: Final = Machine(gamma=(1.4, 2.0), blur=(0.3, 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class Chests:
    """Patients, each with so many pictures."""

    pictures: NDArray[np.uint8]  # (n, visits, SIDE, SIDE)
    findings: NDArray[np.bool_]  # (n, visits, 5) in the order of FINDINGS

    def __len__(self) -> int:
        """How many patients."""
        return len(self.pictures)


def hospital(machine: Machine, patients: int, rng: np.random.Generator) -> Chests:
    """The patients of one hospital: two pictures each, at most two findings a picture, each in 31 %."""
    sets = conditions(2)
    pictures, findings = [], []
    for seed in rng.integers(0, 2**63, patients):
        own = np.random.default_rng(seed)
        person = thorax(own)
        for _ in range(VISITS):
            found = sets[int(own.integers(len(sets)))]
            weights = {one: float(own.uniform(*FAINT)) for one in FINDINGS}
            shown = {one: weights[one] for one in FINDINGS if one in found}
            pictures.append(_taken(machine, radiograph(person, shown, SIDE, own) / 255.0, own))
            findings.append([one in found for one in FINDINGS])
    shape = patients, VISITS
    return Chests(
        np.stack(pictures).reshape(*shape, SIDE, SIDE), np.array(findings, np.bool_).reshape(*shape, len(FINDINGS))
    )


def public_chests(count: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Public pictures (n, SIDE, SIDE), one of a person, and what they show (n, 5) in {0, 1}."""
    often = np.linspace(0.06, 0.25, len(FINDINGS))
    pictures, shown = [], rng.random((count, len(FINDINGS))) < often
    for seed, row in zip(rng.integers(0, 2**63, count), shown, strict=True):
        own = np.random.default_rng(seed)
        weights = own.uniform(*_PUBLIC_FAINT, len(FINDINGS))
        found = {one: float(weights[k]) for k, one in enumerate(FINDINGS) if row[k]}
        plain = radiograph(_elsewhere(thorax(own)), found, SIDE, own) / 255.0
        pictures.append(_taken(_PUBLIC, _moved(plain, own), own))
    return np.stack(pictures), shown.astype(np.float32)


def _elsewhere(person: Thorax) -> Thorax:
    """A person of another people."""
    lungs, heart = person.lungs.copy(), person.heart.copy()
    lungs[:, 2] *= 0.85
    heart[2:] *= 0.85
    return replace(person, lungs=lungs, heart=heart, thick=1.5 * person.thick)


def _moved(picture: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Turned and cropped."""
    turned = rotate(picture, rng.uniform(-8, 8), reshape=False, order=1, mode="nearest")
    size = int(rng.integers(54, SIDE + 1))
    top, left = rng.integers(0, SIDE - size + 1, 2)
    found: NDArray[np.float64] = zoom(turned[top : top + size, left : left + size], SIDE / size, order=1)
    return found


def _taken(machine: Machine, picture: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.uint8]:
    blurred = gaussian_filter(picture, rng.uniform(*machine.blur)) if machine.blur[1] else picture
    grey = machine.scale * np.clip(blurred, 0, 1) ** rng.uniform(*machine.gamma) + machine.shift
    noisy = grey + rng.normal(0, machine.noise, grey.shape)
    levels: NDArray[np.uint8] = np.rint(np.clip(noisy, 0, 1) * 255).astype(np.uint8)
    return levels
