"""The page of `deface --report`: each head before and after, and the checks made. For the site only.

The upper row of every image is a person's face: the page is written for its owner alone, like the scans themselves.
"""

from __future__ import annotations

import base64
import html
from collections import Counter
from collections.abc import Sequence
from typing import Final

from agent.defacing import removal_methods
from agent.defacing.batch import DONE, VolumeOutcome
from agent.reports.html_page import page_html, table

LABELS: Final = {
    "remodel": "Another face, drawn by a network that was trained on public heads (C-DeID-GAN, corrected).",
    **removal_methods.LABELS,
}
_REST: Final = "people were still recognised by the rest, and the brain itself remains linkable"
SAYS: Final = {  # what can be said of the result, and no more: see "Measured" in deploy/docs/faces.md
    "remodel": "face removed; the brain itself remains linkable",
    "remodel face": f"face removed, and the forehead, skull and neck kept: {_REST}",
    "quickshear": f"a part of the face removed: {_REST}",
    "facemask": f"face smoothed: {_REST}",
    "deface": f"a part of the face removed: {_REST}",
    "strip": "all but the brain removed; the brain itself remains linkable",
}
_WARNING: Final = "The upper row of each image shows a patient's face. Keep this page where the scans are kept."
_MOST: Final = 60  # heads with an image on one page
_STYLE: Final = "img.heads{max-width:720px}.refused td:first-child{border-left:4px solid #a32638}"


def describe_result(method: str, parts: str) -> str:
    """What can be said of the result."""
    return SAYS["remodel face" if (method, parts) == ("remodel", "face") else method]


def render(rows: Sequence[VolumeOutcome], method: str, parts: str = "surface") -> bytes:
    """The page, UTF-8."""
    done = [row for row in rows if row.state == DONE]
    before = sum(row.state == "defaced before" for row in rows)
    kept = Counter(row.state for row in rows if row.state != DONE and row.why)
    told = f"{len(done)} de-faced" + (f", {before} were before" if before else "")
    told += f", {sum(kept.values())} keep their face and were not written" if kept else ""
    about = f"{told}. Method: {method}. {LABELS[method]}"
    brain = "Whoever has another scan of the same brain can recognise it. Names in DICOM headers are unchanged."
    page = [
        f"<p class='choice'>{html.escape(about)}</p>",
        f"<p>Result: <strong>{html.escape(describe_result(method, parts))}</strong>. {brain}</p>",
    ]
    if done:
        page.append(table("What was changed", _HEAD, [_cells(row) for row in done]))
    if kept:
        lines = [(row.path, row.state, row.why) for row in rows if row.state != DONE and row.why]
        page.append(table("Not defaced, and why", ("volume", "reason", "what to do"), lines))
    page += [_heads(row) for row in done if row.picture][:_MOST]
    return page_html("Faces removed", _WARNING, page, _STYLE)


_HEAD: Final = ("volume", "files", "brain, mL", "may differ, %", "brain voxels changed", "outside changed", "seconds")


def _cells(row: VolumeOutcome) -> tuple[str, ...]:
    name = f"{row.path} (the face was found here)" if row.reference else row.path
    share = "" if row.changed_share is None else f"{100 * row.changed_share:.1f}"
    brain = "" if row.brain_ml is None else f"{row.brain_ml:.0f}"
    counts = (row.brain_voxels_changed, row.outside_voxels_changed)
    seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
    return (name, str(row.files), brain, share, *("" if n is None else str(n) for n in counts), seconds)


def _heads(row: VolumeOutcome) -> str:
    picture, name = base64.b64encode(row.picture).decode(), html.escape(row.path)
    note = "above: before; below: after. Rendered from the volumes themselves."
    return (
        f"<section><h2>{name}</h2><figure><img class='heads' src='data:image/png;base64,{picture}' "
        f"alt='renderings of {name}, before above and after below'><figcaption>{note}</figcaption></figure></section>"
    )
