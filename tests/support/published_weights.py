"""Weights as authors publish them: names and shapes of their files, filled from a seed."""

from __future__ import annotations

import io
import math

import torch

from agent.models.stylegan.network import Generator, StyleGanShape
from agent.models.training_loop import seeded


def torch_bytes(value, **how):
    out = io.BytesIO()
    torch.save(value, out, **how)
    return out.getvalue()


def random_state(shapes, seed=0, gain=0.05):
    drawn = gain * torch.randn(1_000_003, generator=torch.Generator().manual_seed(seed))  # cut at many places: fast
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        size, begin = math.prod(shape), 7_919 * number % 1_000_003
        state[name] = drawn.repeat(2 + size // 1_000_003)[begin : begin + size].reshape(shape).clone()
        if name.endswith(("running_var", "bn.weight", "bn1.weight", "bn2.weight", "bn3.weight")):
            state[name] = state[name].abs() + 1.0
    return state


def shapes_of(build):
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in build().state_dict().items()}


def norm_names(prefix, channels):
    return {f"{prefix}.{n}": (channels,) for n in ("weight", "bias", "running_mean", "running_var")}


def basic_names(prefix, inputs, width, shortcut):
    out = {f"{prefix}.conv1.weight": (width, inputs, 3, 3), f"{prefix}.conv2.weight": (width, width, 3, 3)}
    out |= norm_names(f"{prefix}.bn1", width) | norm_names(f"{prefix}.bn2", width)
    if shortcut:
        out |= {f"{prefix}.downsample.0.weight": (width, inputs, 1, 1)} | norm_names(f"{prefix}.downsample.1", width)
    return out


def resnet34_body_names():
    out, place, inputs = {}, 0, 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for _ in range(count):
            out |= basic_names(f"body.{place}", inputs, width, inputs != width)
            inputs, place = width, place + 1
    return out


def head_names(count):
    out = {}
    for i in range(count):
        for j in (0, 2, 4, 6):
            out |= {f"styles.{i}.convs.{j}.weight": (512, 512, 3, 3), f"styles.{i}.convs.{j}.bias": (512,)}
        out |= {f"styles.{i}.linear.weight": (512, 512), f"styles.{i}.linear.bias": (512,)}
    return out


def tiny_ada(resolution=16, channels=3):
    with seeded(3):
        g = Generator(StyleGanShape(resolution, channels, 24, 32, 3, 128, 16))
    with torch.no_grad():
        for name, p in g.named_parameters():
            if name.endswith(("bias", "noise_strength")):
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
        g.mapping.w_avg.copy_(torch.linspace(-1, 1, 32))
    return g.eval()


def decoder_shapes(size, width, w_dim, layers):
    """Names and shapes of the other implementation's generator, from its published files."""
    out = {"input.input": (1, width[4], 4, 4)}
    for i in range(1, layers + 1):
        out |= {f"style.{i}.weight": (w_dim, w_dim), f"style.{i}.bias": (w_dim,)}

    def styled(p, a, b, kernel, up):
        told = {f"{p}.conv.weight": (1, b, a, kernel, kernel), f"{p}.conv.modulation.weight": (a, w_dim)}
        told |= {f"{p}.conv.modulation.bias": (a,)}
        if kernel == 1:
            return told | {f"{p}.bias": (1, b, 1, 1)} | ({f"{p}.upsample.kernel": (4, 4)} if up else {})
        told |= {f"{p}.noise.weight": (1,), f"{p}.activate.bias": (b,)}
        return told | ({f"{p}.conv.blur.kernel": (4, 4)} if up else {})

    out |= styled("conv1", width[4], width[4], 3, False) | styled("to_rgb1", width[4], 3, 1, False)
    out |= {"noises.noise_0": (1, 1, 4, 4)}
    for level in range(1, int(math.log2(size)) - 1):
        r = 4 << level
        out |= styled(f"convs.{2 * level - 2}", width[r // 2], width[r], 3, True)
        out |= styled(f"convs.{2 * level - 1}", width[r], width[r], 3, False)
        out |= styled(f"to_rgbs.{level - 1}", width[r], 3, 1, True)
        out |= {f"noises.noise_{2 * level - 1}": (1, 1, r, r), f"noises.noise_{2 * level}": (1, 1, r, r)}
    return out


KERNEL = torch.outer(torch.tensor([1.0, 3, 3, 1]), torch.tensor([1.0, 3, 3, 1])) / 16


def decoder_state(size=16, width=None, w_dim=32, layers=2, seed=5):
    width = width or {4: 12, 8: 12, 16: 8}
    state = random_state(decoder_shapes(size, width, w_dim, layers), seed, gain=0.7)
    return {n: KERNEL if n.endswith("kernel") else t for n, t in state.items()}
