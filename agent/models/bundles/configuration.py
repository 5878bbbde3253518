"""A MONAI bundle's configuration as data: JSON and YAML are parsed, ``@`` references are followed, nothing is run.

MONAI's own ``ConfigParser`` gives every text that begins with ``$`` to Python's ``eval``, and imports and calls
whatever a ``_target_`` names (GHSA-873f-pvrv-4x83). A bundle comes from strangers, so that it never gets there: texts
stay texts, and whoever takes a part of it refuses those that are expressions, by their keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from protos.common.errors import ArtifactError
from protos.common.text import printable

SEPARATOR: Final = "::"
_OLD_SEPARATOR: Final = "#"  # before MONAI 1.3
_PROGRAMS: Final = frozenset(
    (".bat", ".dll", ".exe", ".ipynb", ".js", ".pickle", ".pkl", ".py", ".pyc", ".pyd", ".pyw", ".sh", ".so")
)
_FORMS: Final = (".json", ".yaml", ".yml")
_MOST_ENTRIES: Final = 10_000  # of a folder
_MOST_TEXT: Final = 1 << 20  # bytes of a configuration
_MOST_VALUES: Final = 50_000  # of a configuration, and of what its references come to
_DEEPEST: Final = 32
_SHOWN: Final = 200  # characters of a key in a message

Json = Any  # of JSON's types


class BundleError(ArtifactError, ValueError):
    """The bundle cannot be taken; the text names every file and key that is wrong, and quotes no value."""

    def __init__(self, *problems: str) -> None:
        """``problems``: one sentence for each, which begins with the file or the key."""
        self.problems = problems
        super().__init__("; ".join(problems))


@dataclass(frozen=True, slots=True)
class BundleFolder:
    """What lies in a bundle's folder."""

    name: str
    configs: Mapping[str, Mapping[str, Json]]  # such as "train" -> the whole of configs/train.json
    weights: Path | None  # models/model.safetensors, or models/model.pt


@dataclass(slots=True)
class _Budget:
    left: int = _MOST_VALUES
    problems: list[str] = field(default_factory=list)


def read_bundle(folder: Path) -> BundleFolder:
    """Read a bundle's configurations; no other file in it is opened.

    Raises:
        BundleError: it holds a program, or a link that leads out of it; or a configuration is no plain data.
    """
    problems = []
    for number, path in enumerate(_entries(folder)):
        if number >= _MOST_ENTRIES:
            raise BundleError(f"{shown(folder.name)}: more than {_MOST_ENTRIES} files")
        name = shown(path.relative_to(folder).as_posix())
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            problems.append(f"{name}: a link that leads out of the bundle")
        elif path.suffix.lower() in _PROGRAMS:
            problems.append(f"{name}: a program; a bundle is taken as configuration alone, so take a copy without it")
    if problems:
        problems.sort()
        raise BundleError(*problems)
    found = sorted(path for path in folder.glob("configs/*") if path.suffix.lower() in _FORMS and path.is_file())
    if not found:
        raise BundleError(f"{shown(folder.name)}: no bundle: there is no configs/*.json, .yaml or .yml in it")
    configs: dict[str, Mapping[str, Json]] = {}
    for path in found:
        key = f"configs/{shown(path.stem)}"
        if path.stem in configs:
            raise BundleError(f"{key}: there are two of it, as JSON and as YAML: keep one")
        configs[path.stem] = _read(path)
    kept = (folder / "models" / f"model{form}" for form in (".safetensors", ".pt"))
    return BundleFolder(folder.resolve().name, configs, next((path for path in kept if path.is_file()), None))


def _entries(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise BundleError(f"{shown(folder.name)}: no folder")
    for root, folders, files in os.walk(folder):
        yield from (Path(root, name) for name in (*folders, *files))


def _read(path: Path) -> Mapping[str, Json]:
    name = f"configs/{shown(path.name)}"
    try:
        with path.open("rb") as source:
            raw = source.read(_MOST_TEXT + 1)
    except OSError as error:
        raise BundleError(f"{name}: {error.strerror}") from None
    if len(raw) > _MOST_TEXT:
        raise BundleError(f"{name}: larger than {_MOST_TEXT} bytes")
    form = "JSON" if path.suffix.lower() == ".json" else "YAML"
    try:
        text = raw.decode("utf-8-sig")
        made = _from_json(text) if form == "JSON" else _from_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        raise BundleError(f"{name}: not {form} of distinct keys and plain values (no anchors, no tags)") from None
    if not isinstance(made, dict):
        raise BundleError(f"{name}: not a table")
    budget = _Budget()
    _check(made, "", 0, budget)
    if budget.problems:
        raise BundleError(*(f"{name}: {problem}" for problem in budget.problems))
    return made


def _from_yaml(text: str) -> Json:
    loader = _PlainLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _from_json(text: str) -> Json:
    def distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        if len(made := dict(pairs)) != len(pairs):
            raise ValueError("a key stands there twice")
        return made

    def number(_: str) -> Json:
        raise ValueError("not a finite number")

    return json.loads(text, object_pairs_hook=distinct, parse_constant=number)


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain values alone: an alias can make a file of 1 KB a table of 10^9 values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that stands there twice, and one that is no text."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if not all(type(key) is str for key in keys) or len(set(keys)) != len(keys):
            raise yaml.YAMLError("a key that is no text, or stands there twice")
        return super().construct_mapping(node, deep)


def _check(value: Json, key: str, depth: int, budget: _Budget) -> None:
    """JSON's types alone, and not too many of them."""
    budget.left -= 1
    if budget.left < 0 or depth > _DEEPEST:
        raise BundleError(f"more than {_MOST_VALUES} values, or {_DEEPEST} tables in one another")
    if type(value) in (dict, list):
        for name, inner in _inner(value):
            _check(inner, joined(key, name), depth + 1, budget)
    elif not (value is None or type(value) in (str, bool, int)):
        finite = type(value) is float and abs(value) < float("inf")
        if not finite:
            budget.problems.append(f"{shown(key)}: neither a text, a finite number nor true or false")


def _inner(value: Json) -> list[tuple[str, Json]]:
    return list(value.items()) if isinstance(value, dict) else [(str(at), one) for at, one in enumerate(value)]


def joined(key: str, name: str) -> str:
    """The key of a part of a part."""
    return f"{key}{SEPARATOR}{name}" if key else name


def shown(key: str) -> str:
    """A name from a bundle, for a message: so many characters, and none that steers a terminal."""
    return printable(key[:_SHOWN])


def is_expression(value: object) -> bool:
    """Whether MONAI would run a text, or put another file in its place."""
    return isinstance(value, str) and value.startswith(("$", "%"))


def expressions(value: Json, key: str) -> list[str]:
    """The keys of all expressions in a part."""
    if is_expression(value):
        return [key]
    if not isinstance(value, (dict, list)):
        return []
    return [found for name, inner in _inner(value) for found in expressions(inner, joined(key, name))]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration of a bundle, whose references can be followed."""

    whole: Mapping[str, Json]
    followed: set[str] = field(default_factory=set)  # keys that references led to

    def has(self, key: str) -> bool:
        """Whether there is such a part, such as ``train::inferer``."""
        try:
            self._at(key)
        except KeyError:
            return False
        return True

    def part(self, key: str) -> Json:
        """A part with every reference followed; an expression in it is still a text.

        Raises:
            BundleError: a reference leads nowhere, or back to itself, or they come to too much.
            KeyError: there is no such part.
        """
        return self._followed(self._at(key), key, (), _Budget())

    def _at(self, key: str) -> Json:
        value: Json = self.whole
        for name in key.replace(_OLD_SEPARATOR, SEPARATOR).split(SEPARATOR):
            if isinstance(value, dict):
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and len(name) < 6 and int(name) < len(value):
                value = value[int(name)]
            else:
                raise KeyError(key)
        return value

    def _followed(self, value: Json, key: str, above: tuple[str, ...], budget: _Budget) -> Json:
        budget.left -= 1
        if budget.left < 0 or len(above) > _DEEPEST or key.count(SEPARATOR) > _DEEPEST:
            raise BundleError(f"{shown(key)}: its references come to more than {_MOST_VALUES} values")
        if isinstance(value, str) and value.startswith("@"):
            to = value[1:].replace(_OLD_SEPARATOR, SEPARATOR)
            if to in above:
                raise BundleError(f"{shown(key)}: the reference leads back to itself")
            try:
                found = self._at(to)
            except KeyError:
                raise BundleError(f"{shown(key)}: the reference leads nowhere") from None
            self.followed.add(to)
            return self._followed(found, key, (*above, to), budget)
        if isinstance(value, dict):
            return {name: self._followed(one, joined(key, name), above, budget) for name, one in value.items()}
        if isinstance(value, list):
            return [self._followed(one, joined(key, str(at)), above, budget) for at, one in enumerate(value)]
        return value
