"""Grey matter, white matter and cerebrospinal fluid of a T1 head: one deterministic segmenter, and Dice.

It stands in the place of SIENAX (Smith et al. 2002, 2004), by which the paper measures (C-DeID-GAN, Fig. 4a), and is
built like it. It finds the brain by itself on the image it is given; the size of the head, not of the brain, says how
large the template is, since a brain shrinks and a skull does not; the template's mask bounds the brain; three
Gaussians under a smooth bias field and a Markov field classify it (Zhang, Brady & Smith 2001: FAST). There are no
partial volumes, and of the skull only its vault is used. Its numbers are of use beside each other only, an image
against the same image de-faced.

What de-facing can upset is therefore what it can upset in SIENAX: BET, the registration, and above all the size of
the skull, which skull stripping takes away. With the registration's own scale in its place (:func:`bounded` by
``to_template`` itself) stripping costs next to nothing; both are for a report to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.bet import bet
from agent.defacing.brain_extraction import Atlas, Register, carried
from agent.defacing.head_mask import head_mask
from agent.domain import Volume
from agent.volumes.grid import oriented, spacing

NONE, CSF, GM, WM = 0, 1, 2, 3
PARTS: Final = ("gm", "wm", "csf", "vcsf", "brain")
FRACTION: Final = 0.7  # of BET: at 0.5 the surface bursts through the skull of some heads
# Where the size of a head is read: outwards from here in the template, in directions that point up by so much; scalp
# and skull of the real head are 19 mm thick there, of three made persons 18.5 to 20.5 (medians over directions)
MIDDLE_MM: Final = (0.0, -20.0, 15.0)
UPWARDS: Final = 0.2
SCALP_MM: Final = 18.5
RAYS: Final = 400  # over the whole sphere
SIZES: Final = (0.7, 1.4)  # that a head can have beside the template's
FIT_MM: Final = 2.0  # grain on which the mixture is fitted: the cost of 1 mm buys nothing
STARTS: Final = (0.08, 0.45, 0.85)  # quantiles of the brain: first means of CSF, GM and WM
ALONE: Final = 25  # rounds of expectation and maximisation, voxel by voxel
TOGETHER: Final = 12  # and then with neighbours; all classes equally likely, or the Markov field starves the rare one
SWEEPS: Final = 5  # of the Markov field over the labels, in the volume's own grain
COUPLING: Final = 0.5  # Potts: what a nearest neighbour of another class costs
DEGREE: Final = 3  # of the polynomial that the bias field is
STIFF: Final = 1e-3  # pull of its coefficients to 0, as a share of the voxels
NARROWEST: Final = 0.02  # deviation of a class, as a share of the range of the means
# Fluid of the ventricles: what lies in this box of MNI152, x, y, z, and at least so deep in the brain
VENTRICLES_MM: Final = ((-42.0, 42.0), (-62.0, 42.0), (-24.0, 36.0))
DEEP_MM: Final = 20.0
_LABEL: Final[Mapping[str, int]] = MappingProxyType({"gm": GM, "wm": WM, "csf": CSF})


@dataclass(frozen=True, slots=True, eq=False)
class Tissues:
    """What the segmenter makes of a volume, on its oriented grid."""

    labels: NDArray[np.uint8]  # (i, j, k): NONE, CSF, GM or WM
    brain: NDArray[np.bool_]  # (i, j, k): what was classified
    ventricles: NDArray[np.bool_]  # (i, j, k): the CSF of the ventricles
    voxel_ml: float

    def part(self, name: str) -> NDArray[np.bool_]:
        """The voxels of one of ``PARTS``; the brain is GM and WM, as SIENAX has it."""
        if name == "vcsf":
            return self.ventricles
        labels = (GM, WM) if name == "brain" else (_LABEL[name],)
        return np.isin(self.labels, labels)

    @property
    def volumes(self) -> dict[str, float]:
        """Of every part, in mL."""
        return {name: float(np.count_nonzero(self.part(name))) * self.voxel_ml for name in PARTS}


def segment(volume: Volume, atlas: Atlas, register: Register) -> Tissues:
    """The tissues of a head, T1-weighted. The same volume always gives the same; its unit does not matter.

    The brain is what BET and the registered template both say, as in SIENAX; not the cautious union that de-facing
    keeps. No quality rule is asked: a measure that refused what de-facing spoiled would not show it.

    Args:
        volume: any orientation.
        atlas: of the brain.
        register: of a head to it.
    Returns:
        Labels on the grid of ``oriented(volume)``.
    Raises:
        NotDefacedError: no head is found in it, or it cannot be registered.
    """
    volume = oriented(volume)
    return bounded(volume, atlas, by_skull(volume, atlas, register(volume, atlas)))


def bounded(volume: Volume, atlas: Atlas, to_template: NDArray[np.float64]) -> Tissues:
    """The tissues of an oriented head that lies in the template by ``to_template``."""
    edges = spacing(volume.affine)
    brain = bet(volume, FRACTION) & carried(atlas.brain, atlas, to_template, volume)
    labels = classified(volume.values, brain, edges)
    ventricles = (labels == CSF) & _central(volume, brain, to_template)
    return Tissues(labels, brain, ventricles, float(edges.prod()) / 1000.0)


def by_skull(volume: Volume, atlas: Atlas, to_template: NDArray[np.float64]) -> NDArray[np.float64]:
    """A registration with its size taken from the vault of the head, as SIENAX takes it from the skull.

    The template has no skull, so its vault is where its brain ends and ``SCALP_MM`` further out.

    Args:
        volume: oriented.
        atlas: of the brain.
        to_template: (4, 4), of the registration.
    Returns:
        (4, 4): the same, larger or smaller about ``MIDDLE_MM``.
    Raises:
        NotDefacedError: no head is found in it.
    """
    head = _reach(head_mask(volume), to_template @ volume.affine)
    brain = _reach(atlas.brain, atlas.affine)
    there = np.isfinite(head) & np.isfinite(brain)
    if not there.any():
        return to_template
    size = float(np.median((head[there] - SCALP_MM) / brain[there]))
    scale = np.diag([1.0, 1.0, 1.0, 1.0])
    scale[:3, :3] /= np.clip(size, *SIZES)
    scale[:3, 3] = np.array(MIDDLE_MM) - scale[:3, :3] @ np.array(MIDDLE_MM)
    return scale @ to_template


def _reach(mask: NDArray[np.bool_], to: NDArray[np.float64]) -> NDArray[np.float64]:
    """(d,) mm of the template from ``MIDDLE_MM`` to the last voxel of a mask, by direction; nan where none is."""
    turn = np.arange(RAYS) + 0.5  # a spiral over the sphere, equally dense everywhere
    up = 1 - 2 * turn / RAYS
    around, flat = np.pi * (1 + 5**0.5) * turn, np.sqrt(1 - up**2)
    directions = np.stack([np.cos(around) * flat, np.sin(around) * flat, up], axis=1)[up > UPWARDS]
    far = np.arange(20.0, 140.0, 0.5)
    index = np.linalg.inv(to)
    points = np.array(MIDDLE_MM) + directions[:, None] * far[:, None]
    at = np.rint(points @ index[:3, :3].T + index[:3, 3]).astype(int)
    held = ((at >= 0) & (at < mask.shape)).all(axis=2)
    i, j, k = np.moveaxis(np.where(held[..., None], at, 0), 2, 0)
    hit = mask[i, j, k] & held
    return np.where(hit.any(axis=1), far[len(far) - 1 - hit[:, ::-1].argmax(axis=1)], np.nan)


def compared(one: Tissues, other: Tissues) -> dict[str, float]:
    """Dice of every part of two segmentations of one grid: Fig. 4a."""
    return {name: dice(one.part(name), other.part(name)) for name in PARTS}


def dice(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """2 |A and B| / (|A| + |B|); 1 where both are empty.

    Raises:
        ValueError: masks of different grids.
    """
    if one.shape != other.shape:
        raise ValueError("masks that are compared have one grid")
    total = int(np.count_nonzero(one)) + int(np.count_nonzero(other))
    return 2.0 * int(np.count_nonzero(one & other)) / total if total else 1.0


def classified(values: NDArray[Any], brain: NDArray[np.bool_], edges: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Labels of the voxels of a brain.

    Args:
        values: (i, j, k) stored numbers; any unit, fluid dark and white matter bright.
        brain: (i, j, k), what is classified.
        edges: (3,) mm of a voxel.
    Returns:
        (i, j, k) uint8, 0 outside ``brain``.
    """
    labels = np.zeros(brain.shape, np.uint8)
    if not brain.any():
        return labels
    box = ndimage.find_objects(brain.astype(np.uint8))[0]
    inside = brain[box]
    level = max(float(np.quantile(values[box][inside], 0.98)), 1e-12)
    x = (values[box] / level).astype(np.float32)
    steps = np.maximum(1, np.rint(FIT_MM / edges)).astype(int)
    thin = tuple(slice(None, None, int(step)) for step in steps)
    mixture = fitted(x[thin], inside[thin], edges * steps) if inside[thin].any() else fitted(x, inside, edges)
    costs = mixture.costs(x[inside], 1.0 + _spread(mixture.bias, inside.shape)[inside])
    weights = _weights(costs)
    for _ in range(SWEEPS):
        weights = _weights(costs - _support(weights, inside, edges))
    labels[box][inside] = weights.argmax(axis=0).astype(np.uint8) + CSF
    return labels


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """x = (1 + bias) mean_c + noise of a class's own deviation; classes from dark to bright."""

    means: NDArray[np.float64]  # (3,)
    deviations: NDArray[np.float64]  # (3,)
    shares: NDArray[np.float64]  # (3,), of sum 1
    bias: NDArray[np.float64]  # (19,), of the terms of _powers()

    def costs(self, x: NDArray[np.floating], field: NDArray[np.floating]) -> NDArray[np.float32]:
        """(3, n): -log of share times density, of values (n,) where 1 + bias is ``field`` (n,)."""
        apart = (x - field * self.means[:, None].astype(x.dtype)) / self.deviations[:, None].astype(x.dtype)
        return (0.5 * apart**2 + np.log(self.deviations / self.shares)[:, None]).astype(np.float32)


def fitted(x: NDArray[np.float32], inside: NDArray[np.bool_], edges: NDArray[np.float64]) -> Mixture:
    """Expectation and maximisation, with the bias field estimated in every round (Wells et al. 1996).

    Args:
        x: (i, j, k), values of about 1.
        inside: (i, j, k), where to look.
        edges: (3,) mm of a voxel.
    """
    seen = x[inside].astype(np.float64)
    basis = np.stack([_product(p, inside.shape)[inside] for p in _powers()], axis=1)
    third = np.full(3, 1 / 3)
    mixture = Mixture(
        np.quantile(seen, STARTS), np.full(3, max(seen.std(), 1e-6) / 3), third, np.zeros(basis.shape[1])
    )
    weights = np.zeros((3, len(seen)), np.float32)
    for turn in range(ALONE + TOGETHER):
        costs = mixture.costs(seen, 1.0 + basis @ mixture.bias)
        if turn >= ALONE:
            costs = costs - _support(weights, inside, edges)
        weights = _weights(costs)
        mixture = _maximised(seen, weights.astype(np.float64), basis, mixture.bias)
        if turn >= ALONE:
            mixture = Mixture(mixture.means, mixture.deviations, third, mixture.bias)
    return mixture


def _maximised(
    x: NDArray[np.float64], weights: NDArray[np.float64], basis: NDArray[np.float64], bias: NDArray[np.float64]
) -> Mixture:
    field = 1.0 + basis @ bias
    mass = weights.sum(axis=1) + 1e-9
    means = np.sort((weights * (field * x)).sum(axis=1) / ((weights * field**2).sum(axis=1) + 1e-9))
    spread = (weights * (x - field * means[:, None]) ** 2).sum(axis=1) / mass
    deviations = np.maximum(np.sqrt(spread), max(NARROWEST * float(means[-1] - means[0]), 1e-6))
    # the field by least squares: the sum of w_c / s_c^2 (x - (1 + b) m_c)^2 is least over b
    precise = weights / deviations[:, None] ** 2
    weight = (precise * means[:, None] ** 2).sum(axis=0)
    target = (precise * means[:, None] * (x - means[:, None])).sum(axis=0)
    scale = max(float(weight.mean()), 1e-12)
    pull = STIFF * len(x) * np.eye(basis.shape[1])
    solved = np.linalg.solve(basis.T @ (basis * (weight / scale)[:, None]) + pull, basis.T @ (target / scale))
    return Mixture(means, deviations, mass / mass.sum(), solved)


def _weights(costs: NDArray[np.float32]) -> NDArray[np.float32]:
    """(3, n): posterior of every class."""
    likely = np.exp(costs.min(axis=0) - costs)
    out: NDArray[np.float32] = likely / likely.sum(axis=0)
    return out


def _support(
    weights: NDArray[np.float32], inside: NDArray[np.bool_], edges: NDArray[np.float64]
) -> NDArray[np.float32]:
    """(3, n): what six neighbours add to each class, in the mean field of a Potts model; far ones less than near."""
    out = np.empty_like(weights)
    whole = np.zeros(inside.shape, np.float32)
    for c, held in enumerate(weights):
        whole[inside] = held
        around = np.zeros_like(whole)
        for axis, edge in enumerate(edges):
            share = np.float32(COUPLING * edges.min() / edge)
            first, last = _shifted(axis)
            around[last] += share * whole[first]
            around[first] += share * whole[last]
        out[c] = around[inside]
    return out


def _shifted(axis: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    first, last = [slice(None)] * 3, [slice(None)] * 3
    first[axis], last[axis] = slice(None, -1), slice(1, None)
    return tuple(first), tuple(last)


def _powers() -> list[tuple[int, int, int]]:
    """Of x, y, z in every term of the bias field; no constant, which is the means' own."""
    most = range(DEGREE + 1)
    return [(i, j, k) for i in most for j in most for k in most if 0 < i + j + k <= DEGREE]


def _product(powers: tuple[int, int, int], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """(i, j, k): one term, with coordinates from -1 to 1 across the box."""
    x, y, z = (np.linspace(-1.0, 1.0, n) ** p for n, p in zip(shape, powers, strict=True))
    return x[:, None, None] * y[None, :, None] * z[None, None, :]


def _spread(bias: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """(i, j, k): the bias field in a box, one axis after the other, so that no term takes a volume of its own."""
    tensor = np.zeros((DEGREE + 1,) * 3)
    for value, powers in zip(bias, _powers(), strict=True):
        tensor[powers] = value
    x, y, z = (np.linspace(-1.0, 1.0, n)[None] ** np.arange(DEGREE + 1)[:, None] for n in shape)
    half = (np.einsum("abc,ai->ibc", tensor, x) @ z).astype(np.float32)
    out: NDArray[np.float32] = np.einsum("ibk,bj->ijk", half, y.astype(np.float32))
    return out


def _central(volume: Volume, brain: NDArray[np.bool_], to_template: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Deep in the brain and in the template's box of the ventricles."""
    to = to_template @ volume.affine
    deep = ndimage.distance_transform_edt(brain, sampling=spacing(volume.affine)) > DEEP_MM
    index = np.argwhere(deep)
    places = index @ to[:3, :3].T + to[:3, 3]
    low, high = np.array(VENTRICLES_MM).T
    out = np.zeros(brain.shape, bool)
    out[tuple(index[((places >= low) & (places <= high)).all(axis=1)].T)] = True
    return out
