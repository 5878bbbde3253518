"""The inputs that every target starts from: made from the product's own output, the same at every start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from policies.accounting.claims import MAX_PARTS, Claim, Composed, KAnonymous, NoClaim, SubsampledGaussian
from policies.ledger import cbor
from policies.ledger.export import Export
from policies.review.policy import preset
from policies.statements import claim_json, encode
from protos.common.canonical_json import canonical
from tests.fuzz import images
from tests.fuzz.ledger import LOG_KEY, SHARED, note, public, sealed, sound, statements
from tests.support.ledger_world import BOTH, HISTOGRAM, LOOKED


def _claims() -> list[bytes]:
    claims: tuple[Claim, ...] = (
        KAnonymous(5, 2, 1),
        NoClaim(),
        SubsampledGaussian(0.25, 1.8, 60),
        SubsampledGaussian(1.0, 2e-3, 1),
    )
    claims += (SHARED, replace(SHARED, honest=1), HISTOGRAM, BOTH, Composed((BOTH.parts[1],) * MAX_PARTS), LOOKED)
    return [canonical(claim_json(c)) for c in claims]


def _statements() -> list[bytes]:
    return [encode(s) for s in statements()]


def _reviews() -> list[bytes]:
    """Statements without what the target adds, beside the books to change."""
    out = []
    for raw in _statements()[1:8]:
        document = json.loads(raw)
        kept = {name: document[name] for name in ("predicateType", "predicate")}
        account: Any = {"limit": 4606708127, "order": 4, "epsilon": "8.0", "delta": "4e-06"}
        grant: Any = {"amount": 1, "claim": '{"k":5,"kind":"k-anonymous","l_diversity":2,"releases_per_patient":1}'}
        out += [canonical(kept), canonical({**kept, "account": account}), canonical({**kept, "grant": grant})]
    return out


def _notes() -> list[bytes]:
    entries = sound().export.entries
    notes = [note(entries[:n]) for n in (0, 1, 5, len(entries))]
    return [text.encode() for n in notes for text in (n, n.partition("\n\n")[0] + "\n")]


def _exports() -> list[bytes]:
    entries = sound().export.entries
    tiny = Export(public(LOG_KEY), entries[:1], (b"{}",), note(entries[:1]))
    none = Export(public(LOG_KEY), (), (), note(()))
    seen = Export(public(LOG_KEY), entries[:1], (), note(entries[:1]), (note(()), note(entries[:1])))
    return [sound().raw, tiny.encode(), none.encode(), seen.encode()]


def _forgeries() -> list[bytes]:
    """The sound ledger with numbers for digests, so that they follow the payloads when these change."""
    book = sound()
    digests = [hashlib.sha256(e).digest() for e in book.export.envelopes]
    records: list[Any] = [cbor.decode(raw) for raw in book.export.entries]
    for n, record in enumerate(records):
        body = record["body"]
        if body.get("envelope") in digests:
            body["envelope"] = digests.index(body["envelope"])
            body |= {name: body["envelope"] for name in ("policy", "proposal") if name in body}
        if "root" in body:
            body["root"] = n
    whole = cbor.encode({"entries": records, "payloads": list(book.payloads), "witnessed": [len(records) // 2]})
    for record in records[:3]:
        record["body"] |= {name: 0 for name in ("envelope", "policy") if name in record["body"]}
    enrolment = [raw for raw in book.payloads if b"enrolment/v1" in raw and b'"csr":"csr"' in raw]  # the first one
    start = cbor.encode({"entries": records[:3], "payloads": list(enrolment), "witnessed": [0]})
    return [whole, start, cbor.encode({"entries": [], "payloads": [], "witnessed": []})]


_MADE: Final[Mapping[str, Callable[[], list[bytes]]]] = MappingProxyType(
    {
        "policy": lambda: [preset(name).encode() for name in ("internal", "controlled", "public")],
        "json": lambda: [*_claims(), b'[null,true,0,-1,"\\ud800\\u0000",{"a":[[]]}]', _statements()[1]],
        "claim": _claims,
        "statement": _statements,
        "review": _reviews,
        "cbor": lambda: [cbor.encode(v) for v in _values()],
        "entry": lambda: list(sound().export.entries),
        "checkpoint": _notes,
        "export": _exports,
        "verify": lambda: [sound().raw],
        "audit": _forgeries,
        "file": lambda: list(images.files()),
        "volume": lambda: list(images.volumes()),
        "association": lambda: list(images.requests()),
        "message": lambda: list(images.messages()),
        "multipart": lambda: list(images.bodies()),
        "envelope": lambda: [*(sealed(raw) for raw in _statements()[1:]), b"{}", sealed(b"")],
    }
)


def _values() -> tuple[cbor.Value, ...]:
    return (0, 23, 24, 255, 256, (1 << 63) - 1, b"", b"x" * 24, "", "é", [], [[], [[1]]], {}, {"a": 1, "bb": [b"c"]})


@cache
def made(target: str) -> tuple[bytes, ...]:
    """The seeds of a target, each once."""
    return tuple(dict.fromkeys(_MADE[target]()))
