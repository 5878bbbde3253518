"""k-Same-PCA: every cluster of k patients is replaced by the decoded mean of their PCA codes.

Newton, Sweeney & Malin 2005 (k-Same), as the baseline of k-SALSA, section 4.2; here k counts distinct
patients, nobody is dropped, labels are l-diverse and the basis is fitted on public images.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agent.nouns import Clusters, Cohort, SyntheticSet
from agent.stages.average import aggregate_labels, average, patient_label
from agent.stages.cluster import partition
from agent.stages.invert import Basis, decode, invert
from policies.claims import KAnonymous, UnsupportedClaim


class RepeatsAnInput(ValueError):
    """A representative equals a real image. The text does not say which, or how many (P14)."""

    def __init__(self) -> None:
        """Say only that nothing is released."""
        super().__init__("a representative equals an input image: nothing is released")


@dataclass(frozen=True, slots=True, eq=False)
class KSame:
    """Public configuration of one k-Same-PCA release."""

    k: int  # distinct patients in a cluster, at least
    l_diversity: int  # distinct labels in a cluster, at least
    basis: Basis  # encoder and generator

    name: ClassVar[str] = "ksame"

    def __post_init__(self) -> None:
        """Refuse what ``claim`` would refuse, and more labels than patients."""
        self.claim()
        if not self.l_diversity <= self.k:
            raise UnsupportedClaim("a cluster of k patients has at most k labels")

    def claim(self) -> KAnonymous:
        """What a release promises. It is settled before an image is read."""
        return KAnonymous(self.k, self.l_diversity, releases_per_patient=1)

    def components(self) -> dict[str, str]:
        """Where every component that an image is made or decoded by comes from (P6)."""
        return {"encoder": self.basis.provenance, "generator": self.basis.provenance}

    def run(
        self, cohort: Cohort, rng: np.random.Generator, settled: Iterable[tuple[str, ...]] = ()
    ) -> tuple[SyntheticSet, Clusters]:
        """Make one representative for each cluster.

        ``settled`` are the clusters of the site's earlier releases (P5). The promise that a patient is in
        one released cluster ever holds when the caller passes *all* of them. A settled cluster's
        representative is the same as before only while its patients' images are the same: a caller that
        re-ingests patients has to release the old artifact again, not run again.

        Returns:
            The set, (m, h, w) with m labels, in random order, and the clusters in the same order. The
            clusters name patients: they are for the site's private record and never leave it.
        Raises:
            CohortTooSmall: too few patients, or labels, for one cluster.
            RepeatsAnInput: a representative is, pixel for pixel at 8 bits, an image of the cohort.
        """
        latents = invert(cohort, self.basis)
        labels = [patient_label(patient) for patient in cohort.patients]
        clusters = partition(latents, labels, self.k, self.l_diversity, rng, settled)
        images = decode(average(latents, clusters), self.basis)
        made = {image.tobytes() for image in images}
        real = (image.pixels for patient in cohort.patients for image in patient.images)
        if any(np.rint(pixels * 255.0).astype(np.uint8).tobytes() in made for pixels in real):
            raise RepeatsAnInput
        return SyntheticSet(images, aggregate_labels(cohort, clusters)), clusters
