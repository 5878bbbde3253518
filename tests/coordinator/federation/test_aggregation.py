"""The strategies of a round: against Flower's, against poisoned sites, and of nothing but good vectors."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from safetensors.numpy import save

from coordinator.federation.aggregation import (
    STRATEGIES,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    Krum,
    Moments,
    MomentsError,
    NoAggregateError,
    StrategyError,
    TrimmedMean,
    aggregate,
    shares,
    strategy_from,
    vector_problem,
)
from coordinator.federation.vectors import CHUNK, update_problem
from protos.artifacts.bfloat16 import rounded, widened

_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
_stacks = st.tuples(st.integers(1, 6), st.integers(1, 20)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=_finite)
)


def _rows(stack: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return [np.ascontiguousarray(row) for row in stack]


def test_every_site_counts_the_same() -> None:
    vectors = [np.array([value, -value], np.float32) for value in (1.0, 2.0, 6.0)]
    mean = aggregate(vectors)
    assert mean.dtype == np.float32
    assert mean.tolist() == [3.0, -3.0]


def test_small_updates_are_not_lost_in_a_float32_sum() -> None:
    big, one, none = (np.array([value], np.float32) for value in (2**24, 1, 0))
    assert aggregate([big, one, one, none]).tolist() == [(2**24 + 2) / 4]


def test_the_largest_floats_do_not_overflow() -> None:
    top = np.full(3, np.finfo(np.float32).max, np.float32)
    assert aggregate([top, top, top]).tolist() == top.tolist()


@given(_stacks)
def test_the_mean_lies_between_the_smallest_and_the_largest(stack: NDArray[np.float32]) -> None:
    mean = aggregate(_rows(stack))
    assert bool(((stack.min(axis=0) <= mean) & (mean <= stack.max(axis=0))).all())


@given(_stacks)
def test_the_order_of_the_sites_matters_by_a_rounding_at_most(stack: NDArray[np.float32]) -> None:
    rows = _rows(stack)
    turned = rows[::-1]
    tolerance = 1e-12 * np.abs(stack).max() + np.spacing(np.abs(aggregate(rows)))
    assert bool((np.abs(aggregate(rows) - aggregate(turned)) <= tolerance).all())


@given(_stacks)
def test_equal_updates_are_their_own_mean(stack: NDArray[np.float32]) -> None:
    row = np.ascontiguousarray(stack[0])
    assert aggregate([row, row]).tolist() == row.tolist()


@pytest.mark.parametrize(
    "strategy",
    [
        FedAvg(),
        FedAvg({"a": 1.0, "b": 2.0, "c": 3.0, "d": 1.0, "e": 1.0}),
        FedProx(0.1),
        FedAvgM(0.5, 0.9),
        FedAdam(0.1, 0.9, 0.99, 1e-3),
        FedYogi(0.1, 0.9, 0.99, 1e-3),
        TrimmedMean(1),
        Krum(1, 2),
    ],
    ids=lambda one: one.name,
)
def test_bits_of_bfloat16_are_aggregated_as_the_numbers_that_they_are(strategy: Any) -> None:
    dice = np.random.default_rng(1)
    start = dice.standard_normal(CHUNK + 3).astype(np.float32)
    bits = [(name, rounded(start + dice.standard_normal(start.size).astype(np.float32))) for name in "abcde"]
    ours = strategy.step(start, bits, Moments())
    theirs = strategy.step(start, [(name, widened(one)) for name, one in bits], Moments())
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1].m, theirs[1].m)
    assert ours[2] == theirs[2]


@pytest.mark.parametrize("strategy", [FedAvg(), TrimmedMean(1), Krum(1, 1)], ids=lambda one: one.name)
def test_a_number_of_16_bits_that_is_not_finite_is_one(strategy: Any) -> None:
    start, good = np.zeros(4, np.float32), np.ones(4, np.uint16)
    bad = np.array([1, 0x7F80, 1, 1], np.uint16)  # an infinity
    assert (update_problem(good, 4), update_problem(bad, 4), vector_problem(good, 4)) == (
        None,
        "not_finite",
        "schema",
    )
    updates = [("a", good), ("b", good), ("c", bad), ("d", good), ("e", good)]
    if strategy.name == "fedavg":
        with pytest.raises(NoAggregateError, match="c: not_finite"):
            strategy.step(start, updates, Moments())
    else:
        assert "c" not in strategy.step(start, updates, Moments())[2]
    with pytest.raises(NoAggregateError, match="start from a finite"):
        strategy.step(good, updates, Moments())  # whose bits would be other numbers


def test_a_mean_takes_the_memory_of_one_vector_above_what_it_is_of() -> None:
    rows = [np.ones(1 << 22, np.float32) for _ in range(3)]
    tracemalloc.start()
    try:
        aggregate(rows)
        FedAvg().step(rows[0], [*zip("abc", rows, strict=True)], Moments())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < rows[0].nbytes + (4 << 20)


def test_what_went_in_is_not_changed() -> None:
    first, second = np.ones(4, np.float32), np.zeros(4, np.float32)
    aggregate([first, second])
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (np.ones(3, np.float64), "schema"),
        (np.ones(2, np.float32), "schema"),
        (np.ones((3, 1), np.float32), "schema"),
        (np.float32(1), "schema"),
        ([1.0, 1.0, 1.0], "schema"),
        (np.ones(3, np.dtype(">f4")), "schema"),
        (np.array([1, np.nan, 1], np.float32), "not_finite"),
        (np.array([1, np.inf, 1], np.float32), "not_finite"),
        (np.array([1, -np.inf, 1], np.float32), "not_finite"),
    ],
)
def test_one_bad_vector_spoils_the_mean_loudly(bad: NDArray[np.float32], why: str) -> None:
    good = np.ones(3, np.float32)
    assert vector_problem(good, 3) is None
    assert vector_problem(bad, 3) == why
    with pytest.raises(NoAggregateError, match=f"vector 1: {why}"):
        aggregate([good, bad])


@pytest.mark.parametrize("vectors", [[], [np.empty(0, np.float32)], [np.ones((2, 2), np.float32)], ["x"]])
def test_there_is_no_mean_of_nothing(vectors: list[NDArray[np.float32]]) -> None:
    with pytest.raises(NoAggregateError):
        aggregate(vectors)


# --- the strategies

ADAM = FedAdam(server_lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3)
YOGI = FedYogi(server_lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3)
PUSHED = FedAvgM(server_lr=0.5, beta1=0.8)
WEIGHTED = FedAvg({"a": 5.0, "b": 2.0, "c": 2.0, "d": 1.0, "e": 1.0, "f": 1.0, "g": 1.0}, 0.3)
ALL = [FedAvg(), WEIGHTED, FedProx(0.1), PUSHED, ADAM, YOGI, TrimmedMean(2), Krum(2, 1), Krum(2, 2)]
STATELESS = [s for s in ALL if s not in (PUSHED, ADAM, YOGI)]
PARAMETERS = 50


def _updates(rng: np.random.Generator, count: int = 7, size: int = PARAMETERS) -> list[tuple[str, Any]]:
    return [("abcdefghijklmn"[i], rng.normal(size=size).astype(np.float32)) for i in range(count)]


def _start(seed: int = 99) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=PARAMETERS).astype(np.float32)


def _run(strategy: Any, rounds: int, state: Moments, seed: int = 0) -> tuple[Any, Moments]:
    vector = _start()
    for index in range(rounds):
        vector, state, _ = strategy.step(vector, _updates(np.random.default_rng([seed, index])), state)
    return vector, state


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_the_order_of_arrival_changes_not_a_bit(strategy: Any) -> None:
    updates = _updates(np.random.default_rng(0))
    expected, moments, used = strategy.step(_start(), updates, Moments())
    for seed in range(5):
        turned = [updates[i] for i in np.random.default_rng(seed).permutation(7)]
        vector, again, same = strategy.step(_start(), turned, Moments())
        assert np.array_equal(vector, expected)
        assert again.to_bytes() == moments.to_bytes()
        assert same == used == tuple(sorted(used))


@pytest.mark.parametrize("strategy", STATELESS, ids=str)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([-4.0, -0.5, 2.0, 8.0]), st.integers(-8, 8))
def test_moving_and_scaling_all_updates_moves_and_scales_the_aggregate(
    strategy: Any, seed: int, scale: float, shift: int
) -> None:
    updates = [(site, np.round(v * 64) / 64) for site, v in _updates(np.random.default_rng(seed))]
    start = np.round(_start(seed) * 64) / 64  # so that scaled and shifted float32 are exact
    vector, _, used = strategy.step(start, updates, Moments())
    moved = [(site, (scale * v + shift).astype(np.float32)) for site, v in updates]
    other, _, same = strategy.step((scale * start + shift).astype(np.float32), moved, Moments())
    assert same == used
    assert np.allclose(other, scale * vector.astype(np.float64) + shift, atol=1e-5)


@pytest.mark.parametrize("strategy", [ADAM, YOGI], ids=str)
def test_adaptive_steps_follow_a_shift_and_forget_the_scale(strategy: Any) -> None:
    updates, start = _updates(np.random.default_rng(3)), _start()
    vector, _, _ = strategy.step(start, updates, Moments())
    shifted, _, _ = strategy.step(start + np.float32(1), [(s, v + np.float32(1)) for s, v in updates], Moments())
    assert np.allclose(shifted, vector + 1, atol=1e-5)
    larger, _, _ = strategy.step(start, [(s, start + 1000 * (v - start)) for s, v in updates], Moments())
    assert not np.allclose(larger - start, 1000 * (vector - start), rtol=0.5)  # not equivariant, and must not be


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_a_run_that_is_resumed_from_its_checkpoint_goes_on_bit_for_bit(strategy: Any) -> None:
    straight, after = _run(strategy, 4, Moments())
    vector, state = _start(), Moments()
    for index in range(4):
        kept = state.to_bytes()  # killed here, in each round
        assert Moments.from_bytes(kept).to_bytes() == kept
        updates = _updates(np.random.default_rng([0, index]))
        vector, state, _ = strategy.step(vector, updates, Moments.from_bytes(kept))
    assert np.array_equal(vector, straight)
    assert (state.t, state.to_bytes()) == (4, after.to_bytes())


@pytest.mark.parametrize("strategy", [FedAvg(), PUSHED, ADAM, YOGI], ids=str)
def test_the_mean_change_alone_leads_to_the_same_parameters(strategy: Any) -> None:
    # what secure aggregation shows is enough
    start, updates, state = _start(), _updates(np.random.default_rng(0)), Moments()
    for _ in range(3):
        delta = np.mean([v.astype(np.float64) - start for _, v in updates], axis=0)
        expected, after, _ = strategy.step(start, updates, state)
        vector, moments = strategy.advance(start, delta, state)
        assert np.allclose(vector, expected, rtol=1e-6, atol=1e-7)
        start, state = expected, after
        assert moments.t == after.t


def test_what_went_into_a_step_is_not_changed() -> None:
    strategy: Any
    for strategy in ALL:
        updates, start = _updates(np.random.default_rng(0)), _start()
        copies, state = [v.copy() for _, v in updates], Moments()
        strategy.step(start, updates, state)
        assert all(np.array_equal(c, v) for c, (_, v) in zip(copies, updates, strict=True))
        assert np.array_equal(start, _start())
        assert state.t == 0
        assert not state.m.size


@pytest.mark.parametrize("strategy", ALL, ids=str)
@pytest.mark.parametrize("updates", [
    [],
    [("a", np.ones(PARAMETERS, np.float32))] * 7,
    [(s, np.ones(PARAMETERS + 1, np.float32)) for s in "abcdefg"],
    [(s, np.ones(PARAMETERS, np.float64)) for s in "abcdefg"],
    [(s, np.full(PARAMETERS, np.nan, np.float32)) for s in "abcdefg"],
    [(s, np.full(PARAMETERS, np.inf, np.float32)) for s in "abcdefg"],
], ids=["none", "twice", "size", "type", "nan", "inf"])  # fmt: skip
def test_updates_that_cannot_be_aggregated_are_no_aggregate(strategy: Any, updates: Any) -> None:
    with pytest.raises(NoAggregateError):
        strategy.step(_start(), updates, Moments())


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_a_start_that_is_not_finite_is_no_aggregate(strategy: Any) -> None:
    for bad in (np.full(PARAMETERS, np.nan, np.float32), np.empty(0, np.float32), None):
        with pytest.raises(NoAggregateError):
            strategy.step(bad, _updates(np.random.default_rng(0)), Moments())


@pytest.mark.parametrize("strategy", [FedAvg(), FedProx(0.1), ADAM, YOGI], ids=str)
def test_one_nan_spoils_a_mean_loudly_and_the_site_is_named(strategy: Any) -> None:
    updates = _updates(np.random.default_rng(0))
    updates[2][1][7] = np.nan
    with pytest.raises(NoAggregateError, match="c: not_finite"):
        strategy.step(_start(), updates, Moments())


def test_a_result_beyond_float32_is_no_aggregate() -> None:
    start = np.full(3, 3e38, np.float32)
    with pytest.raises(NoAggregateError, match="not finite"):
        FedAdam(1e8, 0.9, 0.0, 1.0).step(
            start, [("a", np.full(3, 3.4e38, np.float32))], Moments(1, *[np.full(3, 1e300)] * 2)
        )
    with pytest.raises(NoAggregateError, match="not finite"):
        FedAvg().advance(start, np.full(3, 3e38), Moments())
    with pytest.raises(NoAggregateError, match="not a finite"):
        FedAvg().advance(start, np.array([0.0, np.nan, 0.0]), Moments())


def test_moments_of_another_strategy_or_model_are_refused() -> None:
    updates = _updates(np.random.default_rng(0))
    _, adaptive, _ = ADAM.step(_start(), updates, Moments())
    _, counted, _ = FedAvg().step(_start(), updates, Moments())
    _, pushed, _ = PUSHED.step(_start(), updates, Moments())
    cases: list[tuple[Any, Moments]] = [(s, other) for s in STATELESS for other in (adaptive, pushed)]
    cases += [(ADAM, counted), (ADAM, pushed), (PUSHED, counted), (PUSHED, adaptive)]
    for strategy, state in [*cases, (YOGI, Moments(1, np.ones(3), np.ones(3))), (PUSHED, Moments(1, np.ones(3)))]:
        with pytest.raises(NoAggregateError, match="moments"):
            strategy.step(_start(), updates, state)


# --- weights


def test_weights_are_capped_and_what_is_cut_goes_to_the_others() -> None:
    of = shares({"a": 98.0, "b": 1.0, "c": 1.0}, 0.5)
    assert of == {"a": 0.5, "b": 0.25, "c": 0.25}
    assert shares({"a": 5.0, "b": 5.0}, 0.5) == {"a": 0.5, "b": 0.5}
    assert shares({"a": 9.0, "b": 9.0, "c": 1.0, "d": 1.0}, 0.3) == pytest.approx(
        {"a": 0.3, "b": 0.3, "c": 0.2, "d": 0.2}
    )


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), st.floats(0.05, 1.0))
def test_no_share_exceeds_the_cap_and_all_sum_to_one(weights: list[float], cap: float) -> None:
    named = {f"site-{i}": w for i, w in enumerate(weights)}
    if cap * len(weights) < 1:
        with pytest.raises(NoAggregateError, match="too few"):
            shares(named, cap)
        return
    of = shares(named, cap)
    assert sum(of.values()) == pytest.approx(1)
    assert all(0 <= share <= cap * (1 + 1e-12) for share in of.values())
    assert all(of[a] <= of[b] * (1 + 1e-9) for a in named for b in named if named[a] <= named[b])


def test_a_weighted_mean_uses_the_hubs_weights_under_the_default_cap() -> None:
    strategy = FedAvg({"a": 8.0, "b": 1.0, "c": 1.0})
    updates = [(s, np.full(3, value, np.float32)) for s, value in (("a", 4.0), ("b", 0.0), ("c", 8.0))]
    vector, _, used = strategy.step(np.zeros(3, np.float32), updates, Moments())
    assert vector.tolist() == [4.0] * 3  # 0.5 * 4 + 0.25 * 8, not 0.8 * 4 + 0.1 * 8
    assert used == ("a", "b", "c")
    with pytest.raises(NoAggregateError, match="too few"):
        strategy.step(np.zeros(3, np.float32), updates[:1], Moments())
    with pytest.raises(NoAggregateError, match=r"d: .*no weight"):
        strategy.step(np.zeros(3, np.float32), [*updates, ("d", updates[0][1])], Moments())
    with pytest.raises(NoAggregateError, match="weights"):
        strategy.advance(np.zeros(3, np.float32), np.zeros(3), Moments())


def test_without_weights_one_site_is_enough_unless_a_cap_says_otherwise() -> None:
    one = [("a", np.ones(3, np.float32))]
    assert FedAvg().step(np.zeros(3, np.float32), one, Moments())[0].tolist() == [1.0] * 3
    assert (FedAvg().min_updates(), FedAvg(cap=0.5).min_updates(), FedAvg(cap=0.34).min_updates()) == (1, 2, 3)
    with pytest.raises(NoAggregateError):
        FedAvg(cap=0.5).step(np.zeros(3, np.float32), one, Moments())


def test_the_uniform_strategy_is_the_uniform_mean() -> None:
    updates = _updates(np.random.default_rng(0))
    mean = aggregate([v for _, v in updates])
    assert np.allclose(FedAvg().step(_start(), updates, Moments())[0], mean, rtol=1e-6)
    assert np.array_equal(
        FedProx(0.5).step(_start(), updates, Moments())[0], FedAvg().step(_start(), updates, Moments())[0]
    )


# --- Flower's strategies as the second implementation


def _flower(strategy: Any, start: Any, updates: list[tuple[str, Any]], index: int, examples: Any = None) -> Any:
    """One round of a strategy of Flower's: its own code, on its own messages."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    replies = []
    for number, (_, vector) in enumerate(updates):
        metrics = MetricRecord({"num-examples": 1 if examples is None else examples[number]})
        content = RecordDict({"arrays": ArrayRecord([vector]), "metrics": metrics})
        replies.append(Message(content, number + 1, "train"))
    there = start.astype(np.float64)
    strategy.current_arrays = ArrayRecord([there]) if isinstance(strategy, flower.FedAvgM) else {"0": there}
    record, _ = strategy.aggregate_train(index, replies)
    return record["0"].numpy()


def _against_flower(ours: Any, theirs: Any, before: Any = lambda index: None, rounds: int = 4) -> None:
    start, state = _start(), Moments()
    for index in range(1, rounds + 1):
        updates = _updates(np.random.default_rng([7, index]))
        before(index)
        expected = _flower(theirs, start, updates, index)
        vector, state, _ = ours.step(start, updates, state)
        assert np.allclose(vector, expected, rtol=2e-5, atol=2e-6)
        start = vector


def _like(kind: Any, ours: Any, **changes: Any) -> Any:
    values = {"eta": ours.server_lr, "beta_1": ours.beta1, "beta_2": ours.beta2, "tau": ours.tau}
    theirs = kind(**{**values, **changes})
    theirs.v_t = {"0": np.full(PARAMETERS, ours.tau**2)}  # Flower's own start, 0, is below the paper's least
    return theirs


def test_server_momentum_is_flowers_and_with_none_of_it_the_mean() -> None:
    theirs = flower.FedAvgM(server_learning_rate=PUSHED.server_lr, server_momentum=PUSHED.beta1)
    _against_flower(PUSHED, theirs)
    updates = _updates(np.random.default_rng(0))
    plain, mean = FedAvgM(server_lr=1.0, beta1=0.0), FedAvg()
    assert np.allclose(plain.step(_start(), updates, Moments())[0], mean.step(_start(), updates, Moments())[0])


def test_yogi_is_flowers_once_it_starts_where_the_paper_does() -> None:
    _against_flower(YOGI, _like(flower.FedYogi, YOGI))


def test_adam_is_flowers_without_its_bias_correction() -> None:
    theirs = _like(flower.FedAdam, ADAM)

    def undo(index: int) -> None:
        factor = np.sqrt(1 - ADAM.beta2 ** (index + 1)) / (1 - ADAM.beta1 ** (index + 1))
        theirs.eta = ADAM.server_lr / factor

    _against_flower(ADAM, theirs, undo)


@pytest.mark.parametrize(("kind", "ours"), [(flower.FedAdam, ADAM), (flower.FedYogi, YOGI)])
def test_flowers_adaptive_strategies_as_they_are_depart_from_the_paper(kind: Any, ours: Any) -> None:
    theirs = kind(eta=ours.server_lr, beta_1=ours.beta1, beta_2=ours.beta2, tau=ours.tau)
    with pytest.raises(AssertionError):
        _against_flower(ours, theirs)


@pytest.mark.parametrize("trim", [1, 2, 3])
def test_the_trimmed_mean_is_flowers_of_the_share_that_is_that_number(trim: int) -> None:
    _against_flower(TrimmedMean(trim), flower.FedTrimmedAvg(beta=(trim + 0.4) / 7))


def test_flowers_trimmed_mean_of_few_sites_trims_nothing_and_ours_refuses() -> None:
    updates = _updates(np.random.default_rng(0), 2)
    mean = _flower(flower.FedTrimmedAvg(beta=0.2), _start(), updates, 1)
    assert np.allclose(mean, aggregate([v for _, v in updates]))
    with pytest.raises(NoAggregateError, match="needs 3 updates"):
        TrimmedMean(1).step(_start(), updates, Moments())


@pytest.mark.parametrize(("byzantine", "multi"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_krum_is_flowers(byzantine: int, multi: int) -> None:
    theirs = flower.MultiKrum(num_malicious_nodes=byzantine, num_nodes_to_select=multi)
    _against_flower(Krum(byzantine, multi), theirs)
    if multi == 1:
        _against_flower(Krum(byzantine, 1), flower.Krum(num_malicious_nodes=byzantine))


@pytest.mark.parametrize("count", [4, 5, 6])
def test_krum_refuses_fewer_updates_than_its_theorem_needs_and_flower_does_not(count: int) -> None:
    updates = _updates(np.random.default_rng(0), count)
    assert np.isfinite(_flower(flower.Krum(num_malicious_nodes=2), _start(), updates, 1)).all()
    with pytest.raises(NoAggregateError, match="needs 7 updates"):
        Krum(2, 1).step(_start(), updates, Moments())
    with pytest.raises(NoAggregateError, match="needs 7 updates"):
        Krum(1, 4).step(_start(), updates, Moments())


def test_flower_lets_a_site_choose_its_own_weight_and_nothing_here_can() -> None:
    # why Flower's strategies are not used
    updates = _updates(np.random.default_rng(0), 3)
    taken = _flower(flower.FedAvg(), _start(), updates, 1, examples=[10**9, 1, 1])
    assert np.allclose(taken, updates[0][1], atol=1e-5)
    assert not np.allclose(FedAvg().step(_start(), updates, Moments())[0], updates[0][1], atol=0.1)


# --- one poisoned site of five


def _poisoned(how: str, seed: int) -> tuple[list[tuple[str, Any]], list[Any]]:
    """Five updates near each other, the third of them poisoned; and the honest ones."""
    rng = np.random.default_rng(seed)
    updates = [(s, (_start() + 0.1 * rng.normal(size=PARAMETERS)).astype(np.float32)) for s in "abcde"]
    lie = {
        "scaled": updates[2][1] * np.float32(1e6),
        "flipped": -10 * updates[2][1],
        "nan": np.full(PARAMETERS, np.nan, np.float32),
        "inf": np.full(PARAMETERS, -np.inf, np.float32),
        "largest": np.full(PARAMETERS, np.finfo(np.float32).max),
        "one": np.where(np.arange(PARAMETERS) == 3, np.float32(1e9), updates[2][1]),
        "near": updates[0][1] + np.float32(0.02),
    }[how]
    updates[2] = ("c", lie.astype(np.float32))
    return updates, [v for s, v in updates if s != "c"]


LIES = ["scaled", "flipped", "nan", "inf", "largest", "one", "near"]


@pytest.mark.parametrize("how", LIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_poisoned_site_leaves_the_trimmed_mean_between_the_honest_ones(how: str, seed: int) -> None:
    updates, honest = _poisoned(how, seed)
    vector, _, used = TrimmedMean(1).step(_start(), updates, Moments())
    assert bool(((np.min(honest, axis=0) <= vector) & (vector <= np.max(honest, axis=0))).all())
    assert ("c" in used) == (how not in ("nan", "inf"))


@pytest.mark.parametrize("how", LIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_poisoned_site_leaves_krum_within_its_bound_of_an_honest_one(how: str, seed: int) -> None:
    updates, honest = _poisoned(how, seed)
    (vector, _, used), n, f = Krum(1, 1).step(_start(), updates, Moments()), 5, 1
    widest = max(float(np.linalg.norm(a - b)) for a in honest for b in honest)
    nearest = min(float(np.linalg.norm(vector - a)) for a in honest)
    assert nearest <= widest * np.sqrt((n - f - 2) / (n - 2 * f - 1)) * (1 + 1e-6)
    assert len(used) == 1
    assert ("c" not in used) or how == "near"


@pytest.mark.parametrize("how", ["scaled", "flipped", "largest", "one"])
def test_the_same_poison_carries_a_mean_away(how: str) -> None:
    # else the two tests above would prove nothing
    updates, honest = _poisoned(how, 0)
    vector, _, _ = FedAvg().step(_start(), updates, Moments())
    assert not bool(((np.min(honest, axis=0) <= vector) & (vector <= np.max(honest, axis=0))).all())
    widest = max(float(np.linalg.norm(a - b)) for a in honest for b in honest)
    assert min(float(np.linalg.norm(vector.astype(np.float64) - a)) for a in honest) > widest


def test_two_poisoned_sites_break_what_withstands_one() -> None:
    updates, honest = _poisoned("scaled", 0)
    updates[3] = ("d", updates[2][1])
    vector, _, _ = TrimmedMean(1).step(_start(), updates, Moments())
    assert not bool((vector <= np.max(honest, axis=0)).all())


def test_multi_krum_averages_the_chosen_and_names_them() -> None:
    updates = _updates(np.random.default_rng(1), 9)
    vector, _, used = Krum(2, 3).step(_start(), updates, Moments())
    assert len(used) == 3
    assert np.array_equal(vector, aggregate([v for s, v in updates if s in used]))


def test_models_larger_than_a_chunk_give_what_small_ones_do() -> None:
    rng, size = np.random.default_rng(0), CHUNK + 17
    updates, start = _updates(rng, 5, size), np.zeros(size, np.float32)
    vector, _, _ = TrimmedMean(1).step(start, updates, Moments())
    expected = np.sort(np.stack([v for _, v in updates]).astype(np.float64), axis=0)[1:-1].mean(axis=0)
    assert np.allclose(vector, expected, rtol=1e-6)
    (_, _, used), rows = Krum(1, 1).step(start, updates, Moments()), [v.astype(np.float64) for _, v in updates]
    scores = [sorted(float(((a - b) ** 2).sum()) for b in rows)[1:3] for a in rows]
    assert used == ("abcde"[int(np.argmin([sum(s) for s in scores]))],)


# --- what is remembered


def test_moments_survive_their_bytes() -> None:
    rng = np.random.default_rng(0)
    moments = Moments(3, rng.normal(size=5), rng.random(5))
    again = Moments.from_bytes(moments.to_bytes())
    assert (again.t, again.m.tolist(), again.v.tolist()) == (3, moments.m.tolist(), moments.v.tolist())
    assert Moments.from_bytes(Moments().to_bytes()).m.size == 0


def _tensors(**changes: Any) -> bytes:
    values = {"t": np.array([1], np.int64), "m": np.zeros(2), "v": np.zeros(2), **changes}
    return save({key: value for key, value in values.items() if value is not None})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x" * 100,
        _tensors(t=None),
        _tensors(extra=np.zeros(1)),
        _tensors(t=np.array([-1], np.int64)),
        _tensors(t=np.array([1], np.int32)),
        _tensors(t=np.array([1, 2], np.int64)),
        _tensors(m=np.zeros(2, np.float32)),
        _tensors(m=np.zeros(3)),
        _tensors(m=np.zeros((2, 1)), v=np.zeros((2, 1))),
        _tensors(m=np.array([0.0, np.nan])),
        _tensors(v=np.array([0.0, np.inf])),
        _tensors(v=np.array([0.0, -1e-9])),
        save({"t": np.array([1], np.int64), "m": np.zeros(2), "v": np.zeros(2)}, metadata={"note": "x"}),
        _tensors() + b" ",
    ],
)
def test_bytes_that_are_not_moments_are_refused(raw: bytes) -> None:
    with pytest.raises(MomentsError):
        Moments.from_bytes(raw)


# --- the configuration


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_a_strategy_survives_its_json(strategy: Any) -> None:
    assert strategy_from(strategy.to_json()) == strategy
    assert strategy_from(strategy.to_json()).to_json() == strategy.to_json()


def test_every_strategy_is_tested_and_none_is_found_but_by_its_name() -> None:
    assert {type(s) for s in ALL} == set(STRATEGIES.values())
    assert all(kind.name == name for name, kind in STRATEGIES.items())


def test_whole_numbers_stand_for_reals_in_json() -> None:
    text = '{"name":"fedadam","server_lr":1,"beta1":0,"beta2":0,"tau":1}'
    assert strategy_from(text) == FedAdam(1.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"name":"median"}',
        '{"name":["fedavg"]}',
        '{"name":"fedavg","name":"krum"}',
        '{"name":"fedavg","momentum":0.9}',
        '{"name":"fedavg","cap":0}',
        '{"name":"fedavg","cap":1.1}',
        '{"name":"fedavg","cap":null}',
        '{"name":"fedavg","cap":true}',
        '{"name":"fedavg","weights":{}}',
        '{"name":"fedavg","weights":{"a":1}}',
        '{"name":"fedavg","weights":{"a":1,"b":-1}}',
        '{"name":"fedavg","weights":{"a":1,"b":0}}',
        '{"name":"fedavg","weights":{"a":1,"b":1e300}}',
        '{"name":"fedavg","weights":{"a":1,"b":NaN}}',
        '{"name":"fedavg","weights":{"a":1,"b":Infinity}}',
        '{"name":"fedavg","weights":{"a":1,"b":"1"}}',
        '{"name":"fedavg","weights":{"a":1,"b":true}}',
        '{"name":"fedavg","weights":[1,1]}',
        '{"name":"fedavg","weights":{"a":1,"b":1},"cap":0.4}',
        '{"name":"fedprox"}',
        '{"name":"fedprox","mu":-0.1}',
        '{"name":"fedadam","server_lr":0.1,"beta1":0.9,"beta2":0.99}',
        '{"name":"fedadam","server_lr":0.1,"beta1":1,"beta2":0.99,"tau":1e-3}',
        '{"name":"fedadam","server_lr":0,"beta1":0.9,"beta2":0.99,"tau":1e-3}',
        '{"name":"fedyogi","server_lr":0.1,"beta1":0.9,"beta2":0.99,"tau":0}',
        '{"name":"fedyogi","server_lr":1e400,"beta1":0.9,"beta2":0.99,"tau":1}',
        '{"name":"trimmed-mean","trim":0}',
        '{"name":"trimmed-mean","trim":1.0}',
        '{"name":"trimmed-mean","trim":true}',
        '{"name":"krum","byzantine":0,"multi":1}',
        '{"name":"krum","byzantine":1,"multi":0}',
        '{"name":"krum","byzantine":1}',
        "[" * 100_000,
        '{"name":"fedavg"} x',
    ],
)  # fmt: skip
def test_a_strategy_that_is_not_exactly_one_is_refused(text: str) -> None:
    with pytest.raises(StrategyError):
        strategy_from(text)


def test_all_keys_of_a_strategy_at_fault_are_named_at_once() -> None:
    with pytest.raises(StrategyError) as refusal:
        strategy_from('{"name":"fedyogi","server_lr":-1,"beta1":2,"tau":0,"seed":12345}')
    for key in ("server_lr", "beta1", "beta2", "tau", "seed"):
        assert key in str(refusal.value)
    assert "12345" not in str(refusal.value)


def test_a_strategy_that_could_not_be_parsed_cannot_be_built_either() -> None:
    for build in (
        lambda: FedAdam(float("nan"), 0.9, 0.99, 1e-3),
        lambda: FedAvg({"a": 1.0, "b": float("nan")}),
        lambda: FedAvg(cap=float("nan")),
        lambda: TrimmedMean(0),
        lambda: Krum(1, 0),
        lambda: FedProx(float("inf")),
    ):
        with pytest.raises(StrategyError):
            build()


def test_a_strategy_shares_no_mutable_state_with_who_built_it() -> None:
    weights = {"a": 1.0, "b": 1.0}
    strategy = FedAvg(weights)
    weights["a"] = 1e9
    assert json.loads(strategy.to_json())["weights"] == {"a": 1.0, "b": 1.0}


def test_an_update_that_is_not_finite_is_nobodys_neighbour() -> None:
    for seed in range(20):
        chosen = []
        for lie in (np.nan, 3e38):
            updates = _updates(np.random.default_rng(seed))
            updates[1] = ("b", np.full(PARAMETERS, lie, np.float32))
            chosen.append(Krum(1, 1).step(_start(), updates, Moments())[2])
        assert chosen[0] == chosen[1]
