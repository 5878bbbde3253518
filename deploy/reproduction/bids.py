"""Heads with an age from public collections as they are handed out, in BIDS folders.

BIDS (1.10): ``participants.tsv`` with participant_id and age, ``sub-*/[ses-*/]anat/*T1w.nii[.gz]``. OASIS-3 names a
session by days since the first (``ses-d0129``), ADNI's BIDS by months (``ses-M012``), and both state the age at the
first; ``sub-*/sub-*_sessions.tsv`` with an age goes before.

Nobody's label stands in an error: it names the table, the line and the column.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.defacing.training_heads import bids_heads
from agent.deidentify.errors import FileRejectedError
from agent.file_access import contents
from agent.volumes.series import SUBJECT
from protos.common.errors import ConfigError

_MAX_BYTES: Final = 64 * 2**20  # of a table
_OLDEST: Final = 120.0
_NOT_SAID: Final = frozenset({"n/a", ""})
_AGES: Final = ("age", "age_bl", "AgeatEntry")  # BIDS; ADNI's baseline in Clinica; OASIS-3's demographics
_DAYS: Final = 365.25


class ParticipantsTableError(ConfigError, ValueError):
    """A collection is not laid out as it should be. All problems at once, without a value of anybody."""


@dataclass(frozen=True, slots=True)
class HeadScan:
    """One scan of one person. ``path`` is a NIfTI file."""

    person: str = field(repr=False)
    session: str = field(repr=False)
    path: Path = field(repr=False)
    age: float | None = field(repr=False)  # years at the scan; None, the collection does not say

    def __post_init__(self) -> None:
        """Who and which; an age that somebody can have."""
        if not self.person or not (self.age is None or 0 <= self.age <= _OLDEST):
            raise ValueError("a scan has a person, and an age from 0 to 120 or none")


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    rows: tuple[dict[str, str], ...]  # line n + 2 of the file


def bids(folder: Path) -> list[HeadScan]:
    """T1-weighted heads of a BIDS folder, by person and session; the age is the participant's.

    Raises:
        ParticipantsTableError: no participants.tsv, columns or people missing, twice or unknown, an age that is none.
    """
    return _bids(folder, lambda session: 0.0)


def oasis3(folder: Path) -> list[HeadScan]:
    """OASIS-3 as BIDS: a session's name says how many days after the first it was. Raises: see :func:`bids`."""
    return _bids(folder, lambda session: _since(session, r"ses-d(\d{1,5})", _DAYS))


def adni(folder: Path) -> list[HeadScan]:
    """ADNI as BIDS: a session's name says how many months after the first it was. Raises: see :func:`bids`."""
    return _bids(folder, lambda session: _since(session, r"ses-M(\d{1,3})", 12.0))


def _bids(folder: Path, years_after: Callable[[str], float | None]) -> list[HeadScan]:
    read = _table(folder / "participants.tsv", ("participant_id",))
    column = next((name for name in _AGES if not read.rows or name in read.rows[0]), None)
    if column is None:
        raise ParticipantsTableError(f"{read.name}: no column {', '.join(_AGES)}")
    problems: list[str] = []
    lines = _once(read, "participant_id", problems)
    for person, line in lines.items():
        if not SUBJECT.fullmatch(person):
            problems.append(f"{read.name}: line {line + 2}: participant_id: not sub- and letters or digits")
    scans: list[HeadScan] = []
    for person, session, path in bids_heads(folder):
        if person not in lines:
            problems.append(f"{read.name}: a folder of a participant has no line")
            continue
        age = _age(read, lines[person], column, problems)
        stated = _of_session(folder / person / f"{person}_sessions.tsv", session, problems)
        if stated is None and age is not None:
            later = years_after(session)
            if later is None:
                problems.append(f"{folder.name}: a session's name does not state the time since the first one")
            stated = None if later is None or not age + later <= _OLDEST else age + later
        scans.append(HeadScan(person, session, path, stated))
    if not scans:
        problems.append(f"{folder.name}: no sub-*/[ses-*/]anat/*T1w.nii or .nii.gz")
    _raise(problems)
    return scans


def _of_session(path: Path, session: str, problems: list[str]) -> float | None:
    if not (session and path.is_file()):
        return None
    try:
        read = _table(path, ("session_id",), called="a sessions.tsv")
    except ParticipantsTableError as problem:
        problems.append(str(problem))
        return None
    line = _once(read, "session_id", problems).get(session)
    if line is None or "age" not in read.rows[line]:
        return None
    return _age(read, line, "age", problems)


def _since(session: str, pattern: str, per_year: float) -> float | None:
    found = re.fullmatch(pattern, session)
    return int(found[1]) / per_year if found else None


def _age(table: _Table, line: int, column: str, problems: list[str]) -> float | None:
    told = table.rows[line][column].strip()
    if told in _NOT_SAID:
        return None
    try:
        age = float(told.removesuffix("+"))  # 89+ is how BIDS says older than that
    except ValueError:
        age = math.nan
    if not 0 <= age <= _OLDEST:
        problems.append(f"{table.name}: line {line + 2}: {column}: not an age in years")
        return None
    return age


def _once(table: _Table, column: str, problems: list[str]) -> dict[str, int]:
    """Line of each value of a column, each of which stands there once."""
    values = [row[column].strip() for row in table.rows]
    times = Counter(values)
    problems += [
        f"{table.name}: line {n + 2}: {column}: {'empty' if not value else 'appears twice'}"
        for n, value in enumerate(values)
        if not value or times[value] > 1
    ]
    return {value: n for n, value in enumerate(values)}


def _table(path: Path, columns: tuple[str, ...], called: str = "") -> _Table:
    name = called or path.name
    try:
        body = contents(path.resolve(), _MAX_BYTES).decode("utf-8-sig")
    except FileRejectedError as refusal:
        raise ParticipantsTableError(
            f"{name}: {'too large' if refusal.code == 'too_large' else 'cannot be read'}"
        ) from None
    except UnicodeDecodeError:
        raise ParticipantsTableError(f"{name}: not UTF-8") from None
    reader = csv.DictReader(io.StringIO(body), delimiter="\t", strict=True)
    try:
        rows = list(reader)
    except csv.Error:
        raise ParticipantsTableError(f"{name}: line {reader.line_num}: not a table") from None
    head = list(reader.fieldnames or [])
    missing = [column for column in columns if head.count(column) != 1]
    if missing:
        raise ParticipantsTableError(f"{name}: no column, or two, {', '.join(missing)}")
    # a line with too few or too many cells: csv says so with a missing value, or with a key None
    uneven = [n for n, row in enumerate(rows) if None in row or None in row.values()]
    if uneven:
        raise ParticipantsTableError(
            "; ".join(f"{name}: line {n + 2}: another number of columns" for n in uneven[:10])
        )
    return _Table(name, tuple(rows))


def _raise(problems: list[str]) -> None:
    if problems:
        each = list(dict.fromkeys(problems))
        more = f"; and {len(each) - 20} more" if len(each) > 20 else ""
        raise ParticipantsTableError("; ".join(each[:20]) + more)
