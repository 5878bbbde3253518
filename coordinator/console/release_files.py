"""Stored releases whose digest matches the ledger: files, and images out of them.

A file is shown or downloaded only if its SHA-256 is the one in the ledger's entry. One pass over the archive finds a
set's images and computes that digest. Each image is remembered with its own digest, so a later read returns the same
bytes or fails, even if the file has changed in between.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from protos.artifacts.chunks import CHUNK
from protos.common.errors import RefusedError

_KEPT: Final = 64  # sets whose places are remembered
_HEAD: Final = 512  # bytes of a member's header, and of the archive's blocks (POSIX ustar)
MOST_SHOWN: Final = 4096  # images of one set that are remembered; the rest is counted


class DigestMismatchError(RefusedError):
    """The shelf does not hold what the ledger admitted; the text is for people, and names no place on the disk."""


@dataclass(frozen=True, slots=True)
class ArchivedImage:
    """One image in a set's archive."""

    label: str
    start: int
    size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ImageSheet:
    """A set: its images in order, and how many there are."""

    places: tuple[ArchivedImage, ...]
    total: int


class ReleaseFiles:
    """Reads a shelf. Every method may be called from any thread."""

    def __init__(self, root: Path) -> None:
        """``root``: the shelf's folder."""
        self._root, self._lock = root, threading.Lock()
        self._sheets: OrderedDict[tuple[str, bytes], ImageSheet] = OrderedDict()

    def there(self, release: str, name: str) -> bool:
        """Whether the shelf has a file of that name; what is in it is another question."""
        return (self._root / release / name).is_file()

    def open(self, release: str, name: str, digest: bytes) -> BinaryIO:
        """A file that was found to have this SHA-256, at its beginning.

        Raises:
            DigestMismatchError: it is not there, or is another one.
        """
        try:
            stream = (self._root / release / name).open("rb")
        except OSError:
            raise DigestMismatchError("the file is not in the release store, or cannot be read") from None
        try:
            if hashlib.file_digest(stream, "sha256").digest() != digest:
                raise DigestMismatchError("the stored file is not the one that the ledger admitted; it is not shown")
            stream.seek(0)
        except BaseException:
            stream.close()
            raise
        return stream

    def sheet(self, release: str, name: str, digest: bytes) -> ImageSheet:
        """The images of a set of PNG.

        Raises:
            DigestMismatchError: see :meth:`open`; or it is no set of PNG.
        """
        key = (release, digest)
        with self._lock:
            if key in self._sheets:
                self._sheets.move_to_end(key)
                return self._sheets[key]
        with self.open(release, name, digest) as stream:
            found = _places(stream)
        with self._lock:
            self._sheets[key] = found
            while len(self._sheets) > _KEPT:
                self._sheets.popitem(last=False)
        return found

    def image(self, release: str, name: str, digest: bytes, index: int) -> bytes:
        """One image of a set, as PNG.

        Raises:
            DigestMismatchError: see :meth:`sheet`; there is no such image, or it was changed since.
        """
        places = self.sheet(release, name, digest).places
        if not 0 <= index < len(places):
            raise DigestMismatchError("the set has no image of that number")
        place = places[index]
        try:
            with (self._root / release / name).open("rb") as stream:
                body = os.pread(stream.fileno(), place.size, place.start)
        except OSError:
            raise DigestMismatchError("the file is not in the release store, or cannot be read") from None
        if hashlib.sha256(body).digest() != place.digest:
            raise DigestMismatchError("the stored file was changed; it is not shown")
        return body


def rest_in_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """The rest of an open file, a piece at a time; it is closed at the end."""
    with stream:
        while piece := stream.read(CHUNK):
            yield piece


def _places(stream: BinaryIO) -> ImageSheet:
    """Where the images are. The archive was read strictly before it was admitted: plain members, in pairs."""
    found, total = list[ArchivedImage](), 0
    body, start = b"", 0
    while True:
        head = stream.read(_HEAD)
        if len(head) < _HEAD or head == bytes(_HEAD):
            break
        name, size = head[:100].rstrip(b"\0"), int(head[124:135], 8)
        at, data = stream.tell(), stream.read(size)
        stream.seek(-size % _HEAD, os.SEEK_CUR)
        if name.endswith(b".png"):
            body, start, total = data, at, total + 1
        elif name.endswith(b".txt") and body:
            if len(found) < MOST_SHOWN:
                found.append(
                    ArchivedImage(data.decode("ascii", "replace"), start, len(body), hashlib.sha256(body).digest())
                )
            body = b""
    if not total:
        raise DigestMismatchError("the set holds no images that a browser can show")
    return ImageSheet(tuple(found), total)
