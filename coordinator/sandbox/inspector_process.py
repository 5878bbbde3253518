"""A site's artifact is opened by a process that may crash, hang or be taken over, never by the coordinator itself.

``inspect`` starts a confined process (``protos.operations.confinement``) for one file, which it gets as an open
descriptor, read-only. Its answer is one line of JSON: untrusted, bounded, and read field by field. Whatever is not
an answer (a crash, a limit, silence, too much) is a refusal that names what ended it.

This is a wall: the readers of artifacts run on the other side, without keys, ledger, network or other files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

import protos

MAX_ANSWER: Final = 1 << 16  # bytes
ARTIFACT_TYPES: Final = (
    "image-set",
    "volume-set",
    "update",
    "masked-update",
    "model",
    "evaluation",
    "masked-evaluation",
)
_TEXT: Final = re.compile(r"[ -~]{1,300}")
_ROOTS: Final = tuple(
    dict.fromkeys(str(Path(str(package.__file__)).resolve().parent.parent) for package in (protos, np))
)
_BOOT: Final = "import sys; sys.path += sys.argv[1:]; from {} import main; main()"
_SIGNALS: Final = {
    signal.SIGXCPU: "processor time",
    signal.SIGXFSZ: "writing",
    signal.SIGSYS: "system call",
    signal.SIGKILL: "killed",
}


_TURNS: Final = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))  # so many readers at once; others wait


@dataclass(frozen=True, slots=True)
class InspectionLimits:
    """What looking at one file may cost."""

    memory_bytes: int = 512 << 20  # address space of the process, of which Python and numpy map about a third
    cpu_seconds: int = 60
    wall_seconds: float = 120.0

    @staticmethod
    def for_size(size: int) -> InspectionLimits:
        """Time in proportion to a file's bytes; memory does not depend on it.

        A file of images unpacks to eight times its size, at most, and the time is for 16 MiB of that in a second.
        """
        seconds = 30 + size // (2 << 20)
        return InspectionLimits(cpu_seconds=seconds, wall_seconds=4.0 * seconds)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found: ``ok`` and its facts, or the rule and the reason of a refusal."""

    ok: bool
    rule: str  # "" | artifact_type | artifact_malformed | sandbox
    reason: str  # printable text without anything of the file; of a sandbox refusal: the limit that was hit
    facts: Mapping[str, Any]  # see protos.artifacts.inspection.check
    bound: tuple[str, ...] = ()  # layers of the confinement that were in force


@dataclass(frozen=True, slots=True)
class ConfinedResult:
    """How a confined process ended: its answer, or the limit that ended it."""

    answer: dict[str, Any] | None
    limit: str


def inspect(
    path: Path, artifact_type: str, expected: Mapping[str, object], limits: InspectionLimits | None = None
) -> Inspection:
    """Is the file an artifact of its type, in its one form? Blocks until that is known; call it from a thread.

    ``expected`` and the facts are those of :func:`protos.artifacts.inspection.check`. Never raises for what a file
    holds.

    Raises:
        OSError: the file cannot be opened, or no process be started: a fault of the coordinator, not of the file.
    """
    if artifact_type not in ARTIFACT_TYPES:
        return Inspection(False, "artifact_type", "no such type of artifact", MappingProxyType({}))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    _TURNS.acquire()
    try:
        limits = limits or InspectionLimits.for_size(os.fstat(descriptor).st_size)
        request = {"type": artifact_type, "expected": dict(expected)}
        return _read(artifact_type, run_confined("coordinator.sandbox.inspector_main", request, descriptor, limits))
    finally:
        _TURNS.release()
        os.close(descriptor)


def run_confined(
    program: str, request: Mapping[str, Any], descriptor: int, limits: InspectionLimits, paths: Sequence[str] = ()
) -> ConfinedResult:
    """Start ``main`` of a module, which must end in :func:`protos.operations.confinement.serve`, for one open file.

    The process sees an empty environment, this package and numpy (and ``paths``), the request and the descriptor.
    """
    bounds = {"memory": limits.memory_bytes, "cpu": limits.cpu_seconds, "parent": os.getpid()}
    whole = {**request, **bounds, "descriptor": descriptor}
    deadline = time.monotonic() + limits.wall_seconds
    with tempfile.TemporaryFile() as asked:  # not a pipe: nobody waits for the process to read it
        asked.write(json.dumps(whole).encode())
        asked.seek(0)
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-I", "-S", "-B", "-c", _BOOT.format(program), *_ROOTS, *paths],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # one thread: less memory, and no surprise
            cwd="/",
            start_new_session=True,
        )
    try:
        line = _line(process, deadline)
        if line is None:
            return ConfinedResult(None, "answer too long" if time.monotonic() < deadline else "wall time")
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return ConfinedResult(None, "wall time")
        return _ran(process.returncode, line)
    finally:
        if process.poll() is None:  # what has ended left no children: it could start none
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """All that the process says, up to its end; None when that is too much, or takes too long."""
    assert process.stdout is not None
    heard, pipe = b"", process.stdout.fileno()
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    while len(heard) <= MAX_ANSWER:
        left = deadline - time.monotonic()
        if not left > 0 or not waiting.poll(left * 1000):
            return None
        part = os.read(pipe, MAX_ANSWER + 1 - len(heard))
        if not part:
            return heard
        heard += part
    return None


def _ran(status: int, line: bytes) -> ConfinedResult:
    if status < 0:
        return ConfinedResult(None, _SIGNALS.get(signal.Signals(-status), "crash"))
    if status:
        return ConfinedResult(None, "crash")  # an exception that is not a refusal; its text stays unheard
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return ConfinedResult(None, "not an answer")
    if not isinstance(answer, dict) or line.count(b"\n") != 1:
        return ConfinedResult(None, "not an answer")
    limit = answer.get("limit")
    return ConfinedResult(None, limit) if limit in ("memory", "confinement") else ConfinedResult(answer, "")


def _read(artifact_type: str, ran: ConfinedResult) -> Inspection:
    """The answer, field by field: the process has read hostile bytes, and may say anything."""
    nothing: Mapping[str, Any] = MappingProxyType({})
    answer = ran.answer
    if answer is None:
        return Inspection(False, "sandbox", ran.limit, nothing)
    bound = answer.pop("bound", None)
    if not isinstance(bound, list) or len(bound) > 8 or not all(type(b) is str and _TEXT.fullmatch(b) for b in bound):
        return Inspection(False, "sandbox", "not an answer", nothing)
    reason = answer.get("reason")
    if set(answer) == {"reason"} and type(reason) is str and _TEXT.fullmatch(reason):
        return Inspection(False, "artifact_malformed", reason, nothing, tuple(bound))
    facts = answer.get("facts")
    if set(answer) == {"facts"} and isinstance(facts, dict) and _are_facts(artifact_type, facts):
        return Inspection(True, "", "", MappingProxyType(facts), tuple(bound))
    return Inspection(False, "sandbox", "not an answer", nothing)


def _are_facts(artifact_type: str, facts: dict[str, Any]) -> bool:
    wanted = _FACTS[artifact_type]
    return set(facts) == set(wanted) and all(test(facts[name]) for name, test in wanted.items())


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= 1 << 40


def _is_word(value: object) -> bool:
    return type(value) is str and re.fullmatch(r"[A-Za-z0-9-]{1,64}", value) is not None


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and 2 <= len(value) <= 3 and all(_is_count(n) for n in value)


def _are_labels(value: object) -> bool:
    return isinstance(value, dict) and all(re.fullmatch(r"[ -~]{0,32}", k) and _is_count(n) for k, n in value.items())


_SET: Final = {"form": _is_word, "count": _is_count, "shape": _is_shape, "labels": _are_labels}
_FACTS: Final = {
    "image-set": _SET,
    "volume-set": _SET,
    "update": {"size": _is_count},
    "masked-update": {"size": _is_count, "dtype": _is_word},
    "evaluation": {"size": _is_count},
    "masked-evaluation": {"size": _is_count, "dtype": _is_word},
    "model": {"digest": _is_word, "size": _is_count},
}
