"""The worker that reads hospital files: it hangs, dies, lies and runs out of memory, and one file is lost."""

from __future__ import annotations

import io
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, cast

import nibabel
import numpy as np
import pydicom
import pytest
from pydicom import DataElement, Dataset
from pydicom import config as pydicom_config
from pydicom.data import get_testdata_file
from pydicom.sr._concepts_dict import concepts
from pydicom.sr._snomed_dict import mapping as snomed
from pydicom.uid import CTImageStorage

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.face_risk import CODES, faces_in, may_show_a_face
from agent.deidentify.record import keyed_name
from agent.errors import ParserError
from agent.ingest.parser_main import _answer
from agent.ingest.parser_process import MOST_NAMES, ParserLimits, ParserProcess, _FileNames, _record
from deploy.phantoms import scanner_files
from tests.fuzz.roads import as_in_the_worker
from tests.support.instances import item

WHO = Deidentifier(b"\7" * 32)
RULES = AdmissionRules(
    modalities=frozenset({"CT", "MR"}),
    image_types=frozenset({("ORIGINAL", "PRIMARY"), ("DERIVED", "SECONDARY")}),
)
HEX = "0" * 32


def _bytes(name: str) -> bytes:
    path = get_testdata_file(name, download=False)
    assert isinstance(path, str)
    return Path(path).read_bytes()


@pytest.fixture
def reader() -> Iterator[ParserProcess]:
    """A reader."""
    with ParserProcess(RULES, WHO, ParserLimits()) as made:
        yield made


def _impatient(reader: ParserProcess, seconds: float) -> None:
    """From now on it waits so long for a file. Before that it waits as long as a busy machine needs."""
    reader._limits = replace(reader._limits, wall_seconds=seconds)


def test_a_worker_that_hangs_is_killed_and_the_next_file_is_read() -> None:
    hung = ParserProcess(RULES, WHO, ParserLimits())
    with hung:
        assert hung.read(_bytes("MR_small.dcm"), HEX).modality == "MR"
        assert hung.pid is not None
        os.kill(hung.pid, signal.SIGSTOP)  # what an endless loop looks like from outside
        _impatient(hung, 0.5)
        with pytest.raises(FileRejectedError, match="parser_stopped"):
            hung.read(_bytes("CT_small.dcm"), HEX)
        assert hung.pid is None
        _impatient(hung, ParserLimits().wall_seconds)
        started = hung.starts
        assert hung.read(_bytes("CT_small.dcm"), HEX).modality == "CT"
        assert hung.starts == started + 1


def test_a_worker_that_died_between_files_costs_no_file(reader: ParserProcess) -> None:
    reader.read(_bytes("MR_small.dcm"), HEX)
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WNOWAIT)  # dead, and still the reader's to bury
    assert reader.read(_bytes("CT_small.dcm"), HEX).modality == "CT"
    assert reader.starts == 2


def test_one_worker_reads_many_files(reader: ParserProcess) -> None:
    for _ in range(5):
        reader.read(_bytes("MR_small.dcm"), HEX)
        with pytest.raises(FileRejectedError, match="too_deep"):
            reader.read(scanner_files.sequence_bomb(1000), HEX)
    assert reader.starts == 1


def test_a_file_that_takes_too_long_is_stopped_on_time() -> None:
    side = 6000
    dataset = pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm")))
    dataset.Rows = dataset.Columns = side
    dataset.PixelData = np.random.default_rng(2).integers(0, 4000, (side, side), dtype=np.int16).tobytes()
    stream = io.BytesIO()
    dataset.save_as(stream)
    with ParserProcess(RULES, WHO, ParserLimits()) as reader:
        with pytest.raises(FileRejectedError, match="not_dicom"):
            reader.read(b"warm", HEX)
        _impatient(reader, 0.05)  # to send and decode 72 MB takes longer on any machine
        started = time.monotonic()
        with pytest.raises(FileRejectedError, match="parser_stopped"):
            reader.read(stream.getvalue(), HEX)
        assert time.monotonic() - started < 200  # nothing waits for what the parser would have said
        assert reader.pid is None


def test_the_worker_has_its_limits_and_knows_no_secret_by_argument_or_environment(reader: ParserProcess) -> None:
    reader.read(_bytes("MR_small.dcm"), HEX)
    proc = Path(f"/proc/{reader.pid}")
    limits = {line[:25].strip(): line[25:].split()[0] for line in (proc / "limits").read_text().splitlines()}
    assert limits["Max address space"] == str(ParserLimits().memory_bytes)
    assert limits["Max file size"] == limits["Max core file size"] == "0"
    assert int(limits["Max cpu time"]) < 120
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapInh"], 16) == 0
    assert limits["Max processes"] == "0"
    assert WHO.key.hex().encode() not in (proc / "cmdline").read_bytes()
    assert (proc / "environ").stat().st_uid == 0  # not dumpable: an ordinary user cannot even look
    if os.geteuid() == 0:
        environ = (proc / "environ").read_bytes()
        assert WHO.key not in environ
        assert WHO.key.hex().encode() not in environ


@pytest.mark.parametrize(("asked", "loaded"), [({}, True), ({"look_for_text": False, "nifti_modality": ""}, False)])
def test_a_reader_loads_what_its_rules_ask_for_before_it_is_confined(asked: dict[str, Any], loaded: bool) -> None:
    with ParserProcess(replace(RULES, **asked), WHO) as reader:
        with pytest.raises(FileRejectedError, match="not_dicom"):
            reader.read(b"warm", HEX)
        assert ("/scipy/" in Path(f"/proc/{reader.pid}/maps").read_text()) == loaded
        if not loaded:  # and what was not loaded cannot come in
            with pytest.raises(FileRejectedError, match="modality_not_allowed"):
                reader.read(b"\x1f\x8bzipped", HEX, "P-1")


def test_a_reader_that_cannot_start_is_a_fault_and_no_refusal() -> None:
    with ParserProcess(RULES, WHO, ParserLimits(memory_bytes=2**20)) as broken, pytest.raises(ParserError):
        broken.read(_bytes("MR_small.dcm"), HEX)


_HOOK = """#!{python}
import os, resource, sys, time
sys.path.insert(0, {home!r})
from agent.ingest import parser_limits
from protos.operations import pipe_messages as pipe
source, sink = sys.stdin.buffer, sys.stdout.buffer
setup, _ = pipe.receive(source, 4096)
limits = setup["limits"]
if {confined}:
    parser_limits.apply_rlimits(limits["memory_bytes"], limits["cpu_seconds"])
pipe.send(sink, {{"ready": True}})
pipe.receive(source, 1 << 20)
word = open({fifo!r}, "wb", buffering=0)
try:
    child = os.fork()
except OSError:
    word.write(b"refused\\n")
else:
    if child == 0:
        word.write(b"forked\\n")
        time.sleep(600)
try:
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
except (OSError, ValueError):
    pipe.send(sink, {{"code": "undecodable"}})
else:
    pipe.send(sink, {{"code": "not_dicom"}})
word.close()
time.sleep(600)
"""


def _taken_over(folder: Path, monkeypatch: pytest.MonkeyPatch, *, confined: bool) -> Path:
    """Put a worker in the place of the real one that forks and lifts its limits; return what it writes to."""
    fifo, hook = folder / "fifo", folder / "hook"
    os.mkfifo(fifo)
    home = str(Path(__file__).resolve().parents[3])
    hook.write_text(_HOOK.format(python=sys.executable, home=home, fifo=str(fifo), confined=confined))
    hook.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hook))
    return fifo


def _until_nobody_writes(stream: IO[bytes], seconds: float) -> bool:
    return bool(wait([stream], seconds)) and stream.read() == b""


@pytest.mark.parametrize("confined", [True, False])
@pytest.mark.parametrize("how", ["closed", "at the deadline"])
def test_a_child_of_the_worker_does_not_outlive_it(
    confined: bool, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = _taken_over(tmp_path, monkeypatch, confined=confined)
    with ParserProcess(RULES, WHO, ParserLimits()) as reader:
        descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(FileRejectedError), os.fdopen(os.dup(descriptor), "rb", buffering=0):
            reader.read(b"first", HEX)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            said = stream.read(16)
            assert said in ((b"forked\n",) if not confined else (b"forked\n", b"refused\n"))
            assert said == b"refused\n" or not _until_nobody_writes(stream, 0.3)  # it lives on meanwhile
            if how == "closed":
                reader.close()
            else:
                _impatient(reader, 1.0)
                with pytest.raises(FileRejectedError, match="parser_stopped"):
                    reader.read(b"second", HEX)  # the deadline passes
            assert _until_nobody_writes(stream, 60.0)


def test_a_worker_that_was_taken_over_cannot_lift_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = _taken_over(tmp_path, monkeypatch, confined=True)
    with ParserProcess(RULES, WHO, ParserLimits()) as reader:
        descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb"), pytest.raises(FileRejectedError, match="undecodable"):
            reader.read(b"any", HEX)


def test_a_worker_whose_processor_time_is_used_up_is_replaced_and_no_file_is_lost(reader: ParserProcess) -> None:
    data = _bytes("CT_small.dcm")
    assert reader.read(data, HEX).modality == "CT"
    assert reader.pid is not None
    _, hard = resource.prlimit(reader.pid, resource.RLIMIT_CPU)
    assert 10 * ParserLimits().cpu_seconds <= hard < 11 * ParserLimits().cpu_seconds
    ticks = Path(f"/proc/{reader.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    near = (
        sum(map(int, ticks)) // os.sysconf("SC_CLK_TCK") + ParserLimits().cpu_seconds
    )  # not enough for two more files
    resource.prlimit(reader.pid, resource.RLIMIT_CPU, (near, near))
    assert reader.read(data, HEX).modality == "CT"
    assert reader.pid is None
    assert reader.read(data, HEX).modality == "CT"
    assert reader.starts == 2


GOOD_REPLY: dict[str, object] = {
    **{"modality": "MR", "kind": "image", "face": True, "text": False},
    **{"height": 1, "width": 2, "channels": 1, "body_part": "HEAD"},
}
NAMES = dict.fromkeys(("name", "pseudonym", "study", "series"), HEX)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"modality": "SMITH^JOHN"}, [b"\0" * 8, b"x", b"[]"]),
        ({"kind": "SMITH^JOHN"}, [b"\0" * 8, b"x", b"[]"]),
        ({"width": 3}, [b"\0" * 8, b"x", b"[]"]),
        ({"channels": 3}, [b"\0" * 8, b"x", b"[]"]),
        ({"channels": 2, "width": 1}, [b"\0" * 8, b"x", b"[]"]),
        ({"channels": True}, [b"\0" * 8, b"x", b"[]"]),
        ({"width": -2, "height": -1}, [b"\0" * 8, b"x", b"[]"]),
        ({"face": "no"}, [b"\0" * 8, b"x", b"[]"]),
        ({"text": 0}, [b"\0" * 8, b"x", b"[]"]),
        ({}, [np.array([np.nan, 0], dtype="<f4").tobytes(), b"x", b"[]"]),
        ({}, [b"\0" * 8]),
    ],
)
def test_an_answer_of_a_worker_that_was_taken_over_is_not_believed(
    changes: dict[str, object], parts: list[bytes]
) -> None:
    assert _record(dict(GOOD_REPLY), [b"\0" * 8, b"x", b"[]"], HEX, NAMES).face
    with pytest.raises((ValueError, KeyError)):
        _record({**GOOD_REPLY, **changes}, parts, HEX, NAMES)


TWO_KEYS = Deidentifier(b"\7" * 32, "HOSPITAL", people=b"\1" * 32)


@pytest.mark.parametrize("name", ["MR_small.dcm", "CT_small.dcm"])
def test_a_worker_without_keys_makes_what_one_with_them_would(name: str) -> None:
    data = _bytes(name)
    with ParserProcess(RULES, TWO_KEYS, ParserLimits()) as reader:
        record = reader.read(data, HEX)
    with as_in_the_worker():
        _, parts = _answer([data], {"patient_id": None, "issuer": ""}, RULES, TWO_KEYS)
    assert record.payload == parts[1]
    original = pydicom.dcmread(io.BytesIO(data))
    assert record.uids == (
        TWO_KEYS.mac("study", original.StudyInstanceUID.encode()),
        TWO_KEYS.mac("series", original.SeriesInstanceUID.encode()),
        TWO_KEYS.mac("instance", original.SOPInstanceUID.encode()),
    )
    assert record.pseudonym == TWO_KEYS.person("", original.PatientID)
    assert pydicom.dcmread(io.BytesIO(record.payload)).PatientID == TWO_KEYS.pseudonym("", original.PatientID)


def test_a_file_that_names_nobody_is_named_by_the_agent_from_its_clean_content(tmp_path: Path) -> None:
    rules = replace(RULES, nifti_modality="MR")
    nibabel.save(nibabel.Nifti1Image(np.zeros((2, 3, 4), np.int16), np.eye(4)), tmp_path / "head.nii")
    with ParserProcess(rules, TWO_KEYS, ParserLimits()) as reader:
        record = reader.read((tmp_path / "head.nii").read_bytes(), HEX, "P-4711", "OTHER")
        with pytest.raises(FileRejectedError, match="missing_patient"):
            reader.read((tmp_path / "head.nii").read_bytes(), HEX, "P\x00-4711", "OTHER")
    assert record.uids[2] == TWO_KEYS.mac("nifti", record.payload)
    assert record.pseudonym == TWO_KEYS.person("OTHER", "P-4711")


ASKED: list[tuple[str, str, list[bytes]]] = [
    ("site", "patient", [b"H", b"p-1"]),
    ("project", "patient", [b"H", b"p-1"]),
    ("project", "instance", [b"1.2"]),
    ("project", "study", [b"1.3"]),
    ("project", "series", [b"1.4"]),
    ("project", "masked", [b"1.5"]),
    ("project", "uid", [b"1.2"]),
]


@pytest.mark.parametrize(
    ("key", "purpose", "parts"),
    [
        ("site", "patient", [b"H", b"p-2"]),  # a guess: who is who
        ("project", "patient", [b"H", b"p-2"]),
        ("project", "patient", [b"p-1"]),
        ("project", "instance", [b"1.9"]),
        ("project", "study", [b"1.9"]),
        ("project", "series", [b"1.9"]),
        ("project", "masked", [b"1.9"]),
        ("site", "masked", [b"1.5"]),
        ("project", "dates", [b"0" * 32]),  # of another patient
        ("project", "dates", [b"\xff"]),
        ("site", "uid", [b"1.2"]),
        ("site", "instance", [b"1.2"]),
        ("project", "nifti", [b"x"]),
        ("project", "file", [b"x"]),
        ("project", "ocr", [b"x"]),
        ("project", "uid", []),
        ("project", "uid", [b"1", b"2"]),
        ("project", "uid", [b"1" * 5000]),
        ("vault", "uid", [b"1"]),
        ("project", ["uid"], [b"1"]),
        (None, "uid", [b"1"]),
    ],
)
def test_a_worker_that_was_taken_over_is_told_no_name_that_a_file_does_not_need(
    key: str, purpose: str, parts: list[bytes]
) -> None:
    names = _FileNames(TWO_KEYS, 1000)
    for asked in ASKED:
        assert len(names.answer(*asked)) == 32
    assert names.answer("project", "dates", [names.told["project", "patient"].encode()])
    with pytest.raises(ValueError, match=r"."):
        names.answer(key, purpose, parts)


@pytest.mark.parametrize(("purpose", "most"), [("id", 32), ("uid", 10_000)])
def test_a_worker_that_was_taken_over_is_told_no_more_ids_than_a_file_has(purpose: str, most: int) -> None:
    names = _FileNames(TWO_KEYS, 1 << 29)
    told = {names.answer("project", purpose, [str(n).encode()]) for n in range(most)}
    assert len(told) == most == MOST_NAMES[purpose]
    with pytest.raises(ValueError, match="too many"):
        names.answer("project", purpose, [b"one more"])


def test_a_file_may_refer_to_thousands_of_others_and_not_to_more(reader: ParserProcess) -> None:
    """As one does that was made from one file a slice, for each of its frames."""
    source = pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm")))

    def referring(count: int) -> bytes:
        uids = (f"1.3.99.{10**6 + n}" for n in range(count))
        source.SourceImageSequence = [item((0x00081155, "UI", uid)) for uid in uids]
        out = io.BytesIO()
        source.save_as(out)
        return out.getvalue()

    record = reader.read(referring(2_000), HEX)
    kept = pydicom.dcmread(io.BytesIO(record.payload)).SourceImageSequence
    assert [one.ReferencedSOPInstanceUID for one in kept] == [WHO.uid(f"1.3.99.{10**6 + n}") for n in range(2_000)]
    reader.close()  # a worker remembers the ids of files before
    with pytest.raises(FileRejectedError, match="parser_stopped"):
        reader.read(referring(MOST_NAMES["uid"]), HEX)  # and three of its own
    assert reader.read(_bytes("CT_small.dcm"), HEX).modality == "CT"


def test_whose_a_record_is_is_not_the_workers_to_say() -> None:
    names = _FileNames(TWO_KEYS, 1000)
    with pytest.raises(KeyError):
        names.of_dicom()  # nothing was asked
    for asked in ASKED:
        names.answer(*asked)
    said = {**GOOD_REPLY, "pseudonym": "f" * 32, "name": "f" * 32, "study": "f" * 32}
    record = _record(said, [b"\0" * 8, b"x", b"[]"], HEX, names.of_dicom())
    assert record.pseudonym == TWO_KEYS.named("site", "patient", (b"H", b"p-1"))
    assert record.uids[2] == TWO_KEYS.mac("instance", b"1.2")
    assert record.name == keyed_name(record.pseudonym, record.uids[2])


@pytest.mark.parametrize(
    "answer", [b'{"parts": [' + b"[" * 100_000, b'{"parts": [0]}', b"7", b'{"parts": [], "code": []}']
)
def test_an_answer_without_the_parts_of_one_is_a_stopped_parser(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = tmp_path / "hook"
    home = str(Path(__file__).resolve().parents[3])
    hook.write_text(
        f"#!{sys.executable}\nimport sys, time\nsys.path.insert(0, {home!r})\n"
        "from protos.operations import pipe_messages as pipe\n"
        "source, sink = sys.stdin.buffer, sys.stdout.buffer\npipe.receive(source, 0)\n"
        'pipe.send(sink, {"ready": True})\npipe.receive(source, 1 << 20)\n'
        f"sink.write(({len(answer)}).to_bytes(4, 'big') + {answer!r})\nsink.flush()\ntime.sleep(600)\n"
    )
    hook.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hook))
    for data in (b"any", bytes.fromhex("5c010000") + bytes(344) + b"n+1\0"):  # and one that may be NIfTI
        with (
            ParserProcess(RULES, TWO_KEYS, ParserLimits()) as reader,
            pytest.raises(FileRejectedError, match="parser_stopped"),
        ):
            reader.read(data, HEX, "P-4711")


def test_a_key_and_somebody_to_ask_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="names are asked for"):
        Deidentifier(b"\7" * 32, names=lambda *_: HEX)
    assert Deidentifier(b"", names=lambda *_: HEX).mac("uid", b"1") == HEX
    with pytest.raises(ValueError, match="at least"):
        Deidentifier(b"")


def test_a_reason_that_a_worker_made_up_becomes_parser_stopped() -> None:
    with pytest.raises(FileRejectedError, match="parser_stopped"):
        _record({"code": "patient John Smith"}, [], HEX, NAMES)


def _changed(**changes: object) -> bytes:
    dataset = pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm")))
    for keyword, value in changes.items():
        setattr(dataset, keyword, value)
    stream = io.BytesIO()
    dataset.save_as(stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("stated", "kept"),
    [("HEAD", "HEAD"), (" head ", "HEAD"), ("WHOLE BODY", "WHOLEBODY"), ("MRS SMITHS HEAD", ""), (None, "")],
)
def test_a_body_part_is_a_defined_term_or_nothing(stated: str | None, kept: str, reader: ParserProcess) -> None:
    assert reader.read(_changed(BodyPartExamined=stated), HEX).body_part == kept


def test_a_series_has_one_keyed_name_and_an_instance_without_one_is_its_own(reader: ParserProcess) -> None:
    first, second = (reader.read(_changed(SeriesInstanceUID="1.2.3", SeriesNumber=i), HEX) for i in (1, 2))
    other = reader.read(_changed(SeriesInstanceUID="1.2.4"), HEX)
    alone = reader.read(_changed(SeriesInstanceUID=None), HEX)
    assert first.series == second.series
    assert len({first.series, other.series, alone.series, "0" * 32}) == 4


def test_a_patient_id_of_unknown_vr_is_still_the_same_patient(reader: ParserProcess) -> None:
    # otherwise one patient would be counted twice towards k
    data = _bytes("MR_small.dcm")
    place = data.index(b"\x10\0\x20\0LO")
    length = data[place + 6 : place + 8]
    unknown = data[:place] + b"\x10\0\x20\0UN\0\0" + length + b"\0\0" + data[place + 8 :]
    assert pydicom.dcmread(io.BytesIO(unknown))["PatientID"].VR == "LO"  # pydicom's default hides it
    assert reader.read(unknown, HEX).pseudonym == reader.read(data, HEX).pseudonym


def _anatomy(value: str, meaning: str, scheme: str = "SCT") -> Dataset:
    return item((0x00080100, "SH", value), (0x00080102, "SH", scheme), (0x00080104, "LO", meaning))


CHEST, HEAD = _anatomy("816094009", "Chest"), _anatomy("69536005", "Head")
HAND = _anatomy("85562004", "Hand")
ELSEWHERE: dict[str, object] = {"BodyPartExamined": "CHEST", "AnatomicRegionSequence": [CHEST]}


@pytest.mark.parametrize(
    "changes",
    [
        {"AnatomicRegionSequence": [HEAD]},
        {"AnatomicRegionSequence": [CHEST, HEAD]},
        {"AnatomicRegionSequence": [_anatomy("816094009", "Chest", "99LOCAL")]},
        {"AnatomicRegionSequence": [_anatomy("816094009", "Kopf und Thorax")]},
        {"AnatomicRegionSequence": [HAND]},  # it and CHEST are not one picture
        {"PrimaryAnatomicStructureSequence": [HEAD]},
        {"BodyPartExamined": "WHOLEBODY"},
        {"BodyPartExamined": ["CHEST", "HEAD"]},
        {"BodyPartExamined": None, "AnatomicRegionSequence": None},
        {"SharedFunctionalGroupsSequence": [{"FrameAnatomySequence": [{"AnatomicRegionSequence": [HEAD]}]}]},
        {"PerFrameFunctionalGroupsSequence": [{}, {"FrameAnatomySequence": [{"AnatomicRegionSequence": [HEAD]}]}]},
        {"PerFrameFunctionalGroupsSequence": [{"BodyPartExamined": "SKULL"}]},
        {"StudyDescription": "CT Brain w/o contrast"},
        {"SeriesDescription": "NNH cor"},
        {"ProtocolName": "Sch\xe4del nativ"},
        {"RequestedProcedureDescription": "PET_WB"},
        {"RequestAttributesSequence": [{"RequestedProcedureDescription": "orbitae"}]},
        {"ProcedureCodeSequence": [_anatomy("24725-4", "CT Head", "LN")]},
    ],
)
def test_one_word_of_a_head_anywhere_outweighs_a_chest_everywhere_else(changes: dict[str, object]) -> None:
    assert not may_show_a_face(_made(ELSEWHERE))
    assert may_show_a_face(_made({**ELSEWHERE, **changes}))


def test_a_region_that_cannot_be_read_may_be_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pydicom_config, "replace_un_with_known_vr", False)  # as in the worker
    for tag in (0x00082218, 0x00082228, 0x52009229, 0x52009230):
        dataset = _made({**ELSEWHERE, "AnatomicRegionSequence": None})
        dataset[tag] = DataElement(tag, "UN", b"\xfe\xff\0\xe0")
        assert may_show_a_face(dataset), hex(tag)
    dataset = _made(ELSEWHERE)
    dataset[0x00180015] = DataElement(0x00180015, "UN", b"T\xeate ")
    assert may_show_a_face(dataset)


def _made(changes: dict[str, object]) -> Dataset:
    """A CT image that says this of itself; a dict is an item."""
    dataset = Dataset()
    for keyword, value in {"Modality": "CT", "SOPClassUID": CTImageStorage, **changes}.items():
        listed = isinstance(value, list) and keyword.endswith("Sequence")
        setattr(dataset, keyword, [_item(v) for v in value] if listed and isinstance(value, list) else value)
    return dataset


def _item(value: Dataset | dict[str, object]) -> Dataset:
    if isinstance(value, Dataset):
        return value
    made = _made(value)
    del made.Modality, made.SOPClassUID
    return made


@pytest.mark.parametrize("modality", ["CT", "MR", "PT", "NM"])
def test_nobody_vouches_for_a_volume_because_it_says_so_itself(modality: str) -> None:
    rules = replace(RULES, modalities=frozenset({modality}))
    with ParserProcess(rules, WHO, ParserLimits()) as reader:
        record = reader.read(_changed(Modality=modality, BodyPartExamined="CHEST"), HEX)
    assert record.face is False
    assert "RecognizableVisualFeatures" not in pydicom.dcmread(io.BytesIO(record.payload))
    for sop_class in (CTImageStorage, "1.2.840.10008.5.1.4.1.1.1.1"):
        flat = _made({"Modality": "DX", "SOPClassUID": sop_class})
        assert faces_in(flat, face=False) == ("unknown" if sop_class == CTImageStorage else "none")
        assert faces_in(flat, face=True) == "unknown"


def test_the_codes_of_parts_below_the_neck_mean_what_the_standard_says() -> None:
    # pydicom's dictionary is made of PS3.16; by another name there, or no longer in it
    names = {"TSPINE": "THORACIC SPINE", "LSPINE": "LUMBAR SPINE", "ARM": "UPPER ARM", "LEG": "LOWER LEG"}
    retired = {"51185008", "113345001", "12921003", "T-D3000", "T-D4000", "T-D6000"}  # of CHEST, ABDOMEN, PELVIS
    assert {CODES[code] for code in retired} == {"CHEST", "ABDOMEN", "PELVIS"}
    modern, dictionary = snomed["SRT"], cast("Any", concepts["SCT"])
    for code, part in CODES.items():
        if code in retired:
            continue
        concept = modern[code] if code.startswith("T-") else code
        listed = {
            name: meaning for name, known in dictionary.items() for c, (meaning, _) in known.items() if c == concept
        }
        words = {meaning.upper().removesuffix(" JOINT") for meaning in listed.values()}
        assert names.get(part, part) in words, (code, words)
