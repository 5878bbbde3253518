"""The training loop: killed at any moment it goes on as if it had not been; what it cannot read it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

import agent
from agent.errors import DivergedError, OtherRunError, TrainingCheckpointError
from agent.models.stylegan.network import StyleGanShape
from agent.models.stylegan.training import GENERATOR, GanConfig, train_generator
from agent.models.training_loop import (
    CHECKPOINT,
    TrainingPlan,
    TrainingProgress,
    _digest,
    optimizer_state,
    restore_optimizer,
    seeded,
    train,
)
from protos.common.durable_files import replace_file

RUN = "0" * 64
CHILD = """
import sys
from pathlib import Path
from typing import Any
import numpy as np, torch
from agent.models.stylegan.network import StyleGanShape
from agent.models.stylegan.training import GanConfig, train_generator
images = np.load(sys.argv[1])
shape = StyleGanShape(8, 1, 8, 8, 1, 64, 8)
config = GanConfig(shape, 10**6, 3, batch=4, r1_every=2, checkpoint_every=3, say_every=1)
train_generator(images, config, Path(sys.argv[2]), lambda p: print(p.step, flush=True))
"""


class Line:
    """Fits y = w x + b to noise that the stream gives."""

    def __init__(self, bad_at: int = -1) -> None:
        with seeded(0):
            self.module = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.1)
        self.bad_at, self.done = bad_at, 0

    def state(self) -> dict[str, Tensor]:
        own = {f"line.{name}": t for name, t in self.module.state_dict().items()}
        return own | optimizer_state(self.optimizer, "optimizer")

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.module.load_state_dict({n: state[f"line.{n}"] for n in self.module.state_dict()})
        restore_optimizer(self.optimizer, "optimizer", state)

    def step(self, generator: torch.Generator) -> dict[str, float]:
        self.done += 1
        x = torch.randn(8, 2, generator=generator)
        loss = (self.module(x) - x.sum(dim=1, keepdim=True) - 1.0).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": float("nan") if self.done == self.bad_at else loss.item()}


def plan(steps: int, run: str = RUN) -> TrainingPlan:
    return TrainingPlan(steps, run, seed=1, checkpoint_every=5, say_every=2)


def step_of(folder: Path) -> int:
    return int(header((folder / CHECKPOINT).read_bytes())["step"])


def header(raw: bytes) -> dict[str, Any]:
    told = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["loop"]
    return dict(json.loads(told))


def test_a_training_killed_in_the_middle_ends_with_the_very_bytes_of_one_that_was_not(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 8)).astype(np.uint8)
    np.save(tmp_path / "images.npy", images)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "images.npy"), str(tmp_path / "killed")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(agent.__file__).parents[1],
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 8:
            child.kill()  # SIGKILL, wherever it is: nothing of it gets to clean up
            break
    assert child.wait() == -9
    child.stdout.close()
    reached = step_of(tmp_path / "killed")
    assert reached >= 6
    architecture = StyleGanShape(8, 1, 8, 8, 1, 64, 8)
    settings = GanConfig(architecture, reached + 4, 3, batch=4, r1_every=2, checkpoint_every=3, say_every=1)
    heard: list[int] = []
    train_generator(images, settings, tmp_path / "killed", lambda p: heard.append(p.step))
    assert heard == list(range(reached + 1, reached + 5))
    train_generator(images, settings, tmp_path / "whole")
    for name in (GENERATOR, CHECKPOINT):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_in_parts_equals_a_run_in_one(tmp_path: Path) -> None:
    whole, part, rest = Line(), Line(), Line()
    assert train(whole, plan(14), tmp_path / "a") == 0
    assert train(part, plan(10), tmp_path / "b") == 0
    assert train(rest, plan(14), tmp_path / "b") == 10
    ours, theirs = whole.state(), rest.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert rest.done == 4


def test_people_are_told_and_shown_what_they_asked_for(tmp_path: Path) -> None:
    told: list[TrainingProgress] = []
    shown: list[int] = []
    train(Line(), plan(13), tmp_path, told.append, shown.append)
    assert [p.step for p in told] == [2, 4, 6, 8, 10, 12, 13]
    assert shown == [5, 10, 13]
    assert told[-1].steps == 13
    assert train(Line(), plan(13), tmp_path, told.append, shown.append) == 13
    assert shown == [5, 10, 13]


def test_the_checkpoint_of_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    train(Line(), plan(5), tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(OtherRunError, match="another folder"):
        train(Line(), plan(9, "1" * 64), tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def again(state: dict[str, torch.Tensor], **told: object) -> bytes:
    """A checkpoint whose digest is right, whatever else is wrong with it."""
    said = {"step": 5, "run": RUN, "sha256": _digest(state)} | told
    return save(state, {"loop": json.dumps({k: v for k, v in said.items() if v is not None})})


def without(raw: bytes, name: str) -> bytes:
    state = load(raw)
    del state[name]
    return again(state)


def flipped(raw: bytes) -> bytes:
    """One bit of the last tensor; safetensors itself sees nothing."""
    changed = raw[:-1] + bytes([raw[-1] ^ 1])
    load(changed)
    return changed


DAMAGE = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "one byte short": lambda raw: raw[:-1],
    "one bit": flipped,
    "no header": lambda raw: b"\xff" * 8 + raw[8:],
    "other bytes": lambda raw: bytes(range(256)) * 4,
    "no step": lambda raw: again(load(raw), step=None),
    "no digest": lambda raw: again(load(raw), sha256=None),
    "no metadata": lambda raw: save(load(raw)),
    "a step that is no number": lambda raw: again(load(raw), step="five"),
    "no stream": lambda raw: without(raw, "loop.generator"),
    "no weight": lambda raw: without(raw, "line.weight"),
    "other shape": lambda raw: again(load(raw) | {"line.bias": torch.zeros(3)}),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    train(Line(), plan(5), tmp_path)
    damaged = DAMAGE[kind]((tmp_path / CHECKPOINT).read_bytes())
    (tmp_path / CHECKPOINT).write_bytes(damaged)
    with pytest.raises(TrainingCheckpointError, match="delete it to start again"):
        train(Line(), plan(9), tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == damaged


def test_a_folder_that_has_come_further_is_refused(tmp_path: Path) -> None:
    train(Line(), plan(9), tmp_path)
    with pytest.raises(OtherRunError, match="already longer"):
        train(Line(), plan(5), tmp_path)


def test_a_loss_that_is_no_number_stops_the_run_at_its_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="step 8: loss"):
        train(Line(bad_at=8), plan(20), tmp_path)
    assert step_of(tmp_path) == 5
    assert train(Line(), plan(20), tmp_path) == 5


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    replace_file(path, b"old")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="space"):
        replace_file(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == b"old"


def test_a_half_written_file_of_a_killed_run_does_not_stop_the_next(tmp_path: Path) -> None:
    train(Line(), plan(5), tmp_path)
    (tmp_path / f"{CHECKPOINT}.part").write_bytes(b"half")
    assert train(Line(), plan(10), tmp_path) == 5
    assert [p.name for p in tmp_path.iterdir()] == [CHECKPOINT]


def test_initial_weights_come_from_the_seed_and_the_global_stream_stays() -> None:
    before = torch.get_rng_state()
    with seeded(7):
        first = torch.randn(3)
    with seeded(7):
        second = torch.randn(3)
    with seeded(8):
        third = torch.randn(3)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(before, torch.get_rng_state())


def test_an_optimiser_keeps_its_moments(tmp_path: Path) -> None:
    one, two = Line(), Line()
    draw = torch.Generator().manual_seed(0)
    one.step(draw)
    restore_optimizer(two.optimizer, "optimizer", optimizer_state(one.optimizer, "optimizer"))
    ours, theirs = optimizer_state(one.optimizer, "x"), optimizer_state(two.optimizer, "x")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 6
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
