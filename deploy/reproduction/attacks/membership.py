"""Membership inference: was this patient in that cluster, or in the release at all? (k-SALSA, section 4.5, rebuilt.)

The attacker trains on clusters made from people of their own, with the same mechanism. The victim's release is made
from half of the held-out patients, and the attacker ranks the patients of *both* halves for every released image.
Top-K accuracy with K = k is the paper's number; AUC and the true-positive rate at 1 % false positives are what says
whether anybody was found. Scores are of patients: the best of all their images. Chance is printed beside each number.

The public script keeps five rows of every group and takes the most outlying half of the clusters, so that at k = 10
its score is chance and a part of its members is labelled wrongly. Here every member of every cluster is one, by
construction of :class:`Published`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu

from agent.intervals import Figure, Resampling, Units, percentile, resampled, table
from agent.models.image_tensors import resized, to_tensor
from agent.models.training_loop import seeded

Values = NDArray[np.float64]
FALSE_POSITIVES: Final = 0.01
_BATCH: Final = 512  # pairs scored at a time


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """People whom an attacker considers, with all their images."""

    images: NDArray[np.float32]  # (n, h, w[, 3]) in [0, 1]
    owners: NDArray[np.int64]  # (n,): a number for each patient

    def __post_init__(self) -> None:
        """An owner for each finite image."""
        if self.images.ndim not in (3, 4) or self.owners.shape != self.images.shape[:1] or not len(self.owners):
            raise ValueError("a pool has images (n, h, w[, 3]) with an owner each")
        if self.images.dtype != np.float32 or not bool(np.isfinite(self.images).all()):
            raise ValueError("images must be finite float32")

    def of(self, people: NDArray[np.int64]) -> Pool:
        """The part of the pool that belongs to some people."""
        kept = np.isin(self.owners, people)
        return Pool(self.images[kept], self.owners[kept])


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A release with the truth about it: who is in which cluster. An attacker sees the images only."""

    representatives: NDArray[np.float32]  # (m, h, w[, 3]) in [0, 1]
    members: tuple[tuple[int, ...], ...]  # m tuples of owners

    def __post_init__(self) -> None:
        """One cluster for each image, nobody in two."""
        flat = [p for cluster in self.members for p in cluster]
        if len(self.representatives) != len(self.members) or not self.members or not all(self.members):
            raise ValueError("every released image has its cluster, and every cluster a member")
        if len(set(flat)) != len(flat):
            raise ValueError("a patient is in two clusters")
        if self.representatives.dtype != np.float32 or not bool(np.isfinite(self.representatives).all()):
            raise ValueError("released images must be finite float32")


Anonymise = Callable[[Pool], Published]  # a mechanism as the attacker can run it too


@dataclass(frozen=True, slots=True, eq=False)
class Game:
    """A release, and everybody who might be in it."""

    published: Published
    pool: Pool

    def __post_init__(self) -> None:
        """Members are candidates, and not all candidates are in one cluster."""
        people = set(self.pool.owners.tolist())
        clusters = self.published.members
        if not all(p in people for cluster in clusters for p in cluster) or any(
            len(c) >= len(people) for c in clusters
        ):
            raise ValueError("every member is a candidate, and no cluster holds all candidates")


def game(pool: Pool, anonymise: Anonymise, rng: np.random.Generator) -> Game:
    """Release a random half of a pool's people; all of them are candidates (k-SALSA, section 4.5).

    Raises:
        ValueError: fewer than two people.
    """
    people = np.unique(pool.owners)
    if len(people) < 2:
        raise ValueError("a game needs two people or more")
    inside = rng.permutation(people)[: len(people) // 2]
    return Game(anonymise(pool.of(inside)), pool)


class Scorer(Protocol):
    """How likely is it that this image is one of those behind that representative?"""

    @property
    def name(self) -> str:
        """For the table."""

    def score(self, representatives: Tensor, candidates: Tensor) -> Tensor:
        """(m, c, h, w) and (n, c, h, w) in [-1, 1] as (m, n): higher is likelier."""


@dataclass(frozen=True, slots=True)
class NearestPixels:
    """Minus the Euclidean distance of pixels. Nothing is learned."""

    name: str = "nearest in pixels"

    def score(self, representatives: Tensor, candidates: Tensor) -> Tensor:
        """As :class:`Scorer`."""
        return _minus_distances(representatives, candidates)


class Embeds(Protocol):
    """A network that embeds images; every ``FeatureNet`` and every recogniser is one."""

    @property
    def name(self) -> str:
        """Of the network."""

    def embed(self, images: Tensor) -> Tensor:
        """(n, c, h, w) in [-1, 1] as (n, d)."""


@dataclass(frozen=True, slots=True, eq=False)
class NearestFeatures:
    """Minus the Euclidean distance of a network's features."""

    net: Embeds

    @property
    def name(self) -> str:
        """With the network's own."""
        return f"nearest in {self.net.name}"

    def score(self, representatives: Tensor, candidates: Tensor) -> Tensor:
        """As :class:`Scorer`."""
        parts = [self.net.embed(part) for part in torch.split(candidates, _BATCH)]
        return _minus_distances(self.net.embed(representatives), torch.cat(parts))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the attack model is trained: pairs of one representative, Adam and cosine as in the public script."""

    steps: int = 400
    batch: int = 64  # pairs: half members, a quarter near misses, a quarter anybody else
    rate: float = 1e-3
    width: int = 16
    side: int = 32
    near: int = 20  # a near miss is one of so many closest non-members in pixels

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        if not min(self.steps, self.near, self.side // 8, self.batch // 4, self.width // 4) >= 1 or self.width % 4:
            raise ValueError("steps, near, batch (4 or more), side (8 or more) and width (4, 8, ...) are positive")
        if not 0.0 < self.rate < float("inf"):
            raise ValueError("a rate is positive")


class Block(nn.Module):
    """A residual block of two convolutions (He et al. 2016), with group norm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Weights are drawn from torch's generator."""
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)])
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) as (n, outputs, h / stride, w / stride)."""
        y = self.norms[1](self.second(relu(self.norms[0](self.first(x)))))
        return relu(y + self.short(x))


class PairNetwork(nn.Module):
    """A small ResNet on candidate and representative, one over the other: 2c channels, as in k-SALSA's attack."""

    def __init__(self, channels: int, width: int) -> None:
        """Weights are drawn from torch's generator: build it inside ``seeded``."""
        super().__init__()
        self.stem = nn.Conv2d(2 * channels, width, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """(n, 2c, h, w) as (n,) logits."""
        out: Tensor = self.head(self.blocks(relu(self.stem(pairs))).mean(dim=(2, 3)))[:, 0]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """The trained attack model."""

    net: PairNetwork
    side: int
    name: str = "learned"

    def score(self, representatives: Tensor, candidates: Tensor) -> Tensor:
        """As :class:`Scorer`."""
        reps, cands = resized(representatives, self.side), resized(candidates, self.side)
        rows = []
        for rep in reps:
            parts = torch.split(cands, _BATCH)
            rows.append(torch.cat([self.net(torch.cat([p, rep.expand_as(p)], dim=1)) for p in parts]))
        return torch.stack(rows)


def train_attack(own: Game, recipe: Recipe, generator: torch.Generator) -> Learned:
    """Train on a release of the attacker's own people. The same generator, the same model.

    Half of every batch are members of a cluster, half are not members of it, each beside its representative; half of
    the latter are near misses, because in a ranking only those matter.
    """
    reps, images = (resized(to_tensor(x), recipe.side) for x in (own.published.representatives, own.pool.images))
    member = torch.from_numpy(_truth(own, own.pool.owners))
    likeness = _minus_distances(reps, images).masked_fill(member, -torch.inf)
    near = likeness.topk(min(recipe.near, int((~member).sum(dim=1).min())), dim=1).indices
    with seeded(int(torch.randint(2**31, (1,), generator=generator))):
        net = PairNetwork(images.shape[1], recipe.width)
    optimizer = torch.optim.Adam(net.parameters(), recipe.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    quarter = recipe.batch // 4
    truth = torch.cat([torch.ones(2 * quarter), torch.zeros(2 * quarter)])
    for _ in range(recipe.steps):
        clusters = torch.randint(len(reps), (4 * quarter,), generator=generator)
        hits = torch.multinomial(member[clusters[: 2 * quarter]].float(), 1, generator=generator)[:, 0]
        column = torch.randint(near.shape[1], (quarter,), generator=generator)
        misses = near[clusters[2 * quarter : 3 * quarter], column]
        others = torch.multinomial((~member[clusters[3 * quarter :]]).float(), 1, generator=generator)[:, 0]
        pairs = torch.cat([images[torch.cat([hits, misses, others])], reps[clusters]], dim=1)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(binary_cross_entropy_with_logits(net(pairs), truth))
        optimizer.step()
        schedule.step()
    net.requires_grad_(False)
    return Learned(net, recipe.side)


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """What one scorer found."""

    scorer: str
    k: int
    figures: tuple[Figure, ...]  # top-K, AUC in a cluster, TPR in a cluster, AUC and TPR in the whole release

    def table(self) -> str:
        """With K and the scorer's name."""
        return table(self.figures, f"membership, K = {self.k}, {self.scorer}")


def attack(
    scorer: Scorer, victim: Game, k: int, rng: np.random.Generator, how: Resampling | None = None
) -> Membership:
    """Rank all candidates for every released image, and measure.

    Args:
        scorer: of pairs.
        victim: the release under attack.
        k: K of the top-K accuracy: the mechanism's k.
        rng: for ties, so that a scorer which says nothing is right by chance only, and for the bootstrap.
        how: the bootstrap, over clusters; of the figures of the whole release over patients.
    Raises:
        ValueError: a score is not a number, or everybody is a member.
    """
    people, owner = np.unique(victim.pool.owners, return_inverse=True)
    truth = _truth(victim, people)
    inside = np.asarray(truth.any(axis=0), np.bool_)
    if not 1 <= k <= len(people) or bool(inside.all()):
        raise ValueError("K lies between 1 and the number of candidates, and some candidate is no member")
    with torch.no_grad():
        pairs = scorer.score(to_tensor(victim.published.representatives), to_tensor(victim.pool.images))
    scores = np.full((len(truth), len(people)), -np.inf)
    told = pairs.double().cpu().numpy()
    if not bool(np.isfinite(told).all()):
        raise ValueError("a score is not a number")
    for image, person in enumerate(owner):
        scores[:, person] = np.maximum(scores[:, person], told[:, image])
    how = how or Resampling()
    figures = (*_in_clusters(scores, truth, k, rng, how), *in_release(scores.max(axis=0), inside, rng, how))
    return Membership(scorer.name, k, figures)


def _in_clusters(
    scores: Values, truth: NDArray[np.bool_], k: int, rng: np.random.Generator, how: Resampling
) -> tuple[Figure, ...]:
    top = np.lexsort((rng.random(scores.shape), -scores), axis=1)[:, :k]
    sides = [(s[t], s[~t]) for s, t in zip(scores, truth, strict=True)]
    each = np.column_stack([np.take_along_axis(truth, top, axis=1).mean(axis=1), [_both(a, b) for a, b in sides]])
    draws = resampled(lambda rows: each[rows].mean(axis=0).tolist(), Units(np.arange(len(each))), rng, how.count)
    names = ("top-K accuracy", "AUC in a cluster", "TPR at FPR 1 % in a cluster")
    chances = (float(truth.mean()), 0.5, float(np.mean([_chance_of_tpr(len(b)) for _, b in sides])))
    means = [float(x) for x in each.mean(axis=0)]
    return tuple(
        Figure(names[i], means[i], percentile(draws[:, i], means[i], how.level), chances[i], len(each))
        for i in range(len(names))
    )


def in_release(
    scores: Values, inside: NDArray[np.bool_], rng: np.random.Generator, how: Resampling
) -> tuple[Figure, Figure]:
    """AUC and TPR at FPR 1 % of (n,) scores of patients, of whom some are ``inside`` the release.

    Members and others are drawn apart in the bootstrap, so that neither can be missing.
    """
    a, b = scores[inside], scores[~inside]
    values = (auc(a, b), tpr(a, b))
    draws = np.array([_both(rng.choice(a, len(a)), rng.choice(b, len(b))) for _ in range(how.count)])
    names, chances = ("AUC in the release", "TPR at FPR 1 % in the release"), (0.5, _chance_of_tpr(len(b)))
    first, second = (
        Figure(names[i], values[i], percentile(draws[:, i], values[i], how.level), chances[i], len(scores))
        for i in range(2)
    )
    return first, second


def auc(positive: Values, negative: Values) -> float:
    """The chance that a positive scores above a negative, ties counting half (Mann & Whitney 1947).

    Raises:
        ValueError: one side is empty or not finite.
    """
    if not len(positive) or not len(negative) or not np.isfinite([positive.sum(), negative.sum()]).all():
        raise ValueError("an AUC needs finite scores of both kinds")
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left") + np.searchsorted(ordered, positive, "right")
    return float(below.mean() / (2 * len(negative)))


def tpr(positive: Values, negative: Values, fpr: float = FALSE_POSITIVES) -> float:
    """The share of positives above the lowest threshold with at most ``fpr`` of the negatives (Carlini 2022)."""
    allowed = int(np.floor(fpr * len(negative)))
    threshold = np.sort(negative)[::-1][allowed]
    return float((positive > threshold).mean())


def _both(positive: Values, negative: Values) -> tuple[float, float]:
    return auc(positive, negative), tpr(positive, negative)


def _chance_of_tpr(negatives: int) -> float:
    """Above the (a + 1)-th highest of n: expected (a + 1) / (n + 1) for scores that say nothing."""
    return (int(np.floor(FALSE_POSITIVES * negatives)) + 1) / (negatives + 1)


def _truth(of: Game, owners: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(m, len(owners)): whether the owner is a member of the cluster."""
    return np.stack([np.isin(owners, cluster) for cluster in of.published.members])


def _minus_distances(a: Tensor, b: Tensor) -> Tensor:
    return -torch.cdist(a.flatten(1).double(), b.flatten(1).double(), compute_mode="donot_use_mm_for_euclid_dist")
