"""The registry of feature networks that a table may name: random, learned on public images, and published ones."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.models.features.extractors import RandomFeatures, features_from
from agent.models.features.feature_net import FeatureNet, FrozenNetwork
from agent.models.published.loading import PublishedWeightsError, load_official
from agent.models.weights import WeightsError


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a feature network is made from: a seed, or a file with the digest that is pinned for it."""

    seed: int = 0
    raw: bytes = field(default=b"", repr=False)
    sha256: str = ""


def _random(source: Source) -> FeatureNet:
    if source.raw or source.sha256:
        raise WeightsError("random features have a seed and no file")
    return RandomFeatures(source.seed)


def _learned(source: Source) -> FeatureNet:
    if not hmac.compare_digest(hashlib.sha256(source.raw).hexdigest(), source.sha256):
        raise PublishedWeightsError("the file does not have the SHA-256 that was pinned for it")
    return features_from(source.raw)


def _official(kind: str) -> Callable[[Source], FeatureNet]:
    def read(source: Source) -> FeatureNet:
        net, _ = load_official(kind, source.raw, source.sha256)
        assert isinstance(net, FrozenNetwork)
        return net

    return read


FEATURES: Final[Mapping[str, Callable[[Source], FeatureNet]]] = {
    "random": _random,
    "learned": _learned,
    "vgg19": _official("vgg19"),
    "vgg19-unnormalised": _official("vgg19-unnormalised"),
    "moco": _official("moco"),
    "resnet18": _official("resnet18"),
    "resnet34": _official("resnet34"),
    "resnet50": _official("resnet50"),
    "inception": _official("inception"),
}
