"""The releases of ``summary.json``, from what the coordinator's ledger says. Its form: ``summary.schema.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.accounting.accountant import epsilon
from policies.accounting.claims import Claim, Gaussian
from policies.statements import claim_from, claim_json


def release_lines(ledger: Mapping[str, Any], asked: Mapping[str, Claim]) -> list[dict[str, Any]]:
    """One for each release, or reservation of a run, with its verdict.

    Args:
        ledger: as ``ledger show --json`` prints it.
        asked: the claim of each mechanism, for refusals, whose entries name none.
    """
    orders = {a["account"]: (a["order"], a["delta"]) for a in ledger["accounts"]}
    return [found for entry in ledger["entries"] if (found := _release(entry, orders, asked)) is not None]


def _release(
    entry: dict[str, Any], orders: dict[str, tuple[int, str]], asked: Mapping[str, Claim]
) -> dict[str, Any] | None:
    """One line of the summary for each release or reservation; a refusal shows the claim that was asked for."""
    if entry["type"] not in ("admitted", "refused") or entry.get("stage") == "expired":
        return None
    claim = claim_from(entry["claim"]) if entry.get("claim") else asked[entry["mechanism"]]
    order, delta = orders.get(f"{entry['site']}/rdp", (0, ""))
    private = isinstance(claim, Gaussian)
    return {
        "id": entry.get("release") or entry["subject"],
        "site": entry["site"],
        "mechanism": entry["mechanism"],
        "round": entry.get("round", 0),
        "claim": claim_json(claim),
        "claim_level": entry.get("level", ""),
        "epsilon": epsilon([claim], float(delta), order) if private else None,
        "delta": float(delta) if private else None,
        "k": getattr(claim, "k", None),
        "verdict": entry["type"],
        "findings": entry.get("findings", []),
    }
