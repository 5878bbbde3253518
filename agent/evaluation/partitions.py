"""The shape of a partition in a named embedding: silhouette, dendrogram and the sizes at a cut.

AnonFACES (Le et al. 2020), section 4.2 (silhouette) and section 4.4 (dendrogram, bounds for k). All is computed from
patients and stays inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import cdist

Values = NDArray[np.float64]  # (n, d)
Assignment = NDArray[np.int64]  # (n,): the cluster of every patient, 0 .. m-1
Linkage = Literal["single", "complete", "average", "ward"]
_CHUNK: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One embedded point for each patient, with its cluster."""

    codes: Values  # (n, d)
    assignment: Assignment
    embedding: str  # the name of what embeds

    def __post_init__(self) -> None:
        """Every cluster 0 .. m-1 has a member; everything is finite."""
        if self.codes.ndim != 2 or not self.codes.size or self.codes.dtype != np.float64 or not self.embedding:
            raise ValueError("codes are (n, d) float64, not empty, with the name of their embedding")
        if self.assignment.shape != self.codes.shape[:1] or self.assignment.dtype != np.int64:
            raise ValueError("an assignment is (n,) int64")
        if self.assignment.min() < 0 or not bool(np.bincount(self.assignment).all()):
            raise ValueError("clusters are 0 .. m-1, none of them empty")
        if not bool(np.isfinite(self.codes).all()):
            raise ValueError("codes must be finite")

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(m,) members."""
        return np.bincount(self.assignment).astype(np.int64)


def silhouettes(partition: Partition) -> Values:
    """(n,): (b - a) / max(a, b) of every point (Rousseeuw 1987), 0 for the only member of a cluster.

    a is the mean distance to the other members of one's own cluster, b to those of the nearest other cluster.
    O(n^2 d) work in blocks of rows, O(n) memory times the block.

    Raises:
        ValueError: fewer than two clusters.
    """
    sizes = partition.sizes
    if len(sizes) < 2:
        raise ValueError("a silhouette needs two clusters")
    order = np.argsort(partition.assignment, kind="stable")
    ordered, starts = partition.codes[order], np.concatenate([[0], sizes.cumsum()[:-1]])
    out = np.empty(len(order))
    for a in range(0, len(order), _CHUNK):
        mine = partition.assignment[a : a + _CHUNK]
        rows = np.arange(len(mine))
        sums = np.add.reduceat(cdist(partition.codes[a : a + _CHUNK], ordered), starts, axis=1)
        inside = sums[rows, mine] / np.maximum(sizes[mine] - 1, 1)
        means = sums / sizes
        means[rows, mine] = np.inf
        outside = means.min(axis=1)
        widest = np.maximum(inside, outside)
        score = np.divide(outside - inside, widest, out=np.zeros_like(widest), where=widest > 0)
        out[a : a + _CHUNK] = np.where(sizes[mine] > 1, score, 0.0)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class MergeTree:
    """What a dendrogram is drawn from (AnonFACES, Figure 12)."""

    merges: Values  # (n - 1, 4): the two joined, their distance, how many then; as scipy's linkage
    linkage: Linkage
    sampled: bool  # only some of the patients, drawn at random


def dendrogram(codes: Values, method: Linkage, most: int, rng: np.random.Generator) -> MergeTree:
    """The merges of at most ``most`` codes (n, d), drawn at random if there are more. O(most^2) memory.

    Raises:
        ValueError: fewer than two codes, or one is not finite.
    """
    if codes.ndim != 2 or min(len(codes), most) < 2 or not bool(np.isfinite(codes).all()):
        raise ValueError("a dendrogram needs two finite codes")
    sampled = len(codes) > most
    chosen = codes[np.sort(rng.choice(len(codes), most, replace=False))] if sampled else codes
    return MergeTree(np.asarray(linkage(chosen, method), np.float64), method, sampled)


def sizes_at(tree: MergeTree, height: float) -> NDArray[np.int64]:
    """The sizes of the clusters when the tree is cut at a height, largest first: bounds for k (section 4.4)."""
    n = len(tree.merges) + 1
    sizes = {i: 1 for i in range(n)}
    for step, (a, b, far, size) in enumerate(tree.merges):
        if far > height:
            break
        del sizes[int(a)], sizes[int(b)]
        sizes[n + step] = int(size)
    return np.array(sorted(sizes.values(), reverse=True), np.int64)
