"""``task check`` says what a task is and costs, or one sentence with the file and the key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import safetensors.torch

import agent.cli.main as cli
from agent.mechanisms.federated.task_training import network_of
from policies.tasks.task import task_from_toml

TASK = """
[task]
name = "small"
kind = "{kind}"
[labels]
{labels}
[input]
modality = "OT"
size = [16, 16]
{more}
[training]
public_patients = 25
[network]
name = "{network}"
{weights}
"""
CLASSES = 'classes = ["a", "b"]'
TABLE = 'table = "t"\ncolumns = ["a", "b"]'
KINDS = {
    "classification": (CLASSES, "linear"),
    "multi-label": (TABLE, "small-cnn"),
    "regression": (f"{TABLE}\nlow = [0, 0]\nhigh = [1, 2]", "vit-s16"),
    "segmentation": (CLASSES, "segresnet"),
}


def written(folder: Path, kind: str = "classification", network: str = "", weights: str = "", more: str = "") -> Path:
    labels, usual = KINDS[kind]
    path = folder / "small.toml"
    text = TASK.format(kind=kind, labels=labels, network=network or usual, weights=weights, more=more)
    small = {"small-cnn": "convolutions = 2\nwidth = 8", "vit-s16": "width = 16\nlayers = 1\nheads = 2\npatch = 8"}
    path.write_text(text + f"\n[network.options]\n{small.get(network or usual, '')}\n")
    return path


def typed(*words: str | Path) -> int:
    return cli.main(["task", "check", *map(str, words)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_each_kind_is_told_with_its_length_engine_and_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = written(tmp_path, kind)
    assert typed(path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    task = task_from_toml(path.read_text(), path.name)
    assert (told["kind"], told["digest"]) == (kind, task.digest)
    assert told["parameters"] == network_of(task, {}.__getitem__).parameters == told["parameters_in_all"]
    assert told["engine"] == "book-keeping"
    assert ("vit-s16: it owns parameters" in "".join(told["opacus"])) == (kind == "regression")
    assert told["seconds"] >= 0
    assert told["peak_mib"] > 0
    assert typed(path) == 0
    said = capsys.readouterr().out
    assert f"digest: {task.digest}" in said
    assert f'"parameters": {told["parameters"]}' in said


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("[task]", "[tusk]"), "small.toml: tusk: unknown table"),
        (("[16, 16]", "[16]"), "small.toml: input.size"),
        (("public_patients = 25", "clip = 0"), "small.toml: training.public_patients: missing"),
        (("linear", "alexnet"), "small.toml: network.name"),
        (("[task]", "[task"), "small.toml: not TOML"),
    ],
)
def test_a_wrong_file_is_one_refusal_with_file_and_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], told: str
) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace(*change))
    assert typed(path) == 1
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(tmp_path / "absent.toml") == 1
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert typed(tmp_path / "bytes.toml") == 1
    said = capsys.readouterr().err
    assert "absent.toml: No such file" in said
    assert "bytes.toml: not text" in said


def test_public_weights_are_found_by_their_digest_or_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = network_of(task_from_toml(written(tmp_path, network="small-cnn").read_text(), ""), {}.__getitem__)
    raw = safetensors.torch.save({n: t.contiguous() for n, t in start.module.net.state_dict().items()})
    (tmp_path / "public.safetensors").write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    path = written(tmp_path, network="small-cnn", weights=f'weights = "{digest}"')
    assert typed(path) == 1
    assert digest in "".join(capsys.readouterr().err.split())
    assert typed(path, "--weights", tmp_path / "public.safetensors") == 0
    assert f"public weights: {digest}" in capsys.readouterr().out


def test_transforms_that_would_leave_every_image_out_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, more='transforms = [{ name = "CenterSpatialCrop", roi_size = [8, 8] }]')
    assert typed(path) == 1
    assert "Resize" in capsys.readouterr().err
