"""ReStyle: from an image to the W+ code of a generator, by repeated correction of the last guess.

Alaluf, Patashnik & Cohen-Or 2021 (arXiv 2104.02699), section 3 and Fig. 2; k-SALSA, section 3.3 and supplement B.
With x the image, w_0 the average latent and y_0 = G(w_0) its image, pass t does

    d_t = E(x || y_t),   w_{t+1} = w_t + d_t,   y_{t+1} = G(w_{t+1})

where || joins channels. Three things differ from the published network, on purpose. One head is shared by all
layers, with one linear map for each (the published 16 separate heads hold 151 of its 172 million parameters). Groups
are normalised, not batches, so that a code does not depend on the other images of its batch. And the last linear
map begins at zero, so that an untrained encoder answers the average latent and nothing worse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, leaky_relu

from agent.models.image_tensors import resized
from agent.models.stylegan.network import Generator, StyleGanShape
from agent.models.weights import NetworkFile, WeightsError, built, pack, unpack

KIND: Final = "encoder"
PASSES: Final = 5  # k-SALSA, supplement B: five refinement iterations
_SLOPE: Final = 0.2
_MEASURED: Final = 1024  # codes from which the scatter is taken
_GRID: Final = 4  # pixels a side of what the shared head reads at once


@dataclass(frozen=True, slots=True)
class EncoderArchitecture:
    """The architecture of an encoder. The code's shape comes from the generator; the trunk from :data:`PRESETS`."""

    resolution: int  # pixels a side of the images
    channels: int  # 1 grey, 3 RGB
    num_ws: int  # layers of the code
    w_dim: int
    side: int  # pixels a side that the trunk sees; larger images are averaged down to it
    widths: tuple[int, ...]  # channels of each stage; each but the first halves the side
    blocks: tuple[int, ...]  # residual blocks of each stage
    head: int  # width of the shared head
    stem: int = 1  # stride of the first convolution: 1 or 2
    passes: int = PASSES  # that it was trained with; codes drift away again after more of them

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        for name in ("widths", "blocks"):  # JSON knows no tuples
            object.__setattr__(self, name, tuple(getattr(self, name)))
        whole = (
            self.resolution,
            self.channels,
            self.num_ws,
            self.w_dim,
            self.side,
            self.head,
            self.stem,
            self.passes,
        )
        if not all(type(n) is int and 1 <= n <= 1 << 14 for n in (*whole, *self.widths, *self.blocks)):
            raise ValueError("sizes are positive whole numbers")
        if self.channels not in (1, 3) or self.stem not in (1, 2):
            raise ValueError("an encoder has 1 or 3 channels and a stem of stride 1 or 2")
        if not 1 <= len(self.widths) == len(self.blocks) <= 8 or not max(self.blocks) <= 64:
            raise ValueError("one number of blocks for each width: at most 8 stages of at most 64 blocks")
        if any(width % 4 for width in self.widths):
            raise ValueError("widths are multiples of 4")
        if self.side > self.resolution or self.side & (self.side - 1) or self.last < _GRID:
            raise ValueError(f"the side is a power of two, and at least {_GRID} pixels of it are left at the end")

    @property
    def last(self) -> int:
        """Pixels a side after the last stage."""
        return self.side // self.stem >> (len(self.widths) - 1)


# resolution -> side, stem, widths, blocks, head. From 256 px on, ResNet-34 without its max-pooling, as published, and
# 16 x 16 at the end. Below, the same four stages with fewer blocks and channels.
PRESETS: Final[Mapping[int, tuple[int, int, tuple[int, ...], tuple[int, ...], int]]] = {
    32: (32, 1, (32, 64, 96, 128), (1, 1, 1, 1), 128),
    64: (64, 2, (48, 96, 128, 192), (1, 2, 2, 1), 192),
    128: (128, 2, (64, 96, 160, 256), (2, 2, 3, 2), 256),
    256: (256, 2, (64, 128, 256, 512), (3, 4, 6, 3), 512),
    512: (256, 2, (64, 128, 256, 512), (3, 4, 6, 3), 512),
}


def architecture_for(generator: StyleGanShape) -> EncoderArchitecture:
    """The preset encoder of a generator. Above 512 px the 512's; below 32 px the 32's, with fewer stages."""
    side, stem, widths, blocks, head = PRESETS[max((r for r in PRESETS if r <= generator.resolution), default=32)]
    side = min(side, generator.resolution)
    stages = min(len(widths), (side // stem // _GRID).bit_length())  # a stage more would leave less than the grid
    return EncoderArchitecture(
        resolution=generator.resolution,
        channels=generator.channels,
        num_ws=generator.num_ws,
        w_dim=generator.w_dim,
        side=side,
        widths=widths[:stages],
        blocks=blocks[:stages],
        head=head,
        stem=stem,
    )


class CodeShape(Protocol):
    """What an encoder and its generator must agree on."""

    @property
    def resolution(self) -> int:
        """Pixels a side."""

    @property
    def channels(self) -> int:
        """1 grey, 3 RGB."""

    @property
    def num_ws(self) -> int:
        """Layers of the code."""

    @property
    def w_dim(self) -> int:
        """Numbers for each layer."""


class Corrector(Protocol):
    """E of the module's formula: :class:`Encoder`, or a published file's
    (:mod:`agent.models.stylegan.restyle_published`).
    """

    @property
    def architecture(self) -> CodeShape:
        """What it fits."""

    def __call__(self, images: Tensor, reconstructions: Tensor, /) -> Tensor:
        """(n, c, r, r) twice -> the update (n, num_ws, w_dim)."""


class _Block(nn.Module):
    """A residual block whose straight way is not normalised: how bright an image is must reach the head."""

    def __init__(self, enters: int, leaves: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.norm1 = nn.GroupNorm(_groups(enters), enters)
        self.conv1 = nn.Conv2d(enters, leaves, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(_groups(leaves), leaves)
        self.conv2 = nn.Conv2d(leaves, leaves, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(enters, leaves, 1, bias=False) if enters != leaves else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv1(leaky_relu(self.norm1(x), _SLOPE))
        branch = self.conv2(leaky_relu(self.norm2(branch), _SLOPE))
        straight = self.skip(avg_pool2d(x, self.stride) if self.stride > 1 else x)
        out: Tensor = straight + branch
        return out


class Encoder(nn.Module):
    """E of the module's formula: two images in, an additive update of the code out."""

    spread: Tensor

    def __init__(self, architecture: EncoderArchitecture) -> None:
        """Initial weights from the global generator: build inside ``agent.models.training_loop.seeded``."""
        super().__init__()
        a = self.architecture = architecture
        self.stem = nn.Conv2d(2 * a.channels, a.widths[0], 3, a.stem, 1)
        stages: list[nn.Module] = []
        enters = a.widths[0]
        for stage, (width, count) in enumerate(zip(a.widths, a.blocks, strict=True)):
            for block in range(count):
                stages.append(_Block(enters, width, 2 if stage and not block else 1))
                enters = width
        self.trunk = nn.Sequential(*stages)
        shrink: list[nn.Module] = []
        left = a.last
        while left > _GRID:
            shrink += [nn.Conv2d(enters, a.head, 3, 2, 1), nn.LeakyReLU(_SLOPE)]
            enters, left = a.head, left // 2
        self.head = nn.Sequential(
            *shrink, nn.Flatten(), nn.Linear(enters * left * left, a.head), nn.LeakyReLU(_SLOPE)
        )
        # the per-layer linear maps, one below the other
        self.layers = nn.Linear(a.head, a.num_ws * a.w_dim)
        nn.init.zeros_(self.layers.weight)
        nn.init.zeros_(self.layers.bias)
        # the size of a code's scatter, set once from the generator: learning rates then mean the same for all of them
        self.register_buffer("spread", torch.ones(()))

    def forward(self, images: Tensor, reconstructions: Tensor) -> Tensor:
        """The update d_t.

        Args:
            images: (n, c, r, r) in [-1, 1].
            reconstructions: of the same shape.
        Returns:
            (n, num_ws, w_dim) float32.
        """
        a = self.architecture
        both = torch.cat([resized(images, a.side), resized(reconstructions, a.side)], dim=1)
        flat: Tensor = self.layers(self.head(self.trunk(self.stem(both))))
        return flat.float().reshape(-1, a.num_ws, a.w_dim) * self.spread


def _groups(channels: int) -> int:
    """Groups of 8 channels, of 4 where 8 does not divide."""
    return channels // 8 if channels % 8 == 0 else channels // 4


def check_fits(encoder: Corrector, generator: Generator) -> None:
    """Refuse an encoder of another generator's shape.

    Raises:
        ValueError: resolution, channels, layers or width differ.
    """
    e, g = encoder.architecture, generator.architecture
    if (e.resolution, e.channels, e.num_ws, e.w_dim) != (g.resolution, g.channels, g.num_ws, g.w_dim):
        raise ValueError("the encoder and the generator differ in resolution, channels or code")


def average_code(generator: Generator, count: int) -> Tensor:
    """w_0, ``count`` times: (count, num_ws, w_dim). A view: do not write to it."""
    a = generator.architecture
    return generator.w_avg.detach().expand(count, a.num_ws, a.w_dim)


@torch.no_grad()
def scatter(generator: Generator, seed: int = 0) -> Tensor:
    """Root mean square distance of a number of a code from its place in the average latent: the unit of codes. ().

    Raises:
        ValueError: it is nothing, or not a number.
    """
    z = torch.randn(_MEASURED, generator.architecture.z_dim, generator=torch.Generator().manual_seed(seed))
    ws = generator.mapping(z.to(generator.w_avg.device)).float()
    size: Tensor = (ws - generator.w_avg).square().mean().sqrt()
    if not bool(torch.isfinite(size) & (size > 0)):
        raise ValueError("the generator maps everything to one code, or to none: train it first")
    return size


def average_image(generator: Generator) -> Tensor:
    """y_0 = G(w_0): (1, c, r, r)."""
    picture: Tensor = generator.synthesis(average_code(generator, 1), noise="const")
    return picture


def invert_images(encoder: Corrector, generator: Generator, images: Tensor, passes: int = PASSES) -> Tensor:
    """The codes of one batch of images, without gradients.

    Deterministic: noise is the generator's constant one. ``passes`` runs of the encoder and ``passes - 1`` of the
    generator, one more for y_0: the last reconstruction is not drawn when only codes are wanted.

    Args:
        encoder: of this generator.
        generator: G.
        images: (n, c, r, r) in [-1, 1], on the generator's device.
        passes: of refinement, at least 1; those that the encoder was trained with.
    Returns:
        (n, num_ws, w_dim) float32.
    Raises:
        ValueError: shapes that do not fit together, or no pass.
    """
    *_, ws = _refine(encoder, generator, images, passes, None)
    return ws


def invert_recorded(
    encoder: Corrector, generator: Generator, images: Tensor, passes: int = PASSES
) -> tuple[Tensor, list[Tensor]]:
    """As :func:`invert_images`, with the images y_0 … y_passes, each (n, c, r, r): for people to look at."""
    seen: list[Tensor] = []
    *_, ws = _refine(encoder, generator, images, passes, seen)
    return ws, seen


@torch.no_grad()
def _refine(
    encoder: Corrector, generator: Generator, images: Tensor, passes: int, seen: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(last image drawn, codes); every image goes into ``seen``, where there is one."""
    check_fits(encoder, generator)
    a = generator.architecture
    if images.shape[1:] != (a.channels, a.resolution, a.resolution):
        raise ValueError("the images do not have the generator's shape")
    if not passes >= 1:
        raise ValueError("at least one pass")
    ws = average_code(generator, len(images))
    drawn = average_image(generator).expand(len(images), -1, -1, -1)
    for left in reversed(range(passes)):
        if seen is not None:
            seen.append(drawn)
        ws = ws + encoder(images, drawn)
        if left or seen is not None:
            drawn = generator.synthesis(ws, noise="const")
    if seen is not None:
        seen.append(drawn)
    return drawn, ws


@dataclass(frozen=True, slots=True)
class Polish:
    """Hybrid inversion: a few steps of Adam on the code itself, from the encoder's answer.

    Not part of k-SALSA, and off unless asked for: it draws more of an image's own detail, and leaves the region that
    the encoder keeps to.
    """

    steps: int = 50
    rate: float = 0.02  # of Adam, in units of :func:`scatter`
    stay: float = 0.1  # weight of the mean squared distance from the encoder's code, in the same units

    def __post_init__(self) -> None:
        """Refuse a size that is no size."""
        if not (1 <= self.steps <= 10_000 and 0.0 < self.rate < 10.0 and 0.0 <= self.stay < 1e6):
            raise ValueError("polish has at least one step, a positive rate, and a weight that is not negative")


def polish(generator: Generator, images: Tensor, ws: Tensor, spread: float, plan: Polish) -> Tensor:
    """Codes after ``plan.steps`` of Adam on mean squared pixel error plus ``plan.stay`` times the distance walked.

    An image's code does not depend on its batch: the loss is a sum over images, and Adam works number by number.

    Args:
        generator: G.
        images: (n, c, r, r) in [-1, 1].
        ws: (n, num_ws, w_dim), where to begin.
        spread: the unit of a code: :func:`scatter`.
        plan: how far.
    Returns:
        (n, num_ws, w_dim), without gradients.
    """
    walked = torch.zeros_like(ws, requires_grad=True)
    with torch.enable_grad():
        optimizer = torch.optim.Adam([walked], lr=plan.rate, betas=(0.9, 0.99))
        for _ in range(plan.steps):
            drawn = generator.synthesis(ws + spread * walked, noise="const")
            error = (drawn.float() - images).square().mean(dim=(1, 2, 3))
            loss = (error + plan.stay * walked.square().mean(dim=(1, 2))).sum()
            (walked.grad,) = torch.autograd.grad(loss, [walked])
            optimizer.step()
    return (ws + spread * walked).detach()


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and values of a network: what it is, however its file was packed."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def encoder_bytes(encoder: Encoder, notes: Mapping[str, Any]) -> bytes:
    """The encoder as one file (:mod:`agent.models.weights`), with how it was made."""
    return pack(KIND, asdict(encoder.architecture), notes, encoder.state_dict())


def encoder_from(raw: bytes) -> tuple[Encoder, NetworkFile]:
    """Read what :func:`encoder_bytes` wrote; frozen, on the CPU.

    Raises:
        WeightsError: no encoder, sizes of no encoder, or tensors that do not fit them.
    """
    packed = unpack(raw, KIND)
    try:
        architecture = EncoderArchitecture(**packed.config)
    except (TypeError, ValueError) as fault:
        raise WeightsError("the file's sizes are those of no encoder") from fault
    return built(lambda: Encoder(architecture), packed.state), packed
