"""What is seen of a head: where the surface is, which way it faces, and that specks in the air hide nothing."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image as Pillow

from agent.defacing.reidentification.rendering import (
    VIEWS,
    Camera,
    Surface,
    axes_of,
    before_after,
    camera_at,
    png,
    render,
    renderings,
    surface,
)
from agent.domain import Volume
from tests.support.heads import real_head

RADIUS = 60.0


def ball(mm: float = 3.0, centre: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Volume:
    """A soft ball: 1 inside, 0 outside, half at RADIUS."""
    side = round(210 / mm)
    affine = np.diag((mm, mm, mm, 1.0))
    affine[:3, 3] = -mm * (side - 1) / 2
    at = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), axis=-1) * mm + affine[:3, 3]
    far = np.linalg.norm(at - np.array(centre), axis=-1)
    return Volume(np.clip(0.5 + (RADIUS - far) / (2 * mm), 0, 1).astype(np.float32), affine)


def camera(side: int = 64) -> Camera:
    return Camera(np.eye(4), side, 192.0, 3.0)


def test_the_surface_is_found_between_voxels_and_between_samples() -> None:
    seen = render(Surface(ball().values, ball().affine, 0.5), camera())
    far = np.linalg.norm(seen.points, axis=1)
    middle = far[np.linalg.norm(seen.points[:, [0, 2]], axis=1) < 40]
    assert abs(middle - RADIUS).max() < 0.3  # a tenth of a voxel and of a step
    radial = seen.points / far[:, None]
    assert ((radial * seen.normals).sum(axis=1)[radial[:, 1] > 0.7]).min() > 0.99
    # a depth map on whole voxels would be off by up to one of them
    assert len(np.unique(np.round(seen.depth[np.isfinite(seen.depth)], 3))) > 100


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shows_the_side_that_it_is_named_for(name: str) -> None:
    """A small ball on the left of the head appears where who faces that head sees it."""
    small = ball(centre=(-22.0, 15.0, 10.0))
    seen = render(surface(small, 0.5, 0.0), camera(), VIEWS[name])
    right, up, towards = axes_of(VIEWS[name]).T
    rows, columns = np.nonzero(np.isfinite(seen.depth))
    pitch = camera().pitch_mm
    centre = np.array([-22.0, 15.0, 10.0])
    assert (columns.mean() - 31.5) * pitch == pytest.approx(centre @ right, abs=1.0)
    assert (31.5 - rows.mean()) * pitch == pytest.approx(centre @ up, abs=1.0)
    assert float(np.nanmax(seen.depth)) == pytest.approx(centre @ towards + RADIUS, abs=1.0)
    assert np.allclose(np.linalg.det(axes_of(VIEWS[name])), 1.0)


def test_the_persons_left_is_on_the_right_of_a_picture_from_the_front() -> None:
    assert np.allclose(axes_of(0.0)[:, 0], (-1, 0, 0))
    assert np.allclose(axes_of(90.0)[:, 2], (-1, 0, 0))


def test_axes_and_pose_of_the_scan_change_nothing() -> None:
    one = ball(centre=(10.0, 25.0, -5.0))
    turn = np.array([[0.8, -0.6, 0, 5], [0.6, 0.8, 0, -7], [0, 0, 1, 3], [0, 0, 0, 1.0]])
    flipped = Volume(np.ascontiguousarray(one.values[::-1].transpose(2, 0, 1)), np.eye(4))
    swap = np.array([[0, -3.0, 0, 0], [0, 0, 3.0, 0], [3.0, 0, 0, 0], [0, 0, 0, 1.0]])
    swap[:3, 3] = one.affine[:3, 3] + (3.0 * (one.values.shape[0] - 1), 0, 0)
    other = Volume(flipped.values, turn @ swap)
    a = render(surface(one, 0.5, 0.0), Camera(np.eye(4), 48, 192.0, 3.0))
    b = render(surface(other, 0.5, 0.0), Camera(turn, 48, 192.0, 3.0))
    both = np.isfinite(a.depth) & np.isfinite(b.depth)
    assert both.sum() >= 0.98 * np.isfinite(a.depth).sum()
    assert float(np.abs(a.depth - b.depth)[both].max()) < 0.05


def test_specks_in_the_air_hide_nothing_and_a_piece_cut_loose_is_kept() -> None:
    clean = ball()
    values = clean.values.copy()
    values[30:32, 66:68, 30:32] = 1.0  # in front of the ball
    speckled = render(surface(Volume(values, clean.affine), 0.5, 0.0), camera())
    expected = render(surface(clean, 0.5, 0.0), camera())
    assert np.array_equal(speckled.depth, expected.depth, equal_nan=True)
    values[25:45, 58:68, 25:45] = 1.0
    values[:, 56:58, :] = 0.0
    kept = render(surface(Volume(values, clean.affine), 0.5, 0.0), camera())
    assert float(np.nanmax(kept.depth)) > float(np.nanmax(expected.depth)) + 5


def test_an_empty_volume_shows_nothing_and_breaks_nothing() -> None:
    nothing = render(surface(Volume(np.zeros((40, 40, 40), np.uint8), np.diag((4.0, 4, 4, 1))), 1.0), camera())
    assert np.isnan(nothing.depth).all()
    assert not nothing.shade.any()
    assert nothing.points.shape == (0, 3)


def test_a_level_that_is_no_number_and_a_camera_that_is_not_rigid_are_refused() -> None:
    with pytest.raises(ValueError, match="level"):
        surface(ball(), float("nan"))
    with pytest.raises(ValueError, match="rigid"):
        Camera(np.diag((1.0, 1, 1.1, 1)))
    with pytest.raises(ValueError, match="pixels"):
        Camera(np.eye(4), 4)


def test_the_real_head_has_a_face_in_front_and_none_behind() -> None:
    volume, _ = real_head(2.0)
    seen = surface(volume, 35.0)
    taken = renderings(seen, camera_at(np.eye(4), 64), ("front", "back", "left 90"))
    lower = slice(34, 46)  # brow and orbits: rows below the middle of the picture
    rough = {name: float(np.nanstd(np.diff(one.depth[lower, 24:40], axis=0))) for name, one in taken.items()}
    assert rough["front"] > 1.5 * rough["back"]
    assert 0.2 < float((taken["front"].shade > 0).mean()) < 0.7


def test_a_cut_face_is_seen_to_be_gone() -> None:
    volume, _ = real_head(2.0)
    cut = volume.values.copy()
    cut[:, 85:, :40] = 0
    whole, gone = (
        render(surface(Volume(v, volume.affine), 35.0), camera_at(np.eye(4), 64)) for v in (volume.values, cut)
    )
    both = np.isfinite(whole.depth) & np.isfinite(gone.depth)
    assert float(np.abs(whole.depth - gone.depth)[both].max()) > 15


def test_pictures_are_png_of_the_size_that_was_asked_for() -> None:
    volume, _ = real_head(2.0)
    seen = surface(volume, 35.0)
    sheet = Pillow.open(io.BytesIO(before_after(seen, seen, camera_at(np.eye(4), 48), ("front", "left 60"))))
    assert sheet.size == (96, 96)
    assert sheet.format == "PNG"
    shade = render(seen, camera_at(np.eye(4), 48)).shade
    back = np.asarray(Pillow.open(io.BytesIO(png(shade))))
    assert float(np.abs(back / 255.0 - shade).max()) <= 0.5 / 255 + 1e-6
