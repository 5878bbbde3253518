"""Ledger figures for a monitoring system: how much of each budget is spent, and refusals by rule.

Pure but for :class:`RefusalCounts`, which reads a store. A gauge is no guarantee: what an account of (epsilon, delta)
promises is its limit, however little of it is spent so far (design P9).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from policies.accounting.claims import RELATION, UNIT
from policies.accounting.rdp import epsilon_of
from policies.ledger.entries import Refused
from policies.ledger.state import Account, State
from policies.ledger.store import LedgerStoppedError, Store


@dataclass(frozen=True, slots=True)
class AccountSpending:
    """One account: of kind rdp in epsilon, of kind k in releases for each patient. ``left`` may be negative."""

    site: str
    kind: str  # "rdp" | "k"
    limit: float
    spent: float
    held: float
    delta: str  # "" for kind k
    order: int  # 0 for kind k

    @property
    def left(self) -> float:
        """What may still be granted."""
        return self.limit - self.spent - self.held

    @property
    def unit(self) -> str:
        """Of whom the budget is."""
        return UNIT

    @property
    def relation(self) -> str:
        """Which neighbours epsilon compares."""
        return RELATION


def spending(state: State) -> Iterator[AccountSpending]:
    """Every account, in the order of names.

    Epsilon is not additive. ``spent`` is the epsilon of what is spent. ``held`` is the increase if everything held
    were spent too, so that spent, held and left add up to the limit.
    """
    for name in sorted(state.accounts):
        site, _, kind = name.rpartition("/")
        yield _spending(site, kind, state.accounts[name])


def _spending(site: str, kind: str, account: Account) -> AccountSpending:
    opened = account.opened
    if not opened.order:
        return AccountSpending(site, kind, account.limit, account.spent, account.held, "", 0)
    delta = float(opened.delta)
    spent = epsilon_of(account.spent, delta, opened.order)
    both = epsilon_of(account.spent + account.held, delta, opened.order)
    return AccountSpending(site, kind, float(account.epsilon), spent, both - spent, opened.delta, opened.order)


def put_budgets(state: State, put: Callable[..., None], *, by_site: bool) -> None:
    """Every account as samples: ``put(metric, value, **labels)``, with the label ``site`` where there are several."""
    for one in spending(state):
        site = {"site": one.site} if by_site else {}
        if one.kind == "rdp":
            labels = {**site, "unit": one.unit, "relation": one.relation, "delta": one.delta}
            put("lazaret_epsilon_limit", one.limit, **labels)
            put("lazaret_epsilon_spent", one.spent, **labels)
            put("lazaret_epsilon_held", one.held, **labels)
            put("lazaret_epsilon_left", one.left, **labels)
        else:  # no epsilon at all: it has none, which is not zero (P4)
            put("lazaret_k_releases_limit", one.limit, **site, unit=one.unit)
            put("lazaret_k_releases_spent", one.spent, **site, unit=one.unit)
            put("lazaret_k_releases_held", one.held, **site, unit=one.unit)
        put("lazaret_budget_left_ratio", one.left / one.limit if one.limit > 0 else 0, **site, kind=one.kind)


def put_entries(state: State, put: Callable[..., None]) -> None:
    """How many entries, and how many proposals that are not in force."""
    put("lazaret_ledger_entries", state.size)
    put("lazaret_approvals_open", proposals_open(state))


def store_fault(store: Store, said: str) -> str | None:
    """None where the ledger's lock can be had; else ``said``: it was stopped, and only a restart helps."""
    try:
        with store.exclusive():
            return None
    except LedgerStoppedError:
        return said


def proposals_open(state: State) -> int:
    """What persons have asked for or approved, and is not in force: a release that is out needs no more approval."""
    begun = {serial for serial, proposal in state.proposals.items() if proposal.approvals}
    used = {serial for serial, proposal in state.proposals.items() if proposal.used}
    waiting = (begun | set(state.asked)) - used
    return sum(1 for serial in waiting if serial not in state.releases and serial not in state.sent)


class RefusalCounts:
    """Refusals by stage and rule since this object was made; each call of :meth:`counts` follows the ledger."""

    def __init__(self, store: Store, most: int = 20_000) -> None:
        """``most``: entries that are read at one asking."""
        self._store, self._most, self._one = store, most, threading.Lock()
        self._seen = store.state.size
        self._counts: Counter[tuple[str, str]] = Counter()

    def counts(self) -> dict[tuple[str, str], int]:
        """(stage, rule) -> how often."""
        with self._one:
            for seq in range(self._seen, min(self._store.state.size, self._seen + self._most)):
                entry = self._store.line(seq).record.entry
                if isinstance(entry, Refused):
                    self._counts.update((entry.stage, rule) for rule in entry.findings)
                self._seen = seq + 1
            return dict(self._counts)
