"""Images of a release for the screen: an artifact unpacked, a heat map drawn, everything as PNG. Pure."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protos.artifacts.byte_source import BytesSource, Window
from protos.artifacts.dicom import check_dicom
from protos.artifacts.nifti import check_nifti
from protos.artifacts.shards import check_kept_shard, read_kept_png

HOTTEST: Final = 64.0  # grey values: what differs by more is drawn as this does
LARGEST: Final = 512  # pixels of a side on the screen
LEAST: Final = 192  # pixels of a side: smaller images are drawn with larger squares
_RAMP: Final = np.asarray(  # black, violet, red, orange, yellow, near white: brighter is more, for every eye
    [[0, 0, 4], [66, 10, 104], [147, 38, 103], [221, 81, 58], [252, 165, 10], [252, 255, 164]], np.float32
)


def unpack(artifact: bytes) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """The images of an image set or the middle slices of a volume set, (m, h, w[, 3]), and their labels.

    Slices are from left to right of the array's middle plane; grey values are stretched over what the set holds.

    Raises:
        ArtifactFormatError: not a set.
    """
    found: list[NDArray[np.generic]] = []

    def take(sample: Window) -> None:
        found.append(_sample(sample, len(found)))

    contents = check_kept_shard(BytesSource(artifact), take)
    whole = np.stack(found)
    if whole.dtype == np.uint8:
        return whole, contents.labels
    values = whole.astype(np.float32)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    scaled = (values - low) * (255.0 / (high - low)) if high > low else np.zeros_like(values)
    return np.rint(np.nan_to_num(scaled)).astype(np.uint8), contents.labels


def _sample(sample: Window, index: int) -> NDArray[np.generic]:
    head = sample.read(0, min(8, sample.size))
    if head.startswith(b"\x89PNG"):
        return read_kept_png(sample)
    if sample.size > 132 and sample.read(128, 4) == b"DICM":
        picture = check_dicom(sample, index)
        body = sample.read(sample.size - picture.nbytes - picture.nbytes % 2, picture.nbytes)
        pixels = np.frombuffer(body, np.dtype(picture.dtype).newbyteorder("<")).reshape(picture.shape)
        return pixels if pixels.ndim == 2 else pixels[pixels.shape[0] // 2]
    volume = check_nifti(sample)
    kind = np.dtype(volume.dtype).newbyteorder("<")
    count = int(np.prod(volume.shape))
    body = sample.read(sample.size - count * kind.itemsize, count * kind.itemsize)
    voxels = np.frombuffer(body, kind).reshape(volume.shape, order="F")  # x is the fastest, NIfTI-1 section 6
    return np.flipud(voxels[volume.shape[0] // 2].T)  # from the side, the head up


def png(picture: NDArray[np.uint8]) -> bytes:
    """An image (h, w[, 3]) as PNG, enlarged pixel by pixel or made smaller to fit the screen."""
    made = Image.fromarray(picture)
    side = max(made.size)
    if side > LARGEST:
        made.thumbnail((LARGEST, LARGEST))
    elif side < LEAST:
        times = -(-LEAST // side)
        made = made.resize((made.width * times, made.height * times), Image.Resampling.NEAREST)
    out = io.BytesIO()
    made.save(out, "PNG")
    return out.getvalue()


def heat(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Grey values of difference (h, w) as colours (h, w, 3): black is none, near white :data:`HOTTEST` or more."""
    at = np.clip(np.nan_to_num(values, nan=HOTTEST) / HOTTEST, 0.0, 1.0) * (len(_RAMP) - 1)
    low = np.minimum(at.astype(int), len(_RAMP) - 2)
    part = (at - low)[..., None]
    colours: NDArray[np.uint8] = np.rint(_RAMP[low] * (1.0 - part) + _RAMP[low + 1] * part).astype(np.uint8)
    return colours


def scale() -> NDArray[np.uint8]:
    """The heat map's scale, from no difference at the left to :data:`HOTTEST` at the right."""
    return heat(np.tile(np.linspace(0.0, HOTTEST, 240, dtype=np.float32), (12, 1)))
