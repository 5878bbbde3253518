"""Flower's HTTP calls through the gRPC method ``Fleet``: the site has one connection, to one port.

This runs in the agent, for the link's process, which has no network (agent/federation/supernode_process.py). A
transport for `httpx`, in which Flower's client is written. Whatever goes wrong on the way is an
`httpx.TransportError`, so that callers need to know nothing of gRPC. No Flower here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import httpx

from agent.gateway.channel import of_another_root
from protos.federation import messages
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub

_CALL_S: Final = 30.0
_SLOWEST: Final = 1 << 16  # bytes a second: a body of 20 MB may take five minutes
_LARGE_REPLY: Final = "/v1/fleet/pull-object"
_LARGE: Final = 1 << 19  # bytes: of less, the way there and back is most of the time
_REPLY: Final = 2 * messages.PIECE  # bytes: a line that carries nothing is noticed within a minute
_STAGES: Final = {
    "/v1/fleet/pull-messages": "idle",
    "/v1/fleet/pull-object": "receiving",
    "/v1/fleet/push-messages": "sending",
    "/v1/fleet/push-object": "sending",
}
_BACK: Final = frozenset({"content-type"})
# Our certificate was not accepted: it has ended, was revoked, or is another's.
_TURNED_AWAY: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


class TurnedAway(httpx.TransportError):
    """The coordinator does not accept this site's certificate; a renewed one may be."""


class AnotherRoot(httpx.TransportError):
    """What answers has a certificate that this site's root does not vouch for."""


@dataclass(slots=True, eq=False)
class _Line:
    """A channel and how many calls are on it."""

    channel: grpc.Channel
    calls: int = 0


class FleetTransport(httpx.BaseTransport):
    """Requests as calls of ``Fleet`` on one channel, which can be opened anew between them."""

    def __init__(self, dial: Callable[[], grpc.Channel], greet: Callable[[], None] = lambda: None) -> None:
        """A line that is opened when it is needed.

        Args:
            dial: opens a channel with the credentials of that moment.
            greet: opens the session anew, in which a site shows the head of its ledger, where that is wanted.
        Raises:
            OSError, ValueError: the credentials cannot be used.
        """
        self._dial, self._greet, self._mutex = dial, greet, threading.Lock()
        self._line = _Line(dial())
        self._stale = False
        self.rate = 0.0  # bytes a second of the newest large reply; 0: there was none
        self.stage = "idle"  # what this site is at, one of `messages.STAGES`; the coordinator hears it with each call

    def renew(self) -> None:
        """Let the next call use a new channel; calls in flight end on the old one."""
        self._stale = True

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One call, to its end. Where the coordinator wants to be greeted first, it is, and the call is made again.

        Raises:
            TurnedAway: by the checks that the coordinator makes on every call.
            AnotherRoot: before a byte of the call left.
            httpx.TransportError: no answer in time, or one that is none.
        """
        path, body = request.url.path, request.read()
        reply_size = _REPLY if path == _LARGE_REPLY else 0
        deadline = _CALL_S + (len(body) + reply_size) / _SLOWEST
        headers = {name: value for name, value in request.headers.items() if name in messages.FLEET_HEADERS}
        self.stage = _STAGES.get(path, self.stage)
        headers[messages.STAGE] = self.stage
        with self._open() as channel:
            try:
                began = time.monotonic()
                try:
                    response = _response(GatewayStub(channel).Fleet(_parts(path, headers, body), timeout=deadline))
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.OUT_OF_RANGE:
                        raise
                    self._greet()  # after a line was cut: each refused try would carry a whole piece for nothing
                    began = time.monotonic()
                    response = _response(GatewayStub(channel).Fleet(_parts(path, headers, body), timeout=deadline))
            except grpc.RpcError as error:
                if error.code() in _TURNED_AWAY:
                    self.renew()
                    raise TurnedAway(error.code().name) from None
                if error.code() is grpc.StatusCode.UNAVAILABLE and of_another_root(error.details()):
                    self.renew()  # an enrolment anew brings another root
                    raise AnotherRoot(error.code().name) from None
                raise httpx.TransportError(error.code().name) from None  # its text is the other side's
        if len(response.content) > _LARGE:
            self.rate = len(response.content) / max(time.monotonic() - began, 1e-3)
        return response

    @contextlib.contextmanager
    def _open(self) -> Iterator[grpc.Channel]:
        """The channel for one call. A replaced one is closed when its last call has ended."""
        with self._mutex:
            if self._stale:
                fresh = _Line(self._redial())
                self._stale, old, self._line = False, self._line, fresh
                if not old.calls:
                    old.channel.close()
            line = self._line
            line.calls += 1
        try:
            yield line.channel
        finally:
            with self._mutex:
                line.calls -= 1
                if line is not self._line and not line.calls:
                    line.channel.close()

    def _redial(self) -> grpc.Channel:
        try:
            return self._dial()
        except (OSError, ValueError) as fault:  # being replaced at this moment, or broken: the next call tries again
            raise httpx.TransportError(type(fault).__name__) from None

    def close(self) -> None:
        """Hang up."""
        self._line.channel.close()


def _parts(path: str, headers: dict[str, str], body: bytes) -> Iterator[Any]:
    yield gateway_pb2.FleetPart(path=path, headers=headers)
    for at in range(0, len(body), messages.FLEET_PART):
        yield gateway_pb2.FleetPart(data=body[at : at + messages.FLEET_PART])


def _response(replies: Iterator[Any]) -> httpx.Response:
    """The reply, of bounded size.

    Raises:
        httpx.RemoteProtocolError: it has no status, or is too long.
    """
    first = next(iter(replies), None)
    if first is None or not 200 <= first.status <= 599:
        raise httpx.RemoteProtocolError("no status")
    body = bytearray()
    for part in replies:
        if len(body) + len(part.data) > messages.FLEET_BODY:
            raise httpx.RemoteProtocolError("too long")
        body += part.data
    headers = {name: value for name, value in first.headers.items() if name in _BACK}
    return httpx.Response(first.status, headers=headers, content=bytes(body))
