"""LoRA: the merged weight gives the same output, and only layers of known types get it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent.models.networks.low_rank import LowRank, add_low_rank


@pytest.mark.parametrize(("layer", "rows"), [
    (nn.Linear(6, 5), (2, 3, 6)),
    (nn.Conv2d(2, 5, 3, stride=2, padding=1), (2, 2, 9, 9)),
    (nn.Conv2d(2, 5, 3, padding="same", dilation=2, padding_mode="circular"), (2, 2, 9, 9)),
    (nn.Conv3d(2, 5, (1, 2, 3), bias=False), (2, 2, 4, 4, 4)),
])  # fmt: skip
def test_the_merged_weight_gives_the_same_output(layer: nn.Module, rows: tuple[int, ...]) -> None:
    model = nn.Sequential(layer).double()
    with torch.no_grad():
        x = torch.randn(rows).double()
        before = model(x)
        narrow = add_low_rank(model, 3, set(model.modules()))
        model.double()
        assert [type(one) for one in narrow] == [type(layer)] * 2
        assert torch.equal(model(x), before)
        narrow[1].weight.normal_()
        flat = narrow[1].weight.flatten(1) @ narrow[0].weight.flatten(1)
        layer.weight += flat.view_as(layer.weight)
        merged = layer(x)
        layer.weight -= flat.view_as(layer.weight)
        assert not torch.allclose(merged, before)
        assert torch.allclose(model(x), merged, atol=1e-12)


class _Scaled(nn.Linear):
    """Does something else with its weight."""


def test_only_layers_of_these_types_within_these_modules_get_it() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), _Scaled(4, 4), nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(4, 4, 2)),
    )
    assert len(add_low_rank(model, 2, set(model[1].modules()))) == 2
    assert [type(one) for one in model.modules() if isinstance(one, LowRank)] == [LowRank]
    assert type(model[0]) is nn.Linear
    assert not any(p.requires_grad for p in model[1][0].layer.parameters())
