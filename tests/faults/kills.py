"""kill -9 of any process at random moments of a run, over and over on one federation, and what its books say."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.demo.scene import SITES
from tests.faults.audit import Auditor
from tests.faults.stage import CHILD, CLOSE_S, COORDINATOR, OPERATOR, ROUNDS, Hangs, Launched, Stage
from tests.support.tcp_proxy import wait_until

VICTIMS = (COORDINATOR, *SITES, *(f"{CHILD} of {name}" for name in (COORDINATOR, *SITES)), OPERATOR)
PER_STAGE = 9  # runs on one copy of the federation: its crashes add up, as they do in life
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill and what became of the run."""

    number: int
    victim: str
    moment: float  # of the run: 0 its start, 1 the end of an undisturbed one
    seconds: float  # after the start
    at: str  # the last event that the operator had printed before the kill; it lags behind the coordinator
    hit: bool  # there was such a process, and the run had not ended
    state: str  # finished | failed | stopped | hangs
    reason: str
    rounds: int  # that were closed
    wall_s: float
    faults: tuple[str, ...]

    def line(self) -> str:
        """For people."""
        end = f"{self.state}{f' ({self.reason})' if self.reason else ''}, {self.rounds} rounds, {self.wall_s:.0f} s"
        wrong = f"  FAULT: {'; '.join(self.faults)}" if self.faults else ""
        when = f"{self.moment:4.2f} ({self.seconds:5.2f} s) {self.at if self.hit else 'MISSED':<16}"
        return f"{self.number:>3}  {self.victim:<20} {when} {end}{wrong}"


@dataclass(slots=True)
class Trials:
    """Trials on copies of one federation."""

    enrolled: Path
    folder: Path
    rng: random.Random
    say: Say
    done: list[Trial] = field(default_factory=list)
    victims: tuple[str, ...] = VICTIMS  # in turn
    undisturbed_s: float = 0.0  # how long a run takes; 0: measured on each stage

    def run(self, kills: int) -> list[Trial]:
        """So many trials."""
        while len(self.done) < kills:
            with Stage.copied(self.enrolled, self.folder / f"stage-{len(self.done)}") as stage:
                stage.start_all()
                self._on(stage, min(kills, len(self.done) + PER_STAGE))
        return self.done

    def _on(self, stage: Stage, until: int) -> None:
        """Trials on one stage, which is left when something does not hold there."""
        auditor = Auditor()
        length = self.undisturbed_s
        if not length:
            _undisturbed(stage, "warm")  # the first one loads what the others need not
            length = _undisturbed(stage, "undisturbed")
            self.say(f"an undisturbed run takes {length:.1f} s")
        while len(self.done) < until:
            number = len(self.done)
            victim, moment = self.victims[number % len(self.victims)], self.rng.random()
            trial = _trial(stage, auditor, number, victim, (moment, moment * length))
            self.done.append(trial)
            self.say(trial.line())
            if trial.faults:
                return

    def table(self) -> dict[str, Any]:
        """What was counted."""
        rows = [asdict(trial) for trial in self.done]
        ends = Counter((trial.victim.partition(" of ")[0], trial.state) for trial in self.done)
        return {
            "name": "faults",
            "kills": sum(trial.hit for trial in self.done),
            "missed": sum(not trial.hit for trial in self.done),  # after the run's end: they show nothing
            "slowest_s": max((round(trial.wall_s) for trial in self.done), default=0),
            "faults": sum(len(trial.faults) for trial in self.done),
            "ends": {f"{victim}: {state}": n for (victim, state), n in sorted(ends.items())},
            "rows": rows,
        }


def _undisturbed(stage: Stage, run: str) -> float:
    """Seconds from the moment at which the coordinator knows a run to its end."""
    launched = stage.launch(run)
    if not wait_until(stage.begun(run).exists, 60):
        raise Hangs(f"the run is not begun: {launched.said.read_text()[-500:]}")
    began = time.monotonic()
    launched.process.wait(180)
    assert launched.events()[-1]["state"] == "finished", launched.said.read_text()
    return time.monotonic() - began


def _trial(stage: Stage, auditor: Auditor, number: int, victim: str, moment: tuple[float, float]) -> Trial:
    """Launch, kill, start again what a supervisor starts again, launch again, and look at the books."""
    run, began = f"run-{number}", time.monotonic()
    launched = stage.launch(run)
    if victim != OPERATOR and not wait_until(stage.begun(run).exists, 60):
        raise Hangs(f"{run} is not begun: {launched.said.read_text()[-500:]}")
    time.sleep(moment[1])
    events = launched.events()
    at = f"{events[-1]['state']} {events[-1]['round']}" if events else "before any"
    hit = kill(stage, victim, launched)
    try:
        end = stage.carried_out(run)
        faults = tuple(after(stage, auditor, run, end["state"]))
    except Hangs as hang:
        end, faults = {"state": "hangs", "reason": ""}, (str(hang),)
    launched.process.kill()
    launched.process.wait()
    closed = len(auditor.look(stage).closed(run)) if end["state"] != "hangs" else 0
    wall = time.monotonic() - began
    return Trial(number, victim, *moment, at, hit, end["state"], end["reason"], closed, wall, faults)


def kill(stage: Stage, victim: str, launched: Launched) -> bool:
    """SIGKILL; the coordinator and the agents are started again, as a service manager does.

    Returns:
        Whether there was something to kill in a run that goes on: else the trial shows nothing.
    """
    goes_on = launched.process.poll() is None
    kind, _, parent = victim.partition(" of ")
    if kind == OPERATOR:
        launched.process.kill()
        launched.process.wait()
    elif kind == CHILD:
        there = lambda: stage.kill_child(parent) or launched.process.poll() is not None  # noqa: E731
        return wait_until(there, 20) and goes_on and launched.process.poll() is None  # its parent starts another
    else:
        stage.kill(victim)
        stage.start(victim)
    return goes_on


def after(stage: Stage, auditor: Auditor, run: str, state: str, rounds: int = ROUNDS) -> Iterator[str]:
    """What does not hold once the books had a minute to be closed."""
    if state != "stopped":
        wait_until(lambda: not auditor.look(stage).held(run), CLOSE_S)
    yield from auditor.look(stage).faults(run, state, stage.begun(run).parent, rounds)
