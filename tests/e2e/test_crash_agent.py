"""An agent that dies in the middle of a federated run: its grant is spent on both sides, for ever."""

from __future__ import annotations

import signal

import pytest

from deploy.demo.scene import DemoFailed, Scene
from tests.e2e.test_crash import ledger, site_ledger, spent


def test_an_agent_killed_in_the_middle_of_a_run_costs_its_grant_and_not_the_run(scene: Scene) -> None:
    killed: list[str] = []

    def say(text: str) -> None:
        if "round 1" in text and "closed" in text and not killed:
            killed.append(text)
            agent = next(p for p in scene._running if "site-b" in " ".join(map(str, p.args)))  # type: ignore[arg-type]
            agent.send_signal(signal.SIGKILL)
            agent.wait()

    with pytest.raises(DemoFailed, match="federated run failed"):
        scene.federate(say)  # min_sites is 2, and one of the two is gone
    assert killed
    books = ledger(scene)
    assert spent(books, "site-b/rdp")[0] == 0
    assert spent(books, "site-b/rdp")[1] > 0
    scene.start("site-b-again", scene.agent("site-b", "serve", "--modality", "OT"), "link: online")
    held, used = spent(site_ledger(scene, "site-b"), "site-b/rdp")
    assert held == 0
    assert used == spent(books, "site-b/rdp")[1]
