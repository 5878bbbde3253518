"""Nothing reports, updates or installs: a whole federated run where there is no network, every process watched.

Real processes in a network namespace that has loopback and no route. Two instruments that do not depend on Python or
on what a library does: the kernel's counters of packets without a route, and strace on every process, which sees each
connection that is tried and each program that is started.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.network_namespace import isolation, needs_namespace

pytestmark = pytest.mark.timeout(2400)  # under strace, on a machine that may be busy
ROOT = Path(__file__).resolve().parents[2]
_TO = re.compile(r'connect\(.*(?:sin_addr=inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)")')
_PROGRAM = re.compile(r'execve\("([^"]+)".*\) = 0')
_INSTALLERS = {"uv", "uvx", "pip", "pip3", "conda", "curl", "wget", "git", "apt-get"}
_FLOWERS_OWN = re.compile(r"(flower|state)\.db(-wal|-shm)?|source")  # what a Flower home may hold


@dataclass(frozen=True)
class Watched:
    """What was seen of everything that ran in the namespace."""

    answer: dict[str, Any]  # of the script
    tried: list[str]  # addresses off loopback to which any process tried to connect
    programs: set[str]  # that were started, by name
    traced: bool  # by strace too


def watched(module: str, folder: Path) -> Watched:
    """Run a module of tests.scale in a namespace without a network, its home an empty folder."""
    (folder / "home").mkdir()
    trace = folder / "trace"
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=connect,execve", "-e", "signal=none", "-o", trace]
    command = [*isolation(), sys.executable, "-m", f"tests.scale.{module}", str(folder)]
    traced = shutil.which("strace") is not None
    environment = {**os.environ, "HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*(strace if traced else []), *command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = trace.read_text(errors="replace").splitlines() if traced else []
    found = [next(filter(None, m.groups())) for line in lines if (m := _TO.search(line))]
    return Watched(
        json.loads(done.stdout.splitlines()[-1]),
        [address for address in found if not _is_loopback(address)],
        {Path(m[1]).name for line in lines if (m := _PROGRAM.search(line))},
        traced,
    )


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@needs_namespace
def test_a_connection_to_the_outside_is_noticed_by_both_instruments(tmp_path: Path) -> None:
    seen = watched("alone", tmp_path)
    assert seen.answer["interfaces"] == []
    assert seen.answer["unrouted"]["ipv4"] >= 1
    assert seen.answer["unrouted"]["ipv6"] >= 1
    if seen.traced:
        assert {"192.0.2.1", "2001:db8::1"} <= set(seen.tried)


@needs_namespace
def test_a_federated_run_without_a_network_completes_and_no_process_tries_to_leave(tmp_path: Path) -> None:
    seen = watched("isolated", tmp_path)
    assert seen.answer["interfaces"] == []
    assert "finished" in seen.answer["told"]
    assert seen.answer["unrouted"] == {"ipv4": 0, "ipv6": 0}
    assert seen.tried == []
    if seen.traced:
        assert any(name.startswith("python") for name in seen.programs)
        assert not seen.programs & _INSTALLERS
    homes = [*tmp_path.rglob("flower"), *tmp_path.rglob("flwr"), *tmp_path.rglob(".flwr")]
    assert homes, "Flower's homes are where the run left them"
    installed = [p for home in homes for p in home.rglob("*") if not _FLOWERS_OWN.fullmatch(p.name)]
    assert installed == []
    assert list((tmp_path / "home").rglob("*")) == [], "nothing below the user's home"
    assert not [p for p in tmp_path.rglob("*") if p.name == "site-packages" or p.suffix == ".whl"]
