"""The one place for what was refused: sealed files, the reason and the number of attempts in their names.

A move is a renaming, a count is a listing, and there is no index that could disagree with the folder.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.deidentify.errors import REASONS
from agent.storage.spool import HEAD_BYTES, ReceivedFile, Spool, SpoolError, checked, new_name
from protos.common.durable_files import flush_directory

_REFUSED: Final = re.compile(r"([0-9a-f]{32})\.([a-z_]{1,40})\.([0-9]{1,3})")
# refused for how it came: the same instance may come whole another time
_MAY_COME_BETTER: Final = frozenset(
    {
        "conflicting_instance",
        "instance_mismatch",
        "malformed",
        "not_dicom",
        "parser_stopped",
        "truncated",
        "undecodable",
    }
    | {"unreadable", "unsupported_encoding"}
)


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """One refused file: its name in the quarantine, why, and how often it was tried."""

    name: str
    code: str  # a key of REASONS
    attempts: int


class Quarantine(Spool):
    """The one place for what was refused: one file each, named NAME.CODE.ATTEMPTS. Nothing leaves it by itself."""

    def __init__(self, folder: Path, key: bytes, *, attempts: int = 3) -> None:
        """``attempts``: how often one file is read before only a person can have it tried again."""
        super().__init__(folder, key)
        self.most = attempts
        self._listed: dict[str, QuarantineEntry] = {}
        self._changed = -1  # when the folder had last changed as it is listed here

    def _list(self) -> dict[str, QuarantineEntry]:
        """All entries by name; the folder is read again only when somebody else has changed it."""
        changed = self.folder.stat().st_mtime_ns
        if changed != self._changed:
            matches = (_REFUSED.fullmatch(name) for name in sorted(os.listdir(self.folder)))
            self._listed = {m[1]: QuarantineEntry(m[1], m[2], int(m[3])) for m in matches if m is not None}
            self._changed = changed
        return self._listed

    def _note(self, name: str, entry: QuarantineEntry | None) -> None:
        """What this process has just changed: a list of many files is not read again for it."""
        self._listed.pop(name, None)
        if entry is not None:
            self._listed[name] = entry
        self._changed = self.folder.stat().st_mtime_ns

    def _find(self, name: str) -> Path | None:
        entry = self.entry(name)
        return self.folder / f"{entry.name}.{entry.code}.{entry.attempts}" if entry else None

    def entries(self) -> list[QuarantineEntry]:
        """All that is here, in the order of names."""
        return list(self._list().values())

    def counts(self) -> dict[str, int]:
        """Files by reason code, in code order."""
        return dict(sorted(Counter(e.code for e in self._list().values()).items()))

    def entry(self, name: str) -> QuarantineEntry | None:
        """The entry of that name, or None."""
        return self._list().get(checked(name))

    def holds(self, instance: str, senders: Iterable[tuple[str, str]]) -> bool:
        """Was the instance of a SOP Instance UID, as one of these sent it, refused for what it is?

        What was refused because it was cut, unreadable or another object than announced may be asked for again.
        """
        marks = {self._mark(instance, road, source) for road, source in senders}
        return any(e.name[:16] in marks and e.code not in _MAY_COME_BETTER for e in self._list().values())

    def _mark(self, instance: str, road: str, source: str) -> str:
        return self.named(instance, road, source)[:16]

    def name_of(self, place: str, arrival: ReceivedFile | None, digest: str) -> str:
        """The keyed name of a rejected file: from its path, else from its sender, instance and digest."""
        if place:
            return self._sealer.name_of("place", place)
        mine = self._sealer.name_of("digest", digest)
        if arrival is None or not arrival.instance:
            return mine
        return self._mark(arrival.instance, arrival.road, arrival.source) + mine[:16]

    def refuse(self, name: str, code: str, arrival: ReceivedFile, digest: str = "") -> None:
        """Write down that a file was refused, once more if it was before. Durable when this returns.

        Args:
            name: 32 hex characters; the same file must come under the same name.
            code: a key of ``REASONS``.
            arrival: with an empty body when the file stays where it lies.
            digest: keyed, of its bytes: other bytes at the same place are counted from one again.
        """
        found = self._find(name)
        if found is not None and self.digest(name) == digest:
            self.record_retry(name, code)
            return
        if found is not None:
            if arrival.body:
                raise SpoolError("two files of one name in quarantine")  # names of what is kept here hold its digest
            found.unlink()  # other bytes came to a place in a folder since
        self._write(name, self._sealer.seal(name, arrival, digest), f"{checked(name)}.{_known(code)}.1")
        self._note(name, QuarantineEntry(name, code, 1))

    def record_retry(self, name: str, code: str) -> None:
        """Count one more attempt on a file that is here, with its newest reason."""
        entry, found = self.entry(name), self._find(name)
        if entry is not None and found is not None:
            tried = min(entry.attempts + 1, 999)
            found.rename(self.folder / f"{name}.{_known(code)}.{tried}")
            flush_directory(self.folder)
            self._note(name, QuarantineEntry(name, code, tried))

    def move_from(self, room: Spool, name: str, code: str) -> None:
        """Move what cannot be unsealed here from its room, as it is, in one step and under a new name."""
        here = new_name()
        (room.folder / checked(name)).rename(self.folder / f"{here}.{_known(code)}.1")
        flush_directory(self.folder)
        self._note(here, QuarantineEntry(here, code, 1))

    def open(self, name: str) -> ReceivedFile:
        """One refused file.

        Raises:
            SpoolError: the file was changed, or is another key's.
            FileNotFoundError: there is none of that name.
        """
        return self._sealer.open(name, self._existing(name).read_bytes())

    def source(self, name: str) -> tuple[str, str]:
        """Road and source of a refused file: for the site's IT alone, since a path may name a patient."""
        told = self._told(name)
        return told["road"], told["source"].encode("utf-8", "replace").decode()

    def digest(self, name: str) -> str:
        """The keyed digest of a refused file's bytes, as far as it is known."""
        return str(self._told(name)["digest"])

    def _told(self, name: str) -> dict[str, Any]:
        with self._existing(name).open("rb") as stream:
            return self._sealer.head(name, stream.read(HEAD_BYTES))[0]

    def _existing(self, name: str) -> Path:
        found = self._find(name)
        if found is None:
            raise FileNotFoundError(f"nothing in quarantine is called {name}")
        return found

    def remove(self, name: str) -> None:
        """Forget an entry: it came in after all, or a person gave it up."""
        found = self._find(name)
        if found is not None:
            found.unlink(missing_ok=True)
            self._note(name, None)

    def spent(self, name: str, digest: str) -> QuarantineEntry | None:
        """The entry of a file that was tried as often as may be, or None; other bytes at its place may be tried."""
        entry = self.entry(name)
        if entry is None or entry.attempts < self.most or self.digest(name) != digest:
            return None
        return entry


def _known(code: str) -> str:
    if code not in REASONS:
        raise ValueError("unknown reason code")
    return code
