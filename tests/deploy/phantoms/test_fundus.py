"""Made-up retinas: vessels are who, lesions are how ill, and the files are DICOM."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from scipy import ndimage
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import cohen_kappa_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from agent.deidentify.pixels.burned_in_text import has_burned_in_text
from deploy.phantoms import fundus
from deploy.phantoms.retina import anatomy, photograph


def _patients(count: int, seed: int = 0, side: int = 32, visits: int = 1) -> list[fundus.FundusPatient]:
    return fundus.fundus_patients(count, np.random.default_rng(seed), side, visits)


def _same(one: list[fundus.FundusPatient], two: list[fundus.FundusPatient]) -> bool:
    return np.array_equal(fundus.stacked(one)[0], fundus.stacked(two)[0])


def test_the_generator_decides_everything() -> None:
    assert _same(_patients(3), _patients(3))
    assert not _same(_patients(3), _patients(3, seed=1))


def test_every_patient_has_both_eyes_at_every_visit() -> None:
    images, owners, grades = fundus.stacked(_patients(5, visits=2))
    assert images.shape == (20, 32, 32, 3)
    assert images.dtype == np.float32
    assert np.array_equal(np.bincount(owners), [4] * 5)
    assert sorted(set(grades.tolist())) == [0, 1, 2, 3, 4]
    found = [(photo.eye, photo.visit) for photo in _patients(1, visits=2)[0].photographs]
    assert found == [("left", 0), ("right", 0), ("left", 1), ("right", 1)]


def test_grades_follow_the_shares_as_nearly_as_whole_patients_can() -> None:
    rng = np.random.default_rng(0)
    made = fundus.fundus_patients(100, rng, 16, eyes=("left",), shares=fundus.APTOS_SHARES)
    counts = np.bincount([patient.grade for patient in made], minlength=5)
    assert np.abs(counts - 100 * np.array(fundus.APTOS_SHARES)).max() <= 1


@pytest.mark.parametrize("shares", [(1.0,) * 4, (0.0,) * 5, (-1.0, 1, 1, 1, 1)])
def test_shares_that_are_none_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="five shares"):
        fundus.fundus_patients(2, np.random.default_rng(0), 16, shares=shares)


def _vessels(picture: np.ndarray) -> np.ndarray:
    """Dark thin structures of the green channel: what a closing fills in."""
    green = picture[..., 1].astype(np.float32)
    return ndimage.gaussian_filter(ndimage.grey_closing(green, (5, 5)) - green, 1.5)


def _alike(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.corrcoef(_vessels(one).ravel(), _vessels(two).ravel())[0, 1])


def test_the_vessels_of_an_eye_are_the_same_at_the_next_visit_and_nobody_elses() -> None:
    eyes = [
        [photo.pixels for photo in patient.photographs]
        for patient in fundus.fundus_patients(12, np.random.default_rng(4), 64, 2, ("left",), (1, 0, 0, 0, 0))
    ]
    likeness = np.array([[_alike(first[0], second[1]) for second in eyes] for first in eyes])
    assert (likeness.argmax(axis=1) == np.arange(12)).mean() >= 0.9  # rank 1, against chance of 1 in 12


def test_an_eye_is_the_mirror_of_the_other_but_for_its_small_vessels() -> None:
    person = anatomy(np.random.default_rng(2))
    assert person.left.disc[0] < 0 < person.right.disc[0]
    assert np.abs(person.left.disc * (-1, 1) - person.right.disc).max() < 0.1
    assert not np.array_equal(person.left.tree.points * np.float32((-1, 1)), person.right.tree.points)


def _features(images: np.ndarray) -> np.ndarray:
    """How much is dark and how much is yellow: no network is needed to see the grade."""
    red, green, blue = (images[..., c] for c in range(3))
    shades = [(red < level) & (green < 0.1) for level in (0.15, 0.25, 0.35, 0.45)]
    spots = [np.array([ndimage.label(mask)[1] for mask in shade[:, 4:-4, 4:-4]]) for shade in shades]
    yellow = ((green > 0.6) & (blue < 0.75 * green)).mean((1, 2))
    return np.stack([*(shade.mean((1, 2)) for shade in shades), *spots, yellow], axis=1)


def test_the_grade_is_to_be_learned_from_the_picture() -> None:
    train, test = (fundus.stacked(_patients(count, seed, 64)) for count, seed in ((75, 10), (50, 11)))
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    model.fit(_features(train[0]), train[2])
    assert cohen_kappa_score(test[2], model.predict(_features(test[0])), weights="quadratic") > 0.7


def test_who_a_patient_is_and_how_ill_are_independent() -> None:
    made = fundus.fundus_patients(150, np.random.default_rng(5), 16, eyes=("left",))
    ill = np.array([patient.grade for patient in made])
    traits = np.array(
        [(*p.anatomy.pigment, *p.anatomy.left.disc, p.anatomy.left.cup, p.anatomy.left.disc_radius) for p in made]
    )
    assert max(abs(np.corrcoef(ill, trait)[0, 1]) for trait in traits.T) < 0.27  # four standard errors of 0 are 0.33


@pytest.mark.parametrize("side", [16, 64, 300])
def test_a_photograph_has_any_side_and_black_corners(side: int) -> None:
    picture = photograph(anatomy(np.random.default_rng(1)), "right", 4, side, np.random.default_rng(2))
    assert (picture.shape, picture.dtype) == ((side, side, 3), np.uint8)
    assert picture[0, 0].max() < 25
    assert picture[side // 2, side // 2].max() > 30


def test_a_large_and_a_small_photograph_show_the_same() -> None:
    person = anatomy(np.random.default_rng(1))
    small, large = (photograph(person, "left", 0, side, np.random.default_rng(7)) for side in (64, 256))
    reduced = large.reshape(64, 4, 64, 4, 3).mean((1, 3))
    assert np.abs(reduced - small).mean() < 8


@pytest.mark.parametrize(("grade", "size"), [(-1, 64), (5, 64), (0, 8)])
def test_no_such_grade_and_no_such_size(grade: int, size: int) -> None:
    with pytest.raises(ValueError, match="grade"):
        photograph(anatomy(np.random.default_rng(1)), "left", grade, size, np.random.default_rng(2))


def test_the_files_are_ophthalmic_photographs_full_of_names(tmp_path: Path) -> None:
    made = _patients(3, visits=2)
    planted = fundus.write_clinic(tmp_path, 1, made, np.random.default_rng(9))
    files = sorted(tmp_path.glob("*/*/*.dcm"))
    assert len(files) == 12
    with (tmp_path / "labels.csv").open() as stream:
        labels = {row["sop_instance_uid"]: row["label"] for row in csv.DictReader(stream)}
    by_id = {one.patient_id: one for one in planted.patients}
    pictures = {photo.pixels.tobytes() for patient in made for photo in patient.photographs}
    for path in files:
        dataset = pydicom.dcmread(path)
        assert dataset.SOPClassUID == "1.2.840.10008.5.1.4.1.1.77.1.5.1"
        assert (dataset.Modality, dataset.PhotometricInterpretation, dataset.NumberOfFrames) == ("OP", "RGB", 1)
        assert dataset.ImageLaterality in ("L", "R")
        assert dataset.pixel_array.tobytes() in pictures
        person = by_id[dataset.PatientID]
        assert labels[dataset.SOPInstanceUID] == person.label
        raw = path.read_bytes()
        assert {str(dataset.StudyInstanceUID), str(dataset.AccessionNumber)} <= person.strings
        assert {dataset.PatientBirthDate, dataset.StudyDate} <= person.dates
        assert all(part.encode() in raw for part in str(dataset.PatientName).split("^"))
    visits = {pydicom.dcmread(path, stop_before_pixels=True).StudyInstanceUID for path in files}
    assert len(visits) == 6


def test_no_retina_is_taken_for_one_with_text_in_it() -> None:
    images = [photo.pixels for side in (64, 128) for p in _patients(5, 3, side) for photo in p.photographs]
    assert not any(has_burned_in_text(image) for image in images)


def test_photographs_of_the_public_layouts_are_framed_in_black_and_named_as_there(tmp_path: Path) -> None:
    made = _patients(4, visits=2)
    fundus.write_aptos(tmp_path / "a", made)
    fundus.write_eyepacs(tmp_path / "e", made)
    assert len(list((tmp_path / "a" / "train_images").glob("*.png"))) == 16
    names = sorted(path.name for path in (tmp_path / "e" / "train").iterdir())
    assert names[:2] == ["10_left.jpeg", "10_right.jpeg"]
    assert len(names) == 8
    sizes = {Image.open(path).size for path in (tmp_path / "e" / "train").iterdir()}
    assert len(sizes) == 3
