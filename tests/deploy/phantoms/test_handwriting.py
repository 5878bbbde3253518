"""Made-up handwriting: what it looks like to a computer, and that nothing but its own generator draws it."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from deploy.phantoms.handwriting import CHARACTERS, FONTS, _skeleton, glyphs


def test_there_is_a_picture_of_each_character_as_often_as_asked() -> None:
    images, labels, names = glyphs(2, 8, np.random.default_rng(0))
    assert images.shape == (124, 8, 8)
    assert images.dtype == np.uint8
    assert names == CHARACTERS
    assert np.array_equal(np.bincount(labels), np.full(62, 2))
    assert images.reshape(124, -1).max(axis=1).min() > 60  # none is empty
    assert len(np.unique(images.reshape(124, -1), axis=0)) == 124


def test_they_have_the_17_levels_of_a_scanned_digit() -> None:
    images, _, _ = glyphs(5, 8, np.random.default_rng(0), "0123456789")
    levels = {round(255 * count / 16) for count in range(17)}
    assert set(np.unique(images).tolist()) <= levels
    real = load_digits().images * (255 / 16)
    assert abs(images.mean() - real.mean()) < 20
    assert abs((images == 0).mean() - (real == 0).mean()) < 0.1


@pytest.mark.parametrize("side", [8, 16, 32])
def test_any_side_is_drawn(side: int) -> None:
    images, _, _ = glyphs(1, side, np.random.default_rng(1), "aZ4")
    assert images.shape == (3, side, side)
    assert 0.1 < (images > 0).mean() < 0.8


def test_every_letter_of_every_font_can_be_thinned() -> None:
    for font in FONTS:
        for character in CHARACTERS:
            points = _skeleton(font, character)
            assert 8 <= len(points) <= 250  # a line, and no area
            assert np.abs(points).max() == 1.0


def test_the_same_generator_draws_the_same_pictures() -> None:
    first, again, other = (glyphs(1, 8, np.random.default_rng(seed))[0] for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_printed_digit_resembles_a_written_one() -> None:
    """More than half are told by pixels alone, and not all: there is something left to learn from private ones."""
    images, labels, _ = glyphs(60, 8, np.random.default_rng(2), "0123456789")
    real = load_digits()
    model = LogisticRegression(max_iter=200).fit(images.reshape(-1, 64) / 255.0, labels)
    assert 0.5 < float((model.predict(real.data / 16.0) == real.target).mean()) < 0.9


@pytest.mark.parametrize(
    ("count", "side", "characters"), [(0, 8, "a"), (1, 7, "a"), (1, 8, "aa"), (1, 8, "é"), (1, 8, "")]
)
def test_what_cannot_be_drawn_is_refused(count: int, side: int, characters: str) -> None:
    with pytest.raises(ValueError, match=r"there is an image|characters are"):
        glyphs(count, side, np.random.default_rng(0), characters)
