"""Messages between the coordinator and the process of one run, over a pair of sockets.

A frame is a word, a JSON object and two byte strings, each with its length in front. Nothing is unpickled, and a
length beyond the word's limit is refused before a byte of it is read. The run's process parses data from sites, so
the coordinator checks every field of its frames again: see coordinator/federation/run_process.py.

From the coordinator: ``start`` (once), ``answer`` or ``broken`` to each question, ``stop``. From the run: questions
(``reserve``, ``admit``, ``looked``, ``done``, ``checked``, ``progress``), each answered before the next; then
``over``, ``failed``, ``fault``.
"""

from __future__ import annotations

import base64
import binascii
import json
import select
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.federation.aggregation import Moments, strategy_from
from coordinator.federation.strategy import SLUG, RoundModel, RoundPlan
from protos.artifacts.arrays import unpack_vector, vector_parts
from protos.common.canonical_json import json_object
from protos.common.errors import PeerError
from protos.federation import messages
from protos.federation.round_times import RoundTerms

_HEAD: Final = struct.Struct(">8sQQQ")  # word, padded with zeros; lengths of text, body and more
_MAX_TEXT: Final = 4 << 20  # bytes
_TENSOR_HEADER: Final = 4096  # bytes of a safetensors header for what is sent here
_STALL_S: Final = 60  # within a frame; both ends write a frame in one go

Body = bytes | Sequence[bytes | memoryview]
Bounds = Mapping[str, tuple[int, int]]  # word -> the greatest length of its two byte strings

TO_RUN: Final[Bounds] = {
    "start": (4 * messages.MAX_PARAMETERS + _TENSOR_HEADER, 16 * messages.MAX_PARAMETERS + _TENSOR_HEADER),
    "answer": (0, 0),
    "broken": (0, 0),
    "stop": (0, 0),
}


def from_run(plan: RoundPlan) -> Bounds:
    """What the process that conducts ``plan`` may send: vectors of the plan's length, envelopes of its sites."""
    size, masked = int(plan.model.vector.size), plan.roster is not None
    vector, moments = 4 * size + _TENSOR_HEADER, 16 * size + _TENSOR_HEADER
    said = (8 if masked else 4) * max(size, plan.sums) + _TENSOR_HEADER
    return {
        "reserve": (len(plan.sites) * messages.MAX_ENVELOPE, 0),
        "admit": (messages.MAX_ENVELOPE, said),
        "looked": (8 * plan.sums, 0),
        "done": (vector, moments),
        **dict.fromkeys(("progress", "checked", "over", "failed", "fault"), (0, 0)),
    }


class RunFrameError(PeerError):
    """The other end is gone, or sent an invalid frame."""


@dataclass(frozen=True, slots=True, eq=False)
class RunMessage:
    """One word with its fields."""

    word: str
    text: dict[str, Any]
    body: bytes = b""
    more: bytes = b""

    def values(self, *keys: str) -> list[Any]:
        """The values of exactly these keys.

        Raises:
            RunFrameError: the text has other keys.
        """
        if self.text.keys() != set(keys):
            raise RunFrameError(f"{self.word}: other keys")
        return [self.text[key] for key in keys]


class Pipe:
    """One end. One thread may send while another receives.

    This is a wall: no key and no object crosses it, only words with bounded bytes.
    """

    def __init__(self, end: socket.socket, bounds: Bounds) -> None:
        """``bounds`` are those of the frames that arrive here."""
        self._end, self._bounds = end, bounds
        end.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STALL_S, 0))

    def close(self) -> None:
        """Nothing more is said; the other end sees that."""
        self._end.close()

    def send(self, word: str, text: Mapping[str, Any] | None = None, body: Body = b"", more: bytes = b"") -> None:
        """One frame; a body in parts is sent as one.

        Raises:
            RunFrameError: there is nobody left to read it, or for too long nobody does.
        """
        told = json.dumps(text or {}, separators=(",", ":"), allow_nan=False).encode()
        parts = (body,) if isinstance(body, bytes) else body
        try:
            self._end.sendall(_HEAD.pack(word.encode("ascii"), len(told), sum(map(len, parts)), len(more)) + told)
            for part in (*parts, more):
                self._end.sendall(part)
        except OSError:
            raise RunFrameError("cannot be sent") from None

    def ready(self, seconds: float) -> bool:
        """Whether something, or the end, can be received within that time."""
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def receive(self) -> RunMessage:
        """The next frame; waits for it.

        Raises:
            RunFrameError: an unknown word, a length beyond its bounds, no strict JSON object, or the end.
        """
        word, *sizes = _HEAD.unpack(self._exactly(_HEAD.size))
        name = word.rstrip(b"\0").decode("ascii", "replace")
        most = self._bounds.get(name)
        if most is None or not all(size <= limit for size, limit in zip(sizes, (_MAX_TEXT, *most), strict=True)):
            raise RunFrameError("an unknown word, or too long")
        text, body, more = (self._exactly(size) for size in sizes)
        try:
            return RunMessage(name, json_object(text.decode()), body, more)
        except ValueError:  # a decoding error is one
            raise RunFrameError("not a frame") from None

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            try:
                part = self._end.recv(missing, socket.MSG_WAITALL)
            except OSError:  # nothing for too long is one
                raise RunFrameError("stalled") from None
            if not part:
                raise RunFrameError("the end")
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(slots=True, eq=False)
class RunSpec:
    """The input of a run's process; the token stands for the run's task in Flower."""

    plan: RoundPlan
    token: str

    def take_model(self) -> RoundModel:
        """What the run starts from; the plan keeps its length. It may be large, and a run may last for days."""
        model, self.plan = self.plan.model, self.plan.without_numbers()
        return model

    def send(self, pipe: Pipe) -> None:
        """As the frame ``start``, once: the model is let go of.

        Raises:
            ValueError: it was taken before.
        """
        plan = self.plan
        if plan.model.elsewhere:
            raise ValueError("the model of this run was taken")
        roster = None if plan.roster is None else {site: key.hex() for site, key in plan.roster.items()}
        text = {
            "token": self.token,
            "run": plan.run,
            "sites": plan.sites,
            "rounds": [plan.first_round, plan.rounds],
            "config": base64.b64encode(plan.config).decode(),
            "least": [plan.min_sites, plan.least_grants],
            "seconds": [plan.round_timeout_s, plan.node_wait_s, plan.longest_step_s, plan.silence_s],
            "required": plan.required,
            "checks": plan.checks,
            "terms": [plan.terms.seconds, plan.terms.approve_by],
            "strategy": plan.aggregator.to_json(),
            "roster": roster,
            "looks": [plan.sums, *sorted(plan.looks)],
            "lattice": plan.lattice,
            "precision": plan.update_precision,
        }
        pipe.send("start", text, vector_parts(plan.model.vector), plan.model.moments.to_bytes())
        self.plan = plan.without_numbers()

    @classmethod
    def of(cls, frame: RunMessage) -> RunSpec:
        """The reverse.

        Raises:
            RunFrameError: it is not an order.
        """
        keys = ("token", "run", "sites", "rounds", "config", "least", "seconds", "terms", "strategy", "roster")
        token, run, sites, rounds, config, least, seconds, terms, strategy, roster, *more = frame.values(
            *keys, "looks", "lattice", "precision", "required", "checks"
        )
        looks, lattice, precision, required, checks = more
        try:
            plan = RoundPlan(
                run=run,
                sites=tuple(sites),
                rounds=rounds[1],
                first_round=rounds[0],
                model=RoundModel(unpack_vector(frame.body), Moments.from_bytes(frame.more)),
                config=base64.b64decode(config, validate=True),
                min_sites=least[0],
                least_grants=least[1],
                round_timeout_s=seconds[0],
                node_wait_s=seconds[1],
                longest_step_s=seconds[2],
                silence_s=seconds[3],
                required=tuple(required),
                checks=checks,
                terms=RoundTerms(*terms),
                aggregator=strategy_from(strategy),
                roster=None if roster is None else {site: bytes.fromhex(key) for site, key in roster.items()},
                looks=frozenset(looks[1:]),
                sums=looks[0],
                update_precision=precision,
                lattice=None if lattice is None else (float(lattice[0]), int(lattice[1])),
            )
            return cls(plan, str(token))
        except (ValueError, TypeError, LookupError, AttributeError, binascii.Error):
            raise RunFrameError("not an order") from None


def sites_of(value: object, known: Collection[str]) -> tuple[str, ...]:
    """Names of sites, each once and each one of ``known``.

    Raises:
        RunFrameError: anything else.
    """
    if not isinstance(value, list) or not all(type(site) is str and site in known for site in value):
        raise RunFrameError("not sites of this run")
    if len(set(value)) != len(value):
        raise RunFrameError("a site twice")
    return tuple(value)


def codes_of(value: object, known: Collection[str]) -> dict[str, str]:
    """Site to code, of sites among ``known``.

    Raises:
        RunFrameError: anything else.
    """
    if not isinstance(value, dict):
        raise RunFrameError("not codes")
    sites_of(list(value), known)
    return {site: code_of(code) for site, code in value.items()}


def code_of(value: object) -> str:
    """A code, which is safe to log.

    Raises:
        RunFrameError: anything else.
    """
    if type(value) is not str or not SLUG.fullmatch(value):
        raise RunFrameError("not a code")
    return value


def index_of(value: object, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``.

    Raises:
        RunFrameError: anything else.
    """
    if type(value) is not int or not low <= value <= high:
        raise RunFrameError("not such a number")
    return value
