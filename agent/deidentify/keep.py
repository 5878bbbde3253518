"""The attributes that stay, and in what form: everything else goes (default deny).

The list is what it takes to decode and use a picture: the image pixel module, geometry, display and a
few acquisition numbers. Nothing that stays is free text. A number must parse as a finite number, a term
must be one of the defined terms below, whatever VR the file claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pydicom.datadict import tag_for_keyword


def _tags(*keywords: str) -> frozenset[int]:
    tags = {keyword: tag_for_keyword(keyword) for keyword in keywords}
    unknown = [keyword for keyword, tag in tags.items() if tag is None]
    if unknown:
        raise ValueError(f"not in the DICOM dictionary: {unknown}")
    return frozenset(tag for tag in tags.values() if tag is not None)


NUMBERS: Final = _tags(
    # image pixel (PS3.3 C.7.6.3) and frames
    *("Rows", "Columns", "SamplesPerPixel", "PlanarConfiguration", "NumberOfFrames", "BitsAllocated"),
    *("BitsStored", "HighBit", "PixelRepresentation", "PixelAspectRatio", "PixelPaddingValue"),
    *("SmallestImagePixelValue", "LargestImagePixelValue", "FrameTime"),
    # geometry
    *("PixelSpacing", "ImagerPixelSpacing", "ImagePositionPatient", "ImageOrientationPatient"),
    *("SliceThickness", "SpacingBetweenSlices", "SliceLocation", "InstanceNumber"),
    *("InStackPositionNumber", "TemporalPositionIndex"),
    # display
    *("RescaleIntercept", "RescaleSlope", "WindowCenter", "WindowWidth", "LossyImageCompressionRatio"),
    "LUTDescriptor",
    # acquisition
    *("EchoTime", "RepetitionTime", "InversionTime", "FlipAngle", "MagneticFieldStrength", "KVP"),
    *("EchoTrainLength", "NumberOfAverages", "ReconstructionDiameter", "XRayTubeCurrent", "ExposureTime"),
)

LOOKUP_TABLES: Final = _tags("LUTData")  # cut to the length that the descriptor states
PIXELS: Final = 0x7FE00010

DATES: Final = _tags("StudyDate", "SeriesDate", "AcquisitionDate", "ContentDate", "AcquisitionDateTime")

CLASS_UIDS: Final = _tags("SOPClassUID", "ReferencedSOPClassUID")  # kept when the standard defines them

SEQUENCES: Final = _tags(
    *("ReferencedImageSequence", "SourceImageSequence", "ModalityLUTSequence", "VOILUTSequence"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "PixelMeasuresSequence"),
    *("PlanePositionSequence", "PlaneOrientationSequence", "FrameVOILUTSequence", "FrameContentSequence"),
    *("PixelValueTransformationSequence", "MRImageFrameTypeSequence", "CTImageFrameTypeSequence"),
)

_YES_NO: Final = ("YES", "NO")
_IMAGE_TYPES: Final = (
    *("ORIGINAL", "DERIVED", "PRIMARY", "SECONDARY", "AXIAL", "LOCALIZER", "OTHER", "MPR", "NORM", "NONE"),
    *("M", "P", "R", "I", "ND", "MIXED", "VOLUME", "PROJECTION IMAGE", "DIFFUSION", "ADC", "M_SE", "M_FFE"),
)
_BODY_PARTS: Final = (
    *("HEAD", "BRAIN", "SKULL", "FACE", "NECK", "CSPINE", "TSPINE", "LSPINE", "SPINE", "CHEST", "BREAST"),
    *("HEART", "LUNG", "ABDOMEN", "LIVER", "KIDNEY", "PELVIS", "PROSTATE", "HIP", "KNEE", "ANKLE", "FOOT"),
    *("SHOULDER", "ELBOW", "WRIST", "HAND", "LEG", "ARM", "EYE", "RETINA", "WHOLEBODY"),
)
_TERMS: Final[dict[str, tuple[str, ...]]] = {
    "Modality": ("CR", "CT", "DX", "MG", "MR", "NM", "OP", "OPT", "OT", "PT", "RF", "SC", "US", "XA", "XC"),
    "ImageType": _IMAGE_TYPES,
    "FrameType": _IMAGE_TYPES,
    "PhotometricInterpretation": ("MONOCHROME1", "MONOCHROME2", "RGB", "YBR_FULL"),
    "ConversionType": ("DV", "DI", "DF", "WSD", "SD", "SI", "DRW", "SYN"),
    "RescaleType": ("HU", "OD", "US", "MGML", "Z_EFF", "ED", "EDW", "HU_MOD", "PCT"),
    "ModalityLUTType": ("HU", "OD", "US"),
    "PresentationLUTShape": ("IDENTITY", "INVERSE"),
    "PixelIntensityRelationship": ("LIN", "LOG", "DISP"),
    "VOILUTFunction": ("LINEAR", "LINEAR_EXACT", "SIGMOID"),
    "LossyImageCompression": ("00", "01"),
    "BurnedInAnnotation": _YES_NO,
    "RecognizableVisualFeatures": _YES_NO,
    "Laterality": ("L", "R", "U", "B"),
    "ImageLaterality": ("L", "R", "U", "B"),
    "ViewPosition": ("AP", "PA", "LL", "RL", "RLD", "LLD", "RLO", "LLO", "CC", "MLO"),
    "PatientPosition": ("HFP", "HFS", "HFDR", "HFDL", "FFDR", "FFDL", "FFP", "FFS"),
    "BodyPartExamined": _BODY_PARTS,
    "ScanningSequence": ("SE", "IR", "GR", "EP", "RM"),
    "SequenceVariant": ("SK", "MTC", "SS", "TRSS", "SP", "MP", "OSP", "TOF", "NONE"),
    "MRAcquisitionType": ("2D", "3D"),
}
TERMS: Final[Mapping[int, frozenset[str]]] = MappingProxyType(
    {tag: frozenset(terms) for keyword, terms in _TERMS.items() for tag in _tags(keyword)}
)
# an unknown value in these is replaced, because their other values and the number of values matter
REPLACE_UNKNOWN: Final[Mapping[int, str]] = MappingProxyType(
    {tag: "OTHER" for tag in _tags("ImageType", "FrameType")}
)
