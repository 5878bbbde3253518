"""What an older version's commands exported, certified and backed up is read today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from coordinator.operations import backup as coordinator_backup
from coordinator.storage.directory import CoordinatorDirectory
from protos.encryption.key_archive import files_of
from tests.support.older import typed

NONCE = "ab" * 16


def _run(work: Path, module: str, *words: str, good: int = 0) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=work, capture_output=True, text=True, check=False, timeout=280
    )
    assert ended.returncode == good, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def _verified(work: Path, *words: str) -> str:
    return _run(work, "policies.audit.verify", *words)


def test_exports_and_the_certificate_of_a_release_are_sound(tmp_path: Path) -> None:
    work = typed(tmp_path)
    key = (work / "coordinator.fingerprint").read_text().strip()
    said = _verified(work, "coordinator.export", "--key", key)
    assert "SOUND: lazaret/coordinator" in said
    assert "1 releases admitted" in said
    assert "SOUND: lazaret/site-a" in _verified(
        work, "site-a.export", "--key", (work / "site-a.fingerprint").read_text().strip()
    )
    assert "SOUND" in _verified(work, "certificate.json", "--key", key, "--from", "coordinator.export")


def test_the_coordinators_backup_is_restored(tmp_path: Path) -> None:
    work = typed(tmp_path)
    keys = coordinator_backup.private_of(files_of(CoordinatorDirectory(work / "coordinator").keys))
    both = coordinator_backup.restore(tmp_path / "hub", work / "coordinator.backup", keys, NONCE)
    assert (both.epoch, both.waiting) == (2, ("site-a",))
