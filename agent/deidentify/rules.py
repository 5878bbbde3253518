"""What a site lets in: an allow-list, judged on a data set before its pixels are touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydicom import Dataset

from agent.deidentify.prescan import EXPLICIT_BE, EXPLICIT_LE, IMPLICIT_LE
from agent.deidentify.reasons import Refused

SECONDARY_CAPTURE: Final = "1.2.840.10008.5.1.4.1.1.7"  # and its multi-frame kinds, .7.1 to .7.4
MEDIA_DIRECTORY: Final = "1.2.840.10008.1.3.10"

# The decoder of each transfer syntax, pinned: with a default choice pydicom 3.0.2 fails on J2K files whose
# sign disagrees with the header, and which decoder sees hostile bytes would depend on what is installed.
DECODERS: Final = {
    IMPLICIT_LE: "",
    EXPLICIT_LE: "",
    EXPLICIT_BE: "",
    "1.2.840.10008.1.2.5": "pydicom",  # RLE
    "1.2.840.10008.1.2.4.50": "pillow",  # JPEG baseline, 8 bits
    "1.2.840.10008.1.2.4.80": "pyjpegls",
    "1.2.840.10008.1.2.4.81": "pyjpegls",
    "1.2.840.10008.1.2.4.90": "pylibjpeg",  # JPEG 2000, through openjpeg
    "1.2.840.10008.1.2.4.91": "pylibjpeg",
}

_IMAGE: Final = "1.2.840.10008.5.1.4.1.1."
# Storage classes that are no picture (PS3.4 B.5): presentation states, documents, structured reports,
# waveforms, radiotherapy, raw data, registrations, segmentations, surfaces, lens and eye measurements.
NOT_IMAGES: Final = tuple(
    _IMAGE + part for part in ("11.", "104.", "88.", "9.", "481.", "34.", "66", "67", "68.", "78.", "79.", "80.")
)
_ULTRASOUND: Final = frozenset(_IMAGE + part for part in ("3.1", "6.1", "6.2", "6.3"))
_GREY: Final = frozenset({"MONOCHROME1", "MONOCHROME2"})
_COLOUR: Final = frozenset({"RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT"})

DEFAULT_SOP_CLASSES: Final = frozenset(
    _IMAGE + part
    for part in (
        "1",  # CR
        "1.1",  # digital X-ray, for presentation
        "1.1.1",  # for processing
        "1.2",  # mammography, for presentation
        "1.2.1",
        "2",  # CT
        "2.1",  # enhanced CT
        "4",  # MR
        "4.1",  # enhanced MR
        "20",  # NM
        "77.1.5.1",  # ophthalmic photography, 8 bits
        "77.1.5.2",  # 16 bits
        "77.1.5.4",  # ophthalmic tomography
        "128",  # PET
    )
)


@dataclass(frozen=True, slots=True)
class Rules:
    """A site's rules for what is let in. Everything that is not listed is refused."""

    modalities: frozenset[str]
    sop_classes: frozenset[str] = DEFAULT_SOP_CLASSES
    # secondary captures are pictures of screens; listing a modality here vouches for that device
    secondary_capture_modalities: frozenset[str] = frozenset()
    colour_modalities: frozenset[str] = frozenset()
    # first two values of Image Type that a scanner's own picture has; any other may be a captured screen
    image_types: frozenset[tuple[str, str]] = frozenset({("ORIGINAL", "PRIMARY")})
    nifti_modality: str = "MR"  # a NIfTI file does not say its own
    max_bytes: int = 256 * 2**20  # of one file, and of one file inflated
    max_pixels: int = 64 * 2**20  # samples: rows x columns x frames x colours, or voxels

    def __post_init__(self) -> None:
        """A site names at least one modality; limits are positive."""
        if not self.modalities:
            raise ValueError("rules: modalities must name at least one modality")
        if not (self.max_bytes > 0 and self.max_pixels > 0):
            raise ValueError("rules: max_bytes and max_pixels must be positive")


def text(dataset: Dataset, keyword: str) -> str:
    """An attribute as stripped text; ``""`` when absent, several values joined by a backslash."""
    value = dataset.get(keyword)
    if value is None:
        return ""
    values = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    return "\\".join(str(v).strip("\0 ") for v in values)


def judge(dataset: Dataset, transfer_syntax: str, rules: Rules) -> None:
    """Apply the site's rules to a parsed file, cheapest question first.

    Raises:
        Refused: the first rule that the file breaks.
    """
    sop_class, modality = text(dataset, "SOPClassUID"), text(dataset, "Modality")
    if sop_class == MEDIA_DIRECTORY:
        raise Refused("dicomdir")
    if not sop_class:
        raise Refused("incomplete")
    if sop_class.startswith(NOT_IMAGES):
        raise Refused("not_an_image")
    captured = sop_class == SECONDARY_CAPTURE or sop_class.startswith(SECONDARY_CAPTURE + ".")
    _judge_origin(dataset, sop_class, modality, captured=captured, rules=rules)
    if not text(dataset, "SOPInstanceUID") or not text(dataset, "StudyInstanceUID"):
        raise Refused("incomplete")
    if not text(dataset, "PatientID"):
        raise Refused("missing_patient")
    if "PixelData" not in dataset:
        raise Refused("no_pixels")
    if transfer_syntax not in DECODERS:
        raise Refused("unsupported_encoding")
    _judge_size(dataset, rules)


def _judge_origin(dataset: Dataset, sop_class: str, modality: str, *, captured: bool, rules: Rules) -> None:
    """Where a picture comes from decides whether a name may be burned into it.

    ``BurnedInAnnotation = NO`` is not evidence, so it is not asked for.
    """
    if sop_class in _ULTRASOUND or modality == "US" or text(dataset, "BurnedInAnnotation").upper() == "YES":
        raise Refused("burned_in_risk")
    if modality not in rules.modalities:
        raise Refused("modality_not_allowed")
    if captured:
        if modality not in rules.secondary_capture_modalities:
            raise Refused("burned_in_risk")
    elif sop_class not in rules.sop_classes:
        raise Refused("sop_class_not_allowed")
    elif tuple(text(dataset, "ImageType").upper().split("\\")[:2]) not in rules.image_types:
        raise Refused("burned_in_risk")
    _judge_colours(dataset, modality, rules)


def _judge_colours(dataset: Dataset, modality: str, rules: Rules) -> None:
    """Grey is usual; colour, on a device that makes grey pictures, is a screen or an annotation."""
    colours = text(dataset, "PhotometricInterpretation")
    if "PixelData" not in dataset or colours in _GREY:
        return
    if colours not in _COLOUR:
        raise Refused("unsupported_encoding")
    if modality not in rules.colour_modalities:
        raise Refused("burned_in_risk")


def frames(dataset: Dataset) -> int:
    """Number of frames; 1 when the attribute is absent or empty."""
    return int(dataset.get("NumberOfFrames") or 1)


def _judge_size(dataset: Dataset, rules: Rules) -> None:
    rows, columns = dataset.get("Rows"), dataset.get("Columns")
    samples, bits = dataset.get("SamplesPerPixel", 1), dataset.get("BitsAllocated")
    count = frames(dataset)
    numbers = (rows, columns, samples, bits, count)
    if not all(isinstance(n, int) and n > 0 for n in numbers):
        raise Refused("undecodable")
    if bits not in (8, 16, 32) or samples not in (1, 3):
        raise Refused("unsupported_encoding")
    if not rows * columns * count * samples <= rules.max_pixels:
        raise Refused("too_large")
    if not rows * columns * count * samples * bits // 8 <= rules.max_bytes:
        raise Refused("too_large")


_FLAT: Final = frozenset({"CR", "DX", "MG", "OP", "OPT", "OT", "NM", "XA", "RF"})
_NEVER_A_FACE: Final = frozenset({"MG", "OP", "OPT"})
_ELSEWHERE: Final = frozenset(
    {"BREAST", "CHEST", "HEART", "LUNG", "ABDOMEN", "LIVER", "KIDNEY", "PELVIS", "PROSTATE", "HIP", "KNEE"}
    | {"ANKLE", "FOOT", "SHOULDER", "ELBOW", "WRIST", "HAND", "LEG", "ARM", "LSPINE", "TSPINE"}
)


def may_show_a_face(dataset: Dataset) -> bool:
    """True unless the data set says that no face can be rebuilt from it, or from a stack of its like."""
    modality = text(dataset, "Modality")
    if modality in _NEVER_A_FACE or (modality in _FLAT and frames(dataset) == 1):
        return False
    return text(dataset, "BodyPartExamined").upper() not in _ELSEWHERE
