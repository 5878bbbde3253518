"""Utility: train on the release, test on real patients (TSTR; k-SALSA, section 4.4 and supplements B, F and G).

A classifier that saw nothing but the release grades real images of patients who are not in it. Accuracy and Cohen's
kappa with quadratic weights (Cohen 1968) count every patient once, however many images there are. Nothing is chosen
on the test set: the last epoch counts, and several seeds are printed, not the best. (The published code took the best
epoch on the test set.) The network is ours: a small one with group norm in place of an ImageNet ResNet-50.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, mse_loss

from agent.errors import DivergedError
from agent.intervals import Figure, Resampling, Units, percentile, resampled, table
from agent.models.image_tensors import resized, to_tensor
from agent.models.training_loop import seeded

Grades = NDArray[np.int64]  # (n,): 0 .. c-1, in clinical order
Target = Literal["classes", "mse"]
Classifier = Callable[[NDArray[np.float32]], Grades]  # images (n, h, w[, 3]) in [0, 1] -> grades
Train = Callable[["Examples", int], Classifier]  # the release and a seed -> what it taught
_MOST_LINEAR: Final = 4096  # pixels a linear model looks at


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Graded images. Of a release every image is its own patient."""

    images: NDArray[np.float32]  # (n, h, w[, 3]) in [0, 1]
    grades: Grades
    patients: NDArray[np.int64]  # (n,): whose image it is, as a number
    count: int  # c: how many grades there are, present or not

    def __post_init__(self) -> None:
        """A finite image and a known grade for each row."""
        if self.images.ndim not in (3, 4) or not len(self.images) or self.images.dtype != np.float32:
            raise ValueError("images are (n, h, w) or (n, h, w, 3) float32, not empty")
        if not self.grades.shape == self.patients.shape == self.images.shape[:1]:
            raise ValueError("one grade and one patient for each image")
        if not self.count >= 2 or not 0 <= self.grades.min() <= self.grades.max() < self.count:
            raise ValueError("grades are 0 .. c-1, with two grades or more")
        if not bool(np.isfinite(self.images).all()):
            raise ValueError("images must be finite")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the network is trained (supplement B: 60 epochs of batches of 32, SGD with Nesterov momentum, cosine).

    ``target`` ``mse`` is what the published code minimised: one number, rounded to the nearest grade.
    """

    epochs: int = 60
    batch: int = 32
    rate: float = 0.02
    target: Target = "classes"
    turn: float = 0.0  # degrees to both sides of a random rotation; the published code: 180
    side: int = 64  # images are resized to it
    width: int = 16

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        if not min(self.epochs, self.batch, self.side // 8, self.width // 4) >= 1 or self.width % 4:
            raise ValueError("epochs, batch, side (8 or more) and width (4, 8, ...) are positive")
        if not 0.0 < self.rate < float("inf") or not 0.0 <= self.turn <= 180.0:
            raise ValueError("a rate is positive, a turn lies in [0, 180] degrees")
        if self.target not in get_args(Target):
            raise ValueError("the target is classes or mse")


class UtilityNetwork(nn.Module):
    """Four convolutions with group norm (Wu & He 2018: no batch statistics), mean and maximum, a linear layer."""

    def __init__(self, channels: int, width: int, outputs: int) -> None:
        """Weights are drawn from torch's generator: build it inside ``seeded``."""
        super().__init__()
        layers: list[nn.Module] = []
        sizes = (channels, width, 2 * width, 4 * width, 4 * width)
        for index, (a, b) in enumerate(pairwise(sizes)):
            layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(4, b), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if index < 3 else []
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(2 * sizes[-1], outputs)

    def forward(self, images: Tensor) -> Tensor:
        """(n, c, h, w) as (n, outputs)."""
        maps = self.trunk(images)
        out: Tensor = self.head(torch.cat([maps.mean(dim=(2, 3)), maps.amax(dim=(2, 3))], dim=1))
        return out


def network_trainer(recipe: Recipe) -> Train:
    """A function which trains the small network on a release from a seed: the same seed, the same classifier."""

    def train(release: Examples, seed: int) -> Classifier:
        return train_network(release, recipe, seed)

    return train


def train_network(release: Examples, recipe: Recipe, seed: int) -> Classifier:
    """Train by SGD with Nesterov momentum 0.9, weight decay 5e-4 and a cosine schedule (supplement B).

    Raises:
        ValueError: the release has one grade only, so that there is nothing to learn.
        DivergedError: when the classifier is asked and its answers are not numbers.
    """
    if len(np.unique(release.grades)) < 2:
        raise ValueError("the release has one grade only")
    images = resized(to_tensor(release.images), recipe.side)
    mean, std = images.mean(), images.std().clamp_min(1e-3)
    images, grades = (images - mean) / std, torch.from_numpy(release.grades)
    with seeded(seed):
        net = UtilityNetwork(images.shape[1], recipe.width, release.count if recipe.target == "classes" else 1)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), recipe.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = recipe.epochs * -(-len(images) // recipe.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(recipe.epochs):
        order = torch.randperm(len(images), generator=generator)
        for chosen in torch.split(order, recipe.batch):
            optimizer.zero_grad(set_to_none=True)
            outputs = net(_turned(images[chosen], recipe.turn, generator))
            torch.autograd.backward(_loss(outputs, grades[chosen], release.count, recipe.target))
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # a squared error of grades can be steep
            optimizer.step()
            schedule.step()
    net.requires_grad_(False)

    def classify(unseen: NDArray[np.float32]) -> Grades:
        parts = (
            net((resized(to_tensor(unseen[a : a + 256]), recipe.side) - mean) / std)
            for a in range(0, len(unseen), 256)
        )
        outputs = torch.cat(list(parts)).double().numpy()
        if not bool(np.isfinite(outputs).all()):
            raise DivergedError("the classifier's answers are not numbers: train it at a smaller rate")
        return _grades(outputs, release.count, recipe.target)

    return classify


def confusion(truth: Grades, told: Grades, weights: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """(c, c): the weight of images of true grade i told to be j."""
    cells = np.bincount(truth * count + told, weights=weights, minlength=count * count)
    return cells.reshape(count, count).astype(np.float64)


def quadratic_kappa(table_: NDArray[np.float64]) -> float:
    """Cohen's kappa with weights (i - j)^2 (Cohen 1968) of a (c, c) table; 0 where it is undefined.

    It is undefined when truth and answers are all of one and the same grade: then nothing was shown.
    """
    count = len(table_)
    grades = np.arange(count)
    cost = (grades[:, None] - grades) ** 2.0
    expected = np.outer(table_.sum(axis=1), table_.sum(axis=0)) / table_.sum()
    by_chance = float((cost * expected).sum())
    return 1.0 - float((cost * table_).sum()) / by_chance if by_chance > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class TstrResult:
    """Train on synthetic, test on real."""

    figures: tuple[Figure, ...]  # accuracy, quadratic kappa, recall of each grade that the test set has
    confusion: NDArray[np.float64]  # (c, c), a patient's weight is 1, mean over the seeds
    per_seed: tuple[tuple[int, float, float], ...]  # seed, accuracy, kappa

    def table(self) -> str:
        """Figures, then each seed."""
        seeds = "\n".join(f"seed {s}: accuracy {a:.4f}, kappa {k:.4f}" for s, a, k in self.per_seed)
        return f"{table(self.figures, 'trained on the release, tested on real patients')}\n{seeds}"


def tstr(
    release: Examples,
    held_out: Examples,
    train: Train,
    seeds: Sequence[int],
    rng: np.random.Generator,
    how: Resampling | None = None,
) -> TstrResult:
    """Train on the release once for each seed and test on real held-out patients.

    Args:
        release: released images with their grades.
        held_out: real images of patients who are in no cluster of the release.
        train: :func:`network_trainer`, or another.
        seeds: of the training runs; every figure is the mean over them.
        rng: for the bootstrap by patient, which does not cover the chance of training; ``per_seed`` shows that.
        how: the bootstrap.
    Returns:
        Figures whose ``chance`` is the commonest grade for everybody (accuracy), 0 (kappa), 1/c (recall).
    Raises:
        ValueError: one grade only on either side, other grades or shapes, no seed.
    """
    if release.count != held_out.count or release.images.shape[1:] != held_out.images.shape[1:] or not seeds:
        raise ValueError("release and test set have the same grades and image shape, and there is a seed")
    if len(np.unique(held_out.grades)) < 2:
        raise ValueError("the test set has one grade only")
    answers = [train(release, seed)(held_out.images) for seed in seeds]
    _, owner, images = np.unique(held_out.patients, return_inverse=True, return_counts=True)
    weights = 1.0 / images[owner]
    present = [int(g) for g in np.unique(held_out.grades)]

    def numbers(rows: NDArray[np.int64]) -> list[float]:
        tables = [confusion(held_out.grades[rows], a[rows], weights[rows], held_out.count) for a in answers]
        return [float(x) for x in np.mean([_numbers(t, present) for t in tables], axis=0)]

    everyone = np.arange(len(owner))
    units, how = Units(held_out.patients), how or Resampling()
    draws, values = resampled(numbers, units, rng, how.count), numbers(everyone)
    tables = [confusion(held_out.grades, a, weights, held_out.count) for a in answers]
    share = float(tables[0].sum(axis=1).max() / tables[0].sum())
    names = ["accuracy", "quadratic kappa", *(f"recall of grade {g}" for g in present)]
    chances = [share, 0.0, *(1.0 / held_out.count for _ in present)]
    figures = tuple(
        Figure(name, value, percentile(draws[:, i], value, how.level), chances[i], len(units))
        for i, (name, value) in enumerate(zip(names, values, strict=True))
    )
    each = tuple((s, _accuracy(t), quadratic_kappa(t)) for s, t in zip(seeds, tables, strict=True))
    return TstrResult(figures, np.mean(tables, axis=0), each)


def _numbers(cells: NDArray[np.float64], present: Sequence[int]) -> list[float]:
    rows = cells.sum(axis=1)
    # a drawn set may lack a grade: its recall is then as unknown as it can be
    recalls = [float(cells[g, g] / rows[g]) if rows[g] > 0 else 0.5 for g in present]
    return [_accuracy(cells), quadratic_kappa(cells), *recalls]


def _accuracy(cells: NDArray[np.float64]) -> float:
    return float(np.trace(cells) / cells.sum())


def _loss(outputs: Tensor, grades: Tensor, count: int, target: Target) -> Tensor:
    if target == "classes":
        return cross_entropy(outputs, grades)
    return mse_loss(outputs[:, 0] + (count - 1) / 2, grades.to(outputs.dtype))


def _grades(outputs: NDArray[np.float64], count: int, target: Target) -> Grades:
    if target == "classes":
        best: Grades = outputs.argmax(axis=1).astype(np.int64)
        return best
    return np.clip(np.rint(outputs[:, 0] + (count - 1) / 2), 0, count - 1).astype(np.int64)


def _turned(images: Tensor, turn: float, generator: torch.Generator) -> Tensor:
    """Each image rotated by its own random angle; outside is the mean, which is 0 here."""
    if turn == 0.0:
        return images
    angle = (torch.rand(len(images), generator=generator) * 2 - 1) * turn * torch.pi / 180
    zero = torch.zeros_like(angle)
    rows = [torch.stack([angle.cos(), -angle.sin(), zero], 1), torch.stack([angle.sin(), angle.cos(), zero], 1)]
    grid = affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False)


def _flat(images: NDArray[np.float32]) -> NDArray[np.float64]:
    side = min(int(np.sqrt(_MOST_LINEAR)), images.shape[1])
    small = resized(to_tensor(images), side)
    return small.reshape(len(images), -1).double().numpy()
