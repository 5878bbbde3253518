"""Shamir's secret sharing of 32-byte secrets over the prime field of 2^256 + 297 (the first prime above 2^256).

Shamir 1979, "How to share a secret". Any ``threshold`` shares give the secret, fewer give nothing at all.
pycryptodome's would be a second cryptographic library, for secrets of 16 bytes; Python's integers do it in forty
lines. They are not constant-time: whoever can time the process that holds a secret to the microsecond is not held
off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from protos.common.errors import ArtifactError

PRIME: Final = (1 << 256) + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33
_DRAW_BYTES: Final = 48  # 384 bits modulo PRIME: farther from uniform by less than 2^-127


class RandomSource(Protocol):
    """Where randomness comes from: the operating system's in production, repeatable in tests."""

    def take(self, count: int) -> bytes:
        """Give ``count`` fresh random bytes."""
        ...


class SharesError(ArtifactError, ValueError):
    """The shares are malformed, too few, or of no 32-byte secret."""


def split(secret: bytes, threshold: int, points: Iterable[int], entropy: RandomSource) -> dict[int, bytes]:
    """Share ``secret`` (32 bytes) so that any ``threshold`` shares give it back.

    Draws ``threshold - 1`` coefficients of 48 bytes each, lowest power first.

    Args:
        secret: the polynomial's value at 0, big-endian.
        threshold: at least 1.
        points: distinct, each in [1, PRIME).
        entropy: cryptographic; used up to nothing else.
    Returns:
        point -> share, 33 bytes big-endian.
    Raises:
        ValueError: the secret is not 32 bytes, or the points are too few, not distinct or out of range.
    """
    places = list(points)
    if len(secret) != SECRET_BYTES:
        raise ValueError("a secret has 32 bytes")
    if not 1 <= threshold <= len(places) or len(set(places)) != len(places):
        raise ValueError("shares need distinct points, at least as many as the threshold")
    if not all(1 <= x < PRIME for x in places):
        raise ValueError("a share's point lies in [1, PRIME)")
    drawn = [int.from_bytes(entropy.take(_DRAW_BYTES), "big") % PRIME for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "big"), *drawn]
    return {x: _evaluate(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in places}


def _evaluate(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):  # Horner
        value = (value * x + coefficient) % PRIME
    return value


def is_share(raw: bytes) -> bool:
    """Whether ``raw`` is the one encoding of a field element."""
    return len(raw) == SHARE_BYTES and int.from_bytes(raw, "big") < PRIME


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, by Lagrange's interpolation at 0 from the ``threshold`` shares of the lowest points.

    A wrong share gives a wrong secret: check what comes out against something public.

    Raises:
        SharesError: fewer than ``threshold`` shares, one that is malformed, or a value above 32 bytes.
    """
    points = sorted(shares)[:threshold]
    if threshold < 1 or len(points) < threshold:
        raise SharesError(f"{len(points)} shares, {threshold} are needed")
    if not all(1 <= x < PRIME and is_share(shares[x]) for x in points):
        raise SharesError("not a share")
    secret = 0
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        secret = (secret + int.from_bytes(shares[x], "big") * above * pow(below, -1, PRIME)) % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise SharesError("the shares are of no 32-byte secret")
    return secret.to_bytes(SECRET_BYTES, "big")
