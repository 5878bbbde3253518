"""An inference bundle gives what our own network gives: by MONAI's parser, and by MONAI's command."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from numpy.typing import NDArray
from PIL import Image

from agent.field_of_view import fit_to
from agent.mechanisms.federated.task_training import example_rule, network_of
from agent.models.bundles.inference import NoBundleError, inference, plain_network
from agent.models.networks.public_weights import COVARIANCE, MEANS
from agent.models.networks.trainable import TrainableNetwork
from agent.models.transforms import InputPipeline
from agent.storage.example_pixels import cube
from agent.volumes.volume_io import read as read_volume
from policies.tasks.task import Task, task_from_toml
from protos.artifacts.strict_safetensors import pack_weights

CLASSES = 'classes = ["a", "b", "c"]'


def task_of(
    network: str, *, kind: str = "classification", size: tuple[int, ...] = (32, 32), more: str = "", head: str = ""
) -> Task:
    """A task with a line of TOML for its network."""
    labels = {
        "multi-label": 'table = "t"\ncolumns = ["a", "b", "c"]',
        "regression": 'table = "t"\ncolumns = ["a", "b"]\nlow = [-1, 0]\nhigh = [1, 20]',
    }.get(kind, CLASSES)
    text = f'[task]\nname = "made"\nkind = "{kind}"\n[labels]\n{labels}\n[input]\nmodality = "OT"\n'
    return task_from_toml(
        f"{text}size = {list(size)}\n{more}\n[training]\npublic_patients = 100\n{head}\n[network]\n{network}\n", ""
    )


def public_file() -> tuple[str, bytes]:
    """A narrow ResNet-18 with what its features are over public pictures."""
    network = network_of(task_of('name = "resnet18"\noptions = {width = 8}'), {}.__getitem__).module.net
    dice = np.random.default_rng(2)
    arrays = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    seen = dice.normal(0, 1, (200, 64)) * np.linspace(0.5, 2, 64)
    arrays |= {MEANS: seen.mean(0).astype(np.float32), COVARIANCE: np.cov(seen.T).astype(np.float32)}
    raw = pack_weights(arrays)
    return hashlib.sha256(raw).hexdigest(), raw


def trained(task: Task, files: dict[str, bytes] | None = None) -> TrainableNetwork:
    """The task's network, moved from its start."""
    network = network_of(task, (files or {}).__getitem__)
    network.load(np.random.default_rng(1).normal(0, 0.05, network.parameters).astype(np.float32))
    return network


def as_monai_has_it(task: Task, network: TrainableNetwork) -> torch.nn.Module:
    """The network of the bundle, by MONAI's own parser and a strict load."""
    plain = plain_network(task, network)
    config = {**inference(task, plain), "device": "cpu"}
    parser = ConfigParser(json.loads(json.dumps(config)))
    module: torch.nn.Module = parser.get_parsed_content("network")
    module.load_state_dict(plain.state, strict=True)
    return module.eval()


NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ('name = "linear"', {}),
    "linear-3d": ('name = "linear"', {"size": (16, 16, 16)}),
    "small-cnn": ('name = "small-cnn"', {}),
    "small-cnn-3d": ('name = "small-cnn"\noptions = {convolutions = 2}', {"size": (16, 16, 16)}),
    "resnet18": ('name = "resnet18"\noptions = {width = 8}', {}),
    "resnet50": ('name = "resnet50"\noptions = {width = 4, stride = 2}', {}),
    "resnet18-lora": ('name = "resnet18"\noptions = {width = 8}\ntrained = "lora"\nrank = 4', {}),
    "densenet121": ('name = "densenet121"\noptions = {growth = 12}', {}),
    "densenet121-3d": ('name = "densenet121"\noptions = {growth = 8}', {"size": (32, 32, 32)}),
    "vit-s16": ('name = "vit-s16"\noptions = {width = 32, layers = 2, heads = 2, patch = 8}', {}),
    "vit-s16-lora": (
        'name = "vit-s16"\noptions = {width = 32, layers = 2, heads = 2, patch = 8}\ntrained = "lora"\nrank = 4',
        {},
    ),
    "unet": ('name = "unet"\noptions = {width = 8, levels = 3}', {"kind": "segmentation"}),
    "unet-lora": ('name = "unet"\noptions = {levels = 3}\ntrained = "lora"\nrank = 4', {"kind": "segmentation"}),
    "segresnet-3d": ('name = "segresnet"\noptions = {levels = 2}', {"kind": "segmentation", "size": (16, 16, 8)}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_in_monais_words_gives_the_same_numbers(name: str) -> None:
    network, more = NETWORKS[name]
    task = task_of(network, **more)
    ours = trained(task)
    theirs = as_monai_has_it(task, ours)
    x = torch.rand(2, 1, *task.input.size)
    with torch.no_grad():
        wanted, found = ours.module(x), theirs(x)
        assert wanted.std() > 0
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("form", ["fixed", "frozen", "centred", "evened"])
def test_public_starts_with_fixed_norms_and_frozen_features_are_merged(form: str) -> None:
    part = 'name = "resnet18"\noptions = {width = 8, fixed_norms = 1}'
    digest, raw = public_file()
    if form == "fixed":
        text = f'{part}\nweights = "{digest}"'
    else:
        options = {"frozen": "", "centred": "centred = 1", "evened": "centred = 1, evened = 1"}[form]
        text = f'options = {{{options}}}\n[[network.parts]]\n{part}\nweights = "{digest}"'
    task = task_of(text)
    ours = trained(task, {digest: raw})
    theirs = as_monai_has_it(task, ours)
    assert not any(isinstance(one, torch.nn.GroupNorm) for one in theirs.modules())
    x = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        np.testing.assert_allclose(theirs(x), ours.module(x), rtol=1e-3, atol=1e-4)


def test_what_monai_has_no_words_for_is_refused_with_the_key() -> None:
    digest, raw = public_file()
    part = f'[[network.parts]]\nname = "resnet18"\noptions = {{width = 8}}\nweights = "{digest}"\n'
    task = task_of(part + part)
    with pytest.raises(NoBundleError, match=r"network\.parts"):
        plain_network(task, trained(task, {digest: raw}))
    for more, key in (
        ('example = "study"', "input.example"),
        ("window = [0, 100]", "input.window"),
        ("spacing = [1.0, 1.0]", "input.window, spacing"),
    ):
        task = task_of('name = "linear"', more=more)
        with pytest.raises(NoBundleError, match=key):
            inference(task, plain_network(task, trained(task)))
    own = task_of('name = "small-cnn"', head='head = "own"')
    with pytest.raises(NoBundleError, match=r"training\.head"):
        plain_network(own, network_of(own, {}.__getitem__))


# -- by MONAI's command


def run_bundle(folder: Path, task: Task, network: TrainableNetwork) -> Path:
    """Write the bundle, run it as anybody would, without a path to our own code, and give the folder of results."""
    plain = plain_network(task, network)
    for name in ("configs", "models"):
        (folder / name).mkdir()
    (folder / "configs" / "inference.json").write_text(json.dumps(inference(task, plain)))
    torch.save(dict(plain.state), folder / "models" / "model.pt")
    return by_command(folder)


def by_command(folder: Path) -> Path:
    """``python -m monai.bundle run``, where our own packages cannot be imported."""
    barred = "import sys; sys.modules.update({n: None for n in ('agent', 'policies', 'protos', 'coordinator')})"
    code = f"{barred}; import runpy; runpy.run_module('monai.bundle', run_name='__main__', alter_sys=True)"
    words = ["run", "--config_file", f"{folder}/configs/inference.json", "--bundle_root", str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "eval"


def predictions(folder: Path) -> dict[str, NDArray[np.float64]]:
    """By the name of the file."""
    with (folder / "predictions.csv").open() as file:
        return {Path(row[0]).name: np.array(row[1:], float) for row in csv.reader(file)}


def outputs(task: Task, network: TrainableNetwork, pixels: NDArray[np.float32]) -> torch.Tensor:
    seen, _ = InputPipeline(task.input.transforms, task.input.size)(pixels)
    with torch.no_grad():
        return network.module(torch.from_numpy(seen[None]))[0]


@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression"])
def test_pictures_of_any_size_give_the_scores_that_a_site_would_see(tmp_path: Path, kind: str) -> None:
    dice = np.random.default_rng(0)
    size = (32, 48) if kind == "classification" else (32, 32)
    more = 'transforms = [{name = "NormalizeIntensity"}, {name = "CenterSpatialCrop", roi_size = [32, 32]}, '
    more += f'{{name = "Resize", spatial_size = {list(size)}}}]'
    task = task_of('name = "small-cnn"\noptions = {convolutions = 3}', kind=kind, size=size, more=more)
    network = trained(task)
    (tmp_path / "images").mkdir()
    wanted = {}
    for number, shape in enumerate([size, (100, 90), (64, 96), (33, 161)]):
        stored = dice.integers(0, 256, shape, np.uint8)
        Image.fromarray(stored).save(tmp_path / "images" / f"{number}.png")
        found = outputs(task, network, fit_to(stored.astype(np.float32) / 255, size)[None])
        if kind == "regression":
            wanted[f"{number}.png"] = np.array([-1, 0]) + found.numpy() * np.array([2, 20])
        else:
            wanted[f"{number}.png"] = (found.softmax(0) if kind == "classification" else found.sigmoid()).numpy()
    found = predictions(run_bundle(tmp_path, task, network))
    assert found.keys() == wanted.keys()
    for name, scores in wanted.items():
        np.testing.assert_allclose(found[name], scores, rtol=1e-3, atol=1e-5)


def test_a_picture_gets_the_mask_that_our_own_network_gives(tmp_path: Path) -> None:
    task = task_of('name = "unet"\noptions = {width = 8, levels = 3}', kind="segmentation", size=(32, 48))
    network = trained(task)
    (tmp_path / "images").mkdir()
    stored = np.random.default_rng(0).integers(0, 256, (80, 130), np.uint8)
    Image.fromarray(stored).save(tmp_path / "images" / "one.png")
    wanted = outputs(task, network, fit_to(stored.astype(np.float32) / 255, (32, 48))[None]).argmax(0).numpy()
    found = np.asarray(Image.open(run_bundle(tmp_path, task, network) / "one_mask.png"))
    assert len(np.unique(wanted)) > 1
    assert (found == wanted).mean() > 0.999


@pytest.mark.parametrize("more", ["", "spacing = [3.0, 2.0, 2.5]\nwindow = [-100, 300]"])
def test_a_volume_gets_the_mask_that_our_own_network_gives_on_its_place(tmp_path: Path, more: str) -> None:
    size = (16, 24, 32)
    task = task_of('name = "segresnet"\noptions = {levels = 3}', kind="segmentation", size=size, more=more)
    network = trained(task)
    (tmp_path / "images").mkdir()
    values = np.random.default_rng(0).normal(0, 100, (40, 50, 37)).astype(np.float32)
    affine = np.array([[0, 0, -1.9, 50.0], [-1.2, 0, 0, 30.0], [0, 1.5, 0, -20.0], [0, 0, 0, 1.0]])
    path = tmp_path / "images" / "one.nii.gz"
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    pixels = cube(read_volume(path).real(), example_rule(task))
    assert not isinstance(pixels, str)
    wanted = outputs(task, network, pixels).argmax(0).numpy()
    made: Any = nibabel.load(run_bundle(tmp_path, task, network) / "one_mask.nii.gz")
    assert len(np.unique(wanted)) > 1
    assert (np.asarray(made.dataobj) == wanted).mean() > 0.999
    assert nibabel.aff2axcodes(made.affine) == ("S", "P", "L")
    centre = [affine @ [*((np.array(values.shape) - 1) / 2), 1], made.affine @ [*((np.array(size) - 1) / 2), 1]]
    np.testing.assert_allclose(centre[0], centre[1], atol=1e-3)
