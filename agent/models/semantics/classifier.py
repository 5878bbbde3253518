"""The semantic query function Q: which of the public set's semantics an image shows (PrivImage, section 3.2).

Trained on public images alone and frozen: were it fine-tuned on patients, a patient would move the votes of all
others, and Theorem 3.1 would not hold. Two forms behind one face: a classifier of the public set's labels (Eq. 4);
and where nobody labelled the public set, the nearest of the centres that k-means finds among its features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.models.features.extractors import LearnedFeatures, RandomFeatures
from agent.models.features.feature_net import FrozenNetwork
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.image_tensors import to_tensor
from agent.models.weights import NetworkFile, Origin, Provenance, WeightsError, built, pack, unpack

KIND: Final = "semantics"
MOST_BINS: Final = 4_096
_LONGEST: Final = 64  # characters of a name
_MOST_NAMES: Final = 49_152  # characters of all names as JSON: a file's header holds 65,536
_WIDEST: Final = 512  # channels of random features that a file may ask for: their filters are drawn, not read
_AT_ONCE: Final = 256  # images
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


def named(bins: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the bins, which are public and stand in files and pages.

    Raises:
        ValueError: fewer than two, too many, one twice, or one that is empty, long or cannot be printed.
    """
    if not 2 <= len(bins) <= MOST_BINS or len(set(bins)) != len(bins):
        raise ValueError(f"there are 2 to {MOST_BINS} semantics, and no two of one name")
    if not all(isinstance(b, str) and 0 < len(b) <= _LONGEST and b.isprintable() for b in bins):
        raise ValueError(f"the name of a semantic has 1 to {_LONGEST} printable characters")
    if len(json.dumps(bins)) > _MOST_NAMES:
        raise ValueError("the names of the semantics are too long: shorten them")
    return bins


class Classifier(nn.Module):
    """A trunk, the mean of its last map, one linear layer: -log Q_i(x) is what Eq. 4 sums up."""

    def __init__(self, architecture: TrunkArchitecture, bins: int) -> None:
        """Make the layers; call inside ``seeded``."""
        super().__init__()
        self.architecture = architecture
        self.trunk = Trunk(architecture)
        self.linear = nn.Linear(architecture.widths[-1], bins)

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, side, side) in [-1, 1] -> (n, NS) logits."""
        out: Tensor = self.linear(self.trunk(images)[-1].mean(dim=(2, 3)))
        return out


class SemanticCodebook(nn.Module):
    """The centres of clusters of features, in units of the public images' own spread."""

    mean: Tensor
    spread: Tensor
    centres: Tensor
    width: Tensor

    def __init__(self, size: int, bins: int) -> None:
        """Make room for features of ``size`` numbers."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("spread", torch.ones(size))
        self.register_buffer("centres", torch.zeros(bins, size))
        self.register_buffer("width", torch.ones(()))  # mean squared distance of public images to their centres

    def forward(self, embedded: Tensor) -> Tensor:
        """(n, d) features -> (n, NS): minus the squared distances to the centres, in units of ``width``."""
        near = (embedded.double() - self.mean.double()) / self.spread.double()
        # by differences and not by a matrix product, whose rounding would depend on how many images there are
        apart = torch.cdist(near, self.centres.double(), compute_mode="donot_use_mm_for_euclid_dist")
        out: Tensor = -apart.square() / self.width.double()
        return out


class Nearest(nn.Module):
    """Features, then the codebook."""

    def __init__(self, features: RandomFeatures | LearnedFeatures, codebook: SemanticCodebook) -> None:
        """Put the two together."""
        super().__init__()
        self.features = features
        self.codebook = codebook

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, side, side) in [-1, 1] -> (n, NS) logits."""
        out: Tensor = self.codebook(self.features.embed(images))
        return out


class Semantics(FrozenNetwork):
    """A frozen semantic query function with the names of its bins."""

    def __init__(
        self, name: str, net: Classifier | Nearest, bins: tuple[str, ...], shape: tuple[int, ...], origin: Origin
    ) -> None:
        """Freeze the network.

        Args:
            name: of the query function; short and lower-case.
            net: (n, 1 | 3, s, s) in [-1, 1] -> (n, NS) logits.
            bins: (NS,) names.
            shape: (s, s) or (s, s, 3): what it was trained on, and what every image is made into.
            origin: of the file.
        Raises:
            ValueError: a name or shape of no query function.
        """
        if not _NAME.fullmatch(name):
            raise ValueError("semantics have a short lower-case name")
        if len(shape) not in (2, 3) or shape[2:] not in ((), (3,)) or shape[0] != shape[1]:
            raise ValueError("semantics see squares, (s, s) or (s, s, 3)")
        super().__init__(name, origin, shape[2] if len(shape) == 3 else 1)
        self.net = net
        self.bins = named(bins)
        self.shape = shape
        self.freeze()

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """The maps of the network beneath."""
        net = self.net.trunk if isinstance(self.net, Classifier) else self.net.features.maps
        out: list[Tensor] = net(self.prepared(images, exactly=self.shape[0]), depth)
        return out

    def probabilities(self, images: NDArray[np.float32]) -> NDArray[np.float64]:
        """How probable each semantic is, for each image by itself: Q_i(x).

        An image's row depends on no other image but by rounding, which may differ with the size of a batch. Where
        one person's rows must not depend on another's at all, ask for each person's images by themselves.

        Args:
            images: (n, h, w) grey or (n, h, w, 3) RGB in [0, 1], of any size and number.
        Returns:
            (n, NS), rows that sum to 1.
        """
        where = next(p for p in (*self.parameters(), *self.buffers()))
        rows = [np.zeros((0, len(self.bins)))]
        with torch.no_grad():
            for start in range(0, len(images), _AT_ONCE):
                seen = self.prepared(
                    to_tensor(images[start : start + _AT_ONCE]).to(where.device), exactly=self.shape[0]
                )
                rows.append(self.net(seen).double().softmax(dim=1).cpu().numpy())
        return np.concatenate(rows)

    def most_probable(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The bin of each image of a public set (n, h, w[, 3]): (n,), the most probable; of equals, the first."""
        rows = [np.zeros(0, np.int64)]
        for start in range(0, len(images), _AT_ONCE):
            unit = images[start : start + _AT_ONCE].astype(np.float32) / np.float32(255)
            rows.append(self.probabilities(unit).argmax(axis=1).astype(np.int64))
        return np.concatenate(rows)


def semantics_bytes(
    name: str, net: Classifier | Nearest, bins: tuple[str, ...], shape: tuple[int, ...], notes: Mapping[str, Any]
) -> bytes:
    """Semantics as one file; a cluster file holds its features too, or what they are drawn from."""
    told: dict[str, Any] = {"bins": list(named(bins)), "name": name, "shape": list(shape)}
    if isinstance(net, Classifier):
        return pack(KIND, {**told, "classifier": asdict(net.architecture)}, notes, net.state_dict())
    state = {f"codebook.{key}": t for key, t in net.codebook.state_dict().items()}
    told["size"] = net.codebook.centres.shape[1]
    if isinstance(net.features, RandomFeatures):
        return pack(KIND, {**told, "random": dict(net.features.told)}, notes, state)
    state |= {f"trunk.{key}": t for key, t in net.features.trunk.state_dict().items()}
    learned = {"architecture": asdict(net.features.trunk.architecture), "name": net.features.name}
    return pack(KIND, {**told, "learned": learned}, notes, state)


def semantics_from(raw: bytes, provenance: Provenance = "file") -> Semantics:
    """Read semantics.

    Args:
        raw: what :func:`semantics_bytes` wrote.
        provenance: ``public`` only where the site's configuration vouches for the file's digest.
    Raises:
        WeightsError: not such a file, or its configuration describes no query function.
    """
    packed = unpack(raw, KIND)
    origin = Origin(provenance, packed.sha256)
    try:
        told = packed.config
        forms = told.keys() & {"classifier", "learned", "random"}
        size = set() if "classifier" in forms else {"size"}
        if len(forms) != 1 or told.keys() != {"bins", "name", "shape", *size, *forms}:
            raise ValueError("semantics are of one form, with bins, a name and a shape")
        bins, shape = named(tuple(told["bins"])), tuple(int(s) for s in told["shape"])
        if not all(2 <= s <= 1024 for s in shape[:2]):
            raise ValueError("an image has 2 to 1024 pixels a side")
        net = _classifier(packed, len(bins)) if "classifier" in forms else _nearest(packed, len(bins), origin)
        if isinstance(net, Nearest) and not bool((net.codebook.width > 0) & (net.codebook.spread > 0).all()):
            raise ValueError("spreads are positive")
        return Semantics(str(told["name"]), net, bins, shape, origin)
    except WeightsError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as fault:
        raise WeightsError("the file's configuration describes no semantic query function") from fault


def _classifier(packed: NetworkFile, bins: int) -> Classifier:
    architecture = _architecture(packed.config["classifier"])
    if packed.config["shape"] != [architecture.side] * 2 + [3] * (architecture.channels == 3):
        raise ValueError("a classifier sees images of its trunk's size")
    return built(lambda: Classifier(architecture, bins), packed.state)


def _nearest(packed: NetworkFile, bins: int, origin: Origin) -> Nearest:
    parts: dict[str, dict[str, Tensor]] = {"codebook": {}, "trunk": {}}
    for key, tensor in packed.state.items():
        part, _, rest = key.partition(".")
        parts[part][rest] = tensor  # a part of another name is refused as a key that is not known
    size = packed.config["size"]
    if type(size) is not int or not 1 <= size <= 1 << 16:
        raise ValueError("features have a number of numbers")
    codebook = built(lambda: SemanticCodebook(size, bins), parts["codebook"])
    features = _features(packed.config, parts["trunk"], origin)
    if features.embed(torch.zeros(1, features.channels, 8, 8)).shape[1] != size:
        raise ValueError("the centres are not those of these features")
    return Nearest(features, codebook)


def _features(
    told: Mapping[str, Any], state: Mapping[str, Tensor], origin: Origin
) -> RandomFeatures | LearnedFeatures:
    if "random" in told:
        if state:
            raise ValueError("random features are drawn, not read")
        return _random(told["random"])
    learned = told["learned"]
    if learned.keys() != {"architecture", "name"}:
        raise ValueError("learned features have an architecture and a name")
    architecture = _architecture(learned["architecture"])
    return LearnedFeatures(str(learned["name"]), built(lambda: Trunk(architecture), state), origin)


def _architecture(told: Mapping[str, Any]) -> TrunkArchitecture:
    if told.keys() != {f.name for f in fields(TrunkArchitecture)}:
        raise ValueError("unknown or missing keys of a trunk")
    return TrunkArchitecture(**told)


def _random(told: Mapping[str, Any]) -> RandomFeatures:
    if told.keys() != {"channels", "depth", "most", "seed", "width"}:
        raise ValueError("unknown or missing keys of random features")
    if not all(type(v) is int for v in told.values()):
        raise ValueError("random features are described by whole numbers")
    if not told["width"] * min(1 << (told["depth"] - 1), 8) <= _WIDEST:
        raise ValueError("random features of a file are no wider than those of this product")
    return RandomFeatures(**told)
