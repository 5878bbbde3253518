"""Jobs as real processes beside a service that holds the ledger: what a user types, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.cli import job_process, main, options, output
from agent.errors import CoordinatorUnreachableError
from agent.event_log import open_log
from agent.mechanisms.ksame.mechanism import KSame
from agent.release import approval, budget, recovery
from agent.release.maker_process import MakerEndedError
from agent.release.unsent import forget
from agent.runtime import open_runtime, recover_at_startup
from agent.service import job_runner, jobs
from agent.service import site as acts
from agent.service.job_runner import JobRunner
from agent.service.jobs import Event, Job, JobStore
from agent.service.ledger_access import BorrowedLedger, SharedLedger
from agent.service.site import site_app
from agent.storage import projects, read_only_access
from agent.storage.encrypted_sqlite import VaultError
from protos.service.control_client import connect
from protos.service.control_socket import control_socket
from protos.service.supervisor import Ended
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import Person
from tests.support.release_site import entries, filled, held, kept, killed, ksame_words, site

__all__ = ["site", "typed"]  # fixtures

PATIENCE_S = 240.0  # for a process to start on a machine that is busy


class World:
    """A service, and what a user types beside it."""

    def __init__(self, site: Site, typed: Typed, folder: Path) -> None:
        self.site, self.typed, self.folder = site, typed, folder
        self.store, self._service = JobStore(site.home.root), ExitStack()

    def serve(self) -> None:
        """As ``serve`` does with ``--modality``."""
        runtime = self._service.enter_context(open_runtime(self.site.home.root, lambda *_: None))
        recover_at_startup(runtime)
        log, ledger = open_log(self.site.home.root / "agent.log"), SharedLedger(runtime)
        app = site_app(self.site.home, ledger, log)
        self._service.enter_context(control_socket(self.site.home.root, app, log))
        self._service.enter_context(JobRunner(self.site.home, ledger, log))

    def stop(self) -> None:
        self._service.close()

    def queue(self, *words: object) -> Job:
        said = self.typed(*at(self.site), *words, "--detach")
        assert said.status == 0, said.out + said.err
        return self.store.all()[-1]

    def jobs(self, *words: object) -> Any:
        return self.typed(*at(self.site), "jobs", *words)

    def wait(self, number: int, *states: str, until: Callable[[Job], bool] = lambda _: True) -> Job:
        end = time.monotonic() + PATIENCE_S
        while True:
            job = self.store.read(number)
            if job.state in states and until(job):
                return job
            assert time.monotonic() < end, job
            assert not (job.state in jobs.ENDED and job.state not in states), job
            time.sleep(0.02)

    def pid(self, number: int) -> int:
        """Of the process of a job that has just been started."""
        path, end = self.store.folder(number) / "pid", time.monotonic() + PATIENCE_S
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < end
            time.sleep(0.01)
        return int(path.read_text())


@pytest.fixture
def world(site: Site, typed: Typed, tmp_path: Path) -> Iterator[World]:
    made = World(site, typed, tmp_path)
    made.serve()
    yield made
    made.stop()


def test_a_detached_release_says_costs_and_ends_as_the_typed_one(typed: Typed, tmp_path: Path) -> None:
    found = {}
    for way in ("typed", "detached"):
        (tmp_path / way).mkdir()
        with Federation(tmp_path / way) as federation:
            world = World(filled(federation.join("site-a"), tmp_path / way), typed, tmp_path / way)
            world.serve()
            results = []
            for words in (ksame_words(tmp_path / way), ksame_words(tmp_path / way, "--anew", "--json")):
                if way == "typed":
                    said = typed(*at(world.site), *words)
                else:
                    queued = typed(*at(world.site), *words, "--detach")
                    said = queued if queued.status else world.jobs("follow", world.store.all()[-1].number)
                results.append((said.status, said.out.replace(said.out[said.out.find("release-") :][:40], "")))
            world.stop()
            found[way] = (results[0], entries(world.site), held(world.site), kept(world.site))
            statuses = [status for status, _ in results]
            assert statuses == [0, 1]
    assert found["typed"] == found["detached"]


def test_what_would_be_refused_is_not_queued(world: World) -> None:
    said = world.typed(*at(world.site), *ksame_words(world.folder, "--k", "900"), "--detach")
    assert (said.status, "it is not queued" in said.out, world.store.all()) == (1, True, [])
    assert [path.name for path in world.store.root.iterdir()] == []
    for words, told in (
        (["ingest", "--folder", world.folder], "a folder is read by whoever types"),
        (
            ["ingest", "--pacs", "x", "--patients", world.folder / "basis.safetensors"],
            "a list of patients is not kept",
        ),
        (["deface", "a", "b"], "--detach is for `deface --vault`"),
        (ksame_words(world.folder, "--dry-run"), "a dry run is done at once"),
        (
            ["tune", "--config", world.folder / "none.toml", "--menu", "5,6", "--out", "page.html"],
            "none.toml: no such",
        ),
        (["ingest", "--pacs", "x", "--project", "none"], "there is no project none"),
    ):
        said = world.typed(*at(world.site), *words, "--detach")
        assert (said.status, told in said.err, world.store.all()) == (1, True, []), said.err


def test_the_price_and_who_asked_are_in_the_record_and_in_jobs_show(world: World) -> None:
    job = world.queue(*ksame_words(world.folder))
    assert (job.price["amount"], job.price["left"]) == (1, 1)
    world.wait(1, jobs.DONE)
    said = world.jobs("show", 1)
    assert "price: 1 of the 1 that were left when it was queued" in said.out
    states = [event.state for event in world.store.read(1).history]
    assert [state for state in states if state != "leaving"] == [
        "queued",
        "running",
        "done",
    ]  # it may leave in between
    assert "done" in world.jobs("list").out
    assert world.jobs("list", "--json").line["jobs"][0]["release"].startswith("release-")


def test_a_job_that_is_killed_goes_on_by_itself_under_its_grant(world: World) -> None:
    """A kill -9 wherever it hits costs no release: a site has one for each patient, ever."""
    world.queue(*ksame_words(world.folder))
    for attempt in (1, 2):
        world.wait(1, jobs.RUNNING, until=lambda job, n=attempt: job.attempts == n)  # type: ignore[misc]
        os.kill(world.pid(1), signal.SIGKILL)
        world.wait(1, jobs.RUNNING, until=lambda job, n=attempt: job.attempts > n)  # type: ignore[misc]
    job = world.wait(1, jobs.DONE)
    assert (held(world.site), kept(world.site), entries(world.site).count("Reserved")) == ((0, 1), [], 1)
    assert any("signal 9, perhaps since memory ran out" in event.reason for event in job.history)


def test_a_service_that_ends_takes_its_job_along_and_the_next_one_goes_on(world: World) -> None:
    world.queue(*ksame_words(world.folder))
    world.wait(1, jobs.RUNNING)
    pid = world.pid(1)
    world.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert world.store.read(1).state in (jobs.INTERRUPTED, jobs.DONE)
    listed = world.jobs("list")
    assert ("interrupted" in listed.out) == (world.store.read(1).state == jobs.INTERRUPTED)
    world.serve()
    world.wait(1, jobs.DONE)
    assert (held(world.site), kept(world.site), entries(world.site).count("Admitted")) == ((0, 1), [], 1)


def test_a_job_that_waited_for_a_service_that_was_killed_goes_on_with_the_next_one(world: World) -> None:
    """It heard of its service's end first, and had the time to say that nobody answers: that is over now."""
    world.stop()
    world.queue(*ksame_words(world.folder))
    world.store.change(1, lambda known: known.now(jobs.RUNNING, attempts=6))
    (world.store.folder(1) / "end.json").write_text(json.dumps({"status": jobs.BUSY, "attempt": 6}))
    runner = JobRunner(world.site.home, BorrowedLedger(world.site.home), open_log(world.folder / "log"))
    runner.recover()
    job = world.store.read(1)
    assert (job.state, job.not_before <= time.time()) == (jobs.INTERRUPTED, True)


def test_how_long_it_waits_counts_what_hindered_it_in_a_row_and_no_start_that_a_kill_ended(world: World) -> None:
    """After eight kills of the service, a coordinator that is away once is asked again in a minute."""
    world.stop()
    words = ("tune", "--config", "in/x.toml")
    number = world.store.add(Job(0, words, "main", (Event(1.0, jobs.QUEUED),), attempts=8)).number
    runner = JobRunner(world.site.home, BorrowedLedger(world.site.home), open_log(world.folder / "log"))
    found = []
    for status in (jobs.BUSY, jobs.BUSY, -signal.SIGKILL, jobs.BUSY, None, jobs.BUSY):
        world.store.change(number, lambda known: known.now(jobs.RUNNING))
        runner._settle(world.store.read(number), status)
        found.append(round((world.store.read(number).not_before - time.time()) / 60))
    assert found == [1, 2, 0, 1, 0, 1]


def test_what_was_made_and_had_no_answer_is_shown_as_leaving_when_it_is_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stop()
    world.queue(*ksame_words(world.folder))
    started: list[list[str]] = []

    class Hears:
        pid = 1

        def start(self, _name: str, words: list[str], *_: object) -> int:
            started.append(words[-3:-1])
            return 1

    log = open_log(world.folder / "log")
    runner = JobRunner(world.site.home, BorrowedLedger(world.site.home), log, Hears)  # type: ignore[arg-type]
    for made, state, last in ((False, jobs.RUNNING, "1"), (True, jobs.LEAVING, "send")):
        monkeypatch.setattr(job_runner, "fate_of", lambda *_, made=made: jobs.Fate(None, "", kept=made))
        runner._start(world.store.read(1))
        assert (world.store.read(1).state, last in started[-1]) == (state, True)


def test_a_queued_job_is_cancelled_for_nothing_and_begun_anew(world: World) -> None:
    world.stop()
    number = world.queue(*ksame_words(world.folder)).number  # without a service it waits
    assert "starts when `serve` runs" in world.jobs("list").out
    assert "job 1 is cancelled" in world.jobs("cancel", number).out
    assert (held(world.site), world.store.read(1).state) == ((0, 0), jobs.CANCELLED)
    said = world.jobs("cancel", number)
    assert (said.status, said.err) == (1, "refused: job 1 has ended already: cancelled\n")
    world.serve()
    assert "job 2 is queued" in world.jobs("retry", number).out
    world.wait(2, jobs.DONE)
    assert held(world.site) == (0, 1)
    said = world.jobs("retry", 2)
    assert (said.status, said.err) == (1, "refused: job 2 is done: nothing is to be tried again\n")


def interrupted_making(world: World, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's making, begun under its name and ended before it is kept."""

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    job = world.store.read(number)
    words = ["--home", str(world.site.home.root), *map(str, ksame_words(world.folder))]
    arguments = options.build_parser().parse_args(words)
    arguments.grant = job.grant
    with monkeypatch.context() as patch:
        patch.setattr(KSame, "run", dies)
        with pytest.raises(KeyboardInterrupt):
            main.carry_out(arguments)
    world.store.change(number, lambda known: known.now(jobs.INTERRUPTED, "ended", attempts=1, not_before=-1.0))


def test_a_cancel_after_the_price_says_so_and_spends_only_when_that_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stop()
    world.queue(*ksame_words(world.folder))
    interrupted_making(world, 1, monkeypatch)
    world.serve()
    assert held(world.site) == (1, 0)
    said = world.jobs("cancel", 1)
    told = "the price of job 1 is spent whatever you do: `jobs cancel 1 --spend`"
    assert (said.status, told in said.err) == (1, True)
    assert (held(world.site), world.store.read(1).state) == ((1, 0), jobs.INTERRUPTED)
    assert world.jobs("cancel", 1, "--spend").out == "job 1 is cancelled\n"
    assert (held(world.site), world.store.read(1).state) == ((0, 1), jobs.CANCELLED)


def test_an_interrupted_release_goes_on_when_a_person_says_so_and_before_any_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stop()
    for k in ("5", "6"):
        world.queue(*ksame_words(world.folder, "--k", k))
    interrupted_making(world, 1, monkeypatch)
    world.serve()
    assert "job 1 goes first: `jobs retry 1` or `jobs" in world.jobs("list").out
    assert "job 1 is queued" in world.jobs("retry", 1).out
    world.wait(1, jobs.DONE)
    world.wait(2, jobs.REFUSED)
    assert held(world.site) == (0, 1)
    assert world.store.read(2).reason == "the cohort does not qualify for this release"  # they are in the first


def fails_once(monkeypatch: pytest.MonkeyPatch, place: object, name: str, *, late: bool = False) -> None:
    """The next call finds the coordinator away; ``late``: after it was heard."""
    real = getattr(place, name)

    def away(*told: Any) -> Any:
        if late:
            real(*told)
        monkeypatch.setattr(place, name, real)
        raise CoordinatorUnreachableError("it is away")

    monkeypatch.setattr(place, name, away)


def test_whenever_the_coordinator_is_away_the_job_goes_on_later_and_what_a_person_sends_meanwhile_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start, at its price, and when what it made leaves."""
    moments = ((recovery, "tidy", False), (budget, "reserve", True), (approval, "submit_approved", False))
    for attempt, (place, name, late) in enumerate(moments, 1):
        fails_once(monkeypatch, place, name, late=late)
        if attempt == 1:
            world.queue(*ksame_words(world.folder))
        else:
            assert "job 1 is queued" in world.jobs("retry", 1).out
        job = world.wait(1, jobs.INTERRUPTED, until=lambda known, n=attempt: known.attempts == n)  # type: ignore[misc]
        assert (job.reason.startswith("it is away"), job.not_before > time.time()) == (True, True), job
    (release,) = kept(world.site)
    assert job.reason.count("is kept here under its grant") == 1
    assert world.typed(*at(world.site), "release", "send", release).status == 0
    world.wait(1, jobs.DONE)
    assert (held(world.site), entries(world.site).count("Reserved")) == ((0, 1), 1)


@pytest.mark.parametrize("grant", ["", "grant-1"])
def test_a_job_whose_making_is_killed_is_counted_as_one_that_is_killed_itself(
    world: World, monkeypatch: pytest.MonkeyPatch, grant: str
) -> None:
    """After three kills in a row a person is told, who frees some memory."""

    def killed_making(_: object) -> int:
        raise MakerEndedError(signal.SIGKILL)

    job = Job(1, ("jobs", "list"), "main", (Event(1.0, jobs.RUNNING),), grant=grant)
    world.store.folder(1).mkdir(parents=True)
    monkeypatch.setattr(main, "carry_out", killed_making)
    monkeypatch.setattr(output, "LISTENERS", [])
    assert job_process._carry_out(world.store, job, job.words) == -signal.SIGKILL


def made_by_hand(world: World, moment: str, state: str, **more: Any) -> JobRunner:
    """A job that stands so, whose release a kill left at a moment; and who looks at it, beside no service."""
    world.stop()
    killed(world.site, world.folder, moment)
    with closing(projects.open_vault(world.site.home)) as vault:
        listed = list((vault.note("pending") or {}).values()) or [vault.note("unfinished")]
    told = {"grant": listed[0]["grant"], "attempts": 1, "not_before": -1.0, **more}
    world.store.add(Job(0, ("release", "ksame"), "main", (Event(1.0, state),), **told))
    return JobRunner(world.site.home, BorrowedLedger(world.site.home), open_log(world.folder / "log"))


def test_a_job_whose_release_was_sent_by_hand_is_done_and_cannot_be_cancelled(world: World) -> None:
    runner = made_by_hand(world, "before-submit", jobs.INTERRUPTED)
    (release,) = kept(world.site)
    assert world.typed(*at(world.site), "release", "send", release).status == 0
    said = world.jobs("cancel", 1, "--spend")
    assert (said.status, said.err) == (1, "refused: job 1 has ended already: done\n")
    assert world.store.read(1).state == jobs.DONE
    world.store.change(1, lambda known: replace(known, history=known.history[:1]))
    runner._watch(world.store.read(1))
    assert world.store.read(1).state == jobs.DONE


def test_a_job_whose_release_was_withdrawn_by_hand_is_over(world: World) -> None:
    runner = made_by_hand(world, "before-submit", jobs.INTERRUPTED)
    (release,) = kept(world.site)
    assert world.typed(*at(world.site), "release", "withdraw", release).status == 0
    runner._watch(world.store.read(1))
    job = world.store.read(1)
    assert (job.state, job.reason) == (jobs.REFUSED, "it ended without a release, and its price is spent")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_release_that_leaves_while_it_is_looked_at_has_not_failed(
    world: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    runner = made_by_hand(world, "before-submit", jobs.MADE)
    real, sent = read_only_access.notes, list[int]()

    def send() -> None:
        sent.append(world.typed(*at(world.site), "release", "send", kept(world.site)[0]).status)

    @contextmanager
    def meanwhile(home: Any) -> Iterator[Any]:
        if when == "before" and not sent:
            send()
        with real(home) as notes:
            yield notes
        if when == "after" and not sent:
            send()

    monkeypatch.setattr(read_only_access, "notes", meanwhile)
    runner._watch(world.store.read(1))
    assert (sent, world.store.read(1).state) == ([0], jobs.DONE)


def test_what_is_made_and_was_discarded_is_spent_at_once(world: World) -> None:
    """As after an opt-out (P15): nothing can go on under the grant."""
    runner = made_by_hand(world, "before-submit", jobs.MADE)
    with closing(projects.open_vault(world.site.home)) as vault:
        forget(vault, kept(world.site)[0])
        vault.write_note("unfinished", None)
    runner._watch(world.store.read(1))
    assert (world.store.read(1).state, held(world.site)) == (jobs.FAILED, (0, 1))


def test_an_upload_of_hours_holds_up_no_look_at_the_jobs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the ledger; who waits for that does not wait in the thread that ends and starts jobs."""
    monkeypatch.setattr(job_runner, "_MOMENT_S", 0.05)
    made_by_hand(world, "making", jobs.INTERRUPTED)
    uploading, over = threading.Event(), threading.Event()
    with open_runtime(world.site.home.root, lambda *_: None) as runtime:
        ledger, log = SharedLedger(runtime), open_log(world.folder / "log")

        def upload() -> None:
            with ledger.work(greeted=False):
                uploading.set()
                over.wait(PATIENCE_S)

        thread = threading.Thread(target=upload)
        thread.start()
        try:
            assert uploading.wait(PATIENCE_S)
            asked = acts.Site(world.site.home, ledger, log, runs_jobs=True)
            assert acts.ACTS["jobs/cancel"](asked, 1, "me", spend=True) == {"state": jobs.RUNNING}
            runner = JobRunner(world.site.home, ledger, log)
            runner._watch(world.store.read(1))
            assert (thread.is_alive(), world.store.read(1).state) == (True, jobs.INTERRUPTED)
        finally:
            over.set()
            thread.join()
        runner._wished = 0.0
        runner._watch(world.store.read(1))
    assert (world.store.read(1).state, held(world.site)) == (jobs.CANCELLED, (0, 1))


def test_where_a_patient_has_opted_out_the_job_fails_and_its_grant_is_spent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P15: what was sealed of the making is gone with the patient, so nothing can go on under the grant."""
    world.stop()
    world.queue(*ksame_words(world.folder))
    interrupted_making(world, 1, monkeypatch)
    with closing(projects.open_vault(world.site.home)) as vault:
        person = vault.project_note("unfinished")["persons"][0]
    projects.opt_out(world.site.home, person)
    world.serve()
    world.jobs("retry", 1)
    world.wait(1, jobs.FAILED, jobs.REFUSED)
    assert (held(world.site), kept(world.site)) == ((0, 1), [])


def test_what_cannot_be_written_down_now_is_settled_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at the moment of an end: the job is not at work for ever, and no other waits for it."""
    world.queue(*ksame_words(world.folder))
    world.wait(1, jobs.RUNNING)
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr(JobStore, "_write", staticmethod(lambda *_: (_ for _ in ()).throw(full)))
        end = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{world.pid(1)}").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.5)
        assert world.store.read(1).state in (jobs.RUNNING, jobs.LEAVING)
    world.wait(1, jobs.DONE)
    assert held(world.site) == (0, 1)


def test_a_vault_that_fails_when_the_service_ends_keeps_no_other_job_from_its_next_state(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, words = JobStore(site.home.root), ("predict", "in/model", "--vault", "--out", "sealed")
    first, second = (store.add(Job(0, words, "main", (Event(1.0, jobs.RUNNING),), attempts=1)) for _ in range(2))
    ended = [Ended(str(job.number), -signal.SIGTERM) for job in (first, second)]
    processes = SimpleNamespace(signal=lambda *_: None, ended=lambda _: ended, close=lambda: None)

    def broken(_: object, job: Job) -> None:
        if job.number == first.number:
            raise VaultError("the disk failed")

    monkeypatch.setattr(job_runner, "clear_outputs", broken)
    runner = JobRunner(site.home, BorrowedLedger(site.home), open_log(site.home.root / "agent.log"))
    monkeypatch.setattr(runner, "_supervisor", processes)
    runner._end_all()
    assert [store.read(job.number).state for job in (first, second)] == [jobs.RUNNING, jobs.INTERRUPTED]
    assert runner._supervisor is None


def test_a_cancel_that_was_not_told_to_spend_spends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The price may be paid between the word and the end."""
    world.stop()
    world.queue(*ksame_words(world.folder))
    interrupted_making(world, 1, monkeypatch)
    world.store.change(1, lambda known: replace(known.now(jobs.RUNNING), wanted=jobs.CANCELLED, wanted_by="it"))
    world.serve()
    job = world.wait(1, jobs.INTERRUPTED, until=lambda known: not known.wanted)
    assert (held(world.site), "its price was paid before it ended" in job.reason) == ((1, 0), True)
    assert job.not_before < 0, "it waits for a person"


def test_a_cancel_is_refused_while_the_process_lives_and_its_service_cannot_be_asked(world: World) -> None:
    """The service runs, and its socket could not be opened."""
    world.stop()
    world.queue(*ksame_words(world.folder))
    world.store.change(1, lambda known: known.now(jobs.RUNNING, attempts=1))
    before = world.store.read(1)
    refused = "refused: job 1 is at work, and the service that runs it does not answer here: restart `serve`, then"

    def is_refused() -> None:
        said = world.jobs("cancel", 1)
        assert (said.status, said.err.startswith(refused), world.store.read(1)) == (1, True, before), said.err

    is_refused()  # it is being started
    words = [sys.executable, "-c", "input()", "agent.cli.job_process"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        (world.store.folder(1) / "pid").write_text(str(process.pid))
        is_refused()
        process.communicate(b"\n")
    assert "job 1 is cancelled" in world.jobs("cancel", 1).out


def test_a_retry_that_is_asked_for_twice_is_done_once(world: World) -> None:
    world.stop()
    world.queue(*ksame_words(world.folder))
    world.jobs("cancel", 1)
    assert [world.jobs("retry", 1).out for _ in range(2)] == ["job 2 is queued\n"] * 2
    assert [job.number for job in world.store.all()] == [1, 2]
    world.store.change(2, lambda known: known.now(jobs.RUNNING))
    assert world.jobs("retry", 1).out == "job 2 is running\n"
    world.store.change(2, lambda known: known.now(jobs.FAILED, "again"))
    assert world.jobs("retry", 1).out == "job 3 is queued\n", "the second one has ended, so a third is begun"
    assert world.jobs("retry", 2).out == "job 3 is queued\n"
    world.store.change(3, lambda known: known.now(jobs.INTERRUPTED, "ended", not_before=-1.0))
    assert (world.jobs("retry", 1).out, world.store.read(3).state) == ("job 3 is queued\n", jobs.QUEUED)
    world.store.change(3, lambda known: known.now(jobs.DONE))
    told = "refused: job 3, which was begun for it, is done: nothing is to be tried again\n"
    assert [world.jobs("retry", number).err for number in (1, 2)] == [told] * 2
    assert sorted(path.name for path in world.store.root.iterdir()) == ["1", "2", "3", "last"], "no copies are left"


def test_a_jobs_priority_is_said_when_it_is_queued_or_later_and_shown(world: World) -> None:
    world.stop()
    words = ksame_words(world.folder)
    assert [world.queue(*words, "--priority", "low").priority, world.queue(*words).priority] == ["low", "normal"]
    assert "--priority" not in world.store.read(1).words
    assert world.jobs("priority", 2, "high").out == "the priority of job 2 is high\n"
    assert "priority: high" in world.jobs("show", 2).out
    assert [one["priority"] for one in world.jobs("list", "--json").line["jobs"]] == ["low", "high"]
    assert "high priority" in " ".join(world.jobs("list").out.split())
    world.jobs("cancel", 1)
    said = world.jobs("priority", 1, "high")
    told = "refused: job 1 is cancelled: a priority orders what waits to start\n"
    assert (said.status, said.err) == (1, told)
    world.jobs("retry", 1)
    assert world.store.read(3).priority == "low", "begun anew it keeps it"
    said = world.typed(*at(world.site), *words, "--priority", "high")
    assert (said.status, said.err) == (1, "refused: --priority is of a job: add --detach\n")


def test_a_job_that_persons_must_approve_is_made_and_waits_and_ends_with_its_release(world: World) -> None:
    world.stop()
    text = (world.site.home.root / "policy.toml").read_text()
    (world.site.home.root / "policy.toml").write_text(text.replace("approvals = []", 'approvals = ["compliance"]'))
    world.serve()
    key = Person("rita", "compliance")
    assert world.typed(*at(world.site), "ledger", "appoint", "rita", "compliance", key.public.hex()).status == 0
    world.queue(*ksame_words(world.folder))
    world.wait(1, jobs.MADE)
    release = world.jobs("show", 1, "--json").line["job"]["release"]
    assert kept(world.site) == [release]
    said = world.jobs("cancel", 1)
    assert (said.status, f"`release withdraw {release}`" in said.err) == (1, True)
    said = world.jobs("follow", 1)
    assert (said.status, "waits for approval by: compliance" in said.out) == (1, True)
    assert world.typed(*at(world.site), "release", "withdraw", release).status == 0
    world.wait(1, jobs.REFUSED)
    assert held(world.site) == (0, 1)


@pytest.mark.parametrize("number", ["0", "x", "-1"])
def test_what_is_no_number_of_a_job_is_a_wrong_word(world: World, number: str) -> None:
    with pytest.raises(SystemExit):
        world.jobs("show", number)


@pytest.mark.parametrize("what", [["show"], ["cancel"], ["retry"], ["follow"], ["fetch", "--out", "folder"]])
def test_an_unknown_number_is_a_sentence_with_the_next_command(world: World, what: list[str]) -> None:
    said = world.jobs(what[0], 9, *what[1:])
    assert (said.status, said.err) == (1, "refused: there is no job 9: `jobs list` shows them\n")


def test_a_job_takes_what_the_service_leaves(world: World) -> None:
    """Images come first: its own session, nice, batch, all processors but one, the first to go when memory ends."""
    world.queue(*ksame_words(world.folder))
    world.wait(1, jobs.RUNNING)
    pid, found = world.pid(1), dict[str, Any]()
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and world.store.read(1).state == jobs.RUNNING:
        try:
            nice = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])
            told = {"nice": nice, "session": os.getsid(pid), "policy": os.sched_getscheduler(pid)}
            told |= {"cores": len(os.sched_getaffinity(pid)), "oom": Path(f"/proc/{pid}/oom_score_adj").read_text()}
        except (OSError, ProcessLookupError):
            break
        if nice and told["cores"] < max(2, os.cpu_count() or 1):
            found = told
            break
    assert found == {
        "nice": 10,
        "session": pid,
        "policy": os.SCHED_BATCH,
        "cores": max(1, len(os.sched_getaffinity(0)) - 1),
        "oom": "900\n",
    }
    world.wait(1, jobs.DONE)


def test_a_machine_that_is_too_small_spends_nothing_and_the_service_lives(world: World) -> None:
    world.stop()
    (world.site.home.root / "jobs.toml").write_text("memory_gib = 0.02\n")
    world.serve()
    world.queue(*ksame_words(world.folder))
    job = world.wait(1, jobs.FAILED, jobs.REFUSED)
    assert held(world.site) == (0, 0)
    assert "memory" in (world.store.folder(1) / "stderr").read_text().lower()  # a library's own words
    service = connect(world.site.home.root)
    assert service is not None
    with service:
        assert service.ask("/jobs/list", {})["jobs"][0]["state"] == job.state


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
        SystemError("error return without exception set"),
    ],
)
def test_memory_that_runs_out_in_a_making_keeps_its_grant(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No site loses its one k-anonymous release to a machine that was too small."""

    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(KSame, "run", fails)
        said = world.typed(*at(world.site), *ksame_words(world.folder))
    assert (said.status, "refused: memory ran out" in said.err, held(world.site)) == (1, True, (1, 0))
    assert world.typed(*at(world.site), *ksame_words(world.folder)).status == 0
    assert held(world.site) == (0, 1)


@pytest.mark.parametrize("grant", ["", "grant-1"])
def test_a_job_whose_confined_process_is_killed_begins_anew_no_more_often_than_a_killed_job(
    world: World, monkeypatch: pytest.MonkeyPatch, grant: str
) -> None:
    """Every attempt counts a look; and one that is killed for memory would be killed for ever."""

    def killed(_: object) -> int:
        raise MakerEndedError(signal.SIGKILL)

    job = Job(1, ("jobs", "list"), "main", (jobs.Event(1.0, jobs.RUNNING),), grant=grant)
    world.store.folder(1).mkdir(parents=True)
    monkeypatch.setattr(main, "carry_out", killed)
    monkeypatch.setattr(output, "LISTENERS", [])
    assert job_process._carry_out(world.store, job, job.words) == -signal.SIGKILL


def late_image(world: World, seconds: float) -> Path:
    """Something in the inbox that nobody has read for so long; ``serve``'s reader is not there to read it."""
    inbox, _ = projects.project_folders(world.site.home, "main")
    inbox.mkdir(parents=True, exist_ok=True)
    path = inbox / "image"
    path.write_bytes(b"")
    os.utime(path, (time.time() - seconds, time.time() - seconds))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks often enough to find a job of a second at work."""
    monkeypatch.setattr(job_runner, "_TICK_S", 0.02)


def running_and_held(world: World) -> Path:
    """A job at work that images hold, and what it waits for."""
    world.queue(*ksame_words(world.folder))
    world.wait(1, jobs.RUNNING)
    world.pid(1)
    path, end = late_image(world, 61.0), time.monotonic() + PATIENCE_S
    while world.jobs("list", "--json").line["jobs"][0]["reason"] != "held: images wait to be read":
        assert time.monotonic() < end
        assert world.store.read(1).state == jobs.RUNNING
    return path


@pytest.mark.usefixtures("quick")
def test_a_job_is_held_while_images_wait_and_then_goes_on(world: World) -> None:
    path = running_and_held(world)
    path.unlink()
    world.wait(1, jobs.DONE)
    assert held(world.site) == (0, 1)


@pytest.mark.usefixtures("quick")
def test_a_held_job_hears_that_it_is_to_end(world: World) -> None:
    running_and_held(world)
    world.jobs("cancel", 1, "--spend")
    world.wait(1, jobs.CANCELLED)
    assert held(world.site) in ((0, 0), (0, 1))


@pytest.mark.usefixtures("quick")
def test_no_job_starts_while_images_wait(world: World) -> None:
    path = late_image(world, 61.0)
    world.queue(*ksame_words(world.folder))
    time.sleep(0.5)
    assert (world.store.read(1).state, "images wait to be read" in world.jobs("list").out) == (jobs.QUEUED, True)
    path.unlink()
    world.wait(1, jobs.DONE)


def signals_of(
    world: World, patch: pytest.MonkeyPatch, late_until: float, found: Callable[[float], list[Job]]
) -> list[tuple[float, str, int]]:
    """What jobs hear within ten minutes: when, who, and the number of the signal."""
    world.stop()
    clock, signals = [0.0], list[tuple[float, str, int]]()

    class Quiet:
        def signal(self, name: str, number: int) -> None:
            signals.append((clock[0], name, number))

    runner = JobRunner(world.site.home, BorrowedLedger(world.site.home), open_log(world.folder / "log"))
    patch.setattr(job_runner.time, "monotonic", lambda: clock[0])
    patch.setattr(job_runner, "longest_wait", lambda _: 61.0 if clock[0] < late_until else 0.0)
    runner._supervisor, runner._turned = Quiet(), -1000.0  # type: ignore[assignment]
    for second in range(600):
        clock[0] = float(second)
        runner._hold(found(clock[0]))
    return signals


def at_work(number: int, words: str, state: str = jobs.RUNNING, **more: Any) -> Job:
    return Job(number, tuple(words.split()), "main", (Event(1.0, state),), **more)


def held_s(signals: list[tuple[float, str, int]], name: str) -> float:
    """How long one was held, and it is not any more."""
    mine = [(at, number) for at, who, number in signals if who == name]
    assert [number for _, number in mine] == [signal.SIGSTOP, signal.SIGCONT] * (len(mine) // 2)
    return sum(at if number == signal.SIGCONT else -at for at, number in mine)


def test_images_that_wait_hold_a_job_half_of_the_time_at_most(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = at_work(3, "train generator", jobs.QUEUED)
    found = [at_work(1, "release ksame"), at_work(2, "ingest"), waits, at_work(4, "part run-1", jobs.QUEUED)]
    signals = signals_of(world, monkeypatch, 400.0, lambda _: found)
    assert {name for _, name, _ in signals} == {"1"}
    assert 150 < held_s(signals, "1") <= 200 + 11  # of 400 seconds; a turn begins as soon as images are late


def test_a_round_holds_jobs_of_its_processors_in_turns_and_is_never_held_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is waited for elsewhere; a job that is held for long could keep a lock of the vault from everybody."""

    def found(now: float) -> list[Job]:
        part = at_work(1, "part run-1", jobs.RUNNING if now < 100.0 or 200.0 <= now < 203.0 else jobs.QUEUED)
        return [part, at_work(2, "train generator"), at_work(3, "release privimage", cuda=True), at_work(4, "ingest")]

    signals = signals_of(world, monkeypatch, 0.0, found)
    stopped = {name for _, name, number in signals if number == signal.SIGSTOP}
    assert stopped == {"2"}, "on an accelerator it is in nobody's way"
    assert 50 <= held_s(signals, "2") <= 50 + 14  # of the long round, and all of the short one
    assert (200.0, "2", signal.SIGSTOP) in signals
