"""The hospital's lists next to its files: the patient of a volume, and the label of an image.

NIfTI names no patient, so a list must (P3: k counts patients). Four forms: ``nifti.csv`` and ``labels.csv``, a BIDS
dataset's ``participants.tsv``, and a MONAI data list. pybids was rejected: it indexes a whole dataset into SQLite and
pulls pandas, for what is one table and one rule of names; MONAI's own reader pulls the framework.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from agent.file_access import walk
from agent.ingest.nifti_pairs import VOLUME, MaskNames, MaskOf, bids_name, bids_pairs
from protos.common.errors import ConfigError

LABELS: Final = "labels.csv"
PATIENTS: Final = "nifti.csv"
BIDS_MARK: Final = "dataset_description.json"
PARTICIPANTS: Final = "participants.tsv"
_MAX_LABEL: Final = 64
_MAX_ROWS: Final = 5_000_000
_MAX_LIST_BYTES: Final = 512 * 2**20
_SUBJECT: Final = re.compile(r"sub-[0-9A-Za-z]+")


class PatientListError(ConfigError, ValueError):
    """The folder, or a list in it, cannot be used. The text names the file and the line, never a value."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What the lists of one folder call the patient and the label."""

    patient: str = ""  # BIDS: a column of participants.tsv; MONAI: a key of every entry
    label: str = ""  # the same for the label; "" when there is none
    issuer: str = ""  # who gave out these patient ids; "" for the site's own
    data_list: str = ""  # path of a MONAI data list below the folder; "" when there is none
    mask: str = ""  # MONAI: the key of every entry that names the mask of its image; "" when there is none


@dataclass(frozen=True, slots=True)
class Lists:
    """The contents of the lists. Keys are paths below the folder, with ``/``."""

    patients: Mapping[str, str] = field(default_factory=dict, repr=False)
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)
    labels_of_instances: Mapping[str, str] = field(default_factory=dict, repr=False)  # SOP Instance UID -> label
    issuer: str = ""
    aside: frozenset[str] = frozenset()  # the lists themselves: read here, and no images
    masks: Mapping[str, MaskOf] = field(default_factory=dict)  # NIfTI files that are masks, and of what


_USUAL: Final = Columns()


def read_lists(
    folder: Path, columns: Columns = _USUAL, names: MaskNames | None = None, segments: Iterable[str] = ()
) -> Lists:
    """Read whatever lists stand in a folder, and find the masks among its NIfTI files.

    Args:
        folder: only read.
        columns: what its lists call the patient, the label and the mask.
        names: the site's rule of names of masks.
        segments: the names of the site's segments.
    Raises:
        PatientListError: no such folder, or a list is unreadable, contradicts itself, or leaves a volume without a
        patient.
    """
    if not folder.is_dir():
        raise PatientListError("the folder to ingest does not exist or is not a folder")
    patients = read_pairs(folder / PATIENTS, ("file", "patient_id"))
    by_uid = _labels(read_pairs(folder / LABELS, ("sop_instance_uid", "label")), LABELS)
    labels: dict[str, str] = {}
    masks: dict[str, MaskOf] = {}
    aside = {LABELS, PATIENTS}
    if columns.data_list:
        _monai(folder, columns, patients, labels, masks)
        aside.add(columns.data_list)
    if (folder / BIDS_MARK).is_file():
        _bids(folder, columns, patients, labels)
        aside |= {BIDS_MARK, PARTICIPANTS}
        by_name = {bids_name(segment): segment for segment in segments}
        masks = bids_pairs(folder, _niftis(folder), patients, by_name) | masks
    if names is not None:
        masks = names.pairs(_niftis(folder)) | masks
    _give_patients(masks, patients)
    return Lists(patients, labels, by_uid, columns.issuer, frozenset(aside), masks)


def _niftis(folder: Path) -> frozenset[str]:
    return frozenset(path.replace(os.sep, "/") for path in walk(folder, ()) if path.endswith(VOLUME))


def _give_patients(masks: Mapping[str, MaskOf], patients: dict[str, str]) -> None:
    """A mask is of its volume's patient.

    Raises:
        PatientListError: a list says another one.
    """
    for path, one in masks.items():
        whose = patients.get(one.volume, "")
        if whose and patients.setdefault(path, whose) != whose:
            raise PatientListError("the lists of the folder give a mask another patient than its volume")


def read_pairs(path: Path, columns: tuple[str, str]) -> dict[str, str]:
    """A two-column CSV list of the hospital; empty when there is none.

    Raises:
        PatientListError: not UTF-8 CSV with this first line, an empty cell, or a contradiction.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.reader(stream, strict=True)
            if tuple(next(rows, [])) != columns:
                raise PatientListError(f"{path.name}: the first line must be {','.join(columns)}")
            found: dict[str, str] = {}
            for row in rows:
                if not row:
                    continue
                line = rows.line_num
                if len(row) != len(columns) or not all(cell.strip() for cell in row) or line > _MAX_ROWS:
                    raise PatientListError(f"{path.name} line {line}: two values are needed, {' and '.join(columns)}")
                key, value = row[0].strip(), row[1].strip()
                if found.setdefault(key, value) != value:
                    raise PatientListError(f"{path.name} line {line}: contradicts an earlier line")
            return found
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, csv.Error):
        raise PatientListError(f"{path.name}: cannot be read as UTF-8 CSV") from None


def _labels(raw: dict[str, str], name: str) -> dict[str, str]:
    if not all(len(label) <= _MAX_LABEL and label.isprintable() for label in raw.values()):
        raise PatientListError(f"{name}: a label must be at most {_MAX_LABEL} printable characters")
    return raw


def _bids(folder: Path, columns: Columns, patients: dict[str, str], labels: dict[str, str]) -> None:
    """BIDS 1.10, "participants file" and "filename template": sub-LABEL/[ses-LABEL/]DATATYPE/sub-LABEL_….nii[.gz]."""
    column = columns.patient or "participant_id"
    people = _participants(folder / PARTICIPANTS, column, columns.label)
    for path in sorted(folder.rglob("sub-*")):
        inside = path.relative_to(folder).as_posix()
        if path.is_dir() or not inside.endswith(VOLUME) or inside in patients:
            continue
        subject = PurePosixPath(inside).parts[0]
        if not _SUBJECT.fullmatch(subject) or not PurePosixPath(inside).name.startswith(f"{subject}_"):
            continue  # it has no patient then, and is quarantined for it
        if subject in people:
            patients[inside], label = people[subject]
            if label:
                labels[inside] = label


def _participants(path: Path, patient: str, label: str) -> dict[str, tuple[str, str]]:
    """Subject -> (patient id, label) of ``participants.tsv``."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.DictReader(stream, delimiter="\t", strict=True)
            needed = {"participant_id", patient} | ({label} if label else set())
            if not needed <= set(rows.fieldnames or ()):
                raise PatientListError(f"{PARTICIPANTS}: the columns {', '.join(sorted(needed))} are needed")
            people: dict[str, tuple[str, str]] = {}
            for row in rows:
                subject, who = (row["participant_id"] or "").strip(), (row[patient] or "").strip()
                what = (row[label] or "").strip() if label else ""
                what = "" if what == "n/a" else what
                if not (_SUBJECT.fullmatch(subject) and who and who != "n/a"):
                    raise PatientListError(
                        f"{PARTICIPANTS} line {rows.line_num}: a participant and a patient are needed"
                    )
                if people.setdefault(subject, (who, what)) != (who, what):
                    raise PatientListError(f"{PARTICIPANTS} line {rows.line_num}: contradicts an earlier line")
    except FileNotFoundError:
        raise PatientListError(f"{PARTICIPANTS} is missing: a BIDS dataset without it names no patient") from None
    except (OSError, UnicodeDecodeError, csv.Error):
        raise PatientListError(f"{PARTICIPANTS}: cannot be read as UTF-8, tab-separated") from None
    _labels({s: what for s, (_, what) in people.items()}, PARTICIPANTS)
    return people


def _monai(
    folder: Path,
    columns: Columns,
    patients: dict[str, str],
    labels: dict[str, str],
    masks: dict[str, MaskOf],
) -> None:
    """A MONAI data list: {"training": [{"image": PATH, …}], …}; each entry names its patient."""
    name = columns.data_list
    if not columns.patient:
        raise PatientListError(f"{name}: say which key of an entry names the patient (patient_key)")
    for section, entries in _json_object(folder / name).items():
        if not isinstance(entries, list):
            continue
        for number, entry in enumerate(entries):
            if isinstance(entry, dict):
                where = f"{name}: {section}[{number}]"
                images = _monai_entry(folder, columns, (where, entry), patients, labels)
                if columns.mask and (mask := entry.get(columns.mask)) is not None:
                    of = MaskOf(images[0] if len(images) == 1 else "")
                    if masks.setdefault(_inside(folder, mask, where), of) != of:
                        raise PatientListError(f"{where}: its mask is of another image in an earlier entry")


def _monai_entry(
    folder: Path, columns: Columns, told: tuple[str, dict[str, Any]], patients: dict[str, str], labels: dict[str, str]
) -> list[str]:
    """Patient and label of an entry's images, and the paths of these below the folder."""
    where, entry = told
    images = entry.get("image")
    who = entry.get(columns.patient)
    if type(who) is not str or not who.strip():
        raise PatientListError(f"{where}: no patient under the key that was named")
    found = [_inside(folder, image, where) for image in (images if isinstance(images, list) else [images])]
    for inside in found:
        if patients.setdefault(inside, who.strip()) != who.strip():
            raise PatientListError(f"{where}: contradicts an earlier entry")
        label = entry.get(columns.label) if columns.label else None
        if isinstance(label, str | int) and type(label) is not bool:
            labels[inside] = _labels({"": str(label)}, where)[""]
    return found


def _inside(folder: Path, image: object, where: str) -> str:
    """The path of an entry's image or mask below the folder."""
    inside = PurePosixPath(image) if isinstance(image, str) else PurePosixPath("..")
    if inside.is_absolute():
        inside = inside.relative_to(folder) if inside.is_relative_to(folder) else PurePosixPath("..")
    if ".." in inside.parts or not inside.parts:
        raise PatientListError(f"{where}: image and mask must be paths below the folder")
    return inside.as_posix()


def _json_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_LIST_BYTES:
            raise PatientListError(f"{path.name}: too large for a list")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise PatientListError(f"{path.name}: cannot be read as JSON") from None
    if not isinstance(found, dict):
        raise PatientListError(f"{path.name}: must be a JSON object of lists")
    return found
