"""The published clusterings: each against a slow, literal reading of its paper, and by hand on small sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.datasets import load_digits

from agent.errors import CohortTooSmallError
from agent.microaggregation.partition import distances, greedy
from deploy.reproduction.clustering_baselines import BASELINES, anonfaces, kmeans, kmember, mdav, nearest

LINKS = ("single", "complete", "average", "ward")


def _clusters(assignment):
    return {frozenset(np.flatnonzero(assignment == j).tolist()) for j in range(assignment.max() + 1)}


def _sse(codes, assignment):
    return sum(((codes[assignment == j] - codes[assignment == j].mean(axis=0)) ** 2).sum() for j in set(assignment))


@pytest.mark.parametrize("name", sorted(BASELINES))
@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 60), k=st.integers(2, 9), seed=st.integers(0, 10_000), equal=st.booleans())
def test_every_baseline_puts_everybody_in_a_cluster_of_k_to_2k_minus_1(name, n, k, seed, equal):
    codes = np.zeros((n, 3)) if equal else np.random.default_rng(seed).normal(size=(n, 3))
    if n < k:
        with pytest.raises(CohortTooSmallError):
            BASELINES[name](codes, k, np.random.default_rng(seed))
        return
    found = BASELINES[name](codes, k, np.random.default_rng(seed))
    sizes = np.bincount(found)
    assert found.shape == (n,)
    assert sizes.sum() == n
    assert sizes.min() >= k
    assert sizes.max() <= 2 * k - 1
    assert (found == BASELINES[name](codes, k, np.random.default_rng(seed))).all()


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_two_far_groups_of_k_are_the_two_clusters_of_every_method_but_chance(name):
    codes = np.concatenate([np.arange(4)[:, None] * 0.01, 9 + np.arange(4)[:, None] * 0.01])[[0, 4, 1, 5, 2, 6, 3, 7]]
    found = [_clusters(BASELINES[name](codes, 4, np.random.default_rng(seed))) for seed in range(20)]
    right = {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}
    assert all(one == right for one in found) is (name != "random")


def test_a_k_of_one_is_refused():
    with pytest.raises(ValueError, match="k >= 2"):
        greedy(np.zeros((4, 2)), 1)


def test_distances_are_those_of_scipy():
    codes = np.random.default_rng(0).normal(size=(30, 7))
    assert np.abs(distances(codes, codes) - squareform(pdist(codes))).max() < 1e-6


@settings(max_examples=25, deadline=None)
@given(n=st.integers(4, 70), k=st.integers(2, 8), seed=st.integers(0, 10_000))
def test_the_greedy_is_that_of_section_3_4_recomputed_from_the_whole_distance_matrix(n, k, seed):
    codes = np.random.default_rng(seed).normal(size=(n, 4))
    if n < k:
        return
    distance = squareform(pdist(codes))
    left, expected = list(range(n)), set()
    while len(left) >= 2 * k:
        far = max(left, key=lambda i: distance[i, left].sum())
        taken = sorted(left, key=lambda i: distance[far, i])[:k]
        expected.add(frozenset(taken))
        left = [i for i in left if i not in taken]
    assert _clusters(greedy(codes, k)) == {*expected, frozenset(left)}


def _algorithm_1(codes, k, link):
    """AnonFACES, Algorithm 1, line by line, with everything recomputed in every round."""
    n = len(codes)
    m = n // k  # line 1
    sizes = [n // m + (i < n % m) for i in range(m)]  # line 2
    rest, result = list(range(n)), set()
    for size in sizes:  # line 4
        if len(rest) == size:
            return {*result, frozenset(rest)}
        tree = linkage(pdist(codes[rest]), link)  # lines 3 and 11
        height = {}
        for a, b, far, _ in tree:
            height.setdefault(int(a), far)
            height.setdefault(int(b), far)
        m, chosen = len(rest) // k, []  # lines 5 and 12
        while len(chosen) < size:  # line 6
            cut = cut_tree(tree, m).ravel()  # line 7
            groups = [np.flatnonzero(cut == c).tolist() for c in sorted(set(cut))]
            biggest = max(groups, key=lambda g: (len(g), -min(g)))  # line 8
            chosen = sorted(biggest, key=lambda i: (height[i], i))[:size]  # line 9
            m -= 1  # line 10
        taken = [rest[i] for i in chosen]
        result.add(frozenset(taken))  # line 13
        rest = [i for i in rest if i not in taken]
    raise AssertionError("the sizes do not add up")


@pytest.mark.parametrize("link", LINKS)
@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 60), k=st.integers(2, 8), seed=st.integers(0, 10_000))
def test_anonfaces_is_algorithm_1_read_line_by_line(link, n, k, seed):
    if n < k:
        return
    codes = np.random.default_rng(seed).normal(size=(n, 3))
    assert _clusters(anonfaces(codes, k, link)) == _algorithm_1(codes, k, link)


def test_algorithm_1_gives_the_first_clusters_one_patient_more_where_n_is_no_multiple_of_k():
    sizes = np.bincount(anonfaces(np.random.default_rng(0).normal(size=(53, 4)), 5, "ward"))
    assert sizes.tolist() == [6] * 3 + [5] * 7  # line 2: n mod m = 3 clusters of k+1


def test_algorithm_1_by_hand():
    # joined: 0, 1 at 0.1, 3, 4 at 0.2, then 2 to the first. k + 1 comes first: of two sub-trees the bigger, 0, 1, 2
    codes = np.array([[0.0], [0.1], [0.7], [5.0], [5.2]])
    assert _clusters(anonfaces(codes, 2, "single")) == {frozenset({0, 1, 2}), frozenset({3, 4})}
    # cut in three: 0-3, 4, 5; in the biggest 2, 3 are joined at 0.1 and 0, 1 at 0.3, so 2, 3 are the lowest two,
    # not the first two; then {0, 1, 4}, 5 with the lowest 0, 1; then the rest, however far
    codes = np.array([[0.0], [0.3], [1.0], [1.1], [9.0], [30.0]])
    assert anonfaces(codes, 2, "average").tolist() == [1, 1, 0, 0, 2, 2]


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 60), k=st.integers(2, 8), seed=st.integers(0, 10_000))
def test_mdav_is_mdav_generic_step_by_step(n, k, seed):
    if n < k:
        return
    codes = np.random.default_rng(seed).normal(size=(n, 3))
    far = lambda i, place: float(np.linalg.norm(codes[i] - place))  # noqa: E731
    rest, expected = set(range(n)), set()

    def close(row):
        taken = frozenset(sorted(rest, key=lambda i: far(i, codes[row]))[:k])
        expected.add(taken)
        rest.difference_update(taken)

    while len(rest) >= 3 * k:
        r = max(rest, key=lambda i: far(i, codes[list(rest)].mean(axis=0)))
        close(r)
        close(max(rest, key=lambda i: far(i, codes[r])))
    if len(rest) >= 2 * k:
        close(max(rest, key=lambda i: far(i, codes[list(rest)].mean(axis=0))))
    assert _clusters(mdav(codes, k)) == {*expected, frozenset(rest)}


def test_knn_closes_a_cluster_around_a_patient_drawn_by_chance():
    codes = np.array([[0.0], [1.0], [10.0], [11.0], [20.0], [21.5]])
    found = {frozenset(_clusters(nearest(codes, 2, np.random.default_rng(seed)))) for seed in range(40)}
    assert found == {frozenset({frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})})}
    line = np.arange(9.0)[:, None] ** 1.1
    assert len({frozenset(_clusters(nearest(line, 3, np.random.default_rng(seed)))) for seed in range(40)}) > 1


def test_k_member_adds_whoever_makes_the_sum_of_squares_grow_least():
    rng = np.random.default_rng(4)
    codes = rng.normal(size=(23, 3))
    found = kmember(codes, 5, np.random.default_rng(4))
    start = codes[int(np.random.default_rng(4).integers(23))]
    left, expected = list(range(23)), []
    spread = lambda rows: ((codes[rows] - codes[rows].mean(axis=0)) ** 2).sum()  # noqa: E731
    for _ in range(4):
        first = max(left, key=lambda i: np.linalg.norm(codes[i] - start))
        start, cluster = codes[first], [first]
        left.remove(first)
        while len(cluster) < 5:
            best = min(left, key=lambda i: spread([*cluster, i]))
            cluster.append(best)
            left.remove(best)
        expected.append(cluster)
    for i in left:
        min(expected, key=lambda c: spread([*c, i]) - spread(c)).append(i)
    assert _clusters(found) == {frozenset(c) for c in expected}


def test_k_means_gives_the_nearest_mean_with_room_not_the_farthest():
    # AnonFACES' code has argmax where argmin was meant; then the loss is near that of chance
    codes = load_digits().data[:600]
    loss = {name: _sse(codes, BASELINES[name](codes, 5, np.random.default_rng(0))) for name in ("kmeans", "random")}
    assert loss["kmeans"] < 0.45 * loss["random"]


def test_k_means_has_room_for_equal_numbers_only():
    sizes = np.bincount(kmeans(np.random.default_rng(0).normal(size=(53, 2)), 5, np.random.default_rng(0)))
    assert sorted(sizes) == [5] * 7 + [6] * 3


def test_all_but_chance_lose_less_than_chance_on_real_pictures():
    codes = load_digits().data[:300]
    loss = {name: _sse(codes, BASELINES[name](codes, 5, np.random.default_rng(0))) for name in BASELINES}
    assert all(loss[name] < 0.6 * loss["random"] for name in BASELINES if name not in ("random", "anonfaces-single"))
    assert loss["anonfaces-single"] < loss["random"]
