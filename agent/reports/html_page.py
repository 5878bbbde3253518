"""What the pages for a site's own eyes share: one file without a script, its drawings inside, its banner on top."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image as Picture

INK, SOFT, ACCENT, WARN = "#14212b", "#51616e", "#0b6b73", "#a32638"
_CSP: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE: Final = """
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0 auto;max-width:1000px;padding:24px 20px 48px;color:#14212b;background:#fff;
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,"Liberation Sans",sans-serif}
.banner{border:3px solid #a32638;background:#fbe9eb;color:#7c1526;padding:12px 16px;border-radius:8px;font-weight:600}
h1{font-size:1.8rem;margin:24px 0 4px}h2{font-size:1.2rem;margin:0 0 4px}p{margin:6px 0;max-width:78ch}
.choice{font-size:1.15rem;border-left:5px solid #0b6b73;padding:6px 14px;margin:16px 0;background:#edf2f5}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:20px}
section{break-inside:avoid;margin:22px 0 0}figure{margin:0}img{width:100%;height:auto}
img.pixels{image-rendering:pixelated;max-width:640px}
figcaption{color:#51616e;font-size:.92rem;max-width:78ch}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%;font-size:.92rem}
th,td{border-bottom:1px solid #d7dfe5;padding:5px 8px;text-align:right;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tr.chosen{background:#e3f3e8;font-weight:600}
@media print{body{max-width:none;padding:0}.banner,.choice,tr.chosen{-webkit-print-color-adjust:exact;
print-color-adjust:exact}.wide{overflow:visible}}
"""


def page_html(title: str, warning: str, parts: Sequence[str], style: str = "") -> bytes:
    """The page, UTF-8: ``warning`` in a banner, then the parts, which are HTML already. ``style``: the page's own."""
    return "".join(
        [
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_CSP}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<meta name='referrer' content='no-referrer'><title>{html.escape(title)} — for this site only</title>",
            f"<style>{_STYLE}{style}</style></head><body>",
            f"<p class='banner' role='note'>FOR THIS SITE ONLY. {html.escape(warning)}</p>",
            f"<h1>{html.escape(title)}</h1>",
            *parts,
            "</body></html>\n",
        ]
    ).encode()


def block(title: str, figure: Figure, note: str) -> str:
    """A drawing with its words, which are read out to whoever cannot see it."""
    picture = _svg(figure)
    return (
        f"<section><h2>{html.escape(title)}</h2><figure><img src='data:image/svg+xml;base64,{picture}' "
        f'alt="{html.escape(note)}"><figcaption>{html.escape(note)}</figcaption></figure></section>'
    )


def plot(x: str, y: str, size: tuple[float, float] = (6.0, 3.8)) -> tuple[Figure, Axes]:
    """An empty drawing, of no global state."""
    figure = Figure(figsize=size, layout="constrained")
    made = figure.add_subplot()
    made.set_xlabel(x)
    made.set_ylabel(y)
    for side in ("top", "right"):
        made.spines[side].set_visible(False)
    made.grid(axis="y", color="#d7dfe5", linewidth=0.6)
    return figure, made


def _svg(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return base64.b64encode(out.getvalue()).decode()


def sheet(title: str, pictures: NDArray[np.uint8], wide: int, note: str) -> str:
    """Images (m, h, w[, 3]) side by side, ``wide`` in a line, pixel for pixel."""
    wide = min(wide, len(pictures))
    lines = [pictures[i : i + wide] for i in range(0, len(pictures), wide)]
    blank = np.full_like(pictures[0], 255)
    joined = np.concatenate([np.concatenate([*line, *[blank] * (wide - len(line))], axis=1) for line in lines])
    out = io.BytesIO()
    Picture.fromarray(joined).save(out, format="PNG")
    data = base64.b64encode(out.getvalue()).decode()
    told = html.escape(note)
    return (
        f"<section><h2>{html.escape(title)}</h2><figure><img class='pixels' src='data:image/png;base64,{data}' "
        f'alt="{told}"><figcaption>{told}</figcaption></figure></section>'
    )


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[bool] = ()) -> str:
    """Cells as text; the ``chosen`` rows stand out."""
    marks = [" class='chosen'" if one else "" for one in chosen] or [""] * len(rows)
    lines = [
        f"<tr{mark}>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>"
        for cells, mark in zip(rows, marks, strict=True)
    ]
    titles = "".join(f"<th scope='col'>{html.escape(h)}</th>" for h in head)
    name = html.escape(title)
    return (
        f'<section><h2>{name}</h2><div class="wide" tabindex="0" role="region" aria-label="{name}">'
        f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def write(path: Path, page: bytes) -> None:
    """Write the page, readable by its owner only.

    Raises:
        FileExistsError: there is a file of this name already.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
        stream.write(page)
