"""``round simulate``: what a run would come to on public data, beside single sites and beside no privacy."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from coordinator.cli.operator_client import read_job
from coordinator.cli.output import OUT
from coordinator.errors import CoordinatorConfigError
from coordinator.federation.evaluation import LESS_IS_BETTER
from coordinator.federation.job import Job, JobError, with_precision
from coordinator.federation.simulated_sites_process import SimulatedSitesProcesses, SimulationError
from coordinator.federation.simulation import (
    ALONE,
    OPEN,
    TOGETHER,
    Key,
    Oddities,
    PricedJob,
    Progress,
    Simulation,
    Trained,
    with_epsilon,
    with_sites,
)
from coordinator.storage.directory import CoordinatorDirectory
from policies.review.policy import Policy
from policies.review.policy import parse as parse_policy
from policies.tasks.evaluation import EvaluationError
from protos.common.canonical_json import canonical

_RESULTS: Final = "results.jsonl"
_SUMMARY: Final = "summary.json"
_PLOTS: Final = ("rounds.png", "epsilons.png")


@dataclass(slots=True, eq=False)
class _Results:
    """The file in which every finished training is a line, so that a simulation that was ended goes on."""

    path: Path
    kept: dict[Key, Trained] = field(default_factory=dict)
    rates: dict[float, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # file -> why

    @classmethod
    def open(cls, folder: Path, name: str) -> _Results:
        """Read what is there.

        Raises:
            CoordinatorConfigError: it is of another job or of other data.
        """
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder / _RESULTS)
        if not made.path.exists():
            made._append({"simulation": name})
            return made
        head, *lines = made.path.read_text().split("\n")[:-1] or [""]  # a line without an end was cut
        if head != json.dumps({"simulation": name}):
            raise CoordinatorConfigError(
                f"{folder.name}/{_RESULTS}: of another job, data or sizes: name another folder with --out"
            )
        for line in map(json.loads, lines):
            if "rate" in line:
                made.rates[line["rate"]] = -math.inf if line["score"] is None else line["score"]
            elif "left_out" in line:
                made.left_out |= line["left_out"]
            else:
                trained = Trained.from_json(line)
                made.kept[trained.key] = trained
        made.path.write_text("".join(f"{line}\n" for line in (head, *lines)))
        return made

    def keep(self, trained: Trained) -> None:
        """A finished training."""
        self._append(trained.to_json())

    def keep_rate(self, rate: float, score: float) -> None:
        """A learning rate that was tried without privacy; -inf where it diverged."""
        self.rates[rate] = score
        self._append({"rate": rate, "score": score if math.isfinite(score) else None})

    def keep_left_out(self, found: dict[str, str]) -> dict[str, int]:
        """Images that were not used; how many there are of each reason, with those of before."""
        if found.keys() - self.left_out.keys():
            self._append({"left_out": found})
        self.left_out |= found
        return dict(sorted(Counter(self.left_out.values()).items()))

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run(arguments: argparse.Namespace) -> int:
    """Print progress as it comes, and the table at the end; exit 1 if a training failed. No site is contacted."""
    policy = parse_policy(CoordinatorDirectory(arguments.home).policy_text(), "federation")
    say = _lines if arguments.json else _words
    try:
        given = with_precision(_job(arguments.job, arguments.rounds))
        job = with_sites(given, arguments.sites) if arguments.sites else given
        if job.task().training.head != "shared":
            raise SimulationError("training.head: a head of each site's own is not simulated; simulate it as shared")
        prices = [PricedJob.of(*pair) for pair in _wanted(job, policy, _numbers(arguments.epsilons, "--epsilons"))]
        with SimulatedSitesProcesses(_cpus(arguments.cpus)) as processes:
            sizes = _sizes(job, arguments.patients)
            head = {
                "folder": str(arguments.data.absolute()),
                "task": job.task().to_json(),
                "weights": [str(path.absolute()) for path in arguments.weights],
                "sizes": sizes,
                "seeds": list(range(_seeds(arguments.seeds))),
            }
            opened = processes.open(head)
            if job.parameters != opened["parameters"]:
                raise SimulationError(f"parameters: the task's network trains {opened['parameters']}")
            odd = Oddities(arguments.poisoned, arguments.away)
            results = _Results.open(arguments.out, _digest(job, opened["digest"], sizes, asdict(odd)))
            made = Simulation(processes, processes.count, odd, results.kept, results.keep, say)
            found, rate = _all(made, prices, policy, arguments, results)
            left_out = results.keep_left_out(processes.left_out())
    except (JobError, SimulationError, EvaluationError) as fault:
        raise CoordinatorConfigError(str(fault)) from None
    summary = summarise(prices, found, rate, less_is_better=job.task().kind in LESS_IS_BETTER) | {
        "source": opened["source"],
        "patients": opened["spare"],
        "left_out": left_out,
    }
    (arguments.out / _SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    _plots(found, arguments.out, len(prices))
    if arguments.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        OUT.print("\n".join(_told(summary, arguments.out)), markup=False, soft_wrap=True)
    return 1 if any(one.failed for one in found) else 0


def _all(
    made: Simulation, prices: Sequence[PricedJob], policy: Policy, arguments: argparse.Namespace, results: _Results
) -> tuple[list[Trained], float]:
    """Every training, the run itself first: whoever ends the command early has that."""
    found = list[Trained]()
    job = prices[0].job
    seeds = range(arguments.seeds)
    singles = job.sites[: max(arguments.alone, 0)]
    found += [made.together(priced, seed) for seed in seeds for priced in prices]
    rate = made.rate(job, results.keep_rate, results.rates)
    found += [made.without_privacy(job, rate, seed) for seed in seeds]
    for priced in prices:
        found += [made.alone(priced.alone(site, policy), site, seed) for seed in seeds for site in singles]
    return found, rate


# -- what was typed


def _job(path: Path, rounds: int) -> Job:
    given = read_job(path)
    fewer = min(given["rounds"], rounds or given["rounds"])
    try:
        looks = {*filter(fewer.__gt__, given["evaluate"]), fewer} if given["evaluate"] else ()  # priced, and not made
        more = {"sites": tuple(given["sites"]), "rounds": fewer, "evaluate": tuple(sorted(looks))}
        return Job(**{**given, "run": "simulated", **more})
    except JobError as fault:
        raise CoordinatorConfigError(str(fault)) from None


def _wanted(job: Job, policy: Policy, epsilons: Sequence[float]) -> Iterable[tuple[Job, Policy]]:
    """The job at each price, and the policy under which an account pays it: of a price that is asked for, its own."""
    if not epsilons:
        yield job, policy
    for epsilon in epsilons:
        yield with_epsilon(job, epsilon), replace(policy, epsilon=epsilon)


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")] if text else []
    except ValueError:
        raise SimulationError(f"{option}: numbers with commas between, such as 1,3,8") from None


def _sizes(job: Job, text: str) -> dict[str, int]:
    """Site -> its patients: those that are typed, one number for all or one for each; else the task's bound."""
    bound = job.task().training.public_patients
    given = [int(number) for number in _numbers(text, "--patients")] or [bound]
    each = given * len(job.sites) if len(given) == 1 else given
    if len(each) != len(job.sites) or not all(1 <= number <= bound for number in each):
        raise SimulationError(
            f"--patients: one number, or one for each of the {len(job.sites)} sites, from 1 to the task's "
            f"public_patients, {bound}"
        )
    return dict(zip(job.sites, each, strict=True))


def _seeds(number: int) -> int:
    if not 1 <= number <= 100:
        raise SimulationError("--seeds: 1 to 100")
    return number


def _cpus(number: int) -> int:
    if not 1 <= number <= 256:
        raise SimulationError("--cpus: 1 to 256")
    return number


def _digest(job: Job, data: str, sizes: dict[str, int], odd: dict[str, int]) -> str:
    """What results are of: prices and seeds may be added to them; a price's noise is in its trainings' keys."""
    told = json.loads(job.to_json())
    told["config"] = {k: v for k, v in json.loads(job.config).items() if k not in ("epsilon", "noise_multiplier")}
    return hashlib.sha256(canonical({"job": told, "data": data, "sizes": sizes, "odd": odd})).hexdigest()


# -- what is told


def summarise(
    prices: Sequence[PricedJob], found: Sequence[Trained], rate: float, *, less_is_better: bool
) -> dict[str, Any]:
    """Means over the seeds with standard errors, as JSON values; null where nothing was finished."""

    def of(arm: str, epsilon: str = "") -> list[Trained]:
        return [t for t in found if (t.arm, t.epsilon) == (arm, epsilon)]

    rows = [
        {
            "epsilon": priced.epsilon,
            "delta": priced.delta,
            "noise_multiplier": priced.noise,
            "refused": priced.refusal,
            TOGETHER: _mean(_by_seed(of(TOGETHER, priced.epsilon), statistics.fmean)),
            ALONE: _mean(_by_seed(of(ALONE, priced.epsilon), statistics.fmean)),
            "best alone": _mean(_by_seed(of(ALONE, priced.epsilon), min if less_is_better else max)),
        }
        for priced in prices
    ]
    return {
        "figure": next((t.figure for t in found if t.figure), ""),
        "before": _mean([t.rounds[0] for t in of(OPEN) if t.rounds]),
        "prices": rows,
        OPEN: {**_mean(_by_seed(of(OPEN), statistics.fmean)), "learning_rate": rate},
        "failed": [f"{t.arm} {t.epsilon} seed {t.seed} {t.site}: {t.failed}" for t in found if t.failed],
    }


def _by_seed(found: Sequence[Trained], together: Callable[[list[float]], float]) -> list[float]:
    """One number for each seed, of its sites."""
    whole = [t for t in found if not t.failed]
    return [together([t.value for t in whole if t.seed == seed]) for seed in sorted({t.seed for t in whole})]


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard error, which one seed alone does not have."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {
        "mean": round(statistics.fmean(values), 4) if values else None,
        "error": None if error is None else round(error, 4),
    }


def _cell(told: dict[str, float | None]) -> str:
    if told["mean"] is None:
        return "-"
    return f"{told['mean']:.3f}" + ("" if told["error"] is None else f" ± {told['error']:.3f}")


def _told(summary: dict[str, Any], out: Path) -> Iterable[str]:
    test, choosing = summary["patients"]["test"], summary["patients"]["choosing"]
    yield f"{summary['figure']} on {test} patients whom nobody trains on; mean over seeds ± standard error"
    yield f"{'':22}{'together':>18}{'each site alone':>18}{'best site alone':>18}"
    for row in summary["prices"]:
        cells = (_cell(row[name]) for name in (TOGETHER, ALONE, "best alone"))
        yield f"{'epsilon ' + row['epsilon']:22}" + "".join(f"{cell:>18}" for cell in cells)
    yield f"{'without privacy':22}{_cell(summary[OPEN]):>18}"
    yield f"{'before training':22}{_cell(summary['before']):>18}"
    for row in summary["prices"]:
        yield f"epsilon {row['epsilon']}: delta {row['delta']}, noise multiplier {row['noise_multiplier']:g}"
        if row["refused"]:
            yield f"  a site under this policy would refuse it: {row['refused']}"
    rate = f"{summary[OPEN]['learning_rate']:.3g}"
    yield f"without privacy: the same steps without clipping and noise; learning rate {rate}, by {choosing} others"
    yield from (f"failed: {line}" for line in summary["failed"])
    yield f"data: {summary['source']}"
    yield from (f"  {count} image(s) left out: {why}" for why, count in summary["left_out"].items())
    yield f"written: {', '.join(str(out / name) for name in (_RESULTS, _SUMMARY, *_PLOTS) if (out / name).exists())}"


def _plots(found: Sequence[Trained], out: Path, prices: int) -> None:
    from coordinator.reports.simulation_plots import plot_epsilons, plot_rounds  # noqa: PLC0415 - of the agent's extra

    plot_rounds(found, out / _PLOTS[0])
    if prices > 1:
        plot_epsilons(found, out / _PLOTS[1])


def _lines(seen: Progress) -> None:
    sys.stdout.write(json.dumps({"state": "closed", **asdict(seen)}) + "\n")
    sys.stdout.flush()


def _words(seen: Progress) -> None:
    price = f" epsilon {seen.epsilon}" if seen.epsilon else ""
    who = f" {seen.site}" if seen.site else ""
    line = f"{seen.arm}{who}{price}, seed {seen.seed}: round {seen.round} of {seen.rounds}, {seen.figure}"
    OUT.print(f"{line} {seen.value:.3f}", markup=False, soft_wrap=True)
