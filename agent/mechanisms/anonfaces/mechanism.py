"""AnonFACES: clusters of look-alikes as a recogniser sees them, mixed until no recogniser takes it for anybody.

Le, Khan, Tsaloli, Carlsson & Buchegger 2020 (WPES), sections 3.2 to 3.4; corrected where it leaks: see
:mod:`agent.stages.mix`. k counts distinct patients; clusters and labels are those of :mod:`agent.stages.cluster` and
not of the paper's Algorithm 1, which is a baseline beside it. Tuning of k (section 3.5) comes before a release, and
the release says which k were tried.

That no recogniser takes a picture for anybody says something only of recognisers that know people. Theirs is measured
on public pictures, and what their files tell of it is demanded before anything is priced; it says nothing of pictures
of another kind, so a run also demands that they know the cohort's own patients again, where a patient has two images.
Where none has, that cannot be checked, and the public figures are all there is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from agent.nets.pictures import to_tensor
from agent.nets.siamese import Recogniser
from agent.nouns import Clusters, Cohort, Latents, Patient, SyntheticSet
from agent.stages.average import aggregate_labels, patient_label
from agent.stages.cluster import partition
from agent.stages.gallery import gallery_of
from agent.stages.invert import invert
from agent.stages.known import refuse_blind
from agent.stages.mix import Mixing, Setting, mix
from agent.stages.styled import StyledCodec
from agent.stages.vet import refuse_copies
from policies.claims import KAnonymous, UnsupportedClaim

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
    per_cluster: ClassVar[int] = 1  # pictures

    def __post_init__(self) -> None:
        """Refuse what ``claim`` would refuse, a mixing of other clusters, and recognisers that can vet nothing.

        Raises:
            UnsupportedClaim: of k and l.
            KnowsNobody: the file of a recogniser says less than :meth:`agent.nets.siamese.Calibration.demand` asks.
            ValueError: one recogniser alone, or another k.
        """
        self.claim()
        if not self.l_diversity <= self.k:
            raise UnsupportedClaim("a cluster of k patients has at most k labels")
        if len({one.origin.sha256 for one in self.recognisers}) < 2 or len({r.name for r in self.recognisers}) < 2:
            raise ValueError("two different recognisers judge a picture, or more")
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
            CohortTooSmall: too few patients, or labels, for one cluster; or every cluster stays at risk.
            KnowsNobody: a recogniser does not know this cohort's patients again (:mod:`agent.stages.known`).
            RepeatsAnInput: a representative is an image of the cohort.
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
