"""multipart/related taken apart: against the standard library's own writer and parser, and against hostile bodies."""

from __future__ import annotations

import email
import email.policy
import itertools
import resource

import pytest
from dicomweb_client.web import DICOMwebClient
from hypothesis import given
from hypothesis import strategies as st

from agent.pacs.dicomweb.multipart import BodyLimits, BodyPart, MultipartError, Splitter, media_type

HEAD = b"Content-Type: application/dicom\r\n\r\n"


def split(
    body: bytes, cuts: list[int] | None = None, *, boundary: str = "b0", limits: BodyLimits | None = None
) -> list[BodyPart]:
    splitter = Splitter(boundary, limits or BodyLimits())
    edges = [0, *sorted(cuts or []), len(body)]
    parts = [part for a, b in itertools.pairwise(edges) for part in splitter.feed(body[a:b])]
    splitter.end()
    return parts


def fault(body: bytes, **options: object) -> str:
    with pytest.raises(MultipartError) as caught:
        split(body, **options)  # type: ignore[arg-type]
    return caught.value.fault


def body_of(*bodies: bytes, boundary: bytes = b"b0") -> bytes:
    return b"".join(b"\r\n--%s\r\n%s%s" % (boundary, HEAD, one) for one in bodies) + b"\r\n--%s--" % boundary


# What may look like a boundary, and is none: everything from which one is made.
_NEARLY = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--", b"b", b"b0", b"\r\n--", b"\r\n--b", b"x", b"\0"]))
_BODIES = st.lists(_NEARLY.map(b"".join).filter(lambda one: b"\r\n--b0" not in b"\r\n" + one), min_size=1, max_size=5)


@given(_BODIES, st.lists(st.integers(0, 400), max_size=12))
def test_parts_come_out_as_they_were_put_in_wherever_the_body_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    body = body_of(*bodies)
    parts = split(body, [min(cut, len(body)) for cut in cuts])
    assert [part.body for part in parts] == bodies
    assert all(part.whole and part.media_type == "application/dicom" for part in parts)


def test_a_boundary_may_be_cut_at_every_offset() -> None:
    body = b"preamble" + body_of(b"first", b"", b"\r\n--b", b"last\r\n") + b"\r\nepilogue --b0 \r\n--b0"
    for cut in range(len(body) + 1):
        assert [part.body for part in split(body, [cut])] == [b"first", b"", b"\r\n--b", b"last\r\n"]
    assert len(split(body, list(range(len(body))))) == 4


@given(st.lists(st.binary(max_size=60).map(lambda raw: raw.hex().encode()), min_size=1, max_size=4))
def test_it_agrees_with_the_standard_librarys_parser(texts: list[bytes]) -> None:
    body = body_of(*texts)
    message = email.message_from_bytes(
        b'Content-Type: multipart/related; boundary="b0"\r\n\r\n' + body, policy=email.policy.HTTP
    )
    theirs = [part.get_payload(decode=True) for part in message.iter_parts()]
    assert [part.body for part in split(body)] == theirs


def test_it_reads_what_dicomweb_client_writes() -> None:
    said = 'multipart/related; type="application/dicom"; boundary="0f3cf5c0-70e0"'
    body = DICOMwebClient("http://localhost")._encode_multipart_message([b"one", b"two\r\n"], said)
    assert [part.body for part in split(body, boundary=media_type(said).boundary)] == [b"one", b"two\r\n"]
    assert media_type(said).root == "application/dicom"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "malformed"),
        (b"\r\n--b0\r\n" + HEAD + b"no end", "malformed"),
        (b"\r\n--b0\r\n" + HEAD + b"cut\r\n--b0", "malformed"),
        (b"\r\n--b0\r\n" + HEAD + b"cut\r\n--b0-", "malformed"),
        (b"\r\n--b0 junk\r\n" + HEAD + b"x\r\n--b0--", "malformed"),
        (b"\r\n--b0" + b" " * 5000 + b"\r\n" + HEAD + b"x\r\n--b0--", "malformed"),
        (b"x" * 200_000 + body_of(b"late"), "malformed"),
        (b"\r\n--b0\r\nX: " + b"y" * 20_000 + b"\r\n\r\nx\r\n--b0--", "too_large"),
        (b"\r\n--b0\r\nX: no end of headers\r\n--b0--", "malformed"),
    ],
)
def test_what_is_no_multipart_body_is_refused(body: bytes, expected: str) -> None:
    assert fault(body) == expected
    assert fault(body, cuts=list(range(0, len(body), 7))) == expected


def test_parts_before_a_fault_are_given_out_once() -> None:
    splitter = Splitter("b0", BodyLimits())
    assert [part.body for part in splitter.feed(b"\r\n--b0\r\n" + HEAD + b"good\r\n--b0 bad\r\n")] == [b"good"]
    with pytest.raises(MultipartError):
        splitter.feed(b"more")
    with pytest.raises(MultipartError):
        splitter.end()


def test_a_part_that_is_too_large_is_skipped_and_the_next_one_is_not() -> None:
    limits = BodyLimits(part_bytes=100)
    exact, over = b"e" * 100, b"o" * 101
    body = body_of(b"a", over, exact, b"z" * 100_000, b"b")
    for step in (1, 13, 64, len(body)):
        parts = split(body, list(range(0, len(body), step)), limits=limits)
        assert [part.whole for part in parts] == [True, False, True, False, True]
        assert [parts[i].body for i in (0, 2, 4)] == [b"a", exact, b"b"]
        assert parts[1].body == over[: len(parts[1].body)]
        assert len(parts[3].body) >= 100


def test_an_endless_part_is_held_only_up_to_the_limit() -> None:
    splitter = Splitter("b0", BodyLimits(part_bytes=2**20))
    splitter.feed(b"\r\n--b0\r\n" + HEAD)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    piece = bytes(2**20)
    for _ in range(400):
        assert splitter.feed(piece) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB
    (part,) = splitter.feed(b"\r\n--b0--")
    assert not part.whole
    assert len(part.body) <= 65_536


def test_a_million_parts_are_too_many() -> None:
    splitter = Splitter("b0", BodyLimits())
    many = b"\r\n--b0\r\n\r\n" * 10_000
    assert sum(len(splitter.feed(many)) for _ in range(11)) == BodyLimits().parts
    with pytest.raises(MultipartError, match="too_large"):
        splitter.feed(many)


def test_the_total_is_bounded_before_and_after_the_end() -> None:
    assert fault(body_of(b"x" * 2000), limits=BodyLimits(total_bytes=1000)) == "too_large"
    assert fault(body_of(b"x") + b"epilogue" * 1000, limits=BodyLimits(total_bytes=1000)) == "too_large"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("application/dicom", "unsupported"),
        ("multipart/form-data; boundary=b0", "unsupported"),
        ("", "unsupported"),
        ('multipart/related; type="application/dicom"', "malformed"),
        ("multipart/related; boundary=", "malformed"),
        ("multipart/related; boundary=" + "b" * 201, "malformed"),
        ('multipart/related; boundary="b\r\nX: y"', "malformed"),
        ('multipart/related; boundary="bä"', "malformed"),
        ("multipart/related; boundary=b0" + "; x=y" * 1000, "malformed"),
    ],
)
def test_another_media_type_or_no_usable_boundary_is_refused(header: str, expected: str) -> None:
    with pytest.raises(MultipartError) as caught:
        media_type(header)
    assert caught.value.fault == expected


@pytest.mark.parametrize(
    "header",
    [
        'multipart/related; type="application/dicom"; boundary="a b\'()+_,-./:=?0"',
        'Multipart/Related;boundary="a b\'()+_,-./:=?0";TYPE=Application/DICOM',
        'multipart/related; start=x; boundary="a b\'()+_,-./:=?0"; type="application/dicom"',
    ],
)
def test_every_legal_boundary_is_understood(header: str) -> None:
    said = media_type(header)
    assert said.boundary == "a b'()+_,-./:=?0"
    assert said.root == "application/dicom"
