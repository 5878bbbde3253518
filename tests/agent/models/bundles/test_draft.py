"""Bundles of the published form become drafts of tasks; nothing is guessed, and nothing in them is ever run."""

from __future__ import annotations

import copy
import gc
import hashlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.networks.nets.densenet import DenseNet121
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unet import UNet

from agent.mechanisms.federated.task_training import network_of
from agent.models.bundles.configuration import BundleError, BundleFolder, read_bundle
from agent.models.bundles.draft import Answers, draft_of
from agent.models.networks.conversion import WeightsConversion
from policies.tasks.task import Task, TaskError, task_from_toml
from tests.support.monai_bundles import BUNDLES, classification, deep_segmentation, flat_segmentation, write_bundle

ANSWERS = {
    "classification": Answers(modality="DX", classes=("a", "b", "c", "d"), public_patients=100),
    "flat_segmentation": Answers(classes=("lesion",), public_patients=100),
    "deep_segmentation": Answers(classes=("spleen",), public_patients=100),
}
OPEN = {
    "classification": ("labels.classes", "input.modality", "training.public_patients"),
    "flat_segmentation": ("labels.classes", "training.public_patients"),
    "deep_segmentation": ("labels.classes", "training.public_patients"),
}
NETWORKS = {
    "classification": lambda: DenseNet121(2, 1, 4),
    "flat_segmentation": lambda: UNet(2, 1, 2, (8, 16, 32), (2, 2), num_res_units=2),
    "deep_segmentation": lambda: SegResNet(3, 8, 1, 2, blocks_down=(1, 2, 4), blocks_up=(1, 1)),
}
Changed = dict[str, dict[str, Any]]


def folder_of(configs: Changed) -> BundleFolder:
    return BundleFolder("made", configs, None)


def refusals(configs: Changed, answers: Answers | None = None) -> list[str]:
    with pytest.raises(BundleError) as refused:
        draft_of(folder_of(configs), answers or Answers())
    return list(refused.value.problems)


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("form", ["json", "yaml"])
def test_a_bundle_is_a_draft_with_open_keys_and_with_answers_a_task(tmp_path: Path, name: str, form: str) -> None:
    bundle = read_bundle(write_bundle(tmp_path / name, BUNDLES[name](), form=form))
    draft = draft_of(bundle, Answers())
    assert draft.open_keys == OPEN[name]
    with pytest.raises(TaskError) as refused:
        task_from_toml(draft.text, "")
    told = {problem.partition(":")[0] for problem in refused.value.problems}
    assert told <= set(OPEN[name])
    assert {"input.modality", "training.public_patients"} & set(OPEN[name]) <= told
    whole = draft_of(bundle, ANSWERS[name])
    assert whole.open_keys == ()
    task = task_from_toml(whole.text, "")
    network = network_of(task, {}.__getitem__)
    published = NETWORKS[name]()
    own = {key: tensor.shape for key, tensor in network.module.net.state_dict().items()}
    kept = {key: tensor.shape for key, tensor in published.named_parameters()}
    assert own == kept, "the tensors of the published file are those of the task's network"


def _task(name: str) -> Task:
    return task_from_toml(draft_of(folder_of(BUNDLES[name]()), ANSWERS[name]).text, "")


def test_what_a_bundle_says_of_the_input_is_in_the_order_of_a_tasks_axes() -> None:
    flat, deep = _task("classification"), _task("deep_segmentation")
    assert (flat.input.size, flat.training.augmentation[0].parameters["spatial_axis"]) == ((48, 64), 1)
    assert flat.training.augmentation[0].parameters["prob"] == 0.1, "MONAI's own, and not a task's"
    assert (flat.loss.name, flat.loss.smoothing) == ("cross-entropy", 0.1)
    seen = deep.input
    assert (seen.size, seen.spacing, seen.window) == ((16, 24, 32), (2.0, 1.5, 1.5), (-57.0, 164.0))
    assert seen.transforms == ()
    flip, affine = deep.training.augmentation
    assert flip.parameters["spatial_axis"] == 0
    assert affine.parameters["rotate_range"] == (0.3, 0.2, 0.1)
    assert affine.parameters["translate_range"] == (0.0, 0.0, 0.0), "MONAI moves nothing where nothing is said"


def test_expressions_beside_the_network_are_left_out_and_each_is_listed() -> None:
    draft = draft_of(folder_of(classification()), Answers())
    listed = {one.partition(":")[0] if "::" not in one else one.split(": ")[0] for one in draft.left_out}
    assert {
        "imports",
        "network",
        "optimizer",
        "train::preprocessing",
        "train::trainer",
        "validate::evaluator",
    } <= listed
    assert any("network_def" in one and "batch norms" in one for one in draft.notes)
    assert not any("train_items" in one for one in draft.left_out), "values are not quoted"
    assert "classes" not in listed, "it was taken where it is referred to"


def test_a_network_that_hangs_on_an_expression_is_refused_by_its_key() -> None:
    configs = classification()
    configs["train"]["network_def"]["in_channels"] = "$1 if True else 3"
    configs["train"]["classes"] = "$len(@names)"
    assert refusals(configs) == [
        "train: network_def::in_channels: an expression, which is never run: write the value",
        "train: network_def::out_channels: an expression, which is never run: write the value",
    ]
    configs["train"]["network_def"] = "$monai.networks.nets.DenseNet121(2, 1, 4)"
    assert refusals(configs) == ["train: network_def: an expression, which is never run: write the value"]


def test_an_unknown_transform_is_refused_by_name_and_so_are_unknown_arguments() -> None:
    configs = deep_segmentation()
    drawn = configs["train"]["train"]["random_transforms"]
    drawn.insert(0, {"_target_": "RandCropByPosNegLabeld", "keys": ["image", "label"], "num_samples": 4})
    fixed = configs["train"]["train"]["deterministic_transforms"]
    fixed[3]["align_corners"], fixed[4]["clip"] = True, False
    found = refusals(configs)
    keys = [one.split(": ")[1] for one in found]
    assert keys == [
        "train::deterministic_transforms::3::align_corners",
        "train::deterministic_transforms::4::clip",
        "train::random_transforms::0::_target_",
    ]


CHANGES = {
    "network_def::_target_": (
        "AttentionUnet",
        "os.system",
        "monai.networks.nets.made.deep.down.UNet",
        "torch.nn.UNet",
    ),
    "network_def::norm": ("batch", ["instance", {"affine": True}]),
    "network_def::channels": ([8, 16, 33], [], "8", [8.0, 16.0, 32.0]),
    "network_def::strides": ([2, 1], [2, 2, 2]),
    "network_def::num_res_units": (0, 2.0, True),
    "network_def::dropout": (0.1,),
    "network_def::in_channels": (4, None),
    "network_def::spatial_dims": (1, "2"),
    "network_def::made_up": (1,),
    "network_def::_mode_": ("debug", "callable"),
    "network_def::_disabled_": (True, "true"),
    "loss::_target_": ("torch.nn.NLLLoss", "CrossEntropyLoss", "FocalLoss", "builtins.print"),
    "loss::softmax": (False,),
    "loss::sigmoid": (True,),
    "loss::jaccard": (True,),
    "loss::weight": ([1.0, 2.0],),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_a_task_has_no_like_of_is_refused_by_its_key(key: str) -> None:
    for value in CHANGES[key]:
        configs = flat_segmentation()
        part, name = key.split("::")
        configs["inference"][part][name] = value
        found = refusals(configs)
        assert found, (key, value)
        assert any(one.startswith((f"inference: {key}:", f"inference: {part}:")) for one in found), (value, found)


def test_what_a_task_cannot_keep_of_a_loss_is_refused_and_never_dropped() -> None:
    for name, values in {
        "label_smoothing": ("0.3", None, True, [0.1], 10**400, -1, 0.9),
        "reduction": ("sum", "none", ["mean"], None),
    }.items():
        for value in values:
            configs = classification()
            configs["train"]["loss"][name] = value
            (found,) = refusals(configs)
            told = "as a task: loss.smoothing:" if value == 0.9 else f"train: loss::{name}: must be"
            assert found.startswith(told), (value, found)
    configs = classification()
    configs["train"]["loss"] |= {"reduction": "mean", "label_smoothing": 0}
    assert "[loss]\nname" in draft_of(folder_of(configs), Answers()).text


VIT = {
    "_target_": "ViT", "spatial_dims": 2, "in_channels": 1, "num_classes": 4, "img_size": 96, "patch_size": 16,
    "hidden_size": 64, "mlp_dim": 256, "num_layers": 2, "num_heads": 4, "classification": True, "qkv_bias": True,
    "post_activation": "",
}  # fmt: skip


def test_a_vit_is_taken_whether_its_size_is_one_number_or_one_for_each_side() -> None:
    for size in (96, [96, 96]):
        configs = classification()
        configs["train"]["network_def"] = {**VIT, "img_size": size}
        assert 'name = "vit-s16"' in draft_of(folder_of(configs), Answers()).text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("img_size", value) for value in (96.0, True, None, "96", [96], [96, 96.0], [96] * 40_000, {"a": 96})),
        *(("num_classes", value) for value in (10**9, 0, -1, 1001)),
        ("patch_size", [16] * 40_000),
        ("spatial_dims", 10**9),
    ],
)
def test_numbers_that_are_none_or_too_large_are_one_sentence_with_the_key(name: str, value: object) -> None:
    configs = classification()
    configs["train"]["network_def"] = {**VIT, name: value}
    assert any(one.startswith(f"train: network_def::{name}: ") for one in refusals(configs))


def test_a_network_of_endless_outputs_or_levels_is_refused_by_its_key() -> None:
    for key, value in (
        ("out_channels", 10**9),
        ("channels", [1 << at for at in range(20_000)]),
        ("spatial_dims", 10**9),
    ):
        configs = flat_segmentation()
        configs["inference"]["network_def"][key] = value
        assert any(one.startswith(f"inference: network_def::{key}: ") for one in refusals(configs)), key


def test_a_modality_that_is_no_text_is_one_sentence_with_the_key() -> None:
    for value in (["CT"], [], {"a": 1}, 3):
        configs = classification()
        configs["metadata"]["network_data_format"]["inputs"]["image"]["modality"] = value
        assert refusals(configs) == ["metadata: network_data_format::inputs: modality must be a text, such as CT"]


def test_answers_that_do_not_fit_the_bundle_are_refused() -> None:
    flat = folder_of(flat_segmentation())
    for answers, key in (
        (Answers(classes=("a", "b")), "labels"),
        (Answers(kind="classification"), "loss.name"),
        (Answers(size=(33, 32)), "network.name"),
        (Answers(table="t"), "labels.table"),
        (Answers(modality="ct"), "input.modality"),
    ):
        with pytest.raises(BundleError, match=rf"as a task: {key}"):
            draft_of(flat, answers)


def test_a_fixed_transform_after_a_random_one_and_a_window_after_a_crop_are_refused() -> None:
    configs = deep_segmentation()
    fixed = configs["train"]["train"]["deterministic_transforms"]
    fixed.insert(3, {"_target_": "CenterSpatialCropd", "keys": ["image", "label"], "roi_size": [32, 32, 32]})
    configs["train"]["train"]["random_transforms"].append({"_target_": "NormalizeIntensityd", "keys": "image"})
    keys = [one.split(": ")[1] for one in refusals(configs)]
    assert keys == [f"train::deterministic_transforms::{at}" for at in (4, 5)] + ["train::random_transforms::2"]


def test_transforms_that_are_an_expression_alone_are_refused_since_none_can_be_guessed() -> None:
    configs = classification()
    del configs["train"]["train"]["deterministic_transforms"], configs["train"]["train"]["random_transforms"]
    assert any("train::preprocessing" in one for one in refusals(configs))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("multi-label", ("labels.table", "labels.columns")), ("regression", ("labels.table", "labels.columns"))],
)
def test_a_kind_that_no_loss_says_is_open_and_then_asks_for_its_own_labels(kind: str, asked: tuple[str, ...]) -> None:
    configs = classification()
    del configs["train"]["loss"]
    assert "task.kind" in draft_of(folder_of(configs), Answers()).open_keys
    found = draft_of(folder_of(configs), Answers(kind=kind))
    assert found.open_keys[: len(asked)] == asked


# -- nothing is ever run


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a text could stand: in the place of every value, and of every table's key."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from _places(one, (*path, key))


def _put(configs: Changed, path: tuple[Any, ...], text: str, *, as_key: bool) -> Changed | None:
    changed: Any = copy.deepcopy(configs)
    at = changed
    for key in path[:-1]:
        at = at[key]
    if not as_key:
        at[path[-1]] = text
    elif isinstance(at, dict):
        at[text] = at.pop(path[-1])
    else:
        return None
    return changed  # type: ignore[no-any-return]


_WATCHED: dict[str, list[str]] = {}
_OTHERS = set[int]()  # threads that were there before: what earlier tests left may import or start something


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    ran = event in ("compile", "exec", "import", "os.system", "subprocess.Popen")
    if ran and "events" in _WATCHED and threading.get_ident() not in _OTHERS:
        _WATCHED["events"].append(f"{event} {arguments}"[:200])


@pytest.mark.parametrize("name", BUNDLES)
def test_no_text_of_a_bundle_is_ever_run_wherever_it_stands(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace"
    texts = [
        f"$__import__('os').system('touch {trace}')",
        f"$open({str(trace)!r}, 'w').close()",
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        "@network_def::$__import__('os').abort()",
    ]
    configs = BUNDLES[name]()
    draft_of(folder_of(configs), ANSWERS[name])  # whatever is imported late is imported now
    gc.collect()  # nor is what their objects do when they are deleted of the bundle
    gc.disable()
    _OTHERS.update(one.ident for one in threading.enumerate() if one.ident and one is not threading.current_thread())
    sys.addaudithook(_watch)
    tried = 0
    _WATCHED["events"] = []
    try:
        for config in configs:
            for path in _places(configs[config]):
                for number, text in enumerate(texts):
                    for as_key in (False, True) if number == 0 else (False,):
                        changed = _put(configs, (config, *path), text, as_key=as_key)
                        if changed is None:
                            continue
                        tried += 1
                        try:
                            draft_of(folder_of(changed), ANSWERS[name])
                        except BundleError:
                            continue
    finally:
        events = _WATCHED.pop("events")
        _OTHERS.clear()
        gc.enable()
    assert not trace.exists()
    assert not events
    assert tried > 300


def test_the_numbers_of_a_published_network_are_those_of_the_tasks_with_its_file(tmp_path: Path) -> None:
    """The oracle: MONAI's own class with a batch norm in evaluation."""
    torch.manual_seed(0)
    published = DenseNet121(2, 1, 4).eval()
    with torch.no_grad():
        for module in published.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    torch.save(published.state_dict(), tmp_path / "model.pt")
    made = WeightsConversion("", 1 << 30, statistics=True).convert((tmp_path / "model.pt").read_bytes())
    assert not made.refusal
    digest = hashlib.sha256(made.file).hexdigest()
    answers = Answers(modality="DX", classes=("a", "b", "c", "d"), public_patients=100, weights=digest)
    text = draft_of(folder_of(classification()), answers).text.replace("growth = 32", "growth = 32\nhead = 1")
    task = task_from_toml(text, "")
    assert task.network.options["fixed_norms"] == 1
    network = network_of(task, {digest: made.file}.__getitem__)
    x = torch.rand(2, 1, 48, 64)
    with torch.no_grad():
        np.testing.assert_allclose(network.module(x), published(x), rtol=1e-3, atol=1e-5)
