"""Local style alignment against Algorithm 1 of k-SALSA written down as it stands: processor seconds per cluster.

``speed_vs_straightforward``: the peer does one cluster after another, modulates weights (one grouped convolution, so
that the backward pass makes a gradient for them), runs every layer of the style network on every source again in each
step, and loops over members and patches. Ours takes as many steps on the same clusters with the same networks: no
early stop is counted. ``speed_vs_frugal`` is against the same peer when it keeps the sources' Gram matrices and stops
at the layer it needs. All end at the same loss, or the benchmark fails. Weights are drawn, not trained: the
arithmetic is the same.

``python -m tests.benchmarks.style_alignment --preset small64 --clusters 8 --steps 20`` does other sizes, and
``--device cuda --preset auto512 --width 64`` prints seconds beside the paper's 19 s for a cluster of k = 5 at 512 px.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d, cosine_similarity, leaky_relu

from agent.mechanisms.ksalsa.style_alignment import PUBLISHED, Aligned, Alignment, Networks, align
from agent.models.features.extractors import RandomFeatures
from agent.models.features.vgg import Vgg19
from agent.models.stylegan.network import PRESETS, Generator
from agent.models.stylegan.resampling import doubled, smoothed
from agent.models.stylegan.restyle import Encoder, architecture_for, invert_images
from agent.models.training_loop import seeded
from agent.models.weights import Origin
from tests.benchmarks.report import Report, Row, as_table

PAPER: Final = 19.0  # s per cluster, k = 5, 512 px, 100 steps, one RTX 3090 (supplement C)
PAPER_INVERSION: Final = 0.85  # s an image, 512 px (supplement C)
K: Final = 5
SAME: Final = 0.05  # of the loss: Adam and float32 carry two orders of summation apart


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured."""

    preset: str = "tiny32"
    clusters: int = 16  # ours, in one batch
    peers: int = 2  # clusters that the peer does
    steps: int = 10
    width: int = 16  # of the content network's first level
    device: str = "cpu"


Codes = NDArray[np.float32]


# --- the peer -----------------------------------------------------------------------------------------------------


def modulated(layer: torch.nn.Module, x: Tensor, w: Tensor, demodulate: bool) -> Tensor:
    """StyleGAN2's modulated convolution as the published networks have it: a kernel per sample, grouped."""
    n, inputs, h, _ = x.shape
    s = layer.affine(w)
    kernels = layer.weight[None] * (s if demodulate else s / inputs**0.5)[:, None, :, None, None]
    if demodulate:
        kernels = kernels * (kernels.square().sum(dim=(2, 3, 4), keepdim=True) + 1e-8).rsqrt()
    flat = x.reshape(1, n * inputs, h, h)
    if getattr(layer, "up", 1) == 2:
        y = conv_transpose2d(flat, kernels.transpose(1, 2).flatten(0, 1), stride=2, groups=n)
        y = smoothed(y.reshape(n, -1, *y.shape[2:]), layer.resample_filter, padding=1, gain=4.0)
    else:
        y = conv2d(flat, kernels.flatten(0, 1), padding=kernels.shape[-1] // 2, groups=n)
    return y.reshape(n, -1, *y.shape[2:])


def picture(generator: Generator, ws: Tensor) -> Tensor:
    """The generator's own weights, modulated instead of its activations."""
    image, index = None, 0
    x = generator.synthesis.b4.start(len(ws))
    for resolution in generator.synthesis.resolutions:
        block = getattr(generator.synthesis, f"b{resolution}")
        for layer in block.convolutions:
            y = modulated(layer, x, ws[:, index], demodulate=True) + layer.noise_const * layer.noise_strength
            x = leaky_relu(y + layer.bias[:, None, None], 0.2) * 2.0**0.5
            index += 1
        colour = modulated(block.torgb, x, ws[:, index], demodulate=False) + block.torgb.bias[:, None, None]
        image = colour if image is None else doubled(image, block.resample_filter) + colour
    return image


def grams(features: Tensor, side: int) -> list[Tensor]:
    """Eq. 1-2, patch by patch."""
    step = features.shape[1] // side
    found = []
    for i in range(side):
        for j in range(side):
            patch = features[:, i * step : (i + 1) * step, j * step : (j + 1) * step].reshape(len(features), -1)
            found.append(patch @ patch.T / patch.numel())
    return found


def straightforward(
    networks: Networks, start: Codes, cluster: Sequence[Sequence[Codes]], plan: Alignment, frugal: bool
) -> float:
    """Algorithm 1, lines 5-15, for one cluster: the style loss before the last step."""
    depth, device = plan.layer if frugal else None, next(networks.generator.parameters()).device
    w0 = torch.from_numpy(start).to(device)
    sources = [torch.from_numpy(image).permute(2, 0, 1).to(device) * 2 - 1 for (image,) in cluster]

    def described(image: Tensor) -> list[Tensor]:
        return grams(networks.style.maps(image, depth)[plan.layer - 1][0], plan.grid.side)

    with torch.no_grad():
        x0 = picture(networks.generator, w0[None])
        kept = [described(source[None]) for source in sources]
    w = w0[None].clone().requires_grad_()
    adam = torch.optim.Adam([w], lr=plan.rate, betas=plan.betas)
    style = torch.zeros(())
    for _ in range(plan.steps):
        x = picture(networks.generator, w)
        content = 1.0 - cosine_similarity(networks.content.embed(x0), networks.content.embed(x)).sum()
        target = described(x)
        style, energy = torch.zeros_like(content), torch.zeros_like(content)
        for source, known in zip(sources, kept, strict=True):
            for patch in known if frugal else described(source[None]):
                likeness = [float(cosine_similarity(patch.flatten(), t.detach().flatten(), dim=0)) for t in target]
                style = style + (patch - target[int(np.argmax(likeness))]).square().sum()
                energy = energy + patch.square().sum()
        style = style / energy  # the scale "relative"
        adam.zero_grad()
        (plan.lam * content + (1.0 - plan.lam) * style).backward()
        adam.step()
    return float(style.detach())


# --- the measurement ----------------------------------------------------------------------------------------------


def material(size: Size) -> tuple[Networks, Codes, list[list[list[Codes]]]]:
    """Networks, w0, and made sources that the generator could have drawn."""
    with seeded(0):
        generator = Generator(PRESETS[size.preset]).eval().requires_grad_(False).to(size.device)
    z = torch.randn(size.clusters * K, generator.architecture.z_dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ws = generator.mapping(z.to(size.device))
        drawn = torch.cat([generator.synthesis(part) for part in ws.split(8)])
    images = ((drawn / 4.0 + 1.0) / 2.0).clamp(0.0, 1.0).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    sources = [[[image] for image in images[j * K : (j + 1) * K]] for j in range(size.clusters)]
    w0 = ws.reshape(size.clusters, K, *ws.shape[1:]).mean(dim=1).cpu().numpy()
    return Networks(generator, vgg().to(size.device), RandomFeatures(1, size.width).to(size.device)), w0, sources


def vgg() -> Vgg19:
    """The paper's style network, its weights drawn so that the signal keeps its size through all layers (He 2015)."""
    with seeded(2):
        net = Vgg19(Origin("random", "0" * 64), normalised=False)
        for layer in net.features:
            if isinstance(layer, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(layer.weight)
                torch.nn.init.zeros_(layer.bias)
    return net.freeze()


def clock(device: str) -> float:
    """Processor seconds; of a GPU, wall seconds once it has done everything."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measured(size: Size) -> tuple[list[Row], tuple[float, float]]:
    """Rows, and the seconds per cluster of the peer, straightforward and frugal, over ours."""
    networks, w0, sources = material(size)
    plan = replace(
        PUBLISHED, steps=size.steps, ramp_up=0.0, ramp_down=0.0, batch=size.clusters, bf16=size.device != "cpu"
    )
    align(networks, w0, sources, replace(plan, steps=1))  # what is made at the first call is nobody's
    start = clock(size.device)
    ours: Aligned = align(networks, w0, sources, plan)
    mine = (clock(size.device) - start) / size.clusters
    peers, apart = [], 0.0
    for frugal in (False, True):
        straightforward(networks, w0[0], sources[0], replace(plan, steps=1), frugal)
        start = clock(size.device)
        for j in range(size.peers):
            loss = straightforward(networks, w0[j], sources[j], plan, frugal)
            apart = max(apart, abs(float(ours.style[j, -1]) / loss - 1.0))
        peers.append((clock(size.device) - start) / size.peers)
    if size.device == "cpu" and not apart <= SAME:
        raise RuntimeError(f"the two do not end at the same loss: {apart:.3f} apart")
    unit = "cpu-s" if size.device == "cpu" else "s"
    what = f"{size.preset}, k = {K}, {size.steps} steps"
    return [
        Row(f"ours, {size.clusters} clusters at once, per cluster ({what})", mine, unit),
        Row(f"Algorithm 1 as written, per cluster ({what})", peers[0], unit),
        Row(f"the same, sources' Grams kept and layers cut, per cluster ({what})", peers[1], unit),
        Row(f"final style loss, greatest relative difference ({what})", apart, "x"),
        Row(
            f"style loss, last step over first, mean ({what})",
            float((ours.style[:, -1] / ours.style[:, 0]).mean()),
            "x",
        ),
    ], (peers[0] / mine, peers[1] / mine)


def inverted(preset: str, images: int, device: str = "cpu") -> Row:
    """Inversion by five passes, seconds an image; weights are drawn, which changes no arithmetic."""
    architecture = PRESETS[preset]
    with seeded(1):
        generator = Generator(architecture).eval().to(device)
        encoder = Encoder(architecture_for(architecture)).eval().to(device)
    side = architecture.resolution
    pictures = torch.rand((images, architecture.channels, side, side), generator=torch.Generator().manual_seed(1))
    pictures = (pictures * 2 - 1).to(device)
    invert_images(encoder, generator, pictures[:1], 5)
    began = time.process_time() if device == "cpu" else time.perf_counter()
    if not bool(torch.isfinite(invert_images(encoder, generator, pictures, 5)).all()):
        raise RuntimeError("a code is not finite")
    took = (time.process_time() if device == "cpu" else time.perf_counter()) - began
    return Row(f"inversion, {side} px, 5 passes, an image", took / images, "s")


def main() -> Report:
    """32 px, and 64 px; 512 px where there is a GPU. Less than two minutes of one processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, (ratio, frugal) = measured(Size())
        more, (at64, _) = measured(Size("small64", clusters=8, peers=1, steps=5))
    finally:
        torch.set_num_threads(threads)
    rows += [*more, inverted("tiny32", 32), inverted("small64", 8), inverted("auto512", 1)]
    rows += [Row("the paper's inversion, 512 px, an image, on an RTX 3090", PAPER_INVERSION, "s")]
    ratios = {"speed_vs_straightforward": ratio, "speed_vs_frugal": frugal, "speed_vs_straightforward_64": at64}
    if torch.cuda.is_available():
        large, (at512, _) = measured(Size("auto512", clusters=32, peers=1, steps=100, width=64, device="cuda"))
        rows += [*large, Row("the paper's, on an RTX 3090", PAPER, "s"), inverted("auto512", 32, "cuda")]
        ratios |= {"speed_vs_straightforward_512": at512, "speed_vs_paper_512": PAPER / large[0].value}
    return Report(tuple(rows), ratios)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny32")
    parser.add_argument("--device", default="cpu")
    for name in ("clusters", "peers", "steps", "width"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size(), name))
    torch.set_num_threads(1)
    told, found = measured(Size(**vars(parser.parse_args())))
    ratios = dict(zip(("speed_vs_straightforward", "speed_vs_frugal"), found, strict=True))
    print(as_table("style_alignment", Report(tuple(told), ratios)))
