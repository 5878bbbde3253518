"""Recognisers: one unit vector for an image, close for images of one person, and the distance that separates.

An identity embedding in the manner of siamese networks, trained with an angular margin (ArcFace, Deng et al. 2019).
AnonFACES measures re-identification with a face network and its distance threshold (section 4.1). This network does
so for any modality, and its threshold is calibrated on held-out people, at a false match rate that the file states. A
single recogniser that finds nothing proves little: measure with two more, of other seeds and architectures. One that
recognises nobody proves nothing at all: :meth:`Calibration.demand`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, linear, normalize

from agent.intervals import Proportion
from agent.models.features.feature_net import FrozenNetwork
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.weights import Origin, Provenance, WeightsError, built, pack, unpack
from protos.common.errors import RefusedError

KIND: Final = "recogniser"
KNOWN: Final = 0.5  # of the pairs of one person's images a recogniser must match more than this share
APART: Final = 0.25  # and by this much more than of two persons' images
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class RecogniserArchitecture:
    """A trunk and what is read from it."""

    trunk: TrunkArchitecture
    embedding: int = 128  # d
    grid: int = 4  # the last map is averaged to grid x grid cells and not to one: where a vessel lies is identity

    def __post_init__(self) -> None:
        """Refuse what is no recogniser."""
        if type(self.embedding) is not int or type(self.grid) is not int or not 2 <= self.embedding <= 4096:
            raise ValueError("an embedding has between 2 and 4096 numbers")
        if not 1 <= self.grid <= self.trunk.left:
            raise ValueError("the grid is no finer than the trunk's last map")


class RecogniserError(RefusedError, ValueError):
    """A recogniser that cannot recognise people, so that its finding nobody means nothing."""


@dataclass(frozen=True, slots=True)
class RecogniserQuality:
    """A recogniser's quality on people of its public set who are in neither training nor calibration.

    Pairs of images share people, so a person counts as one trial of each interval, however many images there are. The
    figures apply to images of the public set's kind, not to others.
    """

    equal_error: float
    matched: Proportion  # true matches at the file's threshold: pairs of one person's images
    mistaken: Proportion  # false matches at the file's threshold: pairs of two persons' images
    first: Proportion  # rank 1: the nearest of one image of everybody is the person's own

    def __post_init__(self) -> None:
        """Refuse what is no judgement."""
        if not all(type(share) is Proportion for share in (self.matched, self.mistaken, self.first)):
            raise ValueError("a judgement is made of shares")
        if type(self.equal_error) is not float or not 0 <= self.equal_error <= 1:
            raise ValueError("an equal error rate lies in [0, 1]")


@dataclass(frozen=True, slots=True)
class Calibration:
    """A threshold, what it was measured on, pairs of held-out people of the public set, and how good it proved.

    The interval of the false match rate is Wilson's at 95 % as if pairs were independent; pairs share people, so the
    truth is a little wider. Who vouches for a file vouches for these figures too.
    """

    threshold: float  # Euclidean distance between unit vectors, below which two images are one person's
    false_match_rate: float  # asked for
    impostors: int  # pairs of two persons, on the calibration identities
    low: float  # the interval of the false match rate, on the calibration identities
    high: float
    judged: RecogniserQuality  # at this threshold, on identities of neither training nor calibration

    def __post_init__(self) -> None:
        """A threshold that means something."""
        told = (self.threshold, self.false_match_rate, self.low, self.high)
        if not all(type(v) is float for v in told) or type(self.impostors) is not int or not self.impostors >= 1:
            raise ValueError("a calibration is a threshold, rates and a number of pairs")
        if not (0 < self.threshold <= 2 and 0 < self.false_match_rate < 1 and 0 <= self.low <= self.high <= 1):
            raise ValueError("a threshold lies in (0, 2] and rates in [0, 1]")
        if type(self.judged) is not RecogniserQuality:
            raise ValueError("a calibration comes with its judgement")

    def demand(self) -> None:
        """Refuse a recogniser that knows too few people again to vet anything.

        For held-out people it must match more than ``KNOWN`` of the pairs of one person's images, and ``APART`` more
        than of the pairs of two people, with the worse end of both intervals. This is about the public set: only the
        cohort's own images can show whether it recognises the cohort.

        Raises:
            RecogniserError: it does not. The text holds figures of the public set only.
        """
        true, false = self.judged.matched, self.judged.mistaken
        if not (true.low > KNOWN and true.low > false.high + APART):
            raise RecogniserError(
                f"on people it was not trained on, it must match more than {KNOWN:g} of the pairs of one person's "
                f"images, and {APART:g} more than of two persons'. This one matches {_said(true)} and mistakes "
                f"{_said(false)}: train it longer, in a new folder, or on more people with more images each"
            )


def _said(share: Proportion) -> str:
    return f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"


class IdentityNet(nn.Module):
    """What is trained: trunk, grid of cells, one linear map."""

    def __init__(self, architecture: RecogniserArchitecture) -> None:
        """Make the layers; call inside ``seeded``."""
        super().__init__()
        self.architecture = architecture
        self.trunk = Trunk(architecture.trunk)
        self.project = nn.Linear(architecture.trunk.widths[-1] * architecture.grid**2, architecture.embedding)

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, side, side) in [-1, 1] -> (n, embedding), not yet of unit length."""
        cells = adaptive_avg_pool2d(self.trunk(images)[-1], self.architecture.grid)
        out: Tensor = self.project(cells.flatten(1))
        return out


class Recogniser(FrozenNetwork):
    """A trained recogniser with its threshold."""

    def __init__(self, name: str, net: IdentityNet, calibration: Calibration, origin: Origin) -> None:
        """Freeze the network.

        Raises:
            ValueError: the name is not short and lower-case.
        """
        if not _NAME.fullmatch(name):
            raise ValueError("a recogniser has a short lower-case name")
        super().__init__(name, origin, net.architecture.trunk.channels)
        self.net = net
        self.calibration = calibration
        self.freeze()

    @property
    def threshold(self) -> float:
        """Euclidean distance below which two images count as one person's."""
        return self.calibration.threshold

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """The trunk's maps."""
        out: list[Tensor] = self.net.trunk(self._seen(images), depth)
        return out

    def embed(self, images: Tensor) -> Tensor:
        """Images (n, 1 | 3, h, w) in [-1, 1] of any size as (n, d) float32 of unit length."""
        return normalize(self.net(self._seen(images)).float(), dim=1)

    def _seen(self, images: Tensor) -> Tensor:
        return self.prepared(images, exactly=self.net.architecture.trunk.side)


class AngularMargin(nn.Module):
    """ArcFace's loss (Deng et al. 2019, Eq. 3): the angle to one's own class is made harder by ``margin``."""

    def __init__(self, embedding: int, classes: int, scale: float = 16.0) -> None:
        """A direction for every class; call inside ``seeded``."""
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(classes, embedding)))

    def forward(self, embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
        """Cross-entropy of s cos(θ_y + m) against s cos θ_j: embeddings (n, d), classes (n,), margin in rad."""
        cosine = linear(normalize(embeddings.float(), dim=1), normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        theta = torch.acos(cosine.gather(1, labels[:, None]))
        # beyond π the cosine would rise again; mirrored at -1 it goes on falling
        own = torch.where(theta + margin < torch.pi, torch.cos(theta + margin), -2 - torch.cos(theta + margin))
        return nn.functional.cross_entropy(self.scale * cosine.scatter(1, labels[:, None], own), labels)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distances (n, m) between rows of unit length (n, d) and (m, d): sqrt(2 - 2 cos), in float64."""
    return (2.0 - 2.0 * (a.double() @ b.double().T)).clamp_min(0.0).sqrt()


def recogniser_bytes(name: str, net: IdentityNet, calibration: Calibration, notes: Mapping[str, Any]) -> bytes:
    """A recogniser as one file; threshold, calibration and judgement are part of it."""
    config = {"architecture": asdict(net.architecture), "calibration": asdict(calibration), "name": name}
    return pack(KIND, config, notes, net.state_dict())


def recogniser_from(raw: bytes, provenance: Provenance = "file") -> Recogniser:
    """Read a recogniser.

    Args:
        raw: what :func:`recogniser_bytes` wrote.
        provenance: ``public`` only where the site's configuration vouches for the file's digest.
    Raises:
        WeightsError: not such a file, or its configuration describes no recogniser.
    """
    packed = unpack(raw, KIND)
    try:
        if packed.config.keys() != {"architecture", "calibration", "name"}:
            raise ValueError("a recogniser has an architecture, a calibration and a name")
        told = dict(packed.config["architecture"])
        _known(told, RecogniserArchitecture)
        _known(told["trunk"], TrunkArchitecture)
        architecture = RecogniserArchitecture(**{**told, "trunk": TrunkArchitecture(**told["trunk"])})
        calibration = _calibration(packed.config["calibration"])
        name = str(packed.config["name"])
        if not _NAME.fullmatch(name):
            raise ValueError("a recogniser has a short lower-case name")
    except (TypeError, ValueError, KeyError, AttributeError) as fault:
        raise WeightsError("the file's configuration describes no recogniser") from fault
    net = built(lambda: IdentityNet(architecture), packed.state)
    return Recogniser(name, net, calibration, Origin(provenance, packed.sha256))


def _calibration(told: Mapping[str, Any]) -> Calibration:
    _known(told, Calibration)
    judged = dict(told["judged"])
    _known(judged, RecogniserQuality)
    for name in ("matched", "mistaken", "first"):
        _known(judged[name], Proportion)
        judged[name] = Proportion(**judged[name])
    return Calibration(**{**told, "judged": RecogniserQuality(**judged)})


def _known(told: Mapping[str, Any], kind: type[Any]) -> None:
    if told.keys() != {f.name for f in fields(kind)}:
        raise ValueError(f"unknown or missing keys of {kind.__name__}")
