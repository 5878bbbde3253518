"""Latent diffusion: MONAI's samplers at our times against closed forms, one gradient per patient, the model file."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.dp.clipping import ClippedSum, PrivacyUnit, bookkeeping_engine, loop_engine, vmap_engine
from agent.dp.dpsgd import PrivateSgd, best_engine, train_privately
from agent.dp.noise import SystemEntropy
from agent.errors import DivergedError, OtherRunError
from agent.mechanisms.distillation.latent_model import LatentConfig, LatentDiffusion
from agent.models.diffusion.autoencoder import Autoencoder, AutoencoderArchitecture, AutoencoderNet, autoencoder_bytes
from agent.models.diffusion.autoencoder import autoencoder_from as read_autoencoder
from agent.models.diffusion.latent import (
    PRESETS,
    LatentArchitecture,
    LatentDenoiser,
    LatentNotFiniteError,
    guided,
    latent_bytes,
    latent_from,
    planes,
)
from agent.models.diffusion.latent_training import LatentTraining, dropped, encoded, row_losses, train_latent_denoiser
from agent.models.diffusion.noise_schedule import BETAS, TIMES, Drawing, Noising, _scheduler, denoised
from agent.models.diffusion.prompts import Conditions
from agent.models.training_loop import TrainingProgress, seeded, torch_generator
from agent.models.weights import WeightsError, pack, unpack
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.memory_place import MemoryPlace

CONDITIONS = Conditions(("none", "edema", "edema+effusion"), ("image with {}", "{}"), 6)
KNOWN = {nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.Embedding}
ENGINES = {"chunked": vmap_engine(4), "bookkept": bookkeeping_engine(4), "best": best_engine("cpu")}


def autoencoder(channels: int = 1, seed: int = 1) -> Autoencoder:
    """Pictures of 8 px as latents (2, 4, 4), by random weights."""
    with seeded(seed):
        net = AutoencoderNet(AutoencoderArchitecture(8, channels, 2, (8, 8), 1, 4))
    return read_autoencoder(autoencoder_bytes(net, 2.0, {}), "public")


CODER = autoencoder()
SMALL = LatentArchitecture((2, 4, 4), (8, 16), 1, (False, True), 8, 4, CONDITIONS.vocabulary.size, 6, 8)


def drawn_noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def denoiser(architecture: LatentArchitecture = SMALL) -> LatentDenoiser:
    """With weights that are nowhere zero: MONAI starts its last layers at zero."""
    with seeded(1):
        net = LatentDenoiser(architecture)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return net


class Same:
    def take(self, count: int) -> bytes:
        return b"\x05" * count


def config(**changes: Any) -> LatentConfig:
    few = {"seed": 3, "batch": 8, "draws": 3, "sampling_steps": 4, "guidance": 1.0, "checkpoint_every": 2}
    return LatentConfig(**({"architecture": SMALL} | few | changes))


def model(entropy: Any = None, **changes: Any) -> LatentDiffusion:
    return LatentDiffusion(config(**changes), CODER, CONDITIONS, entropy)


def tuned(seed: int = 1) -> LatentDiffusion:
    """A model with weights as if it were trained."""
    out = model(UnsafeSeededEntropy(seed))
    out.restore(denoiser().state_dict())
    return out


def abar() -> Tensor:
    """(T,) float64, from the definition."""
    low, high = (beta**0.5 for beta in BETAS)
    return (1.0 - torch.linspace(low, high, TIMES, dtype=torch.float64).square()).cumprod(dim=0)


def test_noise_and_targets_are_those_of_the_papers() -> None:
    z, noise, t = drawn_noise(3, 2, 4, 4), drawn_noise(3, 2, 4, 4, seed=4), torch.tensor([0, 500, 999])
    a = abar()[t].float().reshape(3, 1, 1, 1)
    noisy = a.sqrt() * z + (1.0 - a).sqrt() * noise
    for prediction in ("v", "epsilon"):
        noising = Noising(prediction)
        assert torch.allclose(noising.noised(z, t, noise), noisy, atol=1e-4)
    v = Noising("v").target(z, t, noise)
    assert torch.allclose(v, a.sqrt() * noise - (1.0 - a).sqrt() * z, atol=1e-4)
    assert torch.equal(Noising("epsilon").target(z, t, noise), noise)
    # Salimans & Ho, Appendix D: both are back from v
    assert torch.allclose(a.sqrt() * noisy - (1.0 - a).sqrt() * v, z, atol=1e-4)
    assert torch.allclose(a.sqrt() * v + (1.0 - a).sqrt() * noisy, noise, atol=1e-4)
    assert abar()[-1] < 1.2e-4  # the last time is noise, but for a hundredth of the latents


MEAN = 0.3


def said(prediction: str, spread: float, x: Tensor, t: int) -> Tensor:
    """The exact epsilon or v of N(MEAN, spread^2)."""
    a = abar()[t]
    clean = MEAN + a.sqrt() * spread**2 / (a * spread**2 + 1.0 - a) * (x - a.sqrt() * MEAN)
    epsilon = (x - a.sqrt() * clean) / (1.0 - a).sqrt()
    return epsilon if prediction == "epsilon" else a.sqrt() * epsilon - (1.0 - a).sqrt() * clean


def missed(drawing: Drawing, spread: float = 1.0) -> float:
    """How far a sampler ends from the exact solution of the flow of that Gaussian."""
    start, asked = drawn_noise(2000).double(), []

    def predict(x: Tensor, t: int) -> Tensor:
        asked.append(t)
        return said(drawing.prediction, spread, x, t)

    found = denoised(predict, start, drawing)
    assert len(asked) == drawing.steps + (drawing.sampler == "pndm")
    a = abar()[drawing.times[0]]
    exact = MEAN + (start - a.sqrt() * MEAN) * spread / (a * spread**2 + 1.0 - a).sqrt()
    return (found - exact).abs().max().item()


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_a_step_of_ddim_is_equation_12_of_the_paper(prediction: Any) -> None:
    x = start = drawn_noise(7).double()
    for t in range(900, -1, -100):
        a, after = abar()[t], abar()[t - 100] if t >= 100 else torch.ones(())
        s = said(prediction, 0.2, x, t)
        clean = a.sqrt() * x - (1 - a).sqrt() * s if prediction == "v" else (x - (1 - a).sqrt() * s) / a.sqrt()
        x = after.sqrt() * clean + (1 - after).sqrt() * (x - a.sqrt() * clean) / (1 - a).sqrt()
    found = denoised(functools.partial(said, prediction, 0.2), start, Drawing(prediction, "ddim", 10))
    assert torch.allclose(found, x, atol=1e-4)


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_ddim_solves_the_flow_of_a_gaussian_to_first_order_and_pndm_to_a_higher_one(prediction: Any) -> None:
    coarse, middle, fine = (missed(Drawing(prediction, "ddim", steps)) for steps in (50, 100, 200))
    assert 1.7 < coarse / middle < 2.2
    assert 1.7 < middle / fine < 2.2
    assert missed(Drawing(prediction, "pndm", 10)) < fine
    assert missed(Drawing(prediction, "pndm", 20)) < fine / 2


@pytest.mark.parametrize("spread", [0.03, 0.1, 0.3, 1.0])
def test_with_pndm_what_is_drawn_varies_as_much_as_it_should_coarse_or_fine(spread: float) -> None:
    predict = functools.partial(said, "v", spread)
    drawn = denoised(predict, drawn_noise(4000).double(), Drawing("v", "pndm", 20))
    assert drawn.std().item() == pytest.approx(spread, rel=0.06)
    assert drawn.mean().item() == pytest.approx(MEAN, abs=0.03 * spread)


def by_monai(sampler: Any, steps: int, spread: float) -> Tensor:
    """What MONAI's own times give."""
    scheduler, x = _scheduler("epsilon", sampler), drawn_noise(4000).double()
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps.tolist():
        x, _ = scheduler.step(said("epsilon", spread, x, t), t, x)
    return x


def test_at_the_times_of_monai_its_samplers_end_elsewhere() -> None:
    # why the times are ours: when this fails, MONAI's may be right, and ours can go
    assert by_monai("ddim", 10, 0.03).std().item() > 1.5 * 0.03  # noise stays
    ours = denoised(
        functools.partial(said, "epsilon", 0.1), drawn_noise(4000).double(), Drawing("epsilon", "pndm", 10)
    )
    assert abs(by_monai("pndm", 10, 0.1).mean().item() - MEAN) > 4 * abs(ours.mean().item() - MEAN)


def test_the_times_end_at_nought_and_lie_as_far_apart_as_a_step_goes() -> None:
    for steps in (2, 4, 20, 50, 1000):
        times = Drawing(steps=steps).times
        assert (len(times), times[0], times[-1]) == (steps, 1000 - 1000 // steps, 0)
        assert {a - b for a, b in pairwise(times)} == {1000 // steps}
    with pytest.raises(ValueError, match=r"prediction, sampler, steps \(a divisor of 1000\), guidance"):
        Drawing("x0", "euler", 30, math.nan)  # type: ignore[arg-type]


def test_the_loss_of_a_row_is_the_squared_error_of_that_row_alone() -> None:
    net, target, t = denoiser(), drawn_noise(3, 2, 4, 4, seed=4), torch.tensor([0, 400, 999])
    tokens = CONDITIONS.tokens(torch.tensor([0, 2, -1]))
    noisy = drawn_noise(3, 2, 4, 4)
    found = row_losses(net, (noisy, t, target, tokens))
    for i in range(3):
        alone = net(noisy[i : i + 1], t[i : i + 1], tokens[i : i + 1])
        assert torch.allclose(found[i], (alone - target[i]).square().mean(), rtol=1e-4)


def test_guidance_of_one_is_the_plain_model_of_zero_no_condition_and_else_on_their_line() -> None:
    net, z, tokens = denoiser(), drawn_noise(2, 2, 4, 4), CONDITIONS.tokens(torch.tensor([1, 2]))
    times = torch.tensor([300, 300])
    plain, nothing = net(z, times, tokens), net(z, times, torch.zeros_like(tokens))
    assert not torch.allclose(plain, nothing, atol=1e-3)
    assert not torch.allclose(plain[:1], net(z, times, tokens[[1, 1]])[:1], atol=1e-4)
    assert torch.equal(guided(net, tokens, 1.0)(z, 300), plain)
    assert torch.allclose(guided(net, tokens, 0.0)(z, 300), nothing, atol=1e-5)
    assert torch.allclose(guided(net, tokens, 3.0)(z, 300), nothing + 3.0 * (plain - nothing), atol=1e-5)


def test_the_order_of_words_is_seen() -> None:
    net, z, t = denoiser(), drawn_noise(1, 2, 4, 4), torch.tensor([300])
    assert not torch.allclose(
        net(z, t, torch.tensor([[1, 2, 0, 0, 0, 0]])), net(z, t, torch.tensor([[2, 1, 0, 0, 0, 0]])), atol=1e-5
    )


@pytest.mark.parametrize("architecture", [*PRESETS.values(), SMALL], ids=[*PRESETS, "test"])
def test_every_parameter_lies_in_a_layer_that_the_engines_know(architecture: LatentArchitecture) -> None:
    with torch.device("meta"):
        net = LatentDenoiser(architecture)
    assert {type(m) for m in net.modules() if list(m.parameters(recurse=False))} == KNOWN
    assert not list(net.buffers())


def test_the_presets_have_the_sizes_that_are_written_beside_them() -> None:
    counts = {}
    for name, architecture in PRESETS.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in LatentDenoiser(architecture).parameters())
    assert counts == {"tiny": 255_924, "small": 5_681_284, "base": 64_158_980, "stable": 263_718_915}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"latent": (2, 5, 4)}, "multiples of 2"),
        ({"latent": (2, 4)}, r"\(c, h, w\)"),
        ({"latent": (2, 4, 4.0)}, "whole numbers"),
        ({"words": 0}, "whole numbers"),
        ({"groups": 3}, "multiple of the groups"),
        ({"head_channels": 5}, "multiple of the head"),
        ({"attention": (True,)}, "every level"),
        ({"widths": (), "attention": ()}, "every level"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(SMALL, **change)


def test_an_architecture_is_for_its_autoencoder_and_its_prompts() -> None:
    assert PRESETS["tiny"].fitted(CODER, CONDITIONS).latent == (2, 4, 4)
    for wrong in (replace(SMALL, latent=(2, 8, 8)), replace(SMALL, words=5), replace(SMALL, length=7)):
        with pytest.raises(ValueError, match="fit it to both"):
            LatentDiffusion(config(architecture=wrong), CODER, CONDITIONS)


def units(of: Callable[[PrivacyUnit], PrivacyUnit], sizes: tuple[int, ...] = (1, 2, 2, 1)) -> list[PrivacyUnit]:
    draw = torch.Generator().manual_seed(0)
    raw = [
        PrivacyUnit(
            (
                torch.randint(0, 256, (n, 8, 8), generator=draw, dtype=torch.uint8),
                torch.randint(-1, 3, (n,), generator=draw),
            )
        )
        for n in sizes
    ]
    return [of(unit) for unit in raw]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engines_agree_on_it(engine: str) -> None:
    task = tuned().task()
    for sizes in ((1, 2, 2, 1), (1, 1, 1)):
        batch = units(task.expand, sizes)
        wanted = loop_engine(task.model, task.loss, batch, 0.05)
        found = ENGINES[engine](task.model, task.loss, batch, 0.05)
        assert wanted.norm() > 0.02
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("engine", [loop_engine, *ENGINES.values()], ids=["looped", *ENGINES])
def test_no_patient_moves_the_sum_by_more_than_the_clip(engine: ClippedSum) -> None:
    task, clip = tuned().task(), 1e-3
    batch = units(task.expand)
    whole = engine(task.model, task.loss, batch, clip)
    moved = []
    for gone in range(len(batch)):
        rest = [unit for i, unit in enumerate(batch) if i != gone]
        moved.append((whole - engine(task.model, task.loss, rest, clip)).norm().item())
    assert max(moved) <= clip
    assert min(moved) > 0.99 * clip  # every one of these is clipped: the bound is reached


def test_draws_from_one_stream_for_all_patients_would_break_the_bound() -> None:
    task, clip = tuned().task(), 1e-3

    def total(raw: list[PrivacyUnit]) -> Tensor:
        shared = model(UnsafeSeededEntropy(9)).task().expand  # the same stream anew
        return loop_engine(task.model, task.loss, [shared(unit) for unit in raw], clip)

    raw = units(lambda unit: unit)
    assert (total(raw) - total(raw[1:])).norm() > clip


def test_what_a_patient_draws_depends_on_no_other_patient() -> None:
    raw = units(lambda unit: unit)
    alone = model(Same())._expanded(raw[1])
    among = model(Same())
    among._expanded(raw[0])
    assert all(torch.equal(a, b) for a, b in zip(alone.rows, among._expanded(raw[1]).rows, strict=True))


def test_two_models_of_one_seed_draw_different_noise_for_the_same_patient() -> None:
    raw = units(lambda unit: unit)[0]
    one, other = (model().task().expand(raw) for _ in range(2))
    assert not torch.equal(one.rows[0], other.rows[0])


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_a_picture_is_drawn_k_times_at_times_that_are_uniform(prediction: Any) -> None:
    images = torch.full((300, 8, 8), 200, dtype=torch.uint8)
    own = model(UnsafeSeededEntropy(1), draws=8, label_drop=0.25, prediction=prediction)
    noisy, t, target, tokens = own.task().expand(PrivacyUnit((images, torch.ones(300).long()))).rows
    assert noisy.shape == target.shape == (2400, 2, 4, 4)
    share = (t.double() + 0.5) / TIMES
    assert (int(t.min()), int(t.max())) >= (0, 990)
    assert int(t.max()) < TIMES
    assert share.mean().item() == pytest.approx(0.5, abs=0.01)
    assert share.reshape(300, 8)[:, 0].std().item() == pytest.approx(
        1 / math.sqrt(12), rel=0.1
    )  # each draw by itself
    assert share.reshape(300, 8).mean(dim=1).std().item() < 0.13 / math.sqrt(12)  # their mean varies little
    a = abar()[t].float().reshape(-1, 1, 1, 1)
    clean = CODER.encode(planes(images[:1], CODER))
    noise = target if prediction == "epsilon" else a.sqrt() * target + (1 - a).sqrt() * noisy
    assert torch.allclose(a.sqrt() * clean + (1 - a).sqrt() * noise, noisy, atol=1e-3)
    assert noise.std().item() == pytest.approx(1.0, rel=0.02)
    empty = (tokens == 0).all(dim=1)
    assert empty.float().mean().item() == pytest.approx(0.25, abs=0.04)
    assert len(torch.unique(tokens[~empty], dim=0)) == 2  # both templates
    assert (
        not model(label_drop=0.0)
        .task()
        .expand(PrivacyUnit((images, torch.ones(300).long())))
        .rows[3]
        .eq(0)
        .all(1)
        .any()
    )


def test_a_picture_is_encoded_once_and_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = model(UnsafeSeededEntropy(1)), []
    encode = type(CODER).encode
    monkeypatch.setattr(type(CODER), "encode", lambda self, x: seen.append(len(x)) or encode(self, x))
    raw = units(lambda unit: unit)
    for _ in range(3):
        for unit in raw:
            own.task().expand(unit)
    assert seen == [1] * 6


def test_private_training_moves_the_denoiser_and_leaves_the_autoencoder_as_it_is() -> None:
    own = model(lr_finetune=0.01)
    own.restore(denoiser().state_dict())
    task, frozen = own.task(), {name: tensor.clone() for name, tensor in CODER.state_dict().items()}
    before = [p.detach().clone() for p in task.model.parameters()]
    drawn = own.sample(np.array([0, 1]), torch_generator(1))
    train_privately(
        task, units(lambda unit: unit), PrivateSgd(1.0, 1.0, 2, 0.1, 2, 4.0), SystemEntropy(), best_engine("cpu")
    )
    assert not any(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in CODER.state_dict().items())
    assert not np.array_equal(own.sample(np.array([0, 1]), torch_generator(1)), drawn)
    again = model()
    again.restore(own.state())
    assert np.array_equal(*(m.sample(np.array([0, 1]), torch_generator(2)) for m in (own, again)))
    assert own.task().follower is task.follower
    for late in (lambda: own.restore(own.state()), lambda: own.pretrain(*squares(4), 1, MemoryPlace())):
        with pytest.raises(ValueError, match="begun"):
            late()


def squares(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Condition 0 is dark pictures, 1 and 2 are bright ones."""
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 3, count).astype(np.int64)
    images = np.full((count, 8, 8), 128, np.uint8)
    for image, label in zip(images, labels, strict=True):
        top, left = rng.integers(0, 4, 2)
        image[top : top + 5, left : left + 5] = 240 if label else 16
    return images, labels


def training(**changes: Any) -> LatentTraining:
    return LatentTraining(SMALL, **{"seed": 4, "batch": 8, "checkpoint_every": 2} | changes)


def test_a_training_that_was_cut_off_ends_with_the_very_bytes_of_one_that_was_not() -> None:
    images, labels = squares(20)
    data = encoded(images, labels, CODER, CONDITIONS)
    whole, cut = MemoryPlace(), MemoryPlace(breaks_after=2)
    net = train_latent_denoiser(data, training(), 6, whole)
    with pytest.raises(KeyboardInterrupt):
        train_latent_denoiser(data, training(), 6, cut)
    heard: list[TrainingProgress] = []
    again = train_latent_denoiser(data, training(say_every=1), 6, cut, heard.append)
    assert [p.step for p in heard] == [5, 6]
    assert cut.data == whole.data
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    others = [
        (data, training(prediction="epsilon")),
        (encoded(images, np.roll(labels, 1), CODER, CONDITIONS), training()),
        (encoded(images, labels, autoencoder(seed=2), CONDITIONS), training()),
        (encoded(images, labels, CODER, replace(CONDITIONS, templates=("{} with image", "{}"))), training()),
    ]
    for other, run in others:
        with pytest.raises(OtherRunError):
            train_latent_denoiser(other, run, 6, cut)


def test_two_trainings_of_one_seed_give_the_same_file() -> None:
    images, labels = squares(12)
    made = []
    for _ in range(2):
        own = model()
        own.pretrain(images, labels, 2, MemoryPlace())
        made.append(own.file({"steps": 2}))
    assert made[0] == made[1]


def test_a_training_whose_loss_is_no_number_stops() -> None:
    images, labels = squares(8)
    data = encoded(images, labels, CODER, CONDITIONS)
    broken = replace(data, latents=data.latents * math.nan)
    with pytest.raises(DivergedError):
        train_latent_denoiser(broken, training(), 2, MemoryPlace())


def test_a_model_that_draws_no_numbers_shows_nothing() -> None:
    own = model()
    own.restore({name: tensor * 1e38 for name, tensor in denoiser().state_dict().items()})
    with pytest.raises(LatentNotFiniteError):
        own.sample(np.array([0]), torch_generator(1))


def test_words_that_no_picture_has_begin_as_nothing() -> None:
    images, labels = squares(20)
    data = encoded(images, np.where(labels == 2, -1, labels), CODER, CONDITIONS)
    table = train_latent_denoiser(data, training(), 2, MemoryPlace()).words.weight
    words = {word: place for place, word in enumerate(CONDITIONS.vocabulary.words, start=1)}
    for word in ("effusion", "and"):
        assert torch.equal(table[words[word]], table[0])
    for word in ("image", "with", "edema", "none"):
        assert not torch.equal(table[words[word]], table[0])


def test_labels_are_dropped_by_chance() -> None:
    labels = torch.zeros(4000).long()
    assert (dropped(labels, 0.25, torch_generator(1)) == -1).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(dropped(labels, 0.0, torch_generator(1)), labels)


class Halves(Autoencoder):
    """An autoencoder that needs no training: every 2 x 2 block of pixels becomes two numbers, its mean and a zero."""

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        small = nn.functional.avg_pool2d(x, 2)
        return torch.cat([small, torch.zeros_like(small)], dim=1)

    def decode(self, z: Tensor) -> Tensor:
        return nn.functional.interpolate(z[:, :1], scale_factor=2).clamp(-1, 1)


def test_it_learns_in_seconds_to_draw_the_condition_that_is_asked_for() -> None:
    images, labels = squares(200)
    coder = Halves(CODER.net, 1.0, CODER.origin)
    plain = replace(SMALL, widths=(8,), attention=(False,))
    own = config(architecture=plain, lr=5e-3, batch=24, ema=0.97, sampling_steps=10)
    first = LatentDiffusion(own, coder, CONDITIONS)
    heard: list[TrainingProgress] = []
    first.pretrain(images, labels, 150, MemoryPlace(), heard.append)
    assert heard[-1].losses["loss"] < 0.5  # 1 is a network that has learned nothing
    wanted = np.array([0, 1, 2] * 5)
    for sampler, guidance in (("ddim", 1.0), ("pndm", 1.5)):
        asked = LatentDiffusion(replace(own, sampler=sampler, guidance=guidance), coder, CONDITIONS)  # type: ignore[arg-type]
        asked.restore(first.state())
        drawn = asked.sample(wanted, torch_generator(1))
        assert drawn.shape == (15, 8, 8)
        assert drawn.dtype == np.uint8
        bright = drawn.reshape(15, -1).mean(axis=1)
        assert ((bright > 128) == (wanted > 0)).mean() > 0.85, bright


def test_the_same_generator_draws_the_same_pictures_and_no_label_none() -> None:
    colour = autoencoder(3)
    own = LatentDiffusion(config(sampling_batch=2, guidance=2.0), colour, CONDITIONS)
    own.restore(denoiser().state_dict())
    one, other = (own.sample(np.array([0, 1, -1]), torch_generator(1)) for _ in range(2))
    assert one.shape == (3, 8, 8, 3)
    assert np.array_equal(one, other)
    assert not np.array_equal(one, own.sample(np.array([0, 1, -1]), torch_generator(2)))
    assert own.sample(np.zeros(0, np.int64), torch_generator(1)).shape == (0, 8, 8, 3)


def test_bfloat16_draws_nearly_the_same() -> None:
    exactly, roughly = model(), model(precision="bfloat16")
    for own in (exactly, roughly):
        own.restore(denoiser().state_dict())
    one, other = (m.sample(np.array([0, 1, 2]), torch_generator(1)).astype(int) for m in (exactly, roughly))
    assert 0 < np.abs(one - other).max() < 40
    roughly.pretrain(*squares(8), 1, MemoryPlace())


def test_a_model_comes_back_from_its_file_and_draws_the_same() -> None:
    own = tuned()
    raw = own.file({"student": True})
    back = latent_from(raw)
    assert latent_bytes(back, {"student": True}) == raw
    assert unpack(raw, "latent-diffusion").notes == {"student": True}
    labels = np.array([0, 1, 2, -1])
    assert np.array_equal(back.sample(labels, torch_generator(5)), own.sample(labels, torch_generator(5)))
    assert back.conditions == CONDITIONS
    assert back.autoencoder.origin.component == "private"
    assert latent_from(raw, "public").autoencoder.origin.component == "public"
    assert not any(p.requires_grad for p in back.denoiser.parameters())


def test_a_file_that_is_no_whole_model_is_refused() -> None:
    raw = tuned().file({})
    told = unpack(raw, "latent-diffusion")
    net = dict(told.config["denoiser"])
    changes: list[dict[str, Any]] = [
        {"denoiser": net | {"context": 16}},
        {"denoiser": net | {"words": 5}},
        {"denoiser": net | {"latent": [2, 8, 8]}},
        {"denoiser": net | {"widths": [8, 8192]}},
        {"denoiser": net | {"more": 1}},
        {"denoiser": []},
        {"autoencoder": {**told.config["autoencoder"], "scale": -1.0}},
        {"autoencoder": {"scale": 1.0}},
        {"conditions": {**CONDITIONS.told(), "names": ["none"]}},
        {"conditions": None},
        {"drawing": asdict(Drawing()) | {"steps": 30}},
        {"drawing": {"more": 1}},
        {"more": 1},
    ]
    for change in changes:
        with pytest.raises(WeightsError):
            latent_from(pack("latent-diffusion", {**told.config, **change}, {}, told.state))
    names = sorted(told.state)
    for state in (
        {name: told.state[name] for name in names[1:]},
        {name: told.state[name] for name in names[:-1]},
        {**told.state, "denoiser.more": torch.zeros(1)},
        {**told.state, "more": torch.zeros(1)},
        {**told.state, names[0]: told.state[names[0]] * math.nan},
        {**told.state, names[0]: told.state[names[0]].half()},
    ):
        with pytest.raises(WeightsError):
            latent_from(pack("latent-diffusion", told.config, {}, state))
    for bad in (raw[:-4], b"", pack("diffusion", told.config, {}, told.state)):
        with pytest.raises(WeightsError):
            latent_from(bad)


def test_pictures_and_labels_that_do_not_fit_are_refused() -> None:
    images, labels = squares(4)
    own = model()
    for bad, of, reason in (
        (images.astype(np.float32), labels, "uint8"),
        (images[:, :4], labels, "another shape"),
        (images[..., None].repeat(3, axis=3), labels, "another shape"),
        (images, labels[:3], "label for each"),
        (images[:0], labels[:0], "label for each"),
        (images, labels + 3, "not one of the conditions"),
        (images, labels - 5, "not one of the conditions"),
        (images, labels.astype(np.float64), "int64"),
    ):
        with pytest.raises(ValueError, match=reason):
            own.pretrain(bad, of, 1, MemoryPlace())
    with pytest.raises(ValueError, match="not one of the conditions"):
        own.sample(np.array([3]), torch_generator(1))


def test_a_configuration_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="draws, lr_finetune"):
        config(draws=0, lr_finetune=math.nan)
    for change in (
        {"ema": 1.0},
        {"lr": 0.0},
        {"label_drop": math.nan},
        {"prediction": "x0"},
        {"precision": "float16"},
        {"sampler": "heun"},
        {"sampling_steps": 30},
        {"guidance": math.nan},
        {"seed": -1},
        {"batch": 0},
        {"sampling_batch": 0},
    ):
        with pytest.raises(ValueError, match="not usable"):
            config(**change)
    with pytest.raises(WeightsError):
        model().restore(denoiser(replace(SMALL, context=16)).state_dict())


def test_the_fingerprint_is_of_what_decides_the_pictures() -> None:
    first = model()
    same = config(device="cuda", sampling_batch=7, checkpoint_every=9)
    assert same.fingerprint == first.config.fingerprint
    others = [config(draws=4), config(seed=4), config(prediction="epsilon"), config(guidance=2.0)]
    models = [LatentDiffusion(c, CODER, CONDITIONS) for c in others]
    models += [LatentDiffusion(config(), autoencoder(seed=2), CONDITIONS)]
    models += [LatentDiffusion(config(), CODER, replace(CONDITIONS, templates=("with image {}", "{}")))]
    assert len({m.fingerprint for m in (first, *models)}) == 7
    assert (first.shape, first.classes) == ((8, 8), 3)
