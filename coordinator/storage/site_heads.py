"""The newest head of each site's own ledger, as the site showed it: the coordinator notices when a site goes back.

A hospital's machine that is turned back whole finds nothing wrong with itself: ledger, mark and vault agree. What it
showed here does not go back with it. Such a site is refused until its ledger extends that head again, or until its
own ``restore`` opened a new epoch, which its tree has to record.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from coordinator.edges.home import write_durably
from policies.merkle import BadCheckpoint, Checkpoint, consistent, open_checkpoint
from policies.proof import restore_that_opened
from policies.statement import ID

_MOST_RESTORES: Final = 1000  # that are remembered of one site; more is no honest number


class SiteTurnedBackError(ValueError):
    """The site's own ledger is behind the head that it showed before, or went another way since."""


@dataclass(frozen=True, slots=True)
class ShownHead:
    """What a site shows of its own ledger."""

    note: str  # signed by the site's key
    since: int  # the size from which the proof leads
    proof: Sequence[bytes]
    restored: bytes = b""  # epoch > 1: the entry that opened it,
    restored_at: int = -1  # its place,
    restored_proof: Sequence[bytes] = ()  # and the proof that the tree holds it there


@dataclass(frozen=True, slots=True)
class _Kept:
    """A site's file."""

    key: str  # the site's signing key, hexadecimal: one that was enrolled with another begins anew
    note: str  # the newest head
    restores: list[str]  # the nonces of all restores that were ever shown: none of them is a new one
    behind: bool = False  # the site showed an older one since


class SiteHeads:
    """A folder with a file for each site, which this process alone writes."""

    def __init__(self, root: Path) -> None:
        """``root`` is made when the first head comes."""
        self._root, self._one = root, threading.Lock()
        self._read: dict[str, _Kept] = {}  # each file is read once

    def seen(self, site: str, key: bytes) -> int:
        """The size of the newest head that is kept of a site's own ledger; 0 for none.

        Args:
            site: its name.
            key: the signing key that it is enrolled with, Ed25519, raw.
        Raises:
            SiteTurnedBackError: the file cannot be read, so nothing can be compared with it.
        """
        with self._one:
            known = self._kept(site, key)
            return open_checkpoint(known.note, key).size if known else 0

    def take(self, site: str, key: bytes, shown: ShownHead) -> None:
        """Keep a head that extends the one before, or begins an epoch with a new restore; durable when this returns.

        Raises:
            SiteTurnedBackError: it does neither; the site stays refused until it shows one that does.
        """
        head = self._opened(site, key, shown.note)
        with self._one:
            known = self._kept(site, key)
            if known is None:
                nonces = [head.nonce] if head.nonce else []
                self._write(site, _Kept(key.hex(), shown.note, nonces))
                return
            before = open_checkpoint(known.note, key)
            if (head.epoch, head.nonce) != (before.epoch, before.nonce):
                self._take_restored(site, known, head, shown)
            elif (head.size, head.root) == (before.size, before.root):
                if known.behind:
                    self._write(site, replace(known, behind=False))
            elif head.size <= before.size or (shown.since == before.size and not _extends(before, head, shown)):
                self._refuse(site, known)
            elif shown.since == before.size:
                self._write(site, replace(known, note=shown.note, behind=False))
            # else the proof leads from another head than the one kept by now: it says nothing, and is shown again

    def refused(self, site: str, key: bytes) -> str:
        """Why nothing is taken from this site now; "" when there is no reason."""
        try:
            with self._one:
                known = self._kept(site, key)
        except SiteTurnedBackError as error:
            return str(error)
        return _advice() if known is not None and known.behind else ""

    def behind(self) -> tuple[str, ...]:
        """The sites that are refused, sorted; also those whose file cannot be read."""
        found = []
        for path in sorted(self._root.glob("*.json")):
            try:
                wrong = _Kept(**json.loads(path.read_bytes())).behind
            except (OSError, ValueError, TypeError, RecursionError):
                wrong = True
            if wrong:
                found.append(path.stem)
        return tuple(found)

    def _opened(self, site: str, key: bytes, note: str) -> Checkpoint:
        try:
            head = open_checkpoint(note, key)
        except BadCheckpoint:
            raise SiteTurnedBackError("the head of this site's own ledger is not signed by its key") from None
        if head.origin != f"lazaret/{site}":
            raise SiteTurnedBackError("the head is of another ledger than this site's own")
        return head

    def _take_restored(self, site: str, known: _Kept, head: Checkpoint, shown: ShownHead) -> None:
        opened = restore_that_opened(head, shown.restored, shown.restored_at, shown.restored_proof)
        if opened is None or head.nonce in known.restores or len(known.restores) >= _MOST_RESTORES:
            self._refuse(site, known)
        self._write(site, replace(known, note=shown.note, restores=[*known.restores, head.nonce], behind=False))

    def _refuse(self, site: str, known: _Kept) -> None:
        self._write(site, replace(known, behind=True))
        raise SiteTurnedBackError(_advice())

    def _path(self, site: str) -> Path:
        assert ID.fullmatch(site), "a peer's name was checked when its certificate was read"
        return self._root / f"{site}.json"

    def _kept(self, site: str, key: bytes) -> _Kept | None:
        path, known = self._path(site), self._read.get(site)
        if known is not None and known.key == key.hex():
            return known
        try:
            known = _Kept(**json.loads(path.read_bytes()))
            if known.key != key.hex():  # persons enrolled it anew, with another directory
                return None
            open_checkpoint(known.note, key)
            self._read[site] = known
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError):
            raise SiteTurnedBackError(
                f"the coordinator cannot read {self._root.name}/{path.name}, so it cannot compare this site's ledger "
                "with what it showed before: its operator has to put that file back from a backup"
            ) from None
        return known

    def _write(self, site: str, kept: _Kept) -> None:
        self._root.mkdir(mode=0o700, exist_ok=True)
        write_durably(self._path(site), (json.dumps(asdict(kept), indent=2) + "\n").encode())
        self._read[site] = kept


def _extends(before: Checkpoint, head: Checkpoint, shown: ShownHead) -> bool:
    return consistent(before.size, before.root, head.size, head.root, shown.proof)


def _advice() -> str:
    return (
        "this site's own ledger is behind the head that it showed before, so the site was turned back, and nothing "
        "is taken from it. Run `lazaret-agent restore`, which opens a new epoch: deploy/docs/restore.md"
    )
