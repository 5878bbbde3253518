"""A site's backup: a snapshot of ledger, vault and spool, settings, the witness state, jobs and the networks that are
offered to them; keys only on request. Of a job it holds the record and the files that it reads: what it wrote is
sealed in the vault, and a training begins anew.

The vault's files are ciphertext in a backup as they are in place, so it is worth nothing without ``keys/``, and
whoever keeps both in one place has given that up. The key of a project undoes its end wherever a copy of it lies.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from agent.errors import SiteConfigError
from agent.gateway.credentials import FILE as TLS
from agent.gateway.credentials import RETURNING
from agent.gateway.enrolment import WAITING
from agent.storage.site_directory import SiteDirectory, origin
from policies.ledger.backends.snapshots import SnapshotError, consistent_snapshot
from policies.ledger.backends.sqlite import open_read_only
from policies.ledger.store import signed_head
from protos.encryption.key_archive import files_of, key_mark, seal_files
from protos.operations.backup import BOX, BackupManifest, BackupWriter, fits, tells_password

TREES: Final = ("watch", "inbox", "quarantine", "logins", "networks")
JOBS: Final = "jobs"  # as agent.service.jobs keeps them
STUDY: Final = "study.sealed"  # as agent.service.prediction_jobs names it
FEDERATION: Final = "federation.toml"  # in the key directory: there since the site is enrolled
PUBLIC: Final = frozenset({"coordinator.pub", FEDERATION, "root.crt", "node.pub", "console.crt"})
PASSING: Final = frozenset(
    {TLS, RETURNING, WAITING, "console.key"}
)  # made anew where they are missing; they change by the day
_SETTINGS: Final = frozenset({".toml", ".json"})
_ENDED: Final = re.compile(r"projects/[a-z0-9-]+/ended")
PROJECT_KEY: Final = re.compile(r"projects/([a-z0-9-]+)/key")


@dataclass(frozen=True, slots=True)
class SiteBackup:
    """What was written."""

    manifest: BackupManifest
    entries: int  # of the ledger
    files: int
    keys: bool  # are they in it?


def databases(home: SiteDirectory) -> list[str]:
    """The databases that a site has, by their names in a backup: of what must agree, all of it."""
    projects = sorted(f"projects/{path.name}" for path in (home.root / "projects").glob("*.db"))
    return [name for name in ("ledger.db", "vault.db", *projects) if (home.root / name).exists()]


def private_of(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of the files of a key directory, or of a copy of one, the private ones."""
    return {n: b for n, b in files.items() if n not in PUBLIC and not _ENDED.fullmatch(n)}


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Faults of the copying, in words for the operator."""
    try:
        yield
    except SnapshotError as error:
        raise SiteConfigError(f"the backup failed: {error}") from None


def backup(home: SiteDirectory, out: Path, passphrase: str = "", *, upgrading: bool = False) -> SiteBackup:
    """Write a backup to a new folder, also while the agent works; whole and durable when this returns.

    Args:
        home: the site.
        out: the folder; nothing of that name may be there.
        passphrase: put the keys in, sealed to it; "": they stay out.
        upgrading: also of a site that is not enrolled, whose backup :mod:`agent.operations.restore` refuses.
    Raises:
        SiteConfigError, BackupError, KeyArchiveError, KeyFileError: nothing was written; the text says why.
        LedgerUnsoundError: the ledger is not the one that this site's key committed last.
    """
    settings, key = home.settings(), home.sign_key()
    if not upgrading and not (home.keys / FEDERATION).exists():
        raise SiteConfigError(
            "the site is not enrolled yet, and a backup from before enrolment cannot be restored: run `enrol` first"
        )
    secrets = private_of(files_of(home.keys))
    box = seal_files(secrets, passphrase) if passphrase else b""
    with BackupWriter(out) as writer:
        names = databases(home)
        with _said():
            consistent_snapshot([(home.root / name, writer.path(name)) for name in names])
        for name in names:
            writer.took(name)
        form, head, entries = _ledger(writer.part / "ledger.db", origin(settings.site), home)
        files = _rest(home, writer)  # after the moment: what was seen of the coordinator may be newer, never older
        if box:
            writer.add(BOX, box)
        marks = {name: key_mark(body) for name, body in secrets.items() if name not in PASSING}
        made = BackupManifest(origin(settings.site), int(time.time()), version("lazaret"), head, form, marks)
        writer.finish(made, key)
    return SiteBackup(made, entries, files + len(names), bool(box))


def _ledger(copy: Path, name: str, home: SiteDirectory) -> tuple[int, str, int]:
    """Form, signed head and length of the ledger that was copied; all of it was read, and is what was committed."""
    if not copy.exists():
        return 0, "", 0
    with contextlib.closing(open_read_only(copy)) as disk:
        head = disk.head()
        if head is None:
            return disk.form(), "", 0
        return disk.form(), signed_head(disk, name, home.sign_key()), head.size


def _rest(home: SiteDirectory, writer: BackupWriter) -> int:
    """Settings, what was seen, what waits, and the public part of the key directory; how many files."""
    files = 0
    for path in sorted(home.root.iterdir()):
        if path.is_file() and path.suffix in _SETTINGS and not path.is_symlink():
            files += writer.copy(path.name, path)
            if path.suffix == ".toml" and tells_password((writer.part / path.name).read_text(errors="replace")):
                raise SiteConfigError(
                    f"{path.name} contains a password or a secret, which a backup must not hold in clear: remove it"
                )
    for name in TREES:
        files += writer.copy_tree(name, home.root / name)
    for name in _of_jobs(home.root):
        files += writer.copy(name, home.root / name)
    for name in files_of(home.keys):
        if name in PUBLIC or _ENDED.fullmatch(name):
            files += writer.copy(f"keys/{name}", home.keys / name)
    return files


def _of_jobs(root: Path) -> Iterator[str]:
    """The greatest number that a job was given; of each job, the record and the files that it reads.

    Older versions took any name of such a file: one that a backup cannot hold is left out. So is what a prediction
    is asked for, since no restored one goes on.
    """
    records = sorted((root / JOBS).glob("[1-9]*/job.json"))
    read = (path for record in records for path in sorted((record.parent / "in").glob("*")))
    for path in (root / JOBS / "last", *records, *read):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not path.is_symlink() and fits(name) and path.name != STUDY:
            yield name
