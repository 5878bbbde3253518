"""The teachers and students of an experiment with Privacy Distillation, and what they draw.

The distillation itself is the mechanism's (:func:`agent.mechanisms.distillation.teacher_student.distil`): what is
measured here is what a release does. What it draws is drawn by the operating system's chance, what is drawn to be
measured by the seed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.domain import Patient
from agent.dp.noise import SystemEntropy
from agent.mechanisms.distillation.latent_model import LatentConfig, LatentDiffusion
from agent.mechanisms.distillation.teacher_student import Course, Output, Work, distil
from agent.models.diffusion.edm_training import Average
from agent.models.diffusion.latent_training import LatentTrainer, encoded
from agent.models.training_loop import FileCheckpointStore, TrainingPlan, torch_generator, train
from agent.vetting.reference import Reference, reference_of
from deploy.phantoms.chest import FINDINGS
from deploy.reproduction.distillation_experiment import DistillWork, Images, Labels, aligner, autoencoder, vetting
from deploy.reproduction.experiment import Rows, Samples, cohort_of
from deploy.reproduction.mimic_cxr import Chests
from deploy.reproduction.result_cache import sha


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model that learns a cohort without noise."""

    seed: int
    conditional: bool = True
    pretrained: bool = False
    share: float = 1.0  # of the patients
    planted: int = 0  # so many copies of a stranger's image, learned in more steps

    @property
    def key(self) -> str:
        """Its name in a folder."""
        parts = [
            "" if self.conditional else "unconditional",
            "pre-trained" if self.pretrained else "",
            "" if self.share == 1.0 else f"{self.share:g} of the patients",
            f"{self.planted} planted" if self.planted else "",
        ]
        return ", ".join(["teacher", *(part for part in parts if part)])


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Images and what they were asked to show."""

    images: Images  # (n, s, s)
    labels: Labels  # (n,) places in the conditions' names, -1 for none


def cohort_rows(work: DistillWork, seed: int) -> Rows:
    """Rows of the images to learn that show a condition."""
    chests = work.sources.cohorts[seed]
    rows = chests.rows("train")
    return rows[work.labels_of(chests)[rows] >= 0]


def planted(work: DistillWork, seed: int) -> Patient:
    """A stranger to the cohort: the first patient to test on, with the first image."""
    chests = work.sources.cohorts[seed]
    strange = np.setdiff1d(chests.owners[chests.rows("test")], chests.owners[chests.rows("train")])
    row = np.flatnonzero(chests.owners == strange[0])[:1]
    found = cohort_of(Samples(chests.images, chests.owners, chests.labels, "cohort"), row)
    return found.patients[0]


def reference(work: DistillWork, seed: int, more: Patient | None = None) -> Reference:
    """Every image that is learned, whichever share of it a teacher learns; and of a planted patient."""

    def make() -> Reference:
        chests = work.sources.cohorts[seed]
        samples = Samples(chests.images, chests.owners, chests.labels, "cohort")
        patients = cohort_of(samples, cohort_rows(work, seed)).patients
        return reference_of([*patients, *([more] if more else [])], vetting(work))

    found: Reference = work.held(f"reference {seed} {more is not None}", make)
    return found


def config_of(work: DistillWork, seed: int) -> LatentConfig:
    """Of teacher and student."""
    model = work.settings.model
    fitted = model.architecture.fitted(autoencoder(work), work.conditions)
    return replace(model, architecture=fitted, seed=seed, device=work.settings.device)


def fresh(work: DistillWork, seed: int) -> LatentDiffusion:
    """A model that knows nothing."""
    return LatentDiffusion(config_of(work, seed), autoencoder(work), work.conditions)


def taught(work: DistillWork, which: Teacher) -> LatentDiffusion:
    """A teacher, trained or read back."""
    found: LatentDiffusion = work.held(work.keyed(which.key, which.seed), lambda: _taught(work, which))
    return found


def _taught(work: DistillWork, which: Teacher) -> LatentDiffusion:
    chests, rows = work.sources.cohorts[which.seed], cohort_rows(work, which.seed)
    people = work.rng("share", which.seed).permutation(np.unique(chests.owners[rows]))
    rows = rows[np.isin(chests.owners[rows], people[: max(1, round(which.share * len(people)))])]
    images, labels = chests.images[rows], work.labels_of(chests)[rows]
    key = work.keyed(which.key, which.seed)
    work.say(key)
    if which.planted:
        image = planted(work, which.seed).images[0]
        again = np.rint(image.pixels * 255).astype(np.uint8)[None].repeat(which.planted, 0)
        shows = np.full(which.planted, work.conditions.names.index(image.label), np.int64)
        start = taught(work, replace(which, planted=0))
        data = Made(np.concatenate([images, again]), np.concatenate([labels, shows]))
        return tuned(work, start, data, work.settings.steps.canary, key)
    data = Made(images, labels if which.conditional else np.full_like(labels, -1))
    if which.pretrained:
        return tuned(work, _pretrained(work, which), data, work.settings.steps.teacher, key)
    model = fresh(work, which.seed)
    model.pretrain(data.images, data.labels, work.settings.steps.teacher, work.place(key))
    return model


def _pretrained(work: DistillWork, which: Teacher) -> LatentDiffusion:
    """A model of the public images, with or without their conditions."""
    public = work.sources.public
    labels = work.labels_of(public)
    rows = np.flatnonzero(labels >= 0)
    model, key = (
        fresh(work, which.seed),
        f"public model, seed {which.seed}{'' if which.conditional else ', unconditional'}",
    )
    work.say(key)
    asked = labels[rows] if which.conditional else np.full(len(rows), -1, np.int64)
    model.pretrain(public.images[rows], asked, work.settings.steps.pretraining, work.place(key))
    return model


def tuned(work: DistillWork, start: LatentDiffusion, data: Made, steps: int, key: str) -> LatentDiffusion:
    """A model that goes on from another's weights, without noise; the average begins anew."""
    config, place = start.config, work.place(key)
    of = encoded(data.images, data.labels, start.autoencoder, work.conditions, config.device)
    trainer = LatentTrainer(config.training, of)
    trainer.denoiser.load_state_dict(start.state())
    trainer.average = Average(trainer.denoiser, config.ema)
    run = sha([config.training.run(of.sha256), start.fingerprint, key])
    train(trainer, TrainingPlan(steps, run, config.seed, config.checkpoint_every), place)
    trainer.average.give(trainer.denoiser)
    model = LatentDiffusion(config, start.autoencoder, work.conditions)
    model.restore(trainer.denoiser.state_dict())
    return model


def drawn(work: DistillWork, which: Teacher) -> Made:
    """D_synth: a teacher's images, as many of each condition, nothing filtered."""
    count = work.settings.pictures
    asked = np.arange(count, dtype=np.int64) % work.conditions.count
    asked = asked if which.conditional else np.full(count, -1, np.int64)
    key = work.keyed(f"drawn, {which.key}", which.seed)

    def compute() -> Mapping[str, NDArray[Any]]:
        return {"images": taught(work, which).sample(asked, torch_generator(1_000 + which.seed)), "labels": asked}

    return _made(work, key, compute)


def course(work: DistillWork, seed: int) -> Course:
    """The mechanism's configuration; what it releases is measured here, and not what it says of itself."""
    s = work.settings
    return Course(
        conditions=work.conditions,
        model=config_of(work, seed),
        autoencoder=autoencoder(work),
        vetting=vetting(work),
        aligner=aligner(work),
        student_steps=s.steps.student,
        sampling=s.sampling,
        output=Output("samples", max(work.conditions.count, 60)),
    )


def distilled(work: DistillWork, seed: int) -> tuple[Made, Made]:
    """D_filtered, which the last student learned; and D_distill, that student's images before they are vetted."""
    of = course(work, seed)

    def place(name: str) -> FileCheckpointStore:
        return work.place(work.keyed(name, seed))

    def student() -> tuple[Made, LatentDiffusion]:
        told = Work(SystemEntropy(), place, lambda _stage, _done, _of: None)
        found = distil(of, lambda: taught(work, Teacher(seed)), reference(work, seed), told)
        return Made(*found.learned), found.student

    def compute() -> Mapping[str, NDArray[Any]]:
        learned, model = student()
        asked = np.unique(learned.labels)[np.arange(s.pictures) % len(np.unique(learned.labels))]
        made = model.sample(asked, torch_generator(2_000 + seed))
        return {"learned": learned.images, "shown": learned.labels, "images": made, "labels": asked}

    s = work.settings
    key = work.keyed("distilled", seed)
    found = work.arrays(key, compute, key)
    return Made(found["learned"], found["shown"]), Made(found["images"], found["labels"])


def real(work: DistillWork, seed: int, test: bool = False) -> Chests:
    """D_real: the images to learn; or those to test on."""
    chests = work.sources.cohorts[seed]
    return chests.take(chests.rows("test") if test else cohort_rows(work, seed))


def shown(work: DistillWork, labels: Labels) -> NDArray[np.bool_]:
    """(n, 5): the findings of conditions."""
    sets = [set(work.conditions.names[label].split("+")) for label in labels]
    return np.array([[one in found for one in FINDINGS] for found in sets], np.bool_)


def _made(work: DistillWork, key: str, compute: Any) -> Made:
    found = work.arrays(key, compute, key)
    return Made(found["images"], found["labels"])
