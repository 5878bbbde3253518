"""The transforms of a bundle as those of a task, in the order of a task's axes.

MONAI reads pictures with the axis across first, and volumes with the axes right to left, front to back, feet to head.
A task's pictures are (h, w), and its volumes (k, h, w) from the feet: so every list of numbers for axes is turned
round. What a site's vault does by itself is left out: it reads, orients, windows, resamples and fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from agent.models.bundles.components import Findings, Given, defaults_of, same, target
from agent.models.bundles.configuration import Json, joined
from agent.models.transforms import monai_arguments, monai_class
from policies.tasks.bounds import TaskError
from policies.tasks.transforms import AUGMENTATION, INPUT, TransformSpec

_READING: Final = ("LoadImage", "EnsureChannelFirst", "EnsureType", "ToTensor", "CastToType")
_NAMES: Final = (*INPUT, *AUGMENTATION, *_READING)
_SUFFIXES: Final = ("", "d", "D", "Dict")
_KEYS: Final = ("keys", "allow_missing_keys")
_VALUES: Final = ("ScaleIntensity", "ScaleIntensityRange", "ScaleIntensityRangePercentiles", "NormalizeIntensity")
_LISTS: Final = ("spatial_size", "roi_size", "pixdim")
_RANGES: Final = ("rotate_range", "shear_range", "translate_range", "scale_range")
_FITTED: Final = "a site fits every image to input.size, by the means of areas"


@dataclass(slots=True)
class BundleInput:
    """What a bundle's transforms say of a task's input."""

    dimensions: int
    size: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()
    window: tuple[float, ...] = ()
    transforms: list[TransformSpec] = field(default_factory=list)
    augmentation: list[TransformSpec] = field(default_factory=list)


def input_of_bundle(listed: Sequence[tuple[str, Json]], dimensions: int, findings: Findings) -> BundleInput:
    """Read all transforms in their order.

    Args:
        listed: the key and the table of each.
        dimensions: of the network's input.
        findings: get every problem, and what a task does otherwise.
    """
    made, image = BundleInput(dimensions), ""
    for key, part in listed:
        name = _name(target(part, "monai.transforms", key, findings))
        if not name:
            if isinstance(part, dict) and isinstance(part.get("_target_"), str):
                findings.wrong(joined(key, "_target_"), f"must be one of MONAI's {', '.join(sorted(_NAMES))}")
            continue
        keys = part.get("keys", image or "image")
        keys = [keys] if isinstance(keys, str) else keys
        if not (isinstance(keys, list) and keys and all(isinstance(one, str) for one in keys)):
            findings.wrong(joined(key, "keys"), "must be texts")
            continue
        image = image or keys[0]
        if name in _READING:
            continue
        if image not in keys:
            findings.wrong(joined(key, "keys"), "a task changes no target alone")
        _add(made, name, Given({**part, "keys": image}, _defaults(name), key, findings), image)
    return made


def _name(found: str) -> str:
    """Of the transform, whether it is of arrays or of dictionaries."""
    return next((name for end in _SUFFIXES if (name := found.removesuffix(end)) in _NAMES), "")


@cache
def _defaults(name: str) -> Mapping[str, Any]:
    return {**defaults_of(monai_class(name)), "keys": None}


def _add(made: BundleInput, name: str, given: Given, image: str) -> None:
    before = len(given.findings.problems)
    spec = _spec(name, given, made.dimensions, image)
    if spec is None or len(given.findings.problems) > before:
        return
    if spec.random:
        made.augmentation.append(spec)
        return
    if made.augmentation:
        given.findings.wrong(given.key, "stands after one that draws numbers: a task has its fixed transforms first")
        return
    _settle(made, spec, given)


def _settle(made: BundleInput, spec: TransformSpec, given: Given) -> None:
    """A fixed transform: of the vault, or of the task's list."""
    values, tell = spec.parameters, given.findings.otherwise
    if spec.name == "Orientation":
        tell(given.key, "left out: a site orients every volume alike")
    elif spec.name == "Spacing":
        if made.transforms or made.spacing or made.size:
            given.findings.wrong(given.key, "must be the first that moves pixels: a site resamples before all others")
        made.spacing = values["pixdim"]
    elif spec.name == "ScaleIntensityRange" and not any(one.name in _VALUES for one in made.transforms):
        _window(made, spec, given)
    elif spec.name == "Resize" and not (made.transforms or made.size or made.spacing):
        made.size = values["spatial_size"]
        tell(given.key, _FITTED)
    elif spec.name == "ResizeWithPadOrCrop" and made.spacing and not (made.transforms or made.size):
        made.size = values["spatial_size"]  # a site resamples around the centre, with zeros outside
    else:
        if spec.name == "Resize":
            given.must("mode", "area", ["area", "nearest"], why="must be area for the image")
        made.transforms.append(spec)


def _window(made: BundleInput, spec: TransformSpec, given: Given) -> None:
    values = spec.parameters
    if made.transforms or made.window:
        given.findings.wrong(given.key, "must stand before all crops: a site windows the stored values first")
    elif not values["clip"]:
        given.wrong("clip", "must be true: a site cuts the stored values at the window")
    else:
        made.window = (values["a_min"], values["a_max"])
        low, high = values["b_min"], values["b_max"]
        if (low, high) != (0.0, 1.0):
            made.transforms.append(
                TransformSpec(spec.name, {"a_min": 0.0, "a_max": 1.0, "b_min": low, "b_max": high, "clip": True})
            )


def _spec(name: str, given: Given, dimensions: int, image: str) -> TransformSpec | None:
    """With every parameter, MONAI's own defaults written out; None: that is a problem."""
    for key in _KEYS:
        given.value(key)
    found = {}
    for key in {**INPUT, **AUGMENTATION}[name]:
        if (name, key) == ("CropForeground", "threshold"):
            given.must("source_key", image, why="must be the image")
            found[key] = 0.0  # MONAI's own: what is above it
        elif (name, key) == ("RandGaussianSmooth", "sigma"):
            sigmas = [given.value(f"sigma_{axis}") for axis in "xyz"[:dimensions]]
            given.value("sigma_z")
            if not all(same(one, sigmas[0]) for one in sigmas):
                given.wrong("sigma_x", "must be the same along every axis")
            found[key] = sigmas[0]
        else:
            found[key] = _turned(name, key, given.value(key), dimensions)
    _as_here(name, given, dimensions)
    given.end()
    try:
        spec = TransformSpec(name, {key: value for key, value in found.items() if value is not None})
    except TaskError as error:
        for problem in error.problems:
            given.findings.wrong(joined(given.key, problem.partition(":")[0]), problem.partition(": ")[2])
        return None
    for problem in spec.misfits(dimensions):
        given.findings.wrong(joined(given.key, problem.partition(":")[0]), problem.partition(": ")[2])
    return spec


def _turned(name: str, key: str, value: Json, dimensions: int) -> Json:
    """Numbers for axes in a task's order."""
    if key == "spatial_axis" and type(value) is int:
        return dimensions - 1 - value
    if key in _LISTS:
        listed = [value] * dimensions if type(value) is int and name != "Spacing" else value
        return listed[::-1] if isinstance(listed, (list, tuple)) else listed
    if key in _RANGES:
        count = {"rotate_range": {2: 1, 3: 3}, "shear_range": {2: 2, 3: 6}}.get(key, {}).get(dimensions, dimensions)
        listed = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
        return [*listed, *[0.0] * (count - len(listed))][::-1]  # MONAI: axes that are not named do not move
    if name == "Orientation":
        return "RAS"  # whichever: a site orients by itself
    return value


def _as_here(name: str, given: Given, dimensions: int) -> None:
    """Arguments that a task fixes, and MONAI does not."""
    if name == "Orientation":
        for key in ("axcodes", "labels", "as_closest_canonical"):
            given.value(key)
    if name == "RandRotate90" and dimensions == 3:
        given.wrong("spatial_axes", "a task's quarter turns of volumes are of other axes: leave it out")
    if name == "RandAffine":
        given.value("padding_mode")
        given.findings.otherwise(given.key, "a task goes on outside with the pixels of the border")
        if dimensions == 3 and given.value("shear_range") is not None:
            given.wrong("shear_range", "a task's order of shears is another for volumes: leave it out")
    mode = given.value("mode") if name in ("Resize", "Spacing", "RandAffine", "RandZoom") else None
    if mode is not None and name != "Resize":  # by which it is fitted is told
        own = monai_arguments(_plainest(name, dimensions), dimensions, with_mask=False)["mode"][0]
        if not same(mode[0] if isinstance(mode, list) and mode else mode, own):
            given.wrong("mode", f"must be {own} for the image")


def _plainest(name: str, dimensions: int) -> TransformSpec:
    return TransformSpec(name, {"pixdim": [1.0] * dimensions} if name == "Spacing" else {})
