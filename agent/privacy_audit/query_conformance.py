"""Audit noisy queries that are not a full training: the output of the production code against its distribution.

A sum, the semantic histogram, a look at a model, and the part of a federated step's sum that leaves a site masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import Image, Patient
from agent.dp.clipping import PrivacyUnit
from agent.dp.dpsgd import PrivateSgd, SecureSumGrid, noisy_part
from agent.dp.evaluation_sums import ScoredExample, private_look
from agent.dp.noise import Entropy, noisy_sum
from agent.mechanisms.privimage.semantic_query import SemanticQuery, histogram
from agent.models.semantics.classifier import Semantics
from agent.privacy_audit.conformance import (
    LATTICE,
    Conformance,
    Trial,
    Values,
    claimed_deviation,
    of_noise,
    on_the_lattice,
    two_sided,
)
from policies.accounting.claims import DistributedGaussian
from policies.tasks.evaluation import SumLayout

IMAGES: Final = 8  # of each canary patient, who has one vote all the same
_SIZE: Final = 5000
_TIMES: Final = 6  # a query is asked
_MASKED: Final = 120  # canaries of a masked part, on its first coordinates


def query_conformance(emit: Callable[[], Values], exact: Values, spread: float, grid: float) -> Conformance:
    """Several emissions of one noisy query, held against N(exact, spread^2) on a lattice.

    Args:
        emit: gives (d,): the query's answer with fresh noise.
        exact: (d,), its answer without.
        spread: standard deviation that is claimed.
        grid: the lattice's step.
    """
    answers = np.stack([emit() for _ in range(_TIMES)])
    return Conformance((*on_the_lattice(answers, grid), *of_noise((answers - exact) / spread)))


def sum_conformance(entropy: Entropy, size: int = _SIZE) -> Conformance:
    """Of the shipped ``noisy_sum``, as histograms and centroids use it."""
    bound, multiplier = 3.0, 1.7
    total = np.where(np.arange(size) % 3 == 0, 1000.0, 0.0)
    grid = bound * LATTICE
    spread = claimed_deviation(multiplier, bound, size, grid)
    return query_conformance(lambda: noisy_sum(total, bound, multiplier, entropy), total, spread, grid)


class _Pointing:
    """A query function that reads the bin from the brightness of an image: an image of k / n votes for bin k."""

    def __init__(self, bins: int) -> None:
        self.bins = tuple(f"bin{i}" for i in range(bins))

    def probabilities(self, images: NDArray[np.float32]) -> Values:
        """(n, bins): all on one bin and a little on its successor."""
        first = np.rint(images[:, 0, 0].astype(np.float64) * len(self.bins)).astype(np.int64)
        out = np.zeros((len(images), len(self.bins)))
        out[np.arange(len(out)), first], out[np.arange(len(out)), (first + 1) % len(self.bins)] = 0.6, 0.4
        return out


def histogram_conformance(entropy: Entropy) -> Conformance:
    """Of the shipped semantic histogram: canary patients of eight images, one vote each for two bins."""
    bins, classes = 250, ("0", "1", "2", "3")
    query = SemanticQuery(votes=2, noise=1.5, keep=1, images=IMAGES)
    exact, patients = np.zeros((len(classes), bins)), []
    for n in range(40):
        row, column = n % len(classes), 5 * n
        pixels = np.full((1, 1), column / bins, np.float32)
        patients.append(Patient(f"canary{n:02}", (Image(pixels, classes[row]),) * IMAGES))
        exact[row, [column, column + 1]] += 1.0
    bound = math.sqrt(2.0)  # a patient's votes: one for each of two bins
    grid = bound * LATTICE
    spread = claimed_deviation(query.noise / bound, bound, exact.size, grid)
    semantics = cast(Semantics, _Pointing(bins))
    emit = lambda: histogram(patients, semantics, classes, query, entropy).ravel()  # noqa: E731 - six times the same
    return query_conformance(emit, exact.ravel(), spread, grid)


def look_conformance(entropy: Entropy) -> Conformance:
    """Of the shipped sums of a look: canary patients of eight images, with one vote in each of two blocks.

    They leave as float32, so their lattice is coarser where they are large: rounding of what has its noise already.
    """
    classes, bins, sigma = 60, 10, 1.7
    layout, share = SumLayout("classification", classes, bins), 1.0 / math.sqrt(2.0)
    exact, patients = np.zeros(classes * classes + 2 * bins), []
    for n in range(40):  # of class n, taken for the next one; every second time with a score of 0.7, else of 0.3
        scores = np.full(classes, 0.0)
        scores[n + 1] = 0.7 if n % 2 else 0.3
        patients.append([ScoredExample(scores, np.array([n]))] * IMAGES)
        exact[[n * classes + n + 1, classes * classes + (6 if n % 2 else 3)]] += share
    spread = claimed_deviation(sigma, 1.0, len(exact), LATTICE)
    answers = np.stack([private_look(layout, patients, sigma, entropy).astype(np.float64) for _ in range(_TIMES)])
    return Conformance(tuple(of_noise((answers - exact) / spread)))


def part_conformance(entropy: Entropy, size: int = _SIZE) -> Conformance:
    """Of the shipped ``noisy_part``, a site's masked part of one step: canary patients of eight loud images.

    Every site bears sigma / sqrt(honest) of the noise. The box is half of the clip, so that boxing is seen, and that
    the noise is not boxed with it.
    """
    q, sigma, honest, clip, bound = 0.5, 1.0, 4, 0.5, 0.25
    share = DistributedGaussian(q, sigma, 1, 6, honest).share
    job = PrivateSgd(q, share, 1, clip, IMAGES, expected_batch=128.0)
    grid = clip * 2.0**-10  # coarser than the lattice of noisy_sum, as parts are: it widens the noise by 7 %
    spread = claimed_deviation(sigma / math.sqrt(honest), clip, size, grid)
    model = nn.Linear(size, 1, bias=False)
    units = [PrivacyUnit((3.0 * clip * row.expand(IMAGES, -1),)) for row in torch.eye(_MASKED, size)]
    parts = [noisy_part(model, _outputs, units, job, entropy, SecureSumGrid(grid, bound)) for _ in range(_TIMES)]
    answers = np.stack(parts) * grid
    patients, others = answers[:, :_MASKED], answers[:, _MASKED:]
    wide = math.sqrt((spread**2 + q * (1.0 - q) * bound**2) / patients.size)
    return Conformance(
        (
            *on_the_lattice(answers, grid),
            Trial("a patient adds what the box lets through", two_sided(float(patients.mean() - q * bound) / wide)),
            *of_noise(others / spread, ", of a masked part"),
        )
    )


def _outputs(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """(n,): the output, whose gradient is the input."""
    out: Tensor = model(rows[0])[:, 0]
    return out
