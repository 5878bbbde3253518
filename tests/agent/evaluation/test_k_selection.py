from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import silhouette_score

from agent.domain import Clusters, Latents
from agent.errors import CohortTooSmallError
from agent.evaluation.k_selection import Menu, Point, Rate, dendrogram, elbow, recommend, tune
from agent.microaggregation.partition import partition


def cohort(n: int = 120, d: int = 6, seed: int = 0) -> Latents:
    codes = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)
    return Latents(codes, tuple(f"p{i:05d}" for i in range(n)))


def groups(latents: Latents, clusters: Clusters) -> list[list[int]]:
    row = {p: i for i, p in enumerate(latents.patients)}
    return [[row[p] for p in cluster] for cluster in clusters.members]


def test_the_elbow_of_a_curve_of_two_straight_lines_is_where_they_meet() -> None:
    knee = 11
    curve = [(k, float(3 * min(k, knee) + 0.2 * max(0, k - knee))) for k in (2, 5, 8, 11, 15, 20, 30)]
    found = elbow(curve)
    assert found is not None
    assert (found.k, found.bends) == (knee, "flattens")


def test_a_loss_that_begins_to_climb_has_its_elbow_where_to_stop() -> None:
    found = elbow([(k, float(0.1 * min(k, 8) + 4 * max(0, k - 8))) for k in (2, 5, 8, 11, 15)])
    assert found is not None
    assert (found.k, found.bends) == (8, "steepens")


@pytest.mark.parametrize(
    "curve",
    [
        [(2, 1.0), (5, 2.0)],
        [(2, 0.0), (5, 3.0), (8, 6.0)],
        [(2, 3.0), (5, 9.0), (8, 1.0)],
        [(2, 0.0), (5, float("nan")), (8, 2.0)],
    ],
    ids=["two points", "a straight line", "a loss that falls", "a loss that is no number"],
)
def test_a_curve_without_an_elbow_has_none(curve: list[tuple[int, float]]) -> None:
    assert elbow(curve) is None


@given(
    gaps=st.lists(st.floats(0.01, 10), min_size=3, max_size=12),
    scale=st.floats(0.1, 100),
    shift=st.floats(-5, 5),
)
@settings(deadline=None, max_examples=60)
def test_the_elbow_does_not_depend_on_the_unit_of_the_loss(gaps: list[float], scale: float, shift: float) -> None:
    losses = np.cumsum(gaps)
    one = elbow([(k + 2, float(v)) for k, v in enumerate(losses)])
    other = elbow([(k + 2, float(v * scale + shift)) for k, v in enumerate(losses)])
    if one is None or other is None or one.distance < 0.06:
        return
    assert one.bends == other.bends
    assert one.distance == pytest.approx(other.distance, rel=1e-6)


@given(k_min=st.sampled_from([2, 3, 5, 11, 20, 40]), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=12)
def test_no_k_below_the_policys_is_ever_recommended(k_min: int, seed: int) -> None:
    curves = tune(cohort(90, 3, seed), [""] * 90, Menu((2, 3, 5, 8, 11, 15), k_min), np.random.default_rng(seed))
    assert curves.recommended is None if k_min > 15 else curves.recommended is not None
    assert curves.recommended is None or curves.recommended >= k_min
    assert {r.k for r in curves.refused} == {k for k in (2, 3, 5, 8, 11, 15) if k < k_min}
    assert len(curves.points) == 6  # measured all the same: the curve shows what the policy costs


def test_what_may_not_be_recommended_is_not_recommended_by_accident() -> None:
    assert recommend([])[0] is None
    assert recommend([(11, 1.0), (15, 1.2)])[0] == 11


def test_loss_and_share_are_those_of_definition_3_2() -> None:
    latents = cohort()
    menu = Menu((4, 9), 4)
    curves = tune(latents, [""] * 120, menu, np.random.default_rng(3))
    streams = np.random.default_rng(3).spawn(2)
    for point, k, stream in zip(curves.points, menu.ks, streams, strict=True):
        rows = groups(latents, partition(latents, [""] * 120, k, 1, stream))
        codes = latents.codes.astype(float)
        far = [np.linalg.norm(codes[i] - codes[r].mean(axis=0)) for r in rows for i in r]
        assert point.information_loss == pytest.approx(np.mean(far), rel=1e-5)
        within = sum(f**2 for f in far)
        assert point.sse_share == pytest.approx(within / ((codes - codes.mean(axis=0)) ** 2).sum(), rel=1e-5)
        assignment = np.empty(120, int)
        for j, r in enumerate(rows):
            assignment[r] = j
        assert point.silhouette == pytest.approx(silhouette_score(codes, assignment))
        assert point.clusters == len(rows)
    assert curves.points[0].information_loss < curves.points[1].information_loss


def blocks(size: int, count: int) -> Latents:
    """``count`` tight groups of ``size`` patients, far from one another."""
    rng = np.random.default_rng(1)
    centres = np.repeat(rng.normal(size=(count, 4)) * 50, size, axis=0)
    codes = (centres + rng.normal(size=(size * count, 4)) * 0.01).astype(np.float32)
    return Latents(codes, tuple(f"p{i:05d}" for i in range(size * count)))


def test_homogeneity_is_one_for_an_attribute_that_makes_the_groups_and_counts_unknown_for_nothing() -> None:
    latents = blocks(5, 8)
    own = [str(i // 5) for i in range(40)]
    mixed = [str(i % 5) for i in range(40)]
    holes = ["" if i % 5 else v for i, v in enumerate(own)]
    curves = tune(
        latents,
        [""] * 40,
        Menu((5, 10), 5),
        np.random.default_rng(0),
        {"own": own, "mixed": mixed, "holes": holes, "unknown": [""] * 40},
    )
    first, second = curves.points
    assert first.homogeneity == {"own": 1.0, "mixed": 0.0, "holes": 1.0, "unknown": 0.0}
    assert second.homogeneity["own"] == 0.0
    assert first.joint == 0.0


def test_the_joint_rate_is_that_of_clusters_alike_in_everything() -> None:
    latents = blocks(4, 6)
    a = [str(i // 4) for i in range(24)]
    b = ["x" if i < 12 else str(i) for i in range(24)]
    point = tune(latents, [""] * 24, Menu((4, 8), 4), np.random.default_rng(0), {"a": a, "b": b}).points[0]
    assert (point.homogeneity["a"], point.homogeneity["b"], point.joint) == (1.0, 0.5, 0.5)


def probing(distances: NDArray[np.float64]):  # type: ignore[no-untyped-def]
    return lambda clusters: (distances, 1.0)


def test_a_k_whose_risk_cannot_be_told_to_be_below_one_in_k_is_not_recommended() -> None:
    latents = cohort(100, 3)
    menu = Menu((5, 10, 20), 5)
    safe = tune(latents, [""] * 100, menu, np.random.default_rng(0), probe=probing(np.full(100, 2.0)))
    assert safe.recommended is not None
    assert safe.points[0].reid == Rate(0, 100)
    risky = tune(latents, [""] * 100, menu, np.random.default_rng(0), probe=probing(np.full(100, 0.5)))
    assert risky.recommended is None
    unknown = tune(latents, [""] * 100, menu, np.random.default_rng(0), probe=probing(np.full(100, np.nan)))
    assert unknown.points[0].reid == Rate(100, 100)
    assert unknown.recommended is None


def test_the_policys_rate_binds_as_well() -> None:
    latents, far = cohort(100, 3), np.full(100, 2.0)
    far[:2] = 0.5
    for limit, allowed in ((1.0, True), (0.03, False)):
        menu = Menu((5, 8, 10), 5, max_reid_rate=limit)
        curves = tune(latents, [""] * 100, menu, np.random.default_rng(0), probe=probing(far))
        assert (curves.recommended is not None) is allowed


def test_wilsons_interval_is_the_published_one() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3: 81/263, 15/148, 0/20, 1/29
    for hits, tries, low, high in (
        *((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)),
        *((0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)),
    ):
        assert Rate(hits, tries).interval == pytest.approx((low, high), abs=5e-5)


def test_a_k_with_too_few_patients_is_refused_with_a_reason_that_counts_nobody() -> None:
    curves = tune(cohort(12), [""] * 12, Menu((4, 6, 50), 4), np.random.default_rng(0))
    (refused,) = curves.refused
    assert refused.k == 50
    assert "12" not in refused.reason
    with pytest.raises(CohortTooSmallError):
        tune(cohort(4), [""] * 4, Menu((11, 20), 11), np.random.default_rng(0))


def test_the_same_stream_gives_the_same_curves() -> None:
    menu = Menu((4, 8, 12), 4)
    one, two = (tune(cohort(), [""] * 120, menu, np.random.default_rng(7)) for _ in range(2))
    assert one.points == two.points


def test_the_cuts_of_a_tree_bound_the_sizes_of_its_groups() -> None:
    tree = dendrogram(blocks(6, 10).codes, np.random.default_rng(0))
    assert tree.lower <= tree.upper
    assert 2 <= tree.smallest <= tree.typical[0]
    assert tree.typical[1] <= tree.largest <= 6  # no cut that leaves one in ten alone joins two far groups
    pairs = dendrogram(blocks(2, 15).codes, np.random.default_rng(0))
    assert (pairs.smallest, pairs.largest) == (2, 2)


def test_a_tree_of_many_patients_is_drawn_from_a_sample() -> None:
    assert len(dendrogram(cohort(700).codes, np.random.default_rng(0)).tree) == 299


@pytest.mark.parametrize("ks", [(5,), (5, 5), (8, 5), (1, 5), (2.0, 5)])
def test_a_menu_that_is_none_is_refused(ks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="menu"):
        Menu(ks, 5)


def test_an_attribute_of_another_length_is_refused_before_anything_is_clustered() -> None:
    with pytest.raises(ValueError, match="each patient"):
        tune(cohort(), [""] * 120, Menu((4, 8), 4), np.random.default_rng(0), {"age": ["1"]})


def test_a_point_is_a_value() -> None:
    point = Point(5, 2, 1.0, 0.5, 0.1, {}, None, None)
    assert point == Point(5, 2, 1.0, 0.5, 0.1, {}, None, None)
