"""LoRA (Hu et al. 2022): beside a frozen layer, two narrow ones without bias that are trained.

They are plain layers, so that every engine of per-patient gradients knows them. The second one begins at zeros: the
network gives at first what it gave before.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from agent.models.networks.architectures import to_zeros

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)


class LowRank(nn.Module):
    """A frozen layer, and what is added to its output."""

    def __init__(self, layer: nn.Module, down: nn.Module, up: nn.Module) -> None:
        """``up`` after ``down`` has the shapes of ``layer``; it is set to zeros."""
        super().__init__()
        self.layer, self.down, self.up = layer.requires_grad_(requires_grad=False), down, up
        to_zeros(up)

    def forward(self, x: Tensor) -> Tensor:
        """W x + B A x."""
        total: Tensor = self.layer(x) + self.up(self.down(x))
        return total


def add_low_rank(model: nn.Module, rank: int, within: Collection[nn.Module]) -> list[nn.Module]:
    """Put a ``LowRank`` in the place of every linear layer and ungrouped convolution that is among ``within``.

    Transposed convolutions stay as they are. The narrow layers draw their weights by torch's own generator.

    Returns:
        The narrow layers.
    """
    made: list[nn.Module] = []
    for name, child in model.named_children():
        pair = _narrow(child, rank) if child in within else None
        if pair is None:
            made += add_low_rank(child, rank, within)
        else:
            setattr(model, name, LowRank(child, *pair))
            made += pair
    return made


def _narrow(layer: nn.Module, rank: int) -> tuple[nn.Module, nn.Module] | None:
    """The two layers beside one of exactly these types: a subclass may do something else with its weight."""
    if type(layer) is nn.Linear:
        return nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
    if isinstance(layer, _CONVOLUTIONS) and type(layer) in _CONVOLUTIONS and layer.groups == 1:
        kind = type(layer)
        down = kind(
            layer.in_channels,
            rank,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            layer.dilation,  # type: ignore[arg-type]
            bias=False,
            padding_mode=layer.padding_mode,
        )
        return down, kind(rank, layer.out_channels, 1, bias=False)
    return None
