"""A TCP proxy between two real processes that can be told to misbehave, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

CHUNK = 16_384  # bytes forwarded at a time: the finest step of throttle and reset_after


class Loop:
    """An asyncio server in a thread of its own; a context manager."""

    def __init__(self) -> None:
        self.host, self.port = "127.0.0.1", 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=type(self).__name__, daemon=True)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """host:port to connect to."""
        return f"{self.host}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = self.call(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call(self._stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(120)
        self.loop.close()

    def call(self, act: Callable[[], Any]) -> Any:
        """Run a coroutine function on the loop, and wait for what it gives."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(act(), self.loop)
        return future.result(120)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._accepted, self.host, self.port)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the peer went away: for a proxy, an everyday end
        except asyncio.CancelledError:
            pass  # only by _stop
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One accepted connection, until this returns."""
        raise NotImplementedError

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN: what was not sent is thrown away, and the peer's next call fails."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class TcpProxy(Loop):
    """Forwards to ``host:port``. What it does to all connections, open and new, can be changed at any moment.

    - :meth:`forward`: as it should (the start)
    - :meth:`cut`: every connection is reset now; new ones too, until something else is asked for
    - :meth:`half_open`: connections stay open and new ones are accepted, and not a byte passes
    - ``delay_s``, ``bytes_per_s``: each chunk waits so long; so much passes in a second, per direction
    - :meth:`reset_after`: each connection is reset once it has carried so many bytes, both directions together
    """

    def __init__(self, target: str) -> None:
        super().__init__()
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.mode = "pass"
        self.delay_s = 0.0
        self.bytes_per_s = 0.0  # 0: as fast as it goes
        self.carried = 0  # bytes, of all connections
        self.connections = 0  # accepted so far
        self._after: int | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()

    def forward(self) -> None:
        """Pass again; what waited in half-open connections goes through first."""
        self._set("pass", None)

    def half_open(self) -> None:
        """A black hole: nobody is told anything."""
        self._set("half-open", None)

    def reset_after(self, count: int) -> None:
        """Reset each connection after ``count`` bytes, those that are open too, counted from their start."""
        self._set("pass", count)

    def cut(self) -> int:
        """Reset every connection and refuse new ones; returns how many were open."""
        self._set("cut", None)

        async def cut() -> int:
            pairs = len(self._open) // 2
            for writer in list(self._open):
                reset(writer)
            return pairs

        return int(self.call(cut))

    def _set(self, mode: str, after: int | None) -> None:
        async def set_() -> None:
            self.mode, self._after = mode, after
            (self._passing.clear if mode == "half-open" else self._passing.set)()

        self.call(set_)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection, both ways, until both ends have said all."""
        self.connections += 1
        if self.mode == "cut":
            reset(writer)
            return
        await self._passing.wait()  # accepted, and never answered while half open
        try:
            there, back = await asyncio.open_connection(*self.target)
        except OSError:
            reset(writer)
            return
        self._open |= {writer, back}
        counts = [0]
        try:
            await asyncio.gather(self._carry(reader, back, writer, counts), self._carry(there, writer, back, counts))
        finally:
            self._open -= {writer, back}
            back.transport.abort()

    async def _carry(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        counts: list[int],
    ) -> None:
        while chunk := await source.read(CHUNK):
            await asyncio.sleep(self.delay_s)
            if self.bytes_per_s:
                await asyncio.sleep(len(chunk) / self.bytes_per_s)
            await self._passing.wait()
            room = len(chunk) if self._after is None else max(0, self._after - counts[0])
            counts[0] += len(chunk[:room])
            self.carried += len(chunk[:room])
            sink.write(chunk[:room])
            await sink.drain()
            if room < len(chunk) or counts[0] == self._after:
                reset(sink)
                reset(other)
                return
        await self._passing.wait()
        if sink.can_write_eof():
            sink.write_eof()


def wait_until(seen: Callable[[], bool], seconds: float = 200.0) -> bool:
    """Whether something came true in time."""
    end = time.monotonic() + seconds
    while not seen():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
