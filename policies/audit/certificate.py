"""A release certificate: the ledger's facts on one release, signed by its key, with inclusion proofs.

This module defines the form; :mod:`policies.audit.certificate_check` verifies it. A certificate rests on ledger
entries (the site's enrolment and later revocations, the account charged, the grant, the admission; for a federated
model each site's last update and the rounds), an inclusion proof for each under one signed checkpoint (RFC 6962), and
the site's own signed statement. Its facts are derived from these alone, so none can be stronger than the ledger. Its
wording is the coordinator's, who signs it. Needs only Python and ``cryptography``.

As JSON it is a DSSE envelope. As PDF it holds that JSON as an attachment, and its last line is a comment with the
ledger's signature over every byte before it: what is printed cannot be changed either.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from policies.ledger.export import ExportError
from policies.statements import HEX, load_json
from protos.common.canonical_json import canonical
from protos.common.dsse import EnvelopeError, pae, read_envelope, strict_base64

PAYLOAD: Final = "application/vnd.lazaret.certificate+json"
FIRST: Final = "lazaret-certificate/1"  # said nothing of what was revoked; read for ever, and made no more
FORM: Final = "lazaret-certificate/2"
MAX_BYTES: Final = 1 << 26
ATTACHED: Final = "certificate.json"
TASK: Final = "task"  # among the words: the digest of the task whose network a model is of
_SIGNED: Final = re.compile(rb"%lazaret-certificate ([A-Za-z0-9+/]{86}==)\n")
_ENVELOPE: Final = re.compile(
    rb'\{"payload":"[A-Za-z0-9+/=]+","payloadType":"' + re.escape(PAYLOAD.encode()) + rb'"[^}]*\}\]\}'
)
_KEYS: Final = {"checkpoint", "entries", "envelopes", "facts", "form", "key", "origin", "words"}


@dataclass(frozen=True, slots=True)
class ProvenEntry:
    """An entry in its place, and the proof that the checkpoint's tree holds it there."""

    seq: int
    entry: bytes
    proof: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The signed content; :func:`policies.audit.certificate_check.check` verifies it."""

    origin: str
    public: bytes  # the ledger's Ed25519 key, raw
    checkpoint: str  # signed note
    shown: tuple[ProvenEntry, ...]
    envelopes: tuple[bytes, ...]  # the sites' sealed statements
    facts: Mapping[str, Any]
    words: Mapping[str, str]  # the same for people; signed, and derived from nothing
    form: str = FORM

    def __post_init__(self) -> None:
        """A form that this program knows."""
        if self.form not in (FIRST, FORM):
            raise ExportError("not a certificate of a form that this program knows")

    def encode(self) -> bytes:
        """The payload to sign: canonical JSON."""
        entries: list[Any] = [
            {"entry": _b64(s.entry), "proof": [_b64(p) for p in s.proof], "seq": s.seq} for s in self.shown
        ]
        return canonical(
            {
                "checkpoint": self.checkpoint,
                "entries": entries,
                "envelopes": [_b64(raw) for raw in self.envelopes],
                "facts": dict(self.facts),
                "form": self.form,
                "key": self.public.hex(),
                "origin": self.origin,
                "words": dict(self.words),
            }
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ledger's key, to compare with the one that its owner publishes."""
        return hashlib.sha256(self.public).hexdigest()


def is_certificate(raw: bytes) -> bool:
    """Does this look like one, rather than like an export of a ledger?"""
    return raw.startswith((b"%PDF-", b"{"))


def read(raw: bytes) -> Certificate:
    """The certificate in a file, JSON or PDF, once the signature over the whole file holds under its own key.

    Raises:
        ExportError: not in its one form, or its signature is another key's.
    """
    if raw.startswith(b"%PDF-"):
        return _read_pdf(raw)
    try:
        envelope = read_envelope(raw.removesuffix(b"\n"), PAYLOAD, 2 * MAX_BYTES)
    except EnvelopeError as error:
        raise ExportError(f"not a certificate: {error}") from None
    found = _decode(envelope.payload)
    if envelope.key_id != found.fingerprint:
        raise ExportError("the envelope names another key than the certificate")
    _verify(found.public, envelope.signature, PAYLOAD, envelope.payload)
    return found


def _read_pdf(raw: bytes) -> Certificate:
    at = raw.rfind(b"%lazaret-certificate ")
    signed = _SIGNED.fullmatch(raw[at:]) if at > 0 else None
    if signed is None:
        raise ExportError("the PDF's last line is no signature of a ledger: it is not a certificate, or was changed")
    inside = _ENVELOPE.findall(raw)
    if len(inside) != 1:
        raise ExportError("the PDF does not hold exactly one certificate")
    found = read(inside[0])
    try:
        signature = strict_base64(signed[1].decode())
    except ValueError:
        raise ExportError("the PDF's signature is not in its one form") from None
    _verify(found.public, signature, "application/pdf", raw[:at])
    return found


def pdf_signature(signature: bytes) -> bytes:
    """The last line of a certificate's PDF: the signature over :func:`pae` of every byte before it."""
    return b"%lazaret-certificate " + base64.b64encode(signature) + b"\n"


def _verify(public: bytes, signature: bytes, kind: str, payload: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, pae(kind, payload))
    except (InvalidSignature, ValueError):
        raise ExportError("the certificate was changed, or is signed by another key than the one it names") from None


def _decode(payload: bytes) -> Certificate:
    try:
        body = load_json(payload, MAX_BYTES)
        if canonical(body) != payload or set(body) != _KEYS or body["form"] not in (FIRST, FORM):
            raise ExportError("not a certificate of a form that this program knows, in its one form")
        _typed(body)
        shown = tuple(
            ProvenEntry(e["seq"], strict_base64(e["entry"]), tuple(strict_base64(p) for p in e["proof"]))
            for e in body["entries"]
        )
        envelopes = tuple(strict_base64(raw) for raw in body["envelopes"])
        public = bytes.fromhex(body["key"])
        said = (body["facts"], body["words"], body["form"])
        return Certificate(body["origin"], public, body["checkpoint"], shown, envelopes, *said)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ExportError(str(error) if isinstance(error, ExportError) else "the certificate is malformed") from None


def _typed(body: Mapping[str, Any]) -> None:
    """Each part has its type: whoever signs a certificate chooses what stands in it.

    Raises:
        ExportError: one has another.
    """
    words, entries = body["words"], body["entries"]
    kinds = {"checkpoint": str, "entries": list, "envelopes": list, "facts": dict, "key": str, "origin": str}
    wrong = [name for name, kind in kinds.items() if type(body[name]) is not kind]
    wrong += [] if type(words) is dict and all(type(text) is str for text in words.values()) else ["words"]
    wrong += [] if type(entries) is list and all(_is_entry(e) for e in entries) else ["entries"]
    wrong += [] if type(body["key"]) is str and HEX.fullmatch(body["key"]) else ["key"]
    if wrong:
        raise ExportError(f"the certificate is malformed: {', '.join(sorted(set(wrong)))}")


def _is_entry(e: object) -> bool:
    keys = {"entry", "proof", "seq"}
    return type(e) is dict and set(e) == keys and type(e["seq"]) is int and type(e["proof"]) is list


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
