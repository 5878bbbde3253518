"""Pixels as the vault keeps them, and as a selection sees them."""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.deidentify.record import grey
from agent.domain import Selection
from agent.field_of_view import fit

_FINE: Final = 65535  # the disk is what bounds ingest, and no detector has more levels
_COARSE: Final = 255


def packed(pixels: NDArray[np.float32]) -> bytes:
    """In 65,536 levels; in 256, which is half of the bytes, when that says the same."""
    levels = np.rint(pixels * np.float32(_COARSE))
    if bool((np.abs(levels / np.float32(_COARSE) - pixels) * _FINE < 0.5).all()):
        return bytes(levels.astype("u1").tobytes())
    return bytes(np.rint(pixels * np.float32(_FINE)).astype("<u2").tobytes())


def unpacked(raw: bytes, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Back from :func:`packed`. Raises: ValueError, another number of bytes."""
    if len(raw) == prod(shape):
        return np.frombuffer(raw, "u1").reshape(shape).astype(np.float32) / np.float32(_COARSE)
    return np.frombuffer(raw, "<u2").reshape(shape).astype(np.float32) / np.float32(_FINE)


def selection_view(pixels: NDArray[np.float32], selection: Selection) -> NDArray[np.float32] | None:
    """Pixels as the selection wants them: grey, fitted.

    None when they show nothing (one value everywhere: such an image is nobody's, and would count towards k), or when
    what they show is too small to be fitted.
    """
    wanted = pixels if len(selection.shape) == 3 else grey(pixels)
    if selection.fit:
        try:
            wanted = fit(wanted, selection.shape[0])
        except ValueError:
            return None
    return wanted if bool(np.ptp(wanted) > 0) else None
