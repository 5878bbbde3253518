"""The reviewer's page of a vetting of representatives: those that are most like a patient, beside that patient.

It is the contact sheet of a distillation (:mod:`agent.reports.contact_sheet`) without the parts that only a
distillation has. It shows patients, so it is for this site only, and says so; it contains no pseudonym, and names no
cluster. The patients are those with comparable images (:func:`agent.release.vetting_statement.compared`), not all
patients.
"""

from __future__ import annotations

import html

from agent.release.vetting_statement import VettingReport
from agent.reports.contact_sheet import (
    PATIENTS,
    STYLE,
    by_chance,
    caught,
    explain_drop,
    side_by_side,
    span,
    threshold,
)
from agent.reports.html_page import page_html, table

_LEAVE = "They leave, as they are."
_NEITHER = "They do not leave either, since no new image passed."
_GONE = "They do not leave, and neither does any other image of their cluster."


def labels(found: VettingReport) -> str:
    """Labels of which no cluster is left, in words."""
    return ", ".join(name or "no label" for name in found.lost)


def render(found: VettingReport, mechanism: str) -> bytes:
    """The whole page, UTF-8.

    Args:
        found: of :meth:`agent.release.cluster_vetting.Vetter.examine`.
        mechanism: what made the images.
    """
    gone = "".join(f", {count} {explain_drop(reason)}" for reason, count in sorted(found.dropped.items()))
    told = (
        f"{mechanism}: {found.pictures} images of {found.clusters} clusters were compared with every comparable "
        f"image{gone}. {found.left} clusters leave."
    )
    if found.lost:
        told += f" No cluster is left with these labels: {labels(found)}."
    figures = [
        ("Clusters re-identified before: of what would leave", span(found.before)),
        ("Clusters re-identified after: of what leaves", span(found.after) if found.after else "nothing leaves"),
        *((f"Planted near-duplicates of the patients, caught: {name}", text) for name, text in caught(found.power)),
    ]
    reached = [
        (f"Threshold: {name}", threshold(name, value), by_chance(found.intervals, name) or "-")
        for name, value in sorted(found.thresholds.items())
    ]
    kept = [one for one in found.exhibits if not one.reason]
    dropped = [one for one in found.exhibits if one.reason]
    parts = [
        f"<p class='choice'>{html.escape(told)}</p>",
        table("Figures, by the second verifier", ["", "(95 %)"], figures),
        table("Thresholds", ["", "", "reached by chance (95 %)"], reached),
        side_by_side(
            "Passed: does any of these show the patient beside it?",
            _LEAVE if found.left else _NEITHER,
            "Nothing passed.",
            kept,
            "patient",
        ),
        side_by_side("Dropped, and why", _GONE, "Nothing was dropped.", dropped, "patient"),
    ]
    return page_html("Representatives, beside whom they are most like", PATIENTS, parts, STYLE)
