"""A finished model as an inference bundle of MONAI: plain classes of MONAI and torch, and no word of this package.

A task's network is one of MONAI's with other norms, so that ``network_def`` names MONAI's class and an expression of
the bundle swaps them, as :func:`agent.models.networks.architectures.swap_batch_norms` does. What was trained, LoRA
and the linear layer on frozen features are merged into the weights. The expressions of the preprocessing are the
formulas of :mod:`agent.field_of_view` and :mod:`agent.volumes.grid`, an axis at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from agent.models.networks.architectures import EPSILON, MOST_GROUPS, FixedAffine, StagedNetwork
from agent.models.networks.low_rank import LowRank
from agent.models.networks.trainable import AboutZero, SideBySide, TrainableNetwork
from agent.models.transforms import monai_arguments, monai_class
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import CLASSIFICATION, MULTI_LABEL, REGRESSION, SEGMENTATION, Task
from policies.tasks.transforms import TransformSpec
from protos.common.errors import ConfigError

Json = Any
_LAYERS: Final[Mapping[type[nn.Module], tuple[str, ...]]] = {  # and their arguments
    nn.AdaptiveAvgPool2d: ("output_size",),
    nn.AdaptiveAvgPool3d: ("output_size",),
    nn.Conv2d: ("in_channels", "out_channels", "kernel_size", "padding"),
    nn.Conv3d: ("in_channels", "out_channels", "kernel_size", "padding"),
    nn.Flatten: ("start_dim",),
    nn.GroupNorm: ("num_groups", "num_channels", "eps"),
    nn.Linear: ("in_features", "out_features"),
    nn.MaxPool2d: ("kernel_size",),
    nn.MaxPool3d: ("kernel_size",),
    nn.ReLU: (),
}
_SWAPPED: Final = (
    "$[monai.networks.utils.replace_modules(@network_def, name, torch.nn.GroupNorm("
    f"math.gcd({MOST_GROUPS}, norm.num_features), norm.num_features, norm.eps)) "
    "for name, norm in list(@network_def.named_modules()) "
    "if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm)]"
)
_FIRST: Final = "$@network_def.register_forward_hook(lambda module, given, found: found[0])"
# In MONAI's expressions an @ is a reference, and never a product of matrices.
# Means over `count` equal intervals of `length` pixels, as a matrix (count, length).
_AREA: Final = (
    "$lambda count, length: (lambda low, at: (torch.minimum(low + length / count, at + 1) - torch.maximum(low, at))"
    ".clamp(min=0) * count / length)(torch.arange(count, dtype=torch.float64)[:, None] * length / count, "
    "torch.arange(length, dtype=torch.float64)[None])"
)
_FIT: Final = (
    "$lambda image: (lambda tall, wide: monai.data.MetaTensor(torch.einsum('hy,cyx,wx->chw', @area({0}, tall), "
    "image.as_tensor()[:, (image.shape[1] - tall) // 2:(image.shape[1] - tall) // 2 + tall, "
    "(image.shape[2] - wide) // 2:(image.shape[2] - wide) // 2 + wide].double(), @area({1}, wide)), "
    "meta=image.meta))(*[min(round(side * min(image.shape[1] / {0}, image.shape[2] / {1})), there) "
    "for side, there in zip(({0}, {1}), image.shape[1:])])"
)
# A box as wide as a new voxel, then linear between two old ones, around the same centre, as a matrix (count, length).
_AXIS: Final = (
    "$lambda count, length, step: (lambda old, new: torch.matmul((1 - (new - old).abs()).clamp(min=0), "
    "((max(step, 1.0) + 1) / 2 - (old.T - old).abs()).clamp(0, 1) / max(step, 1.0)))"
    "(torch.arange(length, dtype=torch.float64)[None], (length - 1) / 2 + "
    "(torch.arange(count, dtype=torch.float64)[:, None] - (count - 1) / 2) * step)"
)
_STEPS: Final = "$lambda image: [length / count for length, count in zip(image.shape[1:], {0})]"
_STEPS_MM: Final = "$lambda image: [mm / float(edge) for mm, edge in zip({1}, image.pixdim)]"
_PLACE: Final = (
    "$lambda image, steps: torch.matmul(image.affine, torch.tensor([[step * (row == axis) for axis in range(3)] + "
    "[(length - 1) / 2 - (count - 1) / 2 * step] for row, (step, length, count) in "
    "enumerate(zip(steps, image.shape[1:], {0}))] + [[0, 0, 0, 1]], dtype=torch.float64))"
)
_RESAMPLE: Final = (
    "$lambda image: (lambda steps: monai.data.MetaTensor(torch.einsum('cabd,ka,hb,wd->ckhw', "
    "image.as_tensor().double(), *[@axis(count, length, step) for count, length, step in "
    "zip({0}, image.shape[1:], steps)]), affine=@place(image, steps), meta=image.meta))(@steps(image))"
)
_LOWEST, _HIGHEST = 0.5, 99.5  # percentiles that become 0 and 1: agent.storage.example_pixels
_ON_THE_VAULT: Final = {"_target_": "EnsureTyped", "keys": "image", "dtype": "$torch.float32"}


class NoBundleError(ConfigError, ValueError):
    """The model cannot be said in MONAI's words; the text names the key of the task."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainNetwork:
    """A network in MONAI's and torch's own classes."""

    parts: Mapping[str, Json]  # of inference.json: "network_def", and what it needs beside it
    state: Mapping[str, Tensor] = field(repr=False)  # its ``state_dict``


def plain_network(task: Task, network: TrainableNetwork) -> PlainNetwork:
    """The trained network.

    Args:
        task: that it was trained for.
        network: with its trained numbers loaded.
    Raises:
        NoBundleError: it has several parts, or a head of each site's own.
    """
    if task.training.head == "own":
        raise NoBundleError("training.head: own: each site keeps a head of its own, so that no bundle has the whole")
    module, spec = network.module, task.network
    state = _merged(module)
    if isinstance(module, SideBySide):
        if len(module.networks) != 1:
            raise NoBundleError("network.parts: MONAI has no class for several networks side by side: use one part")
        layer, (moved,) = module.net, module.moved
        (module,), (spec,) = module.networks, spec.parts
        state = _merged(module) | _with_head(module, layer, moved)
    if isinstance(module.net, nn.Sequential):
        return _sequence(module.net, state)
    parts: dict[str, Json] = {"network_def": _definition(task, spec)}
    before = []
    if spec.name in ("resnet18", "resnet50", "densenet121") and not spec.options["fixed_norms"]:
        parts["group_norms"] = _SWAPPED
        before.append("@group_norms")
    if spec.name == "vit-s16":
        parts["first_output"] = _FIRST
        before.append("@first_output")
    parts["network"] = f"$({', '.join([*before, '@network_def.to(@device)'])},)[-1]"
    return PlainNetwork(parts, state)


def _merged(module: StagedNetwork) -> dict[str, Tensor]:
    """As MONAI's own class has the tensors: LoRA in its layers, fixed scales and shifts as batch norms."""
    state = {name: tensor.detach().cpu().clone() for name, tensor in module.net.state_dict().items()}
    for name, one in module.net.named_modules():
        if isinstance(one, LowRank):
            merged = _added(one)
            state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.")}
            state |= {f"{name}.{key}": tensor for key, tensor in merged.items()}
        elif isinstance(one, FixedAffine):
            count = len(one.weight)
            state |= {
                f"{name}.running_mean": torch.zeros(count),
                f"{name}.running_var": torch.full((count,), 1 - EPSILON),
            }
            state[f"{name}.num_batches_tracked"] = torch.tensor(0)
        elif name.endswith("norm_cross_attn"):  # of MONAI's ViT, which never calls it
            width = len(state[f"{name.removesuffix('norm_cross_attn')}norm1.weight"])
            state |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}
    return state


def _added(one: LowRank) -> dict[str, Tensor]:
    """W + B A, and the bias."""
    layer: Any = one.layer
    narrow: tuple[Any, Any] = one.down, one.up
    down, up = (part.weight.detach().double().cpu() for part in narrow)
    more = (up.flatten(1) @ down.flatten(1)).reshape(layer.weight.shape)
    made = {"weight": (layer.weight.detach().double().cpu() + more).float()}
    return made if layer.bias is None else made | {"bias": layer.bias.detach().cpu().clone()}


def _with_head(module: StagedNetwork, layer: nn.Linear, moved: nn.Module) -> dict[str, Tensor]:
    """The linear layer on features as the network's own head: W T (f - m) + b = (W T) f + (b - W T m)."""
    weight, bias = layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu()
    if isinstance(moved, AboutZero):
        weight = weight @ moved.turn.double().cpu().T
        bias = bias - weight @ moved.means.double().cpu()
    head = {id(one): name for name, one in module.head.named_parameters()}
    names = {head[id(one)]: key for key, one in module.net.named_parameters() if id(one) in head}
    return {names["weight"]: weight.float(), names["bias"]: bias.float()}


def _sequence(net: nn.Sequential, state: Mapping[str, Tensor]) -> PlainNetwork:
    """A network of our own: its layers in a row."""
    layers, renamed = [], {}
    for at, (name, layer) in enumerate(_flat(net, "")):
        given = {key: getattr(layer, key) for key in _LAYERS[type(layer)]}
        layers.append({"_target_": f"torch.nn.{type(layer).__name__}", **given})
        for key in layer.state_dict():
            renamed[f"{at}.{key}"] = state[f"{name}{key}"]
            if isinstance(layer, nn.Linear):
                layers[-1]["out_features"] = len(state[f"{name}{key}"])
    parts = {
        "layers": layers,
        "network_def": "$torch.nn.Sequential(*@layers)",
        "network": "$@network_def.to(@device)",
    }
    return PlainNetwork(parts, renamed)


def _flat(net: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for key, layer in net.named_children():
        if isinstance(layer, nn.Sequential):
            yield from _flat(layer, f"{name}{key}.")
        else:
            yield f"{name}{key}.", layer


def _definition(task: Task, spec: NetworkSpec) -> dict[str, Json]:
    """MONAI's class and its arguments, as :mod:`agent.models.networks.architectures` builds it."""
    o, seen = spec.options, task.input
    dimensions, channels, outputs = len(seen.size), seen.channels, task.outputs
    ends = {"spatial_dims": dimensions, "in_channels": channels, "out_channels": outputs}
    if spec.name.startswith("resnet"):
        block, layers = ("basic", [2, 2, 2, 2]) if spec.name == "resnet18" else ("bottleneck", [3, 4, 6, 3])
        widths = [o["width"] << stage for stage in range(4)]
        sizes = {"block": block, "layers": layers, "block_inplanes": widths, "conv1_t_stride": o["stride"]}
        given = {"spatial_dims": dimensions, "n_input_channels": channels, "num_classes": outputs}
        return {"_target_": "ResNet", **given, **sizes}
    if spec.name == "densenet121":
        return {"_target_": "DenseNet", **ends, "init_features": 2 * o["growth"], "growth_rate": o["growth"]}
    if spec.name == "vit-s16":
        sizes = {"img_size": list(seen.size), "patch_size": o["patch"], "hidden_size": o["width"]}
        sizes |= {"mlp_dim": 4 * o["width"], "num_layers": o["layers"], "num_heads": o["heads"]}
        given = {"in_channels": channels, "classification": True, "num_classes": outputs, "spatial_dims": dimensions}
        return {"_target_": "ViT", **given, **sizes, "post_activation": "", "qkv_bias": True}
    levels = o["levels"]
    if spec.name == "unet":
        widths = [o["width"] << level for level in range(levels)]
        return {
            "_target_": "UNet", **ends,
            "channels": widths, "strides": [2] * (levels - 1), "num_res_units": o["units"],
        }  # fmt: skip
    assert spec.name == "segresnet"
    down = [1, *[2] * (levels - 2), 4] if levels > 2 else [1, 2]
    return {
        "_target_": "SegResNet", **ends,
        "init_filters": o["width"], "blocks_down": down, "blocks_up": [1] * (levels - 1),
    }  # fmt: skip


# -- configs/inference.json


def inference(task: Task, network: PlainNetwork) -> dict[str, Json]:
    """The configuration that ``python -m monai.bundle run`` takes.

    Raises:
        NoBundleError: an example of the task is not one file, or a picture's file does not say what the task needs.
    """
    flat = len(task.input.size) == 2
    return {
        "imports": ["$import glob", "$import math", "$import os", "$import torch", "$import monai"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "pattern": "*.png" if flat else "*.nii.gz",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        **network.parts,
        **(_of_pictures(task) if flat else _of_volumes(task)),
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': one} for one in sorted(glob.glob(os.path.join(@dataset_dir, @pattern)))]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "shuffle": False},
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {"_target_": "Compose", "transforms": _after(task)},
        "handlers": _handlers(task),
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "initialize": ["$os.makedirs(@output_dir, exist_ok=True)"],
        "run": ["$@evaluator.run()"],
    }


def _of_pictures(task: Task) -> dict[str, Json]:
    """PNG: the centred part of the size's proportions, averaged by area."""
    seen = task.input
    if seen.example == "study":
        raise NoBundleError("input.example: study: a bundle takes one file for each example")
    if seen.window or seen.spacing:
        raise NoBundleError("input.window, spacing: a PNG does not say stored values and millimetres")
    mode = "RGB" if seen.channels == 3 else "L"
    reader = f"$monai.data.PILReader(reverse_indexing=False, converter=lambda picture: picture.convert('{mode}'))"
    channel = -1 if seen.channels == 3 else "no_channel"
    scaled = {"a_min": 0.0, "a_max": 255.0, "b_min": 0.0, "b_max": 1.0, "clip": True}
    steps = [
        {"_target_": "LoadImaged", "keys": "image", "reader": reader},
        {"_target_": "EnsureChannelFirstd", "keys": "image", "channel_dim": channel},
        {"_target_": "ScaleIntensityRanged", "keys": "image", **scaled},
        {"_target_": "Lambdad", "keys": "image", "func": "@fit"},
        _ON_THE_VAULT,
    ]
    return {"area": _AREA, "fit": _FIT.format(*seen.size), "preprocessing": _composed(task, steps)}


def _of_volumes(task: Task) -> dict[str, Json]:
    """NIfTI: from the feet, the front and the right, windowed, and resampled around the centre."""
    seen = task.input
    if seen.window:
        low, high = seen.window
        name, values = "ScaleIntensityRanged", {"a_min": low, "a_max": high}
    else:
        name, values = "ScaleIntensityRangePercentilesd", {"lower": _LOWEST, "upper": _HIGHEST}
    steps = [
        {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader"},
        {"_target_": "EnsureChannelFirstd", "keys": "image", "channel_dim": "no_channel"},
        {
            "_target_": "Orientationd",
            "keys": "image",
            "axcodes": "SPL",
            "labels": [["L", "R"], ["P", "A"], ["I", "S"]],
        },
        {"_target_": name, "keys": "image", **values, "b_min": 0.0, "b_max": 1.0, "clip": True},
        {"_target_": "Lambdad", "keys": "image", "func": "@resample"},
        _ON_THE_VAULT,
    ]
    size, millimetres = repr(list(seen.size)), repr(list(seen.spacing))
    return {
        "axis": _AXIS,
        "steps": (_STEPS_MM if seen.spacing else _STEPS).format(size, millimetres),
        "place": _PLACE.format(size),
        "resample": _RESAMPLE.format(size),
        "preprocessing": _composed(task, steps),
    }


def _composed(task: Task, steps: list[Json]) -> dict[str, Json]:
    dimensions = len(task.input.size)
    return {"_target_": "Compose", "transforms": steps + [_step(one, dimensions) for one in task.input.transforms]}


def _step(spec: TransformSpec, dimensions: int) -> dict[str, Json]:
    given = monai_arguments(spec, dimensions, with_mask=False)
    if spec.name == "CropForeground":
        given |= {"source_key": "image", "select_fn": f"$lambda image: image > {given.pop('threshold')!r}"}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    return {"_target_": monai_class(spec.name).__name__, "keys": "image", **values}


def _after(task: Task) -> list[Json]:
    if task.kind == SEGMENTATION:
        flat = len(task.input.size) == 2
        turned = [{"_target_": "Transposed", "keys": "pred", "indices": [0, 2, 1]}] if flat else []  # PIL's (w, h)
        saved = {"output_dir": "@output_dir", "output_postfix": "mask", "output_ext": ".png" if flat else ".nii.gz"}
        return [
            {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
            *turned,
            {
                "_target_": "SaveImaged", "keys": "pred", **saved,
                "output_dtype": "$__import__('numpy').uint8", "resample": False, "separate_folder": False,
            },
        ]  # fmt: skip
    if task.kind == REGRESSION:
        low, high = (f"torch.tensor({list(one)!r})" for one in (task.labels.low, task.labels.high))
        func = f"$lambda share: {low} + share.cpu() * ({high} - {low})"
        return [{"_target_": "Lambdad", "keys": "pred", "func": func}]
    assert task.kind in (CLASSIFICATION, MULTI_LABEL)
    how = {"softmax": True} if task.kind == CLASSIFICATION else {"sigmoid": True}
    return [{"_target_": "Activationsd", "keys": "pred", **how}]


def _handlers(task: Task) -> list[Json]:
    path = "$@bundle_root + '/models/model.pt'"
    loaded = {"load_path": path, "load_dict": {"model": "@network"}, "map_location": "@device"}
    handlers: list[Json] = [{"_target_": "CheckpointLoader", **loaded}]
    if task.kind != SEGMENTATION:
        handlers.append(
            {
                "_target_": "ClassificationSaver",
                "output_dir": "@output_dir",
                "filename": "predictions.csv",
                "batch_transform": "$lambda batch: [one['image'].meta for one in batch]",
                "output_transform": "$monai.handlers.from_engine(['pred'])",
            }
        )
    return handlers


# -- configs/metadata.json


def metadata(task: Task, versions: Mapping[str, str], said: Mapping[str, Json]) -> dict[str, Json]:
    """What MONAI's schema of metadata asks for, and what this model promises under a key of its own.

    Args:
        task: that it was trained for.
        versions: of monai, pytorch, numpy, nibabel, pillow and ignite.
        said: of the model: ``hospitals`` such as "1 hospital", ``intended_use``, ``licence``, ``evaluation``, and
            ``lazaret`` for the last key.
    """
    seen, segments = task.input, task.kind == SEGMENTATION
    names = list(task.labels.classes or task.labels.columns)
    classes = dict(enumerate(["background", *names] if segments else names))
    shape = list(seen.size)
    common = {"dtype": "float32", "is_patch_data": False}
    image = {"type": "image", "format": "magnitude", "modality": seen.modality, "num_channels": seen.channels}
    channels = ["red", "green", "blue"] if seen.channels == 3 else ["image"]
    inputs = {**image, **common, "spatial_shape": shape, "value_range": [0, 1]}
    kind = {"type": "image", "format": "segmentation"} if segments else {"type": "probabilities", "format": "classes"}
    outputs = {**kind, **common, "num_channels": task.outputs, "spatial_shape": shape if segments else [1]}
    reads = {"pillow": versions["pillow"]} if len(shape) == 2 else {"nibabel": versions["nibabel"]}
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
        "meta_schema_20240725.json",
        "version": "1.0.0",
        "changelog": {"1.0.0": "trained and exported"},
        "monai_version": versions["monai"],
        "pytorch_version": versions["pytorch"],
        "numpy_version": versions["numpy"],
        "required_packages_version": {"pytorch-ignite": versions["ignite"], **reads},
        "name": task.name,
        "task": f"{task.kind} of {seen.modality} {seen.body_part}".strip(),
        "description": f"{task.network.name}, trained on patients' images of {said['hospitals']}, which stayed there",
        "authors": "see docs/README.md",
        "copyright": "see LICENSE",
        "data_source": "patients' images, which never left their hospitals",
        "data_type": "png" if len(shape) == 2 else "nifti",
        "image_classes": "the axes of spatial_shape are (h, w), or (feet to head, front to back, right to left)",
        "pred_classes": ", ".join(f"{number}: {name}" for number, name in classes.items()),
        "eval_metrics": said["evaluation"],
        "intended_use": said["intended_use"],
        "license": said["licence"],
        "references": [],
        "network_data_format": {
            "inputs": {"image": {**inputs, "channel_def": {str(at): name for at, name in enumerate(channels)}}},
            "outputs": {
                "pred": {**outputs, "value_range": [0, 1], "channel_def": {str(at): n for at, n in classes.items()}}
            },
        },
        "lazaret": said["lazaret"],
    }
