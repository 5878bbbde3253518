"""One experiment with private synthesis: settings, the split, and every model and set of images of it, kept.

A cohort of real patients, a public set with names for its images, and a test part that no mechanism sees. Methods
differ in what they learn first (nothing, all public images, or a selection that the cohort was asked for) and in
the model; they have one architecture for each model, one fine-tuning, and one pre-training where they have any.
Noise is the operating system's, as in a release: two runs have the same networks and other noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.domain import CheckpointStore
from agent.dp.clipping import PrivacyUnit, vmap_engine
from agent.dp.dpsgd import PrivateSgd, TrainingTask, train_privately
from agent.dp.noise import SystemEntropy
from agent.evaluation.utility import Recipe
from agent.mechanisms.privimage.diffusion import Diffusion, DiffusionConfig
from agent.mechanisms.privimage.semantic_query import SemanticQuery, chosen, histogram, refuse_shared, selection
from agent.models.diffusion.edm import DiffusionArchitecture
from agent.models.semantics.classifier import Semantics, semantics_from
from agent.models.semantics.training import SemanticsConfig, suited, train_semantics
from agent.models.training_loop import FileCheckpointStore, TrainingProgress, torch_generator
from deploy.reproduction.conditional_gan.model import Adversarial, AdversarialConfig
from deploy.reproduction.experiment import Rows, Samples, cohort_of
from deploy.reproduction.result_cache import Kept, Say, locked, sha
from policies.accounting.accountant import calibrate, tight_epsilon
from policies.accounting.claims import Gaussian, SubsampledGaussian
from protos.common.durable_files import replace_file

Family = Literal["D", "G"]
Public = Literal["none", "whole", "selected"]
Images = NDArray[np.uint8]
UNSAFE_NO_NOISE: Final = 2e-3  # of Table 3's non-private rows: the least that a claim may have; epsilon is a million
_FREE: Final = ("seeds", "epsilons", "chunk", "device")  # settings on which no number depends


class GenerativeModel(Protocol):
    """Pre-trained on public images, fine-tuned on patients by DP-SGD, then asked for images of a class."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its images: (s, s) grey or (s, s, 3) RGB."""

    @property
    def classes(self) -> int:
        """Conditions 0 .. classes - 1; a label of -1 is no condition."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public configuration: of all that decides what it becomes, but the images."""

    def pretrain(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        steps: int,
        place: CheckpointStore,
        say: Callable[[TrainingProgress], None] = ...,
    ) -> None:
        """Train on public images, and go on where ``place`` has a checkpoint of this run.

        Args:
            images: (n, s, s) or (n, s, s, 3).
            labels: (n,), -1 for an image without a condition.
            steps: of the optimiser.
            place: of the checkpoint.
            say: told of the progress.
        Raises:
            ValueError: images or labels that do not fit.
        """

    def task(self) -> TrainingTask:
        """What DP-SGD trains, after the pre-training; the same model and follower whenever it is asked.

        Its ``expand`` takes units of two tensors, a row for each image: images (n, s, s[, 3]) uint8 and labels (n,)
        int64, -1 for none.
        """

    def sample(self, labels: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
        """An image for each label.

        Args:
            labels: (n,).
            generator: on the CPU; the only source of randomness.
        Returns:
            (n, s, s) or (n, s, s, 3).
        """

    def state(self) -> dict[str, Tensor]:
        """The weights that draw, on the CPU: what a release holds."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state` in the place of a pre-training; it can then draw, or be fine-tuned.

        Raises:
            WeightsError: it is of another configuration.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """What DP-SGD does with one family of models; the noise follows from the epsilon."""

    sampling_rate: float
    steps: int
    clip: float


@dataclass(frozen=True, slots=True)
class PrivateSettings:
    """Everything that is chosen beforehand."""

    diffusion: DiffusionConfig  # its seed is replaced by the experiment's
    adversarial: AdversarialConfig
    diffusion_job: Job
    adversarial_job: Job
    query: SemanticQuery
    patients: int  # a public bound of the cohort: the divisor of the sums is its share q
    delta: float = 1e-4
    epsilons: tuple[float, ...] = (10.0, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    test: float = 0.22  # of the patients, where the data set has no published split
    per_picture: bool = False  # the papers' unit: every image counts as somebody; else the patient, all images
    images_per_patient: int = 4  # in one step
    semantics_steps: int = 600
    diffusion_pretraining: int = 1_200  # steps
    adversarial_pretraining: int = 1_500
    synthetic: int = 2_000  # images of a release
    recipe: Recipe = Recipe(epochs=20, side=8)  # noqa: RUF009 - frozen; of the CNN
    keeps: tuple[int, ...] = (1, 2, 3)  # k_2 of figures 6 and 7, rising
    widths: tuple[tuple[int, ...], ...] = ()  # of figure 7's diffusion models
    chunk: int = 16  # patients of one vectorised backward pass
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what is no experiment."""
        if not (self.seeds and self.epsilons and 0.0 < self.test < 1.0 and self.patients >= 1):
            raise ValueError("an experiment has seeds, epsilons, a test part and a bound of the cohort")
        if not 0.0 < self.delta * self.patients < 1.0:
            raise ValueError("delta is below one in as many as there are patients")

    @property
    def unit(self) -> str:
        """Of every epsilon."""
        return "image" if self.per_picture else "patient"


@dataclass(frozen=True, slots=True)
class Method:
    """A row of Table 2."""

    name: str
    family: Family
    public: Public
    private: bool = True  # Table 3 has rows without noise


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The two data sets."""

    sensitive: Samples
    public: Samples  # a label is a semantic

    def __post_init__(self) -> None:
        """Images of one size and colour, and none in both."""
        if self.sensitive.images.shape[1:] != self.public.images.shape[1:]:
            raise ValueError("sensitive and public images must be of one size, all grey or all in colour")


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """Rows of the sensitive images: nobody is in both."""

    cohort: Rows
    test: Rows


class PrivateWork(Kept):
    """The networks, releases and numbers of one experiment, each made once."""

    def __init__(self, sources: Sources, settings: PrivateSettings, folder: Path, say: Say) -> None:
        """Use :func:`opened`."""
        told = {name: value for name, value in asdict(settings).items() if name not in _FREE}
        super().__init__(folder, sha([sources.sensitive.digest(), sources.public.digest(), told]), say)
        self.sensitive, self.public, self.settings = sources.sensitive, sources.public, settings
        self.classes = tuple(sorted(set(self.sensitive.labels)))
        self.bins = tuple(sorted(set(self.public.labels)))
        self.public_bins = np.array([self.bins.index(label) for label in self.public.labels], np.int64)
        self.grades = np.array([self.classes.index(label) for label in self.sensitive.labels], np.int64)
        count = len(self.grades)
        self.owners = np.arange(count, dtype=np.int64) if settings.per_picture else self.sensitive.owners

    def halves(self, seed: int) -> Halves:
        """The published split where there is one, else one by owner, of the seed."""
        parts = self.sensitive.attributes.get("part")
        if parts:
            test = np.array([part == "test" for part in parts])
        else:
            # by the patient also where the unit is the image: a test on the same people would flatter
            people = np.unique(self.sensitive.owners)
            order = np.random.Generator(np.random.Philox(2_000 + seed)).permutation(people)
            test = np.isin(self.sensitive.owners, order[: round(self.settings.test * len(people))])
        return Halves(np.flatnonzero(~test).astype(np.int64), np.flatnonzero(test).astype(np.int64))

    def place(self, key: str) -> FileCheckpointStore:
        """Of a training's checkpoint."""
        return FileCheckpointStore(self.folder / "networks" / f"{sha([self.digest, key])[:32]}.checkpoint")


@contextmanager
def opened(sources: Sources, settings: PrivateSettings, folder: Path, say: Say) -> Iterator[PrivateWork]:
    """Work in a folder that nobody else works in meanwhile.

    Raises:
        BusyError: somebody does.
        SharedImageError: a public image is a sensitive one.
    """
    with locked(folder):
        work = PrivateWork(sources, settings, folder, say)
        refuse_shared(work.public.images, cohort_of(work.sensitive, np.arange(len(work.grades))).patients)
        yield work


def semantics(work: PrivateWork) -> Semantics:
    """The query function, trained on the public set."""
    path = work.folder / "networks" / f"semantics-{sha([work.digest])[:16]}.safetensors"

    def made() -> Semantics:
        if not path.exists():
            work.say("semantics")
            side, channels = work.public.images.shape[1], 3 if work.public.images.ndim == 4 else 1
            config = SemanticsConfig(
                "semantics", suited(side, channels), work.bins, steps=work.settings.semantics_steps
            )
            place = work.place("semantics")
            replace_file(path, train_semantics(work.public.images, work.public_bins, config, place).file)
            place.path.unlink(missing_ok=True)
        return semantics_from(path.read_bytes(), "public")

    out: Semantics = work.held("semantics", made)
    return out


def asked(work: PrivateWork, seed: int, private: bool = True) -> NDArray[np.float64]:
    """The histogram (c, NS): one draw, which all releases of a seed use; each of their epsilons pays for it."""
    query = work.settings.query if private else replace(work.settings.query, noise=1e-2)
    key = f"histogram, seed {seed}, {'noisy' if private else 'no noise'}"

    def compute() -> Mapping[str, NDArray[np.float64]]:
        patients = cohort_of(_owned(work), work.halves(seed).cohort).patients
        return {"counts": histogram(patients, semantics(work), work.classes, query, SystemEntropy())}

    counts: NDArray[np.float64] = work.arrays(key, compute, key)["counts"]
    return counts


def selected(work: PrivateWork, seed: int, keep: int, private: bool = True) -> tuple[Rows, NDArray[np.int64]]:
    """Public images of the chosen semantics, and the class that each was chosen for."""
    query = replace(work.settings.query, keep=keep)
    return selection(work.public_bins, chosen(asked(work, seed, private), query))


@dataclass(frozen=True, slots=True)
class Release:
    """Which images are meant."""

    method: Method
    seed: int
    epsilon: float = 10.0
    keep: int = 0  # k_2; 0: the settings'
    widths: tuple[int, ...] = ()  # of the diffusion model; (): the settings'
    tuned: bool = True  # False: as pre-trained

    def learnt(self, settings: PrivateSettings) -> str:
        """All that its pre-training depends on, in words."""
        m = self.method
        keep = f", k2 {self.keep or settings.query.keep}, {'noisy' if m.private else 'no noise'}"
        return f"{m.family} {m.public}{keep if m.public == 'selected' else ''}{self._sized()}, seed {self.seed}"

    def key(self, settings: PrivateSettings) -> str:
        """All that its images depend on."""
        how = f"epsilon {self.epsilon:g}" if self.method.private else "no noise"
        return f"{self.learnt(settings)}, {how}" if self.tuned else f"{self.learnt(settings)}, as pre-trained"

    def _sized(self) -> str:
        return f", widths {'-'.join(map(str, self.widths))}" if self.widths else ""


def price(work: PrivateWork, release: Release) -> tuple[SubsampledGaussian, tuple[Gaussian, ...], float]:
    """The job's claim, all claims of the release, and their epsilon by PLD."""
    s = work.settings
    job = s.diffusion_job if release.method.family == "D" else s.adversarial_job
    also: tuple[Gaussian, ...] = ()
    if release.method.public == "selected":
        also = (replace(s.query.claim(), unit=s.unit),)
    q, steps = job.sampling_rate, job.steps
    if not release.method.private:
        return SubsampledGaussian(q, UNSAFE_NO_NOISE, steps, s.unit), (), float("inf")

    def compute() -> dict[str, float]:
        claim = calibrate(release.epsilon, s.delta, q, steps, also, s.unit)
        return {"sigma": claim.noise_multiplier, "epsilon": tight_epsilon([claim, *also], s.delta)}

    what = f"{'query and ' if also else ''}{steps} steps at rate {q:g}, epsilon {release.epsilon:g}"
    found = work.numbers(f"noise of {what}", compute)
    claim = SubsampledGaussian(q, found["sigma"], steps, s.unit)
    return claim, (claim, *also), found["epsilon"]


def released(work: PrivateWork, release: Release) -> tuple[Images, NDArray[np.int64]]:
    """A release: images and their classes, as many of each."""
    s, count = work.settings, len(work.classes)
    labels = np.repeat(np.arange(count, dtype=np.int64), -(-s.synthetic // count))

    def compute() -> Mapping[str, Images]:
        model = _tuned(work, release) if release.tuned else _learnt(work, release)
        return {"images": model.sample(labels, torch_generator(release.seed))}

    key = f"images, {release.key(s)}"
    images: Images = work.arrays(key, compute, f"{release.method.name}: {key}")["images"]
    return images, labels


def _learnt(work: PrivateWork, release: Release) -> GenerativeModel:
    """The model with what it learned from public images."""
    s, m = work.settings, release.method
    if m.public == "none":
        return _built(work, release)
    key = f"pre-trained, {release.learnt(s)}"

    def compute() -> Mapping[str, NDArray[np.float32]]:
        if m.public == "selected":
            rows, labels = selected(work, release.seed, release.keep or s.query.keep, m.private)
        else:
            rows = np.arange(len(work.public_bins), dtype=np.int64)
            labels = np.full(len(rows), -1, np.int64)  # a public name is no class of the cohort
        model, place = _built(work, release), work.place(key)
        steps = s.diffusion_pretraining if m.family == "D" else s.adversarial_pretraining
        model.pretrain(work.public.images[rows], labels, steps, place)
        place.path.unlink(missing_ok=True)
        return {name: tensor.numpy() for name, tensor in model.state().items()}

    state = work.arrays(key, compute, key)
    model = _built(work, release)
    model.restore({name: torch.from_numpy(array) for name, array in state.items()})
    return model


def _tuned(work: PrivateWork, release: Release) -> GenerativeModel:
    """Fine-tuned on the cohort."""
    s = work.settings
    model, (claim, _, _) = _learnt(work, release), price(work, release)
    job = s.diffusion_job if release.method.family == "D" else s.adversarial_job
    sgd = PrivateSgd(
        claim.sampling_rate,
        claim.noise_multiplier,
        claim.steps,
        job.clip,
        s.images_per_patient,
        claim.sampling_rate * s.patients,
    )
    place = work.place(release.key(s))
    run = sha([work.digest, release.key(s)])
    units = _units(work, release.seed)
    train_privately(model.task(), units, sgd, SystemEntropy(), vmap_engine(s.chunk), place=place, run=run)
    place.path.unlink(missing_ok=True)
    return model


def _built(work: PrivateWork, release: Release) -> GenerativeModel:
    s = work.settings
    if release.method.family == "G":
        return Adversarial(replace(s.adversarial, seed=release.seed, device=s.device))
    architecture = s.diffusion.architecture
    if release.widths:
        architecture = widened(architecture, release.widths)
    return Diffusion(replace(s.diffusion, architecture=architecture, seed=release.seed, device=s.device))


def widened(architecture: DiffusionArchitecture, widths: tuple[int, ...]) -> DiffusionArchitecture:
    """The same model, narrower or wider; a head of attention is as wide as a width that holds it."""
    head = min(architecture.head_channels, *widths)
    return replace(architecture, widths=widths, head_channels=head)


def _units(work: PrivateWork, seed: int) -> list[PrivacyUnit]:
    rows = work.halves(seed).cohort
    images, grades = torch.from_numpy(work.sensitive.images), torch.from_numpy(work.grades)
    mine: dict[int, list[int]] = {}
    for row in rows:
        mine.setdefault(int(work.owners[row]), []).append(int(row))
    return [PrivacyUnit((images[mine[owner]], grades[mine[owner]])) for owner in sorted(mine)]


def _owned(work: PrivateWork) -> Samples:
    """The sensitive images, each with the unit that it counts for."""
    return replace(work.sensitive, owners=work.owners)
