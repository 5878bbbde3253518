"""An inclusion proof that a person can follow: the steps are the tree's own nodes, and whatever is bent is found."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.audit.inclusion_proof import Proof, check, walk
from policies.ledger.merkle import Checkpoint, MerkleTree, leaf_hash, sign_checkpoint

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw()
ORIGIN = "lazaret/test"
ENTRIES = [f"entry {n}".encode() for n in range(77)]


def tree_of(size: int) -> MerkleTree:
    tree = MerkleTree()
    for entry in ENTRIES[:size]:
        tree.append(leaf_hash(entry))
    return tree


def note(tree: MerkleTree, size: int, origin: str = ORIGIN, key: Ed25519PrivateKey = KEY) -> str:
    return sign_checkpoint(Checkpoint(origin, size, tree.root(size)), key)


def proven(seq: int, size: int) -> Proof:
    tree = tree_of(size)
    return check(seq, ENTRIES[seq], tree.inclusion_proof(seq, size), note(tree, size), (ORIGIN, PUBLIC))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 11, 64, 77])
def test_every_step_is_the_root_of_the_entries_that_it_names(size: int) -> None:
    for seq in range(size):
        proof = proven(seq, size)
        assert proof.holds, proof.fault
        for step in proof.steps:
            inside = MerkleTree()
            for entry in ENTRIES[step.first : step.last + 1]:
                inside.append(leaf_hash(entry))
            assert step.joined == inside.root()
            assert step.first <= seq <= step.last
        if proof.steps:
            assert (proof.steps[-1].first, proof.steps[-1].last) == (0, size - 1)
        assert proof.head is not None
        assert proof.root == proof.head.root


@pytest.mark.parametrize("seq", [0, 5, 10])
def test_another_entry_place_path_root_or_key_is_found(seq: int) -> None:
    size, tree = 11, tree_of(11)
    path, good, ledger = tree.inclusion_proof(seq, size), note(tree, size), (ORIGIN, PUBLIC)
    bent = {
        "entry": check(seq, ENTRIES[seq] + b"!", path, good, ledger),
        "place": check(seq + 1 if seq < 10 else 9, ENTRIES[seq], path, good, ledger),
        "outside": check(size, ENTRIES[seq], path, good, ledger),
        "shorter": check(seq, ENTRIES[seq], path[:-1], good, ledger),
        "longer": check(seq, ENTRIES[seq], [*path, bytes(32)], good, ledger),
        "turned": check(seq, ENTRIES[seq], [*path[:-1], bytes(32)], good, ledger),
        "older head": check(seq, ENTRIES[seq], path, note(tree, 1), ledger),
        "another origin": check(seq, ENTRIES[seq], path, note(tree, size, "lazaret/other"), ledger),
        "another key": check(seq, ENTRIES[seq], path, note(tree, size, key=Ed25519PrivateKey.generate()), ledger),
        "no note": check(seq, ENTRIES[seq], path, "nothing", ledger),
    }
    assert {name: proof.holds for name, proof in bent.items()} == dict.fromkeys(bent, False)
    assert all(proof.fault.endswith(".") for proof in bent.values())


def test_a_walk_without_such_a_leaf_is_refused() -> None:
    with pytest.raises(ValueError, match="no such leaf"):
        walk(bytes(32), 3, 3, [])


def test_what_is_downloaded_is_enough_to_check_it_again() -> None:
    told = json.loads(proven(5, 11).to_json())
    import base64

    again = check(
        told["seq"],
        base64.b64decode(told["entry"]),
        [bytes.fromhex(node) for node in told["inclusion_proof"]],
        told["checkpoint"],
        (ORIGIN, bytes.fromhex(told["ledger_key"])),
    )
    assert again == proven(5, 11)
