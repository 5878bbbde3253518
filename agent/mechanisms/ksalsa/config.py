"""The k-SALSA side of a k-anonymous release's configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from agent.mechanisms.common.config import ClustersTable, NetworksTable, Shelf
from agent.mechanisms.ksalsa.mechanism import KSalsa
from agent.mechanisms.ksalsa.style_alignment import Networks, align


def _ksalsa(clusters: ClustersTable, table: NetworksTable, shelf: Shelf, made: dict[str, Any]) -> KSalsa:
    style, content = (shelf.features(word) for word in (table.style, table.content))
    mechanism = KSalsa(clusters.k, clusters.l_diversity, shelf.codec(table), style, content, **made)
    _tried(mechanism)
    return mechanism


def _tried(mechanism: KSalsa) -> None:
    """One step of the alignment, of two images of noise: what does not fit is known before anything is priced.

    Raises:
        ValueError: networks and alignment do not fit.
    """
    codec, dice = mechanism.codec, np.random.default_rng(0)
    networks = Networks(codec.generator, mechanism.style, mechanism.content)
    noise = [[dice.random(codec.shape, dtype=np.float32)] for _ in range(2)]
    start = codec.ws(codec.latent_average[None]).cpu().numpy()
    try:
        align(networks, start, [noise], replace(mechanism.alignment, steps=1))
    except (IndexError, RuntimeError, ValueError):
        told = "see the layer, the grid, and until"
        raise ValueError(f"these networks cannot be aligned with these settings: {told}") from None
