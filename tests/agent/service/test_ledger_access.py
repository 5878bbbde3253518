"""A ledger that the site's console borrows: what others append is added, what is another history is folded anew."""

from __future__ import annotations

import datetime as dt
import shutil
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

from agent.console import overview, releases
from agent.console.context import SiteConsoleContext
from agent.service import ledger_access
from agent.service.ledger_access import BorrowedLedger
from agent.storage.site_directory import SiteDirectory, create, origin
from policies.audit.inclusion_proof import check
from policies.governance import decisions
from policies.index.search import Index
from policies.ledger.backends.sqlite import open_read_only, open_sqlite
from policies.ledger.entries import Opened, Refused, Reserved, Sent
from policies.ledger.merkle import open_checkpoint
from policies.ledger.state import Account, Grant, State
from policies.ledger.store import AppendRequest, LedgerTurnedBackError, LedgerUnsoundError, Store
from tests.agent.console.hospital import hospital, serving
from tests.support.ledger_world import Person, policy

SETTINGS = 'site = "site-a"\ncoordinator = "localhost:1"\ninput = "in"\nmodalities = ["OT"]\npublic_components = []\n'


@pytest.fixture
def home(tmp_path: Path) -> SiteDirectory:
    """A site whose ledger holds three entries."""
    made = create(tmp_path / "site", SETTINGS + "secondary_capture_modalities = []\n", policy())
    written(made, lambda store: odd(store, 0, 3))
    return made


def written(home: SiteDirectory, act: Callable[[Store], object]) -> None:
    """What another process does to the ledger."""
    with Store(open_sqlite(home.root / "ledger.db"), origin("site-a"), home.sign_key(), lambda: 7) as store:
        act(store)


def odd(store: Store, first: int, end: int, word: str = "min_k") -> None:
    """So many entries, in one commit each."""
    for n in range(first, end):
        late = Refused(f"late-{n}", "site-a", "ksame", "reservation", [word], bytes(32))
        store.append(f"late-{n}", AppendRequest((late,)))


def replaced(home: SiteDirectory, act: Callable[[Store], object]) -> None:
    """Another ledger of the same site and key lies in its place."""
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.mark"):
        (home.root / name).unlink(missing_ok=True)
    written(home, act)


def persons(lent: BorrowedLedger) -> list[str]:
    return sorted(lent.read().state.persons)


def test_what_another_process_appends_is_folded_behind_the_rest_and_nothing_is_folded_twice(
    home: SiteDirectory,
) -> None:
    lent = BorrowedLedger(home)
    first = lent.read()
    assert lent.read() is first
    for size in range(4, 9):
        written(home, lambda store, n=size: odd(store, n - 1, n))  # type: ignore[misc]
        assert lent.read() is first, "only the new entry was folded"
        assert first.state.size == size
    written(home, lambda store: decisions.appoint(store, "mary", "auditor", Person("mary", "auditor").public))
    assert persons(lent) == ["mary"]
    fresh = BorrowedLedger(home).read()
    ours, theirs = (open_checkpoint(one.checkpoint(), first.public) for one in (first, fresh))
    assert (ours.size, ours.root) == (theirs.size, theirs.root) == (9, ours.root)
    shown = first.prove(0, 8)
    assert check(8, shown.entry, shown.included, shown.checkpoint, (first.origin, first.public)).holds
    assert first.state == fresh.state


@pytest.mark.parametrize("more", [0, 1, 5])
def test_another_ledger_in_its_place_is_seen_though_it_is_as_long_or_longer(home: SiteDirectory, more: int) -> None:
    written(home, lambda store: decisions.appoint(store, "eve", "compliance", Person("eve", "compliance").public))
    lent = BorrowedLedger(home)
    assert persons(lent) == ["eve"]

    def other(store: Store) -> None:
        odd(store, 0, 3, "budget")
        decisions.appoint(store, "mary", "compliance", Person("mary", "compliance").public)
        odd(store, 3, 3 + more)

    replaced(home, other)
    assert persons(lent) == ["mary"]
    assert lent.read().state == BorrowedLedger(home).read().state


def test_a_ledger_that_came_back_shorter_is_folded_anew(home: SiteDirectory) -> None:
    lent = BorrowedLedger(home)
    assert lent.read().state.size == 3
    replaced(home, lambda store: odd(store, 0, 1))
    assert lent.read().state.size == 1


def test_a_ledger_that_came_back_shorter_than_its_mark_is_not_shown(home: SiteDirectory, tmp_path: Path) -> None:
    older = shutil.copytree(home.root, tmp_path / "older")
    written(home, lambda store: odd(store, 3, 5))
    lent = BorrowedLedger(home)
    assert lent.read().state.size == 5
    shutil.copy(older / "ledger.db", home.root / "ledger.db")
    (home.root / "ledger.db-wal").unlink(missing_ok=True)
    with pytest.raises(LedgerTurnedBackError):
        lent.read()


def test_entries_behind_a_head_that_this_key_did_not_seal_are_never_shown(home: SiteDirectory) -> None:
    lent = BorrowedLedger(home)
    lent.read()
    shutil.copy(home.root / "ledger.db", home.root / "kept.db")
    written(home, lambda store: odd(store, 3, 4))
    forged = apsw.Connection(str(home.root / "ledger.db"))
    forged.execute("UPDATE head SET seal = zeroblob(32)")
    forged.close()
    with pytest.raises(LedgerUnsoundError, match="not the ones that this key committed"):
        lent.read()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every time that the file was opened to be looked at."""
    seen, real = list[Path](), open_read_only

    def counted(path: Path) -> Any:
        seen.append(path)
        return real(path)

    monkeypatch.setattr(ledger_access, "open_read_only", counted)
    return seen


def test_a_page_of_entries_is_one_look_at_the_file(home: SiteDirectory, looks: list[Path]) -> None:
    written(home, lambda store: odd(store, 3, 40))
    lent = BorrowedLedger(home)
    lent.read()
    looks.clear()
    lines = lent.lines(range(39, -1, -1))
    assert len(looks) == 1
    store = lent.read()
    assert [line.seq for line in lines] == list(range(39, -1, -1))
    assert lines == [store.line(seq) for seq in range(39, -1, -1)]
    with pytest.raises(LedgerUnsoundError, match="entry 40 is missing"):
        lent.lines((3, 40))


def test_a_page_takes_few_entries_into_the_index_and_says_when_it_is_behind(
    home: SiteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "NEW", 2)
    lent = BorrowedLedger(home)
    with Index(home.root / "search.db", lent.disk) as index:
        context = SiteConsoleContext(home, lent, None, lambda: dt.datetime.now(dt.UTC), index=index)
        assert "has the first 2 entries" in overview.updated_index(context)[1]
        assert overview.updated_index(context) == (index, "")
        assert index.size == 3


def test_the_index_is_made_in_the_background_before_anybody_asks_for_a_page(tmp_path: Path) -> None:
    with hospital(tmp_path) as made:
        size = BorrowedLedger(made.home).read().state.size
        with serving(made):
            until = time.monotonic() + 200
            while (found := indexed(made.home.root / "search.db")) != size and time.monotonic() < until:
                time.sleep(0.02)
            assert found == size


def indexed(path: Path) -> int:
    """How many entries an index holds, as its file says."""
    try:
        with apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY) as cache:
            rows: Any = cache.execute("SELECT size FROM place").fetchall()
    except apsw.Error:
        return -1
    return int(rows[0][0]) if rows else -1


UNTOUCHED: Any = SimpleNamespace()  # whoever looks at it fails


def test_the_budgets_page_looks_at_the_newest_grants_alone() -> None:
    state = State(accounts={"a/k": Account(Opened("a/k", 1000, 0, "", ""))})
    state.grants = {f"old-{n}": UNTOUCHED for n in range(50)}
    for n in range(overview.GRANTS):
        said = Reserved(f"g{n}", "a", "", "ksame", "a/k", n + 1, b"{}", bytes(32))
        state.grants[f"g{n}"] = Grant(said)
    rows = overview._granted(state)
    assert [row[0] for row in rows] == [f"g{n}" for n in reversed(range(overview.GRANTS))]
    assert rows[0][2:] == ("10 %", "held")


def test_the_releases_page_looks_at_the_newest_of_those_that_set_out_alone() -> None:
    state = State(grants={"g": Grant(Reserved("g", "a", "", "ksame", "a/k", 9, b"{}", bytes(32)))})
    state.sent = {"old": UNTOUCHED}
    for n in range(releases.DECIDED):
        sent = Sent(f"release-{n}", "g", "a", "", 0, "ksame", 1, bytes(32), bytes(32))
        state.sent[sent.release] = sent
    told = list(islice(releases._decided(state), releases.DECIDED))
    assert [one.release for one in told] == [f"release-{n}" for n in reversed(range(releases.DECIDED))]
