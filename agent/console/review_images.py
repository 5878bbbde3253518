"""The images of a pending release next to their nearest real images: computed once, kept in memory.

Patients are in it, so it is forgotten with the decision, with an opt-out, after :data:`KEPT_S`, and with the process.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.console import image_rendering
from agent.console.background_task import Progress
from agent.console.context import PendingRelease, SiteConsoleContext
from agent.console.nearest_image import NearestImage, ReleaseSimilarity, difference, fetch, rms_difference, search
from agent.domain import Selection
from agent.storage import projects
from protos.artifacts.byte_source import ArtifactFormatError

SHEET: Final = 60  # images of the contact sheet
MOST: Final = 24  # exhibits: the most alike of all
KEPT_S: Final = 1800.0
_RELEASES: Final = 3  # at once


@dataclass(frozen=True, slots=True)
class ComparedImage:
    """One synthetic image, the real one that it is most like, and how far they are apart."""

    made: int
    distance: float  # of the small images, by which it was found
    full: float  # at full size
    inside: bool  # the release was made with this patient's images
    person: str = field(repr=False)
    near: NDArray[np.uint8] = field(repr=False, default_factory=lambda: np.zeros((1, 1), np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class ReleaseImages:
    """What there is to look at of one release."""

    at: float  # monotonic seconds
    artifact: str  # SHA-256, of the statement
    images: NDArray[np.uint8] = field(repr=False)  # (m, h, w[, 3])
    labels: tuple[str, ...] = ()
    why_not: str = ""  # why nothing can be shown or compared
    likeness: ReleaseSimilarity | None = None  # None: not compared yet
    exhibits: tuple[ComparedImage, ...] = ()
    fitted: bool = False  # the real images were brought to the release's size


def shown(context: SiteConsoleContext, waiting: PendingRelease) -> ReleaseImages:
    """A release's images, compared or not.

    Raises:
        NoSuchReleaseError: it was handed over or withdrawn meanwhile.
    """
    kept = recall(context, waiting.release.release)
    if kept is not None and kept.artifact == waiting.release.artifact_sha256:
        return kept
    nothing = np.zeros((0, 1, 1), np.uint8)
    made = ReleaseImages(time.monotonic(), waiting.release.artifact_sha256, nothing, why_not=_WHY_NOT)
    if waiting.release.artifact_type in ("image-set", "volume-set"):
        try:
            images, labels = image_rendering.unpack(context.clear(waiting.release.release))
            made = ReleaseImages(time.monotonic(), waiting.release.artifact_sha256, images, labels, _why(waiting))
        except ArtifactFormatError as error:
            made = ReleaseImages(time.monotonic(), waiting.release.artifact_sha256, nothing, why_not=f"{error}.")
    _keep(context, waiting.release.release, made)
    return made


_WHY_NOT: Final = "A model contains no images, and its output is not fixed. Only the figures above can be reviewed."


def _why(waiting: PendingRelease) -> str:
    if waiting.release.artifact_type == "volume-set":
        return (
            "These are patients' own scans with other faces: each has its original in the vault, and the brain in it "
            "is the patient's own. A search for the nearest image would only find that original."
        )
    return ""


def recall(context: SiteConsoleContext, release: str) -> ReleaseImages | None:
    """What was made of a release, unless it is forgotten."""
    with context.memory.lock:
        kept: ReleaseImages | None = context.memory.shown.get(release)
        if kept is not None and time.monotonic() - kept.at > KEPT_S:
            del context.memory.shown[release]
            return None
        return kept


def _keep(context: SiteConsoleContext, release: str, made: ReleaseImages) -> None:
    with context.memory.lock:
        context.memory.shown.pop(release, None)
        context.memory.shown[release] = made
        while len(context.memory.shown) > _RELEASES:
            del context.memory.shown[next(iter(context.memory.shown))]


def forget(context: SiteConsoleContext, release: str = "") -> None:
    """Forget one release's images, or all."""
    with context.memory.lock:
        if release:
            context.memory.shown.pop(release, None)
        else:
            context.memory.shown.clear()


def compare(context: SiteConsoleContext, waiting: PendingRelease, progress: Progress) -> str:
    """Compare a release with every eligible image of its modality and size, in every project; what was found."""
    made = shown(context, waiting)
    if made.why_not or not len(made.images):
        return "There is nothing to compare."
    count = itertools.count(1)

    def told(stream: Iterator[tuple[str, NDArray[np.float32]]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for one in stream:
            progress(next(count), 0)
            yield one

    size = made.images.shape[1:]
    fitted = False
    likeness = search(made.images, told(_real(context, waiting, size, fit=False)))
    if not likeness.real and size[0] == size[1]:  # it was drawn from images of other sizes, fitted to its own
        fitted = True
        likeness = search(made.images, told(_real(context, waiting, size, fit=True)))
    wanted = likeness.nearest[:MOST]
    persons = frozenset(one.person for one in wanted)
    found = dict(fetch(wanted, _real(context, waiting, size, fit=fitted, only=persons))) if wanted else {}
    exhibits = tuple(_exhibit(one, made.images[one.made], found[one], waiting) for one in wanted if one in found)
    now = time.monotonic()
    compared = replace(made, at=now, likeness=likeness, exhibits=exhibits, fitted=fitted)
    _keep(context, waiting.release.release, compared)
    return f"Compared with {likeness.real} images in the vault."


def _exhibit(
    one: NearestImage, made: NDArray[np.uint8], near: NDArray[np.uint8], waiting: PendingRelease
) -> ComparedImage:
    return ComparedImage(
        one.made, one.distance, rms_difference(made, near), one.person in waiting.behind, one.person, near
    )


def _real(
    context: SiteConsoleContext,
    waiting: PendingRelease,
    shape: tuple[int, ...],
    *,
    fit: bool,
    only: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every eligible image, project after project; with ``only``, of these patients alone, in the same order."""
    selection = Selection(waiting.release.modality, shape, fit=fit)
    for name in context.projects():
        with context.vault(name) as vault:
            without = {head.person for head in vault.heads()} - only if only else set()
            for person, image in vault.images(selection, without):
                yield person, image.pixels


def still_visible(context: SiteConsoleContext, release: str, number: int) -> tuple[ReleaseImages, ComparedImage]:
    """An exhibit, if it may still be seen: nobody in it has opted out, here or by a command.

    Raises:
        LookupError: not any more, or there is none.
    """
    kept = recall(context, release)
    if kept is None or not 0 <= number < len(kept.exhibits):
        raise LookupError
    one = kept.exhibits[number]
    if one.person in projects.opted_out(context.home):
        forget(context, release)
        raise LookupError
    return kept, one


def review_png(kept: ReleaseImages, one: ComparedImage, which: str) -> bytes:
    """One of the three images of an exhibit as PNG: made, near or heat."""
    made = kept.images[one.made]
    if which == "made":
        return image_rendering.png(made)
    if which == "near":
        return image_rendering.png(one.near)
    return image_rendering.png(image_rendering.heat(difference(made, one.near)))
