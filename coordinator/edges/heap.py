"""The process's heap: one arena, so that freed pieces of uploads are used again whichever thread takes the next call.

glibc gives threads arenas of their own, eight for each processor, and each keeps what was once freed in it. A server
that answers every call in another thread so holds several times what is ever in use at once.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8  # mallopt(3), glibc


def one_arena() -> bool:
    """Have all threads to come share one heap; call it before they are started.

    Returns:
        Whether the C library knows of arenas; elsewhere (musl, macOS) there is nothing to be done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, 1) == 1
