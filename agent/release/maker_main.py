"""The process of one call: ``python -m agent.release.maker_main JSON``; see :mod:`agent.release.maker_process`.

It imports no mechanism, and not even numpy, before it is confined: that starts threads, and only what has one can
be. Unpickling imports what is needed.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import resource
import select
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Any, Final

from protos.common.errors import InvariantError, LazaretError, out_of_memory
from protos.operations.confinement import (
    INTERPRETER,
    Allowed,
    ConfinementError,
    confine,
    drop_rights,
    end_with,
    interpreter,
)
from protos.operations.pipe_messages import receive, send
from protos.operations.process_bounds import bound, nearly_exhausted

_WAITS_S: Final = 900.0  # for a call, if it was started before there was one
_MOST_BYTES: Final = 1 << 34  # of a checkpoint
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_NOTHING: Final = (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)  # a core dump would hold patients' images
_PROCESSORS: Final = ("/proc/cpuinfo", "/sys/devices/system/cpu")  # torch chooses its instructions by them


@dataclass(frozen=True, slots=True)
class _Line:
    """To the other side."""

    source: IO[bytes]
    sink: IO[bytes]

    def say(self, stage: str, done: int, of: int) -> None:
        send(self.sink, {"step": "say", "stage": stage, "numbers": [int(done), int(of)]})

    def ask(self, head: dict[str, Any], *parts: bytes) -> bytes | None:
        send(self.sink, head, parts)
        answer, found = receive(self.source, _MOST_BYTES)
        return found[0] if answer["found"] and found else None


@dataclass(frozen=True, slots=True)
class _Place:
    """A checkpoint that is kept on the other side."""

    line: _Line
    name: str

    def read(self) -> bytes | None:
        return self.line.ask({"step": "read", "place": self.name})

    def write(self, data: bytes) -> None:
        self.line.ask({"step": "write", "place": self.name}, data)


def main(words: str) -> None:
    """Be confined, make, and answer."""
    told = json.loads(words)
    tempfile.tempdir = "/"  # asked for, and never written to: see the environment that is given
    line = _Line(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # the pipe is for messages
    try:
        end_with(int(told["parent"]))
        if told["memory"] is not None:
            bound(told["memory"])
        if told["demand"]:
            files = (*interpreter(), *filter(os.path.exists, _PROCESSORS))
            confine(Allowed(INTERPRETER, files), told["demand"], dict.fromkeys(_NOTHING, (0, 0)))
        else:
            drop_rights()
        if told["waits"]:
            _prepare()
            if not select.select([line.source], [], [], _WAITS_S)[0]:
                os._exit(0)
        receive(line.source, 0)  # from here on nobody can change the memory any more
        memory = _handed(int(told["descriptor"]))
        send(line.sink, {"step": "opens"})  # what is said from here on may be said by what was handed over
        head, parts = _made(line, memory)
    except BaseException as error:  # noqa: BLE001 - its text stays here unless it is one of ours
        head, parts = _of_error(error), ()
    send(line.sink, head, parts)
    os._exit(0)  # nothing of the interpreter's own clean-up is needed


def _prepare() -> None:
    """Import what a round needs, before there is one."""
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # as in _made
    import agent.mechanisms.federated.mechanism  # noqa: F401, PLC0415 - once confined


def _handed(descriptor: int) -> memoryview:
    """The memory, which nobody can change any more; what this process changes of it is its own copy."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ConfinementError("what the process was handed is not sealed")
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))


def _made(line: _Line, memory: memoryview) -> tuple[dict[str, Any], tuple[bytes | bytearray, ...]]:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # MONAI imports it if it can; it must have a folder
    import numpy as np  # noqa: PLC0415 - once confined

    from agent.mechanisms.common.workspace import Workspace  # noqa: PLC0415 - as above
    from agent.release.maker_values import pack  # noqa: PLC0415 - as above
    from agent.release.sealed_making import opened  # noqa: PLC0415 - as above

    bench = Workspace(lambda name: _Place(line, name), line.say)
    call, given = opened(memory, bench)
    made = call(*given)
    dice = next((one.bit_generator.state for one in given if isinstance(one, np.random.Generator)), None)
    return {"step": "made", "dice": dice}, pack(made)


def _of_error(error: BaseException) -> dict[str, Any]:
    ours = isinstance(error, LazaretError) and not isinstance(error, InvariantError)
    fault = error.__cause__ if ours else error  # what a library raised, if one did
    if fault is not None and (out_of_memory(fault) or nearly_exhausted()):
        return {"step": "raised", "kind": "MemoryError", "text": ""}
    kind = "WorkerError" if isinstance(error, ConfinementError) else type(error).__name__
    return {"step": "raised", "kind": kind, "text": str(error) if ours else ""}


if __name__ == "__main__":
    main(sys.argv[1])
