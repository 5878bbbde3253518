"""One command, handed to the server of commands: ``command_client.py SOCKET -m MODULE WORDS``; see command_server.py.

Started with -S and -E: it needs nothing but the standard library, and takes some milliseconds.
"""

import json
import os
import select
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Hand over, forward signals, and end as the command has ended."""
    umask = os.umask(0)
    os.umask(umask)
    order = {"words": sys.argv[2:], "folder": os.getcwd(), "umask": umask, "environment": dict(os.environ)}
    raw = json.dumps(order).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # they wait until it is known whom they are for
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(sys.argv[1])
        socket.send_fds(line, [len(raw).to_bytes(8, "big")], [0, 1, 2])
        line.sendall(raw)
        answers = line.makefile()
        pid = int(answers.readline())
        for number in FORWARDED:
            signal.signal(number, lambda told, _frame: os.kill(pid, told))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        while line not in select.select([line, woken], [], [])[0]:
            woken.recv(64)
        status = int(answers.readline())
    if status < 0:  # by a signal
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
