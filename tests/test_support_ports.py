"""A port that a test was given is nobody else's: no other test's, and none that the system hands out by itself."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from pathlib import Path

from tests.support import ports
from tests.support.ports import claimed, free_port

ROOT = Path(__file__).parents[1]


def test_no_port_is_given_twice_in_one_process_or_in_two() -> None:
    code = "from tests.support.ports import claimed, free_port; print(*(free_port() for _ in range(2000))); input()"
    ours = {free_port() for _ in range(20)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        later = {free_port() for _ in range(200)}
        other.communicate("\n")
    assert (len(ours), len(theirs), len(later)) == (20, 2000, 200)
    assert not ours & theirs | ours & later | theirs & later


def test_the_system_chooses_none_of_them_by_itself() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not first <= free_port() <= last


def test_a_port_on_which_somebody_listens_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert claimed(port) is None
    with contextlib.closing(claimed(port) or socket.socket()) as claim:
        assert claim.family is socket.AF_UNIX
        assert claimed(port) is None, "it has one already"


def test_a_claim_takes_none_of_the_low_descriptors() -> None:
    """pynetdicom, and whoever waits by select(2), fails in a process whose next descriptor is above 1023."""
    ports.free_port()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1 << 12:
        assert ports._held[-1].fileno() >= 1 << 11
