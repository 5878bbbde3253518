"""Who the patient of a volume is: CSV, BIDS and MONAI lists, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.ingest.patient_lists import Columns, PatientListError, read_lists


def _bids(folder: Path, table: str, *volumes: str) -> Path:
    (folder / "dataset_description.json").write_text('{"Name": "x", "BIDSVersion": "1.10.0"}')
    (folder / "participants.tsv").write_text(table)
    for volume in volumes:
        path = folder / volume
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def test_every_volume_of_a_bids_dataset_has_its_participant(tmp_path: Path) -> None:
    volumes = ("sub-01/anat/sub-01_T1w.nii.gz", "sub-02/ses-a/anat/sub-02_ses-a_T1w.nii")
    table = "participant_id\tgroup\nsub-01\tcontrol\nsub-02\tn/a\n"
    lists = read_lists(_bids(tmp_path, table, *volumes), Columns(label="group", issuer="study"))
    assert lists.patients == {volumes[0]: "sub-01", volumes[1]: "sub-02"}
    assert lists.labels == {volumes[0]: "control"}
    assert lists.issuer == "study"
    assert {"participants.tsv", "dataset_description.json"} <= lists.aside


def test_the_hospitals_own_patient_id_may_stand_in_a_column(tmp_path: Path) -> None:
    _bids(tmp_path, "participant_id\tmrn\nsub-01\tP-77\n", "sub-01/anat/sub-01_T1w.nii")
    lists = read_lists(tmp_path, Columns(patient="mrn"))
    assert dict(lists.patients) == {"sub-01/anat/sub-01_T1w.nii": "P-77"}


def test_a_volume_outside_the_bids_layout_has_no_patient(tmp_path: Path) -> None:
    volumes = ("sub-01/anat/sub-02_T1w.nii", "derivatives/sub-01/sub-01_mask.nii", "sub-09/anat/sub-09_T1w.nii")
    lists = read_lists(_bids(tmp_path, "participant_id\nsub-01\nsub-02\n", *volumes))
    assert not lists.patients


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("who\nsub-01\n", "columns"),
        ("participant_id\nsub-01\n\nsub 2\n", "line"),
        ("participant_id\tmrn\nsub-01\tA\nsub-01\tB\n", "contradicts"),
        ("participant_id\tmrn\nsub-01\tn/a\n", "needed"),
    ],
)
def test_a_bad_table_of_participants_stops_the_run_and_says_no_value(tmp_path: Path, table: str, says: str) -> None:
    _bids(tmp_path, table)
    with pytest.raises(PatientListError, match=says) as caught:
        read_lists(tmp_path, Columns(patient="mrn" if "mrn" in table else ""))
    assert "sub-01" not in str(caught.value)


def test_a_bids_dataset_without_its_table_names_no_patient(tmp_path: Path) -> None:
    (tmp_path / "dataset_description.json").write_text("{}")
    with pytest.raises(PatientListError, match=r"participants\.tsv is missing"):
        read_lists(tmp_path)


MONAI = Columns(patient="patient_id", label="label", data_list="dataset.json")


def test_a_monai_list_names_patients_and_labels(tmp_path: Path) -> None:
    entries = [
        {"image": "a.nii.gz", "label": 1, "patient_id": "P1"},
        {"image": ["b_t1.nii", "./b_t2.nii"], "label": "high", "patient_id": "P2"},
    ]
    whole = {"name": "x", "training": entries, "validation": [{"image": str(tmp_path / "c.nii"), "patient_id": "P1"}]}
    (tmp_path / "dataset.json").write_text(json.dumps(whole))
    lists = read_lists(tmp_path, MONAI)
    assert lists.patients == {"a.nii.gz": "P1", "b_t1.nii": "P2", "b_t2.nii": "P2", "c.nii": "P1"}
    assert lists.labels == {"a.nii.gz": "1", "b_t1.nii": "high", "b_t2.nii": "high"}
    assert "dataset.json" in lists.aside


@pytest.mark.parametrize(
    "entry",
    [
        {"image": "a.nii"},
        {"image": "a.nii", "patient_id": ""},
        {"image": "a.nii", "patient_id": 7},
        {"image": "../a.nii", "patient_id": "P"},
        {"image": "/etc/passwd", "patient_id": "P"},
        {"image": None, "patient_id": "P"},
    ],
)
def test_an_entry_without_a_patient_or_outside_the_folder_stops_the_run(
    tmp_path: Path, entry: dict[str, object]
) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({"training": [entry]}))
    with pytest.raises(PatientListError, match=r"training\[0\]"):
        read_lists(tmp_path, MONAI)


def test_a_monai_list_needs_the_name_of_the_patients_key(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(PatientListError, match="patient_key"):
        read_lists(tmp_path, Columns(data_list="dataset.json"))


@pytest.mark.parametrize("text", ["[", "[]", "[" * 100_000, '"x"'])
def test_a_list_that_is_no_json_object_stops_the_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(PatientListError, match=r"dataset\.json"):
        read_lists(tmp_path, MONAI)


def test_two_lists_that_contradict_each_other_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "nifti.csv").write_text("file,patient_id\na.nii,P1\n")
    (tmp_path / "dataset.json").write_text(json.dumps({"t": [{"image": "a.nii", "patient_id": "P2"}]}))
    with pytest.raises(PatientListError, match="contradicts"):
        read_lists(tmp_path, MONAI)
