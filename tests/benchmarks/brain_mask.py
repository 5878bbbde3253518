"""Brain masks of the real head, beside its published one and beside what is commonly done without a network.

``ch2bet`` is the truth, its largest piece. Every method sees the head clean, under a bias field of 40 %, under Rician
noise of a tenth of white matter, and at 2 mm. *Kept* is what no method of de-facing may touch and *estimate* what is
called the brain: :class:`agent.defacing.brain_extraction.Brain`. The two baselines are ours: a threshold, eroded by 4
mm, largest piece, grown again (the best Dice of 27 settings on the clean head); and the algorithm of dipy's
``median_otsu`` (median radius 4, four passes), which was made for diffusion.

Some two minutes of one processor.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.bet import bet
from agent.defacing.brain_extraction import Atlas, Brain, carried, dice, extract, grown
from agent.defacing.template import atlas, register
from agent.domain import Volume
from agent.volumes.grid import spacing
from tests.benchmarks.report import Report, Row
from tests.support.heads import real_head

Mask = NDArray[np.bool_]
STATES: Final = ("clean", "bias 40 %", "noise", "2 mm")


def main() -> Report:
    """Measure."""
    template = atlas()
    rows, clean = list[Row](), dict[str, tuple[float, float]]()
    for state in STATES:
        volume, true = _state(state)
        found = _Once(template)
        for name, method in _methods(template, found).items():
            began = _cpu()
            mask = method(volume)
            seconds = _cpu() - began
            lost = int((true & ~mask).sum())
            rows.append(Row(f"{state}, {name}: Dice", dice(mask, true), "share"))
            rows.append(Row(f"{state}, {name}: sensitivity", 1 - lost / int(true.sum()), "share"))
            rows.append(Row(f"{state}, {name}: brain voxels lost of {int(true.sum())}", lost, "voxels"))
            rows.append(Row(f"{state}, {name}: time", seconds, "cpu-s"))
            clean.setdefault(name, (dice(mask, true), lost / int(true.sum())))
    ratios = {
        "dice_estimate": clean["estimate"][0],
        "lost_kept": clean["kept"][1],
        "dice_estimate_vs_threshold": clean["estimate"][0] / clean["threshold"][0],
        "dice_estimate_vs_median_otsu": clean["estimate"][0] / clean["median_otsu"][0],
    }
    return Report(tuple(rows), ratios)


def _state(name: str) -> tuple[Volume, Mask]:
    volume, true = real_head(2.0 if name == "2 mm" else 1.0)
    values, rng = volume.values.astype(np.float32), np.random.default_rng(0)
    if name == "noise":
        values = np.hypot(values + rng.normal(0, 12, values.shape), rng.normal(0, 12, values.shape))
    if name.startswith("bias"):
        i, j, k = np.meshgrid(*[np.linspace(-1, 1, n) for n in values.shape], indexing="ij", sparse=True)
        values = values * (1 + 0.4 * (0.6 * i + 0.5 * j - 0.4 * k) / 1.5)
    return Volume(values.astype(np.float32), volume.affine), true


class _Once:
    """What is kept and the estimate come from one extraction, whose time is shown with the first."""

    def __init__(self, template: Atlas) -> None:
        self.template = template
        self.brain: Brain | None = None

    def __call__(self, volume: Volume) -> Brain:
        self.brain = self.brain or extract(volume, self.template, register)
        return self.brain


def _methods(template: Atlas, found: _Once) -> dict[str, Callable[[Volume], Mask]]:
    return {
        "BET 0.5": lambda volume: bet(volume, 0.5),
        "BET 0.7": lambda volume: bet(volume, 0.7),
        "template": lambda volume: carried(template.brain, template, register(volume, template), volume),
        "kept": lambda volume: found(volume).mask,
        "estimate": lambda volume: found(volume).tight,
        "threshold": _threshold,
        "median_otsu": _median_otsu,
    }


def _threshold(volume: Volume) -> Mask:
    mm = spacing(volume.affine)
    bright = volume.values > 0.35 * np.percentile(volume.values, 98)
    core = _largest(ndimage.distance_transform_edt(bright, sampling=mm) > 4.0)
    return np.asarray(ndimage.binary_fill_holes(grown(core, mm, 4.0)), bool)


def _median_otsu(volume: Volume, radius_mm: float = 4.0, passes: int = 4) -> Mask:
    """On a copy at 2 mm, where dipy's 729 voxels are 125; else it takes two minutes."""
    step = max(1, round(2.0 / float(spacing(volume.affine).max())))
    thin = volume.values[::step, ::step, ::step]
    middle = ndimage.median_filter(thin, 2 * round(radius_mm / 2) + 1)
    for _ in range(passes - 1):
        middle = ndimage.median_filter(middle, 2 * round(radius_mm / 2) + 1)
    counts, edges = np.histogram(middle, bins=256)
    weight, mass = np.cumsum(counts), np.cumsum(counts * edges[:-1])
    between = (mass[-1] * weight / weight[-1] - mass) ** 2 / np.maximum(weight * (weight[-1] - weight), 1.0)
    found = ndimage.binary_fill_holes(_largest(middle > edges[between[:-1].argmax() + 1]))
    for axis in range(3):
        found = found.repeat(step, axis=axis)
    i, j, k = volume.values.shape
    return np.asarray(found[:i, :j, :k], bool)


def _largest(mask: Mask) -> Mask:
    pieces, _ = ndimage.label(mask)
    sizes = np.bincount(pieces.ravel())
    sizes[0] = 0
    return np.asarray(pieces == sizes.argmax(), bool)


def _cpu() -> float:
    """Seconds of this process and of the programs it ran."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
