"""Keys in a box: only the passphrase opens it, and a mark tells two keys apart without telling either."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from protos.encryption import key_archive
from protos.encryption.key_archive import LEAST, KeyArchiveError, files_of, key_mark, open_files, seal_files

PASSPHRASE = "four horses and a staple"
FILES = {"sign.key": b"secret one", "projects/main/key": bytes(range(32))}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guessing costs 128 MiB each; the tests need not pay it every time."""
    monkeypatch.setattr(
        key_archive, "_key", lambda words, salt: Scrypt(salt=salt, length=32, n=16, r=8, p=1).derive(words.encode())
    )


def test_a_box_opens_with_its_passphrase_and_tells_nothing_without() -> None:
    box = seal_files(FILES, PASSPHRASE)
    assert open_files(box, PASSPHRASE) == FILES
    assert not any(body in box or name.encode() in box for name, body in FILES.items())
    assert seal_files(FILES, PASSPHRASE) != box, "no two are alike"
    for wrong in (PASSPHRASE + " ", PASSPHRASE.upper(), ""):
        with pytest.raises(KeyArchiveError, match="passphrase"):
            open_files(box, wrong)


def test_a_changed_or_cut_box_does_not_open() -> None:
    box = seal_files(FILES, PASSPHRASE)
    for at in range(0, len(box), 7):
        with pytest.raises(KeyArchiveError):
            open_files(box[:at] + bytes([box[at] ^ 1]) + box[at + 1 :], PASSPHRASE)
    for cut in (0, 4, len(box) - 1):
        with pytest.raises(KeyArchiveError):
            open_files(box[:cut], PASSPHRASE)


@pytest.mark.parametrize("weak", ["", "short", "x" * (LEAST - 1), "a" * 40, "abababababababab"])
def test_a_weak_passphrase_seals_nothing(weak: str) -> None:
    with pytest.raises(KeyArchiveError, match="at least"):
        seal_files(FILES, weak)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../b", ".hidden", "a//b", "a/b/c/d/e", "a\nb", ""])
def test_a_name_that_leads_elsewhere_is_neither_sealed_nor_opened(name: str) -> None:
    with pytest.raises(KeyArchiveError, match="invalid name"):
        seal_files({name: b"x"}, PASSPHRASE)


def test_marks_tell_keys_apart() -> None:
    keys = [os.urandom(32) for _ in range(100)]
    assert len({key_mark(key) for key in keys}) == 100
    assert key_mark(keys[0]) == key_mark(bytes(keys[0]))
    assert keys[0].hex() not in key_mark(keys[0])


def test_the_files_of_a_medium_are_read_without_links_and_halves(tmp_path: Path) -> None:
    (tmp_path / "projects" / "main").mkdir(parents=True)
    (tmp_path / "projects" / "main" / "key").write_bytes(b"k")
    (tmp_path / "half.part").write_bytes(b"h")
    assert files_of(tmp_path) == {"projects/main/key": b"k"}
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(KeyArchiveError, match="link"):
        files_of(tmp_path)
    with pytest.raises(KeyArchiveError, match="not a folder"):
        files_of(tmp_path / "none")
