"""The STOW-RS receiver, in a process of its own (``stow_process`` starts it)."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent.pacs.dicomweb.stow_handler import StowHandler
from agent.pacs.dicomweb.stow_process import END_S, PATHS, StowError, StowSettings
from agent.storage.spool import Spool, SpoolWriter
from protos.operations import confinement

_HEADER_BYTES: Final = 16_384  # request line and headers
_IDLE_S: Final = 5  # between two requests on one connection
_SPARE: Final = 2**30  # bytes of address space beside the parts under way


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


def _server(settings: StowSettings, app: StowHandler) -> uvicorn.Server:
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
        timeout_graceful_shutdown=int(END_S) - 5,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        **tls,
    )
    config.load()
    return uvicorn.Server(config)


def _settings(raw: dict[str, Any]) -> StowSettings:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    return StowSettings(**fields | {key: Path(fields[key]) for key in PATHS if fields[key] is not None})


def _until_the_end(lines: Any, server: uvicorn.Server) -> None:
    """Wait for the agent to close the pipe, or to die; then end, at the latest after a while."""
    while lines.read(1):
        pass
    server.should_exit = True
    time.sleep(END_S)
    os._exit(1)


def _open(setup: dict[str, Any]) -> tuple[uvicorn.Server, socket.socket]:
    settings = _settings(setup["settings"])
    memory = _SPARE + 4 * settings.memory_bytes + 3 * settings.requests * settings.max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    room = Spool(Path(setup["room"]), SpoolWriter.of(setup["deposit"]))
    try:
        server = _server(settings, StowHandler(settings.terms(setup["token"]), room, time.monotonic))
    except (OSError, ssl.SSLError):
        raise StowError(
            "stow: certificate, key or client_ca cannot be used: check the files and their owner"
        ) from None
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return server, socket.create_server((settings.host, settings.port), family=family, backlog=64)
    except OSError:
        raise StowError("stow: cannot listen on host and port: check whether another program uses them") from None


def main() -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold patients' files
    logging.disable(logging.CRITICAL)
    lines = os.fdopen(os.dup(0), "rb")
    out = os.dup(1)
    reply: Callable[[bytes], int] = partial(os.write, out)
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
    os.close(out)  # nothing else is ever said: what comes from the network has no way there
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
