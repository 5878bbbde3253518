"""``ingest.toml``: what may come in, by which roads, and how it is de-identified. Parsed once, all problems at once.

cattrs turns the tables into the frozen dataclasses that each module defines for itself; nothing is coerced, and an
unknown key is an error. pydantic was rejected: it would have every module describe its settings in its own classes.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin

import cattrs
from cattrs.errors import ForbiddenExtraKeysError

from agent.deidentify.profile import Profile
from agent.deidentify.regions import Blank
from agent.deidentify.rules import Rules
from agent.edges.dicomweb import Web
from agent.edges.dimse import ListenerSettings
from agent.edges.files import Folder
from agent.edges.home import BadSite, Home, Settings
from agent.edges.lists import Columns
from agent.edges.ocr import OcrSettings
from agent.edges.pull import Remote
from agent.edges.stow import StowSettings

FILE: Final = "ingest.toml"
_LISTS: Final[tuple[object, ...]] = (tuple, frozenset)
_TABLES: Final = ("site", "rules", "blank", "deidentify", "ocr", "listener", "stow", "pacs", "dicomweb", "folder")
_OF_SITE: Final = ("modalities", "secondary_capture_modalities")  # these stand in site.toml
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reading:
    """How the way in works: the table ``[site]``."""

    issuer: str = ""  # who gave out a patient id that names no issuer itself
    attempts: int = 3  # how often one refused file is read before only a person can have it tried again
    workers: int = 0  # processes that read files; 0: one for each processor
    look_seconds: float = 5.0  # `serve`: how often the first room and watched folders are looked at
    pull: tuple[str, ...] = ()  # archives that `serve` asks by the clock
    pull_minutes: float = 60.0  # how often
    pull_days: int = 30  # for the studies of so many days, where an archive's own query says no date

    def __post_init__(self) -> None:
        """Positive numbers."""
        if not (self.attempts >= 1 and self.workers >= 0 and self.pull_days >= 1):
            raise ValueError("attempts and pull_days must be positive, workers not negative")
        if not (0 < self.look_seconds <= 3600 and 0 < self.pull_minutes <= 1_000_000):
            raise ValueError("look_seconds and pull_minutes must be positive")


@dataclass(frozen=True, slots=True)
class Ingestion:
    """Everything about the way in, checked."""

    rules: Rules
    reading: Reading = field(default_factory=Reading)
    profile: Profile = field(default_factory=Profile)
    ocr: OcrSettings | None = None  # None: no alarm
    listener: ListenerSettings | None = None  # None: nothing listens for C-STORE
    stow: StowSettings | None = None  # None: nothing listens for STOW-RS
    pacs: Mapping[str, Remote] = field(default_factory=dict)
    webs: Mapping[str, Web] = field(default_factory=dict)
    folders: tuple[Folder, ...] = ()


@dataclass(frozen=True, slots=True)
class _FolderTable:
    """``[[folder]]`` as it is written."""

    path: Path
    watch: bool = False
    settle_seconds: float = 10.0
    patient_key: str = ""
    label_key: str = ""
    issuer: str = ""
    data_list: str = ""

    def folder(self) -> Folder:
        columns = Columns(self.patient_key, self.label_key, self.issuer, self.data_list)
        return Folder(self.path, columns, self.watch, self.settle_seconds)


def read_ingestion(home: Home) -> Ingestion:
    """``ingest.toml`` of a site, or the defaults when there is none.

    Raises:
        BadSite: not TOML, or with missing, unknown or senseless keys; all problems at once.
    """
    try:
        text = (home.root / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError):
        raise BadSite(f"{FILE} cannot be read as UTF-8") from None
    return parse_ingestion(home.root, home.settings(), text)


def parse_ingestion(root: Path, settings: Settings, text: str) -> Ingestion:
    """Parse ``ingest.toml``.

    Args:
        root: the site's directory, which paths are relative to.
        settings: ``site.toml``, for the modalities.
        text: the TOML document.
    Raises:
        BadSite: all problems at once.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadSite(f"{FILE}: not TOML: {error}") from None
    tables = _Tables(raw, _converter(root))
    tables.problems += [f"unknown table: {name}" for name in raw if name not in _TABLES]
    found = tables.ingestion(settings)
    if tables.problems or found is None:
        raise BadSite(f"{FILE}: " + "; ".join(tables.problems))
    return found


@dataclass(slots=True)
class _Tables:
    """The document, and what is wrong with it so far."""

    raw: dict[str, Any]
    converter: cattrs.Converter
    problems: list[str] = field(default_factory=list)

    def ingestion(self, settings: Settings) -> Ingestion | None:
        rules = self.raw.get("rules", {})
        if not isinstance(rules, dict):
            self.problems.append("rules: must be a table")
            return None
        self.problems += [f"rules.{key}: is set in site.toml" for key in (*_OF_SITE, "blanks") if key in rules]
        blanks = self.several("blank", Blank)
        # the converter makes a Rules of its own, so that a rule that is missing keeps its default
        made = self.made({**rules, "modalities": sorted(settings.modalities)}, Rules, "rules")
        folders = self.several("folder", _FolderTable)
        reading, profile = self.table("site", Reading) or Reading(), self.table("deidentify", Profile) or Profile()
        ocr = self.table("ocr", OcrSettings)
        listener, stow = self.table("listener", ListenerSettings), self.table("stow", StowSettings)
        pacs, webs = self.named("pacs", Remote), self.named("dicomweb", Web)
        self.problems += [f"site.pull: no archive is called {n}" for n in reading.pull if n not in {**pacs, **webs}]
        if self.problems or made is None:
            return None
        whole = replace(made, secondary_capture_modalities=settings.secondary_capture_modalities, blanks=blanks)
        roads = (listener, stow, pacs, webs, tuple(f.folder() for f in folders))
        return Ingestion(whole, reading, profile, ocr, *roads)

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


def _converter(root: Path) -> cattrs.Converter:
    """One that coerces nothing, and takes paths as relative to the site's directory."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (bool, int, str, float):
        converter.register_structure_hook(kind, _plain(kind))
    converter.register_structure_hook(dt.date, _day)
    converter.register_structure_hook(Path, lambda value, _: root / _plain(str)(value, str))
    converter.register_structure_hook_func(
        lambda kind: get_origin(kind) in _LISTS, lambda value, kind: _listed(converter, value, kind)
    )
    return converter


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
