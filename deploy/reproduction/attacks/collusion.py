"""Collusion: what the members of a cluster but one hold of the last, and how a guess at the last one is checked.

k-anonymity promises nothing against either: k - 1 members subtract themselves and hold the last one's code, exactly
where weights are equal and nearly where they are secret. It is measured, not argued away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from agent.intervals import Figure, Resampling, Units, percentile, rate, resampled
from deploy.reproduction.attacks.disclosure import Disclosure, credit

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A release in the attacker's latent space, with the truth about it."""

    codes: Values  # (n, d): everybody who might be in it
    members: tuple[tuple[int, ...], ...]  # rows of codes
    representatives: Values  # (m, d): the released images, encoded by the attacker

    def __post_init__(self) -> None:
        """Finite codes, one representative for each cluster, members that exist and are in one cluster only."""
        flat = [r for cluster in self.members for r in cluster]
        if self.codes.ndim != 2 or self.representatives.shape != (len(self.members), self.codes.shape[1]):
            raise ValueError("codes are (n, d), representatives (m, d), one for each cluster")
        if not flat or not all(0 <= r < len(self.codes) for r in flat) or len(set(flat)) != len(flat):
            raise ValueError("members are rows of codes, nobody in two clusters")
        if not np.isfinite(self.codes).all() or not np.isfinite(self.representatives).all():
            raise ValueError("codes must be finite")


def collusion(known: Known, rng: np.random.Generator, how: Resampling | None = None) -> Disclosure:
    """All members of a cluster but one know their own codes and look for the last: size * representative - their sum.

    They assume equal weights. One target of each cluster is drawn, so that trials are independent.

    Returns:
        ``last member found``: nearest to the estimate among everybody but the colluders, beside the same guess from
        the representative alone (``without collusion``). ``likeness``: the cosine of estimate and truth about the
        mean of all codes, beside the representative's own.
    """
    mean = known.codes.mean(axis=0)
    hits = np.zeros(2)
    likeness, chances = [], []
    for cluster, representative in zip(known.members, known.representatives, strict=True):
        target = int(rng.choice(cluster))
        others = [r for r in cluster if r != target]
        estimate = len(cluster) * representative - known.codes[others].sum(axis=0)
        candidates = np.setdiff1d(np.arange(len(known.codes)), others)
        far = cdist(np.stack([estimate, representative]), known.codes[candidates])
        hits += [credit(row, candidates, target) for row in far]
        chances.append(1.0 / len(candidates))
        likeness.append([_cosine(x - mean, known.codes[target] - mean) for x in (estimate, representative)])
    each, m, chance = np.array(likeness), len(known.members), float(np.mean(chances))
    how = how or Resampling()
    draws = resampled(lambda rows: each[rows].mean(axis=0).tolist(), Units(np.arange(m)), rng, how.count)
    values = [float(x) for x in each.mean(axis=0)]
    spans = [percentile(draws[:, i], values[i], how.level) for i in range(2)]
    figures = (
        rate("last member found", hits[0], m, chance),
        rate("last member, without collusion", hits[1], m, chance),
        Figure("likeness of the estimate", values[0], spans[0], values[1], m),
        Figure("likeness of the representative", values[1], spans[1], 0.0, m),
    )
    return Disclosure("k-1 collusion", figures)


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """A release as images, and how whoever attacks it makes images of the same kind."""

    codes: NDArray[np.float32]  # (n, d): everybody who might be in it
    members: tuple[tuple[int, ...], ...]  # rows of codes
    pictures: NDArray[np.uint8]  # (m, ...): as released
    decode: Callable[[NDArray[np.float32]], NDArray[np.uint8]]  # (j, d) -> (j, ...), the mechanism's own

    def __post_init__(self) -> None:
        """One image for each cluster; the rest is checked by :class:`Known`."""
        if len(self.pictures) != len(self.members) or self.pictures.dtype != np.uint8:
            raise ValueError("every cluster has its 8-bit image")
        Known(self.codes.astype(np.float64), self.members, np.zeros((len(self.members), self.codes.shape[1])))


def guessed(of: Shown, rng: np.random.Generator, among: int = 100) -> Disclosure:
    """Whoever knows all members of a cluster but one does what the mechanism does, with every candidate as the last.

    The parrot of AnonFACES, section 5.1, as one person plays it: the plain mean of the known members and a candidate
    is drawn, and compared with the released image. Secret weights are there so that no such image is the released
    one; the nearest of them tells nevertheless, since another member moves a mean by more than its weights do.

    Args:
        of: the release.
        rng: draws one target of each cluster, and the other candidates among everybody who is not a known member.
        among: candidates, the target included.
    Returns:
        ``equal``: one candidate's image is the released one, byte for byte (none is: the guess is blind). ``near``:
        the candidate whose image is nearest in pixels. Chance is one candidate.
    Raises:
        ValueError: there are fewer people than candidates.
    """
    if not 2 <= among <= len(of.codes) - max(len(c) for c in of.members) + 1:
        raise ValueError("there are two candidates or more, and not more than people")
    equal = near = 0.0
    for cluster, picture in zip(of.members, of.pictures, strict=True):
        target = int(rng.choice(cluster))
        known = [r for r in cluster if r != target]
        others = np.setdiff1d(np.arange(len(of.codes)), cluster)
        candidates = np.concatenate([[target], rng.choice(others, among - 1, replace=False)])
        sums = of.codes[known].sum(axis=0, dtype=np.float64) + of.codes[candidates].astype(np.float64)
        drawn = of.decode((sums / len(cluster)).astype(np.float32)).reshape(among, -1).astype(np.float64)
        far = cdist(picture.reshape(1, -1).astype(np.float64), drawn)[0]
        near += credit(far, candidates, target)
        equal += credit(far, candidates, target) if float(far.min()) == 0.0 else 1.0 / among
    m = len(of.members)
    figures = (rate("last member, equal image", equal, m, 1 / among), rate("last member, near", near, m, 1 / among))
    return Disclosure("a guess checked by k-1 members", figures)


def _cosine(a: Values, b: Values) -> float:
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths > 0 else 0.0
