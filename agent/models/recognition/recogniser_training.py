"""Train a recogniser on public or made people, and calibrate its threshold on people it never saw.

Identities are split three ways: those it learns, those that settle the threshold, those that it is judged by. ArcFace
(Deng et al. 2019) over the first part, in batches of P people with K images each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.intervals import Proportion, bounds
from agent.models.augmentations import IDENTITY, Pool, Views, eased, run_digest, view
from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition import recogniser
from agent.models.training_loop import LossTrainer, TrainingPlan, TrainingProgress, seeded, train
from protos.common.errors import TrainingError

ENOUGH = 3.0  # impostor pairs expected at the stated rate: with fewer, the threshold would be one pair's accident
COMPARED = 3_000  # images, at most, whose pairs are all compared
_SMALL = 64  # pixels a side: up to it a narrow trunk is enough, and learns at a higher rate
_CELLS = 8  # a side, that are read from the last map
Seen = tuple[Tensor, NDArray[np.int64]]  # (n, d) unit vectors, and (n,) whose each is


@dataclass(frozen=True, slots=True)
class RecognitionConfig:
    """How one recogniser is trained. Two of other seeds and architectures are two opinions."""

    name: str
    architecture: recogniser.RecogniserArchitecture
    steps: int = 2_000
    people: int = 16  # P: identities of a batch
    pictures: int = 4  # K: of each
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    margin: float = 0.3  # rad; grows from 0 over the first fifth of the steps
    scale: float = 16.0
    seed: int = 0
    false_match_rate: float = 1e-2  # at which the threshold is set
    held_out: float = 0.25  # of the identities: for the threshold; and as many again to judge it
    views: Views = IDENTITY
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        counts = (self.steps, self.people, self.pictures, self.checkpoint_every)
        if not all(type(c) is int and c >= 1 for c in counts) or self.people < 2:
            raise ValueError("steps, images and people are whole numbers, and two people at least")
        if not (0 < self.learning_rate < 1 and 0 <= self.weight_decay < 1 and 0 < self.scale <= 256):
            raise ValueError("rates lie between 0 and 1, a scale between 0 and 256")
        if not (0 <= self.margin < 1.5 and 0 < self.false_match_rate < 0.5 and 0 < self.held_out < 0.5):
            raise ValueError("a margin is below 1.5 rad, a false match rate and the held-out share below a half")


def suited(name: str, side: int, channels: int, steps: int) -> RecognitionConfig:
    """A recogniser for images of this size, as it proved itself on phantoms of eyes of 32 and 64 pixels.

    It is narrow, goes down to about eight pixels a side and keeps them apart: where a vessel lies is identity. A
    batch has two images each of many people rather than many of few. Above 64 pixels nothing was measured.

    Raises:
        ValueError: no trunk has this side or these channels.
    """
    small, depth = side <= _SMALL, 1
    while side % (1 << depth) == 0 and side >> depth >= _CELLS and depth < 8:
        depth += 1
    trunk = TrunkArchitecture(side, channels, width=8 if small else 32, depth=depth)
    architecture = recogniser.RecogniserArchitecture(trunk, grid=min(_CELLS, trunk.left))
    rate = 5e-3 if small else 1e-3
    return RecognitionConfig(name, architecture, steps, people=32, pictures=2, learning_rate=rate)


def second_opinion(config: RecognitionConfig) -> RecognitionConfig:
    """Another recogniser for the same people: another seed, and so another split, and another trunk and grid.

    It has one level less, where there is more than one, and is about half as wide again.
    """
    a = config.architecture
    depth = max(1, a.trunk.depth - 1)
    width = a.trunk.width + 8 * max(1, a.trunk.width // 16)
    trunk = replace(a.trunk, depth=depth, width=width, most=max(a.trunk.most, width))
    other = recogniser.RecogniserArchitecture(trunk, a.embedding, min(a.grid + 1, trunk.left))
    return replace(config, name=f"{config.name[:30]}-b", architecture=other, seed=config.seed + 1)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRecogniser:
    """A recogniser's file, with its threshold and judgement."""

    file: bytes = field(repr=False)
    calibration: recogniser.Calibration

    @property
    def judged(self) -> recogniser.RecogniserQuality:
        """How well it knows people that neither training nor the threshold saw."""
        return self.calibration.judged


class TooFewPeopleError(TrainingError, ValueError):
    """The public set cannot train and calibrate a recogniser as asked."""


def train_recogniser(
    images: NDArray[np.uint8],
    identities: NDArray[np.int64],
    config: RecognitionConfig,
    folder: Path,
    say: Callable[[TrainingProgress], None] = lambda _: None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
) -> TrainedRecogniser:
    """Train, calibrate, judge, and give nothing that may not judge a release.

    Args:
        images: (n, h, w) or (n, h, w, 3) of people for whom this may be done: public or made, never the cohort.
        identities: (n,) who is on each.
        config: of the run.
        folder: of its checkpoint, which stays whatever comes of it; a run that was killed goes on from there.
        say: told of the progress.
        device: where the network is trained.
    Raises:
        ValueError: images or identities of another shape or type, or images that do not differ.
        TooFewPeopleError: somebody has one image, or too few people to calibrate at the stated rate.
        RecogniserError: it recognises too few of the people whom it never saw
            (:meth:`agent.models.recognition.recogniser.Calibration.demand`).
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    trained = fit_recogniser(images, identities, config, folder, say, device)
    trained.calibration.demand()
    return trained


def fit_recogniser(
    images: NDArray[np.uint8],
    identities: NDArray[np.int64],
    config: RecognitionConfig,
    folder: Path,
    say: Callable[[TrainingProgress], None] = lambda _: None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
) -> TrainedRecogniser:
    """The same however little it knows, for an experiment that says how much that is; AnonFACES refuses the rest.

    Args, raises: as :func:`train_recogniser`; ``RecogniserError`` only where there is no threshold at all.
    """
    parts = split(images, identities, config)
    trunk = config.architecture.trunk
    pool = Pool(images, trunk.side, trunk.channels, device)
    trainer = _Trainer(pool, identities, parts[0], config)
    digest = run_digest(asdict(config), images, identities)
    train(trainer, TrainingPlan(config.steps, digest, config.seed, config.checkpoint_every), folder, say)
    settled, unseen = ((_embedded(trainer.net, pool, part), identities[part]) for part in parts[1:])
    calibration = calibrated(settled, unseen, config.false_match_rate)
    told = {"run": digest, "seed": config.seed, "steps": config.steps}
    return TrainedRecogniser(recogniser.recogniser_bytes(config.name, trainer.net, calibration, told), calibration)


def split(
    images: NDArray[np.uint8], identities: NDArray[np.int64], config: RecognitionConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Places of the images to learn, to calibrate and to judge by; nobody is in two of them.

    Raises:
        ValueError: not one whole number for each image.
        TooFewPeopleError: somebody has one image, or there are too few people for the rate.
    """
    too_few = "too few people to train, calibrate and judge"
    learn, settle, judge_by = divided(len(images), identities, config.held_out, config.seed, (2, too_few))
    if not _pairs(identities[settle])[1] * config.false_match_rate >= ENOUGH:
        raise TooFewPeopleError("too few people to calibrate at this false match rate: add people, or raise the rate")
    return learn, settle, judge_by


def divided(
    count: int, identities: NDArray[np.int64], share: float, seed: int, fewest: tuple[int, str]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Places of images to learn, to settle by and to judge by; nobody is in two of them.

    Args:
        count: of the images.
        identities: (count,) who is on each.
        share: of the people, in each of the last two.
        seed: of the division.
        fewest: people in each of the last two, and what a refusal says.
    Raises:
        ValueError: not one whole number for each image.
        TooFewPeopleError: somebody has one image, or there are too few people.
    """
    if identities.shape != (count,) or not np.issubdtype(identities.dtype, np.integer):
        raise ValueError("an identity is a whole number, one for each image")
    people, counts = np.unique(identities, return_counts=True)
    if not len(people) or not counts.min() >= 2:
        raise TooFewPeopleError("every person needs two or more images")
    held = round(share * len(people))
    if not (held >= fewest[0] and len(people) - 2 * held >= 2):
        raise TooFewPeopleError(fewest[1])
    order = np.random.Generator(np.random.Philox(seed)).permutation(people)
    chosen = (order[2 * held :], order[held : 2 * held], order[:held])
    learn, settle, judge_by = (np.flatnonzero(np.isin(identities, some)) for some in chosen)
    return learn, settle, judge_by


def _pairs(identities: NDArray[np.int64]) -> tuple[int, int]:
    """Genuine and impostor pairs among the images that are compared."""
    counts = np.unique(identities[:COMPARED], return_counts=True)[1]
    n = int(counts.sum())
    genuine = int((counts * (counts - 1) // 2).sum())
    return genuine, n * (n - 1) // 2 - genuine


class _Trainer(LossTrainer):
    """ArcFace over P x K batches."""

    def __init__(
        self, pool: Pool, identities: NDArray[np.int64], learn: NDArray[np.int64], config: RecognitionConfig
    ) -> None:
        self.pool, self.config = pool, config
        self.places = [torch.from_numpy(learn[identities[learn] == who]) for who in np.unique(identities[learn])]
        with seeded(config.seed):
            net = recogniser.IdentityNet(config.architecture)
            head = recogniser.AngularMargin(config.architecture.embedding, len(self.places), config.scale)
        self.net, self.head = net.to(pool.device), head.to(pool.device)
        both = [*self.net.parameters(), *self.head.parameters()]
        adam = torch.optim.AdamW(both, config.learning_rate, weight_decay=config.weight_decay)
        super().__init__({"net": self.net, "head": self.head}, {"optimizer": adam})
        self.clipped = self.net

    def rate(self) -> float:
        return self.config.learning_rate * eased(self.done, self.config.steps)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        classes = torch.randperm(len(self.places), generator=generator)[: self.config.people]
        chosen = torch.cat([self._some(self.places[int(c)], generator) for c in classes])
        labels = classes.repeat_interleave(self.config.pictures).to(self.pool.device)
        images = view(self.pool.take(chosen), self.config.views, generator)
        margin = self.config.margin * min(1.0, 5.0 * self.done / self.config.steps)
        loss: Tensor = self.head(self.net(images), labels, margin)
        return loss, {"arcface": float(loss.detach())}

    def _some(self, places: Tensor, generator: torch.Generator) -> Tensor:
        k = self.config.pictures
        order = torch.randperm(len(places), generator=generator)
        return places[order.repeat(-(-k // len(places)))[:k]]


def _embedded(net: recogniser.IdentityNet, pool: Pool, places: NDArray[np.int64]) -> Tensor:
    """(n, d) unit vectors."""
    with torch.no_grad():
        parts = np.array_split(places, -(-len(places) // 64))
        batches = [net(pool.take(torch.from_numpy(part))).float().cpu() for part in parts]
    return torch.nn.functional.normalize(torch.cat(batches), dim=1)


def compared(vectors: Tensor, identities: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sorted distances of all genuine and all impostor pairs; of ``COMPARED`` images at most."""
    who = identities[:COMPARED]
    apart = recogniser.distances(vectors[:COMPARED], vectors[:COMPARED]).numpy()
    upper = np.triu(np.ones(apart.shape, bool), 1)
    same = who[:, None] == who
    return np.sort(apart[upper & same]), np.sort(apart[upper & ~same])


def calibrated(settled: Seen, unseen: Seen, rate: float) -> recogniser.Calibration:
    """The largest threshold at which no more than ``rate`` of the impostor pairs lie below it, and how good it is.

    Args:
        settled: people whom training did not see: they settle the threshold.
        unseen: people of neither training nor these: they judge it.
        rate: false match rate, in (0, 0.5).
    Raises:
        TooFewPeopleError: too few impostor pairs for the rate.
        RecogniserError: vectors that do not tell people apart at all.
    """
    _, impostors = compared(*settled)
    if not len(impostors) * rate >= ENOUGH:
        raise TooFewPeopleError("too few people to calibrate at this false match rate: add people, or raise the rate")
    threshold = min(float(impostors[int(rate * len(impostors))]), 2.0)  # strictly below it lie at most rate * n
    if not threshold > 0:
        raise recogniser.RecogniserError(
            "the recogniser does not distinguish people: train it longer, in a new folder"
        )
    low, high = bounds(int(np.searchsorted(impostors, threshold)), len(impostors))
    return recogniser.Calibration(threshold, float(rate), len(impostors), low, high, judge(*unseen, threshold))


def judge(vectors: Tensor, identities: NDArray[np.int64], threshold: float) -> recogniser.RecogniserQuality:
    """Equal error, matches at the threshold, and rank 1 with one image of everybody as the gallery."""
    genuine, impostors = compared(vectors, identities)
    at = np.concatenate([genuine, impostors])
    missed = 1.0 - np.searchsorted(genuine, at) / len(genuine)
    mistaken = np.searchsorted(impostors, at) / len(impostors)
    even = int(np.abs(missed - mistaken).argmin())
    _, gallery = np.unique(identities, return_index=True)
    probes = np.setdiff1d(np.arange(len(identities)), gallery)
    nearest = recogniser.distances(vectors[probes], vectors[gallery]).argmin(dim=1).numpy()
    hits = int((identities[gallery][nearest] == identities[probes]).sum())
    people = len(gallery)
    return recogniser.RecogniserQuality(
        float(missed[even] + mistaken[even]) / 2,
        _share(int(np.searchsorted(genuine, threshold)), len(genuine), people),
        _share(int(np.searchsorted(impostors, threshold)), len(impostors), people),
        _share(hits, len(probes), people),
    )


def _share(hits: int, of: int, people: int) -> Proportion:
    """A share of pairs or images, as sure as so many people can make it."""
    value = hits / of
    low, high = bounds(value * people, people)
    return Proportion(value, min(low, value), max(high, value))  # but for rounding
