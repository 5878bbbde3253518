"""A real syslog collector: RFC 5425 over TLS, in a thread, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.pki import Authority


class Syslogd:
    """Keeps every message."""

    def __init__(self, folder: Path, *, asks: bool = False) -> None:
        self.authority = Authority(folder)
        self.messages: list[bytes] = []
        self.came = threading.Condition()
        self.connections: list[ssl.SSLSocket] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*self.authority.server())
        if asks:
            self._context.load_verify_locations(self.authority.ca)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._over = False
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        self._thread.join()
        self._socket.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End every connection."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.connections.clear()

    def wait(self, count: int, seconds: float = 60.0) -> list[bytes]:
        """So many messages."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.messages) >= count, seconds), self.messages
            return list(self.messages)

    def _accept(self) -> None:
        while not self._over:
            plain, _ = self._socket.accept()
            plain.settimeout(20)
            try:
                connection = self._context.wrap_socket(plain, server_side=True)
            except OSError:
                plain.close()
                continue
            self.connections.append(connection)
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as stream:
            while head := self._until_space(stream):
                body = stream.read(int(head))
                with self.came:
                    self.messages.append(body)
                    self.came.notify_all()

    def _until_space(self, stream: object) -> bytes:
        head = b""
        while not head.endswith(b" "):
            byte = stream.read(1)  # type: ignore[attr-defined]
            if not byte:
                return b""
            head += byte
        return head
