"""Identity mixing with risk assessment: one code for each cluster that no recogniser matches with a patient.

AnonFACES, section 3.4 (Eq. 1, re-identification risk assessment) and 5.1 (random weights against the parrot attack).
The paper lowers the weights of the members at risk until none is. That has holes, which :func:`mix` closes:

* Lowering one weight raises the shares of the others: at k = 2 the image becomes the other person's. Here weights
  stay within a factor 2 of the mean, and after every change all members are compared again.
* The paper compares members only. An image that looks like a patient of another cluster harms that patient as much:
  here it is compared with every image of every patient of the cohort, by two recognisers or more.
* The paper's loop need not end. Here rounds are bounded; a cluster that stays at risk is dealt anew together with its
  neighbour, and when that does not help either it is suppressed: no image, and the result says so.
* The paper's weights are a function of the images, so who has a guess at a cluster can check it to the last bit
  (parrot recognition). Here every weight is drawn anew and secret, so that no guess gives the very image. A guess
  that is near is still told from one that is not: secret weights move an image less than another member does
  (``deploy.reproduction.attacks.collusion.guessed``).
* Every further mixture of the same people is another equation about them, so whoever is in a cluster of an earlier
  release must not be mixed again: the caller excludes them and gives back the old image
  (``agent.microaggregation.released_clusters``).

Weights never leave :func:`mix`. Rates and suppressed clusters are functions of patients, for the site alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Clusters, Latents
from agent.errors import CohortTooSmallError
from agent.mechanisms.anonfaces.gallery import Gallery
from agent.mechanisms.common.linear_codec import Codec

Weights = NDArray[np.float64]  # (n,) of one cluster
Rows = NDArray[np.int64]  # (n,) of the latents: the members of one cluster
LEAST: Final = 0.5  # of the mean weight 1 / n; n = k in the paper
MOST: Final = 2.0
_TINY: Final = 1e-12
_HALVINGS: Final = 80  # of the bisection in ``bounded``: to the last bit of float64


@dataclass(frozen=True, slots=True)
class Mixing:
    """Public configuration of the mixing."""

    k: int
    delta: float = 0.3  # radius of the secret weights, of the mean weight
    beta: float = 0.2  # taken from the weight of a member at risk, of the mean weight
    rounds: int = 10  # of adjusting the weights of one set of clusters
    deals: int = 3  # of clusters that stay at risk, with their neighbours
    batch: int = 64  # images made and judged at once

    def __post_init__(self) -> None:
        """Refuse what is no mixing: written so that NaN is refused."""
        if not (self.k >= 2 and self.rounds >= 1 and self.deals >= 0 and self.batch >= 1):
            raise ValueError("mixing needs k >= 2, a round, a batch of 1")
        if not (0.0 < self.delta <= 1.0 - LEAST and 0.0 < self.beta <= 1.0):
            raise ValueError(f"delta lies in (0, {1.0 - LEAST}] (never 0: weights are secret) and beta in (0, 1]")


@dataclass(frozen=True, slots=True)
class Published:
    """The paper's own rule, for comparison only: weights as written, one recogniser, members only, no bounds."""

    beta: float = 0.05  # taken from a weight that starts at 1 / k
    delta: float = 0.0  # 0: deterministic, as the paper evaluates it; else "AnonFACES rand" of figure 16
    rounds: int = 20  # the paper's loop has no bound
    batch: int = 64


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """Inputs of the mixing: the generator, the recognisers, and the constraints on a cluster that is formed again."""

    codec: Codec
    gallery: Gallery  # of the same cohort
    allowed: Callable[[tuple[str, ...]], bool]  # l-diversity, strata, pairs ...: no default, or forgetting breaks P8


@dataclass(frozen=True, slots=True, eq=False)
class MixedIdentities:
    """The result. ``images`` are the very images that were judged; the rest stays at the site."""

    codes: NDArray[np.float32]  # (m, d)
    images: NDArray[np.uint8]  # (m, h, w[, 3])
    clusters: Clusters  # m, in the same order
    suppressed: tuple[tuple[str, ...], ...]  # clusters without an image
    rounds: int  # of mixing and judging, over all deals
    members_before: float  # mean share of a cluster's members at risk (Q_i of the paper), with the first weights
    strangers_before: float  # share of clusters whose first image was taken for a patient of another one
    members_after: float  # of what was made
    strangers_after: float


@dataclass(slots=True, eq=False)
class _Group:
    """One cluster in work."""

    rows: Rows
    weights: Weights
    code: NDArray[np.float32] | None = None  # None: not safe
    image: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    latents: Latents
    setting: Setting
    plan: Mixing
    rng: np.random.Generator

    def drawn(self, rows: Rows) -> _Group:
        return _Group(rows, secret_weights(len(rows), self.plan.delta, self.rng))


def bounded(weights: Weights) -> Weights:
    """Clamp to [1 / (2n), 2 / n] and renormalise, both at once: clip(c w) with the c at which the sum is 1.

    Weights that already satisfy both are left as they are.
    """
    n = len(weights)
    low, high = LEAST / n, MOST / n
    positive = np.maximum(weights, low * 1e-6)
    below, above = 0.0, high / float(positive.min())  # all at the lower bound; all at the upper
    for _ in range(_HALVINGS):
        middle = 0.5 * (below + above)
        if np.clip(middle * positive, low, high).sum() < 1.0:
            below = middle
        else:
            above = middle
    found: Weights = np.clip(above * positive, low, high)
    return found


def secret_weights(n: int, delta: float, rng: np.random.Generator) -> Weights:
    """(n,) weights from U(mean - delta, mean + delta), section 5.1; delta in units of the mean 1 / n; bounded."""
    return bounded(rng.uniform(1.0 - delta, 1.0 + delta, n) / n)


def lowered(weights: Weights, risk: NDArray[np.bool_], beta: float) -> Weights:
    """Take ``beta`` / n from the weights of the members at risk (section 3.4), inside the bounds."""
    return bounded(np.maximum(weights - beta / len(weights) * risk, LEAST / len(weights)))


def mix(
    latents: Latents, clusters: Clusters, setting: Setting, plan: Mixing, rng: np.random.Generator
) -> MixedIdentities:
    """Mix every cluster, adjust those at risk, form again those that stay at risk, suppress the rest.

    Args:
        latents: one code for each patient.
        clusters: a partition of patients of no earlier release; each of k patients or more.
        setting: the codec, the gallery, and what a cluster that is dealt anew must satisfy.
        plan: the configuration.
        rng: of the secret weights and the dealing; from the system's entropy in production.
    Returns:
        Clusters of k patients or more, of at most 2k - 1 where they were dealt anew, in random order.
    Raises:
        CohortTooSmallError: no cluster is left. The text is the same whatever the cause (P14).
        ValueError: a cluster is smaller than k or names a stranger, or the gallery is of another cohort.
    """
    work = _Work(latents, setting, plan, rng)
    groups = [work.drawn(rows) for rows in _rows(latents, clusters, setting.gallery, plan.k)]
    rounds, members, strangers = _adjust(work, groups)
    for _ in range(plan.deals):
        if all(group.code is not None for group in groups):
            break
        groups, more = _deal(work, groups)
        rounds += more
    made = [group for group in groups if group.code is not None]
    # once more, what is about to be given back, as it is
    made = [
        group for group, (share, stranger) in zip(made, _verdicts(work, made), strict=True) if not (share or stranger)
    ]
    if not made:
        raise CohortTooSmallError
    if not all(len(group.rows) >= plan.k for group in made):
        raise RuntimeError("the mixing breaks its own contract")  # never released: fail closed
    kept = {id(group) for group in made}
    left = tuple(_names(latents, group.rows) for group in groups if id(group) not in kept)
    shuffled = [made[int(j)] for j in rng.permutation(len(made))]  # nobody sees which were dealt anew
    return _mixed(work, shuffled, left, (rounds, members, strangers))


def mix_published(
    latents: Latents, clusters: Clusters, setting: Setting, plan: Published, rng: np.random.Generator
) -> MixedIdentities:
    """Section 3.4 to the letter: w_i = 1 / k, w_i - beta for members at risk of *one* recogniser, until none is.

    A baseline and not for release: nothing is bounded, re-checked against others or suppressed. Where the weights no
    longer have a positive sum, Eq. 1 has no value, and the cluster keeps its last mixture.
    """
    everyone = _rows(latents, clusters, setting.gallery, 1)
    work = _Work(latents, setting, Mixing(2, batch=plan.batch), rng)
    groups = [_Group(rows, 1.0 / len(rows) + rng.uniform(-plan.delta, plan.delta, len(rows))) for rows in everyone]
    first: tuple[float, float] | None = None
    todo, rounds = groups, 0
    while todo and rounds < plan.rounds:
        rounds += 1
        risks = _judged(work, todo, judges=1)
        if first is None:
            first = _rates(work, groups)
        for group, (risk, _) in zip(todo, risks, strict=True):
            lower = group.weights - plan.beta * risk
            group.weights = lower if risk.any() and lower.sum() > 1e-9 else group.weights
        todo = [group for group, (risk, _) in zip(todo, risks, strict=True) if risk.any()]
    assert first is not None
    return _mixed(work, groups, (), (rounds, *first))


def _rows(latents: Latents, clusters: Clusters, gallery: Gallery, k: int) -> list[Rows]:
    if latents.patients != gallery.patients[: len(latents.patients)]:  # behind them may be others
        raise ValueError("the gallery shows another cohort")
    row = {patient: i for i, patient in enumerate(latents.patients)}
    if not clusters.members or not all(len(c) >= k and all(p in row for p in c) for c in clusters.members):
        raise ValueError("every cluster must hold k patients or more, each with a code")
    return [np.array([row[patient] for patient in cluster], np.int64) for cluster in clusters.members]


def _names(latents: Latents, rows: Rows) -> tuple[str, ...]:
    return tuple(sorted(latents.patients[int(i)] for i in rows))


def _judged(work: _Work, groups: Sequence[_Group], judges: int | None = None) -> list[tuple[NDArray[np.bool_], bool]]:
    """Mix (Eq. 1), draw and judge; leaves code and image in every group. (members at risk, is anybody else?)."""
    found = []
    for a in range(0, len(groups), work.plan.batch):
        part = groups[a : a + work.plan.batch]
        codes = np.stack([_mixture(work.latents, group) for group in part])
        images = work.setting.codec.decode(codes)
        risks = work.setting.gallery.at_risk(images, judges)
        for group, code, image, risk in zip(part, codes, images, risks, strict=True):
            group.code, group.image = code, image
            own = risk[group.rows]
            found.append((own, bool(risk.sum() > own.sum())))
    return found


def _mixture(latents: Latents, group: _Group) -> NDArray[np.float32]:
    mean = group.weights @ latents.codes[group.rows].astype(np.float64) / group.weights.sum()
    code: NDArray[np.float32] = mean.astype(np.float32)
    return code


def _adjust(work: _Work, groups: Sequence[_Group]) -> tuple[int, float, float]:
    """Mix and adjust until every group is safe or the rounds are over; an unsafe group is left without a code.

    Returns:
        Rounds, and of the first one the mean share of members at risk and the share of groups like a stranger.
    """
    members = strangers = 0.0
    todo, rounds = list(groups), 0
    while todo and rounds < work.plan.rounds:
        found = _judged(work, todo)
        if rounds == 0:
            members = float(np.mean([own.mean() for own, _ in found]))
            strangers = float(np.mean([other for _, other in found]))
        rounds += 1
        unsafe = []
        for group, (own, other) in zip(todo, found, strict=True):
            if not own.any() and not other:
                continue
            group.code = group.image = None
            group.weights = _next_weights(work, group.weights, own)
            unsafe.append(group)
        todo = unsafe
    return rounds, members, strangers


def _next_weights(work: _Work, weights: Weights, own: NDArray[np.bool_]) -> Weights:
    """Less of those at risk; where that moves nothing (all are, or only a stranger is), another draw."""
    lower = lowered(weights, own, work.plan.beta)
    if np.abs(lower - weights).max() > 1e-6 / len(weights):
        return lower
    return secret_weights(len(weights), work.plan.delta, work.rng)


def _deal(work: _Work, groups: list[_Group]) -> tuple[list[_Group], int]:
    """Deal every unsafe cluster anew: alone where it has 2k patients or more, else with the nearest cluster.

    Two clusters of k or more never fit into one of 2k - 1, so a merge is always dealt into clusters of k to 2k - 1
    again, along a random direction. A deal counts when every cluster of it is safe and allowed; else all stay as they
    were: a neighbour that was safe never pays.
    """
    centres = np.stack([work.latents.codes[group.rows].mean(axis=0, dtype=np.float64) for group in groups])
    free = np.ones(len(groups), bool)
    deals: list[tuple[list[int], list[_Group]]] = []
    for j in work.rng.permutation([j for j, group in enumerate(groups) if group.code is None]):
        if not free[j]:
            continue
        taken = [int(j)]
        free[j] = False
        if len(groups[j].rows) < 2 * work.plan.k:
            if not free.any():
                continue
            far = np.where(free, ((centres - centres[j]) ** 2).sum(axis=1), np.inf)
            taken.append(int(far.argmin()))
            free[taken[1]] = False
        dealt = _dealt(work, [groups[i].rows for i in taken])
        if all(work.setting.allowed(_names(work.latents, group.rows)) for group in dealt):
            deals.append((taken, dealt))
    rounds, _, _ = _adjust(work, [group for _, dealt in deals for group in dealt])
    replaced: set[int] = set()
    new: list[_Group] = []
    for taken, dealt in deals:
        if all(group.code is not None for group in dealt):
            replaced.update(taken)
            new += dealt
    return [group for i, group in enumerate(groups) if i not in replaced] + new, rounds


def _dealt(work: _Work, parts: Sequence[Rows]) -> list[_Group]:
    """Cut the union into len // k clusters of k to 2k - 1 along a random direction, likelier where members spread.

    But not along the line between the parts' own centres: that would give the same clusters again.
    """
    rows = work.rng.permutation(np.concatenate(parts))  # ties fall by chance
    codes = work.latents.codes.astype(np.float64)
    centred = codes[rows] - codes[rows].mean(axis=0)
    if len(parts) > 1:
        apart = codes[parts[0]].mean(axis=0) - codes[parts[1]].mean(axis=0)
        centred -= np.outer(centred @ apart, apart) / max(float(apart @ apart), _TINY)
    along = centred @ (work.rng.standard_normal(len(rows)) @ centred)
    return [work.drawn(part) for part in np.array_split(rows[along.argsort(kind="stable")], len(rows) // work.plan.k)]


def _verdicts(work: _Work, groups: Sequence[_Group]) -> list[tuple[float, bool]]:
    """Of images already made, by all recognisers: share of members at risk, and whether any stranger is."""
    found = []
    for a in range(0, len(groups), work.plan.batch):
        part = groups[a : a + work.plan.batch]
        risks = work.setting.gallery.at_risk(np.stack([group.image for group in part if group.image is not None]))
        for group, risk in zip(part, risks, strict=True):
            own = risk[group.rows]
            found.append((float(own.mean()), bool(risk.sum() > own.sum())))
    return found


def _rates(work: _Work, groups: Sequence[_Group]) -> tuple[float, float]:
    shares, strangers = zip(*_verdicts(work, groups), strict=True)
    return float(np.mean(shares)), float(np.mean(strangers))


def _mixed(
    work: _Work, made: list[_Group], suppressed: tuple[tuple[str, ...], ...], before: tuple[int, float, float]
) -> MixedIdentities:
    codes = np.stack([group.code for group in made if group.code is not None])
    images = np.stack([group.image for group in made if group.image is not None])
    clusters = Clusters(tuple(_names(work.latents, group.rows) for group in made))
    return MixedIdentities(codes, images, clusters, suppressed, *before, *_rates(work, made))
