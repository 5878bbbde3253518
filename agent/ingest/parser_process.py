"""Reads hospital files in a separate process that may crash or hang, one file at a time.

``Reader`` starts ``python -m agent.edges.reader``, hands it the bytes of a file over a pipe and gets back a
de-identified record or a reason code. The worker is given no file and no key, has limits on memory, processor time
and writing (``pipe.confine``), and is killed with its process group when it takes too long. Before it sees a file it
is confined (``protos.operations.confinement``): it opens nothing but the interpreter's own files, and no socket; it
starts no program and no process. The texts of a parser's errors stay in it.

Keyed names are made on the agent's side. The worker asks for them over the same pipe (``_FileNames``), and gets what
any file of any sender gets: those of one patient, one instance, one study and one series, and of as many ids as a
file may have (``MOST_NAMES``). Whose a record is, and what it is called, is taken from what was asked and never from
the worker's answer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Final, Self, TypeVar

import imagecodecs
import numpy as np
import pydicom
from pydicom import Dataset
from pydicom import config as pydicom_config
from pydicom.pixels.decoders.base import get_decoder
from pydicom.tag import Tag
from pydicom.uid import UID

from agent.deidentify import keep, medium, nifti, pixels, regions, trace, whose
from agent.deidentify.attributes import frames, text
from agent.deidentify.faces import faces_in, may_show_a_face
from agent.deidentify.glyphs import shows_text
from agent.deidentify.needles import identifiers, of_patient
from agent.deidentify.prescan import DEFLATED_LE, Meta, read_meta, scan, undeflate
from agent.deidentify.profile import Pixels, Profile
from agent.deidentify.reasons import REASONS, Refused
from agent.deidentify.record import Record, own
from agent.deidentify.residual import residual
from agent.deidentify.rules import (
    DECODERS,
    IMAGECODECS,
    MEDIA_DIRECTORY,
    Rules,
    as_table,
    is_report,
    judge,
    rules_from,
    same_instance,
)
from agent.deidentify.tags import Deidentifier
from agent.edges.pipe import Part, allow_cpu, confine, gone, kill, receive, send, size, spent
from protos.operations import confinement

_BODY_PARTS: Final = frozenset(
    t for t in keep.TERMS[0x00180015] if t.isalnum() and len(t) <= 16
)  # as records hold them
_DEFLATED_REFERENCES: Final = frozenset({"1.2.840.10008.1.2.4.95", "1.2.840.10008.1.2.4.205"})
_WHO: Final = ("SpecificCharacterSet", "IssuerOfPatientID", "PatientID")
_STANDARD: Final = "1.2.840.10008.1.2"
_CHANNELS: Final[dict[int, tuple[int, ...]]] = {1: (), 3: (3,)}  # grey or colour, and nothing else
_LEAST_ROOM: Final = 64 * 2**20  # bytes that a worker must be able to allocate to be of any use
_ONE_EACH: Final = ("patient", "instance", "study", "series")  # names of which a file has one
# How many other names one file may have. The files that this was tried with ask for 6 uids and 1 id; a file of many
# frames refers to one or a few others for each of them, and a slide of many specimens names each.
MOST_NAMES: Final[Mapping[str, int]] = MappingProxyType({"uid": 10_000, "id": 32})
_KNOWN: Final = 10_000  # names that a worker remembers
_UTF8: Final = 4  # an identifier may be longer in UTF-8 than in the file's own character set


class ReaderFailed(RuntimeError):
    """The worker could not be started: a fault of this installation, not of a file."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one file may cost the worker."""

    memory_bytes: int = 1536 * 2**20  # address space of the process
    cpu_seconds: int = 60
    wall_seconds: float = 90.0
    start_seconds: float = 120.0  # importing the parsers, once per worker


USUAL_LIMITS: Final = Limits()
Asked = tuple[str, str, tuple[bytes, ...]]  # key, purpose, parts
T = TypeVar("T")


# ------------------------------------------------------------------ the side of the agent


class _FileNames:
    """The keyed names that a worker may be told while it has one file. It gets no second guess."""

    def __init__(self, who: Deidentifier, max_bytes: int) -> None:
        """``max_bytes``: of a file, inflated."""
        self._who, self._left = who, _UTF8 * max_bytes
        self._many = dict(MOST_NAMES)
        self._asked: dict[str, list[bytes]] = {}
        self.told: dict[tuple[str, str], str] = {}  # (key, purpose) -> the one name

    def answer(self, key: object, purpose: object, parts: list[bytes]) -> str:
        """One name.

        Raises:
            ValueError: no file needs it.
        """
        self._left -= sum(map(len, parts))
        if key not in ("project", "site") or not isinstance(purpose, str) or self._left < 0:
            raise ValueError("not a name")
        if (key == "site" and purpose != "patient") or len(parts) != (2 if purpose == "patient" else 1):
            raise ValueError("not a name")
        if purpose == "dates":  # of the patient in hand
            if parts[0].decode() != self.told.get(("project", "patient")):
                raise ValueError("the dates of another patient")
        elif purpose in _ONE_EACH:
            if self._asked.setdefault(purpose, parts) != parts:
                raise ValueError(f"a second {purpose}")
        else:
            left = self._many.get(purpose, 0)
            if not left:
                raise ValueError("not a name, or too many")
            self._many[purpose] = left - 1
        name = self._who.named("site" if key == "site" else "project", purpose, tuple(parts))
        if purpose in _ONE_EACH:
            self.told[key, purpose] = name
        return name

    def of_dicom(self) -> dict[str, str]:
        """Whose the file is and what it is called. Raises: KeyError, the worker did not ask."""
        fields = {"name": "instance", "study": "study", "series": "series"}
        found = {field: self.told["project", purpose] for field, purpose in fields.items()}
        return {**found, "pseudonym": self.told["site", "patient"]}

    def of_nifti(self, payload: bytes, issuer: str, patient_id: str) -> dict[str, str]:
        """The same for a file that names nobody, from its clean content. Raises: Refused, ``missing_patient``."""
        fields = {"name": "nifti", "study": "nifti-study", "series": "nifti-series"}
        found = {field: self._who.mac(purpose, payload) for field, purpose in fields.items()}
        return {**found, "pseudonym": self._who.person(issuer, patient_id)}


class Reader:
    """A worker process, started when first needed and again after a file has stopped it."""

    def __init__(
        self,
        rules: Rules,
        deidentifier: Deidentifier,
        limits: Limits = USUAL_LIMITS,
        demand: str = confinement.AVAILABLE,
    ) -> None:
        """Nothing is started yet. ``demand``: which layers of the confinement must be in force."""
        self._rules, self._deidentifier, self._limits, self._demand = rules, deidentifier, limits, demand
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0  # of worker processes, for the tests and the console

    def __enter__(self) -> Self:
        """Nothing to do: the worker starts with the first file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End the worker."""
        self.close()

    @property
    def pid(self) -> int | None:
        """The worker's process id, None when there is none."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """Kill the worker and what it has started, whatever they do."""
        process, self._process = self._process, None
        if process is None:
            return
        kill(process)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait()

    def read(self, data: bytes, digest: str, patient_id: str | None = None, issuer: str = "") -> Record:
        """De-identify one file. ``patient_id`` and its ``issuer`` are for formats that carry none (NIfTI).

        Returns:
            The record, still without a label.
        Raises:
            Refused: with the worker's reason; ``parser_stopped`` when it died, hung or answered nonsense.
            ReaderFailed: the worker cannot be started at all.
        """
        told = {"patient_id": patient_id, "issuer": issuer}
        names = _FileNames(self._deidentifier, self._rules.max_bytes)

        def made(reply: dict[str, Any], parts: list[bytes]) -> Record:
            _refused(reply)
            if nifti.looks_like_nifti(data):
                return _record(reply, parts, digest, names.of_nifti(parts[1], issuer, patient_id or ""))
            return _record(reply, parts, digest, names.of_dicom())

        return self._told(told, data, made, names)

    def directory(self, data: bytes) -> list[tuple[str, ...]]:
        """The files that the index of a medium lists, as the components of their names.

        Raises:
            Refused, ReaderFailed: see :meth:`read`.
        """
        return self._told({"directory": True}, data, _files)

    def whose(self, data: bytes, patient_id: str, issuer: str) -> str:
        """The site-wide pseudonym of a file's patient, "" when it names none. Raises: see :meth:`read`."""
        told = {"whose": True, "patient_id": patient_id, "issuer": issuer}
        names = _FileNames(self._deidentifier, self._rules.max_bytes)

        def person(reply: dict[str, Any], _parts: list[bytes]) -> str:
            _refused(reply)
            return names.told["site", "patient"] if reply["named"] is True else ""

        return self._told(told, data, person, names)

    def _told(
        self,
        head: dict[str, Any],
        data: bytes,
        made: Callable[[dict[str, Any], list[bytes]], T],
        names: _FileNames | None = None,
    ) -> T:
        """Ask the worker, and check what it says."""
        if self._process is None or gone(self._process):
            self._start()
        try:
            reply, parts = self._ask(head, [data], self._limits.wall_seconds, names)
            if reply.pop("spent", False) is not False:
                self.close()
            return made(reply, parts)
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            self.close()
            raise Refused("parser_stopped") from None

    def _start(self) -> None:
        self.close()
        home = str(Path(__file__).resolve().parents[2])
        inherited = {k: v for k, v in os.environ.items() if k in ("LD_LIBRARY_PATH", "TZ")}
        # threads would eat the address space: every one brings a stack and a malloc arena
        quiet = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
            "LANG": "C.UTF-8",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-m", "agent.edges.reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a process group of its own, to be killed as a whole
            env={**inherited, **quiet, "PYTHONPATH": home},
        )
        self.starts += 1
        rules = as_table(self._rules)
        limits = {"memory_bytes": self._limits.memory_bytes, "cpu_seconds": self._limits.cpu_seconds}
        who = {"issuer": self._deidentifier.issuer, "profile": asdict(self._deidentifier.profile)}
        try:
            setup = {**who, "rules": rules, "limits": limits, "demand": self._demand}
            reply, _ = self._ask(setup, [], self._limits.start_seconds)
        except (OSError, EOFError, ValueError):
            reply = {}
        if reply != {"ready": True}:
            self.close()
            why = reply.get("fault")
            if isinstance(why, str):  # before a file was seen
                raise ReaderFailed(f"the file reader does not start: {why}")
            raise ReaderFailed("the file reader does not start; check the installation and the memory limit")

    def _ask(
        self, head: dict[str, Any], parts: Sequence[bytes], seconds: float, names: _FileNames | None = None
    ) -> tuple[dict[str, Any], list[bytes]]:
        """One question and its answer; the worker is killed at the deadline, which ends both pipes."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EOFError
        watchdog = threading.Timer(seconds, kill, (process,))
        watchdog.start()
        try:
            send(process.stdin, head, parts)
            while True:
                reply, answered = receive(process.stdout, self._limits.memory_bytes)
                if names is None or "purpose" not in reply:
                    return reply, answered
                send(process.stdin, {"name": names.answer(reply.get("key"), reply["purpose"], answered)})
        finally:
            watchdog.cancel()
            watchdog.join()  # or it might kill what has this number by then


def _refused(reply: dict[str, Any]) -> None:
    code = reply.get("code")
    if code is not None:
        raise Refused(code if code in REASONS else "parser_stopped")


def _files(reply: dict[str, Any], parts: list[bytes]) -> list[tuple[str, ...]]:
    _refused(reply)
    return [tuple(str(part) for part in one) for one in json.loads(parts[0])]


def _record(reply: dict[str, Any], parts: list[bytes], digest: str, names: dict[str, str]) -> Record:
    """Check an answer and make a record of it: the worker is not trusted. ``names``: whose it is, from elsewhere."""
    _refused(reply)
    picture, payload, steps = parts
    values = None
    if reply["kind"] == "image":
        shape = (
            size(reply["height"], 1 << 20),
            size(reply["width"], 1 << 20),
            *_CHANNELS[size(reply["channels"], 3)],
        )
        values = np.frombuffer(picture, dtype="<f4").reshape(shape)  # of bytes: nobody can write to it
    if type(reply["face"]) is not bool or type(reply["text"]) is not bool:
        raise ValueError("not an answer")
    person, said = names["pseudonym"], (names["study"], names["series"], names["name"])
    study, series, name = (own(person, uid) for uid in said)
    return Record(
        name=name,
        digest=digest,
        pseudonym=person,
        study=study,
        series=series,
        uids=said,
        modality=reply["modality"],
        body_part=reply["body_part"],
        kind=reply["kind"],
        label="",
        pixels=values,
        payload=payload,
        face=reply["face"],
        text=reply["text"],
        trace=trace.loads(steps),
    )


# ------------------------------------------------------------------ the side of the worker


def instance_name(deidentifier: Deidentifier, sop_instance_uid: str) -> str:
    """The keyed SOP Instance UID, the same in the worker and for the hospital's label list."""
    return deidentifier.mac("instance", sop_instance_uid.strip("\0 ").encode())


def _opened(data: bytes, rules: Rules, who: Deidentifier) -> tuple[Dataset, Meta]:
    """A data set whose bytes were scanned first; its patient's site-wide pseudonym was asked for."""
    meta = read_meta(data)
    if meta.media_class == MEDIA_DIRECTORY:
        raise Refused("dicomdir")
    if meta.transfer_syntax == DEFLATED_LE:
        data, meta = undeflate(data, meta, rules.max_bytes)
    if not meta.transfer_syntax.startswith(_STANDARD) or meta.transfer_syntax in _DEFLATED_REFERENCES:
        raise Refused("unsupported_encoding")  # private, deflated once more, or not said: it cannot be scanned
    scan(data, meta.offset, meta.transfer_syntax)
    dataset = pydicom.dcmread(io.BytesIO(data))
    named = Dataset({t: dataset.get_item(t) for t in map(Tag, _WHO) if t in dataset})  # bytes, not yet asked for
    judge(dataset, meta.transfer_syntax, rules)
    same_instance(meta, dataset)
    if is_report(dataset):
        raise Refused("not_an_image")  # no place for its text in a record
    who.person_of(named)
    return dataset, meta


def _native(dataset: Dataset, meta: Meta, rules: Rules) -> tuple[pixels.Stored, bool]:
    """The decoded pixels, those blanked that a rule says, and whether there were any."""
    values = pixels.decode(dataset, meta.transfer_syntax)
    parts = regions.plan(dataset, rules.blanks, us_regions=rules.us_regions)
    if parts:
        values = regions.blank(values, parts, text(dataset, "PhotometricInterpretation"))
    return values, bool(parts)


def _read_dicom(data: bytes, rules: Rules, who: Deidentifier) -> tuple[dict[str, Any], list[Part]]:
    dataset, meta = _opened(data, rules, who)
    needles = identifiers(dataset, who.profile)
    values, blanked = _native(dataset, meta, rules)
    plain, face = pixels.native(dataset, values), may_show_a_face(dataset)
    clean = who.clean(plain, Pixels("cleaned" if blanked else "unknown", faces_in(dataset, face=face)))
    steps = [*clean.trace, trace.Step("pixels", "blanked", "clean_pixels")] if blanked else clean.trace
    out = io.BytesIO()
    clean.dataset.save_as(out, enforce_file_format=True)
    payload = out.getvalue()
    if residual(needles, payload):
        raise Refused("residual_identifier")
    image: Part = b""
    instance = text(dataset, "SOPInstanceUID")
    instance_name(who, instance)
    who.mac("study", text(dataset, "StudyInstanceUID").encode())
    who.mac("series", (text(dataset, "SeriesInstanceUID") or instance).encode())  # one without is a series of its own
    # some write WHOLE BODY, and some WHOLE_BODY
    body_part = "".join(c for c in text(dataset, "BodyPartExamined").upper() if c.isalnum())
    head: dict[str, Any] = {
        "modality": text(dataset, "Modality"),
        "body_part": body_part if body_part in _BODY_PARTS else "",
        "kind": "volume" if frames(dataset) > 1 else "image",
        "face": face,
        "text": rules.look_for_text and shows_text(values),
    }
    if head["kind"] == "image":
        unit = np.ascontiguousarray(pixels.unit_range(plain, values), dtype="<f4")
        head["height"], head["width"], head["channels"] = (*unit.shape, 1)[:3]
        image = unit.data.cast("B")
    return head, [image, payload, trace.dumps(steps)]


def _read_nifti(data: bytes, told: dict[str, Any], rules: Rules) -> tuple[dict[str, Any], list[Part]]:
    patient_id = str(told["patient_id"] or "")
    if not patient_id.strip():
        raise Refused("nifti_without_patient")
    if rules.nifti_modality not in rules.modalities:
        raise Refused("modality_not_allowed")
    payload = nifti.clean(nifti.inflate(data, rules.max_bytes), rules.max_pixels)
    if residual(of_patient(patient_id), payload):
        raise Refused("residual_identifier")
    head = {
        "modality": rules.nifti_modality,
        "body_part": "",
        "kind": "volume",
        "face": True,  # a NIfTI header does not say which part of the body it shows
        "text": False,  # made by programs from the slices of a scan, and never captured from a screen
    }
    return head, [b"", payload, trace.dumps([])]


def _answer(data: bytes, told: dict[str, Any], rules: Rules, who: Deidentifier) -> tuple[dict[str, Any], list[Part]]:
    try:
        if told.get("directory"):
            return {}, [json.dumps(medium.listed(data)).encode()]
        if told.get("whose"):
            whom = whose.person(data, who, str(told["patient_id"] or ""), str(told["issuer"]), rules.max_bytes)
            return {"named": whom != ""}, []
        if nifti.looks_like_nifti(data):
            return _read_nifti(data, told, rules)
        return _read_dicom(data, rules, who)
    except Refused as refusal:
        return {"code": refusal.code}, []
    except MemoryError:
        raise  # the process may be damaged: let it end, the agent starts another
    except Exception:  # noqa: BLE001 - a parser may raise anything, and its text may quote the file
        return {"code": "undecodable"}, []


def _asked(
    source: IO[bytes],
    sink: IO[bytes],
    known: dict[Asked, str],
    key: str,
    purpose: str,
    parts: tuple[bytes, ...],
) -> str:
    """A keyed name, from the side that has the keys; ``known``: those that were asked for before."""
    if (key, purpose, parts) not in known:
        send(sink, {"key": key, "purpose": purpose}, parts)
        reply, _ = receive(source, 0)
        known[key, purpose, parts] = str(reply["name"])
    return known[key, purpose, parts]


def main() -> None:
    """Serve files from standard input until it ends."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # whatever a library prints must not get between the answers
        os.dup2(null, descriptor)
    setup, _ = receive(source, 0)
    rules, profile = rules_from(setup["rules"]), Profile(**setup["profile"])
    pydicom_config.settings.reading_validation_mode = pydicom_config.IGNORE
    pydicom_config.settings.writing_validation_mode = pydicom_config.RAISE
    pydicom_config.replace_un_with_known_vr = False  # UN stays opaque: nothing hidden in it is parsed
    seconds = setup["limits"]["cpu_seconds"]
    confine(setup["limits"]["memory_bytes"], seconds)
    try:
        _check_room()
        allowed = confinement.Allowed(confinement.INTERPRETER, confinement.interpreter())
        confinement.confine(allowed, setup["demand"])
    except (ReaderFailed, confinement.ConfinementError) as fault:
        send(sink, {"fault": str(fault)})
        return
    send(sink, {"ready": True})
    known: dict[Asked, str] = {}
    while True:
        try:
            head, (data,) = receive(source, rules.max_bytes)
        except EOFError:
            return
        allow_cpu(seconds)
        # ids of a series are those of its next file too; whose a file is and what it is called, each file asks anew
        known = {a: name for a, name in known.items() if a[1] in MOST_NAMES} if len(known) < _KNOWN else {}
        who = Deidentifier(b"", setup["issuer"], profile, names=partial(_asked, source, sink, known))
        reply, parts = _answer(data, head, rules, who)
        send(sink, {**reply, "spent": True} if spent(seconds) else reply, parts)


def _check_room() -> None:
    """Find out now what would later be blamed on a file: no decoder, or no memory to decode into."""
    bytearray(_LEAST_ROOM)
    if not imagecodecs.JPEG8.available:
        raise ReaderFailed("imagecodecs is installed without JPEG")
    for syntax, decoder in DECODERS.items():
        if decoder in ("", IMAGECODECS):
            continue
        if decoder not in get_decoder(UID(syntax)).available_plugins:
            raise ReaderFailed(f"no decoder {decoder} is installed")


if __name__ == "__main__":
    main()
