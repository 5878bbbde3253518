"""The pictures of a release that waits, beside the real ones that they are most like: made once, kept in memory.

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

from agent.console import pictures
from agent.console.desk import Desk, Waiting
from agent.console.errand import Progress
from agent.console.nearest import Likeness, Nearest, apart, difference, fetch, search
from agent.edges import projects
from agent.nouns import Selection
from protos.blocks import BadArtifact

SHEET: Final = 60  # pictures of the contact sheet
MOST: Final = 24  # exhibits: the most alike of all
KEPT_S: Final = 1800.0
_RELEASES: Final = 3  # at once


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One made picture, the real one that it is most like, and how far they are apart."""

    made: int
    distance: float  # of the small pictures, by which it was found
    full: float  # at full size
    inside: bool  # the release was made with this patient's images
    person: str = field(repr=False)
    near: NDArray[np.uint8] = field(repr=False, default_factory=lambda: np.zeros((1, 1), np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """What there is to look at of one release."""

    at: float  # monotonic seconds
    artifact: str  # SHA-256, of the statement
    images: NDArray[np.uint8] = field(repr=False)  # (m, h, w[, 3])
    labels: tuple[str, ...] = ()
    why_not: str = ""  # why nothing can be shown or compared
    likeness: Likeness | None = None  # None: not compared yet
    exhibits: tuple[Exhibit, ...] = ()
    fitted: bool = False  # the real pictures were brought to the release's size


def shown(desk: Desk, waiting: Waiting) -> Shown:
    """A release's pictures, compared or not.

    Raises:
        NoSuchReleaseError: it was handed over or withdrawn meanwhile.
    """
    kept = recall(desk, waiting.release.release)
    if kept is not None and kept.artifact == waiting.release.artifact_sha256:
        return kept
    nothing = np.zeros((0, 1, 1), np.uint8)
    made = Shown(time.monotonic(), waiting.release.artifact_sha256, nothing, why_not=_WHY_NOT)
    if waiting.release.artifact_type in ("image-set", "volume-set"):
        try:
            images, labels = pictures.unpack(desk.clear(waiting.release.release))
            made = Shown(time.monotonic(), waiting.release.artifact_sha256, images, labels, _why(waiting))
        except BadArtifact as error:
            made = Shown(time.monotonic(), waiting.release.artifact_sha256, nothing, why_not=f"{error}.")
    _keep(desk, waiting.release.release, made)
    return made


_WHY_NOT: Final = "A model holds no picture: what it draws is not fixed. The figures above are all there is to see."


def _why(waiting: Waiting) -> str:
    if waiting.release.artifact_type == "volume-set":
        return (
            "These are patients' own scans with other faces: each has its original in the vault, and the brain in it "
            "is the patient's own. A nearest picture would only find it."
        )
    return ""


def recall(desk: Desk, release: str) -> Shown | None:
    """What was made of a release, unless it is forgotten."""
    with desk.memory.lock:
        kept: Shown | None = desk.memory.shown.get(release)
        if kept is not None and time.monotonic() - kept.at > KEPT_S:
            del desk.memory.shown[release]
            return None
        return kept


def _keep(desk: Desk, release: str, made: Shown) -> None:
    with desk.memory.lock:
        desk.memory.shown.pop(release, None)
        desk.memory.shown[release] = made
        while len(desk.memory.shown) > _RELEASES:
            del desk.memory.shown[next(iter(desk.memory.shown))]


def forget(desk: Desk, release: str = "") -> None:
    """Forget one release's pictures, or all."""
    with desk.memory.lock:
        if release:
            desk.memory.shown.pop(release, None)
        else:
            desk.memory.shown.clear()


def compare(desk: Desk, waiting: Waiting, progress: Progress) -> str:
    """Compare a release with every eligible picture of its modality and size, in every project; what was found."""
    made = shown(desk, waiting)
    if made.why_not or not len(made.images):
        return "There is nothing to compare."
    count = itertools.count(1)

    def told(stream: Iterator[tuple[str, NDArray[np.float32]]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for one in stream:
            progress(next(count), 0)
            yield one

    size = made.images.shape[1:]
    fitted = False
    likeness = search(made.images, told(_real(desk, waiting, size, fit=False)))
    if not likeness.real and size[0] == size[1]:  # it was drawn from pictures of other sizes, fitted to its own
        fitted = True
        likeness = search(made.images, told(_real(desk, waiting, size, fit=True)))
    wanted = likeness.nearest[:MOST]
    persons = frozenset(one.person for one in wanted)
    found = dict(fetch(wanted, _real(desk, waiting, size, fit=fitted, only=persons))) if wanted else {}
    exhibits = tuple(_exhibit(one, made.images[one.made], found[one], waiting) for one in wanted if one in found)
    now = time.monotonic()
    compared = replace(made, at=now, likeness=likeness, exhibits=exhibits, fitted=fitted)
    _keep(desk, waiting.release.release, compared)
    return f"Compared with {likeness.real} pictures in the vault."


def _exhibit(one: Nearest, made: NDArray[np.uint8], near: NDArray[np.uint8], waiting: Waiting) -> Exhibit:
    return Exhibit(one.made, one.distance, apart(made, near), one.person in waiting.behind, one.person, near)


def _real(
    desk: Desk, waiting: Waiting, shape: tuple[int, ...], *, fit: bool, only: frozenset[str] = frozenset()
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every eligible picture, project after project; with ``only``, of these patients alone, in the same order."""
    selection = Selection(waiting.release.modality, shape, fit=fit)
    for name in desk.projects():
        with desk.vault(name) as vault:
            without = {head.person for head in vault.heads()} - only if only else set()
            for person, image in vault.images(selection, without):
                yield person, image.pixels


def still(desk: Desk, release: str, number: int) -> tuple[Shown, Exhibit]:
    """An exhibit, if it may still be seen: nobody in it has opted out, here or by a command.

    Raises:
        LookupError: not any more, or there is none.
    """
    kept = recall(desk, release)
    if kept is None or not 0 <= number < len(kept.exhibits):
        raise LookupError
    one = kept.exhibits[number]
    if one.person in projects.opted_out(desk.home):
        forget(desk, release)
        raise LookupError
    return kept, one


def picture(kept: Shown, one: Exhibit, which: str) -> bytes:
    """One of the three pictures of an exhibit as PNG: made, near or heat."""
    made = kept.images[one.made]
    if which == "made":
        return pictures.png(made)
    if which == "near":
        return pictures.png(one.near)
    return pictures.png(pictures.heat(difference(made, one.near)))
