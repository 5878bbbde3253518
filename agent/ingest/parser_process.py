"""Reads hospital files in a separate process that may crash or hang, one file at a time.

``ParserProcess`` starts ``python -m agent.ingest.parser_main``, hands it the bytes of a file over a pipe and gets
back a de-identified record or a reason code. The worker is given no file and no key, has limits on memory, processor
time and writing (``parser_limits.apply_rlimits``), and is killed with its process group when it takes too long.
Before it sees a file it is confined (``protos.operations.confinement``): it opens nothing but the interpreter's own
files, and no socket; it starts no program and no process. The texts of a parser's errors stay in it.

The agent computes keyed names. The worker requests them over the same pipe (``_FileNames``), and gets only what a
single file needs: those of one patient, one instance, one study and one series, and of as many ids as a file may have
(``MOST_NAMES``). The patient and the name of a record are taken from these requests, never from the worker's answer.

This is a wall: foreign bytes are parsed on the other side of the pipe, and the keys stay on this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar

import numpy as np

from agent.deidentify import nifti
from agent.deidentify.admission_rules import AdmissionRules, as_table
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import REASONS, FileRejectedError
from agent.deidentify.ps315 import action_trace
from agent.deidentify.record import Record, keyed_name
from agent.errors import ParserError
from agent.storage.spool import MaskedVolume
from protos.operations import confinement
from protos.operations.pipe_messages import has_exited, kill, receive, send, size

_CHANNELS: Final[dict[int, tuple[int, ...]]] = {1: (), 3: (3,)}  # grey or colour, and nothing else
_ONE_EACH: Final = ("patient", "instance", "study", "series", "masked")  # names of which a file has one
# How many other names one file may have. The files that this was tried with ask for 6 uids and 1 id; a file of many
# frames refers to one or a few others for each of them, and a slide of many specimens names each.
MOST_NAMES: Final[Mapping[str, int]] = MappingProxyType({"uid": 10_000, "id": 32})
_UTF8: Final = 4  # an identifier may be longer in UTF-8 than in the file's own character set


@dataclass(frozen=True, slots=True)
class ParserLimits:
    """What one file may cost the worker."""

    memory_bytes: int = 1536 * 2**20  # address space of the process
    cpu_seconds: int = 60
    wall_seconds: float = 90.0
    start_seconds: float = 120.0  # importing the parsers, once per worker


USUAL_LIMITS: Final = ParserLimits()
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
        # a mask's own series, and the one that it is of: this is named as any series is
        named = "series" if purpose == "masked" else purpose
        name = self._who.named("site" if key == "site" else "project", named, tuple(parts))
        if purpose in _ONE_EACH:
            self.told[key, purpose] = name
        return name

    def of_dicom(self) -> dict[str, str]:
        """Whose the file is and what it is called. Raises: KeyError, the worker did not ask."""
        fields = {"name": "instance", "study": "study", "series": "series"}
        found = {field: self.told["project", purpose] for field, purpose in fields.items()}
        return {
            **found,
            "pseudonym": self.told["site", "patient"],
            "masked": self.told.get(("project", "masked"), ""),
        }

    def of_nifti(self, payload: bytes, issuer: str, patient_id: str) -> dict[str, str]:
        """The same for a file that names nobody, from its clean content. Raises: Refused, ``missing_patient``."""
        fields = {"name": "nifti", "study": "nifti-study", "series": "nifti-series"}
        found = {field: self._who.mac(purpose, payload) for field, purpose in fields.items()}
        return {**found, "pseudonym": self._who.person(issuer, patient_id), "masked": ""}

    def of_nifti_mask(self, payload: bytes, volume: bytes, issuer: str, patient_id: str) -> dict[str, str]:
        """The same for a mask: of the study and series that :meth:`of_nifti` names by the clean volume."""
        whole = self.of_nifti(volume, issuer, patient_id)
        fields = {"name": "nifti-mask", "series": "nifti-mask-series"}
        found = {field: self._who.mac(purpose, volume, payload) for field, purpose in fields.items()}
        return {**whole, **found, "masked": whole["series"]}


class ParserProcess:
    """A worker process, started when first needed and again after a file has stopped it."""

    def __init__(
        self,
        rules: AdmissionRules,
        deidentifier: Deidentifier,
        limits: ParserLimits = USUAL_LIMITS,
        demand: str = confinement.AVAILABLE,
    ) -> None:
        """Nothing is started yet. ``demand``: which layers of the confinement must be in force."""
        self._rules, self._deidentifier, self._limits, self._demand = rules, deidentifier, limits, demand
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0  # of worker processes, for the tests and the console

    def __enter__(self) -> Self:
        """Nothing to do: the worker starts with the first file."""
        return self

    def __exit__(self, *_: object) -> None:
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

    def read(
        self,
        data: bytes,
        digest: str,
        patient_id: str | None = None,
        issuer: str = "",
        mask_of: MaskedVolume | None = None,
    ) -> Record:
        """De-identify one file.

        Args:
            data: the file.
            digest: of it, keyed.
            patient_id: for formats that carry none (NIfTI).
            issuer: of that id.
            mask_of: of a NIfTI mask, the volume's file; None for all others.
        Returns:
            The record, still without a label.
        Raises:
            FileRejectedError: with the worker's reason; ``parser_stopped`` when it died, hung or answered nonsense.
            ParserError: the worker cannot be started at all.
        """
        told: dict[str, Any] = {"patient_id": patient_id, "issuer": issuer}
        files, whose = [data], (issuer, patient_id or "")
        if mask_of is not None:
            told, files = {**told, "segment": mask_of.segment}, [data, mask_of.body]
        names = _FileNames(self._deidentifier, self._rules.max_bytes)

        def made(reply: dict[str, Any], parts: list[bytes]) -> Record:
            _refused(reply)
            if nifti.looks_like_nifti(data):
                payload, volume = parts[1], b"" if mask_of is None else parts.pop()
                if (reply["kind"] == "mask") is (mask_of is None):
                    raise ValueError("a mask for a volume, or the other way round")
                named = names.of_nifti_mask(payload, volume, *whose) if volume else names.of_nifti(payload, *whose)
                return _record(reply, parts, digest, named)
            return _record(reply, parts, digest, names.of_dicom())

        return self._told(told, files, made, names)

    def directory(self, data: bytes) -> list[tuple[str, ...]]:
        """The files that the index of a medium lists, as the components of their names.

        Raises:
            FileRejectedError, ParserError: see :meth:`read`.
        """
        return self._told({"directory": True}, [data], _files)

    def patient_of(self, data: bytes, patient_id: str, issuer: str) -> str:
        """The site-wide pseudonym of a file's patient, "" when it names none. Raises: see :meth:`read`."""
        told = {"whose": True, "patient_id": patient_id, "issuer": issuer}
        names = _FileNames(self._deidentifier, self._rules.max_bytes)

        def person(reply: dict[str, Any], _parts: list[bytes]) -> str:
            _refused(reply)
            return names.told["site", "patient"] if reply["named"] is True else ""

        return self._told(told, [data], person, names)

    def _told(
        self,
        head: dict[str, Any],
        files: Sequence[bytes],
        made: Callable[[dict[str, Any], list[bytes]], T],
        names: _FileNames | None = None,
    ) -> T:
        """Ask the worker, and check what it says."""
        if self._process is None or has_exited(self._process):
            self._start()
        try:
            reply, parts = self._ask(head, files, self._limits.wall_seconds, names)
            if reply.pop("spent", False) is not False:
                self.close()
            return made(reply, parts)
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            self.close()
            raise FileRejectedError("parser_stopped") from None

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
            [sys.executable, "-P", "-B", "-m", "agent.ingest.parser_main"],
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
            setup = {**who, "rules": rules, "limits": limits, "demand": self._demand, "parent": os.getpid()}
            reply, _ = self._ask(setup, [], self._limits.start_seconds)
        except (OSError, EOFError, ValueError):
            reply = {}
        if reply != {"ready": True}:
            self.close()
            why = reply.get("fault")
            if isinstance(why, str):  # before a file was seen
                raise ParserError(f"the file reader does not start: {why}")
            raise ParserError("the file reader does not start; check the installation and the memory limit")

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
        raise FileRejectedError(code if code in REASONS else "parser_stopped")


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
    study, series, name = (keyed_name(person, uid) for uid in said)
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
        trace=action_trace.loads(steps),
        masks=keyed_name(person, names["masked"]) if reply["kind"] == "mask" and names["masked"] else "",
    )
