"""Ledgers that lie, signed by everybody: what is left to the auditor when no signature and no digest is wrong."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from policies.ledger import cbor
from policies.ledger.cbor import EntryEncodingError
from policies.ledger.entries import proposal
from policies.ledger.export import Export
from policies.ledger.merkle import CompactRange, cosign, leaf_hash
from tests.fuzz.ledger import LOG_KEY, SITE_KEY, note, public, redressed, sealed


@dataclass(frozen=True, slots=True)
class Forgery:
    """What a log's operator, a site and two persons who lie together would hand to an auditor, validly signed."""

    entries: tuple[bytes, ...]
    envelopes: tuple[bytes, ...]
    witnessed: tuple[str, ...]

    def encode(self) -> bytes:
        """The export, with a checkpoint over these very entries."""
        head = note(self.entries)
        return Export(public(LOG_KEY), self.entries, self.envelopes, head, self.witnessed).encode()


def forge(data: bytes) -> Forgery | None:
    """Read ``{"entries": [record], "payloads": [statement], "witnessed": [head]}`` in CBOR; None if it is not that.

    In a record, a whole number n for ``envelope``, ``policy`` or ``proposal`` stands for the digest that belongs to
    payload n, and one for ``root`` for the root over the n records before. A head is a size, and the site cosigns it;
    or bytes, which stand in the place of its cosignature on an empty ledger's head.
    """
    try:
        document = cbor.decode(data)
    except EntryEncodingError:
        return None
    if not isinstance(document, dict):
        return None
    records, payloads, heads = (document.get(name) for name in ("entries", "payloads", "witnessed"))
    if not (isinstance(records, list) and isinstance(payloads, list) and isinstance(heads, list)):
        return None
    texts = [redressed(p) for p in payloads if isinstance(p, bytes)][:40]
    digests = [_digests(text) for text in texts]
    entries: list[bytes] = []
    for record in records[:60]:
        body = record.get("body") if isinstance(record, dict) else None
        if isinstance(body, dict):
            _fill(body, digests, entries)
        entries.append(cbor.encode(record))
    envelopes = tuple(
        envelope for _digest, envelope in sorted((hashlib.sha256(e).digest(), e) for e in map(sealed, texts))
    )
    return Forgery(tuple(entries), envelopes, tuple(_head(head, entries) for head in heads[:4]))


def _digests(payload: bytes) -> dict[str, bytes]:
    """What records say of a payload, so far as it has it."""
    found = {"envelope": hashlib.sha256(sealed(payload)).digest()}
    try:
        said = json.loads(payload)["predicate"]
        if "policy" in said:
            found["policy"] = hashlib.sha256(said["policy"].encode()).digest()
        if "serial" in said:
            found["proposal"] = proposal(said["serial"], said["action"], said["subject"], said["value"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return found


def _fill(body: dict[str, Any], digests: list[dict[str, bytes]], before: list[bytes]) -> None:
    for name in ("envelope", "policy", "proposal"):
        at = body.get(name)
        if type(at) is int and at < len(digests):
            body[name] = digests[at].get(name, bytes(32))
    size = body.get("root")
    if type(size) is int:
        tree = CompactRange()
        for raw in before[:size]:
            tree.append(leaf_hash(raw))
        body["root"] = tree.root()


def _head(head: object, entries: list[bytes]) -> str:
    text = note(tuple(entries[:head])) if isinstance(head, int) else note(())
    if isinstance(head, bytes):
        return f"{text}\u2014 site-a {base64.b64encode(head).decode()}\n"
    return text + cosign(text, "site-a", SITE_KEY, 1_700_000_000)
