"""A hospital's table of labels, CSV beside a TOML that declares its columns, read row by row.

What spreadsheets do to a table is looked for and told with the row's number: dates and rounded numbers in the place
of what was typed, formulas, another separator, a decimal comma, another encoding. A text that is not declared is
never taken. No message holds a cell: row numbers, and the names of declared columns.
"""

from __future__ import annotations

import csv
import io
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from agent.deidentify.errors import FileRejectedError
from agent.file_access import contents
from agent.storage.label_tables import MAX_COLUMNS, Kind, LabelColumn, LabelTableError, Value
from agent.toml_config import Tables, converter
from protos.common.errors import Signal

MAX_BYTES: Final = 256 * 2**20
MAX_TOML: Final = 2**20
MAX_ROWS: Final = 500_000
MAX_LINE: Final = 64 * 2**10  # characters
MAX_KEY: Final = 128  # characters
TOLD: Final = 1000  # row numbers of one finding
_MOST_ZEROS: Final = 9  # before a number
_SEPARATORS: Final = (";", ",", "\t", "|")
_MONTHS: Final = "jan|feb|m[aä]r|apr|ma[iyj]|jun|jul|aug|sep|o[ck]t|nov|de[cz]"
_DATE: Final = re.compile(
    r"\d{1,2}[./-]\d{1,2}[./-](?:\d{2}|\d{4})|\d{4}-\d\d-\d\d(?:[ T].*)?"
    rf"|\d{{1,2}}[-. ]+(?:{_MONTHS})\w*\.?(?:[-. ]+\d{{2,4}})?|(?:{_MONTHS})\w*\.?[-. ]\d{{2,4}}",
    re.IGNORECASE,
)
_ROUNDED: Final = re.compile(r"-?\d(?:[.,]\d+)?E[+-]\d{2,3}|\d+[.,]0", re.IGNORECASE)  # 1,23E+11; 123.0
_NUMBER: Final = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_FORMULA: Final = ("=", "+", "@", "-")
_YES: Final = ("1", "yes", "true")
_NO: Final = ("0", "no", "false")
FAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "encoding": "characters that are not UTF-8: save the table as `CSV UTF-8`",
        "control_character": "a NUL or another control character",
        "long_line": f"a line of more than {MAX_LINE} characters",
        "quotes": "a quotation mark that is not closed, or a line break in a cell",
        "cells": "more or fewer cells than the first row has",
        "no_key": "no key",
        "key_rounded": "the key looks like a number that the spreadsheet rounded: format the column as text",
        "key_unreadable": f"the key is longer than {MAX_KEY} characters, or is not one plain text",
        "formula": "a cell that begins with =, +, @ or -, which spreadsheets run as a formula",
        "date": "a date: the spreadsheet changed what was typed; format the column as text and export again",
        "undeclared": "a value that the declaration does not list: free text is not taken",
        "not_binary": "neither a `yes` nor a `no` of the declaration",
        "not_a_number": "not a number, written without unit and thousands",
        "decimal_sign": "a number with the other decimal sign: see `decimal` of the declaration",
        "out_of_bounds": "a number outside `low` and `high`",
        "contradiction": "another value than an earlier row has for the same",
    }
)
NOTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "repeated": "says again what an earlier row says: counted once",
        "unmatched": "the key matches nothing in the vault: left out; import again when the images are in",
        "unmatched_zeros": "the same, and with zeros before it the key would match: the spreadsheet dropped them",
        "unmatched_date": "the same, and the key looks like a date: the spreadsheet may have changed it",
        "shared": "the files of more than one patient say this key: each of them has the row",
    }
)
Own = tuple[str, str]  # pseudonym, and what a row is of


class LabelSheetError(LabelTableError):
    """The table, or its declaration, cannot be read at all. The text holds no cell."""


@dataclass(frozen=True, slots=True)
class _TableTable:
    """How the table is written, and which of its columns holds the keys."""

    key_column: str  # the title of the column that holds the keys
    issuer: str = ""  # who gave out the patient ids; "": the site's own (ingest.toml)
    separator: str = ""  # between cells: one of ; , | or a tab; "": whichever gives the declared columns
    decimal: Literal[".", ","] = "."  # the decimal sign of numbers
    missing: tuple[str, ...] = ("",)  # words that stand for no value; an empty cell always does

    def __post_init__(self) -> None:
        """One separator, and words that can be found."""
        if self.separator not in ("", *_SEPARATORS):
            raise ValueError("separator: one of ; , | and a tab")
        if self.decimal not in (".", ","):
            raise ValueError('decimal: "." or ","')
        if not self.key_column.strip() or not all(word == word.strip() for word in self.missing):
            raise ValueError("key_column is needed, and no word of `missing` has a space at an end")


@dataclass(frozen=True, slots=True)
class _ColumnTable:
    """What one column holds. Tasks name it by NAME."""

    name: str
    kind: Kind  # binary, category, several or number
    title: str = ""  # of the column in the table, when it is not its name
    values: tuple[str, ...] = ()  # of category and several: all that a cell may say
    yes: tuple[str, ...] = _YES  # of binary; upper and lower case are one
    no: tuple[str, ...] = _NO  # of binary
    between: str = "|"  # of several: the sign between two values of a cell
    none: str = "none"  # of several: the word for none of them, which is not the same as missing
    unit: str = ""  # of a number: UCUM if you can, "1" for none
    low: float = 0.0  # of a number: the lowest, from public knowledge and never from the table
    high: float = 0.0  # of a number: the highest
    outside: Literal["refuse", "clip"] = "refuse"  # a number out of bounds: refuse it, or take the bound

    def __post_init__(self) -> None:
        """What a cell says can be told in one way only."""
        LabelColumn(self.name, self.kind, self.values, self.unit, self.low, self.high)
        yes, no = ({word.casefold() for word in words} for words in (self.yes, self.no))
        if not yes or not no or yes & no:
            raise ValueError("yes and no: one word or more each, and none of both")
        if self.outside not in ("refuse", "clip"):
            raise ValueError("outside: refuse or clip")
        if len(self.between) != 1 or self.none in self.values or any(self.between in v for v in self.values):
            raise ValueError("between: one sign that is in no value; none: a word that is no value")

    @property
    def words(self) -> tuple[str, ...]:
        """All that a cell may say, but for numbers."""
        match self.kind:
            case "binary":
                return (*self.yes, *self.no)
            case "several":
                return (*self.values, self.none)
            case _:
                return self.values


@dataclass(frozen=True, slots=True)
class SheetDeclaration:
    """What the columns of a table hold, as a data manager declares it."""

    table: _TableTable
    columns: tuple[_ColumnTable, ...]

    @property
    def declared(self) -> tuple[LabelColumn, ...]:
        """The columns as a label table has them."""
        return tuple(LabelColumn(c.name, c.kind, c.values, c.unit, c.low, c.high) for c in self.columns)

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles that the first row must have: of the key's column, then of each declared one."""
        return (self.table.key_column.strip(), *(column.title or column.name for column in self.columns))


@dataclass(frozen=True, slots=True)
class SheetFinding:
    """What was found in some rows. It can be shown: numbers, and the name of a declared column."""

    code: str  # of FAULTS or NOTES
    column: str  # "": of the whole row, or of its key
    count: int
    rows: tuple[int, ...]  # the first TOLD, as a spreadsheet numbers them: the titles are row 1
    earlier: tuple[int, ...] = ()  # for each of them: the row that it contradicts, or repeats


@dataclass(slots=True)
class _Tally:
    """What is found, row after row."""

    rows: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    earlier: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, code: str, row: int, column: str = "", earlier: int = 0) -> None:
        what = (code, column)
        self.counts[what] = self.counts.get(what, 0) + 1
        if self.counts[what] <= TOLD:
            self.rows.setdefault(what, []).append(row)
            if earlier:
                self.earlier.setdefault(what, []).append(earlier)

    def of(self, codes: Mapping[str, str]) -> tuple[SheetFinding, ...]:
        order = list(codes)
        chosen = sorted((what for what in self.counts if what[0] in codes), key=lambda w: (order.index(w[0]), w[1]))
        return tuple(
            SheetFinding(*what, self.counts[what], tuple(self.rows[what]), tuple(self.earlier.get(what, ())))
            for what in chosen
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sheet:
    """A table that was read. With a fault in it, nothing of it may be imported."""

    rows: Mapping[Own, tuple[Value, ...]] = field(repr=False)
    read: int  # rows below the titles, empty ones not counted
    faults: tuple[SheetFinding, ...]
    notes: tuple[SheetFinding, ...]
    encoding: str
    separator: str


def read_declaration(path: Path) -> SheetDeclaration:
    """The TOML that declares the columns of a table.

    Raises:
        LabelSheetError: it is not there, or all its problems at once.
    """
    body = _bytes(path, MAX_TOML, "it declares the kind of each column; or name another one with --columns FILE")
    try:
        raw = tomllib.loads(body.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise LabelSheetError(f"{path.name}: not TOML in UTF-8") from None
    tables = Tables(raw, converter(path.parent))
    tables.problems += [f"unknown table: {name}" for name in raw if name not in ("table", "columns")]
    table, columns = tables.table("table", _TableTable), tables.named("columns", _ColumnTable)
    if table is None and "table" not in raw:
        tables.problems.append("table.key_column: missing: the title of the column that holds the keys")
    if not tables.problems and not 0 < len(columns) <= MAX_COLUMNS:
        tables.problems.append(f"columns: 1 to {MAX_COLUMNS} tables [columns.NAME]")
    made = SheetDeclaration(table, tuple(columns.values())) if table and not tables.problems else None
    if made is not None and len(set(made.titles)) != len(made.titles):
        tables.problems.append("columns: two have the same title, or one has that of the key")
    if made is not None and any(set(made.table.missing) & set(column.words) for column in made.columns):
        tables.problems.append("table.missing: a word is also a value of a column")
    if tables.problems or made is None:
        raise LabelSheetError(f"{path.name}: " + "; ".join(tables.problems))
    return made


def read_sheet(path: Path, declaration: SheetDeclaration, owners: Callable[[str], frozenset[Own]]) -> Sheet:
    """Read a table. Keys become pseudonyms row by row, and none is kept.

    Args:
        path: of the CSV.
        declaration: what its columns hold; other columns are not looked at.
        owners: whose a key is, and which study, series or instance; empty where it matches nothing.
            Raises ValueError where it is not one plain text.
    Raises:
        LabelSheetError: not a CSV with these columns at all.
    """
    data = _bytes(path, MAX_BYTES, "it is read as CSV; divide one that is too large")
    encoding = _encoding(data, path.name)
    lines = _lines(data, encoding)
    titles, separator, start = _titles(lines, declaration, path.name)
    reader = _Reader(declaration, [titles.index(title) for title in declaration.titles], len(titles), owners)
    for number, line in enumerate(lines, start):
        if reader.read >= MAX_ROWS:
            raise LabelSheetError(f"{path.name}: more than {MAX_ROWS} rows: divide it into tables of other names")
        reader.row(number, line, separator)
    return Sheet(
        {own: values for own, (_, values) in reader.found.items()},
        reader.read,
        reader.tally.of(FAULTS),
        reader.tally.of(NOTES),
        encoding,
        separator,
    )


def _bytes(path: Path, most: int, what: str) -> bytes:
    try:
        return contents(path, most)
    except FileRejectedError as refusal:
        large = f"larger than {most >> 20} MiB"
        why = large if refusal.code == "too_large" else "not found, not readable, or not a file"
        raise LabelSheetError(f"{path.name}: {why}: {what}") from None


def _encoding(data: bytes, name: str) -> str:
    if data.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        raise LabelSheetError(f"{name}: UTF-32 is not read: save it as `CSV UTF-8`")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if b"\0" in data[:64]:
        raise LabelSheetError(
            f"{name}: NUL bytes: UTF-16 without its mark, or no text at all: save it as `CSV UTF-8`"
        )
    return "utf-8-sig"


def _lines(data: bytes, encoding: str) -> Iterator[str]:
    """Lines without their ends. Of a longer one so much comes that its length is seen; the rest is passed over."""
    stream = io.TextIOWrapper(io.BytesIO(data), encoding, errors="replace", newline="")
    while line := stream.readline(MAX_LINE + 2):
        part = line
        while part and not part.endswith(("\n", "\r")):
            part = stream.readline(MAX_LINE)
        yield line.rstrip("\r\n")


def _titles(lines: Iterator[str], declaration: SheetDeclaration, name: str) -> tuple[list[str], str, int]:
    """The first row, the separator, and the number of the row after it; Excel's own ``sep=;`` may come first."""
    first, start = next(lines, ""), 2
    given = declaration.table.separator
    if first.lower().startswith("sep=") and len(first) == 5 and first[4] in _SEPARATORS:
        given, first, start = given or first[4], next(lines, ""), 3
    missing = list(declaration.titles)
    for separator in (given,) if given else _SEPARATORS:
        titles = [title.strip() for title in _cells(first, separator) or ()]
        absent = [title for title in declaration.titles if title not in titles]
        if not absent:
            twice = [title for title in declaration.titles if titles.count(title) > 1]
            if twice:
                raise LabelSheetError(f"{name}: the first row has twice: {', '.join(twice)}")
            return titles, separator, start
        if len(absent) < len(missing):
            missing = absent
    raise LabelSheetError(
        f"{name}: the first row lacks: {', '.join(missing)}. The titles must be those of the declaration, and the "
        "cells be separated by ; , | or a tab"
    )


def _cells(line: str, separator: str) -> list[str] | None:
    """The cells of one line; None where a quotation mark is not closed."""
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error:
        return None


class _Reader:
    """Rows become values, and faults."""

    def __init__(
        self, declaration: SheetDeclaration, places: list[int], width: int, owners: Callable[[str], frozenset[Own]]
    ) -> None:
        """``places``: of the key and of each declared column; ``width``: cells of a row."""
        self._key, *self._at = places
        self._width, self._owners = width, owners
        words = frozenset(("", *declaration.table.missing))
        comma = declaration.table.decimal == ","
        self._cells = [(column, _reading(column, words, comma=comma)) for column in declaration.columns]
        self.found: dict[Own, tuple[int, tuple[Value, ...]]] = {}
        self.tally = _Tally()
        self.read = 0

    def row(self, number: int, line: str, separator: str) -> None:
        """Take one line in."""
        if not line.strip(f" {separator}"):
            return
        self.read += 1
        if fault := _of_line(line):
            self.tally.add(fault, number)
            return
        cells = _cells(line, separator)
        if cells is None or len(cells) != self._width:
            self.tally.add("quotes" if cells is None else "cells", number)
            return
        values, whole = [], True
        for (column, reading), at in zip(self._cells, self._at, strict=True):
            try:
                values.append(reading(cells[at].strip()))
            except CellFault as refused:
                self.tally.add(refused.code, number, column.name)
                whole = False
        owners = self._whose(number, cells[self._key].strip())
        if whole:
            for own in owners:
                self._put(own, number, tuple(values))

    def _whose(self, number: int, key: str) -> frozenset[Own]:
        """Whose row it is; nobody's where the key has a fault or matches nothing, which is told."""
        if fault := _of_key(key):
            self.tally.add(fault, number)
            return frozenset()
        try:
            owners = self._owners(key)
        except ValueError:
            self.tally.add("key_unreadable", number)
            return frozenset()
        if not owners:
            self.tally.add(self._unmatched(key), number)
        elif len({person for person, _ in owners}) > 1:
            self.tally.add("shared", number)  # and nobody's row depends on another's files (P1)
        return owners

    def _unmatched(self, key: str) -> str:
        """What a spreadsheet may have done to a key that matches nothing. No other key is taken for it."""
        if key.isdecimal() and any(self._owners("0" * zeros + key) for zeros in range(1, _MOST_ZEROS)):
            return "unmatched_zeros"
        return "unmatched_date" if _DATE.fullmatch(key) else "unmatched"

    def _put(self, own: Own, number: int, values: tuple[Value, ...]) -> None:
        earlier, before = self.found.setdefault(own, (number, values))
        if earlier == number:
            return
        if before == values:
            self.tally.add("repeated", number, earlier=earlier)
            return
        for (column, _), old, new in zip(self._cells, before, values, strict=True):
            if old != new:
                self.tally.add("contradiction", number, column.name, earlier)


def _of_line(line: str) -> str:
    if len(line) > MAX_LINE:
        return "long_line"
    if "\ufffd" in line:
        return "encoding"
    return "control_character" if _CONTROL.search(line) else ""


def _of_key(key: str) -> str:
    if not key:
        return "no_key"
    if len(key) > MAX_KEY or not key.isprintable():
        return "key_unreadable"
    if key[0] in _FORMULA:
        return "formula"
    return "key_rounded" if _ROUNDED.fullmatch(key) else ""


class CellFault(Signal):
    """A cell that its column does not admit."""

    def __init__(self, code: str) -> None:
        """``code``: of FAULTS."""
        super().__init__(code)
        self.code = code


def _reading(column: _ColumnTable, missing: frozenset[str], *, comma: bool) -> Callable[[str], Value]:
    """What reads the cells of a column."""
    match column.kind:
        case "binary":
            said = {w.casefold(): 1 for w in column.yes} | {w.casefold(): 0 for w in column.no}
            return lambda cell: None if cell in missing else _listed(cell.casefold(), said, "not_binary")
        case "category":
            at = {value: n for n, value in enumerate(column.values)}
            return lambda cell: None if cell in missing else _listed(cell, at, "undeclared")
        case "several":
            return lambda cell: None if cell in missing else _several(cell, column)
        case "number":
            return lambda cell: None if cell in missing else _number(cell, column, comma=comma)


def _listed(cell: str, values: Mapping[str, int], code: str) -> int:
    if cell in values:
        return values[cell]
    raise CellFault(_spreadsheet(cell) or code)


def _several(cell: str, column: _ColumnTable) -> tuple[int, ...]:
    if cell == column.none:
        return ()
    at = {value: n for n, value in enumerate(column.values)}
    return tuple(sorted({_listed(part.strip(), at, "undeclared") for part in cell.split(column.between)}))


def _number(cell: str, column: _ColumnTable, *, comma: bool) -> float:
    """A number in the declared writing, within its bounds."""
    text = cell.replace(",", ".") if comma and cell.count(",") == 1 and "." not in cell else cell
    if not _NUMBER.fullmatch(text) or (comma and "." in cell):
        other = "." if comma else ","
        if cell.count(other) >= 1 and _NUMBER.fullmatch(cell.replace(".", "").replace(",", "")):
            raise CellFault("decimal_sign" if not _DATE.fullmatch(cell) else "date")
        raise CellFault(_spreadsheet(cell) or "not_a_number")
    value = float(text)
    if not column.low <= value <= column.high:
        if column.outside == "refuse" or not math.isfinite(value):
            raise CellFault("out_of_bounds")
        value = min(max(value, column.low), column.high)
    return value + 0.0  # -0.0 and 0.0 are one


def _spreadsheet(cell: str) -> str:
    """What a spreadsheet has made of a cell, where it is to be seen; else ""."""
    if cell[:1] in _FORMULA:
        return "formula"
    return "date" if _DATE.fullmatch(cell) else ""
