"""``evaluate MODEL --labels``: exact figures for the site alone, counted like every look, and the worst errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from agent.cli.main import main
from agent.domain import Example
from agent.ingest.context import open_ingest
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_training import example_rule, network_of
from agent.prediction.evaluation import figures, judged
from agent.storage.examples import task_cohort
from agent.storage.site_directory import MAIN, SiteDirectory
from policies.tasks.task import read_task
from tests.support.exported_models import exported_model, join
from tests.support.ingest_site import one_reader, told, typed
from tests.support.task_site import ingest, task_site, write_abdomens, write_chest_clinic

__all__ = ["one_reader"]  # a fixture

CHESTS: Final = """
[task]
name = "effusion"
kind = "classification"
[labels]
table = "findings"
columns = ["effusion"]
classes = ["no", "yes"]
[input]
modality = "CR"
size = [32, 32]
[training]
public_patients = 100
"""
ORGANS: Final = """
[task]
name = "organs"
kind = "segmentation"
[labels]
classes = ["liver", "mass"]
[input]
modality = "MR"
size = [64, 64]
[training]
public_patients = 100
[network]
name = "unet"
options = { width = 4 }
"""


def figure(page: str, name: str) -> str:
    found = re.search(rf"<td>{re.escape(name)}</td><td>([^<]*)</td>", page)
    assert found is not None, name
    return found[1]


def test_figures_are_exact_counted_and_on_the_page_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = task_site(tmp_path)
    table = write_chest_clinic(tmp_path / "input" / "chests", 24, 48)
    ingest(home, tmp_path / "input" / "chests")
    assert main(["--home", str(home), "labels", "import", str(table), "--key", "accession"]) == 0
    (tmp_path / "task.toml").write_text(CHESTS)
    task = read_task(tmp_path / "task.toml")
    made = exported_model(tmp_path / "f", task, monkeypatch, scale=0.5)
    join(home, made)
    words = ["evaluate", str(made.folder), "--labels", "--out", str(tmp_path / "page.html")]
    said = told(capsys, home, *words)
    assert said["looks"] == 1
    page = (tmp_path / "page.html").read_text()
    with open_ingest(SiteDirectory(home), MAIN) as way:
        cohort = task_cohort(way.vault, example_rule(task))
    outputs = Federated(task, made.parameters.size, 4.0).predict(made.parameters, cohort)
    true = np.array([example.target[0] for patient in cohort.patients for example in patient.examples])
    assert figure(page, "accuracy") == f"{(outputs.argmax(axis=1) == true).mean():.4f}"
    wanted = roc_auc_score(true, outputs[:, 1] - outputs[:, 0])
    assert float(figure(page, "AUC of yes")) == pytest.approx(wanted, abs=1e-4)
    both = figure(page, "labelled yes, and the model says")
    assert both == f"{int(((outputs.argmax(axis=1) == 0) & (true == 1)).sum())} no, " + (
        f"{int(((outputs.argmax(axis=1) == 1) & (true == 1)).sum())} yes"
    )
    assert page.count("<figure") == min(12, len(true))
    assert "must not leave the hospital" in page
    status, out, _ = typed(capsys, home, *words[:-1], str(tmp_path / "again.html"))
    assert (status, "evaluated 2 time(s)" in out) == (0, True)
    assert "0." not in out, "no figure is printed"
    status, _, err = typed(capsys, home, *words)
    assert (status, "name a new file" in err) == (1, True)


def test_of_masks_the_overlap_is_measured_and_the_worst_come_first(tmp_path: Path) -> None:
    home = task_site(tmp_path)
    write_abdomens(tmp_path / "input" / "abdomens", [1])
    ingest(home, tmp_path / "input" / "abdomens")
    (tmp_path / "task.toml").write_text(ORGANS)
    task = read_task(tmp_path / "task.toml")
    with open_ingest(SiteDirectory(home), MAIN) as way:
        cohort = task_cohort(way.vault, way.ingestion.rule_here(example_rule(task)))
    network = network_of(task, {}.__getitem__)
    examples = [(patient.pseudonym, one, ()) for patient in cohort.patients for one in patient.examples]
    found = figures(task, judged(task, network, examples))
    assert (found.patients, found.examples) == (1, len(examples))
    errors = [one.error for one in found.worst]
    assert errors == sorted(errors, reverse=True)
    own = Example(examples[0][1].pixels, examples[0][1].target)
    (one,) = judged(task, network, [("p", own, ())])
    right, drawn = one.true == 1, one.said == 1
    dice = 2 * (right & drawn).sum() / max(1, right.sum() + drawn.sum())
    alone = dict(figures(task, [one]).figures)
    if right.any() or drawn.any():
        assert alone["Dice of liver"] == f"{dice:.4f} over 1 examples"


@pytest.mark.parametrize(
    "words",
    [["--labels"], ["MODEL"], ["MODEL", "--labels", "--set", "x"], ["MODEL", "--labels", "--detach"], ["--set", "x"]],
)
def test_what_does_not_go_together_is_usage(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--home", str(tmp_path), "evaluate", *words, "--out", "page.html"])
    assert caught.value.code == 2
