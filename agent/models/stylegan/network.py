"""StyleGAN2 with the conventions of StyleGAN2-ADA: mapping, skip generator, residual discriminator.

Karras et al. 2020a (arXiv 1912.04958) and 2020b (arXiv 2006.06676), from the papers, in plain PyTorch. A layer's
style scales the activations before the convolution and the demodulation scales them after it, y = d * conv(W, s * x).
That equals the modulated weights of 2020a, Eq. 1-3, without a kernel per sample: no grouped convolution, samples of
different styles share one batch, and a frozen generator needs no gradient of its weights.

Names of modules, parameters and buffers are those of the published weight files, one to one.

Layers with an equalised learning rate, shared by generator and discriminator.

Weights are drawn with unit variance and scaled when they are used (Karras et al. 2018, section 4.1), so that every
layer learns at the same speed. Gains and clamp are those of StyleGAN2-ADA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv_transpose2d, hardtanh, leaky_relu, linear

from agent.models.stylegan.resampling import doubled, halved, in_float, low_pass, smoothed
from agent.models.weights import NetworkFile, WeightsError, built, pack, unpack

CLAMP: Final = 256.0  # activations stay inside, so that half precision cannot overflow (2020b, appendix)
SLOPE: Final = 0.2
GAIN: Final = math.sqrt(2.0)  # of the leaky ReLU: it keeps the variance
EPS: Final = 1e-8


def activated(x: Tensor, gain: float = 1.0) -> Tensor:
    """Leaky ReLU, clamp. ``x`` has its gain already: gain * lrelu(x) = lrelu(gain * x), one pass over memory less."""
    return hardtanh(leaky_relu(x, SLOPE), -CLAMP * gain, CLAMP * gain)


class FullyConnected(nn.Module):
    """Equalised learning rate: weights of unit variance, scaled when used (Karras et al. 2018, section 4.1)."""

    def __init__(self, inputs: int, outputs: int, rate: float = 1.0, bias: float = 0.0, leaky: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / rate)
        self.bias = nn.Parameter(torch.full((outputs,), bias))
        self.scale = rate / math.sqrt(inputs)
        self.rate = rate
        self.leaky = leaky

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs) -> (n, outputs)."""
        y = linear(x, self.weight * self.scale, self.bias * self.rate)
        return leaky_relu(y, SLOPE) * GAIN if self.leaky else y


class Conv2d(nn.Module):
    """Convolution of the discriminator: equalised learning rate, low-pass before it halves."""

    resample_filter: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int, down: int = 1, plain: bool = False) -> None:
        super().__init__()
        self.down = down
        self.kernel = kernel
        self.register_buffer("resample_filter", low_pass())
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.bias = None if plain else nn.Parameter(torch.zeros(outputs))
        self.scale = 1.0 / math.sqrt(inputs * kernel * kernel)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """(n, inputs, r, r) -> (n, outputs, r / down, r / down)."""
        bias = None if self.bias is None else self.bias * (GAIN * gain)
        weight = self.weight * (self.scale * (gain if bias is None else GAIN * gain))
        if self.down == 1:
            y = conv2d(x, weight, bias, padding=self.kernel // 2)
        elif self.kernel == 1:
            y = conv2d(halved(x, self.resample_filter), weight, bias)
        else:
            y = conv2d(smoothed(x, self.resample_filter, padding=2), weight, bias, stride=2)
        return y if bias is None else activated(y, gain)


Noise = Literal["const", "random", "none"]
KIND: Final = "generator"
MOST: Final = 1 << 20  # of any size that an architecture names


@dataclass(frozen=True, slots=True)
class StyleGanShape:
    """The public shape of a generator and its discriminator."""

    resolution: int  # px, a power of two
    channels: int  # of the image: 1 or 3
    z_dim: int = 512
    w_dim: int = 512
    mapping_layers: int = 2  # 2 in the published "auto" setting, 8 in 2020a
    channel_base: int = 32768
    channel_max: int = 512

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        told = asdict(self).values()
        if not all(type(value) is int and 1 <= value <= MOST for value in told):
            raise ValueError(f"an architecture is whole numbers of 1 to {MOST}")
        if not (8 <= self.resolution <= 1024 and self.resolution & (self.resolution - 1) == 0):
            raise ValueError("the resolution is a power of two from 8 to 1024")
        if self.channels not in (1, 3):
            raise ValueError("images have 1 or 3 channels")
        if not (self.z_dim >= 1 and self.w_dim >= 1 and 1 <= self.mapping_layers <= 16):
            raise ValueError("latent sizes are positive, and there are 1 to 16 mapping layers")
        if not (self.channel_max >= 1 and self.channel_base >= self.resolution):
            raise ValueError("a layer has at least one channel")

    @property
    def num_ws(self) -> int:
        """Styles of one image: one for every convolution, and one for the last colour layer."""
        return 2 * int(math.log2(self.resolution)) - 2

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Of the blocks, 4 first."""
        return tuple(2**i for i in range(2, int(math.log2(self.resolution)) + 1))

    def width(self, resolution: int) -> int:
        """Feature channels at a resolution."""
        return min(self.channel_base // resolution, self.channel_max)

    def with_channels(self, channels: int) -> StyleGanShape:
        """The same network for grey (1) or colour (3) images."""
        return replace(self, channels=channels)


PRESETS: Final[Mapping[str, StyleGanShape]] = {
    "tiny32": StyleGanShape(32, 3, 64, 64, 2, 512, 64),
    "small64": StyleGanShape(64, 3, 128, 128, 2, 1024, 96),
    "small128": StyleGanShape(128, 3, 256, 256, 2, 2048, 128),
    "auto128": StyleGanShape(128, 3, 512, 512, 2, 16384, 512),
    "auto256": StyleGanShape(256, 3, 512, 512, 2, 16384, 512),
    "auto512": StyleGanShape(512, 3, 512, 512, 2, 32768, 512),
    "auto1024": StyleGanShape(1024, 3, 512, 512, 2, 32768, 512),
}


class MappingNetwork(nn.Module):
    """z -> w, one style for every layer; holds the average w."""

    w_avg: Tensor

    def __init__(self, architecture: StyleGanShape) -> None:
        super().__init__()
        self.num_ws = architecture.num_ws
        self.layers = architecture.mapping_layers
        for index in range(self.layers):
            inputs = architecture.z_dim if index == 0 else architecture.w_dim
            self.add_module(f"fc{index}", FullyConnected(inputs, architecture.w_dim, rate=0.01, leaky=True))
        self.register_buffer("w_avg", torch.zeros(architecture.w_dim))

    def forward(self, z: Tensor, truncation: float = 1.0) -> Tensor:
        """(n, z_dim) -> (n, num_ws, w_dim), drawn towards the average where ``truncation`` < 1."""
        with in_float(z):
            x = z.float()
            x = x * (x.square().mean(dim=1, keepdim=True) + EPS).rsqrt()
            for index in range(self.layers):
                x = getattr(self, f"fc{index}")(x)
            if truncation != 1.0:
                x = self.w_avg.lerp(x, truncation)
            return x.unsqueeze(1).expand(-1, self.num_ws, -1)

    @torch.no_grad()
    def track(self, w: Tensor, beta: float = 0.995) -> None:
        """Move the average towards a batch of w, (n, w_dim). For training."""
        self.w_avg.copy_(w.detach().float().mean(dim=0).lerp(self.w_avg, beta))


class SynthesisLayer(nn.Module):
    """Modulated 3x3 convolution, demodulation, noise, bias, leaky ReLU; doubles the image first if ``up`` is 2."""

    resample_filter: Tensor
    noise_const: Tensor

    def __init__(self, inputs: int, outputs: int, w_dim: int, resolution: int, up: int = 1) -> None:
        super().__init__()
        self.resolution = resolution
        self.up = up
        self.register_buffer("resample_filter", low_pass())
        self.affine = FullyConnected(w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))
        self.register_buffer("noise_const", torch.randn(resolution, resolution))
        self.noise_strength = nn.Parameter(torch.zeros([]))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, w: Tensor, noise: Tensor | None) -> Tensor:
        """(n, inputs, r / up, r / up), (n, w_dim), noise that broadcasts to (n, 1, r, r) -> (n, outputs, r, r)."""
        with in_float(x):
            s = self.affine(w.float())
            # 2020a, Eq. 3 for one kernel of all samples: the norm of s * W separates
            d = (s.square() @ self.weight.square().sum(dim=(2, 3)).T + EPS).rsqrt()
        y = x * s.to(x.dtype)[:, :, None, None]
        if self.up == 2:
            y = conv_transpose2d(y, self.weight.transpose(0, 1), stride=2)
            y = smoothed(y, self.resample_filter, padding=1, gain=4.0)
        else:
            y = conv2d(y, self.weight, padding=1)
        added = self.bias.view(1, -1, 1, 1) * GAIN
        if noise is not None:
            added = added + noise * (self.noise_strength * GAIN)
        return activated(torch.addcmul(added.to(y.dtype), y, (d * GAIN).to(y.dtype)[:, :, None, None]))


class ToRGB(nn.Module):
    """Modulated 1x1 convolution without demodulation."""

    def __init__(self, inputs: int, channels: int, w_dim: int) -> None:
        super().__init__()
        self.affine = FullyConnected(w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(channels, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """(n, inputs, r, r), (n, w_dim) -> (n, channels, r, r) float32."""
        with in_float(x):
            s = self.affine(w.float()) / math.sqrt(self.weight.shape[1])
        y = conv2d(x * s.to(x.dtype)[:, :, None, None], self.weight).float()
        return (y + self.bias.view(1, -1, 1, 1)).clamp(-CLAMP, CLAMP)


class SynthesisBlock(nn.Module):
    """The layers of one resolution, and its part of the image (2020a, figure 7b: skip connections)."""

    resample_filter: Tensor

    def __init__(self, architecture: StyleGanShape, resolution: int) -> None:
        super().__init__()
        width = architecture.width(resolution)
        self.first = resolution == 4
        self.register_buffer("resample_filter", low_pass())
        if self.first:
            self.const = nn.Parameter(torch.randn(width, 4, 4))
        else:
            below = architecture.width(resolution // 2)
            self.conv0 = SynthesisLayer(below, width, architecture.w_dim, resolution, up=2)
        self.conv1 = SynthesisLayer(width, width, architecture.w_dim, resolution)
        self.torgb = ToRGB(width, architecture.channels, architecture.w_dim)

    @property
    def convolutions(self) -> tuple[SynthesisLayer, ...]:
        """1 at 4 px, 2 above; each takes a style."""
        return (self.conv1,) if self.first else (self.conv0, self.conv1)

    def start(self, count: int) -> Tensor:
        """The learned input, (count, width, 4, 4), of the block at 4 px."""
        return self.const.unsqueeze(0).expand(count, -1, -1, -1)


class SynthesisNetwork(nn.Module):
    """Styles -> image."""

    def __init__(self, architecture: StyleGanShape) -> None:
        super().__init__()
        self.resolutions = architecture.resolutions
        self.num_ws = architecture.num_ws
        for resolution in self.resolutions:
            self.add_module(f"b{resolution}", SynthesisBlock(architecture, resolution))

    def forward(
        self, ws: Tensor, noise: Noise = "const", until: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw images.

        Args:
            ws: (n, num_ws, w_dim), one style for every layer (W+).
            noise: the fixed noise of the network, fresh noise from ``generator``, or none.
            until: stop at this resolution: the image as it is there.
            generator: of fresh noise; on its device or the CPU.
        Returns:
            (n, channels, r, r) float32, about [-1, 1].
        Raises:
            ValueError: another shape, an unknown noise or resolution, fresh noise without a generator.
        """
        until = self.resolutions[-1] if until is None else until
        self._check(ws, noise, until, generator)
        image: Tensor | None = None
        x = cast("SynthesisBlock", self.b4).start(ws.shape[0])
        index = 0
        for resolution in self.resolutions[: self.resolutions.index(until) + 1]:
            block = cast("SynthesisBlock", getattr(self, f"b{resolution}"))
            for layer in block.convolutions:
                x = layer(x, ws[:, index], _noise(layer, noise, ws, generator))
                index += 1
            colour = block.torgb(x, ws[:, index])
            image = colour if image is None else doubled(image, block.resample_filter) + colour
        assert image is not None
        return image

    def _check(self, ws: Tensor, noise: str, until: int, generator: torch.Generator | None) -> None:
        if ws.ndim != 3 or ws.shape[1] != self.num_ws:
            raise ValueError(f"styles are (n, {self.num_ws}, w)")
        if until not in self.resolutions:
            raise ValueError(f"the network draws at {self.resolutions} px")
        if noise not in get_args(Noise) or (noise == "random" and generator is None):
            raise ValueError("noise is const, none, or random with a generator")


def _noise(layer: SynthesisLayer, noise: Noise, ws: Tensor, generator: torch.Generator | None) -> Tensor | None:
    if noise == "none":
        return None
    if noise == "const":
        return layer.noise_const
    assert generator is not None
    shape = (ws.shape[0], 1, layer.resolution, layer.resolution)
    return torch.randn(shape, generator=generator, device=generator.device).to(ws.device)


class Generator(nn.Module):
    """z -> image."""

    def __init__(self, architecture: StyleGanShape) -> None:
        super().__init__()
        self.architecture = architecture
        self.mapping = MappingNetwork(architecture)
        self.synthesis = SynthesisNetwork(architecture)

    @property
    def w_avg(self) -> Tensor:
        """(w_dim,): the average style, the origin of truncation and of inversion."""
        return self.mapping.w_avg

    def forward(self, z: Tensor, truncation: float = 1.0, noise: Noise = "const") -> Tensor:
        """(n, z_dim) -> (n, channels, r, r), about [-1, 1]."""
        out: Tensor = self.synthesis(self.mapping(z, truncation), noise)
        return out


class DiscriminatorBlock(nn.Module):
    """Two convolutions and a residual path, halving (2020a, figure 7c)."""

    resample_filter: Tensor

    def __init__(self, architecture: StyleGanShape, resolution: int) -> None:
        super().__init__()
        width, above = architecture.width(resolution), architecture.width(resolution // 2)
        self.register_buffer("resample_filter", low_pass())
        self.fromrgb = Conv2d(architecture.channels, width, 1) if resolution == architecture.resolution else None
        self.conv0 = Conv2d(width, width, 3)
        self.conv1 = Conv2d(width, above, 3, down=2)
        self.skip = Conv2d(width, above, 1, down=2, plain=True)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width or image, r, r) -> (n, width above, r / 2, r / 2)."""
        if self.fromrgb is not None:
            x = self.fromrgb(x)
        half = math.sqrt(0.5)
        out: Tensor = self.skip(x, half) + self.conv1(self.conv0(x), half)
        return out


class DiscriminatorEpilogue(nn.Module):
    """Standard deviation over the batch as one more map, a convolution, two full layers."""

    def __init__(self, architecture: StyleGanShape, group: int = 4) -> None:
        super().__init__()
        width = architecture.width(4)
        self.group = group
        self.conv = Conv2d(width + 1, width, 3)
        self.fc = FullyConnected(width * 16, width, leaky=True)
        self.out = FullyConnected(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width, 4, 4) -> (n, 1)."""
        with in_float(x):
            x = x.float()
            y = self.conv(torch.cat([x, spread(x, self.group)], dim=1))
            out: Tensor = self.out(self.fc(y.flatten(1)))
            return out


def spread(x: Tensor, group: int) -> Tensor:
    """Minibatch standard deviation (Karras et al. 2018, section 3): (n, c, h, w) -> (n, 1, h, w).

    Groups have ``group`` samples, or the most that divides the batch; group j holds the samples j mod (n / size).
    """
    n, _, h, w = x.shape
    size = next(g for g in range(min(group, n), 0, -1) if n % g == 0)
    y = x.reshape(size, n // size, -1)
    y = y - y.mean(dim=0)
    deviation = (y.square().mean(dim=0) + EPS).sqrt().mean(dim=1)
    return deviation.repeat(size)[:, None, None, None].expand(n, 1, h, w)


class Discriminator(nn.Module):
    """Images (n, channels, r, r) -> logits (n, 1): positive is real."""

    def __init__(self, architecture: StyleGanShape) -> None:
        super().__init__()
        self.architecture = architecture
        for resolution in architecture.resolutions[:0:-1]:
            self.add_module(f"b{resolution}", DiscriminatorBlock(architecture, resolution))
        self.b4 = DiscriminatorEpilogue(architecture)

    def forward(self, images: Tensor) -> Tensor:
        """Judge a batch; the judgement of one image depends on its group of the batch."""
        x = images
        for resolution in self.architecture.resolutions[:0:-1]:
            x = getattr(self, f"b{resolution}")(x)
        out: Tensor = self.b4(x)
        return out


def generator_bytes(generator: Generator, notes: Mapping[str, Any]) -> bytes:
    """A generator as a network file; ``notes`` say how it was trained."""
    return pack(KIND, asdict(generator.architecture), notes, generator.state_dict())


def generator_from(raw: bytes) -> tuple[Generator, NetworkFile]:
    """Read what :func:`generator_bytes` wrote, in evaluation mode.

    Raises:
        WeightsError: no generator, an architecture that cannot be built, or weights that do not fit it.
    """
    packed = unpack(raw, KIND)
    try:
        architecture = StyleGanShape(**packed.config)
    except (TypeError, ValueError) as fault:
        raise WeightsError("the file names no architecture that can be built") from fault
    return built(lambda: Generator(architecture), packed.state).requires_grad_(requires_grad=True), packed
