"""Pasting: brain and surroundings bit for bit, one contour, air without ghosts, every series in its own numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.change import Defaced, checked
from agent.defacing.compositing import LEAST, Contrast, Field, Paste, learned, made_head, outside, pasted, signed
from agent.defacing.face_region import Region
from agent.defacing.head_mask import head_mask, noise
from agent.defacing.privacy_transform import transform
from agent.defacing.remodel import remodel
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import Cube, resample
from deploy.phantoms.heads import Grid, Scan, isotropic
from tests.support.heads import phantoms, scan
from tests.support.pasting import SIDE, averaged, ghosted, head_of, with_face


@cache
def _drawn_for(number: int) -> Paste:
    return remodel(head_of(scan(number)), averaged(), Region(), np.random.default_rng(5))


def _change(made: Scan, region: Region) -> Paste:
    if made is scan(0):
        return replace(_drawn_for(0), region=region)
    return remodel(head_of(made), averaged(), region, np.random.default_rng(5))


@cache
def _done(parts: Any) -> Defaced:
    made = scan(0)
    return _change(made, Region(parts)).onto(made.volume, made.brain, np.random.default_rng(6))


def _onto(change: Paste, volume: Volume, brain: NDArray[np.bool_]) -> Defaced:
    return checked(volume, brain, change.onto(volume, brain, np.random.default_rng(6)))


@pytest.mark.parametrize("parts", ["face", "surface"])
@pytest.mark.parametrize("kind", [np.uint16, np.int16, np.uint8, np.float32, np.float64])
def test_brain_and_all_outside_the_region_are_bit_identical(parts: Any, kind: Any) -> None:
    made = scan(0)
    values = (made.volume.values // 16).astype(kind)
    volume = Volume(values, made.volume.affine)
    change = _change(made, Region(parts))
    done = change.onto(volume, made.brain, np.random.default_rng(6))
    same = done.values.view(f"u{values.itemsize}") == values.view(f"u{values.itemsize}")
    assert (done.values.dtype, done.values.shape) == (values.dtype, values.shape)
    assert bool(same[made.brain].all())
    assert bool(same[~done.changed].all())
    assert done.values.min() >= values.min()
    assert done.values.max() <= values.max()
    assert float((~same).mean()) > 0.2
    assert np.array_equal(values, (made.volume.values // 16).astype(kind))  # what was given is as it was


@pytest.mark.parametrize("parts", ["face", "surface"])
def test_nothing_changes_within_the_margin_of_the_brain(parts: Any) -> None:
    made = scan(0)
    away = outside(made.brain, made.volume.affine).values
    deep = signed(head_mask(made.volume), made.volume.affine).values < -3.0
    for margin in (3.0, 6.0, 10.0):
        done = _change(made, Region(parts, margin_mm=margin)).onto(made.volume, made.brain, np.random.default_rng(6))
        assert not bool((done.changed & (away <= margin) & deep).any())
        assert bool((done.changed & (away <= margin + 4.5)).any())


def test_a_margin_that_is_not_kept_is_seen() -> None:
    made = scan(0)
    done = _done("face")
    broken = Defaced(np.where(made.brain, done.values + 1, done.values).astype(done.values.dtype), done.changed)
    with pytest.raises(NotDefacedError, match="brain_changed"):
        checked(made.volume, made.brain, broken)


def test_skin_close_to_the_brain_is_changed_all_the_same() -> None:
    """An operator's mask that is too wide must not keep the face that lies under its margin."""
    made = scan(0)
    wide = ndimage.binary_dilation(made.brain, iterations=2) & head_mask(made.volume)
    change = _change(made, Region(margin_mm=15.0))
    done = change.onto(made.volume, wide, np.random.default_rng(6))
    share = Region().share(made.to_template, made.volume.affine, made.volume.values.shape)
    skin = signed(head_mask(made.volume), made.volume.affine).values
    rim = (np.abs(skin) < 3.0) & (share > 0) & ~wide
    assert bool(done.changed[rim].all())
    new = head_mask(Volume(done.values, made.volume.affine))
    assert not bool((wide & ~new).any())


@pytest.mark.parametrize("parts", ["face", "surface"])
def test_under_the_made_skin_nothing_depends_on_the_face_that_was_there(parts: Any) -> None:
    """So no second contour can be found, however faint: but for a unit of a median the numbers are the same."""
    one, other = scan(0), with_face(scan(0), 6.0)
    results, changes = [], []
    for made in (one, other):
        change = _change(made, Region(parts))
        changes.append(change)
        results.append(change.onto(made.volume, made.brain, np.random.default_rng(6)).values)
    affine, shape = one.volume.affine, one.volume.values.shape
    share = Region(parts).share(one.to_template, affine, shape)
    inside = changes[0].made.surface.on(affine, shape, 99.0) < -4.0
    core = (share == 1.0) & inside & (outside(one.brain, affine).values > 12.0)
    assert int(core.sum()) > 3000
    assert float((one.volume.values != other.volume.values)[core].mean()) > 0.005
    tissue = float(np.median(one.volume.values[one.brain]))
    assert float(np.abs(results[0].astype(int) - results[1])[core].max()) < 0.01 * tissue


def test_a_paste_that_lets_the_original_shine_through_is_seen() -> None:
    one, other = scan(0), with_face(scan(0), 6.0)
    done = [_change(m, Region()).onto(m.volume, m.brain, np.random.default_rng(6)).values for m in (one, other)]
    mixed = [0.9 * d + 0.1 * m.volume.values for d, m in zip(done, (one, other), strict=True)]
    share = Region().share(one.to_template, one.volume.affine, one.volume.values.shape)
    core = (share == 1.0) & (outside(one.brain, one.volume.affine).values > 12.0)
    tissue = float(np.median(one.volume.values[one.brain]))
    assert float(np.abs(mixed[0] - mixed[1])[core].max()) > 0.05 * tissue


def test_ghosts_in_the_air_are_gone_and_a_paste_that_left_them_is_seen() -> None:
    made = scan(0)
    volume, ghost = ghosted(made)
    done = _onto(_change(replace(made, volume=volume), Region()), volume, made.brain)
    air = ~ndimage.binary_dilation(head_mask(volume) | head_mask(Volume(done.values, volume.affine)), iterations=3)
    assert float(np.corrcoef(volume.values[air], ghost[air])[0, 1]) > 0.5
    assert abs(float(np.corrcoef(done.values[air], ghost[air])[0, 1])) < 0.03
    assert bool(done.changed[air].all())


def test_what_is_wrapped_around_over_the_vault_is_gone_even_if_it_touches_the_head() -> None:
    made = scan(0)
    values = made.volume.values.copy()
    lies = made.to_template @ made.volume.affine
    grid = (
        np.stack(np.meshgrid(*(np.arange(n) for n in values.shape), indexing="ij"), -1) @ lies[:3, :3].T + lies[:3, 3]
    )
    wrapped = (np.linalg.norm(grid - (0.0, -135.0, 20.0), axis=-1) < 26.0) & ~head_mask(made.volume)
    values[wrapped] = int(np.median(values[made.brain]))
    volume = Volume(values, made.volume.affine)
    assert bool((head_mask(volume) & wrapped).any())
    done = _onto(_change(replace(made, volume=volume), Region()), volume, made.brain)
    far = wrapped & (outside(made.brain, volume.affine).values > 40.0)
    assert int(far.sum()) > 20
    assert float(done.values[far].mean()) < 0.2 * float(values[far].mean())


def test_the_new_air_follows_the_law_of_the_old() -> None:
    made = scan(0)
    done = _done("surface")
    old = noise(made.volume, head_mask(made.volume)).astype(float)
    front = np.zeros(done.values.shape, bool)
    front[2:-2, -6:-2, 4:20] = True
    new = done.values[front & done.changed].astype(float)
    assert abs(new.mean() - old.mean()) < 0.05 * old.mean()
    assert abs(new.std() - old.std()) < 0.1 * old.std()
    neighbours = np.corrcoef(new[:-1], new[1:])[0, 1]
    assert abs(float(neighbours)) < 0.1


@pytest.mark.parametrize("contrast", ["T2", "FLAIR", "CT"])
def test_every_series_keeps_its_own_numbers(contrast: Any) -> None:
    made = scan(0)
    thick = isotropic(4.0)
    affine = thick.affine @ np.diag((0.75, 0.75, 1.5, 1.0))  # slices of 6 mm
    grid = Grid(affine, (70, 86, 43))
    series = phantoms().scan(0, 0, contrast=contrast, grid=grid)
    done = _onto(_change(made, Region()), series.volume, series.brain)
    old, new = series.volume.values.astype(float), done.values.astype(float)
    before, after = head_mask(series.volume), head_mask(Volume(done.values, series.volume.affine))
    face = done.changed & before & after & (outside(series.brain, affine).values > 14.0)
    air = done.changed & ~before & ~after
    level = float(np.median(old[before & ~series.brain])) - float(np.median(old[air]))
    assert int(face.sum()) > 1000
    assert abs(float(np.median(new[face]) - np.median(old[face]))) < 0.35 * level
    # a few grazed voxels have another side of the skin
    assert abs(float(np.median(new[air]) - np.median(old[air]))) < 0.05 * level


def test_a_series_that_shares_nothing_with_the_head_is_refused() -> None:
    made = scan(0)
    far = made.volume.affine.copy()
    far[:3, 3] += 900.0
    with pytest.raises(NotDefacedError, match="other_frame"):
        _change(made, Region()).onto(
            Volume(made.volume.values, far), np.zeros_like(made.brain), np.random.default_rng(1)
        )


def test_what_is_kept_must_lie_on_the_series_grid() -> None:
    made = scan(0)
    with pytest.raises(ValueError, match="grid"):
        _change(made, Region()).onto(made.volume, made.brain[1:], np.random.default_rng(1))


def test_a_series_that_shows_more_than_the_finest_one_shows_no_face_there() -> None:
    """The finest series ends above the mouth; the other one shows the chin."""
    whole = scan(0)
    cut = slice(22, None)
    affine = whole.volume.affine.copy()
    affine[:3, 3] += affine[:3, 2] * 22
    part = replace(whole, volume=Volume(whole.volume.values[:, :, cut].copy(), affine), brain=whole.brain[:, :, cut])
    one, other = whole, with_face(whole, 8.0)
    done = [_onto(_change(part, Region()), made.volume, made.brain).values for made in (one, other)]
    below = np.zeros(whole.brain.shape, bool)
    below[:, :, :20] = True
    share = Region().share(whole.to_template, whole.volume.affine, whole.brain.shape)
    # the floor and the roof of what is stored are the series' own, and grow with a nose
    assert np.abs(done[0].astype(int) - done[1].astype(int))[below & (share == 1.0)].max() <= 2


def _cube() -> tuple[NDArray[np.float32], Cube]:
    head = head_of(scan(0))
    gamma = transform(head, SIDE, averaged().population)
    return averaged().draw(gamma, np.random.default_rng(2)), gamma.cube


def test_a_made_head_lies_where_it_was_drawn_and_its_neck_goes_on() -> None:
    values, cube = _cube()
    made = made_head(values, cube)
    inside = made.surface.on(cube.affine, cube.shape, 99.0) < 0.0
    drawn = head_mask(Volume(values, cube.affine))
    both = float((inside & drawn).sum())
    assert 2 * both / float(inside.sum() + drawn.sum()) > 0.93
    below = cube.affine.copy()
    below[:3, 3] -= cube.affine[:3, 2] * 10
    neck = made.surface.on(below, (SIDE, SIDE, 8), 99.0) < 0.0
    assert bool(neck.any(axis=(0, 1)).all())
    assert not bool(neck[:, SIDE * 3 // 4 :].any())  # it recedes from under the chin


def test_a_drawn_head_fills_its_cube() -> None:
    values, cube = _cube()
    with pytest.raises(ValueError, match="cube"):
        made_head(values[1:], cube)


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_an_even_cube_is_no_head(value: float) -> None:
    _, cube = _cube()
    with pytest.raises(NotDefacedError, match="no_head"):
        made_head(np.full(cube.shape, value, np.float32), cube)


def test_distances_are_those_to_a_ball() -> None:
    grid = np.stack(np.meshgrid(*(np.arange(40.0),) * 3, indexing="ij"), -1)
    away = np.linalg.norm(grid - 19.5, axis=-1) * 2.0
    found = signed(away < 25.0, np.diag((2.0, 2.0, 2.0, 1.0)))
    assert float(np.abs(found.values - (away - 25.0)).max()) < 2.0
    fine = signed(np.repeat(away < 25.0, 4, 2), np.diag((2.0, 2.0, 0.5, 1.0)))  # thinned to what is needed
    assert fine.values.shape == (40, 40, 80)
    back = resample(fine.values, fine.affine, (40, 40, 160), np.diag((2.0, 2.0, 0.5, 1.0)))[:, :, :152]
    assert float(np.abs(back - np.repeat(away - 25.0, 4, 2)[:, :, :152]).max()) < 2.6


def test_a_distance_to_a_thinned_mask_is_never_too_long() -> None:
    mask = np.zeros((30, 30, 120), bool)
    mask[10:20, 10:20, 41:80] = True
    truth = ndimage.distance_transform_edt(~mask, sampling=(1.0, 1.0, 0.25))
    found = outside(mask, np.diag((1.0, 1.0, 0.25, 1.0)))
    np.testing.assert_array_less(found.values, truth[:, :, ::3] + 1e-5)


def test_an_empty_mask_is_far_away() -> None:
    nothing, grid = np.zeros((4, 4, 4), bool), np.eye(4)
    assert float(outside(nothing, grid).values.min()) > 500.0
    assert float(signed(nothing, grid).values.min()) > 500.0
    assert float(signed(~nothing, grid).values.max()) < -500.0


def _tissue(count: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).uniform(0.1, 0.9, count).astype(np.float32)


def test_a_contrast_is_learned_that_is_not_monotone() -> None:
    made = _tissue(20_000)
    finest = 1000.0 * made
    series = (300.0 - 900.0 * (made - 0.5) ** 2).astype(np.float32)
    air = np.random.default_rng(2).rayleigh(5.0, 4000)
    brain = np.stack([np.random.default_rng(s).normal(100.0, 4.0, 3000) for s in (3, 4, 5)], 1).astype(np.float32)
    found = learned(made, finest, series, air, brain)
    still = Contrast(found.made, found.own, found.air, 0.0)
    new = still.tissue(made, np.random.default_rng(0))
    assert float(np.abs(new - series).mean()) < 3.0
    assert 3.0 < found.grain < 5.0
    drawn = still.nothing((50_000,), np.random.default_rng(0))
    assert abs(float(drawn.mean()) - float(air.mean())) < 0.1
    assert abs(float(drawn.std()) - float(air.std())) < 0.2


def test_too_little_tissue_teaches_nothing() -> None:
    few = _tissue(LEAST - 1)
    with pytest.raises(NotDefacedError, match="other_frame"):
        learned(few, few, few, np.zeros(10), np.empty((0, 3), np.float32))


def test_air_that_was_masked_stays_so() -> None:
    made = _tissue(5000)
    found = learned(made, made, made, np.zeros(500, np.uint8), np.empty((0, 3), np.float32))
    assert not found.nothing((100,), np.random.default_rng(0)).any()


def test_a_head_can_be_pasted_without_a_network() -> None:
    made = scan(0)
    values, cube = _cube()
    change = _change(made, Region())
    again = pasted(change.original, values, cube, Region())
    assert again.region == Region()
    assert again.made.tissue.values.shape[0] == SIDE


def test_a_head_that_was_drawn_dark_up_to_the_air_is_closed_by_skin() -> None:
    """A coarse network draws bone at the brow; without skin over it a rendering would show a pit."""
    made = scan(0)
    values, cube = _cube()
    whole = made_head(values, cube)
    tissue = whole.tissue.values.copy()
    tissue[whole.surface.on(whole.tissue.affine, tissue.shape, 99.0) > -12.0] *= 0.1
    dark = replace(whole, tissue=Field(tissue, whole.tissue.affine))
    change = _change(made, Region())
    skins = []
    for given in (whole, dark, replace(dark, skin=0.0)):
        again = replace(change, made=given)
        done = _onto(again, made.volume, made.brain)
        ends = again.made.surface.on(made.volume.affine, made.brain.shape, 99.0)
        skin = head_mask(Volume(done.values, made.volume.affine))
        share = Region().share(made.to_template, made.volume.affine, made.brain.shape)
        skins.append(float(skin[(share == 1.0) & (ends < -3.0)].mean()))
    assert min(skins[:2]) > 0.995
    assert skins[2] < 0.95  # so that this would be seen
