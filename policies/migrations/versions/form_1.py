"""Form 1: entries in their order, envelopes by their digest, the head of the last commit."""

from __future__ import annotations

from typing import Final

from alembic import op

revision = "1"
down_revision = None

_SQLITE: Final = (
    "CREATE TABLE entry(seq INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT",
    "CREATE TABLE envelope(digest BLOB PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE head(one INTEGER PRIMARY KEY CHECK(one = 1), size INTEGER NOT NULL, root BLOB NOT NULL,\n"
    "  seal BLOB NOT NULL) STRICT",
    "CREATE TRIGGER entry_is_kept BEFORE DELETE ON entry BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "CREATE TRIGGER entry_is_fixed BEFORE UPDATE ON entry BEGIN SELECT RAISE(ABORT, 'append-only'); END",
)


def upgrade() -> None:
    """Make the tables; in PostgreSQL ``ledger install`` makes them, with the roles that only it knows."""
    if op.get_context().dialect.name == "sqlite":
        for statement in _SQLITE:
            op.execute(statement)
