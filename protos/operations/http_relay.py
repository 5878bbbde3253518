"""Make HTTP calls for a confined process that has no socket of its own.

The process speaks HTTP through :class:`RelayedTransport`, which sends each request over an inherited pair of sockets.
:class:`Relay`, in the parent process, makes the call with its own client, which has one fixed address, adds the
credentials, and returns the response. So the confined process needs no network and no key, and can reach only that
one server.

A message is a number, which the answer repeats, the lengths of a JSON object and of a body, and both.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

from protos.common.errors import UnreachableError

_FRONT: Final = struct.Struct(">IIQ")  # number, bytes of the JSON object, of the body
_MAX_HEAD: Final = 1 << 16  # bytes
_AT_ONCE: Final = 8  # calls; further ones wait in the pipe
_PATH: Final = re.compile(r"(/[A-Za-z0-9_-]{1,64}){1,8}")
_HEADER: Final = re.compile(r"[a-z0-9-]{1,64}")
_OWN: Final = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding"})
_DECODED: Final = frozenset({"content-length", "content-encoding", "transfer-encoding"})


def read_whole(response: httpx.Response) -> None:
    """For the hooks of an httpx client: a response is read at once, and its bytes go as soon as nobody wants them.

    Else it stands in a ring with its own stream, and stays until Python looks for such rings: many pieces of a model.
    """
    response.read()
    response.stream = httpx.ByteStream(b"")


HOOKS: Final[dict[str, list[Callable[..., Any]]]] = {"response": [read_whole]}


class RelayError(UnreachableError, ValueError):
    """The request from the pipe is not a permitted call."""


def _send(end: socket.socket, number: int, head: Mapping[str, Any], body: bytes) -> None:
    told = json.dumps(head, separators=(",", ":")).encode()
    end.sendall(_FRONT.pack(number, len(told), len(body)) + told)
    end.sendall(body)


def _receive(end: socket.socket, most: int) -> tuple[int, dict[str, Any], bytes]:
    """One message. Raises: OSError or EOFError, the other end is gone; RelayError, it is none, or too long."""
    number, size, length = _FRONT.unpack(_exactly(end, _FRONT.size))
    if size > _MAX_HEAD or length > most:
        raise RelayError("too long")
    told, body = _exactly(end, size), _exactly(end, length)
    try:
        head = json.loads(told)
    except (ValueError, RecursionError):
        raise RelayError("not a message") from None
    if not isinstance(head, dict):
        raise RelayError("not a message")
    return number, head, body


def _exactly(end: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        part = end.recv(min(size - len(got), 1 << 20))
        if not part:
            raise EOFError
        got += part
    return bytes(got)


class RelayedTransport(httpx.BaseTransport):
    """The confined process's end: a transport for an ``httpx`` client. Any thread."""

    def __init__(
        self, end: socket.socket, most: int, faults: Mapping[str, type[httpx.TransportError]] | None = None
    ) -> None:
        """Nothing is sent, and no thread started, before the first request.

        Args:
            end: of the pair of sockets.
            most: bytes of an answer's body.
            faults: what to raise for a fault that the other end names; for others ``httpx.TransportError``.
        """
        self._end, self._most, self._faults = end, most, faults or {}
        self._mutex, self._number, self._gone = threading.Lock(), 0, False
        self._waiting: dict[int, queue.SimpleQueue[tuple[dict[str, Any], bytes] | None]] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One call, to its end.

        Raises:
            httpx.TransportError: it could not be made, or the other end is gone.
        """
        body = request.read()
        headers = {k: v for k, v in request.headers.items() if k not in _OWN}
        answered: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        with self._mutex:
            if self._gone:
                raise httpx.TransportError("the relay is gone")
            if not self._number:
                threading.Thread(target=self._listen, name="relay", daemon=True).start()
            self._number += 1
            self._waiting[self._number] = answered
            try:
                _send(self._end, self._number, {"path": request.url.path, "headers": headers}, body)
            except OSError:
                raise httpx.TransportError("the relay is gone") from None
        answer = answered.get()
        if answer is None:
            raise httpx.TransportError("the relay is gone")
        head, content = answer
        if "fault" in head:
            raise self._faults.get(head["fault"], httpx.TransportError)(head["fault"])
        return httpx.Response(head["status"], headers=head["headers"], content=content)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError, RelayError, KeyError):
            while True:
                number, head, body = _receive(self._end, self._most)
                self._waiting.pop(number).put((head, body))
        with self._mutex:
            self._gone = True
            for waiting in self._waiting.values():
                waiting.put(None)


class Relay:
    """The other end: makes the calls until it is closed or the process is gone."""

    def __init__(
        self, end: socket.socket, client: httpx.Client, most: int, proof: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        """Start answering, in threads.

        Args:
            end: of the pair of sockets.
            client: makes the calls, with a base address; its owner closes it.
            most: bytes of a request's body.
            proof: headers that each call gets, above what the process says.
        """
        self._end, self._client, self._most, self._proof = end, client, most, proof
        self._mutex, self._turns = threading.Lock(), threading.BoundedSemaphore(_AT_ONCE)
        self._pool = ThreadPoolExecutor(_AT_ONCE, "relay")
        threading.Thread(target=self._listen, name="relay", daemon=True).start()

    def close(self) -> None:
        """Make no further call. One that is being made ends by itself, and its answer is lost."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _listen(self) -> None:
        with self._end, contextlib.suppress(OSError, EOFError, RelayError, RuntimeError):
            while True:
                number, head, body = _receive(self._end, self._most)
                path, headers = _read(head)
                self._turns.acquire()
                self._pool.submit(self._answer, number, path, headers, body)

    def _answer(self, number: int, path: str, headers: dict[str, str], body: bytes) -> None:
        told: dict[str, Any]
        content = b""
        try:
            response = self._client.post(path, headers={**headers, **self._proof()}, content=body)
            back = {k: v for k, v in response.headers.items() if k not in _DECODED}
            told, content = {"status": response.status_code, "headers": back}, response.content
        except Exception as fault:  # noqa: BLE001 - the process waits; an exception's text may hold anything
            told = {"fault": type(fault).__name__}
        finally:
            self._turns.release()
        with self._mutex, contextlib.suppress(OSError):
            _send(self._end, number, told, content)


def _read(head: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Path and headers of a call; the process that asks for it has read foreign bytes.

    Raises:
        RelayError: they are none.
    """
    path, headers = head.get("path"), head.get("headers")
    if not (isinstance(path, str) and _PATH.fullmatch(path) and isinstance(headers, dict)):
        raise RelayError("not a call")
    for name, value in headers.items():
        right = _HEADER.fullmatch(name) and name not in _OWN and isinstance(value, str)
        if not (right and value.isascii() and value.isprintable()):
            raise RelayError("not a header")
    return path, headers
