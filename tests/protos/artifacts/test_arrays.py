"""Envelopes and artifacts: one form each; everything else is refused with our own errors; the vectors hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from policies.ledger.entries import Opened, Record, encode
from policies.ledger.merkle import Checkpoint, sign_checkpoint
from policies.statements import PAYLOAD_TYPE
from protos.artifacts.arrays import ArtifactFormatError, pack_images, pack_vector, unpack_images, unpack_vector
from protos.common.dsse import EnvelopeError, open_sealed, seal
from protos.identity.certificates import KeyFileError, read_private, signing_key, write_private

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
TRUSTED = {"site-a": KEY.public_key().public_bytes_raw()}
IMAGES = np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8)
LABELS = ("0", "7", "")
VECTORS = Path(__file__).parent / "vectors.json"


def vectors() -> dict[str, str]:
    """Every byte format from fixed inputs: short ones whole, long ones by digest."""
    record = Record(1_700_000_000, "key", Opened("site-a/rdp", 4_600_000_000, 4, "8.0", "4e-06"))
    return {
        "envelope": seal(b'{"hello":"port"}', PAYLOAD_TYPE, KEY).decode(),
        "vector": pack_vector(np.array([0.0, -1.5, 3.25], np.float32)).hex(),
        "image_set_members": hashlib.sha256(b"".join(_members(pack_images(IMAGES, LABELS)))).hexdigest(),
        "entry": encode(record).hex(),
        "checkpoint": sign_checkpoint(Checkpoint("lazaret/site-a", 1, hashlib.sha256(b"x").digest()), KEY),
    }


def _members(raw: bytes) -> list[bytes]:
    """Names and decoded contents: a newer zlib may pack the same picture otherwise."""
    images, labels = unpack_images(raw)
    return [images.tobytes(), json.dumps(labels).encode()]


def test_the_formats_are_the_ones_of_the_test_vectors() -> None:
    assert vectors() == json.loads(VECTORS.read_text())


def test_what_was_sealed_opens_with_its_key_and_type_only() -> None:
    envelope = seal(b"payload", PAYLOAD_TYPE, KEY)
    assert open_sealed(envelope, PAYLOAD_TYPE, TRUSTED).payload == b"payload"
    other = {"site-a": Ed25519PrivateKey.generate().public_key().public_bytes_raw()}
    for kind, trusted in ((PAYLOAD_TYPE, other), (PAYLOAD_TYPE, {}), ("text/plain", TRUSTED)):
        with pytest.raises(EnvelopeError):
            open_sealed(envelope, kind, trusted)


@settings(max_examples=300)
@given(st.data())
def test_any_changed_byte_of_an_envelope_is_found(data: st.DataObject) -> None:
    raw = bytearray(seal(b'{"claim":"k"}', PAYLOAD_TYPE, KEY))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(EnvelopeError):
        open_sealed(bytes(raw), PAYLOAD_TYPE, TRUSTED)


@given(st.binary(max_size=300))
def test_noise_is_a_bad_envelope_and_nothing_else(raw: bytes) -> None:
    with pytest.raises(EnvelopeError):
        open_sealed(raw, PAYLOAD_TYPE, TRUSTED)


def test_two_signatures_or_other_spacing_are_refused() -> None:
    document = json.loads(seal(b"x", PAYLOAD_TYPE, KEY))
    spaced = json.dumps(document, sort_keys=True).encode()
    document["signatures"] *= 2
    doubled = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    for raw in (spaced, doubled):
        with pytest.raises(EnvelopeError):
            open_sealed(raw, PAYLOAD_TYPE, TRUSTED)


def test_artifacts_read_back_what_was_packed() -> None:
    images, labels = unpack_images(pack_images(IMAGES, LABELS))
    assert (images == IMAGES).all()
    assert labels == LABELS
    vector = np.array([1.0, -2.0], np.float32)
    assert (unpack_vector(pack_vector(vector)) == vector).all()


@pytest.mark.parametrize(
    "tensors",
    [
        {"flat": np.array([np.nan], np.float32)},
        {"flat": np.array([np.inf], np.float32)},
        {"flat": np.zeros(3, np.float64)},
        {"flat": np.zeros((1, 3), np.float32)},
        {"flat": np.zeros(0, np.float32)},
        {"other": np.zeros(3, np.float32)},
        {"flat": np.zeros(3, np.float32), "more": np.zeros(1, np.float32)},
    ],
)
def test_a_vector_with_anything_else_in_it_is_refused(tensors: dict[str, np.ndarray]) -> None:
    with pytest.raises(ArtifactFormatError):
        unpack_vector(save(tensors))


def test_a_vector_with_metadata_is_refused() -> None:
    with pytest.raises(ArtifactFormatError):
        unpack_vector(save({"flat": np.zeros(3, np.float32)}, metadata={"patient": "name"}))


def test_an_image_set_that_is_cut_or_goes_on_is_refused() -> None:
    good = pack_images(IMAGES, LABELS)
    for changed in (good + b"\0" * 512, good + b"\0" * 10_240, good[:-1], good[:-512], b""):
        with pytest.raises(ArtifactFormatError):
            unpack_images(changed)


@given(st.binary(max_size=400))
def test_noise_is_a_bad_artifact_and_nothing_else(raw: bytes) -> None:
    with pytest.raises(ArtifactFormatError):
        unpack_images(raw)
    with pytest.raises(ArtifactFormatError):
        unpack_vector(raw)


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "sign.key"
    write_private(path, b"secret")
    assert read_private(path) == b"secret"
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_private(path)
    path.chmod(0o600)
    with pytest.raises(KeyFileError):
        signing_key(path)
    with pytest.raises(FileExistsError):
        write_private(path, b"another")
