"""The STOW-RS receiver in a process of its own, which holds none of the site's keys.

``Stow`` starts ``python -m agent.pacs.dicomweb.stow_main``, and starts it again whenever it ends
(protos/operations/kept_process.py). It hands it its settings and a deposit (agent/storage/spool.py) over a pipe; when
the pipe ends, with the agent, it ends too. It opens its port, and is then
confined to that and to the spool (protos/operations/confinement.py). HTTP is uvicorn's, with what it leaves open
closed here: who may connect, how long a request may take to be said, and how many connections there are.

This is a wall: HTTP from the network is parsed on the other side, which has none of the site's keys.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Self

from agent.pacs.dicomweb.multipart import BodyLimits
from agent.pacs.dicomweb.stow_handler import StowLimits
from agent.pacs.secret_files import SecretFileError, is_loopback, read_secret
from agent.storage.spool import Spool
from protos.common.errors import WorkerError
from protos.operations import confinement
from protos.operations.kept_process import Born, KeptProcess, StartedProcess

_START_S: Final = 60.0
_REPLY_BYTES: Final = 4096
END_S: Final = 15.0
PATHS: Final = ("certificate", "key", "client_ca", "token_file")


class StowError(WorkerError, RuntimeError):
    """The receiver cannot be started. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class StowSettings:
    """The listening address, and the permitted senders."""

    host: str = "127.0.0.1"  # address that senders see
    port: int = 8443  # 0: any free one
    root: str = "/dicom-web"  # senders post to ROOT/studies
    certificate: Path | None = None  # of this server, PEM; only loopback may do without
    key: Path | None = None  # of the certificate, PEM
    client_ca: Path | None = None  # who signs the certificates of senders; None: none is asked for
    client_names: tuple[str, ...] = ()  # common or DNS names of senders' certificates; (): all of client_ca's
    token_file: Path | None = None  # 0600, a bearer token; needed unless client_ca is given
    addresses: tuple[str, ...] = ("127.0.0.0/8", "::1/128")  # networks that may connect
    connections: int = 32  # open at once
    requests: int = 4  # that store at a time
    max_bytes: int = 512 * 2**20  # of one instance
    most_instances: int = 10_000  # of one request
    body_bytes: int = 16 * 2**30  # of one request
    memory_bytes: int = 2**30  # of instances under way
    least_free_bytes: int = 10 * 2**30  # on the spool's disk
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

    def terms(self, token: str) -> StowLimits:
        """What the application needs to know of it."""
        return StowLimits(
            root=self.root,
            token=token,
            limits=BodyLimits(self.max_bytes, self.body_bytes, self.most_instances),
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
        self,
        settings: StowSettings,
        room_folder: Path,
        room_key: bytes,
        demand: str = confinement.AVAILABLE,
        ended: Callable[[str], None] = lambda how: None,
    ) -> None:
        """Nothing runs yet.

        Args:
            settings: what listens, and for whom.
            room_folder: of the spool.
            room_key: 32 bytes, the spool's; the receiver never sees it.
            demand: which layers of the receiver's confinement must be in force.
            ended: called from a thread when the receiver ended by itself, with how it did; must not raise.
        """
        self._settings, self._folder, self._key, self._demand = settings, room_folder, room_key, demand
        self._ended = ended
        self._kept: KeptProcess | None = None
        self.port = 0  # where it listens, once started

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.stop()

    @property
    def pid(self) -> int | None:
        """Its process id, None when it does not run."""
        return self._kept.pid if self._kept is not None else None

    def start(self) -> None:
        """Start it, and return when it listens; harmless when it runs. From then on it is started whenever it ends.

        Raises:
            StowError: with what to do.
        """
        if self._kept is not None:
            return
        kept = KeptProcess("stow", self._started, self._ended)
        kept.begin()
        self._kept = kept

    def _started(self, born: Born) -> StartedProcess:
        setup = self._setup()
        inherited = {k: v for k, v in os.environ.items() if k in ("LD_LIBRARY_PATH", "TZ")}
        home = str(Path(__file__).resolve().parents[3])
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # only what has one thread can be confined
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-m", "agent.pacs.dicomweb.stow_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # nobody's log: an error's text may quote what was sent
            cwd="/",
            env={**inherited, **one, "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2", "PYTHONPATH": home},
        )
        born(process)
        watchdog = threading.Timer(_START_S, process.kill)
        try:
            watchdog.start()
            reply = _ask(process, setup)
        finally:
            watchdog.cancel()
            _close(process.stdout)
        if type(reply.get("port")) is not int:
            _close(process.stdin)
            raise StowError(str(reply.get("fault", "the STOW receiver does not start; check the installation")))
        self.port = reply["port"]
        return StartedProcess(process, process.wait, partial(_close, process.stdin))

    def _setup(self) -> bytes:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self._settings).items()}
        settings["port"] = self.port or self._settings.port  # senders know the first one
        try:
            token = read_secret(self._settings.token_file, "token_file") if self._settings.token_file else ""
        except SecretFileError as fault:
            raise StowError(f"stow: {fault}") from None
        setup = {
            "settings": settings,
            "token": token,
            "room": str(self._folder.absolute()),
            "deposit": Spool(self._folder, self._key).deposit().words(),
            "demand": self._demand,
        }
        return json.dumps(setup).encode() + b"\n"

    def stop(self) -> None:
        """Let requests under way end, for a moment, and end it; harmless when it does not run."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.end(END_S + 5)


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()


def _ask(process: subprocess.Popen[bytes], setup: bytes) -> dict[str, Any]:
    """What it replies: all that it ever says."""
    if process.stdin is None or process.stdout is None:
        return {}
    try:
        process.stdin.write(setup)
        process.stdin.flush()
        said = process.stdout.read(_REPLY_BYTES)  # until it closes the pipe
        reply = json.loads(said) if len(said) < _REPLY_BYTES else None
    except (OSError, ValueError):
        return {}
    return reply if isinstance(reply, dict) else {}
