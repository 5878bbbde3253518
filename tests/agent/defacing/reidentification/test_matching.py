"""The attack must find whoever is not hidden, by whatever is left of them, and nobody who is."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import comb

from agent.defacing.reidentification import matching
from agent.defacing.reidentification.features import Cloud, Eye, ScanFeatures, in_zone
from agent.defacing.reidentification.icp import Fit, aligned, distances
from agent.defacing.reidentification.matching import (
    CHOICES,
    chosen,
    discriminant,
    first,
    five_way,
    matchers,
    surviving,
)
from tests.support.views_of_heads import PUBLIC, TESTED, people, rng, unaltered

pytestmark = pytest.mark.timeout(900)  # brains are looked for, and heads drawn: a busy machine takes its time


def test_every_single_matcher_finds_unaltered_people() -> None:
    """A matcher that finds nobody would hide behind the others when it is needed."""
    public, tested = people(PUBLIC), people(TESTED)
    for name, learn in matchers(public.known[0], len(PUBLIC)).items():
        assert float(np.diag(five_way(learn(public)(tested))).mean()) > 0.45, name


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
        matching.Attacker(only=("none",)).learned(public)


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
        ScanFeatures({}, {})
    with pytest.raises(ValueError, match="finite"):
        ScanFeatures({"depth": np.array([np.nan], np.float32)}, {})
    with pytest.raises(ValueError, match="view"):
        Eye(views=())
    with pytest.raises(KeyError):
        in_zone(np.zeros((1, 3)), "hat")
