"""The STOW-RS receiver in a process of its own, which holds none of the site's keys.

``Stow`` starts ``python -m agent.edges.stow`` and hands it its settings and a deposit (agent/edges/room.py) over a
pipe; when the pipe ends, with the agent, it ends too. It opens its port, and is then confined to that and to the
spool (protos/operations/confinement.py). HTTP is uvicorn's, with what it leaves open closed here: who may connect,
how long a request may take to be said, and how many connections there are.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent.edges.multipart import Limits
from agent.edges.room import Deposit, Room
from agent.edges.secret import SecretError, is_loopback, read_secret
from agent.edges.storing import Store, Terms
from protos.operations import confinement

_HEADER_BYTES: Final = 16_384  # request line and headers
_START_S: Final = 60.0
_END_S: Final = 15.0
_IDLE_S: Final = 5  # between two requests on one connection
_SPARE: Final = 2**30  # bytes of address space beside the parts under way
_PATHS: Final = ("certificate", "key", "client_ca", "token_file")


class StowError(RuntimeError):
    """The receiver cannot be started. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class StowSettings:
    """What listens, and for whom."""

    host: str = "127.0.0.1"
    port: int = 8443  # 0: any free one
    root: str = "/dicom-web"  # senders post to ROOT/studies
    certificate: Path | None = None  # of this server, PEM; only loopback may do without
    key: Path | None = None
    client_ca: Path | None = None  # who signs the certificates of senders; None: none is asked for
    client_names: tuple[str, ...] = ()  # common or DNS names of senders' certificates; (): all of client_ca's
    token_file: Path | None = None  # 0600, a bearer token; needed unless client_ca is given
    addresses: tuple[str, ...] = ("127.0.0.0/8", "::1/128")  # networks that may connect
    connections: int = 32
    requests: int = 4  # that store at a time
    max_bytes: int = 512 * 2**20  # of one instance
    most_instances: int = 10_000  # of one request
    body_bytes: int = 16 * 2**30  # of one request
    memory_bytes: int = 2**30  # of instances under way
    least_free_bytes: int = 10 * 2**30  # on the first room's disk
    slowest: int = 16_384  # bytes a second: a slower sender is cut off
    header_s: float = 10.0  # to say the headers of a request
    grace_s: float = 10.0  # of silence, before `slowest` counts

    def __post_init__(self) -> None:
        """Check everything that can be checked without opening a file."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together")
        if self.certificate is None and (self.client_ca is not None or not is_loopback(self.host)):
            raise ValueError("a certificate and key are needed: beyond this machine, and for senders' certificates")
        if self.token_file is None and self.client_ca is None:
            raise ValueError("senders must prove who they are: give token_file or client_ca")
        if self.client_names and self.client_ca is None:
            raise ValueError("client_names needs client_ca")
        self._check_limits()

    def _check_limits(self) -> None:
        if self.root and (not self.root.startswith("/") or self.root.endswith("/")):
            raise ValueError('root must be empty or look like "/dicom-web"')
        if not self.addresses:
            raise ValueError("addresses must name the networks that may connect")
        for address in self.addresses:
            ipaddress.ip_network(address)
        counts = (self.connections, self.requests, self.max_bytes, self.most_instances, self.slowest)
        if not (all(n > 0 for n in (*counts, self.header_s, self.grace_s)) and 0 <= self.port < 65536):
            raise ValueError("limits must be positive, and port a port")
        if not self.max_bytes < self.memory_bytes or not self.max_bytes <= self.body_bytes:
            raise ValueError("max_bytes must be below memory_bytes and body_bytes")

    def terms(self, token: str) -> Terms:
        """What the application needs to know of it."""
        return Terms(
            root=self.root,
            token=token,
            limits=Limits(self.max_bytes, self.body_bytes, self.most_instances),
            requests=self.requests,
            memory_bytes=self.memory_bytes,
            least_free_bytes=self.least_free_bytes,
            slowest=float(self.slowest),
            grace_s=self.grace_s,
        )


# ------------------------------------------------------------------ the side of the agent


class Stow:
    """Starts and ends the receiver's process."""

    def __init__(
        self, settings: StowSettings, room_folder: Path, room_key: bytes, demand: str = confinement.AVAILABLE
    ) -> None:
        """Nothing runs yet.

        Args:
            settings: what listens, and for whom.
            room_folder: of the first room.
            room_key: 32 bytes, the first room's; the receiver never sees it.
            demand: which layers of the receiver's confinement must be in force.
        """
        self._settings, self._folder, self._key, self._demand = settings, room_folder, room_key, demand
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0  # where it listens, once started

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.stop()

    @property
    def pid(self) -> int | None:
        """Its process id, None when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start it, and return when it listens; harmless when it runs.

        Raises:
            StowError: with what to do.
        """
        if self.pid is not None:
            return
        setup = self._setup()
        inherited = {k: v for k, v in os.environ.items() if k in ("LD_LIBRARY_PATH", "TZ")}
        home = str(Path(__file__).resolve().parents[2])
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # only what has one thread can be confined
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-m", "agent.edges.stow"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # nobody's log: an error's text may quote what was sent
            cwd="/",
            env={**inherited, **one, "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2", "PYTHONPATH": home},
        )
        watchdog = threading.Timer(_START_S, process.kill)
        watchdog.start()
        try:
            reply = _ask(process, setup)
        finally:
            watchdog.cancel()
        if type(reply.get("port")) is not int:
            self.stop()
            raise StowError(str(reply.get("fault", "the STOW receiver does not start; check the installation")))
        self.port = reply["port"]

    def _setup(self) -> bytes:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self._settings).items()}
        try:
            token = read_secret(self._settings.token_file, "token_file") if self._settings.token_file else ""
        except SecretError as fault:
            raise StowError(f"stow: {fault}") from None
        setup = {
            "settings": settings,
            "token": token,
            "room": str(self._folder.absolute()),
            "deposit": Room(self._folder, self._key).deposit().words(),
            "demand": self._demand,
        }
        return json.dumps(setup).encode() + b"\n"

    def stop(self) -> None:
        """Let requests under way end, for a moment, and end it; harmless when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(_END_S + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(process: subprocess.Popen[bytes], setup: bytes) -> dict[str, Any]:
    if process.stdin is None or process.stdout is None:
        return {}
    try:
        process.stdin.write(setup)
        process.stdin.flush()
        reply = json.loads(process.stdout.readline(4096))
    except (OSError, ValueError):
        return {}
    return reply if isinstance(reply, dict) else {}


# ------------------------------------------------------------------ the side of the receiver


class _Door(H11Protocol):
    """One connection: only from where it may come, and only as long as it says something."""

    def __init__(self, settings: StowSettings, **usual: Any) -> None:
        super().__init__(**usual)
        self._settings = settings
        self._networks = [ipaddress.ip_network(address) for address in settings.addresses]
        self._late: Any = None  # the timer of a request that is not said yet

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._settings.connections or not self._may_come(transport):
            transport.abort()
            return
        self._watch()

    def _may_come(self, transport: Any) -> bool:
        peer = transport.get_extra_info("peername")
        with contextlib.suppress(ValueError, TypeError, IndexError):
            address = ipaddress.ip_address(peer[0])
            address = getattr(address, "ipv4_mapped", None) or address
            return any(address in network for network in self._networks) and self._is_named(transport)
        return False

    def _is_named(self, transport: Any) -> bool:
        if not self._settings.client_names:
            return True
        certificate = transport.get_extra_info("peercert") or {}
        names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
        names |= {value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"}
        return not names.isdisjoint(self._settings.client_names)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """A clock runs while a request's headers are awaited; a body has its own."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self._late is None:
            self._late = self.loop.call_later(self._settings.header_s, self.transport.abort)
        elif not waits:
            self._calm()

    def _calm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)


def _tls(settings: StowSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(str(settings.certificate), str(settings.key))
    if settings.client_ca is not None:
        context.load_verify_locations(str(settings.client_ca))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _server(settings: StowSettings, app: Store) -> uvicorn.Server:
    tls: dict[str, Any] = {}
    if settings.certificate is not None:
        context = _tls(settings)
        tls["ssl_context_factory"] = lambda _config, _usual: context
    config = uvicorn.Config(
        app,
        http=partial(_Door, settings),  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=int(_END_S) - 5,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        **tls,
    )
    config.load()
    return uvicorn.Server(config)


def _settings(raw: dict[str, Any]) -> StowSettings:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    return StowSettings(**fields | {key: Path(fields[key]) for key in _PATHS if fields[key] is not None})


def _until_the_end(lines: Any, server: uvicorn.Server) -> None:
    """Wait for the agent to close the pipe, or to die; then end, at the latest after a while."""
    while lines.read(1):
        pass
    server.should_exit = True
    time.sleep(_END_S)
    os._exit(1)


def _open(setup: dict[str, Any]) -> tuple[uvicorn.Server, socket.socket]:
    settings = _settings(setup["settings"])
    memory = _SPARE + 4 * settings.memory_bytes + 3 * settings.requests * settings.max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    room = Room(Path(setup["room"]), Deposit.of(setup["deposit"]))
    try:
        server = _server(settings, Store(settings.terms(setup["token"]), room, time.monotonic))
    except (OSError, ssl.SSLError):
        raise StowError(
            "stow: certificate, key or client_ca cannot be used: check the files and whose they are"
        ) from None
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return server, socket.create_server((settings.host, settings.port), family=family, backlog=64)
    except OSError:
        raise StowError("stow: host and port cannot be listened on; does another program do so?") from None


def main() -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold patients' files
    logging.disable(logging.CRITICAL)
    lines = os.fdopen(os.dup(0), "rb")
    reply: Callable[[bytes], int] = partial(os.write, os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    try:
        setup = json.loads(lines.readline())
        server, listener = _open(setup)
        allowed = confinement.Allowed(confinement.RECEIVING, confinement.interpreter(), setup["room"])
        confinement.confine(allowed, setup["demand"])
    except (StowError, confinement.ConfinementError) as fault:
        reply(json.dumps({"fault": str(fault)}).encode() + b"\n")
        return
    threading.Thread(target=_until_the_end, args=(lines, server), daemon=True).start()
    reply(json.dumps({"port": listener.getsockname()[1]}).encode() + b"\n")
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
