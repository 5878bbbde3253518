"""The demo at a smaller scale, run once in each form as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.demo.scene import Scene
from tests.support.process_world import ProcessWorld, enrolled

__all__ = ["enrolled"]  # a fixture

PATIENTS, ROUNDS = 60, 2
NONET = Path(__file__).parent.parent / "support" / "nonet"


@dataclass(frozen=True)
class Demo:
    form: str  # "main" or "full"
    out: Path
    work: Path
    said: str
    connections: Path  # what left loopback, or tried to


def _demo(form: str, root: Path) -> Demo:
    """The demo at a smaller scale, run to its end."""
    command = [sys.executable, "-m", "deploy.demo", "--out", str(root / "out"), "--work", str(root / "work")]
    command += ["--patients", str(PATIENTS), "--rounds", str(ROUNDS), *(["--full"] if form == "full" else [])]
    notes = root / "connections"
    notes.write_text("started\n")
    environment = {**os.environ, "PYTHONPATH": str(NONET), "LAZARET_TEST_CONNECTIONS": str(notes)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return Demo(form, root / "out", root / "work", done.stdout, notes)


@pytest.fixture(scope="session")
def full_demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Every mechanism: for slow tests."""
    return _demo("full", tmp_path_factory.mktemp("full-demo"))


@pytest.fixture(scope="session")
def main_demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """What `make demo` runs."""
    return _demo("main", tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session", params=["main", pytest.param("full", marks=pytest.mark.slow)])
def demo(request: pytest.FixtureRequest) -> Demo:
    """Each of the two."""
    found: Demo = request.getfixturevalue(f"{request.param}_demo")
    return found


@pytest.fixture(scope="module")
def scene(enrolled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Three enrolled sites with their cohorts in the vault, and a coordinator that serves."""
    with ProcessWorld.copied(enrolled, tmp_path_factory.mktemp("scene"), 4) as made:
        made.serve()
        yield made
