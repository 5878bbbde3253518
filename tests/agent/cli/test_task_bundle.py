"""``task from-bundle`` as it is typed: a draft, what is open in it, and nothing half-stored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from monai.networks.nets.densenet import DenseNet121

from agent.cli.main import main
from tests.support.monai_bundles import classification, flat_segmentation, write_bundle

pytestmark = pytest.mark.timeout(1200)  # a whole DenseNet is checked, on a machine that may be busy


def typed(folder: Path, *more: str | Path) -> int:
    out = ("--out", str(folder.parent / "task.toml"))
    return main(["task", "from-bundle", str(folder), *out, *map(str, more)])


def test_a_bundle_with_its_weights_becomes_a_task_that_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, weights = write_bundle(tmp_path / "MedNIST made", classification()), tmp_path / "start.safetensors"
    torch.save(DenseNet121(2, 1, 4).state_dict(), folder / "models" / "model.pt")
    said = ("--modality", "DX", "--classes", "hand", "chest", "head", "breast", "--public-patients", "100")
    assert typed(folder, *said, "--weights", weights) == 0
    told = capsys.readouterr().out
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert f"sha256 {digest}" in told
    assert "  train::trainer: a task has no such part\n" in told
    assert "to fill in" not in told
    assert f'weights = "{digest}"' in (tmp_path / "task.toml").read_text()
    assert main(["task", "check", str(tmp_path / "task.toml"), "--weights", str(weights), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["name"] == "mednist-made"
    assert facts["public_files"] == [digest]


def test_a_draft_with_open_keys_is_refused_by_check_with_those_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_bundle(tmp_path / "made", classification())
    (folder / "models" / "model.pt").write_bytes(b"")
    assert typed(folder) == 0
    told = capsys.readouterr().out
    assert "to fill in, since a bundle cannot say it:\n  labels.classes\n  input.modality\n" in told
    assert f"lazaret-agent weights convert {folder}/models/model.pt --out FILE --statistics" in told
    assert main(["task", "check", str(tmp_path / "task.toml")]) == 1
    refused = capsys.readouterr().err
    assert "input.modality: missing" in refused
    assert "training.public_patients: missing" in refused


def test_nothing_is_overwritten_and_nothing_half_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, weights = write_bundle(tmp_path / "made", flat_segmentation()), tmp_path / "start.safetensors"
    before = sorted(path for path in tmp_path.rglob("*"))
    for content, why in (
        (b"not a torch file", "no torch file"),
        (None, "no models/model.pt"),
    ):
        model = folder / "models" / "model.pt"
        model.unlink(missing_ok=True) if content is None else model.write_bytes(content)
        assert typed(folder, "--weights", weights) == 1
        assert why in capsys.readouterr().err
        model.unlink(missing_ok=True)
        assert sorted(path for path in tmp_path.rglob("*")) == before
    (folder / "scripts.py").write_text("")
    assert typed(folder) == 1
    assert capsys.readouterr().err.count("\n") == 1
    (folder / "scripts.py").unlink()
    (tmp_path / "task.toml").write_text("mine")
    assert typed(folder) == 1
    assert "must not exist yet" in capsys.readouterr().err
    assert (tmp_path / "task.toml").read_text() == "mine"
