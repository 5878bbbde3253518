"""Resampling of feature maps and images with the low-pass filter [1, 3, 3, 1], as depthwise convolutions.

Karras et al. 2020a (arXiv 1912.04958), section 4.1, after Zhang 2019. Paddings are those that keep images centred:
doubling and halving are adjoint up to the gain. Outside of the image is zero.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d

TAPS: Final = (1.0, 3.0, 3.0, 1.0)


def in_float(x: Tensor) -> AbstractContextManager[object]:
    """Keep the types of the operands, also inside a caller's autocast: for styles, demodulation, images, logits."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def low_pass() -> Tensor:
    """The filter, (4, 4) float32, of sum 1."""
    taps = torch.tensor(TAPS)
    taps = taps / taps.sum()
    return torch.outer(taps, taps)


def _depthwise(fir: Tensor, x: Tensor, gain: float) -> Tensor:
    count = x.shape[1]
    return (fir * gain).to(x.dtype).expand(count, 1, *fir.shape)


def doubled(x: Tensor, fir: Tensor) -> Tensor:
    """(n, c, h, w) at (2h, 2w): zeros between the samples, then the filter with gain 4."""
    with in_float(x):  # an image that is summed over scales keeps its precision
        return conv_transpose2d(x, _depthwise(fir, x, 4.0), stride=2, padding=1, groups=x.shape[1])


def halved(x: Tensor, fir: Tensor) -> Tensor:
    """(n, c, 2h, 2w) at (h, w): the filter, then every second sample."""
    with in_float(x):
        return conv2d(x, _depthwise(fir, x, 1.0), stride=2, padding=1, groups=x.shape[1])


def smoothed(x: Tensor, fir: Tensor, padding: int, gain: float = 1.0) -> Tensor:
    """The filter at every sample: (n, c, h, w) at (h + 2 padding - 3, w + 2 padding - 3)."""
    with in_float(x):
        return conv2d(x, _depthwise(fir, x, gain), padding=padding, groups=x.shape[1])
