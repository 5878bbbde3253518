"""The way in from a folder: every file below it is kept, known already, or quarantined with a reason."""

from __future__ import annotations

import csv
import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agent.deidentify import nifti
from agent.deidentify.prescan import read_meta
from agent.deidentify.reasons import REASONS, Refused
from agent.deidentify.record import Record
from agent.deidentify.rules import Rules
from agent.deidentify.tags import Deidentifier
from agent.edges.reader import Limits, Reader, instance_name

LABELS: Final = "labels.csv"
PATIENTS: Final = "nifti.csv"
QUARANTINE_LIST: Final = "quarantine.jsonl"
USUAL_LIMITS: Final = Limits()
_MAX_LABEL: Final = 64
_MAX_ROWS: Final = 5_000_000


class BadFolder(ValueError):
    """The folder, or a list in it, cannot be used. The text names the file and the line, never a value."""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What became of the files: codes and counts only, so that it can be shown outside the vault."""

    files: int
    kept: int
    duplicates: int
    quarantined: Mapping[str, int]  # code -> files, in code order


@dataclass(frozen=True, slots=True)
class Way:
    """Where records go and what stands beside the way."""

    already: Callable[[str], bool]
    keep: Callable[[Record], None]
    quarantine: Path
    progress: Callable[[int, int], None]


def ingest(  # noqa: PLR0913 - the ports of the way in, each named by the caller
    folder: Path,
    *,
    rules: Rules,
    deidentifier: Deidentifier,
    already: Callable[[str], bool],
    keep: Callable[[Record], None],
    quarantine: Path,
    progress: Callable[[int, int], None],
    limits: Limits = USUAL_LIMITS,
) -> IngestReport:
    """Let the files of a folder in. The folder itself is only read; a second run keeps nothing new.

    ``labels.csv`` (sop_instance_uid,label) and ``nifti.csv`` (file,patient_id) at the top of the folder are
    the hospital's own lists. Links are not followed.

    Args:
        already: True when the vault holds a record with this ``name`` or with this ``digest``.
        keep: called once for each new record; what it raises ends the run.
        quarantine: directory (made 0700) for ``quarantine.jsonl``, one line for each file refused. It names
            files, and file names may name patients: it stays at the site.
        progress: called with (files done, files in all) after each file.
    Raises:
        BadFolder: no such folder, or a list that cannot be read; nothing was kept.
        ReaderFailed: the reader does not start on this machine.
    """
    if not folder.is_dir():
        raise BadFolder("the folder to ingest does not exist or is not a folder")
    way = Way(already, keep, quarantine, progress)
    labels = _labels(folder / LABELS, deidentifier)
    patients = _read_list(folder / PATIENTS, ("file", "patient_id"))
    refusals = _Refusals(quarantine)
    with Reader(rules, deidentifier, limits) as reader:
        run = _Run(folder, way, rules, deidentifier, labels, patients, reader)
        return run.all(refusals)


@dataclass(slots=True)
class _Run:
    """One pass over the folder."""

    folder: Path
    way: Way
    rules: Rules
    deidentifier: Deidentifier
    labels: Mapping[str, str]
    patients: Mapping[str, str]
    reader: Reader

    def all(self, refusals: _Refusals) -> IngestReport:
        paths = sorted(walk(self.folder, self.way.quarantine), key=os.fsencode)
        duplicates, codes = 0, Counter[str]()
        digests: set[str] = set()
        names: set[str] = set()
        for done, path in enumerate(paths, start=1):
            digest = ""
            try:
                data = _contents(self.folder / path, self.rules.max_bytes)
                digest = self.deidentifier.mac("file", data)
                if digest in digests or self.way.already(digest):
                    duplicates += 1
                else:
                    names.add(self._let_in(path, data, digest, names))
                    digests.add(digest)
            except Refused as refusal:
                codes[refusal.code] += 1
                refusals.add(path, refusal.code, digest)
            self.way.progress(done, len(paths))
        return IngestReport(len(paths), len(names), duplicates, dict(sorted(codes.items())))

    def _let_in(self, path: str, data: bytes, digest: str, names: set[str]) -> str:
        """Let the worker read what looks like an image, label it, keep it; the instance's name."""
        if not nifti.looks_like_nifti(data):
            read_meta(data)  # refuses what is no DICOM before a worker is bothered
        record = self.reader.read(data, digest, self.patients.get(path))
        if record.name in names or self.way.already(record.name):
            raise Refused("conflicting_instance")
        self.way.keep(replace(record, label=self.labels.get(record.name, "")))
        return record.name


def walk(folder: Path, leave_out: Path) -> Iterator[str]:
    """Paths below a folder, relative to it: all but directories and the two lists. No link is followed."""
    left_out = leave_out.resolve()
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(folder / inside) as found:
                entries = list(found)
        except OSError:
            yield inside  # a directory that cannot be read is listed, not passed over
            continue
        for entry in entries:
            path = os.path.join(inside, entry.name)
            if not entry.is_dir(follow_symlinks=False):
                if path not in (LABELS, PATIENTS):
                    yield path
            elif Path(entry.path).resolve() != left_out:
                waiting.append(path)


def _contents(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file, at most ``max_bytes``."""
    try:
        # without O_NONBLOCK, opening a named pipe would wait for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:  # ELOOP: a link; ENXIO: a socket
        raise Refused("not_a_file" if error.errno in (errno.ELOOP, errno.ENXIO) else "unreadable") from None
    with os.fdopen(descriptor, "rb") as stream:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise Refused("not_a_file")
        if state.st_size > max_bytes:
            raise Refused("too_large")
        try:
            data = stream.read(max_bytes + 1)
        except OSError:
            raise Refused("unreadable") from None
    if len(data) > max_bytes:  # it grew while it was read
        raise Refused("too_large")
    return data


def _read_list(path: Path, columns: tuple[str, str]) -> dict[str, str]:
    """A two-column CSV list of the hospital; empty when there is none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.reader(stream, strict=True)
            if tuple(next(rows, [])) != columns:
                raise BadFolder(f"{path.name}: the first line must be {','.join(columns)}")
            found: dict[str, str] = {}
            for row in rows:
                if not row:
                    continue
                line = rows.line_num
                if len(row) != len(columns) or not all(cell.strip() for cell in row) or line > _MAX_ROWS:
                    raise BadFolder(f"{path.name} line {line}: two values are needed, {' and '.join(columns)}")
                key, value = row[0].strip(), row[1].strip()
                if found.setdefault(key, value) != value:
                    raise BadFolder(f"{path.name} line {line}: contradicts an earlier line")
            return found
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, csv.Error):
        raise BadFolder(f"{path.name}: cannot be read as UTF-8 CSV") from None


def _labels(path: Path, deidentifier: Deidentifier) -> dict[str, str]:
    """Labels by keyed instance name."""
    raw = _read_list(path, ("sop_instance_uid", "label"))
    if not all(len(label) <= _MAX_LABEL and label.isprintable() for label in raw.values()):
        raise BadFolder(f"{path.name}: a label must be at most {_MAX_LABEL} printable characters")
    return {instance_name(deidentifier, uid): label for uid, label in raw.items()}


class _Refusals:
    """The list of refused files, for the site's IT; nothing is listed twice."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        self._path = directory / QUARANTINE_LIST
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        self._known = set(filter(None, map(_entry, text.splitlines())))
        self._torn = bool(text) and not text.endswith("\n")  # a crash cut the last line

    def add(self, path: str, code: str, digest: str) -> None:
        if (path, code, digest) in self._known:
            return
        entry = {"file": path, "code": code, "digest": digest, "what_to_do": REASONS[code]}
        line = ("\n" if self._torn else "") + json.dumps(entry) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(line.encode("ascii"))
        self._torn = False
        self._known.add((path, code, digest))


def _entry(line: str) -> tuple[str, str, str] | None:
    try:
        raw = json.loads(line)
        return raw["file"], raw["code"], raw["digest"]
    except (ValueError, KeyError, TypeError):
        return None
