"""The worker that reads hospital files: it hangs, dies, lies and runs out of memory, and one file is lost."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file

from agent.deidentify.reasons import Refused
from agent.deidentify.rules import Rules
from agent.deidentify.tags import Deidentifier
from agent.edges.reader import Limits, Reader, ReaderFailed, _record
from agent.phantoms import scanners

WHO = Deidentifier(b"\7" * 32)
RULES = Rules(
    modalities=frozenset({"CT", "MR"}),
    image_types=frozenset({("ORIGINAL", "PRIMARY"), ("DERIVED", "SECONDARY")}),
)
HEX = "0" * 32


def _bytes(name: str) -> bytes:
    path = get_testdata_file(name, download=False)
    assert isinstance(path, str)
    return Path(path).read_bytes()


@pytest.fixture
def reader() -> Iterator[Reader]:
    """A reader with short limits."""
    with Reader(RULES, WHO, Limits(wall_seconds=5.0)) as made:
        yield made


def test_a_worker_that_hangs_is_killed_and_the_next_file_is_read() -> None:
    hung = Reader(RULES, WHO, Limits(wall_seconds=0.5))
    with hung:
        assert hung.read(_bytes("MR_small.dcm"), HEX).modality == "MR"
        assert hung.pid is not None
        os.kill(hung.pid, signal.SIGSTOP)  # what an endless loop looks like from outside
        with pytest.raises(Refused, match="parser_stopped"):
            hung.read(_bytes("CT_small.dcm"), HEX)
        assert hung.pid is None
        started = hung.starts
        assert hung.read(_bytes("CT_small.dcm"), HEX).modality == "CT"
        assert hung.starts == started + 1


def test_a_worker_that_died_between_files_costs_no_file(reader: Reader) -> None:
    reader.read(_bytes("MR_small.dcm"), HEX)
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert reader.read(_bytes("CT_small.dcm"), HEX).modality == "CT"
    assert reader.starts == 2


def test_one_worker_reads_many_files(reader: Reader) -> None:
    for _ in range(5):
        reader.read(_bytes("MR_small.dcm"), HEX)
        with pytest.raises(Refused, match="too_deep"):
            reader.read(scanners.sequence_bomb(1000), HEX)
    assert reader.starts == 1


def test_a_file_that_takes_too_long_is_stopped_on_time() -> None:
    side = 6000
    dataset = pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm")))
    dataset.Rows = dataset.Columns = side
    dataset.PixelData = np.random.default_rng(2).integers(0, 4000, (side, side), dtype=np.int16).tobytes()
    stream = io.BytesIO()
    dataset.save_as(stream)
    with Reader(RULES, WHO, Limits(wall_seconds=0.3)) as reader:
        with pytest.raises(Refused, match="not_dicom"):
            reader.read(b"warm", HEX)
        started = time.monotonic()
        with pytest.raises(Refused, match="parser_stopped"):
            reader.read(stream.getvalue(), HEX)
        assert time.monotonic() - started < 5
        assert reader.pid is None


def test_the_worker_has_its_limits_and_knows_no_secret_by_argument_or_environment(reader: Reader) -> None:
    reader.read(_bytes("MR_small.dcm"), HEX)
    proc = Path(f"/proc/{reader.pid}")
    limits = {line[:25].strip(): line[25:].split()[0] for line in (proc / "limits").read_text().splitlines()}
    assert limits["Max address space"] == str(Limits().memory_bytes)
    assert limits["Max file size"] == limits["Max core file size"] == "0"
    assert int(limits["Max cpu time"]) < 120
    assert WHO.key.hex().encode() not in (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
    assert WHO.key not in (proc / "environ").read_bytes()


def test_a_reader_that_cannot_start_is_a_fault_and_no_refusal() -> None:
    with Reader(RULES, WHO, Limits(memory_bytes=2**20)) as broken, pytest.raises(ReaderFailed):
        broken.read(_bytes("MR_small.dcm"), HEX)


GOOD_REPLY: dict[str, object] = {
    **{"name": HEX, "pseudonym": HEX, "study": HEX, "modality": "MR", "kind": "image", "face": True},
    **{"height": 1, "width": 2},
}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"name": "SMITH^JOHN"}, [b"\0" * 8, b"x"]),
        ({"width": 3}, [b"\0" * 8, b"x"]),
        ({"width": -2, "height": -1}, [b"\0" * 8, b"x"]),
        ({"face": "no"}, [b"\0" * 8, b"x"]),
        ({}, [np.array([np.nan, 0], dtype="<f4").tobytes(), b"x"]),
        ({}, [b"\0" * 8]),
    ],
)
def test_an_answer_of_a_worker_that_was_taken_over_is_not_believed(
    changes: dict[str, object], parts: list[bytes]
) -> None:
    assert _record(dict(GOOD_REPLY), [b"\0" * 8, b"x"], HEX).face
    with pytest.raises((ValueError, KeyError)):
        _record({**GOOD_REPLY, **changes}, parts, HEX)


def test_a_reason_that_a_worker_made_up_becomes_parser_stopped() -> None:
    with pytest.raises(Refused, match="parser_stopped"):
        _record({"code": "patient John Smith"}, [], HEX)
