"""Images in a grid as one PNG, to watch a training."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protos.common.durable_files import replace_file


def grid(images: NDArray[np.uint8], columns: int | None = None) -> NDArray[np.uint8]:
    """(n, h, w[, 3]) as one image, row by row; what is left of the last row is black.

    Raises:
        ValueError: no images, another shape, or no columns.
    """
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) == 0:
        raise ValueError("a grid is made of (n, h, w) or (n, h, w, 3) uint8")
    columns = math.ceil(math.sqrt(len(images))) if columns is None else columns
    if columns < 1:
        raise ValueError("a grid has at least one column")
    rows = math.ceil(len(images) / columns)
    n, h, w = images.shape[:3]
    full = np.zeros((rows * columns, *images.shape[1:]), np.uint8)
    full[:n] = images
    tiles = full.reshape(rows, columns, h, w, -1).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles.reshape(rows * h, columns * w, *images.shape[3:]))


def png(image: NDArray[np.uint8]) -> bytes:
    """(h, w) or (h, w, 3) as PNG."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def write_grid(path: Path, images: NDArray[np.uint8], columns: int | None = None) -> None:
    """Write :func:`grid` as a PNG, whole or not at all."""
    replace_file(path, png(grid(images, columns)))
