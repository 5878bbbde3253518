"""The attack must find whoever is not hidden, by whatever is left of them, and nobody who is; chance is chance."""

from __future__ import annotations

import numpy as np
import pytest

from agent.defacing.reidentification.features import ZONES, ScanFeatures
from agent.defacing.reidentification.matching import People, five_way
from agent.defacing.reidentification.rendering import Camera, Surface, render
from agent.volumes.grid import resample
from deploy.reproduction.attacks import head_identification
from deploy.reproduction.attacks.head_identification import brain_look, hull_look, only, out_of_focus, pixels_of
from tests.support.heads import scan
from tests.support.views_of_heads import EYE, MM, PUBLIC, SOMEBODY, TESTED, people, rng, unaltered

pytestmark = pytest.mark.timeout(900)  # brains are looked for, and heads drawn: a busy machine takes its time


def test_who_is_not_defaced_is_found_on_another_visit() -> None:
    found = head_identification.attacked("unaltered", people(PUBLIC), people(TESTED), rng())
    assert found.rate >= 0.95
    assert found.rank1.value >= 0.9
    assert not found.at_chance
    assert found.trials == found.gallery == len(TESTED)
    assert found.low <= found.rate <= found.high
    assert "ABOVE CHANCE" in found.line()


@pytest.mark.parametrize("zone", ["ears", "nose"])
def test_a_little_that_is_left_is_found(zone: str) -> None:
    """Everybody has the same head but for one part: the attacker has to learn on others which part that is."""
    found = head_identification.attacked(zone, people(PUBLIC, zone), people(TESTED, zone), rng())
    assert not found.at_chance
    assert found.rate > 0.4


def test_a_head_replaced_by_somebody_elses_is_not_found() -> None:
    found = head_identification.attacked("replaced", people(PUBLIC, ""), people(TESTED, ""), rng())
    assert found.at_chance
    assert found.low <= 0.2 <= found.high


def test_one_and_the_same_face_for_all_is_a_tie_and_counts_as_chance_exactly() -> None:
    same = unaltered(SOMEBODY, 0)
    groups = [People(people(rows).known, (same,) * len(rows)) for rows in (PUBLIC, TESTED)]
    found = head_identification.attacked("same", groups[0], groups[1], rng())
    assert found.rate == pytest.approx(0.2)
    assert found.rank1.value == pytest.approx(1 / len(TESTED))
    assert found.at_chance


def test_an_attacker_without_power_clears_nobody() -> None:
    found = head_identification.attacked("same", people(PUBLIC, ""), people(TESTED, ""), rng(), power=0.5)
    assert not found.works
    assert not head_identification.attacked(
        "same", people(PUBLIC, ""), people(TESTED, ""), rng()
    ).works  # power unknown
    assert head_identification.attacked("same", people(PUBLIC, ""), people(TESTED, ""), rng(), power=0.99).works


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
    assert not head_identification.attacked("blurred", groups[0], groups[1], rng()).at_chance


def test_a_brain_is_linked_by_what_every_method_leaves() -> None:
    def look(person: int, visit: int) -> ScanFeatures:
        one = scan(person, visit, MM)
        grid = np.diag((5.0, 5, 5, 1))
        grid[:3, 3] = (-77.5, -107.5, -57.5)
        lies = one.to_template @ one.volume.affine
        brain = resample(one.brain, lies, (32, 38, 28), grid) > 0.5
        top = float(np.percentile(one.volume.values[one.brain], 99))
        return brain_look(brain, resample(one.volume.values, lies, (32, 38, 28), grid) / np.float32(top))

    groups = [head_identification.looks_of([(look(p, 0), look(p, 1)) for p in rows]) for rows in (PUBLIC, TESTED)]
    assert head_identification.attacked("brain only", groups[0], groups[1], rng()).rate > 0.6


def test_a_tight_hull_is_linked_and_one_hull_for_all_is_not() -> None:
    def ellipsoid(person: int, visit: int) -> ScanFeatures:
        half = (
            9 + 2 * np.random.default_rng(person).random(3) + 0.2 * np.random.default_rng((person, visit)).random(3)
        )
        at = np.stack(np.meshgrid(*[np.arange(28) - 13.5] * 3, indexing="ij"), axis=-1) / half
        return hull_look(np.asarray((at * at).sum(axis=-1) <= 1))

    groups = [
        head_identification.looks_of([(ellipsoid(p, 0), ellipsoid(p, 1)) for p in rows]) for rows in (PUBLIC, TESTED)
    ]
    assert head_identification.attacked("hull", groups[0], groups[1], rng()).rate > 0.5
    same = [
        head_identification.looks_of([(ellipsoid(1, 0), ellipsoid(1, 0)) for _ in rows]) for rows in (PUBLIC, TESTED)
    ]
    assert head_identification.attacked("hull", same[0], same[1], rng()).at_chance


def test_chance_is_where_guessing_ends_up() -> None:
    """With scores that know nothing, the rate leaves the interval of chance in about 1 of 40 tests upwards."""
    draw = np.random.default_rng(2)
    above = sum(
        not head_identification._measured(five_way(draw.random((20, 20))), 0.2, 200, draw).at_chance
        for _ in range(200)
    )
    assert above <= 12


def test_blur_takes_detail_and_keeps_light() -> None:
    """Of a soft ball: 1 inside, 0 outside, half at 60 mm."""
    affine = np.diag((3.0, 3.0, 3.0, 1.0))
    affine[:3, 3] = -103.5
    far = np.linalg.norm(np.stack(np.meshgrid(*[np.arange(70)] * 3, indexing="ij"), axis=-1) * 3.0 - 103.5, axis=-1)
    ball = np.clip(0.5 + (60.0 - far) / 6.0, 0, 1).astype(np.float32)
    shade = render(Surface(ball, affine, 0.5), Camera(np.eye(4), 64, 192.0, 3.0)).shade
    soft = head_identification.blurred(shade, 3.0, 12.0)
    assert float(np.abs(np.diff(soft, axis=1)).max()) < 0.3 * float(np.abs(np.diff(shade, axis=1)).max())
    assert float(soft.mean()) == pytest.approx(float(shade.mean()), rel=0.02)
