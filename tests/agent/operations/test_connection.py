from __future__ import annotations

import pytest

from agent.federation.supernode_process import STATES
from agent.operations.connection import connection_fault
from protos.operations.event_counters import EventCounters


def heard(*states: str) -> EventCounters:
    """What a log says of a link that was in these states."""
    counters = EventCounters()
    for state in states:
        counters.count({"event": "link", "state": state}, "info")
    return counters


@pytest.mark.parametrize("state", sorted(STATES - {"online"} | {"restarted", "unmet"}))
def test_every_state_of_the_link_but_online_is_a_fault_in_words(state: str) -> None:
    told = connection_fault(heard("online", state))
    assert told is not None
    assert told.startswith("no part in rounds since 20")


def test_a_link_that_is_up_or_that_there_is_none_of_is_no_fault() -> None:
    assert connection_fault(heard("turned away", "online")) is None
    assert connection_fault(heard()) is None
