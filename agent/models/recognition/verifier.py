"""A siamese verifier and a retrieval embedder on one trunk: are these two images of one person?

After Packhäuser et al. 2022 (Deep learning-based patient re-identification), as Privacy Distillation uses both
(section 3.1): one network whose two branches share weights and are fused, and one that only embeds images, for
nearest-neighbour search. Some things differ. The paper's embedding passes a sigmoid before the branches are fused,
and its score a second one: both saturate, which is why no threshold from 0.05 to 0.90 changed anything there (section
4.3). Here the features have unit length and the score is a logit in float32, so the scores of strangers have a tail
(:mod:`agent.models.recognition.score_tail`), which gives a threshold for a gallery's size. The branches are fused by
|a - b| and its square. Both heads read a grid of cells and not one mean, since the position of a rib identifies a
person. An image and its mirror image give the same features by construction, as does another exposure, so none of
this has to be learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, normalize, silu

from agent.intervals import Proportion
from agent.models.features.feature_net import FrozenNetwork
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.recognition.recogniser import RecogniserError
from agent.models.recognition.score_tail import Tail, tail_from
from agent.models.weights import Origin, Provenance, WeightsError, built, pack, unpack

KIND: Final = "verifier"
GALLERY: Final = 1_000  # images of the gallery for which a file says what it catches ...
FALSE_MATCHES: Final = 0.01  # ... where an image of nobody is matched with this probability
KNOWN: Final = 0.8  # the area under the curve of a verifier that judges, and the share of nearest images, at least
FOUND: Final = 0.5  # of near-duplicates of images that it never saw it must match more than this share
CHANGES: Final = ("contrast", "rotation", "crop", "noise", "flip")  # every file says what it catches of these ...
MADE: Final = "generator"  # ... and of a generator's near-duplicates, where it was trained with one
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_MOST: Final = 4096
_EVEN: Final = 1e-2  # added to an image's standard deviation: an empty image stays one


@dataclass(frozen=True, slots=True)
class VerifierArchitecture:
    """A trunk and what is read from it."""

    trunk: TrunkArchitecture
    grid: int = 8  # the last map is averaged to grid x grid cells
    features: int = 64  # f, for verification
    hidden: int = 32  # of the fusion
    embedding: int = 64  # d, for retrieval

    def __post_init__(self) -> None:
        """Refuse what is no verifier."""
        sizes = (self.features, self.hidden, self.embedding)
        if not all(type(s) is int and 2 <= s <= _MOST for s in sizes):
            raise ValueError(f"features, hidden units and an embedding are between 2 and {_MOST}")
        if type(self.grid) is not int or not 1 <= self.grid <= self.trunk.left:
            raise ValueError("the grid is no finer than the trunk's last map")


@dataclass(frozen=True, slots=True)
class VerifierQuality:
    """A verifier's quality on people of its public set who are in neither training nor the tail.

    Pairs share people, so a person counts as one trial of each interval (Wilson's), however many images there are:
    for a mean of shares that interval is too wide, not too narrow. It does not apply to other kinds of images.
    """

    auc: Proportion  # of the logits: pairs of one person's images against pairs of two persons'
    map_at_r: Proportion  # of the embeddings: mean average precision at R (Musgrave et al. 2020)
    precision_at_1: Proportion  # of the embeddings: the nearest image is one of the same person
    matched: Proportion  # pairs of one person's images, at the threshold for GALLERY and FALSE_MATCHES
    caught: Mapping[str, Proportion]  # near-duplicates, by CHANGES and maybe MADE, at that threshold

    def __post_init__(self) -> None:
        """Refuse what is no judgement."""
        told = (self.auc, self.map_at_r, self.precision_at_1, self.matched)
        if not all(type(share) is Proportion for share in told):
            raise ValueError("a judgement is made of shares")
        if type(self.caught) is not dict or self.caught.keys() - {MADE} != set(CHANGES):
            raise ValueError("a judgement says what is caught of every change")
        if not all(type(share) is Proportion for share in self.caught.values()):
            raise ValueError("a judgement is made of shares")


class VerifierFeatures(NamedTuple):
    """Images as a verifier sees them."""

    features: Tensor  # (n, f) float32 of unit length, for :meth:`Verifier.logits`
    embeddings: Tensor  # (n, d) float32 of unit length, for the nearest


class Fusion(nn.Module):
    """Two images' features to one logit, the same in either order: |a - b| and its square, by a line and a network.

    The line starts as a scaled cosine, 2 - 2 cos being |a - b|² of unit vectors, so that the first step already tells
    the more alike from the less. A product a b would say as much, but a copy must have the highest score whoever is
    copied, and a difference of 0 is the same for everybody.
    """

    def __init__(self, features: int, hidden: int) -> None:
        """Make the layers; call inside ``seeded``."""
        super().__init__()
        self.hidden = nn.Linear(2 * features, hidden)
        self.out = nn.Linear(hidden, 1)
        self.line = nn.Linear(2 * features, 1)
        self.scale = features**0.5  # numbers of a unit vector, made about 1
        with torch.no_grad():
            self.line.weight.zero_()
            self.line.weight[:, features:] = -5.0
            self.line.bias.fill_(5.0)  # together 10 cos - 5

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """(p, f) and (p, f) -> (p,)."""
        apart = (a - b).abs()
        both = torch.cat([apart, apart.square()], dim=1)
        out: Tensor = self.line(both) + self.out(silu(self.hidden(both * self.scale)))
        return out[:, 0]


class VerifierNet(nn.Module):
    """What is trained: trunk, grid of cells, and two heads."""

    def __init__(self, architecture: VerifierArchitecture) -> None:
        """Make the layers; call inside ``seeded``."""
        super().__init__()
        self.architecture = architecture
        cells = architecture.trunk.widths[-1] * architecture.grid**2
        self.trunk = Trunk(architecture.trunk)
        self.verify = nn.Linear(cells, architecture.features)
        self.retrieve = nn.Linear(cells, architecture.embedding)
        self.fusion = Fusion(architecture.features, architecture.hidden)

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """The trunk's maps of (n, channels, side, side) in [-1, 1], and beside them those of the mirrored images.

        The latter are mirrored back, so that every map (n, 2 c_i, h_i, w_i) lies over the image. Light and contrast
        are taken out first.
        """
        mean = images.mean(dim=(1, 2, 3), keepdim=True)
        spread = images.std(dim=(1, 2, 3), keepdim=True, unbiased=False)
        even = (images - mean) / (spread + _EVEN)
        both = self.trunk(torch.cat([even, even.flip(3)]), depth)
        return [torch.cat([m[: len(images)], m[len(images) :].flip(3)], dim=1) for m in both]

    def seen(self, last: Tensor) -> VerifierFeatures:
        """What both heads read from the last map (n, 2 c, h, w): the same of an image and of its mirror image."""
        one, other = last.chunk(2, dim=1)
        cells = adaptive_avg_pool2d((one + other.flip(3)) / 2, self.architecture.grid).flatten(1)
        return VerifierFeatures(*(normalize(head(cells).float(), dim=1) for head in (self.verify, self.retrieve)))

    def forward(self, images: Tensor) -> VerifierFeatures:
        """(n, channels, side, side) in [-1, 1] -> features and embeddings."""
        return self.seen(self.maps(images)[-1])


class Verifier(FrozenNetwork):
    """A trained verifier, with its distribution of false matches and its measured quality."""

    def __init__(self, name: str, net: VerifierNet, tail: Tail, judged: VerifierQuality, origin: Origin) -> None:
        """Freeze the network.

        Raises:
            ValueError: the name is not short and lower-case.
        """
        if not _NAME.fullmatch(name):
            raise ValueError("a verifier has a short lower-case name")
        super().__init__(name, origin, net.architecture.trunk.channels)
        self.net = net
        self.tail = tail
        self.judged = judged
        self.freeze()

    def look(self, images: Tensor) -> VerifierFeatures:
        """Images (n, 1 | 3, h, w) in [-1, 1] of any size, as both heads see them."""
        return self.seen(self.maps(images)[-1])

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """Maps (n, 2 c_i, h_i, w_i), shallow first, of the images and of their mirror images; differentiable."""
        return self.net.maps(self.prepared(images, exactly=self.net.architecture.trunk.side), depth)

    def seen(self, last: Tensor) -> VerifierFeatures:
        """What is read from the last of the maps; differentiable."""
        return self.net.seen(last)

    def embed(self, images: Tensor) -> Tensor:
        """The embeddings alone, (n, d)."""
        return self.look(images).embeddings

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        """Log-odds (p,) float32 that images are of one person: features (p, f) and (p, f), in either order.

        The odds are those of training, where every other pair was of one person: they are for ranking. What a score
        means is said by :attr:`tail`.

        Raises:
            ValueError: not two times (p, f).
        """
        if a.shape != b.shape or a.ndim != 2 or a.shape[1] != self.net.architecture.features:
            raise ValueError("features are two times (p, f)")
        out: Tensor = self.net.fusion(a.float(), b.float()).float()
        return out

    def probability(self, a: Tensor, b: Tensor) -> Tensor:
        """The logits by way of a sigmoid, for people: near 0 and 1 it cannot be told apart what the logits can."""
        return torch.sigmoid(self.logits(a, b))

    def demand(self) -> None:
        """Refuse a verifier that knows too few people again to vet anything.

        With the worse end of every interval: the area under the curve must be above ``KNOWN``, and of all
        near-duplicates of images that it never saw more than ``FOUND`` must reach the threshold. This is about the
        public set: what it finds among a cohort, only images planted there can show.

        Raises:
            RecogniserError: it does not. The text holds figures of the public set only.
        """
        judged, worst = self.judged, sum(share.low for share in self.judged.caught.values()) / len(self.judged.caught)
        if not (judged.auc.low > KNOWN and worst > FOUND):
            raise RecogniserError(
                f"on people it was not trained on, it must reach an area under the curve above {KNOWN:g}, and match "
                f"more than {FOUND:g} of near-duplicates. This one reaches {judged.auc.value:.3f} "
                f"[{judged.auc.low:.3f}, {judged.auc.high:.3f}], and matches {worst:.3f} at the least: train it "
                f"longer, in a new folder, or on more people with more images each"
            )


def verifier_bytes(
    name: str, net: VerifierNet, tail: Tail, judged: VerifierQuality, notes: Mapping[str, Any]
) -> bytes:
    """A verifier as one file; the tail and the judgement are part of it."""
    config = {
        "architecture": asdict(net.architecture),
        "judged": asdict(judged),
        "name": name,
        "tail": asdict(tail),
    }
    return pack(KIND, config, notes, net.state_dict())


def verifier_from(raw: bytes, provenance: Provenance = "file") -> Verifier:
    """Read a verifier.

    Args:
        raw: what :func:`verifier_bytes` wrote.
        provenance: ``public`` only where the site's configuration vouches for the file's digest.
    Raises:
        WeightsError: not such a file, or its configuration describes no verifier.
    """
    packed = unpack(raw, KIND)
    try:
        if packed.config.keys() != {"architecture", "judged", "name", "tail"}:
            raise ValueError("a verifier has an architecture, a judgement, a name and a tail")
        told = dict(packed.config["architecture"])
        _known(told, VerifierArchitecture)
        _known(told["trunk"], TrunkArchitecture)
        architecture = VerifierArchitecture(**{**told, "trunk": TrunkArchitecture(**told["trunk"])})
        judged, tail = _judged(packed.config["judged"]), tail_from(packed.config["tail"])
        name = packed.config["name"]
        if type(name) is not str or not _NAME.fullmatch(name):
            raise ValueError("a verifier has a short lower-case name")
    except (TypeError, ValueError, KeyError, AttributeError) as fault:
        raise WeightsError("the file's configuration describes no verifier") from fault
    net = built(lambda: VerifierNet(architecture), packed.state)
    return Verifier(name, net, tail, judged, Origin(provenance, packed.sha256))


def _judged(told: Mapping[str, Any]) -> VerifierQuality:
    _known(told, VerifierQuality)
    caught = {kind: _share(share) for kind, share in dict(told["caught"]).items()}
    auc, average, first, matched = (_share(told[n]) for n in ("auc", "map_at_r", "precision_at_1", "matched"))
    return VerifierQuality(auc, average, first, matched, caught)


def _share(told: Mapping[str, Any]) -> Proportion:
    _known(told, Proportion)
    return Proportion(**told)


def _known(told: Mapping[str, Any], kind: type[Any]) -> None:
    if told.keys() != {f.name for f in fields(kind)}:
        raise ValueError(f"unknown or missing keys of {kind.__name__}")
