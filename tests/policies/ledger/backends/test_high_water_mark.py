"""A ledger file that ends before what it acknowledged is not opened: the mark beside it says so."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.storage.directory import CoordinatorDirectory
from policies.ledger.backends import high_water_mark
from policies.ledger.backends.high_water_mark import SLOT, Mark, MarkFile
from policies.ledger.backends.migrations.upgrade import upgrade_sqlite
from policies.ledger.backends.sqlite import Sqlite, backup_file, mark_of, open_read_only, open_sqlite
from policies.ledger.entries import Refused
from policies.ledger.merkle import EMPTY_ROOT
from policies.ledger.read_only import read_store
from policies.ledger.store import (
    AppendRequest,
    LedgerStoppedError,
    LedgerTurnedBackError,
    LedgerUnsoundError,
    SealedHead,
    Store,
)
from tests.support.older import older
from tests.support.rolled_back_ledgers import FRAME, HEAD, damaged_logs

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ORIGIN = "lazaret/test"
FILES = ("ledger.db", "ledger.db-wal", "ledger.mark")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "ledger.db"


def opened(path: Path, key: Ed25519PrivateKey = KEY) -> Store:
    return Store(open_sqlite(path), ORIGIN, key, lambda: 7)


def grow(store: Store, count: int = 1, word: str = "x") -> None:
    for _ in range(count):
        store.append(f"{word}-{store.state.size}", AppendRequest((Refused("x", "site-a", "", "call", [word], b""),)))


def killed(path: Path, to: Path) -> Path:
    """The files as ``kill -9`` leaves them: the shared memory is made anew by whoever opens them."""
    to.mkdir()
    for name in FILES:
        if (path.parent / name).exists():
            shutil.copy(path.parent / name, to / name)
    return to / "ledger.db"


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A ledger that was killed with much of it in its log alone, and how many entries it had acknowledged."""
    home = tmp_path_factory.mktemp("worked")
    (home / "home").mkdir()
    with opened(home / "home" / "ledger.db") as store:
        grow(store, 60)
        copy = killed(home / "home" / "ledger.db", home / "killed")
        return copy, store.state.size


def ends(worked: tuple[Path, int], folder: Path) -> Iterator[tuple[str, str]]:
    """What becomes of a copy with each damaged log: refused, whole, or silently short."""
    source, acknowledged = worked
    log = source.with_name("ledger.db-wal").read_bytes()
    for n, (name, damaged) in enumerate(damaged_logs(log).items()):
        copy = killed(source, folder / str(n))
        copy.with_name("ledger.db-wal").unlink()
        if damaged is not None:
            copy.with_name("ledger.db-wal").write_bytes(damaged)
        try:
            with opened(copy) as store:
                yield name, "whole" if store.state.size >= acknowledged else "silent"
        except LedgerUnsoundError:
            yield name, "refused"
        shutil.rmtree(folder / str(n))


def test_of_ninety_damaged_logs_none_loses_an_acknowledged_entry_in_silence(
    worked: tuple[Path, int], tmp_path: Path
) -> None:
    found = dict(ends(worked, tmp_path))
    assert len(found) == 90
    assert [name for name, end in found.items() if end == "silent"] == []
    assert sum(end == "refused" for end in found.values()) > 60, "most of them do lose entries"


def test_without_the_mark_the_same_logs_are_silent(
    worked: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sqlite, "marks", lambda _disk: ())
    found = dict(ends(worked, tmp_path))
    assert sum(end == "silent" for end in found.values()) > 60


def test_what_was_killed_opens_and_goes_on(worked: tuple[Path, int], tmp_path: Path) -> None:
    copy = killed(worked[0], tmp_path / "copy")
    for _ in range(2):
        with opened(copy) as store:
            assert store.state.size >= worked[1]
            grow(store)


def test_a_copy_that_is_brought_back_is_refused_until_a_new_epoch_is_opened(path: Path, tmp_path: Path) -> None:
    with opened(path) as store:
        grow(store, 3)
        backup_file(path, tmp_path / "copy.db")
        grow(store, 2)
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        path.with_name(name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy.db", path)
    for _ in range(2):  # the refusal changes nothing
        with pytest.raises(LedgerTurnedBackError, match=r"has 3 entries.*mark is at 5.*`restore`"):
            opened(path)
    with pytest.raises(LedgerTurnedBackError):
        read_store(open_read_only(path), ORIGIN, KEY)
    with contextlib.closing(open_sqlite(path)) as disk:  # a restore that dies before its entry is durable
        disk.brought_back()
        Store(disk, ORIGIN, KEY, lambda: 7)
    with pytest.raises(LedgerTurnedBackError):
        opened(path)
    disk = open_sqlite(path)
    disk.brought_back()
    with Store(disk, ORIGIN, KEY, lambda: 7) as store:
        store.restore("ab" * 16)
        assert (store.state.epoch, store.state.size) == (2, 4)
    with opened(path) as store:
        grow(store)
    shutil.copy(tmp_path / "copy.db", path)
    path.with_name("ledger.db-wal").unlink(missing_ok=True)
    with pytest.raises(LedgerTurnedBackError):
        opened(path)


def test_another_history_of_the_same_length_is_refused(path: Path, tmp_path: Path) -> None:
    with opened(path) as store:
        grow(store, 2)
        backup_file(path, tmp_path / "copy.db")
        grow(store, 2, "one-way")
    (tmp_path / "other").mkdir()
    other = shutil.copy(tmp_path / "copy.db", tmp_path / "other" / "ledger.db")
    disk = open_sqlite(other)
    disk.brought_back()
    with Store(disk, ORIGIN, KEY, lambda: 7) as store:
        grow(store, 5, "another-way")
    shutil.copy(other, path)
    with pytest.raises(LedgerTurnedBackError, match="of other entries"):
        opened(path)


def test_a_mark_that_is_missing_or_damaged_or_another_ledgers_is_a_refusal(path: Path, tmp_path: Path) -> None:
    with opened(path) as store:
        grow(store, 3)
    whole = mark_of(path).path.read_bytes()
    mark_of(path).path.unlink()
    with pytest.raises(LedgerUnsoundError, match=r"ledger\.mark\) is missing.*`restore`"):
        opened(path)
    with pytest.raises(LedgerUnsoundError, match="missing"):
        read_store(open_read_only(path), ORIGIN, KEY)
    upgrade_sqlite(path, ORIGIN, KEY)
    with pytest.raises(LedgerUnsoundError, match="missing"):  # an upgrade of what is upgraded makes none
        opened(path)
    for damaged in (b"", bytes(2 * SLOT), whole[::-1]):
        mark_of(path).path.write_bytes(damaged)
        with pytest.raises(LedgerUnsoundError, match="cannot be read"):
            opened(path)
    mark_of(path).path.write_bytes(whole[:SLOT] + bytes(SLOT))
    with pytest.raises(LedgerUnsoundError, match="a newer one may have stood there"):
        opened(path)
    with Store(open_sqlite(tmp_path / "other.db"), ORIGIN, Ed25519PrivateKey.generate(), lambda: 7) as store:
        grow(store)
    shutil.copy(tmp_path / "other.mark", mark_of(path).path)
    with pytest.raises(LedgerTurnedBackError):
        opened(path)
    mark_of(path).path.write_bytes(whole)
    with opened(path) as store:
        assert store.state.size == 3


def test_a_ledger_that_is_gone_begins_no_other_one(path: Path) -> None:
    with opened(path) as store:
        grow(store)
    path.unlink()
    for _ in range(2):
        with pytest.raises(LedgerTurnedBackError, match=r"empty or missing, but ledger\.mark exists"):
            opened(path)
    assert path.read_bytes() == b"", "nothing was begun"


@pytest.mark.parametrize("frame", [0, 40])
def test_a_refusal_leaves_file_and_log_as_they_were_found(
    worked: tuple[Path, int], tmp_path: Path, frame: int
) -> None:
    """For the auditor, and for whoever can read more out of a damaged log than SQLite does."""
    copy = killed(worked[0], tmp_path / "copy")
    log = copy.with_name("ledger.db-wal")
    raw = bytearray(log.read_bytes())
    raw[HEAD + frame * FRAME + 16] ^= 1
    log.write_bytes(raw)
    before = copy.read_bytes()
    for _ in range(2):
        with pytest.raises(LedgerTurnedBackError):
            opened(copy)
    assert log.read_bytes() == raw
    assert copy.read_bytes() == before


def test_an_older_form_in_its_place_is_not_upgraded_past_the_mark(tmp_path: Path) -> None:
    before = older(tmp_path)
    path, key = before.coordinator / "ledger.db", CoordinatorDirectory(before.coordinator).ledger_key()
    shutil.copy(path, tmp_path / "form-1.db")
    upgrade_sqlite(path, "lazaret/coordinator", key)
    with Store(open_sqlite(path), "lazaret/coordinator", key, lambda: 7) as store:
        grow(store)
    path.with_name("ledger.db-wal").unlink(missing_ok=True)
    shutil.copy(tmp_path / "form-1.db", path)
    with pytest.raises(LedgerTurnedBackError, match="mark is at 19"):
        upgrade_sqlite(path, "lazaret/coordinator", key)


def test_an_entry_is_answered_when_its_mark_is_synced_and_not_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as store:
        grow(store)
        monkeypatch.setattr(high_water_mark.os, "fdatasync", _fails)
        with pytest.raises(LedgerStoppedError):
            grow(store)
        assert store.stopped
        monkeypatch.undo()
    with opened(path) as store:  # the entry may be there, and is marked before anything is answered
        found = mark_of(path).read()
        assert found is not None
        assert found.head.size == store.state.size


def _fails(_handle: int) -> None:
    raise OSError(5, "input/output error")


def head(size: int) -> SealedHead:
    return SealedHead(size, bytes([size]) * 32, bytes(32))


def test_a_slot_that_a_crash_tore_leaves_the_one_before_and_is_told(tmp_path: Path) -> None:
    mark, file = MarkFile(tmp_path / "m"), tmp_path / "m"
    assert mark.read() is None
    mark.begin(SealedHead(0, EMPTY_ROOT, bytes(32)))
    for size in range(1, 6):
        before = file.read_bytes()
        mark.write(head(size))
        after = file.read_bytes()
        changed = [n for n in range(len(after)) if before[n] != after[n]]
        assert max(changed) - min(changed) < 512, "one sector"
        for cut in range(changed[0] + 1, changed[-1] + 1, 7):
            file.write_bytes(after[:cut] + before[cut:])
            torn = mark.read()
            assert torn is not None
            assert torn.damaged
            assert torn.head.size == max(size - 1, 0)
        file.write_bytes(after)
        assert mark.read() == Mark(head(size), False)
    mark.close()
    assert os.stat(file).st_mode & 0o777 == 0o600


def test_a_torn_mark_is_taken_where_the_ledger_is_ahead_of_what_is_left_of_it(path: Path, tmp_path: Path) -> None:
    """As a power cut leaves it: the log was synced before the mark was written."""
    with opened(path) as store:
        grow(store, 3)
        raw = bytearray(mark_of(path).path.read_bytes())
        mark = mark_of(path).read()
        assert mark == Mark(store.head(), False)
        newest = 0 if raw[24:32] > raw[SLOT + 24 : SLOT + 32] else SLOT
        raw[newest + 40] ^= 1
        copy = killed(path, tmp_path / "cut")
    mark_of(copy).path.write_bytes(raw)
    with opened(copy) as store:
        assert store.state.size == 3
    assert mark_of(copy).read() == Mark(mark.head, False), "made whole again, before anything is answered"
