"""De-face the files of one folder into another, study by study. An interrupted batch resumes where it stopped.

The log ``defaced.jsonl`` in the output folder has one digest for each study and one for each file written. The
request alone decides which files to write; the log does not. A study is logged before its first file appears and
again after its last one, so a half-written study is found and repeated. A study that keeps its face is not written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.defacing.engine import DefacedStudy, DefacingMethod, take_off
from agent.errors import CommandError
from agent.volumes.dicom_series import derive_uid
from agent.volumes.errors import REASONS, NotDefacedError
from agent.volumes.series import Group, series_of, studies
from agent.volumes.volume_io import VolumeSource, read

LOG: Final = "defaced.jsonl"
DONE: Final = "defaced"


@dataclass(frozen=True, slots=True, eq=False)
class VolumeOutcome:
    """What became of one volume, or of an image that is none."""

    path: str  # below the folder; of DICOM the folder of its slices
    state: str  # "defaced", "defaced before", or why it keeps its face: a code of agent.volumes.errors
    why: str = ""
    method: str = ""
    files: int = 1
    reference: bool = False  # it said where the face is
    brain_ml: float | None = None
    changed_share: float | None = None
    brain_voxels_changed: int | None = None
    outside_voxels_changed: int | None = None
    seconds: float | None = None  # of the whole study
    picture: bytes = field(default=b"", repr=False)  # PNG; the upper row shows the face

    def told(self) -> dict[str, Any]:
        """For ``--json``: all but the image."""
        return {name: value for name, value in asdict(self).items() if name != "picture" and value is not None}


@dataclass(frozen=True, slots=True)
class VolumeTask:
    """One volume of a study: its files, and where they go."""

    paths: tuple[Path, ...]
    out: Path  # a file, or a folder for several
    shown: str
    why: str = ""


Study = tuple[VolumeTask, ...]


def plan_batch(source: Path, out: Path) -> list[Study]:
    """What there is to do.

    Args:
        source: a file, or a folder of NIfTI and DICOM files.
        out: a new file or a folder for a file; a folder for a folder.

    Raises:
        CommandError: there is nothing to read, or ``out`` lies in ``source``.
    """
    if not source.is_dir():
        if not source.exists():
            raise CommandError(f"file or folder not found: {source.name}")
        named = "".join(out.suffixes).lower().endswith((".nii", ".nii.gz", ".dcm"))
        target = out if named and not out.is_dir() else out / source.name
        if named and target == out and (source.suffix == ".gz") is not (out.suffix == ".gz"):
            raise CommandError("the output of a gzipped file must be named .nii.gz")
        return [(VolumeTask((source,), target, _plain(source.name)),)]
    inside = out.resolve()
    if inside == source.resolve() or source.resolve() in inside.parents:
        raise CommandError("the output folder must be outside the input folder")
    found = [tuple(_piece(group, source, out) for group in study) for study in studies(series_of(source))]
    if not found:
        raise CommandError("the folder holds no NIfTI and no DICOM file")
    return found


def _piece(group: Group, source: Path, out: Path) -> VolumeTask:
    names = [path.relative_to(source) for path in group.paths]
    if len(names) == 1:
        return VolumeTask(group.paths, out / names[0], _plain(os.fspath(names[0])), group.why)
    common = Path(os.path.commonpath([os.fspath(name.parent) or "." for name in names]))
    return VolumeTask(group.paths, out / common, _plain(f"{common}{os.sep}"), group.why)


def deface_batch(
    work: Sequence[Study],
    out: Path,
    with_: DefacingMethod,
    mask: NDArray[np.bool_] | None = None,
    *,
    pictures: bool = False,
) -> Iterator[list[VolumeOutcome]]:
    """One study after the other; the rows of each as soon as it is done.

    Raises:
        OSError: the disk; what is done stays done.
        FileExistsError: something that is not ours lies where a result belongs.
    """
    alone = len(work) == 1 and len(work[0]) == 1 and len(work[0][0].paths) == 1 and work[0][0].out == out
    folder = out.parent if alone and not out.is_dir() else out
    folder.mkdir(parents=True, exist_ok=True)
    log = _Log(folder / LOG)
    for study in work:  # before anything takes its time
        if not log.known(_key(study, with_)):
            _refuse_there(study)
    for study in work:
        key = _key(study, with_)
        whole = [piece for piece in study if not piece.why]
        none = [
            VolumeOutcome(piece.shown, piece.why, REASONS[piece.why], files=len(piece.paths))
            for piece in study
            if piece.why
        ]
        if not whole:
            yield none
        elif log.done(key, whole):
            yield [
                VolumeOutcome(p.shown, "defaced before", method=with_.name, files=len(p.paths)) for p in whole
            ] + none
        else:
            log.clear(key, whole)
            yield _one(whole, _Writing(log, key), with_, mask, pictures=pictures) + none


@dataclass(frozen=True, slots=True, eq=False)
class _Writing:
    log: _Log
    key: str

    def write(self, pieces: Sequence[VolumeTask], sources: Sequence[VolumeSource], taken: DefacedStudy) -> None:
        """Every file of a study, with a note before and after.

        Raises:
            FileExistsError: something that is not ours lies there; nothing of it was touched.
        """
        _refuse_there(pieces)
        digests = [
            sha256(body).hexdigest()
            for source, values in zip(sources, taken.values, strict=True)
            for body in source.encoded(values, derive_uid)
        ]
        self.log.say(self.key, "begun", digests)
        for piece, source, values in zip(pieces, sources, taken.values, strict=True):
            if len(piece.paths) > 1:
                piece.out.mkdir(parents=True, exist_ok=True)
            else:
                piece.out.parent.mkdir(parents=True, exist_ok=True)
            source.write(values, piece.out)
        self.log.say(self.key, DONE, digests)


def _refuse_there(pieces: Sequence[VolumeTask]) -> None:
    if any(os.path.lexists(target) for piece in pieces if not piece.why for target in _targets(piece)):
        raise FileExistsError(0, "the output already exists", os.fspath(pieces[0].out))


def _targets(piece: VolumeTask) -> list[Path]:
    if len(piece.paths) == 1:
        return [piece.out / piece.paths[0].name if piece.out.is_dir() else piece.out]
    common = os.path.commonpath([path.parent for path in piece.paths])
    return [piece.out / os.path.relpath(path, common) for path in piece.paths]


def _one(
    pieces: Sequence[VolumeTask],
    to: _Writing,
    with_: DefacingMethod,
    mask: NDArray[np.bool_] | None,
    *,
    pictures: bool,
) -> list[VolumeOutcome]:
    began = time.monotonic()
    try:
        sources = [read(list(piece.paths)) for piece in pieces]
        taken = take_off(sources, with_, mask, picture=pictures)
    except NotDefacedError as error:
        return [VolumeOutcome(p.shown, error.code, REASONS[error.code], with_.name, len(p.paths)) for p in pieces]
    except OSError:
        raise
    except Exception:  # noqa: BLE001 - one study must not keep the others waiting; its text may quote the file
        return [VolumeOutcome(p.shown, "fault", REASONS["fault"], with_.name, len(p.paths)) for p in pieces]
    to.write(pieces, sources, taken)
    seconds = round(time.monotonic() - began, 2)
    return [
        VolumeOutcome(
            piece.shown,
            DONE,
            method=with_.name,
            files=len(piece.paths),
            reference=index == taken.result.reference,
            brain_ml=round(taken.brain_ml, 1),
            changed_share=round(taken.shares[index], 4),
            brain_voxels_changed=taken.brain_changed,
            outside_voxels_changed=taken.outside_changed,
            seconds=seconds,
            picture=taken.picture if index == taken.result.reference else b"",
        )
        for index, piece in enumerate(pieces)
    ]


def _key(study: Study, with_: DefacingMethod) -> str:
    """Of the files as they lie there, the method and its network."""
    told: list[Any] = [with_.made_of]
    for piece in study:
        for path in piece.paths:
            known = path.stat()
            told.append(
                [os.fspath(path.absolute()), known.st_size, known.st_mtime_ns, os.fspath(piece.out.absolute())]
            )
    return sha256(json.dumps(told).encode()).hexdigest()


class _Log:
    """What was begun and done, line by line; a torn line, or one that makes no sense, is no line."""

    def __init__(self, path: Path) -> None:
        self._path, self._last = path, dict[str, tuple[str, tuple[str, ...]]]()
        written = path.read_text(errors="replace") if path.exists() else ""
        self._torn = bool(written) and not written.endswith("\n")
        for line in written.splitlines():
            try:
                told = json.loads(line)
                study, state, digests = str(told["study"]), str(told["state"]), told["digests"]
                self._last[study] = (state, tuple(str(digest) for digest in digests))
            except (ValueError, KeyError, TypeError):
                continue

    def known(self, key: str) -> bool:
        """Was it begun here?"""
        return key in self._last

    def done(self, key: str, pieces: Sequence[VolumeTask]) -> bool:
        """Is all of it there, byte for byte?"""
        state, digests = self._last.get(key, ("", ()))
        return state == DONE and digests == tuple(_digest(t) for piece in pieces for t in _targets(piece))

    def clear(self, key: str, pieces: Sequence[VolumeTask]) -> None:
        """Take away what a study that was begun has left: where its files belong, with the bytes that it wrote."""
        _, digests = self._last.get(key, ("", ()))
        targets = [target for piece in pieces for target in _targets(piece)]
        for target, digest in zip(targets, digests, strict=False):
            if digest and _digest(target) == digest:
                target.unlink()

    def say(self, key: str, state: str, digests: Sequence[str]) -> None:
        """A line, durable when this returns."""
        line = json.dumps({"study": key, "state": state, "digests": list(digests)}) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(handle, b"\n" * self._torn + line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        self._last[key], self._torn = (state, tuple(digests)), False


def _digest(path: Path) -> str:
    """SHA-256 of a plain file; "" where there is none."""
    if path.is_symlink() or not path.is_file():
        return ""
    return sha256(path.read_bytes()).hexdigest()


def _plain(name: str) -> str:
    """A path for the eye: what does not print, a terminal's controls or broken letters, is a question mark."""
    return "".join(c if c.isprintable() else "?" for c in name)
