"""The convolutional trunk that learned features and recognisers share: residual blocks with GroupNorm.

GroupNorm (Wu & He 2018) and not BatchNorm: no image's map depends on the images beside it, so an embedding is a
function of one image, in training too. Residual blocks as in He et al. 2016, halved by averaging.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, silu

_GROUPS: Final = 8


@dataclass(frozen=True, slots=True)
class TrunkArchitecture:
    """The size of a trunk. It halves the image between its levels, so ``side`` / 2^(depth - 1) is left."""

    side: int  # pixels a side that it sees; images are resized to it
    channels: int = 3  # 1 or 3
    width: int = 32  # channels of the first level, doubled at every level
    depth: int = 4  # levels
    blocks: int = 1  # residual blocks a level
    most: int = 512  # channels of a level, at most

    def __post_init__(self) -> None:
        """Refuse what is not a network, or would not fit a machine."""
        told = (self.side, self.channels, self.width, self.depth, self.blocks, self.most)
        if not all(type(v) is int for v in told):
            raise ValueError("a trunk is described by whole numbers")
        if self.channels not in (1, 3) or not (1 <= self.depth <= 8 and 1 <= self.blocks <= 8):
            raise ValueError("a trunk has 1 or 3 channels, 1 to 8 levels and 1 to 8 blocks a level")
        if self.width % _GROUPS or self.most % _GROUPS or not (8 <= self.width <= self.most <= 4096):
            raise ValueError(f"a trunk's width is a multiple of {_GROUPS}, and at most as wide as its widest level")
        if self.side % (1 << (self.depth - 1)) or not 2 << (self.depth - 1) <= self.side <= 1024:
            raise ValueError("a trunk's side can be halved between all levels, and 2 pixels are left")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of every level."""
        return tuple(min(self.width << level, self.most) for level in range(self.depth))

    @property
    def left(self) -> int:
        """Pixels a side of the last level."""
        return self.side >> (self.depth - 1)


class Block(nn.Module):
    """GroupNorm, SiLU, 3x3, twice, beside the identity (a 1x1 convolution where the width changes)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Make the layers."""
        super().__init__()
        self.norm1 = nn.GroupNorm(_GROUPS, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h, w)."""
        y = self.conv1(silu(self.norm1(x)))
        out: Tensor = self.skip(x) + self.conv2(silu(self.norm2(y)))
        return out


class Trunk(nn.Module):
    """(n, channels, side, side) in [-1, 1] as one map for each level."""

    def __init__(self, architecture: TrunkArchitecture) -> None:
        """Make the layers, with torch's own initial weights: call inside ``seeded``."""
        super().__init__()
        self.architecture = architecture
        widths = architecture.widths
        self.stem = nn.Conv2d(architecture.channels, widths[0], 3, padding=1)
        self.levels = nn.ModuleList()
        self.norms = nn.ModuleList()
        for level, outputs in enumerate(widths):
            inputs = widths[max(level - 1, 0)]
            sizes = [inputs, *[outputs] * architecture.blocks]
            self.levels.append(nn.Sequential(*[Block(a, b) for a, b in pairwise(sizes)]))
            self.norms.append(nn.GroupNorm(_GROUPS, outputs))

    def forward(self, x: Tensor, depth: int | None = None) -> list[Tensor]:
        """Maps (n, c_i, side / 2^i, side / 2^i), shallow first; ``depth`` of them."""
        x, out = self.stem(x), []
        for level in range(len(self.levels) if depth is None else depth):
            x = self.levels[level](avg_pool2d(x, 2) if level else x)
            out.append(silu(self.norms[level](x)))
        return out
