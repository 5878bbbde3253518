"""Annex to an anonymisation report: cell sizes and their evidence. Pure.

EMA Policy 0070, external guidance EMA/90915/2016 v1.3 (2017), chapter 3, and Health Canada's Public Release of
Clinical Information use a maximum risk of 0.09, which is a cell of 11. The comparison is ``k >= 11``: 1/11 is 0.0909,
so a comparison of 1/k with 0.09 would silently ask for 12.
"""

from __future__ import annotations

from typing import Any, Final

from coordinator.claim_descriptions import BRAIN
from coordinator.explanations import count
from coordinator.reports.document import OPEN, Block, Document, FactList, Points, ReportTable, Section, Text
from coordinator.reports.report_inputs import Item, ReportInputs, level_words

CELL: Final = 11  # distinct patients: EMA/90915/2016 v1.3, and Health Canada; never 1/k <= 0.09

_SCOPE: Final = (
    "This annex states what the ledger can show for each release. It does not find that a release is no personal "
    "data, nor that anybody cannot be identified; that assessment is the controller's. The threshold of 0.09 is "
    "about cells of patients: it says nothing about a release with an epsilon, and nothing about one that was only "
    "tested."
)
_METHODS: Final = {  # level -> how
    "A": "Differential privacy: noise is added while something is learned from the patients; what is released "
    "depends on one patient by no more than the stated epsilon allows, but for a chance of delta.",
    "A*": "Differential privacy with shared noise: of the hospitals' parts only the sum is seen, and each part bears "
    "a share of the noise. What holds for differential privacy holds if the stated number of hospitals keep to the "
    "protocol, and not otherwise.",
    "B": "k-anonymous averaging: images of at least k distinct patients, grouped by likeness, are combined into one; "
    "a patient is in one group at most, and in no more releases than the hospital's policy admits.",
    "C": "Tested only: synthetic images, or a model, of which nothing is promised. What was searched for, and found, "
    "stands below as the hospital's statement says it.",
}
_HEADS: Final = (
    f"Tested only: patients' own head scans with another face, no synthetic images: {BRAIN}. An attacker tried to "
    "match the faces with the patients' own. Nothing is promised."
)


def compare_with_threshold(item: Item) -> str:
    """How a release stands to the threshold, as a sentence; k is compared with 11, and nothing with 0.09."""
    if item.k is None:
        return "not about this release: it has no cells of patients"
    if item.k >= CELL:
        return f"met: {item.k} is at least {CELL}"
    return f"NOT met: {item.k} is less than {CELL}"


def annex(inputs: ReportInputs) -> Document:
    """The annex, over every image set, volume set and model that was admitted."""
    items = list(inputs.items())
    crowds = [i for i in items if i.k is not None]
    short = [i for i in crowds if i.k is not None and i.k < CELL]
    summary = (
        f"{count(len(items), 'release')}, {len(crowds)} of them with cells of patients: "
        f"{len(crowds) - len(short)} with at least {CELL} patients in each, {len(short)} with fewer."
    )
    p = inputs.particulars
    shown = ", ".join(sorted({part["modality"] for i in items for part in i.parts})) or "none released yet"
    sections = (
        Section("What this annex says, and what it does not", (Text(_SCOPE, "warn"),)),
        Section(
            "Data and identifiers",
            (
                FactList(
                    (
                        ("Controller", p.controller or OPEN),
                        ("Data", f"medical images: {shown}"),
                        ("Direct identifiers", "not kept: what the agent cannot clear of them stays in quarantine"),
                        ("Quasi-identifiers", _quasi(items)),
                        ("Recipients", p.recipients or OPEN),
                    )
                ),
            ),
        ),
        Section("Methods in use", (_methods(items),)),
        Section("Cell sizes", (_cells(crowds),)),
        Section("Releases without cells", (_others([i for i in items if i.k is None]),)),
        Section("Tests of re-identification", (_tests(items),)),
        Section(
            "Residual risk",
            (
                FactList((("Assessment", p.residual_risk or OPEN),)),
                Text(
                    "k-anonymity limits what one set says. It does not compose: who knows that a patient is in two "
                    "sets may find them by comparing the sets, whatever k is. The same patient may have been in two "
                    "hospitals, and nobody can tell from the ledger.",
                    "note",
                ),
            ),
        ),
    )
    data = {"threshold": {"k": CELL, "compared": "k >= 11"}, "releases": [_plain(i) for i in items]}
    return Document(
        "disclosure", "Annex to an anonymisation report: cell sizes and tests", summary, sections, inputs.source, data
    )


def _methods(items: list[Item]) -> Block:
    """Of what was released; patients' own heads are told apart from what is synthetic."""
    told = [_METHODS[level] for level in sorted({i.level for i in items if not i.remodelled}) if level in _METHODS]
    told += [_HEADS] if any(i.remodelled for i in items) else []
    return Points(tuple(told)) if told else Text("No set and no model was released yet.")


def _quasi(items: list[Item]) -> str:
    heads = f"; of the heads with another face, the patient's own brain: {BRAIN}"
    own = heads if any(i.remodelled for i in items) else ""
    return f"the image itself, and its label; no dates, ages or places are released{own}"


def _cells(items: list[Item]) -> ReportTable:
    rows = tuple((i.name, i.sites, str(i.k), f"1 in {i.k}", compare_with_threshold(i)) for i in items)
    head = ("Release", "Hospital", "k", "Largest risk in a cell", f"Threshold: k at least {CELL}")
    return ReportTable("Distinct patients behind each image", head, rows, frozenset({2}), (36, 14, 8, 18, 24))


def _others(items: list[Item]) -> ReportTable:
    rows = tuple((i.name, i.sites, i.level, level_words(i.level)[0], i.strength) for i in items)
    return ReportTable(
        "What is promised instead",
        ("Release", "Hospital", "Level", "Kind of promise", "Strength"),
        rows,
        widths=(28, 14, 8, 20, 30),
    )


def _tests(items: list[Item]) -> ReportTable:
    rows = tuple((i.name, i.sites, i.tested) for i in items if i.tested)
    empty = "no statement names one; a release with a promise need not"
    return ReportTable(
        "Measured and stated by the hospital",
        ("Release", "Hospital", "Result"),
        rows,
        widths=(30, 15, 55),
        empty=empty,
    )


def _plain(item: Item) -> dict[str, Any]:
    part = item.parts[0]
    return {
        "release": item.name,
        "sites": item.facts["sites"],
        "level": item.level,
        "k": item.k,
        "meets_k_11": None if item.k is None else item.k >= CELL,
        "epsilon": item.dearest["epsilon"],
        "assumption": item.facts["assumption"] or None,
        "reid_rate": part["reid_rate"],
        "vetting_power": part["vetting_power"],
        "says": compare_with_threshold(item),
    }
