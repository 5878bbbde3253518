"""The vectors of a round: which may be used, their mean, their shares, their distances, and what is remembered.

Vectors are (p,) float32 on the wire, or an update the bits of bfloat16, and float64 in here, a part at a time.
Whatever comes out is finite, or it is :class:`NoAggregateError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from protos.artifacts.bfloat16 import Numbers, is_finite, widened
from protos.common.errors import PeerError, RefusedError

CHUNK: Final = 1 << 16  # coordinates at a time where all updates stand side by side: at most 100 MB for 200 sites

Vector = NDArray[np.float32]
Doubles = NDArray[np.float64]
Named = tuple[str, Numbers]  # a site and its new parameters, as they came


class NoAggregateError(RefusedError, ValueError):
    """There is no aggregate of these updates; the text says why and names sites, never values."""


class MomentsError(PeerError, ValueError):
    """The bytes are not moments in their one form."""


def vector_problem(vector: object, size: int) -> str | None:
    """Why ``vector`` cannot be aggregated with vectors of (size,) float32; None when it can.

    Returns:
        "schema" for a wrong type, dtype or shape, "not_finite" for a NaN or an infinity, else None.
    """
    return "schema" if isinstance(vector, np.ndarray) and vector.dtype != np.float32 else update_problem(vector, size)


def update_problem(numbers: object, size: int) -> str | None:
    """The same for the numbers of an update, (size,) float32 or the bits of bfloat16."""
    if (
        not isinstance(numbers, np.ndarray)
        or numbers.dtype not in (np.float32, np.uint16)
        or numbers.shape != (size,)
    ):
        return "schema"
    return None if is_finite(numbers) else "not_finite"


def doubles(numbers: Numbers, part: slice) -> Doubles:
    """A part of the numbers of an update as float64, exactly."""
    return widened(numbers[part]).astype(np.float64)


def aggregate(vectors: Sequence[Numbers]) -> Vector:
    """The uniform mean of m >= 1 vectors of (p,) numbers, p >= 1, summed in float64 in the order given.

    McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1, with equal weights.

    Returns:
        (p,) float32. Finite, since it lies between the smallest and largest value of each coordinate.
    Raises:
        NoAggregateError: naming the first vector (counted from 0) that cannot be used, and why.
    """
    if not vectors or not isinstance(vectors[0], np.ndarray) or vectors[0].ndim != 1 or not vectors[0].size:
        raise NoAggregateError("a mean needs at least one non-empty (p,) vector")
    size = int(vectors[0].size)
    for position, vector in enumerate(vectors):
        fault = update_problem(vector, size)
        if fault is not None:
            raise NoAggregateError(f"vector {position}: {fault}")
    mean = np.empty(size, np.float32)
    for part in chunks(size):
        total = np.zeros(len(mean[part]))
        for vector in vectors:
            total += doubles(vector, part)
        mean[part] = total / len(vectors)
    return mean


def _nothing() -> Doubles:
    return np.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """What a strategy remembers: rounds done, FedAvgM's first moment, both of FedAdam and FedYogi (else empty)."""

    t: int = 0
    m: Doubles = field(default_factory=_nothing)  # (p,) first moment, or (0,)
    v: Doubles = field(default_factory=_nothing)  # (p,) second moment, or (0,)

    def __post_init__(self) -> None:
        """Refuse what no round leaves behind: negative counts or second moments, NaN, unequal shapes."""
        right = type(self.t) is int and 0 <= self.t < 1 << 53
        for array in (self.m, self.v):
            right = right and array.dtype == np.float64 and array.ndim == 1 and bool(np.isfinite(array).all())
        if not (right and self.v.shape in ((0,), self.m.shape) and bool((self.v >= 0).all())):
            raise MomentsError("moments are a count and two finite (p,) float64 vectors, the second not negative")

    def to_bytes(self) -> bytes:
        """As safetensors: t (1,) int64, m and v (p,) float64."""
        t = np.array([self.t], np.int64)
        return save({"t": t, "m": np.ascontiguousarray(self.m), "v": np.ascontiguousarray(self.v)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Moments:
        """The moments of :meth:`to_bytes`.

        Raises:
            MomentsError: other tensors, types, shapes or values, metadata, or another encoding of the same.
        """
        try:
            tensors = load(raw)
        except (SafetensorError, ValueError, KeyError):
            raise MomentsError("not a safetensors file") from None
        t = tensors.get("t")
        if tensors.keys() != {"t", "m", "v"} or t is None or t.dtype != np.int64 or t.shape != (1,):
            raise MomentsError("the file must hold t, m and v, and nothing else")
        moments = cls(int(t[0]), tensors["m"], tensors["v"])
        if moments.to_bytes() != raw:
            raise MomentsError("not in its one form")
        return moments


def shares(weights: Mapping[str, float], cap: float) -> dict[str, float]:
    """Shares that sum to 1, none above ``cap``: what a capped site loses goes to the others by their weights.

    Raises:
        NoAggregateError: so few sites cannot all stay under the cap.
    """
    if not (weights and cap * len(weights) >= 1):
        raise NoAggregateError(f"no site may have a share above {cap:g}: {len(weights)} updates are too few")
    capped: dict[str, float] = {}
    while True:
        free = {site: weight for site, weight in weights.items() if site not in capped}
        room, total = 1 - cap * len(capped), math.fsum(free.values())
        over = [site for site, weight in free.items() if room * weight / total > cap]
        if not over:
            return capped | {site: room * weight / total for site, weight in free.items()}
        capped |= dict.fromkeys(over, cap)


def checked(start: Vector, updates: Sequence[Named], *, finite: bool = True) -> list[Named]:
    """The updates in the order of their sites' names, once all are comparable with a finite ``start``."""
    size = int(start.size) if isinstance(start, np.ndarray) else 0
    if not size or vector_problem(start, size) is not None:
        raise NoAggregateError("the round must start from a finite non-empty (p,) float32 vector")
    if not updates:
        raise NoAggregateError("a round needs at least one update")
    if len({site for site, _ in updates}) != len(updates):
        raise NoAggregateError("a site has two updates")
    for site, vector in updates:
        fault = update_problem(vector, size)
        if fault == "schema" or (fault is not None and finite):
            raise NoAggregateError(f"{site}: {fault}")
    return sorted(updates, key=lambda named: named[0])


def change(start: Vector, delta: Doubles) -> Doubles:
    """``delta`` in float64, once it and ``start`` are finite vectors of one size."""
    if not (isinstance(delta, np.ndarray) and delta.dtype in (np.float32, np.float64) and delta.shape == start.shape):
        raise NoAggregateError("the mean change must be a (p,) vector of the model's size")
    if vector_problem(start, start.size) is not None or not bool(np.isfinite(delta).all()):
        raise NoAggregateError("the mean change or the model is not a finite vector")
    return delta.astype(np.float64)


def stateless(state: Moments) -> None:
    """Refuse the moments of a strategy that has some (NoAggregateError)."""
    if state.m.size:
        raise NoAggregateError("the moments are of another strategy")


def sites(named: Sequence[Named]) -> tuple[str, ...]:
    """The names, in the same order."""
    return tuple(site for site, _ in named)


def rounded(vector: Doubles) -> Vector:
    """(p,) float32, once every number of it is finite as such."""
    with np.errstate(over="ignore", invalid="ignore"):
        short = vector.astype(np.float32)
    if not bool(np.isfinite(short).all()):
        raise NoAggregateError("the aggregate is not finite")
    return short


def chunks(size: int) -> Iterator[slice]:
    """Slices of at most CHUNK that cover (size,)."""
    return (slice(begin, begin + CHUNK) for begin in range(0, size, CHUNK))


def squared_distances(start: Vector, named: Sequence[Named]) -> Doubles:
    """(n, n) squared L2 distances, infinite on the diagonal and where a vector is not finite.

    ``|x - y|^2 = |x|^2 + |y|^2 - 2 x.y``, of changes from ``start``: those are small, so that little cancels.
    """
    n = len(named)
    finite = np.array([update_problem(vector, start.size) is None for _, vector in named])
    gram = np.zeros((n, n))
    for part in chunks(start.size):
        changes = np.stack([doubles(vector, part) for _, vector in named]) - start[part]
        changes[~finite] = 0.0
        gram += changes @ changes.T
    norms = np.diag(gram)
    distances = np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)
    distances[~finite, :] = np.inf
    distances[:, ~finite] = np.inf
    np.fill_diagonal(distances, np.inf)
    return distances
