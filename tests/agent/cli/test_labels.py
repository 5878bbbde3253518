"""``labels`` as it is typed: sentences with row numbers, exit statuses, JSON, and no cell of the table anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.cli import options
from agent.cli.main import main
from agent.ingest.label_import import KEYS
from tests.support.ingest_site import told, typed
from tests.support.labelled_site import labelled_site, table


@pytest.fixture
def site(tmp_path: Path) -> Path:
    with labelled_site(tmp_path) as way:
        return way.home.root


def test_the_kinds_of_keys_are_those_of_the_import() -> None:
    assert tuple(KEYS) == options.KEYS


def test_a_table_is_imported_listed_shown_and_removed(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, "P-0,1,low,mass,61.5", "P-1,0,high,none,5", "P-9,0,high,none,5")
    found = told(capsys, site, "labels", "import", str(path), "--key", "patient-id")
    assert (found["imported"], found["kept"], found["patients"], found["read"]) == (True, 2, 2, 3)
    assert [(note["code"], note["count"], note["rows"]) for note in found["notes"]] == [("unmatched", 1, [4])]
    (listed,) = told(capsys, site, "labels", "list")
    assert listed == {
        "table": "findings",
        "version": found["version"],
        "key": "patient-id",
        "rows": 2,
        "columns": ["effusion", "grade", "findings", "age"],
    }
    shown = told(capsys, site, "labels", "show", "findings")
    assert shown["version"] == found["version"]
    rare = {(one["column"], one["value"]) for one in shown["values"] if one["rare"]}
    assert ("grade", "low") in rare
    assert told(capsys, site, "labels", "remove", "findings") == {"removed": "findings"}
    assert told(capsys, site, "labels", "list") == []
    status, _, err = typed(capsys, site, "labels", "show", "findings")
    assert status == 1
    assert "labels list" in err


def test_what_is_wrong_is_a_sentence_for_each_kind_of_fault_and_nothing_is_imported(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, "P-0,1,SECRET-1,mass,61.5", "P-1,0,high,=SECRET-2,5", "SECRET-3,0,high,none,5")
    status, out, err = typed(capsys, site, "labels", "import", str(path), "--key", "patient-id")
    assert status == 1
    assert "row 2, column grade: a value that the declaration does not list" in out
    assert "row 3, column findings: a cell that begins with =" in out
    assert "row 4: the key matches nothing" in out
    assert "nothing was imported" in out
    assert "SECRET" not in out + err
    assert not (site / "agent.log").exists()
    assert told(capsys, site, "labels", "list") == []


def test_a_contradiction_names_both_rows(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path, "P-0,1,low,mass,61.5", "P-0,0,low,mass,61.5")
    status, out, _ = typed(capsys, site, "labels", "import", str(path), "--key", "patient-id")
    assert status == 1
    assert "row 3 (row 2), column effusion: another value" in out


def test_a_rare_value_is_told_on_the_console_and_is_in_no_log(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, "P-0,1,low,mass,61.5")
    status, out, _ = typed(capsys, site, "labels", "import", str(path), "--key", "patient-id", "--dry-run")
    assert (status, "would be imported" in out) == (0, True)
    assert told(capsys, site, "labels", "list") == []
    status, out, _ = typed(capsys, site, "labels", "import", str(path), "--key", "patient-id")
    assert status == 0
    assert "rare: fewer than 11 patients" in out
    log = (site / "agent.log").read_text()
    assert "labels_imported" in log
    for word in ("effusion", "low", "mass", "rare", "P-0"):
        assert word not in log


def test_the_declaration_may_lie_elsewhere_and_its_lack_is_a_sentence(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, "P-0,1,low,mass,61.5")
    elsewhere = path.with_suffix(".toml").rename(tmp_path / "elsewhere.toml")
    words = ("labels", "import", str(path), "--key", "patient-id")
    status, _, err = typed(capsys, site, *words)
    assert status == 1
    assert "findings.toml" in err
    assert told(capsys, site, *words, "--columns", str(elsewhere), "--name", "other")["table"] == "other"


# -- what a task would find


def test_cohort_shows_what_a_task_would_find_and_what_it_would_leave_out_to_the_site_alone(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, "P-0,1,low,mass,61.5", "P-1,0,high,none,5", "P-2,,high,none,5")
    told(capsys, site, "labels", "import", str(path), "--key", "patient-id")
    log = (site / "agent.log").read_text()
    words = ("cohort", "--table", "findings", "--modality", "MR", "--size", "8,8")
    found = told(capsys, site, *words, "--column", "grade")
    assert (found["patients"], found["examples"]) == (3, 6)
    assert found["outputs"] == [{"output": "low", "patients": 1}, {"output": "high", "patients": 2}]
    assert found["left_out"] == [{"reason": "no_row", "images": 4, "patients": 1}]
    found = told(capsys, site, *words, "--column", "effusion")
    assert [(one["output"], one["patients"]) for one in found["outputs"]] == [("no", 1), ("yes", 1)]
    assert {one["reason"]: one["images"] for one in found["left_out"]} == {"no_row": 4, "missing": 3}
    status, out, _ = typed(capsys, site, *words, "--column", "age")
    assert status == 0
    assert "6 examples of 3 patients" in out
    assert "rare" in out
    assert (site / "agent.log").read_text() == log, "no count is logged"


TASK = """
[task]
name = "grades"
kind = "classification"

[labels]
table = "findings"
columns = ["grade"]
classes = ["low", "high"]

[input]
modality = "MR"
size = [8, 8]

[training]
public_patients = 100

[network]
name = "linear"
"""


def test_a_task_file_shows_what_the_task_would_find_here(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, "P-0,1,low,mass,61.5", "P-1,0,high,none,5")
    told(capsys, site, "labels", "import", str(path), "--key", "patient-id")
    (tmp_path / "task.toml").write_text(TASK)
    found = told(capsys, site, "cohort", str(tmp_path / "task.toml"))
    words = ("cohort", "--table", "findings", "--column", "grade", "--modality", "MR", "--size", "8,8")
    assert found == told(capsys, site, *words)
    assert (found["patients"], found["examples"]) == (2, 3)


def test_a_file_that_is_no_task_or_that_the_table_does_not_fit_is_a_sentence_with_file_and_key(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, "P-0,1,low,mass,61.5")
    told(capsys, site, "labels", "import", str(path), "--key", "patient-id")
    for text, why in (
        (TASK.replace('"linear"', '"my.module"'), "task.toml: network.name: must be one of"),
        (TASK.replace('"high"', '"higher"'), "does not declare all classes"),
        (TASK.replace('"findings"', '"other"'), "no label table of that name"),
    ):
        (tmp_path / "task.toml").write_text(text)
        status, _, err = typed(capsys, site, "cohort", str(tmp_path / "task.toml"))
        assert status == 1
        assert why in err.replace("\n", " ")
    status, _, err = typed(capsys, site, "cohort", str(tmp_path / "nothing.toml"))
    assert status == 1
    assert "nothing.toml: No such file" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--column", "grade", "--column", "age"), "all binary, or all numbers"),
        (("--column", "colour"), "no column colour"),
    ],
)
def test_columns_that_no_task_learns_together_are_a_sentence(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    path = table(tmp_path, "P-0,1,low,mass,61.5")
    told(capsys, site, "labels", "import", str(path), "--key", "patient-id")
    status, _, err = typed(capsys, site, "cohort", "--table", "findings", "--modality", "MR", *words)
    assert status == 1
    assert why in err


@pytest.mark.parametrize(
    "words",
    [
        ("--table", "t"),
        ("task.toml", "--modality", "MR"),
        ("--column", "c"),
        ("--per-study",),
        ("--modality", "MR"),
        ("--segment", "liver"),
        ("--segment", "liver", "--modality", "MR", "--table", "t"),
        ("--table", "t", "--size", "x"),
    ],
)
def test_options_of_a_table_without_it_are_usage(site: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--home", str(site), "cohort", *words])
    assert caught.value.code == 2
