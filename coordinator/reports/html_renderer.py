"""A report as one HTML page: no script, nothing loaded, made to be printed. Pure."""

from __future__ import annotations

import base64
import operator
from pathlib import Path
from typing import Any, Final

import jinja2

from coordinator.reports.document import OPEN, Curve, Document, Images, plain
from protos.common.text import DATE, utc

_FRAME: Final = (52.0, 12.0, 628.0, 176.0)  # left, top, right, bottom of a curve's axes, of 640 x 210


def drawn(curve: Curve) -> dict[str, Any]:
    """A curve in the coordinates of its image: steps, and what stands at the axes."""
    left, top, right, bottom = _FRAME
    times = [at for line in curve.lines for at, _ in line.points]
    first, last = (min(times), max(times)) if times else (0, 1)
    span = (last - first) or 1

    def x(at: float) -> float:
        return round(left + (right - left) * (at - first) / span, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * min(value, curve.top) / curve.top, 1)

    lines = []
    for line in curve.lines:
        path, before = "", 0.0
        for i, (at, value) in enumerate(line.points):
            path += f"M{x(at)} {y(value)}" if not i else f"L{x(at)} {y(before)}L{x(at)} {y(value)}"
            before = value
        path += f"L{right} {y(before)}" if line.points else ""
        lines.append({"name": line.name, "path": path, "last": before})
    ticks = [(y(curve.top * i / 4), f"{curve.top * i / 4:g}") for i in range(5)]
    begin, end = curve.ends or (utc(first, DATE), utc(last, DATE))
    ends = [(left, begin, "start"), (right, end, "end")] if times else []
    return {
        "frame": {"left": left, "top": top, "right": right, "bottom": bottom},
        "lines": lines,
        "y": ticks,
        "x": ends,
    }


def as_html(document: Document) -> str:
    """One self-contained page. Every value is escaped, and a content security policy forbids the rest."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: plain(value) if type(value) is str else value,
    )
    environment.filters["base64"] = lambda raw: base64.b64encode(raw).decode()
    page = environment.get_template("document.html")
    images = any(isinstance(block, Images) for section in document.sections for block in section.blocks)
    kind = operator.attrgetter("__class__.__name__")
    return page.render(document=document, drawn=drawn, open=OPEN, kind=kind, images=images)
