"""Which form the database beneath a ledger has, which one this program writes, and what to do where they differ.

The form is how entries are kept, never what they say: entries, envelopes and heads are the same bytes in every form,
so whatever an older program signed stays verifiable. :mod:`policies.migrations` holds the steps from one form to the
next; this module is all of it that opening a ledger needs.
"""

from __future__ import annotations

from typing import Final

# 1: entries, envelopes, head. 2: says its form, and keeps its envelopes and its head. 3: has a high-water mark beside
# it (:mod:`policies.high_water_mark`; in PostgreSQL the head at the standby), without which it is not opened.
FORM: Final = 3
TABLE: Final = "form"  # Alembic's version table, under a name that says what it is


class WrongForm(RuntimeError):
    """The ledger's database was made by a newer program, or by an older one; the text says what to do."""


def readable(found: int) -> None:
    """Refuse a form that this program cannot know.

    Args:
        found: 0 for a database that holds nothing yet.
    Raises:
        WrongForm: it is newer.
    """
    if not found <= FORM:
        raise WrongForm(
            f"the ledger's database has form {found}, and this program knows forms up to {FORM}: a newer program has "
            "upgraded it, and there is no way back; install that one again"
        )


def writable(found: int) -> None:
    """Refuse to append to any form but this program's own.

    Raises:
        WrongForm: it is newer or older.
    """
    readable(found)
    if 0 < found < FORM:
        raise WrongForm(
            f"the ledger's database has form {found}, and this program writes form {FORM}: stop everything, "
            "and run `upgrade`, which makes a backup first"
        )


def number(text: object) -> int:
    """A form as a database says it.

    Raises:
        ValueError: it is none.
    """
    said = str(text)
    if not (said.isascii() and said.isdigit() and len(said) < 6):
        raise ValueError("not a form")
    return int(said)
