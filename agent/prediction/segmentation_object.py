"""DICOM SEG of what a model drew: one object for each series, which refers to the images that it is of.

Series, content and algorithm all say that it is research and not for diagnosis; the algorithm is named by the model's
SHA-256. highdicom takes patient and study from the images.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import highdicom
import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom import config as pydicom_config
from pydicom.sr.codedict import codes

from agent.deidentify.prescan import read_meta
from agent.deidentify.segment_list import Segment
from agent.errors import CommandError
from agent.pacs.dimse.storage_scu import StoredObject
from agent.prediction.result_folder import NOTICE

LABEL: Final = "NOT_DIAGNOSTIC"  # of the content: one code string of DICOM
_LONG: Final = 64  # characters of a long string
_SERIES: Final = 9900  # where numbers of research begin, beyond those of scanners
_MAKER: Final = "Lazaret"


@dataclass(frozen=True, slots=True)
class SegmentationSource:
    """Which model drew, and what."""

    model: str  # of the run or release
    sha256: str  # of the model's file
    task: str
    classes: tuple[str, ...]  # the segments, from 1
    listed: Mapping[str, Segment]  # by name: those that the site has a code of the standard for

    def described(self) -> list[highdicom.seg.SegmentDescription]:
        """Every segment, with the algorithm behind it."""
        algorithm = highdicom.AlgorithmIdentificationSequence(
            f"{self.task} ({NOTICE.lower()})"[:_LONG],
            codes.cid7162.ArtificialIntelligence,
            self.model[:_LONG],
            source=_MAKER,
            parameters={"model SHA-256": self.sha256},
        )
        return [
            highdicom.seg.SegmentDescription(
                number,
                name[:_LONG],
                codes.SCT.AnatomicalStructure,
                self._code(name),
                highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
                algorithm,
            )
            for number, name in enumerate(self.classes, 1)
        ]

    def _code(self, name: str) -> highdicom.sr.CodedConcept:
        known = self.listed.get(name)
        if known is None:  # a name of the task alone
            return highdicom.sr.CodedConcept(*codes.SCT.AnatomicalStructure[:3])
        return highdicom.sr.CodedConcept(known.meant[1], known.meant[0], known.meaning[:_LONG])


@dataclass(frozen=True, slots=True, eq=False)
class DrawnImage:
    """One file and what was drawn on it."""

    header: Dataset = field(repr=False)  # of the image that is referred to
    drawn: NDArray[np.uint8] = field(repr=False)  # (frames, rows, columns): numbers of segments, 0: none


def segmentation(images: Sequence[DrawnImage], source: SegmentationSource, number: int) -> Dataset:
    """The object of one series.

    Args:
        images: of it, of one size.
        source: which model drew.
        number: of this object among those of one command, from 1.
    Raises:
        CommandError: the headers lack what a segmentation has to refer to.
    """
    quiet = logging.getLogger("highdicom")
    level, quiet_level = quiet.level, logging.ERROR  # it says at INFO which attributes it copies
    quiet.setLevel(quiet_level)
    try:
        with warnings.catch_warnings(), pydicom_config.disable_value_validation():
            warnings.simplefilter("ignore")  # their texts quote values
            return highdicom.seg.Segmentation(
                [image.header for image in images],
                np.concatenate([image.drawn for image in images]),
                highdicom.seg.SegmentationTypeValues.BINARY,
                source.described(),
                series_instance_uid=highdicom.UID(),
                series_number=_SERIES + number,
                sop_instance_uid=highdicom.UID(),
                instance_number=1,
                manufacturer=_MAKER,
                manufacturer_model_name="lazaret-agent predict",
                software_versions=source.model[:_LONG],
                device_serial_number=source.sha256[:16],
                content_label=LABEL,
                content_description=NOTICE,
                content_creator_name="Lazaret^Research",
                series_description=f"{NOTICE}: {source.task}"[:_LONG],
            )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as fault:
        # its text may quote the header
        raise CommandError(
            "a segmentation cannot refer to these images: their headers lack what DICOM SEG needs, such as a frame "
            f"of reference or a position ({type(fault).__name__})"
        ) from None
    finally:
        quiet.setLevel(level)


def part10(made: Dataset) -> bytes:
    """As a file."""
    out = io.BytesIO()
    made.save_as(out, enforce_file_format=True)
    return out.getvalue()


def as_stored(file: bytes) -> StoredObject:
    """As it travels by C-STORE: what :func:`part10` made, less its head."""
    meta = read_meta(file)
    return StoredObject(meta.media_class, meta.media_instance, meta.transfer_syntax, file[meta.offset :])
