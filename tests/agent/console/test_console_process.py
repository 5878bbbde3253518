"""Real processes: a service that holds the ledger and receives, its console beside it, and kill -9 for each."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from agent.cli import doctor
from agent.console.console_process import ConsoleProcess
from agent.event_log import open_log
from agent.pacs.archive import ArchiveConfig
from agent.pacs.dimse.query_retrieve_scu import echo
from agent.pacs.secret_files import make_secret
from agent.service import status
from agent.service.ledger_access import BorrowedLedger
from agent.service.process_monitoring import ask_status
from policies.ledger.backends.sqlite import open_sqlite, read_lines
from policies.ledger.entries import Approved
from policies.ledger.store import LedgerBusyError
from protos.operations.event_counters import EventCounters
from protos.web.settings import ConsoleConfigError
from tests.agent.console.hospital import Client, Hospital, approve, at, hospital, settled, sha, words
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
SECRET = "a password of the service's environment"


@dataclass
class Served:
    """``serve``, as a process."""

    made: Hospital
    process: subprocess.Popen[str]
    dimse: int
    stow: int
    watched: int

    def children(self, module: str) -> list[int]:
        """Its processes that run a module."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and module.encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
        return found

    def child(self, module: str) -> int:
        """The one that runs it."""
        (pid,) = self.children(module)
        return pid

    def metric(self, name: str) -> float:
        """A line of ``/metrics``."""
        text = httpx.get(f"http://127.0.0.1:{self.watched}/metrics", trust_env=False, timeout=60).text
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(value)

    def echoes(self) -> bool:
        """C-ECHO is answered."""
        archive = ArchiveConfig("here", "LAZARET", "127.0.0.1", self.dimse, "PACS")
        echo(archive)
        return True

    def stows(self) -> bool:
        """The STOW receiver answers HTTP."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.post(f"http://127.0.0.1:{self.stow}/dicom-web/studies", trust_env=False).status_code == 401
        return False


def until(done: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def exists(pid: int) -> bool:
    """Whether a process runs; one that waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def served(made: Hospital, *more: str) -> Iterator[Served]:
    """``serve`` with receivers, console and metrics."""
    dimse, stow, watched = free_port(), free_port(), free_port()
    root = made.home.root
    if not (root / "stow.token").exists():
        make_secret(root / "stow.token")
    (root / "console.toml").write_text(f'listen = "127.0.0.1:0"\nmetrics = "127.0.0.1:{watched}"\n')
    (root / "ingest.toml").write_text(
        f'[listener]\nae_title = "LAZARET"\nplain_tcp = true\nport = {dimse}\nworkers = 1\n'
        'callers = [{ ae_title = "PACS", addresses = ["127.0.0.1"] }]\n'
        f'[stow]\nport = {stow}\ntoken_file = "stow.token"\nleast_free_bytes = 0\n'
    )
    command = [sys.executable, "-m", "agent", "--home", str(root), "serve", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SOME_SECRET": SECRET}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith("console: ")), "")
            at(made, line)
            until(lambda: f"port {watched}" in process.stdout.readline())  # type: ignore[union-attr]
            yield Served(made, process, dimse, stow, watched)
        finally:
            process.kill()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hospital]:
    with hospital(tmp_path) as one:
        yield one


@contextlib.contextmanager
def logged_in(made: Hospital, name: str) -> Iterator[Client]:
    """Who logs in as soon as the console answers."""

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError), made.client(name):
            return True
        return False

    until(answers)
    with made.client(name) as client:
        yield client


def test_a_console_that_is_killed_again_and_again_harms_neither_ledger_nor_receivers_and_is_seen(
    made: Hospital,
) -> None:
    release = made.release()
    value = sha(made, release)
    with served(made, "--modality", "OT") as serve:
        with pytest.raises(LedgerBusyError):
            open_sqlite(made.home.root / "ledger.db")
        with logged_in(made, "dora") as dora:
            assert "in the ledger" in approve(dora, "dora", release, value)
            told = words(dora.get("/pacs"))
            assert f"C-STORE as LAZARET, plain TCP 127.0.0.1:{serve.dimse} listens" in told
            assert f"STOW-RS 127.0.0.1:{serve.stow} listens" in told
            assert "serve is not running" not in words(dora.get("/ingest"))
        base, before = made.base, _checks(made)
        assert {name: said for name, (_, said) in before.items()} == dict.fromkeys(before, "it runs")
        for _ in range(2):
            old = serve.child("agent.console.console_main")
            os.kill(old, signal.SIGKILL)
            assert serve.echoes(), "images are received meanwhile"
            until(lambda old=old: serve.children("agent.console.console_main") not in ([], [old]))  # type: ignore[misc]
            until(lambda: ask_status(made.home.root).running("console"))
        assert made.base == base, "it has the port that was told"
        with logged_in(made, "hugo") as hugo:
            assert "in the ledger" in approve(hugo, "hugo", release, value)
            assert hugo.post(f"/releases/{release}/send").status_code == 303
            assert f"Admitted at level B: {release} has left." in settled(hugo)
            assert "killed by SIGKILL" in words(hugo.get("/"))
        with pytest.raises(LedgerBusyError, match=f"process {serve.process.pid} "):
            open_sqlite(made.home.root / "ledger.db")
        kind, said = _checks(made)["process console"]
        assert (kind, said[:53]) == ("note", "it runs; it ended 2 times since the service began, la")
        assert said.endswith("UTC: killed by SIGKILL")
        steps = {one.name: one.said for one in status.steps(made.home, dt.datetime.now(dt.UTC))}
        assert steps["process console"] == said
        assert serve.metric('lazaret_process_ends_total{process="console"}') == 2
        assert serve.metric('lazaret_log_events_total{event="console_act",level="info"}') >= 3, "told over the pipe"
    ends = [line for line in _log(made) if line["event"] == "process_ended"]
    assert [(one["where"], one["state"]) for one in ends] == [("console", "killed by SIGKILL")] * 2
    entries = [line.record.entry for line in read_lines(made.home.root / "ledger.db")]
    assert len([one for one in entries if isinstance(one, Approved)]) == 2
    assert BorrowedLedger(made.home).read().state.accounts["site-a/k"].spent == 1
    assert release in made.federation.store.state.releases


def _checks(made: Hospital) -> dict[str, tuple[str, str]]:
    """What doctor says of the processes."""
    found = doctor.findings(made.home, dt.datetime.now(dt.UTC))
    return {one.name: (one.state, one.said) for one in found if one.name.startswith("process")}


def _log(made: Hospital) -> list[dict[str, object]]:
    return [json.loads(line) for line in (made.home.root / "agent.log").read_text().splitlines()]


def test_receivers_that_are_killed_listen_again_at_the_same_ports_and_are_seen(made: Hospital) -> None:
    with served(made) as serve:
        assert serve.echoes()
        assert serve.stows()
        for module in ("agent.pacs.dimse.listener_main", "agent.pacs.dicomweb.stow_main"):
            old = serve.child(module)
            os.kill(old, signal.SIGKILL)
            until(lambda module=module, old=old: serve.children(module) not in ([], [old]))  # type: ignore[misc]
        until(serve.stows)
        assert serve.echoes()
        found = _checks(made)
        for name in ("process listener", "process stow"):
            assert found[name][0] == "note"
            assert "it runs; it ended once since the service began" in found[name][1]
        assert found["process console"] == ("pass", "it runs")
        for name, ends in (("listener", 1), ("stow", 1), ("console", 0)):
            assert serve.metric(f'lazaret_process_ends_total{{process="{name}"}}') == ends
        assert serve.metric('lazaret_dimse_events_total{event="worker_stopped"}') == 1


def test_a_service_that_is_killed_takes_its_console_along_and_one_that_ends_does_too(made: Hospital) -> None:
    modules = ("agent.console.console_main", "agent.pacs.dimse.listener_main", "agent.pacs.dicomweb.stow_main")
    for number in (signal.SIGKILL, signal.SIGTERM):
        with served(made) as serve:
            pids = [serve.child(module) for module in modules]
            serve.process.send_signal(number)
            assert serve.process.wait(60) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
            until(lambda pids=pids: not any(map(exists, pids)), 30)  # type: ignore[misc]
        assert _checks(made) == {}, "nobody serves"
    assert not [line for line in _log(made) if line["event"] == "process_ended"], "these were no faults"


def test_a_signal_to_all_of_them_at_once_ends_the_service_and_counts_as_no_fault(made: Hospital) -> None:
    """As systemd does it, and Ctrl-C in a terminal."""
    with served(made) as serve:
        os.kill(serve.child("agent.console.console_main"), signal.SIGTERM)
        os.kill(serve.child("agent.console.console_main"), signal.SIGINT)
        with logged_in(made, "dora"):
            pass
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(60) == 0
    assert not [line for line in _log(made) if line["event"] == "process_ended"]


def test_the_console_gets_nothing_of_the_service_but_one_socket(made: Hospital) -> None:
    with served(made, "--modality", "OT") as serve:
        console = Path(f"/proc/{serve.child('agent.console.console_main')}")
        assert SECRET.encode() in Path(f"/proc/{serve.process.pid}/environ").read_bytes()
        assert SECRET.encode() not in (console / "environ").read_bytes()
        opened = {os.readlink(path) for path in (console / "fd").iterdir()}
        assert not [one for one in opened if re.search(r"ledger\.db|vault\.db|control\.sock|service\.lock", one)]
        assert int((console / "oom_score_adj").read_text()) > int(
            Path(f"/proc/{serve.process.pid}/oom_score_adj").read_text()
        )


def test_a_console_that_cannot_be_opened_is_a_sentence_and_serve_does_not_serve(made: Hospital) -> None:
    root = made.home.root
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for text, sentence in (
            (f'listen = "127.0.0.1:{port}"\n', f"console: 127.0.0.1:{port} cannot be listened on"),
            ('listen = "nowhere"\n', "listen must be host:port"),
        ):
            (root / "console.toml").write_text(text)
            said = subprocess.run(
                [sys.executable, "-m", "agent", "--home", str(root), "serve"],
                capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
            )  # fmt: skip
            assert (said.returncode, sentence in " ".join(said.stderr.split())) == (1, True), said.stderr


def test_what_the_console_says_over_its_socket_is_counted_and_never_that_a_process_ended(made: Hospital) -> None:
    (made.home.root / "console.toml").write_text('listen = "127.0.0.1:0"\n')
    tally = EventCounters()
    console = ConsoleProcess(made.home.root, open_log(made.home.root / "agent.log", tally), tally)
    for said in ({"event": "process_ended", "where": "stow"}, {"event": "incident", "level": "error"}, {}):
        console._count(said)
    assert [(heard.event, heard.level) for heard in tally.counts()] == [("incident", "error"), ("", "info")]
    with console:
        at(made, console.told)
        with made.client("dora") as dora:
            assert dora.get("/").status_code == 200
    (made.home.root / "console.toml").unlink()
    with pytest.raises(ConsoleConfigError, match=r"console\.toml is missing"), ConsoleProcess(made.home.root, None):
        pass
