"""An alert for text in images: Debian's tesseract reads some of them. It misses much and guarantees nothing.

The rules keep names out (which devices' images may come in, and which regions are blanked); a recognised word means
that a rule is wrong. Tesseract runs as a separate program, so its parsers share neither memory nor keys with the
agent. Rejected: pytesseract, which passes images through files on the disk.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from agent.deidentify.record import Record
from protos.common.errors import WorkerError

Picture = NDArray[np.uint8]
_MARGIN: Final = 24  # pixels around: tesseract reads nothing that touches the edge
_STROKE: Final = 9  # pixels: structures thinner than this are what a top-hat keeps
_SIDE: Final = 1500  # of the image that is shown to tesseract: small letters are drawn larger
_LEAST_SCALE, _MOST_SCALE = 1.0, 4.0
_TSV: Final = "tessedit_create_tsv=1"  # twelve columns, the last two are confidence and text
_COLUMNS: Final = 12
_MEMORY: Final = 1 << 30
_DATE: Final = re.compile(r"(?<!\d)(?:\d{1,4}[./-]\d{1,2}[./-]\d{2,4}|(?:19|20)\d{6})(?!\d)")
_LETTERS: Final = re.compile(r"[^\W\d_]+")
_NEEDLE: Final = 3  # characters: what is shorter is found in any noise


class OcrMissingError(WorkerError, RuntimeError):
    """Tesseract is not installed, though the settings ask for it."""


@dataclass(frozen=True, slots=True)
class OcrSettings:
    """How much is read."""

    every: int = 20  # one image in so many, besides the first of each series
    least_letters: int = 4  # of a word that raises the alert
    # tesseract's own, 0 to 100: on ten clean CT and MR slices, words like "Pars" and "epee" were read below 56
    least_confidence: float = 60.0
    seconds: float = 20.0  # for one look at one image
    program: str = "tesseract"  # the command that reads text, on the agent's path
    language: str = "eng"  # of the text, as the program names it

    def __post_init__(self) -> None:
        """Limits are positive, and a word has letters."""
        if not (self.every >= 1 and self.least_letters >= 3 and 0 < self.seconds <= 600):
            raise ValueError("ocr: every >= 1, least_letters >= 3 and 0 < seconds <= 600 are needed")
        if not 0 <= self.least_confidence <= 100:
            raise ValueError("ocr: least_confidence lies between 0 and 100")
        if not re.fullmatch(r"[a-z_+A-Z]{3,64}", self.language):
            raise ValueError("ocr: language is a name of tesseract's, such as eng or deu+eng")


@dataclass(slots=True)
class Ocr:
    """Chooses images and reads them."""

    settings: OcrSettings
    key: bytes = field(repr=False)  # so that nobody outside can tell which images are read
    _series: set[str] = field(default_factory=set, init=False)
    _program: str = field(default="", init=False)

    def __post_init__(self) -> None:
        """Find the program. Raises: OcrMissingError."""
        found = shutil.which(self.settings.program)
        if found is None:
            raise OcrMissingError("tesseract is not installed: apt-get install tesseract-ocr, or turn [ocr] off")
        self._program = found

    def chosen(self, record: Record) -> bool:
        """The first image of each series, and one in ``every`` by keyed hash of its name."""
        first = record.series not in self._series
        self._series.add(record.series)
        draw = hmac.new(self.key, b"ocr" + record.name.encode(), hashlib.sha256).digest()
        return first or int.from_bytes(draw[:8], "big") % self.settings.every == 0

    def alarm(self, record: Record) -> str | None:
        """``burned_in_text`` when a chosen image shows text or could not be looked at; else None."""
        picture = record.grey
        if picture is None or not self.chosen(record):
            return None
        try:
            words = self.read_words(np.rint(picture * 255).astype(np.uint8))
        except (OSError, ValueError, subprocess.SubprocessError):
            return "burned_in_text"  # it cannot be told that there is none
        return "burned_in_text" if suspicious(words, least_letters=self.settings.least_letters) else None

    def read_words(self, picture: Picture) -> list[str]:
        """The words that tesseract sees in a (h, w) image, in any of its variants.

        Raises:
            OSError, subprocess.SubprocessError: tesseract failed, or took too long or too much memory.
        """
        return [word for variant in _variants(picture) for word in self._look(variant)]

    def _look(self, picture: Picture) -> list[str]:
        height, width = picture.shape
        command = [self._program, "stdin", "stdout", "--psm", "11", "-l", self.settings.language, "-c", _TSV]
        environment = {"OMP_THREAD_LIMIT": "1", "LANG": "C.UTF-8", "PATH": os.defpath}
        prefix = os.environ.get("TESSDATA_PREFIX")
        if prefix:
            environment["TESSDATA_PREFIX"] = prefix
        with subprocess.Popen(  # noqa: S603 - a program that the site names, without a shell
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment,
        ) as process:
            try:
                # before it gets its first byte
                resource.prlimit(process.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
                image = b"P5 %d %d 255\n" % (width, height) + picture.tobytes()
                answer, _ = process.communicate(image, timeout=self.settings.seconds)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise subprocess.SubprocessError("tesseract failed")
        rows = [row.split("\t") for row in answer.decode("utf-8", "replace").splitlines()[1:]]
        if not all(len(row) == _COLUMNS for row in rows):
            raise subprocess.SubprocessError("tesseract answers in another format")
        return [r[-1] for r in rows if r[-1].strip() and float(r[-2]) >= self.settings.least_confidence]


def suspicious(words: Collection[str], needles: Collection[str] = (), least_letters: int = 4) -> bool:
    """Could these words tell who the patient is?

    Args:
        needles: parts of the patient's own identifiers, if they are known: any of three characters or more
            within the text counts.
        least_letters: letters in a row that make a word.
    """
    text = " ".join(words)
    joined = "".join(words).casefold()
    return (
        any(len(run) >= least_letters for run in _LETTERS.findall(text))
        or _DATE.search(text) is not None
        or any(len(n.strip()) >= _NEEDLE and n.strip().casefold() in joined for n in needles)
    )


def _variants(picture: Picture) -> Iterator[Picture]:
    """Dark on light, as tesseract wants it: the image, its thin bright structures, its thin dark ones."""
    from scipy import ndimage  # noqa: PLC0415 - without [ocr] nothing waits for scipy

    scale = min(_MOST_SCALE, max(_LEAST_SCALE, _SIDE / max(picture.shape)))
    opened = ndimage.grey_opening(picture, size=(_STROKE, _STROKE))
    closed = ndimage.grey_closing(picture, size=(_STROKE, _STROKE))
    bright, dark = picture - np.minimum(picture, opened), np.maximum(picture, closed) - picture
    for variant in (picture, _stretched(bright), _stretched(dark)):
        size = (max(1, round(variant.shape[1] * scale)), max(1, round(variant.shape[0] * scale)))
        larger = np.asarray(Image.fromarray(variant).resize(size, Image.Resampling.BICUBIC))
        yield np.pad(255 - larger, _MARGIN, constant_values=255)


def _stretched(picture: Picture) -> Picture:
    most = int(picture.max())
    return (picture.astype(np.uint16) * 255 // most).astype(np.uint8) if most else picture
