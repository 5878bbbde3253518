"""The C-STORE receiver against real senders: DCMTK's tools and pynetdicom; and against those who mean harm."""

import contextlib
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pydicom
import pytest
from pydicom.data import get_testdata_file
from pydicom.uid import generate_uid
from pynetdicom import AE, dsutils

from agent.pacs.dimse.acceptor import STORABLE
from agent.pacs.dimse.config import Caller, Identity, ListenerSettings
from agent.pacs.dimse.listener_process import Listener, ListenerError
from agent.pacs.dimse.storage_scp import EVENTS
from agent.pacs.tls import Tls
from agent.storage.spool import Spool
from tests.support.pacs import ENVIRONMENT
from tests.support.peers import need
from tests.support.pki import Authority
from tests.support.ports import free_port

KEY = bytes(range(32))
CT = "1.2.840.10008.5.1.4.1.1.2"
OURS = ListenerSettings(
    "LAZARET",
    (Caller("PACS", ("127.0.0.1",)),),
    plain_tcp=True,
    port=0,
    workers=2,
    full_at=1.0,
    least_free_bytes=0,
    durable=False,
)
HOME = Path(__file__).resolve().parents[4]


def tool(name):
    need(name, path=ENVIRONMENT["PATH"])
    return name


@pytest.fixture(scope="module")
def receiver(tmp_path_factory):
    """One receiver for all tests that leave it as it was, and its room."""
    folder = tmp_path_factory.mktemp("receiver") / "room"
    with Listener(OURS, folder, KEY) as listener:
        yield listener, Spool(folder, KEY)


@contextmanager
def listening(folder, **changes):
    with Listener(replace(OURS, **changes), folder / "room", KEY) as listener:
        yield listener, Spool(folder / "room", KEY)


def run(command, **more):
    return subprocess.run(command, check=False, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, **more)


def call(name, listener, *more, title="PACS", called="LAZARET"):
    """Run one of DCMTK's senders."""
    address = ["-aet", title, "-aec", called, "127.0.0.1", str(listener.port)]
    options = [str(o) for o in more if str(o).startswith(("-", "+")) or Path(str(o)).suffix != ".dcm"]
    files = [str(o) for o in more if str(o) not in options]
    return run([tool(name), *options, *address, *files])


def taken(room):
    """What came, and the room empty again."""
    arrivals = [room.open(name) for name in room.names()]
    for name in room.names():
        room.remove(name)
    return arrivals


def after_meta(data):
    """The bytes of a data set in a file, with its transfer syntax."""
    (length,) = struct.unpack_from("<I", data, 140)
    return data[144 + length :], pydicom.dcmread(
        io.BytesIO(data), stop_before_pixels=True
    ).file_meta.TransferSyntaxUID


def wait(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def made(folder, count, size=128, prefix="f"):
    """Instances of ``size`` x ``size`` pixels of 16 bits, each with its own uid; uid by file."""
    folder.mkdir(exist_ok=True)
    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm"))
    dataset.Rows = dataset.Columns = size
    found = {}
    for number in range(count):
        dataset.PixelData = os.urandom(2 * size * size)
        dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        dataset.save_as(folder / f"{prefix}{number}.dcm")
        found[folder / f"{prefix}{number}.dcm"] = dataset.SOPInstanceUID
    return found


def plain(syntax):
    """A small data set in any transfer syntax, as far as it has no pixels."""
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.SOPClassUID, dataset.SOPInstanceUID = CT, generate_uid()
    dataset.PatientName, dataset.Rows = "Doe^Jane", 7
    return dataset


# ------------------------------------------------------------------ those who may


def test_echoscu_is_answered(receiver):
    assert call("echoscu", receiver[0]).returncode == 0


DCMTK = {
    "CT_small.dcm": (),
    "MR_small_implicit.dcm": ("-xi",),
    "MR_small_bigendian.dcm": ("-xb",),
    "MR_small_RLE.dcm": ("-xr",),
    "JPEG2000.dcm": ("-xw",),
    "MR_small_jp2klossless.dcm": ("-xv",),
    "MR_small_jpeg_ls_lossless.dcm": ("-xt",),
    "SC_rgb_jpeg_dcmtk.dcm": ("-xy",),
    "image_dfl.dcm": ("-xd",),
    "test-SR.dcm": (),
}


@pytest.fixture(scope="module")
def bit_preserving(tmp_path_factory):
    """DCMTK's own receiver, writing what comes as it comes: the oracle. Its folder and port."""
    folder = tmp_path_factory.mktemp("storescp")
    port = free_port()
    command = [tool("storescp"), "+B", "+xa", "-pdu", "131072", "-od", str(folder), str(port)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield folder, port
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", DCMTK)
def test_storescu_stores_bit_for_bit_what_storescp_gets(receiver, bit_preserving, name):
    listener, room = receiver
    path = get_testdata_file(name)
    sent = call("storescu", listener, "-R", *DCMTK[name], path)
    assert sent.returncode == 0, sent.stderr
    (arrival,) = taken(room)
    folder, port = bit_preserving
    address = ["-aet", "PACS", "-aec", "LAZARET", "127.0.0.1", str(port)]
    subprocess.run(["storescu", "-R", *DCMTK[name], *address, path], env=ENVIRONMENT, check=True, timeout=60)
    (theirs,) = folder.iterdir()
    expected = after_meta(theirs.read_bytes())
    theirs.unlink()
    assert after_meta(arrival.body) == expected
    assert (arrival.source, arrival.road) == ("PACS", "dimse")
    assert arrival.instance == pydicom.dcmread(path, force=True).SOPInstanceUID


def test_dcmsend_stores_a_folder(receiver, tmp_path):
    listener, room = receiver
    files = made(tmp_path / "files", 5)
    sent = call("dcmsend", listener, *files)
    assert sent.returncode == 0, sent.stderr
    arrivals = taken(room)
    assert {a.instance for a in arrivals} == set(files.values())
    by_uid = {a.instance: after_meta(a.body)[0] for a in arrivals}
    assert all(pydicom.dcmread(path).PixelData in by_uid[uid] for path, uid in files.items())


def test_pynetdicom_stores_bit_for_bit_in_every_syntax(receiver):
    listener, room = receiver
    for start in range(0, len(STORABLE), 30):
        some = STORABLE[start : start + 30]
        sender = AE("PACS")
        for syntax in some:
            sender.add_requested_context(CT, syntax)
        association = sender.associate("127.0.0.1", listener.port, ae_title="LAZARET")
        assert association.is_established
        for syntax in some:
            dataset = plain(syntax)
            uid = pydicom.uid.UID(syntax)
            little, implicit = uid.is_little_endian, uid.is_implicit_VR
            assert association.send_c_store(dataset).Status == 0, syntax
            (arrival,) = taken(room)
            assert after_meta(arrival.body) == (dsutils.encode(dataset, implicit, little, uid.is_deflated), syntax)
        association.release()


def test_sixteen_senders_at_once_lose_nothing(receiver, tmp_path):
    listener, room = receiver
    files = {n: made(tmp_path / "files", 8, prefix=f"s{n}-") for n in range(16)}
    address = ["-aet", "PACS", "-aec", "LAZARET", "127.0.0.1", str(listener.port)]
    senders = [
        subprocess.Popen([tool("storescu"), *address, *map(str, some)], env=ENVIRONMENT) for some in files.values()
    ]
    assert [s.wait(200) for s in senders] == [0] * 16
    arrivals = taken(room)
    assert len(arrivals) == 128
    sent = {uid: path for some in files.values() for path, uid in some.items()}
    assert all(pydicom.dcmread(sent[a.instance]).PixelData in a.body for a in arrivals)
    assert len({a.instance for a in arrivals}) == 128


# ------------------------------------------------------------------ those who may not


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"called": "OTHER"}, "Called AE Title Not Recognized"),
        ({"title": "OTHER"}, "Calling AE Title Not Recognized"),
    ],
)
def test_wrong_titles_are_rejected_with_their_reason(receiver, names, reason):
    answer = call("echoscu", receiver[0], **names)
    assert answer.returncode != 0
    assert reason in answer.stderr


def test_a_wrong_address_is_rejected_with_its_reason(tmp_path):
    with listening(tmp_path, callers=(Caller("PACS", ("192.0.2.7",)),)) as (listener, _):
        answer = call("echoscu", listener)
    assert answer.returncode != 0
    assert "Calling AE Title Not Recognized" in answer.stderr
    assert listener.counts() == {"rejected_calling": 1}


def test_more_associations_than_allowed_are_told_so(tmp_path):
    with listening(tmp_path, max_associations=1) as (listener, _):
        sender = AE("PACS")
        sender.add_requested_context(CT)
        association = sender.associate("127.0.0.1", listener.port, ae_title="LAZARET")
        answer = call("echoscu", listener)
        assert "Local Limit Exceeded" in answer.stderr
        association.release()
        wait(lambda: call("echoscu", listener).returncode == 0)


def test_beyond_the_watermark_the_sender_sees_that_we_are_out_of_resources(tmp_path):
    with listening(tmp_path, least_free_bytes=1 << 60) as (listener, room):
        sent = call("storescu", listener, "-v", get_testdata_file("CT_small.dcm"))
        assert "Refused: OutOfResources" in sent.stdout + sent.stderr
        assert room.names() == []
        assert call("echoscu", listener).returncode == 0


@pytest.mark.filterwarnings("ignore:Invalid value for VR UI")
def test_a_path_as_instance_uid_is_refused(receiver, tmp_path):
    listener, room = receiver
    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm"))
    dataset.SOPInstanceUID = "../../ESCAPED"
    dataset.save_as(tmp_path / "escape.dcm", enforce_file_format=False)
    sent = call("storescu", listener, "-v", tmp_path / "escape.dcm")
    assert "0x117" in sent.stderr + sent.stdout
    assert room.names() == []
    assert not list(room.folder.parent.rglob("*ESCAPED*"))


# ------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A receiver that wants certificates and a user, and where the PEM files are."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    certificate, key = authority.server()
    client = authority.agent("pacs")
    other = Authority(folder / "other").agent("rogue")
    settings = replace(
        OURS,
        tls=Tls(certificate, key, authority.ca),
        plain_tcp=False,
        identities=(Identity.of("pacs", "s3cret", bytes(16)),),
        workers=1,
    )
    with Listener(settings, folder / "room", KEY) as listener:
        yield listener, Spool(folder / "room", KEY), authority.ca, client, other


def over_tls(secured, who, *more):
    listener, _, ca, _, _ = secured
    certificate, key = who
    files = ["+tls", str(key), str(certificate), "+cf", str(ca)]
    address = ["-aet", "PACS", "-aec", "LAZARET", "127.0.0.1", str(listener.port)]
    command = [tool("storescu"), *files, *more, *address, get_testdata_file("CT_small.dcm")]
    return run(command)


def test_over_tls_with_certificate_and_identity_instances_come_in(secured):
    sent = over_tls(secured, secured[3], "-usr", "pacs", "-pwd", "s3cret", "-rsp")
    assert sent.returncode == 0, sent.stderr
    (arrival,) = taken(secured[1])
    assert pydicom.dcmread(get_testdata_file("CT_small.dcm")).PixelData in arrival.body


@pytest.mark.parametrize("identity", [(), ("-usr", "pacs"), ("-usr", "pacs", "-pwd", "wrong")])
def test_a_missing_or_wrong_identity_is_rejected(secured, identity):
    sent = over_tls(secured, secured[3], *identity)
    assert sent.returncode != 0
    assert "Service Provider (ACSE Related)" in sent.stderr
    assert taken(secured[1]) == []


def test_without_a_certificate_of_ours_nothing_comes_in(secured):
    listener = secured[0]
    before = listener.counts().get("tls_failed", 0)
    assert over_tls(secured, secured[4], "-usr", "pacs", "-pwd", "s3cret").returncode != 0
    anonymous = call("storescu", listener, "+tla", "+cf", secured[2], get_testdata_file("CT_small.dcm"))
    assert anonymous.returncode != 0
    assert call("echoscu", listener).returncode != 0  # plain TCP
    wait(lambda: listener.counts().get("tls_failed", 0) == before + 3)
    assert taken(secured[1]) == []


def test_old_tls_and_weak_ciphers_are_not_spoken(secured):
    need("openssl")
    listener, _, ca, (certificate, key), _ = secured
    base = ["openssl", "s_client", "-connect", f"127.0.0.1:{listener.port}", "-CAfile", str(ca)]
    base += ["-cert", str(certificate), "-key", str(key)]
    ciphers = "DEFAULT:@SECLEVEL=0"
    for options, good in (
        (["-tls1_1", "-cipher", ciphers], False),
        (["-tls1_2", "-cipher", "ECDHE-ECDSA-AES256-SHA"], False),
        (["-tls1_2"], True),
        (["-tls1_3"], True),
    ):
        said = run([*base, *options], input="").stdout
        assert ("Verify return code: 0 (ok)" in said and "Cipher is (NONE)" not in said) is good, options


def test_a_missing_certificate_is_said_at_the_start(tmp_path):
    missing = Tls(tmp_path / "no.crt", tmp_path / "no.key", tmp_path / "no.ca")
    with pytest.raises(ListenerError, match="cannot listen"):
        Listener(replace(OURS, tls=missing, plain_tcp=False), tmp_path / "room", KEY).start()


# ------------------------------------------------------------------ those who mean harm


def cost(pid):
    """Memory in MB and processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6, (int(fields[11]) + int(fields[12])) / ticks


def test_a_unit_of_4_gib_before_an_association_costs_nothing(receiver):
    listener, _ = receiver
    before = [cost(pid) for pid in listener.pids()]
    megabyte = bytes(1 << 20)
    with socket.create_connection(("127.0.0.1", listener.port)) as attacker:
        attacker.sendall(struct.pack(">BBI", 1, 0, 0xFFFFFFFF))
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 600:
                attacker.sendall(megabyte)
                sent += 1
    assert sent < 100  # it was cut
    after = [cost(pid) for pid in listener.pids()]
    assert sum(m for m, _ in after) - sum(m for m, _ in before) < 200
    assert sum(c for _, c in after) - sum(c for _, c in before) < 1.0
    assert call("echoscu", listener).returncode == 0


def test_slow_senders_are_cut_while_others_are_served(tmp_path):
    with listening(tmp_path, request_seconds=3.0, workers=1, max_per_address=40) as (listener, _):
        slow = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(12)]
        began = time.monotonic()
        served = 0
        while slow and time.monotonic() - began < 60:
            for one in list(slow):
                try:
                    one.sendall(b"\1")
                    one.setblocking(False)
                    if one.recv(100)[:1] in (b"", b"\7"):
                        slow.remove(one)
                except BlockingIOError:
                    one.setblocking(True)
                except OSError:
                    slow.remove(one)
            assert call("echoscu", listener).returncode == 0
            served += 1
            time.sleep(0.4)
        assert not slow
        assert served >= 2
        assert listener.counts()["echoed"] == served


def test_strangers_cannot_take_the_places_of_those_who_may(tmp_path):
    with listening(tmp_path, callers=(Caller("PACS", ("127.0.0.1",)),)) as (listener, _):
        strangers = []
        for number in range(40):
            stranger = socket.socket()
            stranger.bind((f"127.0.1.{number + 1}", 0))
            stranger.connect(("127.0.0.1", listener.port))
            strangers.append(stranger)
        assert call("echoscu", listener).returncode == 0
        wait(lambda: listener.counts().get("turned_away", 0) == 24)  # 16 are heard
        for stranger in strangers:
            stranger.close()


# ------------------------------------------------------------------ those who are killed


def whole(room, files):
    """Every file of the room opens and is one of those that were sent."""
    for name in room.names():
        arrival = room.open(name)
        assert any(
            pydicom.dcmread(p).PixelData in arrival.body for p, uid in files.items() if uid == arrival.instance
        )


def answered(output):
    return output.count("Received Store Response (Success)")


def test_a_killed_worker_is_replaced_and_what_was_answered_is_there(tmp_path):
    files = made(tmp_path / "files", 400)  # so many that a test which is late to kill still finds some to come
    with listening(tmp_path, workers=1) as (listener, room):
        (old,) = listener.pids()
        address = ["-aet", "PACS", "-aec", "LAZARET", "127.0.0.1", str(listener.port)]
        sender = subprocess.Popen(
            [tool("storescu"), "-v", *address, *map(str, files)], env=ENVIRONMENT, stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait(lambda: len(room.names()) > 5)
        os.kill(old, signal.SIGKILL)
        output = sender.communicate(timeout=200)[0]
        assert answered(output) <= len(room.names()) <= answered(output) + 1
        assert answered(output) < 400
        whole(room, files)
        wait(lambda: call("echoscu", listener).returncode == 0)
        assert listener.pids() != [old]
        assert listener.counts()["worker_stopped"] == 1


def test_a_killed_agent_takes_its_workers_along_and_what_was_answered_is_there(tmp_path):
    files = made(tmp_path / "files", 40, size=512)
    program = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from agent.pacs.dimse.config import Caller, ListenerSettings
        from agent.pacs.dimse.listener_process import Listener
        settings = ListenerSettings("LAZARET", (Caller("PACS", ("127.0.0.1",)),), plain_tcp=True, port=0, workers=2,
                                    full_at=1.0, least_free_bytes=0)
        with Listener(settings, Path(sys.argv[1]), bytes(range(32))) as listener:
            print(listener.port, *listener.pids(), flush=True)
            time.sleep(120)
    """)
    agent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "room")], cwd=HOME, stdout=subprocess.PIPE, text=True
    )
    try:
        port, *pids = map(int, agent.stdout.readline().split())
        room = Spool(tmp_path / "room", KEY)
        address = ["-aet", "PACS", "-aec", "LAZARET", "127.0.0.1", str(port)]
        sender = subprocess.Popen(
            [tool("storescu"), "-v", *address, *map(str, files)], env=ENVIRONMENT, stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait(lambda: len(room.names()) > 5)
    finally:
        agent.kill()
        agent.wait()
    output = sender.communicate(timeout=200)[0]
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    room.sweep()
    assert {p.name for p in room.folder.iterdir()} == set(room.names())
    assert answered(output) <= len(room.names()) <= answered(output) + 1
    whole(room, files)


def test_stopping_ends_idle_associations_and_closes_the_port(tmp_path):
    listener = Listener(OURS, tmp_path / "room", KEY)
    listener.start()
    sender = AE("PACS")
    sender.add_requested_context(CT)
    association = sender.associate("127.0.0.1", listener.port, ae_title="LAZARET")
    began = time.monotonic()
    listener.stop()
    assert time.monotonic() - began < 100  # and not after the 120 s of an idle association
    wait(lambda: association.is_aborted)
    assert listener.counts()["stopped"] == 1
    with pytest.raises(ListenerError):
        _ = listener.port


def test_events_are_told_as_codes_and_numbers(tmp_path):
    told = []
    with Listener(replace(OURS, workers=1), tmp_path / "room", KEY, told=lambda *what: told.append(what)) as listener:
        call("storescu", listener, get_testdata_file("CT_small.dcm"))
        call("echoscu", listener, title="SECRET")
    assert {code for code, _ in told} == {"accepted", "stored", "released", "rejected_calling"}
    assert all(code in EVENTS and count == 1 for code, count in told)
