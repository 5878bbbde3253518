"""The SQL that turns one form of a ledger's database into the next; nothing of it is imported to open a ledger.

Form 2: the database states its form in the table ``form``, and SQLite stores envelopes and the head as PostgreSQL
always did. Form 3: a high-water mark next to the ledger's file, which
:mod:`policies.ledger.backends.migrations.upgrade` creates. No table changes for it; the number changes, so that a
program that writes no mark can no longer append, and a missing mark is an error and not taken for an older version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from policies.ledger.backends.schema_version import FORM

_COLUMNS: Final = "(version_num VARCHAR(32) NOT NULL, CONSTRAINT form_pkc PRIMARY KEY (version_num))"
_SQLITE_2: Final = (
    f"CREATE TABLE form{_COLUMNS}",
    "INSERT INTO form VALUES('1')",
    "CREATE TRIGGER envelope_is_kept BEFORE DELETE ON envelope\n  BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "CREATE TRIGGER envelope_is_fixed BEFORE UPDATE ON envelope\n  BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "CREATE TRIGGER head_is_kept BEFORE DELETE ON head BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "CREATE TRIGGER head_grows BEFORE UPDATE ON head WHEN NEW.size < OLD.size\n"
    "  BEGIN SELECT RAISE(ABORT, 'a head only grows'); END",
)
# Who may read the head may read the form. A schema's name has no quotes (postgres.schema_of).
_POSTGRES_2: Final = (
    f'CREATE TABLE "SCHEMA".form{_COLUMNS}',
    "INSERT INTO \"SCHEMA\".form VALUES('1')",
    """
DO $$ DECLARE reader text; BEGIN
  FOR reader IN SELECT DISTINCT g.grantee FROM information_schema.role_table_grants g
    WHERE g.table_schema = 'SCHEMA' AND g.table_name = 'head' AND g.privilege_type = 'SELECT'
  LOOP EXECUTE format('GRANT SELECT ON "SCHEMA".form TO %I', reader); END LOOP;
END $$""",
)


def sqlite_steps(form: int) -> Iterator[str]:
    """The statements from a form to this program's, for one transaction."""
    if form < 2:
        yield from _SQLITE_2
    yield f"UPDATE form SET version_num = '{FORM}'"  # noqa: S608 - a constant


def postgres_steps(form: int, schema: str) -> Iterator[str]:
    """The same for a ledger in PostgreSQL, whose tables lie in ``schema``."""
    if form < 2:
        yield from (statement.replace("SCHEMA", schema) for statement in _POSTGRES_2)
    yield f"UPDATE \"{schema}\".form SET version_num = '{FORM}'"  # noqa: S608 - of postgres.schema_of
