"""A run's board: the ledger's word on rounds and budgets, the feed's on who dropped out and why."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from coordinator.console.run_status import RunEntries, RunFolder, board_of
from coordinator.explanations import RULES
from coordinator.federation.events import RunEvent
from coordinator.federation.run_journal import KeptEvent
from tests.support.coordinator_runs import SITES, job

JOB = job()
HELD = MappingProxyType({site: ("held", 0, "4e-06", 4) for site in SITES})
NOTHING = RunEntries(0, {}, {})


def ledger(closed: int = 0, grants: object = HELD, **counted: tuple[str, ...]) -> RunEntries:
    return RunEntries(closed, {int(n[1:]): sites for n, sites in counted.items()}, grants)  # type: ignore[arg-type]


def event(number: int, state: str, *sites: str, reason: str = "") -> RunEvent:
    return RunEvent("run-1", number, state, sites, reason)


def test_before_anything_was_heard_it_waits_for_its_turn() -> None:
    made = board_of(JOB, "open", NOTHING, [])
    assert (made.state, made.live, made.rows) == ("queued", True, ())
    assert {seat.state for seat in made.seats} == {"not asked yet"}


def test_while_persons_decide_it_is_told_whose() -> None:
    made = board_of(JOB, "open", NOTHING, [event(0, "waiting", "west", reason="not_approved_yet")])
    assert made.state == "waiting"
    assert {seat.site: seat.state for seat in made.seats} == {
        "north": "not asked for its price yet",
        "south": "not asked for its price yet",
        "west": "its persons decide",
    }


def test_who_dropped_out_is_named_with_the_reason_in_words() -> None:
    events = [
        event(0, "declined", "west", reason="budget"),
        event(0, "granted", "north", "south"),
        event(1, "sent", "north", "south"),
        event(1, "refused", "south", reason="no_reply"),
        event(1, "closed", "north"),
    ]
    grants = {site: ("held", 5_000_000, "4e-06", 4) for site in ("north", "south")}
    made = board_of(JOB, "open", ledger(1, grants, r1=("north",)), events)
    (row,) = made.rows
    assert (row.closed, row.asked, row.counted) == (True, ("north", "south"), ("north",))
    assert [(out.site, out.code) for out in row.out] == [("south", "no_reply")]
    seats = {seat.site: seat for seat in made.seats}
    assert seats["north"].state == "takes part"
    assert "delta 4e-06" in seats["north"].spent
    assert seats["south"].out is not None
    assert "did not answer" in seats["south"].out.why
    assert seats["west"].state == "not in the run"
    assert seats["west"].out is not None
    assert seats["west"].out.why == RULES["budget"][0]


def test_who_was_late_and_is_in_the_model_was_not_out() -> None:
    events = [event(1, "sent", *SITES), event(1, "refused", "west", reason="offline"), event(1, "closed", *SITES)]
    made = board_of(JOB, "open", ledger(1, HELD, r1=SITES), events)
    assert made.rows[0].out == ()
    assert all(seat.out is None for seat in made.seats)


@pytest.mark.parametrize(
    ("known", "last", "stopping", "state"),
    [
        ("finished", "finished", False, "finished"),
        ("failed", "failed", False, "failed"),
        ("stopped", "sent", True, "stopping"),
        ("stopped", "stopped", False, "stopped"),
        ("open", "waiting", False, "waiting"),
        ("open", "sent", False, "running"),
        ("open", "failed", False, "failed"),  # its end could not be written: the next start resumes it
    ],
)
def test_the_state_is_what_the_disk_and_the_feed_say_together(
    known: str, last: str, stopping: bool, state: str
) -> None:
    made = board_of(JOB, known, NOTHING, [event(1, last)], stopping=stopping)
    assert made.state == state
    assert made.live is (state not in ("finished", "failed", "stopped"))


def test_after_a_restart_the_ledger_alone_tells_the_rounds() -> None:
    made = board_of(JOB, "finished", ledger(3, HELD, r1=SITES, r2=SITES[:2], r3=SITES), [])
    assert [(row.number, row.counted, row.asked) for row in made.rows][1] == (2, SITES[:2], ())
    assert [seat.rounds for seat in made.seats] == [3, 3, 2]


def kept(at: float, number: int, state: str, *sites: str, reason: str = "", **missing: str) -> KeptEvent:
    return KeptEvent(at, number, state, sites, reason, missing)


BEFORE = [
    kept(1.0, 0, "granted", *SITES),
    kept(2.0, 1, "sent", *SITES),
    kept(32.0, 1, "closed", *SITES),
    kept(40.0, 2, "sent", *SITES),
    kept(50.0, 2, "waiting", "south", "west", reason="too_few_updates", south="no_reply", west="no_reply"),
]


def test_after_a_restart_the_journal_tells_what_an_earlier_process_has_seen() -> None:
    made = board_of(JOB, "open", ledger(1, HELD, r1=SITES), [], folder=RunFolder(journal=BEFORE))
    assert made.state == "queued", "it is not at work in this process"
    assert [(row.number, row.asked, row.seconds) for row in made.rows] == [(2, SITES, 0.0), (1, SITES, 30.0)]
    assert [(out.site, out.code) for out in made.rows[0].out] == [("south", "no_reply"), ("west", "no_reply")]
    assert {seat.site: seat.out is not None for seat in made.seats} == {"north": False, "south": True, "west": True}


def test_a_run_that_was_stopped_by_an_earlier_process_still_says_why() -> None:
    end = kept(60.0, 2, "stopped", "south", reason="too_few_sites_online", south="offline")
    made = board_of(JOB, "stopped", ledger(1, HELD, r1=SITES), [], folder=RunFolder(journal=[*BEFORE, end]))
    assert (made.state, made.reason) == ("stopped", "Too few hospitals were connected.")


def test_who_was_away_at_the_price_of_a_run_that_goes_on_is_out_of_its_next_round_until_it_is_asked() -> None:
    again = [kept(70.0, 0, "declined", "west", reason="offline"), kept(71.0, 0, "granted", "north", "south")]
    events = [event(0, "declined", "west", reason="offline"), event(0, "granted", "north", "south")]
    made = board_of(JOB, "open", ledger(1, HELD, r1=SITES), events, folder=RunFolder(journal=[*BEFORE, *again]))
    assert (made.state, made.rows[0].number) == ("running", 2)
    assert [(out.site, out.code) for out in made.rows[0].out] == [("west", "offline")]
    later = [*again, kept(72.0, 2, "sent", *SITES)]
    events.append(event(2, "sent", *SITES))
    made = board_of(JOB, "open", ledger(1, HELD, r1=SITES), events, folder=RunFolder(journal=[*BEFORE, *later]))
    assert made.rows[0].out == ()


def test_a_journal_that_lacks_what_this_process_has_seen_is_not_followed() -> None:
    """The disk was full."""
    events = [event(0, "granted", *SITES), event(1, "sent", *SITES)]
    made = board_of(JOB, "open", ledger(0, HELD), events, folder=RunFolder(journal=BEFORE[:1]))
    assert (made.state, made.rows[0].asked) == ("running", SITES)


@pytest.mark.parametrize(
    ("reason", "words"), [("frozen", "its receipts are awaited"), ("too_few_grants", "not asked yet")]
)
def test_a_run_that_waits_has_asked_nobody_who_is_then_not_in_it(reason: str, words: str) -> None:
    waits = kept(1.0, 0, "waiting", *SITES, reason=reason, **dict.fromkeys(SITES, reason))
    made = board_of(
        JOB, "open", ledger(0, {}), [event(0, "waiting", *SITES, reason=reason)], folder=RunFolder((), [waits])
    )
    assert {seat.state for seat in made.seats} == {words}


def test_a_stopped_run_has_no_other_events_reason_as_its_own() -> None:
    """It was asked to stop, and killed before its end was written."""
    out = kept(45.0, 2, "declined", "west", reason="unavailable")
    made = board_of(JOB, "stopped", ledger(1, HELD, r1=SITES), [], folder=RunFolder(journal=[*BEFORE, out]))
    assert (made.state, made.reason) == ("stopped", "")
