"""The Flower link's own process, started by `agent.federation.supernode_process.SuperNodeLink` and never by hand.

    python -P -m agent.federation.supernode_main FD RELAY SETUP

FD is our end of the pipe, RELAY that of the relay which makes our calls (protos/operations/http_relay.py), SETUP the
words of a `LinkSetup`. Not a thread, not a file and not a key of the parent's is in here: before it hears a word of
the coordinator's, this process is confined to the interpreter's files and these two descriptors.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Final

from agent.federation.fleet_transport import AnotherRoot, TurnedAway
from agent.federation.supernode import TaskQueue, serve
from agent.federation.supernode_process import LinkSetup
from agent.federation.tasks import (
    FrameError,
    Parts,
    frame_parts,
    read_reply_frame,
    receive_frame,
    send_frame,
    task_frame,
    unframe,
)
from protos.federation import messages
from protos.operations.confinement import CONVERSING, Allowed, ConfinementError, confine, interpreter
from protos.operations.http_relay import RelayedTransport

_ORPHAN_S: Final = 1.0
_INTERNAL: Final = 70


def _listen(pipe: Connection, queue: TaskQueue) -> None:
    """The second thread: what the parent says. The end of the pipe, or of the parent, ends the process."""
    parent = os.getppid()
    try:
        while os.getppid() == parent:
            if not pipe.poll(_ORPHAN_S):
                continue
            word, fields = unframe(receive_frame(pipe.fileno()))
            if word in ("answer", "declined"):
                queue.replies.put(read_reply_frame(word, fields))
            elif word == "wake":
                queue.wake.set()
            elif word == "stop":
                queue.stop.set()
                queue.wake.set()
    except (OSError, EOFError, FrameError):
        pass
    os._exit(0)  # in whatever call the other thread is: there is nobody left to take its result


def main(descriptor: str, relay: str, words: str) -> int:
    """Serve until told to stop; everything that is to be said goes through the pipe."""
    # A terminal's interrupt and a service manager's signal are for the parent, which then says stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    setup = LinkSetup.of(words)
    pipe, calls = Connection(int(descriptor)), socket.socket(fileno=int(relay))
    try:
        confine(Allowed(CONVERSING, interpreter()), setup.demand)  # while there is one thread
    except ConfinementError as fault:
        send_frame(pipe.fileno(), frame_parts("fault", type(fault).__name__.encode()))
        return _INTERNAL
    transport = RelayedTransport(calls, messages.FLEET_BODY, {"TurnedAway": TurnedAway, "AnotherRoot": AnotherRoot})
    mutex = threading.Lock()

    def say(parts: Parts) -> None:
        with mutex:
            send_frame(pipe.fileno(), parts)

    tasks = TaskQueue(
        task=lambda ticket, task: say(task_frame(ticket, task)),
        state=lambda state: say(frame_parts("state", state.encode())),
        node=lambda number: say(frame_parts("node", number.to_bytes(8, "big"))),
        replies=queue.SimpleQueue(),
        wake=threading.Event(),
        stop=threading.Event(),
    )
    threading.Thread(target=_listen, args=(pipe, tasks), name="pipe", daemon=True).start()
    try:
        serve(setup, transport, tasks)
    except BrokenPipeError:  # the parent is gone
        return _INTERNAL
    except Exception as fault:  # noqa: BLE001 - the parent must hear of it, without a text that may hold anything
        say(frame_parts("fault", type(fault).__name__.encode()))
        return _INTERNAL
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
