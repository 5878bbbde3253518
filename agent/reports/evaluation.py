"""The page with a released set's evaluation, for a reviewer at the site. It contains patient data, and says so.

It shows figures and the set's own images, and no image of a patient: whoever wants to compare has the PACS.
"""

from __future__ import annotations

import html
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from agent.domain import SyntheticSet
from agent.evaluation.fidelity import Fidelity
from agent.evaluation.released_set import ClassifierResult, Evaluation
from agent.intervals import Figure as Number
from agent.reports.html_page import ACCENT, SOFT, WARN, block, page_html, plot, sheet, table

SHOWN: Final = 16  # images of a class, at most
_CLASSES: Final = 40  # of which images are shown, at most
WARNING: Final = (
    "This page was made from patients: it stays at this site. If you choose a configuration by these figures, no "
    "epsilon covers that choice. If a figure leaves, that is a release of its own."
)


def render(found: Evaluation, made: SyntheticSet, told: str, looks: int) -> bytes:
    """The whole page, UTF-8.

    Args:
        found: the figures.
        made: the set that they are of.
        told: what was judged, in a sentence: mechanism, file, part.
        looks: how often held-out patients of this modality were looked at.
    """
    times = "This is the first look" if looks == 1 else f"This is look number {looks}"
    parts = [
        f"<p class='choice'>{html.escape(told)}</p>",
        f"<p>{times} at held-out patients of this modality. With every further look, the best figure owes more to "
        "luck: figures that something was chosen by are too good. On new patients they would be worse.</p>",
        _utility(found),
        _fidelity(found.fidelity),
        _semantics(found.semantics),
        *_sheets(made, found.classes),
    ]
    return page_html("Evaluation of a set on held-out patients", WARNING, parts)


def _missing(title: str, why: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>Not measured: {html.escape(why)}.</p></section>"


def _span(figure: Number, form: str) -> str:
    low, high = figure.interval.low, figure.interval.high
    return f"{figure.value:{form}} ({low:{form}} to {high:{form}})"


def _utility(found: Evaluation) -> str:
    title = "Trained on the set, tested on held-out patients"
    if isinstance(found.taught, str):
        return _missing(title, found.taught)
    chance, most = 1.0 / len(found.classes), found.taught[0].accuracy.chance or 0.0
    rows = [[one.name, _span(one.accuracy, ".1%"), str(one.seeds)] for one in found.taught]
    rows += [["the commonest class for everybody", f"{most:.1%}", ""], ["chance", f"{chance:.1%}", ""]]
    drawn = block(title, _bars(found.taught, chance, most), _bars_told(found.taught, chance, most))
    accuracies = table("Accuracy", ["classifier", "accuracy (95 %, by patient)", "trainings"], rows)
    head = ["held-out images of", *(one.name for one in found.taught)]
    each = [
        [recall.name, *(_span(one.recalls[i], ".0%") for one in found.taught)]
        for i, recall in enumerate(found.taught[0].recalls)
    ]
    return drawn + accuracies + table("Found of each class (recall)", head, each)


def _bars(taught: tuple[ClassifierResult, ...], chance: float, most: float) -> Figure:
    figure, axes = plot("", "accuracy", (7.0, 3.4))
    values = [one.accuracy.value for one in taught]
    low = [one.accuracy.value - one.accuracy.interval.low for one in taught]
    high = [one.accuracy.interval.high - one.accuracy.value for one in taught]
    places = np.arange(len(taught))
    axes.errorbar(places, values, yerr=[low, high], fmt="o", color=ACCENT, capsize=6, label="measured, 95 % interval")
    axes.axhline(most, color=WARN, linestyle="--", label="the commonest class for everybody")
    axes.axhline(chance, color=SOFT, linestyle=":", label="chance")
    axes.set_xticks(places, [one.name for one in taught])
    axes.set_xlim(-0.5, len(taught) - 0.5)
    axes.set_ylim(0.0, 1.02)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _bars_told(taught: tuple[ClassifierResult, ...], chance: float, most: float) -> str:
    told = "; ".join(f"{one.name} {_span(one.accuracy, '.1%')}" for one in taught)
    return (
        f"Accuracy on real images of classifiers that were trained on the set only: {told}. The commonest class for "
        f"everybody {most:.1%}, chance {chance:.1%}. LR and MLP are scikit-learn's with its own defaults."
    )


def _fidelity(found: Fidelity | str) -> str:
    title = "Likeness"
    if isinstance(found, str):
        return _missing(title, found)
    rows = [
        [figure.name, _span(figure, ".4g"), _span(base, ".4g")]
        for figure, base in zip(found.figures, found.baseline, strict=True)
    ]
    head = ["of features", "the set (95 %)", "the other half of the held-out patients"]
    size = "" if found.equal_size else " The other half has fewer images than the set: its figures are worse."
    note = (
        f"Against one half of the held-out patients, in features of {found.extractor} ({found.origin.provenance}, "
        f"{found.origin.sha256[:12]}), covariance {found.covariance}: numbers of other networks do not compare.{size}"
    )
    return table(title, head, rows) + f"<p>{html.escape(note)}</p>"


def _semantics(found: tuple[Number, ...] | str) -> str:
    title = "Semantic similarity to the held-out patients"
    if isinstance(found, str):
        return _missing(title, found)
    rows = [[figure.name, _span(figure, ".3f")] for figure in found]
    note = (
        "SDS, Eq. 5 of PrivImage: the larger, the nearer; what shows the same semantics equally often comes to as "
        "much as the patients themselves. A semantic's vector is the mean random feature of the public images that "
        "show it. What the release selected, by noisy counts, is not kept: a selection without noise stands for it."
    )
    return table(title, ["of", "SDS (95 %)"], rows) + f"<p>{html.escape(note)}</p>"


def _sheets(made: SyntheticSet, classes: tuple[str, ...]) -> list[str]:
    labels = np.array(made.labels)
    out = []
    for label in classes[:_CLASSES]:
        mine = made.images[labels == label]
        if not len(mine):
            out.append(_missing(f"Class {label}", "the set has no image of it"))
            continue
        shown = min(len(mine), SHOWN)
        note = f"The first {shown} of {len(mine)} synthetic images of class {label}. None of them is a patient."
        margins = ((0, 0), (0, 1), (0, 1), (0, 0))[: mine.ndim]
        out.append(sheet(f"Class {label}", np.pad(mine[:SHOWN], margins, constant_values=255), 8, note))
    if len(classes) > _CLASSES:
        out.append(f"<p>{len(classes) - _CLASSES} more classes are not shown.</p>")
    return out
