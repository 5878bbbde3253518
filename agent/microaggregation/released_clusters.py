"""Frozen partitions: what was released once is released again as it is, or never again (design P5).

k-anonymity does not compose. If a grown cohort were clustered again, the sums (size times mean) of two releases would
differ by exactly the new patients; if an old cluster were averaged again from newer images, its two images would
differ by the new ones. So a release is a list of frozen clusters. The next release takes them over byte for byte and
adds clusters of k new patients or more. A cluster with a member who opted out is retired as a whole: its images are
never shown again, and the other members never enter another cluster.

This is the site's private record, kept in the vault: it names patients and never leaves the site.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protos.common.errors import ArtifactError

_KEYS: Final = {"images", "shape", "label", "k", "l", "form"}
NONE: Final = np.frombuffer(b"", np.uint8).reshape(0, 0, 0)


class ReleaseRecordError(ArtifactError, ValueError):
    """The record of releases contradicts itself. The text names no patient and no number (P14)."""


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedCluster:
    """One released cluster. Without images it is retired: it only keeps its patients out of other clusters."""

    members: tuple[str, ...] = field(repr=False)  # pseudonyms, sorted, each once
    images: NDArray[np.uint8] = field(default_factory=lambda: NONE, repr=False)  # (v, h, w[, 3]): views; read-only
    label: str = field(default="", repr=False)
    k: int = 0  # what it was released under
    l: int = 0  # noqa: E741 -- the letter of l-diversity
    form: str = ""  # digest of mechanism, components and shape: what its images are comparable with

    def __post_init__(self) -> None:
        """Sort the members; copy the images, so that nobody can change what was released."""
        if not self.members or "" in self.members or len(set(self.members)) != len(self.members):
            raise ReleaseRecordError("a cluster has members, each once")
        object.__setattr__(self, "members", tuple(sorted(self.members)))
        images = self.images
        if self.retired:
            return
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)):
            raise ReleaseRecordError("the images of a cluster are (v, h, w) or (v, h, w, 3) uint8")
        if not images.size or not 2 <= self.k <= len(self.members) or not 1 <= self.l <= self.k or not self.form:
            raise ReleaseRecordError("an image stands for k patients or more, and has a form")
        kept = np.frombuffer(images.tobytes(), np.uint8).reshape(images.shape)  # of bytes: never writeable
        object.__setattr__(self, "images", kept)

    @property
    def retired(self) -> bool:
        """Whether it has no images (any more)."""
        return len(self.images) == 0

    def same(self, other: ReleasedCluster) -> bool:
        """Whether the other is this very release: members, terms, label, and every byte of the images."""
        mine, theirs = (
            (one.members, one.label, one.k, one.l, one.form, one.images.shape, one.images.tobytes())
            for one in (self, other)
        )
        return mine == theirs


def merged(frozen: Iterable[ReleasedCluster]) -> tuple[ReleasedCluster, ...]:
    """Every cluster once, though several releases contain it, in members' order.

    A cluster that any record holds without its images is retired for good.

    Raises:
        ReleaseRecordError: a patient is in two different clusters, or one cluster has two representatives.
    """
    once: dict[tuple[str, ...], ReleasedCluster] = {}
    for one in frozen:
        before = once.get(one.members)
        if before is None or one.retired:
            once[one.members] = one
        elif not before.retired and not before.same(one):
            raise ReleaseRecordError("a frozen cluster was made again")
    everybody = [patient for members in once for patient in members]
    if len(set(everybody)) != len(everybody):
        raise ReleaseRecordError("a patient is in two frozen clusters")
    return tuple(once[members] for members in sorted(once))


def plan(
    frozen: Sequence[ReleasedCluster],
    gone: Set[str],
    k: int,
    l: int,  # noqa: E741
    form: str,
    eligible: Set[str] | None = None,
) -> tuple[tuple[ReleasedCluster, ...], frozenset[str]]:
    """The clusters that the next release takes over, and the patients excluded from its new ones.

    ``frozen`` are the clusters of *all* earlier releases of the site, ``gone`` the patients who were erased or have
    opted out. A cluster is taken over if it has images of this very form, was made under a k and an l no smaller, and
    none of its patients is gone. If ``eligible`` is given, all of them must be in it, so that a release of one
    selection does not show another's. Patients in any frozen cluster, taken over or not, are taken; so are those who
    are gone. New clusters are formed from the other patients.

    ``gone`` must never become smaller: erased patients stay in it under their pseudonym, or the clusters are retired
    (``from_note`` with None) in the same step.

    Returns:
        (kept, taken): the clusters with the very images and labels of then, in members' order.
    Raises:
        ReleaseRecordError: see ``merged``.
    """
    every = merged(frozen)
    kept = tuple(
        one
        for one in every
        if not one.retired
        and one.form == form
        and one.k >= k
        and one.l >= l
        and gone.isdisjoint(one.members)
        and (eligible is None or all(patient in eligible for patient in one.members))
    )
    return kept, frozenset(patient for one in every for patient in one.members) | frozenset(gone)


def retire(frozen: Iterable[ReleasedCluster], gone: Set[str]) -> tuple[ReleasedCluster, ...]:
    """The record after an erasure: clusters with a patient who is gone lose images and label for good.

    ``plan`` alone would take such a cluster over again if ``gone`` ever became smaller. The members stay: the other
    members, and a patient who returns under the same pseudonym, must never enter a second cluster.
    """
    return tuple(one if gone.isdisjoint(one.members) else ReleasedCluster(one.members) for one in frozen)


def place_of(release: str, index: int) -> str:
    """The name of the note that holds the images of a release's cluster."""
    return f"representative/{release}/{index}"


def to_note(one: ReleasedCluster) -> dict[str, Any] | None:
    """A cluster's images and terms as JSON values, without the members; None when it is retired."""
    if one.retired:
        return None
    return {
        "images": base64.b64encode(one.images.tobytes()).decode(),
        "shape": list(one.images.shape),
        "label": one.label,
        "k": one.k,
        "l": one.l,
        "form": one.form,
    }


def from_note(members: Sequence[str], note: Mapping[str, Any] | None) -> ReleasedCluster:
    """A cluster from the list of its members and the note of its images.

    A record of before, ``{"release": id, "clusters": [[pseudonyms]]}``, has members only, and so has a retired
    cluster: with None they exclude their patients and nothing more.

    Raises:
        ReleaseRecordError: the note is not of this form.
    """
    if isinstance(members, str) or not all(isinstance(patient, str) for patient in members):
        raise ReleaseRecordError("a cluster's members are pseudonyms")
    if note is None:
        return ReleasedCluster(tuple(members))
    if not isinstance(note, Mapping) or set(note) != _KEYS:
        raise ReleaseRecordError("a note has images, their shape, a label, k, l and a form")
    shape, texts = note["shape"], [note[name] for name in ("images", "label", "form")]
    if not isinstance(shape, list) or not all(type(number) is int for number in [*shape, note["k"], note["l"]]):
        raise ReleaseRecordError("a note's shape, k and l are whole numbers")
    if not all(isinstance(text, str) for text in texts) or not all(side > 0 for side in shape):
        raise ReleaseRecordError("a note's images, label and form are texts, and every side is positive")
    try:
        images = np.frombuffer(base64.b64decode(texts[0], validate=True), np.uint8).reshape(shape)
    except (binascii.Error, ValueError):
        raise ReleaseRecordError("a note's images are not of their shape") from None
    return ReleasedCluster(tuple(members), images, texts[1], note["k"], note["l"], texts[2])
