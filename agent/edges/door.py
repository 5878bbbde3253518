"""The one way out of a hospital: the coordinator's gRPC service over mutual TLS, dialled from inside.

Retries carry the same idempotency key, so a lost reply never spends twice. A reply counts only with a checkpoint
signed by the ledger key that was received at enrolment, of a ledger that has not shrunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from agent.nouns import Unreachable
from policies.merkle import BadCheckpoint, open_checkpoint
from policies.review import Finding, Verdict
from policies.statement import ID
from protos.identity import read_private
from protos.v1 import gateway_pb2 as pb
from protos.v1.gateway_pb2_grpc import GatewayStub

CHUNK = 1 << 20
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class GrpcDoor:
    """The port :class:`agent.pipeline.Door` over gRPC."""

    def __init__(self, target: str, keys: Path, ledger_key: bytes, patience_s: float = 30.0) -> None:
        """Open a channel; nothing is sent yet.

        Args:
            target: host:port of the coordinator.
            keys: the site's key directory, with ``tls.key``, ``tls.crt`` and ``ca.crt``.
            ledger_key: Ed25519 key that signs the coordinator's checkpoints.
            patience_s: how long an unreachable coordinator is tried again.
        """
        credentials = grpc.ssl_channel_credentials(
            (keys / "ca.crt").read_bytes(), read_private(keys / "tls.key"), (keys / "tls.crt").read_bytes()
        )
        options = [("grpc.max_receive_message_length", 4 << 20), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.secure_channel(target, credentials, options)
        self._stub = GatewayStub(self._channel)
        self._ledger_key, self._patience_s, self._size = ledger_key, patience_s, 0

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def hello(self) -> str:
        """The federation's policy, TOML. Also the cheapest test of the whole way."""
        reply = self._ask(lambda: self._stub.Hello(pb.HelloRequest(), timeout=10))
        self._check(reply.checkpoint)
        return str(reply.policy)

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        """Hold the price at the coordinator."""
        request = pb.SealedRequest(key=key, envelope=envelope)
        return self._verdict(self._ask(lambda: self._stub.Reserve(request, timeout=15)))

    def settle(self, key: str, envelope: bytes) -> Verdict:
        """Say what became of a grant."""
        request = pb.SealedRequest(key=key, envelope=envelope)
        return self._verdict(self._ask(lambda: self._stub.Settle(request, timeout=15)))

    def submit(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        """Stream an artifact after its sealed statement, and wait for the verdict."""

        def parts() -> Iterator[Any]:
            yield pb.SubmitPart(header=pb.SealedRequest(key=key, envelope=envelope))
            for at in range(0, len(artifact), CHUNK):
                yield pb.SubmitPart(data=artifact[at : at + CHUNK])

        return self._verdict(self._ask(lambda: self._stub.Submit(parts(), timeout=120)))

    def outcome(self, key: str) -> Verdict | None:
        """What a key has led to; None if the coordinator never heard of it."""
        reply = self._ask(lambda: self._stub.Outcome(pb.OutcomeRequest(key=key), timeout=10))
        return self._verdict(reply) if reply.known else None

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

    def _check(self, note: str) -> None:
        try:
            head = open_checkpoint(note, self._ledger_key)
        except BadCheckpoint:
            raise Unreachable("the coordinator's ledger is signed by another key than at enrolment") from None
        if not head.size >= self._size:
            raise Unreachable("the coordinator's ledger has shrunk; its history was rewritten or restored")
        self._size = head.size

    def _verdict(self, reply: Any) -> Verdict:
        self._check(reply.checkpoint)
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
