"""A public start: read from a task's file, trained on public pictures, taken by a task's network."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from agent.models.networks import build
from agent.models.networks.public_training import (
    PublicTask,
    PublicTraining,
    UnlabelledPicturesError,
    named_targets,
)
from agent.models.networks.public_weights import COVARIANCE, MEANS
from agent.models.training_loop import OtherRunError
from agent.models.weights import WeightsError
from policies.tasks.bounds import TaskError
from policies.tasks.networks import NetworkSpec
from protos.artifacts.strict_safetensors import pack_weights

FILE = """
[network]
name = "small-cnn"
options = { width = 8, convolutions = 2, pooled = 1 }
[input]
modality = "DX"
size = [16, 16]
transforms = [{ name = "NormalizeIntensity" }]
[training]
public_patients = 500
augmentation = [{ name = "RandGaussianNoise", std = 0.05 }]
"""


def _pictures(n: int = 48) -> tuple[np.ndarray, tuple[str, ...]]:
    """Stripes of two directions, in noise."""
    dice = np.random.default_rng(0)
    stripes = (np.arange(16) // 2 % 2 * 120).astype(np.uint8)
    images = dice.integers(0, 100, (n, 16, 16)).astype(np.uint8)
    images += np.stack([np.broadcast_to(stripes if i % 2 else stripes[:, None], (16, 16)) for i in range(n)])
    return images, tuple("down" if i % 2 else "across" for i in range(n))


def _trained(folder: Path, steps: int = 60, seed: int = 3) -> bytes:
    images, labels = _pictures()
    targets, names = named_targets(labels, several=False)
    assert names == ("across", "down")
    training = PublicTraining(PublicTask.read(tomllib.loads(FILE)), images, targets, 2, seed)
    return training.run(steps, folder, "cpu", lambda _: None, 20)


def test_a_task_begins_at_the_head_of_what_was_trained_and_tells_new_pictures_apart(tmp_path: Path) -> None:
    raw = _trained(tmp_path)
    spec = PublicTask.read(tomllib.loads(FILE)).network
    begun = NetworkSpec(spec.name, {**spec.options, "head": 1}, "head", weights=hashlib.sha256(raw).hexdigest())
    net = build(begun, 1, (16, 16), 2, 0, lambda _: raw)
    images, labels = _pictures(80)
    x = torch.from_numpy(images[48:, None].astype(np.float32) / 255)
    x = (x - x.mean(dim=(1, 2, 3), keepdim=True)) / x.std(dim=(1, 2, 3), keepdim=True, correction=0)
    with torch.no_grad():
        found = net.module(x).argmax(dim=1)
    right = sum(("across", "down")[int(k)] == label for k, label in zip(found, labels[48:], strict=True))
    assert right / 32 > 0.9


def _side_by_side(raw: bytes, **options: int) -> NetworkSpec:
    spec = PublicTask.read(tomllib.loads(FILE)).network
    part = NetworkSpec(spec.name, spec.options, weights=hashlib.sha256(raw).hexdigest())
    return NetworkSpec("frozen-features", {"head": 1, **options}, parts=(part, part))


@pytest.mark.parametrize("evened", [0, 1])
def test_features_about_zero_leave_the_first_answers_and_evened_spread_more_evenly(
    tmp_path: Path, evened: int
) -> None:
    raw, (images, _) = _trained(tmp_path), _pictures()
    x = torch.from_numpy(images[:, None].astype(np.float32) / 255)
    x = (x - x.mean(dim=(1, 2, 3), keepdim=True)) / x.std(dim=(1, 2, 3), keepdim=True, correction=0)
    options: list[dict[str, int]] = [{}, {"centred": 1, "evened": evened}]
    plain, moved = (build(_side_by_side(raw, **one), 1, (16, 16), 2, 0, lambda _: raw) for one in options)
    rows, about = plain.prepare(x), moved.prepare(x)
    assert rows.mean(dim=0).norm() > 0.5 * rows.norm(dim=1).mean(), "most of a row is what all rows share"
    assert about.mean(dim=0).norm() < 1e-3 * rows.norm(dim=1).mean()
    halves = (one[:, : one.shape[1] // 2].double() for one in (rows, about))
    before, after = (torch.linalg.eigvalsh(torch.cov(half.T, correction=0)) for half in halves)
    shrunk = ((before / before.mean() + 0.1) / 1.1).sqrt() if evened else 1.0
    assert torch.allclose(after, before / shrunk, rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(plain.module(x), moved.module(x), atol=1e-4)
    assert plain.parameters == moved.parameters


@pytest.mark.parametrize(
    ("missing", "option", "asked"),
    [(MEANS, "centred", {"centred": 1}), (COVARIANCE, "evened", {"centred": 1, "evened": 1})],
)
def test_a_file_that_does_not_say_how_its_features_lie_serves_as_they_are(
    tmp_path: Path, missing: str, option: str, asked: dict[str, int]
) -> None:
    state = load(_trained(tmp_path))
    del state[missing]
    raw = pack_weights(state)
    build(_side_by_side(raw), 1, (16, 16), 2, 0, lambda _: raw)
    with pytest.raises(WeightsError, match=rf"does not bring {missing}: leave out options\.{option}, or"):
        build(_side_by_side(raw, **asked), 1, (16, 16), 2, 0, lambda _: raw)


def test_features_of_which_none_varies_cannot_be_evened(tmp_path: Path) -> None:
    state = load(_trained(tmp_path))
    raw = pack_weights({**state, COVARIANCE: 0.0 * state[COVARIANCE]})
    with pytest.raises(WeightsError, match=r"…: no feature varies"):
        build(_side_by_side(raw, centred=1, evened=1), 1, (16, 16), 2, 0, lambda _: raw)


def test_the_same_training_gives_the_same_file_and_another_one_does_not_go_on_with_it(tmp_path: Path) -> None:
    raw = _trained(tmp_path / "a", 40)
    assert _trained(tmp_path / "b", 40) == raw
    assert _trained(tmp_path / "a", 40) == raw, "nothing is left to do"
    with pytest.raises(OtherRunError):
        _trained(tmp_path / "a", 40, seed=4)


def test_findings_are_outputs_of_their_own() -> None:
    targets, names = named_targets(("edema+nodule", "none", "nodule"), several=True)
    assert names == ("edema", "nodule")
    assert targets.tolist() == [[1, 1], [0, 0], [0, 1]]
    images = _pictures(3)[0]
    training = PublicTraining(PublicTask.read(tomllib.loads(FILE)), images, targets, 2, 0)
    trained = training.task.network
    assert trained.trained == "all"
    for labels, several in ((("a", "a"), False), (("none", "none"), True)):
        with pytest.raises(UnlabelledPicturesError):
            named_targets(labels, several=several)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("16, 16", "16, 24"), "input.size: must be two equal numbers"),
        (("small-cnn", "unet"), "network.options.convolutions: unknown key"),
        (("NormalizeIntensity", "Lambda"), "input.transforms.0.name: must be one of"),
        (("RandGaussianNoise", "Resize"), "training.augmentation.0.spatial_size: missing"),
        (("16, 16", "4, 4"), "input.size: must be two equal numbers"),
        (("convolutions = 2", "convolutions = 6"), "network.name: small-cnn needs 64 pixels a side"),
        (("[input]", 'trained = "head"\n[input]'), "network: a public training begins from a seed and trains all"),
        (("[input]", f'weights = "{"a" * 64}"\n[input]'), "network: a public training begins from a seed"),
        (("[input]", "[input]\nchannels = 2"), "input.channels: must be 1 for grey or 3"),
    ],
)
def test_a_file_that_cannot_be_trained_is_refused_by_its_keys(change: tuple[str, str], problem: str) -> None:
    tables: dict[str, Any] = tomllib.loads(FILE.replace(*change))
    with pytest.raises(TaskError, match=problem.replace(".", r"\.")):
        PublicTask.read(tables)


def test_a_mask_is_not_learned_from_labels() -> None:
    tables = {"network": {"name": "unet", "options": {"levels": 3}}, "input": {"size": [16, 16]}}
    with pytest.raises(TaskError, match=r"network\.name: unet does not give a number for each picture"):
        PublicTask.read(tables)
