"""Identifiers in bytes beside the attributes: meta, padding, overlays, codestreams, documents, reports, volumes."""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations on its image classes
from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable
from typing import Final

import nibabel
import numpy as np
from PIL import Image, ImageCms
from pydicom import DataElement, Dataset, Sequence
from pydicom.encaps import encapsulate, generate_frames
from pydicom.uid import UID, JPEGBaseline8Bit

from tests.torture.plants import Made, blank, bundled, carrier, dress, encode, original
from tests.torture.sower import Sower

_IMAGE: Final = "1.2.840.10008.5.1.4.1.1."


def meta(dataset: Dataset, sower: Sower) -> bytes:
    """File meta information, preamble, data set trailing padding, and bytes after the end."""
    head = dataset.file_meta
    head.SourceApplicationEntityTitle = sower.code("SourceApplicationEntityTitle")
    head.SendingApplicationEntityTitle = sower.code("SendingApplicationEntityTitle")
    head.ReceivingApplicationEntityTitle = sower.code("ReceivingApplicationEntityTitle")
    head.ImplementationVersionName = sower.code("ImplementationVersionName")
    head.ImplementationClassUID = UID(sower.uid("ImplementationClassUID"))
    head.PrivateInformationCreatorUID = UID(sower.uid("PrivateInformationCreatorUID"))
    head.PrivateInformation = sower.word("PrivateInformation").encode()
    dataset.preamble = sower.word("preamble").encode().ljust(128, b"\0")
    dataset.add_new(0xFFFCFFFC, "OB", b"\0" * 32 + sower.word("DataSetTrailingPadding").encode() + b"\0" * 32)
    dataset.add_new(0x00080005, "CS", "ISO_IR 100")
    return encode(dataset)


def after_the_end(dataset: Dataset, sower: Sower) -> bytes:
    """Bytes after the last element."""
    return encode(dataset) + sower.word("bytes after the data set").encode()


def pixel_padding(dataset: Dataset, sower: Sower) -> None:
    """Pixel data longer than the picture."""
    dataset.PixelData += b"\0\0" + sower.word("after the pixels").encode() + b"\0\0"
    dataset.add_new(0x7FE00020, "OW", sower.word("coefficients").encode())
    dataset.DigitalSignaturesSequence = [Dataset()]
    dataset.DigitalSignaturesSequence[0].CertificateOfSigner = sower.word("certificate").encode()


def overlay(dataset: Dataset, sower: Sower) -> None:
    """Overlay planes: bits, description, label, comments; and a drawing in the unused high bits of the pixels."""
    rows, columns = dataset.Rows, dataset.Columns
    bits = bytearray(rows * columns // 8 + 1)
    word = sower.word("overlay data").encode()
    bits[64 : 64 + len(word)] = word
    for group in (0x6000, 0x601E):
        dataset.add_new((group, 0x0010), "US", rows)
        dataset.add_new((group, 0x0011), "US", columns)
        dataset.add_new((group, 0x0022), "LO", sower.word(f"overlay description {group:04X}"))
        dataset.add_new((group, 0x0040), "CS", "G")
        dataset.add_new((group, 0x0050), "SS", [1, 1])
        dataset.add_new((group, 0x0100), "US", 1)
        dataset.add_new((group, 0x0102), "US", 0)
        dataset.add_new((group, 0x1500), "LO", sower.word(f"overlay label {group:04X}"))
        dataset.add_new((group, 0x4000), "LT", sower.word(f"overlay comments {group:04X}"))
        dataset.add_new((group, 0x3000), "OW", bytes(bits) + b"\0" * (len(bits) % 2))
    pixels = np.frombuffer(dataset.PixelData, "<u2").copy()
    letters = np.frombuffer(sower.word("high bits of the pixels").encode(), np.uint8)
    unpacked = np.unpackbits(letters).astype(np.uint16)
    assert dataset.BitsStored <= 12
    pixels &= 0x0FFF
    pixels[: unpacked.size] |= unpacked << 12
    dataset.PixelData = pixels.tobytes()


def hidden_bits(data: bytes) -> bytes:
    """What the four high bits of 16-bit words spell out, as ``overlay`` wrote them."""
    words = np.frombuffer(data[: len(data) // 2 * 2], "<u2")
    return np.packbits((words >> 12 & 1).astype(np.uint8)).tobytes()


def in_the_picture(dataset: Dataset, sower: Sower) -> None:
    """The patient's name as bytes among the pixel values, where only a search of the output can find it."""
    raw = bytearray(dataset.PixelData)
    name = sower.known("name among the pixel values", str(dataset.PatientName.family_name)).encode()
    raw[2048 : 2048 + len(name)] = name
    dataset.PixelData = bytes(raw)


def lookup_tables(dataset: Dataset, sower: Sower) -> None:
    """The patient's name as the entries of lookup tables, and words beyond their end."""
    name = sower.known("name as LUT entries", str(dataset.PatientName.family_name)).encode()
    item = Dataset()
    item.LUTDescriptor = [len(name) // 2, 0, 16]
    item.LUTExplanation = sower.word("LUTExplanation")
    item["LUTData"] = DataElement(0x00283006, "OW", name[: len(name) // 2 * 2] + sower.word("after the LUT").encode())
    dataset.VOILUTSequence = [item]


# ------------------------------------------------------------------ codestreams


def _reframed(dataset: Dataset, change: Callable[[bytes], bytes]) -> None:
    frame = next(generate_frames(dataset.PixelData, number_of_frames=1))
    changed = change(frame)
    dataset.PixelData = encapsulate([changed + b"\0" * (len(changed) % 2)])
    dataset["PixelData"].is_undefined_length = True


def jpeg_comment(dataset: Dataset, sower: Sower) -> None:
    """A COM segment, an EXIF block and an XMP block in a baseline JPEG."""
    dataset.PatientName = str(dataset.PatientName)
    picture = Image.fromarray(np.tile(np.arange(0, 240, 2, dtype=np.uint8), (100, 1)))
    exif = Image.Exif()
    exif[0x010E] = sower.word("EXIF ImageDescription")
    exif[0x013B] = sower.word("EXIF Artist")
    stream = io.BytesIO()
    picture.save(
        stream,
        "JPEG",
        exif=exif.tobytes(),
        comment=sower.word("JPEG COM").encode(),
        xmp=f"<x:xmpmeta><dc:creator>{sower.word('JPEG XMP')}</dc:creator></x:xmpmeta>".encode(),
    )
    after = stream.getvalue() + sower.word("after the JPEG's end").encode()
    dataset.PixelData = encapsulate([after + b"\0" * (len(after) % 2)])
    dataset["PixelData"].is_undefined_length = True
    dataset.Rows, dataset.Columns, dataset.BitsAllocated, dataset.BitsStored = 100, 120, 8, 8
    dataset.HighBit, dataset.PixelRepresentation = 7, 0
    dataset.LossyImageCompression = "01"
    dataset.file_meta.TransferSyntaxUID = JPEGBaseline8Bit


def j2k_comment(dataset: Dataset, sower: Sower) -> None:
    """A COM marker segment after SIZ in a JPEG 2000 codestream (ISO 15444-1 A.9.2), and bytes after its end."""

    def change(frame: bytes) -> bytes:
        at = frame.index(b"\xff\x51")
        at += 2 + struct.unpack_from(">H", frame, at + 2)[0]
        text = sower.word("J2K COM").encode()
        comment = b"\xff\x64" + struct.pack(">HH", 4 + len(text), 1) + text
        return frame[:at] + comment + frame[at:] + sower.word("after the J2K's end").encode()

    _reframed(dataset, change)


def jpegls_comment(dataset: Dataset, sower: Sower) -> None:
    """A COM segment in a JPEG-LS codestream."""

    def change(frame: bytes) -> bytes:
        text = sower.word("JPEG-LS COM").encode()
        return frame[:2] + b"\xff\xfe" + struct.pack(">H", 2 + len(text)) + text + frame[2:]

    _reframed(dataset, change)


def rle_tail(dataset: Dataset, sower: Sower) -> None:
    """Bytes after the last segment of an RLE frame."""
    _reframed(dataset, lambda frame: frame + sower.word("after the RLE segments").encode())


def icc(dataset: Dataset, sower: Sower) -> None:
    """A colour profile whose description is a name."""
    raw = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    was = "sRGB built-in"
    name = sower.word("ICC description").ljust(len(was))
    assert was.encode("utf-16-be") in raw
    dataset.ICCProfile = raw.replace(was.encode("utf-16-be"), name.encode("utf-16-be"))
    item = Dataset()
    item.ICCProfile = dataset.ICCProfile
    dataset.OpticalPathSequence = [item]


# ------------------------------------------------------------------ documents, reports, states, plans


def _bare(dataset: Dataset, sop_class: str, modality: str) -> None:
    for element in list(dataset):
        if element.tag.group in (0x18, 0x20, 0x28, 0x7FE0) and element.keyword not in _UIDS:
            del dataset[element.tag]
    dataset.SOPClassUID, dataset.Modality = UID(_IMAGE + sop_class), modality
    dataset.pop("ImageType", None)


_UIDS: Final = ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID")


def pdf(dataset: Dataset, sower: Sower) -> None:
    """An encapsulated PDF: names in its title, author, metadata stream and page, and in DocumentTitle."""
    _bare(dataset, "104.1", "DOC")
    dataset.DocumentTitle = f"Letter about {sower.word('DocumentTitle')}"
    dataset.MIMETypeOfEncapsulatedDocument = "application/pdf"
    title = (b"\xfe\xff" + sower.word("PDF title").encode("utf-16-be")).hex().encode()
    page = f"BT /F1 12 Tf 72 720 Td (Dear Mrs {sower.word('PDF page')}) Tj ET".encode()
    xmp = f"<dc:creator>{sower.word('PDF metadata')}</dc:creator>".encode()
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R /Metadata 5 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R >>",
        b"<< /Length %d >>\nstream\n" % len(page) + page + b"\nendstream",
        b"<< /Type /Metadata /Length %d >>\nstream\n" % len(xmp) + xmp + b"\nendstream",
        b"<< /Title <" + title + b"> /Author (" + sower.word("PDF author").encode() + b") >>",
    ]
    body = b"%PDF-1.4\n" + b"".join(b"%d 0 obj\n%s\nendobj\n" % (n, p) for n, p in enumerate(parts, start=1))
    body += b"trailer << /Root 1 0 R /Info 6 0 R /Size 7 >>\n%%EOF\n"
    dataset.EncapsulatedDocument = body + b"\0" * (len(body) % 2)


def cda(dataset: Dataset, sower: Sower) -> None:
    """An encapsulated CDA document."""
    _bare(dataset, "104.2", "DOC")
    dataset.MIMETypeOfEncapsulatedDocument = "text/XML"
    name, street = sower.word("CDA patient"), sower.word("CDA street")
    body = (
        f'<ClinicalDocument xmlns="urn:hl7-org:v3"><patient><name><family>{name}</family></name>'
        f"<addr><streetAddressLine>{street} 1</streetAddressLine></addr>"
        f'<telecom value="tel:{sower.digits("CDA phone")}"/>'
        f'<birthTime value="{sower.day("CDA birth time")}"/></patient></ClinicalDocument>'
    ).encode()
    dataset.EncapsulatedDocument = body + b"\0" * (len(body) % 2)


def _item(kind: str, **values: object) -> Dataset:
    item, concept = Dataset(), Dataset()
    concept.CodeValue, concept.CodingSchemeDesignator, concept.CodeMeaning = "121071", "DCM", "Finding"
    item.RelationshipType, item.ValueType, item.ConceptNameCodeSequence = "CONTAINS", kind, [concept]
    for keyword, value in values.items():
        setattr(item, keyword, value)
    return item


def report(dataset: Dataset, sower: Sower) -> None:
    """A structured report: text, person, UID, date and code items, nested, and its observers."""
    code = Dataset()
    code.CodeValue, code.CodingSchemeDesignator = sower.code("SR CodeValue"), "99LOCAL"
    code.CodeMeaning = sower.word("SR CodeMeaning")
    inner = _item(
        "TEXT", TextValue=f"Discussed with {sower.word('SR nested text')}, phone {sower.digits('SR phone')}"
    )
    items = [
        _item("TEXT", TextValue=f"Mr {sower.word('SR text')} has a nodule of 4 mm", ContentSequence=[inner]),
        _item("PNAME", PersonName=sower.name("SR person")),
        _item("UIDREF", UID=sower.uid("SR UIDREF")),
        _item("DATE", Date=sower.day("SR date")),
        _item("DATETIME", DateTime=sower.day("SR date and time") + "101500"),
        _item("CODE", ConceptCodeSequence=[code]),
    ]
    dataset.ContentSequence = Sequence([*dataset.get("ContentSequence", []), *items])
    dataset.VerifyingObserverSequence = [Dataset()]
    dataset.VerifyingObserverSequence[0].VerifyingObserverName = sower.name("verifying observer")
    dataset.VerifyingObserverSequence[0].VerifyingOrganization = sower.word("verifying organization")


def waveform(dataset: Dataset, sower: Sower) -> None:
    """Annotations and channel labels of an ECG."""
    note = Dataset()
    note.UnformattedTextValue = f"ECG of {sower.word('waveform annotation')}"
    dataset.WaveformAnnotationSequence = [note]
    for channel in dataset.WaveformSequence[0].ChannelDefinitionSequence[:1]:
        channel.ChannelLabel = sower.word("channel label")[:16]
    dataset.AcquisitionContextSequence = [_item("TEXT", TextValue=sower.word("acquisition context"))]


def presentation(dataset: Dataset, sower: Sower) -> None:
    """A softcopy presentation state: text objects, layers, its creator and its label."""
    _bare(dataset, "11.1", "PR")
    text, graphic = Dataset(), Dataset()
    text.UnformattedTextValue = f"{sower.word('text object')} 1943"
    graphic.TextObjectSequence, graphic.GraphicLayer = [text], sower.code("graphic layer")
    dataset.GraphicAnnotationSequence = [graphic]
    dataset.ContentCreatorName = sower.name("content creator")
    dataset.ContentDescription = sower.word("content description")
    dataset.PresentationCreationDate = sower.day("presentation creation date")


def plan(dataset: Dataset, sower: Sower) -> None:
    """A radiotherapy plan: label, name, description, approver, and what beams say."""
    dataset.RTPlanLabel, dataset.RTPlanName = sower.word("plan label"), sower.word("plan name")
    dataset.RTPlanDescription = sower.word("plan description")
    dataset.ReviewerName = sower.name("plan reviewer")
    dataset.BeamSequence[0].BeamDescription = sower.word("beam description")
    dataset.BeamSequence[0].InstitutionName = sower.word("beam institution")


def enhanced(dataset: Dataset, sower: Sower) -> None:
    """An enhanced MR of two frames with names in its functional groups."""
    dataset.SOPClassUID = UID(_IMAGE + "4.1")
    dataset.NumberOfFrames = 2
    dataset.PixelData = dataset.PixelData * 2
    frames = []
    for n in range(2):
        frame, content, plane = Dataset(), Dataset(), Dataset()
        content.FrameComments = sower.word(f"frame comments {n}")
        content.FrameLabel = sower.word(f"frame label {n}")
        content.FrameAcquisitionDateTime = sower.day(f"frame date {n}") + "101500"
        plane.ImagePositionPatient = [0, 0, n]
        frame.FrameContentSequence, frame.PlanePositionSequence = [content], [plane]
        frames.append(frame)
    dataset.PerFrameFunctionalGroupsSequence = frames
    shared, anatomy, region = Dataset(), Dataset(), Dataset()
    region.CodeMeaning = sower.word("frame anatomy")
    anatomy.AnatomicRegionSequence = [region]
    shared.FrameAnatomySequence = [anatomy]
    dataset.SharedFunctionalGroupsSequence = [shared]


# ------------------------------------------------------------------ media, compression of the whole file, volumes


def directory() -> Made:
    """A DICOMDIR with a patient."""
    sower, dataset = Sower("DICOMDIR"), bundled("dicomdirtests/DICOMDIR")
    for n, record in enumerate(dataset.DirectoryRecordSequence):
        if record.DirectoryRecordType == "PATIENT":
            record.PatientName, record.PatientID = sower.name(f"record {n} name"), sower.code(f"record {n} id")
    stream = io.BytesIO()
    dataset.save_as(stream)
    return Made(sower.file, stream.getvalue(), tuple(sower.plants), image=False)


def deflated() -> Made:
    """The same identifiers where a search of the bytes does not see them."""
    sower, dataset = Sower("deflated.dcm"), blank(bundled("image_dfl.dcm"))
    dress(dataset, sower)
    dataset.PatientComments = sower.word("PatientComments")
    return Made(sower.file, encode(dataset), tuple(sower.plants), image=False)


def _volume(sower: Sower) -> bytes:
    image = nibabel.Nifti1Image(np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6), np.diag([2.0, 2, 3, 1]))
    head = image.header
    head["descrip"], head["aux_file"] = sower.word("descrip").encode(), sower.word("aux_file").encode()
    head["intent_name"], head["db_name"] = sower.word("intent_name").encode(), sower.word("db_name").encode()
    head.extensions.append(nibabel.nifti1.Nifti1Extension(6, sower.word("comment extension").encode()))
    head.extensions.append(nibabel.nifti1.Nifti1Extension(4, sower.word("AFNI extension").encode()))
    raw: bytes = image.to_bytes()
    return raw + sower.word("after the voxels").encode()


def volume() -> Made:
    """A plain NIfTI file."""
    sower = Sower("volume.nii")
    return Made(sower.file, _volume(sower), tuple(sower.plants), image=True)


def packed_volume() -> Made:
    """A gzipped one, whose gzip header names a file and holds a comment."""
    sower = Sower("volume_packed.nii.gz")
    stream = io.BytesIO()
    with gzip.GzipFile(sower.word("gzip file name") + ".nii", "wb", fileobj=stream, mtime=0) as packed:
        packed.write(_volume(sower))
    return Made(sower.file, stream.getvalue(), tuple(sower.plants), image=True)


def _jpeg_carrier() -> Made:
    sower, dataset = Sower("cr_jpeg_comment.dcm"), blank(bundled("MR_small.dcm"))
    dataset.SOPClassUID, dataset.Modality = UID(_IMAGE + "1"), "CR"
    dress(original(dataset), sower)
    jpeg_comment(dataset, sower)
    return Made(sower.file, encode(dataset), tuple(sower.plants), image=True)


_MR, _CT = "MR_small.dcm", "CT_small.dcm"
MAKERS: Final = (
    carrier("ct_meta.dcm", _CT, meta),
    carrier("mr_after_the_end.dcm", _MR, after_the_end, image=True),
    carrier("ct_pixel_padding.dcm", _CT, pixel_padding),
    carrier("mr_overlay.dcm", "examples_overlay.dcm", overlay),
    carrier("ct_in_the_picture.dcm", _CT, in_the_picture, image=True),
    carrier("mr_lookup_tables.dcm", _MR, lookup_tables),
    carrier("ct_j2k_comment.dcm", "J2K_pixelrep_mismatch.dcm", j2k_comment),
    carrier("mr_j2k_comment.dcm", "MR_small_jp2klossless.dcm", j2k_comment),
    carrier("mr_jpegls_comment.dcm", "MR_small_jpeg_ls_lossless.dcm", jpegls_comment),
    carrier("mr_rle_tail.dcm", "MR_small_RLE.dcm", rle_tail),
    _jpeg_carrier,
    carrier("sc_icc.dcm", "SC_rgb_small_odd.dcm", icc),
    carrier("mr_enhanced.dcm", _MR, enhanced),
    carrier("doc_pdf.dcm", _CT, pdf, image=False),
    carrier("doc_cda.dcm", _CT, cda, image=False),
    carrier("report.dcm", "test-SR.dcm", report, image=False),
    carrier("report_basic.dcm", "reportsi.dcm", report, image=False),
    carrier("ecg.dcm", "waveform_ecg.dcm", waveform, image=False),
    carrier("presentation.dcm", _MR, presentation, image=False),
    carrier("plan.dcm", "rtplan.dcm", plan, image=False),
    directory,
    deflated,
    volume,
    packed_volume,
)
