"""Flower's arrays are sent from where their numbers lie, in Flower's own pieces, and are put together once."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message import array as flower
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from protos.federation import flower_arrays
from protos.federation.flat_arrays import packed, view
from protos.federation.flower_arrays import STYPE, put_together, sent_from
from protos.federation.messages import MAX_OBJECTS, PIECE

SIZES = [0, 1, PIECE // 4 - 33, PIECE // 4 - 32, PIECE // 4 - 31, PIECE // 4, 2 * PIECE // 4 - 32, 700_001]


def numbers(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32)


def records(arrays: ArrayRecord) -> RecordDict:
    return RecordDict({"parameters": arrays, "order": ConfigRecord({"round": 3})})


def ours(flat: np.ndarray) -> RecordDict:
    return records(sent_from("flat", flat))


def contents(sent: RecordDict) -> dict[str, bytes]:
    return {name: one.deflate() for name, one in get_all_nested_objects(sent).items()}


@pytest.mark.parametrize("size", SIZES)
def test_what_is_sent_are_the_very_objects_that_flower_would_send(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", PIECE)
    flat = numbers(size)
    theirs = records(ArrayRecord({"flat": Array(flat.dtype.name, (size,), STYPE, packed(flat))}))
    assert contents(ours(flat)) == contents(theirs)
    assert get_object_tree(ours(flat)) == get_object_tree(theirs)


@pytest.mark.parametrize("size", SIZES)
def test_they_are_put_together_as_flower_would(size: int) -> None:
    flat = numbers(size)
    sent = ours(flat)
    name, carried = sent.object_id, contents(sent)
    theirs = inflate_object_from_contents(name, dict(carried))
    put = put_together(name, carried)
    assert not carried
    assert isinstance(put, RecordDict)
    assert isinstance(theirs, RecordDict)
    assert put["order"] == theirs["order"]
    one, other = put["parameters"]["flat"], theirs["parameters"]["flat"]
    assert (one.dtype, one.shape, one.stype) == (other.dtype, other.shape, other.stype)
    assert one.data == other.data
    read = view(one.data, size, np.dtype(np.float32))
    assert read is not None
    assert not read.flags.writeable
    np.testing.assert_array_equal(read, flat)
    np.testing.assert_array_equal(one.numpy(), flat)


def test_pieces_that_are_alike_are_carried_once_and_stand_where_they_are_named() -> None:
    flat = np.zeros(PIECE, np.float32)
    flat[-1] = 1.0
    sent = ours(flat)
    carried = contents(sent)
    assert len(carried) == 3 + 4  # records; the first piece, two that are alike, and the last of whole and of header
    put = put_together(sent.object_id, carried)
    np.testing.assert_array_equal(put["parameters"]["flat"].numpy(), flat)  # type: ignore[index]


@pytest.mark.parametrize("way", ["sent", "put together"])
def test_numbers_are_not_copied_beside_themselves(way: str) -> None:
    flat = numbers(8 << 20)  # 32 MiB
    sent = ours(flat)
    carried = contents(sent) if way == "put together" else {}
    name = sent.object_id
    tracemalloc.start()
    try:
        if way == "sent":
            for one in get_all_nested_objects(ours(flat)).values():
                one.deflate()
        else:
            put_together(name, carried)  # what it takes from them, it lets go of
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < (8 << 20) + (flat.nbytes if way == "put together" else 0)


def array_of(pieces: list[str], order: list[int]) -> bytes:
    told = {"dtype": "uint8", "shape": [4], "stype": STYPE, "arraychunk_ids": order}
    body = json.dumps(told).encode()
    return f"Array {','.join(pieces)} {len(body)}".encode() + b"\0" + body


def test_an_array_that_names_a_piece_without_end_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_arrays, "_MOST", 1 << 22)
    piece = ArrayChunk(memoryview(bytes(PIECE)))
    name, raw = piece.object_id, piece.deflate()
    assert add_header_to_object_body(b"", piece) == b"ArrayChunk  0\0"  # as `array_of` makes one
    within, beyond = array_of([name], [0] * 4), array_of([name], [0] * 5)
    put = put_together("it", {"it": within, name: raw})
    assert isinstance(put, Array)
    assert len(put.data) == 1 << 22
    with pytest.raises(ValueError, match="longer than any"):
        put_together("it", {"it": beyond, name: raw})


@pytest.mark.parametrize("mentions", [MAX_OBJECTS, MAX_OBJECTS + 1])
def test_an_array_that_names_its_piece_too_often_takes_no_time(mentions: int) -> None:
    piece = ArrayChunk(memoryview(b"1"))
    name, raw = piece.object_id, piece.deflate()
    carried = {"it": array_of([name], [0] * mentions), name: raw}
    if mentions <= MAX_OBJECTS:
        assert len(put_together("it", carried).data) == mentions  # type: ignore[attr-defined]
    else:
        with pytest.raises(ValueError, match="more pieces"):
            put_together("it", carried)


def test_a_message_has_one_array() -> None:
    """Each within the bound, and hundreds of them: one would do, and the bound is that of one."""
    pieces = [ArrayChunk(memoryview(bytes([n]) * 4)) for n in range(2)]
    arrays = {f"array-{n}": array_of([one.object_id], [0]) for n, one in enumerate(pieces)}
    body = json.dumps({"flat": "array-0", "more": "array-1"}).encode()
    record = f"ArrayRecord array-0,array-1 {len(body)}".encode() + b"\0" + body
    carried = {"it": record, **arrays, **{one.object_id: one.deflate() for one in pieces}}
    assert isinstance(inflate_object_from_contents("it", dict(carried)), ArrayRecord), "Flower takes it"
    with pytest.raises(ValueError, match="more than one array"):
        put_together("it", carried)


def test_a_record_of_arrays_holds_nothing_else() -> None:
    piece, other = ArrayChunk(memoryview(b"1234")), ConfigRecord({"a": 1})
    array = array_of([piece.object_id], [0])
    body = json.dumps({"flat": "array", "more": other.object_id}).encode()
    record = f"ArrayRecord array,{other.object_id} {len(body)}".encode() + b"\0" + body
    carried = {"it": record, "array": array, piece.object_id: piece.deflate(), other.object_id: other.deflate()}
    with pytest.raises(TypeError):
        put_together("it", carried)


def test_what_is_no_array_is_refused() -> None:
    piece = ArrayChunk(memoryview(b"1234"))
    name, raw = piece.object_id, piece.deflate()
    other = ConfigRecord({"a": 1})
    known = {name: raw, "other": other.deflate(), "nested": array_of([name], [0])}
    known |= {"short": raw[:-1], "long": raw + b"5", "empty": b"ArrayChunk  0\0", "headless": b"1234"}
    known |= {"long head": b"ArrayChunk  " + b"\t" * (1 << 20) + b"4\0" + b"1234"}
    for pieces, order in (
        ([name, "other"], [0]),  # a child that it does not name
        (["other"], [0]),
        (["short"], [0]),
        (["long"], [0]),
        (["long head"], [0]),
        (["headless"], [0]),
        (["nested"], [0]),
        (["missing"], [0]),
        ([name], [1]),
        ([name], []),
    ):
        with pytest.raises((ValueError, KeyError, IndexError)):
            put_together("it", {"it": array_of(pieces, order), **known})


def test_the_pieces_of_the_longest_payload_are_not_too_many() -> None:
    assert flower_arrays._MOST // PIECE + 1 + 4 <= MAX_OBJECTS
