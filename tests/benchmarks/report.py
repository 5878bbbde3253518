"""What a benchmark returns, and how it is shown."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    what: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Report:
    """The rows of a benchmark and its ratios against a named peer in the same run."""

    rows: tuple[Row, ...]
    ratios: dict[str, float]


def as_json(name: str, report: Report) -> str:
    """The report with the machine it was measured on."""
    machine = {
        "processors": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }
    rows = [asdict(row) for row in report.rows]
    return json.dumps({"name": name, "machine": machine, "rows": rows, "ratios": report.ratios}, indent=2)


def as_table(name: str, report: Report) -> str:
    """The report for a terminal."""
    lines = [
        f"{name} ({os.cpu_count()} processors, {platform.machine()}, Python {platform.python_version()})",
        "",
    ]
    lines += [f"  {row.value:12.4f} {row.unit:8} {row.what}" for row in report.rows]
    lines += ["", *(f"  {value:12.4f} ratio    {key}" for key, value in report.ratios.items())]
    return "\n".join(lines)
