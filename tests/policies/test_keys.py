"""Keys that belong to nobody: the list, against the curve itself, and where such a key is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policies import governance
from policies.entries import InvalidEntry
from policies.keys import SMALL_ORDER, is_owned
from tests.support.books import Hospital, open_register

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
KEYS = sorted(SMALL_ORDER)


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


def test_the_list_is_every_encoding_of_the_curves_eight_points_of_small_order() -> None:
    encodings = set()
    for x, y in torsion():
        signs = {0, 1} if x == 0 else {x & 1}  # with x = 0 readers take either
        rows = [y, y + P] if y + P < 2**255 else [y]
        encodings |= {(row | sign << 255).to_bytes(32, "little") for row in rows for sign in signs}
    assert encodings == SMALL_ORDER
    assert len(SMALL_ORDER) == 14


@pytest.mark.parametrize("key", KEYS, ids=bytes.hex)
def test_for_each_of_them_a_signature_without_a_secret_verifies(key: bytes) -> None:
    """R is one of the eight, and S = 0: for one message in eight, or better, the library says yes."""

    def verifies(r: bytes, message: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(r + bytes(32), message)
        except InvalidSignature:
            return False
        return True

    neutral = bytes([1]) + bytes(31)
    assert any(verifies(neutral, b"limit %d" % n) for n in range(200))
    assert not is_owned(key)


def test_the_keys_of_persons_and_sites_are_owned() -> None:
    assert all(is_owned(Ed25519PrivateKey.generate().public_key().public_bytes_raw()) for _ in range(50))
    assert not is_owned(bytes([7]) * 31)
    assert not is_owned(bytes([7]) * 33)


class Nowhere(Hospital):
    @property
    def public(self) -> bytes:
        return bytes([1]) + bytes(31)


@pytest.mark.parametrize("key", KEYS, ids=bytes.hex)
def test_nobody_is_appointed_with_a_key_that_everybody_can_sign_for(tmp_path: Path, key: bytes) -> None:
    with open_register(tmp_path / "ledger.db", Hospital("site-a")).store as store:
        with pytest.raises(InvalidEntry, match="not an Ed25519 key of one owner"):
            governance.appoint(store, "head-1", "hospital", key)
        assert "head-1" not in store.state.persons


def test_no_site_is_enrolled_with_a_key_that_everybody_can_sign_for(tmp_path: Path) -> None:
    with open_register(tmp_path / "ledger.db", Hospital("site-a")).store:
        pass
    with pytest.raises(InvalidEntry, match="not an Ed25519 key of one owner"):
        open_register(tmp_path / "other.db", Nowhere("weak"))
