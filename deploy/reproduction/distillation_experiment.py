"""One experiment with Privacy Distillation: what is chosen beforehand, what it reads, and its public networks.

Autoencoder, both verifiers and aligner learn from a public part, people of whom nobody is in the cohort. They are
trained once for all seeds, and so is a network of another experiment on the same public part and lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.evaluation.utility import Recipe
from agent.mechanisms.distillation.latent_model import LatentConfig
from agent.mechanisms.distillation.teacher_student import Sampling
from agent.models.diffusion import aligner_training
from agent.models.diffusion import autoencoder as autoencoders
from agent.models.diffusion.aligner import Aligner, aligner_from
from agent.models.diffusion.aligner_training import Labelled, train_aligner_of
from agent.models.diffusion.autoencoder import Autoencoder, autoencoder_from
from agent.models.diffusion.autoencoder_training import AutoencoderTraining, train_autoencoder
from agent.models.diffusion.prompts import Conditions
from agent.models.recognition import verifier_training
from agent.models.recognition.verifier import Verifier, verifier_from
from agent.models.recognition.verifier_training import NEAR, fit_verifier, near_duplicates, second_opinion
from agent.models.training_loop import FileCheckpointStore
from agent.vetting.reference import Vetting
from deploy.phantoms.chest import conditions, label_of
from deploy.reproduction.mimic_cxr import Chests
from deploy.reproduction.result_cache import Kept, Say, locked, sha
from protos.common.durable_files import replace_file

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
_FREE: Final = ("seeds", "device")  # settings on which no number depends
_PUBLIC: Final = ("autoencoder", "most", "public", "side", "near")  # on which the public networks depend


@dataclass(frozen=True, slots=True)
class Lengths:
    """Steps of each training."""

    autoencoder: int
    verifier: int
    aligner: int
    teacher: int
    student: int
    pretraining: int  # of Table 1's rows, on public images; the teacher's own steps follow
    canary: int = 400  # more steps of a teacher, with a planted patient in the cohort


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """Everything that is chosen beforehand."""

    side: int
    autoencoder: str  # a preset
    model: LatentConfig  # its architecture is fitted, and its seed replaced by the experiment's
    steps: Lengths
    sampling: Sampling
    pictures: int  # of each set that is measured: D_synth, D_distill
    recipe: Recipe
    most: int = 1  # findings of a condition; images of more are not learned
    people: tuple[int, int] = (60, 150)  # made-up patients to learn and to test on
    visits: int = 3  # of each of them
    public: int = 700  # made-up people of the public part, two visits each; of a folder, a third of its patients
    moved: float = 0.0  # the paper: 0.1 of those to test on have half of their images learned (section 4.1)
    shares: tuple[float, ...] = (0.1, 0.5, 1.0)  # of the patients to learn, figure 3, rising
    classifiers: int = 2  # of every AUC: its mean over so many initial weights
    false_matches: float = 0.01
    seeds: tuple[int, ...] = (0, 1, 2)
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what is no experiment."""
        if not (self.seeds and self.pictures >= 1 and self.classifiers >= 1 and self.shares):
            raise ValueError("an experiment has seeds, images, classifiers and shares of the patients")
        if list(self.shares) != sorted(set(self.shares)) or not 0.0 < self.shares[0] < self.shares[-1] == 1.0:
            raise ValueError("shares of the patients rise to 1")

    @property
    def conditions(self) -> Conditions:
        """Of so many findings; public."""
        return Conditions(tuple(label_of(some) for some in conditions(self.most)))


@dataclass(frozen=True, slots=True, eq=False)
class Radiographs:
    """What an experiment reads."""

    public: Chests
    cohorts: Mapping[int, Chests]  # by seed; parts "train" and "test", nobody of the public part
    name: str


class DistillWork(Kept):
    """The networks, models and images of one experiment."""

    def __init__(self, sources: Radiographs, settings: DistillSettings, folder: Any, say: Say) -> None:
        """Use :func:`opened`."""
        told = {name: value for name, value in asdict(settings).items() if name not in _FREE}
        told |= {"model": settings.model.fingerprint, "near": list(NEAR)}
        super().__init__(folder, sha([sources.name, _digest(sources.public), told]), say)
        self.sources, self.settings = sources, settings
        self.conditions = settings.conditions
        steps = asdict(settings.steps)
        own = [told[name] for name in _PUBLIC] + [steps[name] for name in ("autoencoder", "verifier", "aligner")]
        self.public_digest = sha([_digest(sources.public), own])
        self.cohorts = {seed: _digest(chests)[:12] for seed, chests in sources.cohorts.items()}

    def keyed(self, key: str, seed: int) -> str:
        """A key of one seed and its cohort: another seed's numbers stay when more seeds are asked for."""
        return f"{key}, seed {seed}, cohort {self.cohorts[seed]}"

    def labels_of(self, chests: Chests) -> Labels:
        """(n,) places in the conditions' names; -1: it shows another set of findings, and is left out."""
        names = self.conditions.names
        return np.array([names.index(one) if one in names else -1 for one in chests.labels], np.int64)

    def place(self, key: str) -> FileCheckpointStore:
        """Of a training's checkpoint."""
        return FileCheckpointStore(self.folder / "networks" / f"{sha([self.digest, key])[:32]}.checkpoint")

    def network(self, name: str, make: Any) -> bytes:
        """A public network's file, made once; ``make`` is given the folder of its checkpoint."""
        folder = self.folder / "public" / f"{name}-{self.public_digest[:16]}"
        path = folder / f"{name}.safetensors"
        if not path.exists():
            self.say(f"public {name}")
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, make(folder))
        return path.read_bytes()


@contextmanager
def opened(sources: Radiographs, settings: DistillSettings, folder: Any, say: Say) -> Iterator[DistillWork]:
    """Work in a folder that nobody else works in meanwhile.

    Raises:
        BusyError: somebody does.
        ValueError: a seed has no cohort, or a cohort nobody to learn or to test on.
    """
    for seed in settings.seeds:
        if seed not in sources.cohorts or not all(len(sources.cohorts[seed].rows(p)) for p in ("train", "test")):
            raise ValueError("every seed has a cohort with patients to learn and to test on")
    with locked(folder):
        yield DistillWork(sources, settings, folder, say)


# ------------------------------------------------------------------ public networks


def autoencoder(work: DistillWork) -> Autoencoder:
    """Of the public images."""

    def make(folder: Any) -> bytes:
        s = work.settings
        config = AutoencoderTraining(
            autoencoders.PRESETS[s.autoencoder],
            s.steps.autoencoder,
            adversarial=0.0 if s.side <= 32 else 0.1,  # so few pixels have no texture to invent
            device=s.device,
            precision=_precision(s.device),
        )
        return train_autoencoder(work.sources.public.images, config, folder)

    found: Autoencoder = work.held(
        "autoencoder", lambda: autoencoder_from(work.network("autoencoder", make), "public").to(work.settings.device)
    )
    return found


def verifier(work: DistillWork, unseen: bool = False) -> Verifier:
    """The filter's, or the other, which measures: another seed, other people held out, another trunk."""
    s, name = work.settings, "unseen" if unseen else "verifier"

    def make(folder: Any) -> bytes:
        config = replace(verifier_training.suited("filter", s.side, 1, s.steps.verifier), device=s.device)
        config = second_opinion(config) if unseen else config
        # what a latent model gives back has been through the autoencoder: real pairs alone do not show that
        near = None if unseen else near_duplicates(autoencoder(work))
        public = work.sources.public
        several = np.bincount(public.owners)[public.owners] >= 2
        return fit_verifier(public.images[several], public.owners[several], config, folder, near=near).file

    found: Verifier = work.held(name, lambda: verifier_from(work.network(name, make), "public").to(s.device))
    return found


def aligner(work: DistillWork) -> Aligner:
    """Of the public images that show a condition."""

    def make(folder: Any) -> bytes:
        public, labels = work.sources.public, work.labels_of(work.sources.public)
        config = aligner_training.suited(work.settings.side, 1, work.settings.steps.aligner)
        config = replace(config, device=work.settings.device)
        labelled = Labelled(public.images, labels, public.owners)
        return train_aligner_of(labelled, work.conditions, config, folder)

    found: Aligner = work.held(
        "aligner", lambda: aligner_from(work.network("aligner", make), "public").to(work.settings.device)
    )
    return found


def vetting(work: DistillWork) -> Vetting:
    """Both verifiers, at the settings' budget."""
    s = work.settings
    return Vetting(verifier(work), verifier(work, unseen=True), false_matches=s.false_matches, device=s.device)


def _precision(device: str) -> Any:
    return "float32" if device == "cpu" else "bfloat16"


def _digest(chests: Chests) -> str:
    """SHA-256 of images and what is known of them."""
    found = hashlib.sha256(f"{chests.images.shape}".encode())
    for array in (chests.images, chests.owners, chests.findings, chests.part):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
