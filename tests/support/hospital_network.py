"""Hosts of their own for hospitals: a network namespace for each, behind a line of so many Mbit/s that can be cut.

The kernel shapes the line in both directions (``tc tbf``). Taking it down is what a broken VPN does: nobody is told.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

_NET = "10.77.0"
HUB = f"{_NET}.1"  # where the coordinator is reached


def _run(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@cache
def possible() -> bool:
    """Whether hosts can be made here: as root, with ``ip``, ``tc`` and the kernel's token bucket."""
    if os.geteuid() != 0:
        return False
    made = _run("ip", "netns", "add", "lzt") and _run(
        "ip", "link", "add", "lzt0", "type", "veth", "peer", "name", "lzt1"
    )
    shaped = made and _run(*_shape("lzt0", 4.0))
    _run("ip", "link", "del", "lzt0")
    _run("ip", "netns", "del", "lzt")
    return shaped


def need_hosts() -> None:
    """Skip where they cannot be made. Asked by a test that runs, and never while tests are collected."""
    if not possible():
        pytest.skip("network namespaces with a shaped line take root, ip and tc")


def _shape(link: str, mbit: float) -> Sequence[str]:
    """A token bucket: the rate, 32 KiB at once, and what waits longer than 400 ms is dropped."""
    return (
        "tc",
        "qdisc",
        "add",
        "dev",
        link,
        "root",
        "tbf",
        "rate",
        f"{mbit}mbit",
        "burst",
        "32kb",
        "latency",
        "400ms",
    )


@dataclass(slots=True)
class HospitalNetwork:
    """Namespaces of the sites, joined by a bridge."""

    sites: Sequence[str]
    mbit: float
    _made: list[str] = field(default_factory=list)

    def inside(self, site: str) -> list[str]:
        """What goes before a command that shall run at a site."""
        return ["ip", "netns", "exec", f"lz-{site}"]

    def cut(self, site: str) -> None:
        """Take a site's line down."""
        assert _run("ip", "link", "set", self._link(site), "down")

    def mend(self, site: str) -> None:
        """And up again."""
        assert _run("ip", "link", "set", self._link(site), "up")

    def carried(self, site: str, *ways: str) -> int:
        """Bytes that have crossed a site's line, its packets' own included: "rx" from it, "tx" to it, or both."""
        base = Path(f"/sys/class/net/{self._link(site)}/statistics")
        return sum(int((base / f"{way}_bytes").read_text()) for way in ways or ("rx", "tx"))

    def _link(self, site: str) -> str:
        return f"lzh{self.sites.index(site)}"

    def _make(self) -> None:
        assert _run("ip", "link", "add", "lz0", "type", "bridge")
        assert _run("ip", "addr", "add", f"{HUB}/24", "dev", "lz0")
        assert _run("ip", "link", "set", "lz0", "up")
        for number, site in enumerate(self.sites):
            space, here, there = f"lz-{site}", self._link(site), f"lzn{number}"
            assert _run("ip", "netns", "add", space)
            assert _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", space)
            assert _run("ip", "link", "set", here, "master", "lz0")
            assert _run("ip", "link", "set", here, "up")
            for words in (
                ("ip", "link", "set", "lo", "up"),
                ("ip", "addr", "add", f"{_NET}.{number + 2}/24", "dev", there),
                ("ip", "link", "set", there, "up"),
                _shape(there, self.mbit),
            ):
                assert _run(*self.inside(site), *words), words
            assert _run(*_shape(here, self.mbit))

    def _remove(self) -> None:
        for site in self.sites:
            _run("ip", "link", "del", self._link(site))
            _run("ip", "netns", "del", f"lz-{site}")
        _run("ip", "link", "del", "lz0")


@contextlib.contextmanager
def hospital_network(sites: Sequence[str], mbit: float) -> Iterator[HospitalNetwork]:
    """Hosts for these sites; nothing of them is left behind."""
    network = HospitalNetwork(sites, mbit)
    network._remove()  # of an earlier test that was killed
    try:
        network._make()
        yield network
    finally:
        network._remove()
