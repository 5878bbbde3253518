"""What is known of a run is the ledger's word on who is in it and what was charged; where a file contradicts it or is
damaged, there is no report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.federation.events import RunEvent
from coordinator.federation.participation import RoundMembers
from coordinator.federation.run_journal import JOURNAL, keep_event
from coordinator.reports.document import ReportError
from coordinator.reports.run_facts import ASKED, IN, NEVER, OUT, RunFacts, Wait, run_facts
from tests.support.coordinator_runs import secret_configuration, written
from tests.support.report_world import Stage, books_of_store, keep_run, stage


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        yield shown


@pytest.fixture(autouse=True)
def alone(world: Stage) -> Iterator[None]:
    """Each test keeps the run as it needs it."""
    yield
    shutil.rmtree(world.home.root / "runs", ignore_errors=True)


def facts_of(world: Stage, run: str = "trial") -> RunFacts:
    books = books_of_store(world.store)
    return run_facts(world.home.root / "runs", run, books.state, books.records)


def test_a_finished_run_is_told_round_by_round(world: Stage) -> None:
    keep_run(world)
    facts = facts_of(world)
    assert (facts.state, facts.closed, facts.admitted, facts.ended_at) == ("finished", 2, 3, 210.0)
    first, second = facts.rounds
    assert [first.state(site) for site in ("north", "south")] == [IN, IN]
    assert [second.state(site) for site in ("north", "south")] == [IN, OUT]
    assert dict(second.out) == {"south": "no_reply"}
    assert (first.seconds, dict(first.site_seconds)) == (10.0, {"north": 4.0, "south": 3.0})
    assert (second.seconds, dict(second.site_seconds)) == (60.0, {"north": 10.0}), "who is not in it has no time"
    assert facts.waits == [Wait(112.0, 140.0, 2, "waiting", "too_few_updates", ("south",))]
    assert facts.traffic == {"north": (500, 1000), "south": (500, 1000)}, (
        "what its links carried while it waited is not its"
    )


def test_what_was_charged_is_the_ledgers_word(world: Stage) -> None:
    keep_run(world)
    facts, state = facts_of(world), world.store.state
    for site in ("north", "south"):
        one, account = facts.sites[site], state.accounts[f"{site}/rdp"]
        assert one.charged == state.grants[f"g-{site}"].reserved.amount, "all of it: nobody gave any back"
        assert one.charged + one.others == account.spent + account.held
        assert (one.limit, one.budget, one.grant) == (account.limit, account.epsilon, "spent")


def test_a_run_that_goes_on_shows_who_was_asked_and_why_others_are_out(world: Stage) -> None:
    folder = keep_run(world, "open", "later")
    for path in folder.glob("round-*"):
        path.unlink()
    (folder / JOURNAL).unlink()
    for at, number, said, sites, reason in (
        (1.0, 0, "declined", ("south",), "budget"),
        (2.0, 1, "sent", ("north", "south"), ""),
        (3.0, 1, "refused", ("south",), "offline"),
    ):
        keep_event(folder, RunEvent("later", number, said, sites, reason), at, {}, {})
    facts = facts_of(world, "later")
    assert (facts.state, facts.closed, facts.reason) == ("open", 0, "")
    assert [facts.rounds[0].state(site) for site in ("north", "south")] == [ASKED, OUT]
    assert [facts.rounds[1].state(site) for site in ("north", "south")] == [NEVER, NEVER]
    assert facts.declined == {"south": "budget"}
    assert not any(one.grant or one.charged for one in facts.sites.values())


def test_a_failure_keeps_the_code_of_each_site(world: Stage) -> None:
    folder = keep_run(world, "open", "later")
    for path in folder.glob("round-*"):
        path.unlink()
    (folder / JOURNAL).unlink()
    end = RunEvent("later", 1, "failed", ("north",), "too_few_updates")
    keep_event(folder, RunEvent("later", 1, "sent", ("north", "south")), 1.0, {}, {})
    keep_event(folder, end, 9.0, {}, {"north": "not_finite"})
    (folder / "end.json").write_text(json.dumps({"state": "failed", "round": 1, "reason": end.reason}))
    facts = facts_of(world, "later")
    assert (facts.state, facts.reason, facts.end_round, facts.ended_at) == ("failed", "too_few_updates", 1, 9.0)
    assert dict(facts.rounds[0].out) == {"north": "not_finite"}


def test_a_stop_is_told_when_the_run_has_come_to_it(world: Stage) -> None:
    folder = keep_run(world, "open")
    (folder / "stop").touch()
    assert (facts_of(world).state, facts_of(world).ended_at) == ("stopped", 0.0), "asked for"
    keep_event(folder, RunEvent("trial", 0, "stopped", (), "by an operator"), 300.0, {}, {})
    facts = facts_of(world)
    assert (facts.reason, facts.ended_at) == ("by an operator", 300.0)
    assert facts.waits[-1].round == 3, "after the rounds that are closed, and not at the price"


def test_the_time_of_one_hospital_in_a_masked_round_is_not_known(world: Stage) -> None:
    folder = keep_run(world, "open")
    kept = json.loads((folder / "job.json").read_text())
    kept |= {"mechanism": "federated-masked", "secure": True, "config": written(secret_configuration(2, 3))}
    kept |= {"sites": ["north", "south", "west"], "min_sites": 3}
    (folder / "job.json").write_text(json.dumps(kept))
    facts = facts_of(world)
    assert [one.seconds for one in facts.rounds] == [10.0, 60.0]
    assert not any(one.site_seconds for one in facts.rounds)


def test_a_run_of_a_version_that_kept_no_events_has_no_times_and_says_no_reason(world: Stage) -> None:
    folder = keep_run(world)
    (folder / JOURNAL).unlink()
    (folder / "round-2.sites").unlink()
    facts = facts_of(world)
    assert (facts.closed, facts.traffic, facts.waits, facts.ended_at) == (2, {}, [], 0.0)
    assert dict(facts.rounds[1].out) == {"south": ""}
    assert not any(one.seconds for one in facts.rounds)


@pytest.mark.parametrize("name", ["job.json", "end.json", "round-2.sites", JOURNAL, "launched.json"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff\xfe\n", b'{"state": 4}\n'])
def test_a_damaged_file_of_the_run_is_a_sentence_and_no_report(world: Stage, name: str, body: bytes) -> None:
    folder = keep_run(world)
    if not body and name == JOURNAL:
        return  # nothing was kept
    (folder / name).write_bytes(body if name != JOURNAL else body + b"\n")
    with pytest.raises(ReportError, match=r"^trial: "):
        facts_of(world)


@pytest.mark.parametrize("run", ["nothing", "", "../trial", "Trial", "trial/"])
def test_a_run_that_is_not_there_is_refused_with_where_to_look(world: Stage, run: str) -> None:
    keep_run(world)
    with pytest.raises(ReportError, match="there is no run of that name"):
        facts_of(world, run)


def test_a_folder_that_contradicts_the_ledger_makes_no_report(world: Stage) -> None:
    """Who is in a round is the ledger's word: a folder from elsewhere must not tell another story."""
    folder = keep_run(world)
    RoundMembers(2, False, ("north", "south"), {}).keep(folder)
    with pytest.raises(ReportError, match="round 2 has other sites in the run's folder than in the ledger"):
        facts_of(world)
    kept = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**kept, "rounds": 1}))
    with pytest.raises(ReportError, match="the ledger has closed 2 of its 1 rounds"):
        facts_of(world)
    folder = keep_run(world, run="later")
    with pytest.raises(ReportError, match="later: the ledger has closed 0 of its 2 rounds"):
        facts_of(world, "later")


def test_nothing_is_written_where_a_run_is_read(world: Stage) -> None:
    def seen() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(folder.iterdir())}

    folder = keep_run(world)
    before = seen()
    facts_of(world)
    assert seen() == before
