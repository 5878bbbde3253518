"""The first page: alerts, connected sites, pending approvals, and the remaining budgets."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

from coordinator.console import alerts, budgets
from coordinator.console.alerts import DAY, CosignedHead
from coordinator.console.context import INFORMED, READERS, CoordinatorConsoleContext
from coordinator.console.keys import keys_of
from coordinator.console.ledger import follow, rules_of, searching
from coordinator.console.proposals import proposals_of
from coordinator.operations.attendance import absent_sites, newest_certificates
from coordinator.storage.witness_store import Witnesses
from policies.index.search import EntryQuery
from policies.ledger.merkle import cosigners
from policies.ledger.state import State
from protos.common.text import DATE, utc
from protos.web.router import RequestContext, Router

RECENT_DAYS: Final = 7
CURVE_DAYS: Final = 90
LISTED: Final = 8  # proposals, rules


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """A site as the overview shows it."""

    site: str
    state: str  # "online" | "offline" | "revoked"
    since: float | None  # seconds since 1970; None: not since this process started
    until: int | None  # when its newest certificate ends
    seen: int  # size of the newest head that it cosigned
    level: bool  # whether that is the whole ledger
    why: str  # it is not here; "": it is


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """The overview, and the page of one site's budgets."""
    pages.menu("Overview", "/", READERS)

    @pages.get("/", READERS)
    def overview(asked: RequestContext) -> Response:
        with searching():
            return asked.page("overview.html", **facts(context, asked.person.name, asked.person.role in INFORMED))

    budgets.add(pages, context)


def facts(context: CoordinatorConsoleContext, me: str, told: bool) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        context: the coordinator's.
        me: who looks.
        told: whether that person sees what was refused.
    """
    now = int(context.now().timestamp())
    level = not follow(context)
    since = (now // DAY - RECENT_DAYS + 1) * DAY
    refusals = context.index.refusals(since, now + DAY) if told else []
    with context.store.exclusive() as state:
        accounts = budgets.budgets_of(state)
        sites, heads = _sites(context, state)
        open_ones = proposals_of(state, context.store.envelope, me, (LISTED, 0))
        found = [
            *alerts.of_ledger(state, context.store.stopped),
            *alerts.of_certificates(
                keys_of(context.home, context.store), newest_certificates(state), state.revoked_sites, now
            ),
        ]
        barred, size = set(state.revoked_sites), state.size
    first = utc(since, DATE)
    disk = shutil.disk_usage(context.home.root)
    found += [
        *alerts.of_refusals(refusals, first),
        *alerts.of_witnesses([h for h in heads if h.site not in barred], size, now),
        *alerts.of_budgets(b for b in accounts if b.site not in barred),
        *alerts.of_disk(disk.total, disk.free),
    ]
    if not level:
        todo = "Wait: it is built in the background. If this message stays, see the coordinator's log."
        found.append(alerts.Alarm(alerts.MILD, "The search index is behind the ledger.", todo, "/ledger"))
    return {
        "alarms": alerts.in_order(found),
        "grave": sum(alarm.kind == alerts.GRAVE for alarm in found),
        **_money(context, accounts, now, level),
        "sites": sites,
        "online": sum(row.state == "online" for row in sites),
        "members": sum(row.state != "revoked" for row in sites),
        "waiting": open_ones.waiting,
        "open": len(open_ones.waiting) + open_ones.more,
        "rules": rules_of(refusals, first)[:LISTED],
        "refused": context.index.tally(since, 1 << 52).get("refused", 0) if told else 0,
        "told": told,
        "recent_days": RECENT_DAYS,
        "size": size,
        "at": now,
    }


def _money(
    context: CoordinatorConsoleContext, accounts: list[budgets.AccountBudget], now: int, level: bool
) -> dict[str, Any]:
    """Bars of all accounts, and curves of those with an epsilon."""
    kinds = []
    for kind, title in budgets.KINDS.items():
        own = [b for b in accounts if b.kind == kind]
        begin = now - CURVE_DAYS * DAY
        if own:
            curve = budgets.over_time(context.index, own, begin, now + 1) if level and kind == "rdp" else None
            said = {b.says for b in own}
            says = said.pop() if len(said) == 1 else "Each hospital's own, see its page."
            kinds.append({"kind": kind, "bars": budgets.drawn(own, title), "says": says, "curve": curve})
    return {"kinds": kinds, "curve_days": CURVE_DAYS}


def _sites(context: CoordinatorConsoleContext, state: State) -> tuple[list[SiteSummary], list[CosignedHead]]:
    presence = context.sessions.presence()
    ends, rows, heads = newest_certificates(state), list[SiteSummary](), list[CosignedHead]()
    absent = {one.site: one for one in absent_sites(state, presence, context.signs(), context.now())}
    seen = _cosigned(context, state)
    for site in sorted(state.sites):
        there = presence.get(site)
        word = "online" if there is not None and there.online else "offline"
        word = "revoked" if site in state.revoked_sites else word
        since, why = there.since if there else None, ""
        if site in absent:
            since, why = absent[site].since, absent[site].why
        word = "no link" if why and word == "online" else word
        size = min(seen.get(site, 0), state.size)
        rows.append(SiteSummary(site, word, since, ends.get(site), size, size == state.size, why))
        first = max(size, _joined(context, site))  # what was written before it was enrolled is no news to it
        heads.append(CosignedHead(site, size, context.index.time_of(first) if size < state.size else None))
    return rows, heads


def _joined(context: CoordinatorConsoleContext, site: str) -> int:
    """The place of its newest enrolment; 0 where the index does not know it yet."""
    found = context.index.find(EntryQuery(kinds=("enrolled",), site=site, most=1)).seqs
    return found[0] if found else 0


def _cosigned(context: CoordinatorConsoleContext, state: State) -> dict[str, int]:
    """By site: the size of the newest head of this epoch that it cosigned. Nobody else's signature counts."""
    found: dict[str, int] = {}
    later = [f"epoch {state.epoch} {state.nonce}"] if state.epoch > 1 else []
    keys = {site: known.sign_key for site, known in state.sites.items()}
    for note in Witnesses(context.home.witnesses).notes():
        lines = note.partition("\n\n")[0].split("\n")
        if lines[3:] != later or not lines[1].isdigit():
            continue
        names = {line.split(" ")[1] for line in note.partition("\n\n")[2].split("\n")[1:-1] if line.count(" ") == 2}
        for site in cosigners(note, {name: keys[name] for name in names & keys.keys()}):
            found[site] = max(found.get(site, 0), int(lines[1]))
    return found
