"""MIMIC-CXR-JPG from a folder in its layout, made-up radiographs in the same shape, and the paper's parts of both."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deploy.phantoms import chest
from deploy.reproduction import mimic_cxr
from deploy.reproduction.file_lists import DatasetError

HEADS = {
    "metadata": ("dicom_id", "subject_id", "study_id", "PerformedProcedureStepDescription", "ViewPosition", "Rows"),
    # the order of the published file
    "chexpert": (
        *("subject_id", "study_id", "Atelectasis", "Cardiomegaly", "Consolidation", "Edema"),
        *("Enlarged Cardiomediastinum", "Fracture", "Lung Lesion", "Lung Opacity", "No Finding"),
        *("Pleural Effusion", "Pleural Other", "Pneumonia", "Pneumothorax", "Support Devices"),
    ),
    "split": ("dicom_id", "study_id", "subject_id", "split"),
}
# patient, study, view, part, then the five labels: of four patients, one of whom has a lateral view as well
ROWS = (
    (10000032, 50414267, "PA", "train", ("1.0", "", "", "0.0", "1.0")),
    (10000032, 50414267, "LATERAL", "train", ("1.0", "", "", "0.0", "1.0")),
    (10000032, 53189527, "AP", "train", ("", "-1.0", "", "", "")),
    (10000764, 57375967, "AP", "validate", ("", "", "1.0", "", "")),
    (11000898, 50771383, "PA", "test", ("", "1.0", "-1.0", "1.0", "0.0")),
    (11000898, 54205396, "PA", "test", ("", "", "", "", "")),
    (11000935, 50578979, "", "train", ("1.0", "", "", "", "")),
    (11000935, 51178377, "PA", "train", None),  # a study without a label
)
Lists = dict[str, list[tuple[str, ...]]]
Edit = Callable[[Lists], None]


def _name(number: int) -> str:
    return "-".join(f"{(number + 1) * 0x1234567 + part:08x}" for part in range(5))


def _lists() -> Lists:
    metadata, split, labels = list[tuple[str, ...]](), list[tuple[str, ...]](), dict[int, tuple[str, ...]]()
    for number, (patient, study, view, part, told) in enumerate(ROWS):
        metadata.append((_name(number), str(patient), str(study), "CHEST (PA AND LAT), 2 views", view, "3056"))
        split.append((_name(number), str(study), str(patient), part))
        if told:
            labels[study] = (str(patient), str(study), *told[:4], *(("1.0",) * 5), told[4], *(("",) * 4))
    return {"metadata": metadata, "chexpert": list(labels.values()), "split": split}


def _path(folder: Path, number: int) -> Path:
    patient, study = ROWS[number][:2]
    return folder / "files" / f"p{str(patient)[:2]}" / f"p{patient}" / f"s{study}" / f"{_name(number)}.jpg"


def _write(folder: Path, edit: Edit = lambda lists: None) -> Path:
    lists = _lists()
    edit(lists)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in lists.items():
        with gzip.open(folder / f"mimic-cxr-2.0.0-{name}.csv.gz", "wt", newline="") as stream:
            csv.writer(stream).writerows([HEADS[name], *rows])
    for number in range(len(ROWS)):
        path = _path(folder, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        levels = np.full((96, 80), 20 * (number + 1), np.uint8)  # taller than wide
        levels[:8] = 255  # cut away with the rest of what is not the centred square
        Image.fromarray(levels).save(path, quality=95)
    return folder


def test_frontal_views_with_labels_are_read_with_owners_findings_and_parts(tmp_path: Path) -> None:
    found = mimic_cxr.mimic_cxr(_write(tmp_path), 16)
    assert found.images.shape == (5, 16, 16)
    assert found.owners.tolist() == [0, 0, 1, 2, 2]
    assert found.labels == ("atelectasis+effusion", "none", "consolidation", "cardiomegaly+edema", "none")
    assert [mimic_cxr.PARTS[part] for part in found.part] == ["train", "train", "validate", "test", "test"]
    assert np.abs(found.images.mean(axis=(1, 2)) - np.array([20, 60, 80, 100, 120])).max() <= 2
    assert found.rows("test").tolist() == [3, 4]
    assert found.take(found.rows("validate")).owners.tolist() == [1]


def test_a_limit_takes_the_first_patients_whole_and_reads_no_other_file(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    for number in range(3, 8):
        _path(folder, number).unlink()
    assert mimic_cxr.mimic_cxr(folder, 16, 2).owners.tolist() == [0, 0]
    for limit in (0, 1):
        with pytest.raises(DatasetError, match="limit"):
            mimic_cxr.mimic_cxr(folder, 16, limit)
    with pytest.raises(DatasetError, match="missing: number 4, 5, 6 of the list"):
        mimic_cxr.mimic_cxr(folder, 16)


def _set(name: str, row: int, **cells: str) -> Edit:
    def edit(lists: Lists) -> None:
        old = dict(zip(HEADS[name], lists[name][row], strict=True))
        lists[name][row] = tuple((old | cells).values())

    return edit


BAD = {
    "a path out of the folder": (
        _set("metadata", 0, dicom_id="../../../../secret"),
        "an id is not one of MIMIC's: number 1",
    ),
    "a patient that is a path": (_set("metadata", 2, subject_id="10/../..1"), "an id is not"),
    "a line that goes on": (_set("metadata", 2, study_id="53189527\n1"), "an id is not"),
    "a picture twice": (_set("metadata", 1, dicom_id=_name(0)), "an image is there twice: number 2"),
    "a study of two": (_set("metadata", 2, study_id="57375967"), "a study is of two patients: number 4"),
    "a study labelled twice": (
        lambda lists: lists["chexpert"].append(lists["chexpert"][0]),
        "a study is there twice",
    ),
    "labels of another": (_set("chexpert", 0, subject_id="10000764"), "another patient's: number 1"),
    "an unknown label": (_set("chexpert", 1, Edema="2.0"), "a label is not 1.0, 0.0, -1.0 or empty: number 2"),
    "a label that is no number": (_set("chexpert", 1, Edema="nan"), "a label is not"),
    "an unknown part": (_set("split", 3, split="holdout"), "a part is not one of"),
    "a patient in two parts": (_set("split", 4, split="train"), "a patient is in two parts: number 6"),
    "a picture in two parts": (lambda lists: lists["split"].append(lists["split"][0]), "an image is there twice"),
    "a picture in no part": (lambda lists: lists["split"].pop(0), "1 images of the metadata are in no part"),
    "a short row": (lambda lists: lists["split"].append(("x",)), "one cell for each column"),
    "no frontal view": (lambda lists: lists["metadata"].clear(), "no frontal image has labels"),
}


@pytest.mark.parametrize("what", BAD)
def test_lists_that_make_no_sense_are_refused_without_their_content(what: str, tmp_path: Path) -> None:
    edit, reason = BAD[what]
    with pytest.raises(DatasetError, match=reason) as refused:
        mimic_cxr.mimic_cxr(_write(tmp_path, edit), 16)
    assert not any(secret in str(refused.value) for secret in ("1000", "1100", "5041", _name(0), "secret", "holdout"))


def test_a_file_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder, elsewhere = _write(tmp_path / "data"), tmp_path / "elsewhere.jpg"
    _path(folder, 0).rename(elsewhere)
    _path(folder, 0).symlink_to(elsewhere)
    with pytest.raises(DatasetError, match="outside the folder: number 1 of"):
        mimic_cxr.mimic_cxr(folder, 16)
    _path(folder, 0).unlink()
    elsewhere.rename(_path(folder, 0))
    (folder / "files").rename(tmp_path / "disk")
    (folder / "files").symlink_to(tmp_path / "disk")  # the operator's own link to a larger disk
    assert len(mimic_cxr.mimic_cxr(folder, 16)) == 5


def test_files_that_are_no_radiograph_are_refused_by_their_number(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    with pytest.raises(DatasetError, match="image 1 of the list is smaller than 81 x 81"):
        mimic_cxr.mimic_cxr(folder, 81)
    whole = _path(folder, 2).read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"GIF89a" + whole):
        _path(folder, 2).write_bytes(content)
        with pytest.raises(DatasetError, match="image 3 of the list cannot be read"):
            mimic_cxr.mimic_cxr(folder, 16)
    Image.new("L", (9000, 9000)).save(_path(folder, 2))
    with pytest.raises(DatasetError, match="image 3 of the list has more pixels"):
        mimic_cxr.mimic_cxr(folder, 16)


def test_lists_that_are_missing_or_fill_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DatasetError, match="folder is missing"):
        mimic_cxr.mimic_cxr(tmp_path / "nowhere", 16)
    folder = _write(tmp_path)
    monkeypatch.setattr(mimic_cxr, "_MOST_BYTES", 4 * 16 * 16)
    with pytest.raises(DatasetError, match="a limit of at most 4 images"):
        mimic_cxr.mimic_cxr(folder, 16)
    assert len(mimic_cxr.mimic_cxr(folder, 16, 3)) == 3
    with monkeypatch.context() as patch:
        patch.setattr(mimic_cxr, "_MOST_LINES", 3)
        with pytest.raises(DatasetError, match="more lines, or longer ones"):
            mimic_cxr.mimic_cxr(folder, 16)
    packed = folder / "mimic-cxr-2.0.0-metadata.csv.gz"
    for content, reason in (
        (gzip.compress(b"x" * 10**6), "longer ones"),
        (gzip.compress(b"dicom_id\n"), "missing columns: subject_id, study_id, ViewPosition"),
        (packed.read_bytes()[:-20], "cannot be read"),
        (packed.read_bytes()[:20] + b"\xff" * 40, "cannot be read"),
        (gzip.compress(b"\xff\xfe"), "cannot be read"),
        (b"plain", "cannot be read"),
    ):
        packed.write_bytes(content)
        with pytest.raises(DatasetError, match=reason):
            mimic_cxr.mimic_cxr(folder, 16)
    packed.unlink()
    with pytest.raises(DatasetError, match=r"metadata\.csv\.gz is missing"):
        mimic_cxr.mimic_cxr(folder, 16)


def _made(count: int = 40, visits: int = 3) -> mimic_cxr.Chests:
    return mimic_cxr.chests_from_phantoms(chest.chest_patients(count, np.random.default_rng(1), 16, visits))


def test_made_radiographs_are_as_drawn() -> None:
    patients = chest.chest_patients(4, np.random.default_rng(1), 16, 3)
    found = mimic_cxr.chests_from_phantoms(patients)
    assert np.array_equal(found.images, np.stack([one for p in patients for one in p.radiographs]))
    assert found.labels == tuple(chest.label_of(one) for p in patients for one in p.findings)
    assert len(found.rows("train")) == len(found) == 12


def test_parts_are_by_patient_and_half_of_a_tenth_is_moved() -> None:
    split = mimic_cxr.parted(_made(), 0.5, np.random.default_rng(2))
    test, train = (set(split.owners[split.rows(part)].tolist()) for part in ("test", "train"))
    assert (len(test), len(train), test & train) == (20, 20, set())
    after = mimic_cxr.moved(split, np.random.default_rng(3))
    changed = np.flatnonzero(after.part != split.part)
    assert [mimic_cxr.PARTS[part] for part in after.part[changed]] == [
        "train"
    ] * 2  # 10 % of 20 patients, 3 // 2 each
    both = set(after.owners[after.rows("test")].tolist()) & set(after.owners[after.rows("train")].tolist())
    assert both == set(split.owners[changed].tolist())
    assert both <= test
    assert len(both) == 2
    again = mimic_cxr.moved(split, np.random.default_rng(3))
    assert np.array_equal(after.part, again.part)


def test_parts_that_leave_nobody_are_refused() -> None:
    made = _made(4)
    for share in (0.0, 0.1, 0.9, 1.0, float("nan")):
        with pytest.raises(ValueError, match="somebody is left"):
            mimic_cxr.parted(made, share, np.random.default_rng(0))
    single = mimic_cxr.parted(_made(4, 1), 0.5, np.random.default_rng(0))
    for wrong, share in ((made, 0.1), (single, 0.1), (mimic_cxr.parted(made, 0.5, np.random.default_rng(0)), 0.0)):
        with pytest.raises(ValueError, match="two images"):
            mimic_cxr.moved(wrong, np.random.default_rng(0), share)


def test_what_does_not_fit_together_is_refused() -> None:
    made = _made(2)
    for wrong in (
        {"images": made.images[:0]},
        {"images": made.images[:, :8]},
        {"images": made.images.astype(np.float32)},
        {"owners": made.owners[:-1]},
        {"owners": made.owners - 1},
        {"findings": made.findings[:, :4]},
        {"part": made.part + 3},
    ):
        with pytest.raises(ValueError, match=r"radiograph|owner|part"):
            replace(made, **wrong)
