"""A federated run as a job: its configuration, its forecast for each site, and the launch decision. Pure.

All problems of a job are reported at once. Its claim is computed from the mechanism's public configuration alone
(price first), since the coordinator has neither the mechanism nor torch; a test checks that both sides compute the
same claim. The forecast runs the real reservation's review on a draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

from coordinator.federation.aggregation import (
    Advancing,
    FedAvg,
    FedProx,
    Krum,
    Strategy,
    StrategyError,
    strategy_from,
)
from policies.accounting.claims import (
    Claim,
    DistributedGaussian,
    Evaluated,
    Stepwise,
    SubsampledGaussian,
    UnsupportedClaimError,
)
from policies.accounting.rdp import NANO, cost, epsilon_nano, least_noise
from policies.review.policy import Policy
from policies.review.rules import TERMS, AccountContext, remaining, review_reservation
from policies.statements import ID, Reservation
from policies.tasks.bounds import TaskError
from policies.tasks.evaluation import USUAL_BINS, EvaluationError, EvaluationPlan, SumLattice, SumLayout, plan_from
from policies.tasks.task import MOST_PARAMETERS, WRITE_A_TASK, Task, Training, task_from_table
from protos.artifacts.bfloat16 import BFLOAT16, FLOAT32, PRECISIONS
from protos.common.canonical_json import canonical, json_object
from protos.common.errors import ConfigError
from protos.federation import round_times

FEDAVG: Final = '{"name":"fedavg"}'
PLAIN: Final = "federated"
MASKED: Final = "federated-masked"
APPROVAL_DAYS: Final = 14  # where a job names none
MOST_APPROVAL_DAYS: Final = 180
PRECISION: Final = "update_precision"  # of the numbers of an update in clear; an earlier job has none
_SHARED: Final[Mapping[str, type]] = {"task": dict, "parameters": int, "noise_multiplier": float}
# The keys of each mechanism's public configuration, and their types in JSON.
KEYS: Final[Mapping[str, Mapping[str, type]]] = MappingProxyType(
    {
        PLAIN: {**_SHARED, PRECISION: str},
        MASKED: {**_SHARED, "sites": int, "honest": int, "value_bound": float, "scale": int, "ring_bits": int},
    }
)
_KIND: Final[Mapping[type, str]] = {  # JSON tells 4 from 4.0, and so do the bytes that sites sign
    float: "a number with a point, such as 4.0",
    int: "a whole number without a point, such as 4",
    dict: "a JSON object; in a job file, the name of a task file",
}
_OTHER: Final = "of the wrong type"
EPSILON: Final = "epsilon"  # in the place of noise_multiplier: the price of the run, for which the noise is found
MOST_EPSILON: Final = 100.0


class JobError(ConfigError, ValueError):
    """The job cannot be run; the text says why."""


def _configuration(mechanism: str, text: str) -> dict[str, Any]:
    """The configuration's values: every key, none unknown or twice, every type exact; task and looks are read.

    Raises:
        JobError: anything else. The keys at fault are named, all at once.
    """
    if mechanism not in KEYS:
        raise JobError(f"mechanism: one of {', '.join(KEYS)}")
    try:
        values = json_object(text)
    except ValueError:
        raise JobError("config: a JSON object of distinct keys and finite numbers") from None
    if "task" not in values and {"classes", "shape", "centre"} & values.keys():
        raise JobError(f"config: {WRITE_A_TASK}")
    plan = {"evaluate": values.pop("evaluate")} if "evaluate" in values else {}
    kinds = {key: kind for key, kind in KEYS[mechanism].items() if key != PRECISION or PRECISION in values}
    if EPSILON in values:
        kinds = {EPSILON: float, **{key: kind for key, kind in kinds.items() if key != "noise_multiplier"}}
    wrong = _at_fault(values, kinds)
    if type(values.get(PRECISION)) is str and values[PRECISION] not in PRECISIONS and mechanism == PLAIN:
        wrong.append(f"{PRECISION}: {' or '.join(PRECISIONS)}")
    if wrong:
        raise JobError("config: " + "; ".join(wrong))
    try:
        looks = plan_from(plan["evaluate"]) if plan else None
        return {**values, "task": task_from_table(values["task"]), "evaluate": looks}
    except TaskError as fault:
        raise JobError("; ".join(f"config: task: {problem}" for problem in fault.problems)) from None
    except EvaluationError as fault:
        raise JobError(f"config: {fault}") from None


def _at_fault(values: Mapping[str, Any], kinds: Mapping[str, type]) -> list[str]:
    """What is wrong with the keys, and with the types of their values."""
    wrong = [f"{key}: unknown or missing" for key in sorted(kinds.keys() ^ values.keys())]
    common = sorted(kinds.keys() & values.keys())
    wrong += [f"{key}: {_KIND.get(kinds[key], _OTHER)}" for key in common if type(values[key]) is not kinds[key]]
    return wrong


def _claim(mechanism: str, values: Mapping[str, Any]) -> Claim:
    training, plan = _training(mechanism, values), values["evaluate"]
    return plan.claim(training) if isinstance(plan, EvaluationPlan) else training


def _training(mechanism: str, values: Mapping[str, Any]) -> Stepwise:
    if "noise_multiplier" not in values:
        raise JobError("config: its noise is not found yet: `round plan` and `round launch` find it")
    constants, noise = values["task"].training, values["noise_multiplier"]
    try:
        if mechanism == MASKED:  # every round is one step
            return DistributedGaussian(
                constants.sampling_rate, noise, constants.rounds, values["sites"], values["honest"]
            )
        return SubsampledGaussian(constants.sampling_rate, noise, constants.steps_per_round * constants.rounds)
    except UnsupportedClaimError as fault:
        raise JobError(f"config: {fault}") from None


def claim_of(mechanism: str, config: str) -> Claim:
    """What the mechanism of this public configuration claims for all of its rounds.

    Raises:
        JobError: no such mechanism, not its configuration, or one that cannot be priced.
    """
    return _claim(mechanism, _configuration(mechanism, config))


@dataclass(frozen=True, slots=True)
class Job:
    """One federated run, as the operator launched it."""

    run: str  # name of the run
    mechanism: str  # federated, or federated-masked for secure aggregation
    config: str  # JSON of the mechanism's public configuration; an epsilon may stand in the noise multiplier's place
    parameters: int  # length of the flat model: what the task trains
    sites: tuple[str, ...]  # short names of the hospitals
    rounds: int  # of training
    min_sites: int  # of each round, and at the launch
    strategy: str = FEDAVG  # JSON, see coordinator.federation.aggregation
    all_or_none: bool = False  # False: a site that is refused is dropped, down to min_sites
    secure: bool = False  # the coordinator sees the sum alone
    evaluate: tuple[int, ...] = ()  # the rounds after which the model is looked at; rising, the last round among them
    round_seconds: int = round_times.DEFAULT_S  # how long a site may work on a round
    approval_days: int = APPROVAL_DAYS  # how long persons at the sites may take to approve the run
    required_sites: tuple[str, ...] = ()  # no round counts without all of them
    wait_seconds: int = 0  # how long a site that falls silent in a round is waited for; 0: see round_times.silence

    def __post_init__(self) -> None:
        """All problems at once."""
        wrong = [*self._wrong(), *self._wrong_config(), *self._wrong_strategy()]
        if wrong:
            raise JobError("the job needs " + "; ".join(wrong))

    def claim(self) -> Claim:
        """What each site's account is charged for, all rounds together.

        Raises:
            JobError: the job names an epsilon, and its noise is not found yet; see :func:`with_noise`.
        """
        return claim_of(self.mechanism, self.config)

    def task(self) -> Task:
        """What is trained."""
        task: Task = _configuration(self.mechanism, self.config)["task"]
        return task

    @property
    def priced(self) -> bool:
        """Whether its noise is settled."""
        return EPSILON not in json_object(self.config)

    @property
    def update_precision(self) -> str:
        """Of the numbers of an update in clear."""
        return str(json_object(self.config).get(PRECISION, FLOAT32))

    @property
    def config_for_sites(self) -> str:
        """The configuration as sites get it: agents of before there was a choice know float32, and no word for it."""
        values = json_object(self.config)
        if values.get(PRECISION) != FLOAT32:
            return self.config
        del values[PRECISION]
        return canonical(values).decode()

    @property
    def turns(self) -> int:
        """Rounds and looks together: each is a round of the ledger, in the order in which they are made."""
        return self.rounds + len(self.evaluate)

    @property
    def looks(self) -> dict[int, int]:
        """The turns in which the model is looked at, from 1, and the round that each comes after."""
        return {number + before + 1: number for before, number in enumerate(self.evaluate)}

    def layout(self) -> SumLayout:
        """The sums of a look.

        Raises:
            JobError: the configuration prices none.
            EvaluationError: there are none for so many outputs.
        """
        values = _configuration(self.mechanism, self.config)
        plan: EvaluationPlan | None = values["evaluate"]
        if plan is None:
            raise JobError("config: it prices no look")
        return SumLayout(values["task"].kind, values["task"].outputs, plan.bins)

    @property
    def look_bins(self) -> int:
        """Of the scores in a look; where none is priced, as many as are usual."""
        plan: EvaluationPlan | None = _configuration(self.mechanism, self.config)["evaluate"]
        return plan.bins if plan is not None else USUAL_BINS

    def look_noise(self, sites: int) -> float:
        """Standard deviation of the noise on the sum of so many sites' looks, each of which has its share."""
        claim = self.claim()
        assert isinstance(claim, Evaluated), "a look is priced"
        return claim.share * math.sqrt(sites)

    def look_lattice(self) -> SumLattice | None:
        """What the sums of a look are on where they are summed in secret; None: they are not.

        Raises:
            EvaluationError: there is none for such noise.
        """
        claim = self.claim()
        if not self.secure or not isinstance(claim, Evaluated):
            return None
        return SumLattice.of(claim, self.task().training.public_patients, self.layout().size)

    def aggregator(self) -> Strategy:
        """The strategy, read."""
        return strategy_from(self.strategy)

    def to_json(self) -> str:
        """Sorted keys, no spaces."""
        return canonical(asdict(self)).decode()

    def _wrong(self) -> Iterator[str]:
        rules = {
            "run: a short lower-case name that does not begin with release": bool(ID.fullmatch(self.run))
            and not self.run.startswith("release"),
            f"mechanism: one of {', '.join(KEYS)}": self.mechanism in KEYS,
            "parameters: 1 to 100 million": 0 < self.parameters <= MOST_PARAMETERS,
            "sites: at least one, each once, each a site's name": 0 < len(self.sites) == len(set(self.sites))
            and all(ID.fullmatch(site) for site in self.sites),
            "rounds: 1 to 10,000": 0 < self.rounds <= 10_000,
            "min_sites: 1 to the number of sites": 0 < self.min_sites <= len(self.sites),
            f"secure: true for {MASKED}, and for nothing else": self.secure is (self.mechanism == MASKED),
            f"round_seconds: {round_times.LEAST_S} to {round_times.MOST_S:,}, a minute to a day": round_times.LEAST_S
            <= self.round_seconds
            <= round_times.MOST_S,
            f"approval_days: 1 to {MOST_APPROVAL_DAYS}": 1 <= self.approval_days <= MOST_APPROVAL_DAYS,
            "required_sites: sites of the job, each once": len(set(self.required_sites)) == len(self.required_sites)
            and set(self.required_sites) <= set(self.sites),
            "wait_seconds: 0, or 60 to the seconds of a round": self.wait_seconds == 0
            or round_times.LEAST_S <= self.wait_seconds <= self.round_seconds,
        }
        return (name for name, right in rules.items() if not right)

    def _wrong_config(self) -> Iterator[str]:
        if self.mechanism not in KEYS:
            return
        try:
            values = _configuration(self.mechanism, self.config)
            if EPSILON not in values:
                _claim(self.mechanism, values)
            elif not 0.0 < values[EPSILON] <= MOST_EPSILON:
                yield f"config: epsilon: above 0, at most {MOST_EPSILON:g}"
        except JobError as fault:
            yield str(fault)
            return
        constants: Training = values["task"].training
        if not self.rounds <= constants.rounds:
            yield f"rounds: at most the {constants.rounds} that the task prices"
        if values["parameters"] != self.parameters:
            yield "parameters: those of the configuration"
        yield from self._wrong_looks(values["evaluate"])
        if self.mechanism != MASKED:
            return
        yield from self._wrong_masked(values, constants)

    def _wrong_masked(self, values: Mapping[str, Any], constants: Training) -> Iterator[str]:
        if constants.steps_per_round != 1:
            yield f"config: task: training.steps_per_round: 1 for {MASKED}"
        if values["sites"] != len(self.sites):
            yield f"sites: the {values['sites']} that the configuration names"
        needed = quorum(len(self.sites), values["honest"])
        if not (values["honest"] >= 2 and needed <= self.min_sites):
            yield f"min_sites: at least {max(needed, 3)}, so that the honest sites' noise is in every sum"

    def _wrong_looks(self, plan: EvaluationPlan | None) -> Iterator[str]:
        """What is wrong with the rounds after which the model is looked at."""
        whole = all(type(number) is int for number in self.evaluate)
        rising = whole and self.evaluate == tuple(sorted(set(self.evaluate)))
        if self.evaluate and plan is None:
            yield "config: evaluate, which prices the looks that the job asks for"
        elif plan is not None and not self.evaluate:
            yield "evaluate: the rounds after which the priced looks are made; or a configuration without evaluate"
        elif plan is not None and not (rising and self.evaluate[0] >= 1 and self.evaluate[-1] == self.rounds):
            yield f"evaluate: rising rounds from 1, the last of them {self.rounds}"
        elif plan is not None and not len(self.evaluate) <= plan.looks:
            yield f"evaluate: at most the {plan.looks} looks that the configuration prices"
        elif plan is not None:
            try:
                self.layout()
                if self.priced:  # else when its noise is found, and the job is checked again
                    self.look_lattice()
            except EvaluationError as fault:
                yield f"config: {fault}"

    def _wrong_strategy(self) -> Iterator[str]:
        try:
            strategy = self.aggregator()
        except StrategyError as fault:
            yield f"strategy: {fault}"
            return
        if not self.min_sites >= strategy.min_updates():
            yield f"min_sites: at least {strategy.min_updates()}, for the strategy {strategy.name}"
        if self.required_sites and isinstance(strategy, Krum):
            yield "required_sites: none with the strategy krum, which leaves updates out"
        weights = strategy.weights if isinstance(strategy, FedAvg) else None
        if weights is not None and weights.keys() != set(self.sites):
            yield "strategy: a weight for every site of the job, and no other"
        sums = isinstance(strategy, Advancing) and weights is None
        if self.mechanism == MASKED and not sums:
            yield "strategy: fedavg without weights, fedavgm, fedadam or fedyogi; the others need single updates"
        if isinstance(strategy, FedProx) and self.mechanism == PLAIN and self._proximal() != strategy.mu:
            yield "strategy: the mu of fedprox must be the task's training.proximal"

    def _proximal(self) -> float | None:
        try:
            return self.task().training.proximal
        except JobError:  # said by _wrong_config
            return None


def quorum(sites: int, honest: int) -> int:
    """How few survivors a secure sum may have: one corrupt site among them, Bonawitz et al. 2017, theorem 6.5."""
    return max((sites + 1) // 2 + 1, honest + 1)


_OF_EARLIER: Final = {"round_seconds": round_times.EARLIER_S, "approval_days": APPROVAL_DAYS}
_NONE_EARLIER: Final = {"evaluate": [], "required_sites": [], "wait_seconds": 0}  # keys that earlier jobs do not have
_TYPES: Final[Mapping[str, type]] = MappingProxyType(
    {"str": str, "int": int, "bool": bool, "tuple[str, ...]": list, "tuple[int, ...]": list}  # as JSON has them
)


def job_from(text: str) -> Job:
    """Read what :meth:`Job.to_json` wrote, strictly: every key, none unknown or twice, every type exact.

    A job of a version before jobs named their times has the times of then.

    Raises:
        JobError: anything else, or a job that makes no sense.
    """
    try:
        values = {**_NONE_EARLIER, **json_object(text)}
        if not values.keys() & _OF_EARLIER.keys():
            values = {**_OF_EARLIER, **values}
    except ValueError:
        raise JobError("the job is not a JSON object of distinct keys and finite numbers") from None
    wrong = _at_fault(values, {f.name: _TYPES[str(f.type)] for f in fields(Job)})
    for key in ("sites", "required_sites"):
        names = values.get(key)
        if type(names) is list and not all(type(site) is str for site in names):
            wrong.append(f"{key}: must be names")
    looks = values["evaluate"]
    if type(looks) is list and not all(type(number) is int for number in looks):
        wrong.append("evaluate: must be numbers of rounds")
    if wrong:
        raise JobError("the job has keys at fault: " + "; ".join(wrong))
    return Job(**{**values, **{key: tuple(values[key]) for key in ("sites", "evaluate", "required_sites")}})


@dataclass(frozen=True, slots=True)
class SiteCost:
    """The cost of a run for one site's account, before any site is asked."""

    site: str
    fits: bool
    epsilon: str  # of the run alone, at the account's delta and order, decimal text; "": cannot be told
    delta: str  # the account's
    amount: int  # nano-nats at the account's order that would be held
    left: int  # nano-nats that may still be held, under the policy of today; never negative
    left_epsilon: str  # the largest epsilon that one more run could have alone, decimal text
    reason: str  # why it does not fit; "" when it does


def with_precision(job: Job) -> Job:
    """The job with the precision of its updates in clear: bfloat16 where it names none."""
    values = json_object(job.config)
    if job.mechanism != PLAIN or PRECISION in values:
        return job
    return replace(job, config=canonical({**values, PRECISION: BFLOAT16}).decode())


def with_noise(job: Job, standings: Mapping[str, AccountContext]) -> Job:
    """The job with the least noise for which no site's account is charged more than the epsilon that it names.

    It also names the precision of its updates, see :func:`with_precision`. What the account is charged: the
    divergence at its fixed order, and its delta. Accounts of other orders or deltas want other noise; the job has the
    most of them. Noise and precision that the job names stay as they are.

    Args:
        standings: site -> what the ledger says of it; its account is the one of the mechanism's kind.
    Raises:
        JobError: no site has an account, or no noise is enough.
    """
    job = with_precision(job)
    if job.priced:
        return job
    values = json_object(job.config)
    epsilon = values.pop(EPSILON)
    opened = {s.account.opened for s in standings.values() if s.account is not None}
    accounts = {(float(one.delta), one.order) for one in opened}
    if not accounts:
        raise JobError("no site of the job has an account that could pay for it")

    def noisy(multiplier: float) -> str:
        return canonical({**values, "noise_multiplier": multiplier}).decode()

    try:
        found = least_noise(lambda multiplier: claim_of(job.mechanism, noisy(multiplier)), epsilon, accounts)
    except UnsupportedClaimError as fault:
        raise JobError(str(fault)) from None
    return replace(job, config=noisy(found))


def forecast(
    job: Job, standings: Mapping[str, AccountContext], policies: Mapping[str, Policy], claim: Claim
) -> list[SiteCost]:
    """What ``claim`` would cost each of the job's sites, in the job's order. Nothing is held.

    The modality is the site's to choose; the draft names one that its policy admits.

    Args:
        standings: site -> what the ledger says of it; its account is the one of the mechanism's kind.
        policies: site -> the policy that binds it, its own and the federation's together (``strictest``).
    """
    patients = job.task().training.public_patients
    return [_site_cost(job, site, standings.get(site), policies.get(site), (claim, patients)) for site in job.sites]


def _site_cost(
    job: Job, site: str, standing: AccountContext | None, policy: Policy | None, priced: tuple[Claim, int]
) -> SiteCost:
    claim, patients = priced
    if policy is None or standing is None or standing.account is None:
        lacks = "policy" if policy is None else "account of that kind"
        return SiteCost(site, False, "", "", 0, 0, "", f"the site has no {lacks}")
    draft = Reservation(
        grant="forecast",
        site=site,
        run=job.run,
        mechanism=job.mechanism,
        claim=claim,
        components=dict.fromkeys(sorted(TERMS[job.mechanism].components), "public"),
        modality=min(policy.modalities, default="OT"),
    )
    opened = standing.account.opened
    try:
        verdict = review_reservation(draft, standing, policy)
        left = max(0, remaining(standing.account, policy))
        epsilon = epsilon_nano(claim, float(opened.delta), opened.order)
        extra = epsilon - cost(claim, opened.order)  # from the order's divergence to (epsilon, delta)
        reasons = [finding.detail for finding in verdict.findings]
        if not float(opened.delta) * patients < 1:  # P1, as the site itself will check
            reasons.append("delta must be below 1 / patients, by the job's public bound")
    except (ValueError, ArithmeticError):
        return SiteCost(site, False, "", opened.delta, 0, 0, "", "the run cannot be priced in the site's account")
    if policy.approvals:
        roles = " and ".join(sorted(policy.approvals))
        reasons.append(f"{site}'s policy wants {roles} to approve each release, and a part in a run leaves by itself")
    fits = verdict.admitted and not reasons
    alone = left + extra if left else 0
    return SiteCost(
        site,
        fits,
        _decimal(epsilon),
        opened.delta,
        cost(claim, opened.order),
        left,
        _decimal(alone),
        "; ".join(reasons),
    )


def _decimal(nano: int) -> str:
    """Nano as decimal text, exact."""
    return f"{nano // NANO}.{nano % NANO:09d}"


@dataclass(frozen=True, slots=True)
class LaunchDecision:
    """Whether to launch, and with whom."""

    go: bool
    sites: tuple[str, ...]  # that take part, in the job's order; none when it is a no
    dropped: Mapping[str, str]  # site -> why it does not fit
    reason: str  # why not; "" when it is a go


def decide(job: Job, costs: Sequence[SiteCost]) -> LaunchDecision:
    """Go when all fit or, where sites may be dropped, when at least ``min_sites`` do. No forecast is no fit."""
    said: dict[str, list[SiteCost]] = {site: [] for site in job.sites}
    for one in costs:
        said.setdefault(one.site, []).append(one)
    fitting = tuple(s for s in job.sites if len(said[s]) == 1 and said[s][0].fits)
    dropped = {
        site: said[site][0].reason if len(said[site]) == 1 else "it has not one forecast"
        for site in job.sites
        if site not in fitting
    }
    reason = ""
    if job.all_or_none and dropped:
        reason = f"all sites must fit, and these do not: {', '.join(dropped)}"
    elif lacking := [site for site in job.required_sites if site in dropped]:
        reason = f"the job requires {', '.join(lacking)}"
    elif not len(fitting) >= job.min_sites:
        reason = f"{job.min_sites} sites are needed, and {len(fitting)} fit"
    return LaunchDecision(not reason, () if reason else fitting, MappingProxyType(dropped), reason)
