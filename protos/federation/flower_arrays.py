"""Flower's arrays with their numbers in one place: sent from where they lie, and put together where they will lie.

A model of 100 million parameters is 400 MB. Flower's own way copies it: to take it into an Array, once more piece by
piece while it is sent, and three times while it is put together. Private interfaces of flwr 1.41.0, exactly;
tests/protos/federation/test_flower_arrays.py holds them
to Flower's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry
from numpy.typing import NDArray

from protos.federation.flat_arrays import header, packed
from protos.federation.messages import MAX_PARAMETERS, MAX_PAYLOAD, PIECE

STYPE: Final = "numpy.ndarray"  # Flower's word for numpy's file form
_MOST: Final = max(4 * MAX_PARAMETERS, MAX_PAYLOAD) + 4096  # bytes of the longest file that is sent


def sent_from(name: str, flat: NDArray[Any]) -> ArrayRecord:
    """(p,) numbers as a record to be sent: its pieces are those of numpy's file, and lie where the numbers do.

    Nobody may change the numbers before all of it has left. Those of more than a piece have no file in one place: the
    Array's ``data`` is empty.
    """
    return _record({name: _sent_from(flat)})


def _record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """A record of these very arrays: Flower's constructor copies them."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = array
    return record


def _sent_from(flat: NDArray[Any]) -> Array:
    if flat.nbytes < PIECE:
        return Array(flat.dtype.name, (int(flat.size),), STYPE, packed(flat))
    array = Array(flat.dtype.name, (int(flat.size),), STYPE, b"")
    numbers, front = np.ascontiguousarray(flat).view(np.uint8).data, header(flat.size, flat.dtype)
    first = PIECE - len(front)
    parts = [memoryview(front + bytes(numbers[:first]))]
    parts += [numbers[at : at + PIECE] for at in range(first, len(numbers), PIECE)]
    chunks = [ArrayChunk(part) for part in parts]
    array.__dict__["_chunks"] = [(chunk.object_id, chunk) for chunk in chunks]  # where Flower keeps them, too
    return array


def put_together(name: str, contents: dict[str, bytes]) -> InflatableObject:
    """The object of a name; each piece is let go of as soon as it is in its place.

    Args:
        name: its identifier.
        contents: of it and of all below it, by identifier. It is empty afterwards.
    Raises:
        ValueError, KeyError, TypeError: it is none; or a piece is missing, or of two arrays.
    """
    return _put_together(name, contents, {})


def _put_together(name: str, contents: dict[str, bytes], made: dict[str, InflatableObject]) -> InflatableObject:
    if name in made:
        return made[name]
    content = contents.pop(name)
    kind, children, _ = get_object_head_values_from_object_content(content)
    if kind == Array.__qualname__:
        made[name] = _array(content, children, contents)
        return made[name]
    below = {child: _put_together(child, contents, made) for child in children}
    if kind == ArrayRecord.__qualname__:
        made[name] = _record(_named(content, below))
    else:
        made[name] = inflatable_class_registry[kind].inflate(content, children=below)
    return made[name]


def _named(content: bytes, below: Mapping[str, InflatableObject]) -> dict[str, Array]:
    """The arrays of a record by their names in it."""
    told: Mapping[str, str] = json.loads(get_object_body(content, ArrayRecord))
    if set(told.values()) != below.keys():
        raise ValueError("a record has other arrays than it names")
    found = {name: below[child] for name, child in told.items()}
    return {name: array for name, array in found.items() if isinstance(array, Array)}


def _array(content: bytes, children: list[str], contents: dict[str, bytes]) -> Array:
    told: Mapping[str, Any] = json.loads(get_object_body(content, Array))
    names = [children[at] for at in told["arraychunk_ids"]]
    if set(names) != set(children):
        raise ValueError("an array has other pieces than it names")
    last = {name: at for at, name in enumerate(names)}
    if not (size := sum(_length(contents[name]) for name in names)) <= _MOST:  # a piece may be named again and again
        raise ValueError("an array is longer than any that is sent")
    place = np.empty(size, np.uint8)
    begin = 0
    for at, name in enumerate(names):
        piece = contents.pop(name) if last[name] == at else contents[name]
        end = begin + _length(piece)
        place[begin:end] = np.frombuffer(piece, np.uint8, offset=len(piece) - (end - begin))
        begin = end
    array = Array(told["dtype"], tuple(told["shape"]), told["stype"], b"")
    array.data = place.data.toreadonly()  # type: ignore[assignment] # a view serves wherever bytes are read
    return array


def _length(piece: bytes) -> int:
    """Of the numbers in a piece of an array.

    Raises:
        ValueError: it is none.
    """
    kind, children, length = get_object_head_values_from_object_content(piece)
    if kind != ArrayChunk.__qualname__ or children or length != len(piece) - piece.index(HEAD_BODY_DIVIDER) - 1:
        raise ValueError("not a piece of an array")
    return length
