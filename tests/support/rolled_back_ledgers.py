"""Ledgers that were turned back, for tests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from policies.ledger.backends.sqlite import mark_of, open_read_only


def marked_as_it_is(path: Path) -> None:
    """Have the mark beside a ledger's file say what the file says, as where the whole machine was turned back."""
    with contextlib.closing(open_read_only(path)) as disk, contextlib.closing(mark_of(path)) as mark:
        head = disk.head()
        assert head is not None
        mark.begin(head)


FRAME = 24 + 4096  # bytes of a frame in SQLite's write-ahead log: header and page (fileformat2, section 4)
HEAD = 32  # bytes before the first


def damaged_logs(log: bytes) -> dict[str, bytes | None]:
    """Ninety ways in which a write-ahead log is less than it was; None: it is gone."""
    frames = (len(log) - HEAD) // FRAME
    assert frames >= 80, "the log is too short to be damaged in so many ways"

    def at(frame: int, byte: int = 0) -> int:
        return HEAD + frame * FRAME + byte

    def put(place: int, what: bytes) -> bytes:
        return log[:place] + what + log[place + len(what) :]

    def flipped(place: int) -> bytes:
        return put(place, bytes([log[place] ^ 0x40]))

    some = [frames * n // 20 for n in range(20)]
    found: dict[str, bytes | None] = {"removed": None, "empty": b"", "header alone": log[:HEAD]}
    found |= {f"cut before frame {n}": log[: at(n)] for n in some[1:]}  # 19
    found |= {f"cut within frame {n}": log[: at(n, 1000)] for n in some}  # 20
    found |= {f"header byte {n} flipped": flipped(n) for n in (0, 8, 12, 16, 20, 24, 28)}
    found |= {f"salt of frame {n} flipped": flipped(at(n, 8)) for n in some[::4]}  # 5
    found |= {f"sum of frame {n} flipped": flipped(at(n, 16)) for n in some[1::4]}  # 5
    found |= {f"page of frame {n} flipped": flipped(at(n, 24 + 512)) for n in some}  # 20
    found |= {f"zeros from frame {n}": log[: at(n)] + bytes(len(log) - at(n)) for n in some[::4]}  # 5
    found |= {
        "header zeroed": put(0, bytes(HEAD)),
        "salts zeroed": put(16, bytes(8)),
        "sums zeroed": put(24, bytes(8)),
    }
    found |= {"first frame twice": put(at(1), log[at(0) : at(1)]), "all zeros": bytes(len(log))}
    found["last frames of another log"] = log[: at(frames - 4)] + bytes(reversed(log[at(frames - 4) :]))
    assert len(found) == 90, len(found)
    return found
