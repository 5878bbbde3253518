"""The lines between agents and coordinator are cut, half open, reset, slow: runs end, and nothing is lost.

Each agent dials a proxy of its own (or a CONNECT proxy), which misbehaves in the middle of a run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.demo.scene import SITES
from policies.ledger.entries import Admitted, Sent
from tests.faults.audit import Auditor, Ledgers
from tests.faults.kills import after
from tests.faults.stage import COORDINATOR, Stage, environment, eventually, signal_both
from tests.support.connect_proxy import ConnectProxy
from tests.support.tcp_proxy import TcpProxy, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Lines = dict[str, TcpProxy]


@pytest.fixture(scope="module")
def stage(enrolled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage.copied(enrolled, tmp_path_factory.mktemp("lines") / "stage") as made:
        yield made


@pytest.fixture(scope="module")
def lines(stage: Stage) -> Iterator[Lines]:
    """One proxy for each site; everything runs."""
    with contextlib.ExitStack() as stack:
        made = {site: stack.enter_context(TcpProxy(f"127.0.0.1:{stage.port}")) for site in SITES}
        for site, proxy in made.items():
            stage.dial(site, proxy.address)
        stage.start_all()
        yield made


@pytest.fixture(scope="module")
def auditor() -> Auditor:
    return Auditor()


def disturbed(
    stage: Stage, auditor: Auditor, run: str, disturb: Callable[[], None]
) -> tuple[dict[str, str], Ledgers]:
    """A run with something done to it once its first round is out; what must hold holds, and its last event."""
    launched = stage.launch(run)
    sent = lambda: any(event["state"] == "sent" for event in launched.events())  # noqa: E731 - used once
    eventually(sent, f"{run} never sent a round: {launched.said.read_text()[-500:]}", 120)
    disturb()
    end = stage.carried_out(run)
    launched.process.wait(60)
    assert not list(after(stage, auditor, run, end["state"]))
    assert end["state"] == "finished" or end["reason"]
    return end, auditor.look(stage)


def test_a_run_finishes_although_every_line_is_cut_in_the_middle(
    stage: Stage, lines: Lines, auditor: Auditor
) -> None:
    def cut() -> None:
        for proxy in lines.values():
            proxy.cut()
        time.sleep(3)
        for proxy in lines.values():
            proxy.forward()

    end, ledger = disturbed(stage, auditor, "cut", cut)
    assert end["state"] == "finished"
    assert ledger.closed("cut") == [1, 2]


@pytest.mark.parametrize("count", [500, 3_000, 9_000, 20_000, 60_000])
def test_a_run_finishes_although_every_line_is_reset_after_so_many_bytes(
    stage: Stage, lines: Lines, auditor: Auditor, count: int
) -> None:
    """In the middle of the handshake, of a call's head, of an update's bytes; again and again for some seconds."""

    def reset() -> None:
        before = sum(proxy.connections for proxy in lines.values())
        for proxy in lines.values():
            proxy.reset_after(count)
        time.sleep(6)
        for proxy in lines.values():
            proxy.forward()
        assert sum(proxy.connections for proxy in lines.values()) > before, "no line was ever reset"

    end, _ = disturbed(stage, auditor, f"reset-{count}", reset)
    assert end["state"] == "finished"


def test_a_run_finishes_over_slow_lines(stage: Stage, lines: Lines, auditor: Auditor) -> None:
    """Half a second each way, and a modem's rate."""
    for proxy in lines.values():
        proxy.delay_s, proxy.bytes_per_s = 0.5, 64_000.0
    try:
        end, _ = disturbed(stage, auditor, "slow", lambda: None)
    finally:
        for proxy in lines.values():
            proxy.delay_s, proxy.bytes_per_s = 0.0, 0.0
    assert end["state"] == "finished"


def test_a_half_open_line_is_noticed_and_the_site_comes_back(stage: Stage, lines: Lines, auditor: Auditor) -> None:
    """Nobody is told anything: the agent's keepalive notices, and dials again."""
    line = lines["site-c"]

    def half_open() -> None:
        before = line.connections
        line.half_open()
        assert wait_until(lambda: line.connections > before, 120), "the dead line was never given up"
        line.forward()

    end, _ = disturbed(stage, auditor, "half-open", half_open)
    assert end["state"] == "finished"
    end, ledger = disturbed(stage, auditor, "after-half-open", lambda: None)
    assert set(end["sites"]) == set(SITES)
    assert not ledger.held("half-open")


def test_an_agent_that_sleeps_through_a_round_comes_back(stage: Stage, lines: Lines, auditor: Auditor) -> None:
    """SIGSTOP for longer than the round waits, as a laptop's lid; the two others go on without it."""
    del lines
    agent = stage.running["site-b"]

    def sleep() -> None:
        signal_both(agent.pid, signal.SIGSTOP)

    try:
        launched = stage.launch("asleep")
        eventually(lambda: any(e["state"] == "sent" for e in launched.events()), "nothing was sent", 120)
        sleep()
        assert wait_until(lambda: launched.process.poll() is not None, 400), "the others did not go on"
    finally:
        signal_both(agent.pid, signal.SIGCONT)
    end = launched.events()[-1]
    assert end["state"] == "finished"
    assert not list(after(stage, auditor, "asleep", "finished"))
    end, _ = disturbed(stage, auditor, "awake", lambda: None)
    assert set(end["sites"]) == set(SITES)


@pytest.mark.parametrize(("site", "carried"), [("site-a", 6_000), ("site-b", 15_000), ("site-c", 25_000)])
def test_a_release_goes_on_where_its_line_was_cut(
    stage: Stage, lines: Lines, auditor: Auditor, site: str, carried: int
) -> None:
    """Cut when so many bytes have passed: at the greeting, at the price, in the upload. It is admitted once."""
    stage.stop(site)
    line = lines[site]
    line.bytes_per_s = 20_000.0
    before = line.carried
    words = ["release", "ksame", "--basis", str(stage.work / "basis.safetensors"), "--modality", "OT", "--k", "5"]
    command = [sys.executable, "-m", "agent", "--home", str(stage.work / site), *words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()) as release:
        assert wait_until(lambda: line.carried - before >= carried or release.poll() is not None, 60)
        assert release.poll() is None, "it was done before the line was cut"
        line.cut()
        time.sleep(2)
        line.bytes_per_s = 0.0
        line.forward()
        said, _ = release.communicate(timeout=240)
    assert release.returncode == 0, said
    ledger = auditor.look(stage)
    assert not list(ledger.faults("", "released", stage.work / COORDINATOR / "runs" / "none"))
    mine = [e for e in ledger.of(COORDINATOR, Admitted, "") if isinstance(e, Admitted) and e.site == site]
    sent = [e for e in ledger.of(site, Sent, "") if isinstance(e, Sent)]
    assert [e.release for e in mine] == [e.release for e in sent]
    assert len(mine) == 1
    stage.start(site)


def test_an_agent_that_knows_only_a_connect_proxy_takes_part(stage: Stage, lines: Lines, auditor: Auditor) -> None:
    del lines
    target = f"127.0.0.1:{stage.port}"
    with ConnectProxy(frozenset({target})) as proxy:
        stage.stop("site-a")
        stage.dial("site-a", target, proxy.address)
        stage.start("site-a")
        end, _ = disturbed(stage, auditor, "connect", lambda: None)
        assert "site-a" in end["sites"]
        assert set(proxy.tunnels) == {target}
        assert not proxy.refused
        assert proxy.carried > 40_000, "its updates went another way"
        assert not _straight(stage, "site-a"), "the agent has a connection past the proxy"
        stage.stop("site-a")


def _straight(stage: Stage, site: str) -> list[str]:
    """Open connections from an agent's process to the coordinator's own port."""
    pid, port = stage.running[site].pid, f":{stage.port:04X}"
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [row[2] for row in rows if row[2].endswith(port) and row[9] in inodes]
