"""A ledger that is only read: refused as a start refuses it, and never because somebody writes meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.ledger.backends.sqlite import open_read_only, open_sqlite
from policies.ledger.entries import Refused
from policies.ledger.read_only import PinnedBackend, read_store
from policies.ledger.store import AppendRequest, LedgerStoppedError, LedgerUnsoundError, Store
from tests.support.ledger_world import Hospital

KEY = Hospital("site-a").key


def draft(n: int) -> AppendRequest:
    return AppendRequest((Refused(f"g{n}", "site-a", "ksame", "call", ["min_k"], b""),))


def opened(path: Path) -> Store:
    return Store(open_sqlite(path), "lazaret/test", KEY, lambda: 0)


def test_it_folds_what_the_writer_holds_and_appends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with opened(path) as store:
        store.append("a", draft(1))
        with read_store(open_read_only(path), "lazaret/test", KEY) as seen:
            assert (seen.state.size, seen.checkpoint()) == (1, store.checkpoint())
            with pytest.raises(LedgerStoppedError):
                seen.append("b", draft(2))
        assert store.state.size == 1
        store.append("b", draft(2))
    with opened(path) as store:
        assert store.state.size == 2


def test_somebody_who_writes_meanwhile_makes_it_unsound_never(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with opened(path) as store:
        for n in range(3):
            store.append(f"k{n}", draft(n))

        def write(done: int, of: int) -> None:
            """When the head is read, and the entries not yet."""
            assert (done, of) == (0, store.state.size)
            store.append(f"k{of}", draft(of))

        for size in (3, 4):
            with read_store(open_read_only(path), "lazaret/test", KEY, write) as seen:
                assert (seen.state.size, store.state.size) == (size, size + 1)


def test_entries_that_no_head_counts_are_found_though_the_head_is_read_first(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with opened(path) as store:
        store.append("a", draft(1))
        body = open_read_only(path).body(0)
    db = open_sqlite(path)
    db._rows("INSERT INTO entry VALUES(1, ?)", (body,))
    db.close()
    with pytest.raises(LedgerUnsoundError, match="more entries than this key committed"):
        read_store(open_read_only(path), "lazaret/test", KEY)
    with pytest.raises(LedgerUnsoundError):
        opened(path)
    db = open_sqlite(path)
    db._rows("DROP TRIGGER head_is_kept")
    db._rows("DELETE FROM head")
    db.close()
    with pytest.raises(LedgerUnsoundError, match="more entries"):
        read_store(open_read_only(path), "lazaret/test", KEY)


def test_another_key_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with opened(path) as store:
        store.append("a", draft(1))
    with pytest.raises(LedgerUnsoundError, match="not the ones that this key committed"):
        read_store(open_read_only(path), "lazaret/test", Hospital("site-b").key)


def test_what_is_behind_the_head_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with opened(path) as store:
        store.append("a", draft(1))
        pinned = PinnedBackend(open_read_only(path))
        store.append("b", draft(2))
        assert (pinned.size, pinned.body(0) is None, pinned.body(1)) == (1, False, None)
        assert len(list(pinned.bodies())) == 1
        pinned.close()
