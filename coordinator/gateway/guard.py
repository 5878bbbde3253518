"""Check every RPC: caller, transport, certificate, rate and size. Python gRPC checks none of them.

After the handshake gRPC never looks at a certificate again, has no revocation lists, and passes exception texts to
the peer. So :class:`Guard` stands around every method: TLS 1.3, exactly one SPIFFE name, valid now, not on the
ledger's deny-list, the right role, within its rate and size; and whatever goes wrong inside leaves as a code and an
incident number. On a stream the same is checked again for each message, and :meth:`Guard.close_calls` ends a peer's
open calls at once. This is a wall: no service's method is reached but through the guard.

gRPC parses a message before it calls any interceptor, and keeps some 20 kB of each call whose message it cannot
parse. So it gets streams of bytes only: the guard first checks the caller, then reads, measures and parses the
message.

A site's rate and violation limits count only calls with a valid certificate. Calls with a revoked or expired
certificate, or one for another role, are counted by the certificate's number, so a stolen certificate cannot use up
the site's limits.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc import StatusCode

from coordinator.gateway.calls import (
    AGENT,
    JOINING,
    OPERATING,
    RETURNING,
    Call,
    CallRejectedError,
    Peer,
    PeerCertificateError,
    peer_of,
)
from coordinator.gateway.quotas import IdleTimeout
from protos.protocol_version import METADATA, OURS, NoCommonVersionError, agree, announced

ROLES: Final[Mapping[str, str]] = {  # the role that each method is for; a method that is not listed is nobody's
    **dict.fromkeys(
        ("Hello", "Reserve", "Offer", "Upload", "Submit", "Settle", "Outcome", "Amend", "Present"), AGENT
    ),
    **dict.fromkeys(("Session", "Fleet", "Renew"), AGENT),
    "Join": JOINING,
    "Return": RETURNING,
    **dict.fromkeys(("Launch", "Plan", "Check", "Watch", "Resume", "Stop"), OPERATING),
    **dict.fromkeys(("Invite", "Enrolments", "Approve", "Revoke"), OPERATING),
}
MOST_BYTES: Final = 1 << 20  # of one message, a chunk's own bytes apart
CALLS_PER_S: Final = 100.0  # of one peer, for long
BURST: Final = 400.0
AT_ONCE: Final = 12  # calls of one peer in progress
STRIKES: Final = 200.0  # refusals that are written down for one peer; more need time
STRIKE_S: Final = 10.0  # for one more
STRANGE_STRIKES: Final = 32.0  # the same for one unwelcome certificate
ENTRIES: Final = 64.0  # written down of all unwelcome certificates in one site's name; more need time
ENTRY_S: Final = 60.0  # for one more
FIRST_S: Final = 30.0  # for the one message of a call; a stream of messages is its method's business
KEPT: Final = 4096  # names or numbers in one table of buckets
_PARSED: Final = 4096  # certificates remembered
# Logged, no entry: of a crowded, a slow or an outdated site, or one that has only to show its head again.
_UNWRITTEN: Final = frozenset({"rate", "busy", "protocol", "silent", "not_shown"})
_ONCE: Final = frozenset({"turned_back"})  # counted; it is written down once (`SiteHeads.tell`)


@dataclass(slots=True)
class _Bucket:
    """A token bucket on a monotonic clock."""

    level: float
    at: float

    def fill(self, now: float, rate: float, most: float) -> float:
        """Let the time since the last call flow in; the level then."""
        self.level = min(most, self.level + (now - self.at) * rate)
        self.at = now
        return self.level


@dataclass(slots=True)
class _Buckets:
    """A bucket for each name, at most :data:`KEPT` of them.

    One that is full again says no more than none, and is forgotten when room is needed. Where all have given
    something, a further name gets nothing: displacing them would hand them a full one.
    """

    rate: float  # tokens a second
    most: float
    kept: dict[str, _Bucket] = field(default_factory=dict)

    def has(self, name: str, now: float) -> bool:
        """Is there a token for this name?"""
        bucket = self._of(name, now)
        return bucket is not None and bucket.fill(now, self.rate, self.most) >= 1.0

    def take(self, name: str, now: float) -> bool:
        """Take a token, if there is one."""
        if not self.has(name, now):
            return False
        self.kept[name].level -= 1.0
        return True

    def _of(self, name: str, now: float) -> _Bucket | None:
        found = self.kept.get(name)
        if found is None and len(self.kept) >= KEPT:
            self.kept = {n: b for n, b in self.kept.items() if not b.fill(now, self.rate, self.most) >= self.most}
        if found is None and len(self.kept) < KEPT:
            found = self.kept[name] = _Bucket(self.most, now)
        return found


@dataclass(frozen=True, slots=True)
class _Crowd:
    """How often each of some peers may call, and be refused."""

    rates: _Buckets
    strikes: _Buckets

    def pace(self, name: str, now: float) -> None:
        """Not too often, and not after too many refusals.

        Raises:
            CallRejectedError: one of them.
        """
        if not self.rates.take(name, now):
            raise CallRejectedError(StatusCode.RESOURCE_EXHAUSTED, "too many calls: slow down", "rate")
        if not self.strikes.has(name, now):
            raise CallRejectedError(StatusCode.RESOURCE_EXHAUSTED, "too many refused calls: wait", "rate")


def _crowd(strikes: float) -> _Crowd:
    return _Crowd(_Buckets(CALLS_PER_S, BURST), _Buckets(1 / STRIKE_S, strikes))


def _speaks(context: Any) -> None:
    """Say which protocols are spoken here, and turn a peer away that speaks none of them
    (:mod:`protos.protocol_version`).

    Raises:
        CallRejectedError: it does not, and which side to upgrade.
    """
    context.set_trailing_metadata(((METADATA, str(OURS)),))
    try:
        agree(announced(context.invocation_metadata()), "agent")
    except NoCommonVersionError as error:
        raise CallRejectedError(StatusCode.FAILED_PRECONDITION, str(error), "protocol") from None


def _name(peer: Peer) -> str:
    return f"{peer.role}/{peer.site}"


def _message(raw: bytes, parse: Callable[[bytes], Any]) -> Any:
    """The message in these bytes.

    Raises:
        CallRejectedError: they are too many, or no message of this method.
    """
    if not len(raw) <= MOST_BYTES + 4096:
        raise CallRejectedError(StatusCode.RESOURCE_EXHAUSTED, "the message is too large", "too_large")
    try:
        return parse(raw)
    except Exception:  # noqa: BLE001 - whatever the parser says of it, it is not one
        raise CallRejectedError(StatusCode.INVALID_ARGUMENT, "the bytes are not a message", "bad_message") from None


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Stands around every method of the service."""

    def __init__(
        self,
        admits: Callable[[str, str], bool],
        report: Callable[[str, str], None],
        log: Any,
        patience: IdleTimeout,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is open yet.

        Args:
            admits: (site, certificate number) -> is it in the ledger, and not on the deny-list?
            report: (site, rule) -> write down that a known site was turned away.
            log: events from the allow-list.
            patience: ends calls whose message does not come within :data:`FIRST_S`.
            clock: monotonic seconds, for rates.
        """
        self._admits, self._report, self._log, self._clock = admits, report, log, clock
        self._patience = patience
        self._mutex = threading.Lock()
        self._welcome_ones = _crowd(STRIKES)  # by name
        self._strangers = _crowd(STRANGE_STRIKES)  # by the certificate's number
        self._entries = _Buckets(1 / ENTRY_S, ENTRIES)  # by the site that strangers call themselves
        self._calls: dict[str, set[Call]] = {}
        self._seen: dict[bytes, Peer] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Stand around the method's handler; a method without a role stays unimplemented.

        Whatever the method is, gRPC gets streams of bytes: it neither waits for a message nor parses nor writes one.
        """
        method = str(details.method).rpartition("/")[2]
        handler = continuation(details)
        if handler is None or method not in ROLES:
            return None
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._many(method, handler))
        return grpc.stream_unary_rpc_method_handler(self._one(method, handler))

    def _one(self, method: str, handler: Any) -> Callable[[Iterator[bytes], Any], bytes]:
        act, write = handler.stream_unary or handler.unary_unary, handler.response_serializer

        def guarded(raws: Iterator[bytes], context: Any) -> bytes:
            with self._admitted(method, context) as call:
                return bytes(write(act(self._request(call, handler, raws), call)))

        return guarded

    def _many(self, method: str, handler: Any) -> Callable[[Iterator[bytes], Any], Iterator[bytes]]:
        act, write = handler.stream_stream or handler.unary_stream, handler.response_serializer

        def guarded(raws: Iterator[bytes], context: Any) -> Iterator[bytes]:
            with self._admitted(method, context) as call:
                for reply in act(self._request(call, handler, raws), call):
                    self._welcome(call.peer)
                    yield bytes(write(reply))

        return guarded

    @contextlib.contextmanager
    def _admitted(self, method: str, context: Any) -> Iterator[Call]:
        """A welcome peer's call, from the first look to the end; no exception but gRPC's own abort gets past here."""
        peer: Peer | None = None
        call: Call | None = None
        try:
            peer = self._peer(context.auth_context())
            unfit = self._unfit(peer, method)
            with self._mutex:
                if unfit:
                    self._strangers.pace(peer.number, self._clock())
                    raise unfit
                self._welcome_ones.pace(_name(peer), self._clock())
            _speaks(context)
            call = self._begin(Call(peer, method, context))
            yield call
        except GeneratorExit:  # gRPC asks for no further reply
            raise
        except BaseException as fault:  # noqa: BLE001 - its text may hold anything; the peer gets a code
            code, text = self._final_status(method, peer, fault, context)
        else:
            return
        finally:
            if call is not None:
                self._forget(call)
        context.abort(code, text)

    def _final_status(
        self, method: str, peer: Peer | None, fault: BaseException, context: Any
    ) -> tuple[StatusCode, str]:
        """Code and text for the peer of a call that failed, whatever fails on the way."""
        try:
            if isinstance(fault, CallRejectedError):
                self._turn(method, peer, fault)
                return fault.code, fault.text.encode("utf-8", "replace").decode()
            if not context.is_active():  # the peer hung up, and gRPC said so by an exception in the middle of things
                return StatusCode.CANCELLED, "the stream broke off"
            incident = secrets.token_hex(4)
            self._log.error("incident", call=method, incident=incident, fault=type(fault).__name__)
        except Exception:  # noqa: BLE001 - the log, or the guard itself: there is nobody left to tell
            return StatusCode.INTERNAL, "the call failed, and the coordinator cannot log why"
        return StatusCode.INTERNAL, f"incident {incident}: see the coordinator's log"

    def _turn(self, method: str, peer: Peer | None, turned: CallRejectedError) -> None:
        """Count a refusal, and write it down in the log and, within patience, in the ledger."""
        site, role = (peer.site, peer.role) if peer else ("", "")
        with contextlib.suppress(Exception):  # a log that fails changes nothing of what is done
            self._log.warning("turned_away", call=method, site=site, role=role, rule=turned.rule)
        if not peer or turned.rule in _UNWRITTEN:
            return
        known = site if role == AGENT else ""  # nobody else speaks for a site in the ledger
        if isinstance(turned, PeerCertificateError):
            within = self._strange(peer, known)
        else:  # nothing may keep an operator from revoking
            within = role != OPERATING and self._strike(_name(peer))
        if within and known and turned.rule not in _ONCE:
            self._write_down(known, turned.rule)

    def _strange(self, peer: Peer, site: str) -> bool:
        """Count a refusal of an unwelcome certificate; may this one still be written down?"""
        with self._mutex:
            now = self._clock()
            return self._strangers.strikes.take(peer.number, now) and bool(site) and self._entries.take(site, now)

    def _strike(self, name: str) -> bool:
        """Count a refusal of a welcome peer; may this one still be written down?"""
        with self._mutex:
            return self._welcome_ones.strikes.take(name, self._clock())

    def count_violation(self, site: str) -> bool:
        """Count a refusal of a welcome site. Beyond a rate its calls are turned away unread: it floods no ledger.

        Returns:
            Whether this one may still be written down.
        """
        return self._strike(f"{AGENT}/{site}")

    def report(self, site: str, rule: str) -> bool:
        """Count a refusal of a welcome site and, within its patience, write it down. Raises nothing.

        Returns:
            Whether it is written.
        """
        return self.count_violation(site) and self._write_down(site, rule)

    def _write_down(self, site: str, rule: str) -> bool:
        """Into the ledger. If that fails the call is refused all the same, and the log says what is missing there."""
        try:
            self._report(site, rule)
        except Exception as fault:  # noqa: BLE001 - whatever it is: a refusal is on its way, and goes on
            with contextlib.suppress(Exception):
                self._log.error("refusal_not_recorded", site=site, rule=rule, fault=type(fault).__name__)
            return False
        return True

    def _peer(self, auth: Mapping[str, list[bytes]]) -> Peer:
        """The peer of a connection; the certificate is parsed once."""
        if auth.get("ssl_tls_version") != [b"TLSv1.3"]:
            return peer_of(auth)
        key = (auth.get("x509_pem_cert") or [b""])[0]
        known = self._seen.get(key)
        if known is None:
            known = peer_of(auth)
            if len(self._seen) >= _PARSED:
                self._seen.clear()
            self._seen[key] = known
        return known

    def _unfit(self, peer: Peer, method: str = "") -> PeerCertificateError | None:
        """What speaks against this certificate at this moment, for this method if one is named."""
        now = dt.datetime.now(dt.UTC)
        if not peer.leaf.not_valid_before_utc <= now <= peer.leaf.not_valid_after_utc:
            return PeerCertificateError(StatusCode.UNAUTHENTICATED, "the certificate is not valid now", "expired")
        denied = StatusCode.PERMISSION_DENIED
        if peer.role == AGENT and not self._admits(peer.site, peer.number):
            return PeerCertificateError(denied, "this certificate was revoked, or was never issued", "revoked")
        if method and ROLES[method] != peer.role:
            return PeerCertificateError(denied, "this certificate may not make this call", "wrong_role")
        return None

    def _welcome(self, peer: Peer) -> None:
        """In the middle of a stream: is this certificate still good?"""
        unfit = self._unfit(peer)
        if unfit:
            raise unfit

    def _begin(self, call: Call) -> Call:
        with self._mutex:
            mine = self._calls.setdefault(_name(call.peer), set())
            if not len(mine) < AT_ONCE:
                raise CallRejectedError(StatusCode.RESOURCE_EXHAUSTED, "too many calls at once", "busy")
            mine.add(call)
        return call

    def _forget(self, call: Call) -> None:
        with self._mutex:
            mine = self._calls.get(_name(call.peer), set())
            mine.discard(call)
            if not mine:
                self._calls.pop(_name(call.peer), None)

    def _request(self, call: Call, handler: Any, raws: Iterator[bytes]) -> Any:
        """What the method gets: its one message, or its messages as they come."""
        messages = self._each(call, raws, handler.request_deserializer)
        if handler.request_streaming:
            return messages
        with self._patience.over(call, FIRST_S):
            try:
                for message in messages:
                    return message
            except grpc.RpcError:  # how gRPC says that the call is over; or it lets the stream end
                if not self._patience.ended(call):
                    raise
            if self._patience.ended(call):  # a slow line is no offence
                raise CallRejectedError(
                    StatusCode.DEADLINE_EXCEEDED, "the call's message did not come in time", "silent"
                )
        raise CallRejectedError(StatusCode.INVALID_ARGUMENT, "this call needs one message", "bad_message")

    def _each(self, call: Call, raws: Iterator[bytes], parse: Callable[[bytes], Any]) -> Iterator[Any]:
        """Each message, when it is not too large, is one, and the peer is still welcome."""
        for raw in raws:
            self._welcome(call.peer)
            yield _message(raw, parse)

    def close_calls(self, site: str) -> int:
        """End every open call of a site; how many there were."""
        with self._mutex:
            calls = list(self._calls.get(f"{AGENT}/{site}", ()))
        for call in calls:
            call.cancel()
        return len(calls)

    def open_calls(self) -> Counter[str]:
        """How many calls are in progress, by method."""
        with self._mutex:
            return Counter(call.method for calls in self._calls.values() for call in calls)
