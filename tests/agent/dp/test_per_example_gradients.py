"""The rules on whole networks of the field: equal to one pass for each patient, and no patient moves another's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent.dp import clipping
from agent.dp.clipping import (
    ClippedSum,
    PrivacyUnit,
    UnsuitableModelError,
    bookkeeping_engine,
    loop_engine,
    vmap_engine,
)
from tests.support.real_networks import NETWORKS, network, row_losses, units_for

ENGINES = {"bookkept": bookkeeping_engine, "chunked": vmap_engine}


def _doubled(model: nn.Module, units: list[PrivacyUnit]) -> tuple[nn.Module, list[PrivacyUnit]]:
    return model.double(), [PrivacyUnit((u.rows[0].double(), *u.rows[1:])) for u in units]


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "PROBES", 0)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("make", ENGINES)
def test_every_network_has_the_sum_of_one_pass_for_each_patient(make: str, name: str) -> None:
    model, units = _doubled(network(name), units_for(name, (1, 2)))
    reference = loop_engine(model, row_losses, units, 0.3)
    ours = ENGINES[make](2)(model, row_losses, units, 0.3)
    assert float((ours - reference).norm()) <= 1e-10 * float(reference.norm())
    assert float(reference.norm()) > 0.29, "the clip binds"


def _left_out(engine: ClippedSum, model: nn.Module, units: list[PrivacyUnit], changed: list[PrivacyUnit]) -> float:
    """How far the sum moves that counts the first patient alone: the others' gradients are not finite, so 0."""
    return float((engine(model, row_losses, units, 1e9) - engine(model, row_losses, changed, 1e9)).norm())


def _nobody(unit: PrivacyUnit) -> PrivacyUnit:
    """The same patient without a gradient that counts."""
    return PrivacyUnit((torch.full_like(unit.rows[0], torch.nan), *unit.rows[1:]))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("make", ENGINES)
def test_no_patient_moves_a_bit_of_anothers_gradient(make: str, name: str) -> None:
    """The margin of the clip rests on it: chunks of one shape, whoever else is in them."""
    model, engine = network(name), ENGINES[make](4)
    units = units_for(name, (1, 2, 1, 2, 1))
    alone = [units[0], *map(_nobody, units[1:])]
    for changed in (
        [units[0]],
        [*alone[1:], units[0]],
        [units[0], *map(_nobody, units_for(name, (1, 1, 2), seed=9))],
    ):
        assert _left_out(engine, model, alone, changed) == 0.0
    assert engine(model, row_losses, alone, 1e9).any()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("make", ENGINES)
def test_what_a_patient_changes_is_that_patients_part_and_rounding_within_the_margin(make: str, name: str) -> None:
    """Where one gradient is made for a whole chunk, its last bits hang on everybody in it."""
    model, engine, clip = network(name), ENGINES[make](4), 0.3
    units = units_for(name, (1, 2, 1, 2, 1, 1))
    whole = engine(model, row_losses, units, clip)
    for one, unit in enumerate(units[:3]):
        rest = engine(model, row_losses, [*units[:one], *units[one + 1 :]], clip)
        moved = whole - rest - engine(model, row_losses, [unit], clip)
        assert float(moved.norm()) <= clipping.MARGIN * clip
        assert float((whole - rest).norm()) <= clip


def test_chunks_of_a_changing_shape_would_be_seen_red_by_that_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping._Shapes, "_places", lambda self, width: 1)  # filled up to nothing
    moved = []
    for name in ("resnet18", "unet", "vit", "densenet"):
        units = units_for(name, (1, 1, 1, 1))
        alone = [units[0], *map(_nobody, units[1:])]
        engine = bookkeeping_engine(4)
        monkeypatch.setattr(clipping._Shapes, "chunks", lambda self, some: iter([list(some)]))
        moved.append(_left_out(engine, network(name), alone, alone[:1]))
    assert max(moved) > 0.0


def test_a_batch_norm_that_is_left_in_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with pytest.raises(UnsuitableModelError, match="BatchNorm2d keeps statistics"):
        clipping.refuse_batch_statistics(model)
