"""The heads that sites have cosigned, one file a site: who saw the ledger at which size, for auditors."""

from __future__ import annotations

import threading
from pathlib import Path

from policies.statements import ID
from protos.common.durable_files import replace_file


class Witnesses:
    """A directory of signed notes, each with one site's cosignature."""

    def __init__(self, root: Path) -> None:
        """``root`` is made when the first note comes."""
        self._root, self._one = root, threading.Lock()

    def keep(self, site: str, note: str) -> None:
        """Replace the site's note by one of a larger ledger; an older one is no news."""
        assert ID.fullmatch(site), "a peer's name was checked when its certificate was read"
        path = self._root / f"{site}.note"
        with self._one:
            if path.exists() and not _newer(note, path.read_text()):
                return
            self._root.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, note.encode())

    def notes(self) -> tuple[str, ...]:
        """All of them, by site."""
        return tuple(path.read_text() for path in sorted(self._root.glob("*.note")))

    def forget(self, epoch: int) -> None:
        """At a restore: what sites cosigned before this epoch is set aside, never removed."""
        for path in self._root.glob("*.note"):
            path.rename(path.with_suffix(f".before-{epoch}"))


def _newer(note: str, kept: str) -> bool:
    """After another restore, or of a larger ledger."""
    ours, theirs = note.split("\n"), kept.split("\n")
    return ours[3] != theirs[3] or int(ours[1]) > int(theirs[1])
