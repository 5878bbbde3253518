"""Operators' mistakes end with a sentence and exit status 1, usage with 2; nothing half-done is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agent.cli.main
import coordinator.cli.main
from policies.review.policy import preset

MODALITY = ["--modality", "OT"]


def test_a_site_with_a_bad_name_leaves_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--home", str(tmp_path / "site"), "init", "--site", 'Bad"Name', *MODALITY]
    assert agent.cli.main.main(words) == 1
    assert "site: must be a short name" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("words", [[], ["init"], ["init", "--site", "site-a"], ["nonsense"]])
def test_wrong_usage_exits_with_2(tmp_path: Path, words: list[str]) -> None:
    for main in (agent.cli.main.main, coordinator.cli.main.main):
        with pytest.raises(SystemExit) as caught:
            main(["--home", str(tmp_path), *words] if words != ["init"] else ["init"])
        assert caught.value.code == 2


def test_a_site_that_is_not_enrolled_is_told_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(tmp_path / "site")]
    assert agent.cli.main.main([*home, "init", "--site", "site-a", *MODALITY]) == 0
    assert agent.cli.main.main([*home, "doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out.split("run `enrol` with it\n")[1])
    assert found["site.toml"] is None
    assert "run `lazaret-agent enrol` with the coordinator's invitation" in found["enrolled"]
    assert agent.cli.main.main([*home, "ledger", "show"]) == 1
    assert "no ledger" in capsys.readouterr().err
    assert agent.cli.main.main([*home, "upgrade"]) == 0
    assert capsys.readouterr().out == "no ledger yet; no vault yet; nothing to do\n"
    assert agent.cli.main.main([*home, "console"]) == 1
    page = Path("deploy") / "docs" / "consoles.md"
    assert str(page) in capsys.readouterr().err.replace("\n", " ")
    assert "console.toml" in (Path(__file__).parent.parent / page).read_text()


def test_a_folder_that_does_not_exist_is_named_as_the_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path / "site")]
    agent.cli.main.main([*home, "init", "--site", "site-a", "--input", "nowhere", *MODALITY])
    assert agent.cli.main.main([*home, "ingest", "--json"]) == 1
    assert "folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"mechanism": 1}', "not json"])
def test_a_job_that_cannot_be_read_is_refused_with_its_keys(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path / "coordinator")]
    assert coordinator.cli.main.main([*home, "init"]) == 0
    (tmp_path / "job.json").write_text(text)
    assert coordinator.cli.main.main([*home, "round", "launch", str(tmp_path / "job.json"), "--run", "x"]) == 1
    assert "job.json" in capsys.readouterr().err


def test_an_invitation_that_is_none_is_told_as_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path / "site")]
    agent.cli.main.main([*home, "init", "--site", "site-a", *MODALITY])
    (tmp_path / "token").write_text("abc\n")
    for text in ("", "{}", '{"payload": "AAAA"}', "x" * 1000):
        (tmp_path / "site-a.invitation").write_text(text)
        words = ["enrol", str(tmp_path / "site-a.invitation"), "--token-file", str(tmp_path / "token")]
        assert agent.cli.main.main([*home, *words, "--fingerprint", "0" * 32]) == 1
        assert "refused: " in capsys.readouterr().err
    assert agent.cli.main.main([*home, *words]) == 1
    assert "by phone" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "site" / "keys" / "tls.pem").exists()


def test_an_operator_whose_coordinator_does_not_serve_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path / "coordinator")]
    assert coordinator.cli.main.main([*home, "init", "--listen", "127.0.0.1:1"]) == 0
    (tmp_path / "approval.json").write_text("{}")
    approve = ["approve", "site-a", str(tmp_path / "approval.json"), "--serial", "s-1"]
    for words in (approve, ["enrolments"], ["round", "stop", "r"], ["round", "watch", "r"]):
        assert coordinator.cli.main.main([*home, *words]) == 1
        assert "refused: " in capsys.readouterr().err


def test_a_policy_with_problems_names_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "policy.toml").write_text(
        preset("internal").replace("k_min = 5", "k_min = 1").replace("delta", "dleta")
    )
    words = ["--home", str(tmp_path / "c"), "init", "--policy", str(tmp_path / "policy.toml")]
    assert coordinator.cli.main.main(words) == 1
    said = capsys.readouterr().err.replace("\n", " ")
    assert "delta: missing" in said
    assert "dleta: unknown key" in said
    assert "k_min" in said
