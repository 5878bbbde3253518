"""Grey pictures of coloured ones."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_LUMA: Final = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601, section 2.5.1


def grey(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """The luma (h, w) of an RGB picture (h, w, 3) in [0, 1]; a picture (h, w) as it is."""
    # the three weights add up to 1, but in float32 a white pixel may come out above it
    return pixels if pixels.ndim == 2 else np.minimum(pixels @ _LUMA, np.float32(1))
