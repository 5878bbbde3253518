"""The images of a pool: the same image twice is one sample, a look-alike is counted, the order is public. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

NEAR: Final = 4  # bits of 64 in which the looks of near-duplicates differ at most
_SIDE: Final = 32  # of the image that a look is taken of
_PAIRS: Final = 1 << 22  # compared at a time: 32 MiB of differences


@dataclass(frozen=True, slots=True)
class PoolImage:
    """One image of a release, and where its file lies in the release's archive."""

    release: str
    index: int  # in its set
    pixels: bytes  # SHA-256, see :func:`pixel_digest`
    shape: tuple[int, ...]  # height, width; and 3 for colours
    label: str
    look: int  # see :func:`perceptual_hash`
    start: int  # of the PNG in the archive, in bytes
    size: int
    png: bytes  # SHA-256 of the PNG


@dataclass(frozen=True, slots=True)
class Sample:
    """A distinct sample of a pool: an image with its label, and all its sources, in their order."""

    pictures: tuple[PoolImage, ...]

    @property
    def first(self) -> PoolImage:
        """The place whose file is used."""
        return self.pictures[0]


@dataclass(frozen=True, slots=True)
class MergedSamples:
    """Distinct samples, in the order of the images given; those whose labels contradict each other are out."""

    samples: tuple[Sample, ...]
    contradictions: tuple[Sample, ...]
    duplicates: int  # images that are another place of a sample


def pixel_digest(image: NDArray[np.uint8]) -> bytes:
    """SHA-256 of an (h, w) or (h, w, 3) image's shape and decoded pixels: of what is seen, not of its packing."""
    shape = "x".join(map(str, image.shape))
    return hashlib.sha256(f"{shape} uint8\n".encode() + np.ascontiguousarray(image).tobytes()).digest()


def merge(pictures: Iterable[PoolImage]) -> MergedSamples:
    """One sample for all images with the same pixels.

    Images that differ in their label only cannot both be right, and nothing says which is: they are left out.
    """
    places: dict[bytes, list[PoolImage]] = defaultdict(list)
    for picture in pictures:
        places[picture.pixels].append(picture)
    samples = [Sample(tuple(same)) for same in places.values()]
    clear = tuple(s for s in samples if len({p.label for p in s.pictures}) == 1)
    unclear = tuple(s for s in samples if len({p.label for p in s.pictures}) > 1)
    return MergedSamples(clear, unclear, sum(len(s.pictures) - 1 for s in clear))


def shuffled(samples: Iterable[Sample], seed: int) -> list[Sample]:
    """In an order that mixes sites and classes, the same on every machine, and public as ``seed`` is.

    By SHA-256 of seed and pixels: another release added moves no two others past each other.
    """

    def place(sample: Sample) -> bytes:
        return hashlib.sha256(f"lazaret pool {seed}\n".encode() + sample.first.pixels).digest()

    return sorted(samples, key=place)


def _cosines() -> NDArray[np.float64]:
    """(8, 32): the lowest rows of the DCT-II matrix, whose first is constant."""
    i, j = np.arange(8)[:, None], np.arange(_SIDE)[None, :]
    out: NDArray[np.float64] = np.cos(np.pi * i * (2 * j + 1) / (2 * _SIDE))
    return out


_COSINES: Final = _cosines()


def perceptual_hash(image: NDArray[np.uint8]) -> int:
    """A 64-bit perceptual hash of an (h, w) or (h, w, 3) image: signs of its lowest DCT coefficients.

    The DCT hash that pHash made common (Zauner 2010, section 3.2.1): 32 x 32 pixels, the lowest 8 x 8 coefficients,
    each against their median. The constant one is not compared, so brightness has no say. For a report: it finds
    copies that were scaled or re-encoded, and its silence proves nothing.
    """
    small = Image.fromarray(image).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    low = _COSINES @ np.asarray(small, np.float64) @ _COSINES.T
    low = low.round(6)  # what is left of a flat image is rounding
    bits = (low > np.median(low.ravel()[1:])).ravel()
    bits[0] = False
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def near_duplicates(looks: Sequence[int], groups: Sequence[str]) -> dict[str, tuple[int, int]]:
    """For each group, how many of its images look like another one of the group, and like one of another group.

    Args:
        looks: n of :func:`perceptual_hash`, of images that are distinct.
        groups: n names, such as sites.
    Returns:
        group -> (within, across). All pairs are compared, in blocks of rows.
    """
    codes = np.array(looks, np.uint64)
    names = sorted(set(groups))
    owner = np.array([names.index(g) for g in groups], np.int32)
    within, across = np.zeros(len(codes), bool), np.zeros(len(codes), bool)
    step = max(1, _PAIRS // max(1, len(codes)))
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        close = np.bitwise_count(codes[rows, None] ^ codes[None, :]) <= NEAR
        close[np.arange(len(close)), np.arange(len(close)) + start] = False  # itself
        here, there = np.nonzero(close)
        same = owner[rows][here] == owner[there]
        within[here[same] + start] = True
        across[here[~same] + start] = True
    return {g: (int(within[owner == i].sum()), int(across[owner == i].sum())) for i, g in enumerate(names)}
