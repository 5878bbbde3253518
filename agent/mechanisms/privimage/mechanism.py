"""PrivImage: a generative model, pre-trained on public images like the patients', fine-tuned with DP-SGD.

Li, Gong, Li, Zhao, Hou & Wang 2024 (USENIX Security), Algorithm 2; corrected where it leaks. The unit is the patient
(the paper protects an image), both noises come from a cryptographic generator (the published code draws the
histogram's right after ``manual_seed(0)``), every constant of the training is public (no N, no batch size from the
data), and nothing is chosen by looking: no checkpoint, no stop, no figure. Two queries read patients, the semantic
histogram and the gradients, and one claim covers both (Theorem E.2).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Cohort, Image, Patient, SyntheticSet
from agent.dp.clipping import PrivacyUnit
from agent.dp.dpsgd import PrivateSgd, best_engine, train_privately
from agent.dp.noise import Entropy
from agent.mechanisms.common.generative_model import PublicImages
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.privimage import semantic_query
from agent.mechanisms.privimage.diffusion import Diffusion, DiffusionConfig
from agent.models.diffusion.edm import Denoiser
from agent.models.image_tensors import to_bytes
from agent.models.semantics.classifier import Semantics
from agent.models.training_loop import HEADER_BYTES, checkpoint_bytes, load_state, save_state, torch_generator
from policies.accounting.claims import Composed, SubsampledGaussian

Shares = Literal["even", "noisy"]
_MOST: Final = 100_000  # images of a set


@dataclass(frozen=True, slots=True)
class Synthetic:
    """What is drawn at the end: post-processing, of any size."""

    pictures: int = 1000  # that are drawn
    shares: Shares = "even"  # of the classes: a public constant; or by the noisy histogram's totals

    def __post_init__(self) -> None:
        """Refuse a set of nothing."""
        if not 1 <= self.pictures <= _MOST or self.shares not in get_args(Shares):
            raise ValueError(f'pictures: 1 to {_MOST}; shares: "even" or "noisy"')


@dataclass(frozen=True, slots=True, eq=False)
class PrivImage:
    """Public configuration of one PrivImage release."""

    classes: tuple[str, ...]  # labels that count; images of others are left out
    model: DiffusionConfig  # PrivImage+D
    semantics: Semantics  # Q, trained on public images and frozen
    query: semantic_query.SemanticQuery
    public: PublicImages
    pretraining_steps: int
    sgd: PrivateSgd
    public_patients: int  # about how many there are, as may be known to all: for the guard before anything is spent
    share: float = semantic_query.SHARE  # of a class's patients that the guard takes to be in the largest bin
    synthetic: Synthetic = field(default_factory=Synthetic)
    pooled: str = ""  # the one class as which all of ``classes`` count and are drawn; "": each is its own

    name: ClassVar[str] = "privimage"
    places: ClassVar[tuple[str, ...]] = ("privimage/histogram", "privimage/pretraining", "privimage/finetuning")
    fewer: ClassVar[str] = "write so many into [synthetic] pictures"  # what makes the set smaller

    def __post_init__(self) -> None:
        """Refuse what does not fit together, and a query that its own noise would drown."""
        if not 1 <= len(self.classes) == len(set(self.classes)) or "" in self.classes:
            raise ValueError("classes: at least one, distinct, none of them empty")
        conditions, rows = self.model.architecture.classes, len(self.drawn)
        if conditions != rows:
            raise ValueError(f"the model has {conditions} conditions, and {rows} classes are drawn")
        if not self.shape == tuple(self.public.images.shape[1:]) == self.semantics.shape:
            raise ValueError("model, semantics and public images must be of one size, all grey or all in colour")
        bins = len(self.semantics.bins)
        if not 0 <= self.public.bins.min() <= self.public.bins.max() < bins:
            raise ValueError("a public image is of a semantic that the query function does not know")
        without = sorted(set(range(bins)) - set(self.public.bins.tolist()))
        if without:
            told = ", ".join(self.semantics.bins[index] for index in without[:5])
            raise ValueError(f"{len(without)} semantics have no public image: {told}; they select nothing")
        if not self.pretraining_steps >= 1:
            raise ValueError("pretraining steps: at least 1")
        semantic_query.refuse_faint(self.query, bins, self.public_patients / rows, rows, self.share)
        self.claim()

    @property
    def pictures(self) -> int:
        """How many a release has."""
        return self.synthetic.pictures

    def untrained(self) -> None:
        """No model leaves that the coordinator would have to approve first."""

    @property
    def drawn(self) -> tuple[str, ...]:
        """The labels of the synthetic set, and the rows of the histogram."""
        return (self.pooled,) if self.pooled else self.classes

    @property
    def shape(self) -> tuple[int, ...]:
        """(s, s[, 3]) of the images that it takes and makes."""
        return self.model.architecture.shape

    @property
    def max_checkpoint_bytes(self) -> int:
        """Of a training, and of the noisy histogram."""
        histogram = 8 * len(self.drawn) * len(self.semantics.bins)
        return max(histogram + HEADER_BYTES, checkpoint_bytes(lambda: Denoiser(self.model.architecture)))

    @property
    def form(self) -> str:
        """SHA-256 of the whole configuration: an interrupted making goes on only as the same."""
        told = {
            "classes": [self.classes, self.pooled],
            "model": self.model.fingerprint,
            "semantics": self.semantics.origin.sha256,
            "query": asdict(self.query),
            "public": [self.public.sha256, hashlib.sha256(self.public.bins.astype("<i8").tobytes()).hexdigest()],
            "steps": self.pretraining_steps,
            "sgd": asdict(self.sgd),
            "synthetic": asdict(self.synthetic),
        }
        return hashlib.sha256(json.dumps([self.name, told], sort_keys=True).encode()).hexdigest()

    def claim(self) -> Composed:
        """What a release promises: Theorem E.2, the histogram and all steps. Settled before an image is read."""
        sgd = self.sgd
        return Composed((self.query.claim(), SubsampledGaussian(sgd.sampling_rate, sgd.noise_multiplier, sgd.steps)))

    def components(self) -> dict[str, str]:
        """Where the query function and the pre-training come from (P6): the site's word on both, and no file's."""
        return {"semantics": self.semantics.origin.component, "pretraining": self.public.component}

    def run(self, cohort: Cohort, entropy: Entropy, bench: Workspace | None = None) -> SyntheticSet:
        """Query, select, pre-train, fine-tune, draw. Interrupted, it goes on from the bench's places.

        No size of the cohort is refused: a set drawn from noise looks like any other, and a refusal would tell.

        Returns:
            The set, (m, s, s[, 3]), its labels classes of the configuration, in random order.
        Raises:
            SharedImageError: a public image is a patient's.
            DrownedHistogramError: by its noisy count, a class has too few patients.
            NothingSelectedError: no public image shows what was chosen.
            DivergedError: the training came to numbers that are none.
        """
        bench = bench or Workspace()
        patients = self._counted(cohort)
        semantic_query.refuse_shared(self.public.images, patients)
        noisy = self._histogram(patients, entropy, bench)  # Algorithm 2, lines 4-13
        semantic_query.refuse_empty(noisy, self.drawn, self.query)
        rows, labels = semantic_query.selection(
            self.public.bins, semantic_query.chosen(noisy, self.query)
        )  # lines 14-21
        model = Diffusion(self.model, entropy)
        model.pretrain(  # line 22
            self.public.images[rows],
            labels,
            self.pretraining_steps,
            bench.place(self.places[1]),
            lambda done: bench.say("pre-training", done.step, done.steps),
        )
        train_privately(  # line 23, Algorithm 1
            model.task(),
            [self._unit(patient) for patient in patients],
            self.sgd,
            entropy,
            best_engine(self.model.device, self.sgd.expected_batch),
            place=bench.place(self.places[2]),
            run=self.form,
            say=lambda done: bench.say("fine-tuning", done.step, done.steps),
        )
        return self._set(model, noisy, entropy)  # line 24

    def _counted(self, cohort: Cohort) -> tuple[Patient, ...]:
        """The patients with their images of the classes; who has no such image is left out, by that record alone.

        Raises:
            ValueError: the images do not have the configured shape.
        """
        if any(image.pixels.shape != self.shape for patient in cohort.patients for image in patient.images):
            raise ValueError("the images do not have the configured shape")
        out = []
        for patient in cohort.patients:
            kept = [image for image in patient.images if image.label in self.classes]
            if kept:
                own = tuple(Image(image.pixels, self.pooled or image.label) for image in kept)
                out.append(Patient(patient.pseudonym, own))
        return tuple(out)

    def _histogram(self, patients: tuple[Patient, ...], entropy: Entropy, bench: Workspace) -> NDArray[np.float64]:
        """The noisy counts (c, NS): asked once. What an interrupted run drew is kept, so that none is drawn again."""
        place = bench.place(self.places[0])
        raw = place.read()
        if raw is not None:
            kept: NDArray[np.float64] = load_state(raw, self.form)[1]["histogram"].numpy()
            return kept
        noisy = semantic_query.histogram(patients, self.semantics, self.drawn, self.query, entropy)
        place.write(save_state(self.form, 0, {"histogram": torch.from_numpy(noisy)}))
        return noisy

    def _unit(self, patient: Patient) -> PrivacyUnit:
        """The patient's images (n, s, s[, 3]) uint8 and class numbers (n,)."""
        pixels = torch.from_numpy(to_bytes(np.stack([image.pixels for image in patient.images])))
        return PrivacyUnit((pixels, torch.tensor([self.drawn.index(image.label) for image in patient.images])))

    def _set(self, model: Diffusion, noisy: NDArray[np.float64], entropy: Entropy) -> SyntheticSet:
        c, m = len(self.drawn), self.synthetic.pictures
        shares = (
            np.full(c, 1.0 / c) if self.synthetic.shares == "even" else semantic_query.proportions(noisy, self.query)
        )
        counts = np.floor(shares * m).astype(np.int64)
        counts[np.argsort(counts - shares * m, kind="stable")[: m - counts.sum()]] += 1  # the largest remainders
        dice = np.random.Generator(np.random.PCG64(int.from_bytes(entropy.take(16), "little")))
        labels = dice.permutation(np.repeat(np.arange(c), counts))
        generator = torch_generator(int(dice.integers(1 << 62)))
        return SyntheticSet(model.sample(labels, generator), tuple(self.drawn[i] for i in labels))
