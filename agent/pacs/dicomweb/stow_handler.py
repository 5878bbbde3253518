"""Responses of the STOW-RS receiver (PS3.18 section 10.5): store instances of a request into the spool.

A bare ASGI application: Starlette was rejected, two paths need no router, and its request would hold the body.
A body is read only as fast as its parts are sealed. Nothing of it is parsed but the few elements that say which
instance a part is, so that the sender can be told; everything else is judged further in.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from agent.deidentify.errors import FileRejectedError
from agent.pacs.dicomweb.multipart import BodyLimits, BodyPart, MultipartError, Splitter, media_type
from agent.pacs.instance_header import Instance, instance_of, is_uid, study_of
from agent.storage.spool import ReceivedFile, Spool
from protos.common.errors import Signal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DICOM: Final = "application/dicom"
# PS3.18 table I.2-2, failure reasons
_NO_ROOM, _TOO_LARGE, _NOT_UNDERSTOOD, _OTHER_STUDY = 0xA700, 0xA701, 0xC000, 0xC409
_RETRY_S: Final = 60
_DRAIN_BYTES, _DRAIN_S = 4 * 2**20, 2.0  # read and forgotten, so that the answer is not lost with the connection
_STATUS: Final = {"malformed": 400, "too_large": 413, "unsupported": 415}


@dataclass(frozen=True, slots=True)
class StowLimits:
    """What senders may do."""

    root: str  # path of the service, "" or "/dicom-web"
    token: str = field(repr=False)  # "" when a client certificate was asked for instead
    limits: BodyLimits
    requests: int  # at a time
    memory_bytes: int  # of parts under way, all requests together
    least_free_bytes: int  # on the room's disk
    slowest: float  # bytes a second of a body, after the first seconds
    grace_s: float


class _Stopped(Signal):
    """The request ends with this status; 0: the sender has gone."""

    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


@dataclass(slots=True)
class _Outcome:
    """What became of the parts of one request."""

    stored: list[Instance] = field(default_factory=list)
    failed: list[tuple[Instance, int]] = field(default_factory=list)
    unnamed: list[int] = field(default_factory=list)  # reasons for parts which do not say what they are
    read: bool = False  # to the end of the body

    @property
    def reasons(self) -> set[int]:
        return {reason for _, reason in self.failed} | set(self.unnamed)

    def status(self) -> int:
        """PS3.18 table 10.5.3-1."""
        if not self.reasons:
            return 200 if self.stored else 400
        if self.stored:
            return 202
        return {frozenset({_NO_ROOM}): 503, frozenset({_TOO_LARGE}): 413}.get(frozenset(self.reasons), 409)

    def body(self) -> bytes:
        """The Store Instances Response Module in the DICOM JSON Model (PS3.18 sections 10.5.3.3, I.2, F.2)."""
        module = {
            "00081199": [_item(instance) for instance in self.stored],
            "00081198": [_item(instance, reason) for instance, reason in self.failed],
            "0008119A": [_item(None, reason) for reason in self.unnamed],
        }
        return json.dumps({tag: {"vr": "SQ", "Value": items} for tag, items in module.items() if items}).encode()


def _item(instance: Instance | None, reason: int | None = None) -> dict[str, Any]:
    item: dict[str, Any] = {}
    if instance is not None:
        item["00081150"] = {"vr": "UI", "Value": [instance.sop_class]}
        item["00081155"] = {"vr": "UI", "Value": [instance.sop_instance]}
    if reason is not None:
        item["00081197"] = {"vr": "US", "Value": [reason]}
    return item


class StowHandler:
    """The ASGI application."""

    def __init__(self, terms: StowLimits, room: Spool, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._terms, self._room, self._clock = terms, room, clock
        self._path = re.compile(re.escape(terms.root).encode() + rb"/studies(?:/([0-9.]{1,64}))?/?")
        self._token = hashlib.sha256(terms.token.encode()).digest() if terms.token else b""
        self._under_way: set[Splitter] = set()
        self._writers = ThreadPoolExecutor(terms.requests, "room")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        outcome = _Outcome()
        try:
            status = await self._answer(scope, receive, outcome)
        except _Stopped as stopped:
            status = stopped.status
        if not status:
            return
        headers = [(b"content-type", b"application/dicom+json"), (b"cache-control", b"no-store")]
        if status == 503:
            headers.append((b"retry-after", str(_RETRY_S).encode()))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if status not in (200, 202):
            headers.append((b"connection", b"close"))
            if not outcome.read:
                await self._drain(scope, receive)
        body = outcome.body()
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Message, receive: Receive, outcome: _Outcome) -> int:
        headers = _headers(scope["headers"])
        if not self._authorised(headers):
            return 401
        match = self._path.fullmatch(scope["raw_path"])
        study = (match[1] or b"").decode() if match else ""
        if match is None or (match[1] is not None and not is_uid(study)):
            return 404
        if scope["method"] != "POST":
            return 405
        splitter = self._splitter(headers)
        if len(self._under_way) >= self._terms.requests or not self._has_disk():
            return 503
        await self._store(receive, splitter, study, outcome)
        return outcome.status()

    def _splitter(self, headers: dict[str, str]) -> Splitter:
        """For the body that these headers announce."""
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _Stopped(415)  # a small body may unpack to any size
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18:
            raise _Stopped(400)
        if int(length) > self._terms.limits.total_bytes:
            raise _Stopped(413)
        try:
            said = media_type(headers.get("content-type", ""))
        except MultipartError as error:
            raise _Stopped(_STATUS[error.fault]) from None
        if said.root not in ("", DICOM):
            raise _Stopped(415)
        return Splitter(said.boundary, self._terms.limits)

    def _authorised(self, headers: dict[str, str]) -> bool:
        if not self._token:
            return True  # TLS let only holders of a certificate in
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).digest()
        return hmac.compare_digest(given, self._token) and scheme.lower() == "bearer"

    def _has_disk(self) -> bool:
        return shutil.disk_usage(self._room.folder).free > self._terms.least_free_bytes

    async def _store(self, receive: Receive, splitter: Splitter, study: str, outcome: _Outcome) -> None:
        self._under_way.add(splitter)
        try:
            async for piece in self._body(receive, outcome):
                for part in splitter.feed(piece):
                    await self._part(part, study, outcome)
                if sum(one.held for one in self._under_way) > self._terms.memory_bytes:
                    raise _Stopped(503)
            splitter.end()
        except MultipartError as error:
            raise _Stopped(_STATUS[error.fault]) from None
        finally:
            self._under_way.discard(splitter)

    async def _body(self, receive: Receive, outcome: _Outcome) -> AsyncIterator[bytes]:
        """The body in pieces. Only the time that the sender takes counts, not the room's."""
        waited, got, more = 0.0, 0, True
        while more:
            begun = self._clock()
            try:
                async with asyncio.timeout(self._terms.grace_s + got / self._terms.slowest - waited):
                    message = await receive()
            except TimeoutError:
                raise _Stopped(408) from None
            waited += self._clock() - begun
            if message["type"] != "http.request":
                raise _Stopped(0)
            piece, more = message.get("body", b""), message.get("more_body", False)
            got += len(piece)
            outcome.read = not more
            yield piece

    async def _part(self, part: BodyPart, study: str, outcome: _Outcome) -> None:
        """Keep one part, or say why not."""
        if part.media_type not in ("", DICOM):
            outcome.unnamed.append(_NOT_UNDERSTOOD)
            return
        try:
            instance = instance_of(part.body)
        except FileRejectedError:
            outcome.unnamed.append(_NOT_UNDERSTOOD if part.whole else _TOO_LARGE)
            return
        reason = _TOO_LARGE
        if part.whole:
            reason = (
                _OTHER_STUDY
                if study and study_of(part.body, instance) != study
                else await self._keep(part.body, instance)
            )
        if reason:
            outcome.failed.append((instance, reason))
        else:
            outcome.stored.append(instance)

    async def _keep(self, body: bytes, instance: Instance) -> int:
        """0, or a failure reason."""
        if not self._has_disk():
            return _NO_ROOM
        try:
            arrival = ReceivedFile("stow", "stow", body, instance=instance.sop_instance)
            await asyncio.get_running_loop().run_in_executor(self._writers, self._room.put, arrival)
        except (OSError, MemoryError):
            return _NO_ROOM
        return 0

    async def _drain(self, scope: Message, receive: Receive) -> None:
        """Read on for a moment: closed at once, the connection might be reset before the answer is read."""
        if b"expect" in {name for name, _ in scope["headers"]}:
            return  # the sender waits for the answer before it sends the body
        got = 0
        try:
            async with asyncio.timeout(_DRAIN_S):
                while got < _DRAIN_BYTES:
                    message = await receive()
                    got += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return


def _headers(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by name; one that comes twice counts as a text that is valid nowhere."""
    found: dict[str, str] = {}
    for name, value in raw:
        key = name.decode("latin-1").lower()
        found[key] = "\0" if key in found else value.decode("latin-1")
    return found
