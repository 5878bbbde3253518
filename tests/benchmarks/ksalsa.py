"""k-SALSA's Tables 1-4 on fundus phantoms: 1,300 made-up patients in APTOS' layout, 32 px, three seeds.

Generator, encoder and features are trained once, on 585 patients who are in nothing else; the seeds divide the others
into cohort and test set, and start classifier and attack. About 40 minutes of one processor. What is trained and
measured is kept: in the folder ``LAZARET_BENCHMARK_WORK`` names, or a new one; a run that was stopped goes on there.

    python -m tests.benchmarks ksalsa
    python -m tests.benchmarks.ksalsa --work DIR [--quick] [--tables ksalsa-table1,...]

The tables, with what came out of the paper's orders and what did not, go to the standard error; ratios are at k = 5.
``--quick`` (or ``LAZARET_BENCHMARK_QUICK=1``) takes minutes, shows that everything runs, and proves no order.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image

from agent.mechanisms.ksalsa.style_alignment import Alignment
from deploy.phantoms.fundus import APTOS_SHARES, fundus_patients
from deploy.reproduction import ksalsa
from deploy.reproduction.datasets import aptos
from deploy.reproduction.experiment import PRESETS, Settings
from deploy.reproduction.tables import Table, as_text
from tests.benchmarks.report import Report, Row, as_table

TABLES: Final = ("ksalsa-table1", "ksalsa-table2", "ksalsa-table3", "ksalsa-table4")
FULL: Final = replace(
    PRESETS["cpu32"],
    generator_steps=2_000,
    pair_steps=300,
    image_steps=700,
    feature_steps=200,
    attack_steps=150,
)
QUICK: Final = replace(
    FULL,
    seeds=(0,),
    ks=(2, 5),
    generator_steps=120,
    pair_steps=30,
    image_steps=30,
    feature_steps=20,
    alignment=Alignment(steps=8),
    epochs=8,
    attack_steps=20,
)


def phantoms(folder: Path, count: int, side: int) -> Path:
    """``count`` made-up patients, one right eye each, as APTOS 2019 is laid out; made once."""
    data = folder / f"aptos-{count}-{side}"
    if not (data / "train.csv").exists():
        (data / "train_images").mkdir(parents=True, exist_ok=True)
        lines = ["id_code,diagnosis"]
        for one in fundus_patients(count, np.random.default_rng(0), side, 1, ("right",), APTOS_SHARES):
            Image.fromarray(one.photographs[0].pixels).save(data / "train_images" / f"{one.number:012x}.png")
            lines.append(f"{one.number:012x},{one.grade}")
        (data / "train.csv").write_text("\n".join(lines) + "\n")
    return data


def measured(folder: Path, settings: Settings, count: int, names: tuple[str, ...]) -> dict[str, Table]:
    """The tables, each printed as soon as it is there."""
    data = aptos(phantoms(folder, count, settings.side), settings.side)
    found = {}
    for name in names:
        found[name] = ksalsa.run(name, data, settings, folder / "work", lambda line: print(line, file=sys.stderr))
        print(f"\n{as_text(found[name])}\n", file=sys.stderr, flush=True)
    return found


def report(found: dict[str, Table]) -> Report:
    """All cells, all verdicts (1: came out), and the ratios of whatever tables there are."""
    rows = []
    for name, table in found.items():
        rows += [Row(f"{name} {row}, {column}", cell.mean, "mean") for (row, column), cell in table.cells.items()]
        rows += [Row(f"{name} {verdict.line()}", float(verdict.held), "held") for verdict in table.verdicts]
    ratios = {}
    if "ksalsa-table1" in found:
        loss = {row: found["ksalsa-table1"].of(row, "k=5 FD").mean for row in (ksalsa.CENTROID, ksalsa.SALSA)}
        ratios["fidelity_centroid_vs_ksalsa"] = loss[ksalsa.CENTROID] / loss[ksalsa.SALSA]
    if "ksalsa-table2" in found:
        kappa = {row: found["ksalsa-table2"].of(row, "k=5 kappa").mean for row in (ksalsa.CENTROID, ksalsa.SALSA)}
        ratios["kappa_ksalsa_minus_centroid"] = kappa[ksalsa.SALSA] - kappa[ksalsa.CENTROID]
    if "ksalsa-table3" in found:
        best = {row: found["ksalsa-table3"].of(row, "k=5 AUC, best").mean for row in ksalsa.AVERAGED}
        ratios["mia_auc_ksalsa"] = best[ksalsa.SALSA]  # of the best of three attacks; 0.5 is chance
        ratios["mia_auc_centroid"] = best[ksalsa.CENTROID]
        ratios["mia_auc_pixel"] = best[ksalsa.PIXEL]
    return Report(tuple(rows), ratios)


def main() -> Report:
    """Measure; about 40 minutes, or less where the work folder holds something already."""
    quick = os.environ.get("LAZARET_BENCHMARK_QUICK", "") == "1"
    kept = os.environ.get("LAZARET_BENCHMARK_WORK")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="ksalsa-"))
    folder.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, 2)))
    try:
        return report(measured(folder, QUICK if quick else FULL, 260 if quick else 1_300, TABLES))
    finally:
        torch.set_num_threads(threads)


def _alone() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ksalsa", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="keeps what is trained and measured; again: go on")
    parser.add_argument("--quick", action="store_true", help="minutes; proves no order")
    parser.add_argument("--tables", default=",".join(TABLES), help=f"of {', '.join(ksalsa.TABLES)}")
    parser.add_argument("--threads", type=int, default=1)
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    told.work.mkdir(parents=True, exist_ok=True)
    settings, count = (QUICK, 260) if told.quick else (FULL, 1_300)
    print(as_table("ksalsa", report(measured(told.work, settings, count, tuple(told.tables.split(","))))))
    return 0


if __name__ == "__main__":
    sys.exit(_alone())
