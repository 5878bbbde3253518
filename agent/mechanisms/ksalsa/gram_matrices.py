"""Local style: Gram matrices of the patches of a feature map, their correspondence, and how far they are apart.

k-SALSA, section 3.2, Eq. 1-3 and 7. A Gram matrix is symmetric, so its upper triangle is kept, off-diagonal entries
times sqrt(2): Euclidean products and distances of these vectors are the Frobenius ones of the matrices, at half the
memory. Everything here is float32 or wider, whatever the features are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize

Metric = Literal["cos", "mse"]
_TINY: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the windows lie: ``side`` x ``side`` of them tile the map; ``overlap`` > 1 slides them by a part."""

    side: int = 4  # 4 x 4 = 16 patches (k-SALSA, supplement B); 1: one patch, the global style of Table 4
    overlap: int = 1  # stride = window / overlap; the published code has 1, the text says "sliding window"

    def __post_init__(self) -> None:
        """Refuse what is no grid."""
        if not (1 <= self.side <= 64 and 1 <= self.overlap <= 8):
            raise ValueError("a grid has 1 to 64 windows a side and an overlap of 1 to 8")

    @property
    def patches(self) -> int:
        """p, the number of windows."""
        return (self.overlap * (self.side - 1) + 1) ** 2

    def elements(self, channels: int, h: int, w: int) -> int:
        """The feature values in one window of a (channels, h, w) map: what a Gram matrix is divided by."""
        return channels * (h // self.side) * (w // self.side)


def local_styles(features: Tensor, grid: Grid) -> Tensor:
    """The local style features S of Eq. 1-2, divided by the number of values in a window (channels x pixels).

    The division makes S a mean, so that a loss does not grow with resolution or width; a cosine does not see it.
    Overlapping windows cost no more: a Gram matrix sums over pixels, so that of a window is the sum of its cells'.

    Args:
        features: (n, c, h, w).
        grid: the windows; side x overlap divides h and w.
    Returns:
        (n, p, c (c + 1) / 2): scaled upper triangles, the windows in row-major order.
    Raises:
        ValueError: the map cannot be cut into these windows.
    """
    n, c, h, w = features.shape
    g = grid.side * grid.overlap
    if h % g or w % g:
        raise ValueError("the grid does not divide the feature map: choose another grid or layer")
    if features.dtype not in (torch.float32, torch.float64):
        features = features.float()
    cells = features.reshape(n, c, g, h // g, g, w // g).permute(0, 2, 4, 1, 3, 5).reshape(n * g * g, c, -1)
    grams = (cells @ cells.transpose(1, 2)).reshape(n, g * g, c * c)
    row, column = torch.triu_indices(c, c, device=features.device)
    scale = (row != column).to(features.dtype).add(1.0).sqrt() / grid.elements(c, h, w)
    styles: Tensor = grams.index_select(2, row * c + column) * scale
    if grid.overlap > 1:
        maps = styles.transpose(1, 2).reshape(n, -1, g, g)
        styles = avg_pool2d(maps, grid.overlap, stride=1, divisor_override=1).flatten(2).transpose(1, 2)
    return styles


def correspondence(source: Tensor, target: Tensor, metric: Metric) -> Tensor:
    """a(i, j) of Eq. 3: the target patch that is most like each source patch, one matrix product for all pairs.

    Args:
        source: (b, r, d), the r = images x patches source patches of each of b clusters.
        target: (b, p, d).
        metric: ``cos`` as in Eq. 3, or ``mse`` (the nearest; Supplementary Table 5).
    Returns:
        (b, r) int64. No gradient passes: an index is no function to differentiate.
    """
    with torch.no_grad():
        if metric == "cos":
            # the source's own length multiplies a whole row, and moves no maximum
            likeness = source @ normalize(target, dim=2).transpose(1, 2)
        else:
            likeness = source @ target.transpose(1, 2) - 0.5 * target.square().sum(dim=2)[:, None, :]
        return likeness.argmax(dim=2)


def style_loss(source: Tensor, weight: Tensor, target: Tensor, match: Tensor, metric: Metric) -> Tensor:
    """Eq. 7 with a weight for every source patch: sum of ``weight`` x ||S_source - S_target,a||_F^2 of each cluster.

    All source patches matched to one target patch pull it to their weighted mean, so the sum over r patches is, but
    for a constant, one over p: sum_a n_a ||t_a - mean_a||^2 + scatter. The gradient is the same, and costs p, not r.

    Args:
        source: (b, r, d).
        weight: (b, r), zero for padding.
        target: (b, p, d); the gradient goes here.
        match: (b, r), from :func:`correspondence`.
        metric: ``mse`` as in Eq. 7, or ``cos``: 1 - cosine in place of the squared distance (Supplementary Table 5).
    Returns:
        (b,).
    """
    b, r, _ = source.shape
    taken = source.new_zeros(b, target.shape[1], r).scatter_(1, match[:, None, :], weight[:, None, :])  # (b, p, r)
    if metric == "cos":
        pulls = taken @ normalize(source, dim=2)
        return weight.sum(dim=1) - (normalize(target, dim=2) * pulls).sum(dim=(1, 2))
    count = taken.sum(dim=2)  # n_a
    mean = (taken @ source) / count.clamp_min(_TINY)[:, :, None]
    energy = (weight * source.square().sum(dim=2)).sum(dim=1)
    scatter = energy - (count * mean.square().sum(dim=2)).sum(dim=1)
    return (count * (target - mean).square().sum(dim=2)).sum(dim=1) + scatter.clamp_min(0.0)
