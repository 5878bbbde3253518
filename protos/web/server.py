"""A console's listener: uvicorn in a thread of its own, TLS, and who the peer is; and a plain one for metrics.

What uvicorn leaves open is closed here: how many connections there are, counted before anything is made of one (the
process that serves holds a ledger, and needs files to open); how long a handshake, a request and the reading of an
answer may take; and the client's certificate, which it does not hand on.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import logging
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import h11
import uvicorn
from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

from protos.web.client_certificates import PinnedCertificates
from protos.web.security import HEADER_BYTES, App, ConsoleGuard, Receive, Scope, Send, host_of
from protos.web.settings import ConsoleConfigError, ConsoleSettings, split
from protos.web.tls import own_certificate

_HANDSHAKE_S: Final = 3.0  # of TLS; and to say goodbye
_HEADER_S: Final = 10.0  # to say a request's headers
_PLAIN_S: Final = 2.0  # the same of the plain listener, whose callers are programs nearby
_READ_S: Final = 60.0  # to take what an answer has sent so far
_IDLE_S: Final = 15  # between two requests of one connection
_CONNECTIONS: Final = 96
_EACH: Final = 32  # of one address; a browser opens six
_END_S: Final = 5.0  # a listener closes within
_START_S: Final = 30.0


class _Gate(socket.socket):
    """A listening socket. One connection too many is closed at once: nothing is made of it, TLS least of all."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(fileno=socket.create_server((host, port), family=family, backlog=64).detach())
        # inherited by every connection: else each answer waits some 40 ms for an acknowledgement (RFC 9293, 3.7.4)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._taken: weakref.WeakKeyDictionary[socket.socket, str] = weakref.WeakKeyDictionary()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection.

        Raises:
            ConnectionAbortedError: it was one too many; the loop comes back for the next one.
        """
        connection, address = super().accept()
        hosts = [host for known, host in self._taken.items() if known.fileno() >= 0]
        if len(hosts) >= _CONNECTIONS or hosts.count(address[0]) >= _EACH:
            connection.close()
            raise ConnectionAbortedError
        self._taken[connection] = address[0]
        return connection, address


class _Door(H11Protocol):
    """One connection: it speaks and listens, or it is closed; the scope's state holds the certificate it showed."""

    def __init__(self, *, header_s: float, **usual: Any) -> None:
        super().__init__(**usual)
        self._header_s = header_s
        self._late: Any = None  # the timer of a request that is not said yet
        self._deaf: Any = None  # the timer of an answer that is not read

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        shown = tls.getpeercert(binary_form=True) if tls is not None else None
        self.app_state = {**self.app_state, "peer": shown or b""}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """A clock runs while a request's headers are awaited; a body has the guard's."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self._late is None:
            self._late = self.loop.call_later(self._header_s, self.transport.abort)
        elif not waits:
            self._calm()

    def _calm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deaf = self._deaf or self.loop.call_later(_READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._heard()
        super().resume_writing()

    def _heard(self) -> None:
        if self._deaf is not None:
            self._deaf.cancel()
            self._deaf = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        self._heard()
        super().connection_lost(exc)


class ServerThread:
    """A uvicorn server in a thread, on a socket that listens already, while the context lasts."""

    def __init__(self, app: App, listener: socket.socket, tls: ssl.SSLContext | None, name: str) -> None:
        """Nothing is answered yet. ``name``: of the thread."""
        for logger in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logging.getLogger(logger).disabled = True  # an error's text may quote what was sent
        more: dict[str, Any] = {"ssl_context_factory": lambda _config, _usual: tls} if tls is not None else {}
        config = uvicorn.Config(
            app,
            http=partial(_Door, header_s=_PLAIN_S if tls is None else _HEADER_S),  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=HEADER_BYTES,
            **more,
        )
        config.load()
        self._server, self._listener = uvicorn.Server(config), listener
        bound = listener.getsockname()
        self.port = int(bound[1]) if isinstance(bound, tuple) else 0  # a Unix socket has none
        self._thread = threading.Thread(
            target=self._run, args=(tls is not None,), name=f"lazaret-{name}", daemon=True
        )

    def _run(self, tls: bool) -> None:
        async def serve() -> None:
            loop: Any = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _loop, _context: None)  # a peer's broken TLS is nobody's news
            if tls:
                loop.create_server = partial(
                    loop.create_server, ssl_handshake_timeout=_HANDSHAKE_S, ssl_shutdown_timeout=_HANDSHAKE_S
                )
            await self._server.serve(sockets=[self._listener])

        with contextlib.suppress(Exception):
            asyncio.run(serve())

    def __enter__(self) -> Self:
        """Start; it answers when this returns."""
        self._thread.start()
        done = threading.Event()
        for _ in range(int(_START_S * 100)):
            if self._server.started or not self._thread.is_alive() or done.wait(0.01):
                break
        if not self._server.started:
            raise ConsoleConfigError("the console does not start")
        return self

    def __exit__(self, *_exc: object) -> None:
        """Let requests under way end, for five seconds at most; harmless when it does not run."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_END_S)
        self._server.force_exit = True
        self._listener.close()


def _listen(address: str, name: str) -> _Gate:
    """Take a port.

    Raises:
        ConsoleConfigError: it is taken.
    """
    try:
        return _Gate(*split(address))
    except OSError:
        raise ConsoleConfigError(f"{name}: {address} cannot be listened on; does another program do so?") from None


class ConsoleServer(ServerThread):
    """A console that is reached over TLS, from entering the context until leaving it."""

    def __init__(self, app: ConsoleGuard, settings: ConsoleSettings, logins: PinnedCertificates, home: Path) -> None:
        """Load its certificate and take its port.

        Args:
            app: :meth:`protos.web.router.Router.guarded`.
            settings: of ``console.toml``.
            logins: whose certificates are taken.
            home: where ``keys/`` lies, for the certificate that is made when none is configured.
        Raises:
            ConsoleConfigError: the certificate or the port cannot be used.
        """
        own = own_certificate(home / "keys", settings, dt.datetime.now(dt.UTC))
        try:
            tls = logins.context(own.chain, own.key)
        except (OSError, ssl.SSLError):
            raise ConsoleConfigError(
                "console: certificate and key cannot be used: check the files, whose they are, and that they belong "
                "together"
            ) from None
        self.fingerprint = own.fingerprint  # SHA-256 in hexadecimal, of what browsers are shown
        self.ends = own.ends
        super().__init__(app, _listen(settings.listen, "console"), tls, "console")


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """The response of a path of the plain listener."""

    status: int
    body: bytes
    media_type: str = "text/plain; charset=utf-8"


class PlainServing(ServerThread):
    """Metrics and health over plain HTTP, for the machines that watch this one: sums and yes or no, no pages."""

    def __init__(
        self, address: str, answers: Mapping[str, Callable[[], PlainAnswer]], names: Iterable[str] = ()
    ) -> None:
        """Take the port.

        Args:
            address: host:port.
            answers: path -> what it says now; each runs in a thread.
            names: under which it is reached beside addresses, ``localhost`` and names without a dot.
        Raises:
            ConsoleConfigError: the port cannot be used.
        """
        super().__init__(_Plain(answers, frozenset(names)), _listen(address, "metrics"), None, "metrics")


class _Plain:
    """GET of a few paths. A page of another site, that gave itself this host's address, is not answered."""

    def __init__(self, answers: Mapping[str, Callable[[], PlainAnswer]], names: frozenset[str]) -> None:
        self._answers, self._names = answers, names

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = PlainAnswer(404, b"no such path\n")
        if not self._may(dict(scope["headers"])):
            answer = PlainAnswer(421, b"not reached under that name\n")
        elif scope["method"] not in ("GET", "HEAD"):
            answer = PlainAnswer(405, b"only GET\n")
        elif scope["path"] in self._answers:
            try:
                answer = await run_in_threadpool(self._answers[scope["path"]])
            except Exception:  # noqa: BLE001 - what cannot be told is not healthy, and nothing of its text leaves
                answer = PlainAnswer(500, b"internal fault\n")
        headers = [
            (b"content-type", answer.media_type.encode()),
            (b"content-length", b"%d" % len(answer.body)),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})

    def _may(self, headers: Mapping[bytes, bytes]) -> bool:
        host = host_of({"host": [headers.get(b"host", b"").decode("latin-1")]})
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return True
        return host in self._names or (bool(host) and "." not in host)
