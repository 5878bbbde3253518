"""``privimage.toml``: public configuration of one PrivImage release, parsed once, all problems at once.

It does not depend on patients, so it can be priced as it is: the noise of the training is either given or calibrated
from epsilon and delta, which is a function of this file alone. The semantic query function is a file of ``train
semantics`` next to it; it is public if ``site.toml`` vouches for its SHA-256, and private otherwise (P6).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.mechanisms.common.config import CohortTable, Shelf, needed, no_device
from agent.mechanisms.common.dp_config import Prepared, PrivacyTable, PrivateFile, no_progress
from agent.mechanisms.common.generative_model import PublicImages
from agent.mechanisms.privimage.diffusion import DiffusionConfig
from agent.mechanisms.privimage.mechanism import PrivImage, Synthetic
from agent.mechanisms.privimage.semantic_query import SHARE, SemanticQuery
from agent.models.diffusion import edm as diffusion
from agent.models.image_folder import ImageFolderError, read_image_folder, read_labels
from agent.models.semantics.classifier import Semantics, semantics_from
from agent.toml_config import Tables, names_files
from policies.accounting.accountant import calibrate, tight_epsilon
from policies.accounting.rounding import epsilon_text, format_rounded_up

_VOUCH: Final = "if they show no patient, put their SHA-256 into site.toml's public_components"
_TABLES: Final = ("mechanism", "cohort", "classes", "privacy", "semantics", "public", "model", "synthetic", "pooled")


@dataclass(frozen=True, slots=True)
class SemanticsTable:
    """``[semantics]``: the query function, and its parameters."""

    file: str  # of `train semantics`
    keep: int  # k_2: semantics selected for each class
    noise: float  # standard deviation on every bin, in votes
    votes: int = 1  # k_1: semantics of one image
    images: int = 16  # of a patient, at most, are looked at; their votes are averaged
    share: float = SHARE  # of a class's patients that are taken to be in its largest bin

    def __post_init__(self) -> None:
        """Refuse what names no file, and a share of nobody."""
        names_files(file=self.file)
        if not 0.0 < self.share <= 1.0:
            raise ValueError("share: above 0, and at most 1: of a class's patients, in its largest bin")


@dataclass(frozen=True, slots=True)
class PublicTable:
    """``[public]``: nobody's patients."""

    pictures: str  # a folder, relative to the configuration
    labels: str = ""  # CSV: file,label; or "folders"; left out: what the query function says of each

    def __post_init__(self) -> None:
        """Refuse what names no folder, or no file."""
        names_files(pictures=self.pictures, labels=self.labels or "none")


@dataclass(frozen=True, slots=True)
class ModelTable:
    """``[model]``: what is trained. Every other key is of the model's own configuration."""

    kind: str = "diffusion"  # the only one
    preset: str = "small32"  # size of the model
    pretraining_steps: int = 4000  # on the public images
    colour: bool = False  # RGB instead of grey


def read_privimage(
    path: Path, vouched: frozenset[str], say: Callable[[str, str], None] = no_progress
) -> Prepared[PrivImage]:
    """Read a release's configuration, its query function and its public images.

    Args:
        path: of the TOML file.
        vouched: SHA-256 of the files that the site says are public.
        say: told what takes some time: a step, and a detail of it.
    Raises:
        SiteConfigError: not TOML, or with missing, unknown or senseless keys, all at once; or a query that its noise
        drowns. WeightsError, ImageFolderError: what it names cannot be read.
    """
    file = PrivateFile.of(path, _TABLES, PrivImage.name)
    parsed = _parsed(file)
    with file.in_words(vouched) as shelf:
        return _prepared(shelf, parsed, say)


@dataclass(frozen=True, slots=True)
class _Parsed:
    """The tables, each sound by itself."""

    classes: tuple[str, ...]
    pooled: str
    cohort: CohortTable
    privacy: PrivacyTable
    semantics: SemanticsTable
    public: PublicTable
    model: ModelTable
    config: DiffusionConfig
    synthetic: Synthetic


def _parsed(file: PrivateFile) -> _Parsed:
    """Every table of the file.

    Raises:
        SiteConfigError: all that is wrong with them, at once.
    """
    tables = file.tables
    model, rest = _model_table(tables)
    cohort = needed(tables, "cohort", CohortTable)
    privacy = needed(tables, "privacy", PrivacyTable)
    semantics = needed(tables, "semantics", SemanticsTable)
    public = needed(tables, "public", PublicTable)
    classes, pooled = _classes(tables)
    file.labels(cohort, classes, "classes")
    file.drawn((pooled,) if pooled else classes, "pooled" if pooled else "classes")
    if privacy:
        file.public(privacy.delta, privacy.public_patients)
    synthetic = tables.table("synthetic", Synthetic) or Synthetic()
    config = _config(tables, model, rest, 1 if pooled else max(1, len(classes))) if model else None
    file.refuse()
    assert cohort
    assert privacy
    assert semantics
    assert public
    assert model
    assert config
    return _Parsed(classes, pooled, cohort, privacy, semantics, public, model, config, synthetic)


def _prepared(shelf: Shelf, of: _Parsed, say: Callable[[str, str], None]) -> Prepared[PrivImage]:
    """What the files beside the tables make of them."""
    query = SemanticQuery(of.semantics.votes, of.semantics.noise, of.semantics.keep, of.semantics.images)
    noise, told = _noise(of.privacy, query, say)
    raw = shelf.file(of.semantics.file)
    semantics = semantics_from(raw, shelf.believed(raw))
    public = _public(shelf, of.public, of.config, semantics)
    mechanism = PrivImage(
        classes=of.classes,
        model=of.config,
        semantics=semantics,
        query=query,
        public=public,
        pretraining_steps=of.model.pretraining_steps,
        sgd=of.privacy.job(noise),
        public_patients=of.privacy.public_patients,
        share=of.semantics.share,
        synthetic=of.synthetic,
        pooled=of.pooled,
    )
    if public.component != "public":
        told = (*told, f"the public images are not yet vouched for: {_VOUCH}", public.sha256)
    selection = replace(of.cohort, labels=frozenset(of.classes)).selection(mechanism.shape)
    return Prepared(mechanism, selection, told)


def _classes(tables: Tables) -> tuple[tuple[str, ...], str]:
    """The labels that count, and the one class that they make, if they do."""
    pooled = tables.raw.get("pooled", "")
    if not isinstance(pooled, str):
        tables.problems.append("pooled: the name of the one class that all of classes make")
        pooled = ""
    found = tables.raw.get("classes")
    if not (isinstance(found, list) and found and all(isinstance(c, str) and c for c in found)):
        tables.problems.append('classes: the labels to draw, as a list: classes = ["0", "1"]')
        return (), pooled
    if len(set(found)) != len(found):
        tables.problems.append("classes: a label is listed twice")
    return tuple(found), pooled


_OWN: Final = ("kind", "preset", "pretraining_steps", "colour")


def _model_table(tables: Tables) -> tuple[ModelTable | None, dict[str, Any]]:
    """The table's own keys, and those that the model's configuration takes."""
    raw = tables.raw.get("model", {})
    if not isinstance(raw, dict):
        tables.problems.append("model: must be a table")
        return None, {}
    own = {key: value for key, value in raw.items() if key in _OWN}
    table = tables.made(own, ModelTable, "model")
    if table is not None and table.kind != "diffusion":  # the paper's GAN: deploy.reproduction.conditional_gan
        tables.problems.append('model.kind: "diffusion"')
        return None, {}
    return table, {key: value for key, value in raw.items() if key not in _OWN}


def _config(tables: Tables, table: ModelTable, rest: dict[str, Any], classes: int) -> DiffusionConfig | None:
    """The preset's architecture, for these classes, in what else the table says of the model."""
    if table.preset not in diffusion.PRESETS:
        tables.problems.append(f"model.preset: one of {', '.join(diffusion.PRESETS)}")
        return None
    if "architecture" in rest:
        tables.problems.append("model.architecture: is named by preset")
        return None
    fitted = replace(diffusion.PRESETS[table.preset], channels=3 if table.colour else 1, classes=classes)
    plain = json.loads(json.dumps(asdict(fitted)))  # tuples as lists, as in TOML
    made = tables.made({"seed": 0, **rest, "architecture": plain}, DiffusionConfig, "model")
    if made is not None and (told := no_device(made.device)):
        tables.problems.append(f"model.{told}")  # now, and not once a price is held
    return made


def _noise(
    privacy: PrivacyTable, query: SemanticQuery, say: Callable[[str, str], None]
) -> tuple[float, tuple[str, ...]]:
    """The noise multiplier, written down or calibrated; and what both queries come to.

    Raises:
        NoiseNotFoundError, ValueError: there is none for this epsilon; the text says what to change.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier, ()
    assert privacy.epsilon is not None
    assert privacy.delta is not None
    claim = query.claim()
    alone = tight_epsilon([claim], privacy.delta)
    if 0.0 < privacy.epsilon < alone:
        told = f"the histogram alone takes epsilon {epsilon_text(alone)} of {epsilon_text(privacy.epsilon)}"
        raise ValueError(f"{told}: a larger [semantics] noise, or a larger [privacy] epsilon")
    asked = f"epsilon {epsilon_text(privacy.epsilon)} at delta {format_rounded_up(privacy.delta)}"
    say("price", f"finding the noise for {asked}")
    job = calibrate(privacy.epsilon, privacy.delta, privacy.sampling_rate, privacy.steps, also=(claim,))
    return job.noise_multiplier, (
        f"noise multiplier {job.noise_multiplier:g} for {asked} (loss distributions); "
        f"the histogram alone {epsilon_text(alone)}",
    )


def _public(shelf: Shelf, table: PublicTable, config: DiffusionConfig, semantics: Semantics) -> PublicImages:
    """The public images, each with its semantic: as it is labelled, or as the query function sees it."""
    side, grey = config.architecture.side, config.architecture.channels == 1
    images, names = read_image_folder(shelf.folder / table.pictures, side, grey)
    if not table.labels:
        return PublicImages(images, semantics.most_probable(images), shelf.vouched)
    where = shelf.folder / table.labels if table.labels != "folders" else None
    places, labels = read_labels(where, names)
    unknown = sorted(set(labels) - set(semantics.bins))
    if unknown:
        told = "use the labels that it was trained on, or remove their images from the list"
        raise ImageFolderError(
            f"public.labels: {len(unknown)} label(s) are no semantics of the query function: {told}"
        )
    number = {name: index for index, name in enumerate(semantics.bins)}
    return PublicImages(images[places], np.array([number[label] for label in labels], np.int64), shelf.vouched)
