"""A small series of an abdomen and masks of it, as highdicom writes them, with identifiers wherever a text can be."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import highdicom as hd
import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.sr.codedict import codes

from agent.deidentify.segment_list import Segment
from tests.support.instances import mr

SLICES: Final = 5
LISTED: Final = (Segment("liver", "10200004"), Segment("mass", "4147007"))
CODES: Final = {"liver": codes.SCT.Liver, "mass": codes.SCT.Mass, "spleen": codes.SCT.Spleen}
PLANTED: Final = ("PLANTED-LABEL", "PLANTED-TEXT", "PLANTED-CREATOR", "PLANTED-TRACK", "PLANTED-NET", "PLANTED-MAKER")


def abdomen(patient: str = "P-1", number: int = 1, frame: str = "1.4.1") -> list[Dataset]:
    """Five slices of 64 x 64, 3 mm apart."""
    series = []
    for place in range(SLICES):
        source = mr()
        source.PatientID, source.BodyPartExamined, source.SliceThickness = patient, "ABDOMEN", 3
        source.ImageType = ["ORIGINAL", "PRIMARY", "OTHER"]
        source.PatientBirthDate, source.StudyDate, source.StudyTime = "19700101", "20200102", "101010"
        for keyword in ("StudyDescription", "SeriesDescription", "ProtocolName"):
            setattr(source, keyword, "")
        source.ImagePositionPatient, source.ImageOrientationPatient = [0, 0, 3.0 * place], [1, 0, 0, 0, 1, 0]
        source.StudyInstanceUID, source.SeriesInstanceUID = f"1.2.{number}", f"1.3.{number}"
        source.SOPInstanceUID = source.file_meta.MediaStorageSOPInstanceUID = f"1.5.{number}.{place}"
        source.FrameOfReferenceUID = frame
        stored = source.pixel_array + 10 * place
        source.PixelData = stored.astype(np.int16).tobytes()
        series.append(source)
    return series


def drawing() -> NDArray[np.uint8]:
    """(slices, rows, columns): a liver (1) on two slices, a mass (2) on a third."""
    drawn = np.zeros((SLICES, 64, 64), np.uint8)
    drawn[1:3, 10:20, 30:50] = 1
    drawn[3, 5:9, 5:9] = 2
    return drawn


def mask(series: Sequence[Dataset], drawn: NDArray[np.uint8] | None = None, *names: str, **changed: Any) -> Dataset:
    """A segmentation object of a series, by default of liver and mass, as it is read from a file.

    ``kind``: BINARY, LABELMAP or FRACTIONAL.
    """
    network = hd.AlgorithmIdentificationSequence("PLANTED-NET", codes.cid7162.ArtificialIntelligence, "1")
    described = [
        hd.seg.SegmentDescription(
            number,
            f"PLANTED-LABEL {name}",
            codes.SCT.AnatomicalStructure,
            CODES[name],
            hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            network,
            tracking_uid=f"1.9.{number}",
            tracking_id="PLANTED-TRACK",
        )
        for number, name in enumerate(names or ("liver", "mass"), 1)
    ]
    told: dict[str, Any] = {
        "series_number": 100,
        "series_instance_uid": "1.6.1",
        "sop_instance_uid": "1.7.1",
        "instance_number": 1,
        "manufacturer": "PLANTED-MAKER",
        "manufacturer_model_name": "PLANTED-TEXT",
        "software_versions": "PLANTED-TEXT",
        "device_serial_number": "PLANTED-TEXT",
        "content_creator_name": "PLANTED-CREATOR^X",
        "content_description": "PLANTED-TEXT",
    }
    pixels = drawing() if drawn is None else drawn
    kind = changed.pop("kind", "BINARY")
    made = hd.seg.Segmentation(list(series), pixels, kind, described, **{**told, **changed})
    stream = io.BytesIO()
    made.save_as(stream)
    return pydicom.dcmread(io.BytesIO(stream.getvalue()))
