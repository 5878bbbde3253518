"""The training of a generator: its formulas, that it learns, that nothing but its arguments decides the outcome."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from agent.errors import OtherRunError
from agent.models.grids import grid, write_grid
from agent.models.image_tensors import to_unit
from agent.models.stylegan.ada import AugmentationControl
from agent.models.stylegan.network import PRESETS, StyleGanShape, generator_from
from agent.models.stylegan.training import GENERATOR, GanConfig, GanTrainer, auto, train_generator
from agent.models.training_loop import CHECKPOINT

MINI = StyleGanShape(8, 1, 8, 8, 1, 64, 12)


def config(**changes: Any) -> GanConfig:
    return GanConfig(**{"architecture": MINI, "steps": 4, "seed": 5, "batch": 4, "checkpoint_every": 2} | changes)


def pictures(n: int = 12, channels: int = 1, side: int = 8) -> NDArray[np.uint8]:
    rng = np.random.default_rng(2)
    shape = (n, side, side) if channels == 1 else (n, side, side, channels)
    return rng.integers(0, 256, shape).astype(np.uint8)


def planes(n: int = 12) -> Tensor:
    return torch.from_numpy(pictures(n))[:, None]


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_rule_for_gamma_gives_the_published_number() -> None:
    assert GanConfig(PRESETS["auto512"], 1, 0, batch=64).r1 == pytest.approx(0.8192)  # "gamma 0.82" of k-SALSA
    assert config(gamma=3.0).r1 == 3.0


def test_the_published_setting_follows_the_resolution() -> None:
    told = {name: auto(PRESETS[name], 1, 0) for name in ("auto128", "auto512", "auto1024")}
    assert [c.batch for c in told.values()] == [32, 8, 4]
    assert [c.lr for c in told.values()] == [0.0025, 0.0025, 0.002]
    assert all((c.mixing, c.path_length, c.r1_every) == (0.9, 2.0, 16) for c in told.values())


def test_the_average_halves_its_memory_in_its_half_life_and_is_short_at_first() -> None:
    long = config(batch=16, ema_kimg=5.0, ema_ramp=None)
    assert long.decay(10**9) ** (5000 / 16) == pytest.approx(0.5)
    ramped = config(batch=16, ema_kimg=5.0)
    assert ramped.decay(1600) ** (80 / 16) == pytest.approx(0.5)
    assert ramped.decay(10**9) == long.decay(10**9)
    assert ramped.decay(16) < 1e-3


def test_steps_of_a_regulariser_slow_the_optimiser_down() -> None:
    trainer = GanTrainer(config(), planes())
    d, g = trainer.optimizers["d_optimizer"].param_groups[0], trainer.optimizers["g_optimizer"].param_groups[0]
    assert d["lr"] == pytest.approx(0.0025 * 16 / 17)
    assert d["betas"] == pytest.approx((0.0, 0.99 ** (16 / 17)))
    assert (g["lr"], g["betas"]) == (0.0025, (0.0, 0.99))
    slowed = GanTrainer(config(path_length=2.0), planes()).optimizers["g_optimizer"].param_groups[0]
    assert slowed["lr"] == pytest.approx(0.0025 * 4 / 5)


def test_the_average_generator_follows_the_weights_by_its_formula() -> None:
    trainer, draw = GanTrainer(config(), planes()), stream()
    expected = [p.detach().clone() for p in trainer.averaged.parameters()]
    for count in range(1, 4):
        trainer.step(draw)
        beta = trainer.config.decay(4 * count)
        expected = [
            beta * e + (1 - beta) * p.detach() for e, p in zip(expected, trainer.generator.parameters(), strict=True)
        ]
    for e, mean in zip(expected, trainer.averaged.parameters(), strict=True):
        torch.testing.assert_close(mean, e, atol=1e-5, rtol=1e-4)
    assert torch.equal(trainer.averaged.w_avg, trainer.generator.w_avg)
    assert trainer.generator.w_avg.abs().sum() > 0


def test_r1_is_the_squared_gradient_of_the_logit_and_comes_when_it_is_due() -> None:
    trainer, draw = GanTrainer(config(r1_every=3, control=None), planes()), stream()
    seen = ["r1" in trainer.step(draw) for _ in range(6)]
    assert seen == [False, False, True] * 2
    real = planes().float()[:4] / 127.5 - 1.0
    judge = copy.deepcopy(trainer.discriminator)
    found = trainer._r1_step(real.clone(), draw)
    leaf = real.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(judge(leaf).sum(), leaf)
    assert grad.square().sum().item() / 4 == pytest.approx(found, rel=1e-4)


def test_r1_flattens_the_discriminator_where_the_pictures_are() -> None:
    trainer, draw = GanTrainer(config(gamma=100.0, control=None), planes()), stream()
    real = planes().float()[:8] / 127.5 - 1.0
    penalties = [trainer._r1_step(real, draw) for _ in range(25)]
    assert penalties[-1] < 0.5 * penalties[0]


EVERYTHING: dict[str, Any] = {
    "r1_every": 2,
    "mirror": True,
    "mixing": 0.5,
    "path_length": 2.0,
    "control": AugmentationControl(target=-0.9, kimg=0.1, every=2),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_restored_state_goes_on_bit_for_bit(precision: str) -> None:
    told = config(**EVERYTHING, precision=precision)
    first, draw = GanTrainer(told, planes()), stream()
    for _ in range(5):
        first.step(draw)
    assert first.p > 0.0
    state = {name: t.detach().clone().contiguous() for name, t in first.state().items()}
    place = draw.get_state()
    losses = [first.step(draw) for _ in range(4)]
    second = GanTrainer(config(**EVERYTHING, precision=precision), planes())
    second.restore(state)
    draw.set_state(place)
    assert [second.step(draw) for _ in range(4)] == losses
    ours, theirs = first.state(), second.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_discriminator_is_in_the_checkpoint_and_not_in_the_generator_file(tmp_path: Path) -> None:
    train_generator(pictures(), config(), tmp_path)
    assert b"discriminator.b4.out.weight" in (tmp_path / CHECKPOINT).read_bytes()
    assert b"b4.out.weight" not in (tmp_path / GENERATOR).read_bytes()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_run_writes_its_generator_and_its_samples_and_moves_no_global_stream(tmp_path: Path, channels: int) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    heard: list[int] = []
    made = train_generator(pictures(channels=channels), config(say_every=2), tmp_path, lambda p: heard.append(p.step))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert heard == [2, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        CHECKPOINT,
        GENERATOR,
        "samples-0000002.png",
        "samples-0000004.png",
    ]
    read, packed = generator_from((tmp_path / GENERATOR).read_bytes())
    z = torch.randn(2, 8, generator=stream())
    torch.testing.assert_close(read(z), made(z), atol=1e-6, rtol=1e-5)
    assert read.architecture.channels == channels
    assert packed.notes["steps"] == 4
    with Image.open(tmp_path / "samples-0000004.png") as image:
        assert image.size == (48, 48)
        assert image.mode == ("L" if channels == 1 else "RGB")


def test_a_run_that_goes_on_equals_one_that_was_never_interrupted(tmp_path: Path) -> None:
    train_generator(pictures(), config(steps=6), tmp_path / "whole")
    train_generator(pictures(), config(steps=2), tmp_path / "parts")
    train_generator(pictures(), config(steps=6), tmp_path / "parts")
    whole, parts = ((tmp_path / n / GENERATOR).read_bytes() for n in ("whole", "parts"))
    assert whole == parts
    with pytest.raises(ValueError, match="already longer"):
        train_generator(pictures(), config(steps=3), tmp_path / "parts")


@pytest.mark.parametrize("change", [{"seed": 6}, {"lr": 0.001}, {"gamma": 1.0}, {"control": None}])
def test_a_folder_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    train_generator(pictures(), config(steps=1), tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(OtherRunError):
        train_generator(pictures(), config(steps=1, **change), tmp_path)
    with pytest.raises(OtherRunError):
        train_generator(255 - pictures(), config(steps=1), tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_the_seed_decides(tmp_path: Path) -> None:
    made = [train_generator(pictures(), config(seed=s, steps=1), tmp_path / str(i)) for i, s in enumerate((1, 1, 2))]
    z = torch.randn(2, 8, generator=stream())
    assert torch.equal(made[0](z), made[1](z))
    assert not torch.allclose(made[0](z), made[2](z))


def test_a_generator_learns_where_it_is_bright(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    real = np.clip(rng.normal(60, 15, (200, 8, 8)), 0, 255)
    real[:, 2:6, 1:4] += rng.uniform(80, 160, (200, 1, 1))
    real = np.clip(real, 0, 255).astype(np.uint8)
    begun = config(steps=1, batch=8, control=None)
    z = torch.randn(64, 8, generator=stream())

    def apart(run: GanConfig, name: str) -> float:
        made = to_unit(train_generator(real, run, tmp_path / name)(z))
        return float(np.abs(made.mean(axis=0) - real.mean(axis=0) / 255).mean())

    assert apart(config(steps=160, batch=8, control=None, checkpoint_every=500), "long") < 0.5 * apart(begun, "short")


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (pictures(1), "fewer than two"),
        (pictures(0), "fewer than two"),
        (pictures(side=16), "another size"),
        (pictures().astype(np.float32), "uint8"),
        (np.full((4, 8, 8), np.nan), "uint8"),
        (pictures(channels=2), "grey"),
        (pictures()[0], "grey"),
        (np.zeros((4, 8, 8), np.uint8), "are equal"),
    ],
)
def test_pictures_that_cannot_be_learned_are_refused_before_anything_is_written(
    tmp_path: Path, images: NDArray[np.uint8], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        train_generator(images, config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_configuration_says_all_that_is_wrong_with_it_at_once() -> None:
    nan = float("nan")
    with pytest.raises(ValueError, match="steps, batch, lr, gamma, ema_kimg, mixing"):
        config(steps=0, batch=1, lr=nan, gamma=nan, ema_kimg=nan, mixing=nan)


def test_a_grid_has_every_picture_in_its_place(tmp_path: Path) -> None:
    images = pictures(5, channels=3, side=4)
    made = grid(images, 2)
    assert made.shape == (12, 8, 3)
    assert np.array_equal(made[4:8, 4:8], images[3])
    assert np.array_equal(made[8:, :4], images[4])
    assert not made[8:, 4:].any()
    write_grid(tmp_path / "a.png", images[..., 0])
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.asarray(image), grid(images[..., 0]))
    for wrong in (images[:0], images.astype(float)):
        with pytest.raises(ValueError, match="grid"):
            grid(wrong)
