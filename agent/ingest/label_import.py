"""Import a hospital's table of labels into a project's vault: keys become pseudonyms at once, all rows or none."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pydicom

from agent.deidentify.attributes import text
from agent.deidentify.errors import FileRejectedError
from agent.ingest.context import IngestContext
from agent.ingest.label_sheet import Own, Sheet, SheetDeclaration, SheetFinding, read_sheet
from agent.storage.instance_index import InstanceRecord
from agent.storage.label_tables import (
    LabelTable,
    Level,
    ValueCount,
    count_values,
    keep_table,
    read_table,
    table_names,
)
from agent.storage.vault import Vault

KEYS: Final[Mapping[str, Level]] = MappingProxyType(  # kind of key -> what a row is of
    {"patient-id": "patient", "accession": "study", "study": "study", "series": "series", "instance": "instance"}
)
_PURPOSES: Final = ("study", "series", "instance")  # of the keyed UIDs that a record has, in their order


@dataclass(frozen=True, slots=True)
class LabelImport:
    """What became of a table: counts, row numbers and declared names, for the site's own console."""

    table: str
    version: str  # "": nothing was imported
    replaced: str  # the version that it took the place of; "": there was none
    read: int  # rows below the titles
    kept: int  # patients, studies, series or instances with a row
    patients: int
    faults: tuple[SheetFinding, ...]  # with one of them nothing is imported
    notes: tuple[SheetFinding, ...]
    encoding: str
    separator: str
    values: tuple[ValueCount, ...]


def import_labels(
    way: IngestContext, path: Path, declaration: SheetDeclaration, key: str, name: str, *, dry: bool = False
) -> LabelImport:
    """Read a table, and store it in the place of its older version unless a row has a fault.

    Args:
        way: the project's.
        path: of the CSV.
        declaration: what its columns hold.
        key: what the keys are: one of KEYS.
        name: of the table.
        dry: look only.
    Raises:
        LabelTableError: no table of that name can be, or the file is no such table at all.
        VaultError: a full or failing disk; the older version stays.
    """
    LabelTable(name, key, KEYS[key], declaration.declared, {})  # before a row is read
    sheet = read_sheet(path, declaration, _owners(way, key, declaration.table.issuer))
    table = LabelTable(name, key, KEYS[key], declaration.declared, sheet.rows)
    before = read_table(way.vault, name).version if name in table_names(way.vault) else ""
    stored = not (sheet.faults or dry)
    if stored:
        table = keep_table(way.vault, table)
    return _told(table, sheet, before if stored else "")


def _told(table: LabelTable, sheet: Sheet, replaced: str) -> LabelImport:
    return LabelImport(
        table=table.name,
        version=table.version,
        replaced=replaced,
        read=sheet.read,
        kept=len(table.rows),
        patients=len({person for person, _ in table.rows}),
        faults=sheet.faults,
        notes=sheet.notes,
        encoding=sheet.encoding,
        separator=sheet.separator,
        values=count_values(table),
    )


def _owners(way: IngestContext, key: str, issuer: str) -> Callable[[str], frozenset[Own]]:
    """What finds the patients, studies, series or instances of the vault that a key names."""
    who, vault = way.who, way.vault
    if key == "patient-id":
        here = {head.person for head in vault.heads()}

        def of_patient(typed: str) -> frozenset[Own]:
            try:
                person = who.person(issuer, typed)
            except FileRejectedError:
                raise ValueError("not one plain text") from None
            return frozenset({(person, person)} if person in here else ())

        return of_patient
    if key == "accession":
        found = _grouped(_accessions(vault))
        return lambda typed: found.get(who.identifier(typed), frozenset())
    place = _PURPOSES.index(key)
    found = _grouped(
        (head.uids[place], (head.person, (head.study, head.series, head.name)[place]))
        for head in vault.heads()
        if head.uids
    )
    return lambda typed: found.get(who.mac(key, typed.encode()), frozenset())


def _grouped(pairs: Iterable[tuple[str, Own]]) -> dict[str, frozenset[Own]]:
    found: dict[str, set[Own]] = {}
    for name, own in pairs:
        found.setdefault(name, set()).add(own)
    return {name: frozenset(owners) for name, owners in found.items()}


def _accessions(vault: Vault) -> Iterable[tuple[str, Own]]:
    """The keyed accession number of every study, by its de-identified files: one file of each series is read."""
    first: dict[str, InstanceRecord] = {}
    for head in vault.heads():
        if head.uids:  # a volume file names none
            first.setdefault(head.series, head)
    for head in first.values():
        try:
            header = pydicom.dcmread(
                io.BytesIO(vault.payload(head.name)), stop_before_pixels=True, specific_tags=["AccessionNumber"]
            )
        except (KeyError, pydicom.errors.InvalidDicomError):  # deleted since; a NIfTI file
            continue
        number = text(header, "AccessionNumber")
        if number:
            yield number, (head.person, head.study)
