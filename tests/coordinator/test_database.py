"""A coordinator whose ledger is in PostgreSQL, by the commands that an operator types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.edges import home as agent_home
from coordinator.__main__ import main
from policies.policy import preset
from policies.verify import main as verify
from tests.support.federation import SETTINGS
from tests.support.postgres import GUARDED, OWNER, PASSWORD, WRITER, throwaway


def test_a_coordinator_keeps_its_ledger_in_postgresql(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(tmp_path / "coordinator")]
    with throwaway() as server:
        assert main([*home, "ledger", "install", server.dsn(OWNER), "--writer", WRITER]) == 0
        assert main([*home, "init", "--policy", "internal", "--ledger", server.dsn(WRITER)]) == 0
        site = agent_home.create(
            tmp_path / "site-a", SETTINGS.format(site="site-a", listen="127.0.0.1:1"), preset("internal")
        )
        (tmp_path / "request.json").write_bytes(agent_home.enrolment(site))
        bundle, out = tmp_path / "bundle.json", tmp_path / "ledger.export"
        assert main([*home, "approve", str(tmp_path / "request.json"), "--out", str(bundle)]) == 0
        capsys.readouterr()
        assert main([*home, "ledger", "show", "--json"]) == 0
        assert [e["type"] for e in json.loads(capsys.readouterr().out)["entries"]] == ["enrolled", "opened", "opened"]
        assert main([*home, "ledger", "export", str(out)]) == 0
        assert verify([str(out)]) == 0
        assert not (tmp_path / "coordinator" / "ledger.db").exists()
        server.kill()
        capsys.readouterr()
        assert main([*home, "ledger", "show"]) == 1
        assert "database" in capsys.readouterr().err


def test_a_database_that_cannot_be_used_is_a_sentence_without_a_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with throwaway() as server:
        address = server.dsn(GUARDED, password=PASSWORD[::-1])
        home = ["--home", str(tmp_path / "coordinator")]
        assert main([*home, "init", "--policy", "internal", "--ledger", address]) == 1
    said = capsys.readouterr().err
    assert "refused: the ledger's database" in said
    assert PASSWORD[::-1] not in said
