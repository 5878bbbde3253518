"""Long values in a sealed file: whole or not at all, ciphertext on the disk, nothing left when they are cleared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.storage import encrypted_sqlite
from agent.storage.encrypted_sqlite import EncryptedCheckpointStore, EncryptedDatabase, VaultError

KEY = bytes(range(32))
LONG = os.urandom(4096) * 5


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EncryptedDatabase:
    monkeypatch.setattr(encrypted_sqlite, "_PART", 4096)
    return EncryptedDatabase(tmp_path / "a.db", KEY)


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 5 * 4096])
def test_what_was_written_is_read_whatever_its_length(file: EncryptedDatabase, size: int) -> None:
    file.write_blob("model", LONG[:size])
    assert file.blob("model") == LONG[:size]
    assert file.blob("another") is None


def test_a_shorter_value_leaves_nothing_of_the_longer_one(file: EncryptedDatabase) -> None:
    file.write_blob("model", LONG)
    file.write_blob("model", b"short")
    assert file.blob("model") == b"short"
    assert file.rows("SELECT count(*) FROM note WHERE name LIKE 'part/%'") == [(1,)]


def test_the_disk_holds_ciphertext_only_and_none_after_it_is_cleared(file: EncryptedDatabase, tmp_path: Path) -> None:
    place = EncryptedCheckpointStore(file, "model")
    place.write(LONG)
    assert LONG[:64] not in on_disk(tmp_path)
    boxes = [box for (box,) in file.rows("SELECT body FROM note WHERE name LIKE 'part/%'")]
    assert all(box[:64] in on_disk(tmp_path) for box in boxes)
    place.clear()
    assert place.read() is None
    assert not any(box[:64] in on_disk(tmp_path) for box in boxes)


def test_parts_that_were_exchanged_or_are_of_an_older_value_are_refused(file: EncryptedDatabase) -> None:
    file.write_blob("model", LONG)
    (old,) = file.rows("SELECT body FROM note WHERE name = 'part/model/0'")
    file.rows(
        "UPDATE note SET body = (SELECT body FROM note WHERE name = 'part/model/1') WHERE name = 'part/model/0'"
    )
    with pytest.raises(VaultError):
        file.blob("model")
    file.write_blob("model", LONG)
    file.rows("UPDATE note SET body = ? WHERE name = 'part/model/0'", old)
    with pytest.raises(VaultError):
        file.blob("model")


def test_a_fault_in_the_middle_leaves_the_old_value(file: EncryptedDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_blob("model", LONG)
    seal, left = EncryptedDatabase.seal, iter(range(3))

    def failing(self: EncryptedDatabase, what: str, plain: bytes) -> bytes:
        if next(left, None) is None:
            raise OSError("the cable")
        return seal(self, what, plain)

    monkeypatch.setattr(EncryptedDatabase, "seal", failing)
    with pytest.raises(OSError, match="cable"):
        file.write_blob("model", LONG[::-1])
    monkeypatch.undo()
    monkeypatch.setattr(encrypted_sqlite, "_PART", 4096)
    assert file.blob("model") == LONG
