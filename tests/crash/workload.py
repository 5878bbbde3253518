"""What the ledger under test is asked to write, and how what is found after a crash is judged.

A plan comes from a seed alone: enrolments and accounts, grants with every end they can have, entries of several
accounts under one key, several drafts in one commit, refusals, and drafts that break the books and must leave no
trace. The plan knows every byte that the ledger must hold, from the encoder of entries and sums of its own: the store
is not asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import apsw
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.ledger.backends import sqlite
from policies.ledger.entries import (
    Admitted,
    Enrolled,
    Entry,
    Expired,
    Freed,
    InvalidEntryError,
    Issued,
    Opened,
    Record,
    Refused,
    Reserved,
    Revoked,
    Sent,
    Spent,
    encode,
)
from policies.ledger.merkle import CompactRange, leaf_hash
from policies.ledger.state import KeyReusedError
from policies.ledger.store import AppendRequest, LedgerBackend, Store

ORIGIN: Final = "lazaret/crash"
KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
START: Final = 1_700_000_000
SITES: Final = ("a", "b")
LOST: Final = "acknowledged entries lost"
LOG_PAGES: Final = 8
LIMIT: Final = 60  # of every account; grants take 1 to 9, so that accounts run dry within one plan


def hurry(connection: apsw.Connection) -> None:
    """Make a new connection's log and cache small, so that a short life goes through checkpoints and spills too.

    The size at which SQLite's own checkpoints begin, and the product's, if it has one.
    """
    vars(sqlite)["CHECKPOINT"] = LOG_PAGES
    connection.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}").fetchall()
    connection.execute("PRAGMA cache_size=10")


@dataclass(frozen=True, slots=True)
class Append:
    """One draft under its key, and where its first entry must stand; None if the books must refuse it."""

    key: str
    draft: AppendRequest
    first: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a workload, each of them one commit, and everything that they must come to."""

    steps: tuple[tuple[Append, ...], ...]
    ends: tuple[int, ...]  # the ledger's size after each step
    bodies: tuple[bytes, ...]
    balances: tuple[dict[str, tuple[int, int]], ...]  # after each step: account -> (held, spent)
    root: bytes


@dataclass(slots=True)
class Clock:
    """Tells the same time to the same step, however often it is tried."""

    step: int = 0

    def __call__(self) -> int:
        return START + self.step


@dataclass(slots=True)
class _Grant:
    reserved: Reserved
    sent: bool = False


@dataclass(slots=True)
class _Planner:
    """Makes steps, and keeps accounts by plain sums of its own."""

    dice: Random
    bodies: list[bytes] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    spent: dict[str, int] = field(default_factory=dict)
    open: list[_Grant] = field(default_factory=list)
    at: int = START
    names: int = 0
    numbers: dict[str, str] = field(default_factory=dict)  # site -> its certificate

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def envelope(self) -> bytes:
        """Opaque to the store; sometimes longer than a page."""
        return self.dice.randbytes(self.dice.choice((60, 300, 300, 900, 5000)))

    def append(self, key: str, entries: Sequence[Entry], envelopes: tuple[bytes, ...] = ()) -> Append:
        """Take a draft into the plan."""
        first = len(self.bodies)
        for i, entry in enumerate(entries):
            self.bodies.append(encode(Record(self.at, f"{key}+{i}" if i else key, entry)))
        return Append(key, AppendRequest(tuple(entries), envelopes), first)

    def enrol(self, site: str) -> Append:
        envelope = self.envelope()
        key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(site.encode()).digest())
        public = key.public_key().public_bytes_raw()
        enrolled = Enrolled(site, public, bytes(32), _digest(envelope), "")
        accounts = (Opened(f"{site}/rdp", LIMIT, 7, "3.0", "1e-06"), Opened(f"{site}/k", LIMIT, 0, "", ""))
        for account in accounts:
            self.held[account.account] = self.spent[account.account] = 0
        return self.append(f"enrol-{site}", (enrolled, *accounts), (envelope,))

    def reserve(self) -> Append:
        """One account or one of each site, in one draft; where a budget does not reach, a refusal."""
        key, envelope, kind = self.name("r"), self.envelope(), self.dice.choice(("rdp", "k"))
        sites = SITES if self.dice.random() < 0.3 else (self.dice.choice(SITES),)
        amount = self.dice.randint(1, 9)
        accounts = [f"{site}/{kind}" for site in sites]
        if any(self.held[a] + self.spent[a] + amount > LIMIT for a in accounts):
            return self.append(key, (Refused(key, sites[0], "m", "reservation", ["budget"], _digest(envelope)),))
        drafted = []
        for site, account in zip(sites, accounts, strict=True):
            drafted.append(Reserved(f"{key}-{site}", site, "", "m", account, amount, b"{}", _digest(envelope)))
            self.held[account] += amount
        self.open += [_Grant(reserved) for reserved in drafted]
        return self.append(key, drafted, (envelope,))

    def settle(self) -> Append:
        """Some end, or the setting out, of a grant that is open."""
        grant = self.dice.choice(self.open)
        r, envelope = grant.reserved, self.envelope()
        how = self.dice.choice(("admitted", "expired", "freed", "sent"))
        if how == "sent" and not grant.sent:
            grant.sent = True
            sent = Sent(f"out-{r.grant}", r.grant, r.site, "", 0, "m", 1, bytes(32), _digest(envelope))
            return self.append(f"sent-{r.grant}", (sent,), (envelope,))
        self.open.remove(grant)
        self.held[r.account] -= r.amount
        if how == "freed" and not grant.sent:
            return self.append(f"end-{r.grant}", (Freed(r.grant, "refused", _digest(envelope)),), (envelope,))
        if how == "admitted":
            used = self.dice.randint(1, r.amount)
            self.spent[r.account] += used
            release = (
                f"out-{r.grant}",
                r.grant,
                r.site,
                "",
                0,
                "m",
                "B",
                used,
                b"{}",
                bytes(32),
                _digest(envelope),
                "",
            )
            given_back = _digest(envelope) if used < r.amount else b""
            ends = (Admitted(*release), Spent(r.grant, used, "finished", given_back))
            return self.append(f"end-{r.grant}", ends, (envelope,))
        self.spent[r.account] += r.amount
        return self.append(f"end-{r.grant}", (Expired(r.grant, "restart"),))

    def certify(self) -> Append:
        """A site's certificate is renewed: the new one is issued and the old one revoked, in one draft."""
        site, number = self.dice.choice(SITES), f"{len(self.bodies) + 1:x}"
        old = self.numbers.get(site)
        self.numbers[site] = number
        entries: list[Entry] = [Issued(site, number, self.dice.randbytes(32), self.at + 86_400)]
        if old:
            entries.append(Revoked(site, old, "renewed"))
        return self.append(f"issue-{number}", entries)

    def overspend(self) -> Append:
        """A sound entry and one that no account can pay: neither may stay."""
        key = self.name("over")
        sound = Refused(key, "a", "m", "reservation", ["budget"], bytes(32))
        unpaid = Reserved(key, "a", "", "m", "a/rdp", LIMIT + 1, b"{}", bytes(32))
        return Append(key, AppendRequest((sound, unpaid)), None)

    def step(self) -> tuple[Append, ...]:
        """One commit of one to three drafts."""
        appends = []
        for _ in range(self.dice.choice((1, 1, 2, 3))):
            settles = self.open and self.dice.random() < 0.5
            appends.append(self.settle() if settles else self.reserve())
            if self.dice.random() < 0.2:
                appends.append(self.certify())
            if self.dice.random() < 0.04:
                appends.append(self.overspend())
        return tuple(appends)


def _digest(envelope: bytes) -> bytes:
    return hashlib.sha256(envelope).digest()


def plan(seed: int, commits: int = 10) -> Plan:
    """The workload of a seed: so many commits."""
    planner, steps, ends, balances = _Planner(Random(seed)), [], [], []
    for i in range(commits):
        planner.at = START + i
        steps.append((planner.enrol(SITES[i]),) if i < len(SITES) else planner.step())
        ends.append(len(planner.bodies))
        balances.append({a: (planner.held[a], planner.spent[a]) for a in planner.held})
    tree = CompactRange()
    for body in planner.bodies:
        tree.append(leaf_hash(body))
    return Plan(tuple(steps), tuple(ends), tuple(planner.bodies), tuple(balances), tree.root())


def drive(store: Store, clock: Clock, plan: Plan, steps: range, acknowledged: Callable[[int], object]) -> None:
    """Ask the store for these steps of the plan, telling the ledger's size after each when its commit has returned.

    Asked again after a crash, what was written gets the same answer and the rest is written.

    Raises:
        AssertionError: an answer is not the plan's, or an overspending draft was taken.
        LedgerStoppedError: the disk failed.
    """
    for i in steps:
        clock.step = i
        with store.exclusive():
            for append in plan.steps[i]:
                _ask(store, append)
        acknowledged(plan.ends[i])


def _ask(store: Store, append: Append) -> None:
    try:
        lines = store.append(append.key, append.draft)
    except InvalidEntryError:
        assert append.first is None, "a sound draft was refused"
        return
    assert append.first is not None, "an overspending draft was taken"
    places = list(range(append.first, append.first + len(append.draft.entries)))
    assert [line.seq for line in lines] == places, "an entry stands in another place"
    assert [line.record.entry for line in lines] == list(append.draft.entries), "another entry was answered"


def judge(plan: Plan, store: Store, disk: LedgerBackend, acknowledged: int) -> str:
    """What is wrong with a ledger that was found after a crash; empty if nothing is.

    Args:
        plan: what it should hold a beginning of.
        store: opened on the disk.
        disk: where the entries are.
        acknowledged: so many entries were told to be durable.
    """
    found = tuple(disk.bodies())
    if len(found) < acknowledged:
        return LOST
    if found != plan.bodies[: len(found)]:
        return "entries are not the planned ones"
    if found and len(found) not in plan.ends:
        return "half a commit"
    balances = {name: (a.held, a.spent) for name, a in store.state.accounts.items()}
    if balances != (plan.balances[plan.ends.index(len(found))] if found else {}):
        return "balances are not the entries' sums"
    if not all(held + spent <= LIMIT for held, spent in balances.values()):
        return "overspent"
    drafts = [a for step in plan.steps for a in step if a.first is not None and a.first < len(found)]
    if any(disk.envelope(_digest(e)) != e for a in drafts for e in a.draft.envelopes):
        return "an envelope is missing"
    return ""


def finished(plan: Plan, store: Store, disk: LedgerBackend) -> str:
    """What is wrong with a ledger on which the whole plan was driven; empty if it is what the plan comes to."""
    head = disk.head()
    if head is None or (head.size, head.root) != (len(plan.bodies), plan.root):
        return "another final root"
    try:
        store.append(plan.steps[0][0].key, AppendRequest((Expired("x", "restart"),)))
    except KeyReusedError:
        return judge(plan, store, disk, len(plan.bodies))
    return "a key was taken for other content"
