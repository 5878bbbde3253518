"""The stream of notices: one whose end nobody noticed, or that waits for its next try, is opened at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from agent.gateway import notifications
from agent.gateway.notifications import NotificationStream
from protos.v1 import gateway_pb2


class Broken(grpc.RpcError):
    """The line was cut."""


class Line:
    """A stream that says hello, and then nothing until it is hung up."""

    def __init__(self) -> None:
        self._notices: queue.Queue[gateway_pb2.Notice | None] = queue.Queue()
        self._notices.put(gateway_pb2.Notice(kind="hello"))

    def __iter__(self) -> Iterator[gateway_pb2.Notice]:
        while (notice := self._notices.get(timeout=240)) is not None:
            yield notice
        raise Broken

    def cancel(self) -> None:
        self._notices.put(None)


def test_a_stream_is_opened_at_once_where_the_coordinator_says_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications, "_PAUSES_S", (3600.0, 3600.0))
    monkeypatch.setattr(notifications, "_FRESH_S", 0.0)
    lines, heard, down, refused = list[Line](), list[str](), threading.Event(), threading.Semaphore(0)

    def opened(_: str) -> Line:
        if down.is_set():
            refused.release()
            raise Broken
        lines.append(Line())
        return lines[-1]

    stream = NotificationStream(opened, lambda kind, _run: heard.append(kind))
    try:
        assert stream._greeted.wait(240)
        stream.begin_again(240)  # nobody has noticed that it is over
        assert (len(lines), heard) == (2, ["hello"] * 2)
        down.set()
        lines[-1].cancel()
        while stream._greeted.is_set():
            time.sleep(0.01)
        stream.begin_again(0.2)  # the line is still down: the wait has an end
        assert refused.acquire(timeout=240), "it was tried at once"
        assert len(lines) == 2
        down.clear()
        stream.begin_again(240)  # and the next try is not in an hour
        assert (len(lines), heard) == (3, ["hello"] * 3)
    finally:
        stream.close()
    stream._thread.join(240)
    assert not stream._thread.is_alive()
