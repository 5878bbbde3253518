"""The hull: exact against scipy's own test of points, the paper's formulation against loops, and the two together."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates
from scipy.spatial import ConvexHull, Delaunay

from agent.defacing.head_mask import head_mask
from agent.defacing.privacy_transform import filled
from agent.volumes.errors import NotDefacedError
from tests.support.heads import real_head
from tests.support.paper_hull import exact_hull, intersections, rotated, rotations, sampled_hull, surface

EYE = np.eye(4)


@lru_cache
def head(step: int = 4) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """The mask of the real head."""
    volume, _ = real_head(step)
    return head_mask(volume), volume.affine


def dice(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Overlap."""
    return 2.0 * float((a & b).sum()) / float(a.sum() + b.sum())


def blob(side: int, seed: int) -> NDArray[np.bool_]:
    """A ball with dents and bumps."""
    rng = np.random.default_rng(seed)
    points = (np.indices((side,) * 3) - (side - 1) / 2).reshape(3, -1)
    found = np.linalg.norm(points, axis=0) < 0.25 * side
    for _ in range(4):
        at = rng.normal(size=3) * 0.2 * side
        found |= np.linalg.norm(points - at[:, None], axis=0) < 0.15 * side
    dent = rng.normal(size=3) * 0.2 * side
    found &= ~(np.linalg.norm(points - dent[:, None], axis=0) < 0.15 * side)
    return found.reshape((side,) * 3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("affine", [EYE, np.diag([1.0, 2.5, 0.7, 1.0]), np.diag([-1.0, 1.0, 1.0, 1.0])])
def test_the_exact_hull_is_what_scipy_says_of_every_voxel(seed: int, affine: NDArray[np.float64]) -> None:
    mask = blob(14, seed)
    grid = np.argwhere(np.ones_like(mask)).astype(np.float64)
    inside = Delaunay(np.argwhere(mask)).find_simplex(grid, tol=1e-7) >= 0
    assert (exact_hull(mask, affine) == inside.reshape(mask.shape)).all()


def test_the_exact_hull_of_an_oblique_grid_is_the_same() -> None:
    mask = blob(16, 5)
    turned = EYE.copy()
    turned[:3, :3] = rotations(1, np.random.default_rng(0))[0] * 1.7
    turned[:3, 3] = (-90.0, 40.0, 7.0)
    assert (exact_hull(mask, turned) == exact_hull(mask, EYE)).all()


def test_the_exact_hull_of_the_head_holds_it_and_is_convex() -> None:
    mask, affine = head()
    hull = exact_hull(mask, affine)
    assert not (mask & ~hull).any()
    assert hull.sum() > mask.sum()
    assert (exact_hull(hull, affine) == hull).all()
    assert middles_inside(hull)
    dented = hull.copy()
    dented[8:32, 40:, 10:30] = False
    dented[18:22, 40:, 10:30] = hull[18:22, 40:, 10:30]  # a nose
    assert not middles_inside(dented)


def middles_inside(mask: NDArray[np.bool_]) -> bool:
    """Whether the voxel half-way between two voxels of the mask is in it, for many pairs."""
    inside = np.argwhere(mask)
    rng = np.random.default_rng(0)
    a, b = (inside[rng.integers(len(inside), size=20_000)] for _ in range(2))
    even = ((a + b) % 2 == 0).all(axis=1)
    assert even.sum() > 1000
    return bool(mask[tuple(((a + b) // 2)[even].T)].all())


@pytest.mark.parametrize(
    "mask", [np.zeros((9, 9, 9), bool), np.pad(np.ones((5, 5, 1), bool), ((2, 2), (2, 2), (4, 4)))]
)
def test_nothing_and_a_plate_have_no_hull(mask: NDArray[np.bool_]) -> None:
    with pytest.raises(NotDefacedError, match="no_head"):
        exact_hull(mask, EYE)


def test_half_spaces_cut_what_lies_before_them() -> None:
    planes = np.array([[1.0, 0.0, 0.0, -3.0], [0.0, 0.0, -1.0, 1.0], [0.0, 0.6, 0.8, -4.0]])
    inside = filled(planes, EYE, (6, 6, 6))
    for i, j, k in product(range(6), repeat=3):
        assert inside[i, j, k] == (i <= 3 and k >= 1 and 0.6 * j + 0.8 * k <= 4.0 + 1e-9)


def looped_map(m: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Eq. 2-4 as they are printed."""
    s_ = m.shape[0]
    seen = np.zeros(m.shape)

    def zeta(k: tuple[int, ...], a: int, d: int) -> int:
        return (s_ - 1) - k[a] if d == +1 else k[a]

    for a, d in product(range(3), (-1, +1)):
        for k in product(range(s_), repeat=3):
            if not m[k]:
                continue
            ray = [(*k[:a], s, *k[a + 1 :]) for s in range(s_)]
            if zeta(k, a, d) == min(zeta(p, a, d) for p in ray if m[p]):
                seen[k] += 1.0 / 6.0
    return seen


def looped_rotation(x: NDArray[np.float64], turn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Voxel by voxel: the value at p came from R^-1 p."""
    c = (x.shape[0] - 1) / 2
    moved = np.zeros(x.shape)
    for p in product(range(x.shape[0]), repeat=3):
        source = np.linalg.inv(turn) @ (np.array(p) - c) + c
        moved[p] = map_coordinates(x, source[:, None], order=1, mode="constant")[0]
    return moved


def test_intersection_maps_are_the_loops_of_equations_2_to_4() -> None:
    m = blob(12, 2)
    assert np.allclose(intersections(m), looped_map(m), atol=1e-6)
    assert intersections(m).max() <= 1.0
    assert not intersections(m)[~m].any()


def test_the_average_over_rotations_is_the_loop_of_equations_1_and_5() -> None:
    # even and in the middle, so that the larger cube it is turned in has the same centre
    m = np.zeros((12, 12, 12), bool)
    m[3:9, 4:8, 3:9] = True
    m[5:7, 5:7, 2:10] = True
    turns = rotations(5, np.random.default_rng(4))
    z = np.zeros(m.shape)
    for turn in turns:
        turned = looped_rotation(m.astype(np.float64), turn) >= 0.5
        z += looped_rotation(looped_map(turned), turn.T) / len(turns)
    found = surface(m, 5, np.random.default_rng(4))
    assert np.allclose(found, z, atol=1e-5)
    assert found.min() >= 0.0
    assert found.max() <= 1.0


def test_rotations_are_uniform_on_so3() -> None:
    turns = rotations(4000, np.random.default_rng(0))
    assert np.allclose(turns @ turns.transpose(0, 2, 1), np.eye(3), atol=1e-12)
    assert np.allclose(np.linalg.det(turns), 1.0)
    assert np.abs(turns.mean(axis=0)).max() < 0.05  # E R = 0
    angle = np.arccos(np.clip((np.trace(turns, axis1=1, axis2=2) - 1) / 2, -1, 1))
    assert angle.mean() == pytest.approx(np.pi / 2 + 2 / np.pi, abs=0.03)  # density (1 - cos) / pi


def test_what_is_turned_and_turned_back_is_where_it_was() -> None:
    m = blob(24, 1)
    turn = rotations(1, np.random.default_rng(3))[0]
    back = rotated((rotated(m, turn) >= 0.5), turn.T) >= 0.5
    assert dice(back, m) > 0.9
    assert dice(rotated(m, turn) >= 0.5, m) < 0.9


def test_the_papers_hull_comes_near_to_the_exact_one() -> None:
    mask, affine = head()
    exact = exact_hull(mask, affine)
    z = surface(mask, 32, np.random.default_rng(0))
    hull = sampled_hull(z, np.random.default_rng(1), triangles=400)
    assert dice(hull, exact) >= 0.98
    assert dice(hull, exact) > dice(mask, exact) - 0.02
    few = sampled_hull(z, np.random.default_rng(1))
    assert dice(few, exact) >= 0.96  # a hundred triangles


def test_fewer_triangles_give_a_hull_that_holds_the_one_of_more() -> None:
    mask, _ = head()
    z = surface(mask, 8, np.random.default_rng(0))
    few, more, every = (sampled_hull(z, np.random.default_rng(1), count) for count in (30, 100, 10**6))
    assert not (more & ~few).any()
    assert not (every & ~more).any()
    assert few.sum() > more.sum() > every.sum()


def test_a_certain_sample_with_all_triangles_is_the_exact_hull() -> None:
    mask, affine = head()
    certain = intersections(mask[:38, :38, :38]) > 0  # as if every voxel seen were drawn
    found = sampled_hull(certain.astype(np.float32), np.random.default_rng(0), 10**6)
    assert (found == exact_hull(mask[:38, :38, :38], affine)).all()


def test_crossing_the_shadows_of_rays_would_keep_the_face() -> None:
    """Why the hull is not what lies between the hits of all rays: with more turns that becomes the head itself."""
    side = 48
    points = np.indices((side,) * 3) - (side - 1) / 2
    head_ = np.linalg.norm(points, axis=0) < 15
    nose = (np.abs(points[0]) < 2.5) & (np.abs(points[2]) < 5) & (points[1] > 0) & (points[1] < 20)
    face = head_ | nose
    hull = exact_hull(face, EYE)

    def shadows(turns: int) -> NDArray[np.bool_]:
        kept = np.ones(face.shape, bool)
        for turn in rotations(turns, np.random.default_rng(0)):
            turned = rotated(face, turn) >= 0.5
            between = np.ones_like(turned)
            for axis in range(3):
                ahead = np.logical_or.accumulate(turned, axis)
                behind = np.flip(np.logical_or.accumulate(np.flip(turned, axis), axis), axis)
                between &= ahead & behind
            kept &= rotated(between, turn.T) > 0.5
        return kept

    around_nose = hull & ~face
    assert (shadows(2) & around_nose).sum() > (shadows(24) & around_nose).sum()
    assert dice(shadows(24), face) > 0.97
    assert (shadows(24) & around_nose).sum() < 0.2 * around_nose.sum()  # a hull fills it all


def test_the_hull_has_far_fewer_planes_than_voxels() -> None:
    mask, _ = head()
    assert len(ConvexHull(np.argwhere(mask)).equations) < 2000
