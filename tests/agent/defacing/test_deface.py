"""A study is de-faced whole or not at all, by one change; and what would break a promise is seen red."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from agent.defacing.change import Change, Defaced, checked
from agent.defacing.deface import HeadSeries, deface
from agent.defacing.head import HeadScan
from agent.defacing.removal_methods import METHODS
from agent.domain import Volume
from agent.volumes.errors import REASONS, NotDefacedError
from agent.volumes.grid import resample
from deploy.phantoms.heads import axial
from tests.support.heads import bad, phantoms, scan, true_head


def examine(volume: Volume) -> HeadScan:
    """The phantom's own truth for its scan; of anything else nothing is known."""
    if volume is not scan(0).volume:
        raise NotDefacedError("too_coarse")
    return true_head(0)


def dice() -> np.random.Generator:
    return np.random.default_rng(1)


def flair() -> Volume:
    return phantoms().scan(0, 0, contrast="FLAIR", grid=axial(3.0, 5.0)).volume


@dataclass
class Broken:
    """A method that does wrong."""

    how: str

    def __call__(self, head: HeadScan, rng: np.random.Generator) -> Change:
        return self

    def onto(self, volume: Volume, keep: Any, rng: np.random.Generator) -> Defaced:
        values, changed = volume.values.copy(), np.zeros(volume.values.shape, bool)
        changed[:, -10:] = True
        if self.how == "brain":
            at = tuple(np.argwhere(keep)[0])
            values[at] += 1
            changed[at] = True
        if self.how == "outside":
            changed[:] = False
            changed[0, 0, 0] = True
            values[0, 0, 1] += 1
        if self.how == "silent":
            changed[:] = False
            values[~keep] = 0
        if self.how == "type":
            values = values.astype(np.float64)
        return Defaced(values, changed)


@pytest.mark.parametrize("method", METHODS)
def test_every_series_of_a_study_shows_the_same(method: str) -> None:
    thick = flair()
    study = [HeadSeries(thick, "f"), HeadSeries(scan(0).volume, "f")]
    made = deface(study, examine, METHODS[method], dice())
    assert made.reference == 1
    for series, values, changed, kept in zip(study, made.values, made.changed, made.kept, strict=True):
        before = series.volume.values
        assert values.dtype == before.dtype
        assert np.array_equal(values[~changed], before[~changed])
        assert np.array_equal(values[kept], before[kept])
        assert (values != before).any()
    there = resample(made.changed[1], study[1].volume.affine, thick.values.shape, thick.affine, order=0) > 0.5
    inner = made.changed[0] & (resample(np.ones_like(made.changed[1]), study[1].volume.affine, thick.values.shape,
                                        thick.affine, order=0) > 0.5)  # fmt: skip
    assert 2 * (there & inner).sum() / (there.sum() + inner.sum()) > 0.85  # the same place in space


def test_a_flipped_series_keeps_its_own_axes() -> None:
    volume = scan(0).volume
    flipped = Volume(
        np.ascontiguousarray(volume.values[::-1, :, ::-1].transpose(2, 0, 1)), volume.affine @ _turn(volume)
    )
    seen: list[Volume] = []

    def look(found: Volume) -> HeadScan:
        seen.append(found)
        return true_head(0)

    made = deface([HeadSeries(flipped)], look, METHODS["deface"], dice())
    straight = deface([HeadSeries(volume)], lambda _: true_head(0), METHODS["deface"], dice())
    assert np.array_equal(made.values[0], straight.values[0][::-1, :, ::-1].transpose(2, 0, 1))
    assert seen == [flipped]


def _turn(volume: Volume) -> np.ndarray[Any, Any]:
    """Index of the flipped one to index of the straight one."""
    i, _, k = volume.values.shape
    return np.array([[0, -1, 0, i - 1], [0, 0, 1, 0], [-1, 0, 0, k - 1], [0, 0, 0, 1]], float)


@pytest.mark.parametrize(("how", "code"), [("brain", "brain_changed"), ("outside", ""), ("silent", ""), ("type", "")])
def test_a_method_that_breaks_a_promise_gives_out_nothing(how: str, code: str) -> None:
    with pytest.raises(ValueError, match=REASONS[code] if code else "keeps|outside"):
        deface([HeadSeries(scan(0).volume)], examine, Broken(how), dice())


def test_a_method_that_changes_nothing_leaves_the_face_on() -> None:
    with pytest.raises(NotDefacedError) as caught:
        deface([HeadSeries(scan(0).volume)], examine, Broken("nothing"), dice())
    assert caught.value.code == "nothing_changed"


def test_a_sign_of_zero_and_a_nan_are_differences() -> None:
    zeros = np.zeros((4, 4, 4), np.float32)
    volume, keep = Volume(zeros, np.eye(4)), np.zeros((4, 4, 4), bool)
    keep[0] = True
    for bad_value in (-0.0, np.nan):
        values = zeros.copy()
        values[0, 0, 0] = bad_value
        with pytest.raises(NotDefacedError, match="brain_changed"):
            checked(volume, keep, Defaced(values, ~keep))


def test_a_study_in_two_frames_is_refused_unless_they_are_aligned() -> None:
    study = [HeadSeries(flair(), "other"), HeadSeries(scan(0).volume, "f")]
    with pytest.raises(NotDefacedError) as caught:
        deface(study, examine, METHODS["deface"], dice())
    assert caught.value.code == "other_frame"
    asked = []

    def align(moving: Volume, fixed: Volume) -> np.ndarray[Any, Any]:
        asked.append((moving, fixed))
        return np.eye(4)

    made = deface(study, examine, METHODS["deface"], dice(), align)
    assert asked == [(study[0].volume, study[1].volume)]
    assert (made.values[0] != study[0].volume.values).any()


@pytest.mark.parametrize(("frames", "moved"), [(("", ""), 0.0), (("f", "f"), 25.0), (("f", "f"), 300.0)])
def test_a_series_is_not_believed_to_lie_where_it_says(frames: tuple[str, str], moved: float) -> None:
    """A patient who moved between two series: the face of the other one would stay on, in the place of the brain."""
    thick = flair()
    affine = thick.affine.copy()
    affine[2, 3] += moved
    study = [HeadSeries(scan(0).volume, frames[0]), HeadSeries(Volume(thick.values, affine), frames[1])]
    with pytest.raises(NotDefacedError) as caught:
        deface(study, examine, METHODS["strip"], dice())
    assert caught.value.code == "other_frame"


def test_an_alignment_is_not_believed_either() -> None:
    study = [HeadSeries(flair(), "other"), HeadSeries(scan(0).volume, "f")]
    wrong = np.eye(4)
    wrong[1, 3] = 40.0
    with pytest.raises(NotDefacedError) as caught:
        deface(study, examine, METHODS["strip"], dice(), lambda *_: wrong)
    assert caught.value.code == "other_frame"


def test_without_a_fine_series_no_study_is_de_faced() -> None:
    for study in ([HeadSeries(flair())], [HeadSeries(flair()), HeadSeries(flair())]):
        with pytest.raises(NotDefacedError) as caught:
            deface(study, examine, METHODS["deface"], dice())
        assert caught.value.code == ("too_coarse" if len(study) == 1 else "no_reference")


def test_a_finest_series_without_a_head_decides_for_the_study() -> None:
    bottle = bad()["bottle"]
    fine = Volume(bottle.values, np.diag([1.0, 1.0, 1.0, 1.0]))

    def look(volume: Volume) -> HeadScan:
        if volume is fine:
            raise NotDefacedError("no_head")
        return true_head(0)

    with pytest.raises(NotDefacedError) as caught:
        deface([HeadSeries(scan(0).volume), HeadSeries(fine)], look, METHODS["deface"], dice())
    assert caught.value.code == "no_head"
