"""The two listeners in front of the embedded SuperLink: sockets, TLS and what may pass. No Flower here."""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Awaitable[None]]

KEY_HEADER: Final = "x-lazaret-private"
_MAX_BODY: Final = 32 << 20  # bytes of one public request; Flower cuts arrays into objects of 20 MB
# What an agent calls. Not among them: registering a node, fetching an app bundle.
_FLEET: Final = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "pull-object",
        "push-object",
        "confirm-message-received",
    )
)


class PublicGate:
    """ASGI filter of the public listener: the agents' Fleet calls and /health, bodies of bounded size."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """404 for every other path, 413 for a body of unknown or too great length."""
        path, method = scope.get("path"), scope.get("method")
        if scope["type"] != "http" or not (
            (method == "POST" and path in _FLEET) or (method == "GET" and path == "/health")
        ):
            await _refuse(scope, send, 404)
        elif method == "POST" and not _body_fits(scope):
            await _refuse(scope, send, 413)
        else:
            await self.app(scope, receive, send)


class PrivateGate:
    """ASGI filter of the private listener: this process only."""

    def __init__(self, app: App, key: str) -> None:
        self.app, self.key = app, key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """404 without the secret; the lifespan protocol passes."""
        given = dict(scope.get("headers", ())).get(KEY_HEADER.encode("ascii"), b"")
        if scope["type"] != "lifespan" and not hmac.compare_digest(given, self.key):
            await _refuse(scope, send, 404)
        else:
            await self.app(scope, receive, send)


def _body_fits(scope: Scope) -> bool:
    """Whether the request states a body length, and one within bounds."""
    stated = dict(scope["headers"]).get(b"content-length", b"")
    return stated.isdigit() and int(stated) <= _MAX_BODY


async def _refuse(scope: Scope, send: Callable[..., Any], status: int) -> None:
    """Answer with a bare status, or close a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def server_tls(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.3 only, with a client certificate of the federation's CA required."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def listen(address: tuple[str, int]) -> socket.socket:
    """A listening socket; closed and reopened at once after a crash of the process before."""
    return socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
