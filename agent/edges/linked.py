"""The Flower link's own process, started by `agent.edges.link.Link` and never by hand.

    python -P -m agent.edges.linked FD CONFIG NODE

FD is our end of the pipe, CONFIG the words of a `LinkConfig`, NODE the node id of the link before, or 0. Not a thread
and not a file of the parent's is in here: what this process can read is what its user can.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Final

from agent.edges.federation import Desk, serve
from agent.edges.link import LinkConfig
from agent.edges.tasks import MAX_FRAME, BadFrame, frame, read_reply_frame, task_frame, unframe

_ORPHAN_S: Final = 1.0
_INTERNAL: Final = 70


def _listen(pipe: Connection, desk: Desk) -> None:
    """The second thread: what the parent says. The end of the pipe, or of the parent, ends the process."""
    parent = os.getppid()
    try:
        while os.getppid() == parent:
            if not pipe.poll(_ORPHAN_S):
                continue
            word, fields = unframe(pipe.recv_bytes(MAX_FRAME))
            if word in ("answer", "declined"):
                desk.replies.put(read_reply_frame(word, fields))
            elif word == "renew":
                desk.renew.set()
            elif word == "wake":
                desk.wake.set()
            elif word == "stop":
                desk.stop.set()
                desk.wake.set()
    except (OSError, EOFError, BadFrame):
        pass
    os._exit(0)  # in whatever call the other thread is: there is nobody left to take its result


def main(descriptor: int, words: str, node: int) -> int:
    """Serve until told to stop; everything that is to be said goes through the pipe."""
    # A terminal's interrupt and a service manager's signal are for the parent, which then says stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(descriptor)
    mutex = threading.Lock()

    def say(data: bytes) -> None:
        with mutex:
            pipe.send_bytes(data)

    desk = Desk(
        task=lambda ticket, task: say(task_frame(ticket, task)),
        state=lambda state: say(frame("state", state.encode())),
        node=lambda number: say(frame("node", number.to_bytes(8, "big"))),
        replies=queue.SimpleQueue(),
        renew=threading.Event(),
        wake=threading.Event(),
        stop=threading.Event(),
    )
    threading.Thread(target=_listen, args=(pipe, desk), name="pipe", daemon=True).start()
    try:
        serve(LinkConfig.of(words), desk, node)
    except BrokenPipeError:  # the parent is gone
        return _INTERNAL
    except Exception as fault:  # noqa: BLE001 - the parent must hear of it, without a text that may hold anything
        say(frame("fault", type(fault).__name__.encode()))
        return _INTERNAL
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
