"""Never overspent, exactly once, crash is spent: a state machine against a reference, and faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.accounting.accountant import cost
from policies.accounting.claims import SubsampledGaussian
from policies.accounting.rdp import allowance
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import open_sqlite, read_lines
from policies.ledger.entries import Expired, InvalidEntryError, Opened, Record, Reserved, Spent, decode, encode
from policies.ledger.merkle import MerkleTree
from policies.ledger.state import KeyReusedError, State
from policies.ledger.store import AppendRequest, Batch, LedgerBusyError, LedgerStoppedError, LedgerUnsoundError, Store
from policies.ledger_service import LedgerService
from policies.review.policy import parse
from policies.statements import Settlement
from tests.support.ledger_world import DP, Clock, Hospital, open_register, policy

CLAIMS = [SubsampledGaussian(0.25, 1.8, steps) for steps in (1, 5, 15, 30, 60, 200)]


class Books(RuleBasedStateMachine):
    """Reserve, retry, expire, crash and reopen, in any order; a dict of numbers is the reference."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.db"
        self.key = Ed25519PrivateKey.generate()
        self.hospital = Hospital("site-a")
        self.register = open_register(self.path, self.hospital, key=self.key)
        self.limit = self.register.store.state.accounts["site-a/rdp"].opened.limit
        self.order = self.register.store.state.accounts["site-a/rdp"].opened.order
        self.held: dict[str, int] = {}
        self.spent = 0
        self.sealed: dict[str, tuple[object, bytes]] = {}
        self.made = 0

    @rule(claim=st.sampled_from(CLAIMS))
    def reserve(self, claim: SubsampledGaussian) -> None:
        self.made += 1
        name = f"grant-{self.made}"
        reservation = self.hospital.reservation(name, claim, "federated", f"run-{name}")
        envelope = self.hospital.seal(reservation)
        self.sealed[name] = (reservation, envelope)
        fits = cost(claim, self.order) <= self.limit - self.spent - sum(self.held.values())
        verdict = self.register.reserve(f"k-{name}", reservation, envelope)
        assert verdict.admitted == fits
        if fits:
            self.held[name] = cost(claim, self.order)

    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        if self.sealed:
            name = data.draw(st.sampled_from(sorted(self.sealed)))
            before = self.register.store.state.size
            reservation, envelope = self.sealed[name]
            self.register.reserve(f"k-{name}", reservation, envelope)  # type: ignore[arg-type]
            assert self.register.store.state.size == before

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        if self.held:
            name = data.draw(st.sampled_from(sorted(self.held)))
            told = Settlement(name, "site-a", f"run-{name}", "federated", "expired", "restart", 0)
            self.register.settle(f"s-{name}", told, self.hospital.seal(told))
            self.spent += self.held.pop(name)

    @rule()
    def crash_and_reopen(self) -> None:
        self.register.store.close()
        self.register = open_register(self.path, self.hospital, key=self.key)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "register"):
            account = self.register.store.state.accounts["site-a/rdp"]
            assert (account.held, account.spent) == (sum(self.held.values()), self.spent)
            assert account.held + account.spent <= self.limit

    def teardown(self) -> None:
        if hasattr(self, "register"):
            self.register.store.close()
            from policies.ledger.backends.sqlite import export_file

            verify(export_file(self.path, "lazaret/test", self.key))
            self.folder.cleanup()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def chain(*entries: object) -> list[Record]:
    return [Record(i, f"k{i}", entry) for i, entry in enumerate(entries)]  # type: ignore[arg-type]


OPENED = Opened("site-a/rdp", 100, 4, "8.0", "4e-06")


def reserved(grant: str, amount: int) -> Reserved:
    return Reserved(grant, "site-a", "", "federated", "site-a/rdp", amount, b"{}", bytes(32))


@pytest.mark.parametrize(
    "entries",
    [
        (OPENED, OPENED),
        (OPENED, reserved("a", 101)),
        (OPENED, reserved("a", 60), reserved("b", 41)),
        (OPENED, reserved("a", 0)),
        (OPENED, reserved("a", 1), reserved("a", 1)),
        (OPENED, reserved("a", 1), Spent("a", 1, "x", b""), Spent("a", 1, "x", b"")),
        (OPENED, reserved("a", 5), Spent("a", 6, "x", b"")),
        (OPENED, reserved("a", 5), Spent("a", 0, "x", b"")),
        (OPENED, reserved("a", 5), Spent("a", 4, "x", b"")),
        (OPENED, reserved("a", 5), Spent("a", 5, "x", bytes(32))),
        (OPENED, Spent("a", 1, "x", b"")),
        (OPENED, Expired("a", "x")),
        (reserved("a", 1),),
        (Opened("site-a/rdp", 1, 0, "", ""),),
        (Opened("site-a/gold", 1, 4, "", ""),),
    ],
)
def test_the_fold_refuses_what_breaks_the_books(entries: tuple[object, ...]) -> None:
    state = State()
    records = chain(*entries)
    for record in records[:-1]:
        state.apply(record)
    with pytest.raises(InvalidEntryError):
        state.apply(records[-1])


def test_records_survive_encoding() -> None:
    records = chain(OPENED, reserved("a", 1), Spent("a", 1, "x", b""))
    assert [decode(encode(r)) for r in records] == records


def test_the_same_key_gives_the_same_answer_and_other_content_is_an_error(tmp_path: Path) -> None:
    hospital = Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", hospital)
    one = hospital.reservation("grant-1", DP, "federated", "run")
    envelope = hospital.seal(one)
    first = register.reserve("key", one, envelope)
    size = register.store.state.size
    assert register.reserve("key", one, envelope).admitted == first.admitted
    assert register.store.state.size == size
    other = hospital.reservation("grant-2", DP, "federated", "run")
    with pytest.raises(KeyReusedError):
        register.reserve("key", other, hospital.seal(other))


def test_the_sites_own_limit_is_the_bound_when_the_federation_would_give_more(tmp_path: Path) -> None:
    poor = Hospital("site-c", policy(epsilon="2.0"))
    register = open_register(tmp_path / "ledger.db", poor)
    reservation = poor.reservation("grant-1", DP, "federated", "run")
    verdict = register.reserve("key", reservation, poor.seal(reservation))
    assert [f.rule for f in verdict.findings] == ["budget"]
    entry = read_lines(tmp_path / "ledger.db")[-1].record.entry
    assert type(entry).__name__ == "Refused"


def test_a_second_writer_is_kept_out_and_readers_are_not(tmp_path: Path) -> None:
    register = open_register(tmp_path / "ledger.db", Hospital("site-a"))
    with pytest.raises(LedgerBusyError):
        Store(open_sqlite(tmp_path / "ledger.db"), "lazaret/test", Ed25519PrivateKey.generate(), Clock())
    assert len(read_lines(tmp_path / "ledger.db")) == register.store.state.size


def test_sqlite_itself_refuses_to_change_or_delete_an_entry(tmp_path: Path) -> None:
    open_register(tmp_path / "ledger.db", Hospital("site-a")).store.close()
    db = apsw.Connection(str(tmp_path / "ledger.db"))
    for statement in ("DELETE FROM entry", "UPDATE entry SET body = x'00'"):
        with pytest.raises(apsw.ConstraintError):
            db.execute(statement)


def test_the_ledger_commits_with_full_synchrony(tmp_path: Path) -> None:
    store = open_register(tmp_path / "ledger.db", Hospital("site-a")).store
    assert store._disk._db.execute("PRAGMA synchronous").fetchall() == [(2,)]
    assert store._disk._db.execute("PRAGMA journal_mode").fetchall() == [("wal",)]


@pytest.mark.parametrize("last", [False, True])
def test_a_ledger_edited_behind_our_back_does_not_open(tmp_path: Path, last: bool) -> None:
    key = Ed25519PrivateKey.generate()
    open_register(tmp_path / "ledger.db", Hospital("site-a"), key=key).store.close()
    db = apsw.Connection(str(tmp_path / "ledger.db"))
    db.execute("DROP TRIGGER entry_is_fixed")
    order = "DESC" if last else "ASC"
    seq, body = db.execute(f"SELECT seq, body FROM entry ORDER BY seq {order}").fetchone()
    db.execute("UPDATE entry SET body = ? WHERE seq = ?", (body.replace(b"site-a", b"site-b"), seq))
    db.close()
    with pytest.raises(LedgerUnsoundError):
        Store(open_sqlite(tmp_path / "ledger.db"), "lazaret/test", key, Clock())


def test_a_cut_tail_does_not_open(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    open_register(tmp_path / "ledger.db", Hospital("site-a"), key=key).store.close()
    db = apsw.Connection(str(tmp_path / "ledger.db"))
    db.execute("DROP TRIGGER entry_is_kept")
    db.execute("DELETE FROM entry WHERE seq = (SELECT max(seq) FROM entry)")
    db.close()
    with pytest.raises(LedgerUnsoundError, match="committed last"):
        Store(open_sqlite(tmp_path / "ledger.db"), "lazaret/test", key, Clock())


def test_a_failed_write_stops_the_ledger_and_a_restart_replays(tmp_path: Path) -> None:
    key, hospital = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", hospital, key=key)
    size = register.store.state.size
    pages = register.store._disk._db.execute("PRAGMA page_count").fetchall()[0][0]
    register.store._disk._db.execute(f"PRAGMA max_page_count = {pages}").fetchall()  # the disk is full
    with pytest.raises(LedgerStoppedError):
        _fill(register, hospital)
    assert register.store.stopped
    for ask in (register.store.checkpoint, lambda: register.store.answer("big-0")):
        with pytest.raises(LedgerStoppedError):
            ask()  # what it would say may be gone after the restart
    with pytest.raises(LedgerStoppedError):
        register.store.append("again", _refusal(hospital, 1))
    register.store.close()
    again = open_register(tmp_path / "ledger.db", hospital, key=key)
    assert again.store.state.size >= size
    assert not again.store.stopped


def _fill(register: LedgerService, hospital: Hospital) -> None:
    for i in range(100):
        register.store.append(f"big-{i}", AppendRequest(_refusal(hospital, i).entries, (os.urandom(8000),)))


def _refusal(hospital: Hospital, i: int) -> AppendRequest:
    from policies.ledger.entries import Refused

    return AppendRequest((Refused(f"s{i}", hospital.name, "ksame", "call", ["test" * 500], b""),))


KILLED = """
import sys
from pathlib import Path
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from tests.support.ledger_world import DP, Hospital, open_register
from policies.accounting.claims import SubsampledGaussian
folder = Path(sys.argv[1])
key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
hospital = Hospital("site-a", key=key)
register = open_register(folder / "ledger.db", hospital, key=key)
tiny = SubsampledGaussian(0.001, 20.0, 1)
for i in range(100000):
    n = register.store.state.size
    r = hospital.reservation(f"grant-{n}", tiny, "federated", f"run-{n}")
    register.reserve(f"key-{r.grant}", r, hospital.seal(r))
    print(r.grant, flush=True)
"""


def test_no_acknowledged_entry_is_lost_to_kill_9(tmp_path: Path) -> None:
    from protos.identity.certificates import pem

    key = Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(pem(key))
    hospital, acknowledged = Hospital("site-a", key=key), []
    for _ in range(3):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(40):
                acknowledged.append(process.stdout.readline().strip())
            process.send_signal(signal.SIGKILL)
            acknowledged += process.stdout.read().split()
        register = open_register(tmp_path / "ledger.db", hospital, key=key)
        assert all(name in register.store.state.grants for name in acknowledged)
        register.store.close()
    assert len(set(acknowledged)) == len(acknowledged) >= 120


def test_readers_beside_a_writer_disturb_nobody(tmp_path: Path) -> None:
    hospital = Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", hospital)
    envelope = register.store.state.sites["site-a"].envelope
    faults: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                assert register.store.envelope(envelope)
                register.store.line(0)
            except BaseException as fault:  # noqa: BLE001 - any fault in a reader is what the test looks for
                faults.append(fault)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(150):
        register.store.append(f"k{i}", _refusal(hospital, i))
    done.set()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_request_over_several_accounts_is_granted_whole_or_not_at_all(tmp_path: Path) -> None:
    a, b = Hospital("site-a"), Hospital("site-b")
    register = open_register(tmp_path / "ledger.db", a, b)
    part = SubsampledGaussian(0.25, 1.8, 60)  # epsilon 6.5 of 8

    def ask(key: str, *names: str) -> list[bool]:
        run = lambda n: f"run-{n[2:]}"  # noqa: E731 - a site is granted its part in a run once
        sites = {h.name[-1]: h for h in (a, b)}
        asked = [(sites[n[0]].reservation(n, part, "federated", run(n)), sites[n[0]]) for n in names]
        verdicts = register.reserve_all(key, [(r, h.seal(r)) for r, h in asked])
        return [v.admitted for v in verdicts]

    held = lambda: [register.store.state.accounts[f"site-{s}/rdp"].held for s in "ab"]  # noqa: E731
    assert ask("k1", "a-1", "a-2") == [False, False], "each fits, together they do not"
    assert held() == [0, 0]
    assert ask("k2", "a-3", "b-3") == [True, True]
    size = register.store.state.size
    assert ask("k2", "a-3", "b-3") == [True, True], "asked again, the same answer and no entry"
    assert register.store.state.size == size
    before = held()
    poor = register.reserve_all("k4", [(r, h.seal(r)) for r, h in [
        (a.reservation("a-4", SubsampledGaussian(0.01, 8.0, 1), "federated", "run-4"), a),
        (b.reservation("b-4", part, "federated", "run-4"), b)]])  # fmt: skip
    assert [{f.rule for f in v.findings} for v in poor] == [{"together"}, {"budget"}]
    assert held() == before


def test_a_request_leaves_out_what_is_refused_where_fewer_are_enough(tmp_path: Path) -> None:
    a, b, c = Hospital("site-a"), Hospital("site-b"), Hospital("site-c", policy(k_min=11, epsilon="2.0"))
    register = open_register(tmp_path / "ledger.db", a, b, c)
    part = SubsampledGaussian(0.25, 1.8, 60)  # epsilon 6.5 of 8, and of 2

    def ask(key: str, grants: dict[str, Hospital], least: int | None) -> list[set[str]]:
        made = [(h.reservation(name, part, "federated", f"run-{name[1:]}"), h) for name, h in grants.items()]
        verdicts = register.reserve_all(key, [(r, h.seal(r)) for r, h in made], least)
        return [{f.rule for f in v.findings} for v in verdicts]

    held = lambda: [register.store.state.accounts[f"site-{s}/rdp"].held > 0 for s in "abc"]  # noqa: E731
    assert ask("k0", {"a0": a, "b0": b, "c0": c}, None) == [{"together"}, {"together"}, {"budget"}]
    assert ask("k1", {"a1": a, "b1": b, "c1": c}, 3) == [{"together"}, {"together"}, {"budget"}]
    assert held() == [False, False, False]
    size, wanted = register.store.state.size, {"a2": a, "a3": a, "b2": b, "c2": c}
    assert ask("k2", wanted, 2) == [set(), {"budget"}, set(), {"budget"}], "the first of one site, and not both"
    assert held() == [True, True, False]
    kinds = [register.store.line(i).record.entry for i in range(size, register.store.state.size)]
    assert [type(e).__name__ for e in kinds] == ["Reserved", "Refused", "Reserved", "Refused"]
    size = register.store.state.size
    assert ask("k2", wanted, None) == [set(), {"budget"}, set(), {"budget"}], "asked again, the same answer"
    assert register.store.state.size == size
    with pytest.raises(KeyReusedError):
        ask("k2", {"a2": a}, 2)


def test_several_of_one_site_never_take_more_than_its_policy_of_today(tmp_path: Path) -> None:
    """The account was opened under a generous policy; what counts is the tightened one."""
    a = Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a)
    strict = parse(policy(epsilon="5.0"), "site-a")
    tight = LedgerService(register.store, lambda _site: strict)
    part = SubsampledGaussian(0.25, 1.8, 20)
    made = [a.reservation(f"g{i}", part, "federated", f"run-{i}") for i in range(9)]
    verdicts = tight.reserve_all("k", [(r, a.seal(r)) for r in made], 0)
    order = register.store.state.accounts["site-a/rdp"].opened.order
    held = register.store.state.accounts["site-a/rdp"].held
    assert held == cost(part, order) * sum(v.admitted for v in verdicts)
    assert 0 < held <= allowance(5.0, 4e-6, order) < held + cost(part, order)


def test_a_commit_carries_everything_that_was_staged_while_it_waited(tmp_path: Path) -> None:
    """Group commit: many threads, one sync for several of them; each returns when its own entry is durable."""
    hospital = Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", hospital)
    store, commits, durable = register.store, [], threading.Event()
    commit = store._disk.commit

    def slow(batch: Batch) -> None:
        durable.wait(0.05 if commits else 0.5)  # the first one is slow enough for many to come, on any machine
        commit(batch)
        commits.append(len(batch.bodies))

    store._disk.commit = slow  # type: ignore[method-assign]
    seen: list[bool] = []

    def write(i: int) -> None:
        store.append(f"k{i}", _refusal(hospital, i))
        seen.append(store.state.keys[f"k{i}"] < sum(commits) + 3)  # 3 entries were there before

    threads = [threading.Thread(target=write, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(commits) == 32
    assert len(commits) < 16
    assert all(seen)
    store.close()
    assert open_register(tmp_path / "ledger.db", hospital, key=store._key).store.state.size == 35


def test_nothing_is_answered_from_books_that_are_not_on_the_disk(tmp_path: Path) -> None:
    """A retry that overtakes its own first attempt's commit waits for it; when that fails, it hears so."""
    hospital = Hospital("site-a")
    store = open_register(tmp_path / "ledger.db", hospital).store
    entered, go = threading.Event(), threading.Event()

    def fail(_batch: Batch) -> None:
        entered.set()
        go.wait(60)
        raise OSError("the disk is gone")

    store._disk.commit = fail  # type: ignore[method-assign]
    answers: list[object] = []

    def first() -> None:
        with pytest.raises(LedgerStoppedError):
            store.append("k", _refusal(hospital, 1))
        answers.append("first heard")

    def retry() -> None:
        with pytest.raises(LedgerStoppedError):
            answers.append(store.answer("k"))
        answers.append("retry heard")

    threads = [threading.Thread(target=first), threading.Thread(target=retry)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert sorted(map(str, answers)) == ["first heard", "retry heard"]


def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"not a database " * 100)
    for _ in range(2):  # the lock is let go
        with pytest.raises(LedgerUnsoundError, match=r"ledger\.db cannot be opened"):
            open_sqlite(path)
    assert path.read_bytes() == b"not a database " * 100


@pytest.mark.parametrize("where", ["tree", "state"])
def test_a_fault_between_the_books_and_the_disk_stops_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """No memory, an interrupt: what is in the books and staged nowhere must not be built upon."""
    hospital = Hospital("site-a")
    store = open_register(tmp_path / "ledger.db", hospital).store

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(*((MerkleTree, "append", fail) if where == "tree" else (State, "apply", fail)))
    with pytest.raises((MemoryError, LedgerStoppedError)):
        store.append("k", _refusal(hospital, 1))
    monkeypatch.undo()
    assert store.stopped
    with pytest.raises(LedgerStoppedError):
        store.append("k2", _refusal(hospital, 2))
    store.close()
    assert open_register(tmp_path / "ledger.db", hospital, key=store._key).store.state.size == 3


class Overtaken:
    """The books' lock; when a commit lets it go for the first time, somebody else stages an entry at once."""

    def __init__(self, lock: object, overtake: Callable[[], None]) -> None:
        self.acquire, self.release = lock.acquire, lock.release  # type: ignore[attr-defined]
        self.overtake: Callable[[], None] | None = overtake

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_exc: object) -> None:
        self.release()
        overtake, self.overtake = self.overtake, None
        if overtake:
            overtake()


def test_what_is_staged_while_a_batch_is_on_its_way_belongs_to_the_next(tmp_path: Path) -> None:
    hospital = Hospital("site-a")
    store = open_register(tmp_path / "ledger.db", hospital).store
    second = threading.Thread(target=lambda: store.append("second", _refusal(hospital, 2)))

    def overtake() -> None:
        second.start()
        for _ in range(6000):
            if "second" in store.state.keys:
                return
            time.sleep(0.01)

    lock = Overtaken(store._reviewing, overtake)
    store._flush, flush = (lambda size: (setattr(store, "_reviewing", lock), flush(size))[1]), store._flush  # type: ignore[assignment, method-assign]
    store.append("first", _refusal(hospital, 1))
    second.join(60)
    assert lock.overtake is None, "it was overtaken"
    assert not store.stopped
    assert {"first", "second"} <= set(store.state.keys)
