"""Images as arrays of numpy, (n, h, w[, 3]) in [0, 1], and as tensors of torch, (n, c, h, w) in [-1, 1]."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

Shape = tuple[int, ...]  # (h, w) of grey images, (h, w, 3) of RGB ones


def to_tensor(images: NDArray[np.float32]) -> Tensor:
    """(n, h, w) grey or (n, h, w, 3) RGB in [0, 1] as (n, 1 | 3, h, w) float32 in [-1, 1].

    Raises:
        ValueError: another shape.
    """
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        raise ValueError("images are (n, h, w) or (n, h, w, 3)")
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)
    return torch.from_numpy(planes) * 2.0 - 1.0


def to_unit(tensor: Tensor) -> NDArray[np.float32]:
    """(n, 1 | 3, h, w) in [-1, 1] as (n, h, w) or (n, h, w, 3) float32 in [0, 1], clipped."""
    planes = ((tensor.detach().float().cpu() + 1.0) * 0.5).clamp(0.0, 1.0).permute(0, 2, 3, 1).contiguous().numpy()
    out: NDArray[np.float32] = planes[..., 0] if planes.shape[3] == 1 else planes
    return np.ascontiguousarray(out)


def to_bytes(unit: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Intensities in [0, 1] in 256 levels, rounded."""
    levels: NDArray[np.uint8] = np.rint(np.clip(unit, 0.0, 1.0) * 255.0).astype(np.uint8)
    return levels


def channels(shape: Shape) -> int:
    """1 of (h, w), 3 of (h, w, 3).

    Raises:
        ValueError: another shape.
    """
    if len(shape) == 2:
        return 1
    if len(shape) == 3 and shape[2] == 3:
        return 3
    raise ValueError("an image is (h, w) or (h, w, 3)")


def resized(tensor: Tensor, side: int) -> Tensor:
    """(n, c, h, w) at (side, side): averaged where it shrinks, bilinear where it grows. Differentiable."""
    h, w = tensor.shape[-2:]
    if (h, w) == (side, side):
        return tensor
    if h % side == 0 and w % side == 0:
        return torch.nn.functional.avg_pool2d(tensor, (h // side, w // side))
    return interpolate(tensor, (side, side), mode="bilinear", align_corners=False, antialias=True)


def with_channels(tensor: Tensor, count: int) -> Tensor:
    """(n, 1 | 3, h, w) with ``count`` channels: grey is repeated, colour becomes its luma (ITU-R BT.601)."""
    have = tensor.shape[1]
    if have == count:
        return tensor
    if have == 1:
        return tensor.expand(-1, count, -1, -1)
    luma = torch.tensor([0.299, 0.587, 0.114], dtype=tensor.dtype, device=tensor.device)
    return (tensor * luma[:, None, None]).sum(dim=1, keepdim=True)
