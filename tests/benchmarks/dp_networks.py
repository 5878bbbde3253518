"""Clipping without noise beside a plain step, on the networks of the field at full width: time, and peak memory.

16 patients of one picture of 64 x 64 pixels, or two of one volume of 48 voxels a side. "plain" takes all rows in one
batch and makes one gradient. Times are processor seconds of one thread, modes interleaved; ratios are medians over
rounds. Peak memory is that of a fresh process after two steps, above that of one that has imported the same. Opacus
makes each row's gradient and clips it (hooks), or its norm alone (ghost): a peer for the cost where it is exact, and
that is DenseNet-121 alone. Beside the times, what the ledger charges stands beside Opacus' accountants.
The comparison with ``loop_engine`` in a model's first batches is over before a measurement of time. Noise on the sum
and the sealing of an update take as long for any number of patients: they stand apart, and with a step of 500.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from opacus import GradSampleModule
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import nn

from agent.dp import clipping
from agent.dp.clipping import PrivacyUnit, bookkeeping_engine, loop_engine, trainable
from agent.dp.noise import SystemEntropy, noisy_sum
from agent.models.networks import build
from agent.models.training_loop import seeded
from policies.accounting.accountant import epsilon, tight_epsilon
from policies.accounting.claims import SubsampledGaussian
from policies.accounting.rounding import rounded_up
from policies.tasks.networks import NetworkSpec
from tests.benchmarks.report import Report, Row
from tests.support.real_networks import no_files, row_losses

PATIENTS: Final = {2: 16, 3: 2}  # by dimensions
SIDE: Final = {2: 64, 3: 48}
ROUNDS: Final = 5
HOSPITAL: Final = 500  # patients of a site
STEPS: Final = 60  # of the default recipe, full batches
DELTA: Final = 1e-5


NETWORKS: Final[dict[str, tuple[int, NetworkSpec]]] = {
    "resnet18": (2, NetworkSpec("resnet18")),
    "densenet121": (2, NetworkSpec("densenet121")),
    "segresnet": (2, NetworkSpec("segresnet")),
    "segresnet3d": (3, NetworkSpec("segresnet")),
    "vit": (2, NetworkSpec("vit-s16")),
    "lora": (2, NetworkSpec("vit-s16", trained="lora", rank=4)),
    "vit_head": (2, NetworkSpec("vit-s16", trained="head")),
}
MODES: Final = ("plain", "own", "loop")
OPACUS: Final = "densenet121"


def step_of(name: str, mode: str) -> Callable[[], object]:
    """A function that makes the gradient of one step."""
    dims, spec = NETWORKS[name]
    model: nn.Module = build(spec, 1, (SIDE[dims],) * dims, 2, 0, no_files).module
    with seeded(0):
        shape = (1, 1, *[SIDE[dims]] * dims)
        units = [PrivacyUnit((torch.randn(shape), torch.randint(0, 2, (1,)))) for _ in range(PATIENTS[dims])]
    rows = tuple(torch.cat(tensors) for tensors in zip(*(unit.rows for unit in units), strict=True))
    if mode in ("own", "loop"):
        engine = loop_engine if mode == "loop" else bookkeeping_engine(PATIENTS[dims])
        return lambda: engine(model, row_losses, units, 1.0)
    if mode == "plain":
        parameters = trainable(model)
        return lambda: torch.autograd.grad(row_losses(model, rows).mean(), parameters, allow_unused=True)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    # it records nothing in evaluation; nothing in the network draws in training
    if mode == "ghost":
        return _ghost(model.train(), rows)
    wrapped = GradSampleModule(model.train(), loss_reduction="sum")

    def step() -> None:
        wrapped.zero_grad()
        torch.autograd.backward(row_losses(wrapped, rows).sum())
        flat = [p.grad_sample.flatten(1) for p in wrapped.parameters()]
        factor = (1.0 / torch.stack([part.norm(dim=1) for part in flat]).norm(dim=0)).clamp(max=1.0)
        for part in flat:
            factor @ part

    return step


def _ghost(model: nn.Module, rows: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """Opacus' norms without gradients, then a pass with each row's loss times its factor."""
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=1.0)

    def step() -> None:
        wrapped.zero_grad()
        wrapped.enable_hooks()  # they record what the layers are given, too
        losses = row_losses(wrapped, rows)
        torch.autograd.backward(losses.sum(), retain_graph=True)
        factor = wrapped.get_clipping_coef()
        wrapped.zero_grad()
        wrapped.disable_hooks()
        torch.autograd.backward((losses * factor).sum())

    return step


def accountants() -> list[Row]:
    """What the ledger charges for the default recipe at several noises, beside PLD and Opacus' two accountants."""
    rows = []
    for sigma in (8.0, 16.0):
        claim, told = SubsampledGaussian(1.0, sigma, STEPS), f"epsilon of {STEPS} steps at sigma {sigma:g}"
        found = {"the ledger": epsilon([claim], DELTA), "PLD": tight_epsilon([claim], DELTA)}
        for name, kind in (("Opacus, RDP", RDPAccountant), ("Opacus, PRV", PRVAccountant)):
            account = kind()
            account.history = [(sigma, 1.0, STEPS)]
            found[name] = account.get_epsilon(DELTA)
        rows += [Row(f"{told}: {name}", rounded_up(value, 3), "epsilon") for name, value in found.items()]
    return rows


def with_noise_and_seal(name: str, plain: float, own: float) -> list[Row]:
    """What follows the clipped sum once a step and once a round, and its share of a step of 500 patients."""
    parameters = sum(p.numel() for p in trainable(build(NETWORKS[name][1], 1, (SIDE[2],) * 2, 2, 0, no_files).module))
    total, update, key = np.zeros(parameters), bytes(4 * parameters), AESGCM(AESGCM.generate_key(256))
    noise = median(_seconds(lambda: noisy_sum(total, 1.0, 8.0, SystemEntropy())) for _ in range(3))
    seal = median(_seconds(lambda: key.encrypt(os.urandom(12), update, b"update")) for _ in range(3))
    steps = HOSPITAL / PATIENTS[2]
    whole = (steps * own + noise + seal) / (steps * plain)
    return [
        Row(f"{name}: noise on the sum of {parameters} numbers", noise, "cpu-s"),
        Row(f"{name}: sealing them once, AES-256-GCM", seal, "cpu-s"),
        Row(f"{name}: a step of {HOSPITAL} patients with noise and seal, beside a plain one", whole, "ratio"),
    ]


def peak_megabytes(name: str, mode: str) -> float:
    """Peak memory of this fresh process after two steps; mode "none": it has the network only. Linux only."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    clipping.PROBES = 0  # type: ignore[misc] - two patients in float64, once: not what a step takes
    step = step_of(name, "plain" if mode == "none" else mode)
    for _ in range(0 if mode == "none" else 2):
        step()
    # not getrusage: Linux hands the parent's maximum down to a started process
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def _peak(name: str, mode: str) -> float:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(peak_megabytes, name, mode).result()


def _seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> Report:
    """Some seven minutes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, ratios = accountants(), {}
    for name in NETWORKS:
        modes = (*MODES, "opacus", "ghost") if name == OPACUS else MODES
        steps = {mode: step_of(name, mode) for mode in modes}
        for step in steps.values():
            for _ in range(clipping.PROBES):
                step()
        times = [{mode: _seconds(step) for mode, step in steps.items()} for _ in range(ROUNDS)]
        if NETWORKS[name][0] == 2:
            rows += with_noise_and_seal(name, *(median(told[mode] for told in times) for mode in ("plain", "own")))
        empty = _peak(name, "none")
        peaks = {mode: _peak(name, mode) - empty for mode in modes}
        for mode in modes:
            rows.append(Row(f"{name}, {mode}: one step", median(told[mode] for told in times), "cpu-s"))
            rows.append(Row(f"{name}, {mode}: peak memory of it", peaks[mode], "MB"))
            if mode != "plain":
                who = "" if mode == "own" else f"{mode}_"
                ratios[f"{who}step_vs_plain_{name}"] = median(told[mode] / told["plain"] for told in times)
                ratios[f"{who}memory_vs_plain_{name}"] = peaks[mode] / peaks["plain"]
    return Report(tuple(rows), ratios)
