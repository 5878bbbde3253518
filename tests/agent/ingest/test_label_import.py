"""A table of labels comes into the vault: keys go the way that a file's identifiers went, and are not kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.ingest.context import IngestContext
from agent.ingest.label_import import KEYS, LabelImport, import_labels
from agent.ingest.label_sheet import read_declaration
from agent.storage import projects
from agent.storage.label_tables import LabelTableError, read_table, table_names
from tests.support.labelled_site import DECLARATION, image, labelled_site, table

ROW = ",1,low,mass,61.5"


@pytest.fixture
def way(tmp_path: Path) -> Iterator[IngestContext]:
    with labelled_site(tmp_path) as way:
        yield way


def imported(way: IngestContext, folder: Path, key: str, *keys: str, declaration: str = DECLARATION) -> LabelImport:
    path = table(folder, *(one if "," in one else one + ROW for one in keys), declaration=declaration)
    return import_labels(way, path, read_declaration(path.with_suffix(".toml")), key, "findings")


@pytest.mark.parametrize(
    ("key", "typed", "rows", "patients"),
    [
        ("patient-id", ("P-0", "P-3"), 2, 2),
        ("accession", ("A-0", "A-1", "A-2"), 3, 2),
        ("study", ("1.2.3.0", "1.2.3.1", "1.2.3.2"), 3, 2),
        ("series", ("1.2.4.0", "1.2.4.1", "1.2.4.2"), 3, 2),
        ("instance", ("1.2.5.0", "1.2.5.1", "1.2.5.2"), 3, 2),
    ],
)
def test_each_kind_of_key_finds_what_it_names(
    way: IngestContext, tmp_path: Path, key: str, typed: tuple[str, ...], rows: int, patients: int
) -> None:
    told = imported(way, tmp_path, key, *typed)
    assert (told.faults, told.notes) == ((), ())
    assert (told.read, told.kept, told.patients) == (len(typed), rows, patients)
    found = read_table(way.vault, "findings")
    assert (found.version, found.key, found.level) == (told.version, key, KEYS[key])
    labelled = [head for head in way.vault.heads() if found.of(head) is not None]
    assert {head.person for head in labelled} == {person for person, _ in found.rows}
    expected = {"patient-id": 5}.get(key, 3)  # P-0 has one image and P-3 four
    assert len(labelled) == expected


def test_a_patient_id_is_folded_as_that_of_a_file_is_and_the_issuer_counts(
    way: IngestContext, tmp_path: Path
) -> None:
    assert imported(way, tmp_path, "patient-id", " p-0").kept == 1
    other = DECLARATION.replace("[table]", '[table]\nissuer = "OTHER"')
    told = imported(way, tmp_path, "patient-id", "P-0", declaration=other)
    assert (told.kept, [note.code for note in told.notes]) == (0, ["unmatched"])


def test_two_spellings_of_one_patient_that_contradict_are_found(way: IngestContext, tmp_path: Path) -> None:
    told = imported(way, tmp_path, "patient-id", "P-0", "p-0,0,low,mass,61.5")
    assert [(fault.code, fault.rows, fault.earlier) for fault in told.faults] == [("contradiction", (3,), (2,))]


def test_an_accession_number_of_two_studies_of_a_patient_labels_both(way: IngestContext, tmp_path: Path) -> None:
    way.vault.keep(image(way, "P-0", 90, accession="A-0"))
    assert imported(way, tmp_path, "accession", "A-0").kept == 2


@pytest.mark.parametrize(("key", "typed"), [("study", "1.2.3.0"), ("accession", "A-0")])
def test_what_another_patients_files_say_changes_nobodys_row(
    way: IngestContext, tmp_path: Path, key: str, typed: str
) -> None:
    """One more patient, under the same identifiers, changes that patient's rows only (P1); and it is told."""
    imported(way, tmp_path, key, typed)
    before = dict(read_table(way.vault, "findings").rows)
    way.vault.keep(image(way, "P-7", 90, study="1.2.3.0", accession="A-0"))
    told = imported(way, tmp_path, key, typed)
    after = dict(read_table(way.vault, "findings").rows)
    assert {own for own in after if own not in before} == {
        own for own in after if own[0] == way.who.person("", "P-7")
    }
    assert before.items() <= after.items()
    assert [note.code for note in told.notes] == ["shared"]


def test_the_vault_holds_no_key_as_it_was_typed(way: IngestContext, tmp_path: Path) -> None:
    imported(way, tmp_path, "patient-id", "P-0", "P-1")
    raw = read_table(way.vault, "findings").encode()
    files = b"".join(path.read_bytes() for path in way.home.root.rglob("*") if path.is_file())
    for typed in (b"P-0", b"P-1"):
        assert typed not in raw
        assert typed not in files


def test_with_one_fault_nothing_is_imported_and_the_older_version_stays(way: IngestContext, tmp_path: Path) -> None:
    before = imported(way, tmp_path, "patient-id", "P-0")
    told = imported(way, tmp_path, "patient-id", "P-0", "P-1", "P-2,1,low,tumour,61.5")
    assert (told.version, told.replaced, [fault.rows for fault in told.faults]) == ("", "", [(4,)])
    assert read_table(way.vault, "findings").version == before.version
    assert len(read_table(way.vault, "findings").rows) == 1


def test_a_corrected_table_replaces_the_older_one_and_says_which(way: IngestContext, tmp_path: Path) -> None:
    first = imported(way, tmp_path, "patient-id", "P-0")
    second = imported(way, tmp_path, "patient-id", "P-0", "P-1")
    assert (first.replaced, second.replaced) == ("", first.version)
    assert second.version != first.version
    again = imported(way, tmp_path, "patient-id", "P-1", "P-0")
    assert again.version == again.replaced == second.version


def test_a_dry_run_stores_nothing(way: IngestContext, tmp_path: Path) -> None:
    path = table(tmp_path, "P-0" + ROW)
    told = import_labels(way, path, read_declaration(path.with_suffix(".toml")), "patient-id", "x", dry=True)
    assert (told.version, told.kept) == ("", 1)
    assert table_names(way.vault) == ()


def test_a_bad_name_is_said_before_a_row_is_read(way: IngestContext, tmp_path: Path) -> None:
    path = table(tmp_path, "P-0" + ROW)
    declaration = read_declaration(path.with_suffix(".toml"))
    path.unlink()
    with pytest.raises(LabelTableError, match="--name"):
        import_labels(way, path, declaration, "patient-id", "Not a name")


def test_rows_of_who_opted_out_match_nothing(way: IngestContext, tmp_path: Path) -> None:
    projects.opt_out(way.home, way.who.person("", "P-0"))
    for key, typed in (("patient-id", "P-0"), ("accession", "A-0"), ("study", "1.2.3.0")):
        told = imported(way, tmp_path, key, typed)
        assert (told.kept, [note.code for note in told.notes]) == (0, ["unmatched"])


def test_an_opt_out_deletes_rows_that_were_imported_by_an_accession_number(
    way: IngestContext, tmp_path: Path
) -> None:
    imported(way, tmp_path, "accession", "A-0", "A-1")
    projects.opt_out(way.home, way.who.person("", "P-0"))
    assert {person for person, _ in read_table(way.vault, "findings").rows} == {way.who.person("", "P-1")}
