"""A site comes back from a backup: in a new epoch of its own ledger, and with no budget that it had not.

Grants made after the backup are in no file of the site any more, but the coordinator's ledger has them: nothing left
the hospital under a grant that is not there (price first), and each such entry rests on a reservation that this site
signed itself. So the site's own ledger is restored like the coordinator's
(:class:`policies.ledger.entries.Restored`). It grants nothing until the lost reservations, from an export that is
verified as a whole, are spent in it at their full price. An export with entries left out shows another history than
the one that the partners cosign.

A backup of before the first enrolment has no ledger. The one that the site founded then is founded again first, so
that there is an epoch to open, and accounts in which the lost is spent.

A second restore forgets nothing of the first: what was to be made good, and was not yet, is so still.

Of a lost release without an epsilon the vault cannot know whose images it showed. A patient may be in one released
cluster, ever (P5), so where there may have been one the account of such releases is spent whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agent.errors import SiteConfigError
from agent.gateway.witness import LedgerWitness
from agent.operations.backup import FEDERATION, PASSING, PROJECT_KEY
from agent.operations.upgrade import forms
from agent.storage import projects
from agent.storage.encrypted_sqlite import EncryptedCheckpointStore
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.site_ledger import initialise_ledger
from policies.audit.restore_losses import RestoreLosses, last_entry, losses_since
from policies.ledger.backends.migrations.upgrade import upgrade_sqlite
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.entries import Expired, Spent
from policies.ledger.export import ExportError
from policies.ledger.store import AppendRequest, Store
from policies.review.rules import TERMS
from protos.common.durable_files import flush_directory
from protos.encryption.key_archive import key_mark
from protos.identity.key_files import write_private
from protos.operations.backup import BackupError, Manifest, copy_files, read

NOTE: Final = "restored"  # of the vault: what is to be made good
_SUFFIX: Final = ".restoring"


@dataclass(frozen=True, slots=True)
class Restored:
    """The restored contents."""

    made: int  # seconds since 1970: when the backup was
    entries: int  # of the ledger, as the backup held them
    epoch: int  # of the site's ledger now
    closed: int  # grants that were open then; they are spent now
    last: int  # seconds since 1970: when the last of them was written; 0: there was none
    lost: RestoreLosses | None  # what the export of before holds beyond them; None: there was no export
    gone: tuple[str, ...]  # projects whose key is not there: what was kept of them is noise


def restore(
    root: Path, folder: Path, secrets: Mapping[str, bytes], nonce: str, last: bytes | None = None
) -> Restored:
    """Bring a site's backup into a new directory, all of it or nothing.

    Args:
        root: the site's directory: new, or empty.
        folder: the backup.
        secrets: the private files of its key directory, by name.
        nonce: random: of the restore, in the site's ledger.
        last: the last export of the site's own ledger from before, which tells what is lost beside grants: see
            :mod:`policies.audit.restore_losses`.
    Raises:
        SiteConfigError, BackupError, KeyFileError: it cannot be used, the keys are others, or the export is of no
        ledger that
            begins with the backup's entries; nothing was written.
        LedgerUnsoundError, SchemaVersionError, VaultError: what is in it cannot be used.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise SiteConfigError(
            f"{root.name} is not empty: move it away and keep it for the auditor; nothing is overwritten"
        )
    if "sign.key" not in secrets:
        raise SiteConfigError("sign.key is missing among the keys: without it the backup cannot be verified")
    part = root.with_name(root.name + _SUFFIX)
    shutil.rmtree(part, ignore_errors=True)  # of a restore that was interrupted
    try:
        manifest, gone = _assembled(SiteDirectory(part), folder, secrets)
        done = _new_epoch(SiteDirectory(part), nonce, manifest.made, last)
        done = replace(done, gone=gone)
        _settled(part)
        part.rename(root)
        flush_directory(root.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return done


def _assembled(home: SiteDirectory, folder: Path, secrets: Mapping[str, bytes]) -> tuple[Manifest, tuple[str, ...]]:
    """The files in their place; and the projects whose key is not there."""
    home.keys.mkdir(mode=0o700, parents=True)
    home.root.chmod(0o700)
    write_private(home.keys / "sign.key", secrets["sign.key"])
    manifest = read(folder, home.sign_key().public_key().public_bytes_raw())
    gone, ended = _compared(manifest, secrets)
    for name, body in secrets.items():
        project = PROJECT_KEY.fullmatch(name)
        if name != "sign.key" and not (project and project.group(1) in ended):  # what has ended stays ended
            (home.keys / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(home.keys / name, body)
    home.project_keys.mkdir(mode=0o700, exist_ok=True)
    noise = {f"projects/{name}.db" for name in gone | ended}
    rooms = tuple(f"{room}/{name}/" for room in ("inbox", "quarantine") for name in gone | ended)
    copy_files(folder, manifest, home.root, noise | {name for name in manifest.files if name.startswith(rooms)})
    if origin(home.settings().site) != manifest.origin:
        raise BackupError("site.toml in the backup belongs to another site")
    if f"keys/{FEDERATION}" not in manifest.files:
        raise BackupError(
            "the backup is from before this site was enrolled: it has no ledger, so the whole budget would return; "
            "make a new directory with `init`, and enrol that one"
        )
    _upgraded(home)
    return manifest, tuple(sorted(gone))


def _compared(manifest: Manifest, secrets: Mapping[str, bytes]) -> tuple[set[str], set[str]]:
    """Are these the keys that the backup names? The projects whose key is not there, and those that have ended."""
    wrong = [name for name, known in manifest.keys.items() if name in secrets and key_mark(secrets[name]) != known]
    if wrong:
        raise BackupError(f"these keys differ from those of the backup: {', '.join(sorted(wrong))}")
    missing = {name for name in manifest.keys if name not in secrets}
    gone = {found.group(1) for name in missing if (found := PROJECT_KEY.fullmatch(name))}
    needed = sorted(name for name in missing if not PROJECT_KEY.fullmatch(name))
    if needed:
        raise BackupError(f"missing among the keys: {', '.join(needed)}")
    listed = (name.split("/") for name in manifest.files if name.startswith("keys/projects/"))
    return gone, {words[2] for words in listed if words[-1] == "ended"}


def _upgraded(home: SiteDirectory) -> None:
    """A backup of an older program is brought to this one's form; the backup itself stays as it is."""
    found = forms(home)
    if found.newest:
        return
    if found.ledger:
        upgrade_sqlite(home.root / "ledger.db", origin(home.settings().site), home.sign_key())
    projects.upgrade(home)


def _new_epoch(home: SiteDirectory, nonce: str, made: int, last: bytes | None) -> Restored:
    """Open the ledger's next epoch, and close whatever was open."""
    site, met = home.settings().site, LedgerWitness(home.root / "watch", home.coordinator_key(), forgetful=True).head
    disk = open_sqlite(home.root / "ledger.db")
    disk.brought_back()
    with Store(disk, origin(site), home.sign_key(), lambda: int(time.time())) as store:
        entries, again, until = store.state.size, site in store.state.sites_awaited, last_entry(store)
        initialise_ledger(home, store)
        lost = _lost(store, last, entries) if last is not None else None
        store.restore(nonce)
        open_then = [(n, g) for n, g in store.state.grants.items() if g.state == "held"]
        for grant, held in open_then:  # whether it was used after the backup, nobody here knows
            whole = Spent(grant, held.reserved.amount, "restart", b"")
            end = whole if max(held.used, held.sent) else Expired(grant, "restart")
            store.append(f"close-{grant}", AppendRequest((end,)))
        kinds = {TERMS[g.reserved.mechanism].kind for _, g in open_then if g.reserved.mechanism in TERMS}
        with contextlib.closing(SiteDatabase(home.root / "vault.db", home.secret("vault"))) as notes:
            for name in notes.note("pending") or {}:
                for part in ("artifact", "clear"):
                    EncryptedCheckpointStore(notes, f"site/kept/{name}/{part}").clear()
            for note, value in (("pending", {}), ("run", None), ("unfinished", None), ("ledger", store.state.size)):
                notes.write_note(note, value)
            earlier = notes.note(NOTE) or {"unsure": again}  # of a restore after which nothing was made good yet
            unsure, head = "k" in kinds or earlier.get("unsure", True), earlier.get("head", [met.epoch, met.nonce])
            notes.write_note(NOTE, {"made": made, "nonce": nonce, "unsure": unsure, "head": head})
        return Restored(made, entries, store.state.epoch, len(open_then), until, lost, ())


def _lost(store: Store, last: bytes, entries: int) -> RestoreLosses:
    try:
        return losses_since(store, last, entries)
    except ExportError as error:
        raise BackupError(f"the export given as --last cannot be used, and nothing was restored: {error}") from None


def _settled(folder: Path) -> None:
    """Everything below is on the disk, names too, before it is a site."""
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        flush_directory(place)
    os.sync()


def missing_passing(home: SiteDirectory) -> bool:
    """Is the certificate missing, which a key medium seldom holds? Then the site is invited again."""
    return not all((home.keys / name).exists() for name in PASSING & {"tls.pem"})
