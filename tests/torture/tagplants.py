"""Identifiers in attributes: top level, the profile's table, nested, private, UN, retired, other character sets."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from pydicom import DataElement, Dataset, Sequence
from pydicom.datadict import dictionary_has_tag, dictionary_keyword, dictionary_VR, tag_for_keyword
from pydicom.tag import Tag

from tests.torture.plants import carrier
from tests.torture.sower import Sower

# PS3.15 Table E.1-1 as data: which attributes there are, not what to do with them
TABLE: Final = json.loads(
    (Path(__file__).parents[2] / "agent" / "deidentify" / "ps315" / "ps315.json").read_text(encoding="utf-8")
)["attributes"]
_TOP: Final = (  # VR -> an attribute that real files have
    ("AE", "StationAETitle"), ("AE", "RetrieveAETitle"), ("CS", "BodyPartExamined"), ("CS", "ScanningSequence"),
    ("CS", "PatientPosition"), ("CS", "SequenceVariant"), ("DA", "SeriesDate"), ("DA", "AcquisitionDate"),
    ("DA", "ContentDate"), ("DT", "AcquisitionDateTime"), ("LO", "InstitutionName"), ("LO", "Manufacturer"),
    ("LO", "ProtocolName"), ("LO", "DeviceSerialNumber"), ("LO", "SoftwareVersions"), ("LO", "ManufacturerModelName"),
    ("LT", "PatientComments"), ("LT", "AcquisitionComments"), ("PN", "PerformingPhysicianName"),
    ("PN", "OperatorsName"), ("PN", "PatientMotherBirthName"), ("SH", "StationName"), ("SH", "StudyID"),
    ("SH", "SequenceName"), ("ST", "InstitutionAddress"), ("ST", "DerivationDescription"),
    ("UC", "StrainDescription"),
    ("UI", "FrameOfReferenceUID"), ("UI", "InstanceCreatorUID"), ("UI", "SynchronizationFrameOfReferenceUID"),
    ("UR", "RetrieveURL"), ("UT", "LabelText"), ("UT", "TextValue"), ("OB", "EncryptedContent"),
    ("OW", "RedPaletteColorLookupTableData"), ("UN", "PatientID"),
)  # fmt: skip


def value_of(vr: str, place: str, sower: Sower) -> object:
    """A planted value of a VR; None for those that hold no text."""
    makers: dict[str, Callable[[str], object]] = {
        "PN": sower.name,
        **dict.fromkeys(("LO", "SH", "ST", "LT", "UT", "UC"), sower.word),
        **dict.fromkeys(("AE", "CS"), sower.code),
        "DA": sower.day,
        "DT": lambda at: sower.day(at) + "101530.25",
        "UI": sower.uid,
        "UR": lambda at: f"https://{sower.word(at)}.example/?q=1",
        **dict.fromkeys(("OB", "UN"), lambda at: sower.word(at).encode()),
        "OW": lambda at: sower.word(at).encode(),
        "IS": sower.digits,
        "SQ": lambda at: Sequence([_person(at, sower)]),
    }
    maker = makers.get(vr)
    return maker(place) if maker else None


def _person(place: str, sower: Sower) -> Dataset:
    item = Dataset()
    item.PersonName = sower.name(f"{place}[0]/PersonName")
    item.CodeMeaning = sower.word(f"{place}[0]/CodeMeaning")
    return item


def put(dataset: Dataset, tag: int, vr: str, sower: Sower, prefix: str = "") -> None:
    """Plant one attribute."""
    keyword = dictionary_keyword(tag) if dictionary_has_tag(tag) else f"{Tag(tag)}"
    value = value_of(vr, prefix + keyword, sower)
    if value is not None:
        dataset[tag] = DataElement(tag, vr, value)


def top_level(dataset: Dataset, sower: Sower) -> None:
    """One or more attributes of every VR that can hold a text, some of them ones that a picture keeps."""
    for _, keyword in _TOP:
        tag = tag_for_keyword(keyword)
        assert tag is not None
        if keyword != "PatientID":
            put(dataset, tag, dictionary_VR(tag).split(" ")[0], sower)
    dataset.PatientAge = sower.known("PatientAge", "097Y")
    dataset.ImageType = [*list(dataset.ImageType)[:2], sower.code("ImageType[2]"), sower.code("ImageType[3]")]


def table(part: int, of: int, dataset: Dataset, sower: Sower) -> None:
    """Every attribute of the table that can hold a text, a date, a UID or a sequence, in ``of`` files."""
    for n, tag in enumerate(sorted(int(t, 16) for t in TABLE)):
        mine = n % of == part and tag >> 16 > 4 and dictionary_has_tag(tag)
        if mine and dictionary_keyword(tag) not in _DRESSED:
            put(dataset, tag, dictionary_VR(tag).split(" ")[0], sower)


# what a file has already; and another issuer would make another patient of it
_DRESSED: Final = (
    *("PatientID", "IssuerOfPatientID", "StudyInstanceUID", "PatientName", "SOPInstanceUID", "SeriesInstanceUID"),
    "SeriesDescription",
)


_PARENTS: Final = (  # most of them not in the table; the first ones are kept by a picture
    "ReferencedImageSequence", "SourceImageSequence", "VOILUTSequence", "PlanePositionSequence",
    "SharedFunctionalGroupsSequence", "PixelMeasuresSequence", "FrameContentSequence",
    "DerivationCodeSequence", "AnatomicRegionSequence", "ProcedureCodeSequence", "RequestAttributesSequence",
    "EnergyWindowInformationSequence", "ReferencedPatientPhotoSequence", "IconImageSequence", "ContentSequence",
    "UltrasoundRegionsSequence" if tag_for_keyword("UltrasoundRegionsSequence") else "SequenceOfUltrasoundRegions",
)  # fmt: skip
_INSIDE: Final = (
    ("PatientName", "PN"), ("PatientID", "LO"), ("StudyDate", "DA"), ("ReferencedSOPInstanceUID", "UI"),
    ("CodeMeaning", "LO"), ("TextValue", "UT"), ("LUTExplanation", "LO"), ("PersonTelephoneNumbers", "SH"),
)  # fmt: skip


def nested(depth: int, dataset: Dataset, sower: Sower) -> None:
    """The same attributes ``depth`` items down in sequences where the table does not look for them."""
    for keyword in _PARENTS:
        leaf = Dataset()
        for inside, vr in _INSIDE:
            tag = tag_for_keyword(inside)
            assert tag is not None
            put(leaf, tag, vr, sower, f"{keyword}*{depth}/")
        for _ in range(depth):
            outer = Dataset()
            tag = tag_for_keyword(keyword)
            assert tag is not None
            outer[tag] = DataElement(tag, "SQ", Sequence([leaf]))
            leaf = outer
        dataset.update(leaf)


def private(dataset: Dataset, sower: Sower) -> None:
    """Private creators, elements of every shape, a nested private sequence, and blocks known to be 'safe'."""
    for group, creator in (
        (0x0009, "GEMS_IDEN_01"),
        (0x0019, "SIEMENS MR HEADER"),
        (0x2005, "Philips MR Imaging DD 001"),
    ):
        block = dataset.private_block(group, creator, create=True)
        # elements that no private dictionary gives another VR
        for n, vr in enumerate(("LO", "PN", "UT", "UN", "OB", "DA", "UI", "SQ"), start=0xE8):
            block.add_new(n, vr, value_of(vr, f"private {group:04X}/{vr}", sower))
    own = dataset.private_block(0x0011, sower.word("private creator itself"), create=True)
    item, deep = Dataset(), Dataset()
    deep.PatientName = sower.name("private sequence/PatientName")
    item.private_block(0x0013, "NESTED", create=True).add_new(1, "LT", sower.word("private sequence/private"))
    item.ReferencedImageSequence = [deep]
    own.add_new(1, "SQ", Sequence([item]))
    csa = dataset.private_block(0x0029, "SIEMENS CSA HEADER", create=True)
    csa.add_new(0x10, "OB", b"SV10\4\3\2\1" + b"\0" * 64 + sower.word("CSA header").encode() + b"\0" * 64)
    dataset.add_new(0x00270001, "LO", sower.word("private without creator"))


def safe_private(dataset: Dataset, sower: Sower) -> None:
    """Private elements that vendors say are numbers (PS3.15 E.3.10), with texts in them."""
    siemens = dataset.private_block(0x0019, "SIEMENS MR HEADER", create=True)
    siemens.add_new(0x0C, "LO", sower.word("B_value as text"))
    siemens.add_new(0x0B, "LO", f"1000\\{sower.word('beside a number')}")
    siemens.add_new(0x0E, "UN", sower.word("direction as bytes").encode().ljust(24, b"\0"))
    philips = dataset.private_block(0x2001, "Philips Imaging DD 001", create=True)
    philips.add_new(0x0A, "IS", sower.digits("a telephone number as slice number"))
    ge = dataset.private_block(0x0043, "GEMS_PARM_01", create=True)
    ge.add_new(0x39, "IS", [1, 2, sower.digits("a telephone number among b-values")])


def unknown(dataset: Dataset, sower: Sower) -> None:
    """UN for known attributes, for sequences with implicit and explicit items, and tags that no dictionary has."""
    dataset[0x00101001] = DataElement(0x00101001, "UN", sower.name("OtherPatientNames as UN").encode())
    dataset[0x00102160] = DataElement(0x00102160, "UN", sower.word("EthnicGroup as UN").encode())
    dataset[0x00189999] = DataElement(0x00189999, "UN", sower.word("unknown even tag").encode())
    dataset[0x00309998] = DataElement(0x00309998, "LO", sower.word("unknown even tag, LO").encode().decode())
    for tag, keyword, explicit in (
        (0x00081032, "ProcedureCodeSequence", False),
        (0x00081140, "ReferencedImage", True),
    ):
        name = sower.name(f"{keyword} as UN, {'explicit' if explicit else 'implicit'} items").encode()
        name += b" " * (len(name) % 2)
        head = (
            struct.pack("<HH2sH", 0x10, 0x10, b"PN", len(name))
            if explicit
            else struct.pack("<HHI", 0x10, 0x10, len(name))
        )
        body = struct.pack("<HHI", 0xFFFE, 0xE000, len(head) + len(name)) + head + name
        dataset[tag] = DataElement(tag, "UN", body)


def retired(dataset: Dataset, sower: Sower) -> None:
    """Attributes that the standard gave up, curves, and audio."""
    for tag in (0x00080040, 0x00084000, 0x00101050, 0x00186030, 0x00204000, 0x00321032, 0x00324000, 0x40004000):
        put(dataset, tag, "LO" if tag != 0x00321032 else "PN", sower)
    for tag in (0x40080118, 0x40080119, 0x4008010C, 0x4008010B, 0x40080114, 0x40080300, 0x00880904, 0x00880910):
        put(dataset, tag, dictionary_VR(tag), sower)
    dataset.add_new(0x50000022, "LO", sower.word("curve description"))
    dataset.add_new(0x50002500, "LO", sower.word("curve label"))
    dataset.add_new(0x50003000, "OW", sower.word("curve data").encode())
    dataset.add_new(0x50022610, "US", 1)
    dataset.add_new(0x5002200C, "OW", sower.word("audio data").encode())


_NEW: Final = (  # new in the editions after 2024b
    0x00100011, 0x00100012, 0x00100013, 0x00100014, 0x00100015, 0x00100016, 0x00100041, 0x00100042, 0x00100043,
    0x00100044, 0x00100045, 0x00100046, 0x00100047, 0x00102161, 0x00102162, 0x00181010, 0x00181011, 0x003A0020,
    0x003A0203, 0x0040B020, 0x00700006, 0x0040E012, 0x300A0054,
)  # fmt: skip


def newest(dataset: Dataset, sower: Sower) -> None:
    """Gender identity, name to use, pronouns: in the dictionary or not, files have them."""
    for tag in _NEW:
        vr = dictionary_VR(tag) if dictionary_has_tag(tag) else "LT"
        put(dataset, tag, vr.split(" ")[0], sower)


def descriptions(dataset: Dataset, sower: Sower) -> None:
    """Names, addresses and telephone numbers inside free text, and harmless words around them."""
    dataset.StudyDescription = f"MRI of {sower.word('name in StudyDescription')} T2 head"
    dataset.ProtocolName = f"t1 for Dr {sower.word('name in ProtocolName')}"
    dataset.ImageComments = f"Mrs {sower.word('name in ImageComments')}, born in Oslo, moved"
    dataset.PatientComments = f"lives at 12 {sower.word('street')} Street, 3rd floor, phone {sower.digits('phone')}"
    dataset.AdditionalPatientHistory = f"call the son, {sower.word('son')}, +47 {sower.digits('phone of the son')}"
    dataset.RequestedProcedureDescription = f"asked for by {sower.word('ward')} ward on {sower.day('day in text')}"
    dataset.DerivationDescription = f"resampled by {sower.word('resampled by')}@hospital.example"
    dataset.WindowCenterWidthExplanation = sower.word("WindowCenterWidthExplanation")
    dataset.ImagePositionPatient = list(dataset.ImagePositionPatient)
    dataset.ContrastBolusAgent = f"gadolinium for {sower.word('ContrastBolusAgent')}"
    dataset.PatientAddress = f"{sower.word('PatientAddress')} 7, 0150 Oslo"
    dataset.PatientTelephoneNumbers = sower.digits("PatientTelephoneNumbers")


def numbers(dataset: Dataset, sower: Sower) -> None:
    """Identifiers that look like the numbers and terms that a picture keeps."""
    dataset.InstanceNumber = sower.digits("InstanceNumber")[:10]
    dataset.PatientWeight = "83.4417"
    dataset.KVP = sower.digits("KVP")
    dataset.XRayTubeCurrent = sower.digits("XRayTubeCurrent")
    dataset.SliceLocation = f"0.{sower.digits('SliceLocation')}"
    dataset[0x00280008] = DataElement(0x00280008, "IS", "1")
    dataset.WindowCenter = sower.digits("WindowCenter")
    dataset.PatientPosition = sower.code("PatientPosition")
    dataset.Laterality = sower.code("Laterality")


def dated_uids(dataset: Dataset, sower: Sower) -> None:
    """UIDs that hold a birth date, a record number and a name as numbers, and references to them."""
    born, number = "19430817", "84629173"
    sop = sower.known("SOPInstanceUID", f"2.999.{born}.{number}.1", "rekeyed")
    dataset.SOPInstanceUID = sop
    dataset.FrameOfReferenceUID = sower.known("FrameOfReferenceUID", f"2.999.{born}.{number}.2", "rekeyed")
    item = Dataset()
    item.ReferencedSOPClassUID = sower.known("ReferencedSOPClassUID", f"2.999.{born}.{number}.3", "rekeyed")
    item.ReferencedSOPInstanceUID = sop
    dataset.ReferencedImageSequence = [item]
    dataset.IrradiationEventUID = sower.known("IrradiationEventUID", f"2.999.{born}.{number}.4", "rekeyed")


_WRITTEN: Final = (  # file, Specific Character Set, a family name that only this set can write
    ("ir87", ["", "ISO 2022 IR 87"], "Washioyama=鷲尾山^凛太朗=わしおやま^りんたろう", "鷲尾山"),
    ("ir149", ["", "ISO 2022 IR 149"], "Hwangbok=黃馥^喜重=황복^희중", "황복"),
    ("gb18030", "GB18030", "Wang^XiaoDong=欧阳^小东=", "欧阳"),
    ("ir100", "ISO_IR 100", "Müßiggångsæter", "Müßiggångsæter"),
    ("ir144", "ISO_IR 144", "Люкceмбypжцев", "Люкceмбypжцев"),
    ("ir192", "ISO_IR 192", "Łukaszewiczówna^Żółć", "Łukaszewiczówna"),
)


def written(charset: str | list[str], full: str, sentinel: str, dataset: Dataset, sower: Sower) -> None:
    """One name in another character set, as a name, in a description, in a comment and nested."""
    dataset.SpecificCharacterSet = charset
    for keyword in ("PatientName", "OperatorsName", "StudyDescription", "PatientComments"):
        setattr(dataset, keyword, written_as(sower, keyword, sentinel, full, keyword))
    item = Dataset()
    item.PatientName = written_as(sower, "nested PatientName", sentinel, full, "PatientName")
    dataset.ReferencedImageSequence = [item]


def written_as(sower: Sower, place: str, sentinel: str, full: str, keyword: str) -> str:
    """The whole name where a name belongs, the sentinel where a text does."""
    sower.known(place, sentinel)
    return full if keyword.endswith("Name") else sentinel


def nested_text(dataset: Dataset, sower: Sower) -> None:
    """Descriptions and nested attributes, for the other ways to write a data set."""
    descriptions(dataset, sower)
    nested(2, dataset, sower)


_MR, _CT, _BIG = "MR_small.dcm", "CT_small.dcm", "MR_small_bigendian.dcm"
MAKERS: Final = (
    carrier("mr_top_level.dcm", _MR, top_level),
    *(carrier(f"mr_table_{n}.dcm", _MR, partial(table, n, 4)) for n in range(4)),
    *(carrier(f"ct_nested_{n}.dcm", _CT, partial(nested, n)) for n in range(1, 5)),
    carrier("mr_private.dcm", _MR, private),
    carrier("mr_safe_private.dcm", _MR, safe_private),
    carrier("ct_unknown.dcm", _CT, unknown),
    carrier("mr_retired.dcm", _MR, retired),
    carrier("ct_2026c.dcm", _CT, newest),
    carrier("mr_descriptions.dcm", _MR, descriptions),
    carrier("ct_numbers.dcm", _CT, numbers),
    carrier("mr_dated_uids.dcm", _MR, dated_uids),
    *(carrier(f"mr_{name}.dcm", _MR, partial(written, *rest)) for name, *rest in _WRITTEN),
    carrier("mr_implicit.dcm", "MR_small_implicit.dcm", nested_text),
    carrier("mr_big_endian.dcm", _BIG, nested_text),
    carrier("sc_top_level.dcm", "SC_rgb_small_odd.dcm", top_level),
)
