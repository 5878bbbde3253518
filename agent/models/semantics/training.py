"""Make a semantic query function of public images (PrivImage, section 3.2): by their labels, or without any.

With labels: a classifier by cross-entropy (Eq. 4), for a fixed number of steps, and how good it is on images that
it did not see. The paper stops where the accuracy on its validation set is best; nothing is gained by it that a
cosine's end does not give. Without labels: k-means on the features of a network that learned from no label either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn.functional import cross_entropy

from agent.domain import CheckpointStore
from agent.intervals import Proportion, bounds
from agent.models.augmentations import IDENTITY, Pool, Views, eased, run_digest, view
from agent.models.features.extractors import LearnedFeatures, RandomFeatures
from agent.models.features.trunk import TrunkArchitecture
from agent.models.semantics.classifier import MOST_BINS, Classifier, Nearest, SemanticCodebook, named, semantics_bytes
from agent.models.training_loop import LossTrainer, TrainingPlan, TrainingProgress, seeded, train
from protos.common.errors import TrainingError

_LEFT: Final = 4  # pixels a side of the last map, or a little more
_STARTS: Final = 4  # of k-means; the best is kept
_AT_ONCE: Final = 256  # images
_FLOOR: Final = 1e-6  # of a feature's spread, in units of the largest: one that hardly moves must not count as much


class TooFewLabelledImagesError(TrainingError, ValueError):
    """The public set cannot make the semantics that were asked for. It is public: the text may say why."""


@dataclass(frozen=True, slots=True)
class SemanticsConfig:
    """How one classifier is trained."""

    name: str
    architecture: TrunkArchitecture
    bins: tuple[str, ...]  # (NS,) names of the labels 0 .. NS - 1
    steps: int = 2_000
    batch: int = 128  # images, at most
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    held_out: float = 0.1  # of every label's images, one at least: to say how good it is, and for nothing else
    seed: int = 0
    views: Views = IDENTITY
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        named(self.bins)
        counts = (self.steps, self.batch, self.checkpoint_every)
        if not all(type(c) is int and c >= 1 for c in counts):
            raise ValueError("steps and sizes are whole numbers")
        if not (0 < self.learning_rate < 1 and 0 <= self.weight_decay < 1 and 0 < self.held_out < 0.5):
            raise ValueError("rates lie between 0 and 1, and the held-out share below a half")


def suited(side: int, channels: int, width: int = 32) -> TrunkArchitecture:
    """A trunk for images of this size, from 8 pixels a side on: halved until about ``_LEFT`` pixels are left.

    Raises:
        ValueError: no trunk has this side or these channels.
    """
    depth = 1
    while side % (1 << depth) == 0 and side >> depth >= _LEFT and depth < 8:
        depth += 1
    return TrunkArchitecture(side, channels, width, depth)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedSemantics:
    """A classifier's file, and how often it is right about public images that it did not see."""

    file: bytes = field(repr=False)
    accuracy: Proportion  # with Wilson's 95 % interval; each held-out image is a trial
    guess: float  # what the commonest label alone would reach


@dataclass(frozen=True, slots=True, eq=False)
class ClusteredSemantics:
    """A file of clusters, and how they came out."""

    file: bytes = field(repr=False)
    sizes: tuple[int, ...]  # (NS,) public images in each
    iterations: int


def train_semantics(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    config: SemanticsConfig,
    place: CheckpointStore | Path,
    say: Callable[[TrainingProgress], None] = lambda _: None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
) -> TrainedSemantics:
    """Train a classifier of public labels.

    Args:
        images: (n, h, w) or (n, h, w, 3): public or made, never the cohort (P6).
        labels: (n,) in 0 .. NS - 1.
        config: of the run.
        place: of its checkpoint, or a folder for it; a run that was killed goes on from there.
        say: told of the progress.
        device: where the network is trained.
    Raises:
        ValueError: images of another shape or type, or that do not differ; labels that are no bins.
        TooFewImagesError: a label has fewer than two images.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    learn, judge = split(labels, config, len(images))
    pool = Pool(images, config.architecture.side, config.architecture.channels, device)
    trainer = _Trainer(pool, labels, learn, config)
    digest = run_digest(asdict(config), images, labels)
    train(trainer, TrainingPlan(config.steps, digest, config.seed, config.checkpoint_every), place, say)
    hits = int((_answers(trainer.net, pool, judge) == labels[judge]).sum())
    low, high = bounds(hits, len(judge))
    accuracy = Proportion(hits / len(judge), low, high)
    guess = float(np.bincount(labels[judge]).max() / len(judge))
    told = {"accuracy": asdict(accuracy), "run": digest, "seed": config.seed, "steps": config.steps}
    side = config.architecture.side
    shape = (side, side) if config.architecture.channels == 1 else (side, side, 3)
    return TrainedSemantics(semantics_bytes(config.name, trainer.net, config.bins, shape, told), accuracy, guess)


def split(
    labels: NDArray[np.int64], config: SemanticsConfig, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of the images to learn and to judge by, a share of every label's in each.

    Raises:
        ValueError: not one bin's number for each of the ``count`` images.
        TooFewImagesError: a label has fewer than two.
    """
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError("a label is a whole number, one for each image")
    if not count or not 0 <= labels.min() <= labels.max() < len(config.bins):
        raise ValueError("a label is the number of a bin")
    few = int((np.bincount(labels, minlength=len(config.bins)) < 2).sum())
    if few:
        raise TooFewLabelledImagesError(
            f"every label needs two images or more, one for training and one for testing. {few} of "
            f"{len(config.bins)} labels have fewer: add images, or remove these labels"
        )
    rng = np.random.Generator(np.random.Philox(config.seed))
    learn, judge = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for label in range(len(config.bins)):
        order = rng.permutation(np.flatnonzero(labels == label))
        held = max(1, round(config.held_out * len(order)))
        learn.append(order[held:])
        judge.append(order[:held])
    return np.sort(np.concatenate(learn)), np.sort(np.concatenate(judge))


class _Trainer(LossTrainer):
    """Cross-entropy over random batches."""

    def __init__(
        self, pool: Pool, labels: NDArray[np.int64], learn: NDArray[np.int64], config: SemanticsConfig
    ) -> None:
        self.pool, self.config = pool, config
        self.learn, self.labels = torch.from_numpy(learn), torch.from_numpy(labels.astype(np.int64))
        with seeded(config.seed):
            net = Classifier(config.architecture, len(config.bins))
        self.net = net.to(pool.device)
        rate, decay = config.learning_rate, config.weight_decay
        adam = torch.optim.AdamW(self.net.parameters(), rate, weight_decay=decay)
        super().__init__({"net": self.net}, {"optimizer": adam})
        self.clipped = self.net

    def rate(self) -> float:
        return self.config.learning_rate * eased(self.done, self.config.steps)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        chosen = self.learn[torch.randperm(len(self.learn), generator=generator)[: self.config.batch]]
        images = view(self.pool.take(chosen), self.config.views, generator)
        # Eq. 4: the mean over the batch of -Σ_i s_i log Q_i(x), where one s_i is 1
        loss = cross_entropy(self.net(images), self.labels[chosen].to(self.pool.device))
        return loss, {"cross_entropy": float(loss.detach())}


def _answers(net: Classifier, pool: Pool, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) the most probable bin of each image."""
    with torch.no_grad():
        parts = np.array_split(places, -(-len(places) // _AT_ONCE))
        found: NDArray[np.int64] = torch.cat(
            [net(pool.take(torch.from_numpy(part))).argmax(dim=1).cpu() for part in parts]
        ).numpy()
    return found


def cluster_semantics(
    features: RandomFeatures | LearnedFeatures,
    images: NDArray[np.uint8],
    count: int,
    seed: int = 0,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
) -> ClusteredSemantics:
    """Semantics of public images that nobody labelled: k-means on their features, each feature at unit spread.

    An image's probabilities are the softmax of minus its squared distances to the centres, in units of the mean
    squared distance of the public images to theirs: that of an image like them falls off over one cluster's width.

    Args:
        features: random, or learned from public images; never from the cohort (P6).
        images: (n, s, s) or (n, s, s, 3) public images.
        count: of the clusters.
        seed: of the first centres.
        device: where the features are computed.
    Raises:
        ValueError: images that are no squares or do not differ, or no number of clusters.
        TooFewImagesError: fewer different images than clusters, as the features see them.
    """
    if type(count) is not int or not 2 <= count <= MOST_BINS:
        raise ValueError(f"there are 2 to {MOST_BINS} clusters")
    points, mean, spread = _standardised(features, images, device)
    if len(np.unique(points, axis=0)) < count:
        raise TooFewLabelledImagesError(
            f"the images do not make {count} clusters: add images, or ask for fewer clusters"
        )
    found = KMeans(count, n_init=_STARTS, random_state=seed % (1 << 32)).fit(points)
    codebook = SemanticCodebook(points.shape[1], count)
    values = {"mean": mean, "spread": spread, "centres": found.cluster_centers_}
    state = {name: torch.from_numpy(np.asarray(v)).float() for name, v in values.items()}
    # k-means of as many points as clusters leaves no distance at all: then that of the centres is the unit
    width = max(float(found.inertia_) / len(points), _FLOOR * points.shape[1])
    codebook.load_state_dict({**state, "width": torch.tensor(width)})
    sizes = tuple(int(n) for n in np.bincount(found.labels_, minlength=count))
    told = {"features": features.origin.sha256, "pictures": run_digest({}, images), "seed": seed}
    bins = tuple(f"cluster-{i}" for i in range(count))
    file = semantics_bytes(f"clusters-{count}", Nearest(features, codebook), bins, tuple(images.shape[1:]), told)
    return ClusteredSemantics(file, sizes, int(found.n_iter_))


def _standardised(
    features: RandomFeatures | LearnedFeatures, images: NDArray[np.uint8], device: torch.device
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(n, d): the features of images at mean 0 and unit spread; and the mean (d,) and the spread (d,) before."""
    pool = Pool(images, images.shape[1], 3 if images.ndim == 4 else 1, device)
    with torch.no_grad():
        places = np.array_split(np.arange(len(images)), -(-len(images) // _AT_ONCE))
        parts = [features.embed(pool.take(torch.from_numpy(part))).double().cpu() for part in places]
    embedded: NDArray[np.float64] = torch.cat(parts).numpy()
    mean, spread = embedded.mean(axis=0), embedded.std(axis=0)
    spread = np.maximum(spread, _FLOOR * max(float(spread.max()), _FLOOR))
    return (embedded - mean) / spread, mean, spread
