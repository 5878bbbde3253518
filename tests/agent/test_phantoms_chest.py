"""Made-up radiographs: bones and heart are who, what is found is new at every visit."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pydicom
import pytest
from scipy import ndimage
from sklearn.linear_model import LogisticRegression

from agent.deidentify.glyphs import shows_text
from agent.phantoms import chest


def _patients(count: int, seed: int = 0, side: int = 32, visits: int = 1) -> list[chest.ChestPatient]:
    return chest.chest_patients(count, np.random.default_rng(seed), side, visits)


def test_the_generator_decides_everything_and_findings_are_even() -> None:
    one, two, other = (chest.stacked(_patients(9, seed, visits=2)) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(one[0], other[0])
    assert one[0].shape == (18, 32, 32)
    assert np.bincount(one[2]).tolist() == [6, 6, 6]


def _alike(one: np.ndarray, two: np.ndarray) -> float:
    """The best correlation of fine structures over small shifts: the patient stands elsewhere each time."""
    fine = [picture - ndimage.gaussian_filter(picture, 4) for picture in (one, two)]
    inner = fine[0][4:-4, 4:-4].ravel()
    shifted = (fine[1][4 + y : 60 + y, 4 + x : 60 + x].ravel() for y in range(-3, 4) for x in range(-3, 4))
    return max(float(np.corrcoef(inner, other)[0, 1]) for other in shifted)


def test_a_person_is_more_like_itself_at_the_next_visit_than_like_anybody_else() -> None:
    pictures = [[r.astype(float) for r in p.radiographs] for p in _patients(12, 3, 64, 2)]
    likeness = np.array([[_alike(a[0], b[1]) for b in pictures] for a in pictures])
    assert (likeness.argmax(axis=1) == np.arange(12)).mean() >= 0.6  # rank 1, against chance of 1 in 12


def test_the_finding_is_to_be_learned_from_the_picture() -> None:
    train, test = (chest.stacked(_patients(240, seed)) for seed in (1, 2))
    model = LogisticRegression(max_iter=500, C=0.1).fit(train[0].reshape(240, -1), train[2])
    assert model.score(test[0].reshape(240, -1), test[2]) > 0.6  # chance is a third


def test_what_is_no_finding_and_what_is_too_small_is_refused() -> None:
    person = chest.thorax(np.random.default_rng(0))
    for finding, size in (("fracture", 64), ("none", 8)):
        with pytest.raises(ValueError, match="finding"):
            chest.radiograph(person, finding, size, np.random.default_rng(0))  # type: ignore[arg-type]


def test_the_files_are_computed_radiographs_full_of_names(tmp_path: Path) -> None:
    made = _patients(3, visits=2)
    planted = chest.write_clinic(tmp_path, 0, made, np.random.default_rng(9))
    files = sorted(tmp_path.glob("*/*/*.dcm"))
    assert len(files) == 6
    with (tmp_path / "labels.csv").open() as stream:
        labels = {row["sop_instance_uid"]: row["label"] for row in csv.DictReader(stream)}
    by_id = {one.patient_id: one for one in planted.patients}
    for path in files:
        dataset = pydicom.dcmread(path)
        assert dataset.SOPClassUID == "1.2.840.10008.5.1.4.1.1.1"
        assert (dataset.Modality, dataset.BodyPartExamined) == ("CR", "CHEST")
        assert labels[dataset.SOPInstanceUID] == by_id[dataset.PatientID].label
        assert any(np.array_equal(dataset.pixel_array, r) for p in made for r in p.radiographs)


def test_no_chest_is_taken_for_one_with_text_in_it() -> None:
    assert not any(shows_text(r) for side in (64, 128) for p in _patients(6, 4, side) for r in p.radiographs)
