"""Images of any size at one size: the square that shows something, averaged down. A public rule, no patient's data.

A photograph of a retina is a bright disc on black. The black identifies the camera and shows nothing of the eye, so
it is cropped; any other image is cropped to the centred square. Images are never enlarged: the missing detail cannot
be learned, and blur reveals where an enlarged image came from.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_DARK: Final = 0.06  # of the brightest channel: the black around a field of view, with the noise of JPEG
_DISC: Final = 0.93  # least overlap of a field of view with the disc around it
_CORNER: Final = 0.02  # of a side: in all four corners a field of view leaves such a square black
_LEAST_FIELD: Final = 0.2  # of the image's shorter side: what is smaller is a spot, and not a field of view


def fit(pixels: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """The square of the field of view, else the centred one, averaged by area to ``side`` pixels a side.

    Args:
        pixels: (h, w) or (h, w, 3) in [0, 1].
        side: of the result.
    Returns:
        (side, side) or (side, side, 3) float32 in [0, 1].
    Raises:
        ValueError: another shape, or the square is smaller than ``side``.
    """
    if pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (3,)) or not pixels.size or not side >= 1:
        raise ValueError("an image (h, w) or (h, w, 3) is fitted to one pixel or more")
    top, left, length = field(pixels)
    if not length >= side:
        raise ValueError("the image is smaller than what it shall be fitted to")
    square = pixels[top : top + length, left : left + length]
    if length == side:
        return np.array(square, dtype=np.float32)
    return _averaged(_averaged(square, side).swapaxes(0, 1), side).swapaxes(0, 1).astype(np.float32)


def fit_to(pixels: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """As :func:`fit` where the size is a square; else the centred part of its proportions, averaged by area.

    Args:
        pixels: (h, w) or (h, w, 3) in [0, 1].
        size: (h, w) of the result.
    Raises:
        ValueError: another shape, or the part is smaller than ``size``.
    """
    if size[0] == size[1]:
        return fit(pixels, size[0])
    top, left, tall, wide = part_for(pixels, size)
    part = pixels[top : top + tall, left : left + wide]
    return _averaged(_averaged(part, size[0]).swapaxes(0, 1), size[1]).swapaxes(0, 1).astype(np.float32)


def part_for(pixels: NDArray[np.float32], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Top, left, height and width of the part that :func:`fit_to` takes.

    Raises:
        ValueError: it is smaller than ``size``.
    """
    if size[0] == size[1]:
        top, left, length = field(pixels)
        tall = wide = length
    else:
        scale = min(pixels.shape[0] / size[0], pixels.shape[1] / size[1])
        tall, wide = (min(round(side * scale), there) for side, there in zip(size, pixels.shape[:2], strict=True))
        top, left = (pixels.shape[0] - tall) // 2, (pixels.shape[1] - wide) // 2
    if tall < size[0] or wide < size[1]:
        raise ValueError("the image is smaller than what it shall be fitted to")
    return top, left, tall, wide


def field(pixels: NDArray[np.float32]) -> tuple[int, int, int]:
    """Top, left and side of the square that :func:`fit` takes.

    A field of view is bright, all four corners of the image are not, and its outline is a disc, which may be cut by
    the image's edge. Rows are filled between their first and last bright pixel, since a dark macula is inside.
    """
    height, width = pixels.shape[:2]
    lit = (pixels if pixels.ndim == 2 else pixels.max(axis=2)) > _DARK
    least = min(height, width)
    centred = ((height - least) // 2, (width - least) // 2, least)
    corner = max(1, round(_CORNER * least))
    if lit[:corner, :corner].any() or lit[:corner, -corner:].any():
        return centred
    if lit[-corner:, :corner].any() or lit[-corner:, -corner:].any():
        return centred
    top, bottom, left, right = _bounds(lit)
    tall, wide = bottom - top, right - left
    if not min(tall, wide) >= _LEAST_FIELD * least:
        return centred
    inner = lit[top:bottom, left:right]
    filled = np.maximum.accumulate(inner, axis=1) & np.maximum.accumulate(inner[:, ::-1], axis=1)[:, ::-1]
    y, x = np.ogrid[:tall, :wide]
    disc = (y - (tall - 1) / 2) ** 2 + (x - (wide - 1) / 2) ** 2 <= (max(tall, wide) / 2) ** 2
    if not (filled & disc).sum() >= _DISC * (filled | disc).sum():
        return centred
    length = min(tall, wide)
    return top + (tall - length) // 2, left + (wide - length) // 2, length


def _bounds(lit: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """First and after the last row and column of the lit part; dust and noise, under 2 % of a line, do not count."""
    height, width = lit.shape
    rows = np.flatnonzero(lit.sum(axis=1) > 0.02 * width)
    columns = np.flatnonzero(lit.sum(axis=0) > 0.02 * height)
    if not (rows.size and columns.size):
        return 0, 0, 0, 0
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _averaged(pixels: NDArray[np.float32] | NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """Means over ``side`` equal intervals of the first axis; a pixel on a bound counts in part in both."""
    length = pixels.shape[0]
    total = np.zeros((length + 1, *pixels.shape[1:]))
    np.cumsum(pixels, axis=0, dtype=np.float64, out=total[1:])
    bounds = np.arange(side + 1) * (length / side)
    whole = np.minimum(bounds.astype(np.intp), length - 1)
    part = (bounds - whole).reshape(-1, *(1,) * (pixels.ndim - 1))
    upto = total[whole] + part * pixels[whole]
    means: NDArray[np.float64] = np.diff(upto, axis=0) * (side / length)
    return np.clip(means, float(pixels.min()), float(pixels.max()))
