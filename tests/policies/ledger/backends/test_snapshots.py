"""Databases that are copied together are of one moment, whoever writes meanwhile."""

from __future__ import annotations

import contextlib
import stat
import threading
from pathlib import Path

import apsw
import pytest

from policies.ledger.backends import snapshots
from policies.ledger.backends.snapshots import SnapshotError, consistent_snapshot


def made(path: Path) -> apsw.Connection:
    db = apsw.Connection(str(path))
    db.set_busy_timeout(5000)
    db.execute("PRAGMA journal_mode=WAL; PRAGMA user_version=7; CREATE TABLE t(n INTEGER PRIMARY KEY)").fetchall()
    return db


def held(path: Path) -> int:
    with contextlib.closing(apsw.Connection(str(path))) as db:
        ((n,),) = db.execute("SELECT coalesce(max(n), 0) FROM t").fetchall()
        assert db.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        return int(n)


def test_two_files_that_are_written_one_after_the_other_all_the_time_are_copied_in_step(tmp_path: Path) -> None:
    """A row goes into the first, then into the second: a copy in which the second is ahead is of no moment."""
    made(tmp_path / "a.db").close()
    made(tmp_path / "b.db").close()
    stop = threading.Event()

    def write() -> None:
        with (
            contextlib.closing(apsw.Connection(str(tmp_path / "a.db"))) as a,
            contextlib.closing(apsw.Connection(str(tmp_path / "b.db"))) as b,
        ):
            n = 0
            while not stop.is_set():
                n += 1
                for db in (a, b):
                    db.execute("INSERT INTO t VALUES(?)", (n,))
                stop.wait(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    while not held(tmp_path / "b.db"):
        stop.wait(0.001)
    try:
        for turn in range(20):
            names = [(tmp_path / f"{which}.db", tmp_path / f"{turn}-{which}.db") for which in "ab"]
            consistent_snapshot(names if turn % 2 else names[::-1])
            assert held(tmp_path / f"{turn}-a.db") - held(tmp_path / f"{turn}-b.db") in {0, 1}
    finally:
        stop.set()
        writer.join()
    assert held(tmp_path / "19-a.db") > 0


def test_a_copy_is_private_whole_and_of_the_same_form(tmp_path: Path) -> None:
    with contextlib.closing(made(tmp_path / "a.db")) as db:
        db.execute("INSERT INTO t VALUES(3)")  # in the write-ahead log alone
        consistent_snapshot([(tmp_path / "a.db", tmp_path / "copy.db")])
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
    assert not list(tmp_path.glob("copy.db-*")), "it needs no log beside it"
    assert held(tmp_path / "copy.db") == 3
    with contextlib.closing(apsw.Connection(str(tmp_path / "copy.db"))) as db:
        assert db.execute("PRAGMA user_version").fetchall() == [(7,)]


def test_where_there_is_no_quiet_moment_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "a.db").close()
    numbers = iter(range(10_000))
    monkeypatch.setattr(snapshots, "_version", lambda _probe: next(numbers))
    monkeypatch.setattr(snapshots, "PAUSE_S", 0.0)
    with pytest.raises(SnapshotError, match="keeps writing"):
        consistent_snapshot([(tmp_path / "a.db", tmp_path / "copy.db")])
    assert not (tmp_path / "copy.db").exists()


def test_nothing_is_replaced_and_a_failure_leaves_none_of_several(tmp_path: Path) -> None:
    for name in "ab":
        made(tmp_path / f"{name}.db").close()
    (tmp_path / "taken.db").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        consistent_snapshot([(tmp_path / "a.db", tmp_path / "copy.db"), (tmp_path / "b.db", tmp_path / "taken.db")])
    assert not (tmp_path / "copy.db").exists()
    assert (tmp_path / "taken.db").read_bytes() == b"mine"
    (tmp_path / "b.db").write_bytes(b"no database" * 500)
    with pytest.raises(SnapshotError):
        consistent_snapshot([(tmp_path / "a.db", tmp_path / "copy.db"), (tmp_path / "b.db", tmp_path / "other.db")])
    with pytest.raises(FileNotFoundError):
        consistent_snapshot([(tmp_path / "none.db", tmp_path / "copy.db")])
    assert not (tmp_path / "copy.db").exists()
