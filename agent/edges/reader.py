"""Reads hospital files in a separate process that may crash, hang or be taken over, one file at a time.

``Reader`` starts ``python -m agent.edges.reader``, hands it the bytes of a file over a pipe and gets back a
de-identified record or a reason code. The worker opens no file, has limits on memory, processor time and
writing, and is killed when it takes too long. Raw identifiers, and the texts of a parser's errors, stay
in it. Messages are a length-prefixed JSON object followed by byte strings; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np
import pydicom
from pydicom import config as pydicom_config
from pydicom.pixels.decoders.base import get_decoder
from pydicom.uid import UID

from agent.deidentify import nifti, pixels
from agent.deidentify.prescan import read_meta, scan
from agent.deidentify.reasons import REASONS, Refused
from agent.deidentify.record import Record
from agent.deidentify.rules import DECODERS, MEDIA_DIRECTORY, Rules, frames, judge, may_show_a_face, text
from agent.deidentify.tags import Deidentifier

_MAX_HEAD: Final = 65536  # bytes of a message's JSON
_LEAST_ROOM: Final = 64 * 2**20  # bytes that a worker must be able to allocate to be of any use


class ReaderFailed(RuntimeError):
    """The worker could not be started: a fault of this installation, not of a file."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one file may cost the worker."""

    memory_bytes: int = 1536 * 2**20  # address space of the process
    cpu_seconds: int = 60
    wall_seconds: float = 90.0
    start_seconds: float = 120.0  # importing the parsers, once per worker


def _send(stream: IO[bytes], head: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
    body = json.dumps({**head, "parts": [len(p) for p in parts]}).encode()
    stream.write(struct.pack(">I", len(body)) + body)
    for part in parts:
        stream.write(part)
    stream.flush()


def _receive(stream: IO[bytes], max_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
    """One message. Raises: EOFError at the end of the stream, ValueError when it is not a message."""
    head = json.loads(_exactly(stream, _size(struct.unpack(">I", _exactly(stream, 4))[0], _MAX_HEAD)))
    if not isinstance(head, dict) or not isinstance(head.get("parts"), list) or len(head["parts"]) > 2:
        raise ValueError("not a message")
    return head, [_exactly(stream, _size(n, max_bytes)) for n in head.pop("parts")]


def _size(number: object, most: int) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError("not a length")
    return number


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


# ------------------------------------------------------------------ the side of the agent


class Reader:
    """A worker process, started when first needed and again after a file has stopped it."""

    def __init__(self, rules: Rules, deidentifier: Deidentifier, limits: Limits) -> None:
        """Nothing is started yet."""
        self._rules, self._deidentifier, self._limits = rules, deidentifier, limits
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0  # of worker processes, for the tests and the console

    def __enter__(self) -> Self:
        """Nothing to do: the worker starts with the first file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the worker."""
        self.close()

    @property
    def pid(self) -> int | None:
        """The worker's process id, None when there is none."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """Kill the worker, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait()

    def read(self, data: bytes, digest: str, patient_id: str | None = None) -> Record:
        """De-identify one file. ``patient_id`` is for formats that carry none (NIfTI).

        Returns:
            The record, still without a label.
        Raises:
            Refused: with the worker's reason; ``parser_stopped`` when it died, hung or answered nonsense.
            ReaderFailed: the worker cannot be started at all.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            reply, parts = self._ask({"patient_id": patient_id}, [data], self._limits.wall_seconds)
            return _record(reply, parts, digest)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
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
            env={**inherited, **quiet, "PYTHONPATH": home},
        )
        self.starts += 1
        rules = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(self._rules).items()}
        limits = {"memory_bytes": self._limits.memory_bytes, "cpu_seconds": self._limits.cpu_seconds}
        setup = {"issuer": self._deidentifier.issuer, "rules": rules, "limits": limits}
        try:
            reply, _ = self._ask(setup, [self._deidentifier.key], self._limits.start_seconds)
        except (OSError, EOFError, ValueError):
            reply = {}
        if reply != {"ready": True}:
            self.close()
            raise ReaderFailed("the file reader does not start; check the installation and the memory limit")

    def _ask(
        self, head: dict[str, Any], parts: Sequence[bytes], seconds: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        """One question and its answer; the worker is killed at the deadline, which ends both pipes."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EOFError
        watchdog = threading.Timer(seconds, process.kill)
        watchdog.start()
        try:
            _send(process.stdin, head, parts)
            return _receive(process.stdout, self._limits.memory_bytes)
        finally:
            watchdog.cancel()


def _record(reply: dict[str, Any], parts: list[bytes], digest: str) -> Record:
    """Check an answer and make a record of it: the worker is not trusted."""
    code = reply.get("code")
    if code is not None:
        raise Refused(code if code in REASONS else "parser_stopped")
    picture, payload = parts
    values = None
    if reply["kind"] == "image":
        shape = (_size(reply["height"], 1 << 20), _size(reply["width"], 1 << 20))
        values = np.frombuffer(picture, dtype="<f4").reshape(shape).astype(np.float32)
        values.setflags(write=False)
    if type(reply["face"]) is not bool:
        raise ValueError("not an answer")
    return Record(
        name=reply["name"],
        digest=digest,
        pseudonym=reply["pseudonym"],
        study=reply["study"],
        modality=reply["modality"],
        kind=reply["kind"],
        label="",
        pixels=values,
        payload=payload,
        face=reply["face"],
    )


# ------------------------------------------------------------------ the side of the worker


def instance_name(deidentifier: Deidentifier, sop_instance_uid: str) -> str:
    """The keyed name of an instance, the same in the worker and for the hospital's label list."""
    return deidentifier.mac("instance", sop_instance_uid.strip("\0 ").encode())


def _read_dicom(data: bytes, rules: Rules, who: Deidentifier) -> tuple[dict[str, Any], list[bytes]]:
    meta = read_meta(data)
    if meta.media_class == MEDIA_DIRECTORY:
        raise Refused("dicomdir")
    if meta.transfer_syntax.startswith("1.2.840.10008.1.2.1.99") or not meta.transfer_syntax:
        raise Refused("unsupported_encoding")  # deflated, or not said: the bytes cannot be scanned
    scan(data, meta.offset, meta.transfer_syntax)
    dataset = pydicom.dcmread(io.BytesIO(data))
    judge(dataset, meta.transfer_syntax, rules)
    values = pixels.decode(dataset, meta.transfer_syntax)
    plain = pixels.native(dataset, values)
    clean = who.apply(plain)
    payload = io.BytesIO()
    clean.save_as(payload, enforce_file_format=True)
    image = b""
    head = {
        "name": instance_name(who, text(dataset, "SOPInstanceUID")),
        "pseudonym": who.patient(dataset),
        "study": who.mac("study", text(dataset, "StudyInstanceUID").encode()),
        "modality": text(dataset, "Modality"),
        "kind": "volume" if frames(dataset) > 1 else "image",
        "face": may_show_a_face(dataset),
    }
    if head["kind"] == "image":
        unit = pixels.unit_range(plain, values)
        head["height"], head["width"] = unit.shape
        image = unit.astype("<f4").tobytes()
    return head, [image, payload.getvalue()]


def _read_nifti(
    data: bytes, patient_id: str | None, rules: Rules, who: Deidentifier
) -> tuple[dict[str, Any], list[bytes]]:
    if not (patient_id or "").strip():
        raise Refused("nifti_without_patient")
    if rules.nifti_modality not in rules.modalities:
        raise Refused("modality_not_allowed")
    payload = nifti.clean(nifti.inflate(data, rules.max_bytes), rules.max_pixels)
    head = {
        "name": who.mac("nifti", payload),
        "pseudonym": who.pseudonym("", patient_id or ""),
        "study": who.mac("nifti-study", payload),
        "modality": rules.nifti_modality,
        "kind": "volume",
        "face": True,  # a NIfTI header does not say which part of the body it shows
    }
    return head, [b"", payload]


def _answer(
    data: bytes, patient_id: str | None, rules: Rules, who: Deidentifier
) -> tuple[dict[str, Any], list[bytes]]:
    try:
        if nifti.looks_like_nifti(data):
            return _read_nifti(data, patient_id, rules, who)
        return _read_dicom(data, rules, who)
    except Refused as refusal:
        return {"code": refusal.code}, []
    except MemoryError:
        raise  # the process may be damaged: let it end, the agent starts another
    except Exception:  # noqa: BLE001 - a parser may raise anything, and its text may quote the file
        return {"code": "undecodable"}, []


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold a patient's file
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def _allow_cpu(seconds: int) -> None:
    """Move the soft limit to ``seconds`` from what is used already: the worker serves many files."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _rules(raw: dict[str, Any]) -> Rules:
    fields: dict[str, Any] = {
        k: frozenset(v) if isinstance(v, list) and k != "image_types" else v for k, v in raw.items()
    }
    fields["image_types"] = frozenset((first, second) for first, second in raw["image_types"])
    return Rules(**fields)


def main() -> None:
    """Serve files from standard input until it ends."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # whatever a library prints must not get between the answers
        os.dup2(null, descriptor)
    setup, (key,) = _receive(source, 4096)
    rules, who = _rules(setup["rules"]), Deidentifier(key, setup["issuer"])
    pydicom_config.settings.reading_validation_mode = pydicom_config.IGNORE
    pydicom_config.settings.writing_validation_mode = pydicom_config.RAISE
    pydicom_config.replace_un_with_known_vr = False  # UN stays opaque: nothing hidden in it is parsed
    _limit(setup["limits"]["memory_bytes"])
    _check_room()
    _send(sink, {"ready": True})
    while True:
        try:
            head, (data,) = _receive(source, rules.max_bytes)
        except EOFError:
            return
        _allow_cpu(setup["limits"]["cpu_seconds"])
        _send(sink, *_answer(data, head["patient_id"], rules, who))


def _check_room() -> None:
    """Find out now what would later be blamed on a file: no decoder, or no memory to decode into."""
    bytearray(_LEAST_ROOM)
    for syntax in DECODERS:
        if DECODERS[syntax] and DECODERS[syntax] not in get_decoder(UID(syntax)).available_plugins:
            raise ReaderFailed(f"no decoder {DECODERS[syntax]} is installed")


if __name__ == "__main__":
    main()
