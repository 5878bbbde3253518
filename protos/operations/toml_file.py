"""A TOML file as the frozen dataclass that its reader defines, with every problem at once.

``coordinator.toml``, ``console.toml``, ``log.toml`` and ``particulars.toml`` are read so. Nothing is coerced, an
unknown key is a problem, and a path is relative to the file's directory. The hospital's own files are read by cattrs
(``agent/toml_config.py``), which the coordinator does without.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_WORDS: Final = {str: "a text", int: "a whole number", Path: "a path"}


@dataclass(frozen=True, slots=True)
class _Reader:
    home: Path
    problems: list[str] = field(default_factory=list)

    def table(self, raw: Mapping[str, Any], kind: type[T], where: str = "") -> T | None:
        """One table; None where it is none, and the reasons are among the problems."""
        types = get_type_hints(kind)
        unknown = sorted(set(raw) - set(types))
        if unknown:
            self.problems.append(f"unknown keys: {', '.join(where + name for name in unknown)}")
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}  # type: ignore[arg-type]
        missing = sorted(required - set(raw))
        if missing:
            self.problems.append(f"missing keys: {', '.join(where + name for name in missing)}")
        given = {name: self.value(raw[name], types[name], where + name) for name in types if name in raw}
        given = {name: value for name, value in given.items() if value is not None}
        if not required <= set(given):
            return None
        try:
            return kind(**given)
        except ValueError as error:  # what is in its range is said beside what is of another type
            self.problems.append(str(error))
            return None

    def value(self, raw: Any, kind: Any, name: str) -> Any:
        """One value, or None where it is of another type."""
        (kind,) = [one for one in get_args(kind) if one is not NoneType][:1] if NoneType in get_args(kind) else [kind]
        if is_dataclass(kind):
            if isinstance(raw, dict):
                return self.table(raw, kind, f"{name}.")  # type: ignore[arg-type]
            words = "a table"
        elif get_origin(kind) is tuple:
            if isinstance(raw, list) and all(type(text) is str for text in raw):
                return tuple(raw)
            words = "a list of texts"
        elif get_origin(kind) is Mapping:
            if isinstance(raw, dict) and all(type(text) is str for text in raw.values()):
                return MappingProxyType(raw)
            words = "a table of texts"
        else:
            if type(raw) is (str if kind is Path else kind):
                return self.home / raw if kind is Path else raw
            words = _WORDS[kind]
        self.problems.append(f"{name} must be {words}")
        return None


def parse(text: str, kind: type[T], name: str, home: Path, fault: type[ValueError]) -> T:
    """A dataclass from TOML.

    Args:
        text: of the file.
        kind: a frozen dataclass of texts, whole numbers, paths, lists and tables of texts, and such dataclasses. Its
            ``__post_init__`` raises ValueError with a sentence for the operator.
        name: of the file, for that sentence.
        home: the directory to which paths are relative.
        fault: what is raised: not TOML, or with every problem that was found, by its key.
    """
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise fault(f"{name}: not TOML: {error}") from None
    reader = _Reader(home)
    made = reader.table(raw, kind)
    if reader.problems or made is None:
        raise fault(f"{name}: {'; '.join(reader.problems)}")
    return made


def read(path: Path, kind: type[T], fault: type[ValueError]) -> T | None:
    """The same of a file, or None where there is none; ``fault`` also where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise fault(f"{path.name} cannot be read: check whose it is") from None
    return parse(text, kind, path.name, path.parent, fault)
