"""C-DeID-GAN's training step and inference, with gradient checkpointing and without: time and memory.

At 32^3 on a processor, and at 64^3 where ``LAZARET_BENCHMARK_SIDES=32,64`` asks for it. Where there is an
accelerator, at 32^3 to 128^3 on it, in float32 and bfloat16; with two, each network on its own. Batch 2, as in the
paper. Heads are balls: what they look like costs nothing. Memory is what the accelerator held at its peak, or on a
processor what a generator keeps for the gradient.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from agent.defacing.deid_gan.layers import pyramid
from agent.defacing.deid_gan.network import PRESETS, VolumeGanConfig, drawn
from agent.defacing.deid_gan.training import Example, VolumeGanTrainer, VolumeGanTraining
from agent.defacing.privacy_transform import Gamma
from agent.models.training_loop import torch_generator
from agent.volumes.grid import Cube
from tests.benchmarks.report import Report, Row

OF_SIDE: Final = {32: "small32", 64: "base64", 128: "full128"}
STEPS: Final = 3
MIB: Final = 1024.0 * 1024.0


def main() -> Report:
    """Measure; a minute of a processor, some minutes of an accelerator."""
    torch.set_num_threads(1)
    on = "cuda" if torch.cuda.is_available() else "cpu"
    sides = os.environ.get("LAZARET_BENCHMARK_SIDES", "32,64,128" if on == "cuda" else "32")
    rows, ratios = list[Row](), dict[str, float]()
    for side in (int(part) for part in sides.split(",")):
        config, heads = PRESETS[OF_SIDE[side]], [_ball(side, number) for number in range(4)]
        for precision in ("float32", "bfloat16") if on == "cuda" else ("float32",):
            told = {}
            for sparing in (False, True):
                how = f"{side}^3, {precision}, {'with' if sparing else 'without'} checkpointing, {on}"
                told[sparing] = _step(heads, config, precision, sparing, (on, on))
                rows.append(Row(f"{how}: training steps", 1.0 / told[sparing][0], "1/s"))
                rows.append(Row(f"{how}: memory", told[sparing][1] / MIB, "MiB"))
            if precision == "float32":
                ratios[f"checkpointed_step_vs_plain_{side}"] = told[True][0] / told[False][0]
                ratios[f"checkpointed_memory_vs_plain_{side}"] = told[True][1] / told[False][1]
        if torch.cuda.device_count() > 1:
            seconds, _ = _step(heads, config, "float32", False, ("cuda:0", "cuda:1"))
            rows.append(Row(f"{side}^3, float32, a device for each network: training steps", 1.0 / seconds, "1/s"))
        rows.append(Row(f"{side}^3: inference of one head, {on}", _inference(heads[0], config, on), "s"))
    return Report(tuple(rows), ratios)


def _ball(side: int, number: int) -> Example:
    rng = np.random.Generator(np.random.Philox(number))
    axis = (np.arange(side) + 0.5) / side - 0.5
    away = np.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2) / rng.uniform(0.9, 1.1)
    brain = away < 0.25
    volume = (0.4 * (away < 0.38) + 0.3 * brain).astype(np.float32)
    cube = Cube(side, np.diag([256.0 / side] * 3 + [1.0]))
    return Example(volume, Gamma(away < 0.47, brain, np.where(brain, volume, np.float32(0.0)), cube), str(number))


def _step(
    heads: list[Example], config: VolumeGanConfig, precision: Any, sparing: bool, devices: tuple[str, str]
) -> tuple[float, float]:
    """Seconds of one step, and bytes."""
    how = VolumeGanTraining(config, 100, precision=precision, sparing=sparing, devices=devices)
    trainer, draw, on_gpu = VolumeGanTrainer(heads, how), torch_generator(0), devices[0] != "cpu"
    trainer.step(draw)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = _timed(lambda: trainer.step(draw), STEPS, on_gpu)
    return seconds, float(torch.cuda.max_memory_allocated()) if on_gpu else _kept(trainer, heads)


def _kept(trainer: VolumeGanTrainer, heads: list[Example]) -> float:
    """Bytes that a generator keeps for the gradient of two heads."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    draw, config = torch_generator(0), trainer.config.gan
    gammas = pyramid(torch.from_numpy(np.stack([e.gamma.stack() for e in heads[:2]])), config.sides, draw)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.generator(gammas, torch.randn((2, *config.noise), generator=draw))
    return float(kept)


def _inference(head: Example, config: VolumeGanConfig, on: str) -> float:
    net = VolumeGanTrainer([head, head], VolumeGanTraining(config, 1)).averaged().to(on)
    gamma = torch.from_numpy(head.gamma.stack())[None]
    drawn(net, gamma, torch_generator(0))
    return _timed(lambda: drawn(net, gamma, torch_generator(0)), STEPS, on != "cpu")


def _timed(what: Callable[[], Any], times: int, on_gpu: bool) -> float:
    """Seconds: of the processor, or of the wall where an accelerator works."""
    clock = time.perf_counter if on_gpu else time.process_time
    began = clock()
    for _ in range(times):
        what()
    if on_gpu:
        torch.cuda.synchronize()
    return (clock() - began) / times
