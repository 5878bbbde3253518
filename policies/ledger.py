"""Ledger entries and the fold: account state is what the entries say, and an auditor folds them again.

Pure: no disk, no clock (``at`` is told, and no decision depends on it). Amounts are whole numbers: nano-nats
of Rényi divergence at the account's one order (kind ``rdp``), or releases per patient (kind ``k``). Kinds never
add (design P4). A grant is held when reserved and then spent or freed; whatever is unknown is spent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from policies import cbor


class InvalidEntry(ValueError):
    """The entry breaks a rule of the books; it must not be appended, and a ledger that holds it is unsound."""


class KeyReused(ValueError):
    """An idempotency key came back with other content."""


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A site's signing key and policy were approved."""

    site: str
    sign_key: bytes  # Ed25519, raw
    policy: bytes  # SHA-256 of the site's policy text
    envelope: bytes  # SHA-256 of the sealed enrolment


@dataclass(frozen=True, slots=True)
class Opened:
    """An account; its limit and, for ``rdp``, its order are fixed here."""

    account: str  # "<site>/rdp" | "<site>/k"
    limit: int
    order: int  # 0 for kind k
    epsilon: str  # the budget as people state it, decimal text; "" for kind k
    delta: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """A grant: the claim's whole price is held."""

    grant: str
    site: str
    run: str
    mechanism: str
    account: str
    amount: int
    claim: bytes  # canonical JSON of the claim
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """A reservation or release was refused, or declined by the site itself, with each reason's rule."""

    subject: str  # the grant's or release's id
    site: str
    mechanism: str
    stage: str  # "reservation" | "release" | "declined"
    findings: list[str]
    envelope: bytes  # empty when nothing was validly signed by that site


@dataclass(frozen=True, slots=True)
class Sent:
    """In a site's own ledger: this release is about to leave. Durable before a byte of it does."""

    release: str
    grant: str
    site: str
    run: str
    round: int
    mechanism: str
    artifact: bytes  # SHA-256
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Admitted:
    """A release was admitted; ``used`` is what its grant has consumed so far, this release included."""

    release: str
    grant: str
    site: str
    run: str
    round: int
    mechanism: str
    level: str
    used: int
    claim: bytes
    artifact: bytes  # SHA-256
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Spent:
    """The grant is closed and its whole amount is spent."""

    grant: str
    why: str  # "released" | "expired"


@dataclass(frozen=True, slots=True)
class Freed:
    """The grant is closed without being spent: the site's signed word that nothing was read or released."""

    grant: str
    why: str  # "refused" (by the other ledger) | "declined"
    envelope: bytes  # SHA-256 of the site's sealed settlement, which says that nothing was read or released


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """A round of a federated run was aggregated from these sites' admitted updates."""

    run: str
    round: int
    sites: list[str]
    model: bytes  # SHA-256 of the aggregate's parameters


Entry = Enrolled | Opened | Reserved | Refused | Sent | Admitted | Spent | Freed | RoundClosed
_KINDS: Final[Mapping[str, type[Entry]]] = MappingProxyType(
    {
        "enrolled": Enrolled,
        "opened": Opened,
        "reserved": Reserved,
        "refused": Refused,
        "sent": Sent,
        "admitted": Admitted,
        "spent": Spent,
        "freed": Freed,
        "round-closed": RoundClosed,
    }
)
_CHECKS: Final[Mapping[str, type]] = MappingProxyType({"int": int, "str": str, "bytes": bytes})
GENESIS: Final = bytes(32)


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the ledger: an entry, when it was written, under which idempotency key, after which leaf."""

    at: int  # seconds since 1970, informative only
    key: str
    previous: bytes  # SHA-256 of the preceding record's bytes
    entry: Entry


def kind_of(entry: Entry) -> str:
    """The entry's name in the encoding."""
    return next(name for name, cls in _KINDS.items() if type(entry) is cls)


def encode(record: Record) -> bytes:
    """Deterministic CBOR of a record."""
    body = {f.name: getattr(record.entry, f.name) for f in fields(record.entry)}
    return cbor.encode(
        {
            "at": record.at,
            "body": body,
            "key": record.key,
            "prev": record.previous,
            "type": kind_of(record.entry),
        }
    )


def decode(raw: bytes) -> Record:
    """The record of :func:`encode`.

    Raises:
        cbor.MalformedEntry: not deterministic CBOR.
        InvalidEntry: not a known entry with exactly its fields.
    """
    outer = cbor.decode(raw)
    if not isinstance(outer, dict) or set(outer) != {"at", "body", "key", "prev", "type"}:
        raise InvalidEntry("not a record")
    cls, body = _KINDS.get(str(outer["type"])), outer["body"]
    if cls is None or not isinstance(body, dict) or set(body) != {f.name for f in fields(cls)}:
        raise InvalidEntry("unknown entry, or missing or unknown fields")
    for f in fields(cls):
        value = body[f.name]
        if str(f.type) == "list[str]":
            good = isinstance(value, list) and all(type(v) is str for v in value)
        else:
            good = type(value) is _CHECKS[str(f.type)]
        if not good:
            raise InvalidEntry(f"{f.name} has another type")
    at, key, previous = outer["at"], outer["key"], outer["prev"]
    if type(at) is not int or type(key) is not str or type(previous) is not bytes or len(previous) != 32:
        raise InvalidEntry("not a record")
    return Record(at, key, previous, cls(**body))  # type: ignore[arg-type]


def fingerprint(entry: Entry) -> bytes:
    """What an idempotency key stands for: the entry without time and place."""
    return hashlib.sha256(encode(Record(0, "", GENESIS, entry))).digest()


@dataclass(slots=True)
class Account:
    """A lifetime budget of one kind for one site's patients."""

    opened: Opened
    held: int = 0
    spent: int = 0

    @property
    def left(self) -> int:
        """What may still be reserved."""
        return self.opened.limit - self.held - self.spent


@dataclass(slots=True)
class Grant:
    """Budget reserved for one release, or for one site's part in one federated run."""

    reserved: Reserved
    state: str = "held"  # "held" | "spent" | "freed"
    used: int = 0
    last_round: int = 0


@dataclass(slots=True)
class State:
    """The fold of a ledger's entries."""

    sites: dict[str, Enrolled] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)
    sent: dict[str, Sent] = field(default_factory=dict)
    releases: dict[str, Admitted] = field(default_factory=dict)
    envelopes: set[bytes] = field(default_factory=set)  # of everything reviewed as a release, admitted or not
    rounds: dict[str, int] = field(default_factory=dict)  # run -> last closed round
    updates: set[tuple[str, int, str]] = field(default_factory=set)  # admitted (run, round, site)
    aggregated: set[tuple[str, int, str]] = field(default_factory=set)  # those that a closed round counts
    keys: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # key -> (seq, fingerprint)
    size: int = 0
    last: bytes = GENESIS

    def apply(self, record: Record) -> None:
        """Take one more record into the books.

        Raises:
            InvalidEntry: the record breaks a rule; the state must then be thrown away.
        """
        if record.previous != self.last:
            raise InvalidEntry("the record does not follow its predecessor")
        if record.key in self.keys:
            raise InvalidEntry("an idempotency key is used twice")
        _APPLY[type(record.entry)](self, record.entry)
        self.keys[record.key] = (self.size, fingerprint(record.entry))
        self.last = hashlib.sha256(encode(record)).digest()
        self.size += 1

    def open_grant(self, name: str) -> Grant:
        """The held grant of this name.

        Raises:
            InvalidEntry: there is none, or it was resolved before.
        """
        grant = self.grants.get(name)
        if grant is None or grant.state != "held":
            raise InvalidEntry("no open grant of that name")
        return grant

    def _enrolled(self, e: Enrolled) -> None:
        if e.site in self.sites:
            raise InvalidEntry("the site is enrolled already")
        if len(e.sign_key) != 32 or any(e.sign_key == known.sign_key for known in self.sites.values()):
            raise InvalidEntry("not an Ed25519 key, or another site's")
        self.sites[e.site] = e

    def _opened(self, e: Opened) -> None:
        if e.account in self.accounts:
            raise InvalidEntry("the account is open already")
        kind = e.account.rpartition("/")[2]
        if not ((kind == "rdp" and e.order >= 2) or (kind == "k" and e.order == 0)):
            raise InvalidEntry("an account is of kind rdp with an order, or of kind k without")
        self.accounts[e.account] = Account(e)

    def _reserved(self, e: Reserved) -> None:
        account = self.accounts.get(e.account)
        if account is None or e.account.rpartition("/")[0] != e.site:
            raise InvalidEntry("no such account of that site")
        if e.grant in self.grants:
            raise InvalidEntry("the grant exists already")
        if not 0 < e.amount <= account.left:
            raise InvalidEntry("the account would be overspent")
        account.held += e.amount
        self.grants[e.grant] = Grant(e)

    def _refused(self, e: Refused) -> None:
        if not e.findings:
            raise InvalidEntry("a refusal has a reason")
        if e.stage == "release" and e.envelope:
            self.envelopes.add(e.envelope)

    def _sent(self, e: Sent) -> None:
        grant = self.open_grant(e.grant).reserved
        if (e.site, e.run, e.mechanism) != (grant.site, grant.run, grant.mechanism):
            raise InvalidEntry("the grant is another's")
        if e.release in self.sent:
            raise InvalidEntry("the release was sent before")
        self.sent[e.release] = e

    def _admitted(self, e: Admitted) -> None:
        grant = self.open_grant(e.grant)
        if bool(e.run) is not (e.round >= 1):
            raise InvalidEntry("a release of a run has a round, and no other has")
        if (e.site, e.run, e.mechanism) != (
            grant.reserved.site,
            grant.reserved.run,
            grant.reserved.mechanism,
        ):
            raise InvalidEntry("the grant is another's")
        if e.release in self.releases or e.envelope in self.envelopes:
            raise InvalidEntry("the release was reviewed before")
        if not grant.used < e.used <= grant.reserved.amount or (e.run and e.round <= grant.last_round):
            raise InvalidEntry("the grant does not cover the release")
        grant.used, grant.last_round = e.used, e.round
        self.releases[e.release] = e
        self.envelopes.add(e.envelope)
        if e.run:
            self.updates.add((e.run, e.round, e.site))

    def _spent(self, e: Spent) -> None:
        grant = self.open_grant(e.grant)
        account = self.accounts[grant.reserved.account]
        account.held -= grant.reserved.amount
        account.spent += grant.reserved.amount
        grant.state = "spent"

    def _freed(self, e: Freed) -> None:
        grant = self.open_grant(e.grant)
        if grant.used or any(sent.grant == e.grant for sent in self.sent.values()):
            raise InvalidEntry("something was released under the grant; it cannot be freed")
        self.accounts[grant.reserved.account].held -= grant.reserved.amount
        grant.state = "freed"

    def _round_closed(self, e: RoundClosed) -> None:
        if e.round != self.rounds.get(e.run, 0) + 1:
            raise InvalidEntry("rounds close one after the other")
        if e.sites != sorted(set(e.sites)) or len(e.model) != 32:
            raise InvalidEntry("the sites of a round are sorted, each once, and a model has a SHA-256")
        if not e.sites or not all((e.run, e.round, site) in self.updates for site in e.sites):
            raise InvalidEntry("the round counts a site without an admitted update")
        self.rounds[e.run] = e.round
        self.aggregated.update((e.run, e.round, site) for site in e.sites)


_APPLY: Final[Mapping[type[Entry], Callable[[State, Any], None]]] = {
    Enrolled: State._enrolled,
    Opened: State._opened,
    Reserved: State._reserved,
    Refused: State._refused,
    Sent: State._sent,
    Admitted: State._admitted,
    Spent: State._spent,
    Freed: State._freed,
    RoundClosed: State._round_closed,
}
