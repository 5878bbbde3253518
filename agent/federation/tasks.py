"""One task of a federated round at the agent: request, response, refusal.

And how these cross the pipe between the link's process (agent/federation/supernode_process.py) and the one that holds
the vault: as frames. A frame is a word and its fields, each with its length in front; nothing is unpickled, and every
field is checked by whoever receives it. No Flower here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.bfloat16 import BFLOAT16, FLOAT32, Numbers, is_finite
from protos.common.errors import PeerError
from protos.federation import messages
from protos.federation.round_times import RoundTerms

CODES: Final = frozenset(messages.CODES)
Kind = Literal["plan", "price", "train", "evaluate", "secure", "check"]
_KINDS: Final = ("plan", "price", "train", "evaluate", "secure", "check")
CARRYING: Final = frozenset({"secure", "check"})  # kinds that carry bytes, both ways

MAX_TICKET: Final = 1 << 16
_OF_BEFORE: Final = RoundTerms()
_WORD: Final = 64
_VECTOR: Final = 4 * messages.MAX_PARAMETERS
# word -> the greatest length of each of its fields
_FRAMES: Final[Mapping[str, tuple[int, ...]]] = {
    # from the link
    "state": (_WORD,),
    "node": (8,),
    "fault": (_WORD,),
    "task": (
        MAX_TICKET,
        _WORD,
        4 * messages.MAX_RUN,
        8,
        messages.MAX_CONFIG,
        messages.MAX_STEP,
        messages.MAX_PAYLOAD,
        _VECTOR,
        8,
        8,
    ),
    # to the link
    "answer": (MAX_TICKET, _WORD, messages.MAX_ENVELOPE, messages.MAX_PAYLOAD, _WORD, _VECTOR),
    "declined": (MAX_TICKET, _WORD),
    "wake": (),
    "stop": (),
}
_LENGTH: Final = struct.Struct(">Q")
MAX_FRAME: Final = max(sum(sizes) + 4 * len(sizes) for sizes in _FRAMES.values()) + 1 + _WORD


class FrameError(PeerError, ValueError):
    """The bytes from the pipe are not a valid frame."""


class TaskDeclinedError(PeerError):
    """The site does not do this. Raised by ``handle``; only ``code`` leaves the site."""

    def __init__(self, code: str) -> None:
        """``code`` is one of `CODES`; whatever depends on patients is "unavailable".

        Raises:
            ValueError: an unknown code.
        """
        if code not in CODES:
            raise ValueError(f"a task is declined with one of {', '.join(sorted(CODES))}")
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True, eq=False)
class RoundTask:
    """What the coordinator asks for."""

    run: str
    kind: Kind
    round_index: int  # from 0
    config: bytes  # the mechanism's public configuration
    vector: NDArray[np.float32] | None = None  # (p,) finite global parameters, read-only; not to a price or a step
    step: str = ""  # of secure aggregation; or messages.CANARY, of a check that is one
    payload: bytes = b""  # what that step is given
    terms: RoundTerms = _OF_BEFORE  # how long a round may take, and what else is said of times

    def __post_init__(self) -> None:
        """Refuse what no honest coordinator sends.

        Raises:
            ValueError: without saying what it was; the bytes are foreign.
        """
        trains = self.kind in ("train", "evaluate")
        steps = {"secure": bool(self.step), "check": self.step in ("", messages.CANARY)}
        right = (
            self.kind in _KINDS
            and 0 < len(self.run) <= messages.MAX_RUN
            and 0 <= self.round_index < 1 << 31
            and len(self.config) <= messages.MAX_CONFIG
            and (self.vector is not None) == trains
            and steps.get(self.kind, not self.step)
            and len(self.step) <= messages.MAX_STEP
            and len(self.payload) <= (messages.MAX_PAYLOAD if self.kind in CARRYING else 0)
        )
        if not right or (self.vector is not None and not (self.vector.dtype == np.float32 and _sound(self.vector))):
            raise ValueError("not a task")


@dataclass(frozen=True, slots=True, eq=False)
class RoundAnswer:
    """What leaves the site: already reviewed, charged and sealed by the caller."""

    envelope: bytes = b""
    # "train": (p,) as long as the task's, float32 or the bits of bfloat16; "evaluate": the sums of a look, float32
    vector: Numbers | None = None
    payload: bytes = b""  # of the kinds that carry bytes

    def fits(self, task: RoundTask) -> bool:
        """Whether this answers ``task``: the records of its kind, the sizes of its vector."""
        envelope = type(self.envelope) is bytes and len(self.envelope) <= messages.MAX_ENVELOPE
        payload = type(self.payload) is bytes and len(self.payload) <= messages.MAX_PAYLOAD
        if not (envelope and payload) or (self.vector is None) != (task.vector is None):
            return False
        if task.kind in CARRYING:
            return not self.envelope
        if self.payload or task.vector is None or self.vector is None:
            return not self.payload
        if task.kind == "evaluate":
            return self.vector.size <= messages.MAX_SUMS and self.vector.dtype == np.float32 and _sound(self.vector)
        return self.vector.shape == task.vector.shape and _sound(self.vector)


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The reply to the message of ``ticket``: a response, or the code of a refusal."""

    ticket: bytes  # the link's own, given back as it came
    kind: Kind
    answer: RoundAnswer | None
    code: str = ""


def _sound(vector: Numbers) -> bool:
    """(p,) finite float32 or bfloat16, p > 0 and within bounds."""
    right = vector.dtype in (np.float32, np.uint16) and vector.ndim == 1
    return right and 0 < vector.size <= messages.MAX_PARAMETERS and is_finite(vector)


Parts = list[bytes | memoryview]


def frame_parts(word: str, *fields: bytes | memoryview) -> Parts:
    """``word`` and ``fields``, each with its length before it, 1 byte and 4 bytes, big-endian; not copied."""
    parts: Parts = [bytes([len(word)]), word.encode("ascii")]
    for field in fields:
        parts += [struct.pack(">I", len(field)), field]
    return parts


def frame(word: str, *fields: bytes | memoryview) -> bytes:
    """The same in one piece."""
    return b"".join(frame_parts(word, *fields))


def send_frame(descriptor: int, parts: Parts) -> None:
    """One frame into the pipe, piece by piece: a model of 400 MB is not copied for it.

    Raises:
        OSError: there is nobody left to read it.
    """
    _write(descriptor, _LENGTH.pack(sum(len(part) for part in parts)))
    for part in parts:
        _write(descriptor, part)


def receive_frame(descriptor: int) -> bytearray:
    """One frame from the pipe, into its place.

    Raises:
        EOFError: the other end is gone.
        OSError: the pipe is broken.
        FrameError: it would be longer than any frame is; nothing of it is read.
    """
    (size,) = _LENGTH.unpack(_read_into(descriptor, bytearray(_LENGTH.size)))
    if not size <= MAX_FRAME:
        raise FrameError("a frame is too long")
    return _read_into(descriptor, bytearray(size))


def _write(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def _read_into(descriptor: int, place: bytearray) -> bytearray:
    view = memoryview(place)
    while view:
        got = os.readv(descriptor, [view])
        if not got:
            raise EOFError
        view = view[got:]
    return place


def unframe(data: bytes | bytearray) -> tuple[str, list[memoryview]]:
    """The word and the fields of a frame, not copied.

    Raises:
        FrameError: an unknown word, another number of fields, one that is too long, bytes left over.
    """
    view = memoryview(data)
    try:
        start = 1 + view[0]
        word = bytes(view[1:start]).decode("ascii")
        fields = []
        for most in _FRAMES[word]:
            (size,) = struct.unpack_from(">I", view, start)
            start += 4 + size
            if not (size <= most and start <= len(view)):
                raise FrameError("a field is too long")
            fields.append(view[start - size : start])
    except (IndexError, KeyError, UnicodeDecodeError, struct.error):
        raise FrameError("not a frame") from None
    if start != len(view):
        raise FrameError("a frame is too long")
    return word, fields


def task_frame(ticket: bytes, task: RoundTask) -> Parts:
    """A task with the link's ``ticket`` for it."""
    vector = b"" if task.vector is None else _bytes(task.vector)
    head = (ticket, task.kind.encode(), task.run.encode(), task.round_index.to_bytes(8, "big"))
    terms = (task.terms.seconds.to_bytes(8, "big"), task.terms.approve_by.to_bytes(8, "big"))
    return frame_parts("task", *head, task.config, task.step.encode(), task.payload, vector, *terms)


def read_task_frame(fields: list[memoryview]) -> tuple[bytes, RoundTask]:
    """Ticket and task; the link has parsed foreign bytes, so nothing is taken on its word.

    Raises:
        FrameError: it is not a task.
    """
    ticket, kind, run, index, config, step, payload, vector, seconds, approve_by = fields
    try:
        return bytes(ticket), RoundTask(
            bytes(run).decode(),
            cast(Kind, bytes(kind).decode("ascii")),
            int.from_bytes(index, "big"),
            bytes(config),
            np.frombuffer(vector, "<f4") if len(vector) else None,
            bytes(step).decode("ascii"),
            bytes(payload),
            RoundTerms(int.from_bytes(seconds, "big"), int.from_bytes(approve_by, "big")),
        )
    except ValueError:  # a decoding error is one
        raise FrameError("not a task") from None


def reply_frame(reply: Reply) -> Parts:
    """A reply, for the link."""
    if reply.answer is None:
        return frame_parts("declined", reply.ticket, reply.code.encode())
    vector, kind = reply.answer.vector, b""
    if vector is not None:
        kind = BFLOAT16.encode() if vector.dtype == np.uint16 else FLOAT32.encode()
    head = (reply.ticket, reply.kind.encode(), reply.answer.envelope, reply.answer.payload, kind)
    return frame_parts("answer", *head, b"" if vector is None else _bytes(vector))


def read_reply_frame(word: str, fields: list[memoryview]) -> Reply:
    """The reply in a frame ``answer`` or ``declined``."""
    if word == "declined":
        return Reply(bytes(fields[0]), "price", None, bytes(fields[1]).decode("ascii"))
    ticket, kind, envelope, payload, precision, vector = fields
    numbers = np.frombuffer(vector, "<u2" if precision == BFLOAT16.encode() else "<f4") if len(vector) else None
    return Reply(
        bytes(ticket), cast(Kind, bytes(kind).decode("ascii")), RoundAnswer(bytes(envelope), numbers, bytes(payload))
    )


def _bytes(vector: Numbers) -> memoryview:
    return np.ascontiguousarray(vector, vector.dtype.newbyteorder("<")).data.cast("B")
