"""P9, P10: kills between any two writes of jobs and site. Every job ends or goes on, and budgets are exact."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.cli import job_process, output
from agent.event_log import open_log
from agent.gateway.client import GatewayClient
from agent.service import job_acts, job_rules, job_runner, jobs
from agent.service.job_runner import JobRunner
from agent.service.jobs import Job, JobStore
from agent.service.ledger_access import BorrowedLedger
from agent.service.ledger_access import Site as OpenedSite
from agent.storage.encrypted_sqlite import EncryptedCheckpointStore, EncryptedDatabase
from agent.storage.vault import Vault
from policies.ledger.store import Store
from protos.common.errors import LazaretError
from protos.service.supervisor import Ended
from tests.support.federation_world import Federation, Site
from tests.support.release_site import filled, held, kept, ksame_words

DURABLE: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (EncryptedDatabase, ("write_note", "change_note", "write_blob")),
    (EncryptedCheckpointStore, ("clear",)),
    (Vault, ("write_project_note",)),
    (Store, ("append",)),
    (GatewayClient, ("reserve", "settle", "submit")),
    (JobStore, ("_write",)),
)
WRITES = 60  # of a job that nothing stops, at least


class MachineKilledError(BaseException):
    """Power is gone: service, supervisor and job."""


class JobKilledError(BaseException):
    """kill -9 of the job's process."""


class Here:
    """In the place of the supervisor: a job runs when its end is asked for, in this process."""

    pid = 0

    def __init__(self, home: Path) -> None:
        self.store, self.started = JobStore(home), list[tuple[str, Sequence[str]]]()

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], out: int, errors: int, folder: Path
    ) -> int:
        self.started.append((name, words[words.index("agent.cli.job_process") + 4 :]))
        return 1

    def signal(self, name: str, number: int) -> None:
        """It is ended before it has begun."""
        self.started = [one for one in self.started if one[0] != name] + [(name, ["ended"])]

    def ended(self, wait_s: float) -> list[Ended]:
        found, self.started = self.started, []
        return [Ended(name, self._run(int(name), send)) for name, send in found]

    def close(self) -> None:
        """What it had started is gone."""

    def _run(self, number: int, send: Sequence[str]) -> int:
        if list(send) == ["ended"]:
            return -15
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(self.store.folder(number))
                patch.setattr(job_process.signal, "signal", lambda *_: None)
                return job_process.run(self.store, self.store.read(number), send)
        except JobKilledError:
            return -9
        finally:
            output.LISTENERS.clear()


class Kills:
    """One kill after another, each so many writes after the one before."""

    def __init__(self, gaps: Sequence[tuple[int, bool]]) -> None:
        self.left, self.alive, self.points = list(gaps), threading.current_thread(), list[str]()
        self.written = 0

    def here(self, where: str) -> None:
        if threading.current_thread() is not self.alive:  # the coordinator is another machine
            return
        self.written += 1
        if not self.left:
            return
        gap, machine = self.left[0]
        self.left[0] = (gap - 1, machine)
        if gap <= 1:
            self.left.pop(0)
            self.points.append(where)
            raise MachineKilledError if machine else JobKilledError

    @contextmanager
    def all_along(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, names in DURABLE:
                for name in names:
                    patch.setattr(owner, name, self._between(getattr(owner, name), f"{owner.__name__}.{name}"))
            yield

    def _between(self, act: Callable[..., Any], where: str) -> Any:
        def instead(*told: Any, **named: Any) -> Any:
            self.here(f"before {where}")
            done = act(*told, **named)
            self.here(f"after {where}")
            return done

        return staticmethod(instead) if where.endswith("_write") else instead


class Service:
    """A service that is started again whenever it is killed."""

    def __init__(self, site: Site, kills: Kills) -> None:
        self.site, self.kills, self.starts = site, kills, 0
        self.store = JobStore(site.home.root)
        self.runner = self._start()

    def _start(self) -> JobRunner:
        while True:
            self.starts += 1
            assert self.starts < 20
            try:
                supervise: Any = partial(Here, self.site.home.root)
                log = open_log(self.site.home.root / "agent.log")
                runner = JobRunner(self.site.home, BorrowedLedger(self.site.home), log, supervise)
                runner.recover()
            except (MachineKilledError, JobKilledError):
                continue
            return runner

    def until_over(self, number: int) -> Job:
        """What became of the job; what waits is not waited for."""
        for _ in range(60):
            try:
                self.runner.look()
                job = self.store.read(number)
                if job.state in jobs.ENDED:
                    return job
                if job.state == jobs.INTERRUPTED and job.not_before != 0.0:
                    self.again(number)
            except (MachineKilledError, JobKilledError):
                self.runner = self._start()
        raise AssertionError(self.store.read(number))

    def again(self, number: int) -> None:
        """A person says so; in this world hours pass in no time."""
        with contextlib.suppress(MachineKilledError, JobKilledError):
            job_acts.retry(self.opened(), number, "a person")

    def opened(self) -> OpenedSite:
        log = open_log(self.site.home.root / "agent.log")
        return OpenedSite(self.site.home, BorrowedLedger(self.site.home), log, runs_jobs=True)


@contextmanager
def world(gaps: Sequence[tuple[int, bool]]) -> Iterator[tuple[Site, Kills, Service]]:
    """A site with a queued release of k-Same, whose service is killed."""
    with TemporaryDirectory() as folder, Federation(Path(folder)) as federation:
        site = filled(federation.join("site-a"), Path(folder))
        kills = Kills(gaps)
        with kills.all_along(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(job_rules, "ask_cards", tuple)
            patch.setattr(job_runner, "_TICK_S", 0.01)
            service = Service(site, kills)
            words = [str(word) for word in ksame_words(Path(folder))]
            told = {"words": words, "project": "main", "by": "it", "price": {}, "cuda": False, "key": "once"}
            while True:
                try:
                    assert job_acts.add(service.opened(), told)["number"] == 1
                    break
                except (MachineKilledError, JobKilledError):
                    service.runner = service._start()
            yield site, kills, service


GAPS = st.lists(st.tuples(st.integers(1, WRITES), st.booleans()), max_size=4)


@pytest.mark.parametrize("tries", [10, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_a_job_that_is_killed_again_and_again_makes_one_release_and_pays_once(tries: int) -> None:
    points = set[str]()

    @settings(max_examples=tries, deadline=None)
    @given(gaps=GAPS)
    def killed_at(gaps: list[tuple[int, bool]]) -> None:
        with world(gaps) as (site, kills, service):
            job = service.until_over(1)
            points.update(kills.points)
            assert (job.state, job.reason) == (jobs.DONE, ""), job
            assert held(site) == (0, 1)
            assert (kept(site), len(site.federation.store.state.releases)) == ([], 1)
            assert [one.number for one in service.store.all()] == [1]
            assert job.attempts <= 1 + len(kills.points)

    killed_at()
    assert len(points) >= min(tries, 20) // 2, sorted(points)


def test_without_a_kill_there_are_as_many_writes_as_are_tried() -> None:
    with world([]) as (_, kills, service):
        assert service.until_over(1).attempts == 1
        assert kills.written > 2 * WRITES // 2


@pytest.mark.parametrize("tries", [6, pytest.param(120, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_a_cancelled_job_ends_and_pays_nothing_or_once(tries: int) -> None:
    """Whenever it is cancelled and killed: cancelled or done, and the ledgers agree with the record."""

    @settings(max_examples=tries, deadline=None)
    @given(gaps=GAPS, looks=st.integers(0, 2))
    def cancelled_at(gaps: list[tuple[int, bool]], looks: int) -> None:
        with world(gaps) as (site, _, service):
            asked = made = False
            for turn in range(60):
                try:
                    if turn >= looks and not asked and not made:
                        job_acts.cancel(service.opened(), 1, "a person", spend=True)
                        asked = True
                    service.runner.look()
                except LazaretError as refused:
                    assert any(told in str(refused) for told in ("ended already", "is made"))  # noqa: PT017
                    made = True
                except (MachineKilledError, JobKilledError):
                    service.runner = service._start()
                job = service.store.read(1)
                if (asked or made) and job.state in jobs.ENDED:
                    break
                if made and job.state == jobs.INTERRUPTED and job.not_before != 0.0:
                    service.again(1)
                if asked and job.state == jobs.INTERRUPTED:  # a kill may have come between the wish and its end
                    asked = False
            assert job.state in (jobs.DONE, jobs.CANCELLED), job
            assert held(site) in ((0, 0), (0, 1), (1, 0))  # held there is as good as spent: its word was lost
            grants = service.opened().ledger.read().state.grants.values()
            assert all(grant.state != "held" for grant in grants)
            assert len(site.federation.store.state.releases) == (1 if job.state == jobs.DONE else 0)
            assert kept(site) == []

    cancelled_at()
