"""The generator against oracles that modulate weights, filter with numpy and know the published names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import convolve2d
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d, leaky_relu, pad

from agent.models import weights
from agent.models.stylegan.network import (
    PRESETS,
    Discriminator,
    Generator,
    StyleGanShape,
    SynthesisLayer,
    ToRGB,
    generator_bytes,
    generator_from,
    spread,
)
from agent.models.stylegan.resampling import doubled, halved, low_pass, smoothed
from agent.models.training_loop import seeded

SMALL = StyleGanShape(16, 3, 12, 10, 2, 256, 24)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(seed: int = 0, architecture: StyleGanShape = SMALL) -> Generator:
    with seeded(seed):
        return Generator(architecture)


def by_modulated_weights(layer: SynthesisLayer, x: Tensor, w: Tensor, noise: Tensor | None) -> Tensor:
    """Eq. 1-3 of arXiv 1912.04958 as they stand: a kernel for every sample, grouped convolution."""
    n, c, h, _ = x.shape
    s = w @ (layer.affine.weight / np.sqrt(w.shape[1])).T + layer.affine.bias
    kernels = layer.weight[None] * s[:, None, :, None, None]
    kernels = kernels / (kernels.square().sum(dim=(2, 3, 4), keepdim=True) + 1e-8).sqrt()
    out = layer.weight.shape[0]
    if layer.up == 2:
        stacked = kernels.transpose(1, 2).reshape(n * c, out, 3, 3)
        y = conv_transpose2d(x.reshape(1, n * c, h, h), stacked, stride=2, groups=n)
        fir = (low_pass() * 4).expand(n * out, 1, 4, 4)
        y = conv2d(pad(y, (1, 1, 1, 1)), fir, groups=n * out)
    else:
        y = conv2d(x.reshape(1, n * c, h, h), kernels.reshape(n * out, c, 3, 3), padding=1, groups=n)
    y = y.view(n, out, *y.shape[2:])
    if noise is not None:
        y = y + noise * layer.noise_strength
    return (leaky_relu(y + layer.bias[:, None, None], 0.2) * np.sqrt(2)).clamp(-256, 256)


@pytest.mark.parametrize("up", [1, 2])
@pytest.mark.parametrize("noisy", [False, True])
def test_scaled_activations_equal_modulated_weights(up: int, noisy: bool) -> None:
    with seeded(3):
        layer = SynthesisLayer(7, 5, 6, 8, up)
        torch.nn.init.normal_(layer.bias)
        torch.nn.init.constant_(layer.noise_strength, 0.7)
    g = stream()
    x, w = torch.randn(4, 7, 8 // up, 8 // up, generator=g), torch.randn(4, 6, generator=g)
    noise = torch.randn(4, 1, 8, 8, generator=g) if noisy else None
    expected = by_modulated_weights(layer, x, w, noise)
    torch.testing.assert_close(layer(x, w, noise), expected, atol=1e-5, rtol=0)


def test_gradients_of_scaled_activations_equal_those_of_modulated_weights() -> None:
    with seeded(3):
        layer = SynthesisLayer(7, 5, 6, 8, 2)
    x, w = torch.randn(3, 7, 4, 4, generator=stream()), torch.randn(3, 6, generator=stream(1)).requires_grad_(True)
    ours = torch.autograd.grad(layer(x, w, None).square().sum(), [w, layer.weight])
    theirs = torch.autograd.grad(by_modulated_weights(layer, x, w, None).square().sum(), [w, layer.weight])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_demodulation_restores_unit_variance() -> None:
    with seeded(0):
        layer = SynthesisLayer(64, 64, 8, 32)
    w = 5.0 * torch.randn(2, 8, generator=stream())
    x = torch.randn(2, 64, 32, 32, generator=stream(1))
    y = layer(x, w, None)[:, :, 1:-1, 1:-1]  # gain * lrelu of unit normal numbers
    expected = np.sqrt(2) * np.sqrt((1 + 0.2**2) / 2)
    assert y.square().mean().sqrt().item() == pytest.approx(expected, rel=0.05)


def test_colour_is_modulated_but_not_demodulated() -> None:
    with seeded(1):
        layer = ToRGB(9, 3, 6)
    x, w = torch.randn(2, 9, 4, 4, generator=stream()), torch.randn(2, 6, generator=stream(1))
    s = (w @ (layer.affine.weight / np.sqrt(6)).T + layer.affine.bias) / 3.0
    expected = torch.einsum("nchw,oc,nc->nohw", x, layer.weight[:, :, 0, 0], s)
    torch.testing.assert_close(layer(x, w), expected, atol=1e-5, rtol=0)


def resampled(x: np.ndarray, up: int, down: int, before: int, after: int, gain: float) -> np.ndarray:
    """Zero insertion, padding, filter, decimation, one plane at a time."""
    h, w = x.shape
    wide = np.zeros((h * up, w * up))
    wide[::up, ::up] = x
    wide = np.pad(wide, (before, after))
    taps = np.array([1.0, 3.0, 3.0, 1.0]) / 8
    return convolve2d(wide, np.outer(taps, taps) * gain, mode="valid")[::down, ::down]


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**31))
def test_resampling_is_that_of_the_definition(half: int, seed: int) -> None:
    x = torch.randn(2, 3, 2 * half, 2 * half, generator=stream(seed))
    planes = x.double().numpy().reshape(6, 2 * half, 2 * half)
    fir = low_pass()
    for ours, args in (
        (doubled(x, fir), (2, 1, 2, 1, 4.0)),
        (halved(x, fir), (1, 2, 1, 1, 1.0)),
        (smoothed(x, fir, padding=2), (1, 1, 2, 2, 1.0)),
    ):
        expected = np.stack([resampled(p, *args) for p in planes])
        np.testing.assert_allclose(ours.numpy().reshape(expected.shape), expected, atol=1e-5)


def test_doubling_and_halving_are_adjoint() -> None:
    small_, large = torch.randn(1, 2, 5, 5, generator=stream()), torch.randn(1, 2, 10, 10, generator=stream(1))
    ours = (doubled(small_, low_pass()) * large).sum()
    torch.testing.assert_close(ours, 4 * (small_ * halved(large, low_pass())).sum(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_can_be_built_and_takes_two_styles_a_resolution(name: str) -> None:
    architecture = PRESETS[name]
    with torch.device("meta"):
        generator, discriminator = Generator(architecture), Discriminator(architecture)
        drawn = generator(torch.zeros(2, architecture.z_dim))
    assert drawn.shape == (2, 3, architecture.resolution, architecture.resolution)
    assert discriminator(drawn).shape == (2, 1)
    assert architecture.num_ws == 2 * len(architecture.resolutions)


def test_the_published_architecture_has_the_published_sizes() -> None:
    # the sizes that the published training of 2020a (1024 px, configuration F, 8 mapping layers) logs
    with torch.device("meta"):
        g, d = Generator(PRESETS["auto1024"]), Discriminator(PRESETS["auto1024"])
    assert PRESETS["auto1024"].num_ws == 18
    assert sum(p.numel() for p in d.parameters()) == 29_012_513
    assert sum(p.numel() for p in g.synthesis.parameters()) + 8 * 262_656 == 30_370_060


def test_names_are_those_of_the_published_files() -> None:
    names = set(small().state_dict())
    layer = {"weight", "bias", "affine.weight", "affine.bias", "noise_const", "noise_strength", "resample_filter"}
    colour = {"weight", "bias", "affine.weight", "affine.bias"}
    expected = {"mapping.w_avg", "synthesis.b4.const"}
    expected |= {f"mapping.fc{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}
    for r in (4, 8, 16):
        layers = ("conv1",) if r == 4 else ("conv0", "conv1")
        expected |= {f"synthesis.b{r}.{conv}.{n}" for conv in layers for n in layer}
        expected |= {f"synthesis.b{r}.torgb.{n}" for n in colour} | {f"synthesis.b{r}.resample_filter"}
    assert names == expected
    with seeded(0):
        judged = set(Discriminator(SMALL).state_dict())
    told = {"b4.conv.weight", "b4.conv.bias", "b4.conv.resample_filter"}
    told |= {f"b4.{n}.{k}" for n in ("fc", "out") for k in ("weight", "bias")}
    told |= {f"b16.fromrgb.{k}" for k in ("weight", "bias", "resample_filter")}
    for r in (8, 16):
        told |= {f"b{r}.resample_filter", f"b{r}.skip.weight", f"b{r}.skip.resample_filter"}
        told |= {f"b{r}.{c}.{k}" for c in ("conv0", "conv1") for k in ("weight", "bias", "resample_filter")}
    assert judged == told


def test_stopping_early_gives_the_picture_that_was_there() -> None:
    generator = small()
    ws = torch.randn(2, SMALL.num_ws, 10, generator=stream())
    at8 = generator.synthesis(ws, until=8)
    assert at8.shape == (2, 3, 8, 8)
    for p in (generator.synthesis.b16.conv0.weight, generator.synthesis.b16.conv1.weight):
        torch.nn.init.zeros_(p)
    torch.nn.init.zeros_(generator.synthesis.b16.torgb.weight)
    torch.testing.assert_close(generator.synthesis(ws), doubled(at8, low_pass()))


def test_each_style_moves_the_picture_and_none_above_the_stop_does() -> None:
    generator = small()
    ws = torch.randn(1, SMALL.num_ws, 10, generator=stream()).requires_grad_(True)
    (all_,) = torch.autograd.grad(generator.synthesis(ws).square().sum(), ws)
    assert (all_.abs().sum(dim=2) > 0).all()
    (early,) = torch.autograd.grad(generator.synthesis(ws, until=8).square().sum(), ws)
    assert ((early.abs().sum(dim=2) > 0) == torch.tensor([[True] * 4 + [False] * 2])).all()


def test_a_batch_of_styles_equals_one_at_a_time() -> None:
    generator = small()
    ws = torch.randn(5, SMALL.num_ws, 10, generator=stream())
    torch.testing.assert_close(
        generator.synthesis(ws), torch.cat([generator.synthesis(w[None]) for w in ws]), atol=1e-5, rtol=1e-5
    )


def test_mapping_forgets_the_length_of_z_and_truncation_draws_to_the_average() -> None:
    generator = small()
    z = torch.randn(3, 12, generator=stream())
    ws = generator.mapping(z)
    torch.testing.assert_close(ws, generator.mapping(7.0 * z))
    assert (ws == ws[:, :1]).all()
    for _ in range(2000):
        generator.mapping.track(ws[:, 0])
    torch.testing.assert_close(generator.w_avg, ws[:, 0].mean(dim=0), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(generator.mapping(z, 0.0), generator.w_avg.expand_as(ws))
    torch.testing.assert_close(generator.mapping(z, 0.5), (ws + generator.w_avg) / 2)


def test_noise_is_fixed_or_fresh_or_none() -> None:
    generator = small()
    for module in generator.modules():
        if isinstance(module, SynthesisLayer):
            torch.nn.init.constant_(module.noise_strength, 0.5)
    ws = torch.randn(1, SMALL.num_ws, 10, generator=stream())
    before = torch.get_rng_state()
    drawn = {
        "const": generator.synthesis(ws),
        "none": generator.synthesis(ws, "none"),
        "random": generator.synthesis(ws, "random", generator=stream(1)),
    }
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(drawn["const"], generator.synthesis(ws))
    assert torch.equal(drawn["random"], generator.synthesis(ws, "random", generator=stream(1)))
    assert not torch.equal(drawn["random"], generator.synthesis(ws, "random", generator=stream(2)))
    assert not torch.allclose(drawn["const"], drawn["none"])


def test_half_precision_draws_nearly_the_same_picture() -> None:
    generator = small(architecture=PRESETS["tiny32"])
    z = torch.randn(4, 64, generator=stream())
    exact = generator(z)
    with torch.autocast("cpu", torch.bfloat16):
        half = generator(z)
    assert half.dtype == torch.float32
    assert (half - exact).abs().mean() < 0.02 * exact.std()


def test_deviation_over_the_batch_is_of_groups_of_every_n_over_group_th_picture() -> None:
    x = torch.randn(6, 3, 4, 4, generator=stream()).double()
    out = spread(x, 3)
    for j in range(2):
        members = x[j::2]
        expected = (members.var(dim=0, unbiased=False) + 1e-8).sqrt().mean()
        torch.testing.assert_close(out[j::2], expected.expand(3, 1, 4, 4))
    assert torch.allclose(spread(x[:1], 4), torch.tensor(1e-4, dtype=torch.float64))


def test_the_discriminator_is_twice_differentiable_in_the_picture() -> None:
    with seeded(0):
        discriminator = Discriminator(SMALL)
    x = torch.randn(2, 3, 16, 16, generator=stream()).requires_grad_(True)
    assert discriminator(x).shape == (2, 1)
    (grad,) = torch.autograd.grad(discriminator(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in discriminator.parameters() if p.grad is not None)


def test_a_file_gives_the_same_generator_and_the_same_bytes() -> None:
    generator = small()
    raw = generator_bytes(generator, {"steps": 3})
    before = torch.get_rng_state()
    again, packed = generator_from(raw)
    assert torch.equal(before, torch.get_rng_state())
    assert packed.notes == {"steps": 3}
    assert again.architecture == SMALL
    assert generator_bytes(again, packed.notes) == raw
    z = torch.randn(2, 12, generator=stream())
    assert torch.equal(generator(z), again(z))


def test_a_file_that_is_no_generator_is_refused() -> None:
    state = small().state_dict()
    bad = {
        "kind": weights.pack("encoder", {}, {}, state),
        "unknown field": weights.pack("generator", {"resolution": 16, "channels": 3, "depth": 2}, {}, state),
        "impossible": weights.pack("generator", {"resolution": 17, "channels": 3}, {}, state),
        "other size": weights.pack("generator", {"resolution": 8, "channels": 3}, {}, state),
        "not finite": weights.pack("generator", {}, {}, state | {"mapping.w_avg": torch.full((10,), float("nan"))}),
        "cut": generator_bytes(small(), {})[:-9],
    }
    for raw in bad.values():
        with pytest.raises(weights.WeightsError):
            generator_from(raw)


@pytest.mark.parametrize(
    "wrong",
    [{"resolution": 48}, {"resolution": 4}, {"resolution": 2048}, {"channels": 2}, {"z_dim": 0}, {"channel_base": 8}],
)
def test_an_architecture_that_cannot_be_built_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"."):
        StyleGanShape(**{"resolution": 32, "channels": 3} | wrong)


def test_wrong_styles_noise_and_resolutions_are_refused() -> None:
    synthesis = small().synthesis
    ws = torch.zeros(1, SMALL.num_ws, 10)
    for call in (
        lambda: synthesis(ws[:, 1:]),
        lambda: synthesis(ws, "random"),
        lambda: synthesis(ws, "some"),
        lambda: synthesis(ws, until=32),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()
