"""A release of remodelled heads: the mechanism, phantoms of heads, and a site that may release them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from agent.defacing.deid_gan.network import remodeller_from
from agent.defacing.head import HeadScan
from agent.defacing.reidentification.features import Eye
from agent.defacing.remodel import AroundTemplate, around_template
from agent.defacing.template import atlas
from agent.domain import Scan, Volume
from agent.mechanisms.remodel.mechanism import Remodel
from agent.volumes.errors import NotDefacedError
from deploy.demo.train_networks import kept_network
from tests.support.heads import scan, true_head
from tests.support.ledger_world import policy
from tests.support.site_world import MemoryVault, site_world

HEADS, FIRST = 38, 200  # persons whom the network has not seen
ADMITS: dict[str, Any] = {
    "mechanisms": '["remodel"]',
    "artifact_types": '["volume-set"]',
    "modalities": '["MR"]',
    "levels": '["C"]',
    "max_reid_rate": 0.4,
    "max_artifact_bytes": 1 << 26,
}


@cache
def network() -> AroundTemplate:
    return around_template(remodeller_from(kept_network("remodeller"), "public"), atlas())


def remodel() -> Remodel:
    shape = scan(FIRST).volume.values.shape
    return Remodel(network(), "ab" * 32, shape, (4.0, 4.0, 4.0), eye=Eye(side=32, views=("front", "left 60")))


@cache
def scans() -> tuple[Scan, ...]:
    return tuple(Scan(pseudonym(n), scan(FIRST + n).volume, "ab"[n % 2]) for n in range(HEADS))


def pseudonym(n: int) -> str:
    """As long as the vault's, in the order of the numbers."""
    return f"{n:02x}" + hashlib.sha256(bytes([n])).hexdigest()[:30]


def examine(volume: Volume) -> HeadScan:
    """What the phantoms know of themselves."""
    for n in range(HEADS):
        if volume is scan(FIRST + n).volume:
            return true_head(FIRST + n)
    raise NotDefacedError("no_head")


def heads_world(folder: Path, **changes: Any) -> Any:
    vault = MemoryVault(heads=scans())
    s = site_world(folder, vault=vault, federation=policy(**ADMITS), **{**ADMITS, **changes})
    return s.site, vault, s.intake.register.store
