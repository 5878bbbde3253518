"""Content-addressed chunks: an artifact is named by its SHA-256, and travels as 1 MiB pieces, each with its own.

The pieces' digests are not signed, the artifact's is. So a list of digests is only a promise by which a bad piece is
found on arrival; what counts at the end is the SHA-256 of the whole, which the sealed statement names.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHUNK: Final = 1 << 20  # bytes; the last piece of an artifact may be shorter
Artifact = Path | bytes
_BESIDE: Final = 2  # threads that hash pieces


@dataclass(frozen=True, slots=True)
class ArtifactManifest:
    """What is announced of an artifact before a byte of it travels."""

    sha256: str  # of the whole, 64 hexadecimal digits
    size: int  # bytes
    chunks: tuple[bytes, ...]  # SHA-256 of each piece, in order


def count(size: int) -> int:
    """How many pieces an artifact of ``size`` bytes has.

    >>> count(0), count(1), count(CHUNK), count(CHUNK + 1)
    (0, 1, 1, 2)
    """
    return -(-size // CHUNK)


def length(size: int, index: int) -> int:
    """The bytes of piece ``index`` of an artifact of ``size`` bytes.

    >>> length(CHUNK + 5, 0), length(CHUNK + 5, 1)
    (1048576, 5)
    """
    return min(CHUNK, size - index * CHUNK)


def manifest(artifact: Artifact, sha256: str = "") -> ArtifactManifest:
    """Read an artifact once, a piece at a time.

    Args:
        artifact: a file, or bytes.
        sha256: of the whole, where it is known: it is not computed again, and the receiver checks it.
    Raises:
        OSError: the file cannot be read.
    """
    whole, size = None if sha256 else hashlib.sha256(), 0
    chunks: list[bytes] = []
    open_ones: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_BESIDE) as beside:  # hashlib lets go of the interpreter
        for data in _pieces(artifact):
            size += len(data)
            open_ones.append(beside.submit(lambda piece: hashlib.sha256(piece).digest(), data))
            if whole is not None:
                whole.update(data)
            if len(open_ones) > _BESIDE:
                chunks.append(open_ones.popleft().result())
        chunks += [one.result() for one in open_ones]
    return ArtifactManifest(sha256 if whole is None else whole.hexdigest(), size, tuple(chunks))


def _pieces(artifact: Artifact) -> Iterator[bytes]:
    if isinstance(artifact, bytes):
        for at in range(0, len(artifact), CHUNK):
            yield artifact[at : at + CHUNK]
        return
    with artifact.open("rb") as stream:
        while data := stream.read(CHUNK):
            yield data


def piece(artifact: Artifact, index: int) -> bytes:
    """The bytes of one piece.

    Raises:
        IndexError: the artifact has no such piece.
        OSError: the file cannot be read.
    """
    if index < 0:
        raise IndexError(index)
    if isinstance(artifact, bytes):
        data = artifact[index * CHUNK : (index + 1) * CHUNK]
    else:
        with artifact.open("rb") as stream:
            stream.seek(index * CHUNK)
            data = stream.read(CHUNK)
    if not data:
        raise IndexError(index)
    return data


def bitmap(indices: Sequence[int], total: int) -> bytes:
    """A bit for each of ``total`` pieces, lowest bit of the first byte first; set: the piece is in ``indices``.

    >>> bitmap([0, 9], 10).hex()
    '0102'
    """
    out = bytearray(-(-total // 8))
    for index in indices:
        out[index // 8] |= 1 << index % 8
    return bytes(out)


def indices(raw: bytes, total: int) -> tuple[int, ...]:
    """The pieces whose bits are set, ascending.

    Raises:
        ValueError: the bitmap is not one of ``total`` pieces.

    >>> indices(bitmap([0, 9], 10), 10)
    (0, 9)
    """
    if len(raw) != -(-total // 8) or int.from_bytes(raw, "little") >> total:
        raise ValueError("not a bitmap of that many pieces")
    return tuple(i for i in range(total) if raw[i // 8] >> i % 8 & 1)
