"""A folder of public images is read as a vault's are, and never without a word on where they come from."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from agent.federation.public_folder import PublicFolder, PublicFolderError
from policies.tasks.task import Task, task_from_table
from tests.support.public_folders import HEAD, public_folder, small_task, write_table


def folder_of(root: Path, task: Task, rows: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> PublicFolder:
    write_table(root, head, rows)
    return PublicFolder.open(root, task)


def test_pictures_become_examples_of_their_patients_and_other_labels_are_left_out(tmp_path: Path) -> None:
    root = public_folder(tmp_path / "public", patients=4)
    with (root / "labels.csv").open("a", newline="") as table:
        csv.writer(table).writerow(("0000.png", "stranger", "none of the classes"))
    found = PublicFolder.open(root, small_task())
    assert found.groups == {"": ("patient-0000", "patient-0001", "patient-0002", "patient-0003")}
    (example,) = found.patient("patient-0001").examples  # type: ignore[union-attr]
    stored = np.asarray(Image.open(root / "0001.png"), np.float32)
    assert np.array_equal(example.pixels, stored[None] / np.float32(255))
    assert example.target.tolist() == [1]


def test_without_a_source_nothing_is_read(tmp_path: Path) -> None:
    root = public_folder(tmp_path / "public")
    (root / "SOURCE.txt").write_text(" \n")
    with pytest.raises(PublicFolderError, match=r"public/SOURCE.txt: its first line .* public or made data only"):
        PublicFolder.open(root, small_task())


def test_a_dicom_file_is_not_read(tmp_path: Path) -> None:
    root = public_folder(tmp_path / "public")
    (root / "0000.dcm").write_bytes((root / "0000.png").read_bytes())
    found = folder_of(root, small_task(), [("0000.dcm", "patient", "dark")])
    with pytest.raises(PublicFolderError, match=r"0000.dcm: the task takes .png"):
        found.patient("patient")


@pytest.mark.parametrize(
    ("head", "row", "problem"),
    [
        (("file", "patient"), ("0000.png", "p"), "the first row lacks: label"),
        (HEAD, ("0000.png", "p"), "row 2: 2 cells, and the first row has 3"),
        (HEAD, ("0000.png", "", "dark"), "row 2: patient: empty"),
        (HEAD, ("../secret.png", "p", "dark"), "../secret.png: not a file of the folder"),
        (HEAD, ("9999.png", "p", "dark"), "9999.png: No such file"),
    ],
)
def test_a_fault_of_the_table_is_told_with_its_row(
    tmp_path: Path, head: Sequence[str], row: Sequence[str], problem: str
) -> None:
    with pytest.raises(PublicFolderError, match=problem):
        folder_of(public_folder(tmp_path / "public"), small_task(), [row], head)


def test_a_patient_at_two_sites_is_refused(tmp_path: Path) -> None:
    rows = [("0000.png", "p", "dark", "a"), ("0001.png", "p", "dark", "b")]
    with pytest.raises(PublicFolderError, match="row 3: site"):
        folder_of(public_folder(tmp_path / "public"), small_task(), rows, (*HEAD, "site"))


def test_a_picture_that_is_too_small_is_left_out_as_in_a_vault(tmp_path: Path) -> None:
    root = public_folder(tmp_path / "public")
    Image.fromarray(np.full((4, 4), 90, np.uint8)).save(root / "small.png")
    found = folder_of(root, small_task(), [("small.png", "p", "dark")])
    assert found.patient("p") is None
    assert list(found.left_out) == ["small.png"]


def test_findings_that_are_not_known_are_missing_and_numbers_are_scaled_by_their_public_bounds(
    tmp_path: Path,
) -> None:
    table = {**small_task().to_table(), "loss": {}}
    table["task"] = {"name": "several", "kind": "multi-label"}
    table["labels"] = {"table": "t", "columns": ["effusion", "edema"]}
    head, row = ("file", "patient", "effusion", "edema"), ("0000.png", "p", "1", "")
    root = public_folder(tmp_path / "public")
    (example,) = folder_of(root, task_from_table(table), [row], head).patient("p").examples  # type: ignore[union-attr]
    assert np.array_equal(example.target, np.array([1, np.nan], np.float32), equal_nan=True)
    with pytest.raises(PublicFolderError, match="row 2: effusion: 0, 1 or empty"):
        folder_of(root, task_from_table(table), [("0000.png", "p", "perhaps", "")], head)

    table["task"] = {"name": "number", "kind": "regression"}
    table["labels"] = {"table": "t", "columns": ["age"], "low": [20.0], "high": [120.0]}
    head, row = ("file", "patient", "age"), ("0000.png", "p", "70.0")
    (example,) = folder_of(root, task_from_table(table), [row], head).patient("p").examples  # type: ignore[union-attr]
    assert example.target.tolist() == [0.5]


def test_a_volume_and_its_mask_are_turned_alike_and_another_grid_is_refused(tmp_path: Path) -> None:
    values = np.zeros((16, 16, 16), np.int16)
    values[2:6, 9:15, 4:12] = 500
    masks = (values > 0).astype(np.uint8)
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    root = tmp_path / "public"
    root.mkdir()
    (root / "SOURCE.txt").write_text("made\n")
    for name, array, where in (("v", values, affine), ("m", masks, affine), ("other", masks, 2 * affine)):
        nibabel.Nifti1Image(array, where).to_filename(root / f"{name}.nii.gz")  # type: ignore[no-untyped-call]
    table = {
        **small_task().to_table(),
        "loss": {},
        "network": {"name": "segresnet", "options": {"width": 8, "levels": 2}},
    }
    table["task"] = {"name": "organ", "kind": "segmentation"}
    table["labels"] = {"classes": ["organ"]}
    table["input"] = {"modality": "CT", "size": [16, 16, 16], "window": [0.0, 500.0]}
    task, head = task_from_table(table), ("file", "patient", "mask")
    (example,) = folder_of(root, task, [("v.nii.gz", "p", "m.nii.gz")], head).patient("p").examples  # type: ignore[union-attr]
    assert example.pixels.shape == (1, 16, 16, 16)
    assert np.array_equal(example.pixels[0] > 0.5, example.target == 1)
    assert int(example.target.sum()) == int(masks.sum())
    with pytest.raises(PublicFolderError, match=r"other\.nii\.gz: the mask lies on another grid"):
        folder_of(root, task, [("v.nii.gz", "p", "other.nii.gz")], head).patient("p")
    with pytest.raises(PublicFolderError, match=r"v\.nii\.gz: mask: empty"):
        folder_of(root, task, [("v.nii.gz", "p", "")], head).patient("p")
