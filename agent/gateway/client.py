"""The one way out of a hospital: the coordinator's gRPC service over mutual TLS, dialled from inside.

Retries carry the same idempotency key, so a lost reply never spends twice. A reply counts only with a checkpoint that
:class:`agent.edges.watch.Watch` finds to extend the one before; calls go one after the other, so that there is one
before.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from agent.edges.channel import open_channel
from agent.edges.credentials import Credentials
from agent.edges.upload import Patience, Progress, send
from agent.edges.watch import Epoch, ShownEntry, Watch
from agent.nouns import Unreachable
from policies.entries import Admitted, Amended, Presented, Recovered, Refused, Reserved
from policies.review import Finding, Verdict
from policies.statement import ID, Release, parse
from policies.store import Shown
from protos.v1 import gateway_pb2 as pb
from protos.v1.gateway_pb2_grpc import GatewayStub
from protos.versions import COMPRESSED, EARLIER_AGENT, Unspoken, agree, answered

# a key's first word, and the entry it leads to
_LEADS_TO = {"reserve": Reserved, "run": Reserved, "submit": Admitted, "recover": Recovered}
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_LEVELS = frozenset({"A", "A*", "B", "C"})
_PAUSE_S = (0.2, 8.0)  # before the first retry, and at most; each is shortened at random


class GrpcDoor:
    """The port :class:`agent.pipeline.Door` over gRPC."""

    def __init__(
        self, target: str, credentials: Credentials, watch: Watch, patience_s: float = 30.0, proxy: str = ""
    ) -> None:
        """Open a channel; nothing is sent yet.

        Args:
            target: host:port of the coordinator.
            credentials: the site's key and certificate, and the federation's root.
            watch: what this site has seen of the coordinator's ledger.
            patience_s: how long an unreachable coordinator is tried again.
            proxy: host:port of the HTTP proxy to go through; nothing: none.
        """
        self._target, self._credentials, self._proxy = target, credentials, proxy
        self.watch, self._patience_s, self._turn = watch, patience_s, threading.Lock()
        self.protocol = 0  # that both sides speak: see :meth:`hello`
        self.progress: Progress | None = None  # hears how far an artifact has got
        self.own: Callable[[int], Shown] | None = None  # shows this site's own ledger to who has seen so much of it
        self._own_seen: int | None = None  # how much of it the coordinator keeps; None: it has not said so yet
        self._open()

    def _open(self) -> None:
        self._channel = open_channel(self._target, self._credentials.channel_credentials(), self._proxy)
        self._stub = GatewayStub(self._channel)

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def renew(self, now: dt.datetime, jitter: float) -> bool:
        """Get a fresh certificate when two thirds of the old one's life are over; the next call uses it.

        Returns:
            Whether there is a new one: whoever holds another channel opens it again.
        Raises:
            Unreachable: not now; the old one is good for a while yet.
        """
        if not self._credentials.due(now, jitter):
            return False
        with self._turn:

            def ask(csr: bytes) -> bytes:
                reply = self._ask(lambda: self._stub.Renew(pb.RenewRequest(csr=csr), timeout=15))
                return bytes(reply.certificate)

            self._credentials.renew(ask, now)
            old = self._channel
            self._open()
            old.close()
        return True

    def session(self, version: str) -> Any:
        """The long-lived stream of what the coordinator says without being asked; cancel it to end it."""
        return self._stub.Session(pb.SessionRequest(version=version))

    def hello(self, cosigned: str = "") -> str:
        """The federation's policy, TOML. Also the cheapest test of the whole way.

        From the second time on this site shows the head of its own ledger: it must extend what the coordinator keeps.

        Args:
            cosigned: the newest verified head with this site's cosignature, for the coordinator to keep.
        """
        with self._turn:
            request = pb.HelloRequest(seen=self.watch.seen, cosigned=cosigned, own=self._own_head())
            reply, call = self._ask(lambda: self._stub.Hello.with_call(request, timeout=10))
            self.protocol = _speaks(call)
            self._own_seen = reply.own_seen
            epoch = Epoch(reply.epoch, reply.restored, reply.restored_at, tuple(reply.restored_proof))
            if self.watch.renewed(epoch):
                self.watch.restored(reply.checkpoint, epoch, reply.proof)
            else:
                self.watch.check(reply.checkpoint, reply.proof)
        return str(reply.policy)

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        """Hold the price at the coordinator."""
        return self._sealed(self._stub.Reserve, key, envelope, Reserved)

    def settle(self, key: str, envelope: bytes) -> Verdict:
        """Say what became of a grant."""
        return self._sealed(self._stub.Settle, key, envelope, Refused)

    def amend(self, key: str, envelope: bytes) -> Verdict:
        """Hand in the site's new policy."""
        return self._sealed(self._stub.Amend, key, envelope, Amended)

    def present(self, key: str, envelope: bytes) -> Verdict:
        """After a restore: show a receipt, or say that these were all."""
        return self._sealed(self._stub.Present, key, envelope, Recovered, Reserved, Presented)

    def _sealed(self, call: Callable[..., Any], key: str, envelope: bytes, *kinds: type) -> Verdict:
        with self._turn:
            request = pb.SealedRequest(key=key, envelope=envelope, seen=self.watch.seen)
            return self._verdict(
                self._ask(lambda: call(request, timeout=15)), kinds, hashlib.sha256(envelope).digest()
            )

    def submit(self, key: str, envelope: bytes, artifact: Path | bytes) -> Verdict:
        """Hand in an artifact with its sealed statement, in resumable pieces, and wait for the verdict."""
        if 0 < self.protocol < COMPRESSED:
            raise Unreachable("the coordinator is too old for compressed pictures: upgrade the coordinator first")
        return self._hand_in(key, envelope, artifact)

    def _hand_in(self, key: str, envelope: bytes, artifact: Path | bytes) -> Verdict:
        with self._turn:
            own = self._own_head()
            sealed = pb.SealedRequest(key=key, envelope=envelope, seen=self.watch.seen, own=own)
            patience = Patience(still_s=self._patience_s)
            try:
                reply = send(self._stub, sealed, artifact, patience, self.progress, _named(envelope))
            except grpc.RpcError as error:
                raise Unreachable(_hint(error.code(), error.details())) from None
            self._own_seen = int(own.checkpoint.split("\n")[1]) if own else None  # where it is not, it will say so
            return self._verdict(reply, (Admitted,), hashlib.sha256(envelope).digest())

    def submit_earlier(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        """The same of a set that was made before pictures were compressed, in the protocol of then."""
        way = self._target, self._credentials.channel_credentials(), self._proxy
        with self._turn:
            ours, self._channel = self._channel, open_channel(*way, EARLIER_AGENT)
            self._stub = GatewayStub(self._channel)
        try:
            return self._hand_in(key, envelope, artifact)
        finally:
            with self._turn:
                self._channel.close()
                self._channel, self._stub = ours, GatewayStub(ours)

    def outcome(self, key: str, envelope: bytes) -> Verdict | None:
        """What a key has led to, with the SHA-256 of the envelope sent; None if the coordinator never heard of it."""
        with self._turn:
            request = pb.OutcomeRequest(key=key, seen=self.watch.seen)
            reply = self._ask(lambda: self._stub.Outcome(request, timeout=10))
            verdict = self._verdict(reply, (_LEADS_TO[key.partition("-")[0]],), envelope)
        return verdict if reply.known else None

    def _own_head(self) -> pb.SiteHead | None:
        """The head of this site's own ledger, with the proof that it extends what the coordinator keeps of it."""
        if self.own is None or self._own_seen is None:
            return None
        shown = self.own(self._own_seen)
        return pb.SiteHead(
            checkpoint=shown.checkpoint,
            since=self._own_seen,
            proof=shown.proof,
            restored=shown.restored,
            restored_at=shown.restored_at,
            restored_proof=shown.restored_proof,
        )

    def _ask(self, call: Callable[[], Any]) -> Any:
        until, pause = time.monotonic() + self._patience_s, _PAUSE_S[0]
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                code = error.code()
                if code not in _AGAIN or not time.monotonic() < until:
                    raise Unreachable(_hint(code, error.details())) from None
            time.sleep(random.SystemRandom().uniform(0, pause))  # full jitter: many sites must not come at once
            pause = min(2 * pause, _PAUSE_S[1])

    def _verdict(self, reply: Any, kinds: tuple[type, ...], envelope: bytes) -> Verdict:
        """A yes counts when the ledger holds it, about this envelope: the receipt that auditors will look for."""
        self.watch.check(reply.checkpoint, reply.proof)
        if reply.admitted:
            self.watch.included(ShownEntry(reply.entry, reply.seq, tuple(reply.inclusion)), kinds, envelope)
        said = list(reply.findings)[:32]
        findings = tuple(Finding(f.rule if ID.fullmatch(f.rule) else "unreadable", f.detail[:500]) for f in said)
        if not reply.admitted and not findings:
            findings = (Finding("no_reason", "the coordinator refused without a reason"),)
        return Verdict(findings, reply.level if reply.level in _LEVELS else "")


def _speaks(call: Any) -> int:
    """The newest protocol that the coordinator speaks too.

    Raises:
        Unreachable: there is none, and which side to upgrade.
    """
    try:
        return agree(answered(call.trailing_metadata() or ()), "coordinator")
    except Unspoken as error:
        raise Unreachable(str(error)) from None


def _named(envelope: bytes) -> str:
    """The artifact's SHA-256 by the statement that this site sealed over it; nothing: it cannot be read there."""
    try:
        statement = parse(base64.b64decode(json.loads(envelope)["payload"], validate=True))
    except (ValueError, KeyError, TypeError):
        return ""
    return statement.artifact_sha256 if isinstance(statement, Release) else ""


def _hint(code: grpc.StatusCode, details: str | None) -> str:
    """What the operator can do; ``details`` are the coordinator's own scrubbed words."""
    if code == grpc.StatusCode.UNAVAILABLE:
        return (
            "no answer from the coordinator: is it running, is the address in site.toml right, was this site's "
            "certificate issued by its CA and still valid? (`lazaret-agent doctor` checks each)"
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the coordinator did not answer in time; the outcome is unknown and counts as spent"
    return f"the coordinator refused the call: {details or code.name}"
