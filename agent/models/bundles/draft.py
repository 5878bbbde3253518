"""A foreign bundle as the draft of a task file: what is on the lists is taken, what a person must know stays open.

Nothing is guessed. Classes, tables, a public bound on patients, and a modality that the bundle does not name are
given, or stand in the draft as comments, and ``task check`` refuses it
by their keys until somebody has filled them in.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agent.models.bundles.components import (
    BundleLoss,
    BundleNetwork,
    Findings,
    loss_of_bundle,
    network_of_bundle,
)
from agent.models.bundles.configuration import (
    SEPARATOR,
    BundleError,
    BundleFolder,
    Configuration,
    Json,
    expressions,
    is_expression,
    joined,
    shown,
)
from agent.models.bundles.preprocessing import BundleInput, input_of_bundle
from policies.tasks.bounds import TaskError
from policies.tasks.task import CLASSIFICATION, LOSSES, MULTI_LABEL, REGRESSION, SEGMENTATION, task_from_table
from protos.common.text import count

_NETWORK: Final = ("network_def", "network", "net")
_LOSS: Final = ("loss", "loss_function")
_LISTS: Final = ("train::deterministic_transforms", "train::random_transforms")
_COMPOSED: Final = ("train::preprocessing", "preprocessing")
_INSIDE: Final = ("train", "validate", "evaluate")  # whose parts are listed one by one
_MODALITIES: Final = frozenset(("CR", "CT", "DX", "IO", "MG", "MR", "NM", "OP", "OT", "PT", "RF", "US", "XA"))
_LISTED: Final = 3  # expressions of one part
_LARGEST: Final = 1 << 20  # pixels a side; a task's own bound is narrower
_ROUND: Final = 128  # pixels a side, which every network can take


@dataclass(frozen=True, slots=True)
class Answers:
    """What a person says of the task; what is empty stays open."""

    name: str = ""
    kind: str = ""
    modality: str = ""
    size: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    table: str = ""
    columns: tuple[str, ...] = ()
    public_patients: int = 0
    weights: str = ""  # SHA-256 of the converted file; "": from the seed


@dataclass(frozen=True, slots=True)
class TaskDraft:
    """A task file, and what became of the rest of the bundle."""

    text: str
    open_keys: tuple[str, ...]  # that a person must fill in
    notes: tuple[str, ...]  # what a task does otherwise, each with its key
    left_out: tuple[str, ...]  # each with its key and reason
    batch_norms: bool  # which stand as fixed scales and shifts where the weights come along


@dataclass(frozen=True, slots=True)
class _Taken:
    network: BundleNetwork
    loss: BundleLoss | None
    seen: BundleInput
    keys: tuple[str, ...]  # of the configuration


def draft_of(bundle: BundleFolder, answers: Answers, config: str = "") -> TaskDraft:
    """The draft of a task.

    Args:
        bundle: as its folder was read.
        answers: by a person.
        config: the name of the configuration, such as "inference"; "": "train", else "inference".
    Raises:
        BundleError: a network, a loss or a transform is not on the lists, or hangs on an expression; with every key.
    """
    name = config or next((one for one in ("train", "inference") if one in bundle.configs), "")
    if name not in bundle.configs:
        raise BundleError(f"configs/{shown(name or 'train')}: not in the bundle")
    source, findings = Configuration(bundle.configs[name]), Findings()
    taken = _taken(source, findings)
    if findings.problems or taken is None:
        raise BundleError(*(f"{name}: {problem}" for problem in findings.problems))
    seen = _image_format(bundle.configs.get("metadata", {}))
    text, missing = _written(bundle.name, taken, answers, seen, findings)
    _try(text, missing, taken)
    if taken.network.batch_norms:
        stands = "fixed scales and shifts (fixed_norms = 1)" if answers.weights else "group norms, not yet trained"
        findings.otherwise(taken.keys[0], f"its batch norms, which mix patients, stand as {stands}")
    left_out = tuple(_left_out(source.whole, (*taken.keys, *source.followed)))
    return TaskDraft(text, tuple(missing), tuple(findings.notes), left_out, taken.network.batch_norms)


def _taken(source: Configuration, findings: Findings) -> _Taken | None:
    key = next((one for one in _NETWORK if one in source.whole), "")
    if not key:
        raise BundleError("network_def: missing")
    network = network_of_bundle(_part(source, key, findings), key, findings)
    loss, loss_key = None, next((one for one in _LOSS if one in source.whole), "")
    if loss_key:
        loss = loss_of_bundle(_part(source, loss_key, findings), loss_key, findings)
    listed, keys = _listed(source, findings)
    seen = input_of_bundle(listed, network.dimensions if network else 2, findings)
    if network and loss and not any((one == SEGMENTATION) is network.masks for one in loss.kinds):
        findings.wrong(loss_key, "of another kind of task than the network")
    return _Taken(network, loss, seen, (key, *filter(None, [loss_key]), *keys)) if network else None


def _part(source: Configuration, key: str, findings: Findings) -> Json:
    try:
        return source.part(key)
    except BundleError as error:
        findings.problems += error.problems
        return "$"


def _listed(source: Configuration, findings: Findings) -> tuple[list[tuple[str, Json]], tuple[str, ...]]:
    """Every transform with its key; and the keys of the lists."""
    keys = tuple(key for key in _LISTS if source.has(key))
    if not keys:
        key = next((one for one in _COMPOSED if source.has(one)), "")
        if not key:
            return [], ()
        part = _part(source, key, findings)
        inner = part.get("transforms") if isinstance(part, dict) else part
        where = joined(key, "transforms") if isinstance(part, dict) else key
        return _numbered(inner, where, findings), (key,)
    return [one for key in keys for one in _numbered(_part(source, key, findings), key, findings)], keys


def _numbered(part: Json, key: str, findings: Findings) -> list[tuple[str, Json]]:
    if isinstance(part, list):
        return [(joined(key, str(at)), one) for at, one in enumerate(part)]
    if not is_expression(part) or part != "$":  # what a reference said already is not said again
        findings.wrong(key, "must be a list of transforms; expressions are never run")
    return []


def _left_out(whole: Mapping[str, Json], keys: tuple[str, ...]) -> Iterator[str]:
    """Every other part, with its reason."""
    parts: dict[str, Json] = {}
    for name, value in whole.items():
        inside = value if name in _INSIDE and isinstance(value, dict) else None
        parts |= {name: value} if inside is None else {joined(name, one): part for one, part in inside.items()}
    for key, value in parts.items():
        if key in keys:
            continue
        found = expressions(value, key)
        if found == [key]:
            yield f"{shown(key)}: an expression, which is never run"
        elif found:
            more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            named = ", ".join(shown(one.removeprefix(key + SEPARATOR)) for one in found[:_LISTED])
            yield f"{shown(key)}: a task has no such part; expressions in it, which are never run: {named}{more}"
        else:
            yield f"{shown(key)}: a task has no such part"


# -- what metadata.json says of the image


def _image_format(metadata: Mapping[str, Json]) -> Mapping[str, Json]:
    """Of the first input, with the outputs' classes beside it; {}: it says nothing of that form."""
    found: Json = metadata.get("network_data_format")
    inputs = found.get("inputs") if isinstance(found, dict) else None
    image = next(iter(inputs.values()), None) if isinstance(inputs, dict) else None
    if isinstance(image, dict) and not isinstance(image.get("modality"), str | None):
        raise BundleError("metadata: network_data_format::inputs: modality must be a text, such as CT")
    outputs = found.get("outputs") if isinstance(found, dict) else None
    pred = next(iter(outputs.values()), None) if isinstance(outputs, dict) else None
    classes = pred.get("channel_def") if isinstance(pred, dict) else None
    return {**(image if isinstance(image, dict) else {}), "classes": classes}


def _shape(image: Mapping[str, Json], dimensions: int) -> tuple[int, ...]:
    """In a task's order of axes; of patches nothing follows."""
    shape = image.get("spatial_shape")
    if image.get("is_patch_data") is True or not isinstance(shape, list) or len(shape) != dimensions:
        return ()
    return tuple(shape[::-1]) if all(type(side) is int and 0 < side < _LARGEST for side in shape) else ()


# -- the file


def _written(
    folder: str, taken: _Taken, answers: Answers, image: Mapping[str, Json], findings: Findings
) -> tuple[str, list[str]]:
    """The text, and the keys that are open."""
    network, loss, seen = taken.network, taken.loss, taken.seen
    missing: list[str] = []

    def line(section: str, key: str, value: object, hint: str) -> str:
        if value:
            return f"{key} = {_toml(value)}"
        missing.append(f"{section}.{key}")
        return f"# {key} =  # fill in: {hint}"

    kinds = loss.kinds if loss else tuple(LOSSES)
    fitting = [kind for kind in kinds if (kind == SEGMENTATION) is network.masks]
    kind = answers.kind or (fitting[0] if len(fitting) == 1 else "")
    told = image.get("modality")
    modality = answers.modality or (told if told in _MODALITIES else "")
    size = answers.size or seen.size or _shape(image, network.dimensions) or network.size[::-1]
    name = answers.name or re.sub(r"[^a-z0-9_-]+", "-", folder.lower()).strip("-_")[:64]
    lines = ["[task]", line("task", "name", name, "a short lower-case name")]
    lines += [line("task", "kind", kind, "one of " + ", ".join(fitting)), "", "[labels]"]
    lines += _labels(kind, network, answers, image, line)
    dimensions = "(k, h, w)" if network.dimensions == 3 else "(h, w)"
    lines += ["", "[input]", line("input", "modality", modality, f"a DICOM code{_said(told)}")]
    lines += [line("input", "size", size, dimensions)]
    lines += [f"channels = {network.channels}"] if network.channels != 1 else []
    lines += [f"{key} = {_toml(value)}" for key in ("spacing", "window") if (value := getattr(seen, key))]
    lines += _transforms("transforms", seen.transforms)
    if loss:
        lines += ["", "[loss]", f"name = {_toml(loss.name)}"]
        lines += [f"smoothing = {loss.smoothing}"] if loss.smoothing else []
    hint = "a public bound on the patients of a site, never a count"
    lines += ["", "[training]", line("training", "public_patients", answers.public_patients, hint)]
    lines += _transforms("augmentation", seen.augmentation)
    options = dict(network.options)
    if answers.weights and network.batch_norms:
        options["fixed_norms"] = 1
    lines += ["", "[network]", f"name = {_toml(network.name)}"]
    lines += [f"weights = {_toml(answers.weights)}"] if answers.weights else []
    lines += ["", "[network.options]", *(f"{key} = {value}" for key, value in options.items())]
    if seen.dimensions == 3 and answers.weights:
        findings.otherwise(
            "weights", "a task's volumes run from the feet, the back and the left: the start sees others"
        )
    return "\n".join(lines) + "\n", missing


def _labels(kind: str, network: BundleNetwork, answers: Answers, image: Mapping[str, Json], line: Any) -> list[str]:
    told, wanted = image.get("classes"), count(network.outputs - network.masks, "name")
    names = [one for one in told.values() if isinstance(one, str)] if isinstance(told, dict) else []
    hint = f"{wanted}, in the order of the outputs{_said(', '.join(names[network.masks :]))}"
    given = {"table": answers.table, "columns": answers.columns, "classes": answers.classes}
    lines = [f"{key} = {_toml(value)}" for key, value in given.items() if value]
    wanted_keys = {MULTI_LABEL: ("table", "columns"), REGRESSION: ("table", "columns")}.get(kind, ("classes",))
    lines += [
        line("labels", key, "", "the imported label table" if key == "table" else hint)
        for key in wanted_keys
        if not given[key]
    ]
    bounds = ("low", "high") if kind == REGRESSION else ()
    return [*lines, *(line("labels", key, "", "a public bound of each column") for key in bounds)]


def _said(text: object) -> str:
    """A hint of the bundle's own, in a comment."""
    return f"; the bundle says {shown(text)!r}" if isinstance(text, str) and text else ""


def _transforms(key: str, specs: list[Any]) -> list[str]:
    tables = [spec.to_table() for spec in specs]
    return [f"{key} = [", *(f"  {_toml(table)}," for table in tables), "]"] if tables else []


def _toml(value: object) -> str:
    """A value of JSON's types; JSON's texts are TOML's."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _try(text: str, missing: list[str], taken: _Taken) -> None:
    """Refuse what no filling in could mend: with anything that fits in what is open, it must be a task.

    Raises:
        BundleError: with every problem, by the key of the task.
    """
    network, values = taken.network, tomllib.loads(text)
    names = [f"n{at}" for at in range(network.outputs - network.masks)]
    fits: Mapping[str, Any] = {
        "task.name": "n",
        "task.kind": SEGMENTATION if network.masks else CLASSIFICATION,
        "labels.table": "n",
        "labels.columns": names,
        "labels.classes": names,
        "labels.low": [0.0] * len(names),
        "labels.high": [1.0] * len(names),
        "input.modality": "OT",
        "input.size": [_ROUND] * network.dimensions,
        "training.public_patients": 1000,
    }
    for key in missing:
        section, name = key.split(".")
        values[section][name] = fits[key]
    try:
        task = task_from_table(values)
    except TaskError as error:
        raise BundleError(*(f"as a task: {problem}" for problem in error.problems)) from None
    if task.outputs != network.outputs:
        raise BundleError(f"as a task: labels: {count(len(names), 'name')}, one for each output, and not others")
