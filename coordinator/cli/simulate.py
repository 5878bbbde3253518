"""``round simulate``: how a job behaves with many virtual sites, before anybody is asked."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from coordinator.edges.home import BadCoordinator, Home
from coordinator.edges.remote import Add, read_job
from coordinator.plan import BadJob, Job
from policies.figures import epsilon_text
from protos import quiet

if TYPE_CHECKING:
    from coordinator.edges.simulate import Simulated
    from coordinator.edges.strategy import Progress

OUT = Console(highlight=False)


def _job(path: Path, rounds: int) -> Job:
    given = read_job(path)
    try:
        return Job(
            run="simulated",
            mechanism=given["mechanism"],
            config=json.dumps(given["config"]),
            parameters=given["parameters"],
            sites=tuple(given["sites"]),
            rounds=min(given["rounds"], rounds or given["rounds"]),
            min_sites=given["min_sites"],
            strategy=json.dumps(given["strategy"]),
            all_or_none=given["all_or_none"],
            secure=given["secure"],
        )
    except BadJob as fault:
        raise BadCoordinator(str(fault)) from None


def _simulate(arguments: argparse.Namespace) -> int:
    """Progress as it comes, and the whole at the end; exit 1 when the run failed. Nothing is asked of any site."""
    home = Home(arguments.home)
    job, policy = _job(arguments.job, arguments.rounds), home.policy_text()
    quiet.hush(home.root / "flower")
    # Flower reads its environment while it is imported
    from coordinator.edges.simulate import SimulationUnavailable, simulate  # noqa: PLC0415
    from coordinator.edges.virtual import Cast  # noqa: PLC0415

    try:
        players = Cast(arguments.sites, arguments.seed, arguments.poisoned, arguments.poor, arguments.away)
        shown = simulate(job, players, policy, _lines if arguments.json else _words, arguments.cpus)
    except (SimulationUnavailable, ValueError) as fault:  # BadJob too
        raise BadCoordinator(str(fault)) from None
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
        _priced(seen)


def _priced(seen: Progress) -> None:
    OUT.print(f"price: {len(seen.sites)} sites grant it{_counted('; declined by ', seen.refused)}", markup=False)


def _counted(before: str, refused: Any) -> str:
    """So many of each code; nothing where there are none."""
    codes = ", ".join(f"{n} ({code})" for code, n in sorted(Counter(refused.values()).items()))
    return before + codes if codes else ""


def _summary(shown: Simulated) -> str:
    last = f"accuracy {shown.rounds[-1].accuracy:.1%} on made patients after {len(shown.rounds)} round(s); "
    return (
        f"{shown.failed or 'finished'}: {shown.granted} of {shown.sites} sites granted it; "
        f"{last if shown.rounds else ''}{shown.updates} updates admitted; each site would spend epsilon "
        f"{epsilon_text(shown.epsilon)} at delta {shown.delta}; {shown.start_seconds} s to start, "
        f"{shown.price_seconds} s for the price"
    )


def add_command(rounds: Any, add: Add) -> None:
    """The parser; ``rounds`` is the group of `round`, ``add(group, name, act, text)`` makes one."""
    one = add(rounds, "simulate", _simulate, "try a job with many virtual sites on this machine; needs Ray")
    one.add_argument("job", type=Path, help="as for `round launch`; its sites are replaced by virtual ones")
    one.add_argument("--sites", type=int, default=200, help="how many")
    one.add_argument("--rounds", type=int, default=0, help="fewer than the job's")
    one.add_argument("--seed", type=int, default=0, help="of the made patients and of the noise")
    one.add_argument("--poisoned", type=int, default=0, help="sites that send ten times the opposite")
    one.add_argument("--poor", type=int, default=0, help="sites whose own policy leaves too little of a budget")
    one.add_argument("--away", type=int, default=0, help="sites that do not answer when asked to train")
    one.add_argument("--cpus", type=int, default=2, help="processors for the sites")
    one.add_argument("--json", action="store_true", help="one JSON object per line, the last one the whole")
