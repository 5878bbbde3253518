"""NIfTI masks from a folder into the vault: by the confined reader, with their volumes, and only where listed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

from agent.domain import ExampleRule
from agent.ingest.context import open_ingest
from agent.ingest.folders import FolderWatcher
from agent.storage.examples import survey, task_cohort
from agent.storage.instance_index import DefacedInstance, InstanceRecord
from agent.storage.site_directory import MAIN, SiteDirectory
from tests.support.ingest_site import ingest_site, one_reader, told, typed
from tests.support.nifti_scans import GRID, SETTINGS, SHAPE, drawing, put, scan, take_faces_off

__all__ = ["one_reader"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_reader")
RULE = ExampleRule("segmentation", "MR", (8, 10, 12), classes=("liver", "mass"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A hospital whose folder has two scans of one patient, one of another, and a mask of two of them."""
    home = ingest_site(tmp_path)
    (home / "ingest.toml").write_text(SETTINGS)
    folder = tmp_path / "input"
    for number in (1, 2, 3):
        put(folder, f"imagesTr/{number}.nii.gz", scan(number))
    put(folder, "labelsTr/1.nii.gz", drawing())
    put(folder, "labelsTr/3.nii.gz", np.zeros(SHAPE, np.float32))
    rows = "".join(f"imagesTr/{number}.nii.gz,MRN-{1 + number // 3}\n" for number in (1, 2, 3))
    (folder / "nifti.csv").write_text("file,patient_id\n" + rows)
    return home


def heads(site: Path) -> list[InstanceRecord]:
    with open_ingest(SiteDirectory(site), MAIN) as way:
        return sorted(way.vault.heads(), key=lambda head: (head.kind, head.person))


def refused(capsys: pytest.CaptureFixture[str], site: Path) -> dict[str, int]:
    found: dict[str, int] = told(capsys, site, "ingest")["quarantined"]
    return found


def test_a_mask_comes_in_with_its_volume_and_is_a_tasks_target(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, site, "ingest")
    assert (found["kept"], found["quarantined"]) == (5, {})
    kept = heads(site)
    assert [head.kind for head in kept] == ["mask", "mask", "volume", "volume", "volume"]
    for mask in kept[:2]:
        (whole,) = (head for head in kept if head.series == mask.masks)
        assert (whole.kind, whole.person, whole.study) == ("volume", mask.person, mask.study)
        assert (mask.modality, mask.face, mask.shape, mask.label) == ("SEG", False, None, "")
    with open_ingest(SiteDirectory(site), MAIN) as way:
        assert {one.reason for one in survey(way.vault, RULE).left_out} == {"face"}, "heads stay withheld"
    take_faces_off(site)
    with open_ingest(SiteDirectory(site), MAIN) as way:
        for head in kept[:2]:
            raw = way.vault.payload(head.name)
            assert b"PLANTED" not in raw
            assert b"MRN-1" not in raw
        patients = {p.pseudonym: p.examples for p in task_cohort(way.vault, RULE).patients}
        assert {p: len(e) for p, e in patients.items()} == {head.person: 1 for head in kept[:2]}
        drawn = next(e for (e,) in patients.values() if e.target.any()).target
        none = [(one.reason, one.images, one.patients) for one in survey(way.vault, RULE).left_out]
    expected = drawing().transpose(2, 1, 0)  # either's axes run to the left, to the back and upwards
    assert np.array_equal(drawn == 1, expected == 1)
    assert np.array_equal(drawn == 2, expected == 3)
    assert none == [("no_mask", 1, 1)]
    found = told(capsys, site, "cohort", "--segment", "liver", "--modality", "MR", "--size", "8,10,12")
    assert (found["patients"], found["outputs"]) == (2, [{"output": "liver", "patients": 1}])
    states = {(one["modality"], one["state"]): one["instances"] for one in told(capsys, site, "cohort")}
    assert states[("SEG", "mask")] == 2


def test_a_second_ingest_finds_nothing_new(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, site, "ingest")
    found = told(capsys, site, "ingest")
    assert (found["kept"], found["duplicates"], found["quarantined"]) == (0, 5, {})


def test_equal_masks_of_two_volumes_are_two(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = site.parent / "input"
    for number in (1, 2):
        put(folder, f"labelsTr/{number}.nii.gz", np.zeros(SHAPE, np.uint8))
    assert told(capsys, site, "ingest")["kept"] == 6
    assert len({head.masks for head in heads(site) if head.kind == "mask"}) == 3


def test_a_mask_that_does_not_fit_is_refused_with_what_differs(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = site.parent / "input"
    moved = GRID.copy()
    moved[2, 3] += 3
    put(folder, "labelsTr/1.nii.gz", drawing()[..., 1:])
    put(folder, "labelsTr/2.nii.gz", drawing(), moved)
    put(folder, "labelsTr/3.nii.gz", drawing() * 2)
    put(folder, "labelsTr/4.nii.gz", drawing())
    put(folder, "imagesTr/5.nii.gz", scan(5))
    put(folder, "labelsTr/5.nii.gz", drawing())
    wanted = ["mask_of_other_place", "mask_of_other_shape", "mask_without_volume", "segment_not_listed"]
    codes = told(capsys, site, "ingest")["quarantined"]
    assert codes == dict.fromkeys(wanted, 1) | {"nifti_without_patient": 2}
    assert {head.kind for head in heads(site)} == {"volume"}
    _, out, _ = typed(capsys, site, "quarantine", "list")
    assert "PLANTED" not in out


def test_without_numbers_in_the_list_of_segments_masks_stay_out(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "ingest.toml").write_text(
        SETTINGS.replace("nifti_values = [1]\n", "").replace("nifti_values = [2, 3]\n", "")
    )
    assert refused(capsys, site) == {"segment_not_listed": 2}
    (site / "ingest.toml").write_text(SETTINGS)
    assert told(capsys, site, "quarantine", "retry")["kept"] == 2


def test_a_refused_volume_has_its_patient_at_a_retry_too(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "ingest.toml").write_text(SETTINGS + "[rules]\nmax_pixels = 900\n")
    assert refused(capsys, site) == {"too_large": 5}
    (site / "ingest.toml").write_text(SETTINGS)
    assert told(capsys, site, "quarantine", "retry")["kept"] == 5


def test_what_would_be_done_to_a_mask_is_told(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = site.parent / "input"
    (found,) = told(capsys, site, "what-if", str(folder / "labelsTr/1.nii.gz"))
    assert (found["kind"], found["modality"], found["eligible"]) == ("mask", "SEG", "as the mask of its series")
    (folder / "imagesTr/1.nii.gz").unlink()
    (found,) = told(capsys, site, "what-if", str(folder / "labelsTr/1.nii.gz"), status=1)
    assert found["refused"] == "mask_without_volume"
    assert heads(site) == []


def test_masks_of_a_bids_dataset_come_in_by_their_names(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = site.parent / "bids"
    put(folder, "sub-01/anat/sub-01_T1w.nii.gz", scan(1))
    put(folder, "derivatives/x/sub-01/anat/sub-01_dseg.nii.gz", drawing())
    put(folder, "derivatives/x/sub-01/anat/sub-01_label-mass_mask.nii.gz", (drawing() == 3).astype(np.uint8))
    put(folder, "derivatives/x/sub-01/anat/sub-01_desc-brain_mask.nii.gz", np.ones(SHAPE, np.uint8))
    put(folder, "derivatives/x/sub-01/anat/sub-01_label-mass_probseg.nii.gz", np.full(SHAPE, 0.5, np.float32))
    (folder / "dataset_description.json").write_text('{"Name": "x", "BIDSVersion": "1.10.0"}')
    (folder / "participants.tsv").write_text("participant_id\tmrn\nsub-01\tMRN-9\n")
    settings = SETTINGS.partition("[nifti]")[0] + '[[folder]]\npath = "../bids"\npatient_key = "mrn"\n'
    (site / "ingest.toml").write_text(settings)
    for path in (site.parent / "input").rglob("*.nii.gz"):
        path.unlink()
    found = told(capsys, site, "ingest")
    assert (found["kept"], found["quarantined"]) == (3, {"mask_of_probabilities": 1, "segment_not_listed": 1})
    assert len({head.masks for head in heads(site) if head.kind == "mask"}) == 1


def test_a_watched_mask_is_read_once_its_volume_rests_and_again_when_it_comes(site: Path) -> None:
    (site / "ingest.toml").write_text(SETTINGS + '[[folder]]\npath = "../input"\nwatch = true\nsettle_seconds = 5\n')
    folder, now = site.parent / "input", [0.0]
    for path in folder.rglob("*.nii.gz"):
        os.utime(path, (0, 0))
    os.utime(folder / "imagesTr/1.nii.gz", (18, 18))
    late = folder / "imagesTr/3.nii.gz"
    waiting = late.read_bytes()
    late.unlink()
    with open_ingest(SiteDirectory(site), MAIN) as way:
        watched = FolderWatcher(way.ingestion.folders[0], lambda: now[0])

        def rested(at: float) -> set[str]:
            now[0] = at
            found = watched.rested(way.lists(watched.folder), (site,), 2**20)
            watched.taken(found)
            return {one.path for one in found}

        assert rested(20) == set()
        assert rested(21) == {"imagesTr/2.nii.gz", "labelsTr/3.nii.gz"}, "3 has no volume and will be refused for it"
        assert rested(24) == {"imagesTr/1.nii.gz", "labelsTr/1.nii.gz"}
        late.write_bytes(waiting)
        os.utime(late, (25, 25))
        assert rested(31) == set()
        assert rested(32) == {"imagesTr/3.nii.gz", "labelsTr/3.nii.gz"}


def test_a_mask_is_gone_with_its_patient(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, site, "ingest")
    with open_ingest(SiteDirectory(site), MAIN) as way:
        whose = next(head.person for head in way.vault.heads() if head.kind == "mask")
        way.vault.purge({whose})
        assert [head.kind for head in way.vault.heads() if head.person == whose] == []


def test_a_mask_laid_on_another_grid_later_is_not_used(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands in the vault is compared again: a defaced volume is another file."""
    told(capsys, site, "ingest")
    with open_ingest(SiteDirectory(site), MAIN) as way:
        for study, _ in way.vault.faces():
            found = way.vault.faces_of(study)
            image = [nibabel.Nifti1Image.from_bytes(one.payload) for one in found]
            moved = [nibabel.Nifti1Image(np.asarray(i.dataobj), i.affine + np.eye(4, k=3)) for i in image]
            assert way.vault.defaced(
                [DefacedInstance(f.name, i.to_bytes()) for f, i in zip(found, moved, strict=True)]
            )
        left = {one.reason: one.images for one in survey(way.vault, RULE).left_out}
        assert left == {"no_mask": 1, "mask_geometry": 2}
        assert task_cohort(way.vault, replace(RULE, classes=("mass",))).patients == ()
