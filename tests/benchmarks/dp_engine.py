"""The patient-level DP-SGD step against a plain step and against Opacus: time, and peak memory.

MONAI's diffusion UNet of 1.71 M parameters at 32 x 32 x 3 with a denoising loss; 16 patients of eight rows (images or
noise draws) and 64 patients of one, all of them in every step so that every mode does the same work. "plain" takes
all rows in one batch, without clipping or noise. Opacus works per row: it is a peer for the cost, not for the unit.
Times are processor seconds of one thread, modes interleaved; ratios are medians over rounds. Peak memory is that of
a fresh process after one step. ``bookkeeping_engine`` is the product's on a processor (``best_engine``); the
comparison of the engines with ``loop_engine`` in a model's first batches is over before the measurement.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from agent.dp.clipping import PROBES, ClippedSum, loop_engine, vmap_engine
from agent.dp.dpsgd import PrivateSgd, TrainingTask, best_engine, train_privately
from agent.dp.noise import SystemEntropy
from tests.benchmarks.report import Report, Row
from tests.support.families import Family, monai_unet

SHAPES = {"16x8": (16, 8), "64x1": (64, 1)}  # patients x rows of each
ROUNDS = 3
OWN: dict[str, Callable[[], ClippedSum]] = {
    "loop": lambda: loop_engine,
    "vmap": lambda: vmap_engine(16, most_rows=64),
    "bookkept": lambda: best_engine("cpu"),
}
MODES = ("plain", *OWN, "opacus", "opacus_ghost")
PRODUCT = "bookkept"


def step_of(mode: str, shape: str) -> Callable[[], object]:
    """A function that takes one full training step in ``mode``."""
    patients, each = SHAPES[shape]
    found = monai_unet(32)
    units = found.units([each] * patients)
    rows = tuple(torch.cat(tensors) for tensors in zip(*(unit.rows for unit in units), strict=True))
    sgd = partial(torch.optim.SGD, lr=1e-3)
    if mode in OWN:
        job = PrivateSgd(1.0, 1.0, 1, clip=1.0, images_per_patient=each, expected_batch=patients)
        task, engine = TrainingTask(found.model, found.loss, sgd), OWN[mode]()
        return lambda: train_privately(task, units, job, SystemEntropy(), engine)
    if mode == "opacus_ghost":
        return _ghost(found, rows)
    model, optimizer = found.model, sgd(found.model.parameters())
    if mode == "opacus":
        model = GradSampleModule(model)
        optimizer = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(rows[0]))

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(found.loss(model, rows).mean())
        optimizer.step()

    return step


class _Criterion:
    """The loss of each row, in the form that Opacus calls."""

    reduction = "mean"

    def __init__(self, found: Family) -> None:
        self._found = found

    def __call__(self, model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
        return self._found.loss(model, rows)


def _ghost(found: Family, rows: tuple[Tensor, ...]) -> Callable[[], object]:
    model = GradSampleModuleFastGradientClipping(found.model, max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(rows[0]),
    )
    criterion = DPLossFastGradientClipping(model, optimizer, _Criterion(found))

    def step() -> None:
        optimizer.zero_grad()
        criterion(model, rows).backward()
        optimizer.step()

    return step


def peak_megabytes(mode: str, shape: str) -> float:
    """Peak memory of this fresh process after one step in ``mode`` ("none": no step). Linux only."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if mode != "none":
        step_of(mode, shape)()
    # not getrusage: Linux hands the parent's maximum down to a started process
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def _peak(mode: str, shape: str) -> float:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(peak_megabytes, mode, shape).result()


def _seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def measured(shape: str) -> dict[str, list[float]]:
    """Processor seconds of a step, by mode, ``ROUNDS`` each."""
    steps = {mode: step_of(mode, shape) for mode in MODES}
    for mode, step in steps.items():
        for _ in range(1 if mode not in OWN or OWN[mode]() is loop_engine else PROBES):
            step()
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(ROUNDS):
        for mode, step in steps.items():
            times[mode].append(_seconds(step))
    return times


def main() -> Report:
    """Measure; about six minutes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, slower, larger = [Row("peak memory, none", _peak("none", "64x1"), "MB")], {}, {}
    for shape in SHAPES:
        times = measured(shape)
        peaks = {mode: _peak(mode, shape) for mode in MODES}
        for mode in MODES:
            slower[mode, shape] = median(t / p for t, p in zip(times[mode], times["plain"], strict=True))
            larger[mode, shape] = peaks[mode] / peaks["plain"]
            rows.append(Row(f"one step, {shape}, {mode}", median(times[mode]), "cpu-s"))
            rows.append(Row(f"peak memory, {shape}, {mode}", peaks[mode], "MB"))
    ratios = {  # of both shapes the worse for us, the better for Opacus
        "step_vs_plain": max(slower[PRODUCT, shape] for shape in SHAPES),
        "peak_memory_vs_plain": max(larger[PRODUCT, shape] for shape in SHAPES),
        "opacus_step_vs_plain": min(slower["opacus", shape] for shape in SHAPES),
    }
    for mode in MODES[1:]:
        for shape in SHAPES:
            ratios[f"{mode}_{shape}_step_vs_plain"] = slower[mode, shape]
            ratios[f"{mode}_{shape}_peak_memory_vs_plain"] = larger[mode, shape]
    return Report(tuple(rows), ratios)
