"""A release that waits for approval, as persons look at it before they sign: its statement, its images, one sheet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from policies.statements import Release, claim_json, encode
from protos.artifacts.arrays import ArtifactFormatError, unpack_images

SHEET: Final = 100  # images on it, at most
_CELL: Final = 96  # pixels
_LABEL: Final = 14


def contact_sheet(images: NDArray[np.uint8], labels: tuple[str, ...]) -> Image.Image:
    """(m, h, w[, 3]) images, the first :data:`SHEET` of them side by side, each with its label under it."""
    count = min(len(images), SHEET)
    columns = max(1, int(np.ceil(np.sqrt(count))))
    rows = int(np.ceil(count / columns))
    sheet = Image.new("L" if images.ndim == 3 else "RGB", (columns * _CELL, rows * (_CELL + _LABEL)), "white")
    pen = ImageDraw.Draw(sheet)
    for i in range(count):
        x, y = (i % columns) * _CELL, (i // columns) * (_CELL + _LABEL)
        picture = Image.fromarray(images[i])
        scale = (_CELL - 4) / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        sheet.paste(picture.resize(size, Image.Resampling.NEAREST), (x + 2, y + 2))
        pen.text((x + 2, y + _CELL), labels[i][:12], fill="black")
    return sheet


def show(release: Release, artifact: bytes, folder: Path) -> list[str]:
    """Write what there is to look at into a new folder.

    Args:
        release: the statement that persons would approve.
        artifact: in clear, whatever is sealed to a reader later.
        folder: made here, 0700; the images have not been released.
    Returns:
        The names of the files.
    Raises:
        FileExistsError: the folder is there already.
    """
    folder.mkdir(mode=0o700)
    facts = json.loads(encode(release)) | {"claim": claim_json(release.claim)}
    (folder / "statement.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    (folder / "artifact").write_bytes(artifact)
    try:
        images, labels = unpack_images(artifact)
    except ArtifactFormatError:  # DICOM, volumes, a model: a viewer shows it
        return ["statement.json", "artifact"]
    contact_sheet(images, labels).save(folder / "sheet.png")
    return ["statement.json", "artifact", "sheet.png"]
