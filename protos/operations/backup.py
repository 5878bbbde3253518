"""A backup: a folder with a signed list of its files. It appears completely or not at all; keys only in an encrypted
box.

``manifest.json`` is a DSSE envelope signed with this side's key (the site's, or the ledger's). It names the SHA-256
of ``files.json``, the list of all files with their digests. So a backup that was changed, truncated or mixed from two
is refused before any of it is used. Keys are listed by name and by a mark that does not reveal them. The keys
themselves are included only on request, in ``keys.box``, encrypted with a passphrase.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protos.common.dsse import EnvelopeError, open_sealed, seal
from protos.common.durable_files import flush_directory, write_new
from protos.common.errors import StorageError
from protos.encryption.key_archive import KeyArchiveError, ask_passphrase, files_of, open_files

FORM: Final = 1
PAYLOAD_TYPE: Final = "application/vnd.lazaret.backup+json"
MANIFEST: Final = "manifest.json"
LIST: Final = "files.json"
BOX: Final = "keys.box"
_PART: Final = ".part"  # of a backup that is not whole yet
_MOST_LISTED: Final = 1 << 28
_CLEAR: Final = re.compile(r"(?i)(?:passw(?:or)?d|secret)[\"']?\s*=\s*\S|[a-z]://[^\s/@\"']*:[^\s/@\"']+@")
_NAME: Final = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,120}/){0,6}[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


class BackupError(StorageError, ValueError):
    """The backup cannot be made or used; the text says why."""


@dataclass(frozen=True, slots=True)
class BackupManifest:
    """A backup's contents, and its owner."""

    origin: str  # the name of its ledger in checkpoints
    made: int  # seconds since 1970
    version: str  # of the program that made it
    checkpoint: str  # the signed head of the ledger in it; "" for a ledger elsewhere, or an empty one
    ledger_form: int  # of the ledger's database in it; 0: there is none
    keys: Mapping[str, str]  # the private files that belong to it, by name -> mark; they are not in it
    listed: str = ""  # SHA-256 of the list of files
    form: int = FORM
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # name -> SHA-256, bytes

    @classmethod
    def of(cls, raw: bytes, listing: bytes) -> BackupManifest:
        """Read one whose signature was checked, and its list of files.

        Raises:
            BackupError: made by a newer program, unreadable, or not that list.
        """
        try:
            table = json.loads(raw)
            if table["form"] != FORM:
                raise BackupError(f"the backup has form {table['form']}, and this program knows form {FORM}")
            files = {str(n): (str(f[0]), int(f[1])) for n, f in json.loads(listing).items()}
            made = cls(**table, files=files)
        except BackupError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise BackupError(f"{MANIFEST} cannot be read") from None
        if hashlib.sha256(listing).hexdigest() != made.listed:
            raise BackupError(f"{LIST} was changed since the backup was made")
        if not all(fits(name) for name in files):
            raise BackupError("the list names a file outside the backup")
        return made


class BackupWriter:
    """A backup in the making: everything goes to ``NAME.part``, which gets its name when all is there and durable."""

    def __init__(self, folder: Path) -> None:
        """Begin.

        Raises:
            BackupError: there is something of that name.
            OSError: it cannot be written there.
        """
        self.folder, self.part = folder, folder.with_name(folder.name + _PART)
        if folder.exists() or folder.is_symlink():
            raise BackupError(f"{folder.name} exists: name a new folder for the backup")
        shutil.rmtree(self.part, ignore_errors=True)  # of one that was interrupted
        self.part.mkdir(mode=0o700)
        self._files: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> BackupWriter:
        """Use as a context: left by an exception, nothing stays."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Nothing stays of one that was not finished."""
        shutil.rmtree(self.part, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Where a file of that name is written by somebody else; then :meth:`took` it."""
        if not fits(name):
            raise BackupError("a file has a name that a backup cannot hold; rename it")
        path = self.part / name
        _folders(path.parent)
        return path

    def took(self, name: str) -> None:
        """A file was written and made durable there."""
        with (self.part / name).open("rb") as stream:
            self._files[name] = hashlib.file_digest(stream, "sha256").hexdigest(), os.fstat(stream.fileno()).st_size

    def add(self, name: str, body: bytes) -> None:
        """A file of these bytes."""
        write_new(self.path(name), body, 0o600)
        self.took(name)

    def copy(self, name: str, source: Path) -> bool:
        """A file as it is now; False if it is gone by now. Links are not followed."""
        try:
            handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise BackupError(f"{source.name} is not a regular file: remove it first")
            with _private(self.path(name)) as out:
                shutil.copyfileobj(stream, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
        self.took(name)
        return True

    def copy_tree(self, name: str, source: Path) -> int:
        """All plain files below a folder, as they are now; how many. A folder that is not there holds none.

        What begins with a dot is half-written, and is left out.
        """
        found = 0
        for path in sorted(_below(source)):
            found += self.copy(f"{name}/{path.relative_to(source).as_posix()}", path)
        return found

    def finish(self, manifest: BackupManifest, key: Ed25519PrivateKey) -> None:
        """Sign the list, and give the backup its name: from here on it is one."""
        listing = json.dumps(self._files, sort_keys=True).encode()
        table = asdict(manifest) | {"listed": hashlib.sha256(listing).hexdigest()}
        del table["files"]
        sealed = seal(json.dumps(table, sort_keys=True).encode(), PAYLOAD_TYPE, key)
        for name, body in ((LIST, listing), (MANIFEST, sealed)):
            write_new(self.part / name, body, 0o600)
        for place in [self.part, *(p for p in self.part.rglob("*") if p.is_dir())]:
            flush_directory(place)
        self.part.rename(self.folder)
        flush_directory(self.folder.parent)


def _folders(path: Path) -> None:
    """A directory and whatever is missing above it, each 0700."""
    if not path.is_dir():
        _folders(path.parent)
        path.mkdir(mode=0o700)


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def _below(folder: Path) -> Iterator[Path]:
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if path.name.startswith(".") or path.suffix == _PART or path.is_symlink():
            continue
        if path.is_dir():
            yield from _below(path)
        elif path.is_file():
            yield path


def read(folder: Path, public: bytes) -> BackupManifest:
    """The list of a backup, signed by that key, with everything in the folder found to be as listed.

    Args:
        folder: the backup.
        public: Ed25519, raw: of the side that made it.
    Raises:
        BackupError: no backup, of somebody else, changed, not whole, or with a link in it.
    """
    try:
        raw, listing = (folder / MANIFEST).read_bytes(), (folder / LIST).read_bytes()
    except OSError:
        raise BackupError(f"{folder.name} is not a complete backup: {MANIFEST} is missing") from None
    if not len(listing) <= _MOST_LISTED:
        raise BackupError(f"{LIST} is too large")
    try:
        manifest = BackupManifest.of(open_sealed(raw, PAYLOAD_TYPE, {"self": public}).payload, listing)
    except EnvelopeError:
        raise BackupError("the backup was changed, or it is not signed by these keys") from None
    found = list(folder.rglob("*"))
    if links := [path.relative_to(folder).as_posix() for path in found if path.is_symlink()]:
        raise BackupError(f"the folder contains a link, and a backup has none: {_some(links)}")
    there = {path.relative_to(folder).as_posix() for path in found if not path.is_dir()}
    listed = {MANIFEST, LIST, *manifest.files}
    if there != listed:
        raise BackupError(f"the files in the folder differ from its list: {_some(there ^ listed)}")
    wrong = [name for name, known in manifest.files.items() if _digest(folder / name) != known]
    if wrong:
        raise BackupError(f"changed since the backup was made: {_some(wrong)}")
    return manifest


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _digest(path: Path) -> tuple[str, int]:
    if path.is_symlink() or not path.is_file():
        return "", 0
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), os.fstat(stream.fileno()).st_size


def fits(name: str) -> bool:
    """Can a backup hold a file of this name?"""
    return _NAME.fullmatch(name) is not None


def tells_password(text: str) -> bool:
    """Does a settings file seem to hold a password or a secret in clear, in a comment too? A path to one is none."""
    return _CLEAR.search(text) is not None


def copy_files(folder: Path, manifest: BackupManifest, into: Path, without: Any = frozenset()) -> None:
    """Copy a backup's files into a directory, 0600 in 0700, but for the box of keys and what is left out.

    Args:
        folder: a backup, which :func:`read` has checked.
        manifest: its list.
        into: a directory.
        without: names to leave out.
    Raises:
        BackupError: a file is not the one that was checked.
    """
    for name, known in manifest.files.items():
        if name == BOX or name in without:
            continue
        target = into / name
        _folders(target.parent)
        with (folder / name).open("rb") as stream, _private(target) as out:
            shutil.copyfileobj(stream, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        if _digest(target) != known:
            raise BackupError(f"changed while it was read: {name}")


def new_passphrase(arguments: argparse.Namespace) -> str:
    """To which ``backup --with-keys`` seals the keys; "" without that option.

    Raises:
        KeyArchiveError: there is none.
    """
    passphrase = ask_passphrase(arguments.passphrase_file, twice=True) if arguments.with_keys else ""
    if arguments.with_keys and not passphrase:
        raise KeyArchiveError("the keys need a passphrase to encrypt them: give one")
    return passphrase


def private_keys(
    arguments: argparse.Namespace, private_of: Callable[[Mapping[str, bytes]], dict[str, bytes]]
) -> dict[str, bytes]:
    """The private files of the key directory for ``restore``: from ``--keys``, or from the backup's own box.

    Raises:
        KeyArchiveError, BackupError: there are none, or the passphrase is another one.
    """
    if arguments.keys:
        return private_of(files_of(arguments.keys))
    box = arguments.folder / BOX
    if not box.is_file():
        raise BackupError("this backup contains no keys: give --keys and the folder of a copy of keys/")
    return open_files(box.read_bytes(), ask_passphrase(arguments.passphrase_file, twice=False))
