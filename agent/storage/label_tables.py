"""Label tables: what the hospital says of its patients, studies, series and images, sealed in the project's vault.

A row belongs to one patient, by the pseudonym, and to what the patient's own study, series or instance is called in
the vault: the keys that the hospital typed are not kept. So an opt-out finds a patient's rows, and the end of the
project ends all of them. A missing value is ``None``, which is none of the column's values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from agent.errors import SiteConfigError
from agent.storage.instance_index import InstanceRecord
from agent.storage.vault import Vault

Kind = Literal["binary", "category", "several", "number"]
Level = Literal["patient", "study", "series", "instance"]
Value = int | float | tuple[int, ...] | None  # 0 or 1; which value; which values; a number; missing
RARE: Final = 11  # a value of fewer patients is told to be rare, to the site alone
MAX_COLUMNS: Final = 64
MAX_VALUES: Final = 64  # of a category: one of more is free text
MAX_TEXT: Final = 64  # characters of a declared value
USED: Final = "label_tables_used"  # of the vault: by run, the table and its version
MOST_RUNS: Final = 256  # runs of which that is kept: a further one loses the oldest
_NO_CLASS: Final = ("a number", "missing", "none of them")  # words for what is no declared value
_PLACE: Final = "labels/"
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_OWNS: Final[Mapping[Level, Callable[[InstanceRecord], str]]] = MappingProxyType(
    {
        "patient": lambda head: head.person,
        "study": lambda head: head.study,
        "series": lambda head: head.series,
        "instance": lambda head: head.name,
    }
)


class LabelTableError(SiteConfigError):
    """There is no such label table, or it cannot be what it says. The text names no patient and no value."""


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """One column and its declared kind. All of it is public: no value is declared by what the rows say."""

    name: str
    kind: Kind
    values: tuple[str, ...] = ()  # of category and several, in this order
    unit: str = ""  # of a number, as the hospital writes it (UCUM where it can)
    low: float = 0.0  # a number's public bounds, both included
    high: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a column that could hold free text, or a number without bounds."""
        if not _NAME.fullmatch(self.name):
            raise ValueError("a column has a short name of a-z, 0-9, _ and -, which begins with a letter")
        if self.kind not in get_args(Kind):
            raise ValueError("kind must be binary, category, several or number")
        if (self.kind in ("category", "several")) is not (self.values != ()):
            raise ValueError("category and several declare their values, and no other kind does")
        if self.kind == "category" and len(self.values) < 2:
            raise ValueError("values: a category has two or more")
        if len(self.values) > MAX_VALUES or len(set(self.values)) != len(self.values):
            raise ValueError(f"values: at most {MAX_VALUES}, each once")
        if not all(_plain(value) for value in (*self.values, *([self.unit] if self.unit else []))):
            raise ValueError(
                f"values and unit: 1 to {MAX_TEXT} printable characters, no space at an end, not = or @ first"
            )
        if (self.kind == "number") is not (self.unit != "") or (self.kind != "number" and (self.low or self.high)):
            raise ValueError('a number has a unit ("1" for none) and bounds, low and high; no other kind has')
        if self.kind == "number" and not (
            math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high
        ):
            raise ValueError("low must be below high, and both finite")

    def admits(self, value: Value) -> bool:
        """Is this a value of the column, or missing?"""
        if value is None:
            return True
        match self.kind:
            case "binary":
                return type(value) is int and value in (0, 1)
            case "category":
                return type(value) is int and 0 <= value < len(self.values)
            case "several":
                return isinstance(value, tuple) and all(0 <= one < len(self.values) for one in value)
            case "number":
                return type(value) is float and self.low <= value <= self.high


def _plain(text: str) -> bool:
    if not 0 < len(text) <= MAX_TEXT or text in _NO_CLASS:
        return False
    return text.isprintable() and text == text.strip() and text[0] not in "=@"


@dataclass(frozen=True, slots=True, eq=False)
class LabelTable:
    """One version of one table."""

    name: str
    key: str  # by which kind of key it was imported
    level: Level  # what a row is of
    columns: tuple[LabelColumn, ...]
    rows: Mapping[tuple[str, str], tuple[Value, ...]] = field(repr=False)  # pseudonym, and what the row is of
    version: str = ""  # set by the vault that holds it

    def __post_init__(self) -> None:
        """Refuse a value that its column does not declare."""
        if not _NAME.fullmatch(self.name):
            raise LabelTableError(
                "a label table has a short name of a-z, 0-9, _ and -, which begins with a letter: say --name NAME"
            )
        names = [column.name for column in self.columns]
        if self.level not in _OWNS or not 0 < len(names) <= MAX_COLUMNS or len(set(names)) != len(names):
            raise LabelTableError(f"a label table has 1 to {MAX_COLUMNS} columns, each name once")
        for values in self.rows.values():
            if len(values) != len(names) or not all(map(LabelColumn.admits, self.columns, values)):
                raise LabelTableError("a row has a value that its column does not declare")

    def column(self, name: str) -> int:
        """Where a column is.

        Raises:
            LabelTableError: there is none of that name.
        """
        for at, column in enumerate(self.columns):
            if column.name == name:
                return at
        raise LabelTableError(
            f"the label table {self.name} has no column {name}: `labels show {self.name}` lists them"
        )

    def of(self, head: InstanceRecord) -> tuple[Value, ...] | None:
        """The row that an instance falls under; None, there is none."""
        return self.rows.get((head.person, _OWNS[self.level](head)))

    def encode(self) -> bytes:
        """As canonical JSON, without the version: the rows in the order of their names."""
        columns = [[c.name, c.kind, list(c.values), c.unit, c.low, c.high] for c in self.columns]
        rows = [[*whose, list(values)] for whose, values in sorted(self.rows.items())]
        whole = {"name": self.name, "key": self.key, "level": self.level, "columns": columns, "rows": rows}
        return json.dumps(whole, separators=(",", ":"), sort_keys=True).encode()


def _decoded(raw: bytes) -> LabelTable:
    declared, written = _declared(raw)
    return replace(declared, rows={(person, name): tuple(map(_value, values)) for person, name, values in written})


def _declared(raw: bytes) -> tuple[LabelTable, list[Any]]:
    """The table without its rows, and these as they are written."""
    version, _, body = raw.partition(b"\n")
    said = json.loads(body)
    columns = tuple(LabelColumn(n, k, tuple(v), u, low, high) for n, k, v, u, low, high in said["columns"])
    return LabelTable(said["name"], said["key"], said["level"], columns, {}, version.decode()), said["rows"]


def _value(said: Any) -> Value:
    return tuple(said) if isinstance(said, list) else said


def _without(table: LabelTable, persons: Set[str]) -> LabelTable:
    rows = {whose: values for whose, values in table.rows.items() if whose[0] not in persons}
    return LabelTable(table.name, table.key, table.level, table.columns, rows, table.version)


def _sealed(table: LabelTable) -> bytes:
    return table.version.encode() + b"\n" + table.encode()


# -- the tables of a vault


def table_names(vault: Vault) -> tuple[str, ...]:
    """The names of a project's label tables, sorted."""
    return tuple(name.removeprefix(_PLACE) for name in vault.places(_PLACE))


def read_table(vault: Vault, name: str) -> LabelTable:
    """One label table.

    Raises:
        LabelTableError: there is none of that name.
    """
    return _decoded(_raw(vault, name))


def read_declaration(vault: Vault, name: str) -> LabelTable:
    """What a label table declares, which is public: the same without its rows.

    Raises:
        LabelTableError: there is none of that name.
    """
    return _declared(_raw(vault, name))[0]


def _raw(vault: Vault, name: str) -> bytes:
    raw = vault.place(_PLACE + name).read() if _NAME.fullmatch(name) else None
    if raw is None:
        raise LabelTableError("there is no label table of that name: `labels list` shows their names")
    return raw


def keep_table(vault: Vault, table: LabelTable) -> LabelTable:
    """Store a table in the place of its older version, whole or not at all; durable when this returns.

    Who has opted out gets no row: that is asked under the lock, and who opts out later is deleted after this.

    Returns:
        What was stored, with its version.
    Raises:
        VaultError: a full or failing disk; the older version stays.
    """
    kept: list[LabelTable] = []

    def change(_old: bytes | None) -> bytes:
        admitted = _without(table, vault.opted_out())
        version = vault.version_of(admitted.encode())
        kept.append(LabelTable(table.name, table.key, table.level, table.columns, admitted.rows, version))
        return _sealed(kept[0])

    vault.place(_PLACE + table.name).change(change)
    return kept[0]


def remove_table(vault: Vault, name: str) -> None:
    """Delete a table, so that its ciphertext is neither in the file nor in the log.

    Raises:
        LabelTableError: there is none of that name.
    """
    read_table(vault, name)
    vault.place(_PLACE + name).clear()


def forget_patients(vault: Vault, persons: Set[str]) -> int:
    """Delete the rows of these patients from every table, and return how many. A table's version stays its name.

    Raises:
        VaultError: a failing disk: say it again.
    """
    gone = 0
    for name in table_names(vault):

        def change(old: bytes | None) -> bytes | None:
            nonlocal gone
            if old is None:  # removed meanwhile
                return None
            table = _decoded(old)
            fewer = _without(table, persons)
            gone += len(table.rows) - len(fewer.rows)
            return _sealed(fewer)

        vault.place(_PLACE + name).change(change)
    return gone


# -- the version that a run uses, noted at the site alone: it hangs on patients (P8)


@dataclass(frozen=True, slots=True)
class TableUse:
    """Which version of a table a federated run learns from."""

    run: str
    table: str
    version: str

    def words(self) -> str:
        """For persons at the site."""
        return f"label table {self.table}, version {self.version}"


def tables_used(note: Any) -> dict[str, TableUse]:
    """What is noted under ``USED``, by run, the oldest first."""
    return {run: TableUse(run, table, version) for run, (table, version) in (note or {}).items()}


def stay_with(vault: Vault, run: str, table: LabelTable) -> None:
    """Note that a run learns from this version of a table, and from no other from now on.

    Raises:
        LabelTableError: the run began with another one.
    """
    using = [table.name, table.version]
    began = (vault.note(USED) or {}).get(run)
    if began is None:
        vault.change_note(USED, lambda note: dict([*{**(note or {}), run: using}.items()][-MOST_RUNS:]))
    elif began != using:
        raise LabelTableError(
            f"the run {run} began with version {began[1][:12]} of the label table {began[0]}, and the table was "
            f"replaced by version {table.version[:12]}: leave the run by `jobs cancel`, or import the former again"
        )


# -- what is told of a table, to the site alone


@dataclass(frozen=True, slots=True)
class ValueCount:
    """How many patients have a value. For the site's own console, and nowhere else (P8, P14)."""

    column: str
    value: str  # as it is declared; "yes" and "no" of a binary column; "a number"; "missing"
    patients: int
    rare: bool  # fewer than RARE patients, and not zero


def count_values(table: LabelTable) -> tuple[ValueCount, ...]:
    """The patients behind every value of every column, in the order of the declaration."""
    found = []
    for at, column in enumerate(table.columns):
        persons: dict[str, set[str]] = {}
        for (person, _), values in table.rows.items():
            for word in words_of(column, values[at]):
                persons.setdefault(word, set()).add(person)
        for word in _words(column):
            count = len(persons.get(word, ()))
            found.append(ValueCount(column.name, word, count, word not in _NO_CLASS and 0 < count < RARE))
    return tuple(found)


def _words(column: LabelColumn) -> Iterable[str]:
    match column.kind:
        case "binary":
            return ("no", "yes", "missing")
        case "category":
            return (*column.values, "missing")
        case "several":
            return (*column.values, "none of them", "missing")
        case "number":
            return ("a number", "missing")


def words_of(column: LabelColumn, value: Value) -> tuple[str, ...]:
    """A value in words, as :class:`ValueCount` has them."""
    if value is None:
        return ("missing",)
    if isinstance(value, tuple):
        return tuple(column.values[one] for one in value) or ("none of them",)
    if isinstance(value, float):
        return ("a number",)
    return (column.values[value],) if column.values else (("no", "yes")[value],)
