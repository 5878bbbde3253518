"""The page for choosing k. It depends on patients: it is for the site only, and says so.

One file without a script: every drawing is inside it, as SVG by matplotlib's own figures (no global state), so it can
be printed or kept. It holds no pseudonym: points of a tree are patients without names, and the images of a contact
sheet are representatives, never patients.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.cluster.hierarchy import dendrogram as laid_out

from agent.evaluation.k_selection import Curves, Point
from agent.reports.html_page import ACCENT, INK, SOFT, WARN, block, page_html, plot, sheet, table

SHEET: Final = 24  # representatives of a contact sheet, at most


def render(curves: Curves, representatives: NDArray[np.uint8] | None = None) -> bytes:
    """The whole page, UTF-8.

    Args:
        curves: of :func:`agent.evaluation.k_selection.tune`.
        representatives: (m, h, w[, 3]) of the recommended k, for a contact sheet of the first ``SHEET``; or none.
    """
    figures = [_loss(curves), _risk(curves), _silhouette(curves), _homogeneity(curves)]
    blocks = "".join(block(title, figure, note) for title, figure, note in figures if figure is not None)
    parts = [_choice(curves), f"<div class='plots'>{blocks}</div>", block(*_tree(curves))]
    parts += [_sheet(representatives), _table(curves), _refusals(curves)]
    warning = (
        "This page is made from patients and is not a release: it must not leave the hospital, in whole or in part."
    )
    return page_html("Choosing k", warning, parts)


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


Drawn = tuple[str, Figure | None, str]


def _loss(curves: Curves) -> Drawn:
    figure, axes = plot("k (patients in a cluster)", "information loss")
    k, loss = [p.k for p in curves.points], [p.information_loss for p in curves.points]
    axes.plot(k, loss, "o-", color=ACCENT, label="information loss")
    of = "of codes" if curves.points[0].reid is None else "of images, as a recogniser sees them"
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
    figure, axes = plot("k (patients in a cluster)", "re-identification rate")
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
    return "Re-identification by the recogniser", figure, f"Share of patients found in their own image. {told}."


def _silhouette(curves: Curves) -> Drawn:
    figure, axes = plot("k (patients in a cluster)", "mean silhouette")
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
    figure, axes = plot("k (patients in a cluster)", "homogeneous clusters")
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
    figure, axes = plot("patients, without names", "distance at which they join", (10.0, 3.6))
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


def _below(axes: Axes, curves: Curves) -> None:
    """Shade what the policy does not admit."""
    first = curves.points[0].k
    if curves.menu.k_min > first:
        axes.axvspan(first, curves.menu.k_min, color=WARN, alpha=0.08, linewidth=0, label="below the policy's k")


def _listed(k: Sequence[int], values: Sequence[float]) -> str:
    return ", ".join(f"{a}: {b:.3g}" for a, b in zip(k, values, strict=True))


def _sheet(representatives: NDArray[np.uint8] | None) -> str:
    if representatives is None or not len(representatives):
        return ""
    shown = representatives[:SHEET]
    return sheet(
        "Representatives", shown, 8, f"{len(shown)} representatives of the recommended k. None is a patient."
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
        rows.append(cells)
    return table("All figures", head, rows, [p.k == curves.recommended for p in curves.points])


def _refusals(curves: Curves) -> str:
    if not curves.refused:
        return ""
    items = "".join(f"<li>k = {r.k}: {html.escape(r.reason)}</li>" for r in curves.refused)
    return f"<section><h2>Not recommended, and why</h2><ul>{items}</ul></section>"
