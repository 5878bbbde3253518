"""Cluster patients into groups of k to 2k-1: the equivalence classes of k-anonymity.

Two starts are improved by exchanges of two patients and the better one is kept: (1) balanced bisection
down to buckets, Ward's tree in each bucket, harvested bottom-up; (2) k-SALSA's greedy (section 3.4: the
point farthest from all others with its k-1 nearest), so the result is never worse than the paper's
while no other rule than k binds.

The greedy is O(n^2 d), so a large cohort (``LARGE`` patients, or ``WORK`` products) has the first start alone,
and is searched in the 64 dimensions of most variance when they hold 95 % of it; otherwise in all. There the
comparison with the greedy is measured, not guaranteed. Memory is O(n d): no n x n matrix is ever built.

Everybody who is handed in is clustered. Who is in a cluster of an earlier release is not handed in: the caller
excludes them (:func:`agent.stages.freeze.plan`, design P5), and shows the old clusters again as they were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import cdist, pdist, squareform

from agent.nouns import Clusters, CohortTooSmall, Latents
from agent.stages.baselines import distances, greedy
from agent.stages.exchange import HARD, Assignment, Codes, Exchange, Rules

BUCKET: Final = 2048  # rows of one Ward tree: 16 MB of distances
REFINE: Final = 4  # Lloyd-like turns of one bisection
LARGE: Final = 5_000  # patients from which on the greedy is no second start
WORK: Final = 5_000 * 5_000 * 512  # n^2 d from which on it is none either
NARROW: Final = 64  # dimensions of the search in a large cohort
ENOUGH: Final = 0.95  # of the variance, in those dimensions
COUNTS: Final = 4  # numbers of clusters that are tried when the largest one fails
DEALS: Final = 4  # random starts that are tried when both good ones fail


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a cluster must satisfy besides k and l. The default asks for nothing.

    ``strata``: patients of two strata (a site, a side, a camera) share no cluster. When any are given, every
    patient has one. ``apart``: sets of which no two patients share a cluster, such as the members of one
    family, who count for less than two. ``max_diameter``: the greatest Euclidean distance of two members'
    codes. ``too_wide`` says what becomes of a cluster that cannot be made narrower: the whole cohort is
    refused, or that cluster's patients are left out, and ``divide`` tells who they are.
    """

    strata: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)  # patient -> stratum
    apart: tuple[frozenset[str], ...] = field(default=(), repr=False)
    max_diameter: float = math.inf
    too_wide: Literal["refuse", "suppress"] = "refuse"

    def __post_init__(self) -> None:
        """Refuse rules that mean nothing, or cannot be told from a mistake."""
        if not self.max_diameter > 0:
            raise ValueError("the greatest diameter is positive")
        if self.too_wide not in ("refuse", "suppress"):
            raise ValueError("what is too wide is refused or suppressed")
        if not all(self.strata.values()) or not all(len(group) > 1 for group in self.apart):
            raise ValueError("a stratum has a name, and it takes two patients to be kept apart")
        object.__setattr__(self, "strata", MappingProxyType(dict(self.strata)))


FREE: Final = Constraints()


@dataclass(frozen=True, slots=True)
class Division:
    """A partition and everybody who is in none of its clusters."""

    clusters: Clusters
    suppressed: tuple[str, ...] = field(default=(), repr=False)  # their cluster would have been too wide

    def __post_init__(self) -> None:
        """Everybody is in one place."""
        inside = {patient for cluster in self.clusters.members for patient in cluster}
        if len(set(self.suppressed)) != len(self.suppressed) or not inside.isdisjoint(self.suppressed):
            raise ValueError("a patient is in a cluster and left out of it")


@dataclass(frozen=True, slots=True)
class _Contract:
    """All the rules, by patient: what the result is held against at the end."""

    k: int
    l: int  # noqa: E741
    label: Mapping[str, str]
    code: Mapping[str, NDArray[np.float32]]
    constraints: Constraints
    groups: Mapping[str, Set[int]]  # patient -> which of the sets of ``apart``

    def kept_by(self, cluster: tuple[str, ...]) -> bool:
        """Whether the cluster is whole and satisfies every rule. The labels' empty one counts for nothing."""
        if len(cluster) < self.k or not all(patient in self.label for patient in cluster):
            return False
        diverse = self.l == 1 or len({self.label[patient] for patient in cluster} - {""}) >= self.l
        strata = {self.constraints.strata.get(patient) for patient in cluster}
        groups = [group for patient in cluster for group in self.groups.get(patient, ())]
        return diverse and len(strata) == 1 and len(set(groups)) == len(groups) and self.narrow(cluster)

    def narrow(self, cluster: tuple[str, ...]) -> bool:
        """Whether no two members are farther apart than they may be."""
        if self.constraints.max_diameter == math.inf:
            return True
        codes = np.stack([self.code[patient] for patient in cluster]).astype(np.float64)
        return bool((pdist(codes) <= self.constraints.max_diameter).all())


def partition(
    latents: Latents,
    labels: Sequence[str],
    k: int,
    l: int,  # noqa: E741 -- the letter of l-diversity
    rng: np.random.Generator,
    *,
    constraints: Constraints = FREE,
) -> Clusters:
    """The clusters of ``divide``, for those who suppress nobody.

    Raises:
        CohortTooSmall: no cluster can be formed. The text is the same whatever the cause (P14).
        ValueError: the arguments contradict each other, or could suppress a patient in silence.
    """
    if constraints.too_wide == "suppress":
        raise ValueError("divide, not partition, tells who was suppressed")
    return divide(latents, labels, k, l, rng, constraints=constraints).clusters


def divide(
    latents: Latents,
    labels: Sequence[str],
    k: int,
    l: int,  # noqa: E741
    rng: np.random.Generator,
    *,
    constraints: Constraints = FREE,
) -> Division:
    """Partition the patients into clusters of k to 2k-1, each with at least l distinct labels.

    ``labels`` (n) are the patients' own, in the order of ``latents``. The empty label counts for
    nothing: l = 2 needs two that were given. Clusters are formed stratum by stratum; a stratum too
    small for one refuses the whole cohort, because nobody is dropped. ``latents`` are of patients of no
    earlier release: the caller excludes the others (``freeze.plan``).
    The order of the clusters is random and that inside a cluster alphabetical: neither tells who was
    an outlier.

    The search for labels alone, or for disjoint families alone, finds a partition whenever there is one. With
    a diameter or several rules it is bounded, in sizes that differ by one at most, and refuses when it fails.

    Raises:
        CohortTooSmall: no cluster can be formed. The text is the same whatever the cause (P14).
        ValueError: the arguments contradict each other.
    """
    if not 1 <= l <= k or k < 2 or len(labels) != len(latents.patients):
        raise ValueError("partition needs 1 <= l <= k, k >= 2, and a label for each patient")
    if constraints.strata and not all(patient in constraints.strata for patient in latents.patients):
        raise ValueError("every patient needs a stratum when strata are given")
    contract = _contract(latents, labels, k, l, constraints)
    members: list[tuple[str, ...]] = []
    suppressed: list[str] = []
    for rows in _strata(latents.patients, constraints):
        found = _stratum(latents.codes[rows], _rules(contract, [latents.patients[i] for i in rows]), contract, rng)
        if found is None:
            raise CohortTooSmall
        groups = _grouped(latents.patients, rows, found)
        members += [group for group in groups if contract.narrow(group)]
        suppressed += [patient for group in groups if not contract.narrow(group) for patient in group]
    if not members or (suppressed and constraints.too_wide == "refuse"):
        raise CohortTooSmall
    order = rng.permutation(len(members))
    clusters = Clusters(tuple(tuple(sorted(members[j])) for j in order))
    if not all(contract.kept_by(cluster) for cluster in clusters.members):
        raise RuntimeError("the partition breaks its own contract")  # never released: fail closed
    return Division(clusters, tuple(sorted(suppressed)))


def possible(labels: Sequence[str], k: int, l: int) -> bool:  # noqa: E741
    """Is there any partition of patients with these labels into clusters of k to 2k-1 with l labels each?

    Known from labels alone, so that a release that cannot be is refused before it is priced and a picture read.
    """
    n, counts = len(labels), np.array([*Counter(label for label in labels if label).values()], np.int64)
    sizes = range(-(-n // (2 * k - 1)), n // k + 1)
    return any(m >= 1 and (l == 1 or int(np.minimum(counts, m).sum()) >= m * l) for m in sizes)


def _contract(latents: Latents, labels: Sequence[str], k: int, l: int, constraints: Constraints) -> _Contract:  # noqa: E741
    groups: dict[str, set[int]] = {}
    for number, group in enumerate(constraints.apart):
        for patient in group:
            groups.setdefault(patient, set()).add(number)
    label = dict(zip(latents.patients, labels, strict=True))
    return _Contract(k, l, label, dict(zip(latents.patients, latents.codes, strict=True)), constraints, groups)


def _strata(patients: Sequence[str], constraints: Constraints) -> list[NDArray[np.int64]]:
    """The rows of every stratum's patients, the strata in the order of their names."""
    rows: dict[str, list[int]] = {}
    for i, patient in enumerate(patients):
        rows.setdefault(constraints.strata.get(patient, ""), []).append(i)
    return [np.array(rows[stratum], np.int64) for stratum in sorted(rows)]


def _grouped(patients: Sequence[str], rows: NDArray[np.int64], found: Assignment) -> list[tuple[str, ...]]:
    order = np.argsort(found, kind="stable")
    return [tuple(patients[i] for i in rows[part]) for part in np.split(order, np.cumsum(np.bincount(found))[:-1])]


def _rules(contract: _Contract, patients: Sequence[str]) -> Rules:
    """The contract by row: labels as whole numbers in sorted order, -1 for the empty one; who must be apart."""
    given = [contract.label[patient] for patient in patients]
    number = {label: i for i, label in enumerate(sorted(set(given) - {""}))}
    row = {patient: i for i, patient in enumerate(patients)}
    foes: dict[int, set[int]] = {}
    crowd = 1
    for group in contract.constraints.apart:
        present = {row[patient] for patient in group if patient in row}
        crowd = max(crowd, len(present))
        for i in present if len(present) > 1 else ():
            foes.setdefault(i, set()).update(present - {i})
    return Rules(
        np.array([number.get(label, -1) for label in given], np.int64),
        contract.l,
        {i: np.array(sorted(others), np.int64) for i, others in sorted(foes.items())},
        crowd,
        contract.constraints.max_diameter,
    )


def _stratum(
    codes: NDArray[np.float32], rules: Rules, contract: _Contract, rng: np.random.Generator
) -> Assignment | None:
    """The best partition that was found of one stratum's codes (n, d); None where there is none."""
    wanted = 1 if contract.constraints.too_wide == "refuse" else HARD
    large = len(codes) >= LARGE or len(codes) ** 2 * codes.shape[1] > WORK
    places = codes.astype(np.float64)
    if rules.wide == math.inf:  # a diameter is one of the codes as they are
        places = _narrowed(places, rng) if large else places - places.mean(axis=0)
    elif wanted == 1 and not large and _alone(places, rules, contract.k):
        return None
    for m in _counts(rules, contract.k):
        good = list(_searched(places, _starts(places, m, contract.k, large), rules, wanted, rng))
        good = good or list(islice(_searched(places, _deals(rules, m, rng), rules, wanted, rng), 1))
        if good:
            return min(good, key=Exchange.rank).assignment
    return None


def _searched(
    codes: Codes, starts: Iterator[Assignment], rules: Rules, wanted: int, rng: np.random.Generator
) -> Iterator[Exchange]:
    """What becomes of each start, where it breaks less than ``wanted``: mended, improved, and mended again."""
    for start in starts:
        found = Exchange(codes, start, rules)
        mended = found.repair(rng)
        found.improve(rng)
        if not mended and found.repair(rng):  # among nearer neighbours
            found.improve(rng)
        if found.broken().max() < wanted:
            yield found


def _alone(codes: Codes, rules: Rules, k: int) -> bool:
    """Whether some patient has fewer than k-1 others near enough: then no search can help."""
    near = (cdist(codes[a : a + BUCKET], codes) <= rules.wide for a in range(0, len(codes), BUCKET))
    return any(bool((block.sum(axis=1) < k).any()) for block in near)


def _counts(rules: Rules, k: int) -> list[int]:
    """A few numbers of clusters of k to 2k-1 patients with l labels each, the largest first.

    m clusters can all be l-diverse exactly when sum over labels of min(count, m) >= m l: a label serves
    at most m clusters, and ``_dealt`` shows that this suffices. A family needs a cluster for each member.
    """
    n = len(rules.labels)
    counts = np.bincount(rules.labels[rules.labels >= 0])
    able = [
        m
        for m in range(n // k, max(1, rules.crowd, -(-n // (2 * k - 1))) - 1, -1)
        if rules.l == 1 or int(np.minimum(counts, m).sum()) >= m * rules.l
    ]
    return [able[i] for i in sorted({round(x) for x in np.linspace(0, len(able) - 1, COUNTS)})] if able else []


def _starts(codes: Codes, m: int, k: int, large: bool) -> Iterator[Assignment]:
    yield _bucketed(codes, m)
    if not large and m == len(codes) // k:
        yield greedy(codes, k)


def _deals(rules: Rules, m: int, rng: np.random.Generator) -> Iterator[Assignment]:
    """Starts that care for the rules alone: by label, by family, and by chance."""
    yield _dealt(rules.labels, m, rng)
    if rules.paired:
        family = np.full(len(rules.labels), -1, np.int64)
        for row, foes in rules.foes.items():
            family[row] = min(row, int(foes.min()))
        yield _dealt(family, m, rng)
        for _ in range(DEALS):
            yield _dealt(rules.labels, m, rng)


def _dealt(labels: NDArray[np.int64], m: int, rng: np.random.Generator) -> Assignment:
    """Deal the patients out like cards, label after label, the commonest first and unlabelled last.

    A label of m or more patients reaches every cluster; the others reach distinct clusters in turn, so
    that every cluster gets floor(their number / m) of them: l-diverse whenever any partition is. A family of up
    to m, taken as a label, is all in different ones.
    """
    shuffled = rng.permutation(len(labels))
    counts = np.bincount(labels[labels >= 0], minlength=1)
    own = labels[shuffled]
    order = np.lexsort((own, np.where(own < 0, 1, -counts[own])))
    assignment = np.empty(len(labels), np.int64)
    assignment[shuffled[order]] = np.arange(len(labels)) % m
    return assignment


def _narrowed(codes: Codes, rng: np.random.Generator) -> Codes:
    """Codes (n, d) in the ``NARROW`` dimensions of most variance, if they hold ``ENOUGH`` of it, else in all.

    A random projection refined by two power iterations (Halko, Martinsson & Tropp 2011, algorithm 4.4). Its
    axes are orthonormal, so the share of the variance they hold is exact even where they are not the best.
    """
    codes = codes - codes.mean(axis=0)
    if codes.shape[1] <= NARROW:
        return codes
    axes = rng.standard_normal((codes.shape[1], NARROW + NARROW // 4))
    for _ in range(3):
        axes = np.linalg.qr(codes.T @ (codes @ axes))[0]
    narrow: Codes = codes @ axes
    _, turn = np.linalg.eigh(narrow.T @ narrow)
    narrow = narrow @ turn[:, : -NARROW - 1 : -1]
    held, total = np.einsum("ij,ij->", narrow, narrow), np.einsum("ij,ij->", codes, codes)
    return (narrow if held >= ENOUGH * total else codes).astype(np.float32)


def _bucketed(codes: Codes, m: int) -> Assignment:
    """Bisect into buckets of whole clusters, then harvest a Ward tree in each: sizes n//m or n//m + 1."""
    size = len(codes) // m
    assignment = np.empty(len(codes), np.int64)
    stack = [(np.arange(len(codes)), m)]
    done = 0
    while stack:
        rows, m = stack.pop()
        if m == 1 or len(rows) <= BUCKET:
            assignment[rows] = done + _harvest(codes[rows], m, size)
            done += m
            continue
        half = m // 2
        cut = half * size + (len(rows) - m * size) * half // m
        left = _bisect(codes[rows], cut)
        stack += [(rows[left], half), (rows[~left], m - half)]
    return assignment


def _bisect(codes: Codes, cut: int) -> NDArray[np.bool_]:
    """(n,): true for the ``cut`` rows on one side of a balanced 2-means split."""
    a = codes[((codes - codes.mean(axis=0)) ** 2).sum(axis=1).argmax()]
    b = codes[((codes - a) ** 2).sum(axis=1).argmax()]
    left = np.zeros(len(codes), bool)
    for _ in range(REFINE):
        left[:] = False
        left[np.argpartition(codes @ (b - a), cut - 1)[:cut]] = True
        a, b = codes[left].mean(axis=0), codes[~left].mean(axis=0)
    return left


def _harvest(codes: Codes, m: int, size: int) -> Assignment:
    """Cut m clusters of ``size`` from Ward's tree, bottom-up; leftovers join the nearest, one each."""
    n = len(codes)
    assignment = np.full(n, -1, np.int64)
    pending: dict[int, NDArray[np.int64]] = {i: np.array([i]) for i in range(n)}
    done = 0
    tree = linkage(squareform(distances(codes, codes), checks=False), "ward") if n > 1 else np.empty((0, 4))
    for step, (a, b) in enumerate(tree[:, :2].astype(np.int64)):
        rows = np.concatenate([pending.pop(int(a)), pending.pop(int(b))])
        while len(rows) >= size and done < m:
            near = ((codes[rows] - codes[rows].mean(axis=0)) ** 2).sum(axis=1).argsort(kind="stable")
            assignment[rows[near[:size]]] = done
            done += 1
            rows = rows[near[size:]]
        pending[n + step] = rows
    rest = np.flatnonzero(assignment < 0)
    if len(rest):
        centres = np.stack([codes[assignment == j].mean(axis=0) for j in range(m)])
        far = distances(codes[rest], centres)
        for i in far.min(axis=1).argsort(kind="stable"):
            j = int(far[i].argmin())
            assignment[rest[i]] = j
            far[:, j] = np.inf
    return assignment
