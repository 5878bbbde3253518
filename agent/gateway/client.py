"""The one way out of a hospital: the coordinator's gRPC service over mutual TLS, dialled from inside.

Retries carry the same idempotency key, so a lost reply never spends twice. A reply counts only with a checkpoint that
:class:`agent.gateway.witness.LedgerWitness` finds to extend the one before; calls go one after the other, so that
there is one before.

Send an artifact: announce it, send what is missing, submit; and go on where a lost connection stopped it.

Every call has a deadline. What may be tried again is tried with the same idempotency key, after a pause of random
length (full jitter), until nothing has moved for as long as :class:`Patience` allows.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from agent.errors import AnotherRootError, CoordinatorUnreachableError
from agent.gateway.channel import of_another_root, open_channel
from agent.gateway.credentials import Certified, Credentials
from agent.gateway.witness import Epoch, IncludedEntry, LedgerWitness
from policies.ledger.entries import Admitted, Amended, Presented, Recovered, Refused, Reserved
from policies.ledger.store import ProofBundle
from policies.review.rules import Finding, Verdict
from policies.statements import ID, Release, parse
from protos.artifacts.chunks import CHUNK, Artifact, ArtifactManifest, indices, length, manifest, piece
from protos.protocol_version import COMPRESSED, EARLIER_AGENT, NoCommonVersionError, agree, answered
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub

WINDOW: Final = 32  # pieces in one Upload call: what a coordinator's crash can cost; each call waits for its disk
# Try again: no answer, too busy for now, or the coordinator has lost what was offered (FAILED_PRECONDITION).
AGAIN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
    }
)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each call may take, and how long to go on when nothing moves; seconds."""

    still_s: float = 300.0  # without a piece more being durable, or an answer
    offer_s: float = 30.0
    window_s: float = 120.0  # one Upload call, of WINDOW pieces
    submit_s: float = 120.0  # review of the artifact; and a second for each MiB of it beside
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    rng: random.Random = field(default_factory=random.SystemRandom)
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def send(
    stub: Any,
    sealed: gateway_pb2.SealedRequest,
    artifact: Artifact,
    patience: Patience,
    progress: Progress | None = None,
    sha256: str = "",
) -> gateway_pb2.VerdictReply:
    """An artifact and its sealed statement to the coordinator, and its verdict back.

    Args:
        stub: of the Gateway service.
        sealed: idempotency key, envelope of the release statement, and what this site has seen of the ledger.
        artifact: a file, read a piece at a time, or bytes.
        patience: deadlines, and when to give up.
        progress: called with (bytes that are durable at the coordinator, bytes of the artifact) as they grow.
        sha256: of the artifact, as the sealed statement has it; nothing: it is computed. The coordinator takes no
            other bytes under it.
    Returns:
        The coordinator's reply, a refusal too; its checkpoint and proofs are the caller's to check.
    Raises:
        grpc.RpcError: the last one, when patience is over, or at once where trying again is of no use. The outcome
            may be unknown: ask for it by the key.
        CoordinatorUnreachableError: an answer about another artifact than the one offered.
        OSError: the artifact cannot be read.
    """
    sending = _Sending(stub, sealed, artifact, manifest(artifact, sha256), patience)
    if progress is not None:
        sending.tell = progress
    return sending.verdict()


class _Sending:
    """One artifact on its way; it gives up when nothing has moved for ``patience.still_s``."""

    def __init__(
        self,
        stub: Any,
        sealed: gateway_pb2.SealedRequest,
        artifact: Artifact,
        listing: ArtifactManifest,
        patience: Patience,
    ) -> None:
        self.stub, self.sealed, self.artifact, self.patience = stub, sealed, artifact, patience
        self.manifest = listing
        self.tell: Progress = lambda _done, _total: None
        self.fewest = len(self.manifest.chunks) + 1  # missing pieces, at best so far
        self.moved, self.tries = patience.now(), 0

    def verdict(self) -> gateway_pb2.VerdictReply:
        submitted = False
        while True:
            try:
                decided = self._upload()
                submitted = decided is None
                return self._submit() if decided is None else decided
            except grpc.RpcError as error:
                self._rest(error)
            if submitted and (known := self._outcome()) is not None:
                return known

    def _upload(self) -> gateway_pb2.VerdictReply | None:
        """Offer, and send what is missing.

        Returns:
            None: all of it is there. Or the verdict that it has already.
        """
        offer = gateway_pb2.OfferRequest(sealed=self.sealed, chunks=self.manifest.chunks)
        reply: gateway_pb2.OfferReply = self.stub.Offer(offer, timeout=self.patience.offer_s)
        if reply.HasField("decided"):
            return reply.decided
        if reply.upload != self.manifest.sha256:
            raise CoordinatorUnreachableError("the coordinator answered about another artifact than the one offered")
        try:
            missing = list(indices(reply.missing, len(self.manifest.chunks)))
        except ValueError:
            raise CoordinatorUnreachableError("the coordinator's list of missing chunks is not valid") from None
        self._there(missing)
        while missing:
            window, missing = missing[:WINDOW], missing[WINDOW:]
            self.stub.Upload(self._parts(window), timeout=self.patience.window_s)
            self._there(missing)
        return None

    def _parts(self, window: list[int]) -> Iterator[gateway_pb2.UploadPart]:
        """Read as gRPC's flow control asks for it, a piece at a time."""
        yield gateway_pb2.UploadPart(upload=self.manifest.sha256)
        for index in window:
            yield gateway_pb2.UploadPart(chunk=gateway_pb2.Chunk(index=index, data=piece(self.artifact, index)))

    def _there(self, missing: list[int]) -> None:
        """Fewer pieces missing than ever: it moves, however slowly."""
        if len(missing) < self.fewest:
            self.fewest, self.moved, self.tries = len(missing), self.patience.now(), 0
            size = self.manifest.size
            self.tell(size - sum(length(size, index) for index in missing), size)

    def _submit(self) -> gateway_pb2.VerdictReply:
        seconds = self.patience.submit_s + self.manifest.size / CHUNK
        reply: gateway_pb2.VerdictReply = self.stub.Submit(self.sealed, timeout=seconds)
        return reply

    def _outcome(self) -> gateway_pb2.VerdictReply | None:
        """A lost reply to Submit: what its key has led to; None: nothing, or no answer."""
        request = gateway_pb2.OutcomeRequest(key=self.sealed.key, seen=self.sealed.seen)
        try:
            reply: gateway_pb2.VerdictReply = self.stub.Outcome(request, timeout=self.patience.offer_s)
        except grpc.RpcError:
            return None  # the next round tries again
        return reply if reply.known else None

    def _rest(self, error: grpc.RpcError) -> None:
        """A pause of random length before the next try; or the error, where there is none."""
        left = self.patience.still_s - (self.patience.now() - self.moved)
        if error.code() not in AGAIN or not left > 0:
            raise error
        longest = min(self.patience.longest_pause_s, self.patience.first_pause_s * 2 ** min(self.tries, 16), left)
        self.tries += 1
        self.patience.sleep(self.patience.rng.uniform(0, longest))


# a key's first word, and the entry it leads to
_LEADS_TO = {"reserve": Reserved, "run": Reserved, "submit": Admitted, "recover": Recovered}
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_SHOW_AGAIN = grpc.StatusCode.OUT_OF_RANGE  # the head of this site's own ledger, and then the call
_LEVELS = frozenset({"A", "A*", "B", "C"})
_PAUSE_S = (0.2, 8.0)  # before the first retry, and at most; each is shortened at random


class GatewayClient:
    """The port :class:`agent.release.ports.CoordinatorClient` over gRPC."""

    def __init__(
        self, target: str, credentials: Credentials, watch: LedgerWitness, patience_s: float = 30.0, proxy: str = ""
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
        # shows this site's own ledger to who has seen so much of it
        self.own: Callable[[int], ProofBundle] | None = None
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
            CoordinatorUnreachableError: not now; the old one is good for a while yet.
        """
        if not self._credentials.due(now, jitter):
            return False
        with self._turn:

            def ask(csr: bytes) -> Certified:
                reply = self._ask(lambda: self._stub.Renew(gateway_pb2.RenewRequest(csr=csr), timeout=15))
                return Certified(bytes(reply.certificate), bytes(reply.returning_certificate))

            self._credentials.renew(ask, now)
            self._open_anew()
        return True

    @property
    def certificate(self) -> str:
        """The number of the certificate in use, hexadecimal."""
        return self._credentials.number

    def take_up(self, credentials: Credentials) -> None:
        """Go on with another certificate."""
        with self._turn:
            self._credentials = credentials
            self._open_anew()

    def _open_anew(self) -> None:
        old = self._channel
        self._open()
        old.close()

    def session(self, version: str) -> Any:
        """The long-lived stream of the coordinator's notifications; cancel it to end it."""
        return self._stub.Session(gateway_pb2.SessionRequest(version=version))

    def hello(self, cosigned: str = "", *, looks: bool = False) -> str:
        """The federation's policy, TOML. Also the cheapest test of the whole way.

        This site shows the head of its own ledger: it must extend what the coordinator keeps, where it keeps one.

        Args:
            cosigned: the newest verified head with this site's cosignature, for the coordinator to keep.
            looks: only look, beside the process that holds the site's ledger and alone shows its head.
        """
        with self._turn:
            return str(self._hello(cosigned, looks).policy)

    def _hello(self, cosigned: str = "", looks: bool = False) -> Any:
        """A greeting; made once more where the head that it showed is not from the one that is kept."""
        reply, shown = self._hello_once(cosigned, looks)
        # nothing was shown yet, or another call came between; 0: nothing is kept, or an older coordinator
        if self.own and 0 < reply.own_seen != (_size(shown) if shown else -1):
            reply, _ = self._hello_once(cosigned, looks)
        return reply

    def _hello_once(self, cosigned: str, looks: bool) -> tuple[Any, gateway_pb2.SiteHead | None]:
        """One greeting, and the head of this site's own ledger that went with it."""
        own = self._own_head()
        request = gateway_pb2.HelloRequest(seen=self.watch.seen, cosigned=cosigned, own=own, looks=looks)
        reply, call = self._ask(lambda: self._stub.Hello.with_call(request, timeout=10))
        self.protocol = _speaks(call)
        self._own_seen = reply.own_seen
        epoch = Epoch(reply.epoch, reply.restored, reply.restored_at, tuple(reply.restored_proof))
        if self.watch.renewed(epoch):
            self.watch.restored(reply.checkpoint, epoch, reply.proof)
        else:
            self.watch.check(reply.checkpoint, reply.proof)
        return reply, own

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        """Hold the price at the coordinator."""
        return self._sealed(self._stub.Reserve, key, envelope, Reserved)

    def settle(self, key: str, envelope: bytes) -> Verdict:
        """Say what became of a grant."""
        with self._turn:
            reply = self._ask(lambda: self._stub.Settle(self._request(key, envelope, None), timeout=15))
            return self._verdict(reply, (Refused,), hashlib.sha256(envelope).digest())

    def amend(self, key: str, envelope: bytes) -> Verdict:
        """Hand in the site's new policy."""
        return self._sealed(self._stub.Amend, key, envelope, Amended)

    def present(self, key: str, envelope: bytes) -> Verdict:
        """After a restore: show a receipt, or say that these were all."""
        return self._sealed(self._stub.Present, key, envelope, Recovered, Reserved, Presented)

    def _sealed(self, call: Callable[..., Any], key: str, envelope: bytes, *kinds: type) -> Verdict:
        """A call that brings the head of this site's own ledger along, each time that it is tried."""
        own: gateway_pb2.SiteHead | None = None

        def once() -> Any:
            nonlocal own
            own = self._own_head()
            return call(self._request(key, envelope, own), timeout=15)

        with self._turn:
            self._met()
            reply = self._ask(once)
            self._own_seen = _size(own) if own else None
            return self._verdict(reply, kinds, hashlib.sha256(envelope).digest())

    def _met(self) -> None:
        """Greet who has not said yet what it keeps of this site's own ledger."""
        if self.own is not None and self._own_seen is None:
            self._hello()

    def _request(self, key: str, envelope: bytes, own: gateway_pb2.SiteHead | None) -> gateway_pb2.SealedRequest:
        return gateway_pb2.SealedRequest(key=key, envelope=envelope, seen=self.watch.seen, own=own)

    def submit(self, key: str, envelope: bytes, artifact: Path | bytes) -> Verdict:
        """Hand in an artifact with its sealed statement, in resumable pieces, and wait for the verdict."""
        if 0 < self.protocol < COMPRESSED:
            raise CoordinatorUnreachableError(
                "the coordinator is too old for compressed images: upgrade the coordinator first"
            )
        return self._hand_in(key, envelope, artifact)

    def _hand_in(self, key: str, envelope: bytes, artifact: Path | bytes) -> Verdict:
        with self._turn:
            self._met()
            try:
                try:
                    reply = self._send(key, envelope, artifact)
                except grpc.RpcError as error:
                    if error.code() is not _SHOW_AGAIN:
                        raise
                    self._hello()  # says what is kept by now
                    reply = self._send(key, envelope, artifact)
            except grpc.RpcError as error:
                raise _unreachable(error.code(), error.details()) from None
            return self._verdict(reply, (Admitted,), hashlib.sha256(envelope).digest())

    def _send(self, key: str, envelope: bytes, artifact: Path | bytes) -> gateway_pb2.VerdictReply:
        """An artifact, with the head of this site's own ledger, which holds its release."""
        own = self._own_head()
        sealed = self._request(key, envelope, own)
        patience = Patience(still_s=self._patience_s)
        reply = send(self._stub, sealed, artifact, patience, self.progress, _named(envelope))
        self._own_seen = _size(own) if own else None  # where it is not what is kept, the coordinator will say so
        return reply

    def submit_earlier(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        """The same of a set that was made before images were compressed, in the protocol of then."""
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
            request = gateway_pb2.OutcomeRequest(key=key, seen=self.watch.seen)
            reply = self._ask(lambda: self._stub.Outcome(request, timeout=10))
            verdict = self._verdict(reply, (_LEADS_TO[key.partition("-")[0]],), envelope)
        return verdict if reply.known else None

    def _own_head(self) -> gateway_pb2.SiteHead | None:
        """The head of this site's own ledger, with the proof that it extends what the coordinator keeps of it."""
        if self.own is None or self._own_seen is None:
            return None
        shown = self.own(self._own_seen)
        return gateway_pb2.SiteHead(
            checkpoint=shown.checkpoint,
            since=self._own_seen,
            proof=shown.proof,
            restored=shown.restored,
            restored_at=shown.restored_at,
            restored_proof=shown.restored_proof,
        )

    def _ask(self, call: Callable[[], Any]) -> Any:
        until, pause, shown = time.monotonic() + self._patience_s, _PAUSE_S[0], False
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                code = error.code()
                if code is _SHOW_AGAIN and not shown:
                    shown = True
                    self._hello()
                    continue
                if code not in _AGAIN or not time.monotonic() < until:
                    raise _unreachable(code, error.details()) from None
            time.sleep(random.SystemRandom().uniform(0, pause))  # full jitter: many sites must not come at once
            pause = min(2 * pause, _PAUSE_S[1])

    def _verdict(self, reply: Any, kinds: tuple[type, ...], envelope: bytes) -> Verdict:
        """A yes counts when the ledger holds it, about this envelope: the receipt that auditors will look for."""
        self.watch.check(reply.checkpoint, reply.proof)
        if reply.admitted:
            self.watch.included(IncludedEntry(reply.entry, reply.seq, tuple(reply.inclusion)), kinds, envelope)
        said = list(reply.findings)[:32]
        findings = tuple(Finding(f.rule if ID.fullmatch(f.rule) else "unreadable", f.detail[:500]) for f in said)
        if not reply.admitted and not findings:
            findings = (Finding("no_reason", "the coordinator refused without a reason"),)
        return Verdict(findings, reply.level if reply.level in _LEVELS else "")


def _size(own: gateway_pb2.SiteHead) -> int:
    """How many entries this site's own ledger has under this head."""
    return int(own.checkpoint.split("\n")[1])


def _speaks(call: Any) -> int:
    """The newest protocol that the coordinator speaks too.

    Raises:
        CoordinatorUnreachableError: there is none, and which side to upgrade.
    """
    try:
        return agree(answered(call.trailing_metadata() or ()), "coordinator")
    except NoCommonVersionError as error:
        raise CoordinatorUnreachableError(str(error)) from None


def _named(envelope: bytes) -> str:
    """The artifact's SHA-256 by the statement that this site sealed over it; nothing: it cannot be read there."""
    try:
        statement = parse(base64.b64decode(json.loads(envelope)["payload"], validate=True))
    except (ValueError, KeyError, TypeError):
        return ""
    return statement.artifact_sha256 if isinstance(statement, Release) else ""


def _unreachable(code: grpc.StatusCode, details: str | None) -> CoordinatorUnreachableError:
    """What the operator can do; ``details`` are the coordinator's own scrubbed words."""
    if code == grpc.StatusCode.UNAVAILABLE and of_another_root(details):
        return AnotherRootError(
            "what answers at the coordinator's address is not of the root that this site joined by: see "
            "`lazaret-agent doctor`, and compare the root's fingerprint by telephone"
        )
    if code == grpc.StatusCode.UNAVAILABLE:
        return CoordinatorUnreachableError(
            "no answer from the coordinator: is it running, is the address in site.toml right, was this site's "
            "certificate issued by its CA and still valid? (`lazaret-agent doctor` checks each)"
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return CoordinatorUnreachableError(
            "the coordinator did not answer in time. The outcome is unknown, so the budget counts as spent"
        )
    return CoordinatorUnreachableError(f"the coordinator refused the call: {details or code.name}")
