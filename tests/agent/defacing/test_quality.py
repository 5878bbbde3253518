"""Each rule lets the real head pass in every state it may come in, and each is tripped by what it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.defacing.brain_extraction import Brain
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.defacing.quality import QualityMeasures, broken, examined, judge, measure
from agent.defacing.template import atlas, register
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from deploy.phantoms.head_malformed import bad_heads, bottle, knee
from tests.support.heads import phantoms, real_head

pytestmark = pytest.mark.timeout(900)  # brains are looked for, and heads drawn: a busy machine takes its time

Values = NDArray[np.generic]
template = cache(atlas)
GOOD = QualityMeasures(0.58, 4110.0, 1800.0, 0.44, 0.957, 0.986, 0.0, 0.0, 0.0, 20.0, 1.0, 0.94)  # of the real head


@cache
def head() -> HeadScan:
    return examined(real_head(3.0)[0], template(), register)


def part(*box: slice) -> HeadScan:
    """The same head in a smaller picture."""
    whole = head()
    first = np.array([side.start or 0 for side in box])
    affine = whole.volume.affine.copy()
    affine[:3, 3] += affine[:3, :3] @ first
    brain = replace(whole.brain, mask=whole.brain.mask[box], tight=whole.brain.tight[box])
    return HeadScan(Volume(whole.volume.values[box], affine), whole.skin[box], brain)


ALL = slice(None)


def test_the_numbers_of_the_real_head_are_what_the_limits_were_set_against() -> None:
    found = measure(head())
    assert broken(found) == broken(GOOD) == ""
    assert found.likeness == pytest.approx(GOOD.likeness, abs=0.06)
    assert found.head_ml == pytest.approx(GOOD.head_ml, rel=0.03)
    assert found.brain_ml == pytest.approx(GOOD.brain_ml, rel=0.03)
    assert found.agreement > 0.93
    assert found.symmetry > 0.95
    assert found.eyes_there > 0.9


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"likeness": 0.05}, "no_head"),
        ({"likeness": 0.1, "at_skin": 0.5}, "no_head"),
        ({"head_ml": 1500.0}, "no_head"),
        ({"head_ml": 20000.0}, "no_head"),
        ({"bare": 0.8}, "brain_extracted"),
        ({"brain_cut_cm2": 5.0}, "part_of_head"),
        ({"stem_cut_cm2": 90.0}, "part_of_head"),
        ({"head_cut_cm2": 60.0}, "part_of_head"),
        ({"eyes_seen": 0.9}, "no_face"),
        ({"eyes_there": 0.4}, "no_face"),
        ({"agreement": 0.85}, "brain_disagreement"),
        ({"brain_ml": 850.0}, "brain_volume"),
        ({"brain_ml": 2100.0}, "brain_volume"),
        ({"symmetry": 0.85}, "brain_asymmetric"),
        ({"at_skin": 0.02}, "brain_at_skin"),
    ],
)
def test_each_rule_is_tripped_by_its_number(changed: dict[str, float], code: str) -> None:
    assert broken(replace(GOOD, **changed)) == code


@pytest.mark.parametrize("name", QualityMeasures.__slots__)
def test_a_number_that_is_none_loses(name: str) -> None:
    assert broken(replace(GOOD, **{name: float("nan")})) != ""


@pytest.mark.parametrize(
    ("box", "code"),
    [
        ((ALL, ALL, slice(0, 48)), "part_of_head"),  # the crown is out of the picture
        ((slice(8, None), ALL, ALL), "part_of_head"),  # a side
        ((slice(None, 53), ALL, ALL), "part_of_head"),  # the other
        ((ALL, slice(8, None), ALL), "part_of_head"),  # the back
        ((ALL, slice(None, 60), ALL), "part_of_head"),  # the forehead, and the eyes with it
        ((ALL, ALL, slice(18, None)), "part_of_head"),  # all below the middle of the brain
        ((ALL, ALL, slice(8, None)), "no_face"),  # the eyes, but hardly any brain
    ],
)
def test_a_part_of_a_head_is_refused(box: tuple[slice, ...], code: str) -> None:
    with pytest.raises(NotDefacedError, match=code):
        judge(part(*box))


def test_an_ear_may_be_cut() -> None:
    judge(part(slice(1, 60), ALL, ALL))


def test_a_head_whose_face_was_taken_off_before_is_refused() -> None:
    whole = head()
    values = whole.volume.values.copy()
    values[:, 58:, :22] = 0
    defaced = Volume(values, whole.volume.affine)
    with pytest.raises(NotDefacedError, match="no_face"):
        judge(HeadScan(defaced, head_mask(defaced), whole.brain))


def test_a_head_without_its_skull_is_refused() -> None:
    whole = head()
    with pytest.raises(NotDefacedError, match="brain_extracted"):
        judge(HeadScan(whole.volume, whole.brain.mask, whole.brain))


def other(mask: NDArray[np.bool_], tight: NDArray[np.bool_]) -> HeadScan:
    whole = head()
    return HeadScan(whole.volume, whole.skin, Brain(mask | tight, 0.95, whole.brain.to_template, tight, 0.6))


def test_half_a_brain_is_not_symmetric() -> None:
    tight = head().brain.tight.copy()
    tight[: tight.shape[0] // 2 - 6] = False
    with pytest.raises(NotDefacedError, match="brain_asymmetric"):
        judge(other(head().brain.mask, tight))


def test_a_mask_that_reaches_the_skin_is_refused() -> None:
    with pytest.raises(NotDefacedError, match="brain_at_skin"):
        judge(other(head().skin, head().brain.tight))


def test_a_brain_too_small_is_refused() -> None:
    tight = head().brain.tight.copy()
    tight[:, :, 22:] = False
    with pytest.raises(NotDefacedError, match="brain_volume"):
        judge(other(head().brain.mask, tight))


def test_masks_that_do_not_lie_on_the_volume_make_no_head() -> None:
    with pytest.raises(ValueError, match="one grid"):
        HeadScan(head().volume, head().skin[:-1], head().brain)


def _noisy(values: Values) -> Values:
    rng = np.random.default_rng(0)
    made = np.hypot(values + rng.normal(0, 10, values.shape), rng.normal(0, 10, values.shape))
    return np.asarray(made.astype(np.float32))


def _biased(values: Values) -> Values:
    i, j, k = np.meshgrid(*[np.linspace(-1, 1, n) for n in values.shape], indexing="ij", sparse=True)
    return np.asarray((values * (1 + 0.4 * (0.6 * i + 0.5 * j - 0.4 * k) / 1.5)).astype(np.float32))


def _turned(volume: Volume, axis: int, degrees: float) -> Volume:
    """The picture stands as it is, the head in it is turned: another affine, and what reads it must follow."""
    first, second = (other for other in range(3) if other != axis)
    turn = np.eye(4)
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn[[first, first, second, second], [first, second, first, second]] = c, -s, s, c
    return Volume(volume.values, turn @ volume.affine)


STATES: dict[str, Callable[[Volume], Volume]] = {
    "int16": lambda v: Volume(v.values.astype(np.int16) * 8 - 5, v.affine),
    "noise": lambda v: Volume(_noisy(v.values), v.affine),
    "bias": lambda v: Volume(_biased(v.values), v.affine),
    "flipped": lambda v: Volume(
        v.values[::-1, :, ::-1].transpose(2, 0, 1),
        v.affine
        @ np.array(
            [[0, -1, 0, v.values.shape[0] - 1], [0, 0, 1, 0], [-1, 0, 0, v.values.shape[2] - 1], [0, 0, 0, 1]]
        ),
    ),
    "pitched": lambda v: _turned(v, 0, 20),
    "nodding": lambda v: _turned(v, 0, -20),
    "rolled": lambda v: _turned(v, 1, 20),
    "yawed": lambda v: _turned(v, 2, -20),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_the_real_head_passes_in_any_state(name: str) -> None:
    volume, true = real_head(2.0)
    found = examined(STATES[name](volume), template(), register)
    assert found.volume.values.shape == true.shape  # turned back, or not turned at all
    assert int((true & ~found.brain.mask).sum()) <= 0.002 * int(true.sum())


@pytest.mark.slow
@pytest.mark.parametrize("mm", [1.0, 3.0])
def test_the_real_head_passes_at_any_grain(mm: float) -> None:
    examined(real_head(mm)[0], template(), register)


@pytest.mark.slow
@pytest.mark.parametrize("contrast", ["T1", "T2", "FLAIR", "CT"])
def test_made_heads_pass_in_every_contrast(contrast: str) -> None:
    scan = phantoms().scan(2, 0, 2.0, contrast=contrast)  # type: ignore[arg-type]  # a Literal
    found = examined(scan.volume, template(), register)
    assert int((scan.brain & ~found.brain.mask).sum()) <= 0.003 * int(scan.brain.sum())


@pytest.mark.parametrize("made", [bottle, knee])
def test_what_is_no_head_is_refused(made: Callable[[float], Volume], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.defacing.bet.ITERATIONS", 100)  # nothing of the brain decides here
    centre = np.eye(4)
    centre[:3, 3] = (0, 0, 24)  # laid where a brain would be
    with pytest.raises(NotDefacedError, match="no_head"):
        examined(made(3.0), template(), lambda *_: centre)


BAD = {
    "bottle": {"no_head"},
    "knee": {"no_head"},
    "noise": {"no_head"},
    "empty": {"no_head"},
    "brain_extracted": {"brain_extracted"},
    "faceless": {"no_face"},
    "cut_at_brow": {"part_of_head", "no_face"},
    "left_half_missing": {"part_of_head"},
    "left_half_blank": {"no_head", "brain_asymmetric", "no_face"},
    "not_finite": {"not_finite"},
    "thick_slices": {"too_coarse"},
    "singular": {"bad_affine"},
}
bad = cache(lambda: bad_heads(phantoms(), 3.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_heads_are_refused_by_the_rule_that_says_why(name: str) -> None:
    with pytest.raises(NotDefacedError) as refusal:
        examined(bad()[name], template(), register)
    assert refusal.value.code in BAD[name]
