"""What a round finds is what `cohort` shows: the task's rule, and the site's own, of series that are not complete."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agent import runtime
from agent.mechanisms.federated.task_training import example_rule
from agent.storage import projects
from agent.storage.label_tables import LabelColumn, LabelTable, keep_table
from agent.storage.site_directory import SiteDirectory
from policies.tasks.task import Input, Labels, Task
from tests.support.ingest_site import told
from tests.support.labelled_site import image, labelled_site
from tests.support.small_tasks import classification

TASK = """
[task]
name = "small"
kind = "classification"
[labels]
table = "findings"
columns = ["effusion"]
classes = ["no", "yes"]
[input]
modality = "MR"
size = [8, 8]
[training]
public_patients = 25
[network]
name = "linear"
"""


def task() -> Task:
    """The same."""
    labels = Labels(table="findings", columns=("effusion",), classes=("no", "yes"))
    return replace(classification(), labels=labels, input=Input("MR", (8, 8)))


@pytest.mark.parametrize(("least", "patients", "examples"), [(1, 4, 12), (2, 1, 3)])
def test_a_round_and_the_survey_find_the_same_where_short_series_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], least: int, patients: int, examples: int
) -> None:
    """Ten images alone in their series, and two more in that of one of them."""
    with labelled_site(tmp_path) as way:
        first = image(way, "P-3", 6)
        for number in (20, 21):
            way.vault.keep(replace(image(way, "P-3", number), series=first.series, study=first.study))
        persons = {head.person for head in way.vault.heads()}
        rows: dict[tuple[str, str], Any] = {(one, one): (i % 2,) for i, one in enumerate(sorted(persons))}
        column = LabelColumn("effusion", "binary")
        keep_table(way.vault, LabelTable("findings", "patient-id", "patient", (column,), rows))
    home = SiteDirectory(tmp_path / "site")
    (home.root / "ingest.toml").write_text(f"[rules]\nmin_instances_per_series = {least}\n")
    (tmp_path / "task.toml").write_text(TASK)
    shown = told(capsys, home.root, "cohort", str(tmp_path / "task.toml"))
    nobody = cast("Any", None)
    with contextlib.closing(projects.open_vault(home)) as vault:
        site = runtime.site_context(home, "site-a", nobody, nobody, vault, lambda *_: None)
        found = site.examples(example_rule(task()))
        assert site.label_misfit(example_rule(task())) == ""
        (home.root / "ingest.toml").write_text("[rules]\nmin_instances_per_series = 0\n")
        assert "ingest.toml" in site.label_misfit(example_rule(task())), "told before a price, not in a round"
    assert (shown["patients"], shown["examples"]) == (patients, examples)
    assert (len(found.patients), sum(len(p.examples) for p in found.patients)) == (patients, examples)
