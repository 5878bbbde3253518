"""The control socket: who reaches it, what it bounds, what it tells, and what a kill leaves of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.service.control_client import (
    SOCKET,
    ServiceAnswerError,
    ServiceFaultError,
    ServiceHinderedError,
    ServiceRefusedError,
    ServiceStoppedError,
    ask_or_do,
    connect,
    main,
    service_fault,
)
from protos.service.control_socket import CONNECTIONS, ControlSocketError, control_socket
from tests.support.control_service import Log, app

NOBODY = 65534


class BusyError(Exception):
    """Another process works there."""


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def home(tmp_path: Path, log: Log) -> Iterator[Path]:
    """A home directory, whose path is longer than a socket's address, with a service in it."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir(mode=0o700)
    with control_socket(folder, app(), log):
        yield folder


def asked(home: Path, **fields: Any) -> Any:
    service = connect(home)
    assert service is not None
    with service:
        return service.ask("/ledger/limit", fields)


def raw(home: Path, said: bytes, patience_s: float = 20.0) -> bytes:
    """What comes back for these bytes, until the service hangs up."""
    folder = os.open(home, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(patience_s)
        one.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        os.close(folder)
        got = b""
        try:
            one.sendall(said)
            while more := one.recv(65_536):
                got += more
        except OSError:
            pass
        return got


def test_an_act_is_carried_out_and_described(home: Path) -> None:
    assert (home / SOCKET).stat().st_mode & 0o777 == 0o600
    assert asked(home, account="a", budget=3) == {"account": "a", "budget": 3}
    service = connect(home)
    assert service is not None
    assert service.about == {"api": 1, "side": "agent", "version": "1.2", "pid": os.getpid()}
    with service:
        described = service.ask("/openapi.json")
    form = described["components"]["schemas"]["LedgerLimitFields"]
    assert (form["required"], set(form["properties"])) == (["account"], {"account", "budget"})


@pytest.mark.parametrize(
    ("account", "error", "text"),
    [
        ("no", ServiceRefusedError, "that account is unknown: `ledger show` lists them"),
        ("ledger", ServiceStoppedError, "the ledger does not fold"),
        ("ours", ServiceFaultError, "internal fault (InvariantError)"),
        ("theirs", ServiceFaultError, "internal fault (ValueError)"),
        ("disk", ServiceHinderedError, "No space left on device: vault.db"),
        ("rights", ServiceRefusedError, "Permission denied: vault.db"),
        ("away", ServiceHinderedError, "no answer from the coordinator"),
        ("busy", ServiceHinderedError, "another command has the ledger"),
    ],
)
def test_an_error_keeps_its_sentence_its_exit_status_and_whether_it_may_pass_and_no_other_text_leaves(
    home: Path, log: Log, account: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as told:
        asked(home, account=account)
    assert str(told.value) == text
    assert getattr(told.value, "exit_code") == (1 if error in (ServiceRefusedError, ServiceHinderedError) else 70)  # noqa: B009
    assert "patient 7" not in str(log.lines)
    assert asked(home, account="a"), "it goes on"


@pytest.mark.parametrize(
    "fields", [{}, {"account": "a", "budjet": 3}, {"account": "a", "budget": "many"}, {"account": 7}]
)
def test_a_field_that_there_is_not_is_named_and_its_value_is_not(home: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ServiceRefusedError, match=r"does not take these fields: (account|budget|budjet)") as told:
        asked(home, **fields)
    assert "many" not in str(told.value)


def test_a_path_that_there_is_not_is_said_to_be_none(home: Path) -> None:
    service = connect(home)
    assert service is not None
    with service, pytest.raises(ServiceRefusedError, match="no such path: it may be older"):
        service.ask("/ledger/forget", {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
@pytest.mark.parametrize("opened", [False, True])
def test_another_user_of_the_machine_gets_nothing(opened: bool) -> None:
    """Not by the file's rights, and not by the kernel's word on the peer, where somebody loosened the rights."""
    program = f"""
import os, socket, sys
os.setgid({NOBODY}); os.setuid({NOBODY})
one = socket.socket(socket.AF_UNIX)
try:
    one.connect(sys.argv[1])
    one.sendall(b"GET /v1 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    print(one.recv(10))
except OSError as error:
    print(type(error).__name__)
"""
    with tempfile.TemporaryDirectory() as folder, control_socket(Path(folder), app(), Log()):
        Path(folder).chmod(0o755)
        if opened:
            Path(folder, SOCKET).chmod(0o666)
        words = [sys.executable, "-c", program, f"{folder}/{SOCKET}"]
        got = subprocess.run(words, capture_output=True, text=True, check=True, cwd="/").stdout.strip()
        assert got in (("b''", "ConnectionResetError", "BrokenPipeError") if opened else ("PermissionError",))
        assert asked(Path(folder), account="a")


def test_silent_callers_block_nobody_and_one_too_many_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protos.web.server._PLAIN_S", 60.0)
    with control_socket(tmp_path, app(), Log()), contextlib.ExitStack() as stack:

        def silent() -> socket.socket:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(60)
            one.connect(str(tmp_path / SOCKET))
            one.sendall(b"POST /v1/ledger/limit HTTP/1.1\r\nHost: ")
            return one

        held = [silent() for _ in range(CONNECTIONS - 1)]
        assert asked(tmp_path, account="a"), "there is one place left"
        more = [silent(), silent()]
        assert wait(more, 60), "one of two more is closed at once"
        for one in (*held, *more):
            one.close()
        until = time.monotonic() + 60
        while True:
            try:
                assert asked(tmp_path, account="a")
            except ServiceAnswerError:
                assert time.monotonic() < until, "the places are free again"
                time.sleep(0.05)
            else:
                break


def test_who_never_ends_a_request_is_cut_off(home: Path) -> None:
    assert raw(home, b"GET /v1 HTTP/1.1\r\nHost: x\r\nX: ") == b""


def test_a_body_that_is_too_large_is_refused_before_it_is_read(home: Path, log: Log) -> None:
    head = b"POST /v1/ledger/limit HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nConnection: close\r\n\r\n"
    assert raw(home, head).startswith(b"HTTP/1.1 413 ")
    assert log.lines[0][1]["rule"] == "too_large"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=300),
    st.sampled_from(
        [b"", b"POST /v1/ledger/limit HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\nConnection: close\r\n\r\n"]
    ),
)
def test_whatever_is_said_it_answers_others(home: Path, said: bytes, before: bytes) -> None:
    folder = os.open(home, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        one.sendall(before + said)
    os.close(folder)
    assert asked(home, account="a") == {"account": "a", "budget": 1}


def test_no_service_and_what_a_killed_one_left_are_none(tmp_path: Path) -> None:
    assert connect(tmp_path) is None
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / SOCKET))
    assert connect(tmp_path) is None
    with control_socket(tmp_path, app(), Log()):
        assert asked(tmp_path, account="a"), "it takes the place of what was left"
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_ends_late_does_not_take_away_the_socket_of_the_next(tmp_path: Path) -> None:
    with control_socket(tmp_path, app(), Log()):
        (tmp_path / SOCKET).rename(tmp_path / "first")
        with socket.socket(socket.AF_UNIX) as second:
            second.bind(str(tmp_path / SOCKET))
    assert (tmp_path / SOCKET).exists()


def test_a_directory_that_takes_no_socket_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / SOCKET).mkdir()
    with pytest.raises(ControlSocketError, match=r"control\.sock cannot be made in"):
        control_socket(tmp_path, app(), Log()).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [SOCKET], "and nothing is left of it"


def test_a_service_that_is_killed_in_the_middle_leaves_the_outcome_open(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.control_service", str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as served:
        assert served.stdout is not None
        assert served.stdout.readline() == "up\n"
        service = connect(tmp_path)
        assert service is not None
        served.send_signal(signal.SIGSTOP)
        service._connection.request(
            "POST", "/v1/ledger/limit", b'{"account": "slow"}', {"Content-Type": "application/json"}
        )
        served.kill()
        with service, pytest.raises(ServiceAnswerError, match="whether this was done"):
            service.ask("/ledger/limit", {"account": "a"})


def test_an_act_is_done_here_where_nothing_runs_and_waits_for_a_service_that_starts(tmp_path: Path) -> None:
    done: list[str] = []
    busy = True

    def here(name: str, **_fields: Any) -> str:
        if busy:
            started.append(control_socket(tmp_path, app(), Log()))
            started[0].__enter__()
            raise BusyError
        done.append(name)
        return "here"

    started: list[Any] = []
    try:
        with ask_or_do(tmp_path, here, lambda error: isinstance(error, BusyError)) as act:
            assert act("ledger/limit", account="a") == {"account": "a", "budget": 1}
    finally:
        started[0].__exit__(None, None, None)
    busy = False
    with ask_or_do(tmp_path, here, lambda error: isinstance(error, BusyError)) as act:
        assert act("ledger/limit", account="a") == "here"
    assert done == ["ledger/limit"]


def test_another_version_is_not_spoken_to(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.service.control_client._ask", lambda *_: {"api": 2})
    with pytest.raises(ServiceRefusedError, match="another version"):
        connect(home)


def test_a_service_that_is_well_says_so_over_its_socket_and_one_that_is_not_says_why(
    tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    of, wrong = app(), ["the ledger could not be written: restart the agent"]
    with control_socket(tmp_path, of, log):
        assert (service_fault(tmp_path), main([str(tmp_path)])) == (None, 0)
        of.state.wrong = lambda: wrong[0]
        assert service_fault(tmp_path) == wrong[0]
        assert main([str(tmp_path)]) == 1
        of.state.wrong = lambda: 1 / 0
        assert "internal fault" in str(service_fault(tmp_path))
    assert capsys.readouterr().out == f"well\n{wrong[0]}\n"
    assert "no service answers" in str(service_fault(tmp_path))
    assert (main([]), main(["one", "two"])) == (2, 2)
    assert log.lines == [("control_fault", {"state": "ZeroDivisionError"})], "a probe that works leaves no line"


def test_a_service_that_hangs_is_not_well_and_nobody_waits_for_it(tmp_path: Path, log: Log) -> None:
    of = app()
    of.state.wrong = lambda: time.sleep(3)
    with control_socket(tmp_path, of, log):
        began = time.monotonic()
        assert "before it answered" in str(service_fault(tmp_path, 0.5))
        assert time.monotonic() - began < 2.5
    with socket.socket(socket.AF_UNIX) as deaf:  # bound by this test, and nobody ever accepts
        deaf.bind(str(tmp_path / SOCKET))
        deaf.listen(1)
        assert "does not answer" in str(service_fault(tmp_path, 0.2))


def test_the_socket_of_a_service_that_was_deleted_is_a_fault(home: Path) -> None:
    assert service_fault(home) is None
    (home / SOCKET).unlink()
    assert "start it, or restart it" in str(service_fault(home))
