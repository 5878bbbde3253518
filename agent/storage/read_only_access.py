"""The site's vault to look at: none is made, and no row written or upgraded, also while `serve` works with it.

SQLite itself makes the files ``-wal`` and ``-shm`` beside one that is read, and leaves them there, empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import apsw
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agent.errors import SiteConfigError
from agent.storage import projects
from agent.storage.encrypted_sqlite import FORMAT, OlderVaultError, VaultError, derive, faults, form_of
from agent.storage.instance_index import decode
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory
from policies.ledger.merkle import Checkpoint
from policies.ledger.store import Store

HEAD: Final = "ledger_head"  # of the vault: size and root of the site's ledger
_BUSY_MS: Final = 5_000


class HistorySource(Protocol):
    """The vault, as far as it knows of the ledger."""

    def note(self, name: str, /) -> Any:
        """A private note of the site (JSON value), or None."""


@dataclass(frozen=True, slots=True)
class Records:
    """The encrypted records of the projects."""

    opened: int  # projects whose key opens their records
    absent: tuple[str, ...]  # those with a key, and no records
    most: int  # patients in one of them: for the site's own checks, never for a message or a log that leaves


class ReadOnlyRecords(SiteDatabase):
    """A sealed file that is only read."""

    def __init__(self, path: Path, key: bytes) -> None:  # not super's, which makes what is missing
        """Open it, and see whether the key is its own.

        Args:
            path: of a file that is there.
            key: 32 bytes.
        Raises:
            OlderVaultError: an older program made it.
            VaultError: the key does not open it, it cannot be read, it is empty, or a newer program made it.
        """
        try:
            self._aead, self._index = AESGCM(key), derive(key, "vault/index")
        except ValueError:
            raise VaultError("the vault's key is damaged: restore it") from None
        with faults():
            self._db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            with faults():
                self._db.set_busy_timeout(_BUSY_MS)
                version = form_of(self._db)
            if not version <= FORMAT:
                raise VaultError("the vault was made by a newer version of this program: use that one")
            if not version:
                raise VaultError("the vault's file is empty: restore it from a backup")
            if version < FORMAT:
                raise OlderVaultError
            if self.note("opened") is None:  # each one has it since it was made: without it the key opened nothing
                raise VaultError("the vault's file is incomplete: restore it from a backup")
        except BaseException:
            self._db.close()
            raise


@contextlib.contextmanager
def notes(home: SiteDirectory) -> Iterator[ReadOnlyRecords | None]:
    """The site's private records; None where there are none yet.

    Raises:
        VaultError, KeyFileError: they cannot be opened; the text says why.
    """
    path = home.root / "vault.db"
    if not path.exists():
        yield None
        return
    with contextlib.closing(ReadOnlyRecords(path, home.secret("vault"))) as opened:
        yield opened


def records(home: SiteDirectory) -> Records:
    """Whether the projects' keys open their records.

    Raises:
        VaultError, KeyFileError, ProjectError: one of them cannot be opened; the text says why.
    """
    names = projects.names(home)
    absent = tuple(name for name in names if not (home.root / "projects" / f"{name}.db").exists())
    most = 0
    for name in sorted(set(names) - set(absent)):
        try:
            path = home.root / "projects" / f"{name}.db"
            with contextlib.closing(ReadOnlyRecords(path, projects.keys(home, name).vault)) as one:
                most = max(most, _patients(one))
        except VaultError as error:
            raise VaultError(f"project {name}: {error}") from None
    return Records(len(names) - len(absent), absent, most)


def _patients(one: ReadOnlyRecords) -> int:
    """As :meth:`agent.storage.vault.Vault.patients` counts them."""
    heads = one.stream("SELECT name, head FROM instance")
    return len({decode(one.unseal(f"head:{name}", box)).person for name, box in heads})


def check_history(vault: HistorySource, store: Store) -> None:
    """The vault remembers the ledger's length and head: a removed, older or other one would give spent budget back.

    A vault without a recorded ledger, next to a ledger with grants, was lost or replaced: the patients behind
    released images (P5) and the opt-outs are lost with it. The ledger is recorded in the vault whenever it is opened
    for work, which is before the first grant.

    Raises:
        SiteConfigError: it is not the one that the vault knows, grown longer; or the vault is not the ledger's.
    """
    length = vault.note("ledger")
    size, root = vault.note(HEAD) or [0, ""]  # of a vault of before: the length alone, until it is opened once
    if length is None and not size and store.state.grants:
        raise SiteConfigError(
            "vault.db knows of no ledger, and ledger.db has grants: it was lost or emptied, and with it whose "
            "images were released and who opted out; bring the site back from its newest backup with `restore`; "
            "nothing is released before"
        )
    if not store.state.size >= max(length or 0, size):
        raise SiteConfigError(
            "ledger.db is older than this vault, or missing: restore it; nothing is released before"
        )
    if size and not store.holds(Checkpoint(store.origin, size, bytes.fromhex(root))):
        raise SiteConfigError(
            "ledger.db is another one than this vault knows, typed or copied into its place: move it away for the "
            "auditor, and restore the site from a backup; nothing is released before"
        )


def compare(home: SiteDirectory, store: Store) -> None:
    """:func:`check_history` for what writes the ledger without the vault; nothing to compare where there is no vault.

    Raises:
        SiteConfigError: they are not of one time, or the vault cannot be looked at.
        KeyFileError: the vault's key cannot be read.
    """
    try:
        with notes(home) as there:
            if there is not None:
                check_history(there, store)
    except VaultError as error:
        raise SiteConfigError(str(error)) from None
