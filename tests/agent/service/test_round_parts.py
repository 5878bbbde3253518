"""A part in a run as a job: seen, followed, left; after a kill its record says what the ledger says."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Cohort, ExampleRule, TaskCohort, Update
from agent.dp import opacus_engine
from agent.dp.compute_device import AcceleratorLostError, SiteCompute
from agent.dp.dpsgd import CHECKPOINT_EVERY
from agent.dp.noise import SystemEntropy
from agent.event_log import open_log
from agent.federation.participant import Participant
from agent.federation.round_making import RoundSteps
from agent.federation.secure_aggregation import SecureAggregationClient
from agent.federation.service import EndedRuns, FederationContext, TaskHandler, _keep_on
from agent.federation.tasks import RoundTask, TaskDeclinedError
from agent.mechanisms.federated.mechanism import Federated
from agent.models.training_loop import load_state
from agent.release.maker_process import MakerProcess
from agent.release.unsent import kept_update
from agent.runtime import AgentRuntime, open_runtime, recover_at_startup
from agent.service import job_runner, jobs, round_parts
from agent.service.job_acts import ACTS
from agent.service.job_runner import JobRunner
from agent.service.jobs import Job, JobStateError, JobStore
from agent.service.ledger_access import SharedLedger
from agent.service.ledger_access import Site as ActingSite
from agent.service.round_parts import PartJobs
from protos.artifacts.arrays import unpack_vector
from tests.support.command_line import Typed, at, typed
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.federated_sites import ErrorLog, federated
from tests.support.federation_world import Site
from tests.support.release_site import site
from tests.support.small_tasks import changed

__all__ = ["site", "typed"]  # fixtures

RUN = "run-1"
JOB = federated(rounds=3)
PATIENCE_S = 200.0


class Taking:
    """A service that takes part, without its link: tasks are handed over by the test."""

    def __init__(self, site: Site) -> None:
        self.site, self.store = site, JobStore(site.home.root)
        self.start()

    def start(self, *, confined: bool = False) -> None:
        """The service (again)."""
        self.open = ExitStack()
        self.runtime: AgentRuntime = self.open.enter_context(open_runtime(self.site.home.root, lambda *_: None))
        recover_at_startup(self.runtime)
        self.ledger, self.log = SharedLedger(self.runtime), open_log(self.site.home.root / "agent.log")
        self.runner = JobRunner(self.site.home, self.ledger, self.log)
        self.runner.recover()
        self.watch = PartJobs(self.site.home, "main", self.ledger, self.log)
        context = self.runtime.site
        if confined:
            context = replace(context, run=MakerProcess("available", 0, self.watch.started))
        self.part = Participant(context, "OT", SystemEntropy(), watch=self.watch)
        self.part.resume()
        key = self.site.home.sign_key()
        client = SecureAggregationClient(self.part, key, None, UnsafeSeededEntropy(2))
        self.over, self.stop, self.mutex = EndedRuns(), threading.Event(), threading.Lock()
        self.handler = TaskHandler(client, self.mutex, ErrorLog(), self.stop)
        self.acting = ActingSite(self.site.home, self.ledger, self.log, runs_jobs=True)
        self.tick()

    def kill(self, *, confined: bool = False) -> None:
        """The process is gone, and another one starts."""
        self.open.close()
        self.start(confined=confined)

    def tick(self) -> None:
        """One look of the service at its part."""
        context = FederationContext(lambda: None, self.log, lambda _: None, self.stop, self.over)
        seen = iter((False, True))
        self.stop.wait = lambda _=None: next(seen)  # type: ignore[method-assign, misc]
        _keep_on(self.handler, context)

    def price(self, job: Federated = JOB, run: str = RUN, *, granted: bool = True) -> None:
        envelope = self.handler._answer(RoundTask(run, "price", 0, job.to_json().encode())).envelope
        if granted:
            assert self.site.federation.intake.reserve_run(run, {"site-a": envelope}, 1)["site-a"].admitted

    def train(self, number: int) -> bool:
        """Whether the site answered; its update is then admitted."""
        vector = np.zeros(JOB.parameters, np.float32)
        try:
            answer = self.handler._answer(RoundTask(RUN, "train", number - 1, b"", vector))
        except TaskDeclinedError:
            return False
        last = self.part.last
        assert last is not None
        assert last.envelope == answer.envelope
        artifact = kept_update(self.runtime.site.vault, last.release)
        assert artifact is not None
        assert self.runtime.gateway.submit(f"submit-{last.release.release}", last.envelope, artifact)
        return True

    @property
    def row(self) -> Job:
        (found,) = [job for job in self.store.all() if job.lane == jobs.ROUND]
        return found

    def how(self) -> tuple[str, str]:
        return self.row.state, self.row.reason

    def act(self, name: str, **fields: Any) -> Any:
        return ACTS[f"jobs/{name}"](self.acting, **fields)

    def balance(self) -> tuple[int, int]:
        account = self.runtime.site.ledger.store.state.accounts["site-a/rdp"]
        return account.held, account.spent


@pytest.fixture
def world(site: Site) -> Iterator[Taking]:
    made = Taking(site)
    yield made
    made.open.close()


def while_trained(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Something happens after the noise is drawn, and before the update is sealed."""
    make = Federated.run_round

    def run_round(self: Federated, cohort: Cohort, start: Update, *rest: Any, **more: Any) -> Update:
        made = make(self, cohort, start, *rest, **more)
        act()
        return made

    patch.setattr(Federated, "run_round", run_round)


def test_a_part_shows_its_run_and_price_and_what_was_not_begun_is_returned(world: Taking) -> None:
    world.price(granted=False)
    assert world.how() == (jobs.QUEUED, "waits for the coordinator's grant")
    row, (held, _) = world.act("show", number=1)["job"], world.balance()
    assert (row["command"], row["project"], row["release"]) == (f"part {RUN}", "main", "")
    assert (row["price"]["amount"], row["price"]["mechanism"]) == (held, "federated")
    assert row["price"]["left"] > held > 0
    world.price(run="run-2", granted=False)
    first, second = world.store.all()
    assert (first.state, first.reason) == (jobs.DONE, "nothing was trained, and its price is returned")
    assert (second.state, second.kind) == (jobs.QUEUED, "part run-2")


def test_while_a_round_is_trained_it_runs_and_otherwise_it_says_what_it_waits_for(
    world: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    while_trained(monkeypatch, lambda: seen.append(world.act("show", number=1)["job"]))
    world.price()
    for number in (1, 2, 3):
        assert world.train(number)
        waits = f"waits for round {number + 1} of 3" if number < 3 else "all 3 rounds that were priced are made"
        assert world.how()[0] == jobs.QUEUED
        assert world.how()[1].startswith(waits)
        at = seen[-1]["progress"]
        assert (seen[-1]["state"], at["step"]) == (jobs.RUNNING, f"round {number} of 3")
        assert (at["detail"], at["done"], at["of"]) == ("train", JOB.steps_per_round, JOB.steps_per_round)
    world.tick()
    assert world.how() == (jobs.DONE, "all 3 rounds that were priced are made")
    told = [event.state for event in world.row.history]
    assert told == [jobs.QUEUED, jobs.QUEUED, jobs.DONE], "to and fro is no history"
    assert (world.store.folder(1) / "stdout").read_text().splitlines() == [
        *(f"round {n} of 3: the update is sealed" for n in (1, 2, 3)),
        "all 3 rounds that were priced are made",
    ]


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_after_a_lost_accelerator_the_round_goes_on_by_the_processor_with_auto_and_else_when_it_is_asked_for_again(
    world: Taking, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    world.part.compute = SiteCompute(wanted, available=lambda: True)
    plans, make = list[str](), Federated.run_round

    def lost(self: Federated, *given: Any, **more: Any) -> Update:
        plans.append(given[-1].device)
        if given[-1].device == "cuda":
            raise AcceleratorLostError
        return make(self, *given, **more)

    world.price()
    with monkeypatch.context() as patch:
        patch.setattr(Federated, "run_round", lost)
        assert world.train(1) == (wanted == "auto")
    told = [event.reason for event in world.row.history]
    assert told[0].endswith("3 rounds; rounds are computed by the accelerator")
    if wanted == "auto":
        assert not any("came to nothing" in one for one in told)
        assert (plans, world.part.compute.plan.device) == (["cuda", "cpu"], "cpu")
    else:
        assert any(one.startswith("round 1 was interrupted: the accelerator failed while") for one in told)
        world.part.compute = SiteCompute("cpu")
        assert world.train(1)
        assert (plans, world.part.rounds_trained) == (["cuda"], 1)


def test_a_network_that_the_sites_engine_cannot_train_is_refused_before_it_is_priced(
    world: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.part.compute = SiteCompute(engine="opacus")
    monkeypatch.setattr(opacus_engine, "NOT_EXACT", {"linear": "it is a test"})
    with pytest.raises(TaskDeclinedError, match="mechanism"):
        world.handler._answer(RoundTask(RUN, "price", 0, JOB.to_json().encode()))
    assert world.balance() == (0, 0)
    assert not world.store.all()


def test_a_run_that_is_over_early_returns_the_rest_and_says_so(world: Taking) -> None:
    world.price()
    whole, _ = world.balance()
    assert world.train(1)
    world.over.say(RUN)
    world.tick()
    assert world.how() == (jobs.DONE, "the run is over: 1 of 3 rounds were made, and their price is spent")
    held, spent = world.balance()
    assert (held, 0 < spent < whole) == (0, True)


def test_a_refused_grant_ends_it_and_its_price_is_returned(world: Taking) -> None:
    envelope = world.handler._answer(RoundTask(RUN, "price", 0, JOB.to_json().encode())).envelope
    assert not world.site.federation.intake.reserve_run(RUN, {"site-a": envelope}, 2)["site-a"].admitted
    world.tick()
    assert world.how() == (jobs.REFUSED, "it was not granted by the coordinator, and its price is returned")
    assert world.balance() == (0, 0)


# -- to leave it


def test_to_leave_before_a_round_is_free_and_afterwards_must_be_said(world: Taking) -> None:
    world.price()
    assert world.act("cancel", number=1, by="olga") == {"state": jobs.RUNNING}
    world.tick()
    assert (world.how(), world.balance()) == (
        (jobs.CANCELLED, "nothing was trained, and its price is returned"),
        (0, 0),
    )
    assert world.row.history[-1].by == "olga"
    assert not world.train(1)


def test_what_was_made_stays_spent_and_that_must_be_said(world: Taking) -> None:
    world.price()
    whole, _ = world.balance()
    assert world.train(1)
    with pytest.raises(JobStateError, match="stays spent whatever you do: `jobs cancel 1 --spend` leaves the run"):
        world.act("cancel", number=1, by="olga")
    assert not world.row.wanted
    world.act("cancel", number=1, by="olga", spend=True)
    world.tick()
    assert world.how() == (jobs.CANCELLED, "the run was left: 1 of 3 rounds were made, and their price is spent")
    held, spent = world.balance()
    assert (held, 0 < spent < whole) == (0, True)
    with pytest.raises(JobStateError, match="has ended already"):
        world.act("cancel", number=1, by="olga", spend=True)
    with pytest.raises(JobStateError, match="when the coordinator asks"):
        world.act("retry", number=1, by="olga")


def test_a_round_that_began_since_the_wish_takes_it_back(world: Taking) -> None:
    world.price()
    world.act("cancel", number=1, by="olga")
    assert world.train(1)
    world.tick()
    assert (world.row.state, world.row.wanted) == (jobs.QUEUED, "")
    assert any("part of its price is spent by now" in event.reason for event in world.row.history)
    world.act("cancel", number=1, by="olga", spend=True)
    world.tick()
    assert world.row.state == jobs.CANCELLED


@pytest.mark.parametrize("moment", ["read", "started", "trained"])
def test_a_round_that_a_person_leaves_while_it_is_computed_does_not_leave(
    world: Taking, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """While its images are read there is no process yet that could be ended."""

    def leave() -> None:
        assert world.act("cancel", number=1, by="olga", spend=True) == {"state": jobs.RUNNING}

    world.price()
    assert world.train(1)
    if moment == "trained":
        while_trained(monkeypatch, leave)
    else:
        examples, run = world.part.site.examples, world.part.site.run

        def read(rule: ExampleRule) -> TaskCohort:
            leave()
            return examples(rule)

        if moment == "read":
            world.part.site = replace(world.part.site, examples=read)
        ended: list[Path] = []
        monkeypatch.setattr(round_parts, "_end_training", ended.append)

        def start(call: Callable[..., Any], *given: Any) -> Any:
            assert moment == "started", "nothing is started"
            leave()
            ended.clear()
            world.watch.started(os.getpid())
            assert ended == [world.store.folder(1)]
            return run(call, *given)

        world.part.site = replace(world.part.site, run=start)
    assert not world.train(2)
    assert len(world.runtime.site.ledger.store.state.sent) == 1
    assert "round 2 came to nothing: left: the site leaves this run" in [one.reason for one in world.row.history]
    world.tick()
    assert world.how() == (jobs.CANCELLED, "the run was left: 2 of 3 rounds were made, and their price is spent")


def test_after_a_start_all_of_it_is_spent_and_that_must_be_said(world: Taking) -> None:
    world.price()
    whole, _ = world.balance()
    world.kill()
    with pytest.raises(JobStateError, match="--spend"):
        world.act("cancel", number=1, by="olga")
    world.act("cancel", number=1, by="olga", spend=True)
    world.kill()
    assert world.how() == (jobs.CANCELLED, "its price is spent, and nothing has left")
    assert world.balance() == (0, whole)


def test_while_no_service_runs_a_part_is_left_at_its_start_and_all_of_it_is_spent(
    world: Taking, typed: Typed
) -> None:
    """Also where nothing was begun: only the process that reserved the price knows that."""
    world.price()
    whole, _ = world.balance()
    world.open.close()
    refused = typed(*at(world.site), "jobs", "cancel", "1")
    assert (refused.status, world.row.wanted) == (1, "")
    assert "no service runs here, and after a restart all of its price is spent: `jobs cancel 1 --spend`" in (
        " ".join(refused.err.split())
    )
    told = typed(*at(world.site), "jobs", "cancel", "1", "--spend")
    assert (told.status, " ".join(told.out.split())) == (
        0,
        "job 1 is told to end when `serve` runs; `jobs show` says when it has",
    )
    world.start()
    assert (world.row.state, world.balance()) == (jobs.CANCELLED, (0, whole))


def test_a_wish_that_was_free_before_a_restart_is_taken_back_in_true_words(world: Taking) -> None:
    world.price()
    world.act("cancel", number=1, by="olga")
    world.kill()
    assert world.row.wanted == ""
    told = "after a restart all of its price is spent: `jobs cancel 1 --spend` leaves the run"
    assert told in [event.reason for event in world.row.history]


# -- kills


def test_after_a_kill_it_goes_on_with_the_same_record(world: Taking, monkeypatch: pytest.MonkeyPatch) -> None:
    world.price()
    assert world.train(1)
    with monkeypatch.context() as patch:
        while_trained(patch, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(round_parts.PartJobs, "changed", lambda *_: None)
        world.store.change(1, lambda known: known.turned(jobs.RUNNING, "round 2 of 3"))
        with pytest.raises(KeyboardInterrupt):
            world.train(2)
    world.kill()
    assert world.how() == (jobs.QUEUED, "waits until round 2 of 3 is asked for again: it goes on where it was")
    assert "the service ended in round 2 of 3" in [event.reason for event in world.row.history]
    assert world.row.attempts == 2
    assert world.train(2)
    assert world.train(3)
    world.tick()
    assert world.how() == (jobs.DONE, "all 3 rounds that were priced are made")


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_kill_between_the_ledger_and_the_record_leaves_what_the_ledger_says(
    world: Taking, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """The record of an end, or of the beginning, is not written: the next start writes it."""
    if not rounds:
        monkeypatch.setattr(JobStore, "add", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            world.price()
        monkeypatch.undo()
        assert world.store.all() == []
        world.kill()
        assert (world.row.state, world.row.grant) == (jobs.QUEUED, world.part.grant)
        return
    world.price()
    for number in range(1, rounds + 1):
        assert world.train(number)
    monkeypatch.setattr(round_parts, "_ended", lambda *_, **__: (_ for _ in ()).throw(OSError))
    world.over.say(RUN)
    world.tick()
    assert (world.row.state, world.balance()[0]) == (jobs.QUEUED, 0)
    monkeypatch.undo()
    world.kill()
    assert world.how() == (jobs.DONE, "what it had made is spent")


def test_the_record_is_none_of_the_budgets_business(world: Taking) -> None:
    """Whatever becomes of the record, the part goes on, and is paid once."""
    world.price()
    held = world.balance()
    for path in world.store.folder(1).iterdir():
        if path.is_file():
            path.unlink()
    (world.store.folder(1) / "job.json").write_text("{")
    assert world.train(1)
    world.tick()
    assert (world.balance(), world.part.rounds_trained) == (held, 1)


# -- beside other jobs


def test_no_rule_starts_it_and_the_runner_leaves_it_alone(world: Taking) -> None:
    world.price()
    world.tick()
    world.runner.look()
    assert world.how() == (jobs.QUEUED, "waits for round 1 of 3")
    world.store.change(1, lambda known: known.turned(jobs.RUNNING, "round 1 of 3"))
    world.runner.look()
    assert (world.row.state, world.row.attempts) == (jobs.RUNNING, 1)
    assert world.act("list")["jobs"][0]["reason"] == "round 1 of 3"


# -- memory, and a process that ends


@pytest.mark.parametrize("how", ["killed", "left"])
def test_another_process_goes_on_after_one_that_is_killed_and_none_where_the_site_leaves(
    world: Taking, real_maker: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    del real_maker
    kept, write = list[int](), RoundSteps.write

    def writing(self: RoundSteps, data: bytes) -> None:
        kept.append(load_state(data, self.round)[0])
        write(self, data)

    monkeypatch.setattr(RoundSteps, "write", writing)
    world.kill(confined=True)
    world.price(changed(JOB, steps_per_round=1_000, rounds=3, noise_multiplier=60.0))
    asked = threading.Thread(target=lambda: answers.append(world.train(1)))
    answers: list[bool] = []
    asked.start()
    end = time.monotonic() + PATIENCE_S
    shown: dict[str, Any] = {"memory_bytes": 0, "progress": {"of": 0}}
    while not (shown["memory_bytes"] and shown["progress"]["of"]):
        shown = world.act("show", number=1)["job"] if world.store.all() else shown
        assert time.monotonic() < end
        assert asked.is_alive(), [event.reason for event in world.row.history]
        time.sleep(0.02)
    assert (shown["state"], shown["progress"]["step"]) == (jobs.RUNNING, "round 1 of 3")
    if how == "killed":
        pid = int((world.store.folder(1) / "pid").read_text())
        assert (os.sched_getscheduler(pid), Path(f"/proc/{pid}/oom_score_adj").read_text()) == (
            os.SCHED_BATCH,
            "900\n",
        )
        os.kill(pid, signal.SIGKILL)
    else:
        world.act("cancel", number=1, by="olga", spend=True)
    asked.join(PATIENCE_S)
    assert answers == [how == "killed"]
    world.tick()
    if how == "killed":
        assert int((world.store.folder(1) / "pid").read_text()) != pid
        assert kept == list(range(CHECKPOINT_EVERY, 1_000, CHECKPOINT_EVERY)), "no step that was kept is taken again"
        assert world.how() == (jobs.QUEUED, "waits for round 2 of 3")
    else:
        why = "round 1 came to nothing: left: the site leaves this run"
        assert why in [event.reason for event in world.row.history]
        assert world.row.state == jobs.CANCELLED
        assert world.balance()[0] == 0


def test_a_round_is_trained_in_a_process_of_its_own(world: Taking, real_maker: None) -> None:
    del real_maker
    world.kill(confined=True)
    world.price()
    assert world.train(1)
    assert int((world.store.folder(1) / "pid").read_text()) != os.getpid()
    assert world.part.last is not None
    artifact = kept_update(world.runtime.site.vault, world.part.last.release)
    assert artifact is not None
    assert len(unpack_vector(artifact)) == JOB.parameters


def test_it_is_listed_shown_and_followed_by_typed_commands(world: Taking, typed: Typed) -> None:
    world.price()
    assert world.train(1)
    world.over.say(RUN)
    world.tick()
    listed = typed(*at(world.site), "jobs", "list")
    assert ("part run-1" in listed.out, "done" in listed.out) == (True, True)
    shown = typed(*at(world.site), "jobs", "show", "1")
    assert "price: " in shown.out
    assert "the run is over: 1 of 3 rounds were made" in shown.out
    followed = typed(*at(world.site), "jobs", "follow", "1")
    assert (followed.status, "round 1 of 3: the update is sealed" in followed.out) == (0, True)
    assert json.loads(typed(*at(world.site), "jobs", "show", "1", "--json").out)["job"]["release"] == ""
    assert job_runner.may_live(world.site.home, world.row)
