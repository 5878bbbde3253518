"""A record of processing (GDPR, Article 30(1)) and an annex to an impact assessment (Article 35(7)). Pure.

Rows that only the controller can know are left open, never guessed; ``particulars.toml`` fills them.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from coordinator.claim_descriptions import BRAIN
from coordinator.explanations import MECHANISMS, count
from coordinator.reports.document import OPEN, Block, Document, FactList, Points, ReportTable, Section, Text
from coordinator.reports.report_inputs import UNIT_OF, Item, ReportInputs, level_words

_STAY: Final = "Images stay at the hospital."
_HEADS: Final = (
    f"Patients' own head scans leave with another face (remodelling): {BRAIN}. All other images stay at the hospital."
)
_REVIEW: Final = (
    "What leaves is one of the releases listed below, after a review by the hospital's own ledger and by the "
    "coordinator's."
)
_MEASURES: Final = (
    "A budget for the lifetime of each hospital's data bounds everything that is released with an epsilon; without "
    "an epsilon, the number of releases that a patient may be in is bounded.",
    "Direct identifiers are removed when files are read in; a file that cannot be understood stays in quarantine.",
    "What is kept at the hospital is encrypted at rest, and what a killed process leaves behind is encrypted too.",
    "Connections are TLS 1.3 with certificates on both sides; keys are readable by the service alone.",
    "Every grant, release and refusal is an entry of an append-only ledger whose head is signed and cosigned by the "
    "hospitals; it holds no patient data and can be checked offline.",
    "A budget is raised by two persons of different roles and by nobody alone; once both roles are in office, the "
    "same holds for hospitals that join and for persons who are appointed.",
    "A patient's objection removes their images at the hospital and stops what has not left yet.",
)
# Article 29 Working Party, WP216 (2014), section 2.2: the three questions, by level of claim
_TESTS: Final = {
    "A": (
        "bounded: an output is at most e^epsilon times as likely with one patient as without, but for a chance of "
        "delta",
        "bounded in the same way, also together with other data",
        "bounded for what follows from one patient's taking part; not for what is true of patients in general",
    ),
    "A*": (
        "bounded as at level A if, in every sum, the stated number of hospitals add their share of the noise and "
        "tell nobody what it was, and nothing but the sum is seen; not bounded otherwise",
        "bounded in the same way and under the same assumption, also together with other data",
        "bounded under the same assumption for what follows from one patient's taking part; not for what is true of "
        "patients in general",
    ),
    "B": (
        "at least k patients stand behind each image, so one set does not single out one of them by its cells",
        "not bounded: two sets of overlapping patients may be compared; a patient is in a bounded number of sets",
        "bounded by different labels within each cell only",
    ),
    "C": (
        "not bounded; searched for by a verifier, with the result that is stated for each release",
        "not bounded",
        "not bounded",
    ),
}
# the same for patients' own heads with other faces
_OF_HEADS: Final = (
    f"not bounded: {BRAIN}; faces were matched by an attacker, with the result that is stated for each release",
    "not bounded: another scan of the same brain links a head to its patient",
    "not bounded",
)
_FREE: Final = (
    "No finding is made here that a release is, or is not, personal data. EDPB Opinion 28/2024 asks for "
    "documentation of how unlikely it is that personal data be obtained from a model; the tables below are part of "
    "that documentation."
)


def processing(inputs: ReportInputs) -> Document:
    """Article 30 rows, and what Article 35(7) asks for, as far as the ledger knows it."""
    items = list(inputs.items())
    measures = (f"{_HEADS if any(i.remodelled for i in items) else _STAY} {_REVIEW}", *_MEASURES)
    summary = (
        f"{count(len(inputs.state.sites), 'hospital')}, {count(len(items), 'release')}. Rows marked ☐ are the "
        "controller's: they are filled in from particulars.toml."
    )
    sections = (
        Section("Record of processing activities: Article 30(1)", (_record(inputs, items),)),
        Section("Security of processing: Article 32(1)", (Points(measures),)),
        Section("Systematic description: Article 35(7)(a)", (_description(inputs, items), _releases(items))),
        Section(
            "Necessity and proportionality: Article 35(7)(b)",
            (
                FactList(
                    (
                        ("Legal basis", inputs.particulars.legal_basis or OPEN),
                        ("Necessity", inputs.particulars.necessity or OPEN),
                        ("Data minimisation", _minimised(items)),
                    )
                ),
            ),
        ),
        Section("Risks: Article 35(7)(c)", _risks(items)),
        Section(
            "Measures and residual risk: Article 35(7)(d)",
            (
                Text("The measures are those under Article 32(1) above."),
                FactList((("Residual risk", inputs.particulars.residual_risk or OPEN),)),
            ),
        ),
        Section(
            "Views of patients or their representatives: Article 35(9)",
            (FactList((("Views of patients", inputs.particulars.consultation or OPEN),)),),
        ),
    )
    data = {
        "controller": inputs.particulars.controller or None,
        "measures": list(measures),
        "releases": [
            {"release": i.name, "sites": i.facts["sites"], "level": i.level, "promise": i.claim, "says": i.strength}
            for i in items
        ],
    }
    title = "Record of processing, and annex to an impact assessment"
    return Document("processing", title, summary, sections, inputs.source, data)


def _record(inputs: ReportInputs, items: list[Item]) -> ReportTable:
    p = inputs.particulars
    modalities = sorted({part["modality"] for i in items for part in i.parts})
    sealed = sorted({part["reader"][:12] for i in items for part in i.parts if part["reader"]})
    readers = f"; encrypted to the readers with the keys {', '.join(sealed)}" if sealed else ""
    rows = (
        ("(a) controller and contact", "; ".join(filter(None, (p.controller, p.contact))) or OPEN),
        ("(a) data-protection officer", p.officer or OPEN),
        ("(b) purposes", p.purposes or OPEN),
        (
            "(c) categories of data subjects",
            (p.subjects or "patients of the hospitals that are enrolled") + "; staff who are named in the ledger",
        ),
        (
            "(c) categories of personal data",
            f"patients: health data: medical images ({', '.join(modalities) or 'none released'}), labels; staff: the "
            "names under which they are appointed, their roles, public keys and signed decisions",
        ),
        ("(d) recipients", (p.recipients or OPEN) + readers),
        ("(e) transfers to third countries", p.transfers or OPEN),
        ("(f) time limits for erasure", p.retention or OPEN),
        (
            "(f) the ledger",
            "is never erased; it holds no patient data. It holds the names of hospitals, budgets, digests, and, of "
            "staff, the names under which they are appointed, their roles, public keys and signed decisions, for as "
            "long as the ledger is kept: appoint under names that mean nothing outside",
        ),
        ("(g) security measures", "see Article 32(1) below"),
    )
    return ReportTable("Article 30(1), row by row", ("Row", "Entry"), rows, widths=(30, 70))


def _minimised(items: list[Item]) -> str:
    """What leaves in the place of what, by what was released."""
    made = {"run" if i.facts["kind"] == "model" else str(i.parts[0]["artifact_type"]) for i in items}
    kinds = {
        "image-set": "sets of synthetic images leave in the place of patients' images",
        "model": "models leave in the place of patients' images",
        "run": "updates of models, with noise, leave in the place of patients' images",
    }
    told = [words for kind, words in kinds.items() if kind in made]
    told += [f"patients' own heads leave with another face: {BRAIN}"] if any(i.remodelled for i in items) else []
    return "; ".join(told) or "no set and no model was released yet"


def _description(inputs: ReportInputs, items: list[Item]) -> FactList:
    methods = Counter(i.facts["mechanism"] for i in items)
    said = [f"{MECHANISMS.get(name, name)}: {n}" for name, n in sorted(methods.items())]
    return FactList(
        (
            ("Hospitals", ", ".join(sorted(inputs.state.sites)) or "none yet"),
            ("Methods", "; ".join(said) or "nothing was released"),
            ("Unit of privacy", f"one {UNIT_OF['unit']} at a hospital"),
            ("Who decides", "the hospital's own ledger and policy, then the coordinator's; the stricter wins"),
        )
    )


def _releases(items: list[Item]) -> ReportTable:
    rows = tuple((i.name, i.sites, i.level, i.method, i.strength) for i in items)
    head = ("Release", "Hospital", "Level", "Method", "Promise")
    return ReportTable("What was released", head, rows, widths=(22, 13, 7, 28, 30))


def _risks(items: list[Item]) -> tuple[Block, ...]:
    levels = sorted({i.level for i in items if not i.remodelled}) if items else list(_TESTS)
    rows = tuple((f"{level}: {level_words(level)[0]}", *_TESTS[level]) for level in levels)
    if heads := [i.level for i in items if i.remodelled]:
        rows = (*rows, (f"{heads[0]}: {level_words(heads[0])[0]}, patients' own heads", *_OF_HEADS))
    head = ("Level", "Singling out", "Linkability", "Inference")
    tests = tuple((i.name, i.sites, i.tested) for i in items if i.tested)
    return (
        Text(_FREE, "warn"),
        ReportTable("The three questions of WP216, by level of claim", head, rows, widths=(19, 28, 27, 26)),
        ReportTable(
            "What was measured, as the hospitals' statements say",
            ("Release", "Hospital", "Result"),
            tests,
            widths=(30, 15, 55),
        ),
        Text(
            "The same patient may have been in two hospitals, and nobody can tell from the ledger: the hospitals' "
            "budgets add for such a patient.",
            "note",
        ),
    )
