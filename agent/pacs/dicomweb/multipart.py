"""multipart/related (RFC 2046 section 5.1, RFC 2387) taken apart as it arrives, in bounded memory.

Both directions of DICOMweb send instances so (PS3.18 section 8.6.1.2). Neither an event loop nor a socket is known
here: bytes go in, whole parts come out. ``dicomweb-client`` was rejected for it (it copies every part twice and sets
no limit), ``requests-toolbelt`` and the standard library's ``email`` hold the whole body, and ``python-multipart``
is made for forms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from email.message import Message
from typing import Final, Literal

from protos.common.errors import PeerError

_LINE: Final = b"\r\n"
_MAX_TYPE: Final = 1024  # characters of a Content-Type header
_MAX_PADDING: Final = 256  # bytes of blanks after a boundary
_GLIMPSE: Final = 65_536  # bytes kept of a part that is too large: enough to say which one it was
# RFC 2046 section 5.1.1 allows 70 characters; Orthanc sends 73
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,199}[0-9A-Za-z'()+_,\-./:=?]")
_PARAMETER: Final = re.compile(r"[\x20-\x7e\t]*")

Fault = Literal["malformed", "too_large", "unsupported"]


class MultipartError(PeerError, ValueError):
    """The body is not multipart/related, or goes beyond a limit. Nothing of the body is in it."""

    def __init__(self, fault: Fault) -> None:
        """``fault``: malformed, too_large (a limit), or unsupported (another media type)."""
        super().__init__(f"multipart body: {fault}")
        self.fault: Fault = fault


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What one body may hold."""

    part_bytes: int = 512 * 2**20  # a larger part is skipped: one bad file is one lost file
    total_bytes: int = 64 * 2**30
    parts: int = 100_000
    header_bytes: int = 8192  # of one part
    preamble_bytes: int = 65_536  # before the first boundary

    def __post_init__(self) -> None:
        """All positive."""
        if not all(n > 0 for n in (self.part_bytes, self.total_bytes, self.parts, self.header_bytes)):
            raise ValueError("limits must be positive")


@dataclass(frozen=True, slots=True)
class BodyPart:
    """One part."""

    media_type: str  # lower case, without parameters; "" when it says none
    body: bytes = field(repr=False)  # whole, or its first bytes
    whole: bool  # False: it was larger than allowed, and was skipped


@dataclass(frozen=True, slots=True)
class MediaType:
    """A Content-Type header of multipart/related."""

    boundary: str
    root: str  # the "type" parameter, lower case; "" when absent


def media_type(header: str) -> MediaType:
    """Read a Content-Type header.

    Raises:
        MultipartError: ``unsupported`` when it is not multipart/related, ``malformed`` without a usable boundary.
    """
    if len(header) > _MAX_TYPE or not _PARAMETER.fullmatch(header):
        raise MultipartError("malformed")
    message = Message()
    message["content-type"] = header
    if message.get_content_type() != "multipart/related":
        raise MultipartError("unsupported")
    boundary, root = message.get_param("boundary"), message.get_param("type", "")
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary) or not isinstance(root, str):
        raise MultipartError("malformed")
    return MediaType(boundary, root.strip().lower())


class Splitter:
    """Takes a body in pieces of any size and gives back its parts."""

    def __init__(self, boundary: str, limits: BodyLimits) -> None:
        """``boundary`` as ``media_type`` found it."""
        # The line break before a boundary belongs to it; the body's first boundary may stand without one.
        self._border, self._limits = b"\r\n--" + boundary.encode("ascii"), limits
        self._buffer = bytearray(_LINE)
        self._seen = 0  # where the search goes on
        self._state = self._preamble
        self._total = self._parts = 0
        self._type, self._glimpse = "", b""
        self._too_large = False
        self._out: list[BodyPart] = []
        self._fault: MultipartError | None = None
        self.done = False

    @property
    def held(self) -> int:
        """Bytes that are kept here."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[BodyPart]:
        """The parts that this piece completes.

        Raises:
            MultipartError: an earlier piece broke the format or a limit; its whole parts were given out before.
        """
        if self._fault is not None:
            raise self._fault
        self._total += len(data)
        self._buffer += data
        try:
            if not self._total <= self._limits.total_bytes:
                raise MultipartError("too_large")
            while self._state():
                pass
        except MultipartError as fault:
            self._fault = fault
            self._buffer.clear()
        parts, self._out = self._out, []
        return parts

    def end(self) -> None:
        """Say that the body has ended.

        Raises:
            MultipartError: it broke the format or a limit, or the last boundary has not come.
        """
        if self._fault is not None:
            raise self._fault
        if not self.done:
            raise MultipartError("malformed")

    def _preamble(self) -> bool:
        at = self._buffer.find(self._border, self._seen)
        if at < 0:
            self._seen = max(0, len(self._buffer) - len(self._border) + 1)
        if max(at, self._seen) > self._limits.preamble_bytes:
            raise MultipartError("malformed")
        if at < 0:
            return False
        self._pass(at + len(self._border))
        self._state = self._after_border
        return True

    def _after_border(self) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            self.done = True
            self._state = self._epilogue
            return True
        end = self._buffer.find(_LINE, 0, _MAX_PADDING)
        if self._buffer[: max(end, 0)].strip(b" \t") or (end < 0 and len(self._buffer) >= _MAX_PADDING):
            raise MultipartError("malformed")
        if end < 0:
            return False
        self._parts += 1
        if not self._parts <= self._limits.parts:
            raise MultipartError("too_large")
        self._pass(end)  # the line's end stays: without headers, the empty line comes at once
        self._state = self._headers
        return True

    def _headers(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._seen, self._limits.header_bytes + 4)
        if end < 0:
            if len(self._buffer) >= self._limits.header_bytes + 4:
                raise MultipartError("too_large")
            self._seen = max(0, len(self._buffer) - 3)
            return False
        self._type = _type_of(bytes(self._buffer[:end]))
        self._pass(end + 2)  # an empty part's boundary begins with the line break that ends its headers
        self._seen = 0
        self._state, self._too_large, self._glimpse = self._body, False, b""
        return True

    def _body(self) -> bool:
        # The two bytes in front are the empty line's; the border cannot be found before them.
        at = self._buffer.find(self._border, self._seen)
        most = self._limits.part_bytes
        if at < 0:
            self._seen = max(0, len(self._buffer) - len(self._border) + 1)
            if self._too_large or self._seen - 2 > most:
                self._skip()
            return False
        if self._too_large or at - 2 > most:
            self._glimpse = self._glimpse or bytes(self._buffer[2 : min(at, _GLIMPSE + 2)])
            self._out.append(BodyPart(self._type, self._glimpse, whole=False))
        else:
            with memoryview(self._buffer) as view:
                self._out.append(BodyPart(self._type, bytes(view[2:at]), whole=True))
        self._pass(at + len(self._border))
        self._state = self._after_border
        return True

    def _skip(self) -> None:
        """Forget what came of a part that is too large, but for its first bytes and what may begin a boundary."""
        if not self._too_large:
            self._too_large, self._glimpse = True, bytes(self._buffer[2 : min(self._seen, _GLIMPSE + 2)])
        del self._buffer[: self._seen]
        self._seen = 0

    def _epilogue(self) -> bool:
        self._buffer.clear()  # RFC 2046: to be ignored; the total is still bounded
        return False

    def _pass(self, count: int) -> None:
        del self._buffer[:count]
        self._seen = 0


def _type_of(headers: bytes) -> str:
    """The media type that a part's headers say, "" when they say none."""
    for line in headers.split(_LINE):
        name, colon, value = line.partition(b":")
        if colon and name.strip().lower() == b"content-type":
            return value.partition(b";")[0].strip().lower().decode("ascii", "replace")
    return ""
