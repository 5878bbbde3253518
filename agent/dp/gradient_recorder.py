"""What one backward pass for many patients tells of each: its gradient by each layer, or the norm of it alone.

Book-keeping (Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost"): while one
backward pass runs for all units of a chunk, the weights want no gradient, so that only those of activations are
computed; each layer's input and output gradient give every unit's gradient by its weights, or its norm alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from agent.dp.per_example_gradients import (
    RULES,
    UnitBatch,
    bias_gradients,
    gram_norms,
    has_few_positions,
    in_full,
    suitable,
    unit_gradients,
    whole_gradient,
)
from protos.common.errors import TrainingError

# Of the bound: covers the rounding of norms and of float64 sums, and of other patients' gradients where any is: in
# chunks of one shape seldom a bit changes, and what is added up for a whole chunk is added in float64.
# It would not cover TF32, whose last bits are 1e-3: see ``full_precision``.
MARGIN: Final = 1e-5
_BLOCK: Final = 512  # numbers of one block of a norm
_SMALL: Final = 4096  # numbers of a parameter that is taken together with others: there are many, and each takes time
_CANCELLED: Final = 1e4  # of a unit's norm or the bound: with more, float64 rounding of a squared norm nears MARGIN


class NoGradientRuleError(TrainingError, ValueError):
    """The model cannot be trained this way; the text names types of modules."""


class GradientRecorder:
    """The layers of a model, with what they record during one backward pass."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Find the layers whose weights are trained, and what stands beside them once for every row.

        Raises:
            NoGradientRuleError: a trained parameter belongs to a module that no rule is for.
        """
        self._parameters, self._wanted = parameters, set(parameters)
        own = {
            m: {name: p for name, p in m.named_parameters(recurse=False) if p in self._wanted}
            for m in model.modules()
        }
        self._layers = [m for m, found in own.items() if found and suitable(m)]
        beside = [(m, name, p) for m, found in own.items() if not suitable(m) for name, p in found.items()]
        # such as a class token or positions: one row of it is added or put to each row of the batch
        self._bare = [(m, name, p) for m, name, p in beside if p.ndim > 1 and len(p) == 1]
        if wrong := sorted({type(m).__name__ for m, _, p in beside if p.ndim < 2 or len(p) != 1}):
            known = ", ".join(kind.__name__ for kind in RULES)
            raise NoGradientRuleError(f"no gradient of each patient for {', '.join(wrong)}: only for plain {known}")
        self._found: dict[nn.Parameter, _Recorded] = {}
        self._backward = False

    def clipped_sum(self, losses: Callable[[], Tensor], batch: UnitBatch, clip: float) -> Tensor:
        """The sum of the units' gradients of their mean losses, each of norm at most ``clip``: (d,) float64.

        The model is left as it was, also when something in it fails.

        Args:
            losses: runs the model on all rows: (rows,), the loss of each.
            batch: whose rows these are.
            clip: the bound.
        Raises:
            NoGradientRuleError: a layer is used in a way that the rules do not cover.
        """
        try:
            self._record(losses, batch)
            return self._summed(batch, clip)
        finally:
            self._found = {}

    def _record(self, losses: Callable[[], Tensor], batch: UnitBatch) -> None:
        """One pass forwards and one backwards; afterwards ``_found`` has what each parameter's gradients come of."""
        device = self._parameters[0].device
        anchor = torch.zeros((), device=device, requires_grad=True)  # every layer's output leads back to it
        after = partial(self._after, anchor, batch)
        handles: list[RemovableHandle] = []
        try:
            handles += (layer.register_forward_hook(after, with_kwargs=True) for layer in self._layers)
            for parameter in self._parameters:
                parameter.requires_grad_(False)
            with torch.enable_grad():
                for module, name, parameter in self._bare:
                    copies = parameter.detach().expand(batch.rows, *parameter.shape[1:]).clone()
                    take = partial(self._take_copies, batch, parameter)
                    module._parameters[name] = _Tap.apply(copies, anchor, copies[:0], take)  # type: ignore[no-untyped-call]
                told = losses()
                value = (told * batch.weights(told)).sum()
            self._backward = True
            torch.autograd.grad(value, anchor, allow_unused=True)  # and to nothing else: no .grad is touched
        finally:
            self._backward = False
            for module, name, parameter in self._bare:
                module._parameters[name] = parameter
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()

    def _summed(self, batch: UnitBatch, clip: float) -> Tensor:
        squares = torch.zeros(len(batch.counts), dtype=torch.float64, device=self._parameters[0].device)
        mass = torch.zeros_like(squares)  # the largest of a layer
        small = [p for p, found in self._found.items() if found.is_small()]  # norms and biases: hundreds, in one
        beside = torch.cat([self._found[p].made.flatten(1) for p in small], dim=1) if small else None  # type: ignore[union-attr]
        if beside is not None:
            squares += squared_norms(beside)
        large = [p for p, found in self._found.items() if not found.is_small()]
        for p in large:
            square, weighs = self._found[p].squares(batch)
            squares += square
            mass = torch.maximum(mass, weighs)
        norms = squares.clamp(min=0.0).sqrt()
        factor = clip_factors(norms, clip)
        # one that cancels so far that not even float64 tells what is left counts as one that is not finite
        sound = torch.isfinite(squares) & (mass <= _CANCELLED * norms.clamp(min=clip))
        factor *= sound & torch.tensor([count > 0 for count in batch.counts], device=factor.device)
        total = torch.zeros(sum(p.numel() for p in self._parameters), dtype=torch.float64, device=factor.device)
        parts = _split(total, self._parameters)
        if beside is not None:
            for p, part in _split(scaled_sum(beside, factor), small).items():
                parts[p].copy_(part)
        for p in large:
            self._found[p].total(batch, factor, parts[p])
        return total.cpu()

    def _after(
        self, anchor: Tensor, batch: UnitBatch, module: nn.Module, given: tuple[Any, ...], named: Any, out: Tensor
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None  # the loss takes no gradient through this call
        if len(given) != 1 or named or not len(given[0]) == len(out) == batch.rows:
            raise NoGradientRuleError(
                f"{type(module).__name__} must be called with one tensor that has a row for each of the batch's"
            )
        told: Tensor = _Tap.apply(out, anchor, given[0].detach(), partial(self._take, module, batch))  # type: ignore[no-untyped-call]
        return told

    def _take(self, module: nn.Module, batch: UnitBatch, a: Tensor, g: Tensor) -> None:
        self._refuse_penalty()
        weight: Any = module.weight
        if weight not in self._wanted or not has_few_positions(module, a, g, batch):
            for name, gradient in unit_gradients(module, a, g, batch).items():
                self._of(getattr(module, name)).add(gradient)
            return
        self._of(weight).calls.append((module, a, g))
        if module.bias is not None:
            self._of(module.bias).add(bias_gradients(module, g, batch))

    def _take_copies(self, batch: UnitBatch, parameter: nn.Parameter, _: Tensor, g: Tensor) -> None:
        self._refuse_penalty()
        self._of(parameter).add(batch.sums(in_full(g))[:, None])

    def _refuse_penalty(self) -> None:
        if not self._backward:
            raise NoGradientRuleError("the loss takes a gradient itself (a gradient penalty)")

    def _of(self, parameter: Any) -> _Recorded:
        if parameter not in self._wanted:
            return _Recorded()  # of no use
        return self._found.setdefault(parameter, _Recorded())


@dataclass(slots=True, eq=False)
class _Recorded:
    """What the gradients of one parameter come of. A layer called twice, or a tied weight: one gradient, one norm."""

    made: Tensor | None = None  # (u, *shape): each unit's
    calls: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)  # layer, input, output gradient

    def add(self, gradients: Tensor) -> None:
        """Of one more use of the parameter."""
        self.made = gradients if self.made is None else self.made.add_(gradients)

    def is_small(self) -> bool:
        """Whether each unit's is there, and few numbers."""
        return self.made is not None and not self.calls and self.made[0].numel() <= _SMALL

    def squares(self, batch: UnitBatch) -> tuple[Tensor, Tensor]:
        """(u,) float64 twice: the squared norm of each unit's, and the mass where that comes of Gram matrices."""
        if len(self.calls) > 1 or self.made is not None:
            for module, a, g in self.calls:
                self.add(unit_gradients(module, a, g, batch)["weight"])
            self.calls = []
        if self.made is not None:
            square = squared_norms(self.made.flatten(1))
            return square, torch.zeros_like(square)
        return gram_norms(*self.calls[0], batch)

    def total(self, batch: UnitBatch, factor: Tensor, out: Tensor) -> None:
        """The sum of the units', each times its factor, to ``out`` (d,); one whose factor is 0 may not be finite."""
        if self.made is not None:
            out.copy_(scaled_sum(self.made.flatten(1), factor))
            return
        for module, *both in self.calls:  # one, see squares
            a, g = both if bool(factor.all()) else (_kept(rows, factor, batch) for rows in both)
            whole_gradient(module, a, g, factor.repeat_interleave(batch.width), out)


def _kept(rows: Tensor, factor: Tensor, batch: UnitBatch) -> Tensor:
    """Zeros in the place of units whose factor is 0: 0 * NaN would be NaN."""
    return torch.where(batch.each(factor > 0, rows), rows, torch.zeros_like(rows))


class _Tap(torch.autograd.Function):
    """The identity, which tells the gradient that comes back. The input is freed as the pass goes on."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, a: Tensor, take: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.mark_dirty(out)  # not a view: an activation may work in place on it
        ctx.save_for_backward(a)  # an input that is changed in place afterwards is an error
        ctx.take = take
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (a,) = ctx.saved_tensors
        ctx.take(a, g)
        return g, None, None, None


def _split(whole: Tensor, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """(d,) -> by parameter."""
    return dict(zip(parameters, torch.split(whole, [p.numel() for p in parameters]), strict=True))


def squared_norms(part: Tensor) -> Tensor:
    """(u, d) -> (u,) float64. Norms of blocks in the tensor's own type, and of the blocks in float64.

    PyTorch's own float32 norm of 2.4 million numbers is wrong by 4.5e-5, which is more than ``MARGIN``; a float64 one
    of float32 numbers takes thirty times as long as this, which is wrong by 1e-6 at worst.
    """
    whole = part.shape[1] // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(part[:, :whole].reshape(len(part), -1, _BLOCK), dim=2)
    rest = torch.linalg.vector_norm(part[:, whole:], dim=1)
    squares: Tensor = blocks.double().square().sum(dim=1) + rest.double().square()
    return squares


def clip_factors(norms: Tensor, clip: float) -> Tensor:
    """(u,) float64: what each unit's gradient is multiplied with; 0 where the norm is not finite."""
    factor = (clip / (norms * (1.0 + MARGIN) + 1e-30)).clamp(max=1.0)
    return torch.where(torch.isfinite(norms), factor, 0.0)


def scaled_sum(part: Tensor, factor: Tensor) -> Tensor:
    """(u, d), (u,) -> (d,) float64; one whose factor is 0 may not be finite."""
    if not bool(factor.all()):  # 0 * NaN would be NaN
        kept = factor.nonzero()[:, 0]
        part, factor = part[kept], factor[kept]
    total: Tensor = factor @ part.double()
    return total
