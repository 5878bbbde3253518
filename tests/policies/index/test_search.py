"""The search index against a plain scan of the ledger and against the fold: it may be slow or gone, never wrong."""

from __future__ import annotations

import random
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.governance import decisions
from policies.index import search
from policies.index.follower import IndexFollower
from policies.index.projection import DAY
from policies.index.search import EntryQuery, Index, QueryTooWideError
from policies.ledger.backends.sqlite import Sqlite, open_read_only, open_sqlite, read_lines
from policies.ledger.entries import Expired, Freed, Refused, Reserved, Sent, Spent, kind_of
from policies.ledger.state import State
from policies.ledger.store import AppendRequest, LedgerUnsoundError, Store
from tests.support.ledger_world import Clock, Hospital, Person, open_register, policy
from tests.support.rolled_back_ledgers import marked_as_it_is

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
CAREFUL, LOCAL = Person("dpo-1", "compliance"), Person("head-1", "hospital")
SITES = ("site-a", "site-b", "site-c")
RULES = ("min_k", "budget", "l_diversity")


class Jumping(Clock):
    """A clock that mostly goes on, by hours, and sometimes back by days; a ledger of before wrote that down."""

    def __init__(self, rng: random.Random, store: Store) -> None:
        super().__init__()
        self.rng, self.store = rng, store

    def __call__(self) -> int:
        self.store.state.latest = 0  # today's store writes no time before the last one
        self.now += self.rng.randrange(7_200) if self.rng.random() > 0.02 else -self.rng.randrange(5 * DAY)
        return self.now


def hexed(rng: random.Random) -> bytes:
    return rng.randbytes(32)


def fill(store: Store, rng: random.Random, times: int, first: int = 0) -> None:
    """Grants of three sites that end in every way, and refusals."""
    held: list[tuple[str, str, int]] = []
    for n in range(first, first + times):
        site, run = rng.choice(SITES), rng.choice(("", "run-1", "run-2"))
        account = f"{site}/{'rdp' if run else 'k'}"
        if rng.random() < 0.2:
            found = rng.sample(RULES, rng.randint(1, 2))
            no = Refused(f"grant-{n}", site, "ksame", "reservation", found, hexed(rng))
            store.append(f"no-{n}", AppendRequest((no,)))
        elif held and rng.random() < 0.5:
            name, owner, amount = held.pop(rng.randrange(len(held)))
            end: Any = rng.choice(("whole", "part", "expired", "freed"))
            if end == "whole":
                sent = Sent(f"rel-{n}", name, owner, *_of(store, name), amount, hexed(rng), hexed(rng))
                store.append(f"end-{n}", AppendRequest((sent, Spent(name, amount, "released", b""))))
            elif end == "part" and amount > 1:
                store.append(f"end-{n}", AppendRequest((Spent(name, 1, "finished", hexed(rng)),)))
            elif end == "freed":
                store.append(f"end-{n}", AppendRequest((Freed(name, "unused", hexed(rng)),)))
            else:
                store.append(f"end-{n}", AppendRequest((Expired(name, "restart"),)))
        else:
            amount = rng.randint(1, 3)
            if amount > store.state.accounts[account].left:
                account = f"{site}/rdp"
            asked = Reserved(f"grant-{n}", site, run, "ksame", account, amount, b"{}", hexed(rng))
            store.append(f"yes-{n}", AppendRequest((asked,)))
            held.append((asked.grant, site, amount))


def _of(store: Store, grant: str) -> tuple[str, int, str]:
    held = store.state.grants[grant].reserved
    return held.run, 1 if held.run else 0, held.mechanism


def make(path: Path, seed: int, times: int = 150) -> Store:
    """A ledger with persons, three sites and a history."""
    rng = random.Random(seed)
    hospitals = [Hospital(name, policy(max_releases_per_patient=9)) for name in SITES]
    register = open_register(path, *hospitals, key=KEY)
    store = register.store
    store._clock = Jumping(rng, store)
    for person in (CAREFUL, LOCAL):
        decisions.appoint(store, person.name, person.role, person.public)
    fill(store, rng, times)
    return store


def approve(store: Store, serial: str, action: str, subject: str, value: str) -> None:
    for person in (CAREFUL, LOCAL):
        decisions.approve(store, person.approval(serial, action, subject, value))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Index]]:
    """One ledger, indexed, for tests that only look."""
    folder = tmp_path_factory.mktemp("made")
    make(folder / "ledger.db", 1, 400).close()
    with Index(folder / "index.db", lambda: open_read_only(folder / "ledger.db")) as index:
        assert index.follow()
        yield folder / "ledger.db", index


def open_index(folder: Path) -> Index:
    return Index(folder / "index.db", lambda: open_read_only(folder / "ledger.db"))


def scan(path: Path, query: EntryQuery) -> list[int]:
    """What a plain reading of everything finds, newest first: no words."""
    state, out = State(), []
    for line in read_lines(path):
        state.apply(line.record)
        entry, at = line.record.entry, line.record.at
        grant = state.grants.get(getattr(entry, "grant", ""))
        account = getattr(entry, "account", "").rpartition("/")[0]
        site = getattr(entry, "site", "") or account or (grant.reserved.site if grant else "")
        right = (not query.kinds or kind_of(entry) in query.kinds) and (not query.site or site == query.site)
        timely = (query.since is None or at >= query.since) and (query.until is None or at < query.until)
        if right and timely:
            out.append(line.seq)
    return out[::-1]


def pages(index: Index, query: dict[str, Any]) -> Iterator[search.EntryPage]:
    """Page after page to the oldest."""
    found = index.find(EntryQuery(**query))
    yield found
    while found.older:
        found = index.find(EntryQuery(**query, before=found.seqs[-1]))
        yield found


@pytest.mark.parametrize("seed", range(12))
def test_every_page_of_any_filter_is_what_a_scan_finds(made: tuple[Path, Index], seed: int) -> None:
    path, index = made
    rng = random.Random(seed)
    times = sorted(line.record.at for line in read_lines(path))
    query: dict[str, Any] = {"most": rng.choice((1, 3, 50))} if seed else {}
    if rng.random() < 0.6:
        query["kinds"] = tuple(rng.sample(("reserved", "refused", "spent", "expired", "opened"), rng.randint(1, 3)))
    if rng.random() < 0.6:
        query["site"] = rng.choice((*SITES, "nobody"))
    if rng.random() < 0.6:
        query["since"], query["until"] = sorted(rng.choices(times, k=2))
    expected = scan(path, EntryQuery(**query))
    read = list(pages(index, query))
    assert [seq for page in read for seq in page.seqs] == expected
    assert index.count(EntryQuery(**query)) == len(expected)
    assert [page.newer for page in read] == [False, *[True] * (len(read) - 1)]
    for page, newer in zip(read[1:], read, strict=False):  # and back again
        back = index.find(EntryQuery(**query, after=page.seqs[0]))
        assert back.older
        assert back.seqs == newer.seqs
        assert back.newer == newer.newer


def agrees(index: Index, state: State) -> None:
    """Are the index's balances those of the fold?"""
    for name, account in state.accounts.items():
        last = index.balances(name)[-1]
        assert (last.limit, last.held, last.spent) == (account.limit, account.held, account.spent), name
        shares = index.shares(name, 1000)
        assert sum(share.held for share in shares) == account.held
        assert sum(share.spent for share in shares) == account.spent


@pytest.mark.parametrize("step", [1, 7, None])
def test_the_balances_are_those_of_the_fold_however_the_index_came_there(tmp_path: Path, step: int | None) -> None:
    with make(tmp_path / "ledger.db", 2) as store, open_index(tmp_path) as index:
        approve(store, "s1", "limit", "site-a/k", "300")
        decisions.set_limit(store, "site-a/k", "300", "s1")
        while not index.follow(step):
            pass
        agrees(index, store.state)


@pytest.mark.parametrize("before", [None, 60, 0])
def test_what_is_spent_by_a_waiver_is_spent_in_the_index_too(tmp_path: Path, before: int | None) -> None:
    with make(tmp_path / "ledger.db", 3) as store, open_index(tmp_path) as index:
        index.follow(before)  # grants that end by it were taken earlier, or with it
        store.restore("ab" * 16)
        approve(store, "w1", "waive", "site-b", f"2-{'ab' * 16}")
        decisions.waive(store, "site-b", "w1")
        assert index.follow()
        assert any(g.reserved.site == "site-b" and g.used == 0 for g in store.state.grants.values())
        agrees(index, store.state)
        assert store.state.accounts["site-b/k"].left == 0


def test_a_days_balance_is_the_last_of_that_day_and_the_series_begins_with_the_day_before(
    made: tuple[Path, Index],
) -> None:
    path, index = made
    state, last = State(), dict[int, tuple[int, int]]()
    today = 0
    for line in read_lines(path):
        state.apply(line.record)
        today = max(today, line.record.at // DAY)
        account = state.accounts.get("site-a/k")
        if account is not None:
            last[today] = (account.held, account.spent)
    series = index.balances("site-a/k")
    for day in range(series[0].day, today + 1):
        shown = [balance for balance in series if balance.day <= day][-1]
        known = [last[d] for d in sorted(last) if d <= day][-1]
        assert (shown.held, shown.spent) == known
    later = index.balances("site-a/k", (series[2].day + 1) * DAY)
    assert later == series[2:], "with the one that holds when the time begins"


def test_refusals_are_counted_by_rule_and_site(made: tuple[Path, Index]) -> None:
    path, index = made
    times = dict[tuple[str, str], int]()
    for line in read_lines(path):
        if isinstance(line.record.entry, Refused):
            for rule in line.record.entry.findings:
                key = (rule, line.record.entry.site)
                times[key] = times.get(key, 0) + 1
    found = index.refusals(0, 1 << 40)
    assert {(r.rule, r.site): r.times for r in found} == times
    assert [r.times for r in found] == sorted(times.values(), reverse=True)
    assert index.refusals(0, DAY) == []
    kinds = [kind_of(line.record.entry) for line in read_lines(path)]
    assert index.tally(0, 1 << 40) == {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def test_an_entry_is_found_by_each_of_its_names_and_by_how_its_digest_begins(tmp_path: Path) -> None:
    with make(tmp_path / "ledger.db", 4, 0) as store, open_index(tmp_path) as index:
        asked = Reserved("grant-x", "site-a", "run-9", "ksame", "site-a/rdp", 1, b'{"a":1}', b"\xab" * 32)
        seq = store.append("one", AppendRequest((asked,)))[0].seq
        end = store.append("two", AppendRequest((Expired("grant-x", "restart"),)))[0].seq
        assert not index.find(EntryQuery(text="grant-x")).seqs, "not before it has followed"
        assert index.follow()
        both = (end, seq)
        for text in (
            "grant-x",
            "GRANT-X",
            "run-9 ksame",
            "site-a/rdp run-9",
            "site=site-a run-9",
            "grant-*",
            "run-9",
        ):
            assert index.find(EntryQuery(text=text)).seqs == both, text
        for text in ("abababab", "abababababababab", "ab" * 32, "kind=reserved grant-x"):
            assert index.find(EntryQuery(text=text)).seqs == (seq,), text
        assert index.find(EntryQuery(text="kind=expired restart")).seqs == (end,)
        for text in ("ababab", "grant", "abababac", "run-9 run-8", "..."):
            assert not index.find(EntryQuery(text=text)).seqs, text
        assert index.time_of(seq) == store.line(seq).record.at
        assert index.time_of(10**6) is None


HOSTILE = (
    '"',
    '" OR "',
    "') --",
    "a OR b",
    "NEAR(a b)",
    "said:a",
    "kind=x OR kind=reserved",
    "*",
    "***",
    "^a",
    "-a",
    "{}",
)


@pytest.mark.parametrize(
    "text", [*HOSTILE, "\x00", "é\u202e", "a\ud800".encode("utf-8", "replace").decode(), "x" * 9999]
)
def test_nothing_that_is_typed_is_a_command_to_the_database(made: tuple[Path, Index], text: str) -> None:
    _path, index = made
    for query in (
        EntryQuery(text=text),
        EntryQuery(text="grant-1 " + text),
        EntryQuery(site=text),
        EntryQuery(kinds=(text,)),
    ):
        try:
            found = index.find(query)
        except QueryTooWideError:
            continue
        assert not found.seqs or text in "-a", "read as words, of which no entry has all"


def test_a_beginning_that_stands_for_too_many_names_is_refused_with_what_to_do(
    made: tuple[Path, Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    _path, index = made
    assert index.find(EntryQuery(text="grant-1*")).seqs
    monkeypatch.setattr(search, "MOST_TERMS", 20)
    with pytest.raises(QueryTooWideError, match="type more before the star"):
        index.find(EntryQuery(text="grant-*"))
    with pytest.raises(QueryTooWideError, match="3 letters"):
        index.find(EntryQuery(text="gr*"))


@pytest.mark.parametrize("wrong", [{"before": 3, "after": 1}, {"most": 0}, {"most": 1001}])
def test_a_query_that_makes_no_sense_cannot_be_built(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="page"):
        EntryQuery(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["before", "after", "since", "until"])
def test_a_number_that_sqlite_cannot_hold_is_no_query_and_the_largest_one_is(
    made: tuple[Path, Index], name: str
) -> None:
    for far in (9999999999999999999, 1 << 63, -(1 << 63), (1 << 62) + 1):
        with pytest.raises(ValueError, match="the entry number or the time is out of range"):
            EntryQuery(**{name: far})  # type: ignore[arg-type]
    for far in (1 << 62, -(1 << 62)):
        for text in ("", "min_k"):
            query = EntryQuery(text=text, **{name: far})  # type: ignore[arg-type]
            made[1].find(query)
            made[1].count(query)


def test_another_ledger_of_the_same_length_is_indexed_anew(tmp_path: Path) -> None:
    make(tmp_path / "ledger.db", 5).close()
    with open_index(tmp_path) as index:
        index.follow()
        size = index.size
    for name in ("ledger.db", "ledger.mark"):
        (tmp_path / name).unlink()
    with make(tmp_path / "ledger.db", 6, 400) as other, open_index(tmp_path) as index:
        assert index.size == size, "what the cache says before it has looked"
        assert index.follow()
        agrees(index, other.state)
        everything = {"most": 1000}
        assert [s for page in pages(index, everything) for s in page.seqs] == list(range(other.state.size))[::-1]


def test_a_ledger_that_came_back_shorter_is_indexed_anew(tmp_path: Path) -> None:
    make(tmp_path / "ledger.db", 7, 50).close()
    older = (tmp_path / "ledger.db").read_bytes()
    with Store(open_sqlite(tmp_path / "ledger.db"), "lazaret/test", KEY, Clock()) as grown:
        fill(grown, random.Random(8), 40, 1000)
    with open_index(tmp_path) as index:
        index.follow()
    (tmp_path / "ledger.db").write_bytes(older)
    marked_as_it_is(tmp_path / "ledger.db")
    store = Store(open_sqlite(tmp_path / "ledger.db"), "lazaret/test", KEY, Clock())
    with store, open_index(tmp_path) as index:
        assert index.follow()
        agrees(index, store.state)
        assert not index.find(EntryQuery(text="grant-1001")).seqs


@pytest.mark.parametrize("harm", ["garbage", "form", "cut", "empty"])
def test_a_cache_that_is_no_index_is_made_again(tmp_path: Path, harm: str) -> None:
    with make(tmp_path / "ledger.db", 9, 60) as store:
        with open_index(tmp_path) as index:
            index.follow()
        path = tmp_path / "index.db"
        if harm == "form":
            with apsw.Connection(str(path)) as db:
                db.execute("UPDATE place SET form = 999")
        else:
            whole = path.read_bytes()
            path.write_bytes({"garbage": b"no database" * 999, "cut": whole[:5000], "empty": b""}[harm])
        with open_index(tmp_path) as index:
            assert index.follow()
            agrees(index, store.state)


def test_a_ledger_whose_entries_are_not_those_of_its_commit_is_not_indexed_as_if_they_were(tmp_path: Path) -> None:
    make(tmp_path / "ledger.db", 10, 20).close()
    with apsw.Connection(str(tmp_path / "ledger.db")) as db:
        db.execute("UPDATE head SET root = zeroblob(32)")
    with open_index(tmp_path) as index, pytest.raises(LedgerUnsoundError, match="last commit"):
        index.follow()


@dataclass
class Readings:
    """How often the ledger was read, and after how many entries the disk goes away, once."""

    one_by_one: int = 0
    walks: int = 0
    left: int = -1

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        body, bodies = Sqlite.body, Sqlite.bodies

        def one(disk: Sqlite, seq: int) -> bytes | None:
            self.one_by_one += 1
            self._take()
            return body(disk, seq)

        def walk(disk: Sqlite, upto: int | None = None) -> Iterator[bytes]:
            self.walks += 1
            for raw in bodies(disk, upto):
                self._take()
                yield raw

        monkeypatch.setattr(Sqlite, "body", one)
        monkeypatch.setattr(Sqlite, "bodies", walk)

    def _take(self) -> None:
        self.left -= 1
        if not self.left:
            raise OSError("the disk went away")


@pytest.mark.parametrize("near", [search.NEAR, 10_000])
def test_a_batch_that_breaks_off_is_taken_again_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: int
) -> None:
    """In the middle of a walk, and where entries are read one by one."""
    monkeypatch.setattr(search, "NEAR", near)
    with make(tmp_path / "ledger.db", 11) as store, open_index(tmp_path) as index:
        readings = Readings(left=70)
        readings.watch(monkeypatch)
        index.follow(40)
        with pytest.raises(OSError, match="went away"):
            index.follow()
        assert index.size == 40
        assert readings.walks == (0 if near == 10_000 else 1)
        assert index.follow()
        agrees(index, store.state)


def test_many_entries_are_read_in_one_walk_however_small_the_batches_and_few_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has its price: a journey to a database, or a file to open."""
    with make(tmp_path / "ledger.db", 12) as store, open_index(tmp_path) as index:
        readings, first = Readings(), store.state.size
        readings.watch(monkeypatch)
        assert not index.follow(7)
        fill(store, random.Random(5), 20, 2000)
        new = store.state.size - first
        while not index.follow(7):
            pass
        assert (readings.walks, readings.one_by_one) == (1, new), "what came after the walk began is read by itself"
        fill(store, random.Random(6), 10, 3000)
        assert index.follow()
        assert (readings.walks, readings.one_by_one) == (1, store.state.size - first)
        agrees(index, store.state)


def test_the_cache_is_for_its_owner_alone(made: tuple[Path, Index]) -> None:
    path, _index = made
    for name in ("index.db", "index.db-wal", "index.db-shm"):
        file = path.with_name(name)
        assert not file.exists() or stat.S_IMODE(file.stat().st_mode) == 0o600, name


def test_a_follower_keeps_up_while_the_ledger_is_written_and_read(tmp_path: Path) -> None:
    with make(tmp_path / "ledger.db", 12, 10) as store, open_index(tmp_path) as index:
        failed = threading.Event()
        with IndexFollower(index, 0.01, failed.set):
            for n in range(5):
                fill(store, random.Random(n), 20, 10_000 + 100 * n)
                index.find(EntryQuery(kinds=("refused",)))
            until = time.monotonic() + 200
            while index.size < store.state.size and time.monotonic() < until:
                time.sleep(0.01)
        assert not failed.is_set()
        agrees(index, store.state)


def test_an_index_that_breaks_says_so_stops_nothing_else_and_is_made_again(tmp_path: Path) -> None:
    with make(tmp_path / "ledger.db", 13, 30) as store, open_index(tmp_path) as index:
        index.follow()
        index._db.execute("DROP TABLE line")
        with pytest.raises(LedgerUnsoundError, match="rebuilt"):
            index.time_of(0)
        assert index.follow()
        agrees(index, store.state)
        index._db.execute("DROP TABLE tally")
        fill(store, random.Random(1), 30, 1_000)
        failed = threading.Event()
        with IndexFollower(index, 0.01, failed.set):
            assert failed.wait(200)
        assert index.follow()
        agrees(index, store.state)
        assert index.find(EntryQuery(most=1000)).seqs == tuple(range(store.state.size))[::-1]
