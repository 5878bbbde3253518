"""What the process of a making answers: plain values, arrays, and the classes that its mechanism promises.

Nothing is unpickled. A class is built by its own constructor, which checks it, and only one that the mechanism's
``run`` names as its result, or that such a class holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_args, get_type_hints

import numpy as np

_PLAIN: Final = (bool, int, float, str)
_KINDS: Final = "biufU"  # of numpy's: truth, numbers and text, never an object
_DEEPEST: Final = 40
_NO_RESULT: Final = "not a result of this mechanism"


def classes_of(run: Callable[..., Any]) -> dict[str, type[Any]]:
    """The dataclasses that a result may hold, by name.

    Raises:
        TypeError: two of them have one name.
    """
    found: dict[str, type[Any]] = {}

    def look(hint: Any) -> None:
        for part in get_args(hint):
            look(part)
        if isinstance(hint, type) and is_dataclass(hint) and found.get(hint.__name__) is not hint:
            if hint.__name__ in found:
                raise TypeError(f"two classes are called {hint.__name__}")
            found[hint.__name__] = hint
            for part in get_type_hints(hint).values():
                look(part)

    look(get_type_hints(run)["return"])
    return found


def pack(value: Any) -> tuple[bytes, bytearray]:
    """A result as JSON, and the bytes of its arrays one after the other.

    Raises:
        TypeError: it holds something else.
    """
    data = bytearray()
    return json.dumps(_told(value, data)).encode(), data


def _told(one: Any, data: bytearray) -> Any:
    if one is None or type(one) in _PLAIN:
        return one
    if isinstance(one, np.ndarray | np.generic | bytes):
        return _of_bytes(one, data)
    if is_dataclass(one):
        held = {field.name: _told(getattr(one, field.name), data) for field in fields(one) if field.init}
        return {"class": type(one).__name__, "fields": held}
    if isinstance(one, Mapping):
        return {"mapping": [[_told(key, data), _told(held, data)] for key, held in one.items()]}
    for kind in (frozenset, tuple, list):
        if isinstance(one, kind):
            return {kind.__name__: [_told(held, data) for held in one]}
    raise TypeError(f"a {type(one).__name__}")


def _of_bytes(one: Any, data: bytearray) -> dict[str, Any]:
    if isinstance(one, bytes):
        data.extend(one)
        return {"bytes": len(one)}
    array = np.ascontiguousarray(one)
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"an array of {array.dtype}")
    data.extend(array.tobytes())
    return {"array": array.dtype.str, "shape": list(np.shape(one))}


def unpack(tree: bytes, data: bytes, classes: Mapping[str, type[Any]]) -> Any:
    """The result again.

    Raises:
        ValueError: it is none of these classes, or not what its class permits.
    """
    try:
        reader = _Reader(memoryview(bytearray(data)), classes)
        value = reader.value(json.loads(tree), 0)
    except (KeyError, TypeError, RecursionError, OverflowError, AttributeError):
        raise ValueError(_NO_RESULT) from None
    if reader.at != len(data):
        raise ValueError(_NO_RESULT)
    return value


class _Reader:
    def __init__(self, data: memoryview, classes: Mapping[str, type[Any]]) -> None:
        self._data, self._classes, self.at = data, classes, 0

    def value(self, told: Any, deep: int) -> Any:
        if told is None or type(told) in _PLAIN:
            return told
        if deep > _DEEPEST:
            raise ValueError(_NO_RESULT)
        match told:
            case {"array": str(kind), "shape": list(shape)}:
                return self._array(np.dtype(kind), shape)
            case {"bytes": int(count)}:
                return bytes(self._take(count))
            case {"class": str(name), "fields": dict(held)}:
                return self._classes[name](**{key: self.value(one, deep + 1) for key, one in held.items()})
            case {"mapping": list(pairs)}:
                return {self.value(key, deep + 1): self.value(one, deep + 1) for key, one in pairs}
        return self._sequence(told, deep)

    def _sequence(self, told: Any, deep: int) -> Any:
        for kind in (frozenset, tuple, list):
            match told.get(kind.__name__):
                case list(held):
                    return kind([self.value(one, deep + 1) for one in held])
        raise ValueError(_NO_RESULT)

    def _take(self, count: int) -> memoryview:
        if not 0 <= count <= len(self._data) - self.at:
            raise ValueError(_NO_RESULT)
        self.at += count
        return self._data[self.at - count : self.at]

    def _array(self, kind: np.dtype[Any], shape: Sequence[Any]) -> Any:
        if kind.kind not in _KINDS or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError(_NO_RESULT)
        count = kind.itemsize
        for side in shape:
            count *= side
        array = np.frombuffer(self._take(count), kind).reshape(shape)
        return array if shape else array[()]
