"""A ledger keeps its promises on either disk; and PostgreSQL's own: one writer, a narrow role, crash recovery."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import apsw
import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from policies.accounting.accountant import cost
from policies.accounting.claims import SubsampledGaussian
from policies.audit.verify import verify
from policies.ledger.backends import postgres
from policies.ledger.backends.postgres import Postgres, install, open_postgres, open_read_only_postgres
from policies.ledger.backends.postgres_connection import hosts_of
from policies.ledger.backends.sqlite import open_read_only, open_sqlite
from policies.ledger.entries import InvalidEntryError, Refused
from policies.ledger.export import ExportError
from policies.ledger.read_only import read_store
from policies.ledger.state import KeyReusedError
from policies.ledger.store import (
    AppendRequest,
    Batch,
    LedgerBackend,
    LedgerBusyError,
    LedgerStoppedError,
    LedgerTurnedBackError,
    LedgerUnsoundError,
    MarkUnknownError,
    SealedHead,
    Store,
    export,
    lines,
)
from policies.ledger_service import LedgerService
from policies.review.policy import parse, strictest
from tests.support.ledger_world import Clock, Hospital, policy
from tests.support.postgres import GUARDED, OWNER, PASSWORD, WRITER, Cluster, standby_of, throwaway
from tests.support.rolled_back_ledgers import marked_as_it_is

ORIGIN = "lazaret/test"
CLAIM = SubsampledGaussian(0.25, 1.8, 15)
NAMES = (f"ledger-{n}" for n in itertools.count())


class Place(Protocol):
    """Somewhere a ledger can be."""

    def open(self) -> LedgerBackend: ...
    def look(self) -> LedgerBackend: ...
    def edit(self, *statements: str) -> None:
        """Change it behind the ledger's back, with every right there is."""


@dataclass
class InSqlite:
    path: Path

    def open(self) -> LedgerBackend:
        return open_sqlite(self.path)

    def look(self) -> LedgerBackend:
        return open_read_only(self.path)

    def edit(self, *statements: str) -> None:
        with contextlib.closing(apsw.Connection(str(self.path))) as db:
            for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
                db.execute(f"DROP TRIGGER {name}")
            for statement in statements:
                db.execute(statement)


@dataclass
class InPostgres:
    server: Cluster
    ledger: str = field(default_factory=lambda: next(NAMES))

    def __post_init__(self) -> None:
        install(self.server.dsn(OWNER), WRITER, self.ledger)

    @property
    def schema(self) -> str:
        return f'"lazaret_{self.ledger}"'

    def open(self, patience: float = 60.0) -> Postgres:
        return open_postgres(self.server.dsn(WRITER), self.ledger, patience)

    def look(self) -> Postgres:
        return open_read_only_postgres(self.server.dsn(WRITER), self.ledger)

    def edit(self, *statements: str) -> None:
        with psycopg.connect(self.server.dsn("postgres"), autocommit=True) as db:
            db.execute("SET session_replication_role = replica")  # no triggers
            db.execute(f"SET search_path = {self.schema}".encode())
            for statement in statements:
                db.execute(statement.encode())


@pytest.fixture(scope="session")
def server() -> Iterator[Cluster]:
    with throwaway() as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return InSqlite(tmp_path / "ledger.db")
    return InPostgres(request.getfixturevalue("server"))


@pytest.fixture
def there(server: Cluster) -> InPostgres:
    return InPostgres(server)


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def entry(n: int | str) -> AppendRequest:
    return AppendRequest((Refused(f"subject-{n}", "site-a", "ksame", "call", ["test"], b""),))


def store(disk: LedgerBackend, key: Ed25519PrivateKey) -> Store:
    return Store(disk, ORIGIN, key, Clock())


def register(disk: LedgerBackend, key: Ed25519PrivateKey, hospital: Hospital) -> LedgerService:
    """A register over this disk, with the hospital enrolled."""
    agreed = strictest(parse(hospital.policy_text, "site"), parse(policy(max_releases_per_patient=9), "federation"))
    ledger = LedgerService(store(disk, key), lambda _site: agreed)
    if not ledger.store.state.sites:
        ledger.enrol(*hospital.enrolment(), agreed)
    return ledger


def filled(place: Place, key: Ed25519PrivateKey, size: int = 6) -> str:
    """A closed ledger of some entries; its last checkpoint."""
    with store(place.open(), key) as ledger:
        for n in range(size):
            ledger.append(f"key-{n}", entry(n))
        return ledger.checkpoint()


def roots(place: Place) -> SealedHead | None:
    with contextlib.closing(place.look()) as disk:
        return disk.head()


# ---- on either disk ------------------------------------------------------------------------------------------------


def test_an_answer_is_what_was_appended_and_stays_so_after_reopening(place: Place, key: Ed25519PrivateKey) -> None:
    with store(place.open(), key) as ledger:
        first = ledger.append("one", entry(1))
        both = ledger.append(
            "two", AppendRequest((*entry(2).entries, *entry(3).entries), (b"an envelope", b"another"))
        )
        assert [line.seq for line in first + both] == [0, 1, 2]
        assert ledger.append("one", entry(1)) == first  # exactly once
        head = ledger.checkpoint()
    with store(place.open(), key) as ledger:
        assert (ledger.answer("one"), ledger.answer("two"), ledger.answer("three")) == (first, both, [])
        assert ledger.append("two", AppendRequest((*entry(2).entries, *entry(3).entries))) == both
        assert ledger.envelope(hashlib.sha256(b"another").digest()) == b"another"
        assert ledger.envelope(b"\0" * 32) is None
        assert ledger.checkpoint() == head
    with contextlib.closing(place.look()) as disk:
        assert lines(disk) == first + both
        assert [hashlib.sha256(e).digest() for e in disk.envelopes()] == sorted(
            hashlib.sha256(e).digest() for e in (b"an envelope", b"another")
        )
        assert (disk.body(3), len(list(disk.bodies(2)))) == (None, 2)


def test_a_key_with_other_content_is_refused_and_nothing_is_written(place: Place, key: Ed25519PrivateKey) -> None:
    with store(place.open(), key) as ledger:
        ledger.append("one", entry(1))
        before = roots(place)
        with pytest.raises(KeyReusedError):
            ledger.append("one", entry(2))
    assert roots(place) == before


def test_a_refused_entry_leaves_everything_as_before(place: Place, key: Ed25519PrivateKey) -> None:
    with store(place.open(), key) as ledger:
        ledger.append("one", entry(1))
        before, head = roots(place), ledger.checkpoint()
        reasonless = Refused("subject", "site-a", "ksame", "call", [], b"")
        bad = AppendRequest((*entry(2).entries, reasonless), (b"its envelope",))
        with pytest.raises(InvalidEntryError):
            ledger.append("two", bad)
        assert (ledger.state.size, ledger.checkpoint(), roots(place)) == (1, head, before)
        assert ledger.envelope(hashlib.sha256(b"its envelope").digest()) is None
        ledger.append("two", entry(2))  # and the ledger goes on
    with store(place.open(), key) as ledger:
        assert list(ledger.state.keys) == ["one", "two"]


def test_the_same_envelope_twice_is_kept_once(place: Place, key: Ed25519PrivateKey) -> None:
    with store(place.open(), key) as ledger:
        for n in range(3):
            ledger.append(f"key-{n}", AppendRequest(entry(n).entries, (b"same", b"same")))
    with contextlib.closing(place.look()) as disk:
        assert list(disk.envelopes()) == [b"same"]


def test_an_empty_ledger_has_no_head_and_opens(place: Place, key: Ed25519PrivateKey) -> None:
    with store(place.open(), key) as ledger:
        assert ledger.state.size == 0
    assert roots(place) is None


EDITS = [
    "DELETE FROM entry WHERE seq = 3",
    "DELETE FROM entry WHERE seq = 0",
    "DELETE FROM entry WHERE seq = 5",
    "DELETE FROM entry",
    "UPDATE entry SET body = (SELECT body FROM entry WHERE seq = 2) WHERE seq = 3",
    "UPDATE entry SET seq = 6 WHERE seq = 5",
    "INSERT INTO entry SELECT 6, body FROM entry WHERE seq = 0",
]
HEAD_EDITS = [
    "DELETE FROM head",
    "UPDATE head SET size = 5",
    "UPDATE head SET size = 0",
    "UPDATE head SET seal = root",
]


@pytest.mark.parametrize("edit", [*EDITS, *HEAD_EDITS])
def test_an_edited_ledger_does_not_open(place: Place, key: Ed25519PrivateKey, edit: str) -> None:
    filled(place, key)
    place.edit(edit)
    with pytest.raises(LedgerUnsoundError):
        store(place.open(), key)


@pytest.mark.parametrize("edit", EDITS)
def test_the_auditor_finds_an_edit_with_an_older_checkpoint(place: Place, key: Ed25519PrivateKey, edit: str) -> None:
    noted = filled(place, key)
    with contextlib.closing(place.look()) as disk:
        verify(export(disk, ORIGIN, key), since=noted)
    place.edit(edit, *(["UPDATE head SET size = (SELECT count(*) FROM entry)"] if "WHERE" in edit else []))
    with contextlib.closing(place.look()) as disk, pytest.raises((ExportError, LedgerUnsoundError)):
        verify(export(disk, ORIGIN, key), since=noted)


def test_a_rollback_with_its_own_old_seal_is_found_by_the_mark_and_with_it_by_the_auditor_alone(
    place: Place, key: Ed25519PrivateKey
) -> None:
    filled(place, key, 4)
    old = roots(place)
    assert old is not None
    with store(place.open(), key) as ledger:
        ledger.append("later", entry("later"))
        noted = ledger.checkpoint()
    quote = ("x'{}'" if isinstance(place, InSqlite) else "'\\x{}'").format
    place.edit(
        "DELETE FROM entry WHERE seq = 4",
        f"UPDATE head SET size = 4, root = {quote(old.root.hex())}, seal = {quote(old.seal.hex())}",
    )
    if isinstance(place, InSqlite):
        with pytest.raises(LedgerTurnedBackError):
            store(place.open(), key)
        marked_as_it_is(place.path)
    with store(place.open(), key) as ledger:  # the mark was turned back, too, or there is no standby to ask
        assert ledger.state.size == 4
    with contextlib.closing(place.look()) as disk, pytest.raises(ExportError, match="cut short"):
        verify(export(disk, ORIGIN, key), since=noted)


def test_another_key_cannot_open_the_ledger(place: Place, key: Ed25519PrivateKey) -> None:
    filled(place, key)
    with pytest.raises(LedgerUnsoundError, match="this key"):
        store(place.open(), Ed25519PrivateKey.generate())
    with store(place.open(), key) as ledger:  # and the refused one has let go of it
        assert ledger.state.size == 6


def test_eight_threads_keep_order_and_balance(place: Place, key: Ed25519PrivateKey) -> None:
    hospital = Hospital("site-a")
    ledger = register(place.open(), key, hospital)
    account = ledger.store.state.accounts["site-a/rdp"]
    said: dict[str, bool] = {}

    def ask(thread: int) -> None:
        for n in range(4):
            name = f"grant-{thread}-{n}"
            reservation = hospital.reservation(name, CLAIM, "federated", f"run-{name}")
            said[name] = ledger.reserve(f"key-{name}", reservation, hospital.seal(reservation)).admitted

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    granted = sum(said.values())
    price = cost(CLAIM, account.opened.order)
    assert len(said) == 32
    assert 0 < granted < 32  # some did not fit
    assert account.held == granted * price <= account.limit < (granted + 1) * price
    with contextlib.closing(place.look()) as disk:
        assert {line.record.key: line.seq for line in lines(disk)} == ledger.store.state.keys
    head, size = ledger.store.checkpoint(), ledger.store.state.size
    ledger.store.close()
    with store(place.open(), key) as again:
        assert (again.checkpoint(), again.state.size) == (head, size)
        assert again.state.accounts["site-a/rdp"].held == granted * price


def test_an_export_beside_the_writer_is_sound(place: Place, key: Ed25519PrivateKey) -> None:
    hospital = Hospital("site-a")
    ledger = register(place.open(), key, hospital)
    for n in range(3):
        reservation = hospital.reservation(f"grant-{n}", CLAIM, "federated", f"run-{n}")
        ledger.reserve(f"key-{n}", reservation, hospital.seal(reservation))
    with contextlib.closing(place.look()) as disk:
        found = verify(export(disk, ORIGIN, key), since=ledger.store.checkpoint())
    assert (found.size, found.grants, found.envelopes) == (ledger.store.state.size, 3, 4)
    assert found.accounts["site-a/rdp"]["held"] == ledger.store.state.accounts["site-a/rdp"].held
    ledger.store.close()


def test_a_second_writer_is_refused_until_the_first_is_done(place: Place, key: Ed25519PrivateKey) -> None:
    first = store(place.open(), key)
    with pytest.raises(LedgerBusyError, match=r"stop (it|`serve`, or the other command,) first"):
        place.open()
    first.append("one", entry(1))
    first.close()
    place.open().close()


# ---- PostgreSQL: one writer ----------------------------------------------------------------------------------------


def test_a_writer_whose_session_was_ended_cannot_append(there: InPostgres, key: Ed25519PrivateKey) -> None:
    disk = there.open()
    stale = store(disk, key)
    stale.append("one", entry(1))
    there.server.admin("SELECT pg_terminate_backend(%s)", disk._link.process)
    with store(there.open(), key) as other:
        other.append("two", entry(2))
        with pytest.raises(LedgerStoppedError):
            stale.append("stale", entry("stale"))
        other.append("three", entry(3))
    stale.close()
    with store(there.open(), key) as ledger:
        assert list(ledger.state.keys) == ["one", "two", "three"]


@pytest.mark.parametrize("appends", [0, 1])
def test_a_writer_that_lost_only_its_lock_cannot_append(
    there: InPostgres, key: Ed25519PrivateKey, appends: int
) -> None:
    """As behind a pooler: the connection lives and the lock is gone, so the function alone keeps order."""
    disk = there.open()
    stale = store(disk, key)
    stale.append("one", entry(1))
    disk._link.ask(sql.SQL("SELECT pg_advisory_unlock_all()"))
    with store(there.open(), key) as other:
        for n in range(appends):
            other.append(f"other-{n}", entry(n))
        before = roots(there)
        with pytest.raises(LedgerBusyError, match="taken this ledger over"):
            disk.commit(Batch(1, (b"stale",), (b"stale envelope",), SealedHead(2, b"r" * 32, b"s" * 32)))
        with pytest.raises(LedgerStoppedError):
            stale.append("stale", entry("stale"))
        assert roots(there) == before
        assert len(lines(there.look())) == 1 + appends
        assert disk.envelope(hashlib.sha256(b"stale envelope").digest()) is None
        other.append("last", entry("last"))
    stale.close()


CALL = "SELECT {}.lazaret_commit(%s::bigint, %s::bigint, %b::bytea, %b::bytea, %b::bytea[], %b::bytea[], 'r', 's')"


def test_the_function_compares_the_whole_head(there: InPostgres, key: Ed25519PrivateKey) -> None:
    filled(there, key, 2)
    old = roots(there)
    assert old is not None
    call = sql.SQL(CALL.format(there.schema))
    with psycopg.connect(there.server.dsn(WRITER), autocommit=True) as db:
        ((term,),) = db.execute(f"SELECT term FROM {there.schema}.lazaret_open()".encode()).fetchall()
        right = (term, 2, old.root, old.seal)
        for at, wrong in enumerate((term - 1, 1, b"R" * 32, b"S" * 32)):
            values = [*right[:at], wrong, *right[at + 1 :], [b"x"], [b"y"]]
            with pytest.raises(psycopg.Error, match="another writer") as caught:
                db.execute(call, values)
            assert caught.value.sqlstate == "LZ001"
        assert roots(there) == old
        db.execute("SET synchronous_commit = off")
        with pytest.raises(psycopg.Error, match="durable"):
            db.execute(call, [*right, [b"x"], [b"y"]])
        assert roots(there) == old
        db.execute("SET synchronous_commit = on")
        db.execute(call, [*right, [b"x"], [b"y"]])
    assert roots(there) == SealedHead(3, b"r", b"s")


def test_a_batch_is_written_whole_or_not_at_all(there: InPostgres, key: Ed25519PrivateKey) -> None:
    filled(there, key, 2)
    there.edit("INSERT INTO entry VALUES(4, 'planted')")  # the third of the batch collides
    before = roots(there)
    with contextlib.closing(there.open()) as disk:
        with pytest.raises(RuntimeError, match="SQLSTATE 23505"):
            disk.commit(Batch(2, (b"a", b"b", b"c"), (b"e",), SealedHead(5, b"r" * 32, b"s" * 32)))
        assert (roots(there), disk.body(2), disk.envelope(hashlib.sha256(b"e").digest())) == (before, None, None)


def test_a_batch_that_does_not_continue_the_ledger_is_refused(there: InPostgres, key: Ed25519PrivateKey) -> None:
    filled(there, key, 2)
    with contextlib.closing(there.open()) as disk:
        for batch in (
            Batch(1, (b"a",), (), SealedHead(2, b"r", b"s")),
            Batch(2, (b"a",), (), SealedHead(4, b"r", b"s")),
            Batch(3, (b"a",), (), SealedHead(4, b"r", b"s")),
        ):
            with pytest.raises(ValueError, match="continue"):
                disk.commit(batch)
    with contextlib.closing(there.look()) as reader, pytest.raises(ValueError, match="to read"):
        reader.commit(Batch(2, (b"a",), (), SealedHead(3, b"r", b"s")))


# ---- PostgreSQL: what the writer's role may do ---------------------------------------------------------------------

FORBIDDEN = [
    "INSERT INTO entry VALUES(99, 'x')",
    "UPDATE entry SET body = 'x'",
    "DELETE FROM entry",
    "TRUNCATE entry",
    "INSERT INTO envelope VALUES(sha256('x'), 'x')",
    "UPDATE envelope SET body = 'x'",
    "DELETE FROM envelope",
    "TRUNCATE envelope",
    "INSERT INTO head VALUES(true, 0, 0, '', '')",
    "UPDATE head SET size = 0",
    "DELETE FROM head",
    "TRUNCATE head, entry",
    "DROP TABLE entry",
    "ALTER TABLE entry DISABLE TRIGGER ALL",
    "DROP TRIGGER entry_is_kept ON entry",
    "CREATE TABLE more(x int)",
    "CREATE OR REPLACE FUNCTION lazaret_durable() RETURNS void LANGUAGE sql AS ''",
    "SELECT lazaret_durable()",
    "SET session_replication_role = replica",
]


@pytest.mark.parametrize("statement", FORBIDDEN)
def test_the_writers_role_cannot(there: InPostgres, key: Ed25519PrivateKey, statement: str) -> None:
    with psycopg.connect(there.server.dsn(WRITER), autocommit=True) as db:
        db.execute(f"SET search_path = {there.schema}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute(statement.encode())


@pytest.mark.parametrize("table", ["entry", "envelope", "head"])
def test_even_the_owner_cannot_change_what_is_written(there: InPostgres, key: Ed25519PrivateKey, table: str) -> None:
    filled(there, key)
    update = {"entry": "seq = 9", "envelope": "body = ''", "head": "size = size - 1"}[table]
    with psycopg.connect(there.server.dsn(OWNER), autocommit=True) as db:
        db.execute(f"SET search_path = {there.schema}".encode())
        for statement in (f"UPDATE {table} SET {update}", f"DELETE FROM {table}", f"TRUNCATE {table}"):
            with pytest.raises(psycopg.errors.RaiseException, match=r"append-only|only grows"):
                db.execute(statement.encode())


def test_the_writer_cannot_lead_the_function_to_other_tables(there: InPostgres) -> None:
    with psycopg.connect(there.server.dsn(WRITER), autocommit=True) as db:
        for query in (
            "CREATE TEMP TABLE entry(seq bigint, body bytea)",
            "CREATE TEMP TABLE head(one boolean, term bigint, size bigint, root bytea, seal bytea)",
            "INSERT INTO pg_temp.head VALUES(true, 1, 0, '', '')",
            "CREATE FUNCTION pg_temp.lazaret_durable() RETURNS void LANGUAGE sql AS ''",
            "SET search_path = pg_temp",
            f"SELECT {there.schema}.lazaret_open()",
        ):
            db.execute(query.encode())
        db.execute(sql.SQL(CALL.format(there.schema)), (1, 0, b"", b"", [b"x"], []))
        assert db.execute("SELECT count(*) FROM pg_temp.entry").fetchone() == (0,)
    with contextlib.closing(there.look()) as disk:
        assert list(disk.bodies()) == [b"x"]


@pytest.mark.parametrize("role", ["postgres", OWNER])
def test_a_role_that_could_write_by_itself_is_refused(there: InPostgres, role: str) -> None:
    with pytest.raises(ValueError, match="directly"):
        open_postgres(there.server.dsn(role), there.ledger)


@pytest.mark.parametrize(
    "grant", ["UPDATE ON {}.head", "UPDATE (body) ON {}.entry", "TRIGGER ON {}.entry", "CREATE ON SCHEMA {}"]
)
def test_a_grant_beyond_what_install_gives_is_refused_and_taken_back(there: InPostgres, grant: str) -> None:
    there.server.admin(f"GRANT {grant.format(there.schema)} TO PUBLIC")
    with pytest.raises(ValueError, match="directly"):
        there.open()
    install(there.server.dsn(OWNER), WRITER, there.ledger)
    there.open().close()


def test_installing_again_keeps_the_rows(there: InPostgres, key: Ed25519PrivateKey) -> None:
    filled(there, key)
    before = roots(there)
    install(there.server.dsn(OWNER), WRITER, there.ledger)
    assert roots(there) == before is not None
    with store(there.open(), key) as ledger:
        assert ledger.state.size == 6


def test_install_refuses_a_writer_that_is_no_role_or_more_than_a_writer(server: Cluster) -> None:
    for writer, why in (("nobody-here", "no such role"), ("postgres", "superuser"), (OWNER, "owner")):
        with pytest.raises(ValueError, match=why):
            install(server.dsn(OWNER), writer, "refused")
    server.admin('CREATE SCHEMA "lazaret_foreign"')
    with pytest.raises(ValueError, match="another role"):
        install(server.dsn(OWNER), WRITER, "foreign")


@pytest.mark.parametrize("name", ["", "A", 'a"b', "a;b", "-a", "é", "x" * 52])
def test_a_ledgers_name_is_plain(server: Cluster, name: str) -> None:
    for use in (open_postgres, open_read_only_postgres):
        with pytest.raises(ValueError, match="name"):
            use(server.dsn(WRITER), name)
    with pytest.raises(ValueError, match="name"):
        install(server.dsn(OWNER), WRITER, name)


def test_ledgers_in_one_database_do_not_meet(server: Cluster, key: Ed25519PrivateKey) -> None:
    here, elsewhere = InPostgres(server), InPostgres(server)
    with store(here.open(), key) as one, store(elsewhere.open(), key) as two:
        one.append("one", entry(1))
        assert two.state.size == 0
        two.append("two", entry(2))
        assert list(one.state.keys) == ["one"]


def test_a_ledger_that_is_not_installed_is_refused_with_what_to_do(server: Cluster) -> None:
    for use in (open_postgres, open_read_only_postgres):
        with pytest.raises(ValueError, match="install it"):
            use(server.dsn(WRITER), "not-there")


# ---- PostgreSQL: durable -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
def test_a_server_that_would_lose_commits_is_refused_at_open_and_in_every_commit(
    there: InPostgres, key: Ed25519PrivateKey, setting: str
) -> None:
    running = there.open()
    try:
        there.server.set(**{setting: "off"})
        with pytest.raises(ValueError, match="must be on"):
            running.commit(Batch(0, (b"a",), (), SealedHead(1, b"r" * 32, b"s" * 32)))
        running.close()
        with pytest.raises(ValueError, match=f"set {setting} = on"):
            there.open()
    finally:
        there.server.set(**{setting: ""})
    with store(there.open(), key) as ledger:
        assert ledger.state.size == 0


def test_the_session_waits_for_the_disk_whatever_the_role_is_set_to(there: InPostgres) -> None:
    show = sql.SQL("SHOW synchronous_commit")
    try:
        for said, then in (("off", "on"), ("local", "on"), ("remote_write", "on"), ("remote_apply", "remote_apply")):
            there.server.admin(f"ALTER ROLE {WRITER} SET synchronous_commit = {said}")
            with contextlib.closing(there.open()) as disk:
                assert disk._link.ask(show) == [(then,)]
    finally:
        there.server.admin(f"ALTER ROLE {WRITER} RESET synchronous_commit")


def test_unlogged_tables_are_refused(there: InPostgres) -> None:
    there.server.admin(f"ALTER TABLE {there.schema}.entry SET UNLOGGED")
    with pytest.raises(ValueError, match="unlogged"):
        there.open()


@pytest.mark.parametrize("how", ["kill", "immediate", "kill again"])
def test_no_acknowledged_entry_is_lost_when_the_server_is_killed(
    there: InPostgres, key: Ed25519PrivateKey, how: str
) -> None:
    ledger = store(there.open(), key)
    acknowledged: dict[str, int] = {}
    asked: dict[int, str] = {}

    def write(thread: int) -> None:
        with contextlib.suppress(LedgerStoppedError):
            for n in itertools.count():
                asked[thread] = f"key-{thread}-{n}"
                acknowledged[asked[thread]] = ledger.append(asked[thread], entry(asked[thread]))[0].seq

    threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    while len(acknowledged) < 40:
        time.sleep(0.005)
    if how.startswith("kill"):
        there.server.kill()
    else:
        there.server.stop(signal.SIGQUIT)
    for thread in threads:
        thread.join()
    assert ledger.stopped
    ledger.close()
    there.server.start()
    with store(there.open(), key) as again:
        assert acknowledged.items() <= again.state.keys.items()
        assert again.state.size <= len(acknowledged) + 3
        for name in asked.values():  # a retry of what was under way makes it one entry, whether it was kept or not
            again.append(name, entry(name))
        assert again.state.keys.keys() == acknowledged.keys() | set(asked.values())


def awaited(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not happen")


def test_a_commit_that_no_standby_confirms_is_no_commit(there: InPostgres, key: Ed25519PrivateKey) -> None:
    """PostgreSQL reports a cancelled wait for a standby as success, with a warning."""
    disk, raised = there.open(), list[BaseException]()
    assert disk.synchronous_standbys == ""

    def commit() -> None:
        try:
            for n in itertools.count():  # the first ones may be done before the new setting reaches every process
                disk.commit(Batch(n, (b"a",), (), SealedHead(n + 1, b"r" * 32, b"s" * 32)))
        except ConnectionError as error:
            raised.append(error)

    try:
        there.server.set(synchronous_standby_names="nobody")
        with contextlib.closing(there.look()) as reader:
            assert reader.synchronous_standbys == "nobody"
        thread = threading.Thread(target=commit)
        thread.start()
        waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        awaited(lambda: there.server.admin(waiting))
        there.server.admin("SELECT pg_cancel_backend(%s)", disk._link.process)
        thread.join()
        assert "standby" in str(raised[0])
        disk.close()
        begun = time.monotonic()  # and opening waits for the standby to have what may be here alone
        with pytest.raises(ConnectionError, match="was lost"):
            there.open(patience=1.0)
        assert 0.9 < time.monotonic() - begun < 60
    finally:
        there.server.set(synchronous_standby_names="")


def test_a_server_that_was_turned_back_is_refused_by_what_its_standby_holds(key: Ed25519PrivateKey) -> None:
    """Its own tables are sound: they end too early. The standby had every commit before it was answered."""
    with throwaway() as primary:
        place = InPostgres(primary)
        with store(place.open(), key) as ledger:
            for n in range(3):
                ledger.append(f"early-{n}", entry(n))
        primary.stop()
        subprocess.run(["cp", "-a", primary.data, primary.folder / "old"], check=True)
        primary.start()
        with standby_of(primary) as standby:
            both = primary.dsn(WRITER).replace(f"host={primary.folder}", f"host={primary.folder},{standby.folder}")
            primary.set(synchronous_standby_names="*")
            for n in range(2):
                with store(open_postgres(both, place.ledger), key) as ledger:
                    ledger.append(f"late-{n}", entry(n))
                    with read_store(open_read_only_postgres(both, place.ledger), ORIGIN, key) as seen:
                        assert seen.state.size == 4 + n
            nobody = primary.dsn(WRITER).replace(f"host={primary.folder}", f"host={primary.folder},/nowhere")
            with pytest.raises(LedgerUnsoundError, match="no other host of the address answers as its standby"):
                store(open_postgres(nobody, place.ledger), key)
            primary.kill()
            shutil.rmtree(primary.data)
            (primary.folder / "old").rename(primary.data)
            primary.start()
            with pytest.raises(LedgerTurnedBackError, match=r"has 3 entries.*mark is at 5"):
                store(open_postgres(both, place.ledger), key)
            with pytest.raises(LedgerTurnedBackError):
                read_store(open_read_only_postgres(both, place.ledger), ORIGIN, key)
            disk = open_postgres(both, place.ledger)
            disk.brought_back()
            with store(disk, key) as ledger:
                ledger.restore("ab" * 16)
                assert ledger.state.epoch == 2
            with store(place.open(), key) as ledger:
                assert ledger.state.size == 4, "one host, and a server that waits for nobody: nobody else is asked"


def turned_back_with(primary: Cluster, between: Callable[[], None]) -> None:
    """Put a server's files of before ``between`` back in their place, while nothing of it runs."""
    primary.stop()
    subprocess.run(["cp", "-a", primary.data, primary.folder / "old"], check=True)
    primary.start()
    between()
    primary.kill()
    shutil.rmtree(primary.data)
    (primary.folder / "old").rename(primary.data)
    primary.start()


def test_a_standby_that_has_not_replayed_what_it_received_is_no_mark(
    key: Ed25519PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit waits until the standby has it on its disk, not until the standby shows it."""
    monkeypatch.setattr(postgres, "_REPLAYING", 0.3)
    with throwaway() as primary:
        place = InPostgres(primary)
        with store(place.open(), key) as ledger:
            ledger.append("early", entry(0))
        with standby_of(primary) as standby:
            both = primary.dsn(WRITER).replace(f"host={primary.folder}", f"host={primary.folder},{standby.folder}")
            primary.set(synchronous_standby_names="*")

            def late() -> None:
                with store(open_postgres(both, place.ledger), key) as ledger:
                    standby.admin("SELECT pg_wal_replay_pause()")
                    awaited(lambda: standby.admin("SELECT pg_get_wal_replay_pause_state()") == [("paused",)])
                    ledger.append("late", entry(1))

            turned_back_with(primary, late)
            with pytest.raises(MarkUnknownError, match="received more than it has replayed"):
                read_store(open_read_only_postgres(both, place.ledger), ORIGIN, key)


def test_a_standby_that_has_replayed_meanwhile_is_a_mark(key: Ed25519PrivateKey) -> None:
    """It is asked again: what it has just received it shows in a moment."""
    with throwaway() as primary:
        place = InPostgres(primary)
        with store(place.open(), key) as ledger, standby_of(primary) as standby:
            both = primary.dsn(WRITER).replace(f"host={primary.folder}", f"host={primary.folder},{standby.folder}")
            primary.set(synchronous_standby_names="*")
            standby.admin("SELECT pg_wal_replay_pause()")
            awaited(lambda: standby.admin("SELECT pg_get_wal_replay_pause_state()") == [("paused",)])
            ledger.append("late", entry(1))
            resumed = threading.Timer(0.5, standby.admin, ("SELECT pg_wal_replay_resume()",))
            resumed.start()
            try:
                with read_store(open_read_only_postgres(both, place.ledger), ORIGIN, key) as seen:
                    assert [mark.size for mark in seen.marks] == [1]
            finally:
                resumed.join()


def test_where_any_one_of_two_standbys_acknowledges_both_must_answer(key: Ed25519PrivateKey) -> None:
    """The one that acknowledged may be the one that is away."""
    with throwaway() as primary, contextlib.ExitStack() as stack:
        place = InPostgres(primary)
        with store(place.open(), key) as ledger:
            ledger.append("early", entry(0))
        first, second = (stack.enter_context(standby_of(primary)) for _ in range(2))
        hosts = f"host={primary.folder},{first.folder},{second.folder}"
        three = primary.dsn(WRITER).replace(f"host={primary.folder}", hosts)
        for names in ("FIRST 1 (walreceiver, another)", "ANY 1 (*)"):
            primary.set(synchronous_standby_names=names)
            with store(open_postgres(three, place.ledger), key) as ledger:
                assert len(ledger.marks) == 2

        def late() -> None:
            second.stop()
            with pytest.raises(MarkUnknownError, match="2 of them must answer"):
                store(open_postgres(three, place.ledger), key)
            second.start()
            with store(open_postgres(three, place.ledger), key) as ledger:
                second.stop()
                ledger.append("late", entry(1))
            first.stop()

        turned_back_with(primary, late)
        second.start()
        with pytest.raises(
            MarkUnknownError, match=r"ANY 1 \(\*\)' a commit may be at some standbys alone; 2 of them"
        ):
            store(open_postgres(three, place.ledger), key)
        first.start()
        with pytest.raises(LedgerTurnedBackError, match=r"has 1 entries.*mark is at 2"):
            read_store(open_read_only_postgres(three, place.ledger), ORIGIN, key)


@pytest.mark.parametrize(
    ("names", "others", "needed"),
    [
        ("", 1, 1),
        ("", 3, 1),
        ("a", 1, 1),
        ("a, b", 2, 2),
        ("ANY 1 (a, b)", 2, 2),
        ("any 2 (a, b, c)", 3, 2),
        ("FIRST 2 (a, b)", 2, 1),
        ("2(a,b,c)", 3, 2),
        ("first 3 (a, b, c)", 3, 1),
        ("ANY 1 (a)", 2, 2),  # both may be called a, or one is waited for by none
        ("ANY 1 (a, b, c)", 1, 3),  # two that commits wait for are not in the address
        ("*", 1, 1),
        ("*", 0, 1),
        ("ANY 2 (*)", 3, 3),
        ('FIRST 2 (a, "*")', 3, 3),
        ('ANY 1 ("a, b)", c)', 2, 2),
        ('"ANY 2 (a, b)"', 1, 1),
    ],
)
def test_so_many_standbys_must_answer_that_one_has_every_commit(names: str, others: int, needed: int) -> None:
    assert postgres.answers_needed(names, others) == needed


def test_the_server_reads_its_names_of_standbys_as_we_do(there: InPostgres) -> None:
    """What it accepts is what the list above has."""
    try:
        for names in ('ANY 1 ("a, b)", c)', "2(a,b,c)", 'FIRST 2 (a, "*")', '"ANY 2 (a, b)"'):
            there.server.set(synchronous_standby_names=names)
            with contextlib.closing(there.look()) as disk:
                assert disk.synchronous_standbys == names
    finally:
        there.server.set(synchronous_standby_names="")


def test_where_commits_wait_for_a_standby_only_an_answer_of_another_host_will_do(key: Ed25519PrivateKey) -> None:
    """An address of one host, a standby that is away, and names that somebody emptied: none is passed in silence."""
    with throwaway() as primary:
        place = InPostgres(primary)
        with store(place.open(), key) as ledger:
            ledger.append("one", entry(1))
        own = f"host={primary.folder}"
        with standby_of(primary) as standby:
            several = {
                name: primary.dsn(WRITER).replace(own, f"{own},{other}")
                for name, other in (("both", standby.folder), ("absent", "/nowhere"), ("twice", primary.folder))
            }
            for names in ("*", ""):
                primary.set(synchronous_standby_names=names)
                with store(open_postgres(several["both"], place.ledger), key) as ledger:
                    assert len(ledger.marks) == 1, "what the server says of itself is no mark"
                for which in ("absent", "twice"):
                    with pytest.raises(MarkUnknownError, match="no other host of the address answers as its standby"):
                        store(open_postgres(several[which], place.ledger), key)
                    with pytest.raises(MarkUnknownError):
                        read_store(open_read_only_postgres(several[which], place.ledger), ORIGIN, key)
            primary.set(synchronous_standby_names="*")
            with pytest.raises(MarkUnknownError, match=r"the address names one host.*add the standby's host"):
                store(place.open(), key)
            with pytest.raises(MarkUnknownError):
                read_store(place.look(), ORIGIN, key)
            disk = place.open()
            disk.brought_back()
            store(disk, key).close()  # what comes from a backup is bound by nobody's mark
            primary.set(synchronous_standby_names="")


def test_what_a_mark_does_not_show_is_said(there: InPostgres) -> None:
    server, own = there.server, f"host={there.server.folder}"
    with contextlib.closing(there.look()) as disk:
        assert "no standby to ask" in disk.unmarked()
    several = server.dsn(WRITER).replace(own, f"{own},/nowhere")
    with contextlib.closing(open_read_only_postgres(several, there.ledger)) as disk:
        assert "synchronous_standby_names is empty" in disk.unmarked()
        try:
            server.set(synchronous_standby_names="nobody")
            assert disk.unmarked() == ""
        finally:
            server.set(synchronous_standby_names="")


def test_an_address_of_several_hosts_is_one_of_each() -> None:
    assert hosts_of("host=a dbname=x") == hosts_of("dbname=x") == ()
    found = hosts_of("host=a,b port=1,2 dbname=x target_session_attrs=read-write")
    assert [(w["host"], w["port"], w["target_session_attrs"]) for w in map(conninfo_to_dict, found)] == [
        ("a", "1", "any"),
        ("b", "2", "any"),
    ]
    assert [conninfo_to_dict(one)["port"] for one in hosts_of("postgresql://u@a,b/x?port=7")] == ["7", "7"]
    with pytest.raises(ValueError, match="cannot be read"):
        hosts_of("host='a dbname=secret")


def test_a_server_that_hangs_is_given_up(there: InPostgres, key: Ed25519PrivateKey) -> None:
    disk = there.open(patience=6.0)
    ledger = store(disk, key)
    ledger.append("one", entry(1))
    os.kill(disk._link.process, signal.SIGSTOP)
    try:
        with pytest.raises(LedgerStoppedError):
            ledger.append("two", entry(2))
    finally:
        os.kill(disk._link.process, signal.SIGCONT)
    with pytest.raises(ConnectionError, match="restart"):
        disk.body(0)
    ledger.close()
    with store(there.open(), key) as again:
        assert list(again.state.keys) in (["one"], ["one", "two"])  # nobody was told


# ---- PostgreSQL: the connection ------------------------------------------------------------------------------------

MISTYPED = [
    "postgresql://user:hunter2/zebra@localhost/db",
    "postgresql://user:hunter2%zz@localhost/db",
    "postgresql://user:hunter2@[localhost/db",
    "host=localhost password hunter2",
    "host=localhost password='hunter2",
    "host=/nowhere user=user passwort=hunter2",
    "host=/nowhere user=user password=hunter2",
    "host=127.0.0.1 port=1 user=user password=hunter2",
]


@pytest.mark.parametrize("dsn", MISTYPED)
def test_no_error_repeats_an_address(dsn: str) -> None:
    with pytest.raises((ValueError, ConnectionError)) as caught:
        open_postgres(dsn)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_wrong_password_is_refused_and_never_shown(there: InPostgres) -> None:
    address = there.server.dsn(GUARDED, password="hunter2")
    with pytest.raises(ConnectionError, match="refuses the role's password") as caught:
        open_postgres(address, there.ledger)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    install(there.server.dsn(OWNER), GUARDED, there.ledger)
    with contextlib.closing(open_postgres(there.server.dsn(GUARDED, password=PASSWORD), there.ledger)) as disk:
        shown = [repr(disk), repr(disk._link), repr(disk._link._db), *map(repr, vars(disk).values())]
        assert not any(PASSWORD in text for text in shown)


@contextlib.contextmanager
def pooler(server: Cluster) -> Iterator[str]:
    """What stands before the server gives out process numbers of its own, as poolers do; its port."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(server.folder / ".s.PGSQL.6432"))
    listener.listen()

    def relay(source: socket.socket, sink: socket.socket, change: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                at = data.find(b"K\x00\x00\x00\x0c") if change else -1
                sink.sendall(data if at < 0 else data[: at + 5] + b"\x00\x00\x00\x07" + data[at + 9 :])
            sink.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            behind = socket.socket(socket.AF_UNIX)
            behind.connect(str(server.folder / ".s.PGSQL.5432"))
            threading.Thread(target=relay, args=(behind, client, True), daemon=True).start()
            relay(client, behind, False)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield "6432"
    finally:
        listener.close()


def test_a_pooler_before_the_server_is_refused(there: InPostgres) -> None:
    with pooler(there.server) as port, pytest.raises(ValueError, match="pooler"):
        open_postgres(there.server.dsn(WRITER, port=port), there.ledger)
