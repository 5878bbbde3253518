"""The record of a site's jobs: durable changes, what an end means, progress, and what is said last."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.service import jobs
from agent.service.jobs import Event, Fate, Job, JobRecordError, JobStateError, JobStore, NoSuchJobError
from protos.common import durable_files

GRANT = "grant-0"


def job(*words: str, state: str = jobs.QUEUED, **more: Any) -> Job:
    return Job(0, words or ("release", "ksame"), "main", (Event(1.0, state),), **more)


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path)


# -- the record


def test_jobs_have_numbers_in_order_and_read_back_as_they_were(store: JobStore) -> None:
    price = {"amount": 1, "left": 2}
    first = store.add(job(grant=GRANT, price=price, cuda=True, key="k"))
    second = store.add(job("train", "generator"))
    assert (first.number, second.number) == (1, 2)
    assert [store.read(1), store.read(2)] == store.all() == [first, second]
    assert (first.kind, first.lane, second.kind, second.lane) == (
        "release ksame",
        "making",
        "train generator",
        "training",
    )
    assert store.folder(1).stat().st_mode & 0o77 == 0


def test_the_same_request_makes_no_second_job(store: JobStore) -> None:
    first = store.add(job(key="once"))
    assert store.add(job("tune", key="once")) == first
    assert len(store.all()) == 1


def test_files_that_were_put_down_before_come_along(store: JobStore) -> None:
    (store.fresh_folder("abc") / "in" / "0-x").write_bytes(b"network")
    added = store.add(job(), "abc")
    assert (store.folder(added.number) / "in" / "0-x").read_bytes() == b"network"
    for none in ("abc", "../1", "\0"):
        with pytest.raises(JobRecordError, match="type the command again"):
            store.add(job(), none)
    assert len(store.all()) == 1


def test_a_number_is_never_given_twice(store: JobStore) -> None:
    numbers = [store.add(job(state=jobs.DONE)).number for _ in range(3)]
    with pytest.raises(JobStateError, match="it stays"):
        store.forget(3)
    store.forget(2)
    store.forget(1)
    assert [*numbers, store.add(job()).number] == [1, 2, 3, 4]
    with pytest.raises(NoSuchJobError, match="there is no job 2: `jobs list` shows them"):
        store.read(2)


def test_a_number_is_not_given_again_after_its_folder_was_deleted_or_the_record_of_numbers_was_lost(
    store: JobStore,
) -> None:
    shutil.rmtree(store.folder(store.add(job()).number))
    assert store.add(job()).number == 2
    for lost in ("", "no number"):
        (store.root / "last").write_text(lost)
        number = store.add(job(), elsewhere=lambda: 7).number
    assert number == 9
    shutil.rmtree(store.root)
    assert store.add(job(), elsewhere=lambda: 30).number == 31


def test_what_has_not_ended_is_not_forgotten(store: JobStore) -> None:
    for state in jobs.STATES:
        added = store.add(job(state=state))
        store.add(job())
        if state in jobs.ENDED:
            store.forget(added.number)
        else:
            with pytest.raises(JobStateError):
                store.forget(added.number)


def test_two_at_once_change_one_after_the_other(store: JobStore) -> None:
    store.add(job())

    def more() -> None:
        for _ in range(50):
            store.change(1, lambda known: replace(known, attempts=known.attempts + 1))

    threads = [threading.Thread(target=more) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read(1).attempts == 200


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"[]",
        b'{"words": []}',
        b'{"history": 3, "words": []}',
        b'{"history": [{"at": 1, "state": "queued"}], "words": [], "project": "main"}',
        b'{"history": [], "words": ["tune"], "project": "main"}',
        b'{"history": [{"at": 1, "state": "queued"}], "words": ["tune"], "project": "main", "priority": "first"}',
    ],
)
def test_a_broken_record_is_named_and_stops_no_other(store: JobStore, broken: bytes) -> None:
    store.add(job())
    store.add(job())
    (store.folder(1) / "job.json").write_bytes(broken)
    with pytest.raises(JobRecordError, match=r"jobs/1/job\.json cannot be read: move the folder away"):
        store.read(1)
    assert ([one.number for one in store.all()], store.broken()) == ([2], [1])
    assert store.add(job()).number == 3


@pytest.mark.parametrize("act", ["add", "change", "forget"])
def test_a_kill_at_any_call_of_the_disk_leaves_the_state_before_or_after(
    store: JobStore, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that writes is the last one once; what is found then is one of two states, and the next act works."""
    acts: dict[str, Callable[[], object]] = {
        "add": lambda: store.add(job("tune")),
        "change": lambda: store.change(1, lambda known: known.now(jobs.DONE)),
        "forget": lambda: store.forget(1),
    }
    calls = [(os, name) for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")]
    calls += [(durable_files.os, "fsync"), (os, "open")]
    for last in itertools.count(1):
        if store.root.exists():
            jobs.shutil.rmtree(store.root)
        store.add(job(state=jobs.DONE if act == "forget" else jobs.QUEUED))
        store.add(job())
        left, before = last, [(one.number, one.state) for one in store.all()]

        def dies(real: Callable[..., Any]) -> Callable[..., Any]:
            def instead(*told: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if not left:
                    raise KeyboardInterrupt
                return real(*told, **named)

            return instead

        with monkeypatch.context() as patch:
            for owner, name in calls:
                patch.setattr(owner, name, dies(getattr(owner, name)))
            try:
                acts[act]()
                ended = True
            except KeyboardInterrupt:
                ended = False
        found = [(one.number, one.state) for one in store.all()]
        assert store.broken() == []
        if ended:
            assert last > 3, "kills all along"
            assert found != before
            return
        after = {"add": [*before, (3, jobs.QUEUED)], "change": [(1, jobs.DONE), *before[1:]], "forget": before[1:]}
        assert found in (before, after[act])
        given = int((store.root / "last").read_bytes())  # a kill may skip a number; none is given twice
        assert given in ((2, 3) if act == "add" else (2,))
        assert given >= max(number for number, _ in found)
        assert store.add(job()).number == given + 1
        store.sweep(older_than_s=-1.0)
        assert {path.name for path in store.root.iterdir()} == {"last", *(str(one.number) for one in store.all())}


# -- what an end means


STATUSES = (None, -15, -9, 0, 1, 2, 70, jobs.BUSY)
GRANTS = ("", "held", "spent", "freed")


def every_fate() -> list[Fate]:
    rest = itertools.product(STATUSES, GRANTS, *[(False, True)] * 4)
    return [
        Fate(status, "said", grant, kept, waits, noted, admitted)
        for status, grant, kept, waits, noted, admitted in rest
    ]


def test_every_end_leads_to_one_state_and_a_reason_where_it_does_not_speak_for_itself() -> None:
    for fate, wanted, grant in itertools.product(every_fate(), ("", jobs.CANCELLED, jobs.SPENT), ("", GRANT)):
        state, reason = jobs.outcome(job(state=jobs.RUNNING, wanted=wanted, grant=grant), fate)
        assert state in jobs.ENDED | {jobs.MADE, jobs.INTERRUPTED}
        assert bool(reason) == (state not in (jobs.DONE, jobs.CANCELLED))
        if grant and fate.admitted:
            assert state == jobs.DONE
        if grant and fate.kept and not fate.admitted:
            assert state == (jobs.MADE if fate.waits else jobs.INTERRUPTED)


def test_a_held_grant_is_let_go_only_where_a_person_said_so_or_nothing_can_go_on_under_it() -> None:
    """A kill, a full disk or an internal fault never costs a site the price that it has paid."""
    for fate in every_fate():
        if fate.grant != "held" or fate.kept or fate.admitted:
            continue
        state, _ = jobs.outcome(job(state=jobs.RUNNING, grant=GRANT), fate)
        assert (state in jobs.ENDED) <= (not fate.noted or fate.status == 0)
        assert jobs.outcome(job(state=jobs.RUNNING, grant=GRANT, wanted=jobs.SPENT), fate)[0] == jobs.CANCELLED
        assert jobs.outcome(job(state=jobs.RUNNING, grant=GRANT, wanted=jobs.CANCELLED), fate)[0] == jobs.INTERRUPTED


@pytest.mark.parametrize(
    ("fate", "expected", "again"),
    [
        (Fate(None, "", "held", noted=True), jobs.INTERRUPTED, 0.0),
        (Fate(-9, "", "held", noted=True), jobs.INTERRUPTED, 0.0),
        (Fate(jobs.BUSY, "no answer", "held", noted=True), jobs.INTERRUPTED, 60.0),
        (Fate(1, "the images have changed", "held", noted=True), jobs.INTERRUPTED, None),
        (Fate(70, "internal fault", "held", noted=True), jobs.INTERRUPTED, None),
        (Fate(jobs.BUSY, "busy"), jobs.INTERRUPTED, 60.0),
        (Fate(1, "cohort: too small"), jobs.REFUSED, None),
        (Fate(1, "budget: none is left", "freed"), jobs.REFUSED, None),
        (Fate(1, "refused by review", "spent"), jobs.REFUSED, None),
        (Fate(70, "", "spent"), jobs.FAILED, None),
        (Fate(-9, "", "spent"), jobs.FAILED, None),
        (Fate(1, "", "held"), jobs.FAILED, None),
        (Fate(1, "", "held", kept=True, waits=True, noted=True), jobs.MADE, None),
        (Fate(jobs.BUSY, "no answer", "held", kept=True, noted=True), jobs.INTERRUPTED, 60.0),
        (Fate(1, "the policy of today", "held", kept=True, noted=True), jobs.INTERRUPTED, None),
        (Fate(None, "", "spent", admitted=True), jobs.DONE, None),
        (Fate(2, "usage"), jobs.FAILED, None),
    ],
)
def test_of_a_release(fate: Fate, expected: str, again: float | None) -> None:
    running = job(state=jobs.RUNNING, grant=GRANT, attempts=1)
    state, _ = jobs.outcome(running, fate)
    assert (state, jobs.when_again(running, state, fate)) == (expected, again)


def test_what_is_ended_from_outside_again_and_again_waits_for_a_person() -> None:
    found = [jobs.when_again(job(attempts=n + 1, lost=n), jobs.INTERRUPTED, Fate(-9, "")) for n in range(5)]
    assert found == [0.0, 0.0, 0.0, None, None]


def test_who_does_not_answer_is_asked_again_ever_later_up_to_an_hour() -> None:
    busy = Fate(jobs.BUSY, "")
    found = [jobs.when_again(job(hindered=n), jobs.INTERRUPTED, busy) for n in range(9)]
    assert found == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]
    names = [jobs.when_again(job("predict", hindered=n), jobs.INTERRUPTED, busy) for n in range(9)]
    assert names == [*found[:8], None], "a patient is not kept for ever"


# -- what it says


def said(folder: Path, *lines: dict[str, Any] | str) -> None:
    told = [
        line if isinstance(line, str) else json.dumps({"done": 0, "of": 0, "detail": "", **line}) for line in lines
    ]
    (folder / "said.jsonl").write_text("\n".join(told) + "\n")


def test_progress_is_the_last_line_and_time_left_follows_from_the_pace_of_the_stage(tmp_path: Path) -> None:
    assert jobs.progress_of(tmp_path) == jobs.JobProgress()
    said(tmp_path, {"at": 1.0, "step": "read"})
    assert jobs.progress_of(tmp_path) == jobs.JobProgress("read")
    steps = [{"at": 10.0 + n, "step": "make", "detail": f"fine-tuning: {n * 10} of 200"} for n in range(6)]
    said(tmp_path, {"at": 1.0, "step": "make", "detail": "pre-training: 5 of 9"}, *steps)
    assert jobs.progress_of(tmp_path) == jobs.JobProgress("make", "fine-tuning: 50 of 200", 50, 200, 15.0)
    said(tmp_path, *steps[:1], {**steps[0], "at": 11.0, "detail": "fine-tuning: 9 of 200"})
    assert jobs.progress_of(tmp_path).left_s is None  # too early to say
    said(
        tmp_path,
        {"at": 1.0, "step": "reading", "done": 10, "of": 40},
        {"at": 3.0, "step": "reading", "done": 20, "of": 40},
    )
    assert jobs.progress_of(tmp_path).left_s == 4.0


@given(st.binary(max_size=200))
def test_whatever_was_half_written_progress_is_read(raw: bytes) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        whole = json.dumps({"at": 1.0, "step": "read", "detail": "x", "done": 0, "of": 0}).encode()
        (Path(folder) / "said.jsonl").write_bytes(whole + b"\n" + raw.replace(b"\n", b" "))
        assert jobs.progress_of(Path(folder)).step == "read"


ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([10**400, -1, 1 << 53])
)
LINES = st.fixed_dictionaries(
    {},
    optional={
        "at": ANYTHING,
        "step": ANYTHING,
        "detail": ANYTHING | st.builds("{}: {} of {}".format, st.text(), st.integers(), st.integers()),
        "done": ANYTHING,
        "of": ANYTHING,
    },
)


@given(
    st.lists(LINES | st.just({"at": 1.0, "step": "make", "detail": f"a: {10**400} of {10**400}", "done": 0, "of": 0}))
)
def test_whatever_stands_in_the_file_progress_is_read_and_told(lines: list[dict[str, Any]]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        said(Path(folder), *lines, "[" * 10_000)
        at = jobs.progress_of(Path(folder))
        assert jobs.standing({"progress": asdict(at), "reason": "", "memory_bytes": 0}) is not None


def test_the_last_sentence_is_that_of_the_errors_else_the_findings_of_a_verdict(tmp_path: Path) -> None:
    assert jobs.last_words(tmp_path) == ""
    (tmp_path / "stderr").write_text("")
    for printed, expected in (
        ("read\nrefused:\n  budget: none is left\n  k: too small\n", "budget: none is left; k: too small"),
        ('{"findings": [{"rule": "budget", "detail": "none is left"}]}\n', "budget: none is left"),
        ("wrote page.html\n", "wrote page.html"),
        ("", ""),
    ):
        (tmp_path / "stdout").write_text(printed)
        assert jobs.last_words(tmp_path) == expected
    (tmp_path / "stderr").write_text("refused: no project of that name\na bar 3/3\n\n")
    assert jobs.last_words(tmp_path) == "no project of that name"
    (tmp_path / "stderr").write_text("UserWarning: Invalid value for VR UI: '1.2.PATIENT'\n")  # P14
    (tmp_path / "stdout").write_text("refused:\n  budget: none is left\n")
    assert jobs.last_words(tmp_path) == "budget: none is left"


def test_a_long_output_is_read_from_its_end(tmp_path: Path) -> None:
    (tmp_path / "stderr").write_text("x" * 300_000 + "\nrefused: the end\n")
    assert jobs.last_words(tmp_path) == "the end"
