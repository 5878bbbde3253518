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

After a restore: what this site had been granted since the backup, out of the coordinator's ledger, is spent.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.errors import SiteConfigError
from agent.gateway.witness import LedgerWitness
from agent.operations.backup import FEDERATION, JOBS, PASSING, PROJECT_KEY
from agent.operations.upgrade import forms
from agent.storage import projects, read_only_access
from agent.storage.encrypted_sqlite import EncryptedCheckpointStore
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.site_ledger import initialise_ledger
from policies.accounting.claims import Claim, KAnonymous, SubsampledGaussian
from policies.audit.auditor import open_envelope
from policies.audit.restore_losses import RestoreLosses, last_entry, losses_since
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.backends.migrations.upgrade import upgrade_sqlite
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.entries import Expired, Spent, decode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import LedgerCheckpointError, open_checkpoint
from policies.ledger.state import Account, State
from policies.ledger.store import AppendRequest, Store
from policies.ledger_service import digest
from policies.review.rules import TERMS, price
from policies.statements import PAYLOAD_TYPE, Amendment, Receipts, Reservation, Statement, encode, parse
from protos.common.dsse import seal
from protos.common.durable_files import flush_directory
from protos.encryption.key_archive import key_mark
from protos.identity.key_files import write_private
from protos.operations.backup import BackupError, BackupManifest, copy_files, read

SHARED: Final = "lazaret/coordinator"
_STEP: Final = SubsampledGaussian(sampling_rate=1.0, noise_multiplier=1.0, steps=1)
_ONE_RELEASE: Final = KAnonymous(k=2, l_diversity=1, releases_per_patient=1)


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovered grants."""

    lost: int  # grants that the backup did not know; spent now
    full: tuple[str, ...]  # accounts of which everything is spent
    amended: bool  # was a newer policy of this site found?


def recover(home: SiteDirectory, raw: bytes) -> Recovery:
    """Take the lost grants from an export of the coordinator's ledger, made after this site had stopped.

    Args:
        home: the restored site.
        raw: the export. Everything in it is checked first: see :mod:`policies.audit.verify`.
    Raises:
        SiteConfigError: nothing is awaited, or the export is not of the ledger that this site knows, an older one, or
        one
            that may itself lack what was granted.
    """
    shared, envelopes = _checked(home, raw)
    with _ledger(home) as ledger:
        _must_hold_everything(ledger, shared)
        lost = [
            (name, grant)
            for name, grant in shared.grants.items()
            if grant.reserved.site == ledger.site and grant.state != "freed" and name not in ledger.store.state.grants
        ]
        mechanisms = {grant.reserved.mechanism for _, grant in lost}
        ledger.note_unsure(any(TERMS[name].kind == "k" for name in mechanisms & set(TERMS)))
        for name, grant in lost:
            envelope = envelopes[grant.reserved.envelope]
            said = parse(open_envelope(envelope, ledger.public))
            assert isinstance(said, Reservation), "the export was audited"
            decisions.recover_grant(ledger.store, f"recover-{name}", said, envelope)
        amended = _amended(ledger, shared, envelopes)
        full = ledger.fill("k") if ledger.unsure else ()
        return ledger.present(full, amended)


def spend_all_grants(home: SiteDirectory) -> Recovery:
    """There is no export, and none will come: whatever this site's accounts have left is spent.

    Raises:
        SiteConfigError: nothing is awaited.
    """
    with _ledger(home) as ledger:
        return ledger.present((*ledger.fill("k"), *ledger.fill("rdp")), False)


def _must_hold_everything(ledger: _Books, shared: State) -> None:
    """The coordinator's ledger knows what this site was granted, unless it was brought back from a backup meanwhile.

    It would be told by this site, which has itself lost its receipts. Whether the site had shown them before is not
    asked: a site that was restored, too, and not recovered, shows fewer and says that these are all.
    """
    if [
        shared.epoch,
        shared.nonce,
    ] != ledger.met or ledger.site in shared.sites_awaited | shared.sites_pending_receipts:
        raise SiteConfigError(
            "since this site's backup the coordinator's ledger was itself restored, so its export may "
            "lack grants of this site: give the last export from before that, if it was made after this site had "
            "stopped; if there is none, run `recover --spend-everything`"
        )
    if ledger.site not in shared.sites:
        raise SiteConfigError("the export is from before this site was enrolled: ask for a new one")


def _checked(home: SiteDirectory, raw: bytes) -> tuple[State, dict[bytes, bytes]]:
    """The fold of an export that holds, of the ledger that this site joined, and no older than what it saw of it."""
    public = home.coordinator_key()
    seen = LedgerWitness(home.root / "watch", public, forgetful=True).memory
    try:
        export = Export.parse(raw)
        head = open_checkpoint(export.checkpoint, public)
        known = open_checkpoint(seen.note, public) if seen.note else None
        if head.origin != SHARED or export.public != public:
            raise SiteConfigError("the export is of another ledger than the coordinator's that this site joined")
        if known and head.epoch < known.epoch:
            raise SiteConfigError("the export is from before the coordinator's last restore: ask for a new one")
        verify(raw, seen.note if known and (head.epoch, head.nonce) == (known.epoch, known.nonce) else None)
    except (ExportError, LedgerCheckpointError) as error:
        raise SiteConfigError(f"the export failed its audit, so it is not used: {error}") from None
    state, resting = State(), dict[bytes, bytes]()
    for body in export.entries:
        state.apply(decode(body))
    for envelope in export.envelopes:
        resting[digest(envelope)] = envelope
    return state, resting


class _Books:
    """The restored site's ledger and notes, opened for making good."""

    def __init__(self, store: Store, notes: SiteDatabase, site: str, key: Ed25519PrivateKey) -> None:
        self.store, self.notes, self.site, self.key = store, notes, site, key
        note = notes.note(NOTE) or {}
        self.unsure = bool(note.get("unsure", True))
        self.met = note.get("head", [1, ""])  # the coordinator's epoch, and its nonce, as the first backup knew them

    @property
    def public(self) -> bytes:
        """The site's own key."""
        return self.key.public_key().public_bytes_raw()

    def note_unsure(self, more: bool) -> None:
        """Before the first lost grant is written down: an interruption forgets nothing."""
        self.unsure |= more
        self.notes.write_note(NOTE, {**(self.notes.note(NOTE) or {}), "unsure": self.unsure})

    def seal(self, statement: Statement) -> bytes:
        """By the site's own key."""
        return seal(encode(statement), PAYLOAD_TYPE, self.key)

    def fill(self, kind: str) -> tuple[str, ...]:
        """Spend what an account has left, as grants of this site's own word; its name, if it had anything left."""
        name = f"{self.site}/{kind}"
        account = self.store.state.accounts.get(name)
        filled = account is not None and account.left > 0
        while account is not None and account.left > 0:
            mechanism, claim = _worth(account)
            grant = f"lost-{self.store.state.epoch}-{kind}-{self.store.state.recovered[self.site]}"
            said = Reservation(grant, self.site, "", mechanism, claim, {}, "OT")
            decisions.recover_grant(self.store, f"recover-{grant}", said, self.seal(said))
        return (name,) if filled else ()

    def present(self, full: tuple[str, ...], amended: bool) -> Recovery:
        """Say that this is all: from here on the ledger grants again, what is left."""
        state = self.store.state
        lost = state.recovered[self.site]
        said = Receipts(self.site, self.store.origin, state.nonce, lost)
        decisions.present(self.store, f"present-{state.nonce}", said, self.seal(said))
        self.notes.write_note("ledger", state.size)
        self.notes.write_note(NOTE, None)
        return Recovery(lost, full, amended)


def _worth(account: Account) -> tuple[str, Claim]:
    """A mechanism and a claim whose price is all that is left; of the releases without an epsilon, one."""
    if not account.opened.order:
        return "ksame", _ONE_RELEASE
    steps = math.ceil(account.left / price(_STEP, account))
    return "federated", SubsampledGaussian(_STEP.sampling_rate, _STEP.noise_multiplier, min(steps + 1, 1_000_000))


@contextlib.contextmanager
def _ledger(home: SiteDirectory) -> Iterator[_Books]:
    site, key = home.settings().site, home.sign_key()
    with contextlib.ExitStack() as stack:
        disk = open_sqlite(home.root / "ledger.db")
        store = stack.enter_context(Store(disk, origin(site), key, lambda: int(time.time())))
        read_only_access.compare(home, store)
        if site not in store.state.sites_awaited:
            raise SiteConfigError(
                "nothing to do: this site's ledger was not restored, or everything lost is spent already"
            )
        if not (home.root / "vault.db").exists():
            raise SiteConfigError(
                "vault.db is missing, although it was restored with the ledger: `restore` the site again"
            )
        notes = stack.enter_context(contextlib.closing(SiteDatabase(home.root / "vault.db", home.secret("vault"))))
        yield _Books(store, notes, site, key)


def _amended(ledger: _Books, shared: State, envelopes: dict[bytes, bytes]) -> bool:
    """A policy that this site signed after the backup binds again."""
    number = shared.amended.get(ledger.site, 0)
    if not number > ledger.store.state.amended.get(ledger.site, 0):
        return False
    envelope = envelopes[shared.policies[ledger.site]]
    said = parse(open_envelope(envelope, ledger.public))
    assert isinstance(said, Amendment), "the export was audited"
    decisions.amend(ledger.store, f"amend-again-{number}", said, envelope)
    return True


NOTE: Final = "restored"  # of the vault: what is to be made good
_SUFFIX: Final = ".restoring"


@dataclass(frozen=True, slots=True)
class RestoredSite:
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
) -> RestoredSite:
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


def _assembled(
    home: SiteDirectory, folder: Path, secrets: Mapping[str, bytes]
) -> tuple[BackupManifest, tuple[str, ...]]:
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
    if (home.root / JOBS).is_dir():
        write_private(home.root / JOBS / "restored", b"")  # see agent.service.jobs.JobStore.after_restore
    if origin(home.settings().site) != manifest.origin:
        raise BackupError("site.toml in the backup belongs to another site")
    if f"keys/{FEDERATION}" not in manifest.files:
        raise BackupError(
            "the backup is from before this site was enrolled: it has no ledger, so the whole budget would return; "
            "make a new directory with `init`, and enrol that one"
        )
    _upgraded(home)
    return manifest, tuple(sorted(gone))


def _compared(manifest: BackupManifest, secrets: Mapping[str, bytes]) -> tuple[set[str], set[str]]:
    """Are these the keys that the backup names? The projects whose key is not there, and those that have ended."""
    lasting = {name: known for name, known in manifest.keys.items() if name not in PASSING}
    wrong = [name for name, known in lasting.items() if name in secrets and key_mark(secrets[name]) != known]
    if wrong:
        raise BackupError(f"these keys differ from those of the backup: {', '.join(sorted(wrong))}")
    missing = {name for name in lasting if name not in secrets}
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


def _new_epoch(home: SiteDirectory, nonce: str, made: int, last: bytes | None) -> RestoredSite:
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
        return RestoredSite(made, entries, store.state.epoch, len(open_then), until, lost, ())


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
