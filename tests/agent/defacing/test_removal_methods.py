"""The methods that the paper compares with: each on the real head, on other series, and against what it copies."""

from __future__ import annotations

import warnings
from dataclasses import replace

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray

from agent.defacing.brain_extraction import Brain
from agent.defacing.change import checked
from agent.defacing.head import HeadScan
from agent.defacing.removal_methods import BUFFER_MM, LABELS, METHODS, air, deface, lower_hull, quickshear
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import resample
from tests.support import heads

RNG = np.random.default_rng(0)


def whole(mm: float = 4.0) -> HeadScan:
    """A made person with nose and chin, with the true brain and the true place."""
    return heads.true_head(0, 0, mm)


def with_brain(head: HeadScan, mask: NDArray[np.bool_]) -> HeadScan:
    return replace(head, brain=Brain(mask, 1.0, head.brain.to_template))


def laid(method: str, head: HeadScan, volume: Volume | None = None) -> tuple[Volume, NDArray[np.bool_], Volume]:
    """A method onto a series: the series, what is kept of it, what it became."""
    volume = volume or head.volume
    at = (head.volume.affine, volume.values.shape, volume.affine)
    keep = resample(head.brain.mask, *at, order=0) > 0.5
    made = checked(volume, keep, METHODS[method](head, RNG).onto(volume, keep, RNG))
    return volume, made.changed, Volume(made.values, volume.affine)


def at_mark(name: str, seen: NDArray[np.bool_], volume: Volume, reach: int = 1) -> NDArray[np.bool_]:
    """What a mask is about one landmark."""
    mark = np.linalg.inv(volume.affine) @ np.array([*heads.scan(0).landmarks[name], 1.0])
    i, j, k = np.rint(mark[:3]).astype(int)
    return seen[i - reach : i + reach + 1, j - reach : j + reach + 1, k - reach : k + reach + 1]


def test_every_method_is_labelled_for_what_it_is() -> None:
    assert METHODS.keys() == LABELS.keys() == {"quickshear", "facemask", "deface", "strip"}


@pytest.mark.parametrize("method", METHODS)
def test_the_brain_and_all_outside_the_changed_mask_stay_bit_for_bit(method: str) -> None:
    head = whole()
    volume, changed, made = laid(method, head)  # checked() has compared the bits
    assert made.values.dtype == volume.values.dtype
    assert not (changed & head.brain.mask).any()
    assert (made.values != volume.values).any()


def test_a_method_that_forgot_to_keep_the_brain_would_be_caught() -> None:
    head = whole()
    forgotten = np.zeros(head.brain.mask.shape, bool)
    made = METHODS["strip"](head, RNG).onto(head.volume, forgotten, RNG)
    with pytest.raises(NotDefacedError, match="brain_changed"):
        checked(head.volume, head.brain.mask, made)


@pytest.mark.parametrize("method", ["quickshear", "facemask", "deface", "strip"])
def test_the_nose_is_no_longer_there(method: str) -> None:
    volume, changed, _ = laid(method, whole())
    assert at_mark("nose_tip", changed, volume).all()


@pytest.mark.parametrize("method", ["quickshear", "facemask", "deface"])
def test_methods_that_keep_the_head_keep_its_back(method: str) -> None:
    head = whole()
    _, changed, _ = laid(method, head)
    to = head.brain.to_template @ head.volume.affine
    y = np.tensordot(to[1, :3], np.indices(changed.shape), 1) + to[1, 3]
    assert not (changed & head.skin & (y < -70)).any()
    assert (changed & head.skin).sum() < 0.5 * head.skin.sum()


def test_stripping_leaves_the_brain_alone() -> None:
    head = whole()
    volume, changed, made = laid("strip", head)
    assert (changed == ~head.brain.mask).all()
    assert len(np.unique(made.values[changed])) == 1
    assert (made.values[head.brain.mask] == volume.values[head.brain.mask]).all()


@pytest.mark.parametrize("method", METHODS)
def test_another_series_of_the_study_changes_at_the_same_places(method: str) -> None:
    head = whole()
    turned = np.array([[0.9962, -0.0872, 0, 3.0], [0.0872, 0.9962, 0, -5.0], [0, 0, 1, 2.0], [0, 0, 0, 1]])
    affine = turned @ head.volume.affine @ np.diag([1.0, 1.0, 1.25, 1.0])
    shape = (*head.volume.values.shape[:2], round(head.volume.values.shape[2] / 1.25))
    other = Volume(resample(head.volume.values, head.volume.affine, shape, affine).astype(np.int16), affine)
    _, here, _ = laid(method, head)
    _, there, made = laid(method, head, other)
    assert made.values.dtype == np.int16
    back = resample(there, affine, here.shape, head.volume.affine, order=0) > 0.5
    inside = resample(np.ones(shape, np.uint8), affine, here.shape, head.volume.affine, order=0) > 0.5
    both = 2 * (back & here & inside).sum() / ((back & inside).sum() + (here & inside).sum())
    assert both > 0.93


def test_air_of_a_ct_is_not_water() -> None:
    head = whole()
    ct = Volume(heads.phantoms().scan(0, 0, 4.0, "CT").volume.values, head.volume.affine)
    assert -1030 < int(air(ct, head)) < -950
    _, changed, made = laid("deface", replace(head, volume=ct))
    assert (made.values[changed] < -950).all()


def test_air_is_a_stored_number_where_the_picture_is_full() -> None:
    head = whole()
    full = replace(head, skin=np.ones_like(head.skin))
    assert air(head.volume, full) == head.volume.values.min()


def test_the_user_may_draw_another_face() -> None:
    head = whole()
    affine = np.diag([4.0, 4.0, 4.0, 1.0])
    affine[:3, 3] = -100.0, -140.0, -160.0
    drawn = np.zeros((50, 70, 60), np.uint8)
    drawn[:, 40:, :20] = 1  # y >= 20 and z < -80 of the template: mouth and chin
    made = deface(head, RNG, Volume(drawn, affine)).onto(head.volume, head.brain.mask, RNG)
    assert at_mark("chin", made.changed, head.volume).all()
    assert not at_mark("nasion", made.changed, head.volume).any()


# QUICKSHEAR


def sheared(volume: Volume, brain: NDArray[np.bool_], buffer: float) -> NDArray[np.bool_]:
    """What the package itself would empty."""
    package = pytest.importorskip("quickshear")
    ones = nibabel.Nifti1Image(np.ones(volume.values.shape, np.uint8), volume.affine)
    mask = nibabel.Nifti1Image(brain.astype(np.uint8), volume.affine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return np.asarray(package.quickshear(ones, mask, buffer).dataobj) == 0


def ball(shape: tuple[int, int, int], edges: tuple[float, float, float]) -> HeadScan:
    """A head with an egg for a brain, in the middle of a picture of this shape."""
    affine = np.diag([*edges, 1.0])
    at = (np.indices(shape).T * edges).T - (np.array(shape) * edges / 2)[:, None, None, None]
    brain = ((at / np.array([65.0, 80.0, 60.0])[:, None, None, None]) ** 2).sum(axis=0) < 1
    values = np.full(shape, 100, np.int16)
    values[:, :2], values[:, -2:] = 0, 0
    return HeadScan(Volume(values, affine), values > 50, Brain(brain, 1.0, np.eye(4)))


def test_on_a_cube_the_cut_is_that_of_the_package() -> None:
    head = ball((50, 50, 50), (4.0, 4.0, 4.0))
    theirs = sheared(head.volume, head.brain.mask, BUFFER_MM / 4.0)
    ours = quickshear(head, RNG).onto(head.volume, head.brain.mask, RNG).changed
    assert theirs.sum() > 1000
    # they cut whole rows of voxels and round downwards: never more than one voxel apart
    low, ahead = theirs.sum(axis=2), ours.sum(axis=2)
    assert (ahead - low).min() >= 0
    assert (ahead - low).max() <= 1


def test_on_a_short_stack_the_package_cuts_too_few_rows_and_ours_does_not() -> None:
    tall, short = ball((50, 50, 50), (4.0, 4.0, 4.0)), ball((50, 50, 25), (4.0, 4.0, 8.0))
    flat = ball((50, 100, 25), (4.0, 2.0, 8.0))
    for head in (short, flat):
        theirs = sheared(head.volume, head.brain.mask, BUFFER_MM / 8.0)  # its buffer counts slices
        volume = float(np.abs(np.linalg.det(head.volume.affine)))
        ours = quickshear(head, RNG).onto(head.volume, head.brain.mask, RNG).changed
        full = quickshear(tall, RNG).onto(tall.volume, tall.brain.mask, RNG).changed.sum() * 64.0
        assert ours.sum() * volume == pytest.approx(full, rel=0.35)  # the plane hangs on two voxels of the profile
        assert theirs.sum() < ours.sum()
    rows = sheared(flat.volume, flat.brain.mask, BUFFER_MM / 8.0).any(axis=(0, 2)).sum()
    assert rows <= 25  # of 100: as many as there are slices


def gap(head: HeadScan, cut: NDArray[np.bool_]) -> float:
    """How far straight under the brain a cut ends, in mm, where it comes nearest."""
    brain, gone = head.brain.mask.any(axis=0), cut.any(axis=0)
    rows = np.flatnonzero(brain.any(axis=1) & gone.any(axis=1))
    below = [int(brain[j].argmax()) - int(gone[j].nonzero()[0].max()) for j in rows]
    return float(min(below) * head.volume.affine[2, 2])


def test_the_packages_buffer_is_voxels_and_ours_millimetres() -> None:
    fine, coarse = ball((100, 100, 100), (2.0, 2.0, 2.0)), ball((50, 50, 50), (4.0, 4.0, 4.0))
    for head in (fine, coarse):
        edge = float(head.volume.affine[0, 0])
        ours = quickshear(head, RNG).onto(head.volume, head.brain.mask, RNG).changed
        assert BUFFER_MM <= gap(head, ours) <= BUFFER_MM + 4 * edge
    theirs = [gap(head, sheared(head.volume, head.brain.mask, 10)) for head in (fine, coarse)]
    assert theirs[0] >= 20.0
    assert theirs[1] >= 40.0


def test_the_lower_hull_is_convex_and_under_everything() -> None:
    points = np.random.default_rng(1).integers(0, 40, (300, 2))
    low = lower_hull(points)
    slopes = np.diff(low[:, 1]) / np.diff(low[:, 0])
    assert (np.diff(slopes) > 0).all()
    assert (np.interp(points[:, 0], low[:, 0], low[:, 1]) <= points[:, 1] + 1e-9).all()


def test_no_brain_no_plane() -> None:
    head = ball((50, 50, 50), (4.0, 4.0, 4.0))
    with pytest.raises(NotDefacedError, match="brain_volume"):
        quickshear(with_brain(head, np.zeros_like(head.brain.mask)), RNG)


def test_no_front_no_layer() -> None:
    head = whole()
    away = head.brain.to_template.copy()
    away[1, 3] -= 400.0
    with pytest.raises(NotDefacedError, match="no_face"):
        METHODS["facemask"](replace(head, brain=replace(head.brain, to_template=away)), RNG)
