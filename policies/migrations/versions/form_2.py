"""Form 2: the database says its form, and SQLite keeps envelopes and the head as PostgreSQL always did."""

from __future__ import annotations

from typing import Final

from alembic import op

revision = "2"
down_revision = "1"

_SQLITE: Final = (
    "CREATE TRIGGER envelope_is_kept BEFORE DELETE ON envelope\n  BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "CREATE TRIGGER envelope_is_fixed BEFORE UPDATE ON envelope\n  BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "CREATE TRIGGER head_is_kept BEFORE DELETE ON head BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "CREATE TRIGGER head_grows BEFORE UPDATE ON head WHEN NEW.size < OLD.size\n"
    "  BEGIN SELECT RAISE(ABORT, 'a head only grows'); END",
)
_READERS: Final = """
DO $$ DECLARE reader text; BEGIN
  FOR reader IN SELECT DISTINCT g.grantee FROM information_schema.role_table_grants g
    WHERE g.table_schema = '{schema}' AND g.table_name = 'head' AND g.privilege_type = 'SELECT'
  LOOP EXECUTE format('GRANT SELECT ON "{schema}".form TO %I', reader); END LOOP;
END $$"""


def upgrade() -> None:
    """Add what is missing. The table that says the form is Alembic's own, which has made it by now."""
    context = op.get_context()
    if context.dialect.name == "sqlite":
        for statement in _SQLITE:
            op.execute(statement)
    else:  # who may read the head may read the form; a schema's name has no quotes, see policies.postgres.schema_of
        op.execute(_READERS.format(schema=context.version_table_schema))
