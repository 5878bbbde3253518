"""Several processes of one site train one model together: each takes a share of the drawn patients.

All processes draw the same batch and the same noise, since the bytes come from the first one's generator. Each clips
its share, and the float64 sums are added up before the noise, so the noise is added once. Sums without noise travel
between the processes: all of them must belong to one site, on machines that may see its images (never across
hospitals). Only the result of rank 0 is released. If one process dies or falls out of step the others stop with an
exception: a missing share never counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from agent.domain import CheckpointStore
from agent.dp.clipping import ClippedSum, PrivacyUnit, RowLosses, trainable
from agent.dp.noise import Entropy
from protos.common.errors import TrainingError

PATIENCE: Final = 600.0  # seconds, with a process that says nothing: longer than a share of a step takes
_SECOND: Final = dist.default_pg_timeout / dist.default_pg_timeout.total_seconds()
_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class OutOfStepError(TrainingError, RuntimeError):
    """The processes do not train the same model on the same patients: begin again from the checkpoint."""


def join(rank: int, world: int, init_method: str, backend: str = "gloo", patience: float = PATIENCE) -> None:
    """Become process ``rank`` of ``world`` that train together; returns when all are there.

    Args:
        rank: 0 to world - 1; 0 is the one that releases.
        world: how many processes.
        init_method: where they meet: "file:///..." on one machine, "tcp://host:port" inside the site's own network.
        backend: "gloo" on processors; "nccl" on graphics cards, one for each process, chosen before.
        patience: with a silent process, before everything stops; seconds.
    """
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=_SECOND * patience)


def leave() -> None:
    """End what :func:`join` began."""
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class SharedEntropy:
    """The bytes of the first process's generator, given to all of them: the same batch, the same noise."""

    first: Entropy  # asked in the first process only

    def take(self, count: int) -> bytes:
        """Give ``count`` fresh bytes, the same everywhere.

        Raises:
            OutOfStepError: another process asks for another number: it has other patients or another model.
        """
        _agree([count])
        return _from_first(self.first.take(count) if dist.get_rank() == 0 else bytes(count)) if count else b""


@dataclass(frozen=True, slots=True)
class SharedCheckpointStore:
    """A checkpoint that the first process keeps for all of them."""

    first: CheckpointStore  # read and written in the first process only

    def read(self) -> bytes | None:
        """What the first process reads."""
        raw = self.first.read() if dist.get_rank() == 0 else None
        size = int.from_bytes(
            _from_first((-1 if raw is None else len(raw)).to_bytes(8, "big", signed=True)), "big", signed=True
        )
        if size <= 0:
            return None if size < 0 else b""
        return _from_first(raw if raw is not None else bytes(size))

    def write(self, data: bytes) -> None:
        """Written by the first process; returns when it is durable."""
        if dist.get_rank() == 0:
            self.first.write(data)
        dist.barrier()


def abreast(engine: ClippedSum) -> ClippedSum:
    """The sum of all processes, each computing its share of the units by ``engine``.

    Raises:
        OutOfStepError: (the engine) other weights or another number of drawn units somewhere.
        RuntimeError: (the engine) a process has died, or was silent for too long.
    """

    def clipped_sum(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
        parameters = trainable(model)
        bits = [p.detach().contiguous().view(_BITS[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
        _agree([len(units), *torch.stack(bits).tolist()])
        total = engine(model, loss, units[dist.get_rank() :: dist.get_world_size()], clip).to(_device())
        dist.all_reduce(total)
        return total.cpu()

    return clipped_sum


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _from_first(data: bytes) -> bytes:
    """The first process's bytes, everywhere; the others give as many, of any value."""
    buffer = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(_device())
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()


def _agree(numbers: Sequence[int]) -> None:
    """Raise ``OutOfStepError`` unless all processes say the same numbers."""
    said = torch.tensor([len(numbers)], dtype=torch.int64, device=_device())
    for mine in (said, torch.tensor(numbers, dtype=torch.int64, device=_device())):
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise OutOfStepError("the processes have different patients or weights: begin again from the checkpoint")
