"""The search index's view of one entry: its words, its site, and the changes of balances. Pure.

Nothing here decides anything: the fold (:mod:`policies.ledger.state`) does. The balances are those of the fold, kept
by day so that a page can draw them; a test holds the two against each other over every kind of entry.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final

from policies.ledger.entries import (
    Entry,
    Expired,
    Freed,
    LimitSet,
    Opened,
    Record,
    Recovered,
    Refused,
    Reserved,
    Spent,
    Waived,
    kind_of,
)

DAY: Final = 86_400  # seconds
LATEST: Final = 1 << 53  # of a record's time, seconds: a time is informative, and may be anything
CUT: Final = 16  # hexadecimal digits that a digest is found by
LONGEST: Final = 80  # letters of a word
LEAST_HEX: Final = 8  # as many of them at least make the beginning of a digest
TOKEN: Final = re.compile(r"[A-Za-z0-9_:/.+=\-\x80-\U0010ffff]+")  # as SQLite's tokenizer "ascii" with TOKENCHARS
TOKENCHARS: Final = "-_:/.+="
_HEX: Final = re.compile(r"[0-9a-f]+")


def tokens(text: str) -> list[str]:
    """The words of a text, as they are found: small letters, and of a digest its beginning alone."""
    return [_cut(word.lower()) for word in TOKEN.findall(text)]


def _cut(word: str) -> str:
    return word[:CUT] if len(word) > CUT and _HEX.fullmatch(word) else word[:LONGEST]


def day_of(at: int) -> int:
    """Days since 1970 of a record's time, in UTC."""
    return min(max(at, 0), LATEST) // DAY


@dataclass(frozen=True, slots=True)
class HeldGrant:
    """A grant, as far as its end needs it."""

    site: str
    account: str
    run: str
    mechanism: str
    amount: int
    open: bool

    @property
    def project(self) -> str:
        """What the grant was for: its run, or the mechanism of a single release."""
        return self.run or self.mechanism


@dataclass(slots=True)
class RunningBalance:
    """An account's balance, in the account's own unit."""

    limit: int = 0
    held: int = 0
    spent: int = 0


@dataclass(slots=True)
class IndexBatch:
    """What some entries in a row add to the tables."""

    lines: list[tuple[int, int]] = field(default_factory=list)  # seq, time
    texts: list[tuple[int, str]] = field(default_factory=list)  # seq, words
    days: dict[int, tuple[int, int]] = field(default_factory=dict)  # day -> first and last seq
    tallies: Counter[tuple[int, str, str]] = field(default_factory=Counter)  # day, kind, site
    refusals: Counter[tuple[int, str, str]] = field(default_factory=Counter)  # day, rule, site
    grants: dict[str, HeldGrant] = field(default_factory=dict)
    held: Counter[tuple[str, str]] = field(default_factory=Counter)  # account, project -> by how much more
    spent: Counter[tuple[str, str]] = field(default_factory=Counter)
    balances: dict[tuple[str, int], tuple[int, int, int]] = field(default_factory=dict)  # account, day -> purse


@dataclass(slots=True)
class EntryProjection:
    """Processes entries in their order, and returns what each adds."""

    purses: dict[str, RunningBalance]
    grant: Callable[[str], HeldGrant | None]  # of earlier batches
    open_of: Callable[[str], Iterable[tuple[str, HeldGrant]]]  # grants of a site that were open before this batch
    today: int = 0  # the ledger never goes back, whatever the clock does
    batch: IndexBatch = field(default_factory=IndexBatch)

    def take(self, seq: int, record: Record) -> None:
        """One more entry."""
        batch, entry, day = self.batch, record.entry, day_of(record.at)
        self.today = max(self.today, day)
        held = self._grant(getattr(entry, "grant", ""))
        site = _site(entry) or (held.site if held else "")
        batch.lines.append((seq, min(max(record.at, 0), LATEST)))
        batch.texts.append((seq, " ".join(_words(entry, site, held))))
        first, _last = batch.days.get(day, (seq, seq))
        batch.days[day] = (first, seq)
        batch.tallies[day, kind_of(entry), site] += 1
        if isinstance(entry, Refused):
            batch.refusals.update((day, rule, site) for rule in set(entry.findings))
        self._move(entry)

    def _grant(self, name: str) -> HeldGrant | None:
        return (self.batch.grants.get(name) or self.grant(name)) if name else None

    def _move(self, e: Entry) -> None:
        """Balances, as :class:`policies.ledger.state.State` moves them."""
        if isinstance(e, Opened):
            self.purses[e.account] = RunningBalance(e.limit)
            self._note(e.account)
        elif isinstance(e, LimitSet):
            self.purses[e.account].limit = e.limit
            self._note(e.account)
        elif isinstance(e, Reserved | Recovered):
            new = HeldGrant(e.site, e.account, e.run, e.mechanism, e.amount, isinstance(e, Reserved))
            self.batch.grants[e.grant] = new
            self._add(new, e.amount, 0) if new.open else self._add(new, 0, e.amount)
        elif isinstance(e, Spent | Expired | Freed):
            held = self._grant(e.grant)
            if held is not None:
                self._close(e.grant, held, _used(e, held))
        elif isinstance(e, Waived):
            self._waive(e.site)

    def _waive(self, site: str) -> None:
        """Everything that the site holds or has left is spent."""
        names = {name: held for name, held in self.open_of(site) if name not in self.batch.grants}
        names |= {name: held for name, held in self.batch.grants.items() if held.site == site and held.open}
        for name, held in names.items():
            self._close(name, held, held.amount)
        for account, purse in self.purses.items():
            rest = purse.limit - purse.held - purse.spent
            if account.rpartition("/")[0] == site and rest > 0:
                self._add(HeldGrant(site, account, "", "waived", 0, False), 0, rest)

    def _close(self, name: str, held: HeldGrant, used: int) -> None:
        closed = HeldGrant(held.site, held.account, held.run, held.mechanism, held.amount, False)
        self.batch.grants[name] = closed
        self._add(closed, -held.amount, used)

    def _add(self, to: HeldGrant, held: int, spent: int) -> None:
        purse = self.purses[to.account]
        purse.held += held
        purse.spent += spent
        self.batch.held[to.account, to.project] += held
        self.batch.spent[to.account, to.project] += spent
        self._note(to.account)

    def _note(self, account: str) -> None:
        purse = self.purses[account]
        self.batch.balances[account, self.today] = (purse.limit, purse.held, purse.spent)


def _used(entry: Spent | Expired | Freed, held: HeldGrant) -> int:
    if isinstance(entry, Spent):
        return entry.used
    return held.amount if isinstance(entry, Expired) else 0


def _site(entry: Entry) -> str:
    """Whose entry it is by its own words; "" where only its grant says so, or nobody's."""
    account = getattr(entry, "account", "")
    return str(getattr(entry, "site", "") or account.rpartition("/")[0])


def _words(entry: Entry, site: str, held: HeldGrant | None) -> Iterator[str]:
    """What an entry is found by: its names, the beginnings of its digests, and pairs such as ``kind=refused``."""
    yield f"kind={kind_of(entry)}"
    if site:
        yield f"site={site}"
        yield site
    if held is not None:
        yield from tokens(f"{held.run} {held.mechanism} {held.account}")
    for f in fields(entry):
        yield from _of_field(f.name, getattr(entry, f.name))


def _of_field(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bytes):
        if name != "claim" and value:
            yield value.hex()[:CUT]
    elif isinstance(value, list):
        yield from tokens(" ".join(value))
        if name == "findings":
            yield from (f"rule={word}" for rule in value for word in tokens(rule))
    elif isinstance(value, str):
        found = tokens(value)
        yield from found
        if name in {"stage", "level", "mechanism", "run", "person"} and len(found) == 1:
            yield f"{name}={found[0]}"
