"""The transforms that a task may name: MONAI's, by an allow-list of names and bounded parameters.

Those of :data:`INPUT` are fixed functions of one picture: what a network sees of a patient hangs on this patient's
picture and on the task alone, whichever others there are. Those of :data:`AUGMENTATION` draw numbers, of which a site
makes a seed for each patient and step (``agent/models/transforms.py``). What would look at other pictures, at a file
or at code has no place here, and neither has what gives several pictures for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from policies.tasks.bounds import (
    Bound,
    Flag,
    Number,
    PerAxis,
    TaskError,
    Whole,
    Word,
    as_list,
    as_table,
    plain,
    read_values,
    refuse,
)
from protos.common.canonical_json import canonical, json_object

MOST_TRANSFORMS: Final = 16  # of one list
_VALUE: Final = Number(-1e6, 1e6)  # of a pixel
_SIZE: Final = PerAxis(Whole(1, 2048))  # pixels
_PROB: Final = Number(0.0, 1.0, 0.5)
_UNIT: Final[Mapping[str, Bound]] = {
    "b_min": Number(-1e6, 1e6, 0.0),
    "b_max": Number(-1e6, 1e6, 1.0),
    "clip": Flag(default=True),
}

Parameters = Mapping[str, Any]

INPUT: Final[Mapping[str, Mapping[str, Bound]]] = {
    "Orientation": {"axcodes": Word(("RAS", "LPS"), "RAS")},
    "Spacing": {"pixdim": PerAxis(Number(0.01, 100.0))},  # mm
    "Resize": {"spatial_size": _SIZE},
    "ScaleIntensity": {"minv": Number(-1e6, 1e6, 0.0), "maxv": Number(-1e6, 1e6, 1.0)},
    "ScaleIntensityRange": {"a_min": _VALUE, "a_max": _VALUE, **_UNIT},  # a window
    "ScaleIntensityRangePercentiles": {"lower": Number(0.0, 100.0, 1.0), "upper": Number(0.0, 100.0, 99.0), **_UNIT},
    "NormalizeIntensity": {"nonzero": Flag(default=False), "channel_wise": Flag(default=False)},
    "CropForeground": {"threshold": Number(-1e6, 1e6, 0.0), "margin": Whole(0, 512, 0)},
    "CenterSpatialCrop": {"roi_size": _SIZE},
    "SpatialPad": {"spatial_size": _SIZE},
    "ResizeWithPadOrCrop": {"spatial_size": _SIZE},
    "DivisiblePad": {"k": Whole(1, 128, 16)},
}
"""Name of a fixed transform -> its parameters, by MONAI's names; ``threshold``: above it is foreground."""

AUGMENTATION: Final[Mapping[str, Mapping[str, Bound]]] = {
    "RandFlip": {"prob": _PROB, "spatial_axis": Whole(0, 2)},
    "RandRotate90": {"prob": _PROB, "max_k": Whole(1, 3, 3)},
    "RandAffine": {
        "prob": Number(0.0, 1.0, 1.0),
        "rotate_range": PerAxis(Number(0.0, 3.2), (1, 3), (0.1,)),  # rad, either way
        "shear_range": PerAxis(Number(0.0, 1.0), (2, 6), (0.0, 0.0)),
        "translate_range": PerAxis(Number(0.0, 512.0), (2, 3), (0.0, 0.0)),  # pixels, either way
        "scale_range": PerAxis(Number(0.0, 0.9), (2, 3), (0.0, 0.0)),  # of a factor 1, either way
    },
    "RandZoom": {"prob": _PROB, "min_zoom": Number(0.2, 5.0, 0.9), "max_zoom": Number(0.2, 5.0, 1.1)},
    "RandGaussianNoise": {"prob": _PROB, "std": Number(0.0, 1e6, 0.1)},
    "RandGaussianSmooth": {"prob": _PROB, "sigma": PerAxis(Number(0.05, 32.0), (2,), (0.25, 1.5))},
    "RandAdjustContrast": {"prob": _PROB, "gamma": PerAxis(Number(0.05, 20.0), (2,), (0.7, 1.5))},
    "RandScaleIntensity": {"prob": _PROB, "factors": Number(0.0, 1.0, 0.1)},
    "RandShiftIntensity": {"prob": _PROB, "offsets": Number(0.0, 1e6, 0.1)},
}
"""Name of a transform that draws -> its parameters, by MONAI's names; ``sigma``: along every axis, in pixels."""

# the first must be below the second, each by its place where both stand in one list
_RISING: Final[Sequence[tuple[str, str]]] = (
    ("a_min", "a_max"), ("b_min", "b_max"), ("lower", "upper"), ("minv", "maxv"), ("min_zoom", "max_zoom"),
)  # fmt: skip
_PAIRS: Final = ("sigma", "gamma")
_PER_AXIS: Final = ("spatial_size", "roi_size", "pixdim", "translate_range", "scale_range")
_TURNS: Final[Mapping[str, Mapping[int, int]]] = {  # how many numbers, by the number of dimensions
    "rotate_range": {2: 1, 3: 3},
    "shear_range": {2: 2, 3: 6},
}


@dataclass(frozen=True, slots=True)
class TransformSpec:
    """One transform of :data:`INPUT` or :data:`AUGMENTATION`, with every parameter.

    Raises:
        TaskError: with every problem, by its key.
    """

    name: str
    parameters: Parameters = field(default_factory=dict, hash=False)  # what is left out has its default

    def __post_init__(self) -> None:
        """Fill in the defaults, and refuse what is not bounded."""
        problems: list[str] = []
        bounds = {**INPUT, **AUGMENTATION}.get(self.name) if type(self.name) is str else None
        if bounds is None:
            raise TaskError(f"name: must be one of {', '.join(sorted((*INPUT, *AUGMENTATION)))}")
        values = read_values(as_table(self.parameters, "parameters", problems), bounds, "", problems)
        object.__setattr__(self, "parameters", MappingProxyType(values))
        for low, high in _RISING:
            if {low, high} <= values.keys() and not values[low] < values[high]:
                problems.append(f"{low}: must be below {high}")
        for key in _PAIRS:
            if key in values and not values[key][0] <= values[key][1]:
                problems.append(f"{key}: must be a low and a high number")
        refuse(problems)

    @property
    def random(self) -> bool:
        """Whether it draws numbers."""
        return self.name in AUGMENTATION

    def misfits(self, dimensions: int) -> list[str]:
        """What is wrong with it for pictures (2) or volumes (3); each begins with the key."""
        problems = []
        for key, value in self.parameters.items():
            count = _TURNS[key][dimensions] if key in _TURNS else dimensions
            # a default that moves nothing, or turns alike about each axis, fits both
            if key in (*_PER_AXIS, *_TURNS) and len(value) != count and value != self._default(key):
                problems.append(f"{key}: must have {count} numbers for {dimensions}-D input")
        if self.parameters.get("spatial_axis", 0) >= dimensions:
            problems.append(f"spatial_axis: must be below {dimensions} for {dimensions}-D input")
        if self.name == "Orientation" and dimensions != 3:
            problems.append("name: Orientation is of volumes")
        return problems

    def for_axes(self, key: str, dimensions: int) -> tuple[float, ...]:
        """A parameter that is a list, with a number for each axis: a default that fits both is made so long."""
        value: tuple[float, ...] = self.parameters[key]
        count = _TURNS[key][dimensions] if key in _TURNS else dimensions
        return value if len(value) == count else (value[0],) * count

    def _default(self, key: str) -> object:
        return {**INPUT, **AUGMENTATION}[self.name][key].default

    def to_table(self) -> dict[str, Any]:
        """Every key, with defaults, in JSON's types."""
        return {"name": self.name, **{key: plain(value) for key, value in self.parameters.items()}}

    def to_json(self) -> str:
        """The canonical JSON: what is hashed and signed as part of a task."""
        return canonical(self.to_table()).decode()

    @classmethod
    def from_table(cls, raw: object, where: str = "") -> Self:
        """From a table of TOML or JSON: the name, and the parameters beside it.

        Raises:
            TaskError: with every problem, by its key.
        """
        problems: list[str] = []
        table = dict(as_table(raw, where, problems))
        refuse(problems)
        try:
            return cls(table.pop("name", ""), table)  # type: ignore[arg-type] # refused where it is no text
        except TaskError as error:
            raise TaskError(*(f"{where}{one}" for one in error.problems)) from None

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote, in that form alone.

        Raises:
            TaskError: anything else.
        """
        try:
            made = cls.from_table(json_object(text))
        except TaskError:
            raise
        except ValueError:
            raise TaskError("transform: not a JSON object of distinct keys and finite numbers") from None
        if made.to_json() != text:
            raise TaskError("transform: not in its canonical form")
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its canonical JSON: it is checked again where it is opened."""
        return type(self).from_json, (self.to_json(),)


def read_transforms(raw: object, where: str, dimensions: int, *, random: bool) -> tuple[TransformSpec, ...]:
    """A list of transforms, of the input or of its augmentation.

    Args:
        raw: a list of tables; an empty one is allowed.
        where: the key of the list, for a message.
        dimensions: 2 or 3.
        random: whether they are those that draw numbers; the other kind is refused.
    Raises:
        TaskError: with every problem of all of them, by its key.
    """
    problems: list[str] = []
    found: list[TransformSpec] = []
    for number, table in enumerate(as_list(raw, where, MOST_TRANSFORMS, problems)):
        place = f"{where}.{number}."
        try:
            spec = TransformSpec.from_table(table, place)
        except TaskError as error:
            problems += error.problems
            continue
        if spec.random is not random:
            kind = "draws numbers: it is an augmentation" if spec.random else "draws no numbers: it is of the input"
            problems.append(f"{place}name: {spec.name} {kind}")
        problems += [f"{place}{problem}" for problem in spec.misfits(dimensions)]
        found.append(spec)
    refuse(problems)
    return tuple(found)
