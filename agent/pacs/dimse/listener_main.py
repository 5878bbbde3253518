"""A worker of the DICOM listener: one thread for each association (``listener_process`` starts it)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from agent.pacs.dimse.config import ListenerSettings
from agent.pacs.dimse.listener_process import MESSAGE_BYTES
from agent.pacs.dimse.pdu import PduStream
from agent.pacs.dimse.storage_scp import Association, EventTally, Services, read_settings
from agent.storage.spool import Spool, SpoolWriter
from protos.operations import confinement

_STACK: Final = 1 << 20


class _Server:
    """A worker: one thread per association."""

    def __init__(self, channel: socket.socket, services: Services) -> None:
        """``channel``: to the listener."""
        self._channel, self._services = channel, services
        tls = services.settings.tls
        self._context = tls.context() if tls else None
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._last: dict[str, int] = {}
        self._threads: set[threading.Thread] = set()

    def run(self) -> None:
        """Until the listener says so or is gone."""
        self._channel.settimeout(0.5)
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
            except TimeoutError:
                self._report()
                continue
            if not message:
                return
            said = json.loads(message)
            if "stop" in said:
                self._end(float(said["stop"]))
                return
            self._begin(said, descriptors)

    def _begin(self, said: dict[str, Any], descriptors: list[int]) -> None:
        try:
            thread = threading.Thread(target=self._serve, args=(descriptors[0], said), daemon=True)
            self._threads.add(thread)
            thread.start()
        except (IndexError, RuntimeError, MemoryError):  # no descriptor, thread or memory left for one more
            for descriptor in descriptors:
                os.close(descriptor)
            self._services.tally.count("turned_away")
            self._report(said["connection"])

    def _end(self, grace: float) -> None:
        self._stop.set()
        until = time.monotonic() + grace
        for thread in [thread for thread in list(self._threads) if thread.ident]:
            thread.join(max(0.0, until - time.monotonic()))
        self._report()

    def _serve(self, descriptor: int, said: dict[str, Any]) -> None:
        try:
            self._associate(socket.socket(fileno=descriptor), said["address"], over=said["over"])
        except Exception:  # noqa: BLE001 - one association's fault must not end the others; its text may hold anything
            self._services.tally.count("fault")
        finally:
            self._threads.discard(threading.current_thread())
            self._report(said["connection"])

    def _associate(self, connection: socket.socket, address: str, *, over: bool) -> None:
        with connection:
            if self._context is None:
                Association(PduStream(connection), address, self._services, self._stop.is_set).serve(over=over)
                return
            connection.settimeout(self._services.settings.request_seconds)  # for the whole handshake
            try:
                secured = self._context.wrap_socket(connection, server_side=True)
            except OSError:  # ssl.SSLError is one
                self._services.tally.count("tls_failed")
                return
            with secured:
                Association(PduStream(secured), address, self._services, self._stop.is_set).serve(over=over)

    def _report(self, closed: int | None = None) -> None:
        """Tell the listener what is new."""
        with self._lock, contextlib.suppress(OSError):
            counts = self._services.tally.counts()
            if counts != self._last or closed is not None:
                said = {"counts": counts, "closed": [] if closed is None else [closed]}
                self._channel.send(json.dumps(said).encode())
                self._last = counts


def _limit(settings: ListenerSettings) -> None:
    memory = (1 << 30) + 3 * settings.memory_bytes + 2 * settings.max_associations * 2 * _STACK
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold patients' images
    threading.stack_size(_STACK)


def main() -> None:
    """Serve what comes over standard input, a Unix socket, until it ends."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # 1 and 2 are there already
    logging.disable(logging.CRITICAL)  # pynetdicom's messages quote what it decodes
    setup = json.loads(channel.recv(MESSAGE_BYTES))
    settings = read_settings(setup["settings"])
    _limit(settings)
    room = Spool(Path(setup["folder"]), SpoolWriter.of(setup["deposit"]), durable=settings.durable)
    server = _Server(channel, Services(settings, room, EventTally()))
    try:
        _confine(setup["folder"], setup["demand"])
    except confinement.ConfinementError as fault:
        channel.send(json.dumps({"fault": str(fault)}).encode())
        return
    channel.send(b'{"ready": true}')
    try:
        server.run()
    finally:
        os._exit(0)  # without waiting for associations: their senders have no answer yet, and send again


def _confine(spool: str, demand: str) -> None:
    allowed = confinement.Allowed(confinement.RECEIVING, confinement.interpreter(), spool)
    confinement.confine(allowed, demand)


if __name__ == "__main__":
    main()
