"""The C-STORE receiver as a whole: a listening socket, worker processes for associations, one thread over them.

``Listener`` accepts connections and hands each to the least busy of its workers (``python -m
agent.pacs.dimse.listener_main``) over a Unix socket, so that the limits hold over all of them and no core waits
while another has two senders. Messages are JSON objects, one per packet; a connection goes along as a descriptor. A
worker ends when the socket to its parent does. It holds the key of its own TLS certificate and a deposit
(agent/storage/spool.py), with which it seals and opens nothing of others; it is confined
(protos/operations/confinement.py) to the spool and to the connections that it is handed. multiprocessing was
rejected: it pickles, and it forks or imports what the parent runs.

This is a wall: DICOM messages from the network are parsed in the workers, which can open neither the vault nor
what others put into the spool.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from agent.pacs.dimse.config import ListenerSettings, plain_address
from agent.pacs.dimse.storage_scp import EVENTS
from agent.storage.spool import Spool
from protos.common.errors import WorkerError
from protos.operations import confinement
from protos.operations.kept_process import how_ended

MESSAGE_BYTES: Final = 1 << 17  # bytes of one; the settings are the longest
_STRANGERS: Final = 16  # connections at once from addresses that are on no list: each gets a rejection
_START_SECONDS: Final = 60.0
_BACK_OFF: Final = (0.5, 30.0)  # seconds until a dead worker is started again, doubled from the first to the second
_STEADY: Final = 60.0  # seconds of life after which a worker's death is a first one again
_TORN: Final = 600.0  # seconds after which a half-written file belongs to nobody


class ListenerError(WorkerError, RuntimeError):
    """The receiver cannot start: a fault of the installation or the settings. The text names no patient."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One process and its socket."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    born: float
    open: dict[int, str] = field(default_factory=dict)  # the peer's address by connection
    counts: dict[str, int] = field(default_factory=dict)
    ready: bool = False


class Listener:
    """Receives C-STORE and answers C-ECHO while it is started; may be used from any thread."""

    def __init__(
        self,
        settings: ListenerSettings,
        room_folder: Path,
        room_key: bytes,
        *,
        told: Callable[[str, int], None] = lambda code, count: None,
        ended: Callable[[str], None] = lambda how: None,
        demand: str = confinement.AVAILABLE,
    ) -> None:
        """Nothing listens yet.

        Args:
            settings: who may send, and what it may cost.
            room_folder: of the spool.
            room_key: 32 bytes, the rooms' key; the workers never see it.
            told: called from a thread with an event of ``EVENTS`` and how often it happened since; must not raise.
            ended: called from a thread when a worker ended by itself, with how it did; must not raise.
            demand: which layers of the workers' confinement must be in force.
        """
        self._settings, self._folder, self._told, self._demand = settings, room_folder, told, demand
        self._ended = ended
        self._room = Spool(room_folder, room_key)
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._due: list[float] = []  # when to start workers that died
        self._deaths, self._connections, self._stopping = 0, 0, False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """``start``."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """``stop``."""
        self.stop()

    @property
    def port(self) -> int:
        """Where it listens."""
        if self._socket is None:
            raise ListenerError("the listener is not started")
        return int(self._socket.getsockname()[1])

    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def counts(self) -> dict[str, int]:
        """How often each event happened since the start, over all workers, dead ones too."""
        with self._lock:
            return dict(self._counts)

    def start(self) -> None:
        """Listen; when this returns, senders are served.

        Raises:
            ListenerError: the address is taken, a TLS file is wrong, or the workers do not start.
        """
        family = socket.AF_INET6 if ":" in self._settings.host else socket.AF_INET
        try:
            if self._settings.tls is not None:
                self._settings.tls.context()
            where = (self._settings.host, self._settings.port)
            self._socket = socket.create_server(where, family=family, backlog=128)
        except OSError as error:
            raise ListenerError(f"cannot listen: {error.strerror or type(error).__name__}") from None
        self._socket.setblocking(False)
        try:
            for _ in range(self._settings.workers or os.cpu_count() or 1):
                self._workers.append(self._spawn())
            until = time.monotonic() + _START_SECONDS
            for worker in self._workers:
                self._await(worker, until)
        except (OSError, ListenerError) as fault:
            self.stop(0.0)
            why = str(fault) if isinstance(fault, ListenerError) else ""
            why = why or "check installation and memory"
            raise ListenerError(f"a worker of the listener does not start: {why}") from None
        self._thread = threading.Thread(target=self._run, name="dimse-listener", daemon=True)
        self._thread.start()

    def _await(self, worker: _Worker, until: float) -> None:
        worker.channel.settimeout(max(0.1, until - time.monotonic()))
        said = json.loads(worker.channel.recv(MESSAGE_BYTES) or b"null")
        if said != {"ready": True}:
            raise ListenerError(str(said.get("fault", "")) if isinstance(said, dict) else "")
        worker.ready = True
        worker.channel.setblocking(False)

    def stop(self, grace: float = 10.0) -> None:
        """Take no more connections, let every C-STORE under way finish for ``grace`` seconds, end the workers."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.setblocking(False)
                worker.channel.send(json.dumps({"stop": grace}).encode())
        until = time.monotonic() + grace + 2.0
        for worker in self._workers:
            self._last_words(worker, until if grace else 0.0)
        self._workers, self._thread, self._socket, self._stopping = [], None, None, False

    def _last_words(self, worker: _Worker, until: float) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            while (left := until - time.monotonic()) > 0:
                worker.channel.settimeout(left)
                message = worker.channel.recv(MESSAGE_BYTES)
                if not message:
                    break
                self._note(worker, json.loads(message))
        worker.process.kill()
        worker.process.wait()
        worker.channel.close()

    def _spawn(self) -> _Worker:
        self._room.sweep(time.time() - _TORN)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {k: v for k, v in os.environ.items() if k in ("LD_LIBRARY_PATH", "TZ")}
        kept |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # only what has one thread can be confined
        # An image's buffers come from the heap again and again: mapped afresh, every page of them would fault
        heap = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "8388608", "MALLOC_TRIM_THRESHOLD_": "67108864"}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-B", "-m", "agent.pacs.dimse.listener_main"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**kept, **heap, "LANG": "C.UTF-8", "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
            )
        setup = {
            "settings": asdict(self._settings),
            "folder": self._folder.resolve(),
            "deposit": self._room.deposit().words(),
            "demand": self._demand,
        }
        ours.send(json.dumps(setup, default=str).encode())
        ours.setblocking(False)
        return _Worker(process, ours, time.monotonic())

    def _run(self) -> None:
        """The thread: connections to workers, workers' counts to us, dead workers to new ones."""
        while not self._stopping:
            self._revive()
            serving = any(worker.ready for worker in self._workers)
            with selectors.DefaultSelector() as ready:
                for worker in self._workers:
                    ready.register(worker.channel, selectors.EVENT_READ, worker)
                if serving and self._socket is not None:  # else they wait with the system
                    ready.register(self._socket, selectors.EVENT_READ)
                for key, _ in ready.select(0.25):
                    if key.data is None:
                        self._accept()
                    else:
                        self._hear(key.data)

    def _revive(self) -> None:
        now = time.monotonic()
        due, self._due = [t for t in self._due if t <= now], [t for t in self._due if t > now]
        for _ in due:
            try:
                self._workers.append(self._spawn())
            except OSError:
                self._due.append(now + _BACK_OFF[1])

    def _hear(self, worker: _Worker) -> None:
        try:
            self._note(worker, json.loads(worker.channel.recv(MESSAGE_BYTES)))
        except BlockingIOError:
            return
        except (OSError, ValueError, TypeError, AttributeError):
            self._bury(worker)  # it ended, or says what it should not

    def _bury(self, worker: _Worker) -> None:
        worker.channel.close()
        worker.process.kill()
        status = worker.process.wait()
        self._workers.remove(worker)
        now = time.monotonic()
        self._deaths = 1 if now - worker.born > _STEADY else self._deaths + 1
        self._due.append(now + min(_BACK_OFF[1], _BACK_OFF[0] * 2.0 ** min(self._deaths - 1, 10)))
        self._add("worker_stopped", 1)
        self._ended(how_ended(status))

    def _note(self, worker: _Worker, said: dict[str, Any]) -> None:
        worker.ready = worker.ready or said.get("ready") is True
        for connection in said.get("closed", ()):
            worker.open.pop(connection, None)
        for code, count in said.get("counts", {}).items():
            if code in EVENTS and count > worker.counts.get(code, 0):
                self._add(code, count - worker.counts.get(code, 0))
                worker.counts[code] = count

    def _add(self, code: str, count: int) -> None:
        with self._lock:
            self._counts[code] += count
        self._told(code, count)

    def _accept(self) -> None:
        if self._socket is None:
            return
        try:
            connection, whence = self._socket.accept()
        except OSError:
            return
        with connection:
            address = plain_address(whence[0])
            worker = min((w for w in self._workers if w.ready), key=lambda w: len(w.open), default=None)
            over = self._over(address)
            if worker is None or over is None or not self._hand(worker, connection, address, over=over):
                self._add("turned_away", 1)

    def _hand(self, worker: _Worker, connection: socket.socket, address: str, *, over: bool) -> bool:
        self._connections += 1
        told = {"connection": self._connections, "address": address, "over": over}
        try:
            socket.send_fds(worker.channel, [json.dumps(told).encode()], [connection.fileno()])
        except OSError:
            return False
        worker.open[self._connections] = address
        return True

    def _over(self, address: str) -> bool | None:
        """Is one more too many? None: so far beyond that it is not even told so."""
        everyone = Counter(a for w in self._workers for a in w.open.values())
        if not self._settings.knows(address):
            strangers = sum(n for a, n in everyone.items() if not self._settings.knows(a))
            return False if strangers < _STRANGERS else None
        known = sum(n for a, n in everyone.items() if self._settings.knows(a))
        here, most, total = everyone[address], self._settings.max_per_address, self._settings.max_associations
        if here >= 2 * most or known >= 2 * total:
            return None
        return here >= most or known >= total
