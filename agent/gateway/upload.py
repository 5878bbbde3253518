"""Send an artifact: announce it, send what is missing, submit; and go on where a lost connection stopped it.

Every call has a deadline. What may be tried again is tried with the same idempotency key, after a pause of random
length (full jitter), until nothing has moved for as long as :class:`Patience` allows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from agent.errors import CoordinatorUnreachableError
from protos.artifacts.chunks import CHUNK, Artifact, Manifest, indices, length, manifest, piece
from protos.v1 import gateway_pb2

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
        self, stub: Any, sealed: gateway_pb2.SealedRequest, artifact: Artifact, listing: Manifest, patience: Patience
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
