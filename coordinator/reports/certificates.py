"""A release certificate, made: the entries that it rests on with their proofs, its facts, and its words. Pure.

:mod:`policies.audit.certificate` is its form, :mod:`policies.audit.certificate_check` how it is checked, by whoever
gets it.
"""

from __future__ import annotations

from typing import Any

from coordinator.explanations import epsilon_text, format_rounded_up, utc
from coordinator.reports.document import Block, Document, FactList, ReportTable, Section, Text
from coordinator.reports.report_inputs import Item, ReportInputs, bound, level_words, together
from policies.audit.certificate import TASK, Certificate, ProvenEntry
from policies.audit.certificate_check import revoked_words, supporting_entries
from policies.ledger.merkle import MerkleTree, leaf_hash


def certificate(inputs: ReportInputs, item: Item, task: str = "") -> Certificate:
    """What the ledger's key is to sign, under the checkpoint of the ledger.

    Args:
        inputs: the ledger.
        item: the release or run.
        task: of a task's model: the task's digest, which is signed with it; "": it is of none, or not known.
    """
    tree = MerkleTree()
    for entry in inputs.export.entries:
        tree.append(leaf_hash(entry))
    wanted = supporting_entries(item.name, inputs.told.about(item.name))
    shown = tuple(
        ProvenEntry(seq, inputs.export.entries[seq], tuple(tree.inclusion_proof(seq, tree.size))) for seq, _ in wanted
    )
    envelopes = tuple(inputs.behind(wanted))
    export, said = inputs.export, {**words(item), **({TASK: task} if task else {})}
    return Certificate(inputs.source.origin, export.public, export.checkpoint, shown, envelopes, item.facts, said)


def words(item: Item) -> dict[str, str]:
    """A certificate's sentences."""
    title, plain = level_words(item.level)
    said = {
        "title": title,
        "meaning": str(item.facts["meaning"]),
        "plain": plain,
        "method": item.method,
        "promise": item.claim,
        "strength": item.strength,
        "tested": item.tested,
        "assumption": str(item.facts["assumption"]),
        "revoked": "; ".join(revoked_words(one) for one in item.facts["revoked"]),
    }
    return {name: text for name, text in said.items() if text}


def revocations(item: Item) -> tuple[Text, ...]:
    """What was revoked of the sites behind it, each as a warning."""
    told = map(revoked_words, item.facts["revoked"])
    return tuple(Text(f"{text[0].upper()}{text[1:]}.", "warn") for text in told)


def promise(item: Item) -> tuple[Block, ...]:
    """What is promised to patients, on what it stands, and what of it was tested or tried."""
    title, plain = level_words(item.level)
    given, tried = item.facts["assumption"], ", ".join(str(k) for k in item.parts[0]["k_tried"])
    rows = [("Level", f"{item.level}: {title}"), ("In words", plain), ("Promise", item.claim)]
    rows += [("Strength", item.strength.removesuffix(f"; {given}"))]
    rows += [("Assumption", given)] if given else []
    rows += [("Tried", f"group sizes tried on the patients before one was chosen: {tried}")] if tried else []
    rows += [("Tested", f"{item.tested}, as the hospital's statement says")] if item.tested else []
    return (Text(item.meaning, "claim"), *revocations(item), FactList(tuple(rows)))


def as_document(inputs: ReportInputs, item: Item) -> Document:
    """The certificate for people."""
    what = "Model" if item.facts["kind"] == "model" else "Release"
    sections = (
        Section(
            "What is certified",
            (
                *promise(item),
                Text(
                    "Nothing stronger may be said of it, and no finding is made that it is not personal data.", "note"
                ),
            ),
        ),
        Section("What it is about", _about(item)),
        Section("How to check it", _how(inputs, item)),
    )
    name = f"certificate-{item.name}"
    summary = f"{item.method}, from the patients of {item.sites}."
    return Document(
        name, f"{what} certificate: {item.name}", summary, sections, inputs.source, {"facts": dict(item.facts)}
    )


def _about(item: Item) -> tuple[Block, ...]:
    facts: Any = item.facts
    rows = [
        ("Name", item.name),
        ("Hospital" if len(facts["sites"]) == 1 else "Hospitals", item.sites),
        ("Artifact, sha256", facts["artifact_sha256"]),
        ("Admitted", admitted(item)),
    ]
    readers = sorted({p["reader"] for p in item.parts if p["reader"]})
    rows += [("Encrypted to", ", ".join(readers) + "; the coordinator has not seen the content")] if readers else []
    table = ReportTable(
        f"The hospitals' own signed statements behind it{bound(item)}",
        ("Hospital", "Entry", "Level", "Epsilon per patient", "Statement, sha256"),
        tuple(
            (
                p["site"],
                str(p["entry"]),
                p["level"],
                _epsilon(p["epsilon"]) if p["epsilon"] else "none",
                p["statement_sha256"],
            )
            for p in item.parts
        ),
        frozenset({1}),
        (16, 9, 9, 24, 42),
    )
    return (FactList(tuple(rows)), table)


def admitted(item: Item) -> str:
    """When, and where the ledger says so."""
    when, seq = utc(int(item.parts[-1]["admitted_at"])), item.facts["entry"]
    if item.facts["kind"] == "model":
        return f"last update {when} UTC; the model of round {item.facts['round']} is in entry {seq} of the ledger"
    return f"{when} UTC, entry {seq} of the ledger"


def _epsilon(epsilon: Any) -> str:
    return f"{epsilon_text(epsilon['value'])} at delta {format_rounded_up(epsilon['delta'])}{together(epsilon)}"


def _how(inputs: ReportInputs, item: Item) -> tuple[Block, ...]:
    return (
        Text(
            "The file that you hold is signed whole by the ledger's key: lazaret-verify finds any change of it, "
            "offline, "
            "with Python and cryptography alone. Compare the key with the one that the ledger's owner publishes."
        ),
        FactList(
            (
                ("With the key", f"lazaret-verify FILE --key {inputs.source.key}"),
                ("With the ledger", "add --from ledger.export: does the ledger hold all of it, and what came later?"),
                ("And the artifact", "add --artifact with the file itself: is it the one that this is about?"),
            )
        ),
    )
