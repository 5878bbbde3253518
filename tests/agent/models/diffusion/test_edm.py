"""The diffusion model: EDM's formulas, samplers against closed forms, adapters, and one gradient per patient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.dp.clipping import ClippedSum, PrivacyUnit, bookkeeping_engine, loop_engine, vmap_engine
from agent.dp.dpsgd import PrivateSgd, train_privately
from agent.dp.noise import SystemEntropy
from agent.errors import OtherRunError
from agent.mechanisms.privimage.diffusion import Diffusion, DiffusionConfig
from agent.models.diffusion.edm import (
    PRESETS,
    Churn,
    Denoiser,
    DiffusionArchitecture,
    LowRankConv,
    LowRankLinear,
    ddim,
    guided,
    heun,
    loss_weight,
    merged,
    noise_levels,
    with_lora,
)
from agent.models.diffusion.edm_training import Average, DiffusionTraining, row_losses, train_denoiser
from agent.models.training_loop import TrainingProgress, seeded
from agent.models.weights import WeightsError
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.memory_place import MemoryPlace

SMALL = DiffusionArchitecture(8, 1, 2, (8, 16), 1, (False, True), 8, 4)
COLOUR = replace(SMALL, channels=3, classes=3)
KNOWN = {nn.Linear, nn.Conv2d, nn.GroupNorm, nn.Embedding}
ENGINES = {"chunked": vmap_engine(4), "bookkept": bookkeeping_engine(4)}


def shaken(denoiser: Denoiser, seed: int = 7) -> Denoiser:
    """With weights that are nowhere zero: MONAI starts its last layers at zero."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return denoiser


def denoiser(architecture: DiffusionArchitecture = SMALL) -> Denoiser:
    with seeded(1):
        return shaken(Denoiser(architecture))


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squares(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Class 0 is dark squares, class 1 bright ones."""
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, count).astype(np.int64)
    images = np.full((count, 8, 8), 128, np.uint8)
    for image, label in zip(images, labels, strict=True):
        top, left = rng.integers(0, 4, 2)
        image[top : top + 5, left : left + 5] = 240 if label else 16
    return images, labels


def test_the_preconditioning_is_that_of_table_1(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def unet(x: Tensor, timesteps: Tensor, class_labels: Tensor) -> Tensor:
        asked.append((x, timesteps, class_labels))
        return torch.full_like(x, 0.7)

    net = denoiser()
    monkeypatch.setattr(net.unet, "forward", unet)
    x, labels = noise(3, 1, 8, 8), torch.tensor([0, 1, 2])
    out = net(x, torch.tensor([0.01, 0.5, 40.0]), labels)
    for i, s in enumerate((0.01, 0.5, 40.0)):
        c_skip = 0.25 / (s * s + 0.25)
        c_out = s * 0.5 / math.sqrt(0.25 + s * s)
        c_in = 1.0 / math.sqrt(s * s + 0.25)
        assert torch.allclose(asked[0][0][i], c_in * x[i])
        assert math.isclose(asked[0][1][i].item(), math.log(s) / 4.0, rel_tol=1e-5)
        assert torch.allclose(out[i], c_skip * x[i] + c_out * 0.7, atol=1e-5)
        assert math.isclose(loss_weight(torch.tensor(s)).item(), (s * s + 0.25) / (0.5 * s) ** 2, rel_tol=1e-5)
        assert math.isclose(loss_weight(torch.tensor(s)).item() * c_out**2, 1.0, rel_tol=1e-5)  # EDM, Eq. 8
    assert asked[0][2] is labels


def test_the_loss_of_a_row_is_the_weighted_squared_error_of_that_row_alone() -> None:
    net, clean = denoiser(), noise(3, 1, 8, 8, seed=4)
    sigma, labels = torch.tensor([0.1, 1.0, 10.0]), torch.tensor([0, 1, 2])
    rows = (clean + sigma[:, None, None, None] * noise(3, 1, 8, 8), sigma, clean, labels)
    found = row_losses(net, rows)
    for i, s in enumerate(sigma.tolist()):
        alone = net(rows[0][i : i + 1], sigma[i : i + 1], labels[i : i + 1])
        wanted = (s * s + 0.25) / (0.5 * s) ** 2 * (alone - clean[i]).square().mean()
        assert torch.allclose(found[i], wanted, rtol=1e-4)


def test_the_levels_of_noise_are_those_of_equation_5() -> None:
    levels = noise_levels(18)
    assert (len(levels), levels[0].item(), levels[-1].item()) == (19, pytest.approx(80.0), 0.0)
    assert levels[17].item() == pytest.approx(0.002)
    i = 5
    wanted = (80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    assert levels[i].item() == pytest.approx(wanted)
    with pytest.raises(ValueError, match="two steps"):
        noise_levels(1)


MEAN, SPREAD = 0.3, 0.2


def gaussian(x: Tensor, sigma: Tensor) -> Tensor:
    """The exact denoiser of N(MEAN, SPREAD^2)."""
    return (SPREAD**2 * x + sigma**2 * MEAN) / (SPREAD**2 + sigma**2)


def missed(sampler: Callable[..., Tensor], steps: int) -> float:
    """How far it ends from the exact solution of the flow, for the same noise."""
    start = noise(4000).double()
    exact = MEAN + (start * 80.0 - MEAN) * SPREAD / math.sqrt(SPREAD**2 + 80.0**2)
    return (sampler(gaussian, start, noise_levels(steps)) - exact).abs().max().item()


def test_heun_solves_the_flow_of_a_gaussian_to_second_order() -> None:
    drawn = heun(gaussian, noise(4000).double(), noise_levels(40))
    assert abs(drawn.mean().item() - MEAN) < 3 * SPREAD / math.sqrt(4000) + 0.002
    assert drawn.std().item() == pytest.approx(SPREAD, rel=0.05)
    assert missed(heun, 160) < 0.001
    assert 3.3 < missed(heun, 40) / missed(heun, 80) < 4.7  # half the step, a quarter of the error


def test_ddim_goes_to_the_same_limit_to_first_order() -> None:
    assert 1.7 < missed(ddim, 100) / missed(ddim, 200) < 2.3
    assert missed(ddim, 3200) < 0.003


def test_one_step_of_ddim_is_that_of_the_paper_in_other_units() -> None:
    # Song et al. 2020, Eq. 12 with sigma_t = 0: x is scaled by sqrt(abar), and sigma = sqrt((1 - abar) / abar)
    x, levels = noise(5).double(), torch.tensor([3.0, 1.2], dtype=torch.float64)
    before, after = (1.0 / (1.0 + levels.square())).tolist()
    moved = x * 3.0 * math.sqrt(before)
    clean = gaussian(x * 3.0, levels[0])
    direction = (moved - math.sqrt(before) * clean) / math.sqrt(1.0 - before)
    wanted = math.sqrt(after) * clean + math.sqrt(1.0 - after) * direction
    assert torch.allclose(ddim(gaussian, x, levels) * math.sqrt(after), wanted)


def test_churn_adds_noise_and_keeps_the_distribution() -> None:
    start = noise(20_000).double()
    churn = Churn(10.0, 0.05, 50.0, 1.0, torch.Generator().manual_seed(5))
    drawn = heun(gaussian, start, noise_levels(60), churn)
    assert abs(drawn.mean().item() - MEAN) < 0.01
    assert drawn.std().item() == pytest.approx(SPREAD, rel=0.04)
    assert (drawn - heun(gaussian, start, noise_levels(60))).std() > 0.1  # it did go elsewhere
    assert torch.equal(
        heun(gaussian, start, noise_levels(9), Churn(0.0)), heun(gaussian, start, noise_levels(9))
    )  # no churn is Algorithm 1


def test_guidance_of_one_is_the_plain_model_of_zero_no_condition_and_else_on_their_line() -> None:
    net, x, labels = denoiser(), noise(4, 1, 8, 8), torch.tensor([0, 1, 1, 0])
    sigma = torch.tensor(0.7)
    plain = net(x, sigma.expand(4), labels)
    nothing = net(x, sigma.expand(4), torch.full((4,), 2))
    assert not torch.allclose(plain, nothing, atol=1e-3)
    assert torch.equal(guided(net, labels, 1.0)(x, sigma), plain)
    assert torch.allclose(guided(net, labels, 0.0)(x, sigma), nothing, atol=1e-5)
    assert torch.allclose(guided(net, labels, 3.0)(x, sigma), nothing + 3.0 * (plain - nothing), atol=1e-5)


@pytest.mark.parametrize("architecture", [*PRESETS.values(), SMALL, COLOUR], ids=[*PRESETS, "grey", "colour"])
def test_every_parameter_lies_in_a_layer_that_the_engines_know(architecture: DiffusionArchitecture) -> None:
    with torch.device("meta"):
        net = Denoiser(architecture)
    holders = {type(m) for m in net.modules() if list(m.parameters(recurse=False))}
    assert holders == KNOWN
    assert not list(net.buffers())


def test_the_presets_have_the_sizes_that_are_written_beside_them() -> None:
    counts = {}
    for name, architecture in PRESETS.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in Denoiser(architecture).parameters())
    assert counts == {
        "tiny8": 178_131,
        "tiny16": 281_459,
        "small32": 1_709_571,
        "base32": 6_082_627,
        "big32": 80_521_155,
        "small64": 2_247_171,
        "big64": 88_222_851,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"side": 9}, "multiple of 2"),
        ({"widths": (8, 16, 16, 16, 16), "attention": (False,) * 5}, "multiple of 16"),
        ({"channels": 2}, "1 or 3 channels"),
        ({"classes": 0}, "whole numbers"),
        ({"side": 8.0}, "whole numbers"),
        ({"groups": 3}, "multiple of the groups"),
        ({"head_channels": 5}, "multiple of the head"),
        ({"attention": (True,)}, "every level"),
        ({"widths": (), "attention": ()}, "every level"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(SMALL, **change)


def units(of: Callable[[PrivacyUnit], PrivacyUnit], sizes: tuple[int, ...] = (1, 2, 2, 1)) -> list[PrivacyUnit]:
    draw = torch.Generator().manual_seed(0)
    raw = [
        PrivacyUnit(
            (
                torch.randint(0, 256, (n, 8, 8), generator=draw, dtype=torch.uint8),
                torch.randint(-1, 2, (n,), generator=draw),
            )
        )
        for n in sizes
    ]
    return [of(unit) for unit in raw]


def tuned(rank: int, reach: str = "linear", seed: int = 1) -> Diffusion:
    """A model with weights as if it were trained, its task begun."""
    config = DiffusionConfig(SMALL, 3, draws=3, lora_rank=rank, lora_reach=reach)  # type: ignore[arg-type]
    model = Diffusion(config, UnsafeSeededEntropy(seed))
    model.restore(denoiser().state_dict())
    for parameter in model.task().model.parameters():
        if parameter.requires_grad and not bool(parameter.any()):
            parameter.data += 0.1 * noise(*parameter.shape, seed=parameter.numel())
    return model


@pytest.mark.parametrize(("rank", "reach"), [(0, "linear"), (2, "linear"), (2, "all")])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_engines_agree_on_it_with_and_without_adapters(rank: int, reach: str, engine: str) -> None:
    task = tuned(rank, reach).task()
    batch = units(task.expand)
    wanted = loop_engine(task.model, task.loss, batch, 0.05)
    found = ENGINES[engine](task.model, task.loss, batch, 0.05)
    assert wanted.norm() > 0.02
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("engine", [loop_engine, *ENGINES.values()], ids=["looped", *ENGINES])
def test_no_patient_moves_the_sum_by_more_than_the_clip(engine: ClippedSum) -> None:
    task, clip = tuned(0).task(), 1e-3
    batch = units(task.expand)
    whole = engine(task.model, task.loss, batch, clip)
    moved = []
    for gone in range(len(batch)):
        rest = [unit for i, unit in enumerate(batch) if i != gone]
        moved.append((whole - engine(task.model, task.loss, rest, clip)).norm().item())
    assert max(moved) <= clip
    assert min(moved) > 0.99 * clip  # every one of these is clipped: the bound is reached


def test_draws_from_one_stream_for_all_patients_would_break_the_bound() -> None:
    task, clip = tuned(0).task(), 1e-3

    def total(raw: list[PrivacyUnit]) -> Tensor:
        shared = (
            Diffusion(DiffusionConfig(SMALL, 3, draws=3), UnsafeSeededEntropy(9)).task().expand
        )  # the same stream anew
        return loop_engine(task.model, task.loss, [shared(unit) for unit in raw], clip)

    raw = units(lambda unit: unit)
    assert (total(raw) - total(raw[1:])).norm() > clip


def test_what_a_patient_draws_depends_on_no_other_patient() -> None:
    raw = units(lambda unit: unit)
    alone = Diffusion(DiffusionConfig(SMALL, 3, draws=3), Same())._expanded(raw[1])
    model = Diffusion(DiffusionConfig(SMALL, 3, draws=3), Same())
    model._expanded(raw[0])
    assert all(torch.equal(a, b) for a, b in zip(alone.rows, model._expanded(raw[1]).rows, strict=True))


class Same:
    def take(self, count: int) -> bytes:
        return b"\x05" * count


def test_two_models_of_one_seed_draw_different_noise_for_the_same_patient() -> None:
    raw = units(lambda unit: unit)[0]
    config = DiffusionConfig(SMALL, 3, draws=3)
    one, other = (Diffusion(config).task().expand(raw) for _ in range(2))
    assert not torch.equal(one.rows[1], other.rows[1])


def test_a_picture_is_drawn_k_times_with_the_law_of_the_paper() -> None:
    images = torch.full((300, 8, 8), 255, dtype=torch.uint8)
    config = DiffusionConfig(SMALL, 3, draws=8, label_drop=0.25)
    noisy, sigma, clean, labels = (
        Diffusion(config, UnsafeSeededEntropy(1)).task().expand(PrivacyUnit((images, torch.ones(300).long()))).rows
    )
    assert noisy.shape == clean.shape == (2400, 1, 8, 8)
    assert torch.equal(clean, torch.ones_like(clean))
    logs = sigma.log()
    assert abs(logs.mean().item() + 1.2) < 0.05
    assert logs.std().item() == pytest.approx(1.2, rel=0.05)
    assert logs.reshape(300, 8)[:, 0].std().item() == pytest.approx(1.2, rel=0.15)  # each draw by itself
    assert logs.reshape(300, 8).mean(dim=1).std().item() < 0.6 * 1.2 / math.sqrt(8)  # their mean varies little
    assert ((noisy - clean) / sigma.reshape(-1, 1, 1, 1)).std().item() == pytest.approx(1.0, rel=0.02)
    assert (labels == 2).float().mean().item() == pytest.approx(0.25, abs=0.04)
    assert set(labels.tolist()) == {1, 2}


def test_adapters_draw_the_same_before_training_and_train_little() -> None:
    net, x = denoiser(), noise(3, 1, 8, 8)
    sigma, labels = torch.tensor([0.1, 1.0, 9.0]), torch.tensor([0, 1, 2])
    for reach in ("linear", "all"):
        with seeded(1):
            adapted = with_lora(net, 2, reach)  # type: ignore[arg-type]
        assert torch.equal(adapted(x, sigma, labels), net(x, sigma, labels))
        factors = [m for m in adapted.modules() if isinstance(m, LowRankLinear | LowRankConv)]
        wanted = sum(2 * (m.base.weight[0].numel() + len(m.base.weight)) for m in factors)
        table = 3 * 4 * SMALL.widths[0]
        assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == wanted + table
        assert (wanted + table) * 2 < sum(p.numel() for p in net.parameters())
    assert sum(isinstance(m, LowRankLinear) for m in factors) == sum(type(m) is nn.Linear for m in net.modules())
    assert sum(isinstance(m, LowRankConv) for m in factors) == sum(type(m) is nn.Conv2d for m in net.modules())
    with pytest.raises(ValueError, match="adapters already"):
        with_lora(adapted, 2)
    with pytest.raises(ValueError, match="rank"):
        with_lora(net, 0)


@pytest.mark.parametrize("reach", ["linear", "all"])
def test_merged_adapters_draw_what_the_adapted_network_draws(reach: str) -> None:
    with seeded(1):
        adapted = shaken(with_lora(denoiser(), 3, reach))  # type: ignore[arg-type]
    x, sigma, labels = noise(2, 1, 8, 8), torch.tensor([0.3, 3.0]), torch.tensor([0, 2])
    plain = merged(adapted)
    assert plain.state_dict().keys() == denoiser().state_dict().keys()
    assert torch.allclose(plain(x, sigma, labels), adapted(x, sigma, labels), atol=1e-4)


@pytest.mark.parametrize("rank", [0, 2])
def test_private_training_moves_what_is_trained_and_leaves_the_frozen_weights_as_they_are(rank: int) -> None:
    model = Diffusion(DiffusionConfig(SMALL, 3, draws=2, lora_rank=rank, lr_finetune=0.01, sampling_steps=3))
    model.restore(denoiser().state_dict())
    task = model.task()
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    drawn = model.sample(np.array([0, 1]), torch.Generator().manual_seed(1))
    job = PrivateSgd(1.0, 1.0, 2, 0.1, 2, 4.0)
    train_privately(task, units(lambda unit: unit), job, SystemEntropy())
    for name, parameter in task.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (not parameter.requires_grad)
    assert not np.array_equal(model.sample(np.array([0, 1]), torch.Generator().manual_seed(1)), drawn)
    again = Diffusion(model.config)
    again.restore(model.state())
    for seed in (1, 2):
        one, other = (m.sample(np.array([0, 1]), torch.Generator().manual_seed(seed)) for m in (model, again))
        assert np.array_equal(one, other)  # the state is the network that draws: the average, adapters merged
    assert model.task().follower is task.follower


def test_the_average_follows_at_once_in_the_beginning_and_slowly_later() -> None:
    net = nn.Linear(1, 1, bias=False)
    net.weight.data[:] = 0.0
    average = Average(net, 0.999)
    net.weight.data[:] = 1.0
    average.after(1)
    assert average.weights["weight"].item() == pytest.approx(1.0 - 2.0 / 11.0)
    average.weights["weight"][:] = 0.0
    average.after(10**6)
    assert average.weights["weight"].item() == pytest.approx(0.001)
    kept = {name: tensor.clone() for name, tensor in average.state().items()}
    average.after(1)
    average.restore(kept)
    average.give(net)
    assert net.weight.item() == pytest.approx(0.001)


def training(**changes: Any) -> DiffusionTraining:
    return DiffusionTraining(SMALL, **{"seed": 4, "batch": 8, "lr": 2e-3, "checkpoint_every": 2} | changes)


def test_a_public_training_that_was_cut_off_ends_with_the_very_bytes_of_one_that_was_not() -> None:
    images, labels = squares(20)
    whole, cut = MemoryPlace(), MemoryPlace(breaks_after=2)
    net = train_denoiser(images, labels, training(), 6, whole)
    with pytest.raises(KeyboardInterrupt):
        train_denoiser(images, labels, training(), 6, cut)
    heard: list[TrainingProgress] = []
    again = train_denoiser(images, labels, training(say_every=1), 6, cut, heard.append)
    assert [p.step for p in heard] == [5, 6]
    assert cut.data == whole.data
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), net.state_dict().values(), strict=True))
    with pytest.raises(OtherRunError):
        train_denoiser(images, labels, training(p_mean=-1.0), 6, cut)
    with pytest.raises(OtherRunError):
        train_denoiser(images, 1 - labels, training(), 6, cut)


def test_a_class_that_no_public_picture_has_begins_as_no_condition() -> None:
    images, labels = squares(20)
    net = train_denoiser(images, np.where(labels == 1, -1, labels), training(), 3, MemoryPlace())
    table = net.unet.class_embedding.weight
    assert torch.equal(table[1], table[2])
    assert not torch.equal(table[0], table[2])


def test_it_learns_in_seconds_to_draw_the_class_that_is_asked_for() -> None:
    images, labels = squares(200)
    plain = replace(SMALL, widths=(8, 8), attention=(False, False))
    config = DiffusionConfig(plain, 0, lr_pretrain=5e-3, pretrain_batch=24, ema=0.97, sampling_steps=8)
    model = Diffusion(config)
    heard: list[TrainingProgress] = []
    model.pretrain(images, labels, 120, MemoryPlace(), heard.append)
    assert heard[-1].losses["loss"] < 0.8  # 1 is a network that has learned nothing
    wanted = np.array([0, 1] * 8)
    for sampler, guidance in (("heun", 1.0), ("ddim", 1.5)):
        asked = Diffusion(replace(config, sampler=sampler, guidance=guidance))  # type: ignore[arg-type]
        asked.restore(model.state())
        drawn = asked.sample(wanted, torch.Generator().manual_seed(1))
        assert drawn.shape == (16, 8, 8)
        assert drawn.dtype == np.uint8
        bright = drawn.reshape(16, -1).mean(axis=1)
        assert np.array_equal(bright > 128, wanted == 1), bright


def test_the_same_generator_draws_the_same_pictures_and_no_label_none() -> None:
    model = Diffusion(DiffusionConfig(COLOUR, 3, sampling_steps=2, sampling_batch=2))
    one, other = (model.sample(np.array([0, 1, -1]), torch.Generator().manual_seed(1)) for _ in range(2))
    assert one.shape == (3, 8, 8, 3)
    assert np.array_equal(one, other)
    assert model.sample(np.zeros(0, np.int64), torch.Generator().manual_seed(1)).shape == (0, 8, 8, 3)


def test_pictures_and_labels_that_do_not_fit_are_refused() -> None:
    images, labels = squares(4)
    fit = functools.partial(train_denoiser, training=training(), steps=1, place=MemoryPlace())
    for bad, of, reason in (
        (images.astype(np.float32), labels, "uint8"),
        (images[:, :4], labels, "another shape"),
        (images[..., None].repeat(3, axis=3), labels, "another shape"),
        (images, labels[:3], "label for each"),
        (images[:0], labels[:0], "label for each"),
        (images, labels + 2, "lie in 0 to 1"),
        (images, labels - 5, "lie in 0 to 1"),
        (images, labels.astype(np.float64), "whole numbers"),
    ):
        with pytest.raises(ValueError, match=reason):
            fit(bad, of)
    with pytest.raises(ValueError, match="lie in 0 to 1"):
        Diffusion(DiffusionConfig(SMALL, 3)).sample(np.array([2]), torch.Generator().manual_seed(1))


def test_a_configuration_that_makes_no_sense_is_refused_with_every_reason() -> None:
    with pytest.raises(ValueError, match="draws, sampling_steps"):
        DiffusionConfig(SMALL, 3, draws=0, sampling_steps=1)
    for change in (
        {"ema": 1.0},
        {"p_std": math.nan},
        {"lr_pretrain": 0.0},
        {"sampler": "euler"},
        {"guidance": math.nan},
    ):
        with pytest.raises(ValueError, match="not usable"):
            DiffusionConfig(SMALL, 3, **change)  # type: ignore[arg-type]


def test_low_rank_training_needs_public_weights_and_a_begun_one_takes_no_others() -> None:
    model = Diffusion(DiffusionConfig(SMALL, 3, lora_rank=2))
    with pytest.raises(ValueError, match="pretrain"):
        model.task()
    model.restore(denoiser().state_dict())
    model.task()
    with pytest.raises(ValueError, match="begun"):
        model.restore(denoiser().state_dict())
    with pytest.raises(ValueError, match="begun"):
        model.pretrain(*squares(4), 1, MemoryPlace())
    with pytest.raises(WeightsError):
        Diffusion(DiffusionConfig(SMALL, 3)).restore(denoiser(COLOUR).state_dict())


def test_the_fingerprint_is_of_what_decides_the_pictures() -> None:
    config = DiffusionConfig(SMALL, 3)
    same = replace(config, device="cuda", sampling_batch=7)
    assert same.fingerprint == config.fingerprint == Diffusion(config).fingerprint
    others = [replace(config, draws=4), replace(config, seed=4), replace(config, architecture=COLOUR)]
    assert len({c.fingerprint for c in (config, *others)}) == 4
