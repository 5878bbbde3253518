"""Simulate a run before anybody spends: its own task, noise, rounds and strategy, at sites that lie on this machine.

Three trainings stand side by side. *Together*: what the run would do, by the agents' own code, with the noise that a
ledger would charge as the job's epsilon. *Alone*: single sites at the same epsilon. *Without privacy*: the same steps
without clipping and noise, whose learning rate is the best of some on patients whom no other figure is about. All are
compared by the exact figure of patients whom nobody trains on; which round counts is chosen as in the run, by its
noisy looks. Nothing here is reviewed or accounted: the images are public (``agent.federation.public_folder``).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.federation.aggregation import Advancing, FedAvg, Moments, NoAggregateError
from coordinator.federation.evaluation import LESS_IS_BETTER, LookSums, best, estimates, to_table
from coordinator.federation.job import EPSILON, MASKED, PLAIN, PRECISION, Job, JobError, forecast, quorum, with_noise
from coordinator.federation.simulated_sites_process import DivergedTrainingError, Question, SimulationError
from policies.accounting.rounding import epsilon_text
from policies.ledger.state import Account
from policies.ledger_service import open_accounts
from policies.review.policy import Policy
from policies.review.rules import AccountContext
from policies.tasks.evaluation import MOST_BINS, SumLayout
from protos.common.canonical_json import canonical

TOGETHER: Final = "together"
ALONE: Final = "alone"
OPEN: Final = "without privacy"
CHOOSING: Final = "choosing"  # the parts of the patients whom no site has, as agent.federation.simulated_sites says
TEST: Final = "test"
_POISON: Final = -10.0  # times what honest training would have changed
_RATES: Final = (-3, -2, -1)  # of OPEN, in half decades: the first ones that are tried
_RATE_ENDS: Final = (-8, 4)  # how far the search goes while the best is at an edge
_NOTHING: Final = 1e-6  # noise on exact sums
_NARROW: Final = 0.01  # level of their intervals, which nobody shows

Vector = NDArray[np.float32]


class Sites(Protocol):
    """What answers for the simulated sites."""

    def ask(self, questions: Sequence[Question], vector: Vector) -> list[NDArray[Any]]:
        """The numbers that answer each question."""
        ...


@dataclass(frozen=True, slots=True)
class PricedJob:
    """A job whose noise is settled, and what the ledger would charge each site for it."""

    job: Job
    epsilon: str  # decimal text; also the name of the price
    charged: float  # the same, as the ledger has it
    delta: str
    noise: float  # multiplier of one step
    refusal: str  # why a site under this policy would not hold it; "" when it would

    @classmethod
    def of(cls, job: Job, policy: Policy) -> PricedJob:
        """By an account that is opened under a policy.

        Raises:
            JobError: no noise is enough.
        """
        standing = AccountContext(Account(open_accounts(job.sites[0], policy)[0]))
        settled = with_noise(job, {job.sites[0]: standing})
        cost = forecast(settled, {job.sites[0]: standing}, {job.sites[0]: policy}, settled.claim())[0]
        if not cost.epsilon:
            raise JobError(f"config: {cost.reason}")
        noise = json.loads(settled.config)["noise_multiplier"]
        return cls(settled, epsilon_text(cost.epsilon), float(cost.epsilon), cost.delta, noise, cost.reason)

    def alone(self, site: str, policy: Policy) -> PricedJob:
        """What one site would train by itself at this price: the same task, without a secret sum.

        Raises:
            JobError: it cannot be had.
        """
        job = _alone(self.job, site)
        if not self.job.secure:  # the same noise at the same price
            return dataclasses.replace(self, job=job)
        found = PricedJob.of(with_epsilon(job, self.charged), policy)
        return dataclasses.replace(found, epsilon=self.epsilon)


def with_epsilon(job: Job, epsilon: float) -> Job:
    """The same job at another price, whose noise is yet to be found."""
    values = {key: value for key, value in json.loads(job.config).items() if key != "noise_multiplier"}
    return dataclasses.replace(job, config=canonical({**values, EPSILON: epsilon}).decode())


def with_sites(job: Job, sites: int) -> Job:
    """The same job for so many sites of other names, with the same share of them needed.

    Raises:
        JobError: it cannot be had, such as one whose strategy has a weight for each site.
    """
    names = tuple(f"virtual-{index:04d}" for index in range(sites))
    least = min(sites, math.ceil(sites * job.min_sites / len(job.sites)))
    values = json.loads(job.config)
    if job.mechanism == MASKED:
        values["sites"], least = sites, max(least, quorum(sites, values["honest"]))
    return dataclasses.replace(job, sites=names, min_sites=least, config=canonical(values).decode())


def _alone(job: Job, site: str) -> Job:
    """Of the strategies, those with a momentum of their own stay."""
    strategy = job.aggregator()
    kept = isinstance(strategy, Advancing) and not isinstance(strategy, FedAvg)
    wanted = {"task", "parameters", "noise_multiplier", EPSILON, "evaluate", PRECISION}
    values = {key: value for key, value in json.loads(job.config).items() if key in wanted}
    return dataclasses.replace(
        job,
        mechanism=PLAIN,
        secure=False,
        sites=(site,),
        min_sites=1,
        strategy=job.strategy if kept else FedAvg().to_json(),
        config=canonical(values).decode(),
    )


Key = tuple[str, str, int, str, float]  # arm, epsilon, seed, site, noise


@dataclass(frozen=True, slots=True)
class Trained:
    """One training from its first round to its last."""

    arm: str  # TOGETHER, ALONE, OPEN
    epsilon: str  # "" without privacy
    seed: int
    site: str  # of ALONE
    figure: str  # which one is compared: accuracy, auc, dice, error
    rounds: tuple[float, ...]  # the figure on the test patients, before the first round and after each
    chosen: int  # the round whose model the run would end with
    look: Mapping[str, Any] = field(default_factory=dict)  # that round's own noisy figures, with intervals
    failed: str = ""  # why it ended early; the rounds are those before
    noise: float = 0.0  # multiplier of one step: one price may need another noise by another policy or version

    @property
    def key(self) -> Key:
        """Which of the simulation's trainings it is."""
        return self.arm, self.epsilon, self.seed, self.site, self.noise

    @property
    def value(self) -> float:
        """The figure of the model that the run would end with; NaN where there is none."""
        return math.nan if self.failed else self.rounds[self.chosen]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Trained:
        """Read what :meth:`to_json` wrote."""
        return cls(**{**values, "rounds": tuple(values["rounds"])})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """One closed round of one training."""

    arm: str
    epsilon: str
    seed: int
    site: str
    round: int
    rounds: int
    figure: str
    value: float


@dataclass(frozen=True, slots=True)
class Oddities:
    """How many sites are out of the ordinary, counted from the last one."""

    poisoned: int = 0  # send minus ten times their update
    away: int = 0  # do not answer

    def present(self, job: Job) -> tuple[str, ...]:
        """The sites that answer.

        Raises:
            SimulationError: too few of them.
        """
        if min(self.poisoned, self.away) < 0 or self.poisoned + self.away > len(job.sites):
            raise SimulationError("--poisoned, --away: not negative, and together at most the sites")
        there = job.sites[: len(job.sites) - self.away]
        if not len(there) >= job.min_sites:
            raise SimulationError(f"--away: min_sites of the job is {job.min_sites}, and {len(there)} sites answer")
        return there

    def sent(self, start: Vector, updates: Sequence[NDArray[Any]], secure: bool) -> list[NDArray[Any]]:
        """What the sites that are there send, of what honest training gave them."""
        honest = len(updates) - self.poisoned
        if secure:  # a change, on its lattice
            return [*updates[:honest], *(int(_POISON) * change for change in updates[honest:])]
        turned = ((start + _POISON * (update - start)).astype(np.float32) for update in updates[honest:])
        return [*updates[:honest], *turned]


@dataclass(slots=True, eq=False)
class Simulation:
    """All trainings of one simulation. What was kept is not trained again."""

    sites: Sites
    processes: int
    oddities: Oddities
    kept: dict[Key, Trained]
    keep: Callable[[Trained], None]  # durable before the next one
    tell: Callable[[Progress], None]

    def together(self, priced: PricedJob, seed: int) -> Trained:
        """The run itself."""
        return self._once(_Arm(priced.job, TOGETHER, seed, priced.epsilon))

    def alone(self, priced: PricedJob, site: str, seed: int) -> Trained:
        """One site by itself at the same epsilon; ``priced`` is :meth:`PricedJob.alone`."""
        return self._once(_Arm(priced.job, ALONE, seed, priced.epsilon, site))

    def without_privacy(self, job: Job, rate: float, seed: int) -> Trained:
        """The same steps without clipping and noise."""
        return self._once(_Arm(job, OPEN, seed, rate=rate))

    def rate(self, job: Job, keep: Callable[[float, float], None], kept: Mapping[float, float]) -> float:
        """The learning rate without privacy that is best on the patients to choose on.

        Neighbours half a decade apart are tried as long as the best one is at an edge.

        Args:
            job: of the run.
            keep: told each rate and its score.
            kept: scores that are known.
        Raises:
            SimulationError: every rate diverges.
        """
        sign = -1.0 if job.task().kind in LESS_IS_BETTER else 1.0
        scores = dict(kept)

        def score(power: int) -> float:
            rate = 10.0 ** (power / 2)
            if rate not in scores:
                scores[rate] = self._scored(job, rate, sign)
                keep(rate, scores[rate])
            return scores[rate]

        proximal = job.task().training.proximal
        most = min(_RATE_ENDS[1], math.floor(-2 * math.log10(proximal)) if proximal else _RATE_ENDS[1])
        tried = sorted({min(power, most) for power in _RATES})
        while True:
            equal = [power for power in tried if score(power) == max(map(score, tried))]
            at = equal[len(equal) // 2]  # of equally good ones not the outermost, which on other patients may be none
            if at == tried[0] and at > _RATE_ENDS[0]:
                tried.insert(0, at - 1)
            elif at == tried[-1] and at < most:
                tried.append(at + 1)
            elif not math.isfinite(score(at)):
                raise SimulationError("without privacy every learning rate diverges: the task cannot be learned so")
            else:
                return float(10.0 ** (at / 2))

    def _scored(self, job: Job, rate: float, sign: float) -> float:
        arm = _Arm(job, OPEN, 0, rate=rate)
        try:
            for _, model in self._rounds(arm):
                vector = model
        except DivergedTrainingError:
            return -math.inf
        return sign * self._figure(job, vector, (CHOOSING, 0))[1]

    def _once(self, arm: _Arm) -> Trained:
        key = arm.name, arm.epsilon, arm.seed, arm.site, arm.noise
        if key not in self.kept:
            self.kept[key] = self._trained(arm)
            self.keep(self.kept[key])
        return self.kept[key]

    def _trained(self, arm: _Arm) -> Trained:
        job, figures, looks = arm.job, list[float](), dict[int, LookSums]()
        figure, failed = "", ""
        try:
            for number, vector in self._rounds(arm):
                figure, value = self._figure(job, vector, (TEST, arm.seed))
                figures.append(value)
                self.tell(Progress(arm.name, arm.epsilon, arm.seed, arm.site, number, job.rounds, figure, value))
                if number in job.evaluate and arm.name != OPEN:
                    looks[number] = self._look(arm, vector)
        except DivergedTrainingError as fault:
            failed = str(fault)
        except NoAggregateError as fault:
            failed = f"round {len(figures)}: {fault}"
        chosen, look = len(figures) - 1, {}
        if looks and not failed:
            at, _ = best(list(looks.values()))
            chosen = list(looks)[at]
            look = to_table(estimates(looks[chosen]))
        of = arm.name, arm.epsilon, arm.seed, arm.site
        return Trained(*of, figure, tuple(figures), chosen, look, failed, arm.noise)

    def _rounds(self, arm: _Arm) -> Iterator[tuple[int, Vector]]:
        """The number of each round, 0 before the first, and the model after it.

        Raises:
            DivergedTrainingError, NoAggregateError: the training ends here.
        """
        job, aggregator, moments = arm.job, arm.job.aggregator(), Moments()
        there = self.oddities.present(job) if arm.name == TOGETHER else job.sites
        secure = job.secure and arm.name != OPEN
        scale = json.loads(job.config)["scale"] if secure else 0
        vector: Vector = np.zeros(job.parameters, np.float32)
        yield 0, vector
        for number in range(1, job.rounds + 1):
            made = self.sites.ask([arm.round(site, secure) for site in there], vector)
            if arm.name == TOGETHER:
                made = self.oddities.sent(vector, made, secure)
            if secure:
                assert isinstance(aggregator, Advancing), "the job was checked"
                delta = np.sum(made, axis=0).astype(np.float64) * 2.0**-scale / len(made)
                vector, moments = aggregator.advance(vector, delta, moments)
            else:
                vector, moments, _ = aggregator.step(vector, list(zip(there, made, strict=True)), moments)
            yield number, vector

    def _look(self, arm: _Arm, vector: Vector) -> LookSums:
        """The noisy sums of the sites' own held-out patients, as in the run."""
        job = arm.job
        there = self.oddities.present(job) if arm.name == TOGETHER else job.sites
        found = self.sites.ask([arm.look(site) for site in there], vector)
        lattice = job.look_lattice()
        total = np.sum([one.astype(np.float64) for one in found], axis=0)
        if lattice is not None:
            total = total * 2.0**-lattice.scale
        return LookSums(job.layout(), total, job.look_noise(len(there)))

    def _figure(self, job: Job, vector: Vector, part: tuple[str, int]) -> tuple[str, float]:
        """The first figure of a model, exact, on patients whom no site has."""
        name, seed = part
        head = {"ask": "exact", "config": job.config, "part": name, "seed": seed, "shares": self.processes}
        asked = [Question({**head, "share": share}, np.float64) for share in range(self.processes)]
        sums = np.sum(self.sites.ask(asked, vector), axis=0)
        task = job.task()
        first = estimates(LookSums(SumLayout(task.kind, task.outputs, MOST_BINS), sums, _NOTHING), _NARROW)[0]
        if first.value is None:
            raise SimulationError(f"{first.name}: those to test on lack a class or a finding: give more patients")
        return first.name, first.value


@dataclass(frozen=True, slots=True)
class _Arm:
    """One training, and what it asks of a site."""

    job: Job
    name: str
    seed: int
    epsilon: str = ""
    site: str = ""
    rate: float = 0.0

    @property
    def noise(self) -> float:
        """Multiplier of one step; 0 without privacy."""
        return 0.0 if self.name == OPEN else float(json.loads(self.job.config)["noise_multiplier"])

    def round(self, site: str, secure: bool) -> Question:
        head = {"config": self.job.config, "site": site, "seed": self.seed}
        if self.name == OPEN:
            return Question({**head, "ask": OPEN, "rate": self.rate}, np.float32)
        return Question({**head, "ask": "round"}, np.int64 if secure else np.float32)

    def look(self, site: str) -> Question:
        head = {"config": self.job.config, "site": site, "seed": self.seed, "ask": "look"}
        return Question(head, np.int64 if self.job.secure else np.float32)
