"""How large a number may be, and how many digits it may carry, before it could be an identifier.

A telephone or record number is a number too, and a parser would accept it as a tube voltage. So every kept number has
a range that devices stay within, and as many digits as physics needs: 7 significant ones, the resolution of binary32.
Image geometry is kept exactly, unless its fraction alone has 10 digits or more. A number outside its range is
removed. Limit: an identifier of up to 7 digits (6 for counters) is not detected.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Final

from pydicom._dicom_dict import DicomDictionary
from pydicom.datadict import tag_for_keyword

MOST_VALUES: Final = 4096  # of one attribute
_LONG_FRACTION: Final = 10  # digits: a telephone number's
_DIGITS: Final = 7
_INTEGERS: Final = frozenset({"IS", "UL", "SL", "UV", "SV"})
_SHORT: Final = frozenset({"US", "SS", "US or SS"})  # 16 bits are a range of their own
_MULTIPLICITY: Final = re.compile(r"(?:\d+-)?(\d+)")


@dataclass(frozen=True, slots=True)
class NumericBound:
    """What the values of one attribute may be. ``fit`` decides about one of them."""

    low: float
    high: float
    decimals: int = 0  # of geometry: what a long fraction is rounded to; 0: ``digits`` counts
    digits: int = _DIGITS
    most: int = MOST_VALUES
    cycle: int = 0  # GE adds 10^9 to b-values to say how they were made

    def fit(self, value: float) -> float:
        """The value, rounded where it carries more digits than it may; NaN when it is out of range."""
        if self.cycle and value >= self.cycle:
            value %= self.cycle
        if not self.low <= value <= self.high:
            return math.nan
        if not self.decimals:
            return float(f"{value:.{self.digits}g}")
        if not _fraction(value) >= _LONG_FRACTION:
            return value
        # a spacing below 0.1 keeps its significant digits: pixels of microscopes are 0.00025 mm wide
        return round(value, self.decimals) if abs(value) >= 0.1 else float(f"{value:.{self.decimals}g}")


def _fraction(value: float) -> int:
    """Digits that are written behind the point, without the zeros before the first of them."""
    written = repr(value)
    if len(written) < _LONG_FRACTION + 2:
        return 0
    _, digits, exponent = Decimal(written).normalize().as_tuple()
    return min(len(digits), -exponent) if isinstance(exponent, int) else 0


COUNTER: Final = NumericBound(0, 1e6)
_WHOLE: Final = NumericBound(-1e6, 1e6)
_PLAIN: Final = NumericBound(-1e7, 1e7)
_ANY_16_BITS: Final = NumericBound(-32768, 65535)
_PLACE: Final = NumericBound(-99999, 99999, decimals=6)
_DIRECTION: Final = NumericBound(-1.01, 1.01, decimals=8)

_RANGES: Final[tuple[tuple[NumericBound, tuple[str, ...]], ...]] = (
    (
        _PLACE,
        ("ImagePositionPatient", "ImagePositionVolume", "SliceLocation", "SliceThickness", "SpacingBetweenSlices"),
    ),
    (
        _PLACE,
        ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing", "ObjectPixelSpacingInCenterOfBeam"),
    ),
    (_PLACE, ("PhysicalDeltaX", "PhysicalDeltaY", "DetectorElementSpacing", "ReconstructionPixelSpacing")),
    (_PLACE, ("XOffsetInSlideCoordinateSystem", "YOffsetInSlideCoordinateSystem", "ZOffsetInSlideCoordinateSystem")),
    (_PLACE, ("ImagedVolumeWidth", "ImagedVolumeHeight", "ImagedVolumeDepth")),
    (_DIRECTION, ("ImageOrientationPatient", "ImageOrientationVolume", "ImageOrientationSlide")),
    (_DIRECTION, ("DiffusionGradientOrientation", "SlabOrientation", "VelocityEncodingDirection")),
    (NumericBound(-99999, 99999, decimals=8), ("FrameOfReferenceTransformationMatrix",)),
    (COUNTER, ("InstanceNumber", "SeriesNumber", "AcquisitionNumber", "NumberOfFrames")),
    (NumericBound(0, 1e4), ("EchoNumbers", "EchoTrainLength", "NumberOfAverages", "ImagingFrequency")),
    (NumericBound(0, 500), ("KVP", "HeartRate")),
    (NumericBound(0, 5000), ("XRayTubeCurrent", "XRayTubeCurrentInmA")),
    (NumericBound(0, 5e6, digits=5), ("XRayTubeCurrentInuA",)),
    (NumericBound(0, 1e8, digits=5), ("ExposureInuAs", "ExposureTimeInuS", "ActualFrameDuration")),
    (NumericBound(0, 1e5), ("Exposure", "ExposureInmAs", "EchoTime", "EffectiveEchoTime", "MagneticFieldStrength")),
    (NumericBound(0, 1e6), ("ExposureTime", "ExposureTimeInms", "RepetitionTime", "InversionTime")),
    (NumericBound(-1e8, 1e8), ("FrameReferenceTime",)),
    (
        NumericBound(-360, 360),
        ("FlipAngle", "GantryDetectorTilt", "PositionerPrimaryAngle", "PositionerSecondaryAngle"),
    ),
    (NumericBound(0, 20000), ("DiffusionBValue", "SAR", "dBdt")),
    (NumericBound(0, 1000, digits=4), ("PatientWeight", "PatientSize", "PatientBodyMassIndex")),
    (NumericBound(0, 1e12, digits=5), ("RadionuclideTotalDose", "RadiopharmaceuticalSpecificActivity")),
    (NumericBound(0, 1e9), ("RadionuclideHalfLife",)),
    (
        NumericBound(0, 1e11, digits=5),
        ("CountsAccumulated", "PrimaryPromptsCountsAccumulated", "SecondaryCountsAccumulated"),
    ),
)


def _keyed() -> dict[int, NumericBound]:
    found: dict[int, NumericBound] = {}
    for bound, keywords in _RANGES:
        for keyword in keywords:
            tag = tag_for_keyword(keyword)
            if tag is None or tag in found:
                raise ValueError(f"not in the DICOM dictionary, or twice: {keyword}")
            found[tag] = bound
    return found


_BY_TAG: Final = _keyed()


@cache
def bound_of(tag: int) -> NumericBound:
    """The bound of one standard attribute: its own, or that of its VR; as many values as its VM admits."""
    vr, multiplicity = DicomDictionary[tag][:2]
    usual = _ANY_16_BITS if vr in _SHORT else _WHOLE if vr in _INTEGERS else _PLAIN
    bound = _BY_TAG.get(tag, usual)
    stated = _MULTIPLICITY.fullmatch(multiplicity)  # "1-n" and "3-3n" have no end
    most = int(stated[1]) if stated is not None else MOST_VALUES
    return NumericBound(bound.low, bound.high, bound.decimals, bound.digits, most)


@cache
def standard(tag: int) -> bool:
    """Whether a tag is one of the standard's attributes: what an AT value may name."""
    return tag in DicomDictionary
