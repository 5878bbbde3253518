"""The entries that say what persons decided: who is in office, what was asked for, approved and set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Appointed:
    """A person who may approve, with a role. The first of each role is free; every other needs those in office."""

    person: str
    role: str
    public: bytes  # Ed25519, raw
    serial: str  # of the approved proposal; "" for the first of a role


@dataclass(frozen=True, slots=True)
class Dismissed:
    """A person is no longer in office: what they approve counts no more. Never the last of an approving role."""

    person: str
    serial: str  # of the approved proposal; "" where nobody may approve


@dataclass(frozen=True, slots=True)
class Requested:
    """A person asks for something, in words that others may approve: exactly these, and never the one who asked."""

    person: str
    serial: str
    proposal: bytes  # SHA-256, see :func:`policies.entries.proposal`
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Approved:
    """A person signed a proposal: the fold counts roles, the envelope holds the signature."""

    person: str
    serial: str
    proposal: bytes  # SHA-256, see :func:`proposal`
    envelope: bytes


@dataclass(frozen=True, slots=True)
class LimitSet:
    """An account's new limit: raised by two persons of different roles, lowered by one of them."""

    account: str
    limit: int
    epsilon: str  # the budget as people state it; "" for kind k
    serial: str


@dataclass(frozen=True, slots=True)
class Waived:
    """After a restore: a site that will not come back. Two persons agreed, and its accounts are spent whole."""

    site: str
    serial: str
