"""``remodel.toml``: public configuration of one release of remodelled heads, parsed once, all problems at once."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.defacing import template as atlases
from agent.defacing.config import PARTS
from agent.defacing.deid_gan.network import remodeller_from
from agent.defacing.face_region import Region
from agent.defacing.remodel import around_template
from agent.errors import SiteConfigError
from agent.mechanisms.common.config import Shelf, document, needed
from agent.mechanisms.remodel.mechanism import LEAST, Remodel
from agent.toml_config import names_files
from protos.artifacts.shards import MAX_SHARD

_TABLES: Final = ("mechanism", "cohort", "network")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HeadsTable:
    """``[cohort]``: whose heads."""

    modality: str  # MR or CT
    shape: tuple[int, ...]  # voxels towards right, front and up
    spacing: tuple[float, ...]  # mm

    def __post_init__(self) -> None:
        """Three of each."""
        if len(self.shape) != 3 or len(self.spacing) != 3:
            raise ValueError("shape and spacing: three numbers each, towards right, front and up")


@dataclass(frozen=True, slots=True)
class NetworkTable:
    """``[network]``: what draws the faces."""

    remodeller: str  # of `train remodeller`, of public heads
    remodeller_sha256: str  # of that file, as `train remodeller` printed it
    parts: str = "surface"  # all that a rendering shows; "face" leaves the skull's shape

    def __post_init__(self) -> None:
        """A file, its digest, and a region that there is."""
        names_files(remodeller=self.remodeller)
        if not _DIGEST.fullmatch(self.remodeller_sha256):
            raise ValueError("remodeller_sha256: 64 hexadecimal digits in lower case, as `train remodeller` printed")
        if self.parts not in PARTS:
            raise ValueError(f"parts is one of: {', '.join(PARTS)}")


def read_remodel(path: Path, vouched: frozenset[str]) -> tuple[Remodel, str]:
    """The mechanism, and the modality of its scans.

    Raises:
        SiteConfigError: all problems at once.
        WeightsError: the network cannot be read.
    """
    tables = document(path, _TABLES)
    if tables.raw.get("mechanism") != Remodel.name:
        tables.problems.append(f"mechanism: must be {Remodel.name}")
    cohort, table = needed(tables, "cohort", HeadsTable), needed(tables, "network", NetworkTable)
    if tables.problems or cohort is None or table is None:
        raise SiteConfigError(f"{path.name}: " + "; ".join(tables.problems))
    if LEAST * 2 * math.prod(cohort.shape) > MAX_SHARD:
        told = f"cohort.shape: {LEAST} heads of so many voxels, the fewest that are released, are more than 256 MiB"
        raise SiteConfigError(f"{path.name}: {told}")
    shelf = Shelf(path.resolve().parent, vouched)
    raw = shelf.file(table.remodeller)
    if hashlib.sha256(raw).hexdigest() != table.remodeller_sha256:
        raise SiteConfigError(f"{path.name}: {table.remodeller} does not have the SHA-256 in remodeller_sha256")
    if table.remodeller_sha256 not in vouched:
        told = "site.toml's public_components does not vouch that the network saw no patient of this site"
        raise SiteConfigError(f"{path.name}: {told}")
    (i, j, k), (x, y, z) = cohort.shape, cohort.spacing
    region = Region(parts="face" if table.parts == "face" else "surface")
    template = atlases.atlas()
    atlas = hashlib.sha256(template.values.tobytes()).hexdigest()
    try:
        network = around_template(remodeller_from(raw, "public"), template)
        return Remodel(network, atlas, (i, j, k), (x, y, z), region), cohort.modality
    except ValueError as error:
        raise SiteConfigError(f"{path.name}: {error}") from None
