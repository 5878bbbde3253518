"""Where a checkpoint is kept, in memory."""

from __future__ import annotations


class MemoryPlace:
    """One place; it breaks with the write of the number ``breaks_after``, once that is written."""

    def __init__(self, breaks_after: int = 10**9) -> None:
        self.data: bytes | None = None
        self.left = breaks_after

    def read(self) -> bytes | None:
        return self.data

    def write(self, data: bytes) -> None:
        self.data = data
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
