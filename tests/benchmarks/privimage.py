"""PrivImage's Tables 2 and 3 and Figures 6 and 7 on scikit-learn's digits, with made-up writing as the public set.

1,402 digits are the cohort, each a patient of its own, and 395 the test part, drawn by each of three seeds. 7,440
made-up pictures of 62 characters are public. Epsilon is 10 and 1 by PLD, of one patient added or removed, at delta
1e-4. Some 75 minutes of one processor, as single steps let expect. What is trained and measured is kept, in the
folder that ``LAZARET_BENCHMARK_WORK`` names, or a new one; a run that was stopped goes on there.

    python -m tests.benchmarks privimage
    python -m tests.benchmarks.privimage --work DIR [--quick] [--tables privimage-table2,...]

The tables, with what came out of the paper's orders and what did not, go to the standard error. ``--quick`` (or
``LAZARET_BENCHMARK_QUICK=1``) takes minutes, shows that everything runs, and proves no order.

Clip, rates, steps, draws and model were tuned on made-up writing of another hand as the private part (italic fonts
bent otherwise, 1,400 pictures of digits; :mod:`deploy.reproduction.privimage_sources` says what was tried), and not
on the digits.
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

import torch

from agent.evaluation.released_set import CNN
from agent.evaluation.utility import Recipe
from deploy.reproduction import privimage
from deploy.reproduction.privimage import DPDM, DPGAN, DPGAN_P, NONPRIV_D, NONPRIV_G, PDP, PRIVIMAGE_D, PRIVIMAGE_G
from deploy.reproduction.privimage_experiment import Job, PrivateSettings
from deploy.reproduction.privimage_sources import DIGITS8, digits, fitted
from deploy.reproduction.tables import Table, as_text
from tests.benchmarks.report import Report, Row, as_table

QUICK: Final = replace(
    DIGITS8,
    diffusion=replace(DIGITS8.diffusion, draws=1, sampling_steps=4),
    diffusion_job=Job(0.1, 6, DIGITS8.diffusion_job.clip),
    adversarial_job=Job(0.1, 6, DIGITS8.adversarial_job.clip),
    epsilons=(1.0,),
    seeds=(0,),
    semantics_steps=60,
    diffusion_pretraining=20,
    adversarial_pretraining=20,
    synthetic=200,
    recipe=Recipe(epochs=2, side=8),
    keeps=(1, 3),
    widths=(),
)
_KEYS: Final = {
    PRIVIMAGE_D: "accuracy",
    PDP: "accuracy_pdp",
    DPDM: "accuracy_dpdm",
    PRIVIMAGE_G: "accuracy_gan",
    DPGAN_P: "accuracy_dpgan_p",
    DPGAN: "accuracy_dpgan",
}


def measured(folder: Path, settings: PrivateSettings, names: tuple[str, ...]) -> dict[str, Table]:
    """The tables, each printed as soon as it is there."""
    found, sources = {}, digits()
    for name in names:
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731 - short
        found[name] = privimage.run(name, sources, fitted(settings, sources), folder, say)
        print(f"\n{as_text(found[name])}\n", file=sys.stderr, flush=True)
    return found


def report(found: Mapping[str, Table]) -> Report:
    """All cells, all verdicts (1: came out), and the accuracies of the CNN."""
    rows, ratios = [], dict[str, float]()
    for name, table in found.items():
        rows += [Row(f"{name} {row}, {column}", cell.mean, "mean") for (row, column), cell in table.cells.items()]
        rows += [Row(f"{name} {verdict.line()}", float(verdict.held), "held") for verdict in table.verdicts]
    if "privimage-table2" in found:
        table = found["privimage-table2"]
        for epsilon in (10, 1):
            column = f"ε={epsilon} {CNN}"
            if column in table.columns:
                ratios |= {f"{key}_eps{epsilon}": table.of(m.name, column).mean for m, key in _KEYS.items()}
    if "privimage-table3" in found:
        table = found["privimage-table3"]
        names = {"real": privimage.REAL, "public_alone": privimage.PUBLIC}
        names |= {"no_noise": NONPRIV_D.name, "gan_no_noise": NONPRIV_G.name}
        ratios |= {f"accuracy_{key}": table.of(row, CNN).mean for key, row in names.items()}
    return Report(tuple(rows), ratios)


def main() -> Report:
    """Measure; some 75 minutes, or less where the work folder holds something already."""
    quick = os.environ.get("LAZARET_BENCHMARK_QUICK", "") == "1"
    kept = os.environ.get("LAZARET_BENCHMARK_WORK")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="privimage-"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small for more
    try:
        return report(measured(folder, QUICK if quick else DIGITS8, tuple(privimage.TABLES)))
    finally:
        torch.set_num_threads(threads)


def _alone() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.privimage", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="keeps what is trained and measured; again: go on")
    parser.add_argument("--quick", action="store_true", help="minutes; proves no order")
    parser.add_argument("--tables", default=",".join(privimage.TABLES), help=f"of {', '.join(privimage.TABLES)}")
    told = parser.parse_args()
    torch.set_num_threads(1)
    names = tuple(told.tables.split(","))
    print(as_table("privimage", report(measured(told.work, QUICK if told.quick else DIGITS8, names))))
    return 0


if __name__ == "__main__":
    sys.exit(_alone())
