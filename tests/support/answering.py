"""Something at a port that is not what was expected."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def answering(said: bytes) -> Iterator[str]:
    """Something that answers whatever comes with this, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return
                with plain:
                    plain.settimeout(5)
                    plain.recv(4096)
                    plain.sendall(said)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
