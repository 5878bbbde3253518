"""The coordinator tells the fingerprint of its own ledger's key, and of each site's: auditors ask it elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from coordinator.cli.main import main
from coordinator.storage import directory as homes
from policies.audit.verify import main as verify
from policies.ledger_service import LedgerService
from policies.review.policy import parse
from tests.support.ledger_world import Hospital


def told(capsys: pytest.CaptureFixture[str], home: Path, *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["--home", str(home), "ledger", *words])
    printed = capsys.readouterr()
    return code, (printed.out + printed.err).strip()


def test_the_coordinator_tells_its_own_and_that_of_each_site(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--home", str(tmp_path / "hub"), "init", "--policy", "internal"]) == 0
    home, site = homes.CoordinatorDirectory(tmp_path / "hub"), Hospital("site-a")
    own = parse(site.policy_text, "site-a")
    with homes.open_ledger(home) as store:
        LedgerService(store, lambda _: own).enrol(*site.enrolment(), own)
    fingerprint = hashlib.sha256(home.ledger_key().public_key().public_bytes_raw()).hexdigest()
    assert told(capsys, home.root, "fingerprint") == (0, fingerprint)
    code, said = told(capsys, home.root, "export", str(tmp_path / "x.export"))
    assert (code, said.endswith("lazaret-verify x.export --key FINGERPRINT")) == (0, True)
    assert verify([str(tmp_path / "x.export"), "--key", fingerprint]) == 0
    assert verify([str(tmp_path / "x.export")]) == 3
    assert told(capsys, home.root, "fingerprint", "--site", "site-a") == (0, hashlib.sha256(site.public).hexdigest())
    code, said = told(capsys, home.root, "fingerprint", "--site", "site-b")
    assert (code, "site site-b was never enrolled" in said) == (1, True)
