"""The result of ingest: one de-identified image or volume, ready for the vault."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.ps315.action_trace import AttributeAction

_LUMA: Final = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601, section 2.5.1


def grey(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """The luma (h, w) of an RGB image (h, w, 3) in [0, 1]; an image (h, w) as it is."""
    # the three weights add up to 1, but in float32 a white pixel may come out above it
    return pixels if pixels.ndim == 2 else np.minimum(pixels @ _LUMA, np.float32(1))


_KEYED: Final = re.compile(r"[0-9a-f]{32}")
NO_SERIES: Final = "0" * 32  # a record that names no series is one by itself


def keyed_name(person: str, name: str) -> str:
    """Name a study, a series or an instance of one patient: SHA-256 of pseudonym and keyed name, 32 hex characters.

    A UID is an untrusted value, and another patient's file may contain the same one. So no lookup uses a UID alone:
    the same UID of two patients names two different things, and neither affects the other (P1).
    """
    return hashlib.sha256(f"{person}/{name}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One file that was let in. Every identity in it is keyed; it stays inside the site all the same.

    ``name``, ``study`` and ``series`` are the patient's own (:func:`keyed_name`): no other patient's record has them.
    """

    name: str  # of the instance: from its SOP Instance UID, or from the content of a volume file
    digest: str  # of the source file's bytes
    pseudonym: str
    study: str
    modality: str
    kind: Literal["image", "volume", "mask"]
    label: str  # from the hospital's own list; "" when it has none
    pixels: (
        NDArray[np.float32] | None
    )  # (h, w) or RGB (h, w, 3) in [0, 1]; None for volumes, multi-frame images, masks
    payload: bytes  # the de-identified DICOM or NIfTI file
    face: bool  # a face may be reconstructed from it: not eligible for any release before defacing
    series: str = NO_SERIES  # keyed; of a volume file: its own
    body_part: str = ""  # one of the terms that ``keep`` admits; "" when the file does not say
    trace: tuple[AttributeAction, ...] = ()  # what was done to every attribute, and why: for the manifest
    text: bool = False  # drawn text was seen in the image
    # Keyed study, series and instance UID as the file says them (of a volume file: its content), which another
    # patient's file may say, too: to find a label, and to show people what two patients share
    uids: tuple[str, ...] = ()
    masks: str = ""  # of a mask: the patient's series that it is of, named as ``series`` is
    sent: str = ""  # keyed: who sent it as which instance; "" where no sender named one

    def __post_init__(self) -> None:
        """Refuse what is not keyed and pixels outside [0, 1]: this also checks what the reader sent."""
        for value in (self.name, self.digest, self.pseudonym, self.study, self.series):
            if not _KEYED.fullmatch(value):
                raise ValueError("identities of a record must be 32 hex characters")
        if len(self.uids) not in (0, 3) or not all(_KEYED.fullmatch(value) for value in self.uids):
            raise ValueError("a file says a study, a series and an instance, or none of them")
        if self.kind not in ("image", "volume", "mask") or (self.pixels is None) is (self.kind == "image"):
            raise ValueError("an image has pixels, a volume and a mask have none")
        if not re.fullmatch(r"[0-9a-f]{32}" if self.kind == "mask" else "", self.masks):
            raise ValueError("a mask is of a series, and nothing else is")
        self._check_content()

    def _check_content(self) -> None:
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
        """The pixels (h, w), of a coloured image its luma: what is searched for drawn text."""
        return None if self.pixels is None else grey(self.pixels)

    @property
    def after(self) -> str:
        """SHA-256 of what is kept: two copies of an instance, come by two roads, are compared by it."""
        return hashlib.sha256(self.payload).hexdigest()


def instance_name(deidentifier: Deidentifier, sop_instance_uid: str) -> str:
    """The keyed SOP Instance UID, the same in the worker and for the hospital's label list."""
    return deidentifier.mac("instance", sop_instance_uid.strip("\0 ").encode())
