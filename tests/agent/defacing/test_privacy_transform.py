"""gamma shows the brain and nothing of the rest of a head."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing import privacy_transform
from agent.defacing.brain_extraction import Brain
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.defacing.privacy_transform import (
    Coarse,
    Gamma,
    Population,
    coarse_support,
    faces,
    population_of,
    scaled,
    sphere,
    support,
    transform,
)
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import cube_at, spacing
from tests.support.heads import scan
from tests.support.paper_hull import exact_hull

SIDE = 32
SMOOTH = Coarse(shape="smooth")


@cache
def head(number: int, visit: int = 0) -> HeadScan:
    """A phantom with the truth about its brain, so that nothing but gamma is tested."""
    made = scan(number, visit)
    return HeadScan(made.volume, head_mask(made.volume), Brain(made.brain, 1.0, made.to_template))


@cache
def population() -> Population:
    """Heads that are tested on are not among them."""
    return population_of([head(number) for number in range(100, 104)], SIDE)


def with_outside(of: HeadScan, values: NDArray[np.generic]) -> HeadScan:
    """The same brain in another head."""
    volume = Volume(
        np.where(of.brain.mask, of.volume.values, values).astype(of.volume.values.dtype), of.volume.affine
    )
    return HeadScan(volume, head_mask(volume), of.brain)


def with_other_face(of: HeadScan) -> HeadScan:
    """A longer nose, another chin, other ears: blocks of skin put onto the head where those are."""
    cube = cube_at(of.brain.to_template, 1, 1.0).affine
    to_cube = np.linalg.inv(cube) @ of.volume.affine
    points = np.moveaxis(np.indices(of.skin.shape), 0, -1) @ to_cube[:3, :3].T + to_cube[:3, 3]
    x, y, z = np.moveaxis(points, -1, 0)
    front = float(y[of.skin].max())
    nose = (np.abs(x) < 12) & (y > 40) & (y < front + 14) & (np.abs(z + 20) < 14)
    chin = (np.abs(x) < 16) & (y > 30) & (y < front - 2) & (np.abs(z + 85) < 12)
    ears = (np.abs(np.abs(x) - 75) < 22) & (np.abs(y + 15) < 12) & (np.abs(z + 30) < 16)
    skin = nose | chin | ears
    other = with_outside(of, np.where(skin, np.percentile(of.volume.values, 90), of.volume.values))
    return HeadScan(other.volume, of.skin | skin, of.brain)  # the same threshold, so that nothing else moves


def plain(of: HeadScan) -> NDArray[np.bool_]:
    """The paper's hull, on the cube."""
    cube = cube_at(of.brain.to_template, SIDE)
    hull = exact_hull(of.skin, of.volume.affine)
    found: NDArray[np.bool_] = privacy_transform._onto(of, hull, cube) >= 0.5
    return found


def dice(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Overlap."""
    return 2.0 * float((a & b).sum()) / float(a.sum() + b.sum())


def same(a: Gamma, b: Gamma) -> bool:
    """Bit for bit."""
    return a.stack().tobytes() == b.stack().tobytes()


def test_heads_that_share_a_brain_have_one_gamma_whatever_their_face() -> None:
    mine = head(0)
    other = with_other_face(mine)
    assert (mine.skin != other.skin).sum() > 100
    assert same(transform(mine, SIDE, population()), transform(other, SIDE, population()))


def test_the_papers_hull_tells_those_faces_apart() -> None:
    assert (plain(head(0)) != plain(with_other_face(head(0)))).sum() > 20


def test_nothing_outside_the_brain_reaches_gamma() -> None:
    mine = head(1)
    noise = np.random.default_rng(0).integers(0, 200, mine.volume.values.shape)
    other = HeadScan(with_outside(mine, np.where(mine.skin, noise, 0)).volume, mine.skin, mine.brain)
    assert same(transform(mine, SIDE, population()), transform(other, SIDE, population()))


def test_a_smooth_hull_has_the_back_of_the_head_and_not_the_face() -> None:
    mine = head(0)
    wanted = coarse_support(mine, population(), SMOOTH)
    assert (coarse_support(with_other_face(mine), population(), SMOOTH) == wanted).all()
    wide = mine.skin.copy()
    wide[:, :12] |= np.roll(mine.skin, -5, axis=1)[:, :12]  # 20 mm more at the back
    longer = HeadScan(mine.volume, wide, mine.brain)
    assert (coarse_support(longer, population(), SMOOTH) > wanted).any()
    assert (coarse_support(longer, population(), Coarse()) == coarse_support(mine, population(), Coarse())).all()


def test_without_the_population_over_the_face_a_smooth_hull_would_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy_transform, "faces", lambda at: np.zeros(len(at), bool))
    mine, other = head(0), with_other_face(head(0))
    fine = Coarse(shape="smooth", smooth_deg=20.0, step_mm=2.0, range_mm=30.0)
    assert (coarse_support(mine, population(), fine) != coarse_support(other, population(), fine)).any()


def test_hulls_of_different_persons_are_one_and_plain_hulls_link_scans() -> None:
    persons = range(4)
    ours = {transform(head(n, v), SIDE, population()).hull.tobytes() for n in persons for v in (0, 1)}
    assert len(ours) == 1
    first, second = ([plain(head(n, v)) for n in persons] for v in (0, 1))
    matched = [int(np.argmax([dice(a, b) for b in second])) for a in first]
    assert matched == list(persons)


def test_a_smooth_hull_is_not_the_same_for_all() -> None:
    """Why it is not the default: it links scans more often than chance."""
    fine = Coarse(shape="smooth", smooth_deg=20.0, step_mm=2.0)
    reaches = {coarse_support(head(n), population(), fine).tobytes() for n in range(4)}
    assert len(reaches) > 2


def test_the_hull_holds_the_brain_with_room_and_is_convex() -> None:
    for number in (0, 3):
        made = transform(head(number), SIDE, population())
        assert not (made.brain & ~made.hull).any()
        near = ndimage.distance_transform_edt(~made.brain) * made.cube.mm
        assert made.hull[near <= 6.0].all()
        assert (exact_hull(made.hull, made.cube.affine) == made.hull).all()


def test_a_population_smaller_than_the_brain_is_pushed_out() -> None:
    tiny = Population(np.full(500, 20.0, np.float32), population().skin, 1)
    made = transform(head(0), SIDE, tiny)
    assert not (made.brain & ~made.hull).any()
    brain = support(head(0), head(0).brain.mask, 500)
    assert np.allclose(coarse_support(head(0), tiny, Coarse()), np.maximum(brain + 10.0, 30.0))


def test_the_brain_is_its_own_values_and_nothing_lies_beside_it() -> None:
    cube = cube_at(np.eye(4), SIDE)
    rng = np.random.default_rng(0)
    values = rng.integers(1, 200, cube.shape).astype(np.int16)
    mask = np.linalg.norm(np.indices(cube.shape) - 15.5, axis=0) < 8
    skin = np.linalg.norm(np.indices(cube.shape) - 15.5, axis=0) < 12
    made = transform(HeadScan(Volume(values, cube.affine), skin, Brain(mask, 1.0, np.eye(4))), SIDE, population())
    assert (made.brain == mask).all()
    assert not made.intensities[~mask].any()
    top = np.percentile(values[mask], 99.0)
    assert np.allclose(made.intensities[mask], np.clip(values[mask] / top, 0, 1.5) / 1.5, atol=1e-6)


def test_a_finer_grid_is_averaged_and_the_edge_of_the_brain_keeps_its_level() -> None:
    mine = head(2)
    flat = np.where(mine.brain.mask, 80, 4000).astype(np.uint16)  # bright all round
    made = transform(HeadScan(Volume(flat, mine.volume.affine), mine.skin, mine.brain), SIDE, population())
    assert np.allclose(made.intensities[made.brain], 1.0 / 1.5, atol=1e-5)
    volume = float(mine.brain.mask.sum()) * float(spacing(mine.volume.affine).prod())
    assert float(made.brain.sum()) * made.cube.mm**3 == pytest.approx(volume, rel=0.03)


def test_the_stack_is_hull_brain_and_intensities() -> None:
    made = transform(head(0), SIDE, population())
    stack = made.stack()
    assert stack.shape == (3, SIDE, SIDE, SIDE)
    assert stack.dtype == np.float32
    assert (stack[0] == made.hull).all()
    assert (stack[1] == made.brain).all()
    assert (stack[2] == made.intensities).all()


def test_a_support_is_how_far_the_head_reaches() -> None:
    cube = cube_at(np.eye(4), SIDE)
    ball = np.linalg.norm(np.indices(cube.shape) - 15.5, axis=0) <= 10
    made = HeadScan(Volume(np.ones(cube.shape, np.int16), cube.affine), ball, Brain(ball, 1.0, np.eye(4)))
    reach = support(made, ball, 500)
    assert reach == pytest.approx(80.0, abs=4.0)
    points = (np.argwhere(ball) - 15.5) * 8.0
    assert np.allclose(reach, (points @ sphere(500).T).max(axis=0))


def test_directions_are_spread_evenly() -> None:
    at = sphere(500)
    assert np.allclose(np.linalg.norm(at, axis=1), 1.0)
    assert np.abs(at.mean(axis=0)).max() < 0.01
    nearest = np.sort(at @ at.T, axis=1)[:, -2]
    assert np.rad2deg(np.arccos(nearest)).min() > 3.5
    with pytest.raises(ValueError, match="read-only"):
        at[0, 0] = 0.0


def test_nose_chin_ears_and_neck_are_face_and_occiput_and_crown_are_not() -> None:
    out = np.array(
        [[0, 1, -0.1], [0, 0.7, -0.7], [0.95, -0.2, -0.2], [-0.95, -0.2, -0.2], [0, 0, -1], [0, -1, 0.2], [0, 0, 1]]
    )
    assert faces(out / np.linalg.norm(out, axis=1, keepdims=True)).tolist() == [True] * 5 + [False] * 2


def test_a_population_is_the_mean_of_its_heads() -> None:
    made = population_of([head(100), head(101)], 16)
    assert made.count == 2
    reach = [support(head(n), head(n).skin, 500) for n in (100, 101)]
    assert np.allclose(made.support, np.mean(reach, axis=0), atol=1e-3)
    assert made.skin.shape == (16, 16, 16)
    assert made.skin[8, 8, 8] == pytest.approx(1.0)
    assert made.skin[0, 0, 0] == 0.0


@pytest.mark.parametrize("alpha", [0.85, 1.0, 1.15])
def test_scaling_enlarges_about_the_middle(alpha: float) -> None:
    made = transform(head(0), SIDE, population())
    large = scaled(made, alpha)
    size = int(np.floor(alpha * SIDE))
    ratio = (size / SIDE) ** 3
    assert large.brain.sum() / made.brain.sum() == pytest.approx(ratio, rel=0.03)
    assert large.cube is made.cube
    move = ((SIDE - size) // 2 if size < SIDE else -((size - SIDE) // 2)) + (size / SIDE - 1) / 2
    where = np.array([np.argwhere(g.brain).mean(axis=0) for g in (made, large)])
    assert where[1] == pytest.approx(where[0] * size / SIDE + move, abs=0.1)
    if alpha == 1.0:
        assert same(large, made)


def test_scaling_interpolates_linearly() -> None:
    made = transform(head(0), SIDE, population())
    size = int(np.floor(1.15 * SIDE))
    at = (np.arange(SIDE) + (size - SIDE) // 2 + 0.5) * SIDE / size - 0.5
    points = np.stack(np.meshgrid(at, at, at, indexing="ij"))
    wanted = ndimage.map_coordinates(made.intensities, points, order=1, mode="nearest")
    large = scaled(made, 1.15)
    assert np.allclose(large.intensities[large.brain], wanted[large.brain], atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, -1.0, 3.0, float("nan")])
def test_a_scale_that_makes_no_head_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        scaled(transform(head(0), SIDE, population()), alpha)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": "tight"},
        {"dilate_mm": 9.0},
        {"dilate_mm": float("nan")},
        {"margin_mm": 0.0},
        {"directions": 8},
        {"smooth_deg": 5.0},
        {"range_mm": 100.0},
        {"step_mm": 0.5},
    ],
)
def test_a_hull_that_is_not_coarse_cannot_be_asked_for(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"hull|shape"):
        Coarse(**change)  # type: ignore[arg-type]  # wrong on purpose


def test_a_gamma_that_shows_more_than_the_brain_cannot_be_built() -> None:
    made = transform(head(0), SIDE, population())
    leaky = made.intensities.copy()
    leaky[~made.brain] = 0.1
    with pytest.raises(ValueError, match="intensities in the brain"):
        Gamma(made.hull, made.brain, leaky, made.cube)
    with pytest.raises(ValueError, match="brain lies in the hull"):
        Gamma(np.zeros_like(made.hull), made.brain, made.intensities, made.cube)


def test_what_has_no_brain_in_the_cube_is_refused() -> None:
    mine = head(0)
    none = HeadScan(mine.volume, mine.skin, Brain(np.zeros_like(mine.skin), 1.0, mine.brain.to_template))
    with pytest.raises(NotDefacedError, match="brain_volume"):
        transform(none, SIDE, population())
    with pytest.raises(ValueError, match="other directions"):
        transform(mine, SIDE, population(), Coarse(directions=100))
    with pytest.raises(ValueError, match="has heads"):
        population_of([], SIDE)
