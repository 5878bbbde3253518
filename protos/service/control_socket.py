"""The control socket of a running service: HTTP and JSON on a Unix socket in the home directory.

Only the process that holds the ledger's lock binds it. Its mode is 0600, and the kernel says who connects
(``SO_PEERCRED``, unix(7)): the service's own user, or root. That user may do what the command line may; what persons
decide stays a statement that they signed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from protos.common.errors import StorageError
from protos.service.control_app import as_problem
from protos.service.control_client import SOCKET
from protos.web.security import App, Receive, RequestRefusedError, Scope, Send, read_body, replay
from protos.web.server import ServerThread

CONNECTIONS: Final = 32
BODY_BYTES: Final = 4 << 20
_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid


class ControlSocketError(StorageError):
    """The control socket cannot be made."""


class _Gate(socket.socket):
    """The listening socket. Who is somebody else, or one too many, is closed before anything is made of it."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection.

        Raises:
            ConnectionAbortedError: it was closed; the loop comes back for the next one.
        """
        connection, address = super().accept()
        open_now = [known for known in self._accepted if known.fileno() >= 0]
        if peer_of(connection)[1] not in (os.geteuid(), 0) or len(open_now) >= CONNECTIONS:
            connection.close()
            raise ConnectionAbortedError
        self._accepted.add(connection)
        return connection, address


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process number and user of the program at the other end, as the kernel had them when it connected."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


@contextlib.contextmanager
def control_socket(home: Path, app: App, log: Any) -> Iterator[None]:
    """Serve ``app`` on the socket of a home directory while the block runs.

    The socket is bound under another name and renamed: what a killed service left behind is replaced in one step,
    and nobody ever finds a name that nobody listens to.

    Args:
        home: the directory; its owner alone may enter it.
        app: answers requests below ``/v1``.
        log: hears of refusals and faults.
    Raises:
        ControlSocketError: the directory takes no socket.
    """
    folder = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    fresh, name = f"/proc/self/fd/{folder}/.control.{os.getpid()}", f"/proc/self/fd/{folder}/{SOCKET}"
    gate = _Gate()
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        gate.bind(fresh)
        os.chmod(fresh, 0o600)  # nobody can connect before it listens
        gate.listen(CONNECTIONS)
        own = os.stat(fresh)
        os.rename(fresh, name)
    except OSError as error:
        gate.close()
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        os.close(folder)
        raise ControlSocketError(f"{SOCKET} cannot be made in {home.name}: {error.strerror}") from None
    try:
        with ServerThread(_Guarded(app, log), gate, None, "control"):
            yield
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(name), own) and stat.S_ISSOCK(own.st_mode):
                os.unlink(name)
        os.close(folder)


class _Guarded:
    """Bounds every request, and turns what goes wrong into a problem with a sentence and an exit status."""

    def __init__(self, app: App, log: Any) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False

        async def watched(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        headers: dict[str, list[str]] = {}
        for key, value in scope["headers"]:
            headers.setdefault(key.decode("latin-1"), []).append(value.decode("latin-1"))
        try:
            body = await read_body(headers, receive, BODY_BYTES) if scope["method"] == "POST" else b""
            await self._app(scope, replay(body, receive), watched)
        except RequestRefusedError as refused:
            self._log.warning("control_refused", rule=refused.rule, state=str(refused.status))
            await as_problem(refused, refused.status)(scope, receive, send)
        except Exception as fault:  # noqa: BLE001 - nothing of its text leaves, and nothing of it stops the service
            self._log.error("control_fault", state=type(fault).__name__)
            if not started:
                await as_problem(fault, 500)(scope, receive, send)
