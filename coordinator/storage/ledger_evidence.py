"""Evidence of the ledger's earlier size: cosigned heads and admitted releases stored next to it.

A ledger that ends before one of them was rolled back, whatever its own file says. It is checked against them whenever
it is opened for writing, and by ``doctor``. Only a restore may continue without them: it opens a new epoch, and sets
older evidence aside.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from policies.ledger.merkle import Checkpoint, LedgerCheckpointError, open_checkpoint
from policies.ledger.store import LedgerTurnedBackError, LedgerUnsoundError, Store, turned_back

_SEALED: Final = ".envelope.json"  # of an update within a run's folder


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence, to be compared with a ledger that is read after it, so that a reader sees no newer evidence."""

    heads: tuple[tuple[str, str], ...]  # file's name, note
    releases: tuple[tuple[str, str, bytes], ...]  # folder's name, release, SHA-256 of its sealed statement


def collect(witnesses: Path, releases: Path) -> Evidence:
    """Read the cosigned heads, and the sealed statements on the shelf.

    Raises:
        LedgerUnsoundError: one of them cannot be read, so nobody can tell what the ledger held.
    """
    name = ""
    try:
        heads = []
        for path in sorted(witnesses.glob("*.note")):
            name = f"{witnesses.name}/{path.name}"
            heads.append((name, path.read_bytes().decode()))
        name = releases.name
        return Evidence(tuple(heads), tuple(_shelved(releases)))
    except (OSError, UnicodeDecodeError):
        raise LedgerUnsoundError(_unreadable(name)) from None


def _shelved(releases: Path) -> Iterator[tuple[str, str, bytes]]:
    for folder in sorted(releases.glob("[!.]*")):
        for path in (folder / "envelope.json", *sorted((folder / "updates").glob(f"*{_SEALED}"))):
            if path.exists():
                release = folder.name if path.parent == folder else path.name.removesuffix(_SEALED)
                yield folder.name, release, hashlib.sha256(path.read_bytes()).digest()


def _unreadable(name: str) -> str:
    return (
        f"{name} cannot be read, so nobody can tell whether the ledger lost entries: put it back from a backup, or "
        "move it away for the auditor and run `ledger restore`"
    )


def hold_against(store: Store, evidence: Evidence) -> tuple[int, int]:
    """Does the ledger hold all of it?

    Returns:
        How many cosigned heads and how many releases it was compared with; no head of an earlier epoch.
    Raises:
        LedgerTurnedBackError: it does not; the sentence says what it lacks, and what to do.
        LedgerUnsoundError: a head among it is none of this ledger's.
    """
    compared = 0
    for name, note in evidence.heads:
        try:
            head = open_checkpoint(note, store.public)
        except LedgerCheckpointError:
            raise LedgerUnsoundError(_unreadable(name)) from None
        if not _extends(store, head):
            raise LedgerTurnedBackError(turned_back(f"{name} is this ledger's own head at {head.size} entries"))
        compared += head.epoch == store.state.epoch
    for folder, release, envelope in evidence.releases:
        if not _admitted(store, release, envelope):
            raise LedgerTurnedBackError(turned_back(f"releases/{folder} was admitted, and is not in the ledger"))
    return compared, len(evidence.releases)


def _extends(store: Store, head: Checkpoint) -> bool:
    """Of an earlier epoch: a restore was interrupted before it set the note aside."""
    state = store.state
    if head.epoch < state.epoch:
        return True
    return (head.epoch, head.nonce) == (state.epoch, state.nonce) and store.holds(head)


def _admitted(store: Store, release: str, envelope: bytes) -> bool:
    known = store.state.releases.get(release)
    return known is not None and known.envelope == envelope


def set_aside(store: Store, releases: Path) -> tuple[str, ...]:
    """After a restore: what is on the shelf and not in the ledger gets a hidden name; never removed.

    Returns:
        The releases that were admitted after the backup.
    """
    lost = {folder for folder, release, sealed in _shelved(releases) if not _admitted(store, release, sealed)}
    for name in sorted(lost):
        hidden = f".{name}.before-{store.state.epoch}-{secrets.token_hex(4)}"
        (releases / name).rename(releases / hidden)
    return tuple(sorted(lost))
