"""A coordinator whose ledger is in PostgreSQL, by the commands that an operator types; its site joins as any does."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

import agent.cli.main
from coordinator.cli.main import main
from policies.audit.verify import main as verify
from policies.review.policy import preset
from tests.support.coordinator_serving import serving
from tests.support.ports import free_port
from tests.support.postgres import GUARDED, OWNER, PASSWORD, WRITER, throwaway

ROOT = Path(__file__).parents[3]
PERSONS = {"dpo-1": "compliance", "chief-1": "hospital"}


def test_a_coordinator_keeps_its_ledger_in_postgresql(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pydicom", reason="agent: a site joins, and its agent reads DICOM")
    home, listen = ["--home", str(tmp_path / "coordinator")], f"127.0.0.1:{free_port()}"

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main([*home, *words]) == 0
        return capsys.readouterr().out

    with throwaway() as server:
        run("ledger", "install", server.dsn(OWNER), "--writer", WRITER)
        run("init", "--policy", "internal", "--listen", listen, "--ledger", server.dsn(WRITER))
        for person, role in PERSONS.items():
            run("ledger", "appoint", person, role, run("ledger", "person", str(tmp_path / person)).strip())
        with serving(home):
            enrol(tmp_path, run, listen)
        kinds = [e["type"] for e in json.loads(run("ledger", "show", "--json"))["entries"]]
        assert kinds == ["appointed"] * 2 + ["approved"] * 2 + ["enrolled", "opened", "opened", "issued"]
        out = tmp_path / "ledger.export"
        run("ledger", "export", str(out))
        assert verify([str(out), "--key", run("ledger", "fingerprint").strip()]) == 0
        assert not (tmp_path / "coordinator" / "ledger.db").exists()
        server.kill()
        capsys.readouterr()
        assert main([*home, "ledger", "show"]) == 1
        assert "database" in capsys.readouterr().err


def enrol(root: Path, run: object, listen: str) -> None:
    """One site, by token, and two persons' approvals; over the coordinator's port."""
    assert callable(run)
    site, files = ["--home", str(root / "site-a")], [str(root / "site-a.invitation"), str(root / "site-a.token")]
    policy = root / "policy.toml"
    policy.write_text(preset("internal"))
    words = ["init", "--site", "site-a", "--policy", str(policy), "--coordinator", listen, "--modality", "OT"]
    assert agent.cli.main.main([*site, *words]) == 0
    said = run("invite", "site-a", "--out", files[0], "--token-file", files[1])
    found = re.search(r"root: ([0-9a-f ]+)", said)
    assert found is not None
    words = ["enrol", files[0], "--token-file", files[1], "--fingerprint", found.group(1).strip()]
    agent.cli.main.main([*site, *words])
    (pending,) = json.loads(run("enrolments", "--json"))
    assert pending["digest"] == hashlib.sha256((root / "site-a" / "request.json").read_bytes()).hexdigest()
    approvals = []
    for person in PERSONS:
        approvals.append(str(root / f"{person}.json"))
        what = ["ledger", "sign", "enrol", "site-a", pending["digest"], "--serial", "s1", "--person", person]
        run(*what, "--key", str(root / person), "--out", approvals[-1])
    run("approve", "site-a", *approvals, "--serial", "s1")
    assert agent.cli.main.main([*site, "enrol"]) == 0
    assert (root / "site-a" / "keys" / "tls.pem").exists()


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
