"""What a task learns from: by images, studies and volumes, with labels of a table, and what is left out and why."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import DataElement, config
from pydicom.datadict import dictionary_VR

from agent.deidentify.masks import clean_mask
from agent.deidentify.prescan import EXPLICIT_LE
from agent.deidentify.record import Record, keyed_name
from agent.domain import Example, ExampleRule, Split, TaskCohort, TaskPatient
from agent.storage import example_pixels, examples, label_tables
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.example_pixels import ImagePlace, places_of
from agent.storage.examples import label_misfit, sample, survey, task_cohort
from agent.storage.label_tables import (
    USED,
    LabelColumn,
    LabelTable,
    LabelTableError,
    TableUse,
    forget_patients,
    keep_table,
    read_declaration,
    read_table,
    tables_used,
)
from agent.storage.vault import Vault
from tests.support.instances import WHO, mr, written
from tests.support.segmentations import LISTED, abdomen, drawing, mask
from tests.support.vault_records import key_of, open_vault

GRADE = LabelColumn("grade", "category", ("low", "middle", "high"))
COLUMNS = (
    LabelColumn("effusion", "binary"),
    GRADE,
    LabelColumn("findings", "several", ("mass", "nodule")),
    LabelColumn("age", "number", unit="a", high=120.0),
)
ROW = (1, 0, (0,), 60.0)
RULE = ExampleRule("classification", "OT", (8, 8), table="t", columns=("grade",), classes=("low", "high"))
AGE = ExampleRule("regression", "OT", (8, 8), table="t", columns=("age",), low=(0.0,), high=(120.0,))


def person(number: int) -> str:
    return key_of(number, 3)


def image(number: int, patient: int, *, study: int = 0, shape: tuple[int, ...] = (8, 8), **changed: Any) -> Record:
    """Image ``number`` of a patient, in the study ``study`` of the patient."""
    who = person(patient)
    uids = (key_of(study or number, 4), key_of(number, 5), key_of(number, 6))
    named = [keyed_name(who, uid) for uid in uids]
    pixels = np.random.default_rng(number).random(shape, dtype=np.float32)
    made = Record(
        *(named[2], key_of(number, 2), who, named[0], "OT", "image", "low", pixels, b"%d" % number, False, named[1]),
        uids=uids,
    )
    return replace(made, **changed)


def nifti_record(
    number: int, patient: int, values: NDArray[Any], affine: NDArray[np.float64], **changed: Any
) -> Record:
    payload = nibabel.Nifti1Image(values, affine).to_bytes()  # type: ignore[no-untyped-call]
    told = {"kind": "volume", "pixels": None, "payload": payload, "modality": "MR", "label": "low"}
    return image(number, patient, **{**told, **changed})


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    with contextlib.closing(open_vault(tmp_path)) as vault:
        yield vault


def tabled(vault: Vault, rows: dict[tuple[str, str], tuple[Any, ...]], level: Any = "patient") -> None:
    keep_table(vault, LabelTable("t", "patient-id", level, COLUMNS, rows))


def by_patient(vault: Vault, *values: tuple[Any, ...]) -> None:
    tabled(vault, {(person(n), person(n)): one for n, one in enumerate(values)})


def targets(vault: Vault, rule: ExampleRule) -> dict[str, list[list[float]]]:
    return {p.pseudonym: [e.target.tolist() for e in p.examples] for p in task_cohort(vault, rule).patients}


def left_out(vault: Vault, rule: ExampleRule) -> dict[str, tuple[int, int]]:
    return {one.reason: (one.images, one.patients) for one in survey(vault, rule).left_out}


# -- labels of a table


def test_a_class_is_its_place_among_the_tasks_classes_and_who_has_no_label_is_left_out(vault: Vault) -> None:
    for number, patient in enumerate((0, 0, 1, 2, 3, 4)):
        vault.keep(image(number, patient))
    by_patient(vault, ROW, (1, 2, (), 1.0), (1, 1, (), 1.0), (1, None, (), 1.0))
    assert targets(vault, RULE) == {person(0): [[0], [0]], person(1): [[1]]}
    assert left_out(vault, RULE) == {"no_row": (1, 1), "missing": (1, 1), "other_value": (1, 1)}


def test_a_binary_column_has_the_classes_no_and_yes(vault: Vault) -> None:
    vault.keep(image(1, 0))
    by_patient(vault, ROW)
    rule = replace(RULE, columns=("effusion",), classes=("no", "yes"))
    assert targets(vault, rule) == {person(0): [[1]]}


def test_without_a_table_an_images_own_label_counts(vault: Vault) -> None:
    vault.keep_all([image(1, 0, label="high"), image(2, 1, label=""), image(3, 2, label="other")])
    rule = replace(RULE, table="", columns=())
    assert targets(vault, rule) == {person(0): [[1]]}
    assert left_out(vault, rule) == {"missing": (1, 1), "other_value": (1, 1)}


def test_a_missing_finding_is_nan_and_only_who_has_none_at_all_is_left_out(vault: Vault) -> None:
    columns = (LabelColumn("a", "binary"), LabelColumn("b", "binary"))
    rows = {(person(n), person(n)): row for n, row in enumerate([(1, None), (0, 1), (None, None)])}
    keep_table(vault, LabelTable("t", "patient-id", "patient", columns, rows))
    vault.keep_all([image(n, n) for n in range(3)])
    rule = ExampleRule("multi-label", "OT", (8, 8), table="t", columns=("a", "b"))
    found = task_cohort(vault, rule)
    assert [p.pseudonym for p in found.patients] == [person(0), person(1)]
    first, second = (p.examples[0].target for p in found.patients)
    assert first.dtype == np.float32
    assert first[0] == 1
    assert np.isnan(first[1])
    assert second.tolist() == [0, 1]
    assert left_out(vault, rule) == {"missing": (1, 1)}
    assert [(o.output, o.patients) for o in survey(vault, rule).outputs] == [("a", 1), ("b", 1)]


def test_several_values_of_one_column_are_findings(vault: Vault) -> None:
    vault.keep_all([image(n, n) for n in range(3)])
    by_patient(vault, (1, 0, (0, 1), 1.0), (1, 0, (), 1.0), (1, 0, None, 1.0))
    rule = ExampleRule("multi-label", "OT", (8, 8), table="t", columns=("findings",), classes=("nodule", "mass"))
    assert targets(vault, rule) == {person(0): [[1, 1]], person(1): [[0, 0]]}
    assert left_out(vault, rule) == {"missing": (1, 1)}


def test_a_number_is_scaled_by_the_tasks_public_bounds_and_cut_there(vault: Vault) -> None:
    vault.keep_all([image(n, n) for n in range(3)])
    by_patient(vault, (1, 0, (), 60.0), (1, 0, (), 119.0), (1, 0, (), 1.0))
    rule = ExampleRule("regression", "OT", (8, 8), table="t", columns=("age",), low=(20.0,), high=(100.0,))
    assert targets(vault, rule) == {person(0): [[0.5]], person(1): [[1.0]], person(2): [[0.0]]}


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (replace(RULE, table="other"), "no label table"),
        (replace(RULE, columns=("other",)), "no column other"),
        (replace(RULE, columns=("age",)), "takes binary or category"),
        (replace(RULE, classes=("low", "highest")), "does not declare all classes"),
        (ExampleRule("multi-label", "OT", (8, 8), table="t", columns=("grade",)), "takes binary"),
        (ExampleRule("multi-label", "OT", (8, 8), table="t", columns=("grade",), classes=("low",)), "takes several"),
        (ExampleRule("regression", "OT", (8, 8), table="t", columns=("grade",), low=(0,), high=(1,)), "takes number"),
        (replace(AGE, low=(365.0,), high=(36_500.0,)), "0 to 120 a, and the task's, 365 to 36500, do not overlap"),
    ],
)
def test_a_task_that_names_what_the_table_does_not_declare_is_refused(
    vault: Vault, rule: ExampleRule, why: str
) -> None:
    vault.keep(image(1, 0))
    by_patient(vault, ROW)
    for act in (task_cohort, survey):
        with pytest.raises(LabelTableError, match=why):
            act(vault, rule)
    assert re.search(why, label_misfit(vault, rule))


def test_whether_a_table_fits_is_told_without_a_row_of_it(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    by_patient(vault, ROW)

    def read(*_: object) -> None:
        raise AssertionError("a row was read")

    monkeypatch.setattr(label_tables, "_value", read)
    for rule in (RULE, replace(AGE, low=(18.0,), high=(200.0,)), replace(RULE, table="", columns=())):
        assert label_misfit(vault, rule) == ""
    assert read_declaration(vault, "t").rows == {}
    assert read_declaration(vault, "t").columns == COLUMNS
    with pytest.raises(AssertionError, match="a row was read"):  # a red control
        task_cohort(vault, RULE)


def test_a_run_stays_with_the_version_that_it_began_with(vault: Vault) -> None:
    vault.keep_all([image(1, 0), image(2, 1)])
    by_patient(vault, ROW, ROW)
    first, run = read_table(vault, "t").version, replace(RULE, run="run-1")
    assert list(targets(vault, run)) == [person(0), person(1)]
    assert tables_used(vault.note(USED)) == {"run-1": TableUse("run-1", "t", first)}
    forget_patients(vault, {person(1)})
    assert list(targets(vault, run)) == [person(0)], "who opts out is in no round from then on"
    by_patient(vault, (1, 2, (), 1.0), ROW)
    with pytest.raises(
        LabelTableError, match=rf"began with version {first[:12]} .* table was replaced .* `jobs cancel`"
    ) as refused:
        task_cohort(vault, run)
    assert read_table(vault, "t").version[:12] in str(refused.value)
    task_cohort(vault, replace(RULE, run="run-2"))
    by_patient(vault, ROW, ROW)
    assert task_cohort(vault, run).patients, "the former table is imported again"


def test_without_a_run_or_a_table_nothing_is_noted(vault: Vault) -> None:
    vault.keep(image(1, 0, label="high"))
    by_patient(vault, ROW)
    task_cohort(vault, RULE)
    survey(vault, replace(RULE, run="run-1"))
    task_cohort(vault, replace(RULE, run="run-1", table="", columns=()))
    assert vault.note(USED) is None


def test_the_test_of_versions_sees_a_run_that_takes_whatever_is_there(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red control: without the check a run goes on with the table that replaced its own."""
    monkeypatch.setattr(examples, "stay_with", lambda *_: None)
    vault.keep(image(1, 0))
    for row, learned in ((ROW, [[0]]), ((1, 2, (), 1.0), [[1]])):
        by_patient(vault, row)
        assert targets(vault, replace(RULE, run="run-1")) == {person(0): learned}


def test_rows_of_studies_series_and_images_reach_what_they_name(vault: Vault) -> None:
    one, two = image(1, 0, study=9), image(2, 0)
    vault.keep_all([one, two])
    for level, name in (("study", one.study), ("series", one.series), ("instance", one.name)):
        tabled(vault, {(person(0), name): ROW}, level)
        assert targets(vault, RULE) == {person(0): [[0]]}
        assert left_out(vault, RULE) == {"no_row": (1, 1)}


# -- which images


def test_what_does_not_count_is_told_with_the_reason(vault: Vault) -> None:
    vault.keep_all(
        [
            image(1, 0),
            image(2, 1, face=True),
            image(3, 2, shape=(4, 4)),
            image(4, 3, pixels=np.full((8, 8), 0.5, np.float32)),
            image(5, 4, kind="volume", pixels=None),
            image(6, 5, modality="CT"),
            image(7, 6),
        ]
    )
    by_patient(vault, *[ROW] * 7)
    vault.hold(image(7, 6).study)
    assert list(targets(vault, RULE)) == [person(0)]
    assert left_out(vault, RULE) == {
        "held": (1, 1),
        "face": (1, 1),
        "other_form": (1, 1),
        "too_small": (1, 1),
        "blank": (1, 1),
    }


def test_nobody_who_opted_out_is_in_a_cohort_or_a_count(vault: Vault) -> None:
    vault.keep_all([image(1, 0), image(2, 1)])
    by_patient(vault, ROW, ROW)
    vault._notes.opt_out(person(0))
    assert list(targets(vault, RULE)) == [person(1)]
    assert survey(vault, RULE).patients == 1
    assert task_cohort(vault, RULE, [person(1)]).patients == ()


def test_the_test_of_faces_sees_a_rule_that_lets_them_in(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control: without the check a patient whose face is on is in the cohort."""
    vault.keep(image(1, 0, face=True))
    by_patient(vault, ROW)
    assert task_cohort(vault, RULE).patients == ()
    monkeypatch.setattr(examples, "_unfit", lambda *_: "")
    assert [p.pseudonym for p in task_cohort(vault, RULE).patients] == [person(0)]


def test_one_more_patient_changes_that_patients_examples_only(vault: Vault) -> None:
    vault.keep_all([image(n, n % 3) for n in range(6)])
    by_patient(vault, ROW, ROW, ROW, (1, 2, (), 1.0))
    before = task_cohort(vault, RULE)
    vault.keep_all([image(n, 3, study=1) for n in range(10, 13)])
    after = {p.pseudonym: p for p in task_cohort(vault, RULE).patients}
    assert set(after) == {p.pseudonym for p in before.patients} | {person(3)}
    for patient in before.patients:
        for one, other in zip(patient.examples, after[patient.pseudonym].examples, strict=True):
            assert np.array_equal(one.pixels, other.pixels)
            assert np.array_equal(one.target, other.target)


def test_a_part_of_a_split_has_its_patients_only_and_the_parts_are_all(vault: Vault) -> None:
    vault.keep_all([image(n, n) for n in range(30)])
    by_patient(vault, *[ROW] * 30)
    split = Split("held-out", {"train": 2, "test": 1})
    parts = [set(targets(vault, replace(RULE, split=split, part=part))) for part in ("train", "test")]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {person(n) for n in range(30)}
    assert all(parts)


@pytest.mark.parametrize("rule", [replace(RULE, window=(0.0, 500.0)), replace(RULE, spacing=(1.0, 1.0))])
def test_a_file_that_cannot_be_read_leaves_out_its_own_patient_alone(vault: Vault, rule: ExampleRule) -> None:
    good = written(mr())
    vault.keep_all(
        [image(1, 0, payload=good), image(2, 1, payload=good[: len(good) // 2]), image(3, 2, payload=b"1")]
    )
    by_patient(vault, ROW, ROW, ROW)
    found = targets(vault, rule)
    assert person(0) in found
    assert person(2) not in found
    assert left_out(vault, rule)["unreadable"][1] == 3 - len(found)


@pytest.mark.parametrize("fault", [ValueError(), OSError("no header"), KeyError("1"), IndexError(), RuntimeError()])
def test_whatever_the_reader_of_a_file_raises_is_an_answer(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    vault.keep_all([image(1, 0), image(2, 1)])
    by_patient(vault, ROW, ROW)
    monkeypatch.setattr(example_pixels, "as_seen", once(fault))
    assert list(targets(vault, RULE)) == [person(1)]


@pytest.mark.parametrize("fault", [MemoryError(), VaultError("the disk failed"), OSError(errno.EIO, "the disk")])
def test_a_fault_of_the_machine_ends_the_making(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    vault.keep(image(1, 0))
    by_patient(vault, ROW)
    monkeypatch.setattr(example_pixels, "as_seen", once(fault))
    with pytest.raises(type(fault)):
        task_cohort(vault, RULE)


def once(fault: Exception) -> Callable[..., Any]:
    """How the first example is seen: not at all."""
    faults, as_seen = [fault], example_pixels.as_seen

    def seen(*given: Any) -> Any:
        if faults:
            raise faults.pop()
        return as_seen(*given)

    return seen


def test_a_short_series_waits(vault: Vault) -> None:
    vault.keep(image(1, 0))
    by_patient(vault, ROW)
    assert left_out(vault, replace(RULE, min_instances=2)) == {"waiting": (1, 1)}


# -- how they are seen


def test_grey_and_colour_have_one_and_three_channels_first(vault: Vault) -> None:
    vault.keep_all([image(1, 0, shape=(12, 10, 3)), image(2, 1, shape=(10, 12))])
    by_patient(vault, ROW, ROW)
    grey, colour = (task_cohort(vault, replace(RULE, channels=channels)) for channels in (1, 3))
    assert [p.examples[0].pixels.shape for p in grey.patients] == [(1, 8, 8)] * 2
    assert [p.examples[0].pixels.shape for p in colour.patients] == [(3, 8, 8)]
    assert left_out(vault, replace(RULE, channels=3)) == {"colour": (1, 1)}


def test_an_image_of_the_size_is_seen_as_it_is_and_a_larger_one_is_averaged(vault: Vault) -> None:
    vault.keep_all([image(1, 0), image(2, 1, shape=(24, 16))])
    by_patient(vault, ROW, ROW)
    first, second = (p.examples[0].pixels for p in task_cohort(vault, RULE).patients)
    assert np.abs(first[0] - vault.pixels(image(1, 0).name)).max() == 0
    square = vault.pixels(image(2, 1).name)[4:20]
    assert np.allclose(second[0], square.reshape(8, 2, 8, 2).mean(axis=(1, 3)), atol=1e-6)
    wide = task_cohort(vault, replace(RULE, size=(8, 4))).patients[1].examples[0].pixels
    assert wide.shape == (1, 8, 4)


def test_the_images_of_a_study_are_channels_in_the_order_of_view_and_series(vault: Vault) -> None:
    def view(number: int, position: str, series: int) -> Record:
        source = mr()
        source.ViewPosition, source.SeriesNumber = position, series
        return image(number, 0, study=7, payload=written(source))

    vault.keep_all([view(1, "PA", 1), view(2, "LL", 2), view(3, "PA", 0), view(4, "PA", 3)])
    by_patient(vault, ROW)
    rule = replace(RULE, per_study=True, channels=3)
    (patient,) = task_cohort(vault, rule).patients
    (example,) = patient.examples
    for channel, number in enumerate((2, 3, 1)):
        assert np.array_equal(example.pixels[channel], vault.pixels(image(number, 0, study=7).name))
    (single,) = task_cohort(vault, replace(rule, channels=1)).patients[0].examples
    assert np.array_equal(single.pixels[0], example.pixels[0])


def test_a_study_whose_images_are_labelled_differently_is_left_out(vault: Vault) -> None:
    one, two = (image(n, 0, study=7, payload=written(mr())) for n in (1, 2))
    vault.keep_all([one, two])
    tabled(vault, {(person(0), one.name): ROW, (person(0), two.name): (1, 2, (), 1.0)}, "instance")
    assert left_out(vault, replace(RULE, per_study=True)) == {"contradiction": (2, 1)}


def test_a_window_is_of_the_stored_values_in_their_units(vault: Vault) -> None:
    source = mr()
    source.RescaleSlope, source.RescaleIntercept = 2, -1000
    stored = source.pixel_array.astype(np.float32) * 2 - 1000
    vault.keep(image(1, 0, shape=(64, 64), payload=written(source)))
    by_patient(vault, ROW)
    (patient,) = task_cohort(vault, replace(RULE, size=(64, 64), window=(-500.0, 500.0))).patients
    assert np.allclose(patient.examples[0].pixels[0], np.clip((stored + 500) / 1000, 0, 1), atol=1e-6)


def test_a_spacing_is_in_millimetres_around_the_centre_and_zeros_lie_outside(vault: Vault) -> None:
    source = mr()
    source.PixelSpacing = [0.5, 1.0]
    pixels = np.zeros((64, 64), np.float32)
    pixels[24:40, 28:36] = 1  # 8 mm by 8 mm
    vault.keep(image(1, 0, pixels=pixels, payload=written(source)))
    by_patient(vault, ROW)
    (patient,) = task_cohort(vault, replace(RULE, size=(40, 80), spacing=(1.0, 1.0))).patients
    seen = patient.examples[0].pixels[0]
    assert seen[17:23, 37:43].min() == 1
    assert seen.sum() == pytest.approx(64, rel=0.2)
    assert seen[:14].max() == seen[:, :34].max() == 0
    del source.PixelSpacing
    vault.keep(image(2, 1, pixels=pixels, payload=written(source)))
    by_patient(vault, ROW, ROW)
    assert left_out(vault, replace(RULE, spacing=(1.0, 1.0))) == {"no_spacing": (1, 1)}


# -- a sample


def test_a_sample_has_everybody_once_before_anybody_twice_and_labels_take_turns(vault: Vault) -> None:
    """Ninety of one label and three of another, whose patients have several images."""
    rows: dict[tuple[str, str], tuple[Any, ...]] = {}
    for number in range(93):
        rows[person(number), person(number)] = (None, 2 if number % 31 == 0 else 0, None, None)
        vault.keep_all([image(100 * number + n, number) for n in range(1 + 2 * (number % 31 == 0))])
    tabled(vault, rows)
    found = sample(vault, RULE, np.random.default_rng(1))
    assert (found.patients, len(found.order), found.left_out) == (93, 99, ())
    assert len({one.person for one in found.order[:93]}) == 93
    said = [int(one.target[0]) for one in found.order if one.target is not None]
    assert sum(said[:6]) == 3, "the rare label is among the first"
    names = [one.heads[0].name for one in found.order]
    assert sorted(names) == sorted(head.name for head in vault.heads())
    assert names == [one.heads[0].name for one in sample(vault, RULE, np.random.default_rng(1)).order]
    assert names != [one.heads[0].name for one in sample(vault, RULE, np.random.default_rng(2)).order]


def test_a_sample_opens_no_pixel_and_tells_what_is_left_out(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    vault.keep_all([image(n, n) for n in range(4)])
    by_patient(vault, *[ROW] * 3)
    monkeypatch.setattr(Vault, "pixels", lambda *_: pytest.fail("opened"))
    found = sample(vault, RULE, np.random.default_rng(0))
    assert {one.person for one in found.order} == {person(n) for n in range(3)}
    assert [(one.reason, one.images) for one in found.left_out] == [("no_row", 1)]


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"PatientOrientation": ["L", "F"], "ViewPosition": "PA"}, ImagePlace("L", "F", "PA")),
        (
            {"PatientOrientation": ["A", "F"], "ViewPosition": "LL", "ImageLaterality": "R"},
            ImagePlace("A", "F", "LL R"),
        ),
        ({"ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}, ImagePlace("L", "P")),
        ({"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]}, ImagePlace("P", "F")),
        ({"ImageOrientationPatient": [-0.9, 0.1, 0, 0, 0.1, 0.9]}, ImagePlace("R", "H")),
        ({"PatientOrientation": ["PR", "F"]}, ImagePlace("PR", "F")),
        ({"PatientOrientation": ["SMITH", "F"], "ViewPosition": "SMITH^JOHN", "Laterality": "X"}, ImagePlace()),
    ],
)
def test_where_an_image_lies_is_what_its_file_says_or_nothing(
    vault: Vault, changed: dict[str, Any], place: ImagePlace
) -> None:
    source = mr()
    for keyword in ("PatientOrientation", "ImageOrientationPatient", "ViewPosition", "Laterality"):
        if keyword in source:
            del source[keyword]
    for keyword, value in changed.items():
        source.add(DataElement(keyword, dictionary_VR(keyword), value, validation_mode=config.IGNORE))
    vault.keep_all([image(1, 0, payload=written(source)), image(2, 1, payload=b"no DICOM file")])
    by_patient(vault, ROW, ROW)
    found = {one.person: one for one in sample(vault, RULE, np.random.default_rng(0)).order}
    assert places_of(vault, RULE, found[person(0)]) == [place]
    assert places_of(vault, RULE, found[person(1)]) == [ImagePlace()], "an example all the same"
    opposite = {"L": "R", "A": "P", "P": "A", "R": "L", "PR": "AL", "": ""}
    assert place.left == opposite[place.right]


# -- volumes

MR = ExampleRule("classification", "MR", (6, 8, 10), classes=("low", "high"))


def axes(shape: tuple[int, ...], axis: int) -> NDArray[np.int16]:
    """Values that grow along one axis."""
    ramp = np.arange(shape[axis], dtype=np.int16) * 10
    return np.ascontiguousarray(np.broadcast_to(np.expand_dims(ramp, [a for a in range(3) if a != axis]), shape))


@pytest.mark.parametrize(("axis", "seen_axis", "rises"), [(2, 0, True), (1, 1, False), (0, 2, False)])
@pytest.mark.parametrize("flip", [(1, 1, 1), (-1, 1, 1), (-1, -1, 1), (1, 1, -1)])
def test_a_volume_is_seen_from_feet_to_head_front_to_back_right_to_left(
    vault: Vault, axis: int, seen_axis: int, rises: bool, flip: tuple[int, int, int]
) -> None:
    """However the file lies: RAS coordinates grow to the head, the front and the right."""
    shape = (10, 8, 6)
    values = axes(shape, axis)[tuple(slice(None, None, f) for f in flip)]
    affine = np.diag([*flip, 1.0])
    for at, f in enumerate(flip):
        affine[at, 3] = 0 if f > 0 else shape[at] - 1
    vault.keep(nifti_record(1, 0, np.ascontiguousarray(values), affine, face=False))
    (patient,) = task_cohort(vault, MR).patients
    pixels = patient.examples[0].pixels
    assert pixels.shape == (1, 6, 8, 10)
    profile = pixels[0].mean(axis=tuple(a for a in range(3) if a != seen_axis))
    assert bool((np.diff(profile) > 0).all()) is rises
    assert bool((np.diff(profile) < 0).all()) is not rises


def test_a_volumes_spacing_is_kept_and_its_window_is_in_its_units(vault: Vault) -> None:
    values = np.zeros((20, 20, 20), np.int16)
    values[8:12, 8:12, 8:12] = 1000  # 8 mm at 2 mm
    vault.keep(nifti_record(1, 0, values, np.diag([2.0, 2.0, 2.0, 1.0]), face=False))
    rule = replace(MR, size=(60, 60, 60), spacing=(1.0, 1.0, 1.0), window=(0.0, 2000.0))
    (patient,) = task_cohort(vault, rule).patients
    pixels = patient.examples[0].pixels[0]
    assert pixels.max() == pytest.approx(0.5)
    assert pixels.sum() == pytest.approx(0.5 * 8**3, rel=0.01)
    assert pixels[:9].max() == pixels[-9:].max() == 0


def test_a_series_of_slices_is_one_volume_and_a_slice_with_a_face_withholds_it(vault: Vault) -> None:
    def piece(number: int, patient: int, place: int, **changed: Any) -> Record:
        source = mr()
        source.ImagePositionPatient, source.ImageOrientationPatient = [0, 0, 3.0 * place], [1, 0, 0, 0, 1, 0]
        source.SOPInstanceUID = source.file_meta.MediaStorageSOPInstanceUID = f"1.2.{number}"
        source.SeriesInstanceUID = f"1.3.{patient}"
        pixels = source.pixel_array.astype(np.int16) + 10 * place
        source.PixelData = pixels.tobytes()
        told = {"pixels": np.zeros((64, 64), np.float32), "modality": "MR", "series": key_of(patient, 8)}
        return image(number, patient, study=patient + 1, payload=written(source), **{**told, **changed})

    vault.keep_all([piece(10 + n, 0, n) for n in (3, 1, 0, 2, 4)])
    vault.keep_all([piece(20 + n, 1, n, face=n == 2) for n in range(5)])
    vault.keep_all([piece(30, 2, 0)])
    found = task_cohort(vault, replace(MR, size=(5, 64, 64)))
    assert [p.pseudonym for p in found.patients] == [person(0)]
    (example,) = found.patients[0].examples
    assert example.pixels.shape == (1, 5, 64, 64)
    assert bool((np.diff(example.pixels[0].mean(axis=(1, 2))) > 0).all()), "the slices lie in their order"
    assert left_out(vault, replace(MR, size=(5, 64, 64))) == {"face": (5, 1), "not_a_volume": (1, 1)}


def test_a_volume_whose_face_is_on_is_no_example(vault: Vault) -> None:
    values = axes((10, 8, 6), 0)
    vault.keep_all(
        [
            nifti_record(1, 0, values, np.eye(4), face=True),
            nifti_record(2, 1, values * 0 + 7, np.eye(4)),
            nifti_record(3, 2, values, np.eye(4), payload=b"no volume"),
        ]
    )
    assert task_cohort(vault, MR).patients == ()
    assert left_out(vault, MR) == {"face": (1, 1), "not_a_volume": (1, 1), "blank": (1, 1)}


def test_a_volume_file_is_whole_and_waits_for_no_other(vault: Vault) -> None:
    """A series of slices waits until it has as many as the site says; a file that holds all of them is complete."""
    vault.keep(nifti_record(1, 0, axes((10, 8, 6), 0), np.eye(4), face=False))
    rule = replace(MR, min_instances=3)
    assert [p.pseudonym for p in task_cohort(vault, rule).patients] == [person(0)]
    assert left_out(vault, rule) == {}


# -- the values themselves


GOOD = np.zeros((1, 4, 4), np.float32)


@pytest.mark.parametrize(
    ("pixels", "target"),
    [
        (GOOD[0], np.zeros(1, np.int64)),
        (GOOD.astype(np.float64), np.zeros(1, np.int64)),
        (GOOD * np.nan, np.zeros(1, np.int64)),
        (GOOD, np.zeros(2, np.int64)),
        (GOOD, np.zeros((4, 5), np.int64)),
        (GOOD, np.array([-1], np.int64)),
        (GOOD, np.zeros(1, np.int32)),
        (GOOD, np.array([1.5], np.float32)),
        (GOOD, np.array([-0.1], np.float32)),
        (GOOD, np.array([np.inf], np.float32)),
        (GOOD, np.zeros((1, 1), np.float32)),
        (GOOD, np.zeros(0, np.float32)),
    ],
)
def test_an_example_of_no_known_form_cannot_be_built(pixels: NDArray[Any], target: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"pixels|target|class|findings"):
        Example(pixels, target)


def test_a_mask_is_as_large_as_the_pixels_and_a_cohort_has_one_form() -> None:
    mask, label = Example(GOOD, np.zeros((4, 4), np.int64)), Example(GOOD, np.zeros(1, np.int64))
    patients = [TaskPatient(name, (one,)) for name, one in (("a", mask), ("b", label))]
    with pytest.raises(ValueError, match="one form"):
        TaskCohort(tuple(patients))
    with pytest.raises(ValueError, match="sorted"):
        TaskCohort((patients[1], patients[0]))
    with pytest.raises(ValueError, match="an example"):
        TaskPatient("a", ())
    assert len(TaskCohort((patients[0],)).patients) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"size": (8,)}, {"size": (0, 8)}, {"modality": ""}, {"channels": 2}, {"spacing": (1.0,)},
        {"spacing": (0.0, 1.0)}, {"window": (1.0, 1.0)}, {"window": (float("nan"), 1.0)}, {"part": "train"},
        {"size": (8, 8, 8), "channels": 3}, {"size": (8, 8, 8), "per_study": True},
    ],
)  # fmt: skip
def test_a_rule_that_could_select_nothing_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has a sentence of its own
        replace(RULE, **changed)


# -- masks

SEGMENTS = ExampleRule("segmentation", "MR", (5, 64, 64), classes=("liver", "mass"))


def scanned(vault: Vault, patient: int, *, masked: bool = True, frame: str = "1.4.1") -> None:
    """A series of five slices, and a mask of it, as ingest keeps them."""
    own = key_of(patient, 8)
    for place, one in enumerate(abdomen(f"P-{patient}", patient, frame)):
        pixels = (one.pixel_array / one.pixel_array.max()).astype(np.float32)
        told = {"pixels": pixels, "modality": "MR", "series": own, "payload": written(WHO.apply(one))}
        vault.keep(image(100 * patient + place, patient, study=patient + 1, **told))
    if masked:
        out = io.BytesIO()
        source = mask(abdomen(f"P-{patient}", patient))
        clean_mask(source, EXPLICIT_LE, WHO, LISTED).dataset.save_as(out, enforce_file_format=True)
        vault.keep(image(100 * patient + 50, patient, study=patient + 1, **a_mask(own, out.getvalue())))


def a_mask(series: str, payload: bytes) -> dict[str, Any]:
    return {"kind": "mask", "pixels": None, "modality": "SEG", "payload": payload, "masks": series, "label": ""}


def test_a_mask_is_the_target_of_its_series_on_the_grid_that_the_network_sees(vault: Vault) -> None:
    scanned(vault, 1)
    scanned(vault, 2, masked=False)
    found = task_cohort(vault, SEGMENTS)
    assert [p.pseudonym for p in found.patients] == [person(1)]
    (example,) = found.patients[0].examples
    assert (example.target.shape, example.target.dtype) == ((5, 64, 64), np.int64)
    assert np.array_equal(example.target, drawing()), "slices upwards, rows to the back, columns to the left"
    other = task_cohort(vault, replace(SEGMENTS, classes=("mass",))).patients[0].examples[0].target
    assert np.array_equal(other, drawing() == 2)
    told = survey(vault, SEGMENTS)
    assert [(one.output, one.patients) for one in told.outputs] == [("liver", 1), ("mass", 1)]
    assert left_out(vault, SEGMENTS) == {"no_mask": (5, 1)}


def test_a_mask_follows_size_and_spacing_as_the_pixels_do(vault: Vault) -> None:
    scanned(vault, 1)
    rule = replace(SEGMENTS, size=(10, 32, 32), spacing=(1.5, 0.625, 0.625))
    (example,) = task_cohort(vault, rule).patients[0].examples
    assert (example.target == 1).sum() == pytest.approx((drawing() == 1).sum() / 4 * 2, rel=0.3)
    assert example.target[:, :2].max() == 0


def test_the_slices_are_examples_in_two_dimensions_with_their_part_of_the_mask(vault: Vault) -> None:
    scanned(vault, 1)
    examples = task_cohort(vault, replace(SEGMENTS, size=(64, 64))).patients[0].examples
    assert len(examples) == 5
    sums = sorted(int((one.target == 1).sum()) for one in examples)
    assert sums == [0, 0, 0, 200, 200]
    halved = task_cohort(vault, replace(SEGMENTS, size=(32, 32))).patients[0].examples
    assert sorted(int((one.target == 1).sum()) for one in halved) == [0, 0, 0, 50, 50]
    spaced = task_cohort(vault, replace(SEGMENTS, size=(32, 32), spacing=(0.625, 0.625))).patients[0].examples
    assert max(int((one.target == 1).sum()) for one in spaced) == pytest.approx(50, rel=0.2)


def test_a_mask_of_another_frame_of_reference_or_of_other_segments_is_not_used(vault: Vault) -> None:
    scanned(vault, 1, frame="1.4.9")
    scanned(vault, 2)
    assert left_out(vault, SEGMENTS) == {"mask_frame": (5, 1)}
    assert left_out(vault, replace(SEGMENTS, size=(64, 64))) == {"mask_frame": (5, 1)}
    assert left_out(vault, replace(SEGMENTS, classes=("spleen",)))["no_mask"] == (5, 1)


def test_a_mask_is_never_an_image_whatever_modality_is_asked_for(vault: Vault) -> None:
    scanned(vault, 1)
    for size in ((5, 64, 64), (64, 64)):
        rule = ExampleRule("classification", "SEG", size, classes=("low", ""))
        assert survey(vault, rule) == replace(survey(vault, rule), examples=0, patients=0, left_out=())
    assert {count.state for count in vault.counts() if count.modality == "SEG"} == {"mask"}
    assert vault.cohort("SEG", (64, 64)).patients == ()


def test_a_patients_masks_are_deleted_with_the_patient_and_nobody_elses(vault: Vault) -> None:
    scanned(vault, 1)
    scanned(vault, 2)
    vault.purge({person(1)})
    assert {head.person for head in vault.heads()} == {person(2)}
    assert [p.pseudonym for p in task_cohort(vault, SEGMENTS).patients] == [person(2)]


def test_another_patients_mask_of_the_same_series_uid_is_nobodys_target(vault: Vault) -> None:
    """The series that a mask is of is the patient's own: see ``keyed_name``."""
    scanned(vault, 1, masked=False)
    vault.keep(image(900, 2, **a_mask(key_of(99, 8), b"not even opened")))
    assert left_out(vault, SEGMENTS) == {"no_mask": (5, 1)}


def test_the_head_of_an_image_is_written_as_before_masks_came_in(vault: Vault) -> None:
    scanned(vault, 1)
    written_as = {head.kind: json.loads(head.encode()) for head in vault.heads()}
    assert "masks" not in written_as["image"]
    assert written_as["mask"]["masks"] == key_of(1, 8)


def test_a_mask_in_a_study_that_is_held_back_is_not_used(vault: Vault) -> None:
    scanned(vault, 1)
    vault.hold(next(head.study for head in vault.heads() if head.kind == "mask"))
    assert task_cohort(vault, SEGMENTS).patients == ()
