"""Short commands beside two real services: nobody stops anything to appoint a person or to send a release."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.demo.scene import DemoError, K, L
from protos.service.control_client import SOCKET
from tests.support.ledger_world import Person
from tests.support.process_world import ProcessWorld, ledger, site_ledger, spent

pytestmark = pytest.mark.timeout(2400)  # a whole federation, on a machine that may be busy
KILLED = Path(__file__).parent.parent / "support" / "killed_agent.py"
SITE = "site-b"


def test_persons_are_appointed_and_a_kept_release_leaves_while_both_sides_serve(
    enrolled: Path, tmp_path: Path
) -> None:
    with ProcessWorld.copied(enrolled, tmp_path, 1) as world:
        world.serve()
        words = ["release", "ksame", "--basis", str(world.work / "basis.safetensors"), "--modality", "OT"]
        words += ["--k", str(K), "--l-diversity", str(L)]
        killed = [sys.executable, str(KILLED), "before-submit", "--home", str(world.work / SITE), *words]
        assert subprocess.run(killed, check=False).returncode == -signal.SIGKILL
        (sent,) = [e for e in site_ledger(world, SITE)["entries"] if e["type"] == "sent"]
        world.start(SITE, world.agent(SITE, "serve", "--modality", "OT"), "link: online")
        key = Person("otto", "auditor").public.hex()
        assert "appointed otto" in world.run(world.agent(SITE, "ledger", "appoint", "otto", "auditor", key))
        assert site_ledger(world, SITE)["entries"][-1]["type"] == "appointed"
        with pytest.raises(DemoError, match="must approve this, and 0 did"):  # there, others are in office
            world.run(world.coordinator("ledger", "appoint", "otto", "auditor", key, "--serial", "none"))
        assert f"admitted at level B: {sent['release']}" in world.run(
            world.agent(SITE, "release", "send", sent["release"])
        )
        other = "site-a"
        world.start(other, world.agent(other, "serve", "--modality", "OT"), "link: online")
        assert "admitted at level B" in world.run(world.agent(other, *words))  # made beside the service
        assert spent(ledger(world), f"{other}/k") == spent(site_ledger(world, other), f"{other}/k") == (0, 1)
        assert (world.work / SITE / SOCKET).exists()
        assert (world.work / "coordinator" / SOCKET).exists()
        assert spent(ledger(world), f"{SITE}/k") == spent(site_ledger(world, SITE), f"{SITE}/k") == (0, 1)
