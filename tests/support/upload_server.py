"""A gRPC server that takes uploads as the product's does, a proxy that cuts lines, and a program to be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from coordinator.storage.uploads import UploadError, Uploads
from protos.artifacts.chunks import Artifact, manifest, piece
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayServicer, add_GatewayServicer_to_server

SITE = "site-a"
QUOTA = 2 << 30


def announce(artifact: Artifact, key: str = "submit-1") -> gateway_pb2.SealedRequest:
    """What stands in for a sealed statement here: the artifact's digest and size."""
    listing = manifest(artifact)
    return gateway_pb2.SealedRequest(key=key, envelope=json.dumps([listing.sha256, listing.size]).encode())


def staged(uploads: Uploads, site: str, artifact: Artifact) -> Path:
    """An artifact that came in by :class:`Uploads`, finished."""
    listing = manifest(artifact)
    uploads.offer(site, listing.sha256, listing.size, listing.chunks, QUOTA)
    for index in range(len(listing.chunks)):
        uploads.put(site, listing.sha256, index, piece(artifact, index))
    return uploads.finish(site, listing.sha256)


class Receiver(GatewayServicer):
    """Offer, Upload, Submit and Outcome over :class:`Uploads`; every verdict is a yes."""

    def __init__(self, uploads: Uploads, die_after: int = 0) -> None:
        """``die_after``: kill this process, as -9 does, at that piece."""
        self.uploads, self.die_after = uploads, die_after
        self.puts: list[int] = []
        self.answers: dict[str, gateway_pb2.VerdictReply] = {}
        self.finished: list[Path] = []
        self.lose_reply = False

    def Offer(self, request: Any, context: Any) -> Any:
        sha256, size = json.loads(request.sealed.envelope)
        try:
            missing = self.uploads.offer(SITE, sha256, size, request.chunks, QUOTA)
        except UploadError as refusal:
            finding = gateway_pb2.Finding(rule=refusal.rule, detail=refusal.detail)
            return gateway_pb2.OfferReply(decided=gateway_pb2.VerdictReply(findings=[finding], seq=-1))
        return gateway_pb2.OfferReply(upload=sha256, missing=missing)

    def Upload(self, parts: Iterator[Any], context: Any) -> Any:
        upload, taken = next(parts).upload, 0
        try:
            for part in parts:
                if self.die_after and len(self.puts) == self.die_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.uploads.put(SITE, upload, part.chunk.index, part.chunk.data)
                self.puts.append(part.chunk.index)
                taken += 1
            self.uploads.sync(SITE, upload)
        except UploadError as refusal:
            self._abort(context, refusal)
        return gateway_pb2.UploadReply(accepted=taken)

    def Submit(self, request: Any, context: Any) -> Any:
        sha256, _size = json.loads(request.envelope)
        try:
            if request.key not in self.answers:
                self.finished.append(self.uploads.finish(SITE, sha256))
                self.answers[request.key] = gateway_pb2.VerdictReply(admitted=True, known=True, level="B")
                self.uploads.drop(SITE, sha256)
        except UploadError as refusal:
            self._abort(context, refusal)
        if self.lose_reply:
            self.lose_reply = False
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return self.answers[request.key]

    def Outcome(self, request: Any, context: Any) -> Any:
        return self.answers.get(request.key, gateway_pb2.VerdictReply(known=False, seq=-1))

    def _abort(self, context: Any, refusal: UploadError) -> None:
        code = grpc.StatusCode.INVALID_ARGUMENT if refusal.lasting else grpc.StatusCode.FAILED_PRECONDITION
        context.abort(code, refusal.rule)


@contextlib.contextmanager
def serving(receiver: Receiver, port: int = 0) -> Iterator[int]:
    """The receiver on a port of the loopback, without TLS: it is the transfer that is tried here."""
    options = [("grpc.max_receive_message_length", (1 << 20) + 4096), ("grpc.so_reuseport", 0)]
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=options)
    add_GatewayServicer_to_server(receiver, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


class Cutter:
    """A TCP proxy that resets each connection after so many bytes towards the server; 0: lets it pass."""

    def __init__(self, target: int, cuts: list[int]) -> None:
        self.target, self.cuts, self.reset = target, cuts, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                limit = self.cuts.pop(0) if self.cuts else 0
                threading.Thread(target=self._pump, args=(client, server, limit), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, 0), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, limit: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
                passed += len(data)
                if limit and passed > limit:
                    self.reset += 1
                    for end in (source, sink):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        end.shutdown(socket.SHUT_RDWR)
                    break
        for end in (source, sink):
            end.close()

    def close(self) -> None:
        self.listener.close()


def main() -> None:
    """Serve a directory until killed: ``root port die_after``."""
    root, port, die_after = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with serving(Receiver(Uploads(root, time.time, keep_free=0), die_after), port) as bound:
        print(bound, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
