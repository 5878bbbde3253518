"""The residual scan: finds every planted identity in any encoding, and nothing in clean files."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pydicom
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydicom import DataElement, Dataset
from pydicom import config as pydicom_config
from pydicom.data import get_testdata_file

from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.identifying_values import identifiers
from agent.deidentify.pixels import pixel_data
from agent.deidentify.ps315.options import Profile
from agent.deidentify.residual_check import residual

WHO = Deidentifier(bytes(range(32)), "H")


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and write what breaks the standard, as the worker does."""
    monkeypatch.setattr(pydicom_config.settings, "_reading_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config.settings, "_writing_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config, "replace_un_with_known_vr", False)


def _mr(**changes: object) -> Dataset:
    dataset = pydicom.dcmread(get_testdata_file("MR_small.dcm", download=False))
    for keyword, value in changes.items():
        setattr(dataset, keyword, value)
    return dataset


def _written(dataset: Dataset) -> bytes:
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def _into_header(output: bytes, data: bytes) -> bytes:
    """The output with bytes planted in an element between patient and pixels."""
    value = data + b" " * (len(data) % 2)
    element = struct.pack("<HH2sH", 0x0020, 0x4000, b"LT", len(value)) + value
    at = output.index(struct.pack("<HH2s", 0x0028, 0x0002, b"US"))
    return output[:at] + element + output[at:]


def test_no_bundled_file_raises_a_false_alarm_under_any_profile() -> None:
    everything = Profile(
        *(True, True, True, True, True, True, True),
    )
    scanned = 0
    folder = Path(str(get_testdata_file("MR_small.dcm", download=False))).parent
    paths = [p for p in sorted(folder.rglob("*.dcm")) if p.stat().st_size < 100_000]
    for profile in (Profile(), everything):
        who = Deidentifier(bytes(range(32)), "H", profile)
        for path in paths:
            try:
                dataset = pydicom.dcmread(path)
                dataset.PatientID = dataset.get("PatientID") or "P-0012345"
                native = dataset
                if "PixelData" in dataset:
                    native = pixel_data.native(
                        dataset, pixel_data.decode(dataset, dataset.file_meta.TransferSyntaxUID)
                    )
                clean = who.apply(native)
            except (FileRejectedError, pydicom.errors.InvalidDicomError, AttributeError, ValueError, TypeError):
                continue  # the prescan's and the decoders' own tests are about these
            scanned += 1
            assert residual(identifiers(dataset, profile), _written(clean)) == (), path
    assert scanned > 80


def test_the_original_itself_is_full_of_findings() -> None:
    dataset = _mr()
    found = residual(identifiers(dataset), _written(dataset))
    assert {f.partition("@")[0] for f in found} >= {"name", "id", "uid"}
    assert any(f.endswith("@0010,0010") for f in found)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("shape", [str, str.upper, str.lower, str.swapcase])
@pytest.mark.parametrize("name", ["Brightwater^Petra", "Müllerström^Åsa"])
def test_a_name_is_found_in_every_encoding_and_case(name: str, shape: object, encoding: str) -> None:
    dataset = _mr(PatientName=name, SpecificCharacterSet="ISO_IR 192")
    output = _written(WHO.apply(dataset))
    planted = shape(name.partition("^")[0]).encode(encoding)  # type: ignore[operator]
    assert residual(identifiers(dataset), output) == ()
    assert residual(identifiers(dataset), _into_header(output, planted)) == ("name@0020,4000",)
    assert residual(identifiers(dataset), output + planted) != ()
    preamble = planted[:128] + output[len(planted[:128]) :]
    assert residual(identifiers(dataset), preamble) == ("name@preamble",)


def test_a_name_is_found_in_the_files_own_character_set() -> None:
    dataset = _mr()
    dataset.SpecificCharacterSet = ["", "ISO 2022 IR 87"]
    dataset.PatientName = "Yamada^Tarou=山田^太郎"
    again = pydicom.dcmread(io.BytesIO(_written(dataset)))
    own = again.get_item("PatientName").value.split(b"=")[1].split(b"^")[0]
    assert own.startswith(b"\x1b$B")
    output = _written(WHO.apply(again))
    for planted in (own, "山田^太郎".encode(), "TAROU".encode("utf-16-le")):
        assert residual(identifiers(again), _into_header(output, planted))


@pytest.mark.parametrize("writing", ["19611002", "1961-10-02", "02.10.1961", "10/02/1961", "1961/10/02"])
def test_a_birth_date_is_found_in_its_usual_writings(writing: str) -> None:
    dataset = _mr(PatientBirthDate="19611002")
    output = _into_header(_written(WHO.apply(dataset)), b"born " + writing.encode())
    assert residual(identifiers(dataset), output) == ("date@0020,4000",)


def test_short_names_count_as_words_and_never_inside_of_other_words() -> None:
    dataset = _mr(PatientName="Li^Bo")
    output = _written(WHO.apply(dataset))
    assert residual(identifiers(dataset), _into_header(output, b"seen by li today")) == ("name@0020,4000",)
    assert residual(identifiers(dataset), _into_header(output, b"liver and bone")) == ()


@pytest.mark.parametrize("name", ["Head^Norm", "Brain^Basic", "Abdo^Prim", "Long^Clean", "Beda^Dada"])
def test_a_name_that_is_a_technical_word_is_no_alarm_in_a_clean_file(name: str) -> None:
    dataset = _mr(PatientName=name, BodyPartExamined="HEAD", ImageType=["ORIGINAL", "PRIMARY", "NORM"])
    assert residual(identifiers(dataset), _written(WHO.apply(dataset))) == ()


def test_a_numeric_id_is_not_found_inside_of_longer_numbers() -> None:
    dataset = _mr(PatientID="123456")
    output = _written(WHO.apply(dataset))
    assert residual(identifiers(dataset), _into_header(output, b"0.123456 9123456 1234567")) == ()
    assert residual(identifiers(dataset), _into_header(output, b"No. 123456!")) == ("id@0020,4000",)


@pytest.mark.parametrize(
    ("keyword", "given", "planted", "kind"),
    [
        *(("PatientID", "123456789", "MRT 123 456 789", "id"), ("PatientID", "12-345-67", "12 345 67", "id")),
        *(("PatientID", "123456789", "123\\456\\789", "id"), ("PatientID", "0012345", "12.345", "id")),
        *(("AccessionNumber", "CT12345", "ct12_345", "id"), ("StudyID", "S4711", "S47 11", "id")),
        *(
            ("PatientBirthDate", "19850312", w, "date")
            for w in ("12 03 1985", "EM850312", "CT 12 03 85", "1985_0312")
        ),
    ],
)
def test_numbers_of_people_are_found_however_they_are_grouped(
    keyword: str, given: str, planted: str, kind: str
) -> None:
    dataset = _mr(**{keyword: given})
    output = _written(WHO.apply(dataset))
    assert residual(identifiers(dataset), output) == ()
    assert residual(identifiers(dataset), _into_header(output, planted.encode())) == (f"{kind}@0020,4000",)
    assert residual(identifiers(dataset), _into_header(output, b"91 23 45 67 98 86 0 313 48")) == ()


@pytest.mark.parametrize(
    ("keyword", "given", "carrier", "value", "kind"),
    [
        *(("PatientID", "0012345", "SeriesNumber", 12345, "id"), ("PatientID", "12345", "SeriesNumber", 12345, "id")),
        *(("PatientID", "A-54321", "NumberOfZeroFills", 54321, "id"),),
        *(("PatientID", "54321", "RepetitionTime", "54321.0", "id"),),
        *(("PatientBirthDate", "19850312", "DetectorVector", [1, 1985, 3, 12], "date"),),
        *(("PatientBirthDate", "19850312", "SliceLocationVector", ["12", "03", "1985"], "date"),),
        *(("PatientName", "Lee^Anna", "DetectorVector", [7, *b"Lee", 7], "name"),),
        *(("PatientName", "Lee^Anna", "DetectorVector", [*b"LEE"], "name"),),
    ],
)
def test_what_names_people_is_found_among_numbers(
    keyword: str, given: str, carrier: str, value: object, kind: str
) -> None:
    dataset = _mr(**{keyword: given, carrier: value})
    found = residual(identifiers(dataset), _written(WHO.apply(dataset)))
    assert {f.partition("@")[0] for f in found} == {kind}
    other = {"PatientID": "765-432", "PatientBirthDate": "19850412", "PatientName": "Lie^Anna"}
    again = _mr(**{keyword: other[keyword], carrier: value})
    assert residual(identifiers(again), _written(WHO.apply(again))) == ()


@pytest.mark.parametrize("encoding", ["ascii", "utf-16-le"])
@pytest.mark.parametrize("offset", range(9))
def test_a_name_among_the_pixels_is_found_at_every_offset(encoding: str, offset: int) -> None:
    dataset = _mr(PatientName="Brightwater^Petra")
    values = np.random.default_rng(offset).integers(60, 130, (64, 64)).astype("<u2")
    dataset.PixelData = values.tobytes()
    output = _written(WHO.apply(dataset))
    at = output.index(values.tobytes()) + 1000 + offset
    planted = "BRIGHTWATER".encode(encoding)
    assert residual(identifiers(dataset), output) == ()
    spoilt = output[:at] + planted + output[at + len(planted) :]
    assert residual(identifiers(dataset), spoilt) == ("name@7FE0,0010",)


def test_pixels_that_all_look_like_a_needle_are_searched_the_slow_way() -> None:
    dataset = _mr(PatientName="AAAAAAAAAAB^Petra", PixelData=b"A" * (64 * 64 * 2))
    output = _written(WHO.apply(dataset))
    assert residual(identifiers(dataset), output) == ()
    assert residual(identifiers(dataset), output[:-1] + b"B") == ("name@7FE0,0010",)


def test_findings_say_where_and_never_what() -> None:
    dataset = _mr(PatientName="Brightwater^Petra")
    found = residual(identifiers(dataset), _written(dataset))
    assert found
    assert "rightwater" not in "".join(found).casefold() + repr(identifiers(dataset)).casefold()


PLACES = (
    "name",
    "id",
    "address",
    "nested",
    "private",
    "private_nested",
    "unknown",
    "un",
    "meta",
    "preamble",
    "comment",
)


def _plant(dataset: Dataset, place: str, word: str) -> None:
    """Put a sentinel into one kind of place."""
    item = Dataset()
    item.PatientName = f"{word}^A"
    elements: dict[str, tuple[int, str, object]] = {
        "name": (0x00080090, "PN", f"{word}^B"),
        "id": (0x00101000, "LO", [word, "B"]),
        "address": (0x00101040, "LO", f"1 {word} Road"),
        "nested": (0x00081140, "SQ", [item]),
        "private": (0x00111001, "LO", f"{word} x"),
        "private_nested": (0x00111002, "SQ", [item]),
        "unknown": (0x00187FFE, "LO", word),
        "un": (0x00081110, "UN", word.encode() + b" " * (len(word) % 2)),
        "comment": (0x00204000, "LT", f"seen for Mrs {word} and others"),
    }
    if place == "meta":
        dataset.file_meta.SourceApplicationEntityTitle = word
    elif place == "preamble":
        dataset.preamble = word.encode().ljust(128, b"\0")
    else:
        tag, vr, value = elements[place]
        dataset[tag] = DataElement(tag, vr, value)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    words=st.lists(st.from_regex(r"[QZX][a-z]{5,9}[qzx]", fullmatch=True), min_size=11, max_size=11, unique=True),
    places=st.lists(st.sampled_from(PLACES), min_size=1, max_size=6, unique=True),
    encoding=st.sampled_from(["utf-8", "latin-1", "utf-16-le", "utf-16-be"]),
)
def test_a_sentinel_is_gone_from_wherever_it_was_and_would_be_found(
    words: list[str], places: list[str], encoding: str
) -> None:
    assume(len({w.casefold() for w in words}) == len(words))
    dataset = _mr()
    for place, word in zip(places, words, strict=False):
        _plant(dataset, place, word)
    source = pydicom.dcmread(io.BytesIO(_written(dataset)))
    if "preamble" in places:
        source.preamble = dataset.preamble
    needles, output = identifiers(source), _written(WHO.apply(source))
    assert residual(needles, output) == ()
    for place, word in zip(places, words, strict=False):
        assert word.encode().lower() not in output.lower()
        # of an address the whole line is looked for, of everything else the word
        planted = f"1 {word} Road" if place == "address" else f"{word} x" if place == "private" else word
        assert residual(needles, _into_header(output, planted.encode(encoding))), place
