"""The rules on whole networks of the field: equal to one pass for each patient, and no patient moves another's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent.dp import clipping, gradient_recorder
from agent.dp.clipping import (
    ClippedSum,
    PrivacyUnit,
    UnsuitableModelError,
    bookkeeping_engine,
    loop_engine,
    vmap_engine,
)
from agent.models.networks import build
from policies.tasks.networks import NetworkSpec
from tests.support.real_networks import (
    NETWORKS,
    QUICK,
    built,
    frozen_features,
    network,
    row_losses,
    stirred,
    units_for,
    weights_file,
)

EXACT = {"vit-s16": 1e-12}  # attention, a class token and positions: nothing in it amplifies rounding
ENGINES = {"bookkept": bookkeeping_engine, "chunked": vmap_engine}
# each network with the engine that `best_engine` takes on a processor; of the larger ones, the other in the long form
CASES = [
    pytest.param(make, name, marks=() if make == "bookkept" or name in QUICK else pytest.mark.slow)
    for make in ENGINES
    for name in NETWORKS
]
PARTS: dict[str, dict[str, object]] = {
    "head": {"trained": "head"},
    "last block": {"trained": "last-blocks", "blocks": 1},
    "bias and norms": {"trained": "bias-and-norms"},
    "lora": {"trained": "lora", "rank": 4},
    "lora in the last block": {"trained": "lora", "rank": 4, "blocks": 1},
}


def _doubled(model: nn.Module, units: list[PrivacyUnit]) -> tuple[nn.Module, list[PrivacyUnit]]:
    return model.double(), [PrivacyUnit((u.rows[0].double(), *u.rows[1:])) for u in units]


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "PROBES", 0)


@pytest.mark.parametrize(("make", "name"), CASES)
def test_every_network_has_the_sum_of_one_pass_for_each_patient(make: str, name: str) -> None:
    model, units = _doubled(network(name), units_for(name, (1, 2)))
    reference = loop_engine(model, row_losses, units, 0.1)
    ours = ENGINES[make](2)(model, row_losses, units, 0.1)
    assert float((ours - reference).norm()) <= EXACT.get(name, 1e-10) * float(reference.norm())
    assert float(loop_engine(model, row_losses, units[:1], 0.1).norm()) > 0.0999, "the clip binds"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NETWORKS if n != "linear"]
)
def test_a_part_of_every_network_has_the_sum_of_one_pass_for_each_patient(name: str, part: str) -> None:
    """On what the frozen stages made of the pictures, once."""
    net = stirred(built(name, **PARTS[part]))
    model, whole = _doubled(net.trained, units_for(name, (1, 2)))
    units = [PrivacyUnit((net.prepare(unit.rows[0]), *unit.rows[1:])) for unit in whole]
    reference = loop_engine(model, _of_part, units, 0.3)
    for engine in (bookkeeping_engine(2), vmap_engine(2)):
        ours = engine(model, _of_part, units, 0.3)
        assert float((ours - reference).norm()) <= 1e-10 * float(reference.norm())
    assert len(reference) == net.parameters
    assert float(reference.norm()) > 0.0


def test_one_layer_on_frozen_networks_has_the_sum_of_one_pass_for_each_patient() -> None:
    spec, files = frozen_features()
    net = stirred(build(spec, 1, (16, 16), 2, 0, files.__getitem__))
    units = [PrivacyUnit((net.prepare(unit.rows[0]), *unit.rows[1:])) for unit in units_for("small-cnn", (1, 2, 1))]
    alone = [units[0], *map(_nobody, units[1:])]
    for make in ENGINES.values():
        assert _left_out(make(4), net.trained, alone, [*alone[1:], units[0]]) == 0.0
    model, doubled = _doubled(net.trained, units)
    reference = loop_engine(model, _of_part, doubled, 0.3)
    for make in ENGINES.values():
        ours = make(2)(model, _of_part, doubled, 0.3)
        assert float((ours - reference).norm()) <= 1e-10 * float(reference.norm())


@pytest.mark.parametrize("part", [{}, PARTS["last block"], PARTS["lora"]])
def test_fixed_norms_of_a_public_file_have_the_sum_of_one_pass_for_each_patient(part: dict[str, object]) -> None:
    spec, size = NETWORKS["resnet18"]
    digest, raw = weights_file(spec, size)
    fixed = NetworkSpec(spec.name, {**spec.options, "fixed_norms": 1}, weights=digest, **part)  # type: ignore[arg-type]
    net = stirred(build(fixed, 1, size, 2, 0, lambda _: raw))
    model, units = _doubled(net.module, units_for("resnet18", (1, 2)))
    before = [buffer.clone() for buffer in model.buffers()]
    reference = loop_engine(model, row_losses, units, 0.3)
    ours = bookkeeping_engine(2)(model, row_losses, units, 0.3)
    assert float((ours - reference).norm()) <= 1e-10 * float(reference.norm())
    assert before
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))


def _of_part(model: nn.Module, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Of a mask, one class for all of it: what goes in is no picture any more."""
    out = model(rows[0])
    wanted = rows[1] if out.ndim == 2 else rows[1].view(-1, *[1] * (out.ndim - 2)).expand(len(out), *out.shape[2:])
    losses: torch.Tensor = (
        nn.functional.cross_entropy(out, wanted, reduction="none").reshape(len(out), -1).mean(dim=1)
    )
    return losses


def _left_out(engine: ClippedSum, model: nn.Module, units: list[PrivacyUnit], changed: list[PrivacyUnit]) -> float:
    """How far the sum moves that counts the first patient alone: the others' gradients are not finite, so 0."""
    return float((engine(model, row_losses, units, 1e9) - engine(model, row_losses, changed, 1e9)).norm())


def _nobody(unit: PrivacyUnit) -> PrivacyUnit:
    """The same patient without a gradient that counts."""
    return PrivacyUnit((torch.full_like(unit.rows[0], torch.nan), *unit.rows[1:]))


@pytest.mark.parametrize(("make", "name"), CASES)
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


@pytest.mark.parametrize(("make", "name"), CASES)
def test_what_a_patient_changes_is_that_patients_part_and_rounding_within_the_margin(make: str, name: str) -> None:
    """Where one gradient is made for a whole chunk, its last bits hang on everybody in it."""
    model, engine, clip = network(name), ENGINES[make](4), 0.3
    units = units_for(name, (1, 2, 1, 2, 1, 1))
    whole = engine(model, row_losses, units, clip)
    for one, unit in enumerate(units[:3]):
        rest = engine(model, row_losses, [*units[:one], *units[one + 1 :]], clip)
        moved = whole - rest - engine(model, row_losses, [unit], clip)
        assert float(moved.norm()) <= gradient_recorder.MARGIN * clip
        assert float((whole - rest).norm()) <= clip


def test_chunks_of_a_changing_shape_would_be_seen_red_by_that_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping._Shapes, "_places", lambda self, width: 1)  # filled up to nothing
    moved = []
    for name in ("resnet18", "unet", "vit-s16", "segresnet"):
        units = units_for(name, (1, 1, 1, 1))
        alone = [units[0], *map(_nobody, units[1:])]
        engine = bookkeeping_engine(4)
        monkeypatch.setattr(clipping._Shapes, "chunks", lambda self, some: iter([list(some)]))
        moved.append(_left_out(engine, network(name), alone, alone[:1]))
    assert max(moved) > 0.0


class _RoundedByPlace(nn.Module):
    """Rounds a row by its place, as some processors' products do where rows are no multiple of 16 bytes.

    No network of the list has such rows.
    """

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """A last bit more in every row but the first."""
        later = torch.arange(len(rows), dtype=rows.dtype)[:, None] > 0
        return rows * torch.where(later, 1 + torch.finfo(rows.dtype).eps, 1.0)


def test_rows_that_are_rounded_by_their_place_would_be_seen_red_by_that_test() -> None:
    draw = torch.Generator().manual_seed(0)
    for features, before, moves in (
        (64, nn.Identity(), False),
        (256, nn.Identity(), False),
        (64, _RoundedByPlace(), True),
    ):
        model = nn.Sequential(before, nn.Linear(features, 2))
        units = [PrivacyUnit((torch.randn(1, features, generator=draw), torch.tensor([i % 2]))) for i in range(4)]
        alone = [units[0], *map(_nobody, units[1:])]
        assert (_left_out(bookkeeping_engine(4), model, alone, [*alone[1:], units[0]]) > 0.0) == moves


def test_a_batch_norm_that_is_left_in_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with pytest.raises(UnsuitableModelError, match="BatchNorm2d keeps statistics"):
        clipping.refuse_batch_statistics(model)


def _scored(model: nn.Module, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(rows[0]) * rows[1]).flatten(1).sum(dim=1)


def _cancelling(inputs: int, outputs: int, scale: float) -> list[PrivacyUnit]:
    """Ten patients, the first of whom has huge rows that take each other away."""
    draw = torch.Generator().manual_seed(3)
    x, g = torch.rand(1, inputs, generator=draw) * scale, torch.randn(1, outputs, generator=draw)
    bad = PrivacyUnit((torch.cat([x, x * (1 + 1e-7)]), torch.cat([g, -g])))
    others = [(torch.rand(2, inputs, generator=draw), torch.randn(2, outputs, generator=draw)) for _ in range(9)]
    return [bad, *map(PrivacyUnit, others)]


@pytest.mark.parametrize("clip", [1e-3, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5, 1e8, 1e18, 1e30, 1e38])
def test_rows_that_cancel_give_nobody_more_than_the_clip(scale: float, clip: float) -> None:
    """Gram matrices and one gradient for all: rounding is that of float64, or the patient counts as nobody."""
    model, engine = nn.Linear(256, 64), bookkeeping_engine(16)
    units = _cancelling(256, 64, scale)
    moved = engine(model, _scored, units, clip) - engine(model, _scored, units[1:], clip)
    assert float(moved.norm()) <= clip


def test_float32_gram_matrices_would_be_seen_red_by_that_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(_: nn.Module, a: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(((g * factors[:, None].float()).T @ a).double().flatten())

    monkeypatch.setattr(gradient_recorder, "whole_gradient", coarse)
    monkeypatch.setattr(gradient_recorder, "_CANCELLED", 1e30)
    model, engine = nn.Linear(256, 64), bookkeeping_engine(16)
    units = _cancelling(256, 64, 1e8)
    assert float((engine(model, _scored, units, 1e-3) - engine(model, _scored, units[1:], 1e-3)).norm()) > 1e-3


def test_two_nearly_equal_images_with_opposite_labels_are_clipped_right() -> None:
    """Ordinary pixels and the default clip: the norm is far below what the rows have before they cancel."""
    worst = 0.0
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 2))
        image = torch.rand(784, generator=draw)
        for delta in (1e-1, 1e-2, 1e-3, 1e-4):
            twin = (image + delta * torch.randn(784, generator=draw)).clamp(0, 1)
            unit = PrivacyUnit((torch.stack([image, twin]), torch.tensor([0, 1])))
            worst = max(worst, float(bookkeeping_engine(4)(model, row_losses, [unit], 1e-3).norm()))
    assert 0.99e-3 < worst <= 1e-3


class _Meeting(nn.Module):
    """Rows meet by a thousandth, in a model that has no float64 twin."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.out = share, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        scores: torch.Tensor = self.out(x - self.share * x.mean(dim=0)).exp()
        return scores


@pytest.mark.parametrize("share", [3e-3, 1e-6])
def test_rows_that_meet_by_a_little_are_found(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "PROBES", 3)
    draw = torch.Generator().manual_seed(0)
    units = [PrivacyUnit((torch.randn(1, 64, generator=draw), torch.zeros(1))) for _ in range(4)]
    with pytest.raises(UnsuitableModelError, match="mixes rows of different patients"):
        bookkeeping_engine(4)(_Meeting(share), lambda m, rows: m(rows[0]).square().mean(dim=1), units, 0.3)


class _Repeated(nn.Module):
    """A token that the model itself repeats for every row: not one row for each."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(torch.cat([self.token.repeat(len(x), 1, 1), x], dim=1))
        return scores


def test_what_the_engine_cannot_do_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "PROBES", 3)
    units = [PrivacyUnit((torch.randn(1, 3, 4), torch.zeros(1))) for _ in range(2)]
    loss = lambda m, rows: m(rows[0]).flatten(1).square().mean(dim=1)  # noqa: E731
    with pytest.raises(UnsuitableModelError, match="`loop_engine` can train it"):
        bookkeeping_engine(2)(_Repeated(), loss, units, 0.3)
    assert loop_engine(_Repeated(), loss, units, 0.3).any()
    for kind in (torch.bfloat16, torch.float16):
        with pytest.raises(UnsuitableModelError, match="too coarse"):
            loop_engine(nn.Linear(4, 2).to(kind), loss, units, 0.3)
    hooked = nn.Linear(4, 2)
    hooked.weight.register_hook(lambda g: 3 * g)
    with pytest.raises(UnsuitableModelError, match="a hook of its own"):
        bookkeeping_engine(2)(hooked, loss, units, 0.3)


@pytest.mark.parametrize("make", [loop_engine, bookkeeping_engine(2), vmap_engine(2)])
def test_a_model_that_works_in_place_leaves_the_patients_as_they_were(
    make: ClippedSum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping, "PROBES", 3)
    units = [PrivacyUnit((torch.ones(1, 4), torch.zeros(1))) for _ in range(3)]
    model = nn.Linear(4, 2)
    make(model, lambda m, rows: m(rows[0].mul_(0.5)).square().mean(dim=1), units, 0.3)
    assert all(torch.equal(unit.rows[0], torch.ones(1, 4)) for unit in units)
