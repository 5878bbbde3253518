"""C-DeID-GAN: a head around a brain, drawn at every scale from 4^3 up, told at every scale what it may know.

"Adversarial privacy preservation in MRI scans of the brain", section 3.2, Eq. 6 and 7, after MSG-GAN (Karnewar &
Wang 2019, arXiv 1903.06048). Its appendix was never published: widths, activations and the residual form of a scale
(what a scale adds to the doubled map) are ours. As printed, g_0 has 2^3 numbers, since r_G(0) = 1 x (s/2)^3, and one
channel alone passes from scale to scale, in both networks; ``features`` lets more pass, and is 0.

Scales are listed from the coarsest to the finest everywhere; the discriminator reads them from the finest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.heads.gamma import Coarse, Gamma, Population
from agent.heads.reasons import NotDefaced
from agent.nets.folds import MARK, MOST_FOLDS, code_of, fold_of, goes_by, mark_of
from agent.nets.volume_blocks import CONDITION, Scale, doubled, pooled, pyramid, remembered
from agent.nets.weights import BadWeights, Origin, Packed, Provenance, built, pack, unpack

KIND: Final = "remodeller"
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
    "tiny16": VolumeGanConfig(16, (8, 8, 8), expand=2),  # for tests of the program, not of the picture
    "small32": VolumeGanConfig(32, (64, 48, 24, 8), expand=2, blocks=(3, 3, 2, 1)),  # a processor, minutes
    "base64": VolumeGanConfig(64, (64, 64, 48, 32, 16)),
    "full128": VolumeGanConfig(128, (128, 128, 96, 64, 32, 16)),  # the paper's size, for an accelerator
}


class Generator(nn.Module):
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
            added = remembered(scale, up, gamma, self.sparing)
            g = added if k == 0 else up + added
            made.append(g[:, :1])
        return made


class Discriminator(nn.Module):
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
                d = remembered(scale, v, gamma, self.sparing)
            else:
                down = pooled(d, v.shape[-1])
                d = down + remembered(scale, torch.cat([down, v], dim=1), gamma, self.sparing)
        if d is None:
            raise AssertionError("a configuration has a scale")
        out: Tensor = self.summary(d.flatten(1))[:, 0]
        return out


@torch.no_grad()
def drawn(net: Generator, gamma: Tensor, generator: torch.Generator) -> Tensor:
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
class Part:
    """One generator, and the population that its hulls were made with: of the heads that it learned from."""

    net: Generator
    population: Population


@dataclass(frozen=True, slots=True, eq=False)
class Remodeller:
    """One generator, or one for each fold, frozen; and what says for whom each may be used."""

    parts: tuple[Part, ...]
    coarse: Coarse  # of the hulls that it learned with
    origin: Origin
    content: str  # SHA-256 of networks, populations and list
    code: str = ""  # of the content, under the key of folds and list; "": there are none
    seen: frozenset[bytes] = frozenset()  # digests of those it learned from
    chosen: bool = False  # for one person, who was not among them

    def __post_init__(self) -> None:
        """Networks of one shape."""
        if not 1 <= len(self.parts) <= MOST_FOLDS or len({part.net.config for part in self.parts}) != 1:
            raise ValueError(f"a remodeller has 1 to {MOST_FOLDS} networks of one shape")
        if any(part.population.skin.shape[0] != self.side for part in self.parts):
            raise ValueError("a population lies on the networks' cube")
        if len(self.parts) > 1 and not self.code:
            raise ValueError("folds go by a key")

    @property
    def config(self) -> VolumeGanConfig:
        """The shape of the networks."""
        return self.parts[0].net.config

    @property
    def side(self) -> int:
        """S, voxels along each edge of the cube."""
        return self.config.side

    @property
    def population(self) -> Population:
        """To make gamma with.

        Raises:
            NotDefaced: ``seen_in_training``, no network was chosen yet.
        """
        return self._only.population

    def for_person(self, person: str, key: bytes = b"") -> Remodeller:
        """The same with the one network that did not learn from this person.

        Args:
            person: the pseudonym.
            key: the site's; not needed where the network is public.
        Raises:
            NotDefaced: ``seen_in_training``: it did, or nobody can tell.
        """
        if len(self.parts) == 1 and self.origin.component == "public":
            return self
        if not (self.code and goes_by(self.code, self.content, key)):
            raise NotDefaced("seen_in_training")
        if len(self.parts) > 1:
            return replace(self, parts=(self.parts[fold_of(person, key, len(self.parts))],), chosen=True)
        if mark_of(person, key) in self.seen:
            raise NotDefaced("seen_in_training")
        return replace(self, chosen=True)

    def draw(self, gamma: Gamma, rng: np.random.Generator) -> NDArray[np.float32]:
        """A head around this brain: G(gamma), in which the brain is the network's own and to be replaced.

        Args:
            gamma: made with this remodeller's ``population`` and ``coarse``, on its cube.
            rng: of the run.
        Returns:
            (S, S, S) float32 in [0, 1], normalised as ``Gamma.intensities``.
        Raises:
            NotDefaced: ``seen_in_training``, no network was chosen for a person.
            ValueError: gamma on another cube.
        """
        net, edge = self._only.net, gamma.cube.mm * gamma.cube.side
        if gamma.cube.side != self.side or not abs(edge - self.config.extent_mm) <= 1e-3 * edge:
            raise ValueError(f"gamma lies on another cube than {self.side} voxels over {self.config.extent_mm:g} mm")
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        return drawn(net, torch.from_numpy(gamma.stack())[None], generator)[0, 0].numpy()

    def to(self, device: str) -> Remodeller:
        """The same on a device; moved in place."""
        for part in self.parts:
            part.net.to(device)
        return self

    @property
    def _only(self) -> Part:
        free = len(self.parts) == 1 and self.origin.component == "public"
        if not (free or self.chosen):
            raise NotDefaced("seen_in_training")
        return self.parts[0]


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
    parts: Sequence[Part],
    coarse: Coarse,
    notes: Mapping[str, Any],
    key: bytes | None = None,
    seen: Sequence[str] = (),
) -> bytes:
    """A remodeller as one file.

    Args:
        parts: one, or one for each fold, in order.
        coarse: how gamma is made.
        notes: how it was trained.
        key: of folds, or of the list; None for a network of public heads, which has neither.
        seen: persons that the one network learned from; of folds none is named.
    Raises:
        ValueError: folds or a list without a key, or a key without either.
    """
    if (key is None) is not (len(parts) == 1 and not seen) or (seen and len(parts) > 1):
        raise ValueError("a key goes with folds or with a list of persons, and one of the two with a key")
    state = {f"{i}.net.{n}": t for i, part in enumerate(parts) for n, t in part.net.state_dict().items()}
    for i, part in enumerate(parts):
        state[f"{i}.support"] = torch.from_numpy(part.population.support)
        state[f"{i}.skin"] = torch.from_numpy(part.population.skin)
    if key is not None and seen:
        marks = b"".join(sorted({mark_of(person, key) for person in seen}))
        state["seen"] = torch.from_numpy(np.frombuffer(marks, np.uint8).reshape(-1, MARK).copy())
    config = {
        "gan": asdict(parts[0].net.config),
        "coarse": asdict(coarse),
        "counts": [part.population.count for part in parts],
    }
    code = "" if key is None else code_of(_content(config, state), key)
    return pack(KIND, config | {"code": code}, notes, state)


def remodeller_from(raw: bytes, provenance: Provenance = "file") -> Remodeller:
    """Read a remodeller.

    Args:
        raw: what :func:`remodeller_bytes` wrote.
        provenance: ``public`` only where the site's configuration vouches for the file's digest.
    Raises:
        BadWeights: not such a file, or its configuration describes no remodeller.
    """
    packed = unpack(raw, KIND)
    try:
        gan, coarse, counts, code = _told(packed)
        if code and provenance == "public":
            raise ValueError("what was trained on patients is public by nobody's word")
        state = dict(packed.state)
        content = _content({k: v for k, v in packed.config.items() if k != "code"}, state)
        marks = state.pop("seen", torch.zeros((0, MARK), dtype=torch.uint8))
        if marks.dtype != torch.uint8 or marks.shape != (len(marks), MARK) or bool(len(marks)) > bool(code):
            raise ValueError("a list of persons goes by a key")
        populations = [
            Population(state.pop(f"{i}.support").numpy(), state.pop(f"{i}.skin").numpy(), count)
            for i, count in enumerate(counts)
        ]
        if any(p.support.dtype != np.float32 or p.skin.dtype != np.float32 for p in populations):
            raise ValueError("a population is float32")
    except (KeyError, TypeError, ValueError) as fault:
        raise BadWeights("the file's configuration describes no remodeller") from fault
    parts = tuple(Part(_net(gan, state, i), population) for i, population in enumerate(populations))
    if len(state) != sum(len(part.net.state_dict()) for part in parts):
        raise BadWeights("the file holds tensors of no network")
    seen = frozenset(bytes(mark.tolist()) for mark in marks)
    try:
        return Remodeller(parts, coarse, Origin(provenance, packed.sha256), content, code, seen)
    except ValueError as fault:
        raise BadWeights("the file's configuration describes no remodeller") from fault


def _told(packed: Packed) -> tuple[VolumeGanConfig, Coarse, list[int], str]:
    if packed.config.keys() != {"gan", "coarse", "counts", "code"}:
        raise ValueError("unknown or missing keys of a remodeller")
    gan, coarse = dict(packed.config["gan"]), dict(packed.config["coarse"])
    for told, kind in ((gan, VolumeGanConfig), (coarse, Coarse)):
        if told.keys() != {f.name for f in fields(kind)}:
            raise ValueError("unknown or missing keys")
    counts, code = packed.config["counts"], packed.config["code"]
    if type(counts) is not list or not all(type(n) is int for n in counts) or not 1 <= len(counts) <= MOST_FOLDS:
        raise ValueError("every network has a count of the heads of its population")
    if type(code) is not str:
        raise ValueError("a code is text")
    gan |= {name: tuple(gan[name]) for name in ("widths", "blocks")}
    return VolumeGanConfig(**gan), Coarse(**coarse), counts, code


def _net(config: VolumeGanConfig, state: Mapping[str, Tensor], index: int) -> Generator:
    start = f"{index}.net."
    own = {name.removeprefix(start): t for name, t in state.items() if name.startswith(start)}
    return built(lambda: Generator(config), own)


def _content(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> str:
    return sha256(pack(KIND, config, {}, state)).hexdigest()
