"""Pictures of any size at one size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.field_of_view import field, fit, fit_to
from deploy.phantoms.retina import anatomy, photograph
from deploy.reproduction.datasets import real_images


def _noise(h: int, w: int, *colours: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((h, w, *colours), dtype=np.float32) * 0.9 + 0.1


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40), st.booleans(), st.integers(0, 9))
def test_a_fitted_picture_keeps_mean_and_range_of_its_square(
    side: int, more: int, wider: int, colour: bool, seed: int
) -> None:
    picture = _noise(side + more, side + more + wider, *((3,) if colour else ()), seed=seed)
    out = fit(picture, side)
    start = wider // 2
    square = picture[:, start : start + side + more]
    assert out.shape == (side, side, *picture.shape[2:])
    assert out.dtype == np.float32
    assert out.min() >= square.min()
    assert out.max() <= square.max()
    assert abs(float(out.mean(dtype=float)) - float(square.mean(dtype=float))) < 1e-6


@pytest.mark.parametrize("factor", [1, 2, 3, 7])
def test_whole_factors_are_the_means_of_blocks(factor: int) -> None:
    picture = _noise(8 * factor, 8 * factor, 3)
    expected = picture.astype(float).reshape(8, factor, 8, factor, 3).mean((1, 3))
    assert np.allclose(fit(picture, 8), expected, rtol=0, atol=1e-7)


def test_it_agrees_with_another_area_average() -> None:
    picture = _noise(50, 50)
    peer = np.asarray(Image.fromarray(picture).resize((21, 21), Image.Resampling.BOX, reducing_gap=None))
    by_hand = np.kron(picture.astype(float), np.ones((21, 21))).reshape(21, 50, 21, 50).mean((1, 3))
    assert np.allclose(fit(picture, 21), by_hand, rtol=0, atol=1e-6)
    assert np.abs(peer - by_hand).mean() < 0.1  # pillow's box counts whole pixels only


def test_the_pictures_own_size_comes_out_as_it_is_and_is_a_copy() -> None:
    picture = _noise(9, 9, 3)
    out = fit(picture, 9)
    assert np.array_equal(out, picture)
    out[:] = 0
    assert picture.max() > 0


def test_nothing_is_enlarged() -> None:
    for shape in ((7, 100), (100, 7), (7, 7, 3)):
        with pytest.raises(ValueError, match="smaller"):
            fit(_noise(*shape), 8)


@pytest.mark.parametrize("shape", [(8,), (8, 8, 1), (8, 8, 4), (0, 8), (2, 8, 8, 3)])
def test_what_is_no_picture_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="image"):
        fit(np.zeros(shape, np.float32), 1)


def _retina(side: int = 120) -> np.ndarray:
    picture = photograph(anatomy(np.random.default_rng(1)), "left", 4, side, np.random.default_rng(2))
    return picture.astype(np.float32) / np.float32(255)


@pytest.mark.parametrize(("above", "beside"), [(0, 40), (30, 80), (10, 3), (0, 0)])
def test_the_black_around_a_retina_is_cut_away(above: int, beside: int) -> None:
    picture = _retina()
    framed = np.pad(picture, ((above, above), (2 * beside, 0), (0, 0)))
    top, left, length = field(framed)
    assert 110 <= length <= 120
    assert (abs(top - above), abs(left - 2 * beside)) <= (6, 6)
    alone, inside = fit(picture, 32), fit(framed, 32)
    assert np.abs(alone - inside).mean() < 0.01


def test_a_retina_that_the_pictures_edge_cuts_gives_its_inner_square() -> None:
    cut = np.pad(_retina()[15:105], ((0, 0), (30, 30), (0, 0)))
    top, left, length = field(cut)
    assert (top, length) == (0, 90)
    assert abs(left - 45) <= 4


def test_other_bright_things_on_black_are_no_retina() -> None:
    head = np.zeros((100, 100), np.float32)
    y, x = np.ogrid[:100, :100]
    head[((y - 50) / 45) ** 2 + ((x - 50) / 33) ** 2 < 1] = 0.7  # an oval, as a slice of a head is
    spot = np.zeros((100, 100), np.float32)
    spot[45:55, 45:55] = 1
    for picture in (head, spot, np.zeros((100, 100), np.float32)):
        assert field(picture) == (0, 0, 100)
    digit = np.kron(real_images().digits[0], np.ones((4, 4), np.float32))
    assert field(digit) == (0, 0, 32)


def test_a_real_retina_is_found() -> None:
    from skimage import data

    picture = data.retina().astype(np.float32) / np.float32(255)
    framed = np.pad(picture, ((0, 0), (300, 300), (0, 0)))
    top, left, length = field(framed)
    assert length > 1300
    assert abs(left + length / 2 - framed.shape[1] / 2) < 20
    assert abs(top + length / 2 - framed.shape[0] / 2) < 20


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40), st.integers(1, 40))
def test_an_image_is_fitted_to_any_size_that_it_is_not_smaller_than(h: int, w: int, tall: int, wide: int) -> None:
    picture = np.random.default_rng(0).random((tall, wide), dtype=np.float32)
    if tall < h or wide < w:
        with pytest.raises(ValueError, match="smaller"):
            fit_to(picture, (h, w))
        return
    made = fit_to(picture, (h, w))
    assert made.shape == (h, w)
    assert picture.min() <= made.min() <= made.max() <= picture.max()


def test_an_oblong_size_takes_the_centred_part_of_its_proportions() -> None:
    picture = np.random.default_rng(0).random((12, 40, 3), dtype=np.float32)
    made = fit_to(picture, (4, 8))
    assert np.allclose(made, picture[:, 8:32].reshape(4, 3, 8, 3, 3).mean(axis=(1, 3)), atol=1e-6)
