"""``labels``: import the hospital's tables of labels, list them, show one, remove one. For this console alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from agent.cli.output import OUT, answered_ingest, say
from agent.event_log import open_log
from agent.ingest.context import open_ingest
from agent.ingest.label_import import LabelImport, import_labels
from agent.ingest.label_sheet import FAULTS, NOTES, SheetFinding, read_declaration
from agent.storage.label_tables import (
    RARE,
    LabelTable,
    ValueCount,
    count_values,
    read_table,
    remove_table,
    table_names,
)
from agent.storage.site_directory import SiteDirectory

_ROWS: Final = 5  # row numbers of a finding that a person is shown


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands; what it expects to go wrong becomes a sentence and exit status 1."""
    acts = {"import": _import, "list": _list, "show": _show, "remove": _remove}
    return answered_ingest(acts[arguments.what], arguments)


def _import(arguments: argparse.Namespace) -> int:
    """Nothing is imported unless every row can be."""
    declaration = read_declaration(arguments.columns or arguments.table.with_suffix(".toml"))
    name = arguments.name or arguments.table.stem.lower()
    with open_ingest(SiteDirectory(arguments.home), arguments.project) as way:
        told = import_labels(way, arguments.table, declaration, arguments.key, name, dry=arguments.dry_run)
        if told.version:
            log = open_log(way.home.root / "agent.log")
            log.info("labels_imported", where=name, count=told.kept)
    if arguments.json:
        _write({**asdict(told), "imported": told.version != ""})
    else:
        _print_import(told, dry=arguments.dry_run)
    return 1 if told.faults else 0


def _print_import(told: LabelImport, *, dry: bool) -> None:
    for line in (*_sentences(told.faults, FAULTS), *_sentences(told.notes, NOTES)):
        say(line)
    rows = f"{told.read} rows read ({told.encoding.removesuffix('-sig')})"
    if told.faults:
        say(f"{rows}; nothing was imported: correct these rows and run the command again")
        return
    _print_values(told.values, told.table)
    kept = f"{told.kept} rows of {told.patients} patients"
    if dry:
        say(f"{rows}; {kept} would be imported")
        return
    replaced = f", in the place of {told.replaced[:12]}" if told.replaced not in ("", told.version) else ""
    same = ", which was here already" if told.replaced == told.version else ""
    say(f"{rows}; {kept} imported as version {told.version[:12]}{replaced}{same}")


def _sentences(findings: Iterable[SheetFinding], texts: Mapping[str, str]) -> Iterable[str]:
    for found in findings:
        some = [str(row) for row in found.rows[:_ROWS]]
        if found.earlier:
            some = [f"{row} (row {earlier})" for row, earlier in zip(found.rows, found.earlier, strict=True)][:_ROWS]
        where = ", ".join(some) + (", ..." if found.count > len(some) else "")
        column = f", column {found.column}" if found.column else ""
        yield f"{'row' if found.count == 1 else f'{found.count} rows:'} {where}{column}: {texts[found.code]}"


def _print_values(values: Iterable[ValueCount], name: str) -> None:
    table = Table("column", "value", "patients", "", title=name)
    rare = False
    for one in values:
        table.add_row(one.column, one.value, str(one.patients), "rare" if one.rare else "")
        rare = rare or one.rare
    OUT.print(table)
    if rare:
        say(
            f"rare: fewer than {RARE} patients. This is shown here only: join or drop the value before a task uses it"
        )


def _list(arguments: argparse.Namespace) -> int:
    """One line for each table."""
    with open_ingest(SiteDirectory(arguments.home), arguments.project) as way:
        tables = [read_table(way.vault, name) for name in table_names(way.vault)]
    if arguments.json:
        _write([_head(table) for table in tables])
        return 0
    listed = Table("table", "version", "key", "rows", "columns", title=f"project {arguments.project}")
    for one in tables:
        names = ", ".join(column.name for column in one.columns)
        listed.add_row(one.name, one.version[:12], one.key, str(len(one.rows)), names)
    OUT.print(listed)
    return 0


def _head(table: LabelTable) -> dict[str, Any]:
    columns = [column.name for column in table.columns]
    return {
        "table": table.name,
        "version": table.version,
        "key": table.key,
        "rows": len(table.rows),
        "columns": columns,
    }


def _show(arguments: argparse.Namespace) -> int:
    """The columns as they are declared, and how many patients have each value."""
    with open_ingest(SiteDirectory(arguments.home), arguments.project) as way:
        table = read_table(way.vault, arguments.name)
    values = count_values(table)
    if arguments.json:
        columns = [asdict(column) for column in table.columns]
        _write({**_head(table), "columns": columns, "values": [asdict(one) for one in values]})
        return 0
    _print_values(values, table.name)
    say(f"version {table.version}: {len(table.rows)} rows, imported by {table.key}")
    for column in table.columns:
        if column.kind == "number":
            say(f"{column.name}: {column.low:g} to {column.high:g} in {column.unit}")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    """The table is deleted, and what a task needs of it is missing from now on."""
    with open_ingest(SiteDirectory(arguments.home), arguments.project) as way:
        remove_table(way.vault, arguments.name)
        log = open_log(way.home.root / "agent.log")
        log.info("labels_removed", where=arguments.name)
    if arguments.json:
        _write({"removed": arguments.name})
    else:
        say(f"the label table {arguments.name} was deleted")
    return 0


def _write(told: object) -> None:
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
