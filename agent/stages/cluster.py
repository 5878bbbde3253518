"""Cluster patients into groups of k to 2k-1: the equivalence classes of k-anonymity.

Two starts are improved by exchanges of two patients and the better one is kept: (1) balanced bisection
down to buckets, Ward's tree in each bucket, harvested bottom-up; (2) k-SALSA's greedy (section 3.2: the
point farthest from all others with its k-1 nearest), so the result is never worse than the paper's
while the labels' diversity does not bind. Memory is O(n d): no n x n matrix is ever built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage

from agent.nouns import Clusters, CohortTooSmall, Latents
from agent.stages.exchange import Exchange

Codes = NDArray[np.float64]  # (n, d)
Assignment = NDArray[np.int64]  # (n,): the cluster of every row, 0 .. m-1
BUCKET: Final = 2048  # rows of one Ward tree: 16 MB of distances
COMPACT: Final = 0.8  # the greedy drops finished rows when fewer than this share are left
REFINE: Final = 4  # Lloyd-like turns of one bisection


@dataclass(frozen=True, slots=True)
class _Plan:
    n: int
    m: int  # clusters

    @property
    def size(self) -> int:
        """The smaller of the two sizes; n mod m clusters have one patient more."""
        return self.n // self.m


def partition(
    latents: Latents,
    labels: Sequence[str],
    k: int,
    l: int,  # noqa: E741 -- the letter of l-diversity
    rng: np.random.Generator,
    settled: Iterable[tuple[str, ...]] = (),
) -> Clusters:
    """Partition the patients into clusters of k to 2k-1, each with at least l distinct labels.

    ``labels`` (n) are the patients' own, in the order of ``latents``. The empty label counts for
    nothing: l = 2 needs two that were given. ``settled`` are the clusters of earlier releases
    (design P5): one that is still whole and still satisfies k and l is used again as it is; the
    patients of a broken one are left out entirely. Only patients of no earlier release form new
    clusters; when they are too few for k and l they wait, unless nothing else could be released.
    The order of the clusters is random and that inside a cluster alphabetical: neither tells who was
    an outlier.

    Raises:
        CohortTooSmall: no cluster can be formed. The text is the same whatever the cause (P14).
        ValueError: the arguments contradict each other.
    """
    if not 1 <= l <= k or k < 2 or len(labels) != len(latents.patients):
        raise ValueError("partition needs 1 <= l <= k, k >= 2, and a label for each patient")
    label = dict(zip(latents.patients, labels, strict=True))
    settled = Clusters(tuple(settled)).members  # refuses a patient of two earlier clusters
    kept = [c for c in settled if len(c) >= k and all(p in label for p in c) and _diverse(c, label, l)]
    released = {patient for cluster in settled for patient in cluster}
    new = np.array([i for i, p in enumerate(latents.patients) if p not in released], np.int64)
    codes = latents.codes[new].astype(np.float64)
    assignment = _best(codes, _codes_of([labels[i] for i in new]), k, l, rng)
    members = list(kept)
    if assignment is not None:
        members += [tuple(latents.patients[i] for i in new[assignment == j]) for j in range(assignment.max() + 1)]
    if not members:
        raise CohortTooSmall
    order = rng.permutation(len(members))
    clusters = Clusters(tuple(tuple(sorted(members[j])) for j in order))
    if not all(len(c) >= k and _diverse(c, label, l) for c in clusters.members):
        raise RuntimeError("the partition breaks its own contract")  # never released: fail closed
    return clusters


def _diverse(cluster: tuple[str, ...], label: dict[str, str], l: int) -> bool:  # noqa: E741
    return l == 1 or len({label[patient] for patient in cluster} - {""}) >= l


def _codes_of(labels: Sequence[str]) -> NDArray[np.int64]:
    """(n,): whole numbers for labels in sorted order; -1 for the empty one."""
    number = {label: i for i, label in enumerate(sorted(set(labels) - {""}))}
    return np.array([number.get(label, -1) for label in labels], np.int64)


def _cluster_count(labels: NDArray[np.int64], k: int, l: int) -> int:  # noqa: E741
    """The most clusters of k to 2k-1 patients with l labels each; 0 when there is no such partition.

    m clusters can all be l-diverse exactly when sum over labels of min(count, m) >= m l: a label serves
    at most m clusters, and ``_dealt`` shows that this suffices.
    """
    n = len(labels)
    counts = np.bincount(labels[labels >= 0])
    for m in range(n // k, max(1, -(-n // (2 * k - 1))) - 1, -1):
        if l == 1 or int(np.minimum(counts, m).sum()) >= m * l:
            return m
    return 0


def _best(
    codes: Codes,
    labels: NDArray[np.int64],
    k: int,
    l: int,  # noqa: E741
    rng: np.random.Generator,
) -> Assignment | None:
    plan = _Plan(len(codes), _cluster_count(labels, k, l))
    if plan.m == 0:
        return None
    starts = [_bucketed(codes, plan)]
    if plan.m == plan.n // k:
        starts.append(greedy(codes, k))
    best: Exchange | None = None
    for start in starts:
        found = Exchange(codes, start, labels, l)
        if not found.repair():
            found = Exchange(codes, _dealt(labels, plan.m, rng), labels, l)
        found.improve(rng)
        if best is None or found.sse() < best.sse():
            best = found
    return None if best is None else best.assignment


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


def greedy(codes: Codes, k: int) -> Assignment:
    """k-SALSA's same-size clustering (section 3.2), with the leftovers in the last cluster, never dropped.

    The row sums of the distances are kept up to date instead of recomputed: O(n^2 d) work, O(n d) memory.
    """
    n = len(codes)
    assignment = np.full(n, n // k - 1, np.int64)
    rows = np.arange(n)  # of ``rest``
    rest = codes
    sums = np.concatenate([_distances(codes[a : a + 512], codes).sum(axis=1) for a in range(0, n, 512)])
    for j in range(n // k - 1):
        far = int(sums.argmax())
        near = _distances(rest[far : far + 1], rest)[0]
        near[far] = -1.0
        near[np.isneginf(sums)] = np.inf
        taken = np.argpartition(near, k - 1)[:k]
        assignment[rows[taken]] = j
        sums -= _distances(rest[taken], rest).sum(axis=0)
        sums[taken] = -np.inf
        left = np.isfinite(sums)
        if left.sum() < COMPACT * len(rest):
            rows, rest, sums = rows[left], rest[left], sums[left]
    return assignment


def _distances(a: Codes, b: Codes) -> Codes:
    squared = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2.0 * (a @ b.T)
    distances: Codes = np.sqrt(np.maximum(squared, 0.0))
    return distances


def _bucketed(codes: Codes, plan: _Plan) -> Assignment:
    """Bisect into buckets of whole clusters, then harvest a Ward tree in each: sizes n//m or n//m + 1."""
    assignment = np.empty(plan.n, np.int64)
    stack = [(np.arange(plan.n), plan.m)]
    done = 0
    while stack:
        rows, m = stack.pop()
        if m == 1 or len(rows) <= BUCKET:
            assignment[rows] = done + _harvest(codes[rows], m, plan.size)
            done += m
            continue
        half = m // 2
        cut = half * plan.size + (len(rows) - m * plan.size) * half // m
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
    for step, (a, b) in enumerate(linkage(codes, "ward")[:, :2].astype(np.int64) if n > 1 else ()):
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
        far = _distances(codes[rest], centres)
        for i in far.min(axis=1).argsort(kind="stable"):
            j = int(far[i].argmin())
            assignment[rest[i]] = j
            far[:, j] = np.inf
    return assignment
