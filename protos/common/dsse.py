"""DSSE envelopes (v1.0) with one Ed25519 signature: sign bytes, keep bytes.

The signature covers ``PAE(type, payload)``, so nothing is re-encoded to be verified. securesystemslib and
sigstore were looked at: the first brings key formats and backends that a hospital would have to audit, the
second a transparency service that an air-gapped network has not; the format itself is twelve lines.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_BYTES: Final = 1 << 19


class BadEnvelope(ValueError):
    """Malformed, of another type, or not validly signed by a trusted key."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What was inside, and who sealed it."""

    payload: bytes
    signer: str  # the name under which the key is trusted


def key_id(public: bytes) -> str:
    """The name of a key: SHA-256 of its 32 raw bytes, in hexadecimal."""
    return hashlib.sha256(public).hexdigest()


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE v1.0 pre-authentication encoding.

    >>> pae("http://example.com/HelloWorld", b"hello world")
    b'DSSEv1 29 http://example.com/HelloWorld 11 hello world'
    """
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal(payload: bytes, payload_type: str, key: Ed25519PrivateKey) -> bytes:
    """The envelope's bytes: canonical JSON with one signature."""
    signature = {
        "keyid": key_id(key.public_key().public_bytes_raw()),
        "sig": base64.b64encode(key.sign(pae(payload_type, payload))).decode(),
    }
    return _canonical(
        {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": payload_type,
            "signatures": [signature],
        }
    )


def open_sealed(envelope: bytes, payload_type: str, trusted: Mapping[str, bytes]) -> Opened:
    """Verify, and only then hand out the payload.

    Args:
        envelope: the bytes as they came.
        payload_type: the one type accepted.
        trusted: signer's name -> Ed25519 public key, raw.
    Raises:
        BadEnvelope: for anything but a canonical envelope with one valid signature by a trusted key.
    """
    document = _parse(envelope)
    try:
        payload = _unbase64(document["payload"])
        (signature,) = document["signatures"]
        wanted, raw = signature["keyid"], _unbase64(signature["sig"])
        kind = document["payloadType"]
        if len(document) != 3 or len(signature) != 2:
            raise ValueError("more than was signed")
    except (KeyError, TypeError, ValueError):
        raise BadEnvelope("not a DSSE envelope with one signature") from None
    if kind != payload_type:
        raise BadEnvelope("the envelope holds another type of payload")
    signers = [name for name, public in trusted.items() if key_id(public) == wanted]
    if len(signers) != 1:
        raise BadEnvelope("no trusted key has that name")
    try:
        Ed25519PublicKey.from_public_bytes(trusted[signers[0]]).verify(raw, pae(kind, payload))
    except InvalidSignature:
        raise BadEnvelope("the signature does not verify") from None
    return Opened(payload, signers[0])


def _unbase64(text: str) -> bytes:
    """Standard base64 in its one form: the last character's unused bits are zero."""
    raw = base64.b64decode(text, validate=True)
    if base64.b64encode(raw).decode() != text:
        raise ValueError("base64 with unused bits set")
    return raw


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _parse(envelope: bytes) -> dict[str, Any]:
    if len(envelope) > MAX_BYTES:
        raise BadEnvelope("too large")
    try:
        document = json.loads(envelope)
        same = isinstance(document, dict) and _canonical(document) == envelope
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise BadEnvelope("not canonical JSON")
    return document  # type: ignore[no-any-return]
