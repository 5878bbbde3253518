"""The fold against a small reference, and each of its rules broken by one entry that breaks nothing else.

``python -m tests.mutation`` changes ``policies/ledger/state.py`` in every small way, and one of these tests must
notice.
"""

from __future__ import annotations

import copy
import hashlib
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.ledger.approvals import ROLES, Proposal
from policies.ledger.entries import (
    KINDS,
    Admitted,
    Amended,
    Appointed,
    Approved,
    Dismissed,
    Enrolled,
    Entry,
    Expired,
    Freed,
    InvalidEntryError,
    Issued,
    LimitSet,
    Opened,
    Presented,
    Record,
    Recovered,
    Refused,
    Requested,
    Reserved,
    Restored,
    Revoked,
    RoundClosed,
    Sent,
    Spent,
    Waived,
    _decode_slowly,
    decode,
    encode,
    proposal,
)
from policies.ledger.state import Account, Grant, KeyReusedError, State
from policies.ledger.store import AppendRequest, Batch, SealedHead, Store

LIMIT = 100


def key_of(text: str) -> bytes:
    """An Ed25519 public key of its own for each text."""
    return Ed25519PrivateKey.from_private_bytes(b32(text)).public_key().public_bytes_raw()


def b32(text: str) -> bytes:
    """32 bytes that stand for a digest or a key."""
    return text.encode().ljust(32, b".")


def ledger(*entries: Entry) -> State:
    """The fold of these entries."""
    state = State()
    for i, entry in enumerate(entries):
        state.apply(Record(i, f"k{i}", entry))
    return state


def refuses(state: State, entry: Entry, why: str) -> None:
    """The entry is refused for that reason, and the books are as before."""
    before = copy.deepcopy(state)
    with pytest.raises(InvalidEntryError, match=why):
        state.apply(Record(0, "refused", entry))
    assert state == before


def takes(state: State, entry: Entry) -> State:
    """The books with one more entry, written and read back as it is on the disk."""
    after = copy.deepcopy(state)
    after.apply(decode(encode(Record(0, "another key", entry))))
    return after


def _also(state: State, entry: Entry) -> State:
    """The books with one more entry under a fresh key."""
    after = copy.deepcopy(state)
    after.apply(Record(0, f"also {state.size}", entry))
    return after


def said(limit: int) -> str:
    """The epsilon that allows this many nano-nats: at order 2 and delta 1/2 the two are the same."""
    return repr((limit + 0.5) * 1e-9)


def opened(site: str = "m", kind: str = "rdp", limit: int = LIMIT) -> Opened:
    if kind == "rdp":
        return Opened(f"{site}/rdp", limit, 2, said(limit), "0.5")
    return Opened(f"{site}/k", limit, 0, "", "")


def to(limit: int, serial: str = "s", name: str = "m/rdp") -> LimitSet:
    """A new limit of an account of kind rdp."""
    return LimitSet(name, limit, said(limit), serial)


def reserved(grant: str = "g", amount: int = 40, site: str = "m", run: str = "run", account: str = "") -> Reserved:
    return Reserved(grant, site, run, "mech", account or f"{site}/rdp", amount, b"{}", b32(grant))


def sent(used: int = 10, release: str = "r1", n: int = 1, grant: str = "g") -> Sent:
    return Sent(release, grant, "m", "run", n, "mech", used, b32("a"), b32(release))


def admitted(used: int = 10, release: str = "r1", n: int = 1, grant: str = "g") -> Admitted:
    return Admitted(release, grant, "m", "run", n, "mech", "A", used, b"{}", b32("a"), b32(release), "")


def enrolled(site: str = "m", serial: str = "") -> Enrolled:
    return Enrolled(site, key_of(site), b32("policy"), b32(f"envelope of {site}"), serial)


def again(site: str = "m", serial: str = "") -> Enrolled:
    """The same site's next request: the one of before enrols nobody twice."""
    return replace(enrolled(site, serial), envelope=b32(f"next envelope of {site}"))


def issued(number: str = "1f", site: str = "m") -> Issued:
    return Issued(site, number, b32("certificate"), 1)


def revoked(number: str = "", site: str = "m") -> Revoked:
    return Revoked(site, number, "lost")


def appointed(person: str, role: str, serial: str = "") -> Appointed:
    return Appointed(person, role, key_of(person), serial)


C, H, O = appointed("cara", "compliance"), appointed("hugo", "hospital"), appointed("olaf", "operator")  # noqa: E741


def agreed(serial: str, action: str, subject: str, value: str, *persons: str) -> list[Approved]:
    """The approvals of these persons."""
    words = proposal(serial, action, subject, value)
    return [Approved(person, serial, words, b32(f"{person} {serial}")) for person in persons or ("cara", "hugo")]


def asks(serial: str, action: str, subject: str, value: str, person: str = "olaf") -> Requested:
    """What a person asks for."""
    return Requested(person, serial, proposal(serial, action, subject, value), b32(f"{person} asks {serial}"))


def appointing(serial: str, *persons: str) -> list[Approved]:
    """The approvals of olaf, who runs the machine."""
    return agreed(serial, "appoint", "olaf", f"operator {O.public.hex()}", *persons)


def enrolling(serial: str, *persons: str, site: str = "m") -> list[Approved]:
    """The approvals of a site's enrolment."""
    return agreed(serial, "enrol", site, enrolled(site).envelope.hex(), *persons)


def restored(size: int, epoch: int = 2, root: bytes = bytes(32), nonce: str = "n2") -> Restored:
    return Restored(epoch, size, root, nonce)


def presented(site: str = "m", grants: int = 0, nonce: str = "n2") -> Presented:
    return Presented(site, nonce, grants, b32("e"))


def amended(number: int, site: str = "m") -> Amended:
    return Amended(site, number, b32("p"), b32(f"amendment {number}"))


def recovered(grant: str = "lost", amount: int = 30, site: str = "m", account: str = "m/rdp") -> Recovered:
    return Recovered(grant, site, "run", "mech", account, amount, b"{}", b32(grant))


GRANTED = (opened(), reserved())
PERSONS = (C, H)
CORA = appointed("cora", "compliance", "c")
COMING = (C, H, *agreed("c", "appoint", "cora", f"compliance {CORA.public.hex()}"), CORA)
LEFT = (*COMING, *agreed("l", "dismiss", "cora", "compliance"), Dismissed("cora", "l"))
AWAITED = (enrolled(), opened(), restored(2))  # a restored ledger that waits for site m
BARRED = (enrolled(), opened(), reserved(), revoked())  # what site m holds outlives its membership

REFUSED = Refused("lost", "m", "mech", "reservation", ["budget"], b32("lost"))

Case = tuple[str, tuple[Entry, ...], Entry]


def cases(why: str, before: tuple[Entry, ...], *entries: Entry) -> Iterator[Case]:
    """Each of the entries is refused for the same reason."""
    for entry in entries:
        yield why, before, entry


BROKEN: list[Case] = [
    # enrolled, amended
    *cases("enrolled already", (enrolled(),), replace(enrolled(), sign_key=key_of("other"))),
    *cases("not an Ed25519 key", (), replace(enrolled(), sign_key=bytes(31)), replace(enrolled(),
           sign_key=bytes(33))),
    *cases("or another site's", (enrolled(), enrolled("n")), replace(enrolled("z"), sign_key=key_of("m"))),
    *cases("or another site's", (enrolled(), enrolled("n")), replace(enrolled("z"), sign_key=key_of("n"))),
    *cases("not enrolled", (enrolled(),), amended(1, "n")),
    *cases("not newer", (enrolled(),), amended(0), amended(-1)),
    *cases("not newer", (enrolled(), amended(3)), amended(3), amended(2)),
    *cases("or was revoked", (enrolled(), revoked()), amended(1)),
    *cases("another site's", (enrolled(), enrolled("n"), revoked()), replace(again(), sign_key=key_of("n"))),
    *cases("has no serial", (), enrolled(serial="s")),
    *cases("has no serial", (O,), enrolled(serial="s")),
    *cases("has no serial", (enrolled(), revoked()), again(serial="s")),
    *cases("enrolled before", (enrolled(), revoked()), enrolled(), replace(enrolled(), sign_key=key_of("another"))),
    *cases("enrolled before", (enrolled(), revoked(), again(), revoked()), enrolled(), again()),
    *cases("enrolled before", (enrolled(), *PERSONS, revoked(), *enrolling("s")), enrolled(serial="s")),
    *cases("enrolled before", (enrolled(), *PERSONS, *enrolling("s"), revoked()), enrolled(serial="s")),
    *cases("1 role.*0 did", (C,), enrolled(), enrolled(serial="s")),
    *cases("1 role.*0 did", (O, H), enrolled(), enrolled(serial="s")),
    *cases("2 role.*0 did", PERSONS, enrolled(), enrolled(serial="s")),
    *cases("2 role.*1 did", (*PERSONS, *enrolling("s", "cara")), enrolled(serial="s")),
    *cases("2 role.*0 did", (*PERSONS, *enrolling("s")), enrolled(), enrolled(serial="t"), enrolled("n", "s"),
           replace(enrolled(serial="s"), envelope=b32("another request"))),
    *cases("2 role.*0 did", (*PERSONS, *agreed("s", "waive", "m", enrolled().envelope.hex())), enrolled(serial="s")),
    *cases("2 role.*0 did", (enrolled(), *PERSONS, *enrolling("s"), revoked()), again(serial="s"), again()),
    *cases("2 role.*0 did", (*PERSONS, *enrolling("s"), enrolled(serial="s"), revoked()), again(serial="s"), again()),
    # certificates
    *cases("not barred", (enrolled(),), issued(site="n"), issued(site="l")),
    *cases("not barred", BARRED, issued()),
    *cases("not a certificate's number", (enrolled(),), *(issued(n) for n in (
        "", "0", "01", "1F", "g", "0x1", "1 ", "-1", "1" * 41))),
    *cases("used before", (enrolled(), enrolled("n"), issued()), issued(), issued(site="n"),
           replace(issued(), not_after=9)),
    *cases("used before", (enrolled(), issued(), revoked("1f")), issued()),
    *cases("used before", (enrolled(), issued(), revoked(), again()), issued()),
    *cases("a SHA-256 and an end", (enrolled(),), *(replace(issued(), certificate=bytes(n)) for n in (0, 31, 33)),
           *(replace(issued(), not_after=at) for at in (0, -1))),
    *cases("a short word", (enrolled(), issued()), *(replace(revoked("1f"), why=why) for why in (
        "", "Lost", "by post", "x" * 65))),
    *cases("not enrolled, or barred", (enrolled(),), revoked(site="n"), revoked(site="l")),
    *cases("not enrolled, or barred", (*BARRED, enrolled("n")), revoked(), revoked("1f")),
    *cases("not issued to the site", (enrolled(), enrolled("a"), enrolled("z"), issued()), revoked("1e"),
           revoked("20"), revoked("1f", "a"), revoked("1f", "z")),
    *cases("revoked already", (enrolled(), issued(), revoked("1f")), revoked("1f")),
    *cases("granted to a site that was revoked", BARRED, reserved("h", 1)),
    *cases("admitted of a site that was revoked", BARRED, admitted()),
    # opened
    *cases("open already", (opened(), opened("n")), opened(), opened(limit=1), opened("n")),
    *cases("of kind rdp with an order", (), *(replace(opened(), order=order) for order in (0, 1))),
    *cases("of kind k without", (), *(replace(opened(kind="k"), order=order) for order in (-1, 1, 2, 4))),
    *cases("of kind", (), *(replace(opened(), account=a) for a in ("m/gold", "m/a", "m/z", "m/", "m", "rdp/m"))),
    *cases("of kind", (), *(replace(opened(kind="k"), account=a) for a in ("m/gold", "m/a", "m/z", "m/", "m",
           "k/m"))),
    # persons
    *cases("no such role", (), replace(C, role="friend"), replace(C, role="")),
    *cases("not an Ed25519 key", (), replace(C, public=bytes(31)), replace(C, public=bytes(33))),
    *cases("appointed already", (C,), replace(C, public=key_of("other"), role="hospital")),
    *cases("appointed already", (C, H), replace(O, public=C.public), replace(O, public=H.public)),
    *cases("first of a role", (), *(replace(p, serial="s") for p in (C, H, O))),
    *cases("first of a role", (C,), replace(H, serial="s")),
    *cases("first of a role", (O,), replace(H, serial="s"), appointed("otto", "operator", "s")),
    *cases("1 role.*0 did", (C,), O, replace(O, serial="s"), appointed("cora", "compliance")),
    *cases("1 role.*0 did", (H,), O, replace(O, serial="s"), appointed("hans", "hospital")),
    *cases("2 role.*0 did", PERSONS, O, replace(O, serial="s"), appointed("cora", "compliance")),
    *cases("2 role.*1 did", (*PERSONS, *appointing("s", "cara")), replace(O, serial="s")),
    *cases("2 role.*0 did", (*PERSONS, *appointing("s")), replace(O, serial="t"),
           replace(O, serial="s", public=key_of("another")), replace(O, serial="s", role="hospital"),
           replace(O, serial="s", person="otto")),
    *cases("2 role.*0 did", (*PERSONS, *agreed("s", "limit", "olaf", f"operator {O.public.hex()}")),
           replace(O, serial="s")),
    # approvals
    *cases("may approve", (C, H), *agreed("s", "limit", "m/rdp", "0.1", "nobody")),
    *cases("may approve", (O, C), *agreed("s", "limit", "m/rdp", "0.1", "olaf")),
    *cases("has a serial", PERSONS, *agreed("", "limit", "m/rdp", "0.1", "cara")),
    *cases("has approved it", (*PERSONS, *agreed("s", "limit", "m/rdp", "0.1", "cara")),
           *agreed("s", "limit", "m/rdp", "0.2", "cara")),
    *cases("closed", (*PERSONS, opened(), *agreed("s", "limit", "m/rdp", said(9), "cara"), to(9)),
           *agreed("s", "limit", "m/rdp", said(9), "hugo")),
    # requests, and those who asked
    *cases("requests", PERSONS, asks("s", "limit", "m/rdp", "0.1"), asks("s", "limit", "m/rdp", "0.1", "nobody")),
    *cases("requests", (appointed("aude", "auditor"),), asks("s", "limit", "m/rdp", "0.1", "aude")),
    *cases("requests", (O, Dismissed("olaf", "")), asks("s", "limit", "m/rdp", "0.1")),
    *cases("serial of its own", (O, C), asks("", "limit", "m/rdp", "0.1")),
    *cases("serial of its own", (O, C, asks("s", "limit", "m/rdp", "0.1")), asks("s", "limit", "m/rdp", "0.1"),
           asks("s", "limit", "m/rdp", "0.2", "cara")),
    *cases("serial of its own", (O, C, *agreed("s", "limit", "m/rdp", "0.1", "cara")),
           asks("s", "limit", "m/rdp", "0.1")),
    *cases("requester does not approve", (*PERSONS, asks("s", "limit", "m/rdp", "0.1", "cara")),
           *agreed("s", "limit", "m/rdp", "0.1", "cara")),
    *cases("something else", (O, *PERSONS, asks("s", "limit", "m/rdp", "0.1")),
           *agreed("s", "limit", "m/rdp", "0.2"), *agreed("s", "waive", "m/rdp", "0.1")),
    *cases("2 role.*1 did", (*PERSONS, opened(), asks("s", "limit", "m/rdp", said(101), "cara"),
           *agreed("s", "limit", "m/rdp", said(101), "hugo")), to(101)),
    *cases("choose another", (O, C), *(asks(serial, "limit", "m/rdp", "0.1") for serial in (
        "release-" + "ab" * 16, "amend-1-" + "ab" * 32, "refuse-release-" + "ab" * 16, "release-", "amend-"))),
    *cases("1 role.*0 did; a person", (*PERSONS, opened(), asks("s", "limit", "m/rdp", said(9), "cara"),
           *agreed("t", "limit", "m/rdp", said(9), "cara")), to(9, "t")),
    *cases("2 role.*1 did; a person", (*PERSONS, opened(), asks("s", "limit", "m/rdp", said(101), "cara"),
           *agreed("t", "limit", "m/rdp", said(101))), to(101, "t")),
    # releases that a person refused
    *cases("has refused", (*PERSONS, *GRANTED, *agreed("refuse-r1", "refuse", "r1", "x", "cara")), sent()),
    *cases("has refused", (*PERSONS, *GRANTED, *agreed("refuse-r1", "refuse", "r1", "x"),
           *agreed("r1", "release", "r1", b32("a").hex())), sent()),
    # those who leave
    *cases("no active person", (O,), Dismissed("otto", "")),
    *cases("no active person", (O, Dismissed("olaf", "")), Dismissed("olaf", "")),
    *cases("the last of", PERSONS, Dismissed("cara", ""), Dismissed("hugo", "s")),
    *cases("the last of", (*PERSONS, *agreed("s", "dismiss", "cara", "compliance")), Dismissed("cara", "s")),
    *cases("has no serial", (O,), Dismissed("olaf", "s")),
    *cases("2 role.*0 did", (O, *PERSONS), Dismissed("olaf", ""), Dismissed("olaf", "s")),
    *cases("2 role.*1 did", (O, *PERSONS, *agreed("s", "dismiss", "olaf", "operator", "cara")),
           Dismissed("olaf", "s")),
    *cases("2 role.*0 did", (O, *PERSONS, *agreed("s", "dismiss", "olaf", "hospital")), Dismissed("olaf", "s")),
    *cases("may approve", LEFT, *agreed("s", "limit", "m/rdp", "0.1", "cora")),
    *cases("appointed already", LEFT, appointed("cora", "compliance"), replace(O, public=key_of("cora"))),
    *cases("2 role.*1 did", (*COMING, opened(), *agreed("s", "limit", "m/rdp", said(101), "cora", "hugo"),
           *agreed("l", "dismiss", "cora", "compliance"), Dismissed("cora", "l")), to(101)),
    # limits
    *cases("no such account", (opened(),), to(1, name="n/rdp")),
    *cases("what its epsilon allows", (opened(),), LimitSet("m/rdp", 0, "", "s"), LimitSet("m/rdp", 100,
           "eight", "s"),
           LimitSet("m/rdp", 99, said(100), "s"), LimitSet("m/rdp", 101, said(100), "s")),
    *(case for delta in ("0.0", "1.0", "nan", "none") for case in cases(
        "what its epsilon allows", (replace(opened(), delta=delta),), to(100))),
    *cases("one of kind k has none", (opened(kind="k"),), LimitSet("m/k", 1, "1.0", "s"), to(1, name="m/k")),
    *cases("1 role.*0 did", (*PERSONS, opened()), to(LIMIT), to(0)),
    *cases("2 role.*0 did", (*PERSONS, opened()), to(LIMIT + 1)),
    *cases("2 role.*1 did", (*PERSONS, opened(), *agreed("s", "limit", "m/rdp", said(101), "hugo")), to(101)),
    *cases("2 role.*1 did", (*PERSONS, Opened("m/k", 2, 0, "", ""), *agreed("s", "limit", "m/k", "3", "cara")),
           LimitSet("m/k", 3, "", "s")),
    *cases("0 did", (*PERSONS, opened(), *agreed("s", "limit", "m/rdp", said(90))), to(91), to(89), to(90,
           "t"), to(90, "")),
    *cases("0 did", (*PERSONS, opened(), opened("n"), *agreed("s", "limit", "m/rdp", said(90))), to(90,
           name="n/rdp")),
    *cases("0 did", (*PERSONS, opened(), *agreed("s", "waive", "m/rdp", said(90))), to(90)),
    *cases("1 role.*0 did", (*PERSONS, opened(), *agreed("s", "limit", "m/rdp", said(90)), to(90)), to(90)),
    *cases("what its epsilon allows", (*PERSONS, opened()), *(
        LimitSet("m/rdp", 90, spelled, "s") for spelled in (f"+{said(90)}", f" {said(90)}", said(90).upper()))),
    # reservations
    *cases("no such account", (opened(),), reserved(site="n"), reserved(account="m/k")),
    *cases("no such account", (opened(), opened("n")), reserved(account="n/rdp")),
    *cases("no such account", (opened(), opened("a")), reserved(account="a/rdp")),
    *cases("exists already", GRANTED, reserved(amount=1), reserved(site="m", amount=60)),
    *cases("exists already", (*GRANTED, Expired("g", "x")), reserved(amount=1)),
    *cases("presented its receipts", AWAITED, reserved(amount=1)),
    *cases("presented its receipts", (*AWAITED, opened("z")), reserved(amount=1, site="z")),
    *cases("presented its receipts", (*AWAITED, presented(), enrolled("z"), opened("z")), reserved(amount=1,
           site="z")),
    *cases("overspent", (opened(),), reserved(amount=LIMIT + 1), reserved(amount=0), reserved(amount=-1)),
    *cases("overspent", GRANTED, reserved("h", LIMIT - 40 + 1)),
    *cases("overspent", (*GRANTED, Expired("g", "x")), reserved("h", LIMIT - 40 + 1)),
    *cases("overspent", (*GRANTED, Spent("g", 10, "x", b32("e"))), reserved("h", LIMIT - 10 + 1)),
    *cases("overspent", (*GRANTED, Freed("g", "x", b32("e"))), reserved("h", LIMIT + 1)),
    *cases("overspent", (*PERSONS, *GRANTED, *agreed("s", "limit", "m/rdp", said(30), "cara"), to(30)),
           reserved("h", 1)),
    # refusals
    *cases("has a reason", (), Refused("g", "m", "mech", "release", [], b32("e"))),
    # what a site is about to send
    *cases("no open grant", GRANTED, sent(grant="h")),
    *cases("another's", GRANTED, *(replace(sent(), **{key: value}) for key in ("site", "run", "mechanism")
           for value in ("a", "zz"))),
    *cases("sent before", (*GRANTED, sent(10)), sent(11)),
    *cases("does not cover", GRANTED, sent(0), sent(41)),
    *cases("does not cover", (*GRANTED, sent(10)), sent(10, "r2"), sent(9, "r2"), sent(41, "r2")),
    # what a ledger admits
    *cases("no open grant", GRANTED, admitted(grant="h")),
    *cases("has a round", GRANTED, admitted(n=0), replace(admitted(), run="")),
    *cases("another's", GRANTED, *(replace(admitted(), **{key: value}) for key in ("site", "run", "mechanism")
           for value in ("a", "zz"))),
    *cases("reviewed before", (*GRANTED, admitted(10)), replace(admitted(11, n=2), envelope=b32("r2")),
           replace(admitted(11, "r2", 2), envelope=b32("r1"))),
    *cases("reviewed before", (*GRANTED, Refused("r1", "m", "mech", "release", ["x"], b32("r1"))), admitted()),
    *cases("does not cover", GRANTED, admitted(0), admitted(41)),
    *cases("does not cover", (*GRANTED, admitted(10)), admitted(10, "r2", 2), admitted(9, "r2", 2),
           admitted(41, "r2", 2)),
    *cases("does not cover", (*GRANTED, admitted(10, n=3)), admitted(20, "r2", 3), admitted(20, "r2", 2)),
    # the end of a grant
    *cases("no open grant", GRANTED, Spent("h", 40, "x", b""), Expired("h", "x"), Freed("h", "x", b32("e"))),
    *(case for end in (Spent("g", 40, "x", b""), Expired("g", "x"), Freed("g", "x", b32("e"))) for case in cases(
        "no open grant", (*GRANTED, end), Spent("g", 40, "x", b""), Expired("g", "x"), Freed("g", "x", b32("e")),
        sent(), admitted())),
    *cases("between what left", GRANTED, Spent("g", 0, "x", b32("e")), Spent("g", 41, "x", b"")),
    *cases("between what left", (*GRANTED, sent(20)), Spent("g", 19, "x", b32("e"))),
    *cases("between what left", (*GRANTED, admitted(20)), Spent("g", 19, "x", b32("e"))),
    *cases("between what left", (*GRANTED, sent(20), admitted(10)), Spent("g", 19, "x", b32("e"))),
    *cases("between what left", (*GRANTED, sent(10), admitted(20)), Spent("g", 19, "x", b32("e"))),
    *cases("signed word", GRANTED, Spent("g", 39, "x", b""), Spent("g", 40, "x", b32("e")), Spent("g", 1, "x", b"")),
    *cases("cannot be freed", (*GRANTED, sent(1)), Freed("g", "x", b32("e"))),
    *cases("cannot be freed", (*GRANTED, admitted(1)), Freed("g", "x", b32("e"))),
    # rounds
    *cases("one after the other", (*GRANTED, admitted()), *(RoundClosed("run", n, ["m"], bytes(32)) for n in (0, 2))),
    *cases("one after the other", (*GRANTED, admitted(), RoundClosed("run", 1, ["m"], bytes(32)), admitted(20,
           "r2", 2)),
           *(RoundClosed("run", n, ["m"], bytes(32)) for n in (0, 1, 3))),
    *cases("has a SHA-256", (*GRANTED, admitted()), *(RoundClosed("run", 1, ["m"], bytes(n)) for n in (31, 33))),
    *cases("each once", (*GRANTED, admitted()), RoundClosed("run", 1, ["m", "m"], bytes(32)),
           RoundClosed("run", 1, ["n", "m"], bytes(32)), RoundClosed("run", 1, ["m", "m", "n"], bytes(32))),
    *cases("without an admitted update", (*GRANTED, admitted()), RoundClosed("run", 1, [], bytes(32)),
           RoundClosed("run", 1, ["n"], bytes(32)), RoundClosed("run", 1, ["m", "n"], bytes(32)),
           RoundClosed("other", 1, ["m"], bytes(32))),
    *cases("without an admitted update", (*GRANTED, admitted(n=2)), RoundClosed("run", 1, ["m"], bytes(32))),
    *cases("without an admitted update", (*GRANTED, sent()), RoundClosed("run", 1, ["m"], bytes(32))),
    # after a restore
    *cases("where the backup ends", (enrolled(),), restored(0), restored(2), restored(1, 1), restored(1, 3),
           restored(1, 2, bytes(31)), restored(1, 2, bytes(33)), restored(1, nonce="")),
    *cases("only after a restore", (enrolled(), opened()), recovered()),
    *cases("only after a restore", (*AWAITED, presented()), recovered()),
    *cases("only after a restore", (*AWAITED, revoked()), recovered()),
    *cases("only after a restore", (*BARRED, restored(4)), recovered()),
    *cases("nothing is awaited", (*AWAITED, revoked()), presented()),
    *cases("nothing is awaited", (*BARRED, restored(4)), presented(), Waived("m", "s")),
    *cases("into the site's own", (enrolled(), enrolled("n"), opened(), opened("n"), opened("a"), restored(5)),
           recovered(account="n/rdp"), recovered(account="a/rdp"), recovered(account="m/k")),
    *cases("only after a restore", (enrolled(), opened(), opened("n"), restored(3)),
           recovered(site="n", account="n/rdp")),
    *cases("was refused, or is for nothing", (enrolled(), *GRANTED, restored(3)), recovered("g")),
    *cases("this very request was refused", (opened(), replace(REFUSED, envelope=b32("g"))), reserved("g")),
    *cases("was refused, or is for nothing", (*AWAITED, recovered()), recovered()),
    *cases("was refused", (REFUSED, enrolled(), opened(), restored(3)), recovered()),
    *cases("was refused, or is for nothing", AWAITED, recovered(amount=0), recovered(amount=-1)),
    *cases("nothing is awaited", (enrolled(),), presented(), Waived("m", "s")),
    *cases("nothing is awaited", AWAITED, presented("n"), presented(nonce=""), presented(nonce="n"),
           presented(nonce="n3"), Waived("n", "s")),
    *cases("nothing is awaited", (*AWAITED, presented(), enrolled("z")), Waived("z", "s")),
    *cases("another number", AWAITED, presented(grants=1), presented(grants=-1)),
    *cases("another number", (*AWAITED, recovered("g1"), recovered("g2")), *(presented(grants=n) for n in (0, 1, 3))),
    *cases("another number", (*AWAITED, recovered(), presented(grants=1), restored(5, 3)), presented(grants=1)),
    *cases("2 role.*0 did", AWAITED, Waived("m", "s")),
    *cases("2 role.*1 did", (enrolled(), *PERSONS, opened(), restored(4), *agreed("s", "waive", "m", "2", "hugo")),
           Waived("m", "s")),
    *cases("2 role.*0 did", (enrolled(), *PERSONS, opened(), restored(4), *agreed("s", "waive", "m", "1")),
           Waived("m", "s")),
    *cases("2 role.*0 did", (enrolled(), *PERSONS, opened(), restored(4), *agreed("s", "waive", "n", "2")),
           Waived("m", "s")),
    *cases("2 role.*0 did", (enrolled(), *PERSONS, opened(), restored(4), *agreed("s", "limit", "m", "2")),
           Waived("m", "s")),
    *cases("2 role.*0 did", (enrolled(), *PERSONS, opened(), restored(4), *agreed("s", "waive", "m", "2")),
           Waived("m", "t")),
]  # fmt: skip


@pytest.mark.parametrize(("why", "before", "entry"), BROKEN)
def test_an_entry_that_breaks_one_rule_is_refused_and_changes_nothing(
    why: str, before: tuple[Entry, ...], entry: Entry
) -> None:
    refuses(ledger(*before), entry, why)


def account(state: State, name: str = "m/rdp") -> tuple[int, int, int, int]:
    """What an account says of itself."""
    of = state.accounts[name]
    return of.limit, of.held, of.spent, of.left


def test_books_begin_empty_in_the_first_epoch() -> None:
    state = State()
    told = {name: getattr(state, name) for name in (f.name for f in fields(State))}
    assert {name: value for name, value in told.items() if value} == {"epoch": 1}
    assert (state.restored_at, state.nonce, state.size) == (0, "", 0)
    assert Account(opened()) == Account(opened(), 0, 0, None)
    assert Grant(reserved()) == Grant(reserved(), "held", 0, 0, 0)
    assert Proposal() == Proposal({}, False, ())
    assert {"auditor", "compliance", "hospital", "operator", "researcher"} == ROLES


def test_an_idempotency_key_is_used_once_and_keeps_its_place() -> None:
    state = ledger(opened(), opened("n"))
    assert (state.keys, state.size) == ({"k0": 0, "k1": 1}, 2)
    before = copy.deepcopy(state)
    with pytest.raises(InvalidEntryError, match="used twice"):
        state.apply(Record(0, "k0", opened("z")))
    assert state == before


def test_a_site_is_enrolled_with_its_policy_and_amends_it() -> None:
    state = ledger(enrolled("n"), enrolled(), enrolled("a"))
    assert state.sites == {site: enrolled(site) for site in ("n", "m", "a")}
    assert state.policies == {site: b32(f"envelope of {site}") for site in ("n", "m", "a")}
    after = takes(state, amended(1))
    assert after.policies == {**state.policies, "m": b32("amendment 1")}
    assert (after.sites, after.amended) == (state.sites, {"m": 1})
    after.apply(Record(0, "later", amended(7)))
    after.apply(Record(0, "another's", amended(1, "n")))
    assert after.amended == {"m": 7, "n": 1}
    assert after.sites_pending_receipts == after.sites_awaited == set()


@pytest.mark.parametrize("office", [(C,), (O, H), PERSONS])
def test_a_site_is_enrolled_by_all_roles_in_office(office: tuple[Appointed, ...]) -> None:
    before = ledger(*office, *enrolling("s", *(p.person for p in office if p is not O)))
    after = takes(before, enrolled(serial="s"))
    assert after.sites == {"m": enrolled(serial="s")}
    assert after.proposals["s"].used
    assert before.office() == {p.role for p in office} - {"operator"}


def test_who_agreed_is_told_in_the_order_in_which_they_did() -> None:
    state = ledger(*PERSONS, *enrolling("s", "hugo", "cara"), *enrolling("t", "cara", site="n"))
    words = ("enrol", "m", enrolled().envelope.hex())
    assert state.agreeing("s", *words) == ["hugo", "cara"]
    assert state.agreeing("t", *words) == state.agreeing("u", *words) == []


def test_only_an_issued_certificate_of_an_enrolled_site_is_admitted() -> None:
    state = ledger(enrolled(), enrolled("n"), issued(), issued("2"), issued("3", "n"))
    assert state.issued == {"1f": issued(), "2": issued("2"), "3": issued("3", "n")}
    assert [state.admits("m", number) for number in ("1f", "2", "3", "4", "")] == [True, True, False, False, False]
    assert (state.admits("n", "3"), state.admits("n", "1f"), state.admits("l", "1f")) == (True, False, False)
    after = takes(state, revoked("1f"))
    assert after.revoked == {"1f"}
    assert [after.admits("m", number) for number in ("1f", "2")] == [False, True]
    assert after.admits("n", "3")
    long = "f" * 40
    assert takes(state, issued(long)).admits("m", long)


def test_a_site_that_is_revoked_loses_every_certificate_and_nothing_else() -> None:
    state = ledger(*BARRED, enrolled("n"))  # its own envelopes are kept: they are what it is held to
    others = (enrolled("a"), issued("4", "a"), enrolled("n"), issued("3", "n"))
    before = ledger(*BARRED[:-1], issued(), issued("2"), *others)
    after = takes(before, revoked())
    assert (after.revoked_sites, after.revoked) == ({"m"}, {"1f", "2"})
    assert [after.admits(*peer) for peer in (("m", "1f"), ("m", "2"), ("n", "3"), ("a", "4"))] == [
        False,
        False,
        True,
        True,
    ]
    assert (account(after), after.grants) == (account(before), before.grants)
    assert account(_also(after, Expired("g", "revoked"))) == (100, 0, 40, 60)  # its grant still ends, and is spent
    assert state.sites == {"m": enrolled(), "n": enrolled("n")}


def test_a_site_that_is_admitted_again_keeps_its_accounts_and_gets_new_certificates() -> None:
    before = ledger(enrolled(), *GRANTED, issued(), amended(3), revoked())
    fresh = Enrolled("m", key_of("new key"), b32("new policy"), b32("new envelope"), "")
    after = takes(before, fresh)
    assert (after.sites, after.policies, after.amended) == ({"m": fresh}, {"m": b32("new envelope")}, {"m": 3})
    assert (account(after), after.grants, after.revoked_sites) == (account(before), before.grants, set())
    assert not after.admits("m", "1f")
    assert _also(after, issued("2")).admits("m", "2")
    refuses(after, amended(3), "not newer")
    assert account(_also(after, reserved("h", 60)))[3] == 0
    same = takes(before, again())  # the same key: whether it was the key that was lost is for persons to know
    assert same.sites == {"m": again()}
    assert _also(same, admitted()).releases


def test_a_revoked_site_is_not_waited_for_after_a_restore_but_presents_before_it_is_granted_anything() -> None:
    state = ledger(*BARRED, enrolled("n"), opened("n"), restored(6))
    assert (state.sites_awaited, state.sites_pending_receipts) == ({"n"}, {"m"})
    state = _also(_also(state, presented("n")), again())
    assert (state.frozen("n"), state.frozen("m")) == (False, True)
    refuses(state, reserved("h", 1), "presented its receipts")
    state = _also(_also(state, recovered(amount=5)), presented(grants=1))
    assert account(_also(state, reserved("h", 55))) == (100, 95, 5, 0)
    third = replace(again(), envelope=b32("third"))
    back = _also(_also(state, revoked()), third)  # it has presented in this epoch: nothing is asked twice
    assert not back.frozen("m")
    late = ledger(*AWAITED, revoked())
    assert (late.sites_awaited, late.sites_pending_receipts) == (
        {"m"},
        set(),
    )  # two persons waive it, or it is enrolled third and presents
    assert _also(_also(late, again()), presented()).sites_awaited == set()


@pytest.mark.parametrize("order", [2, 3, 1024])
def test_an_account_of_kind_rdp_has_an_order_of_two_or_more_and_one_of_kind_k_has_none(order: int) -> None:
    assert ledger(replace(opened(), order=order)).accounts == {"m/rdp": Account(replace(opened(), order=order))}
    assert account(ledger(opened(kind="k", limit=3)), "m/k") == (3, 0, 0, 3)


@pytest.mark.parametrize("first", [(C, H), (H, C), (O, C, H), (O, appointed("otto", "operator"), C)])
def test_the_first_of_each_role_is_appointed_freely(first: tuple[Appointed, ...]) -> None:
    assert ledger(*first).persons == {p.person: p for p in first}


@pytest.mark.parametrize("office", [(C,), (H,), PERSONS])
def test_the_rest_are_appointed_by_all_roles_in_office(office: tuple[Appointed, ...]) -> None:
    before = ledger(*office, *appointing("s", *(p.person for p in office)))
    after = _also(before, replace(O, serial="s"))
    assert after.persons["olaf"] == replace(O, serial="s")
    assert after.proposals["s"].used
    if len(office) == 2:
        refuses(after, appointed("pia", "hospital"), "2 role")  # three roles are no reason to appoint freely
    else:
        free = C if office == (H,) else H
        assert free.person in _also(after, free).persons


def test_a_key_between_others_is_a_key_of_its_own() -> None:
    low, middle, high = sorted(map(key_of, "abc"))
    keys = [middle, low, high]
    people = [replace(p, public=key) for p, key in zip((O, C, H), keys, strict=True)]
    assert set(ledger(*people).persons) == {"cara", "olaf", "hugo"}
    sites = [replace(enrolled(s), sign_key=key) for s, key in zip("mna", keys, strict=True)]
    assert set(ledger(*sites).sites) == {"m", "n", "a"}


def test_approvals_are_kept_by_person_and_told_by_role() -> None:
    cara, hugo = agreed("s", "limit", "m/rdp", "0.9")
    other = agreed("s", "limit", "m/rdp", "0.8", "hugo")[0]
    state = ledger(*PERSONS, cara, hugo)
    assert state.proposals == {
        "s": Proposal({"cara": (cara.proposal, cara.envelope), "hugo": (hugo.proposal, hugo.envelope)})
    }
    both = {"compliance": cara.envelope.hex(), "hospital": hugo.envelope.hex()}
    assert state.approvals("s", "limit", "m/rdp", "0.9") == both
    split = ledger(*PERSONS, cara, other)
    assert split.approvals("s", "limit", "m/rdp", "0.9") == {"compliance": cara.envelope.hex()}
    assert split.approvals("s", "limit", "m/rdp", "0.8") == {"hospital": other.envelope.hex()}
    for asked in (("t", "limit", "m/rdp"), ("s", "waive", "m/rdp"), ("s", "limit", "n/rdp")):
        assert state.approvals(*asked, "0.9") == {}


def test_who_asks_is_kept_and_others_decide() -> None:
    asked = asks("s", "limit", "m/rdp", said(101), "cora")
    assert takes(ledger(*COMING, opened()), asked).asked == {"s": asked}
    words = agreed("s", "limit", "m/rdp", said(101), "cara", "hugo")
    assert account(takes(ledger(*COMING, opened(), asked, *words), to(101)))[0] == 101


def test_who_leaves_approves_nothing_more_and_what_was_decided_stays() -> None:
    words = agreed("s", "limit", "m/rdp", said(101), "cora", "hugo")
    before = ledger(*COMING, opened(), *words, to(101), *agreed("l", "dismiss", "cora", "compliance"))
    after = takes(before, Dismissed("cora", "l"))
    assert after.dismissed == {"cora"}
    assert (after.active_person("cora"), after.active_person("cara")) == (None, C)
    assert account(after)[0] == 101
    assert after.agreeing("s", "limit", "m/rdp", said(101)) == [
        "cora",
        "hugo",
    ]  # it was used while both were in office
    assert after.office() == {"compliance", "hospital"}


def test_who_decided_is_told_and_nobody_who_had_left_by_then() -> None:
    words = ("s", "limit", "m/rdp", said(101))
    gone = (*COMING, opened(), *agreed(*words, "cora"), *agreed("l", "dismiss", "cora", "compliance"))
    before = ledger(*gone, Dismissed("cora", "l"), *agreed("s", "limit", "m/rdp", said(102), "hugo"))
    refuses(before, to(101), "2 role.*0 did$")
    before = ledger(*gone, Dismissed("cora", "l"), *agreed(*words, "hugo", "cara"))
    after = takes(before, to(101))
    assert before.agreeing(*words) == after.agreeing(*words) == ["hugo", "cara"]
    assert after.proposals["s"].counted == ("hugo", "cara")
    assert after.agreeing("s", "limit", "m/rdp", said(102)) == []


def test_who_asks_for_something_does_not_approve_it_under_another_serial_unless_somebody_else_asks() -> None:
    mine, words = asks("s", "limit", "m/rdp", said(101), "cara"), ("limit", "m/rdp", said(101))
    both = agreed("t", *words)
    assert ledger(*PERSONS, opened(), mine, *both).agreeing("t", *words) == ["hugo"]
    asked = ledger(O, C, replace(H, serial=""), opened(), mine, asks("t", *words), *both)
    assert takes(asked, to(101, "t")).proposals["t"].counted == ("cara", "hugo")
    other = asks("s", "limit", "m/rdp", said(102), "cara")
    assert account(takes(ledger(*PERSONS, opened(), other, *both), to(101, "t")))[0] == 101
    late = ledger(*PERSONS, opened(), *both, mine)  # nothing is decided until it is: he asked before it was
    refuses(late, to(101, "t"), "2 role.*1 did; a person")
    done = (*COMING, opened(), mine, *agreed("s", *words, "cora", "hugo"), to(101))  # so it is open no more
    low = (*agreed("u", "limit", "m/rdp", said(9), "hugo"), to(9, "u"))
    assert account(takes(ledger(*done, *low, *both), to(101, "t")))[0] == 101
    release = ("release-1", "release", "release-1", "ab")
    own = ledger(*PERSONS, asks("s", *release[1:], "cara"), *agreed(*release))
    assert own.agreeing(*release) == ["cara", "hugo"], "a release has one serial, and nobody can ask under it"


def test_a_grant_in_a_run_is_remembered_whatever_became_of_it() -> None:
    assert ledger(opened(), reserved(run="")).granted == set()
    assert ledger(*GRANTED, Freed("g", "x", b32("e"))).granted == {("m", "run")}
    assert takes(ledger(*AWAITED), recovered()).granted == {("m", "run")}
    assert takes(ledger(*GRANTED), reserved("h", 1)).granted == {("m", "run")}, "older ledgers still fold"


def test_where_nobody_may_approve_an_operator_leaves_freely() -> None:
    assert takes(ledger(O), Dismissed("olaf", "")).active_person("olaf") is None


@pytest.mark.parametrize("other", [bytes(32), b"\xff" * 32])
def test_an_approval_of_other_words_does_not_count(other: bytes) -> None:
    first = agreed("s", "limit", "m/rdp", said(101), "cara")[0]
    state = ledger(*PERSONS, opened(), first, Approved("hugo", "s", other, b32("e")))
    assert state.approvals("s", "limit", "m/rdp", said(101)) == {"compliance": first.envelope.hex()}
    refuses(state, to(101), "2 role.*1 did")


@pytest.mark.parametrize(
    ("limit", "persons"), [(99, ["cara"]), (100, ["hugo"]), (101, ["cara", "hugo"]), (0, ["cara"])]
)
def test_one_person_lowers_a_limit_and_two_roles_raise_it(limit: int, persons: list[str]) -> None:
    words = agreed("s", "limit", "m/rdp", said(limit), *persons)
    after = takes(ledger(*PERSONS, *GRANTED, *words), to(limit))
    assert account(after) == (limit, 40, 0, limit - 40)
    assert after.accounts["m/rdp"].epsilon == said(limit)
    assert after.accounts["m/rdp"].opened == opened()
    assert after.proposals["s"].used


def test_a_limit_that_was_lowered_is_raised_again_by_two_only_from_where_it_is() -> None:
    low = (*PERSONS, opened(), *agreed("s", "limit", "m/rdp", said(50), "cara"), to(50))
    again = (*low, *agreed("t", "limit", "m/rdp", said(51), "cara"))
    refuses(ledger(*again), to(51, "t"), "2 role.*1 did")
    both = ledger(*again, *agreed("t", "limit", "m/rdp", said(51), "hugo"))
    assert account(takes(both, to(51, "t")))[0] == 51


def test_a_limit_of_kind_k_is_a_number_alone() -> None:
    words = agreed("s", "limit", "m/k", "3")
    after = takes(ledger(*PERSONS, opened(kind="k", limit=2), *words), LimitSet("m/k", 3, "", "s"))
    assert account(after, "m/k") == (3, 0, 0, 3)
    assert after.accounts["m/k"].epsilon == ""
    assert ledger(opened()).accounts["m/rdp"].epsilon == said(100)


@pytest.mark.parametrize("amount", [1, 99, 100])
def test_a_reservation_up_to_what_is_left_is_held(amount: int) -> None:
    state = ledger(opened("a"), opened(), opened("z"), reserved(amount=amount))
    assert account(state) == (100, amount, 0, 100 - amount)
    assert state.grants == {"g": Grant(reserved(amount=amount))}
    assert account(state, "a/rdp") == account(state, "z/rdp") == (100, 0, 0, 100)


def test_what_is_left_after_grants_and_their_ends_may_be_reserved_to_the_last_unit() -> None:
    for end, left in (
        (None, 60),
        (Expired("g", "x"), 60),
        (Spent("g", 10, "x", b32("e")), 90),
        (Freed("g", "x", b32("e")), 100),
    ):
        state = ledger(*GRANTED, *([end] if end else []))
        assert account(state)[3] == left
        assert account(takes(state, reserved("h", left)))[3] == 0


@pytest.mark.parametrize(
    ("stage", "envelope", "kept"),
    [
        ("release", b32("e"), True),
        ("release", b"", False),
        ("call", b32("e"), False),
        ("reservation", b32("e"), False),
    ],
)
def test_a_refused_release_is_a_reviewed_one_and_a_refused_reservation_is_not(
    stage: str, envelope: bytes, kept: bool
) -> None:
    state = ledger(Refused("g", "m", "mech", stage, ["min_k"], envelope))
    assert state.envelopes == ({envelope} if kept else set())


def test_what_is_sent_and_what_is_admitted_are_counted_apart_up_to_the_whole_grant() -> None:
    state = ledger(*GRANTED, sent(1), sent(40, "r2", 2))
    grant = state.grants["g"]
    assert (grant.sent, grant.used, grant.last_round, set(state.sent)) == (40, 0, 0, {"r1", "r2"})
    assert state.sent["r1"] == sent(1)
    assert (state.releases, state.envelopes, state.updates) == ({}, set(), set())
    state = ledger(*GRANTED, admitted(1), admitted(40, "r2", 5))
    grant = state.grants["g"]
    assert (grant.sent, grant.used, grant.last_round) == (0, 40, 5)
    more = ledger(*GRANTED, admitted(1), replace(admitted(40, "r2", 5), claim=b'{"of":"the second"}'))
    assert (grant.claim, more.grants["g"].claim) == (b"{}", b'{"of":"the second"}')
    assert ledger(*GRANTED).grants["g"].claim == b""
    assert state.releases == {"r1": admitted(1), "r2": admitted(40, "r2", 5)}
    assert state.envelopes == {b32("r1"), b32("r2")}
    assert state.updates == {("run", 1, "m"), ("run", 5, "m")}


def test_a_release_of_no_run_has_no_round_and_is_no_update() -> None:
    alone = (opened(), reserved(run=""))
    first = replace(admitted(10, n=0), run="")
    state = ledger(*alone, first, replace(admitted(20, "r2", 0), run=""))
    assert (state.grants["g"].used, state.grants["g"].last_round, state.updates) == (20, 0, set())
    refuses(ledger(*alone), replace(first, round=1), "has a round")
    refuses(ledger(*alone), replace(first, used=41), "does not cover")


@pytest.mark.parametrize(
    ("before", "used", "envelope"),
    [((), 1, b32("e")), ((), 39, b32("e")), ((), 40, b""), ((sent(20),), 20, b32("e")),
     ((admitted(20),), 20, b32("e")),
     ((sent(40),), 40, b""), ((sent(20), admitted(10)), 20, b32("e")), ((sent(10), admitted(20)), 20, b32("e"))],
)  # fmt: skip
def test_a_grant_is_spent_from_what_left_to_the_whole(before: tuple[Entry, ...], used: int, envelope: bytes) -> None:
    after = takes(ledger(*GRANTED, reserved("h", 5), *before), Spent("g", used, "x", envelope))
    assert account(after) == (100, 5, used, 95 - used)
    assert after.grants["g"].state == "spent"


def test_what_expires_is_spent_whole_and_what_is_freed_is_given_back_whole() -> None:
    for before in ((), (sent(1),), (admitted(1),)):
        after = takes(ledger(*GRANTED, reserved("h", 5), *before), Expired("g", "x"))
        assert (account(after), after.grants["g"].state) == ((100, 5, 40, 55), "spent")
    after = takes(ledger(*GRANTED, reserved("h", 5)), Freed("g", "x", b32("e")))
    assert (account(after), after.grants["g"].state) == ((100, 5, 0, 95), "freed")


def test_a_round_counts_admitted_updates_and_the_next_follows() -> None:
    other = replace(admitted(10, "r9", grant="h"), site="n")
    state = ledger(*GRANTED, opened("n"), reserved("h", site="n"), admitted(), other)
    after = takes(state, RoundClosed("run", 1, ["m", "n"], bytes(32)))
    assert (after.rounds, after.aggregated) == ({"run": 1}, {("run", 1, "m"), ("run", 1, "n")})
    after.apply(Record(0, "next", admitted(20, "r2", 2)))
    after.apply(Record(0, "last", RoundClosed("run", 2, ["m"], bytes(32))))
    assert (after.rounds, after.aggregated) == ({"run": 2}, {("run", 1, "m"), ("run", 1, "n"), ("run", 2, "m")})
    alone = takes(state, RoundClosed("run", 1, ["n"], bytes(32)))
    assert alone.aggregated == {("run", 1, "n")}


def test_a_restored_ledger_waits_for_every_site_and_counts_what_the_backup_lost() -> None:
    state = ledger(enrolled(), enrolled("n"), opened(), opened("n"), restored(4))
    assert (state.epoch, state.restored_at, state.nonce) == (2, 4, "n2")
    assert (state.sites_awaited, state.sites_pending_receipts) == ({"m", "n"}, set())
    assert all(state.frozen(site) for site in "mnz")
    state = _also(state, recovered(amount=1))
    assert account(state) == (100, 0, 1, 99)
    assert state.grants == {"lost": Grant(recovered(amount=1), "spent", 1)}
    assert state.recovered == {"m": 1}
    beyond = _also(state, recovered("more", 150))
    assert account(beyond) == (100, 0, 151, -51)  # what was granted is spent, whatever the limit says now
    assert beyond.recovered == {"m": 2}
    state = _also(state, presented(grants=1))
    assert state.sites_awaited == {"n"}
    refuses(state, reserved(amount=1), "presented its receipts")
    state = _also(state, presented("n"))
    assert state.sites_awaited == set()
    assert not any(state.frozen(site) for site in "mnz")
    state = _also(state, reserved(amount=99))
    assert account(state) == (100, 99, 1, 0)
    again = _also(state, restored(state.size, 3, nonce="n3"))
    assert (again.epoch, again.restored_at, again.nonce) == (3, state.size, "n3")
    assert (again.sites_awaited, again.recovered) == ({"m", "n"}, {})


def test_a_site_that_is_enrolled_after_a_restore_alone_is_frozen_until_it_has_presented() -> None:
    state = ledger(enrolled(), opened(), restored(2), presented(), enrolled("n"), opened("n"))
    assert (state.sites_awaited, state.sites_pending_receipts) == (set(), {"n"})
    assert (state.frozen("m"), state.frozen("n")) == (False, True)
    assert account(_also(state, reserved(amount=5)))[1] == 5
    state = _also(state, recovered(site="n", account="n/rdp"))
    refuses(state, presented("n"), "another number")
    state = _also(state, presented("n", 1))
    assert state.sites_pending_receipts == set()
    assert account(_also(state, reserved(amount=70, site="n")), "n/rdp") == (100, 70, 30, 0)
    both = ledger(enrolled(), opened(), restored(2), enrolled("n"))
    assert (both.sites_awaited, both.sites_pending_receipts) == ({"m"}, {"n"})
    again = _also(both, restored(both.size, 3))
    assert (again.sites_awaited, again.sites_pending_receipts) == ({"m", "n"}, set())


@pytest.mark.parametrize(
    ("told", "kept"),
    [(REFUSED, True), (replace(REFUSED, stage="call"), False), (replace(REFUSED, stage="zz"), False),
     (replace(REFUSED, stage="release"), False)],
)  # fmt: skip
def test_a_reservation_that_was_refused_is_no_lost_grant(told: Refused, kept: bool) -> None:
    state = ledger(enrolled(), opened(), told)
    assert state.refused == ({b32("lost")} if kept else set())
    state = _also(state, restored(3))
    if kept:
        refuses(state, recovered(), "was refused")
    else:
        assert account(_also(state, recovered()))[2] == 30


def test_a_frozen_ledger_refuses_what_it_had_granted_and_that_may_still_be_recovered() -> None:
    state = _also(ledger(*AWAITED), REFUSED)
    assert state.refused == set()
    assert account(_also(state, recovered()))[2] == 30
    late = _also(ledger(enrolled(), restored(1), presented(), enrolled("n"), opened("n")), replace(REFUSED, site="n"))
    assert late.refused == set()


def test_a_waived_site_has_spent_all_that_it_could_have_and_no_other_has() -> None:
    start = [*(enrolled(s) for s in "amz"), C, H, *(opened(s) for s in "amz"), opened(kind="k", limit=2)]
    start += [reserved(f"of-{s}", 40, s) for s in "amz"]
    start += [
        reserved("spent", 7),
        Spent("spent", 3, "x", b32("e")),
        reserved("freed", 8),
        Freed("freed", "x", b32("e")),
    ]
    state = ledger(*start, restored(len(start)), *agreed("w", "waive", "m", "2"))
    after = takes(state, Waived("m", "w"))
    assert account(after) == (100, 0, 100, 0)
    assert account(after, "m/k") == (2, 0, 2, 0)
    assert account(after, "a/rdp") == account(after, "z/rdp") == (100, 40, 0, 60)
    assert {name: grant.state for name, grant in after.grants.items()} == {
        "of-a": "held", "of-m": "spent", "of-z": "held", "spent": "spent", "freed": "freed",
    }  # fmt: skip
    assert after.sites_awaited == {"a", "z"}
    assert after.proposals["w"].used


def test_the_last_word_of_an_accounts_name_is_its_kind_and_all_before_it_is_the_site() -> None:
    start = [*(enrolled(s) for s in ("m", "m/x")), C, H, *(opened(s) for s in ("m", "m/x")), reserved(site="m/x")]
    state = ledger(*start)
    refuses(state, reserved("h", 1, "m", account="m/x/rdp"), "no such account")
    state = _also(state, restored(len(start)))
    refuses(state, recovered(site="m", account="m/x/rdp"), "into the site's own")
    after = _also(state, recovered(site="m/x", account="m/x/rdp"))
    assert account(after, "m/x/rdp") == (100, 40, 30, 30)
    for approval in agreed("w", "waive", "m", "2"):
        after = _also(after, approval)
    after = _also(after, Waived("m", "w"))
    assert (account(after), account(after, "m/x/rdp")) == ((100, 0, 100, 0), (100, 40, 30, 30))


@pytest.mark.parametrize(("limit", "spent"), [(30, 40), (40, 40), (41, 41)])
def test_a_waived_site_is_not_given_back_what_is_above_a_lowered_limit(limit: int, spent: int) -> None:
    lower = [*agreed("s", "limit", "m/rdp", said(limit), "cara"), to(limit)]
    start = [enrolled(), C, H, opened(), reserved(), *lower]
    state = ledger(*start, restored(len(start)), *agreed("w", "waive", "m", "2"))
    assert account(takes(state, Waived("m", "w"))) == (limit, 0, spent, limit - spent)


def test_every_kind_of_entry_is_read_the_same_by_the_fast_and_by_the_careful_way() -> None:
    told = {type(entry) for _, before, entry in BROKEN for entry in (*before, entry)}
    assert told == set(KINDS.values())
    for _, before, entry in BROKEN:
        for each in (*before, entry):
            whole = [value for f in fields(each) if isinstance(value := getattr(each, f.name), int)]
            if min(whole, default=0) >= 0:
                raw = encode(Record(7, "key", each))
                assert decode(raw) == _decode_slowly(raw) == Record(7, "key", each)


def test_a_key_may_be_as_long_as_the_encoding_lets_it() -> None:
    for length in (*range(23, 27), 94, 95, 96, 97, 255, 256, 257):
        raw = encode(Record(0, "k" * length, opened()))
        assert decode(raw) == _decode_slowly(raw)


# --- any entries in any order, against dicts of numbers


@dataclass
class Held:
    """What the reference remembers of a grant."""

    site: str
    run: str
    account: str
    amount: int
    open: bool = True
    admitted: int = 0
    sent: int = 0
    last_round: int = 0


@dataclass
class Reference:
    """Design section 6 once more, with numbers alone: who may do what, and what it leaves in an account."""

    limits: dict[str, int] = field(default_factory=dict)
    spent: dict[str, int] = field(default_factory=dict)
    grants: dict[str, Held] = field(default_factory=dict)
    sites: set[str] = field(default_factory=set)
    barred: set[str] = field(default_factory=set)
    requests: set[bytes] = field(default_factory=set)  # that a site was ever enrolled with
    certificates: dict[str, tuple[str, bool]] = field(default_factory=dict)  # number -> whose, does it count
    awaited: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    returned: dict[str, int] = field(default_factory=dict)  # site -> lost grants that it got back in this epoch
    refused: set[str] = field(default_factory=set)  # grants
    roles: dict[str, str] = field(default_factory=dict)  # person -> role
    words: dict[str, dict[str, bytes]] = field(default_factory=dict)  # serial -> person -> what was approved
    asked: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # serial -> who asked, for what
    gone: set[str] = field(default_factory=set)  # persons who were dismissed
    decided: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)  # releases: "sent NAME" or "NAME"
    updates: set[tuple[str, int, str]] = field(default_factory=set)
    rounds: dict[str, int] = field(default_factory=dict)
    epoch: int = 1
    size: int = 0
    excused: set[str] = field(default_factory=set)  # accounts whose limit was lowered, or that got a lost grant back

    def held(self, name: str) -> int:
        """What open grants hold of an account."""
        return sum(g.amount for g in self.grants.values() if g.open and g.account == name)

    def left(self, name: str) -> int:
        """Limit less what is gone."""
        return self.limits[name] - self.spent[name] - self.held(name)

    def voices(self, serial: str, *words: str) -> int:
        """How many different roles have approved exactly that, under a serial that decided nothing yet."""
        if serial in self.decided:
            return 0
        given = {p for p, said in self.words.get(serial, {}).items() if said == proposal(serial, *words)} - self.gone
        for other, (who, wanted) in self.asked.items() if serial not in self.asked else ():
            if other not in self.decided and wanted == proposal(other, *words):
                given.discard(who)
        return len({self.roles[p] for p in given})

    def office(self) -> set[str]:
        """The roles that approve."""
        return {"compliance", "hospital"} & {role for p, role in self.roles.items() if p not in self.gone}

    def end(self, grant: str, used: int) -> None:
        """A grant is closed."""
        self.grants[grant].open = False
        self.spent[self.grants[grant].account] += used


SITES, ACCOUNTS, NUMBERS = ("m", "n"), ("m/rdp", "n/rdp", "m/k"), ("1", "2", "a0")
GRANTS, SERIALS = [f"g{i}" for i in range(12)], ["s", "t", "u", "v"]
PEOPLE = {"cara": "compliance", "cora": "compliance", "hugo": "hospital", "olaf": "operator", "rita": "researcher"}
WORDS = [
    ("limit", "m/rdp", said(40)),
    ("limit", "n/rdp", said(3)),
    ("limit", "m/k", "40"),
    *(("waive", "n", str(epoch)) for epoch in (1, 2, 3)),
    *(("enrol", site, enrolled(site).envelope.hex()) for site in SITES),
    ("appoint", "cora", f"compliance {key_of('cora').hex()}"),
    *(("dismiss", person, role) for person, role in PEOPLE.items()),
]


class Fold(RuleBasedStateMachine):
    """Entries of every kind, sound or not: the fold takes what the reference takes, and has its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.ref, self.raw, self.made = State(), Reference(), list[bytes](), 0

    @initialize(empty=st.sampled_from([False, False, False, True]))
    def begin(self, empty: bool) -> None:
        """Mostly books in which something can happen at once."""
        if not empty:
            for name in ACCOUNTS:
                self.open(name, 30)
            self.enrol("n")
            for person in ("cara", "hugo"):
                if self.offer(appointed(person, PEOPLE[person]), True):
                    self.ref.roles[person] = PEOPLE[person]

    def offer(self, entry: Entry, fits: bool) -> bool:
        """One more entry; is it in the books?"""
        self.made += 1
        record = Record(self.made, f"k{self.made}", entry)
        raw = encode(record)
        assert decode(raw) == _decode_slowly(raw) == record
        before = copy.deepcopy(self.state)
        if not fits:
            with pytest.raises(InvalidEntryError):
                self.state.apply(record)
            assert self.state == before
            return False
        self.state.apply(record)
        self.raw.append(raw)
        self.ref.size += 1
        with pytest.raises(InvalidEntryError, match="used twice"):
            self.state.apply(record)
        return True

    def some(self, data: st.DataObject, likely: Iterable[Any], every: Sequence[Any]) -> Any:
        """Mostly one of the likely, so that something happens; at times any."""
        choices = sorted(likely)
        return data.draw(st.sampled_from(every if not choices or data.draw(st.integers(0, 9)) == 9 else choices))

    def grant(self, data: st.DataObject) -> tuple[str, Held | None]:
        """A grant, mostly an open one, which is made where there is none."""
        if not any(g.open for g in self.ref.grants.values()):
            self.reserve(data, data.draw(st.sampled_from(["run", ""])))
        name = self.some(data, (n for n, g in self.ref.grants.items() if g.open), GRANTS)
        return name, self.ref.grants.get(name)

    @rule(site=st.sampled_from(SITES), serial=st.sampled_from(["", "", *SERIALS]), fresh=st.booleans())
    def enrol(self, site: str, serial: str = "", fresh: bool = False) -> None:
        ref, entry = self.ref, again(site, serial) if fresh else enrolled(site, serial)
        office, wanted = ref.office(), ("enrol", site, entry.envelope.hex())
        allowed = ref.voices(serial, *wanted) >= len(office) if office else not serial
        allowed = allowed and entry.envelope not in ref.requests
        if self.offer(entry, allowed and (site not in ref.sites or site in ref.barred)):
            ref.requests.add(entry.envelope)
            ref.late |= {site} if ref.epoch > 1 and site not in ref.sites else set()
            ref.sites.add(site)
            ref.barred.discard(site)
            ref.decided |= {serial} if office else set()

    @rule(data=st.data(), number=st.sampled_from(NUMBERS))
    def issue(self, data: st.DataObject, number: str) -> None:
        ref = self.ref
        site = self.some(data, ref.sites - ref.barred, SITES)
        if self.offer(issued(number, site), site in ref.sites - ref.barred and number not in ref.certificates):
            ref.certificates[number] = (site, True)

    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        ref = self.ref
        number = self.some(data, (n for n, (_, good) in ref.certificates.items() if good), ["", "", *NUMBERS])
        site = self.some(data, [ref.certificates[number][0]] if number in ref.certificates else [], SITES)
        counts = not number or ref.certificates.get(number) == (site, True)
        if self.offer(revoked(number, site), counts and site in ref.sites - ref.barred):
            ref.barred |= set() if number else {site}
            for n, (whose, _) in ref.certificates.items():
                if n == number or (not number and whose == site):
                    ref.certificates[n] = (whose, False)

    @rule(name=st.sampled_from(ACCOUNTS), limit=st.integers(0, 40))
    def open(self, name: str, limit: int) -> None:
        site, _, kind = name.partition("/")
        if self.offer(opened(site, kind, limit), name not in self.ref.limits):
            self.ref.limits[name], self.ref.spent[name] = limit, 0

    @rule(data=st.data(), run=st.sampled_from(["", "run"]))
    def reserve(self, data: st.DataObject, run: str) -> None:
        ref = self.ref
        grant = self.some(data, set(GRANTS) - set(ref.grants), GRANTS)
        name = self.some(data, ref.limits, ACCOUNTS)
        site = self.some(data, [name[0]], SITES)
        left = ref.left(name) if name in ref.limits else 0
        amount = self.some(data, range(1, left + 1), [0, max(0, left), max(0, left + 1)])
        own = name in ref.limits and name.startswith(f"{site}/")
        fits = own and grant not in ref.grants and not ref.awaited and site not in ref.late and 0 < amount <= left
        fits = fits and grant not in ref.refused and site not in ref.barred
        if self.offer(reserved(grant, amount, site, run, name), fits):
            ref.grants[grant] = Held(site, run, name, amount)

    def leaving(self, data: st.DataObject, g: Held | None, gone: int) -> tuple[str, str, str, int]:
        """Site, run, release and use of what leaves under a grant."""
        site = self.some(data, [g.site] if g else [], SITES)
        run = self.some(data, [g.run] if g else [], ("", "run"))
        release = self.some(data, [f"r{self.made}"], [f"r{n}" for n in range(self.made + 1)])
        most = g.amount if g else 3
        return site, run, release, self.some(data, range(gone + 1, most + 1), [0, gone, most, most + 1])

    @rule(data=st.data(), index=st.integers(0, 3))
    def send(self, data: st.DataObject, index: int) -> None:
        grant, g = self.grant(data)
        site, run, release, used = self.leaving(data, g, g.sent if g else 0)
        fits = g is not None and g.open and (g.site, g.run) == (site, run) and g.sent < used <= g.amount
        fits = fits and f"sent {release}" not in self.ref.seen
        if self.offer(replace(sent(used, release, index, grant), site=site, run=run), fits) and g:
            g.sent = used
            self.ref.seen.add(f"sent {release}")

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        grant, g = self.grant(data)
        site, run, release, used = self.leaving(data, g, g.admitted if g else 0)
        index = self.some(data, [g.last_round + 1 if run else 0] if g else [], range(4))
        fits = g is not None and g.open and (g.site, g.run) == (site, run) and g.admitted < used <= g.amount
        fits = fits and release not in self.ref.seen and site not in self.ref.barred
        fits = fits and ((run != "" and g is not None and index > g.last_round) or (run == "" and index == 0))
        if self.offer(replace(admitted(used, release, index, grant), site=site, run=run), fits) and g:
            g.admitted, g.last_round = used, index
            self.ref.seen.add(release)
            if run:
                self.ref.updates.add((run, index, site))

    @rule(
        stage=st.sampled_from(["release", "call"]), reasons=st.lists(st.just("x"), max_size=1), back=st.integers(0, 3)
    )
    def refuse(self, stage: str, reasons: list[str], back: int) -> None:
        release = f"r{self.made - back}"
        if (
            self.offer(Refused(release, "m", "mech", stage, reasons, b32(release)), reasons != [])
            and stage == "release"
        ):
            self.ref.seen.add(release)

    @rule(data=st.data(), site=st.sampled_from(SITES))
    def refuse_a_reservation(self, data: st.DataObject, site: str) -> None:
        ref = self.ref
        grant = self.some(data, set(GRANTS) - set(ref.grants), GRANTS)
        if self.offer(Refused(grant, site, "mech", "reservation", ["budget"], b32(grant)), True):
            ref.refused |= set() if ref.awaited or site in ref.late else {grant}

    @rule(data=st.data())
    def spend(self, data: st.DataObject) -> None:
        grant, g = self.grant(data)
        least = max(g.sent, g.admitted, 1) if g else 1
        used = self.some(data, range(least, g.amount + 1) if g else [], [0, least - 1, g.amount + 1 if g else 1])
        word = self.some(data, [used < g.amount] if g else [], [True, False])
        fits = g is not None and g.open and least <= used <= g.amount and word == (used < g.amount)
        if self.offer(Spent(grant, used, "x", b32("word") if word else b""), fits):
            self.ref.end(grant, used)

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        grant, g = self.grant(data)
        if self.offer(Expired(grant, "x"), g is not None and g.open) and g:
            self.ref.end(grant, g.amount)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        grant, g = self.grant(data)
        if self.offer(Freed(grant, "x", b32("word")), g is not None and g.open and not g.sent and not g.admitted):
            self.ref.end(grant, 0)

    @rule(data=st.data(), run=st.sampled_from(["", "run", "run"]))
    def close_round(self, data: st.DataObject, run: str) -> None:
        ref = self.ref
        after = ref.rounds.get(run, 0) + 1
        index = self.some(data, [after], range(4))
        heard = sorted(site for r, n, site in ref.updates if (r, n) == (run, index))
        sites = self.some(data, [heard], [[], ["m"], ["n"], ["m", "n"], ["n", "m"], ["m", "m"]])
        fits = index == after and sites in (["m"], ["n"], ["m", "n"]) and set(sites) <= set(heard)
        if self.offer(RoundClosed(run, index, sites, bytes(32)), fits):
            ref.rounds[run] = index

    @rule(person=st.sampled_from(sorted(PEOPLE)), serial=st.sampled_from(["", *SERIALS]))
    def appoint(self, person: str, serial: str) -> None:
        ref, role = self.ref, PEOPLE[person]
        entry = appointed(person, role, serial)
        wanted = ("appoint", person, f"{role} {entry.public.hex()}")
        office = ref.office()
        first = not office or (role in ("compliance", "hospital") and role not in office)
        fits = person not in ref.roles and (not serial if first else ref.voices(serial, *wanted) >= len(office))
        if self.offer(entry, fits):
            ref.roles[person] = role
            ref.decided |= set() if first else {serial}

    @rule(data=st.data())
    def approve_and_act(self, data: st.DataObject) -> None:
        """Some persons approve, and something is done that may be what they approved."""
        serial = self.some(data, set(SERIALS) - self.ref.decided, SERIALS)
        words = data.draw(st.sampled_from(WORDS))
        if data.draw(st.booleans()):
            self.ask(
                data.draw(st.sampled_from(sorted(PEOPLE))), serial, data.draw(st.sampled_from([words, WORDS[0]]))
            )
        for person in data.draw(st.sampled_from([["cara", "hugo"], ["hugo"], ["cara", "cora"], ["olaf", "cara"]])):
            self.approve(person, serial, words)
        action, subject, value = self.some(data, [words], WORDS)
        if action == "waive":
            self.mostly_restored(data)
        if action == "enrol" and subject in self.ref.sites - self.ref.barred and data.draw(st.booleans()):
            self.offer(revoked(site=subject), True)
            self.ref.barred.add(subject)
            self.ref.certificates |= {n: (s, False) for n, (s, _) in self.ref.certificates.items() if s == subject}
        if action == "enrol":
            self.enrol(subject, serial)
        elif action == "appoint":
            self.appoint(subject, serial)
        elif action == "waive":
            self.waive(subject, serial)
        elif action == "dismiss":
            self.dismiss(subject, serial)
        else:
            self.set_limit(subject, next(n for n in (3, 40) if value in (str(n), said(n))), serial)

    def approve(self, person: str, serial: str, words: tuple[str, str, str]) -> None:
        ref, digest = self.ref, proposal(serial, *words)
        fits = ref.roles.get(person) in ("compliance", "hospital") and serial not in ref.decided
        fits = fits and person not in ref.words.get(serial, {}) and person not in ref.gone
        who, what = ref.asked.get(serial, ("", digest))
        fits = fits and who != person and what == digest
        if self.offer(Approved(person, serial, digest, b32(f"{person} {serial}")), fits):
            ref.words.setdefault(serial, {})[person] = digest

    def ask(self, person: str, serial: str, words: tuple[str, str, str]) -> None:
        ref, entry = self.ref, asks(serial, *words, person)
        fits = person in ref.roles and person not in ref.gone
        if self.offer(entry, fits and serial not in ref.asked and not ref.words.get(serial)):
            ref.asked[serial] = (person, entry.proposal)

    def dismiss(self, person: str, serial: str) -> None:
        ref, role, office = self.ref, PEOPLE[person], self.ref.office()
        others = [p for p in ref.roles if p not in ref.gone and p != person and ref.roles[p] == role]
        fits = person in ref.roles and person not in ref.gone and bool(others or role in ("operator", "researcher"))
        fits = fits and (ref.voices(serial, "dismiss", person, role) >= len(office) if office else not serial)
        if self.offer(Dismissed(person, serial), fits):
            ref.gone.add(person)
            ref.decided |= {serial} if office else set()

    def set_limit(self, name: str, limit: int, serial: str) -> None:
        ref, text = self.ref, said(limit) if name.endswith("rdp") else ""
        now = ref.limits.get(name)
        voices = ref.voices(serial, "limit", name, text or str(limit))
        fits = now is not None and voices >= (2 if limit > now else 1)
        if self.offer(LimitSet(name, limit, text, serial), fits):
            ref.decided.add(serial)
            ref.excused |= {name} if now is not None and limit < now else set()
            ref.limits[name] = limit

    @rule(epoch=st.sampled_from([0, 2, 1]), size=st.sampled_from([-1, 0]))
    def restore(self, epoch: int, size: int) -> None:
        ref = self.ref
        told = restored(max(0, ref.size + size), ref.epoch + epoch, nonce=f"n{ref.epoch + 1}")
        if self.offer(told, (told.epoch, told.size) == (ref.epoch + 1, ref.size)):
            ref.epoch, ref.awaited, ref.returned = ref.epoch + 1, ref.sites - ref.barred, {}
            ref.late = set(ref.barred)

    def mostly_restored(self, data: st.DataObject) -> None:
        """At times, what follows a restore comes without one."""
        if not self.ref.awaited | self.ref.late and data.draw(st.sampled_from([True, True, False])):
            self.restore(1, 0)

    @rule(data=st.data(), amount=st.integers(0, 20))
    def recover(self, data: st.DataObject, amount: int) -> None:
        ref = self.ref
        self.mostly_restored(data)
        grant, name = self.some(data, set(GRANTS) - set(ref.grants), GRANTS), self.some(data, ref.limits, ACCOUNTS)
        site = self.some(data, [name[0]], SITES)
        own = name in ref.limits and name.startswith(f"{site}/")
        fits = own and site in (ref.awaited | ref.late) - ref.barred and grant not in ref.grants and amount > 0
        fits = fits and grant not in ref.refused
        if self.offer(recovered(grant, amount, site, name), fits):
            ref.grants[grant] = Held(site, "run", name, amount)
            ref.end(grant, amount)
            ref.returned[site] = ref.returned.get(site, 0) + 1
            ref.excused.add(name)

    @rule(data=st.data(), behind=st.sampled_from([0, 0, 1]))
    def present(self, data: st.DataObject, behind: int) -> None:
        ref = self.ref
        self.mostly_restored(data)
        site = self.some(data, ref.awaited | ref.late, SITES)
        lost = ref.returned.get(site, 0)
        grants = self.some(data, [lost], [0, lost + 1])
        fits = site in (ref.awaited | ref.late) - ref.barred and not behind and grants == lost
        if self.offer(presented(site, grants, f"n{ref.epoch - behind}"), fits):
            ref.awaited.discard(site)
            ref.late.discard(site)

    def waive(self, site: str, serial: str) -> None:
        ref = self.ref
        agreed_on = ref.voices(serial, "waive", site, str(ref.epoch)) == 2
        if self.offer(Waived(site, serial), site in ref.awaited and agreed_on):
            ref.decided.add(serial)
            ref.awaited.remove(site)
            for name in [n for n in ref.limits if n.startswith(f"{site}/")]:
                ref.spent[name] = max(ref.limits[name], ref.spent[name] + ref.held(name))
            for grant in ref.grants.values():
                grant.open = grant.open and grant.site != site

    @invariant()
    def the_books_have_the_references_numbers(self) -> None:
        ref = self.ref
        assert {name: account(self.state, name) for name in self.state.accounts} == {
            name: (limit, ref.held(name), ref.spent[name], ref.left(name)) for name, limit in ref.limits.items()
        }
        assert all(name in ref.excused or ref.left(name) >= 0 for name in ref.limits)
        assert {name for name, g in self.state.grants.items() if g.state == "held"} == {
            name for name, g in ref.grants.items() if g.open
        }
        assert (self.state.sites_awaited, self.state.sites_pending_receipts, self.state.epoch) == (
            ref.awaited,
            ref.late,
            ref.epoch,
        )
        assert self.state.rounds == ref.rounds
        assert self.state.revoked_sites == ref.barred
        for site in SITES:
            admitted_now = {n for n in NUMBERS if self.state.admits(site, n)}
            assert admitted_now == {n for n, known in ref.certificates.items() if known == (site, True)}
        assert sorted(self.state.keys.values()) == list(range(ref.size))

    def teardown(self) -> None:
        again = State()
        for raw in self.raw:
            again.apply(decode(raw))
        assert again == self.state


TestFold = Fold.TestCase
TestFold.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@dataclass
class Memory:
    """A disk of nothing but memory: what was committed is there."""

    entries: list[bytes] = field(default_factory=list)
    sealed: dict[bytes, bytes] = field(default_factory=dict)
    last: SealedHead | None = None

    def bodies(self, upto: int | None = None) -> Iterator[bytes]:
        return iter(self.entries[:upto])

    def head(self) -> SealedHead | None:
        return self.last

    def body(self, seq: int) -> bytes | None:
        return self.entries[seq] if seq < len(self.entries) else None

    def envelope(self, digest: bytes) -> bytes | None:
        return self.sealed.get(digest)

    def envelopes(self) -> Iterator[bytes]:
        return iter(self.sealed.values())

    def commit(self, batch: Batch) -> None:
        assert batch.first == len(self.entries)
        self.entries += batch.bodies
        self.sealed |= {hashlib.sha256(e).digest(): e for e in batch.envelopes}
        self.last = batch.head

    def marks(self) -> tuple[SealedHead, ...]:
        return ()

    def mark(self, head: SealedHead) -> None:
        pass

    def close(self) -> None:
        pass


KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
DRAFTS = st.lists(st.builds(reserved, st.sampled_from("gh"), st.sampled_from([1, 60])), min_size=1, max_size=2)


@given(told=st.lists(st.tuples(st.sampled_from(string.ascii_lowercase[:3]), DRAFTS), max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_retry_gets_the_same_lines_and_other_content_under_its_key_an_error(
    told: list[tuple[str, list[Reserved]]],
) -> None:
    disk = Memory()
    store, known, left, granted = Store(disk, "lazaret/test", KEY, lambda: 7), dict[str, Any](), LIMIT, set[str]()
    store.append("open", AppendRequest((opened(),)))
    for key, entries in told:
        size, names, price = store.state.size, {e.grant for e in entries}, sum(e.amount for e in entries)
        draft = AppendRequest(tuple(entries))
        if key in known and known[key][0] == entries:
            assert store.append(key, draft) == known[key][1]
            assert store.state.size == size
        elif key in known:
            with pytest.raises(KeyReusedError):
                store.append(key, draft)
            assert store.state.size == size
        elif len(names) == len(entries) and not names & granted and price <= left:
            known[key] = (entries, store.append(key, draft))
            left, granted = left - price, granted | names
        else:
            before = copy.deepcopy(store.state)
            with pytest.raises(InvalidEntryError):
                store.append(key, draft)
            assert store.state == before
    assert account(store.state) == (LIMIT, LIMIT - left, 0, left)
    assert Store(disk, "lazaret/test", KEY, lambda: 8).state == store.state
