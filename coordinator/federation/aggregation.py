"""The arithmetic of a round: from the sites' updates to the next global parameters. Pure; numpy only.

A strategy is frozen public configuration. Its state between rounds is in :class:`Moments`, which the round checkpoint
stores, so a killed run resumes bit for bit. Vectors are (p,) float32 on the wire and float64 in here. Updates are
processed in the order of the sites' names, so the order of arrival has no effect. Every result is finite, or
:class:`NoAggregateError` is raised.

Weights are public constants of the coordinator, and capped. A site's number of examples is never a weight: it is a
statistic of patients that would have to be released and charged first, and a site could lie about it. That is why
Flower's own strategies are not used: they weigh by the ``num-examples`` that a site declares (negative and huge
numbers included), need records and messages around the numbers, and keep their moments in memory. They are the tests'
second implementation. They depart from the papers in this: FedAdam and FedYogi start at v = 0 instead of tau^2 and
compute in float32, FedAdam corrects a bias that the paper's algorithm does not (and with an exponent one too high),
the trimmed mean silently trims nothing when there are few updates, Krum accepts any number of sites, and a NaN passes
through all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from coordinator.federation.vectors import (
    Doubles,
    Moments,
    MomentsError,
    Named,
    NoAggregateError,
    Vector,
    aggregate,
    change,
    checked,
    chunks,
    doubles,
    rounded,
    shares,
    sites,
    squared_distances,
    stateless,
    update_problem,
    vector_problem,
)
from protos.artifacts.bfloat16 import widened
from protos.common.canonical_json import canonical, json_object
from protos.common.errors import ConfigError

# defined in coordinator.federation.vectors, and part of this module's interface
__all__ = ["Moments", "MomentsError", "NoAggregateError", "aggregate", "shares", "vector_problem"]

Step = tuple[Vector, Moments, tuple[str, ...]]  # new parameters, what to remember, the sites that are in them

CAP: Final = 0.5  # the largest share of one site where sites are weighted and nothing else is said


class StrategyError(ConfigError, ValueError):
    """The strategy's configuration is wrong; the text names every key at fault."""


class Aggregator:
    """What all strategies share; each is a frozen dataclass. Pure: the same answer for the same arguments."""

    __slots__ = ()
    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Refuse a configuration that makes no sense, all problems at once."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        if wrong := _out_of_range(values):
            raise StrategyError(f"{self.name}: " + "; ".join(wrong))

    def step(self, start: Vector, updates: Sequence[Named], state: Moments) -> Step:
        """One round: from ``start`` (p,) and the sites' new parameters (p,) to the next global parameters.

        Returns:
            The new parameters (p,) float32, what to remember, and the sites that are in them, sorted.
        Raises:
            NoAggregateError: too few or unusable updates, a state of another run, or a result that is not finite.
        """
        raise NotImplementedError  # abstract

    def min_updates(self) -> int:
        """The smallest number of updates that can be aggregated: one, where nothing else is said."""
        return 1

    def to_json(self) -> str:
        """For :func:`strategy_from`: sorted keys, no spaces, exact floats, without what was left to its default."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        values = {key: dict(v) if isinstance(v, Mapping) else v for key, v in given.items() if v is not None}
        return canonical({"name": self.name, **values}).decode()


@dataclass(frozen=True, slots=True)
class FedAvg(Aggregator):
    """The weighted mean: McMahan et al. 2017, Algorithm 1, with the hub's weights instead of the sites' counts.

    A mean is moved without bound by one poisoned site: use :class:`TrimmedMean` or :class:`Krum` against that.
    """

    weights: Mapping[str, float] | None = None  # of every site that may take part; None: equal
    cap: float | None = None  # no site's share is larger; None: CAP where sites are weighted, else 1

    name: ClassVar[str] = "fedavg"

    def __post_init__(self) -> None:
        """Keep a copy of the weights that nobody changes."""
        Aggregator.__post_init__(self)
        if self.weights is not None:
            object.__setattr__(self, "weights", MappingProxyType(dict(sorted(self.weights.items()))))

    @property
    def most(self) -> float:
        """The largest share that one site may have."""
        if self.cap is not None:
            return self.cap
        return 1.0 if self.weights is None else CAP

    def min_updates(self) -> int:
        """As many as keep a share under the cap: with fewer, some site must exceed it."""
        return next(n for n in range(1, math.ceil(1 / self.most) + 2) if n * self.most >= 1)

    def step(self, start: Vector, updates: Sequence[Named], state: Moments) -> Step:
        """The capped, weighted mean of the updates; ``start`` only says their size."""
        named = checked(start, updates)
        stateless(state)
        of = shares({site: self._weight(site) for site, _ in named}, self.most)
        mean = np.empty(start.size, np.float32)
        for part in chunks(start.size):  # float64 of a chunk at a time, not of the whole model
            total = np.zeros(len(mean[part]))
            for site, vector in named:
                total += of[site] * doubles(vector, part)
            mean[part] = rounded(total)
        return mean, Moments(state.t + 1), sites(named)

    def advance(self, start: Vector, delta: Doubles, state: Moments) -> tuple[Vector, Moments]:
        """The round where only the uniform mean ``delta`` (p,) of the sites' changes is known (secure aggregation).

        Raises:
            NoAggregateError: there are weights, which a sum of masked updates cannot follow; else as :meth:`step`.
        """
        if self.weights is not None:
            raise NoAggregateError("weights cannot be applied to a sum")
        stateless(state)
        return rounded(start.astype(np.float64) + change(start, delta)), Moments(state.t + 1)

    def _weight(self, site: str) -> float:
        if self.weights is None:
            return 1.0
        if site not in self.weights:
            raise NoAggregateError(f"{site}: the strategy has no weight for it")
        return self.weights[site]


@dataclass(frozen=True, slots=True)
class FedProx(Aggregator):
    """Li et al. 2020 (arXiv 1812.06127), Algorithm 2: the mean of the sites' inexact minimisers.

    ``mu`` acts at the sites: it is the mechanism's ``proximal``, and a job in which the two differ is refused.
    """

    mu: float

    name: ClassVar[str] = "fedprox"

    def step(self, start: Vector, updates: Sequence[Named], state: Moments) -> Step:
        """The uniform mean, as :class:`FedAvg`."""
        return FedAvg().step(start, updates, state)


@dataclass(frozen=True, slots=True)
class _OfTheMean(Aggregator):
    """A server optimiser: the mean change of the sites is its gradient, and all that it needs."""

    server_lr: float  # eta

    def step(self, start: Vector, updates: Sequence[Named], state: Moments) -> Step:
        """The uniform mean of the sites' changes; then :meth:`advance`."""
        named = checked(start, updates)
        total = np.zeros(start.size)
        for _, vector in named:
            for part in chunks(start.size):
                total[part] += doubles(vector, part)
        vector, moments = self.advance(start, total / len(named) - start, state)
        return vector, moments, sites(named)

    def advance(self, start: Vector, delta: Doubles, state: Moments) -> tuple[Vector, Moments]:
        """From the uniform mean ``delta`` (p,) of the sites' changes, all that a secure sum tells.

        Raises:
            NoAggregateError: the state is of another run, or the result is not finite.
        """
        raise NotImplementedError  # abstract


@dataclass(frozen=True, slots=True)
class FedAvgM(_OfTheMean):
    """Hsu, Qi & Brown 2019 (arXiv 1909.06335), section 4.3: momentum of the server, v = beta v + delta, w += eta v.

    A mean change that stays goes 1 / (1 - beta) times as far as with :class:`FedAvg`: a ``server_lr`` of 1 - beta
    keeps the length of the way.
    """

    beta1: float

    name: ClassVar[str] = "fedavgm"

    def advance(self, start: Vector, delta: Doubles, state: Moments) -> tuple[Vector, Moments]:
        """One step of momentum."""
        delta = change(start, delta)
        first = state.t == 0 and not state.m.size
        if state.v.size or not (first or state.m.shape == start.shape):
            raise NoAggregateError("the moments are of another model or strategy")
        pace = delta if first else self.beta1 * state.m + delta
        return rounded(start.astype(np.float64) + self.server_lr * pace), Moments(state.t + 1, pace)


@dataclass(frozen=True, slots=True)
class _Adaptive(_OfTheMean):
    """Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2; lines 9 and 10 are the mean change."""

    beta1: float
    beta2: float
    tau: float  # degree of adaptivity; v starts at tau^2, the least that the algorithm admits

    def advance(self, start: Vector, delta: Doubles, state: Moments) -> tuple[Vector, Moments]:
        """Lines 11 to 15: from the uniform mean ``delta`` (p,) of the sites' changes, all that a secure sum tells.

        Raises:
            NoAggregateError: the state is of another run, or the result is not finite.
        """
        delta = change(start, delta)
        first = state.t == 0 and not state.m.size
        if not first and not state.m.shape == state.v.shape == start.shape:
            raise NoAggregateError("the moments are of another model or strategy")
        m = np.zeros(start.size) if first else state.m
        v = np.full(start.size, self.tau**2) if first else state.v  # line 1
        m = self.beta1 * m + (1 - self.beta1) * delta  # line 11
        v = self._second(v, delta * delta)
        step = self.server_lr * m / (np.sqrt(v) + self.tau)  # line 15
        return rounded(start.astype(np.float64) + step), Moments(state.t + 1, m, v)

    def _second(self, v: Doubles, square: Doubles) -> Doubles:
        raise NotImplementedError  # abstract: the line in which FedAdam and FedYogi differ


@dataclass(frozen=True, slots=True)
class FedAdam(_Adaptive):
    """Reddi et al. 2021, Algorithm 2, FedAdam; no bias correction, as printed there."""

    name: ClassVar[str] = "fedadam"

    def _second(self, v: Doubles, square: Doubles) -> Doubles:
        return self.beta2 * v + (1 - self.beta2) * square  # line 14


@dataclass(frozen=True, slots=True)
class FedYogi(_Adaptive):
    """Reddi et al. 2021, Algorithm 2, FedYogi: v forgets by addition, so that it cannot collapse at once."""

    name: ClassVar[str] = "fedyogi"

    def _second(self, v: Doubles, square: Doubles) -> Doubles:
        return v - (1 - self.beta2) * square * np.sign(v - square)  # line 13; stays between v and the square


@dataclass(frozen=True, slots=True)
class TrimmedMean(Aggregator):
    """Yin et al. 2018 (arXiv 1803.01498), definition 2: the mean of each coordinate without its extremes.

    Bound: with at most ``trim`` poisoned sites, each coordinate lies between the smallest and the largest value of
    the honest ones, since at most ``trim`` values lie outside on either side and all of them are cut off. A value
    that is not finite is an extreme like any other. ``trim`` is a number, not a share: a share of few sites is none.
    """

    trim: int  # cut off at each end: the poisoned sites to withstand

    name: ClassVar[str] = "trimmed-mean"

    def min_updates(self) -> int:
        """Something must remain."""
        return 2 * self.trim + 1

    def step(self, start: Vector, updates: Sequence[Named], state: Moments) -> Step:
        """The coordinate-wise trimmed mean of the updates; ``start`` only says their size."""
        named = checked(start, updates, finite=False)
        stateless(state)
        n, k = len(named), self.trim
        if not n >= self.min_updates():
            raise NoAggregateError(f"trimming {k} at each end needs {self.min_updates()} updates, there are {n}")
        mean = np.empty(start.size)
        for part in chunks(start.size):
            stack = np.stack([widened(vector[part]) for _, vector in named], axis=1)
            stack.sort(axis=1)  # NaN counts as the largest
            with np.errstate(invalid="ignore"):
                mean[part] = stack[:, k : n - k].mean(axis=1, dtype=np.float64)
        finite = [(site, vector) for site, vector in named if update_problem(vector, start.size) is None]
        return rounded(mean), Moments(state.t + 1), sites(finite)


@dataclass(frozen=True, slots=True)
class Krum(Aggregator):
    """Blanchard et al. 2017 (arXiv 1703.02757), section 4: the mean of the ``multi`` most central updates.

    Bound, for n updates of which at most f are poisoned: let D be the largest distance between two honest ones. Some
    n - f scores, those of honest updates, are at most (n - f - 2) D^2, hence so is each chosen score; a chosen
    update has at least n - 2f - 1 honest ones among its n - f - 2 nearest, so that one honest update is within
    D sqrt((n - f - 2) / (n - 2f - 1)) of it. An update that is not finite is infinitely far from all.
    """

    byzantine: int  # f, the poisoned sites to withstand
    multi: int  # 1: Krum; more: Multi-Krum

    name: ClassVar[str] = "krum"

    def min_updates(self) -> int:
        """2f + 3 (the paper: 2f + 2 < n), and ``multi`` chosen among n - f - 2 (El Mhamdi et al. 2018)."""
        return max(2 * self.byzantine + 3, self.multi + self.byzantine + 2)

    def step(self, start: Vector, updates: Sequence[Named], state: Moments) -> Step:
        """The mean of the chosen updates, whose sites are returned."""
        named = checked(start, updates, finite=False)
        stateless(state)
        n, near = len(named), len(named) - self.byzantine - 2
        if not n >= self.min_updates():
            raise NoAggregateError(
                f"Krum against {self.byzantine} sites needs {self.min_updates()} updates, there are {n}"
            )
        distances = squared_distances(start, named)
        scores = np.partition(distances, near - 1, axis=1)[:, :near].sum(axis=1)
        order = np.argsort(scores, kind="stable")[: self.multi]
        if not bool(np.isfinite(scores[order]).all()):
            raise NoAggregateError("too few updates are finite")
        chosen = [named[i] for i in sorted(order)]
        return aggregate([vector for _, vector in chosen]), Moments(state.t + 1), sites(chosen)


Strategy = FedAvg | FedProx | FedAvgM | FedAdam | FedYogi | TrimmedMean | Krum
Advancing = FedAvg | FedAvgM | FedAdam | FedYogi  # those that need the mean change alone: ``advance``
STRATEGIES: Final[Mapping[str, type[Strategy]]] = MappingProxyType(
    {kind.name: kind for kind in (FedAvg, FedProx, FedAvgM, FedAdam, FedYogi, TrimmedMean, Krum)}
)


def _real(low: float, high: float, *, low_too: bool = False) -> Callable[[object], bool]:
    def right(value: object) -> bool:
        return type(value) is float and (low < value < high or (low_too and value == low))

    return right


def _is_share(value: object) -> bool:
    return type(value) is float and 1e-6 < value <= 1.0


def _is_weights(value: object) -> bool:
    if not isinstance(value, Mapping) or len(value) < 2:
        return False
    return all(type(site) is str and site and _real(1e-9, 1e9)(weight) for site, weight in value.items())


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= 1_000_000


_RULES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = MappingProxyType(
    {
        "weights": (_is_weights, "must give two or more sites a number in (1e-9, 1e9)"),
        "cap": (_is_share, "must be a share in (0, 1]"),
        "mu": (_real(0.0, 1e9, low_too=True), "must be a number in [0, 1e9)"),
        "server_lr": (_real(0.0, 1e9), "must be a number in (0, 1e9)"),
        "beta1": (_real(0.0, 1.0, low_too=True), "must be a number in [0, 1)"),
        "beta2": (_real(0.0, 1.0, low_too=True), "must be a number in [0, 1)"),
        "tau": (_real(1e-12, 1e9), "must be a number in (1e-12, 1e9)"),
        "trim": (_is_count, "must be a whole number, at least 1"),
        "byzantine": (_is_count, "must be a whole number, at least 1"),
        "multi": (_is_count, "must be a whole number, at least 1"),
    }
)
_OPTIONAL: Final = frozenset({"weights", "cap"})


def _out_of_range(values: Mapping[str, object]) -> list[str]:
    """What is wrong with each field of a strategy."""
    given = {key: value for key, value in values.items() if value is not None or key not in _OPTIONAL}
    wrong = [f"{key} {_RULES[key][1]}" for key, value in sorted(given.items()) if not _RULES[key][0](value)]
    weights, cap = values.get("weights"), values.get("cap")
    if not wrong and isinstance(weights, Mapping) and isinstance(cap, float) and not cap * len(weights) >= 1:
        wrong.append(f"cap: {len(weights)} sites cannot all have a share of at most {cap:g}")
    return wrong


def _doubles(value: object) -> object:
    """JSON's whole numbers as floats, where a float is wanted."""
    if isinstance(value, dict):
        return {site: _doubles(weight) for site, weight in value.items()}
    return float(value) if type(value) is int and abs(value) < 1 << 53 else value


def strategy_from(text: str) -> Strategy:
    """Read ``{"name": "fedavg", ...}``: one of :data:`STRATEGIES`, its own keys, none unknown, missing or twice.

    Raises:
        StrategyError: anything else; every key at fault is named at once.
    """
    try:
        values = json_object(text)
    except ValueError:
        raise StrategyError("the strategy is not a JSON object of distinct keys and finite numbers") from None
    name = values.pop("name", None)
    if type(name) is not str or name not in STRATEGIES:
        raise StrategyError(f"the strategy needs a name: one of {', '.join(STRATEGIES)}")
    kind = STRATEGIES[name]
    known = {f.name: f for f in fields(kind)}
    wrong = [f"{key}: missing" for key, f in known.items() if f.default is MISSING and key not in values]
    wrong += [f"{key}: unknown key" for key in sorted(values.keys() - known.keys())]
    reals = {key for key, f in known.items() if "float" in str(f.type)}
    given = {key: _doubles(v) if key in reals else v for key, v in values.items() if key in known}
    wrong += [f"{key}: must not be null" for key, value in sorted(given.items()) if value is None]
    wrong += _out_of_range({key: value for key, value in given.items() if value is not None})
    if wrong:
        raise StrategyError(f"{name}: " + "; ".join(wrong))
    arguments: dict[str, Any] = given
    return kind(**arguments)
