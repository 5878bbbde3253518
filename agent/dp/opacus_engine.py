"""Opacus as an engine: its hooks make each row's gradient, and what is clipped, measured and summed is ours.

Yousefpour et al. 2021 (arXiv 2109.12298). It is a second opinion, and slower than our own engine. Its hooks cannot
follow a module that adds in place to what a hook holds, nor parameters of the root beside modules: see
:data:`NOT_EXACT`. Its ghost norms (Bu et al. 2023) are in float32, and off by more than ``MARGIN`` where a patient's
rows cancel; so they are a peer in the benchmark, and no engine.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from opacus.grad_sample import GradSampleModule
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from agent.dp.clipping import (
    MOST_ROWS,
    ChunkedSum,
    PrivacyUnit,
    RowLosses,
    UnsuitableModelError,
    by_chunks,
    clipped_sum_of,
    row_losses_of,
    trainable,
)

_ADDS: Final = "its blocks add in place to what Opacus' hooks hold"
NOT_EXACT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "resnet18": _ADDS,
        "resnet50": _ADDS,
        "segresnet": _ADDS,
        "vit-s16": "it owns parameters beside its modules, of which Opacus' hooks make no gradient",
    }
)


def opacus_engine(size: int, most_rows: int = MOST_ROWS) -> ChunkedSum:
    """An engine for at most ``size`` patients at once, compared with ``loop_engine`` in the first batches of a model.

    Raises:
        UnsuitableModelError: (the engine) its hooks cannot follow the model, or the comparison failed.
    """

    def prepare(shapes: Any, model: nn.Module, loss: RowLosses, clip: float) -> Callable[..., Tensor]:
        parameters = trainable(model)

        def of_part(part: Sequence[PrivacyUnit]) -> Tensor:
            rows, batch = shapes.filled(part)
            there = tuple(row.to(parameters[0].device) for row in rows)
            with _hooked(model) as wrapped, torch.enable_grad():
                told = row_losses_of(loss, wrapped, there)
                torch.autograd.backward((told * batch.weights(told)).sum())
                found: list[Any] = [getattr(p, "grad_sample", None) for p in parameters]
            counted = torch.tensor([count > 0 for count in batch.counts])
            made = [
                p.new_zeros(len(batch.counts), *p.shape) if rows is None else batch.sums(rows)
                for p, rows in zip(parameters, found, strict=True)
            ]
            return clipped_sum_of(made, clip, counted)

        return of_part

    return by_chunks(size, most_rows, prepare)


@contextlib.contextmanager
def _hooked(model: nn.Module) -> Iterator[nn.Module]:
    """The model with Opacus' hooks, which record in training only; as it was afterwards.

    Raises:
        UnsuitableModelError: Opacus refuses it, or fails in a pass.
    """
    modes = {module: module.training for module in model.modules()}
    in_place = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    gradients = [(p, p.grad) for p in model.parameters()]
    wrapped = None
    try:
        for module in in_place:
            module.inplace = False  # type: ignore[assignment]
        model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = GradSampleModule(model, loss_reduction="sum")
            yield wrapped
    except (NotImplementedError, AttributeError, TypeError, ValueError) as fault:
        raise UnsuitableModelError(f"Opacus cannot train it ({type(fault).__name__}): set another engine") from fault
    finally:
        if wrapped is not None:
            wrapped.to_standard_module()
        for module, mode in modes.items():
            module.training = mode
        for module in in_place:
            module.inplace = True  # type: ignore[assignment]
        for parameter, gradient in gradients:
            parameter.grad = gradient
        _forget(model)


def _forget(model: nn.Module) -> None:
    """Patients' activations and gradients that the hooks left on modules and parameters."""
    for one in (*model.modules(), *model.parameters()):
        for name in ("activations", "grad_sample", "_current_grad_sample", "_forward_counter", "summed_grad"):
            if name in vars(one):
                delattr(one, name)


def judged(model: nn.Module) -> list[str]:
    """What Opacus' validator says against a network, and how many layers its fixer would replace; []: nothing."""
    twin = copy.deepcopy(model).train()
    found = [str(error).splitlines()[0] for error in ModuleValidator.validate(twin, strict=False)]
    fixed = dict(ModuleValidator.fix(twin).named_modules()) if found else {}
    replaced = sum(type(module) is not type(fixed.get(name, module)) for name, module in twin.named_modules())
    return [*found, f"its fixer would replace {replaced} layers"] if found else []
