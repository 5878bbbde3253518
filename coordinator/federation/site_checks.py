"""A check before a run: all its sites are asked at once whether they could take part. Nothing is priced or held.

The question goes the whole way of a round: the run's confined process, Flower, the one port, the site's link. Two
MiB there and back measure the line. A canary carries a model of the job's size and parts of it instead
(coordinator/federation/canary.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from coordinator.federation.canary import made_model
from coordinator.federation.job import Job
from coordinator.federation.run_process import RunLostError
from coordinator.federation.strategy import CHECK, RoundFailedError, RoundModel, RoundPlan
from coordinator.federation.superlink import FlowerHost, FlowerHostError, conduct
from protos.artifacts.bfloat16 import BFLOAT16, FLOAT32
from protos.common.canonical_json import json_object
from protos.federation import round_times
from protos.federation.messages import CANARY
from protos.federation.round_times import RoundTerms
from protos.federation.site_check import SiteCheck

NODE_WAIT_S: Final = 5.0
_LOST: Final = 3
_BYTES: Final = {BFLOAT16: 2, FLOAT32: 4}  # of a number on the way back


@dataclass(slots=True)
class CheckedSites:
    """What came back: a gate that grants nothing, admits nothing and closes nothing."""

    told: Mapping[str, SiteCheck] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)  # site -> code
    aggregated: tuple[str, ...] = ()  # of a canary: the sites of whose parts a model was made

    def checked(self, told: Mapping[str, SiteCheck], lost: Mapping[str, str], aggregated: tuple[str, ...]) -> None:
        """Keep it."""
        self.told, self.lost, self.aggregated = dict(told), dict(lost), aggregated

    def _no(self, *_: object) -> None:
        raise RunLostError("a check asks for nothing of the ledger")

    reserve = admit = looked = round_done = progress = _no


def check_sites(host: FlowerHost, job: Job, approve_by: int, canary: bool = False) -> CheckedSites:
    """Ask all sites of the job. Blocks; the caller sees to it that none of them is in a run.

    Args:
        host: the way to them.
        job: what is to be run.
        approve_by: as the orders of the run would say it.
        canary: each does a round on made patients, too, and sends its numbers.
    Raises:
        RunLostError, FlowerHostError: the check's process is gone, or the SuperLink does not answer.
    """
    plan = RoundPlan(
        run=job.run,
        sites=job.sites,
        rounds=1,
        first_round=0,
        model=RoundModel(made_model(job.parameters) if canary else np.zeros(1, np.float32)),
        config=job.config_for_sites.encode(),
        min_sites=len(job.sites),  # each is waited for a moment
        least_grants=len(job.sites),
        round_timeout_s=round_times.check_timeout(job.parameters),
        node_wait_s=NODE_WAIT_S,
        terms=RoundTerms(job.round_seconds, approve_by),
        silence_s=round_times.silence(job.round_seconds, job.wait_seconds),
        aggregator=job.aggregator(),
        update_precision=job.update_precision,
        checks=CANARY if canary else CHECK,
    )
    found = CheckedSites()
    for again in range(_LOST, 0, -1):
        try:
            conduct(host, plan, found)  # type: ignore[arg-type]
            break
        except RoundFailedError:  # the coordinator stops
            raise FlowerHostError("the coordinator is stopping") from None
        except RunLostError:  # as a run: its process is replaced so many times
            if again == 1:
                raise
    return found


def seconds_of_round(job: Job, found: SiteCheck, up: float) -> float:
    """What a round would take at this site, in seconds: by made patients, and by the line as it was measured.

    ``up``: bytes a second from the site; 0: not known, and then the way back counts as the way there.
    """
    there, back = carried_bytes(job)
    way = there / found.rate if found.rate else 0.0
    return found.seconds + way + (back / (up or found.rate) if up or found.rate else 0.0)


def carried_bytes(job: Job) -> tuple[int, int]:
    """Of a round's model to a site, and of the numbers that come back."""
    ring_bits = json_object(job.config)["ring_bits"] if job.secure else 0
    return 4 * job.parameters, (ring_bits // 8 or _BYTES[job.update_precision]) * job.parameters
