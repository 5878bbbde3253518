"""AdamP against the package's own, step by step and bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent.defacing.deid_gan.training import AdamP

peer = pytest.importorskip("pytorch_optimizer", reason="the oracle is not installed")


def network() -> nn.Sequential:
    draw = torch.Generator().manual_seed(3)
    made = nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.Flatten(), nn.Linear(96, 4))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.9, 0.999)])
def test_every_step_is_that_of_the_package(betas: tuple[float, float]) -> None:
    ours, theirs = network(), network()
    steps = (AdamP(ours.parameters(), 1e-2, betas), peer.AdamP(theirs.parameters(), lr=1e-2, betas=betas))
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        batch = torch.randn(5, 2, 6, 6, generator=draw)
        for net, optimizer in zip((ours, theirs), steps, strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(net(batch).square().mean())
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
        assert steps[0].state_dict()["state"].keys() == steps[1].state_dict()["state"].keys()


def test_the_update_of_a_scale_invariant_weight_leaves_its_length() -> None:
    net = network()
    weight, optimizer = net[0].weight, AdamP(net[0].parameters(), 1e-4, (0.0, 0.99))
    before = weight.detach().clone()
    torch.autograd.backward(net(torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(1))).square().mean())
    weight.grad -= (weight.grad * before).sum((1, 2, 3), keepdim=True) / before.square().sum((1, 2, 3), True) * before
    optimizer.step()
    moved = weight.detach() - before
    radial = (moved * before).sum((1, 2, 3)) / before.flatten(1).norm(dim=1)
    assert float(moved.flatten(1).norm(dim=1).min()) > 1e-5
    assert float(radial.abs().max()) < 1e-3 * float(moved.flatten(1).norm(dim=1).max())
