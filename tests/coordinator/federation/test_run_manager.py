"""Runs: forecast, launch, stop, wait, resume; the budgets of all sites at once. Real books and agents, no Flower."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, Message

from agent.federation import run_plan
from coordinator.federation import run_controller
from coordinator.federation.events import RunEvent
from coordinator.federation.job import JobError
from coordinator.gateway.run_service import Operations
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.backends.sqlite import export_file
from policies.ledger_service import LedgerService
from policies.review.policy import parse
from policies.statements import PAYLOAD_TYPE
from protos.common.dsse import seal
from protos.v1 import gateway_pb2
from tests.support.coordinator_runs import SITES, Federation, admitting, conduct_here, job, secret_job
from tests.support.federated_sites import federated, masked


def strategy(**values: Any) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def states(events: Iterator[RunEvent] | list[RunEvent]) -> list[tuple[int, str, tuple[str, ...]]]:
    return [(e.round, e.state, e.sites) for e in events]


@pytest.fixture(autouse=True)
def _no_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's strategy is in this process, and the sites too; tests/test_federation_contract.py has them apart."""
    monkeypatch.setattr(run_controller, "conduct", conduct_here)


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.host.stopping.set()
    for feed in made.runs._feeds.values():
        list(feed.follow())
    made.store.close()


def sealed(fed: Federation, run: str, rounds: int = 3, **rounds_of: int) -> dict[str, bytes]:
    """Each site's own reservation."""
    return {
        site: ward.part.participant.join(run, federated(rounds=rounds_of.get(site, rounds)))
        for site, ward in fed.wards.items()
    }


# the budgets of all sites at once


def test_all_sites_are_reserved_in_one_entry_each_and_asked_again_the_answer_is_the_same(fed: Federation) -> None:
    asked = sealed(fed, "run-1")
    size = fed.store.state.size
    first = fed.intake.reserve_run("run-1", asked, 3)
    assert all(verdict.admitted for verdict in first.values())
    assert fed.store.state.size == size + 3
    again = fed.intake.reserve_run("run-1", asked, 3)
    assert {s: v.admitted for s, v in again.items()} == {s: v.admitted for s, v in first.items()}
    assert fed.store.state.size == size + 3
    assert fed.grants() == ["held"] * 3


def test_one_refused_site_is_dropped_when_enough_are_left_and_else_nobody_is_held(tmp_path: Path) -> None:
    poor = {"west": admitting()}
    fed = Federation(tmp_path, policies=poor)
    # west has spent most of its budget at the coordinator, and does not know it: its own ledger was restored
    spent = fed.wards["west"].hospital.reservation("old", federated().claim(), "federated", "run-0")
    assert fed.intake.reserve("west", "reserve-old", fed.wards["west"].hospital.seal(spent)).admitted
    asked = sealed(fed, "run-1")
    all_of_them = fed.intake.reserve_run("run-1", asked, 3)
    assert not any(verdict.admitted for verdict in all_of_them.values())
    assert fed.grants() == ["held"], "the old one"
    rules = {site: verdict.findings[0].rule for site, verdict in all_of_them.items()}
    assert rules == {"north": "together", "south": "together", "west": "budget"}
    for ward in fed.wards.values():
        assert not ward.part.participant.confirm()
        assert ward.account() == (0, 0), "what the site held is free again"
    two = fed.intake.reserve_run("run-2", sealed(fed, "run-2"), 2)
    assert {site: verdict.admitted for site, verdict in two.items()} == {"north": True, "south": True, "west": False}
    fed.store.close()


def test_a_reservation_for_another_run_of_another_site_or_seen_before_is_refused_by_itself(fed: Federation) -> None:
    other = sealed(fed, "run-0")
    mine = sealed(fed, "run-1")
    verdicts = fed.intake.reserve_run(
        "run-1", {"north": other["north"], "south": mine["west"], "west": mine["west"]}, 1
    )
    assert {s: v.findings[0].rule if v.findings else "" for s, v in verdicts.items()} == {
        "north": "bad_statement",
        "south": "bad_envelope",
        "west": "",
    }
    again = fed.intake.reserve_run("run-9", {"west": mine["west"]}, 1)
    assert not again["west"].admitted, "a reservation names its run"
    assert fed.grants() == ["held"]


def test_a_site_that_was_not_in_the_reservation_is_told_nothing_and_is_not_granted_later(fed: Federation) -> None:
    asked = sealed(fed, "run-1")
    late = asked.pop("west")
    assert len(fed.intake.reserve_run("run-1", asked, 2)) == 2
    assert fed.intake.reserved_run("run-1")
    assert fed.intake.outcome("west", "run-run-1") is None
    assert fed.intake.outcome("north", "run-run-1") is not None
    gate = run_controller.RunController(
        fed.runs._context, job(), fed.runs._feeds.setdefault("x", run_controller.EventStream())
    )
    assert gate.reserve({**asked, "west": late}, 2) == {"west": "not_granted"}
    assert not fed.wards["west"].part.participant.confirm()
    fed.runs._feeds.clear()


# plan and launch


def test_a_forecast_writes_nothing(fed: Federation) -> None:
    size = fed.store.state.size
    costs, decision = fed.runs.plan(job())
    assert decision.go
    assert [c.fits for c in costs] == [True] * 3
    assert all(0 < c.amount <= c.left for c in costs)
    assert fed.store.state.size == size
    assert fed.store.state.grants == {}
    assert not list((fed.folder / "runs").iterdir())


def test_a_forecast_says_which_site_had_its_part_in_the_run_before(fed: Federation) -> None:
    before = fed.wards["west"].hospital.reservation("old", federated().claim(), "federated", "run-1")
    assert fed.intake.reserve("west", "reserve-old", fed.wards["west"].hospital.seal(before)).admitted
    costs = {c.site: c for c in fed.runs.plan(job())[0]}
    assert [costs[site].fits for site in ("north", "south", "west")] == [True, True, False]
    assert "granted its part in that run before" in costs["west"].reason


def test_a_run_that_the_forecast_refuses_is_not_launched_and_leaves_nothing(fed: Federation) -> None:
    dear = job(rounds=9)
    assert not fed.runs.plan(dear)[1].go
    size = fed.store.state.size
    with pytest.raises(JobError, match="forecast"):
        fed.runs.launch(dear)
    with pytest.raises(JobError, match="not enrolled: nowhere"):
        fed.runs.launch(job(sites=("north", "nowhere")))
    assert (fed.store.state.size, list((fed.folder / "runs").iterdir())) == (size, [])
    assert all(ward.asked == [] for ward in fed.wards.values())


def test_a_run_goes_from_price_to_model_and_a_second_launch_of_the_same_job_follows_it(fed: Federation) -> None:
    events = list(fed.runs.launch(job(rounds=2)))
    assert states(events) == [
        (0, "granted", SITES),
        (1, "sent", SITES),
        (1, "closed", SITES),
        (2, "sent", SITES),
        (2, "closed", SITES),
        (2, "finished", SITES),
    ]
    assert states(fed.runs.launch(job(rounds=2))) == states(events)
    with pytest.raises(JobError, match="another content"):
        fed.runs.launch(job(rounds=2, min_sites=3))
    assert fed.grants() == ["spent"] * 3
    assert [ward.vault.reads for ward in fed.wards.values()] == [2, 2, 2]
    assert fed.told == [("run", "run-1", SITES), ("over", "run-1", SITES)]
    certificate = json.loads((fed.folder / "releases" / "run-1" / "certificate.json").read_text())
    assert certificate["level"] == "A"
    assert len(certificate["updates"]) == 6
    assert (fed.folder / "releases" / "run-1" / "model.safetensors").read_bytes() == (
        fed.folder / "runs" / "run-1" / "round-2.safetensors"
    ).read_bytes()
    fed.store.close()
    verify(export_file(fed.folder / "hub.db", "lazaret/coordinator", fed.key))
    fed.open()


def test_two_runs_of_one_site_are_never_conducted_at_once(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutex, going, seen = threading.Lock(), set[str](), list[frozenset[str]]()

    def watched(host: Any, plan: Any, *rest: Any) -> Any:
        with mutex:
            going.add(plan.run)
            seen.append(frozenset(going))
        try:
            return conduct_here(host, plan, *rest)
        finally:
            with mutex:
                going.remove(plan.run)

    monkeypatch.setattr(run_controller, "conduct", watched)
    runs = [fed.runs.launch(job(run=name, rounds=1)) for name in ("run-1", "run-2")]
    assert [list(events)[-1].state for events in runs] == ["finished", "finished"]
    assert seen == [{"run-1"}, {"run-2"}]


# stop, wait, resume


def stop_in_round(fed: Federation, number: int) -> None:
    """The operator's stop arrives while a site trains."""

    def before(site: str, message: Message) -> Message:
        if message.metadata.message_type == "train" and int(message.metadata.group_id) == number - 1:
            assert fed.runs.stop("run-1") == "stopping"
        return message

    fed.grid.before = before


def test_a_run_is_stopped_after_the_round_in_progress_its_grants_stay_held_and_resume_finishes_it(
    fed: Federation,
) -> None:
    stop_in_round(fed, 1)
    events = list(fed.runs.launch(job()))
    assert [e.state for e in events][-2:] == ["closed", "stopped"]
    assert events[-1].reason == "by an operator"
    assert (fed.state(), fed.grants()) == ("stopped", ["held"] * 3)
    assert [e.state for e in fed.runs.launch(job())][-1] == "stopped", "a launch is not a resume"
    fed.grid.before = lambda _site, message: message
    again = list(fed.runs.resume("run-1"))
    assert states(again) == [
        (0, "granted", SITES),
        (2, "sent", SITES),
        (2, "closed", SITES),
        (3, "sent", SITES),
        (3, "closed", SITES),
        (3, "finished", SITES),
    ]
    assert [ward.vault.reads for ward in fed.wards.values()] == [3, 3, 3]
    assert (fed.state(), fed.runs.stop("run-1")) == ("finished", "finished")
    assert [e.state for e in fed.runs.resume("run-1")][-1] == "finished"


def test_a_disk_that_is_full_or_no_descriptor_left_stops_a_run_with_its_grants_held(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else somebody who fills the table of open files spends every site's budget."""
    write = run_controller.replace_file

    def full(path: Path, body: bytes) -> None:
        if path.name == "round-2.safetensors":
            raise OSError(errno.EMFILE, "too many open files")
        write(path, body)

    monkeypatch.setattr(run_controller, "replace_file", full)
    events = list(fed.runs.launch(job()))
    assert (events[-1].state, events[-1].reason) == ("stopped", "storage")
    assert (fed.state(), fed.grants()) == ("stopped", ["held"] * 3)
    monkeypatch.setattr(run_controller, "replace_file", write)
    assert [e.state for e in fed.runs.resume("run-1")][-1] == "finished"
    assert [ward.vault.reads for ward in fed.wards.values()] == [3, 3, 3], "no round was trained twice"


def test_a_stopped_run_stays_stopped_over_a_restart_and_can_be_resumed_then(fed: Federation) -> None:
    stop_in_round(fed, 1)
    list(fed.runs.launch(job(rounds=2)))
    fed.restart()
    fed.runs.resume_all()
    assert fed.state() == "stopped"
    assert [e.state for e in fed.runs.watch("run-1")] == ["stopped"]
    assert [e.state for e in fed.runs.resume("run-1")][-1] == "finished"
    assert [ward.vault.reads for ward in fed.wards.values()] == [2, 2, 2]


def test_runs_that_nobody_knows_are_said_to_be_unknown(fed: Federation) -> None:
    assert fed.runs.stop("nothing") == "unknown"
    assert fed.runs.stop("../hub.db") == "unknown"
    for act in (fed.runs.watch, fed.runs.resume):
        with pytest.raises(JobError, match="no run of that name"):
            act("../run-1")


def quick(monkeypatch: pytest.MonkeyPatch, patience_s: float = 60.0) -> None:
    monkeypatch.setattr(run_controller, "NODE_WAIT_S", 0.0)
    monkeypatch.setattr(run_controller, "_PAUSES_S", (0.1, 0.2))
    monkeypatch.setattr(run_controller, "PATIENCE_S", patience_s)


def test_a_run_waits_for_sites_that_sleep_and_goes_on_when_they_are_back(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    fed.wards["south"].online = fed.wards["west"].online = False
    seen = []
    for event in fed.runs.launch(job(rounds=1)):
        seen.append(event.state)
        if event.state == "waiting" and not fed.wards["west"].online:
            assert (event.reason, fed.grants()) == ("too_few_grants", []), (
                "nothing is held for a run that cannot begin"
            )
            fed.wards["south"].online = fed.wards["west"].online = True
    assert seen[-1] == "finished"
    assert "waiting" in seen
    assert [ward.vault.reads for ward in fed.wards.values()] == [1, 1, 1]


def approved_here(fed: Federation, site: str, run: str = "run-1") -> None:
    """A physician of the site approves the plan that was asked for there."""
    ward, key = fed.wards[site], Ed25519PrivateKey.generate()
    store = ward.part.participant.site.ledger.store
    decisions.appoint(store, "physician", "hospital", key.public_key().public_bytes_raw())
    plan = run_plan.kept(ward.vault.note(run_plan.NOTE))[run]
    raw = decisions.statement_bytes("approval/v1", ("physician", store.origin, plan.serial, *plan.words()))
    decisions.approve(store, seal(raw, PAYLOAD_TYPE, key))


def test_a_run_waits_until_persons_have_approved_it_and_nothing_is_held_or_trained_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch, patience_s=0.0)  # they have days of their own
    fed = Federation(tmp_path, policies={"north": admitting(run_approvals='["hospital"]')})
    seen = []
    for event in fed.runs.launch(job(rounds=1)):
        seen.append((event.state, event.sites, event.reason))
        if event.state == "waiting":
            assert {kind for ward in fed.wards.values() for kind, _, _ in ward.asked} == {"plan"}
            assert (fed.grants(), [ward.account() for ward in fed.wards.values()]) == ([], [(0, 0)] * 3)
            approved_here(fed, "north")
    assert seen[0] == ("waiting", ("north",), "not_approved_yet")
    assert [state for state, _, _ in seen].count("waiting") == 1, "days of waiting are told once"
    assert seen[-1][0] == "finished"
    assert [ward.vault.reads for ward in fed.wards.values()] == [1, 1, 1]
    fed.store.close()


def test_after_its_days_a_run_begins_with_the_sites_that_have_approved_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    fed = Federation(tmp_path, policies={"north": admitting(run_approvals='["hospital"]')})
    fed.runs.now = lambda: 0.0  # it was launched long ago
    events = list(fed.runs.launch(job(rounds=1)))
    assert (0, "declined", ("north",)) in states(events)
    assert events[-1].state == "finished"
    assert [ward.vault.reads for ward in fed.wards.values()] == [0, 1, 1]
    assert {kind for kind, _, _ in fed.wards["north"].asked} == {"plan"}
    fed.store.close()


def test_a_run_whose_sites_fall_asleep_in_the_middle_waits_with_its_grants_and_each_round_is_trained_once(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    for event in fed.runs.launch(job(rounds=3)):
        if (event.round, event.state) == (1, "closed"):
            fed.wards["south"].online = fed.wards["west"].online = False
        if event.state == "waiting":
            assert fed.grants() == ["held"] * 3
            fed.wards["south"].online = fed.wards["west"].online = True
    assert event.state == "finished"
    assert all(ward.vault.reads <= 3 for ward in fed.wards.values())


def test_a_run_for_which_nobody_comes_back_is_stopped_with_its_grants_held_not_failed(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch, patience_s=0.0)

    def sleep(site: str, message: Message, reply: Message) -> list[Message]:
        fed.wards["south"].online = fed.wards["west"].online = message.metadata.message_type != "train"
        return [reply]

    fed.grid.twist = sleep
    events = list(fed.runs.launch(job(rounds=2)))
    assert (events[-1].state, events[-1].reason) == ("stopped", "too_few_sites_online")
    assert fed.grants() == ["held"] * 3
    fed.grid.twist = None
    fed.wards["south"].online = fed.wards["west"].online = True
    assert [e.state for e in fed.runs.resume("run-1")][-1] == "finished"


def test_a_run_that_too_few_sites_want_has_failed_and_what_was_held_for_it_is_not_held_on(fed: Federation) -> None:
    for site in ("south", "west"):
        ward = fed.wards[site]
        site_of_it = ward.part.participant.site
        tight = parse(admitting(epsilon="0.5"), "tightened since")
        ledger = LedgerService(site_of_it.ledger.store, lambda _site, tight=tight: tight)
        ward.part.participant.site = replace(site_of_it, ledger=ledger)
    events = list(fed.runs.launch(job()))
    assert (events[-1].state, events[-1].reason) == ("failed", "too_few_grants")
    assert "held" not in fed.grants()
    assert fed.state() == "failed"
    assert fed.wards["north"].vault.reads == 0


def test_a_coordinator_that_is_killed_between_rounds_goes_on_from_the_round_that_its_ledger_closed(
    fed: Federation,
) -> None:
    reached = threading.Event()

    def before(site: str, message: Message) -> Message:
        if message.metadata.group_id == "1" and message.metadata.message_type == "train":
            fed.host.stopping.set()
            reached.set()
        return message

    fed.grid.before = before
    events = list(fed.runs.launch(job(rounds=3)))
    assert reached.is_set()
    assert fed.state() == "open", "a stopping coordinator leaves its runs to be resumed"
    assert events[-1].state in ("failed", "waiting", "stopped", "closed", "finished")
    fed.restart()
    fed.runs.resume_all()
    assert [e.state for e in fed.runs.watch("run-1")][-1] == "finished"
    assert all(ward.vault.reads == 3 for ward in fed.wards.values()), "no round was trained twice"
    assert fed.grants() == ["spent"] * 3


def test_an_agent_that_was_killed_in_a_round_is_back_in_the_next(fed: Federation) -> None:
    crashed: list[str] = []

    def twist(site: str, message: Message, reply: Message) -> list[Message]:
        if site == "west" and message.metadata.group_id == "0" and message.metadata.message_type == "train":
            assert fed.wards["west"].crash(), "its part is taken up"
            crashed.append(site)
            return []
        return [reply]

    fed.grid.twist = twist
    events = list(fed.runs.launch(job(rounds=2)))
    assert crashed
    closed = [e.sites for e in events if e.state == "closed"]
    assert closed[0] == ("north", "south")
    assert events[-1].state == "finished"
    assert fed.wards["west"].vault.reads <= 2
    fed.store.close()
    verify(export_file(fed.folder / "hub.db", "lazaret/coordinator", fed.key))
    fed.open()


def test_an_all_or_none_run_begins_with_all_or_with_nobody(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    spent = fed.wards["west"].hospital.reservation("old", federated().claim(), "federated", "run-0")
    assert fed.intake.reserve("west", "reserve-old", fed.wards["west"].hospital.seal(spent)).admitted
    with pytest.raises(JobError, match="west"):
        fed.runs.launch(job(all_or_none=True))
    assert fed.runs.plan(job())[1].sites == ("north", "south")


# strategies


@pytest.mark.parametrize(
    ("which", "least"),
    [
        (strategy(name="fedadam", server_lr=0.1, beta1=0.9, beta2=0.99, tau=0.001), 2),
        (strategy(name="fedyogi", server_lr=0.1, beta1=0.9, beta2=0.99, tau=0.001), 2),
    ],
    ids=["fedadam", "fedyogi"],
)
def test_a_servers_optimiser_goes_on_with_its_moments_after_a_stop_and_a_restart(
    tmp_path: Path, which: str, least: int
) -> None:
    """Stopped and resumed in another process, it comes to the very numbers of the run that was not."""
    results = []
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
        fed = Federation(tmp_path / name)
        if name == "stopped":
            stop_in_round(fed, 2)
        end = list(fed.runs.launch(job(rounds=3, min_sites=least, strategy=which)))[-1]
        if name == "stopped":
            assert end.state == "stopped"
            assert (tmp_path / name / "runs" / "run-1" / "round-2.moments").stat().st_size > 8 * 195
            fed.restart()
            end = list(fed.runs.resume("run-1"))[-1]
        assert end.state == "finished"
        results.append(fed.model("run-1", 3))
        fed.store.close()
    assert np.array_equal(*results)
    assert np.abs(results[0]).max() > 0.01


FIVE = ("east", "north", "south", "up", "west")


@pytest.mark.parametrize(
    ("which", "sites", "least"),
    [
        (strategy(name="trimmed-mean", trim=1), ("north", "south", "west", "zulu"), 3),
        (strategy(name="krum", byzantine=1, multi=1), FIVE, 5),
    ],
    ids=["trimmed-mean", "krum"],
)
def test_a_poisoned_site_does_not_move_the_model_far_under_a_robust_strategy(
    tmp_path: Path, which: str, sites: tuple[str, ...], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Federation(tmp_path, sites=sites)
    bad = fed.wards[sites[-1]].part.participant
    honest_run = type(federated()).run_round

    def far_away(self: Any, cohort: Any, start: Any, entropy: Any, *rest: Any, **more: Any) -> Any:
        update = honest_run(self, cohort, start, entropy, *rest, **more)
        return replace(update, vector=update.vector + np.float32(1000)) if entropy is bad.entropy else update

    monkeypatch.setattr(type(federated()), "run_round", far_away)
    events = list(fed.runs.launch(job(rounds=1, sites=sites, min_sites=least, strategy=which)))
    assert events[-1].state == "finished"
    assert np.abs(fed.model("run-1", 1)).max() < 100
    closed = next(e.sites for e in events if e.state == "closed")
    if "krum" in which:
        assert len(closed) == 1
        assert sites[-1] not in closed
        refused = {e.sites[0]: e.reason for e in events if e.state == "refused"}
        assert refused[sites[-1]] == "not_selected"
    certificate = json.loads((tmp_path / "releases" / "run-1" / "certificate.json").read_text())
    assert certificate["strategy"]["name"] == json.loads(which)["name"]
    assert len(certificate["updates"]) == len(closed)
    fed.store.close()


def test_an_update_that_is_not_the_one_that_was_sealed_or_of_another_round_is_not_aggregated(fed: Federation) -> None:
    kept: dict[str, Any] = {}

    def twist(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        if site == "west":
            reply.content["parameters"] = ArrayRecord({"flat": Array(np.zeros(195, np.uint16))})
        if site == "south" and message.metadata.group_id == "1":
            reply.content["answer"] = kept["south"]
        kept[site] = reply.content["answer"]
        return [reply]

    fed.grid.twist = twist
    events = list(fed.runs.launch(job(rounds=2, min_sites=1)))
    refused = {(e.round, e.sites[0]): e.reason for e in events if e.state == "refused"}
    assert refused == {
        (1, "west"): "artifact_changed",
        (2, "west"): "artifact_changed",
        (2, "south"): "another_round",
    }
    assert [e.sites for e in events if e.state == "closed"] == [("north", "south"), ("north",)]


# what an operator sees


def test_an_operators_requests_are_answered_in_words(fed: Federation) -> None:
    at = Operations(fed.runs, dict)
    good = job(rounds=1)
    request = gateway_pb2.LaunchRequest(
        run="run-1",
        mechanism=good.mechanism,
        config=good.config.encode(),
        parameters=good.parameters,
        sites=good.sites,
        rounds=1,
        min_sites=2,
    )
    reply = at.plan(request)
    assert (reply.refused, [c.fits for c in reply.sites]) == ("", [True] * 3)
    assert [e.state for e in at.launch(request)][-1] == "finished"
    bad = gateway_pb2.LaunchRequest(run="run-2", mechanism="ksame", config=b"\xff", rounds=1)
    assert "not text" in at.plan(bad).refused
    (event,) = at.launch(bad)
    assert (event.state, "not text" in event.reason) == ("failed", True)
    for events in (at.watch("run-3"), at.resume("run-3")):
        (event,) = events
        assert (event.state, event.reason) == ("failed", "there is no run of that name")
    assert at.stop("run-3") == "unknown"


def test_the_jobs_of_the_tests_are_what_the_agents_mechanisms_write() -> None:
    assert (job(2).config, job(2).parameters) == (federated(2).to_json(), federated(2).parameters)
    assert (secret_job(2).config, secret_job(2).parameters) == (masked(2).to_json(), masked(2).parameters)


# models of the task


def test_only_the_operators_launch_approves_models_and_before_a_folder_is_made(fed: Federation) -> None:
    asked, there = list[str](), list[bool]()

    def approve(one: Any) -> None:
        asked.append(one.run)
        there.append((fed.runs.root / one.run).exists())

    fed.runs.approve = approve
    list(fed.runs.launch(job(rounds=1, run="run-1")))
    list(fed.runs.launch(job(rounds=1, run="run-2"), {"person": "res-1", "role": "researcher", "at": 1}))
    list(fed.runs.launch(job(rounds=1, run="run-3"), {"person": "ops-1", "role": "operator", "at": 1}))
    assert (asked, there) == (["run-1", "run-3"], [False, False])
    assert fed.runs.launched_by("run-2") == {"person": "res-1", "role": "researcher", "at": 1}
    list(fed.runs.launch(job(rounds=1, run="run-2")))
    assert asked[2:] == ["run-2"], "the operator has launched the same job"


def test_a_launch_whose_models_cannot_be_approved_makes_nothing(fed: Federation) -> None:
    def refuses(_: Any) -> None:
        raise JobError("models of the task cannot be approved: another architecture has the name")

    fed.runs.approve = refuses
    with pytest.raises(JobError, match="cannot be approved"):
        fed.runs.launch(job(rounds=1, run="run-1"))
    assert not (fed.runs.root / "run-1").exists()
    asked = job(rounds=1, run="run-1")
    words = {
        name: getattr(asked, name) for name in ("run", "mechanism", "parameters", "sites", "rounds", "min_sites")
    }
    request = gateway_pb2.LaunchRequest(**words, config=asked.config.encode())
    (told,) = Operations(fed.runs, dict).launch(request)
    assert (told.state, "cannot be approved" in told.reason) == ("failed", True)


def test_runs_of_before_an_upgrade_have_their_models_approved_at_the_start_once(fed: Federation) -> None:
    list(fed.runs.launch(job(rounds=1, run="run-1")))
    list(fed.runs.launch(job(rounds=1, run="run-2"), {"person": "res-1", "role": "researcher", "at": 1}))
    (fed.runs.root / "run-1" / "models-approved").unlink()  # an earlier version knew of none
    asked = list[str]()
    fed.runs.approve = lambda one: asked.append(one.run)
    fed.runs.resume_all()
    assert asked == ["run-1"]
    fed.runs.resume_all()
    assert asked == ["run-1"], "who removed the file meanwhile has undone it"
