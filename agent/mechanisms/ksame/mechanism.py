"""k-Same-PCA: every cluster of k patients is replaced by the decoded mean of their PCA codes.

Newton, Sweeney & Malin 2005 (k-Same), as the baseline of k-SALSA, section 4.2; here k counts distinct
patients, nobody is dropped, labels are l-diverse and the basis is fitted on public images.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agent.domain import Clusters, Cohort, Patient, SyntheticSet
from agent.mechanisms.common.linear_codec import Basis, invert, save_basis
from agent.microaggregation.aggregation import aggregate_labels, average, patient_label
from agent.microaggregation.partition import partition
from agent.vetting.exact_copies import refuse_copies
from policies.accounting.claims import KAnonymous, UnsupportedClaimError


@dataclass(frozen=True, slots=True, eq=False)
class KSame:
    """Public configuration of one k-Same-PCA release."""

    k: int  # distinct patients in a cluster, at least
    l_diversity: int  # distinct labels in a cluster, at least
    basis: Basis  # encoder and generator

    name: ClassVar[str] = "ksame"
    per_cluster: ClassVar[int] = 1  # images

    def __post_init__(self) -> None:
        """Refuse what ``claim`` would refuse, and more labels than patients."""
        self.claim()
        if not self.l_diversity <= self.k:
            raise UnsupportedClaimError("a cluster of k patients has at most k labels")

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w) of the images that it takes and makes."""
        return self.basis.shape

    @property
    def form(self) -> str:
        """What a representative of this configuration is comparable with: a digest of all that draws it."""
        return hashlib.sha256(self.name.encode() + save_basis(self.basis)).hexdigest()

    def claim(self) -> KAnonymous:
        """What a release promises. It is settled before an image is read."""
        return KAnonymous(self.k, self.l_diversity, releases_per_patient=1)

    def components(self) -> dict[str, str]:
        """Where every component that an image is made or decoded by comes from (P6)."""
        return self.basis.components()

    def run(
        self, cohort: Cohort, rng: np.random.Generator, others: tuple[Patient, ...] = ()
    ) -> tuple[SyntheticSet, Clusters]:
        """Make one representative for each cluster.

        ``others`` are patients of earlier releases: nothing is made of them, and what is made is compared with them.

        Returns:
            The set, (m, h, w) with m labels, in random order, and the clusters in the same order. The
            clusters name patients: they are for the site's private record and never leave it.
        Raises:
            CohortTooSmallError: too few patients, or labels, for one cluster.
            RepeatedInputError: a representative is, pixel for pixel at 8 bits, an image of the cohort.
        """
        latents = invert(cohort, self.basis)
        labels = [patient_label(patient) for patient in cohort.patients]
        clusters = partition(latents, labels, self.k, self.l_diversity, rng)
        images = self.basis.decode(average(latents, clusters))
        refuse_copies(images, (*cohort.patients, *others))
        return SyntheticSet(images, aggregate_labels(cohort, clusters)), clusters
