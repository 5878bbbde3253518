"""The Flower link in a process of its own: the agent's end of the pipe. The other is agent/edges/linked.py.

The child dials out, parses what the coordinator sends, and decides on run, message type and bundle before anything is
downloaded. It is given paths of its credentials and nothing else: no vault, no ledger, no signing key, no torch. The
parent gets tasks as frames (agent/edges/tasks.py), checks every field of them again, and answers. It runs as the same
user, though: whoever takes it over can open the site's files as that user can (deploy/docs/limits.md).

Neither outlives the other for long: the child ends when the pipe does, or when it has another parent. A child that
died or spoke nonsense is started again, with growing waits; the new one goes on as the same node, and the reply to a
task that the old one had fetched goes out through it, since the task's ticket came to the parent with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from agent.edges.tasks import (
    MAX_FRAME,
    Answer,
    BadFrame,
    Declined,
    Reply,
    Task,
    frame,
    read_task_frame,
    reply_frame,
    unframe,
)
from protos.rounds import STUB_DIGEST

MODULE: Final = "agent.edges.linked"
STATES: Final = frozenset({"online", "unreachable", "turned away", "unregistered", "stopped"})
_BACKOFF_S: Final = (0.5, 15.0)
_STEADY_S: Final = 60.0  # a child that lived this long starts the backoff anew
_LEAVE_S: Final = 25.0  # for a last reply and the sign-off
_POLL_S: Final = 0.2
_FAULT: Final = re.compile(r"[A-Za-z]{1,64}")


class LinkFailed(RuntimeError):
    """The link cannot work: a key or certificate cannot be used. The argument is the kind of fault."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """The way to the coordinator; the child reads the files."""

    target: str  # host:port of the coordinator's one port
    keys: Path  # the site's key directory; read again whenever a connection is opened
    node_key: Path  # OpenSSH private key, EC P-384, enrolled at the coordinator
    proxy: str = ""  # host:port of the hospital's forward proxy; proxy variables of the environment are ignored
    bundle_digest: str = STUB_DIGEST  # SHA-256 of the only bundle a run may carry

    def words(self) -> str:
        """As JSON, for the child's command line."""
        return json.dumps([self.target, str(self.keys), str(self.node_key), self.proxy, self.bundle_digest])

    @classmethod
    def of(cls, words: str) -> LinkConfig:
        """The reverse."""
        target, keys, node_key, proxy, digest = json.loads(words)
        return cls(target, Path(keys), Path(node_key), proxy, digest)


class Link:
    """The parent's end: starts the child, hands its tasks to ``handle``, starts it again when it dies."""

    def __init__(self, config: LinkConfig) -> None:
        """Nothing is started yet."""
        self.config = config
        self.pid = 0  # of the child, while there is one
        self._renew, self._wake = threading.Event(), threading.Event()
        self._node = 0
        self._unsent: Reply | None = None  # made, and perhaps not sent by the child that asked for it

    def wake(self) -> None:
        """A run is about to ask something: let the child look often. Any thread."""
        self._wake.set()

    def renew(self) -> None:
        """The credentials on disk were replaced: let the next call use them. Any thread."""
        self._renew.set()

    def run(self, handle: Callable[[Task], Answer], stop: threading.Event, on_state: Callable[[str], None]) -> None:
        """Take part in rounds until ``stop`` is set. Blocks; may run in any thread.

        Args:
            handle: our installed code. One task at a time, in this thread; what it raises becomes a code.
            stop: ends the service; a task being handled is finished and answered first.
            on_state: hears each change: one of `STATES`, and "restarted" when the child had died.
        Raises:
            LinkFailed: a key or certificate cannot be used, or `protos.quiet.hush` was not called.
        """
        wait, told = _BACKOFF_S[0], ""

        def tell(state: str) -> None:
            nonlocal told
            if state != told:
                told = state
                on_state(state)

        while not stop.is_set():
            began = time.monotonic()
            with _Child(self.config, self._node) as child:
                self.pid = child.process.pid
                with contextlib.suppress(BadFrame, OSError, EOFError):  # dead, or nonsense: both mean a new one
                    self._converse(child, handle, stop, tell)
            self.pid = 0
            if stop.is_set():
                break
            if time.monotonic() - began > _STEADY_S:
                wait = _BACKOFF_S[0]
            stop.wait(wait)
            wait = min(2 * wait, _BACKOFF_S[1])
            tell("restarted")
        tell("stopped")

    def _converse(
        self,
        child: _Child,
        handle: Callable[[Task], Answer],
        stop: threading.Event,
        tell: Callable[[str], None],
    ) -> None:
        """Until the child ends, which it does in an orderly way only when told to stop."""
        if self._unsent is not None:
            child.pipe.send_bytes(reply_frame(self._unsent))
        told_to_stop = 0.0
        while True:
            if self._renew.is_set():
                self._renew.clear()
                child.pipe.send_bytes(frame("renew"))
            if self._wake.is_set():
                self._wake.clear()
                child.pipe.send_bytes(frame("wake"))
            if stop.is_set() and not told_to_stop:
                told_to_stop = time.monotonic()
                child.pipe.send_bytes(frame("stop"))
            if told_to_stop and time.monotonic() - told_to_stop > _LEAVE_S:
                return
            if not child.pipe.poll(_POLL_S):
                continue
            word, fields = unframe(child.pipe.recv_bytes(MAX_FRAME))
            if word == "task":
                self._unsent = None  # it asks for more, so it has sent the last one
                self._unsent = _handled(*read_task_frame(fields), handle)
                child.pipe.send_bytes(reply_frame(self._unsent))
            else:
                self._note(word, fields, tell)

    def _note(self, word: str, fields: list[memoryview], tell: Callable[[str], None]) -> None:
        """What is not a task.

        Raises:
            BadFrame: nothing that a link says.
            LinkFailed: it cannot work.
        """
        if word == "node":
            self._node = int.from_bytes(fields[0], "big")
            return
        text = bytes(fields[0]).decode("ascii", "replace") if fields else ""
        if word == "state" and text in STATES:
            if text != "stopped":  # it is this end that says so
                tell(text)
        elif word == "fault" and _FAULT.fullmatch(text):
            raise LinkFailed(text)
        else:
            raise BadFrame("not what a link says")


def _handled(ticket: bytes, task: Task, handle: Callable[[Task], Answer]) -> Reply:
    """What the installed code answers; "internal" for anything but a refusal that it raises. Its text stays here."""
    try:
        answer = handle(task)
    except Declined as refusal:
        return Reply(ticket, task.kind, None, refusal.code)
    except Exception:  # noqa: BLE001 - an exception's text may hold patient data
        return Reply(ticket, task.kind, None, "internal")
    if not answer.fits(task):
        return Reply(ticket, task.kind, None, "internal")
    return Reply(ticket, task.kind, answer)


class _Child:
    """The child process and our end of its pipe, as a context manager that leaves nothing behind."""

    def __init__(self, config: LinkConfig, node: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            root = str(Path(__file__).resolve().parents[2])
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            self.process = subprocess.Popen(  # noqa: S603 - this very interpreter and module
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), config.words(), str(node)],
                env={**os.environ, "PYTHONPATH": path, "GRPC_VERBOSITY": "NONE"},  # gRPC logs addresses
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.pipe = Connection(ours.detach())

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        """The end of the pipe is the child's end; one that does not see that is killed."""
        self.pipe.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
