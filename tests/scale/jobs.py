"""A job like the demo's, for virtual sites."""

from __future__ import annotations

import json

from coordinator.federation.job import FEDAVG, Job
from tests.support.small_tasks import classification, plain_config


def job(rounds: int, strategy: str = FEDAVG) -> Job:
    """Three sites' training of ten classes; needs two of three."""
    task = classification("0123456789", (32, 32), rounds=rounds, public_patients=250)
    config = plain_config(task)
    names = ("site-a", "site-b", "site-c")
    return Job("try-1", "federated", json.dumps(config), config["parameters"], names, rounds, 2, strategy)
