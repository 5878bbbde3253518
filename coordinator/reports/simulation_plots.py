"""The plots of a simulation, as PNG: a figure against the rounds, and against epsilon.

matplotlib comes with the agent's packages, which a simulation needs anyway; this module is imported by one that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coordinator.federation.simulation import ALONE, OPEN, TOGETHER, Trained

_COLOURS: Final = ("#0b6b73", "#b5651d", "#4b3f8f", "#7a8f1d", "#8f3f6f", "#3f6f8f")
_INK, _SOFT = "#14212b", "#51616e"
_SIZE: Final = (6.4, 4.0)  # inches
_DPI: Final = 110


def plot_rounds(found: Sequence[Trained], path: Path) -> None:
    """The figure on the test patients after each round: mean over the seeds, and its standard error as a band."""
    drawing, axes = _drawing(f"{_name(found)} on the test patients", "round")
    for colour, epsilon in zip(cycle(_COLOURS), _epsilons(found), strict=False):
        _curve(axes, [t for t in found if (t.arm, t.epsilon) == (TOGETHER, epsilon)], colour, f"ε {epsilon}")
        single = [t for t in found if (t.arm, t.epsilon) == (ALONE, epsilon)]
        _curve(axes, single, colour, f"ε {epsilon}, each site alone", "--")
    _curve(axes, [t for t in found if t.arm == OPEN], _INK, "without privacy", ":")
    _save(drawing, axes, path)


def plot_epsilons(found: Sequence[Trained], path: Path) -> None:
    """The final figure against epsilon, with standard errors; without privacy and before training as lines."""
    drawing, axes = _drawing(f"{_name(found)} at the end", "ε that the ledger charges each site")
    axes.set_xscale("log")
    epsilons = _epsilons(found)
    for arm, colour, label in ((TOGETHER, _COLOURS[0], "together"), (ALONE, _COLOURS[1], "each site alone")):
        pairs = [(float(e), _by_seed([t for t in found if (t.arm, t.epsilon) == (arm, e)])) for e in epsilons]
        told = [(at, np.mean(values), _error(values)) for at, values in pairs if values]
        if told:
            at, means, errors = zip(*told, strict=True)
            axes.errorbar(at, means, yerr=errors, color=colour, marker="o", capsize=3, label=label)
    for values, style, label in (
        ([t.value for t in found if t.arm == OPEN and not t.failed], ":", "without privacy"),
        ([t.rounds[0] for t in found if t.rounds], "-.", "before training"),
    ):
        if values:
            axes.axhline(float(np.mean(values)), color=_INK if style == ":" else _SOFT, linestyle=style, label=label)
    axes.set_xticks([float(e) for e in epsilons], labels=list(epsilons))
    axes.minorticks_off()
    _save(drawing, axes, path)


def _epsilons(found: Sequence[Trained]) -> list[str]:
    return sorted({t.epsilon for t in found if t.arm == TOGETHER}, key=float)


def _name(found: Sequence[Trained]) -> str:
    return next((t.figure for t in found if t.figure), "figure")


def _by_seed(found: Sequence[Trained]) -> list[float]:
    """One number for each seed: the mean over its sites."""
    seeds = sorted({t.seed for t in found if not t.failed})
    return [float(np.mean([t.value for t in found if t.seed == seed and not t.failed])) for seed in seeds]


def _error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _curve(axes: Axes, found: Sequence[Trained], colour: str, label: str, style: str = "-") -> None:
    """The mean over sites, then over seeds."""
    whole = [t for t in found if not t.failed]
    if not whole:
        return
    seeds = sorted({t.seed for t in whole})
    curves = np.array([np.mean([t.rounds for t in whole if t.seed == seed], axis=0) for seed in seeds])
    mean, rounds = curves.mean(axis=0), np.arange(curves.shape[1])
    axes.plot(rounds, mean, color=colour, linestyle=style, label=label)
    if len(seeds) > 1:
        error = curves.std(axis=0, ddof=1) / np.sqrt(len(seeds))
        axes.fill_between(rounds, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)


def _drawing(vertical: str, across: str) -> tuple[Figure, Axes]:
    drawing = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    axes = drawing.add_subplot()
    axes.set_xlabel(across, color=_INK)
    axes.set_ylabel(vertical, color=_INK)
    axes.grid(color="#d7dfe5", linewidth=0.7)
    axes.tick_params(colors=_SOFT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return drawing, axes


def _save(drawing: Figure, axes: Axes, path: Path) -> None:
    axes.legend(frameon=False, fontsize=9)
    drawing.savefig(path, format="png", metadata={"Software": None})
