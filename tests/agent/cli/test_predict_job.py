"""P15: a prediction as a job. What names its patient is in that job alone, sealed, and gone at its end."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pydicom
import pytest

from agent.errors import CommandError
from agent.event_log import open_log
from agent.ingest.context import open_ingest
from agent.service import jobs
from agent.service.commands import site_acts
from agent.service.job_outputs import result_names, result_place
from agent.service.job_rules import JobSettings
from agent.service.job_runner import JobRunner
from agent.service.jobs import Job, JobStore
from agent.service.ledger_access import BorrowedLedger
from agent.service.prediction_jobs import check_words, prepare
from agent.service.site import site_app
from agent.storage import projects
from agent.storage.site_directory import MAIN, SiteDirectory
from protos.service.control_client import ServiceRefusedError
from protos.service.control_socket import control_socket
from tests.support.exported_models import Exported, appoint
from tests.support.ingest_site import one_reader, typed
from tests.support.ledger_world import Person
from tests.support.pacs import orthanc
from tests.support.predicted_study import NAME, PERSON, clean_site, made, site, study

__all__ = ["clean_site", "made", "one_reader", "site", "study"]  # fixtures
pytestmark = pytest.mark.timeout(1200)  # processes that import torch, on a machine that may be busy

UID = "1.2.826.0.1.77777.4242"
NO_UID = "1.2.826.0.1.77777.9999"  # of a study that nobody has
PATIENCE_S = 400.0
PACS = '\n[pacs.ward]\naet = "TESTPACS"\nhost = "127.0.0.1"\nport = {}\ncalling = "LAZARET"\n'


class World:
    """A hospital with its archive, and a service that can be started."""

    def __init__(self, home: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home, self.model, self.capsys, self.store = home, model, capsys, JobStore(home)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        found, log = SiteDirectory(self.home), open_log(self.home / "agent.log")
        ledger = BorrowedLedger(found)
        with control_socket(self.home, site_app(found, ledger, log), log), JobRunner(found, ledger, log):
            yield

    def type(self, *words: str) -> tuple[int, str, str]:
        return typed(self.capsys, self.home, *words)

    def queue(self, uid: str = UID, *more: str) -> Job:
        said = self.type("predict", str(self.model), "--study", uid, "--from", "ward", "--detach", *more)
        assert said[0] == 0, said
        return self.store.all()[-1]

    def wait(self, number: int, reached: Callable[[Job], bool]) -> Job:
        end = time.monotonic() + PATIENCE_S
        while not reached(job := self.store.read(number)):
            assert time.monotonic() < end, job
            time.sleep(0.05)
        return job

    def ended(self, number: int) -> Job:
        return self.wait(number, lambda job: job.state in jobs.ENDED)

    def at_work(self, number: int) -> int:
        """The process of the job, when it has said something."""
        folder = self.store.folder(number)
        said = folder / "said.jsonl"
        self.wait(number, lambda job: job.state == jobs.RUNNING and said.exists() and said.stat().st_size > 0)
        return int((folder / "pid").read_text())

    def started_again(self, number: int) -> None:
        """Until a second process of the job runs: what the first one wrote to its files is gone by then."""
        pid = self.store.folder(number) / "pid"
        self.wait(number, lambda job: job.attempts == 2 and pid.exists())

    def in_clear(self) -> list[str]:
        """The files of the home that hold something of the patient, or of a study, in clear."""
        words = [one.encode() for one in (UID, NO_UID, PERSON, NAME)]
        found = []
        for folder, _, names in os.walk(self.home):
            for path in (Path(folder) / name for name in names):
                with contextlib.suppress(FileNotFoundError):  # a service is at work, and has deleted it meanwhile
                    if path.is_file() and any(word in path.read_bytes() for word in words):
                        found.append(str(path))
        return found

    def keep_result(self, job: Job) -> None:
        """As the job's process seals one."""
        with open_ingest(SiteDirectory(self.home), MAIN) as way:
            way.vault.place(result_place(job, "predictions.csv")).write(PERSON.encode())

    def left(self, job: Job) -> list[str]:
        """What is left of the patient: in clear anywhere, or sealed in the job or the vault."""
        folder = self.store.folder(job.number)
        with open_ingest(SiteDirectory(self.home), MAIN) as way:
            results = result_names(way.vault, job)
        return [*self.in_clear(), *(name for name in ("in", "out") if (folder / name).exists()), *results]


@pytest.fixture
def offline(site: Path, made: Exported, capsys: pytest.CaptureFixture[str]) -> World:
    """Without an archive that answers: what is queued does not run."""
    (site / "ingest.toml").write_text((site / "ingest.toml").read_text() + PACS.format(11999))
    return World(site, made.folder, capsys)


@pytest.fixture
def world(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[World]:
    for path in study.iterdir():
        one = pydicom.dcmread(path)
        one.StudyInstanceUID = UID
        one.save_as(path)
    with orthanc(tmp_path / "orthanc") as pacs:
        pacs.store(sorted(study.iterdir()))
        (site / "ingest.toml").write_text((site / "ingest.toml").read_text() + PACS.format(pacs.dicom_port))
        yield World(site, made.folder, capsys)


def test_it_is_done_in_its_turn_and_its_results_are_fetched_once(world: World, tmp_path: Path) -> None:
    first, second = world.queue(), world.queue(NO_UID)
    assert first.words[:6] == ("predict", "in/model", "--study", "sealed", "--from", "ward")
    assert (first.lane, first.cuda, first.price, world.in_clear()) == (jobs.PREDICTION, False, {}, [])
    status, said, _ = world.type("jobs", "show", "1")
    assert (status, UID in said, "predict" in said) == (0, False, True)
    with world.serving():
        assert world.ended(1).state == jobs.DONE
        refused = world.ended(2)
        assert (refused.state, refused.reason.partition(":")[0]) == (jobs.REFUSED, "ward")
        assert "no MR series of that study" in refused.reason
        status, said, _ = world.type("jobs", "follow", "1")
        assert (status, "sealed for `jobs fetch`: 1 predictions" in said) == (0, True)
    assert (world.in_clear(), world.left(second)) == ([], [])
    status, _, err = world.type("jobs", "fetch", "1", "--out", str(world.home / "inside"))
    assert (status, "the agent's own" in err) == (1, True)
    assert world.type("jobs", "fetch", "1", "--out", str(tmp_path / "answers"))[0] == 0
    assert sorted(path.name for path in (tmp_path / "answers").iterdir()) == [
        "predictions.html", "segmentation-0001.dcm",
    ]  # fmt: skip
    seg = pydicom.dcmread(tmp_path / "answers" / "segmentation-0001.dcm")
    assert (seg.PatientID, seg.StudyInstanceUID) == (PERSON, UID)
    assert world.left(first) == []
    status, _, err = world.type("jobs", "fetch", "1", "--out", str(tmp_path / "again"))
    assert (status, "they were fetched" in err) == (1, True)
    status, _, err = world.type("jobs", "retry", "2")
    assert (status, "is gone with its end" in err) == (1, True)


def test_a_killed_job_goes_on_and_one_that_is_killed_again_and_again_ends(world: World) -> None:
    with world.serving():
        killed = world.queue()
        os.kill(world.at_work(killed.number), signal.SIGKILL)
        world.started_again(killed.number)
        assert world.in_clear() == []
        assert world.ended(killed.number).state == jobs.DONE
        lost = world.queue()
        pid = world.at_work(lost.number)
        world.store.change(lost.number, lambda job: job.now(jobs.RUNNING, lost=9))
        os.kill(pid, signal.SIGKILL)
        ended = world.ended(lost.number)
    assert (ended.state, "type `predict ... --detach` again" in ended.reason) == (jobs.FAILED, True)
    assert world.left(ended) == []


def test_what_a_killed_service_left_is_gone_when_it_is_up_again(world: World) -> None:
    queued = world.queue()
    folder = world.store.folder(queued.number)
    world.store.change(queued.number, lambda job: job.now(jobs.RUNNING, attempts=1))
    (folder / "out").mkdir()
    (folder / "out" / "torn").write_text(PERSON)  # nothing writes that: whatever did
    (folder / "stderr").write_text(f"a library quotes {PERSON}\nrefused: a sentence\n")
    with world.serving():
        world.started_again(queued.number)
        assert world.in_clear() == []
        (folder / "stderr").write_text(f"a library quotes {PERSON}\n")
        assert world.ended(queued.number).state == jobs.DONE
    assert world.in_clear() == []


def test_a_cancelled_one_leaves_nothing_whether_it_had_begun_or_not(world: World) -> None:
    waits = world.queue()
    assert (world.store.folder(waits.number) / "in" / "study.sealed").exists()
    assert world.type("jobs", "cancel", str(waits.number))[0] == 0
    assert world.left(world.store.read(waits.number)) == []
    with world.serving():
        works = world.queue()
        world.at_work(works.number)
        assert world.type("jobs", "cancel", str(works.number))[0] == 0
        ended = world.ended(works.number)
    assert (ended.state, world.left(ended)) == (jobs.CANCELLED, [])


def test_results_that_nobody_fetches_are_dropped_with_their_age_and_with_any_opt_out(site: Path) -> None:
    home, store = SiteDirectory(site), JobStore(site)
    words, event = ("predict", "in/model", "--vault", "--out", "sealed"), jobs.Event(time.time(), jobs.DONE)
    made = store.add(Job(0, words, MAIN, (event,)))
    runner = JobRunner(home, BorrowedLedger(home), open_log(site / "agent.log"))
    with open_ingest(home, MAIN) as way:
        kept = way.vault.place(result_place(made, "predictions.csv"))
        kept.write(PERSON.encode())
        runner._settings = JobSettings(disk_share=1e-12)  # its record alone is more than that
        runner._sweep()
        assert kept.read() is not None, "the newest is swept by its age alone"
        store.change(made.number, lambda job: replace(job, history=(jobs.Event(1.0, jobs.DONE),)))
        runner._sweep()
        assert kept.read() is None
        assert store.read(made.number).state == jobs.DONE, "the newest keeps its number from being given again"
        kept.write(PERSON.encode())
        projects.opt_out(home, "0" * 32)  # nobody that is known here
        assert kept.read() is None


def test_the_uid_is_read_from_standard_input_where_no_command_line_shows_it(
    offline: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{UID}\n{NAME}\n"))
    job, asked = offline.queue("-"), argparse.Namespace(study="sealed")
    prepare(SiteDirectory(offline.home), offline.store.folder(job.number), job, asked)
    assert (asked.study, offline.in_clear()) == (UID, [])
    words = ["predict", str(offline.model), "--study", "-", "--from", "ward", "--out", str(tmp_path / "out")]
    status, _, err = offline.type(*words)
    assert (status, "has digits and dots" in err, NAME in err) == (1, True, False)


def test_of_a_prediction_nothing_comes_back_with_a_backup(offline: World, tmp_path: Path) -> None:
    """Neither one that was cancelled since, nor results that were fetched since, nor what a queued one was asked."""
    done, cancelled, queued = offline.queue(), offline.queue(), offline.queue()
    offline.store.change(done.number, lambda job: job.now(jobs.DONE, attempts=1))
    offline.keep_result(done)
    assert offline.type("backup", str(tmp_path / "backup"))[0] == 0
    assert not list((tmp_path / "backup").rglob("*study.sealed*"))
    assert offline.type("jobs", "fetch", "1", "--out", str(tmp_path / "answers"))[0] == 0
    assert offline.type("jobs", "cancel", str(cancelled.number))[0] == 0
    offline.home.rename(tmp_path / "lost")
    keys = str(tmp_path / "lost" / "keys")
    assert offline.type("restore", str(tmp_path / "backup"), "--keys", keys)[0] == 0
    for job in (cancelled, queued):
        back = offline.store.read(job.number)
        assert (back.state, "type `predict ... --detach` again" in back.reason) == (jobs.FAILED, True)
        assert offline.left(back) == []
    assert offline.left(done) == []
    status, _, err = offline.type("jobs", "fetch", "1", "--out", str(tmp_path / "again"))
    assert (status, "dropped after an opt-out, a restore or keep_days" in err) == (1, True)


def test_an_archive_that_is_away_is_asked_again_later_and_not_for_ever(offline: World) -> None:
    with offline.serving():
        queued = offline.queue()
        waits = offline.wait(queued.number, lambda job: job.hindered == 1)
        assert (waits.state, waits.not_before > time.time()) == (jobs.INTERRUPTED, True)
        assert "ward: nothing answers" in waits.reason
        assert offline.left(waits) == ["in"]
        offline.store.change(queued.number, lambda job: job.now(jobs.QUEUED, hindered=8, not_before=0.0))
        ended = offline.ended(queued.number)
    assert (ended.state, "type `predict ... --detach` again" in ended.reason) == (jobs.FAILED, True)
    assert offline.left(ended) == []


def test_a_cancel_drops_what_a_killed_service_left_of_the_results(offline: World) -> None:
    job = offline.queue()
    offline.store.change(job.number, lambda known: known.now(jobs.INTERRUPTED, attempts=1))
    offline.keep_result(job)
    assert offline.type("jobs", "cancel", str(job.number))[0] == 0
    assert (offline.store.read(job.number).state, offline.left(job)) == (jobs.CANCELLED, [])


def test_what_was_queued_is_checked_again_when_its_turn_comes(offline: World) -> None:
    """The policy was tightened; the copy of the model was changed; another job's study was put in."""
    tightened, swapped, mixed = offline.queue(), offline.queue(), offline.queue()
    model = offline.store.folder(swapped.number) / "in" / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-4] + bytes(4))
    sealed = [offline.store.folder(job.number) / "in" / "study.sealed" for job in (tightened, mixed)]
    sealed[1].write_bytes(sealed[0].read_bytes())
    policy = offline.home / "policy.toml"
    before = policy.read_text()
    policy.write_text(before.replace('levels = ["A", "B"]', 'levels = ["B"]'))
    with offline.serving():
        first = offline.ended(tightened.number)
        policy.write_text(before)
        found = [first, *(offline.ended(job.number) for job in (swapped, mixed))]
    for job, why in zip(found, ("would not have approved", "SHA256SUMS", "is gone: type"), strict=True):
        assert (job.state, why in job.reason, offline.left(job)) == (jobs.REFUSED, True, []), job


def test_an_end_that_forgets_nothing_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule, broken on purpose: the tests above would be red."""
    monkeypatch.setattr(jobs, "_forget_patients", lambda _folder: None)
    waits = world.queue()
    assert world.type("jobs", "cancel", str(waits.number))[0] == 0
    assert world.left(waits) == ["in"]
    (world.store.folder(waits.number) / "stderr").write_text(UID)
    assert [Path(path).name for path in world.in_clear()] == ["stderr"]


def test_a_record_that_would_name_a_patient_is_refused(world: World) -> None:
    event = {"project": MAIN, "by": "x", "price": {}, "cuda": False, "key": "k"}
    with world.serving(), site_acts(world.home, lambda *_: None) as do:
        for words in (
            ["in/model", "--study", UID], ["in/model", f"--study={UID}"], ["in/model", "--stud", UID], [], [NAME],
            ["in/model", "--folder", NAME], ["in/model", "--out", NAME], [NAME, "--vault"], ["in/model", "--from"],
            ["in/model", "--from", NAME], ["in/model", "--project", PERSON], ["in/model", "--device", NAME],
        ):  # fmt: skip
            with pytest.raises(ServiceRefusedError, match="which seals what names a patient"):
                do("jobs/add", job={"words": ["predict", *words], **event})
            with pytest.raises(CommandError):
                check_words(["predict", *words])
    assert (world.store.all(), world.in_clear()) == ([], [])


def test_what_cannot_be_a_job_is_refused_and_the_officer_is_asked_at_once(world: World, tmp_path: Path) -> None:
    words = ["predict", str(world.model), "--detach"]
    asked = ["--study", UID, "--from", "ward"]
    for more, sentence in (
        (["--folder", str(tmp_path / "study")], "a folder is read by whoever types `predict --folder`"),
        ([*asked, "--send", "ward"], "--send: a job sends nothing"),
        (["--study", UID, "--from", "none"], "no [pacs.none]"),
        (["--study", NAME, "--from", "ward"], "has digits and dots"),
    ):
        status, _, err = world.type(*words, *more)
        assert (status, sentence in err) == (1, True), err
    assert [path.name for path in world.store.root.iterdir()] == []
    policy = world.home / "policy.toml"
    policy.write_text(policy.read_text().replace('levels = ["A", "B"]', 'levels = ["B"]'))
    status, _, err = world.type(*words, *asked)
    assert (status, "approved by compliance" in err, world.store.all()) == (1, True, [])
    appoint(world.home, Person("dpo", "compliance"))
    key = tmp_path / "dpo.key"
    signs = ["--person", "dpo", "--key", str(key), "--yes"]
    for wrong in (["--study", NAME, "--from", "ward"], ["--study", UID, "--from", "none"]):
        assert world.type(*words, *wrong, *signs)[0] == 1
        assert "approved by compliance" in world.type(*words, *asked)[2], "nothing was signed"
    assert world.type(*words, *asked, *signs)[0] == 0
    (queued,) = world.store.all()
    assert "--person" not in queued.words
    secret = key.read_bytes()
    assert not [path for path in world.home.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert world.type("jobs", "cancel", str(queued.number))[0] == 0
