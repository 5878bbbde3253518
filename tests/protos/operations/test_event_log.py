"""The log keeps to its list, cannot be forged, does not grow for ever, and loses nothing unseen."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from agent import errors as agent_errors
from agent import event_log as agent_log
from coordinator import errors as coordinator_errors
from coordinator import event_log as coordinator_log
from protos.operations.event_counters import OTHER, CountedEvent, EventCounters
from protos.operations.event_log import LogConfigError, LogSettings, UnlistedKeyError, open_journal, read_settings
from protos.operations.log_file import BestEffortFile

KEYS = frozenset({"event", "level", "timestamp", "where", "state", "rule"})
EVIL = (
    'x"}\n{"event": "forged"}',
    "\r\n<13>1 forged",
    "\x1b]0;title\x07\x1b[2J",
    "\x7f\x9b31m",
    "\u2028\u2029\u0085",
    "\0",
    "\ud800",
)


@pytest.mark.parametrize("text", EVIL)
def test_whatever_a_value_holds_a_line_stays_one_line_of_plain_ascii(tmp_path: Path, text: str) -> None:
    open_journal(tmp_path / "x.log", "test", KEYS, EventCounters()).info("step", state=text)
    raw = (tmp_path / "x.log").read_bytes()
    assert raw.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in raw.rstrip(b"\n"))
    assert json.loads(raw)["state"] == text
    assert json.loads(raw)["event"] == "step"


@pytest.mark.parametrize("value", [object(), {"a": 1}, None, b"bytes", "x" * 501, ["y" * 501]])
def test_a_value_that_is_not_plain_and_short_is_not_logged(tmp_path: Path, value: object) -> None:
    log = open_journal(tmp_path / "x.log", "test", KEYS, EventCounters())
    with pytest.raises(UnlistedKeyError):
        log.info("step", state=value)
    assert (tmp_path / "x.log").read_bytes() == b""


def test_both_sides_refuse_the_same_way_and_say_which_key(tmp_path: Path) -> None:
    for module in (agent_log, coordinator_log):
        with pytest.raises(UnlistedKeyError, match="'patient' may not be logged"):
            module.open_log(tmp_path / "x.log").info("step", patient="Muster^Anna")
        assert {"patient", "path", "uid"}.isdisjoint(module.KEYS)


def test_a_full_file_becomes_an_old_one_and_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = BestEffortFile(path, most=100, keep=2)
    for number in range(40):
        file.write(f"{number:09d}\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    assert all(p.stat().st_size <= 100 and p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())
    kept = "".join((tmp_path / name).read_text() for name in ("x.log.2", "x.log.1", "x.log"))
    assert kept.split() == [f"{number:09d}" for number in range(10, 40)]


def _append(path: str, name: int) -> None:
    file = BestEffortFile(Path(path), most=4000, keep=1000)
    for number in range(500):
        file.write(f"{name}-{number:06d}-{'x' * 20}\n")


def test_no_line_of_several_processes_is_lost_when_one_of_them_begins_a_fresh_file(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=(str(tmp_path / "x.log"), name)) for name in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    lines = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{name}-{n:06d}-{'x' * 20}" for name in range(3) for n in range(500))
    assert len(list(tmp_path.iterdir())) > 5


def test_while_another_process_begins_a_fresh_file_this_one_writes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = BestEffortFile(path, most=10)
    file.write("123456789\n")
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        file.write("second\n")
        assert os.listdir(tmp_path) == ["x.log"]
    file.write("third\n")
    assert (path.read_text(), (tmp_path / "x.log.1").read_text()) == ("third\n", "123456789\nsecond\n")


def test_a_log_that_somebody_moved_away_goes_on_in_a_fresh_file(tmp_path: Path) -> None:
    """As logrotate does without copytruncate; no signal is needed."""
    path = tmp_path / "x.log"
    file = BestEffortFile(path)
    file.write("before\n")
    os.rename(path, tmp_path / "moved")
    file.write("after\n")
    path.unlink()
    file.write("again\n")
    assert ((tmp_path / "moved").read_text(), path.read_text()) == ("before\n", "again\n")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "x.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        BestEffortFile(tmp_path / "x.log")


def test_what_the_disk_did_not_take_is_counted(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    tally = EventCounters()
    file = BestEffortFile(Path("/dev/full"), lost=lambda lines: tally.lose("file", lines))
    file.write("no room\n")
    file.write("no room\n")
    assert tally.lost("file") == 2


def test_events_are_counted_with_place_and_last_state_and_never_without_bound() -> None:
    now = [5.0]
    tally = EventCounters(lambda: now[0])
    tally.count({"event": "pull_failed", "where": "main"}, "error")
    tally.count({"event": "pull_failed", "where": "main", "state": "tired"}, "error")
    assert tally.counts() == {CountedEvent("pull_failed", "error", "main"): 2}
    assert tally.last("pull_failed", "main") == (5.0, "tired")
    assert tally.last("pull_failed", "other") is None
    for number in range(3000):
        tally.count({"event": f"e{number}"}, "info")
    assert len(tally.counts()) <= 1002
    assert tally.counts()[CountedEvent(OTHER, "info", "")] == 2001


def test_what_is_logged_is_counted_and_what_is_refused_is_not(tmp_path: Path) -> None:
    tally = EventCounters()
    log = open_journal(tmp_path / "x.log", "test", KEYS, tally)
    log.warning("pull_failed", where="main")
    with pytest.raises(UnlistedKeyError):
        log.warning("pull_failed", patient="x")
    assert tally.counts() == {CountedEvent("pull_failed", "warning", "main"): 1}


def test_all_problems_of_log_toml_are_told_at_once_by_either_side(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == LogSettings()
    (tmp_path / "log.toml").write_text('keep = "x"\nmore = 1\n[syslog]\nfacility = "13"\nwhere = "y"\n')
    with pytest.raises(LogConfigError) as caught:
        read_settings(tmp_path)
    told = ("unknown keys: more", "keep must be a whole", "unknown keys: syslog.where", "syslog.facility must")
    told += ("missing keys: syslog.to",)
    for part in told:
        assert part in str(caught.value)
    with pytest.raises(agent_errors.SiteConfigError, match=r"log\.toml"):
        agent_log.open_log(tmp_path / "agent.log")
    with pytest.raises(coordinator_errors.CoordinatorConfigError, match=r"log\.toml"):
        coordinator_log.open_log(tmp_path / "coordinator.log")


@pytest.mark.parametrize(
    "text",
    ["keep = 0", "megabytes = 0", "not toml", '[syslog]\nto = "host"', '[syslog]\nto = "h:0"', "syslog = 3",
     '[syslog]\nto = "h:1"\nfacility = 24', '[syslog]\nto = "h:1"\nkey = "k.pem"'],
)  # fmt: skip
def test_senseless_log_settings_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.toml").write_text(text)
    with pytest.raises(LogConfigError):
        read_settings(tmp_path)
