"""Checks on every request before any page, and on every response: hosts, sizes, origins, headers.

A middleware of plain ASGI, outermost. What it refuses costs no session, no ledger and no template; what fails inside
it becomes an incident number, and nothing of the fault's text leaves.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from protos.common.errors import PeerError
from protos.web.settings import is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES: Final = 4 << 20  # of one request: a form with an approval or a policy in it
STRANGER_BYTES: Final = 16_384  # of a request by nobody who is logged in, and of what logs in or out
BODY_S: Final = 30.0  # to say it
TARGET_BYTES: Final = 4_096  # of path and query
HEADER_BYTES: Final = 16_384  # of request line and headers
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=(), usb=(), payment=()"),
)
_SAME: Final = {"same-origin", "none"}  # none: the person typed the address, or opened a bookmark


class RateLimit:
    """So many tries of each address in a while; the rest wait."""

    def __init__(self, most: int, within_s: float, clock: Callable[[], float]) -> None:
        """``clock``: seconds that never go back."""
        self._most, self._within, self._clock = most, within_s, clock
        self._tries: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def allows(self, address: str) -> bool:
        """Count a try; whether it may go on."""
        now = self._clock()
        with self._lock:
            for known in [a for a, tries in self._tries.items() if not now - tries[-1] < self._within]:
                del self._tries[known]
            tries = [at for at in self._tries.get(address, []) if now - at < self._within]
            if len(tries) >= self._most:
                return False
            self._tries[address] = [*tries, now]
        return True


class RequestRefusedError(PeerError):
    """The request goes no further."""

    def __init__(self, status: int, rule: str, sentence: str) -> None:
        """``rule``: for the log; ``sentence``: for the person."""
        super().__init__(sentence)
        self.status, self.rule, self.sentence = status, rule, sentence


class ConsoleGuard:
    """The outermost layer of a console."""

    def __init__(self, app: App, names: Iterable[str], log: Any, known: Callable[[Scope], bool]) -> None:
        """Around an application.

        Args:
            app: what answers.
            names: the hosts that are answered, without ports.
            log: hears of what is refused.
            known: whether a request is of somebody who is logged in, and may be large.
        """
        self._app, self._names, self._log, self._known = app, frozenset(names), log, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request, hand it on, and dress the answer."""
        if scope["type"] != "http":
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        dressed = _Dressed(send, _hsts(headers))
        try:
            _check(scope, headers, self._names)
            body = b""
            if scope["method"] == "POST":
                body = await read_body(headers, receive, BODY_BYTES if self._known(scope) else STRANGER_BYTES)
            await self._app(scope, replay(body, receive), dressed)
        except RequestRefusedError as refused:
            self._log.warning("console_refused", rule=refused.rule, state=str(refused.status))
            await dressed.plain(refused.status, refused.sentence)
        except Exception as fault:  # noqa: BLE001 - nothing of it leaves, nothing of it stops the console
            if not dressed.started:
                incident = secrets.token_hex(4)
                self._log.error("console_incident", rule=incident, state=type(fault).__name__)
                await dressed.plain(500, f"Internal fault, incident {incident}: the log has it under this number.")


def _hsts(headers: dict[str, list[str]]) -> bool:
    """Not for this machine's own names: it would hold for every other program on it."""
    host = host_of(headers)
    return bool(host) and not is_loopback(host)


def host_of(headers: Mapping[str, list[str]]) -> str:
    """The host that a request names, without its port; "" for none, or for several."""
    hosts = headers.get("host", [])
    host = hosts[0].lower() if len(hosts) == 1 else ""
    name, colon, port = host.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        host = name
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _check(scope: Scope, headers: dict[str, list[str]], names: frozenset[str]) -> None:
    # the server below bounds headers only while their end has not come: what comes whole in one read is larger
    if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
        raise RequestRefusedError(431, "headers", "The headers of the request are too large.")
    if host_of(headers) not in names:
        raise RequestRefusedError(421, "host", "This console is not reached under that name: ask for its address.")
    if scope["method"] not in ("GET", "POST"):
        raise RequestRefusedError(405, "method", "Pages are read with GET and forms sent with POST.")
    target = scope.get("raw_path", b"") + b"?" + scope["query_string"]
    said = unquote_to_bytes(target)
    try:
        said.decode()
    except UnicodeDecodeError:
        said = b"\0"
    if len(target) > TARGET_BYTES or any(byte < 32 or byte == 127 for byte in said):
        raise RequestRefusedError(400, "target", "That is not an address of this console.")
    _check_origin(scope["method"], headers)


def _check_origin(method: str, headers: dict[str, list[str]]) -> None:
    """Another site's page may open this console in a window, and nothing else: no form, no image, no script."""
    site, mode = headers.get("sec-fetch-site", []), headers.get("sec-fetch-mode", [])
    origin = headers.get("origin", [])
    if method == "GET":
        foreign = site and not set(site) <= _SAME
        if foreign and (mode != ["navigate"] or headers.get("sec-fetch-dest", ["document"]) != ["document"]):
            raise RequestRefusedError(403, "cross_site", "Another site's page cannot read this console.")
        return
    ours = [f"https://{headers['host'][0].lower()}"]
    # a browser that says where a form is from hides the origin of a page without referrers; an older one says it
    known = site == ["same-origin"] and origin in ([], ["null"], ours)
    if not (known or (not site and origin == ours)):
        raise RequestRefusedError(
            403, "cross_site", "A form of this console is sent from its own page only: open the page again."
        )


async def read_body(headers: dict[str, list[str]], receive: Receive, most: int) -> bytes:
    """The body of a request, whole.

    Raises:
        RequestRefusedError: longer than ``most`` bytes, slower than ``BODY_S``, cut short, or of no stated length.
    """
    told = headers.get("content-length", ["0"])
    if len(told) != 1 or not told[0].isascii() or not told[0].isdigit():
        raise RequestRefusedError(400, "length", "The request is malformed.")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            more = int(told[0]) <= most
            while more and len(body) <= most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestRefusedError(400, "cut_short", "The request was cut short.")
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise RequestRefusedError(408, "slow", "The request took too long.") from None
    if more or int(told[0]) > most or len(body) > most:
        if most < BODY_BYTES:
            raise RequestRefusedError(
                413, "too_large", f"A form holds at most {most >> 10} KiB without a login: log in again."
            )
        raise RequestRefusedError(413, "too_large", f"A form holds at most {most >> 20} MiB.")
    return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """What gives a body that was read already once more."""
    told = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class _Dressed:
    """Answers with the headers that every answer has."""

    def __init__(self, send: Send, hsts: bool) -> None:
        self._send, self._hsts, self.started = send, hsts, False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            given = [(name.lower(), value) for name, value in message.get("headers", [])]
            names = {name for name, _ in given}
            more = [*HEADERS, *([(b"strict-transport-security", b"max-age=31536000")] if self._hsts else [])]
            if b"cache-control" not in names:
                more.append((b"cache-control", b"no-store"))
            fixed = {name for name, _ in HEADERS}
            message = {**message, "headers": [pair for pair in given if pair[0] not in fixed] + more}
        await self._send(message)

    async def plain(self, status: int, sentence: str) -> None:
        """A short answer without a page; nothing when a page has begun."""
        if self.started:
            return
        body = f"{sentence}\n".encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
        # what was not read of a body would be taken for the next request
        headers.append((b"connection", b"close"))
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})
