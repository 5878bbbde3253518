"""A small process that starts, signals and buries a service's jobs, and :class:`Supervisor`, the service's end of it.

The service has keys, threads and large libraries; this process has none of them. Its one thread is the parent of
every job, so the kernel can end the jobs with it (``PR_SET_PDEATHSIG`` belongs to the thread that started a process),
and it ends, with all of its jobs, when the service does: its socket tells. Jobs are exec'd: a forked child would
keep the service's locks. It decides nothing; what it starts, and what an end means, the service knows.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protos.common.errors import WorkerError

_MOST: Final = 1 << 18  # bytes of one message


class SupervisorError(WorkerError):
    """The process that starts jobs does not start, or has ended."""


class NotStartedError(WorkerError):
    """One job cannot be started; the others are as they were."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job's process ended."""

    name: str
    status: int  # its exit status; below 0: the signal that ended it, negative


class Supervisor:
    """The process as the service talks to it. One thread uses it."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            SupervisorError: it cannot be started.
        """
        self._earlier: list[dict[str, Any]] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "protos.service.supervisor", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this very module
                words,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the service's terminal ends the service, which ends its jobs
                cwd=Path(__file__).parents[2],
            )
        except OSError as error:
            self._socket.close()
            raise SupervisorError(f"jobs cannot be started: {error.strerror}") from None
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], out: int, errors: int, folder: Path
    ) -> int:
        """Start a job in a session of its own, without a standard input.

        Args:
            name: by which its end is told.
            words: what is executed.
            environment: all of it.
            out: descriptor of its standard output.
            errors: of its standard error.
            folder: its working directory.
        Returns:
            Its process number.
        Raises:
            NotStartedError: the program cannot be started.
            SupervisorError: the supervisor has ended.
        """
        told = {"start": name, "words": list(words), "environment": dict(environment), "folder": str(folder)}
        self._send(told, (out, errors))
        while True:  # an end may be told just then
            heard = self._receive()
            if heard is None:
                raise SupervisorError("the process that starts jobs has ended")
            if heard.get("started") == name:
                return int(heard["pid"])
            if heard.get("not_started") == name:
                raise NotStartedError(f"a job cannot be started: {os.strerror(int(heard['errno']))}")
            self._earlier.append(heard)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the job and all that it started; to one that has ended, nothing."""
        self._send({"signal": name, "number": number})

    def ended(self, wait_s: float) -> list[Ended]:
        """The jobs that have ended since this was asked before.

        Args:
            wait_s: so long for the first.
        Raises:
            SupervisorError: it has ended itself, and the kernel ended its jobs.
        """
        found = [self._earlier.pop(0) for _ in range(len(self._earlier))]
        self._socket.settimeout(0.0 if found else max(wait_s, 0.001))
        try:
            while True:
                heard = self._receive()
                if heard is None:
                    raise SupervisorError("the process that starts jobs has ended")
                found.append(heard)
                self._socket.settimeout(0.0)
        except (BlockingIOError, TimeoutError):
            pass
        finally:
            self._socket.settimeout(None)
        return [Ended(one["ended"], one["status"]) for one in found]

    def close(self) -> None:
        """End it, and all of its jobs at once."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Supervisor:
        """Started already."""
        return self

    def __exit__(self, *_: object) -> None:
        """See :meth:`close`."""
        self.close()

    def _send(self, told: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._socket.sendmsg([json.dumps(told).encode()], ancillary)
        except OSError as error:
            raise SupervisorError(f"the process that starts jobs does not answer: {error.strerror}") from None

    def _receive(self) -> dict[str, Any] | None:
        try:
            raw = self._socket.recv(_MOST)
        except ConnectionError:  # it was killed before it had read all that it was sent
            return None
        return json.loads(raw) if raw else None


# -- the process


class _Jobs:
    """What runs, by name, and whom to tell."""

    def __init__(self, service: socket.socket) -> None:
        self._service, self._running = service, dict[int, tuple[str, subprocess.Popen[bytes]]]()

    def heed(self) -> bool:
        """Do what the service says; False when it has ended."""
        raw, descriptors = self._message()
        if not raw:
            return False
        told = json.loads(raw)
        if "start" in told:
            self._start(told, descriptors)
        else:
            for name, process in self._running.values():
                if name == told["signal"]:
                    with contextlib.suppress(ProcessLookupError):  # its session is its own, and it is not buried yet
                        os.killpg(process.pid, int(told["number"]))
        return True

    def _message(self) -> tuple[bytes, list[int]]:
        try:
            raw, ancillary, _, _ = self._service.recvmsg(_MOST, socket.CMSG_SPACE(2 * array.array("i").itemsize))
        except ConnectionError:
            return b"", []
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        return raw, list(descriptors)

    def _start(self, told: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        name, (out, errors) = told["start"], descriptors
        try:
            process = subprocess.Popen(  # noqa: S603 - what the service said
                told["words"],
                env=told["environment"],
                cwd=told["folder"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            self._tell({"not_started": name, "errno": error.errno})
        else:
            self._running[process.pid] = (name, process)
            self._tell({"started": name, "pid": process.pid})
        finally:
            os.close(out)
            os.close(errors)

    def bury(self) -> None:
        """Tell of those that have ended; what they left in their sessions ends with them."""
        for pid, (name, process) in list(self._running.items()):
            if not _over(pid):
                continue
            with contextlib.suppress(ProcessLookupError):  # before it is buried: until then its number is its own
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            del self._running[pid]
            self._tell({"ended": name, "status": process.returncode})

    def end(self) -> None:
        """The service has ended: so do they."""
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _tell(self, told: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the next look finds that the service has ended
            self._service.send(json.dumps(told).encode())


def _over(pid: int) -> bool:
    """Whether a child has ended; it is not buried by this."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@contextlib.contextmanager
def _children_told() -> Iterator[int]:
    """A descriptor that can be read when a child has ended."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(-1)


def main(words: Sequence[str]) -> int:
    """Serve the service at the other end of a descriptor until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the service says when; an ignored one would be so in every job
    with (
        socket.socket(fileno=int(words[0])) as service,
        _children_told() as ended,
        selectors.DefaultSelector() as ear,
    ):
        jobs = _Jobs(service)
        os.set_inheritable(service.fileno(), False)
        ear.register(service, selectors.EVENT_READ)
        ear.register(ended, selectors.EVENT_READ)
        try:
            while True:
                ready = [key.fd for key, _ in ear.select()]
                if ended in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(ended, _MOST)
                    jobs.bury()
                if service.fileno() in ready and not jobs.heed():
                    return 0
        finally:
            jobs.end()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
