"""A simulation is the run's own arithmetic over what sites send: here sites that a few lines stand for, no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.federation.evaluation import LookSums, estimates
from coordinator.federation.job import Job, JobError
from coordinator.federation.simulated_sites_process import DivergedTrainingError, Question, SimulationError
from coordinator.federation.simulation import (
    ALONE,
    OPEN,
    TOGETHER,
    Oddities,
    PricedJob,
    Simulation,
    Trained,
    with_epsilon,
    with_sites,
)
from policies.accounting.rdp import epsilon_nano
from policies.ledger_service import open_accounts
from policies.review.policy import parse, preset
from policies.tasks.evaluation import MOST_BINS
from tests.support.public_folders import small_task
from tests.support.small_tasks import masked_config, plain_config

SITES = ("site-a", "site-b", "site-c", "site-d")
LOOKS = {"looks": 3, "noise": 20.0, "held_out": 20, "bins": 10}
POLICY = parse(preset("internal"), "federation")
TARGET = 0.5  # what every site's parameters move to, by a half of the way in each round


def plain(strategy: str = '{"name":"fedavg"}', looks: tuple[int, ...] = (1, 2, 3), **training: Any) -> Job:
    """Two of four sites are enough, or three."""
    config = plain_config(small_task(**training)) | ({"evaluate": LOOKS} if looks else {})
    return Job(
        "simulated",
        "federated",
        json.dumps(config),
        130,
        SITES,
        3,
        3 if "trim" in strategy else 2,
        strategy,
        evaluate=looks,
    )


def masked() -> Job:
    config = masked_config(small_task(steps_per_round=1, momentum=0.0, learning_rate=1.0), sites=4)
    return Job("simulated", "federated-masked", json.dumps(config), 130, SITES, 3, 4, secure=True)


def sums_of(right: float, patients: int = 1000) -> NDArray[np.float64]:
    """Of a look at a model that says rightly so many of two classes."""
    low, high = round(right * patients / 2), patients // 2 - round(right * patients / 2)
    sums = np.zeros(2 * MOST_BINS)
    sums[0], sums[MOST_BINS - 1], sums[-1], sums[MOST_BINS] = low, high, low, high
    return sums


@dataclass
class Stand:
    """Sites that all move halfway to a target, and whose model's figure is how near it is."""

    scale: int = 20
    asked: list[Question] = field(default_factory=list)
    looks: Callable[[int], float] = lambda _: 0.5
    best_rate: float = 1.0  # without privacy

    def ask(self, questions: Sequence[Question], vector: NDArray[np.float32]) -> list[NDArray[Any]]:
        self.asked += questions
        return [self._one(question, vector) for question in questions]

    def _one(self, question: Question, vector: NDArray[np.float32]) -> NDArray[Any]:
        change = 0.5 * (TARGET - vector)
        match question.head["ask"]:
            case "round" if question.form is np.int64:
                return np.rint(change * 2.0**self.scale).astype(np.int64)
            case "round":
                return (vector + change).astype(np.float32)
            case "without privacy":
                if question.head["rate"] > 100 * self.best_rate:
                    raise DivergedTrainingError("the training diverged")
                nearness = 1 / (1 + abs(math.log10(question.head["rate"] / self.best_rate)))
                return (vector + nearness * change).astype(np.float32)
            case "look":
                done = sum(one.head["ask"] == "look" for one in self.asked) // len(SITES)
                small = np.zeros(20)
                right = self.looks(done)
                small[0], small[9], small[19], small[10] = (
                    400 * right,
                    400 * (1 - right),
                    400 * right,
                    400 * (1 - right),
                )
                return (small / len(SITES)).astype(np.float32)
            case _:
                right = max(0.0, 1 - float(np.abs(TARGET - vector).mean()) / (2 * TARGET))
                return sums_of(right) if question.head["share"] == 0 else sums_of(0.5, 0)


def simulation(stand: Stand, oddities: Oddities = Oddities()) -> tuple[Simulation, list[Trained]]:  # noqa: B008 - frozen
    kept: list[Trained] = []
    return Simulation(stand, 2, oddities, {}, kept.append, lambda _: None), kept


@pytest.mark.parametrize("job", [plain(looks=()), masked()], ids=["plain", "masked"])
def test_rounds_are_aggregated_as_the_run_would(job: Job) -> None:
    made, kept = simulation(Stand())
    found = made.together(PricedJob.of(job, POLICY), 0)
    assert (found.arm, found.figure, found.failed) == (TOGETHER, "accuracy", "")
    assert np.allclose(found.rounds, [0.5, 0.75, 0.875, 0.9375], atol=2e-3)  # halfway each time
    assert (found.chosen, found.value) == (3, found.rounds[3])
    assert kept == [found]
    assert made.together(PricedJob.of(job, POLICY), 0) is found
    assert len(kept) == 1, "what is kept is not trained again"


def test_the_model_is_the_one_that_looked_best_to_the_noisy_looks_alone() -> None:
    stand = Stand(looks=lambda number: {1: 0.6, 2: 0.95, 3: 0.7}[number])
    made, _ = simulation(stand)
    found = made.together(PricedJob.of(plain(), POLICY), 0)
    assert found.chosen == 2, "although the third model is better: nobody can know that in a run"
    assert found.look["accuracy"]["low"] < found.look["accuracy"]["value"] < found.look["accuracy"]["high"]
    looks = [q for q in stand.asked if q.head["ask"] == "look"]
    assert len(looks) == 3 * len(SITES)
    assert found.value == found.rounds[found.chosen] != found.look["accuracy"]["value"]


def test_poisoned_and_absent_sites_act_on_the_aggregate_and_robust_strategies_withstand_them() -> None:
    by_mean, _ = simulation(Stand(), Oddities(poisoned=1))
    poisoned = by_mean.together(PricedJob.of(plain(looks=()), POLICY), 0)
    trimmed, _ = simulation(Stand(), Oddities(poisoned=1))
    job = plain('{"name":"trimmed-mean","trim":1}', ())
    assert poisoned.value < 0.5
    assert trimmed.together(PricedJob.of(job, POLICY), 0).value > 0.9
    away, _ = simulation(stand := Stand(), Oddities(away=2))
    assert away.together(PricedJob.of(plain(looks=()), POLICY), 0).value > 0.9
    assert {q.head["site"] for q in stand.asked if q.head["ask"] == "round"} == {"site-a", "site-b"}
    late, _ = simulation(Stand(), Oddities(away=3))
    with pytest.raises(SimulationError, match="--away: min_sites of the job is 2, and 1 sites answer"):
        late.together(PricedJob.of(plain(looks=()), POLICY), 0)


@pytest.mark.parametrize("best", [1e-3, 0.1, 10.0])
def test_the_rate_without_privacy_is_searched_beyond_the_first_ones_and_scores_are_not_made_twice(
    best: float,
) -> None:
    made, _ = simulation(stand := Stand(best_rate=best))
    scores: dict[float, float] = {}
    found = made.rate(plain(), scores.__setitem__, {})
    assert found == pytest.approx(best)
    parts = {q.head["part"] for q in stand.asked if q.head["ask"] == "exact"}
    assert parts == {"choosing"}, "no patient of the comparison chooses a rate"
    again, _ = simulation(other := Stand(best_rate=best))
    assert again.rate(plain(), scores.__setitem__, scores) == found
    assert other.asked == []


def test_with_fedprox_the_rate_without_privacy_stays_where_its_pull_does_not_overshoot() -> None:
    made, _ = simulation(Stand(best_rate=100.0))
    job = plain('{"mu":5.0,"name":"fedprox"}', proximal=5.0, learning_rate=0.1)
    found = made.rate(job, lambda *_: None, {})
    assert found * 5.0 <= 1.0


def test_a_training_that_diverges_is_told_and_kept() -> None:
    made, kept = simulation(Stand(best_rate=1e-6))
    found = made.without_privacy(plain(), 1.0, 0)
    assert (found.arm, found.failed, len(found.rounds)) == (OPEN, "the training diverged", 1)
    assert math.isnan(found.value)
    assert Trained.from_json(json.loads(json.dumps(kept[0].to_json()))).failed == "the training diverged"


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("job", [plain(), masked()], ids=["plain", "masked"])
def test_the_noise_is_what_the_ledger_charges_the_epsilon_for_together_and_alone(job: Job, epsilon: float) -> None:
    policy = dataclasses.replace(POLICY, epsilon=epsilon)
    opened = open_accounts("site-a", policy)[0]
    together = PricedJob.of(with_epsilon(job, epsilon), policy)
    single = together.alone("site-b", policy)
    assert (single.job.sites, single.job.mechanism, single.epsilon) == (("site-b",), "federated", together.epsilon)
    for one in (together, single):
        charged = epsilon_nano(one.job.claim(), float(opened.delta), opened.order)
        assert 0.98 * epsilon * 1e9 < charged <= epsilon * 1e9
    if job.secure:
        assert single.noise < together.noise * 2, "one noise on the sum is not four"
    else:
        assert single.noise == together.noise


def test_a_price_that_no_site_could_hold_is_told_beside_the_result() -> None:
    assert "level" in PricedJob.of(masked(), POLICY).refusal
    assert PricedJob.of(plain(), dataclasses.replace(POLICY, epsilon=1.0)).refusal
    with pytest.raises(JobError, match="no noise keeps it under epsilon 1"):
        PricedJob.of(with_epsilon(plain(), 1.0), POLICY)  # an account that was opened for 8


@pytest.mark.parametrize("sites", [3, 40])
def test_virtual_sites_take_the_place_of_the_jobs_with_the_same_share_of_them_needed(sites: int) -> None:
    job = with_sites(plain(), sites)
    assert (len(job.sites), job.min_sites) == (sites, math.ceil(sites / 2))
    secret = with_sites(masked(), sites)
    assert (json.loads(secret.config)["sites"], secret.claim().sites) == (sites, sites)  # type: ignore[union-attr]


def test_alone_and_together_are_kept_apart(tmp_path: Any) -> None:
    made, kept = simulation(Stand())
    priced = PricedJob.of(plain(looks=()), POLICY)
    made.together(priced, 0)
    made.alone(priced.alone("site-a", POLICY), "site-a", 0)
    made.alone(priced.alone("site-b", POLICY), "site-b", 1)
    assert [one.key for one in kept] == [
        (TOGETHER, priced.epsilon, 0, "", priced.noise),
        (ALONE, priced.epsilon, 0, "site-a", priced.noise),
        (ALONE, priced.epsilon, 1, "site-b", priced.noise),
    ]


def test_exact_sums_have_the_figure_of_the_counts() -> None:
    from policies.tasks.evaluation import SumLayout

    found = estimates(LookSums(SumLayout("classification", 2, MOST_BINS), sums_of(0.8), 1e-6), 0.01)[0]
    assert (found.name, found.value) == ("accuracy", pytest.approx(0.8))
