"""Label tables in the vault: declared values only, one version at a time, sealed, and without who opted out."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.storage import label_tables, projects, site_directory
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.label_tables import (
    LabelColumn,
    LabelTable,
    LabelTableError,
    count_values,
    forget_patients,
    keep_table,
    read_table,
    remove_table,
    table_names,
)
from agent.storage.vault import Vault
from tests.support.ledger_world import policy
from tests.support.vault_records import key_of, open_vault, record

COLUMNS = (
    LabelColumn("effusion", "binary"),
    LabelColumn("grade", "category", ("low", "high")),
    LabelColumn("findings", "several", ("mass", "nodule")),
    LabelColumn("age", "number", unit="a", high=120.0),
)
FULL = (1, 0, (0, 1), 61.5)
SITE = """
site = "site-a"
coordinator = "127.0.0.1:1"
input = "in"
modalities = ["OT"]
secondary_capture_modalities = []
public_components = []
"""


def person(number: int) -> str:
    return key_of(number, 3)


def made(*persons: int, values: tuple[Any, ...] = FULL, name: str = "findings") -> LabelTable:
    return LabelTable(name, "patient-id", "patient", COLUMNS, {(person(n), person(n)): values for n in persons})


@pytest.fixture
def vault(tmp_path: Path) -> Any:
    with contextlib.closing(open_vault(tmp_path)) as vault:
        yield vault


# -- what a column and a table may be


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"name": "Age"}, "short name"),
        ({"kind": "text"}, "kind must be"),
        ({"kind": "category"}, "declare their values"),
        ({"kind": "category", "values": ("one",)}, "two or more"),
        ({"kind": "binary", "values": ("a", "b")}, "declare their values"),
        ({"kind": "category", "values": ("a", "a")}, "each once"),
        ({"kind": "category", "values": tuple(map(str, range(65)))}, "at most 64"),
        ({"kind": "category", "values": ("a", "b" * 65)}, "printable"),
        ({"kind": "category", "values": ("a", "b\n")}, "printable"),
        ({"kind": "category", "values": ("a", "=b")}, "printable"),
        ({"kind": "category", "values": ("a", "missing")}, "printable"),
        ({"kind": "category", "values": ("a", " b")}, "printable"),
        ({"kind": "number"}, "unit"),
        ({"kind": "number", "unit": "a"}, "low must be below high"),
        ({"kind": "number", "unit": "a", "low": 2.0, "high": 1.0}, "low must be below high"),
        ({"kind": "number", "unit": "a", "high": float("nan")}, "low must be below high"),
        ({"kind": "number", "unit": "a", "high": float("inf")}, "low must be below high"),
        ({"kind": "binary", "unit": "a"}, "unit"),
        ({"kind": "binary", "high": 1.0}, "unit"),
    ],
)
def test_a_column_that_could_hold_free_text_or_a_number_without_bounds_is_refused(
    told: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        LabelColumn(**{"name": "x", "kind": "binary", **told})


@pytest.mark.parametrize(
    "values",
    [
        (2, 0, (), 1.0), (True, 0, (), 1.0), ("yes", 0, (), 1.0), (1, 2, (), 1.0), (1, -1, (), 1.0),
        (1, "low", (), 1.0),
        (1, 0, (2,), 1.0), (1, 0, 1, 1.0), (1, 0, (), 120.5), (1, 0, (), float("nan")), (1, 0, (), 5), (1, 0, ()),
        (1, 0, (), "Mr Smith, see letter"),
    ],
)  # fmt: skip
def test_a_value_that_no_column_declares_is_in_no_table(values: tuple[Any, ...]) -> None:
    with pytest.raises(LabelTableError, match="does not declare"):
        made(1, values=values)


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", "a" * 64, "1a"])
def test_a_table_has_a_plain_name(name: str) -> None:
    with pytest.raises(LabelTableError, match="--name"):
        made(1, name=name)


# -- in the vault


def test_a_table_comes_back_as_it_was_stored_and_names_its_version(vault: Vault) -> None:
    kept = keep_table(vault, made(1, 2))
    back = read_table(vault, "findings")
    assert (back.rows, back.columns, back.version) == (made(1, 2).rows, COLUMNS, kept.version)
    assert len(kept.version) == 64
    assert table_names(vault) == ("findings",)


def test_missing_is_no_value_and_comes_back_as_missing(vault: Vault) -> None:
    keep_table(vault, made(1, values=(None, None, None, None)))
    assert read_table(vault, "findings").rows[person(1), person(1)] == (None,) * 4
    keep_table(vault, made(1, values=(None, None, (), None)))
    assert read_table(vault, "findings").rows[person(1), person(1)] == (None, None, (), None)


def test_a_corrected_table_takes_the_older_ones_place_under_another_version(vault: Vault) -> None:
    first = keep_table(vault, made(1, 2))
    assert keep_table(vault, made(2, 1)).version == first.version, "the order of the rows says nothing"
    second = keep_table(vault, made(1, 2, values=(0, 0, (), 1.0)))
    assert second.version != first.version
    assert read_table(vault, "findings").version == second.version
    assert table_names(vault) == ("findings",)


def test_a_version_is_keyed_so_that_nobody_without_the_key_can_find_a_table_by_trying(tmp_path: Path) -> None:
    versions = set()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        key = bytes([number] * 32)
        notes = open_vault(tmp_path / str(number))
        with contextlib.closing(Vault(notes._notes, tmp_path / str(number) / "other.db", key)) as one:
            versions.add(keep_table(one, made(1)).version)
    assert len(versions) == 2


def test_neither_rows_nor_columns_are_to_be_read_in_the_file(tmp_path: Path) -> None:
    with contextlib.closing(open_vault(tmp_path)) as vault:
        keep_table(vault, made(1))
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for said in (b"effusion", b"nodule", person(1).encode(), b"findings.v"):
        assert said not in raw


def test_a_table_that_is_not_there_is_said_and_nothing_is_quoted(vault: Vault) -> None:
    for name in ("other", "../x", "P-17"):
        with pytest.raises(LabelTableError, match="labels list") as caught:
            read_table(vault, name)
        assert name not in str(caught.value)
        with pytest.raises(LabelTableError):
            remove_table(vault, name)


def test_a_removed_table_is_in_neither_file_nor_log(vault: Vault, tmp_path: Path) -> None:
    keep_table(vault, made(*range(200)))
    boxes = [bytes(body) for (body,) in vault._file.rows("SELECT body FROM note WHERE name LIKE 'part/%'")]
    remove_table(vault, "findings")
    assert table_names(vault) == ()
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert boxes
    assert not any(box[12:200] in raw for box in boxes)


# -- patients' noes


def test_an_opt_out_deletes_the_patients_rows_from_every_table_of_every_project(tmp_path: Path) -> None:
    home = site_directory.create(tmp_path / "home", SITE, policy())
    projects.create(home, "lung")
    for project in ("main", "lung"):
        with contextlib.closing(projects.open_vault(home, project)) as vault:
            vault.keep(record(1, 1))
            keep_table(vault, made(1, 2))
            keep_table(vault, made(1, name="second"))
    projects.opt_out(home, person(1))
    for project in ("main", "lung"):
        with contextlib.closing(projects.open_vault(home, project)) as vault:
            assert {who for who, _ in read_table(vault, "findings").rows} == {person(2)}
            assert read_table(vault, "second").rows == {}


def test_the_test_of_opt_outs_sees_a_vault_that_forgets_to_delete_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red control: without the deletion the rows are still there."""
    monkeypatch.setattr(projects, "forget_patients", lambda *_: 0)
    home = site_directory.create(tmp_path / "home", SITE, policy())
    with contextlib.closing(projects.open_vault(home)) as vault:
        keep_table(vault, made(1, 2))
    projects.opt_out(home, person(1))
    with contextlib.closing(projects.open_vault(home)) as vault:
        assert {who for who, _ in read_table(vault, "findings").rows} == {person(1), person(2)}


def test_who_has_opted_out_gets_no_row_later(vault: Vault) -> None:
    vault._notes.opt_out(person(1))
    assert {who for who, _ in keep_table(vault, made(1, 2)).rows} == {person(2)}


def test_a_purged_tables_old_ciphertext_is_gone_and_its_version_stays_its_name(vault: Vault, tmp_path: Path) -> None:
    version = keep_table(vault, made(1, 2)).version
    ((box,),) = vault._file.rows("SELECT body FROM note WHERE name LIKE 'part/%'")
    assert forget_patients(vault, {person(1)}) == 1
    assert read_table(vault, "findings").version == version
    assert bytes(box)[12:] not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


# -- whole or not at all


def test_a_process_that_is_killed_in_the_middle_of_an_import_leaves_the_older_version(tmp_path: Path) -> None:
    with contextlib.closing(open_vault(tmp_path)) as vault:
        before = keep_table(vault, made(1)).version
    turn, ended, found = 0, -signal.SIGKILL, list[tuple[bool, int]]()
    while ended == -signal.SIGKILL:
        turn += 1
        child = [sys.executable, "-m", "tests.support.killed_label_import", str(tmp_path), str(turn)]
        ended = subprocess.run(child, check=False).returncode
        with contextlib.closing(open_vault(tmp_path)) as vault:
            table = read_table(vault, "findings")
            found.append((table.version == before, len(table.rows)))
    assert ended == 0
    assert set(found) == {(True, 1), (False, 50)}, "the older version whole, or the new one whole"
    assert found == sorted(found, reverse=True), "and the older one until it is committed"
    assert found.count((True, 1)) >= 4, "it was killed before each of several statements"


def test_a_full_disk_leaves_the_older_version(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keep_table(vault, made(1)).version
    vault._file.rows("PRAGMA max_page_count = 1")  # SQLite takes the present size where that is more
    large = LabelTable(
        "findings", "patient-id", "patient", COLUMNS, {(person(n), person(n)): FULL for n in range(20_000)}
    )
    with pytest.raises(VaultError, match="disk is full"):
        keep_table(vault, large)
    assert read_table(vault, "findings").version == before


# -- what is told


def test_patients_are_counted_and_not_rows_and_rare_values_are_named(vault: Vault) -> None:
    rows = {(person(n), key_of(n * 2 + m, 4)): (n % 2, 0, (), 1.0) for n in range(22) for m in range(2)}
    rows[person(50), key_of(200, 4)] = (None, 1, (0,), None)
    found = {(one.column, one.value): one for one in count_values(LabelTable("t", "study", "study", COLUMNS, rows))}
    assert found["effusion", "yes"].patients == 11
    assert not found["effusion", "yes"].rare
    assert found["effusion", "missing"].patients == 1
    assert not found["effusion", "missing"].rare
    assert (found["grade", "high"].patients, found["grade", "high"].rare) == (1, True)
    assert (found["findings", "mass"].rare, found["findings", "nodule"].rare) == (True, False)
    assert found["findings", "none of them"].patients == 22
    assert found["age", "a number"].patients == 22


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 1, None]), st.sampled_from([(), (0,), (0, 1), None])))
)
def test_a_table_is_what_was_encoded(people: list[tuple[int, int | None, tuple[int, ...] | None]]) -> None:
    rows = {(person(n), key_of(n, 4)): (a, None, b, None) for n, a, b in people}
    table = LabelTable("t", "study", "study", COLUMNS, rows)
    back = label_tables._decoded(label_tables._sealed(table))
    assert (back.rows, back.encode()) == (table.rows, table.encode())
