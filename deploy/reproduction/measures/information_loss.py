"""Information loss, tightness and homogeneity of a partition: what averaging costs before any training.

AnonFACES (Le et al. 2020): Definition 3.2 (information loss), section 4.2 (pair distances inside clusters), section
4.4 (homogeneity of attributes). Silhouette and dendrogram are in :mod:`agent.evaluation.partitions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from agent.evaluation.partitions import Assignment, Partition, Values, silhouettes
from agent.intervals import Figure, Resampling, Units, percentile, rate, resampled, table

_CHUNK: Final = 512


def centroids(partition: Partition) -> Values:
    """(m, d): the mean code of each cluster."""
    sums = np.zeros((len(partition.sizes), partition.codes.shape[1]))
    np.add.at(sums, partition.assignment, partition.codes)
    means: Values = sums / partition.sizes[:, None]
    return means


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """Information loss of a release, and how it spreads. Distances in the embedding's own unit."""

    embedding: str
    loss: Figure  # IL, Definition 3.2; chance: every patient represented by a random cluster
    per_cluster: Values  # (m,) mean distance of the members to their representative

    def table(self) -> str:
        """One line."""
        return table((self.loss,), self.embedding)


def information_loss(
    partition: Partition, representatives: Values, rng: np.random.Generator, how: Resampling | None = None
) -> Loss:
    """IL of AnonFACES, Definition 3.2: the mean Euclidean distance of the originals to what replaces them.

    Args:
        partition: of the patients.
        representatives: (m, d), the *released* images embedded by the same network. The centroids of the codes give
            the loss of clustering alone.
        rng: for the bootstrap by cluster, and nothing else.
        how: the bootstrap.
    Returns:
        The loss; its ``chance`` is the exact mean distance if a patient had another cluster's representative.
    Raises:
        ValueError: not one finite representative for each cluster.
    """
    m = len(partition.sizes)
    if representatives.shape != (m, partition.codes.shape[1]) or not bool(np.isfinite(representatives).all()):
        raise ValueError("one finite representative for each cluster, in the same embedding")
    own = np.sqrt(((partition.codes - representatives[partition.assignment]) ** 2).sum(axis=1))
    how = how or Resampling()
    draws = resampled(lambda rows: (float(own[rows].mean()),), Units(partition.assignment), rng, how.count)[:, 0]
    value = float(own.mean())
    figure = Figure("information loss", value, percentile(draws, value, how.level), None, m)
    if m > 1:
        every = sum(float(cdist(block, representatives).sum()) for block in _blocks(partition.codes))
        other = (every - float(own.sum())) / (len(own) * (m - 1))
        figure = Figure(figure.name, value, figure.interval, other, m)
    per_cluster = np.bincount(partition.assignment, weights=own) / partition.sizes
    return Loss(partition.embedding, figure, per_cluster)


@dataclass(frozen=True, slots=True)
class Tightness:
    """How close the members of a cluster are (AnonFACES, section 4.2, Figures 2 and 3)."""

    embedding: str
    sse: float  # squared distances to the centroids
    sst: float  # squared distances to the one mean of all
    nearest: float  # smallest pair distance in any cluster
    mean: float  # over all pairs inside clusters
    farthest: float
    cluster_means: tuple[float, float, float]  # of each cluster's own min, mean and max pair distance
    silhouette: float  # -1 .. 1

    @property
    def share(self) -> float:
        """SSE / SST: 0 when every cluster is one point, 1 when clusters explain nothing; 0 if all points are one."""
        return self.sse / self.sst if self.sst > 0 else 0.0

    def table(self) -> str:
        """Six short lines."""
        lines = (
            f"{self.embedding}: SSE {self.sse:.6g}, SSE/SST {self.share:.4f}, silhouette {self.silhouette:.4f}",
            f"pair distances inside clusters: {self.nearest:.4g} / {self.mean:.4g} / {self.farthest:.4g}",
            "means of the clusters' own: " + " / ".join(f"{x:.4g}" for x in self.cluster_means),
        )
        return "\n".join(lines)


def tightness(partition: Partition) -> Tightness:
    """SSE, pair distances and silhouette of a partition.

    Raises:
        ValueError: no cluster has two members, so there is no pair; or there is one cluster only.
    """
    codes, means = partition.codes, centroids(partition)
    sse = float(((codes - means[partition.assignment]) ** 2).sum())
    sst = float(((codes - codes.mean(axis=0)) ** 2).sum())
    order = np.argsort(partition.assignment, kind="stable")
    pairs: list[Values] = []
    for rows in np.split(order, partition.sizes.cumsum()[:-1]):
        if len(rows) > 1:
            pairs.append(cdist(codes[rows], codes[rows])[np.triu_indices(len(rows), 1)])
    if not pairs:
        raise ValueError("no cluster has two members")
    flat = np.concatenate(pairs)
    own = np.array([(p.min(), p.mean(), p.max()) for p in pairs]).mean(axis=0)
    lowest, mean, highest = (float(x) for x in own)
    return Tightness(
        partition.embedding,
        sse,
        sst,
        float(flat.min()),
        float(flat.mean()),
        float(flat.max()),
        (lowest, mean, highest),
        float(silhouettes(partition).mean()),
    )


def homogeneity(
    assignment: Assignment, attributes: Mapping[str, Sequence[str]], joint: Sequence[tuple[str, ...]] = ()
) -> tuple[Figure, ...]:
    """The share of clusters in which an attribute has entropy 0 (AnonFACES, section 4.4, Figure 13).

    High is useful (a 70-year-old stays one) and is attribute disclosure at the same time (design P8).

    Args:
        assignment: (n,) the cluster of every patient.
        attributes: name -> n values.
        joint: names that must be homogeneous together, each a tuple of attributes.
    Returns:
        One rate for each attribute and joint tuple, over clusters; ``chance`` is the exact expectation if patients
        were dealt out at random to clusters of the same sizes.
    Raises:
        ValueError: an attribute without a value for each patient, or a joint name that is none.
    """
    if not attributes or any(len(v) != len(assignment) for v in attributes.values()):
        raise ValueError("every attribute has one value for each patient")
    if any(name not in attributes for names in joint for name in names):
        raise ValueError("a joint attribute is made of given ones")
    figures = []
    for names in (*((name,) for name in attributes), *joint):
        values = np.unique(
            np.array(list(zip(*(attributes[n] for n in names), strict=True))), axis=0, return_inverse=True
        )
        figures.append(_homogeneous(assignment, values[1].reshape(-1).astype(np.int64), " and ".join(names)))
    return tuple(figures)


def _homogeneous(assignment: Assignment, values: NDArray[np.int64], name: str) -> Figure:
    sizes = np.bincount(assignment)
    low, high = np.full(len(sizes), values.max()), np.zeros(len(sizes), np.int64)
    np.minimum.at(low, assignment, values)
    np.maximum.at(high, assignment, values)
    n, counts = len(values), np.bincount(values).tolist()
    # a cluster of s drawn without replacement is of one value with probability sum C(n_v, s) / C(n, s)
    by_size = {int(s): sum(comb(c, int(s)) for c in counts) / comb(n, int(s)) for s in np.unique(sizes)}
    chance = float(np.mean([by_size[int(s)] for s in sizes]))
    return rate(f"homogeneous in {name}", float((low == high).sum()), len(sizes), chance)


def _blocks(codes: Values) -> list[Values]:
    return [codes[a : a + _CHUNK] for a in range(0, len(codes), _CHUNK)]
