"""Pull the cable: what is killed in the middle is kept, nothing half-sent is admitted, no entry lost or doubled."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.demo.scene import RUN, DemoError, K, L, Scene
from policies.audit.verify import verify
from policies.ledger.export import Export
from tests.support.process_world import ledger, site_ledger, spent
from tests.support.tcp_proxy import wait_until

pytestmark = pytest.mark.timeout(2400)  # a whole federation, on a machine that may be busy
KILLED = Path(__file__).parent.parent / "support" / "killed_agent.py"


def words(scene: Scene) -> list[str]:
    basis = str(scene.work / "basis.safetensors")
    return [
        "release",
        "ksame",
        "--basis",
        basis,
        "--modality",
        "OT",
        "--k",
        str(K),
        "--l-diversity",
        str(L),
        "--json",
    ]


def kill(scene: Scene, site: str, moment: str) -> None:
    command = [sys.executable, str(KILLED), moment, "--home", str(scene.work / site), *words(scene)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(("site", "moment"), [("site-a", "before-submit"), ("site-b", "half-sent")])
def test_an_agent_killed_between_grant_and_verdict_keeps_what_it_made_and_sends_it_later(
    scene: Scene, site: str, moment: str
) -> None:
    kill(scene, site, moment)
    assert spent(site_ledger(scene, site), f"{site}/k") == (1, 0)
    with pytest.raises(DemoError, match="does not qualify"):  # its patients are in what set out: nothing is priced
        scene.run(scene.agent(site, *words(scene)), may_refuse=True)
    (sent,) = [e for e in site_ledger(scene, site)["entries"] if e["type"] == "sent"]
    assert spent(ledger(scene), f"{site}/k") == (1, 0), "held on both sides"
    scene.run(scene.agent(site, "release", "send", sent["release"]))
    export = ledger(scene)
    assert spent(export, f"{site}/k") == spent(site_ledger(scene, site), f"{site}/k") == (0, 1)
    assert [e["release"] for e in export["entries"] if e["type"] == "admitted" and e["site"] == site] == [
        sent["release"]
    ]


def test_an_agent_killed_after_the_verdict_learns_it_at_the_next_start(scene: Scene) -> None:
    """And the next release after other sites' crashes works."""
    kill(scene, "site-c", "after-verdict")
    with pytest.raises(DemoError, match="does not qualify"):
        scene.run(scene.agent("site-c", *words(scene)), may_refuse=True)
    (admitted,) = [e for e in ledger(scene)["entries"] if e["type"] == "admitted" and e["site"] == "site-c"]
    (mine,) = [e for e in site_ledger(scene, "site-c")["entries"] if e["type"] == "admitted"]
    assert mine["release"] == admitted["release"]
    assert (scene.work / "coordinator" / "releases" / admitted["release"] / "images.tar").exists()


@pytest.mark.slow
def test_a_coordinator_killed_in_the_middle_of_a_run_goes_on_from_its_ledger(scene: Scene) -> None:
    before: list[bytes] = []

    def say(text: str) -> None:
        if "round 1" in text and "closed" in text and not before:
            path = scene.work / "first.export"
            scene.run(scene.coordinator("ledger", "export", str(path)))
            before.extend(Export.parse(path.read_bytes()).entries)
            _kill_coordinator(scene)

    with pytest.raises(DemoError, match="federated run failed"):
        scene.federate(say)
    assert before
    scene.start("coordinator-again", scene.coordinator("serve"), "serving")
    command = scene.coordinator("round", "launch", str(scene.work / "job.json"), "--run", RUN, "--json")
    events = [json.loads(line) for line in scene.run(command).splitlines()]
    assert events[-1]["state"] == "finished"
    export = ledger(scene)
    admitted = [(e["round"], e["site"]) for e in export["entries"] if e["type"] == "admitted" and e["run"]]
    closed = [e["round"] for e in export["entries"] if e["type"] == "round-closed"]
    assert closed == [1, 2, 3, 4], "every round once"
    assert len(admitted) == len(set(admitted)), "no update twice"
    path = scene.work / "last.export"
    scene.run(scene.coordinator("ledger", "export", str(path)))
    verify(path.read_bytes())
    assert list(Export.parse(path.read_bytes()).entries[: len(before)]) == before, "no entry lost or rewritten"
    assert wait_until(lambda: spent(site_ledger(scene, "site-a"), "site-a/rdp")[0] == 0, 120)
    assert spent(export, "site-a/rdp") == spent(site_ledger(scene, "site-a"), "site-a/rdp")


def _kill_coordinator(scene: Scene) -> None:
    (process,) = [one for one in scene.processes.staying if "coordinator" in one.args]
    scene.processes.staying.remove(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
