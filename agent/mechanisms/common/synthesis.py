"""What every k-anonymous mechanism is to the rest of the agent, and what its configuration comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from agent.domain import Clusters, Cohort, Patient, Selection, SyntheticSet
from policies.accounting.claims import KAnonymous

if TYPE_CHECKING:  # it imports torch, which a release that learns nothing does without
    from agent.vetting.reference import Vetting


class Synthesis(Protocol):
    """Public configuration of one release with k distinct patients behind every image."""

    name: ClassVar[str]

    @property
    def k(self) -> int:
        """Distinct patients in a cluster, at least."""

    @property
    def l_diversity(self) -> int:
        """Distinct labels in a cluster, at least."""

    @property
    def per_cluster(self) -> int:
        """Images of each cluster."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w[, 3]) of the images that it takes and makes."""

    @property
    def form(self) -> str:
        """SHA-256 of all that draws an image: sets of the same form are comparable."""

    def claim(self) -> KAnonymous:
        """What a release promises. It depends on the configuration alone."""

    def components(self) -> dict[str, str]:
        """Where every component that an image is made or decoded by comes from (P6)."""

    def run(
        self, cohort: Cohort, rng: np.random.Generator, others: tuple[Patient, ...] = ()
    ) -> tuple[SyntheticSet, Clusters]:
        """Make ``per_cluster`` images of each cluster of k patients or more.

        ``others`` are patients of earlier releases: nothing is made of them, and what is made is compared with them.

        Returns:
            The set, and the clusters in the same order, which is random. The agent checks both: each image has the
            label that :func:`agent.microaggregation.aggregation.aggregate_labels` gives its cluster.
        Raises:
            CohortTooSmallError: too few patients, or labels, for one cluster.
            RepeatedInputError: an image is, pixel for pixel at 8 bits, an image of a patient.
        """


@dataclass(frozen=True, slots=True)
class ReleaseConfig:
    """The configuration of one release, read: what to make, of whom, and how it is vetted."""

    mechanism: Synthesis
    selection: Selection
    vetting: Vetting | None = None  # None: copies are refused, and nothing else
