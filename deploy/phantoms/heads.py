"""Head phantoms: the real head ch2 with a modelled lower face, made into any number of persons with many scans each.

A person is a smooth warp (:mod:`deploy.phantoms.head_deformation`) and an age: with age the ventricles widen and the
cortex thins. A visit is a pose in the scanner, noise, a bias field and an intensity scale. Everything follows from
the seed, the person's number and the visit's. T2, FLAIR and CT are the T1 with other grey values for each tissue, and
no more.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.interpolate import CubicSpline

from agent.domain import Volume
from deploy.phantoms import head_deformation, head_face, head_tissue
from deploy.phantoms.head_face import LANDMARKS, Root

__all__ = ["CONTRASTS", "Contrast", "Grid", "HeadPhantoms", "Person", "Scan", "axial", "isotropic"]

Contrast = Literal["T1", "T2", "FLAIR", "CT"]
CONTRASTS: Final[tuple[Contrast, ...]] = ("T1", "T2", "FLAIR", "CT")
Floats = NDArray[np.float32]

_EXTENT: Final = (224.0, 256.0, 264.0)  # mm, the field of view
_MIDDLE: Final = (0.0, -8.0, -24.0)  # mm of the template, its centre
_NODE: Final = 7.0  # mm between the points of a grid at which the map is asked for
_KEPT: Final = 4  # persons whose root is kept

# Grey value by tissue, in the order of LABELS: the offset, and the share of the T1's grey value in it.
_REMAP: Final[dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "T2": ((0, 210, 190, 180, 70, 20, 0, 0, 230), (1, 0.2, -0.8, -0.9, -0.3, 0.5, 0.4, 0.3, -0.4)),
    "FLAIR": ((0, 12, 200, 175, 60, 10, 0, 0, 20), (1, 0.2, -1.0, -0.8, 0.1, 0.5, 0.4, 0.3, 0.2)),
    "CT": ((-1000, 8, 38, 28, 50, -95, 1000, -950, 12), (0, 0, 0, 0, 0, 0, -5, 0, 0)),  # Hounsfield units
}


@dataclass(frozen=True, slots=True)
class Person:
    """One made-up person."""

    number: int
    age: float  # years
    sex: str  # F or M


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Where the voxels of a series lie, in the scanner's frame of reference."""

    affine: NDArray[np.float64]  # (4, 4), index to scanner RAS+ mm
    shape: tuple[int, int, int]

    @property
    def spacing(self) -> NDArray[np.float64]:
        """(3,) mm."""
        return np.asarray(np.linalg.norm(self.affine[:3, :3], axis=0), dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """One series of one visit, with the truth about it."""

    volume: Volume
    brain: NDArray[np.bool_]  # (i, j, k)
    tissues: NDArray[np.uint8]  # (i, j, k): 0 none, 1 CSF, 2 GM, 3 WM, of the brain
    labels: NDArray[np.uint8]  # (i, j, k), indices of deploy.phantoms.head_tissue.LABELS
    age: float  # years
    to_template: NDArray[np.float64]  # (4, 4) scanner RAS mm to template mm, the best affine inside the brain
    landmarks: dict[str, NDArray[np.float64]]  # scanner RAS mm of LANDMARKS


def isotropic(mm: float, extent: tuple[float, float, float] = _EXTENT) -> Grid:
    """RAS+ voxels of ``mm``, the whole head in the middle."""
    shape = tuple(round(e / mm) for e in extent)
    affine = np.diag((mm, mm, mm, 1.0))
    affine[:3, 3] = np.array(_MIDDLE) - mm * (np.array(shape) - 1) / 2
    return Grid(affine, (shape[0], shape[1], shape[2]))


def axial(mm: float, thick: float) -> Grid:
    """Axial slices of ``thick`` millimetres, tilted as they are planned, with pixels of ``mm``."""
    shape = (round(_EXTENT[0] / mm), round(_EXTENT[1] / mm), round(190 / thick))
    tilt = np.radians(12.0)
    turn = np.array(((1, 0, 0), (0, np.cos(tilt), -np.sin(tilt)), (0, np.sin(tilt), np.cos(tilt))))
    affine = np.eye(4)
    affine[:3, :3] = turn * (mm, mm, thick)
    affine[:3, 3] = np.array((0, -8.0, 5.0)) - affine[:3, :3] @ (np.array(shape) - 1) / 2
    return Grid(affine, (shape[0], shape[1], shape[2]))


@dataclass(frozen=True, slots=True, eq=False)
class _Inside:
    """A person's warp and what age did."""

    warp: head_deformation.Warp
    where: NDArray[np.int64]  # flat indices of the root that age changes
    much: Floats  # how much of each has become fluid, in (0, 1]


class HeadPhantoms:
    """Any number of persons from one real head."""

    def __init__(self, root: Volume, brain: NDArray[np.bool_], seed: int = 0) -> None:
        """Complete the head once.

        Args:
            root: the real head ch2, 1 mm, RAS+ axes of the template.
            brain: (i, j, k) its brain.
            seed: of all persons.
        """
        self.seed = seed
        self.root: Root = head_face.root_of(root, brain)
        self._levels: dict[tuple[Contrast, int], Floats] = {}
        self._persons: OrderedDict[int, _Inside] = OrderedDict()
        self._aging = _Aging.of(self.root)
        self._away = _away(self.root)

    def reseeded(self, seed: int) -> HeadPhantoms:
        """Other persons of the same head, at no cost."""
        other = copy(self)
        other.seed, other._persons = seed, OrderedDict()
        return other

    def person(self, number: int) -> Person:
        """Person 0, 1, 2 and so on."""
        rng = np.random.default_rng((self.seed, number, 1))
        return Person(number, float(np.round(rng.uniform(20, 90), 1)), "FM"[int(rng.integers(2))])

    def scan(
        self,
        person: int | Person,
        visit: int = 0,
        mm: float = 1.0,
        contrast: Contrast = "T1",
        grid: Grid | None = None,
    ) -> Scan:
        """One series of one visit.

        Args:
            person: or its number.
            visit: 0, 1 and so on; all series of a visit have the same pose.
            mm: of an isotropic grid, where none is given.
            contrast: T1, T2 or FLAIR as unsigned, CT in Hounsfield units as signed 16-bit numbers.
            grid: of the series, in the scanner's frame of reference.
        """
        who = self.person(person) if isinstance(person, int) else person
        grid = grid or isotropic(mm)
        inside = self._inside(who)
        rng = np.random.default_rng((self.seed, who.number, 2, visit))
        pose = _pose(rng)
        back = np.asarray(np.linalg.inv(pose), dtype=np.float64)
        points = _points(grid, back, inside.warp)
        level = 4 if grid.spacing.min() >= 3 else 2 if grid.spacing.min() >= 1.5 else 1
        labels = self._labels_at(points, inside)
        grey = np.zeros(grid.shape, np.float32)
        steps = _steps(grid, level)
        source = self._source(contrast, level, inside)
        for step in steps:  # a thick slice is the mean of thin ones
            there = points if len(steps) == 1 else _points(_moved(grid, step), back, inside.warp)
            grey += _sampled(source, there, self.root, level) / np.float32(len(steps))
        noise = np.random.default_rng((self.seed, who.number, 3, visit, CONTRASTS.index(contrast)))
        values = _scanned(grey, contrast, noise)
        tissues: NDArray[np.uint8] = np.where(labels <= head_tissue.WM, labels, 0).astype(np.uint8)
        names = np.array([LANDMARKS[name] for name in LANDMARKS]).T
        marks = pose[:3, :3] @ inside.warp.inverse(names) + pose[:3, 3:]
        return Scan(
            Volume(values, grid.affine),
            tissues > 0,
            tissues,
            labels,
            who.age,
            inside.warp.brain @ back,
            dict(zip(LANDMARKS, marks.T, strict=True)),
        )

    def warp(self, number: int) -> head_deformation.Warp:
        """The map of a person's head onto the root."""
        return self._inside(self.person(number)).warp

    def _inside(self, who: Person) -> _Inside:
        if who.number not in self._persons:
            of_head, of_brain, both, years = (
                np.random.default_rng((self.seed, who.number, stream)) for stream in (10, 11, 12, 13)
            )
            size = both.normal(1.0 if who.sex == "M" else 0.975, 0.03) * both.normal(1, 0.012, 3)
            ends = self.root.affine[:3, 3], self.root.affine[:3, 3] + np.array(self.root.grey.shape) - 1
            warp = head_deformation.draw(of_head, of_brain, size, ends, self._away)
            self._persons[who.number] = _Inside(warp, *self._aging.at(who.age, years))
        self._persons.move_to_end(who.number)
        while len(self._persons) > _KEPT:
            self._persons.popitem(last=False)
        return self._persons[who.number]

    def _base(self, contrast: Contrast, level: int) -> Floats:
        if (contrast, level) not in self._levels:
            fine = _remapped(self.root, contrast)
            for other in (1, 2, 4):
                self._levels.setdefault((contrast, other), _blocks(fine, other))
        return self._levels[contrast, level]

    def _source(self, contrast: Contrast, level: int, inside: _Inside) -> Floats:
        """The root in this contrast, with what age did, in blocks of ``level`` voxels."""
        base = self._base(contrast, level)
        fine = self._base(contrast, 1)
        made = base.copy()
        offset, share = (0.0, 1.0) if contrast == "T1" else (row[head_tissue.CSF] for row in _REMAP[contrast])
        fluid = offset + share * self._aging.grey
        change = inside.much * (fluid - fine.ravel()[inside.where]) / level**3
        place = np.unravel_index(inside.where, fine.shape)
        flat = np.ravel_multi_index(tuple(p // level for p in place), base.shape)
        made += np.bincount(flat, change, base.size).reshape(base.shape).astype(np.float32)
        return made

    def _labels_at(self, points: Floats, inside: _Inside) -> NDArray[np.uint8]:
        labels = self.root.labels.copy()
        labels.ravel()[inside.where[inside.much > 0.5]] = head_tissue.CSF
        found: NDArray[np.uint8] = _sampled(labels, points, self.root, 1, order=0).astype(np.uint8)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Aging:
    """Which voxels of the root turn into fluid as a person grows old, and when."""

    where: NDArray[np.int64]  # flat indices
    ventricle: Floats  # mm from the ventricles, of each; infinite for cortex
    sulcus: Floats  # mm from the fluid outside, of each; infinite elsewhere
    grey: float  # of fluid

    @classmethod
    def of(cls, root: Root) -> _Aging:
        """Find ventricles and sulci."""
        brain = (root.labels >= head_tissue.CSF) & (root.labels <= head_tissue.WM)
        box = ndimage.find_objects(brain.astype(np.uint8))[0]
        box = tuple(slice(max(0, s.start - 2), s.stop + 2) for s in box)
        inside, fluid, cortex = brain[box], root.labels[box] == head_tissue.CSF, root.labels[box] == head_tissue.GM
        coarse = ndimage.distance_transform_edt(inside[::2, ::2, ::2]) * 2
        deep = np.repeat(np.repeat(np.repeat(coarse, 2, 0), 2, 1), 2, 2)[tuple(slice(n) for n in inside.shape)]
        found, _ = ndimage.label(fluid & (deep > 18))
        largest = np.bincount(found.ravel())[1:]
        ventricles = np.isin(found, 1 + np.flatnonzero(largest > 200))
        to_ventricle = ndimage.distance_transform_edt(~ventricles)
        outer = ~inside | (fluid & ~ventricles)
        to_outer = ndimage.distance_transform_edt(~outer)
        near = inside & ~fluid & ((to_ventricle < 6) | (cortex & (to_outer < 3)))
        flat = np.ravel_multi_index(
            tuple(p + s.start for p, s in zip(np.nonzero(near), box, strict=True)), brain.shape
        )
        # not everywhere at once: patches of some millimetres go before others, the same for everybody
        grain = np.random.default_rng(7).standard_normal(coarse.shape, dtype=np.float32)
        grain = ndimage.gaussian_filter(grain, 1.2)
        patches = np.repeat(np.repeat(np.repeat(grain * (0.35 / grain.std()), 2, 0), 2, 1), 2, 2)
        patch = patches[tuple(slice(n) for n in inside.shape)][near]
        sulcus = np.where(cortex & (to_outer < 3), to_outer, np.inf)[near] + patch
        grey = float(np.median(root.grey[root.labels == head_tissue.CSF]))
        return cls(flat, (to_ventricle[near] + patch).astype(np.float32), sulcus.astype(np.float32), grey)

    def at(self, age: float, rng: np.random.Generator) -> tuple[NDArray[np.int64], Floats]:
        """Flat indices, and how much of each is fluid, at an age in years; persons differ a little."""
        years = (age - 20) / 70
        widened = max(0.0, 4.5 * years**1.3 + rng.normal(0, 0.25))
        thinned = max(0.0, 0.6 * years + rng.normal(0, 0.04))
        much = np.maximum(
            np.clip(widened - self.ventricle + 0.5, 0, 1),
            np.where(thinned > 0, np.clip(2 * (thinned - self.sulcus) + 1.4, 0, 1), 0),
        )
        kept = much > 0
        return self.where[kept], much[kept].astype(np.float32)


def _away(root: Root) -> tuple[Floats, float]:
    """Millimetres off the brain, 0 inside, in voxels of 3 mm."""
    brain = (root.labels >= head_tissue.CSF) & (root.labels <= head_tissue.WM)
    off = ndimage.distance_transform_edt(~brain[::3, ::3, ::3]) * 3
    return off.astype(np.float32), 3.0


def _blocks(fine: Floats, level: int) -> Floats:
    if level == 1:
        return fine
    a, b, c = (-(-n // level) for n in fine.shape)
    full = np.pad(fine, [(0, n * level - m) for n, m in zip((a, b, c), fine.shape, strict=True)], mode="edge")
    made: Floats = full.reshape(a, level, b, level, c, level).mean(axis=(1, 3, 5), dtype=np.float32)
    return made


def _remapped(root: Root, contrast: Contrast) -> Floats:
    grey = root.grey.astype(np.float32)
    if contrast == "T1":
        return grey
    offset, share = (np.array(numbers, np.float32) for numbers in _REMAP[contrast])
    made: Floats = offset[root.labels] + share[root.labels] * grey
    return made if contrast == "CT" else np.maximum(made, 0)


def _pose(rng: np.random.Generator) -> NDArray[np.float64]:
    """(4, 4) person to scanner, a few millimetres and degrees."""
    turn = np.radians(rng.normal(0, (3.5, 2.0, 2.5)))
    cos, sin = np.cos(turn), np.sin(turn)
    x = np.array(((1, 0, 0), (0, cos[0], -sin[0]), (0, sin[0], cos[0])))
    y = np.array(((cos[1], 0, sin[1]), (0, 1, 0), (-sin[1], 0, cos[1])))
    z = np.array(((cos[2], -sin[2], 0), (sin[2], cos[2], 0), (0, 0, 1)))
    pose = np.eye(4)
    pose[:3, :3] = x @ y @ z
    pose[:3, 3] = rng.normal(0, (2.0, 2.5, 2.5))
    return pose


def _steps(grid: Grid, level: int) -> list[NDArray[np.float64]]:
    """Fractions of a voxel at which thick slices are sampled."""
    thick = int(np.argmax(grid.spacing))
    count = max(1, round(grid.spacing[thick] / level / 1.5))
    steps = []
    for n in range(count):
        step = np.zeros(3)
        step[thick] = (n + 0.5) / count - 0.5
        steps.append(step)
    return steps


def _moved(grid: Grid, step: NDArray[np.float64]) -> Grid:
    affine = grid.affine.copy()
    affine[:3, 3] += affine[:3, :3] @ step
    return Grid(affine, grid.shape)


def _points(grid: Grid, back: NDArray[np.float64], warp: head_deformation.Warp) -> Floats:
    """(3, i, j, k) root millimetres of every voxel: the map at a few nodes, and cubic splines between them."""
    nodes = [_nodes(n, s) for n, s in zip(grid.shape, grid.spacing, strict=True)]
    index = np.stack(np.meshgrid(*nodes, indexing="ij"))
    to_person = back @ grid.affine
    person = np.tensordot(to_person[:3, :3], index, 1) + to_person[:3, 3].reshape(3, 1, 1, 1)
    coarse = warp(person).astype(np.float32)
    bases = [
        CubicSpline(at, np.eye(len(at)))(np.arange(n)).astype(np.float32)
        for at, n in zip(nodes, grid.shape, strict=True)
    ]
    return _spread(coarse, bases)


def _nodes(count: int, spacing: float) -> NDArray[np.float64]:
    return np.linspace(0, count - 1, max(2, int(np.ceil(count * spacing / _NODE)) + 1))


def _spread(coarse: Floats, bases: list[Floats]) -> Floats:
    """(..., a, b, c) at nodes to (..., i, j, k)."""
    made = coarse @ bases[2].T
    made = np.matmul(bases[1], made)
    a = made.shape[-3]
    flat = made.reshape(*made.shape[:-3], a, -1)
    spread: Floats = np.matmul(bases[0], flat).reshape(*made.shape[:-3], len(bases[0]), *made.shape[-2:])
    return spread


def _sampled(source: NDArray[np.generic], points: Floats, root: Root, level: int, order: int = 1) -> Floats:
    """Values of the root, in blocks of ``level`` voxels, at root millimetres; plane by plane, to spare memory."""
    low = root.affine[:3, 3].astype(np.float32)
    found = np.empty(points.shape[1:], np.float32)
    for i in range(points.shape[1]):
        at = [(points[a, i] - low[a] - (level - 1) / 2) / level for a in range(3)]
        ndimage.map_coordinates(source, at, found[i], order=order, mode="nearest", prefilter=False)
    return found


def _scanned(grey: Floats, contrast: Contrast, rng: np.random.Generator) -> NDArray[Any]:
    """What the scanner stores: intensity scale, bias field, noise."""
    scale, sd = rng.uniform(6, 14), rng.uniform(1.8, 3.2)
    bends = rng.normal(0, 0.09, 3), rng.normal(0, 0.07, 3)
    noise = rng.standard_normal(grey.shape, dtype=np.float32)
    if contrast == "CT":
        return np.asarray(np.clip(np.rint(grey + 4 * noise), -1024, 3071), dtype=np.int16)
    line = [np.linspace(-1, 1, n, dtype=np.float32) for n in grey.shape]
    bias = [np.exp(a * u + b * u**2).astype(np.float32) for a, b, u in zip(*bends, line, strict=True)]
    grey = grey * bias[0][:, None, None] * bias[1][None, :, None] * bias[2]
    other = rng.standard_normal(grey.shape, dtype=np.float32)
    made = np.hypot(grey + np.float32(sd) * noise, np.float32(sd) * other) * np.float32(scale)
    return np.asarray(np.clip(np.rint(made), 0, 4095), dtype=np.uint16)
