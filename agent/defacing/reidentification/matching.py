"""Matchers of heads, trained on other people to recognise what a defacing method leaves.

Each matcher is trained on people of whom the attacker has unaltered and defaced heads of the same method, and scores
a pair of an unaltered and a defaced head: higher is more alike. The attacker also chooses the matcher on those people
(:func:`chosen`), never on the tested ones: the best of several on the test set would beat chance by selection alone.

An attacker of defaced heads (C-DeID-GAN, Fig. 3): learns on public people, then picks a person's head.

The attacker has other people's heads before and after the same method, and learns from them what the method leaves. A
release of refaced heads is judged by how many people this attacker re-identifies. The paper's figure, with chance and
power for each rate, is computed outside the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from scipy.special import comb
from scipy.stats import rankdata

from agent.defacing.reidentification.features import ScanFeatures, Values
from agent.defacing.reidentification.icp import Fit, distances

CHOICES: Final = 5  # of Fig. 3: one right, four others
_FOLDS: Final = 5
_CLIP: Final = 4.0  # standard deviations: a pixel on an edge jumps, and would outweigh all others


@dataclass(frozen=True, slots=True, eq=False)
class People:
    """Some people in one order: unaltered, as the attacker knows them, and de-faced."""

    known: tuple[ScanFeatures, ...]
    made: tuple[ScanFeatures, ...]

    def __post_init__(self) -> None:
        """One of each for everybody, and enough people to choose among."""
        if len(self.known) != len(self.made) or len(self.known) < CHOICES:
            raise ValueError(f"people are {CHOICES} or more, each known and de-faced")

    def some(self, rows: Sequence[int]) -> People:
        """Those of some rows."""
        return People(tuple(self.known[r] for r in rows), tuple(self.made[r] for r in rows))


class Matcher(Protocol):
    """Compares every known head with every de-faced one."""

    def __call__(self, people: People) -> Values:
        """(p, p): row q, column g: how much the known head q is like the de-faced head g; finite."""


Learn = Callable[[People], Matcher]


def five_way(scores: Values) -> Values:
    """(p, p): the chance that a query picks a column among it and four others drawn from the rest, if it is right.

    Exact over all draws of four (hypergeometric), ties broken at random: no draw adds noise, and the diagonal is what
    the workers of Fig. 3 were asked for.

    Raises:
        ValueError: scores are not finite, or of fewer people than choices.
    """
    p = _people(scores)
    ordered = np.sort(scores, axis=1)
    below = np.stack([np.searchsorted(o, s, "left") for o, s in zip(ordered, scores, strict=True)])
    upto = np.stack([np.searchsorted(o, s, "right") for o, s in zip(ordered, scores, strict=True)])
    ties, draws = upto - below - 1, comb(p - 1, CHOICES - 1)
    found = np.zeros(scores.shape)
    for equal in range(CHOICES):
        found += comb(ties, equal) * comb(below, CHOICES - 1 - equal) / ((equal + 1) * draws)
    return found


def first(scores: Values) -> Values:
    """(p, p): 1 where a column is its row's highest, shared among those that tie.

    Raises:
        ValueError: scores are not finite, or of fewer people than choices.
    """
    _people(scores)
    top = scores >= scores.max(axis=1, keepdims=True)
    return np.asarray(top / top.sum(axis=1, keepdims=True))


def spread(scores: Values) -> Values:
    """Scores without what is like everybody: a smooth head lies near to all, and would be picked each time."""
    centred = scores - scores.mean(axis=0, keepdims=True)
    return np.asarray(np.round(centred / (centred.std(axis=0, keepdims=True) + 1e-9), 9))


def fused(parts: Sequence[Values]) -> Values:
    """The mean of the ranks in each row."""
    ranks = [rankdata(one, axis=1) for one in parts]
    return np.asarray(np.mean(ranks, axis=0))


def surface_distance(cloud: str, fit: Fit) -> Learn:
    """Matcher (b): ICP of a cloud; it has nothing to learn."""

    def learn(public: People) -> Matcher:
        def match(people: People) -> Values:
            far = distances([k.clouds[cloud] for k in people.known], [m.clouds[cloud] for m in people.made], fit)
            return spread(-np.where(np.isfinite(far), far, fit.reach_mm))

        return match

    return learn


def surviving(channel: str) -> Learn:
    """Matcher (a): correlation of images, each pixel weighted by how well it survived in other people."""

    def learn(public: People) -> Matcher:
        scales = _Scales.of(public, channel)
        x, y = scales.known(public), scales.made(public)
        share = (x * y).mean(axis=0) / np.sqrt((x * x).mean(axis=0) * (y * y).mean(axis=0) + 1e-9)
        noise = 1.0 / np.sqrt(len(x))  # of a correlation of as many people, where nothing survived
        weights = np.clip(share - noise, 0.0, None) ** 0.5
        if not weights.any():
            weights = np.ones_like(weights)

        def match(people: People) -> Values:
            return spread(_cosines(scales.known(people) * weights, scales.made(people) * weights))

        return match

    return learn


def discriminant(channel: str, kept: int) -> Learn:
    """Matcher (a): eigenfaces and linear discriminants (Belhumeur et al. 1997); a de-faced head is one more image.

    Whatever the method changes counts as variation within a person, so that the directions it leaves alone decide.
    """

    def learn(public: People) -> Matcher:
        scales = _Scales.of(public, channel)
        x, y = scales.known(public), scales.made(public)
        faces = _faces(np.concatenate([x, y]), kept)
        a, b = x @ faces, y @ faces
        apart = (a - b) / np.sqrt(2.0)
        within = apart.T @ apart / len(a)
        within += np.eye(len(within)) * 0.1 * np.trace(within) / len(within) + 1e-9 * np.eye(len(within))
        together = (a.T @ b + b.T @ a) / (2 * len(a))  # between people: what both images share
        root = np.linalg.inv(np.linalg.cholesky(within))
        values, vectors = np.linalg.eigh(root @ together @ root.T)
        down = root.T @ (vectors * np.sqrt(np.clip(values, 0.0, None) / (1.0 + np.clip(values, 0.0, None))))

        def match(people: People) -> Values:
            return spread(_cosines(scales.known(people) @ faces @ down, scales.made(people) @ faces @ down))

        return match

    return learn


def correlated(channel: str, kept: int) -> Learn:
    """Matcher (a): canonical correlations, for what one part of the head tells of another (a face of a skull).

    The score is the log-likelihood ratio of a pair of one person against a pair of two, for Gaussian features.
    """

    def learn(public: People) -> Matcher:
        scales = _Scales.of(public, channel)
        x, y = scales.known(public), scales.made(public)
        fx, fy = _faces(x, kept), _faces(y, kept)
        wx, wy = _whitened(x @ fx), _whitened(y @ fy)
        left, rho, right = np.linalg.svd((x @ fx @ wx).T @ (y @ fy @ wy) / len(x))
        lost = 0.5 * (2 * kept / len(x)) ** 0.5  # what chance alone correlates in so many dimensions, about
        rho = np.clip(rho - lost, 0.0, 0.98)
        px, py = fx @ wx @ left[:, : len(rho)], fy @ wy @ right[: len(rho)].T

        def match(people: People) -> Values:
            u, v = scales.known(people) @ px, scales.made(people) @ py
            weight = rho / (1.0 - rho**2)
            cross = (u * weight) @ v.T
            own = 0.5 * rho * weight
            return spread(cross - (u * u) @ own[:, None] - ((v * v) @ own)[None, :])

        return match

    return learn


def all_of(parts: Sequence[Learn]) -> Learn:
    """Several matchers, fused by rank."""

    def learn(public: People) -> Matcher:
        learned = [one(public) for one in parts]
        return lambda people: fused([one(people) for one in learned])

    return learn


def matchers(example: ScanFeatures, people: int, fit: Fit | None = None) -> dict[str, Learn]:
    """Every matcher that a look's channels and clouds allow, by name.

    Args:
        example: any look; all of an attack are alike.
        people: to learn from; no more dimensions are kept than they bear.
        fit: of the ICP.
    """
    found = dict[str, Learn]()
    for name in example.channels:
        found[f"{name}, surviving pixels"] = surviving(name)
        for kept in (people // 6, people // 3, people // 2):
            if kept >= 2:
                found[f"{name}, {kept} discriminants"] = discriminant(name, kept)
        if people // 6 >= 2:
            found[f"{name}, canonical"] = correlated(name, people // 6)
    for name in example.clouds:
        found[f"{name}, ICP"] = surface_distance(name, fit or Fit())
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The matcher that did best on other people, and how well."""

    name: str
    matcher: Matcher
    rate: float  # 5-way, on people that it had not learned from
    rates: Mapping[str, float]  # of all


def chosen(public: People, offered: Mapping[str, Learn]) -> Choice:
    """The attacker's choice: by cross-validation on the public people, single matchers and fused ones.

    Raises:
        ValueError: fewer public people than two folds with five choices each need.
    """
    count = len(public.known)
    if count < 2 * CHOICES:
        raise ValueError(f"an attacker learns from {2 * CHOICES} people or more")
    folds = min(_FOLDS, count // CHOICES)
    held = [list(range(f, count, folds)) for f in range(folds)]
    found = {name: list[Values]() for name in offered}
    for rows in held:
        rest = public.some([r for r in range(count) if r not in set(rows)])
        tested = public.some(rows)
        for name, learn in offered.items():
            found[name].append(learn(rest)(tested))
    rates = {name: _rate(parts) for name, parts in found.items()}
    best = sorted(rates, key=lambda name: -rates[name])
    options: dict[str, tuple[str, ...]] = {name: (name,) for name in best}
    for many in (2, 3, len(best)):
        options[f"the best {many}"] = tuple(best[:many])
    pooled = {name: [fused([found[n][f] for n in names]) for f in range(folds)] for name, names in options.items()}
    scored = {name: _rate(parts) for name, parts in pooled.items()}
    name = max(scored, key=lambda one: (scored[one], len(options[one])))
    told = name if len(options[name]) == 1 else "fused: " + " + ".join(options[name])
    return Choice(told, all_of([offered[n] for n in options[name]])(public), scored[name], rates | scored)


@dataclass(frozen=True, slots=True, eq=False)
class _Scales:
    """Mean and deviation of each pixel, of unaltered and de-faced heads apart: what is done to all is taken out."""

    channel: str
    means: tuple[Values, Values]
    deviation: Values

    @classmethod
    def of(cls, people: People, channel: str) -> _Scales:
        x, y = (np.stack([one.channels[channel] for one in side]).astype(np.float64) for side in _sides(people))
        deviation = np.sqrt((x.var(axis=0) + y.var(axis=0)) / 2)
        floor = 0.05 * float(deviation.max())  # a pixel that hardly varies is not blown up
        return cls(channel, (x.mean(axis=0), y.mean(axis=0)), np.maximum(deviation, max(floor, 1e-6)))

    def known(self, people: People) -> Values:
        return self._scaled(people.known, self.means[0])

    def made(self, people: People) -> Values:
        return self._scaled(people.made, self.means[1])

    def _scaled(self, looks: Sequence[ScanFeatures], mean: Values) -> Values:
        raw = np.stack([one.channels[self.channel] for one in looks]).astype(np.float64)
        return np.clip((raw - mean) / self.deviation, -_CLIP, _CLIP)


def _sides(people: People) -> tuple[tuple[ScanFeatures, ...], tuple[ScanFeatures, ...]]:
    return people.known, people.made


def _faces(rows: Values, kept: int) -> Values:
    """(d, kept): the first principal directions of (n, d) rows."""
    gram = rows @ rows.T
    values, vectors = np.linalg.eigh(gram)
    take = values[::-1][: min(kept, len(rows))] > 1e-9 * max(float(values.max()), 1e-12)
    best = vectors[:, ::-1][:, : len(take)][:, take]
    faces = rows.T @ best
    if not faces.size:
        return np.zeros((rows.shape[1], 1))
    return np.asarray(faces / np.sqrt((faces * faces).sum(axis=0)))


def _whitened(rows: Values) -> Values:
    """(k, k): makes the covariance of (n, k) rows the identity, with a little of it added."""
    covariance = rows.T @ rows / len(rows)
    covariance += np.eye(len(covariance)) * (0.1 * np.trace(covariance) / len(covariance) + 1e-9)
    return np.asarray(np.linalg.inv(np.linalg.cholesky(covariance)).T)


def _cosines(a: Values, b: Values) -> Values:
    a, b = (one / (np.sqrt((one * one).sum(axis=1, keepdims=True)) + 1e-12) for one in (a, b))
    return np.asarray(a @ b.T)


def _rate(parts: Sequence[Values]) -> float:
    return float(np.concatenate([np.diag(five_way(one)) for one in parts]).mean())


def _people(scores: Values) -> int:
    p = int(scores.shape[0])
    if scores.shape != (p, p) or p < CHOICES or not bool(np.isfinite(scores).all()):
        raise ValueError(f"scores are (p, p), finite, of {CHOICES} people or more")
    return p


@dataclass(frozen=True, slots=True, eq=False)
class Attacker:
    """The attacker's configuration."""

    fit: Fit = field(default_factory=Fit)
    only: tuple[str, ...] = ()  # names of matchers; (): all

    def learned(self, public: People) -> Choice:
        """The matcher that this attacker relies on, from people who are not tested.

        Raises:
            ValueError: too few people, or no matcher is left.
        """
        offered: Mapping[str, Learn] = matchers(public.known[0], len(public.known), self.fit)
        offered = {name: one for name, one in offered.items() if not self.only or name in self.only}
        if not offered:
            raise ValueError("an attacker has a matcher")
        return chosen(public, offered)
