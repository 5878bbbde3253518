"""Feature networks by their names."""

import hashlib

import pytest

from agent.models.features.extractors import RandomFeatures, features_bytes
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.training_loop import seeded
from agent.models.weights import WeightsError
from deploy.reproduction.feature_networks import FEATURES, Source


def test_the_registry_makes_what_it_names_and_a_file_needs_its_digest():
    assert FEATURES["random"](Source(seed=3)).origin == RandomFeatures(3).origin
    with seeded(1):
        raw = features_bytes("made", Trunk(TrunkArchitecture(side=16, channels=1, width=8, depth=3)), {})
    net = FEATURES["learned"](Source(raw=raw, sha256=hashlib.sha256(raw).hexdigest()))
    assert net.origin.provenance == "file"
    for name in FEATURES:
        with pytest.raises(WeightsError):
            FEATURES[name](Source(raw=raw, sha256="0" * 64))
