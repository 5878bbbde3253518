"""What a confined process says of memory that ran out, in whichever words a library tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import CohortTooSmallError
from agent.models.training_loop import TrainingCheckpointError
from agent.release import maker_main

ROOT = Path(__file__).resolve().parents[3]
# The same work with less and less memory, each time in a child: what it says in the end, or that it was ended.
DESCENDS = """
import os, resource, sys
from pathlib import Path
import numpy as np, torch
from agent.models.training_loop import TrainingCheckpointError
from agent.release.maker_main import _of_error
torch.set_num_threads(1)

def convolution():
    net = torch.nn.Sequential(torch.nn.Conv2d(16, 64, 3, padding=1), torch.nn.ConvTranspose2d(64, 16, 4, 2, 1))
    for _ in range(3):
        net(torch.randn(8, 16, 64, 64)).sum().backward()

def decomposition():
    torch.linalg.svd(torch.randn(500, 500))

def optimiser():
    model = torch.nn.Linear(2000, 1000)
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 2000)).sum().backward()
    optimiser.step()

def other(held=[]):  # a library that has a class of its own for it
    try:
        while True:
            held.append(bytearray(1 << 20))
    except MemoryError:
        raise ValueError("Patient Smith") from None

def checkpoint():  # what is told as a damaged file
    try:
        other()
    except ValueError as fault:
        raise TrainingCheckpointError("checkpoint.safetensors does not fit") from fault

def used():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])

work, sizes = globals()[sys.argv[1]], range(*map(int, sys.argv[2:]))
for size in sizes:
    if not (child := os.fork()):
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = used() + (size << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        try:
            work()
            said = b"fine\\n"
        except BaseException as error:
            said = _of_error(error)["kind"].encode() + b"\\n"
        os.write(1, said)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("work", "sizes"),
    [
        ("convolution", (56, 0, -7)),
        ("decomposition", (18, 0, -2)),
        ("optimiser", (40, 4, -8)),
        ("other", (20, 0, -10)),
        ("checkpoint", (20, 0, -10)),
    ],
)
def test_memory_that_runs_out_is_told_as_that(work: str, sizes: tuple[int, int, int]) -> None:
    """A k-anonymous release is given once: a machine that was too small must not cost it."""
    told = subprocess.run(
        [sys.executable, "-c", DESCENDS, work, *map(str, sizes)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        check=True,
    ).stdout.split()
    assert len(told) == len(range(*sizes))
    assert "MemoryError" in told
    assert {*told} <= {"MemoryError", "ended", "fine"}, told


def test_where_there_is_memory_a_fault_is_one_and_an_error_of_ours_is_told() -> None:
    fault, damaged = ValueError("Patient Smith"), TrainingCheckpointError("it is damaged")
    damaged.__cause__ = fault
    assert maker_main._of_error(fault) == {"step": "raised", "kind": "ValueError", "text": ""}
    assert maker_main._of_error(damaged)["kind"] == "TrainingCheckpointError"


def test_an_error_of_ours_that_no_library_caused_is_told_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maker_main, "nearly_exhausted", lambda: True)
    assert maker_main._of_error(CohortTooSmallError())["kind"] == "CohortTooSmallError"
    assert maker_main._of_error(ValueError())["kind"] == "MemoryError"
