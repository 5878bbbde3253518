"""A table of a paper, measured again: mean and spread over seeds, and whether the paper's order came out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, Final, Literal

Relation = Literal["<", "<=", "<<"]
MUCH: Final = 2.0  # "<<": at least this factor
_WIDTH: Final = 118  # characters of a line of a table


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of a table, once for each seed."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """A cell was measured at least once."""
        if not self.values:
            raise ValueError("a cell without a value")

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for one seed."""
        return stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one claim of a paper came out, and by which numbers."""

    claim: str
    held: bool  # in the mean over seeds
    seeds: tuple[int, int]  # in so many seeds, of so many
    numbers: str

    def line(self) -> str:
        """One line for people."""
        word = "came out" if self.held else "DID NOT COME OUT"
        return f"{word} (in {self.seeds[0]} of {self.seeds[1]} seeds): {self.claim}: {self.numbers}"


@dataclass(frozen=True, slots=True)
class Table:
    """What ``reproduce`` prints."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell] = field(hash=False)
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    digits: int = 3

    def __post_init__(self) -> None:
        """Every cell has a row and a column; a row may lack a cell."""
        if not all(row in self.rows and column in self.columns for row, column in self.cells):
            raise ValueError("a cell outside the table")

    def of(self, row: str, column: str) -> Cell:
        """One cell.

        Raises:
            KeyError: it was not measured.
        """
        return self.cells[row, column]


def judged(table: Table, verdicts: Sequence[Verdict]) -> Table:
    """The table with its verdicts."""
    return replace(table, verdicts=tuple(verdicts))


def as_text(table: Table) -> str:
    """For a terminal: the table in blocks that fit, the verdicts, and what to know when reading it."""
    wide = max(len(r) for r in (*table.rows, ""))
    body = {key: f"{c.mean:.{table.digits}f} ± {c.spread:.{table.digits}f}" for key, c in table.cells.items()}
    widths = {c: max(len(c), *(len(body.get((r, c), "-")) for r in table.rows)) for c in table.columns}
    lines = [f"{table.name}: {table.title}"]
    for columns in _blocks(widths, _WIDTH - wide - 2):
        lines += ["", "  " + " " * wide + "".join(f"  {c:>{widths[c]}}" for c in columns)]
        for row in table.rows:
            told = (f"  {body.get((row, c), '-'):>{widths[c]}}" for c in columns)
            lines.append(f"  {row:<{wide}}" + "".join(told))
    lines += ["", *(f"  {v.line()}" for v in table.verdicts)] if table.verdicts else []
    lines += ["", *(f"  note: {n}" for n in table.notes)] if table.notes else []
    return "\n".join(lines)


def _blocks(widths: Mapping[str, int], room: int) -> list[list[str]]:
    """The columns, in as many lines as it takes; one that is wider than the room stands alone."""
    blocks, left = list[list[str]](), 0
    for column, width in widths.items():
        if not blocks or width + 2 > left:
            blocks.append([])
            left = room
        blocks[-1].append(column)
        left -= width + 2
    return blocks


def as_json(table: Table) -> str:
    """The same for a program: every seed's value, no rounding. A value that is no number is ``null``."""
    cells = [
        {
            "row": row,
            "column": column,
            "mean": _plain(c.mean),
            "sd": _plain(c.spread),
            "seeds": [*map(_plain, c.values)],
        }
        for (row, column), c in table.cells.items()
    ]
    verdicts = [
        {"claim": v.claim, "held": v.held, "seeds": list(v.seeds), "numbers": v.numbers} for v in table.verdicts
    ]
    told: dict[str, Any] = {"name": table.name, "title": table.title, "rows": list(table.rows)}
    told |= {"columns": list(table.columns), "cells": cells, "verdicts": verdicts, "notes": list(table.notes)}
    return json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False)


def order(table: Table, column: str, chain: Sequence[str | Relation], claim: str = "") -> Verdict:
    """Did a column keep an order, as ``("GAN-inverted", "<", "k-SALSA", "<=", "k-Centroid")``?

    ``<<`` asks for ``MUCH`` times. It holds if it holds of the means over seeds; each seed is counted as well, since
    an order of means that lie inside each other's spread says little. A value that is no number keeps no order.

    Raises:
        ValueError: the chain is not rows with relations between them.
    """
    rows, relations = chain[0::2], chain[1::2]
    if len(rows) != len(relations) + 1 or len(rows) < 2 or not set(relations) <= {"<", "<=", "<<"}:
        raise ValueError("a chain is rows with <, <= or << between them")
    cells = [table.of(row, column) for row in rows]
    count = min(len(c.values) for c in cells)
    kept = sum(_keeps([c.values[s] for c in cells], relations) for s in range(count))
    numbers = ", ".join(f"{row} {c.mean:.4g} ± {c.spread:.2g}" for row, c in zip(rows, cells, strict=True))
    told = f"{column}: {' '.join(chain)}" if not claim else f"{column}: {claim}"
    return Verdict(told, _keeps([c.mean for c in cells], relations), (kept, count), numbers)


def _keeps(values: Sequence[float], relations: Sequence[str]) -> bool:
    pairs = zip(values, values[1:], relations, strict=False)
    return all(a <= b if r == "<=" else a < b and (r == "<" or MUCH * a <= b) for a, b, r in pairs)


def _plain(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
