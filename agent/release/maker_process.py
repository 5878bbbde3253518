"""Computes on patients' images in a process of its own, which sees those and nothing else of the site.

Networks, samplers and linear algebra are a hundred libraries, and what makes a set, vets it, searches for k,
evaluates or trains a round's part gives them every patient. ``python -m agent.release.maker_main`` is handed one call
of installed code and its patients as a sealed piece of memory (memfd_create(2), which nobody can change any more),
and a pipe. Before it opens them it is confined (:mod:`protos.operations.confinement`): no file but the interpreter's,
no socket, no program, no key. Vault, ledger and control socket stay on this side. It asks over the pipe for three
things: to tell its progress, and to read and write a checkpoint, which is sealed here. It ends with this process.

Who makes the same again and again, such as rounds, has the next process started when one ends. It is confined, has
imported torch, and waits with its memory empty until the call is written there and sealed. Each makes one call.

On an accelerator it is a process of its own with a clean environment and without rights, and is not closed: CUDA
needs devices and calls that no test here could show. ``confinement = "required"`` refuses such a call. Remodelled
heads are made in the agent's own process: their registration starts a program.

This is a wall: what goes in is pickled, by who has everything anyway (:mod:`agent.release.sealed_making`); what comes
out never is (:mod:`agent.release.maker_values`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final, NoReturn

import numpy as np

from agent.mechanisms.common.workspace import Workspace, in_twentieths, is_stage
from agent.release.maker_errors import error_of
from agent.release.maker_values import Result
from agent.release.sealed_making import Pickled, empty, pickled
from protos.artifacts.shards import MAX_SHARD
from protos.common.errors import LazaretError, TrainingError, WorkerError
from protos.operations.confinement import AVAILABLE, REQUIRED
from protos.operations.pipe_messages import receive, send, size

_TREE: Final = 64 << 20  # most bytes of a result's JSON
_MORE: Final = 64 << 20  # of a result's arrays beside the images of a set: figures, and what a reviewer sees
_COUNTED: Final = (1 << 53) - 1  # most steps
_GRACE_S: Final = 5.0  # for the process to end once its pipe has
_INHERITED: Final = (  # also by which instructions is computed: the same images shall be made over there
    "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "MKL_CBWR",
    "MKL_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS",
    "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV",
)  # fmt: skip
_SENTENCE: Final = 600  # most characters of what is said before it has opened anything
# libraries ask for a name and for folders when they are imported; over there /etc/passwd is closed, and all writing
_SAID: Final = {"PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_CACHE_DIR": "/", "USER": "lazaret"}


def plain(text: str, most: int) -> str:
    """What the other side says, for a terminal and a log: so many characters, and none that steers either."""
    return "".join(one if one.isprintable() else "?" for one in text[:most])


class MakerEndedError(TrainingError):
    """The process was ended from outside; a grant stays held, and its making goes on."""

    number: int = signal.SIGKILL

    def __init__(self, number: int) -> None:
        """``number``: of the signal."""
        self.number, memory = number, ", perhaps since memory ran out" if number == signal.SIGKILL else ""
        super().__init__(
            f"the process that computes it was ended by signal {number}{memory}: give the same command again"
        )


@dataclass(frozen=True, slots=True)
class MakerProcess:
    """Calls in a process of its own; see :class:`agent.release.ports.SiteContext`."""

    demand: str = AVAILABLE  # which layers of the confinement must be in force
    memory: int | None = None  # most bytes of its data, 0: any number, and it leaves the rest to this process; None:
    # it is bounded as this process is
    started: Callable[[int], None] = lambda _: None  # hears its number
    keeps: bool = (
        False  # after a call the next process is started, and has imported what rounds need before they come
    )
    _next: list[_Waiting] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, call: Callable[..., Any], *given: Any) -> Any:
        """What ``call(*given)`` returns; a random generator among them has drawn as much as it had.

        Args:
            call: a function of installed code or a method, its configuration bound by ``partial`` or in its object.
                The object says what the call may: ``places`` are the checkpoints that it may ask a workspace for,
                and ``max_checkpoint_bytes`` of each; ``max_result_bytes`` if it is more than a set of images takes;
                ``drawn``, the labels that an error may name.
            given: patients, and what else the call needs.
        Raises:
            MemoryError: too little of it.
            MakerEndedError: it was ended from outside.
            WorkerError: it could not be started, or confined as the site demands, or answered what is no result.
            MakerFaultError: the call raised what is none of :data:`agent.release.maker_errors.SENTENCES`.
            LazaretError: what the call raised.
        """
        result, room = Result.of(call), _Room(given, getattr(call, "__self__", call))
        made = pickled(call, given)
        if made.accelerated and self.demand == REQUIRED:
            raise WorkerError(
                'confinement = "required" and an accelerator: what computes there cannot be confined; '
                'set device = "cpu", or confinement = "available" in site.toml'
            )
        demand = "" if made.accelerated else self.demand
        process = self._given(demand, made)
        try:
            del made
            self.started(process.pid)
            found = room.until_made(process, result)
        finally:
            process.end()
        if self.keeps:
            with contextlib.suppress(OSError):  # the next call starts its own
                self._next.append(_Waiting.start(demand, self.memory, waits=True))
        return found

    def _given(self, demand: str, made: Pickled) -> _Waiting:
        """A process that has the call: the one that waits, if there still is one so confined, else a new one."""
        while True:
            new = not self._next
            process = _Waiting.start(demand, self.memory, waits=False) if new else self._next.pop()
            try:
                if process.demand == demand and (new or process.child.poll() is None):
                    process.give(made)
                    return process
            except BrokenPipeError:
                if new:  # it has ended, and has said why
                    return process
            except BaseException:
                process.end()
                raise
            process.end()


def _is_result(head: dict[str, Any]) -> bool:
    """By the JSON of a message."""
    return head.get("step") == "made"


class _Room:
    """What the call may ask of this side, and how much it may answer."""

    def __init__(self, given: Sequence[Any], owner: Any) -> None:
        self._places = frozenset(getattr(owner, "places", ()))
        self._checkpoint = getattr(owner, "max_checkpoint_bytes", 0)
        self._result = max(MAX_SHARD, getattr(owner, "max_result_bytes", 0)) + _MORE
        self._words = tuple(map(repr, getattr(owner, "drawn", ())))
        self._bench = next((one for one in given if isinstance(one, Workspace)), None)
        self._say = in_twentieths(self._bench.say) if self._bench else None
        self._dice = next((one for one in given if isinstance(one, np.random.Generator)), None)
        self._opened = False  # whether what it was handed may have a say by now

    def until_made(self, waiting: _Waiting, result: Result) -> Any:
        """Answer until there is a result.

        A process that waited has imported libraries before it was handed anything, and they may speak in its name.
        """
        process, self._opened = waiting.child, waiting.waited
        assert process.stdin is not None
        assert process.stdout is not None
        while True:
            try:
                head, parts = receive(process.stdout, self._most, _is_result)
                if _is_result(head):
                    made = result.unpack(parts[0], parts[1])
                    self._advance(head.get("dice"))
                    return made
                self._answer(process.stdin, head, parts)
            except (EOFError, BrokenPipeError):
                _ended(process)
            except LazaretError:
                raise
            except (ValueError, IndexError, KeyError, TypeError):
                raise WorkerError("the process that computes it answered what is no result") from None

    def _most(self, head: dict[str, Any]) -> Sequence[int]:
        """The most bytes of what follows a message."""
        match head:
            case {"step": "made"}:
                return _TREE, self._result
            case {"step": "write"}:
                return (self._checkpoint,)
        return ()

    def _answer(self, stream: IO[bytes], head: dict[str, Any], parts: list[bytes | bytearray]) -> None:
        match head:
            case {"step": "opens"}:
                self._opened = True
            case {"step": "say", "stage": str(stage), "numbers": [done, of]}:
                done = size(done, size(of, _COUNTED))
                if self._say and is_stage(stage):
                    self._say(stage, done, of)
            case {"step": "read", "place": str(place)} if self._bench is not None and place in self._places:
                found = self._bench.place(place).read()
                send(stream, {"found": found is not None}, [found or b""])
            case {"step": "write", "place": str(place)} if self._bench is not None and place in self._places:
                self._bench.place(place).write(bytes(parts[0]))  # which they are: no copy
                send(stream, {"found": True})
            case {"step": "raised", "kind": "MemoryError"}:
                raise MemoryError
            case {"step": "raised", "kind": "WorkerError", "text": str(text)} if not self._opened:
                raise WorkerError(plain(text, _SENTENCE))
            case {"step": "raised", "kind": str(kind), "text": str(text)}:
                raise error_of(kind, text, self._words)
            case _:
                raise ValueError("not a message")

    def _advance(self, state: Any) -> None:
        """The generator goes on where it stands over there."""
        if self._dice is not None:
            try:
                self._dice.bit_generator.state = state
            except Exception:  # noqa: BLE001 - numpy's own, of whatever kind: it is no state
                raise ValueError("not a state") from None


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A process that is confined, or will be, and has no call yet; its memory is empty."""

    child: subprocess.Popen[bytes]
    descriptor: int
    demand: str
    waited: bool  # it was started before there was a call

    @property
    def pid(self) -> int:
        """Its number."""
        return self.child.pid

    @classmethod
    def start(cls, demand: str, memory: int | None, *, waits: bool) -> _Waiting:
        """Start one. It ``waits`` for its call for a while, or is given it at once."""
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        command = [sys.executable, "-P", "-m", "agent.release.maker_main"]
        descriptor = empty()
        told = {"descriptor": descriptor, "demand": demand, "memory": memory, "parent": os.getpid()}
        told |= {"waits": waits}
        # of its group, so that it is held with this process; told to end are all of it, and this one decides
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            child = subprocess.Popen(  # noqa: S603 - our own module
                [*command, json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
                env={**environment, **_SAID},
                cwd="/",
            )
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return cls(child, descriptor, demand, waits)

    def give(self, made: Pickled) -> None:
        """Hand it its call. Raises: BrokenPipeError, it has ended."""
        made.seal(self.descriptor)
        assert self.child.stdin is not None
        send(self.child.stdin, {"step": "go"})

    def end(self) -> None:
        """It is gone, whatever it does."""
        self.child.kill()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.child.wait()
        os.close(self.descriptor)


def _ended(process: subprocess.Popen[bytes]) -> NoReturn:
    """Its pipe has ended, and so must it."""
    try:
        status = process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        raise WorkerError("the process that computes it closed its pipe and went on: it was ended") from None
    if status < 0:
        raise MakerEndedError(-status)
    raise WorkerError(f"the process that computes it ended with status {status}")
