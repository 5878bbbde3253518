"""The newest head of each site's own ledger, as the site showed it: the coordinator notices when a site goes back.

A hospital's machine that is rolled back as a whole finds no fault in itself: ledger, mark and vault agree. The heads
it showed here are not rolled back with it. Such a site is refused until its ledger extends that head again, or until
its own ``restore`` opened a new epoch, which its tree must record. A site that has shown a head and now sends none,
or one that cannot be compared, must show it before any other request. :class:`coordinator.gateway.service.Service`
decides which calls must include a head.

This is held against an honest program on a machine that was turned back. Whoever alters the program, and keeps the
newer ledger aside, can show that one's head.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from policies.audit.inclusion_proof import restore_that_opened
from policies.ledger.merkle import Checkpoint, LedgerCheckpointError, open_checkpoint, verify_consistency
from policies.statements import ID
from protos.common.durable_files import replace_file
from protos.common.errors import RefusedError

_MOST_RESTORES: Final = 1000  # that are remembered of one site; more is no honest number


class SiteTurnedBackError(RefusedError, ValueError):
    """The site's own ledger is behind the head that it showed before, or went another way since."""


class BadHeadError(SiteTurnedBackError):
    """Undecidable: the submitted head is not of the site's own ledger, or the stored one cannot be read."""


class HeadNotShownError(RefusedError, ValueError):
    """The site has shown a head before, and none since that could be compared with it; it may show it now."""


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
    unshown: bool = False  # it came since without one that can be compared
    told: bool = False  # that it is behind stands in the ledger


class SiteHeads:
    """A folder with a file for each site, which this process alone writes."""

    def __init__(self, root: Path) -> None:
        """``root`` is made when the first head comes."""
        self._root, self._one, self._telling = root, threading.Lock(), threading.Lock()
        self._read: dict[str, _Kept] = {}  # each file is read once

    def seen(self, site: str, key: bytes) -> int:
        """The size of the newest head that is kept of a site's own ledger; 0 for none.

        Args:
            site: its name.
            key: the signing key that it is enrolled with, Ed25519, raw.
        Raises:
            BadHeadError: the file cannot be read, so nothing can be compared with it.
        """
        with self._one:
            known = self._kept(site, key)
            return open_checkpoint(known.note, key).size if known else 0

    def take(self, site: str, key: bytes, shown: ShownHead) -> None:
        """Keep a head that extends the one before, or begins an epoch with a new restore; durable when this returns.

        Raises:
            SiteTurnedBackError: it does neither; the site stays refused until it shows one that does.
            BadHeadError: it is no head of this site's own ledger, or the kept one cannot be read.
            HeadNotShownError: the proof leads from another head than the one kept by now, as when another call of the
                site overtook this one.
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
                if known.behind or known.unshown:
                    self._write(site, _good(known, known.note))
            elif shown.since != before.size:
                self._wait_for(site, known)
                raise HeadNotShownError(to_show(before.size))
            elif head.size <= before.size or not _extends(before, head, shown):
                self._refuse(site, known)
            else:
                self._write(site, _good(known, shown.note))

    def unshown(self, site: str, key: bytes) -> None:
        """The site came without a head; where one is kept it has to show one before anything is taken; durable.

        Raises:
            BadHeadError: the file cannot be read.
        """
        with self._one:
            known = self._kept(site, key)
            if known is not None:
                self._wait_for(site, known)

    def to_show(self, site: str, key: bytes) -> int:
        """From so many entries on the site has to show its head before anything is taken; 0: it has.

        Raises:
            BadHeadError: the file cannot be read.
        """
        with self._one:
            known = self._kept(site, key)
            return open_checkpoint(known.note, key).size if known is not None and known.unshown else 0

    def refused(self, site: str, key: bytes) -> str:
        """Why nothing is taken from this site now; "" when there is no reason."""
        try:
            with self._one:
                known = self._kept(site, key)
        except SiteTurnedBackError as error:
            return str(error)
        return _advice() if known is not None and known.behind else ""

    def tell(self, site: str, key: bytes, write: Callable[[], bool]) -> None:
        """Have it written down, once, that a site is behind.

        Args:
            site: its name.
            key: the signing key that it is enrolled with, Ed25519, raw.
            write: writes it; False: it could not be written, so the next refusal tries again. After a crash between
                the two it is written a second time, and not never.
        Raises:
            BadHeadError: the file cannot be read.
        """
        with self._telling:
            with self._one:
                known = self._kept(site, key)
            if known is None or not known.behind or known.told or not write():
                return
            with self._one:
                known = self._kept(site, key)
                if known is not None and known.behind:
                    self._write(site, replace(known, told=True))

    def behind(self, keys: Mapping[str, bytes]) -> tuple[str, ...]:
        """The sites that are refused, sorted; also those whose file cannot be read.

        Args:
            keys: the signing key, Ed25519, raw, of each site that may take part: other files are passed over.
        """
        return tuple(site for site, kept in self._all(keys) if kept is None or kept.behind)

    def awaited(self, keys: Mapping[str, bytes]) -> tuple[str, ...]:
        """The sites that came without a head since, and have to show one; sorted, without those of :meth:`behind`."""
        return tuple(s for s, kept in self._all(keys) if kept is not None and kept.unshown and not kept.behind)

    def _all(self, keys: Mapping[str, bytes]) -> Iterator[tuple[str, _Kept | None]]:
        """Every site with a file, sorted; None: it cannot be read."""
        for site, key in sorted(keys.items()):
            try:
                kept = _Kept(**json.loads(self._path(site).read_bytes()))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError, RecursionError):
                yield site, None
                continue
            if kept.key == key.hex():
                yield site, kept

    def _opened(self, site: str, key: bytes, note: str) -> Checkpoint:
        try:
            head = open_checkpoint(note, key)
        except LedgerCheckpointError:
            raise BadHeadError("the head of this site's own ledger is not signed by its key") from None
        if head.origin != f"lazaret/{site}":
            raise BadHeadError("the head is of another ledger than this site's own")
        return head

    def _take_restored(self, site: str, known: _Kept, head: Checkpoint, shown: ShownHead) -> None:
        opened = restore_that_opened(head, shown.restored, shown.restored_at, shown.restored_proof)
        if opened is None or head.nonce in known.restores or len(known.restores) >= _MOST_RESTORES:
            self._refuse(site, known)
        restores = [*known.restores, head.nonce]
        self._write(site, replace(_good(known, shown.note), restores=restores))

    def _refuse(self, site: str, known: _Kept) -> None:
        if not known.behind:
            self._write(site, replace(known, behind=True))
        raise SiteTurnedBackError(_advice())

    def _wait_for(self, site: str, known: _Kept) -> None:
        if not known.unshown:
            self._write(site, replace(known, unshown=True))

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
            raise BadHeadError(
                f"the coordinator cannot read {self._root.name}/{path.name}, so it cannot compare this site's ledger "
                "with what it showed before: its operator has to put that file back from a backup"
            ) from None
        return known

    def _write(self, site: str, kept: _Kept) -> None:
        self._root.mkdir(mode=0o700, exist_ok=True)
        replace_file(self._path(site), (json.dumps(asdict(kept), indent=2) + "\n").encode())
        self._read[site] = kept


def _good(known: _Kept, note: str) -> _Kept:
    """Nothing speaks against the site any more: its newest head is this one."""
    return replace(known, note=note, behind=False, unshown=False, told=False)


def _extends(before: Checkpoint, head: Checkpoint, shown: ShownHead) -> bool:
    return verify_consistency(before.size, before.root, head.size, head.root, shown.proof)


def to_show(size: int) -> str:
    """What a site is told that has to show its head."""
    return f"this site has shown the head of its own ledger before: show it again, from {size} entries on"


def _advice() -> str:
    return (
        "this site's own ledger is behind the head that it showed before: the site was turned back to an older copy. "
        "The coordinator takes nothing from it. Run `lazaret-agent restore`, which opens a new epoch: "
        "deploy/docs/restore.md"
    )
