"""The nearest real image to a synthetic one, by a simple distance: grey values, pixel by pixel.

The search compares images that were made smaller (:data:`SIDE`), all with all, exhaustively; what is shown to
persons is then compared at its full size. It is no attack and no measure of privacy: the release's own vetting is,
and its figures stand in the statement. It shows a reviewer where to look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

SIDE: Final = 32  # pixels: the images that are compared are at most so high and wide
STRANGERS: Final = 256  # real images at most whose own nearest stranger is looked for, to compare with
_BLOCK: Final = 256  # synthetic images at a time
DISTANCE: Final = (
    "root mean square difference of grey values (0 to 255), pixel by pixel, of images made smaller to at most "
    f"{SIDE} x {SIDE}"
)


@dataclass(frozen=True, slots=True)
class NearestImage:
    """A synthetic image and the real one that it is most like."""

    made: int  # its place in the release
    person: str = field(repr=False)  # whose the real image is
    place: int = 0  # of the real image among the person's, in the order in which they came
    distance: float = 0.0  # in grey values, of the small images


@dataclass(frozen=True, slots=True, eq=False)
class ReleaseSimilarity:
    """How alike a release is to the images in the vault."""

    nearest: tuple[NearestImage, ...]  # one for each synthetic image, the most alike first
    strangers: float  # the median distance of a real image to the nearest one of another patient; NaN: unknown
    real: int  # images that were compared


def image_vector(picture: NDArray[np.floating]) -> NDArray[np.float32]:
    """An image (h, w[, 3]) of grey values in [0, 255] as a vector: luma, the mean of whole blocks of pixels."""
    grey = picture.astype(np.float32)
    if grey.ndim == 3:
        grey = grey @ np.asarray([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601, as DICOM PS3.3 C.7.6.3.1.2
    step = max(1, -(-max(grey.shape) // SIDE))
    high, wide = (max(1, side // step) for side in grey.shape)
    cut = grey[: high * step, : wide * step]
    blocks = cut.reshape(high, cut.shape[0] // high, wide, cut.shape[1] // wide)
    means: NDArray[np.float32] = blocks.mean(axis=(1, 3)).ravel()
    return means


def search(made: NDArray[np.uint8], real: Iterable[tuple[str, NDArray[np.floating]]]) -> ReleaseSimilarity:
    """Compare every synthetic image (m, h, w[, 3]) with every real one: person, image in [0, 1] of the same shape.

    ``person`` is a pseudonym: a patient's images may come from several projects.
    """
    persons: list[str] = []
    places: list[int] = []
    vectors: list[NDArray[np.float32]] = []
    seen: Counter[str] = Counter()
    for person, picture in real:
        places.append(seen[person])
        seen[person] += 1
        persons.append(person)
        vectors.append(image_vector(picture * 255.0))
    if not vectors:
        return ReleaseSimilarity((), float("nan"), 0)
    ours, theirs = np.stack([image_vector(one) for one in made]), np.stack(vectors)
    found = []
    for start in range(0, len(ours), _BLOCK):
        apart = _apart(ours[start : start + _BLOCK], theirs)
        for i, j in enumerate(apart.argmin(axis=1)):
            found.append(NearestImage(start + i, persons[j], places[j], float(apart[i, j])))
    ranked = sorted(found, key=lambda one: (one.distance, one.made))
    return ReleaseSimilarity(tuple(ranked), _strangers(theirs, persons), len(vectors))


def _apart(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, m) root mean square differences."""
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None, :] - 2.0 * (a @ b.T)
    distances: NDArray[np.float32] = np.sqrt(np.maximum(squares, 0.0) / a.shape[1])
    return distances


def _strangers(real: NDArray[np.float32], persons: list[str]) -> float:
    """How far a patient's image is from the nearest of another patient's, in the middle."""
    names = np.asarray(persons)
    chosen = np.unique(np.linspace(0, len(real) - 1, min(STRANGERS, len(real))).round().astype(int))
    apart = _apart(real[chosen], real)
    apart[names[chosen][:, None] == names[None, :]] = np.inf
    least = apart.min(axis=1)
    return float(np.median(least)) if np.isfinite(least).all() else float("nan")


def fetch(
    wanted: Iterable[NearestImage], real: Iterable[tuple[str, NDArray[np.floating]]]
) -> Iterator[tuple[NearestImage, NDArray[np.uint8]]]:
    """The real images themselves, uint8, of the same stream of images, narrowed to these persons at least."""
    by_place: dict[tuple[str, int], list[NearestImage]] = {}
    for one in wanted:
        by_place.setdefault((one.person, one.place), []).append(one)
    seen: Counter[str] = Counter()
    for person, picture in real:
        place = seen[person]
        seen[person] += 1
        for one in by_place.pop((person, place), ()):
            yield one, np.rint(np.clip(picture, 0.0, 1.0) * 255.0).astype(np.uint8)
        if not by_place:
            return


def difference(made: NDArray[np.uint8], near: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Where two images differ: (h, w) grey values, the largest of the colours."""
    apart = np.abs(made.astype(np.float32) - near.astype(np.float32))
    return apart.max(axis=2) if apart.ndim == 3 else apart


def rms_difference(made: NDArray[np.uint8], near: NDArray[np.uint8]) -> float:
    """The root mean square difference at full size, in grey values."""
    return float(np.sqrt(np.mean(difference(made, near) ** 2)))
