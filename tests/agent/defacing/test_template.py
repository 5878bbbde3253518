"""The template is there, registration is exact and repeatable, and nothing of a patient touches a disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agent.defacing import template as module
from agent.defacing.template import atlas, register, rigid
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from tests.support.heads import real_head

_LOADED = """
import sys
from agent.defacing.template import _bundled, _packaged
_packaged("t1"), _bundled()
print("nilearn" in sys.modules, "niimath" in sys.modules)
"""
_KILLED = """
import sys
from agent.defacing.template import atlas, register
from tests.support.heads import real_head
template, head = atlas(), real_head(3.0)[0]
print("ready", flush=True)
for _ in range(100):
    register(head, template)
"""


def program(tmp_path: Path, body: str) -> module._Niimath:
    script = tmp_path / "niimath"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o700)
    return module._Niimath(str(script), seconds=1.0)


def small() -> Volume:
    return Volume(np.arange(27, dtype=np.float32).reshape(3, 3, 3), np.eye(4))


def test_the_template_is_a_brain_of_the_right_size() -> None:
    template = atlas()
    assert 1.7e6 < template.brain.sum() < 1.9e6  # mm3: the template is larger than life
    assert template.values.shape == template.brain.shape == (197, 233, 189)
    mirrored = template.brain[::-1]
    assert (template.brain & mirrored).sum() > 0.99 * template.brain.sum()  # it is the symmetric one
    assert template.brain[98, 120, 80]  # ventricles are in it


def test_nilearn_is_read_and_not_imported() -> None:
    answer = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]


def test_the_same_head_gives_the_same_matrix_and_a_moved_one_the_moved_matrix() -> None:
    template, (head, _) = atlas(), real_head(3.0)
    first = register(head, template)
    assert np.array_equal(first, register(head, template))
    moved = np.eye(4)
    moved[:2, :2] = [[np.cos(0.2), -np.sin(0.2)], [np.sin(0.2), np.cos(0.2)]]
    moved[:3, 3] = (15.0, -20.0, 10.0)
    again = register(Volume(head.values, moved @ head.affine), template) @ moved
    corners = np.array([[x, y, z, 1] for x in (-60, 60) for y in (-90, 60) for z in (-40, 70)], np.float64)
    assert np.abs(corners @ (again - first).T).max() < 3.0  # mm, at the corners of the brain


@pytest.mark.slow
def test_two_series_of_one_head_are_laid_onto_each_other_without_scale() -> None:
    (fine, _), (coarse, _) = real_head(2.0), real_head(3.0)
    moved = np.eye(4)
    moved[1:3, 1:3] = [[np.cos(0.15), -np.sin(0.15)], [np.sin(0.15), np.cos(0.15)]]
    moved[:3, 3] = (8.0, -12.0, 5.0)
    found = rigid(Volume(coarse.values, moved @ coarse.affine), fine) @ moved
    assert np.allclose(found[:3, :3].T @ found[:3, :3], np.eye(3), atol=1e-6)
    corners = np.array([[x, y, z, 1] for x in (-70, 70) for y in (-100, 80) for z in (-60, 80)], np.float64)
    assert np.abs(corners @ (found - np.eye(4)).T).max() < 2.0


@pytest.mark.slow
def test_a_series_of_another_size_is_not_the_same_head() -> None:
    head, _ = real_head(3.0)
    with pytest.raises(NotDefacedError, match="other_frame"):
        rigid(Volume(head.values, head.affine @ np.diag([1.2, 1.0, 0.9, 1.0])), head)


@pytest.mark.parametrize(
    "body",
    [
        "exit 1",
        "exit 0",
        "sleep 60",
        "kill -9 $$",
        'echo "{}" > "$7"; exit 0',
        'echo "not json" > "$7"',
        'echo \'{"moving_to_fixed": [[1, 2], [3, 4]]}\' > "$7"',
        'echo \'{"moving_to_fixed": [[NaN,0,0,0],[0,1,0,0],[0,0,1,0],[0,0,0,1]]}\' > "$7"',
        'echo \'{"moving_to_fixed": [[-1,0,0,0],[0,1,0,0],[0,0,1,0],[0,0,0,1]]}\' > "$7"',
        'echo \'{"moving_to_fixed": [[9,0,0,0],[0,1,0,0],[0,0,1,0],[0,0,0,1]]}\' > "$7"',
    ],
)
def test_a_program_that_fails_hangs_or_talks_nonsense_is_a_refusal(tmp_path: Path, body: str) -> None:
    with pytest.raises(NotDefacedError, match="not_registered"):
        program(tmp_path, body).aligned(small(), small())


def test_a_missing_program_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(NotDefacedError, match="not_registered"):
        module._Niimath(str(tmp_path / "nowhere")).aligned(small(), small())


def test_what_the_program_says_is_what_comes_back(tmp_path: Path) -> None:
    said = '{"moving_to_fixed": [[1,0,0,5],[0,1,0,0],[0,0,1,0],[0,0,0,1]]}'
    matrix = program(tmp_path, f"echo '{said}' > \"$7\"").aligned(small(), small())
    assert matrix[0, 3] == 5


def test_the_program_may_write_no_file(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(NotDefacedError, match="not_registered"):
        program(tmp_path, f"sleep 0.3; cat > {made}").aligned(small(), small())
    assert not made.exists() or made.stat().st_size == 0


def test_the_volumes_reach_the_program_through_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    said = '{"moving_to_fixed": [[1,0,0,0],[0,1,0,0],[0,0,1,0],[0,0,0,1]]}'
    # the fixed volume is whole behind its link, the moving one on standard input: 352 bytes of header, 27 numbers
    body = f'[ $(wc -c < "$3") = 460 ] && [ $(wc -c) = 460 ] && [ -L "$3" ] && echo \'{said}\' > "$7"'
    program(tmp_path, body).aligned(small(), small())
    assert list(folder.iterdir()) == []


def test_a_killed_agent_leaves_nothing_of_the_patient(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, env=environment) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"ready\n"
        for _ in range(10_000):
            if any(path.is_symlink() for path in tmp_path.glob("lazaret-*/fixed.nii")):
                break
            time.sleep(0.01)
        agent.send_signal(signal.SIGKILL)
    left = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert all(path.is_symlink() for path in left)
    assert len(left) == 1  # it was killed while it registered
    assert os.readlink(left[0]).startswith("/proc/self/fd/")
