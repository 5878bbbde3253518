"""Who is behind runs and releases with an epsilon is written down at the site, so that a patient can be told."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from agent.cli.administration import _membership
from agent.release.release_record import MEMBERS, remember_members, taken_part
from agent.storage import projects
from agent.storage.site_directory import SiteDirectory
from tests.support.federated_sites import START, federated, federated_site, granted, part
from tests.support.ingest_site import ingest_site, typed
from tests.support.site_world import MemoryVault

RECORD: Any = [{"release": "release-k", "clusters": [["a", "b"]], "again": []}]


def test_a_name_keeps_everybody_it_was_ever_made_from() -> None:
    vault = MemoryVault(())
    remember_members(vault, "run-1", ["b", "a"])
    remember_members(vault, "run-1", ["c"])
    remember_members(vault, "run-2", ["d"])
    assert vault.note(MEMBERS) == {"run-1": ["a", "b", "c"], "run-2": ["d"]}
    assert taken_part(RECORD, vault.note(MEMBERS), {"a"}) == ["release-k", "run-1"]
    assert taken_part(RECORD, vault.note(MEMBERS), {"d", "c"}) == ["run-1", "run-2"]
    assert taken_part(None, None, {"a"}) == []


def test_the_opt_out_says_what_the_patient_was_in_and_that_no_model_is_called_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = SiteDirectory(ingest_site(tmp_path))
    with contextlib.closing(projects.open_vault(home)) as vault:
        remember_members(vault, "digits-1", ["0" * 32])
        remember_members(vault, "digits-2", ["1" * 32])
    first, second = _membership(home, {"0" * 32})
    assert "took part in: digits-1. For this site alone" in first
    assert "not called back" in second
    assert list(_membership(home, {"2" * 32})) == ["by this site's records they were in no run and in no release"]
    (tmp_path / "ids.txt").write_text("somebody\n")
    status, out, _ = typed(capsys, home.root, "opt-out", "add", "--patients", str(tmp_path / "ids.txt"), "--anyway")
    assert (status, "in no run and in no release" in out) == (0, True)


def test_a_run_leaves_at_the_site_whom_it_learned_from(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=2))
    part(w).train("run-1", 1, START)
    (whom,) = w.vault.note(MEMBERS).values()
    assert list(w.vault.note(MEMBERS)) == ["run-1"]
    assert whom == [f"{i:04d}" for i in range(w.vault.patients)]
