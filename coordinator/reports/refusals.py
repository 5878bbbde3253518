"""What was refused, and why: a refusal is the gateway at work, and is written down like an admission. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.explanations import MECHANISMS, STAGES, count, explain, utc
from coordinator.reports.document import Document, ReportTable, Section, Text
from coordinator.reports.report_inputs import ReportInputs

_WORDS = (
    "Nothing of a refused release is kept. What a hospital gave up itself is listed apart: nobody refused it, and "
    "its budget stays spent. The rules are the names that the ledger records; an auditor finds each of them in its "
    "export."
)


def denied(inputs: ReportInputs) -> Document:
    """Every refusal, with the reasons and what to do."""
    entries = inputs.told.refused
    refused = [e for e in entries if e["stage"] != "expired"]
    given_up = [e for e in entries if e["stage"] == "expired"]
    by_rule = Counter(rule for e in refused for rule in e["findings"])
    by_site = Counter(e["site"] for e in refused)
    rules = tuple((rule, *explain(rule), str(n)) for rule, n in by_rule.most_common())
    sections = (
        Section("How to read this", (Text(_WORDS),)),
        Section(
            "By reason",
            (
                ReportTable(
                    "How often each rule was broken",
                    ("Rule", "Why", "What to do", "Times"),
                    rules,
                    frozenset({3}),
                    (18, 34, 38, 10),
                ),
            ),
        ),
        Section(
            "By hospital",
            (
                ReportTable(
                    "Refusals by hospital",
                    ("Hospital", "Times"),
                    tuple((site or "unknown", str(n)) for site, n in sorted(by_site.items())),
                    frozenset({1}),
                    (75, 25),
                ),
            ),
        ),
        Section("One by one", (_table("Refused", refused),)),
        Section("Given up by hospitals", (_table("Given up", given_up),)),
    )
    summary = f"{count(len(refused), 'refusal')}, and {count(len(given_up), 'grant')} given up by hospitals."
    data = {"refused": [_plain(e) for e in refused], "given_up": [_plain(e) for e in given_up]}
    return Document("denied", "What was refused, and why", summary, sections, inputs.source, data)


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    names = ("seq", "at", "site", "mechanism", "stage", "subject", "findings")
    return {name: entry[name] for name in names}


def _table(caption: str, entries: Sequence[Mapping[str, Any]]) -> ReportTable:
    rows = tuple(
        (
            str(e["seq"]),
            utc(e["at"]),
            e["site"] or "unknown",
            MECHANISMS.get(e["mechanism"], e["mechanism"] or "a call"),
            STAGES.get(e["stage"], e["stage"]),
            " ".join(f"{explain(rule)[0]} ({rule})" for rule in e["findings"]),
        )
        for e in reversed(entries)
    )
    head = ("Entry", "Time (UTC)", "Hospital", "What", "When", "Why")
    return ReportTable(f"{caption}, newest first", head, rows, widths=(8, 16, 13, 22, 18, 30))
