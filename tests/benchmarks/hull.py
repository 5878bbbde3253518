"""The hull: the paper's K rotations beside the exact hull, and all of gamma beside both, on one real head in one run.

At 2 mm, as 64 rotations at 1 mm take four minutes; the ratio at 1 mm is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from agent.defacing.brain_extraction import Brain
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.defacing.privacy_transform import population_of, transform
from tests.benchmarks.report import Report, Row
from tests.support.heads import real_head
from tests.support.paper_hull import exact_hull, sampled_hull, surface

T = TypeVar("T")

MM: Final = 2.0
TURNS: Final = 64
SIDE: Final = 64


def main() -> Report:
    """One head, three ways."""
    volume, brain = real_head(MM)
    skin, found = _timed(lambda: head_mask(volume))
    exact, fast = _timed(lambda: exact_hull(skin, volume.affine))
    rng = np.random.default_rng(0)
    paper, slow = _timed(lambda: sampled_hull(surface(skin, TURNS, rng), rng))
    head = HeadScan(volume, skin, Brain(brain, 1.0, np.eye(4)))  # the head is in the template's space
    population = population_of([head], SIDE)
    gamma, whole = _timed(lambda: transform(head, SIDE, population))
    if (skin & ~exact).any() or (gamma.brain & ~gamma.hull).any():
        raise AssertionError("a hull that does not hold its head is no hull, however fast")
    return Report(
        (
            Row(f"head mask at {MM:g} mm", found, "CPU-s"),
            Row("exact hull", fast, "CPU-s"),
            Row(f"the paper's hull, K = {TURNS}, 100 triangles", slow, "CPU-s"),
            Row(f"all of gamma without the brain mask, {SIDE}^3", whole, "CPU-s"),
            Row("Dice of the paper's hull and the exact one", _dice(paper, exact), ""),
            Row("voxels of the head outside the exact hull", float((skin & ~exact).sum()), ""),
            Row("voxels of the head outside the paper's", float((skin & ~paper).sum()), ""),
        ),
        {"hull_speed_vs_rotations": slow / fast, "gamma_speed_vs_rotations": slow / (found + whole)},
    )


def _timed(job: Callable[[], T]) -> tuple[T, float]:
    start = process_time()
    made = job()
    return made, process_time() - start


def _dice(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    return 2.0 * float((a & b).sum()) / float(a.sum() + b.sum())
