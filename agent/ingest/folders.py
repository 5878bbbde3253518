"""Ingest from a folder: an export, a watched share, a medium with a DICOMDIR, a BIDS dataset, a MONAI data list.

The folder is only read. ``watchdog`` was rejected for watching: the shares of hospitals (NFS, SMB) send no inotify
events, so a look every few seconds it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.deidentify.errors import FileRejectedError
from agent.file_access import contents, walk
from agent.ingest.nifti_pairs import MaskOf
from agent.ingest.patient_lists import Columns, Lists
from agent.ingest.pending import Refusal
from agent.storage.quarantine import Quarantine
from agent.storage.spool import MaskedVolume, ReceivedFile

DICOMDIR: Final = "DICOMDIR"
# beside the volumes of a BIDS dataset (BIDS 1.10): tables and texts, no images
_SIDECARS: Final = (".json", ".tsv", ".tsv.gz", ".bval", ".bvec", ".md", ".txt")
_BIDS_TEXTS: Final = frozenset({"README", "CHANGES", "LICENSE", "CITATION.cff", ".bidsignore"})


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that images come from, as ``ingest.toml`` names it."""

    path: Path
    columns: Columns = field(default_factory=Columns)
    watch: bool = False  # `serve` looks again and again
    settle_s: float = 10.0  # a watched file is read when it has not changed for so long

    def __post_init__(self) -> None:
        """Times are positive."""
        if not 0 < self.settle_s < float("inf"):
            raise ValueError("settle_seconds must be positive")


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file in a folder. Ingest never removes it."""

    folder: Path
    path: str  # below the folder
    lists: Lists
    max_bytes: int

    @property
    def place(self) -> str:
        """Its path below the folder."""
        return f"folder\0{self.folder}\0{self.path}"

    def load(self) -> ReceivedFile:
        """Read it, and say whose it is by the hospital's lists."""
        inside = self.path.replace(os.sep, "/")
        mask = self.lists.masks.get(inside)
        return ReceivedFile(
            road="folder",
            source=self.path,
            body=contents(self.folder / self.path, self.max_bytes),
            patient_id=self.lists.patients.get(inside, ""),
            issuer=self.lists.issuer,
            label="" if mask else self.lists.labels.get(inside, ""),
            mask_of=self._volume_of(mask) if mask else None,
        )

    def _volume_of(self, mask: MaskOf) -> MaskedVolume:
        if not mask.volume or not (self.folder / mask.volume).is_file():
            raise FileRejectedError("mask_without_volume")
        return MaskedVolume(contents(self.folder / mask.volume, self.max_bytes), mask.segment)

    def looks(self) -> tuple[tuple[int, int], ...]:
        """Size and time of change (ns) of what is read: the file, and of a mask the volume, once that is there.

        Raises:
            OSError: the file is gone.
        """
        mask = self.lists.masks.get(self.path.replace(os.sep, "/"))
        found = [(self.folder / self.path).lstat()]
        if mask and mask.volume:
            with suppress(OSError):
                found.append((self.folder / mask.volume).lstat())
        return tuple((one.st_size, one.st_mtime_ns) for one in found)

    def settle(self) -> None:
        """Nothing: the folder is only read."""

    def release(self) -> None:
        """Nothing: the folder is only read."""

    def refuse(self, quarantine: Quarantine, refusal: Refusal) -> None:
        """Write down its place and the reason; its bytes stay where they are."""
        place = os.path.join(self.folder, self.path)  # as the system names it, UTF-8 or not: it is read there again
        quarantine.refuse(refusal.name, refusal.code, ReceivedFile("folder", place, b""), refusal.digest)


@dataclass(frozen=True, slots=True)
class MissingFile:
    """A file that the index of a medium lists and that is not there."""

    folder: Path
    path: str

    @property
    def place(self) -> str:
        """Its path below the folder."""
        return f"medium\0{self.folder}\0{self.path}"

    def load(self) -> ReceivedFile:
        """It cannot be read."""
        raise FileRejectedError("missing_from_medium")

    def settle(self) -> None:
        """Never."""

    def release(self) -> None:
        """Never."""

    def refuse(self, quarantine: Quarantine, refusal: Refusal) -> None:
        """Write down its place and the reason."""
        place = ReceivedFile("folder", os.path.join(self.folder, self.path), b"")
        quarantine.refuse(refusal.name, refusal.code, place, refusal.digest)


def in_folder(folder: Path, lists: Lists, leave_out: Iterable[Path], max_bytes: int) -> list[FolderFile]:
    """Every file below a folder, in the order of names; no link is followed.

    Args:
        folder: only read.
        lists: the hospital's own, see :mod:`agent.ingest.patient_lists`.
        leave_out: directories that are not looked into (the site's own).
        max_bytes: of one file.
    """
    bids = "dataset_description.json" in lists.aside
    paths = sorted(walk(folder, leave_out), key=os.fsencode)
    left = (p for p in paths if p not in lists.aside and not (bids and _beside(p)))
    return [FolderFile(folder, path, lists, max_bytes) for path in left]


def _beside(path: str) -> bool:
    return path.endswith(_SIDECARS) or os.path.basename(path) in _BIDS_TEXTS


def listed_and_missing(folder: Path, index: str, files: Iterable[tuple[str, ...]]) -> list[MissingFile]:
    """What a DICOMDIR lists (File IDs, PS3.10 section 8.2, beside the index) and the medium does not have.

    Args:
        folder: the medium.
        index: path of the DICOMDIR below it.
        files: the components of each Referenced File ID; what is not one of the standard's names is missing.
    """
    top = os.path.dirname(index)
    there = {p.casefold() for p in walk(folder, ())}
    gone = []
    for parts in files:
        plain = all(p and len(p) <= 8 and p.replace("_", "").isalnum() and p.isascii() for p in parts)
        path = os.path.join(top, *parts) if plain and parts else os.path.join(top, "?")
        if path.casefold() not in there:
            gone.append(MissingFile(folder, path))
    return gone


class FolderWatcher:
    """A watched folder: gives each file once it rests, and again only when it changes."""

    def __init__(self, folder: Folder, clock: Callable[[], float] = time.time) -> None:
        """Nothing is read yet."""
        self.folder, self._clock = folder, clock
        self._seen: dict[str, tuple[tuple[int, int], ...]] = {}  # path -> how it looked when it was given
        self._last: dict[str, tuple[tuple[int, int], ...]] = {}

    def rested(self, lists: Lists, leave_out: Iterable[Path], max_bytes: int) -> list[FolderFile]:
        """Files that are new or changed, look the same as at the last look, and have rested for ``settle_s``."""
        now, looks, ready = self._clock(), dict[str, tuple[tuple[int, int], ...]](), []
        for one in in_folder(self.folder.path, lists, leave_out, max_bytes):
            try:
                look = one.looks()
            except OSError:
                continue  # it went between the two looks
            looks[one.path] = look
            changed = max(at for _, at in look) / 1e9
            rested = self._last.get(one.path) == look and now - changed >= self.folder.settle_s
            if rested and self._seen.get(one.path) != look:
                ready.append(one)
        self._last = looks
        self._seen = {path: look for path, look in self._seen.items() if path in looks}
        return ready

    def taken(self, ready: Iterable[FolderFile]) -> None:
        """These have been let in or refused: they are given again only when they change."""
        for one in ready:
            if one.path in self._last:
                self._seen[one.path] = self._last[one.path]
