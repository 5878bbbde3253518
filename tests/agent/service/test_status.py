"""From an empty directory to a release that may leave: at each stage `status` names what comes next."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from agent.cli.options import build_parser
from agent.storage import projects
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import Person
from tests.support.release_site import filled, kept, killed
from tests.support.unchanged import untouched

__all__ = ["typed"]  # a fixture


def told(typed: Typed, home: Path) -> dict[str, str]:
    """What is missing, by the name of the step, and its command."""
    said = typed("--home", home, "status", "--json")
    steps = json.loads(said.out)["steps"]
    assert said.status == (0 if all(s["done"] for s in steps) else 1)
    for step in steps:  # a command that is named is one that there is
        for line in re.findall(r"lazaret-agent ((?:--home DIR )?[a-z]+(?: [a-z]+)?)", step["command"]):
            words = line.removeprefix("--home DIR ").split()
            with pytest.raises(SystemExit) as usage:
                build_parser().parse_args(["--home", "x", *words, "--help"])
            assert usage.value.code == 0, line
    return {s["name"]: s["command"] for s in steps if not s["done"]}


def test_each_stage_on_the_way_to_a_release_names_what_comes_next(
    typed: Typed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(told(typed, tmp_path / "nothing")) == {"directory"}
    home = tmp_path / "fresh"
    assert typed("--home", home, "init", "--site", "site-z", "--modality", "OT").status == 0
    missing = told(typed, home)
    assert set(missing) == {"enrolment", "images", "ledger"}
    assert "lazaret-agent setup" in missing["enrolment"]
    with Federation(tmp_path) as federation:
        site = federation.join("site-a")
        assert set(told(typed, site.home.root)) >= {"images"}
        filled(site, tmp_path)
        with untouched(site):
            assert told(typed, site.home.root) == {}, "nothing is missing"
        _approvals(site, '["compliance", "hospital"]')
        missing = told(typed, site.home.root)
        assert set(missing) == {"a person of compliance", "a person of hospital"}
        typed(*at(site), "ledger", "appoint", "dpo-1", "compliance", Person("dpo-1", "compliance").public.hex())
        assert set(told(typed, site.home.root)) == {"a person of hospital"}


def test_a_person_for_runs_is_appointed_by_the_command_that_the_status_names(typed: Typed, tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        site = filled(federation.join("site-a"), tmp_path)
        _approvals(site, '["compliance"]')
        _approvals(site, '["compliance", "hospital"]', "run_approvals")
        missing = told(typed, site.home.root)
        assert set(missing) == {"a person of compliance", "a person of hospital for runs"}, "each role once"
        command = missing["a person of hospital for runs"]
        assert command.endswith("lazaret-agent setup --hospital NAME KEY")
        head = Person("head-1", "hospital")
        words = command.partition("lazaret-agent ")[2].rpartition("lazaret-agent ")[2]
        filled_in = words.replace("NAME", head.name).replace("KEY", head.public.hex()).split()
        typed(*at(site), *filled_in)
        assert set(told(typed, site.home.root)) == {"a person of compliance"}


def test_what_is_made_and_waits_is_numbered_with_the_command_that_comes_next(typed: Typed, tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        site = filled(federation.join("site-a"), tmp_path)
        killed(site, tmp_path, "before-submit")
        assert len(kept(site)) == 1
        missing = told(typed, site.home.root)
        assert missing.pop("budget site-a/k").startswith("lazaret-agent ledger propose site-a/k"), "one is the limit"
        assert missing == {"release 1, ksame": "lazaret-agent release send 1"}
        _approvals(site, '["hospital"]')
        typed(*at(site), "ledger", "appoint", "head-1", "hospital", Person("head-1", "hospital").public.hex())
        assert "release inspect" in told(typed, site.home.root)["release 1, ksame"]


def test_files_that_were_rejected_and_files_that_wait_are_counted(typed: Typed, tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        site = federation.join("site-a")
        with closing(projects.open_vault(site.home, "main")):
            pass
        inbox, quarantine = projects.project_folders(site.home, "main")
        for folder, name in ((inbox, "0a"), (quarantine, "0b.not_dicom.1")):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x")
        said = typed(*at(site), "status")
        assert "1 received files wait to be read" in said.out
        assert "lazaret-agent quarantine list" in told(typed, site.home.root)["rejected files of main"]


def _approvals(site: Site, roles: str, key: str = "approvals") -> None:
    policy = site.home.root / "policy.toml"
    policy.write_text(re.sub(rf"^{key} = .*", f"{key} = {roles}", policy.read_text(), flags=re.MULTILINE))
