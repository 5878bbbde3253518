"""The acceptor by itself, over a socket pair: pynetdicom's codecs are the other side, and the oracle."""

import io
import math
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pydicom
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydicom.uid import UID as Uid
from pynetdicom import AllStoragePresentationContexts, build_context
from pynetdicom.dimse_messages import C_ECHO_RQ, C_STORE_RQ
from pynetdicom.dimse_primitives import C_ECHO, C_STORE
from pynetdicom.pdu import A_ASSOCIATE_AC, A_ASSOCIATE_RQ
from pynetdicom.pdu_primitives import (
    A_ASSOCIATE,
    ImplementationClassUIDNotification,
    MaximumLengthNotification,
    UserIdentityNegotiation,
)

from agent.pacs.dimse.acceptor import STORABLE, STORAGE, Accepted, Rejected, negotiate
from agent.pacs.dimse.config import Caller, Identity, ListenerSettings, plain_address
from agent.pacs.dimse.messages import UID, Command, file_head, read_command, response
from agent.pacs.dimse.pdu import AssociationEnded, PduStream
from agent.pacs.dimse.storage_scp import EVENTS, Association, EventTally, Services
from agent.pacs.tls import Tls
from agent.storage.spool import Spool

pytestmark = pytest.mark.filterwarnings("ignore:Invalid value for VR UI")  # by pydicom, in the codec of requests
CT, VERIFY = "1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.1.1"
EXPLICIT, IMPLICIT, JPEG2000 = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2", "1.2.840.10008.1.2.4.90"
INSTANCE = "1.2.3.4.5"
OURS = ListenerSettings(
    "LAZARET", (Caller("PACS", ("127.0.0.1", "10.1.0.0/16")),), plain_tcp=True, full_at=1.0, least_free_bytes=0
)


def request(called="LAZARET", calling="PACS", contexts=((CT, (EXPLICIT,)), (VERIFY, (IMPLICIT,))), identity=None):
    """An A-ASSOCIATE-RQ as pynetdicom encodes it; context ids are 1, 3, 5 ..."""
    said = A_ASSOCIATE()
    said.application_context_name = "1.2.840.10008.3.1.1.1"
    said.calling_ae_title, said.called_ae_title = calling, called
    length, implementation = MaximumLengthNotification(), ImplementationClassUIDNotification()
    length.maximum_length_received = 16382
    implementation.implementation_class_uid = Uid("1.2.3")
    said.user_information = [length, implementation, *([identity] if identity else [])]
    proposed = []
    for number, (abstract, syntaxes) in enumerate(contexts):
        context = build_context(abstract, list(syntaxes))
        context.context_id = 2 * number + 1
        proposed.append(context)
    said.presentation_context_definition_list = proposed
    unit = A_ASSOCIATE_RQ()
    unit.from_primitive(said)
    return unit.encode()


def unit(*values):
    """A P-DATA-TF of (context, control, bytes)."""
    body = b"".join(struct.pack(">IBB", len(d) + 2, context, control) + d for context, control, d in values)
    return struct.pack(">BBI", 4, 0, len(body)) + body


def store_command(sop_class=CT, instance=INSTANCE, message=7):
    """A C-STORE-RQ's command set, by hand as far as pynetdicom would refuse to encode it."""

    def element(number, value):
        return struct.pack("<HHI", 0, number, len(value)) + value

    def uid(value):
        return value.encode() + b"\0" * (len(value) % 2)

    body = element(0x2, uid(sop_class)) + element(0x100, b"\1\0") + element(0x110, struct.pack("<H", message))
    body += element(0x700, b"\0\0") + element(0x800, b"\0\0") + element(0x1000, uid(instance))
    return element(0, struct.pack("<I", len(body))) + body


def store(data=b"\x08\0\x16\0UI\2\0" + b"1\0", **said):
    """A whole C-STORE in context 1."""
    return unit((1, 3, store_command(**said))) + unit((1, 2, data))


RELEASE = struct.pack(">BBII", 5, 0, 4, 0)
ABORT = struct.pack(">BBIBBBB", 7, 0, 4, 0, 0, 0, 0)


class Talk:
    """A connection to an association in a thread."""

    def __init__(self, folder: Path, ours=OURS, address="127.0.0.1", over=False):
        self.room, self.tally = Spool(folder / "room", bytes(32), durable=False), EventTally()
        self.services = Services(ours, self.room, self.tally)
        self.stop, self.error = threading.Event(), None
        self.near, far = socket.socketpair()
        self.near.settimeout(20)
        self.thread = threading.Thread(target=self._serve, args=(far, address, over), daemon=True)
        self.thread.start()

    def _serve(self, far, address, over):
        try:
            Association(PduStream(far), address, self.services, self.stop.is_set).serve(over=over)
        except BaseException as error:
            self.error = error
            raise

    def say(self, *parts):
        self.near.sendall(b"".join(parts))
        return self

    def hear(self):
        """The next unit: its type and body; None at the end."""
        head = self._exactly(6)
        return None if head is None else (head[0], self._exactly(int.from_bytes(head[2:])))

    def _exactly(self, count):
        data = b""
        while len(data) < count:
            try:
                more = self.near.recv(count - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                return None
            data += more
        return data

    def rest(self):
        """All further units, until the other side closes."""
        units = []
        while (one := self.hear()) is not None:
            units.append(one)
            if one[0] in (3, 6, 7):
                self.near.shutdown(socket.SHUT_WR)
        self.thread.join(200)
        assert not self.thread.is_alive()
        return units

    def status(self):
        kind, body = self.hear()
        assert kind == 4
        return status_of(body)


def status_of(body):
    """By pydicom."""
    return pydicom.filereader.read_dataset(io.BytesIO(body[6:]), True, True).Status


# ------------------------------------------------------------------ messages


@given(st.integers(0, 65535), st.text("0123456789", min_size=1, max_size=20).map(lambda s: "1.2." + str(int(s))))
def test_a_command_set_of_pynetdicom_is_read(message, instance):
    primitive = C_STORE()
    primitive.MessageID, primitive.Priority = message, 2
    primitive.AffectedSOPClassUID, primitive.AffectedSOPInstanceUID = CT, instance
    primitive.DataSet = io.BytesIO(b"12")
    encoded = C_STORE_RQ()
    encoded.primitive_to_message(primitive)
    fragments = [pdv for data in encoded.encode_msg(1, 16382) for _, pdv in data.presentation_data_value_list]
    command = b"".join(f[1:] for f in fragments if f[0] & 1)
    assert read_command(command) == Command(1, message, True, CT, instance)
    echo = C_ECHO()
    echo.MessageID, echo.AffectedSOPClassUID = message, VERIFY
    encoded = C_ECHO_RQ()
    encoded.primitive_to_message(echo)
    (data,) = encoded.encode_msg(1, 16382)
    assert read_command(data.presentation_data_value_list[0][1][1:]) == Command(0x30, message, False, VERIFY, "")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_command_set_or_end_the_association(data):
    try:
        assert read_command(data).message < 1 << 16
    except AssociationEnded as end:
        if end.code != "malformed":
            raise


@pytest.mark.parametrize("status", [0, 0xA700, 0x0117])
def test_a_response_is_read_by_pydicom(status):
    body = response(5, Command(1, 513, True, CT, INSTANCE), status)
    assert (body[0], int.from_bytes(body[2:6]), body[10], body[11]) == (4, len(body) - 6, 5, 3)
    read = pydicom.filereader.read_dataset(io.BytesIO(body[12:]), True, True)
    assert (read.CommandField, read.MessageIDBeingRespondedTo, read.Status) == (0x8001, 513, status)
    assert (read.AffectedSOPClassUID, read.AffectedSOPInstanceUID, read.CommandDataSetType) == (CT, INSTANCE, 0x101)
    assert read.CommandGroupLength == len(body) - 12 - 12


@given(st.sampled_from(sorted(STORAGE)), st.sampled_from(STORABLE), st.text("AZ09_", min_size=1, max_size=16))
def test_the_head_of_a_file_is_what_pydicom_reads(sop_class, syntax, title):
    head = file_head(Command(1, 1, True, sop_class, INSTANCE), syntax, title)
    assert head[:128] == bytes(128)
    meta = pydicom.dcmread(io.BytesIO(head)).file_meta
    assert meta.FileMetaInformationGroupLength == len(head) - 132 - 12
    assert (meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID) == (sop_class, INSTANCE)
    assert (meta.TransferSyntaxUID, meta.SourceApplicationEntityTitle) == (syntax, title)


@given(st.one_of(st.text("0123456789.", max_size=70), st.text(max_size=10)))
def test_what_is_a_uid_here_is_one_for_pydicom(text):
    if UID.fullmatch(text):
        assert Uid(text).is_valid
        assert "/" not in text


# ------------------------------------------------------------------ negotiation


@pytest.mark.parametrize(
    ("said", "address", "told"),
    [
        ({"called": "OTHER"}, "127.0.0.1", (1, 1, 7)),
        ({"calling": "OTHER"}, "127.0.0.1", (1, 1, 3)),
        ({}, "127.0.0.2", (1, 1, 3)),
        ({"calling": "OTHER", "called": "OTHER"}, "127.0.0.1", (1, 1, 3)),
    ],
)
def test_who_is_not_listed_as_a_pair_is_rejected_with_the_standards_reason(said, address, told):
    answer = negotiate(request(**said), address, OURS)
    assert isinstance(answer, Rejected)
    assert answer.told == told
    assert answer.code in EVENTS


def test_a_title_is_good_from_its_own_address_only():
    two = replace(OURS, callers=(Caller("PACS", ("127.0.0.1",)), Caller("CT1", ("10.0.0.0/8",))))
    assert isinstance(negotiate(request(calling="CT1"), "10.9.9.9", two), Accepted)
    assert isinstance(negotiate(request(calling="CT1"), "127.0.0.1", two), Rejected)
    assert isinstance(negotiate(request(calling="PACS"), "10.9.9.9", two), Rejected)


def test_a_wrong_protocol_version_and_another_application_are_rejected():
    raw = request()
    assert negotiate(raw[:6] + b"\0\2" + raw[8:], "127.0.0.1", OURS).told == (1, 2, 2)
    assert negotiate(raw.replace(b"1.2.840.10008.3.1.1.1", b"1.2.840.10008.3.1.1.9"), "127.0.0.1", OURS).told == (
        1,
        1,
        2,
    )


def test_contexts_are_answered_one_by_one_and_pynetdicom_reads_the_answer():
    proposed = (
        (CT, (JPEG2000, EXPLICIT)),
        (VERIFY, (IMPLICIT,)),
        ("1.2.840.10008.5.1.4.1.2.2.1", (IMPLICIT,)),  # a query
        (CT, ("1.2.840.10008.1.2.4.94",)),  # JPIP: the pixels would be elsewhere
        (CT, (IMPLICIT,)),
    )
    answer = negotiate(request(contexts=proposed), "10.1.2.3", OURS)
    assert dict(answer.contexts) == {1: (CT, JPEG2000), 3: (VERIFY, IMPLICIT), 9: (CT, IMPLICIT)}
    read = A_ASSOCIATE_AC()
    read.decode(answer.reply)
    assert [(c.context_id, c.result) for c in read.presentation_context] == [(1, 0), (3, 0), (5, 3), (7, 4), (9, 0)]
    assert read.user_information.maximum_length == OURS.max_pdu


def test_every_storage_class_is_taken_in_every_syntax_that_can_be_stored():
    classes = [str(c.abstract_syntax) for c in AllStoragePresentationContexts]
    for start in range(0, len(classes), 128):
        some = classes[start : start + 128]
        answer = negotiate(request(contexts=[(c, (EXPLICIT,)) for c in some]), "127.0.0.1", OURS)
        assert [c for c, _ in answer.contexts.values()] == some
    answer = negotiate(request(contexts=[(CT, (s,)) for s in STORABLE]), "127.0.0.1", OURS)
    assert tuple(s for _, s in answer.contexts.values()) == STORABLE


def shown(kind, name=b"pacs", passcode=b"s3cret", ask=True):
    item = UserIdentityNegotiation()
    item.user_identity_type, item.positive_response_requested = kind, ask
    item.primary_field, item.secondary_field = name, passcode
    return item


def test_a_required_identity_must_be_shown_and_be_right(tmp_path):
    tls = Tls(tmp_path, tmp_path, tmp_path)
    strict = replace(OURS, tls=tls, plain_tcp=False, identities=(Identity.of("pacs", "s3cret", bytes(16)),))
    right = negotiate(request(identity=shown(2)), "127.0.0.1", strict)
    assert isinstance(right, Accepted)
    read = A_ASSOCIATE_AC()
    read.decode(right.reply)
    assert read.user_information.user_identity.response == b""
    for wrong in (None, shown(2, passcode=b"S3cret"), shown(2, name=b"root"), shown(1, passcode=b""), shown(3)):
        assert negotiate(request(identity=wrong), "127.0.0.1", strict).told == (1, 2, 1)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_mutated_request_is_answered_or_ends_the_association(data):
    raw = bytearray(request())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(42, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        assert isinstance(negotiate(bytes(raw), "127.0.0.1", OURS), Accepted | Rejected)
    except AssociationEnded as end:
        if end.code != "malformed":
            raise


def test_a_request_of_nothing_but_items_costs_little():
    body = b"\0\1\0\0" + b"LAZARET".ljust(16) + b"PACS".ljust(16) + bytes(32)
    for item in (b"\x21\0\0\0", b"\x50\0\0\0", b"\x20\0\0\4\1\0\0\0", b"\x50\0\0\4\x51\0\0\0"):
        raw = struct.pack(">BBI", 1, 0, 0) + body + item * ((65536 - len(body)) // len(item))
        began = time.process_time()
        with pytest.raises(AssociationEnded):
            negotiate(raw, "127.0.0.1", OURS)
        assert time.process_time() - began < 1.0  # the bound for a hostile sender


def test_settings_refuse_what_would_open_the_door():
    for wrong in (
        {"plain_tcp": False},
        {"full_at": math.nan},
        {"idle_seconds": math.nan},
        {"pdu_seconds": math.inf},
        {"identities": (Identity.of("a", "b", bytes(16)),)},
        {"max_pdu": 1 << 30},
        {"ae_title": "BACK\\SLASH"},
        {"ae_title": "SEVENTEEN_LETTERS"},
    ):
        with pytest.raises(ValueError, match=r"."):
            replace(OURS, **wrong)
    for addresses in ((), ("pacs.example",), ("10.0.0.1/8",)):
        with pytest.raises(ValueError, match=r"."):
            Caller("PACS", addresses)
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_address("fe80::1%eth0") == "fe80::1"


# ------------------------------------------------------------------ one association


def opened(tmp_path, **said):
    talk = Talk(tmp_path, **said).say(request())
    assert talk.hear()[0] == 2
    return talk


def test_instances_are_in_the_room_byte_for_byte_when_success_is_answered(tmp_path):
    talk = opened(tmp_path)
    data = bytes(range(256)) * 40
    command = store_command()
    cuts = [unit((1, 1, command[:30])), unit((1, 3, command[30:]), (1, 0, data[:11])), unit((1, 0, data[11:5000]))]
    talk.say(*cuts, unit((1, 0, b""), (1, 2, data[5000:])))
    assert talk.status() == 0
    (name,) = talk.room.names()
    arrival = talk.room.open(name)
    assert arrival.body.endswith(data)
    assert arrival.body[: -len(data)] == file_head(Command(1, 7, True, CT, INSTANCE), EXPLICIT, "PACS")
    assert (arrival.road, arrival.source, arrival.instance) == ("dimse", "PACS", INSTANCE)
    assert talk.say(RELEASE).rest() == [(6, bytes(4))]
    assert talk.tally.counts() == {"accepted": 1, "stored": 1, "released": 1}


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [
        ({"instance": "../../ESCAPED"}, 0x0117, "refused_uid"),
        ({"instance": "1.2.03"}, 0x0117, "refused_uid"),
        ({"instance": ""}, 0x0117, "refused_uid"),
        ({"instance": "1." + "2" * 63}, 0x0117, "refused_uid"),
        ({"sop_class": "1.2.840.10008.5.1.4.1.1.4"}, 0x0122, "refused_class"),
        ({"data": b""}, 0xC000, "refused_empty"),
        ({"data": bytes(200_000)}, 0xA700, "refused_large"),
    ],
)
def test_a_refused_instance_leaves_nothing_and_the_next_one_is_taken(tmp_path, bad, status, code):
    talk = opened(tmp_path, ours=replace(OURS, max_bytes=150_000))
    assert talk.say(store(**bad)).status() == status
    assert talk.room.names() == []
    assert talk.say(store()).status() == 0
    assert len(talk.room.names()) == 1
    assert talk.tally.counts()[code] == 1
    assert not list(tmp_path.rglob("*ESCAPED*"))


def test_what_all_associations_hold_together_is_bounded_and_given_back(tmp_path):
    talk = opened(tmp_path, ours=replace(OURS, memory_bytes=100_000))
    talk.say(unit((1, 3, store_command())), unit((1, 0, bytes(90_000))))
    other = Talk(tmp_path / "other")
    other.services.budget = talk.services.budget
    other.say(request()).hear()
    while (
        talk.services.budget._left >= 20_000
    ):  # until the first one's bytes have arrived; taking would be in its way
        time.sleep(0.01)
    assert other.say(store(bytes(20_000))).status() == 0xA700
    assert other.tally.counts()["refused_memory"] == 1
    talk.near.close()
    talk.thread.join(200)
    assert other.say(store(bytes(90_000))).status() == 0


@pytest.mark.parametrize("full", [{"least_free_bytes": 1 << 60}, {"full_at": 1e-9}])
def test_beyond_the_watermark_nothing_is_written_and_the_association_goes_on(tmp_path, full):
    talk = opened(tmp_path, ours=replace(OURS, **full))
    assert talk.say(store(bytes(10_000))).status() == 0xA700
    assert talk.say(store()).status() == 0xA700
    assert talk.room.names() == []
    assert talk.say(unit((3, 3, echo()))).hear()[0] == 4
    assert talk.tally.counts()["refused_disk"] == 2


def test_a_failing_disk_is_told_to_the_sender(tmp_path):
    talk = opened(tmp_path)
    talk.room.folder.rmdir()
    talk.room.folder.write_text("no folder any more")
    assert talk.say(store()).status() == 0xA700


def echo():
    said = C_ECHO()
    said.MessageID = 1
    encoded = C_ECHO_RQ()
    encoded.primitive_to_message(said)
    (data,) = encoded.encode_msg(3, 16382)
    return data.presentation_data_value_list[0][1][1:]


WRONG = {
    "data before the command": unit((1, 2, b"12")),
    "a context nobody agreed on": unit((9, 3, store_command())),
    "the command in two contexts": unit((1, 1, store_command()[:10])) + unit((3, 3, store_command()[10:])),
    "a command within the data": unit((1, 3, store_command())) + unit((1, 3, store_command())),
    "data in another context": unit((1, 3, store_command())) + unit((3, 2, b"12")),
    "two messages in one unit": unit((3, 3, echo()), (3, 3, echo())),
    "unknown bits in the header": unit((1, 7, store_command())),
    "a value longer than its unit": struct.pack(">BBIIBB", 4, 0, 6, 100, 1, 3),
    "a value without its header": struct.pack(">BBII", 4, 0, 4, 1),
    "a unit without values": struct.pack(">BBI", 4, 0, 0),
    "a C-STORE where verification was agreed": unit((3, 3, store_command())),
    "a C-ECHO where storage was agreed": unit((1, 3, echo())),
    "an endless command": unit((1, 1, bytes(20_000))),
    "a second request": request(),
    "a release within a message": unit((1, 3, store_command())) + RELEASE,
    "a long release": struct.pack(">BBI", 5, 0, 8) + bytes(8),
    "a unit of unknown type": struct.pack(">BBI", 9, 0, 4) + bytes(4),
    "an unit of 4 GiB": struct.pack(">BBI", 4, 0, 0xFFFFFFFF),
    "a response": unit((1, 3, store_command().replace(b"\0\1\2\0\0\0\1\0", b"\0\1\2\0\0\0\1\x80"))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_protocol_forbids_is_answered_by_an_abort(tmp_path, wrong):
    talk = opened(tmp_path)
    said = talk.say(WRONG[wrong]).rest()
    assert [kind for kind, _ in said if kind != 4] == [7]
    assert said[-1][0] == 7
    assert talk.room.names() == []
    assert talk.error is None


@pytest.mark.parametrize(
    "first", [unit((1, 3, b"12")), RELEASE, struct.pack(">BBI", 1, 0, 0xFFFFFFFF), b"GET / HTTP/1.1\r\n"]
)
def test_nothing_but_a_request_opens_an_association(tmp_path, first):
    talk = Talk(tmp_path).say(first)
    assert [kind for kind, _ in talk.rest()] == [7]
    assert "accepted" not in talk.tally.counts()


def test_one_too_many_is_told_so_and_a_stranger_is_rejected_without_being_decoded(tmp_path):
    assert Talk(tmp_path, over=True).say(request()).rest() == [(3, b"\0\2\3\2")]
    unreadable = struct.pack(">BBI", 1, 0, 100) + bytes(100)
    assert Talk(tmp_path, address="192.0.2.1").say(unreadable).rest() == [(3, b"\0\1\1\3")]


def test_who_sends_a_byte_now_and_then_is_cut_at_the_deadline(tmp_path):
    quick = replace(OURS, request_seconds=1.0, pdu_seconds=1.0)
    for before, slow in ((b"", request()), (request(), store())):
        talk = Talk(tmp_path, ours=quick).say(before)
        if before:
            talk.hear()
        for byte in slow:
            try:
                talk.say(bytes([byte]))
            except OSError:
                break
            if not talk.thread.is_alive() or "too_slow" in talk.tally.counts():
                break
            time.sleep(0.1)
        else:
            pytest.fail("it was heard to its last byte")
        assert talk.rest()[-1][0] == 7
        assert talk.tally.counts()["too_slow"] == 1


def test_an_idle_association_is_ended_and_a_stopping_receiver_finishes_the_message(tmp_path):
    talk = opened(tmp_path, ours=replace(OURS, idle_seconds=1.0))
    assert [kind for kind, _ in talk.rest()] == [7]
    assert talk.tally.counts()["idle"] == 1
    talk = opened(tmp_path)
    before = talk.services.budget._left
    talk.say(unit((1, 3, store_command())), unit((1, 0, b"12")))
    while talk.services.budget._left == before:  # until it is in the middle of the message
        time.sleep(0.01)
    talk.stop.set()
    time.sleep(1.5)
    assert talk.say(unit((1, 2, b"34"))).status() == 0
    assert talk.rest() == [(7, bytes(4))]
    assert talk.tally.counts()["stopped"] == 1


SESSION = request() + store() + unit((3, 3, echo())) + store(bytes(300)) + RELEASE


@settings(
    deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_whatever_bytes_come_the_association_ends_cleanly(tmp_path, data):
    raw = bytearray(SESSION)
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(raw)))
        kind = data.draw(st.integers(0, 2))
        patch = data.draw(st.binary(max_size=12))
        if kind == 0:
            raw[at : at + len(patch)] = patch
        elif kind == 1:
            raw[at:at] = patch
        else:
            del raw[at : at + data.draw(st.integers(1, 40))]
    talk = Talk(tmp_path)
    before = set(talk.room.names())
    talk.say(bytes(raw))
    talk.near.shutdown(socket.SHUT_WR)
    units = [one for one in iter(talk.hear, None)]
    talk.thread.join(200)
    assert not talk.thread.is_alive()
    assert talk.error is None
    assert {kind for kind, _ in units} <= {2, 3, 4, 6, 7}
    stored = set(talk.room.names()) - before
    assert len(stored) == talk.tally.counts().get("stored", 0)
    for name in stored:
        assert talk.room.open(name).body[128:132] == b"DICM"
        talk.room.remove(name)
    assert talk.services.budget.take(OURS.memory_bytes)  # everything was given back
    talk.near.close()
