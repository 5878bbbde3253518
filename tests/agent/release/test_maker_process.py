"""A release is made in a process that has its patients' images and nothing else; and what goes wrong there."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agent.domain import Cohort, Image, Patient, SyntheticSet, Update
from agent.dp.noise import SystemEntropy
from agent.errors import CohortTooSmallError, DivergedError, SiteStorageError
from agent.evaluation.k_selection import Menu
from agent.evaluation.released_set import Effort, Subject
from agent.evaluation.utility import Recipe
from agent.mechanisms.common.workspace import Workspace, is_stage
from agent.mechanisms.distillation.teacher_student import Distilled
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from agent.mechanisms.federated.round_training import RoundTraining
from agent.mechanisms.federated.task_training import labelled_examples
from agent.mechanisms.ksalsa.mechanism import KSalsa
from agent.mechanisms.ksalsa.style_alignment import Alignment
from agent.mechanisms.registry import MECHANISMS
from agent.microaggregation.released_clusters import ReleasedCluster
from agent.models.features.extractors import RandomFeatures
from agent.models.image_tensors import to_bytes
from agent.models.training_loop import HEADER_BYTES
from agent.release import maker_process, sealed_making
from agent.release.cluster_vetting import Comparison, VettingRequest
from agent.release.held_out_evaluation import _evaluated
from agent.release.k_search import measure
from agent.release.maker_errors import MakerFaultError
from agent.release.maker_process import MakerEndedError, MakerProcess
from agent.release.maker_values import Result, pack
from agent.release.pipeline import MemoryExhaustedError, release_synthetic
from agent.release.ports import run_here
from policies.tasks.evaluation import EvaluationPlan
from protos.common.errors import LazaretError, WorkerError
from protos.federation.messages import MAX_PARAMETERS
from protos.operations.confinement import REQUIRED, landlock_abi
from protos.operations.pipe_messages import send
from tests.support import small_distillation
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.memory_place import MemoryPlace
from tests.support.networks import codec, seen_again
from tests.support.site_world import ksame, site_world
from tests.support.small_mechanisms import (
    COHORT,
    DIGITS,
    FEDERATED,
    MASKED,
    PRIVATE,
    SET_RELEASES,
    digit_patients,
    in_parts,
)
from tests.support.verifiers import chests, demo_vetting

CONFINED = pytest.mark.skipif(not landlock_abi(), reason="this kernel has no Landlock")
ROOT = Path(__file__).resolve().parents[3]
HOSTILE = '''
import os, socket, subprocess, time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from agent.errors import CohortTooSmallError, DivergedError

@dataclass(frozen=True)
class Placed:
    device: str

class Tries:
    """Stands for a library that has turned against the hospital."""
    places = ("known",)
    max_checkpoint_bytes = 70_000
    def __init__(self, what, *told):
        self.what, self.told = what, told
    def run(self, cohort, rng=None, bench=None) -> Any:
        return getattr(self, self.what)(cohort, bench)
    def reach(self, cohort, bench):
        home, port, inode = self.told
        ways = {
            "files": lambda: os.open(home + "/sign.key", os.O_RDONLY),
            "listing": lambda: os.listdir(home),
            "writing": lambda: os.open("/tmp/it", os.O_WRONLY | os.O_CREAT),
            "socket": lambda: socket.socket(socket.AF_UNIX).connect(home + "/control.sock"),
            "network": lambda: socket.create_connection(("127.0.0.1", port)),
            "program": lambda: subprocess.run(["/bin/true"]),
            "process": os.fork,
            "signal": lambda: os.kill(os.getppid(), 9),
            "parent": lambda: os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY),
            "descriptors": lambda: [n for n in range(200) if _inode(n) == inode][0],
            "environment": lambda: os.environ["LAZARET_SECRET"],
        }
        reached = []
        for name, way in ways.items():
            try:
                way()
            except (OSError, KeyError, IndexError):
                continue
            reached.append(name)
        return tuple(reached)
    def raises(self, cohort, bench):
        raise {"ours": CohortTooSmallError(), "told": DivergedError("at step 7: loss not all finite"),
               "memory": MemoryError(), "other": ValueError("Patient Smith")}[self.told[0]]
    def fills(self, cohort, bench, held=[]):
        try:
            while True: held.append(bytearray(1 << 20))
        except MemoryError:
            raise ValueError("a library has a class of its own for it")
    def says(self, cohort, bench):
        os.write(self.told[0], b"\\0\\0\\0\\2{}")
    def floods(self, cohort, bench):
        for turn in range(500):
            for stage in ("teacher", "student", f"student {turn % 20}", f"Smith {turn}", "\x1b[2J" + "x" * 10_000):
                bench.say(stage, turn % 2 + 1, 2)
    def closes(self, cohort, bench):
        os.close(bench.say.__self__.sink.fileno())
        while True: time.sleep(1)
    def ends(self, cohort, bench):
        os._exit(self.told[0])
    def waits(self, cohort, bench):
        bench.say("teacher", os.getpid(), 1 << 32)
        while True: pass
    def keeps(self, cohort, bench):
        place = bench.place(self.told[0])
        before = place.read()
        place.write(b"x" * 70_000)
        return before
    def answers(self, cohort, bench):
        return self.told[0]
    def changes(self, cohort, bench):
        cohort.patients[0].images[0].pixels[:] = 0
        return "changed"

class Turned(Tries):
    """Stands in the place of a network, a codec or a set: what it is asked first, it tries everything."""
    @property
    def asked(self):
        raise ValueError if self.reach(None, None) else CohortTooSmallError
    verifier = codec = labels = asked

def _inode(number):
    try:
        return os.fstat(number).st_ino
    except OSError:
        return 0
'''


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a method of the hostile mechanism in the process of a making."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "hostile_mechanism.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")  # this very tree, wherever else one is installed
    monkeypatch.setenv("LAZARET_SECRET", "a key")
    import hostile_mechanism

    def run(
        what: str, *told: Any, bench: Workspace | None = None, demand: str = "available", given: Any = None
    ) -> Any:
        mechanism = hostile_mechanism.Tries(what, *told)
        return MakerProcess(demand)(mechanism.run, given or COHORT, np.random.default_rng(1), bench or Workspace())

    yield run
    sys.modules.pop("hostile_mechanism", None)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[str, int, int]]:
    """What there is to reach: a home directory, a port, an open file."""
    import socket

    (tmp_path / "sign.key").write_text("a key")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "control.sock"))
        control.listen()
        (tmp_path / "held").write_text("open here, and not over there")
        with (tmp_path / "held").open() as held:
            os.set_inheritable(held.fileno(), True)
            yield str(tmp_path), server.getsockname()[1], os.fstat(held.fileno()).st_ino


@CONFINED
def test_it_reaches_nothing_of_the_site(tries: Callable[..., Any], told: tuple[str, int, int]) -> None:
    assert tries("reach", *told, demand=REQUIRED) == ()


@CONFINED
@pytest.mark.usefixtures("tries")
def test_nor_does_what_vets_searches_or_evaluates(told: tuple[str, int, int]) -> None:
    import hostile_mechanism

    turned, bench = hostile_mechanism.Turned("reach", *told), Workspace()
    picture = (np.zeros((1, 32, 32), np.uint8),)
    for call, *given in (
        (Comparison(turned, False).power, COHORT.patients, 1),
        (Comparison(turned, False).compare, COHORT.patients, picture, ("a",), bench),
        (partial(measure, turned, Menu((5, 8), 5), None), COHORT, np.random.default_rng(1)),
        (partial(_evaluated, turned, None), COHORT, np.random.default_rng(1), bench),
    ):
        with pytest.raises(CohortTooSmallError):
            MakerProcess(REQUIRED)(call, *given)


def test_what_it_is_handed_is_sealed_and_stays_as_it_was(tries: Callable[..., Any]) -> None:
    before = COHORT.patients[0].images[0].pixels.copy()
    assert tries("changes") == "changed"
    assert np.array_equal(COHORT.patients[0].images[0].pixels, before)


def test_memory_that_somebody_could_still_change_is_not_opened(
    tries: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_making, "_SEALS", 0)
    with pytest.raises(WorkerError, match="not sealed"):
        tries("changes")


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A confined process may import what stands for patients and noise in tests; its user is new here."""
    for copied in ("tests/support", "deploy/phantoms"):
        shutil.copytree(ROOT / copied, tmp_path / copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "remodel" and "federated" not in name])
def test_every_mechanism_makes_there_what_it_makes_here(name: str) -> None:
    """Distillation, which takes longest, is not made here too. Its checkpoints must also be of the size it says."""
    release, results = SET_RELEASES[name], []
    runs = (MakerProcess(),) if "distill" in name else (MakerProcess(), run_here)
    for run in runs:
        if not release.public:
            rng = np.random.default_rng(3)
            made, clusters = run(
                release.mechanism.run, seen_again(COHORT) if name == "anonfaces" else COHORT, rng, ()
            )
            results.append((made.images.tobytes(), made.labels, clusters, rng.random()))
            continue
        places, said = defaultdict[str, MemoryPlace](MemoryPlace), list[tuple[object, ...]]()
        bench = Workspace(lambda name, kept=places: kept[name], lambda *told, all_=said: all_.append(told))  # type: ignore[misc]
        distilled = small_distillation.cohort() if "distill" in name else COHORT
        cohort = digit_patients(PRIVATE[:120], DIGITS) if name == "privimage" else distilled
        given = in_parts(COHORT) if name == "model" else cohort
        made = run(release.mechanism.run, given, SystemEntropy(), bench)
        made = made.made if isinstance(made, Distilled) else made
        kept = {place: held.data or b"" for place, held in places.items()}
        assert kept.keys() == {*release.mechanism.places}
        assert all(_tensors(raw) <= release.mechanism.max_checkpoint_bytes - HEADER_BYTES for raw in kept.values())
        lengths = {place: len(raw) for place, raw in kept.items()}
        if name == "model":
            results.append((made.parameters.shape, made.sums.shape, lengths, said))
            continue
        results.append((made.images.shape[1:], len(made.labels) == len(made.images), lengths, said))
    assert results[0] == results[-1]


def _tensors(raw: bytes) -> int:
    """Bytes of a checkpoint beside its names: of a small network, what is left for those would hide a bound."""
    return len(raw) - 8 - int.from_bytes(raw[:8], "little")


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("mechanism", [FEDERATED, MASKED])
def test_a_part_of_a_round_is_there_what_it_is_here(mechanism: Federated | FederatedMasked) -> None:
    given = labelled_examples(mechanism.task, COHORT), mechanism.initial(), UnsafeSeededEntropy(1)
    there, here = (run(mechanism.run_round, *given) for run in (MakerProcess(REQUIRED), run_here))
    assert type(there) is type(here)
    assert np.array_equal(*(one.vector if isinstance(one, Update) else one.steps for one in (there, here)))


@pytest.mark.usefixtures("ours")
def test_a_look_at_a_model_is_there_what_it_is_here() -> None:
    mechanism = replace(FEDERATED, evaluate=EvaluationPlan(1, 5.0, 20, 10))
    given = labelled_examples(mechanism.task, COHORT), mechanism.initial(), UnsafeSeededEntropy(1)
    there, here = (run(mechanism.run_look, *given).vector for run in (MakerProcess(REQUIRED), run_here))
    assert there.shape == (mechanism.layout().size,)
    assert np.array_equal(there, here)


def test_a_vetting_a_search_and_an_evaluation_find_there_what_they_find_here() -> None:
    pixels = (chests(44, 5, side=32, visits=1)[0] / 255).astype(np.float32)
    patients = tuple(Patient(f"{n:04d}", (Image(one, "ab"[n % 2]),)) for n, one in enumerate(pixels))
    made = [*(strangers := chests(24, 77, side=32, visits=1)[0])[:6], to_bytes(pixels[7])]
    clusters = [
        ReleasedCluster(tuple(f"{n}-{k}" for k in range(5)), one[None], "a", 5, 2, "f") for n, one in enumerate(made)
    ]
    labels = tuple("ab"[n % 2] for n in range(24))
    subject = Subject(SyntheticSet(strangers, labels), ("a", "b"), ("a", "b"))
    effort = Effort(Recipe(epochs=2, side=32, width=4), (0,), 20)
    search = partial(
        measure, KSalsa(5, 2, codec(1), RandomFeatures(), RandomFeatures(), Alignment()), Menu((5, 8), 5)
    )
    results = []
    for run in (MakerProcess(), run_here):
        rng, seen, gone = np.random.default_rng(3), list[Any](), list[Any]()
        vetter = VettingRequest(demo_vetting(), seen.append, pictures=True).over(patients, rng, run)
        vetter.examine(clusters[:3], clusters[3:], gone.append)
        bench = Workspace(say=lambda *told, all_=seen: all_.append(told))
        seen.append(run(partial(search, None), Cohort(patients), rng))
        seen.append(run(partial(_evaluated, subject, effort), Cohort(patients), rng, bench))
        results.append((pack(seen), gone[0][0] is clusters[6], rng.random()))
    assert results[0] == results[1]
    assert results[0][1]


def test_an_error_of_ours_comes_back_and_no_other_ones_text(tries: Callable[..., Any]) -> None:
    with pytest.raises(CohortTooSmallError, match="does not qualify"):
        tries("raises", "ours")
    with pytest.raises(DivergedError, match="at step 7: loss not all finite"):
        tries("raises", "told")
    with pytest.raises(MemoryError):
        tries("raises", "memory")
    with pytest.raises(MakerFaultError, match=r"internal fault \(ValueError\) in the process that computes it$"):
        tries("raises", "other")


@pytest.mark.usefixtures("tries")
def test_memory_that_runs_out_over_there_keeps_the_grant(tmp_path: Path) -> None:
    """Whatever class of error a library has for it: a site's one k-anonymous release is not spent for it."""
    import hostile_mechanism

    s, fills = site_world(tmp_path), hostile_mechanism.Tries("fills").run

    def full(_: Callable[..., Any], *given: Any) -> Any:
        return MakerProcess(memory=1 << 30)(fills, *given[:2])

    with pytest.raises(MemoryExhaustedError, match="goes on under its grant"):
        release_synthetic(replace(s.site, run=full), ksame(), "OT", np.random.default_rng(1))
    assert s.spent("k")[0] == (1, 0)
    _, verdict = release_synthetic(s.site, ksame(), "OT", np.random.default_rng(1))
    assert (verdict.admitted, s.spent("k")) == (True, ((0, 1), (0, 1)))


def test_what_it_says_steers_no_terminal_and_fills_no_log(tries: Callable[..., Any]) -> None:
    """A flood of progress: each stage that there is comes forward by twentieths, and no other word is heard."""
    said = list[tuple[str, int, int]]()
    tries("floods", bench=Workspace(say=lambda *told: said.append(told)))
    assert {stage for stage, *_ in said} == {"teacher", "student", *(f"student {turn}" for turn in range(2, 11))}
    assert len(said) <= 2 * 11


@pytest.mark.parametrize(
    "message",
    [
        ({"step": "say", "stage": "teacher", "numbers": [10**400, 10**400]},),
        ({"step": "say", "stage": "teacher", "numbers": [2, 1]},),
        ({"step": "say", "stage": "teacher", "numbers": [True, 1]},),
        ({"step": "say", "stage": "teacher", "numbers": [0.5, 1]},),
        ({"step": "say", "stage": "teacher", "numbers": [1, 2]}, b"more"),
        ({"step": "write", "place": "known"}, b"x" * 70_001),
        ({"step": "write", "place": "known"}, b"x", b"x"),
        ({"step": "made", "dice": None}, b"1"),
        ({"step": "made", "dice": {"bit_generator": "PCG64", "state": {"state": 1 << 200, "inc": 1}}}, b"1", b""),
        ({"step": "made", "dice": None}, b'{"array": "( ,)f4", "shape": []}', b""),
        ({"step": "raised", "kind": 1, "text": ""},),
        ({"step": "other"},),
    ],
)
def test_what_is_no_message_and_no_result_is_refused(message: tuple[Any, ...]) -> None:
    class Owner:
        places, max_checkpoint_bytes = ("known",), 70_000

    told = io.BytesIO()
    send(told, message[0], message[1:])
    told.seek(0)
    bench = Workspace(lambda _: MemoryPlace())
    room = maker_process._Room((np.random.default_rng(1), bench), Owner())
    child = SimpleNamespace(stdin=io.BytesIO(), stdout=told, wait=lambda _: 3)
    process: Any = SimpleNamespace(child=child, waited=False)
    with pytest.raises(WorkerError, match="answered what is no result"):
        room.until_made(process, Result())


@pytest.mark.parametrize("masked", [False, True])
def test_the_answer_of_a_round_of_the_most_parameters_is_not_too_long(masked: bool) -> None:
    """Beyond 83 million float32, or 42 million parts of a secret sum, it is longer than any set of images."""
    if masked:
        owner: Any = replace(MASKED, parameters=MAX_PARAMETERS, ring_bits=64, scale=32)
        size = 8 * MAX_PARAMETERS
    else:
        owner = RoundTraining(replace(FEDERATED, parameters=MAX_PARAMETERS), "round")
        size = 4 * MAX_PARAMETERS
    _, most = maker_process._Room((), owner)._most({"step": "made"})
    assert size <= most < 2 * 8 * MAX_PARAMETERS


def test_a_process_that_waited_has_no_text_of_its_own() -> None:
    """It has imported libraries before it was handed anything: one of them may never say that it opens it."""
    told = io.BytesIO()
    send(told, {"step": "raised", "kind": "WorkerError", "text": "patient 4711 has a tumour"})
    for waited in (False, True):
        told.seek(0)
        child = SimpleNamespace(stdin=io.BytesIO(), stdout=told, wait=lambda _: 3)
        process: Any = SimpleNamespace(child=child, waited=waited)
        with pytest.raises(LazaretError) as fault:
            maker_process._Room((), None).until_made(process, Result())
        assert ("4711" in str(fault.value)) is not waited


def test_no_more_is_read_than_a_result_may_have(tries: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maker_process, "MAX_SHARD", 1000)
    monkeypatch.setattr(maker_process, "_MORE", 24)
    assert tries("answers", b"x" * 1024) == b"x" * 1024
    with pytest.raises(WorkerError, match="answered what is no result"):
        tries("answers", b"x" * 1025)


def test_one_that_closes_its_pipe_and_goes_on_is_ended(
    tries: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker_process, "_GRACE_S", 0.2)
    with pytest.raises(WorkerError, match="closed its pipe and went on"):
        tries("closes", bench=Workspace())


def test_a_kill_from_outside_is_no_fault_of_the_making(tries: Callable[..., Any]) -> None:
    bench = Workspace(say=lambda _, pid, __: os.kill(pid, signal.SIGKILL))
    with pytest.raises(MakerEndedError, match=r"signal 9, perhaps since memory ran out: give the same command again"):
        tries("waits", bench=bench)


def test_it_is_gone_when_its_parent_stops_waiting(tries: Callable[..., Any]) -> None:
    pids = []

    def stop(_: str, pid: int, __: int) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tries("waits", bench=Workspace(say=stop))
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_process_that_waits_for_its_call_is_confined_by_then_and_makes_one() -> None:
    pids: list[int] = []
    maker = MakerProcess(REQUIRED, started=pids.append, keeps=True)
    assert [maker(is_stage, text) for text in ("train", "nothing", "train")] == [True, False, True]
    assert len(set(pids)) == 3, "each call has a process of its own"
    (waiting,) = maker._next
    os.kill(waiting.pid, signal.SIGKILL)
    waiting.child.wait()
    assert maker(is_stage, "train"), "one that has ended is no fault"
    (waiting,) = maker._next
    status = Path(f"/proc/{waiting.pid}/status")
    for _ in range(2400):
        if "Seccomp:\t2" in status.read_text():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("it waits without a filter")
    waiting.end()
    assert not status.exists()


def test_told_to_end_it_leaves_the_decision_to_its_parent(tries: Callable[..., Any]) -> None:
    """SIGTERM goes to the whole group of a job: its own process puts down what is in hand, and ends the making."""

    def stop(_: str, pid: int, __: int) -> None:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        status = Path(f"/proc/{pid}/status").read_text()
        assert "State:\tR" in status, status
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tries("waits", bench=Workspace(say=stop))
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("answer", [(), "text", 5, {"a": 1}])
def test_checkpoints_are_kept_on_this_side(tries: Callable[..., Any], answer: object) -> None:
    places = defaultdict[str, MemoryPlace](MemoryPlace)
    bench = Workspace(places.__getitem__)
    assert tries("keeps", "known", bench=bench) is None
    assert places["known"].data == b"x" * 70_000
    assert tries("keeps", "known", bench=bench) == b"x" * 70_000
    with pytest.raises(WorkerError, match="answered what is no result"):  # a place of another making
        tries("keeps", "other", bench=bench)
    assert list(places) == ["known"]
    assert tries("answers", answer) == answer


def test_a_store_that_fails_stops_it(tries: Callable[..., Any]) -> None:
    class Full(MemoryPlace):
        def write(self, data: bytes) -> None:
            raise SiteStorageError("the vault cannot be written")

    with pytest.raises(SiteStorageError, match="cannot be written"):
        tries("keeps", "known", bench=Workspace(lambda _: Full()))


def test_nonsense_on_the_pipe_and_an_end_without_a_result_are_refused(tries: Callable[..., Any]) -> None:
    with pytest.raises(WorkerError, match="answered what is no result"):
        tries("says", 4)  # the pipe's own descriptor over there
    with pytest.raises(WorkerError, match="ended with status 3"):
        tries("ends", 3)


def test_an_accelerator_cannot_be_confined(tries: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import hostile_mechanism

    placed = hostile_mechanism.Placed("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(WorkerError, match='"required" and an accelerator'):
        tries("answers", 1, placed, demand=REQUIRED)
    assert tries("answers", 1, placed) == 1
    bound = Comparison(replace(demo_vetting(), device="cuda"), False)
    for call in (bound.power, partial(_evaluated, bound, None)):
        with pytest.raises(WorkerError, match='"required" and an accelerator'):
            MakerProcess(REQUIRED)(call, COHORT.patients, 1)
    threads = set(threading.enumerate())  # one that an earlier test left may end
    assert tries("answers", "cuda:1", hostile_mechanism.Placed("cpu"), demand=REQUIRED) == "cuda:1"
    named = Cohort((Patient("p", (Image(COHORT.patients[0].images[0].pixels, "cuda"),)),))  # a label is any word
    assert tries("answers", "cudamatrix", demand=REQUIRED, given=named) == "cudamatrix"
    assert set(threading.enumerate()) <= threads


def test_a_word_is_no_accelerator_and_neither_is_one_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes, conditions and templates are whatever somebody proposes: none of them switches the confinement off."""

    def accelerated(one: object) -> bool:
        return sealed_making.pickled(partial(print, one), ()).accelerated

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = replace(SET_RELEASES["privimage"].mechanism.model, device="cuda")
    assert accelerated(model)
    for name in ("cuda", "cuda:0", "cuda: none"):
        assert not accelerated(replace(SET_RELEASES["centroids"].mechanism, classes=(name,)))
        assert not accelerated({"device": name})
    assert not accelerated(replace(model, device="cuda:1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not accelerated(model)


def test_every_stage_that_is_said_over_there_is_one_that_may_be_told() -> None:
    """Another one would be dropped without a word, and people would see no progress."""
    mechanisms = "".join(path.read_text() for path in (ROOT / "agent" / "mechanisms").rglob("*.py"))
    said = {*re.findall(r'\b(?:bench|here|work)\.say\("([^"]+)"', mechanisms)}
    assert said
    assert not {stage for stage in said if not is_stage(stage)}
