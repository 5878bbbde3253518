"""A ledger in one text file, for an auditor: key, entries, envelopes, signed checkpoint; one encoding only."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from protos.common.errors import ArtifactError

_TITLE: Final = "lazaret-ledger-export/2"


class ExportError(ArtifactError, ValueError):
    """The export is malformed, or does not prove what it says."""


@dataclass(frozen=True, slots=True)
class Export:
    """The ledger's key, its entries and the envelopes they rest on, the witnesses' older heads, and the head."""

    public: bytes  # the ledger's Ed25519 key, raw
    entries: tuple[bytes, ...]
    envelopes: tuple[bytes, ...]
    checkpoint: str
    witnessed: tuple[str, ...] = ()  # checkpoints that sites cosigned; the ledger must extend each

    def encode(self) -> bytes:
        """The text of the export."""
        lines = [_TITLE, f"key {_b64(self.public)}", f"entries {len(self.entries)}", *map(_b64, self.entries)]
        lines += [f"envelopes {len(self.envelopes)}", *map(_b64, self.envelopes)]
        lines += [f"witnessed {len(self.witnessed)}", *(_b64(note.encode()) for note in self.witnessed)]
        return "\n".join([*lines, "checkpoint", self.checkpoint]).encode()

    @staticmethod
    def parse(raw: bytes) -> Export:
        """Read an export.

        Raises:
            ExportError: anything but the bytes :meth:`encode` gives.
        """
        lines = _lines(raw)
        try:
            if next(lines) != _TITLE.encode():
                raise ExportError("not a ledger export of this version")
            key = next(lines)
            public = _unbase64(key.removeprefix(b"key "))
            if not key.startswith(b"key "):
                raise ExportError("the key is missing")
            entries = _section(lines, "entries")
            envelopes = _section(lines, "envelopes")
            witnessed = tuple(note.decode() for note in _section(lines, "witnessed"))
            if next(lines) != b"checkpoint":
                raise ExportError("the checkpoint is missing")
            rest = list(lines)
            if not rest:
                raise ExportError("the checkpoint is missing")
            return Export(public, entries, envelopes, b"\n".join(rest).decode(), witnessed)
        except ExportError:
            raise
        except (ValueError, StopIteration, RuntimeError):
            raise ExportError("the export is cut short or not in its one form") from None


def _lines(raw: bytes) -> Iterator[bytes]:
    """The lines of a text, one at a time: an export of a million entries is a gigabyte."""
    at = 0
    while (end := raw.find(b"\n", at)) >= 0:
        yield raw[at:end]
        at = end + 1
    yield raw[at:]


def _unbase64(line: bytes) -> bytes:
    """Base64 in its one form: what encodes back to the same line."""
    raw = binascii.a2b_base64(line)
    if binascii.b2a_base64(raw, newline=False) != line:
        raise ExportError("the export is not in its one form")
    return raw


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _section(lines: Iterator[bytes], name: str) -> tuple[bytes, ...]:
    title = next(lines).decode()
    count = title.removeprefix(f"{name} ")
    if not (count.isascii() and count.isdigit() and len(count) < 10) or title != f"{name} {int(count)}":
        raise ExportError(f"the section {name} is missing")
    return tuple(_unbase64(line) for line in islice(lines, int(count)))
