"""``train network`` as it is typed: a task's file, a folder of pictures, and what a task says afterwards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agent.cli.main import main

TASK = """
[network]
name = "linear"
[input]
size = [16, 16]
"""


def _typed(folder: Path, *more: str, task: str = TASK) -> int:
    (folder / "task.toml").write_text(task)
    dice = np.random.default_rng(0)
    for number in range(8):
        path = folder / "pictures" / ("dark" if number % 2 else "light") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = dice.integers(60, 120, (16, 16)) + (0 if number % 2 else 120)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    words = [
        "--task",
        str(folder / "task.toml"),
        "--pictures",
        str(folder / "pictures"),
        "--out",
        str(folder / "out"),
    ]
    return main(["train", "network", *words, "--steps", "20", *more])


def test_a_public_start_is_trained_and_its_digest_and_outputs_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _typed(tmp_path, "--labels", "folders") == 0
    digest = hashlib.sha256((tmp_path / "out" / "network.safetensors").read_bytes()).hexdigest()
    said = capsys.readouterr().out
    assert "outputs, in their order: dark, light" in said
    assert said.splitlines()[-1] == digest
    (tmp_path / "labels.csv").write_text("file,label\ndark/1.png,a+b\nlight/0.png,none\ndark/3.png,b\n")
    assert _typed(tmp_path, "--labels", str(tmp_path / "labels.csv"), "--several", "--json", "--seed", "1") == 1
    assert "belongs to a run with another configuration" in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / "out" / "checkpoint.safetensors").unlink()
    assert _typed(tmp_path, "--labels", str(tmp_path / "labels.csv"), "--several", "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["outputs"] == ["a", "b"]
    assert told["sha256"] == hashlib.sha256((tmp_path / "out" / "network.safetensors").read_bytes()).hexdigest()


def test_a_file_that_cannot_be_trained_is_refused_with_its_name_and_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _typed(tmp_path, "--labels", "folders", task=TASK.replace("linear", "efficientnet")) == 1
    said = capsys.readouterr().err.replace("\n", " ")
    assert "refused: task.toml: network.name: must be one of" in said
    assert not (tmp_path / "out").exists()
    assert _typed(tmp_path, "--labels", "folders", task="not TOML") == 1
    assert "task.toml is not TOML" in capsys.readouterr().err
