"""AdamP: Adam without the update component that only changes the length of a scale-invariant weight.

Heo et al. 2021, "AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant Weights" (arXiv
2006.08217), Algorithm 2, with the published delta; without weight decay, which C-DeID-GAN does not use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

DELTA: Final = 0.1  # Eq. 11: below DELTA / sqrt(dim) a weight and its gradient count as orthogonal
EPS: Final = 1e-8


class AdamP(torch.optim.Optimizer):
    """The optimiser; a group's ``step`` counts its steps."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float]) -> None:
        """Begin at step 0."""
        super().__init__(parameters, {"lr": lr, "betas": betas, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss is computed anew
        """One step down the gradients that there are."""
        for group in self.param_groups:
            group["step"] += 1
            beta1, beta2 = group["betas"]
            rate = group["lr"] / (1.0 - beta1 ** group["step"])
            scale = math.sqrt(1.0 - beta2 ** group["step"])
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                grad, mean, square = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(grad, weight=1.0 - beta1)
                square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                update = square.sqrt().add_(EPS).reciprocal_().mul_(scale).mul_(mean)
                if parameter.ndim > 1:
                    _project(parameter, grad, update)
                parameter.add_(update, alpha=-rate)


def _project(weight: Tensor, grad: Tensor, update: Tensor) -> None:
    """Eq. 10 and 11: take the radial part out of ``update``, in place, where the weight is scale-invariant.

    A weight is tried by output channel first, then whole.
    """
    for rows in (len(weight), 1):
        w, g = weight.reshape(rows, -1), grad.reshape(rows, -1)
        if cosine_similarity(g, w, dim=1, eps=EPS).abs().max() < DELTA / math.sqrt(w.shape[1]):
            unit = w / w.norm(dim=1, keepdim=True).add(EPS)
            radial = (unit * update.reshape(rows, -1)).sum(dim=1, keepdim=True)
            update.sub_((unit * radial).view_as(update))
            return
