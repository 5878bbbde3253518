"""Where the head ends and the air begins.

The threshold delta of C-DeID-GAN's Eq. 1 and the cleaned mask that its hull is taken of. All lengths are millimetres,
so that a mask does not depend on the grid. Works on MR and on CT, whose numbers may be Hounsfield units or shifted by
the file's intercept: nothing but the order of air < noise < tissue is assumed.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import spacing

_SHARE: Final = 0.28  # of the way from air to the median of tissue; skin is darker than that in a bias field of 40 %
_BET: Final = 0.1  # of the way from air to the 98th percentile, Smith 2002: what is counted as tissue to begin with
_SAMPLE: Final = 2_000_000
_BELOW_AIR: Final = -1100.0  # only a CT's padding is lower, in Hounsfield units
_GAP: Final = 0.25  # of the range, between padding and everything else
_SMOOTH_MM: Final = 1.0
_CORE_MM: Final = 4.0  # a part thinner than twice this is not the trunk of the head: head-rest, table, straps
_REACH_MM: Final = 30.0  # how far thin parts of the head, ears and nose, stand out from its trunk
_CLOSE_MM: Final = 2.0
_COARSE_MM: Final = 2.0
_LEAST_MM3: Final = 5e5
_CLEAR_MM: Final = 10.0
_BLOCK_MM: Final = 16.0
_ALIVE: Final = 0.05  # of the air; with less noise than this it was all set to one number


def threshold(values: NDArray[Any]) -> float:
    """What parts head from air: delta of Eq. 1.

    A share of the way from the air to the median of what is brighter than air, and never within the noise of the
    corners. Being a median of all tissue it hardly moves under a bias field, unlike Otsu's.

    Args:
        values: (i, j, k) numbers in any unit.
    Raises:
        NotDefacedError: ``not_finite``; ``no_head`` where everything is the same.
    """
    low, air, tissue = _levels(values)
    cut = air + _SHARE * (tissue - air)
    roof = float(np.median([np.percentile(corner, 99.0) for corner in _corners(values, low)]))
    return max(cut, roof) if roof < (air + tissue) / 2 else cut  # a corner full of tissue is not noise


def head_mask(volume: Volume) -> NDArray[np.bool_]:
    """The head without holes: what is brighter than air, in one piece, with sinuses and ear canals filled.

    Ghosts, repeats of the head in the air along the phase-encoding axis, are not part of it while they are detached
    or darker than the threshold; neither are head-rest and table of a CT, but for what lies within 30 mm of the head
    and touches it.

    Returns:
        (i, j, k) bool on the volume's own grid.
    Raises:
        NotDefacedError: ``not_finite``; ``no_head`` where no part is larger than half a litre.
    """
    mm = spacing(volume.affine)
    low, air, _ = _levels(volume.values)
    high = float(np.percentile(_thinned(volume.values), 99.5))
    smooth = np.clip(volume.values.astype(np.float32), max(low, air), high)
    ndimage.gaussian_filter(smooth, _SMOOTH_MM / mm, output=smooth, mode="nearest")
    found = smooth > threshold(smooth)
    found &= _near_trunk(found, mm)
    found = _largest(found)
    if not float(found.sum()) * float(np.prod(mm)) >= _LEAST_MM3:
        raise NotDefacedError("no_head")
    box = _box(found, np.ceil(2 * _CLOSE_MM / mm).astype(int))
    found[box] = _filled(_closed(found[box], mm))
    return found


def noise(volume: Volume, skin: NDArray[np.bool_]) -> NDArray[Any]:
    """The values of air alone: clear of the head, of its ghosts, and of padding where there is anything else.

    Ghosts stand in some blocks of the air and not in others: blocks of 16 mm that are brighter than the darkest
    quarter of them would make likely by chance are left out.

    Returns:
        (n,) of the volume's own type, n >= 1, in the order of the grid.
    Raises:
        NotDefacedError: ``part_of_head`` where the image holds no air.
    """
    mm = spacing(volume.affine)
    step = _step(mm)
    clear = ~skin
    if bool(skin.any()):
        clear &= ~_around(skin[:: step[0], :: step[1], :: step[2]], mm, _CLEAR_MM, skin.shape)
    if not bool(clear.any()):
        clear = ~skin
    if not bool(clear.any()):
        raise NotDefacedError("part_of_head")
    values = volume.values
    flat = ndimage.maximum_filter(values, 3, mode="nearest") == ndimage.minimum_filter(values, 3, mode="nearest")
    alive = clear & ~ndimage.maximum_filter(flat, 3, mode="nearest")  # nor the voxels next to padding
    if not float(alive.sum()) >= _ALIVE * float(clear.sum()):
        shut: NDArray[Any] = values[clear & flat] if bool((clear & flat).any()) else values[clear]
        above: NDArray[Any] = shut[shut >= _levels(values)[0]]
        return above if above.size else shut
    found: NDArray[Any] = values[alive]
    places = (np.argwhere(alive) * mm // _BLOCK_MM).astype(int)
    blocks = np.ravel_multi_index(tuple(places.T), tuple(places.max(axis=0) + 1))
    _, blocks, sizes = np.unique(blocks, return_inverse=True, return_counts=True)
    means = np.bincount(blocks, found.astype(np.float64)) / sizes
    first, quarter = np.percentile(means, [5.0, 25.0])
    dark: NDArray[Any] = found[(means <= quarter + 3.0 * (quarter - first))[blocks]]
    return dark


def _levels(values: NDArray[Any]) -> tuple[float, float, float]:
    """The lowest number that is not padding, the level of air, the median of tissue."""
    sample = _thinned(values).astype(np.float64)
    if not bool(np.isfinite(sample).all()):
        raise NotDefacedError("not_finite")
    top = float(np.percentile(sample, 98.0))
    low = float(sample.min())
    rest = sample[sample > low]
    if low < _BELOW_AIR and rest.size:
        second = float(np.percentile(rest, 0.1))
        if second - low > _GAP * (top - low):
            sample, low = rest, second
    if not top > low:
        raise NotDefacedError("no_head")
    counts, edges = np.histogram(sample, bins=256, range=(low, top))
    dark = int(counts[:64].argmax())  # air is the commonest of the darkest quarter
    air = float(edges[dark]) if dark == 0 else float(edges[dark : dark + 2].mean())
    tissue = sample[sample > air + _BET * (top - air)]
    if tissue.size == 0:
        raise NotDefacedError("no_head")
    return low, air, float(np.median(tissue))


def _thinned(values: NDArray[Any]) -> NDArray[Any]:
    step = max(1, round((values.size / _SAMPLE) ** (1 / 3)))
    return values[::step, ::step, ::step].ravel()


def _corners(values: NDArray[Any], low: float) -> list[NDArray[Any]]:
    """Eight corner blocks, a tenth of each axis; padding is counted as air at its lowest."""
    edge = [max(1, size // 10) for size in values.shape]
    ends = [(slice(0, e), slice(size - e, size)) for e, size in zip(edge, values.shape, strict=True)]
    return [np.maximum(values[where].ravel(), low) for where in product(*ends)]


def _near_trunk(found: NDArray[np.bool_], mm: NDArray[np.float64]) -> NDArray[np.bool_]:
    """What lies within reach of the largest thick part."""
    step = _step(mm)
    coarse = np.pad(found[:: step[0], :: step[1], :: step[2]], 1, mode="edge")
    thick = ndimage.distance_transform_edt(coarse, sampling=mm * step)[1:-1, 1:-1, 1:-1] > _CORE_MM
    if not bool(thick.any()):
        raise NotDefacedError("no_head")
    return _around(_largest(thick), mm, _REACH_MM, found.shape)


def _around(
    coarse: NDArray[np.bool_], mm: NDArray[np.float64], reach: float, shape: tuple[int, ...]
) -> NDArray[np.bool_]:
    """What lies within reach, in mm, of a mask given on every ``_step``-th voxel; to within 2 mm."""
    step = _step(mm)
    near = ndimage.distance_transform_edt(~coarse, sampling=mm * step) <= reach
    for axis in range(3):
        near = near.repeat(step[axis], axis=axis)
    whole: NDArray[np.bool_] = near[: shape[0], : shape[1], : shape[2]]
    return whole


def _step(mm: NDArray[np.float64]) -> NDArray[np.int_]:
    """Every which voxel makes a grid of about 2 mm."""
    return np.maximum(1, np.floor(_COARSE_MM / mm)).astype(int)


def _largest(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    labels, count = ndimage.label(mask)
    if count == 0:
        raise NotDefacedError("no_head")
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    largest: NDArray[np.bool_] = labels == sizes.argmax()
    return largest


def _closed(mask: NDArray[np.bool_], mm: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Closing with a ball; what lies outside the image is neither head nor air."""
    reach = np.floor(_CLOSE_MM / mm + 1e-6).astype(int)
    corner = np.indices(tuple(2 * reach + 1)) - reach[:, None, None, None]
    ball = np.linalg.norm(corner * mm[:, None, None, None], axis=0) <= _CLOSE_MM + 1e-6
    wide = np.pad(mask, [(r, r) for r in reach], mode="edge")
    shut: NDArray[np.bool_] = ndimage.binary_closing(wide, ball)
    return shut[tuple(slice(r, r + size) for r, size in zip(reach, mask.shape, strict=True))] | mask


def _filled(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Without the air that is shut in: in space, and in any plane of the grid, as the bends of an ear canal are."""
    shut = mask.copy()
    for axis in range(3):
        plane = np.zeros((3, 3, 3), dtype=bool)
        cross = [1, 1, 1]
        plane[tuple(cross)] = True
        for other in {0, 1, 2} - {axis}:
            for end in (0, 2):
                plane[tuple(end if a == other else 1 for a in range(3))] = True
        labels, count = ndimage.label(~mask, structure=plane)
        open_ = np.zeros(count + 1, dtype=bool)
        for other in {0, 1, 2} - {axis}:
            for end in (0, -1):
                open_[labels.take(end, axis=other)] = True
        open_[0] = False
        shut |= ~mask & ~open_[labels]
    filled: NDArray[np.bool_] = ndimage.binary_fill_holes(shut)
    return filled


def _box(mask: NDArray[np.bool_], margin: NDArray[np.int_]) -> tuple[slice, ...]:
    (found,) = ndimage.find_objects(mask.astype(np.uint8))
    return tuple(
        slice(max(0, side.start - int(m)), min(size, side.stop + int(m)))
        for side, m, size in zip(found, margin, mask.shape, strict=True)
    )
