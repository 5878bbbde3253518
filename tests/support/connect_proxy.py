"""A real HTTP CONNECT proxy (RFC 9110, section 9.3.6) that counts its tunnels and lets nothing else through."""

from __future__ import annotations

import asyncio
import contextlib
import re

from tests.support.tcp_proxy import CHUNK, Loop

_REQUEST = re.compile(rb"CONNECT ([A-Za-z0-9.\-]{1,253}|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5}) HTTP/1\.[01]\r\n")
_HEAD_S = 10.0  # for the whole head of a request


class ConnectProxy(Loop):
    """Opens tunnels to ``allowed`` targets (host:port), or to any when it is not given.

    ``tunnels`` lists what was opened, ``refused`` the status of each request that was not, ``carried`` the bytes of
    all tunnels. What a client says beside CONNECT is ignored; another method is answered 405, a bad head 400, another
    target 403, a target that does not answer 502.
    """

    def __init__(self, allowed: frozenset[str] | None = None) -> None:
        super().__init__()
        self.allowed = allowed
        self.tunnels: list[str] = []
        self.refused: list[int] = []
        self.carried = 0

    @property
    def url(self) -> str:
        """As the ``https_proxy`` variable wants it."""
        return f"http://{self.address}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, and the tunnel that it asks for."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
        except TimeoutError:
            await self._refuse(writer, 408, "Request Timeout")
            return
        match = _REQUEST.match(head)
        if match is None:
            known = head.split(b" ", 1)[0].isalpha() and not head.startswith(b"CONNECT")
            await self._refuse(writer, *((405, "Method Not Allowed") if known else (400, "Bad Request")))
            return
        host, port = match[1].decode().strip("[]"), int(match[2])
        target = f"{match[1].decode()}:{port}"
        if self.allowed is not None and target not in self.allowed:
            await self._refuse(writer, 403, "Forbidden")
            return
        try:
            there, back = await asyncio.open_connection(host, port)
        except (OSError, OverflowError):
            await self._refuse(writer, 502, "Bad Gateway")
            return
        self.tunnels.append(target)
        writer.write(b"HTTP/1.1 200 Connection Established\r\n\r\n")
        try:
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        finally:
            back.transport.abort()

    async def _refuse(self, writer: asyncio.StreamWriter, status: int, reason: str) -> None:
        self.refused.append(status)
        writer.write(f"HTTP/1.1 {status} {reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(CHUNK):
            self.carried += len(chunk)
            sink.write(chunk)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
