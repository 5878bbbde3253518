"""Each process that reads foreign bytes, seen from inside when it is taken over: what it can reach.

The processes are the product's, started by the product's own parents; ``tests.support.inside`` stands in their place
and takes over where the first foreign byte would be read. What must work, works in the tests of each: reading files,
receiving, rounds, runs, inspections.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.federation import supernode_process
from agent.ingest.parser_process import ParserProcess
from agent.pacs.dicomweb.stow_process import Stow, StowSettings
from agent.pacs.dimse.config import Caller, ListenerSettings
from agent.pacs.dimse.listener_process import Listener
from agent.storage import site_directory
from agent.storage.spool import Spool, room_key
from coordinator.federation.run_messages import RunSpec
from coordinator.federation.run_process import RunProcess
from coordinator.federation.strategy import RoundModel, RoundPlan
from coordinator.sandbox.inspector_process import InspectionLimits, run_confined
from deploy.phantoms import scanner_files
from policies.review.policy import preset
from protos.federation import flower_environment
from protos.federation.messages import STUB_DIGEST
from protos.identity.key_files import write_private
from protos.operations.confinement import landlock_abi
from tests.support import inside

SITE = 'site = "a"\ncoordinator = "localhost:1"\ninput = "in"\nmodalities = ["OT"]\n' + (
    "secondary_capture_modalities = []\npublic_components = []\n"
)
DENIED = {errno.EPERM, errno.EACCES}
PIPES = {"pipe", "device"}
# Unconfined, these do something, so that a refusal below is the confinement's work.
OPEN = (
    *("fork", "spawn", "kill", "others' /proc", "parent's environment", "parent's memory", "parent's descriptors"),
    *("parent's command line", "kernel", "socket tcp", "socket udp", "socket tcp6", "socket udp6", "socket unix"),
    *("socket unix udp", "socket netlink", "pair of SOCK_DGRAM", "pair of SOCK_RAW", "pair of SOCK_SEQPACKET"),
)
RUNNABLE = ("process_vm_readv", "pidfd_open", "memfd_create", "prlimit64 of the parent")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")


@dataclass(frozen=True)
class Site:
    """A site's directory with its keys, and a room."""

    folder: Path
    home: site_directory.SiteDirectory
    room: Spool
    victim: socket.socket  # of somebody else, bound to a path

    @property
    def secrets(self) -> dict[str, bytes]:
        """Each key as bytes that may not lie in a reader's memory: raw, hexadecimal, and text of PEM files."""
        raw = {name: self.home.secret(name) for name in ("vault", "deidentify")}
        raw["project"] = (self.home.project_keys / "main" / "key").read_bytes()
        raw["room"] = room_key(raw["vault"])
        text = {f"{name} in hex": key.hex().encode() for name, key in raw.items()}
        pems = {name: (self.home.keys / f"{name}.key").read_bytes() for name in ("sign", "request", "node")}
        return raw | text | {name: pem.splitlines()[1][24:56] for name, pem in pems.items()}

    @property
    def who(self) -> Deidentifier:
        """The site's pseudonyms."""
        project = (self.home.project_keys / "main" / "key").read_bytes()
        return Deidentifier(project, people=self.home.secret("deidentify"))

    def targets(self, spool: str = "") -> dict[str, Any]:
        """What a process that was taken over goes for."""
        files = sorted(str(path) for path in self.home.root.rglob("*") if path.is_file())
        starts = [secret[:6].hex() for secret in self.secrets.values()]
        victim = self.victim.getsockname()
        places = {"folder": str(self.folder), "spool": spool, "socket": victim}
        return {"files": [*files, "/etc/passwd"], "starts": starts, **places}

    def reached(self) -> int:
        """How many messages reached the victim's socket since the last time."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while self.victim.recv(64):
                count += 1
        return count


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A fresh one. Of ledger and vault only the names matter here."""
    home = site_directory.create(tmp_path / "home", SITE, preset("internal"))
    for name in ("ledger.db", "vault.db", "agent.log"):
        (home.root / name).write_bytes(b"private")
    (tmp_path / "bystander").write_bytes(b"of somebody else")
    key = room_key(home.secret("vault"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as victim:
        victim.setblocking(False)
        victim.bind(str(tmp_path / "victim"))
        yield Site(tmp_path, home, Spool(tmp_path / "home" / "inbox", key), victim)


class Report:
    """What a process that was taken over tells, heard beside the test."""

    def __init__(self, end: int) -> None:
        self._found: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=lambda: self._found.append(inside.heard(end)))
        self._thread.start()

    def found(self) -> dict[str, Any]:
        """All of it."""
        self._thread.join()
        return self._found[0]


def taken_over(kind: str, site: Site, patch: pytest.MonkeyPatch, spool: str = "") -> Report:
    """From now on another program starts in the place of Python, and of the product's process."""
    program, end = inside.stand_in(kind, site.folder, site.targets(spool))
    patch.setattr(sys, "executable", str(program))
    return Report(end)


def held(found: dict[str, Any], site: Site) -> list[str]:
    """Which secrets lie in its memory."""
    places = [bytes.fromhex(place) for place in found["memory"]]
    return [name for name, key in site.secrets.items() if any(place.startswith(key) for place in places)]


def closed(found: dict[str, Any], site: Site) -> None:
    """What holds for every row of the table: no keys, no files, no new socket, no program, nobody's /proc."""
    assert found["canary"], "the search of the memory finds what lies there"
    assert held(found, site) == []
    wrong = {what: how for what, how in found["calls"].items() if how not in DENIED}
    # the C library has no call of its own for these; an answer that they do not exist is a refusal, too
    assert {what: how for what, how in wrong.items() if how != errno.ENOSYS} == {}
    assert {path: how for path, how in found["files"].items() if how != errno.EACCES} == {}
    assert {what: how for what, how in found["writes"].items() if how not in DENIED} == {}
    assert site.reached() == 0
    assert set(found["kinds"]) <= {"SOCK_STREAM", "SOCK_SEQPACKET"}  # nothing that sends by path
    assert found["environment"]
    assert "DATABASE_PASSWORD" not in found["environment"]


@pytest.fixture(autouse=True)
def landlock() -> None:
    """The rows on files hold with Landlock alone."""
    if not landlock_abi():
        pytest.skip("this kernel has no Landlock")


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something of the agent's environment that no child needs."""
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")


def test_unconfined_all_of_it_is_reached(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes do bite: what the confined processes are refused, one without confinement gets."""
    program, end = inside.stand_in("nothing", site.folder, site.targets(str(site.room.folder)))
    taken = subprocess.Popen([str(program)], env={**os.environ, "HELD": site.secrets["vault in hex"].decode()})
    found = inside.heard(end)
    taken.wait()
    assert set(found["files"].values()) == {inside.DONE}
    assert {found["writes"][what] for what in ("make", "write", "rights", "times", "folder")} == {inside.DONE}
    assert {what: found["calls"][what] for what in OPEN if found["calls"][what] != inside.DONE} == {}
    assert site.reached() == 2  # a pair of SOCK_SEQPACKET keeps to itself, whatever name it is given
    assert found["calls"]["exec"] == errno.ENOENT
    assert "DATABASE_PASSWORD" in found["environment"]
    assert held(found, site) == ["vault in hex"]
    if os.uname().machine == "x86_64":
        assert {what: found["calls"][what] for what in RUNNABLE if found["calls"][what] != inside.DONE} == {}


def test_the_reader_of_dicom_holds_no_key_and_reaches_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = taken_over("reader", site, monkeypatch)
    with ParserProcess(AdmissionRules(frozenset({"CT"})), site.who) as reader:
        with pytest.raises(FileRejectedError, match="undecodable"):
            reader.read(scanner_files.sequence_bomb(1), "0" * 32)
        found = taken.found()
    closed(found, site)
    assert set(found["open"]) <= PIPES
    assert found["sockets"] == []


def ended(process: int) -> bool:
    """Is it gone, or dead and not yet buried?"""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


PARENT = """
import signal, sys, threading, time
from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.ingest.parser_process import ParserProcess

reader = ParserProcess(AdmissionRules(frozenset({"CT"})), Deidentifier(bytes(32)))
reader._start()
print(reader.pid, flush=True)
threading.Event().wait()
"""


def test_a_reader_that_looks_at_no_pipe_ends_with_an_agent_that_is_killed() -> None:
    """It is in a session of its own. Stopped, it stands for one that is busy with a file and sees no pipe end."""
    agent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    reader = int(agent.stdout.readline())
    try:
        os.kill(reader, signal.SIGSTOP)
        assert not ended(reader)
        agent.kill()
        agent.wait()
        until = time.monotonic() + 60
        while not ended(reader) and time.monotonic() < until:
            time.sleep(0.05)
        assert ended(reader)
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(reader, signal.SIGKILL)


def test_a_listeners_worker_holds_no_key_of_the_site_and_reaches_its_spool_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = str(site.room.folder)
    taken = taken_over("listener", site, monkeypatch, spool)
    callers = (Caller("PACS", ("127.0.0.1",)),)
    limits = {"workers": 1, "least_free_bytes": 0, "full_at": 1.0}
    settings = ListenerSettings("LAZARET", callers, plain_tcp=True, port=0, **limits)  # type: ignore[arg-type]
    with (
        Listener(settings, site.room.folder, room_key(site.home.secret("vault"))) as listener,
        socket.create_connection(("127.0.0.1", listener.port)),
    ):
        found = taken.found()
    closed(found, site)
    of_a_receiver(found)
    assert len(found["sockets"]) == 2  # the connection, and the channel to its parent


def test_the_receiver_of_stow_holds_no_key_of_the_site_and_reaches_its_spool_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = taken_over("stow", site, monkeypatch, str(site.room.folder))
    token = site.folder / "token"
    write_private(token, b"t" * 40)
    settings = StowSettings(port=0, token_file=token, least_free_bytes=0)
    with (
        Stow(settings, site.room.folder, room_key(site.home.secret("vault"))) as stow,
        socket.create_connection(("127.0.0.1", stow.port)) as sender,
    ):
        sender.sendall(b"POST /dicom-web/studies HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        found = taken.found()
    closed(found, site)
    of_a_receiver(found)


def of_a_receiver(found: dict[str, Any]) -> None:
    """Its spool, and its sockets as they are."""
    spool = found["spool"]
    assert {spool.pop(what) for what in ("make", "keep", "remove")} == {inside.DONE}
    assert set(spool.values()) <= {errno.EACCES, errno.EPERM, errno.EXDEV}
    for held in found["sockets"]:
        assert {held[what] for what in ("connect", "bind", "sendto", "fast open")} == {errno.EPERM}


def test_the_flower_link_holds_no_key_and_reaches_its_two_descriptors(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network is what the agent calls for it: one method at one port of one host. It has none of its own."""
    taken = taken_over("link", site, monkeypatch)
    key = supernode_process._NodeKey(site.home.keys / "node.key")
    setup = supernode_process.LinkSetup(key.public.decode(), STUB_DIGEST, "available")
    with httpx.Client(base_url="http://coordinator") as client, supernode_process._Child(setup, client, key):
        found = taken.found()
    closed(found, site)
    of_two_descriptors(found)


def test_the_process_of_a_run_holds_no_key_and_reaches_its_two_descriptors(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**flower_environment.SETTINGS, "FLWR_HOME": str(site.folder / "flower")}.items():
        monkeypatch.setenv(name, value)
    taken = taken_over("run", site, monkeypatch)
    plan = RoundPlan(
        run="run-1",
        sites=("a",),
        rounds=1,
        first_round=0,
        model=RoundModel(np.zeros(2, np.float32)),
        config=b"{}",
        min_sites=1,
        least_grants=1,
        round_timeout_s=5.0,
        node_wait_s=1.0,
    )
    with RunProcess(plan) as child:
        RunSpec(plan, "token").send(child.pipe)
        found = taken.found()
    closed(found, site)
    of_two_descriptors(found)


def of_two_descriptors(found: dict[str, Any]) -> None:
    """A pair of sockets each, which nothing turns elsewhere."""
    assert set(found["open"]) <= PIPES | {"socket"}
    assert len(found["sockets"]) == 2
    for held in found["sockets"]:
        assert set(held.values()) == {errno.EPERM}


def test_the_inspection_of_artifacts_reaches_its_one_descriptor(site: Site, tmp_path: Path) -> None:
    targets = site.targets()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    program = tmp_path / "program"
    program.mkdir()
    (program / "taken.py").write_text(
        "import json\nfrom protos.operations.confinement import serve\nfrom tests.support import inside\n"
        f"inside.begin({str(fifo)!r}, json.dumps({targets!r}))\n"
        "def work(source, request):\n    inside.report()\n    return {}\n"
        "def main():\n    serve(work)\n"
    )
    root = str(Path(__file__).resolve().parents[1])
    report = Report(end)
    with Path(__file__).open("rb") as source:
        ran = run_confined("taken", {}, source.fileno(), InspectionLimits(), (root, str(program)))
    found = report.found()
    assert ran.answer is not None
    found["files"] = {path: errno.EACCES if how == errno.EPERM else how for path, how in found["files"].items()}
    closed(found, site)
    assert set(found["open"]) <= PIPES | {"file"}
    assert found["sockets"] == []
