"""Whatever stands in a field of a certificate or an export, signed by whoever made it: a finding, no traceback."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.reports.catalog import make, snapshot
from policies.audit.certificate import PAYLOAD, read
from policies.audit.verify import main
from policies.ledger import cbor
from policies.ledger.backends.sqlite import export_file
from policies.ledger.export import Export
from policies.ledger.merkle import Checkpoint, CompactRange, leaf_hash, sign_checkpoint
from policies.ledger_service import ArtifactFindings
from policies.statements import PAYLOAD_TYPE, encode
from protos.common.canonical_json import canonical
from protos.common.dsse import seal
from tests.support.ledger_world import DP, Hospital, open_register
from tests.support.report_world import NOW, Stage, stage

NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 7, 10**30, "", "x", "\ud800", "\x00\x1b[2J", "é" * 70, "9" * 5000, "1e999", [], [None], [[]],
    {}, {"": {}}, {"x": [1]}, NESTED, "x" * 100_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        yield shown


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every field, and to the first two of each list."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, part in parts:
        yield from places(part, (*path, name))


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy with something else in one place."""
    if not path:
        return odd
    made = copy.deepcopy(value)
    at = made
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = odd
    return made


def found(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([str(path), *words, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"] == "NOT SOUND") == (code == 1)
    return code, document.get("reason", "")


@pytest.mark.parametrize("subject", ["eleven", "model"])
def test_every_field_of_a_certificate_may_hold_anything(
    subject: str, world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signed by the ledger's own key, as a lying operator can, and held against the key and the export."""
    raw, ledger = snapshot(world.home, NOW)
    (tmp_path / "ledger.export").write_bytes(raw)
    named = ("--key", ledger.source.key, "--from", str(tmp_path / "ledger.export"))
    name = world.run if subject == "model" else world.names[subject]
    body = json.loads(read(make(world.home, "certificate", "json", name, NOW).body).encode())
    key, dice, kept = world.home.ledger_key(), random.Random(subject), []
    path = tmp_path / "c.json"
    for place in places(body):
        for odd in ODD if len(place) < 2 else dice.sample(ODD, 3):
            changed = put(body, place, odd)
            path.write_bytes(seal(canonical(changed), PAYLOAD, key))
            code, reason = found(path, capsys, *(named if not dice.randrange(20) else named[:2]))
            assert code in (0, 1), reason
            if code == 0 and changed != body:
                kept.append(place[0])
    assert set(kept) == {"words"}, "the coordinator's sentences are the only thing that is signed and not derived"


@pytest.mark.parametrize("odd", [7, None, [], {}, True, NESTED, ["x"]], ids=lambda odd: repr(odd)[:9])
def test_a_checkpoint_that_is_no_text_is_a_finding(
    odd: Any, world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.loads(read(make(world.home, "certificate", "json", world.run, NOW).body).encode())
    (tmp_path / "c.json").write_bytes(seal(canonical({**body, "checkpoint": odd}), PAYLOAD, world.home.ledger_key()))
    assert found(tmp_path / "c.json", capsys) == (1, "the certificate is malformed: checkpoint")


def test_every_field_of_the_envelope_around_it_may_hold_anything(
    world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(make(world.home, "certificate", "json", world.run, NOW).body)
    for place in places(document):
        for odd in ODD:
            (tmp_path / "c.json").write_bytes(canonical(put(document, place, odd)))
            raw = (tmp_path / "c.json").read_bytes()
            if raw.startswith(b"{"):  # else it is taken for an export, and is none
                assert found(tmp_path / "c.json", capsys)[0] == 1, (place, odd)


@pytest.mark.parametrize("depth", [500, 990, 1100, 5000, 100_000])
def test_what_is_nested_too_deep_to_read_or_to_write_again_is_a_finding(
    depth: int, world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading and writing JSON run out of stack at different depths."""
    body = json.loads(read(make(world.home, "certificate", "json", world.run, NOW).body).encode())
    deep = b"[" * depth + b"]" * depth
    payload = canonical({**body, "facts": {"deep": 1}}).replace(b'"deep":1', b'"deep":' + deep)
    (tmp_path / "c.json").write_bytes(seal(payload, PAYLOAD, world.home.ledger_key()))
    assert found(tmp_path / "c.json", capsys)[0] == 1
    (tmp_path / "d.json").write_bytes(b'{"payload":' + deep + b"}")
    assert found(tmp_path / "d.json", capsys)[0] == 1


def _signed(export: Export, key: Ed25519PrivateKey, entries: list[bytes], envelopes: tuple[bytes, ...]) -> bytes:
    tree = CompactRange()
    for raw in entries:
        tree.append(leaf_hash(raw))
    note = sign_checkpoint(Checkpoint("lazaret/test", tree.size, tree.root()), key)
    return Export(export.public, tuple(entries), envelopes, note).encode()


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Export, Ed25519PrivateKey, Hospital]:
    path, key, a = tmp_path_factory.mktemp("books") / "ledger.db", Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(path, a, key=key)
    asked, release = a.reservation("g"), a.release("g")
    register.reserve("k", asked, a.seal(asked))
    register.admit("s", release, a.seal(release), ArtifactFindings())
    dp = a.reservation("dp", DP, "federated", "run")
    register.reserve("k-dp", dp, a.seal(dp))
    again = a.reservation("again")
    register.reserve("k-again", again, a.seal(again))
    register.store.close()
    return Export.parse(export_file(path, "lazaret/test", key)), key, a


def _cbor(value: Any) -> bytes | None:
    """In the encoding of entries; None: it cannot be written in it."""
    try:
        return cbor.encode(value)
    except (cbor.EntryEncodingError, ValueError, TypeError, OverflowError, RecursionError):
        return None


def test_every_field_of_an_entry_may_hold_anything(
    ledger: tuple[Export, Ed25519PrivateKey, Hospital], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export, key, _ = ledger
    tried = 0
    for n, raw in enumerate(export.entries):
        record = cbor.decode(raw)
        for place in places(record):
            for odd in (*ODD, b"", b"\xff" * 32, (1 << 64) - 1, (1 << 53), [b"x"]):
                changed = _cbor(put(record, place, odd))
                if changed is None or changed == raw:
                    continue
                entries = [*export.entries]
                entries[n] = changed
                (tmp_path / "x.export").write_bytes(_signed(export, key, entries, export.envelopes))
                assert found(tmp_path / "x.export", capsys)[0] in (1, 3), (n, place, odd)
                tried += 1
    assert tried > 500


def test_every_field_of_a_statement_may_hold_anything(
    ledger: tuple[Export, Ed25519PrivateKey, Hospital], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sealed by the hospital, whose entry then rests on it: what the door would not have taken is found here."""
    export, key, a = ledger
    said = encode(a.reservation("g"))
    document, old = json.loads(said), hashlib.sha256(a.seal(a.reservation("g"))).digest()
    for place in places(document):
        for odd in ODD:
            if put(document, place, odd) == document:
                continue
            sealed = seal(canonical(put(document, place, odd)), PAYLOAD_TYPE, a.key)
            new = hashlib.sha256(sealed).digest()
            entries = [raw.replace(old, new) for raw in export.entries]
            envelopes = [raw for raw in export.envelopes if hashlib.sha256(raw).digest() != old]
            letters = tuple(sorted([*envelopes, sealed], key=lambda raw: hashlib.sha256(raw).digest()))
            (tmp_path / "x.export").write_bytes(_signed(export, key, entries, letters))
            code, reason = found(tmp_path / "x.export", capsys)
            assert code == 1, (place, odd)
            assert "entry " in reason


@pytest.mark.parametrize("part", range(8))
def test_every_line_of_an_export_may_hold_anything(
    ledger: tuple[Export, Ed25519PrivateKey, Hospital], part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ledger[0].encode().split(b"\n")
    odd = (b"", b"\xff\xfe", b"key ", b"entries 999999999", b"entries -1", b"entries 1e3", b"A" * 300_000, b"=",
           b"\x00", b"witnessed 1", b"checkpoint", "é".encode(), b"9" * 6000)  # fmt: skip
    for at in range(part, len(lines) - 1, 8):
        for other in odd:
            if lines[at] == other:
                continue
            (tmp_path / "x.export").write_bytes(b"\n".join([*lines[:at], other, *lines[at + 1 :]]))
            assert found(tmp_path / "x.export", capsys)[0] == 1, (at, other)
