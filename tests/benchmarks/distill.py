"""Privacy Distillation's Table 2 and Figure 2 on made-up radiographs of 32 px, and what of planted people is caught.

A cohort of 40 patients with three visits each, of another 40 with every seed, is learned for so long that the teacher
knows some of it by heart; 150 others are there to test on. Autoencoder, both verifiers and aligner learn from 700
people of whom nobody is in a cohort. R_re-id is measured by the verifier that filtered nothing.

``planted_caught``: a stranger's picture is put into the cohort many times over, under a pseudonym of its own, and the
teacher goes on learning; of the pictures that then show it (by l_2 distance, Carlini et al. 2023), so many are
dropped. Beside it stands what the vetting finds of near-duplicates of the cohort's own pictures that are planted.

What is trained and measured is kept in the folder that ``LAZARET_BENCHMARK_WORK`` names, or a new one; a run that was
stopped goes on there. About 35 minutes of one processor.

    python -m tests.benchmarks distill
    python -m tests.benchmarks.distill --work DIR [--seeds 1] [--quick] [--tables distillation-table2,...]

``--quick`` (or ``LAZARET_BENCHMARK_QUICK=1``) shows that everything runs, and proves nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from agent.evaluation.utility import Recipe
from agent.mechanisms.distillation.teacher_student import Sampling
from agent.models.training_loop import torch_generator
from agent.vetting.filter import power
from deploy.reproduction import distillation
from deploy.reproduction.distillation import AUC, D_DISTILL, D_FILTERED, D_REAL, D_SYNTH, OWN, RE_ID, S_ALIGN, caught
from deploy.reproduction.distillation_experiment import DistillSettings, DistillWork, Lengths, opened, vetting
from deploy.reproduction.distillation_models import reference
from deploy.reproduction.distillation_sources import CHEST32, phantoms
from deploy.reproduction.tables import Table, as_text
from tests.benchmarks.report import Report, Row, as_table

TIMES: Final = 60  # copies of the planted picture, beside three pictures of each of 36 patients
CHANGED: Final = ("contrast", "rotation", "crop", "noise")  # one change each; "combined" is all of them at once
NAMES: Final = ("distillation-table2", "distillation-fig2")
QUICK: Final = replace(
    CHEST32,
    steps=Lengths(autoencoder=300, verifier=150, aligner=60, teacher=30, student=30, pretraining=30, canary=30),
    sampling=Sampling(candidates=2, groups=10),
    pictures=60,
    recipe=Recipe(epochs=2, side=32, width=8),
    people=(40, 30),
    visits=2,
    public=280,
    classifiers=1,
    seeds=(0,),
)


def planted(work: DistillWork, seed: int) -> dict[str, float]:
    """Of a stranger whom the teacher knows by heart, and of near-duplicates of the cohort's pictures."""

    def compute() -> dict[str, float]:
        stranger = caught(work, seed, TIMES)[1]
        found = power(reference(work, seed), vetting(work), torch_generator(seed))
        told = {f"planted {kind}": share.value for kind, share in found.kinds.items()}
        visits = {} if found.other_visits is None else {"other visits": found.other_visits.value}
        return {f"stranger {name}": value for name, value in stranger.items()} | told | visits

    return work.numbers(work.keyed("planted", seed), compute)


def say(line: str) -> None:
    """To the standard error."""
    print(line, file=sys.stderr, flush=True)


def measured(folder: Path, settings: DistillSettings, names: tuple[str, ...]) -> Report:
    """The tables, each printed as soon as it is there; then what was planted."""
    found = dict[str, Table]()
    with opened(phantoms(settings), settings, folder, say) as work:
        for name in names:
            found[name] = distillation.TABLES[name](work)
            say(f"\n{as_text(found[name])}\n")
        each = [planted(work, seed) for seed in settings.seeds]
    return report(found, {name: [one.get(name, np.nan) for one in each] for name in each[0]})


def report(found: Mapping[str, Table], told: Mapping[str, list[float]]) -> Report:
    """All cells, all verdicts (1: came out), what was planted, and the issue's ratios."""
    rows, ratios = [], dict[str, float]()
    for name, table in found.items():
        rows += [Row(f"{name} {row}, {column}", cell.mean, "mean") for (row, column), cell in table.cells.items()]
        rows += [Row(f"{name} {verdict.line()}", float(verdict.held), "held") for verdict in table.verdicts]
    for name, values in told.items():
        each = ", ".join(f"{value:.3f}" for value in values)
        rows.append(Row(f"{name} (by seed: {each})", float(np.nanmean(values)), "share"))
    if "distillation-table2" in found:
        two = found["distillation-table2"]

        def ratio(column: str, above: str, below: str) -> float:
            return two.of(above, column).mean / max(two.of(below, column).mean, 1e-12)

        ratios["reid_student_vs_teacher"] = ratio(RE_ID, D_DISTILL, D_SYNTH)
        ratios["auc_distill_vs_real"] = ratio(AUC, D_DISTILL, D_REAL)
        ratios["reid_filtered_by_own"] = two.of(D_FILTERED, OWN).mean
        ratios["align_filtered_vs_teacher"] = ratio(S_ALIGN, D_FILTERED, D_SYNTH)
    ratios["planted_caught"] = float(np.nanmean(told["stranger caught"]))
    ratios["near_duplicates_caught"] = min(float(np.mean(told[f"planted {kind}"])) for kind in CHANGED)
    ratios["combined_caught"] = float(np.mean(told["planted combined"]))
    return Report(tuple(rows), ratios)


def _settings(quick: bool, seeds: int) -> DistillSettings:
    return QUICK if quick else replace(CHEST32, seeds=tuple(range(seeds)))


def main() -> Report:
    """Measure; about half an hour, or less where the work folder holds something already."""
    quick = os.environ.get("LAZARET_BENCHMARK_QUICK", "") == "1"
    kept = os.environ.get("LAZARET_BENCHMARK_WORK")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="distill-"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small for more
    try:
        return measured(folder, _settings(quick, len(CHEST32.seeds)), NAMES)
    finally:
        torch.set_num_threads(threads)


def _alone() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.distill", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="keeps what is trained and measured; again: go on")
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--quick", action="store_true", help="minutes; proves nothing")
    parser.add_argument("--tables", default=",".join(NAMES), help=f"of {', '.join(distillation.TABLES)}")
    told = parser.parse_args()
    torch.set_num_threads(1)
    names = tuple(told.tables.split(","))
    print(as_table("distill", measured(told.work, _settings(told.quick, told.seeds), names)))
    return 0


if __name__ == "__main__":
    sys.exit(_alone())
