"""Letters and digits as if written by hand and scanned: a public set that is nobody's, with a name for each image.

A printed letter is thinned to its skeleton, the skeleton is bent (affine, and smooth displacements as of Simard,
Steinkraus & Platt 2003), written again with a round pen, and treated as the digits of scikit-learn were (Alpaydin &
Kaynak 1998: NIST's form-based hand print, size-normalised bitmaps of 32 x 32, black pixels counted in blocks of
4 x 4): 17 grey levels, white on black. The width of the pen and of the box was set by eye, beside scikit-learn's
digits, as a hospital knows its own scanners: where those digits play the private part, that much of them was public.
A small convolutional network that learned 500 images of each printed digit told 70 and 72 % of scikit-learn's
digits (two seeds), 140 of each 63 and 67 %; 99 % is what 1,400 of the real ones teach it.

The letters are those of the fonts that matplotlib brings along (:data:`FONTS`; DejaVu, STIX and Computer Modern, all
free to use and to draw with). Nobody wrote them: a set of them is public, and can't overlap with anybody's writing.
"""

from __future__ import annotations

import string
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

CHARACTERS: Final = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)  # 62 kinds
FONTS: Final = (
    *("DejaVuSans", "DejaVuSans-Oblique", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmss10", "cmti10", "cmtt10"),
)
_POINT: Final = 44  # the size at which a letter is thinned: strokes are 3 to 8 pixels wide
_BLOCK: Final = 4  # pixels of the bitmap to a side of one grey pixel
_LEVELS: Final = _BLOCK**2

Points = NDArray[np.float64]  # (p, 2): y, x, in [-1, 1] of the higher side of their box


def glyphs(
    count_per_class: int, side: int, rng: np.random.Generator, characters: str = "".join(CHARACTERS)
) -> tuple[NDArray[np.uint8], NDArray[np.int64], tuple[str, ...]]:
    """So many images of each character, each written anew in a font drawn at random.

    Args:
        count_per_class: images of each character.
        side: pixels, 8 as scikit-learn's digits, or more.
        rng: draws fonts, slant, bends and pens.
        characters: of :data:`CHARACTERS`, each once.
    Returns:
        Images (n, side, side) uint8, white on black, in 17 grey levels from 0 to 255; labels (n,), in the order of
        ``characters``, classes one after the other; the characters as names of the labels.
    Raises:
        ValueError: no image, fewer than 8 pixels, an unknown character or one twice.
    """
    if not count_per_class >= 1 or not side >= 8:
        raise ValueError("there is an image of each character, of 8 pixels or more a side")
    if not characters or len(set(characters)) != len(characters) or not set(characters) <= set(CHARACTERS):
        raise ValueError("characters are digits and Latin letters, each once")
    images = np.empty((len(characters) * count_per_class, side, side), np.uint8)
    for row in range(len(images)):
        font = FONTS[int(rng.integers(len(FONTS)))]
        images[row] = _scanned(_bent(_skeleton(font, characters[row // count_per_class]), rng), side, rng)
    labels = np.repeat(np.arange(len(characters), dtype=np.int64), count_per_class)
    return images, labels, tuple(characters)


@lru_cache(maxsize=len(FONTS) * len(CHARACTERS))
def _skeleton(font: str, character: str) -> Points:
    """The middle line of a printed letter."""
    path = _fonts() / f"{font}.ttf"
    face = ImageFont.truetype(str(path), _POINT)
    left, top, right, bottom = (int(edge) for edge in face.getbbox(character))
    canvas = Image.new("L", (right - left + 4, bottom - top + 4))
    ImageDraw.Draw(canvas).text((2 - left, 2 - top), character, fill=255, font=face)
    points = np.argwhere(_thinned(np.asarray(canvas) > 127)).astype(np.float64)
    low, high = points.min(axis=0), points.max(axis=0)
    out: Points = (points - (low + high) / 2) / max(1.0, float((high - low).max()) / 2)
    out.setflags(write=False)
    return out


def _fonts() -> Path:
    """Where they lie. matplotlib itself is not imported: that would make a folder in the user's home."""
    found = find_spec("matplotlib")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("matplotlib, whose fonts these are, is not installed")
    return Path(found.submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf"


def _thinned(ink: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Zhang & Suen 1984: (h, w), with an empty rim, to lines of one pixel. Something is always left."""
    ink = ink.copy()
    for _ in range(max(ink.shape)):
        before = int(ink.sum())
        for first in (True, False):
            around = [np.roll(ink, (-dy, -dx), (0, 1)) for dy, dx in _AROUND]  # P2 .. P9, clockwise from the north
            inked = sum(p.astype(np.int64) for p in around)
            rises = sum((~a & b).astype(np.int64) for a, b in zip(around, [*around[1:], around[0]], strict=True))
            north, east, south, west = around[0], around[2], around[4], around[6]
            if first:
                free = ~(north & east & south) & ~(east & south & west)
            else:
                free = ~(north & east & west) & ~(north & south & west)
            ink &= ~((inked >= 2) & (inked <= 6) & (rises == 1) & free)
        if int(ink.sum()) == before:
            break
    return ink


_AROUND: Final = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))


def _bent(points: Points, rng: np.random.Generator) -> Points:
    """Slant, turn, stretch, and displacements that change slowly along the letter."""
    turn, slant = rng.normal(0.0, 0.10), rng.normal(-0.10, 0.20)
    stretch = np.exp(rng.normal(0.0, 0.12))
    cos, sin = np.cos(turn), np.sin(turn)
    matrix = np.array([[cos, sin], [-sin, cos]]) @ np.array([[1.0, 0.0], [slant, stretch]])
    knots = rng.normal(0.0, 1.0, (2, 5, 5)) * rng.uniform(0.04, 0.16)
    where = (points.T + 1.0) * 2.0  # in [0, 4]: the grid of knots
    shift = np.stack([ndimage.map_coordinates(one, where, order=3, mode="nearest") for one in knots], axis=1)
    out: Points = (points + shift) @ matrix.T
    return out


def _scanned(points: Points, side: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Fitted into the bitmap's box, written with a round pen, and black pixels counted in blocks."""
    bitmap = _BLOCK * side
    pen = bitmap * float(np.clip(rng.normal(0.070, 0.012), 0.040, 0.100))  # half its width
    low, high = points.min(axis=0), points.max(axis=0)
    span = np.maximum(high - low, 1e-6)
    room = np.array([bitmap - 2 * pen, 0.72 * bitmap * np.exp(rng.normal(0.0, 0.08)) - 2 * pen])
    scale = min(room[0] / span[0], 1.9 * room[1] / span[1])  # the height is normalised, narrow letters stay narrow
    scales = np.array([scale, min(scale, room[1] / span[1])])
    at = (points - (low + high) / 2) * scales + (bitmap - 1) / 2
    at[:, 1] += rng.normal(0.0, 0.02 * bitmap)
    ink = np.ones((bitmap, bitmap), np.bool_)
    rows = np.rint(at).astype(np.int64)
    inside = ((rows >= 0) & (rows < bitmap)).all(axis=1)
    ink[rows[inside, 0], rows[inside, 1]] = False
    near = ndimage.distance_transform_edt(ink) <= pen
    counts = near.reshape(side, _BLOCK, side, _BLOCK).sum(axis=(1, 3))
    levels: NDArray[np.uint8] = np.rint(counts * (255.0 / _LEVELS)).astype(np.uint8)
    return levels
