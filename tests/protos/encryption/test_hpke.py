"""Sealing to a reader: it opens for that reader only, whole and in order, or not at all."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.artifacts.chunks import CHUNK
from protos.encryption import hpke
from protos.encryption.hpke import (
    ReaderKeyError,
    SealedFileError,
    check_form,
    fingerprint,
    make_reader,
    open_sealed_artifact,
    seal_to,
    sealed_bytes,
)
from protos.identity.certificates import KeyFileError

PRIVATE, PUBLIC = make_reader()
HEAD = 8 + 32 + 2 + 1120 + 48 + 7  # ML-KEM-768 ciphertext and X25519 share; the wrapped key with its tag
PIECE = CHUNK + 16


def text(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def refused(raw: bytes, folder: Path, private: bytes = PRIVATE) -> str:
    """What is said about these bytes; and nothing of them is left."""
    sealed, out = folder / "sealed", folder / "plain"
    sealed.write_bytes(raw)
    with pytest.raises(SealedFileError) as caught:
        open_sealed_artifact(private, sealed, out)
    assert sorted(p.name for p in folder.iterdir()) == ["sealed"]
    return str(caught.value)


def sealed(folder: Path, body: bytes) -> bytes:
    path = folder / "made"
    seal_to(PUBLIC, body, path)
    raw = path.read_bytes()
    path.unlink()
    return raw


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 77])
def test_what_was_sealed_opens_for_its_reader(tmp_path: Path, size: int) -> None:
    body = text(size)
    source, there, back = tmp_path / "source", tmp_path / "there", tmp_path / "back"
    source.write_bytes(body)
    for artifact in (body, source):
        seal_to(PUBLIC, artifact, there)
        assert there.stat().st_size == HEAD + size + 16 * max(1, -(-size // CHUNK)) == sealed_bytes(size)
        open_sealed_artifact(PRIVATE, there, back)
        assert back.read_bytes() == body
        assert back.stat().st_mode & 0o777 == 0o600


def test_nothing_of_the_artifact_can_be_seen_and_no_two_seals_are_alike(tmp_path: Path) -> None:
    body = bytes(2 * CHUNK)
    one, two = sealed(tmp_path, body), sealed(tmp_path, body)
    assert bytes(16) not in one
    assert one[HEAD - 7 :] != two[HEAD - 7 :]
    assert one[HEAD : HEAD + CHUNK] != one[HEAD + PIECE : HEAD + PIECE + CHUNK]


def test_another_reader_cannot_open_it_whatever_the_header_says(tmp_path: Path) -> None:
    private, public = make_reader()
    raw = sealed(tmp_path, text(100))
    assert "another recipient" in refused(raw, tmp_path, private)
    pretended = raw[:8] + hashlib.sha256(public).digest() + raw[40:]
    assert "does not open" in refused(pretended, tmp_path, private)
    assert "another recipient" in refused(pretended, tmp_path)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    raw = sealed(tmp_path, text(2 * CHUNK + 100))
    for size in (0, 7, 41, 42, 500, HEAD - 1, HEAD, HEAD + 15, HEAD + PIECE, HEAD + 2 * PIECE, len(raw) - 1):
        assert refused(raw[:size], tmp_path)
    assert refused(raw + b"x", tmp_path)
    assert refused(raw + bytes(16), tmp_path)


def test_pieces_out_of_order_repeated_left_out_or_of_another_file_are_refused(tmp_path: Path) -> None:
    body = text(3 * CHUNK)
    raw, other = sealed(tmp_path, body), sealed(tmp_path, body)
    head, pieces = raw[:HEAD], [raw[HEAD + i * PIECE : HEAD + (i + 1) * PIECE] for i in range(3)]
    foreign = other[HEAD : HEAD + PIECE]
    assert b"".join((head, *pieces)) == raw
    for order in (
        (pieces[1], pieces[0], pieces[2]),
        (pieces[0], pieces[0], pieces[2]),
        (pieces[0], pieces[2]),
        (pieces[0], pieces[1]),
        (*pieces, pieces[2]),
        (foreign, pieces[1], pieces[2]),
    ):
        assert "not the one that was sealed here" in refused(b"".join((head, *order)), tmp_path)
    assert refused(other[:HEAD] + raw[HEAD:], tmp_path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_found(tmp_path: Path, data: st.DataObject) -> None:
    if not hasattr(test_any_flipped_bit_is_found, "raw"):
        test_any_flipped_bit_is_found.raw = sealed(tmp_path, text(300))  # type: ignore[attr-defined]
    raw = bytearray(test_any_flipped_bit_is_found.raw)  # type: ignore[attr-defined]
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert refused(bytes(raw), tmp_path)


def test_a_failure_in_the_middle_leaves_neither_a_file_nor_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_handle: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        seal_to(PUBLIC, text(100), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_stays_as_it_was_when_a_new_one_does_not_open(tmp_path: Path) -> None:
    out, bad = tmp_path / "out", tmp_path / "bad"
    out.write_bytes(b"before")
    raw = bytearray(sealed(tmp_path, text(2 * CHUNK)))
    raw[-1] ^= 1
    bad.write_bytes(raw)
    with pytest.raises(SealedFileError):
        open_sealed_artifact(PRIVATE, bad, out)
    assert out.read_bytes() == b"before"


def test_key_files_read_back_and_only_their_owner_reads_the_private_one(tmp_path: Path) -> None:
    name = hpke.write_reader(tmp_path, "lead")
    public = hpke.read_reader_public(tmp_path / "lead.pub")
    private = hpke.read_reader_private(tmp_path / "lead.key")
    assert fingerprint(public) == name
    assert len(name) == 64
    seal_to(public, b"hello", tmp_path / "s")
    open_sealed_artifact(private, tmp_path / "s", tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == b"hello"
    with pytest.raises(FileExistsError):
        hpke.write_reader(tmp_path, "lead")
    (tmp_path / "lead.key").chmod(0o640)
    with pytest.raises(KeyFileError):
        hpke.read_reader_private(tmp_path / "lead.key")


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    hpke.write_reader(tmp_path, "lead")
    with pytest.raises(ReaderKeyError):
        hpke.read_reader_public(tmp_path / "lead.key")
    (tmp_path / "bad.pub").write_bytes(b"lazaret-reader-1 AAAA\n")
    with pytest.raises(ReaderKeyError):
        hpke.read_reader_public(tmp_path / "bad.pub")
    for public in (b"", PUBLIC[:-1], PUBLIC + b"x", b"\xff" * len(PUBLIC)):
        with pytest.raises(ReaderKeyError):
            seal_to(public, b"x", tmp_path / "out")
    with pytest.raises(ReaderKeyError):
        open_sealed_artifact(PRIVATE[:-1], tmp_path / "lead.pub", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 77])
def test_what_was_sealed_has_the_form_without_any_key(tmp_path: Path, size: int) -> None:
    path = tmp_path / "there"
    seal_to(PUBLIC, text(size), path)
    check_form(path, fingerprint(PUBLIC))


def test_what_has_not_the_form_is_told_from_its_head_and_its_length(tmp_path: Path) -> None:
    path, raw = tmp_path / "there", sealed(tmp_path, text(CHUNK + 100))
    other = fingerprint(make_reader()[1])
    wrong = {
        "not a sealed artifact": [text(5000), b"", raw[:41], b"lzreader" + raw[8:]],
        "another recipient": [raw[:8] + bytes.fromhex(other) + raw[40:]],
        "its key is of another length": [raw[:40] + n.to_bytes(2, "big") + raw[42:] for n in (0, 1167, 1169, 65535)],
        "not whole pieces": [
            raw[:HEAD], raw[: HEAD - 1], raw[:42], raw[: HEAD + 15], raw[: HEAD + PIECE + 1], raw[: HEAD + PIECE + 16]
        ],
    }  # fmt: skip
    for words, bodies in wrong.items():
        for body in bodies:
            path.write_bytes(body)
            with pytest.raises(SealedFileError, match=words):
                check_form(path, fingerprint(PUBLIC))
    path.write_bytes(raw)
    for reader in (other, fingerprint(PUBLIC).upper(), "", fingerprint(PUBLIC)[:-1]):
        with pytest.raises(SealedFileError, match="another recipient"):
            check_form(path, reader)
