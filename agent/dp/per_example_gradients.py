"""The gradient of each unit by the weights of one layer, from the layer's input and the gradient of its output.

A unit is consecutive rows of a batch. The rules are those of book-keeping (Bu et al. 2023, "Differentially Private
Optimization on Large Model at Small Cost", section 3): the weight's gradient of one row is a contraction of input a
and output gradient g, and that of a unit folds its rows into the same contraction, so that no row's gradient is made.
A rule holds for exactly one type: a subclass may scale its weight, and would be wrong without a sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

FEW: Final = 4  # rows of a unit: with fewer, one convolution of many groups is faster than one for each unit

Grads = dict[str, Tensor]  # by parameter's name: (u, *its shape)
Rule = Callable[[Any, Tensor, Tensor, "UnitBatch"], Grads]


@dataclass(frozen=True, slots=True)
class UnitBatch:
    """Which rows of a batch are whose: unit i has the next ``counts[i]`` of them."""

    counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of all units."""
        return sum(self.counts)

    @property
    def each(self) -> int | None:
        """Rows of every unit, if all have equally many."""
        return self.counts[0] if len(set(self.counts)) == 1 else None

    def parts(self, a: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of each unit, one unit after the other."""
        for start, stop in pairwise(accumulate(self.counts, initial=0)):
            yield a[start:stop], g[start:stop]

    def sums(self, rows: Tensor) -> Tensor:
        """(rows, ...) -> (units, ...): the sum of each unit's rows."""
        if self.each is not None:
            return rows.reshape(len(self.counts), self.each, *rows.shape[1:]).sum(dim=1)
        owner = torch.arange(len(self.counts), device=rows.device).repeat_interleave(
            torch.tensor(self.counts, device=rows.device)
        )
        return rows.new_zeros(len(self.counts), *rows.shape[1:]).index_add_(0, owner, rows)


def suitable(module: nn.Module) -> bool:
    """Whether there is a rule for the module, with the settings that it has and its parameters where they belong."""
    if type(module) not in RULES or not set(module._parameters) <= {"weight", "bias"}:
        return False
    if "forward" in vars(module):  # replaced on the instance
        return False
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return True


def unit_gradients(module: nn.Module, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    """Gradients of each unit by the module's weight and bias.

    Args:
        module: a :func:`suitable` one.
        a: (rows, ...) its input.
        g: (rows, ...) the loss's gradient by its output.
        batch: whose rows these are.
    Returns:
        By name, (u, *shape of the parameter); a parameter that the module does not have is left out.
    """
    found = RULES[type(module)](module, a, g, batch)
    return {name: gradient for name, gradient in found.items() if getattr(module, name) is not None}


def _linear(_: nn.Module, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    if batch.each is not None:
        units = len(batch.counts)
        a, g = a.reshape(units, -1, a.shape[-1]), g.reshape(units, -1, g.shape[-1])
        return {"weight": torch.bmm(g.transpose(1, 2), a), "bias": g.sum(dim=1)}
    weight = [gu.reshape(-1, g.shape[-1]).T @ au.reshape(-1, a.shape[-1]) for au, gu in batch.parts(a, g)]
    return {"weight": torch.stack(weight), "bias": batch.sums(g.flatten(1, -2).sum(dim=1) if g.ndim > 2 else g)}


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_WEIGHT: Final[Mapping[type[nn.Module], Callable[..., Tensor]]] = {
    nn.Conv1d: conv1d_weight,
    nn.Conv2d: conv2d_weight,
    nn.Conv3d: conv3d_weight,
}


def _convolution(module: Convolution, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    padding: Any = module.padding
    if module.padding_mode != "zeros" or padding == "same":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        a, padding = F.pad(a, module._reversed_padding_repeated_twice, mode=mode), 0
    if padding == "valid":
        padding = 0
    if batch.each is not None and module.groups == 1 and _pointwise(module, padding):
        found = _linear(module, a.flatten(2).transpose(1, 2), g.flatten(2).transpose(1, 2), batch)
        return {**found, "weight": found["weight"].reshape(-1, *module.weight.shape)}
    by_weight, shape, groups = _WEIGHT[type(module)], module.weight.shape, module.groups
    settings = {"stride": module.stride, "padding": padding, "dilation": module.dilation}
    bias = batch.sums(g.flatten(2).sum(dim=2))
    units = len(batch.counts)
    if batch.each is None or (batch.each >= FEW and not a.is_cuda):
        parts = [by_weight(au, shape, gu, groups=groups, **settings) for au, gu in batch.parts(a, g)]
        return {"weight": torch.stack(parts), "bias": bias}
    # the units side by side as groups of channels: one convolution, in which they do not meet
    wide = (units * shape[0], *shape[1:])
    a, g = _beside(a, units), _beside(g, units)
    weight = by_weight(a, wide, g, groups=units * groups, **settings)
    return {"weight": weight.reshape(units, *shape), "bias": bias}


def _pointwise(module: Convolution, padding: Any) -> bool:
    """A kernel of one pixel that meets every pixel once: a linear layer of channels."""
    padded = padding != 0 and any(padding)
    return not padded and all(k == 1 for k in module.kernel_size) and all(s == 1 for s in module.stride)


def _beside(rows: Tensor, units: int) -> Tensor:
    """(units * n, channels, ...) -> (n, units * channels, ...)."""
    return rows.reshape(units, len(rows) // units, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)


def _group_norm(module: nn.GroupNorm, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    normal = F.group_norm(a, module.num_groups, eps=module.eps)
    rows, channels = a.shape[:2]
    weight, bias = ((x.reshape(rows, channels, -1)).sum(dim=2) for x in (normal.mul_(g), g))
    return {"weight": batch.sums(weight), "bias": batch.sums(bias)}


def _layer_norm(module: nn.LayerNorm, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    shape = tuple(module.normalized_shape)
    normal = F.layer_norm(a, shape, eps=module.eps)
    weight, bias = (x.reshape(len(a), -1, prod(shape)).sum(dim=1) for x in (normal.mul_(g), g))
    return {
        "weight": batch.sums(weight).reshape(-1, *shape),
        "bias": batch.sums(bias).reshape(-1, *shape),
    }


def _embedding(module: nn.Embedding, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    units, numbers = len(batch.counts), module.num_embeddings
    owner = torch.arange(units, device=a.device).repeat_interleave(torch.tensor(batch.counts, device=a.device))
    slot = owner.view(-1, *[1] * (a.ndim - 1)) * numbers + a
    flat = g.new_zeros(units * numbers, module.embedding_dim)
    weight = flat.index_add_(0, slot.reshape(-1), g.reshape(-1, module.embedding_dim)).reshape(units, numbers, -1)
    if module.padding_idx is not None:
        weight[:, module.padding_idx] = 0
    return {"weight": weight}


RULES: Final[Mapping[type[nn.Module], Rule]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}
