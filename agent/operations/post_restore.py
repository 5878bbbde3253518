"""After a restore: what this site had been granted since the backup, out of the coordinator's ledger, is spent."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.errors import SiteConfigError
from agent.gateway.witness import LedgerWitness
from agent.operations.restore import NOTE
from agent.storage import read_only_access
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory, origin
from policies.accounting.claims import Claim, KAnonymous, SubsampledGaussian
from policies.audit.auditor import open_envelope
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.entries import decode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import LedgerCheckpointError, open_checkpoint
from policies.ledger.state import Account, State
from policies.ledger.store import Store
from policies.ledger_service import digest
from policies.review.rules import TERMS, price
from policies.statements import PAYLOAD_TYPE, Amendment, Receipts, Reservation, Statement, encode, parse
from protos.common.dsse import seal

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
