"""Power cuts: the product's store on a simulated disk, cut at any write, as often as one likes.

One run is a workload that loses power at a random write, sync, creation or deletion (schema and clean shutdown
included), is reopened on what the disk kept, judged, and asked for the same things again; the power may fail again
while it recovers. A run follows from its seed alone.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

import apsw

from policies.ledger.backends.sqlite import Sqlite, prepare
from policies.ledger.store import LedgerStoppedError, LedgerUnsoundError, Store
from tests.crash.disk import Disk, Loss, PowerCut
from tests.crash.vfs import LEDGER, NAME, PowerLossVfs
from tests.crash.workload import KEY, ORIGIN, Clock, Plan, drive, finished, hurry, judge, plan

RUNS_PER_PLAN: Final = 50  # a plan and the length of its undisturbed run are made once for so many cuts
_SIMULATED: Final = PowerLossVfs()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run differs in."""

    name: str
    synchronous: str = ""  # a weaker setting than the product's, as a control; "" leaves it
    syncs_names: bool = True  # False for an operating system that never syncs a directory, as a control


PRODUCT: Final = Setting("as shipped: WAL, FULL")
CONTROLS: Final = (
    Setting("control: NORMAL", "NORMAL"),
    Setting("control: OFF", "OFF"),
    Setting("control: names not synced", syncs_names=False),
)


@dataclass(slots=True)
class Tally:
    """What runs came to."""

    runs: int = 0
    crashes: int = 0
    by_loss: Counter[str] = field(default_factory=Counter)
    unready: int = 0  # crashes before the first entry was acknowledged: schema creation, mostly
    wrong: Counter[str] = field(default_factory=Counter)
    seeds: dict[str, int] = field(default_factory=dict)  # of each wrong, the first seed that shows it

    def add(self, other: Tally) -> None:
        """Take in the count of other runs."""
        self.runs, self.crashes = self.runs + other.runs, self.crashes + other.crashes
        self.unready += other.unready
        self.by_loss += other.by_loss
        self.wrong += other.wrong
        self.seeds = other.seeds | self.seeds


@dataclass(slots=True)
class _Life:
    """One process: from opening the ledger to the end of the plan, or to a power cut."""

    plan: Plan
    setting: Setting
    acknowledged: int = 0  # entries, by any life so far

    def live(self, disk: Disk, stop: int) -> str:
        """Open, judge, drive the plan with a clean restart after ``stop`` steps; what was wrong, or "".

        Raises:
            PowerCut: the power went off.
        """
        _SIMULATED.disk, _SIMULATED.syncs_names = disk, self.setting.syncs_names
        try:
            return self._session(range(stop)) or self._session(range(len(self.plan.steps)))
        except (apsw.Error, LedgerStoppedError, LedgerUnsoundError, PowerCut, AssertionError) as error:
            if disk.off:
                raise PowerCut from None
            return str(error) if isinstance(error, AssertionError) else f"refused: {type(error).__name__}"

    def _session(self, steps: range) -> str:
        connection = apsw.Connection(LEDGER, vfs=NAME)
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            hurry(connection)
            prepare(connection)
            if self.setting.synchronous:
                connection.execute(f"PRAGMA synchronous={self.setting.synchronous}")
            return self._work(connection, steps)
        finally:
            connection.close(force=True)

    def _work(self, connection: apsw.Connection, steps: range) -> str:
        sound = [row[0] for row in connection.execute("PRAGMA integrity_check")]
        if sound != ["ok"]:
            return "integrity_check failed"
        clock, disk = Clock(), Sqlite(connection)
        with Store(disk, ORIGIN, KEY, clock) as store:
            if wrong := judge(self.plan, store, disk, self.acknowledged):
                return wrong
            drive(store, clock, self.plan, steps, self._told)
            return finished(self.plan, store, disk) if len(steps) == len(self.plan.steps) else ""

    def _told(self, size: int) -> None:
        self.acknowledged = max(self.acknowledged, size)


@functools.lru_cache(maxsize=4)
def _undisturbed(seed: int, setting: Setting) -> tuple[Plan, int, int]:
    """A plan, after which step it restarts cleanly, and how many disk operations it takes."""
    planned, disk = plan(seed), Disk()
    stop = Random(seed).randint(1, len(planned.steps))
    wrong = _Life(planned, setting).live(disk, stop)
    assert not wrong, f"an undisturbed run of seed {seed} went wrong: {wrong}"
    return planned, stop, disk.operations


def run(seed: int, setting: Setting, tally: Tally) -> None:
    """One run, counted."""
    planned, stop, operations = _undisturbed(seed // RUNS_PER_PLAN, setting)
    dice, disk = Random(seed), Disk()
    disk.cut = dice.randint(1, operations)
    life = _Life(planned, setting)
    tally.runs += 1
    while True:
        try:
            wrong = life.live(disk, stop)
        except PowerCut:
            loss = dice.choice(list(Loss))
            tally.crashes += 1
            tally.by_loss[loss.value] += 1
            tally.unready += not life.acknowledged
            disk = disk.after(loss, dice)
            disk.cut = dice.randint(1, operations) if dice.random() < 0.5 else 0
            continue
        if wrong:
            tally.wrong[wrong] += 1
            tally.seeds.setdefault(wrong, seed)
        return


def _some(work: tuple[range, Setting]) -> Tally:
    seeds, setting = work
    tally = Tally()
    for seed in seeds:
        run(seed, setting, tally)
    return tally


def _parts(setting: Setting, first: int, count: int) -> list[tuple[range, Setting]]:
    starts = range(first, first + count * RUNS_PER_PLAN, RUNS_PER_PLAN)
    return [(range(start, start + RUNS_PER_PLAN), setting) for start in starts]


def many(setting: Setting, crashes: int, first: int = 0, jobs: int = 1) -> Iterator[Tally]:
    """Runs from the seed ``first`` on, in ``jobs`` processes, until there were so many crashes; the growing total."""
    total, at = Tally(), first // RUNS_PER_PLAN * RUNS_PER_PLAN
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else contextlib.nullcontext() as pool:
        while total.crashes < crashes:
            parts = _parts(setting, at, 1 if pool is None else 8 * jobs)
            for tally in map(_some, parts) if pool is None else pool.imap_unordered(_some, parts):
                total.add(tally)
            at += len(parts) * RUNS_PER_PLAN
            yield total
