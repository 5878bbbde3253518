"""Layers with an equalised learning rate, shared by generator and discriminator.

Weights are drawn with unit variance and scaled when they are used (Karras et al. 2018, section 4.1), so that every
layer learns at the same speed. Gains and clamp are those of StyleGAN2-ADA.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, hardtanh, leaky_relu, linear

from agent.models.stylegan.resampling import halved, low_pass, smoothed

CLAMP: Final = 256.0  # activations stay inside, so that half precision cannot overflow (2020b, appendix)
SLOPE: Final = 0.2
GAIN: Final = math.sqrt(2.0)  # of the leaky ReLU: it keeps the variance
EPS: Final = 1e-8


def activated(x: Tensor, gain: float = 1.0) -> Tensor:
    """Leaky ReLU, clamp. ``x`` has its gain already: gain * lrelu(x) = lrelu(gain * x), one pass over memory less."""
    return hardtanh(leaky_relu(x, SLOPE), -CLAMP * gain, CLAMP * gain)


class FullyConnected(nn.Module):
    """Equalised learning rate: weights of unit variance, scaled when used (Karras et al. 2018, section 4.1)."""

    def __init__(self, inputs: int, outputs: int, rate: float = 1.0, bias: float = 0.0, leaky: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / rate)
        self.bias = nn.Parameter(torch.full((outputs,), bias))
        self.scale = rate / math.sqrt(inputs)
        self.rate = rate
        self.leaky = leaky

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs) -> (n, outputs)."""
        y = linear(x, self.weight * self.scale, self.bias * self.rate)
        return leaky_relu(y, SLOPE) * GAIN if self.leaky else y


class Conv2d(nn.Module):
    """Convolution of the discriminator: equalised learning rate, low-pass before it halves."""

    resample_filter: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int, down: int = 1, plain: bool = False) -> None:
        super().__init__()
        self.down = down
        self.kernel = kernel
        self.register_buffer("resample_filter", low_pass())
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.bias = None if plain else nn.Parameter(torch.zeros(outputs))
        self.scale = 1.0 / math.sqrt(inputs * kernel * kernel)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """(n, inputs, r, r) -> (n, outputs, r / down, r / down)."""
        bias = None if self.bias is None else self.bias * (GAIN * gain)
        weight = self.weight * (self.scale * (gain if bias is None else GAIN * gain))
        if self.down == 1:
            y = conv2d(x, weight, bias, padding=self.kernel // 2)
        elif self.kernel == 1:
            y = conv2d(halved(x, self.resample_filter), weight, bias)
        else:
            y = conv2d(smoothed(x, self.resample_filter, padding=2), weight, bias, stride=2)
        return y if bias is None else activated(y, gain)
