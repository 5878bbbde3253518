"""One real ledger, the same at every start: what the targets mutate, and the keys to sign mutations again.

Keys are fixed (they guard nothing), so the corpus that is committed still opens tomorrow.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.accounting.accountant import order_for
from policies.accounting.claims import DistributedGaussian
from policies.accounting.rdp import allowance, cost, epsilon_nano
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import (
    Amended,
    Appointed,
    Approved,
    Enrolled,
    Expired,
    Issued,
    LimitSet,
    Presented,
    Recovered,
    Restored,
    Revoked,
    decode,
    proposal,
)
from policies.ledger.export import Export
from policies.ledger.merkle import Checkpoint, CompactRange, cosign, leaf_hash, open_checkpoint, sign_checkpoint
from policies.ledger.state import State
from policies.ledger.store import AppendRequest, Store
from policies.ledger_service import ArtifactFindings
from policies.statements import (
    PAYLOAD_TYPE,
    Amendment,
    Approval,
    Receipts,
    Release,
    Request,
    Settlement,
    Statement,
    claim_json,
    encode,
)
from protos.common.canonical_json import canonical
from protos.common.dsse import seal
from protos.identity.certificates import node_public
from tests.support.ledger_world import DP, Hospital, open_register

ORIGIN: Final = "lazaret/test"
LOG_KEY: Final = Ed25519PrivateKey.from_private_bytes(b"the log's key, known to anybody.")
SITE_KEY: Final = Ed25519PrivateKey.from_private_bytes(b"the site's key, known to anyone.")
ROLES: Final = ("compliance", "hospital")
PERSON_KEYS: Final = MappingProxyType(
    {f"p-{role}": Ed25519PrivateKey.from_private_bytes(role.encode().ljust(32)) for role in ROLES}
)
SHARED: Final = DistributedGaussian(0.25, 1.8, 2, sites=3, honest=2)
KEYS: Final = MappingProxyType({"site-a": SITE_KEY, **PERSON_KEYS})


def hospital() -> Hospital:
    """The one site of the seed ledger."""
    node = node_public(ec.derive_private_key(7, ec.SECP384R1())).decode()
    return Hospital("site-a", key=SITE_KEY, node_key=node, csr="csr")


def public(key: Ed25519PrivateKey) -> bytes:
    """The raw Ed25519 public key, 32 bytes."""
    return key.public_key().public_bytes_raw()


@dataclass(frozen=True, slots=True)
class Book:
    """A sound export, taken apart."""

    raw: bytes
    export: Export
    payloads: tuple[bytes, ...]  # of the envelopes, in the export's order


def statements() -> tuple[Statement, ...]:
    """One of each kind of statement, with either kind of claim."""
    a = hospital()
    return (
        a.enrolment()[0],
        a.reservation("grant-1"),
        a.reservation("grant-2", DP, "federated", "run-1"),
        a.release("grant-1"),
        _update(a),
        a.release("grant-1", reader="1f" * 32),
        a.reservation("grant-5", SHARED, "federated-masked", "run-5"),
        _masked(a),
        Settlement("grant-1", "site-a", "", "ksame", "expired", "restart", 0),
        Amendment("site-a", 1, "name = 1"),
        Receipts("site-a", ORIGIN, "nonce-1", 1),
        Approval("p-hospital", ORIGIN, "s-1", "limit", "site-a/rdp", "8.0"),
        Approval("p-hospital", ORIGIN, "s-3", "enrol", "site-a", "ab" * 32),
        Request("p-operator", ORIGIN, "s-4", "limit", "site-a/rdp", "8.0"),
    )


def _update(a: Hospital) -> Release:
    return a.release(
        "grant-2",
        run="run-1",
        round=1,
        mechanism="federated",
        claim=DP,
        artifact_type="update",
        epsilon_nano=epsilon_nano(DP, 4e-6, order_for(8.0, 4e-6)),
        delta="4e-06",
        components={"centre": "public", "initial": "public"},
    )


def _masked(a: Hospital) -> Release:
    whole = replace(SHARED, honest=1)  # level A: what the presets admit
    return a.release(
        "grant-5",
        run="run-5",
        round=2,
        mechanism="federated-masked",
        claim=whole,
        artifact_type="masked-update",
        epsilon_nano=epsilon_nano(whole, 4e-6, order_for(8.0, 4e-6)),
        delta="4e-06",
        components={"centre": "public", "initial": "public"},
    )


def _members(store: Store, a: Hospital) -> None:
    """Certificates come and go; the site is revoked, and two persons admit it again."""
    for number in ("1f", "2a"):
        store.append(f"issue-{number}", AppendRequest((Issued("site-a", number, b"c" * 32, 1_800_000_000),)))
    store.append("revoke-1f", AppendRequest((Revoked("site-a", "1f", "lost"),)))
    store.append("bar", AppendRequest((Revoked("site-a", "", "left"),)))
    statement = replace(a.enrolment()[0], csr="another csr")
    envelope = a.seal(statement)
    request = hashlib.sha256(envelope).digest()
    for role in ROLES:
        words = ("s-3", "enrol", "site-a", request.hex())
        approval = sealed(encode(Approval(f"p-{role}", ORIGIN, *words)))
        entry = Approved(f"p-{role}", "s-3", proposal(*words), hashlib.sha256(approval).digest())
        store.append(f"approve-s-3-{role}", AppendRequest((entry,), (approval,)))
    policy = hashlib.sha256(statement.policy.encode()).digest()
    again = Enrolled("site-a", public(SITE_KEY), policy, request, "s-3")
    store.append("enrol-again", AppendRequest((again,), (envelope,)))
    store.append("issue-3b", AppendRequest((Issued("site-a", "3b", b"d" * 32, 1_900_000_000),)))


def _persons_and_limits(store: Store) -> None:
    """Two persons are appointed; one lowers the budget, both raise it again."""
    appointed = [
        Appointed(f"p-{role}", role, public(key), "") for role, key in zip(ROLES, PERSON_KEYS.values(), strict=True)
    ]
    store.append("appoint", AppendRequest(tuple(appointed)))
    account = store.state.accounts["site-a/rdp"]
    lower = allowance(7.0, 4e-6, account.opened.order)
    for serial, limit, epsilon, persons in (("s-1", lower, "7.0", 1), ("s-2", account.limit, "8.0", 2)):
        value = epsilon
        for role in ROLES[:persons]:
            envelope = sealed(encode(Approval(f"p-{role}", ORIGIN, serial, "limit", "site-a/rdp", value)))
            digest = proposal(serial, "limit", "site-a/rdp", value)
            entry = Approved(f"p-{role}", serial, digest, hashlib.sha256(envelope).digest())
            store.append(f"approve-{serial}-{role}", AppendRequest((entry,), (envelope,)))
        store.append(serial, AppendRequest((LimitSet("site-a/rdp", limit, epsilon, serial),)))


def _restored(store: Store, a: Hospital, root: bytes) -> None:
    """After a backup: the site shows a grant that the backup had lost, and that it has no more."""
    state = store.state
    store.append("restore", AppendRequest((Restored(2, state.size, root, "nonce-1"),)))
    lost = a.reservation("grant-9", replace(DP, steps=1), "federated", "run-9")
    envelope, claim = a.seal(lost), canonical(claim_json(lost.claim))
    amount = cost(lost.claim, state.accounts["site-a/rdp"].opened.order)
    names = ("grant-9", "site-a", "run-9", "federated", "site-a/rdp")
    recovered = Recovered(*names, amount, claim, hashlib.sha256(envelope).digest())
    store.append("recover", AppendRequest((recovered,), (envelope,)))
    envelope = sealed(encode(Receipts("site-a", ORIGIN, "nonce-1", 1)))
    presented = Presented("site-a", "nonce-1", 1, hashlib.sha256(envelope).digest())
    store.append("present", AppendRequest((presented,), (envelope,)))


@cache
def sound() -> Book:
    """A ledger with every kind of entry that an honest one may hold, written by the product, and cosigned."""
    a = hospital()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        register = open_register(path, a, key=LOG_KEY)
        store = register.store
        small = a.reservation("grant-4", replace(DP, steps=1), "federated", "run-4")
        for reservation in (a.reservation("grant-1"), a.reservation("grant-2", DP, "federated", "run-1"), small):
            register.reserve(f"k-{reservation.grant}", reservation, a.seal(reservation))
        store.append("expire", AppendRequest((Expired("grant-4", "restart"),)))
        release, late, update = a.release("grant-1"), a.reservation("grant-3"), _update(a)
        register.send(release, a.seal(release))
        register.admit("k-admit", release, a.seal(release), ArtifactFindings())
        register.reserve("k-late", late, a.seal(late))
        register.admit("k-update", update, a.seal(update), ArtifactFindings())
        register.close_round("run-1", 1, ["site-a"], b"m" * 32)
        amended = Amendment("site-a", 1, a.policy_text + "\n# amended")
        envelope = sealed(encode(amended))
        digests = [hashlib.sha256(raw).digest() for raw in (amended.policy.encode(), envelope)]
        store.append("amend", AppendRequest((Amended("site-a", 1, *digests),), (envelope,)))
        _persons_and_limits(store)
        _members(store, a)
        seen = store.checkpoint()
        _restored(store, a, open_checkpoint(seen, public(LOG_KEY)).root)
        store.close()
        witnessed = seen + cosign(seen, "site-a", SITE_KEY, 1_700_000_000)
        raw = export_file(path, ORIGIN, LOG_KEY, (witnessed,))
    export = Export.parse(raw)
    payloads = tuple(base64.b64decode(json.loads(e)["payload"]) for e in export.envelopes)
    return Book(raw, export, payloads)


def fold(entries: tuple[bytes, ...]) -> State:
    """The state after these records.

    Raises:
        InvalidEntryError: they do not fold.
    """
    state = State()
    for raw in entries:
        state.apply(decode(raw))
    return state


def note(entries: tuple[bytes, ...]) -> str:
    """The checkpoint that the log's key signs over these entries."""
    tree, epoch, nonce = CompactRange(), 1, ""
    for raw in entries:
        tree.append(leaf_hash(raw))
        with contextlib.suppress(ValueError):  # forged entries may be none at all
            entry = decode(raw).entry
            epoch, nonce = (entry.epoch, entry.nonce) if isinstance(entry, Restored) else (epoch, nonce)
    return sign_checkpoint(Checkpoint(ORIGIN, tree.size, tree.root(), epoch, nonce), LOG_KEY)


@lru_cache(maxsize=4096)
def sealed(payload: bytes) -> bytes:
    """The payload in an envelope by the one who says it: a person's key for an approval, else the site's."""
    try:
        person = json.loads(payload)["predicate"]["person"]
        key = PERSON_KEYS.get(person, SITE_KEY)
    except (ValueError, KeyError, TypeError, RecursionError):
        key = SITE_KEY
    return seal(payload, PAYLOAD_TYPE, key)


def dressed(document: dict[str, Any]) -> bytes:
    """A statement's canonical bytes with the subject that belongs to its predicate, whatever that predicate holds.

    Without this a mutated predicate never gets past the subject's digest.
    """
    predicate = document.get("predicate")
    name = str(document.get("predicateType")).rpartition("attestation/")[2].partition("/")[0]
    digest: Any = hashlib.sha256(canonical(predicate)).hexdigest()
    if name == "release" and isinstance(predicate, dict):
        name, digest = "artifact", predicate.get("artifact_sha256")
    return canonical({**document, "subject": [{"digest": {"sha256": digest}, "name": name}]})


def redressed(payload: bytes) -> bytes:
    """:func:`dressed` where the payload is a JSON object, and the payload itself where it is not."""
    try:
        document = json.loads(payload)
        return dressed(document) if isinstance(document, dict) else payload
    except (ValueError, TypeError, RecursionError):
        return payload
