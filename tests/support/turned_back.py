"""Ledgers that were turned back, for tests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from policies.sqlite import look, mark_of


def marked_as_it_is(path: Path) -> None:
    """Have the mark beside a ledger's file say what the file says, as where the whole machine was turned back."""
    with contextlib.closing(look(path)) as disk, contextlib.closing(mark_of(path)) as mark:
        head = disk.head()
        assert head is not None
        mark.begin(head)
