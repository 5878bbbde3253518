"""Finds burned-in text by its geometry, in every image: letters are drawn with one ink and stand in a row.

A device or a viewer that writes into an image uses one stored value, perhaps with soft rims, perhaps on a solid
box. Whatever is nearer to such a value than to its surroundings is cut into connected parts; parts of a letter's
size and thickness which stand on one line, reach the same one or two heights, follow each other closely and have
nothing between them and around them are text. Anatomy, noise, metal, air and test patterns seldom do all of this.

It reports that there is text, not what it says; one to three signs (a side marker, a ruler's digit) are not text. It
is an alert, not a guarantee: the admission rules decide which images may come in. Of 502 texts in nine fonts, drawn
into ten slices (six real, four of a head template), it found 66 of 78 with a font size of 10 pixels, 71 of 81 of 12,
51 of 56 of 14, 63 of 70 of 16, 188 of 189 of 20 to 48, and 24 of 28 of 60. It fired on 6 of 3151 clean images: a
palette's indices, a skull-stripped slice, 2 of 24 head slices padded with zeros, and 2 of 24 of Poisson noise. 512 x
512 values take 3 to 25 ms on one core. Rejected: tesseract on every image (some 0.3 s each, and it misses much;
``agent/ingest/ocr.py`` samples with it); OpenCV's MSER and EAST (a large dependency, and a network trained on street
scenes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Stored = NDArray[np.integer[Any]]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Levels = NDArray[np.uint16]

_SIDE: Final = 6  # pixels: nothing is written into less
_BLOCK: Final = 16  # pixels: surroundings are means over three by three such blocks
_CONTRAST: Final = 0.12  # of the image's range, between ink and surroundings
_NEAR: Final = 0.03  # of the range: values that are one ink
_EXACT: Final = 0.005  # of the range: values that are the same
# how near to the ink (1 is the surroundings), and how much of the letters must then be of the very same value:
# half-way finds soft and thin strokes, nearer ones stand clear of bright anatomy
_CUTS: Final = ((0.5, 0.0), (0.25, 0.25), (0.1, 0.5))
_SPIKES: Final = 6  # over-represented values that are tried as ink
_SPIKE: Final = (16, 4.0)  # pixels of the value, and how many times more than values around it have
_LEVELS: Final = 1 << 16  # of a histogram; a wider range is binned
_AREA: Final = (6, 3000)  # pixels of a part
_HEIGHT: Final = (5, 64)  # pixels of a letter
_LOW: Final = 7  # pixels: lower letters must agree to the pixel, or noise does too
_MOST_PARTS: Final = 1500  # letter-like parts in one band of rows: more is noise
_BAND: Final = 160  # rows looked at together; bands overlap by half
_NEED: Final = 4  # letters
_CROWD: Final = (20, 3)  # so many letter-like parts are a crowd: a line must then be one in three of them
_TILE: Final = (1280, 1024)  # pixels: side of what is looked at together, and step; bounds the memory
_CLUTTER: Final = 0.4  # of the letters' area: other small parts in their row
_EIGHT: Final = np.ones((3, 3), dtype=bool)
# A block of pixels may hold letters when it meets strokes: upright runs of ink, three pixels high or more, whose
# left rim another rim follows. Noise has no such runs, and bone and air no second rim. Parts are sought there only,
# which saves half of the work or more, and costs one text in a hundred, of 16 pixels or less.
_UPRIGHT: Final = 0.25  # of the ink in the block: pixels with ink above and below
_RIMS: Final = (3, 12)  # rows with a left rim of a stroke, in the block and in the three by three blocks around it
_STROKE: Final = (1, 2, 4, 5)  # shifts whose sum, 12, is the width in pixels up to which ink is a stroke
_MARGIN: Final = 64  # pixels around such blocks: a letter, and what must be empty beside it
# widths, in heights, from which joined letters make up half of a word of four, and all of it: see ``_letters_of``
_JOINED: Final = (1.35, 2.9)


@dataclass(frozen=True, slots=True)
class TextFindings:
    """What looks like text."""

    lines: int
    glyphs: int  # letters and digits in them, roughly


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Connected parts of a mask: (n,) each, rows and columns inclusive."""

    top: Ints
    bottom: Ints
    left: Ints
    right: Ints
    area: Ints
    row_runs: Ints  # strokes that the rows of a part meet, over all its rows
    column_runs: Ints

    @property
    def height(self) -> Ints:
        return self.bottom - self.top + 1

    @property
    def width(self) -> Ints:
        return self.right - self.left + 1

    def pick(self, chosen: NDArray[Any]) -> _Parts:
        return _Parts(*(getattr(self, field.name)[chosen] for field in fields(self)))


def has_burned_in_text(values: Stored) -> bool:
    """Is there a line of four letters or more? Arguments and errors as for ``text_lines``."""
    return text_lines(values).lines > 0


def text_lines(values: Stored) -> TextFindings:
    """Lines of text in the first frame and ink that show any, none when no frame does.

    The answer depends on nothing but the values. The work is linear in the pixels, but for letter-like parts: those
    are compared in pairs, ``_MOST_PARTS`` at most; a band of rows with more (a page of writing has a third) is noise.

    Args:
        values: stored values, ([frames,] h, w) or ([frames,] h, w, 3), before any window; each colour is
            looked at alone, since coloured ink may have the luminance of what it lies on.
    Raises:
        ValueError: not integers, or not of such a shape.
    """
    if values.dtype.kind not in "iu" or values.ndim not in (2, 3, 4):
        raise ValueError("stored values of two to four dimensions are needed")
    planes = _planes(values) if values.size else ()
    found = (found for plane in planes for levels, spread in _tiles(plane) for found in _in_tile(levels, spread))
    return next((some for some in found if some.lines), TextFindings(0, 0))


def _planes(values: Stored) -> Iterator[Stored]:
    colour = values.ndim > 2 and values.shape[-1] == 3
    if values.ndim == 4 and not colour:
        raise ValueError("four dimensions need three colours")
    if not colour:
        yield from values.reshape(-1, *values.shape[-2:])
        return
    for frame in values.reshape(-1, *values.shape[-3:]):
        red, green, blue = np.moveaxis(frame, -1, 0)
        yield red
        for other in (green, blue):
            if not np.array_equal(other, red):
                yield other


def _tiles(plane: Stored) -> Iterator[tuple[Levels, float]]:
    """Parts of an image that are looked at together, and the range of its values, both in levels."""
    low, high = int(plane.min()), int(plane.max())
    if min(plane.shape) < _SIDE or low == high:
        return
    step = (high - low) // _LEVELS + 1
    every = max(2, max(plane.shape) // _TILE[1])
    few, many = np.percentile(plane[::every, ::every], (0.5, 99.5))
    spread = max(float(many - few) / step, 0.25 * ((high - low) // step))  # one hot pixel is not the range
    for top in range(0, plane.shape[0], _TILE[1]):
        for left in range(0, plane.shape[1], _TILE[1]):
            yield _levels(plane[top : top + _TILE[0], left : left + _TILE[0]], low, step), spread


def _levels(tile: Stored, low: int, step: int) -> Levels:
    """Stored values counted from the lowest one of the image, in steps."""
    if tile.dtype.itemsize <= 2:
        return (tile.astype(np.int32) - np.int32(low)).astype(np.uint16)
    above = tile.astype(np.uint64) - np.uint64(low % (1 << 64))  # modulo 2**64, which no difference reaches
    return (above // np.uint64(step)).astype(np.uint16)


def _in_tile(levels: Levels, spread: float) -> Iterator[TextFindings]:
    """What each ink and each cut shows."""
    total = _blocks(levels, np.uint32)
    for ink in _inks(levels, spread):
        reach = _reach(levels, total, ink, spread)
        if not (reach > 0).any():
            continue
        same = _within(levels, ink, int(_EXACT * spread))
        exact = _strokes(same)
        for nearness, least_same in _CUTS:
            if least_same > 0 and not exact.any():
                break
            mask = _near(levels, ink, np.floor(nearness * reach))
            where = exact if least_same > 0 else _strokes(mask)
            if where.any():
                window = _window(where)
                yield _in_mask(mask[window], same[window], least_same)


def _inks(levels: Levels, spread: float) -> list[int]:
    """Values that may be ink: those that are far more frequent than their neighbours, and both ends."""
    counts = np.bincount(levels.ravel())
    used = np.flatnonzero(counts)
    count = counts[used].astype(np.float64)
    ratio = count / (_around(count) + 4)
    spikes = (count >= _SPIKE[0]) & (ratio >= _SPIKE[1])
    order = np.argsort(-ratio, kind="stable")
    tried = [int(used[i]) for i in order[:_SPIKES] if spikes[i]]
    total = np.cumsum(counts)
    tried += [int(used[-1]), int(used[0])]
    tried += [int(np.searchsorted(total, part * total[-1])) for part in (0.999, 0.001)]
    inks: list[int] = []
    for value in tried:
        if all(abs(value - other) > _NEAR * spread for other in inks):
            inks.append(value)
    return inks


def _around(count: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean count of the 14 used values around each, without the nearest two."""
    if count.size <= 8:
        return np.zeros_like(count)
    kernel = np.concatenate([np.ones(7), np.zeros(3), np.ones(7)])
    mean: NDArray[np.float64] = ndimage.correlate1d(count, kernel / 14, mode="mirror")
    return mean


def _within(levels: Levels, ink: int, most: int) -> NDArray[np.bool_]:
    """Pixels whose value differs from the ink's by no more than so much."""
    lowest, highest = max(ink - most, 0), min(ink + most, _LEVELS - 1)
    return levels - np.uint16(lowest) <= np.uint16(highest - lowest)  # what is lower wraps round to far above


def _near(levels: Levels, ink: int, most: Floats) -> NDArray[np.bool_]:
    """Pixels that differ from the ink by no more than the number of their block; none where that is negative."""
    lowest, highest = np.maximum(ink - most, 0), np.minimum(ink + most, _LEVELS - 1)
    many = np.where(most < 0, 0, highest - lowest + 1)  # below 2**16, since ``most`` is half the range or less
    low, count = (np.repeat(n.astype(np.uint16), _BLOCK, 1)[:, : levels.shape[1]] for n in (lowest, many))
    mask = np.empty(levels.shape, dtype=bool)
    for block in range(len(most)):  # this wraps as well
        rows = slice(block * _BLOCK, (block + 1) * _BLOCK)
        np.less(levels[rows] - low[block], count[block], out=mask[rows])
    return mask


def _reach(levels: Levels, total: Ints, ink: int, spread: float) -> Floats:
    """By block: how far the surroundings are from the ink; -1 where that is too little to read."""
    close = _within(levels, ink, int(_NEAR * spread))
    close_number, close_total = _blocks(close.view(np.uint8), np.uint8), _blocks(levels * close, np.uint32)
    rows, columns = (np.diff(np.append(np.arange(0, n, _BLOCK), n)) for n in levels.shape)
    number = _around_blocks(rows[:, None] * columns - close_number)
    around = np.where(number > 0, _around_blocks(total - close_total) / np.maximum(number, 1), ink)
    contrast = np.abs(ink - around)
    reach: Floats = np.where(contrast >= _CONTRAST * spread, contrast, -1).astype(np.float32)
    return reach


def _blocks(values: NDArray[Any], wide: type[np.integer[Any]]) -> Ints:
    """Sums over every block of pixels; ``wide`` holds the sum of a block's column."""
    down, across = (-(-n // _BLOCK) for n in values.shape)
    missing = [(0, -n % _BLOCK) for n in values.shape]
    whole = np.pad(values, missing) if missing != [(0, 0), (0, 0)] else values
    columns = whole.reshape(down, _BLOCK, -1).sum(axis=1, dtype=wide)
    both: Ints = columns.reshape(down, across, _BLOCK).sum(axis=2, dtype=np.int64)
    return both


def _around_blocks(sums: Ints) -> Ints:
    """Sums over every block and the eight around it."""
    padded = np.pad(sums, 1)
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    nine: Ints = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    return nine


def _strokes(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Blocks that may hold letters: see ``_UPRIGHT``."""
    upright = np.zeros_like(mask)
    np.logical_and(mask[:-2], mask[2:], out=upright[1:-1])
    upright &= mask
    rims = upright.copy()
    rims[:, 1:] &= ~mask[:, :-1]
    ends = ~mask
    ends[:, -1] = True
    for shift in _STROKE:
        ends[:, :-shift] |= ends[:, shift:]
    rims &= ends
    ink, high, left = (_blocks(pixels.view(np.uint8), np.uint8) for pixels in (mask, upright, rims))
    return (high >= _UPRIGHT * ink) & (left >= _RIMS[0]) & (_around_blocks(left) >= _RIMS[1])


def _window(where: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Rows and columns of pixels, of all the blocks that are marked, and a margin."""
    used = (np.flatnonzero(where.any(axis=axis)) for axis in (1, 0))
    return tuple(slice(max(0, int(n[0]) * _BLOCK - _MARGIN), (int(n[-1]) + 1) * _BLOCK + _MARGIN) for n in used)


def _in_mask(mask: NDArray[np.bool_], same: NDArray[np.bool_], least_same: float) -> TextFindings:
    """Lines of text among the parts of a mask; ``same`` of their pixels are of the ink's very value."""
    labels, count = ndimage.label(mask, _EIGHT)
    where = np.flatnonzero(mask)
    name = labels.ravel()[where]
    area = np.bincount(name, minlength=count + 1)
    small = (area > 0) & (area <= _AREA[1])
    parts = _parts(mask, where, name, area)
    height, width = parts.height, parts.width
    thin = parts.area <= 0.3 * height * (parts.row_runs + parts.column_runs)  # a stroke's area is width x length
    fits = (height >= _HEIGHT[0]) & (height <= _HEIGHT[1]) & (width <= 6 * height)
    letters = parts.pick(thin & fits)
    lines = glyphs = 0
    for start in range(0, mask.shape[0], _BAND // 2):
        inside = (letters.bottom >= start) & (letters.bottom < start + _BAND)
        crowd = int(inside.sum())
        for line in _rows_of(letters.pick(inside)):
            units = _letters_of(line)
            stands_out = least_same > 0 or crowd <= _CROWD[0] or _CROWD[1] * units.sum() >= crowd
            if stands_out and _is_text(line, units) and _stands_alone(line, labels, small, same, least_same):
                lines, glyphs = lines + 1, glyphs + int(units.sum())
        if lines:
            break  # the next band shares rows with this one
    return TextFindings(lines, glyphs)


def _parts(mask: NDArray[np.bool_], where: Ints, name: Ints, area: Ints) -> _Parts:
    """The parts that are neither specks nor background."""
    fit = ((area >= _AREA[0]) & (area <= _AREA[1]))[name]
    flat, where, name = mask.ravel(), where[fit], name[fit]
    y, x = np.divmod(where, mask.shape[1])
    rows = np.bincount(name[~((x > 0) & flat[where - 1])], minlength=len(area))
    columns = np.bincount(name[~((y > 0) & flat[where - mask.shape[1]])], minlength=len(area))
    order = np.argsort(name, kind="stable")
    name, y, x = name[order], y[order], x[order]
    first = np.flatnonzero(np.diff(name, prepend=0))
    kept = name[first]
    top, left = (np.minimum.reduceat(edge, first) for edge in (y, x))
    bottom, right = (np.maximum.reduceat(edge, first) for edge in (y, x))
    return _Parts(top, bottom, left, right, area[kept], rows[kept], columns[kept])


def _rows_of(parts: _Parts) -> Iterator[_Parts]:
    """Parts that stand on one line and follow each other closely; one wide part may be joined letters."""
    count = len(parts.top)
    if not 0 < count <= _MOST_PARTS:
        return
    height = parts.height.astype(np.float32)
    less = np.minimum(height[:, None], height[None])
    gap = (parts.left[None] - parts.right[:, None] - 1).astype(np.float32)
    linked = np.abs(parts.bottom[:, None] - parts.bottom[None]) <= np.maximum(1, np.round(0.07 * less))
    linked &= parts.left[None] > parts.left[:, None]
    linked &= (gap >= -0.15 * less) & (gap <= np.maximum(1.4 * less, 3))
    linked &= less >= 0.6 * np.maximum(height[:, None], height[None])
    i, j = np.nonzero(linked)
    joined, word = (parts.width >= least * height for least in _JOINED)
    if len(i) < 2 and not joined.any():
        return
    graph = coo_array((np.ones(len(i), dtype=np.int8), (i, j)), shape=(count, count))
    number, group = connected_components(graph, directed=False)
    members = np.bincount(group, minlength=number)
    needed = np.full(number, 3)
    needed[group[joined]] = 2
    needed[group[word]] = 1
    for k in np.flatnonzero(members >= needed):
        yield parts.pick(group == k)


def _letters_of(line: _Parts) -> Ints:
    """(n,) letters in each part: a wide one is several joined, when it has as many strokes, and else none."""
    height, width = line.height, line.width
    tall = np.percentile(height, 75)
    units = np.where(width <= 1.35 * tall, 1, np.round(width / (0.85 * tall))).astype(np.int64)
    across, down = (1.1, 1.25) if len(units) == 1 else (0.8, 1.0)
    dense = (line.row_runs >= across * units * height) & (line.column_runs >= down * width)
    return np.where((units > 1) & ~dense, 0, units)


def _is_text(line: _Parts, units: Ints) -> bool:
    """Enough letters of different shapes, on one base line, with capitals and small letters of one height each."""
    height, width = line.height, line.width
    tall = float(np.percentile(height, 75))
    tolerance = max(1, round(0.07 * tall)) if tall >= _LOW else 0
    on = np.abs(line.bottom - np.median(line.bottom)) <= tolerance
    tops, weight, letters = line.top[on], units[on], int(units.sum())
    if letters < _NEED or on.mean() < 0.6:
        return False
    alike = np.abs(tops[:, None] - tops[None]) <= tolerance
    sums = alike @ weight
    best = int(np.argmax(sums))
    others = weight * ~alike[best]
    second = int((alike[~alike[best]] @ others).max(initial=0))
    first = int(sums[best])
    if first < max(2, 0.4 * letters) or first + second < max(0.65 * letters, _NEED):
        return False
    if units[line.area < 0.8 * height * width].sum() < 3:  # bars alone are a ruler or a test pattern
        return False
    return _differ(line)


def _differ(line: _Parts) -> bool:
    """Are the parts of a line of more than one shape? Dots and bars of a test pattern are all the same."""
    count = len(line.top)
    if count == 1:
        return True
    coarse = line.area // max(2, int(0.12 * np.median(line.area)))
    shapes = np.unique(np.stack([line.width, coarse], axis=1), axis=0, return_counts=True)[1]
    return len(shapes) >= 2 and (count <= 4 or int(shapes.max()) <= 0.8 * count)


def _stands_alone(
    line: _Parts, labels: NDArray[np.int32], small: NDArray[np.bool_], same: NDArray[np.bool_], least_same: float
) -> bool:
    """Is there little else of the ink between and close around the letters, and are they of one value?"""
    rim = 0.4 * float(np.percentile(line.height, 75))
    top, bottom = float(np.median(line.top)), float(np.median(line.bottom))
    rows = slice(max(0, int(top - rim)), int(bottom + rim) + 1)
    columns = slice(int(line.left.min()), int(line.right.max()) + 1)
    parts = small[labels[rows, columns]]
    own = int(line.area.sum())
    if int(parts.sum()) - own > _CLUTTER * own:
        return False
    return int((parts & same[rows, columns]).sum()) >= least_same * own
