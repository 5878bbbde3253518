"""``draw``: a released model's pictures, in a new folder, without a site."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agent.cli import sample as draw_command
from agent.mechanisms.distillation.latent_model import LatentConfig, LatentDiffusion
from agent.models.diffusion.latent import PRESETS, latent_from
from agent.models.training_loop import torch_generator
from tests.support.command_line import Typed, typed
from tests.support.distillation_networks import CONDITIONS, SIDE
from tests.support.latents import tiny_autoencoder

__all__ = ["typed"]  # a fixture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that has learned nothing, as it leaves."""
    through = tiny_autoencoder()
    config = LatentConfig(PRESETS["tiny"].fitted(through, CONDITIONS), 0, sampling_steps=2)
    path = tmp_path_factory.mktemp("model") / "student.safetensors"
    path.write_bytes(LatentDiffusion(config, through, CONDITIONS).file({}))
    return path


def order(model: Path, out: Path, *more: object) -> list[object]:
    return ["draw", "--model", model, "--count", 3, "--condition", "all", "--out", out, *more]


def rows(folder: Path) -> list[list[str]]:
    with (folder / "labels.csv").open(newline="") as stream:
        return list(csv.reader(stream))


def pixels(folder: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))])


def test_a_model_draws_each_condition_and_lists_what_is_what(typed: Typed, model: Path, tmp_path: Path) -> None:
    said = typed(*order(model, tmp_path / "drawn", "--seed", 7))
    assert said.status == 0, said.err
    assert "these images are not vetted" in " ".join(said.out.split())
    files = [f"{number}.png" for number in range(6)]
    labels = [name for name in CONDITIONS.names for _ in range(3)]
    assert rows(tmp_path / "drawn") == [["file", "label"], *map(list, zip(files, labels, strict=True))]
    found = pixels(tmp_path / "drawn")
    expected = latent_from(model.read_bytes()).sample(np.array([0, 0, 0, 1, 1, 1]), torch_generator(7))
    assert found.shape == (6, SIDE, SIDE)
    assert np.array_equal(found, expected), "nothing else than the file and the seed decides"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drawn"], "nothing else is left"


def test_the_same_seed_draws_the_same_and_another_does_not(typed: Typed, model: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        said = typed(*order(model, tmp_path / name, "--seed", seed, "--json"))
        assert (said.status, said.err) == (0, "")
        assert (said.line["pictures"], said.line["conditions"]) == (6, list(CONDITIONS.names))
    a, b, c = (pixels(tmp_path / name) for name in "abc")
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_one_condition_is_drawn_by_its_name(typed: Typed, model: Path, tmp_path: Path) -> None:
    words = ["draw", "--model", model, "--count", 2, "--condition", "effusion", "--out", tmp_path / "one"]
    assert typed(*words).status == 0
    assert [label for _, label in rows(tmp_path / "one")[1:]] == ["effusion"] * 2


def test_what_cannot_be_drawn_is_a_sentence_and_no_folder(typed: Typed, model: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "bad").write_bytes(b"no model")
    before = sorted(tmp_path.rglob("*"))
    for words, told in (
        (order(model, tmp_path / "old"), "old: name a new folder"),
        (order(model, tmp_path / "gone" / "x"), "name a new folder in an existing one"),
        (order(tmp_path / "gone", tmp_path / "x"), "file not found: gone"),
        (order(tmp_path / "bad", tmp_path / "x"), "refused: "),
        ([*order(model, tmp_path / "x"), "--condition", "edema"], "the model knows effusion, none; or all"),
    ):
        said = typed(*words)
        assert (said.status, told in " ".join(said.err.split())) == (1, True), said.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_half_folder(
    typed: Typed, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draw_command.Image.Image, "save", full)
    said = typed(*order(model, tmp_path / "drawn"))
    assert (said.status, "drawn: No space left on device" in " ".join(said.err.split())) == (1, True), said.err
    assert not list(tmp_path.iterdir())
