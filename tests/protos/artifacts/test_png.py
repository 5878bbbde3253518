"""Pictures compress, and nothing but their pixels decides how: no filter, level or block says anything of its own."""

from __future__ import annotations

import hashlib
import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from skimage import data

from protos.artifacts import shards
from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.deflate import code_lengths, compressed
from protos.artifacts.inspection import check
from protos.artifacts.png import pack_earlier_png, pack_png, plain_size, read_earlier_png, read_png
from protos.artifacts.shards import (
    Png,
    capacity,
    check_earlier_shard,
    check_kept_shard,
    check_shard,
    pack_shard,
    plain_bytes,
    read_images,
)
from tests.support.image_sets import shard_of

PHOTOGRAPH: NDArray[np.uint8] = data.astronaut()[:96, 100:180]  # (96, 80, 3)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_stream(stream: bytes, image: NDArray[np.uint8] = PHOTOGRAPH) -> bytes:
    """A PNG of that header, around any zlib stream."""
    head = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2 if image.ndim == 3 else 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", stream) + chunk(b"IEND", b"")


def filtered(image: NDArray[np.uint8], kinds: list[int]) -> bytes:
    """The rows of an RGB image, each under a filter of its own (RFC 2083, section 6): 0, 1 or 2."""
    rows, out = image.reshape(len(image), -1), []
    for i, kind in enumerate(kinds):
        before = {0: np.zeros_like(rows[i]), 1: np.roll(rows[i], 3), 2: rows[i - 1] if i else np.zeros_like(rows[i])}
        before[1][:3] = 0
        out.append(bytes([kind]) + (rows[i] - before[kind]).tobytes())
    return b"".join(out)


def test_a_photograph_takes_much_less_than_its_pixels_and_reads_back() -> None:
    raw = pack_png(PHOTOGRAPH)
    assert len(raw) < 0.7 * PHOTOGRAPH.size
    assert (read_png(BytesSource(raw)) == PHOTOGRAPH).all()
    assert (np.asarray(Image.open(io.BytesIO(raw))) == PHOTOGRAPH).all()


def test_the_bytes_are_those_of_the_test_vectors() -> None:
    """Whatever zlib, numpy or Python there is: another digest here is another form, and sets of it are refused."""
    told = {
        "photograph": "b7db642c",
        "black": "e1d3daeb",
    }
    made = {"photograph": PHOTOGRAPH, "black": np.zeros((64, 64), np.uint8)}
    assert {name: hashlib.sha256(pack_png(image)).hexdigest()[:8] for name, image in made.items()} == told


def test_every_other_choice_of_filter_level_strategy_and_block_is_refused() -> None:
    """Eighty and more files that every reader shows as the same picture: one of them is admitted."""
    one, height = pack_png(PHOTOGRAPH), len(PHOTOGRAPH)
    streams = {one[41:-16]}
    by_row = [2] * (height - 1) + [0]
    for kinds in ([0] * height, [1] * height, [2] * height, by_row):
        lines = filtered(PHOTOGRAPH, kinds)
        assert (np.asarray(Image.open(io.BytesIO(with_stream(zlib.compress(lines))))) == PHOTOGRAPH).all()
        streams |= {compressed(lines)}
        for level in range(10):
            for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED):
                packer = zlib.compressobj(level, zlib.DEFLATED, 15, 8, strategy)
                streams.add(packer.compress(lines) + packer.flush())
        packer = zlib.compressobj(6)
        streams.add(packer.compress(lines[:999]) + packer.flush(zlib.Z_FULL_FLUSH) + packer.compress(lines[999:]))
    admitted = []
    for stream in streams:
        try:
            check_shard(BytesSource(shard_of([with_stream(stream)])))
            admitted.append(stream)
        except ArtifactFormatError:
            pass
    assert len(streams) > 80
    assert admitted == [one[41:-16]]


@pytest.mark.parametrize("flip", range(41, 130))
def test_no_bit_of_the_codes_is_free(flip: int) -> None:
    raw = bytearray(pack_png(PHOTOGRAPH))
    for bit in range(8):
        raw[flip] ^= 1 << bit
        body = bytes(raw[41:-16])
        with pytest.raises(ArtifactFormatError):
            read_png(BytesSource(with_stream(body)))
        raw[flip] ^= 1 << bit


def test_what_follows_the_stream_inside_its_chunk_is_refused() -> None:
    stream = pack_png(PHOTOGRAPH)[41:-16]
    for more in (b"x", b"Jane Doe", stream):
        with pytest.raises(ArtifactFormatError):
            read_png(BytesSource(with_stream(stream + more)))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.booleans(), st.integers(0, 4), st.integers(0, 2**32))
def test_any_picture_reads_back_from_one_file_that_is_never_larger_than_the_plain_one(
    height: int, width: int, colour: bool, spread: int, seed: int
) -> None:
    dice, shape = np.random.default_rng(seed), (height, width, 3) if colour else (height, width)
    image = (128 + dice.normal(0, 4.0**spread, shape)).clip(0, 255).astype(np.uint8)
    raw = pack_png(image)
    assert len(raw) <= plain_size(shape) == len(pack_earlier_png(image))
    assert (read_png(BytesSource(raw)) == image).all()
    assert (np.asarray(Image.open(io.BytesIO(raw))) == image).all()


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(min_size=1, max_size=3000), st.text("ab", min_size=1, max_size=3000).map(str.encode)))
def test_zlib_inflates_every_stream_and_none_holds_more_than_eight_times_its_size(raw: bytes) -> None:
    stream = compressed(raw)
    assert zlib.decompress(stream) == raw
    assert len(raw) <= 8 * len(stream)


def test_codes_that_would_be_longer_than_deflate_has_are_not() -> None:
    counts = [1, 1]
    while len(counts) < 27:
        counts.append(counts[-1] + counts[-2])
    raw = b"".join(bytes([symbol]) * count for symbol, count in enumerate(counts))
    lengths = code_lengths([*counts, *[0] * (256 - len(counts)), 1])
    assert 13 <= lengths.max() <= 15, "Huffman's own code would have 27 bits"
    assert sum(2.0 ** -int(length) for length in lengths if length) <= 1.0
    assert zlib.decompress(compressed(raw)) == raw


def test_a_stream_that_inflates_to_more_than_its_header_promises_is_not_inflated() -> None:
    image = np.zeros((8, 8), np.uint8)
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(100)) + packer.flush()
    many = np.zeros((1500, 1500), np.uint8)
    for body in (with_stream(bomb, image), with_stream(bomb, many)):
        tracemalloc.start()
        with pytest.raises(ArtifactFormatError):
            read_png(BytesSource(body))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50_000_000


# ---------------------------------------------------------------- the form before


def earlier(images: list[NDArray[np.uint8]]) -> bytes:
    return shard_of([pack_earlier_png(image) for image in images])


def test_a_set_of_before_compression_is_read_where_it_is_kept_and_admitted_no_more() -> None:
    raw = earlier([PHOTOGRAPH, PHOTOGRAPH[::-1]])
    assert check_kept_shard(BytesSource(raw)).count == 2
    assert (read_images(BytesSource(raw))[0][1] == PHOTOGRAPH[::-1]).all()
    assert (read_earlier_png(BytesSource(pack_earlier_png(PHOTOGRAPH))) == PHOTOGRAPH).all()
    with pytest.raises(ArtifactFormatError):
        check_shard(BytesSource(raw))
    with pytest.raises(ArtifactFormatError):
        check(BytesSource(raw), "image-set", {})


def test_of_a_site_that_speaks_the_protocol_of_before_only_that_form_is_admitted() -> None:
    old, new = earlier([PHOTOGRAPH]), pack_shard([PHOTOGRAPH], [""], Png())
    assert check(BytesSource(old), "image-set", {"earlier": True})["count"] == 1
    assert check_earlier_shard(BytesSource(old)).count == 1
    with pytest.raises(ArtifactFormatError):
        check(BytesSource(new), "image-set", {"earlier": True})
    with pytest.raises(ArtifactFormatError):
        check(BytesSource(old), "image-set", {"earlier": "yes"})


# ---------------------------------------------------------------- how much a set may hold


@pytest.mark.parametrize("read", [check_shard, check_kept_shard, read_images])
def test_a_set_is_bounded_by_what_it_holds_and_not_by_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[BytesSource], object]
) -> None:
    """A black picture takes an eighth of its pixels: else a set of 256 MiB would unpack to 2 GiB."""
    assert capacity(1 << 40, (2048, 2048, 3), Png()) == 21, "of the largest pictures, within 256 MiB"
    monkeypatch.setattr(shards, "MAX_SHARD", 1 << 20)
    black = np.zeros((128, 128, 3), np.uint8)
    most = capacity(1 << 40, black.shape, Png())
    body = pack_png(black)
    with pytest.raises(ArtifactFormatError, match="without compression"):
        pack_shard([black] * (most + 1), [""] * (most + 1), Png())
    assert check_shard(BytesSource(shard_of([body] * most))).count == most == 20
    raw = shard_of([body] * (most + 1))
    assert len(raw) < (1 << 20) // 4
    with pytest.raises(ArtifactFormatError, match="without compression"):
        read(BytesSource(raw))


@pytest.mark.parametrize("shape", [(8, 8), (33, 9, 3), (64, 64)])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_bytes_that_are_told_beforehand_are_enough_for_anything_and_reached(
    shape: tuple[int, ...], count: int
) -> None:
    told = plain_bytes(count, shape, Png())
    noise = [np.random.default_rng(i).integers(0, 256, shape, np.uint8) for i in range(count)]
    assert len(pack_shard(noise, ["x" * 32] * count, Png())) == told
    assert len(pack_shard([image // 64 for image in noise], [""] * count, Png())) <= told
    assert capacity(told, shape, Png()) >= count
