"""The spool and the quarantine: sealed, whole or not at all, and nothing of a patient in a name."""

import os
import time
from dataclasses import replace

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.deidentify.errors import REASONS
from agent.storage.quarantine import Quarantine, QuarantineEntry
from agent.storage.spool import ROADS, AlreadyClaimed, ReceivedFile, Spool, SpoolError, SpoolWriter, room_key

KEY, OTHER = bytes(range(32)), bytes(32)
DOE = ReceivedFile("dimse", "PACS", b"Doe^Jane" * 100, patient_id="P-4711", instance="1.2.3")


@given(
    st.builds(ReceivedFile, st.sampled_from(sorted(ROADS)), st.text(), st.binary(), st.text(), st.text(), st.text())
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_what_is_put_in_comes_out_and_is_forgotten_when_removed(tmp_path, arrival):
    room = Spool(tmp_path / "room", KEY, durable=False)
    name = room.put(arrival)
    assert room.open(name) == arrival
    assert name in room.names()
    room.remove(name)
    room.remove(name)
    assert room.names() == []


def test_neither_names_nor_bytes_on_the_disk_tell_of_a_patient(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    name = room.put(DOE)
    raw = (room.folder / name).read_bytes()
    for secret in (b"Doe^J", b"P-4711", b"PACS", b"1.2.3"):
        assert secret not in raw
        assert secret not in name.encode()
    assert (room.folder / name).stat().st_mode & 0o777 == 0o600
    assert room.folder.stat().st_mode & 0o777 == 0o700


def test_the_body_is_a_plain_aes_gcm_box_bound_to_its_name(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    name = room.put(DOE)
    box = (room.folder / name).read_bytes()[-(12 + len(DOE.body) + 16) :]
    assert AESGCM(KEY).decrypt(box[:12], box[12:], f"{name}/body".encode()) == DOE.body
    with pytest.raises(InvalidTag):
        AESGCM(KEY).decrypt(box[:12], box[12:], b"another/body")


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_a_changed_file_is_never_opened(tmp_path, at, bit):
    room = Spool(tmp_path / "room", KEY, durable=False)
    name = room.put(DOE)
    raw = bytearray((room.folder / name).read_bytes())
    raw[int(at * len(raw))] ^= 1 << bit
    (room.folder / name).write_bytes(raw)
    with pytest.raises(SpoolError):
        room.open(name)
    room.remove(name)


def test_a_cut_a_renamed_and_another_keys_file_are_not_opened(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    name = room.put(DOE)
    with pytest.raises(SpoolError):
        Spool(room.folder, OTHER).open(name)
    raw = (room.folder / name).read_bytes()
    for wrong in (b"", raw[:7], raw[:40], raw[:-1], raw + b"\0"):
        (room.folder / name).write_bytes(wrong)
        with pytest.raises(SpoolError):
            room.open(name)
    (room.folder / ("0" * 32)).write_bytes(raw)
    with pytest.raises(SpoolError):
        room.open("0" * 32)
    with pytest.raises(ValueError, match="not a name"):
        room.open("../" + name)


SENT = replace(DOE, patient_id="")


@pytest.mark.parametrize(
    "said",
    [
        replace(DOE, patient_id="P-4711"),
        replace(SENT, issuer="H"),
        replace(SENT, label="healthy"),
        replace(SENT, road="folder"),
        replace(SENT, road="pull"),
        replace(SENT, source=7),
    ],
)
def test_a_receiver_that_was_taken_over_labels_and_names_nobody(tmp_path, said):
    room = Spool(tmp_path / "room", KEY)
    name = Spool(room.folder, room.deposit()).put(said)
    with pytest.raises(SpoolError, match="no receiver knows"):
        room.open(name)
    assert room.claim(name)[0] is None  # it goes to the quarantine as it is


@pytest.mark.parametrize("head", [b"[]", b"7", b'{"road": "dimse"}', b"{", b"\xff", b"[" * 60_000])
def test_a_head_that_is_none_is_a_file_that_cannot_be_opened(tmp_path, head):
    room = Spool(tmp_path / "room", KEY)
    receiver = Spool(room.folder, room.deposit())._sealer
    box = receiver._box("0" * 32 + "/head", head)
    front = b"LZR2" + len(box).to_bytes(4, "big") + receiver._sealed + receiver._mark("0" * 32, b"x")
    (room.folder / ("0" * 32)).write_bytes(front + box + receiver._box("0" * 32 + "/body", b"x"))
    with pytest.raises(SpoolError):
        room.open("0" * 32)


def test_a_receiver_seals_for_the_room_and_opens_only_what_it_sealed_itself(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    mine, others = (Spool(room.folder, SpoolWriter.of(room.deposit().words())) for _ in range(2))
    waiting, sent, theirs = (
        room.put(SENT),
        mine.put(replace(SENT, instance="1.2.4")),
        others.put(replace(SENT, instance="9")),
    )
    assert room.open(sent) == replace(SENT, instance="1.2.4")
    assert mine.open(sent).body == SENT.body
    for name in (waiting, theirs):
        with pytest.raises(SpoolError):
            mine.open(name)
    with pytest.raises(ValueError, match="no room"):
        mine.deposit()
    deposit = room.deposit()
    assert KEY not in deposit.key + deposit.sealed + deposit.names
    assert "key" not in repr(deposit)
    with pytest.raises(InvalidTag):
        AESGCM(deposit.key).decrypt(deposit.sealed[:12], deposit.sealed[12:], b"deposit")
    with pytest.raises(SpoolError):
        Spool(room.folder, OTHER).open(sent)


def test_an_instance_waits_once_whichever_receiver_it_came_to(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    first, second = (Spool(room.folder, room.deposit()) for _ in range(2))
    name = first.put(SENT)
    assert second.put(SENT) == name
    assert second.put(replace(SENT, body=b"another")) != name
    assert first.holds("1.2.3", [("dimse", "PACS")])
    assert len(room.names()) == 2


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_a_changed_file_of_a_receiver_is_never_opened(tmp_path, at, bit):
    room = Spool(tmp_path / "room", KEY, durable=False)
    name = Spool(room.folder, room.deposit(), durable=False).put(SENT)
    raw = bytearray((room.folder / name).read_bytes())
    raw[int(at * len(raw))] ^= 1 << bit
    (room.folder / name).write_bytes(raw)
    with pytest.raises(SpoolError):
        room.open(name)
    for cut in (b"", bytes(raw[:7]), bytes(raw[:60]), bytes(raw[:120]), bytes(raw[:-1])):
        (room.folder / name).write_bytes(cut)
        with pytest.raises(SpoolError):
            room.open(name)
    room.remove(name)


def test_names_are_in_the_order_of_arrival(tmp_path):
    room = Spool(tmp_path / "room", KEY, durable=False)
    put = [room.put(replace(DOE, instance="")) for _ in range(20)]
    assert room.names() == put


def test_an_instance_that_is_sent_twice_waits_once_and_one_with_other_bytes_beside_it(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    name = room.put(DOE)
    assert room.put(DOE) == name
    other = room.put(replace(DOE, body=b"another"))
    assert sorted(room.names()) == sorted({name, other})
    assert room.open(name) == DOE
    theirs = [(DOE.road, DOE.source)]
    assert room.holds("1.2.3", theirs)
    assert not room.holds("1.2.4", theirs)
    assert not room.holds("1.2.3", [("dimse", "SOMEBODY ELSE"), ("pull", DOE.source)])


def test_nobody_blocks_or_replaces_what_another_one_sends_under_the_same_uid(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    junk = room.put(replace(DOE, source="EVIL", body=b"junk"))
    real = room.put(DOE)
    assert junk != real
    assert {room.open(name).body for name in room.names()} == {b"junk", DOE.body}


def test_what_one_process_works_with_no_other_takes(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    name = room.put(DOE)
    arrival, descriptor = room.claim(name)
    assert arrival == DOE
    with pytest.raises(AlreadyClaimed):
        Spool(tmp_path / "room", KEY).claim(name)
    os.close(descriptor)
    _, descriptor = Spool(tmp_path / "room", KEY).claim(name)
    room.remove(name)
    os.close(descriptor)
    with pytest.raises(AlreadyClaimed):
        room.claim(name)


def test_half_written_files_are_no_arrivals_and_are_swept_when_nobody_writes_them_any_more(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    name = room.put(DOE)
    old, young = (room.folder / f".{letter * 32}.part" for letter in "ab")
    old.write_bytes(b"torn")
    young.write_bytes(b"torn")
    os.utime(old, (time.time() - 1000,) * 2)
    assert room.names() == [name]
    assert room.sweep(time.time() - 600) == 1
    assert young.exists()
    assert room.sweep() == 1
    assert room.names() == [name]


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    room = Spool(tmp_path / "room", KEY)
    room.folder.rmdir()
    (tmp_path / "room").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"."):
        room.put(DOE)


def test_the_rooms_key_is_another_one_for_every_purpose():
    keys = {room_key(KEY), room_key(KEY, "other"), room_key(OTHER), KEY}
    assert len(keys) == 4
    assert all(len(key) == 32 for key in keys)


def test_a_refused_arrival_is_kept_with_its_reason_and_counted_up(tmp_path):
    room, quarantine = Spool(tmp_path / "room", KEY), Quarantine(tmp_path / "quarantine", KEY)
    name = quarantine.name_of("", DOE, "d" * 32)
    quarantine.refuse(name, "malformed", DOE, "d" * 32)
    assert quarantine.open(name) == DOE
    assert quarantine.source(name) == ("dimse", "PACS")
    assert quarantine.entry(name) == QuarantineEntry(name, "malformed", 1)
    quarantine.refuse(name, "truncated", DOE, "d" * 32)
    assert quarantine.entries() == [QuarantineEntry(name, "truncated", 2)]
    assert quarantine.counts() == {"truncated": 1}
    with pytest.raises(ValueError, match="unknown reason"):
        quarantine.refuse(name, "Doe^Jane", DOE, "d" * 32)
    other = replace(DOE, body=b"other bytes under the same UID")
    quarantine.refuse(quarantine.name_of("", other, "e" * 32), "conflicting_instance", other, "e" * 32)
    assert len(quarantine.entries()) == 2, "nothing that was refused is lost to what is refused later"
    with pytest.raises(SpoolError):
        quarantine.refuse(name, "truncated", other, "e" * 32)
    assert quarantine.open(name) == DOE
    torn = room.put(DOE)
    quarantine.move_from(room, torn, "unreadable")
    assert room.names() == []
    assert quarantine.counts() == {"conflicting_instance": 1, "truncated": 1, "unreadable": 1}
    for entry in quarantine.entries():
        quarantine.remove(entry.name)
    assert quarantine.entries() == []
    assert "truncated" in REASONS
