"""Artifacts that nobody honest writes: archives, pictures and weights, each well-formed but for one thing."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
import zlib
from typing import Any

import numpy as np

from protos.artifacts.png import pack_png

PICTURE = pack_png(np.arange(64, dtype=np.uint8).reshape(8, 8))
_RECORD = 10_240


def shard(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    """A USTAR archive with normalised headers, as :mod:`protos.artifacts.shards` writes it; ``kind`` is of the first
    member.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for index, (name, body) in enumerate(members):
            head = tarfile.TarInfo(name)
            head.size, head.mode = len(body), 0o644
            if index == 0:
                head.type, head.linkname = kind, link
                head.size = len(body) if kind == tarfile.REGTYPE else 0
            archive.addfile(_plain(head), io.BytesIO(body))
    return out.getvalue()


def _plain(head: tarfile.TarInfo) -> tarfile.TarInfo:
    head.uid = head.gid = head.mtime = 0
    head.uname = head.gname = ""
    return head


def bomb_png(height: int, width: int) -> bytes:
    """A picture as any encoder writes it: black rows, deflated to next to nothing."""
    rows = zlib.compressobj(9)
    packed = b"".join([*(rows.compress(bytes(1 + width)) for _ in range(height)), rows.flush()])
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in parts)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def weights(header: dict[str, Any] | str, body: bytes) -> bytes:
    """A safetensors file with this header, as the library frames it: padded with spaces to eight bytes."""
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    raw = text.encode() + b" " * (-len(text.encode()) % 8)
    return struct.pack("<Q", len(raw)) + raw + body


def sha256(body: bytes) -> bytes:
    """Of a chunk."""
    return hashlib.sha256(body).digest()
