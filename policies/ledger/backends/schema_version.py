"""Which form the database beneath a ledger has, which one this program writes, and what to do where they differ.

The form is how entries are stored, not what they contain: entries, envelopes and heads are the same bytes in every
form, so signatures of an older program stay verifiable. :mod:`policies.ledger.backends.migrations` has the steps from
one form to the next; opening a ledger needs only this module.
"""

from __future__ import annotations

from typing import Final

from protos.common.errors import StorageError

# 1: entries, envelopes, head. 2: says its form, and keeps its envelopes and its head. 3: has a high-water mark beside
# it (:mod:`policies.ledger.backends.high_water_mark`; in PostgreSQL the head at the standby), without which it is not
# opened.
FORM: Final = 3
TABLE: Final = "form"  # of one row and one column, ``version_num``


class SchemaVersionError(StorageError, RuntimeError):
    """A newer or an older program made the ledger's database; the text says what to do."""


def require_readable(found: int) -> None:
    """Refuse a form that this program cannot know.

    Args:
        found: 0 for a database that holds nothing yet.
    Raises:
        SchemaVersionError: it is newer.
    """
    if not found <= FORM:
        raise SchemaVersionError(
            f"the ledger's database has form {found}, and this program knows forms up to {FORM}: a newer version has "
            "upgraded it, which cannot be undone; install that version again"
        )


def require_writable(found: int) -> None:
    """Refuse to append to any form but this program's own.

    Raises:
        SchemaVersionError: it is newer or older.
    """
    require_readable(found)
    if 0 < found < FORM:
        raise SchemaVersionError(
            f"the ledger's database has form {found}, and this program writes form {FORM}: stop everything, "
            "and run `upgrade`, which makes a backup first"
        )


def parse_version(text: object) -> int:
    """A form as a database says it.

    Raises:
        ValueError: it is none.
    """
    said = str(text)
    if not (said.isascii() and said.isdigit() and len(said) < 6):
        raise ValueError("not a form")
    return int(said)
