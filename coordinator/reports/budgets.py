"""How the budgets were used up: every account over time, and by run or method. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.explanations import MECHANISMS, count, epsilon_text, format_rounded_up, rounded_down, rounded_up, utc
from coordinator.reports.document import Block, Curve, Document, FactList, Line, ReportTable, Section, Text
from coordinator.reports.report_inputs import UNIT_OF, ReportInputs, per
from policies.accounting.rdp import epsilon_of

_WHOLE = (
    "A budget is for the whole life of a hospital's data, whatever the project. It is held before an image is read, "
    "and a crash never gives it back. Shares are of what the Rényi filter lets through, which adds up; epsilon "
    "itself does not. What is used is rounded up. The promise to rely on, whatever comes next, is the whole budget. "
    "Where hospitals shared their noise (level A*), every epsilon of the account that paid stands on what the "
    "release's certificate assumes of them."
)


def burn_down(inputs: ReportInputs) -> Document:
    """Each account's way from full to empty."""
    count_of, accounts = len(inputs.state.sites), inputs.told.accounts
    history = inputs.told.fold.history
    sections = [Section("How to read this", (Text(_WHOLE),))]
    sections += [_account(inputs, account, history[account["account"]]) for account in accounts]
    if not accounts:
        sections.append(Section("Accounts", (Text("No hospital has a budget yet."),)))
    keys = ("at", "spent", "held", "limit")
    told = [{**a, "history": [dict(zip(keys, m, strict=True)) for m in history[a["account"]]]} for a in accounts]
    data = {**UNIT_OF, "accounts": told}
    summary = f"{count(len(accounts), 'account')} of {count(count_of, 'hospital')}."
    return Document("burn-down", "How the privacy budgets were used", summary, tuple(sections), inputs.source, data)


def _share(part: int, limit: int) -> float:
    return rounded_up(100 * part / limit, 1) if limit else 0.0


def _account(inputs: ReportInputs, account: Mapping[str, Any], history: list[tuple[int, int, int, int]]) -> Section:
    spent, held, limit = account["spent"], account["held"], account["limit"]
    rdp = account["kind"] == "rdp"
    rows = [("Budget", _stated(inputs, account))]
    if rdp:
        left = max(0.0, rounded_down(100 - 100 * (spent + held) / limit, 1)) if limit else 0.0
        rows.append(("Spent", f"{_share(spent, limit):g} %{_worth(inputs, account, spent)}"))
        rows.append(("Held", f"{_share(held, limit):g} %{_worth(inputs, account, spent + held) if held else ''}"))
        rows.append(("Left", f"{left:g} %"))
    else:
        rows += [("Spent", str(spent)), ("Held", str(held)), ("Left", str(limit - spent - held))]
    blocks: list[Block] = [FactList(tuple(rows))]
    if len(history) > 1:
        history = [*history, (inputs.told.records[-1].at, *history[-1][1:])]  # drawn until the ledger's last entry
        used = tuple((at, 100 * (s + h) / most if most else 0.0) for at, s, h, most in history)
        closed = tuple((at, 100 * s / most if most else 0.0) for at, s, _, most in history)
        top = max(100.0, *(value for _, value in used))
        lines = (Line("held or spent", used), Line("spent", closed))
        blocks.append(Curve(f"The budget of {account['account']} over time", "% of the limit", lines, top))
    blocks.append(_uses(inputs, account))
    kind = "differential privacy" if rdp else "releases without an epsilon"
    return Section(f"{account['site']}: {kind}", tuple(blocks))


def _stated(inputs: ReportInputs, account: Mapping[str, Any]) -> str:
    if account["kind"] != "rdp":
        return f"a patient may be in {count(account['limit'], 'release')} without an epsilon, ever"
    where = f"delta {format_rounded_up(account['delta'])} {per(UNIT_OF)}"
    return f"epsilon {epsilon_text(account['epsilon'])} at {where}; Rényi filter of order {account['order']}"


def _worth(inputs: ReportInputs, account: Mapping[str, Any], amount: int) -> str:
    if not amount:
        return ""
    epsilon = epsilon_of(amount, float(account["delta"]), account["order"])
    where = f"delta {format_rounded_up(account['delta'])} {per(UNIT_OF)}"
    return f": epsilon {epsilon_text(epsilon)} at {where}, so far"


def _uses(inputs: ReportInputs, account: Mapping[str, Any]) -> ReportTable:
    """What the account paid for, grant by grant."""
    words = {"held": "held", "spent": "spent", "freed": "given back: nothing was read or released"}
    rows = []
    for at, grant in inputs.told.grants.get(account["account"], ()):
        g = grant.reserved
        if account["kind"] == "rdp":
            price = f"{_share(g.amount, account['limit']):g} %"
        else:
            price = count(g.amount, "release")
        method = MECHANISMS.get(g.mechanism, g.mechanism)
        rows.append((utc(at), g.run or "one release", method, price, words[grant.state]))
    head = ("Asked for (UTC)", "Run", "Method", "Price", "Now")
    return ReportTable(
        "What it was used for", head, tuple(rows), frozenset({3}), (17, 14, 35, 12, 22), "nothing was asked for"
    )
