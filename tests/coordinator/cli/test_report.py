"""``report`` as it is typed: the page of everything as before, a report by its name, and a list of names."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.cli import report as report_commands
from coordinator.cli.options import build_parser
from coordinator.reports.catalog import REPORTS
from coordinator.reports.document import ReportError
from tests.support.report_world import Stage, keep_run, stage


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        yield shown


def typed_round(world: Stage, *words: object) -> int:
    """Exit status of ``round report``."""
    arguments = build_parser().parse_args(["--home", str(world.home.root), "round", "report", *map(str, words)])
    return main.carry_out(arguments)


def typed(world: Stage, *words: object) -> int:
    """Exit status."""
    arguments = build_parser().parse_args(["--home", str(world.home.root), "report", *map(str, words)])
    return report_commands.run(arguments)


def test_one_word_writes_the_overview_with_what_was_measured(world: Stage, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps({"title": "A trial", "steps": [{"name": "ingest", "seconds": 3.25}]}))
    assert typed(world, tmp_path / "o.html", "--measured", tmp_path / "m.json") == 0
    page = (tmp_path / "o.html").read_text()
    root = world.store.prove(0).checkpoint.split("\n")[2]
    for text in ("A trial", "ingest", base64.b64decode(root).hex(), world.names["eleven"], "data:image/png;base64,"):
        assert text in page


def test_a_report_is_written_in_the_form_of_its_files_ending(world: Stage, tmp_path: Path) -> None:
    for name, begins in (("burn-down.pdf", b"%PDF-"), ("burn-down.html", b"<!doctype"), ("burn-down.json", b"{")):
        assert typed(world, "burn-down", tmp_path / name) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_certificate_is_written_with_how_to_check_it(
    world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = typed(world, "certificate", tmp_path / "c.pdf", "--release", world.run)
    assert code == 0
    assert "check it with: lazaret-verify c.pdf --key FINGERPRINT --from ledger.export" in capsys.readouterr().out


def test_the_list_names_every_report(world: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(world, "list") == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    for name in REPORTS:
        assert name.split("-")[0] in printed


@pytest.mark.parametrize(
    "words",
    [
        ("burn-down", "o.exe"),
        ("nothing", "o.pdf"),
        ("certificate", "o.pdf"),
        ("o.pdf", "--release", "trial"),
        ("burn-down", "a.pdf", "b.pdf"),
        ("burn-down",),
        ("certificate",),
        ("burn-down", "a.pdf", "--measured", "m.json"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_written(
    world: Stage, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReportError):
        typed(world, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_reports_name_without_a_file_is_refused_with_what_to_type(
    world: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReportError, match=r"name the file to write: report burn-down burn-down\.html$"):
        typed(world, "burn-down")
    for out in ("./burn-down", "burn-down.html", "everything"):
        assert typed(world, out) == 0
        assert Path(out).read_bytes().startswith(b"<!doctype")


def test_a_terminal_shows_what_is_being_done_and_a_file_gets_nothing_of_it(
    world: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A ledger of a million entries takes a minute."""
    typed(world, "denied", tmp_path / "quiet.json")
    assert capfd.readouterr().err == ""
    shown, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w") as screen, os.fdopen(shown, "rb", buffering=0) as reader:
        monkeypatch.setattr(sys, "stderr", screen)
        typed(world, "denied", tmp_path / "watched.json")
        screen.flush()
        text = ""  # a terminal hands over what it was given in pieces
        while " entries" not in text and wait([reader], 5):
            text += reader.read(65_536).decode()
    assert "reading the ledger" in text
    assert f"making denied of {world.store.state.size} entries" in text
    assert (tmp_path / "watched.json").read_bytes().startswith(b"{")


def test_a_runs_report_is_a_page_and_a_json_in_a_folder(
    world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_run(world)
    out = tmp_path / "a" / "b"
    assert typed_round(world, "trial", "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json"]
    assert (out / "report.html").read_bytes().startswith(b"<!doctype")
    assert json.loads((out / "report.json").read_text())["run"] == "trial"
    assert "Finished: all 2 rounds are closed; wrote report.html and report.json" in capsys.readouterr().out


def test_a_run_that_goes_on_is_reported_as_not_ended(
    world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = keep_run(world)
    (folder / "end.json").unlink()
    assert typed_round(world, "trial", "--out", tmp_path) == 0
    assert capsys.readouterr().out.startswith("Not ended: 2 of 2 rounds are closed")
    assert "Not ended" in (tmp_path / "report.html").read_text()


def test_a_run_that_cannot_be_reported_leaves_what_was_there_as_it_was(world: Stage, tmp_path: Path) -> None:
    folder = keep_run(world)
    (tmp_path / "report.html").write_text("of before")
    (folder / "round-2.sites").write_bytes(b"{")
    for run, out, why in (
        ("nothing", tmp_path, "there is no run of that name"),
        ("trial", tmp_path, "trial: a file of the run is damaged"),
        ("trial", tmp_path / "new", "trial: a file of the run is damaged"),
        ("trial", tmp_path / "report.html", "report.html is a file: name a folder"),
    ):
        with pytest.raises(ReportError, match=why):
            typed_round(world, run, "--out", out)
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
        assert (tmp_path / "report.html").read_text() == "of before"
