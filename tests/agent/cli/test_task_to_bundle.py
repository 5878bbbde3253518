"""``task to-bundle`` as it is typed: a bundle that MONAI's own command runs, or one sentence and nothing stored."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import highdicom
import nibabel
import numpy as np
import pydicom
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from agent.cli.main import main
from agent.mechanisms.federated.task_training import network_of
from agent.models.bundles.configuration import read_bundle
from agent.models.bundles.draft import Answers, draft_of
from coordinator.federation.participation import members
from coordinator.round_codes import explain_code
from policies.audit.certificate import read
from policies.audit.certificate_check import check
from policies.tasks.released_model import SIGNED
from policies.tasks.task import Task, task_from_json, task_from_toml
from tests.support.coordinator_runs import SITES, agents, evaluated_job, job
from tests.support.exported_models import Exported, exported_model, exported_run, join
from tests.support.task_site import MM, abdomen_series, abdomen_volume, task_site

pytestmark = pytest.mark.timeout(1200)  # processes that import torch and MONAI, on a machine that may be busy

TOML = """
[task]
name = "triage"
kind = "classification"
[labels]
classes = ["healthy", "ill"]
[input]
modality = "DX"
size = [32, 32]
[training]
public_patients = 200
[network]
name = "resnet18"
[network.options]
width = 8
[card]
licence = "Apache-2.0"
"""
TASK = task_from_toml(TOML, "")
PARAMETERS_IN_ALL = network_of(TASK, {}.__getitem__).parameters


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    with pytest.MonkeyPatch.context() as patched:
        return exported_model(tmp_path_factory.mktemp("federation") / "hub", TASK, patched)


def changed(made: Exported, folder: Path, name: str, body: bytes | None) -> Path:
    """A copy of the model's folder with another file in the place of one, or without it, and sums that say so."""
    shutil.copytree(made.folder, folder)
    lines = [line for line in (folder / "SHA256SUMS").read_text().splitlines() if not line.endswith(f"  {name}")]
    if body is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(body)
        lines.append(f"{hashlib.sha256(body).hexdigest()}  {name}")
    (folder / "SHA256SUMS").write_text("".join(f"{line}\n" for line in lines))
    return folder


def typed(*words: str | Path) -> int:
    return main(["task", "to-bundle", *map(str, words)])


def test_a_finished_model_is_a_bundle_that_monais_command_runs_with_our_own_scores(
    made: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "triage"
    assert typed(made.folder, out) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    (out / "images").mkdir()
    stored = np.random.default_rng(0).integers(0, 256, (32, 32), np.uint8)
    Image.fromarray(stored).save(out / "images" / "one.png")
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    network = network_of(TASK, {}.__getitem__)
    network.load(made.parameters)
    wanted = network.outputs(torch.from_numpy(stored.astype(np.float32)[None, None] / 255)).softmax(1)[0]
    found = (out / "eval" / "predictions.csv").read_text().strip().split(",")
    assert found[0].endswith("one.png")
    np.testing.assert_allclose(np.array(found[1:], float), wanted.numpy(), rtol=1e-4)
    told = json.loads((out / "configs" / "metadata.json").read_text())
    assert told["license"] == "Apache-2.0", "the task's own before the coordinator's"
    assert told["lazaret"]["promise"]["level"] == "A"
    assert "images of 1 hospital, which" in told["description"]
    (hospital,) = told["lazaret"]["promise"]["hospitals"]
    assert (hospital["site"], hospital["epsilon"]["unit"]) == ("north", "patient")
    assert told["lazaret"]["ledger"]["key_sha256"] == hashlib.sha256(made.ledger_key).hexdigest()
    assert told["lazaret"]["task_sha256"] == TASK.digest
    assert told["network_data_format"]["outputs"]["pred"]["channel_def"] == {"0": "healthy", "1": "ill"}
    assert (out / "LICENSE").read_text() == "Apache-2.0\n"
    for name, kept in (("README.md", "card.md"), *((one, one) for one in ("certificate.json", SIGNED, "task.json"))):
        assert (out / "docs" / name).read_bytes() == (made.folder / kept).read_bytes()
    check(read((out / "docs" / SIGNED).read_bytes()))
    for path in out.rglob("*.json"):
        assert not {"agent", "policies", "protos"} & set(path.read_text().replace(".", " ").split())


ORGANS: Final = """
[task]
name = "organs"
kind = "segmentation"
[labels]
classes = ["liver", "mass"]
[input]
modality = "MR"
size = {size}
spacing = {spacing}
[training]
public_patients = 200
[network]
name = "segresnet"
options = {{ width = 8, levels = 2 }}
"""


def predicted_and_exported(folder: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """What ``predict`` writes of the folder ``study``, and what MONAI's command writes of the folder ``images``."""
    made, home = exported_model(folder / "hub", task, monkeypatch, scale=0.05), task_site(folder)
    join(home, made)
    words = ["predict", made.folder, "--folder", folder / "study", "--out", folder / "answers"]
    assert main(["--home", str(home), *map(str, words)]) == 0
    bundle = folder / "bundle"
    assert typed(made.folder, bundle) == 0
    shutil.move(folder / "images", bundle / "images")
    where = ["--config_file", "configs/inference.json", "--bundle_root", "."]
    run = [sys.executable, "-m", "monai.bundle", "run", *where]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=bundle)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "answers", bundle / "eval"


@pytest.mark.parametrize(
    ("size", "spacing"), [([12, 64, 64], list(MM)), ([16, 48, 40], [4.0, 2.0, 2.0])], ids=["own grid", "another grid"]
)
def test_predict_and_the_bundle_draw_the_same_voxels_of_one_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: list[int], spacing: list[float]
) -> None:
    values, _ = abdomen_volume(3)
    series = abdomen_series("A-3", 3, values)
    (tmp_path / "study").mkdir()
    for number, one in enumerate(series):
        one.save_as(tmp_path / "study" / f"{number}.dcm", enforce_file_format=True)
    (tmp_path / "images").mkdir()
    to_ras = np.diag([-MM[2], -MM[1], MM[0], 1.0])  # of (column, row, slice): DICOM's axes go left and back
    volume: Any = nibabel.Nifti1Image
    nibabel.save(volume(values.transpose(2, 1, 0), to_ras), tmp_path / "images" / "one.nii.gz")
    answers, evaluated = predicted_and_exported(
        tmp_path, task_from_toml(ORGANS.format(size=size, spacing=spacing), ""), monkeypatch
    )
    drawn = highdicom.seg.segread(answers / "segmentation-0001.dcm").get_pixels_by_source_instance(
        [one.SOPInstanceUID for one in series], combine_segments=True, assert_missing_frames_are_empty=True
    )
    theirs = _on_the_series(evaluated / "one_mask.nii.gz", values.shape, to_ras)
    shares = np.bincount(drawn.ravel(), minlength=3) / drawn.size
    assert np.count_nonzero(shares > 0.01) >= 2, shares
    for axis in range(3):
        assert (np.flip(drawn, axis) != theirs).mean() > 0.01, "a turned mask would be seen"
    assert (drawn != theirs).sum() == 0, (int((drawn != theirs).sum()), drawn.size)
    again = _by_dcmqi(answers / "segmentation-0001.dcm", tmp_path / "dcmqi")
    np.testing.assert_array_equal(_on_the_series(again, values.shape, to_ras), drawn)


def _by_dcmqi(segmentation: Path, folder: Path) -> Path:
    """The labels that another toolkit reads in a DICOM SEG; it knows the segments by their names."""
    folder.mkdir()
    words = ["--inputDICOM", segmentation, "--outputDirectory", folder, "--outputType", "nii", "--mergeSegments"]
    program = Path(sys.executable).with_name("segimage2itkimage")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (segments,) = json.loads((folder / "meta.json").read_text())["segmentAttributes"]
    assert [one["SegmentLabel"] for one in segments] == ["liver", "mass"]
    return folder / "1.nii.gz"


def _on_the_series(path: Path, shape: tuple[int, ...], to_ras: NDArray[np.float64]) -> NDArray[np.uint8]:
    """A file of labels at the places of a series, (k, h, w)."""
    mask: Any = nibabel.load(path)
    there = np.indices(shape[::-1]).reshape(3, -1)
    to_mask = np.linalg.inv(mask.affine) @ to_ras
    at = np.rint(to_mask[:3, :3] @ there + to_mask[:3, 3:] - 1e-6).astype(int)
    inside = ((at >= 0) & (at < np.array(mask.shape[:3])[:, None])).all(axis=0)
    found = np.zeros(there.shape[1], np.uint8)
    found[inside] = np.asarray(mask.dataobj).reshape(mask.shape[:3])[tuple(at[:, inside])]
    return found.reshape(shape[::-1]).transpose(2, 1, 0)


def test_predict_and_the_bundle_give_one_image_the_same_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(4).integers(0, 256, (1, 64, 64)).astype(np.int16)
    (one,) = abdomen_series("A-4", 4, values)
    one.WindowCenter, one.WindowWidth = 100, 52  # PS3.3 C.11.2.1.2: 74 is black, 125 is white, in steps of 5 of 255
    (tmp_path / "study").mkdir()
    one.save_as(tmp_path / "study" / "one.dcm", enforce_file_format=True)
    (tmp_path / "images").mkdir()
    stored = pydicom.dcmread(tmp_path / "study" / "one.dcm").pixel_array
    Image.fromarray(((stored.clip(74, 125) - 74) * 5).astype(np.uint8)).save(tmp_path / "images" / "one.png")
    answers, evaluated = predicted_and_exported(
        tmp_path, task_from_toml(TOML.replace('"DX"', '"MR"'), ""), monkeypatch
    )
    with (answers / "predictions.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    theirs = (evaluated / "predictions.csv").read_text().strip().split(",")[1:]
    np.testing.assert_allclose([float(row["healthy"]), float(row["ill"])], np.array(theirs, float), rtol=1e-3)


@agents
def test_the_model_of_a_run_is_a_bundle_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, out = exported_run(tmp_path / "hub", evaluated_job(), monkeypatch), tmp_path / "digits"
    assert typed(made.folder, out) == 0
    capsys.readouterr()
    task = task_from_json((out / "docs" / "task.json").read_text())
    network = network_of(task, {}.__getitem__)
    network.load(made.parameters)
    wanted = {tuple(one.shape): one for one in network.module.state_dict().values()}
    for one in torch.load(out / "models" / "model.pt", weights_only=True).values():
        assert torch.equal(one, wanted[tuple(one.shape)])
    told = json.loads((out / "configs" / "metadata.json").read_text())
    assert [one["site"] for one in told["lazaret"]["promise"]["hospitals"]] == list(SITES)
    assert "images of 3 hospitals, which" in told["description"]
    assert len(told["eval_metrics"]["private_evaluation"]) == 2
    raw = bytearray((made.folder / SIGNED).read_bytes())
    raw[200] ^= 1
    assert typed(changed(made, tmp_path / "forged", SIGNED, bytes(raw)), tmp_path / "no") == 1
    assert SIGNED in capsys.readouterr().err
    assert typed(changed(made, tmp_path / "gone", SIGNED, None), tmp_path / "no") == 1
    assert f"gone has no {SIGNED}" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@agents
def test_what_is_exported_says_who_was_in_no_round_and_never_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = exported_run(tmp_path / "hub", job(rounds=1), monkeypatch, away="west"), tmp_path / "digits"
    assert typed(made.folder, out) == 0
    (kept,) = members(tmp_path / "hub" / "runs" / "run-1", 1)
    code = kept.missing["west"]
    told = json.loads((made.folder / "certificate.json").read_bytes())["participation"]["rounds"]
    assert [one["missing"] for one in told] == [["west"]]
    assert "| 1 | training | north, south | west |" in (made.folder / "card.md").read_text()
    for path in (*made.folder.iterdir(), *(path for path in out.rglob("*") if path.is_file())):
        body = path.read_bytes()
        assert not any(words.encode() in body for words in (code, explain_code(code)[0])), path.name


def test_the_network_of_a_bundle_of_ours_is_read_again_as_the_same(made: Exported, tmp_path: Path) -> None:
    out = tmp_path / "triage"
    assert typed(made.folder, out) == 0
    bundle = read_bundle(out)
    for key in ("preprocessing", "handlers"):  # which hold expressions of ours
        del bundle.configs["inference"][key]  # type: ignore[attr-defined]
    answers = Answers(kind="classification", classes=("healthy", "ill"), public_patients=200)
    again = task_from_toml(draft_of(bundle, answers).text, "")
    assert again.network == TASK.network
    assert (again.input.size, again.input.modality) == ((32, 32), "DX")


@pytest.mark.parametrize("signed", [True, False])
def test_a_task_of_toml_is_taken_where_none_lies_beside_the_model_and_another_is_refused(
    made: Exported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signed: bool,
) -> None:
    """Whether the certificate names it, or the model's file alone: of before the coordinator kept the task's text."""
    if signed:
        model = changed(made, tmp_path / "model", "task.json", None)
    else:
        model = exported_model(tmp_path / "hub", TASK, monkeypatch, with_task=False).folder
    assert typed(model, tmp_path / "none") == 1
    assert "has no task.json" in capsys.readouterr().err
    (tmp_path / "task.toml").write_text(TOML.replace("200", "201"))
    assert typed(model, tmp_path / "other", "--task", tmp_path / "task.toml") == 1
    why = "is not the task that the certificate" if signed else "is not a model of the task"
    assert why in capsys.readouterr().err
    (tmp_path / "task.toml").write_text(TOML)
    capsys.readouterr()
    assert typed(model, tmp_path / "right", "--task", tmp_path / "task.toml", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["task"] == TASK.digest
    assert sorted(told["files"]) == [
        "LICENSE", "configs/inference.json", "configs/metadata.json", "docs/README.md", "docs/certificate.json",
        "docs/ledger-certificate.json", "docs/task.json", "models/model.pt",
    ]  # fmt: skip
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("file", "body", "why"),
    [
        ("model.safetensors", b"x", "model.safetensors is not the file in SHA256SUMS"),
        ("card.json", b"{}", "card.json is not the file in SHA256SUMS"),
        ("SHA256SUMS", b"../secret", "has no model.safetensors"),
    ],
)
def test_a_changed_folder_is_refused_with_the_file_and_nothing_is_stored(
    made: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, body: bytes, why: str
) -> None:
    model = changed(made, tmp_path / "model", "card.md", b"# Another card\n")
    (model / file).write_bytes(body)
    assert typed(model, tmp_path / "out") == 1
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "body", "why"),
    [
        ("model.safetensors", b"x", "is not the file of the certificate"),
        ("certificate.json", b"{}", "certificate.json: missing, or of another model"),
        ("../secret", b"x", "SHA256SUMS names a file that is not in the folder"),
    ],
)
def test_sums_that_were_changed_too_do_not_help(
    made: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, body: bytes, why: str
) -> None:
    assert typed(changed(made, tmp_path / "model", file, body), tmp_path / "out") == 1
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_vector_of_another_length_is_refused_and_nothing_is_overwritten(
    made: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = exported_model(tmp_path / "short", TASK, monkeypatch, count=5)
    assert typed(short.folder, tmp_path / "out") == 1
    assert f"does not have the {PARAMETERS_IN_ALL} finite numbers" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert typed(made.folder, tmp_path / "out") == 1
    assert "exists already" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
