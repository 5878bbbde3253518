"""Bring a ledger in PostgreSQL to this program's form, as its owner: one transaction, compared before its commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import sqlalchemy
from psycopg import sql

from policies.forms import FORM, readable
from policies.migrations.upgrade import Upgraded, migrate, said
from policies.postgres import PAGE, connect, form_of, lock_of, schema_of
from policies.store import Head, LedgerBusy, LedgerUnsound


@dataclass(frozen=True, slots=True)
class _Seen:
    """A ledger's rows within one transaction, to be compared."""

    db: psycopg.Connection[Any]
    schema: str

    def _stream(self, table: str, key: str) -> Iterator[bytes]:
        query = sql.SQL("SELECT body FROM {} ORDER BY {}")
        with self.db.cursor(f"every_{table}") as cursor:  # named: on the server, a page at a time
            cursor.itersize = PAGE
            for (body,) in cursor.execute(query.format(sql.Identifier(self.schema, table), sql.Identifier(key))):
                yield bytes(body)

    def bodies(self) -> Iterator[bytes]:
        """All entries."""
        yield from self._stream("entry", "seq")

    def envelopes(self) -> Iterator[bytes]:
        """All of them."""
        yield from self._stream("envelope", "digest")

    def head(self) -> Head | None:
        """The head of the last commit."""
        query = sql.SQL("SELECT size, root, seal FROM {}").format(sql.Identifier(self.schema, "head"))
        rows = self.db.execute(query).fetchall()
        if len(rows) != 1:
            raise LedgerUnsound("the ledger's head is missing or there are two")
        found = Head(rows[0][0], bytes(rows[0][1]), bytes(rows[0][2]))
        return None if found == Head(0, b"", b"") else found


def upgrade_postgres(dsn: str, ledger: str = "main") -> Upgraded:
    """Upgrade an installed ledger in one transaction, or find that there is nothing to do.

    Args:
        dsn: address of the database, as the role that owns the ledger.
        ledger: its name.
    Raises:
        LedgerBusy: a coordinator has it open.
        WrongForm: a newer program made it.
        LedgerUnsound: its entries are not those under its head; nothing was changed.
        ValueError, ConnectionError: the address, the role or the server will not do.
    """
    schema = schema_of(ledger)
    with contextlib.closing(connect(dsn, autocommit=False)) as db:
        try:
            return _upgraded(db, schema)
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:  # their texts may quote a row
            state = getattr(getattr(error, "orig", error), "sqlstate", "")
            raise ValueError(
                f"PostgreSQL refused (SQLSTATE {state}), nothing was changed; is this the role that owns the ledger?"
            ) from None


def _upgraded(db: psycopg.Connection[Any], schema: str) -> Upgraded:
    ((free,),) = db.execute("SELECT pg_try_advisory_xact_lock(%s)", (lock_of(schema),)).fetchall()
    if not free:
        raise LedgerBusy("a coordinator is writing this ledger; stop it first")
    form = form_of(lambda query, values=(): db.execute(query, values or None).fetchall(), schema)
    readable(form)
    if not form:
        raise ValueError("no ledger of that name is installed there")
    before = said(_Seen(db, schema))
    if (before.head.size, before.head.root) != (before.size, before.root) if before.head else before.size:
        raise LedgerUnsound("the entries are not the ones under the ledger's head; nothing was changed")
    if form < FORM:
        engine = sqlalchemy.create_engine(
            "postgresql+psycopg://", creator=lambda: db, poolclass=sqlalchemy.StaticPool, use_native_hstore=False
        )
        with engine.connect() as connection:
            migrate(connection, form, schema)
            if said(_Seen(db, schema)) != before:
                raise LedgerUnsound("the ledger would say something else afterwards; nothing was changed")
            db.commit()
    return Upgraded(form, FORM, before.size, before.root)
