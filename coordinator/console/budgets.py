"""What is left of each site's lifetime budgets: as bars, by project, and day by day.

Balances come from the ledger state. Days and projects come from the search index, and are shown only while the
index's balance of today equals the ledger's: a cache never overrules the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

from coordinator.console.context import READERS, CoordinatorConsoleContext
from coordinator.console.entry_text import percent_down
from coordinator.explanations import RELATIONS, count, epsilon_text, format_epsilon, format_rounded_up
from policies.accounting.claims import RELATION, UNIT
from policies.accounting.rdp import epsilon_of
from policies.audit.display import percent_up
from policies.index.projection import DAY
from policies.index.search import Balance, Index, ProjectShare
from policies.ledger.state import Account, State
from protos.web.charts import Bar, BarPart, ChartFrame, StepCurve, bars, steps
from protos.web.router import PageError, RequestContext, Router

LEGEND: Final = (("spent", "spent"), ("held", "held for work in progress"), ("left", "left"))
CURVES: Final = 6  # that can be told apart
PROJECTS: Final = 12
PERIODS: Final = (30, 90, 365, 3650)
KINDS: Final = {"rdp": "Epsilon budgets", "k": "Releases without an epsilon"}


@dataclass(frozen=True, slots=True)
class AccountBudget:
    """One account, rounded to its disadvantage."""

    account: str
    site: str
    kind: str  # "rdp" | "k"
    limit: int
    held: int
    spent: int
    says: str  # what the limit is, with everything that an epsilon means nothing without
    gone: str  # what is spent and held, in the same unit

    @property
    def left(self) -> int:
        """What may still be reserved; never negative here."""
        return max(0, self.limit - self.held - self.spent)

    @property
    def share_left(self) -> float:
        """Percent, rounded down; 0 of a limit of nothing."""
        return percent_down(self.left, self.limit) if self.limit else 0.0

    @property
    def words(self) -> str:
        """The bar in words."""
        if self.kind == "k":
            return f"{self.left} of {count(self.limit, 'release')} per {UNIT} left; {self.gone}"
        return f"{self.share_left:g} % left; {self.gone}"


def budget_of(name: str, account: Account) -> AccountBudget:
    """An account of the fold as a page shows it."""
    opened, kind = account.opened, name.rpartition("/")[2]
    if not opened.order:
        says = f"{count(account.limit, 'release')} per {UNIT}, ever; such releases have no epsilon"
        gone = f"{account.spent} spent, {account.held} held"
        return AccountBudget(
            name, name.rpartition("/")[0], kind, account.limit, account.held, account.spent, says, gone
        )
    delta, order = float(opened.delta), opened.order
    facts = {"delta": delta, "order": order}
    says = format_epsilon(float(account.epsilon), facts, {"relation": RELATION, "unit": UNIT})
    gone = "nothing spent or held"
    if account.spent or account.held:
        spent, bound = (epsilon_of(n, delta, order) for n in (account.spent, account.spent + account.held))
        more = f", {epsilon_text(bound)} spent and held together" if account.held else ""
        where = f"delta {format_rounded_up(opened.delta)} per {UNIT}, {RELATIONS.get(RELATION, RELATION)}"
        gone = f"epsilon {epsilon_text(spent)} spent{more}, of {epsilon_text(account.epsilon)} at {where}"
    return AccountBudget(name, name.rpartition("/")[0], kind, account.limit, account.held, account.spent, says, gone)


def budgets_of(state: State) -> list[AccountBudget]:
    """All accounts, by site."""
    return [budget_of(name, account) for name, account in sorted(state.accounts.items())]


def drawn(budgets: Sequence[AccountBudget], title: str) -> Any:
    """Bars of some accounts, each leading to its site's page."""
    rows = [
        Bar(b.site, (BarPart("spent", b.spent), BarPart("held", b.held)), b.limit or 1, b.words, f"/budgets/{b.site}")
        for b in budgets
    ]
    return bars(rows, title, LEGEND)


def agrees(index: Index, budget: AccountBudget) -> bool:
    """Is the index's balance of today that of the fold?"""
    series = index.balances(budget.account, 1 << 52)
    last = series[-1] if series else Balance(0, 0, 0, 0)
    return (last.limit, last.held, last.spent) == (budget.limit, budget.held, budget.spent)


def over_time(index: Index, budgets: Sequence[AccountBudget], begin: int, end: int) -> Any:
    """The share that is left, day by day, of at most six accounts: those with least left. None without any.

    Args:
        index: level with the ledger.
        budgets: of one kind.
        begin: seconds since 1970.
        end: the same, later.
    """
    known = [b for b in budgets if b.limit and agrees(index, b)]
    least = sorted(sorted(known, key=lambda b: b.share_left)[:CURVES], key=lambda b: b.account)
    moved = [(b.site, index.balances(b.account, begin)) for b in least]
    if not moved:
        return None
    begin = max(begin, min(balances[0].day for _, balances in moved) * DAY - DAY)  # nothing is drawn of before
    series = [StepCurve(site, _points(balances)) for site, balances in moved]
    title = "Budget left" if len(known) <= CURVES else f"Budget left, the {CURVES} sites with least"
    frame = ChartFrame(title, "% of the lifetime budget", float(begin), float(end), 100.0, "the whole budget")
    return steps(series, frame)


def _points(balances: Sequence[Balance]) -> tuple[tuple[float, float], ...]:
    """From noon of each day on which it moved; whole until noon of the day on which it was opened."""
    shares = [(b.day, percent_down(max(0, b.limit - b.held - b.spent), b.limit)) for b in balances if b.limit]
    first = [(float(shares[0][0] * DAY), 100.0)] if shares else []
    return (*first, *((day * DAY + DAY / 2, share) for day, share in shares))


def by_project(index: Index, budget: AccountBudget) -> Any:
    """The projects that have most of an account, and the others together; None while nothing is used."""
    if not budget.limit or not agrees(index, budget):
        return None
    shares = index.shares(budget.account, PROJECTS)
    rows = [_project(share, budget) for share in shares]
    others = ProjectShare("", budget.held - sum(s.held for s in shares), budget.spent - sum(s.spent for s in shares))
    if others.held + others.spent > 0:
        rows.append(_project(others, budget))
    return bars(rows, "By project: a run, or the method of single releases", LEGEND) if rows else None


def _project(share: ProjectShare, budget: AccountBudget) -> Bar:
    whole = f"{percent_up(share.spent, budget.limit):g} % of the budget spent"
    if budget.kind == "k":
        whole = f"{count(share.spent, 'release')} per {UNIT} spent"
    held = f", {percent_up(share.held, budget.limit):g} % held" if share.held else ""
    parts = (BarPart("spent", max(0, share.spent)), BarPart("held", max(0, share.held)))
    href = f"/ledger?site={budget.site}&text={share.project}" if share.project else ""
    return Bar(share.project or "all others", parts, budget.limit, whole + held, href)


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """One site's budgets."""

    @pages.get("/budgets/{site}", READERS)
    def budgets(asked: RequestContext, site: str, days: int = 90) -> Response:
        if days not in PERIODS:
            raise PageError(400, f"Choose one of {', '.join(map(str, PERIODS))} days.")
        level = context.index.follow(1_000)
        with context.store.exclusive() as state:
            own = [b for b in budgets_of(state) if b.site == site]
        if not own:
            raise PageError(404, "There is no budget of a site of that name.")
        end = int(context.now().timestamp()) + 1
        shown = [
            {
                "budget": b,
                "title": KINDS.get(b.kind, b.kind),
                "projects": by_project(context.index, b) if level else None,
                "curve": over_time(context.index, [b], end - days * DAY, end) if level else None,
            }
            for b in own
        ]
        periods = [(n, f"{n} days" if n < 3650 else "ten years") for n in PERIODS]
        return asked.page("budgets.html", site=site, shown=shown, days=days, periods=periods, level=level)
