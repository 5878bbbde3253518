"""The attack must find whoever is not hidden, by whatever is left of them, and nobody who is."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy.special import comb

from agent.attacks import faces
from agent.attacks.face_icp import Fit, aligned, distances
from agent.attacks.face_looks import (
    ZONES,
    Cloud,
    Eye,
    Look,
    brain_look,
    hull_look,
    in_zone,
    looked,
    only,
    out_of_focus,
    pixels_of,
)
from agent.attacks.face_matching import CHOICES, People, chosen, discriminant, first, five_way, matchers, surviving
from agent.heads import skin
from agent.heads.grid import cube_at, resample
from agent.measures.rendering import surface
from agent.nouns import Volume
from tests.support.heads import scan

pytestmark = pytest.mark.timeout(900)  # brains are looked for, and heads drawn: a busy machine takes its time

MM = 4.0
EYE = Eye(side=32, views=("front", "left 60", "right 60", "left 90"), points=120)
PUBLIC, TESTED = range(13), range(13, 26)
SOMEBODY = 99


@cache
def unaltered(person: int, visit: int) -> Look:
    one = scan(person, visit, MM)
    return looked(surface(one.volume, skin.threshold(one.volume.values)), one.to_template, EYE)


@cache
def left(person: int, zone: str) -> Look:
    """Somebody else's head, the same for everybody, in which a zone of this person is left."""
    one, other = scan(person, 1, MM), scan(SOMEBODY, 0, MM)
    grid = one.volume
    here, there = (cube_at(each.to_template, 1, 1.0).affine for each in (one, other))
    lies = here @ np.linalg.inv(there) @ other.volume.affine  # no stretch: the size of a brain tells that of the head
    strange = resample(other.volume.values, lies, grid.values.shape, grid.affine)
    strange *= skin.threshold(grid.values) / skin.threshold(other.volume.values)
    to = np.linalg.inv(here) @ grid.affine
    at = np.stack(np.meshgrid(*[np.arange(n) for n in grid.values.shape], indexing="ij"), axis=-1).reshape(-1, 3)
    at = at @ to[:3, :3].T + to[:3, 3]
    keep = in_zone(at, zone).reshape(grid.values.shape) if zone else np.zeros(grid.values.shape, bool)
    mixed = Volume(np.where(keep, grid.values, strange).astype(np.float32), grid.affine)
    return looked(surface(mixed, skin.threshold(grid.values)), one.to_template, EYE)


def people(rows: range, zone: str | None = None) -> People:
    made = (unaltered(p, 1) if zone is None else left(p, zone) for p in rows)
    return People(tuple(unaltered(p, 0) for p in rows), tuple(made))


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_who_is_not_defaced_is_found_on_another_visit() -> None:
    found = faces.attacked("unaltered", people(PUBLIC), people(TESTED), rng())
    assert found.rate >= 0.95
    assert found.rank1.value >= 0.9
    assert not found.at_chance
    assert found.trials == found.gallery == len(TESTED)
    assert found.low <= found.rate <= found.high
    assert "ABOVE CHANCE" in found.line()


def test_every_single_matcher_finds_unaltered_people() -> None:
    """A matcher that finds nobody would hide behind the others when it is needed."""
    public, tested = people(PUBLIC), people(TESTED)
    for name, learn in matchers(public.known[0], len(PUBLIC)).items():
        assert float(np.diag(five_way(learn(public)(tested))).mean()) > 0.45, name


@pytest.mark.parametrize("zone", ["ears", "nose"])
def test_a_little_that_is_left_is_found(zone: str) -> None:
    """Everybody has the same head but for one part: the attacker has to learn on others which part that is."""
    found = faces.attacked(zone, people(PUBLIC, zone), people(TESTED, zone), rng())
    assert not found.at_chance
    assert found.rate > 0.4


def test_a_head_replaced_by_somebody_elses_is_not_found() -> None:
    found = faces.attacked("replaced", people(PUBLIC, ""), people(TESTED, ""), rng())
    assert found.at_chance
    assert found.low <= 0.2 <= found.high


def test_one_and_the_same_face_for_all_is_a_tie_and_counts_as_chance_exactly() -> None:
    same = unaltered(SOMEBODY, 0)
    groups = [People(people(rows).known, (same,) * len(rows)) for rows in (PUBLIC, TESTED)]
    found = faces.attacked("same", groups[0], groups[1], rng())
    assert found.rate == pytest.approx(0.2)
    assert found.rank1.value == pytest.approx(1 / len(TESTED))
    assert found.at_chance


def test_an_attacker_without_power_clears_nobody() -> None:
    found = faces.attacked("same", people(PUBLIC, ""), people(TESTED, ""), rng(), power=0.5)
    assert not found.works
    assert not faces.attacked("same", people(PUBLIC, ""), people(TESTED, ""), rng()).works  # power unknown
    assert faces.attacked("same", people(PUBLIC, ""), people(TESTED, ""), rng(), power=0.99).works


def test_zones_say_where_a_method_leaks() -> None:
    found = faces.by_zone(("ears", "mouth and chin"), people(PUBLIC, "ears"), people(TESTED, "ears"), EYE, rng())
    assert found["ears"].rate > found["mouth and chin"].rate + 0.2
    assert not found["ears"].at_chance


def test_every_zone_lies_on_the_head() -> None:
    known = people(PUBLIC).known
    for zone in ZONES:
        assert pixels_of(known, EYE, zone).sum() >= 20, zone
    pixels = pixels_of(known, EYE, "nose")
    assert only(known[0], pixels).channels["depth"].shape == (pixels.sum(),)
    assert len(only(known[0], pixels, "nose").clouds["face"].points) < len(known[0].clouds["face"].points)


def test_blurred_pictures_have_no_depth_and_no_points() -> None:
    soft = out_of_focus(unaltered(0, 0), EYE, 10.0)
    assert not soft.clouds
    assert list(soft.channels) == ["shade"]
    groups = [
        People(tuple(out_of_focus(k, EYE, 8.0) for k in g.known), tuple(out_of_focus(m, EYE, 8.0) for m in g.made))
        for g in (people(PUBLIC), people(TESTED))
    ]
    assert not faces.attacked("blurred", groups[0], groups[1], rng()).at_chance


def test_a_brain_is_linked_by_what_every_method_leaves() -> None:
    def look(person: int, visit: int) -> Look:
        one = scan(person, visit, MM)
        grid = np.diag((5.0, 5, 5, 1))
        grid[:3, 3] = (-77.5, -107.5, -57.5)
        lies = one.to_template @ one.volume.affine
        brain = resample(one.brain, lies, (32, 38, 28), grid) > 0.5
        top = float(np.percentile(one.volume.values[one.brain], 99))
        return brain_look(brain, resample(one.volume.values, lies, (32, 38, 28), grid) / np.float32(top))

    groups = [faces.looks_of([(look(p, 0), look(p, 1)) for p in rows]) for rows in (PUBLIC, TESTED)]
    assert faces.attacked("brain only", groups[0], groups[1], rng()).rate > 0.6


def test_a_tight_hull_is_linked_and_one_hull_for_all_is_not() -> None:
    def ellipsoid(person: int, visit: int) -> Look:
        half = (
            9 + 2 * np.random.default_rng(person).random(3) + 0.2 * np.random.default_rng((person, visit)).random(3)
        )
        at = np.stack(np.meshgrid(*[np.arange(28) - 13.5] * 3, indexing="ij"), axis=-1) / half
        return hull_look(np.asarray((at * at).sum(axis=-1) <= 1))

    groups = [faces.looks_of([(ellipsoid(p, 0), ellipsoid(p, 1)) for p in rows]) for rows in (PUBLIC, TESTED)]
    assert faces.attacked("hull", groups[0], groups[1], rng()).rate > 0.5
    same = [faces.looks_of([(ellipsoid(1, 0), ellipsoid(1, 0)) for _ in rows]) for rows in (PUBLIC, TESTED)]
    assert faces.attacked("hull", same[0], same[1], rng()).at_chance


def test_five_way_is_the_mean_over_all_draws_of_four_others() -> None:
    scores = rng().integers(0, 6, (9, 9)).astype(float)
    exact = five_way(scores)
    draw = np.random.default_rng(0)
    for q, g in ((0, 0), (3, 7), (8, 2)):
        others = [c for c in range(9) if c != g]
        hits = 0.0
        for _ in range(4000):
            lot = [g, *draw.choice(others, CHOICES - 1, replace=False)]
            top = scores[q, lot].max()
            hits += (scores[q, g] == top) / (scores[q, lot] == top).sum()
        assert exact[q, g] == pytest.approx(hits / 4000, abs=0.03)
    assert np.allclose(exact.mean(axis=1), 1 / CHOICES)  # whoever is right, guessing is guessing
    assert np.allclose(first(scores).sum(axis=1), 1.0)


def test_a_person_ranked_last_is_never_picked_and_one_ranked_second_sometimes() -> None:
    scores = np.tile(np.arange(10.0), (10, 1))
    picked = five_way(scores)[0]
    assert picked[0] == 0.0
    assert picked[9] == 1.0
    assert picked[8] == pytest.approx(comb(8, 4) / comb(9, 4))


def test_chance_is_where_guessing_ends_up() -> None:
    """With scores that know nothing, the rate leaves the interval of chance in about 1 of 40 tests upwards."""
    draw = np.random.default_rng(2)
    above = sum(not faces._measured(five_way(draw.random((20, 20))), 0.2, 200, draw).at_chance for _ in range(200))
    assert above <= 12


def test_scores_that_are_no_numbers_are_refused() -> None:
    scores = np.eye(6)
    scores[2, 2] = np.nan
    with pytest.raises(ValueError, match="finite"):
        five_way(scores)
    with pytest.raises(ValueError, match="finite"):
        first(scores)


def test_the_choice_is_made_on_people_who_are_not_tested() -> None:
    public = people(PUBLIC, "ears")
    choice = chosen(public, {"one": surviving("depth"), "two": discriminant("depth", 4)})
    assert 0.0 <= choice.rate <= 1.0
    assert set(choice.rates) >= {"one", "two"}
    with pytest.raises(ValueError, match="learns from"):
        chosen(public.some(range(9)), {"one": surviving("depth")})
    with pytest.raises(ValueError, match="5 or more"):
        public.some(range(4))
    with pytest.raises(ValueError, match="has a matcher"):
        faces.Attacker(only=("none",)).learned(public)


def test_icp_finds_the_motion_and_leaves_out_what_was_cut_off() -> None:
    draw = rng()
    normals = draw.normal(size=(400, 3))
    normals /= np.linalg.norm(normals, axis=1)[:, None]
    points = normals * (70, 90, 80)  # not round, so that a turn shows
    outward = normals / (70, 90, 80)
    outward /= np.linalg.norm(outward, axis=1)[:, None]
    turn = np.deg2rad(6)
    motion = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1.0]])
    moved = Cloud(points @ motion.T + (3, -2, 1), outward @ motion.T)
    cut = Cloud(points[points[:, 1] < 40], outward[points[:, 1] < 40])
    other = Cloud(points * (1.12, 0.93, 1.0), outward)
    found = distances([moved], [Cloud(points, outward), cut, other, Cloud(points[:5], outward[:5])], Fit(rounds=12))
    assert found[0, 0] < 0.5
    assert found[0, 1] < 1.5
    assert found[0, 2] > 3 * found[0, 0] + 1
    assert np.isinf(found[0, 3])


def test_icp_without_a_turn_stays_where_it_is() -> None:
    from scipy.spatial import cKDTree

    cloud = unaltered(0, 0).clouds["head"]
    motion, apart = aligned(cloud, cloud, cKDTree(cloud.points), Fit())
    assert np.allclose(motion, np.eye(4), atol=1e-6)
    assert apart < 1e-6


def test_looks_and_eyes_that_see_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="sees nothing"):
        Look({}, {})
    with pytest.raises(ValueError, match="finite"):
        Look({"depth": np.array([np.nan], np.float32)}, {})
    with pytest.raises(ValueError, match="view"):
        Eye(views=())
    with pytest.raises(KeyError):
        in_zone(np.zeros((1, 3)), "hat")
