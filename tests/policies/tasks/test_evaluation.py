"""The layout of a look: what is priced, which sums there are, and the weights: one patient moves them by 1."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.accounting.claims import DistributedGaussian, Evaluated, GaussianQuery, SubsampledGaussian
from policies.accounting.rdp import cost
from policies.tasks.evaluation import (
    KINDS,
    LONGEST_TAIL,
    MOST_SUMS,
    EvaluationError,
    EvaluationPlan,
    SumLattice,
    SumLayout,
    bin_of,
    edges,
    plan_from,
)
from protos.federation import messages

PLAN = EvaluationPlan(looks=3, noise=20.0, held_out=20, bins=10)
LAYOUTS = st.builds(SumLayout, st.sampled_from(KINDS), st.integers(2, 30), st.integers(1, 32).map(lambda n: 2 * n))


def test_a_plan_is_priced_with_its_training_before_the_first_step() -> None:
    training = SubsampledGaussian(1.0, 8.0, 60)
    claim = PLAN.claim(training)
    assert claim == Evaluated(training, GaussianQuery(20.0, 1, 1), 3)
    assert claim.query.sensitivity == 1.0, "it follows from the layout, and is no field of a plan"
    assert cost(claim, 4) > cost(training, 4)
    shared = DistributedGaussian(1.0, 8.0, 60, 3, 2)
    assert PLAN.claim(shared).share == pytest.approx(20.0 / math.sqrt(2))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"looks": 0}, "looks"), ({"looks": 1001}, "looks"), ({"looks": True}, "looks"), ({"looks": 2.0}, "looks"),
        ({"noise": 0.0}, "noise"), ({"noise": math.nan}, "noise"), ({"noise": math.inf}, "noise"),
        ({"noise": 20}, "noise"),
        ({"noise": "20.0"}, "noise"), ({"held_out": 0}, "held_out"), ({"held_out": 51}, "held_out"),
        ({"held_out": 20.0}, "held_out"), ({"bins": 0}, "bins"), ({"bins": 9}, "bins"), ({"bins": 66}, "bins"),
        ({"bins": None}, "bins"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_priced_is_refused_with_the_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(EvaluationError, match=f"evaluate.{key}"):
        replace(PLAN, **changes)
    with pytest.raises(EvaluationError, match=f"evaluate.{key}"):
        plan_from({**PLAN.to_table(), **changes})


def test_all_problems_of_a_plan_are_told_at_once() -> None:
    with pytest.raises(EvaluationError, match=r"looks.*held_out.*bins.*noise"):
        EvaluationPlan(0, 0.0, 0, 0)


@pytest.mark.parametrize("form", [None, [], "plan", {}, {**PLAN.to_table(), "sensitivity": 1.0}])
def test_a_plan_of_another_form_is_refused(form: Any) -> None:
    assert plan_from(PLAN.to_table()) == PLAN
    with pytest.raises(EvaluationError, match="evaluate"):
        plan_from(form)


@given(LAYOUTS)
def test_the_weights_of_all_blocks_have_squares_that_add_up_to_one(layout: SumLayout) -> None:
    assert math.fsum(block.weight**2 for block in layout.blocks) == pytest.approx(1.0, abs=1e-12)
    ends = [block.start + block.size for block in layout.blocks]
    assert [block.start for block in layout.blocks] == [0, *ends[:-1]], "one after the other, without a gap"
    assert ends[-1] == layout.size


def test_each_kind_of_task_has_its_blocks() -> None:
    def names(kind: str, outputs: int) -> list[tuple[str, int]]:
        return [(block.name, block.size) for block in SumLayout(kind, outputs, 4).blocks]

    assert names("classification", 2) == [("scores/1", 8)]
    assert names("classification", 3) == [("confusion", 9), ("calibration", 8)]
    assert names("multi-label", 2) == [("scores/0", 8), ("scores/1", 8)]
    assert names("segmentation", 3) == [("dice/1", 2), ("dice/2", 2)]
    assert names("regression", 1) == [("error/0", 2)]
    assert [block.of for block in SumLayout("segmentation", 3, 4).blocks] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [("survival", 2), ("", 2), ("classification", 1), ("segmentation", 1), ("regression", 0), ("classification", 256),
     ("multi-label", 40_000)],
)  # fmt: skip
def test_a_task_that_cannot_be_evaluated_is_refused(kind: str, outputs: int) -> None:
    with pytest.raises(EvaluationError, match="evaluate"):
        SumLayout(kind, outputs, 10)


@pytest.mark.parametrize("bins", [2, 10, 64])
def test_the_edges_rise_from_0_to_1_are_symmetric_and_have_one_half_among_them(bins: int) -> None:
    cut = edges(bins)
    assert (cut[0], cut[bins // 2], cut[-1], len(cut)) == (0.0, 0.5, 1.0, bins + 1)
    assert all(a < b for a, b in pairwise(cut))
    assert [a + b for a, b in zip(cut, reversed(cut), strict=True)] == pytest.approx([1.0] * (bins + 1))


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(1, 32).map(lambda n: 2 * n))
def test_every_score_has_a_bin(score: float, bins: int) -> None:
    at, cut = bin_of(score, bins), edges(bins)
    assert 0 <= at < bins
    if 0.0 <= score < 1.0:
        assert cut[at] <= score < cut[at + 1]
    if not math.isfinite(score):
        assert at == 0


# --- where only the total over the sites may be seen


@given(st.integers(1, 5000), st.floats(5.0, 500.0), st.integers(1, 9))
def test_a_number_of_a_secret_sum_fits_its_bound_and_is_exact_in_float32(
    patients: int, noise: float, honest: int
) -> None:
    claim = replace(PLAN, noise=noise).claim(DistributedGaussian(1.0, 8.0, 60, 9, honest))
    lattice = SumLattice.of(claim, patients, 100)
    assert patients + LONGEST_TAIL * claim.share < lattice.bound
    assert lattice.bound * 2.0**lattice.scale <= 2.0**24
    assert 2.0**-lattice.scale * 16 <= claim.share


def test_steps_that_would_show_beside_the_noise_are_refused() -> None:
    claim = PLAN.claim(DistributedGaussian(1.0, 8.0, 60, 3, 2))
    SumLattice.of(claim, 1000, 100)
    for patients, noise, size in ((4_000_000, 20.0, 100), (1000, 0.0012, 100), (1000, 20.0, 1 << 24)):
        with pytest.raises(EvaluationError, match="public_patients is too large"):
            SumLattice.of(replace(PLAN, noise=noise).claim(claim.training), patients, size)


def test_a_look_is_never_longer_than_the_wire_takes() -> None:
    assert MOST_SUMS == messages.MAX_SUMS
