"""Volumes that are no whole head, or show a face where nobody looks: what de-facing has to refuse or treat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.domain import Volume
from deploy.phantoms.heads import Grid, HeadPhantoms, Scan, isotropic

__all__ = ["bad_heads", "bottle", "four_dimensional", "knee"]


def bad_heads(phantoms: HeadPhantoms, mm: float = 4.0, person: int = 0) -> dict[str, Volume]:
    """One of each kind, by name, RAS+.

    ``ghosted`` and ``wrapped_nose`` are whole heads whose face is in the air a second time, ``tilted`` is a whole
    head with the chin on the chest: those are to be treated or refused, the others refused.
    """
    scan = phantoms.scan(person, 0, mm)
    volume = scan.volume
    top = _index(scan, "brow", 2) + round(6 / mm)
    nose = _index(scan, "nose_tip", 2) + round(4 / mm)
    middle = _index(scan, "nasion", 0)
    right = np.arange(volume.values.shape[0])[:, None, None] >= middle
    noise = np.random.default_rng(0).integers(0, 900, volume.values.shape)
    return {
        "bottle": bottle(mm),
        "knee": knee(mm),
        "brain_extracted": _with(volume, np.where(scan.brain, volume.values, 0)),
        "cut_at_brow": _cropped(volume, 2, slice(top, None)),
        "cut_at_nose": _cropped(volume, 2, slice(nose, None)),
        "left_half_missing": _cropped(volume, 0, slice(middle, None)),
        "left_half_blank": _with(volume, np.where(right, volume.values, 0)),
        "faceless": _faceless(scan),
        "not_finite": _not_finite(volume),
        "thick_slices": phantoms.scan(person, 0, grid=_thick(mm)).volume,
        "slice_lost": _with(volume, np.delete(volume.values, volume.values.shape[2] // 2, axis=2)),
        "ghosted": _ghosted(volume),
        "wrapped_nose": _wrapped(scan),
        "tilted": _tilted(phantoms, person, mm),
        "noise": _with(volume, noise.astype(volume.values.dtype)),
        "empty": _with(volume, np.zeros_like(volume.values)),
        "singular": Volume(volume.values, volume.affine @ np.diag((1, 1, 1e-4, 1))),
    }


def four_dimensional(volume: Volume, times: int = 3) -> NDArray[np.generic]:
    """(i, j, k, times): a time series, which no Volume can hold."""
    return np.stack([volume.values] * times, axis=-1)


def bottle(mm: float) -> Volume:
    """A cylinder of fluid, as physicists scan it."""
    x, y, z, grid = _places(mm)
    inside = (np.hypot(x, y + 8) < 75) & (np.abs(z + 24) < 95)
    return _noisy(np.where(inside, 130.0, 0.0), grid)


def knee(mm: float) -> Volume:
    """Fat and muscle round two bones that meet."""
    x, y, z, grid = _places(mm)
    r = np.hypot(x, y + 8) + 6 * np.cos(z / 40)
    bone = np.hypot(x, y + 4) < 28 - 0.08 * np.abs(z + 24)
    made = np.where(r < 66, 60.0, np.where(r < 76, 150.0, 0.0))
    made = np.where(bone, 120.0, made)
    return _noisy(np.where((np.abs(z + 24) < 3) & (r < 60), 20.0, made), grid)


def _places(mm: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], Grid]:
    grid = isotropic(mm)
    x, y, z = (grid.affine[a, 3] + mm * np.arange(n) for a, n in enumerate(grid.shape))
    return x[:, None, None], y[None, :, None], z[None, None, :], grid


def _noisy(made: NDArray[np.float64], grid: Grid) -> Volume:
    rng = np.random.default_rng(0)
    values = 8 * np.hypot(made + rng.normal(0, 2.5, grid.shape), rng.normal(0, 2.5, grid.shape))
    return Volume(np.rint(values).astype(np.uint16), grid.affine)


def _with(volume: Volume, values: NDArray[np.generic]) -> Volume:
    return replace(volume, values=values)


def _index(scan: Scan, landmark: str, axis: int) -> int:
    place = np.linalg.inv(scan.volume.affine) @ np.append(scan.landmarks[landmark], 1)
    return round(float(place[axis]))


def _cropped(volume: Volume, axis: int, kept: slice) -> Volume:
    start = np.zeros(4)
    start[axis], start[3] = kept.start or 0, 1
    affine = volume.affine.copy()
    affine[:, 3] = volume.affine @ start
    place = [slice(None)] * 3
    place[axis] = kept
    return Volume(volume.values[tuple(place)].copy(), affine)


def _faceless(scan: Scan) -> Volume:
    """All in front of and below a plane from the brow to the ears is air: a head that was de-faced before."""
    j, k = np.indices(scan.volume.values.shape)[1:]
    ear, brow = (np.linalg.inv(scan.volume.affine) @ np.append(scan.landmarks[n], 1) for n in ("ear_left", "brow"))
    low = brow[2] + (j - brow[1]) * (brow[2] - ear[2] + 12 / scan.volume.affine[2, 2]) / (brow[1] - ear[1])
    gone = (k < low) & (j > ear[1])
    return _with(scan.volume, np.where(gone, 0, scan.volume.values).astype(scan.volume.values.dtype))


def _not_finite(volume: Volume) -> Volume:
    values = volume.values.astype(np.float32)
    values[tuple(n // 2 for n in values.shape)] = np.nan
    return _with(volume, values)


def _thick(mm: float) -> Grid:
    fine = isotropic(mm)
    affine = fine.affine @ np.diag((1, 1, 5 / mm, 1))
    return Grid(affine, (fine.shape[0], fine.shape[1], int(fine.shape[2] * mm / 5)))


def _ghosted(volume: Volume) -> Volume:
    """Movement repeats the head along the phase axis by a third of the field of view, faintly."""
    values = volume.values.astype(np.float32)
    ghost = sum(0.12 * np.roll(values, shift, axis=1) for shift in (values.shape[1] // 3, -values.shape[1] // 3))
    return _with(volume, np.rint(np.hypot(values, ghost)).clip(0, 4095).astype(volume.values.dtype))


def _wrapped(scan: Scan) -> Volume:
    """A field of view that ends before the tip of the nose, so that it comes back behind the head."""
    values = scan.volume.values
    last = _index(scan, "nasion", 1) + 1
    nose = values[:, last:, :]
    made = values[:, :last, :].astype(np.float32)
    made[:, : nose.shape[1], :] = np.hypot(made[:, : nose.shape[1], :], nose)
    return Volume(np.rint(made).astype(values.dtype), scan.volume.affine)


def _tilted(phantoms: HeadPhantoms, person: int, mm: float, degrees: float = 25.0) -> Volume:
    """The whole head nods, in a field of view as large as ever."""
    scan = phantoms.scan(person, 0, mm)
    grid = isotropic(mm)
    turn = np.radians(degrees)
    nod = np.eye(4)
    nod[1:3, 1:3] = (np.cos(turn), -np.sin(turn)), (np.sin(turn), np.cos(turn))
    centre = np.eye(4)
    centre[:3, 3] = (0, -20, -20)
    # where a voxel of the tilted image lies in the upright one
    to = np.linalg.inv(scan.volume.affine) @ centre @ nod @ np.linalg.inv(centre) @ grid.affine
    values = ndimage.affine_transform(
        scan.volume.values.astype(np.float32), to[:3, :3], to[:3, 3], grid.shape, order=1, mode="constant"
    )
    return Volume(np.rint(values).astype(scan.volume.values.dtype), grid.affine)
