"""kill -9 of a site's service in the middle of a round of many steps: it goes on inside the round, for one price."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from agent.dp.dpsgd import CHECKPOINT_EVERY
from agent.mechanisms.federated.round_training import STEPS
from agent.storage import projects
from agent.storage.site_directory import SiteDirectory
from deploy.demo.jobs import job_file
from deploy.demo.scene import SITES
from policies.ledger.entries import Sent
from tests.faults.audit import Auditor
from tests.faults.kills import after
from tests.faults.stage import ROUNDS, Stage, eventually
from tests.support.small_mechanisms import FEDERATED
from tests.support.small_tasks import changed

WHOLE = 200  # steps of a round: some seconds, so that a kill hits its middle
ROUND_S = 60  # by when the other sites' answers leave, at the latest
VICTIM = SITES[0]
ASKED_AGAIN_S = 300.0  # once the other sites have answered


def kept_step(stage: Stage) -> int:
    """The newest step that the site's vault has; 0: none."""
    home = SiteDirectory(stage.work / VICTIM)
    with closing(projects.open_vault(home, "main")) as vault:
        raw = vault.place(STEPS).read() or b""
    found = re.search(rb'\\"step\\": ([0-9]+)', raw[:4096])
    return int(found.group(1)) if found else 0


def is_kept(stage: Stage) -> bool:
    home = SiteDirectory(stage.work / VICTIM)
    with closing(projects.open_vault(home, "main")) as vault:
        return bool(vault.places(STEPS))


def steps_after(stage: Stage, at: float) -> list[int]:
    """The steps that the part's job has told of since a moment."""
    (said,) = (stage.work / VICTIM).glob("jobs/*/said.jsonl")
    told = [json.loads(line) for line in said.read_text().splitlines()]
    return [one["done"] for one in told if one["at"] > at and one["detail"] == "train" and one["done"] > 0]


def trainer(stage: Stage) -> int:
    """The process that trains the round."""
    (path,) = (stage.work / VICTIM).glob("jobs/*/pid")
    return int(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["service", "process"])
def test_a_round_that_is_killed_goes_on_at_its_newest_step_and_is_paid_once(
    enrolled: Path, tmp_path: Path, victim: str
) -> None:
    auditor = Auditor()
    with Stage.copied(enrolled, tmp_path / "stage") as stage:
        job = changed(FEDERATED, rounds=ROUNDS, noise_multiplier=60.0, steps_per_round=WHOLE)
        asked = {**job_file(job, len(SITES)), "round_seconds": ROUND_S}
        (stage.work / "job.json").write_text(json.dumps(asked, indent=2))
        stage.start_all()
        auditor.look(stage)
        launched = stage.launch("run")
        # progress is told every 25 steps: a training that began anew would first tell of fewer than are kept
        eventually(lambda: is_kept(stage) and kept_step(stage) >= 2 * CHECKPOINT_EVERY, "no step of a round is kept")
        kept, at = kept_step(stage), time.time()
        if victim == "service":
            stage.kill(VICTIM)
            stage.start(VICTIM)
        else:
            os.kill(trainer(stage), signal.SIGKILL)
        assert 0 < kept < WHOLE, "it was not in the middle"
        eventually(lambda: bool(steps_after(stage, at)), "nothing is trained after the kill", ASKED_AGAIN_S)
        assert steps_after(stage, at)[0] > kept, "no step that was kept is taken again"
        end = stage.carried_out("run")
        launched.process.wait(60)
        assert end["state"] == "finished"
        assert not list(after(stage, auditor, "run", end["state"]))
        ledgers = auditor.look(stage)
        assert ledgers.closed("run") == list(range(1, ROUNDS + 1))
        for site in SITES:
            (paid,) = ledgers.grants(site, "run").values()
            first, both = [e.used for e in ledgers.of(site, Sent, "run") if isinstance(e, Sent)]
            assert (paid.end, paid.spent, both) == ("spent", paid.reserved.amount, paid.reserved.amount)
            assert 0 <= 2 * first - both <= 1, "one round of two, rounded up, although it was begun twice"
        assert not kept_step(stage)
