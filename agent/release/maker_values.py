"""What a confined process answers: plain values, arrays, and the classes that its call promises.

Nothing is unpickled. A class is built by its own constructor, which checks it, and only one that the call's
annotation names as its result, or that such a class holds. Fields and result are of the types that are annotated, and
text in them steers no terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

_PLAIN: Final = (bool, int, float, str)
# of numpy's: truth, numbers and text, never an object. numpy itself would evaluate what it takes for a type's name
_KINDS: Final = re.compile(r"\|b1|\|[iu]1|[<>](?:[iu][248]|f[248]|U[0-9]{1,6})")
_LARGEST: Final = 1 << 63
_DEEPEST: Final = 40
_NO_RESULT: Final = "not a result of this call"
_ONES: Final = {float: (int, float, np.integer, np.floating), int: (int, np.integer), bool: (bool, np.bool_)}


@dataclass(frozen=True, slots=True)
class Result:
    """What a call may answer."""

    hint: Any = Any  # as annotated
    classes: Mapping[str, type[Any]] = field(default_factory=dict)  # the dataclasses that it may hold, by name

    @classmethod
    def of(cls, call: Callable[..., Any]) -> Result:
        """As its annotation has it; of a ``partial``, that of its function.

        Raises:
            TypeError: two of the classes have one name.
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

        look(hint := get_type_hints(getattr(call, "func", call))["return"])
        return cls(hint, found)

    def unpack(self, tree: bytes | bytearray, data: bytes | bytearray) -> Any:
        """The result again. Its arrays lie in ``data``, which is theirs from here on: changeable if that is.

        Raises:
            ValueError: it is none of these classes, or not what its class permits.
        """
        try:
            reader = _Reader(memoryview(data), self.classes)
            value = reader.value(json.loads(tree), 0)
            if reader.at != len(data) or not _fits(value, self.hint):
                raise ValueError(_NO_RESULT)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - of json, numpy and a class's own check: whatever they say, it is none
            raise ValueError(_NO_RESULT) from None
        return value


def _fits(one: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, with all that it holds."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Any, Union, UnionType, Literal):
        return kind is Any or any(one == part if kind is Literal else _fits(one, part) for part in parts)
    if hint in (None, NoneType):
        return one is None
    if kind in _ONES:
        return isinstance(one, _ONES[kind]) and (kind is bool or not isinstance(one, bool))
    if not isinstance(one, kind) or (kind is str and not one.isprintable()):
        return False
    if kind is np.ndarray and parts:
        return all(issubclass(one.dtype.type, number) for number in get_args(parts[1]) if number is not Any)
    if kind is tuple and parts and parts[-1] is not ...:
        return len(one) == len(parts) and all(map(_fits, one, parts))
    if isinstance(one, Mapping):
        return all(_fits(key, parts[0]) and _fits(held, parts[1]) for key, held in one.items())
    return not parts or all(_fits(held, parts[0]) for held in one)


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
    if not _KINDS.fullmatch(array.dtype.str):
        raise TypeError(f"an array of {array.dtype}")
    data.extend(array.reshape(-1).view(np.uint8).data if array.size else b"")  # a model is not copied for it
    return {"array": array.dtype.str, "shape": list(np.shape(one))}


class _Reader:
    def __init__(self, data: memoryview, classes: Mapping[str, type[Any]]) -> None:
        self._data, self._classes, self.at = data, classes, 0

    def value(self, told: Any, deep: int) -> Any:
        if told is None or type(told) in _PLAIN:
            return _of_python(told)
        if deep > _DEEPEST:
            raise ValueError(_NO_RESULT)
        match told:
            case {"array": str(kind), "shape": list(shape)}:
                return self._array(kind, shape)
            case {"bytes": int(count)}:
                return bytes(self._take(count))
            case {"class": str(name), "fields": dict(held)}:
                return self._built(self._classes[name], {key: self.value(one, deep + 1) for key, one in held.items()})
            case {"mapping": list(pairs)}:
                return {self.value(key, deep + 1): self.value(one, deep + 1) for key, one in pairs}
        return self._sequence(told, deep)

    def _built(self, known: type[Any], held: Mapping[str, Any]) -> Any:
        hints = get_type_hints(known)
        if not all(_fits(one, hints[name]) for name, one in held.items()):
            raise ValueError(_NO_RESULT)
        return known(**held)

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

    def _array(self, name: str, shape: Sequence[Any]) -> Any:
        if not _KINDS.fullmatch(name) or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError(_NO_RESULT)
        kind = np.dtype(name)
        count = kind.itemsize
        for side in shape:
            count *= side
        raw = self._take(count)
        if kind.kind == "U":
            bytes(raw).decode(
                f"utf-32-{'be' if name[0] == '>' else 'le'}"
            )  # numpy does not check that these are characters
        array = np.frombuffer(raw, kind).reshape(shape)
        return array if shape else array[()]


def _of_python(one: Any) -> Any:
    """A number of 64 bits, and text of characters: more is not told, and would fail where it is used."""
    if isinstance(one, str):
        one.encode()
    elif type(one) is int and not -_LARGEST <= one < _LARGEST:
        raise ValueError(_NO_RESULT)
    return one
