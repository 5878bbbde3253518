"""Enrolment: invitations, requests, approvals, certificates and their end.

A site joins in four steps. The operator invites it: a certificate, and a token sent separately, from which the
certificate's key follows. The site submits its signed request under that certificate, once. Two people of different
roles approve exactly that request. The ledger then records the enrolment and the site's certificate, and only then
the certificate is sent. A crash between two steps loses nothing: the next request gets the pending answer.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coordinator.admission import COORDINATOR, AdmissionService
from coordinator.enrolment.enrolment_requests import INVITATION_LIFE, EnrolmentRecord, Enrolments, SignedRequest
from coordinator.storage.directory import CoordinatorDirectory
from policies.audit.auditor import open_envelope
from policies.governance import decisions
from policies.ledger.approvals import APPROVING
from policies.review.rules import Finding
from policies.statements import PAYLOAD_TYPE, Approval, Return, parse
from protos.common.dsse import open_sealed
from protos.common.errors import PeerError
from protos.identity.certificates import (
    LEAF_LIFE,
    RETURN_LIFE,
    SITE_NAME,
    agent_name,
    certify,
    fingerprint,
    issue,
    joining_name,
    leaf_of,
    number_of,
    request,
    requested_key,
    returning_name,
    root_fingerprint,
)
from protos.identity.join_token import new_token, read_token, token_key

MOST_VALID: Final = 8  # certificates of one site at once; more are wanted by nobody honest
_SPOILED: Final = "a certificate for this key was revoked: ask for a new invitation, and make a new key and request"
_STALE: Final = 1 / 3  # of its life: with less left, a certificate that is picked up is replaced


class JoinError(PeerError, ValueError):
    """A call about taking part that is refused; the text is for the peer or the operator."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the operator passes on: the body openly, the token by another way; the fingerprint to be compared."""

    body: bytes  # JSON: {site, coordinator, root, certificate, until}; no secret
    token: str
    fingerprint: str  # of the root certificate


@dataclass(frozen=True, slots=True)
class JoinState:
    """The state of a site's request, and the reply to it."""

    state: str  # waiting | enrolled | declined
    fingerprint: str  # of the sealed request
    waiting_certificate: bytes = b""  # waiting: a chain for the site's own key, to ask again with
    certificate: bytes = b""  # enrolled: the chain
    policy: str = ""  # enrolled: the federation's
    ledger_key: bytes = b""  # enrolled: Ed25519, raw
    returning_certificate: bytes = b""  # enrolled: a chain for the same key, see :meth:`Authority.come_back`


@dataclass(frozen=True, slots=True)
class Pending:
    """One site as the operator sees it."""

    site: str
    state: str  # invited | waiting | enrolled | declined | expired
    fingerprint: str  # of the request; "" before there is one
    digest: str  # SHA-256 of the sealed request, hexadecimal: what persons approve
    until: int  # seconds since 1970: the end of the invitation, or of the waiting


class Authority:
    """The coordinator's registration authority. Every method may be called from any thread."""

    def __init__(
        self,
        home: CoordinatorDirectory,
        intake: AdmissionService,
        clock: Callable[[], dt.datetime],
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        life: dt.timedelta = LEAF_LIFE,
    ) -> None:
        """Open the authority.

        Args:
            home: keys, and the folder of invitations and requests.
            intake: the ledger's counter.
            clock: the time, UTC.
            entropy: so many random bytes, for tokens.
            life: of a site's certificate.
        """
        self._home, self._intake, self._clock, self._entropy, self._life = home, intake, clock, entropy, life
        self._store = intake.register.store
        self._kept = Enrolments(home.enrolments)
        self._turn = threading.RLock()

    def invite(self, site: str) -> Invitation:
        """A new invitation, good for half an hour and one request; an open one of the same site ends with it.

        A site that is enrolled is invited again when its certificate has ended: the request that was approved is
        answered at once, unless a certificate for its key was revoked.

        Raises:
            JoinError: no name for a site.
            CertificateError, CoordinatorConfigError, KeyFileError: the authority cannot issue.
        """
        if not SITE_NAME.fullmatch(site) or site == COORDINATOR:
            raise JoinError("a site's name is 1 to 63 of a-z, 0-9 and -, and not the coordinator's")
        now, token = self._clock(), new_token(self._entropy)
        key, name = token_key(read_token(token)), joining_name(site)
        chain = issue(request(key, name), name, self._home.ca(), now, life=INVITATION_LIFE)
        until, root = int((now + INVITATION_LIFE).timestamp()), self._home.root_crt()
        body = {
            "certificate": chain.decode(),
            "coordinator": self._home.settings().reached_at,
            "root": root.decode(),
            "site": site,
            "until": until,
        }
        with self._turn:
            self._tidy()
            known = self._kept.read(site) or EnrolmentRecord(site, 0, "")
            self._kept.write(EnrolmentRecord(site, until, _hash(key.public_key()), "", known.asked, known.earlier))
        return Invitation((json.dumps(body, indent=1) + "\n").encode(), token, root_fingerprint(root))

    def join(self, site: str, leaf: x509.Certificate, envelope: bytes) -> JoinState:
        """A site hands in its sealed request, or asks what became of it.

        Args:
            site: the name in the peer's joining certificate.
            leaf: that certificate, which is valid now: the invitation's, or the waiting one.
            envelope: the sealed request; empty: only ask.
        Raises:
            JoinError: no such invitation, one that has ended, or one that was used for another request.
            EnvelopeError, CertificateError, StatementError, PolicyError: the request cannot be used.
        """
        with self._turn:
            record, key = self._kept.read(site), _hash(leaf.public_key())
            if record is None:
                raise JoinError("there is no open invitation for this site: ask for a new one")
            if key == record.key:
                return self._handed_in(record, envelope)
            digest = hashlib.sha256(envelope).hexdigest()
            for asked in filter(None, (record.asked, *record.earlier)):
                if key == asked.key and (not envelope or digest == asked.digest):
                    return self._answer(record, asked)
        raise JoinError("this invitation was replaced by a newer one, or is for another request or key")

    def _handed_in(self, record: EnrolmentRecord, envelope: bytes) -> JoinState:
        """A call under the token's key: good for one request, which may be sent again."""
        if not self._clock().timestamp() < record.until:
            raise JoinError("the invitation has ended: ask for a new one")
        if not envelope:
            raise JoinError("the request to take part is missing")
        digest = hashlib.sha256(envelope).hexdigest()
        if record.bound and record.bound != digest:
            if not record.contested:  # into the ledger, once for each invitation
                self._kept.write(replace(record, contested=True))
                self._intake.unwelcome(record.site, "join", Finding("invitation_used", "a token in two hands"))
            raise JoinError("this token was used for another request: say so, and ask for a new invitation")
        if not record.bound:
            asked, earlier = self._read(record, envelope), record.earlier
            if record.asked is not None and record.asked.digest != digest:
                earlier = (*earlier, record.asked.declined("replaced"))
            record = replace(record, bound=digest, asked=asked, earlier=earlier)
            self._kept.write(record)
        assert record.asked is not None
        return self._answer(record, record.asked)

    def _read(self, record: EnrolmentRecord, envelope: bytes) -> SignedRequest:
        """A request in order: sealed by its own key, for this site, neither it nor its key ended by revocation."""
        statement = self._intake.read_enrolment(envelope)
        if statement.site != record.site:
            raise JoinError("the request is for another site than the invitation")
        key = _hash(requested_key(statement.csr.encode(), agent_name(record.site)))
        if key == record.key:
            raise JoinError("the request is for the token's key, which the operator knows: make a key of your own")
        if self._spoiled(record.site, key):
            raise JoinError(_SPOILED)
        asked = SignedRequest(envelope, key, int(self._clock().timestamp()))
        if bytes.fromhex(asked.digest) in self._store.state.requests and not self._in_force(record.site, asked):
            raise JoinError("this request was approved before the site was revoked: make a fresh one")
        return asked

    def _spoiled(self, site: str, key: str) -> bool:
        """Was a certificate for this key revoked? Then others may have the key too, and nobody gets another."""
        revoked = self._store.state.revoked
        return any(number in revoked for number, known in self._kept.keys(site).items() if known == key)

    def _answer(self, record: EnrolmentRecord, asked: SignedRequest) -> JoinState:
        said = fingerprint(asked.envelope)
        if self._in_force(record.site, asked):
            if self._spoiled(record.site, asked.key):  # a new invitation says why
                return JoinState("declined", said)
            chain, policy = self._picked_up(record, asked), self._home.policy_text()
            back = self._returning(record.site, self._own_key(record.site, asked))
            return JoinState("enrolled", said, b"", chain, policy, self._store.public, back)
        left = asked.ends - self._clock()
        if asked.state == "declined" or not left > dt.timedelta(0):
            return JoinState("declined", said)
        waiting = certify(
            self._own_key(record.site, asked), joining_name(record.site), self._home.ca(), self._clock(), life=left
        )
        return JoinState("waiting", said, waiting_certificate=waiting)

    def _own_key(self, site: str, asked: SignedRequest) -> ec.EllipticCurvePublicKey:
        return requested_key(self._intake.read_enrolment(asked.envelope).csr.encode(), agent_name(site))

    def _in_force(self, site: str, asked: SignedRequest) -> bool:
        """Is this the request that the ledger says was approved, and the site not barred since?"""
        state = self._store.state
        enrolled = state.sites.get(site)
        return enrolled is not None and enrolled.envelope.hex() == asked.digest and site not in state.revoked_sites

    def _picked_up(self, record: EnrolmentRecord, asked: SignedRequest) -> bytes:
        """The certificate of an approved request: the one of before while it is good, or a new one."""
        if asked.certificate:
            leaf = leaf_of(asked.certificate.encode())
            life, left = (
                leaf.not_valid_after_utc - leaf.not_valid_before_utc,
                leaf.not_valid_after_utc - self._clock(),
            )
            if left > _STALE * life and self._store.state.admits(record.site, number_of(leaf)):
                return asked.certificate.encode()
        chain = self._issue(record.site, self._own_key(record.site, asked))
        self._kept.write(record.exchanged(asked, replace(asked, certificate=chain.decode())))
        return chain

    def _issue(self, site: str, public: ec.EllipticCurvePublicKey) -> bytes:
        """A site's certificate; it is in the ledger before anybody has it, and its key is remembered before that.

        Raises:
            JoinError: a certificate for this key was revoked.
        """
        if self._spoiled(site, _hash(public)):
            raise JoinError(_SPOILED)
        chain = certify(public, agent_name(site), self._home.ca(), self._clock(), life=self._life)
        leaf = leaf_of(chain)
        digest, end = leaf.fingerprint(SHA256()), int(leaf.not_valid_after_utc.timestamp())
        self._kept.remember(site, number_of(leaf), _hash(public))
        self._intake.register.issue(site, number_of(leaf), digest, end)
        return chain

    def _returning(self, site: str, public: ec.EllipticCurvePublicKey) -> bytes:
        """A chain for the key of a site's certificate that outlives it, and may do nothing but come back."""
        return certify(public, returning_name(site), self._home.ca(), self._clock(), life=self._life + RETURN_LIFE)

    def enrolments(self) -> list[Pending]:
        """Every invitation and request, by site; what ended without one is forgotten."""
        with self._turn:
            self._tidy()
            return [self._pending(record) for record in self._kept.all()]

    def _pending(self, record: EnrolmentRecord) -> Pending:
        asked, now = record.asked, self._clock()
        if asked is None or (not record.bound and now.timestamp() < record.until):
            state = "invited" if now.timestamp() < record.until else "expired"
            return Pending(record.site, state, "", "", record.until)
        state = asked.state if now < asked.ends or asked.state == "declined" else "expired"
        state = "enrolled" if self._in_force(record.site, asked) else state
        return Pending(record.site, state, fingerprint(asked.envelope), asked.digest, int(asked.ends.timestamp()))

    def _tidy(self) -> None:
        """Forget what has ended; a request that was declined is kept."""
        now = self._clock()
        for record in self._kept.all():
            asked = record.asked
            if asked is not None and asked.state != "declined" and not now < asked.ends:
                asked = None
            if asked is None and not record.earlier and not now.timestamp() < record.until:
                self._kept.remove(record.site)
            elif asked is not record.asked:
                self._kept.write(replace(record, asked=asked))

    def enrol(self, site: str, serial: str, approvals: Sequence[bytes]) -> None:
        """Write persons' approvals, and enrol the site when one of each approving role approved this very request.

        The approval covers ``enrol``, the site, and the SHA-256 of its signed request. Written approvals stay valid,
        also if more are needed. For a site that is already enrolled none is written, so none is left over for the
        time after a revocation: the same request succeeds, and another one is refused.

        Raises:
            JoinError: no request waits, the site is enrolled with another one, an approval is for something else,
                or a role is missing.
            InvalidEntryError: an approval is nobody's who was appointed here.
            EnvelopeError, CertificateError, StatementError, PolicyError: the request cannot be used any more.
        """
        with self._turn:
            record = self._kept.read(site) if SITE_NAME.fullmatch(site) else None
            asked = record.asked if record else None
            if asked is None or (asked.state == "declined") or not self._clock() < asked.ends:
                raise JoinError("no request of that site waits for approval")
            for envelope in approvals:
                _for_this(envelope, (serial, "enrol", site, asked.digest))
            if self._in_force(site, asked):
                return
            if site in self._store.state.sites and site not in self._store.state.revoked_sites:
                raise JoinError("the site is enrolled already, with another request; nothing was written")
            for envelope in approvals:
                decisions.approve(self._store, envelope)
            agreed = set(self._store.state.approvals(serial, "enrol", site, asked.digest))
            if not agreed >= APPROVING:
                missing = " and ".join(sorted(APPROVING - agreed))
                raise JoinError(f"approvals are kept, and more are needed: one person in the role of {missing}")
            self._intake.enrol(asked.envelope, serial)

    def renew(self, site: str, current_leaf: x509.Certificate, csr_pem: bytes) -> tuple[bytes, bytes]:
        """A fresh certificate for a fresh key, before the one in use ends.

        Args:
            site: the name in the peer's certificate.
            current_leaf: that certificate.
            csr_pem: signed by the fresh key, for the same name.
        Returns:
            The chain, PEM, whose entry is in the ledger; and the one to come back with, see :meth:`come_back`.
        Raises:
            JoinError: the site or the certificate is not admitted now, the key is the old one or one whose
                certificate was revoked, or too many are valid.
            CertificateError: the signing request cannot be used.
        """
        with self._turn:
            state, now = self._store.state, self._clock()
            if not state.admits(site, number_of(current_leaf)) or not now <= current_leaf.not_valid_after_utc:
                raise JoinError("this certificate is not good any more: ask for a new invitation")
            public = requested_key(csr_pem, agent_name(site))
            if public == current_leaf.public_key():
                raise JoinError("a renewal is for a fresh key")
            return self._another(site, public)

    def come_back(self, site: str, leaf: x509.Certificate, envelope: bytes) -> tuple[bytes, bytes]:
        """A fresh certificate for a fresh key, after the one in use has ended: the site's signing key asks for it.

        Args:
            site: the name in the peer's returning certificate, which is valid now.
            leaf: that certificate.
            envelope: the sealed statement ``return/v1``.
        Returns:
            As :meth:`renew`.
        Raises:
            JoinError: the site takes no part any more, a certificate for this key was revoked or is unknown, the
                statement is another one, its key is not fresh, or too many are valid.
            EnvelopeError, StatementError, CertificateError: the statement is not the site's, or cannot be used.
        """
        with self._turn:
            state, known = self._store.state, self._kept.keys(site)
            enrolled, key = state.sites.get(site), _hash(leaf.public_key())
            if enrolled is None or site in state.revoked_sites:
                raise JoinError("this site takes no part any more: ask for a new invitation")
            if self._spoiled(site, key):
                raise JoinError(_SPOILED)
            numbers = [number for number, issued in state.issued.items() if issued.site == site]
            own = [at for at, number in enumerate(numbers) if known.get(number) == key]
            if not own:  # after a restore of the coordinator: whether it was revoked is unknown
                raise JoinError("the coordinator does not know this certificate's key: ask for a new invitation")
            if any(number in state.revoked for number in numbers[own[0] :]):  # who took that one may have older ones
                raise JoinError("a later certificate of this site was revoked: ask for a new invitation")
            statement = parse(open_sealed(envelope, PAYLOAD_TYPE, {site: enrolled.sign_key}).payload)
            if not isinstance(statement, Return) or statement.site != site:
                raise JoinError("this is not the site's request for a certificate")
            public = requested_key(statement.csr.encode(), agent_name(site))
            if _hash(public) in known.values():  # also of an old statement that somebody sends again
                raise JoinError("a return is for a fresh key")
            return self._another(site, public)

    def _another(self, site: str, public: ec.EllipticCurvePublicKey) -> tuple[bytes, bytes]:
        """A further certificate of an enrolled site, and the one to come back with.

        Raises:
            JoinError: too many are valid, or a certificate for this key was revoked.
        """
        state, now = self._store.state, self._clock()
        valid = [c for c in state.issued.values() if c.site == site and now.timestamp() < c.not_after]
        if not len([c for c in valid if c.number not in state.revoked]) < MOST_VALID:
            raise JoinError("too many certificates of this site are valid at once: wait until some have ended")
        return self._issue(site, public), self._returning(site, public)

    def revoke(self, site: str, number: str, why: str) -> None:
        """End one certificate, or with the number "" all of a site's and the site's part in the federation.

        A request that waits for approval is declined by the latter, and an open invitation ends.

        Raises:
            JoinError: there is nothing of that site to end.
            InvalidEntryError: no such certificate, or revoked already.
        """
        with self._turn:
            record = self._kept.read(site) if SITE_NAME.fullmatch(site) else None
            state = self._store.state
            enrolled = site in state.sites and site not in state.revoked_sites
            if not enrolled and (number or record is None):
                raise JoinError("nothing of that site is enrolled, or waits")
            if enrolled:
                self._intake.register.revoke(site, _number(number), why)
            if record is not None and not number:
                asked = record.asked.declined(why) if record.asked else None
                self._kept.write(replace(record, until=0, key="", asked=asked))


def _for_this(envelope: bytes, wanted: tuple[str, str, str, str]) -> None:
    """Is this an approval of exactly that? Whose it is, the ledger's counter finds out.

    Raises:
        JoinError: of something else, or none.
    """
    try:
        said = parse(open_envelope(envelope, None))
    except ValueError:
        raise JoinError("an approval cannot be read; nothing was written") from None
    if not isinstance(said, Approval) or (said.serial, said.action, said.subject, said.value) != wanted:
        serial, action, subject, value = wanted
        raise JoinError(f"an approval is for something else; sign: {action} {subject} {value} --serial {serial}")


def _number(typed: str) -> str:
    """A certificate's number as the ledger writes it; only what is empty means all of them.

    Raises:
        JoinError: not a number in hexadecimal.
    """
    plain = typed.lower().lstrip("0")
    if typed and not re.fullmatch(r"[0-9a-f]{1,40}", plain):
        raise JoinError("a certificate's number is hexadecimal, as the ledger shows it")
    return plain


def _hash(public: object) -> str:
    """How a key is remembered: SHA-256 of its SubjectPublicKeyInfo."""
    assert isinstance(public, ec.EllipticCurvePublicKey)
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
