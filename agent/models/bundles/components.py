"""Networks and losses of a bundle's configuration as those of a task: each argument is known, or refused.

An argument that a task has no like of must be as MONAI has it by itself, by the signature of MONAI's own class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from monai.losses.dice import DiceCELoss, DiceLoss
from monai.networks.nets.densenet import DenseNet, DenseNet121
from monai.networks.nets.resnet import ResNet, resnet18
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unet import UNet
from monai.networks.nets.vit import ViT
from torch import nn

from agent.models.bundles.configuration import Json, expressions, joined, shown
from policies.tasks.bounds import TaskError
from policies.tasks.networks import NETWORKS, NetworkSpec
from policies.tasks.task import CLASSIFICATION, MOST_OUTPUTS, MULTI_LABEL, REGRESSION, SEGMENTATION

Arguments = Mapping[str, Json]
_NONE: Final = inspect.Parameter.empty
_BESIDE: Final = ("_target_", "_desc_", "_disabled_")
_MOST_NUMBERS, _LARGEST = 16, 1 << 20  # of a list of widths, sides or blocks: a task's own bounds are narrower
EXPRESSION: Final = "an expression, which is never run: write the value"


@dataclass(slots=True)
class Findings:
    """What is wrong, and what a task does otherwise; each with its key."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, key: str, why: str) -> None:
        """A part that cannot be taken."""
        self.problems.append(f"{shown(key)}: {why}")

    def otherwise(self, key: str, what: str) -> None:
        """A part that a task has in another way."""
        self.notes.append(f"{shown(key)}: {what}")


def target(part: Json, package: str, key: str, findings: Findings, *, bare: bool = True) -> str:
    """The name of a part's class, without the package that it must be of; "": that is a problem.

    Args:
        part: a table with ``_target_``.
        package: such as ``monai.networks.nets``.
        key: of the part.
        findings: get the problem.
        bare: whether the name may stand without its package, as MONAI's own may.
    """
    if expressions(part, key) == [key]:
        findings.wrong(key, EXPRESSION)
        return ""
    if not isinstance(part, dict) or not isinstance(part.get("_target_"), str):
        findings.wrong(key, "must be a table with the name of a class as _target_")
        return ""
    for found in expressions(part, key):
        findings.wrong(found, EXPRESSION)
    for name in ("_mode_", "_requires_"):
        if name in part:
            findings.wrong(joined(key, name), "a task has no like of it")
    if part.get("_disabled_", False) is not False:
        findings.wrong(joined(key, "_disabled_"), "must be false")
    dotted = re.fullmatch(rf"({re.escape(package)}\.(?:\w+\.){{0,2}})?(\w+)", part["_target_"])
    return dotted[2] if dotted and (bare or dotted[1]) else "?"


def defaults_of(*made_by: Callable[..., Any]) -> dict[str, Any]:
    """Every argument of some callables, with the value that it has where it is left out; later ones win."""
    found: dict[str, Any] = {}
    for one in made_by:
        for name, parameter in inspect.signature(one).parameters.items():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found[name] = parameter.default
    return found


def same(value: object, other: object) -> bool:
    """Whether two values say the same to MONAI: lists are tuples, and the case of its words does not count."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, str) and isinstance(other, str):
        return str.lower(value) == str.lower(other)
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return value == other


class Given:
    """The arguments of one part: some are read, and all others must be as MONAI has them by itself."""

    def __init__(self, part: Arguments, defaults: Mapping[str, Any], key: str, findings: Findings) -> None:
        """``part`` with its ``_target_``."""
        self._part = {name: value for name, value in part.items() if name not in (*_BESIDE, "_mode_", "_requires_")}
        self._defaults, self.key, self.findings = defaults, key, findings
        self._read: set[str] = set()

    def value(self, name: str) -> Json:
        """What was given, or what MONAI has; None where there is neither."""
        self._read.add(name)
        found = self._part.get(name, self._defaults.get(name))
        if found is _NONE:
            self.wrong(name, "missing")
            return None
        return found

    def whole(self, name: str) -> int:
        """A whole number; 0 where it is none, and that is a problem."""
        value = self.value(name)
        if type(value) is int:
            return value
        if value is not None:
            self.wrong(name, "must be a whole number")
        return 0

    def must(self, name: str, *allowed: Json, why: str) -> None:
        """One of a few values."""
        if not any(same(self.value(name), one) for one in allowed):
            self.wrong(name, why)

    def wrong(self, name: str, why: str) -> None:
        """A problem of an argument."""
        if not expressions(self._part.get(name), ""):  # that is said once
            self.findings.wrong(joined(self.key, name), why)

    def end(self) -> None:
        """All that was not read: MONAI must know it, and have it so by itself."""
        for name in sorted(self._part.keys() - self._read):
            if name not in self._defaults:
                self.wrong(name, "not an argument of this class")
            elif not same(self._part[name], self._defaults[name]):
                self.wrong(name, "a task has no like of it: leave it out, for what MONAI does by itself")


# -- networks


@dataclass(frozen=True, slots=True)
class BundleNetwork:
    """A network of a bundle, as a task names it."""

    name: str
    options: Mapping[str, int]
    dimensions: int
    channels: int
    outputs: int
    size: tuple[int, ...] = ()  # of its input, in MONAI's order of axes; (): any
    batch_norms: bool = False  # which a task's networks do not have

    @property
    def masks(self) -> bool:
        """Whether it gives a number for each pixel."""
        return NETWORKS[self.name].masks


@dataclass(frozen=True, slots=True)
class _Known:
    name: str  # in a task
    defaults: Mapping[str, Any]
    options: Callable[[Given], dict[str, int]]
    ends: tuple[str, str]  # its arguments for channels that go in and numbers that come out
    batch_norms: bool = False


def _unet(given: Given) -> dict[str, int]:
    channels, strides = given.value("channels"), given.value("strides")
    if not (_wholes(channels) and channels == [channels[0] << level for level in range(len(channels))]):
        given.wrong("channels", "must be whole numbers, each twice the one before")
        return {}
    if not same(strides, [2] * (len(channels) - 1)):
        given.wrong("strides", "must be 2 between all levels")
    given.must("norm", "instance", why="a task's unet has instance norm, since batch norm mixes patients")
    return {"width": channels[0], "levels": len(channels), "units": given.whole("num_res_units")}


def _segresnet(given: Given) -> dict[str, int]:
    down, up = given.value("blocks_down"), given.value("blocks_up")
    levels = len(down) if isinstance(down, (list, tuple)) else 0
    if not (levels >= 2 and same(down, [1, *[2] * (levels - 2), 4] if levels > 2 else [1, 2])):
        given.wrong("blocks_down", "must be 1, 2, ..., 2, 4; of two levels 1, 2")
        return {}
    if not same(up, [1] * (levels - 1)):
        given.wrong("blocks_up", "must be 1 at each level")
    given.must("dropout_prob", None, 0, 0.0, why="a task's network draws nothing: leave it out")
    return {"width": given.whole("init_filters"), "levels": levels}


def _resnet(given: Given) -> dict[str, int]:
    widths = given.value("block_inplanes")  # resnet18() has none: its first is 64
    if not (_wholes(widths) and list(widths) == [widths[0] << stage for stage in range(4)]):
        given.wrong("block_inplanes", "must be four whole numbers, each twice the one before")
        return {}
    return {"width": widths[0], "stride": given.whole("conv1_t_stride")}


def _densenet(given: Given) -> dict[str, int]:
    growth = given.whole("growth_rate")
    given.must("init_features", 2 * growth, why="must be twice growth_rate")
    given.must("block_config", [6, 12, 24, 16], why="must be that of DenseNet-121")
    return {"growth": growth}


def _vit(given: Given) -> dict[str, int]:
    patch, width = given.value("patch_size"), given.whole("hidden_size")
    sides = [patch] if type(patch) is int else patch
    if not (_wholes(sides) and len(set(sides)) == 1):
        given.wrong("patch_size", "must be one whole number for all sides")
        return {}
    given.must("classification", True, why="must be true: a task learns from the class token")
    given.must("qkv_bias", True, why="must be true, as in the paper")
    given.must("mlp_dim", 4 * width, why="must be four times hidden_size")
    if same(given.value("post_activation"), "Tanh"):
        given.wrong("post_activation", 'must be "", since no loss of a task follows a tanh')
    layers, heads = given.whole("num_layers"), given.whole("num_heads")
    return {"width": width, "layers": layers, "heads": heads, "patch": sides[0]}


def _wholes(value: object) -> bool:
    """A few whole numbers above nothing."""
    return (
        isinstance(value, (list, tuple))
        and 0 < len(value) <= _MOST_NUMBERS
        and all(type(one) is int and 0 < one < _LARGEST for one in value)
    )


_DENSE: Final = _Known(
    "densenet121", defaults_of(DenseNet, DenseNet121), _densenet, ("in_channels", "out_channels"), True
)
_ENDS: Final = ("n_input_channels", "num_classes")
_RESNET: Final = defaults_of(ResNet)
_BY_NAME: Final = {**defaults_of(ResNet, resnet18), "block_inplanes": (64, 128, 256, 512), "block": "", "layers": ""}
_TARGETS: Final[Mapping[str, _Known]] = {
    "UNet": _Known("unet", defaults_of(UNet), _unet, ("in_channels", "out_channels")),
    "SegResNet": _Known("segresnet", defaults_of(SegResNet), _segresnet, ("in_channels", "out_channels")),
    "DenseNet": _DENSE,
    "DenseNet121": _DENSE,
    "ResNet": _Known("", _RESNET, _resnet, _ENDS, True),
    "resnet18": _Known("resnet18", _BY_NAME, _resnet, _ENDS, True),
    "resnet50": _Known("resnet50", _BY_NAME, _resnet, _ENDS, True),
    "ViT": _Known("vit-s16", defaults_of(ViT), _vit, ("in_channels", "num_classes")),
}
_BY_LAYERS: Final = {("basic", (2, 2, 2, 2)): "resnet18", ("bottleneck", (3, 4, 6, 3)): "resnet50"}


def network_of_bundle(part: Json, key: str, findings: Findings) -> BundleNetwork | None:
    """The network that a part names; None: that is a problem."""
    before = len(findings.problems)
    name = target(part, "monai.networks.nets", key, findings)
    if not name:
        return None
    known = _TARGETS.get(name)
    if known is None:
        findings.wrong(joined(key, "_target_"), f"must be one of MONAI's {', '.join(sorted(_TARGETS))}")
        return None
    given = Given(part, known.defaults, key, findings)
    task_name = known.name or _by_layers(given)
    options = known.options(given)
    dimensions = given.whole("spatial_dims")
    if dimensions not in NETWORKS[task_name].dimensions:
        given.wrong("spatial_dims", "a task has this network in other dimensions alone")
    channels, outputs = map(given.whole, known.ends)
    if not 1 <= outputs <= MOST_OUTPUTS:
        given.wrong(known.ends[1], f"must be from 1 to {MOST_OUTPUTS}")
    sides = _sides(given, dimensions) if task_name == "vit-s16" else ()
    given.end()
    if len(findings.problems) > before:
        return None
    try:
        NetworkSpec(task_name, options)
    except TaskError as error:
        findings.problems += [f"{shown(key)}: {problem}" for problem in error.problems]
        return None
    if channels not in (1, 3):
        findings.wrong(joined(key, known.ends[0]), "must be 1 for grey or 3 for colour")
    return BundleNetwork(task_name, options, dimensions, channels, outputs, sides, known.batch_norms)


def _sides(given: Given, dimensions: int) -> tuple[int, ...]:
    """Of the input of a network that takes one size alone."""
    size = given.value("img_size")
    sides = [size] * min(dimensions, 3) if type(size) is int else size
    if not (_wholes(sides) and len(sides) == dimensions):
        given.wrong("img_size", "must be a whole number of pixels, or one for each dimension")
        return ()
    return tuple(sides)


def _by_layers(given: Given) -> str:
    block, layers = given.value("block"), given.value("layers")
    name = _BY_LAYERS.get((block, tuple(layers))) if isinstance(block, str) and _wholes(layers) else None
    if name is None:
        given.wrong("layers", "block and layers must be those of ResNet-18 or ResNet-50")
    return name or "resnet18"


# -- losses


@dataclass(frozen=True, slots=True)
class BundleLoss:
    """A loss of a bundle, as a task names it."""

    kinds: tuple[str, ...]  # of tasks that have it
    name: str
    smoothing: float = 0.0


_OVERLAP: Final = ("include_background", "squared_pred", "batch", "smooth_nr", "smooth_dr")
_DICE: Final = "a task's Dice is of one patient, without the background and squares, and smoothed by one pixel"
_LOSSES: Final[Mapping[str, tuple[Mapping[str, Any], BundleLoss]]] = {
    "DiceLoss": (defaults_of(DiceLoss), BundleLoss((SEGMENTATION,), "dice")),
    "DiceCELoss": (defaults_of(DiceCELoss), BundleLoss((SEGMENTATION,), "dice-cross-entropy")),
}
_OF_TORCH: Final[Mapping[str, tuple[Mapping[str, Any], BundleLoss]]] = {
    "CrossEntropyLoss": (
        defaults_of(nn.CrossEntropyLoss),
        BundleLoss((CLASSIFICATION, SEGMENTATION), "cross-entropy"),
    ),
    "BCEWithLogitsLoss": (defaults_of(nn.BCEWithLogitsLoss), BundleLoss((MULTI_LABEL,), "binary-cross-entropy")),
    "MSELoss": (defaults_of(nn.MSELoss), BundleLoss((REGRESSION,), "squared-error")),
    "L1Loss": (defaults_of(nn.L1Loss), BundleLoss((REGRESSION,), "absolute-error")),
}


def loss_of_bundle(part: Json, key: str, findings: Findings) -> BundleLoss | None:
    """The loss that a part names; None: that is a problem."""
    before = len(findings.problems)
    torch = isinstance(part, dict) and str(part.get("_target_")).startswith("torch.")
    package = "torch.nn" if torch else "monai.losses"
    name, table = target(part, package, key, findings, bare=not torch), _OF_TORCH if torch else _LOSSES
    if not name:
        return None
    if name not in table:
        names = (*(f"MONAI's {one}" for one in sorted(_LOSSES)), *(f"torch.nn.{one}" for one in sorted(_OF_TORCH)))
        findings.wrong(joined(key, "_target_"), f"must be one of {', '.join(names)}")
        return None
    defaults, loss = table[name]
    given, smoothing = Given(part, defaults, key, findings), 0.0
    if torch:
        given.must("reduction", "mean", why="must be mean, as a task takes it over a patient's examples")
        smoothing = _smoothing(given) if name == "CrossEntropyLoss" else 0.0
    else:
        for word in ("to_onehot_y", "softmax"):
            given.must(word, True, why="must be true: a task's masks give each pixel one class")
        for word in _OVERLAP:
            given.value(word)
        findings.otherwise(key, _DICE)
    given.end()
    if len(findings.problems) > before:
        return None
    return BundleLoss(loss.kinds, loss.name, smoothing)


def _smoothing(given: Given) -> float:
    value = given.value("label_smoothing")
    if type(value) in (int, float) and 0 <= value <= 1:
        return float(value)
    given.wrong("label_smoothing", "must be a number from 0 to 1")
    return 0.0
