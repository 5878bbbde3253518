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
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protos.common.canonical_json import canonical
from protos.common.errors import ArtifactError

MAX_BYTES: Final = 1 << 19


class EnvelopeError(ArtifactError, ValueError):
    """Malformed, of another type, or not validly signed by a trusted key."""


@dataclass(frozen=True, slots=True)
class VerifiedEnvelope:
    """The payload, and its verified signer."""

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
    return canonical(
        {"payload": base64.b64encode(payload).decode(), "payloadType": payload_type, "signatures": [signature]}
    )


@dataclass(frozen=True, slots=True)
class Envelope:
    """An envelope in its one form, whose signature is not verified yet."""

    payload: bytes
    payload_type: str
    key_id: str  # the key that it names
    signature: bytes

    def verify(self, public: bytes) -> None:
        """Check that this very key signed it, and that it names this key.

        Args:
            public: an Ed25519 key, 32 raw bytes.
        Raises:
            EnvelopeError: it names another key, or the signature is another one's.
        """
        if self.key_id != key_id(public):
            raise EnvelopeError("the envelope is signed by another key, or names another one")
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(self.signature, pae(self.payload_type, self.payload))
        except (InvalidSignature, ValueError):
            raise EnvelopeError("the signature does not verify") from None


def read_envelope(envelope: bytes, payload_type: str, max_bytes: int = MAX_BYTES) -> Envelope:
    """Read the one form of an envelope: canonical JSON, one signature, base64 without unused bits, nothing beside it.

    So one signed statement has one envelope, and no room for a message.

    Args:
        envelope: the bytes as they came.
        payload_type: the one type accepted.
        max_bytes: more is refused unread.
    Raises:
        EnvelopeError: for anything else.
    """
    if len(envelope) > max_bytes:
        raise EnvelopeError("too large")
    try:
        document = json.loads(envelope)
        same = isinstance(document, dict) and canonical(document) == envelope
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise EnvelopeError("not canonical JSON")
    try:
        (signature,) = document["signatures"]
        found = Envelope(
            strict_base64(document["payload"]),
            document["payloadType"],
            signature["keyid"],
            strict_base64(signature["sig"]),
        )
        if len(document) != 3 or len(signature) != 2:
            raise ValueError("more than was signed")
    except (KeyError, TypeError, ValueError):
        raise EnvelopeError("not a DSSE envelope with one signature") from None
    if found.payload_type != payload_type:
        raise EnvelopeError("the envelope holds another type of payload")
    return found


def open_sealed(envelope: bytes, payload_type: str, trusted: Mapping[str, bytes]) -> VerifiedEnvelope:
    """Verify, and only then hand out the payload.

    Args:
        envelope: the bytes as they came.
        payload_type: the one type accepted.
        trusted: signer's name -> Ed25519 public key, raw.
    Raises:
        EnvelopeError: for anything but a canonical envelope with one valid signature by a trusted key.
    """
    found = read_envelope(envelope, payload_type)
    signers = [name for name, public in trusted.items() if key_id(public) == found.key_id]
    if len(signers) != 1:
        raise EnvelopeError("no trusted key has that name")
    found.verify(trusted[signers[0]])
    return VerifiedEnvelope(found.payload, signers[0])


def strict_base64(text: str) -> bytes:
    """Standard base64 in its one form: the last character's unused bits are zero.

    Raises:
        ValueError: it is not.
    """
    raw = base64.b64decode(text, validate=True)
    if base64.b64encode(raw).decode() != text:
        raise ValueError("base64 with unused bits set")
    return raw
