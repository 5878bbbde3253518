"""Text drawn into real pictures by another program (Pillow) is found, and clean real pictures raise no alert."""

from __future__ import annotations

import string

import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from pydicom.data import get_testdata_file
from pydicom.pixels.utils import pixel_array
from sklearn.datasets import load_digits

from agent.deidentify.pixels.burned_in_text import TextFindings, has_burned_in_text, text_lines
from deploy.phantoms.digits import upsample

Values = NDArray[np.int32]
SIZES = (12, 14, 16, 20, 28, 40)
TEXTS = ("MARY", "KOWALCZYK", "1953-04-17", "PID 8841773", "Smith^John", "ABERNATHY^BARTH")
GREY = (
    ("J2K_pixelrep_mismatch.dcm", "pylibjpeg"),
    ("693_J2KI.dcm", "pylibjpeg"),
    ("examples_overlay.dcm", ""),
    ("JPEG2000.dcm", "pylibjpeg"),
    ("CT_small.dcm", ""),
    ("MR_small.dcm", ""),
)


def real(name: str, plugin: str) -> Values:
    path = get_testdata_file(name)
    assert path is not None
    return pixel_array(pydicom.dcmread(path), decoding_plugin=plugin).astype(np.int32)


REAL = {name: real(name, plugin) for name, plugin in GREY}


def pen(text: str, size: int, *, soft: bool) -> NDArray[np.float64]:
    """(h, w) in [0, 1]: 1 is ink, in the font that comes with Pillow."""
    font = ImageFont.load_default(size)
    box = ImageDraw.Draw(Image.new("L", (1, 1))).textbbox((0, 0), text, font=font)
    sheet = Image.new("L" if soft else "1", (int(box[2]) + 4, int(box[3]) + 4))
    ImageDraw.Draw(sheet).text((1, 1), text, fill=255 if soft else 1, font=font)
    return np.asarray(sheet, dtype=np.float64) / (255 if soft else 1)


def write(under: Values, ink: NDArray[np.float64], top: int, left: int, value: float, box: float | None) -> Values:
    values = under.astype(np.float64)
    window = values[top : top + ink.shape[0], left : left + ink.shape[1]]
    if box is not None:
        window[:] = box
    window[:] = window * (1 - ink) + value * ink
    return np.rint(values).astype(np.int32)


def burned(under: Values, number: int, size: int) -> Values | None:
    """A text in a corner or in the middle of the picture, bright or in a bright box; None where it has no room."""
    ink = pen(TEXTS[number % len(TEXTS)], size, soft=number % 3 > 0)
    room = (under.shape[0] - ink.shape[0] - 4, under.shape[1] - ink.shape[1] - 4)
    if min(room) < 4:
        return None
    rng = np.random.default_rng((number, size))
    top, left = (int(rng.choice([3, r // 2, r])) for r in room)
    low, high = float(under.min()), float(under.max())
    window = under[top : top + ink.shape[0], left : left + ink.shape[1]]
    spread = float(np.subtract(*np.percentile(under, (99.5, 0.5))))
    inverse = number % 4 == 3
    if not inverse and np.mean(high - window[ink > 0.5] >= 0.25 * spread) < 0.9:
        return None  # nobody could read it
    return write(under, ink, top, left, low if inverse else high, high if inverse else None)


def test_nineteen_in_twenty_texts_of_12_to_40_pixels_are_found_in_real_pictures() -> None:
    pictures = [burned(under, n, size) for under in REAL.values() for size in SIZES for n in range(6)]
    shown = [has_burned_in_text(p) for p in pictures if p is not None]
    assert len(shown) > 100
    assert np.mean(shown) >= 0.95


@pytest.mark.parametrize("name", REAL)
def test_a_clean_real_picture_raises_no_alarm(name: str) -> None:
    assert text_lines(REAL[name]) == TextFindings(0, 0)
    assert not has_burned_in_text(REAL[name].max() - REAL[name])


def test_the_text_in_a_real_ultrasound_picture_is_found() -> None:
    path = get_testdata_file("examples_rgb_color.dcm")
    assert path is not None
    assert has_burned_in_text(pydicom.dcmread(path).pixel_array)


def test_a_handwritten_digit_alone_raises_no_alarm() -> None:
    digits = upsample((load_digits().images[:300] / 16.0).astype(np.float32))
    assert not any(has_burned_in_text(d) for d in digits)


@pytest.mark.parametrize("text", ["R", "L", "LR", "L 1"])
@pytest.mark.parametrize("size", [16, 28, 40])
def test_a_side_marker_raises_no_alarm(text: str, size: int) -> None:
    under = REAL["J2K_pixelrep_mismatch.dcm"]
    assert not has_burned_in_text(write(under, pen(text, size, soft=True), 20, 20, float(under.max()), None))


def phantoms() -> list[tuple[str, Values]]:
    y, x = np.mgrid[0:256, 0:256]
    rng = np.random.default_rng(7)
    head = np.where(np.hypot(y - 128, (x - 128) * 1.2) < 100, 40, -1000)
    metal = np.where(np.hypot(y - 130, x - 100) < 6, 3071, head) + rng.normal(0, 15, x.shape)
    ruler = head.copy()
    for tick in range(20):
        ruler[250 - (12 if tick % 5 == 0 else 6) : 250, 8 + tick * 12] = 3071
    return [
        ("gradient", x.astype(np.int32)),
        ("checks", ((x // 5 + y // 5) % 2 * 900).astype(np.int32)),
        ("line pairs", np.where((x // 3 % 2 == 0) & (y // 30 % 2 == 0), 2000, 100).astype(np.int32)),
        ("grid", np.where((x % 16 < 2) | (y % 16 < 2), 900, 0).astype(np.int32)),
        ("dots", np.where(np.hypot(x % 20 - 10, y % 20 - 10) < 5, 900, 50).astype(np.int32)),
        ("noisy dots", (np.where(np.hypot(x % 20 - 10, y % 20 - 10) < 5, 900, 50) + rng.normal(0, 5, x.shape))),
        ("rings", np.where(abs(np.hypot(x % 24 - 12, y % 24 - 12) - 7) < 1.2, 900, 50).astype(np.int32)),
        ("metal", np.clip(metal, -1024, 3071)),
        ("ruler", ruler),
        ("noise", rng.normal(1000, 40, x.shape)),
        ("table", np.where(abs(y - 200) < 2, 300, head)),
    ]


@pytest.mark.parametrize(("name", "values"), phantoms(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_phantom_raises_no_alarm(name: str, values: Values) -> None:
    assert text_lines(np.rint(values).astype(np.int32)) == TextFindings(0, 0)


NAMES = st.text(string.ascii_uppercase.replace("I", "") + "23456789", min_size=5, max_size=10)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(NAMES.filter(lambda t: len(set(t)) >= 4), st.sampled_from(SIZES), st.booleans(), st.integers(-900, 900))
def test_any_word_on_an_empty_picture_is_found_in_either_polarity(
    text: str, size: int, soft: bool, paper: int
) -> None:
    sheet = np.full((80, 420), paper, dtype=np.int32)
    values = write(sheet, pen(text, size, soft=soft), 10, 10, 3000.0, None)
    assert has_burned_in_text(values)
    assert has_burned_in_text(-values)


def test_a_second_text_does_not_make_the_alarm_vanish() -> None:
    sheet = np.zeros((200, 420), dtype=np.int32)
    values = write(sheet, pen("KOWALCZYK", 16, soft=True), 10, 10, 3000.0, None)
    for row, text in enumerate(("WARD 7", "R", "1953-04-17", "----", "Smith^John")):
        values = write(values, pen(text, 20, soft=False), 40 + 30 * row, 60, 3000.0, None)
        assert has_burned_in_text(values)


def test_each_frame_and_each_colour_is_looked_at() -> None:
    plain = np.full((64, 200), 100, dtype=np.uint8)
    marked = write(plain.astype(np.int32), pen("KOWALCZYK", 20, soft=True), 10, 10, 255.0, None).astype(np.uint8)
    assert has_burned_in_text(np.stack([plain, plain, marked]))
    assert not has_burned_in_text(np.stack([plain, plain, plain]))
    assert has_burned_in_text(np.stack([plain, plain, marked], axis=-1))
    assert has_burned_in_text(np.stack([np.stack([plain] * 3, -1), np.stack([plain, marked, plain], -1)]))


def test_wide_values_and_signed_extremes_are_read_without_overflow() -> None:
    ink = pen("KOWALCZYK", 20, soft=True)
    sheet = np.zeros((64, 200))
    sheet[10 : 10 + ink.shape[0], 10 : 10 + ink.shape[1]] = ink
    assert has_burned_in_text((sheet * (2**32 - 1)).astype(np.uint32))
    assert has_burned_in_text(np.rint(sheet * 65535 - 32768).astype(np.int16))
    assert has_burned_in_text(np.where(sheet > 0.5, 2**63 - 1, -(2**63)).astype(np.int64))
    assert has_burned_in_text(np.where(sheet > 0.5, 2**64 - 1, 0).astype(np.uint64))


@pytest.mark.parametrize("size", [48, 60])
@pytest.mark.parametrize("text", ["MARY", "OTTO", "Rossi", "1953-04-17"])
def test_large_letters_are_found_although_blocks_of_pixels_hold_only_parts_of_them(text: str, size: int) -> None:
    values = write(REAL["J2K_pixelrep_mismatch.dcm"], pen(text, size, soft=True), 20, 20, 4000.0, None)
    assert has_burned_in_text(values)


def test_a_word_of_two_pairs_of_joined_letters_is_found() -> None:
    ink = np.concatenate([pen(letter, 20, soft=False)[:, 2:-4] for letter in "HK"], axis=1)
    height = np.flatnonzero(ink.any(axis=1))
    pair = ink[height[0] : height[-1] + 1].copy()
    pair[len(pair) // 2, np.flatnonzero(pair.any(axis=0))[0] : np.flatnonzero(pair.any(axis=0))[-1] + 1] = 1
    other = pair.copy()
    other[-1] = 1
    word = np.concatenate([pair, np.zeros((len(pair), 4)), other], axis=1)
    assert has_burned_in_text(write(np.zeros((80, 200), dtype=np.int32), word, 30, 40, 3000.0, None))


def test_text_across_the_edge_of_two_tiles_of_a_large_picture_is_found() -> None:
    sheet = np.random.default_rng(1).normal(500, 10, (300, 2400)).astype(np.int32)
    for left in (1000, 1180, 1270):
        assert has_burned_in_text(write(sheet, pen("KOWALCZYK", 16, soft=True), 100, left, 3000.0, None))


@pytest.mark.parametrize("shape", [(60, 1025), (60, 1029), (1026, 300)])
def test_a_last_tile_of_a_few_pixels_is_no_error(shape: tuple[int, int]) -> None:
    sheet = np.random.default_rng(2).normal(500, 10, shape).astype(np.int32)
    assert not has_burned_in_text(sheet)
    assert has_burned_in_text(write(sheet, pen("KOWALCZYK", 16, soft=True), 20, shape[1] - 120, 3000.0, None))


@pytest.mark.parametrize("levels", [2, 256, 65536])
def test_pictures_of_random_values_come_to_an_end(levels: int) -> None:
    values = np.random.default_rng(3).integers(0, levels, (1500, 1500)).astype(np.int32)
    assert text_lines(values).lines < 100


@pytest.mark.parametrize("shape", [(0, 0), (0, 9), (1, 1), (5, 300), (300, 5), (16, 16), (0, 64, 64)])
def test_pictures_without_room_for_text_show_none(shape: tuple[int, ...]) -> None:
    assert text_lines(np.zeros(shape, dtype=np.int16)) == TextFindings(0, 0)


@pytest.mark.parametrize("values", [np.zeros((9, 9)), np.zeros(9, np.int16), np.zeros((2, 9, 9, 4), np.uint8)])
def test_what_is_no_picture_of_integers_is_an_error(values: NDArray[np.generic]) -> None:
    with pytest.raises(ValueError, match=r"needed|need"):
        text_lines(values)  # type: ignore[arg-type]


def test_the_answer_is_the_same_every_time_and_the_picture_is_left_alone() -> None:
    values = burned(REAL["examples_overlay.dcm"], 1, 16)
    assert values is not None
    before = values.copy()
    assert text_lines(values) == text_lines(values)
    assert np.array_equal(values, before)
