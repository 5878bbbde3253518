"""The page on which a person at the site chooses k. It is made of patients: it is for the site only, and says so.

One file without a script: every drawing is inside it, as SVG by matplotlib's own figures (no global state), so it can
be printed or kept. It holds no pseudonym: points of a tree are patients without names, and the pictures of a contact
sheet are representatives, never patients.
"""

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
from scipy.cluster.hierarchy import dendrogram as laid_out

from agent.measures.tuning import Curves, Point

INK, SOFT, ACCENT, WARN, GOOD = "#14212b", "#51616e", "#0b6b73", "#a32638", "#7fb9bd"
SHEET: Final = 24  # representatives of a contact sheet, at most
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
figcaption{color:#51616e;font-size:.92rem;max-width:78ch}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%;font-size:.92rem}
th,td{border-bottom:1px solid #d7dfe5;padding:5px 8px;text-align:right;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tr.chosen{background:#e3f3e8;font-weight:600}
@media print{body{max-width:none;padding:0}.banner,.choice,tr.chosen{-webkit-print-color-adjust:exact;
print-color-adjust:exact}.wide{overflow:visible}}
"""


def render(curves: Curves, representatives: NDArray[np.uint8] | None = None) -> bytes:
    """The whole page, UTF-8.

    Args:
        curves: of :func:`agent.measures.tuning.tune`.
        representatives: (m, h, w[, 3]) of the recommended k, for a contact sheet of the first ``SHEET``; or none.
    """
    figures = [_loss(curves), _risk(curves), _silhouette(curves), _homogeneity(curves)]
    blocks = "".join(_block(title, _svg(figure), note) for title, figure, note in figures if figure is not None)
    tree_title, tree, tree_note = _tree(curves)
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{_CSP}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        "<meta name='referrer' content='no-referrer'><title>Choosing k — for this site only</title>",
        f"<style>{_STYLE}</style></head><body>",
        "<p class='banner' role='note'>FOR THIS SITE ONLY. This page is made from patients and is not a release: "
        "it must not leave the hospital, in whole or in part.</p>",
        f"<h1>Choosing k</h1>{_choice(curves)}",
        f"<div class='plots'>{blocks}</div>",
        _block(tree_title, _svg(tree), tree_note),
        _sheet(representatives),
        _table(curves),
        _refusals(curves),
        "</body></html>\n",
    ]
    return "".join(parts).encode()


def write(path: Path, page: bytes) -> None:
    """Write the page, readable by its owner only.

    Raises:
        FileExistsError: there is a file of this name already.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
        stream.write(page)


def _choice(curves: Curves) -> str:
    menu = ", ".join(map(str, curves.menu.ks))
    told = "No k is recommended" if curves.recommended is None else f"Recommended: k = {curves.recommended}"
    return (
        f"<p class='choice'>{told}. {html.escape(_sentence(curves.why))}</p>"
        f"<p>Menu, fixed beforehand: {menu}. The policy's least k is {curves.menu.k_min}. "
        "Every later release of this modality states which sizes were tried; none of the figures here is stated.</p>"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _block(title: str, picture: str, note: str) -> str:
    return (
        f"<section><h2>{html.escape(title)}</h2><figure><img src='data:image/svg+xml;base64,{picture}' "
        f'alt="{html.escape(note)}"><figcaption>{html.escape(note)}</figcaption></figure></section>'
    )


Drawn = tuple[str, Figure | None, str]


def _loss(curves: Curves) -> Drawn:
    figure, axes = _axes("k (patients in a cluster)", "information loss")
    k, loss = [p.k for p in curves.points], [p.information_loss for p in curves.points]
    axes.plot(k, loss, "o-", color=ACCENT, label="information loss")
    of = "of codes" if curves.points[0].reid is None else "of pictures, as a recogniser sees them"
    note = f"Information loss {of}, at k = {_listed(k, loss)}."
    if curves.elbow is not None:
        axes.plot([k[0], k[-1]], [loss[0], loss[-1]], "--", color=SOFT, linewidth=1, label="chord")
        at = k.index(curves.elbow.k)
        axes.plot([k[at]], [loss[at]], "o", markersize=13, fillstyle="none", color=WARN, label="elbow of the menu")
        note += f" The curve {curves.elbow.bends} at k = {curves.elbow.k}."
    _below(axes, curves)
    if curves.recommended is not None:
        axes.axvline(curves.recommended, color=ACCENT, linestyle=":", label="recommended")
    axes.legend(frameon=False, fontsize=9)
    return "Information loss", figure, note


def _risk(curves: Curves) -> Drawn:
    tried = [(p.k, p.reid) for p in curves.points if p.reid is not None]
    if not tried:
        return "Re-identification", None, ""
    figure, axes = _axes("k (patients in a cluster)", "re-identification rate")
    k = [key for key, _ in tried]
    rates = [rate.value for _, rate in tried]
    spans = [rate.interval for _, rate in tried]
    low = [max(0.0, r - a) for r, (a, _) in zip(rates, spans, strict=True)]
    high = [max(0.0, b - r) for r, (_, b) in zip(rates, spans, strict=True)]
    axes.errorbar(k, rates, yerr=[low, high], fmt="o-", color=ACCENT, capsize=4, label="measured, 95 % interval")
    grid = np.linspace(k[0], k[-1], 100)
    axes.plot(grid, 1.0 / grid, "--", color=WARN, label="1/k")
    _below(axes, curves)
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False, fontsize=9)
    told = "; ".join(
        f"k = {key}: {r:.1%} ({a:.1%} to {b:.1%}), 1/k {1 / key:.1%}"
        for key, r, (a, b) in zip(k, rates, spans, strict=True)
    )
    return "Re-identification by the recogniser", figure, f"Share of patients found in their own picture. {told}."


def _silhouette(curves: Curves) -> Drawn:
    figure, axes = _axes("k (patients in a cluster)", "mean silhouette")
    k, values = [p.k for p in curves.points], [p.silhouette for p in curves.points]
    axes.plot(k, values, "o-", color=ACCENT)
    axes.axhline(0.0, color=SOFT, linewidth=1)
    _below(axes, curves)
    note = f"Above 0, patients lie nearer to their own cluster than to the next. k = {_listed(k, values)}."
    return "Silhouette", figure, note


def _homogeneity(curves: Curves) -> Drawn:
    names = sorted(curves.points[0].homogeneity)
    if not names:
        return "Homogeneity", None, ""
    figure, axes = _axes("k (patients in a cluster)", "homogeneous clusters")
    k = [p.k for p in curves.points]
    told = []
    for name, mark in zip(names, "osv^D" * len(names), strict=False):
        values = [p.homogeneity[name] for p in curves.points]
        axes.plot(k, values, f"{mark}-", label=name)
        told.append(f"{name}: {_listed(k, values)}")
    if len(names) > 1:
        axes.plot(k, [_joint(p) for p in curves.points], "x--", color=INK, label="all together")
    _below(axes, curves)
    axes.set_ylim(-0.02, 1.02)
    axes.legend(frameon=False, fontsize=9)
    note = "Share of clusters whose patients all have the same value: kept, and disclosed about each of them. "
    return "Homogeneity of attributes", figure, note + "; ".join(told) + "."


def _joint(point: Point) -> float:
    return 0.0 if point.joint is None else point.joint


def _tree(curves: Curves) -> tuple[str, Figure, str]:
    tree = curves.dendrogram
    figure, axes = _axes("patients, without names", "distance at which they join", (10.0, 3.6))
    drawn = laid_out(tree.tree, no_plot=True)
    for x, y in zip(drawn["icoord"], drawn["dcoord"], strict=True):
        axes.plot(x, y, color=SOFT, linewidth=0.8)
    axes.axhline(tree.lower, color=INK, linestyle="--", label="lower cut: most have company")
    axes.axhline(tree.upper, color=WARN, linestyle="--", label="upper cut: few are alone")
    axes.set_xticks([])
    axes.legend(frameon=False, fontsize=9)
    note = (
        f"Groups at the lower cut have {tree.smallest} patients or more, at the upper cut {tree.largest} at most; "
        f"the middle sizes are {tree.typical[0]} and {tree.typical[1]}. Rough bounds for k, before the policy."
    )
    return "Tree of similar patients", figure, note


def _axes(x: str, y: str, size: tuple[float, float] = (6.0, 3.8)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#d7dfe5", linewidth=0.6)
    return figure, axes


def _below(axes: Axes, curves: Curves) -> None:
    """Shade what the policy does not admit."""
    first = curves.points[0].k
    if curves.menu.k_min > first:
        axes.axvspan(first, curves.menu.k_min, color=WARN, alpha=0.08, linewidth=0, label="below the policy's k")


def _listed(k: Sequence[int], values: Sequence[float]) -> str:
    return ", ".join(f"{a}: {b:.3g}" for a, b in zip(k, values, strict=True))


def _svg(figure: Figure | None) -> str:
    if figure is None:
        return ""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return base64.b64encode(out.getvalue()).decode()


def _sheet(representatives: NDArray[np.uint8] | None) -> str:
    if representatives is None or not len(representatives):
        return ""
    shown = representatives[:SHEET]
    wide = min(8, len(shown))
    lines = [shown[i : i + wide] for i in range(0, len(shown), wide)]
    blank = np.full_like(shown[0], 255)
    sheet = np.concatenate([np.concatenate([*line, *[blank] * (wide - len(line))], axis=1) for line in lines])
    out = io.BytesIO()
    Picture.fromarray(sheet).save(out, format="PNG")
    data = base64.b64encode(out.getvalue()).decode()
    note = f"{len(shown)} representatives of the recommended k. None of them is a patient."
    return (
        f"<section><h2>Representatives</h2><figure><img src='data:image/png;base64,{data}' "
        f"alt='{note}'><figcaption>{note}</figcaption></figure></section>"
    )


def _table(curves: Curves) -> str:
    names = sorted(curves.points[0].homogeneity)
    head = ["k", "clusters", "loss", "SSE / SST", "silhouette", "re-identified (95 %)", "1/k", *names, "all"]
    rows = []
    for p in curves.points:
        reid = "not tried"
        if p.reid is not None:
            reid = f"{p.reid.value:.1%} ({p.reid.interval[0]:.1%}-{p.reid.interval[1]:.1%})"
        cells = [str(p.k), str(p.clusters), f"{p.information_loss:.4g}", f"{p.sse_share:.3f}", f"{p.silhouette:.3f}"]
        cells += [reid, f"{1 / p.k:.1%}", *(f"{p.homogeneity[n]:.0%}" for n in names)]
        cells += ["" if p.joint is None else f"{p.joint:.0%}"]
        marked = " class='chosen'" if p.k == curves.recommended else ""
        rows.append(f"<tr{marked}>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    titles = "".join(f"<th scope='col'>{html.escape(h)}</th>" for h in head)
    return (
        "<section><h2>All figures</h2><div class='wide' tabindex='0' role='region' aria-label='All figures'>"
        f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _refusals(curves: Curves) -> str:
    if not curves.refused:
        return ""
    items = "".join(f"<li>k = {r.k}: {html.escape(r.reason)}</li>" for r in curves.refused)
    return f"<section><h2>Not recommended, and why</h2><ul>{items}</ul></section>"
