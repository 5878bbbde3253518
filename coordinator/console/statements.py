"""The signed statement behind an entry: its signer, verified now, and its content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from coordinator.console.entry_text import visible_text
from policies.audit.auditor import open_envelope
from policies.index.search import EntryQuery, Index
from policies.ledger.entries import Enrolled, Entry
from policies.ledger.export import ExportError
from policies.ledger.state import State
from policies.ledger.store import Store


@dataclass(frozen=True, slots=True)
class StatementView:
    """A sealed statement as a page shows it."""

    digest: str  # SHA-256 of the envelope, as in the entry
    who: str  # whose key was tried, with a word of what they are
    verdict: str  # what came out of it, as a sentence
    holds: bool
    text: str  # the statement, indented; "" when nobody's signature fits
    raw: bytes


def statement_view(entry: Entry, state: State, store: Store, index: Index) -> StatementView | None:
    """The statement behind an entry; None for an entry that rests on none.

    Args:
        entry: the entry.
        state: the fold.
        store: holds the envelope.
        index: knows under which keys a site was enrolled before.
    """
    digest: bytes = getattr(entry, "envelope", b"")
    if not digest:
        return None
    raw = store.envelope(digest)
    who, keys = _keys(entry, state, store, index)
    if raw is None:
        return StatementView(digest.hex(), who, "The statement is not kept in this ledger.", False, "", b"")
    if hashlib.sha256(raw).digest() != digest:
        return StatementView(digest.hex(), who, "The kept statement is not the one of this entry.", False, "", raw)
    for key in keys:
        try:
            payload = open_envelope(raw, key)
        except ExportError:
            continue
        said = f"The signature is valid: it is by the key {key.hex()[:12]}… of {who}."
        return StatementView(digest.hex(), who, said, True, _indented(payload), raw)
    return StatementView(
        digest.hex(), who, f"No key that this ledger knows of {who} made the signature.", False, "", raw
    )


def _keys(entry: Entry, state: State, store: Store, index: Index) -> tuple[str, list[bytes]]:
    """Who must have signed, and under which keys the ledger has known them."""
    person = state.persons.get(getattr(entry, "person", ""))
    if person is not None:
        return f"{person.person}, {person.role}", [person.public]
    if isinstance(entry, Enrolled):
        return f"the site {entry.site}", [entry.sign_key]
    held = state.grants.get(getattr(entry, "grant", ""))
    site = getattr(entry, "site", "") or (held.reserved.site if held else "")
    known = state.sites.get(site)
    keys = [known.sign_key] if known is not None else []
    for seq in index.find(EntryQuery(kinds=("enrolled",), site=site)).seqs if site else ():
        earlier = store.line(seq).record.entry
        if isinstance(earlier, Enrolled) and earlier.sign_key not in keys:
            keys.append(earlier.sign_key)
    return (f"the site {site}" if site else "nobody here"), keys


def _indented(payload: bytes) -> str:
    try:
        value: Any = json.loads(payload)
    except ValueError:
        return ""
    return "\n".join(map(visible_text, json.dumps(value, indent=2, ensure_ascii=False).split("\n")))
