"""A table as a hospital exports it: what a spreadsheet did to it is told by row, and never a cell."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.ingest import label_sheet
from agent.ingest.label_sheet import (
    FAULTS,
    MAX_LINE,
    NOTES,
    LabelSheetError,
    Own,
    Sheet,
    SheetDeclaration,
    read_declaration,
    read_sheet,
)
from tests.support.labelled_site import DECLARATION, TITLES

GOOD = "P-1,1,low,mass,61.5"


@pytest.fixture
def declaration(tmp_path: Path) -> SheetDeclaration:
    return declared(tmp_path, DECLARATION)


def declared(folder: Path, text: str) -> SheetDeclaration:
    (folder / "labels.toml").write_text(text, encoding="utf-8")
    return read_declaration(folder / "labels.toml")


def owners(key: str) -> frozenset[Own]:
    """P-N is a patient; D-N is a key of two patients."""
    if key.startswith("D-"):
        return frozenset({("a", "a"), ("b", "b")})
    return frozenset({(key, key)} if key.startswith("P-") else ())


def read(folder: Path, declaration: SheetDeclaration, data: bytes | str) -> Sheet:
    path = folder / "labels.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_sheet(path, declaration, owners)


def sheet(folder: Path, declaration: SheetDeclaration, *rows: str, titles: str = TITLES) -> Sheet:
    return read(folder, declaration, "\n".join([titles, *rows]) + "\n")


def said(found: Sheet) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(one.code, one.column, one.rows) for one in (*found.faults, *found.notes)]


# -- what a good table says


def test_every_kind_of_column_is_read_and_missing_is_missing(tmp_path: Path, declaration: SheetDeclaration) -> None:
    found = sheet(
        tmp_path,
        declaration,
        "P-1,1,low,mass|nodule,61.5",
        "P-2,No,high,none,0",
        "P-3,,NA,,NA",
        "P-4,TRUE,low,nodule| mass,120",
    )
    assert said(found) == []
    assert found.rows == {
        ("P-1", "P-1"): (1, 0, (0, 1), 61.5),
        ("P-2", "P-2"): (0, 1, (), 0.0),
        ("P-3", "P-3"): (None, None, None, None),
        ("P-4", "P-4"): (1, 0, (0, 1), 120.0),
    }
    assert found.read == 4


def test_other_columns_are_not_looked_at_and_the_order_is_free(tmp_path: Path, declaration: SheetDeclaration) -> None:
    found = sheet(
        tmp_path,
        declaration,
        "Smith; =HYPERLINK(1),61.5,none,low,yes,P-1",
        titles="name,age,findings,grade,effusion,key",
    )
    assert said(found) == []
    assert found.rows == {("P-1", "P-1"): (1, 0, (), 61.5)}


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_separator_line_end_and_encoding_are_found(tmp_path: Path, separator: str, end: str, encoding: str) -> None:
    given = declared(tmp_path, DECLARATION.replace('kind = "several"', 'kind = "several"\nbetween = "/"'))
    text = end.join([TITLES, "P-1,1,low,mass/nodule,61.5", "P-2,0,high,none,5", ""]).replace(",", separator)
    found = read(tmp_path, given, text.encode(encoding))
    assert said(found) == []
    assert len(found.rows) == 2
    assert found.separator == separator
    assert found.encoding == ("utf-16" if encoding == "utf-16" else "utf-8-sig")


def test_excels_own_first_line_names_the_separator(tmp_path: Path, declaration: SheetDeclaration) -> None:
    found = read(tmp_path, declaration, f"sep=;\n{TITLES}\n{GOOD}\nP-2,9,low,none,1\n".replace(",", ";"))
    assert said(found) == [("not_binary", "effusion", (4,))], "rows are counted as the spreadsheet numbers them"


def test_a_decimal_comma_is_read_where_it_is_declared(tmp_path: Path) -> None:
    given = declared(tmp_path, DECLARATION.replace("[table]", '[table]\ndecimal = ","'))
    found = sheet(tmp_path, given, "P-1;1;low;mass;61,5", "P-2;1;low;mass;7", titles=TITLES.replace(",", ";"))
    assert said(found) == []
    assert [values[3] for values in found.rows.values()] == [61.5, 7.0]


def test_numbers_out_of_bounds_are_clipped_where_it_is_declared(tmp_path: Path) -> None:
    given = declared(tmp_path, DECLARATION.replace('unit = "a"', 'unit = "a"\noutside = "clip"'))
    found = sheet(tmp_path, given, "P-1,1,low,mass,121", "P-2,1,low,mass,-3")
    assert [values[3] for values in found.rows.values()] == [120.0, 0.0]


# -- what is wrong in a row


@pytest.mark.parametrize(
    ("row", "code", "column"),
    [
        (",1,low,mass,61.5", "no_key", ""),
        ("1.23457E+11,1,low,mass,61.5", "key_rounded", ""),
        ("123.0,1,low,mass,61.5", "key_rounded", ""),
        ('"=""00123""",1,low,mass,61.5', "formula", ""),
        ("+P-1,1,low,mass,61.5", "formula", ""),
        (f"P-{'1' * 127},1,low,mass,61.5", "key_unreadable", ""),
        ("P-1,=1,low,mass,61.5", "formula", "effusion"),
        ("P-1,2,low,mass,61.5", "not_binary", "effusion"),
        ("P-1,1,LOW,mass,61.5", "undeclared", "grade"),
        ("P-1,1,Mr Smith; see letter,mass,61.5", "undeclared", "grade"),
        ("P-1,1,=1+1,mass,61.5", "formula", "grade"),
        ("P-1,1,@SUM(A1),mass,61.5", "formula", "grade"),
        ("P-1,1,+1,mass,61.5", "formula", "grade"),
        ("P-1,1,-cmd,mass,61.5", "formula", "grade"),
        ("P-1,1,02-Jan,mass,61.5", "date", "grade"),
        ("P-1,1,2. Mär,mass,61.5", "date", "grade"),
        ("P-1,1,Mrz 24,mass,61.5", "undeclared", "grade"),
        ("P-1,1,May-24,mass,61.5", "date", "grade"),
        ("P-1,1,2024-01-02,mass,61.5", "date", "grade"),
        ("P-1,1,2024-01-02 00:00:00,mass,61.5", "date", "grade"),
        ("P-1,1,low,mass|tumour of Mr Smith,61.5", "undeclared", "findings"),
        ("P-1,1,low,mass|,61.5", "undeclared", "findings"),
        ("P-1,1,low,mass,sixty", "not_a_number", "age"),
        ("P-1,1,low,mass,61 a", "not_a_number", "age"),
        ("P-1,1,low,mass,nan", "not_a_number", "age"),
        ("P-1,1,low,mass,inf", "not_a_number", "age"),
        ("P-1,1,low,mass,0x10", "not_a_number", "age"),
        ("P-1,1,low,mass,6_1", "not_a_number", "age"),
        ("P-1,1,low,mass,٦١", "not_a_number", "age"),
        ('P-1,1,low,mass,"61,5"', "decimal_sign", "age"),
        ('P-1,1,low,mass,"1,061.5"', "decimal_sign", "age"),
        ("P-1,1,low,mass,01.02.2024", "date", "age"),
        ("P-1,1,low,mass,1/2/24", "date", "age"),
        ("P-1,1,low,mass,=61", "formula", "age"),
        ("P-1,1,low,mass,+61", "formula", "age"),
        ("P-1,1,low,mass,120.01", "out_of_bounds", "age"),
        ("P-1,1,low,mass,-1", "out_of_bounds", "age"),
        ("P-1,1,low,mass,1e300", "out_of_bounds", "age"),
        ("P-1,1,low,mass,1e999", "out_of_bounds", "age"),
        ("P-1,1,low,mass", "cells", ""),
        ("P-1,1,low,mass,61.5,more", "cells", ""),
        ("P-1,1,low,ma\0ss,61.5", "control_character", ""),
        ("P-1,1,low,ma\x07ss,61.5", "control_character", ""),
        ('P-1,1,low,"mass,61.5', "quotes", ""),
        (f"P-1,1,low,{'x' * MAX_LINE},61.5", "long_line", ""),
        (f"P-1,1,low,{'x' * 10 * MAX_LINE},61.5", "long_line", ""),
    ],
)
def test_a_row_with_a_fault_is_told_by_its_number_and_column(
    tmp_path: Path, declaration: SheetDeclaration, row: str, code: str, column: str
) -> None:
    found = sheet(tmp_path, declaration, GOOD.replace("P-1", "P-0"), row, "P-9,0,high,none,1")
    assert said(found) == [(code, column, (3,))]
    assert set(found.rows) <= {("P-0", "P-0"), ("P-9", "P-9")}
    for cell in ("Smith", "1.23457", "61", "cmd"):
        assert cell not in repr(found), "the rows themselves are not shown either"


def test_a_line_break_in_a_cell_is_told_and_the_rows_after_it_are_counted_on(
    tmp_path: Path, declaration: SheetDeclaration
) -> None:
    found = sheet(tmp_path, declaration, 'P-1,1,"lo\nw",mass,61.5', "P-2,2,low,none,1")
    assert ("quotes", "", (2, 3)) in said(found) or ("quotes", "", (2,)) in said(found)
    assert ("not_binary", "effusion", (4,)) in said(found)


def test_bytes_of_another_encoding_are_told_by_row(tmp_path: Path, declaration: SheetDeclaration) -> None:
    rows = f"{TITLES}\n{GOOD}\nP-2,1,M\xe4rz,mass,1\n".encode("latin-1")
    assert said(read(tmp_path, declaration, rows)) == [("encoding", "", (3,))]


def test_several_faults_of_a_row_and_of_many_rows_are_all_counted(
    tmp_path: Path, declaration: SheetDeclaration
) -> None:
    found = sheet(tmp_path, declaration, "P-1,x,x,x,x", *["P-2,x,low,none,1"] * 2000)
    counts = {(one.code, one.column): (one.count, len(one.rows)) for one in found.faults}
    assert counts == {
        ("not_binary", "effusion"): (2001, 1000),
        ("undeclared", "grade"): (1, 1),
        ("undeclared", "findings"): (1, 1),
        ("not_a_number", "age"): (1, 1),
    }


# -- rows of the same key, and keys of nobody


def test_a_row_that_contradicts_an_earlier_one_is_told_with_both_numbers(
    tmp_path: Path, declaration: SheetDeclaration
) -> None:
    found = sheet(tmp_path, declaration, GOOD, "P-2,0,low,mass,1", "P-1,0,low,mass,61.5")
    assert [(one.code, one.column, one.rows, one.earlier) for one in found.faults] == [
        ("contradiction", "effusion", (4,), (2,))
    ]


def test_missing_beside_a_value_is_a_contradiction_too(tmp_path: Path, declaration: SheetDeclaration) -> None:
    found = sheet(tmp_path, declaration, GOOD, GOOD.replace("mass", ""))
    assert said(found) == [("contradiction", "findings", (3,))]


def test_a_row_that_is_there_twice_counts_once(tmp_path: Path, declaration: SheetDeclaration) -> None:
    found = sheet(tmp_path, declaration, GOOD, GOOD, "")
    assert said(found) == [("repeated", "", (3,))]
    assert (len(found.rows), found.read) == (1, 2)
    assert found.faults == ()


def test_keys_that_match_nothing_are_left_out_and_told_and_those_of_two_patients_are_told(
    tmp_path: Path, declaration: SheetDeclaration
) -> None:
    rows = [GOOD.replace("P-1", key) for key in ("X-1", "D-1", "01.02.2024", "P-1")]
    found = sheet(tmp_path, declaration, *rows)
    assert said(found) == [("unmatched", "", (2,)), ("unmatched_date", "", (4,)), ("shared", "", (3,))]
    assert found.faults == ()
    assert set(found.rows) == {("P-1", "P-1"), ("a", "a"), ("b", "b")}


def test_zeros_that_a_spreadsheet_dropped_are_told_and_no_other_key_is_taken(
    tmp_path: Path, declaration: SheetDeclaration
) -> None:
    (tmp_path / "labels.csv").write_text("\n".join([TITLES, *(GOOD.replace("P-1", key) for key in ("17", "18"))]))
    known = {"00017": frozenset({("a", "a")})}
    found = read_sheet(tmp_path / "labels.csv", declaration, lambda key: known.get(key, frozenset()))
    assert said(found) == [("unmatched", "", (3,)), ("unmatched_zeros", "", (2,))]
    assert found.rows == {}


def test_a_key_that_is_no_plain_text_is_a_fault(tmp_path: Path, declaration: SheetDeclaration) -> None:
    def refuses(_key: str) -> frozenset[Own]:
        raise ValueError("SECRET")

    (tmp_path / "labels.csv").write_text(f"{TITLES}\n{GOOD}\n")
    assert said(read_sheet(tmp_path / "labels.csv", declaration, refuses)) == [("key_unreadable", "", (2,))]


def test_every_finding_has_a_sentence_and_no_code_is_both() -> None:
    assert not set(FAULTS) & set(NOTES)


# -- files that are no such table at all


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "lacks: key, effusion, grade, findings, age"),
        (b"key,effusion\n", "lacks: grade, findings, age"),
        (b"\xff\xfe\0\0k\0\0\0", "UTF-32"),
        ("key,effusion".encode("utf-16-le"), "NUL"),
        (b"\0" * 100, "NUL"),
        (f"{TITLES},age\n".encode(), "twice: age"),
        (b"PK\x03\x04 an .xlsx", "lacks"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused_with_a_sentence(
    tmp_path: Path, declaration: SheetDeclaration, data: bytes, why: str
) -> None:
    with pytest.raises(LabelSheetError, match=why):
        read(tmp_path, declaration, data)


def test_no_file_a_folder_a_link_and_a_file_that_is_too_large(
    tmp_path: Path, declaration: SheetDeclaration, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "labels.toml")
    for name in ("nothing", "folder", "link"):
        with pytest.raises(LabelSheetError, match=name):
            read_sheet(tmp_path / name, declaration, owners)
    monkeypatch.setattr(label_sheet, "MAX_BYTES", 100)
    with pytest.raises(LabelSheetError, match=r"labels.csv: larger than"):
        sheet(tmp_path, declaration, *[GOOD] * 10)
    monkeypatch.setattr(label_sheet, "MAX_BYTES", 10_000)
    monkeypatch.setattr(label_sheet, "MAX_ROWS", 3)
    with pytest.raises(LabelSheetError, match="more than 3 rows"):
        sheet(tmp_path, declaration, *[GOOD] * 4)


# -- the declaration


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('key_column = "key"', "", "key_column"),
        ('key_column = "key"', 'key_column = " "', "key_column"),
        ("[table]", "[tables]", "unknown table: tables"),
        ("[table]", "[table]\ncolour = 1", "unknown keys: colour"),
        ("[table]", '[table]\nseparator = "x"', "separator"),
        ("[table]", '[table]\ndecimal = ";"', "decimal"),
        ('missing = ["NA"]', 'missing = ["low"]', "missing: a word is also a value"),
        ('missing = ["NA"]', 'missing = "NA"', "must be a list"),
        ('kind = "binary"', 'kind = "free text"', "columns.effusion"),
        ('kind = "binary"', 'kind = "binary"\nyes = ["0"]', "none of both"),
        ('kind = "binary"', 'kind = "binary"\ntitle = "key"', "same title"),
        ('kind = "binary"', 'kind = "binary"\ntitle = "age"', "same title"),
        ('values = ["low", "high"]', "", "declare their values"),
        ('values = ["low", "high"]', 'values = ["low", "low"]', "each once"),
        ('values = ["mass", "nodule"]', 'values = ["mass|nodule"]', "between"),
        ('values = ["mass", "nodule"]', 'values = ["mass", "none"]', "none"),
        ("low = 0", "low = 200", "low must be below high"),
        ('unit = "a"', "", "unit"),
        ("high = 120", 'high = "120"', "must be a float"),
        ("[columns.age]", "[columns.Age]", "short name"),
        ("[table]", "[table", "not TOML"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused_with_file_and_key(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    assert old in DECLARATION
    with pytest.raises(LabelSheetError, match=f"labels.toml: .*{why}"):
        declared(tmp_path, DECLARATION.replace(old, new))


def test_all_problems_of_a_declaration_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(LabelSheetError, match=r"columns\.effusion.*columns\.grade"):
        declared(tmp_path, DECLARATION.replace('"binary"', '"x"').replace('values = ["low", "high"]', ""))


def test_without_a_declaration_the_sentence_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(LabelSheetError, match=r"labels.toml: .*--columns FILE"):
        read_declaration(tmp_path / "labels.toml")
    with pytest.raises(LabelSheetError, match="columns: 1 to"):
        declared(tmp_path, '[table]\nkey_column = "key"\n')


# -- any bytes, many rows


@given(st.binary(max_size=300))
def test_any_bytes_are_a_table_with_findings_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for body in (data, f"{TITLES}\n".encode() + data):
        try:
            found = read(folder, declared(folder, DECLARATION), body)
        except LabelSheetError:
            continue
        assert all(len(values) == 4 for values in found.rows.values())


def test_many_rows_take_little_memory(tmp_path: Path, declaration: SheetDeclaration) -> None:
    rows = [f"P-{n},1,low,mass|nodule,{n % 100}" for n in range(20_000)]
    path = tmp_path / "labels.csv"
    path.write_text("\n".join([TITLES, *rows]))
    del rows
    tracemalloc.start()
    found = read_sheet(path, declaration, owners)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.rows) == 20_000
    assert peak < 24 * 2**20, "half a kilobyte and the file itself, a row"
