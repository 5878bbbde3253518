"""Recognition attacks on a release: naive, reverse and parrot (Newton, Sweeney & Malin 2005; AnonFACES, section 5).

Any network with a threshold is the recogniser: the attacker's may be another than the one that the mechanism checked
against, and should be. Rates are Rank-1 (Definition 5.1), true-positive identification at a false-positive rate in an
open set (ISO/IEC 19795-1), and the share of people whose own representative the recogniser takes for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.stats import binom
from torch import Tensor

from agent.intervals import Figure, rate, table
from agent.models.image_tensors import to_tensor
from deploy.reproduction.attacks.membership import Pool, Published

Values = NDArray[np.float64]
_SAME: Final = 1e-6  # distances that differ by less are a tie: one image embedded in two batches
_UNIT: Final = 1e-3  # how far from length 1 a unit vector may be


class Recogniser(Protocol):
    """Says which images are of the same person; ``agent.models.recognition.recogniser.Recogniser`` is one."""

    @property
    def name(self) -> str:
        """For the table."""

    @property
    def threshold(self) -> float:
        """Two images closer than this are of the same person."""

    def embed(self, images: Tensor) -> Tensor:
        """(n, c, h, w) in [-1, 1] as (n, d) vectors of length 1."""


Deidentify = Callable[[Pool], NDArray[np.float32]]  # one replacement for each image, in order


@dataclass(frozen=True, slots=True)
class Recognition:
    """What one recogniser found in one attack."""

    attack: str
    recogniser: str
    figures: tuple[Figure, ...]

    def table(self) -> str:
        """With the names of both."""
        return table(self.figures, f"{self.attack} recognition by {self.recogniser}")


def vectors(recogniser: Recogniser, images: NDArray[np.float32], batch: int = 64) -> Values:
    """(n, d) unit vectors of images (n, h, w[, 3]) in [0, 1].

    Raises:
        ValueError: no image, or the recogniser gives something else than unit vectors (NaN is none).
    """
    if not len(images):
        raise ValueError("nothing to recognise")
    with torch.no_grad():
        parts = [recogniser.embed(to_tensor(images[a : a + batch])).double() for a in range(0, len(images), batch)]
    out: Values = torch.cat(parts).cpu().numpy()
    if out.ndim != 2 or not float(np.abs(np.sqrt((out * out).sum(axis=1)) - 1.0).max()) <= _UNIT:
        raise ValueError("a recogniser gives vectors of length 1")
    return out


def naive(recogniser: Recogniser, gallery: Pool, published: Published, k: int) -> Recognition:
    """Gallery: originals, and anybody else; probe: the released images (attacker A1).

    ``Rank-1 of the replaced person`` is the paper's: every original is replaced by its cluster's image, which then is
    its probe. At most one of a cluster's people is nearest, so the limit is 1/k, and Wilson's interval over people
    errs on the wide side. ``Rank-1 of any member`` asks whether the nearest is in the cluster at all.

    Raises:
        ValueError: a member has no image in the gallery.
    """
    if not np.isin([p for c in published.members for p in c], gallery.owners).all():
        raise ValueError("every member has an image in the gallery")
    far = cdist(vectors(recogniser, published.representatives), vectors(recogniser, gallery.images))
    people = len(np.unique(gallery.owners))
    exact = any_member = 0.0
    for distances, cluster in zip(far, published.members, strict=True):
        exact += sum(_credit(distances, gallery.owners, (p,)) for p in cluster)
        any_member += _credit(distances, gallery.owners, cluster)
    total = sum(len(c) for c in published.members)
    chance_any = total / (len(published.members) * people)
    figures = (
        rate("Rank-1 of the replaced person", min(exact, total), total, 1.0 / people, 1.0 / k),
        rate("Rank-1 of any member", any_member, len(far), chance_any),
        *_reidentified(recogniser, gallery, published, k),
    )
    return Recognition("naive", recogniser.name, figures)


def reverse(recogniser: Recogniser, probes: Pool, published: Published, k: int) -> Recognition:
    """Gallery: the released images; probe: originals (attacker A2). Finds the cluster, and so 1/k of the person.

    ``Rank-1`` counts images of members whose nearest representative is their own cluster's; knowing the cluster, the
    attacker still has ``k`` people to choose from, so the chance of naming the right one is at most a k-th of it.
    """
    cluster_of = {p: j for j, cluster in enumerate(published.members) for p in cluster}
    rows = np.array([i for i, p in enumerate(probes.owners.tolist()) if p in cluster_of], np.int64)
    if not len(rows):
        raise ValueError("no probe is of a member")
    gallery = np.arange(len(published.members))
    far = cdist(vectors(recogniser, probes.images[rows]), vectors(recogniser, published.representatives))
    truth = [cluster_of[int(p)] for p in probes.owners[rows]]
    credits = np.array([_credit(d, gallery, (t,)) for d, t in zip(far, truth, strict=True)])
    shares = np.array([1.0 / len(published.members[t]) for t in truth])
    m = len(published.members)
    figures = (
        rate("Rank-1 of the cluster", float(credits.sum()), len(rows), 1.0 / m),
        rate(
            "... and of the person in it", float((credits * shares).sum()), len(rows), float(shares.mean()) / m, 1 / k
        ),
        *_reidentified(recogniser, probes, published, k),
    )
    return Recognition("reverse", recogniser.name, figures)


def parrot(recogniser: Recogniser, gallery: Pool, probes: Pool, deidentify: Deidentify, k: int) -> Recognition:
    """Gallery and probes both de-identified, by an attacker who can run or imitate the mechanism (attacker A3).

    Args:
        recogniser: compares de-identified with de-identified.
        gallery: known people, among them all of the probes.
        probes: other images of some of them, or the same (the worst case).
        deidentify: one replacement for each image. Called twice, gallery first. A mechanism with secret randomness
            draws anew; a deterministic one, such as pixelation, answers the same image with the same image.
        k: of the mechanism.
    Returns:
        Rank-1; images which are the same for many people are a tie, of which the right one is 1/ties.
    Raises:
        ValueError: a probe's person is not in the gallery, or the mechanism did not replace every image.
    """
    if not np.isin(probes.owners, gallery.owners).all():
        raise ValueError("every probe is of somebody in the gallery")
    known, seen = deidentify(gallery), deidentify(probes)
    if len(known) != len(gallery.owners) or len(seen) != len(probes.owners):
        raise ValueError("every image is replaced by one")
    far = cdist(vectors(recogniser, seen), vectors(recogniser, known))
    hits = sum(_credit(d, gallery.owners, (int(p),)) for d, p in zip(far, probes.owners, strict=True))
    chance = 1.0 / len(np.unique(gallery.owners))
    return Recognition("parrot", recogniser.name, (rate("Rank-1", hits, len(far), chance, 1.0 / k),))


def rank_one(recogniser: Recogniser, gallery: Pool, probes: Pool) -> Figure:
    """Rank-1 of real images against real ones: what the recogniser can do at all (AnonFACES, Table 1, "before")."""
    far = cdist(vectors(recogniser, probes.images), vectors(recogniser, gallery.images))
    hits = sum(_credit(d, gallery.owners, (int(p),)) for d, p in zip(far, probes.owners, strict=True))
    return rate("Rank-1 before", hits, len(far), 1.0 / len(np.unique(gallery.owners)))


def open_set(mated: Values, correct: NDArray[np.bool_], strangers: Values, fpir: float) -> Figure:
    """TPIR at a given FPIR: probes of enrolled people found at rank 1 *and* below a threshold.

    Args:
        mated: (p, g) distances of probes of enrolled people to the gallery.
        correct: (p, g): whether the gallery's image answers the probe.
        strangers: (q, g) distances of probes of people who are not enrolled; at most ``fpir`` of them may fall below
            the threshold, which they set.
        fpir: in [0, 1).
    Returns:
        The rate. Chance: the false-positive rate times the share of correct answers in the gallery.
    Raises:
        ValueError: an empty or non-finite matrix, or other shapes.
    """
    if mated.shape != correct.shape or not mated.size or not strangers.size or mated.shape[1] != strangers.shape[1]:
        raise ValueError("distances are (p, g) and (q, g), the answers (p, g), none empty")
    if not 0.0 <= fpir < 1.0 or not np.isfinite(mated).all() or not np.isfinite(strangers).all():
        raise ValueError("distances are finite and FPIR lies in [0, 1)")
    closest = np.sort(strangers.min(axis=1))
    allowed = int(np.floor(fpir * len(closest)))
    threshold = float(closest[allowed])
    hits = sum(
        _credit(d, c.astype(np.int64), (1,))
        for d, c in zip(mated, correct, strict=True)
        if float(d.min()) < threshold
    )
    chance = (allowed + 1) / (len(closest) + 1) * float(correct.mean())
    return rate(f"TPIR at FPIR {fpir:g}", hits, len(mated), chance)


def naive_open_set(
    recogniser: Recogniser, gallery: Pool, published: Published, strangers: NDArray[np.float32], fpir: float = 0.01
) -> Figure:
    """TPIR of the released images against the originals.

    Args:
        recogniser: the attacker's.
        gallery: originals of the members, and anybody else but the strangers.
        published: the release.
        strangers: (q, h, w[, 3]) released images of people who are not in the gallery.
        fpir: see :func:`open_set`.
    """
    known = vectors(recogniser, gallery.images)
    correct = np.stack([np.isin(gallery.owners, c) for c in published.members])
    mated = cdist(vectors(recogniser, published.representatives), known)
    return open_set(mated, correct, cdist(vectors(recogniser, strangers), known), fpir)


def _reidentified(recogniser: Recogniser, originals: Pool, published: Published, k: int) -> tuple[Figure, ...]:
    """Re-identification rates at the recogniser's threshold, by person: the nearest of their images decides.

    Cluster level: Q_i = u/k, the share of a cluster's members within the threshold of their representative (section
    3.4); reported is the share of clusters whose Q_i exceeds 1/k. Database level (section 5.1, Figure 15): the share
    of all members. Chance: people within the threshold of representatives that are not theirs.
    """
    far = cdist(vectors(recogniser, published.representatives), vectors(recogniser, originals.images))
    threshold = float(recogniser.threshold)
    own: list[NDArray[np.bool_]] = []
    foreign = pairs = 0
    for distances, cluster in zip(far, published.members, strict=True):
        near = {int(p) for p in originals.owners[distances < threshold]}
        mine = [p for p in cluster if p in set(originals.owners.tolist())]
        own.append(np.array([p in near for p in mine], bool))
        foreign += len(near - set(cluster))
        pairs += len(np.unique(originals.owners)) - len(mine)
    found, of = sum(int(o.sum()) for o in own), sum(len(o) for o in own)
    chance = foreign / pairs if pairs else 0.0
    above = sum(1 for o in own if len(o) and not int(o.sum()) <= len(o) / k)
    expected = _above_by_chance([len(o) for o in own], chance, k)
    return (
        rate("within the threshold, database", found, of, chance, 1.0 / k),
        rate("clusters above 1/k", above, len(own), expected),
    )


def _above_by_chance(sizes: Sequence[int], chance: float, k: int) -> float:
    """The share of clusters with more than size/k members within the threshold if each were so with ``chance``."""
    return float(np.mean([binom.sf(s // k, s, chance) for s in sizes]))


def _credit(distances: Values, labels: NDArray[np.int64], right: Sequence[int]) -> float:
    """1 if the nearest is right, 0 if not; among equally near ones the share of people who are."""
    nearest = np.unique(labels[distances <= distances.min() + _SAME])
    return float(np.isin(nearest, right).mean())
