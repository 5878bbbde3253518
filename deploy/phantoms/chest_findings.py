"""What is found in a made-up chest: five findings of CheXpert, as shadows, as labels and in words.

A finding is of the visit and not of the person: side, place and weight are drawn anew each time. Lengths are in half
sides of the image, x to the right, y down; a pair is of the left and the right of the image.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from math import tau
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Grid = tuple[Floats, Floats]
Finding = Literal["atelectasis", "cardiomegaly", "consolidation", "edema", "effusion"]
FINDINGS: Final[tuple[Finding, ...]] = ("atelectasis", "cardiomegaly", "consolidation", "edema", "effusion")
NONE: Final = "none"  # the label of a radiograph without any of them
Shown = Mapping[Finding, float]  # how much of each finding shows, above 0 and at most 1

_LINES: Final = 10  # waves of the thickened septa of an oedema

# A report is one of these sentences for each finding, or one for none. None of them is from anybody's record.
_CLEAR: Final = (
    "No acute cardiopulmonary process.",
    "The lungs are clear.",
    "Clear lungs and a normal heart size.",
    "No evidence of acute disease.",
)
_SENTENCES: Final[dict[Finding, tuple[str, ...]]] = {
    "atelectasis": ("Plate atelectasis at one base.", "Basal atelectasis with volume loss.", "Band of atelectasis."),
    "cardiomegaly": ("The heart is enlarged.", "Cardiomegaly.", "Enlarged heart size."),
    "consolidation": ("Lobar consolidation.", "Dense consolidation of one lobe.", "Consolidation in one lung."),
    "edema": ("Pulmonary edema.", "Bilateral perihilar haze, edema.", "Interstitial edema in both lungs."),
    "effusion": ("Pleural effusion.", "Effusion on one side.", "Pleural effusion with a blunted angle."),
}


def conditions(most: int = len(FINDINGS)) -> tuple[frozenset[Finding], ...]:
    """Every set of at most so many findings, none first: 6 of at most one, 16 of at most two.

    Raises:
        ValueError: ``most`` is not 0 .. 5.
    """
    if not 0 <= most <= len(FINDINGS):
        raise ValueError(f"a radiograph shows 0 to {len(FINDINGS)} findings")
    return tuple(frozenset(some) for size in range(most + 1) for some in combinations(FINDINGS, size))


def label_of(findings: Collection[Finding]) -> str:
    """The label of a set of findings: "none", or their names in order, as in "edema+effusion".

    Raises:
        ValueError: one is not of FINDINGS.
    """
    if not set(findings) <= set(FINDINGS):
        raise ValueError("a finding is one of FINDINGS")
    return "+".join(sorted(set(findings))) or NONE


def report(findings: Collection[Finding], rng: np.random.Generator) -> str:
    """An impression in public words: a sentence for each finding in a drawn order, or one that there is none.

    Raises:
        ValueError: one is not of FINDINGS.
    """
    names = label_of(findings).split("+")
    if names == [NONE]:
        return str(rng.choice(_CLEAR))
    order = [one for one in FINDINGS if one in names]
    return " ".join(str(rng.choice(_SENTENCES[order[at]])) for at in rng.permutation(len(order)))


def report_words() -> frozenset[str]:
    """Every word that a report can hold, in lower case without stops."""
    sentences = [*_CLEAR, *(one for some in _SENTENCES.values() for one in some)]
    return frozenset(word.strip(".,").lower() for one in sentences for word in one.split())


def heart_with(findings: Shown, heart: Floats, rng: np.random.Generator) -> Floats:
    """The person's heart (centre x and y, half width, half height); cardiomegaly: wider, mostly to its apex."""
    wider = float(rng.uniform(0.36, 0.56))
    if "cardiomegaly" not in findings:
        return heart
    weight = findings["cardiomegaly"]
    apart, taller = weight * wider * float(heart[2]), 1 + 0.08 * weight
    return np.array((heart[0] + 0.35 * apart, heart[1], heart[2] + apart, taller * heart[3]), np.float32)


def domes_with(findings: Shown, domes: Floats, side: int, rng: np.random.Generator) -> Floats:
    """Where the tops of the diaphragm are (2,); atelectasis draws up the one below the lost volume."""
    raised = domes.copy()
    higher = rng.uniform(0.22, 0.34)
    raised[side] -= np.float32(higher * findings.get("atelectasis", 0.0))
    return raised


def shadows(
    findings: Shown,
    lungs: Floats,
    domes: Floats,
    sides: NDArray[np.int64],
    grid: Grid,
    rng: np.random.Generator,
) -> Floats:
    """How much of the lungs' air the findings have filled, (s, s) in [0, 1].

    Args:
        findings: of this visit.
        lungs: (2, 4) centre x and y, half width, half height.
        domes: (2,) as they are at this visit.
        sides: (5,) in the order of FINDINGS, 0 or 1: where a finding of one side lies.
        grid: x and y of every pixel (s, s).
        rng: draws places and weights.
    """
    air_left = np.ones_like(grid[0])
    for number, finding in enumerate(FINDINGS):
        own = np.random.default_rng(rng.integers(0, 2**63))  # so that one finding does not move another
        if finding in findings and finding in _DRAWN:
            shadow = _DRAWN[finding](int(sides[number]), lungs, domes, grid, own)
            air_left *= 1 - np.float32(findings[finding]) * shadow
    return 1 - air_left


def soft(inside: Floats, width: float) -> Floats:
    """0 to 1 where a distance to an edge goes from negative to positive."""
    share: Floats = (1 / (1 + np.exp(-np.clip(4 * inside / width, -40, 40)))).astype(np.float32)
    return share


def _half(x: Floats, side: int) -> Floats:
    """1 in the half of the image in which the lung lies, 0 in the other."""
    return np.heaviside(x if side else -x, 0).astype(np.float32)


def _effusion(side: int, lungs: Floats, domes: Floats, grid: Grid, rng: np.random.Generator) -> Floats:
    """Fluid on a dome, higher at the wall of the chest: the meniscus."""
    x, y = grid
    level = float(domes[side]) - rng.uniform(0.16, 0.40)
    outward = (1 if side else -1) * (x - float(lungs[side, 0]))
    climbed = level - 0.5 * np.maximum(outward + 0.1, 0) + 0.1 * np.minimum(outward, 0)
    fluid: Floats = (rng.uniform(0.9, 1.0) * _half(x, side) * soft(y - climbed, 0.08)).astype(np.float32)
    return fluid


def _consolidation(side: int, lungs: Floats, domes: Floats, grid: Grid, rng: np.random.Generator) -> Floats:
    """A dense lobe that ends at a fissure, with the grain of the air that is left in it."""
    x, y = grid
    middle, _, wide, tall = (float(one) for one in lungs[side])
    down = rng.uniform(-0.62, 0.0) * tall
    sharp = 1 if rng.uniform() < 0.5 else -1  # the fissure is below an upper lobe, or above a lower one
    across, high = wide * rng.uniform(0.7, 1.0), rng.uniform(0.20, 0.28)
    centre = middle + (1 if side else -1) * wide * rng.uniform(-0.1, 0.3)
    far = np.sqrt(((x - centre) / across) ** 2 + ((y - down) / (1.4 * high)) ** 2)
    slope = rng.uniform(-0.25, 0.25)
    fissure = soft((sharp * (down + 0.5 * high * sharp - y) + slope * (x - centre)).astype(np.float32), 0.05)
    grain = 1 + 0.12 * np.sin(rng.normal(0, 22) * x + rng.normal(0, 22) * y + rng.uniform(0, tau))
    lobe: Floats = (rng.uniform(0.7, 0.85) * _half(x, side) * soft(1 - far, 0.5) * fissure * grain).astype(np.float32)
    return lobe


def _edema(side: int, lungs: Floats, domes: Floats, grid: Grid, rng: np.random.Generator) -> Floats:
    """Haze around both hila, as a butterfly's wings, and the net of thickened septa."""
    x, y = grid
    weight = rng.uniform(0.75, 1.1)
    haze, net = np.zeros_like(x), np.zeros_like(x)
    for left in (0, 1):
        middle, height, wide, _ = (float(one) for one in lungs[left])
        hilum = middle * 0.75
        far = ((x - hilum) / (0.75 * wide)) ** 2 + ((y - height - 0.02) / 0.34) ** 2
        haze += _half(x, left) * np.exp(-far / 2)
    for _ in range(_LINES):
        way, often = rng.uniform(0, tau), rng.uniform(24, 44)
        wave = np.sin(often * (np.cos(way) * x + np.sin(way) * y) + rng.uniform(0, tau))
        net += np.maximum(np.abs(wave) - 0.6, 0).astype(np.float32)
    found: Floats = np.minimum(weight * (0.45 * haze + 0.15 * net), 0.9).astype(np.float32)
    return found


def _atelectasis(side: int, lungs: Floats, domes: Floats, grid: Grid, rng: np.random.Generator) -> Floats:
    """One or two plates above the dome, which is drawn up (:func:`domes_with`)."""
    x, y = grid
    middle, _, wide, _ = (float(one) for one in lungs[side])
    most = np.zeros_like(x)
    for above in np.cumsum(rng.uniform(0.09, 0.15, int(rng.integers(1, 3)))):
        height = float(domes[side]) - float(above) + rng.uniform(-0.3, 0.3) * (x - middle)
        thick = rng.uniform(0.030, 0.042)
        plate = soft((thick - np.abs(y - height)).astype(np.float32), 0.03)
        length = soft((wide * rng.uniform(0.55, 0.8) - np.abs(x - middle)).astype(np.float32), 0.1)
        np.maximum(most, plate * length, out=most)
    return (rng.uniform(0.75, 0.95) * _half(x, side) * most).astype(np.float32)


_DRAWN: Final = {
    "atelectasis": _atelectasis,
    "consolidation": _consolidation,
    "edema": _edema,
    "effusion": _effusion,
}
