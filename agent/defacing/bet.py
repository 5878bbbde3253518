"""BET: brain extraction by an inflating surface (Smith 2002, Human Brain Mapping 17:143).

Written here from the paper, all vertices at once: the library on the registry (``brainextractor``) brings an OpenGL
renderer, and compiles for seconds. Lengths are millimetres, whatever the voxels measure. Nothing is drawn by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree

from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import resample, spacing

Points = NDArray[np.float64]  # (vertices, 3), mm along the axes of the grid, from the centre of its first voxel

GRID_MM: Final = 2.0  # the surface moves in a copy of this grain; it is filled in the volume's own
ITERATIONS: Final = 1000
INWARDS_MM: Final = 20.0  # d1: how far inwards the darkest voxel is looked for; the brightest (d2) half as far
HEIGHT_MM: Final = 170.0  # below the crown: lower lies neck, which would draw the first sphere down
_R_LEAST, _R_MOST = 3.33, 10.0  # mm, radii of curvature between which the surface is smoothed more and more
_SUBDIVISIONS: Final = 4  # of an icosahedron: 2562 vertices
_FIT: Final = 0.05  # of the mean edge, the largest step along the normal: 0.5 * lambda_fit of the paper
_PASSES: Final = 4  # at most, each smoother than the last, until the surface does not cut itself
_CUTS: Final = 4000.0  # of :func:`_crossed`, from FSL's own program; the paper gives no number
_FEWEST: Final = 1000  # voxels of the coarse grid that are brighter than air


@dataclass(frozen=True, slots=True, eq=False)
class Sphere:
    """A tessellated unit sphere: triangles and vertex neighbours."""

    points: Points
    faces: NDArray[np.intp]  # (f, 3), counter-clockwise seen from outside
    around: NDArray[np.intp]  # (n, 6) neighbours; where there are five, the last is named twice
    weight: NDArray[np.float64]  # (n, 6), sums to one: 1/6, or 1/5 and once nothing
    touching: NDArray[np.intp]  # (n, 6) faces of each vertex; f (no face) where there are five


@cache
def sphere(subdivisions: int = _SUBDIVISIONS) -> Sphere:
    """An icosahedron, each triangle cut into four again and again, its corners pushed out to radius one."""
    golden = (1 + 5**0.5) / 2
    corners = [(s, t * golden, 0.0) for s in (-1.0, 1.0) for t in (-1.0, 1.0)]
    points = np.array([np.roll(c, turn) for turn in range(3) for c in corners])
    gaps = np.linalg.norm(points[:, None] - points[None], axis=2)
    near = np.isclose(gaps, 2.0)
    faces = np.array(
        [(a, b, c) for a in range(12) for b in range(a) for c in range(b) if near[a, b] and near[b, c] and near[a, c]]
    )
    for _ in range(subdivisions):
        points, faces = _quartered(points, faces)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    outside = np.einsum("fi,fi->f", _normals(points, faces), points[faces].mean(axis=1)) > 0
    faces = np.where(outside[:, None], faces, faces[:, ::-1])
    around, touching = np.full((len(points), 6), -1), np.full((len(points), 6), len(faces))
    for v in range(len(points)):
        mine = np.flatnonzero((faces == v).any(axis=1))
        touching[v, : len(mine)] = mine
        others = np.setdiff1d(faces[mine], [v])
        around[v] = others[np.minimum(np.arange(6), len(others) - 1)]
    six = touching[:, 5] < len(faces)
    weight = np.where(six[:, None], 1 / 6, np.array([[0.2] * 5 + [0.0]]))
    return Sphere(points, faces, around, weight, touching)


def _quartered(points: Points, faces: NDArray[np.intp]) -> tuple[Points, NDArray[np.intp]]:
    edges = np.sort(np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]), axis=1)
    unique, which = np.unique(edges, axis=0, return_inverse=True)
    middle = points[unique].mean(axis=1)
    middle *= np.linalg.norm(points[0]) / np.linalg.norm(middle, axis=1, keepdims=True)
    ab, bc, ca = (which.reshape(3, -1) + len(points)).astype(np.intp)
    a, b, c = faces.T
    new = [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
    return np.concatenate([points, middle]), np.concatenate([np.stack(f, axis=1) for f in new])


def _normals(points: Points, faces: NDArray[np.intp]) -> NDArray[np.float64]:
    a, b, c = points[faces[:, 0]], points[faces[:, 1]], points[faces[:, 2]]
    u, v = b - a, c - a
    x = u[:, 1] * v[:, 2] - u[:, 2] * v[:, 1]
    y = u[:, 2] * v[:, 0] - u[:, 0] * v[:, 2]
    z = u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0]
    return np.stack([x, y, z], axis=1)


@dataclass(frozen=True, slots=True)
class Levels:
    """Intensities and the first sphere, of the paper's section "Estimation of Basic Image and Brain Parameters"."""

    t2: float  # 2 % of the voxels are darker
    t98: float  # 2 % are brighter
    t: float  # air below, head above
    tm: float  # median within the first sphere
    centre: tuple[float, float, float]  # mm
    radius: float  # mm, of a sphere of as many voxels as the head has


def levels(values: NDArray[np.float32], mm: float) -> Levels:
    """Robust intensities; centre of gravity and size of the part of the head within ``HEIGHT_MM`` of the crown.

    Raises:
        NotDefacedError: ``no_head``, too little is brighter than air.
    """
    t2, t98 = (float(x) for x in np.percentile(values, (2, 98)))
    t = t2 + 0.1 * (t98 - t2)
    head = values > t
    slices = np.flatnonzero(head.mean(axis=(0, 1)) > 0.01)  # a slice of noise is no crown
    if not t98 > t2 or slices.size == 0 or not int(head.sum()) >= _FEWEST:
        raise NotDefacedError("no_head")
    head[..., : max(0, int(slices[-1] - HEIGHT_MM / mm))] = False
    where = np.argwhere(head)
    mass = np.minimum(values[head], t98) - t2
    centre = (where * mass[:, None]).sum(axis=0) / mass.sum() * mm
    radius = float((3 * len(where) * mm**3 / (4 * np.pi)) ** (1 / 3))
    inside = values[head][((where * mm - centre) ** 2).sum(axis=1) < radius**2]
    inside = inside[(inside > t2) & (inside < t98)]
    tm = float(np.median(inside)) if inside.size else t98
    return Levels(t2, t98, t, tm, (float(centre[0]), float(centre[1]), float(centre[2])), radius)


def bet(volume: Volume, fraction: float = 0.5) -> NDArray[np.bool_]:
    """The brain of a T1, T2 or proton density head, and what the surface takes with it.

    Args:
        volume: oriented RAS+ (:func:`agent.volumes.grid.oriented`).
        fraction: b_t of Eq. 8 in (0, 1); smaller is a larger brain.

    Returns:
        (i, j, k) bool on the volume's grid.
    Raises:
        NotDefacedError: ``no_head``, nothing to put a sphere into.
    """
    edges = spacing(volume.affine)
    extent = edges * volume.values.shape
    i, j, k = (int(n) for n in np.ceil(extent / GRID_MM))
    coarse = volume.affine.copy()
    coarse[:3, :3] = volume.affine[:3, :3] / edges * GRID_MM
    shift = (GRID_MM / edges - 1) / 2  # the outer corners of the first voxels coincide
    coarse[:3, 3] = volume.affine[:3, 3] + volume.affine[:3, :3] @ shift
    values = resample(volume.values, volume.affine, (i, j, k), coarse, 0)  # a mean would close the gap to the skull
    ball = sphere()
    points = evolved(values, GRID_MM, ball, fraction)
    return filled(points / GRID_MM * (GRID_MM / edges) + shift, ball.faces, volume.values.shape)


def evolved(values: NDArray[np.float32], mm: float, ball: Sphere, fraction: float) -> Points:
    """The surface at rest, (n, 3) mm; again, and smoother, while it cuts itself (the end of its methods)."""
    found = levels(values, mm)
    first = ball.points * (found.radius / 2) + np.array(found.centre)
    points = first
    for attempt in range(_PASSES):
        points = _inflated(_Seen(values, mm, found), ball, first, fraction, attempt)
        if not _crossed(points, first, ball) > _CUTS:
            break
    return np.asarray(points)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    values: NDArray[np.float32]
    mm: float
    levels: Levels


def _inflated(picture: _Seen, ball: Sphere, first: Points, fraction: float, attempt: int) -> Points:
    values, mm, found = picture.values, picture.mm, picture.levels
    room = int(np.ceil(INWARDS_MM / mm)) + 1  # around the image, as dark as anything in it
    wide = np.pad(values, room, constant_values=found.t2)
    flat, most_index = wide.ravel(), np.array(wide.shape, np.int32) - 1
    _, j, k = wide.shape
    depths = np.concatenate([[1.0], np.arange(mm, INWARDS_MM, mm)]).astype(np.float32)[:, None]
    bend, steep = (1 / _R_LEAST + 1 / _R_MOST) / 2, 6 / (1 / _R_LEAST - 1 / _R_MOST)  # E and F of Eq. 5
    shallow = depths[:, 0] < INWARDS_MM / 2
    touching = np.ascontiguousarray(ball.touching.T)  # numpy adds whole columns faster than many short rows
    last = len(ball.faces)
    areas = np.zeros((last + 1, 3))
    x, edge = first.copy(), 0.0
    for n in range(ITERATIONS):
        around = x[ball.around]
        if n == 50 or n % 100 == 0:
            edge = float((np.linalg.norm(around - x[:, None], axis=2) * ball.weight).sum(axis=1).mean())
        areas[:last] = _normals(x, ball.faces)
        normal = areas[touching[0]]
        for faces in touching[1:]:
            normal += areas[faces]
        normal /= np.maximum(np.sqrt(_dot(normal, normal)), 1e-9)[:, None]
        away = np.einsum("nki,nk->ni", around, ball.weight) - x  # s of Eq. 1
        along = _dot(away, normal)
        s_n = along[:, None] * normal
        f2 = 0.5 * (1 + np.tanh(steep * (2 * np.abs(along) / edge**2 - bend)))  # Eq. 4 and 5
        if attempt:
            f2 = np.where(along > 0, np.minimum(f2 * _stiffer(attempt, n), 1.0), f2)
        start, step = (x / mm + (room + 0.5)).astype(np.float32), (normal / mm).astype(np.float32)
        deep = [start[:, a] - step[:, a] * depths for a in range(3)]  # (depths, vertices)
        at = [np.clip(deep[a].astype(np.int32), 0, most_index[a]) for a in range(3)]
        seen = flat[(at[0] * j + at[1]) * k + at[2]]
        least = np.maximum(found.t2, np.minimum(found.tm, seen.min(axis=0)))  # Eq. 6
        most = np.minimum(found.tm, np.maximum(found.t, seen[shallow].max(axis=0)))  # Eq. 7
        local = (most - found.t2) * fraction + found.t2  # Eq. 8
        f3 = 2 * (least - local) / np.maximum(most - found.t2, 1e-9)  # Eq. 9
        x = x + 0.5 * (away - s_n) + f2[:, None] * s_n + (_FIT * edge * f3)[:, None] * normal  # Eq. 3, 10 and 11
    return x


def _dot(a: Points, b: Points) -> NDArray[np.float64]:
    """Of each row, added in the order in which ``sum`` adds three."""
    out: NDArray[np.float64] = a[:, 0] * b[:, 0] + a[:, 1] * b[:, 1] + a[:, 2] * b[:, 2]
    return out


def _stiffer(attempt: int, n: int) -> float:
    """How much more the surface resists bending: for three quarters of the time, then less and less."""
    factor = 10.0 ** (attempt + 1)
    if n > 0.75 * ITERATIONS:
        return 4 * (1 - n / ITERATIONS) * (factor - 1) + 1
    return factor


def _crossed(points: Points, first: Points, ball: Sphere) -> float:
    """How much vertices that were apart have come together: large when the surface cuts itself."""

    def mean_edge(x: Points) -> float:
        return float((np.linalg.norm(x[ball.around] - x[:, None], axis=2) * ball.weight).sum(axis=1).mean())

    edge, edge_first = mean_edge(points), mean_edge(first)
    pairs = cKDTree(points).query_pairs(edge, output_type="ndarray")
    if not pairs.size:
        return 0.0
    now = np.linalg.norm(points[pairs[:, 0]] - points[pairs[:, 1]], axis=1) / edge
    then = np.linalg.norm(first[pairs[:, 0]] - first[pairs[:, 1]], axis=1) / edge_first
    return 2 * float(((now - then) ** 2).sum())


def filled(points: Points, faces: NDArray[np.intp], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """The voxels that a closed surface touches or holds.

    Args:
        points: (n, 3) in indices of the grid.
        faces: (f, 3).
        shape: of the grid; what lies outside of it is left out.
    """
    shell: NDArray[np.bool_] = np.zeros([n + 2 for n in shape], bool)  # a margin, so that a cut brain is still closed
    corners = points[faces]
    longest = float(np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=2).max())
    cuts = max(1, int(np.ceil(longest / 0.7)))
    a, b = (x.ravel() for x in np.meshgrid(np.arange(cuts + 1), np.arange(cuts + 1)))
    shares = np.stack([a, b, cuts - a - b], axis=1)[a + b <= cuts] / cuts
    for part in np.array_split(corners, max(1, len(corners) * len(shares) // 2_000_000)):
        drawn = np.rint(np.einsum("sk,fki->fsi", shares, part).reshape(-1, 3)).astype(np.intp) + 1
        drawn = np.clip(drawn, 0, np.array(shell.shape) - 1)
        shell[tuple(drawn.T)] = True
    whole: NDArray[Any] = ndimage.binary_fill_holes(shell)
    return np.asarray(whole[1:-1, 1:-1, 1:-1], bool)
