"""A federated run where there is no network: run by tests/journeys/test_no_network.py inside a namespace of its own.

unshare -n python -m tests.scale.isolated FOLDER    two hospitals, one coordinator, one round
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coordinator.storage import directory as coordinator_home
from deploy.demo.jobs import job_file
from deploy.phantoms import digits
from policies.review.policy import preset
from tests.scale.alone import loopback_up, report
from tests.support.federation_world import Federation
from tests.support.small_tasks import changed

if __name__ == "__main__":  # as in the product's processes: MONAI imports it if it can. Not where tests are collected
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
from tests.support.small_mechanisms import FEDERATED

SITES = ("site-a", "site-b")
PATIENTS, ROUNDS = 30, 1
START_S = 120.0


def federated(root: Path) -> str:
    """A finished federated run: the coordinator, two agents with their links, and the operator's command."""
    run = _sites(root)
    with contextlib.ExitStack() as running:
        running.enter_context(_serving(root, "coordinator", "serving", "serve"))
        for site in SITES:
            _command("agent", root / site, "ingest")
            running.enter_context(_serving(root, site, "link: online", "serve", "--modality", "OT"))
        return _command("coordinator", root / "coordinator", "round", "launch", str(root / "job.json"), "--run", run)


def _sites(root: Path) -> str:
    """Homes, enrolled by the product's own steps, a folder of DICOM for each, and a job; the run's name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    now = dt.datetime.now(dt.UTC)
    coordinator_home.create(root / "coordinator", f'listen = "{listen}"\n', preset("internal"), now)
    with Federation(root) as federation:
        for site in SITES:
            federation.join(site)
    digits.write_hospital(root / "input", 0, len(SITES), PATIENTS, 2, np.random.default_rng(0))
    job = job_file(changed(FEDERATED, rounds=ROUNDS), len(SITES)) | {"sites": list(SITES)}
    (root / "job.json").write_text(json.dumps(job))
    return "alone-1"


def _words(package: str, home: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", package, "--home", str(home), *words]


def _command(package: str, home: Path, *words: str) -> str:
    """One of the product's commands, to its end."""
    done = subprocess.run(_words(package, home, *words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def _serving(root: Path, name: str, ready: str, *words: str) -> Iterator[None]:
    """One of the product's long-running commands, from the moment it says that it is ready."""
    said = root / f"{name}.out"
    package = "coordinator" if name == "coordinator" else "agent"
    with said.open("wb") as out:
        process = subprocess.Popen(_words(package, root / name, *words), stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + START_S
        while ready not in said.read_text():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < until, said.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """One run, and what the kernel counted."""
    loopback_up()
    report(federated(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
