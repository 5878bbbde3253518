"""The region that may change: every landmark of a face is in its core, whoever it is and however the head lies."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.defacing.face_region import Region
from tests.support.heads import scan

FACE = ("nose_tip", "nasion", "mouth", "chin", "eye_left", "eye_right", "ear_left", "ear_right", "brow")


def _turned(degrees: float) -> NDArray[np.float64]:
    """(4, 4) a head that looks up or down."""
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn = np.eye(4)
    turn[1:3, 1:3] = ((cos, -sin), (sin, cos))
    return turn


def _at(region: Region, to_template: NDArray[np.float64], point: NDArray[np.float64]) -> float:
    """The share at one point of the scanner."""
    grid = np.eye(4)
    grid[:3, 3] = point
    return float(region.share(to_template, grid, (1, 1, 1))[0, 0, 0])


@pytest.mark.parametrize("number", range(6))
def test_nothing_of_the_original_is_left_at_any_landmark_of_a_face(number: int) -> None:
    made = scan(number)
    for name in FACE:
        assert _at(Region(), made.to_template, made.landmarks[name]) == 1.0, name
    assert _at(Region(), made.to_template, made.landmarks["vertex"]) == 0.0


def test_a_head_that_is_pitched_has_the_same_region() -> None:
    made = scan(0)
    pitch = _turned(30.0)  # of the scanner
    straight = Region().share(made.to_template, made.volume.affine, made.volume.values.shape)
    pitched = Region().share(
        made.to_template @ np.linalg.inv(pitch), pitch @ made.volume.affine, made.volume.values.shape
    )
    np.testing.assert_allclose(pitched, straight, atol=1e-4)


def test_a_region_that_ignored_the_registration_would_miss_a_pitched_face() -> None:
    made = scan(0)
    pitch = _turned(-40.0)
    shares = [_at(Region(), made.to_template, (pitch @ [*made.landmarks[name], 1.0])[:3]) for name in FACE]
    assert min(shares) < 1.0


def test_the_share_rises_over_the_feather_and_no_faster() -> None:
    made = scan(0)
    share = Region(feather_mm=16.0).share(np.eye(4), made.volume.affine, made.volume.values.shape)
    assert share.dtype == np.float32
    assert (float(share.min()), float(share.max())) == (0.0, 1.0)
    edge = 4.0  # mm of a voxel
    for axis in range(3):
        assert float(np.abs(np.diff(share, axis=axis)).max()) <= 1.05 * edge / 16.0


def test_surface_is_everything() -> None:
    made = scan(0)
    share = Region("surface").share(made.to_template, made.volume.affine, made.volume.values.shape)
    assert bool((share == 1.0).all())


def test_over_the_vault_nothing_far_from_the_brain_is_scalp() -> None:
    region, grid = Region(), np.diag((4.0, 4.0, 4.0, 1.0))
    far = np.full((1, 1, 30), 50.0, np.float32)
    found = region.too_far(np.eye(4), grid, far)[0, 0]
    assert bool(found.all())
    grid[2, 3] = -130.0  # the neck
    assert not bool(region.too_far(np.eye(4), grid, far).any())
    grid[2, 3] = 0.0
    assert not bool(region.too_far(np.eye(4), grid, np.full((1, 1, 30), 20.0, np.float32)).any())


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": "nose"},
        {"margin_mm": 0.0},
        {"margin_mm": float("nan")},
        {"margin_mm": 30.0},
        {"feather_mm": 0.0},
        {"feather_mm": 60.0},
        {"air_mm": 0.0},
        {"air_mm": 50.0},
    ],
)
def test_what_would_change_the_brain_or_keep_a_face_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="region"):
        Region(**wrong)  # type: ignore[arg-type]  # wrong on purpose
