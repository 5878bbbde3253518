"""Opacus as an engine: exact where it is offered, refused by name where its hooks cannot follow a network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent.dp import clipping
from agent.dp.clipping import PrivacyUnit, UnsuitableModelError, loop_engine
from agent.dp.opacus_engine import NOT_EXACT, judged, opacus_engine
from agent.mechanisms.federated import task_training
from agent.mechanisms.federated.mechanism import NO_FILES
from agent.mechanisms.federated.task_training import engine_refusal
from agent.models.networks.trainable import build
from policies.tasks.networks import NetworkSpec
from tests.support.real_networks import NETWORKS, built, network, row_losses, stirred, units_for
from tests.support.small_tasks import classification

OFFERED = [name for name in NETWORKS if NETWORKS[name][0].name not in NOT_EXACT]
LONG = ("densenet121", "densenet121 of volumes", "unet of volumes", "small-cnn of volumes")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in OFFERED])
def test_where_it_is_offered_it_has_the_sum_of_one_pass_for_each_patient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping, "PROBES", 0)
    model = stirred(built(name)).module.double()
    units = [PrivacyUnit((u.rows[0].double(), u.rows[1])) for u in units_for(name, (1, 3, 2))]
    before = {key: (module.training, getattr(module, "inplace", None)) for key, module in model.named_modules()}
    reference = loop_engine(model, row_losses, units, 0.1)
    ours = opacus_engine(2)(model, row_losses, units, 0.1)
    assert float((ours - reference).norm()) <= 1e-10 * float(reference.norm()) != 0.0
    after = {key: (module.training, getattr(module, "inplace", None)) for key, module in model.named_modules()}
    assert before == after
    assert not any(hasattr(p, "grad_sample") or p.grad is not None for p in model.parameters())


def test_it_is_compared_with_the_loop_and_one_patient_moves_the_sum_by_the_clip_at_most() -> None:
    model, units, clip = network("small-cnn"), units_for("small-cnn", (1, 2, 1)), 0.05
    engine = opacus_engine(4)
    whole = engine(model, row_losses, units, clip)
    for one in range(3):
        moved = float((whole - engine(model, row_losses, [*units[:one], *units[one + 1 :]], clip)).norm())
        assert 0.99 * clip < moved <= clip


@pytest.mark.parametrize("name", ["resnet18", "vit-s16", "segresnet"])
def test_a_network_that_its_hooks_cannot_follow_is_refused_by_name_and_would_be_by_the_engine(name: str) -> None:
    with pytest.raises((UnsuitableModelError, RuntimeError)):
        opacus_engine(2)(network(name), row_losses, units_for(name, (1, 1)), 0.1)
    size = {"vit-s16": (32, 32)}.get(name, (16, 16))
    if name == "segresnet":
        assert name in NOT_EXACT
        return
    task = classification(network=NetworkSpec(name), size=size)
    why = engine_refusal(task, "opacus")
    assert why.startswith(f'engine = "opacus" in site.toml cannot train task {task.name}: network.name: {name}: ')
    assert engine_refusal(task, "own") == ""


@pytest.mark.parametrize("name", ["resnet18", "vit-s16"])
def test_the_head_alone_of_such_a_network_is_trained_by_its_hooks(name: str) -> None:
    spec = NetworkSpec(name, trained="head")
    assert engine_refusal(classification(network=spec, size=(32, 32)), "opacus") == ""
    net = build(spec, 1, (32, 32), 3, 0, NO_FILES.__getitem__)
    rows = [PrivacyUnit((net.prepare(torch.randn(2, 1, 32, 32)), torch.tensor([[1], [2]]))) for _ in range(3)]
    loss = task_training.row_losses(classification(network=spec, size=(32, 32)))
    reference = loop_engine(net.trained, loss, rows, 0.1)
    ours = opacus_engine(2)(net.trained, loss, rows, 0.1)
    assert float((ours - reference).norm()) <= 1e-5 * float(reference.norm())


def test_its_validator_judges_a_network_by_what_is_trained() -> None:
    assert judged(network("resnet18")) == []
    bad = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    first, *_, last = judged(bad)
    assert "BatchNorm" in first
    assert last == "its fixer would replace 1 layers"
    assert isinstance(bad[1], nn.BatchNorm2d), "it is judged, and not changed"
    assert torch.is_grad_enabled()
