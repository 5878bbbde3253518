"""What is missing, as ``status`` prints it; and what fills a directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.common.errors import ConfigError
from protos.operations.next_steps import Step, answered, collect, disk


def fails(error: Exception) -> Iterator[Step]:
    raise error
    yield


def test_a_step_that_cannot_be_told_is_missing_and_keeps_no_other_from_being_told() -> None:
    found = collect(
        [
            ("first", "file", lambda: fails(ConfigError("policy.toml is missing: restore it"))),
            ("first", "fault", lambda: fails(ValueError("patient 7"))),
            ("then", "good", lambda: [Step("then", "good", said="there")]),
        ],
        (ConfigError,),
    )
    assert [(s.name, s.missing) for s in found] == [
        ("file", "policy.toml is missing: restore it"),
        ("fault", "cannot be told (ValueError)"),
        ("good", ""),
    ]


@pytest.mark.parametrize("missing", ["", "no image is here"])
def test_lines_are_numbered_and_the_exit_status_says_whether_something_is_missing(
    missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [Step("images", "directory", said="made"), Step("images", "cohort", missing, "lazaret-agent ingest")]
    assert answered(steps, {"ledger": 2048, "free": 5 << 30}, False) == (1 if missing else 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["images:", "  ok  directory: made"]
    assert ("  1.  cohort: no image is here" in lines) == ("      lazaret-agent ingest" in lines) == bool(missing)
    assert lines[-3:-1] == ["    2.0 KiB  ledger", "    5.0 GiB  free"]
    assert answered(steps, {}, True) == (1 if missing else 0)
    told = json.loads(capsys.readouterr().out)["steps"][1]
    assert told == {
        "goal": "images",
        "name": "cohort",
        "done": not missing,
        "said": missing,
        "command": "lazaret-agent ingest",
    }


def test_what_fills_a_directory_is_told_by_part(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a").write_bytes(b"x" * 100_000)
    (tmp_path / "ledger.db").write_bytes(b"x" * 10_000)
    (tmp_path / "ledger.db-wal").write_bytes(b"x" * 10_000)
    (tmp_path / "else").write_bytes(b"x")
    sizes = disk(tmp_path, {"depth": ("deep",), "ledger": ("ledger.db*",), "none": ("none",)})
    assert set(sizes) == {"depth", "ledger", "other", "free"}
    assert sizes["depth"] >= 100_000
    assert 50_000 > sizes["ledger"] >= 20_000
    assert disk(tmp_path / "nothing", {}) == {}
