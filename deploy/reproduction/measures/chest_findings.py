"""The paper's downstream classifier: several findings of one image, learned from a labelled set, tested on real.

Privacy Distillation, section 4.2 and Table 2: f_class learns the findings of D_real, D_synth, D_filtered or
D_distill, and its mean area under the ROC curve on real held-out patients is what the set is worth. Ours is the small
network of :mod:`agent.evaluation.utility`, with binary cross-entropy. The paper's second phase, which maximises the
AUC itself, is left out: sets compare by the first alone. Nothing is chosen on the test set: the last epoch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from agent.errors import DivergedError
from agent.evaluation.utility import Recipe, UtilityNetwork
from agent.intervals import Figure, Resampling, Units, percentile, resampled
from agent.models.image_tensors import resized, to_tensor
from agent.models.training_loop import seeded, torch_generator

Images = NDArray[np.float32]  # (n, h, w[, 3]) in [0, 1]
Findings = NDArray[np.bool_]  # (n, f): what each shows
Predictor = Callable[[Images], NDArray[np.float64]]  # images -> (n, f): the higher, the surer
_AT_ONCE = 256


def train_findings(images: Images, findings: Findings, recipe: Recipe, seed: int) -> Predictor:
    """Learn which findings an image shows: SGD with Nesterov momentum 0.9, weight decay 5e-4, a cosine schedule.

    Args:
        images: of the set, (n, h, w[, 3]) float32 in [0, 1].
        findings: (n, f) bool. One that all images or none show is not learned, and predicts at random.
        recipe: of the training; its target and turn are not for findings.
        seed: of weights and order: the same seed, the same predictor.
    Returns:
        Logits for images of any number and size.
    Raises:
        ValueError: shapes or types do not fit, the set is empty or not finite, or no finding differs in it.
        DivergedError: when the predictor is asked and its answers are not numbers.
    """
    _check(images, findings)
    if bool((findings == findings[:1]).all()):
        raise ValueError("every image of the set shows the same findings")
    seen = resized(to_tensor(images), recipe.side)
    mean, std = seen.mean(), seen.std().clamp_min(1e-3)
    seen, wanted = (seen - mean) / std, torch.from_numpy(findings.astype(np.float32))
    with seeded(seed):
        net = UtilityNetwork(seen.shape[1], recipe.width, findings.shape[1])
    generator = torch_generator(seed)
    optimizer = torch.optim.SGD(net.parameters(), recipe.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * -(-len(seen) // recipe.batch))
    for _ in range(recipe.epochs):
        for chosen in torch.split(torch.randperm(len(seen), generator=generator), recipe.batch):
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(binary_cross_entropy_with_logits(net(seen[chosen]), wanted[chosen]))
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    net.requires_grad_(requires_grad=False)

    def predict(unseen: Images) -> NDArray[np.float64]:
        parts = [
            net((resized(to_tensor(unseen[a : a + _AT_ONCE]), recipe.side) - mean) / std)
            for a in range(0, len(unseen), _AT_ONCE)
        ]
        logits: NDArray[np.float64] = torch.cat(parts).double().numpy()
        if not bool(np.isfinite(logits).all()):
            raise DivergedError("the classifier's answers are not numbers: train it at a smaller rate")
        return logits

    return predict


def area(scores: NDArray[np.float64], shown: NDArray[np.bool_]) -> float:
    """Area under the ROC curve of (n,) scores: of pairs, one that shows it and one that does not, those in order.

    A tie counts half (Mann & Whitney 1947). NaN where all or none show it.
    """
    there = int(shown.sum())
    absent = len(shown) - there
    if not there or not absent:
        return float("nan")
    return float((rankdata(scores)[shown].sum() - there * (there + 1) / 2) / (there * absent))


def auc(
    predictors: Predictor | Sequence[Predictor],
    images: Images,
    findings: Findings,
    owners: NDArray[np.int64],
    rng: np.random.Generator,
    names: Sequence[str] = (),
) -> tuple[Figure, ...]:
    """How well findings of real held-out patients are told.

    Args:
        predictors: of :func:`train_findings`; of several, of other seeds, every figure is the mean.
        images: (n, h, w[, 3]) float32 in [0, 1], of patients of whom the set knows nothing.
        findings: (n, f) bool: what they show.
        owners: (n,): whose each is. The bootstrap draws patients; it does not cover the chance of training.
        rng: of the bootstrap.
        names: of the findings; numbers without.
    Returns:
        The mean AUC over the findings, then each one's, with 95 % intervals; chance is 0.5.
    Raises:
        ValueError: shapes do not fit, or a finding that all or none of the test images show: nobody can tell.
        DivergedError: a predictor's answers are not numbers.
    """
    _check(images, findings)
    several = (predictors,) if callable(predictors) else tuple(predictors)
    names = tuple(names) or tuple(str(number) for number in range(findings.shape[1]))
    if owners.shape != findings.shape[:1] or len(names) != findings.shape[1] or not several:
        raise ValueError("one owner for each image, one name for each finding, and a predictor")
    scores = [predict(images) for predict in several]
    if any(one.shape != findings.shape for one in scores):
        raise ValueError("the predictor learned other findings")
    if not bool((findings.any(axis=0) & ~findings.all(axis=0)).all()):
        raise ValueError("a finding is shown by all or none of the test images")

    def numbers(rows: NDArray[np.int64]) -> list[float]:
        each = [[area(one[rows, f], findings[rows, f]) for f in range(len(names))] for one in scores]
        # a drawn set may show a finding always or never: it is then as unknown as it can be
        told = np.nan_to_num(np.mean(each, axis=0), nan=0.5)
        return [float(told.mean()), *(float(value) for value in told)]

    units, how = Units(owners), Resampling()
    draws, values = resampled(numbers, units, rng, how.count), numbers(np.arange(len(owners)))
    return tuple(
        Figure(name, value, percentile(draws[:, i], value, how.level), 0.5, len(units))
        for i, (name, value) in enumerate(zip(("mean AUC", *(f"AUC of {n}" for n in names)), values, strict=True))
    )


def _check(images: Images, findings: Findings) -> None:
    """Raise ValueError where these are no labelled images."""
    if images.ndim not in (3, 4) or not len(images) or images.dtype != np.float32:
        raise ValueError("images are (n, h, w) or (n, h, w, 3) float32, not empty")
    if findings.ndim != 2 or findings.dtype != np.bool_ or len(findings) != len(images) or not findings.shape[1]:
        raise ValueError("findings are (n, f) bool, a row for each image")
    if not bool(np.isfinite(images).all()):
        raise ValueError("images must be finite")
