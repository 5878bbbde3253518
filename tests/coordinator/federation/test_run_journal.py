"""What happened in a run is kept as it happens: times, codes and counts, through a crash and a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.federation import run_controller
from coordinator.federation.events import RunEvent, SignOfLife
from coordinator.federation.run_journal import (
    JOURNAL,
    JournalError,
    KeptEvent,
    LinkCount,
    answers_of,
    bytes_of,
    keep_event,
    read_events,
    state_of,
)
from tests.support.coordinator_runs import Federation, agents, conduct_here, job

SENT = RunEvent("run-1", 1, "sent", ("north", "south"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_controller, "conduct", conduct_here)
    monkeypatch.setattr(run_controller, "NODE_WAIT_S", 0.2)
    monkeypatch.setattr(run_controller, "_PAUSES_S", (0.05, 0.05))


def test_an_event_is_read_as_it_was_kept(tmp_path: Path) -> None:
    assert read_events(tmp_path) == [], "a run of a version that kept none"
    keep_event(tmp_path, SENT, 100.126, {"north": SignOfLife(99.0, 7, 9, 1.0, "idle", 98.5)}, {})
    lost = RunEvent("run-1", 1, "failed", ("south",), "no_aggregate")
    keep_event(tmp_path, lost, 101.0, {}, {"south": "schema"})
    assert read_events(tmp_path) == [
        KeptEvent(100.13, 1, "sent", ("north", "south"), "", {}, {"north": LinkCount(7, 9, 98.5)}),
        KeptEvent(101.0, 1, "failed", ("south",), "no_aggregate", {"south": "schema"}, {}),
    ]


def test_a_line_that_a_crash_cut_short_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    keep_event(tmp_path, SENT, 1.0, {}, {})
    whole = (tmp_path / JOURNAL).read_bytes()
    for cut in range(1, len(whole)):
        (tmp_path / JOURNAL).write_bytes(whole + whole[:cut])
        assert len(read_events(tmp_path)) == 1
    keep_event(tmp_path, SENT, 2.0, {}, {})
    assert [event.at for event in read_events(tmp_path)] == [1.0, 2.0]


@pytest.mark.parametrize(
    "line",
    [
        b"nothing",
        b"[]",
        b"{}",
        b'{"at": NaN, "round": 1, "state": "sent", "sites": [], "reason": "", "missing": {}, "links": {}}',
        b'{"at": 1, "round": "1", "state": "sent", "sites": [], "reason": "", "missing": {}, "links": {}}',
        b'{"at": 1, "round": 1, "state": "sent", "sites": [3], "reason": "", "missing": {}, "links": {}}',
        b'{"at": 1, "round": 1, "state": "sent", "sites": [], "reason": "", "missing": {}, "links": {"a": [1]}}',
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_read(tmp_path: Path, line: bytes) -> None:
    keep_event(tmp_path, SENT, 1.0, {}, {})
    with (tmp_path / JOURNAL).open("ab") as out:
        out.write(line + b"\n")
    with pytest.raises(JournalError, match=r"events\.jsonl: line 2 cannot be read"):
        read_events(tmp_path)


def test_bytes_are_counted_from_the_price_on_and_through_a_restart_of_the_coordinator() -> None:
    def event(state: str, *counts: int) -> KeptEvent:
        links = {"north": LinkCount(*counts, 0.0)} if counts else {}
        return KeptEvent(1.0, 1, state, (), "", {}, links)

    assert bytes_of([]) == {}
    before = [event("granted", 1000, 2000), event("refused"), event("sent", 1010, 2030)]
    assert bytes_of(before) == {"north": (10, 30)}
    assert bytes_of([*before, event("sent", 3, 4), event("closed", 5, 10)]) == {"north": (15, 40)}
    late = [event("granted"), event("sent", 7, 8)]
    assert bytes_of(late) == {"north": (7, 8)}, "its first call was within the run"
    for pause in ("stopped", "waiting"):
        resumed = [*before, event(pause, 200, 200), event("sent", 10**9, 10**9), event("finished", 10**9 + 50, 10**9)]
        first = bytes_of([*before, event(pause, 200, 200)])["north"]
        assert bytes_of(resumed) == {"north": (first[0] + 50, first[1])}, "what went on meanwhile is another run's"


def test_when_a_site_answered_last_is_of_this_run_alone() -> None:
    def event(at: float, **answered: float) -> KeptEvent:
        return KeptEvent(at, 1, "sent", (), "", {}, {site: LinkCount(1, 1, when) for site, when in answered.items()})

    assert answers_of([]) == {}
    told = [event(10.0, north=5.0, south=0.0), event(20.0, north=15.0), event(30.0, north=25.0, west=4.0)]
    assert answers_of(told) == {"north": 25.0}


def test_how_a_run_stands_is_read_from_its_folder(tmp_path: Path) -> None:
    assert state_of(tmp_path) == "open"
    (tmp_path / "stop").touch()
    assert state_of(tmp_path) == "stopped"
    (tmp_path / "end.json").write_text(json.dumps({"state": "failed"}))
    assert state_of(tmp_path) == "failed"


@agents
def test_a_run_keeps_what_happened_with_why_and_what_its_links_have_carried(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    signs = {"north": SignOfLife(1.0, 100, 200, 0.0, "idle", 5.0)}
    federation.runs.signs = lambda: signs
    federation.wards["west"].online = False
    told = list(federation.runs.launch(job(2, min_sites=2)))
    kept = read_events(tmp_path / "runs" / "run-1")
    assert [(e.round, e.state, e.sites, e.reason) for e in kept] == [
        (e.round, e.state, e.sites, e.reason) for e in told
    ]
    assert [e.at for e in kept] == sorted(e.at for e in kept)
    assert kept[-1].state == "finished"
    assert {e.state for e in kept if e.links} == {"granted", "sent", "closed", "finished"}
    assert [e.sites for e in kept if e.state == "declined"] == [("west",)]


@agents
def test_a_run_that_waits_and_is_stopped_keeps_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_controller, "PATIENCE_S", 0.2)
    federation = Federation(tmp_path)
    for site in ("south", "west"):
        federation.wards[site].online = False
    list(federation.runs.launch(job(2, min_sites=2)))
    kept = read_events(tmp_path / "runs" / "run-1")
    assert kept[-1].state == "stopped"
    assert [dict(e.missing) for e in kept if e.state == "waiting"][:1] == [{"south": "offline", "west": "offline"}]
    federation.restart()
    assert read_events(tmp_path / "runs" / "run-1") == kept, "another process adds to it"


@agents
def test_a_journal_that_cannot_be_written_ends_no_run_and_is_reported(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    (tmp_path / "runs" / "run-1" / JOURNAL).mkdir(parents=True)
    list(federation.runs.launch(job(1)))
    assert federation.state() == "finished"
    assert '"run_event_not_kept"' in (tmp_path / "coordinator.log").read_text()
