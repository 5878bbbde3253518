"""The tree is RFC 6962's: published vectors, proofs that verify, and mutated ones that do not."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from policies.merkle import (
    BadCheckpoint,
    Checkpoint,
    consistency_proof,
    consistent,
    included,
    inclusion_proof,
    leaf_hash,
    open_checkpoint,
    root_of,
    sign_checkpoint,
)

# The vectors of the certificate-transparency reference implementation (merkle tree tests).
INPUTS = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    4: "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    6: "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    7: "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}
LEAVES = [leaf_hash(bytes.fromhex(x)) for x in INPUTS]


def test_roots_are_the_published_ones() -> None:
    for size, root in ROOTS.items():
        assert root_of(LEAVES[:size]).hex() == root


@given(st.integers(1, 40), st.data())
def test_every_inclusion_proof_verifies_and_no_mutated_one_does(size: int, data: st.DataObject) -> None:
    leaves = [leaf_hash(bytes([i])) for i in range(size)]
    index = data.draw(st.integers(0, size - 1))
    proof, root = inclusion_proof(leaves, index), root_of(leaves)
    assert included(leaves[index], index, size, proof, root)
    assert not included(leaf_hash(b"other"), index, size, proof, root)
    if proof:
        wrong = [*proof]
        at = data.draw(st.integers(0, len(proof) - 1))
        wrong[at] = bytes([wrong[at][0] ^ 1]) + wrong[at][1:]
        assert not included(leaves[index], index, size, wrong, root)
        assert not included(leaves[index], index, size, proof[:-1], root)


@given(st.integers(1, 40), st.data())
def test_every_consistency_proof_verifies_and_a_fork_does_not(size: int, data: st.DataObject) -> None:
    leaves = [leaf_hash(bytes([i])) for i in range(size)]
    old = data.draw(st.integers(1, size))
    proof = consistency_proof(leaves, old)
    assert consistent(old, root_of(leaves[:old]), size, root_of(leaves), proof)
    forked = [leaf_hash(b"forked"), *leaves[1:]]
    assert not consistent(old, root_of(leaves[:old]), size, root_of(forked), consistency_proof(forked, old))


def test_a_checkpoint_opens_with_its_key_only() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    head = Checkpoint("lazaret/test", 8, bytes.fromhex(ROOTS[8]))
    note = sign_checkpoint(head, key)
    assert open_checkpoint(note, key.public_key().public_bytes_raw()) == head
    with pytest.raises(BadCheckpoint):
        open_checkpoint(note, other.public_key().public_bytes_raw())


def test_any_changed_character_of_a_checkpoint_is_found() -> None:
    key = Ed25519PrivateKey.generate()
    note = sign_checkpoint(Checkpoint("lazaret/test", 8, bytes.fromhex(ROOTS[8])), key)
    for at in range(len(note)):
        changed = note[:at] + chr(ord(note[at]) ^ 1) + note[at + 1 :]
        with pytest.raises(BadCheckpoint):
            open_checkpoint(changed, key.public_key().public_bytes_raw())
