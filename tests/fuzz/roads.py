"""What is fuzzed of ingest: files, volumes, association requests, command sets and multipart bodies.

The reader's own steps without its process: what a parser raises there becomes a reason code, so a finding is an error
that is no refusal where none may come out, an answer that the agent would not believe, or a promise that is broken.
A crash or a hang of a decoder ends the run, which is a finding too.
"""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations on its header classes
from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import nibabel
import pydicom
from pydicom import config

from agent.deidentify import nifti
from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import REASONS, FileRejectedError
from agent.deidentify.prescan import read_meta, scan, undeflate
from agent.deidentify.record import Record
from agent.ingest import parser_main, parser_process
from agent.pacs.dicomweb.multipart import BodyLimits, BodyPart, MultipartError, Splitter, media_type
from agent.pacs.dimse.acceptor import STORAGE, VERIFICATION, Accepted, negotiate
from agent.pacs.dimse.config import Caller, ListenerSettings
from agent.pacs.dimse.messages import data_values, read_command, response
from agent.pacs.dimse.pdu import DATA, AssociationEnded

WHO: Final = Deidentifier(b"\7" * 32, "FUZZ")
RULES: Final = AdmissionRules(
    modalities=frozenset({"CT", "MR", "OT"}),
    secondary_capture_modalities=frozenset({"OT"}),
    colour_modalities=frozenset({"OT"}),
    max_bytes=1 << 20,
    max_pixels=1 << 16,
)
SETTINGS: Final = ListenerSettings("LAZARET", (Caller("PACS", ("127.0.0.1",)),), plain_tcp=True)
_LIMITS: Final = BodyLimits(part_bytes=4096, total_bytes=1 << 16, parts=64, header_bytes=512, preamble_bytes=1024)
_DEFLATED: Final = "1.2.840.10008.1.2.1.99"


class Broken(AssertionError):
    """Something was accepted, and what was promised about it does not hold."""


def _promise(kept: bool, what: str) -> None:
    if not kept:
        raise Broken(what)


@contextlib.contextmanager
def as_in_the_worker() -> Iterator[None]:
    """pydicom set up as the reader's worker sets it up."""
    settings = config.settings
    before = (settings.reading_validation_mode, settings.writing_validation_mode, config.replace_un_with_known_vr)
    settings.reading_validation_mode, settings.writing_validation_mode = config.IGNORE, config.RAISE
    config.replace_un_with_known_vr = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        settings.reading_validation_mode, settings.writing_validation_mode = before[:2]
        config.replace_un_with_known_vr = before[2]


def _answered(data: bytes, patient: str | None) -> Record | None:
    """What the agent would keep, None when the file is refused."""
    names = parser_process._FileNames(WHO, RULES.max_bytes)
    asking = Deidentifier(b"", WHO.issuer, WHO.profile, names=lambda *asked: names.answer(*asked[:2], [*asked[2]]))
    with as_in_the_worker():
        head, parts = parser_main._answer([data], {"patient_id": patient, "issuer": ""}, RULES, asking)
    if "code" in head:
        _promise(head["code"] in REASONS, "a refusal with a code that nobody knows")
        return None
    told: dict[str, Any] = json.loads(json.dumps(head))
    try:
        is_nifti = nifti.looks_like_nifti(data)
        whose = names.of_nifti(bytes(parts[1]), "", patient or "") if is_nifti else names.of_dicom()
    except FileRejectedError:
        return None
    return parser_process._record(told, [bytes(part) for part in parts], "0" * 32, whose)


def dicom_file(data: bytes) -> bool:
    """The whole way of a file through the worker; what comes out is anonymous by its own account."""
    if nifti.looks_like_nifti(data):
        return False
    with contextlib.suppress(
        FileRejectedError
    ):  # and nothing else: these run before any parser's errors are expected
        meta = read_meta(data)
        if meta.transfer_syntax == _DEFLATED:
            data, meta = undeflate(data, meta, RULES.max_bytes)
        scan(data, meta.offset, meta.transfer_syntax)
    record = _answered(data, None)
    if record is None:
        return False
    clean = pydicom.dcmread(io.BytesIO(record.payload))
    _promise(record.payload[:128] == bytes(128), "a preamble was kept")
    _promise(clean.PatientIdentityRemoved == "YES" and str(clean.PatientName) == "", "a file with a name came out")
    _promise(len(clean.PatientID) == 32 and not any(e.tag.is_private for e in clean.iterall()), "not anonymous")
    _promise(read_meta(record.payload).transfer_syntax == "1.2.840.10008.1.2.1", "another transfer syntax")
    return True


def volume(data: bytes) -> bool:
    """``nifti.inflate`` (Refused only) and the whole way of a volume; nothing but grid and voxels comes out."""
    if not nifti.looks_like_nifti(data):
        return False
    with contextlib.suppress(FileRejectedError):
        _promise(len(nifti.inflate(data, RULES.max_bytes)) <= RULES.max_bytes, "inflated beyond the limit")
    record = _answered(data, "PX84629173")
    if record is None:
        return False
    kind = nibabel.Nifti2Image if nifti._version(record.payload) == 2 else nibabel.Nifti1Image
    head = kind.header_class
    clean = head.from_fileobj(io.BytesIO(record.payload))
    _promise(clean["descrip"].item() == b"" and clean["aux_file"].item() == b"", "words in a header")
    _promise(len(clean.extensions) == 0, "an extension came out")
    return True


def association(data: bytes) -> bool:
    """``negotiate``: Ended only; who is not named is not accepted, and no context beyond storage and verification."""
    try:
        found = negotiate(data, "127.0.0.1", SETTINGS)
    except AssociationEnded:
        return False
    if not isinstance(found, Accepted):
        return False
    _promise(found.calling == "PACS", "somebody who is not named was accepted")
    for number, (abstract, syntax) in found.contexts.items():
        _promise(abstract in STORAGE or abstract == VERIFICATION, "a context that is no storage")
        _promise(0 < number < 256 and bool(syntax), "a context without its number or syntax")
    _promise(found.reply[0] == 2, "the reply is no A-ASSOCIATE-AC")
    _promise(len(found.reply) == 6 + int.from_bytes(found.reply[2:6]), "the reply's length is wrong")
    return True


def message(data: bytes) -> bool:
    """A unit's data values, or a command set: Ended only; a unit is used up, an answer can be made to any command."""
    try:
        if data[:1] == bytes([DATA]):
            values = list(data_values(memoryview(data)))
            _promise(6 + sum(6 + len(part) for _, _, part in values) == len(data), "bytes of a unit were passed over")
        else:
            unit = response(1, read_command(data), 0)
            _promise(len(list(data_values(memoryview(unit)))) == 1, "an answer that cannot be read")
    except AssociationEnded:
        return False
    return True


def multipart(data: bytes) -> bool:
    """A Content-Type, a line feed and a body: MultipartError only; the pieces it comes in make no difference."""
    header, _, body = data.partition(b"\n")
    try:
        kind = media_type(header.decode("latin-1"))
    except MultipartError:
        return False
    whole = _split(kind.boundary, [body])
    if (
        len(body) <= _LIMITS.total_bytes
    ):  # beyond it, what came before the limit is given out, or was one piece with it
        for size in (1, 7, 64):
            pieces = [body[at : at + size] for at in range(0, len(body), size)]
            _promise(_split(kind.boundary, pieces) == whole, "pieces make other parts than the whole")
    return bool(whole[0])


def _split(boundary: str, pieces: list[bytes]) -> tuple[list[tuple[str, bytes, bool]], str]:
    """The parts, without the glimpses of those that were too large, and the fault that ended them."""
    splitter = Splitter(boundary, _LIMITS)
    parts: list[BodyPart] = []
    fault = ""
    try:
        for piece in pieces:
            parts += splitter.feed(piece)
            _promise(splitter.held <= 1 << 17, "more is held than the limits allow")
        splitter.end()
    except MultipartError as error:
        fault = error.fault
    return [(part.media_type, part.body if part.whole else b"", part.whole) for part in parts], fault


CHECKS: Final[Mapping[str, Callable[[bytes], bool]]] = MappingProxyType(
    {
        "file": dicom_file,
        "volume": volume,
        "association": association,
        "message": message,
        "multipart": multipart,
    }
)
KINDS: Final = MappingProxyType(
    {"file": "dicom", "volume": "nifti", "association": "pdu", "message": "pdu", "multipart": "multipart"}
)
