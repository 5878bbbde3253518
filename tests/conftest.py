"""What pytest should know of the tree: ``support`` holds helpers and programs that tests start, and no tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import traceback
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from tests.support.commit_third import commit, third
from tests.support.peers import PREFIX

# One thread for each worker, and for each process that a test starts: two workers of two threads each, on two cores,
# wait for each other. Libraries read it when they are first imported, so it stands before every other import of ours.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

# What was compiled once is kept, whatever the shell says: else each worker compiles the tests anew (half of the time
# that it takes to collect them), and each started process the product (a second of a processor).
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _room_in_memory(folder: str = "/dev/shm") -> bool:
    """Whether temporary folders can be in memory: programs can be started there, and a whole run has room."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    runs = os.access(folder, os.W_OK) and not found.f_flag & os.ST_NOEXEC
    return runs and found.f_bavail * found.f_frsize >= 8 << 30


# The product syncs what it writes, and tests write thousands of small files: on a disk they wait for it half of the
# time. Of durability they show the order of the calls, and what a kill leaves: both are the same in memory.
if _room_in_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# A million objects live from the collection of the tests to the end: they are walked once, not again and again.
gc.disable()

collect_ignore_glob = ["support/*"]

# No test is timed, nor how long it takes to make its examples: a busy machine must not turn one red. And a property
# is tried with the same examples every time, so that a red run is about what was changed. Others are looked for by
# --hypothesis-profile=roaming.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("untimed", _UNTIMED, derandomize=True)
settings.register_profile("roaming", _UNTIMED, derandomize=False)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def makings_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A making, a vetting and the like run in the test's own process, which it can reach into; with ``real_maker``
    they run as they do.

    Whatever starts ``lazaret-agent`` as a program has the real one.
    """
    runtime = sys.modules.get("agent.runtime")
    if runtime is not None and "real_maker" not in request.fixturenames:
        monkeypatch.setattr(runtime, "MakerProcess", lambda _: sys.modules["agent.release.ports"].run_here)


@pytest.fixture
def real_maker() -> None:
    """Releases are made in a confined process."""


# Programs that tests and benchmarks start: they read their settings when they are imported.
collect_ignore = ["benchmarks/roles.py", "scale/agents.py"]

# A file is one worker's (`--dist loadfile`). Those that take longest begin first, the longest before all, and what is
# left for the end are many small ones: no worker is left alone with a long one when the others have nothing to do.
LONGEST = (
    "journeys/test_demo.py",
    "journeys/test_consoles.py",
    "journeys/test_demo_ended.py",
    "agent/mechanisms/remodel/test_mechanism.py",
    "agent/cli/test_deface.py",
    "agent/release/test_approval.py",
    "agent/mechanisms/distillation/test_mechanism.py",
    "test_federation_contract.py",
    "agent/ingest/test_pipeline.py",
    "journeys/test_bundle.py",
    "journeys/test_crash.py",
    "journeys/test_tryout.py",
    "agent/mechanisms/privimage/test_mechanism.py",
    "coordinator/federation/test_run_main.py",
    "agent/mechanisms/test_registry.py",
    "agent/cli/test_ingest.py",
    "agent/cli/test_release_resumable.py",
    "agent/defacing/test_brain_extraction.py",
    "agent/defacing/test_compositing.py",
    "test_neighbouring_relation.py",
    "agent/ingest/test_ocr.py",
    "journeys/test_orthanc.py",
    "agent/privacy_audit/test_gate.py",
    "deploy/reproduction/test_ksalsa.py",
    "agent/defacing/test_remodel.py",
    "policies/ledger/backends/test_postgres.py",
    "journeys/test_no_network.py",
    "test_model.py",
    "agent/release/test_preflight_dry_runs.py",
    "agent/ingest/test_parser_process.py",
    "agent/defacing/reidentification/test_matching.py",
    "agent/cli/test_train.py",
    "agent/ingest/test_parser_process_codecs.py",
)


class _RedAtOnce:
    """A line for each test that fails, when it does: a run that is ended before its summary tells of them, too."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hear of a part of a test."""
        writer = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and writer is not None:
            writer.write_line(f"\nred: {report.nodeid} ({report.when}, {report.duration:.0f} s)")


def pytest_configure(config: pytest.Config) -> None:
    """In the process that the others report to."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_RedAtOnce(config))


def pytest_report_header() -> str:
    """Which samples this commit tries where all would take too long: those of test_sqlite_kill.py."""
    return f"third {third() + 1} of 3 of the sampled operations, by the commit {commit()[:12] or '(none)'}"


def pytest_collection_finish() -> None:
    """Collect what the collection left, and walk the rest no more."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, everything else in its order."""
    place = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


# What a coordinator installs without. A test file that imports one of them, itself or through an agent's module, is
# left out where torch is not installed (`make test-no-torch`), and nowhere else: there a missing import is a fault.
_OF_THE_AGENT = {"cattrs", "faiss", "monai", "nibabel", "opacus", "pydicom", "pynetdicom", "sklearn", "torch"}
_ROOT = Path(__file__).parents[1]
_WITH_AGENT = importlib.util.find_spec("torch") is not None


def needed_of_the_agent(fault: BaseException | None) -> str:
    """The package of an agent that was missing, where a test or an agent's module wanted it; "" for any other fault.

    Where a module of the coordinator or a shared one wanted it, the coordinator does not start: that is no skip.
    """
    name = (getattr(fault, "name", "") or "").partition(".")[0]
    if not isinstance(fault, ModuleNotFoundError) or name not in _OF_THE_AGENT:
        return ""
    files = [Path(frame.filename) for frame in traceback.extract_tb(fault.__traceback__)]
    own = [path.relative_to(_ROOT).parts[0] for path in files if path.is_relative_to(_ROOT)]
    own = [folder for folder in own if not folder.startswith(".")]  # an environment in the root is nobody's code
    return name if own and own[-1] in ("agent", "tests", "deploy") else ""


class _LeftOut(pytest.Module):
    """A test file that needs an agent's package: one skip with the reason, in place of an error."""

    def _getobj(self) -> object:
        try:
            return super()._getobj()
        except self.CollectError as error:
            name = needed_of_the_agent(error.__cause__ or error.__context__)
            if name:
                pytest.skip(f"agent: {self.path.name} needs {name}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without torch, files that need an agent are skipped with that reason."""
    return None if _WITH_AGENT else _LeftOut.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Without torch a test file is imported once: after an import that failed, a second one finds half a module."""
    found = yield
    return found if _WITH_AGENT else [one for one in found if not isinstance(one, DoctestModule)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what was skipped for want of a peer or of an agent, by reason."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", []) if report.longrepr]
    reasons = Counter(reason.removeprefix("Skipped: ") for reason in skipped)
    for kind, title in (
        (PREFIX, "skipped for want of a peer"),
        ("agent:", "skipped for want of an agent's packages"),
    ):
        told = {reason.removeprefix(kind).strip(): n for reason, n in reasons.items() if reason.startswith(kind)}
        if told:
            terminalreporter.section(f"{title}: {sum(told.values())}")
            for reason, count in sorted(told.items()):
                terminalreporter.line(f"{count:6} {reason}")
