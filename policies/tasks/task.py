"""The task file: what hospitals train together, as a declaration that is hashed, approved and never run.

A researcher writes TOML. It becomes a :class:`Task`, whose canonical JSON travels in a job's configuration and whose
SHA-256 names it in approvals, certificates and the model's card. Names stand for code that every site has installed;
there is no class path, no expression and no path of a file in it, only digests of public files. All that a task says
is public: nothing of it may be derived from patients, sizes and bounds included.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self

from policies.tasks.bounds import Bound, Number, PerAxis, TaskError, Whole, Word, as_table, plain, read_values, refuse
from policies.tasks.networks import NetworkSpec
from policies.tasks.transforms import TransformSpec, read_transforms
from protos.common.canonical_json import JsonValue, canonical, json_object

CLASSIFICATION: Final = "classification"  # one class of several for each example
MULTI_LABEL: Final = "multi-label"  # several findings, each there or not, or not known
REGRESSION: Final = "regression"  # numbers between public bounds
SEGMENTATION: Final = "segmentation"  # a class for each pixel or voxel
# The losses of each kind; the first is the default.
LOSSES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        CLASSIFICATION: ("cross-entropy",),
        MULTI_LABEL: ("binary-cross-entropy",),
        REGRESSION: ("squared-error", "absolute-error"),
        SEGMENTATION: ("dice-cross-entropy", "cross-entropy", "dice"),
    }
)
BFLOAT16: Final = "bfloat16"
FLOAT32: Final = "float32"
WRITE_A_TASK: Final = (
    "classes, shape and centre are no configuration any more: write a task file (deploy/docs/rounds.md), "
    "check it with `lazaret-agent task check FILE`, and name it in the job's config as task"
)
# How far parameters go from their start, L2. Of a linear layer on written letters, 3 x 500 patients: within 0.02 of
# the best accuracy at epsilon 8, 3 and 1. One that begins at public heads has less far to go: on as many made chests
# within 0.003 of the best AUC, where 24 loses 0.01 at epsilon 3. A whole network collapses at four times its right
# rate: a quarter, no more.
LINEAR_REACH: Final = 24.0
HEAD_REACH: Final = 8.0
NETWORK_REACH: Final = 6.0
MOST_OUTPUTS: Final = 1000
MOST_PARAMETERS: Final = 100_000_000  # that a task trains
MOST_PIXELS: Final = 1 << 24  # of one example, in each channel: 4096 x 4096, or 256 x 256 x 256
MOST_TEXT: Final = 1 << 18  # characters of a task file: its JSON fits a job's configuration
_BY_THE_VAULT: Final = ("Orientation", "Spacing")  # images are in one orientation and spacing before any transform
_NAME: Final = r"[a-z0-9][a-z0-9_-]{0,63}"
_LABEL: Final = r"[^\W_][\w .()/+-]{0,63}"
_CODE: Final = r"[A-Z][A-Z0-9_ ]{0,15}"  # a code string of DICOM
_PLAIN: Final = r"[\w .,;:()/+'&%-]"  # what a card may quote: no line end, no markup, no control character
_WHO: Final = "of at most 64 letters, digits, spaces and ._()/+-"


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a certain form."""

    pattern: str
    told: str
    default: str | None = None

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        return None if type(value) is str and re.fullmatch(self.pattern, value) else f"must be {self.told}"


@dataclass(frozen=True, slots=True)
class Several:
    """A list of such values, each once; none, if nothing else is said."""

    each: Text | Number
    most: int = MOST_OUTPUTS
    distinct: bool = True
    default: tuple[JsonValue, ...] = ()

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        if not isinstance(value, (list, tuple)) or not len(value) <= self.most:
            return f"must be a list of at most {self.most}"
        wrong = next((told for one in value if (told := self.each.problem(one))), None)
        if wrong is None and self.distinct and len(set(value)) != len(value):
            return "must hold each value once"
        return f"each {wrong}" if wrong else None


_FORMS: Final[Mapping[object, Callable[[Any], object]]] = {
    "float": float,
    "tuple[float, ...]": lambda value: tuple(map(float, value)),
    "tuple[int, ...]": tuple,
    "tuple[str, ...]": tuple,
}


class _Section:
    """A table of the file: every field has its bound, and is checked by it when it is built."""

    __slots__ = ()
    BOUNDS: ClassVar[Mapping[str, Bound]]

    def __post_init__(self) -> None:
        """Refuse values outside their bounds, all at once; 1 and 1.0 are one value, and a list is a tuple.

        Raises:
            TaskError: naming the keys.
        """
        problems = list[str]()
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.name in self.BOUNDS and (wrong := self.BOUNDS[f.name].problem(value)):
                problems.append(f"{f.name}: {wrong}")
            elif f.type in _FORMS:
                object.__setattr__(self, f.name, _FORMS[f.type](value))
        refuse(problems or list(self._between()))

    def _between(self) -> Iterator[str]:
        """What is wrong with values that are each within their bounds."""
        return iter(())

    @classmethod
    def from_table(cls, raw: Mapping[str, object], where: str, problems: list[str]) -> Self | None:
        """From a table of TOML or JSON; None where something is wrong with it, and that is among the problems."""
        before = len(problems)
        values: Any = read_values(raw, cls.BOUNDS, where, problems)
        if len(problems) > before:
            return None
        try:
            return cls(**values)
        except TaskError as error:
            problems += [f"{where}{problem}" for problem in error.problems]
            return None

    def to_table(self) -> dict[str, JsonValue]:
        """Every key, with defaults, in JSON's types."""
        return {f.name: _in_json(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Labels(_Section):
    """``[labels]``: what is learned, in the words of the hospitals' label tables."""

    table: str = ""  # name of the imported table; "": the label that each image came with (classification only)
    # of the table, in the order of the outputs; multi-label: binary ones, or a single one that holds several values
    columns: tuple[str, ...] = ()
    # classification: the values, in the order of the outputs. Segmentation: the segments, background not counted
    classes: tuple[str, ...] = ()
    # regression: public bounds of each column, in its unit; a target is cut there and scaled to [0, 1]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    BOUNDS: ClassVar[Mapping[str, Bound]] = {
        "table": Text(f"|{_NAME}", "a table's short lower-case name", ""),
        "columns": Several(Text(_LABEL, f"a name {_WHO}")),
        "classes": Several(Text(_LABEL, f"a name {_WHO}")),
        "low": Several(Number(-1e9, 1e9), distinct=False),
        "high": Several(Number(-1e9, 1e9), distinct=False),
    }


@dataclass(frozen=True, slots=True)
class Input(_Section):
    """``[input]``: which images, and how the network sees them."""

    modality: str  # DICOM Modality (0008,0060)
    size: tuple[int, ...]  # pixels (h, w), or voxels (k, h, w); their number says whether the task is in 2-D or 3-D
    body_part: str = ""  # DICOM Body Part Examined (0018,0015); "": any
    channels: int = 1  # 1: grey, 3: colour
    spacing: tuple[float, ...] = ()  # mm along each axis of size; (): images are fitted to the size as they are
    window: tuple[float, ...] = ()  # stored values (CT: Hounsfield units) that become 0 and 1; (): as ingested
    example: str = "image"  # "image": every image is an example; "study": all images of a study together are one
    transforms: tuple[TransformSpec, ...] = ()  # fixed ones, after size and window, in their order

    BOUNDS: ClassVar[Mapping[str, Bound]] = {
        "modality": Text(_CODE, "a modality's code, such as DX"),
        "size": PerAxis(Whole(8, 4096)),
        "body_part": Text(f"|{_CODE}", "a body part's code, such as CHEST", ""),
        "channels": Whole(1, 3, 1),
        "spacing": PerAxis(Number(1e-3, 100.0), (0, 2, 3), ()),
        "window": PerAxis(Number(-1e6, 1e6), (0, 2), ()),
        "example": Word(("image", "study"), "image"),
    }

    def _between(self) -> Iterator[str]:
        if not math.prod(self.size) <= MOST_PIXELS:
            yield f"size: at most {MOST_PIXELS} pixels in all"
        if self.channels == 2:
            yield "channels: must be 1 for grey or 3 for colour"
        if self.spacing and len(self.spacing) != len(self.size):
            yield "spacing: one number for each axis of size, or none"
        if self.window and not self.window[0] < self.window[1]:
            yield "window: the smaller number first"


@dataclass(frozen=True, slots=True)
class Loss(_Section):
    """``[loss]``: what an example's outputs cost. A patient's loss is the mean over its examples."""

    name: str = ""  # of LOSSES; "": the first one of the task's kind
    smoothing: float = 0.0  # cross-entropy: the share of a target that is spread over all classes
    weights: tuple[float, ...] = ()  # a public factor for each output; (): all 1

    BOUNDS: ClassVar[Mapping[str, Bound]] = {
        "name": Word(("", *sorted({name for names in LOSSES.values() for name in names})), ""),
        "smoothing": Number(0.0, 0.5, 0.0),
        "weights": Several(Number(1e-3, 1e3), distinct=False),
    }


@dataclass(frozen=True, slots=True)
class Training(_Section):
    """``[training]``: public constants of the private steps. Whatever is left out is the default recipe.

    Full batches, 60 steps, momentum, and a learning rate that falls as the noise grows, see :meth:`rate`.
    """

    public_patients: int  # a public bound on each site's patients, never a count; it divides every sum
    sampling_rate: float = 1.0  # q, the chance of each patient in each step
    rounds: int = 12
    steps_per_round: int = 5  # 1 where only sums are seen (federated-masked)
    clip: float = 1.0  # C, the L2 bound of one patient's gradient
    images_per_patient: int = 2  # examples of one patient in one step; their mean is clipped once
    augmentation: tuple[TransformSpec, ...] = ()  # random ones
    views: int = 1  # drawn of each example by the augmentation, and averaged (De et al. 2022, section 3.2)
    learning_rate: float = 0.0  # of each step; 0.0: by :meth:`rate`
    reach: float = 0.0  # L2, how far from their start the parameters may have to go; 0.0: by the network
    momentum: float = 0.9  # of noisy steps (Polyak 1964), anew in each round
    ema: float = 0.0  # decay of a moving average over a round's parameters, which then leaves; 0.0: the last ones
    proximal: float = 0.0  # mu of FedProx
    head: str = "shared"  # "own": each site has a head of its own, which takes the same clipped, noised steps
    # of the network's passes: "bfloat16" by autocast; gradients, their clipping and the sum are of 32 bits
    precision: str = FLOAT32

    BOUNDS: ClassVar[Mapping[str, Bound]] = {
        "public_patients": Whole(1, 10_000_000),
        "sampling_rate": Number(1e-6, 1.0, 1.0),
        "rounds": Whole(1, 1000, 12),
        "steps_per_round": Whole(1, 10_000, 5),  # a job must not hold a site for hours
        "clip": Number(1e-6, 1e3, 1.0),
        "images_per_patient": Whole(1, 1000, 2),
        "views": Whole(1, 64, 1),
        "learning_rate": Number(0.0, 1e6, 0.0),
        "reach": Number(0.0, 1e6, 0.0),
        "momentum": Number(0.0, 0.99, 0.9),
        "ema": Number(0.0, 0.999, 0.0),
        "proximal": Number(0.0, 1e6, 0.0),
        "head": Word(("shared", "own"), "shared"),
        "precision": Word((FLOAT32, BFLOAT16), FLOAT32),
    }

    @property
    def expected_batch(self) -> float:
        """B, the divisor of every sum."""
        return self.sampling_rate * self.public_patients

    def rate(self, parameters: int, noise_multiplier: float, reach: float) -> float:
        """The learning rate of one step: the one that is written, or the best for a convex loss under this noise.

        Shalev-Shwartz & Ben-David 2014, theorem 14.8: of T steps on gradients with second moment rho^2 the rate
        reach / (rho sqrt T) comes nearest to the best point within ``reach``. Here rho^2 = C^2 (1 + p (sigma / B)^2):
        a clipped gradient, and noise in each of p parameters. The k-th step of a round with momentum m goes
        (1 - m^k) / (1 - m) times as far as a plain one; the rate is less by the mean of that over the round. So it
        falls with epsilon, and the more parameters there are the sooner.

        Args:
            parameters: p, those that are trained.
            noise_multiplier: sigma of a step at one site, in units of the clip.
            reach: in the place of one that is not written.
        """
        if self.learning_rate > 0.0:
            return self.learning_rate
        rho = self.clip * math.sqrt(1.0 + parameters * (noise_multiplier / self.expected_batch) ** 2)
        m, k = self.momentum, self.steps_per_round
        farther = (1.0 - m * (1.0 - m**k) / (k * (1.0 - m))) / (1.0 - m)  # the sum of the series over its k terms
        return (self.reach or reach) / (rho * math.sqrt(self.rounds * k) * farther)


@dataclass(frozen=True, slots=True)
class Card(_Section):
    """``[card]``: what the card of the trained model says for whoever gets it. It is approved with the task."""

    licence: str = ""  # under which the model may be used
    intended_use: str = ""  # for what, and by whom

    BOUNDS: ClassVar[Mapping[str, Bound]] = {
        "licence": Text(f"{_PLAIN}{{0,100}}", "a line of at most 100 letters, digits, spaces and .,;:()/+'&%-", ""),
        "intended_use": Text(
            f"{_PLAIN}{{0,600}}", "a line of at most 600 letters, digits, spaces and .,;:()/+'&%-", ""
        ),
    }


@dataclass(frozen=True, slots=True)
class Task:
    """A whole task: public, and the same at every site and at the coordinator.

    Raises:
        TaskError: with every problem, by section and key.
    """

    name: str
    kind: str  # one of LOSSES
    labels: Labels
    input: Input
    loss: Loss
    training: Training
    network: NetworkSpec
    seed: int = 0  # of a start that no public file gives
    card: Card = Card()

    def __post_init__(self) -> None:
        """Name the loss, and refuse sections that do not fit each other."""
        problems = [
            f"task.{key}: {wrong}" for key, bound in _HEAD.items() if (wrong := bound.problem(getattr(self, key)))
        ]
        refuse(problems)
        if not self.loss.name:
            object.__setattr__(self, "loss", replace(self.loss, name=LOSSES[self.kind][0]))
        refuse(list(self._between()))

    @property
    def outputs(self) -> int:
        """How many numbers the network gives for an example, or for each of its pixels."""
        if self.kind == SEGMENTATION:
            return len(self.labels.classes) + 1  # the first is the background
        return len(self.labels.classes) or len(self.labels.columns)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: the task's name in approvals."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def rate(self, parameters: int, noise_multiplier: float) -> float:
        """The learning rate of one step; see :meth:`Training.rate`."""
        linear = self.network.name == "linear" or self.network.trained == "head"
        begun = HEAD_REACH if self.network.options.get("head") else LINEAR_REACH
        return self.training.rate(parameters, noise_multiplier, begun if linear else NETWORK_REACH)

    def to_table(self) -> dict[str, JsonValue]:
        """The file's tables, with every default, in JSON's types; a card that says nothing is left out."""
        named = [name for name in (*_SECTIONS, "network") if name != "card" or self.card != Card()]
        sections = {name: getattr(self, name).to_table() for name in named}
        return {"task": {key: getattr(self, key) for key in _HEAD}, **sections}

    def to_json(self) -> str:
        """The canonical JSON: what is hashed and approved."""
        return canonical(self.to_table()).decode()

    def __reduce__(self) -> tuple[Callable[[str], Task], tuple[str]]:
        """Pickled as its canonical JSON: it is checked again where it is opened."""
        return task_from_json, (self.to_json(),)

    def _between(self) -> Iterator[str]:
        yield from (f"labels.{problem}" for problem in _labels_problems(self.kind, self.labels))
        if not 1 <= self.outputs <= MOST_OUTPUTS:
            yield f"labels.classes: at most {MOST_OUTPUTS} outputs"
        if self.loss.name not in LOSSES[self.kind]:
            yield f"loss.name: must be one of {', '.join(LOSSES[self.kind])} for {self.kind}"
        if self.loss.smoothing and self.loss.name != "cross-entropy":
            yield "loss.smoothing: only cross-entropy has it"
        if len(self.loss.weights) not in (0, self.outputs):
            yield f"loss.weights: one for each of {self.outputs} outputs, or none"
        yield from self._input_problems()
        if (self.training.views > 1) > bool(self.training.augmentation):
            yield "training.views: more than 1 needs an augmentation, else all are the same"
        if self.training.head == "own" and (self.network.name == "linear" or self.network.trained == "head"):
            yield "training.head: a head of a site's own needs more that is trained, else nothing is shared"
        if not self.training.proximal * self.training.learning_rate <= 1.0:
            yield "training.proximal: at most 1 / learning_rate, else its steps overshoot"
        misfits = self.network.misfits(self.input.size, masks=self.kind == SEGMENTATION)
        yield from (f"network.{problem}" for problem in misfits)

    def _input_problems(self) -> Iterator[str]:
        if self.kind == SEGMENTATION and self.input.example == "study":
            yield "input.example: must be image for segmentation, since a mask belongs to one"
        if len(self.input.size) == 3 and (self.input.example == "study" or self.input.channels != 1):
            yield "input.example, channels: a volume is an example by itself, and grey"
        for number, one in enumerate(self.input.transforms):
            if one.name in _BY_THE_VAULT:
                yield f"input.transforms.{number}.name: leave {one.name} out, and say input.spacing"
        if self.input.size[0] != self.input.size[1]:
            for number, one in enumerate(self.training.augmentation):
                if one.name == "RandRotate90":  # else no example could be turned, and nobody would take part
                    yield f"training.augmentation.{number}.name: RandRotate90 needs equal first sides in input.size"


def _labels_problems(kind: str, labels: Labels) -> Iterator[str]:
    """What is wrong with the labels of a task of that kind."""
    yield from _OUTPUTS[kind](labels)
    bounds = len(labels.columns) if kind == REGRESSION else 0
    if not len(labels.low) == len(labels.high) == bounds:
        yield "low, high: public bounds, one of each for every column of a regression, and for no other kind"
    elif not all(low < high for low, high in zip(labels.low, labels.high, strict=True)):
        yield "low, high: each low must be below its high"


def _of_classification(labels: Labels) -> Iterator[str]:
    if len(labels.columns) != bool(labels.table):
        yield "columns: one column of the table; none where images come with their label"
    if not len(labels.classes) >= 2:
        yield "classes: at least two"


def _of_multi_label(labels: Labels) -> Iterator[str]:
    if not (labels.table and labels.columns):
        yield "table, columns: multi-label needs an imported table and its columns"
    if labels.classes and len(labels.columns) != 1:
        yield "classes: the values of a single column that holds several at once; none where columns are binary"


def _of_regression(labels: Labels) -> Iterator[str]:
    if not (labels.table and labels.columns):
        yield "table, columns: regression needs an imported table and its columns"
    if labels.classes:
        yield "classes: regression has none"


def _of_segmentation(labels: Labels) -> Iterator[str]:
    if labels.table or labels.columns:
        yield "table, columns: segmentation has masks, and no table"
    if not labels.classes:
        yield "classes: the segments, without the background"


_OUTPUTS: Final[Mapping[str, Callable[[Labels], Iterator[str]]]] = MappingProxyType(
    {
        CLASSIFICATION: _of_classification,
        MULTI_LABEL: _of_multi_label,
        REGRESSION: _of_regression,
        SEGMENTATION: _of_segmentation,
    }
)
_SECTIONS: Final[Mapping[str, type[_Section]]] = MappingProxyType(
    {"labels": Labels, "input": Input, "loss": Loss, "training": Training, "card": Card}
)
_HEAD: Final[Mapping[str, Bound]] = MappingProxyType(
    {"name": Text(_NAME, "a short lower-case name"), "kind": Word(tuple(LOSSES)), "seed": Whole(0, (1 << 31) - 1, 0)}
)


def read_task(path: Path) -> Task:
    """Read a researcher's task file from a disk.

    Raises:
        TaskError: it cannot be read, or see :func:`task_from_toml`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{path.name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TaskError(f"{path.name}: not text") from None
    return task_from_toml(text, path.name)


def task_from_toml(text: str, file: str) -> Task:
    """Read a researcher's task file.

    Args:
        text: TOML.
        file: its name, for the message; "": there is none.
    Raises:
        TaskError: not TOML, or not a task: every problem at once, each with the file and its key.
    """
    where = f"{file}: " if file else ""
    if not len(text) <= MOST_TEXT:
        raise TaskError(f"{where}at most {MOST_TEXT} characters")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}not TOML: {error}") from None
    return task_from_table(values, file)


def task_from_json(text: str) -> Task:
    """Read what :meth:`Task.to_json` wrote.

    Raises:
        TaskError: anything else.
    """
    try:
        values = json_object(text)
    except ValueError:
        raise TaskError("task: not a JSON object of distinct keys and finite numbers") from None
    return task_from_table(values)


def task_from_table(raw: Mapping[str, object], file: str = "") -> Task:
    """A task of its file's tables; what is left out has its default.

    Raises:
        TaskError: every problem at once, each with the file, if there is one, and its key.
    """
    problems = [f"{name}: unknown table" for name in sorted(raw.keys() - {"task", "network", *_SECTIONS})]
    tables = {name: dict(as_table(raw.get(name, {}), name, problems)) for name in ("task", *_SECTIONS, "network")}
    lists = {f"{name}.{key}": tables[name].pop(key, ()) for name, key in (("input", "transforms"), _DRAWN)}
    head: Any = read_values(tables["task"], _HEAD, "task.", problems)
    made: Any = {name: kind.from_table(tables[name], f"{name}.", problems) for name, kind in _SECTIONS.items()}
    dimensions = len(made["input"].size) if made["input"] else 2
    for place, listed in lists.items():
        section, key = place.split(".")
        try:
            found = read_transforms(listed, place, dimensions, random=(section, key) == _DRAWN)
            made[section] = made[section] and replace(made[section], **{key: found})
        except TaskError as error:
            problems += error.problems
    try:
        # without a name: one linear layer, on public networks where there are some
        usual = {"name": "frozen-features" if "parts" in tables["network"] else "linear"}
        made["network"] = NetworkSpec.from_table({**usual, **tables["network"]})
        if not problems:
            return Task(**head, **made)
    except TaskError as error:
        problems += error.problems
    raise TaskError(*(f"{file}: {problem}" if file else problem for problem in problems))


_DRAWN: Final = ("training", "augmentation")


def _in_json(value: object) -> JsonValue:
    if isinstance(value, tuple):
        return [_in_json(one) for one in value]
    return value.to_table() if isinstance(value, TransformSpec) else plain(value)
