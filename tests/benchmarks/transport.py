"""The door against bare gRPC: a reservation beside an echo, an upload beside a stream, the coordinator's memory.

Peers and product stand on the same loopback, with the same mutual TLS 1.3 and certificates, and take turns; a ratio
is the median over pairs. The coordinator is ``lazaret-coordinator serve`` in a process of its own, its ledger and
uploads on the disk of ``TMPDIR``, else of ``/var/tmp``; the peer is another process (:mod:`.network`). Sites and
clients are one more process on the same machine, so that every processor second of either side counts. Linux only.

``reserve_vs_echo``: reservations per second, each durable in the ledger and answered with its proofs, over echoes of
the same requests, 8 calls in flight. The guard lets a site call 100 times a second, and 400 times at once: there are
so many sites that none comes near the 400.

``upload_vs_stream``: seconds of a bare stream of the same bytes in 1 MiB messages into a file, with an fsync at the
end, over seconds of :func:`agent.gateway.client.send`: digests of the pieces, Offer, Upload, the whole's digest at
the coordinator, review, ledger, shelf. The bytes are sealed to a reader, so no sandbox looks into them;
the whole's digest at the site is not either: the statement has it, and was sealed before (a row). Our coordinator
writes behind while it reads, which the plain peer does not: ``upload_vs_flushing_stream`` is against one that does.
``sealed_upload_vs_stream`` adds sealing the artifact to its reader (HPKE) and the statement's digest over it.

``peak_over_window``: the coordinator's peak memory above what it was before, with three models of 1 GB coming in at
once, over what three streams may hold: :data:`WINDOW_MB` each, see there. Before means idle, and after some small
uploads: what a first call leaves behind for ever is no part of a window.
"""

from __future__ import annotations

import hashlib
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from agent.gateway.client import Patience, send
from protos.artifacts.chunks import CHUNK, piece
from protos.encryption import hpke
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.benchmarks import network
from tests.benchmarks.network import Served
from tests.benchmarks.report import Report, Row
from tests.support.federation_world import Site

IN_FLIGHT, SITES, CALLS, ROUNDS = 8, 16, 32, 9  # a site makes ROUNDS * CALLS reservations, below the guard's burst
MEGABYTES, REPEATS = 128, 7
LARGE, STREAMS = 1 << 30, 3
# What one stream may hold in the coordinator: the piece in our hands, as gRPC's buffer, as message and as the bytes
# in it, and what gRPC reads ahead (its flow control lets a sender go 4 MiB beyond what was taken).
WINDOW_MB: Final = 3 + 4.0

Call = Callable[[gateway_pb2.SealedRequest], object]


def fleet(act: Sequence[Call], requests: Sequence[tuple[int, gateway_pb2.SealedRequest]]) -> float:
    """Calls per second with :data:`IN_FLIGHT` at once; each request goes with its site's number."""
    todo: queue.SimpleQueue[tuple[int, gateway_pb2.SealedRequest]] = queue.SimpleQueue()
    for request in requests:
        todo.put(request)

    def work() -> None:
        while True:
            try:
                site, request = todo.get_nowait()
            except queue.Empty:
                return
            act[site](request)

    start = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        for done in [threads.submit(work) for _ in range(IN_FLIGHT)]:
            done.result()
    return len(requests) / (time.perf_counter() - start)


@dataclass(slots=True)
class Caller:
    """One site's reservations over its own channel; it asks for proofs from where it was, as agents do."""

    stub: GatewayStub
    seen: int = 0
    reply_bytes: int = 0

    def reserve(self, request: gateway_pb2.SealedRequest) -> None:
        """One reservation, and a yes with a place in the ledger."""
        request.seen = self.seen
        reply = self.stub.Reserve(request, timeout=20)
        if not (reply.admitted and reply.entry and reply.seq >= 0):
            raise AssertionError(f"not reserved: {reply.findings}")
        self.seen, self.reply_bytes = max(self.seen, reply.seq + 1), reply.ByteSize()


def _asked(site: Site, name: str) -> gateway_pb2.SealedRequest:
    return gateway_pb2.SealedRequest(key=f"reserve-{name}", envelope=site.seal(site.hospital.reservation(name)))


def reserves(sites: Sequence[Site], ours: Served, peer: Served) -> tuple[list[Row], dict[str, float]]:
    """Reservations beside echoes."""
    callers = [Caller(GatewayStub(network.dial(site, ours.port))) for site in sites]
    echoes: list[Call] = [network.echo(network.dial(site, peer.port)) for site in sites]
    reservations: list[Call] = [caller.reserve for caller in callers]
    stocks = [
        [
            (n, _asked(site, f"grant-{site.hospital.name}-{r}-{i}"))
            for i in range(CALLS)
            for n, site in enumerate(sites)
        ]
        for r in range(ROUNDS + 1)
    ]
    rates: dict[str, list[float]] = {"reserve": [], "echo": []}
    cpu = dict.fromkeys(rates, 0.0)
    for turn, stock in enumerate(stocks):
        for name in ("echo", "reserve") if turn % 2 else ("reserve", "echo"):
            server, act = (ours, reservations) if name == "reserve" else (peer, echoes)
            before = server.cpu_seconds()
            rates[name].append(fleet(act, stock))
            cpu[name] += server.cpu_seconds() - before
    ratios = [a / b for a, b in zip(rates["reserve"], rates["echo"], strict=True)][1:]  # the first opens connections
    low, middle, high = quantiles(ratios, n=4)
    calls = len(stocks) * len(stocks[0])
    rows = [
        Row(f"reservations, {IN_FLIGHT} in flight, {len(sites)} sites", median(rates["reserve"]), "per s"),
        Row(f"echoes of {stocks[0][0][1].ByteSize()} bytes, {IN_FLIGHT} in flight", median(rates["echo"]), "per s"),
        Row("a reservation's reply: entry, checkpoint, proofs", callers[0].reply_bytes, "bytes"),
        Row("the ratio's lower quartile", low, "x"),
        Row("the ratio's upper quartile", high, "x"),
        Row("processor time of a reservation at the coordinator", cpu["reserve"] / calls * 1e6, "cpu-us"),
        Row("processor time of an echo at the peer", cpu["echo"] / calls * 1e6, "cpu-us"),
    ]
    return rows, {"reserve_vs_echo": middle}


@dataclass(slots=True)
class Sender:
    """One site's artifacts, to the coordinator and to the peer."""

    site: Site
    stub: GatewayStub
    stream: Callable[[Iterator[gateway_pb2.UploadPart]], object]
    reader: bytes
    names: Iterator[int] = field(default_factory=count)

    def statement(self, digest: str, size: int) -> gateway_pb2.SealedRequest:
        """A release that has a grant, sealed, to the reader."""
        grant = f"release-{self.site.hospital.name}-{next(self.names)}"
        self.site.reserved(grant)
        reader = hpke.fingerprint(self.reader)
        release = self.site.hospital.release(grant, artifact_sha256=digest, artifact_bytes=size, reader=reader)
        return gateway_pb2.SealedRequest(key=f"submit-{grant}", envelope=self.site.seal(release))

    def ours(self, path: Path, sealed: gateway_pb2.SealedRequest, digest: str) -> None:
        """The product's way, to the verdict."""
        verdict = send(self.stub, sealed, path, Patience(), sha256=digest)
        if not verdict.admitted:
            raise AssertionError(f"not admitted: {verdict.findings}")

    def bare(self, path: Path, name: str) -> None:
        """The peer's way, to the file being durable."""
        pieces = -(-path.stat().st_size // CHUNK)

        def parts() -> Iterator[gateway_pb2.UploadPart]:
            yield gateway_pb2.UploadPart(upload=name)
            for index in range(pieces):
                yield gateway_pb2.UploadPart(chunk=gateway_pb2.Chunk(index=index, data=piece(path, index)))

        self.stream(parts())


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def made(path: Path, megabytes: int) -> Path:
    """A file of random bytes, on the disk."""
    with path.open("wb") as out:
        for _ in range(megabytes):
            out.write(os.urandom(CHUNK))
        os.fsync(out.fileno())
    return path


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call, begun with an idle disk."""
    os.sync()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def uploads(folder: Path, sender: Sender) -> tuple[list[Row], dict[str, float]]:
    """Uploads beside bare streams of the same bytes."""
    clear, closed = made(folder / "clear", MEGABYTES), folder / "closed"
    ready = folder / "ready"
    hpke.seal_to(sender.reader, clear, ready)
    digest = _digest(ready)

    def sealed() -> None:
        hpke.seal_to(sender.reader, clear, closed)
        found = _digest(closed)
        sender.ours(closed, sender.statement(found, closed.stat().st_size), found)

    times: dict[str, list[float]] = {"ours": [], "sealed": [], "stream": [], "flushing": []}
    for turn in range(REPEATS):
        statement = sender.statement(digest, ready.stat().st_size)
        actions: dict[str, Callable[[], object]] = {
            "stream": lambda: sender.bare(ready, "plain"),
            "ours": lambda statement=statement: sender.ours(ready, statement, digest),  # type: ignore[misc]
            "flushing": lambda: sender.bare(ready, network.FLUSHING),
            "sealed": sealed,
        }
        for name in actions if turn % 2 else reversed(actions):
            times[name].append(seconds(actions[name]))
    hashing = seconds(lambda: _digest(ready))
    closing = seconds(lambda: hpke.seal_to(sender.reader, clear, closed))

    def over(a: str, b: str) -> list[float]:
        return [x / y for x, y in zip(times[a], times[b], strict=True)]

    what = {
        "ours": "an upload: pieces' digests to verdict",
        "sealed": "an upload with HPKE and the statement's digest",
        "stream": "a bare stream into a file, fsync at the end",
        "flushing": "a bare stream that flushes beside",
    }
    rows = [Row(text, MEGABYTES / median(times[name]), "MiB/s") for name, text in what.items()]
    rows += [
        Row("SHA-256 of the whole, for the statement", MEGABYTES / hashing, "MiB/s"),
        Row("sealing to a reader, with its fsync", MEGABYTES / closing, "MiB/s"),
    ]
    ratios = {
        "upload_vs_stream": over("stream", "ours"),
        "upload_vs_flushing_stream": over("flushing", "ours"),
        "sealed_upload_vs_stream": over("stream", "sealed"),
    }
    for name, values in ratios.items():
        low, _, high = quantiles(values, n=4)
        rows += [Row(f"{name}: lower quartile", low, "x"), Row(f"{name}: upper quartile", high, "x")]
    return rows, {name: median(values) for name, values in ratios.items()}


def _at_once(senders: Sequence[Sender], clear: Path) -> float:
    """Seconds until every sender's artifact, sealed to the reader, has its verdict."""
    artifact = clear.with_suffix(".sealed")
    hpke.seal_to(senders[0].reader, clear, artifact)
    clear.unlink()
    digest = _digest(artifact)
    statements = [sender.statement(digest, artifact.stat().st_size) for sender in senders]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(senders)) as threads:
        for done in [
            threads.submit(sender.ours, artifact, statement, digest)
            for sender, statement in zip(senders, statements, strict=True)
        ]:
            done.result()
    return time.perf_counter() - start


def memory(folder: Path, senders: Sequence[Sender], ours: Served) -> tuple[list[Row], dict[str, float]]:
    """Peak memory of the coordinator with as many large models at once as there are senders."""
    idle = ours.megabytes()
    _at_once(senders, made(folder / "small", 32))
    before = ours.megabytes()
    ours.forget_peak()
    took = _at_once(senders, made(folder / "large", LARGE // CHUNK))
    grown = ours.peak_megabytes() - before
    rows = [
        Row("the coordinator after its start", idle, "MB"),
        Row("idle, after three uploads of 32 MiB at once: threads, code and caches that stay", before, "MB"),
        Row(f"its peak above that, {len(senders)} models of {LARGE >> 20} MiB at once", grown, "MB"),
        Row("a stream's window: the piece in hand three times, and 4 MiB that gRPC reads ahead", WINDOW_MB, "MB"),
        Row("all of them together", len(senders) * (LARGE >> 20) / took, "MiB/s"),
    ]
    return rows, {"peak_over_window": grown / (len(senders) * WINDOW_MB)}


def main() -> Report:
    """Measure; about a minute and a half, and 5 GB of disk."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        folder = Path(name)
        _private, reader = hpke.make_reader()
        readers = f'["{hpke.fingerprint(reader)}"]'
        federation, sites = network.found(folder, [f"site-{n}" for n in range(SITES)], readers=readers)
        with network.coordinator(federation) as ours, network.bare(federation) as peer:
            senders = [
                Sender(
                    site,
                    GatewayStub(network.dial(site, ours.port)),
                    network.stream(network.dial(site, peer.port)),
                    reader,
                )
                for site in sites[:STREAMS]
            ]
            rows, ratios = memory(folder, senders, ours)
            for more, found in (uploads(folder, senders[0]), reserves(sites, ours, peer)):
                rows += more
                ratios |= found
    return Report(tuple(rows), ratios)
