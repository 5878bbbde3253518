"""Cluster patients into groups of k to 2k-1: the equivalence classes of k-anonymity.

Two starts are improved by exchanges of two patients and the better one is kept: (1) balanced bisection
down to buckets, Ward's tree in each bucket, harvested bottom-up; (2) k-SALSA's greedy (section 3.4: the
point farthest from all others with its k-1 nearest), so the result is never worse than the paper's
while no other rule than k binds.

The greedy is O(n^2 d), so a large cohort (``LARGE`` patients, or ``WORK`` products) has the first start alone,
and is searched in the 64 dimensions of most variance when they hold 95 % of it; otherwise in all. There the
comparison with the greedy is measured, not guaranteed. Memory is O(n d): no n x n matrix is ever built.

Everybody who is handed in is clustered. Who is in a cluster of an earlier release is not handed in: the caller
excludes them (:func:`agent.microaggregation.released_clusters.plan`, design P5), and shows the old clusters again as
they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Clusters, Latents
from agent.errors import CohortTooSmallError
from agent.microaggregation.local_search import Assignment, ClusterRules, Codes, Exchange

BUCKET: Final = 2048  # rows of one Ward tree: 16 MB of distances
REFINE: Final = 4  # Lloyd-like turns of one bisection
LARGE: Final = 5_000  # patients from which on the greedy is no second start
WORK: Final = 5_000 * 5_000 * 512  # n^2 d from which on it is none either
NARROW: Final = 64  # dimensions of the search in a large cohort
ENOUGH: Final = 0.95  # of the variance, in those dimensions
COUNTS: Final = 4  # numbers of clusters that are tried when the largest one fails


def partition(
    latents: Latents,
    labels: Sequence[str],
    k: int,
    l: int,  # noqa: E741 -- the letter of l-diversity
    rng: np.random.Generator,
) -> Clusters:
    """Partition the patients into clusters of k to 2k-1, each with at least l distinct labels.

    ``labels`` (n) are the patients' own, in the order of ``latents``. The empty label does not count: l = 2 needs two
    non-empty labels. No patient is dropped: a cohort without a partition is refused as a whole. ``latents`` are of
    patients of no earlier release: the caller excludes the others
    (:func:`agent.microaggregation.released_clusters.plan`). The order of the clusters is random and that inside a
    cluster alphabetical: neither reveals outliers. The search for labels finds a partition whenever there is one.

    Raises:
        CohortTooSmallError: no cluster can be formed. The text is the same whatever the cause (P14).
        ValueError: the arguments contradict each other.
    """
    if not 1 <= l <= k or k < 2 or len(labels) != len(latents.patients):
        raise ValueError("partition needs 1 <= l <= k, k >= 2, and a label for each patient")
    found = _best(latents.codes, _rules(labels, l), k, rng) if len(labels) >= k else None
    if found is None:
        raise CohortTooSmallError
    order = np.argsort(found, kind="stable")
    members = [
        tuple(latents.patients[i] for i in part) for part in np.split(order, np.cumsum(np.bincount(found))[:-1])
    ]
    clusters = Clusters(tuple(tuple(sorted(members[j])) for j in rng.permutation(len(members))))
    label = dict(zip(latents.patients, labels, strict=True))
    if not all(_holds(cluster, label, k, l) for cluster in clusters.members):
        raise RuntimeError("the partition breaks its own contract")  # never released: fail closed
    return clusters


def _holds(cluster: tuple[str, ...], label: Mapping[str, str], k: int, l: int) -> bool:  # noqa: E741
    """Whether the cluster is whole and diverse. The empty label counts for nothing."""
    if len(cluster) < k or not all(patient in label for patient in cluster):
        return False
    return l == 1 or len({label[patient] for patient in cluster} - {""}) >= l


def is_feasible(labels: Sequence[str], k: int, l: int) -> bool:  # noqa: E741
    """Is there any partition of patients with these labels into clusters of k to 2k-1 with l labels each?

    Known from labels alone, so that a release that cannot be is refused before it is priced and an image read.
    """
    n, counts = len(labels), np.array([*Counter(label for label in labels if label).values()], np.int64)
    sizes = range(-(-n // (2 * k - 1)), n // k + 1)
    return any(m >= 1 and (l == 1 or int(np.minimum(counts, m).sum()) >= m * l) for m in sizes)


def _rules(labels: Sequence[str], l: int) -> ClusterRules:  # noqa: E741
    """Labels as whole numbers in sorted order, -1 for the empty one."""
    number = {label: i for i, label in enumerate(sorted(set(labels) - {""}))}
    return ClusterRules(np.array([number.get(label, -1) for label in labels], np.int64), l)


def _best(codes: NDArray[np.float32], rules: ClusterRules, k: int, rng: np.random.Generator) -> Assignment | None:
    """The best partition that was found of codes (n, d), n >= k; None where there is none."""
    large = len(codes) >= LARGE or len(codes) ** 2 * codes.shape[1] > WORK
    places = codes.astype(np.float64)
    places = _narrowed(places, rng) if large else places - places.mean(axis=0)
    for m in _counts(rules, k):
        good = list(_searched(places, _starts(places, m, k, large), rules, rng))
        if not good:  # a start that cares for the labels alone
            good = list(_searched(places, iter([_dealt(rules.labels, m, rng)]), rules, rng))
        if good:
            return min(good, key=Exchange.rank).assignment
    return None


def _searched(
    codes: Codes, starts: Iterator[Assignment], rules: ClusterRules, rng: np.random.Generator
) -> Iterator[Exchange]:
    """What becomes of each start, where no cluster lacks a label: mended, improved, and mended again."""
    for start in starts:
        found = Exchange(codes, start, rules)
        mended = found.repair(rng)
        found.improve(rng)
        if not mended and found.repair(rng):  # among nearer neighbours
            found.improve(rng)
        if not found.broken().any():
            yield found


def _counts(rules: ClusterRules, k: int) -> list[int]:
    """A few numbers of clusters of k to 2k-1 patients with l labels each, the largest first.

    m clusters can all be l-diverse exactly when sum over labels of min(count, m) >= m l: a label serves
    at most m clusters, and ``_dealt`` shows that this suffices.
    """
    n = len(rules.labels)
    counts = np.bincount(rules.labels[rules.labels >= 0])
    able = [
        m
        for m in range(n // k, max(1, -(-n // (2 * k - 1))) - 1, -1)
        if rules.l == 1 or int(np.minimum(counts, m).sum()) >= m * rules.l
    ]
    return [able[i] for i in sorted({round(x) for x in np.linspace(0, len(able) - 1, COUNTS)})] if able else []


def _starts(codes: Codes, m: int, k: int, large: bool) -> Iterator[Assignment]:
    yield _bucketed(codes, m)
    if not large and m == len(codes) // k:
        yield greedy(codes, k)


def _dealt(labels: NDArray[np.int64], m: int, rng: np.random.Generator) -> Assignment:
    """Deal the patients out like cards, label after label, the commonest first and unlabelled last.

    A label of m or more patients reaches every cluster; the others reach distinct clusters in turn, so
    that every cluster gets floor(their number / m) of them: l-diverse whenever any partition is.
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
    from scipy.cluster.hierarchy import linkage  # noqa: PLC0415 - what only asks for sizes does not wait for scipy
    from scipy.spatial.distance import squareform  # noqa: PLC0415 - as above

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


COMPACT: Final = 0.8  # finished rows are left out when fewer than this share are not


BLOCK: Final = 512  # rows compared with all others at once


def distances(a: Codes, b: Codes) -> Codes:
    """Euclidean distances (len(a), len(b)) by one matrix product; exact to about 1e-8 of the norms."""
    squared: Codes = np.einsum("ij,ij->i", a, a)[:, None] + np.einsum("ij,ij->i", b, b)
    squared -= 2.0 * (a @ b.T)
    np.sqrt(np.maximum(squared, 0.0, out=squared), out=squared)
    return squared


def greedy(codes: Codes, k: int) -> Assignment:
    """k-SALSA's same-size clustering (section 3.4): the point farthest from all others and its k-1 nearest.

    The paper drops n mod k points and its code mixes them into finished clusters; here they join the last
    one. The row sums of the distances are kept up to date instead of recomputed, with the same result:
    O(n^2 d) work, O(n d) memory.

    Raises:
        CohortTooSmallError: fewer than k rows.
    """
    n = _enough(codes, k)
    assignment = np.full(n, n // k - 1, np.int64)
    rows = np.arange(n)  # of ``rest``
    rest = codes
    sums = np.concatenate([distances(codes[a : a + BLOCK], codes).sum(axis=1) for a in range(0, n, BLOCK)])
    for j in range(n // k - 1):
        far = int(sums.argmax())
        near = distances(rest[far : far + 1], rest)[0]
        near[far] = -1.0
        near[np.isneginf(sums)] = np.inf
        taken = np.argpartition(near, k - 1)[:k]
        assignment[rows[taken]] = j
        sums -= distances(rest[taken], rest).sum(axis=0)
        sums[taken] = -np.inf
        left = np.isfinite(sums)
        if left.sum() < COMPACT * len(rest):
            rows, rest, sums = rows[left], rest[left], sums[left]
    return assignment


def _enough(codes: Codes, k: int) -> int:
    if k < 2:
        raise ValueError("a cluster has two patients or more: k >= 2")
    if len(codes) < k:
        raise CohortTooSmallError
    return len(codes)
