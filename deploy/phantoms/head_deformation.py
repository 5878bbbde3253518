"""Who a head phantom is: a smooth invertible map of every point of the person's head to a point of the root.

The map is of two parts that know nothing of each other, the head's and the brain's, each of its own random numbers.
They meet between the brain and the skin: inside the brain only the brain's counts, from ``_MEET`` millimetres off it
only the head's. Only ``size`` is of both, because a brain fits its skull. Where the whole has no fold, neither brain,
skull and skin nor the fluid between them can change places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.interpolate import BSpline

__all__ = ["STEP", "Warp", "draw", "least_stretch"]

Floats = NDArray[np.float32]

STEP: Final = 6.0  # mm between nodes of a map
_KNOT: Final = 27.0  # mm between the control points of the random part
_MEET: Final = 15.0  # mm off the brain
_LEAST: Final = 0.25  # of the Jacobian determinant
_CENTRE: Final = (0.0, -18.0, 5.0)  # mm, about which a head grows

# Parts of a face: middle (mirrored when x > 0), half widths of the window, where they move to, and how far (sd, mm).
_MOVES: Final = (
    ((0, 106, -82), (16, 20, 18), (0, 1, 0), 4.5),  # nose length
    ((0, 104, -84), (14, 18, 14), (0, 0, 1), 3.5),  # nose tip up or down
    ((0, 92, -58), (12, 16, 16), (0, 1, 0), 3.0),  # bridge
    ((0, 90, -18), (45, 22, 13), (0, 1, 0), 2.5),  # brow
    ((0, 85, 25), (50, 35, 25), (0, 1, 0), 3.5),  # forehead
    ((0, 80, -142), (26, 26, 18), (0, 1, 0), 5.0),  # chin forward
    ((0, 75, -150), (40, 40, 24), (0, 0, 1), 5.0),  # chin down
    ((70, 5, -118), (22, 32, 26), (1, 0, 0), 5.0),  # jaw width
    ((62, 48, -72), (22, 24, 18), (1, 0, 0), 4.0),  # cheek bones
    ((48, 62, -92), (20, 20, 18), (0, 1, 0), 3.5),  # cheeks
    ((0, 84, -116), (22, 16, 15), (0, 1, 0), 3.0),  # lips
    ((38, 76, -42), (18, 14, 13), (0, 1, 0), 2.5),  # eyes, deep or not
    ((97, -34, -45), (16, 26, 34), (1, 0, 0), 4.0),  # ears stick out
    ((92, -28, -20), (14, 26, 16), (0, 0, 1), 3.0),  # ears' height
    ((0, -120, 0), (60, 35, 45), (0, 1, 0), 4.0),  # back of the head
    ((60, -20, -150), (30, 50, 30), (1, 0, 0), 4.0),  # neck
)
# Parts that widen or narrow about their middle: middle, half widths, axis, sd of the factor.
_WIDTHS: Final = (
    ((0, 95, -84), (20, 22, 16), 0, 0.16),  # nose
    ((0, 82, -117), (32, 18, 14), 0, 0.14),  # mouth
    ((0, 82, -117), (34, 16, 10), 2, 0.14),  # lips' height
    ((38, 76, -42), (16, 16, 14), 0, 0.10),  # eyes
    ((92, -27, -47), (16, 26, 32), 2, 0.10),  # ears
    ((0, 75, -143), (34, 26, 18), 0, 0.12),  # chin
)


@dataclass(frozen=True, slots=True, eq=False)
class Warp:
    """A map of points of a person's head onto the root: a displacement in mm on nodes ``STEP`` apart."""

    nodes: Floats  # (3, a, b, c)
    low: NDArray[np.float64]  # (3,) mm, the first node
    brain: NDArray[np.float64]  # (4, 4) the affine that is nearest to the map inside the brain

    def __call__(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Root millimetres of (3, ...) millimetres of the person."""
        where = (points - self.low.reshape(3, *[1] * (points.ndim - 1))) / STEP
        moved = [ndimage.map_coordinates(n, where, order=1, mode="nearest") for n in self.nodes]
        return np.asarray(points + np.stack(moved))

    def inverse(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where in the person (3, ...) millimetres of the root lie, to a hundredth of a millimetre."""
        found = points.astype(np.float64)
        for _ in range(60):
            wrong = self(found) - points
            found = found - 0.7 * wrong
            if float(np.abs(wrong).max()) < 0.01:
                break
        return found


def draw(
    head: np.random.Generator,
    brain: np.random.Generator,
    size: NDArray[np.float64],
    box: tuple[NDArray[np.float64], NDArray[np.float64]],
    away: tuple[Floats, float],
) -> Warp:
    """Draw one person.

    Args:
        head: draws face and head.
        brain: draws the brain; independent of ``head``.
        size: (3,) factors of the skull, of head and brain alike.
        box: lowest and highest millimetres of the root.
        away: millimetres off the root's brain (a, b, c), 0 inside, and the millimetres between its voxels.
    """
    low = box[0] - 2 * STEP
    axes = [low[a] + STEP * np.arange(int(np.ceil((box[1][a] - low[a]) / STEP)) + 3) for a in range(3)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"))
    centre = np.reshape(_CENTRE, (3, 1, 1, 1))
    scaled = (grid - centre) * (1 / size.reshape(3, 1, 1, 1) - 1)
    own = (grid - centre) * (1 / head.normal(1, 0.02, (3, 1, 1, 1)) - 1)
    of_head = own + _parts(axes, head) + _random(axes, head, sd=2.4, uneven=0.7)
    of_brain = (grid - centre) * (1 / brain.normal(1, 0.012, (3, 1, 1, 1)) - 1) + _random(axes, brain, 1.3, 0.7)
    of_head, of_brain = _tamed(of_head), _tamed(of_brain)
    share = 1.0
    while True:
        inside = grid + share * of_brain + scaled
        at = (inside - box[0].reshape(3, 1, 1, 1)) / away[1]
        off = ndimage.map_coordinates(away[0], at, order=1, mode="nearest")
        t = np.clip((off - 1) / _MEET, 0, 1)
        weight = 1 - t * t * (3 - 2 * t)
        moved = scaled + share * (weight * of_brain + (1 - weight) * of_head)
        if least_stretch(moved.astype(np.float32)) > _LEAST or share < 0.2:
            break
        share *= 0.9
    held = off <= 0
    there = np.concatenate([grid[:, held], np.ones((1, int(held.sum())))])
    fit, *_ = np.linalg.lstsq(there.T, (grid + moved)[:, held].T, rcond=None)
    affine = np.eye(4)
    affine[:3] = fit.T
    return Warp(moved.astype(np.float32), low, affine)


def least_stretch(nodes: Floats) -> float:
    """The least Jacobian determinant of a map (3, a, b, c), at all corners of its cells: above 0 it has no fold."""
    cells = tuple(n - 1 for n in nodes.shape[1:])
    slopes = [
        [np.diff(n, axis=a) / np.float32(STEP) + np.float32(c == a) for a in range(3)] for c, n in enumerate(nodes)
    ]
    least = np.inf
    for corner in np.ndindex(2, 2, 2):
        # the slope along an axis is that of the cell's edge which ends in this corner
        at = [
            tuple(slice(None) if a == b else slice(corner[b], corner[b] + cells[b]) for b in range(3))
            for a in range(3)
        ]
        (p, q, r), (s, t, u), (v, w, x) = ([row[a][at[a]] for a in range(3)] for row in slopes)
        least = min(least, float((p * (t * x - u * w) - q * (s * x - u * v) + r * (s * w - t * v)).min()))
    return least


def _tamed(moved: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same with less of it, until it has no fold."""
    while not least_stretch(moved.astype(np.float32)) > _LEAST + 0.1:
        moved = moved * 0.9
    return moved


def _window(
    axes: list[NDArray[np.float64]], middle: tuple[float, ...], widths: tuple[float, ...]
) -> NDArray[np.float64]:
    x, y, z = (np.exp(-0.5 * ((a - m) / w) ** 2) for a, m, w in zip(axes, middle, widths, strict=True))
    window: NDArray[np.float64] = x[:, None, None] * y[None, :, None] * z
    return window


def _parts(axes: list[NDArray[np.float64]], rng: np.random.Generator) -> NDArray[np.float64]:
    """Every part of the face moved and widened, in the way that is given for it. Left and right nearly alike."""
    shape = tuple(len(a) for a in axes)
    moved = np.zeros((3, *shape))
    for middle, widths, to, sd in _MOVES:
        amount = rng.normal(0, sd)
        for side in (1, -1) if middle[0] else (1,):
            size = amount + rng.normal(0, 0.12 * sd)
            window = _window(axes, (side * middle[0], *middle[1:]), widths)
            for axis in np.flatnonzero(to):
                moved[axis] -= size * to[axis] * (side if axis == 0 else 1) * window
    for middle, widths, wide, sd in _WIDTHS:
        amount = rng.normal(0, sd)
        for side in (1, -1) if middle[0] else (1,):
            place = (side * middle[0], *middle[1:])
            along = (axes[wide] - place[wide]).reshape([-1 if a == wide else 1 for a in range(3)])
            moved[wide] -= amount * along * _window(axes, place, widths)
    return moved


def _random(
    axes: list[NDArray[np.float64]], rng: np.random.Generator, sd: float, uneven: float
) -> NDArray[np.float64]:
    """A cubic B-spline of random control points, nearly the same on both sides, twice as strong in the face."""
    counts = [int(np.ceil((a[-1] - a[0]) / _KNOT)) + 3 for a in axes]
    knots = rng.normal(0, sd, (3, *counts))
    mirror = np.array([-1, 1, 1]).reshape(3, 1, 1, 1)
    even = (knots + mirror * knots[:, ::-1]) / np.sqrt(2)
    control = even + rng.normal(0, uneven, knots.shape)
    bases = [_basis(a, n) for a, n in zip(axes, counts, strict=True)]
    field = np.einsum("xi,yj,zk,cijk->cxyz", *bases, control, optimize=True)
    return np.asarray(field * 1.6)


def _basis(axis: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    middle = (axis[0] + axis[-1]) / 2
    knots = middle + _KNOT * (np.arange(count + 4) - (count + 3) / 2)
    basis: NDArray[np.float64] = BSpline.design_matrix(axis, knots, 3).toarray()
    return basis
