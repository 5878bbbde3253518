"""Join tokens: 128 secret bits as people pass them on, and the key that both sides make of them.

The token never travels over the wire. A key is derived from it, the invitation holds a certificate for that key, and
so the very first call of a site is mutual TLS like every other.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protos.common.errors import ArtifactError

TOKEN_BYTES: Final = 16
_SUM_BYTES: Final = 4
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256, SP 800-186, 3.2.1.3


class TokenError(ArtifactError, ValueError):
    """Not a join token; the text holds nothing of it."""


def new_token(entropy: Callable[[int], bytes]) -> str:
    """A fresh token as people read it: eight groups of four letters and digits.

    Args:
        entropy: so many cryptographically random bytes, such as :func:`secrets.token_bytes`.
    """
    raw = entropy(TOKEN_BYTES)
    if len(raw) != TOKEN_BYTES:
        raise TokenError("the source of randomness gave another number of bytes")
    text = base64.b32encode(raw + _sum(raw)).decode()  # 160 bits: no padding
    return "-".join(text[i : i + 4] for i in range(0, len(text), 4))


def read_token(text: str) -> bytes:
    """The token's 128 bits; the last 32 of what is typed are a checksum, so that a slip is found here.

    Raises:
        TokenError: mistyped.
    """
    typed = re.sub(r"[\s-]", "", text).upper()
    try:
        raw = base64.b32decode(typed.encode("ascii"))
    except (binascii.Error, UnicodeEncodeError):
        raw = b""
    token, total = raw[:TOKEN_BYTES], raw[TOKEN_BYTES:]
    if len(raw) != TOKEN_BYTES + _SUM_BYTES or not hmac.compare_digest(total, _sum(token)):
        raise TokenError("the token is mistyped: it is eight groups of four, of A to Z and 2 to 7")
    return token


def token_key(token: bytes) -> ec.EllipticCurvePrivateKey:
    """The P-256 key of a token: HKDF-SHA256 (RFC 5869), then rejection sampling (FIPS 186-5, A.2.2).

    Raises:
        TokenError: not 16 bytes.
    """
    if len(token) != TOKEN_BYTES:
        raise TokenError("a token is 16 bytes")
    draws = (
        HKDF(algorithm=SHA256(), length=32, salt=None, info=b"lazaret join key/1/%d" % i).derive(token)
        for i in itertools.count()
    )
    return ec.derive_private_key(scalar(draws), ec.SECP256R1())


def scalar(draws: Iterable[bytes]) -> int:
    """The first draw of 32 bytes that is a private key of P-256: in [1, n - 1], every one equally likely."""
    return next(d for d in (int.from_bytes(draw) for draw in draws) if 1 <= d < _ORDER)


def _sum(token: bytes) -> bytes:
    return hashlib.sha256(b"lazaret join token/1" + token).digest()[:_SUM_BYTES]
