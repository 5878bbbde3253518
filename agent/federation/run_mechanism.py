"""The mechanism of a run at a site: read from its configuration, its updates' size, and whose examples it sees."""

from __future__ import annotations

import math
from dataclasses import replace

from agent.domain import ExampleRule, LatticePart, Split, Update
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from agent.mechanisms.federated.task_training import example_rule
from policies.tasks.evaluation import SPLIT
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
    return vector_bytes(mechanism.parameters)


def examples_of(mechanism: Federated | FederatedMasked, part: str, run: str = "") -> ExampleRule:
    """Whom a round trains on, or whom a look is at: other patients, by a keyed hash and for ever.

    The division has one name, so that every run with the same share holds out the same patients. Without looks all
    are trained on.
    """
    rule, plan = replace(example_rule(mechanism.task), run=run), mechanism.evaluate
    return rule if plan is None else replace(rule, split=Split(SPLIT, plan.shares), part=part)


def patients_bound(mechanism: Federated | FederatedMasked, part: str) -> int:
    """How many of a site's patients are in a part at most, by the job's public bound and the part's share."""
    plan = mechanism.evaluate
    share = 100 if plan is None else plan.shares[part]
    return math.ceil(mechanism.public_patients * share / 100)
