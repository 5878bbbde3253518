"""When an answer leaves: at one of few fixed times, whatever the work took."""

from __future__ import annotations

# An answer leaves after this many seconds, or after twice as many, or four times...: the time that training
# takes grows with the number of patients it meets, and when an answer comes is seen by the coordinator.
TICK_S = 2.0


def rest(seconds: float) -> float:
    """How long to wait until the next of 1, 2, 4, ... ticks since the work began.

    >>> rest(0.5), rest(2.5), rest(8.0)
    (1.5, 1.5, 0.0)
    """
    tick = TICK_S
    while tick < seconds:
        tick *= 2
    return tick - seconds
