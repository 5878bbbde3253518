"""What the audit of differential privacy sees: every known fault, the shipped step, and what a bound of epsilon sees.

For each way to break the training: the largest p-value of several runs, in how many it was caught (p < 1e-3), seconds
of a run. Then the shipped step, where nothing may be caught; and the lower bound of one run with canary patients at a
claimed epsilon of 1, which sees large faults only.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from sklearn.datasets import load_digits

from agent.dp.clipping import bookkeeping_engine, loop_engine
from agent.dp.noise import SystemEntropy
from agent.privacy_audit.canaries import one_run_bound
from agent.privacy_audit.conformance import SURE
from agent.privacy_audit.gate import CANARIES, conformance, toy_sensitivity
from agent.privacy_audit.negative_controls import CONTROLS, ENGINES, LARGE, proved
from tests.benchmarks.report import Report, Row

RUNS, SOUND, TRAININGS = 3, 20, 3


def main() -> Report:
    """Measure; two minutes."""
    torch.set_num_threads(1)
    entropy, rows, caught = SystemEntropy(), list[Row](), list[float]()
    engine = bookkeeping_engine(64)
    for control in CONTROLS:
        began = time.perf_counter()
        ps = [control.run(entropy, engine).p for _ in range(RUNS)]
        seconds = (time.perf_counter() - began) / RUNS
        caught += [p < SURE for p in ps]
        odds = min(300.0, -math.log10(max(*ps, 1e-300)))
        rows.append(Row(f"{control.what}: zeros of the largest p-value, {seconds:.2f} s each", odds, "-log10"))
        rows.append(Row(f"{control.what}: caught of {RUNS}", sum(p < SURE for p in ps), "runs"))
    for what, broken in ENGINES.items():
        moved = toy_sensitivity(broken)
        caught.append(not moved.holds)
        rows.append(Row(f"{what}: one patient moves the sum by", moved.largest / moved.bound, "clips"))
    began = time.perf_counter()
    alarms = [not conformance(entropy, loop_engine).holds for _ in range(SOUND)]
    seconds = (time.perf_counter() - began) / SOUND
    rows.append(Row(f"the shipped step: false alarms of {SOUND}", sum(alarms), "runs"))
    rows.append(Row(f"the shipped step, {CANARIES} canaries, looped", seconds, "s"))
    bounds, seen = _one_run(entropy)
    ratios = {
        "controls_caught": float(np.mean(caught)),
        "false_alarms": float(np.mean(alarms)),
        "one_run_caught": seen,
    }
    return Report((*rows, *bounds), ratios)


def _one_run(entropy: SystemEntropy) -> tuple[list[Row], float]:
    """Bounds of epsilon, of the shipped training and of three broken ones; the share of the latter that is seen."""
    pictures, labels = load_digits(return_X_y=True)
    images, labels = (pictures[:200] / 16).astype(np.float32), labels[:200].astype(np.int64)
    sound = [one_run_bound(images, labels, entropy) for _ in range(TRAININGS)]
    rows = [Row("one run: claimed", sound[0].claimed, "epsilon")]
    rows.append(
        Row("one run: proved of the shipped training, largest", max(r.bound.epsilon for r in sound), "epsilon")
    )
    seen = list[bool]()
    for control in (c for c in CONTROLS if c.what in LARGE):
        found = [proved(control, images, labels, entropy) for _ in range(TRAININGS)]
        seen += [not r.holds for r in found]
        least = min(r.bound.epsilon for r in found)
        rows.append(Row(f"one run: proved of {control.what}, smallest", least, "epsilon"))
    return rows, float(np.mean(seen))
