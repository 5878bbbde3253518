"""C-DeID-GAN: a head around a brain, drawn at every scale from 4^3 up, conditioned at every scale.

"Adversarial privacy preservation in MRI scans of the brain", section 3.2, Eq. 6 and 7, after MSG-GAN (Karnewar &
Wang 2019, arXiv 1903.06048). Its appendix was never published: widths, activations and the residual form of a scale
(what a scale adds to the doubled map) are ours. As printed, g_0 has 2^3 numbers, since r_G(0) = 1 x (s/2)^3, and one
channel alone passes from scale to scale, in both networks; ``features`` lets more pass, and is 0.

Scales are listed from the coarsest to the finest everywhere; the discriminator reads them from the finest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.defacing.deid_gan.layers import CONDITION, Scale, checkpointed, doubled, pooled, pyramid
from agent.defacing.privacy_transform import Coarse, Gamma, Population
from agent.models.weights import NetworkFile, Origin, Provenance, WeightsError, built, pack, unpack
from agent.volumes.errors import NotDefacedError

KIND: Final = "remodeller"
_NET: Final = "0.net."  # a file's names begin with the number of the network, and there is one
COARSEST: Final = 4  # s: voxels a side of g_1
MOST: Final = 1024  # of any number of a configuration
FINEST: Final = 256


@dataclass(frozen=True, slots=True)
class VolumeGanConfig:
    """The public shape of both networks."""

    side: int  # S: voxels a side, a power of two
    widths: tuple[int, ...]  # channels inside each scale, the coarsest first: N_B of them
    expand: int = 4  # of an inverted residual block: channels of its inside over those outside
    blocks: tuple[int, ...] = ()  # inverted residual blocks of each scale; none told: one of each
    features: int = 0  # channels that pass between scales besides the one of the paper
    extent_mm: float = 256.0  # edge of the cube that the voxels fill

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        if type(self.blocks) is not tuple or type(self.widths) is not tuple:
            raise ValueError("widths and blocks are whole numbers of scales")
        numbers = (self.side, self.expand, *self.widths, *self.blocks)
        if not all(type(n) is int and 1 <= n <= MOST for n in numbers):
            raise ValueError(f"a configuration is whole numbers of 1 to {MOST}")
        if type(self.features) is not int or not 0 <= self.features <= MOST:
            raise ValueError("features are a whole number, or 0")
        if self.side & (self.side - 1) or not COARSEST <= self.side <= FINEST:
            raise ValueError(f"a side is a power of two, {COARSEST} to {FINEST}")
        if len(self.widths) != len(self.sides) or len(self.blocks) not in (0, len(self.sides)):
            raise ValueError(f"a side of {self.side} has {len(self.sides)} scales, with a width for each")
        if type(self.extent_mm) is not float or not 100.0 <= self.extent_mm <= 1000.0:
            raise ValueError("the edge of the cube is 100 to 1000 mm")

    @property
    def sides(self) -> tuple[int, ...]:
        """s, 2s, ..., S: N_B = log2(S / s) + 1 of them."""
        count = (self.side // COARSEST).bit_length()
        return tuple(COARSEST << k for k in range(count))

    def scale(self, k: int, inputs: int) -> Scale:
        """The layers of scale ``k``, from 0 for the coarsest, in either network; call inside ``seeded``."""
        blocks = self.blocks[k] if self.blocks else 1
        return Scale(inputs, self.widths[k], 1 + self.features, self.expand, blocks)

    @property
    def noise(self) -> tuple[int, ...]:
        """The shape of g_0, without the batch: r_G(0)."""
        return (1, COARSEST // 2, COARSEST // 2, COARSEST // 2)


PRESETS: Final[Mapping[str, VolumeGanConfig]] = {
    "tiny16": VolumeGanConfig(16, (8, 8, 8), expand=2),  # for tests of the program, not of the image
    "small32": VolumeGanConfig(32, (64, 48, 24, 8), expand=2, blocks=(3, 3, 2, 1)),  # a processor, minutes
    "base64": VolumeGanConfig(64, (64, 64, 48, 32, 16)),
    "full128": VolumeGanConfig(128, (128, 128, 96, 64, 32, 16)),  # the paper's size, for an accelerator
}


class DeidGanGenerator(nn.Module):
    """G: noise and the pyramid of gamma in, a volume of every scale out. It draws nothing itself."""

    def __init__(self, config: VolumeGanConfig) -> None:
        """Make the layers; call inside ``seeded``."""
        super().__init__()
        self.config = config
        self.sparing = False  # forget activations in training, and compute them again: gradient checkpointing
        passed = 1 + config.features
        self.scales = nn.ModuleList(config.scale(k, 1 if k == 0 else passed) for k in range(len(config.sides)))

    def forward(self, gammas: Sequence[Tensor], noise: Tensor) -> list[Tensor]:
        """Draw.

        Args:
            gammas: gamma_k, (n, 3, s, s, s), of every scale.
            noise: g_0, (n, 1, 2, 2, 2).
        Returns:
            g_k, (n, 1, s, s, s), of every scale; about within [0, 1], the brain is not embedded.
        Raises:
            ValueError: not one gamma for each scale.
        """
        _fits(gammas, self.config, CONDITION)
        made, g = list[Tensor](), noise
        for k, (scale, gamma) in enumerate(zip(self.scales, gammas, strict=True)):
            # Eq. 6: g_k = G_k(g_{k-1}, gamma_k); noise says nothing of intensities, and is not added to them
            up = doubled(g)
            added = checkpointed(scale, up, gamma, self.sparing)
            g = added if k == 0 else up + added
            made.append(g[:, :1])
        return made


class DeidGanDiscriminator(nn.Module):
    """D: volumes of every scale and the pyramid of gamma in, one number for each head out."""

    def __init__(self, config: VolumeGanConfig) -> None:
        """Make the layers; call inside ``seeded``."""
        super().__init__()
        self.config = config
        self.sparing = False
        passed = 1 + config.features
        finest = len(config.sides) - 1
        self.scales = nn.ModuleList(
            config.scale(k, 1 if k == finest else 1 + passed) for k in range(len(config.sides))
        )
        self.summary = nn.Linear(passed * COARSEST**3, 1)  # F

    def forward(self, volumes: Sequence[Tensor], gammas: Sequence[Tensor]) -> Tensor:
        """Judge.

        Args:
            volumes: v of every scale, (n, 1, s, s, s).
            gammas: gamma of every scale, (n, 3, s, s, s).
        Returns:
            (n,) real numbers, larger for what looks more real beside this gamma.
        Raises:
            ValueError: not one volume and one gamma for each scale.
        """
        _fits(gammas, self.config, CONDITION)
        _fits(volumes, self.config, 1)
        d: Tensor | None = None
        for scale, v, gamma in zip(reversed(self.scales), reversed(volumes), reversed(gammas), strict=True):
            # Eq. 7: d_1 = D_1(v_1, gamma_1), d_k = D_k(d_{k-1}, v_k, gamma_k), from the finest to the coarsest
            if d is None:
                d = checkpointed(scale, v, gamma, self.sparing)
            else:
                down = pooled(d, v.shape[-1])
                d = down + checkpointed(scale, torch.cat([down, v], dim=1), gamma, self.sparing)
        if d is None:
            raise AssertionError("a configuration has a scale")
        out: Tensor = self.summary(d.flatten(1))[:, 0]
        return out


@torch.no_grad()
def drawn(net: DeidGanGenerator, gamma: Tensor, generator: torch.Generator) -> Tensor:
    """Heads for gammas (n, 3, S, S, S): (n, 1, S, S, S) float32 in [0, 1], on the CPU, without the brains.

    Every number that is drawn comes from ``generator``, which is of the CPU.
    """
    device = next(net.parameters()).device
    noise = torch.randn((len(gamma), *net.config.noise), generator=generator)
    gammas = [part.to(device) for part in pyramid(gamma, net.config.sides, generator)]
    made: Tensor = net(gammas, noise.to(device))[-1]
    return made.float().clamp(0.0, 1.0).cpu()


def _fits(given: Sequence[Tensor], config: VolumeGanConfig, channels: int) -> None:
    shapes = [tuple(t.shape[1:]) for t in given]
    if shapes != [(channels, side, side, side) for side in config.sides]:
        told = " ".join(map(str, config.sides))
        raise ValueError(f"one tensor of {channels} channel(s) is needed for each of the sides {told}")


@dataclass(frozen=True, slots=True, eq=False)
class Remodeller:
    """One generator of public heads, frozen, and the population that its hulls were made with.

    A network that the site's configuration does not vouch for as public might have learned from the person before
    it, and draws for nobody.
    """

    net: DeidGanGenerator
    people: Population
    coarse: Coarse  # of the hulls that it learned with
    origin: Origin

    def __post_init__(self) -> None:
        """A population on the network's cube."""
        if self.people.skin.shape[0] != self.side:
            raise ValueError("a population lies on the network's cube")

    @property
    def config(self) -> VolumeGanConfig:
        """The shape of the network."""
        return self.net.config

    @property
    def side(self) -> int:
        """S, voxels along each edge of the cube."""
        return self.config.side

    @property
    def population(self) -> Population:
        """To make gamma with.

        Raises:
            NotDefacedError: ``seen_in_training``, nobody vouches for the network as public.
        """
        self._demand_public()
        return self.people

    def draw(self, gamma: Gamma, rng: np.random.Generator) -> NDArray[np.float32]:
        """A head around this brain: G(gamma), in which the brain is the network's own and to be replaced.

        Args:
            gamma: made with this remodeller's ``population`` and ``coarse``, on its cube.
            rng: of the run.
        Returns:
            (S, S, S) float32 in [0, 1], normalised as ``Gamma.intensities``.
        Raises:
            NotDefacedError: ``seen_in_training``, nobody vouches for the network as public.
            ValueError: gamma on another cube.
        """
        self._demand_public()
        edge = gamma.cube.mm * gamma.cube.side
        if gamma.cube.side != self.side or not abs(edge - self.config.extent_mm) <= 1e-3 * edge:
            raise ValueError(f"gamma lies on another cube than {self.side} voxels over {self.config.extent_mm:g} mm")
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        return drawn(self.net, torch.from_numpy(gamma.stack())[None], generator)[0, 0].numpy()

    def to(self, device: str) -> Remodeller:
        """The same on a device; moved in place."""
        self.net.to(device)
        return self

    def _demand_public(self) -> None:
        if self.origin.component != "public":
            raise NotDefacedError("seen_in_training")


def variance(remodeller: Remodeller, gamma: Gamma, seeds: Sequence[int]) -> NDArray[np.float32]:
    """(S, S, S): how much a voxel varies from draw to draw. Where it does not, the network says one thing of a brain.

    Raises:
        ValueError: fewer than two seeds.
    """
    if len(seeds) < 2:
        raise ValueError("a variance is that of two draws or more")
    made = np.stack([remodeller.draw(gamma, np.random.Generator(np.random.Philox(seed))) for seed in seeds])
    return np.asarray(made.var(axis=0, ddof=1), np.float32)


def remodeller_bytes(
    net: DeidGanGenerator, population: Population, coarse: Coarse, notes: Mapping[str, Any]
) -> bytes:
    """A remodeller as one file.

    Args:
        net: trained on public heads.
        population: that gamma was made with.
        coarse: how gamma is made.
        notes: how it was trained.
    """
    state = {f"{_NET}{name}": tensor for name, tensor in net.state_dict().items()}
    state["0.support"] = torch.from_numpy(population.support)
    state["0.skin"] = torch.from_numpy(population.skin)
    config = {"gan": asdict(net.config), "coarse": asdict(coarse), "counts": [population.count], "code": ""}
    return pack(KIND, config, notes, state)


def remodeller_from(raw: bytes, provenance: Provenance = "file") -> Remodeller:
    """Read a remodeller.

    Args:
        raw: what :func:`remodeller_bytes` wrote.
        provenance: ``public`` only where the site's configuration vouches for the file's digest.
    Raises:
        WeightsError: not such a file, or its configuration describes no remodeller of public heads.
    """
    packed = unpack(raw, KIND)
    try:
        gan, coarse, count = _told(packed)
        state = dict(packed.state)
        population = Population(state.pop("0.support").numpy(), state.pop("0.skin").numpy(), count)
        if population.support.dtype != np.float32 or population.skin.dtype != np.float32:
            raise ValueError("a population is float32")
    except (KeyError, TypeError, ValueError) as fault:
        raise WeightsError("the file's configuration is not one of a remodeller") from fault
    net = built(
        lambda: DeidGanGenerator(gan), {n.removeprefix(_NET): t for n, t in state.items() if n.startswith(_NET)}
    )
    if len(state) != len(net.state_dict()):
        raise WeightsError("the file holds tensors of no network")
    try:
        return Remodeller(net, population, coarse, Origin(provenance, packed.sha256))
    except ValueError as fault:
        raise WeightsError("the file's configuration is not one of a remodeller") from fault


def _told(packed: NetworkFile) -> tuple[VolumeGanConfig, Coarse, int]:
    if packed.config.keys() != {"gan", "coarse", "counts", "code"}:
        raise ValueError("unknown or missing keys of a remodeller")
    gan, coarse = dict(packed.config["gan"]), dict(packed.config["coarse"])
    for told, kind in ((gan, VolumeGanConfig), (coarse, Coarse)):
        if told.keys() != {f.name for f in fields(kind)}:
            raise ValueError("unknown or missing keys")
    counts = packed.config["counts"]
    if type(counts) is not list or len(counts) != 1 or type(counts[0]) is not int:
        raise ValueError("one network, with a count of the heads of its population")
    if packed.config["code"] != "":  # of files with networks of patients, which are not read any more
        raise ValueError("what was trained on patients is no remodeller of public heads")
    gan |= {name: tuple(gan[name]) for name in ("widths", "blocks")}
    return VolumeGanConfig(**gan), Coarse(**coarse), counts[0]
