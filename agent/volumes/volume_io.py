"""Volumes in and out: a NIfTI file, or the DICOM files of one series, read as one grid of stored numbers.

A written volume has the same grid, type, byte order and header family, and is bit-identical wherever the numbers are:
see :mod:`agent.volumes.nifti` and :mod:`agent.volumes.dicom_series` for what changes in a header. Files appear
completely or not at all, and no file is overwritten.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from agent.deidentify import nifti
from agent.deidentify.errors import FileRejectedError
from agent.domain import Volume
from agent.file_access import contents, walk
from agent.volumes import dicom_series
from agent.volumes import nifti as volume_nifti
from agent.volumes.dicom_series import DicomForm, derive_uid, keep_uid
from agent.volumes.errors import NotDefacedError
from agent.volumes.nifti import NiftiForm
from agent.volumes.series import is_beside
from protos.common.durable_files import flush_directory, write_new

MAX_BYTES: Final = 2**32  # of all the files of one volume


@dataclass(frozen=True, slots=True, eq=False)
class VolumeSource:
    """A volume, and all that is needed to write it again with other numbers."""

    volume: Volume  # stored numbers, native byte order, the file's own axes
    kind: Literal["nifti", "dicom"]
    modality: str  # "" of a NIfTI file, which does not say
    study: str = field(repr=False)
    series: str = field(repr=False)
    frame_of_reference: str = field(repr=False)
    patient: str = field(repr=False)  # for the site alone; "" of a NIfTI file
    form: NiftiForm | DicomForm = field(repr=False)
    names: tuple[str, ...] = field(default=(), repr=False)  # of the files below their common folder

    @property
    def scaled(self) -> bool:
        """Whether the slices' real values need more than the stored ones: an own scale each, or padding."""
        scale = self._scale()
        return len(np.unique(scale, axis=0)) > 1 or self._padding() is not None

    def real(self) -> Volume:
        """float32 in the units of the modality (HU of CT): slope and intercept, slice by slice where they differ.

        Padding, where the scanner saw nothing, is as low as the lowest value that was seen.
        """
        slope, intercept = self._scale().T
        values = np.asarray(self.volume.values * slope + intercept, np.float32)
        padding = self._padding()
        if padding is not None:
            blind = (self.volume.values >= padding[0]) & (self.volume.values <= padding[1])
            if not bool(blind.all()):
                values[blind] = values[~blind].min()
        return Volume(values, self.volume.affine)

    def seen(self) -> Volume:
        """As a head is looked for in it: in real units where the stored numbers mean nothing by themselves."""
        return self.real() if self._in_units else self.volume

    def unseen(self, made: NDArray[Any]) -> NDArray[Any]:
        """Back from :meth:`seen` to stored numbers."""
        return self.stored(made) if self._in_units else made

    @property
    def _in_units(self) -> bool:
        return self.scaled or self.modality == "CT"

    def stored(self, real: NDArray[Any]) -> NDArray[Any]:
        """Real values as stored numbers: rounded, held inside the type; where ``real()`` was left, bit-identical."""
        slope, intercept = self._scale().T
        kind = self.volume.values.dtype
        back = (np.asarray(real, np.float64) - intercept) / slope
        if kind.kind != "f":
            back = np.clip(np.rint(back), *self._fits())
        return np.where(real == self.real().values, self.volume.values, back.astype(kind))

    def encoded(self, values: NDArray[Any], uid: Callable[[str], str] = keep_uid) -> list[bytes]:
        """The files with other numbers, in the order in which they were given.

        Args:
            values: (i, j, k), of the volume's shape and type.
            uid: what becomes of the names of DICOM instances and series: ``keep_uid`` where the new file takes the
                place of the old one (the vault), ``derive_uid`` where both live on.

        Raises:
            ValueError: another shape or type, or a value that does not fit into the stored bits.
        """
        if values.shape != self.volume.values.shape or values.dtype != self.volume.values.dtype:
            raise ValueError("values have the shape and the type of the volume")
        if isinstance(self.form, NiftiForm):
            return [self.form.encoded(values)]
        return list(self.form.encoded(values, uid))

    def write(self, values: NDArray[Any], out: Path, uid: Callable[[str], str] = derive_uid) -> list[Path]:
        """Write the files, durable when this returns.

        A new folder appears as a whole. In a folder that is there each file does; killed between two of them,
        some are there and some are not.

        Args:
            values: see :meth:`encoded`.
            out: for one file its new path, or a folder that is there; for several a folder, made when missing.
            uid: see :meth:`encoded`.

        Returns:
            The paths, in the order in which the files were given.
        Raises:
            FileExistsError: a file of that name is there; nothing was written.
            ValueError: see :meth:`encoded`; or ``out`` says ``.gz`` and the file is none, or the other way round.
            OSError: the disk; nothing was left.
        """
        files = self.encoded(values, uid)
        names = self.names or tuple(f"{n:06d}" for n in range(len(files)))
        targets = [out / name for name in names] if len(files) > 1 or out.is_dir() else [out]
        if isinstance(self.form, NiftiForm) and (targets[0].suffix == ".gz") != self.form.zipped:
            raise ValueError("the output of a gzipped file must be named .nii.gz")
        if len(files) > 1 and not out.exists():
            _folder(out, [t.relative_to(out) for t in targets], files)
        else:
            _files(targets, files)
        return targets

    def _scale(self) -> NDArray[np.float64]:
        return np.array([self.form.scale]) if isinstance(self.form, NiftiForm) else self.form.scale

    def _padding(self) -> tuple[int, int] | None:
        return None if isinstance(self.form, NiftiForm) else self.form.padding

    def _fits(self) -> tuple[int, int]:
        if isinstance(self.form, DicomForm):
            return self.form.bits
        kind = np.iinfo(self.volume.values.dtype)
        return int(kind.min), int(kind.max)


def read(paths: Sequence[Path] | Path) -> VolumeSource:
    """A NIfTI file, or the DICOM files of one series, in any order; a folder stands for all files in it.

    Raises:
        NotDefacedError: see :func:`read_bytes`; ``unreadable``, a file cannot be opened.
    """
    given = [paths] if isinstance(paths, Path) else list(paths)
    if len(given) == 1 and given[0].is_dir():
        folder = given[0]
        given = [folder / name for name in sorted(walk(folder, ())) if not is_beside(name)]
    if not given:
        raise NotDefacedError("not_a_volume")
    left, bodies = MAX_BYTES, []
    for path in given:
        try:
            body = contents(path.resolve(), left)
        except FileRejectedError as refusal:
            raise NotDefacedError("too_large" if refusal.code == "too_large" else "unreadable") from None
        left -= len(body)
        bodies.append(body)
    return read_bytes(bodies, _names(given))


def read_bytes(files: Sequence[bytes], names: Sequence[str] = ()) -> VolumeSource:
    """The same of files in hand, as the vault has them.

    Raises:
        NotDefacedError: ``not_a_volume``, ``four_dimensional``, ``bad_affine``, ``not_finite``, ``missing_slices``,
            ``mixed_series``, ``too_large``, ``unreadable``.
    """
    if not files:
        raise NotDefacedError("not_a_volume")
    if any(nifti.looks_like_nifti(data) for data in files):
        if len(files) > 1:
            raise NotDefacedError("mixed_series")
        volume, form = volume_nifti.opened(files[0])
        return VolumeSource(volume, "nifti", "", "", "", "", "", form, tuple(names))
    if any(data[128:132] != b"DICM" for data in files):
        raise NotDefacedError("not_a_volume")
    return dicom_source(files, dicom_series.all_parsed(files), names)


def dicom_source(
    files: Sequence[bytes], read: Sequence[dicom_series.Parsed], names: Sequence[str] = ()
) -> VolumeSource:
    """The same of DICOM files that were parsed.

    Raises:
        NotDefacedError: see :func:`read_bytes`.
    """
    stack, labels, rest = dicom_series.opened(files, read)
    who = (labels.study, labels.series, labels.frame_of_reference, labels.patient)
    return VolumeSource(stack, "dicom", labels.modality, *who, rest, tuple(names))


def _names(paths: Sequence[Path]) -> list[str]:
    if len(paths) == 1:
        return [paths[0].name]
    common = os.path.commonpath([path.absolute().parent for path in paths])
    names = [os.path.relpath(path.absolute(), common) for path in paths]
    if len(set(names)) != len(names):
        raise NotDefacedError("missing_slices")  # the same file twice
    return names


def _files(targets: Sequence[Path], bodies: Iterable[bytes]) -> None:
    """Every file beside its place first, and then all of them into their places."""
    if any(target.exists() or target.is_symlink() for target in targets):
        raise FileExistsError("the output already exists")
    waiting: list[Path] = []
    placed: list[Path] = []
    try:
        for target, body in zip(targets, bodies, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.part")
            waiting.append(part)
            _durable(part, body)
        for part, target in zip(waiting, targets, strict=True):
            os.replace(part, target)
            placed.append(target)
        for folder in {target.parent for target in targets}:
            flush_directory(folder)
    except BaseException:
        for target in placed:
            target.unlink(missing_ok=True)
        raise
    finally:
        for part in waiting:
            part.unlink(missing_ok=True)


def _folder(out: Path, names: Sequence[Path], bodies: Iterable[bytes]) -> None:
    """A series under another name first, so that it appears as a whole: a missing end could not be seen."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        for name, body in zip(names, bodies, strict=True):
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            _durable(part / name, body)
        flush_directory(part)
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    flush_directory(out.parent)


def _durable(path: Path, body: bytes) -> None:
    path.unlink(missing_ok=True)  # a killed run's; or a link, which is not followed
    write_new(path, body)
