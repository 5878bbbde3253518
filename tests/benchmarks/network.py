"""A coordinator in a process of its own, as installed, and the bare gRPC server that it is measured against.

Both listen on the loopback with the same certificates, TLS 1.3 keys and channel options; the sites are enrolled by
the product's own steps before the coordinator starts.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from agent.gateway.channel import open_channel
from agent.gateway.credentials import Credentials
from coordinator.gateway.server import THREADS
from coordinator.gateway.service import MAX_PART
from coordinator.storage import directory as coordinator_home
from protos.v1 import gateway_pb2
from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import policy

LISTEN: Final = 'listen = "127.0.0.1:0"\n'
FLUSHING: Final = "flushing"
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_START_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class Served:
    """A process that listens."""

    process: subprocess.Popen[str]
    port: int

    def peak_megabytes(self) -> float:
        """The most memory that it has had, or since :meth:`forget_peak`. Linux only."""
        return self._status("VmHWM")

    def megabytes(self) -> float:
        """Its memory now."""
        return self._status("VmRSS")

    def forget_peak(self) -> None:
        """Measure the peak from here on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def cpu_seconds(self) -> float:
        """Processor time so far, all threads, the kernel's included."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def _status(self, name: str) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) / 1024


@contextlib.contextmanager
def started(command: Sequence[str], says: str, before: Sequence[str] = ()) -> Iterator[Served]:
    """A child that prints its port; it ends with the block. ``before``: words that start it on another host."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*before, sys.executable, *command], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            while not (found := re.search(says, lines[-1])):
                if process.poll() is not None or len(lines) > _START_LINES:
                    raise RuntimeError(f"{' '.join(command)} did not start: {''.join(lines)}")
                lines.append(process.stdout.readline())
            # what it says later is not read: a pipe that is full would stop it
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield Served(process, int(found[1]) if found[1].isdecimal() else 0)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def found(
    folder: Path, names: Sequence[str], listen: str = LISTEN, **changes: object
) -> tuple[Federation, list[Site]]:
    """A federation with enrolled sites and a policy that lets them spend much; nothing runs yet."""
    most = {"epsilon": 100.0, "max_releases_per_patient": 1_000_000, "max_artifact_bytes": 2 << 30}
    text = policy(**{**most, **changes})
    coordinator_home.create(folder / "coordinator", listen, text, dt.datetime.now(dt.UTC))
    federation = Federation(folder)
    with federation:
        sites = [federation.join(name, text) for name in names]
    return federation, sites


@contextlib.contextmanager
def coordinator(federation: Federation, instead: Sequence[str] = ()) -> Iterator[Served]:
    """``lazaret-coordinator serve`` over an existing directory; or another command ``instead``."""
    command = ["-m", "coordinator", "--home", str(federation.root / "coordinator"), "serve"]
    with started(instead or command, r"agents on port (\d+)") as served:
        federation.port = served.port
        yield served


@contextlib.contextmanager
def bare(federation: Federation) -> Iterator[Served]:
    """The peer: the same TLS, and no check, no hash, no ledger."""
    with started(["-m", "tests.benchmarks.network", str(federation.root)], r"(\d+)") as served:
        yield served


def dial(site: Site, port: int) -> grpc.Channel:
    """A site's channel, with the product's options."""
    return open_channel(f"127.0.0.1:{port}", Credentials(site.home.keys).channel_credentials())


class Bare(grpc.GenericRpcHandler):  # type: ignore[misc]
    """``/bare/Echo`` gives back what it gets; ``/bare/Stream`` writes chunks to a file, durable before the reply.

    A stream of the name :data:`FLUSHING` has the disk work while chunks come in; any other is flushed at its end.
    """

    def __init__(self, folder: Path) -> None:
        """Files go to ``folder``."""
        self.folder = folder

    def service(self, details: Any) -> Any:
        """The handler of a method."""
        if details.method == "/bare/Echo":
            return grpc.unary_unary_rpc_method_handler(
                lambda request, _context: request,
                gateway_pb2.SealedRequest.FromString,
                gateway_pb2.SealedRequest.SerializeToString,
            )
        if details.method == "/bare/Stream":
            return grpc.stream_unary_rpc_method_handler(
                self._stream, gateway_pb2.UploadPart.FromString, gateway_pb2.UploadReply.SerializeToString
            )
        return None

    def _stream(self, parts: Iterator[Any], _context: Any) -> Any:
        accepted, name = 0, next(parts).upload
        path = self.folder / name
        path.unlink(missing_ok=True)
        with path.open("wb", buffering=0) as out, ThreadPoolExecutor(1) as beside:
            for part in parts:
                out.write(part.chunk.data)
                accepted += 1
                if name == FLUSHING and accepted % 8 == 0:
                    beside.submit(os.fdatasync, out.fileno())
            beside.shutdown()
            os.fsync(out.fileno())
        return gateway_pb2.UploadReply(accepted=accepted)


def echo(channel: grpc.Channel) -> Any:
    """The bare echo, as a call."""
    return channel.unary_unary(
        "/bare/Echo", gateway_pb2.SealedRequest.SerializeToString, gateway_pb2.SealedRequest.FromString
    )


def stream(channel: grpc.Channel) -> Any:
    """The bare stream, as a call."""
    return channel.stream_unary(
        "/bare/Stream", gateway_pb2.UploadPart.SerializeToString, gateway_pb2.UploadReply.FromString
    )


def main() -> None:
    """Serve the bare peer until told to stop: the federation's directory is the argument."""
    root = Path(sys.argv[1])
    home = coordinator_home.CoordinatorDirectory(root / "coordinator")
    files = root / "bare"
    files.mkdir(exist_ok=True)
    key, chain = coordinator_home.own_certificate(home, dt.datetime.now(dt.UTC))
    credentials = grpc.ssl_server_credentials([(key, chain)], home.root_crt(), require_client_auth=True)
    options = [("grpc.max_receive_message_length", MAX_PART), ("grpc.so_reuseport", 0)]
    server = grpc.server(ThreadPoolExecutor(THREADS), handlers=(Bare(files),), options=options)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop(0).wait()


if __name__ == "__main__":
    main()
