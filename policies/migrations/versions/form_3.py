"""Form 3: a high-water mark beside the ledger's file, which :mod:`policies.migrations.upgrade` makes.

No table changes. The number does, so that a program that writes no mark appends no more, and so that a mark that is
missing is a fault and not an older version's home.
"""

from __future__ import annotations

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Nothing in the tables; Alembic's own says the form."""
