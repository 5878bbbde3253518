"""Remodelling: what a rendering shows afterwards does not depend on the face that was there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.defacing.brain_extraction import Brain
from agent.defacing.change import checked
from agent.defacing.deid_gan.network import remodeller_from
from agent.defacing.face_region import Region
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.defacing.privacy_transform import Gamma, transform, whole_head
from agent.defacing.remodel import HeadGenerator, around_template, remodel
from agent.defacing.template import atlas
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from deploy.demo.train_networks import kept_network
from deploy.phantoms.heads import Scan, isotropic
from tests.support.heads import phantoms, scan
from tests.support.pasting import SIDE, VIEWS, averaged, depth, head_of, shows, with_face

pytestmark = pytest.mark.timeout(900)  # brains are looked for, and heads drawn: a busy machine takes its time


def _remodelled(made: Scan, region: Region, seed: int = 5, draws: HeadGenerator | None = None) -> Volume:
    head, rng = head_of(made), np.random.default_rng(seed)
    change = remodel(head, averaged() if draws is None else draws, region, rng)
    values = checked(head.volume, made.brain, change.onto(head.volume, made.brain, rng)).values
    return Volume(values, made.volume.affine)


class WithoutEars(Region):
    """A region that somebody forgot the ears in."""

    def share(
        self, to_template: NDArray[np.float64], grid: NDArray[np.float64], shape: tuple[int, int, int]
    ) -> NDArray[np.float32]:
        share = Region.share(self, to_template, grid, shape)
        x = (to_template @ grid)[0, 0] * np.arange(shape[0]) + (to_template @ grid)[0, 3]
        share[np.abs(x) > 55.0] = 0.0
        return share


class HardCoded(Region):
    """A region at a fixed place of the picture, as if every head lay alike."""

    def share(
        self, to_template: NDArray[np.float64], grid: NDArray[np.float64], shape: tuple[int, int, int]
    ) -> NDArray[np.float32]:
        far = np.eye(4)
        far[1, 3] = -70.0
        return Region.share(self, far @ to_template, grid, shape)


@pytest.mark.parametrize("parts", ["face", "surface"])
def test_two_faces_on_one_head_give_one_surface(parts: Any) -> None:
    one, other = scan(0), with_face(scan(0), 6.0)
    assert shows(one.volume, other.volume) > 0.02  # so that there is something to hide
    assert shows(_remodelled(one, Region(parts)), _remodelled(other, Region(parts))) == 0.0


@pytest.mark.parametrize("wrong", [WithoutEars(), HardCoded()])
def test_a_region_without_ears_or_at_a_fixed_place_is_seen(wrong: Region) -> None:
    one, other = scan(0), with_face(scan(0), 6.0)
    assert shows(_remodelled(one, wrong), _remodelled(other, wrong)) > 0.0


def test_the_surface_between_two_people_is_that_of_the_made_head_not_of_their_own() -> None:
    made = scan(1)
    new = _remodelled(made, Region())
    before, after = depth(made.volume, 1, True), depth(new, 1, True)
    face = slice(20, 38)  # of the height: chin to brow at 4 mm
    assert float((np.abs(before - after)[:, face] >= 1).mean()) > 0.1


def test_the_same_scan_gets_another_face_each_time() -> None:
    made = scan(0)
    one, again, other = (_remodelled(made, Region(), seed) for seed in (1, 1, 2))
    assert np.array_equal(one.values, again.values)
    new, rest = head_mask(one), head_mask(other)
    assert int((new ^ rest).sum()) > 50  # voxels of 64 cubic millimetres
    assert np.array_equal(one.values[made.brain], other.values[made.brain])


def test_what_is_left_is_one_closed_head() -> None:
    made = scan(2)
    for parts in ("face", "surface"):
        new = _remodelled(made, Region(parts))  # type: ignore[arg-type]  # a literal of a loop
        skin = head_mask(new)
        assert not bool((made.brain & ~skin).any())
        litres = float(skin.sum()) * 64e-6
        assert 0.8 < litres / (float(head_mask(made.volume).sum()) * 64e-6) < 1.25
        for view in VIEWS:
            assert depth(new, *view, skin=skin).min() < 20


def test_all_series_of_a_study_show_the_same_head() -> None:
    made = scan(0)
    head, rng = head_of(made), np.random.default_rng(3)
    change = remodel(head, averaged(), Region(), rng)
    first = checked(head.volume, made.brain, change.onto(head.volume, made.brain, rng)).values
    t2 = phantoms().scan(0, 0, 4.0, "T2")
    second = checked(t2.volume, t2.brain, change.onto(t2.volume, t2.brain, rng)).values
    one, two = head_mask(Volume(first, made.volume.affine)), head_mask(Volume(second, t2.volume.affine))
    before = head_mask(made.volume)
    assert float((one ^ two).sum()) < 0.25 * float((one ^ before).sum() + (two ^ before).sum())


def test_a_pitched_head_is_remodelled_as_a_straight_one() -> None:
    made = scan(0)
    cos, sin = np.cos(0.5), np.sin(0.5)
    turn = np.eye(4)
    turn[1:3, 1:3] = ((cos, -sin), (sin, cos))
    pitched = replace(
        made,
        volume=Volume(made.volume.values, turn @ made.volume.affine),
        to_template=made.to_template @ np.linalg.inv(turn),
    )
    straight, turned = _remodelled(made, Region()), _remodelled(pitched, Region())
    one, two = head_mask(straight), head_mask(Volume(turned.values, made.volume.affine))
    assert int((one ^ two).sum()) <= 0.002 * int(one.sum())


def test_another_spacing_hides_the_face_as_well() -> None:
    """Axes are the reader's business, the anatomy is the registration's: other spacings do not matter."""
    made = phantoms().scan(0, 0, grid=isotropic(5.0))
    assert shows(_remodelled(made, Region()), _remodelled(with_face(made, 6.0), Region())) == 0.0


def test_a_network_is_shown_nobodys_brain() -> None:
    """By the size of a head that was drawn around the patient's own brain people were found."""
    net = around_template(remodeller_from(kept_network("remodeller"), "public"), atlas())
    side = net.population.skin.shape[0]
    drawn = []
    for number in (0, 1):
        own = transform(head_of(scan(number)), side, net.population, net.coarse)
        drawn.append(net.draw(own, np.random.default_rng(1)))
        paper = net.net.draw(own, np.random.default_rng(1))
        assert not np.array_equal(paper, drawn[-1])
    assert np.array_equal(*drawn)
    assert not np.array_equal(drawn[0], net.draw(own, np.random.default_rng(2)))


def test_a_head_without_a_brain_cannot_be_scaled() -> None:
    made = scan(0)
    empty = HeadScan(made.volume, head_mask(made.volume), Brain(np.zeros_like(made.brain), 1.0, made.to_template))
    with pytest.raises(NotDefacedError, match="brain_volume"):
        whole_head(empty, SIDE)


class Nothing:
    """A remodeller that draws no head."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.population = averaged().population
        self.coarse = averaged().coarse

    def draw(self, gamma: Gamma, rng: np.random.Generator) -> NDArray[np.float32]:
        del rng
        return np.full(gamma.cube.shape, self.value, np.float32)


@pytest.mark.parametrize(("value", "code"), [(0.0, "no_head"), (float("nan"), "not_finite")])
def test_a_network_that_draws_no_head_changes_nothing(value: float, code: str) -> None:
    with pytest.raises(NotDefacedError, match=code):
        remodel(head_of(scan(0)), Nothing(value), Region(), np.random.default_rng(1))


def test_the_trained_network_gives_a_head_that_does_not_depend_on_the_face() -> None:

    draws = remodeller_from(kept_network("remodeller"), "public")
    one, other = scan(0), with_face(scan(0), 6.0)
    first = _remodelled(one, Region(), draws=draws)
    assert shows(first, _remodelled(other, Region(), draws=draws)) == 0.0
    assert not bool((one.brain & ~head_mask(first)).any())
