"""QIDO and WADO against a real Orthanc, and against servers that misbehave."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.server
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pydicom
import pytest
from pydicom.data import get_testdata_file

from agent.pacs.archive import ArchiveQuery
from agent.pacs.dicomweb.config import DicomWebArchive, DicomWebError
from agent.pacs.dicomweb.wado import InstanceSink, Time, WadoRetriever
from agent.storage.spool import Spool
from tests.support.pacs import Pacs, make_instances, orthanc
from tests.support.pki import Authority

KEY = bytes(range(32))


def secret(folder: Path, text: str) -> Path:
    path = folder / "password"
    path.write_text(text)
    path.chmod(0o600)
    return path


def web_of(pacs: Pacs, folder: Path, **changed: Any) -> DicomWebArchive:
    password = secret(folder, pacs.password)
    usual = {"user": pacs.user, "password_file": password, "least_free_bytes": 0, "retries": 2}
    return DicomWebArchive("ward", pacs.dicomweb_url, **{**usual, **changed})


def sink_of(folder: Path, already: Callable[[str], bool] = lambda _uid: False) -> InstanceSink:
    return InstanceSink(Spool(folder / "inbox", KEY), already)


def bodies(room: Spool) -> list[bytes]:
    arrivals = [room.open(name) for name in room.names()]
    assert all((a.road, a.source) == ("wado", "ward") for a in arrivals)
    return sorted(a.body for a in arrivals)


def of(body: bytes) -> pydicom.Dataset:
    return pydicom.dcmread(BytesIO(body), stop_before_pixels=True)


@pytest.fixture(scope="module")
def pacs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pacs]:
    """60 instances of 6 patients in 12 series, and two that are compressed."""
    folder = tmp_path_factory.mktemp("pacs")
    compressed = [Path(str(get_testdata_file(name))) for name in ("JPEG2000.dcm", "MR_small_RLE.dcm")]
    with orthanc(folder / "orthanc") as running:
        running.store(make_instances(folder / "files", 60, patients=6, modalities=("CT", "MR"), seed="w"))
        running.store(compressed)
        yield running


@pytest.fixture(scope="module")
def theirs(pacs: Pacs) -> dict[str, bytes]:
    """What Orthanc itself says its files are."""
    return pacs.files()


def test_everything_arrives_as_the_archive_stores_it(pacs: Pacs, theirs: dict[str, bytes], tmp_path: Path) -> None:
    sink, seen = sink_of(tmp_path), []
    done = WadoRetriever(
        web_of(pacs, tmp_path), sink, progress=lambda brought, known: seen.append((brought, known))
    ).run(ArchiveQuery())
    assert len(theirs) == 62
    assert bodies(sink.room) == sorted(theirs.values())
    assert (done.instances, done.brought, done.known, done.left, done.complete) == (62, 62, 0, {}, True)
    assert seen[-1] == (62, 0)
    again = WadoRetriever(web_of(pacs, tmp_path), sink).run(ArchiveQuery())
    assert (again.brought, again.known, again.complete) == (0, 62, True)


@pytest.mark.parametrize(
    "query",
    [
        ArchiveQuery(modalities=("CT",)),
        ArchiveQuery(
            modalities=(
                "MR",
                "NM",
            )
        ),
        ArchiveQuery(patients=("PAT-w1", "PAT-w4", "nobody")),
        ArchiveQuery(accessions=("ACC-w2",)),
        ArchiveQuery(since=dt.date(2024, 1, 10), until=dt.date(2024, 1, 20)),
        ArchiveQuery(until=dt.date(2023, 12, 31)),
        ArchiveQuery(since=dt.date(2024, 1, 5), modalities=("MR",), patients=("PAT-w0", "PAT-w1", "PAT-w2")),
        ArchiveQuery(modalities=("XA",)),
        ArchiveQuery(body_part="HEAD"),
        ArchiveQuery(body_part="KNEE"),
    ],
)
def test_a_query_brings_what_matches_and_nothing_else(
    pacs: Pacs, theirs: dict[str, bytes], tmp_path: Path, query: ArchiveQuery
) -> None:
    def matches(body: bytes) -> bool:
        data = of(body)
        day = dt.datetime.strptime(str(data.StudyDate), "%Y%m%d").date()
        return bool(
            (not query.modalities or data.Modality in query.modalities)
            and (not query.patients or data.PatientID in query.patients)
            and (not query.body_part or data.get("BodyPartExamined") == query.body_part)
            and (not query.accessions or data.get("AccessionNumber") in query.accessions)
            and (query.since or dt.date.min) <= day <= (query.until or dt.date.max)
        )

    sink = sink_of(tmp_path)
    done = WadoRetriever(web_of(pacs, tmp_path), sink).run(query)
    assert bodies(sink.room) == sorted(filter(matches, theirs.values()))
    assert done.complete


def test_what_is_known_is_not_asked_for_again(pacs: Pacs, theirs: dict[str, bytes], tmp_path: Path) -> None:
    for share in (2, 5):  # most of a series wanted; few of it
        known = {uid for uid, body in theirs.items() if int(of(body).InstanceNumber or 0) % share}
        sink = sink_of(tmp_path / str(share), known.__contains__)
        done = WadoRetriever(web_of(pacs, tmp_path), sink).run(ArchiveQuery())
        assert bodies(sink.room) == sorted(body for uid, body in theirs.items() if uid not in known)
        assert (done.brought, done.known) == (62 - len(known), len(known))


def test_it_goes_on_after_kill_9_of_the_agent(pacs: Pacs, theirs: dict[str, bytes], tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom agent.pacs.dicomweb.config import DicomWebArchive\n"
        "from agent.pacs.archive import ArchiveQuery\nfrom agent.storage.spool import Spool\n"
        "from agent.pacs.dicomweb.wado import WadoRetriever, InstanceSink\n"
        "web = DicomWebArchive('ward', sys.argv[1], user=sys.argv[2], password_file=Path(sys.argv[3]),\n"
        "                      least_free_bytes=0, per_minute=1200)\n"
        "sink = InstanceSink(Spool(Path(sys.argv[4]), bytes(range(32))), lambda uid: False)\n"
        "WadoRetriever(web, sink, progress=lambda brought, known: print(brought, flush=True)).run(ArchiveQuery())\n"
    )
    arguments = [pacs.dicomweb_url, pacs.user, str(secret(tmp_path, pacs.password)), str(tmp_path / "inbox")]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])},
    ) as agent:
        assert agent.stdout is not None
        while int(agent.stdout.readline()) < 15:
            pass
        agent.send_signal(signal.SIGKILL)
    sink = sink_of(tmp_path)
    sink.room.sweep()
    before = len(sink.room.names())
    assert 15 <= before < 62
    done = WadoRetriever(web_of(pacs, tmp_path), sink).run(ArchiveQuery())
    assert (done.brought, done.known, done.complete) == (62 - before, before, True)
    assert bodies(sink.room) == sorted(theirs.values())


def test_it_goes_on_after_kill_9_of_the_archive(pacs: Pacs, theirs: dict[str, bytes], tmp_path: Path) -> None:
    sink = sink_of(tmp_path)
    begun, waits = threading.Event(), threading.Event()

    def progress(brought: int, _known: int) -> None:
        if brought >= 15:
            begun.set()
            waits.wait(60)  # in the middle of an answer, until it is dead

    found: list[Any] = []
    web = web_of(pacs, tmp_path, retries=8)
    puller = WadoRetriever(web, sink, progress=progress)
    thread = threading.Thread(target=lambda: found.append(puller.run(ArchiveQuery())))
    thread.start()
    assert begun.wait(60)
    pacs.kill()
    waits.set()
    pacs.restart()
    thread.join(200)
    assert (found[0].brought, found[0].complete) == (62, True)
    assert bodies(sink.room) == sorted(theirs.values())


def test_an_archive_that_stays_away_is_an_error_and_keeps_what_came(tmp_path: Path) -> None:
    waits: list[float] = []
    web = DicomWebArchive("ward", "http://127.0.0.1:9/dicom-web", retries=3, least_free_bytes=0)
    with pytest.raises(DicomWebError, match="ward cannot be reached"):
        WadoRetriever(web, sink_of(tmp_path), clocks=Time(sleep=waits.append)).run(ArchiveQuery())
    assert waits == sorted(waits)
    assert len(waits) == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"password_file": "wrong"}, "does not accept the user"),
        ({"url": "/nothing-here"}, "no DICOMweb service"),
        ({"max_bytes": 100}, None),
        ({"least_free_bytes": 2**60}, "disk is nearly full"),
        ({"most_studies": 3}, "narrow the query"),
    ],
)
def test_what_goes_wrong_is_said_without_patients(
    pacs: Pacs,
    theirs: dict[str, bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    said: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    if "url" in changed:
        changed = {"url": pacs.url + changed["url"]}
    if "password_file" in changed:
        (tmp_path / "other").mkdir()
        changed = {"password_file": secret(tmp_path / "other", "wrong")}
    given = {"name": "ward", "url": pacs.dicomweb_url, "user": pacs.user, "least_free_bytes": 0, "retries": 0}
    given["password_file"] = secret(tmp_path, pacs.password)
    puller = WadoRetriever(DicomWebArchive(**{**given, **changed}), sink_of(tmp_path))
    if said is None:
        done = puller.run(ArchiveQuery())
        assert (done.brought, done.left, done.complete) == (0, {"too_large": 62}, False)
        told = repr(done)
    else:
        with pytest.raises(DicomWebError, match=said) as caught:
            puller.run(ArchiveQuery())
        told = str(caught.value) + repr(caught.value.__cause__)
    for secret_text in [pacs.password, "PAT-", "studies/", *theirs]:
        assert secret_text not in told
        assert secret_text not in caplog.text


def test_tls_is_checked_both_ways(files: list[bytes], tmp_path: Path) -> None:
    ours, strangers = Authority(tmp_path / "ours"), Authority(tmp_path / "strangers")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ours.ca))
    context.load_cert_chain(*map(str, ours.server()))
    context.verify_mode = ssl.CERT_REQUIRED
    known, stranger = ours.agent("gateway"), strangers.agent("gateway")
    with misbehaving(archive(files, multipart(*files)), context) as server:
        done, got = pull(server, tmp_path / "in", ca=ours.ca, certificate=known[0], key=known[1])
        assert (done.brought, got) == (6, sorted(files))
        for ca, pair in ((strangers.ca, known), (None, known), (ours.ca, stranger), (ours.ca, (None, None))):
            before = len(server.asked)
            with pytest.raises(DicomWebError, match=r"TLS failed|closed the connection"):
                pull(server, tmp_path / "out", ca=ca, certificate=pair[0], key=pair[1])
            assert len(server.asked) == before


def test_nothing_is_asked_outside_its_hours_or_after_a_stop(tmp_path: Path) -> None:
    with misbehaving({}) as server:
        web = DicomWebArchive("ward", server.url, hours="22:00-06:00", least_free_bytes=0)
        for hour, paused in ((23, False), (0, False), (5, False), (6, True), (12, True), (21, True)):
            clocks = Time(now=lambda hour=hour: dt.datetime(2026, 1, 5, hour))
            done = WadoRetriever(web, sink_of(tmp_path), clocks=clocks).run(ArchiveQuery())
            assert (done.paused, done.asked) == (paused, not paused)
        asked = len(server.asked)
        assert asked == 3
        assert WadoRetriever(web, sink_of(tmp_path), stop=lambda: True).run(ArchiveQuery()).paused
        assert len(server.asked) == asked


def test_a_stop_comes_between_two_instances(pacs: Pacs, tmp_path: Path) -> None:
    sink = sink_of(tmp_path)
    done = WadoRetriever(web_of(pacs, tmp_path, connections=1), sink, stop=lambda: len(sink.room.names()) >= 7).run(
        ArchiveQuery()
    )
    assert 7 <= done.brought <= 12  # some were being written when it was said
    assert (done.paused, done.complete, len(sink.room.names())) == (True, False, done.brought)


def test_the_rate_is_kept(pacs: Pacs, tmp_path: Path) -> None:
    now, waits = [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    web = web_of(pacs, tmp_path, per_minute=30, connections=1, whole_s=1e6)
    done = WadoRetriever(web, sink_of(tmp_path), clocks=Time(monotonic=lambda: now[0], sleep=sleep)).run(
        ArchiveQuery(patients=("PAT-w1",))
    )
    assert done.brought == 10
    assert sum(waits) == pytest.approx(9 * 2.0)


# ------------------------------------------------------------------ servers that misbehave


class Misbehaving(http.server.ThreadingHTTPServer):
    """Answers by the end of the path: a status, headers and body each, or a function that writes to the socket."""

    daemon_threads = True

    def __init__(self, answers: dict[str, Any], tls: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.answers, self.asked = answers, []
        self.scheme = "https" if tls else "http"
        self.heads: list[Any] = []

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}/dicom-web"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Misbehaving)
        path, _, query = self.path.partition("?")
        server.asked.append(self.path)
        server.heads.append(dict(self.headers))
        found = next((answer for end, answer in server.answers.items() if path.endswith(end)), (200, {}, b"[]"))
        if "offset=0" not in query and query:
            found = server.answers.get("later", (200, {}, b"[]"))
        with contextlib.suppress(OSError):
            if callable(found):
                found(self)
                self.close_connection = True
                return
            status, headers, body = found
            self.send_response(status)
            for name, value in {"Content-Type": "application/dicom+json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a client that ends the handshake, or goes
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextlib.contextmanager
def misbehaving(answers: dict[str, Any], tls: ssl.SSLContext | None = None) -> Iterator[Misbehaving]:
    server = Misbehaving(answers, tls)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def matches_of(key: str, *values: str, **more: Any) -> tuple[int, dict[str, str], bytes]:
    rest = {tag: {"vr": "LO", "Value": [value]} for tag, value in more.items()}
    return 200, {}, json.dumps([{key: {"vr": "UI", "Value": [value]}, **rest} for value in values]).encode()


def archive(files: list[bytes], answer: Any, **more: Any) -> dict[str, Any]:
    """One study 1.2 with one series 1.3 of these files; ``answer`` to the retrieval of the series."""
    return {
        "/studies": matches_of("0020000D", "1.2"),
        "/studies/1.2/series": matches_of("0020000E", "1.3"),
        "/series/1.3/instances": matches_of("00080018", *(str(of(one).SOPInstanceUID) for one in files)),
        "/series/1.3": answer,
        **{f"/instances/{of(one).SOPInstanceUID}": multipart(one) for one in files},
        **more,
    }


def multipart(*files: bytes, end: bytes = b"\r\n--b0--") -> tuple[int, dict[str, str], bytes]:
    said = {"Content-Type": 'multipart/related; type="application/dicom"; boundary=b0'}
    return 200, said, b"".join(b"\r\n--b0\r\nContent-Type: application/dicom\r\n\r\n" + one for one in files) + end


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    made = make_instances(tmp_path_factory.mktemp("files"), 6, patients=1, seed="m")
    return [path.read_bytes() for path in made]


def pull(
    server: Misbehaving, folder: Path, query: ArchiveQuery | None = None, **changed: Any
) -> tuple[Any, list[bytes]]:
    web = DicomWebArchive("ward", server.url, **{"retries": 2, "least_free_bytes": 0, "connections": 1, **changed})
    sink = sink_of(folder)
    done = WadoRetriever(web, sink, clocks=Time(sleep=lambda _seconds: None)).run(query or ArchiveQuery())
    return done, bodies(sink.room)


def test_an_answer_that_breaks_off_is_completed_one_by_one(files: list[bytes], tmp_path: Path) -> None:
    with misbehaving(archive(files, multipart(*files[:2], files[3][:99], end=b""))) as server:
        done, got = pull(server, tmp_path)
    assert (done.brought, done.left, got) == (6, {}, sorted(files))


def test_what_the_archive_lists_and_does_not_send_is_counted(files: list[bytes], tmp_path: Path) -> None:
    gone = f"/instances/{of(files[5]).SOPInstanceUID}"
    broken = f"/instances/{of(files[4]).SOPInstanceUID}"
    answers = archive(files, multipart(*files[:2]), **{gone: (404, {}, b""), broken: (500, {}, b"")})
    with misbehaving(answers) as server:
        done, got = pull(server, tmp_path)
        tried = sum(path.endswith(broken) for path in server.asked)
    assert (done.brought, got, done.complete) == (4, sorted(files[:4]), False)
    assert sum(done.left.values()) == 2
    assert tried == 4  # while others still came, once more, and two retries
    answers = archive(files, multipart(*files))
    answers["/studies/1.2/series"] = matches_of("0020000E", "1.3", **{"00201209": "9"})
    with misbehaving(answers) as server:
        done, _ = pull(server, tmp_path / "announced")
    assert (done.instances, done.brought, done.left) == (9, 6, {"missing": 3})


def test_an_archive_that_lost_two_files_sends_all_others(tmp_path: Path) -> None:
    made = make_instances(tmp_path / "files", 40, patients=4, modalities=("MR", "CT"), seed="lost")
    lost = {str(of(made[i].read_bytes()).SOPInstanceUID) for i in (8, 13)}
    waits: list[float] = []
    sink = sink_of(tmp_path)
    with orthanc(tmp_path / "o") as pacs:
        pacs.store(made)
        pacs.lose(lost)
        for brought, known in ((38, 0), (0, 38)):
            done = WadoRetriever(web_of(pacs, tmp_path, retries=6), sink, clocks=Time(sleep=waits.append)).run(
                ArchiveQuery()
            )
            assert (done.instances, done.brought, done.known, done.left) == (40, brought, known, {"failed": 2})
            assert sum(waits) < 30
    here = {str(of(body).SOPInstanceUID) for body in bodies(sink.room)}
    assert here == {str(of(path.read_bytes()).SOPInstanceUID) for path in made} - lost


def many(files: list[bytes], count: int) -> dict[str, Any]:
    """One study of the series 1.3.0 to 1.3.n, one instance each."""
    named = {f"1.3.{i}": str(of(files[i % len(files)]).SOPInstanceUID) for i in range(count)}
    return {
        "/studies": matches_of("0020000D", "1.2"),
        "/studies/1.2/series": matches_of("0020000E", *named),
        **{
            f"/series/{series}/instances": matches_of("00080018", f"{uid}.{i}")
            for i, (series, uid) in enumerate(named.items())
        },
    }


FAULT = (500, {}, b"")


def test_series_that_the_archive_has_a_fault_with_cost_no_other(files: list[bytes], tmp_path: Path) -> None:
    good = files[0]
    uid = str(of(good).SOPInstanceUID)
    answers = many(files, 16)
    answers["/series/1.3.0/instances"] = matches_of("00080018", uid)
    answers |= {"/series/1.3.0": multipart(good)}
    with misbehaving({**answers, "/1.3.0/instances/" + uid: multipart(good)}) as server:
        for i in range(1, 16):
            server.answers[f"/series/1.3.{i}"] = FAULT
            server.answers[f"/series/1.3.{i}/instances/{of(files[i % 6]).SOPInstanceUID}.{i}"] = FAULT
        waits: list[float] = []
        for brought in (1, 0):  # again and again: the run ends by itself
            sink = sink_of(tmp_path)
            web = DicomWebArchive("ward", server.url, least_free_bytes=0, connections=1)
            done = WadoRetriever(web, sink, clocks=Time(sleep=waits.append)).run(ArchiveQuery())
            assert (done.brought, done.left) == (brought, {"failed": 15})
        assert sum(waits) < 2 * 90


@pytest.mark.parametrize(("status", "most"), [(500, 100), (406, 6), (403, 4), (401, 4)])
def test_an_archive_that_fails_for_everything_ends_the_run(
    files: list[bytes], tmp_path: Path, status: int, most: int
) -> None:
    with misbehaving(many(files, 30)) as server:
        for i in range(30):
            server.answers[f"/series/1.3.{i}"] = (status, {}, b"")
            server.answers[f"/series/1.3.{i}/instances/{of(files[i % 6]).SOPInstanceUID}.{i}"] = (status, {}, b"")
        with pytest.raises(DicomWebError, match=f"HTTP {status}"):
            pull(server, tmp_path)
        assert sum("/1.3." in path and "?" not in path for path in server.asked) < most


def test_only_what_was_asked_for_is_kept(files: list[bytes], tmp_path: Path) -> None:
    other = files[0].replace(of(files[0]).SOPInstanceUID.encode(), b"9" * len(of(files[0]).SOPInstanceUID))
    with misbehaving(archive(files, multipart(other, *files, files[2]))) as server:
        done, got = pull(server, tmp_path)
    assert (done.brought, got, done.complete) == (6, sorted(files), True)
    swapped = {f"/instances/{of(files[0]).SOPInstanceUID}": multipart(other)}
    with misbehaving(archive(files, multipart(*files[1:]), **swapped)) as server:
        done, got = pull(server, tmp_path / "swapped")
    assert (done.left, got) == ({"instance_mismatch": 1}, sorted(files[1:]))


def test_a_part_that_is_no_dicom_is_kept_for_the_quarantine_under_the_name_that_was_asked(
    files: list[bytes], tmp_path: Path
) -> None:
    junk = {f"/instances/{of(files[0]).SOPInstanceUID}": multipart(b"junk")}
    with misbehaving(archive(files, multipart(b"junk", *files[1:]), **junk)) as server:
        done, got = pull(server, tmp_path)
    assert (done.brought, got) == (6, sorted([b"junk", *files[1:]]))


def test_an_archive_that_ignores_the_filters_brings_nobody_else(files: list[bytes], tmp_path: Path) -> None:
    everybody = [
        {"0020000D": {"vr": "UI", "Value": ["1.2"]}, "00100020": {"vr": "LO", "Value": ["PAT-m0"]}},
        {"0020000D": {"vr": "UI", "Value": ["1.9"]}, "00100020": {"vr": "LO", "Value": ["somebody else"]}},
        {"0020000D": {"vr": "UI", "Value": ["1.8"]}},
    ]
    answers = archive(files, multipart(*files))
    answers["/studies"] = (200, {}, json.dumps(everybody).encode())
    with misbehaving(answers) as server:
        done, got = pull(server, tmp_path, ArchiveQuery(patients=("PAT-m0",)))
        assert not any("1.9" in path or "1.8" in path for path in server.asked)
    assert (done.series, got) == (1, sorted(files))


def test_an_archive_that_ignores_the_offset_is_not_asked_for_ever(files: list[bytes], tmp_path: Path) -> None:
    answers = archive(files, multipart(*files))
    with misbehaving(answers) as server:
        server.answers["later"] = answers["/studies"]  # no new match on any further page
        with contextlib.suppress(DicomWebError):
            pull(server, tmp_path)
        assert len(server.asked) < 20


def test_credentials_go_nowhere_else(tmp_path: Path) -> None:
    with misbehaving({}) as elsewhere, misbehaving({}) as server:
        server.answers["/studies"] = (302, {"Location": f"{elsewhere.url}/studies"}, b"")
        with pytest.raises(DicomWebError, match="redirects to another address"):
            pull(server, tmp_path, user="u", password_file=secret(tmp_path, "hunter2"))
        assert elsewhere.asked == []
        assert "Authorization" in server.heads[0]


def test_the_environment_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with misbehaving({}) as proxy, misbehaving({}) as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        pull(server, tmp_path)
        assert proxy.asked == []
        assert "Authorization" not in server.heads[0]


def _endless(handler: http.server.BaseHTTPRequestHandler, head: bytes, piece: bytes) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        handler.wfile.write(piece)


@pytest.mark.parametrize(
    ("head", "piece", "said"),
    [
        (b"Content-Type: application/dicom+json", b"[" * 65_536, "more than 64 MiB"),
        (b"Content-Encoding: gzip", b"\x1f\x8b" * 1000, "compresses"),
        (b"Transfer-Encoding: chunked", b"1" * 65_536, "closed the connection"),
        (b"X: " + b"y" * 70_000, b"", "closed the connection"),
    ],
)
def test_an_endless_answer_ends(tmp_path: Path, head: bytes, piece: bytes, said: str) -> None:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        _endless(handler, head, piece)

    with misbehaving({"/studies": answer}) as server, pytest.raises(DicomWebError, match=said):
        pull(server, tmp_path, retries=0)


def test_a_slow_answer_ends(files: list[bytes], tmp_path: Path) -> None:
    def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(600):
            handler.wfile.write(b"[")
            time.sleep(0.05)

    with misbehaving({"/studies": drip}) as server, pytest.raises(DicomWebError, match="takes longer"):
        pull(server, tmp_path, retries=0, whole_s=0.5)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"{}",
        b'"x"',
        b"[1]",
        b'[{"0020000D": 3}]',
        b'[{"0020000D": {"Value": ["../x"]}}]',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_what_is_no_dicomweb_is_said_so(tmp_path: Path, body: bytes) -> None:
    with misbehaving({"/studies": (200, {}, body)}) as server, pytest.raises(DicomWebError, match=r"url|valid UID"):
        pull(server, tmp_path)
    with misbehaving({**archive([], (200, {"Content-Type": "text/html"}, body))}) as server:
        server.answers["/series/1.3/instances"] = matches_of("00080018", "1.4")
        with pytest.raises(DicomWebError, match="multipart/related"):
            pull(server, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "http://pacs.example.org/dicom-web"},
        {"url": "ftp://127.0.0.1/"},
        {"url": "https:///dicom-web"},
        {"url": "https://user:password@pacs.example.org/"},
        {"url": "https://pacs.example.org/?x=y"},
        {"user": "u"},
        {"password_file": Path("p")},
        {"user": "u", "password_file": Path("p"), "token_file": Path("t")},
        {"key": Path("k")},
        {"hours": "7-19"},
        {"per_minute": -1},
        {"connections": 0},
        {"retries": -1},
        {"read_s": float("nan")},
        {"name": ""},
    ],
)
def test_settings_that_cannot_work_or_would_leak_are_refused(wrong: dict[str, Any]) -> None:
    DicomWebArchive("ward", "https://pacs.example.org/dicom-web")
    with pytest.raises(ValueError, match=r"\w"):
        DicomWebArchive(**{"name": "ward", "url": "https://pacs.example.org/dicom-web", **wrong})


def test_a_password_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    loose = secret(tmp_path, "x")
    loose.chmod(0o640)
    with misbehaving({}) as server, pytest.raises(DicomWebError, match="chmod 600"):
        pull(server, tmp_path, user="u", password_file=loose)
