"""A ledger of an older version: refused until it is upgraded, and then it says what it said, to the byte."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.storage.directory import ORIGIN, CoordinatorDirectory
from policies.audit.verify import verify
from policies.ledger.backends.migrations import upgrade
from policies.ledger.backends.migrations.upgrade import upgrade_sqlite
from policies.ledger.backends.postgres import install, open_postgres, open_read_only_postgres
from policies.ledger.backends.schema_version import FORM, SchemaVersionError
from policies.ledger.backends.sqlite import export_file, form_of, open_read_only, open_sqlite, prepare
from policies.ledger.entries import Refused
from policies.ledger.store import AppendRequest, LedgerBusyError, LedgerUnsoundError, Store, export
from tests.support.ledger_world import Clock
from tests.support.older import Older, older
from tests.support.postgres import OWNER, WRITER, Cluster, throwaway


@pytest.fixture
def before(tmp_path: Path) -> Older:
    return older(tmp_path)


def ledger(before: Older) -> Path:
    return before.coordinator / "ledger.db"


def key(before: Older) -> Ed25519PrivateKey:
    return CoordinatorDirectory(before.coordinator).ledger_key()


def upgraded(before: Older) -> upgrade.Upgraded:
    return upgrade_sqlite(ledger(before), ORIGIN, key(before))


def exported(before: Older) -> bytes:
    witnessed = tuple(p.read_text() for p in sorted((before.coordinator / "witnesses").glob("*.note")))
    return export_file(ledger(before), ORIGIN, key(before), witnessed)


def schema(path: Path) -> list[tuple[str, str]]:
    with contextlib.closing(apsw.Connection(str(path))) as db:
        rows = db.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name").fetchall()
    return [(name, "".join(text.split())) for name, text in rows]


def edited(path: Path, *statements: str) -> None:
    with contextlib.closing(apsw.Connection(str(path))) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            db.execute(statement)


def test_an_older_ledger_is_read_and_proved_as_it_is_and_not_appended_to(before: Older) -> None:
    with contextlib.closing(open_read_only(ledger(before))) as disk:
        assert disk.form() == 1
    assert verify(exported(before), before.head("coordinator")).size == 18
    with pytest.raises(SchemaVersionError, match="run `upgrade`"):
        open_sqlite(ledger(before))
    assert schema(ledger(before)) == schema(before.coordinator / "ledger.db"), "nothing was changed by the refusal"


def test_an_upgraded_ledger_exports_to_the_very_bytes_that_the_older_version_wrote(before: Older) -> None:
    bare = export_file(ledger(before), ORIGIN, key(before))
    done = upgraded(before)
    assert (done.before, done.after, done.size) == (1, FORM, 18)
    assert bare == before.exported("coordinator") == export_file(ledger(before), ORIGIN, key(before))
    assert stat.S_IMODE(ledger(before).stat().st_mode) == 0o600
    again = upgraded(before)
    assert (again.before, again.root) == (FORM, done.root), "done twice, done once"


def test_heads_that_were_signed_before_the_upgrade_verify_after_it_and_after_more_entries(before: Older) -> None:
    upgraded(before)
    with Store(open_sqlite(ledger(before)), ORIGIN, key(before), Clock()) as store:
        store.append("x", AppendRequest((Refused("x", "site-a", "", "call", ["rule"], b""),)))
    found = verify(exported(before), before.head("coordinator"))
    assert (found.size, found.witnesses) == (19, {"site-a": 18}), "what the site had cosigned is extended too"


def test_the_steps_lead_to_the_very_tables_that_a_new_ledger_has(before: Older, tmp_path: Path) -> None:
    upgraded(before)
    with contextlib.closing(apsw.Connection(str(tmp_path / "new.db"))) as new:
        prepare(new)
        assert form_of(new) == FORM
    assert schema(ledger(before)) == schema(tmp_path / "new.db")


def test_an_upgraded_ledger_keeps_its_envelopes_and_its_head(before: Older) -> None:
    upgraded(before)
    with contextlib.closing(apsw.Connection(str(ledger(before)))) as db:
        for statement in ("DELETE FROM envelope", "UPDATE envelope SET body = x'00'", "DELETE FROM head"):
            with pytest.raises(apsw.ConstraintError, match="append-only"):
                db.execute(statement)
        with pytest.raises(apsw.ConstraintError, match="only grows"):
            db.execute("UPDATE head SET size = size - 1")


POINTS = ("_alone", "_copied", "_migrate", "_same")


@pytest.mark.parametrize("point", [*POINTS, "replace the mark", "replace", "replaced"])
def test_a_killed_upgrade_leaves_the_ledger_whole_and_goes_on(before: Older, point: str) -> None:
    child = os.fork()
    if not child:  # as by kill -9: no handler runs, nothing is closed
        owner, name = (os, "replace") if point.startswith("replace") else (upgrade, point)
        act: Callable[..., object] = getattr(owner, name)

        def die(*words: object) -> None:
            if point in {"replace", "replaced"} and words[1] != ledger(before):  # the mark's comes first
                act(*words)
                return
            if point in {"_alone", "replaced", "_migrate"}:
                act(*words)
            os._exit(9)

        setattr(owner, name, die)
        with contextlib.suppress(BaseException):
            upgraded(before)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert export_file(ledger(before), ORIGIN, key(before)) == before.exported("coordinator")
    assert upgraded(before).after == FORM
    assert export_file(ledger(before), ORIGIN, key(before)) == before.exported("coordinator")
    left = {p.name for p in before.coordinator.iterdir() if p.name.startswith("ledger")}
    known = {"ledger.db", "ledger.lock", "ledger.db-wal", "ledger.db-shm", "ledger.mark"}
    assert left - {"ledger.mark.part"} <= known, "no half of a copy is left"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entry SET body = x'00' WHERE seq = 3",
        "DELETE FROM entry WHERE seq = 17",
        "DELETE FROM envelope WHERE rowid_is = 1",
        "UPDATE head SET size = 17",
        "UPDATE head SET seal = x'00'",
    ],
)
def test_a_step_that_would_change_what_the_ledger_says_is_undone(
    before: Older, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    change = change.replace("WHERE rowid_is = 1", "WHERE digest = (SELECT min(digest) FROM envelope)")
    step = upgrade._migrate

    def clumsy(copy: Path, form: int) -> None:
        step(copy, form)
        edited(ledger(before).with_name("ledger.db.upgrading"), change)

    monkeypatch.setattr(upgrade, "_migrate", clumsy)
    with pytest.raises(LedgerUnsoundError):
        upgraded(before)
    assert export_file(ledger(before), ORIGIN, key(before)) == before.exported("coordinator")
    with contextlib.closing(open_read_only(ledger(before))) as disk:
        assert disk.form() == 1


@pytest.mark.parametrize(
    "change", ["DELETE FROM entry WHERE seq = 17", "UPDATE entry SET body = x'00' WHERE seq = 2"]
)
def test_a_ledger_that_was_tampered_with_is_not_upgraded(before: Older, change: str) -> None:
    edited(ledger(before), change)
    with pytest.raises(LedgerUnsoundError):
        upgraded(before)
    with contextlib.closing(open_read_only(ledger(before))) as disk:
        assert disk.form() == 1


def test_another_ledgers_key_upgrades_nothing(before: Older) -> None:
    with pytest.raises(LedgerUnsoundError, match="committed last"):
        upgrade_sqlite(ledger(before), ORIGIN, Ed25519PrivateKey.generate())
    assert upgraded(before).before == 1


def test_nobody_may_write_or_read_while_it_is_upgraded(before: Older) -> None:
    with upgrade.lock_file(ledger(before).with_suffix(".lock")), pytest.raises(LedgerBusyError):
        upgraded(before)
    with contextlib.closing(apsw.Connection(str(ledger(before)))) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM head").fetchall()
        with pytest.raises(LedgerUnsoundError, match="stop it first"):
            upgraded(before)
    assert upgraded(before).before == 1


def test_a_ledger_of_a_newer_program_is_neither_read_nor_written_nor_taken_back(before: Older) -> None:
    upgraded(before)
    edited(ledger(before), f"UPDATE form SET version_num = '{FORM + 1}'")
    raw = ledger(before).read_bytes()
    for act in (
        lambda: open_sqlite(ledger(before)),
        lambda: open_read_only(ledger(before)),
        lambda: upgraded(before),
    ):
        with pytest.raises(SchemaVersionError, match="newer version"):
            act()
    assert hashlib.sha256(ledger(before).read_bytes()).digest() == hashlib.sha256(raw).digest()


@pytest.mark.parametrize(
    "said", ["DELETE FROM form", "UPDATE form SET version_num = 'two'", "INSERT INTO form VALUES(1)"]
)
def test_a_ledger_that_does_not_say_one_form_is_damaged(before: Older, said: str) -> None:
    upgraded(before)
    edited(ledger(before), said)
    for act in (
        lambda: open_sqlite(ledger(before)),
        lambda: open_read_only(ledger(before)),
        lambda: upgraded(before),
    ):
        with pytest.raises(LedgerUnsoundError, match="damaged"):
            act()


def test_an_empty_file_is_a_new_ledger_and_of_this_form(tmp_path: Path) -> None:
    with contextlib.closing(open_sqlite(tmp_path / "ledger.db")) as disk:
        assert disk.form() == FORM
    with pytest.raises(FileNotFoundError):
        upgrade_sqlite(tmp_path / "none.db", ORIGIN, Ed25519PrivateKey.generate())


# -- PostgreSQL


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with throwaway() as cluster:
        yield cluster


SIGNS = Ed25519PrivateKey.generate()


def older_in(server: Cluster, name: str) -> bytes:
    """A ledger with an entry, in the form that did not say its form; its export."""
    install(server.dsn(OWNER), WRITER, name)
    with Store(open_postgres(server.dsn(WRITER), name), "lazaret/test", SIGNS, Clock()) as store:
        store.append("x", AppendRequest((Refused("x", "site-a", "", "call", ["rule"], b""),)))
    said = shown(server, name)
    with psycopg.connect(server.dsn(OWNER), autocommit=True) as db:
        db.execute(f'DROP TABLE "lazaret_{name}".form'.encode())
    return said


def shown(server: Cluster, name: str) -> bytes:
    with contextlib.closing(open_read_only_postgres(server.dsn(WRITER), name)) as disk:
        return export(disk, "lazaret/test", SIGNS)


def test_an_older_ledger_in_postgresql_is_upgraded_by_its_owner_in_one_transaction(server: Cluster) -> None:
    from policies.ledger.backends.migrations.postgres import upgrade_postgres

    said = older_in(server, "one")
    assert shown(server, "one") == said, "it is read as it is"
    for act in (
        lambda: open_postgres(server.dsn(WRITER), "one"),
        lambda: install(server.dsn(OWNER), WRITER, "one"),
    ):
        with pytest.raises(SchemaVersionError, match="upgrade"):
            act()
    with pytest.raises(ValueError, match="the ledger's owner"):
        upgrade_postgres(server.dsn(WRITER), "one")
    done = upgrade_postgres(server.dsn(OWNER), "one")
    assert (done.before, done.after, done.size) == (1, FORM, 1)
    assert shown(server, "one") == said
    assert upgrade_postgres(server.dsn(OWNER), "one").before == FORM
    with Store(open_postgres(server.dsn(WRITER), "one"), "lazaret/test", SIGNS, Clock()) as store:
        store.append("y", AppendRequest((Refused("y", "site-a", "", "call", ["rule"], b""),)))
        with pytest.raises(LedgerBusyError):
            upgrade_postgres(server.dsn(OWNER), "one")


def test_a_newer_ledger_in_postgresql_is_refused(server: Cluster) -> None:
    from policies.ledger.backends.migrations.postgres import upgrade_postgres

    install(server.dsn(OWNER), WRITER, "two")
    with psycopg.connect(server.dsn(OWNER), autocommit=True) as db:
        db.execute(f"UPDATE lazaret_two.form SET version_num = '{FORM + 1}'".encode())
    for act in (
        lambda: open_postgres(server.dsn(WRITER), "two"),
        lambda: open_read_only_postgres(server.dsn(WRITER), "two"),
        lambda: install(server.dsn(OWNER), WRITER, "two"),
        lambda: upgrade_postgres(server.dsn(OWNER), "two"),
    ):
        with pytest.raises(SchemaVersionError, match="newer version"):
            act()


def test_a_step_that_would_change_what_postgresql_holds_is_rolled_back(
    server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from policies.ledger.backends.migrations import postgres as owner

    said = older_in(server, "three")
    step = owner.migrate

    def clumsy(connection: object, form: int, schema: str) -> None:
        step(connection, form, schema)  # type: ignore[arg-type]
        connection.execute(f"ALTER TABLE {schema}.entry DISABLE TRIGGER ALL")  # type: ignore[attr-defined]
        connection.execute(f"UPDATE {schema}.entry SET body = 'x'")  # type: ignore[attr-defined]

    monkeypatch.setattr(owner, "migrate", clumsy)
    with pytest.raises((LedgerUnsoundError, ValueError)):
        owner.upgrade_postgres(server.dsn(OWNER), "three")
    assert shown(server, "three") == said
    with contextlib.closing(open_read_only_postgres(server.dsn(WRITER), "three")) as disk:
        assert disk.form() == 1
