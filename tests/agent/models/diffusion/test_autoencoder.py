"""The autoencoder: latents of the stated shape and scale, files read or refused, and kill -9 costs nothing."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from agent.errors import OtherRunError
from agent.models.augmentations import Pool
from agent.models.diffusion import autoencoder_training
from agent.models.diffusion.autoencoder import (
    PRESETS,
    AutoencoderArchitecture,
    AutoencoderNet,
    autoencoder_bytes,
    autoencoder_from,
)
from agent.models.diffusion.autoencoder_training import (
    AutoencoderCollapsedError,
    AutoencoderTrainer,
    AutoencoderTraining,
    balance,
    discriminator,
    divergence,
    perceptual,
    scaled,
    train_autoencoder,
)
from agent.models.features.extractors import RandomFeatures
from agent.models.training_loop import CHECKPOINT, TrainingProgress, seeded, torch_generator
from agent.models.weights import Origin, WeightsError, pack
from tests.support.killed_training import KilledError, killed_at
from tests.support.latents import tiny_autoencoder, tiny_autoencoder_file

SMALL = AutoencoderArchitecture(8, 1, 2, (8, 16), 1, 4)
CPU = torch.device("cpu")


def net(architecture: AutoencoderArchitecture = SMALL, seed: int = 0) -> AutoencoderNet:
    with seeded(seed):
        return AutoencoderNet(architecture).train(mode=False)


def blobs(count: int, side: int, seed: int = 0) -> NDArray[np.uint8]:
    """Bright ovals on dark ground: (n, s, s)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] / side
    at, size = rng.uniform(0.3, 0.7, (2, count, 1, 1)), rng.uniform(0.1, 0.3, (count, 1, 1))
    out = np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * size**2)) * rng.uniform(0.5, 1.0, (count, 1, 1))
    return np.rint(out * 255).astype(np.uint8)


def config(**changes: Any) -> AutoencoderTraining:
    told: dict[str, Any] = {"steps": 6, "batch": 4, "patches": 8, "checkpoint_every": 2, "say_every": 1}
    return AutoencoderTraining(SMALL, **(told | changes))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_built_and_normalises_nothing_over_a_batch(name: str) -> None:
    with torch.device("meta"):
        made = AutoencoderNet(PRESETS[name])
        judge = discriminator(1, 32, PRESETS[name].side)
    kinds = {type(m) for module in (made, judge) for m in module.modules()}
    assert not {k for k in kinds if "BatchNorm" in k.__name__ or "InstanceNorm" in k.__name__}
    assert nn.GroupNorm in kinds
    c, h, w = PRESETS[name].latents
    assert c * h * w < PRESETS[name].side ** 2
    assert made.last.shape[0] == 1


def test_latents_and_pictures_have_the_stated_shapes_range_and_type() -> None:
    for channels in (1, 3):
        made = tiny_autoencoder(channels)
        assert made.shape == ((16, 16) if channels == 1 else (16, 16, 3))
        x = torch.rand(5, channels, 16, 16, generator=torch_generator(0)) * 2 - 1
        z = made.encode(x)
        assert made.latent == (2, 8, 8) == tuple(z.shape[1:])
        assert z.dtype == torch.float32
        y = made.decode(50.0 * z)
        assert y.shape == x.shape
        assert float(y.min()) == -1.0
        assert float(y.max()) == 1.0
        assert made.encode(x[:0]).shape == (0, 2, 8, 8)
        assert made.decode(z[:0]).shape == (0, channels, 16, 16)
        for wrong in (x[:, :, :8], x.repeat(1, 2, 1, 1), x[0]):
            with pytest.raises(ValueError, match="images are"):
                made.encode(wrong)
        with pytest.raises(ValueError, match="latents are"):
            made.decode(z[:, :1])


def test_a_picture_is_encoded_the_same_whatever_lies_beside_it() -> None:
    made = tiny_autoencoder()
    x = torch.rand(6, 1, 16, 16, generator=torch_generator(1)) * 2 - 1
    alone = torch.cat([made.encode(one[None]) for one in x])
    assert torch.allclose(made.encode(x), alone, atol=1e-5)
    assert torch.allclose(made.decode(alone), torch.cat([made.decode(one[None]) for one in alone]), atol=1e-5)
    made.train()
    assert torch.equal(made.encode(x), made.encode(x))


def test_many_pictures_are_taken_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny_autoencoder()
    x = torch.rand(5, 1, 16, 16, generator=torch_generator(1)) * 2 - 1
    whole = made.encode(x)
    monkeypatch.setattr("agent.models.diffusion.autoencoder._PIXELS", 2 * 16 * 16)
    assert torch.allclose(made.encode(x), whole, atol=1e-5)
    assert torch.equal(made.encode(x, torch_generator(3)), made.encode(x, torch_generator(3)))


def test_a_draw_has_the_mean_and_deviation_that_the_network_says_and_comes_from_its_generator_alone() -> None:
    made = tiny_autoencoder()
    x = torch.rand(1, 1, 16, 16, generator=torch_generator(1)) * 2 - 1
    state = torch.get_rng_state()
    drawn = made.encode(x.repeat(800, 1, 1, 1), torch_generator(0))
    assert torch.equal(state, torch.get_rng_state())
    _, deviation = made.net.encode(x)
    assert torch.allclose(drawn.mean(0), made.encode(x)[0], atol=5 * float(deviation.max()) * made.scale / 800**0.5)
    assert torch.allclose(drawn.std(0), deviation[0] * made.scale, rtol=0.15)
    assert not torch.equal(made.encode(x, torch_generator(0)), made.encode(x, torch_generator(1)))


def test_gradients_reach_pictures_and_latents_but_no_weight() -> None:
    made = tiny_autoencoder()
    x = torch.zeros(1, 1, 16, 16, requires_grad=True)
    (made.decode(made.encode(x)) * 0.1).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert float(x.grad.abs().max()) > 0
    assert all(p.grad is None for p in made.parameters())


def test_moving_the_origin_of_the_latents_changes_no_picture() -> None:
    made = net()
    x = torch.rand(3, 1, 8, 8, generator=torch_generator(0)) * 2 - 1
    before, z = made(x), made.encode(x)[0]
    made.centre(torch.tensor([0.7, -2.0]))
    assert torch.allclose(made(x), before, atol=1e-5)
    assert torch.allclose(made.encode(x)[0], z - torch.tensor([0.7, -2.0])[:, None, None], atol=1e-5)


def test_a_file_is_read_as_it_was_written() -> None:
    made = net()
    raw = autoencoder_bytes(made, 0.5, {"steps": 1})
    assert raw == autoencoder_bytes(made, 0.5, {"steps": 1})
    read = autoencoder_from(raw)
    assert (read.scale, read.architecture) == (0.5, SMALL)
    assert read.origin == Origin("file", hashlib.sha256(raw).hexdigest())
    assert read.origin.component == "private"
    assert autoencoder_from(raw, "public").origin.component == "public"
    x = torch.rand(2, 1, 8, 8, generator=torch_generator(0))
    assert torch.equal(read.encode(x), made.encode(x)[0] * 0.5)
    assert torch.equal(read.decode(read.encode(x)), made(x).clamp(-1, 1))


def test_twice_the_scale_is_the_same_autoencoder_with_latents_twice_as_large() -> None:
    made = net()
    one, two = (autoencoder_from(autoencoder_bytes(made, s, {})) for s in (1.0, 2.0))
    x = torch.rand(2, 1, 8, 8, generator=torch_generator(0))
    assert torch.allclose(two.encode(x), 2 * one.encode(x))
    assert torch.allclose(two.decode(two.encode(x)), one.decode(one.encode(x)), atol=1e-6)


def forged(**changes: Any) -> bytes:
    told = {"architecture": asdict(SMALL), "scale": 1.0} | changes
    return pack("autoencoder", told, {}, net().state_dict())


@pytest.mark.parametrize(
    "changes",
    [{"scale": 0.0}, {"scale": -1.0}, {"scale": 1}, {"scale": True}, {"scale": None}, {"scale": "1.0"}, {"more": 1},
     {"architecture": []}, {"architecture": None}, {"architecture": asdict(SMALL) | {"attention": 1}},
     {"architecture": {k: v for k, v in asdict(SMALL).items() if k != "groups"}},
     {"architecture": asdict(SMALL) | {"latent": 3}}, {"architecture": asdict(SMALL) | {"widths": [8, 8]}},
     {"architecture": asdict(SMALL) | {"widths": 8}}, {"architecture": asdict(SMALL) | {"widths": [4096] * 8}},
     {"architecture": asdict(SMALL) | {"widths": ["8", "16"]}}, {"architecture": asdict(SMALL) | {"side": 10**9}}],
)  # fmt: skip
def test_a_file_whose_configuration_is_none_or_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WeightsError):
        autoencoder_from(forged(**changes))


@pytest.mark.parametrize("scale", ["Infinity", "NaN", "1e999"])
def test_a_scale_that_is_no_number_is_refused_where_it_is_written_and_where_it_is_read(scale: str) -> None:
    with pytest.raises(ValueError, match="scale"):
        autoencoder_bytes(net(), float(scale), {})
    raw = forged()
    size = int.from_bytes(raw[:8], "little")
    told = json.loads(raw[8 : 8 + size])
    told["__metadata__"]["lazaret"] = told["__metadata__"]["lazaret"].replace('"scale":1.0', f'"scale":{scale}')
    head = json.dumps(told).encode()
    head += b" " * (-len(head) % 8)
    with pytest.raises(WeightsError, match="configuration"):
        autoencoder_from(len(head).to_bytes(8, "little") + head + raw[8 + size :])


def test_other_kinds_missing_tensors_and_weights_that_are_no_numbers_are_refused() -> None:
    state = net().state_dict()
    told = {"architecture": asdict(SMALL), "scale": 1.0}
    broken = {n: torch.full_like(t, math.nan) for n, t in state.items()}
    less = {n: t for n, t in state.items() if not n.endswith("post_quant_conv.conv.bias")}
    for raw in (pack("encoder", told, {}, state), pack("autoencoder", told, {}, broken), b"",
                pack("autoencoder", told, {}, less), pack("autoencoder", told, {}, state | {"x": torch.zeros(1)}),
                pack("autoencoder", told, {}, {n: t.half() for n, t in state.items()})):  # fmt: skip
        with pytest.raises(WeightsError):
            autoencoder_from(raw)


@pytest.mark.parametrize(
    "wrong",
    [{"side": 9}, {"side": 0}, {"channels": 2}, {"latent": 0}, {"latent": 4.0}, {"widths": ()}, {"widths": (8,) * 9},
     {"widths": (8, 6)}, {"blocks": 0}, {"groups": True}, {"widths": [8, 16]}, {"latent": 5000}],
)  # fmt: skip
def test_an_architecture_that_cannot_be_built_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"whole numbers|levels|channels|groups"):
        replace(SMALL, **wrong)


def test_the_divergence_is_that_of_torchs_own_gaussians() -> None:
    draw = torch_generator(0)
    mean, deviation = torch.randn(3, 2, 4, 4, generator=draw), torch.rand(3, 2, 4, 4, generator=draw) + 0.1
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, deviation), normal(0.0, 1.0))
    assert float(divergence(mean, deviation)) == pytest.approx(float(expected.sum((1, 2, 3)).mean()), rel=1e-5)


def test_the_perceptual_distance_is_zhang_et_als_formula() -> None:
    features = RandomFeatures(0, width=4, depth=2, channels=1)
    a, b = torch.rand(2, 2, 1, 8, 8, generator=torch_generator(0))
    total = 0.0
    for left, right in zip(features.maps(a), features.maps(b), strict=True):
        p, q = left.numpy().astype(float), right.numpy().astype(float)
        p, q = (m / np.sqrt((m**2).sum(1, keepdims=True)).clip(1e-6) for m in (p, q))
        total += ((p - q) ** 2).sum(1).mean()
    assert float(perceptual(features, a, b)) == pytest.approx(total, rel=1e-4)
    assert float(perceptual(features, a, a)) == 0.0
    assert float(perceptual(features, b, a)) == pytest.approx(total, rel=1e-4)


def test_the_balance_is_the_ratio_of_the_gradients_lengths() -> None:
    last = torch.tensor([1.0, 2.0], requires_grad=True)
    weight = balance((3.0 * last).sum(), (last * torch.tensor([0.5, 0.0])).sum(), last)
    assert float(weight) == pytest.approx(math.hypot(3, 3) / 0.5, rel=1e-4)
    assert float(balance((last**2).sum(), (0.0 * last).sum(), last)) == 1e4  # no gradient: bounded, and times nothing


def test_the_latents_scale_is_one_over_their_deviation_and_their_mean_is_zero() -> None:
    images = blobs(50, 8)
    made = net(seed=3)
    pool = Pool(images, 8, 1, CPU)
    x = pool.take(torch.arange(50))
    z = made.encode(x)[0].detach()
    within = (z - z.mean(dim=(0, 2, 3), keepdim=True)).std(unbiased=False)
    scale = scaled(made, pool)
    assert scale == pytest.approx(1.0 / float(within), rel=1e-4)
    latents = autoencoder_from(autoencoder_bytes(made, scale, {})).encode(x)
    assert float(latents.std()) == pytest.approx(1.0, abs=1e-3)
    assert latents.mean(dim=(0, 2, 3)).abs().max() < 1e-4


def test_latents_that_are_the_same_for_every_picture_are_refused() -> None:
    made = net()
    with torch.no_grad():
        made.kl.quant_conv_mu.conv.weight.zero_()
    with pytest.raises(AutoencoderCollapsedError, match="do not distinguish images"):
        scaled(made, Pool(blobs(20, 8), 8, 1, CPU))


def test_the_discriminator_joins_after_its_share_of_the_steps_and_never_where_it_has_no_weight() -> None:
    pool, features = Pool(blobs(20, 8), 8, 1, CPU), RandomFeatures(0, width=4, depth=2, channels=1)
    for changes, first in (
        ({"warmup": 0.5}, 4),
        ({"warmup": 0.0}, 1),
        ({"warmup": 1.0}, 7),
        ({"adversarial": 0.0}, 7),
    ):
        trainer = AutoencoderTrainer(pool, config(**changes), features)
        before = {n: t.clone() for n, t in trainer.judge.state_dict().items()}
        draw = torch_generator(0)
        joined = [step for step in range(1, 7) if "discriminator" in trainer.step(draw)]
        assert joined == list(range(first, 7))
        moved = any(not torch.equal(t, before[n]) for n, t in trainer.judge.state_dict().items())
        assert moved == (first <= 6)


def test_the_discriminators_step_moves_no_weight_of_the_autoencoder_and_the_other_way_round() -> None:
    trainer = AutoencoderTrainer(
        Pool(blobs(20, 8), 8, 1, CPU), config(warmup=0.0), RandomFeatures(0, width=4, depth=2, channels=1)
    )
    real = trainer.pool.take(torch.arange(4))
    before = {n: t.clone() for n, t in trainer.net.state_dict().items()}
    trainer._judge(real, trainer.net(real).detach())
    assert all(torch.equal(t, before[n]) for n, t in trainer.net.state_dict().items())
    judged = {n: t.clone() for n, t in trainer.judge.state_dict().items()}
    trainer._learn(real, trainer.net(real), torch.zeros(()))
    assert all(torch.equal(t, judged[n]) for n, t in trainer.judge.state_dict().items())
    assert all(p.requires_grad for p in trainer.judge.parameters())


@cache
def trained(steps: int = 80) -> tuple[bytes, tuple[TrainingProgress, ...]]:
    """Of ovals, at 16 px."""
    import tempfile

    told: list[TrainingProgress] = []
    how = AutoencoderTraining(PRESETS["tiny16"], steps, patches=8, say_every=10, checkpoint_every=steps)
    with tempfile.TemporaryDirectory() as folder:
        return train_autoencoder(blobs(200, 16), how, Path(folder), told.append), tuple(told)


def test_pictures_it_never_saw_come_back_much_as_they_were() -> None:
    raw, told = trained()
    made = autoencoder_from(raw)
    x = torch.from_numpy(blobs(40, 16, seed=9))[:, None].float() / 127.5 - 1
    error = (made.decode(made.encode(x)) - x).square().mean()
    assert float(error) < 0.05 * float(x.var())  # what answering the mean picture costs is the variance
    assert float(made.encode(x).std()) == pytest.approx(1.0, abs=0.25)
    assert told[-1].losses["absolute"] < 0.5 * told[0].losses["absolute"]
    assert {"absolute", "perceptual", "kl", "adversarial", "discriminator"} == set(told[-1].losses)


def test_a_run_that_was_killed_ends_with_the_same_file_and_no_global_generator_moves(tmp_path: Path) -> None:
    images, plan = blobs(20, 8), config(ema=0.9)
    state = torch.get_rng_state()
    whole = train_autoencoder(images, plan, tmp_path / "whole")
    assert torch.equal(state, torch.get_rng_state())
    for at in (3, 5, 6):  # before the discriminator's first step, behind it, and at the end
        with pytest.raises(KilledError):
            train_autoencoder(images, plan, tmp_path / f"killed-{at}", killed_at(at))
        assert (tmp_path / f"killed-{at}" / CHECKPOINT).exists()
        assert train_autoencoder(images, plan, tmp_path / f"killed-{at}") == whole
    assert train_autoencoder(images, plan, tmp_path / "whole") == whole
    others = (config(ema=0.9, kl=1e-5), config(ema=0.9, seed=1), config(steps=7, ema=0.9))
    for other in others:
        with pytest.raises(OtherRunError):
            train_autoencoder(images, other, tmp_path / "whole")
    with pytest.raises(OtherRunError):
        train_autoencoder(255 - images, plan, tmp_path / "whole")
    with pytest.raises(OtherRunError):
        train_autoencoder(images, plan, tmp_path / "whole", features=RandomFeatures(1, width=4, depth=2))


def test_colour_and_other_sizes_are_learned_as_the_architecture_says(tmp_path: Path) -> None:
    images = np.stack([blobs(8, 16), blobs(8, 16, 1), blobs(8, 16, 2)], axis=-1)
    raw = train_autoencoder(images, replace(config(steps=2), architecture=SMALL.fitted(3)), tmp_path)
    assert autoencoder_from(raw).shape == (8, 8, 3)


def test_pictures_that_hold_nothing_to_learn_are_refused(tmp_path: Path) -> None:
    images = blobs(10, 8)
    for wrong in (images[:0], images[:1], np.zeros_like(images), images.astype(np.float32), images[:, 0]):
        with pytest.raises(ValueError, match="images"):
            train_autoencoder(wrong, config(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("provenance", ["private", "file"])
def test_features_that_nobody_vouches_for_are_refused(provenance: Any, tmp_path: Path) -> None:
    features = RandomFeatures(0, width=4, depth=2, channels=1)
    features.origin = Origin(provenance, "0" * 64)
    with pytest.raises(ValueError, match=r"vouch|public"):
        train_autoencoder(blobs(10, 8), config(), tmp_path, features=features)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"seed": -1}, {"batch": 0}, {"lr": 0.0}, {"lr": math.nan}, {"kl": -1.0}, {"kl": math.nan},
     {"perceptual": math.inf}, {"adversarial": -0.1}, {"warmup": 1.1}, {"warmup": math.nan}, {"patches": 12},
     {"ema": 1.0}, {"precision": "float16"}, {"checkpoint_every": 0}, {"say_every": 0}],
)  # fmt: skip
def test_a_training_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        config(**wrong)


def test_the_ready_made_autoencoder_is_a_function_of_its_seed_and_is_scaled() -> None:
    raw = tiny_autoencoder_file()
    assert tiny_autoencoder_file.__wrapped__() == raw != tiny_autoencoder_file(1, 6)
    x = torch.rand(200, 1, 16, 16, generator=torch_generator(0)) * 2 - 1
    z = tiny_autoencoder().encode(x)
    assert float(z.std()) == pytest.approx(1.0, abs=0.1)
    assert abs(float(z.mean())) < 0.1
    assert tiny_autoencoder().origin.component == "public"


def test_the_digest_of_a_run_leaves_out_what_changes_no_weight() -> None:
    features, images = autoencoder_training.features_for(1), blobs(3, 8)
    names = {config(checkpoint_every=every, say_every=every).run(images, features) for every in (1, 2)}
    assert len(names) == 1
    assert config(lr=1e-4).run(images, features) not in names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_file_trained_on_an_accelerator_in_bfloat16_is_read_on_a_processor(tmp_path: Path) -> None:
    how = replace(config(steps=20), device="cuda", precision="bfloat16")
    made = autoencoder_from(train_autoencoder(blobs(20, 8), how, tmp_path))
    x = torch.rand(2, 1, 8, 8)
    assert torch.isfinite(made.decode(made.encode(x))).all()
    assert torch.allclose(made.encode(x.cuda()).cpu(), made.encode(x), atol=1e-2)
