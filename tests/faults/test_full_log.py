"""A log on a full disk loses lines and nothing else: it once ended the thread that conducted a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import event_log as agent_log
from coordinator import event_log as coordinator_log
from tests.faults.stage import resized, small_disk

OPENED = [agent_log.open_log, coordinator_log.open_log]


@pytest.mark.parametrize("opened", OPENED)
def test_a_line_for_which_there_is_no_room_is_lost_and_the_next_one_is_whole(
    opened: Callable[[Path], Any], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small", 64) as disk:
        log = opened(disk / "x.log")
        log.info("round", run="before")
        (disk / "rest").write_bytes(bytes(64 * 1024 - 4096 * 2))
        for number in range(200):  # a page is left, of which each line takes a part
            log.info("round", run=f"run-{number}")
        assert os.statvfs(disk).f_bfree == 0, "the disk was not full"
        resized(disk, 1024)
        log.info("round", run="after")
        lines = (disk / "x.log").read_text().splitlines()
        del log
    whole = []
    for line in lines:
        try:
            whole.append(json.loads(line)["run"])
        except ValueError:
            assert not line.endswith("}"), line
    assert whole[0] == "before"
    assert whole[-1] == "after"
    assert 2 < len(whole) < 202
    assert len(lines) - len(whole) <= 1, "one torn line at most"
