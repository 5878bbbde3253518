"""What is missing at a coordinator, from an empty directory to an enrolled site."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
from pathlib import Path

import pytest

from coordinator.cli.main import main
from coordinator.cli.options import build_parser
from coordinator.storage import directory as coordinator_home
from coordinator.storage.directory import CoordinatorDirectory, open_ledger
from policies.governance import decisions
from tests.support.coordinator_serving import serving
from tests.support.federation_world import Federation
from tests.support.ledger_world import Person, policy
from tests.support.ports import free_port


def told(home: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What is missing, by the name of the step, and its command."""
    capsys.readouterr()
    status = main(["--home", str(home), "status", "--json"])
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert status == (0 if all(s["done"] for s in steps) else 1)
    for step in steps:  # a command that is named is one that there is
        for line in re.findall(r"lazaret-coordinator ((?:--home DIR )?[a-z]+(?: [a-z]+)?)", step["command"]):
            with pytest.raises(SystemExit) as usage:
                build_parser().parse_args(["--home", "x", *line.removeprefix("--home DIR ").split(), "--help"])
            assert usage.value.code == 0, line
    capsys.readouterr()
    return {s["name"]: s["command"] for s in steps if not s["done"]}


def test_each_stage_names_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "coordinator"
    assert set(told(home, capsys)) == {"directory"}
    listen = f"127.0.0.1:{free_port()}"
    assert main(["--home", str(home), "init", "--policy", "internal", "--listen", listen]) == 0
    roles = {"a person of compliance", "a person of hospital"}
    assert set(told(home, capsys)) == {"root key", "service", "sites"} | roles
    shutil.rmtree(home / "offline")
    with open_ledger(CoordinatorDirectory(home)) as store:
        for role in ("compliance", "hospital"):
            decisions.appoint(store, f"{role}-1", role, Person(f"{role}-1", role).public)
    with serving(["--home", str(home)]):
        assert set(told(home, capsys)) == {"sites"}
    assert set(told(home, capsys)) == {"service", "sites"}


def test_a_site_that_is_not_here_is_named_with_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listen = f"127.0.0.1:{free_port()}"
    coordinator_home.create(tmp_path / "coordinator", f'listen = "{listen}"\n', policy(), dt.datetime.now(dt.UTC))
    federation = Federation(tmp_path)
    with federation:
        federation.join("north", policy())
    home = ["--home", str(federation.root / "coordinator")]
    with serving(home):
        assert main([*home, "status"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "north is missing since the coordinator's start: its agent has not connected" in said, said
