"""The auditor's reader of envelopes takes exactly the bytes that the door takes: a corpus, and random damage.

Both call one function (``protos.common.dsse.read_envelope``); what each asks of it beyond that is held together here.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.audit.auditor import open_envelope
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Reserved
from policies.ledger.export import ExportError
from policies.ledger.store import AppendRequest
from policies.ledger_service import digest
from policies.statements import PAYLOAD_TYPE, claim_json, encode
from protos.common.canonical_json import canonical
from protos.common.dsse import EnvelopeError, key_id, open_sealed, pae, seal
from tests.support.ledger_world import K5, Hospital, open_register

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
PUBLIC = KEY.public_key().public_bytes_raw()
A = Hospital("site-a", key=KEY)
PAYLOADS = (encode(A.reservation("g")), encode(A.reservation("grant")), b"", b"x", b"xy", b"xyz", b"\xff" * 40)
HONEST = tuple(seal(payload, PAYLOAD_TYPE, KEY) for payload in PAYLOADS)


def gateway(raw: bytes) -> bytes | None:
    try:
        return open_sealed(raw, PAYLOAD_TYPE, {"site-a": PUBLIC}).payload
    except EnvelopeError:
        return None


def auditor(raw: bytes, public: bytes | None = PUBLIC) -> bytes | None:
    try:
        return open_envelope(raw, public)
    except ExportError:
        return None


def spare_bits(text: str) -> str:
    """The same bytes in base64, with unused bits set."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = len(text.rstrip("=")) - 1
    assert text.endswith("="), "nothing is unused"
    return text[:last] + alphabet[alphabet.index(text[last]) | 1] + text[last + 1 :]


def corpus() -> dict[str, bytes]:
    """Envelopes that say the same as the honest one under the same signature in another way, and some that do not."""
    raw = next(raw for raw in HONEST if b"=" in raw.split(b'"')[3])
    document = json.loads(raw)
    (signature,) = document["signatures"]

    def changed(**parts: object) -> bytes:
        return json.dumps({**document, **parts}, sort_keys=True, separators=(",", ":")).encode()

    def signed(**parts: object) -> bytes:
        return changed(signatures=[{**signature, **parts}])

    text = raw.decode()
    slash = text.replace(PAYLOAD_TYPE, PAYLOAD_TYPE.replace("/", "\\/"))
    return {
        "a space": text.replace(":", ": ", 1).encode(),
        "a space before": b" " + raw,
        "a line's end": raw + b"\n",
        "tabs": json.dumps(document, sort_keys=True, indent="\t").encode(),
        "another order": json.dumps(dict(reversed(document.items())), separators=(",", ":")).encode(),
        "an escaped slash": slash.encode(),
        "an escaped letter": text.replace("payloadType", "\\u0070ayloadType").encode(),
        "an escaped letter in the payload": text.replace('"payload":"e', '"payload":"\\u0065').encode(),
        "a key twice": text.replace("{", '{"payload":"",', 1).encode(),
        "UTF-16": text.encode("utf-16"),
        "a byte-order mark": b"\xef\xbb\xbf" + raw,
        "no key's name": signed(keyid=""),
        "another key's name": signed(keyid=key_id(OTHER.public_key().public_bytes_raw())),
        "a name in capitals": signed(keyid=signature["keyid"].upper()),
        "a message for a name": signed(keyid="the patient of bed 12"),
        "a number for a name": signed(keyid=7),
        "null for a name": signed(keyid=None),
        "unused bits of the payload": changed(payload=spare_bits(document["payload"])),
        "unused bits of the signature": signed(sig=spare_bits(signature["sig"])),
        "a line in the base64": changed(payload=document["payload"][:8] + "\n" + document["payload"][8:]),
        "no padding": changed(payload=document["payload"].rstrip("=")),
        "more padding": changed(payload=document["payload"] + "="),
        "one more field": changed(comment="x"),
        "one more field of the signature": signed(comment="x"),
        "two signatures": changed(signatures=[signature, signature]),
        "no signature": changed(signatures=[]),
        "a signature that is none": changed(signatures="x"),
        "an object of signatures": changed(signatures={"0": signature}),
        "a signature of a list": changed(signatures=[["keyid", "sig"]]),
        "a payload of a list": changed(payload=["x"]),
        "a payload of a number": changed(payload=7),
        "a payload that is not ASCII": changed(payload="é"),
        "another type, signed": seal(PAYLOADS[0], "text/plain", KEY),
        "a type that is none": changed(payloadType=None),
        "by another key": seal(PAYLOADS[0], PAYLOAD_TYPE, OTHER),
        "by another key, under this one's name": changed(
            signatures=[
                {
                    "keyid": key_id(PUBLIC),
                    "sig": base64.b64encode(
                        OTHER.sign(pae(PAYLOAD_TYPE, base64.b64decode(document["payload"])))
                    ).decode(),
                }
            ]
        ),
        "a short signature": signed(sig=base64.b64encode(b"x" * 63).decode()),
        "nothing": b"",
        "a list": b"[]",
        "a number": b"7",
        "deep": b"[" * 100_000,
        "deep and closed": b'{"payload":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        "not a number": b'{"payload":NaN}',
        "a long number": b'{"payload":' + b"9" * 5000 + b"}",
        "half a character": changed(payload="\ud800"),
        "too large": seal(b"x" * 400_000, PAYLOAD_TYPE, KEY),
    }


CORPUS = corpus()


@pytest.mark.parametrize("raw", HONEST, ids=range(len(HONEST)))
def test_both_open_what_was_sealed(raw: bytes) -> None:
    payload = PAYLOADS[HONEST.index(raw)]
    assert gateway(raw) == auditor(raw) == auditor(raw, None) == payload


@pytest.mark.parametrize("name", CORPUS)
def test_both_refuse_every_other_way_to_say_the_same(name: str) -> None:
    assert CORPUS[name] not in HONEST
    assert gateway(CORPUS[name]) is None
    assert auditor(CORPUS[name]) is None


def _damaged(raw: bytes, at: int, length: int, given: bytes) -> bytes:
    at %= len(raw) + 1
    return raw[:at] + given + raw[at + length :]


PIECES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from([b" ", b"\\u0061", b"=", b"==", b'"', b"\n", b",", b"{", b"}", b'"x":1,', b"A", b"/", b"\\/"]),
)


@settings(max_examples=1500)
@given(st.sampled_from([*HONEST, *CORPUS.values()]).filter(lambda raw: len(raw) < 10_000), st.integers(0, 9999),
       st.integers(0, 4), PIECES)  # fmt: skip
@example(HONEST[0], 0, 0, b" ")
def test_both_take_the_same_bytes_however_they_are_damaged(raw: bytes, at: int, length: int, given: bytes) -> None:
    damaged = _damaged(raw, at, length, given)
    assert gateway(damaged) == auditor(damaged)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([key_id(PUBLIC), "eA=="]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=1500)
@given(st.data())
def test_both_take_the_same_whatever_stands_in_a_field(data: st.DataObject) -> None:
    document = json.loads(data.draw(st.sampled_from(HONEST)))
    (signature,) = document["signatures"]
    name = data.draw(st.sampled_from(["payload", "payloadType", "signatures", "keyid", "sig", "more"]))
    place = signature if name in ("keyid", "sig") else document
    place[name] = data.draw(JSON)
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    assert gateway(raw) == auditor(raw)


@pytest.mark.parametrize("name", CORPUS)
def test_a_ledger_that_holds_such_an_envelope_is_not_sound(tmp_path: Path, name: str) -> None:
    """An operator who writes past the door: what the door would have refused is found in the export."""
    ledger = Ed25519PrivateKey.generate()
    register = open_register(tmp_path / "ledger.db", A, key=ledger)
    raw, claim = CORPUS[name], canonical(claim_json(K5))
    entry = Reserved("g", "site-a", "", "ksame", "site-a/k", 1, claim, digest(raw))
    register.store.append("sneaked", AppendRequest((entry,), (raw,)))
    register.store.close()
    with pytest.raises(ExportError, match="envelope"):
        verify(export_file(tmp_path / "ledger.db", "lazaret/test", ledger))
