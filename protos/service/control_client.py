"""Ask the running service over its control socket: one request, one answer.

The standard library's HTTP client over a Unix socket: a command waits for no other library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from protos.common.errors import InvariantError, LedgerIntegrityError, RefusedError, UnreachableError

SOCKET: Final = "control.sock"  # in the home directory
API: Final = 1  # the version in every path
PROBLEM: Final = "application/problem+json"
_ABOUT_S: Final = 10.0  # for the first answer; later ones may wait for an upload of hours
_BUSY_S: Final = 10.0  # another command, or a service that starts or ends


class ServiceRefusedError(RefusedError):
    """The service refused, with a sentence of its own."""


class ServiceHinderedError(UnreachableError):
    """The service could not do it now, with a sentence of its own: no coordinator, a busy ledger, a full disk."""


class ServiceStoppedError(LedgerIntegrityError):
    """The service's ledger cannot be used."""


class ServiceFaultError(InvariantError):
    """An internal fault of the service; its log has it."""


class ServiceAnswerError(UnreachableError):
    """The service ended, or gave an answer that is none, before the outcome was known."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket whose path may be longer than ``sun_path``."""

    def __init__(self, home: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._home = home

    def connect(self) -> None:
        """Through the folder's descriptor: a path of over 107 bytes fits no socket address (unix(7))."""
        folder = os.open(self._home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        except OSError:
            self.sock.close()
            raise
        finally:
            os.close(folder)


class ControlClient:
    """A running service, as one command asks it."""

    def __init__(self, connection: _Connection, about: Mapping[str, Any]) -> None:
        """Use :func:`connect`."""
        self._connection, self.about = connection, about

    def __enter__(self) -> ControlClient:
        """Connected already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up."""
        self._connection.close()

    def patient(self, seconds: float) -> None:
        """Wait so long for each answer, and no longer."""
        self._connection.sock.settimeout(seconds)

    def ask(self, path: str, fields: Mapping[str, Any] | None = None) -> Any:
        """GET without ``fields``, POST with them.

        Args:
            path: below ``/v1``.
            fields: of the request, as JSON has them.
        Returns:
            The answer, as JSON has it.
        Raises:
            ServiceRefusedError: the service says no; the text is its sentence.
            ServiceHinderedError: it could not; later it may.
            ServiceStoppedError, ServiceFaultError: it cannot go on.
            ServiceAnswerError: nobody knows whether it was done.
        """
        try:
            return _ask(self._connection, path, fields)
        except (OSError, http.client.HTTPException):
            raise ServiceAnswerError(
                "the running service ended before it answered: whether this was done, `status` and `ledger show` tell"
            ) from None


def connect(home: Path, patience_s: float = _ABOUT_S) -> ControlClient | None:
    """The service that runs in a home directory; None where none does.

    A socket that a killed service left behind refuses connections, and counts as none.

    Raises:
        ServiceRefusedError: it runs under another user, or speaks another version.
        ServiceAnswerError: something listens there, and does not answer.
    """
    connection = _Connection(home, patience_s)
    try:
        connection.connect()
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except PermissionError:
        raise ServiceRefusedError(
            f"the service in {home.name} runs under another user: run this command as that user"
        ) from None
    try:
        about = _ask(connection, "", None)
    except (OSError, http.client.HTTPException):
        connection.close()
        raise ServiceAnswerError(
            f"the service in {home.name} does not answer: it is busy; try again, and restart it if that goes on"
        ) from None
    if not isinstance(about, dict) or about.get("api") != API:
        connection.close()
        raise ServiceRefusedError("the running service is of another version than this command: restart the service")
    connection.sock.settimeout(None)  # an act takes as long as it takes; if the service ends, the connection does
    return ControlClient(connection, about)


def service_fault(home: Path, patience_s: float = _ABOUT_S) -> str | None:
    """What is wrong with the service in a home directory and only a restart mends, as it says itself; None: nothing.

    One that is not there, or does not answer in time, is not well either.
    """
    try:
        service = connect(home, patience_s)
        if service is None:
            return f"no service answers in {home.name}: start it, or restart it"
        with service:
            service.patient(patience_s)
            wrong = service.ask("/health")["wrong"]
            return None if wrong is None else str(wrong)
    except (RefusedError, UnreachableError, LedgerIntegrityError, InvariantError, KeyError, TypeError) as error:
        return str(error) if not isinstance(error, (KeyError, TypeError)) else "the service gave no answer to be read"


def is_serving(home: Path) -> bool:
    """Whether a service runs in a home directory.

    Raises:
        ServiceRefusedError, ServiceAnswerError: as :func:`connect`.
    """
    service = connect(home)
    if service is None:
        return False
    with service:
        return True


@contextlib.contextmanager
def ask_or_do(
    home: Path, here: Callable[..., Any], busy: Callable[[Exception], bool]
) -> Iterator[Callable[..., Any]]:
    """Acts, by name and fields, that the running service carries out; where none runs, they are done here.

    A service that starts or ends just then is waited for, and so is another command.

    Args:
        home: the directory of the service.
        here: carries out one act.
        busy: whether it raised this because another process works there.
    Yields:
        The acts.
    """
    with contextlib.ExitStack() as stack:
        service = connect(home)
        if service is not None:
            stack.enter_context(service)

        def act(name: str, **fields: Any) -> Any:
            nonlocal service
            until = time.monotonic() + _BUSY_S
            while service is None:
                try:
                    return here(name, **fields)
                except Exception as error:
                    if not busy(error) or time.monotonic() > until:
                        raise
                time.sleep(0.1)
                service = connect(home)
                if service is not None:
                    stack.enter_context(service)
            return service.ask(f"/{name}", fields)

        yield act


def _ask(connection: _Connection, path: str, fields: Mapping[str, Any] | None) -> Any:
    body = None if fields is None else json.dumps(fields).encode()
    kind = {"Content-Type": "application/json"} if body is not None else {}
    connection.request("GET" if body is None else "POST", f"/v{API}{path}", body, kind)
    answer = connection.getresponse()
    raw, media = answer.read(), answer.headers.get_content_type()
    try:
        told = json.loads(raw)
    except ValueError:
        raise http.client.HTTPException(media) from None
    if answer.status == 200:
        return told
    sentence = str(told.get("sentence", "")) if isinstance(told, dict) else ""
    if not sentence:
        raise http.client.HTTPException(media)
    if told.get("stopped"):
        raise ServiceStoppedError(sentence)
    if told.get("again"):
        raise ServiceHinderedError(sentence)
    raise (ServiceRefusedError if told.get("exit") == 1 else ServiceFaultError)(sentence)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask whether the service in the home directory HOME is well: exit 0 it is, 1 it is not, 2 usage."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) != 1:
        sys.stderr.write("usage: python -m protos.service.control_client HOME\n")
        return 2
    wrong = service_fault(Path(words[0]))
    sys.stdout.write("well\n" if wrong is None else f"{wrong}\n")
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
