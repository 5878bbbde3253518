"""What a site signs: in-toto Statements as canonical JSON bytes, and nothing that is not in the form below.

There is one predicate for each statement of a site to the coordinator: an :class:`Enrolment` or an :class:`Amendment`
of its policy, a :class:`Reservation` (price first), a :class:`Release` (artifact made, please review), a
:class:`Settlement` (how a grant ended) and :class:`Receipts` (after a restore). A person signs a :class:`Request` or
an :class:`Approval`. Numbers that are not whole are decimal texts, so each value has one encoding; :func:`parse`
accepts only bytes that encode back to themselves. The protos package handles the envelope.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from policies.accounting.claims import KINDS, Claim, Composed, Evaluated, UnsupportedClaimError
from protos.common.canonical_json import JsonValue, canonical, distinct
from protos.common.errors import ArtifactError

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATES: Final = "https://lazaret.invalid/attestation/"  # reserved name: the address is an identifier only
MAX_BYTES: Final = 1 << 18
ID: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
HEX: Final = re.compile(r"[0-9a-f]{64}")
_IDENTIFIERS: Final = frozenset(
    {"site", "grant", "release", "mechanism", "run", "outcome", "reason", "person", "serial", "action"}
)
_LINES: Final = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]*")  # tabs and line ends, as in TOML and PEM
MENU: Final = re.compile(r"([1-9][0-9]{0,5}(,[1-9][0-9]{0,5}){0,63})?")
MODALITY: Final = re.compile(r"[A-Z0-9]{1,16}")  # a code string of DICOM PS3.3 C.7.3.1.1.1
# Fields that statements of before do not have: None is left out, so that those keep the bytes that were signed.
_LATER: Final = frozenset({"menu", "vetting_power"})


class StatementError(ArtifactError, ValueError):
    """The bytes are not a statement in its one permitted form."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A hospital asks to take part: its public keys (base64, PEM, OpenSSH) and its own policy."""

    site: str
    sign_key: str  # Ed25519, raw, base64
    csr: str  # PEM
    node_key: str  # Flower node key, EC P-384, OpenSSH
    policy: str  # TOML text


@dataclass(frozen=True, slots=True)
class Return:
    """An enrolled site whose certificate has ended asks for one for a fresh key."""

    site: str
    csr: str  # PEM


@dataclass(frozen=True, slots=True)
class Reservation:
    """Please hold this claim's price for the site, before an image is read."""

    grant: str
    site: str
    run: str  # federated run, or "" for a mechanism of one site alone
    mechanism: str
    claim: Claim
    components: Mapping[str, str]  # component -> provenance (P6): what a private one would make is not even priced
    modality: str  # DICOM modality of the images, (0008,0060)


@dataclass(frozen=True, slots=True)
class Release:
    """An artifact was made under a grant; ``claim`` covers everything released under it so far, this included."""

    release: str
    grant: str
    site: str
    run: str
    round: int  # 1.. of a federated run; 0 otherwise
    mechanism: str
    artifact_type: str
    artifact_sha256: str
    artifact_bytes: int
    claim: Claim
    epsilon_nano: int | None  # None: the claim has no epsilon (never 0 for k-anonymity, P4)
    delta: str | None  # decimal text
    components: Mapping[str, str]  # component -> provenance (P6)
    modality: str
    vetted_against: str  # "nothing" | "public" | "private" (P7)
    reid_rate: str | None  # decimal text: upper bound on the share that a verifier which did not vet re-identified
    approvals: Mapping[str, str]  # role -> SHA-256 of the person's sealed approval of this artifact
    reader: (
        str  # SHA-256 of the HPKE public key that the artifact is encrypted to; "": the coordinator may look inside
    )
    menu: str | None = ""  # every k that was tried before one was chosen, "5,8,11"; "": chosen unseen; None: not said
    vetting_power: str | None = None  # decimal text: lower bound on the share of planted copies that vetting caught


def menu_of(text: str | None) -> tuple[int, ...]:
    """The k of a menu, smallest first; none where a statement of before says none.

    Raises:
        StatementError: not whole numbers, rising, in their shortest form, separated by commas.
    """
    if text is not None and not MENU.fullmatch(text):
        raise StatementError("menu: must be whole numbers separated by commas, or nothing")
    ks = tuple(int(k) for k in text.split(",")) if text else ()
    if any(a >= b for a, b in pairwise(ks)):
        raise StatementError("menu: the numbers must rise")
    return ks


@dataclass(frozen=True, slots=True)
class Settlement:
    """The site's word on the end of a grant.

    ``declined``: nothing was read. Its own ledger refused it (the reason is the finding's rule), or the other one did
    (``coordinator``), or a run was left before anything was begun (``unused``). ``expired``: all of it is spent.
    ``finished``: what left under it has consumed ``used``, and nothing more will leave.
    """

    grant: str
    site: str
    run: str
    mechanism: str
    outcome: str  # "expired" | "declined" | "finished"
    reason: str  # a finding's rule from the site's own review, or a word such as "coordinator", "unused", "restart"
    used: int  # of a finished grant; 0 otherwise


@dataclass(frozen=True, slots=True)
class Amendment:
    """A site's new policy; it replaces the one it enrolled with, and every amendment of a smaller number."""

    site: str
    number: int
    policy: str  # TOML text


@dataclass(frozen=True, slots=True)
class Receipts:
    """After the coordinator's ledger was restored: this site has shown every grant that it holds a receipt of."""

    site: str
    origin: str  # of the restored ledger
    nonce: str  # of the restore
    grants: int  # how many of them the restored ledger had lost


@dataclass(frozen=True, slots=True)
class Approval:
    """One person's approval of a proposal; the ledger state decides who else must agree."""

    person: str
    origin: str  # the ledger that the proposal is for
    serial: str  # chosen by who proposes; each is decided once
    action: str  # "amend" | "appoint" | "dismiss" | "enrol" | "limit" | "refuse" | "release" | "run" | "waive"
    subject: str
    value: str


@dataclass(frozen=True, slots=True)
class Request:
    """One person asks, in the words that others approve or do not; see :class:`Approval` for the fields."""

    person: str
    origin: str
    serial: str
    action: str
    subject: str
    value: str


Statement = Enrolment | Return | Amendment | Reservation | Release | Settlement | Receipts | Approval | Request
_KINDS: Final[Mapping[str, type[Statement]]] = MappingProxyType(
    {
        "enrolment/v1": Enrolment,
        "return/v1": Return,
        "reservation/v1": Reservation,
        "release/v1": Release,
        "settlement/v1": Settlement,
        "amendment/v1": Amendment,
        "receipts/v1": Receipts,
        "approval/v1": Approval,
        "request/v1": Request,
    }
)


def release_id(site: str, grant: str, round_index: int) -> str:
    """The id of a release: it follows from where it comes from, so that no site can take another's, or choose one."""
    return "release-" + hashlib.sha256(f"{site}\n{grant}\n{round_index}".encode()).hexdigest()[:32]


def claim_json(claim: Claim) -> dict[str, JsonValue]:
    """A claim as JSON: its kind and its fields; reals as decimal text that reads back to the same float."""
    kind = next(name for name, cls in KINDS.items() if type(claim) is cls)
    if isinstance(claim, Composed):
        return {"kind": kind, "parts": [claim_json(part) for part in claim.parts]}
    if isinstance(claim, Evaluated):
        training, query = claim_json(claim.training), claim_json(claim.query)
        return {"kind": kind, "looks": claim.looks, "query": query, "training": training}
    values = {f.name: getattr(claim, f.name) for f in fields(claim)}
    return {"kind": kind, **{k: repr(v) if type(v) is float else v for k, v in values.items()}}


def claim_from(value: object) -> Claim:
    """The claim of :func:`claim_json`'s form.

    Raises:
        UnsupportedClaimError: unknown kind, missing or unknown fields, or parameters out of range.
    """
    if not isinstance(value, dict) or type(value.get("kind")) is not str or value["kind"] not in KINDS:
        raise UnsupportedClaimError("unknown kind of claim")
    cls: Any = KINDS[value["kind"]]
    wanted = {f.name: str(f.type) for f in fields(cls)}
    given = {k: v for k, v in value.items() if k != "kind"}
    if set(given) != set(wanted):
        raise UnsupportedClaimError(f"a {value['kind']} claim has the fields {', '.join(sorted(wanted))}")
    if cls is Composed:
        return _composed(given["parts"])
    if cls is Evaluated:
        return _evaluated(given)
    claim: Claim = cls(**{k: decimal(v) if wanted[k] == "float" else v for k, v in given.items()})
    return claim


def _composed(parts: object) -> Composed:
    """The composed claim of a list of parts; what is composed itself is never entered, however deep it goes."""
    if not isinstance(parts, list) or any(isinstance(p, dict) and p.get("kind") == "composed" for p in parts):
        raise UnsupportedClaimError("the parts of a composed claim must be a list of claims, none of them composed")
    read: Any = tuple(claim_from(part) for part in parts)
    return Composed(read)


def _evaluated(given: Mapping[str, Any]) -> Evaluated:
    """The evaluated claim of its three fields; what is composed or evaluated itself is never entered."""
    for name in ("training", "query"):
        if not isinstance(given[name], dict) or given[name].get("kind") in ("composed", "evaluated"):
            raise UnsupportedClaimError("an evaluated claim has one training and one query, neither made of others")
    read: Any = {"training": claim_from(given["training"]), "query": claim_from(given["query"])}
    return Evaluated(looks=given["looks"], **read)


def decimal(value: object) -> float:
    """The float of a decimal text in its shortest form (``repr``)."""
    try:
        number = float(value) if type(value) is str else None
    except ValueError:
        number = None
    if number is None or repr(number) != value:
        raise UnsupportedClaimError("a real number must be a decimal text in its shortest form")
    return number


def _subject(statement: Statement) -> list[JsonValue]:
    if isinstance(statement, Release):
        name, digest = "artifact", statement.artifact_sha256
    else:
        name = type(statement).__name__.lower()
        digest = hashlib.sha256(canonical(_predicate(statement))).hexdigest()
    return [{"digest": {"sha256": digest}, "name": name}]


def _predicate(statement: Statement) -> dict[str, JsonValue]:
    out: dict[str, JsonValue] = {}
    for f in fields(statement):
        value = getattr(statement, f.name)
        if f.name in _LATER and value is None:
            continue
        if f.name == "claim":
            value = claim_json(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        out[f.name] = value
    return out


def encode(statement: Statement) -> bytes:
    """The canonical bytes that the site signs."""
    kind = next(name for name, cls in _KINDS.items() if type(statement) is cls)
    document: dict[str, JsonValue] = {
        "_type": _TYPE,
        "predicate": _predicate(statement),
        "predicateType": _PREDICATES + kind,
        "subject": _subject(statement),
    }
    return canonical(document)


def _no_float(_text: str) -> float:
    raise StatementError("numbers are whole, or decimal texts")


def load_json(raw: bytes, most: int = MAX_BYTES) -> Any:
    """Strict JSON: size, depth, duplicate keys and floats are refused.

    Raises:
        StatementError: for any of these.
    """
    if len(raw) > most:
        raise StatementError("too large")
    try:
        return json.loads(raw, object_pairs_hook=distinct, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError):
        raise StatementError("not strict JSON") from None


def _field(name: str, kind: str, value: object) -> object:
    """One field of a predicate, checked against its declared type."""
    if name == "claim":
        return claim_from(value)
    if kind.startswith("Mapping"):
        if not isinstance(value, dict) or not all(
            type(text) is str and ID.fullmatch(text) for text in (*value, *value.values())
        ):
            raise StatementError(f"{name}: must map short lower-case identifiers to such")
        return MappingProxyType(dict(value))
    if value is None and kind.endswith("| None"):
        return None
    if kind.startswith("int"):
        if type(value) is not int or not 0 <= value < 1 << 53:
            raise StatementError(f"{name}: must be a whole number")
        return value
    return _text(name, value)


def _text(name: str, value: object) -> str:
    """A text field; identifiers are short and plain, so that none can carry a message or a path."""
    if type(value) is not str or len(value) > 16_384 or (not value.isprintable() and not _LINES.fullmatch(value)):
        raise StatementError(f"{name}: must be a text without control characters")
    if name in _IDENTIFIERS and not ID.fullmatch(value) and not (name == "run" and not value):
        raise StatementError(f"{name}: must be a short lower-case identifier")
    if name == "modality" and not MODALITY.fullmatch(value):
        raise StatementError("modality: must be a DICOM code, such as MR")
    if name == "artifact_sha256" and not HEX.fullmatch(value):
        raise StatementError("artifact_sha256: must be 64 hexadecimal digits")
    if name == "reader" and value and not HEX.fullmatch(value):
        raise StatementError("reader: must be 64 hexadecimal digits, or nothing")
    if name == "menu":
        menu_of(value)
    return value


def malformed(statement: Statement) -> str:
    """What :func:`parse` would not let in, of a statement that was built otherwise; "" when nothing is wrong."""
    for f in fields(statement):
        value = getattr(statement, f.name)
        if f.name == "claim":
            if type(value) not in KINDS.values():
                return "claim: of no known kind"
            continue
        try:
            _field(f.name, str(f.type), dict(value) if isinstance(value, Mapping) else value)
        except StatementError as error:
            return str(error)
    return ""


def parse(raw: bytes) -> Statement:
    """Read a statement; verify the envelope around it first.

    Raises:
        StatementError: any departure from the one permitted form.
        UnsupportedClaimError: the claim inside is unknown or senseless.
    """
    document = load_json(raw)
    if not isinstance(document, dict) or document.get("_type") != _TYPE:
        raise StatementError("not an in-toto statement")
    cls: Any = _KINDS.get(str(document.get("predicateType", "")).removeprefix(_PREDICATES))
    predicate = document.get("predicate")
    if cls is None or not isinstance(predicate, dict):
        raise StatementError("unknown predicate")
    wanted = {f.name: str(f.type) for f in fields(cls)}
    if not set(predicate) <= set(wanted) or not set(wanted) - set(predicate) <= _LATER:
        raise StatementError("predicate: missing or unknown fields")
    given = {name: _field(name, wanted[name], value) for name, value in predicate.items()}
    statement: Statement = cls(**dict.fromkeys(set(wanted) - set(given)), **given)
    if encode(statement) != raw:
        raise StatementError("not in canonical form, or the subject is another one's")
    return statement
