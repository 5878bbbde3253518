"""Times of a round: few, known to everybody, and the last is the round's end."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.federation import messages
from protos.federation.round_times import (
    EARLIER_S,
    LEAST_S,
    MOST_S,
    RoundTerms,
    answer_time,
    answer_times,
    check_timeout,
    round_timeout,
    silence,
    step_timeout,
    told_bits,
)

LENGTHS = st.integers(LEAST_S, MOST_S)


@given(LENGTHS)
def test_each_time_is_twice_the_one_before_but_the_last_which_is_the_rounds_end(seconds: int) -> None:
    times = answer_times(seconds)
    assert times[-1] == seconds
    assert all(late == 2 * early for early, late in itertools.pairwise(times[:-1]))
    assert times[-2] < times[-1] <= 2 * times[-2]


@given(LENGTHS, st.floats(0.0, 2.0 * MOST_S))
def test_an_answer_leaves_at_one_of_the_times_and_never_before_it_is_there(seconds: int, elapsed: float) -> None:
    leaves = answer_time(elapsed, seconds)
    assert leaves >= elapsed
    late = leaves / seconds
    assert leaves in answer_times(seconds) or (late >= 1 and math.log2(late).is_integer())


@given(LENGTHS)
def test_what_one_time_tells_is_the_logarithm_of_their_number(seconds: int) -> None:
    assert 2 ** told_bits(seconds) == pytest.approx(len(answer_times(seconds)) + 1)
    assert told_bits(seconds) < 4.2


@given(LENGTHS, st.integers(1, messages.MAX_PARAMETERS))
def test_a_coordinator_waits_longer_than_a_site_may_work_and_for_other_steps_less(seconds: int, size: int) -> None:
    assert round_timeout(seconds, size) >= seconds + 22
    assert step_timeout(size) >= 150
    assert check_timeout(size) - step_timeout(size) == pytest.approx(750)  # made rounds in it, and the same two ways
    assert silence(seconds) <= min(300.0, seconds / 2)


def test_an_order_with_the_times_of_before_has_no_new_keys() -> None:
    assert RoundTerms().order() == {}
    assert RoundTerms(60, 9).order() == {messages.SECONDS: 60, messages.APPROVE_BY: 9}
    assert silence(EARLIER_S) == 0.0


@pytest.mark.parametrize("wrong", [(0, 0), (MOST_S + 1, 0), (60, -1), (True, 0), (60, 1 << 53), (60.0, 0)])
def test_no_other_times_are_those_of_a_run(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="times of a run"):
        RoundTerms(*wrong)
