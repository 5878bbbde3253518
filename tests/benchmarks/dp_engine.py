"""The patient-level DP-SGD step against a plain step and against Opacus: time, and peak memory.

A small convolutional network, 32 patients with eight 32 x 32 images each, all of them in every step so that
every mode does the same work. Opacus works per image: it is a peer for the cost, not for the unit.
Times are processor seconds of one thread, the modes interleaved; ratios are medians over rounds.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn.functional import cross_entropy

from agent.stages.finetune import PrivateSgd, SystemEntropy, Task, Unit, chunked, looped, train_privately
from tests.benchmarks.report import Report, Row

PATIENTS, IMAGES, ROUNDS = 32, 8, 7
JOB = PrivateSgd(
    sampling_rate=1.0,
    noise_multiplier=1.0,
    steps=1,
    clip=1.0,
    images_per_patient=IMAGES,
    expected_batch=PATIENTS,
)
MODES = ("plain", "loop", "vmap", "opacus")


def network() -> nn.Module:
    """Four convolutions with group normalisation and a linear head: 0.1 M parameters."""
    widths = (1, 32, 32, 64, 64)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, padding=1, stride=1 + i % 2), nn.GroupNorm(8, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, 10))


def units() -> list[Unit]:
    """Random images: the cost does not depend on what they show."""
    rng = np.random.default_rng(0)
    shape = (IMAGES, 1, 32, 32)
    return [
        Unit(torch.tensor(rng.random(shape), dtype=torch.float32), torch.tensor(rng.integers(0, 10, IMAGES)))
        for _ in range(PATIENTS)
    ]


def step_of(mode: str) -> Callable[[], object]:
    """A function that takes one full training step in ``mode``."""
    model, data = network(), units()
    images, targets = torch.cat([u.images for u in data]), torch.cat([u.targets for u in data])
    if mode in ("loop", "vmap"):
        task = Task(model, cross_entropy, partial(torch.optim.SGD, lr=0.1))
        engine = looped if mode == "loop" else chunked(16)
        return lambda: train_privately(task, data, JOB, SystemEntropy(), engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mode == "opacus":
        model = GradSampleModule(model)
        optimizer = DPOptimizer(
            optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=PATIENTS * IMAGES
        )

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(images), targets))
        optimizer.step()

    return step


def peak_megabytes(mode: str) -> float:
    """Peak memory of this fresh process after three steps in ``mode`` ("none": no step). Linux only."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if mode != "none":
        step = step_of(mode)
        for _ in range(3):
            step()
    # not getrusage: Linux hands the parent's maximum down to a started process
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def _peak(mode: str) -> float:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(peak_megabytes, mode).result()


def _seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> Report:
    """Measure; under a minute."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = {mode: step_of(mode) for mode in MODES}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(ROUNDS):
        for mode, step in steps.items():
            times[mode].append(_seconds(step))
    slower = {m: median(t / p for t, p in zip(times[m], times["plain"], strict=True)) for m in MODES}
    peaks = {mode: _peak(mode) for mode in ("none", *MODES)}
    rows = [Row(f"one step, {mode}", median(times[mode]) * 1000, "cpu-ms") for mode in MODES]
    rows += [Row(f"peak memory, {mode}", peak, "MB") for mode, peak in peaks.items()]
    ratios = {
        "step_vs_plain": slower["loop"],
        "peak_memory_vs_plain": peaks["loop"] / peaks["plain"],
        "opacus_step_vs_plain": slower["opacus"],
        "vmap_step_vs_plain": slower["vmap"],
        "vmap_peak_memory_vs_plain": peaks["vmap"] / peaks["plain"],
        "opacus_peak_memory_vs_plain": peaks["opacus"] / peaks["plain"],
    }
    return Report(tuple(rows), ratios)
