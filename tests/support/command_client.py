"""One command, handed to the server of commands: ``command_client.py SOCKET -m MODULE WORDS``; see command_server.py.

Started with -S and -E: it needs nothing but the standard library, and takes some milliseconds.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Hand over, forward signals, and end as the command has ended."""
    umask = os.umask(0)
    os.umask(umask)
    order = {"words": sys.argv[2:], "folder": os.getcwd(), "umask": umask, "environment": dict(os.environ)}
    raw = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(sys.argv[1])
        socket.send_fds(line, [len(raw).to_bytes(8, "big")], [0, 1, 2])
        line.sendall(raw)
        answers = line.makefile()
        pid = int(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda told, _frame: os.kill(pid, told))
        status = int(answers.readline())
    if status < 0:  # by a signal
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
