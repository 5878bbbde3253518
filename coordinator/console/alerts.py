"""Alerts that need attention now: each says what is wrong and what to do, the most severe first. Pure.

A figure that cannot be read raises an alert too: it is not a good figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.console.budgets import AccountBudget
from coordinator.console.entry_text import visible_text
from coordinator.console.keys import Key
from coordinator.explanations import RULES, count, explain
from policies.index.search import RuleRefusals
from policies.ledger.state import State

DAY: Final = 86_400
GRAVE, MILD = "no", "warn"  # as badges are coloured
CA_DAYS: Final = (7, 30)  # left of an authority's certificate: grave, mild
ROOT_DAYS: Final = (90, 365)
UNSEEN_S: Final = 2 * DAY  # that a site may leave the ledger's head unseen
FREE: Final = (0.03, 0.10)  # of the disk
FREE_BYTES: Final = (1 << 30, 5 << 30)
LEFT: Final = 10.0  # percent of a budget
_INQUIRE: Final = RULES["bad_envelope"][1]  # what is to be done about a rule that only an attack or a fault breaks


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing to look at."""

    kind: str  # GRAVE | MILD
    what: str
    todo: str
    href: str = ""  # where to see more


@dataclass(frozen=True, slots=True)
class CosignedHead:
    """What a site last cosigned of this ledger."""

    site: str
    size: int  # 0: nothing of this epoch
    unseen_since: int | None  # seconds since 1970: when the first entry that it has not seen was written; None: none


def in_order(alarms: Iterable[Alarm]) -> list[Alarm]:
    """The grave ones first."""
    return sorted(alarms, key=lambda alarm: alarm.kind != GRAVE)


def of_ledger(state: State, stopped: bool) -> Iterator[Alarm]:
    """The ledger itself."""
    if stopped:
        yield Alarm(
            GRAVE,
            "The ledger could not be written, so nothing is decided any more.",
            "Free or repair the disk, then restart the coordinator. It replays the durable entries.",
        )
    if state.sites_awaited:
        names = ", ".join(sorted(state.sites_awaited))
        yield Alarm(
            GRAVE,
            f"The ledger was restored from a backup, and no budget is granted: {names} must show their receipts.",
            explain("frozen")[1],
            "/people",
        )
    if not state.office():
        yield Alarm(
            MILD,
            "No person may approve yet.",
            "Appoint one person for compliance and one for the hospitals' side.",
            "/people",
        )


def of_refusals(refusals: Sequence[RuleRefusals], since: str) -> Iterator[Alarm]:
    """Refusals that only an attack or a fault explains; the others are the law at work, and have their own list."""
    by_rule: dict[str, list[RuleRefusals]] = {}
    for refusal in refusals:
        if explain(refusal.rule)[1] == _INQUIRE or refusal.rule not in RULES:
            by_rule.setdefault(refusal.rule, []).append(refusal)
    for rule, listed in by_rule.items():
        why, todo = explain(rule)
        names = ", ".join(sorted({r.site for r in listed if r.site})) or "a caller without a name"
        times = count(sum(r.times for r in listed), "time")
        href = f"/ledger?kind=refused&since={since}&text=rule%3D{rule}" if rule in RULES else "/refusals"
        yield Alarm(GRAVE, visible_text(f"{why} ({times}, {names})"), todo, href)


def of_budgets(budgets: Iterable[AccountBudget]) -> Iterator[Alarm]:
    """Epsilon budgets that are nearly gone. Of releases without an epsilon one is soon the last: that is no news."""
    for b in budgets:
        if b.kind == "rdp" and not b.share_left >= LEFT:
            yield Alarm(
                MILD,
                f"{b.site} has {b.share_left:g} % of its epsilon budget left.",
                "Plan fewer steps or more noise. More budget needs two persons and the site's own policy.",
                f"/budgets/{b.site}",
            )


def of_witnesses(heads: Iterable[CosignedHead], size: int, now: float) -> Iterator[Alarm]:
    """Sites that have not looked at the ledger's head for long: nobody but they would see it rewritten."""
    for head in heads:
        if head.unseen_since is not None and not now - head.unseen_since <= UNSEEN_S:
            days = int((now - head.unseen_since) // DAY)
            behind = f"{count(size - head.size, 'entry', 'entries')} behind, the first {count(days, 'day')} old"
            yield Alarm(
                MILD,
                f"{head.site} has not seen the newest head of the ledger: {behind}.",
                "Ask the site's IT whether its agent runs, and what its log says of the coordinator.",
                "/people",
            )


def of_certificates(
    keys: Iterable[Key], sites: Mapping[str, int | None], barred: Iterable[str], now: float
) -> Iterator[Alarm]:
    """Certificates that end soon or have ended.

    Args:
        keys: the coordinator's own.
        sites: by site, when the newest certificate that counts ends, in seconds; None: none counts.
        barred: sites that need none.
        now: seconds since 1970.
    """
    for key in keys:
        grave, mild = ROOT_DAYS if key.name.startswith("Root") else CA_DAYS
        if key.name.startswith("This"):  # lives a day and is renewed by itself: only its end is news
            grave, mild = 0, 0
        days = None if key.until is None else (key.until - now) / DAY
        if days is not None and not days > mild:
            ended = "has ended" if days <= 0 else f"ends in {count(int(days), 'day')}"
            todo = "Renew it with the root's medium at hand: `lazaret-coordinator renew-ca`."
            if key.name.startswith("This"):
                todo = "See the coordinator's log: the automatic renewal failed."
            elif key.name.startswith("Root"):
                todo = "Plan a new root: every site must enrol again under it."
            yield Alarm(GRAVE if not days > grave else MILD, f"{key.name}: its certificate {ended}.", todo, "/people")
    for site, until in sorted(sites.items()):
        if site not in set(barred) and until is not None and not until > now:
            yield Alarm(
                MILD,
                f"The certificate of {site} has expired, so its agent cannot connect.",
                "An agent renews it while it runs. If the agent was off for long, invite the site again.",
                "/people",
            )


def of_disk(total: int, free: int) -> Iterator[Alarm]:
    """The disk of the ledger and the shelf, in bytes."""
    if not (total > 0 and free >= 0):
        yield Alarm(GRAVE, "The free space on the coordinator's disk is unknown.", "Check the disk.")
        return
    share = free / total
    for kind, part, least in zip((GRAVE, MILD), FREE, FREE_BYTES, strict=True):
        if share < part or free < least:
            said = f"{free / (1 << 30):.1f} GiB, {100 * share:.0f} %"
            todo = "Free some space: if the disk is full, the ledger stops, and nothing is decided until a restart."
            yield Alarm(kind, f"The coordinator's disk is nearly full: {said} free.", todo)
            return
