"""The ledger's entries, and the canonical encoding of each.

An entry is a leaf of the ledger's Merkle tree, as deterministic CBOR. Amounts are whole numbers: nano-nats of Rényi
divergence at the account's one order (kind ``rdp``), or releases per patient (kind ``k``). Ids are opaque, there is
no free text. What the entries mean together is :mod:`policies.ledger.state`'s fold.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from policies.ledger import cbor
from protos.common.errors import RefusedError

__all__ = ["Appointed", "Approved", "Dismissed", "LimitSet", "Requested", "Waived"]  # what persons decided


@dataclass(frozen=True, slots=True)
class Appointed:
    """A person who may approve, with a role. The first of each role is free; every other needs those in office."""

    person: str
    role: str
    public: bytes  # Ed25519, raw
    serial: str  # of the approved proposal; "" for the first of a role


@dataclass(frozen=True, slots=True)
class Dismissed:
    """A person is no longer in office: they may not ask or approve, and their unused approvals no longer count.

    The last person of an approving role cannot be dismissed.
    """

    person: str
    serial: str  # of the approved proposal; "" where nobody may approve


@dataclass(frozen=True, slots=True)
class Requested:
    """A person's request, in words that others may approve: exactly these words, and never by the requester."""

    person: str
    serial: str
    proposal: bytes  # SHA-256, see :func:`policies.ledger.entries.proposal`
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


class InvalidEntryError(RefusedError, ValueError):
    """The entry breaks a rule of the ledger; it must not be appended, and a ledger that holds it is unsound."""


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A site's signing key and policy were approved."""

    site: str
    sign_key: bytes  # Ed25519, raw
    policy: bytes  # SHA-256 of the site's policy text
    envelope: bytes  # SHA-256 of the sealed enrolment
    serial: str  # of the approved proposal; "" where nobody may approve yet


@dataclass(frozen=True, slots=True)
class Issued:
    """A site was given a certificate."""

    site: str
    number: str  # the certificate's serial number in lower-case hexadecimal, without leading zeros
    certificate: bytes  # SHA-256 of the leaf's DER
    not_after: int  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Revoked:
    """A certificate counts no longer; with the number "" every one of the site, and the site itself."""

    site: str
    number: str
    why: str  # a short word: "lost", "stolen", "left", "key", ...


@dataclass(frozen=True, slots=True)
class Amended:
    """A site signed a new policy. A tighter one binds at once; a looser one raises no limit by itself."""

    site: str
    number: int  # greater than that of every amendment before: an old one cannot come back
    policy: bytes
    envelope: bytes  # SHA-256 of the sealed amendment


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
    stage: str  # "reservation" | "release" | "declined" | "expired" | "call" | ...
    findings: list[str]
    envelope: bytes  # empty when nothing was validly signed by that site


@dataclass(frozen=True, slots=True)
class Sent:
    """In a site's own ledger: this release is about to leave. Durable before a byte of it does.

    ``used`` is what its grant has consumed once it has left, this release included.
    """

    release: str
    grant: str
    site: str
    run: str
    round: int
    mechanism: str
    used: int
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
    reader: str  # whom alone the artifact is encrypted to, as in the release; "": the coordinator could look inside


@dataclass(frozen=True, slots=True)
class Spent:
    """The grant is closed: ``used`` of it is spent, at least what left under it.

    The rest is returned, but only with the site's signed statement that no more was made: only its own count of what
    left is complete.
    """

    grant: str
    used: int
    why: str  # "released" | "refused" | "finished"
    envelope: bytes  # SHA-256 of the site's settlement "finished"; empty when all of it is spent


@dataclass(frozen=True, slots=True)
class Expired:
    """The grant is closed and its whole amount is spent: a crash, a timeout, an unknown end."""

    grant: str
    why: str  # a finding's rule, "restart", "failed", ...


@dataclass(frozen=True, slots=True)
class Freed:
    """The grant is closed without being spent: the site's signed word that nothing was read or released."""

    grant: str
    why: str  # "refused" (by the coordinator) | "unused" (the site left a run that had been granted)
    envelope: bytes  # SHA-256 of the site's sealed settlement, which says that nothing was read or released


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """A round of a federated run was aggregated from these sites' admitted updates."""

    run: str
    round: int
    sites: list[str]
    model: bytes  # SHA-256 of the aggregate's parameters


@dataclass(frozen=True, slots=True)
class Restored:
    """The entries before this one come from a backup; nothing is granted until every site presented its receipts."""

    epoch: int
    size: int  # of the backup
    root: bytes
    nonce: str  # random, so that receipts are for this restore and for no other


@dataclass(frozen=True, slots=True)
class Recovered:
    """After a restore: a grant that the site proved and the backup had lost. Its whole amount is spent."""

    grant: str
    site: str
    run: str
    mechanism: str
    account: str
    amount: int
    claim: bytes
    envelope: bytes  # the site's own sealed reservation


@dataclass(frozen=True, slots=True)
class Presented:
    """After a restore: this site has presented every receipt it holds."""

    site: str
    nonce: str  # of the restore
    grants: int  # how many were lost; as many are recovered before this
    envelope: bytes


Entry = (
    Enrolled
    | Issued
    | Revoked
    | Amended
    | Opened
    | Appointed
    | Dismissed
    | Requested
    | Approved
    | LimitSet
    | Reserved
    | Refused
    | Sent
    | Admitted
    | Spent
    | Expired
    | Freed
    | RoundClosed
    | Restored
    | Recovered
    | Presented
    | Waived
)
KINDS: Final[Mapping[str, type[Entry]]] = MappingProxyType(
    {
        "admitted": Admitted,
        "amended": Amended,
        "appointed": Appointed,
        "approved": Approved,
        "dismissed": Dismissed,
        "enrolled": Enrolled,
        "expired": Expired,
        "freed": Freed,
        "issued": Issued,
        "limit-set": LimitSet,
        "opened": Opened,
        "presented": Presented,
        "recovered": Recovered,
        "refused": Refused,
        "requested": Requested,
        "reserved": Reserved,
        "restored": Restored,
        "revoked": Revoked,
        "round-closed": RoundClosed,
        "sent": Sent,
        "spent": Spent,
        "waived": Waived,
    }
)
_NAMES: Final[Mapping[type[Entry], str]] = MappingProxyType({cls: name for name, cls in KINDS.items()})
_TYPES: Final[Mapping[str, type]] = MappingProxyType({"int": int, "str": str, "bytes": bytes, "list[str]": list})


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the ledger: an entry, when it was written, and under which idempotency key."""

    at: int  # seconds since 1970, informative only
    key: str
    entry: Entry


def kind_of(entry: Entry) -> str:
    """The entry's name in the encoding."""
    return _NAMES[type(entry)]


def proposal(serial: str, action: str, subject: str, value: str) -> bytes:
    """What persons approve, as a digest: both sign it, and the entry that acts on it must give the same."""
    return hashlib.sha256(cbor.encode([serial, action, subject, value])).digest()


@dataclass(frozen=True, slots=True)
class _Form:
    """How one kind of entry is written and read."""

    cls: type[Entry]
    types: tuple[type, ...]  # of the fields, in the class's order
    written: tuple[tuple[bytes, str], ...]  # encoded key, field: in the encoding's order
    tail: bytes  # the record's last pair, which names the kind
    pattern: bytes  # a regular expression that fits the whole record; its groups are the values
    read: tuple[tuple[int, Callable[[bytes], Any]], ...]  # the group of each field in the class's order


def _form(kind: str, cls: type[Entry]) -> _Form:
    types = {f.name: _TYPES[str(f.type)] for f in fields(cls)}
    names = cbor.in_order(types)
    body = cbor.map_pattern({name: cbor.PATTERNS[t] for name, t in types.items()})
    outer = {"at": cbor.PATTERNS[int], "key": cbor.PATTERNS[str]}
    outer |= {"body": body, "type": re.escape(cbor.encode(kind))}
    pattern = cbor.map_pattern(outer)
    read = tuple((names.index(name) + 2, cbor.READERS[t]) for name, t in types.items())
    written = tuple((cbor.encode(name), name) for name in names)
    return _Form(cls, tuple(types.values()), written, cbor.encode("type") + cbor.encode(kind), pattern, read)


_FORMS: Final[Mapping[type[Entry], _Form]] = MappingProxyType({cls: _form(kind, cls) for kind, cls in KINDS.items()})
_BY_TAIL: Final[Mapping[bytes, _Form]] = MappingProxyType({form.tail: form for form in _FORMS.values()})
_TYPE: Final = cbor.encode("type")


@cache
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    """Compile a kind's pattern when the first entry of it is read: all of them take a tenth of a second."""
    return re.compile(pattern, re.DOTALL)


def encode(record: Record) -> bytes:
    """Deterministic CBOR of a record: ``{"at", "key", "body": {field: value}, "type"}``.

    Raises:
        cbor.EntryEncodingError: a value that has no place in an entry.
    """
    entry = record.entry
    form = _FORMS[type(entry)]
    parts = [b"\xa4\x62at", cbor.encode(record.at), b"\x63key", cbor.encode(record.key), b"\x64body"]
    parts.append(cbor.map_head(len(form.written)))
    for key, name in form.written:
        parts += (key, cbor.encode(getattr(entry, name)))
    parts.append(form.tail)
    return b"".join(parts)


def decode(raw: bytes) -> Record:
    """The record of :func:`encode`.

    Raises:
        cbor.EntryEncodingError: not deterministic CBOR.
        InvalidEntryError: not a known entry with exactly its fields.
    """
    form = _BY_TAIL.get(raw[raw.rfind(_TYPE) :])
    match = _compiled(form.pattern).fullmatch(raw) if form is not None else None
    if form is None or match is None or len(raw) > cbor.MAX_BYTES:
        return _decode_slowly(raw)
    groups = match.groups()
    try:
        entry: Entry = form.cls(*[read(groups[i]) for i, read in form.read])
        return Record(_INT(groups[0]), _STR(groups[1]), entry)
    except UnicodeDecodeError:
        raise cbor.EntryEncodingError("text is not UTF-8") from None


_INT, _STR = cbor.READERS[int], cbor.READERS[str]


def _decode_slowly(raw: bytes) -> Record:
    outer = cbor.decode(raw)
    if not isinstance(outer, dict) or set(outer) != {"at", "body", "key", "type"}:
        raise InvalidEntryError("not a record")
    cls, body = KINDS.get(str(outer["type"])), outer["body"]
    if cls is None or not isinstance(body, dict) or set(body) != {f.name for f in fields(cls)}:
        raise InvalidEntryError("unknown entry, or missing or unknown fields")
    for name, kind in zip((f.name for f in fields(cls)), _FORMS[cls].types, strict=True):
        value = body[name]
        if type(value) is not kind or (kind is list and not all(type(v) is str for v in value)):  # type: ignore[union-attr]
            raise InvalidEntryError(f"{name} has another type")
    at, key = outer["at"], outer["key"]
    if type(at) is not int or type(key) is not str or type(outer["type"]) is not str:
        raise InvalidEntryError("not a record")
    return Record(at, key, cls(**body))  # type: ignore[arg-type]
