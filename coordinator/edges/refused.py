"""What is refused of an upload, and why: an announcement, a piece, or what the disk cannot take."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

from policies.statement import HEX
from protos.chunks import count, length

_PASSING: Final = frozenset({"unknown_upload", "incomplete", "disk_full", "storage", "too_many_uploads"})


class UploadRefused(Exception):
    """What was offered or sent is not taken; ``rule`` and ``detail`` are fit for a finding."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail

    @property
    def lasting(self) -> bool:
        """Would the same bytes be refused again?"""
        return self.rule not in _PASSING


def check_offer(sha256: str, size: int, chunks: Sequence[bytes], quota: int) -> None:
    """Everything that can be said about an announcement before a byte is set aside for it.

    Raises:
        UploadRefused: artifact_size, bad_manifest.
    """
    if not 1 <= size <= quota:
        raise UploadRefused("artifact_size", f"the artifact must have 1 to {quota} bytes")
    if not HEX.fullmatch(sha256):
        raise UploadRefused("bad_manifest", "an upload is named by the SHA-256 of its artifact")
    if len(chunks) != count(size) or not all(len(digest) == 32 for digest in chunks):
        raise UploadRefused("bad_manifest", f"{count(size)} SHA-256 digests belong to {size} bytes")


def check_shape(chunks: Sequence[bytes], size: int, index: int, data: bytes) -> None:
    """Could this be the piece that was announced, by its place and length?

    Raises:
        UploadRefused: chunk_index, chunk_size.
    """
    if not 0 <= index < len(chunks):
        raise UploadRefused("chunk_index", f"the artifact has {len(chunks)} pieces")
    if len(data) != length(size, index):
        raise UploadRefused("chunk_size", f"piece {index} has {length(size, index)} bytes")


def check_digest(chunks: Sequence[bytes], index: int, data: bytes) -> None:
    """Is this the piece that was announced?

    Raises:
        UploadRefused: chunk_moved, chunk_foreign.
    """
    digest = hashlib.sha256(data).digest()
    if digest != chunks[index]:
        if digest in chunks:
            raise UploadRefused("chunk_moved", f"what came as piece {index} belongs elsewhere")
        raise UploadRefused("chunk_foreign", f"what came as piece {index} is not of this artifact")


@contextlib.contextmanager
def disk_faults() -> Iterator[None]:
    """A disk that is full or broken is a refusal, not an incident: other uploads go on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UploadRefused("disk_full", "the coordinator has no room for it now") from None
        raise UploadRefused("storage", "the coordinator's disk could not keep it") from None
