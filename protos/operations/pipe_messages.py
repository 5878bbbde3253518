"""Messages over the pipe to a process that this one started: length-prefixed JSON, then byte strings.

Nothing is unpickled. The other side may be in a stranger's hands: every length that it sends is bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Sequence
from typing import IO, Any, Final, overload

_MAX_HEAD: Final = 1 << 20  # bytes of a message's JSON
_MAX_PARTS: Final = 4
Part = bytes | bytearray | memoryview  # of bytes: a view saves a copy of the image


def send(stream: IO[bytes], head: dict[str, Any], parts: Sequence[Part] = ()) -> None:
    """One message. Raises: OSError, the other side is gone."""
    body = json.dumps({**head, "parts": [len(p) for p in parts]}).encode()
    stream.write(struct.pack(">I", len(body)) + body)
    for part in parts:
        stream.write(part)
    stream.flush()


_Most = int | Callable[[dict[str, Any]], Sequence[int]]


@overload
def receive(stream: IO[bytes], max_bytes: _Most) -> tuple[dict[str, Any], list[bytes]]: ...


@overload
def receive(
    stream: IO[bytes], max_bytes: _Most, changeable: Callable[[dict[str, Any]], bool]
) -> tuple[dict[str, Any], list[bytes | bytearray]]: ...


def receive(
    stream: IO[bytes], max_bytes: _Most, changeable: Callable[[dict[str, Any]], bool] = lambda _: False
) -> tuple[dict[str, Any], list[Any]]:
    """One message.

    Args:
        stream: from the other side.
        max_bytes: of each byte string; or what says, by a message's JSON, which ones follow and their most bytes.
        changeable: says, by a message's JSON, whether they come as bytearray: who changes them need not copy them.
    Raises:
        EOFError: at the end of the stream.
        ValueError: it is not a message, or larger.
    """
    told = _exactly(stream, size(struct.unpack(">I", _exactly(stream, 4))[0], _MAX_HEAD))
    try:
        head = json.loads(told)
    except RecursionError:
        raise ValueError("not a message") from None
    if not isinstance(head, dict) or not isinstance(head.get("parts"), list) or len(head["parts"]) > _MAX_PARTS:
        raise ValueError("not a message")
    sizes = head.pop("parts")
    most = max_bytes(head) if callable(max_bytes) else [max_bytes] * len(sizes)
    if len(sizes) != len(most):
        raise ValueError("not a message")
    read = _in_place if changeable(head) else _exactly
    return head, [read(stream, size(*one)) for one in zip(sizes, most, strict=True)]


def size(number: object, most: int) -> int:
    """A length that the other side sent. Raises: ValueError, it is none or more than ``most``."""
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError("not a length")
    return number


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _in_place(stream: IO[bytes], count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if not (got := stream.readinto(view)):  # type: ignore[attr-defined] # which every stream of a pipe has
            raise EOFError
        view = view[got:]
    return data


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether a worker has died. It stays unburied, so that the number of its group is nobody else's yet."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a worker that nobody has waited for yet, and the process group that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
