"""An agent that dies in the middle of a federated run comes back into it: one grant, no update twice."""

from __future__ import annotations

import signal

import pytest

from deploy.demo.scene import Scene
from tests.support.process_world import ledger, site_ledger, spent
from tests.support.tcp_proxy import wait_until


@pytest.mark.slow
def test_an_agent_killed_in_the_middle_of_a_run_comes_back_into_it_and_pays_once(scene: Scene) -> None:
    """Two sites take part and both are needed: the run waits for the one that is gone."""
    killed: list[str] = []

    def say(text: str) -> None:
        if "round 1" in text and "closed" in text and not killed:
            killed.append(text)
            agent = next(p for p in scene.processes.staying if "site-b" in " ".join(map(str, p.args)))  # type: ignore[arg-type]
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            scene.processes.staying.remove(agent)
            scene.start("site-b-again", scene.agent("site-b", "serve", "--modality", "OT"), "link: online")

    scene.federate(say)
    assert killed
    export = ledger(scene)
    closed = [entry["round"] for entry in export["entries"] if entry["type"] == "round-closed"]
    assert closed == [1, 2, 3, 4]
    admitted = [(e["round"], e["site"]) for e in export["entries"] if e["type"] == "admitted" and e["run"]]
    assert len(admitted) == len(set(admitted)), "no update twice"
    assert (4, "site-b") in admitted, "it came back"
    assert wait_until(lambda: spent(site_ledger(scene, "site-b"), "site-b/rdp")[0] == 0, 120)
    held, used = spent(export, "site-b/rdp")
    assert held == 0
    assert used == spent(site_ledger(scene, "site-b"), "site-b/rdp")[1] > 0
    grants = [e for e in export["entries"] if e["type"] == "reserved" and e["site"] == "site-b" and e["run"]]
    assert len(grants) == 1, "priced once"
