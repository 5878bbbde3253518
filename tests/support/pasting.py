"""Heads for the tests of remodelling: made-up people whose brain is known, and the same with another face."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.brain_extraction import Brain
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.domain import Volume
from deploy.phantoms.heads import Scan
from deploy.reproduction.average_head import AverageHead, average_of
from tests.support.heads import phantoms, scan

SIDE = 32
PUBLIC = (101, 102, 103)


def head_of(made: Scan) -> HeadScan:
    """With the brain and the registration as they are, not as they would be found."""
    return HeadScan(made.volume, head_mask(made.volume), Brain(made.brain, 1.0, made.to_template))


@cache
def averaged() -> AverageHead:
    """The mean of a few people whom no test de-faces."""
    return average_of([head_of(phantoms().scan(number, 0, 4.0)) for number in PUBLIC], SIDE)


def with_face(made: Scan, grown: float) -> Scan:
    """The same person and scan with nose, chin and ears that stand out ``grown`` mm more, all else bit for bit."""
    values = made.volume.values.copy()
    tissue = float(np.median(made.volume.values[made.brain]))
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in values.shape), indexing="ij"), axis=-1)
    places = grid @ made.volume.affine[:3, :3].T + made.volume.affine[:3, 3]
    for name, radius in (
        ("nose_tip", 11.0),
        ("chin", 14.0),
        ("mouth", 10.0),
        ("ear_left", 12.0),
        ("ear_right", 12.0),
    ):
        centre = made.landmarks[name]
        away = np.linalg.norm(places - centre, axis=-1)
        values[(away < radius + grown) & ~made.brain] = tissue
    return replace(made, volume=Volume(values.astype(made.volume.values.dtype), made.volume.affine))


def depth(volume: Volume, axis: int, back: bool, skin: NDArray[np.bool_] | None = None) -> NDArray[np.int_]:
    """How many voxels of air a ray meets before the head, along an axis from its end or its beginning."""
    mask = head_mask(volume) if skin is None else skin
    along = np.moveaxis(mask, axis, 0)
    along = along[::-1] if back else along
    return np.where(along.any(axis=0), along.argmax(axis=0), len(along))


VIEWS = ((1, True), (0, True), (0, False))  # from the front, from both sides


def shows(one: Volume, other: Volume) -> float:
    """Share of the rays of three views along which the surfaces of two heads differ by more than a voxel."""
    apart = [np.abs(depth(one, *view) - depth(other, *view)) > 1 for view in VIEWS]
    return float(max(part.mean() for part in apart))


def ghosted(made: Scan, share: float = 0.25) -> tuple[Volume, NDArray[Any]]:
    """The scan with a ghost: half a field of view to the front, and added to the air alone. And the ghost."""
    values = made.volume.values.astype(np.float32)
    ghost = np.roll(values, values.shape[1] // 2, axis=1) * share
    skin = ndimage.binary_dilation(head_mask(made.volume), iterations=2)
    ghost[skin] = 0.0
    mixed = np.rint(values + ghost).astype(made.volume.values.dtype)
    return Volume(mixed, made.volume.affine), ghost


__all__ = ["SIDE", "VIEWS", "averaged", "depth", "ghosted", "head_of", "scan", "shows", "with_face"]
