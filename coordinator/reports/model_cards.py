"""A model card for a model (Mitchell et al. 2019, section 4), a datasheet for a set (Gebru et al. 2021). Pure.

Both state the guarantee and nothing stronger, and say which figures were not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from coordinator.claim_descriptions import BRAIN, looks_in
from coordinator.explanations import epsilon_text, format_rounded_up
from coordinator.reports.certificates import admitted, promise
from coordinator.reports.document import OPEN, Block, Document, FactList, Points, ReportTable, Section, Text
from coordinator.reports.report_inputs import Item, ReportInputs, bound, together

_NOT_FOR: Final = (
    "Diagnosis or treatment of a patient: it was not tested for that.",
    "Finding out who a patient was, or whether somebody was one.",
    "Being called free of personal data: that is the controller's assessment, and this card makes no such finding.",
)
_NOISE: Final = (
    "A patient who was in several hospitals is covered by the sum of the hospitals' epsilons; nobody can tell "
    "whether there is one.",
    "Noise costs small groups more than large ones: compare results for each group before use.",
)
_CROWD: Final = (
    "k-anonymity does not compose: who knows that a patient is in several sets may find them by comparing the sets, "
    "whatever k is.",
)
_TESTED: Final = ("There is no guarantee: an attack that was not tried may find more than those that were.",)
_OTHERS: Final = (
    "It is unknown whether a patient was in several hospitals.",
    "Its quality for small groups of patients was not measured: compare results for each group before use.",
)


def card(inputs: ReportInputs, name: str) -> Document:
    """The card of a release or run.

    Raises:
        ReportError: the ledger has admitted nothing of that name.
    """
    item = inputs.item(name)
    return _model_card(inputs, item) if is_model(item) else _datasheet(inputs, item)


def is_model(item: Item) -> bool:
    """Is it a model, of a run or released by one hospital?"""
    return "model" in (item.facts["kind"], item.parts[0]["artifact_type"])


def _caveats(item: Item) -> Points:
    """What holds of its kind of promise, and of no other."""
    if item.epsilon:
        return Points(_NOISE)
    heads = (f"The heads are patients' own: {BRAIN}.",) if item.remodelled else ()
    return Points((*heads, *(_TESTED if item.k is None else _CROWD), *_OTHERS))


def _details(inputs: ReportInputs, item: Item) -> FactList:
    p = inputs.particulars
    rows = [
        ("Name", item.name),
        ("Made by", item.sites),
        ("Method", item.method),
        ("Admitted", admitted(item)),
        ("Artifact, sha256", item.facts["artifact_sha256"]),
        ("Licence", p.licence or "none is stated: ask before you share it"),
        ("Contact", p.contact or OPEN),
    ]
    rows += [("Rounds", str(item.facts["round"]))] if item.facts["round"] else []
    readers = sorted({part["reader"] for part in item.parts if part["reader"]})
    rows += [("Encrypted to", ", ".join(readers))] if readers else []
    return FactList(tuple(rows))


def _parts(item: Item) -> ReportTable:
    rows = tuple(
        (
            p["site"],
            p["modality"],
            p["level"],
            "" if not p["epsilon"] else f"{epsilon_text(p['epsilon']['value'])}{together(p['epsilon'])}",
            "" if not p["epsilon"] else format_rounded_up(p["epsilon"]["delta"]),
            ", ".join(f"{name}: {origin}" for name, origin in sorted(p["components"].items())),
        )
        for p in item.parts
    )
    head = ("Hospital", "Modality", "Level", "Epsilon per patient", "Delta", "Components and where they are from")
    return ReportTable(
        f"Training data, by hospital{bound(item)}", head, rows, frozenset({3, 4}), (18, 12, 9, 16, 12, 33)
    )


def _use(inputs: ReportInputs) -> tuple[Block, ...]:
    p = inputs.particulars
    return (
        FactList((("Intended use", p.intended_use or p.purposes or OPEN), ("Intended users", p.recipients or OPEN))),
        Text("Not for:"),
        Points(_NOT_FOR),
    )


def _metrics(item: Item) -> str:
    """Where its figures stand: the ledger holds that they were paid for, and not what they are."""
    if any(looks_in(part["claim"]) for part in item.parts):
        return (
            "How good it is was looked at on held-out patients, in sums with noise, within the epsilon above: the "
            'figures stand with their intervals in the certificate beside the model, under "evaluation".'
        )
    none = "The ledger holds no accuracy: metrics of a model are a release of their own, and nobody paid for one."
    return f"{none} {OPEN}"


def _model_card(inputs: ReportInputs, item: Item) -> Document:
    sections = (
        Section("Model details", (_details(inputs, item),)),
        Section("What is promised to patients", promise(item)),
        Section("Intended use", _use(inputs)),
        Section("Factors", (Text("The ledger holds no results by group, device or hospital: " + OPEN),)),
        Section(
            "Metrics and evaluation data",
            (Text(_metrics(item)),),
        ),
        Section("Training data", (_parts(item),)),
        Section("Ethical considerations, caveats and recommendations", (_caveats(item),)),
    )
    summary = f"{item.method}, from the patients of {item.sites}."
    return Document("model-card", f"Model card: {item.name}", summary, sections, inputs.source, _data(item))


def _datasheet(inputs: ReportInputs, item: Item) -> Document:
    sections = (
        Section("What it is", (_details(inputs, item),)),
        Section("What is promised to patients", promise(item)),
        Section("How it was made", (_parts(item),)),
        Section("Uses", _use(inputs)),
        Section("Caveats", (_caveats(item),)),
    )
    summary = f"{item.method}, from the patients of {item.sites}."
    return Document("datasheet", f"Datasheet: {item.name}", summary, sections, inputs.source, _data(item))


def _data(item: Item) -> dict[str, Any]:
    facts: Mapping[str, Any] = item.facts
    return {"facts": dict(facts), "words": {"promise": item.claim, "strength": item.strength, "tested": item.tested}}
