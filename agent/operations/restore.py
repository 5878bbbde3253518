"""A site comes back from a backup: in a new epoch of its own ledger, and with no budget that it had not.

What was granted after the backup is in no file of the site any more. The coordinator's ledger holds it: nothing left
the hospital under a grant that is not there (price first), and each such entry rests on a reservation that this site
sealed itself. So the site's own ledger is restored like the coordinator's (:class:`policies.entries.Restored`), and
grants nothing until the lost reservations, out of an export that is checked whole, are spent in it at their full
price. Whoever leaves entries out of that export shows another history than the one that the partners cosign.

A backup of before the first desk has no ledger: the one that the site founded then is founded again first, so that
there is an epoch to open, and accounts in which the lost is spent.

A second restore forgets nothing of the first: what was to be made good, and was not yet, is so still.

Of a lost release without an epsilon the vault cannot know whose pictures it showed. A patient may be in one released
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

from agent.edges import projects
from agent.edges.backup import FEDERATION, PASSING, PROJECT_KEY
from agent.edges.home import BadSite, Home, origin
from agent.edges.notes import Notes
from agent.edges.own_ledger import found
from agent.edges.room import sync_folder
from agent.edges.sealed import SealedPlace
from agent.edges.upgrading import forms
from agent.edges.watch import Watch
from policies.entries import Expired, Spent
from policies.export import Unsound
from policies.review import TERMS
from policies.sqlite import open_sqlite
from policies.store import Draft, Store
from policies.undone import Lost, last_entry, since
from protos.backup import BadBackup, Manifest, read, take
from protos.keybox import mark
from protos.keyfile import write_private

NOTE: Final = "restored"  # of the vault: what is to be made good
_SUFFIX: Final = ".restoring"


@dataclass(frozen=True, slots=True)
class Restored:
    """What came back."""

    made: int  # seconds since 1970: when the backup was
    entries: int  # of the ledger, as the backup held them
    epoch: int  # of the site's ledger now
    closed: int  # grants that were open then; they are spent now
    last: int  # seconds since 1970: when the last of them was written; 0: there was none
    lost: Lost | None  # what the export of before holds beyond them; None: there was no export
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
            :mod:`policies.undone`.
    Raises:
        BadSite, BadBackup, BadKeyFile: it cannot be used, the keys are others, or the export is of no ledger that
            begins with the backup's entries; nothing was written.
        LedgerUnsound, WrongForm, VaultError: what is in it cannot be used.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise BadSite(f"{root.name} is not empty: move it away and keep it for the auditor; nothing is overwritten")
    if "sign.key" not in secrets:
        raise BadSite("sign.key is not among the keys: without it nobody can tell whose backup this is")
    part = root.with_name(root.name + _SUFFIX)
    shutil.rmtree(part, ignore_errors=True)  # of a restore that was interrupted
    try:
        manifest, gone = _assembled(Home(part), folder, secrets)
        done = _new_epoch(Home(part), nonce, manifest.made, last)
        done = replace(done, gone=gone)
        _settled(part)
        part.rename(root)
        sync_folder(root.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return done


def _assembled(home: Home, folder: Path, secrets: Mapping[str, bytes]) -> tuple[Manifest, tuple[str, ...]]:
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
    take(folder, manifest, home.root, noise | {name for name in manifest.files if name.startswith(rooms)})
    if origin(home.settings().site) != manifest.origin:
        raise BadBackup("site.toml in the backup is another site's")
    if f"keys/{FEDERATION}" not in manifest.files:
        raise BadBackup(
            "the backup is from before this site was enrolled: it has no books, so the whole budget would come back; "
            "make a new directory with `init`, and have that enrolled"
        )
    _upgraded(home)
    return manifest, tuple(sorted(gone))


def _compared(manifest: Manifest, secrets: Mapping[str, bytes]) -> tuple[set[str], set[str]]:
    """Are these the keys that the backup names? The projects whose key is not there, and those that have ended."""
    wrong = [name for name, known in manifest.keys.items() if name in secrets and mark(secrets[name]) != known]
    if wrong:
        raise BadBackup(f"another key than when the backup was made: {', '.join(sorted(wrong))}")
    missing = {name for name in manifest.keys if name not in secrets}
    gone = {found.group(1) for name in missing if (found := PROJECT_KEY.fullmatch(name))}
    needed = sorted(name for name in missing if not PROJECT_KEY.fullmatch(name))
    if needed:
        raise BadBackup(f"missing among the keys: {', '.join(needed)}")
    listed = (name.split("/") for name in manifest.files if name.startswith("keys/projects/"))
    return gone, {words[2] for words in listed if words[-1] == "ended"}


def _upgraded(home: Home) -> None:
    """A backup of an older program is brought to this one's form; the backup itself stays as it is."""
    found = forms(home)
    if found.newest:
        return
    from policies.migrations.upgrade import upgrade_sqlite  # noqa: PLC0415 - SQLAlchemy, where it is needed

    if found.ledger:
        upgrade_sqlite(home.root / "ledger.db", origin(home.settings().site), home.sign_key())
    projects.upgrade(home)


def _new_epoch(home: Home, nonce: str, made: int, last: bytes | None) -> Restored:
    """Open the ledger's next epoch, and close whatever was open."""
    site, met = home.settings().site, Watch(home.root / "watch", home.coordinator_key(), forgetful=True).head
    disk = open_sqlite(home.root / "ledger.db")
    disk.brought_back()
    with Store(disk, origin(site), home.sign_key(), lambda: int(time.time())) as store:
        entries, again, until = store.state.size, site in store.state.waiting, last_entry(store)
        found(home, store)
        lost = _lost(store, last, entries) if last is not None else None
        store.restore(nonce)
        open_then = [(n, g) for n, g in store.state.grants.items() if g.state == "held"]
        for grant, held in open_then:  # whether it was used after the backup, nobody here knows
            whole = Spent(grant, held.reserved.amount, "restart", b"")
            end = whole if max(held.used, held.sent) else Expired(grant, "restart")
            store.append(f"close-{grant}", Draft((end,)))
        kinds = {TERMS[g.reserved.mechanism].kind for _, g in open_then if g.reserved.mechanism in TERMS}
        with contextlib.closing(Notes(home.root / "vault.db", home.secret("vault"))) as notes:
            for name in notes.note("pending") or {}:
                for part in ("artifact", "clear"):
                    SealedPlace(notes, f"site/kept/{name}/{part}").clear()
            for note, value in (("pending", {}), ("run", None), ("unfinished", None), ("ledger", store.state.size)):
                notes.write_note(note, value)
            earlier = notes.note(NOTE) or {"unsure": again}  # of a restore after which nothing was made good yet
            unsure, head = "k" in kinds or earlier.get("unsure", True), earlier.get("head", [met.epoch, met.nonce])
            notes.write_note(NOTE, {"made": made, "nonce": nonce, "unsure": unsure, "head": head})
        return Restored(made, entries, store.state.epoch, len(open_then), until, lost, ())


def _lost(store: Store, last: bytes, entries: int) -> Lost:
    try:
        return since(store, last, entries)
    except Unsound as error:
        raise BadBackup(f"the export given as --last cannot be used, and nothing was restored: {error}") from None


def _settled(folder: Path) -> None:
    """Everything below is on the disk, names too, before it is a site."""
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(place)
    os.sync()


def missing_passing(home: Home) -> bool:
    """Is the certificate missing, which a key medium seldom holds? Then the site is invited again."""
    return not all((home.keys / name).exists() for name in PASSING & {"tls.pem"})
