"""A site's home from an older program's form to this one's: a backup first, then ledger and vault; heads stay."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from agent.errors import SiteConfigError
from agent.operations.backup import backup
from agent.storage import projects
from agent.storage.encrypted_sqlite import FORMAT, form_of
from agent.storage.site_directory import SiteDirectory, origin
from policies.ledger.backends.migrations.upgrade import upgrade_sqlite
from policies.ledger.backends.schema_version import FORM
from policies.ledger.backends.sqlite import lock_file, open_read_only

BACKUPS: Final = "backups"  # in the home; move them to another machine


@dataclass(frozen=True, slots=True)
class FormVersions:
    """In which form each part of a home is; 0: it is not there yet."""

    ledger: int
    vault: int

    @property
    def newest(self) -> bool:
        """Is there nothing to upgrade?"""
        return self.ledger in {0, FORM} and self.vault in {0, FORMAT}

    @property
    def words(self) -> str:
        """For the operator: what is there, and in which form."""
        parts = (("ledger", self.ledger, FORM), ("vault", self.vault, FORMAT))
        return "; ".join(f"{name}: form {form} of {most}" if form else f"no {name} yet" for name, form, most in parts)


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """What an upgrade did."""

    before: FormVersions
    after: FormVersions
    entries: int
    root: bytes  # of the ledger's tree, the same before and after; b"" where there is no ledger
    backup: Path | None  # None: there was nothing to do


def forms(home: SiteDirectory) -> FormVersions:
    """Look, and change nothing.

    Raises:
        SiteConfigError: a newer program made the vault.
        SchemaVersionError: a newer program made the ledger.
        LedgerUnsoundError: it cannot be read.
    """
    ledger = 0
    if (home.root / "ledger.db").exists():
        with contextlib.closing(open_read_only(home.root / "ledger.db")) as disk:
            ledger = disk.form()
    found = FormVersions(ledger, _vault(home.root / "vault.db"))
    if found.vault > FORMAT:
        raise SiteConfigError(
            f"vault.db has form {found.vault}, and this program knows forms up to {FORMAT}: a newer version has "
            "upgraded it, which cannot be undone; install that version again"
        )
    return found


def _vault(path: Path) -> int:
    if not path.exists():
        return 0
    try:
        with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as database:
            return form_of(database)
    except apsw.Error:
        raise SiteConfigError("vault.db cannot be read: restore it from a backup") from None


def upgrade(home: SiteDirectory, now: dt.datetime, say: Callable[[str], None] = lambda _text: None) -> UpgradeReport:
    """Bring a home to this program's form. Interrupted at any point, it goes on when it is said again.

    Args:
        home: the site; nothing else may work in it.
        now: UTC, for the name of the backup that is made first.
        say: hears each step.
    Raises:
        SiteConfigError, SchemaVersionError: a newer program made something in it; nothing was changed.
        LedgerBusyError, LedgerUnsoundError, VaultError: nothing was changed, or it goes on when it is said again.
    """
    before = forms(home)
    if before.newest:
        return UpgradeReport(before, before, 0, b"", None)
    site, key = home.settings().site, home.sign_key()
    with lock_file(home.root / "ledger.lock"):  # nobody works here; the steps below take it again
        pass
    made = home.root / BACKUPS / f"before-upgrade-{now:%Y%m%d-%H%M%S}"
    made.parent.mkdir(mode=0o700, exist_ok=True)
    backup(home, made, upgrading=True)
    say(f"backup: {made.name}, without keys")
    entries, root = 0, b""
    if before.ledger:
        done = upgrade_sqlite(home.root / "ledger.db", origin(site), key)
        entries, root = done.size, done.root
        say(f"ledger: form {done.before} to {done.after}, {entries} entries, root {root.hex()[:16]}, unchanged")
    if before.vault not in {0, FORMAT}:
        projects.upgrade(home)
        say(f"vault: form {before.vault} to {FORMAT}")
    return UpgradeReport(before, forms(home), entries, root, made)
