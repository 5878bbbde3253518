"""The mechanism of a run at a site: read from its configuration, its updates' size, and its patients' bound."""

from __future__ import annotations

import math

from agent.domain import LatticePart, Update
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from protos.artifacts.bfloat16 import BFLOAT16, TENSOR_TYPES, Numbers, rounded
from protos.artifacts.strict_safetensors import vector_bytes

Made = Update | LatticePart  # of a round or a look: in clear, or a part of a secret sum

MECHANISMS: dict[str, type[Federated] | type[FederatedMasked]] = {m.name: m for m in (Federated, FederatedMasked)}


def read_mechanism(config: str) -> Federated | FederatedMasked:
    """The mechanism of a public configuration: only one has this key.

    Raises:
        FederatedConfigError: it is neither's.
    """
    return (FederatedMasked if '"ring_bits"' in config else Federated).from_json(config)


def update_bytes(mechanism: Federated | FederatedMasked) -> int:
    """The size of every update of a run: a function of its public configuration."""
    if isinstance(mechanism, FederatedMasked):
        return vector_bytes(mechanism.parameters, "ring", f"U{mechanism.ring_bits}")
    return vector_bytes(mechanism.parameters, dtype=TENSOR_TYPES[mechanism.update_precision])


def as_sent(mechanism: Federated | FederatedMasked, update: Update) -> Numbers:
    """The numbers (p,) of a round's update as they leave: a function of the noised ones alone, and of no patient's.

    Raises:
        ArtifactFormatError: one of them is not finite, or has no finite neighbour.
    """
    half = isinstance(mechanism, Federated) and mechanism.update_precision == BFLOAT16
    return rounded(update.vector) if half else update.vector


def patients_bound(mechanism: Federated | FederatedMasked, part: str) -> int:
    """How many of a site's patients are in a part at most, by the job's public bound and the part's share."""
    plan = mechanism.evaluate
    share = 100 if plan is None else plan.shares[part]
    return math.ceil(mechanism.public_patients * share / 100)
