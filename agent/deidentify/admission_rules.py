"""A site's admission rules: an allow-list, applied to a data set before its pixels are touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from pydicom import Dataset

from agent.deidentify import pixel_redaction
from agent.deidentify.attributes import frames as frames  # noqa: PLC0414 - read here by others too
from agent.deidentify.attributes import text as text  # noqa: PLC0414
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import EXPLICIT_BE, EXPLICIT_LE, IMPLICIT_LE, Meta
from agent.deidentify.segment_list import LABEL_MAP, SEGMENTATION, Segment

SECONDARY_CAPTURE: Final = "1.2.840.10008.5.1.4.1.1.7"  # and its multi-frame kinds, .7.1 to .7.4
MEDIA_DIRECTORY: Final = "1.2.840.10008.1.3.10"

# The decoder of each transfer syntax, pinned: with a default choice pydicom 3.0.2 fails on J2K files whose
# sign disagrees with the header, and which decoder sees hostile bytes would depend on what is installed.
# All of JPEG is read by the libjpeg-turbo in imagecodecs (BSD). Rejected: pylibjpeg-libjpeg (GPL), python-gdcm
# (CVE-2026-3650, and no 12 bits), pillow (8 bits only, no lossless).
IMAGECODECS: Final = "imagecodecs"
DECODERS: Final = {
    IMPLICIT_LE: "",
    EXPLICIT_LE: "",
    EXPLICIT_BE: "",
    "1.2.840.10008.1.2.5": "pydicom",  # RLE
    "1.2.840.10008.1.2.4.50": IMAGECODECS,  # JPEG baseline, 8 bits
    "1.2.840.10008.1.2.4.51": IMAGECODECS,  # extended, 12 bits
    "1.2.840.10008.1.2.4.57": IMAGECODECS,  # lossless
    "1.2.840.10008.1.2.4.70": IMAGECODECS,  # lossless, first-order prediction
    "1.2.840.10008.1.2.4.80": "pyjpegls",
    "1.2.840.10008.1.2.4.81": "pyjpegls",
    "1.2.840.10008.1.2.4.90": "pylibjpeg",  # JPEG 2000, through openjpeg
    "1.2.840.10008.1.2.4.91": "pylibjpeg",
    "1.2.840.10008.1.2.4.201": "pylibjpeg",  # high-throughput JPEG 2000
    "1.2.840.10008.1.2.4.202": "pylibjpeg",
    "1.2.840.10008.1.2.4.203": "pylibjpeg",
}

_IMAGE: Final = "1.2.840.10008.5.1.4.1.1."
# Storage classes that are no image (PS3.4 B.5): presentation states, documents, structured reports,
# waveforms, radiotherapy, raw data, registrations, segmentations, surfaces, lens and eye measurements.
NOT_IMAGES: Final = tuple(
    _IMAGE + part for part in ("11.", "104.", "88.", "9.", "481.", "34.", "66", "67", "68.", "78.", "79.", "80.")
)
_STRUCTURED: Final = _IMAGE + "88."
_GREY: Final = frozenset({"MONOCHROME1", "MONOCHROME2"})
_COLOUR: Final = frozenset({"RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT", "PALETTE COLOR"})

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
class AdmissionRules:
    """A site's rules for what is let in. Everything that is not listed is refused."""

    modalities: frozenset[str]
    sop_classes: frozenset[str] = DEFAULT_SOP_CLASSES  # UIDs of the kinds of objects that may come in
    manufacturers: frozenset[str] = frozenset()  # without regard to case and spaces; empty is any
    # secondary captures are images of screens; listing a modality here vouches for that device
    secondary_capture_modalities: frozenset[str] = frozenset()
    colour_modalities: frozenset[str] = frozenset()  # modalities whose colour images may come in
    # first two values of Image Type that a scanner's own image has; any other may be a captured screen
    image_types: frozenset[tuple[str, str]] = frozenset({("ORIGINAL", "PRIMARY")})
    blanks: tuple[pixel_redaction.Blank, ...] = ()  # regions of risky images, which are then let in
    segments: tuple[Segment, ...] = ()  # of masks, which are then let in; they are made anew, and never drawn from
    us_regions: bool = False  # ultrasound is let in, blanked outside the regions that it states
    structured_reports: bool = False  # reports may come in; they are cleaned, and never drawn from
    look_for_text: bool = True  # drawn into the image, in every one of them: see ``glyphs``
    min_instances_per_series: int = 1  # of those kept; shorter series are not drawn from
    nifti_modality: str = "MR"  # a NIfTI file does not say its own
    max_bytes: int = 256 * 2**20  # of one file, and of one file inflated
    max_pixels: int = 64 * 2**20  # samples: rows x columns x frames x colours, or voxels

    def __post_init__(self) -> None:
        """A site names at least one modality; limits are positive."""
        if not self.modalities:
            raise ValueError("rules: modalities must name at least one modality")
        if not (self.max_bytes > 0 and self.max_pixels > 0 and self.min_instances_per_series > 0):
            raise ValueError("rules: max_bytes, max_pixels and min_instances_per_series must be positive")
        if len({s.name for s in self.segments}) < len(self.segments) or len({s.meant for s in self.segments}) < len(
            self.segments
        ):
            raise ValueError("rules: two segments have one name, or one code")
        values = [value for segment in self.segments for value in segment.nifti_values]
        if len(set(values)) < len(values):
            raise ValueError("rules: two segments have one of nifti_values")
        if any(not pixel_redaction.folded(name) for name in self.manufacturers):
            raise ValueError("rules: a manufacturer has no name")


def as_table(rules: AdmissionRules) -> dict[str, Any]:
    """Rules as JSON can say them, for the reader's process."""
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(rules).items()}


def rules_from(table: Mapping[str, Any]) -> AdmissionRules:
    """Back from :func:`as_table`."""
    plain = ("image_types", "blanks", "segments")
    fields: dict[str, Any] = {
        k: frozenset(v) if isinstance(v, list) and k not in plain else v for k, v in table.items()
    }
    fields["image_types"] = frozenset((first, second) for first, second in table["image_types"])
    fields["blanks"] = tuple(
        pixel_redaction.Blank(**{**b, "rectangles": tuple(pixel_redaction.Rectangle(**r) for r in b["rectangles"])})
        for b in table["blanks"]
    )
    fields["segments"] = tuple(Segment(**{**s, "nifti_values": tuple(s["nifti_values"])}) for s in table["segments"])
    return AdmissionRules(**fields)


def judge(dataset: Dataset, transfer_syntax: str, rules: AdmissionRules) -> None:
    """Apply the site's rules to a parsed file, cheapest question first.

    Raises:
        FileRejectedError: the first rule that the file breaks.
    """
    sop_class = text(dataset, "SOPClassUID")
    if sop_class == MEDIA_DIRECTORY:
        raise FileRejectedError("dicomdir")
    if not sop_class:
        raise FileRejectedError("incomplete")
    report, mask = rules.structured_reports and is_report(dataset), bool(rules.segments) and is_mask(dataset)
    image = not (report or mask)
    if image and sop_class.startswith(NOT_IMAGES):
        raise FileRejectedError("not_an_image")
    if image:
        _judge_origin(dataset, sop_class, rules)
    if not mask:  # of a mask that is the maker of a program, and nothing of it is kept
        _judge_maker(dataset, rules)
    _judge_identity(dataset)
    if mask:
        _judge_samples(dataset, rules)
    elif image:
        _judge_pixels(dataset, transfer_syntax, rules)


def _judge_identity(dataset: Dataset) -> None:
    if not text(dataset, "SOPInstanceUID") or not text(dataset, "StudyInstanceUID"):
        raise FileRejectedError("incomplete")
    if not text(dataset, "PatientID"):
        raise FileRejectedError("missing_patient")


def same_instance(meta: Meta, dataset: Dataset) -> None:
    """The file meta information and the data set must speak of one object (PS3.10 table 7.1-1).

    Raises:
        FileRejectedError: ``instance_mismatch``, both name a class or an instance, and not the same.
    """
    pairs = ((meta.media_class, "SOPClassUID"), (meta.media_instance, "SOPInstanceUID"))
    for announced, keyword in pairs:
        if announced and text(dataset, keyword) not in ("", announced):
            raise FileRejectedError("instance_mismatch")


def is_report(dataset: Dataset) -> bool:
    """A structured report (PS3.4 B.5, the classes below .88), which has text instead of pixels."""
    return text(dataset, "SOPClassUID").startswith(_STRUCTURED)


def is_mask(dataset: Dataset) -> bool:
    """A segmentation object (PS3.3 A.51), of bits or a label map: see :mod:`agent.deidentify.masks`."""
    return text(dataset, "SOPClassUID") in (SEGMENTATION, LABEL_MAP)


def _judge_samples(dataset: Dataset, rules: AdmissionRules) -> None:
    """The size of a mask."""
    sides = (dataset.get("Rows"), dataset.get("Columns"), dataset.get("NumberOfFrames"))
    if "PixelData" not in dataset:
        raise FileRejectedError("no_pixels")
    if not all(isinstance(n, int) and n > 0 for n in sides) or dataset.get("SamplesPerPixel") != 1:
        raise FileRejectedError("undecodable")
    if not sides[0] * sides[1] * sides[2] <= rules.max_pixels:
        raise FileRejectedError("too_large")


def _judge_maker(dataset: Dataset, rules: AdmissionRules) -> None:
    known = {pixel_redaction.folded(name) for name in rules.manufacturers}
    if known and pixel_redaction.folded(text(dataset, "Manufacturer")) not in known:
        raise FileRejectedError("manufacturer_not_allowed")


def _judge_pixels(dataset: Dataset, transfer_syntax: str, rules: AdmissionRules) -> None:
    if any(keyword in dataset for keyword in ("FloatPixelData", "DoubleFloatPixelData")):
        raise FileRejectedError("unsupported_encoding")  # parametric maps: numbers made from an image
    if "PixelData" not in dataset:
        raise FileRejectedError("no_pixels")
    if transfer_syntax not in DECODERS:
        raise FileRejectedError("unsupported_encoding")
    _judge_size(dataset, rules)


def _judge_origin(dataset: Dataset, sop_class: str, rules: AdmissionRules) -> None:
    """Where an image comes from decides whether a name may be burned into it.

    A risky one is let in when a rule blanks regions of it. ``BurnedInAnnotation = NO`` is not evidence, so
    it is not asked for.
    """
    modality = text(dataset, "Modality")
    blanked = bool(pixel_redaction.plan(dataset, rules.blanks, us_regions=rules.us_regions))
    ultrasound, marked = pixel_redaction.is_ultrasound(dataset), text(dataset, "BurnedInAnnotation").upper() == "YES"
    if (ultrasound or marked) and not blanked:
        raise FileRejectedError("burned_in_risk")
    if modality not in rules.modalities:
        raise FileRejectedError("modality_not_allowed")
    if sop_class == SECONDARY_CAPTURE or sop_class.startswith(SECONDARY_CAPTURE + "."):
        vouched = modality in rules.secondary_capture_modalities
    elif sop_class not in rules.sop_classes and not ultrasound:
        raise FileRejectedError("sop_class_not_allowed")
    else:
        vouched = tuple(text(dataset, "ImageType").upper().split("\\")[:2]) in rules.image_types
    if "PixelData" in dataset and not (vouched or blanked):
        raise FileRejectedError("burned_in_risk")
    _judge_colours(dataset, modality, rules, blanked=blanked)


def _judge_colours(dataset: Dataset, modality: str, rules: AdmissionRules, *, blanked: bool) -> None:
    """Grey is usual; colour, on a device that makes grey images, is a screen or an annotation."""
    colours = text(dataset, "PhotometricInterpretation")
    if "PixelData" not in dataset or colours in _GREY:
        return
    if colours not in _COLOUR:
        raise FileRejectedError("unsupported_encoding")
    if modality not in rules.colour_modalities and not blanked:
        raise FileRejectedError("burned_in_risk")


def _judge_size(dataset: Dataset, rules: AdmissionRules) -> None:
    rows, columns = dataset.get("Rows"), dataset.get("Columns")
    samples, bits = dataset.get("SamplesPerPixel", 1), dataset.get("BitsAllocated")
    count = frames(dataset)
    numbers = (rows, columns, samples, bits, count)
    if not all(isinstance(n, int) and n > 0 for n in numbers):
        raise FileRejectedError("undecodable")
    if bits not in (8, 16, 32) or samples not in (1, 3):
        raise FileRejectedError("unsupported_encoding")
    if text(dataset, "PhotometricInterpretation") == "PALETTE COLOR":
        if (samples, bits) not in ((1, 8), (1, 16)):
            raise FileRejectedError("undecodable")
        samples, bits = 3, 16  # what the palette makes of it
    if not rows * columns * count * samples <= rules.max_pixels:
        raise FileRejectedError("too_large")
    if not rows * columns * count * samples * bits // 8 <= rules.max_bytes:
        raise FileRejectedError("too_large")
