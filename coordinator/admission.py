"""What the coordinator does with sealed bytes: open, parse, check the artifact, review, write down.

No transport here: bytes and the peer's site come in, a verdict goes out, and every verdict is a ledger entry.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from policies.accounting.claims import UnsupportedClaimError
from policies.ledger.entries import InvalidEntryError, Refused
from policies.ledger.merkle import LedgerCheckpointError, cosigners, open_checkpoint
from policies.ledger.state import KeyReusedError
from policies.ledger.store import AppendRequest, Store
from policies.ledger_service import ArtifactFindings, LedgerService, verdict_of
from policies.review.policy import Policy, PolicyError, strictest
from policies.review.policy import parse as parse_policy
from policies.review.rules import Finding, Verdict
from policies.statements import (
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
    StatementError,
    parse,
)
from protos.common.dsse import MAX_BYTES, EnvelopeError, open_sealed
from protos.common.errors import LedgerIntegrityError, PeerError
from protos.identity.certificates import SITE_NAME, agent_name, requested_key

_Said = TypeVar("_Said", Reservation, Amendment, Release)
KEY: Final = re.compile(r"[a-z0-9_-]{1,200}")
_REUSED: Final = Finding("key_reused", "this idempotency key was used for something else")
COORDINATOR: Final = "coordinator"  # the idempotency keys of the coordinator's own doing; no site may bear that name


class LedgerRollbackError(LedgerIntegrityError):
    """A head that this ledger's key has signed is not in the ledger: it is an older copy, or was rewritten."""


class RequestRejectedError(PeerError):
    """A peer's call that is refused before any review; the finding says why, and it is in the ledger."""

    def __init__(self, finding: Finding) -> None:
        """Keep the finding."""
        super().__init__(finding.rule)
        self.finding = finding


class Artifact(Protocol):
    """An artifact at hand: its digest and size as found, and a look into it."""

    @property
    def sha256(self) -> str:
        """Of the bytes that are there, hexadecimal."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def look(self) -> Callable[[], Sequence[Finding]]:
        """What is wrong inside; called only when the release could be admitted otherwise."""


@dataclass(frozen=True, slots=True)
class AdmissionService:
    """The coordinator's counter: its register, and the policies that sites enrolled with."""

    register: LedgerService
    federation: Policy
    node_keys: dict[str, str]  # site -> its Flower node key, OpenSSH

    @staticmethod
    def over(store: Store, federation: Policy) -> AdmissionService:
        """Put together from a ledger: the sites' policies and keys are read from their sealed statements."""
        nodes: dict[str, str] = {}
        for site, entry in store.state.sites.items():
            statement = _sealed_by(store, site, entry.envelope)
            assert isinstance(statement, Enrolment)
            nodes[site] = statement.node_key
        read: dict[bytes, Policy] = {}
        return AdmissionService(
            LedgerService(store, lambda site: strictest(_own(store, site, read), federation)), federation, nodes
        )

    def read_enrolment(self, envelope: bytes) -> Enrolment:
        """A site's sealed request, with everything in it found usable; nothing is written.

        Raises:
            EnvelopeError: the request is not sealed by the key that it carries, or a key in it cannot be used.
            CertificateError: its signing request proves possession of no key, or asks for another name.
            StatementError, PolicyError: its content cannot be used.
        """
        statement = _unverified(envelope)
        try:
            key = base64.b64decode(statement.sign_key, validate=True)
            node = load_ssh_public_key(statement.node_key.encode())
        except (ValueError, UnsupportedAlgorithm):
            raise EnvelopeError("a key in the request cannot be read") from None
        others = (known for site, known in self.node_keys.items() if site != statement.site)
        taken = {tuple(known.split()[:2]) for known in others}  # without the comment
        if not isinstance(node, ec.EllipticCurvePublicKey) or node.curve.name != "secp384r1" or len(key) != 32:
            raise EnvelopeError("the node key must be EC P-384, the signing key Ed25519")
        if statement.site == "coordinator":
            raise EnvelopeError("this site name is reserved")
        if not SITE_NAME.fullmatch(statement.site) or tuple(statement.node_key.split()[:2]) in taken:
            raise EnvelopeError("the site's name is invalid, or its node key belongs to another site")
        open_sealed(envelope, PAYLOAD_TYPE, {statement.site: key})
        parse_policy(statement.policy, f"policy of {statement.site}")
        requested_key(statement.csr.encode(), agent_name(statement.site))
        return statement

    def enrol(self, envelope: bytes, serial: str = "") -> Enrolment:
        """Approve a site's sealed request: its key, its policy and its accounts enter the ledger.

        The account's limits are the stricter of both policies (P12). A site that was revoked comes back in the same
        way, to the accounts it had.

        Args:
            envelope: the request.
            serial: of the proposal that persons approved; nothing only where nobody may approve yet.
        Raises:
            EnvelopeError, CertificateError, StatementError, PolicyError: see :meth:`read_enrolment`.
            InvalidEntryError: the site is enrolled already, or was with this request; its signing key is another's,
                or approvals are missing.
        """
        statement = self.read_enrolment(envelope)
        own = parse_policy(statement.policy, f"policy of {statement.site}")
        self.register.enrol(statement, envelope, strictest(own, self.federation), serial)
        self.node_keys[statement.site] = statement.node_key
        return statement

    def opened(self, peer: str, key: str, envelope: bytes) -> Statement:
        """The statement in an envelope that this peer sealed.

        Raises:
            RequestRejectedError: unknown peer, bad signature, malformed statement, or one that speaks for another
            site.
        """
        if not KEY.fullmatch(key):
            raise self.unwelcome(peer, "malformed", Finding("bad_key", "a key is 1 to 200 of a-z, 0-9, - and _"))
        enrolled = self.register.store.state.sites.get(peer)
        if enrolled is None:
            raise self.unwelcome(peer, key, Finding("unknown_site", "this site is not enrolled"))
        try:
            sealed = open_sealed(envelope, PAYLOAD_TYPE, {peer: enrolled.sign_key})
            statement = parse(sealed.payload)
        except EnvelopeError as error:
            raise self.unwelcome(peer, key, Finding("bad_envelope", str(error))) from None
        except (StatementError, UnsupportedClaimError) as error:
            raise self.unwelcome(peer, key, Finding("bad_statement", str(error))) from None
        except ValueError:  # of a library, whose text is not for the peer
            raise self.unwelcome(peer, key, Finding("bad_statement", "the statement cannot be read")) from None
        if isinstance(statement, Approval | Request) or statement.site != peer:
            raise self.unwelcome(peer, key, Finding("another_site", "the statement speaks for another site"))
        return statement

    def _of_kind(self, kind: type[_Said], peer: str, key: str, envelope: bytes) -> _Said:
        """The same, of one kind; any other is refused."""
        statement = self.opened(peer, key, envelope)
        if not isinstance(statement, kind):
            raise self.unwelcome(peer, key, Finding("bad_statement", f"not of the kind {kind.__name__.lower()}"))
        return statement

    def unwelcome(self, peer: str, key: str, finding: Finding) -> RequestRejectedError:
        """Write down why a peer's call is refused before any review, and give the exception that says so."""
        self._write_refusal(peer, key, finding.rule)
        return RequestRejectedError(finding)

    def _write_refusal(self, peer: str, key: str, rule: str) -> None:
        """One entry for each: under the ledger's lock, and with a slash, which is in no key that a site may name."""
        with self.register.store.exclusive() as state:
            entry = Refused("", peer, "", "call", [rule], b"")
            self.register.store.append(_key(peer, f"{key}/refused-{state.size}"), AppendRequest((entry,)))

    def reserve(self, peer: str, key: str, envelope: bytes) -> Verdict:
        """Price first: hold the claim's cost, or say why not."""
        statement = self._of_kind(Reservation, peer, key, envelope)
        return self._once(peer, key, lambda k: self.register.reserve(k, statement, envelope))

    def settle(self, peer: str, key: str, envelope: bytes) -> Verdict:
        """A site's word on a grant."""
        statement = self.opened(peer, key, envelope)
        if not isinstance(statement, Settlement) or statement.outcome not in ("declined", "expired"):
            raise self.unwelcome(peer, key, Finding("bad_statement", "not a settlement"))
        return self._once(peer, key, lambda k: self.register.settle(k, statement, envelope))

    def amend(self, peer: str, key: str, envelope: bytes) -> Verdict:
        """A site's new policy: in the ledger, and in force from here on."""
        statement = self._of_kind(Amendment, peer, key, envelope)
        try:
            parse_policy(statement.policy, f"policy of {peer}")
            return self._once(peer, key, lambda k: self.register.amend(k, statement, envelope))
        except (PolicyError, InvalidEntryError) as error:
            raise self.unwelcome(peer, key, Finding("bad_statement", str(error))) from None

    def present(self, peer: str, key: str, envelope: bytes) -> Verdict:
        """After a restore: a sealed reservation that was lost, or the word that all were shown.

        If the ledger already holds the grant, the answer is a refusal with the rule ``known``: nothing is written,
        and nothing was lost.
        """
        statement = self.opened(peer, key, envelope)
        if not isinstance(statement, Reservation | Receipts):
            raise self.unwelcome(peer, key, Finding("bad_statement", "neither a reservation nor a word on receipts"))
        try:
            return self._once(peer, key, lambda k: self.register.present(k, statement, envelope))
        except InvalidEntryError as error:
            raise self.unwelcome(peer, key, Finding(self._why_not(peer, statement, envelope), str(error))) from None

    def _why_not(self, peer: str, statement: Reservation | Receipts, envelope: bytes) -> str:
        """The rule by which a receipt is not taken."""
        state = self.register.store.state
        if peer not in state.sites_awaited | state.sites_pending_receipts:
            return "not_awaited"
        if isinstance(statement, Receipts):
            return "wrong_receipts"
        return "was_refused" if hashlib.sha256(envelope).digest() in state.refused else "not_recovered"

    def witness(self, peer: str, note: str) -> bool:
        """Is this a head of this ledger's epoch that the peer, and nobody else, has validly cosigned?

        Raises:
            LedgerRollbackError: this ledger's key signed that head, and the ledger does not hold it.
        """
        store = self.register.store
        enrolled = store.state.sites.get(peer)
        try:
            head = open_checkpoint(note, store.public)
        except LedgerCheckpointError:
            return False
        signatures = note.partition("\n\n")[2].count("\n")
        if enrolled is None or signatures != 2 or cosigners(note, {peer: enrolled.sign_key}) != {peer}:
            return False
        if (head.epoch, head.nonce) != (store.state.epoch, store.state.nonce):  # of before a restore
            return False
        if not store.holds(head):
            raise LedgerRollbackError
        return True

    def release(self, peer: str, key: str, envelope: bytes) -> Release:
        """The statement of a release, before its artifact is accepted: its size is the quota."""
        return self._of_kind(Release, peer, key, envelope)

    def report(self, peer: str, rule: str) -> None:
        """Write down that a call of an enrolled site was turned away before it was read."""
        if peer in self.register.store.state.sites:
            self._write_refusal(peer, "turned", rule)

    def answered(self, peer: str, key: str, envelope: bytes) -> Verdict | None:
        """What this key has led to, if it came with this envelope before; another one under it is unwelcome."""
        try:
            return self.register.answered(_key(peer, key), envelope)
        except KeyReusedError:
            raise self.unwelcome(peer, key, _REUSED) from None

    def preview_verdict(self, peer: str, key: str, envelope: bytes, release: Release) -> Verdict:
        """Before a byte of the artifact is accepted: a release that cannot be admitted gets its verdict now."""
        verdict = self.register.dry_run_review(release, envelope)
        if verdict.admitted:
            return verdict
        facts = ArtifactFindings((), verdict.findings)
        return self._once(peer, key, lambda k: self.register.admit(k, release, envelope, facts))

    def admit(self, peer: str, key: str, envelope: bytes, release: Release, artifact: Artifact) -> Verdict:
        """Review a release with its artifact at hand; only what has a grant is worth looking into."""
        same = (artifact.sha256, artifact.size) == (release.artifact_sha256, release.artifact_bytes)
        changed = Finding("artifact_changed", "the artifact is not the one in the statement")
        facts: tuple[Finding, ...] = () if same else (changed,)
        early = () if facts else self.register.dry_run_review(release, envelope).findings
        if not facts and not early:
            facts = tuple(artifact.look())
        found = ArtifactFindings(facts, early)
        return self._once(peer, key, lambda k: self.register.admit(k, release, envelope, found))

    def reserve_run(
        self, run: str, sealed: Mapping[str, bytes], least: int, required: Collection[str] = ()
    ) -> dict[str, Verdict]:
        """The budgets of a run's sites, in one append: of those that can be granted, if ``least`` are; or of none.

        Args:
            run: its name.
            sealed: each site's own reservation, as it came with its answer to the price.
            least: how many must be granted.
            required: sites without which none is.
        Returns:
            A verdict for each site; what could not be read is refused, and written down by itself.
        """
        asked: list[tuple[Reservation, bytes]] = []
        verdicts: dict[str, Verdict] = {}
        for site, envelope in sorted(sealed.items()):
            try:
                statement = self.opened(site, f"run-{run}", envelope)
                if not isinstance(statement, Reservation) or statement.run != run:
                    found = Finding("bad_statement", "not a reservation for this run")
                    raise self.unwelcome(site, f"run-{run}", found)
                asked.append((statement, envelope))
            except RequestRejectedError as refusal:
                verdicts[site] = Verdict((refusal.finding,))
        if asked:
            given = self.register.reserve_all(_key(COORDINATOR, f"run-{run}"), asked, least, required)
            verdicts |= {r.site: verdict for (r, _), verdict in zip(asked, given, strict=True)}
        return verdicts

    def reserved_run(self, run: str) -> bool:
        """Has the run's reservation been decided?"""
        return bool(self.register.store.answer(_key(COORDINATOR, f"run-{run}")))

    def parted(self, peer: str) -> str:
        """The newest run for which a site was granted, if the ledger has closed its grant; "": none, or open."""
        with self.register.store.exclusive() as state:
            mine = [g for g in state.grants.values() if g.reserved.site == peer and g.reserved.run]
        return mine[-1].reserved.run if mine and mine[-1].state != "held" else ""

    def outcome(self, peer: str, key: str) -> tuple[Verdict, int] | None:
        """What a peer's key has led to, and where in the ledger; ``run-<run>``: the run's reservation for it."""
        lines = self.register.store.answer(_key(peer, key))
        if not lines and key.startswith("run-"):
            lines = self.register.store.answer(_key(COORDINATOR, key))
            lines = [line for line in lines or () if getattr(line.record.entry, "site", "") == peer]
        return (verdict_of(lines[0]), lines[0].seq) if lines else None

    def _once(self, peer: str, key: str, act: Callable[[str], Verdict]) -> Verdict:
        try:
            return act(_key(peer, key))
        except KeyReusedError:
            raise self.unwelcome(peer, key, _REUSED) from None


def _sealed_by(store: Store, site: str, digest: bytes) -> Statement:
    """A statement of a site that an entry rests on."""
    envelope = store.envelope(digest)
    assert envelope is not None, "an entry's envelope is stored with it"
    return parse(open_sealed(envelope, PAYLOAD_TYPE, {site: store.state.sites[site].sign_key}).payload)


def _own(store: Store, site: str, read: dict[bytes, Policy]) -> Policy:
    """The policy that a site has in force, by the ledger; each is parsed once."""
    digest = store.state.policies[site]
    if digest not in read:
        statement = _sealed_by(store, site, digest)
        assert isinstance(statement, Enrolment | Amendment)
        read[digest] = parse_policy(statement.policy, f"policy of {site}")
    return read[digest]


def _key(peer: str, key: str) -> str:
    """Idempotency keys are each site's own: one site can neither guess nor block another's."""
    return f"{peer}:{key}"


def _unverified(envelope: bytes) -> Enrolment:
    """The enrolment inside an envelope whose key is still to be taken from it."""
    if not len(envelope) <= MAX_BYTES:
        raise EnvelopeError("too large")
    try:
        payload = base64.b64decode(json.loads(envelope)["payload"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise EnvelopeError("not a DSSE envelope") from None
    statement = parse(payload)
    if not isinstance(statement, Enrolment):
        raise EnvelopeError("not an enrolment")
    return statement
