"""AnonFACES: clusters of similar patients by a recogniser, mixed until no recogniser matches them with anyone.

Le, Khan, Tsaloli, Carlsson & Buchegger 2020 (WPES), sections 3.2 to 3.4; corrected where it leaks: see
:mod:`agent.mechanisms.anonfaces.identity_mixing`. k counts distinct patients. Clusters and labels are those of
:mod:`agent.microaggregation.partition` and not of the paper's Algorithm 1, which is a separate baseline. k is tuned
(section 3.5) before a release, and the release says which k were tried.

That no recogniser matches an image with anyone only counts if the recognisers recognise people. Their quality is
measured on public images, and their files must state enough of it before anything is priced. It says nothing about
images of another kind, so a run also demands that they re-identify the cohort's own patients, where a patient has two
images. If no patient has two, that cannot be checked, and only the public figures remain.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Clusters, Cohort, Latents, Patient, SyntheticSet
from agent.mechanisms.anonfaces.gallery import gallery_of, refuse_blind
from agent.mechanisms.anonfaces.identity_mixing import Mixing, Setting, mix
from agent.mechanisms.common.linear_codec import invert
from agent.mechanisms.common.stylegan_codec import StyledCodec
from agent.microaggregation.aggregation import aggregate_labels, patient_label
from agent.microaggregation.partition import partition
from agent.models.image_tensors import to_tensor
from agent.models.recognition.recogniser import Recogniser
from agent.vetting.exact_copies import refuse_copies
from policies.accounting.claims import KAnonymous, UnsupportedClaimError

_BATCH = 256


@dataclass(frozen=True, slots=True, eq=False)
class AnonFaces:
    """Public configuration of one AnonFACES release."""

    k: int  # distinct patients in a cluster, at least
    l_diversity: int  # distinct labels in a cluster, at least
    codec: StyledCodec  # W+ inversion and generator
    recognisers: tuple[Recogniser, ...]  # two or more; the first one's embeddings are what is clustered
    mixing: Mixing

    name: ClassVar[str] = "anonfaces"
    per_cluster: ClassVar[int] = 1  # images

    def __post_init__(self) -> None:
        """Refuse what ``claim`` would refuse, a mixing of other clusters, and recognisers that can vet nothing.

        Raises:
            UnsupportedClaimError: of k and l.
            RecogniserError: the file of a recogniser says less than
            :meth:`agent.models.recognition.recogniser.Calibration.demand` asks. ValueError: one recogniser alone, or
            another k.
        """
        self.claim()
        if not self.l_diversity <= self.k:
            raise UnsupportedClaimError("a cluster of k patients has at most k labels")
        if len({one.origin.sha256 for one in self.recognisers}) < 2 or len({r.name for r in self.recognisers}) < 2:
            raise ValueError("two different recognisers judge an image, or more")
        if self.mixing.k != self.k:
            raise ValueError("the mixing is of clusters of another k")
        for one in self.recognisers:
            one.calibration.demand()

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w[, 3]) of the images that it takes and makes."""
        return self.codec.shape

    @property
    def form(self) -> str:
        """What a representative of this configuration is comparable with: a digest of all that draws it."""
        digests = sorted(origin.sha256 for origin in self.codec.origins.values())
        judges = [one.origin.sha256 for one in self.recognisers]  # the first one clusters
        told = [self.name, asdict(self.mixing), self.codec.drawn_by, digests, judges]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def claim(self) -> KAnonymous:
        """What a release promises. It is settled before an image is read."""
        return KAnonymous(self.k, self.l_diversity, releases_per_patient=1)

    def components(self) -> dict[str, str]:
        """Where every component that an image is made or decoded by comes from (P6)."""
        origins = {one.origin.component for one in self.recognisers}
        return {**self.codec.components(), "recogniser": "public" if origins == {"public"} else "private"}

    def run(
        self, cohort: Cohort, rng: np.random.Generator, others: tuple[Patient, ...] = ()
    ) -> tuple[SyntheticSet, Clusters]:
        """Make one representative for each cluster; a cluster that stays at risk has none and is not in the result.

        ``others`` are patients of earlier releases: nothing is made of them, and what is made is compared with them.

        Returns:
            The set, (m, h, w[, 3]) with m labels, in random order, and the clusters in the same order. The clusters
            name patients: they are for the site's private record and never leave it.
        Raises:
            CohortTooSmallError: too few patients, or labels, for one cluster; or every cluster stays at risk.
            RecogniserError: a recogniser does not know this cohort's patients again
            (:mod:`agent.mechanisms.anonfaces.gallery`). RepeatedInputError: a representative is an image of the
            cohort.
        """
        latents = invert(cohort, self.codec)
        labels = [patient_label(patient) for patient in cohort.patients]
        seen = Latents(self.embeddings(cohort), latents.patients)
        clusters = partition(seen, labels, self.k, self.l_diversity, rng)
        label = dict(zip(latents.patients, labels, strict=True))
        diverse = lambda members: len({label[p] for p in members} - {""}) >= self._given  # noqa: E731
        gallery = gallery_of(cohort, self.recognisers, others)
        refuse_blind(gallery, (*cohort.patients, *others))
        setting = Setting(self.codec, gallery, diverse)
        mixed = mix(latents, clusters, setting, self.mixing, rng)
        refuse_copies(mixed.images, (*cohort.patients, *others))
        return SyntheticSet(mixed.images, aggregate_labels(cohort, mixed.clusters)), mixed.clusters

    @property
    def _given(self) -> int:
        """Labels that a cluster must have; with l = 1 a cluster without any will do."""
        return self.l_diversity if self.l_diversity > 1 else 0

    def embeddings(self, cohort: Cohort) -> NDArray[np.float32]:
        """Each patient as the first recogniser sees them: the mean over the patient's images, (n, d)."""
        rows = np.empty((len(cohort.patients), self.recognisers[0].net.architecture.embedding), np.float32)
        for row, patient in zip(rows, cohort.patients, strict=True):
            stack = np.stack([image.pixels for image in patient.images])
            with torch.no_grad():
                parts = [
                    self.recognisers[0].embed(to_tensor(stack[a : a + _BATCH])) for a in range(0, len(stack), _BATCH)
                ]
            row[:] = torch.cat(parts).double().mean(dim=0).cpu().numpy()
        return rows
