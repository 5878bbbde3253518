"""The one training loop: progress, checkpoints that survive kill -9, the same result whether or not it was killed.

A checkpoint is one safetensors file (weights, optimisers, moving averages, the random generator's state), written
beside its place, synced, and renamed over it; or, where it comes from patients, a sealed row of the vault. A run is
described by the digest of its configuration and images; a place that holds another run's checkpoint is refused, so
that nothing is overwritten by mistake.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from agent.domain import CheckpointStore
from agent.errors import DivergedError, OtherRunError, TrainingCheckpointError
from protos.common.durable_files import replace_file

CHECKPOINT: Final = "checkpoint.safetensors"
HEADER_BYTES: Final = 16 << 20  # more than the names in any checkpoint, and what is small in it
_GENERATOR: Final = "loop.generator"
_HEADER: Final = "loop"
STEEPEST: Final = 5.0  # norm of a gradient, where it is clipped


class Trainer(Protocol):
    """A trainer: its entire state as tensors, and one step."""

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, but the generator."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`."""

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """One optimiser step; named losses for people."""


class PostStepHook(Protocol):
    """What moves along with the steps of a training: a moving average, a GAN's generator.

    It sees the model after a step, and no image: after a noisy step it is post-processing.
    """

    def after(self, step: int) -> None:
        """Follow the model, which has just taken ``step`` (from 1)."""

    def state(self) -> dict[str, Tensor]:
        """Everything that the next call depends on."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`."""


class NetworkTrainer:
    """Networks with their optimisers: the checkpoint that every training here shares.

    The names of networks, optimisers and counter begin the names of a checkpoint's tensors. They stay: checkpoints
    of older releases go on.
    """

    counter: ClassVar[str] = "done"

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        average: PostStepHook | None = None,
    ) -> None:
        """Keep what is trained; ``average`` follows it where it is called."""
        self.networks, self.optimizers, self.average = networks, optimizers, average
        self.done = 0  # steps

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, but the generator."""
        out = {} if self.average is None else self.average.state()
        for name, network in self.networks.items():
            out |= {f"{name}.{key}": tensor for key, tensor in network.state_dict().items()}
        for name, optimizer in self.optimizers.items():
            out |= optimizer_state(optimizer, name)
        return out | {self.counter: torch.tensor(self.done)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`, with or without other tensors beside it.

        Raises:
            KeyError, RuntimeError: it is not of this configuration.
        """
        for name, network in self.networks.items():
            start = f"{name}."
            network.load_state_dict({n.removeprefix(start): t for n, t in state.items() if n.startswith(start)})
        for name, optimizer in self.optimizers.items():
            restore_optimizer(optimizer, name, state)
        if self.average is not None:
            self.average.restore(state)
        self.done = int(state[self.counter])

    def set_rate(self, rate: float) -> None:
        """The learning rate of every optimiser's next step."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def descend(self, name: str, loss: Tensor, clipped: nn.Module | None = None) -> None:
        """One step of one optimiser down a loss; the gradient of ``clipped`` is cut to ``STEEPEST``."""
        self.optimizers[name].zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        if clipped is not None:
            nn.utils.clip_grad_norm_(clipped.parameters(), STEEPEST)
        self.optimizers[name].step()


class LossTrainer(NetworkTrainer, ABC):
    """A training with one optimiser, called ``optimizer``, down one loss. A subclass says the loss."""

    clipped: nn.Module | None = None  # whose gradient is clipped

    @abstractmethod
    def loss(self, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """The loss of one batch, drawn by ``generator``; and the named losses that :meth:`step` returns."""

    def rate(self) -> float | None:
        """The learning rate of the next step; None: the optimiser's own."""
        return None

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """Rate, loss, backward, clip, step, count."""
        loss, told = self.loss(generator)
        rate = self.rate()
        if rate is not None:
            self.set_rate(rate)
        self.descend("optimizer", loss, self.clipped)
        self.done += 1
        if self.average is not None:
            self.average.after(self.done)
        return told


@dataclass(frozen=True, slots=True)
class FileCheckpointStore:
    """A file of its own folder, which is made if it is not there."""

    path: Path

    def read(self) -> bytes | None:
        """The file's bytes."""
        return self.path.read_bytes() if self.path.exists() else None

    def write(self, data: bytes) -> None:
        """Beside the file, synced, then renamed over it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, data)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """What a caller may show."""

    step: int
    steps: int
    losses: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long, how often, and what it is called."""

    steps: int
    run: str  # SHA-256 of configuration and images
    seed: int
    checkpoint_every: int = 500
    say_every: int = 50


def train(
    trainer: Trainer,
    plan: TrainingPlan,
    place: Path | CheckpointStore,
    say: Callable[[TrainingProgress], None] = lambda _: None,
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
        OtherRunError: the place holds another run, or a longer one.
        TrainingCheckpointError: the checkpoint cannot be read.
        DivergedError: a loss is not finite.
    """
    if isinstance(place, Path):
        place.mkdir(parents=True, exist_ok=True)
        place = FileCheckpointStore(place / CHECKPOINT)
    generator = torch.Generator().manual_seed(plan.seed)
    begun = _restore(trainer, plan, place.read(), generator)
    if begun > plan.steps:
        raise OtherRunError("the folder's run is already longer: choose at least as many steps, or another folder")
    for step in range(begun + 1, plan.steps + 1):
        losses = trainer.step(generator)
        if not all(abs(v) < float("inf") for v in losses.values()):
            raise DivergedError(f"at step {step}: {', '.join(sorted(losses))} not all finite")
        if step % plan.say_every == 0 or step == plan.steps:
            say(TrainingProgress(step, plan.steps, losses))
        if step % plan.checkpoint_every == 0 or step == plan.steps:
            place.write(save_state(plan.run, step, {**trainer.state(), _GENERATOR: generator.get_state()}))
            picture(step)
    return begun


def save_state(run: str, step: int, state: Mapping[str, Tensor]) -> bytes:
    """A checkpoint of a run after ``step`` steps."""
    kept = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    told = json.dumps({"run": run, "sha256": _digest(kept), "step": step})
    return safetensors.torch.save(kept, {_HEADER: told})  # one key: their order is not kept


def checkpoint_bytes(build: Callable[[], nn.Module]) -> int:
    """The most that a checkpoint of a network's training takes: its weights, their average and Adam's two moments."""
    with torch.device("meta"):
        net = build()
    return 5 * sum(int(tensor.nbytes) for tensor in net.state_dict().values()) + HEADER_BYTES


def load_state(raw: bytes, run: str) -> tuple[int, dict[str, Tensor]]:
    """What :func:`save_state` wrote: the step and the state.

    Raises:
        OtherRunError: it is another run's.
        TrainingCheckpointError: it cannot be read, or a bit of it has changed.
    """
    try:
        state = safetensors.torch.load(raw)
        told: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
        told = json.loads(told[_HEADER])
        step, whose, digest = int(told["step"]), str(told["run"]), str(told["sha256"])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as fault:
        raise TrainingCheckpointError(f"{CHECKPOINT} is damaged: delete it to start again") from fault
    if whose != run:
        raise OtherRunError(
            f"{CHECKPOINT} belongs to a run with another configuration or other images: choose another folder"
        )
    if _digest(state) != digest:
        raise TrainingCheckpointError(f"{CHECKPOINT} is damaged: delete it to start again")
    return step, state


def _digest(state: Mapping[str, Tensor]) -> str:
    """Of every tensor: safetensors has no checksum, and a flipped bit would be trained on."""
    told = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        told.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        told.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return told.hexdigest()


def _restore(trainer: Trainer, plan: TrainingPlan, raw: bytes | None, generator: torch.Generator) -> int:
    if raw is None:
        return 0
    step, state = load_state(raw, plan.run)
    try:
        generator.set_state(state.pop(_GENERATOR))
        trainer.restore(state)
    except (KeyError, ValueError, RuntimeError) as fault:
        raise TrainingCheckpointError(f"{CHECKPOINT} does not fit this network: delete it to start again") from fault
    return step


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


def device_generator(generator: torch.Generator, device: str) -> torch.Generator:
    """The generator itself on a CPU; elsewhere one of that device, seeded from it."""
    if torch.device(device).type == "cpu":
        return generator
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=generator)))


def torch_generator(seed: int, device: str = "cpu") -> torch.Generator:
    """A separate generator. It protects nothing private: noise comes from :class:`agent.dp.noise.Entropy`."""
    return torch.Generator(device).manual_seed(seed)
