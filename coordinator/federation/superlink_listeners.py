"""Listeners of the embedded SuperLink: its loopback listener, and calls without a socket. No Flower here."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Awaitable[None]]

KEY_HEADER: Final = "x-lazaret-private"
# What the process of a run calls, as the task it stands in for: neither starting runs nor claiming tasks.
_TASK: Final = frozenset(
    f"/v1/runtime/{call}"
    for call in (
        "pull-task-input",
        "push-task-output",
        "send-task-heartbeat",
        "get-nodes",
        "push-messages",
        "push-object",
        "pull-messages",
        "pull-object",
        "confirm-message-received",
    )
)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Where the SuperLink keeps its state and listens. Port 0 picks a free one."""

    state: Path  # a directory, made with mode 0700; updates lie in it in clear while a round is open
    private: tuple[str, int] = ("127.0.0.1", 0)

    def __post_init__(self) -> None:
        """The private listener must not be reachable from another machine."""
        if not ipaddress.ip_address(self.private[0]).is_loopback:
            raise ValueError("private: must be a loopback address such as 127.0.0.1")


class PrivateGate:
    """ASGI filter of the private listener: this process, and for a task's calls the processes of its runs."""

    def __init__(self, app: App, key: str, task_keys: Collection[str]) -> None:
        """``key`` opens everything, each of ``task_keys``, which come and go, a task's calls."""
        self.app, self.key, self.task_keys = app, key, task_keys

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """404 without the secret; the lifespan protocol passes."""
        given = dict(scope.get("headers", ())).get(KEY_HEADER.encode("ascii"), b"")
        keys = {self.key, *self.task_keys} if scope.get("path") in _TASK else {self.key}
        if scope["type"] != "lifespan" and not any(hmac.compare_digest(given, key.encode()) for key in keys):
            await _refuse(scope, send, 404)
        else:
            await self.app(scope, receive, send)


async def _refuse(scope: Scope, send: Callable[..., Any], status: int) -> None:
    """Answer with a bare status, or close a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def exchange(app: App, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
    """One POST to ``app`` without a socket; runs on the application's event loop.

    Returns:
        HTTP status and body.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [
            *((name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()),
            (b"content-length", str(len(body)).encode("ascii")),
        ],
        "client": None,
        "server": None,
        "state": {},
    }
    status, answer, asked, over = 500, bytearray(), False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answer.extend(message.get("body", b""))
            if not message.get("more_body", False):
                over.set()

    await app(scope, receive, send)
    return status, bytes(answer)


def listen(address: tuple[str, int]) -> socket.socket:
    """A listening socket; closed and reopened at once after a crash of the process before."""
    return socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
