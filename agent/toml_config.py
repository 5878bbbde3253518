"""Tables of TOML as the frozen dataclasses that each module defines for itself, all problems at once.

cattrs does it; nothing is coerced, and an unknown key is an error. pydantic was rejected: it would have every module
describe its settings in its own classes.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin

import cattrs
from cattrs.errors import ForbiddenExtraKeysError

_LISTS: Final[tuple[object, ...]] = (tuple, frozenset)
T = TypeVar("T")


@dataclass(slots=True)
class Tables:
    """A document, and what is wrong with it so far."""

    raw: dict[str, Any]
    converter: cattrs.Converter
    problems: list[str] = field(default_factory=list)

    def table(self, name: str, kind: type[T]) -> T | None:
        """A table, or None when it is not there."""
        return self.made(self.raw[name], kind, name) if name in self.raw else None

    def several(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """An array of tables."""
        rows = self.raw.get(name, [])
        if not isinstance(rows, list):
            self.problems.append(f"{name}: written as [[{name}]]")
            return ()
        made = (self.made(row, kind, f"{name}[{i}]") for i, row in enumerate(rows))
        return tuple(one for one in made if one is not None)

    def named(self, name: str, kind: type[T]) -> dict[str, T]:
        """Tables with names of the site's choosing."""
        rows = self.raw.get(name, {})
        if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
            self.problems.append(f"{name}: written as [{name}.NAME]")
            return {}
        made = {key: self.made({"name": key, **row}, kind, f"{name}.{key}") for key, row in rows.items()}
        return {key: one for key, one in made.items() if one is not None}

    def made(self, raw: Any, kind: type[T], where: str) -> T | None:
        """One table as a dataclass; None when it is none, and the reasons are among the problems."""
        if not isinstance(raw, dict):
            self.problems.append(f"{where}: must be a table")
            return None
        try:
            return self.converter.structure(raw, kind)
        except Exception as error:  # noqa: BLE001 - an ExceptionGroup of everything that is wrong in it
            for told in cattrs.transform_error(error, where, format_exception=_sentence):
                what, _, place = told.rpartition(" @ ")
                self.problems.append(f"{place}: {what}")
            return None


def _sentence(error: BaseException, _kind: type | None) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        return "unknown keys: " + ", ".join(sorted(error.extra_fields))
    return "missing" if isinstance(error, KeyError) else str(error)


def converter(root: Path) -> cattrs.Converter:
    """One that coerces nothing, and takes paths as relative to a directory."""
    made = cattrs.Converter(forbid_extra_keys=True)
    for kind in (bool, int, str, float):
        made.register_structure_hook(kind, _plain(kind))
    made.register_structure_hook(dt.date, _day)
    made.register_structure_hook(Path, lambda value, _: root / _plain(str)(value, str))
    made.register_structure_hook_func(
        lambda kind: get_origin(kind) in _LISTS, lambda value, kind: _listed(made, value, kind)
    )
    return made


def names_files(**names: str) -> None:
    """Refuse what names no file, by its key.

    Raises:
        ValueError: it does not.
    """
    for key, name in names.items():
        if not (name and name.isprintable()):
            raise ValueError(
                f"{key}: must name a file or a folder, relative to this one, in characters that are printed"
            )


def _day(value: Any, _kind: Any) -> dt.date:
    """A local date of TOML, or the same in quotes; a date with a time is none."""
    if type(value) is dt.date:
        return value
    try:
        day = dt.date.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        day = None
    if day is None or day.isoformat() != value:
        raise ValueError("must be a date, YYYY-MM-DD")
    return day


def _plain(kind: type[T]) -> Callable[[Any, Any], T]:
    def check(value: Any, _kind: Any) -> T:
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"must be a {kind.__name__}")
        return kind(value)  # type: ignore[call-arg]

    return check


def _listed(converter: cattrs.Converter, value: Any, kind: Any) -> Any:
    """A list as a tuple or a set; a string is not one, although it iterates."""
    if not isinstance(value, list):
        raise ValueError("must be a list")
    parts = get_args(kind)
    if get_origin(kind) is frozenset or parts[-1] is Ellipsis:
        made = [converter.structure(one, parts[0]) for one in value]
        return frozenset(made) if get_origin(kind) is frozenset else tuple(made)
    if len(value) != len(parts):
        raise ValueError(f"must be a list of {len(parts)}")
    return tuple(converter.structure(one, part) for one, part in zip(value, parts, strict=True))
