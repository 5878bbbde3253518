"""How a hospital joins: the invitation is checked, the request handed in, and what is issued is put in place.

Nothing is believed that the operator did not compare: the root certificate comes with the invitation, and its
fingerprint by telephone. The token makes the first call a mutual-TLS call like every other, and travels nowhere.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography.hazmat.primitives.asymmetric import ec

from agent.errors import CoordinatorUnreachableError, SiteConfigError
from agent.gateway.channel import open_channel
from agent.gateway.credentials import Certified, install, way_back
from agent.storage.site_directory import SiteDirectory, enrolment
from policies import statements
from policies.review.policy import PolicyError
from policies.review.policy import parse as parse_policy
from policies.statements import PAYLOAD_TYPE, encode
from protos.common.dsse import seal
from protos.identity.certificates import (
    CertificateError,
    agent_name,
    checked_chain,
    fingerprint,
    joining_name,
    request,
    root_fingerprint,
    same_fingerprint,
)
from protos.identity.join_token import TokenError, read_token, token_key
from protos.identity.key_files import ec_key, pem, read_private, replace_private
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub

WAITING: Final = "waiting.json"
JOIN_S: Final = 20.0  # a deadline for the call
Join = Callable[[grpc.ChannelCredentials, str, bytes], Any]  # credentials, host:port, envelope -> pb.JoinReply
Return = Callable[[grpc.ChannelCredentials, str, bytes], Certified]  # the same -> what is issued


@dataclass(frozen=True, slots=True)
class Given:
    """The operator's invitation: its file, and the token received separately."""

    invitation: bytes
    token: str  # as typed
    root_fingerprint: str  # as typed


@dataclass(frozen=True, slots=True)
class Invitation:
    """What is in the operator's file."""

    site: str
    coordinator: str  # host:port
    root: bytes  # of the federation, PEM
    fingerprint: str  # of the root: to be compared with what was heard, and never shown
    chain: bytes  # for the token's key, PEM
    until: int  # seconds since 1970


@dataclass(frozen=True, slots=True)
class EnrolmentProgress:
    """Where the request stands."""

    state: str  # waiting | enrolled | declined
    fingerprint: str  # of the request: to be compared with what the coordinator's operator sees


@dataclass(frozen=True, slots=True)
class _Way:
    """How to call while the site is not enrolled."""

    root: bytes
    key: ec.EllipticCurvePrivateKey
    chain: bytes


def enrol(home: SiteDirectory, given: Given | None, join: Join, now: dt.datetime) -> EnrolmentProgress:
    """Hand in the site's request with an invitation; or, without one, ask what became of it.

    With an invitation, and without ``keys/request.key``, a new key and a new request are made first: that is how a
    site comes back whose certificate was revoked, with the signing key, ledger and vault that it had.

    Args:
        home: the site's directory.
        given: the invitation; None to ask under the certificate that the first call has brought.
        join: makes the call; :func:`over_grpc` is the real one.
        now: UTC.
    Raises:
        SiteConfigError: the invitation, the token or the fingerprint is wrong, or the answer cannot be used. Nothing
        is
            believed then, and what the site had is as before.
        KeyFileError: a key is open to others.
        CoordinatorUnreachableError: the coordinator does not answer.
    """
    settings = home.settings()
    if given is not None and not (home.keys / "request.key").exists():
        _request_anew(home)
    sealed = _request(home)
    way = _invited(given, settings.site, now) if given is not None else _waiting(home, now)
    credentials = grpc.ssl_channel_credentials(way.root, pem(way.key), way.chain)
    reply = join(credentials, settings.coordinator, sealed if given is not None else b"")
    said = fingerprint(sealed)
    if not same_fingerprint(said, str(reply.fingerprint)):
        raise SiteConfigError("the coordinator answered for another request than this site's: tell its operator")
    if reply.state == "enrolled":
        _settle(home, way.root, reply, now)
    elif reply.state == "waiting":
        _keep(home, way.root, bytes(reply.waiting_certificate), now)
    elif reply.state != "declined":
        raise SiteConfigError("the coordinator's answer cannot be read: check that both sides have the same version")
    return EnrolmentProgress(str(reply.state), said)


def _request(home: SiteDirectory) -> bytes:
    try:
        return (home.root / "request.json").read_bytes()
    except OSError:
        raise SiteConfigError("request.json is missing: run `lazaret-agent --home DIR init` first") from None


def _request_anew(home: SiteDirectory) -> None:
    """Another key to ask a certificate for, and the request; the key comes last: without it both are made again."""
    key = ec.generate_private_key(ec.SECP256R1())
    replace_private(home.root / "request.json", enrolment(home, key))
    replace_private(home.keys / "request.key", pem(key))


def read_invitation(body: bytes) -> Invitation:
    """An invitation's file. Nothing of it is believed yet.

    Raises:
        SiteConfigError: it is none.
    """
    try:
        found = json.loads(body)
        root, chain = found["root"].encode(), found["certificate"].encode()
        known = root_fingerprint(root)
        return Invitation(str(found["site"]), str(found["coordinator"]), root, known, chain, int(found["until"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SiteConfigError("the invitation cannot be read: ask for its file again") from None


def check_fingerprint(invitation: Invitation, typed: str) -> str:
    """The fingerprint, as heard by telephone, if it is that of the root in the invitation.

    Raises:
        SiteConfigError: it is not.
    """
    if not same_fingerprint(typed, invitation.fingerprint):
        raise SiteConfigError("the fingerprint does not match the root in the invitation: compare it again by phone")
    return typed


def check_token(invitation: Invitation, typed: str, now: dt.datetime) -> str:
    """The token as typed, if the invitation is for it, and still holds.

    Raises:
        SiteConfigError: mistyped, or another one's; or the invitation has expired.
    """
    _way_in(invitation, typed, now)
    return typed


def _invited(given: Given, site: str, now: dt.datetime) -> _Way:
    """Check an invitation against what the operator was told.

    Raises:
        SiteConfigError: in one clear sentence, what is wrong with it.
    """
    invitation = read_invitation(given.invitation)
    if invitation.site != site:
        raise SiteConfigError("the invitation is for another site than this one")
    check_fingerprint(invitation, given.root_fingerprint)
    return _way_in(invitation, given.token, now)


def _way_in(invitation: Invitation, token: str, now: dt.datetime) -> _Way:
    try:
        key = token_key(read_token(token))
    except TokenError as error:
        raise SiteConfigError(str(error)) from None
    if not now.timestamp() < invitation.until:
        raise SiteConfigError("the invitation has expired after half an hour: ask for a new one")
    try:
        checked_chain(invitation.chain, invitation.root, joining_name(invitation.site), key.public_key(), now)
    except CertificateError as error:
        raise SiteConfigError(f"the token does not match this invitation: {error}") from None
    return _Way(invitation.root, key, invitation.chain)


def _waiting(home: SiteDirectory, now: dt.datetime) -> _Way:
    """The way that an earlier call has brought.

    Raises:
        SiteConfigError: there was none, or it has ended.
    """
    path = home.keys / WAITING
    if not path.exists():
        raise SiteConfigError("no request of this site is pending: run `lazaret-agent enrol` with an invitation")
    try:
        kept = json.loads(read_private(path))
        way = _Way(kept["root"].encode(), ec_key(home.keys / "request.key"), kept["certificate"].encode())
        checked_chain(way.chain, way.root, joining_name(home.settings().site), way.key.public_key(), now)
    except CertificateError as error:
        raise SiteConfigError(
            f"the joining certificate can no longer be used: {error}; ask for a new invitation"
        ) from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise SiteConfigError(f"{WAITING} is damaged: ask for a new invitation") from None
    return way


def _keep(home: SiteDirectory, root: bytes, chain: bytes, now: dt.datetime) -> None:
    """Keep the certificate to ask again with, and the root that the operator has compared."""
    try:
        key = ec_key(home.keys / "request.key")
        checked_chain(chain, root, joining_name(home.settings().site), key.public_key(), now)
    except CertificateError as error:
        raise SiteConfigError(f"what the coordinator issued cannot be used: {error}") from None
    body = json.dumps({"certificate": chain.decode(), "root": root.decode()})
    replace_private(home.keys / WAITING, body.encode())


def _settle(home: SiteDirectory, root: bytes, reply: Any, now: dt.datetime) -> None:
    """Put everything in place; the certificate comes last, and without it the site is not enrolled.

    Raises:
        SiteConfigError: a part cannot be used; then nothing was written.
    """
    policy, ledger_key, chain = str(reply.policy), bytes(reply.ledger_key), bytes(reply.certificate)
    name, key = agent_name(home.settings().site), ec_key(home.keys / "request.key")
    try:
        parse_policy(policy, "the federation's policy")
        checked_chain(chain, root, name, key.public_key(), now)
    except (PolicyError, CertificateError) as error:
        raise SiteConfigError(f"what the coordinator issued cannot be used: {error}") from None
    known = _ledger_key(home.keys / "coordinator.pub")
    if len(ledger_key) != 32 or known not in (None, ledger_key):
        raise SiteConfigError(
            "the coordinator's ledger has another key than before: this site accepts only the first one"
        )
    files = {"coordinator.pub": base64.b64encode(ledger_key), "federation.toml": policy.encode(), "root.crt": root}
    for file, body in files.items():
        replace_private(home.keys / file, body)
    install(home.keys, root, name, key, Certified(chain, bytes(reply.returning_certificate)), now)
    (home.keys / WAITING).unlink(missing_ok=True)


def come_back(home: SiteDirectory, ask: Return, now: dt.datetime) -> bool:
    """After the certificate has ended, within 30 days: get another one for a fresh key, asked for by the signing key.

    Args:
        home: the site's directory.
        ask: makes the call; :func:`return_over_grpc` is the real one.
        now: UTC.
    Returns:
        Whether there is a new certificate; not while the old one is good, nor where there is no way back any more.
    Raises:
        SiteConfigError: the coordinator refuses, in its words; or its answer cannot be used, and nothing was written.
        CoordinatorUnreachableError: it does not answer.
    """
    way = way_back(home.keys, now)
    if way is None:
        return False
    settings, root = home.settings(), (home.keys / "root.crt").read_bytes()
    name, key = agent_name(settings.site), ec.generate_private_key(ec.SECP256R1())
    statement = encode(statements.Return(settings.site, request(key, name).decode()))
    sealed = seal(statement, PAYLOAD_TYPE, home.sign_key())
    issued = ask(grpc.ssl_channel_credentials(root, *way), settings.coordinator, sealed)
    install(home.keys, root, name, key, issued, now)
    return True


def _ledger_key(path: Path) -> bytes | None:
    """The key of the coordinator's ledger that this site has held on to, if it ever was enrolled.

    Raises:
        SiteConfigError: there is a file, and it cannot be read.
    """
    if not path.exists():
        return None
    try:
        return base64.b64decode(path.read_bytes(), validate=True)
    except (OSError, binascii.Error):
        raise SiteConfigError("keys/coordinator.pub is damaged: restore it") from None


def over_grpc(proxy: str = "") -> Join:
    """The real call: one, with a deadline.

    It raises SiteConfigError where the coordinator refuses, in its words, and CoordinatorUnreachableError where it
    does not answer, or not with a certificate of that root.

    Args:
        proxy: host:port of the hospital's HTTP proxy; "": none.
    """

    def join(credentials: grpc.ChannelCredentials, target: str, envelope: bytes) -> Any:
        with open_channel(target, credentials, proxy) as channel:
            try:
                return GatewayStub(channel).Join(gateway_pb2.JoinRequest(envelope=envelope), timeout=JOIN_S)
            except grpc.RpcError as error:
                raise _said(error) from None

    return join


def return_over_grpc(proxy: str = "") -> Return:
    """The real call of :func:`come_back`; errors as of :func:`over_grpc`."""

    def ask(credentials: grpc.ChannelCredentials, target: str, envelope: bytes) -> Certified:
        with open_channel(target, credentials, proxy) as channel:
            try:
                reply = GatewayStub(channel).Return(gateway_pb2.ReturnRequest(envelope=envelope), timeout=JOIN_S)
            except grpc.RpcError as error:
                raise _said(error) from None
        return Certified(bytes(reply.certificate), bytes(reply.returning_certificate))

    return ask


def _said(error: Any) -> Exception:
    """What a failed call means to the operator."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return CoordinatorUnreachableError(
            "the coordinator does not answer with that root: check the address and whether the invitation is valid"
        )
    return SiteConfigError(
        "the coordinator refuses: " + "".join(c for c in str(error.details())[:300] if c.isprintable())
    )
