"""One backward pass for many patients: record each layer's inputs, and compute each patient's gradient from them.

Book-keeping (Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost"): while one
backward pass runs for all units of a chunk, the weights want no gradient, so that only those of activations are
computed; each layer's input and output gradient give every unit's gradient by its weights (``per_unit``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from agent.dp.per_example_gradients import RULES, Batch, suitable, unit_gradients
from protos.common.errors import TrainingError


class NoGradientRuleError(TrainingError, ValueError):
    """The model cannot be trained this way; the text names types of modules."""


class GradientRecorder:
    """The layers of a model, with what they record during one backward pass."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Find the layers whose weights are trained.

        Raises:
            NoGradientRuleError: a trained parameter belongs to a module that no rule is for.
        """
        self._parameters, self._wanted = parameters, set(parameters)
        own = {m: {p for p in m.parameters(recurse=False) if p in self._wanted} for m in model.modules()}
        if wrong := sorted({type(m).__name__ for m, found in own.items() if found and not suitable(m)}):
            known = ", ".join(kind.__name__ for kind in RULES)
            raise NoGradientRuleError(f"no gradient of each patient for {', '.join(wrong)}: only for plain {known}")
        self._layers = [m for m, found in own.items() if found]
        self._found: dict[nn.Parameter, Tensor] = {}
        self._backward = False

    def gradients(self, losses: Callable[[], Tensor], batch: Batch) -> list[Tensor]:
        """The gradient of each unit's mean loss, (u, *shape) for every parameter in order.

        The model is left as it was, also when something in it fails.

        Args:
            losses: runs the model on all rows: (rows,), the loss of each.
            batch: whose rows these are.
        Raises:
            NoGradientRuleError: a layer is used in a way that the rules do not cover.
        """
        device = self._parameters[0].device
        anchor = torch.zeros((), device=device, requires_grad=True)  # every layer's output leads back to it
        after = partial(self._after, anchor, batch)
        handles: list[RemovableHandle] = []
        try:
            handles += (layer.register_forward_hook(after, with_kwargs=True) for layer in self._layers)
            for parameter in self._parameters:
                parameter.requires_grad_(False)
            with torch.enable_grad():
                told = losses()
                weights = [1.0 / count for count in batch.counts for _ in range(count)]
                value = (told * torch.tensor(weights, device=told.device, dtype=told.dtype)).sum()
            self._backward = True
            torch.autograd.grad(value, anchor, allow_unused=True)  # and to nothing else: no .grad is touched
            empty = (len(batch.counts),)
            return [self._found.get(p, p.new_zeros(empty + p.shape)) for p in self._parameters]
        finally:
            self._backward, self._found = False, {}
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()

    def _after(
        self, anchor: Tensor, batch: Batch, module: nn.Module, given: tuple[Any, ...], named: Any, out: Tensor
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None  # the loss takes no gradient through this call
        if len(given) != 1 or named or not len(given[0]) == len(out) == batch.rows:
            raise NoGradientRuleError(
                f"{type(module).__name__} must be called with one tensor that has a row for each of the batch's"
            )
        told: Tensor = _Tap.apply(out, anchor, given[0].detach(), partial(self._take, module, batch))  # type: ignore[no-untyped-call]
        return told

    def _take(self, module: nn.Module, batch: Batch, a: Tensor, g: Tensor) -> None:
        if not self._backward:
            raise NoGradientRuleError("the loss takes a gradient itself (a gradient penalty)")
        for name, gradient in unit_gradients(module, a, g, batch).items():
            parameter = getattr(module, name)
            if parameter in self._found:  # a layer called twice, or a tied weight: one gradient, one norm
                self._found[parameter] += gradient
            elif parameter in self._wanted:
                self._found[parameter] = gradient


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
