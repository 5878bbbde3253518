"""One small instance of each mechanism that takes images, and digits as its patients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from agent.domain import Cohort, ExampleRule, Image, Patient, Selection, TaskCohort
from agent.mechanisms.anonfaces.identity_mixing import Mixing
from agent.mechanisms.anonfaces.mechanism import AnonFaces
from agent.mechanisms.centroids.codebook import codebook_from, codec_digest, fitted
from agent.mechanisms.centroids.mechanism import Centroids
from agent.mechanisms.common.linear_codec import fit_basis
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from agent.mechanisms.federated.task_model import TaskModel
from agent.mechanisms.federated.task_training import labelled_examples
from agent.mechanisms.ksalsa.augmentation import KSalsaViews
from agent.mechanisms.ksalsa.mechanism import KSalsa
from agent.mechanisms.ksalsa.style_alignment import Alignment, Grid
from agent.mechanisms.ksame.mechanism import KSame
from agent.models.features.extractors import RandomFeatures
from agent.release.packaging import ReleaseFormat
from agent.release.pipeline import release_resumable, release_synthetic
from agent.release.preflight import ReleaseForecast, of_clusters, of_configuration
from policies.tasks.evaluation import HELD_OUT, TRAINED, EvaluationPlan
from tests.support import small_distillation as small
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.networks import codec, recogniser
from tests.support.site_world import SiteWorld
from tests.support.small_privimage import tiny
from tests.support.small_tasks import classification

DATA = load_digits()
DIGITS = (DATA.images / 16).astype(np.float32)
LARGE = DIGITS.repeat(4, axis=1).repeat(4, axis=2)  # (1797, 32, 32)
PUBLIC, PRIVATE = np.split(np.random.default_rng(12345).permutation(1797), [150])


def digit_patients(indices, images=LARGE):
    """Patients of two images of one digit class each."""
    by_class = [[i for i in indices if DATA.target[i] == c] for c in range(10)]
    pairs = sorted((v[2 * t], v[2 * t + 1]) for v in by_class for t in range(len(v) // 2))
    return Cohort(
        tuple(
            Patient(f"p{n:05d}", tuple(Image(images[i], str(DATA.target[i])) for i in pair))
            for n, pair in enumerate(pairs)
        )
    )


DIGITS_TASK = classification("0123456789", (32, 32), rounds=4, public_patients=225)
FEDERATED = Federated(DIGITS_TASK, 650, noise_multiplier=1.8)
MODEL = TaskModel(replace(FEDERATED, evaluate=EvaluationPlan(1, 5.0, 20, 10)))
MASKED = FederatedMasked(
    classification("0123456789", (32, 32), rounds=30, steps_per_round=1, public_patients=225),
    650,
    noise_multiplier=1.8,
    sites=3,
    honest=2,
    value_bound=4.0,
    scale=20,
    ring_bits=32,
)
KSALSA = KSalsa(
    5,
    2,
    codec(),
    RandomFeatures(1, 8, 2),
    RandomFeatures(2, 8, 2),
    Alignment(grid=Grid(4), steps=3),
    KSalsaViews(2, 0.1),
)
ANONFACES = AnonFaces(5, 2, codec(), (recogniser(1), recogniser(2)), Mixing(5))
KSAME = KSame(5, 2, fit_basis(LARGE[PUBLIC], 40, "public"))
COHORT = digit_patients(PRIVATE[:120])
CODEBOOK = codebook_from(
    fitted(KSAME.basis.encode(LARGE[PUBLIC]), (3, 8), codec_digest(KSAME.basis), {}, np.random.default_rng(0)),
    "public",
)
CENTROIDS = Centroids(KSAME.basis, CODEBOOK, tuple("0123456789"), 1.0, 0.5, k=5, margin=10.0)
PRIVIMAGE = tiny(classes=tuple("0123456789"))
DISTILL, DISTILL_DP = small.distill(), small.distill_dp()


def in_parts(cohort: Cohort) -> dict[str, TaskCohort]:
    """The patients of a model: every fifth is held out."""
    task, held = MODEL.training.task, cohort.patients[::5]
    trained = tuple(patient for patient in cohort.patients if patient not in held)
    return {TRAINED: labelled_examples(task, Cohort(trained)), HELD_OUT: labelled_examples(task, Cohort(held))}


@dataclass(frozen=True)
class SetRelease:
    """A mechanism, how many pictures it makes at most from 23 patients, and how it is released."""

    mechanism: Any
    pictures: int
    public: bool

    @property
    def selection(self) -> Selection | ExampleRule:
        if isinstance(self.mechanism, TaskModel):
            rule: ExampleRule = self.mechanism.rules()[TRAINED]
            return rule
        return Selection("OT", self.mechanism.shape)

    def foreseen(self, s: SiteWorld, wrapping: ReleaseFormat | None = None) -> ReleaseForecast:
        of: Callable[..., ReleaseForecast] = of_configuration if self.public else of_clusters
        return of(s.site, self.mechanism, self.selection, wrapping or ReleaseFormat())

    def release(self, s: SiteWorld) -> None:
        if self.public:
            release_resumable(s.site, self.mechanism, self.selection, UnsafeSeededEntropy(1))
        else:
            assert isinstance(self.selection, Selection)
            release_synthetic(s.site, self.mechanism, self.selection, np.random.default_rng(1))


SET_RELEASES = {
    "ksame": SetRelease(KSAME, 23 // 5, public=False),
    "ksalsa": SetRelease(KSALSA, 23 // 5 * 2, public=False),  # two views of each cluster
    "anonfaces": SetRelease(ANONFACES, 23 // 5, public=False),
    "privimage": SetRelease(PRIVIMAGE, PRIVIMAGE.synthetic.pictures, public=True),
    "centroids": SetRelease(CENTROIDS, CENTROIDS.codebook.cells, public=True),
    "distill": SetRelease(DISTILL, DISTILL.course.output.pictures, public=True),
    "distill-dp": SetRelease(DISTILL_DP, DISTILL_DP.course.output.pictures, public=True),
    "model": SetRelease(MODEL, 0, public=True),  # no set, but it leaves in the same way
}
