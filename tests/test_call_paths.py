"""The call paths in ``deploy/docs/developer.md``: each named function is really called, in the order of the list.

A function that runs in another process is named by that process's ``main``; here the process must have been started
with that module. The process of a federated run is a thread here, with the real pipe between both ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
from pydicom.data import get_testdata_file

from agent.cli.main import main
from coordinator.federation import run_main, run_process
from coordinator.federation.grid import LoopbackEndpoint
from coordinator.federation.run_messages import TO_RUN, Pipe, RunSpec
from tests.support.chest_clinic import chest_clinic
from tests.support.coordinator_runs import Federation, Host, job
from tests.support.federation_world import Site

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "deploy" / "docs" / "developer.md").read_text()
JOURNEYS = ("One file into the vault", "One release", "One round")
STEP = re.compile(r"^\d+\. `((?:agent|coordinator|policies|protos)\.[\w.]+)`", re.MULTILINE)
__all__ = ["chest_clinic"]  # a fixture


def steps(title: str) -> list[str]:
    """The functions of a journey, as the page lists them."""
    section = PAGE.partition(f"### {title}\n")[2].partition("\n#")[0]
    return STEP.findall(section)


class Calls:
    """The calls of documented functions, in all threads that begin while it listens."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self.seen: list[str] = []
        self._wanted = frozenset(wanted)
        self._mains = [name.removesuffix(".main") for name in wanted if name.endswith("_main.main")]
        self._names: dict[CodeType, str] = {}

    def _name(self, code: CodeType) -> str:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT):
            return ""
        name = f"{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}.{code.co_qualname}"
        return name if name in self._wanted else ""

    def _hear(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code not in self._names:
            self._names[code] = self._name(code)
        if self._names[code]:
            self.seen.append(self._names[code])
        elif code is subprocess.Popen.__init__.__code__:
            words = " ".join(map(str, frame.f_locals["args"]))
            self.seen += [f"{module}.main" for module in self._mains if re.search(rf"\b{re.escape(module)}\b", words)]

    def __enter__(self) -> Calls:
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def out_of_order(wanted: Sequence[str], seen: Sequence[str]) -> str:
    """The first step that is not called after those before it; "" if all are in order."""
    rest = iter(seen)
    return next((step for step in wanted if step not in rest), "")


def test_a_step_that_is_missing_or_out_of_order_is_seen() -> None:
    assert out_of_order(["a", "b", "c"], ["b", "a", "x", "b", "c", "a"]) == ""
    assert out_of_order(["a", "b", "c"], ["a", "c", "b"]) == "c"
    assert out_of_order(["a", "b"], ["b"]) == "a"


@pytest.mark.parametrize("title", JOURNEYS)
def test_a_journey_has_at_most_fifteen_steps_each_once(title: str) -> None:
    listed = steps(title)
    assert 8 <= len(listed) <= 15
    assert len(set(listed)) == len(listed)
    numbers = re.findall(r"^(\d+)\. ", PAGE.partition(f"### {title}\n")[2].partition("\n#")[0], re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(listed) + 1)], "each step names its function"


def test_the_code_says_wall_where_the_page_does() -> None:
    walls = re.findall(r"^\d+\. `([\w.]+)`.* Wall: ", PAGE, re.MULTILINE)
    assert len(walls) >= 7
    for name in walls:
        module = re.match(r"[a-z0-9_.]+(?=\.)", re.sub(r"\._?[A-Z]\w*", "", name))
        assert module is not None
        text = (ROOT / f"{module[0].replace('.', '/')}.py").read_text()
        assert "This is a wall: " in text, name


# ---------------------------------------------------------------- one file into the vault


def test_one_file_comes_into_the_vault_by_the_path_in_the_developers_guide(tmp_path: Path) -> None:
    words = ["init", "--site", "site-a", "--policy", "internal", "--input", "../input", "--modality", "CT"]
    assert main(["--home", str(tmp_path / "site"), *words]) == 0
    (tmp_path / "input").mkdir()
    shutil.copy(str(get_testdata_file("CT_small.dcm", download=False)), tmp_path / "input")
    with Calls(steps("One file into the vault")) as calls:
        assert main(["--home", str(tmp_path / "site"), "ingest"]) == 0
    assert out_of_order(steps("One file into the vault"), calls.seen) == ""


# ---------------------------------------------------------------- one release


@pytest.fixture
def calls_of_a_release() -> Iterator[Calls]:
    """It listens before the coordinator's threads begin."""
    with Calls(steps("One release")) as calls:
        yield calls


@pytest.mark.parametrize("chest_clinic", ["max_reid_rate = 0.6"], indirect=True)
def test_a_release_of_k_salsa_goes_the_path_in_the_developers_guide(
    calls_of_a_release: Calls, chest_clinic: Site, tmp_path: Path
) -> None:
    calls_of_a_release.seen.clear()
    words = ["release", "ksalsa", "--config", str(tmp_path / "ksalsa.toml")]
    assert main(["--home", str(chest_clinic.home.root), *words]) == 0
    assert out_of_order(steps("One release"), calls_of_a_release.seen) == ""


# ---------------------------------------------------------------- one round


class _Child:
    """The process of a run, as a thread: ``run_main`` with the descriptors that it would inherit, unconfined."""

    def __init__(
        self, _module: str, _words: Sequence[str], descriptors: Sequence[int], *_: object, **__: object
    ) -> None:
        ours, self._relay = (socket.socket(fileno=os.dup(one)) for one in descriptors)
        self._gate = run_main.RemoteGate(Pipe(ours, TO_RUN))
        self._threads = [threading.Thread(target=act, daemon=True) for act in (self._main, self._listen)]
        self._threads[0].start()

    def _main(self) -> None:
        order = RunSpec.of(self._gate.pipe.receive())
        self._threads[1].start()
        run_main._report(order, self._gate, None)  # type: ignore[arg-type]

    def _listen(self) -> None:
        with contextlib.suppress(SystemExit):  # the end of the pipe would end the process
            self._gate.listen()

    def end(self) -> None:
        """As :func:`protos.operations.child_process.end`: nothing of it is left."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self._gate.pipe.close()
        self._relay.close()


def test_a_round_goes_the_path_in_the_developers_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def task(_host: Host) -> Iterator[tuple[LoopbackEndpoint, str]]:
        yield LoopbackEndpoint("127.0.0.1:9", "k" * 64), "token"

    @contextlib.contextmanager
    def opened(made: Federation) -> Iterator[Federation]:
        yield made
        made.host.stopping.set()
        made.store.close()

    def grid(*_: object) -> Any:
        inner = fed.grid
        with fed.host.grid():
            return SimpleNamespace(
                get_nodes=inner.get_nodes,
                send_and_receive=inner.send_and_receive,
                begin=lambda: None,
                end=lambda _outcome: None,
            )

    monkeypatch.setattr(Host, "task", task, raising=False)
    monkeypatch.setattr(run_main, "BoundedGrid", grid)
    monkeypatch.setattr(run_main, "os", SimpleNamespace(_exit=sys.exit))
    start = SimpleNamespace(start=_Child, end=lambda child: child.end())
    monkeypatch.setattr(run_process, "child_process", start)
    with Calls(steps("One round")) as calls, opened(Federation(tmp_path)) as fed:
        calls.seen.clear()
        assert [event.state for event in fed.runs.launch(job(rounds=1))][-1] == "finished"
    assert out_of_order(steps("One round"), calls.seen) == ""
