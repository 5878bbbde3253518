"""What the coordinator does with sealed bytes: open, parse, check the artifact, review, write down.

No transport here: bytes and the peer's site come in, a verdict goes out, and every verdict is a ledger entry.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from policies.entries import InvalidEntry, Refused
from policies.ledger import KeyReused
from policies.merkle import BadCheckpoint, cosigners, open_checkpoint
from policies.policy import Policy, PolicyError, strictest
from policies.policy import parse as parse_policy
from policies.register import Facts, Register, verdict_of
from policies.review import Finding, Verdict
from policies.statement import (
    PAYLOAD_TYPE,
    Amendment,
    Approval,
    Enrolment,
    Receipts,
    Release,
    Reservation,
    Settlement,
    Statement,
    parse,
)
from policies.store import Draft, Store
from protos.artifact import BadArtifact, unpack_images, unpack_vector
from protos.envelope import BadEnvelope, open_sealed
from protos.identity import SITE_NAME

KEY: Final = re.compile(r"[a-z0-9_-]{1,200}")


class RolledBack(Exception):
    """A head that this ledger's key has signed is not in the ledger: it is an older copy, or was rewritten."""


class Unwelcome(Exception):
    """A peer's call that is refused before any review; the finding says why, and it is in the ledger."""

    def __init__(self, finding: Finding) -> None:
        """Keep the finding."""
        super().__init__(finding.rule)
        self.finding = finding


@dataclass(frozen=True, slots=True)
class Intake:
    """The coordinator's counter: its register, and the policies that sites enrolled with."""

    register: Register
    federation: Policy
    node_keys: dict[str, str]  # site -> its Flower node key, OpenSSH

    @staticmethod
    def over(store: Store, federation: Policy) -> Intake:
        """Put together from a ledger: the sites' policies and keys are read from their sealed statements."""
        nodes: dict[str, str] = {}
        for site, entry in store.state.sites.items():
            statement = _sealed_by(store, site, entry.envelope)
            assert isinstance(statement, Enrolment)
            nodes[site] = statement.node_key
        read: dict[bytes, Policy] = {}
        return Intake(Register(store, lambda site: strictest(_own(store, site, read), federation)), federation, nodes)

    def read_enrolment(self, envelope: bytes) -> Enrolment:
        """A site's sealed request, with everything in it found usable; nothing is written.

        Raises:
            BadEnvelope: the request is not sealed by the key that it carries, or a key in it cannot be used.
            MalformedStatement, PolicyError: its content cannot be used.
        """
        statement = _unverified(envelope)
        try:
            key = base64.b64decode(statement.sign_key, validate=True)
            node = load_ssh_public_key(statement.node_key.encode())
        except (ValueError, UnsupportedAlgorithm):
            raise BadEnvelope("a key in the request cannot be read") from None
        taken = {tuple(known.split()[:2]) for known in self.node_keys.values()}  # without the comment
        if not isinstance(node, ec.EllipticCurvePublicKey) or node.curve.name != "secp384r1" or len(key) != 32:
            raise BadEnvelope("the node key must be EC P-384, the signing key Ed25519")
        if statement.site == "coordinator":
            raise BadEnvelope("no site may bear that name: ledgers are named after their owners")
        if not SITE_NAME.fullmatch(statement.site) or tuple(statement.node_key.split()[:2]) in taken:
            raise BadEnvelope("the site's name is not one, or its node key is another site's")
        open_sealed(envelope, PAYLOAD_TYPE, {statement.site: key})
        parse_policy(statement.policy, f"policy of {statement.site}")
        return statement

    def enrol(self, envelope: bytes) -> Enrolment:
        """Approve a site's sealed request: its key, its policy and its accounts enter the ledger.

        The account's limits are the stricter of both policies (P12).

        Raises:
            BadEnvelope, MalformedStatement, PolicyError: see :meth:`read_enrolment`.
            InvalidEntry: the site is enrolled already, or its signing key is another's.
        """
        statement = self.read_enrolment(envelope)
        own = parse_policy(statement.policy, f"policy of {statement.site}")
        self.register.enrol(statement, envelope, strictest(own, self.federation))
        self.node_keys[statement.site] = statement.node_key
        return statement

    def opened(self, peer: str, key: str, envelope: bytes) -> Statement:
        """The statement in an envelope that this peer sealed.

        Raises:
            Unwelcome: unknown peer, bad signature, malformed statement, or one that speaks for another site.
        """
        if not KEY.fullmatch(key):
            raise self._unwelcome(peer, "malformed", Finding("bad_key", "a key is 1 to 200 of a-z, 0-9, - and _"))
        enrolled = self.register.store.state.sites.get(peer)
        if enrolled is None:
            raise self._unwelcome(peer, key, Finding("unknown_site", "this site is not enrolled"))
        try:
            sealed = open_sealed(envelope, PAYLOAD_TYPE, {peer: enrolled.sign_key})
            statement = parse(sealed.payload)
        except BadEnvelope as error:
            raise self._unwelcome(peer, key, Finding("bad_envelope", str(error))) from None
        except ValueError as error:
            raise self._unwelcome(peer, key, Finding("bad_statement", str(error))) from None
        if isinstance(statement, Approval) or statement.site != peer:
            raise self._unwelcome(peer, key, Finding("another_site", "the statement speaks for another site"))
        return statement

    def _unwelcome(self, peer: str, key: str, finding: Finding) -> Unwelcome:
        self.register.store.append(
            _key(peer, f"{key}-unwelcome-{self.register.store.state.size}"),
            _refusal(peer, finding),
        )
        return Unwelcome(finding)

    def reserve(self, peer: str, key: str, envelope: bytes) -> Verdict:
        """Price first: hold the claim's cost, or say why not."""
        statement = self.opened(peer, key, envelope)
        if not isinstance(statement, Reservation):
            raise self._unwelcome(peer, key, Finding("bad_statement", "not a reservation"))
        return self._once(peer, key, lambda k: self.register.reserve(k, statement, envelope))

    def settle(self, peer: str, key: str, envelope: bytes) -> Verdict:
        """A site's word on a grant."""
        statement = self.opened(peer, key, envelope)
        if not isinstance(statement, Settlement) or statement.outcome not in ("declined", "expired"):
            raise self._unwelcome(peer, key, Finding("bad_statement", "not a settlement"))
        return self._once(peer, key, lambda k: self.register.settle(k, statement, envelope))

    def amend(self, peer: str, key: str, envelope: bytes) -> Verdict:
        """A site's new policy: on the books, and in force from here on."""
        statement = self.opened(peer, key, envelope)
        if not isinstance(statement, Amendment):
            raise self._unwelcome(peer, key, Finding("bad_statement", "not an amendment"))
        try:
            parse_policy(statement.policy, f"policy of {peer}")
            return self._once(peer, key, lambda k: self.register.amend(k, statement, envelope))
        except (PolicyError, InvalidEntry) as error:
            raise self._unwelcome(peer, key, Finding("bad_statement", str(error))) from None

    def present(self, peer: str, key: str, envelope: bytes) -> Verdict:
        """After a restore: a sealed reservation that was lost, or the word that all were shown."""
        statement = self.opened(peer, key, envelope)
        if not isinstance(statement, Reservation | Receipts):
            raise self._unwelcome(peer, key, Finding("bad_statement", "neither a reservation nor a word on receipts"))
        try:
            return self._once(peer, key, lambda k: self.register.present(k, statement, envelope))
        except InvalidEntry as error:
            raise self._unwelcome(peer, key, Finding(self._why_not(peer, statement, envelope), str(error))) from None

    def _why_not(self, peer: str, statement: Reservation | Receipts, envelope: bytes) -> str:
        """The rule by which a receipt is not taken."""
        state = self.register.store.state
        if peer not in state.waiting | state.late:
            return "not_awaited"
        if isinstance(statement, Receipts):
            return "wrong_receipts"
        return "was_refused" if hashlib.sha256(envelope).digest() in state.refused else "not_recovered"

    def witness(self, peer: str, note: str) -> bool:
        """Is this a head of this ledger's epoch that the peer, and nobody else, has validly cosigned?

        Raises:
            RolledBack: this ledger's key signed that head, and the ledger does not hold it.
        """
        store = self.register.store
        enrolled = store.state.sites.get(peer)
        try:
            head = open_checkpoint(note, store.public)
        except BadCheckpoint:
            return False
        signatures = note.partition("\n\n")[2].count("\n")
        if enrolled is None or signatures != 2 or cosigners(note, {peer: enrolled.sign_key}) != {peer}:
            return False
        if (head.epoch, head.nonce) != (store.state.epoch, store.state.nonce):  # of before a restore
            return False
        if not store.holds(head):
            raise RolledBack
        return True

    def release(self, peer: str, key: str, envelope: bytes) -> Release:
        """The statement of a release, before its artifact is accepted: its size is the quota."""
        statement = self.opened(peer, key, envelope)
        if not isinstance(statement, Release):
            raise self._unwelcome(peer, key, Finding("bad_statement", "not a release"))
        return statement

    def admit(self, peer: str, key: str, envelope: bytes, release: Release, artifact: bytes) -> Verdict:
        """Review a release with its artifact in hand; only what has a grant is worth decoding."""
        facts = tuple(_changed(release, artifact))
        early = () if facts else self.register.examine(release, envelope).findings
        if not facts and not early:
            facts = tuple(_malformed(release, artifact))
        return self._once(peer, key, lambda k: self.register.admit(k, release, envelope, Facts(facts, early)))

    def outcome(self, peer: str, key: str) -> tuple[Verdict, int] | None:
        """What a peer's key has led to, and where in the ledger."""
        lines = self.register.store.answer(_key(peer, key))
        return (verdict_of(lines[0]), lines[0].seq) if lines else None

    def _once(self, peer: str, key: str, act: Callable[[str], Verdict]) -> Verdict:
        try:
            return act(_key(peer, key))
        except KeyReused:
            raise self._unwelcome(
                peer, key, Finding("key_reused", "this idempotency key was used for something else")
            ) from None


def _sealed_by(store: Store, site: str, digest: bytes) -> Statement:
    """A statement of a site that an entry rests on."""
    envelope = store.envelope(digest)
    assert envelope is not None, "an entry's envelope is stored with it"
    return parse(open_sealed(envelope, PAYLOAD_TYPE, {site: store.state.sites[site].sign_key}).payload)


def _own(store: Store, site: str, read: dict[bytes, Policy]) -> Policy:
    """The policy that a site has in force, by the books; each is parsed once."""
    digest = store.state.policies[site]
    if digest not in read:
        statement = _sealed_by(store, site, digest)
        assert isinstance(statement, Enrolment | Amendment)
        read[digest] = parse_policy(statement.policy, f"policy of {site}")
    return read[digest]


def _key(peer: str, key: str) -> str:
    """Idempotency keys are each site's own: one site can neither guess nor block another's."""
    return f"{peer}:{key}"


def _refusal(peer: str, finding: Finding) -> Draft:
    return Draft((Refused("", peer, "", "call", [finding.rule], b""),))


def _unverified(envelope: bytes) -> Enrolment:
    """The enrolment inside an envelope whose key is still to be taken from it."""
    try:
        payload = base64.b64decode(json.loads(envelope)["payload"], validate=True)
    except (ValueError, KeyError, TypeError):
        raise BadEnvelope("not a DSSE envelope") from None
    statement = parse(payload)
    if not isinstance(statement, Enrolment):
        raise BadEnvelope("not an enrolment")
    return statement


def _changed(release: Release, artifact: bytes) -> Iterator[Finding]:
    """Are these the bytes of the statement?"""
    if hashlib.sha256(artifact).hexdigest() != release.artifact_sha256 or len(artifact) != release.artifact_bytes:
        yield Finding("artifact_changed", "the artifact is not the one in the statement")


def _malformed(release: Release, artifact: bytes) -> Iterator[Finding]:
    """Are they an artifact of their type, in its one form?"""
    try:
        if release.artifact_type == "image-set":
            unpack_images(artifact)
        elif release.artifact_type == "update":
            unpack_vector(artifact)
        else:
            yield Finding("artifact_type", "no such type of artifact")
    except BadArtifact as error:
        yield Finding("artifact_malformed", str(error))
