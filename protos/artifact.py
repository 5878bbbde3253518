"""The byte forms of artifacts, one encoding each: an image set and a flat parameter vector.

An image set is a USTAR archive: ``labels.json`` first, then ``00000.png`` and so on, 8-bit greyscale, with every
header field fixed. A vector is a safetensors file with the one tensor ``flat``, float32. Reading is strict: what
does not encode back to the same bytes is refused, so neither form has room for a second message.
"""

from __future__ import annotations

import io
import json
import tarfile
import warnings
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load, save

MAX_IMAGES: Final = 100_000
MAX_SIDE: Final = 2_048
MAX_PIXELS: Final = 1 << 26  # of a whole set: what it may take in memory, counted before anything is decoded


class BadArtifact(ValueError):
    """The bytes are not an artifact in its one form."""


def pack_vector(vector: NDArray[np.float32]) -> bytes:
    """A (p,) float32 vector as safetensors."""
    return save({"flat": np.ascontiguousarray(vector, dtype=np.float32)})


def unpack_vector(raw: bytes) -> NDArray[np.float32]:
    """The (p,) float32 vector of :func:`pack_vector`.

    Raises:
        BadArtifact: other tensors, types or shapes, metadata, non-finite values, or another encoding.
    """
    try:
        tensors = load(raw)
    except (SafetensorError, ValueError):
        raise BadArtifact("not a safetensors file") from None
    vector = tensors.get("flat")
    if vector is None or len(tensors) != 1 or vector.dtype != np.float32 or vector.ndim != 1 or not vector.size:
        raise BadArtifact("the file must hold one float32 vector named flat")
    if not bool(np.isfinite(vector).all()):
        raise BadArtifact("the vector is not finite")
    if pack_vector(vector) != raw:
        raise BadArtifact("not in its one form")
    return vector


def _png(image: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, format="PNG", optimize=False, compress_level=9)
    return out.getvalue()


def _member(name: str, body: bytes) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(body), 0o644
    return info, io.BytesIO(body)


def pack_images(images: NDArray[np.uint8], labels: tuple[str, ...]) -> bytes:
    """(m, h, w) uint8 images with one label each, as a USTAR archive."""
    out = io.BytesIO()
    listing = json.dumps(list(labels), separators=(",", ":"), ensure_ascii=True).encode()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(*_member("labels.json", listing))
        for i, image in enumerate(images):
            archive.addfile(*_member(f"{i:05d}.png", _png(image)))
    return out.getvalue()


def unpack_images(raw: bytes) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """The images and labels of :func:`pack_images`.

    Raises:
        BadArtifact: another member, type, size or encoding; an image too large; no image at all.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            members = archive.getmembers()
            bodies = [_body(archive, m, i) for i, m in enumerate(members)]
        if not sum(_pixels(body) for body in bodies[1:]) <= MAX_PIXELS:
            raise BadArtifact("the set has too many pixels")
        labels = json.loads(bodies[0])
        images = [_image(body) for body in bodies[1:]]
    except (tarfile.TarError, ValueError, IndexError, RecursionError, OverflowError):
        raise BadArtifact("not an image set") from None
    if not images or len({i.shape for i in images}) != 1:
        raise BadArtifact("the images must have one shape, and there must be one")
    if not isinstance(labels, list) or len(labels) != len(images) or not all(_is_label(x) for x in labels):
        raise BadArtifact("one short plain label for each image")
    stacked = np.stack(images)
    if pack_images(stacked, tuple(labels)) != raw:
        raise BadArtifact("not in its one form")
    return stacked, tuple(labels)


def _pixels(png: bytes) -> int:
    """Width times height, from the header of a PNG (RFC 2083, section 4.1.1); nothing is decoded."""
    if len(png) < 33 or png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR":
        raise BadArtifact("an image is not a PNG")
    return int.from_bytes(png[16:20], "big") * int.from_bytes(png[20:24], "big")


def _is_label(value: object) -> bool:
    return type(value) is str and len(value) <= 32 and value.isascii() and value.isprintable()


def _body(archive: tarfile.TarFile, member: tarfile.TarInfo, index: int) -> bytes:
    name = "labels.json" if index == 0 else f"{index - 1:05d}.png"
    if index > MAX_IMAGES or member.name != name or not member.isreg():
        raise BadArtifact("an archive member is out of place")
    handle = archive.extractfile(member)
    if handle is None:
        raise BadArtifact("an archive member has no body")
    return handle.read()


def _image(body: bytes) -> NDArray[np.uint8]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with Image.open(io.BytesIO(body), formats=("PNG",)) as picture:
                if picture.mode != "L" or not max(picture.size) <= MAX_SIDE:
                    raise BadArtifact("an image is not 8-bit greyscale, or too large")
                return np.asarray(picture, dtype=np.uint8)
        except (OSError, SyntaxError, Warning, Image.DecompressionBombError):
            raise BadArtifact("an image cannot be decoded") from None
