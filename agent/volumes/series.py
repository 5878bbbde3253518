"""Which files of a folder make up which volume, by their headers alone.

DICOM files are grouped by series, and inside a series by orientation, size and spacing, and by echo and image type
where several images lie at one place. A group that is not a volume gives the reason, because defacing must account
for every image of a study. A study is a Study Instance UID, or for NIfTI the session of a BIDS folder, or the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydicom import Dataset
from pydicom import config as pydicom_config

from agent.deidentify import nifti
from agent.deidentify.admission_rules import MEDIA_DIRECTORY
from agent.deidentify.attributes import frames, text
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import read_meta
from agent.file_access import contents, walk
from agent.volumes.dicom_series import MAX_BYTES, NAMES, arranged, parsed, placed
from agent.volumes.errors import NotDefacedError
from agent.volumes.nifti import header_of, judged

_BESIDE: Final = (".json", ".tsv", ".csv", ".xml", ".txt", ".md", ".bval", ".bvec")
# structured reports, presentation states, the index of a medium: no image, and no outline of one
_WORDS: Final = ("1.2.840.10008.5.1.4.1.1.88.", "1.2.840.10008.5.1.4.1.1.11.", MEDIA_DIRECTORY)
_VOLUMES: Final = (".nii", ".nii.gz")
_STRAIGHT: Final = 1e-3  # deviation of direction cosines inside a volume
SUBJECT: Final = re.compile(r"sub-[A-Za-z0-9]+")
SESSION: Final = re.compile(r"ses-[A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one volume, or of what is none."""

    kind: Literal["nifti", "dicom"]
    paths: tuple[Path, ...]
    why: str = ""  # a code of agent.volumes.errors: why it is no volume; "" when it is one
    modality: str = ""
    study: str = field(default="", repr=False)
    series: str = field(default="", repr=False)
    frame_of_reference: str = field(default="", repr=False)
    patient: str = field(default="", repr=False)


def is_beside(name: str) -> bool:
    """A table or text beside images, a hidden file, or something not finished."""
    parts = name.split(os.sep)
    return name.lower().endswith(_BESIDE) or any(part.startswith(".") for part in parts)


def series_of(folder: Path) -> list[Group]:
    """The volumes below a folder, in the order of names. No link is followed; what is no image is passed over."""
    names = [name for name in sorted(walk(folder, ()), key=os.fsencode) if not is_beside(name)]
    found = grouped((Path(name), _body(folder / name)) for name in names)
    return [replace(group, paths=tuple(folder / path for path in group.paths)) for group in found]


def grouped(files: Iterable[tuple[Path, bytes | str]]) -> list[Group]:
    """The same of files in hand, one at a time: a name, and the bytes, or a code why there are none."""
    groups: list[Group] = []
    slices: dict[tuple[str, ...], list[tuple[Path, Dataset]]] = {}
    for path, data in files:
        if isinstance(data, str):
            groups.append(Group("nifti" if _is_nifti(path) else "dicom", (path,), data))
        elif _is_nifti(path) or nifti.looks_like_nifti(data):
            groups.append(Group("nifti", (path,), _nifti(data), study=_study(str(path))))
        elif data[128:132] == b"DICM":
            dataset, why = _header(data)
            if why:
                groups.append(Group("dicom", (path,), why))
            elif dataset is not None:
                key = (
                    text(dataset, "PatientID"),
                    text(dataset, "StudyInstanceUID"),
                    text(dataset, "SeriesInstanceUID"),
                )
                slices.setdefault(key, []).append((path, dataset))
    for members in slices.values():
        for indices, why in split([dataset for _, dataset in members]):
            labels = (text(members[indices[0]][1], keyword) for keyword in NAMES)
            groups.append(Group("dicom", tuple(members[n][0] for n in indices), why, *labels))
    return groups


def studies(groups: Iterable[Group]) -> list[list[Group]]:
    """Groups that belong to one study of one patient. A group whose study is not known is one by itself."""
    found: dict[object, list[Group]] = {}
    for group in groups:
        known = (group.kind, group.patient, group.study)
        found.setdefault(known if group.study else group.paths, []).append(group)
    return list(found.values())


def split(series: Sequence[Dataset]) -> list[tuple[tuple[int, ...], str]]:
    """The files of one series, apart where they cannot lie on one grid.

    Returns:
        For each group the indices of its files, and why it is no volume ("" when it is one).
    """
    with pydicom_config.disable_value_validation():
        alike: list[tuple[Any, list[int]]] = []
        for index, dataset in enumerate(series):
            geometry = _geometry(dataset, index)
            for other, indices in alike:
                if _near(geometry, other):
                    indices.append(index)
                    break
            else:
                alike.append((geometry, [index]))
        return [part for _, indices in alike for part in _parts(series, indices)]


def _parts(series: Sequence[Dataset], indices: list[int]) -> list[tuple[tuple[int, ...], str]]:
    why = _why([series[n] for n in indices])
    if why != "four_dimensional":
        return [(tuple(indices), why)]
    pieces: dict[tuple[str, ...], list[int]] = {}
    for n in indices:
        told = tuple(text(series[n], keyword) for keyword in ("ImageType", "EchoNumbers", "EchoTime"))
        pieces.setdefault(told, []).append(n)
    found = [(tuple(piece), _why([series[n] for n in piece])) for piece in pieces.values()]
    return [(tuple(indices), why)] if any(code for _, code in found) else found


def _why(datasets: list[Dataset]) -> str:
    try:
        arranged(datasets)
    except NotDefacedError as refusal:
        return refusal.code
    return ""


def _geometry(dataset: Dataset, index: int) -> tuple[Any, ...]:
    """Size, spacing and direction of a slice; what has none, or many frames, is like nothing else."""
    try:
        picture = placed([dataset])[0]
        size = (int(dataset.Rows), int(dataset.Columns))
    except (NotDefacedError, ValueError, TypeError, AttributeError):
        return (index,)
    if frames(dataset) > 1 or picture.planes is None:
        return (index,)
    plane = picture.planes[0]
    return (size, picture.spacing, np.array([*plane.along_row, *plane.along_column]))


def _near(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if len(one) != len(other) or one[:-1] != other[:-1]:
        return False
    return bool(np.abs(np.asarray(one[-1]) - np.asarray(other[-1])).max() < _STRAIGHT)


def _header(data: bytes) -> tuple[Dataset | None, str]:
    """The header of a DICOM file, or why there is none; neither, it is an index or has nothing but words."""
    with pydicom_config.disable_value_validation():
        try:
            if read_meta(data).media_class.startswith(_WORDS):
                return None, ""
            dataset, _ = parsed(data, pixels_too=False)
        except NotDefacedError as refusal:
            return None, refusal.code
        except FileRejectedError:
            return None, "unreadable"
        return (dataset, "") if "Rows" in dataset else (None, "")


def _is_nifti(path: Path) -> bool:
    return path.name.lower().endswith(_VOLUMES)


def _nifti(data: bytes) -> str:
    try:
        judged(header_of(data[: 1 << 16]))
    except NotDefacedError as refusal:
        return refusal.code
    return ""


def _body(path: Path) -> bytes | str:
    try:
        return contents(path, MAX_BYTES)
    except FileRejectedError as refusal:
        return "too_large" if refusal.code == "too_large" else "unreadable"


def _study(name: str) -> str:
    """The part of a path that names a session of a BIDS folder; the path itself when there is none."""
    parts = name.split(os.sep)
    for place, part in enumerate(parts[:-1]):
        if SUBJECT.fullmatch(part):
            session = place + 1 < len(parts) - 1 and bool(SESSION.fullmatch(parts[place + 1]))
            return os.sep.join(parts[: place + 1 + session])
    return name
