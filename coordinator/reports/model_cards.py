"""A model card for a model (Mitchell et al. 2019, section 4), a datasheet for a set (Gebru et al. 2021). Pure.

Both state the guarantee and nothing stronger, and say which figures were not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from coordinator.claim_descriptions import BRAIN, looks_in
from coordinator.explanations import epsilon_text, format_rounded_up
from coordinator.reports.certificates import admitted, promise
from coordinator.reports.document import OPEN, Block, Document, FactList, Points, ReportTable, Section, Text
from coordinator.reports.model_facts import ModelFacts
from coordinator.reports.report_inputs import Item, ReportInputs, bound, together
from policies.tasks.released_model import data_rule_digest, data_rule_text
from policies.tasks.task import Card

_NOT_FOR: Final = (
    "Diagnosis or treatment of a patient: it was not tested for that.",
    "Finding out who a patient was, or whether somebody was one.",
    "Being called free of personal data: that is the controller's assessment, and this card makes no such finding.",
)
_NO_LICENCE: Final = "none is stated: ask before you share it"
_LOOKED: Final = (
    "The figures are of sums with noise, within the epsilon above; every interval covers the noise and the choice of "
    "the patients, who were held out of the training."
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


def card(inputs: ReportInputs, name: str, known: Callable[[Item], ModelFacts] = lambda _: ModelFacts()) -> Document:
    """The card of a release or run.

    Args:
        inputs: the ledger, and the controller's particulars.
        name: of the release or run.
        known: what the coordinator knows of a model beyond the ledger.
    Raises:
        ReportError: the ledger has admitted nothing of that name, or a file of it is not what it admitted.
    """
    item = inputs.item(name)
    return _model_card(inputs, item, known(item)) if is_model(item) else _datasheet(inputs, item)


def is_model(item: Item) -> bool:
    """Is it a model, of a run or released by one hospital?"""
    return "model" in (item.facts["kind"], item.parts[0]["artifact_type"])


def _caveats(item: Item) -> Points:
    """What holds of its kind of promise, and of no other."""
    if item.epsilon:
        return Points(_NOISE)
    heads = (f"The heads are patients' own: {BRAIN}.",) if item.remodelled else ()
    return Points((*heads, *(_TESTED if item.k is None else _CROWD), *_OTHERS))


def _details(inputs: ReportInputs, item: Item, facts: ModelFacts | None = None) -> FactList:
    p, own = inputs.particulars, facts.task.card if facts and facts.task else Card()
    rows = [
        ("Name", item.name),
        ("Made by", item.sites),
        ("Method", item.method),
        ("Admitted", admitted(item)),
        ("Artifact, sha256", item.facts["artifact_sha256"]),
        ("Licence", own.licence or p.licence or _NO_LICENCE),
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


def _use(inputs: ReportInputs, facts: ModelFacts | None = None) -> tuple[Block, ...]:
    p, own = inputs.particulars, facts.task.card if facts and facts.task else Card()
    use = own.intended_use or p.intended_use or p.purposes or OPEN
    return (
        FactList((("Intended use", use), ("Intended users", p.recipients or OPEN))),
        Text("Not for:"),
        Points(_NOT_FOR),
    )


def _figures(item: Item, facts: ModelFacts) -> tuple[Block, ...]:
    """What was found in the looks at it, with intervals; or where that stands, or that nobody paid for one."""
    if not facts.looks:
        return (Text(_metrics(item)),)
    rows = tuple(
        (look.where, name, "nothing is known" if one["value"] is None else f"{one['value']:.3f}",
         f"{one['low']:.3f} to {one['high']:.3f}")
        for look in facts.looks for name, one in look.figures.items()
    )  # fmt: skip
    head = ("Looked at", "Figure", "Value", "95 % interval")
    table = ReportTable("Private evaluation on held-out patients", head, rows, frozenset({2}), (26, 34, 18, 22))
    best = (
        f"The model is the one {facts.chosen.where}, which looked best by the noisy figures. " if facts.chosen else ""
    )
    return (Text(f"{best}{_LOOKED}"), table)


def _participation(facts: ModelFacts) -> tuple[Block, ...]:
    """Who is in which round, and the rounds in which somebody is not."""
    told = facts.participation
    if not told:
        return ()
    named = ", ".join(told["required_sites"]) or "none by name"
    rows = tuple(
        (str(one["round"]), one["kind"], ", ".join(one["sites"]), ", ".join(sorted(one["missing"])))
        for one in told["rounds"]
        if one["missing"]
    )
    required = f"No round counted without: {named}; and none with fewer than {told['min_sites']} hospitals."
    said = Text(f"Who took part: {told['told']}. {required}")
    if not rows:
        return (said,)
    head = ("Round", "Of what", "In it", "Not in it")
    return (said, ReportTable("Rounds without a hospital", head, rows, frozenset({0}), (10, 14, 30, 46)))


def leaving(item: Item, facts: ModelFacts) -> tuple[Block, ...]:
    """What a trusted research environment must say of a trained model (SATRE 2.0, 3.3.07), of this one."""
    job, task = facts.job, facts.task
    held = "the whole price was held in each hospital's ledger before an image was read, and in the coordinator's"
    rows = [("Budget", held)]
    if item.epsilon and task is not None:
        clip = f"no patient moves a step by more than {task.training.clip:g} (L2)"
        where = "added at each hospital before anything left it"
        if job is not None and job.secure:
            where = "shared by the hospitals, whose updates the coordinator saw as a sum alone"
        rows.append(("Clipping and noise", f"{clip}; Gaussian noise as the claim above says, {where}"))
    what = "each update and each look" if job is not None else "the release"
    rows.append(("Review", f"{what} was signed at its hospital and admitted by both ledgers before it counted"))
    rows.append(("Persons", "where a hospital's policy wants it, its persons approved before a price was held"))
    rows.append(("Form", "numbers alone, of the types and shapes that were approved; nothing in it is run"))
    rows.append(("Afterwards", "what was handed out is not called back; a revocation since is named above"))
    under = f"under the policies of the federation and of {item.sites}, at level {item.level}"
    return (Text(f"It may leave: the ledger admitted it {under}."), FactList(tuple(rows)))


def _lineage(item: Item, facts: ModelFacts) -> FactList:
    """What it was made from, and where."""
    rows = [("Artifact, sha256", str(item.facts["artifact_sha256"]))]
    if facts.job is not None:
        rounds = f"{facts.job.rounds} rounds"
        rows += [("Run", f"{item.name}: {rounds}, {facts.job.mechanism}, strategy {facts.job.aggregator().name}")]
    rows.append(("Hospitals", item.sites))
    if (task := facts.task) is None:
        return FactList((*rows, ("Task", "its text is not in this coordinator's directory")))
    public = ", ".join(task.network.public_files) or f"none: numbers from the seed {task.seed}"
    rows += [("Task", f"{task.name}, {task.kind}, sha256 {task.digest}")]
    rows += [("Network", f"{task.network.name}, trained: {task.network.trained}"), ("Public weights, sha256", public)]
    return FactList((*rows, ("Data rule", data_rule_text(task)), ("Data rule, sha256", data_rule_digest(task))))


def _metrics(item: Item) -> str:
    """Where its figures stand: the ledger holds that they were paid for, and not what they are."""
    if any(looks_in(part["claim"]) for part in item.parts):
        return (
            "How good it is was looked at on held-out patients, in sums with noise, within the epsilon above: the "
            'figures stand with their intervals in the certificate beside the model, under "evaluation".'
        )
    none = "The ledger holds no accuracy: metrics of a model are a release of their own, and nobody paid for one."
    return f"{none} {OPEN}"


def _model_card(inputs: ReportInputs, item: Item, facts: ModelFacts) -> Document:
    sections = (
        Section("Model details", (_details(inputs, item, facts),)),
        Section("What is promised to patients", promise(item)),
        Section("May it leave, and under which controls", leaving(item, facts)),
        Section("Intended use", _use(inputs, facts)),
        Section("Factors", (Text("The ledger holds no results by group, device or hospital: " + OPEN),)),
        Section(
            "Metrics and evaluation data",
            _figures(item, facts),
        ),
        Section("Training data", (_parts(item), *_participation(facts))),
        Section("Lineage", (_lineage(item, facts),)),
        Section("Ethical considerations, caveats and recommendations", (_caveats(item),)),
    )
    summary = f"{item.method}, from the patients of {item.sites}."
    data = {**_data(item), "model": _known(inputs, facts)}
    return Document("model-card", f"Model card: {item.name}", summary, sections, inputs.source, data)


def _known(inputs: ReportInputs, facts: ModelFacts) -> dict[str, Any]:
    """For machines: what stands in the card beyond the ledger."""
    p, task = inputs.particulars, facts.task
    own = task.card if task is not None else Card()
    looks = [{"looked_at": look.where, "figures": dict(look.figures)} for look in facts.looks]
    told: dict[str, Any] = {
        "licence": own.licence or p.licence,
        "intended_use": own.intended_use or p.intended_use,
        "evaluation": looks,
        "chosen": facts.chosen.where if facts.chosen else "",
        "participation": dict(facts.participation),
    }
    if facts.job is not None:
        told["run"] = {"rounds": facts.job.rounds, "strategy": json.loads(facts.job.strategy)}
    if task is not None:
        told["task"] = {"sha256": task.digest, **task.to_table()}
        told["data_rule"] = {"sha256": data_rule_digest(task), "text": data_rule_text(task)}
        told["public_weights"] = list(task.network.public_files)
    return told


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
