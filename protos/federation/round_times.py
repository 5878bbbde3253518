"""How long a round may take, and the few times at which a site's answer may leave in it. Both sides; no clock here.

How long a training takes grows with the patients that it meets, and the coordinator sees when an answer comes. So an
answer leaves ``FIRST_S`` seconds after its question, or twice as long after it, or four times, and so on, and at last
after the job's ``round_seconds``. Of n such times one tells at most log2(n + 1) bits, the missing answer included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from protos.federation import messages

LEAST_S: Final = 60  # of a job's round_seconds
MOST_S: Final = 86_400
DEFAULT_S: Final = 3_600  # where a job names none
EARLIER_S: Final = 150  # of a job, or an order, of a version before jobs named it
FIRST_S: Final = 2.0
HEADROOM: Final = 1.25  # of what a round is expected to take, for the time by which its answer shall be there
STEP_S: Final = 150.0  # for an answer that needs no image: a price, a plan, the other steps of a secret sum
CHECK_S: Final = 900.0  # of a check: made rounds of a large network on a slow machine take minutes
_SLOWEST: Final = 1 << 20  # bytes a second of the slowest line for which a round has time
_CARRIED: Final = 12  # bytes of a parameter in one exchange: 4 there, and 4 or 8 back
_GRACE: Final = 60  # a site may be silent for that part of a round before it counts as gone
_LONGEST_GRACE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What each order of a run says of times. Those of before jobs named them are not said."""

    seconds: int = EARLIER_S  # how long a site may work on a round
    approve_by: int = 0  # until when persons may approve the run, seconds since 1970; 0: no site wants that

    def __post_init__(self) -> None:
        """Refuse what no honest coordinator says.

        Raises:
            ValueError: without saying what it was; the numbers may be foreign.
        """
        whole = type(self.seconds) is int and type(self.approve_by) is int
        if not (whole and 0 < self.seconds <= MOST_S and 0 <= self.approve_by < 1 << 53):
            raise ValueError("not the times of a run")

    def order(self) -> dict[str, int]:
        """The keys of an order that tell them; none where they are those of before, which older agents take."""
        if self == RoundTerms():
            return {}
        return {messages.SECONDS: self.seconds, messages.APPROVE_BY: self.approve_by}


def answer_times(round_seconds: int) -> tuple[float, ...]:
    """The seconds after a question at which its answer may leave: doublings, and at last the round's end.

    >>> answer_times(60)
    (2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
    """
    doublings = math.ceil(math.log2(round_seconds / FIRST_S))
    return (*(FIRST_S * 2.0**i for i in range(doublings)), float(round_seconds))


def answer_time(seconds: float, round_seconds: int) -> float:
    """When an answer leaves that is there after ``seconds``.

    What is not there by the round's end comes too late for it, and leaves at one of the next doublings all the same.

    >>> answer_time(0.5, 60), answer_time(2.5, 60), answer_time(8.0, 60), answer_time(33.0, 60), answer_time(61.0, 60)
    (2.0, 4.0, 8.0, 60.0, 120.0)
    """
    for time in answer_times(round_seconds):
        if seconds <= time:
            return time
    late = float(round_seconds)
    while late < seconds:
        late *= 2
    return late


def told_bits(round_seconds: int) -> float:
    """The most that the time of one answer tells, in bits: which of the times it was, or that none came.

    >>> round(told_bits(60), 2), round(told_bits(86_400), 2)
    (2.81, 4.17)
    """
    return math.log2(len(answer_times(round_seconds)) + 1)


def carrying_seconds(parameters: int) -> float:
    """What a model of so many parameters and its answer may take on a slow line."""
    return _CARRIED * parameters / _SLOWEST


def round_timeout(round_seconds: int, parameters: int) -> float:
    """From a question to the last answer that still counts: the last time of answers, and the way there and back."""
    return round_seconds + 22.0 + carrying_seconds(parameters)


def step_timeout(parameters: int) -> float:
    """The same of an exchange in which nobody trains."""
    return STEP_S + carrying_seconds(parameters)


def check_timeout(parameters: int) -> float:
    """From the question whether a site could take part to the last answer, with a model there and numbers back."""
    return CHECK_S + carrying_seconds(parameters)


def silence(round_seconds: int, wait_seconds: int = 0) -> float:
    """How long a site that is asked may be silent before it counts as gone: a longer round bears a longer pause.

    ``wait_seconds``: as the job says; 0: it says nothing.
    """
    if wait_seconds:
        return float(wait_seconds)
    return min(round_seconds / _GRACE, _LONGEST_GRACE_S) if round_seconds > EARLIER_S else 0.0
