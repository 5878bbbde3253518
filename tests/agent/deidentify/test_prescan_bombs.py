"""The bombs: each costs the worker next to nothing, is refused by name, and the next file is read."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import imagecodecs
import nibabel
import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file
from pydicom.encaps import encapsulate
from pydicom.uid import UID

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import DEFLATED_LE, read_meta
from agent.ingest.parser_process import ParserLimits, ParserProcess
from deploy.phantoms import scanner_files

HEX: Final = "0" * 32
RULES: Final = AdmissionRules(modalities=frozenset({"CT", "MR"}), image_types=frozenset({("DERIVED", "SECONDARY")}))
MEGABYTE: Final = 2**20


def _mr() -> pydicom.FileDataset:
    return pydicom.dcmread(str(get_testdata_file("MR_small.dcm", download=False)))


def _saved(dataset: pydicom.FileDataset) -> bytes:
    out = io.BytesIO()
    dataset.save_as(out)
    return out.getvalue()


def _good() -> bytes:
    return Path(str(get_testdata_file("MR_small.dcm", download=False))).read_bytes()


def _compressed(stream: bytes, syntax: str, rows: int, columns: int, frames: int = 1) -> bytes:
    dataset = _mr()
    dataset.Rows, dataset.Columns, dataset.NumberOfFrames = rows, columns, frames
    dataset.PixelData = encapsulate([stream])
    dataset["PixelData"].VR, dataset["PixelData"].is_undefined_length = "OB", True
    dataset.file_meta.TransferSyntaxUID = UID(syntax)
    return _saved(dataset)


_RLE = "1.2.840.10008.1.2.5"
_J2K = "1.2.840.10008.1.2.4.90"
_RLE_STREAM = struct.pack("<16I", 2, 64, 66, *[0] * 13) + b"\x81\0\x81\0"  # two segments of two bytes each


def _zeros(wbits: int, head: bytes) -> bytes:
    """About 1 MB that becomes ``head`` and 1 GiB of zeros, as DEFLATE."""
    machine = zlib.compressobj(9, zlib.DEFLATED, wbits)
    start = machine.compress(head) + machine.flush(zlib.Z_FULL_FLUSH)
    # after a full flush a block stands for itself, so one can be repeated
    block = machine.compress(b"\0" * MEGABYTE) + machine.flush(zlib.Z_FULL_FLUSH)
    return start + block * 1024


def _deflated() -> bytes:
    dataset = _mr()
    dataset.file_meta.TransferSyntaxUID = UID(DEFLATED_LE)
    whole = _saved(dataset)
    body = _zeros(-15, struct.pack("<HH2sHI", 0x0008, 0x0008, b"UN", 0, 2**30))
    return whole[: read_meta(whole).offset] + body


def _zipped_volume() -> bytes:
    return _zeros(31, nibabel.Nifti1Image(np.zeros((2, 2, 2), np.int16), np.eye(4)).to_bytes()[:352])


def _j2k_constant(side: int) -> bytes:
    return imagecodecs.jpeg2k_encode(np.full((side, side), 7, np.uint16), level=0)


def _claimed(stream: bytes, width: int, height: int) -> bytes:
    """A codestream whose SIZ claims another picture and one tile of that size."""
    place = stream.index(b"\xff\x51") + 6
    return stream[:place] + struct.pack(">6I", width, height, 0, 0, width, height) + stream[place + 24 :]


def _huge() -> bytes:
    return _claimed(_j2k_constant(64), 12000, 12000)


def _escaping() -> bytes:
    dataset = _mr()
    dataset.SOPInstanceUID = "../../ESCAPED"
    return _saved(dataset)


BOMBS: Final[dict[str, tuple[Callable[[], bytes], str]]] = {
    "20 KB of nested sequences": (lambda: scanner_files.sequence_bomb(1000), "too_deep"),
    "a length of 4 GiB": (scanner_files.length_beyond_end, "truncated"),
    "deflated 1 MB to 1 GiB": (_deflated, "too_large"),
    "gzipped volume 1 MB to 1 GiB": (_zipped_volume, "too_large"),
    "RLE of 65535 x 65535": (lambda: _compressed(_RLE_STREAM, _RLE, 65535, 65535), "too_large"),
    "RLE of 1000 frames": (lambda: _compressed(_RLE_STREAM, _RLE, 4000, 4000, 1000), "too_large"),
    "RLE within the limit": (lambda: _compressed(_RLE_STREAM, _RLE, 8000, 8000), "undecodable"),
    "J2K of 12000 x 12000": (
        lambda: _compressed(_huge(), _J2K, 12000, 12000),
        "too_large",
    ),
    "J2K larger than its header": (
        lambda: _compressed(_huge(), _J2K, 64, 64),
        "undecodable",
    ),
    "another object in the file meta": (_escaping, "instance_mismatch"),
}


@pytest.fixture(scope="module")
def reader() -> Iterator[ParserProcess]:
    """One worker, warm: what a bomb costs is counted from there."""
    with ParserProcess(RULES, Deidentifier(b"\7" * 32), ParserLimits()) as made:
        made.read(_good(), HEX)
        yield made


def _peak(pid: int) -> int:
    """Most memory that a process has had, in bytes, since it was last forgotten."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_for_less_than_a_second_and_200_mb_and_the_next_file_is_read(
    name: str, reader: ParserProcess
) -> None:
    make, code = BOMBS[name]
    data = make()
    reader.read(_good(), HEX)
    pid, started = reader.pid, reader.starts
    assert pid is not None
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the peak
    before, seconds = _peak(pid), _cpu(pid)
    with pytest.raises(FileRejectedError) as caught:
        reader.read(data, HEX, "somebody")
    cost = _peak(pid) - before
    print(f"{name}: {len(data)} bytes, {(_cpu(pid) - seconds) * 1000:.0f} ms CPU, {cost / MEGABYTE:.1f} MB")
    assert caught.value.code == code
    assert cost < 200 * MEGABYTE
    assert _cpu(pid) - seconds < 1.0  # processor time, not the clock
    assert reader.read(_good(), HEX).modality == "MR"
    assert (reader.starts, reader.pid) == (started, pid)


@pytest.mark.parametrize("head", [b"MZ\x90\0" + b"PE\0\0" * 20, b"II*\0\x08\0\0\0" + b"\1" * 60])
def test_a_programme_or_picture_in_the_preamble_is_gone_and_written_down(head: bytes, reader: ParserProcess) -> None:
    data = _good()
    record = reader.read(head.ljust(128, b"\0") + data[128:], HEX)
    assert record.payload[:128] == b"\0" * 128
    assert head[:8] not in record.payload
    assert any(step.path == "preamble" for step in record.trace)
    assert record.after == reader.read(data, HEX).after


def test_a_uid_that_is_a_path_becomes_a_keyed_name(reader: ParserProcess) -> None:
    dataset = _mr()
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = "../../ESCAPED"
    record = reader.read(_saved(dataset), HEX)
    assert len(record.name) == 32
    assert b"ESCAPED" not in record.payload


def test_a_data_set_that_is_not_encoded_as_its_file_says_is_refused(reader: ParserProcess) -> None:
    # pydicom would parse it as it is, so what was scanned and what is parsed would differ
    dataset = _mr()
    dataset.file_meta.TransferSyntaxUID = UID("1.2.840.10008.1.2")
    meta_only = io.BytesIO()
    explicit = _good()
    offset = explicit.index(b"\x08\0", 132)
    dataset.save_as(meta_only, implicit_vr=True, little_endian=True)
    implicit = meta_only.getvalue()
    head = implicit[: implicit.index(b"\x08\0", 300)]
    with pytest.raises(FileRejectedError, match="malformed"):
        reader.read(head + explicit[offset:], HEX)


def test_a_deflated_file_within_the_limit_is_read(reader: ParserProcess) -> None:
    dataset = _mr()
    dataset.file_meta.TransferSyntaxUID = UID(DEFLATED_LE)
    assert reader.read(_saved(dataset), HEX).after == reader.read(_good(), HEX).after


@pytest.mark.parametrize(("cut", "code"), [(-200, "truncated"), (0, "malformed")])
def test_a_damaged_deflated_file_is_refused(cut: int, code: str, reader: ParserProcess) -> None:
    dataset = _mr()
    dataset.file_meta.TransferSyntaxUID = UID(DEFLATED_LE)
    data = _saved(dataset)
    start = read_meta(data).offset
    broken = data[:cut] if cut else data[:start] + b"\xff" * 64 + data[start + 64 :]
    with pytest.raises(FileRejectedError) as caught:
        reader.read(broken, HEX)
    assert caught.value.code == code


def test_a_zipped_volume_within_the_limit_is_read(reader: ParserProcess) -> None:
    volume = nibabel.Nifti1Image(np.arange(27, dtype=np.int16).reshape(3, 3, 3), np.eye(4))
    assert reader.read(gzip.compress(volume.to_bytes()), HEX, "somebody").kind == "volume"
