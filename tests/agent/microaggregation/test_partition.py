"""The partition: sizes, distinct patients, diversity, and quality against the greedy."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from agent.domain import Clusters, Latents
from agent.errors import CohortTooSmallError
from agent.microaggregation.local_search import ClusterRules, Exchange
from agent.microaggregation.partition import _narrowed, greedy, partition


def _latents(codes):
    return Latents(np.asarray(codes, np.float32), tuple(f"p{i:06d}" for i in range(len(codes))))


def _random(n, d, seed):
    return _latents(np.random.default_rng(seed).normal(size=(n, d)))


def _sse(codes, clusters, names):
    row = {name: i for i, name in enumerate(names)}
    groups = [codes[[row[p] for p in c]].astype(np.float64) for c in clusters]
    return sum(((g - g.mean(axis=0)) ** 2).sum() for g in groups)


def _greedy_sse(codes, k):
    assignment = greedy(codes.astype(np.float64), k)
    groups = [codes[assignment == j].astype(np.float64) for j in range(assignment.max() + 1)]
    return sum(((g - g.mean(axis=0)) ** 2).sum() for g in groups)


def _possible(labels, k, ell):
    """The necessary condition by counting; that it suffices is what the test then demands."""
    given = [label for label in labels if label]
    for m in range(1, len(labels) // k + 1):
        fits = m * k <= len(labels) <= m * (2 * k - 1)
        if fits and (ell == 1 or sum(min(given.count(x), m) for x in set(given)) >= m * ell):
            return True
    return False


@settings(max_examples=120, deadline=None)
@given(
    n=st.integers(0, 70),
    k=st.integers(2, 12),
    ell=st.integers(1, 4),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    seed=st.integers(0, 10_000),
)
def test_every_patient_is_in_one_diverse_cluster_of_k_to_2k_minus_1_or_all_is_refused(n, k, ell, skew, seed):
    ell = min(ell, k)
    rng = np.random.default_rng(seed)
    weight = np.arange(1, 6) ** -skew
    labels = [str(x) for x in rng.choice(["a", "b", "c", "d", ""], size=n, p=weight / weight.sum())]
    latents = _random(n, 3, seed)
    if not _possible(labels, k, ell):
        with pytest.raises(CohortTooSmallError):
            partition(latents, labels, k, ell, rng)
        return
    members = partition(latents, labels, k, ell, rng).members
    assert sorted(p for c in members for p in c) == list(latents.patients)
    assert all(k <= len(c) <= 2 * k - 1 for c in members)
    label = dict(zip(latents.patients, labels, strict=True))
    assert ell == 1 or all(len({label[p] for p in c} - {""}) >= ell for c in members)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(6, 80), k=st.integers(2, 6), seed=st.integers(0, 10_000))
def test_the_partition_is_never_worse_than_the_greedy_of_the_paper(n, k, seed):
    latents = _random(n, 4, seed)
    members = partition(latents, [""] * n, k, 1, np.random.default_rng(seed)).members
    assert _sse(latents.codes, members, latents.patients) <= _greedy_sse(latents.codes, k) * (1 + 1e-9)


def test_the_digits_lose_less_than_with_the_greedy():
    latents = _latents(load_digits().data)
    members = partition(latents, [""] * 1797, 5, 1, np.random.default_rng(0)).members
    assert _sse(latents.codes, members, latents.patients) <= 0.85 * _greedy_sse(latents.codes, 5)


def test_the_greedy_is_the_published_one_recomputed_from_the_whole_distance_matrix():
    codes = np.random.default_rng(3).normal(size=(103, 5))
    distance = np.sqrt(((codes[:, None] - codes) ** 2).sum(axis=2))
    left, published = list(range(103)), []
    while len(left) >= 20:
        far = max(left, key=lambda i: distance[i, left].sum())
        taken = sorted(left, key=lambda i: distance[far, i])[:10]
        published.append(frozenset(taken))
        left = [i for i in left if i not in taken]
    published.append(frozenset(left))
    ours = greedy(codes, 10)
    assert {frozenset(np.flatnonzero(ours == j)) for j in range(ours.max() + 1)} == set(published)


def test_the_gain_of_an_exchange_is_exactly_the_fall_of_the_sum_of_squares():
    rng = np.random.default_rng(5)
    codes, assignment = rng.normal(size=(23, 4)), np.arange(23) % 4
    rules = ClusterRules(np.full(23, -1), 1)
    search = Exchange(codes, assignment, rules)
    others = search._others(np.array([3, 0, 2]))
    predicted = search._gain(1, others)
    for i, x in enumerate(search.members[1].copy()):
        for j, y in enumerate(others.rows):
            trial = Exchange(codes, assignment, rules)
            trial._swap(int(x), int(y))
            assert search.sse() - trial.sse() == pytest.approx(predicted[i, j], abs=1e-9)


def test_diversity_is_reached_where_single_exchanges_from_the_start_do_not_suffice():
    # three pure clumps: every cluster is homogeneous until it is mixed; labels are just enough
    codes = np.repeat(np.eye(3) * 50, 12, axis=0)
    labels = ["a"] * 12 + ["b"] * 12 + ["c"] * 12
    members = partition(_latents(codes), labels, 3, 3, np.random.default_rng(0)).members
    assert all(len({labels[int(p[1:])] for p in c}) == 3 for c in members)
    assert len(members) == 12


@settings(max_examples=150, deadline=None)
@given(n=st.integers(20, 80), k=st.integers(3, 8), spare=st.integers(0, 2), seed=st.integers(0, 10_000))
def test_diversity_close_to_the_limit_is_reached_or_refused(n, k, spare, seed):
    rng = np.random.default_rng(seed)
    ell = int(rng.integers(2, k + 1))
    labels = [str(x) for x in rng.integers(0, ell + spare, n)]
    if not _possible(labels, k, ell):
        with pytest.raises(CohortTooSmallError):
            partition(_random(n, 3, seed), labels, k, ell, rng)
        return
    members = partition(_random(n, 3, seed), labels, k, ell, rng).members
    assert all(len({labels[int(p[1:])] for p in c}) >= ell and k <= len(c) <= 2 * k - 1 for c in members)


def test_a_cluster_of_one_sensitive_label_is_never_formed_when_two_are_asked_for():
    labels = ["ill"] * 40  # P8: whoever is in any cluster would be known to be ill
    with pytest.raises(CohortTooSmallError):
        partition(_random(40, 3, 0), labels, 5, 2, np.random.default_rng(0))


def test_missing_labels_do_not_count_as_diversity():
    with pytest.raises(CohortTooSmallError):
        partition(_random(40, 3, 0), ["ill"] * 20 + [""] * 20, 5, 2, np.random.default_rng(0))


def test_a_refusal_says_the_same_whatever_the_cause():
    texts = set()
    for n, labels, k, ell in ((3, ["a"] * 3, 5, 1), (40, ["a"] * 40, 5, 2), (0, [], 5, 1)):
        with pytest.raises(CohortTooSmallError) as refusal:
            partition(_random(n, 2, 0), labels, k, ell, np.random.default_rng(0))
        texts.add(str(refusal.value))
    assert len(texts) == 1
    assert not any(character.isdigit() for character in texts.pop())


def test_the_same_generator_gives_the_same_partition_and_another_gives_another_order():
    latents, labels = _random(60, 3, 4), ["a", "b", "c"] * 20
    one, two, other = (partition(latents, labels, 5, 2, np.random.default_rng(s)).members for s in (7, 7, 8))
    assert one == two
    assert one != other


def test_identical_codes_are_partitioned_too():
    members = partition(_latents(np.ones((31, 4))), [""] * 31, 7, 1, np.random.default_rng(0)).members
    assert all(7 <= len(c) <= 13 for c in members)
    assert sum(len(c) for c in members) == 31


@pytest.mark.parametrize(("k", "ell"), [(1, 1), (5, 0), (5, 6)])
def test_senseless_arguments_are_refused(k, ell):
    with pytest.raises(ValueError, match="k >= 2"):
        partition(_random(40, 2, 0), [""] * 40, k, ell, np.random.default_rng(0))


def test_several_buckets_are_bisected_without_breaking_sizes():
    latents = _random(4700, 3, 2)
    members = partition(latents, ["a", "b"] * 2350, 11, 2, np.random.default_rng(0)).members
    assert sorted(p for c in members for p in c) == list(latents.patients)
    assert all(11 <= len(c) <= 21 for c in members)


def _partitions(rows, sizes):
    """Every way to divide the rows into clusters of these sizes."""
    if not rows:
        yield []
        return
    for size in sorted(set(sizes)):
        left = list(sizes)
        left.remove(size)
        for rest in combinations(rows[1:], size - 1):
            cluster = (rows[0], *rest)
            for others in _partitions([r for r in rows if r not in cluster], left):
                yield [cluster, *others]


def _even(n, m):
    return [n // m + (j < n % m) for j in range(m)]


def _lawful(cluster, labels, ell):
    return ell == 1 or len({labels[i] for i in cluster} - {""}) >= ell


def _exists(n, labels, k, ell):
    """By trying every partition into clusters whose sizes differ by one at most, as the search does."""
    return any(
        all(_lawful(c, labels, ell) for c in found)
        for m in range(-(-n // (2 * k - 1)), n // k + 1)
        for found in _partitions(list(range(n)), _even(n, m))
    )


def _all_sizes(n, k, most=None):
    """Every way to write n as a sum of numbers from k to 2k-1, the biggest first."""
    if n == 0:
        yield []
    for size in range(min(n, 2 * k - 1, most or n), k - 1, -1):
        for rest in _all_sizes(n - size, k, size):
            yield [size, *rest]


@settings(max_examples=120, deadline=None)
@given(n=st.integers(2, 9), k=st.integers(2, 3), seed=st.integers(0, 100_000), ell=st.integers(1, 2))
def test_whatever_the_rules_every_cluster_keeps_them_and_a_refusal_means_that_trying_all_finds_none(n, k, seed, ell):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, (n, 2)).astype(np.float32)  # a grid: equal codes and equal distances are common
    labels = [str(x) for x in rng.choice(["a", "b", ""], n)]
    try:
        members = partition(_latents(codes), labels, k, ell, rng).members
    except CohortTooSmallError:
        assert not _exists(n, labels, k, ell)
        return
    rows = [tuple(int(p[1:]) for p in c) for c in members]
    assert sorted(r for c in rows for r in c) == list(range(n))
    assert all(k <= len(c) <= 2 * k - 1 and _lawful(c, labels, ell) for c in rows)


def test_what_an_exchange_would_break_is_foretold_exactly():
    rng = np.random.default_rng(8)
    codes, labels = rng.normal(size=(24, 2)), rng.integers(-1, 3, 24)
    rules = ClusterRules(labels, 3)
    search = Exchange(codes, np.arange(24) % 5, rules)
    others = search._others(np.array([4, 0, 3]))
    foretold = search._worse(2, others)
    for i, x in enumerate(search.members[2].copy()):
        for j, y in enumerate(others.rows):
            trial = Exchange(codes, search.assignment, rules)
            trial._swap(int(x), int(y))
            fresh = Exchange(codes, trial.assignment, rules)
            assert (trial.broken() == fresh.broken()).all()
            assert fresh.broken().sum() - search.broken().sum() == foretold[i, j]


def test_tiny_sets_come_close_to_the_best_of_all_partitions():
    ratios = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        n, k = int(rng.integers(6, 10)), int(rng.integers(2, 4))
        latents = _random(n, 2, seed)
        least = min(
            _sse(latents.codes, [[latents.patients[i] for i in c] for c in found], latents.patients)
            for sizes in _all_sizes(n, k)
            for found in _partitions(list(range(n)), sizes)
        )
        members = partition(latents, [""] * n, k, 1, rng).members
        ratios.append(_sse(latents.codes, members, latents.patients) / least)
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) <= 1.1


def test_few_dimensions_are_searched_only_when_they_hold_almost_all_the_variance():
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(600, 10)) @ rng.normal(size=(10, 200))
    noise = rng.normal(size=(600, 200))
    narrow = _narrowed(flat + 0.01 * noise, rng)
    assert narrow.shape == (600, 64)
    centred = flat + 0.01 * noise - (flat + 0.01 * noise).mean(axis=0)
    far = lambda x: ((x[:50, None] - x[None, :50]) ** 2).sum(axis=2)  # noqa: E731
    assert np.abs(far(narrow) - far(centred)).max() <= 0.01 * far(centred).max()
    assert _narrowed(noise, rng).shape == (600, 200)


def test_a_large_cohort_is_partitioned_in_few_dimensions_and_still_beats_the_greedy_by_a_tenth():
    rng = np.random.default_rng(1)
    hidden = np.tanh(rng.normal(size=(5000, 8)) @ rng.normal(size=(8, 32)) / 3)
    latents = _latents(hidden @ rng.normal(size=(32, 96)) + 0.02 * rng.normal(size=(5000, 96)))
    members = partition(latents, [""] * 5000, 10, 1, np.random.default_rng(0)).members
    assert all(10 <= len(c) <= 19 for c in members)
    assert _sse(latents.codes, members, latents.patients) <= 0.90 * _greedy_sse(latents.codes, 10)


@pytest.mark.slow
def test_twenty_thousand_patients_fit():
    latents = _random(20_000, 16, 2)
    members = partition(latents, ["a", "b"] * 10_000, 11, 2, np.random.default_rng(0)).members
    assert sum(len(c) for c in members) == 20_000


def test_nobody_is_in_two_clusters():
    with pytest.raises(ValueError, match="two clusters"):
        Clusters((("a", "b"), ("b", "c")))
