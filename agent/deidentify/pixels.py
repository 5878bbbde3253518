"""Pixels of a DICOM image: pinned decoders, the range [0, 1], and nothing written back beside them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.pixels.processing import apply_modality_lut
from pydicom.pixels.utils import pixel_array
from pydicom.uid import UID

from agent.deidentify.prescan import EXPLICIT_LE
from agent.deidentify.reasons import Refused
from agent.deidentify.rules import DECODERS, frames, text

Stored = NDArray[np.integer]
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601


def decode(dataset: Dataset, transfer_syntax: str) -> Stored:
    """The stored values, ([frames,] rows, columns[, 3]), colour as RGB.

    Bits above BitsStored are cleared (an old-style overlay, a drawing or a name, can hide there).

    Raises:
        Refused: ``unsupported_encoding``, ``undecodable``; decoders raise errors of their own on broken data.
    """
    if transfer_syntax not in DECODERS:
        raise Refused("unsupported_encoding")
    values: Stored = pixel_array(dataset, decoding_plugin=DECODERS[transfer_syntax])
    samples, count = int(dataset.get("SamplesPerPixel", 1)), frames(dataset)
    shape = (count,) * (count > 1) + (int(dataset.Rows), int(dataset.Columns)) + (3,) * (samples == 3)
    allocated, stored = int(dataset.BitsAllocated), int(dataset.BitsStored)
    sound = values.shape == shape and values.dtype.kind in "iu" and values.dtype.itemsize * 8 == allocated
    if not (sound and 0 < stored <= allocated and dataset.get("HighBit", stored - 1) == stored - 1):
        raise Refused("undecodable")
    # pydicom 3.0.2 clears the bits of native pixel data too; the guarantee must not hang on its version
    if stored == allocated:
        return values
    if values.dtype.kind == "i":
        return (values << (allocated - stored)) >> (allocated - stored)
    return values & values.dtype.type((1 << stored) - 1)


def native(dataset: Dataset, values: Stored) -> Dataset:
    """The data set with its pixel data replaced by decoded values, uncompressed.

    What a compressed stream carries beside the picture (comments, EXIF, bytes after the end) is gone.
    """
    copy = Dataset(dataset)
    copy.file_meta = FileMetaDataset()
    copy.file_meta.TransferSyntaxUID = UID(EXPLICIT_LE)
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    copy.PixelData = data + b"\0" * (len(data) % 2)
    copy.PixelRepresentation = int(values.dtype.kind == "i")
    if int(dataset.get("SamplesPerPixel", 1)) == 3:
        copy.PhotometricInterpretation = "RGB"
        copy.PlanarConfiguration = 0
    return copy


def _numbers(dataset: Dataset, keyword: str) -> list[float]:
    value = dataset.get(keyword)
    values = [] if value is None else [value] if not hasattr(value, "__iter__") else list(value)
    return [float(v) for v in values]


def _window(dataset: Dataset) -> tuple[float, float] | None:
    """Lower and upper end of the first linear window (PS3.3 C.11.2.1.2), or None when there is none."""
    centres, widths = _numbers(dataset, "WindowCenter"), _numbers(dataset, "WindowWidth")
    function = text(dataset, "VOILUTFunction") or "LINEAR"
    if not (centres and widths) or function not in ("LINEAR", "LINEAR_EXACT"):
        return None
    half = widths[0] / 2 if function == "LINEAR_EXACT" else (widths[0] - 1) / 2
    centre = centres[0] if function == "LINEAR_EXACT" else centres[0] - 0.5
    if not (math.isfinite(centre) and math.isfinite(half) and half > 0):
        return None
    return centre - half, centre + half


def unit_range(dataset: Dataset, values: Stored) -> NDArray[np.float32]:
    """One frame as (h, w) float32 in [0, 1], bright is high.

    The modality LUT, then the first linear window; without one, 8-bit images span 0 to 255 and deeper ones
    their own smallest to largest value. Colour becomes luma.

    Raises:
        Refused: ``undecodable``, not finite or not one frame.
    """
    if values.ndim == 3 and values.shape[-1] == 3:
        luma = values.astype(np.float32) @ _LUMA / np.float32(np.iinfo(values.dtype).max)
        unit: NDArray[np.float32] = np.clip(luma, 0.0, 1.0).astype(np.float32)
        return unit
    if values.ndim != 2 or not values.size:
        raise Refused("undecodable")
    real = np.asarray(apply_modality_lut(values, dataset), dtype=np.float64)
    plain = "ModalityLUTSequence" not in dataset and "RescaleSlope" not in dataset
    window = _window(dataset)
    if window is not None:
        low, high = window
    elif plain and values.dtype == np.uint8:
        low, high = 0.0, 255.0
    else:
        low, high = float(real.min()), float(real.max())
    if not bool(np.isfinite(real).all()):
        raise Refused("undecodable")
    grey = np.clip((real - low) / (high - low), 0.0, 1.0) if high > low else np.zeros_like(real)
    if text(dataset, "PhotometricInterpretation") == "MONOCHROME1":
        grey = 1.0 - grey
    return grey.astype(np.float32)
