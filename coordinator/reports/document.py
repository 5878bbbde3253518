"""A report before it has a form: sections of text, facts, tables and curves, and the same as data.

A report is written once; :mod:`coordinator.reports.html_renderer` makes HTML of it,
:mod:`coordinator.reports.pdf_renderer` PDF, :func:`as_json` JSON and :func:`as_markdown` Markdown. Nothing in it but
a drawing is markup: each form escapes what it prints.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from markupsafe import Markup

from protos.common.errors import ArtifactError
from protos.common.text import printable

OPEN: Final = "☐ to be filled in by the controller"  # what no ledger can know; never a guess in its place


class ReportError(ArtifactError, ValueError):
    """The report cannot be made; the text gives the reason and the remedy."""


class UnsoundReportError(ArtifactError, ValueError):
    """The report's contents contradict each other; no page is made."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; its tone is "", "note" (set apart), "warn" (not overlooked) or "claim" (what is promised)."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class FactList:
    """Names and what they are."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Points:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows under a head; ``right`` are the columns of numbers. ``widths`` are shares, for paper."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    widths: tuple[int, ...] = ()
    empty: str = "There are none."

    def __post_init__(self) -> None:
        """Each row has a cell for each column."""
        if not all(len(row) == len(self.head) for row in self.rows):
            raise ValueError(f"{self.caption}: a row has another number of cells than the head")
        if self.widths and len(self.widths) != len(self.head):
            raise ValueError(f"{self.caption}: a width for each column, or none")


@dataclass(frozen=True, slots=True)
class Line:
    """A quantity that changes in steps: (seconds since 1970 or another quantity, value), in order."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Lines between 0 and ``top``; the same numbers are in a table next to it.

    They run over time, unless ``ends`` names what stands at the two ends of another axis.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    top: float = 100.0
    ends: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """Nothing is drawn of what is not a number."""
        values = [value for line in self.lines for _, value in line.points]
        if not (self.top > 0 and all(math.isfinite(value) and value >= 0 for value in values)):
            raise ValueError(f"{self.title}: a curve has finite values of 0 or more")


@dataclass(frozen=True, slots=True)
class Images:
    """Small images (label, PNG), which only HTML shows; the other forms print the caption and how many there are."""

    caption: str
    images: tuple[tuple[str, bytes], ...]

    @property
    def said(self) -> str:
        """In place of the images."""
        return f"{self.caption}: {len(self.images)}, shown in the HTML form."


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG drawing, which only HTML shows; whoever drew it has escaped its texts. ``words`` say the same."""

    title: str
    words: str
    svg: Markup


Block = Text | FactList | Points | ReportTable | Curve | Images | Drawing


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its content."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class ReportSource:
    """The ledger that a report was made from, as of one head."""

    origin: str
    size: int
    root: str  # hexadecimal
    key: str  # SHA-256 of the ledger's public key
    until: str  # time of the last entry, UTC
    made: str  # when the report was, UTC


@dataclass(frozen=True, slots=True)
class Document:
    """A report."""

    name: str  # short, for file names
    title: str
    summary: str
    sections: tuple[Section, ...]
    source: ReportSource
    data: Mapping[str, Any] = field(default_factory=dict)  # the same for machines

    @property
    def foot(self) -> tuple[tuple[str, str], ...]:
        """Where it comes from, and how to check that."""
        s = self.source
        return (
            ("Ledger", f"{s.origin}, {s.size} entries until {s.until or 'now'} UTC"),
            ("Root", s.root),
            ("Key", s.key),
            (
                "Made",
                f"{s.made} UTC; the proof is the exported ledger: lazaret-verify ledger.export --key KEY, with the "
                "key as its owner publishes it elsewhere",
            ),
        )


def as_json(document: Document) -> str:
    """For machines: the data, and which ledger it is from."""
    s = document.source
    told = {"origin": s.origin, "size": s.size, "root": s.root, "key": s.key}
    whole = {"report": document.name, "title": document.title, "made": s.made, "ledger": told, **document.data}
    return json.dumps(whole, indent=2, sort_keys=True, allow_nan=False) + "\n"


_MARKUP: Final = re.compile(r"([\\`*_\[\]<>|#~])")


def plain(text: str) -> str:
    """A text without control or direction marks, which could make a page read otherwise than it is."""
    return printable(text, "\N{REPLACEMENT CHARACTER}")


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", plain(text))


def as_markdown(document: Document) -> str:
    """For a repository: a model card beside its model, a datasheet beside its set."""
    out = [f"# {_escaped(document.title)}", "", _escaped(document.summary), ""]
    for section in document.sections:
        out += [f"## {_escaped(section.title)}", ""]
        for block in section.blocks:
            out += [*_markdown(block), ""]
    out += ["## Where this comes from", "", *(f"- {name}: {_escaped(text)}" for name, text in document.foot), ""]
    return "\n".join(out)


def _markdown(block: Block) -> Sequence[str]:
    if isinstance(block, Text):
        return [f"**{_escaped(block.text)}**" if block.tone in ("claim", "warn") else _escaped(block.text)]
    if isinstance(block, FactList):
        return [f"- {_escaped(name)}: {_escaped(text)}" for name, text in block.rows]
    if isinstance(block, Points):
        return [f"- {_escaped(item)}" for item in block.items]
    if isinstance(block, Curve):
        return [f"{_escaped(block.title)}: see the numbers below."]
    if isinstance(block, Images):
        return [_escaped(block.said)]
    if isinstance(block, Drawing):
        return [f"{_escaped(block.title)}: {_escaped(block.words)}."]
    if not block.rows:
        return [f"{_escaped(block.caption)}: {_escaped(block.empty)}"]
    head = ["| " + " | ".join(map(_escaped, block.head)) + " |", "|" + "---|" * len(block.head)]
    return [
        _escaped(block.caption) + ":",
        "",
        *head,
        *("| " + " | ".join(map(_escaped, r)) + " |" for r in block.rows),
    ]
