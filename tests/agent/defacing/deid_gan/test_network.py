"""C-DeID-GAN: Eq. 6 and 7, pooling that keeps a mask's share, a file that is refused for those it learned from."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv3d, leaky_relu, linear

from agent.defacing.deid_gan import network as volume_gan
from agent.defacing.deid_gan.layers import (
    ChannelNorm,
    Depthwise,
    InvertedResidual,
    Scale,
    doubled,
    pooled,
    probably_pooled,
    pyramid,
)
from agent.defacing.deid_gan.network import (
    PRESETS,
    DeidGanDiscriminator,
    DeidGanGenerator,
    VolumeGanConfig,
    drawn,
    remodeller_bytes,
    remodeller_from,
    variance,
)
from agent.defacing.privacy_transform import Coarse, Gamma, Population
from agent.models.training_loop import seeded, torch_generator
from agent.models.weights import WeightsError, pack
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import Cube

TINY = PRESETS["tiny16"]


def nets(config: VolumeGanConfig = TINY, seed: int = 0) -> tuple[DeidGanGenerator, DeidGanDiscriminator]:
    with seeded(seed):
        return DeidGanGenerator(config), DeidGanDiscriminator(config)


def some_gamma(side: int = 16, count: int = 2, seed: int = 0) -> Tensor:
    """(n, 3, S, S, S): balls for the hull and the brain, and noise inside the brain."""
    at = (np.indices((side,) * 3).transpose(1, 2, 3, 0) + 0.5) / side - 0.5
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        away = np.linalg.norm(at - rng.uniform(-0.05, 0.05, 3), axis=-1)
        hull, brain = away < rng.uniform(0.4, 0.46), away < rng.uniform(0.22, 0.3)
        out.append(np.stack([hull, brain, brain * rng.uniform(0.2, 0.9, hull.shape)]))
    return torch.from_numpy(np.stack(out).astype(np.float32))


def gammas(seed: int = 0, config: VolumeGanConfig = TINY) -> list[Tensor]:
    return pyramid(some_gamma(config.side), config.sides, torch_generator(seed))


def cubed(gamma: Tensor, extent: float = 256.0) -> Gamma:
    side = gamma.shape[-1]
    affine = np.diag([extent / side] * 3 + [1.0])
    hull, brain, intensities = gamma.numpy()
    return Gamma(hull > 0, brain > 0, intensities, Cube(side, affine))


def population(side: int = 16, directions: int = 500, count: int = 3) -> Population:
    return Population(np.full(directions, 90.0, np.float32), np.full((side,) * 3, 0.5, np.float32), count)


def test_average_pooling_is_the_mean_of_each_block() -> None:
    x = torch.rand(2, 3, 8, 8, 8, generator=torch_generator(0))
    blocks = x.reshape(2, 3, 4, 2, 4, 2, 4, 2).mean(dim=(3, 5, 7))
    assert torch.allclose(pooled(x, 4), blocks)
    assert pooled(x, 8) is x
    for wrong in (x[0], x[:, :, :4], x[:, :, :6, :6, :6]):
        with pytest.raises(ValueError, match="multiple"):
            pooled(wrong, 4)


def test_probabilistic_pooling_stays_binary_and_keeps_the_share_in_expectation() -> None:
    masks = (
        torch.rand(1, 2, 16, 16, 16, generator=torch_generator(0)) < torch.tensor([0.2, 0.7])[:, None, None, None]
    ).float()
    draws, share = 400, pooled(masks, 4)
    made = probably_pooled(masks.expand(draws, -1, -1, -1, -1), 4, torch_generator(1))
    assert set(made.unique().tolist()) == {0.0, 1.0}
    sigma = (share * (1 - share) / draws).sqrt()
    assert float(((made.mean(0) - share[0]).abs() - 5 * sigma[0]).max()) < 0.0  # every voxel, five sigma
    whole = made.mean(dim=(2, 3, 4))
    far = 5 * float((share * (1 - share)).sum(dim=(2, 3, 4)).sqrt().max()) / 64
    assert float((whole - masks.mean(dim=(2, 3, 4))).abs().max()) < far
    # what cuts at a half keeps no share, and this test sees it
    cut = (share >= 0.5).float().mean(dim=(2, 3, 4))
    assert float((cut - masks.mean(dim=(2, 3, 4))).abs().max()) > far


def test_a_scale_of_gamma_has_binary_masks_and_averaged_intensities_and_is_a_function_of_its_generator() -> None:
    whole = some_gamma()
    state = torch.get_rng_state()
    first, again, other = (pyramid(whole, TINY.sides, torch_generator(s)) for s in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert [tuple(part.shape) for part in first] == [(2, 3, s, s, s) for s in (4, 8, 16)]
    assert torch.equal(first[-1], whole)
    for side, part in zip(TINY.sides, first, strict=True):
        assert set(part[:, :2].unique().tolist()) <= {0.0, 1.0}
        assert torch.equal(part[:, 2:], pooled(whole[:, 2:], side))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    with pytest.raises(ValueError, match="gamma is"):
        pyramid(whole[:, :2], TINY.sides, torch_generator(0))


def test_doubling_repeats_every_voxel() -> None:
    x = torch.rand(1, 2, 3, 3, 3, generator=torch_generator(0))
    twice = x.numpy().repeat(2, 2).repeat(2, 3).repeat(2, 4)
    assert np.array_equal(doubled(x).numpy(), twice)


def test_the_depthwise_filters_gradients_are_those_of_torch() -> None:
    with seeded(0):
        own = Depthwise(5).double()
    draw = torch_generator(0)
    x = torch.randn(2, 5, 6, 6, 6, generator=draw, dtype=torch.double, requires_grad=True)
    grad = torch.randn(2, 5, 6, 6, 6, generator=draw, dtype=torch.double)
    wanted = (x, own.weight, own.bias)
    told = conv3d(x, own.weight, own.bias, padding=1, groups=5)
    assert torch.allclose(own(x), told)
    mine, theirs = (torch.autograd.grad(y, wanted, grad) for y in (own(x), told))
    assert all(torch.allclose(a, b) for a, b in zip(mine, theirs, strict=True))
    own.requires_grad_(requires_grad=False)
    (only,) = torch.autograd.grad(own(x), x, grad)
    assert torch.allclose(only, theirs[0])


def test_an_inverted_residual_block_is_expand_filter_project_beside_a_shortcut() -> None:
    with seeded(3):
        block = InvertedResidual(4, 3)
        nn.init.normal_(block.norm.gain)
    x = torch.randn(2, 4, 5, 5, 5, generator=torch_generator(0))
    y = x / (x.pow(2).sum(1, keepdim=True) / 4 + 1e-6).sqrt() * block.norm.gain.reshape(1, 4, 1, 1, 1)
    y = torch.einsum("oi,nixyz->noxyz", block.expand.weight[:, :, 0, 0, 0], y) + block.expand.bias.reshape(
        1, 12, 1, 1, 1
    )
    y = leaky_relu(y, 0.2)
    y = leaky_relu(conv3d(y, block.filter.weight, block.filter.bias, padding=1, groups=12), 0.2)
    y = torch.einsum("oi,nixyz->noxyz", block.project.weight[:, :, 0, 0, 0], y) + block.project.bias.reshape(
        1, 4, 1, 1, 1
    )
    assert torch.allclose(block(x), x + y, atol=1e-5)
    assert block.filter.groups == 12


def test_the_generator_is_equation_6() -> None:
    generator, _ = nets()
    told, g = gammas(), torch.randn(2, 1, 2, 2, 2, generator=torch_generator(5))
    made = generator(told, g)
    assert [tuple(part.shape) for part in made] == [(2, 1, s, s, s) for s in (4, 8, 16)]
    for k, scale in enumerate(generator.scales):
        up = torch.from_numpy(g.detach().numpy().repeat(2, 2).repeat(2, 3).repeat(2, 4))
        g = scale(up, told[k]) + (up if k else 0)
        assert torch.equal(g, made[k])
        assert g.shape[1] == 1  # the bottleneck: one channel passes


def test_the_discriminator_is_equation_7() -> None:
    _, judge = nets()
    told, volumes = gammas(), [torch.rand(2, 1, s, s, s, generator=torch_generator(s)) for s in TINY.sides]
    d = judge.scales[2](volumes[2], told[2])
    for k in (1, 0):
        down = pooled(d, TINY.sides[k])
        d = down + judge.scales[k](torch.cat([down, volumes[k]], 1), told[k])
        assert d.shape[1] == 1
    expected = linear(d.flatten(1), judge.summary.weight, judge.summary.bias)[:, 0]
    assert torch.equal(judge(volumes, told), expected)
    assert expected.shape == (2,)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("channel", [0, 1, 2])
def test_every_channel_of_gamma_at_every_scale_matters_to_both_networks(k: int, channel: int) -> None:
    generator, judge = nets()
    told, noise = gammas(), torch.randn(2, 1, 2, 2, 2, generator=torch_generator(5))
    volumes = [torch.rand(2, 1, s, s, s, generator=torch_generator(s)) for s in TINY.sides]
    less = [part.clone() for part in told]
    less[k][:, channel] = 0.0
    made, other = generator(told, noise), generator(less, noise)
    assert all(torch.equal(a, b) for a, b in zip(made[:k], other[:k], strict=True))
    assert all(float((a - b).detach().abs().max()) > 1e-5 for a, b in zip(made[k:], other[k:], strict=True))
    assert float((judge(volumes, told) - judge(volumes, less)).detach().abs().min()) > 1e-7


@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_discriminator_looks_at_every_scale_and_its_gradient_reaches_every_scale(k: int) -> None:
    generator, judge = nets()
    told = gammas()
    made = generator(told, torch.randn(2, 1, 2, 2, 2, generator=torch_generator(5)))
    for part in made:
        part.retain_grad()
    judge(made, told).sum().backward()
    grad = made[k].grad
    assert grad is not None
    assert float(grad.abs().max()) > 0.0
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0.0 for p in generator.scales[k].parameters())


def test_noise_matters_and_is_eight_numbers_as_printed() -> None:
    generator, _ = nets()
    assert TINY.noise == (1, 2, 2, 2)
    a, b = (generator(gammas(), torch.randn(2, 1, 2, 2, 2, generator=torch_generator(s)))[-1] for s in (0, 1))
    assert float((a - b).detach().abs().max()) > 1e-4


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_has_a_block_for_each_scale_and_no_statistic_of_a_batch(name: str) -> None:
    config = PRESETS[name]
    assert len(config.widths) == int(math.log2(config.side / 4)) + 1
    with torch.device("meta"):
        both = nets(config)
    for net in both:
        kinds = {type(m).__name__ for m in net.modules()}
        assert not {k for k in kinds if "Batch" in k or "InstanceNorm" in k or "Running" in k}
        assert not list(net.buffers())
        assert all(scale.out.out_channels == 1 for scale in net.scales if isinstance(scale, Scale))
    meta = torch.device("meta")
    told = [torch.empty(1, 3, s, s, s, device=meta) for s in config.sides]
    made = both[0](told, torch.empty(1, *config.noise, device=meta))
    assert made[-1].shape == (1, 1, *[config.side] * 3)
    assert both[1](made, told).shape == (1,)


def test_a_head_is_drawn_the_same_whatever_lies_beside_it() -> None:
    generator, judge = nets()
    told, noise = gammas(), torch.randn(2, 1, 2, 2, 2, generator=torch_generator(5))
    both = generator(told, noise)
    for i in range(2):
        one = generator([part[i : i + 1] for part in told], noise[i : i + 1])
        assert torch.allclose(one[-1], both[-1][i : i + 1], atol=1e-5)
    alone = torch.cat([judge([g[i : i + 1] for g in both], [t[i : i + 1] for t in told]) for i in range(2)])
    assert torch.allclose(judge(both, told), alone, atol=1e-5)


def test_features_are_a_named_option_that_lets_more_pass() -> None:
    config = replace(TINY, features=3)
    generator, judge = nets(config)
    made = generator(gammas(), torch.randn(2, 1, 2, 2, 2, generator=torch_generator(5)))
    assert [part.shape[1] for part in made] == [1, 1, 1]
    assert judge(made, gammas()).shape == (2,)
    assert TINY.features == 0
    assert all(scale.out.out_channels == 4 for scale in generator.scales)


def test_checkpointing_gives_the_same_numbers_and_gradients_bit_for_bit() -> None:
    grads = []
    for sparing in (False, True):
        generator, judge = nets()
        generator.sparing = judge.sparing = sparing
        told = gammas()
        made = generator(told, torch.randn(2, 1, 2, 2, 2, generator=torch_generator(5)))
        judge(made, told).square().sum().backward()
        grads.append([p.grad for net in (generator, judge) for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def saved_numbers(generator: DeidGanGenerator) -> int:
    """How many are kept for the gradient, beside the weights."""
    sizes = list[int]()

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        generator(gammas(), torch.randn(2, 1, 2, 2, 2, generator=torch_generator(5)))
    return sum(sizes)


def test_checkpointing_keeps_less() -> None:
    kept = []
    for sparing in (False, True):
        generator, _ = nets()
        generator.sparing = sparing
        kept.append(saved_numbers(generator))
    assert kept[1] < 0.25 * kept[0]


def test_other_shapes_are_refused() -> None:
    generator, judge = nets()
    told, noise = gammas(), torch.randn(2, 1, 2, 2, 2)
    for wrong in (told[:2], told[::-1], [part[:, :2] for part in told]):
        with pytest.raises(ValueError, match="needed for each"):
            generator(wrong, noise)
    with pytest.raises(ValueError, match="needed for each"):
        judge(told, told)


@pytest.mark.parametrize(
    "wrong",
    [{"side": 15}, {"side": 2, "widths": (8,)}, {"side": 512}, {"widths": (8, 8)}, {"widths": [8, 8, 8]},
     {"widths": (8, 8, 0)}, {"expand": 0}, {"blocks": (1, 1)}, {"blocks": (1, 1, 0)},
     {"blocks": 1}, {"features": -1}, {"features": 1.0}, {"side": 16.0},
     {"extent_mm": math.nan}, {"extent_mm": 10.0}, {"extent_mm": 256}],
)  # fmt: skip
def test_a_configuration_that_cannot_be_built_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"whole number|power of two|scales|edge|features"):
        replace(TINY, **wrong)


@cache
def public_file(seed: int = 0) -> bytes:
    return remodeller_bytes(nets(seed=seed)[0], population(), Coarse(), {"steps": 0})


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def test_a_file_is_read_as_it_was_written_and_draws_as_the_network_does() -> None:
    net, raw = nets()[0], public_file()
    assert raw == remodeller_bytes(net, population(), Coarse(), {"steps": 0})
    read = remodeller_from(raw, "public")
    assert (read.config, read.side, read.coarse, read.origin.component) == (TINY, 16, Coarse(), "public")
    assert np.array_equal(read.population.support, population().support)
    assert np.array_equal(read.population.skin, population().skin)
    assert all(torch.equal(a, b) for a, b in zip(read.net.parameters(), net.parameters(), strict=True))
    gamma = some_gamma(count=1)
    seed = int(rng().integers(2**63))
    own = drawn(net, gamma, torch.Generator().manual_seed(seed))[0, 0].numpy()
    state = torch.get_rng_state()
    made = read.draw(cubed(gamma[0]), rng())
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(made, own)
    assert made.dtype == np.float32
    assert made.min() >= 0.0
    assert made.max() <= 1.0
    assert not np.array_equal(made, read.draw(cubed(gamma[0]), rng(1)))


def test_the_brain_is_not_pasted_into_what_is_drawn() -> None:
    gamma = cubed(some_gamma(count=1)[0])
    made = remodeller_from(public_file(), "public").draw(gamma, rng())
    assert float(np.abs(made - gamma.intensities)[gamma.brain].mean()) > 0.05


def test_gamma_on_another_cube_is_refused() -> None:
    read = remodeller_from(public_file(), "public")
    for wrong in (cubed(some_gamma(8, 1)[0]), cubed(some_gamma(count=1)[0], extent=200.0)):
        with pytest.raises(ValueError, match="another cube"):
            read.draw(wrong, rng())


def test_the_variance_is_that_of_the_draws() -> None:
    read, gamma = remodeller_from(public_file(), "public"), cubed(some_gamma(count=1)[0])
    made = np.stack([read.draw(gamma, rng(s)) for s in (3, 5, 9)]).astype(np.float64)
    assert np.allclose(variance(read, gamma, (3, 5, 9)), made.var(axis=0, ddof=1), atol=1e-6)
    assert float(variance(read, gamma, (1, 2)).max()) > 0.0
    assert float(variance(read, gamma, (1, 1)).max()) == 0.0
    with pytest.raises(ValueError, match="two draws"):
        variance(read, gamma, (1,))


def refused(what: Any) -> bool:
    with pytest.raises(NotDefacedError) as caught:
        what()
    return caught.value.code == "seen_in_training"


def test_a_network_that_nobody_vouches_for_draws_for_nobody() -> None:
    gamma = cubed(some_gamma(count=1)[0])
    for provenance in ("file", "private"):
        read = remodeller_from(public_file(), provenance)
        assert refused(lambda read=read: read.draw(gamma, rng()))
        assert refused(lambda read=read: read.population)
    assert remodeller_from(public_file(), "public").population.count == population().count


def forged(state: dict[str, Tensor] | None = None, **changes: Any) -> bytes:
    packed = volume_gan.unpack(public_file(), "remodeller")
    return pack("remodeller", {**packed.config, **changes}, {}, dict(packed.state) if state is None else state)


def state_with(**changes: Tensor) -> dict[str, Tensor]:
    return {**volume_gan.unpack(public_file(), "remodeller").state, **changes}


@pytest.mark.parametrize(
    "changes",
    [{"gan": asdict(TINY) | {"side": 32}}, {"gan": asdict(TINY) | {"widths": [8, 8]}}, {"gan": []}, {"gan": None},
     {"gan": asdict(TINY) | {"widths": [1024] * 3}}, {"gan": asdict(TINY) | {"more": 1}}, {"coarse": {}},
     {"coarse": asdict(Coarse()) | {"dilate_mm": 0.0}}, {"counts": []}, {"counts": [3, 3]}, {"counts": [0]},
     {"counts": ["3"]}, {"counts": 3}, {"counts": [3] * 100}, {"code": 1}, {"code": "ab" * 32}, {"more": 1},
     {"gan": asdict(TINY) | {"extent_mm": "256"}}],
)  # fmt: skip
def test_a_file_whose_configuration_is_none_or_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WeightsError):
        remodeller_from(forged(**changes))


def test_files_of_another_kind_or_with_other_tensors_are_refused() -> None:
    whole = state_with()
    name = next(n for n in whole if n.startswith("0.net."))
    wrong = [
        b"",
        b"x" * 100,
        pack("autoencoder", {}, {}, whole),
        forged({n: t for n, t in whole.items() if n != name}),
        forged(state_with(more=torch.zeros(1))),
        forged(state_with(**{name: torch.full_like(whole[name], math.nan)})),
        forged(state_with(**{name: whole[name].half()})),
        forged(state_with(**{"0.skin": torch.full((16,) * 3, 2.0)})),
        forged(state_with(**{"0.skin": torch.zeros(8, 8, 8)})),
        forged(state_with(**{"0.support": torch.zeros(3, 3)})),
        forged(state_with(**{"0.support": torch.zeros(500, dtype=torch.double)})),
        forged(state_with(seen=torch.zeros(2, 16, dtype=torch.uint8))),  # without a key
        forged(state_with(seen=torch.zeros(2, 8, dtype=torch.uint8)), code="00"),
        forged(state_with(**{"1.net.more": torch.zeros(1)})),
    ]  # fmt: skip
    for raw in wrong:
        with pytest.raises(WeightsError):
            remodeller_from(raw)


def test_the_norm_makes_the_mean_square_of_a_voxels_channels_one() -> None:
    norm, x = ChannelNorm(6), 7.0 * torch.randn(2, 6, 3, 3, 3, generator=torch_generator(0))
    assert torch.allclose(norm(x).square().mean(dim=1), torch.ones(2, 3, 3, 3), atol=1e-4)
