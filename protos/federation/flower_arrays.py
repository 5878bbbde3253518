"""Flower's arrays with their numbers in one place: sent from where they lie, and put together where they will lie.

A model of 100 million parameters is 400 MB. Flower's own way takes a copy into an Array, copies of all pieces before
the first of them leaves, and at the other end the pieces' bodies, one array of them, and its bytes.

Private interfaces of flwr 1.41.0, exactly: tests/protos/federation/test_flower_arrays.py compares what is made here
with what Flower makes.
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
from protos.federation.messages import MAX_OBJECTS, MAX_PARAMETERS, MAX_PAYLOAD, PIECE

STYPE: Final = "numpy.ndarray"  # Flower's word for numpy's file form
_MOST: Final = max(4 * MAX_PARAMETERS, MAX_PAYLOAD) + 4096  # bytes of the longest file that is sent
_HEAD: Final = 64  # most bytes before those of a piece; an honest piece has 19


def sent_from(name: str, flat: NDArray[Any]) -> ArrayRecord:
    """(p,) numbers as a record to be sent: its pieces are those of numpy's file, and lie where the numbers do.

    Nobody may change the numbers before all of it has left. Those of more than a piece have no file in one place: the
    Array's ``data`` is empty.
    """
    return _record({name: _sent_from(flat)})


def _record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """A record of these very arrays: Flower's constructor copies them. Raises: TypeError, one is none."""
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
    """The object of a name, with at most one array; each piece is let go of as soon as it is in its place.

    Args:
        name: its identifier.
        contents: of it and of all below it, by identifier. It is empty afterwards.
    Raises:
        Exception: it is none. The bytes are foreign; Flower's readers raise whatever they break.
        ValueError: it has more than one array, or a longer one than any that is sent.
    """
    return _Builder(contents).build(name)


class _Builder:
    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents, self._made = contents, dict[str, InflatableObject]()
        self._has_array = False

    def build(self, name: str) -> InflatableObject:
        if name not in self._made:
            content = self._contents.pop(name)
            kind, children, _ = get_object_head_values_from_object_content(content)
            self._made[name] = self._array(content, children) if kind == "Array" else self._other(content, children)
        return self._made[name]

    def _other(self, content: bytes, children: list[str]) -> InflatableObject:
        kind, _, _ = get_object_head_values_from_object_content(content)
        below = {child: self.build(child) for child in children}
        if kind != "ArrayRecord":
            return inflatable_class_registry[kind].inflate(content, children=below)
        told: Mapping[str, str] = json.loads(get_object_body(content, ArrayRecord))
        if set(told.values()) != below.keys():
            raise ValueError("a record has other arrays than it names")
        return _record({name: below[child] for name, child in told.items()})

    def _array(self, content: bytes, children: list[str]) -> Array:
        if self._has_array:  # each would be within the bound, and not all of them
            raise ValueError("a message has more than one array")
        self._has_array = True
        told: Mapping[str, Any] = json.loads(get_object_body(content, Array))
        order = told["arraychunk_ids"]
        if not len(order) <= MAX_OBJECTS:
            raise ValueError("an array names more pieces than any that is sent has")
        names = [children[at] for at in order]
        if set(names) != set(children):
            raise ValueError("an array has other pieces than it names")
        starts = {name: _start(self._contents[name]) for name in children}
        lengths = {name: len(self._contents[name]) - start for name, start in starts.items()}
        if not (size := sum(lengths[name] for name in names)) <= _MOST:  # one may be named again and again
            raise ValueError("an array is longer than any that is sent")
        last = {name: at for at, name in enumerate(names)}
        place, begin = np.empty(size, np.uint8), 0
        for at, name in enumerate(names):
            piece = self._contents.pop(name) if last[name] == at else self._contents[name]
            place[begin : begin + lengths[name]] = np.frombuffer(piece, np.uint8, offset=starts[name])
            begin += lengths[name]
        array = Array(told["dtype"], tuple(told["shape"]), told["stype"], b"")
        array.data = place.data.toreadonly()  # type: ignore[assignment] # a view serves wherever bytes are read
        return array


def _start(piece: bytes) -> int:
    """Where the numbers in a piece of an array begin.

    Raises:
        ValueError: it is none, or of another length than it says.
    """
    start = piece.find(HEAD_BODY_DIVIDER, 0, _HEAD) + 1
    kind, children, length = get_object_head_values_from_object_content(piece[:start])
    if not start or kind != "ArrayChunk" or children or length != len(piece) - start:
        raise ValueError("not a piece of an array")
    return start
