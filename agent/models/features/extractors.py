"""The two feature networks that need nobody's weights: random, and learned on public images.

Random features are the default: they leak nothing, need no file and are the same everywhere. Random networks can rank
generators (Fréchet distance in a random convolutional network's features), and their Gram matrices describe style;
their numbers do not compare with those of Inception.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d, pad, relu

from agent.models.features.feature_net import FrozenNetwork, depth_of
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.weights import Origin, Provenance, WeightsError, built, pack, unpack

KIND: Final = "features"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
SMALLEST: Final = 4  # pixels a side: below, there is no texture left to describe, and nothing is halved any more


class RandomFeatures(FrozenNetwork):
    """A convolutional network with fixed random orthogonal filters: provenance ``random``.

    Level i is two 3x3 convolutions with ReLU at 1 / 2^i of the image's size (VGG's first block, without its
    training), after averaging by 2. Filters are orthogonal, so that no level loses what the one before it saw; the
    first layer's are then freed of their mean, but for one, so that brightness does not drown contrast. Drawn by
    Philox from the seed, factored in float64: the same numbers on every machine, and nobody's global generator moves.
    """

    def __init__(self, seed: int = 0, width: int = 32, depth: int = 4, channels: int = 3, most: int = 256) -> None:
        """Draw the filters.

        Args:
            seed: of the filters; two seeds are two extractors.
            width: channels of the first level; doubled at every level, to 8 times at most.
            depth: levels, so maps.
            channels: 1 (colour is seen as its luma) or 3.
            most: pixels a side; larger images are averaged down to it.
        Raises:
            ValueError: a parameter out of range.
        """
        if not (0 <= seed < 1 << 64 and 4 <= width <= 512 and 1 <= depth <= 8 and channels in (1, 3) and most >= 8):
            raise ValueError("random features have a seed, 4 to 512 wide, 1 to 8 deep, 1 or 3 channels")
        told = {"channels": channels, "depth": depth, "most": most, "seed": seed, "width": width}
        digest = hashlib.sha256(json.dumps(["random-features-1", told], sort_keys=True).encode()).hexdigest()
        super().__init__(f"random-{channels}x{width}x{depth}-s{seed}", Origin("random", digest), channels)
        self.most = most
        self.told: Mapping[str, int] = told  # everything that they are drawn from
        rng = np.random.Generator(np.random.Philox(seed))
        self.filters = nn.ParameterList()
        inputs = channels
        for level in range(depth):
            outputs = width * min(1 << level, 8)
            for enters in (inputs, outputs):
                self.filters.append(nn.Parameter(torch.from_numpy(_filters(rng, outputs, enters, len(self.filters)))))
            inputs = outputs
        self.freeze()

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """Feature maps (n, c_i, h_i, w_i) after every level; the first has the image's own size."""
        x, out = self.prepared(images, most=self.most), []
        for level in range(depth_of(depth, len(self.filters) // 2)):
            if level and min(x.shape[-2:]) >= 2 * SMALLEST:
                x = avg_pool2d(x, 2)
            for filters in (self.filters[2 * level], self.filters[2 * level + 1]):
                x = relu(conv2d(pad(x, (1, 1, 1, 1), mode="replicate"), filters))
            out.append(x)
        return out


def _filters(rng: np.random.Generator, outputs: int, inputs: int, place: int) -> Any:
    """(outputs, inputs, 3, 3) float32, orthogonal, with the gain that keeps the power through a ReLU."""
    fan = inputs * 9
    drawn = rng.standard_normal((max(outputs, fan), min(outputs, fan)))
    q, r = np.linalg.qr(drawn)
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)  # QR is unique up to these signs
    rows = q if outputs >= fan else q.T
    if place == 0:
        kernels = rows.reshape(outputs, inputs, 9)
        kernels[1:] -= kernels[1:].mean(axis=2, keepdims=True)
        rows = kernels.reshape(outputs, fan)
    # rows at unit length (those of a tall matrix, and the freed ones, are shorter), times He's gain for ReLU
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True) * np.sqrt(2.0)
    return rows.reshape(outputs, inputs, 3, 3).astype(np.float32)


class LearnedFeatures(FrozenNetwork):
    """A trunk trained by self-supervision on public images (:mod:`agent.models.features.simclr_training`)."""

    def __init__(self, name: str, trunk: Trunk, origin: Origin) -> None:
        """Freeze the trunk.

        Raises:
            ValueError: the name is not short and lower-case.
        """
        if not _NAME.fullmatch(name):
            raise ValueError("a feature network has a short lower-case name")
        super().__init__(name, origin, trunk.architecture.channels)
        self.trunk = trunk
        self.freeze()

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """The trunk's maps, at the trunk's own sizes."""
        seen = self.prepared(images, exactly=self.trunk.architecture.side)
        out: list[Tensor] = self.trunk(seen, depth_of(depth, self.trunk.architecture.depth))
        return out

    def embed(self, images: Tensor) -> Tensor:
        """The spatial mean of the last map, (n, d): what SimCLR calls h, before its projection."""
        return self.maps(images)[-1].float().mean(dim=(2, 3))


def features_bytes(name: str, trunk: Trunk, notes: Mapping[str, Any]) -> bytes:
    """Learned features as one file."""
    return pack(KIND, {"architecture": asdict(trunk.architecture), "name": name}, notes, trunk.state_dict())


def features_from(raw: bytes, provenance: Provenance = "file") -> LearnedFeatures:
    """Read learned features.

    Args:
        raw: what :func:`features_bytes` wrote.
        provenance: ``public`` only where the site's configuration vouches for the file's digest.
    Raises:
        WeightsError: not such a file, or its configuration describes no trunk.
    """
    packed = unpack(raw, KIND)
    try:
        if packed.config.keys() != {"architecture", "name"} or not _NAME.fullmatch(str(packed.config["name"])):
            raise ValueError("learned features have an architecture and a name")
        architecture = TrunkArchitecture(**packed.config["architecture"])
    except (TypeError, ValueError) as fault:
        raise WeightsError("the file's configuration describes no feature network") from fault
    trunk = built(lambda: Trunk(architecture), packed.state)
    return LearnedFeatures(str(packed.config["name"]), trunk, Origin(provenance, packed.sha256))
