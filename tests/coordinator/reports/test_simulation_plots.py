"""The plots show the means over seeds and their standard errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="of the agent's packages, which a simulation needs")

from matplotlib.figure import Figure
from PIL import Image

from coordinator.federation.simulation import ALONE, OPEN, TOGETHER, Trained
from coordinator.reports.simulation_plots import plot_epsilons, plot_rounds


def trained(arm: str, epsilon: str, seed: int, last: float, site: str = "", failed: str = "") -> Trained:
    return Trained(arm, epsilon, seed, site, "auc", (0.5, 0.6, last), 2, failed=failed)


FOUND = [
    *(trained(TOGETHER, epsilon, seed, 0.7 + 0.02 * seed) for epsilon in ("3", "8") for seed in (0, 1)),
    *(trained(ALONE, "3", seed, 0.62 + 0.1 * number, f"s-{number}") for seed in (0, 1) for number in (0, 1)),
    *(trained(OPEN, "", seed, 0.9) for seed in (0, 1)),
    trained(TOGETHER, "8", 2, 0.1, failed="diverged"),
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    found: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (found.append(self), save(self, *a, **k))[1])
    return found


def test_a_figure_against_the_rounds_is_the_mean_over_sites_and_seeds(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_rounds(FOUND, tmp_path / "rounds.png")
    assert Image.open(tmp_path / "rounds.png").size[0] > 400
    curves = {line.get_label(): np.asarray(line.get_ydata()) for line in drawn[0].axes[0].get_lines()}
    assert curves["ε 3"] == pytest.approx([0.5, 0.6, 0.71])
    assert curves["ε 8"] == pytest.approx([0.5, 0.6, 0.71]), "one that diverged is in no mean"
    assert curves["ε 3, each site alone"] == pytest.approx([0.5, 0.6, 0.67])
    assert curves["without privacy"] == pytest.approx([0.5, 0.6, 0.9])
    assert drawn[0].axes[0].get_ylabel() == "auc on the test patients"


def test_a_figure_against_epsilon_has_standard_errors(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_epsilons(FOUND, tmp_path / "epsilons.png")
    together, alone = drawn[0].axes[0].containers
    assert np.asarray(together.lines[0].get_xydata()) == pytest.approx(np.array([[3, 0.71], [8, 0.71]]))
    assert np.asarray(alone.lines[0].get_xydata()) == pytest.approx(np.array([[3, 0.67]]))
    (bars,) = together.lines[2]
    assert np.diff(np.asarray(bars.get_segments()[0])[:, 1]) == pytest.approx([0.02])  # 0.70 and 0.72: 0.01 each way
