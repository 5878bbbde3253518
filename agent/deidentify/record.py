"""What comes in: one de-identified image or volume, ready for the vault."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from agent.deidentify.colour import grey
from agent.deidentify.trace import Step

_KEYED: Final = re.compile(r"[0-9a-f]{32}")
_NO_SERIES: Final = "0" * 32


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One file that was let in. Every identity in it is keyed; it stays inside the site all the same."""

    name: str  # of the instance: from its SOP Instance UID, or from the content of a volume file
    digest: str  # of the source file's bytes
    pseudonym: str
    study: str
    modality: str
    kind: Literal["image", "volume"]
    label: str  # from the hospital's own list; "" when it has none
    pixels: NDArray[np.float32] | None  # (h, w) or RGB (h, w, 3) in [0, 1]; None for volumes and multi-frame images
    payload: bytes  # the de-identified DICOM or NIfTI file
    face: bool  # a face may be reconstructed from it: not eligible for any release before defacing
    series: str = _NO_SERIES  # keyed; of a volume file: its own
    body_part: str = ""  # one of the terms that ``keep`` admits; "" when the file does not say
    trace: tuple[Step, ...] = ()  # what was done to every attribute, and why: for the manifest
    text: bool = False  # drawn text was seen in the picture

    def __post_init__(self) -> None:
        """Refuse what is not keyed and pixels outside [0, 1]: this also checks what the reader sent."""
        for value in (self.name, self.digest, self.pseudonym, self.study, self.series):
            if not _KEYED.fullmatch(value):
                raise ValueError("identities of a record must be 32 hex characters")
        if self.kind not in ("image", "volume") or (self.pixels is None) is (self.kind == "image"):
            raise ValueError("an image has pixels, a volume has none")
        if not re.fullmatch(r"[A-Z0-9]{1,16}", self.modality) or not self.payload:
            raise ValueError("a record has a modality and a payload")
        if not re.fullmatch(r"[A-Z0-9]{0,16}", self.body_part):
            raise ValueError("a body part is a defined term")
        p = self.pixels
        if p is not None and not (
            p.ndim in (2, 3) and p.shape[2:] in ((), (3,)) and p.dtype == np.float32 and p.size
        ):
            raise ValueError("pixels must be a non-empty (h, w) or (h, w, 3) float32 array")
        if p is not None and not bool(np.isfinite(p).all() and p.min() >= 0 and p.max() <= 1):
            raise ValueError("pixels must be finite and lie in [0, 1]")

    @property
    def grey(self) -> NDArray[np.float32] | None:
        """The pixels (h, w), of a coloured picture its luma: what is searched for drawn text."""
        return None if self.pixels is None else grey(self.pixels)

    @property
    def after(self) -> str:
        """SHA-256 of what is kept: two copies of an instance, come by two roads, are compared by it."""
        return hashlib.sha256(self.payload).hexdigest()
