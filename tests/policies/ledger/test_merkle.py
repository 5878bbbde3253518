"""The tree is RFC 6962's: published vectors, proofs that verify, and mutated ones that do not."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from policies.ledger.merkle import (
    EMPTY_ROOT,
    Checkpoint,
    CompactRange,
    LedgerCheckpointError,
    MerkleTree,
    cosign,
    cosigners,
    leaf_hash,
    node_hash,
    open_checkpoint,
    sign_checkpoint,
    verify_consistency,
    verify_inclusion,
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


PATHS = {  # (leaf, size): audit path, of the same tests
    (0, 1): [],
    (0, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (5, 8): [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 3): ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"],
    (1, 5): [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
PROOFS = {  # (old, size): consistency, of the same tests
    (1, 1): [],
    (1, 8): PATHS[0, 8],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): PATHS[1, 5][1:],
}


def tree_of(leaves: Sequence[bytes]) -> MerkleTree:
    tree = MerkleTree()
    for leaf in leaves:
        tree.append(leaf)
    return tree


def root_by_definition(leaves: Sequence[bytes]) -> bytes:
    """RFC 6962 section 2.1, word for word: the oracle."""
    if not leaves:
        return EMPTY_ROOT
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return node_hash(root_by_definition(leaves[:k]), root_by_definition(leaves[k:]))


def test_roots_and_proofs_are_the_published_ones() -> None:
    tree = tree_of(LEAVES)
    for size, root in ROOTS.items():
        assert tree.root(size).hex() == root
    for (leaf, size), path in PATHS.items():
        assert [node.hex() for node in tree.inclusion_proof(leaf, size)] == path
    for (old, size), proof in PROOFS.items():
        assert [node.hex() for node in tree.consistency_proof(old, size)] == proof


def test_every_root_is_the_one_of_the_definition() -> None:
    leaves = [leaf_hash(bytes([i])) for i in range(130)]
    tree, compact = MerkleTree(), CompactRange()
    for size, leaf in enumerate(leaves, 1):
        tree.append(leaf)
        compact.append(leaf)
        assert tree.root() == compact.root() == root_by_definition(leaves[:size])
    assert [tree.root(n) for n in range(131)] == [root_by_definition(leaves[:n]) for n in range(131)]


@given(st.integers(1, 70), st.data())
def test_every_inclusion_proof_verifies_and_no_mutated_one_does(size: int, data: st.DataObject) -> None:
    leaves = [leaf_hash(bytes([i])) for i in range(size + data.draw(st.integers(0, 9)))]
    index, tree = data.draw(st.integers(0, size - 1)), tree_of(leaves)
    proof, root = tree.inclusion_proof(index, size), root_by_definition(leaves[:size])
    assert verify_inclusion(leaves[index], index, size, proof, root)
    assert not verify_inclusion(leaf_hash(b"other"), index, size, proof, root)
    if proof:
        wrong = [*proof]
        at = data.draw(st.integers(0, len(proof) - 1))
        wrong[at] = bytes([wrong[at][0] ^ 1]) + wrong[at][1:]
        assert not verify_inclusion(leaves[index], index, size, wrong, root)
        assert not verify_inclusion(leaves[index], index, size, proof[:-1], root)


@given(st.integers(1, 70), st.data())
def test_every_consistency_proof_verifies_and_a_fork_does_not(size: int, data: st.DataObject) -> None:
    leaves = [leaf_hash(bytes([i])) for i in range(size)]
    old, tree = data.draw(st.integers(1, size)), tree_of(leaves)
    proof = tree.consistency_proof(old, size)
    assert verify_consistency(old, root_by_definition(leaves[:old]), size, tree.root(), proof)
    forked = tree_of([leaf_hash(b"forked"), *leaves[1:]])
    assert not verify_consistency(old, tree.root(old), size, forked.root(), forked.consistency_proof(old, size))


@pytest.mark.parametrize(("old", "size"), [(0, 3), (4, 3), (2, 9)])
def test_there_is_no_proof_for_trees_that_are_not(old: int, size: int) -> None:
    tree = tree_of(LEAVES)
    with pytest.raises(ValueError, match="size"):
        tree.consistency_proof(old, size)
    with pytest.raises(ValueError, match="no such leaf"):
        tree.inclusion_proof(size, size)
    with pytest.raises(ValueError, match="large"):
        tree.root(9)


def test_a_cosignature_is_c2sps_and_is_its_witness_alone() -> None:
    """C2SP tlog-cosignature: type 4, a time of 8 bytes, and a signature over time and note body."""
    key, log = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    note = sign_checkpoint(Checkpoint("lazaret/test", 8, bytes.fromhex(ROOTS[8])), log)
    line = cosign(note, "site-a", key, 1_700_000_000)
    public = key.public_key().public_bytes_raw()
    name, raw = line.split(" ")[1], base64.b64decode(line.split(" ")[2])
    assert (name, len(raw)) == ("site-a", 76)
    assert raw[:4] == hashlib.sha256(b"site-a\n\x04" + public).digest()[:4]
    assert int.from_bytes(raw[4:12], "big") == 1_700_000_000
    body = note.split("\n\n")[0] + "\n"
    key.public_key().verify(raw[12:], b"cosignature/v1\ntime 1700000000\n" + body.encode())
    assert open_checkpoint(note + line, log.public_key().public_bytes_raw()).size == 8
    assert cosigners(note + line, {"site-a": public}) == {"site-a"}
    assert cosigners(note + line, {"site-b": public}) == set()
    assert cosigners(note + line, {"site-a": log.public_key().public_bytes_raw()}) == set()
    other = sign_checkpoint(Checkpoint("lazaret/test", 7, bytes.fromhex(ROOTS[7])), log)
    assert cosigners(other + line, {"site-a": public}) == set()


def test_a_checkpoint_opens_with_its_key_only() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    head = Checkpoint("lazaret/test", 8, bytes.fromhex(ROOTS[8]))
    note = sign_checkpoint(head, key)
    assert open_checkpoint(note, key.public_key().public_bytes_raw()) == head
    with pytest.raises(LedgerCheckpointError):
        open_checkpoint(note, other.public_key().public_bytes_raw())


def test_any_changed_character_of_a_checkpoint_is_found() -> None:
    key = Ed25519PrivateKey.generate()
    note = sign_checkpoint(Checkpoint("lazaret/test", 8, bytes.fromhex(ROOTS[8])), key)
    for at in range(len(note)):
        changed = note[:at] + chr(ord(note[at]) ^ 1) + note[at + 1 :]
        with pytest.raises(LedgerCheckpointError):
            open_checkpoint(changed, key.public_key().public_bytes_raw())
