"""Killed or failed at any operation, the ledger comes back whole; the long form is ``python -m tests.crash kill``.

Of the sampled operations `make test` takes every third, from a place that the commit's hash chooses (pytest says
which at its start). All of them are marked slow: both see the same faults in the same way, and differ in number only.
"""

from __future__ import annotations

import pytest

from tests.crash import child, kill
from tests.crash.faults import KINDS
from tests.crash.workload import LOST, plan
from tests.support.commit_third import third
from tests.support.peers import need

SEED = 1
SHARES = pytest.mark.parametrize(
    "shares",
    [
        pytest.param((third(),), id="a third"),
        pytest.param((0, 1, 2), id="all", marks=pytest.mark.slow),  # three times as many lives, each like these
    ],
)


def of(operations: range, shares: tuple[int, ...]) -> list[int]:
    """The sampled operations that are in those thirds."""
    return [at for place, at in enumerate(operations) if place % 3 in shares]


@pytest.fixture(scope="module")
def operations() -> int:
    """How many operations of SQLite's there are to fail at, schema and shutdowns included."""
    return kill.operations(SEED)


@SHARES
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_operation_loses_nothing_and_is_never_passed_over(
    kind: str, operations: int, shares: tuple[int, ...]
) -> None:
    tally = kill.Tally()
    for at in of(range(1 + KINDS.index(kind), operations + 1, 7), shares):
        kill.by_layer(SEED, kind, at, tally)
    assert not tally.wrong
    if kind.startswith("kill"):
        assert tally.ends == {"killed": tally.lives}
    else:
        assert tally.ends["stopped"] > tally.lives // 3
        assert tally.ends["refused"] > 0


def test_a_store_that_answers_before_it_writes_is_found_out(operations: int) -> None:
    tally = kill.Tally()
    for at in range(operations // 2, operations, 7):
        kill.by_layer(SEED, "kill before", at, tally, hasty=True)
    assert len(tally.wrong[LOST]) > 3


@pytest.mark.parametrize(("sizes", "pages"), [(range(36_000, 60_000, 4_000), False), (range(6, 10), True)])
def test_a_full_disk_stops_the_ledger_and_space_lets_it_resume(sizes: range, pages: bool) -> None:
    tally = kill.Tally()
    deaths = [kill.disk_full(SEED, most, pages, tally) for most in sizes]
    assert not tally.wrong
    assert any(death.code == child.STOPPED and death.acknowledged for death in deaths)


def test_the_lives_that_are_ended_would_have_finished(operations: int) -> None:
    tally = kill.Tally()
    kill.by_layer(SEED, "eio", operations + 1, tally)
    assert tally.ends == {"finished": 1}
    assert operations > 10 * len(plan(SEED).steps)


@pytest.fixture(scope="module")
def calls() -> dict[str, int]:
    """How many system calls there are to fail."""
    need("strace")
    if reason := kill.strace_missing():
        pytest.skip(f"{reason}; the layer's tests above fail the same operations")
    return kill.calls(SEED)


@SHARES
@pytest.mark.parametrize("action", kill.ACTIONS)
@pytest.mark.parametrize("call", ["pwrite64", "fdatasync", "ftruncate", "openat"])
def test_a_system_call_that_fails_or_kills_loses_nothing_and_is_never_passed_over(
    call: str, action: str, calls: dict[str, int], shares: tuple[int, ...]
) -> None:
    tally = kill.Tally()
    for at in of(range(1 + kill.ACTIONS.index(action), calls[call] + 1, max(2, calls[call] // 5)), shares):
        kill.by_strace(SEED, call, action, at, tally)
    assert not tally.wrong
    assert tally.lives >= len(shares)
