"""What pytest should know of the tree: ``support`` holds helpers and programs that tests start, and no tests."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.commit_third import commit, third

# One thread for each worker, and for each process that a test starts: two workers of two threads each, on two cores,
# wait for each other. Libraries read it when they are first imported, so it stands before every other import of ours.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

# What was compiled once is kept, whatever the shell says: else each worker compiles the tests anew (half of the time
# that it takes to collect them), and each started process the product (a second of a processor).
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

collect_ignore_glob = ["support/*"]

# No test is timed, nor how long it takes to make its examples: a busy machine must not turn one red. And a property
# is tried with the same examples every time, so that a red run is about what was changed. Others are looked for by
# --hypothesis-profile=roaming.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("untimed", _UNTIMED, derandomize=True)
settings.register_profile("roaming", _UNTIMED, derandomize=False)
settings.load_profile("untimed")

# Programs that tests and benchmarks start: they read their settings when they are imported.
collect_ignore = ["benchmarks/roles.py", "scale/agents.py", "scale/simulated.py"]

# A file is one worker's (`--dist loadfile`). Those that take longest begin first, the longest before all, and what is
# left for the end are many small ones: no worker is left alone with a long one when the others have nothing to do.
LONGEST = (
    "e2e/test_demo.py",
    "e2e/test_consoles.py",
    "agent/test_distill.py",
    "e2e/test_crash.py",
    "agent/test_mechanisms.py",
    "deploy/test_deploy_bundle.py",
    "test_no_network.py",
    "test_federation_contract.py",
    "coordinator/test_running.py",
    "policies/test_kill.py",
    "agent/test_synthesis_commands.py",
    "agent/test_reproduce.py",
    "agent/test_dp_audit.py",
    "policies/test_accounting.py",
    "test_readme.py",
    "agent/test_reproduce_distillation.py",
    "agent/test_reproduce_privimage.py",
    "coordinator/console/test_console_corpus.py",
    "protos/test_web_browser.py",
)


def pytest_report_header() -> str:
    """Which samples are tried at this commit where all would take too long; see tests/policies/test_kill.py."""
    return f"third {third() + 1} of 3 of the sampled operations, by the commit {commit()[:12] or '(none)'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, everything else in its order."""
    place = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))
