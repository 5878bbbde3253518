"""``[faces]`` of ``ingest.toml``: which method takes the face off head MRI and CT, before anything is drawn from it.

Apart from what does it (:mod:`agent.defacing.engine`), which needs torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

METHODS: Final = ("remodel", "quickshear", "facemask", "deface", "strip")
PARTS: Final = ("surface", "face")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

SAFE: Final = (("remodel", "surface"), ("strip", "surface"))  # after these no photograph was matched: faces.md


@dataclass(frozen=True, slots=True)
class FacesSettings:
    """How the faces of this site's head scans are taken off."""

    method: str  # of METHODS; remodel puts another face there, the others remove
    network: Path | None = None  # of remodel: a file of `train remodeller`, of public heads
    network_sha256: str = ""  # of that file, as `train remodeller` printed it
    parts: str = "surface"  # of remodel: all that a rendering shows; or the face alone: the skull's shape stays
    settle_minutes: float = 15.0  # `serve`: nothing has come for so long, so that the studies are whole

    def __post_init__(self) -> None:
        """A method that there is, and a network for the one that needs it."""
        if self.method not in METHODS:
            raise ValueError(f"method is one of: {', '.join(METHODS)}")
        if self.parts not in PARTS:
            raise ValueError(f"parts is one of: {', '.join(PARTS)}")
        if (self.method == "remodel") is not (self.network is not None):
            raise ValueError("a network is needed by remodel, and by no other method")
        if self.network is not None and not _DIGEST.fullmatch(self.network_sha256):
            raise ValueError("network_sha256: the file's SHA-256, 64 hexadecimal digits in lower case")
        if not 0 < self.settle_minutes <= 1440:
            raise ValueError("settle_minutes must be positive, and a day at most")

    @property
    def safe(self) -> bool:
        """Whether a release may draw from what comes out; the other methods are for comparison, and for files."""
        return (self.method, self.parts) in SAFE
