"""Pixels of a DICOM image: pinned decoders that are shown only what agrees with the header, and native output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import imagecodecs
import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import generate_frames
from pydicom.pixels.processing import apply_color_lut, convert_color_space
from pydicom.pixels.utils import pixel_array
from pydicom.uid import UID

from agent.deidentify.admission_rules import DECODERS, IMAGECODECS
from agent.deidentify.attributes import frames, text
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.pixels import codestream
from agent.deidentify.pixels.interpretation import FULL_RANGE, interpret
from agent.deidentify.prescan import EXPLICIT_LE

Stored = NDArray[np.integer[Any]]
_PALETTE: Final = "PALETTE COLOR"
_PALETTES: Final = tuple(f"{colour}PaletteColorLookupTableData" for colour in ("Red", "Green", "Blue"))
_LOSSY_JPEG: Final = frozenset({"1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51"})


def decode(dataset: Dataset, transfer_syntax: str) -> Stored:
    """The stored values, ([frames,] rows, columns[, 3]), colour and palettes as RGB.

    Bits above BitsStored are cleared (an old-style overlay, a drawing or a name, can hide there).

    Raises:
        FileRejectedError: ``unsupported_encoding``, ``undecodable``; decoders raise errors of their own on broken
        data.
    """
    if transfer_syntax not in DECODERS:
        raise FileRejectedError("unsupported_encoding")
    decoder = DECODERS[transfer_syntax]
    streams = list(_streams(dataset, transfer_syntax)) if decoder else []
    if decoder == IMAGECODECS:
        values: Stored = _jpeg(dataset, streams, transfer_syntax)
    else:
        values = pixel_array(dataset, decoding_plugin=decoder)
    values = _cleared(dataset, values)
    return _coloured(dataset, values) if text(dataset, "PhotometricInterpretation") == _PALETTE else values


def _streams(dataset: Dataset, transfer_syntax: str) -> Iterator[bytes]:
    """The compressed frames, each found to agree with the header."""
    count, samples = frames(dataset), int(dataset.get("SamplesPerPixel", 1))
    expected = codestream.Shape(int(dataset.Rows), int(dataset.Columns), samples, int(dataset.BitsAllocated))
    found = 0
    for frame in generate_frames(dataset.PixelData, number_of_frames=count):
        codestream.check(frame, transfer_syntax, expected)
        found += 1
        yield frame
    if found != count:
        raise FileRejectedError("undecodable")


def _jpeg(dataset: Dataset, streams: list[bytes], transfer_syntax: str) -> Stored:
    """JPEG by libjpeg-turbo. Which colours a stream has is said by DICOM, not by its own markers (PS3.5 8.2.1)."""
    samples, photometric = int(dataset.get("SamplesPerPixel", 1)), text(dataset, "PhotometricInterpretation")
    luma = photometric.startswith("YBR_FULL")
    inside = None if samples == 1 else "YCBCR" if luma and transfer_syntax in _LOSSY_JPEG else "RGB"
    outside = None if samples == 1 else "RGB"
    container = np.dtype(f"u{int(dataset.BitsAllocated) // 8}")
    decoded = [imagecodecs.jpeg8_decode(s, colorspace=inside, outcolorspace=outside) for s in streams]
    pictures = [picture.astype(container, copy=False) for picture in decoded]
    values: Stored = np.stack(pictures) if len(pictures) > 1 else pictures[0]
    if samples == 3 and luma and inside == "RGB":  # a lossless stream holds the luma as it is
        values = convert_color_space(values, photometric, "RGB", per_frame=True)
    return values.view(f"i{container.itemsize}") if dataset.get("PixelRepresentation") == 1 else values


def _cleared(dataset: Dataset, values: Stored) -> Stored:
    samples, count = int(dataset.get("SamplesPerPixel", 1)), frames(dataset)
    shape = (count,) * (count > 1) + (int(dataset.Rows), int(dataset.Columns)) + (3,) * (samples == 3)
    allocated, stored = int(dataset.BitsAllocated), int(dataset.BitsStored)
    sound = values.shape == shape and values.dtype.kind in "iu" and values.dtype.itemsize * 8 == allocated
    if not (sound and 0 < stored <= allocated and dataset.get("HighBit", stored - 1) == stored - 1):
        raise FileRejectedError("undecodable")
    # pydicom 3.0.2 clears the bits of native pixel data too; the guarantee must not hang on its version
    if stored == allocated:
        return values
    if values.dtype.kind == "i":
        return (values << (allocated - stored)) >> (allocated - stored)
    return values & values.dtype.type((1 << stored) - 1)


def _coloured(dataset: Dataset, values: Stored) -> Stored:
    """Indices into a palette (PS3.3 C.7.6.3.1.5) as 8- or 16-bit RGB; 16 bits that say no more than 8 become 8."""
    colours: Stored = apply_color_lut(values, dataset)
    if colours.shape != (*values.shape, 3):
        raise FileRejectedError("undecodable")
    return (colours >> 8).astype(np.uint8) if colours.dtype == np.uint16 and _eight_bits(dataset) else colours


def _eight_bits(dataset: Dataset) -> bool:
    """Whether all entries of a 16-bit palette are bytes, written as ``n * 256`` or as ``n * 257``."""
    tables = [
        np.frombuffer(dataset[t].value, "<u2") for t in _PALETTES if t in dataset and len(dataset[t].value) % 2 == 0
    ]
    if len(tables) != len(_PALETTES):
        return False
    return any(all(bool((t & 0xFF == low(t)).all()) for t in tables) for low in (np.zeros_like, _high))


def _high(entries: NDArray[np.uint16]) -> NDArray[np.uint16]:
    return (entries >> 8).astype(np.uint16)


def native(dataset: Dataset, values: Stored) -> Dataset:
    """The data set with its pixel data replaced by decoded values, uncompressed.

    What a compressed stream carries beside the image (comments, EXIF, bytes after the end) is gone.
    """
    copy = Dataset(dataset)
    copy.file_meta = FileMetaDataset()
    copy.file_meta.TransferSyntaxUID = UID(EXPLICIT_LE)
    data = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()
    copy.PixelData = data if len(data) % 2 == 0 else data + b"\0"
    copy.PixelRepresentation = int(values.dtype.kind == "i")
    photometric = text(dataset, "PhotometricInterpretation")
    if photometric == _PALETTE:
        copy.SamplesPerPixel = 3
        copy.BitsAllocated = copy.BitsStored = 8 * values.dtype.itemsize
        copy.HighBit = copy.BitsStored - 1
    if photometric == _PALETTE or int(dataset.get("SamplesPerPixel", 1)) == 3:
        copy.PhotometricInterpretation = "RGB"
        copy.PlanarConfiguration = 0
    return copy


def unit_range(dataset: Dataset, values: Stored) -> NDArray[np.float32]:
    """One frame as (h, w) or (h, w, 3) float32 in [0, 1], bright is high, as ingest shows every image.

    The modality LUT, then the first window, without one the full range; colour stays RGB.

    Raises:
        FileRejectedError: ``undecodable``, not finite or not one frame.
    """
    frame = values.ndim == 2 or (values.ndim == 3 and values.shape[-1] == 3 and frames(dataset) == 1)
    if not frame or not values.size:
        raise FileRejectedError("undecodable")
    return interpret(dataset, values, FULL_RANGE if values.ndim == 3 else "first_window").values
