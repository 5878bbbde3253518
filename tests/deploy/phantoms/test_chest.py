"""Made-up radiographs: bones, heart and vessels are who, what is found is new at every visit."""

from __future__ import annotations

import csv
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pydicom
import pytest
import torch
from scipy import ndimage
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits

from agent.deidentify.pixels import pixel_data
from agent.deidentify.pixels.burned_in_text import has_burned_in_text
from agent.evaluation.utility import UtilityNetwork
from agent.models.training_loop import seeded, torch_generator
from deploy.phantoms import chest


def _patients(count: int, seed: int = 0, side: int = 32, visits: int = 1, most: int = 2) -> list[chest.ChestPatient]:
    return chest.chest_patients(count, np.random.default_rng(seed), side, visits, most)


def test_the_generator_decides_everything() -> None:
    one, two, other = (chest.stacked(_patients(9, seed, visits=2)) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(one[0], other[0])
    assert (one[0].shape, one[0].dtype) == ((18, 32, 32), np.float32)
    assert one[1].tolist() == [number for number in range(9) for _ in range(2)]
    assert (one[2].shape, one[2].dtype) == ((18, 5), np.bool_)


def test_every_set_of_findings_up_to_the_most_is_as_frequent_as_any_other() -> None:
    for most, count in ((0, 1), (1, 6), (2, 16), (5, 32)):
        assert len(chest.conditions(most)) == count
        shown = Counter(found for p in _patients(count, 3, 16, 2, most) for found in p.findings)
        assert shown == dict.fromkeys(chest.conditions(most), 2)
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match="findings"):
            _patients(2, most=wrong)


def test_labels_are_names_in_order_and_the_stack_says_the_same() -> None:
    assert chest.label_of(frozenset()) == "none"
    assert chest.label_of(["effusion", "edema"]) == "edema+effusion"
    made = _patients(40, 2, 16)
    for row, patient in zip(chest.stacked(made)[2], made, strict=True):
        told = "+".join(name for name, shown in zip(chest.FINDINGS, row, strict=True) if shown)
        assert (told or "none") == chest.label_of(patient.findings[0])
    for wrong in (["fracture"], ["none"], ["edema", ""]):
        with pytest.raises(ValueError, match="finding"):
            chest.label_of(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="finding"):
            chest.report(wrong, np.random.default_rng(0))  # type: ignore[arg-type]


def test_a_report_names_what_is_found_and_nothing_but_public_words() -> None:
    stems = {"atelectasis": "atelecta", "cardiomegaly": "heart is enlarged|cardiomeg|enlarged heart"}
    stems |= {"consolidation": "consolidat", "edema": "edema", "effusion": "effusion"}
    rng = np.random.default_rng(0)
    for found in chest.conditions():
        for _ in range(6):
            text = chest.report(found, rng).lower()
            assert {word.strip(".,") for word in text.split()} <= chest.report_words()
            assert not any(letter.isdigit() or letter == "_" for letter in text)
            named = {name for name, stem in stems.items() if any(one in text for one in stem.split("|"))}
            assert named == found, text
    assert len({chest.report(frozenset({"edema", "effusion"}), rng) for _ in range(60)}) > 10


def test_who_somebody_is_does_not_depend_on_what_is_found() -> None:
    with_none, with_many = (_patients(6, 4, most=most) for most in (0, 5))
    for one, other in zip(with_none, with_many, strict=True):
        assert all(
            np.array_equal(getattr(one.thorax, k), getattr(other.thorax, k)) for k in ("ribs", "heart", "waves")
        )
    made = _patients(700, 3, 16, 2)
    body = np.stack([np.concatenate([p.thorax.lungs.ravel(), p.thorax.heart, p.thorax.domes]) for p in made])
    shown = chest.stacked(made)[2].reshape(700, 2, 5).astype(float)
    crossed = np.corrcoef(np.concatenate([body, shown[:, 0], shown[:, 1]], axis=1).T)
    assert np.abs(crossed[14:, :14]).max() < 0.17  # 4.5 standard errors: neither visit's findings go with the build
    assert np.abs(crossed[14:19, 19:]).max() < 0.17  # nor the second visit's with the first one's


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


def test_each_finding_is_to_be_learned_from_the_picture_even_by_a_linear_model() -> None:
    train, test = (chest.stacked(_patients(300, seed, most=1)) for seed in (10, 20))
    middle, spread = train[0].mean(axis=0), train[0].std(axis=0) + 0.02
    seen, unseen = (((part[0] - middle) / spread).reshape(300, -1) for part in (train, test))
    told = [
        LogisticRegression(C=1e-3, max_iter=500).fit(seen, train[2][:, k]).decision_function(unseen) for k in range(5)
    ]
    areas = [roc_auc_score(test[2][:, k], told[k]) for k in range(5)]
    assert min(areas) >= 0.85, areas
    assert np.mean(areas) >= 0.9, areas


@pytest.mark.slow
def test_a_small_network_tells_the_findings_of_pairs_too() -> None:
    train, test = (chest.stacked(_patients(300, seed)) for seed in (10, 20))
    images, shown = torch.from_numpy(train[0])[:, None], torch.from_numpy(train[2].astype(np.float32))
    mean, std = images.mean(), images.std()
    with seeded(0):
        net = UtilityNetwork(1, 16, 5)
    order, optimizer = torch_generator(0, "cpu"), torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=1e-2)
    for _ in range(40):
        for rows in torch.split(torch.randperm(300, generator=order), 32):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(net((images[rows] - mean) / std), shown[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        told = net((torch.from_numpy(test[0])[:, None] - mean) / std).numpy()
    areas = [roc_auc_score(test[2][:, k], told[:, k]) for k in range(5)]
    assert min(areas) >= 0.85, areas
    assert np.mean(areas) >= 0.9, areas


def test_what_is_no_finding_and_what_is_too_small_is_refused() -> None:
    person = chest.thorax(np.random.default_rng(0))
    for findings, size in ((["fracture"], 64), ([], 8)):
        with pytest.raises(ValueError, match="finding"):
            chest.radiograph(person, findings, size, np.random.default_rng(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="findings for each"):
        chest.ChestPatient(0, person, (np.zeros((16, 16), np.uint8),), ())


def test_the_files_are_computed_and_digital_radiographs_full_of_names(tmp_path: Path) -> None:
    made = _patients(4, visits=2)
    planted = chest.write_clinic(tmp_path, 0, made, np.random.default_rng(9))
    files = [pydicom.dcmread(path) for path in sorted(tmp_path.glob("*/*/*.dcm"))]
    assert len(files) == 8
    with (tmp_path / "labels.csv").open() as stream:
        labels = {row["sop_instance_uid"]: row["label"] for row in csv.DictReader(stream)}
    owner = {one.patient_id: patient for one, patient in zip(planted.patients, made, strict=True)}
    classes = {"CR": "1.2.840.10008.5.1.4.1.1.1", "DX": "1.2.840.10008.5.1.4.1.1.1.1"}
    for dataset in files:
        patient = owner[dataset.PatientID]
        assert (dataset.Modality, dataset.BodyPartExamined) == ("DX" if patient.number % 2 else "CR", "CHEST")
        assert dataset.SOPClassUID == dataset.file_meta.MediaStorageSOPClassUID == classes[dataset.Modality]
        (visit,) = (n for n, one in enumerate(patient.radiographs) if np.array_equal(dataset.pixel_array, one))
        assert labels[dataset.SOPInstanceUID] == chest.label_of(patient.findings[visit])
        stored = pixel_data.decode(dataset, dataset.file_meta.TransferSyntaxUID)
        read = pixel_data.unit_range(pixel_data.native(dataset, stored), stored)
        assert np.array_equal(np.rint(read * 255), patient.radiographs[visit])
    everything = b"".join(path.read_bytes() for path in tmp_path.glob("*/*/*.dcm"))
    assert all(text.encode() in everything for one in planted.patients for text in one.strings)


# Type 1 and 2 attributes of the modules of a Digital X-Ray Image - For Presentation (PS3.3 table A.26-1): general
# series and equipment, DX series, anatomy imaged, image, detector, acquisition context, SOP common. 2: may be empty.
_TYPE_1 = (
    *("Modality", "SeriesInstanceUID", "PresentationIntentType", "ImageLaterality", "ImageType", "SamplesPerPixel"),
    *(
        "PhotometricInterpretation",
        "Rows",
        "Columns",
        "BitsAllocated",
        "BitsStored",
        "HighBit",
        "PixelRepresentation",
    ),
    *("PixelIntensityRelationship", "PixelIntensityRelationshipSign", "RescaleIntercept", "RescaleSlope"),
    *("RescaleType", "PresentationLUTShape", "LossyImageCompression", "BurnedInAnnotation", "WindowCenter"),
    *("WindowWidth", "PatientOrientation", "DetectorType", "ImagerPixelSpacing", "SOPClassUID", "SOPInstanceUID"),
    *("StudyInstanceUID", "PixelData"),
)
_TYPE_2 = (
    *("Manufacturer", "AnatomicRegionSequence", "AcquisitionContextSequence", "InstanceNumber", "SeriesNumber"),
    *("PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID"),
    *("AccessionNumber", "ReferringPhysicianName"),
)


def test_a_digital_radiograph_has_the_mandatory_attributes_of_its_class(tmp_path: Path) -> None:
    chest.write_clinic(tmp_path, 0, _patients(2), np.random.default_rng(9))
    (path,) = tmp_path.glob("*/*/DX*.dcm")
    dataset = pydicom.dcmread(path)
    assert [name for name in _TYPE_1 if name not in dataset or dataset[name].is_empty] == []
    assert [name for name in _TYPE_2 if name not in dataset] == []
    assert (dataset.Modality, dataset.PresentationIntentType) == ("DX", "FOR PRESENTATION")
    assert (dataset.RescaleSlope, dataset.RescaleIntercept, dataset.RescaleType) == (1, 0, "US")  # C.8.11.3: these


def test_no_chest_is_taken_for_one_with_text_in_it() -> None:
    assert not any(has_burned_in_text(r) for side in (64, 128) for p in _patients(6, 4, side) for r in p.radiographs)


def test_visits_differ_and_an_exposure_is_never_the_same_twice() -> None:
    for patient in _patients(3, 8, visits=3, most=0):
        assert all(not np.array_equal(a, b) for a, b in pairwise(patient.radiographs))
