"""The convex hull of a head, as C-DeID-GAN writes it (section 3.1) and exactly: the peers of the product's own.

:func:`surface` and :func:`sampled_hull` are the paper's formulation: rays from six sides onto randomly turned heads,
a Bernoulli sample of what they hit, the hull of the sample, and the half-spaces of a hundred of its triangles.
:func:`exact_hull` takes the hull of the mask itself, which is what the former comes near to.

To keep the voxels that lie between first and last hit of *every* ray is no such thing: that shape, the visual hull,
has the dents of the head and comes near to the face itself as the rotations grow more.
"""

from __future__ import annotations

from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import ConvexHull, QhullError, distance

from agent.defacing.privacy_transform import filled
from agent.volumes.errors import NotDefacedError

_SPREAD: Final = 3


def exact_hull(mask: NDArray[np.bool_], affine: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Voxels whose centre lies in the convex hull of the centres of the mask's voxels; none of the mask is left out.

    Only the two ends of every column of voxels can be corners of the hull. Each plane of the hull then bounds every
    column from above or below, so that the planes are tried on columns and not on voxels.

    Args:
        mask: (i, j, k).
        affine: (4, 4), index to mm; qhull works in mm, so that its tolerance is a length. The hull is the same in
            any other unit.
    Raises:
        NotDefacedError: ``no_head`` where the mask is empty or flat.
    """
    lower, upper = _ends(mask)
    points = np.concatenate([lower, upper]).astype(np.float64)
    return filled(_planes(points @ affine[:3, :3].T + affine[:3, 3]), affine, mask.shape)


def surface(mask: NDArray[np.bool_], turns: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """How surely a voxel is seen from outside: Z of Eq. 5.

    Heads are turned about the centre of their bounding box in a cube that holds them in every pose, so that none is
    cut off; both ways with trilinear interpolation, the turned head binarised again at a half.

    Args:
        mask: (i, j, k), 1[x >= delta], voxels of equal edges.
        turns: K, rotations drawn uniformly from SO(3).
        rng: of the run.
    Returns:
        (i, j, k) float32 in [0, 1].
    """
    head, place, offset = _centred(mask)
    found = np.zeros(head.shape, dtype=np.float32)
    for turn in rotations(turns, rng):
        # Eq. 1 and Eq. 5: m = Rot(1[x >= delta]; R), and its intersection map back by the inverse of R
        turned = rotated(head, turn) >= 0.5
        found += rotated(intersections(turned), turn.T)
    seen = np.zeros(mask.shape, dtype=np.float32)
    inner = tuple(slice(o, o + side.stop - side.start) for o, side in zip(offset, place, strict=True))
    seen[place] = found[inner] / turns
    return np.clip(seen, 0.0, 1.0)


def intersections(head: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Lambda of Eq. 4: the share of six axis-parallel rays, one from each side, that meet a voxel first (Eq. 2-3)."""
    seen = np.zeros(head.shape, dtype=np.float32)
    for axis, side in product(range(3), (+1, -1)):
        towards = head if side == -1 else np.flip(head, axis)
        target = seen if side == -1 else np.flip(seen, axis)
        first = np.expand_dims(towards.argmax(axis=axis), axis)
        hit = np.take_along_axis(towards, first, axis)
        np.put_along_axis(target, first, np.take_along_axis(target, first, axis) + hit / np.float32(6.0), axis)
    return seen


def sampled_hull(z: NDArray[np.float32], rng: np.random.Generator, triangles: int = 100) -> NDArray[np.bool_]:
    """The paper's c(x): the hull of a Bernoulli sample of Z, of which only some triangles cut.

    Fewer half-spaces cut less, so that the result holds the hull of the sample.

    Args:
        z: (i, j, k) in [0, 1], from :func:`surface`.
        rng: of the run.
        triangles: how many triangles of the hull are drawn; 100 suffice for the paper.
    Returns:
        (i, j, k) bool.
    Raises:
        NotDefacedError: ``no_head`` where the sample is empty or flat.
    """
    points = np.argwhere(rng.random(z.shape) < z).astype(np.float64)
    planes = _planes(points)
    drawn = rng.permutation(len(planes))[:triangles]
    return filled(planes[drawn], np.eye(4), z.shape)


def rotations(count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """(count, 3, 3), uniform on SO(3): normalised Gaussian quaternions (Shoemake 1992)."""
    w, x, y, z = (q := rng.standard_normal((count, 4)), q / np.linalg.norm(q, axis=1, keepdims=True))[1].T
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    ).transpose(2, 0, 1)


def rotated(values: NDArray[np.bool_] | NDArray[np.float32], turn: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rot(x; R) about the centre of a cube: what was at p is now at R p."""
    centre = (np.array(values.shape) - 1) / 2
    back = turn.T
    moved: NDArray[np.float32] = ndimage.affine_transform(
        values.astype(np.float32), back, centre - back @ centre, order=1, mode="constant", prefilter=False
    )
    return moved


def _ends(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int_], NDArray[np.int_]]:
    """(n, 3) indices of the first and of the last voxel of every column that has any."""
    i, j = np.nonzero(mask.any(axis=2))
    columns = mask[i, j]
    first = columns.argmax(axis=1)
    last = mask.shape[2] - 1 - columns[:, ::-1].argmax(axis=1)
    return np.stack([i, j, first], axis=1), np.stack([i, j, last], axis=1)


def _planes(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """(f, 4), the planes of the triangles of the hull of (n, 3) points."""
    if len(points) < 4:
        raise NotDefacedError("no_head")
    try:
        planes: NDArray[np.float64] = ConvexHull(points).equations
    except QhullError:
        raise NotDefacedError("no_head") from None
    return planes


def _centred(
    mask: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], tuple[slice, ...], tuple[int, ...]]:
    """The mask in the middle of a cube in which it can turn; where it came from; where it lies now."""
    if not bool(mask.any()):
        raise NotDefacedError("no_head")
    lower, upper = _ends(mask)
    points = np.concatenate([lower, upper])
    # some voxels more on each side, as trilinear interpolation there and back spreads a surface over its neighbours
    start, stop = (
        np.maximum(points.min(axis=0) - _SPREAD, 0),
        np.minimum(points.max(axis=0) + 1 + _SPREAD, mask.shape),
    )
    place = tuple(slice(int(a), int(b)) for a, b in zip(start, stop, strict=True))
    middle = (start + stop - 1) / 2
    radius = float(distance.cdist(points, middle[None]).max())
    side = 2 * (int(np.ceil(radius)) + 1 + _SPREAD)
    offset = tuple(int(side - (b - a)) // 2 for a, b in zip(start, stop, strict=True))
    head = np.zeros((side, side, side), dtype=bool)
    head[tuple(slice(o, o + int(b - a)) for o, a, b in zip(offset, start, stop, strict=True))] = mask[place]
    return head, place, offset
