"""Exchange two patients between two clusters: the local search under ``cluster``.

An exchange never changes a size, so k holds throughout; the labels' diversity is part of the test that
every exchange must pass.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS: Final = 16  # clusters with which a patient may be exchanged in ``improve``
PASSES: Final = 60  # more than any data set here needed; a bound, so that the search always ends
TOLERANCE: Final = 1e-9  # of the total: below it a gain is rounding


class Exchange:
    """A partition under improvement: mutable, private to one run, never released."""

    def __init__(
        self,
        codes: NDArray[np.float64],
        assignment: NDArray[np.int64],
        labels: NDArray[np.int64],
        l: int,  # noqa: E741 -- the letter of l-diversity
    ) -> None:
        """Start at ``assignment`` (n,) of ``codes`` (n, d); ``labels`` (n,) has -1 for "no label"."""
        self.codes = codes
        self.assignment = assignment.copy()
        self.labels = labels
        self.least = 0 if l == 1 else l
        self.sizes = np.bincount(assignment)
        order = np.argsort(assignment, kind="stable")
        self.members = np.split(order, np.cumsum(self.sizes)[:-1])
        self.centres = np.stack([codes[rows].mean(axis=0) for rows in self.members])
        self.squares = (codes * codes).sum(axis=1)
        # the last column counts patients without a label; index -1 finds it
        self.held = np.zeros((len(self.members), int(labels.max(initial=-1)) + 2), np.int64)
        np.add.at(self.held, (assignment, labels), 1)

    def sse(self) -> float:
        """Sum of squared distances to the cluster means: the information lost by averaging."""
        return float(sum(((self.codes[r] - self.codes[r].mean(axis=0)) ** 2).sum() for r in self.members))

    def repair(self) -> bool:
        """Make every cluster l-diverse by the cheapest exchanges; False when single exchanges can not.

        Each exchange lowers the total number of missing labels, so at most m l of them are made; the bound is
        counted all the same, so that a mistake in the bookkeeping refuses instead of running for ever.
        """
        left = len(self.members) * self.least
        for a in range(len(self.members)):
            while self._missing(a) > 0:
                left -= 1
                if left < 0 or not (
                    self._repair_once(a, self._near(a, 4 * NEIGHBOURS)) or self._repair_once(a, None)
                ):
                    return False
        return True

    def improve(self, rng: np.random.Generator) -> None:
        """Exchange while the sum of squares falls, best pair first, clusters in random order.

        A cluster is looked at again only after it or one of its neighbours has changed.
        """
        m = len(self.members)
        changed = np.zeros(m, np.int64)
        seen = np.full(m, -1, np.int64)
        floor = TOLERANCE * max(self.sse(), np.finfo(np.float64).tiny) / max(len(self.codes), 1)
        for turn in range(1, PASSES + 1):
            moved = False
            for a in rng.permutation(m):
                near = self._near(a, NEIGHBOURS)
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

    def _near(self, a: int, count: int) -> NDArray[np.int64]:
        far = ((self.centres - self.centres[a]) ** 2).sum(axis=1)
        far[a] = np.inf
        count = min(count, len(far) - 1)
        return np.argpartition(far, count - 1)[:count] if count else np.empty(0, np.int64)

    def _missing(self, a: int) -> int:
        return max(0, self.least - int((self.held[a, :-1] > 0).sum()))

    def _best(self, a: int, near: NDArray[np.int64], floor: float) -> tuple[int, int]:
        if not len(near):
            return -1, -1
        others = np.concatenate([self.members[b] for b in near])
        gain = self._gain(a, others)
        if self.least:
            gain[self._worse(a, others) > 0] = -np.inf
        i, j = divmod(int(gain.argmax()), len(others))
        if not gain[i, j] > floor:
            return -1, -1
        return int(self.members[a][i]), int(others[j])

    def _repair_once(self, a: int, near: NDArray[np.int64] | None) -> bool:
        others = (
            np.flatnonzero(self.assignment != a)
            if near is None
            else np.concatenate([self.members[b] for b in near] or [np.empty(0, np.int64)])
        )
        if not len(others):
            return False
        gain = np.where(self._worse(a, others) < 0, self._gain(a, others), -np.inf)
        i, j = divmod(int(gain.argmax()), len(others))
        if not gain[i, j] > -np.inf:
            return False
        self._swap(int(self.members[a][i]), int(others[j]))
        return True

    def _gain(self, a: int, others: NDArray[np.int64]) -> NDArray[np.float64]:
        """(|A|, c): how much the sum of squares falls when x_i of A and x_j of B change places.

        2 (x_j - x_i) . (mu_A - mu_B) + |x_i - x_j|^2 (1/|A| + 1/|B|), exactly (Hartigan 1975).
        """
        rows = self.members[a]
        x, y = self.codes[rows], self.codes[others]
        b = self.assignment[others]
        apart = self.centres[a] - self.centres[b]  # (c, d)
        along = (y * apart).sum(axis=1) - x @ apart.T
        squared = np.maximum(self.squares[rows][:, None] + self.squares[others] - 2.0 * (x @ y.T), 0.0)
        gain: NDArray[np.float64] = 2.0 * along + squared * (1.0 / self.sizes[a] + 1.0 / self.sizes[b])
        return gain

    def _worse(self, a: int, others: NDArray[np.int64]) -> NDArray[np.int64]:
        """(|A|, c): by how many the labels missing in the two clusters together would grow."""
        mine, theirs = self.labels[self.members[a]], self.labels[others]
        b = self.assignment[others]
        diverse = (self.held[:, :-1] > 0).sum(axis=1)
        differ = mine[:, None] != theirs
        a_loses = ((self.held[a, mine] == 1) & (mine >= 0))[:, None]
        a_gains = (self.held[a, theirs] == 0) & (theirs >= 0)
        b_loses = (self.held[b, theirs] == 1) & (theirs >= 0)
        b_gains = (self.held[b[None, :], mine[:, None]] == 0) & (mine >= 0)[:, None]
        after_a = diverse[a] + differ * (a_gains.astype(np.int64) - a_loses)
        after_b = diverse[b] + differ * (b_gains.astype(np.int64) - b_loses)
        before = np.maximum(0, self.least - diverse[a]) + np.maximum(0, self.least - diverse[b])
        after = np.maximum(0, self.least - after_a) + np.maximum(0, self.least - after_b)
        worse: NDArray[np.int64] = after - before
        return worse

    def _swap(self, i: int, j: int) -> None:
        a, b = self.assignment[i], self.assignment[j]
        self.assignment[i], self.assignment[j] = b, a
        for cluster, old, new in ((a, i, j), (b, j, i)):
            rows = self.members[cluster]
            rows[rows == old] = new
            self.centres[cluster] = self.codes[rows].mean(axis=0)
            np.subtract.at(self.held, (cluster, self.labels[old]), 1)
            np.add.at(self.held, (cluster, self.labels[new]), 1)
