"""The walk over a network before a patient's picture enters it: nothing in it remembers, mixes or draws.

Patient-level differential privacy covers the trained parameters alone, by their clipped and noised gradients. A
batch norm that was left in would carry other patients' pictures into this one's gradient, and a running statistic
leaves with the model and has no noise; a parameter that no picture moves gets noise for nothing; one in two places
has another gradient than its layer tells; and a layer that draws makes a gradient that no second pass can check.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from protos.common.errors import TrainingError

_DRAWS = torch.Tag.nondeterministic_seeded


class UnsuitableNetworkError(TrainingError, ValueError):
    """No patient-level differential privacy covers the network. The text names classes and parameters."""


def check_network(model: nn.Module, rows: tuple[int, ...], trained: Collection[str]) -> None:
    """Refuse a network that remembers, mixes or draws, or trains something else than what was asked for.

    One pass forwards and backwards on a copy without numbers (torch's meta device): it takes neither time nor memory.

    Args:
        model: as it will be trained.
        rows: shape of one example.
        trained: names of the parameters that a step shall change.
    Raises:
        UnsuitableNetworkError: with the first reason found.
    """
    _refuse_statistics(model)
    _refuse_sharing(model)
    _refuse_other_parts(model, trained)
    twin = copy.deepcopy(model).to("meta")
    buffers = [(buffer, buffer._version) for buffer in twin.buffers()]
    with torch.enable_grad(), _Draws() as draws:
        out = twin(torch.zeros(2, *rows, device="meta"))
        if not isinstance(out, Tensor):
            raise UnsuitableNetworkError(f"the network gives a {type(out).__name__}, and not one tensor")
        names, parameters = zip(*((n, p) for n, p in twin.named_parameters() if p.requires_grad), strict=True)
        found = torch.autograd.grad(out.sum(), parameters, allow_unused=True)
    if draws.found:
        raise UnsuitableNetworkError(
            f"the network draws random numbers ({draws.found}): a gradient must not depend on them"
        )
    if unused := [name for name, gradient in zip(names, found, strict=True) if gradient is None]:
        raise UnsuitableNetworkError(f"{unused[0]} is trained and never used: it would get noise, and no gradient")
    after = list(twin.buffers())
    if len(after) != len(buffers) or any(
        new is not old or new._version != version for new, (old, version) in zip(after, buffers, strict=True)
    ):
        raise UnsuitableNetworkError("a pass changes a buffer of the network: it would leave without noise")


def _refuse_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
            raise UnsuitableNetworkError(
                f"{name} is a {type(module).__name__}, which mixes patients or remembers them: use group norm"
            )


def _refuse_sharing(model: nn.Module) -> None:
    """No trained number stands in two places, whether as one parameter or as two views of one memory."""
    seen: dict[int, tuple[str, bool]] = {}
    parameters = [(n, p, p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)]
    held = [*parameters, *((n, b, False) for n, b in model.named_buffers(remove_duplicate=False))]
    for name, tensor, trains in held:
        memory = tensor.untyped_storage()._cdata
        before, trained = seen.setdefault(memory, (name, trains))
        if before != name and (trains or trained):
            raise UnsuitableNetworkError(f"{before} and {name} share their numbers: a step would change both")


def _refuse_other_parts(model: nn.Module, trained: Collection[str]) -> None:
    wanted = set(trained)
    found = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not wanted:
        raise UnsuitableNetworkError("nothing of the network is trained")
    if frozen := sorted(wanted - found):
        raise UnsuitableNetworkError(f"{frozen[0]} shall be trained and is frozen, or is not there")
    if more := sorted(found - wanted):
        raise UnsuitableNetworkError(f"{more[0]} shall be frozen and is trained")


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types for it
    """Hears which operation draws from a generator of torch's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _DRAWS in func.tags:
            self.found = self.found or str(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
