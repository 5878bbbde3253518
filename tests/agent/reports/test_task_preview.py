"""The sheet of ``task preview``: what is drawn of an input, and how."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from agent.reports.task_preview import LARGEST, LabelWord, Plane, PreviewCard, TaskPreview, planes_of, render
from agent.storage.example_pixels import ImagePlace

GREY = ImagePlace()


def card(*planes: Plane, ends: tuple[float, float] = (0.0, 1.0), word: str = "ill") -> PreviewCard:
    return PreviewCard(1, (LabelWord(word, "there"),), planes, (), ends)


def page(*cards: PreviewCard, facts: tuple[tuple[str, str], ...] = ()) -> str:
    return render(TaskPreview("looked-at", facts, ("told",), cards, ((2, "blank"),), (("held", "3", "2"),))).decode()


def first_picture(text: str, at: int = 0) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(re.findall(r"base64,(\S+?)'", text)[at]))))


def plane(pixels: NDArray[np.float32], mask: NDArray[np.int64] | None = None) -> Plane:
    (made,) = planes_of(pixels[None], mask, [GREY], colour=False)
    return made


def test_one_range_of_greys_holds_for_the_whole_sheet_so_that_a_wrong_window_is_seen() -> None:
    dark, bright = np.full((8, 8), 0.1, np.float32), np.full((8, 8), 0.9, np.float32)
    text = page(card(plane(dark), ends=(0.1, 0.1)), card(plane(bright), ends=(0.9, 0.9)))
    assert (first_picture(text).max(), first_picture(text, 1).min()) == (26, 230)
    wide = page(card(plane(dark - 2), ends=(-1.9, -1.9)), card(plane(bright + 2), ends=(2.9, 2.9)))
    assert (first_picture(wide).max(), first_picture(wide, 1).min()) == (0, 255)
    assert "Black is -1.9 or less on every picture, white is 2.9 or more." in wide


@pytest.mark.parametrize(("white", "flagged"), [(0.5, False), (0.8, True)])
def test_a_picture_that_is_mostly_at_the_ends_of_the_range_is_flagged(white: float, flagged: bool) -> None:
    pixels = np.full((10, 10), 0.5, np.float32)
    pixels[: int(10 * white)] = 1.0
    assert ("is the window right?" in page(card(plane(pixels)))) is flagged


def test_an_outline_is_of_its_segments_colour_and_lies_inside_the_segment() -> None:
    mask = np.zeros((16, 16), np.int64)
    mask[4:12, 4:12], mask[6:9, 6:9] = 1, 2
    text = page(card(plane(np.full((16, 16), 0.2, np.float32), mask)))
    plain, outlined = first_picture(text), first_picture(text, 1)
    assert plain.shape == (16, 16)
    times = outlined.shape[0] // 16
    colours = {tuple(map(int, one)) for one in outlined.reshape(-1, 3)}
    assert colours == {(51, 51, 51), (240, 228, 66), (86, 180, 233)}
    for number, colour in ((1, (240, 228, 66)), (2, (86, 180, 233))):
        where = (outlined == colour).all(axis=2)
        assert where.any()
        assert (mask.repeat(times, 0).repeat(times, 1)[where] == number).all()
    assert (outlined[:, 0] == 51).all(), "a picture's edge is no outline"


def test_a_large_picture_is_drawn_by_means_of_squares_and_says_so() -> None:
    pixels = np.zeros((2 * LARGEST, 2 * LARGEST), np.float32)
    pixels[::2] = 1.0
    made = plane(pixels, (pixels > 2).astype(np.int64))
    assert (made.pixels.shape, made.shrunk) == ((LARGEST, LARGEST), 2)
    assert np.allclose(made.pixels, 0.5)
    assert "drawn at 1/2" in page(card(made))


def test_slices_of_a_volume_go_through_its_middle_or_through_most_of_the_mask() -> None:
    values = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    axial, coronal, sagittal = planes_of(values[None], None, [], colour=False)
    assert np.array_equal(axial.pixels, values[2])
    assert np.array_equal(coronal.pixels, values[::-1, 3])
    assert np.array_equal(sagittal.pixels, values[::-1, :, 4])
    assert [one.title for one in (axial, coronal, sagittal)] == [
        "axial, 3 of 4",
        "coronal, 4 of 6",
        "sagittal, 5 of 8",
    ]
    mask = np.zeros(values.shape, np.int64)
    mask[0, 1, 7] = 2
    axial, coronal, sagittal = planes_of(values[None], mask, [], colour=False)
    assert np.array_equal(axial.pixels, values[0])
    assert np.array_equal(coronal.pixels, values[::-1, 1])
    assert sagittal.mask is not None
    assert np.argwhere(sagittal.mask).tolist() == [[3, 1]]


def test_texts_are_words_on_the_page_and_it_runs_nothing() -> None:
    text = page(card(plane(np.eye(4, dtype=np.float32)), word="<b>&'\""), facts=(("<i>", "</table>"),))
    assert "&lt;b&gt;&amp;&#x27;&quot;" in text
    assert "&lt;i&gt;" in text
    assert "<i>" not in text
    assert "default-src 'none'" in text
    for told in ("FOR THIS SITE ONLY", "example 2", "blank", "held"):
        assert told in text
