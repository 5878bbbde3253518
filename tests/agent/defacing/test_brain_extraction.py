"""The brain of the real head is found, hardly any of it is lost, and what is no brain is not called one."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.bet import bet, filled, levels, sphere
from agent.defacing.brain_extraction import Atlas, Brain, carried, cavity, dice, extract, grown, hounsfield, likeness
from agent.defacing.head_mask import head_mask
from agent.defacing.template import atlas, register
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import spacing
from tests.support.heads import real_head

pytestmark = pytest.mark.timeout(900)  # brains are looked for, and heads drawn: a busy machine takes its time

template = cache(atlas)


@cache
def lies(mm: float = 3.0) -> NDArray[np.float64]:
    return register(real_head(mm)[0], template())


@cache
def found(mm: float = 3.0) -> Brain:
    return extract(real_head(mm)[0], template(), lambda volume, to: lies(mm))


def ball(mm: tuple[float, float, float], radius: float, shell: float) -> Volume:
    """A bright ball in a dark gap and a bright shell, in air."""
    shape = tuple(round(220 / edge) for edge in mm)
    middle = (np.array(shape) - 1) / 2
    away = np.sqrt(sum(((i - c) * e) ** 2 for i, c, e in zip(np.indices(shape), middle, mm, strict=True)))
    values = np.select([away < radius, away < radius + 6, away < radius + 6 + shell], [100.0, 10.0, 160.0], 0.0)
    return Volume(values.astype(np.float32), np.diag([*mm, 1.0]))


def test_the_sphere_is_closed_even_and_faces_outwards() -> None:
    whole = sphere()
    assert whole.points.shape == (2562, 3)
    assert whole.faces.shape == (5120, 3)  # Euler: v - e + f = 2, with e = 3 f / 2
    edges = np.sort(np.concatenate([whole.faces[:, [0, 1]], whole.faces[:, [1, 2]], whole.faces[:, [2, 0]]]), axis=1)
    assert (np.unique(edges, axis=0, return_counts=True)[1] == 2).all()  # every edge has two sides
    a, b, c = (whole.points[whole.faces[:, n]] for n in range(3))
    assert (np.einsum("fi,fi->f", np.cross(b - a, c - a), a) > 0).all()
    assert np.allclose(whole.weight.sum(axis=1), 1)
    assert (whole.touching[:, 5] == len(whole.faces)).sum() == 12  # the corners of the icosahedron


def test_a_filled_surface_has_the_volume_of_a_ball() -> None:
    whole = sphere()
    mask = filled(whole.points * 20 + 30, whole.faces, (61, 61, 61))
    assert 4 / 3 * np.pi * 19.5**3 < mask.sum() < 4 / 3 * np.pi * 20.9**3  # whatever it touches belongs to it


def test_a_surface_that_leaves_the_picture_is_cut_and_stays_full() -> None:
    whole = sphere()
    mask = filled(whole.points * 20 + [30, 30, 5], whole.faces, (61, 61, 61))
    assert mask[30, 30, 0]
    assert mask[30, 30, 10]
    assert not mask[30, 30, 40]


@pytest.mark.parametrize("mm", [(2.0, 2.0, 2.0), (1.5, 3.0, 2.0)])
def test_bet_finds_a_ball_within_a_shell_on_any_grid(
    mm: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.defacing.bet.ITERATIONS", 200)
    volume = ball(mm, 70, 8)
    litres = float(bet(volume).sum() * np.prod(mm)) / 1e6
    assert litres == pytest.approx(4 / 3 * np.pi * 0.7**3, rel=0.12)


def test_nothing_to_put_a_sphere_into_is_no_head() -> None:
    with pytest.raises(NotDefacedError, match="no_head"):
        levels(np.zeros((40, 40, 40), np.float32), 2.0)


def test_hardly_any_brain_of_the_real_head_is_lost() -> None:
    _, true = real_head(3.0)
    lost = int((true & ~found().mask).sum()) / int(true.sum())
    assert lost <= 0.001


def test_the_estimate_overlaps_the_published_mask() -> None:
    _, true = real_head(3.0)
    assert dice(found().tight, true) >= 0.95
    assert found().agreement >= 0.9
    assert not (found().tight & ~found().mask).any()


def test_one_of_the_two_alone_would_lose_more() -> None:
    volume, true = real_head(3.0)
    alone = carried(template().brain, template(), lies(), volume)
    assert int((true & ~alone).sum()) > 10 * int((true & ~found().mask).sum())


def test_the_same_volume_gives_the_same_brain_bit_for_bit() -> None:
    volume, _ = real_head(3.0)
    template_alone = carried(template().brain, template(), lies(), volume)
    assert np.array_equal(bet(volume, 0.7) & template_alone, found().tight)


def test_a_surface_that_burst_through_the_skull_is_not_believed_far_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.defacing.bet.ITERATIONS", 200)
    volume, _ = real_head(3.0)
    solid = Volume(np.where(volume.values > 25, 120, 0).astype(np.uint8), volume.affine)  # no gap to the skull
    broken = extract(solid, template(), lambda *_: lies())
    far = grown(carried(template().brain, template(), lies(), volume), spacing(volume.affine), 10.0)
    assert (bet(solid) & ~far).sum() > 0.05 * far.sum()
    assert not (broken.mask & ~far).any()


def test_a_mask_of_the_operators_own_takes_the_place_of_the_union() -> None:
    volume, true = real_head(3.0)
    brain = extract(volume, template(), lambda *_: lies(), true)
    assert np.array_equal(brain.mask, true)
    assert np.array_equal(brain.tight, true)
    assert brain.agreement == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("mask", [np.zeros((61, 73, 61), bool), np.ones((4, 4, 4), bool)])
def test_a_mask_that_is_empty_or_of_another_grid_is_refused(mask: NDArray[np.bool_]) -> None:
    with pytest.raises(NotDefacedError, match="mask_does_not_fit"):
        extract(real_head(3.0)[0], template(), lambda *_: lies(), mask)


def test_likeness_asks_for_tissue_and_not_for_a_contrast() -> None:
    volume, _ = real_head(3.0)
    like = likeness(volume, template(), lies())
    inverted = Volume(np.where(volume.values > 25, 255 - volume.values, 0).astype(np.uint8), volume.affine)
    noise = np.random.default_rng(0).normal(size=volume.values.shape).astype(np.float32)
    assert like > 0.5
    assert likeness(inverted, template(), lies()) > 0.2
    assert likeness(Volume(noise, volume.affine), template(), lies()) < 0.05
    assert likeness(Volume(np.ones_like(noise), volume.affine), template(), lies()) == 0.0


def test_a_turned_head_is_found_as_well_through_its_affine() -> None:
    volume, _ = real_head(3.0)
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]]
    oblique = Volume(volume.values, turn @ volume.affine)
    carried_over = carried(template().brain, template(), lies() @ np.linalg.inv(turn), oblique)
    assert np.array_equal(carried_over, carried(template().brain, template(), lies(), volume))


def test_two_empty_masks_do_not_agree() -> None:
    nothing = np.zeros((2, 2, 2), bool)
    assert not dice(nothing, nothing) >= 0.0
    assert not grown(nothing, np.ones(3), 5.0).any()


def test_a_brain_or_an_atlas_that_makes_no_sense_is_not_built() -> None:
    mask = np.ones((2, 2, 2), bool)
    with pytest.raises(ValueError, match="within the mask"):
        Brain(np.zeros_like(mask), 1.0, np.eye(4), mask)
    with pytest.raises(ValueError, match="finite"):
        Brain(mask, 1.0, np.full((4, 4), np.nan))
    with pytest.raises(ValueError, match="bool"):
        Brain(mask.astype(np.uint8), 1.0, np.eye(4))  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="an atlas"):
        Atlas(np.zeros((2, 2, 2)), np.zeros((2, 2, 2), bool), np.eye(4))


@cache
def ct() -> Volume:
    """The real head as a CT would have it: 3 mm of fluid and 6 mm of bone around its brain, the rest soft tissue."""
    volume, true = real_head(3.0)
    skin = head_mask(volume)
    away = ndimage.distance_transform_edt(~true, sampling=3.0)
    materials = [true, away <= 3, (away <= 9) & skin, skin]
    values = np.select(materials, [35.0, 10.0, 1000.0, 50.0], -1000.0)
    noise = np.random.default_rng(0).normal(0, 8, values.shape)
    return Volume(np.rint(values + noise).astype(np.int16), volume.affine)


def test_ct_is_known_by_its_numbers_whatever_its_file_adds() -> None:
    volume = ct()
    units = hounsfield(volume)
    stored = hounsfield(Volume((volume.values + 1024).clip(0).astype(np.uint16), volume.affine))
    assert units is not None
    assert stored is not None
    assert np.abs(units.values - volume.values).max() < 200  # of bone; soft tissue is what it is scaled by
    assert np.allclose(stored.values, units.values, atol=25)  # its darkest noise is cut at nothing
    assert hounsfield(real_head(3.0)[0]) is None


def test_the_cavity_of_the_skull_is_the_brain_in_ct() -> None:
    _, true = real_head(3.0)
    brain = extract(ct(), template(), lambda *_: lies())
    assert int((true & ~brain.mask).sum()) <= 0.006 * int(true.sum())
    assert dice(brain.tight, true) >= 0.9
    assert brain.agreement >= 0.9


def test_a_skull_that_holds_nothing_is_no_head() -> None:
    air = Volume(np.full((60, 60, 60), -1000, np.float32), np.diag([3.0, 3.0, 3.0, 1.0]))
    with pytest.raises(NotDefacedError, match="no_head"):
        cavity(air)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["clean", "bias", "noise"])
def test_at_one_millimetre_a_thousandth_of_the_brain_is_lost_at_most(state: str) -> None:
    volume, true = real_head(1.0)
    rng = np.random.default_rng(0)
    values = volume.values.astype(np.float32)
    if state == "bias":
        i, j, k = np.meshgrid(*[np.linspace(-1, 1, n) for n in values.shape], indexing="ij", sparse=True)
        values *= 1 + 0.4 * (0.6 * i + 0.5 * j - 0.4 * k) / 1.5
    if state == "noise":
        values = np.hypot(values + rng.normal(0, 10, values.shape), rng.normal(0, 10, values.shape)).astype(
            np.float32
        )
    brain = extract(Volume(values, volume.affine), template(), register)
    assert int((true & ~brain.mask).sum()) <= 0.0012 * int(true.sum())
    assert dice(brain.tight, true) >= 0.95
    assert ndimage.label(brain.mask)[1] == 1
