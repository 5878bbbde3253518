"""The aligner: how well an image fits its prompt, s_align of Privacy Distillation (section 3.2).

A small CLIP (Radford et al. 2021): an image and a prompt each become a unit vector, and s_align is their cosine. The
paper uses CXR-BERT for the prompts, which needs real reports; here a transformer layer reads the public vocabulary of
:mod:`agent.models.diffusion.prompts`, and both halves are trained on public or synthetic images. The file states its
quality, measured on held-out images: an untrained aligner ranks at random (:meth:`Aligner.demand`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import log
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, normalize, scaled_dot_product_attention, silu

from agent.intervals import Proportion
from agent.models.diffusion.prompts import Conditions, conditions_from
from agent.models.features.feature_net import FrozenNetwork
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.weights import Origin, Provenance, WeightsError, built, pack, unpack
from protos.common.errors import RefusedError

KIND: Final = "aligner"
COLDEST: Final = 0.01  # the temperature learns, but not below this (Radford et al. 2021, section 2.5)
_AT_ONCE: Final = 256  # images
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class AlignerError(RefusedError, ValueError):
    """An aligner that does not know which condition an image shows: the best by its scores is any."""


class OtherConditionsError(RefusedError, ValueError):
    """An aligner learned other conditions than those asked for: its scores would be of other words."""


@dataclass(frozen=True, slots=True)
class AlignerArchitecture:
    """A trunk for images, a layer for words, and the space where they meet."""

    trunk: TrunkArchitecture
    embedding: int = 64  # numbers of the vector that an image or a prompt becomes
    grid: int = 4  # the trunk's last map is averaged to grid x grid cells: where fluid stands says what it is
    width: int = 64  # of a word

    def __post_init__(self) -> None:
        """Refuse what is no aligner."""
        sizes = (self.embedding, self.grid, self.width)
        if not all(type(v) is int for v in sizes) or not (2 <= self.embedding <= 4096 and 4 <= self.width <= 4096):
            raise ValueError("an embedding has 2 to 4096 numbers, a word 4 to 4096")
        if not 1 <= self.grid <= self.trunk.left or self.width % 4:
            raise ValueError("the grid is no finer than the trunk's last map, and a word's width a multiple of 4")


@dataclass(frozen=True, slots=True)
class AlignerQuality:
    """The aligner's quality on held-out images of its public set. It does not apply to other images.

    A person counts as one trial of the interval, however many images there are.
    """

    right: Proportion  # of the images whose own condition fits best of all conditions
    chance: float  # the share of the commonest condition: what answering it always would reach
    own: float  # mean s_align of images with their own condition
    others: float  # and with all others
    findings: tuple[float, ...]  # for each of the conditions' findings: AUC of telling who shows it; see training

    def __post_init__(self) -> None:
        """Refuse what is no judgement; NaN is none."""
        if type(self.right) is not Proportion or not all(
            type(v) is float for v in (self.chance, self.own, self.others)
        ):
            raise ValueError("an aligner's fitness is a share and numbers")
        if not (0 < self.chance <= 1 and -1 <= self.own <= 1 and -1 <= self.others <= 1):
            raise ValueError("a chance is a share, and an alignment a cosine")
        if not self.findings or not all(type(v) is float and 0 <= v <= 1 for v in self.findings):
            raise ValueError("there is a finding, and an AUC lies in [0, 1]")


class PromptEncoder(nn.Module):
    """Tokens as one vector: embedding and place, one transformer layer, the mean over the words."""

    def __init__(self, words: int, length: int, width: int) -> None:
        """Make the layers; call inside ``seeded``."""
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.norm1, self.norm2, self.last = (nn.LayerNorm(width) for _ in range(3))
        self.attended, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) int64, a word at least in each row -> (n, width)."""
        there = tokens > 0
        x = self.table(tokens) + self.places
        # (n, 4 heads, length, width / 4) of each; nothing looks at what is no word
        query, key, value = self.attended(self.norm1(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None, :])
        x = x + self.mixed(seen.transpose(1, 2).flatten(2))
        x = self.last(x + self.narrow(silu(self.wide(self.norm2(x)))))
        out: Tensor = (x * there[:, :, None]).sum(dim=1) / there.sum(dim=1, keepdim=True)
        return out


class AlignerNet(nn.Module):
    """What is trained: two encoders into one space, and the temperature of their contrast."""

    def __init__(self, architecture: AlignerArchitecture, words: int, length: int) -> None:
        """Make the layers; call inside ``seeded``.

        Args:
            architecture: of both encoders.
            words: tokens of the vocabulary, with 0 for nothing.
            length: tokens of a prompt.
        """
        super().__init__()
        self.architecture = architecture
        self.trunk = Trunk(architecture.trunk)
        self.project = nn.Linear(architecture.trunk.widths[-1] * architecture.grid**2, architecture.embedding)
        self.words = PromptEncoder(words, length, architecture.width)
        self.say = nn.Linear(architecture.width, architecture.embedding)
        self.heat = nn.Parameter(torch.tensor(log(0.07)))  # log of the temperature, as CLIP begins

    def images(self, images: Tensor) -> Tensor:
        """(n, channels, side, side) in [-1, 1] -> (n, embedding) of unit length."""
        cells = adaptive_avg_pool2d(self.trunk(images)[-1], self.architecture.grid)
        return normalize(self.project(cells.flatten(1)).float(), dim=1)

    def prompts(self, tokens: Tensor) -> Tensor:
        """(n, length) int64 -> (n, embedding) of unit length."""
        return normalize(self.say(self.words(tokens)).float(), dim=1)

    def temperature(self) -> Tensor:
        """What cosines are divided by: a number, not below ``COLDEST``."""
        return self.heat.exp().clamp_min(COLDEST)


class Aligner(FrozenNetwork):
    """A trained aligner with its conditions and its quality for each."""

    def __init__(
        self, name: str, net: AlignerNet, conditions: Conditions, fitness: AlignerQuality, origin: Origin
    ) -> None:
        """Freeze the network.

        Raises:
            ValueError: the name is not short and lower-case, or the judgement is of other findings.
        """
        if not _NAME.fullmatch(name) or len(fitness.findings) != len(conditions.findings):
            raise ValueError("an aligner has a short lower-case name, and a judgement of its own findings")
        super().__init__(name, origin, net.architecture.trunk.channels)
        self.net, self.conditions, self.fitness = net, conditions, fitness
        self.freeze()

    def fits(self, conditions: Conditions) -> None:
        """Refuse other conditions than those that it learned.

        Raises:
            OtherConditionsError: other names, templates or length; or the same in another order.
        """
        if conditions.digest != self.conditions.digest:
            raise OtherConditionsError("the aligner learned other conditions or templates: train one for these")

    def demand(self) -> None:
        """Refuse an aligner that by the lower end of its interval knows no more than chance.

        Raises:
            AlignerError: it does not know. The text holds figures of the public set only.
        """
        right, chance = self.fitness.right, self.fitness.chance
        if not right.low > chance:
            raise AlignerError(
                f"on images outside its training, an aligner must find the condition of more than {chance:.3f}, the "
                f"share of the commonest. This one finds {right.value:.3f} [{right.low:.3f}, {right.high:.3f}]: "
                f"train it longer, in a new folder, or on more images"
            )

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """The trunk's maps."""
        out: list[Tensor] = self.net.trunk(self._seen(images), depth)
        return out

    def embed(self, images: Tensor) -> Tensor:
        """Images (n, 1 | 3, h, w) in [-1, 1] of any size as (n, embedding) float32 of unit length."""
        return self.net.images(self._seen(images))

    def scores(self, images: Tensor, tokens: Tensor) -> Tensor:
        """s_align of each image with its own prompt.

        Args:
            images: (n, 1 | 3, h, w) in [-1, 1], of any size.
            tokens: (n, length) int64, of the conditions that it learned (:meth:`fits`).
        Returns:
            (n,) float32, cosines; NaN of an image that is not finite.
        Raises:
            ValueError: tokens that are not of these conditions' form, or a prompt without a word.
        """
        size = self.conditions.vocabulary.size
        if tokens.shape != (len(images), self.conditions.length) or tokens.dtype != torch.int64:
            raise ValueError(f"prompts are {self.conditions.length} tokens for each image, int64")
        if not bool(((tokens >= 0) & (tokens < size)).all() & (tokens > 0).any(dim=1).all()):
            raise ValueError("a prompt holds a token of no word, or no word at all")
        out = [images.new_zeros(0, dtype=torch.float32)]
        with torch.no_grad():
            for start in range(0, len(images), _AT_ONCE):
                seen = self.embed(images[start : start + _AT_ONCE])
                said = self.net.prompts(tokens[start : start + _AT_ONCE].to(images.device))
                out.append((seen * said).sum(dim=1))
        return torch.cat(out)

    def _seen(self, images: Tensor) -> Tensor:
        return self.prepared(images, exactly=self.net.architecture.trunk.side)


def aligner_bytes(
    name: str, net: AlignerNet, conditions: Conditions, fitness: AlignerQuality, notes: Mapping[str, Any]
) -> bytes:
    """An aligner as one file; its conditions and what it knows of them are part of it."""
    told = {"architecture": asdict(net.architecture), "conditions": conditions.told(), "name": name}
    return pack(KIND, {**told, "fitness": asdict(fitness)}, notes, net.state_dict())


def aligner_from(raw: bytes, provenance: Provenance = "file") -> Aligner:
    """Read an aligner.

    Args:
        raw: what :func:`aligner_bytes` wrote.
        provenance: ``public`` only where the site's configuration vouches for the file's digest.
    Raises:
        WeightsError: not such a file, or its configuration describes no aligner.
    """
    packed = unpack(raw, KIND)
    try:
        if packed.config.keys() != {"architecture", "conditions", "fitness", "name"}:
            raise ValueError("an aligner has an architecture, conditions, a fitness and a name")
        architecture = _architecture(packed.config["architecture"])
        conditions = conditions_from(packed.config["conditions"])
        fitness = _fitness(packed.config["fitness"])
        if len(fitness.findings) != len(conditions.findings) or not _NAME.fullmatch(str(packed.config["name"])):
            raise ValueError("an aligner has a short lower-case name, and a judgement of its own findings")
    except (TypeError, ValueError, KeyError, AttributeError) as fault:
        raise WeightsError("the file's configuration describes no aligner") from fault
    net = built(lambda: AlignerNet(architecture, conditions.vocabulary.size, conditions.length), packed.state)
    return Aligner(str(packed.config["name"]), net, conditions, fitness, Origin(provenance, packed.sha256))


def _architecture(told: Mapping[str, Any]) -> AlignerArchitecture:
    _known(told, AlignerArchitecture)
    _known(told["trunk"], TrunkArchitecture)
    return AlignerArchitecture(**{**told, "trunk": TrunkArchitecture(**told["trunk"])})


def _fitness(told: Mapping[str, Any]) -> AlignerQuality:
    _known(told, AlignerQuality)
    _known(told["right"], Proportion)
    return AlignerQuality(**{**told, "right": Proportion(**told["right"]), "findings": tuple(told["findings"])})


def _known(told: Mapping[str, Any], kind: type[Any]) -> None:
    if told.keys() != {f.name for f in fields(kind)}:
        raise ValueError(f"unknown or missing keys of {kind.__name__}")
