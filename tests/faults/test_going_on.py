"""A run that an operator stopped, or whose coordinator came back from a backup, goes on: nothing is trained twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deploy.demo.scene import SITES
from policies.ledger.entries import Sent
from tests.faults.audit import Auditor, Ledgers
from tests.faults.kills import after
from tests.faults.stage import COORDINATOR, ROUNDS, RUN_S, Launched, Stage, eventually


def event_of(launched: Launched, state: str, number: int) -> bool:
    return any((one["state"], one["round"]) == (state, number) for one in launched.events())


def end_of(launched: Launched) -> str:
    launched.process.wait(RUN_S)
    return str(launched.events()[-1]["state"])


def stopped_after_its_first_round(stage: Stage) -> None:
    """The operator stops the run while its first round is trained: that round is closed, and no other begun."""
    launched = stage.launch("run")
    eventually(lambda: event_of(launched, "sent", 1), "no site is asked", RUN_S)
    stage.type("round", "stop", "run")
    assert end_of(launched) == "stopped", launched.said.read_text()


def come_back(stage: Stage, folder: Path) -> None:
    """The coordinator is lost, and restored from the backup."""
    stage.kill(COORDINATOR)
    home, lost = stage.work / COORDINATOR, folder / "lost"
    home.rename(lost)
    stage.type("restore", str(folder / "backup"), "--keys", str(lost / "keys"))
    stage.start(COORDINATOR)


def is_of_one_run(ledgers: Ledgers) -> None:
    """One grant at each site, spent whole, and one update of each round sent under it."""
    assert ledgers.closed("run") == list(range(1, ROUNDS + 1))
    for site in SITES:
        (paid,) = ledgers.grants(site, "run").values()
        assert (paid.end, paid.spent) == ("spent", paid.reserved.amount)
        sent = [entry for entry in ledgers.of(site, Sent, "run") if isinstance(entry, Sent)]
        assert [entry.round for entry in sent] == list(range(1, ROUNDS + 1)), "each round once"
    hub = ledgers.grants(COORDINATOR, "run")
    assert sorted(paid.reserved.site for paid in hub.values()) == sorted(SITES)
    for grant, paid in hub.items():
        assert paid.spent == ledgers.grants(paid.reserved.site, "run")[grant].spent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_that_was_stopped_after_its_first_round_goes_on_also_by_another_process(
    enrolled: Path, tmp_path: Path
) -> None:
    auditor = Auditor()
    with Stage.copied(enrolled, tmp_path / "stage") as stage:
        stage.start_all()
        stopped_after_its_first_round(stage)
        ledgers = auditor.look(stage)
        assert ledgers.closed("run") == [1]
        assert {paid.end for paid in ledgers.grants(COORDINATOR, "run").values()} == {"held"}
        stage.kill(COORDINATOR)
        stage.start(COORDINATOR)
        time.sleep(2)
        assert auditor.look(stage).closed("run") == [1], "it stays stopped"
        assert end_of(stage.launch("run", "resume")) == "finished"
        assert not list(after(stage, auditor, "run", "finished"))
        is_of_one_run(auditor.look(stage))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_goes_on_at_a_coordinator_that_came_back_from_a_backup_of_its_first_round(
    enrolled: Path, tmp_path: Path
) -> None:
    auditor = Auditor()
    with Stage.copied(enrolled, tmp_path / "stage") as stage:
        stage.start_all()
        stopped_after_its_first_round(stage)
        stage.type("backup", str(tmp_path / "backup"))
        auditor.look(stage)
        come_back(stage, tmp_path)
        launched = stage.launch("run", "resume")
        assert end_of(launched) == "finished", launched.said.read_text()
        assert not list(after(stage, auditor, "run", "finished"))
        ledgers = auditor.look(stage)
        is_of_one_run(ledgers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_that_was_over_is_not_begun_again_by_a_backup_of_its_first_round(
    enrolled: Path, tmp_path: Path
) -> None:
    """The coordinator's ledger lacks what the sites sent since: they refuse, and nothing is trained or paid again."""
    with Stage.copied(enrolled, tmp_path / "stage") as stage:
        stage.start_all()
        launched = stage.launch("run")
        eventually(lambda: event_of(launched, "sent", 1), "no site is asked", RUN_S)
        stage.type("backup", str(tmp_path / "backup"))
        assert end_of(launched) == "finished", launched.said.read_text()
        auditor = Auditor()
        eventually(lambda: not auditor.look(stage).held("run"), "the run's grants are not closed")
        before = {site: auditor.look(stage).grants(site, "run") for site in SITES}
        come_back(stage, tmp_path)
        again = stage.launch("run", "watch")
        assert end_of(again) == "failed", again.said.read_text()
        said = {one["reason"] for one in again.events() if one["state"] in ("declined", "refused")}
        assert said <= {"run_spent", "behind", "offline"}
        assert said & {"run_spent", "behind"}
        ledgers = Auditor().look(stage)
        assert {site: ledgers.grants(site, "run") for site in SITES} == before
        for site in SITES:
            sent = [entry.round for entry in ledgers.of(site, Sent, "run") if isinstance(entry, Sent)]
            assert sent == list(range(1, ROUNDS + 1))
        hub = ledgers.grants(COORDINATOR, "run")
        assert {grant: paid.end for grant, paid in hub.items()} == dict.fromkeys(
            (grant for grants in before.values() for grant in grants), "expired"
        )
