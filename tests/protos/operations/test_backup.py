"""A backup is whole, signed and unchanged, or it is refused before anything of it is used."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protos.operations.backup import (
    BOX,
    LIST,
    MANIFEST,
    BackupError,
    BackupManifest,
    BackupWriter,
    copy_files,
    read,
    tells_password,
)

KEY = Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key().public_bytes_raw()
EMPTY = BackupManifest("lazaret/site-a", 1_760_000_000, "0.1.0", "", 2, {"sign.key": "ab" * 16})


def made(folder: Path) -> Path:
    with BackupWriter(folder) as writer:
        writer.add("site.toml", b'site = "site-a"\n')
        writer.add("watch/seen.json", b"{}")
        writer.add(BOX, b"sealed")
        (folder.parent / "tree" / "main").mkdir(parents=True, exist_ok=True)
        (folder.parent / "tree" / "main" / ("0" * 32)).write_bytes(b"x" * 3000)
        (folder.parent / "tree" / "main" / ".half.part").write_bytes(b"half")
        assert writer.copy_tree("inbox", folder.parent / "tree") == 1
        assert writer.copy_tree("quarantine", folder.parent / "none") == 0
        writer.finish(EMPTY, KEY)
    return folder


def test_a_backup_reads_back_and_is_taken_without_its_box(tmp_path: Path) -> None:
    folder = made(tmp_path / "backup")
    manifest = read(folder, PUBLIC)
    assert (manifest.origin, manifest.ledger_form, manifest.keys) == (EMPTY.origin, 2, EMPTY.keys)
    assert set(manifest.files) == {"site.toml", "watch/seen.json", BOX, f"inbox/main/{'0' * 32}"}
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path.name
    copy_files(folder, manifest, tmp_path / "home", frozenset({"site.toml"}))
    there = {p.relative_to(tmp_path / "home").as_posix() for p in (tmp_path / "home").rglob("*") if p.is_file()}
    assert there == {"watch/seen.json", f"inbox/main/{'0' * 32}"}


def test_what_was_not_finished_is_no_backup(tmp_path: Path) -> None:
    (tmp_path / "dark").mkdir()
    with pytest.raises(IsADirectoryError), BackupWriter(tmp_path / "dark" / "backup") as writer:
        writer.took("")
    (tmp_path / "dark").rmdir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "backup.part").mkdir()
    (tmp_path / "backup.part" / "left").write_bytes(b"by a crash")
    with pytest.raises(BackupError, match="not a complete backup"):
        read(tmp_path / "backup.part", PUBLIC)
    made(tmp_path / "backup")
    assert not (tmp_path / "backup.part").exists()
    with pytest.raises(BackupError, match="new folder"):
        BackupWriter(tmp_path / "backup")


def swapped(folder: Path) -> None:
    other = made(folder.parent / "other")
    (folder / MANIFEST).write_bytes((other / MANIFEST).read_bytes().replace(b"a", b"b", 1))


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte": lambda f: (f / "site.toml").write_bytes(b'site = "site-b"\n'),
    "cut": lambda f: (f / "watch" / "seen.json").write_bytes(b""),
    "removed": lambda f: (f / "watch" / "seen.json").unlink(),
    "added": lambda f: (f / "policy.toml").write_bytes(b"looser"),
    "a link": lambda f: ((f / "site.toml").unlink(), (f / "site.toml").symlink_to("/etc/hostname")),
    "a link beside": lambda f: (f / "extra").symlink_to("/etc"),
    "a link for a folder": lambda f: (
        (f / "watch").rename(f.parent / "elsewhere"),
        (f / "watch").symlink_to(f.parent / "elsewhere"),
    ),
    "a link for the manifest": lambda f: (
        (f / MANIFEST).rename(f.parent / "manifest"),
        (f / MANIFEST).symlink_to(f.parent / "manifest"),
    ),
    "the list": lambda f: (f / LIST).write_bytes((f / LIST).read_bytes() + b" "),
    "a shorter list": lambda f: ((f / LIST).write_bytes(b"{}"), [p.unlink() for p in f.rglob("*.toml")]),
    "the manifest": swapped,
    "no manifest": lambda f: (f / MANIFEST).unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_backup_that_was_changed_is_refused(tmp_path: Path, change: str) -> None:
    folder = made(tmp_path / "backup")
    CHANGES[change](folder)
    with pytest.raises(BackupError):
        read(folder, PUBLIC)


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        ('ledger = "host=db password=hunter2"', True),
        ("# ledger = \"host=db Password = 'hunter2'\"", True),
        ('ledger = "postgresql://writer:hunter2@db/lazaret"', True),
        ('ledger = "postgresql://db/lazaret?user=writer&password=hunter2"', True),
        ('client_secret = "hunter2"', True),
        ('ledger = "postgresql://writer@db:5432/lazaret?passfile=/etc/lazaret/pgpass"', False),
        ('password_file = "tls/archive.password"\nclient_secret_file = "keys/oidc"', False),
        ('issuer = "https://sso.example.org:8443/realm"\nmail = "it@example.org"', False),
    ],
)
def test_a_password_in_settings_is_found_and_a_path_to_one_is_none(text: str, tells: bool) -> None:
    assert tells_password(text) is tells


def test_somebody_elses_backup_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "backup")
    with pytest.raises(BackupError, match="not signed by these keys"):
        read(folder, Ed25519PrivateKey.generate().public_key().public_bytes_raw())


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../b", ".hidden", "a\nb", "a//b", ""])
def test_no_name_leads_out_of_a_backup(tmp_path: Path, name: str) -> None:
    with BackupWriter(tmp_path / "backup") as writer, pytest.raises(BackupError, match="name"):
        writer.add(name, b"x")
    listing = b'{"' + name.encode().replace(b"\n", b"\\n") + b'": ["00", 1]}'
    import hashlib
    import json
    from dataclasses import asdict

    table = asdict(EMPTY) | {"listed": hashlib.sha256(listing).hexdigest()}
    del table["files"]
    with pytest.raises(BackupError, match="outside the backup"):
        BackupManifest.of(json.dumps(table).encode(), listing)


def test_a_backup_of_a_newer_form_is_refused(tmp_path: Path) -> None:
    with BackupWriter(tmp_path / "backup") as writer:
        newer = BackupManifest(EMPTY.origin, 1, "9", "", 9, {}, form=2)
        writer.finish(newer, KEY)
    with pytest.raises(BackupError, match="form 2"):
        read(tmp_path / "backup", PUBLIC)


def test_a_special_file_is_not_copied(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with BackupWriter(tmp_path / "backup") as writer:
        with pytest.raises(BackupError, match="not a regular file"):
            writer.copy("pipe", tmp_path / "pipe")
        assert not writer.copy("gone", tmp_path / "gone")
