"""The coordinator's backup, its return in a new epoch, and its upgrade.

A backup is one consistent snapshot of the ledger and of admitted releases, cosigned heads, enrolments and runs. Keys
are included only on request; the root's key is never on this machine. After a restore nothing is granted before every
site has presented its receipts (:class:`policies.ledger.entries.Restored`), so a restore recovers no spent budget. A
ledger in PostgreSQL is backed up and restored with the database, before the rest is restored.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from coordinator.errors import CoordinatorConfigError
from coordinator.storage.directory import ORIGIN, CoordinatorDirectory, look_at_ledger, open_restored_ledger
from coordinator.storage.ledger_evidence import set_aside
from coordinator.storage.witness_store import Witnesses
from policies.audit.restore_losses import RestoreLosses, last_entry, losses_since
from policies.ledger.backends.migrations.upgrade import upgrade_sqlite
from policies.ledger.backends.schema_version import FORM
from policies.ledger.backends.snapshots import SnapshotError, consistent_snapshot
from policies.ledger.backends.sqlite import lock_file, open_read_only
from policies.ledger.export import ExportError
from policies.ledger.store import LedgerBackend, Store, export, signed_head
from protos.encryption.key_archive import files_of, key_mark, seal_files
from protos.identity.key_files import write_private
from protos.operations.backup import BOX, BackupError, BackupManifest, BackupWriter, copy_files, read, tells_password

TREES: Final = ("releases", "witnesses", "site-heads", "enrolments", "architectures", "runs", "logins")
PASSING: Final = frozenset({"console.key"})  # made anew where it is missing
EXPORT: Final = "ledger.export"  # of a ledger in PostgreSQL: for auditors; nothing is restored from it
BACKUPS: Final = "backups"
_SUFFIX: Final = ".restoring"


@dataclass(frozen=True, slots=True)
class CoordinatorBackup:
    """What was written."""

    manifest: BackupManifest
    entries: int
    files: int
    keys: bool


@dataclass(frozen=True, slots=True)
class RestoredCoordinator:
    """The restored contents."""

    made: int  # seconds since 1970
    entries: int
    epoch: int
    waiting: tuple[str, ...]  # sites that have to show their receipts
    nonce: str  # of the restore
    last: int  # seconds since 1970: when the backup's last entry was written; 0: it has none
    lost: RestoreLosses | None  # what the export of before holds beyond that; None: there was no export
    aside: tuple[str, ...]  # releases on the shelf that were admitted after the backup


def private_of(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of the files of a key directory, or of a copy of one, the private ones."""
    return {name: body for name, body in files.items() if not name.endswith(".crt")}


def backup(home: CoordinatorDirectory, out: Path, passphrase: str = "") -> CoordinatorBackup:
    """Write a backup to a new folder, also while the coordinator serves; whole and durable when this returns.

    Args:
        home: the coordinator's directory.
        out: the folder; nothing of that name may be there.
        passphrase: put the keys in, sealed to it; "": they stay out.
    Raises:
        CoordinatorConfigError, BackupError, KeyArchiveError, KeyFileError: nothing was written; the text says why.
        LedgerUnsoundError: the ledger is not the one that its key committed last.
    """
    settings, key = home.settings(), home.ledger_key()
    _no_password(home, settings.ledger)
    secrets = private_of(files_of(home.keys))
    box = seal_files(secrets, passphrase) if passphrase else b""
    with BackupWriter(out) as writer:
        form, files = 0, 1
        if settings.ledger:
            with contextlib.closing(look_at_ledger(home)) as disk:
                head, entries = _head(disk, home)
                writer.add(EXPORT, export(disk, ORIGIN, key, Witnesses(home.witnesses).notes()))
        else:
            try:
                consistent_snapshot([(home.ledger, writer.path("ledger.db"))])
            except SnapshotError as error:
                raise CoordinatorConfigError(f"the backup failed: {error}") from None
            writer.took("ledger.db")
            with contextlib.closing(open_read_only(writer.part / "ledger.db")) as disk:
                form, (head, entries) = disk.form(), _head(disk, home)
        files += _rest(home, writer)
        if box:
            writer.add(BOX, box)
        marks = {name: key_mark(body) for name, body in secrets.items() if name not in PASSING}
        made = BackupManifest(ORIGIN, int(time.time()), version("lazaret"), head, form, marks)
        writer.finish(made, key)
    return CoordinatorBackup(made, entries, files, bool(box))


def _no_password(home: CoordinatorDirectory, address: str) -> None:
    """A password is a key, and no key is in clear in a backup: neither the ledger's, nor in a comment or an old copy.

    Raises:
        CoordinatorConfigError: there is one, or it cannot be told.
    """
    held = _secret_in(address) if address else False
    named = [path.name for path in _settings(home) if tells_password(path.read_text(errors="replace"))]
    if held or named:
        raise CoordinatorConfigError(
            f"{', '.join(named) or 'coordinator.toml'} holds a password or a secret, and a backup has none in clear: "
            "put the database's into a password file (PGPASSFILE, mode 0600), and take it out"
        )


def _secret_in(address: str) -> bool:
    """Does an address of PostgreSQL hold a password? As libpq reads it: in words, or as a URL."""
    try:
        from psycopg import ProgrammingError  # noqa: PLC0415 - optional
        from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415 - optional
    except ModuleNotFoundError:
        raise CoordinatorConfigError("for a ledger in PostgreSQL install lazaret[postgres]") from None
    try:
        words = conninfo_to_dict(address)
    except ProgrammingError:  # its text may quote the address
        raise CoordinatorConfigError("coordinator.toml: the ledger's address cannot be read") from None
    return any(value and ("password" in key or "secret" in key) for key, value in words.items())


def _settings(home: CoordinatorDirectory) -> list[Path]:
    paths = sorted(home.root.iterdir())
    return [path for path in paths if path.suffix == ".toml" and path.is_file() and not path.is_symlink()]


def _head(disk: LedgerBackend, home: CoordinatorDirectory) -> tuple[str, int]:
    """The signed head and its size; all entries were read, and are what was committed."""
    head = disk.head()
    return ("", 0) if head is None else (signed_head(disk, ORIGIN, home.ledger_key()), head.size)


def _rest(home: CoordinatorDirectory, writer: BackupWriter) -> int:
    files = 0
    for path in _settings(home):
        files += writer.copy(path.name, path)
    for name in TREES:
        files += writer.copy_tree(name, home.root / name)
    for name in files_of(home.keys):
        if name.endswith(".crt"):
            files += writer.copy(f"keys/{name}", home.keys / name)
    return files


def restore(
    root: Path, folder: Path, secrets: Mapping[str, bytes], nonce: str, last: bytes | None = None
) -> RestoredCoordinator:
    """Bring a backup into a new directory, all of it or nothing, and open the ledger's next epoch.

    Args:
        root: the coordinator's directory: new, or empty.
        folder: the backup.
        secrets: the private files of its key directory, by name.
        nonce: random: receipts are for the restore that bears it.
        last: the last export of the ledger from before, which tells what is lost: see
        :mod:`policies.audit.restore_losses`.
    Raises:
        CoordinatorConfigError, BackupError, KeyFileError: it cannot be used, the keys are others, or the export is of
            no ledger that begins with the backup's entries; nothing was written.
        LedgerUnsoundError, SchemaVersionError: the ledger in it cannot be used.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise CoordinatorConfigError(f"{root.name} is not empty: move it away and keep it for the auditor")
    if "ledger.key" not in secrets:
        raise BackupError("ledger.key is missing among the keys: without it the backup cannot be verified")
    part = root.with_name(root.name + _SUFFIX)
    shutil.rmtree(part, ignore_errors=True)
    try:
        manifest = _assembled(CoordinatorDirectory(part), folder, secrets)
        done = _new_epoch(CoordinatorDirectory(part), manifest.made, nonce, last)
        os.sync()
        part.rename(root)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return done


def _assembled(home: CoordinatorDirectory, folder: Path, secrets: Mapping[str, bytes]) -> BackupManifest:
    home.keys.mkdir(mode=0o700, parents=True)
    home.root.chmod(0o700)
    write_private(home.keys / "ledger.key", secrets["ledger.key"])
    manifest = read(folder, home.ledger_key().public_key().public_bytes_raw())
    if manifest.origin != ORIGIN:
        raise BackupError("the backup is a site's: restore it with lazaret-agent")
    wrong = sorted(name for name, known in manifest.keys.items() if key_mark(secrets.get(name, b"")) != known)
    if wrong:
        raise BackupError(f"these keys are missing, or differ from those of the backup: {', '.join(wrong)}")
    for name, body in secrets.items():
        if name != "ledger.key":
            (home.keys / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(home.keys / name, body)
    copy_files(folder, manifest, home.root, {EXPORT})
    if manifest.ledger_form:
        _ledger_upgraded(home)
    return manifest


def _new_epoch(home: CoordinatorDirectory, made: int, nonce: str, last: bytes | None) -> RestoredCoordinator:
    with open_restored_ledger(home) as store:
        entries, until = store.state.size, last_entry(store)
        lost = _lost(store, last) if last is not None else None
        store.restore(nonce)
        Witnesses(home.witnesses).forget(store.state.epoch)
        aside = set_aside(store, home.releases)
        waiting = tuple(sorted(store.state.sites_awaited))
        return RestoredCoordinator(made, entries, store.state.epoch, waiting, nonce, until, lost, aside)


def _lost(store: Store, last: bytes) -> RestoreLosses:
    """Before the epoch is opened: a ledger in PostgreSQL is written to where it is."""
    try:
        return losses_since(store, last, store.state.size)
    except ExportError as error:
        raise BackupError(f"the export given as --last cannot be used, and nothing was restored: {error}") from None


def form(home: CoordinatorDirectory) -> int:
    """The form of the ledger's database: see :mod:`policies.ledger.backends.schema_version`.

    Raises:
        SchemaVersionError: a newer program made it.
    """
    with contextlib.closing(look_at_ledger(home)) as disk:
        found: int = disk.form()  # type: ignore[attr-defined] # both disks have it; simulators need not
        return found


def _ledger_upgraded(home: CoordinatorDirectory) -> tuple[int, bytes]:
    done = upgrade_sqlite(home.ledger, ORIGIN, home.ledger_key())
    return done.size, done.root


def upgrade(
    home: CoordinatorDirectory, now: dt.datetime, say: Callable[[str], None], owner: str = ""
) -> tuple[int, bytes]:
    """Bring the ledger's database to this program's form, after a backup; its entries and root, unchanged.

    Args:
        home: the coordinator's directory; it does not serve.
        now: UTC, for the backup's name.
        say: hears each step.
        owner: for a ledger in PostgreSQL: the address as the role that owns it.
    Raises:
        CoordinatorConfigError: the owner's address is missing, or the database cannot be used.
        LedgerBusyError, LedgerUnsoundError, SchemaVersionError: nothing was changed.
    """
    before = form(home)
    if home.settings().ledger and not owner:
        raise CoordinatorConfigError(
            "the ledger is in PostgreSQL: give --owner and the address as the role that owns it"
        )
    if not owner:
        with lock_file(home.ledger.with_suffix(".lock")):  # it does not serve; the step below takes it again
            pass
    made = home.root / BACKUPS / f"before-upgrade-{now:%Y%m%d-%H%M%S}"
    made.parent.mkdir(mode=0o700, exist_ok=True)
    backup(home, made)
    say(f"backup: {made.name}, without keys")
    size, root = _owned(owner) if owner else _ledger_upgraded(home)
    say(f"ledger: form {before} to {FORM}, {size} entries, root {root.hex()[:16]}, unchanged")
    return size, root


def _owned(owner: str) -> tuple[int, bytes]:
    try:
        from policies.ledger.backends.migrations.postgres import upgrade_postgres  # noqa: PLC0415 - its driver is optional
    except ModuleNotFoundError:
        raise CoordinatorConfigError("for a ledger in PostgreSQL install lazaret[postgres]") from None
    try:
        done = upgrade_postgres(owner)
    except (ValueError, ConnectionError) as error:
        raise CoordinatorConfigError(f"the ledger's database: {error}") from None
    return done.size, done.root
