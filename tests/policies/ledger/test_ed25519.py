"""Keys that belong to nobody, or to somebody else too: which they are by the curve, and where they are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from policies.audit.verify import verify
from policies.governance import decisions
from policies.governance.cli import _key as typed_key
from policies.ledger.ed25519 import is_owned
from policies.ledger.entries import Appointed, Enrolled, InvalidEntryError, Record, encode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import Checkpoint, CompactRange, leaf_hash, sign_checkpoint
from policies.ledger.state import State
from tests.support.ledger_world import Hospital, open_register
from tests.support.weak_keys import (
    EIGHT,
    MIXED,
    OWNER,
    SEED,
    SMALL_ORDER,
    D,
    L,
    P,
    add,
    encoded,
    point,
    root,
    times,
    torsion,
)

KEYS = sorted(SMALL_ORDER)


def secret(seed: bytes) -> int:
    """The scalar of a private key (RFC 8032, section 5.1.5)."""
    h = bytearray(hashlib.sha512(seed).digest()[:32])
    h[0], h[31] = h[0] & 248, h[31] & 127 | 64
    return int.from_bytes(h, "little")


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


def as_another(key: bytes, message: bytes) -> bytes:
    """A signature by the secret of ``OWNER`` that verifies under A + T: R is tried until the hash makes T vanish."""
    a, base = secret(SEED), point(bytes([0x58]) + bytes([0x66]) * 31)
    for r in range(1, 200):
        big_r = encoded(times(r, base))
        h = int.from_bytes(hashlib.sha512(big_r + key + message).digest(), "little") % L
        if h % 8 == 0:
            return big_r + ((r + h * a) % L).to_bytes(32, "little")
    raise AssertionError


@pytest.mark.parametrize("key", MIXED, ids=bytes.hex)
def test_whoever_owns_a_key_signs_as_each_of_its_seven_neighbours_too_and_none_of_them_is_owned(key: bytes) -> None:
    """The library says yes, so the books must not hold such a key: one person would stand there as two."""
    Ed25519PublicKey.from_public_bytes(key).verify(as_another(key, b"limit 50"), b"limit 50")
    assert is_owned(OWNER)
    assert not is_owned(key)


@given(st.binary(min_size=32, max_size=32), st.integers(0, 7))
def test_of_the_eight_neighbours_of_any_key_exactly_the_one_of_prime_order_is_owned(seed: bytes, n: int) -> None:
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    assert is_owned(encoded(add(point(public), EIGHT[n]))) == (EIGHT[n] == (0, 1))


@given(st.binary(min_size=32, max_size=32))
def test_of_any_32_bytes_exactly_the_points_of_prime_order_are_owned(raw: bytes) -> None:
    """Against the affine law above: on the curve, in its one encoding, and L times it is the neutral point."""
    y, sign = int.from_bytes(raw, "little") & (1 << 255) - 1, raw[31] >> 7
    x = root((y * y - 1) * pow(D * y * y + 1, -1, P) % P) if y < P else None
    on_curve = x is not None and not (x == 0 and sign)
    assert is_owned(raw) == (on_curve and raw not in SMALL_ORDER and times(L, point(raw)) == (0, 1))


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
        with pytest.raises(InvalidEntryError, match="not an Ed25519 key of one owner"):
            decisions.appoint(store, "head-1", "hospital", key)
        assert "head-1" not in store.state.persons


def test_no_site_is_enrolled_with_a_key_that_everybody_can_sign_for(tmp_path: Path) -> None:
    with open_register(tmp_path / "ledger.db", Hospital("site-a")).store:
        pass
    with pytest.raises(InvalidEntryError, match="not an Ed25519 key of one owner"):
        open_register(tmp_path / "other.db", Nowhere("weak"))


@pytest.mark.parametrize("key", MIXED, ids=bytes.hex)
def test_no_person_stands_in_the_books_as_two(key: bytes) -> None:
    """A + T is typed, appointed, enrolled and audited nowhere, also where a ledger of before holds it."""
    appointed = Appointed("head-1", "hospital", key, "")
    for entry in (appointed, Enrolled("site-a", key, bytes(32), bytes(32), "")):
        with pytest.raises(InvalidEntryError, match="not an Ed25519 key of one owner"):
            State().apply(Record(1, "k", entry))
    with pytest.raises(ValueError, match="has 32 bytes, and an owner"):
        typed_key(key.hex())
    raw, tree, signer = encode(Record(1, "k", appointed)), CompactRange(), Ed25519PrivateKey.generate()
    tree.append(leaf_hash(raw))
    note = sign_checkpoint(Checkpoint("lazaret/test", 1, tree.root()), signer)
    with pytest.raises(ExportError, match="entry 0: no such role, or not an Ed25519 key of one owner"):
        verify(Export(signer.public_key().public_bytes_raw(), (raw,), (), note).encode())
