"""A checklist after NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees (March 2025). Pure.

It goes down the publication's pyramid, from epsilon at the top to the exposure of data collection at the bottom. The
publication sets no limit for epsilon, and so does this list. What the software or the ledger cannot answer is left to
whoever deploys it.
"""

from __future__ import annotations

from typing import Any, Final

from coordinator.explanations import RELATIONS, count, epsilon_text, format_rounded_up
from coordinator.reports.document import OPEN, Document, ReportTable, Section, Text
from coordinator.reports.report_inputs import UNIT_OF, Item, ReportInputs

LEDGER, SOFTWARE, DEPLOYER = "shown by the ledger", "by the software", "for the deployer"
_COVERS: Final = (
    "The checklist is about the releases with an epsilon. The others have none to state: k-anonymity is another kind "
    "of promise, and a release that was only tested promises nothing."
)
# question, answer, where the answer is to be found: rows that do not depend on the ledger
_ALGORITHMS: Final = (
    (
        "Which definition of differential privacy",
        "approximate (epsilon, delta)-differential privacy, by way of a Rényi filter of one integer order, fixed "
        "when an account is opened; conversion by Canonne, Kamath and Steinke (2020), proposition 12",
        f"{SOFTWARE}: policies/accounting/rdp.py",
    ),
    (
        "Is the sampling that is claimed the sampling that is done",
        "yes: patients are drawn by Poisson sampling, each with all of their images; nothing is shuffled into "
        "batches",
        f"{SOFTWARE}: agent/dp/dpsgd.py",
    ),
    (
        "Is each patient's contribution bounded before noise is added",
        "yes: gradients or counts are bounded for each patient, not for each image",
        f"{SOFTWARE}: agent/dp/dpsgd.py",
    ),
    (
        "Noise and floating point",
        "noise is drawn from the operating system's generator, on a lattice; prices are computed in decimals and "
        "rounded against the spender. It is a rounded Gaussian, not an exact discrete one",
        f"{SOFTWARE}: agent/dp/noise.py, policies/accounting/rdp.py",
    ),
    (
        "Composition over many releases",
        "one account for the lifetime of each hospital's data; a grant is spent when it is given, and a crash never "
        "gives it back. Later requests may depend on earlier results",
        f"{SOFTWARE}: policies/ledger/state.py",
    ),
    (
        "Tuning, vetting and statistics",
        "whatever looks at patients is charged or never leaves; a release that was compared with patients' images "
        "after it was made loses its epsilon",
        f"{SOFTWARE}: policies/review/rules.py",
    ),
    (
        "Was the implementation tested",
        "yes: distribution of the noise, one-run audit of the training, a second accountant, an auditor that "
        "recomputes every price from the export",
        f"{SOFTWARE}: tests/",
    ),
)
_UTILITY: Final = (
    ("Utility for the purpose", OPEN, DEPLOYER),
    (
        "Bias: groups that are small suffer more from noise",
        "not measured by the ledger; compare results for each group before use",
        DEPLOYER,
    ),
)
_TRUST: Final = (
    (
        "Trust model",
        "federated, with a trusted curator at each hospital: a hospital is trusted with its own patients' images, "
        "the coordinator is not; a partner in a masked sum is trusted to add its share of the noise",
        f"{SOFTWARE}: deploy/docs/threat-model.md",
    ),
    (
        "Side channels",
        "answers leave at few fixed times, sizes follow from the job, errors are codes without texts; that a "
        "hospital is away can be seen, and the number of images of a set",
        f"{SOFTWARE}: agent/federation/service.py",
    ),
    (
        "Access control and security",
        "certificates on both sides, roles in the ledger, two persons for every limit, encrypted storage",
        f"{SOFTWARE}: policies/ledger/state.py, coordinator/gateway/guard.py",
    ),
)
_COLLECTION: Final = (
    ("Who may see the patients' images at the hospital", OPEN, DEPLOYER),
    ("How long images are kept there", OPEN, DEPLOYER),
    (
        "A patient who was in two hospitals",
        "the hospitals' budgets add for such a patient; nobody can tell from the ledger whether there is one",
        DEPLOYER,
    ),
)


def checklist(inputs: ReportInputs) -> Document:
    """The checklist, with this ledger's figures where they are asked for."""
    items = list(inputs.items())
    priced = [i for i in items if i.epsilon]
    sections = (
        Section(
            "What it covers", (Text(f"epsilon covers {len(priced)} of {count(len(items), 'release')}. {_COVERS}"),)
        ),
        Section("Epsilon and delta", (_budgets(inputs), _releases(priced))),
        Section("Unit of privacy", (_rows("What is protected", _unit(inputs)),)),
        Section("Definition and algorithms", (_rows("How it is done", _ALGORITHMS),)),
        Section("Utility and bias", (_rows("What it costs", _UTILITY),)),
        Section("Trust and security", (_rows("Who is trusted with what", _TRUST),)),
        Section("Exposure of the collected data", (_rows("Before differential privacy begins", _COLLECTION),)),
    )
    data = {
        "epsilon_covers": len(priced),
        "releases": len(items),
        "items": [_plain(i) for i in priced],
        "answers": [
            {"question": q, "answer": None if a == OPEN else a, "by": by}
            for q, a, by in (*_unit(inputs), *_ALGORITHMS, *_UTILITY, *_TRUST, *_COLLECTION)
        ],
    }
    title = "Evaluation of the differential-privacy guarantees (NIST SP 800-226)"
    summary = f"{count(len(priced), 'release')} with an epsilon, of {count(len(items), 'release')} in all."
    return Document("sp-800-226", title, summary, sections, inputs.source, data)


def _rows(caption: str, rows: tuple[tuple[str, str, str], ...]) -> ReportTable:
    return ReportTable(caption, ("Question", "Answer", "Where it is from"), rows, widths=(24, 50, 26))


def _unit(inputs: ReportInputs) -> tuple[tuple[str, str, str], ...]:
    relation = RELATIONS.get(UNIT_OF["relation"], UNIT_OF["relation"])
    unit = UNIT_OF["unit"]
    return (
        ("Unit", f"one {unit} at a hospital, with all of their images", LEDGER),
        ("Neighbouring data sets", relation, LEDGER),
        (
            "Delta below 1 / patients",
            f"refused otherwise; delta is per {unit}",
            f"{SOFTWARE}: agent/federation/participant.py",
        ),
    )


def _budgets(inputs: ReportInputs) -> ReportTable:
    rows = tuple(
        (a["site"], epsilon_text(a["epsilon"]), format_rounded_up(a["delta"]), str(a["order"]))
        for a in inputs.told.accounts
        if a["kind"] == "rdp"
    )
    relation = RELATIONS.get(UNIT_OF["relation"], UNIT_OF["relation"])
    caption = f"The whole budget of each hospital, per {UNIT_OF['unit']}: {relation}"
    return ReportTable(
        caption, ("Hospital", "Epsilon", "Delta", "Rényi order"), rows, frozenset({1, 2, 3}), (40, 20, 20, 20)
    )


def _releases(items: list[Item]) -> ReportTable:
    rows = tuple((i.name, i.sites, i.level, i.method, i.epsilon) for i in items)
    return ReportTable(
        "Releases with an epsilon, each alone",
        ("Release", "Hospital", "Level", "Method", "Epsilon"),
        rows,
        widths=(21, 14, 8, 23, 34),
    )


def _plain(item: Item) -> dict[str, Any]:
    told = {"release": item.name, "sites": item.facts["sites"], "level": item.level}
    return {**told, "epsilon": item.dearest["epsilon"], "assumption": item.facts["assumption"] or None}
