"""Disclosure: attacks that need no trained model, only what the publisher forgot.

The difference of two releases, traces of the cohort in names and order, label counts that can be computed back, the
nearest representative in the encoder's space. Each figure has its chance level and an interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.stats import rankdata

from agent.intervals import Figure, Interval, Resampling, rate, table
from deploy.reproduction.attacks.membership import in_release

Values = NDArray[np.float64]
Rows = NDArray[np.int64]
_NOTHING: Final = 1e-9  # a change of the sums below this share of a code's size is rounding


@dataclass(frozen=True, slots=True)
class Disclosure:
    """What one attack found."""

    attack: str
    figures: tuple[Figure, ...]

    def table(self) -> str:
        """With the attack's name."""
        return table(self.figures, self.attack)


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What an attacker holds of one release: its images encoded, and how many are behind each, if only by a guess."""

    sizes: Rows  # (m,)
    centroids: Values  # (m, d)

    def __post_init__(self) -> None:
        """A size for each finite centroid."""
        if self.centroids.ndim != 2 or self.sizes.shape != self.centroids.shape[:1]:
            raise ValueError("one size for each centroid")
        if not np.isfinite(self.centroids).all():
            raise ValueError("centroids must be finite")


Release = Callable[[Rows], Sums]  # the rows of the patients eligible now -> what is published now
Kind = Literal["joined", "left"]


@dataclass(frozen=True, slots=True)
class Trials:
    """How differencing is played: how often, what happens between the releases, and among how many it is guessed."""

    kind: Kind
    count: int = 50
    candidates: int = 20  # of whom one joined
    k: int = 2  # the mechanism's, for the limit
    newcomers: int = 0  # who join at the same time: candidates too where one joined, known where one left

    def __post_init__(self) -> None:
        """A guess is among two or more."""
        if self.kind not in get_args(Kind) or not self.count >= 1 or not self.candidates >= 2 or not self.k >= 2:
            raise ValueError("patients joined or left; a trial, two candidates and k of 2 or more")
        if not 0 <= self.newcomers < self.candidates:
            raise ValueError("newcomers are fewer than candidates")


def differencing(begin: Callable[[], Release], codes: Values, plan: Trials, rng: np.random.Generator) -> Disclosure:
    """Two releases, between which one patient joined or left (was erased): who was it?

    The sum of size * centroid over a release in which everybody is in a cluster is the sum of all codes, so two sums
    differ by exactly that patient's code, wherever the partition moved. If clusters are frozen nothing changes; if an
    erased patient's cluster is retired, what is missing is the sum of k patients and more. A frozen mechanism shows
    nothing new before k newcomers are there, so ``plan.newcomers`` of them may come at the same time.

    Args:
        begin: starts a mechanism with no past; it is then called twice, first without or with the patient.
        codes: (n, d) everybody.
        plan: of the trials. If a patient ``left``, everybody of the first release is a candidate, and the attacker
            takes the newcomers' codes, whom they know, off the difference; if one ``joined``, ``plan.candidates``
            people are candidates who were not in it, the newcomers among them.
        rng: who it is, and how ties are told.
    Returns:
        The rate of right guesses; chance is one candidate, the limit 1/k. An unchanged release is no hint at all.
    """
    if not len(codes) >= plan.candidates + 2 * plan.k or not np.isfinite(codes).all():
        raise ValueError("finite codes of more people than candidates are needed")
    hits = 0.0
    for _ in range(plan.count):
        order = rng.permutation(len(codes))
        if plan.kind == "joined":
            candidates, late = order[: plan.candidates], order[: 1 + plan.newcomers]
            first = np.sort(order[plan.candidates :])
            second, known = np.union1d(first, late), order[:0]
        else:
            known = order[len(order) - plan.newcomers :]
            candidates = order[: len(order) - plan.newcomers]
            first, second = np.sort(candidates), np.sort(order[1:])
        release = begin()
        hits += _who(release(first), release(second), codes[candidates], codes[known])
    chance = 1.0 / (plan.candidates if plan.kind == "joined" else len(codes) - plan.newcomers)
    figure = rate(f"who {plan.kind}", hits, plan.count, chance, 1.0 / plan.k)
    return Disclosure(f"difference of two releases, one patient {plan.kind}", (figure,))


def _who(before: Sums, after: Sums, candidates: Values, known: Values) -> float:
    """1 if the first candidate is nearest to the difference, split among ties."""
    people = int(after.sizes.sum()) - int(before.sizes.sum())
    change = after.sizes @ after.centroids - before.sizes @ before.centroids
    if float(np.abs(change).max()) <= _NOTHING * float(np.abs(candidates).max()):
        return 1.0 / len(candidates)
    people, change = people - len(known), change - known.sum(axis=0)
    if people == 0:
        return 1.0 / len(candidates)
    far = cdist((change / people)[None], candidates)[0]
    return credit(far, np.arange(len(candidates)), 0)


@dataclass(frozen=True, slots=True)
class Trace:
    """A permutation test: does what is shown follow what is secret?"""

    figure: Figure  # the largest absolute Spearman correlation; chance: its mean under permutations
    secret: str  # the one it is largest for
    p_value: float  # of all secrets together

    def table(self) -> str:
        """With the p-value."""
        return f"{table((self.figure,), f'order against {self.secret}')}\np = {self.p_value:.4f}"


def cohort_order(members: Sequence[Sequence[int]]) -> dict[str, Values]:
    """What a file order may betray of (m,) clusters: their members' first, mean and last place in the cohort."""
    if not members or not all(members):
        raise ValueError("every cluster has a member")
    return {
        "first member": np.array([min(c) for c in members], np.float64),
        "mean member": np.array([np.mean(c) for c in members], np.float64),
        "last member": np.array([max(c) for c in members], np.float64),
    }


def order_leak(
    shown: Sequence[str] | Sequence[float], secrets: Mapping[str, Values], rng: np.random.Generator, draws: int = 1000
) -> Trace:
    """Rank correlation of what an onlooker sees with what must not be seen, and its permutation p-value.

    Args:
        shown: (m,) of the released images in file order: their names, their labels, or 0 .. m-1 for the order itself.
        secrets: (m,) numbers each: :func:`cohort_order`, how far a cluster lies from all others, a date.
        rng: for the permutations.
        draws: how many.
    Returns:
        The largest correlation. The p-value compares it with the largest under the same permutation, so that several
        secrets are no several chances; it is never below 1/(draws + 1).
    Raises:
        ValueError: fewer than three images, or secrets of another length.
    """
    if len(shown) < 3 or not secrets or any(len(s) != len(shown) for s in secrets.values()):
        raise ValueError("an order needs three images, and a secret number of each")
    _, places = np.unique(np.array(shown), return_inverse=True)
    ranks = _standard(rankdata(places))
    hidden = np.stack([_standard(rankdata(s)) for s in secrets.values()])
    found = np.abs(hidden @ ranks)
    null = np.abs(np.stack([hidden @ rng.permutation(ranks) for _ in range(draws)])).max(axis=1)
    value, which = float(found.max()), list(secrets)[int(found.argmax())]
    p_value = (1 + int((null >= value - 1e-12).sum())) / (draws + 1)
    span = float(np.tanh(1.96 / np.sqrt(max(len(shown) - 3, 1))))  # Fisher's z
    interval = Interval(max(0.0, value - span), min(1.0, value + span))
    return Trace(Figure("rank correlation", value, interval, float(null.mean()), len(shown)), which, p_value)


def name_leak(names: Sequence[str], members: Sequence[Sequence[str]]) -> Figure:
    """The share of released names in which an identifier of one of the image's own members stands.

    Chance: the same, were the names dealt out to the images at random. The public k-SALSA script names every output
    after its first member.

    Raises:
        ValueError: not one name for each cluster.
    """
    if len(names) != len(members) or not names:
        raise ValueError("one name for each cluster")
    held = np.array([[any(p and p in name for p in cluster) for cluster in members] for name in names])
    return rate("names with a member's identifier", float(np.trace(held)), len(names), float(held.mean()))


def counts_from_softmax(soft: Values, total: int | None = None) -> Rows | None:
    """Label counts from softmax(counts), as the public k-SALSA script releases them; None if it is no such row.

    log p_i - log p_j = n_i - n_j, so the differences are exact; ``total`` or, without it, the smallest possible
    counts give the rest.

    Args:
        soft: (c,) released soft labels.
        total: the cluster's size, when it is known.
    """
    if soft.ndim != 1 or not np.isfinite(soft).all() or not bool((soft > 0).all()):
        return None
    exact = np.log(soft) - np.log(soft.min())
    counts = np.rint(exact)
    if not float(np.abs(exact - counts).max()) <= 1e-3:
        return None
    if total is not None:
        missing = total - counts.sum()
        if missing < 0 or missing % len(counts):
            return None
        counts = counts + missing // len(counts)
    whole: Rows = counts.astype(np.int64)
    return whole


def label_counts(released: Values, counts: Rows, shadow: tuple[Values, Rows]) -> Disclosure:
    """How many members have which label, from the released labels alone.

    Args:
        released: (m, c) as published: soft labels, or one-hot for a majority label.
        counts: (m, c) the truth.
        shadow: the same two of clusters of the attacker's own.
    Returns:
        ``counts recovered``: softmax inverted where it can be (the size is known), else the commonest counts of
        shadow clusters with the same released label; chance: the commonest counts of all shadow clusters. ``a
        member's label guessed``: by the released label's largest entry; chance: the commonest label of all, and the
        limit is what a cluster of that size with two labels must leave open.
    Raises:
        ValueError: shapes that do not fit.
    """
    own, theirs = shadow
    if released.shape != counts.shape or own.shape != theirs.shape or released.shape[1:] != own.shape[1:]:
        raise ValueError("released labels and counts are (m, c), here and in the shadow")
    sizes, key = counts.sum(axis=1), [int(r.argmax()) for r in own]
    overall = Counter(map(tuple, theirs.tolist())).most_common(1)[0][0]
    by_label = {g: Counter(tuple(c) for c, k in zip(theirs.tolist(), key, strict=True) if k == g) for g in set(key)}
    hits = blind = 0
    for soft, truth, size in zip(released, counts, sizes, strict=True):
        inverted = counts_from_softmax(soft, int(size))
        seen = by_label.get(int(soft.argmax()))
        guess = tuple(inverted.tolist()) if inverted is not None else seen.most_common(1)[0][0] if seen else overall
        hits += guess == tuple(truth.tolist())
        blind += overall == tuple(truth.tolist())
    m, total = len(counts), int(sizes.sum())
    right = int(counts[np.arange(m), released.argmax(axis=1)].sum())
    commonest = float(counts.sum(axis=0).max() / total)
    figures = (
        rate("counts recovered", hits, m, blind / m),
        rate("a member's label guessed", right, total, commonest, float((1 - 1 / sizes).mean())),
    )
    return Disclosure("label-count inversion", figures)


def nearest_representative(
    codes: Values,
    inside: NDArray[np.bool_],
    representatives: Values,
    rng: np.random.Generator,
    how: Resampling | None,
) -> Disclosure:
    """Membership by an attacker who has the encoder: how near is the nearest released image?

    k-SALSA (section 4.5) expects 50 % of it for every k. That is so only if members are no nearer to their own
    average than others are. Among isotropic codes a member's squared distance is d (1 - 1/k), another's d (1 + 1/k),
    and each varies by sqrt(2 d) only: with d well above k^2 the two come apart whatever k is.

    Args:
        codes: (n, d) everybody, encoded.
        inside: (n,) who is in the release.
        representatives: (m, d) the released images, encoded.
        rng: for the bootstrap.
        how: the bootstrap.
    """
    if codes.ndim != 2 or inside.shape != codes.shape[:1] or not np.isfinite(codes).all() or not len(representatives):
        raise ValueError("codes are (n, d) and finite, with a representative")
    near = -cdist(codes, representatives).min(axis=1)
    return Disclosure("nearest representative", in_release(near, inside, rng, how or Resampling()))


def credit(far: Values, labels: Rows, right: int) -> float:
    """1 if the nearest of (n,) distances is right, shared among ties; ``labels`` (n,) say whose each is."""
    nearest = labels[far <= far.min()]
    return float((nearest == right).mean())


def _standard(ranks: Values) -> Values:
    moved = ranks - ranks.mean()
    length = float(np.linalg.norm(moved))
    out: Values = moved / length if length > 0 else np.zeros_like(moved)
    return out
