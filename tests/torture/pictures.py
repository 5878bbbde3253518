"""Names burned into pictures: five kinds of picture, four fonts, five sizes, white on black and black on white.

Three fonts are Debian's (``fonts-dejavu-core``, ``fonts-liberation``), one comes with Pillow. The CT, MR and US
pictures are real; a CR of a useful size is not among pydicom's files, so the CT slice stands in under a CR header,
and a captured screen is that slice in colour. Every header says ``BurnedInAnnotation = NO``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.pixels.utils import pixel_array
from pydicom.uid import UID, ExplicitVRLittleEndian

from tests.torture.plants import Made, blank, bundled, dress, encode, original
from tests.torture.sower import Sower

_TRUETYPE: Final = Path("/usr/share/fonts/truetype")
FONTS: Final = (
    ("dejavu-sans", _TRUETYPE / "dejavu/DejaVuSans.ttf"),
    ("dejavu-serif", _TRUETYPE / "dejavu/DejaVuSerif.ttf"),
    ("liberation-mono", _TRUETYPE / "liberation/LiberationMono-Regular.ttf"),
    ("pillow", None),
)
SIZES: Final = (10, 14, 20, 28, 40)
_PLACES: Final = ((0.03, 0.03), (0.85, 0.05), (0.04, 0.45), (0.45, 0.1))  # top, left, as parts of the picture


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of picture: where its pixels and its header come from."""

    modality: str
    source: str
    plugin: str
    sop_class: str  # "" keeps that of the source
    colour: bool = False


KINDS: Final = (
    Kind("CT", "J2K_pixelrep_mismatch.dcm", "pylibjpeg", ""),
    Kind("MR", "examples_overlay.dcm", "", ""),
    Kind("US", "examples_rgb_color.dcm", "", ""),
    Kind("OT", "J2K_pixelrep_mismatch.dcm", "pylibjpeg", "1.2.840.10008.5.1.4.1.1.7", colour=True),
    Kind("CR", "J2K_pixelrep_mismatch.dcm", "pylibjpeg", "1.2.840.10008.5.1.4.1.1.1"),
)


def font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """One of ``FONTS``. Raises: OSError when the package that holds it is not installed."""
    path = dict(FONTS)[name]
    return ImageFont.load_default(size) if path is None else ImageFont.truetype(str(path), size)


@cache
def _pixels(kind: Kind) -> NDArray[np.integer]:
    dataset = bundled(kind.source)
    values: NDArray[np.integer] = pixel_array(dataset, decoding_plugin=kind.plugin)
    if not kind.colour:
        return values
    low, high = np.percentile(values, (1, 99))
    grey = (np.clip((values - low) / (high - low), 0, 1) * 255).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=-1)


def drawn(
    pixels: NDArray[np.integer],
    text: str,
    face: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    corner: tuple[float, float],
    *,
    inverse: bool,
) -> tuple[NDArray[np.integer], tuple[int, int, int, int]]:
    """Text in a picture at its brightest value, or dark in a bright box; and (top, left, bottom, right) of it."""
    height, width = pixels.shape[:2]
    sheet = Image.new("L", (width, height))
    pen = ImageDraw.Draw(sheet)
    _, _, right, bottom = pen.textbbox((0, 0), text, font=face)
    top, left = int(corner[0] * height), int(corner[1] * width)
    top, left = max(0, min(top, height - int(bottom) - 3)), max(0, min(left, width - int(right) - 3))
    pen.text((left, top), text, fill=255, font=face)
    box = (max(top - 2, 0), max(left - 2, 0), min(top + int(bottom) + 3, height), min(left + int(right) + 3, width))
    ink = np.asarray(sheet, dtype=np.float64) / 255
    low, high = float(pixels.min()), float(np.percentile(pixels, 99.9))
    under = pixels.astype(np.float64)
    if inverse:
        under[box[0] : box[2], box[1] : box[3]] = high
    shade = ink[..., None] if pixels.ndim == 3 else ink
    mixed = under * (1 - shade) + (low if inverse else high) * shade
    return np.rint(mixed).astype(pixels.dtype), box


def us_region(height: int, width: int) -> tuple[int, int, int, int]:
    """Where an ultrasound picture says its echoes are: top, left, bottom, right; some of the texts reach into it."""
    return height // 4, width // 2, height * 4 // 5, width * 19 // 20


def _region(box: tuple[int, int, int, int]) -> Dataset:
    item = Dataset()  # PS3.3 C.8.5.5
    item.RegionLocationMinY0, item.RegionLocationMinX0 = box[0], box[1]
    item.RegionLocationMaxY1, item.RegionLocationMaxX1 = box[2] - 1, box[3] - 1
    item.RegionSpatialFormat, item.RegionDataType, item.RegionFlags = 1, 1, 0
    return item


def _header(kind: Kind, pixels: NDArray[np.integer]) -> Dataset:
    dataset = blank(bundled(kind.source))
    for group in range(0x6000, 0x6020, 2):
        for element in [e for e in dataset if e.tag.group == group]:
            del dataset[element.tag]
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.Modality = kind.modality
    if kind.sop_class:
        dataset.SOPClassUID = UID(kind.sop_class)
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if kind.colour:
        dataset.PlanarConfiguration = 0
        for keyword in ("RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth"):
            dataset.pop(keyword, None)
    if kind.modality == "US":
        dataset.SequenceOfUltrasoundRegions = [_region(us_region(*pixels.shape[:2]))]
    stored = 8 * pixels.dtype.itemsize
    dataset.BitsAllocated = stored
    dataset.BitsStored = stored
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    return original(dataset)


def picture(kind: Kind, number: int) -> Made:
    """One picture of a kind: its font, size, place and polarity follow from its number, 0 to 19."""
    name, size = FONTS[number % 4][0], SIZES[(number + KINDS.index(kind)) % 5]
    inverse, corner = bool(number // 4 % 2), _PLACES[number * 3 % 4]
    file = f"burned_{kind.modality.lower()}_{number:02}_{name}_{size}{'_inverse' if inverse else ''}.dcm"
    sower = Sower(file)
    pixels = _pixels(kind)
    dataset = _header(kind, pixels)
    dress(dataset, sower)
    text = sower.word("burned in", "pixels").upper()
    values, box = drawn(pixels, text, font(name, size), corner, inverse=inverse)
    dataset.BurnedInAnnotation = "NO"  # a lie
    study = f"2.999.7709.{KINDS.index(kind)}.{number % 4}"
    dataset.StudyInstanceUID = sower.known("StudyInstanceUID", study, "rekeyed")
    raw = values.astype(values.dtype.newbyteorder("<")).tobytes()
    dataset.PixelData = raw + b"\0" * (len(raw) % 2)
    dataset["PixelData"].VR = "OB" if dataset.BitsAllocated == 8 else "OW"
    return Made(file, encode(dataset), tuple(sower.plants), True, box, f"{kind.modality}/{name}")


def burned_in(each: int = 8) -> list[Made]:
    """``each`` pictures of every kind: 8 give every font in both polarities; 20 every font in every size."""
    return [picture(kind, number) for kind in KINDS for number in range(each)]
