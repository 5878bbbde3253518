"""Ed25519 public keys that may identify a signer.

For a key of small order anyone can make a signature that verifies, without a secret. A key of mixed order, A + T with
T one of the eight points of small order, belongs to the holder of A's secret: a signature of A's owner verifies under
it, too (for one message in eight, or all), so one person could count as two. RFC 8032 refuses neither, nor does the
library. So both are refused where a key is assigned to an owner: a key must be a point of the subgroup of prime order
L, in its one encoding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_P: Final = 2**255 - 19
_L: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, -1, _P) % _P
_ROOT: Final = pow(2, (_P - 1) // 4, _P)  # a square root of -1
_Point = tuple[int, int, int, int]  # extended coordinates X, Y, Z, T: x = X / Z, y = Y / Z, x * y = T / Z
_NEUTRAL: Final[_Point] = (0, 1, 1, 0)


@lru_cache(maxsize=4096)  # public keys alone; the fold of a ledger asks for the same few again and again
def is_owned(public: bytes) -> bool:
    """Can this be somebody's Ed25519 key (raw)? 32 bytes, a point in its one encoding, of prime order."""
    point = _decoded(public)
    if point is None or _is_neutral(point):
        return False
    return _is_neutral(_times(_L, point))


def _decoded(public: bytes) -> _Point | None:
    """RFC 8032, section 5.1.3; None: not the encoding of a point."""
    if len(public) != 32:
        return None
    y, sign = int.from_bytes(public, "little") & (1 << 255) - 1, public[31] >> 7
    if y >= _P:
        return None
    u, v = (y * y - 1) % _P, (_D * y * y + 1) % _P
    x = u * pow(v, 3, _P) * pow(u * pow(v, 7, _P), (_P - 5) // 8, _P) % _P
    if v * x * x % _P == -u % _P:
        x = x * _ROOT % _P
    if v * x * x % _P != u or (x == 0 and sign):
        return None
    x = _P - x if x & 1 != sign else x
    return x, y, 1, x * y % _P


def _added(a: _Point, b: _Point) -> _Point:
    """RFC 8032, section 5.1.4: complete, so it doubles too."""
    e, f = (a[1] - a[0]) * (b[1] - b[0]), (a[1] + a[0]) * (b[1] + b[0])
    c, d = 2 * a[3] * b[3] * _D % _P, 2 * a[2] * b[2]
    e, f, g, h = f - e, d - c, d + c, f + e
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(scalar: int, point: _Point) -> _Point:
    out = _NEUTRAL
    for bit in bin(scalar)[2:]:
        out = _added(out, out)
        out = _added(out, point) if bit == "1" else out
    return out


def _is_neutral(point: _Point) -> bool:
    return point[0] % _P == 0 and (point[1] - point[2]) % _P == 0
