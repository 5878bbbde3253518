"""Same-size clustering against k-SALSA's greedy: the information lost, and the time.

``speed_vs_published_10k`` compares processor seconds at 10,000 patients in 512 dimensions. The published
code sums the whole n x n matrix once for every cluster, O(n^3 / k), and takes a quarter of an hour: five of
its 1,000 rounds are timed at 10,000 and MULTIPLIED. The matrix itself, 2 GB with its copies, is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist, squareform
from sklearn.datasets import load_digits

from agent.nouns import Latents
from agent.stages.cluster import greedy, partition
from tests.benchmarks.report import Report, Row

Codes = NDArray[np.float32]


def manifold(n: int, seed: int = 1) -> Codes:
    """A smooth 12-dimensional surface in 512 dimensions with a little noise, like a network's embeddings."""
    rng = np.random.default_rng(seed)
    hidden = np.tanh(rng.normal(size=(n, 12)) @ rng.normal(size=(12, 128)) / 3.5)
    codes = hidden @ rng.normal(size=(128, 512)) / 11.3 + 0.05 * rng.normal(size=(n, 512))
    return codes.astype(np.float32)


def published(distance: NDArray[np.float64], k: int, rounds: int) -> list[NDArray[np.int64]]:
    """The first ``rounds`` clusters of k-SALSA's greedy as published; ``distance`` (n, n) is consumed."""
    np.fill_diagonal(distance, np.nan)
    left = np.ones(len(distance), bool)
    clusters = []
    for _ in range(rounds):
        sums = np.nansum(distance, axis=1)
        sums[~left] = -np.inf
        far = int(sums.argmax())
        rows = np.append(np.argsort(distance[far])[: k - 1], far)
        clusters.append(rows)
        left[rows] = False
        distance[rows] = np.nan
        distance[:, rows] = np.nan
    return clusters


def ours(codes: Codes, k: int) -> list[NDArray[np.int64]]:
    """The product's partition, as lists of rows."""
    names = tuple(f"{i:06d}" for i in range(len(codes)))
    members = partition(Latents(codes, names), [""] * len(codes), k, 1, np.random.default_rng(0)).members
    return [np.array([int(name) for name in cluster]) for cluster in members]


def sse(codes: Codes, clusters: list[NDArray[np.int64]]) -> float:
    """Sum of squared distances to the cluster means."""
    groups = (codes[rows].astype(np.float64) for rows in clusters)
    return sum(float(((group - group.mean(axis=0)) ** 2).sum()) for group in groups)


def sse_vs_greedy(codes: Codes, k: int) -> float:
    """The loss of our partition over that of the greedy with the same sizes and nobody dropped."""
    assignment = greedy(codes.astype(np.float64), k)
    theirs = [np.flatnonzero(assignment == j) for j in range(assignment.max() + 1)]
    return sse(codes, ours(codes, k)) / sse(codes, theirs)


def seconds(action: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    start = time.process_time()
    action()
    return time.process_time() - start


def main() -> Report:
    """Measure; about a minute."""
    digits = load_digits().data.astype(np.float32)
    rows = []
    ratios = {}
    for name, codes, k in (
        ("sse_vs_greedy_digits_k5", digits, 5),
        ("sse_vs_greedy_digits_k11", digits, 11),
        ("sse_vs_greedy_manifold_k10", manifold(2000), 10),
    ):
        ratios[name] = sse_vs_greedy(codes, k)
        rows.append(Row(f"{name}: {codes.shape[0]} patients, {codes.shape[1]} dimensions", ratios[name], "x"))
    codes, timed = manifold(10_000), 5
    distance = squareform(pdist(codes[:, :16]))  # a round's time does not depend on the distances
    theirs = seconds(lambda: published(distance, 10, timed)) * (1000 / timed)
    mine = seconds(lambda: ours(codes, 10))
    narrow = np.ascontiguousarray(codes[:, :64])
    rows += [
        Row(f"published greedy, 10,000 patients: {timed} of 1,000 rounds timed, multiplied", theirs, "cpu-s"),
        Row("ours, 10,000 patients, 512 dimensions", mine, "cpu-s"),
        Row("ours, 10,000 patients, 64 dimensions", seconds(lambda: ours(narrow, 10)), "cpu-s"),
    ]
    ratios["speed_vs_published_10k"] = theirs / mine
    return Report(tuple(rows), ratios)
