"""Which file is a mask, and of which volume: BIDS names, a MONAI list, a rule of names; never by a guess."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.ingest.nifti_pairs import MaskNames, MaskOf
from agent.ingest.patient_lists import Columns, Lists, PatientListError, read_lists


def laid(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"")


def bids(folder: Path, *paths: str) -> Lists:
    (folder / "dataset_description.json").write_text('{"Name": "x", "BIDSVersion": "1.10.0"}')
    (folder / "participants.tsv").write_text("participant_id\tmrn\nsub-01\tP-1\nsub-02\tP-2\n")
    laid(folder, *paths)
    return read_lists(folder, Columns(patient="mrn"), segments=("liver", "left-kidney"))


T1 = "sub-01/ses-1/anat/sub-01_ses-1_T1w.nii.gz"
OUT = "derivatives/seg/sub-01/ses-1/anat/sub-01_ses-1"


def test_a_bids_mask_is_of_the_one_volume_with_its_entities_and_of_its_patient(tmp_path: Path) -> None:
    other = ("sub-01/ses-2/anat/sub-01_ses-2_T1w.nii.gz", "sub-02/ses-1/anat/sub-02_ses-1_T1w.nii.gz")
    names = ("_dseg.nii.gz", "_desc-manual_dseg.nii", "_space-T1w_dseg.nii.gz", "_space-orig_seg-aseg_dseg.nii.gz")
    lists = bids(tmp_path, T1, *other, *(OUT + name for name in names))
    assert lists.masks == {OUT + name: MaskOf(T1) for name in names}
    assert {lists.patients[OUT + name] for name in names} == {"P-1"}


def test_the_name_of_a_bids_mask_says_its_segment(tmp_path: Path) -> None:
    names = {"_label-liver_mask": "liver", "_desc-Liver_mask": "liver", "_label-leftkidney_probseg": "left-kidney"}
    names |= {"_desc-brain_mask": "brain", "_mask": "", "_desc-liver_dseg": ""}
    lists = bids(tmp_path, T1, *(OUT + name + ".nii.gz" for name in names))
    assert lists.masks == {OUT + name + ".nii.gz": MaskOf(T1, said) for name, said in names.items()}


def test_where_two_volumes_have_the_name_the_sidecar_says_which(tmp_path: Path) -> None:
    flair = T1.replace("T1w", "FLAIR")
    masks = [f"{OUT}_desc-{n}_dseg.nii.gz" for n in "abcd"]
    laid(tmp_path, *masks)
    said = ("bids::" + flair, T1, [flair, T1])
    for path, sources in zip(masks, said, strict=False):
        told = {"Sources": sources if isinstance(sources, list) else [sources]}
        (tmp_path / path.replace(".nii.gz", ".json")).write_text(json.dumps(told))
    (tmp_path / masks[3].replace(".nii.gz", ".json")).write_text("not JSON")
    lists = bids(tmp_path, T1, flair)
    assert [lists.masks[path].volume for path in masks] == [flair, T1, "", ""]


def test_a_bids_mask_of_another_space_or_of_a_subject_without_a_patient_has_no_volume(tmp_path: Path) -> None:
    stranger = "derivatives/seg/sub-09/anat/sub-09_dseg.nii.gz"
    lists = bids(tmp_path, T1, OUT + "_space-MNI_dseg.nii.gz", stranger, "sub-09/anat/sub-09_T1w.nii.gz")
    assert lists.masks == {OUT + "_space-MNI_dseg.nii.gz": MaskOf(""), stranger: MaskOf("")}
    assert stranger not in lists.patients


def test_a_mask_of_the_raw_dataset_is_no_volume_of_it(tmp_path: Path) -> None:
    raw = "sub-01/ses-1/anat/sub-01_ses-1_label-lesion_mask.nii.gz"
    assert bids(tmp_path, T1, raw).masks == {raw: MaskOf(T1, "lesion")}


def test_a_monai_list_names_the_mask_of_each_image(tmp_path: Path) -> None:
    columns = Columns(patient="patient_id", data_list="d.json", mask="label")
    entries = [
        {"image": "a.nii.gz", "label": "seg/a.nii.gz", "patient_id": "P-1"},
        {"image": ["b0.nii.gz", "b1.nii.gz"], "label": str(tmp_path / "seg/b.nii.gz"), "patient_id": "P-2"},
        {"image": "c.nii.gz", "patient_id": "P-3"},
    ]
    (tmp_path / "d.json").write_text(json.dumps({"training": entries}))
    lists = read_lists(tmp_path, columns)
    assert lists.masks == {"seg/a.nii.gz": MaskOf("a.nii.gz"), "seg/b.nii.gz": MaskOf("")}
    assert lists.patients["seg/a.nii.gz"] == "P-1"
    for wrong, why in (({"label": "../x.nii"}, "below the folder"), ({"image": "c.nii.gz"}, "of another image")):
        changed = [entries[0], {**entries[0], **wrong}]
        (tmp_path / "d.json").write_text(json.dumps({"training": changed}))
        with pytest.raises(PatientListError, match=why):
            read_lists(tmp_path, columns)


def test_a_rule_of_names_finds_masks_beside_or_below(tmp_path: Path) -> None:
    laid(tmp_path, "imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz", "labelsTr/b.nii.gz", "x/c.nii", "x/c_seg.nii")
    (tmp_path / "nifti.csv").write_text("file,patient_id\nimagesTr/a_0000.nii.gz,P-1\nx/c.nii,P-3\n")
    nnunet = read_lists(tmp_path, names=MaskNames("labelsTr/*.nii.gz", "imagesTr/*_0000.nii.gz"))
    assert nnunet.masks == {"labelsTr/a.nii.gz": MaskOf("imagesTr/a_0000.nii.gz"), "labelsTr/b.nii.gz": MaskOf("")}
    assert nnunet.patients["labelsTr/a.nii.gz"] == "P-1"
    assert read_lists(tmp_path, names=MaskNames("*_seg.nii", "*.nii")).masks == {"x/c_seg.nii": MaskOf("x/c.nii")}
    assert read_lists(tmp_path).masks == {}


def test_a_mask_of_a_mask_is_of_no_volume(tmp_path: Path) -> None:
    laid(tmp_path, "a.nii", "a_seg.nii", "a_seg_seg.nii")
    found = read_lists(tmp_path, names=MaskNames("*_seg.nii", "*.nii")).masks
    assert found == {"a_seg.nii": MaskOf("a.nii"), "a_seg_seg.nii": MaskOf("")}


def test_another_patient_for_the_mask_is_a_contradiction(tmp_path: Path) -> None:
    laid(tmp_path, "a.nii", "a_seg.nii")
    (tmp_path / "nifti.csv").write_text("file,patient_id\na.nii,P-1\na_seg.nii,P-2\n")
    with pytest.raises(PatientListError, match="another patient"):
        read_lists(tmp_path, names=MaskNames("*_seg.nii", "*.nii"))


@pytest.mark.parametrize(
    ("masks", "volumes", "why"),
    [("*/*.nii", "*.nii", "masks: must be"), ("*.nii", "a.nii", "volumes: must be"), ("*.nii", "*.nii", "differ")],
)
def test_a_rule_that_could_find_nothing_or_itself_is_refused(masks: str, volumes: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        MaskNames(masks, volumes)
