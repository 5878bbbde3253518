"""``distill.toml``: public configuration of one distillation, parsed once, all problems at once.

It does not depend on patients, so it can be priced as it is. The four networks are files next to it, each pinned by
its SHA-256, so the network that judges re-identification cannot be exchanged unnoticed. The site decides whether a
file is public (``site.toml``), not the file (P6). For ``distill-dp`` the noise is given or follows from epsilon and
delta.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from agent.mechanisms.common.config import CohortTable, Shelf, document, needed, no_device
from agent.mechanisms.common.dp_config import Prepared, PrivacyTable, PrivateFile, no_progress
from agent.mechanisms.common.generative_model import PublicImages
from agent.mechanisms.distillation.latent_model import LatentConfig
from agent.mechanisms.distillation.mechanism import Distill, DistillDp
from agent.mechanisms.distillation.teacher_student import Course, Output, Sampling
from agent.models.diffusion.aligner import Aligner, OtherConditionsError, aligner_from
from agent.models.diffusion.autoencoder import Autoencoder, autoencoder_from
from agent.models.diffusion.latent import PRESETS
from agent.models.diffusion.prompts import TEMPLATES, Conditions
from agent.models.image_folder import ImageFolderError, read_image_folder, read_labels
from agent.models.recognition.verifier import Verifier, verifier_from
from agent.toml_config import Tables, names_files
from agent.vetting.config import VOUCH, VettingTable, demand_digest, refuse_others
from agent.vetting.reference import Vetting
from policies.accounting.accountant import calibrate
from policies.accounting.rounding import epsilon_text, format_rounded_up

FOLDERS: Final = "folders"  # in the place of a list: an image's folder names its condition
_BOTH: Final = ("mechanism", "conditions", "templates", "cohort", "networks", "teacher", "student")
_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    Distill.name: (*_BOTH, "vetting", "sampling", "output"),
    DistillDp.name: (*_BOTH, "vetting", "sampling", "output", "privacy", "public"),
}


@dataclass(frozen=True, slots=True)
class NetworksTable:
    """``[networks]``: files, relative to the configuration, and what each must be."""

    autoencoder: str  # of `train autoencoder`
    autoencoder_sha256: str  # of that file, as `train` printed it
    verifier: str  # of `train verifier`: the one that chooses
    verifier_sha256: str  # of that file
    unseen: str  # of `train verifier --second`: the one that measures, and chooses nothing
    unseen_sha256: str  # of that file
    aligner: str  # of `train aligner`
    aligner_sha256: str  # of that file

    def __post_init__(self) -> None:
        """Refuse what names no file or no digest, and one file as two opinions."""
        for key in PARTS:
            names_files(**{key: getattr(self, key)})
            demand_digest(key, self.pinned(key), _TRAINED[key])
        if self.verifier_sha256 == self.unseen_sha256:
            raise ValueError(
                "verifier and unseen are the same file: the verifier that measures must not be the one that chose"
            )

    def pinned(self, part: str) -> str:
        """The digest that a file must have."""
        return str(getattr(self, f"{part}_sha256"))


PARTS: Final = ("autoencoder", "verifier", "unseen", "aligner")
_TRAINED: Final = {**{part: part for part in PARTS}, "unseen": "verifier --second"}


_NO_PRESET: Final = f"preset: one of {', '.join(PRESETS)}"


@dataclass(frozen=True, slots=True)
class TeacherTable:
    """``[teacher]``: what is trained. Every other key is of the model's own configuration, the student's too."""

    steps: int  # on the patients; of ``distill-dp`` on the public images: [privacy] counts the noisy ones
    preset: str = "tiny"  # size of the model

    def __post_init__(self) -> None:
        """Refuse what is no training, and no size."""
        if not self.steps >= 1:
            raise ValueError("steps: at least 1")
        if self.preset not in PRESETS:
            raise ValueError(_NO_PRESET)


@dataclass(frozen=True, slots=True)
class StudentTable:
    """``[student]``: how long it learns what was kept."""

    steps: int  # of the student's training

    def __post_init__(self) -> None:
        """Refuse what learns nothing."""
        if not self.steps >= 1:
            raise ValueError("steps: at least 1")


@dataclass(frozen=True, slots=True)
class PublicTable:
    """``[public]``: public images, learned before the patients, and compared with the samples."""

    pictures: str  # a folder, relative to the configuration
    labels: str  # CSV: file,label; or "folders". An image that is not listed shows no condition

    def __post_init__(self) -> None:
        """Refuse what names no folder, or no file."""
        names_files(pictures=self.pictures, labels=self.labels)


@dataclass(frozen=True, slots=True)
class _Parsed:
    """The tables, each sound by itself."""

    conditions: Conditions
    cohort: CohortTable
    networks: NetworksTable
    teacher: TeacherTable
    config: LatentConfig
    student: StudentTable
    vetting: VettingTable
    sampling: Sampling
    output: Output
    privacy: PrivacyTable | None  # of ``distill-dp``, like the next
    public: PublicTable | None


def read_distill(
    path: Path, vouched: frozenset[str], say: Callable[[str, str], None] = no_progress, name: str = ""
) -> Prepared[Distill | DistillDp]:
    """Read a distillation's configuration, its networks and its public images.

    Args:
        path: of the TOML file.
        vouched: SHA-256 of the files that the site says are public.
        say: told what takes some time: a step, and a detail of it.
        name: of the mechanism that was asked for, which the file must be of; "": whichever of the two it is of.
    Raises:
        SiteConfigError: not TOML, or with missing, unknown or senseless keys, all at once; or a network knows too
        little. WeightsError, ImageFolderError: what it names cannot be read, or is not the file that was pinned.
    """
    asked = name or str(document(path, ()).raw.get("mechanism"))
    asked = asked if asked in _TABLES else Distill.name
    file = PrivateFile.of(path, _TABLES[asked], asked)
    parsed = _parsed(file, asked)
    with file.in_words(vouched) as shelf:
        return _prepared(shelf, parsed, say)


def _parsed(file: PrivateFile, name: str) -> _Parsed:
    """Every table of the file.

    Raises:
        SiteConfigError: all that is wrong with them, at once.
    """
    tables, private = file.tables, name == DistillDp.name
    conditions = _conditions(tables)
    cohort = needed(tables, "cohort", CohortTable)
    networks = needed(tables, "networks", NetworksTable)
    teacher, config = _teacher(tables)
    student = needed(tables, "student", StudentTable)
    vetting = tables.table("vetting", VettingTable) if "vetting" in tables.raw else VettingTable()
    sampling = tables.table("sampling", Sampling) if "sampling" in tables.raw else Sampling()
    output = tables.table("output", Output) if "output" in tables.raw else Output()
    privacy = needed(tables, "privacy", PrivacyTable) if private else None
    public = needed(tables, "public", PublicTable) if private else None
    if conditions:
        file.labels(cohort, conditions.names, "conditions")
        file.drawn(conditions.names, "conditions")
    if privacy:
        file.public(privacy.delta, privacy.public_patients)
    file.refuse()
    assert conditions
    assert cohort
    assert networks
    assert teacher
    assert config
    assert student
    assert vetting
    assert sampling
    assert output
    return _Parsed(conditions, cohort, networks, teacher, config, student, vetting, sampling, output, privacy, public)


def _conditions(tables: Tables) -> Conditions | None:
    """The labels that count, in the words of the templates."""
    names = _texts(tables, "conditions", [])
    templates = _texts(tables, "templates", list(TEMPLATES))
    if names is None or templates is None:
        return None
    try:
        return Conditions(names, templates)
    except ValueError as error:
        tables.problems.append(f"conditions: {error}")
        return None


def _texts(tables: Tables, key: str, left_out: list[str]) -> tuple[str, ...] | None:
    found = tables.raw.get(key, left_out)
    if isinstance(found, list) and found and all(isinstance(one, str) and one for one in found):
        return tuple(found)
    example = 'conditions = ["none", "edema"]' if key == "conditions" else 'templates = ["chest radiograph with {}"]'
    tables.problems.append(f"{key}: a list of texts: {example}")
    return None


_OWN: Final = ("steps", "preset")
_STAND_IN: Final = "tiny"  # for a preset that there is not: a configuration with problems is never used


def _teacher(tables: Tables) -> tuple[TeacherTable | None, LatentConfig | None]:
    """The table's own keys, and what else it says of the model; its latents follow from the autoencoder's file."""
    if "teacher" not in tables.raw:
        tables.problems.append("teacher: missing")
        return None, None
    raw = tables.raw["teacher"]
    if not isinstance(raw, dict):
        tables.problems.append("teacher: must be a table")
        return None, None
    own = {key: value for key, value in raw.items() if key in _OWN}
    preset = own.get("preset", _STAND_IN)
    if isinstance(preset, str) and preset not in PRESETS:
        tables.problems.append(f"teacher: {_NO_PRESET}")
        own["preset"] = _STAND_IN
    table = tables.made(own, TeacherTable, "teacher")
    rest = {key: value for key, value in raw.items() if key not in _OWN}
    if rest.pop("architecture", None) is not None:
        tables.problems.append("teacher.architecture: is named by preset")
    known = PRESETS[table.preset if table else _STAND_IN]  # the rest is looked at, whatever is wrong with these two
    plain = json.loads(json.dumps(asdict(known)))  # tuples as lists, as in TOML
    config = tables.made({"seed": 0, **rest, "architecture": plain}, LatentConfig, "teacher")
    if config is not None and (told := no_device(config.device)):
        tables.problems.append(f"teacher.{told}")  # now, and not once a price is held
    return table, config


@dataclass(frozen=True, slots=True, eq=False)
class _Networks:
    """The four files, read."""

    autoencoder: Autoencoder
    verifier: Verifier
    unseen: Verifier
    aligner: Aligner


def _prepared(shelf: Shelf, of: _Parsed, say: Callable[[str, str], None]) -> Prepared[Distill | DistillDp]:
    """What the files beside the tables make of them."""
    nets = _networks(shelf, of.networks, of.conditions)
    model = replace(of.config, architecture=of.config.architecture.fitted(nets.autoencoder, of.conditions))
    course = Course(
        conditions=of.conditions,
        model=model,
        autoencoder=nets.autoencoder,
        vetting=Vetting(nets.verifier, nets.unseen, of.vetting.top, of.vetting.false_matches, model.device),
        aligner=nets.aligner,
        student_steps=of.student.steps,
        sampling=of.sampling,
        output=of.output,
    )
    told = _unvouched(of.networks, nets)
    mechanism: Distill | DistillDp
    if of.privacy is None or of.public is None:
        mechanism = Distill(course, of.teacher.steps)
    else:
        noise, price = _noise(of.privacy, say)
        public, more = _public(shelf, of.public, course)
        told = (*price, *told, *more)
        sgd, patients = of.privacy.job(noise), of.privacy.public_patients
        mechanism = DistillDp(course, public, of.teacher.steps, sgd, patients)
    selection = replace(of.cohort, labels=frozenset(of.conditions.names)).selection(mechanism.shape)
    return Prepared(mechanism, selection, told)


def _networks(shelf: Shelf, table: NetworksTable, conditions: Conditions) -> _Networks:
    """The four networks, each the pinned one, and none that knows too little to be asked.

    Raises:
        WeightsError: a file cannot be read, or is another one than was pinned; all that are, at once.
        RecogniserError, AlignerError, ValueError: a network's own judgement forbids its use, or it learned other
        words.
    """
    raw = {part: shelf.file(getattr(table, part)) for part in PARTS}
    refuse_others(table, {part: hashlib.sha256(data).hexdigest() for part, data in raw.items()})
    autoencoder, verifier, unseen, aligner = raw.values()
    nets = _Networks(
        autoencoder_from(autoencoder, shelf.believed(autoencoder)),
        verifier_from(verifier, shelf.believed(verifier)),
        verifier_from(unseen, shelf.believed(unseen)),
        aligner_from(aligner, shelf.believed(aligner)),
    )
    nets.verifier.demand()
    nets.unseen.demand()
    try:
        nets.aligner.fits(conditions)
    except OtherConditionsError:
        own = nets.aligner.conditions
        told = f"conditions = {json.dumps(own.names)}, templates = {json.dumps(own.templates)}"
        raise ValueError(f"the aligner learned other conditions, or in another order: {told}") from None
    nets.aligner.demand()
    return nets


def _unvouched(table: NetworksTable, nets: _Networks) -> tuple[str, ...]:
    """For people: the files that count as private, since nobody vouches for them."""
    gone = [getattr(table, part) for part in PARTS if getattr(nets, part).origin.component != "public"]
    return (f"not yet vouched for: {', '.join(gone)}: {VOUCH}",) if gone else ()


def _noise(privacy: PrivacyTable, say: Callable[[str, str], None]) -> tuple[float, tuple[str, ...]]:
    """The noise multiplier, written down or calibrated; and what it comes to.

    Raises:
        NoiseNotFoundError, ValueError: there is none for this epsilon; the text says what to change.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier, ()
    assert privacy.epsilon is not None
    assert privacy.delta is not None
    asked = f"epsilon {epsilon_text(privacy.epsilon)} at delta {format_rounded_up(privacy.delta)}"
    say("price", f"finding the noise for {asked}")
    job = calibrate(privacy.epsilon, privacy.delta, privacy.sampling_rate, privacy.steps)
    return job.noise_multiplier, (f"noise multiplier {job.noise_multiplier:g} for {asked} (loss distributions)",)


def _public(shelf: Shelf, table: PublicTable, course: Course) -> tuple[PublicImages, tuple[str, ...]]:
    """The public images, each with its condition or none; and what people should know of them."""
    side, grey, names = course.autoencoder.shape[0], len(course.autoencoder.shape) == 2, course.conditions.names
    images, files = read_image_folder(shelf.folder / table.pictures, side, grey)
    places, labels = read_labels(None if table.labels == FOLDERS else shelf.folder / table.labels, files)
    unknown = sorted(set(labels) - set(names))
    if unknown:
        told = "remove their images from the list: they are then learned without a condition"
        raise ImageFolderError(f"public.labels: {len(unknown)} label(s) are none of the conditions: {told}")
    bins = np.full(len(images), -1, np.int64)
    bins[places] = [names.index(label) for label in labels]
    public = PublicImages(images, bins, shelf.vouched)
    lines = []
    without = [name for number, name in enumerate(names) if not (bins == number).any()]
    if without:
        lines.append(f"no public image shows {', '.join(without)}: the teacher learns it from noisy steps only")
    if public.component != "public":
        lines += [f"the public images are not yet vouched for: {VOUCH}", public.sha256]
    return public, tuple(lines)
