"""kill -9 in the middle of runs, of every kind of process, on one federation: what remains balances."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.faults.audit import Auditor
from tests.faults.kills import Trials, after, kill
from tests.faults.stage import CHILD, COORDINATOR, ROUNDS, Stage
from tests.support.tcp_proxy import wait_until


@pytest.mark.slow
def test_a_run_in_which_one_process_of_each_kind_is_killed_finishes_and_its_books_balance(
    enrolled: Path, tmp_path: Path
) -> None:
    """The short form for CI: four kills in one run, a second or two apart."""
    rng, auditor = random.Random(7), Auditor()
    with Stage.copied(enrolled, tmp_path / "stage") as stage:
        stage.start_all()
        auditor.look(stage)
        launched = stage.launch("run")
        assert wait_until(stage.begun("run").exists, 60)
        for victim in (f"{CHILD} of site-a", f"{CHILD} of {COORDINATOR}", "site-b", COORDINATOR):
            time.sleep(rng.uniform(0.3, 1.5))
            assert kill(stage, victim, launched), f"there was no {victim} to kill"
        end = stage.carried_out("run")
        launched.process.wait(60)
        assert not list(after(stage, auditor, "run", end["state"]))
        assert end["state"] == "finished"
        assert auditor.look(stage).closed("run") == list(range(1, ROUNDS + 1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_lose_and_double_nothing(enrolled: Path, tmp_path: Path) -> None:
    """As ``python -m tests.faults --kills 50``."""
    trials = Trials(enrolled, tmp_path, random.Random(2026), print)
    trials.run(50)
    assert not [trial.line() for trial in trials.done if trial.faults]
    assert sum(trial.hit for trial in trials.done) >= 40, "most kills came after the end of a run"
