"""Passes in bfloat16: one patient still moves a sum by the clip at most; what is summed is what was measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from agent.dp import clipping, gradient_recorder
from agent.dp.clipping import (
    ClippedSum,
    PrivacyUnit,
    UnsuitableModelError,
    bookkeeping_engine,
    loop_engine,
    vmap_engine,
)
from agent.dp.per_example_gradients import in_full
from tests.support.real_networks import network, row_losses, units_for

CLIP = 0.1
ENGINES: dict[str, ClippedSum] = {
    "looped": loop_engine, "bookkept": bookkeeping_engine(4), "chunked": vmap_engine(4),
}  # fmt: skip
CASES = [(name, "bookkept") for name in ("resnet18", "vit-s16", "unet")]
CASES += [("small-cnn", engine) for engine in ENGINES]


class _Halved(nn.Module):
    """A network whose passes are in bfloat16, as ``row_losses`` of a task has them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out: Tensor = self.net(x)
        return in_full(out)


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_one_patient_moves_the_sum_by_the_clip_at_most_and_by_its_own_gradient_alone(name: str, engine: str) -> None:
    model, step = _Halved(network(name)), ENGINES[engine]
    units = units_for(name, (1, 2, 1, 1))
    whole = step(model, row_losses, units, CLIP)
    full = step(network(name), row_losses, units, CLIP)
    assert not torch.equal(whole, full), "it is another precision"
    assert float(torch.cosine_similarity(whole, full, dim=0)) > 0.5
    for one, unit in enumerate(units[:2]):
        rest = step(model, row_losses, [*units[:one], *units[one + 1 :]], CLIP)
        alone = step(model, row_losses, [unit], CLIP)
        assert 0.999 * CLIP < float((whole - rest).norm()) <= CLIP
        assert float((whole - rest - alone).norm()) <= gradient_recorder.MARGIN * CLIP
        assert alone.dtype == torch.float64


@pytest.mark.parametrize("name", ["small-cnn", "resnet18", "vit-s16"])
def test_norms_in_bfloat16_would_be_seen_red_by_that_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, units = _Halved(network(name)), units_for(name, (1,) * 6)
    engine = bookkeeping_engine(1)

    def most() -> float:
        return max(float(engine(model, row_losses, [unit], CLIP).norm()) for unit in units)

    assert most() <= CLIP
    factors = gradient_recorder.clip_factors
    monkeypatch.setattr(
        gradient_recorder, "clip_factors", lambda norms, clip: factors(norms.bfloat16().double(), clip)
    )
    assert most() > CLIP * (1 + 10 * gradient_recorder.MARGIN)


def test_a_gradient_of_16_bits_is_never_clipped() -> None:
    with pytest.raises(UnsuitableModelError, match="16 bits is too coarse"):
        clipping.clipped_sum_of([torch.ones(2, 3, dtype=torch.bfloat16)], CLIP)
    assert float(clipping.clipped_sum_of([torch.ones(2, 3)], CLIP).norm()) <= 2 * CLIP


def test_cross_checks_are_in_float64_whatever_the_passes_are_in() -> None:
    units = [PrivacyUnit((unit.rows[0].double(), unit.rows[1])) for unit in units_for("small-cnn", (1, 2))]
    model = network("small-cnn").double()
    exact, ours = (bookkeeping_engine(2)(net, row_losses, units, CLIP) for net in (model, _Halved(model)))
    assert torch.equal(exact, ours)
