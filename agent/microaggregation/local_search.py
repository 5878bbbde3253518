"""Exchange two patients between two clusters: the local search under ``cluster``.

An exchange never changes a size, so k holds throughout. The other rule, l-diversity, is one number, how many
labels the clusters lack; it is part of the test that every exchange must pass, so a partition that lacks nothing
never comes to lack something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS: Final = 16  # clusters with which a patient may be exchanged in ``improve``
PASSES: Final = 60  # more than any data set here needed; a bound, so that the search always ends
TOLERANCE: Final = 1e-9  # of the total: below it a gain is rounding
SIDEWAYS: Final = 60  # exchanges of ``repair`` that break as much as they mend; a bound, too
ROWS: Final = 1024  # clusters compared with all others at once

Codes = NDArray[np.float64]  # (n, d); float32 where the cohort is large
Assignment = NDArray[np.int64]  # (n,): the cluster of every row, 0 .. m-1


@dataclass(frozen=True, slots=True, eq=False)
class ClusterRules:
    """What every cluster must satisfy besides its size, by row of the codes."""

    labels: NDArray[np.int64]  # (n,), -1 for "no label"
    l: int  # noqa: E741 -- the letter of l-diversity: distinct labels in a cluster, at least; 1 asks for nothing


@dataclass(frozen=True, slots=True, eq=False)
class _Others:
    """The members of some clusters, cluster after cluster."""

    clusters: NDArray[np.int64]  # (b,)
    rows: NDArray[np.int64]  # (c,)
    sizes: NDArray[np.int64]  # (b,), their sum is c

    def spread(self, by_cluster: NDArray[np.float64]) -> NDArray[np.float64]:
        """(x, b) to (x, c): what is known of a cluster, for each of its members."""
        return np.repeat(by_cluster, self.sizes, axis=1)


class Exchange:
    """A partition under improvement: mutable, private to one run, never released."""

    def __init__(self, codes: Codes, assignment: Assignment, rules: ClusterRules) -> None:
        """Start at ``assignment`` (n,) of ``codes`` (n, d); every cluster has a member."""
        self.codes = codes - codes.mean(axis=0)  # the formulas below lose digits far from the origin
        self.assignment = assignment.copy()
        self.rules = rules
        self.least = 0 if rules.l == 1 else rules.l
        self.sizes = np.bincount(assignment)
        order = np.argsort(assignment, kind="stable")
        self.members = np.split(order, np.cumsum(self.sizes)[:-1])
        self.squares = np.einsum("ij,ij->i", self.codes, self.codes)
        self.centres = np.empty((len(self.members), codes.shape[1]), codes.dtype)
        self.along = np.empty(len(codes), codes.dtype)  # x . mu of its own cluster
        # the last column counts patients without a label; index -1 finds it
        self.held = np.zeros((len(self.members), int(rules.labels.max(initial=-1)) + 2), np.int64)
        np.add.at(self.held, (assignment, rules.labels), 1)
        for a in range(len(self.members)):
            self._refresh(a)

    def sse(self) -> float:
        """Sum of squared distances to the cluster means: the information lost by averaging."""
        return float(sum(((self.codes[r] - self.codes[r].mean(axis=0)) ** 2).sum() for r in self.members))

    def rank(self) -> tuple[int, float]:
        """How many clusters lack a label, then the sum of squares: the smaller, the better."""
        return int((self.broken() > 0).sum()), self.sse()

    def broken(self) -> NDArray[np.int64]:
        """(m,): how many distinct labels each cluster lacks; 0 where none."""
        missing: NDArray[np.int64] = np.maximum(0, self.least - (self.held[:, :-1] > 0).sum(axis=1))
        return missing

    def repair(self, rng: np.random.Generator) -> bool:
        """Mend every cluster by the cheapest exchanges; False when single exchanges can not.

        Each exchange lowers the number of labels that are lacking, or leaves it where no exchange lowers it: those
        are few and drawn by chance. All are counted, so that the search ends whatever happens.
        """
        sideways = SIDEWAYS
        broken = self.broken()
        for _ in range(4 * int(broken.sum()) + SIDEWAYS + 1):
            worst = np.flatnonzero(broken)
            if not len(worst):
                return True
            a = int(rng.choice(worst))
            if not (self._mend(a, self._near(a, 4 * NEIGHBOURS)) or self._mend(a, None)):
                sideways -= 1
                if sideways < 0 or not self._wander(a, rng):
                    return False
            broken = self.broken()
        return False

    def improve(self, rng: np.random.Generator) -> None:
        """Exchange while the sum of squares falls, best pair first, clusters in random order.

        A cluster is looked at again only after it or one of its neighbours has changed. Who the neighbours are
        is found once in a turn, for all clusters by a matrix product.
        """
        m = len(self.members)
        if m < 2:
            return
        changed = np.zeros(m, np.int64)
        seen = np.full(m, -1, np.int64)
        floor = (
            max(TOLERANCE, 16 * float(np.finfo(self.codes.dtype).eps))
            * max(self.sse(), np.finfo(np.float64).tiny)
            / len(self.codes)
        )
        for turn in range(1, PASSES + 1):
            moved = False
            neighbours = self._all_near(min(NEIGHBOURS, m - 1))
            for a in rng.permutation(m):
                near = neighbours[a]
                if not (changed[a] > seen[a] or (changed[near] > seen[a]).any()):
                    continue
                seen[a] = turn
                for _ in range(int(self.sizes[a])):
                    i, j = self._best(a, near, floor)
                    if i < 0:
                        break
                    changed[[a, self.assignment[j]]] = turn + 1
                    self._swap(i, j)
                    moved = True
            if not moved:
                return

    def _all_near(self, count: int) -> NDArray[np.int64]:
        """(m, count): the clusters with the nearest means."""
        m = len(self.members)
        near = np.empty((m, count), np.int64)
        squares = np.einsum("ij,ij->i", self.centres, self.centres)
        for start in range(0, m, ROWS):
            far = squares - 2.0 * (self.centres[start : start + ROWS] @ self.centres.T)
            rows = np.arange(len(far))
            far[rows, start + rows] = np.inf
            near[start : start + ROWS] = np.argpartition(far, count - 1, axis=1)[:, :count]
        return near

    def _near(self, a: int, count: int) -> NDArray[np.int64]:
        far = ((self.centres - self.centres[a]) ** 2).sum(axis=1)
        far[a] = np.inf
        count = min(count, len(far) - 1)
        return np.argpartition(far, count - 1)[:count] if count else np.empty(0, np.int64)

    def _others(self, clusters: NDArray[np.int64]) -> _Others:
        return _Others(clusters, np.concatenate([self.members[b] for b in clusters]), self.sizes[clusters])

    def _best(self, a: int, near: NDArray[np.int64], floor: float) -> tuple[int, int]:
        others = self._others(near)
        gain = self._gain(a, others)
        if self.least:
            gain[self._worse(a, others) > 0] = -np.inf
        i, j = divmod(int(gain.argmax()), len(others.rows))
        if not gain[i, j] > floor:
            return -1, -1
        return int(self.members[a][i]), int(others.rows[j])

    def _mend(self, a: int, near: NDArray[np.int64] | None) -> bool:
        """Make the cheapest exchange that lowers what a lacks with ``near`` (None: with all)."""
        if near is None:
            near = np.delete(np.arange(len(self.members)), a)
        if not len(near):
            return False
        others = self._others(near)
        gain = np.where(self._worse(a, others) < 0, self._gain(a, others), -np.inf)
        i, j = divmod(int(gain.argmax()), len(others.rows))
        if not gain[i, j] > -np.inf:
            return False
        self._swap(int(self.members[a][i]), int(others.rows[j]))
        return True

    def _wander(self, a: int, rng: np.random.Generator) -> bool:
        """Make some exchange of a that leaves the lack as it is: the way out of a dead end."""
        if len(self.members) < 2:
            return False
        others = self._others(np.delete(np.arange(len(self.members)), a))
        level = np.flatnonzero(self._worse(a, others) == 0)
        if not len(level):
            return False
        i, j = divmod(int(rng.choice(level)), len(others.rows))
        self._swap(int(self.members[a][i]), int(others.rows[j]))
        return True

    def _gain(self, a: int, others: _Others) -> NDArray[np.float64]:
        """(|A|, c): how much the sum of squares falls when x_i of A and x_j of B change places.

        2 (x_j - x_i) . (mu_A - mu_B) + |x_i - x_j|^2 (1/|A| + 1/|B|), exactly (Hartigan 1975).
        """
        rows, columns = self.members[a], others.rows
        x = self.codes[rows]
        products = np.vstack([x, self.centres[a]]) @ self.codes[columns].T
        to_b = others.spread(x @ self.centres[others.clusters].T)
        along = products[-1] - self.along[columns] - self.along[rows][:, None] + to_b
        squared = self.squares[rows][:, None] + self.squares[columns] - 2.0 * products[:-1]
        share = np.repeat(1.0 / self.sizes[a] + 1.0 / others.sizes, others.sizes).astype(x.dtype)
        gain: NDArray[np.float64] = 2.0 * along + np.maximum(squared, 0.0) * share
        return gain

    def _worse(self, a: int, others: _Others) -> NDArray[np.int64]:
        """(|A|, c): by how many the labels missing in the two clusters together would grow."""
        if not self.least:
            return np.zeros((len(self.members[a]), len(others.rows)), np.int64)
        labels = self.rules.labels
        mine, theirs = labels[self.members[a]], labels[others.rows]
        b = self.assignment[others.rows]
        diverse_a = int((self.held[a, :-1] > 0).sum())
        clusters, which = np.unique(b, return_inverse=True)
        diverse_b = (self.held[clusters, :-1] > 0).sum(axis=1)[which]
        differ = mine[:, None] != theirs
        a_loses = ((self.held[a, mine] == 1) & (mine >= 0))[:, None]
        a_gains = (self.held[a, theirs] == 0) & (theirs >= 0)
        b_loses = (self.held[b, theirs] == 1) & (theirs >= 0)
        b_gains = (self.held[b[None, :], mine[:, None]] == 0) & (mine >= 0)[:, None]
        after_a = diverse_a + differ * (a_gains.astype(np.int64) - a_loses)
        after_b = diverse_b + differ * (b_gains.astype(np.int64) - b_loses)
        before = max(0, self.least - diverse_a) + np.maximum(0, self.least - diverse_b)
        after = np.maximum(0, self.least - after_a) + np.maximum(0, self.least - after_b)
        lost: NDArray[np.int64] = after - before
        return lost

    def _refresh(self, a: int) -> None:
        rows = self.members[a]
        self.centres[a] = self.codes[rows].mean(axis=0)
        self.along[rows] = self.codes[rows] @ self.centres[a]

    def _swap(self, i: int, j: int) -> None:
        a, b = int(self.assignment[i]), int(self.assignment[j])
        self.assignment[i], self.assignment[j] = b, a
        for cluster, old, new in ((a, i, j), (b, j, i)):
            rows = self.members[cluster]
            rows[rows == old] = new
            self.held[cluster, self.rules.labels[old]] -= 1
            self.held[cluster, self.rules.labels[new]] += 1
            self._refresh(cluster)
