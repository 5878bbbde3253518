"""No representative is, pixel for pixel, a patient's image. Every k-anonymous release asks it, vetted or not."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from agent.domain import Patient
from protos.common.errors import RefusedError


class RepeatedInputError(RefusedError, ValueError):
    """A representative equals a real image. The text does not say which, or how many (P14)."""

    def __init__(self) -> None:
        """Say only that nothing is released."""
        super().__init__("a representative equals an input image: nothing is released")


def refuse_copies(images: NDArray[np.uint8], patients: Iterable[Patient]) -> None:
    """Refuse a set in which a representative is, pixel for pixel at 8 bits, a patient's image.

    Args:
        images: (m, h, w[, 3]).
        patients: those it was made from, and whoever else is at hand.
    Raises:
        RepeatedInputError: one is.
    """
    made = {image.tobytes() for image in images}
    real = (image.pixels for patient in patients for image in patient.images)
    if any(np.rint(pixels * 255.0).astype(np.uint8).tobytes() in made for pixels in real):
        raise RepeatedInputError
