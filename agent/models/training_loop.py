"""The one training loop: progress, checkpoints that survive kill -9, the same result whether or not it was killed.

A checkpoint is one safetensors file (weights, optimisers, moving averages, the random generator's state), written
beside its place, synced, and renamed over it; or, where it comes from patients, a sealed row of the vault. A run is
described by the digest of its configuration and pictures; a place that holds another run's checkpoint is refused, so
that nothing is overwritten by mistake.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

CHECKPOINT: Final = "checkpoint.safetensors"
_GENERATOR: Final = "loop.generator"
_HEADER: Final = "loop"


class OtherRun(ValueError):
    """The folder holds the checkpoint of another run: other configuration or other pictures."""


class BadCheckpoint(ValueError):
    """A checkpoint cannot be read back. Delete it to begin anew; it was not changed."""


class Diverged(ValueError):
    """The loss is not a number any more. The last good checkpoint stays."""


class Trainer(Protocol):
    """What is trained: its whole state as tensors, and one step."""

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, but the generator."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`."""

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """One optimiser step; named losses for people."""


class Place(Protocol):
    """Where a checkpoint lies: a file, or a sealed row of the vault."""

    def read(self) -> bytes | None:
        """What was written last; None when nothing was."""

    def write(self, data: bytes) -> None:
        """Replace it; durable when this returns, and never a half."""


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A file of its own folder, which is made if it is not there."""

    path: Path

    def read(self) -> bytes | None:
        """The file's bytes."""
        return self.path.read_bytes() if self.path.exists() else None

    def write(self, data: bytes) -> None:
        """Beside the file, synced, then renamed over it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, data)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a caller may show."""

    step: int
    steps: int
    losses: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, and what it is called."""

    steps: int
    run: str  # SHA-256 of configuration and pictures
    seed: int
    checkpoint_every: int = 500
    say_every: int = 50


def train(
    trainer: Trainer,
    plan: Plan,
    place: Path | Place,
    say: Callable[[Progress], None] = lambda _: None,
    picture: Callable[[int], None] = lambda _: None,
) -> int:
    """Train until ``plan.steps``, from the checkpoint if there is one.

    Args:
        trainer: built anew; it is overwritten from the checkpoint.
        plan: of the run.
        place: of the checkpoint; or a folder for it, made if it is not there.
        say: told every ``say_every`` steps.
        picture: called after every checkpoint, with the step: draw samples.
    Returns:
        The step it began at: 0, or where it was interrupted.
    Raises:
        OtherRun: the place holds another run, or a longer one.
        BadCheckpoint: the checkpoint cannot be read.
        Diverged: a loss is not finite.
    """
    if isinstance(place, Path):
        place.mkdir(parents=True, exist_ok=True)
        place = FilePlace(place / CHECKPOINT)
    generator = torch.Generator().manual_seed(plan.seed)
    begun = _restore(trainer, plan, place.read(), generator)
    if begun > plan.steps:
        raise OtherRun("the folder's run is longer already: ask for as many steps at least, or choose another folder")
    for step in range(begun + 1, plan.steps + 1):
        losses = trainer.step(generator)
        if not all(abs(v) < float("inf") for v in losses.values()):
            raise Diverged(f"at step {step}: {', '.join(sorted(losses))} not all finite")
        if step % plan.say_every == 0 or step == plan.steps:
            say(Progress(step, plan.steps, losses))
        if step % plan.checkpoint_every == 0 or step == plan.steps:
            place.write(saved(plan.run, step, {**trainer.state(), _GENERATOR: generator.get_state()}))
            picture(step)
    return begun


def saved(run: str, step: int, state: Mapping[str, Tensor]) -> bytes:
    """A checkpoint of a run after ``step`` steps."""
    kept = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    told = json.dumps({"run": run, "sha256": _digest(kept), "step": step})
    return safetensors.torch.save(kept, {_HEADER: told})  # one key: their order is not kept


def restored(raw: bytes, run: str) -> tuple[int, dict[str, Tensor]]:
    """What :func:`saved` wrote: the step and the state.

    Raises:
        OtherRun: it is another run's.
        BadCheckpoint: it cannot be read, or a bit of it has changed.
    """
    try:
        state = safetensors.torch.load(raw)
        told: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
        told = json.loads(told[_HEADER])
        step, whose, digest = int(told["step"]), str(told["run"]), str(told["sha256"])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as fault:
        raise BadCheckpoint(f"{CHECKPOINT} is damaged: delete it to begin anew") from fault
    if whose != run:
        raise OtherRun(
            f"{CHECKPOINT} is of a run with another configuration or other pictures: choose another folder"
        )
    if _digest(state) != digest:
        raise BadCheckpoint(f"{CHECKPOINT} is damaged: delete it to begin anew")
    return step, state


def _digest(state: Mapping[str, Tensor]) -> str:
    """Of every tensor: safetensors has no checksum, and a flipped bit would be trained on."""
    told = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        told.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        told.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return told.hexdigest()


def _restore(trainer: Trainer, plan: Plan, raw: bytes | None, generator: torch.Generator) -> int:
    if raw is None:
        return 0
    step, state = restored(raw, plan.run)
    try:
        generator.set_state(state.pop(_GENERATOR))
        trainer.restore(state)
    except (KeyError, ValueError, RuntimeError) as fault:
        raise BadCheckpoint(f"{CHECKPOINT} does not fit this network: delete it to begin anew") from fault
    return step


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one; nothing half-written stays behind."""
    new = path.with_name(f"{path.name}.part")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def optimizer_state(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """An optimiser's moments as named tensors; its settings are configuration and stay out."""
    out: dict[str, Tensor] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            out[f"{prefix}.{index}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return out


def restore_optimizer(optimizer: torch.optim.Optimizer, prefix: str, state: Mapping[str, Tensor]) -> None:
    """Take back what :func:`optimizer_state` gave."""
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in state.items():
        if name.startswith(f"{prefix}."):
            index, key = name[len(prefix) + 1 :].split(".", 1)
            moments.setdefault(int(index), {})[key] = value
    told = optimizer.state_dict()
    optimizer.load_state_dict({"state": moments, "param_groups": told["param_groups"]})


@contextlib.contextmanager
def seeded(seed: int) -> Any:
    """Draw initial weights from a seed without moving anybody's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        yield


def own_generator(seed: int, device: str = "cpu") -> torch.Generator:
    """A generator that nobody else uses. Nothing private is protected by what it draws: noise comes from entropy."""
    return torch.Generator(device).manual_seed(seed)
