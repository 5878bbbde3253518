"""What an archive may do to who pulls from it, by pynetdicom's services and bare sockets."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom.dataset import Dataset
from pynetdicom import AE, _config, evt
from pynetdicom.dsutils import encode
from pynetdicom.sop_class import MRImageStorage, StudyRootQueryRetrieveInformationModelFind

from agent.deidentify.prescan import IMPLICIT_LE
from agent.pacs.archive import ArchiveConfig, ArchiveError, ArchiveQuery
from agent.pacs.dimse.identifiers import identifier, read_match
from agent.pacs.dimse.messages import read_fields
from agent.pacs.dimse.pdu import AssociationEnded
from agent.pacs.dimse.query_retrieve_scu import GET, QueryRetrieveScu
from agent.pacs.dimse.retrieve import PullReport
from agent.pacs.tls import Tls
from tests.support.archives import FOUR, associate, dataset_of, nested, raw, reply, rogue, unit
from tests.support.pacs import uid_of
from tests.support.pki import Authority
from tests.support.pulling import Site, pulled

_config.LOG_HANDLER_LEVEL = "none"
logging.getLogger("pynetdicom").setLevel(logging.CRITICAL)


def test_a_wrong_passcode_is_rejected_and_said(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.agent("site-1")
    words = tmp_path / "passcode"
    with rogue(authority=authority, passcode=b"right") as port:
        remote = replace(
            ArchiveConfig("pacs", "ROGUE", "127.0.0.1", port, "LAZARET"), tls=Tls(certificate, key, authority.ca)
        )
        words.write_text("right\n")
        report = pulled(replace(remote, user="site", passcode_file=words), Site(tmp_path / "1"))
        assert report.fetched == 4
        words.write_text("wrong\n")
        with pytest.raises(ArchiveError, match="the user or the passcode is wrong") as caught:
            pulled(replace(remote, user="site", passcode_file=words), Site(tmp_path / "2"))
    assert "wrong\n" not in str(caught.value)


def ask(port: int, folder: Path, **settings: object) -> tuple[PullReport, Site]:
    remote = ArchiveConfig("pacs", "ROGUE", "127.0.0.1", port, "LAZARET", answer_seconds=30.0, connect_seconds=30.0)
    site = Site(folder)
    return pulled(replace(remote, **settings), site), site  # type: ignore[arg-type]


def uids(numbers: Sequence[int]) -> set[str]:
    return {uid_of("r", number) for number in numbers}


def test_an_instance_nobody_asked_for_is_not_kept(tmp_path: Path) -> None:
    with rogue(sends=lambda _asked: iter([dataset_of(99), *map(dataset_of, FOUR)])) as port:
        report, site = ask(port, tmp_path)
    assert set(site.bodies()) == uids(FOUR)
    assert (report.unasked, report.fetched) == (1, 4)


def test_an_instance_sent_twice_is_kept_once(tmp_path: Path) -> None:
    with rogue(sends=lambda _asked: iter([dataset_of(n) for n in (0, 0, 1, 2, 3, 3)])) as port:
        report, site = ask(port, tmp_path)
    assert set(site.bodies()) == uids(FOUR)
    assert (report.duplicates, report.fetched) == (2, 4)


def test_an_archive_that_hangs_up_midway_is_asked_for_the_rest(tmp_path: Path) -> None:
    calls: list[Sequence[str]] = []

    def sends(asked: Sequence[str]) -> Iterator[Dataset]:
        calls.append(asked)
        end = Dataset()
        end.PatientComments = "hang up"
        yield from ([dataset_of(0), dataset_of(1), end] if len(calls) == 1 else [dataset_of(2), dataset_of(3)])

    with rogue(sends=sends) as port:
        report, site = ask(port, tmp_path)
    assert set(site.bodies()) == uids(FOUR)
    assert report.complete
    assert [set(asked) for asked in calls] == [set(), uids((2, 3))]


def test_what_never_comes_is_counted_and_after_some_runs_given_up(tmp_path: Path) -> None:
    calls: list[Sequence[str]] = []

    def sends(asked: Sequence[str]) -> Iterator[Dataset]:
        calls.append(asked)
        yield from map(dataset_of, FOUR[:3])

    with rogue(sends=sends, changes=_say_count) as port:
        report, site = ask(port, tmp_path, retries=3, runs=2)
        assert (report.fetched, report.missing, report.incomplete, report.complete) == (3, 1, 1, False)
        assert len(calls) == 4  # one that brought three, and three that brought nothing
        remote = ArchiveConfig("pacs", "ROGUE", "127.0.0.1", port, "LAZARET", retries=1, runs=2)
        assert pulled(remote, site).missing == 1
        asked = len(calls)
        report = pulled(remote, site)
        assert (report.unchanged, report.missing, report.incomplete) == (1, 1, 1)
        assert len(calls) == asked
    assert "SECRET" not in repr(report)
    assert uid_of("r", 3) not in repr(report)


def _say_count(level: str, ds: Dataset) -> None:
    if level == "STUDY":
        ds.NumberOfStudyRelatedInstances = 4


def test_a_study_that_lists_fewer_than_it_counts_is_not_complete(tmp_path: Path) -> None:
    def changes(level: str, ds: Dataset) -> None:
        _say_count(level, ds)
        if level == "SERIES":
            ds.NumberOfSeriesRelatedInstances = 6

    with rogue(changes=changes) as port:
        report, site = ask(port, tmp_path)
        assert (report.fetched, report.unlisted, report.complete) == (4, 2, False)
        again = pulled(ArchiveConfig("pacs", "ROGUE", "127.0.0.1", port, "LAZARET"), site)
    assert (again.unchanged, again.had) == (0, 4)


def test_an_instance_larger_than_allowed_is_counted_and_the_others_come(tmp_path: Path) -> None:
    big = [dataset_of(0), dataset_of(1, 2**20), dataset_of(2), dataset_of(3)]
    with rogue(sends=lambda _asked: iter(big)) as port:
        report, site = ask(port, tmp_path, max_bytes=2**19)
    assert set(site.bodies()) == uids((0, 2, 3))
    assert (report.too_large, report.missing, report.fetched) == (1, 1, 3)


def test_an_archive_that_ignores_the_patient_asked_for_is_not_believed(tmp_path: Path) -> None:
    with rogue() as port:
        report, site = ask(port, tmp_path, query=ArchiveQuery(patients=("PAT-1",)))
    assert (report.studies, report.unfit, site.room.names()) == (0, 1, [])


@pytest.mark.filterwarnings("ignore:Invalid value for VR UI", "ignore:The value length")
@pytest.mark.parametrize("uid", ["../../etc/passwd", "1.2.3*", "", "1.02.3", "1." + "2" * 64])
def test_a_uid_that_is_none_is_not_asked_for(tmp_path: Path, uid: str) -> None:
    def changes(level: str, ds: Dataset) -> None:
        if level == "IMAGE" and ds.SOPInstanceUID == uid_of("r", 2):
            ds.SOPInstanceUID = uid

    with rogue(changes=changes) as port:
        report, site = ask(port, tmp_path)
    assert set(site.bodies()) == uids((0, 1, 3))
    assert report.malformed == 1
    assert not report.complete


def _endless(peer: socket.socket) -> None:
    associate(peer)
    one = struct.pack("<HHI", 0x0020, 0x000D, 4) + b"1.2\0"
    while True:
        peer.sendall(reply(0xFF00, one) * 100)


SENTENCES = {
    "that are not DICOM": (
        "garbage", "accepts what nobody proposed", "nests deep", "a length beyond the end",
    ),
    "connection ended": ("closes",),
    "that is too long": ("four gigabytes before the association", "four gigabytes after it"),
    "aborted the association": ("aborts",),
    "does not allow": ("answers another question", "a value in no context", "stores when asked to find"),
    "max_matches": ("never stops",),
    "does not answer": ("says nothing",),
    "failure, status C001": ("fails",),
}  # fmt: skip
MISDEEDS: dict[str, Callable[[socket.socket], object]] = {
    "garbage": lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10),
    "closes": lambda peer: None,
    "four gigabytes before the association": lambda peer: peer.sendall(struct.pack(">BBI", 2, 0, 2**32 - 1)),
    "four gigabytes after it": lambda peer: (associate(peer), peer.sendall(struct.pack(">BBI", 4, 0, 2**32 - 1))),
    "accepts what nobody proposed": lambda peer: (
        peer.recv(65536),
        peer.sendall(unit(2, b"\0\1\0\0" + b" " * 32 + bytes(32) + b"\x21\0\0\x0c\x63\0\0\0\x40\0\0\x041.2\0")),
    ),
    "aborts": lambda peer: (associate(peer), peer.sendall(unit(7, bytes(4)))),
    "nests deep": lambda peer: (associate(peer), peer.sendall(reply(0xFF00, nested(1000)))),
    "a length beyond the end": lambda peer: (
        associate(peer),
        peer.sendall(reply(0xFF00, struct.pack("<HHI", 0x0020, 0x000D, 2**31) + b"1.2.3")),
    ),
    "answers another question": lambda peer: (associate(peer), peer.sendall(reply(0, operation=0x8021))),
    "a value in no context": lambda peer: (associate(peer), peer.sendall(unit(4, struct.pack(">IBB", 2, 77, 3)))),
    "stores when asked to find": lambda peer: (associate(peer), peer.sendall(reply(0, operation=0x0001))),
    "never stops": _endless,
    "says nothing": lambda peer: (associate(peer), list(iter(lambda: peer.recv(65536), b""))),
    "fails": lambda peer: (associate(peer), peer.sendall(reply(0xC001))),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_an_archive_that_misbehaves_is_left_with_a_sentence(tmp_path: Path, misdeed: str) -> None:
    def misbehave(peer: socket.socket) -> None:
        MISDEEDS[misdeed](peer)
        peer.settimeout(3)
        if misdeed != "closes":
            peer.recv(65536)

    silent = misdeed in SENTENCES["does not answer"]
    with raw(misbehave) as port:
        began = time.process_time()
        with pytest.raises(ArchiveError) as caught:
            ask(port, tmp_path, answer_seconds=1.0 if silent else 30.0, retries=1, max_matches=5000)
    assert str(caught.value).startswith("pacs: ")
    assert [part for part, names in SENTENCES.items() if misdeed in names and part in str(caught.value)]
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert time.process_time() - began < 20  # a bound against hanging, not a measurement


def test_storage_roles_are_proposed_as_pynetdicom_reads_them() -> None:
    asked = []
    entity = AE("ROGUE")
    entity.add_supported_context(StudyRootQueryRetrieveInformationModelFind)
    handlers = [(evt.EVT_REQUESTED, lambda event: asked.append(event.assoc.requestor.role_selection))]
    server = entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=handlers)
    remote = ArchiveConfig("pacs", "ROGUE", "127.0.0.1", int(server.server_address[1]), "LAZARET")
    try:
        with pytest.raises(ArchiveError, match="does not offer C-GET"):
            QueryRetrieveScu(remote, [(GET, IMPLICIT_LE), (str(MRImageStorage), "1.2.840.10008.1.2.1")])
    finally:
        server.shutdown()
    assert {str(uid): (role.scu_role, role.scp_role) for uid, role in asked[0].items()} == {
        str(MRImageStorage): (False, True)
    }


class Nobody:
    """A sink that is never offered anything."""

    def offer(self, instance: str) -> int | None:
        raise AssertionError(instance)

    def keep(self, instance: str, body: bytes) -> int:
        raise AssertionError(instance)

    def refuse(self, instance: str) -> None:
        raise AssertionError(instance)


def test_an_archive_that_is_for_ever_busy_with_nothing_is_left(tmp_path: Path) -> None:
    def busy(peer: socket.socket) -> None:
        associate(peer)
        while True:
            peer.sendall(reply(0xFF00, operation=0x8010))

    with raw(busy) as port:
        remote = ArchiveConfig("pacs", "ROGUE", "127.0.0.1", port, "LAZARET", stall_seconds=0.5)
        asked = QueryRetrieveScu(remote, [(GET, IMPLICIT_LE)])
        with pytest.raises(ArchiveError, match="too slowly"):
            asked.get("STUDY", {"StudyInstanceUID": "1.2.3"}, Nobody())


def test_an_answer_that_never_ends_is_cut(tmp_path: Path) -> None:
    sent: list[int] = []

    def endless(peer: socket.socket) -> None:
        associate(peer)
        peer.sendall(reply(0xFF00, bytes(16), last=0))
        value = struct.pack(">IBB", 65538, 1, 0) + bytes(65536)
        while len(sent) < 2000:
            peer.sendall(unit(4, value))
            sent.append(65536)

    with raw(endless) as port, pytest.raises(ArchiveError, match="that is too long"):
        ask(port, tmp_path, retries=1)
    assert sum(sent) < 32 * 2**20


def test_memory_is_not_taken_for_what_is_only_announced(tmp_path: Path) -> None:
    def announce(peer: socket.socket) -> None:
        associate(peer)
        peer.sendall(struct.pack(">BBI", 4, 0, 2**32 - 1) + bytes(2**20))

    tracemalloc.start()
    try:
        with raw(announce) as port, pytest.raises(ArchiveError, match="that is too long"):
            ask(port, tmp_path, retries=1)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


ASKED = {"SOPInstanceUID": "1.2.3", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.4"}
GOOD = encode(identifier("IMAGE", ASKED), True, True) or b""


@given(st.one_of(st.binary(max_size=200), st.tuples(st.integers(0, len(GOOD)), st.binary(max_size=8))))
def test_whatever_an_identifier_holds_it_is_read_or_refused(what: bytes | tuple[int, bytes]) -> None:
    data = what if isinstance(what, bytes) else GOOD[: what[0]] + what[1] + GOOD[what[0] + len(what[1]) :]
    for read in (lambda: read_match(data, ("SOPInstanceUID", "SOPClassUID")), lambda: read_fields(data)):
        with contextlib.suppress(AssociationEnded):
            assert all(isinstance(value, str | bytes) for value in read().values())


def test_an_identifier_is_read_as_it_was_written() -> None:
    assert read_match(GOOD, ("SOPInstanceUID", "SOPClassUID", "PatientID")) == {**ASKED, "PatientID": ""}
