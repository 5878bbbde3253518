"""The books as figures for a monitoring system: how much of each budget is gone, and what was refused by which rule.

Pure but for :class:`Refusals`, which reads a store. A gauge is no guarantee: what an account of (epsilon, delta)
promises is its limit, however little of it is spent so far (design P9).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from policies.accounts import Account
from policies.claims import RELATION, UNIT
from policies.entries import Refused
from policies.ledger import State
from policies.rdp import epsilon_of
from policies.store import Store


@dataclass(frozen=True, slots=True)
class Spending:
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


def spending(state: State) -> Iterator[Spending]:
    """Every account, in the order of names.

    Epsilon is not additive. Here ``spent`` is that of what is spent, and ``held`` is how much more it would become
    if all that is held were spent too, so that spent, held and left add up to the limit.
    """
    for name in sorted(state.accounts):
        site, _, kind = name.rpartition("/")
        yield _spending(site, kind, state.accounts[name])


def _spending(site: str, kind: str, account: Account) -> Spending:
    opened = account.opened
    if not opened.order:
        return Spending(site, kind, account.limit, account.spent, account.held, "", 0)
    delta = float(opened.delta)
    spent = epsilon_of(account.spent, delta, opened.order)
    both = epsilon_of(account.spent + account.held, delta, opened.order)
    return Spending(site, kind, float(account.epsilon), spent, both - spent, opened.delta, opened.order)


def proposals_open(state: State) -> int:
    """What persons have asked for or approved, and is not in force: a release that is out needs no more approval."""
    begun = {serial for serial, proposal in state.proposals.items() if proposal.approvals}
    used = {serial for serial, proposal in state.proposals.items() if proposal.used}
    waiting = (begun | set(state.asked)) - used
    return sum(1 for serial in waiting if serial not in state.releases and serial not in state.sent)


class Refusals:
    """Refusals by stage and rule since this was made; it follows the ledger when asked."""

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
