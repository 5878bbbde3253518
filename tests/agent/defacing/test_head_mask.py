"""Where the head ends: the mask does not move with units, bias, noise, voxel size, tables or ghosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.head_mask import head_mask, noise, threshold
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from tests.support.heads import real_head


def head(step: int = 3) -> tuple[Volume, NDArray[np.bool_]]:
    """The real head and its published brain at ``step`` mm."""
    return real_head(step)


def dice(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Overlap."""
    return 2.0 * float((a & b).sum()) / float(a.sum() + b.sum())


def changed(values: NDArray[Any]) -> NDArray[np.bool_]:
    """The mask of other numbers on the head's grid."""
    return head_mask(Volume(values, head()[0].affine))


def rician(values: NDArray[Any], sd: float) -> NDArray[np.float64]:
    """Magnitude noise."""
    rng = np.random.default_rng(0)
    real = values + rng.normal(0.0, sd, values.shape)
    made: NDArray[np.float64] = np.hypot(real, rng.normal(0.0, sd, values.shape))
    return made


def tomogram() -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The head in Hounsfield units above a table of 6 mm, and its mask, both with room behind."""
    values = head()[0].values
    rng = np.random.default_rng(1)
    units = np.where(values > 20, 40.0, -1000.0) + rng.normal(0.0, 10.0, values.shape)
    units = np.pad(units, ((5, 5), (15, 5), (0, 0)), constant_values=-1000.0)
    units[3:-3, 3:5] = 100.0
    return units, np.pad(head_mask(head()[0]), ((5, 5), (15, 5), (0, 0)))


def test_the_threshold_of_the_real_head_is_about_twenty() -> None:
    assert 15.0 < threshold(head()[0].values) < 26.0


def test_otsus_threshold_would_move_where_this_one_does_not() -> None:
    values = head()[0].values.astype(np.float64)
    ramp = np.linspace(0.6, 1.4, values.shape[1])[None, :, None]
    assert abs(threshold(values * ramp) - threshold(values)) < 4.0


def test_the_threshold_follows_scale_and_offset() -> None:
    values = head()[0].values.astype(np.float64)
    assert threshold(values * 7.0 - 1000.0) == pytest.approx(threshold(values) * 7.0 - 1000.0, abs=3.0)


def test_the_threshold_lies_above_the_noise_of_the_corners() -> None:
    values = rician(head()[0].values, 12.0)
    corner = values[:6, :6, :6]
    assert threshold(values) > np.percentile(corner, 97.0)


def test_the_head_holds_its_brain_and_has_no_holes() -> None:
    volume, brain = head()
    mask = head_mask(volume)
    litres = float(mask.sum()) * 27e-6
    assert not (brain & ~mask).any()
    assert 3.9 < litres < 4.3  # 4.11 l at 1 mm
    assert (ndimage.binary_fill_holes(mask) == mask).all()


def test_a_plain_threshold_has_the_holes_that_are_filled_here() -> None:
    volume, _ = head()
    assert (volume.values > threshold(volume.values)).sum() < 0.95 * head_mask(volume).sum()


def test_an_open_canal_is_filled_and_the_air_before_it_is_not() -> None:
    ball = np.linalg.norm(np.indices((60, 60, 60)) - 29.5, axis=0) < 24
    ball[29:31, 29:31, 30:] = False  # from the middle out to the surface
    mask = head_mask(Volume(ball * 100.0, np.diag([3.0, 3.0, 3.0, 1.0])))
    assert mask[29, 29, 35:48].all()
    assert not mask[29, 29, 56:].any()


def test_bias_and_noise_hardly_move_the_mask() -> None:
    volume, _ = head()
    values = volume.values.astype(np.float64)
    ramp = np.linspace(0.6, 1.4, values.shape[0])[:, None, None] * np.linspace(1.2, 0.8, values.shape[2])
    assert dice(changed(values * ramp), head_mask(volume)) > 0.98
    assert dice(changed(rician(values, 10.0).astype(np.int16)), head_mask(volume)) > 0.98


def test_lengths_are_millimetres_and_not_voxels() -> None:
    fine, coarse = head_mask(head(2)[0]), head_mask(head(4)[0])
    assert dice(fine[::2, ::2, ::2], coarse) > 0.99
    volume, _ = head(2)
    stretched = Volume(volume.values[:, :, ::2], volume.affine @ np.diag([1.0, 1.0, 2.0, 1.0]))
    assert dice(fine[:, :, ::2], head_mask(stretched)) > 0.99


def test_a_table_of_a_ct_is_no_part_of_the_head_in_any_unit() -> None:
    units, wanted = tomogram()
    signed = changed(units.astype(np.int16))
    stored = changed(np.maximum(units + 1024.0, 0.0).astype(np.uint16))
    for mask in (signed, stored):
        assert not mask[:, 3:5].any()
        assert dice(mask, wanted) > 0.97
    assert (units[:, 3:5] > threshold(units)).any()  # the threshold alone would keep it


def test_padding_far_below_air_is_not_taken_for_air() -> None:
    units, wanted = tomogram()
    padded = units.copy()
    padded[:4] = padded[-4:] = -3024.0
    assert threshold(padded.astype(np.int16)) == pytest.approx(threshold(units), abs=20.0)
    assert dice(changed(padded.astype(np.int16)), wanted) > 0.97
    air = noise(Volume(padded.astype(np.int16), head()[0].affine), wanted)
    assert air.min() > -1100


def test_a_detached_ghost_is_neither_head_nor_air() -> None:
    values = np.pad(head()[0].values.astype(np.float64), ((0, 0), (60, 0), (0, 0)))
    wanted = changed(values)
    ghost = 0.5 * np.roll(values, -60, axis=1)  # brighter than the threshold, apart from the head
    ghost[:, 58:] = 0.0
    both = rician(values + ghost, 2.0)
    mask = changed(both)
    assert (both[ghost > 40] > threshold(both)).all()
    assert dice(mask, wanted) > 0.98
    air = noise(Volume(both, head()[0].affine), mask)
    assert air.size > 1000
    assert np.percentile(air, 99.0) < 10.0  # Rayleigh noise of 2, no ghost of 20 and more
    assert np.percentile(both[~mask], 99.0) > 20.0


def test_air_is_taken_from_where_there_is_noise_and_not_from_padding() -> None:
    values = rician(head()[0].values, 3.0)
    values[:4] = 0.0
    volume = Volume(values, head()[0].affine)
    air = noise(volume, head_mask(volume))
    assert air.mean() == pytest.approx(3.0 * np.sqrt(np.pi / 2), rel=0.1)


def test_air_of_nothing_but_padding_is_that_padding() -> None:
    volume, _ = head()
    air = noise(volume, head_mask(volume))
    assert air.dtype == volume.values.dtype
    assert not air.any()


def test_a_picture_without_air_is_refused() -> None:
    volume, _ = head()
    with pytest.raises(NotDefacedError, match="part_of_head"):
        noise(volume, np.ones(volume.values.shape, dtype=bool))


@pytest.mark.parametrize(
    ("values", "code"),
    [
        (np.zeros((60, 60, 60), np.int16), "no_head"),
        (np.full((60, 60, 60), 7.0), "no_head"),
        (np.pad(np.full((8, 8, 8), 90.0), 26), "no_head"),  # 14 ml: a small phantom
        (np.pad(np.full((40, 40, 2), 90.0), ((10, 10), (10, 10), (29, 29))), "no_head"),  # a plate
        (np.where(np.indices((60, 60, 60)).sum(0) % 7 == 0, np.nan, 1.0), "not_finite"),
    ],
)
def test_what_is_no_head_is_refused(values: NDArray[Any], code: str) -> None:
    with pytest.raises(NotDefacedError, match=code):
        head_mask(Volume(values, np.diag([3.0, 3.0, 3.0, 1.0])))
