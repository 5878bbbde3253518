"""Same-size clustering as others have published it: what ``cluster`` is measured against, never its default.

Rows are patients, not images as in the papers. Two things differ from every publication: nobody is dropped
when n is no multiple of k, and every size lies in [k, 2k-1]; each function says how. No constraints: labels,
strata and families are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from agent.microaggregation.partition import BLOCK, _enough, distances, greedy

Codes = NDArray[np.float64]  # (n, d)
Assignment = NDArray[np.int64]  # (n,): the cluster of every row, 0 .. m-1
Linkage = Literal["single", "complete", "average", "ward"]
TURNS: Final = 20  # of k-means; it has settled before on every data set here


def anonfaces(codes: Codes, k: int, link: Linkage) -> Assignment:
    """AnonFACES, Algorithm 1: cut the tree into m clusters, take k_j members of the biggest, update the tree.

    Sizes as in line 2, k+1 for the first n mod m clusters and k for the others; where n < k^2 can leave more
    than m patients over, n // m takes the place of k, so that all are in. Line 11, "update the tree", is a
    tree built anew for the rest. Line 9, "the lowest k members", are those that the tree joins first, at
    the lowest heights, and of equal ones those of the lowest rows; the published code takes them in
    the order of the data set, and starts at twice as many clusters as line 7 says.

    The distances are computed once and the cut is read from the merges without SciPy's ``cut_tree``:
    O(n^3 / k) work with a small constant, O(n^2) memory.

    Raises:
        CohortTooSmallError: fewer than k rows.
    """
    n = _enough(codes, k)
    apart = np.concatenate([distances(codes[a : a + BLOCK], codes) for a in range(0, n, BLOCK)])
    assignment = np.full(n, n // k - 1, np.int64)
    rest = np.arange(n)
    for j, size in enumerate(_sizes(n, n // k)[:-1]):
        tree = linkage(squareform(apart[np.ix_(rest, rest)], checks=False), link)
        taken = _lowest(tree, len(rest) // k, int(size))
        assignment[rest[taken]] = j
        rest = np.delete(rest, taken)
    return assignment


def _lowest(tree: NDArray[np.float64], m: int, size: int) -> NDArray[np.int64]:
    """Algorithm 1, lines 6-10: the lowest ``size`` leaves of the biggest of m sub-trees, of fewer if need be."""
    n = len(tree) + 1
    merges = tree[:, :2].astype(np.int64)
    while True:
        top = np.arange(2 * n - 1)  # of every node the one above it, then the highest below the cut
        top[merges[: n - m]] = np.arange(n, 2 * n - m)[:, None]
        while (top[top] != top).any():
            top = top[top]
        counts = np.bincount(top[:n])
        if counts.max() >= size:
            break
        m -= 1
    biggest = np.flatnonzero(counts == counts.max())
    # of equally big ones the one of the lowest row
    members = np.flatnonzero(top[:n] == min(biggest, key=lambda node: int(np.argmax(top[:n] == node))))
    height = np.zeros(2 * n - 1)
    height[merges] = tree[:, 2:3]
    return members[np.lexsort((members, height[members]))[:size]]


def nearest(codes: Codes, k: int, rng: np.random.Generator) -> Assignment:
    """k-Same's clustering (Newton, Sweeney & Malin 2005): any patient left and the k-1 nearest of the rest.

    "Any" is by chance. The last k to 2k-1 are one cluster, as in the paper.
    """
    n = _enough(codes, k)
    assignment = np.full(n, -1, np.int64)
    left = np.arange(n)
    while len(left) >= 2 * k:
        left = _closed(codes, assignment, left, int(rng.choice(left)), k)
    assignment[left] = assignment.max() + 1
    return assignment


def mdav(codes: Codes, k: int) -> Assignment:
    """MDAV-generic (Domingo-Ferrer & Torra 2005): r, farthest from the mean of the rest; s, farthest from r.

    While 3k rows are left, r with its k-1 nearest and s with its own are two clusters; then, if 2k are
    left, r with its own is one more, and the last k to 2k-1 are the last. Nothing is left to chance.
    """
    n = _enough(codes, k)
    assignment = np.full(n, -1, np.int64)
    left = np.arange(n)
    while len(left) >= 2 * k:
        both = len(left) >= 3 * k
        r = _farthest(codes, left, codes[left].mean(axis=0))
        left = _closed(codes, assignment, left, r, k)
        if both:
            left = _closed(codes, assignment, left, _farthest(codes, left, codes[r]), k)
    assignment[left] = assignment.max() + 1
    return assignment


def _farthest(codes: Codes, left: NDArray[np.int64], place: Codes) -> int:
    return int(left[((codes[left] - place) ** 2).sum(axis=1).argmax()])


def _closed(codes: Codes, assignment: Assignment, left: NDArray[np.int64], row: int, k: int) -> NDArray[np.int64]:
    """Make the next cluster of ``row`` and the k-1 nearest in ``left``; who is left then."""
    taken = np.argsort(((codes[left] - codes[row]) ** 2).sum(axis=1), kind="stable")[:k]
    assignment[left[taken]] = assignment.max() + 1
    return np.delete(left, taken)


def kmember(codes: Codes, k: int, rng: np.random.Generator) -> Assignment:
    """k-member (Byun, Kamra, Bertino & Li 2007): start far from the last start, add who costs least, k times.

    The cost is how much the sum of squares of the cluster grows, |x - mu|^2 s / (s + 1), so the nearest to the
    mean is added. Fewer than k are left: each joins the cluster where they cost least, but no cluster takes
    more than k-1 of them (there are no more).
    """
    n = _enough(codes, k)
    assignment = np.full(n, -1, np.int64)
    left = np.arange(n)
    start = codes[int(rng.integers(n))]
    for j in range(n // k):
        first = int(((codes[left] - start) ** 2).sum(axis=1).argmax())
        start = codes[left[first]]
        total = np.zeros(codes.shape[1])
        chosen = first
        for size in range(1, k + 1):
            assignment[left[chosen]] = j
            total += codes[left[chosen]]
            left = np.delete(left, chosen)
            if size < k:
                chosen = int(((codes[left] - total / size) ** 2).sum(axis=1).argmin())
    for row in left:
        sizes = np.bincount(assignment[assignment >= 0])
        cost = ((_means(codes, assignment) - codes[row]) ** 2).sum(axis=1) * sizes / (sizes + 1)
        assignment[row] = int(cost.argmin())
    return assignment


def kmeans(codes: Codes, k: int, rng: np.random.Generator) -> Assignment:
    """k-means with a capacity, as ELKI's same-size k-means: k-means++ seeds, then the *nearest* mean with room.

    Who would lose most by not getting the nearest mean chooses first. AnonFACES' code gives everybody to the
    farthest mean by mistake. Capacities differ by one at most; the best of up to ``TURNS`` turns counts.
    """
    n = _enough(codes, k)
    capacity = _sizes(n, n // k)
    means = _seeds(codes, len(capacity), rng)
    best, least = np.zeros(n, np.int64), np.inf
    for _ in range(TURNS):
        found = _with_room(codes, means, capacity)
        means = _means(codes, found)
        loss = float(((codes - means[found]) ** 2).sum())
        if not loss < least:
            break
        best, least = found, loss
    return best


def _seeds(codes: Codes, m: int, rng: np.random.Generator) -> Codes:
    """k-means++ (Arthur & Vassilvitskii 2007): m different rows, each drawn by its squared distance to the others."""
    chosen = [int(rng.integers(len(codes)))]
    far = ((codes - codes[chosen[0]]) ** 2).sum(axis=1)
    while len(chosen) < m:
        far[chosen] = 0.0
        weight = far if far.sum() > 0 else np.isin(np.arange(len(codes)), chosen, invert=True).astype(np.float64)
        chosen.append(int(rng.choice(len(codes), p=weight / weight.sum())))
        far = np.minimum(far, distances(codes[chosen[-1:]], codes)[0] ** 2)
    return codes[chosen]


def _with_room(codes: Codes, means: Codes, capacity: NDArray[np.int64]) -> Assignment:
    assignment = np.empty(len(codes), np.int64)
    far = np.concatenate([distances(codes[a : a + BLOCK], means) for a in range(0, len(codes), BLOCK)])
    room = capacity.copy()
    for i in np.argsort(far.min(axis=1) - far.max(axis=1), kind="stable"):
        j = int(far[i].argmin())
        assignment[i] = j
        room[j] -= 1
        if room[j] == 0:
            far[:, j] = np.inf
    return assignment


def random(codes: Codes, k: int, rng: np.random.Generator) -> Assignment:
    """Cards dealt from a shuffled pack: sizes differ by one at most. The floor that any method must beat."""
    n = _enough(codes, k)
    assignment = np.empty(n, np.int64)
    assignment[rng.permutation(n)] = np.arange(n) % (n // k)
    return assignment


def _means(codes: Codes, assignment: Assignment) -> Codes:
    given = assignment >= 0
    sums = np.zeros((int(assignment.max()) + 1, codes.shape[1]))
    np.add.at(sums, assignment[given], codes[given])
    means: Codes = sums / np.bincount(assignment[given])[:, None]
    return means


def _sizes(n: int, m: int) -> NDArray[np.int64]:
    """(m,): n // m or one more, the bigger first."""
    return np.full(m, n // m, np.int64) + (np.arange(m) < n % m)


def _without_chance(method: Callable[[Codes, int], Assignment]) -> Callable[..., Assignment]:
    return lambda codes, k, _: method(codes, k)


BASELINES: Final[MappingProxyType[str, Callable[[Codes, int, np.random.Generator], Assignment]]] = MappingProxyType(
    {
        "ksalsa-greedy": _without_chance(greedy),
        "anonfaces-single": _without_chance(partial(anonfaces, link="single")),
        "anonfaces-complete": _without_chance(partial(anonfaces, link="complete")),
        "anonfaces-average": _without_chance(partial(anonfaces, link="average")),
        "anonfaces-ward": _without_chance(partial(anonfaces, link="ward")),
        "knn": nearest,
        "mdav": _without_chance(mdav),
        "kmember": kmember,
        "kmeans": kmeans,
        "random": random,
    }
)
