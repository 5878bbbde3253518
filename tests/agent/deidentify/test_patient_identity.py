"""One patient is one pseudonym (P3): a patient id that might be another spelling of a known one is refused."""

from __future__ import annotations

import io
import struct
import sys
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom import DataElement, Dataset

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.ingest.parser_process import ParserLimits, ParserProcess
from tests.support.instances import mr

WHO = Deidentifier(b"\7" * 32, "KH NORD")
RULES = AdmissionRules(
    modalities=frozenset({"MR"}), image_types=frozenset({("DERIVED", "SECONDARY"), ("ORIGINAL", "PRIMARY")})
)
HEX = "0" * 32


@pytest.fixture(scope="module")
def reader() -> Iterator[ParserProcess]:
    """The real worker, shared."""
    with ParserProcess(RULES, WHO, ParserLimits()) as made:
        yield made


def _file(patient: bytes, vr: str = "LO", issuer: bytes | None = None, charset: bytes | None = None) -> bytes:
    """A real MR image with these very bytes as its Patient ID."""
    dataset = mr()
    dataset.PatientID, dataset.PatientName = "HERE", "X"
    for keyword in ("IssuerOfPatientID", "SpecificCharacterSet"):
        if keyword in dataset:
            del dataset[keyword]
    stream = io.BytesIO()
    dataset.save_as(stream)
    data, old = stream.getvalue(), _element(0x00100020, "LO", b"HERE")
    assert data.count(old) == 1
    new = _element(0x00100020, vr, patient)
    if issuer is not None:
        new += _element(0x00100021, "LO", issuer)
    data = data.replace(old, new)
    if charset is not None:
        place = data.index(struct.pack("<HH", 8, 8) + b"CS")  # image type, the first of its group
        data = data[:place] + _element(0x00080005, "CS", charset) + data[place:]
    return data


def _element(tag: int, vr: str, value: bytes) -> bytes:
    value += b" " * (len(value) % 2)
    head = struct.pack("<HH2s", tag >> 16, tag & 0xFFFF, vr.encode())
    return (
        head
        + (struct.pack("<HI", 0, len(value)) if vr in ("UN", "OB", "UC") else struct.pack("<H", len(value)))
        + value
    )


@pytest.mark.parametrize(
    ("patient", "vr"),
    [
        (b"A00123\x01", "LO"),
        ("A00123\u200b".encode(), "LO"),
        (b"A00123\\", "LO"),
        (b"A00123\\A00123", "LO"),
        (b"\\A00123", "LO"),
        (b"A00123\0\0x", "LO"),
        (b"\0A00123", "LO"),
        (b"A00123\t", "LO"),
        (b"A00123\x1b(B", "LO"),
        (b"A00123", "PN"),
        (b"A00123", "US"),
        (b"A00123", "OB"),
        (b"A00123", "AE"),
        (b"00123", "IS"),
        (b"M\xfcller1", "LO"),
        ("Müller1".encode(), "LO"),
        ("Müller1".encode(), "UN"),
    ],
)
def test_a_patient_id_that_is_not_one_plain_text_is_refused(patient: bytes, vr: str, reader: ParserProcess) -> None:
    with pytest.raises(FileRejectedError, match="missing_patient"):
        reader.read(_file(patient, vr), HEX)


@pytest.mark.parametrize(
    ("patient", "vr", "issuer"),
    [
        (b"a00123", "LO", None),
        (b" A00 123  ", "LO", None),
        (b"A00123\0", "LO", None),
        (b"A00123", "SH", None),
        (b"A00123", "UN", None),
        (b"A00123", "LO", b""),
        (b"A00123", "LO", b"Kh nord"),
        (b"A00123", "LO", b"KHNORD \0"),
    ],
)
def test_every_spelling_that_is_accepted_is_the_same_patient(
    patient: bytes, vr: str, issuer: bytes | None, reader: ParserProcess
) -> None:
    assert reader.read(_file(patient, vr, issuer), HEX).pseudonym == WHO.person("KH NORD", "A00123")


def test_the_number_of_another_issuer_is_another_patient_and_a_spoilt_issuer_is_refused(
    reader: ParserProcess,
) -> None:
    assert reader.read(_file(b"A00123", issuer=b"KH SUED"), HEX).pseudonym == WHO.person("kh sued", "A00123")
    assert WHO.person("KH SUED", "A00123") != WHO.person("", "A00123")
    for issuer in (b"KH NORD\\KH SUED", b"KH NORD\\", b"KH\x02NORD", b"KH N\xd6RD"):
        with pytest.raises(FileRejectedError, match="missing_patient"):
            reader.read(_file(b"A00123", issuer=issuer), HEX)
    with pytest.raises(ValueError, match="issuer"):
        Deidentifier(b"\7" * 32, "KH\u200bNORD")


@pytest.mark.parametrize(
    ("charset", "patient", "text"),
    [
        (b"ISO_IR 100", "Müller1".encode("latin-1"), "Müller1"),
        (b"ISO_IR 192", "Müller1".encode(), "MÜLLER1"),
        (b"ISO_IR 144", "Б17".encode("iso8859-5"), "Б17"),
        # PS3.5 H.3.1: the kanji of Yamada, by an escape sequence
        (b"\\ISO 2022 IR 87", b"\x1b$B;3ED\x1b(B7", "山田7"),
    ],
)
def test_an_id_in_its_declared_character_set_is_the_same_in_every_other(
    charset: bytes, patient: bytes, text: str, reader: ParserProcess
) -> None:
    assert reader.read(_file(patient, charset=charset), HEX).pseudonym == WHO.person("", text)


@pytest.mark.parametrize(
    ("charset", "patient"),
    [
        (b"ISO_IR 192", b"M\xfcller1"),
        (b"ISO_IR 6", b"M\xfcller1"),
        (b"ISO_IR 999", b"M\xfcller1"),
        (b"ISO_IR 100", b"M\x81ller1"),
        (b"\\ISO 2022 IR 87", b"M\xfcller1"),
        (b"\\ISO 2022 IR 100", b"M\xfc\x1b(Bller1"),
        (b"\\ISO 2022 IR 87", b"\x1b$B;3E\xff\x1b(B7"),
        (b"\\ISO 2022 IR 87", b"A\x1b%Z7"),
    ],
)
def test_bytes_that_are_not_of_the_declared_character_set_are_refused(
    charset: bytes, patient: bytes, reader: ParserProcess
) -> None:
    with pytest.raises(FileRejectedError, match="missing_patient"):
        reader.read(_file(patient, charset=charset), HEX)


def test_a_data_set_that_was_already_read_as_text_is_judged_by_what_is_left() -> None:
    for charset, patient in ((None, "Müller1"), ("ISO_IR 192", "M\ufffdller1"), ("ISO_IR 999", "Müller1")):
        dataset = Dataset()
        dataset.PatientID = patient
        if charset:
            dataset[0x00080005] = DataElement(0x00080005, "CS", charset)
        with pytest.raises(FileRejectedError, match="missing_patient"):
            WHO.person_of(dataset)
    dataset.SpecificCharacterSet = "ISO_IR 192"
    assert WHO.person_of(dataset) == WHO.person("", "MÜLLER1")


IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="\\"), min_size=1, max_size=16)
UNSEEN = st.sampled_from([c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c)[0] == "C"])


@given(IDS, st.integers(0, 16), st.sampled_from(" \u00a0\u2003\u3000"))
def test_case_width_and_spaces_never_make_another_patient(patient: str, place: int, space: str) -> None:
    wide = "".join(chr(ord(c) + 0xFEE0) for c in patient)  # fullwidth forms, U+FF01 for U+0021
    spaced = patient[:place] + space + patient[place:]
    for other in (patient.lower(), patient.upper(), wide, spaced, f" {patient}\0 "):
        assert WHO.person("", other) == WHO.person("", patient)


@given(IDS, st.integers(0, 16), UNSEEN | st.sampled_from("\\\ufffd\u034f\u115f\u3164\ufe0f\U000e0100"))
def test_no_character_that_nobody_sees_makes_another_patient(patient: str, place: int, unseen: str) -> None:
    told = patient[:place] + unseen + patient[place:]
    if unseen == "\0" and place >= len(patient):
        assert WHO.person("", told) == WHO.person("", patient)
        return
    with pytest.raises(FileRejectedError, match="missing_patient"):
        WHO.person("", told)
    with pytest.raises(FileRejectedError, match="missing_patient"):
        WHO.pseudonym(told, "7")


def test_the_patients_of_a_hospital_keep_their_own_names() -> None:
    ids = [f"A{n:05d}" for n in range(500)] + ["A-1", "A1", "A.1", "01", "1", "É1", "E1"]
    assert len({WHO.person("", one) for one in ids}) == len(ids)
