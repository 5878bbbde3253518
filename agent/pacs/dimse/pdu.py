"""DICOM protocol data units (PS3.8 section 9.3), each read within a length and a time."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Final

from protos.common.errors import Signal

RQ, AC, RJ, DATA, RELEASE_RQ, RELEASE_RP, ABORT = range(1, 8)  # PS3.8 section 9.3.1
MAX_REQUEST: Final = 65536  # bytes of an A-ASSOCIATE-RQ; 128 contexts of 30 syntaxes are a fifth of it


class AssociationEnded(Signal):
    """The association is over. ``code`` is an event's; ``abort`` the source and reason to tell, None for silence."""

    def __init__(self, code: str, abort: tuple[int, int] | None = None) -> None:
        """See the class."""
        super().__init__(code)
        self.code, self.abort = code, abort


MALFORMED: Final = (2, 6)  # PS3.8 section 9.3.8: the provider, invalid parameter value


UNEXPECTED: Final = (2, 2)


UNKNOWN: Final = (2, 1)


class PduStream:
    """Protocol data units of one connection, each within a length and a time."""

    def __init__(self, sock: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a connected socket, TLS or not."""
        self._sock, self._clock = sock, clock
        self._buffer = bytearray(MAX_REQUEST + 6)
        sock.settimeout(1.0)
        self._flags = 0
        if not isinstance(sock, ssl.SSLSocket):
            # One system call for a whole unit: the kernel waits for all of it, a second at a time
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
            self._flags = socket.MSG_WAITALL
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _into(self, view: memoryview) -> int:
        try:
            count = self._sock.recv_into(view, len(view), self._flags)
        except (BlockingIOError, TimeoutError):
            return 0
        except OSError:
            raise AssociationEnded("connection_lost") from None
        if count == 0:
            raise AssociationEnded("connection_lost")
        return count

    def read(
        self, cap: int, idle: float, whole: float, stopping: Callable[[], bool] = lambda: False
    ) -> tuple[int, memoryview]:
        """The next unit: its type, and all of its bytes, header included. The bytes are good until the next call.

        Args:
            cap: bytes after the header.
            idle: seconds until its first byte.
            whole: seconds from there to its last byte.
            stopping: asked about once a second while nothing comes.
        Raises:
            AssociationEnded: the peer went, was too slow, or announced more than ``cap`` or an unknown type.
        """
        got, need = 0, 6
        deadline = self._clock() + idle
        while got < need:
            count = self._into(memoryview(self._buffer)[got:need])
            if count and not got:
                deadline = self._clock() + whole
            got += count
            if got == need == 6:
                need += self._announced(cap)
            elif got < need and not self._clock() < deadline:
                raise AssociationEnded("too_slow" if got else "idle", (2, 0))
            if not got and stopping():
                raise AssociationEnded("stopped", (0, 0))
        return self._buffer[0], memoryview(self._buffer)[:need]

    def _announced(self, cap: int) -> int:
        """The length in a header, and room for that many bytes."""
        kind, _, length = struct.unpack_from(">BBI", self._buffer)
        if not RQ <= kind <= ABORT:
            raise AssociationEnded("malformed", UNKNOWN)
        if length > cap:
            raise AssociationEnded("too_long", MALFORMED)
        if length + 6 > len(self._buffer):
            self._buffer = self._buffer[:6] + bytearray(length)
        return int(length)

    def send(self, data: bytes) -> None:
        """Everything, or ``AssociationEnded``."""
        try:
            self._sock.sendall(data)
        except OSError:
            raise AssociationEnded("connection_lost") from None

    def close(self, seconds: float = 0.0, most: int = 1 << 18) -> None:
        """Close, after the peer did or ``seconds`` (the ARTIM timer): else it may not get to read what we sent."""
        deadline = self._clock() + seconds
        self._flags = 0
        with contextlib.suppress(AssociationEnded):
            while most > 0 and self._clock() < deadline:
                most -= self._into(memoryview(self._buffer))
        with contextlib.suppress(OSError):
            self._sock.close()
