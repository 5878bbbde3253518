"""A run's board: the ledger's word on rounds and budgets, the feed's on who dropped out and why."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType

import pytest

import coordinator
from coordinator.console import run_status
from coordinator.console.run_status import RunEntries, board_of
from coordinator.explanations import RULES
from coordinator.federation.events import RunEvent
from protos.federation.messages import CODES
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


def test_every_code_of_a_round_has_its_sentence() -> None:
    """The codes of sites, and those that the coordinator's own modules give."""
    source = "".join(
        (Path(coordinator.__file__).parent / "federation" / name).read_text()
        for name in ("strategy.py", "secure_strategy.py", "replies.py", "run_controller.py", "run_process.py")
    )
    given = set(re.findall(r'_fail\([^,]+, "([a-z_]+)"', source)) | set(
        re.findall(r'InvalidReplyError\("([a-z_]+)"\)', source)
    )
    given |= set(re.findall(r'_lost\[site\] = "([a-z_]+)"', source)) | {"another_round", "not_granted", "not_finite"}
    assert {"too_few_grants", "schema"} <= given
    for code in sorted(given | set(CODES)):
        why, todo = run_status.explain_code(code)
        assert why, code
        assert "recorded as" not in why, code
        assert todo, code
        assert "See its refusals" not in todo, f"{code}: a researcher reads this page too, and no refusal"
    assert run_status.explain_code("a_new_code")[0] == "The reason is recorded as “a_new_code”."
