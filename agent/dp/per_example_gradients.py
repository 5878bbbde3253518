"""The gradient of each unit by the weights of one layer, from the layer's input and the gradient of its output.

A unit is consecutive rows of a batch, equally many for each. The rules are those of book-keeping (Bu et al. 2023,
"Differentially Private Optimization on Large Model at Small Cost", section 3): the weight's gradient of one row is a
contraction of input a and output gradient g, and that of a unit folds its rows into the same contraction, so that no
row's gradient is made. Where a unit has few positions and the weight is large, not even the unit's gradient is made:
its norm is that of two Gram matrices (their section 3.2, the "ghost norm"), and the sum over all units, each with its
own factor, is one ordinary gradient. Both are in float64, since rows that cancel would leave float32 nothing but
rounding. A rule holds for exactly one type: a subclass may scale its weight, and would be wrong without a sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """Which rows of a batch are whose: unit i has the rows from ``i * width`` on, of which ``counts[i]`` are real.

    The rest are copies that fill a batch up to its shape, and count nothing in a loss.
    """

    counts: tuple[int, ...]  # 0: the whole unit fills up
    width: int

    def __post_init__(self) -> None:
        """No unit is wider than the batch has it."""
        if not (self.counts and 0 <= min(self.counts) <= max(self.counts) <= self.width):
            raise ValueError("a unit has at most as many rows as the batch is wide")

    @property
    def rows(self) -> int:
        """Rows of all units, copies too."""
        return len(self.counts) * self.width

    def weights(self, like: Tensor) -> Tensor:
        """(rows,): 1 over the number of its unit's rows for each real row, 0 for a copy."""
        counts = torch.tensor(self.counts, device=like.device)[:, None]
        real = torch.arange(self.width, device=like.device)[None] < counts
        return (real / counts.clamp(min=1)).to(like.dtype).flatten()

    def each(self, of_units: Tensor, like: Tensor) -> Tensor:
        """(u,) -> (rows, 1, ...), to be multiplied with ``like`` (rows, ...)."""
        return of_units.repeat_interleave(self.width).view(-1, *[1] * (like.ndim - 1))

    def by_unit(self, rows: Tensor) -> Tensor:
        """(rows, ...) -> (u, width, ...)."""
        return rows.reshape(len(self.counts), self.width, *rows.shape[1:])

    def sums(self, rows: Tensor) -> Tensor:
        """(rows, ...) -> (u, ...): the sum of each unit's rows."""
        return self.by_unit(rows).sum(dim=1)


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
    found = RULES[type(module)](module, in_full(a), in_full(g), batch)
    return {name: gradient for name, gradient in found.items() if getattr(module, name) is not None}


def in_full(rows: Tensor) -> Tensor:
    """Numbers of 16 bits, as autocast leaves them, in 32: what is clipped is made, measured and summed in these."""
    return rows.float() if rows.is_floating_point() and rows.element_size() < 4 else rows


def has_few_positions(module: nn.Module, a: Tensor, g: Tensor, batch: UnitBatch) -> bool:
    """Whether a unit's input and output gradient are smaller than its gradient by the weight would be.

    That is t (i + o) < i o, with t positions of a unit, and i inputs and o outputs at each.
    """
    if type(module) is nn.Linear:
        positions, inputs, outputs = prod(a.shape[1:-1]), a.shape[-1], g.shape[-1]
    elif type(module) in _WEIGHT:
        if module.groups != 1 or (type(module) is nn.Conv3d and set(module.dilation) != {1}):
            return False
        positions, inputs, outputs = prod(g.shape[2:]), module.weight[0].numel(), g.shape[1]  # type: ignore[index]
    else:
        return False
    return batch.width * positions * (inputs + outputs) < inputs * outputs


def gram_norms(module: nn.Module, a: Tensor, g: Tensor, batch: UnitBatch) -> tuple[Tensor, Tensor]:
    """The squared norm of each unit's gradient by the weight without that gradient, and its mass: (u,) float64 both.

    With a unit's inputs A (t, i) and output gradients G (t, o), the gradient is G' A, and its squared norm the sum of
    (A A') * (G G') over all pairs of positions (Bu et al. 2023, equation 4). The mass is the sum of |a| |g| over the
    positions: the gradient would have that norm if nothing cancelled, and rounding is measured against it. Everything
    is in float64: of float32 Gram matrices a patient whose rows cancel would get a norm that is far too small.
    """
    positions = (batch.by_unit(rows).flatten(1, 2) for rows in _positions(module, a, g))
    grams = [x @ x.transpose(1, 2) for x in positions]
    norms = [gram.diagonal(dim1=1, dim2=2).sqrt() for gram in grams]
    return (grams[0] * grams[1]).sum(dim=(1, 2)), (norms[0] * norms[1]).sum(dim=1)


def whole_gradient(module: nn.Module, a: Tensor, g: Tensor, factors: Tensor, out: Tensor) -> None:
    """The gradient of all rows together by the module's weight, each row times its factor; it `has_few_positions`.

    One matrix product over all rows: PyTorch's own float64 convolution makes one for each, and takes twice as long.

    Args:
        module: the layer.
        a: (rows, ...) its input.
        g: (rows, ...) the loss's gradient by its output.
        factors: (rows,) float64.
        out: (d,) float64, where it goes.
    """
    inputs, outputs = _positions(module, a, g)
    outputs.mul_(factors[:, None, None])
    torch.mm(outputs.flatten(0, 1).T, inputs.flatten(0, 1), out=out.view(outputs.shape[-1], -1))


def bias_gradients(module: nn.Module, g: Tensor, batch: UnitBatch) -> Tensor:
    """Gradients of each unit by the bias of such a module, (u, o)."""
    g = in_full(g)
    positions = g.reshape(len(g), -1, g.shape[-1]) if type(module) is nn.Linear else g.flatten(2).transpose(1, 2)
    return batch.sums(positions.sum(dim=1))


def _linear(_: nn.Module, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    units = len(batch.counts)
    a, g = a.reshape(units, -1, a.shape[-1]), g.reshape(units, -1, g.shape[-1])
    return {"weight": torch.bmm(g.transpose(1, 2), a), "bias": g.sum(dim=1)}


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_WEIGHT: Final[Mapping[type[nn.Module], Callable[..., Tensor]]] = {
    nn.Conv1d: conv1d_weight,
    nn.Conv2d: conv2d_weight,
    nn.Conv3d: conv3d_weight,
}


def _padded(module: Convolution, a: Tensor) -> tuple[Tensor, Any]:
    """The input, and what is still to be padded with zeros."""
    if module.padding_mode == "zeros" and module.padding != "same":
        return a, 0 if module.padding == "valid" else module.padding
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, module._reversed_padding_repeated_twice, mode=mode), 0


def _by_weight(module: Any, a: Tensor, padding: Any, g: Tensor, shape: Any, groups: int | None = None) -> Tensor:
    settings = {"stride": module.stride, "padding": padding, "dilation": module.dilation}
    return _WEIGHT[type(module)](a, shape, g, groups=groups or module.groups, **settings)


def _positions(module: Any, a: Tensor, g: Tensor) -> list[Tensor]:
    """Copies of input and output gradient, as those of a linear layer: (rows, t, i) and (rows, t, o) float64."""
    if type(module) is nn.Linear:
        found = [rows.reshape(len(rows), -1, rows.shape[-1]) for rows in (a, g)]
    else:
        found = [_patches(module, a), g.flatten(2).transpose(1, 2)]
    return [rows.to(torch.float64, memory_format=torch.contiguous_format, copy=True) for rows in found]


def _patches(module: Convolution, a: Tensor) -> Tensor:
    """(rows, channels, ...) -> (rows, positions, numbers under the kernel)."""
    a, padding = _padded(module, a)
    if _pointwise(module, padding):
        return a.flatten(2).transpose(1, 2)
    if type(module) is nn.Conv2d:
        return F.unfold(a, module.kernel_size, module.dilation, padding, module.stride).transpose(1, 2)
    if type(module) is nn.Conv1d:  # a picture one pixel high
        kernel, dilation, stride = ((1, *size) for size in (module.kernel_size, module.dilation, module.stride))
        return F.unfold(a[:, :, None], kernel, dilation, (0, *(padding or (0,))), stride).transpose(1, 2)
    if padding:
        a = F.pad(a, [side for size in reversed(padding) for side in (size, size)])
    for dim, (size, step) in enumerate(zip(module.kernel_size, module.stride, strict=True), start=2):
        a = a.unfold(dim, size, step)
    rows = a.permute(0, 2, 3, 4, 1, 5, 6, 7)
    return rows.reshape(len(a), prod(rows.shape[1:4]), -1)


def _convolution(module: Convolution, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    a, padding = _padded(module, a)
    if module.groups == 1 and _pointwise(module, padding):
        found = _linear(module, a.flatten(2).transpose(1, 2), g.flatten(2).transpose(1, 2), batch)
        return {**found, "weight": found["weight"].reshape(-1, *module.weight.shape)}
    shape, units = module.weight.shape, len(batch.counts)
    bias = batch.sums(g.flatten(2).sum(dim=2))
    if batch.width >= FEW and not a.is_cuda:
        pairs = zip(batch.by_unit(a), batch.by_unit(g), strict=True)
        return {"weight": torch.stack([_by_weight(module, au, padding, gu, shape) for au, gu in pairs]), "bias": bias}
    # the units side by side as groups of channels: one convolution, in which they do not meet
    wide, groups = (units * shape[0], *shape[1:]), units * module.groups
    weight = _by_weight(module, _beside(a, units), padding, _beside(g, units), wide, groups)
    return {"weight": weight.reshape(units, *shape), "bias": bias}


def _transposed(module: Any, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    """Of the convolution whose adjoint the module is: input and output gradient change places."""
    units, shape = len(batch.counts), module.weight.shape
    by_weight = _TRANSPOSED[type(module)]
    bias = batch.sums(g.flatten(2).sum(dim=2))
    around = [(side, side - more) for side, more in zip(module.padding, module.output_padding, strict=True)]
    g = F.pad(g, [size for pair in reversed(around) for size in pair])
    settings = {"stride": module.stride, "padding": 0, "dilation": module.dilation}
    wide = (units * shape[0], *shape[1:])
    weight = by_weight(_beside(g, units), wide, _beside(a, units), groups=units * module.groups, **settings)
    return {"weight": weight.reshape(units, *shape), "bias": bias}


_TRANSPOSED: Final[Mapping[type[nn.Module], Callable[..., Tensor]]] = {
    nn.ConvTranspose1d: conv1d_weight,
    nn.ConvTranspose2d: conv2d_weight,
    nn.ConvTranspose3d: conv3d_weight,
}


def _pointwise(module: Convolution, padding: Any) -> bool:
    """A kernel of one pixel that meets every pixel once: a linear layer of channels."""
    padded = padding != 0 and any(padding)
    return not padded and all(k == 1 for k in module.kernel_size) and all(s == 1 for s in module.stride)


def _beside(rows: Tensor, units: int) -> Tensor:
    """(units * n, channels, ...) -> (n, units * channels, ...)."""
    return rows.reshape(units, len(rows) // units, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)


def _group_norm(module: nn.GroupNorm, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    return _scaled(F.group_norm(a, module.num_groups, eps=module.eps), g, batch)


def _instance_norm(module: Any, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    return _scaled(F.instance_norm(a, eps=module.eps), g, batch)


def _scaled(normal: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    """Of a scale and a shift for each channel."""
    weight, bias = (x.reshape(*x.shape[:2], -1).sum(dim=2) for x in (normal.mul_(g), g))
    return {"weight": batch.sums(weight), "bias": batch.sums(bias)}


def _layer_norm(module: nn.LayerNorm, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    shape = tuple(module.normalized_shape)
    normal = F.layer_norm(a, shape, eps=module.eps)
    weight, bias = (x.reshape(len(a), -1, prod(shape)).sum(dim=1) for x in (normal.mul_(g), g))
    return {
        "weight": batch.sums(weight).reshape(-1, *shape),
        "bias": batch.sums(bias).reshape(-1, *shape),
    }


def _prelu(module: nn.PReLU, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    below = (a.clamp(max=0.0) * g).reshape(*a.shape[:2], -1).sum(dim=2)
    return {"weight": batch.sums(below if module.num_parameters > 1 else below.sum(dim=1, keepdim=True))}


def _embedding(module: nn.Embedding, a: Tensor, g: Tensor, batch: UnitBatch) -> Grads:
    units, numbers = len(batch.counts), module.num_embeddings
    slot = batch.each(torch.arange(units, device=a.device), a) * numbers + a
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
    nn.ConvTranspose1d: _transposed,
    nn.ConvTranspose2d: _transposed,
    nn.ConvTranspose3d: _transposed,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.InstanceNorm3d: _instance_norm,
    nn.LayerNorm: _layer_norm,
    nn.PReLU: _prelu,
    nn.Embedding: _embedding,
}
