"""The ``[anonfaces]`` side of a k-anonymous release's configuration."""

from __future__ import annotations

from typing import Any

from agent.mechanisms.anonfaces.mechanism import AnonFaces
from agent.mechanisms.common.config import ClustersTable, NetworksTable, Shelf


def _anonfaces(clusters: ClustersTable, table: NetworksTable, shelf: Shelf, made: dict[str, Any]) -> AnonFaces:
    recognisers = tuple(shelf.recogniser(name) for name in table.recognisers)
    return AnonFaces(clusters.k, clusters.l_diversity, shelf.codec(table), recognisers, **made)
