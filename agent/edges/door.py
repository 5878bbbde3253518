"""The one way out of a hospital: the coordinator's gRPC service over mutual TLS, dialled from inside.

Retries carry the same idempotency key, so a lost reply never spends twice. A reply counts only with a checkpoint that
:class:`agent.edges.watch.Watch` finds to extend the one before; calls go one after the other, so that there is one
before.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from agent.edges.watch import Epoch, ShownEntry, Watch
from agent.nouns import Unreachable
from policies.entries import Admitted, Amended, Presented, Recovered, Refused, Reserved
from policies.review import Finding, Verdict
from policies.statement import ID
from protos.identity import read_private
from protos.v1 import gateway_pb2 as pb
from protos.v1.gateway_pb2_grpc import GatewayStub

CHUNK = 1 << 20
_LEADS_TO = {"reserve": Reserved, "submit": Admitted, "recover": Recovered}  # a key's first word, and its entry
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class GrpcDoor:
    """The port :class:`agent.pipeline.Door` over gRPC."""

    def __init__(self, target: str, keys: Path, watch: Watch, patience_s: float = 30.0) -> None:
        """Open a channel; nothing is sent yet.

        Args:
            target: host:port of the coordinator.
            keys: the site's key directory, with ``tls.key``, ``tls.crt`` and ``ca.crt``.
            watch: what this site has seen of the coordinator's ledger.
            patience_s: how long an unreachable coordinator is tried again.
        """
        credentials = grpc.ssl_channel_credentials(
            (keys / "ca.crt").read_bytes(), read_private(keys / "tls.key"), (keys / "tls.crt").read_bytes()
        )
        options = [("grpc.max_receive_message_length", 4 << 20), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.secure_channel(target, credentials, options)
        self._stub = GatewayStub(self._channel)
        self.watch, self._patience_s, self._turn = watch, patience_s, threading.Lock()

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def hello(self, cosigned: str = "") -> str:
        """The federation's policy, TOML. Also the cheapest test of the whole way.

        Args:
            cosigned: the newest verified head with this site's cosignature, for the coordinator to keep.
        """
        with self._turn:
            request = pb.HelloRequest(seen=self.watch.seen, cosigned=cosigned)
            reply = self._ask(lambda: self._stub.Hello(request, timeout=10))
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

    def submit(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        """Stream an artifact after its sealed statement, and wait for the verdict."""

        def parts() -> Iterator[Any]:
            yield pb.SubmitPart(header=pb.SealedRequest(key=key, envelope=envelope, seen=self.watch.seen))
            for at in range(0, len(artifact), CHUNK):
                yield pb.SubmitPart(data=artifact[at : at + CHUNK])

        with self._turn:
            reply = self._ask(lambda: self._stub.Submit(parts(), timeout=120))
            return self._verdict(reply, (Admitted,), hashlib.sha256(envelope).digest())

    def outcome(self, key: str, envelope: bytes) -> Verdict | None:
        """What a key has led to, with the SHA-256 of the envelope sent; None if the coordinator never heard of it."""
        with self._turn:
            request = pb.OutcomeRequest(key=key, seen=self.watch.seen)
            reply = self._ask(lambda: self._stub.Outcome(request, timeout=10))
            verdict = self._verdict(reply, (_LEADS_TO[key.partition("-")[0]],), envelope)
        return verdict if reply.known else None

    def _ask(self, call: Callable[[], Any]) -> Any:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                code = error.code()
                if code not in _AGAIN or not time.monotonic() < until:
                    raise Unreachable(_hint(code, error.details())) from None
            time.sleep(0.5)

    def _verdict(self, reply: Any, kinds: tuple[type, ...], envelope: bytes) -> Verdict:
        """A yes counts when the ledger holds it, about this envelope: the receipt that auditors will look for."""
        self.watch.check(reply.checkpoint, reply.proof)
        if reply.admitted:
            self.watch.included(ShownEntry(reply.entry, reply.seq, tuple(reply.inclusion)), kinds, envelope)
        said = list(reply.findings)[:32]
        findings = tuple(Finding(f.rule if ID.fullmatch(f.rule) else "unreadable", f.detail[:500]) for f in said)
        if not reply.admitted and not findings:
            findings = (Finding("no_reason", "the coordinator refused without a reason"),)
        return Verdict(findings, reply.level[:1])


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
