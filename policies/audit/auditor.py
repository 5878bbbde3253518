"""What an auditor does with each entry: fold it, open the envelope it rests on, and review it again.

Every envelope must be signed with the key that the ledger has of the site or person, and must say what its entry
says. Every grant and admission must pass the review rules under the site's own signed policy.
:mod:`policies.audit.verify` is the command.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Final

from policies.accounting.rdp import allowance
from policies.governance.amendments import unapproved_keys
from policies.ledger.entries import (
    Admitted,
    Amended,
    Approved,
    Enrolled,
    Entry,
    Freed,
    LimitSet,
    Opened,
    Presented,
    Recovered,
    Refused,
    Requested,
    Reserved,
    Restored,
    Sent,
    Spent,
    Waived,
    decode,
    proposal,
)
from policies.ledger.export import ExportError
from policies.ledger.merkle import Checkpoint, CompactRange, leaf_hash
from policies.ledger.state import State, waiver
from policies.review.policy import Policy
from policies.review.policy import parse as parse_policy
from policies.review.rules import TERMS, AccountContext, price, review, review_reservation
from policies.statements import (
    MAX_BYTES,
    PAYLOAD_TYPE,
    Amendment,
    Approval,
    Enrolment,
    Receipts,
    Release,
    Request,
    Reservation,
    Settlement,
    Statement,
    claim_json,
    parse,
)
from protos.common.canonical_json import canonical
from protos.common.dsse import EnvelopeError, read_envelope

# entries that rest on a signed statement: a site's, a person's, or a site's word on a grant
_OfSite = Enrolled | Amended | Reserved | Sent | Admitted | Refused | Recovered | Presented
_OfPerson = Requested | Approved
_Resting = _OfSite | _OfPerson | Freed | Spent
SKEW: Final = 300  # seconds by which clocks may differ, or be set back, and times are still believed
_FREED = {"refused": "coordinator", "unused": "unused"}  # why a grant was freed -> the reason in the site's word


def open_envelope(raw: bytes, public: bytes | None) -> bytes:
    """The payload of a DSSE envelope with exactly one signature, by ``public``.

    Accepts exactly the bytes that the coordinator accepts for statements (:func:`protos.common.dsse.open_sealed`).
    Without a key nothing is verified: use that only to learn the claimed signer, and so which key to verify with.

    Raises:
        ExportError: malformed, or signed by another key.
    """
    try:
        found = read_envelope(raw, PAYLOAD_TYPE, 2 * MAX_BYTES)  # as much as base64 makes of the largest statement
        if public is not None:
            found.verify(public)
    except EnvelopeError as error:
        raise ExportError(f"an envelope is refused: {error}") from None
    return found.payload


def out_of_time(at: int, latest: int, now: int) -> str:
    """What is wrong with an entry's time; "" when nothing is.

    Args:
        at: the time, seconds since 1970.
        latest: the latest time of an entry before it.
        now: by the verifier's clock.
    """
    if at < latest - SKEW:
        return f"times run backwards: it was written {latest - at} s before an entry that stands before it"
    if at > now + SKEW:
        return f"it lies {at - now} s in the future of this machine's clock: the ledger's clock is wrong, or this one"
    return ""


def clock_warning(latest: int, now: int) -> str:
    """What a writer's newest entry in the future means, and what to do; "" where a verifier believes it now.

    Args:
        latest: the latest time of an entry, seconds since 1970. No later entry bears an earlier one.
        now: by the writer's clock.
    """
    if latest <= now + SKEW:
        return ""
    return (
        f"the newest entry's time lies {latest - now} s in the future of this machine's clock: if this clock is "
        "slow, set it right (NTP). If it was fast when that entry was written, and is right now, every new entry "
        "bears the wrong time, and lazaret-verify refuses the ledger, until that time has come: tell the auditors"
    )


def _same(entry: Entry, statement: Statement, *names: str) -> bool:
    """Do the entry and the statement agree in these fields?"""
    return all(getattr(entry, name) == getattr(statement, name) for name in names)


def _names_policy(entry: Enrolled | Amended, policy: str) -> bool:
    return hashlib.sha256(policy.encode()).digest() == entry.policy


def _worded(entry: Requested | Approved, said: Request | Approval) -> bool:
    digest = proposal(said.serial, said.action, said.subject, said.value)
    return _same(entry, said, "person", "serial") and digest == entry.proposal


def _agrees(entry: _Resting, said: Statement) -> bool:  # noqa: PLR0911, C901 - one case for each kind
    """Does a signed statement say what the entry that rests on it says?"""
    match entry, said:
        case Enrolled(), Enrolment():
            own = base64.b64decode(said.sign_key, validate=True) == entry.sign_key
            return own and _same(entry, said, "site") and _names_policy(entry, said.policy)
        case Amended(), Amendment():
            return _same(entry, said, "site", "number") and _names_policy(entry, said.policy)
        case Approved(), Approval():
            return _worded(entry, said)
        case Requested(), Request():
            return _worded(entry, said)
        case Reserved() | Recovered(), Reservation():
            same = _same(entry, said, "grant", "site", "run", "mechanism")
            return same and canonical(claim_json(said.claim)) == entry.claim
        case Sent() | Admitted(), Release():
            same = _same(entry, said, "release", "grant", "site", "run", "round", "mechanism")
            claimed = isinstance(entry, Sent) or canonical(claim_json(said.claim)) == entry.claim
            read = isinstance(entry, Sent) or said.reader == entry.reader
            return same and claimed and read and said.artifact_sha256 == entry.artifact.hex()
        case Presented(), Receipts():
            return _same(entry, said, "site", "nonce", "grants")
        case Freed(), Settlement():
            word = _FREED.get(entry.why) == said.reason
            return said.outcome == "declined" and word and _same(entry, said, "grant")
        case Spent(), Settlement():
            return said.outcome == "finished" and _same(entry, said, "grant", "used")
        case Refused(), _:
            subject = said.release if isinstance(said, Release) else getattr(said, "grant", None)
            return subject == entry.subject and getattr(said, "site", None) == entry.site
        case _:
            return False


class Auditor:
    """Folds a ledger's entries, and checks each against the envelope it rests on and the law."""

    def __init__(self, origin: str, envelopes: Iterable[bytes], now: int | None = None) -> None:
        """``now``: seconds since 1970, by the verifier's clock; None: the times of entries are not judged."""
        self.origin, self.state, self.tree, self.refusals = origin, State(), CompactRange(), 0
        self.now = now
        self.envelopes = {hashlib.sha256(raw).digest(): raw for raw in envelopes}
        self.seen: set[bytes] = set()
        self.policies: dict[str, Policy] = {}
        self.sent_under: dict[bytes, Policy] = {}
        self.limits_set: list[str] = []
        self.loosened: list[str] = []  # amendments of a site's own ledger that its persons had not approved
        self.twice: list[str] = []  # more than one grant of one site in one run: nothing is granted so any longer
        self.unbound: list[str] = []  # waivers whose words hold for every restore of that number: refused today
        self.keys: dict[str, list[bytes]] = {}  # site -> every signing key that it was enrolled with
        self.enrolled_by: dict[str, list[str]] = {}  # site -> who approved its enrolment, the last one

    def head(self) -> Checkpoint:
        """What the ledger signs over the entries taken so far."""
        return Checkpoint(self.origin, self.tree.size, self.tree.root(), self.state.epoch, self.state.nonce)

    def take(self, raw: bytes) -> None:
        record = decode(raw)
        entry = record.entry
        if self.now is not None and (fault := out_of_time(record.at, self.state.latest, self.now)):
            raise ExportError(fault)
        said = self.statement(entry) if isinstance(entry, _Resting) else None
        if isinstance(entry, Reserved | Sent | Admitted) and said is not None:
            self.judge(entry, said)
        elif isinstance(entry, Restored) and entry.root != self.tree.root():
            raise ExportError("an epoch was opened over other entries than those before it")
        before = self.state.amended.get(entry.site, 0) if isinstance(entry, Amended) else 0
        self.state.apply(record)
        self.tree.append(leaf_hash(raw))
        self.refusals += isinstance(entry, Refused)
        self.told(entry)
        if isinstance(said, Amendment) and self.origin == f"lazaret/{said.site}":
            self.check_amended(said, before)
        if isinstance(said, Enrolment | Amendment):
            self.policies[said.site] = parse_policy(said.policy, f"policy of {said.site}")
        elif isinstance(entry, Opened):
            self.check_limit(entry.account)
        elif isinstance(entry, Recovered) and isinstance(said, Reservation):
            self.check_recovered(entry, said)

    def told(self, entry: Entry) -> None:
        """Facts for people to check: limits, enrolments and waivers, and who approved them."""
        if isinstance(entry, LimitSet):
            by = ", ".join(sorted(self.state.proposals[entry.serial].counted))
            self.limits_set.append(f"{entry.account} to {entry.epsilon or entry.limit}, approved by {by}")
        elif isinstance(entry, Waived):
            self.check_waived(entry)
        elif isinstance(entry, Enrolled):
            by_whom = self.state.agreeing(entry.serial, "enrol", entry.site, entry.envelope.hex())
            self.enrolled_by[entry.site] = [f"{name} ({self.state.persons[name].role})" for name in by_whom]
            self.keys.setdefault(entry.site, []).append(entry.sign_key)

    def check_amended(self, said: Amendment, before: int) -> None:
        """Tell of a policy that was loosened without its persons: sites refuse that; older ledgers may hold it."""
        new = parse_policy(said.policy, f"policy of {said.site}")
        keys = unapproved_keys(self.state, said.site, before, self.policies[said.site], new, said.policy)
        if keys:
            self.loosened.append(f"{said.site}, amendment {said.number}: {', '.join(keys)}")

    def check_waived(self, entry: Waived) -> None:
        """Tell of a waiver that persons signed for the number of a restore alone: older ledgers may hold it."""
        restore = waiver(self.state.epoch, self.state.nonce)
        if not self.state.agreeing(entry.serial, "waive", entry.site, restore):
            self.unbound.append(f"{entry.site}, epoch {self.state.epoch}, as {entry.serial}")

    def check_limit(self, name: str) -> None:
        """An account opens with what the site's own policy allows, or less (P12).

        A limit that persons set later is bounded where it matters: grants are reviewed under the site's own policy.
        """
        account, policy = self.state.accounts[name], self.policies.get(name.rpartition("/")[0])
        if policy is None:
            raise ExportError("an account of a site that was never enrolled")
        order = account.opened.order
        if not order:
            sound = account.limit <= policy.max_releases_per_patient
            if account.opened.epsilon or account.opened.delta:
                raise ExportError(f"account {name}: it counts releases, and has no epsilon and no delta")
        else:
            epsilon, delta = float(account.epsilon), float(account.opened.delta)
            within = epsilon <= policy.epsilon and delta <= policy.delta
            sound = within and account.limit <= allowance(epsilon, delta, order)
        if not sound:
            raise ExportError(f"account {name}: its limit is above the site's own policy")

    def check_recovered(self, entry: Recovered, said: Reservation) -> None:
        """What was lost with a backup is spent at its full price, in the account that pays for it."""
        account = self.state.accounts[entry.account]
        kind = TERMS[entry.mechanism].kind if entry.mechanism in TERMS else ""
        if (entry.account, entry.amount) != (f"{entry.site}/{kind}", price(said.claim, account)):
            raise ExportError(f"recovered grant {entry.grant}: another price or account")

    def statement(self, entry: _Resting) -> Statement | None:
        """The signed statement that an entry rests on, found to say the same."""
        raw = self.envelopes.get(entry.envelope)
        if raw is None:
            if isinstance(entry, Refused | Spent) and not entry.envelope:
                return None  # refused before an envelope could be opened, or all of it spent: nothing was signed
            raise ExportError("an entry's envelope is missing")
        self.seen.add(entry.envelope)
        said = parse(open_envelope(raw, self.signer(entry)))
        if not _agrees(entry, said):
            raise ExportError("an entry says something else than the statement it rests on")
        if isinstance(said, Approval | Request | Receipts) and said.origin != self.origin:
            raise ExportError("an entry rests on a statement for another ledger")
        return said

    def signer(self, entry: _Resting) -> bytes:
        """The key that the ledger knows for the entry's site or person; an enrolment brings its own."""
        if isinstance(entry, Enrolled):
            return entry.sign_key
        if isinstance(entry, _OfPerson):
            person = self.state.persons.get(entry.person)
            if person is None:
                raise ExportError("an entry is signed for a person whom the ledger never appointed")
            return person.public
        site = entry.site if isinstance(entry, _OfSite) else self.state.open_grant(entry.grant).reserved.site
        enrolled = self.state.sites.get(site)
        if enrolled is None:
            raise ExportError("an entry names a site that was never enrolled")
        return enrolled.sign_key

    def judge(self, entry: Reserved | Sent | Admitted, said: Statement) -> None:
        """Review again what was granted or admitted, under the site's own policy, before it enters the ledger."""
        state = self.state
        policy = self.sent_under.get(entry.envelope, self.policies[entry.site])
        barred = entry.site in state.revoked_sites
        if isinstance(said, Reservation) and isinstance(entry, Reserved):
            kind = TERMS[entry.mechanism].kind if entry.mechanism in TERMS else ""
            account, frozen = state.accounts.get(f"{entry.site}/{kind}"), state.frozen(entry.site)
            if (entry.site, entry.run) in state.granted:  # it was paid for, so it is sound; it is reported
                self.twice.append(f"{entry.site}, run {entry.run}: grant {entry.grant}")
            standing = AccountContext(account, state.grants.get(entry.grant), frozen=frozen, revoked=barred)
            verdict = review_reservation(said, standing, policy)
            sound = verdict.admitted and (entry.account, entry.amount) == (f"{entry.site}/{kind}", verdict.amount)
        else:
            assert isinstance(said, Release)
            grant = state.grants.get(entry.grant)
            account = state.accounts.get(grant.reserved.account) if grant else None
            verdict = review(said, AccountContext(account, grant, revoked=barred), policy)
            sound = verdict.admitted and isinstance(entry, Sent | Admitted) and entry.used == verdict.amount
            sound = sound and (not isinstance(entry, Admitted) or entry.level == verdict.level)
            if isinstance(entry, Sent) and self.origin == "lazaret/coordinator":
                raise ExportError(f"{said.release}: only a site's own ledger says that a release was sent")
            if isinstance(entry, Sent) and not self.approved(said):
                raise ExportError(f"{said.release}: an approval that it names is not in the ledger")
            if isinstance(entry, Admitted) and self.origin == f"lazaret/{entry.site}":
                sent = state.sent.get(entry.release)
                if sent is None or sent.envelope != entry.envelope:
                    raise ExportError(f"{said.release}: it was admitted, but the site's own ledger never sent it")
            if isinstance(entry, Sent):  # its verdict is judged by the same policy, even if that is amended meanwhile
                self.sent_under[entry.envelope] = policy
        if not sound:
            rules = ", ".join(f.rule for f in verdict.findings) or "another price or level"
            raise ExportError(f"{type(entry).__name__} for {entry.grant}: the law does not admit it ({rules})")

    def approved(self, release: Release) -> bool:
        """In a site's own ledger: is every approval that a release names one that a person of that role gave?"""
        name = release.release
        given = self.state.approvals(name, "release", name, release.artifact_sha256)
        return all(given.get(role) == digest for role, digest in release.approvals.items())
