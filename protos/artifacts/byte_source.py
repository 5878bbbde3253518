"""Artifacts are read through a window of bytes, a block at a time: how large one is never decides the memory used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from protos.common.errors import ArtifactError

BLOCK: Final = 1 << 22  # bytes held at once; a multiple of every element's width


class ArtifactFormatError(ArtifactError, ValueError):
    """The bytes are not an artifact in its one form; the text says why, and quotes nothing of them."""


class ByteSource(Protocol):
    """Bytes with a known size that can be read at any place."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        ...

    def read(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes from ``offset``.

        Raises:
            ArtifactFormatError: there are not that many.
        """
        ...


@dataclass(frozen=True, slots=True)
class BytesSource:
    """Bytes in memory as a source."""

    raw: bytes

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.raw)

    def read(self, offset: int, count: int) -> bytes:
        """See :class:`ByteSource`."""
        if not 0 <= offset <= offset + count <= len(self.raw):
            raise ArtifactFormatError("the file ends early")
        return self.raw[offset : offset + count]


@dataclass(frozen=True, slots=True)
class FileSource:
    """An open regular file as a source; the caller keeps the descriptor. ``size`` is the size when opened."""

    descriptor: int
    size: int

    @staticmethod
    def of(descriptor: int) -> FileSource:
        """The file behind a descriptor."""
        return FileSource(descriptor, os.fstat(descriptor).st_size)

    def read(self, offset: int, count: int) -> bytes:
        """See :class:`ByteSource`. Reads with ``pread``: the descriptor's own position is neither used nor moved."""
        if not 0 <= offset <= offset + count <= self.size:
            raise ArtifactFormatError("the file ends early")
        parts: list[bytes] = []
        while count:
            part = os.pread(self.descriptor, min(count, BLOCK), offset)
            if not part:
                raise ArtifactFormatError("the file ends early")
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True)
class Window:
    """A part of another source, as a source."""

    source: ByteSource
    start: int
    size: int

    def read(self, offset: int, count: int) -> bytes:
        """See :class:`ByteSource`."""
        if not 0 <= offset <= offset + count <= self.size:
            raise ArtifactFormatError("the file ends early")
        return self.source.read(self.start + offset, count)


def blocks(source: ByteSource, start: int, end: int) -> Iterator[bytes]:
    """The bytes from ``start`` to before ``end``, in blocks of at most :data:`BLOCK`."""
    for offset in range(start, end, BLOCK):
        yield source.read(offset, min(BLOCK, end - offset))
