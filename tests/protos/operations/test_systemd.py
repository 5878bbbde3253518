"""What systemd hears, over its real kind of socket."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from protos.operations.systemd import Systemd


def manager(address: str) -> socket.socket:
    there = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    there.bind("\0" + address[1:] if address.startswith("@") else address)
    there.settimeout(10)
    return there


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_ready_alive_and_stopping_are_told_and_no_child_may_speak(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "s") if kind == "path" else f"@lazaret-test-{os.getpid()}"
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid()), "HOME": "x"}
    with manager(address) as there:
        with Systemd(lambda: None, environment):
            assert environment == {"HOME": "x"}
            assert there.recv(100) == b"READY=1"
            assert there.recv(100) == b"WATCHDOG=1\nSTATUS=well"
        said = there.recv(100)
        while said.startswith(b"WATCHDOG"):
            said = there.recv(100)
        assert said == b"STOPPING=1"


def test_a_service_that_is_not_well_does_not_feed_the_watchdog(tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "s"), "WATCHDOG_USEC": "20000"}
    with manager(environment["NOTIFY_SOCKET"]) as there, Systemd(lambda: "the ledger\nis stopped", environment):
        assert there.recv(100) == b"READY=1"
        assert there.recv(100) == b"STATUS=the ledger is stopped"


def test_a_service_that_hangs_does_not_feed_the_watchdog(tmp_path: Path) -> None:
    environment, hang = {"NOTIFY_SOCKET": str(tmp_path / "s"), "WATCHDOG_USEC": "20000"}, threading.Event()

    def wrong() -> str | None:
        hang.wait(30)
        return None

    with manager(environment["NOTIFY_SOCKET"]) as there, Systemd(wrong, environment):
        assert there.recv(100) == b"READY=1"
        there.settimeout(0.2)
        with pytest.raises(TimeoutError):
            there.recv(100)
        hang.set()
        there.settimeout(10)
        assert there.recv(100).startswith(b"WATCHDOG=1")


@pytest.mark.parametrize(
    "environment",
    [{}, {"NOTIFY_SOCKET": "/nonexistent/socket", "WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1"}],
)
def test_without_systemd_nothing_is_said_and_nothing_fails(environment: dict[str, str]) -> None:
    with Systemd(lambda: None, environment) as systemd:
        systemd.say("STATUS=x")
    assert not systemd._thread.is_alive()


def test_the_watchdog_of_another_process_is_not_ours(tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "s"), "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}
    with manager(environment["NOTIFY_SOCKET"]) as there, Systemd(lambda: None, environment):
        assert there.recv(100) == b"READY=1"
        there.settimeout(0.2)
        with pytest.raises(TimeoutError):
            there.recv(100)
