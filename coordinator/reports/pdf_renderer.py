"""A report as PDF. Pure: the same report gives the same bytes.

fpdf2 lays it out. Its fonts are a part of DejaVu Sans (Latin, Greek, Cyrillic), which lies beside this file with its
licence, so that a name is printed on every machine; what the fonts lack is printed as a replacement character.
"""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fpdf import FPDF, XPos, YPos
from fpdf.enums import TableBordersLayout, TableCellFillMode, VAlign
from fpdf.fonts import FontFace

from coordinator.reports.document import (
    OPEN,
    Block,
    Curve,
    Document,
    Drawing,
    FactList,
    Images,
    Points,
    ReportTable,
    Section,
    Text,
    plain,
)
from coordinator.reports.html_renderer import drawn

_HERE: Final = Path(__file__).parent
_REGULAR, _BOLD = _HERE / "DejaVuSans.ttf", _HERE / "DejaVuSans-Bold.ttf"
_INK, _SOFT, _ACCENT, _WARN = (20, 33, 43), (77, 92, 105), (11, 107, 115), (122, 82, 0)
_WASH, _RULE, _WARN_WASH = (238, 243, 245), (205, 214, 220), (253, 242, 217)
_LINES: Final = ((11, 107, 115), (163, 84, 42), (91, 74, 158), (47, 111, 49))
_DASHES: Final = ((0.0, 0.0), (2.4, 1.0), (0.8, 1.0), (3.2, 1.4))
_ORIGIN: Final = "Where this comes from"
_UNITS: Final = 640.0  # of a curve's image across; see coordinator.reports.html_renderer


class _Sheet(FPDF):
    """A4, with the ledger's head at the foot of every page."""

    def __init__(self, foot: str) -> None:
        super().__init__(format="A4")
        self.foot = foot
        self.set_margins(18, 16, 18)
        self.set_auto_page_break(True, 20)
        self.add_font("text", "", _REGULAR)
        self.add_font("text", "B", _BOLD)
        font: Any = self.fonts["text"]
        self.known = frozenset(font.cmap)

    def shown(self, text: str) -> str:
        """What the fonts have of a text."""
        return "".join(c if ord(c) in self.known else "\N{REPLACEMENT CHARACTER}" for c in plain(text))

    def footer(self) -> None:
        """Called by fpdf2 at the end of each page."""
        self.set_y(-12)
        self.set_font("text", "", 7)
        self.set_text_color(*_SOFT)
        self.cell(0, 4, self.shown(self.foot), new_x=XPos.LMARGIN, new_y=YPos.TOP)
        self.cell(0, 4, f"page {self.page_no()} of {{nb}}", align="R")

    def say(self, text: str, size: float = 9.5, style: str = "", color: tuple[int, int, int] = _INK) -> None:
        """A paragraph over the whole width."""
        self.set_font("text", style, size)
        self.set_text_color(*color)
        self.multi_cell(0, size * 0.5, self.shown(text), align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)

    def keep(self, height: float) -> None:
        """Go to the next page unless so many millimetres are left on this one."""
        if self.get_y() + height > self.h - 20:
            self.add_page()


def as_pdf(document: Document, made: dt.datetime, attached: tuple[str, bytes] | None = None) -> bytes:
    """The report on paper.

    Args:
        document: what to print.
        made: the time that the file bears.
        attached: name and bytes of a file inside it, left as it is.
    """
    s = document.source
    sheet = _Sheet(f"{s.origin}, {s.size} entries, root {s.root}")
    sheet.set_title(sheet.shown(document.title))
    sheet.set_lang("en")
    sheet.set_producer("lazaret")
    sheet.set_creation_date(made)
    sheet.add_page()
    sheet.say(document.title, 17, "B")
    sheet.ln(1.5)
    sheet.say(document.summary, 10.5, color=_SOFT)
    for section in (*document.sections, Section(_ORIGIN, (FactList(document.foot),))):
        _section(sheet, section)
    if attached is not None:
        sheet.embed_file(bytes=attached[1], basename=attached[0], mime_type="application/json", compress=False)
    out = io.BytesIO()
    sheet.output(out)
    return out.getvalue()


def _section(sheet: _Sheet, section: Section) -> None:
    sheet.keep(44 if section.title == _ORIGIN else 30)
    sheet.ln(5)
    sheet.say(section.title, 12.5, "B")
    sheet.set_draw_color(*_ACCENT)
    sheet.set_line_width(0.5)
    sheet.line(sheet.l_margin, sheet.get_y() + 1, sheet.w - sheet.r_margin, sheet.get_y() + 1)
    sheet.ln(3)
    for block in section.blocks:
        _block(sheet, block)
        sheet.ln(2)


def _block(sheet: _Sheet, block: Block) -> None:
    if isinstance(block, Text):
        _text(sheet, block)
    elif isinstance(block, FactList):
        _grid(sheet, block.rows, (21, 79))
    elif isinstance(block, Points):
        for item in block.items:
            sheet.say(f"• {item}", color=_WARN if item == OPEN else _INK)
            sheet.ln(0.8)
    elif isinstance(block, ReportTable):
        _table(sheet, block)
    elif isinstance(block, Images):
        sheet.say(block.said, color=_SOFT)
    elif isinstance(block, Drawing):
        sheet.say(f"{block.title}: {block.words}.", color=_SOFT)
    else:
        _curve(sheet, block)


def _text(sheet: _Sheet, block: Text) -> None:
    if block.tone in ("", "note"):
        sheet.say(block.text, color=_SOFT if block.tone else _INK)
        return
    claim = block.tone == "claim"
    sheet.set_font("text", "B" if claim else "", 10 if claim else 9.5)
    sheet.set_text_color(*(_INK if claim else _WARN))
    sheet.set_fill_color(*(_WASH if claim else _WARN_WASH))
    sheet.multi_cell(
        0, 5.2, sheet.shown(block.text), align="L", fill=True, padding=2, new_x=XPos.LMARGIN, new_y=YPos.NEXT
    )
    sheet.set_fill_color(255)


def _grid(sheet: _Sheet, rows: tuple[tuple[str, str], ...], widths: tuple[int, int]) -> None:
    """Names and what they are, without lines."""
    sheet.set_font("text", "", 9)
    sheet.set_text_color(*_INK)
    with sheet.table(
        borders_layout=TableBordersLayout.NONE,
        first_row_as_headings=False,
        col_widths=widths,
        line_height=4.4,
        text_align="LEFT",
        v_align=VAlign.T,
        cell_fill_mode=TableCellFillMode.NONE,
        padding=(0.5, 1, 0.5, 0),
    ) as table:
        for name, text in rows:
            row = table.row()
            row.cell(sheet.shown(name), style=FontFace(color=_SOFT))
            row.cell(sheet.shown(text), style=FontFace(color=_WARN if text == OPEN else _INK))


def _table(sheet: _Sheet, block: ReportTable) -> None:
    if not block.rows:
        sheet.say(f"{block.caption}: {block.empty}", color=_SOFT)
        return
    sheet.keep(24)
    sheet.say(block.caption, 8.5, color=_SOFT)
    sheet.ln(0.5)
    sheet.set_font("text", "", 8)
    sheet.set_text_color(*_INK)
    sheet.set_draw_color(*_RULE)
    sheet.set_line_width(0.2)
    aligned = tuple("RIGHT" if i in block.right else "LEFT" for i in range(len(block.head)))
    with sheet.table(
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        headings_style=FontFace(emphasis="BOLD", fill_color=_WASH, color=_INK),
        cell_fill_mode=TableCellFillMode.NONE,
        col_widths=block.widths or None,
        line_height=4.1,
        v_align=VAlign.T,
        text_align=aligned,
        padding=1,
    ) as table:
        for cells in (block.head, *block.rows):
            row = table.row()
            for cell in cells:
                row.cell(sheet.shown(cell), style=FontFace(color=_WARN) if cell == OPEN else None)


def _curve(sheet: _Sheet, block: Curve) -> None:
    wide = sheet.w - sheet.l_margin - sheet.r_margin
    scale = wide / _UNITS
    sheet.keep(210 * scale + 10)
    picture, x0, y0 = drawn(block), sheet.l_margin, sheet.get_y()
    frame: Any = picture["frame"]
    sheet.set_font("text", "", 7)
    sheet.set_text_color(*_SOFT)
    sheet.set_draw_color(*_RULE)
    sheet.set_line_width(0.2)
    for y, text in picture["y"]:
        sheet.line(x0 + frame["left"] * scale, y0 + y * scale, x0 + frame["right"] * scale, y0 + y * scale)
        sheet.text(x0 + frame["left"] * scale - sheet.get_string_width(text) - 1.5, y0 + y * scale + 1, text)
    for x, text, anchor in picture["x"]:
        back = sheet.get_string_width(text) if anchor == "end" else 0.0
        sheet.text(x0 + x * scale - back, y0 + frame["bottom"] * scale + 4.5, text)
    sheet.set_line_width(0.6)
    for i, line in enumerate(picture["lines"]):
        points = [(x0 + x * scale, y0 + y * scale) for x, y in _points(line["path"])]
        with sheet.local_context(draw_color=_LINES[i % 4], dash_pattern=_dash(i)):
            sheet.polyline(points)
    sheet.set_y(y0 + 200 * scale)
    sheet.say(f"{block.title}, in {block.unit}.", 8.5, color=_SOFT)
    for i, line in enumerate(picture["lines"]):
        at = sheet.get_y() + 2.2
        with sheet.local_context(draw_color=_LINES[i % 4], dash_pattern=_dash(i), line_width=0.6):
            sheet.line(x0, at, x0 + 9, at)
        sheet.set_x(x0 + 11)
        sheet.say(f"{line['name']}: {line['last']:.1f}", 8.5)


def _dash(i: int) -> dict[str, float]:
    on, off = _DASHES[i % 4]
    return {"dash": on, "gap": off, "phase": 0}


def _points(path: str) -> Iterator[tuple[float, float]]:
    """The corners of a path of M and L, as :func:`coordinator.reports.html_renderer.drawn` writes it."""
    for part in path.replace("M", "L").split("L")[1:]:
        x, _, y = part.partition(" ")
        yield float(x), float(y)
