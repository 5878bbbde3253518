"""What a long-lived process keeps of the memory that it let go of (glibc: mallopt(3)).

Elsewhere (musl, macOS) there is nothing to be set, and each of these does nothing.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE: Final = 1 << 19  # bytes: a piece of a transfer is twice as long


def one_arena() -> bool:
    """Have all threads to come share one heap; call it before they are started.

    glibc gives threads arenas of their own, eight for each processor, and each keeps freed memory. So a server that
    answers every call in another thread would hold several times the memory that it uses at once.

    Returns:
        Whether the C library knows of arenas.
    """
    return _set(_M_ARENA_MAX, 1)


def large_ones_go_back() -> bool:
    """Give every large block back to the system once nobody uses it.

    By itself glibc takes ever larger ones from the heap, up to 32 MiB, and the heap keeps them: copies of a model
    that were needed for a moment would count to the end.

    Returns:
        Whether the C library could be told so.
    """
    return _set(_M_MMAP_THRESHOLD, _LARGE)


def _set(what: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(what, value) == 1
