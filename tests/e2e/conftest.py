"""The demo at a smaller scale, run once as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.demo.scene import Scale, Scene
from tests.support.demo_networks import KEPT
from tests.support.forked_scene import ForkedScene

PATIENTS, ROUNDS = 60, 2
NONET = Path(__file__).parent.parent / "support" / "nonet"


@dataclass(frozen=True)
class Demo:
    out: Path
    work: Path
    said: str
    connections: Path  # what left loopback, or tried to


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    root = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "deploy.demo", "--out", str(root / "out"), "--work", str(root / "work")]
    command += ["--patients", str(PATIENTS), "--rounds", str(ROUNDS), "--training", "24"]
    command += ["--networks", str(KEPT)]  # which the slow test trains
    notes = root / "connections"
    notes.write_text("started\n")
    environment = {**os.environ, "PYTHONPATH": str(NONET), "LAZARET_TEST_CONNECTIONS": str(notes)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return Demo(root / "out", root / "work", done.stdout, notes)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Three enrolled sites with their cohorts in the vault, and a coordinator that serves."""
    root = tmp_path_factory.mktemp("scene")
    for name in ("out", "work"):
        (root / name).mkdir()
    with ForkedScene(root / "out", root / "work", Scale(30, 4)) as made:
        for step in (made.folders, made.found, made.enrol, made.ingest):
            step(lambda _text: None)
        yield made
