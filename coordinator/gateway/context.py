"""Everything that stands behind the calls of the gRPC service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coordinator.admission import AdmissionService
from coordinator.enrolment.authority import Authority
from coordinator.storage.release_store import ReleaseStore
from coordinator.storage.site_heads import SiteHeads
from coordinator.storage.uploads import Uploads
from coordinator.storage.witness_store import Witnesses


class FleetTunnel(Protocol):
    """Flower's Fleet API, for one site at a time."""

    def handle(self, site: str, parts: Iterator[Any]) -> Iterator[Any]:
        """One call: its parts in, the reply's parts out."""


class Conducting(Protocol):
    """What an operator may do with runs; see :class:`coordinator.federation.run_manager.RunManager`."""

    def launch(self, request: Any) -> Iterator[Any]:
        """Start a run, or follow the one of that name."""

    def plan(self, request: Any) -> Any:
        """What it would cost."""

    def watch(self, run: str) -> Iterator[Any]:
        """Events of a run that is known."""

    def resume(self, run: str) -> Iterator[Any]:
        """Go on with a stopped run."""

    def stop(self, run: str) -> str:
        """Stop after the round in progress; the run's state."""


@dataclass(frozen=True, slots=True, eq=False)
class GatewayContext:
    """Everything that stands behind the calls."""

    intake: AdmissionService
    uploads: Uploads
    shelf: ReleaseStore
    witnesses: Witnesses
    site_heads: SiteHeads
    authority: Authority
    fleet: FleetTunnel
    conducting: Conducting
    enrolled: Callable[[str], None]  # hears of a site that was just enrolled
    architectures: Path  # a folder: the approved architectures of models
    policy: str  # the federation's, TOML
    log: Any
