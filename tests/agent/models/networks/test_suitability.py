"""The walk: every network of the list passes it, and each fault that breaks the guarantee is seen red."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from agent.models.networks.architectures import swap_batch_norms
from agent.models.networks.suitability import UnsuitableNetworkError, check_network
from tests.support.real_networks import NETWORKS, built

ROWS = (1, 8, 8)


def _net(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), middle, nn.Flatten(1), nn.Linear(4 * 36, 2))


def _all(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _refused(model: nn.Module, trained: set[str] | None = None) -> str:
    with pytest.raises(UnsuitableNetworkError) as refused:
        check_network(model, ROWS, _all(model) if trained is None else trained)
    return str(refused.value)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_of_the_list_passes(name: str) -> None:
    net = built(name)
    check_network(net.module, (1, *NETWORKS[name][1]), _all(net.module))


class _OwnBatchNorm(nn.BatchNorm2d):
    """A subclass."""


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), _OwnBatchNorm(4).eval(), nn.BatchNorm2d(4, affine=False)])
def test_a_batch_norm_that_is_left_in_is_refused_frozen_or_not(norm: nn.Module) -> None:
    assert "mixes patients or remembers them" in _refused(_net(norm))


def test_a_running_statistic_is_refused() -> None:
    assert "InstanceNorm2d" in _refused(_net(nn.InstanceNorm2d(4, track_running_stats=True)))
    check_network(model := _net(nn.InstanceNorm2d(4)), ROWS, _all(model))


class _Remembers(nn.Module):
    """A mean of what went through, shared by all who go through later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(dim=(0, 2, 3))[:, None, None])
        return x - self.mean.clone()


class _Replaces(_Remembers):
    """The same by another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=(0, 2, 3))[:, None, None]
        return x - self.mean


@pytest.mark.parametrize("kind", [_Remembers, _Replaces])
def test_a_buffer_that_a_pass_changes_is_refused(kind: type[nn.Module]) -> None:
    assert "changes a buffer" in _refused(_net(kind()))


def test_a_head_in_training_mode_that_draws_is_refused_and_passes_in_evaluation() -> None:
    model = nn.Sequential(_net(nn.ReLU()), nn.Dropout(0.5))
    assert "draws random numbers (" in _refused(model)
    check_network(model.eval(), ROWS, _all(model))


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_what_draws_in_evaluation_is_refused_too() -> None:
    assert "draws random numbers (" in _refused(_net(_Noise()).eval())


def test_a_fixed_scale_of_a_public_file_is_no_statistic_and_is_not_trained() -> None:
    model = _net(nn.BatchNorm2d(4))
    swap_batch_norms(model, fixed=True)
    check_network(model, ROWS, _all(model))
    assert _all(model) == {"0.weight", "0.bias", "3.weight", "3.bias"}


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_trained_parameter_that_is_never_used_is_refused() -> None:
    assert "1.never.weight is trained and never used" in _refused(_net(_Unused()))


def test_numbers_in_two_places_are_refused_whether_one_parameter_or_one_memory() -> None:
    tied = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1))
    tied[1].weight = tied[0].weight
    assert "0.weight and 1.weight share their numbers" in _refused(tied)
    frozen = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1))
    frozen[1].weight = nn.Parameter(frozen[0].weight.detach(), requires_grad=False)
    assert "share their numbers" in _refused(frozen, {"0.weight", "0.bias", "1.bias"})


def test_a_frozen_statistic_that_shares_memory_with_what_is_trained_is_refused() -> None:
    """A public mean would follow the training, without noise of its own and without a clip."""
    model = _net(nn.GroupNorm(2, 4))
    model[1].register_buffer("mean", model[1].weight.detach())
    assert "1.weight and 1.mean share their numbers" in _refused(model)


def test_more_or_less_trained_than_was_asked_for_is_refused() -> None:
    model = _net(nn.ReLU())
    assert "0.weight shall be frozen and is trained" in _refused(model, {"0.bias", "3.weight", "3.bias"})
    model[0].requires_grad_(requires_grad=False)
    assert "0.bias shall be trained and is frozen" in _refused(model)
    assert "nothing of the network is trained" in _refused(copy.deepcopy(model).requires_grad_(False), set())


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


def test_a_network_that_gives_a_tuple_is_refused() -> None:
    assert "gives a tuple" in _refused(_Two())


def test_the_walk_takes_no_memory_and_leaves_the_network_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(1), nn.Linear(4 * 4998**2, 1, device="meta"))
    before = copy.deepcopy(model[0].state_dict())
    check_network(model, (1, 5000, 5000), _all(model))
    assert all(torch.equal(before[name], tensor) for name, tensor in model[0].state_dict().items())
    assert all(p.grad is None for p in model.parameters())
