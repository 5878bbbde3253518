"""``lazaret-verify``: re-derive an exported ledger offline, from its entries alone.

Needs only Python and ``cryptography``. It checks that the text is in its one form (so any changed byte is
found), every record's link to the one before, the Merkle root under the signed checkpoint, that every
balance folds without an overspend, that every envelope is signed by the site that the ledger enrolled and says
what its entry says, and it reviews every grant and every admission again under the site's own signed policy.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from policies.claims import UNIT
from policies.ledger import Admitted, Enrolled, Entry, Freed, Opened, Refused, Reserved, Sent, State, decode
from policies.merkle import BadCheckpoint, CompactRange, leaf_hash, open_checkpoint
from policies.policy import Policy
from policies.policy import parse as parse_policy
from policies.rdp import allowance
from policies.review import TERMS, Standing, review, review_reservation
from policies.statement import (
    PAYLOAD_TYPE,
    Enrolment,
    Release,
    Reservation,
    Settlement,
    Statement,
    canonical,
    claim_json,
    load_json,
    parse,
)

_TITLE: Final = "lazaret-ledger-export/1"
MAX_EXPORT: Final = 1 << 30


_Resting = Enrolled | Reserved | Sent | Admitted | Freed | Refused  # entries that rest on a signed statement


class Unsound(ValueError):
    """The export does not prove what it says."""


@dataclass(frozen=True, slots=True)
class Export:
    """A ledger in one text file: key, entries, envelopes, signed checkpoint; one encoding only."""

    public: bytes  # the ledger's Ed25519 key, raw
    entries: tuple[bytes, ...]
    envelopes: tuple[bytes, ...]
    checkpoint: str

    def encode(self) -> bytes:
        """The text of the export."""
        lines = [_TITLE, f"key {_b64(self.public)}", f"entries {len(self.entries)}", *map(_b64, self.entries)]
        lines += [f"envelopes {len(self.envelopes)}", *map(_b64, self.envelopes), "checkpoint", self.checkpoint]
        return "\n".join(lines).encode()

    @staticmethod
    def parse(raw: bytes) -> Export:
        """Read an export.

        Raises:
            Unsound: anything but the bytes :meth:`encode` gives.
        """
        try:
            lines = iter(raw.decode().split("\n"))
            if next(lines) != _TITLE:
                raise Unsound("not a ledger export")
            public = base64.b64decode(next(lines).removeprefix("key "), validate=True)
            entries = _section(lines, "entries")
            envelopes = _section(lines, "envelopes")
            if next(lines) != "checkpoint":
                raise Unsound("the checkpoint is missing")
            export = Export(public, entries, envelopes, "\n".join(lines))
        except (UnicodeDecodeError, binascii.Error, StopIteration, RuntimeError):
            raise Unsound("the export is cut short or not in its one form") from None
        if export.encode() != raw:
            raise Unsound("the export is not in its one form")
        return export


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _section(lines: Any, name: str) -> tuple[bytes, ...]:
    title = next(lines)
    count = title.removeprefix(f"{name} ")
    if not (title.startswith(f"{name} ") and count.isascii() and count.isdigit() and len(count) < 10):
        raise Unsound(f"the section {name} is missing")
    return tuple(base64.b64decode(next(lines), validate=True) for _ in range(int(count)))


@dataclass(frozen=True, slots=True)
class Findings:
    """What a sound export says."""

    origin: str
    size: int
    root: str
    key: str  # fingerprint, to compare with the one the coordinator publishes
    accounts: dict[str, dict[str, Any]]
    grants: int
    releases: int
    refusals: int
    envelopes: int


def open_envelope(raw: bytes, public: bytes) -> bytes:
    """The payload of a DSSE envelope with exactly one signature, by ``public`` (DSSE v1.0, PAE).

    Raises:
        Unsound: malformed, or signed by another key.
    """
    try:
        envelope = load_json(raw)
        payload = base64.b64decode(envelope["payload"], validate=True)
        (signature,) = envelope["signatures"]
        kind = PAYLOAD_TYPE.encode()
        pae = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise Unsound("an envelope holds something else than a statement")
        Ed25519PublicKey.from_public_bytes(public).verify(base64.b64decode(signature["sig"], validate=True), pae)
    except (KeyError, TypeError, ValueError, InvalidSignature):
        raise Unsound("an envelope is malformed or signed by another key") from None
    return payload


def _same(entry: Entry, statement: Statement, *names: str) -> bool:
    """Do the entry and the statement agree in these fields?"""
    return all(getattr(entry, name) == getattr(statement, name) for name in names)


def _agrees(entry: _Resting, statement: Statement) -> bool:
    """Does a signed statement say what the entry that rests on it says?"""
    if isinstance(entry, Enrolled):
        if not isinstance(statement, Enrolment):
            return False
        key = base64.b64decode(statement.sign_key, validate=True)
        policy = hashlib.sha256(statement.policy.encode()).digest()
        return _same(entry, statement, "site") and (key, policy) == (entry.sign_key, entry.policy)
    if isinstance(entry, Reserved):
        return isinstance(statement, Reservation) and (
            _same(entry, statement, "grant", "site", "run", "mechanism")
            and canonical(claim_json(statement.claim)) == entry.claim
        )
    if isinstance(entry, Sent | Admitted):
        return isinstance(statement, Release) and (
            _same(entry, statement, "release", "grant", "site", "run", "round", "mechanism")
            and statement.artifact_sha256 == entry.artifact.hex()
            and (isinstance(entry, Sent) or canonical(claim_json(statement.claim)) == entry.claim)
        )
    if isinstance(entry, Freed):
        declined = isinstance(statement, Settlement) and statement.outcome == "declined"
        return declined and _same(entry, statement, "grant")
    subject = statement.release if isinstance(statement, Release) else getattr(statement, "grant", None)
    return subject == entry.subject and getattr(statement, "site", None) == entry.site


def _judge(entry: Reserved | Sent | Admitted, statement: Statement, state: State, policy: Policy) -> None:
    """Review again what was granted or admitted, under the site's own signed policy, before it enters the books."""
    if isinstance(statement, Reservation) and isinstance(entry, Reserved):
        kind = TERMS[entry.mechanism].kind if entry.mechanism in TERMS else ""
        standing = Standing(state.accounts.get(f"{entry.site}/{kind}"), state.grants.get(entry.grant))
        verdict = review_reservation(statement, standing, policy)
        sound = verdict.admitted and (entry.account, entry.amount) == (f"{entry.site}/{kind}", verdict.amount)
    else:
        assert isinstance(statement, Release)
        grant = state.grants.get(entry.grant)
        account = state.accounts.get(grant.reserved.account) if grant else None
        verdict = review(statement, Standing(account, grant), policy)
        sound = verdict.admitted
        if isinstance(entry, Admitted):
            sound = sound and (entry.level, entry.used) == (verdict.level, verdict.amount)
    if not sound:
        rules = ", ".join(f.rule for f in verdict.findings) or "another price or level"
        raise Unsound(f"{type(entry).__name__} for {entry.grant}: the law does not admit it ({rules})")


def _check_limit(entry: Opened, policy: Policy | None) -> None:
    """An account's limit is what the site's own policy allows, or less (P12)."""
    if policy is None:
        raise Unsound("an account of a site that was never enrolled")
    if not entry.order:
        sound = entry.limit <= policy.max_releases_per_patient
    else:
        epsilon, delta = float(entry.epsilon), float(entry.delta)
        within = epsilon <= policy.epsilon and delta <= policy.delta
        sound = within and entry.limit <= allowance(epsilon, delta, entry.order)
    if not sound:
        raise Unsound(f"account {entry.account}: its limit is above the site's own policy")


class _Auditor:
    """Folds an export's entries, and checks each against the envelope it rests on."""

    def __init__(self, export: Export) -> None:
        self.state, self.tree, self.refusals = State(), CompactRange(), 0
        self.envelopes = {hashlib.sha256(raw).digest(): raw for raw in export.envelopes}
        self.seen: set[bytes] = set()
        self.policies: dict[str, Policy] = {}

    def take(self, raw: bytes) -> None:
        record = decode(raw)
        entry = record.entry
        if isinstance(entry, Opened):
            _check_limit(entry, self.policies.get(entry.account.rpartition("/")[0]))
        statement = self.statement(entry) if isinstance(entry, _Resting) else None
        if isinstance(entry, Reserved | Sent | Admitted) and statement is not None:
            _judge(entry, statement, self.state, self.policies[entry.site])
        self.state.apply(record)
        self.tree.append(leaf_hash(raw))
        self.refusals += isinstance(entry, Refused)
        if isinstance(statement, Enrolment):
            self.policies[statement.site] = parse_policy(statement.policy, f"policy of {statement.site}")

    def statement(self, entry: _Resting) -> Statement | None:
        """The signed statement that an entry rests on, found to say the same."""
        raw = self.envelopes.get(entry.envelope)
        if raw is None:
            if isinstance(entry, Refused) and not entry.envelope:
                return None  # refused before an envelope could be opened: nothing was signed
            raise Unsound("an entry's envelope is missing")
        self.seen.add(entry.envelope)
        statement = parse(open_envelope(raw, self.signer(entry)))
        if not _agrees(entry, statement):
            raise Unsound("an entry says something else than the statement it rests on")
        return statement

    def signer(self, entry: _Resting) -> bytes:
        """The key that the ledger enrolled for the entry's site; an enrolment is signed by the key it brings."""
        if isinstance(entry, Enrolled):
            return entry.sign_key
        site = self.state.open_grant(entry.grant).reserved.site if isinstance(entry, Freed) else entry.site
        enrolled = self.state.sites.get(site)
        if enrolled is None:
            raise Unsound("an entry names a site that was never enrolled")
        return enrolled.sign_key


def verify(raw: bytes, since: str | None = None) -> Findings:
    """Check an export; with ``since``, also that it extends an older checkpoint of the same ledger.

    Raises:
        Unsound: it does not hold, with the first reason.
    """
    export = Export.parse(raw)
    auditor = _Auditor(export)
    try:
        head = open_checkpoint(export.checkpoint, export.public)
        old = open_checkpoint(since, export.public) if since is not None else None
        roots: dict[int, bytes] = {}
        for n, body in enumerate(export.entries):
            if old is not None and old.size == n:
                roots[n] = auditor.tree.root()
            auditor.take(body)
    except BadCheckpoint as error:
        raise Unsound(str(error)) from None
    except ValueError as error:
        raise Unsound(f"entry {auditor.state.size}: {error}") from None
    roots[auditor.tree.size] = auditor.tree.root()
    if (head.size, head.root) != (auditor.tree.size, auditor.tree.root()):
        raise Unsound("the entries are not the ones under the checkpoint")
    if old is not None and (old.origin != head.origin or roots.get(old.size) != old.root):
        raise Unsound("the ledger does not extend the older checkpoint: its history was rewritten")
    if auditor.seen != set(auditor.envelopes):
        raise Unsound("the export holds an envelope that no entry rests on")
    state = auditor.state
    accounts = {
        name: {
            "limit": a.opened.limit,
            "held": a.held,
            "spent": a.spent,
            "epsilon": a.opened.epsilon or None,
            "delta": a.opened.delta or None,
        }
        for name, a in sorted(state.accounts.items())
    }
    fingerprint = hashlib.sha256(export.public).hexdigest()[:16]
    counts = (len(state.grants), len(state.releases), auditor.refusals, len(export.envelopes))
    return Findings(head.origin, head.size, head.root.hex(), fingerprint, accounts, *counts)


def main(argv: Sequence[str] | None = None) -> int:
    """``lazaret-verify EXPORT [--from CHECKPOINT] [--json]``: exit 0 sound, 1 not, 2 usage."""
    parser = argparse.ArgumentParser(prog="lazaret-verify", description="check an exported ledger offline")
    parser.add_argument("export", type=Path)
    parser.add_argument("--from", dest="since", type=Path, help="an older signed checkpoint it must extend")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        if arguments.export.stat().st_size > MAX_EXPORT:
            parser.error("the export is larger than 1 GiB")
        raw = arguments.export.read_bytes()
        since = arguments.since.read_text() if arguments.since else None
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read: {error.__class__.__name__}")
    try:
        found = verify(raw, since)
    except Unsound as error:
        out = json.dumps({"sound": False, "reason": str(error)}) if arguments.json else f"NOT SOUND: {error}"
        sys.stdout.write(out + "\n")
        return 1
    if arguments.json:
        document = {"sound": True, **{name: getattr(found, name) for name in Findings.__slots__}}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(_summary(found))
    return 0


def _summary(found: Findings) -> str:
    lines = [
        f"SOUND: {found.origin}, {found.size} entries, root {found.root[:16]}…, key {found.key}",
        f"  {found.grants} grants, {found.releases} releases admitted, {found.refusals} refusals, "
        f"{found.envelopes} signed envelopes",
    ]
    for name, account in found.accounts.items():
        share = 100 * (account["held"] + account["spent"]) / account["limit"] if account["limit"] else 0.0
        budget = f"epsilon {account['epsilon']} at delta {account['delta']} per {UNIT}"
        budget = f"the budget, {budget}," if account["epsilon"] else "the releases of each patient"
        lines.append(f"  {name}: {share:.1f} % of {budget} held or spent")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
