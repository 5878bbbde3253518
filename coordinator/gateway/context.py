"""Everything that stands behind the calls of the gRPC service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.admission import AdmissionService
from coordinator.enrolment.authority import Authority
from coordinator.storage.release_store import ReleaseStore
from coordinator.storage.site_heads import SiteHeads
from coordinator.storage.uploads import Uploads
from coordinator.storage.witness_store import Witnesses

if TYPE_CHECKING:  # both bring Flower along
    from coordinator.federation.fleet_proxy import Fleet
    from coordinator.gateway.run_service import Operations


@dataclass(frozen=True, slots=True, eq=False)
class GatewayContext:
    """Everything that stands behind the calls."""

    intake: AdmissionService
    uploads: Uploads
    shelf: ReleaseStore
    witnesses: Witnesses
    site_heads: SiteHeads
    authority: Authority
    fleet: Fleet
    conducting: Operations
    enrolled: Callable[[str], None]  # hears of a site that was just enrolled
    architectures: Path  # a folder: the approved architectures of models
    policy: str  # the federation's, TOML
    log: Any
