"""An entry of the ledger in words: one sentence, then each of its fields, none left out. Pure.

A number is never shown without its unit, and what an entry costs is a share of the budget that pays for it, rounded
up. The sentences themselves are those of the report (:mod:`coordinator.explanations`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

from coordinator.claim_descriptions import describe_claim
from coordinator.explanations import KINDS, LEVELS, MECHANISMS, STAGES, count, explain, utc
from policies.accounting.claims import UNIT
from policies.audit import display
from policies.audit.display import price, whose
from policies.ledger.entries import Entry, Record, Refused, kind_of
from policies.ledger.state import State
from policies.statements import load_json
from protos.common.text import printable

NOBODY: Final = "–"
BADGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "admitted": "yes",
        "refused": "no",
        "revoked": "warn",
        "restored": "warn",
        "recovered": "warn",
        "waived": "warn",
        "expired": "warn",
        "dismissed": "warn",
    }
)
LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "account": "Budget",
        "amount": "Price",
        "artifact": "SHA-256 of what was released",
        "certificate": "SHA-256 of the certificate",
        "claim": "What is promised",
        "delta": "delta",
        "envelope": "SHA-256 of the signed statement",
        "epoch": "Epoch",
        "epsilon": "epsilon, as persons state it",
        "findings": "Reasons",
        "grant": "Grant",
        "grants": "Lost grants shown",
        "level": "Claim level",
        "limit": "Limit",
        "mechanism": "Method",
        "model": "SHA-256 of the model",
        "nonce": "Number of the restore, at random",
        "not_after": "Good until",
        "number": "Number",
        "order": "Order of the Rényi filter, fixed when the budget was opened",
        "person": "Person",
        "policy": "SHA-256 of the policy's text",
        "proposal": "SHA-256 of what was proposed",
        "public": "Public key (Ed25519)",
        "reader": "Encrypted to the reader with the key",
        "release": "Release",
        "role": "Role",
        "root": "Root of the backup",
        "round": "Round",
        "run": "Run",
        "serial": "Proposal",
        "sign_key": "Signing key (Ed25519)",
        "site": "Site",
        "sites": "Sites",
        "size": "Entries in the backup",
        "stage": "When",
        "subject": "About",
        "used": "Used of the grant so far",
        "why": "Why",
    }
)
_NAMES: Final = frozenset(
    {"grant", "release", "run", "site", "person", "serial", "subject", "account"}
)  # found again


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One line of the ledger."""

    seq: int
    at: int  # seconds since 1970
    kind: str
    title: str
    badge: str  # "yes" | "no" | "warn" | ""
    who: str
    words: str


@dataclass(frozen=True, slots=True)
class EntryField:
    """One field of an entry."""

    label: str
    text: str
    search: str = ""  # finds what else has this name
    digest: str = ""  # hexadecimal, shown short
    note: str = ""


def visible_text(text: str) -> str:
    """A foreign text without invisible characters, which are shown as replaced."""
    return printable(text, "\N{REPLACEMENT CHARACTER}")


def row(seq: int, record: Record, state: State) -> EntryRow:
    """One entry as a line of a list."""
    entry = record.entry
    kind = kind_of(entry)
    who, words = sentence(record, state)
    title, badge = KINDS.get(kind, kind), BADGES.get(kind, "")
    return EntryRow(seq, record.at, kind, title, badge, visible_text(who or NOBODY), visible_text(words))


def sentence(record: Record, state: State) -> tuple[str, str]:
    """An entry's site, and its content in words."""
    entry = record.entry
    return whose(entry, state), _no(entry) if isinstance(entry, Refused) else display.words(entry, state)


def _no(entry: Refused) -> str:
    """What was refused, when, and why, the first two reasons in words."""
    when = STAGES.get(entry.stage, entry.stage).partition(",")[0]
    said = [explain(rule)[0].rstrip(".") for rule in entry.findings]
    more = f"; and {count(len(said) - 2, 'other reason')}" if len(said) > 2 else ""
    return f"{entry.mechanism or 'a call'}, {when}: {'; '.join(said[:2])}{more}"


def percent_down(part: int, whole: int) -> float:
    """The same, rounded down: what is left never looks like more."""
    return 1000 * part // whole / 10


def reasons(entry: Entry) -> list[tuple[str, str, str]]:
    """Of a refusal: each rule, why, and what to do."""
    if not isinstance(entry, Refused):
        return []
    return [(visible_text(rule), visible_text(explain(rule)[0]), explain(rule)[1]) for rule in entry.findings]


def facts(entry: Entry, state: State) -> list[EntryField]:
    """Every field of an entry, none left out."""
    made = [_field(f.name, getattr(entry, f.name), entry, state) for f in fields(entry)]
    return [replace(field, text=visible_text(field.text), note=visible_text(field.note)) for field in made]


def _field(name: str, value: Any, entry: Entry, state: State) -> EntryField:
    label = LABELS[name]
    if name == "claim":
        return EntryField(label, value.decode(), note=describe_claim(load_json(value)))
    if isinstance(value, bytes):
        return EntryField(label, "", digest=value.hex()) if value else EntryField(label, "none")
    if value in ("", []):
        return EntryField(label, "none")
    if isinstance(value, list):
        return EntryField(label, ", ".join(value))
    if name in _NAMES:
        return EntryField(label, str(value), search=str(value))
    return EntryField(label, *_of_number(name, value, entry, state))


def _of_number(name: str, value: Any, entry: Entry, state: State) -> tuple[str, str, str, str]:
    """Text, then search and digest, which it has none of, then a note."""
    note = ""
    if name in {"amount", "used", "limit"}:
        note = _weighed(int(value), entry, state)
    elif name == "not_after":
        return f"{utc(value)} UTC", "", "", ""
    elif name == "level" and value in LEVELS:
        note = LEVELS[value][1]
    elif name == "stage":
        note = STAGES.get(value, "")
    elif name == "mechanism":
        note = MECHANISMS.get(value, "")
    elif name == "delta":
        note = f"per {UNIT}"
    elif name == "reader":
        return "", "", str(value), ""
    return (f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)), "", "", note


def _weighed(value: int, entry: Entry, state: State) -> str:
    held = state.grants.get(getattr(entry, "grant", ""))
    account = getattr(entry, "account", "") or (held.reserved.account if held else "")
    known = state.accounts.get(account)
    if known is None:
        return ""
    if not known.opened.order:
        return f"releases without an epsilon per {UNIT}, ever"
    unit = f"nano-nats of Rényi divergence at order {known.opened.order}"
    return unit if value == known.limit else f"{unit}: {price(value, account, state)}"
