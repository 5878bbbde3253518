"""``ksalsa.toml`` and ``anonfaces.toml``: public configuration of one release, parsed once, all problems at once.

It does not depend on patients, so it can be priced as it is. Networks are files next to it. A file's own statement of
its origin is ignored: it is public if ``site.toml`` vouches for its SHA-256, and private otherwise (P6). A published
file, written KIND:FILE, is read only if the site vouches for it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.domain import Selection
from agent.errors import SiteConfigError
from agent.mechanisms.anonfaces.config import _anonfaces
from agent.mechanisms.anonfaces.identity_mixing import Mixing
from agent.mechanisms.anonfaces.mechanism import AnonFaces
from agent.mechanisms.common.config import ClustersTable, CohortTable, NetworksTable, Shelf, document, needed
from agent.mechanisms.common.synthesis import ReleaseConfig
from agent.mechanisms.ksalsa.augmentation import KSalsaViews
from agent.mechanisms.ksalsa.config import _ksalsa
from agent.mechanisms.ksalsa.mechanism import KSalsa
from agent.mechanisms.ksalsa.style_alignment import Alignment
from agent.models.recognition.recogniser import Recogniser
from agent.models.weights import WeightsError
from agent.toml_config import Tables
from agent.vetting.config import JudgesTable, vetting_of
from agent.vetting.reference import Vetting

_TABLES: Final = ("mechanism", "cohort", "clusters", "networks", "alignment", "views", "mixing", "vetting")


@dataclass(frozen=True, slots=True)
class KAnonymousConfig:
    """The parsed configuration: the mechanism, and the selection of patients."""

    mechanism: KSalsa | AnonFaces
    selection: Selection
    judges: tuple[Recogniser, ...] = ()  # whom a search for k asks; of AnonFACES, its own
    vetting: Vetting | None = None  # of what a release makes; None: it refuses copies and nothing else


def read_synthesis(path: Path, name: str, vouched: frozenset[str]) -> KAnonymousConfig:
    """Read a release's configuration and every network that it names.

    Args:
        path: of the TOML file.
        name: of the mechanism that was asked for, which the file must be of; "": whichever it is of.
        vouched: SHA-256 of the files that the site says are public.
    Raises:
        SiteConfigError: not TOML, or with missing, unknown or senseless keys; all problems at once.
        WeightsError: a network cannot be read, or does not fit.
    """
    tables = document(path, _TABLES)
    raw = tables.raw
    if raw.get("mechanism") not in ((name,) if name else tuple(_FOREIGN)):
        tables.problems.append(f"mechanism: must be {' or '.join([name] if name else _FOREIGN)}")
    cohort = needed(tables, "cohort", CohortTable)
    networks = needed(tables, "networks", NetworksTable)
    clusters = tables.table("clusters", ClustersTable) or ClustersTable()
    made = _options(tables, clusters, str(raw.get("mechanism")))
    vetting = tables.table("vetting", JudgesTable)
    if tables.problems or cohort is None or networks is None:
        raise SiteConfigError(f"{path.name}: " + "; ".join(tables.problems))
    build = _ksalsa if raw["mechanism"] == KSalsa.name else _anonfaces
    try:
        shelf = Shelf(path.resolve().parent, vouched)
        mechanism = build(clusters, networks, shelf, made)
        judges = tuple(shelf.recogniser(one) for one in networks.recognisers)
        for judge in judges:
            judge.calibration.demand()
        looked = vetting_of(vetting, shelf, networks.device) if vetting else None
        return KAnonymousConfig(mechanism, cohort.selection(mechanism.shape), judges, looked)
    except WeightsError:
        raise
    except ValueError as error:
        raise SiteConfigError(f"{path.name}: {error}") from None


def read_release(arguments: argparse.Namespace, vouched: frozenset[str]) -> ReleaseConfig:
    """Read what ``release ksalsa`` or ``release anonfaces`` is configured by; see :func:`read_synthesis`."""
    made = read_synthesis(arguments.config, arguments.mechanism, vouched)
    return ReleaseConfig(made.mechanism, made.selection, made.vetting)


_FOREIGN: Final = {  # tables, and keys of [networks], that a mechanism does not know
    KSalsa.name: ("mixing",),
    AnonFaces.name: ("alignment", "views", "networks.style", "networks.content"),
}


def _options(tables: Tables, clusters: ClustersTable, name: str) -> dict[str, Any]:
    """What may be left out: of k-SALSA the alignment and the views, of AnonFACES the mixing."""
    raw, networks = tables.raw, tables.raw.get("networks")
    told = {*raw, *(f"networks.{key}" for key in (networks if isinstance(networks, dict) else ()))}
    tables.problems += [f"{key}: not of {name}" for key in _FOREIGN.get(name, ()) if key in told]
    if name == KSalsa.name:
        kinds: dict[str, type[Any]] = {"alignment": Alignment, "views": KSalsaViews}
        return {key: tables.table(key, kind) for key, kind in kinds.items() if key in raw}
    mixing = raw.get("mixing", {})
    if isinstance(mixing, dict):
        if "k" in mixing:
            tables.problems.append("mixing.k: is set in [clusters]")
        mixing = {**mixing, "k": clusters.k}
    return {"mixing": tables.made(mixing, Mixing, "mixing")}
