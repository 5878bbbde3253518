"""The papers' data sets in their own layouts, made of phantoms, and every way in which a folder can be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deploy.phantoms import fundus
from deploy.reproduction.datasets import (
    LOADERS,
    DatasetError,
    aptos,
    camelyon17,
    celeba,
    cifar10,
    eyepacs,
    imagenet,
    rafd,
    real_images,
)


@pytest.fixture(scope="module")
def patients() -> list[fundus.FundusPatient]:
    return fundus.fundus_patients(5, np.random.default_rng(3), 48)


def _picture(path: Path, size: tuple[int, int] = (178, 218), value: int = 90) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 60, 30)).save(path)


def _celeba(folder: Path) -> None:
    rows = [("000001.jpg", "2880", "-1 1"), ("000002.jpg", "7", "1 1"), ("000003.jpg", "2880", "-1 -1")]
    (folder / "list").mkdir()
    (folder / "list" / "identity_CelebA.txt").write_text("".join(f"{name} {who}\n" for name, who, _ in rows))
    lines = "".join(f"{name}  {values}\n" for name, _, values in rows)
    (folder / "list_attr_celeba.txt").write_text(f"3\nMale Young \n{lines}")
    for number, (name, _, _) in enumerate(rows):
        _picture(folder / "img_align_celeba" / name, value=40 * number)


def _rafd(folder: Path) -> None:
    for name in ("090_01_Caucasian_female_angry_frontal", "045_01_Caucasian_female_happy_left"):
        _picture(folder / f"Rafd{name}.jpg", (68, 102))
    _picture(folder / "Rafd090_23_Moroccan_male_neutral_right.jpg", (68, 102))
    (folder / "Readme.txt").write_text("not an image")


def test_aptos_comes_back_as_it_was_written_and_every_picture_is_a_patient(
    tmp_path: Path, patients: list[fundus.FundusPatient]
) -> None:
    fundus.write_aptos(tmp_path, patients)
    found = aptos(tmp_path, 32)
    images, _, grades = fundus.stacked(patients)
    assert len(found) == 10
    assert found.labels == tuple(map(str, grades.tolist()))
    assert len(set(found.patients)) == 10
    assert "no persons" in found.unit_note
    seen = found.images()
    assert (seen.shape, seen.dtype) == ((10, 32, 32, 3), np.float32)
    small = images.reshape(10, 24, 2, 24, 2, 3).mean((2, 4))
    near = np.abs(aptos(tmp_path, 24).images() - small).mean((1, 2, 3))
    assert near.max() < 0.06  # the same picture, but for the border that is cut away


def test_the_patient_of_eyepacs_is_the_number_before_the_eye(
    tmp_path: Path, patients: list[fundus.FundusPatient]
) -> None:
    fundus.write_eyepacs(tmp_path, patients)
    found = eyepacs(tmp_path, 32)
    assert {patient: len(rows) for patient, rows in found.rows().items()} == dict.fromkeys(map(str, range(10, 15)), 2)
    assert found.attributes["eye"] == ("left", "right") * 5
    cohort = found.cohort(("12", "10"))
    assert [patient.pseudonym for patient in cohort.patients] == ["10", "12"]
    assert all(len(patient.images) == 2 for patient in cohort.patients)
    assert cohort.patients[0].images[0].label == str(patients[0].grade)


@pytest.mark.parametrize(("limit", "count"), [(1, 0), (2, 2), (3, 2), (10, 10), (99, 10)])
def test_a_limit_never_cuts_a_patient_in_two(
    tmp_path: Path, patients: list[fundus.FundusPatient], limit: int, count: int
) -> None:
    fundus.write_eyepacs(tmp_path, patients)
    if count == 0:
        with pytest.raises(DatasetError, match="no images"):
            eyepacs(tmp_path, 32, limit)
    else:
        assert len(eyepacs(tmp_path, 32, limit)) == count


def test_celeba_has_identities_attributes_and_centred_squares(tmp_path: Path) -> None:
    _celeba(tmp_path)
    found = celeba(tmp_path, 128)
    assert found.rows() == {"2880": (0, 2), "7": (1,)}
    assert found.labels == ("-1", "1", "-1")
    assert found.attributes == {"Male": ("-1", "1", "-1"), "Young": ("1", "1", "-1")}
    assert found.image(0).shape == (128, 128, 3)
    assert celeba(tmp_path, 128, label="Young").labels == ("1", "1", "-1")
    with pytest.raises(DatasetError, match="no attribute"):
        celeba(tmp_path, 128, label="Tall")


def test_rafds_names_say_everything(tmp_path: Path) -> None:
    _rafd(tmp_path)
    found = rafd(tmp_path, 64)
    assert sorted(found.rows()) == ["001", "023"]
    assert found.labels == ("happy", "angry", "neutral")
    assert found.attributes["gender"] == ("female", "female", "male")
    assert found.attributes["camera"] == ("045", "090", "090")
    assert found.attributes["gaze"] == ("left", "frontal", "right")


def test_a_missing_folder_file_or_column_is_named(tmp_path: Path) -> None:
    for load, file in ((aptos, "train.csv"), (eyepacs, "trainLabels.csv"), (celeba, "list_attr_celeba.txt")):
        with pytest.raises(DatasetError, match=f"{file} is missing"):
            load(tmp_path)
    with pytest.raises(DatasetError, match="folder is missing"):
        rafd(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match="no images"):
        rafd(tmp_path)
    (tmp_path / "train.csv").write_text("id_code,level\na,1\n")
    with pytest.raises(DatasetError, match=r"train\.csv: missing columns: diagnosis"):
        aptos(tmp_path)
    (tmp_path / "train.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="cannot be read"):
        aptos(tmp_path)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("id_code,diagnosis\nSMITH,5\n", "a grade is not 0 to 4: number 1 of"),
        ("id_code,diagnosis\nSMITH,\n", "a grade is not 0 to 4"),
        ("id_code,diagnosis\nSMITH,1,2\n", "one cell for each column"),
        ("id_code,diagnosis\n../SMITH,1\n", "entry 1 is not the name"),
        ("id_code,diagnosis\n,1\n", "entry 1 is not the name"),
        ("id_code,diagnosis\nSMITH,1\n", "the file of an image is missing: number 1 of"),
        ("id_code,diagnosis\n" + "SMITH,1\n" * 9, "number 1, 2, 3, 4, 5 and more"),
        ("id_code,diagnosis\n", "no images"),
    ],
)
def test_a_wrong_row_is_told_by_its_number_and_never_by_what_it_says(
    tmp_path: Path, table: str, problem: str
) -> None:
    (tmp_path / "train.csv").write_text(table)
    with pytest.raises(DatasetError, match=problem) as caught:
        aptos(tmp_path)
    assert "SMITH" not in str(caught.value)


def test_names_that_are_no_eye_and_a_picture_listed_twice_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trainLabels.csv").write_text("image,level\n10_left,0\n10_middle,1\n")
    with pytest.raises(DatasetError, match="number 2 of the list"):
        eyepacs(tmp_path)
    _picture(tmp_path / "train" / "10_left.jpeg")
    (tmp_path / "trainLabels.csv").write_text("image,level\n10_left,0\n10_left,1\n")
    with pytest.raises(DatasetError, match="twice"):
        eyepacs(tmp_path)


def test_a_picture_without_attributes_or_identity_is_refused(tmp_path: Path) -> None:
    _celeba(tmp_path)
    (tmp_path / "list" / "identity_CelebA.txt").write_text("000001.jpg 3\n000009.jpg 4\n")
    with pytest.raises(DatasetError, match=r"identity_CelebA\.txt: .*number 2 of"):
        celeba(tmp_path)
    (tmp_path / "list_attr_celeba.txt").write_text("1\nMale Young\n000001.jpg 1\n")
    with pytest.raises(DatasetError, match="one value for each attribute"):
        celeba(tmp_path)
    _rafd(tmp_path)
    _picture(tmp_path / "holiday.jpg")
    with pytest.raises(DatasetError, match="named as RaFD"):
        rafd(tmp_path)


def test_a_picture_that_is_none_or_too_small_is_told_by_its_number(
    tmp_path: Path, patients: list[fundus.FundusPatient]
) -> None:
    fundus.write_aptos(tmp_path, patients)
    found = aptos(tmp_path, 64)
    with pytest.raises(DatasetError, match="image 1 of the list is smaller than 64 x 64"):
        found.image(0)
    found.paths[1].write_bytes(found.paths[1].read_bytes()[:200])
    with pytest.raises(DatasetError, match="image 2 of the list cannot be read") as caught:
        found.images([1])
    assert found.paths[1].stem not in str(caught.value)
    assert caught.value.__suppress_context__


def test_every_data_set_has_a_loader() -> None:
    assert sorted(LOADERS) == ["aptos", "camelyon17", "celeba", "cifar10", "eyepacs", "imagenet", "rafd"]


def _cifar(folder: Path, count: int = 3) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Six batches of random pictures in the binary layout; all pictures as (n, 32, 32, 3)."""
    pixels = np.random.default_rng(0).integers(0, 256, (6 * count, 3, 32, 32), np.uint8)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for at, name in enumerate(names):
        rows = range(at * count, (at + 1) * count)
        (folder / name).write_bytes(b"".join(bytes([row % 2]) + pixels[row].tobytes() for row in rows))
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\n\n")
    return pixels.transpose(0, 2, 3, 1)


def test_cifar_is_read_from_its_binary_version(tmp_path: Path) -> None:
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    pixels = _cifar(inner)
    found = cifar10(tmp_path, 32)
    assert len(found) == 18
    assert found.labels[:2] == ("airplane", "automobile")
    assert found.attributes["part"].count("test") == 3
    assert len(set(found.patients)) == 18
    assert np.array_equal(np.rint(found.images() * 255).astype(np.uint8), pixels)
    assert np.array_equal(cifar10(inner, 32, 4).images(), found.images(range(4)))
    assert found.cohort(found.patients[:2]).patients[1].images[0].label == "automobile"


def test_what_is_no_cifar_is_refused(tmp_path: Path) -> None:
    _cifar(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"\0" * 3000)
    with pytest.raises(DatasetError, match=r"data_batch_2\.bin: it is not of records"):
        cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"\x09" * 3073)
    with pytest.raises(DatasetError, match=r"data_batch_2\.bin: a label has no name"):
        cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(DatasetError, match=r"data_batch_2\.bin is missing"):
        cifar10(tmp_path)


def test_a_pickled_cifar_is_refused_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DatasetError, match="pickled"):
        cifar10(tmp_path)


def test_the_label_of_imagenet_is_its_synset_and_a_limit_takes_of_each(tmp_path: Path) -> None:
    for synset in ("n01440764", "n01443537"):
        for number in (7, 12, 30):
            _picture(tmp_path / "train" / synset / f"{synset}_{number}.JPEG", (50, 40), number)
    (tmp_path / "train" / "notes").mkdir()
    found = imagenet(tmp_path, 32)
    assert found.labels == ("n01440764", "n01443537") * 3
    assert found.image(0).shape == (32, 32, 3)
    assert imagenet(tmp_path / "train", 32, 4).labels == found.labels[:4]
    with pytest.raises(DatasetError, match="there are no images"):
        imagenet(tmp_path / "train" / "notes")
    with pytest.raises(DatasetError, match="folder is missing"):
        imagenet(tmp_path / "gone")


def _camelyon(folder: Path, rows: list[tuple[str, str, str]]) -> None:
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for number, (patient, node, tumor) in enumerate(rows):
        lines.append(f"{number},{patient},{node},{100 + number},20,{tumor},0,3,0")
        place = f"patient_{patient}_node_{node}"
        if tumor in "01":
            _picture(folder / "patches" / place / f"patch_{place}_x_{100 + number}_y_20.png", (96, 96), 9 * number)
    folder.mkdir(exist_ok=True)
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


def test_the_patient_of_camelyon_is_the_patient_and_not_the_patch(tmp_path: Path) -> None:
    _camelyon(tmp_path, [("004", "4", "1"), ("004", "4", "0"), ("004", "2", "1"), ("017", "1", "0")])
    found = camelyon17(tmp_path, 32)
    assert found.rows() == {"004": (0, 2, 3), "017": (1,)}
    assert found.labels == ("1", "0", "0", "1")  # the first patch of every patient comes first
    assert found.images().shape == (4, 32, 32, 3)
    assert sorted(set(camelyon17(tmp_path, 32, 2).patients)) == ["004", "017"]


def test_what_is_no_camelyon_is_refused(tmp_path: Path) -> None:
    _camelyon(tmp_path, [("004", "4", "1"), ("004", "4", "7")])
    with pytest.raises(DatasetError, match=r"tumor is not 0 or 1: number 2"):
        camelyon17(tmp_path)
    _camelyon(tmp_path, [("004", "../..", "1")])
    with pytest.raises(DatasetError, match="a cell is not a whole number: number 1"):
        camelyon17(tmp_path)
    (tmp_path / "metadata.csv").write_text("patient,node\n1,2\n")
    with pytest.raises(DatasetError, match="missing columns: x_coord, y_coord, tumor, center"):
        camelyon17(tmp_path)


def test_real_pictures_come_with_the_packages() -> None:
    found = real_images(32)
    assert found.digits.shape == (1797, 8, 8)
    assert found.faces.shape == (100, 25, 25)
    assert found.retina.shape[1:] == (32, 32, 3)
    assert len(found.retina) >= 40
    for images in (found.digits, found.faces, found.retina):
        assert images.dtype == np.float32
        assert 0 <= images.min() < images.max() <= 1
    assert found.retina.max(axis=3).min() > 0.1  # all within the eye
