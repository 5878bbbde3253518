"""``ingest.toml``: what may come in, by which roads, how it is de-identified. Parsed once, all problems at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from agent.defacing.config import FacesSettings
from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.pixel_redaction import Blank
from agent.deidentify.ps315.options import Profile
from agent.deidentify.segment_list import Segment
from agent.domain import ExampleRule
from agent.errors import SiteConfigError
from agent.ingest.folders import Folder
from agent.ingest.nifti_pairs import MaskNames
from agent.ingest.ocr import OcrSettings
from agent.ingest.patient_lists import Columns
from agent.pacs.archive import ArchiveConfig
from agent.pacs.dicomweb.config import DicomWebArchive
from agent.pacs.dicomweb.stow_process import StowSettings
from agent.pacs.dimse.config import ListenerSettings
from agent.storage.site_directory import SiteDirectory, SiteSettings
from agent.toml_config import Tables, converter

FILE: Final = "ingest.toml"
_TABLES: Final = (
    "site",
    "rules",
    "blank",
    "segment",
    "deidentify",
    "ocr",
    "listener",
    "stow",
    "pacs",
    "dicomweb",
    "folder",
    "faces",
    "nifti",
)
_OF_SITE: Final = ("modalities", "secondary_capture_modalities")  # these stand in site.toml


@dataclass(frozen=True, slots=True)
class Reading:
    """How ingest works: the table ``[site]``."""

    issuer: str = ""  # who gave out a patient id that names no issuer itself
    attempts: int = 3  # how often one refused file is read before only a person can have it tried again
    workers: int = 0  # processes that read files; 0: one for each processor
    look_seconds: float = 5.0  # `serve`: how often the spool and watched folders are looked at
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
    """Everything about ingest, checked."""

    rules: AdmissionRules
    reading: Reading = field(default_factory=Reading)
    profile: Profile = field(default_factory=Profile)
    ocr: OcrSettings | None = None  # None: no alert
    listener: ListenerSettings | None = None  # None: nothing listens for C-STORE
    stow: StowSettings | None = None  # None: nothing listens for STOW-RS
    pacs: Mapping[str, ArchiveConfig] = field(default_factory=dict)
    webs: Mapping[str, DicomWebArchive] = field(default_factory=dict)
    folders: tuple[Folder, ...] = ()
    faces: FacesSettings | None = None  # None: what may show a face stays withheld
    mask_names: MaskNames | None = None  # None: a NIfTI mask is known by a BIDS name or a MONAI list alone

    def rule_here(self, rule: ExampleRule) -> ExampleRule:
        """A task's rule as this site has it: a series waits until it has so many instances.

        Rounds, ``cohort`` and ``task preview`` all take it from here, so that they choose the same patients.
        """
        return replace(rule, min_instances=self.rules.min_instances_per_series)


@dataclass(frozen=True, slots=True)
class _FolderTable:
    """``[[folder]]`` as it is written."""

    path: Path  # folder to read, relative to the site's directory
    watch: bool = False  # `serve` looks for new files
    settle_seconds: float = 10.0  # a file must not have changed for so long
    patient_key: str = ""  # BIDS: a column of participants.tsv; MONAI: a key of every entry
    label_key: str = ""  # the same for the label; "" when there is none
    issuer: str = ""  # who gave out these patient ids; "" for the site's own
    data_list: str = ""  # path of a MONAI data list below the folder; "" when there is none
    mask_key: str = ""  # MONAI: the key of every entry that names the mask of its image; "" when there is none

    def folder(self) -> Folder:
        columns = Columns(self.patient_key, self.label_key, self.issuer, self.data_list, self.mask_key)
        return Folder(self.path, columns, self.watch, self.settle_seconds)


def read_ingestion(home: SiteDirectory) -> Ingestion:
    """``ingest.toml`` of a site, or the defaults when there is none.

    Raises:
        SiteConfigError: not TOML, or with missing, unknown or senseless keys; all problems at once.
    """
    try:
        text = (home.root / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError):
        raise SiteConfigError(f"{FILE} is not UTF-8 text") from None
    return parse_ingestion(home.root, home.settings(), text)


def parse_ingestion(root: Path, settings: SiteSettings, text: str) -> Ingestion:
    """Parse ``ingest.toml``.

    Args:
        root: the site's directory, which paths are relative to.
        settings: ``site.toml``, for the modalities.
        text: the TOML document.
    Raises:
        SiteConfigError: all problems at once.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SiteConfigError(f"{FILE}: not TOML: {error}") from None
    tables = Tables(raw, converter(root))
    tables.problems += [f"unknown table: {name}" for name in raw if name not in _TABLES]
    found = _ingestion(tables, settings)
    if tables.problems or found is None:
        raise SiteConfigError(f"{FILE}: " + "; ".join(tables.problems))
    return found


def _ingestion(tables: Tables, settings: SiteSettings) -> Ingestion | None:
    rules = tables.raw.get("rules", {})
    if not isinstance(rules, dict):
        tables.problems.append("rules: must be a table")
        return None
    tables.problems += [f"rules.{key}: is set in site.toml" for key in _OF_SITE if key in rules]
    tables.problems += [
        f"rules.{key}: written as [[{key.removesuffix('s')}]]" for key in ("blanks", "segments") if key in rules
    ]
    blanks, segments = tables.several("blank", Blank), tables.several("segment", Segment)
    # the converter makes a Rules of its own, so that a rule that is missing keeps its default
    made = tables.made({**rules, "modalities": sorted(settings.modalities)}, AdmissionRules, "rules")
    folders = tables.several("folder", _FolderTable)
    reading, profile = tables.table("site", Reading) or Reading(), tables.table("deidentify", Profile) or Profile()
    ocr = tables.table("ocr", OcrSettings)
    listener, stow = tables.table("listener", ListenerSettings), tables.table("stow", StowSettings)
    pacs, webs = tables.named("pacs", ArchiveConfig), tables.named("dicomweb", DicomWebArchive)
    faces, mask_names = tables.table("faces", FacesSettings), tables.table("nifti", MaskNames)
    if faces is not None and not faces.safe:
        told = "remodel (surface) or strip: after the other methods people were still recognised (faces.md)"
        tables.problems.append(f"faces.method: {told}")
    tables.problems += [f"site.pull: no archive is called {n}" for n in reading.pull if n not in {**pacs, **webs}]
    if tables.problems or made is None:
        return None
    whole = replace(made, secondary_capture_modalities=settings.secondary_capture_modalities, blanks=blanks)
    try:
        whole = replace(whole, segments=segments)
    except ValueError as error:
        tables.problems.append(f"segment: {error}")
        return None
    roads = (listener, stow, pacs, webs, tuple(f.folder() for f in folders))
    return Ingestion(whole, reading, profile, ocr, *roads, faces, mask_names)
