"""Ed25519 keys that belong to nobody, or to somebody else too, by the curve's arithmetic (RFC 8032, section 5.1)."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
SEED = bytes(range(32))
# Every encoding that reads as one of the eight points of small order: their own eight, and the six that are not in
# their one form, with y + p instead of y, or with a sign for x = 0. Chalkias, Garillot and Nikolaenko, "Taming the
# many EdDSAs" (SSR 2020), section 3 and table 1.
SMALL_ORDER = frozenset(
    bytes.fromhex(key)
    for key in (
        "01" + "00" * 31,  # the neutral point
        "ec" + "ff" * 30 + "7f",  # order 2
        "00" * 32,  # order 4
        "00" * 31 + "80",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",  # order 8
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
        "01" + "00" * 30 + "80",  # the neutral point, written otherwise
        "ee" + "ff" * 30 + "7f",
        "ee" + "ff" * 31,
        "ec" + "ff" * 31,  # order 2
        "ed" + "ff" * 30 + "7f",  # order 4
        "ed" + "ff" * 31,
    )
)


def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The addition law of edwards25519 (RFC 8032, section 5.1.4), affine."""
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2
    x3 = (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P
    return x3, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P


def times(n: int, a: tuple[int, int]) -> tuple[int, int]:
    out = (0, 1)
    for bit in bin(n)[2:]:
        out = add(out, out)
        out = add(out, a) if bit == "1" else out
    return out


def root(square: int) -> int | None:
    r = pow(square, (P + 3) // 8, P)
    for candidate in (r, r * pow(2, (P - 1) // 4, P) % P):
        if candidate * candidate % P == square % P:
            return candidate
    return None


def torsion() -> set[tuple[int, int]]:
    """The eight points: the multiples of one of order 8, which is L times a point that is in no smaller subgroup."""
    for y in range(2, 100):
        x = root((y * y - 1) * pow(D * y * y + 1, -1, P))
        if x is not None:
            found = {times(n, times(L, (x, y))) for n in range(8)}
            if len(found) == 8:
                return found
    raise AssertionError


def point(public: bytes) -> tuple[int, int]:
    """The point of an encoding that is in its one form."""
    y, sign = int.from_bytes(public, "little") & (1 << 255) - 1, public[31] >> 7
    x = root((y * y - 1) * pow(D * y * y + 1, -1, P) % P)
    assert x is not None
    return (P - x if x & 1 != sign else x), y


def encoded(a: tuple[int, int]) -> bytes:
    return (a[1] | (a[0] & 1) << 255).to_bytes(32, "little")


EIGHT = sorted(torsion())
OWNER = Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()
MIXED = [encoded(add(point(OWNER), t)) for t in EIGHT if t != (0, 1)]
