"""Bring a ledger in PostgreSQL to this program's form, as its owner: one transaction, compared before its commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from policies.ledger.backends.migrations.steps import postgres_steps
from policies.ledger.backends.migrations.upgrade import Upgraded, summarise
from policies.ledger.backends.postgres import PAGE, form_of, lock_of, schema_of
from policies.ledger.backends.postgres_connection import connect
from policies.ledger.backends.schema_version import FORM, require_readable
from policies.ledger.store import LedgerBusyError, LedgerUnsoundError, SealedHead


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

    def head(self) -> SealedHead | None:
        """The head of the last commit."""
        query = sql.SQL("SELECT size, root, seal FROM {}").format(sql.Identifier(self.schema, "head"))
        rows = self.db.execute(query).fetchall()
        if len(rows) != 1:
            raise LedgerUnsoundError("the ledger's head is missing or there are two")
        found = SealedHead(rows[0][0], bytes(rows[0][1]), bytes(rows[0][2]))
        return None if found == SealedHead(0, b"", b"") else found


def upgrade_postgres(dsn: str, ledger: str = "main") -> Upgraded:
    """Upgrade an installed ledger in one transaction, or find that there is nothing to do.

    Args:
        dsn: address of the database, as the role that owns the ledger.
        ledger: its name.
    Raises:
        LedgerBusyError: a coordinator has it open.
        SchemaVersionError: a newer program made it.
        LedgerUnsoundError: its entries are not those under its head; nothing was changed.
        ValueError, ConnectionError: the address, the role or the server will not do.
    """
    schema = schema_of(ledger)
    with contextlib.closing(connect(dsn, autocommit=False)) as db:
        try:
            return _upgraded(db, schema)
        except psycopg.Error as error:  # its text may quote a row
            state = error.sqlstate or ""
            raise ValueError(
                f"PostgreSQL refused (SQLSTATE {state}), nothing was changed; connect as the ledger's owner"
            ) from None


def migrate(db: psycopg.Connection[Any], form: int, schema: str) -> None:
    """The steps from a form to this program's, in the open transaction."""
    for statement in postgres_steps(form, schema):
        db.execute(statement.encode())


def _upgraded(db: psycopg.Connection[Any], schema: str) -> Upgraded:
    ((free,),) = db.execute("SELECT pg_try_advisory_xact_lock(%s)", (lock_of(schema),)).fetchall()
    if not free:
        raise LedgerBusyError("a coordinator is writing this ledger; stop it first")
    form = form_of(lambda query, values=(): db.execute(query, values or None).fetchall(), schema)
    require_readable(form)
    if not form:
        raise ValueError("no ledger of that name is installed there")
    before = summarise(_Seen(db, schema))
    if (before.head.size, before.head.root) != (before.size, before.root) if before.head else before.size:
        raise LedgerUnsoundError("the entries are not the ones under the ledger's head; nothing was changed")
    if form < FORM:
        migrate(db, form, schema)
        if summarise(_Seen(db, schema)) != before:
            raise LedgerUnsoundError("the ledger would say something else afterwards; nothing was changed")
        db.commit()
    return Upgraded(form, FORM, before.size, before.root)
