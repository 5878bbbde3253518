"""The STOW-RS receiver: a real process, against dicomweb-client, curl, Orthanc, and hostile senders."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pydicom
import pytest
import requests
from dicomweb_client.web import DICOMwebClient

from agent.pacs.dicomweb import stow_process
from agent.pacs.dicomweb.stow_process import Stow, StowError, StowSettings, _ask
from agent.pacs.secret_files import make_secret
from agent.storage.spool import Spool
from tests.support.pacs import make_instances, orthanc
from tests.support.peers import need
from tests.support.pki import Authority

KEY = bytes(range(32))
TYPE = 'multipart/related; type="application/dicom"; boundary=b0'
PART = b"\r\n--b0\r\nContent-Type: application/dicom\r\n\r\n"
END = b"\r\n--b0--"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    made = make_instances(tmp_path_factory.mktemp("files"), 12, patients=2, seed="stow")
    return [path.read_bytes() for path in made]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "token"
    make_secret(path)
    return path


def settings_of(token_file: Path, **changed: Any) -> StowSettings:
    return StowSettings(**{"port": 0, "token_file": token_file, "least_free_bytes": 0, **changed})


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, token_file: Path) -> Iterator[tuple[Stow, Spool]]:
    """One receiver for the tests that need nothing of their own; with small limits."""
    room = Spool(tmp_path_factory.mktemp("home") / "inbox", KEY)
    limits = {"max_bytes": 2**20, "body_bytes": 64 * 2**20, "most_instances": 1000, "header_s": 1.0, "grace_s": 1.0}
    with Stow(settings_of(token_file, **limits), room.folder, KEY) as stow:
        yield stow, room


@pytest.fixture
def receiver(usual: tuple[Stow, Spool]) -> tuple[Stow, Spool]:
    """The usual one, its room empty."""
    for name in usual[1].names():
        usual[1].remove(name)
    return usual


def url_of(stow: Stow, path: str = "/studies") -> str:
    return f"http://127.0.0.1:{stow.port}/dicom-web{path}"


def post(stow: Stow, token_file: Path, body: Any, path: str = "/studies", **headers: str) -> requests.Response:
    told = {"Authorization": f"Bearer {token_file.read_text().strip()}", "Content-Type": TYPE, **headers}
    return requests.post(url_of(stow, path), data=body, headers=told, timeout=60)


def bodies(room: Spool) -> list[bytes]:
    arrivals = [room.open(name) for name in room.names()]
    assert all((a.road, a.source) == ("stow", "stow") for a in arrivals)
    return sorted(a.body for a in arrivals)


def uid_of(file: bytes) -> str:
    return str(pydicom.dcmread(BytesIO(file), stop_before_pixels=True).SOPInstanceUID)


def told(reply: requests.Response, tag: str, inner: str = "00081155") -> list[Any]:
    assert reply.headers["content-type"] == "application/dicom+json"
    return [item[inner]["Value"][0] for item in reply.json().get(tag, {}).get("Value", [])]


def alive(stow: Stow, token_file: Path, file: bytes) -> bool:
    return post(stow, token_file, PART + file + END).status_code == 200


def test_what_dicomweb_client_stores_arrives(
    receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes]
) -> None:
    stow, room = receiver
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {token_file.read_text().strip()}"
    client = DICOMwebClient(url_of(stow, ""), session=session, chunk_size=4096)
    answer = client.store_instances([pydicom.dcmread(BytesIO(one)) for one in files])
    stored = {str(item.ReferencedSOPInstanceUID) for item in answer.ReferencedSOPSequence}
    assert stored == {uid_of(one) for one in files}
    assert "FailedSOPSequence" not in answer
    assert sorted(uid_of(body) for body in bodies(room)) == sorted(stored)


def test_what_curl_sends_arrives_bit_for_bit(
    receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes], tmp_path: Path
) -> None:
    need("curl")
    stow, room = receiver
    body = tmp_path / "body"
    body.write_bytes(b"".join(PART + one for one in files) + END)
    (tmp_path / "headers").write_text(f"Authorization: Bearer {token_file.read_text()}Content-Type: {TYPE}\n")
    command = ["curl", "-sS", "-H", f"@{tmp_path / 'headers'}", "-w", "%{http_code}", "-o", str(tmp_path / "answer")]
    for more in ([], ["-H", "Transfer-Encoding: chunked"], ["-H", "Expect: 100-continue"]):
        sent = [*command, *more, "--data-binary", f"@{body}", url_of(stow)]
        done = subprocess.run(sent, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == "200"
        assert len(json.loads((tmp_path / "answer").read_text())["00081199"]["Value"]) == len(files)
    assert bodies(room) == sorted(files)  # sent three times, there once


def test_what_orthanc_stores_arrives_bit_for_bit(token_file: Path, files: list[bytes], tmp_path: Path) -> None:
    room = Spool(tmp_path / "inbox", KEY)
    with Stow(settings_of(token_file), room.folder, KEY) as stow:
        server = {
            "Url": url_of(stow, "/"),
            "HttpHeaders": {"Authorization": f"Bearer {token_file.read_text().strip()}"},
        }
        dicomweb = {"Enable": True, "Root": "/dicom-web/", "EnableWado": True, "Servers": {"gateway": server}}
        with orthanc(tmp_path / "orthanc", settings={"DicomWeb": dicomweb}) as pacs:
            pacs.store(make_instances(tmp_path / "files", 12, patients=2, seed="stow"))
            theirs = pacs.files()
            order = json.dumps({"Resources": pacs.request("/instances").json(), "Synchronous": True}).encode()
            pacs.request("/dicom-web/servers/gateway/stow", "POST", order)
    assert bodies(room) == sorted(theirs.values())
    assert set(theirs) == {uid_of(one) for one in files}


def test_nothing_is_told_without_the_token(
    receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes]
) -> None:
    stow, room = receiver
    good = token_file.read_text().strip()
    for wrong in ("", "Bearer", "Bearer " + good[:-1], f"Bearer {good}x", f"Basic {good}", good, "Bearer \xe9"):
        reply = post(stow, token_file, PART + files[0] + END, Authorization=wrong)
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert reply.content == b"{}"
    assert room.names() == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/studies", 405),
        ("PUT", "/studies", 405),
        ("POST", "/", 404),
        ("POST", "/studies/../../../etc/passwd", 404),
        ("POST", "/studies/..%2f..%2fetc%2fpasswd", 404),
        ("POST", "/studies/1.2.x", 404),
        ("POST", "/studies/1..2", 404),
        ("POST", "/studies/" + "1" * 65, 404),
        ("POST", "/studies/1.2/series/3", 404),
        ("POST", "//studies", 404),
    ],
)
def test_there_is_one_thing_to_do_and_one_place(
    receiver: tuple[Stow, Spool], token_file: Path, method: str, path: str, status: int
) -> None:
    stow, _ = receiver
    token = token_file.read_text().strip()
    with socket.create_connection(("127.0.0.1", stow.port), 10) as line:
        line.sendall(
            f"{method} /dicom-web{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: {TYPE}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        assert line.recv(100).split()[1] == str(status).encode()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "application/dicom"}, b"x", 415),
        ({"Content-Type": 'multipart/related; type="application/dicom+json"; boundary=b0'}, b"x", 415),
        ({"Content-Type": "multipart/related; boundary="}, b"x", 400),
        ({}, b"", 400),
        ({}, END, 400),
        ({}, PART + b"DICM", 400),
        ({}, PART + bytes(128) + b"DICM" + END, 409),
        ({}, PART + b"no DICOM at all" + END, 409),
        ({}, b"\r\n--b0\r\nContent-Type: application/dicom+json\r\n\r\n[]" + END, 409),
        ({}, b"\r\n--b0\r\nX: " + b"y" * 9000 + b"\r\n\r\nx" + END, 413),
        ({}, b"\r\n--b0\r\n\r\n" * 1_000_000, 413),
    ],
)
def test_what_cannot_be_stored_is_refused_as_the_standard_says(
    receiver: tuple[Stow, Spool], token_file: Path, headers: dict[str, str], body: bytes, status: int
) -> None:
    stow, room = receiver
    try:
        reply = post(stow, token_file, body, **headers)
    except requests.ConnectionError:
        assert len(body) > 4 * 2**20  # it was cut off while it still sent
    else:
        assert reply.status_code == status
    assert room.names() == []


def test_one_bad_part_costs_no_other(receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes]) -> None:
    stow, room = receiver
    large = files[1] + bytes(2**20)
    body = PART + files[0] + PART + b"junk" + PART + large + PART + files[2] + END
    reply = post(stow, token_file, body)
    assert reply.status_code == 202
    assert told(reply, "00081199") == [uid_of(files[0]), uid_of(files[2])]
    assert told(reply, "00081198") == [uid_of(files[1])]
    assert told(reply, "00081198", "00081197") == [0xA701]
    assert told(reply, "0008119A", "00081197") == [0xC000]
    assert bodies(room) == sorted([files[0], files[2]])


def test_only_instances_of_the_named_study_are_stored_under_it(
    receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes]
) -> None:
    stow, room = receiver
    studies = [str(pydicom.dcmread(BytesIO(one)).StudyInstanceUID) for one in files[:2]]
    assert studies[0] != studies[1]
    reply = post(stow, token_file, PART + files[0] + PART + files[1] + END, f"/studies/{studies[0]}")
    assert reply.status_code == 202
    assert told(reply, "00081199") == [uid_of(files[0])]
    assert told(reply, "00081198") == [uid_of(files[1])]
    assert bodies(room) == [files[0]]


def test_compressed_bodies_are_not_unpacked(receiver: tuple[Stow, Spool], token_file: Path) -> None:
    stow, room = receiver
    bomb = gzip.compress(PART + bytes(50 * 2**20))
    assert post(stow, token_file, bomb, **{"Content-Encoding": "gzip"}).status_code == 415
    assert room.names() == []


def test_huge_headers_are_refused(receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes]) -> None:
    stow, _ = receiver
    with socket.create_connection(("127.0.0.1", stow.port), 10) as line:
        line.sendall(b"POST /dicom-web/studies HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 60_000)
        assert b" 400 " in line.recv(100)
    assert alive(stow, token_file, files[0])


def _until_closed(line: socket.socket, send: bytes, most: float) -> bytes:
    """Send a byte now and then until the other side ends; what it said."""
    until, said = time.monotonic() + most, b""
    line.settimeout(0.1)
    while time.monotonic() < until:
        try:
            line.sendall(send)
            piece = line.recv(4096)
            if not piece:
                return said
            said += piece
        except TimeoutError:
            continue
        except OSError:
            return said
    pytest.fail("the connection is still held")


def test_slow_senders_are_cut_off(receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes]) -> None:
    stow, room = receiver
    token = token_file.read_text().strip()
    head = (
        f"POST /dicom-web/studies HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: {TYPE}\r\nContent-Length: 1000000\r\n\r\n"
    ).encode()
    for begin, drip, expected in ((b"", b"", b""), (b"POST /", b"x", b""), (head, b"x", b"408")):
        with socket.create_connection(("127.0.0.1", stow.port), 10) as line:
            line.sendall(begin)
            assert expected in _until_closed(line, drip, 30)
    assert room.names() == []
    assert alive(stow, token_file, files[0])


def test_many_silent_connections_do_not_keep_others_out_for_long(
    receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes]
) -> None:
    stow, _ = receiver
    lines = [socket.create_connection(("127.0.0.1", stow.port), 10) for _ in range(60)]
    try:
        until = time.monotonic() + 60
        while True:
            try:
                assert alive(stow, token_file, files[0])
                break
            except requests.ConnectionError:
                assert time.monotonic() < until
                time.sleep(0.1)
    finally:
        for line in lines:
            line.close()


def test_a_sender_that_breaks_off_loses_only_what_was_not_whole(
    receiver: tuple[Stow, Spool], token_file: Path, files: list[bytes]
) -> None:
    stow, room = receiver
    token = token_file.read_text().strip()
    with socket.create_connection(("127.0.0.1", stow.port), 10) as line:
        line.sendall(
            f"POST /dicom-web/studies HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: {TYPE}\r\nContent-Length: 1000000\r\n\r\n".encode()
        )
        line.sendall(PART + files[0] + PART + files[1][:100])
        until = time.monotonic() + 60
        while not room.names() and time.monotonic() < until:
            time.sleep(0.02)
    assert alive(stow, token_file, files[2])
    assert bodies(room) == sorted([files[0], files[2]])


def test_a_full_disk_or_too_many_requests_are_said_with_a_time_to_come_back(
    token_file: Path, files: list[bytes], tmp_path: Path
) -> None:
    room = Spool(tmp_path / "inbox", KEY)
    full = settings_of(token_file, least_free_bytes=2**60)
    with Stow(full, room.folder, KEY) as stow:
        reply = post(stow, token_file, PART + files[0] + END)
        assert (reply.status_code, int(reply.headers["retry-after"]) > 0) == (503, True)
    with Stow(settings_of(token_file, requests=1), room.folder, KEY) as stow:
        token = token_file.read_text().strip()
        with socket.create_connection(("127.0.0.1", stow.port), 10) as line:
            line.sendall(
                f"POST /dicom-web/studies HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
                f"Content-Type: {TYPE}\r\nContent-Length: 1000000\r\n\r\n".encode()
                + PART
                + files[0]
                + PART
            )
            until = time.monotonic() + 60
            while not room.names() and time.monotonic() < until:
                time.sleep(0.02)
            assert post(stow, token_file, PART + files[1] + END).status_code == 503
    assert bodies(room) == [files[0]]


def test_only_listed_addresses_may_connect(token_file: Path, files: list[bytes], tmp_path: Path) -> None:
    room = Spool(tmp_path / "inbox", KEY)
    with (
        Stow(settings_of(token_file, addresses=("192.0.2.0/24",)), room.folder, KEY) as stow,
        pytest.raises(requests.ConnectionError),
    ):
        post(stow, token_file, PART + files[0] + END)
    assert room.names() == []


def test_senders_prove_themselves_by_certificate(files: list[bytes], tmp_path: Path) -> None:
    ours, strangers = Authority(tmp_path / "ours"), Authority(tmp_path / "strangers")
    certificate, key = ours.server()
    room = Spool(tmp_path / "inbox", KEY)
    settings = StowSettings(
        port=0, certificate=certificate, key=key, client_ca=ours.ca, client_names=("ct1",), least_free_bytes=0
    )
    with Stow(settings, room.folder, KEY) as stow:
        url = f"https://localhost:{stow.port}/dicom-web/studies"

        def send(pair: tuple[Path, Path] | None) -> int:
            cert = (str(pair[0]), str(pair[1])) if pair else None
            reply = requests.post(
                url,
                data=PART + files[0] + END,
                headers={"Content-Type": TYPE},
                cert=cert,
                verify=str(ours.ca),
                timeout=30,
            )
            return reply.status_code

        assert send(ours.agent("ct1")) == 200
        for stranger in (None, strangers.agent("ct1"), ours.agent("ct2")):
            with pytest.raises(requests.ConnectionError):
                send(stranger)
        context = ssl.create_default_context(cafile=str(ours.ca))
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        with socket.create_connection(("localhost", stow.port), 10) as line, pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(line, server_hostname="localhost")
    assert bodies(room) == [files[0]]


def _memory(pid: int) -> int:
    """Resident KiB."""
    return next(int(one.split()[1]) for one in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in one)


def test_memory_stays_flat_while_200_mb_come_in(token_file: Path, files: list[bytes], tmp_path: Path) -> None:
    room = Spool(tmp_path / "inbox", KEY, durable=False)
    with Stow(settings_of(token_file), room.folder, KEY) as stow:
        assert stow.pid is not None
        seen: list[int] = []
        instance = files[0] + bytes(2**20)

        def stream() -> Iterator[bytes]:
            for i in range(200):
                yield PART + instance
                if i % 20 == 19:
                    seen.append(_memory(stow.pid or 0))
                    for name in room.names():
                        room.remove(name)
            yield END

        reply = post(stow, token_file, stream())
        assert (reply.status_code, len(told(reply, "00081199"))) == (200, 200)
        assert max(seen) - seen[0] < 24 * 1024


def test_it_dies_with_its_agent_and_leaves_no_core(token_file: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from agent.pacs.dicomweb.stow_process import Stow, StowSettings\n"
        "stow = Stow(StowSettings(port=0, token_file=Path(sys.argv[1])), Path(sys.argv[2]), bytes(32))\n"
        "stow.start()\nprint(stow.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(token_file), str(tmp_path / "inbox")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])},
    ) as agent:
        assert agent.stdout is not None
        child = Path(f"/proc/{int(agent.stdout.readline())}")
        assert "Max core file size        0                    0" in (child / "limits").read_text()
        agent.send_signal(signal.SIGKILL)
        until = time.monotonic() + 60
        while child.exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not child.exists()


def test_a_receiver_that_serves_has_no_way_to_tell_its_agent_anything(usual: tuple[Stow, Spool]) -> None:
    """Whoever takes it over could fill the agent's memory; of its pipes the one that ends with the agent is left."""
    folder = Path(f"/proc/{usual[0].pid}/fd")
    pipes = [one for one in folder.iterdir() if os.readlink(one).startswith("pipe:")]
    assert [os.lstat(one).st_mode & 0o700 for one in pipes] == [0o500], "to read from"


@pytest.mark.parametrize(
    "says",
    ["'{\"port\": 7}' + ' ' * 5000", '\'{"port": 7}{"port": 8}\'', "'x' * 2**20", "''", "'[]'", "'7'"],
)
def test_what_it_replies_is_bounded_and_all_that_it_says(says: str) -> None:
    program = f"import sys; sys.stdin.readline(); sys.stdout.write({says}); sys.stdout.flush()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert _ask(process, b"{}\n") == {}
        process.kill()


def test_one_that_cannot_be_started_in_full_is_killed(
    token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = list[subprocess.Popen[bytes]](), subprocess.Popen

    def remembered(*told: Any, **named: Any) -> Any:
        made.append(real(*told, **named))
        return made[-1]

    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stow_process.subprocess, "Popen", remembered)
    monkeypatch.setattr(stow_process.threading.Timer, "start", fails)
    with pytest.raises(RuntimeError):
        Stow(settings_of(token_file), tmp_path / "inbox", KEY).start()
    assert [process.returncode for process in made] == [-signal.SIGKILL]


def test_a_restart_takes_the_same_room_and_stop_is_harmless_twice(
    token_file: Path, files: list[bytes], tmp_path: Path
) -> None:
    room = Spool(tmp_path / "inbox", KEY)
    stow = Stow(settings_of(token_file), room.folder, KEY)
    for i in (0, 1):
        stow.start()
        assert alive(stow, token_file, files[i])
        assert bodies(room) == sorted(files[: i + 1])
        stow.stop()
        stow.stop()
        assert stow.pid is None


def test_a_killed_receiver_is_started_again_at_its_port_and_told(
    token_file: Path, files: list[bytes], tmp_path: Path
) -> None:
    room, told = Spool(tmp_path / "inbox", KEY), list[str]()
    with Stow(settings_of(token_file), room.folder, KEY, ended=told.append) as stow:
        assert alive(stow, token_file, files[0])
        old, port = stow.pid, stow.port
        assert old is not None
        os.kill(old, signal.SIGKILL)
        until = time.monotonic() + 60
        while stow.pid in (None, old) and time.monotonic() < until:
            time.sleep(0.05)
        assert stow.port == port
        assert alive(stow, token_file, files[1])
        assert (bodies(room), told) == (sorted(files[:2]), ["killed by SIGKILL"])
    assert told == ["killed by SIGKILL"], "an end that was asked for is none"


def test_what_cannot_start_says_why(token_file: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stow = Stow(settings_of(token_file, port=taken.getsockname()[1]), tmp_path / "inbox", KEY)
        with pytest.raises(StowError, match="another program"):
            stow.start()
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(StowError, match="certificate"):
        Stow(settings_of(token_file, certificate=broken, key=broken), tmp_path / "inbox", KEY).start()
    loose = tmp_path / "token"
    shutil.copy(token_file, loose)
    loose.chmod(0o644)
    with pytest.raises(StowError, match="chmod 600"):
        Stow(settings_of(loose), tmp_path / "inbox", KEY).start()


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_file": None},
        {"host": "0.0.0.0"},
        {"host": "192.0.2.1"},
        {"certificate": Path("x")},
        {"client_ca": Path("x")},
        {"client_names": ("a",)},
        {"addresses": ()},
        {"addresses": ("10.0.0.0/33",)},
        {"root": "dicom-web"},
        {"root": "/dicom-web/"},
        {"max_bytes": 2**31},
        {"slowest": 0},
        {"header_s": float("nan")},
        {"port": 70_000},
    ],
)
def test_settings_that_would_open_the_door_wider_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        StowSettings(**{"token_file": Path("token"), **wrong})


def test_a_new_token_is_for_its_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    make_secret(tmp_path / "token")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / "token").read_text().strip()) >= 43
    with pytest.raises(FileExistsError):
        make_secret(tmp_path / "token")
