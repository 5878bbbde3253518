"""Values of a task file, each with its type and its bounds: a table is read with all problems at once, by their keys.

Nothing is coerced and nothing unknown is passed over. What is left out gets the default that stands here, so that
the canonical form of a task names every number that a site computes with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protos.common.errors import ConfigError


class TaskError(ConfigError, ValueError):
    """The task cannot be used; the text names every key that is wrong."""

    def __init__(self, *problems: str) -> None:
        """``problems``: one sentence for each, which begins with the key."""
        self.problems = problems
        super().__init__("; ".join(problems))


class Bound(Protocol):
    """What a value must be."""

    @property
    def default(self) -> Any:
        """In the place of a value that is left out; None: it must be given."""

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number."""

    low: int
    high: int
    default: int | None = None
    multiple: int = 1  # of which it must be one

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        if type(value) is int and self.low <= value <= self.high and value % self.multiple == 0:
            return None
        more = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"must be a whole number in [{self.low}, {self.high}]{more}"


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number."""

    low: float
    high: float
    default: float | None = None

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        good = type(value) in (int, float) and self.low <= value <= self.high  # type: ignore[operator]
        return None if good else f"must be a number in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    default: bool | None = None

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        return None if type(value) is bool else "must be true or false"


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    words: tuple[str, ...]
    default: str | None = None

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        return None if type(value) is str and value in self.words else f"must be one of {', '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class PerAxis:
    """One number for each axis of a picture or volume, or for each pair of its axes: a list of so many."""

    each: Whole | Number
    counts: tuple[int, ...] = (2, 3)
    default: tuple[float, ...] | None = None

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        if isinstance(value, (list, tuple)) and len(value) in self.counts:
            return next((wrong for one in value if (wrong := self.each.problem(one))), None)
        return f"must be a list of {' or '.join(map(str, self.counts))} numbers"


def read_values(
    raw: Mapping[str, object], bounds: Mapping[str, Bound], where: str, problems: list[str]
) -> dict[str, Any]:
    """A table's values, in the order of their names and with the defaults of what is left out; lists as tuples.

    Args:
        raw: what stands in the file.
        bounds: of every key that there may be.
        where: what stands before a key in a message, such as ``network.options.``.
        problems: gets one sentence for each key that is wrong; that key is left out of the values.
    """
    problems += [f"{where}{key}: unknown key" for key in sorted(raw.keys() - bounds.keys())]
    values: dict[str, Any] = {}
    for key in sorted(bounds):
        value = raw.get(key, bounds[key].default)
        wrong = "missing" if value is None else bounds[key].problem(value)
        if wrong:
            problems.append(f"{where}{key}: {wrong}")
        else:
            values[key] = _in_one_form(value, bounds[key])
    return values


def _in_one_form(value: Any, bound: Bound) -> Any:
    """Numbers as floats, so that 1 and 1.0 are one task, and lists as tuples."""
    if isinstance(bound, PerAxis):
        return tuple(_in_one_form(one, bound.each) for one in value)
    return float(value) if isinstance(bound, Number) else value


def plain(value: object) -> Any:
    """A value in JSON's types."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    assert value is None or isinstance(value, (bool, int, float, str))
    return value


def as_table(raw: object, where: str, problems: list[str]) -> Mapping[str, object]:
    """A table; where it is none, that is a problem, and an empty one is read on."""
    if isinstance(raw, Mapping) and all(type(key) is str for key in raw):
        return raw
    problems.append(f"{where.rstrip('.')}: must be a table")
    return {}


def as_list(raw: object, where: str, most: int, problems: list[str]) -> Sequence[object]:
    """A list of tables; where it is none or too long, that is a problem, and an empty one is read on."""
    if isinstance(raw, (list, tuple)) and len(raw) <= most:
        return raw
    problems.append(f"{where}: must be a list of at most {most} tables")
    return ()


def refuse(problems: Sequence[str]) -> None:
    """Refuse where there is a problem.

    Raises:
        TaskError: with all of them.
    """
    if problems:
        raise TaskError(*problems)
