"""Shards: WebDataset's reading, other libraries as oracles of every member, and every way to say more refused."""

from __future__ import annotations

import io
import struct
import tarfile
import tracemalloc
import zlib
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydicom.uid import UID, ExplicitVRLittleEndian

from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.dicom import pack_dicom
from protos.artifacts.nifti import pack_nifti
from protos.artifacts.png import pack_png, read_png
from protos.artifacts.shards import (
    MAX_SHARD,
    Contents,
    Dicom,
    Form,
    Nifti,
    Png,
    capacity,
    check_shard,
    pack_shard,
    plain,
    read_samples,
)

AFFINE = (0.0, -2.0, 0.0, -5.0, 1.5, 0.0, 0.0, 12.25, 0.0, 0.0, 0.5, 1.0)
LABELS = ("grade 2", "", "0")
RNG = np.random.default_rng(7)


def made(shape: tuple[int, ...], dtype: type, count: int = 3) -> list[np.ndarray[Any, Any]]:
    return [(RNG.random(shape) * 250).astype(dtype) for _ in range(count)]


CASES: list[tuple[Form, list[np.ndarray[Any, Any]], str]] = [
    (Png(), made((9, 7), np.uint8), "png"),
    (Png(), made((300, 301, 3), np.uint8), "png-rgb"),
    (Nifti(AFFINE), made((4, 5, 6), np.int16), "nifti-int16"),
    (Nifti(AFFINE), made((4, 5, 6), np.float32), "nifti-float32"),
    (Dicom("OP", (500, 250)), made((9, 7), np.uint8), "dicom-uint8"),
    (Dicom("MR", (1000, 900, 800)), made((3, 5, 3), np.uint8), "dicom-uint8"),
    (Dicom("CT", (1000, 900)), made((4, 6), np.uint16), "dicom-uint16"),
    (Dicom("CT", (2000, 900, 800)), made((3, 4, 6), np.uint16), "dicom-uint16"),
]
GOOD = pack_shard(CASES[0][1], LABELS, Png())


def refused(raw: bytes, why: str | None = None) -> None:
    with pytest.raises(ArtifactFormatError, match=why):
        check_shard(BytesSource(raw))


def members(raw: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
        return [(m.name, archive.extractfile(m).read()) for m in archive.getmembers()]  # type: ignore[union-attr]


def archive_of(entries: list[tuple[tarfile.TarInfo | str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for entry, body in entries:
            info = tarfile.TarInfo(entry) if isinstance(entry, str) else entry
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return out.getvalue()


def with_first(body: bytes, suffix: str = "png") -> bytes:
    """A shard of one sample, well-formed but for the sample's bytes."""
    return archive_of([(f"00000.{suffix}", body), ("00000.txt", b"")])


@pytest.mark.parametrize(("form", "samples", "name"), CASES)
def test_a_shard_reads_back_and_is_what_tarfile_writes(
    form: Form, samples: list[np.ndarray[Any, Any]], name: str
) -> None:
    raw = pack_shard(samples, LABELS, form)
    assert check_shard(BytesSource(raw)) == Contents(name, 3, samples[0].shape, LABELS)
    assert archive_of(list(members(raw))) == raw
    assert pack_shard(samples, LABELS, form) == raw
    contents, values = read_samples(BytesSource(raw))
    assert contents == check_shard(BytesSource(raw))
    assert values.dtype == samples[0].dtype
    assert (values == np.stack(samples)).all()


def test_samples_have_one_key_for_data_and_label_as_webdataset_groups_them() -> None:
    names = [name for name, _ in members(GOOD)]
    assert names == sorted(names) == [f"{i:05d}.{end}" for i in range(3) for end in ("png", "txt")]
    assert [body.decode() for name, body in members(GOOD) if name.endswith(".txt")] == list(LABELS)


@settings(max_examples=400)
@given(st.data())
def test_any_changed_byte_but_a_pixel_or_a_label_is_found(data: st.DataObject) -> None:
    form, samples, _ = data.draw(st.sampled_from(CASES))
    raw = bytearray(pack_shard(samples[:1], ("",), form))
    body = len(members(bytes(raw))[0][1])
    pixels = samples[0].nbytes + (samples[0].nbytes % 2 if isinstance(form, Dicom) else 0)
    head = body - pixels if not isinstance(form, Png) else body  # a PNG's pixels are under its checksums
    place = data.draw(st.one_of(st.integers(0, 511 + head), st.integers(512 + body, len(raw) - 1)))
    raw[place] ^= data.draw(st.integers(1, 255))
    if isinstance(form, Nifti) and 512 + 40 <= place < 512 + head:
        try:  # another affine is another volume; it must still be in its one form
            found = check_shard(BytesSource(bytes(raw)))
        except ArtifactFormatError:
            return
        assert found.shape == samples[0].shape
        assert 512 + 76 <= place < 512 + 328
        return
    refused(bytes(raw))


@given(st.binary(max_size=2_000))
def test_noise_is_a_bad_artifact_and_nothing_else(noise: bytes) -> None:
    refused(noise)
    for suffix in ("png", "nii", "dcm"):
        refused(with_first(noise, suffix))


# ---------------------------------------------------------------- the archive


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.FIFOTYPE, "pipe"),
        (tarfile.DIRTYPE, "out of place|path"),
    ],
)
def test_links_devices_and_folders_are_refused(kind: bytes, why: str) -> None:
    info = tarfile.TarInfo("00000.png")
    info.type, info.linkname = kind, "/etc/passwd"
    refused(archive_of([(info, b"")]), why)
    later = tarfile.TarInfo("00003.png")
    later.type, later.linkname = kind, "00000.png"
    refused(archive_of([*members(GOOD), (later, b"")]), why)


@pytest.mark.parametrize(
    "name", ["../escape.png", "/etc/cron.d/x.png", "a/00000.png", "..\\00003.png", "./00003.png"]
)
def test_a_path_as_a_name_is_refused(name: str) -> None:
    refused(archive_of([(name, b"x")]), "path")
    refused(archive_of([*members(GOOD), (name, b"x")]), "path")


def test_extended_headers_are_refused() -> None:
    long = "x" * 120 + ".png"
    refused(archive_of([(long, b"x")], tarfile.PAX_FORMAT), "extended header")
    refused(archive_of([(long, b"x")], tarfile.GNU_FORMAT), "extended header")
    pax = tarfile.TarInfo("00003.png")
    pax.pax_headers = {"comment": "Jane Doe"}
    refused(archive_of([*members(GOOD), (pax, b"x")], tarfile.PAX_FORMAT), "extended header|USTAR")
    refused(archive_of(list(members(GOOD)), tarfile.GNU_FORMAT), "USTAR")


@pytest.mark.parametrize(
    ("field", "value"),
    [("uid", 7), ("gid", 7), ("mtime", 1), ("mode", 0o600), ("uname", "dr-smith"), ("gname", "ward-3")],
)
def test_any_other_owner_time_or_mode_is_refused(field: str, value: object) -> None:
    info = tarfile.TarInfo("00000.png")
    setattr(info, field, value)
    refused(archive_of([(info, members(GOOD)[0][1]), *members(GOOD)[1:]]))


def test_members_missing_repeated_or_out_of_order_are_refused() -> None:
    good = members(GOOD)
    for changed in (good[1:], good[:-1], good[:2] + good[4:], good + good[-2:], good[::-1], [good[0], *good[2:]]):
        refused(archive_of(list(changed)))
    refused(archive_of([]), "one sample or more")
    refused(archive_of([("00000.exe", b"x"), ("00000.txt", b"")]))


def test_what_follows_the_end_or_stands_in_the_padding_is_refused() -> None:
    refused(GOOD + b"\0" * 512)
    refused(GOOD + b"\0" * 10_240)
    refused(GOOD[:-1] + b"x")
    refused(GOOD[:-512])
    refused(GOOD + GOOD)
    padded = bytearray(GOOD)
    padded[512 + len(members(GOOD)[0][1])] = 1
    refused(bytes(padded), "padding")


def test_a_member_that_announces_ten_gigabytes_is_refused_before_it_is_read() -> None:
    head = bytearray(GOOD[:512])
    head[124:136] = b"%011o\0" % (8 * 2**30 - 1)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    refused(bytes(head) + GOOD[512:], "longer than the archive")

    class Huge:
        size = MAX_SHARD + 1

        def read(self, offset: int, count: int) -> bytes:
            raise AssertionError("read before the size was judged")

    with pytest.raises(ArtifactFormatError, match="256 MiB"):
        check_shard(Huge())


def test_samples_of_different_shape_form_or_geometry_are_refused() -> None:
    one, two = pack_png(np.zeros((4, 4), np.uint8)), pack_png(np.zeros((4, 5), np.uint8))
    refused(archive_of([("00000.png", one), ("00000.txt", b""), ("00001.png", two), ("00001.txt", b"")]), "one form")
    volume = np.zeros((3, 3, 3), np.int16)
    other = (*AFFINE[:3], 7.0, *AFFINE[4:])
    bodies = [pack_nifti(volume, AFFINE), pack_nifti(volume, other)]
    refused(
        archive_of([(f"{i:05d}.{e}", b) for i in range(2) for e, b in (("nii", bodies[i]), ("txt", b""))]), "geometry"
    )


@pytest.mark.parametrize("label", [b"x" * 33, b"Jane\nDoe", b"\xc3\xa9", b"\0"])
def test_a_label_that_is_long_or_not_plain_is_refused(label: bytes) -> None:
    refused(archive_of([members(GOOD)[0], ("00000.txt", label)]), "label")


@pytest.mark.parametrize("shape", [(8, 8), (24, 24), (33, 9, 3)])
@pytest.mark.parametrize("form", [Png(), Dicom("OT", (1000, 1000))])
@pytest.mark.parametrize("most", [0, 9_000, 40_960, 51_199, 300_000])
def test_as_many_samples_as_there_is_room_for_fit_whatever_they_show(
    shape: tuple[int, ...], form: Form, most: int
) -> None:
    if isinstance(form, Dicom) and len(shape) == 3:
        shape = shape[:2]
    count = capacity(most, shape, form)
    samples = [RNG.integers(0, 256, shape, np.uint8) for _ in range(count + 1)]
    assert len(pack_shard(samples, ["x" * 32] * (count + 1), form)) > most, "and no more"
    if count:
        assert len(pack_shard(samples[:-1], ["x" * 32] * count, form)) <= most


def test_there_is_room_for_what_the_largest_shard_takes_and_for_no_more() -> None:
    assert capacity(1 << 40, (8, 8), Png()) == 100_000
    assert capacity(1 << 40, (64, 64), Png()) == capacity(MAX_SHARD, (64, 64), Png()) == (MAX_SHARD - 10_240) // 6_144
    with pytest.raises(ArtifactFormatError):
        capacity(1 << 40, (8, 8), Dicom("??", (1000, 1000)))


@pytest.mark.parametrize(
    ("label", "fine"), [("", True), ("a" * 32, True), ("a" * 33, False), ("ö", False), ("\n", False)]
)
def test_a_label_is_plain_exactly_when_a_shard_takes_it(label: str, fine: bool) -> None:
    assert plain(label) is fine
    if fine:
        assert pack_shard([np.zeros((8, 8), np.uint8)], [label], Png())
    else:
        with pytest.raises(ArtifactFormatError):
            pack_shard([np.zeros((8, 8), np.uint8)], [label], Png())


def test_what_a_form_cannot_hold_is_not_packed() -> None:
    image = np.zeros((4, 4), np.uint8)
    for samples, labels, form in (
        ([], [], Png()),
        ([image], [], Png()),
        ([image], ["é"], Png()),
        ([image], ["x" * 33], Png()),
        ([image, image[:3]], ["", ""], Png()),
        ([image.astype(np.int16)], [""], Png()),
        ([np.zeros((4, 4, 4), np.uint8)], [""], Png()),
        ([np.zeros((1, 2049), np.uint8)], [""], Png()),
        ([np.full((2, 2, 2), np.nan, np.float32)], [""], Nifti(AFFINE)),
        ([np.zeros((2, 2, 2), np.float64)], [""], Nifti(AFFINE)),
        ([np.zeros((2, 2, 2), np.int16)], [""], Nifti((float("nan"), *AFFINE[1:]))),
        ([np.zeros((2, 2, 2), np.int16)], [""], Nifti((0.0,) * 12)),
        ([np.zeros((2, 2, 2), np.int16)], [""], Nifti((0.1, *AFFINE[1:]))),
        ([np.zeros((4, 4), np.int16)], [""], Dicom("MR", (500, 500))),
        ([image], [""], Dicom("JANE DOE", (500, 500))),
        ([image], [""], Dicom("MR", (500,))),
        ([image], [""], Dicom("MR", (0, 500))),
    ):
        with pytest.raises(ArtifactFormatError):
            pack_shard(samples, labels, form)


# ---------------------------------------------------------------- PNG


@given(st.integers(1, 300), st.integers(1, 300), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=60)
def test_pillow_reads_the_same_pixels(height: int, width: int, colour: bool, seed: int) -> None:
    shape = (height, width, 3) if colour else (height, width)
    image = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    raw = pack_png(image)
    assert (np.asarray(Image.open(io.BytesIO(raw))) == image).all()
    assert (read_png(BytesSource(raw)) == image).all()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (2**31 - 1, 1), (0, 5), (2_049, 1)])
def test_a_picture_that_announces_too_much_is_refused_from_its_header(width: int, height: int) -> None:
    """With 100 MB of zeros behind, packed a thousand to one: nothing of it may be unpacked."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100_000_000), 9)) + chunk(b"IEND", b"")
    tracemalloc.start()
    refused(with_first(bomb), "sides")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_a_compressed_picture_is_refused_without_being_unpacked() -> None:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(50_000_000), 9)) + chunk(b"IEND", b"")
    refused(with_first(bomb), "compression")
    out = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(out, "PNG")
    refused(with_first(out.getvalue()), "compression")


def test_texts_profiles_and_trailing_bytes_in_a_picture_are_refused() -> None:
    good = pack_png(CASES[0][1][0])
    for kind in (b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"tIME", b"iCCP", b"prVt"):
        refused(with_first(good[:33] + chunk(kind, b"Comment\0Jane Doe") + good[33:]), "other chunks")
    refused(with_first(good + b"Jane Doe"), "other chunks")
    refused(with_first(good[:-1]))
    out, info = io.BytesIO(), PngInfo()
    info.add_text("Comment", "Jane Doe", zip=True)
    Image.fromarray(CASES[0][1][0]).save(out, "PNG", pnginfo=info, compress_level=0)
    refused(with_first(out.getvalue()))


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGBA", "I;16"])
def test_other_kinds_of_pictures_are_refused(mode: str) -> None:
    out = io.BytesIO()
    Image.new(mode, (8, 8)).save(out, "PNG")
    refused(with_first(out.getvalue()))


def test_the_same_pixels_filtered_or_split_otherwise_are_refused() -> None:
    image = np.zeros((4, 4), np.uint8)
    good, rows = pack_png(image), bytes(20)
    filtered = b"".join(b"\1" + bytes(4) for _ in range(4))
    for body in (rows, filtered):
        packer = zlib.compressobj(0)
        stream = packer.compress(body) + packer.flush()
        other = good[:33] + chunk(b"IDAT", stream) + chunk(b"IEND", b"")
        assert (np.asarray(Image.open(io.BytesIO(other))) == image).all()
        if other != good:
            refused(with_first(other))
    assert filtered != rows
    split = good[41:-16]
    refused(with_first(good[:33] + chunk(b"IDAT", split[:9]) + chunk(b"IDAT", split[9:]) + chunk(b"IEND", b"")))


# ---------------------------------------------------------------- NIfTI


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_nibabel_reads_the_same_voxels_and_affine(dtype: type) -> None:
    voxels = made((4, 5, 6), dtype, 1)[0]
    image: Any = nibabel.Nifti1Image.from_bytes(pack_nifti(voxels, AFFINE))
    assert image.get_data_dtype() == dtype
    assert (np.asarray(image.dataobj) == voxels).all()
    assert np.array_equal(image.affine, np.vstack([np.reshape(AFFINE, (3, 4)), [0, 0, 0, 1]]))
    assert image.header.get_zooms() == (1.5, 2.0, 0.5)
    assert image.header.get_xyzt_units()[0] == "mm"
    assert not image.header.extensions


@pytest.mark.parametrize(("start", "text"), [(4, b"db"), (148, b"Jane Doe"), (228, b"aux"), (328, b"intent")])
def test_texts_in_a_nifti_header_are_refused(start: int, text: bytes) -> None:
    raw = bytearray(pack_nifti(CASES[2][1][0], AFFINE))
    raw[start : start + len(text)] = text
    refused(with_first(bytes(raw), "nii"), "says more")


def test_an_extension_or_a_hole_before_the_voxels_is_refused() -> None:
    raw = pack_nifti(CASES[2][1][0], AFFINE)
    extended = raw[:348] + b"\1\0\0\0" + struct.pack("<ii", 16, 6) + b"Jane Doe" + raw[352:]
    refused(with_first(extended, "nii"))
    refused(with_first(raw + b"x", "nii"))
    refused(with_first(raw[:-1], "nii"))


def test_a_volume_that_announces_too_much_is_refused_from_its_header() -> None:
    raw = bytearray(pack_nifti(CASES[2][1][0], AFFINE))
    raw[42:48] = struct.pack("<3h", 32_000, 32_000, 32_000)
    refused(with_first(bytes(raw), "nii"), "sides")
    raw[42:48] = struct.pack("<3h", 1_024, 1_024, 1_024)
    refused(with_first(bytes(raw), "nii"), "too many voxels")
    broken = bytearray(pack_nifti(CASES[3][1][0], AFFINE))
    broken[-4:] = np.array([np.nan], "<f4").tobytes()
    refused(with_first(bytes(broken), "nii"), "not finite")


# ---------------------------------------------------------------- DICOM

SC = "1.2.840.10008.5.1.4.1.1.7"


@pytest.mark.parametrize(
    ("shape", "dtype", "sop_class"),
    [
        ((9, 7), np.uint8, SC),
        ((3, 5, 3), np.uint8, SC + ".2"),
        ((4, 6), np.uint16, SC + ".3"),
        ((3, 4, 6), np.uint16, SC + ".3"),
    ],
)
def test_pydicom_reads_a_valid_synthetic_object(shape: tuple[int, ...], dtype: type, sop_class: str) -> None:
    pixels = made(shape, dtype, 1)[0]
    spacing = (2_000, 900, 850)[-len(shape) :]
    raw = pack_dicom(pixels, "MR", spacing, 5)
    read = pydicom.dcmread(io.BytesIO(raw))
    assert (read.pixel_array == pixels).all()
    assert read.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian
    assert read.SOPClassUID == read.file_meta.MediaStorageSOPClassUID == sop_class
    assert (read[0x0008001C].value, read.BurnedInAnnotation, read.ConversionType) == ("YES", "NO", "SYN")
    assert (str(read.PatientName), read.PatientID, read.Modality) == ("SYNTHETIC", "SYN-00005", "MR")
    assert [float(v) for v in read.PixelSpacing] == [0.9, 0.85]
    uids = [read.SOPInstanceUID, read.StudyInstanceUID, read.SeriesInstanceUID]
    assert len(set(uids)) == 3
    assert all(UID(uid).is_valid and uid.startswith("2.25.") for uid in uids)
    if len(shape) == 3:
        assert [float(v) for v in read[0x00182005].value] == [0.0, 2.0, 4.0]
        assert (read.NumberOfFrames, read.FrameIncrementPointer) == (3, 0x00182005)
    assert not any(e.tag.is_private or e.VR in ("SQ", "UN", "LT", "ST", "UT") for e in read)
    assert not any(e.value for e in read if e.VR in ("DA", "TM", "DT"))
    for keyword in ("PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "ReferringPhysicianName", "StudyID",
                    "AccessionNumber", "SeriesNumber", "InstanceNumber", "Manufacturer"):  # fmt: skip
        assert keyword in read  # type 2: present, and empty or a constant
    out = io.BytesIO()
    read.save_as(out, enforce_file_format=True)
    again = pydicom.dcmread(io.BytesIO(out.getvalue()))
    assert again == read


def test_identifiers_follow_from_the_pixels_and_the_place() -> None:
    one, two = made((4, 4), np.uint8, 2)
    uid = [
        str(pydicom.dcmread(io.BytesIO(pack_dicom(pixels, "MR", (500, 500), place))).SOPInstanceUID)
        for pixels, place in ((one, 0), (one, 0), (one, 1), (two, 0))
    ]
    assert uid[0] == uid[1]
    assert len(set(uid)) == 3
    refused(with_first(pack_dicom(one, "MR", (500, 500), 1), "dcm"), "its place")


@pytest.mark.parametrize(
    ("tag", "vr", "value"),
    [
        (0x00100010, "PN", "DOE^JANE"),
        (0x00080020, "DA", "20240101"),
        (0x00204000, "LT", "Jane Doe"),
        (0x00091001, "LO", "private"),
        (0x0008001C, "CS", "NO"),
        (0x00280301, "CS", "YES"),
        (0x00080018, "UI", "1.2.3.4"),
        (0x00081140, "SQ", []),
    ],
)
def test_a_dicom_object_with_anything_else_in_it_is_refused(tag: int, vr: str, value: Any) -> None:
    read = pydicom.dcmread(io.BytesIO(pack_dicom(CASES[4][1][0], "OP", (500, 250), 0)))
    read.add_new(tag, vr, value)
    out = io.BytesIO()
    read.save_as(out)
    refused(with_first(out.getvalue(), "dcm"))


def test_a_preamble_a_tail_or_a_padding_that_speaks_is_refused() -> None:
    raw = pack_dicom(CASES[4][1][0], "OP", (500, 250), 0)  # 63 pixels: one byte of padding
    for changed in (b"MZ" + raw[2:], raw + b"\0\0", raw[:-1] + b"x", raw[:-1], raw[:131]):
        refused(with_first(changed, "dcm"))


def test_a_dicom_header_that_announces_too_much_is_refused_before_the_pixels() -> None:
    raw = bytearray(pack_dicom(CASES[5][1][0], "MR", (1000, 900, 800), 0))
    rows = raw.index(struct.pack("<HH2sH", 0x0028, 0x0010, b"US", 2)) + 8
    raw[rows : rows + 2] = b"\xff\xff"
    refused(with_first(bytes(raw), "dcm"), "sides")


def test_pydicoms_own_test_objects_are_refused() -> None:
    for name in ("CT_small.dcm", "MR_small.dcm"):
        path = pydicom.data.get_testdata_file(name)
        with open(str(path), "rb") as opened:
            refused(with_first(opened.read(), "dcm"))
