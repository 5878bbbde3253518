"""Disclosure: each attack wins against the published behaviour; what it does to ours is measured, not assumed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits

from agent.domain import Latents
from agent.intervals import Resampling
from agent.mechanisms.common.linear_codec import fit_basis
from agent.microaggregation.aggregation import average
from agent.microaggregation.partition import greedy, partition
from deploy.reproduction.attacks.disclosure import (
    Sums,
    Trials,
    cohort_order,
    counts_from_softmax,
    differencing,
    label_counts,
    name_leak,
    nearest_representative,
    order_leak,
)
from tests.support.shipped import frozen, recomputed

FEW = Resampling(100)


def _codes(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32).astype(np.float64)


def _name(row):
    return f"p{row:05d}"


def _ours(codes, k, seed=0):
    """The product's own partition and average: members as rows, representatives."""
    latents = Latents(codes.astype(np.float32), tuple(_name(i) for i in range(len(codes))))
    clusters = partition(latents, [""] * len(codes), k, 1, np.random.default_rng(seed))
    members = tuple(tuple(int(p[1:]) for p in c) for c in clusters.members)
    return members, average(latents, clusters).astype(np.float64)


def _recomputed(codes, k):
    """As published: every release clusters everybody anew."""

    def begin():
        def release(rows):
            assignment = greedy(codes[rows], k)
            sizes = np.bincount(assignment)
            sums = np.stack([codes[rows][assignment == j].sum(axis=0) for j in range(len(sizes))])
            return Sums(sizes, sums / sizes[:, None])

        return release

    return begin


def test_the_difference_of_two_recomputed_releases_names_whoever_joined():
    codes = _codes(120, 16)
    found = differencing(_recomputed(codes, 5), codes, Trials("joined", 20, 20, 5), np.random.default_rng(0))
    assert found.figures[0].value == 1.0
    assert found.figures[0].interval.low > found.figures[0].limit == 0.2


# 90 of the digits as patients of a site with real ledgers; what leaves is the artifact of ``release_synthetic``
DIGITS = (load_digits().images / 16).astype(np.float32)
BASIS = fit_basis(DIGITS[-400:], 40, "public")
PEOPLE = DIGITS[:90]
CODES = BASIS.encode(PEOPLE).astype(np.float64)


def _shipped(folder, mechanism, plan):
    return differencing(mechanism(folder, PEOPLE, BASIS, 5), CODES, plan, np.random.default_rng(0)).figures[0]


def test_the_difference_of_two_frozen_releases_says_nothing_of_whoever_joined(tmp_path):
    leaky = _shipped(tmp_path / "anew", recomputed, Trials("joined", 6, 20, 5))
    alone = _shipped(tmp_path / "alone", frozen, Trials("joined", 6, 20, 5))
    with_others = _shipped(tmp_path / "five", frozen, Trials("joined", 12, 20, 5, newcomers=4))
    assert leaky.value == 1.0
    assert alone.value == pytest.approx(alone.chance) == pytest.approx(0.05), "one newcomer waits for four more"
    assert with_others.interval.low <= with_others.limit == 0.2
    assert with_others.interval.high < leaky.interval.low


def test_erasure_is_found_when_recomputed_and_hides_among_k_when_the_cluster_is_retired(tmp_path):
    plan = Trials("left", 6, 20, 5, newcomers=5)
    leaky = _shipped(tmp_path / "anew", recomputed, plan)
    ours = _shipped(tmp_path / "ours", frozen, replace(plan, count=16))
    assert leaky.value == 1.0
    assert ours.interval.low <= ours.limit == 0.2
    assert ours.interval.high < leaky.interval.low


def test_the_place_of_a_released_picture_does_not_tell_whether_it_is_new(tmp_path):
    release = frozen(tmp_path, DIGITS[:180], BASIS, 5)()
    before, after = release(np.arange(90)), release(np.arange(180))
    new = (cdist(after.centroids, before.centroids).min(axis=1) > 1e-5).astype(np.float64)
    assert new.sum() == len(new) - len(before.sizes) > 10, "what was shown is shown again as it was"
    places = list(range(len(new)))
    assert order_leak(places, {"new": new}, np.random.default_rng(0)).p_value > 0.05
    assert order_leak(places, {"new": np.sort(new)}, np.random.default_rng(0)).p_value < 0.01, "the newest last"


def test_files_in_the_order_of_the_cohort_are_noticed_and_shuffled_ones_are_not():
    members, _ = _ours(_codes(300, 8), 5)
    by_first = sorted(members, key=min)  # as a script that walks the cohort writes them
    leak = order_leak(list(range(len(members))), cohort_order(by_first), np.random.default_rng(0))
    assert leak.p_value == pytest.approx(1 / 1001)
    assert leak.figure.value == pytest.approx(1.0)
    assert leak.secret == "first member"
    ours = order_leak(list(range(len(members))), cohort_order(members), np.random.default_rng(0))
    assert ours.p_value > 0.05
    assert "p = " in leak.table()


def test_the_greedys_own_order_betrays_the_outliers_and_ours_does_not():
    codes = np.random.default_rng(0).standard_t(3, size=(300, 8))
    assignment = greedy(codes, 5)
    far = np.linalg.norm(codes - codes.mean(axis=0), axis=1)
    places = list(range(assignment.max() + 1))
    published = {"distance": np.array([far[assignment == j].mean() for j in places])}
    members, _ = _ours(codes, 5)
    ours = {"distance": np.array([far[list(c)].mean() for c in members])}
    assert order_leak(places, published, np.random.default_rng(1)).p_value < 0.01
    assert order_leak(list(range(len(members))), ours, np.random.default_rng(1)).p_value > 0.05


def test_the_p_value_of_an_order_is_uniform_when_there_is_nothing_to_find():
    rng = np.random.default_rng(2)
    p = []
    for _ in range(150):
        members = [tuple(row) for row in rng.permutation(60).reshape(12, 5).tolist()]
        p.append(order_leak(list(range(12)), cohort_order(members), rng, 99).p_value)
    assert np.mean(p) == pytest.approx(0.5, abs=0.1)
    assert np.mean(np.array(p) <= 0.05) < 0.12


def test_file_names_of_first_members_are_noticed_and_random_ones_are_not():
    members = [tuple(f"id{5 * j + i:04d}" for i in range(5)) for j in range(30)]
    assert name_leak([f"{c[0]}.png" for c in members], members).value == 1.0
    shuffled = [f"{c[0]}.png" for c in members[1:] + members[:1]]
    assert name_leak(shuffled, members).value == 0.0
    hexes = [np.random.default_rng(j).bytes(8).hex() for j in range(30)]
    assert name_leak(hexes, members).value == 0.0
    ranked = order_leak(
        [f"{c[0]}.png" for c in members],
        cohort_order([range(5 * j, 5 * j + 5) for j in range(30)]),
        np.random.default_rng(0),
    )
    assert ranked.p_value < 0.01


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(0, 20), min_size=2, max_size=6))
def test_softmax_of_counts_is_inverted_exactly_when_the_size_is_known(counts):
    raw = np.array(counts, np.float64)
    soft = np.exp(raw - raw.max())
    assert counts_from_softmax(soft / soft.sum(), sum(counts)).tolist() == counts
    smallest = counts_from_softmax(soft / soft.sum())
    assert (smallest == raw - raw.min()).all()


def test_what_is_no_softmax_of_counts_is_not_inverted():
    assert counts_from_softmax(np.array([1.0, 0.0, 0.0])) is None
    assert counts_from_softmax(np.array([0.5, 0.3, 0.2])) is None
    assert counts_from_softmax(np.array([np.nan, 0.5])) is None
    assert counts_from_softmax(np.array([0.5, 0.5]), 3) is None


def test_soft_labels_give_all_counts_away_and_majority_labels_only_what_they_say():
    rng = np.random.default_rng(0)
    counts, shadow = (rng.multinomial(11, [0.5, 0.2, 0.15, 0.1, 0.05], m) for m in (200, 400))

    def soft(c):
        e = np.exp(c - c.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def hard(c):
        return np.eye(5)[c.argmax(axis=1)]

    published = label_counts(soft(counts), counts, (soft(shadow), shadow)).figures
    ours = label_counts(hard(counts), counts, (hard(shadow), shadow)).figures
    assert published[0].value == 1.0
    assert published[0].interval.low > ours[0].interval.high
    assert ours[0].interval.low <= ours[0].chance + 0.02
    assert ours[1].value <= ours[1].limit == pytest.approx(10 / 11)
    assert ours[1].value == published[1].value


def test_whoever_has_the_encoder_finds_every_member_of_a_release_of_single_people():
    codes = _codes(200, 16)
    inside = np.arange(200) < 100
    auc, tpr = nearest_representative(codes, inside, codes[:100], np.random.default_rng(0), FEW).figures
    assert (auc.value, tpr.value) == (1.0, 1.0)
    blind = [
        nearest_representative(codes, inside, _codes(20, 16, seed), np.random.default_rng(0), FEW).figures[0].value
        for seed in range(1, 31)
    ]
    assert np.mean(blind) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("d", "low", "high"), [(2, 0.5, 0.6), (512, 0.97, 1.0)])
def test_whoever_has_the_encoder_is_at_chance_in_few_dimensions_and_not_in_many(d, low, high):
    codes = _codes(600, d)
    inside = np.arange(600) < 300
    _, representatives = _ours(codes[:300], 10)
    found, _ = nearest_representative(codes, inside, representatives, np.random.default_rng(0), FEW).figures
    assert low <= found.value <= high


def test_broken_input_is_refused():
    with pytest.raises(ValueError, match="finite"):
        Sums(np.array([3]), np.array([[np.inf]]))
    with pytest.raises(ValueError, match="three images"):
        order_leak([1, 2], {"x": np.zeros(2)}, np.random.default_rng(0))
    with pytest.raises(ValueError, match="joined or left"):
        Trials("moved")
    with pytest.raises(ValueError, match="newcomers"):
        Trials("joined", newcomers=20)
    with pytest.raises(ValueError, match="more people"):
        differencing(_recomputed(np.zeros((5, 2)), 2), np.zeros((5, 2)), Trials("left"), np.random.default_rng(0))
