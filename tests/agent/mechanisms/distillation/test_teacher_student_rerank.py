import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mechanisms.distillation.teacher_student import best_of

ODD = [0.0, -0.0, 0.25, 0.5, -1.0, 1.0, float("nan"), float("inf"), float("-inf")]
ROWS = st.lists(st.tuples(st.sampled_from(ODD), st.integers(-2, 4), st.booleans()), max_size=40)


def slowly(rows):
    """The winner of each group, by looking at every sample in turn."""
    best = {}
    for place, (score, group, kept) in enumerate(rows):
        if not kept or not abs(score) < float("inf"):
            continue
        if group not in best or score > rows[best[group]][0]:
            best[group] = place
    return [best[group] for group in sorted(best)]


def arrays(rows, score=np.float32):
    return (
        np.array([r[0] for r in rows], score),
        np.array([r[1] for r in rows], np.int64),
        np.array([r[2] for r in rows], bool),
    )


@given(ROWS)
def test_the_winners_are_those_of_a_slow_loop(rows):
    found = best_of(*arrays(rows))
    assert found.dtype == np.int64
    assert found.tolist() == slowly(rows)


@given(ROWS)
def test_what_the_vetting_dropped_never_wins_however_well_it_is_aligned(rows):
    scores, groups, kept = arrays(rows, np.float64)
    scores[~kept] = 2.0
    won = best_of(scores, groups, kept)
    assert kept[won].all()
    assert len(np.unique(groups[won])) == len(won)


def test_a_group_with_nothing_left_gives_nothing():
    scores, groups = np.array([0.9, 0.8, 0.1]), np.array([7, 7, 3])
    assert best_of(scores, groups, np.array([False, False, True])).tolist() == [2]
    assert best_of(scores, groups, np.zeros(3, bool)).tolist() == []
    assert best_of(scores[:0], groups[:0], np.zeros(0, bool)).tolist() == []
    lost = np.array([np.nan, np.inf, 0.1])
    assert best_of(lost, groups, np.ones(3, bool)).tolist() == [2]


def test_of_equals_the_lowest_place_wins():
    assert best_of(np.array([0.5, 0.5, 0.5, -0.0, 0.0]), np.array([1, 0, 1, 2, 2]), np.ones(5, bool)).tolist() == [
        1,
        0,
        3,
    ]


@pytest.mark.parametrize(
    ("scores", "groups", "kept"),
    [
        (np.ones(3), np.ones(2, np.int64), np.ones(3, bool)),
        (np.ones((3, 1)), np.ones((3, 1), np.int64), np.ones((3, 1), bool)),
        (np.ones(3, np.int64), np.ones(3, np.int64), np.ones(3, bool)),
        (np.ones(3), np.ones(3), np.ones(3, bool)),
        (np.ones(3), np.ones(3, np.int64), np.array(["", "copy", "verifier"])),
        (np.ones(3), np.ones(3, np.int64), np.ones(3, np.int64)),
    ],
)
def test_what_does_not_fit_is_refused(scores, groups, kept):
    with pytest.raises(ValueError, match=r"score|kept"):
        best_of(scores, groups, kept)
