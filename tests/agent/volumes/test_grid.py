"""Grids: nothing is lost by turning axes, bad places in space are refused, and the cube sits where it says."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from itertools import permutations, product

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import (
    CENTRE_MM,
    Cube,
    averaged,
    check,
    cube_at,
    is_grid,
    oriented,
    reoriented,
    resample,
    spacing,
)

HEAD = (64, 72, 60)  # 192 x 216 x 180 mm at 3 mm


def volume(
    affine: NDArray[np.float64] | None = None, shape: tuple[int, ...] = (5, 6, 7), dtype: str = "i2"
) -> Volume:
    values = np.random.default_rng(0).integers(0, 1000, shape).astype(dtype)
    return Volume(values, np.eye(4) if affine is None else affine)


def turned(degrees: tuple[float, float, float], edges: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Volume:
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", degrees, degrees=True).as_matrix() * edges
    affine[:3, 3] = (3.0, -20.0, 11.0)
    return volume(affine)


def refused(given: Volume) -> str:
    with pytest.raises(NotDefacedError) as failure:
        check(given)
    return failure.value.code


@pytest.mark.parametrize("axes", list(permutations(range(3))))
@pytest.mark.parametrize("signs", list(product((1, -1), repeat=3)))
def test_every_orientation_comes_back_bit_for_bit(axes: tuple[int, ...], signs: tuple[int, ...]) -> None:
    affine = np.eye(4)
    affine[:3, :3] = 0.0
    for axis, (to, sign) in enumerate(zip(axes, signs, strict=True)):
        affine[to, axis] = sign * (1.0 + axis)
    given = volume(affine)
    straight = oriented(given)
    assert nibabel.aff2axcodes(straight.affine) == ("R", "A", "S")
    assert reoriented(straight.values, given).tobytes() == given.values.tobytes()
    assert reoriented(straight.values > 500, given).tolist() == (given.values > 500).tolist()
    # a voxel lies where it lay
    index = np.array([1, 2, 3])
    place = (affine @ [*index, 1.0])[:3]
    there = np.rint(np.linalg.solve(straight.affine, [*place, 1.0])[:3]).astype(int)
    assert straight.values[tuple(there)] == given.values[tuple(index)]


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.floats(-180, 180)] * 3))
def test_an_oblique_grid_keeps_its_voxels_and_places(degrees: tuple[float, float, float]) -> None:
    given = turned(degrees, (1.0, 1.2, 0.9))
    straight = oriented(given)
    assert sorted(spacing(straight.affine).round(9)) == [0.9, 1.0, 1.2]
    assert np.array_equal(reoriented(straight.values, given), given.values)
    moved = resample(given.values, given.affine, straight.values.shape, straight.affine)
    assert np.abs(moved - straight.values).max() < 1e-3


def test_what_lies_on_another_grid_is_not_turned_back() -> None:
    with pytest.raises(ValueError, match="oriented grid"):
        reoriented(np.zeros((5, 6, 8)), turned((0.0, 90.0, 0.0)))


def test_a_grid_for_heads_passes_upright_flipped_and_oblique() -> None:
    for matrix in (np.eye(3), np.diag([-1.0, 1.0, 1.0]), Rotation.from_euler("xyz", (10, 30, 70), True).as_matrix()):
        affine = np.eye(4)
        affine[:3, :3] = 3 * matrix
        check(volume(affine, HEAD))


def sheared(cosine: float) -> Volume:
    affine = np.diag([3.0, 3.0, 3.0, 1.0])
    affine[1, 2] = 3 * cosine
    return volume(affine, HEAD)


def test_a_tilted_gantry_is_refused_and_rounding_is_not() -> None:
    assert refused(sheared(np.sin(np.radians(5)))) == "bad_affine"
    check(sheared(1e-4))


def test_a_singular_or_unfinished_affine_is_no_grid() -> None:
    flat = np.diag([1.0, 1.0, 0.0, 1.0])
    empty = np.full((4, 4), np.nan)
    perspective = np.eye(4)
    perspective[3, 0] = 0.1
    for affine in (flat, empty, perspective, np.eye(3)):
        assert not is_grid(affine)
    assert refused(Volume(np.zeros(HEAD), perspective)) == "bad_affine"


@pytest.mark.parametrize(
    ("shape", "edges", "code"),
    [
        ((240, 240, 30), (1.0, 1.0, 5.0), "too_coarse"),
        ((160, 160, 60), (1.0, 1.0, 3.5), "too_coarse"),
        ((320, 320, 80), (0.6, 0.6, 2.5), "too_coarse"),
        ((128, 128, 20), (1.5, 1.5, 2.0), "part_of_head"),
        ((128, 128, 1), (1.5, 1.5, 2.0), "not_a_volume"),
        ((60, 60, 60), (1000.0, 1000.0, 1000.0), "bad_affine"),  # micrometres
        ((60, 60, 60), (0.003, 0.003, 0.003), "part_of_head"),  # metres
    ],
)
def test_a_grid_that_cannot_show_a_face_is_refused(
    shape: tuple[int, ...], edges: tuple[float, float, float], code: str
) -> None:
    assert refused(volume(np.diag([*edges, 1.0]), shape)) == code


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_voxel_that_is_no_number_is_refused(wrong: float) -> None:
    given = volume(np.diag([3.0, 3.0, 3.0, 1.0]), HEAD, "f4")
    check(given)
    given.values[4, 5, 6] = wrong
    assert refused(given) == "not_finite"


def test_resampling_reads_a_ramp_exactly_and_fills_outside() -> None:
    i, j, k = np.indices((20, 20, 20))
    source = np.diag([2.0, 2.0, 2.0, 1.0])
    target = np.diag([1.0, 1.0, 1.0, 1.0])
    target[:3, 3] = 5.0
    got = resample(i + 10.0 * j + 100.0 * k, source, (8, 8, 8), target)
    at = (np.indices((8, 8, 8)) + 5.0) / 2
    assert got.dtype == np.float32
    assert np.abs(got - (at[0] + 10 * at[1] + 100 * at[2])).max() < 1e-3
    target[:3, 3] = 500.0
    assert (resample(i, source, (4, 4, 4), target, fill=-7.0) == -7.0).all()


def test_a_mask_stays_a_mask_and_its_border_is_not_lost() -> None:
    mask = np.ones((6, 6, 6), bool)
    nudged = np.eye(4)
    nudged[:3, 3] = -1e-9  # outside by a rounding error
    assert (resample(mask, np.eye(4), (6, 6, 6), nudged, order=0) == 1.0).all()
    assert resample(mask, np.eye(4), (6, 6, 6), nudged).min() > 0.999


def test_averaging_skips_no_voxel() -> None:
    values = np.zeros((64, 64, 64), np.int16)
    values[::8, ::8, ::8] = 512  # one voxel in each block of 8
    target = np.diag([8.0, 8.0, 8.0, 1.0])
    target[:3, 3] = 4.0
    assert resample(values, np.eye(4), (7, 7, 7), target).max() == 0.0
    assert np.allclose(averaged(values, np.eye(4), (7, 7, 7), target)[1:-1, 1:-1, 1:-1], 1.0)


def test_the_cube_sits_on_the_same_anatomy_and_keeps_lengths() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        to_template = np.eye(4)
        turn = Rotation.random(random_state=int(rng.integers(1 << 30))).as_matrix()
        stretch = np.diag(rng.uniform(0.9, 1.1, 3))
        to_template[:3, :3] = stretch @ turn
        to_template[:3, 3] = rng.uniform(-40, 40, 3)
        cube = cube_at(to_template, 32)
        assert cube.shape == (32, 32, 32)
        assert np.allclose(spacing(cube.affine), 8.0)
        assert np.linalg.det(cube.affine[:3, :3]) > 0
        middle = to_template @ cube.affine @ [15.5, 15.5, 15.5, 1.0]
        assert np.allclose(middle[:3], CENTRE_MM)
        # a point of the template 60 mm away lies within a scaling's reach of where a perfect fit has it
        point = np.linalg.solve(to_template, [CENTRE_MM[0], CENTRE_MM[1] + 60.0, CENTRE_MM[2], 1.0])
        index = np.linalg.solve(cube.affine, point)[:3]
        assert np.abs(index - (15.5, 15.5 + 60 / 8, 15.5)).max() < 1.0


def test_the_cube_of_the_template_itself_is_upright_and_holds_a_head() -> None:
    cube = cube_at(np.eye(4), 128)
    assert np.array_equal(cube.affine[:3, :3], 2 * np.eye(3))
    corners = [cube.affine @ [n, n, n, 1.0] for n in (0, 127)]
    assert corners[0].tolist() == [-127.0, -127.0, -147.0, 1.0]
    assert corners[1].tolist() == [127.0, 127.0, 107.0, 1.0]


@pytest.mark.parametrize("wrong", [np.diag([-1.0, 1, 1, 1]), np.diag([0.0, 1, 1, 1]), np.full((4, 4), np.nan)])
def test_a_registration_that_mirrors_or_collapses_gives_no_cube(wrong: NDArray[np.float64]) -> None:
    with pytest.raises(NotDefacedError, match="bad_affine"):
        cube_at(wrong, 32)


def test_a_cube_has_equal_edges() -> None:
    with pytest.raises(ValueError, match="equal edges"):
        Cube(8, np.diag([1.0, 1.0, 1.1, 1.0]))
