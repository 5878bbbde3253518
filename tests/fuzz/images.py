"""Seeds for ingest: images of four by four pixels in every transfer syntax that can be made, and messages."""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations on its image classes
from __future__ import annotations

import gzip
import io
import struct
from functools import cache
from typing import Final

import nibabel
import numpy as np
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
)
from pynetdicom.pdu import A_ASSOCIATE_RQ
from pynetdicom.pdu_primitives import A_ASSOCIATE, ImplementationClassUIDNotification, MaximumLengthNotification
from pynetdicom.presentation import build_context

_CT: Final = "1.2.840.10008.5.1.4.1.1.2"
_CAPTURE: Final = "1.2.840.10008.5.1.4.1.1.7"
_BOUNDARY: Final = b"x1"


def _ct(side: int = 4) -> Dataset:
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.SOPClassUID, dataset.SOPInstanceUID = UID(_CT), "2.999.1.1"
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = "2.999.1.2", "2.999.1.3"
    dataset.Modality, dataset.ImageType = "CT", ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.PatientName, dataset.PatientID = "Zwiebelquist^A", "PX84629173"
    dataset.StudyDate, dataset.InstanceNumber = "20180312", 1
    dataset.Rows = dataset.Columns = side
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 12, 11, 0
    dataset.PixelSpacing, dataset.RescaleSlope, dataset.RescaleIntercept = [1, 1], 1, -1024
    dataset.PixelData = (np.arange(side * side, dtype="<u2") % 4096).tobytes()
    dataset["PixelData"].VR = "OW"
    return dataset


def _rich(dataset: Dataset) -> Dataset:
    """What the small picture lacks: sequences, tables, private and unknown elements."""
    item, code = Dataset(), Dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = UID(_CT), "2.999.1.9"
    code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = "121311", "DCM", "Localizer"
    item.PurposeOfReferenceCodeSequence = [code]
    dataset.ReferencedImageSequence = [item, Dataset()]
    table = Dataset()
    table.LUTDescriptor, table.LUTData = [4, 0, 16], b"\0\0\1\0\2\0\3\0"
    dataset.VOILUTSequence = [table]
    dataset.WindowCenter, dataset.WindowWidth = [40, 400], [400, 1500]
    dataset.private_block(0x0019, "SIEMENS MR HEADER", create=True).add_new(0x0C, "IS", "1000")
    dataset.add_new(0x00189999, "UN", b"\xfe\xff\x00\xe0")
    dataset.SpecificCharacterSet = ["", "ISO 2022 IR 87"]
    return dataset


def _palette() -> Dataset:
    dataset = _ct()
    dataset.SOPClassUID, dataset.Modality = UID(_CAPTURE), "OT"
    dataset.PhotometricInterpretation = "PALETTE COLOR"
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.HighBit = 7
    dataset.PixelData = bytes(range(16))
    dataset["PixelData"].VR = "OB"
    for colour in ("Red", "Green", "Blue"):
        setattr(dataset, f"{colour}PaletteColorLookupTableDescriptor", [16, 0, 8])
        setattr(dataset, f"{colour}PaletteColorLookupTableData", bytes(range(0, 32, 2)))
    return dataset


def _written(dataset: Dataset, syntax: UID) -> bytes:
    """In a transfer syntax; a compressed one by the encoders that the agent's decoders come with."""
    plain = syntax if not syntax.is_compressed or syntax.is_deflated else ExplicitVRLittleEndian
    dataset.file_meta.TransferSyntaxUID = plain
    if syntax == ExplicitVRBigEndian:
        dataset.PixelData = np.frombuffer(dataset.PixelData, "<u2").astype(">u2").tobytes()
        dataset["PixelData"].VR = "OW"
    if plain != syntax:
        dataset.compress(syntax, generate_instance_uid=False)
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


@cache
def files() -> tuple[bytes, ...]:
    """DICOM files of about a kilobyte."""
    found = [_written(_ct(), s) for s in (ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian)]
    found += [_written(_ct(), s) for s in (DeflatedExplicitVRLittleEndian, RLELossless, JPEGLSLossless)]
    found += [_written(_ct(32), JPEG2000Lossless), _written(_palette(), ExplicitVRLittleEndian)]
    return (*found, *(_written(_rich(_ct()), s) for s in (ExplicitVRLittleEndian, ImplicitVRLittleEndian)))


@cache
def volumes() -> tuple[bytes, ...]:
    """NIfTI files of a few voxels."""
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    found = [bytes(kind(values, np.eye(4)).to_bytes()) for kind in (nibabel.Nifti1Image, nibabel.Nifti2Image)]
    four = nibabel.Nifti1Image(np.ones((2, 2, 2, 2), dtype=np.float32), np.diag([2.0, 2, 3, 1]))
    four.header["descrip"] = b"Zwiebelquist"
    four.header.extensions.append(nibabel.nifti1.Nifti1Extension(6, b"a comment"))
    return (*found, four.to_bytes(), *(gzip.compress(raw, mtime=0) for raw in found))


@cache
def requests() -> tuple[bytes, ...]:
    """A-ASSOCIATE-RQ units of the one sender that is known."""
    found = []
    for contexts in (["1.2.840.10008.1.1"], [_CT, _CAPTURE, "1.2.840.10008.5.1.4.1.2.2.1"]):
        primitive, length = A_ASSOCIATE(), MaximumLengthNotification()
        primitive.application_context_name = UID("1.2.840.10008.3.1.1.1")
        primitive.calling_ae_title, primitive.called_ae_title = "PACS", "LAZARET"
        proposed = [build_context(name, [ImplicitVRLittleEndian, JPEG2000Lossless]) for name in contexts]
        for n, context in enumerate(proposed):
            context.context_id = 2 * n + 1
        primitive.presentation_context_definition_list = proposed
        implementation = ImplementationClassUIDNotification()
        length.maximum_length_received, implementation.implementation_class_uid = 16384, UID("2.999.5")
        primitive.user_information = [length, implementation]
        unit = A_ASSOCIATE_RQ()
        unit.from_primitive(primitive)
        found.append(bytes(unit.encode()))
    return tuple(found)


def messages() -> tuple[bytes, ...]:
    """Command sets of C-ECHO and C-STORE, and units with one and two data values."""

    def element(number: int, value: bytes) -> bytes:
        return struct.pack("<HHI", 0, number, len(value)) + value

    def short(number: int, value: int) -> bytes:
        return element(number, struct.pack("<H", value))

    echo = element(2, b"1.2.840.10008.1.1\0") + short(0x100, 0x30) + short(0x110, 7) + short(0x800, 0x101)
    store = element(2, _CT.encode() + b"\0") + short(0x100, 1) + short(0x110, 8) + short(0x700, 0)
    store += short(0x800, 1) + element(0x1000, b"2.999.1.1\0")

    def unit(*values: bytes) -> bytes:
        body = b"".join(struct.pack(">IBB", len(v) + 2, 1, 3 - n) + v for n, v in enumerate(values))
        return struct.pack(">BBI", 4, 0, len(body)) + body

    return echo, store, unit(echo), unit(store, b"\x08\0\x16\0")


def bodies() -> tuple[bytes, ...]:
    """Multipart bodies behind their Content-Type."""
    head = b'multipart/related; type="application/dicom"; boundary=x1\n'
    part = b"--x1\r\nContent-Type: application/dicom\r\n\r\nDICM\r\n--x\r\nabc"
    bare = b"--x1\r\n\r\n\r\n--x1--"
    return (
        head + part + b"\r\n" + part + b"\r\n--x1--\r\nbehind",
        head + b"before\r\n" + part + b"\r\n--x1--",
        head + bare,
    )
