"""Archives that misbehave: pynetdicom's services with a will of their own, and bare sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian
from pynetdicom import AE, evt
from pynetdicom.pdu import A_ASSOCIATE_AC, A_ASSOCIATE_RQ
from pynetdicom.sop_class import (
    MRImageStorage,
    StudyRootQueryRetrieveInformationModelFind,
    StudyRootQueryRetrieveInformationModelGet,
    StudyRootQueryRetrieveInformationModelMove,
)

from agent.pacs.tls import Tls
from tests.support.pacs import uid_of
from tests.support.pki import Authority


def dataset_of(number: int, size: int = 64) -> Dataset:
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.SOPClassUID, ds.SOPInstanceUID = MRImageStorage, uid_of("r", number)
    ds.StudyInstanceUID, ds.SeriesInstanceUID = uid_of("rs"), uid_of("rse")
    ds.PatientID, ds.PatientName, ds.Modality = "SECRET-7", "Geheim^Greta", "MR"
    ds.BitsAllocated = 16
    ds.PixelData = bytes(size)
    ds["PixelData"].VR = "OW"
    return ds


FOUR = tuple(range(4))


Changes = Callable[[str, Dataset], None]


def finder(
    listed: Sequence[int], changes: Changes = lambda _level, _ds: None
) -> Callable[[evt.Event], Iterator[tuple[int, Dataset | None]]]:
    """Answers C-FIND: one study, one series, these instances, each answer changed as a test wants."""

    def found(event: evt.Event) -> Iterator[tuple[int, Dataset | None]]:
        level = event.identifier.QueryRetrieveLevel
        for number in listed if level == "IMAGE" else [0]:
            answer, whole = Dataset(), dataset_of(number)
            for element in event.identifier:
                setattr(answer, element.keyword, whole.get(element.keyword, ""))
            answer.QueryRetrieveLevel = level
            changes(level, answer)
            yield 0xFF00, answer
        yield 0x0000, None

    return found


@contextlib.contextmanager
def rogue_move(status: int) -> Iterator[int]:
    """Lists four, and answers every C-MOVE with a status."""

    def moved(_event: evt.Event) -> Iterator[object]:
        yield (None, None) if status == 0xA801 else ("127.0.0.1", 1)
        yield 0

    entity = AE("ROGUE")
    entity.add_supported_context(StudyRootQueryRetrieveInformationModelFind)
    entity.add_supported_context(StudyRootQueryRetrieveInformationModelMove)
    handlers = [(evt.EVT_C_FIND, finder(FOUR)), (evt.EVT_C_MOVE, moved)]
    server = entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=handlers)
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()


@contextlib.contextmanager
def rogue(
    *,
    listed: Sequence[int] = FOUR,
    sends: Callable[[Sequence[str]], Iterator[Dataset]] | None = None,
    changes: Changes = lambda _level, _ds: None,
    authority: Authority | None = None,
    passcode: bytes = b"",
) -> Iterator[int]:
    """A query/retrieve service by pynetdicom that answers what a test wants; its port.

    ``sends`` gets the SOP Instance UIDs that were asked for (none: the whole series).
    """

    def got(event: evt.Event) -> Iterator[object]:
        asked = event.identifier.get("SOPInstanceUID", [])
        asked = [asked] if isinstance(asked, str) else list(asked)
        if sends is not None:
            images = list(sends(asked))
        else:
            images = [ds for ds in map(dataset_of, listed) if not asked or ds.SOPInstanceUID in asked]
        yield len(images)
        for ds in images:
            if ds.get("PatientComments") == "hang up":
                event.assoc.abort()
                return
            yield 0xFF00, ds

    def known(event: evt.Event) -> tuple[bool, None]:
        return event.secondary_field == passcode, None

    entity = AE("ROGUE")
    entity.add_supported_context(StudyRootQueryRetrieveInformationModelFind)
    entity.add_supported_context(StudyRootQueryRetrieveInformationModelGet)
    entity.add_supported_context(MRImageStorage, ExplicitVRLittleEndian, scu_role=True, scp_role=True)
    handlers = [(evt.EVT_C_FIND, finder(listed, changes)), (evt.EVT_C_GET, got)]
    if passcode:
        handlers.append((evt.EVT_USER_ID, known))
    context = Tls(*authority.server("rogue"), authority.ca).context() if authority else None
    server = entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=handlers, ssl_context=context)
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()


@contextlib.contextmanager
def raw(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does what ``answer`` does with each connection; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    peer, _ = server.accept()
                    with peer:
                        answer(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            stop.set()
            with contextlib.suppress(OSError), socket.create_connection(server.getsockname(), timeout=1):
                pass
            server.close()
            thread.join(5)


def unit(kind: int, body: bytes) -> bytes:
    return struct.pack(">BBI", kind, 0, len(body)) + body


def associate(peer: socket.socket) -> None:
    """Read a request for an association and accept all of it."""
    head = peer.recv(6, socket.MSG_WAITALL)
    if len(head) < 6:
        raise ConnectionError
    body = peer.recv(int.from_bytes(head[2:]), socket.MSG_WAITALL)
    asked = A_ASSOCIATE_RQ()
    asked.decode(head + body)
    told = asked.to_primitive()
    told.result, told.result_source = 0, 1
    for context in told.presentation_context_definition_list:
        context.result = 0
    told.presentation_context_definition_results_list = told.presentation_context_definition_list
    told.presentation_context_definition_list = []
    answer = A_ASSOCIATE_AC()
    answer.from_primitive(told)
    peer.sendall(answer.encode())
    peer.recv(65536)


def reply(status: int, data: bytes | None = None, operation: int = 0x8020, last: int = 2) -> bytes:
    """A response on context 1, with its identifier; ``last`` 0 when more of that follows."""
    fields = ((0x0100, operation), (0x0120, 1), (0x0800, 1 if data is not None else 0x0101), (0x0900, status))
    body = b"".join(struct.pack("<HHIH", 0, number, 2, value) for number, value in fields)
    command = struct.pack("<HHII", 0, 0, 4, len(body)) + body
    values = struct.pack(">IBB", len(command) + 2, 1, 3) + command
    if data is not None:
        values += struct.pack(">IBB", len(data) + 2, 1, last) + data
    return unit(4, values)


def nested(depth: int) -> bytes:
    body = b""
    for _ in range(depth):  # each a sequence of one item, of defined length
        body = struct.pack("<HHI", 0xFFFE, 0xE000, len(body)) + body
        body = struct.pack("<HHI", 0x0008, 0x1140, len(body)) + body
    return body
