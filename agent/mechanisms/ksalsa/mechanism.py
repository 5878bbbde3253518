"""k-SALSA: every cluster of k patients becomes one image that has their average shape and their local textures.

Jeon, Park, Kim, Morley & Cho 2022 (ECCV), Algorithm 1; corrected where it leaks. k counts distinct patients, and no
patient is dropped for n mod k. Generator and encoder are trained on other people's images (the paper trains them on
the data set itself and calls that harmless, although they are functions of every image in it). Labels are l-diverse
and never counted, order and names are random, and a partition that was released once is never drawn again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import numpy as np

from agent.domain import Clusters, Cohort, Patient, SyntheticSet
from agent.mechanisms.common.linear_codec import invert
from agent.mechanisms.common.stylegan_codec import StyledCodec
from agent.mechanisms.ksalsa.augmentation import KSalsaViews, augmented, public_spread
from agent.mechanisms.ksalsa.style_alignment import Alignment, Networks, align, sources_of
from agent.microaggregation.aggregation import aggregate_labels, average, patient_label
from agent.microaggregation.partition import partition
from agent.models.features.feature_net import FeatureNet
from agent.vetting.exact_copies import refuse_copies
from policies.accounting.claims import KAnonymous, UnsupportedClaimError

_SPREAD = 4096  # random inputs of the generator: their codes' spread is a public constant of it


@dataclass(frozen=True, slots=True, eq=False)
class KSalsa:
    """Public configuration of one k-SALSA release."""

    k: int  # distinct patients in a cluster, at least
    l_diversity: int  # distinct labels in a cluster, at least
    codec: StyledCodec  # E and G
    style: FeatureNet  # whose maps Eq. 1 takes
    content: FeatureNet  # F of Eq. 6
    alignment: Alignment = field(default_factory=Alignment)
    views: KSalsaViews | None = None  # supplement E; None: the representative alone

    name: ClassVar[str] = "ksalsa"

    def __post_init__(self) -> None:
        """Refuse what ``claim`` would refuse, and more labels than patients."""
        self.claim()
        if not self.l_diversity <= self.k:
            raise UnsupportedClaimError("a cluster of k patients has at most k labels")

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w[, 3]) of the images that it takes and makes."""
        return self.codec.shape

    @property
    def per_cluster(self) -> int:
        """Images of each cluster."""
        return self.views.count if self.views else 1

    @property
    def form(self) -> str:
        """What a representative of this configuration is comparable with: a digest of all that draws it."""
        views = asdict(self.views) if self.views else None
        told = [self.name, asdict(self.alignment), views, self.codec.drawn_by, *sorted(self._digests().items())]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _digests(self) -> dict[str, str]:
        parts = {name: origin.sha256 for name, origin in self.codec.origins.items()}
        return {**parts, "style": self.style.origin.sha256, "content": self.content.origin.sha256}

    def claim(self) -> KAnonymous:
        """What a release promises. It is settled before an image is read."""
        return KAnonymous(self.k, self.l_diversity, releases_per_patient=1)

    def components(self) -> dict[str, str]:
        """Where every component that an image is made or decoded by comes from (P6)."""
        return {
            **self.codec.components(),
            "style": self.style.origin.component,
            "content": self.content.origin.component,
        }

    def run(
        self, cohort: Cohort, rng: np.random.Generator, others: tuple[Patient, ...] = ()
    ) -> tuple[SyntheticSet, Clusters]:
        """Make the representative of each cluster, or ``views.count`` of them, side by side.

        ``others`` are patients of earlier releases: nothing is made of them, and what is made is compared with them.

        Returns:
            The set, (m v, h, w[, 3]) with m v labels, and the m clusters in the same order, which is random. The
            clusters name patients: they are for the site's private record and never leave it.
        Raises:
            CohortTooSmallError: too few patients, or labels, for one cluster.
            AlignmentNotFiniteError: an image without any texture, or a network that fails: nothing is made.
            RepeatedInputError: a representative is an image of the cohort.
        """
        latents = invert(cohort, self.codec)  # line 2
        labels = [patient_label(patient) for patient in cohort.patients]
        clusters = partition(latents, labels, self.k, self.l_diversity, rng)  # line 3
        w0 = self.codec.ws(average(latents, clusters)).cpu().numpy()  # line 7, Eq. 4
        networks = Networks(self.codec.generator, self.style, self.content)
        found = align(networks, w0, sources_of(cohort, clusters), self.alignment)  # lines 8-15
        codes, of = found.ws.reshape(len(found.ws), -1), np.arange(len(found.ws))
        if self.views is not None:
            spread = public_spread(self.codec.generator, _SPREAD, rng)
            codes, of = augmented(codes, spread, self.views, rng)
        images = self.codec.decode(codes)  # line 16
        refuse_copies(images, (*cohort.patients, *others))
        labels_of = aggregate_labels(cohort, clusters)
        return SyntheticSet(images, tuple(labels_of[j] for j in of)), clusters
