"""The eleven ways in which runs elsewhere died: for each, the line of rounds.md is the one that the product says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent.dp.compute_device import AUTO, SiteCompute
from agent.operations.connection import connection_fault
from coordinator.console import rounds as run_page
from coordinator.federation.participation import sentence
from coordinator.operations.attendance import AbsentSite
from coordinator.round_codes import explain_code
from protos.federation import messages
from protos.federation.site_check import WRONG
from protos.operations.event_counters import EventCounters
from protos.service.service_lock import ServiceBusyError, service_lock

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "deploy" / "docs" / "rounds.md").read_text()
TABLE = PAGE[PAGE.index("**What runs elsewhere died of.**") : PAGE.index("**What a fault costs.**")]
ROWS = [line.split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][1:]


def quoted(number: int) -> list[str]:
    """The product's own words in a row, from 1."""
    return re.findall(r"`([^`]+)`", ROWS[number - 1][1])


def _turned_away() -> str:
    heard = EventCounters()
    heard.count({"event": "link", "state": "turned away"}, "info")
    return str(connection_fault(heard))


def _busy(home: Path) -> str:
    with service_lock(home), pytest.raises(ServiceBusyError) as refusal, service_lock(home):
        pass
    return str(refusal.value)


def _lost() -> str:
    there = SiteCompute(AUTO, available=lambda: True)
    return there.lost()


def test_there_are_eleven() -> None:
    assert len(ROWS) == 11


@pytest.mark.parametrize("number", range(1, 12))
def test_the_line_that_the_page_shows_is_the_one_that_the_product_says(number: int, tmp_path: Path) -> None:
    source = json.dumps((ROOT / "coordinator" / "federation" / "run_controller.py").read_text())
    command = (ROOT / "coordinator" / "cli" / "operator_client.py").read_text()
    said: dict[int, Any] = {
        1: run_page._STAGES["working"],
        2: explain_code("no_reply")[0] + " wait_seconds",
        3: explain_code("offline")[0],
        4: sentence(("north", "south", "west"), [("north", "south", "west"), ("north", "south")]),
        5: explain_code("another_round")[0],
        6: _turned_away() + AbsentSite("west", 0.0, "").words,
        7: _busy(tmp_path),
        8: _lost(),
        9: " ".join(WRONG.values()),
        10: source,
        11: command,
    }
    assert quoted(number)
    for words in quoted(number):
        assert words in said[number], words


def test_a_stage_that_a_site_may_say_has_its_words() -> None:
    assert run_page._STAGES.keys() - {""} == messages.STAGES
