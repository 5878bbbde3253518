"""Small image sets for tests: noise with labels, and tars of PNG files that nobody packed properly."""

from __future__ import annotations

import io
import tarfile

import numpy as np
from numpy.typing import NDArray


def shard_of(bodies: list[bytes]) -> bytes:
    """A set of PNG files as they are."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for i, body in enumerate(bodies):
            for name, content in ((f"{i:05d}.png", body), (f"{i:05d}.txt", b"")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def scene(seed: int, count: int, side: int = 12) -> NDArray[np.uint8]:
    """(count, side, side) images that differ."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side), dtype=np.uint8)


def labels(count: int) -> list[str]:
    return ["effusion" if i % 3 else "clear" for i in range(count)]
