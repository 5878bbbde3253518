"""Train an aligner on public or synthetic images with labels, and judge it on people that it never saw.

CLIP's symmetric contrast (Radford et al. 2021, Fig. 3) over a batch of images and their prompts. CLIP takes every
other prompt of the batch for wrong; with a few conditions most batches hold the same one twice. So an image's target
is spread over all prompts of its own condition, whatever their template (supervised contrast, Khosla et al. 2020).

Targets spread over prompts that share a finding, by Jaccard's index, were measured too: on phantoms of chests of up
to two findings the right condition was then found less often (0.86 against 0.90), since half of what is drawn to two
findings is drawn to each of the wrong ones. Nor are they needed: with targets as here, images lie nearer to a
prompt the more findings they share with it (mean cosine -0.14 at none, 0.30, 0.45, and 0.84 at all).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import log_softmax

from agent.intervals import Proportion, bounds
from agent.models.augmentations import IDENTITY, Pool, Views, eased, run_digest, view
from agent.models.diffusion.aligner import AlignerArchitecture, AlignerNet, AlignerQuality, aligner_bytes
from agent.models.diffusion.prompts import Conditions
from agent.models.features.trunk import TrunkArchitecture
from agent.models.training_loop import LossTrainer, TrainingPlan, TrainingProgress, seeded, train
from protos.common.errors import TrainingError

_MOST_WRITTEN: Final = 60_000  # characters of conditions and figures: a file's header holds 65,536
_SMALL: Final = 64  # pixels a side: up to it a narrow trunk is enough
_LEFT: Final = 8  # pixels a side of the last map, or more
_CELLS: Final = 4  # a side, that are read from it
_AT_ONCE: Final = 256


class TooFewPairsError(TrainingError, ValueError):
    """A condition lacks public images to train on, or to test on, so its quality is unknown."""


@dataclass(frozen=True, slots=True)
class AlignmentConfig:
    """How one aligner is trained."""

    name: str
    architecture: AlignerArchitecture
    steps: int = 1_000
    batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    seed: int = 0
    held_out: float = 0.25  # of the people of each condition: to judge by
    views: Views = IDENTITY
    checkpoint_every: int = 500
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        counts = (self.steps, self.batch, self.checkpoint_every)
        if not all(type(c) is int and c >= 1 for c in counts) or self.batch < 2:
            raise ValueError("steps and sizes are whole numbers, and a batch has two images at least")
        if not (0 < self.learning_rate < 1 and 0 <= self.weight_decay < 1 and 0 < self.held_out < 1):
            raise ValueError("rates and the held-out share lie between 0 and 1")


def suited(side: int, channels: int, steps: int, name: str = "aligner") -> AlignmentConfig:
    """An aligner for images of this size, as it proved itself on phantoms of chests of 32 pixels.

    With six conditions, 150 steps over 600 images found that of 0.91 to 0.95 of the held-out ones, and 300 steps
    over 1200 images of 0.96 to 0.97 (three seeds). Above 32 pixels nothing was measured.

    Raises:
        ValueError: no trunk has this side or these channels.
    """
    small, depth = side <= _SMALL, 1
    while side % (1 << depth) == 0 and side >> depth >= _LEFT and depth < 8:
        depth += 1
    trunk = TrunkArchitecture(side, channels, width=16 if small else 32, depth=depth)
    return AlignmentConfig(name, AlignerArchitecture(trunk, grid=min(_CELLS, trunk.left)), steps)


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """Public or synthetic images with their conditions, never the cohort (P6)."""

    images: NDArray[np.uint8]  # (n, s, s) or (n, s, s, 3)
    labels: NDArray[np.int64]  # (n,): places of names; -1: of no condition, and left out
    owners: NDArray[np.int64]  # (n,): whose each is; who is held out is not learned from

    def __post_init__(self) -> None:
        """One label and one owner for each image."""
        if not self.labels.shape == self.owners.shape == (len(self.images),):
            raise ValueError("a label and an owner is a whole number, one for each image")
        if not all(np.issubdtype(a.dtype, np.integer) for a in (self.labels, self.owners)):
            raise ValueError("a label and an owner is a whole number, one for each image")


def train_aligner_of(
    labelled: Labelled,
    conditions: Conditions,
    config: AlignmentConfig,
    folder: Path,
    say: Callable[[TrainingProgress], None] = lambda _: None,
) -> bytes:
    """Train, and judge on people that it never saw; the file says what it is worth, however little that is.

    Args:
        labelled: public or synthetic images; every condition of several people, to learn from and to judge by.
        conditions: what is asked for; the aligner answers for these and no others.
        config: of the run.
        folder: of its checkpoint; a run that was killed goes on from there.
        say: told of the progress.
    Returns:
        The file that :func:`agent.models.diffusion.aligner.aligner_from` reads;
        :meth:`agent.models.diffusion.aligner.Aligner.demand` refuses a poor one.
    Raises:
        ValueError: images or labels of another shape or type, images that do not differ, an unknown label.
        TooFewPairsError: a condition has too few people.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    learn, judged = split(labelled, conditions, config)
    trunk = config.architecture.trunk
    pool = Pool(labelled.images, trunk.side, trunk.channels, torch.device(config.device))
    trainer = _Trainer(pool, torch.from_numpy(labelled.labels.astype(np.int64)), learn, conditions, config)
    told = {"conditions": conditions.digest, **asdict(config), "device": ""}  # the same run on any device
    digest = run_digest(told, labelled.images, labelled.labels, labelled.owners)
    train(trainer, TrainingPlan(config.steps, digest, config.seed, config.checkpoint_every), folder, say)
    fitness = judge(trainer.net, pool, labelled, judged, conditions)
    notes = {"run": digest, "seed": config.seed, "steps": config.steps}
    return aligner_bytes(config.name, trainer.net, conditions, fitness, notes)


def split(
    labelled: Labelled, conditions: Conditions, config: AlignmentConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of the images to learn from and to judge by; nobody is in both, and every condition is.

    Raises:
        ValueError: a label that is no condition; one condition only, or too many.
        TooFewPairsError: a condition has too few people for both.
    """
    labels, owners = labelled.labels, labelled.owners
    if not len(labels) or not -1 <= labels.min() <= labels.max() < conditions.count:
        raise ValueError("a label is none of the conditions, or there is no image")
    written = len(json.dumps(conditions.told(), separators=(",", ":"))) + 7 * len(conditions.findings)
    if not written <= _MOST_WRITTEN:
        raise ValueError("the conditions have too many findings for one aligner: shorten their names")
    if conditions.count < 2:
        raise ValueError("an aligner tells conditions apart: there are two at least")
    rng = np.random.Generator(np.random.Philox(config.seed))
    held: set[int] = set()
    learned: set[int] = set()
    # the rarest condition first: its people are the hardest to share out
    for label in np.argsort(np.bincount(labels[labels >= 0], minlength=conditions.count), kind="stable"):
        people = rng.permutation(np.unique(owners[labels == label]))
        wanted = max(1, round(config.held_out * len(people)))
        free = [int(who) for who in people if who not in held and who not in learned]
        more = max(0, wanted - sum(int(who) in held for who in people))
        held |= set(free[:more])
        learned |= set(free[more:])
    shown, apart = labels >= 0, np.isin(owners, sorted(held))
    learn, judged = np.flatnonzero(shown & ~apart), np.flatnonzero(shown & apart)
    if not all(len(np.unique(labels[part])) == conditions.count for part in (learn, judged)):
        raise TooFewPairsError("every condition needs public images of several people: add some, or leave it out")
    return learn, judged


def contrast(images: Tensor, prompts: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    """CLIP's symmetric loss with targets that are spread: a number.

    Args:
        images: (n, d) of unit length.
        prompts: (n, d) of unit length: each image's own.
        labels: (n,) the condition of both: all prompts of an image's own are right.
        temperature: what cosines are divided by.
    """
    same = (labels[:, None] == labels).to(images)
    target = same / same.sum(dim=1, keepdim=True)
    logits = images @ prompts.T / temperature
    # which images are right for a prompt, and which prompts for an image, is one symmetric matrix
    both = target * (log_softmax(logits, dim=1) + log_softmax(logits.T, dim=1))
    return -both.sum(dim=1).mean() / 2


class _Trainer(LossTrainer):
    """One contrast of a batch of images with their prompts."""

    def __init__(
        self, pool: Pool, labels: Tensor, learn: NDArray[np.int64], conditions: Conditions, config: AlignmentConfig
    ) -> None:
        self.pool, self.labels, self.conditions, self.config = pool, labels, conditions, config
        self.learn = torch.from_numpy(learn)
        with seeded(config.seed):
            net = AlignerNet(config.architecture, conditions.vocabulary.size, conditions.length)
        self.net = net.to(pool.device)
        rate, decay = config.learning_rate, config.weight_decay
        adam = torch.optim.AdamW(self.net.parameters(), rate, weight_decay=decay)
        super().__init__({"net": self.net}, {"optimizer": adam})
        self.clipped = self.net

    def rate(self) -> float:
        return self.config.learning_rate * eased(self.done, self.config.steps)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        chosen = self.learn[torch.randperm(len(self.learn), generator=generator)[: self.config.batch]]
        seen = view(self.pool.take(chosen), self.config.views, generator)
        labels = self.labels[chosen].to(self.pool.device)
        tokens = self.conditions.tokens(labels, generator)
        loss = contrast(self.net.images(seen), self.net.prompts(tokens), labels, self.net.temperature())
        return loss, {"contrast": float(loss.detach())}


def judge(
    net: AlignerNet, pool: Pool, labelled: Labelled, places: NDArray[np.int64], conditions: Conditions
) -> AlignerQuality:
    """The aligner's quality on held-out images, with the first template, as reranking uses it.

    A finding's AUC is that of the mean cosine with the conditions that show it less the mean with those that do not;
    0.5 where every condition or none of the images differs in it.
    """
    with torch.no_grad():
        parts = np.array_split(places, -(-len(places) // _AT_ONCE))
        seen = torch.cat([net.images(pool.take(torch.from_numpy(part))).cpu() for part in parts])
        tokens = conditions.tokens(torch.arange(conditions.count)).to(pool.device)
        cosines = (seen @ net.prompts(tokens).cpu().T).double().numpy()
    labels = labelled.labels[places]
    people = len(np.unique(labelled.owners[places]))
    right = float((cosines.argmax(axis=1) == labels).mean())
    low, high = bounds(right * people, people)
    own = np.eye(conditions.count, dtype=bool)[labels]
    return AlignerQuality(
        Proportion(right, min(low, right), max(high, right)),  # but for rounding
        float(np.bincount(labels).max() / len(labels)),
        _cosine(cosines[own]),
        _cosine(cosines[~own]),
        tuple(
            _auc(cosines, labels, [finding in part for part in conditions.parts]) for finding in conditions.findings
        ),
    )


def _cosine(values: NDArray[np.float64]) -> float:
    return float(np.clip(values.mean(), -1.0, 1.0))  # but for rounding


def _auc(cosines: NDArray[np.float64], labels: NDArray[np.int64], showing: list[bool]) -> float:
    """The share of pairs of images, one that shows the finding and one that does not, in the right order."""
    shows = np.array(showing)
    there = shows[labels]
    if shows.all() or there.all() or not there.any():
        return 0.5
    leaning = cosines[:, shows].mean(axis=1) - cosines[:, ~shows].mean(axis=1)
    apart = leaning[there][:, None] - leaning[~there]
    return round(float((apart > 0).mean() + 0.5 * (apart == 0).mean()), 4)
