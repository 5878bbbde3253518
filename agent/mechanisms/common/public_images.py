"""The public images that a mechanism learns before it sees a patient."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class PublicImages:
    """The public set D_p: nobody's patients."""

    images: NDArray[np.uint8]  # (n, s, s) or (n, s, s, 3)
    bins: NDArray[np.int64]  # (n,): the semantic of each, a bin of the query function
    vouched: frozenset[str] = frozenset()  # digests that the site says are nobody's patients
    sha256: str = ""  # of the images, as they are trained on; filled in

    def __post_init__(self) -> None:
        """A bin for each image."""
        if self.images.dtype != np.uint8 or not 0 < len(self.images) == len(self.bins):
            raise ValueError("public images are uint8, with a semantic bin for each")
        digest = hashlib.sha256(str(self.images.shape).encode())
        digest.update(np.ascontiguousarray(self.images).tobytes())
        object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def component(self) -> str:
        """What a statement says of the weights that were trained on them, without noise (P6)."""
        return "public" if self.sha256 in self.vouched else "private"
