"""``round simulate``: simulate a job with many virtual sites, before any site is asked."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.cli.operator_client import read_job
from coordinator.cli.output import OUT
from coordinator.errors import CoordinatorConfigError
from coordinator.federation.job import Job, JobError
from coordinator.storage.directory import CoordinatorDirectory
from policies.accounting.rounding import epsilon_text
from protos.federation import flower_environment

if TYPE_CHECKING:
    from coordinator.federation.simulation import SimulationResult


def _job(path: Path, rounds: int) -> Job:
    given = read_job(path)
    fewer = min(given["rounds"], rounds or given["rounds"])
    try:
        looks = {*filter(fewer.__gt__, given["evaluate"]), fewer} if given["evaluate"] else ()  # priced, and not made
        more = {"sites": tuple(given["sites"]), "rounds": fewer, "evaluate": tuple(sorted(looks))}
        return Job(**{**given, "run": "simulated", **more})
    except JobError as fault:
        raise CoordinatorConfigError(str(fault)) from None


def run(arguments: argparse.Namespace) -> int:
    """Print progress as it arrives, and the result at the end; exit 1 if the run failed. No site is contacted."""
    home = CoordinatorDirectory(arguments.home)
    job, policy = _job(arguments.job, arguments.rounds), home.policy_text()
    flower_environment.configure_environment(home.root / "flower")
    # Flower reads its environment while it is imported
    from coordinator.federation.simulation import SimulationUnavailableError, simulate  # noqa: PLC0415
    from coordinator.federation.virtual_sites import Scenario  # noqa: PLC0415

    try:
        players = Scenario(arguments.sites, arguments.seed, arguments.poisoned, arguments.poor, arguments.away)
        shown = simulate(job, players, policy, _lines if arguments.json else _words, arguments.cpus)
    except (SimulationUnavailableError, ValueError) as fault:  # JobError too
        raise CoordinatorConfigError(str(fault)) from None
    if arguments.json:
        sys.stdout.write(json.dumps(shown.to_json()) + "\n")
    else:
        OUT.print(_summary(shown), markup=False)
    return 1 if shown.failed else 0


def _lines(seen: Any) -> None:
    if hasattr(seen, "accuracy"):
        line = {"state": "closed", **dataclasses.asdict(seen)}
    else:
        line = {
            "state": seen.stage,
            "round": seen.round_index + 1,
            "sites": len(seen.sites),
            "refused": dict(seen.refused),
        }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _words(seen: Any) -> None:
    if hasattr(seen, "accuracy"):
        line = f"round {seen.round}: {seen.used} sites in {seen.seconds:.1f} s, accuracy {seen.accuracy:.1%}"
        OUT.print(line + _counted("; without ", seen.refused), markup=False)
    elif seen.stage == "priced":
        declined = _counted("; declined by ", seen.refused)
        OUT.print(f"price: {len(seen.sites)} sites grant it{declined}", markup=False)


def _counted(before: str, refused: Any) -> str:
    """So many of each code; nothing where there are none."""
    codes = ", ".join(f"{n} ({code})" for code, n in sorted(Counter(refused.values()).items()))
    return before + codes if codes else ""


def _summary(shown: SimulationResult) -> str:
    last = f"accuracy {shown.rounds[-1].accuracy:.1%} on synthetic patients after {len(shown.rounds)} round(s); "
    return (
        f"{shown.failed or 'finished'}: {shown.granted} of {shown.sites} sites granted it; "
        f"{last if shown.rounds else ''}{shown.updates} updates admitted; each site would spend epsilon "
        f"{epsilon_text(shown.epsilon)} at delta {shown.delta}; {shown.start_seconds} s to start, "
        f"{shown.price_seconds} s for the price"
    )
