"""What is fuzzed: one function for each parser, which raises only when the parser breaks its promise.

A target takes any bytes and says whether the parser took them (so that a test can show that the corpus is not all
refused at the door). It catches the parser's own errors and nothing else: whatever else comes out is a finding, and
so is a :class:`Broken` promise about what was accepted.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from policies.accounting.claims import UnsupportedClaimError
from policies.audit.auditor import open_envelope
from policies.audit.verify import verify
from policies.ledger import cbor
from policies.ledger.cbor import EntryEncodingError
from policies.ledger.entries import InvalidEntryError, LimitSet, Opened, Record, Recovered, Reserved, decode, encode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import Checkpoint, LedgerCheckpointError, open_checkpoint, sign_checkpoint
from policies.ledger.state import State
from policies.review.policy import Policy, PolicyError, parse, preset, strictest
from policies.review.rules import AccountContext, Verdict, review, review_reservation
from policies.statements import (
    PAYLOAD_TYPE,
    Release,
    Reservation,
    StatementError,
    claim_from,
    claim_json,
    load_json,
)
from policies.statements import encode as encode_statement
from policies.statements import parse as parse_statement
from protos.common.canonical_json import canonical
from protos.common.dsse import EnvelopeError, open_sealed, seal
from tests.fuzz.forgery import forge
from tests.fuzz.ledger import KEYS, LOG_KEY, ORIGIN, dressed, fold, note, public, sealed, sound
from tests.fuzz.roads import CHECKS, KINDS, Broken

LOG: Final = public(LOG_KEY)


def _promise(kept: bool, what: str) -> None:
    if not kept:
        raise Broken(what)


def policy_toml(data: bytes) -> bool:
    """``policy.parse``: PolicyError only; the strictest of a policy and itself is itself, and order is no matter."""
    try:
        policy = parse(data.decode("utf-8", "surrogateescape"), "site.toml")
    except PolicyError:
        return False
    _promise(strictest(policy, policy) == policy, "strictest(p, p) is another policy")
    for other in _policies():
        both = strictest(policy, other)
        _promise(both == strictest(other, policy), "strictest depends on the order")
        _promise(both.epsilon <= policy.epsilon and both.k_min >= policy.k_min, "strictest is looser than one of two")
        _promise(both.mechanisms <= policy.mechanisms and both.levels <= policy.levels, "strictest admits more")
        _promise(both.readers <= policy.readers & other.readers, "strictest lets more people read")
    return True


def strict_json(data: bytes) -> bool:
    """``statement.load_json``: StatementError only; nothing that plain JSON reads as something else."""
    try:
        value = load_json(data)
    except StatementError:
        return False
    _promise(value == json.loads(data), "strict and plain JSON read different values")
    return True


def claim(data: bytes) -> bool:
    """``statement.claim_from`` on any JSON value: UnsupportedClaimError only; a claim is written as it was read."""
    try:
        value = load_json(data)
    except StatementError:
        return False
    try:
        found = claim_from(value)
    except UnsupportedClaimError:
        return False
    _promise(canonical(claim_json(found)) == canonical(value), "a claim is written otherwise than it was read")
    return True


def statement(data: bytes) -> bool:
    """``statement.parse``: its two errors only; what is accepted encodes to the same bytes, and can be reviewed."""
    try:
        found = parse_statement(data)
    except (StatementError, UnsupportedClaimError):
        return False
    _promise(encode_statement(found) == data, "a statement is encoded otherwise than it was read")
    if isinstance(found, Release | Reservation):
        for standing in _standings():
            _judge(found, standing)
    return True


@cache
def _policies() -> tuple[Policy, ...]:
    return tuple(parse(preset(name), name) for name in ("internal", "controlled", "public"))


@cache
def _standings() -> tuple[AccountContext, ...]:
    """No books at all, and those of the seed ledger after each of its records."""
    found = [AccountContext(None)]
    for state in _states():
        for account in state.accounts.values():
            found += [AccountContext(account), *(AccountContext(account, g) for g in state.grants.values())]
    found.append(dataclasses.replace(found[-1], revoked=True))
    return tuple({repr(s): s for s in found}.values())


def _judge(found: Release | Reservation, standing: AccountContext) -> None:
    """Any review ends in a verdict, and an admission never takes more than there is."""
    for policy in _policies():
        if isinstance(found, Reservation):
            verdict = review_reservation(found, standing, policy)
            room = standing.account.left if standing.account else 0
        else:
            verdict = review(found, standing, policy)
            room = standing.grant.reserved.amount if standing.grant else 0
        _promise(type(verdict) is Verdict, "a review without a verdict")
        _promise(not (verdict.admitted and standing.revoked), "a site that was revoked gets a yes")
        _promise(not verdict.admitted or 0 < verdict.amount <= room, "admitted beyond the budget")
        level = verdict.level in ("A", "A*", "B", "C") if isinstance(found, Release) else not verdict.level
        _promise(level, "a verdict without its level")


def reviewed(data: bytes) -> bool:
    """``review`` and ``review_reservation`` never raise, whatever parses and whatever the books took in.

    The input is JSON: a statement's ``predicateType`` and ``predicate``, the subject being made to fit, and under
    ``account`` and ``grant`` other values for fields of the seed ledger's entries.
    """
    try:
        document = load_json(data)
        if not isinstance(document, dict):
            return False
        account, grant = document.pop("account", {}), document.pop("grant", {})
        found = parse_statement(dressed({"_type": "https://in-toto.io/Statement/v1", **document}))
    except (StatementError, UnsupportedClaimError):
        return False
    if not isinstance(found, Release | Reservation):
        return False
    for standing in _altered(account, grant):
        _judge(found, standing)
    return True


def _altered(account: object, grant: object) -> Iterator[AccountContext]:
    """The seed ledger's accounts and grants with these fields changed, where the books take them."""
    entries = sound().export.entries
    for last in [n for n, raw in enumerate(entries) if isinstance(decode(raw).entry, Reserved)]:
        state = State()
        try:
            for raw in entries[: last + 1]:
                record = decode(raw)
                changes = {Opened: account, Reserved: grant}.get(type(record.entry))
                state.apply(decode(_with(raw, changes)) if isinstance(changes, dict) and changes else record)
        except (InvalidEntryError, EntryEncodingError):
            continue
        for known in state.accounts.values():
            yield AccountContext(known)
            for held in state.grants.values():
                for used in {0, 1, held.reserved.amount}:
                    yield AccountContext(known, dataclasses.replace(held, used=used))


def _with(raw: bytes, changes: Mapping[str, Any]) -> bytes:
    """A record's bytes with other values in its body; text stands for bytes where the field holds bytes.

    Raises:
        EntryEncodingError: a value has no place in an entry.
    """
    outer: Any = cbor.decode(raw)
    for name, value in changes.items():
        if name in outer["body"]:
            was = outer["body"][name]
            plain = value.encode("utf-8", "surrogatepass") if type(was) is bytes and type(value) is str else value
            outer["body"][name] = plain
    return _encoded(outer)


def _encoded(value: Any) -> bytes:
    """CBOR; a lone surrogate is no text that could ever be read."""
    try:
        return cbor.encode(value)
    except UnicodeEncodeError:
        raise EntryEncodingError("text is not UTF-8") from None


def cbor_value(data: bytes) -> bool:
    """``cbor.decode``: EntryEncodingError only; what is accepted has one encoding."""
    try:
        value = cbor.decode(data)
    except EntryEncodingError:
        return False
    _promise(cbor.encode(value) == data, "CBOR is encoded otherwise than it was read")
    return True


def entry(data: bytes) -> bool:
    """``entries.decode``: its two errors only, and one encoding; the fold takes a record, or refuses it untouched."""
    try:
        record = decode(data)
    except (EntryEncodingError, InvalidEntryError):
        return False
    _promise(encode(record) == data, "a record is encoded otherwise than it was read")
    _promise(cbor.encode(cbor.decode(data)) == data, "a record is no deterministic CBOR")
    for n, before in enumerate(_states()):
        _applied(record, before, n)
    return True


def _applied(record: Record, before: State, n: int) -> None:
    """Apply a record to books that are kept from one input to the next: all of it is taken, or nothing."""
    state = _ledger()[n]
    try:
        state.apply(record)
    except InvalidEntryError:
        _promise(state == before, "a refused record left something in the books")
        return
    finally:
        if state != before:
            _ledger()[n] = copy.deepcopy(before)
    _promise(state.size == before.size + 1, "a record was taken and not counted")
    for account in state.accounts.values():
        _promise(min(account.held, account.spent) >= 0, "an account below zero")
        _promise(account.left >= 0 or isinstance(record.entry, _BEYOND), "an account is overspent")


_BEYOND: Final = (LimitSet, Recovered)  # a limit may be lowered below what is gone; what was lost is spent anyway


@cache
def _states() -> tuple[State, ...]:
    """The seed ledger's books after each of its records."""
    entries = sound().export.entries
    return tuple(fold(entries[:n]) for n in range(len(entries) + 1))


@cache
def _ledger() -> list[State]:
    return copy.deepcopy(list(_states()))


def checkpoint(data: bytes) -> bool:
    """``open_checkpoint`` on the text, and on the text signed by the log's key: BadCheckpoint only, and one form.

    As ``--from``, a note that the log did sign passes only if it is a head of the seed ledger's own past.
    """
    text = data.decode("utf-8", "surrogateescape")
    return any([_opened(text), _opened(_signed(text))])


def _signed(body: str) -> str:
    """The text as the body of a note by the log's key; what has no bytes cannot be signed."""
    raw = body.encode("utf-8", "surrogatepass")
    origin = body.split("\n", 1)[0]
    key_id = hashlib.sha256(origin.encode("utf-8", "surrogatepass") + b"\n\x01" + LOG).digest()[:4]
    return f"{body}\n\u2014 {origin} {base64.b64encode(key_id + LOG_KEY.sign(raw)).decode()}\n"


def _opened(text: str) -> bool:
    try:
        head = open_checkpoint(text, LOG)
    except LedgerCheckpointError:
        return False
    _promise(sign_checkpoint(head, LOG_KEY) == text, "a checkpoint has two forms")
    _promise(head.size >= 0 and len(head.root) == 32, "a checkpoint of no tree")
    try:
        verify(sound().raw, text)
    except ExportError:
        return True
    _promise(head in _heads(), "the ledger is said to extend a head that it never had")
    return True


@cache
def _heads() -> frozenset[Checkpoint]:
    entries = sound().export.entries
    return frozenset(open_checkpoint(note(entries[:n]), LOG) for n in range(len(entries) + 1))


def export(data: bytes) -> bool:
    """``Export.parse``: Unsound only; what is accepted encodes to the same bytes."""
    try:
        found = Export.parse(data)
    except ExportError:
        return False
    _promise(found.encode() == data, "an export is encoded otherwise than it was read")
    return True


def verified(data: bytes) -> bool:
    """``verify``: Unsound only; no bytes but the sound export's own are sound, since nobody else can sign.

    One thing can be left out of an export unseen: a head that a site cosigned. The site still has it.
    """
    try:
        verify(data, None)
    except ExportError:
        return False
    found, seed = Export.parse(data), sound().export
    _promise(dataclasses.replace(found, witnessed=seed.witnessed) == seed, "a changed export is called sound")
    _promise(set(found.witnessed) <= set(seed.witnessed), "a head that nobody cosigned is called witnessed")
    return True


def audit(data: bytes) -> bool:
    """``verify`` on a forgery: Unsound or sound, and never sound with an account overspent or a history rewritten."""
    forgery = forge(data)
    if forgery is None:
        return False
    raw, old = forgery.encode(), sound().export
    try:
        found = verify(raw, None)
    except ExportError:
        return False
    _promise(found.origin == ORIGIN and found.size == len(forgery.entries), "the findings are another ledger's")
    beyond = any(isinstance(decode(e).entry, _BEYOND) for e in forgery.entries)
    for account in found.accounts.values():
        _promise(min(account["held"], account["spent"]) >= 0, "an account below zero is called sound")
        gone = account["held"] + account["spent"]
        _promise(gone <= account["limit"] or beyond, "an overspent account is called sound")
    try:
        verify(raw, old.checkpoint)
    except ExportError:
        return True
    _promise(forgery.entries[: len(old.entries)] == old.entries, "a rewritten history is called an extension")
    return True


def envelope(data: bytes) -> bool:
    """Both readers of envelopes, on the bytes and on the bytes sealed as a payload: their own errors only.

    The auditor opens exactly what the door opens, to the same payload, and only in the form that sealing gives: what
    is unsigned in an envelope would leave with it.
    """
    shut = open_sealed(sealed(data), PAYLOAD_TYPE, _TRUSTED)
    _promise(shut.payload == data, "what was sealed opens to something else")
    _promise(open_envelope(sealed(data), _TRUSTED[shut.signer]) == data, "an auditor cannot open what was sealed")
    for name, public_key in _TRUSTED.items():
        taken = refused_by_door = refused_by_auditor = None
        try:
            taken = open_sealed(data, PAYLOAD_TYPE, {name: public_key}).payload
        except EnvelopeError as error:
            refused_by_door = error
        try:
            _promise(open_envelope(data, public_key) == taken, "an auditor opens it to something else than the door")
        except ExportError as error:
            refused_by_auditor = error
        _promise(bool(refused_by_door) == bool(refused_by_auditor), "one reader refuses what the other one takes")
    try:
        opened = open_sealed(data, PAYLOAD_TYPE, _TRUSTED)
    except EnvelopeError:
        return False
    again = seal(opened.payload, PAYLOAD_TYPE, KEYS[opened.signer])
    _promise(data == again, "an envelope holds more than was signed")
    return True


_TRUSTED: Final = MappingProxyType({name: public(key) for name, key in KEYS.items()})


@dataclass(frozen=True, slots=True)
class Target:
    """A check, and the format of its inputs: which mutations make sense."""

    check: Callable[[bytes], bool]
    kind: str  # see tests.fuzz.mutate.mutated


TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "policy": Target(policy_toml, "toml"),
        "json": Target(strict_json, "json"),
        "claim": Target(claim, "json"),
        "statement": Target(statement, "statement"),
        "review": Target(reviewed, "json"),
        "cbor": Target(cbor_value, "cbor"),
        "entry": Target(entry, "cbor"),
        "checkpoint": Target(checkpoint, "note"),
        "export": Target(export, "export"),
        "verify": Target(verified, "export"),
        "audit": Target(audit, "cbor"),
        "envelope": Target(envelope, "json"),
        **{name: Target(check, KINDS[name]) for name, check in CHECKS.items()},
    }
)
