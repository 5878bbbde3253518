"""Privacy Distillation: a teacher on the patients draws, what looks like one is dropped, a student learns the rest.

Fernandez, Sanchez, Pinaya, Jacenków, Tsaftaris & Cardoso 2023, section 3.2; corrected where it leaks. The paper asks
of a sample whether it shows the patient of its own prompt; here every sample is compared with every image of every
patient, at a threshold calibrated for so many (its 0.5 was not). The paper's captions are real reports, one sample
for each; here a prompt is a template over public words, and how many samples a condition gets is a public constant.
The paper measures with the filter's own network; here a second one, which filters nothing, does.

Two forms, of two claims. :class:`Distill`: the teacher learns without noise, and nothing is promised: what stands
behind it is the vetting, at the power that it showed (level C). :class:`DistillDp`: the teacher learns by DP-SGD,
whatever follows reads no patient, the vetting least of all (P7), and the teacher's claim is the release's (level A).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Cohort, Image, Patient
from agent.dp.clipping import PrivacyUnit
from agent.dp.dpsgd import PrivateSgd, best_engine, train_privately
from agent.dp.noise import Entropy
from agent.errors import CohortTooSmallError
from agent.mechanisms.common.generative_model import PublicImages
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.distillation.latent_model import LatentDiffusion
from agent.mechanisms.distillation.teacher_student import Course, Distilled, Work, distil
from agent.models.image_tensors import to_bytes
from agent.vetting.reference import reference_of
from policies.accounting.claims import NoClaim, SubsampledGaussian


class Distillation:
    """What both kinds of teacher say of the course that follows."""

    __slots__ = ()
    course: Course
    fewer: ClassVar[str] = "write so many into [output] pictures"  # what makes a set smaller

    @property
    def pictures(self) -> int:
        """How many a release has; of a model, how many are drawn to measure it."""
        return self.course.output.pictures

    def untrained(self) -> bytes | None:
        """The model's file before it has learned anything, where a model leaves; None where images do."""
        return self.course.untrained() if self.course.output.release == "model" else None

    @property
    def drawn(self) -> tuple[str, ...]:
        """The labels of the synthetic set."""
        return self.course.conditions.names

    @property
    def max_checkpoint_bytes(self) -> int:
        """Of a training, or of what a round keeps."""
        return self.course.max_checkpoint_bytes

    @property
    def max_result_bytes(self) -> int:
        """Of the model that leaves, where one does."""
        return len(self.untrained() or b"")

    @property
    def shape(self) -> tuple[int, ...]:
        """(s, s[, 3]) of the images that it takes and makes."""
        return self.course.autoencoder.shape


@dataclass(frozen=True, slots=True, eq=False)
class Distill(Distillation):
    """Public configuration of a distillation whose teacher learns without noise: level C, and nothing promised."""

    course: Course
    teacher_steps: int

    name: ClassVar[str] = "distill"

    def __post_init__(self) -> None:
        """Refuse a teacher that learns nothing."""
        if not self.teacher_steps >= 1:
            raise ValueError("steps of the teacher: at least 1")

    @property
    def places(self) -> tuple[str, ...]:
        """Of the checkpoints."""
        return ("distill/teacher", *self.course.places)

    @property
    def form(self) -> str:
        """SHA-256 of the whole configuration: an interrupted making goes on only as the same."""
        return _digest([self.name, self.course.form, self.teacher_steps])

    def claim(self) -> NoClaim:
        """Nothing: a filter that reads patients is no guarantee for any of them."""
        return NoClaim()

    def components(self) -> dict[str, str]:
        """The origin of the networks that draw and judge (P6). The teacher learned from patients, and stays here."""
        return {"teacher": "private", **self.course.components()}

    def run(self, cohort: Cohort, entropy: Entropy, bench: Workspace | None = None) -> Distilled:
        """Teach, draw, vet, rerank, learn, draw. Interrupted, it goes on from the bench's places.

        Raises:
            CohortTooSmallError: too few patients to compare with.
            RecogniserError: the vetting does not find near-duplicates of the cohort's own images.
            NothingLeftError: no sample was kept.
            DivergedError: a training came to numbers that are none.
        """
        bench = bench or Workspace()
        patients = _counted(self, cohort)
        if not patients:
            raise CohortTooSmallError

        def teach() -> LatentDiffusion:
            images, labels = _stacked(self, patients)
            teacher = _teacher(self.course, entropy)
            say = lambda done: bench.say("teacher", done.step, done.steps)  # noqa: E731
            teacher.pretrain(images, labels, self.teacher_steps, bench.place(self.places[0]), say)
            return teacher

        reference = reference_of(patients, self.course.vetting)
        return distil(self.course, teach, reference, Work(entropy, bench.place, bench.say)).result


@dataclass(frozen=True, slots=True, eq=False)
class DistillDp(Distillation):
    """Public configuration of a distillation whose teacher learns by DP-SGD: level A, by the teacher's claim."""

    course: Course
    public: PublicImages  # learned first, and what samples are compared with; bins: conditions, or -1
    pretraining_steps: int
    sgd: PrivateSgd
    public_patients: int  # a bound that may be known to all

    name: ClassVar[str] = "distill-dp"

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        if tuple(self.public.images.shape[1:]) != self.shape:
            raise ValueError("model and public images must be of one size, all grey or all in colour")
        if not -1 <= self.public.bins.min() <= self.public.bins.max() < self.course.conditions.count:
            raise ValueError("a public image shows a condition that is not configured")
        if not self.pretraining_steps >= 1:
            raise ValueError("steps of the pre-training: at least 1")
        self.claim()

    @property
    def places(self) -> tuple[str, ...]:
        """Of the checkpoints."""
        return ("distill/pretraining", "distill/teacher", *self.course.places)

    @property
    def form(self) -> str:
        """SHA-256 of the whole configuration: an interrupted making goes on only as the same."""
        bins = hashlib.sha256(self.public.bins.astype("<i8").tobytes()).hexdigest()
        public = [self.public.sha256, bins, self.pretraining_steps]
        return _digest([self.name, self.course.form, public, asdict(self.sgd)])

    def claim(self) -> SubsampledGaussian:
        """What the teacher's training costs; all that follows is post-processing. Settled before an image is read."""
        return SubsampledGaussian(self.sgd.sampling_rate, self.sgd.noise_multiplier, self.sgd.steps)

    def components(self) -> dict[str, str]:
        """The origin of the networks that draw and judge (P6), as vouched for by the site, not by a file."""
        return {"pretraining": self.public.component, **self.course.components()}

    def run(self, cohort: Cohort, entropy: Entropy, bench: Workspace | None = None) -> Distilled:
        """Pre-train, teach with noise, draw, vet against public images, rerank, learn, draw.

        No size of the cohort is refused: a refusal would tell.

        Raises:
            RecogniserError: the vetting does not find near-duplicates of the public images.
            NothingLeftError: no sample was kept.
            DivergedError: a training came to numbers that are none.
        """
        bench = bench or Workspace()
        reference = reference_of(_strangers(self.public), self.course.vetting)
        teach = partial(self._taught, cohort, entropy, bench)
        return distil(self.course, teach, reference, Work(entropy, bench.place, bench.say)).result

    def _taught(self, cohort: Cohort, entropy: Entropy, bench: Workspace) -> LatentDiffusion:
        """Pre-trained in the open, fine-tuned under noise: the one reading of patients."""
        teacher = _teacher(self.course, entropy)
        say = lambda done: bench.say("pre-training", done.step, done.steps)  # noqa: E731
        place = bench.place(self.places[0])
        teacher.pretrain(self.public.images, self.public.bins, self.pretraining_steps, place, say)
        train_privately(
            teacher.task(),
            [
                PrivacyUnit(tuple(map(torch.from_numpy, _stacked(self, (patient,)))))
                for patient in _counted(self, cohort)
            ],
            self.sgd,
            entropy,
            best_engine(self.course.model.device, self.sgd.expected_batch),
            place=bench.place(self.places[1]),
            run=self.form,
            say=lambda done: bench.say("fine-tuning", done.step, done.steps),
        )
        return teacher


def _digest(told: list[object]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _teacher(course: Course, entropy: Entropy) -> LatentDiffusion:
    return LatentDiffusion(course.model, course.autoencoder, course.conditions, entropy)


def _counted(of: Distillation, cohort: Cohort) -> tuple[Patient, ...]:
    """The patients with their images of the conditions; who has no such image is left out, by that record alone.

    Raises:
        ValueError: the images do not have the configured shape.
    """
    if any(image.pixels.shape != of.shape for patient in cohort.patients for image in patient.images):
        raise ValueError("the images do not have the configured shape")
    out = []
    for patient in cohort.patients:
        kept = tuple(image for image in patient.images if image.label in of.course.conditions.names)
        if kept:
            out.append(Patient(patient.pseudonym, kept))
    return tuple(out)


def _stacked(of: Distillation, patients: Sequence[Patient]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Every image (n, s, s[, 3]) and its condition (n,)."""
    images = [image for patient in patients for image in patient.images]
    pixels = to_bytes(np.stack([image.pixels for image in images]))
    return pixels, np.array([of.course.conditions.names.index(image.label) for image in images], np.int64)


def _strangers(public: PublicImages) -> tuple[Patient, ...]:
    """Public images as a reference, in the order of their digests: each is somebody of its own, once."""
    named = {hashlib.sha256(image.tobytes()).hexdigest(): image for image in public.images}
    unit = {name: image.astype(np.float32) / np.float32(255) for name, image in named.items()}
    return tuple(Patient(name, (Image(pixels, ""),)) for name, pixels in unit.items())
