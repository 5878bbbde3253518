"""``distill.toml``: every mistake at once and before anything is priced; no network but the pinned one."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.errors import SiteConfigError
from agent.mechanisms.common.config import CohortTable
from agent.mechanisms.common.dp_config import Prepared, PrivacyTable
from agent.mechanisms.distillation import config as distill
from agent.mechanisms.distillation.config import (
    PARTS,
    NetworksTable,
    PublicTable,
    StudentTable,
    TeacherTable,
    VettingTable,
    read_distill,
)
from agent.mechanisms.distillation.latent_model import LatentConfig
from agent.mechanisms.distillation.mechanism import Distill, DistillDp
from agent.mechanisms.distillation.teacher_student import Output, Sampling
from agent.models.image_folder import ImageFolderError
from agent.models.recognition.recogniser import RecogniserError
from agent.models.weights import WeightsError
from policies.accounting.claims import NoClaim, SubsampledGaussian
from tests.support.distillation_networks import CONDITIONS, SIDE, network_files, public_images
from tests.support.mechanism_documents import DISTILL, DISTILL_DP, changed, pinned, toml
from tests.support.picture_folders import write_pictures
from tests.support.small_privimage import digest_of

DOCS = Path(__file__).parents[4] / "deploy" / "docs"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a configuration names."""
    folder = tmp_path_factory.mktemp("distill")
    for part, raw in network_files().items():
        (folder / f"{part}.safetensors").write_bytes(raw)
    images, labels = public_images()
    listed = {f"{n:03d}.png": CONDITIONS.names[label] for n, label in enumerate(labels) if n % 5}  # not every fifth
    return write_pictures(folder, {f"{n:03d}.png": pixels for n, pixels in enumerate(images)}, listed)


Read = Prepared[Distill | DistillDp]


def read(shelf: Path, document: Mapping[str, Any] | str, vouch: bool = True, name: str = "") -> Read:
    path = shelf / "distill.toml"
    if not isinstance(document, str):
        document = toml({**document, "networks": {**pinned(), **document.get("networks", {})}})
    path.write_text(document)
    digests = {value for key, value in pinned().items() if key.endswith("_sha256")} | {
        digest_of(shelf / "pictures", SIDE)
    }
    return read_distill(path, frozenset(digests if vouch else ()), name=name)


def refused(shelf: Path, document: Mapping[str, Any] | str) -> str:
    with pytest.raises((SiteConfigError, ImageFolderError, WeightsError)) as caught:
        read(shelf, document)
    return str(caught.value)


# -- what is read


def test_a_teacher_without_noise_promises_nothing_and_is_compared_with_every_patient(shelf: Path) -> None:
    made = read(shelf, DISTILL)
    assert isinstance(made.mechanism, Distill)
    assert made.mechanism.claim() == NoClaim()
    parts = made.mechanism.components()
    assert parts == {"teacher": "private", "autoencoder": "public", "verifier": "public", "aligner": "public"}
    assert (made.selection.modality, made.selection.shape, made.selection.labels) == (
        "CR",
        (SIDE, SIDE),
        frozenset(CONDITIONS.names),
    )
    course = made.mechanism.course
    assert (course.sampling, course.output) == (Sampling(2, 2), Output("samples", 6))
    assert (course.vetting.top, course.vetting.false_matches) == (10, 0.01)
    assert made.told == ()


def test_a_teacher_with_noise_claims_its_training_and_knows_public_pictures_alone(shelf: Path) -> None:
    made = read(shelf, DISTILL_DP)
    assert isinstance(made.mechanism, DistillDp)
    assert made.mechanism.claim() == SubsampledGaussian(0.25, 4.0, 3)
    assert made.mechanism.sgd.expected_batch == 50.0, "the rate times the public bound, and no number of patients"
    assert set(made.mechanism.components().values()) == {"public"}
    bins = made.mechanism.public.bins
    labels = public_images()[1]
    expected = [-1 if number % 5 == 0 else int(label) for number, label in enumerate(labels)]
    assert bins.tolist() == expected, "a picture on no list shows no condition, and is learned and compared with"
    assert made.mechanism.pretraining_steps == 3


def test_epsilon_and_delta_make_the_noise(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def found(*told: Any) -> SubsampledGaussian:
        asked.append(told)
        return SubsampledGaussian(told[2], 7.5, told[3])

    monkeypatch.setattr(distill, "calibrate", found)
    wanted = changed(DISTILL_DP, privacy={"noise_multiplier": None, "epsilon": 2.0, "delta": 1e-5})
    made = read(shelf, wanted)
    assert asked == [(2.0, 1e-5, 0.25, 3)]
    assert made.mechanism.claim() == SubsampledGaussian(0.25, 7.5, 3)
    assert "noise multiplier 7.5 for epsilon 2 at delta 1e-05" in made.told[0]


def test_the_form_changes_with_the_file_and_with_nothing_else(shelf: Path) -> None:
    first = read(shelf, DISTILL).mechanism
    assert read(shelf, DISTILL, vouch=False).mechanism.form == first.form
    assert read(shelf, changed(DISTILL, student={"steps": 3})).mechanism.form != first.form
    assert read(shelf, changed(DISTILL, vetting={"false_matches": 0.05})).mechanism.form != first.form


def test_what_a_file_says_of_its_own_origin_counts_for_nothing(shelf: Path) -> None:
    """P6: the site vouches, or it is private."""
    made = read(shelf, DISTILL_DP, vouch=False)
    assert set(made.mechanism.components().values()) == {"private"}
    assert "not yet vouched for: autoencoder.safetensors, verifier.safetensors, unseen.safetensors" in made.told[0]
    assert made.told[-1] == digest_of(shelf / "pictures", SIDE), "so that it can be vouched for"


def test_a_configuration_of_the_other_form_is_not_released_under_this_ones_name(shelf: Path) -> None:
    """Nobody asks for level A and gets level C."""
    assert isinstance(read(shelf, DISTILL, name="distill").mechanism, Distill)
    with pytest.raises(SiteConfigError, match="mechanism: must be distill-dp"):
        read(shelf, DISTILL, name="distill-dp")
    with pytest.raises(SiteConfigError, match="mechanism: must be distill"):
        read(shelf, DISTILL_DP, name="distill")


# -- pinned networks


@pytest.mark.parametrize("part", PARTS)
def test_a_network_that_is_not_the_pinned_one_is_refused_with_what_was_found(shelf: Path, part: str) -> None:
    """A verifier that nobody pinned could find nobody in anything."""
    wanted = "12" * 32
    told = refused(shelf, changed(DISTILL, networks={f"{part}_sha256": wanted}))
    found = hashlib.sha256(network_files()[part]).hexdigest()
    assert (
        f"{part}.safetensors is not the pinned {part}: its SHA-256 is {found}, and {part}_sha256 is {wanted}" in told
    )
    assert "Compare with what `lazaret-agent train` printed" in told


def test_a_file_that_was_exchanged_is_refused_before_a_byte_of_it_is_made_into_a_network(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("autoencoder_from", "verifier_from", "aligner_from"):
        monkeypatch.setattr(distill, name, lambda *_: pytest.fail("read"))
    wrong = {f"{part}_sha256": f"{number}" * 64 for number, part in enumerate(PARTS, 1)}
    told = refused(shelf, changed(DISTILL, networks=wrong))
    assert all(f"is not the pinned {part}" in told for part in PARTS), "all of them at once"


def test_one_file_is_no_two_opinions(shelf: Path) -> None:
    both = {"unseen": "verifier.safetensors", "unseen_sha256": pinned()["verifier_sha256"]}
    assert "the verifier that measures must not be the one that chose" in refused(
        shelf, changed(DISTILL, networks=both)
    )


def test_a_verifier_that_knows_nobody_is_refused(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: object) -> None:
        raise RecogniserError("it knows nobody")

    monkeypatch.setattr(distill.Verifier, "demand", nobody)
    assert refused(shelf, DISTILL) == "distill.toml: it knows nobody"


def test_other_words_than_the_aligners_are_refused_with_its_own(shelf: Path) -> None:
    told = refused(shelf, changed(DISTILL, conditions=list(reversed(CONDITIONS.names))))
    assert "the aligner learned other conditions, or in another order: conditions = [" in told
    assert f'"{CONDITIONS.names[0]}"' in told
    assert "the aligner learned other conditions" in refused(shelf, changed(DISTILL, templates=["shows {}"]))


# -- what is refused


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown table", {"more": {}}, "unknown table: more"),
    ("an unknown key", {"student": {"stepps": 1}}, "student: unknown keys: stepps"),
    ("another mechanism", {"mechanism": "privimage"}, "mechanism: must be distill"),
    ("no cohort", {"cohort": None}, "cohort: missing"),
    ("no teacher", {"teacher": None}, "teacher: missing"),
    ("a teacher that is a number", {"teacher": 3}, "teacher: must be a table"),
    ("no student", {"student": None}, "student: missing"),
    ("a word for a number", {"student": {"steps": "many"}}, "student.steps: must be a int"),
    ("no steps of the student", {"student": {"steps": 0}}, "student: steps: at least 1"),
    ("no steps of the teacher", {"teacher": {"steps": 0}}, "teacher: steps: at least 1"),
    ("no such preset", {"teacher": {"preset": "huge"}}, "teacher: preset: one of tiny"),
    ("an architecture", {"teacher": {"architecture": {}}}, "teacher.architecture: is named by preset"),
    ("a key of no model", {"teacher": {"dropout": 0.1}}, "teacher: unknown keys: dropout"),
    ("no prediction of that name", {"teacher": {"prediction": "x"}}, "prediction"),
    ("a device of no kind", {"teacher": {"device": "tpu"}}, "teacher.device: .cpu., .cuda."),
    ("a device that is not there", {"teacher": {"device": "cuda:77"}}, "this machine has no cuda:77"),
    ("no conditions", {"conditions": None}, "conditions: a list of texts"),
    ("a condition that is a number", {"conditions": [1]}, "conditions: a list of texts"),
    ("a condition twice", {"conditions": ["edema", "edema"]}, "conditions: two conditions"),
    ("a condition beyond ASCII", {"conditions": ["Ödem"]}, "conditions: a condition's name"),
    ("a template without a place", {"templates": ["a radiograph"]}, "conditions: a template"),
    ("no templates", {"templates": []}, "templates: a list of texts"),
    ("more labels than a set has", {"conditions": [f"c{n}" for n in range(257)]}, "a set has at most 256"),
    ("labels of the cohort that are no conditions", {"cohort": {"labels": ["7"]}}, "cohort.labels: leave it out"),
    ("half a split", {"cohort": {"part": "release"}}, "parts are of a split"),
    ("no nearest patients", {"vetting": {"top": 0}}, "vetting: top: 1 to 1000 patients"),
    ("no false matches", {"vetting": {"false_matches": 0.0}}, "vetting: top: 1 to 1000 patients"),
    ("no candidates", {"sampling": {"candidates": 0}}, "sampling: 1 to 1000 candidates"),
    ("too many samples", {"sampling": {"candidates": 1000, "groups": 100_000}}, "at most 1000000 samples"),
    ("an output of no kind", {"output": {"release": "gan"}}, "output.release: gan not in"),
    ("an output of nothing", {"output": {"pictures": 0}}, "pictures: 1 to 100000"),
    ("fewer pictures than conditions", {"output": {"pictures": 1}}, "at least one image of each condition"),
    ("a network without a name", {"networks": {"verifier": ""}}, "verifier: must name a file"),
    ("a digest that is none", {"networks": {"verifier_sha256": "abc"}}, "verifier_sha256: the file's SHA-256, 64"),
    ("a network that is not there", {"networks": {"aligner": "gone"}}, "gone: No such file"),
    ("privacy without noise", {"privacy": {"steps": 1}}, "unknown table: privacy"),
    ("public pictures beside patients", {"public": {"pictures": "pictures"}}, "unknown table: public"),
]


@pytest.mark.parametrize(("change", "told"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_what_makes_no_sense_is_refused_before_it_is_priced(shelf: Path, change: dict[str, Any], told: str) -> None:
    assert re.search(told, said := refused(shelf, changed(DISTILL, **change))), said


WRONG_DP: list[tuple[str, dict[str, Any], str]] = [
    ("no privacy", {"privacy": None}, "privacy: missing"),
    ("no public pictures", {"public": None}, "public: missing"),
    ("both ways to a noise", {"privacy": {"epsilon": 1.0, "delta": 1e-5}}, "write epsilon and delta"),
    ("no labels", {"public": {"labels": ""}}, "labels: must name"),
    ("a delta of a patient", {"privacy": {"noise_multiplier": None, "epsilon": 1.0, "delta": 5e-3}}, r"\(P1\)"),
    ("no delta", {"privacy": {"noise_multiplier": None, "epsilon": 1.0, "delta": 0.0}}, r"\(P1\)"),
    ("no images", {"public": {"pictures": "gone"}}, "gone is not a folder"),
    ("no list", {"public": {"labels": "gone.csv"}}, "gone.csv is not a CSV file"),
    ("pictures in no folders", {"public": {"labels": "folders"}}, "are not in a folder"),
]


@pytest.mark.parametrize(("change", "told"), [one[1:] for one in WRONG_DP], ids=[one[0] for one in WRONG_DP])
def test_what_makes_no_sense_of_a_noisy_teacher_is_refused_too(
    shelf: Path, change: dict[str, Any], told: str
) -> None:
    assert re.search(told, said := refused(shelf, changed(DISTILL_DP, **change))), said


def test_all_problems_are_told_at_once_with_the_file(shelf: Path) -> None:
    networks = {"verifier": None, "aligner_sha256": None}
    wrong = changed(DISTILL_DP, more={}, student={"steps": "x"}, teacher={"preset": "huge"}, cohort=None, public=None)
    path = shelf / "distill.toml"
    path.write_text(toml({**wrong, "networks": {k: v for k, v in pinned().items() if k not in networks}}))
    with pytest.raises(SiteConfigError) as caught:
        read_distill(path, frozenset())
    for word in (
        "distill.toml:",
        "unknown table: more",
        "student.steps:",
        "preset: one of",
        "cohort: missing",
        "public: missing",
        "networks.verifier: missing",
        "networks.aligner_sha256: missing",
    ):
        assert word in str(caught.value), word


@pytest.mark.parametrize(
    "own", [{"steps": None}, {"steps": 0}, {"preset": "huge"}, {"steps": None, "preset": "huge"}]
)
def test_a_problem_of_the_teachers_own_keys_hides_none_of_the_models(shelf: Path, own: dict[str, Any]) -> None:
    said = refused(shelf, changed(DISTILL, conditions=None, teacher={**own, "dropout": 0.1, "architecture": {}}))
    told = {"steps": "teacher.steps: missing" if own.get("steps", 0) is None else "teacher: steps: at least 1"}
    for word in (
        *(told[key] for key in own if key != "preset"),
        *("teacher: preset: one of tiny" for key in own if key == "preset"),
        "teacher: unknown keys: dropout",
        "teacher.architecture: is named by preset",
        "conditions: a list of texts",
    ):
        assert said.count(word) == 1, said


@pytest.mark.parametrize(("table", "key"), [("sampling", "candidates"), ("output", "pictures")])
def test_a_table_says_its_name_once(shelf: Path, table: str, key: str) -> None:
    assert f"{table}: {table}:" not in (said := refused(shelf, changed(DISTILL, **{table: {key: 0}})))
    assert f"{table}: " in said


def test_public_labels_that_are_no_conditions_are_counted_and_what_to_do_is_said(shelf: Path) -> None:
    (shelf / "other.csv").write_text("file,label\n000.png,zebra\n001.png,none\n")
    told = refused(shelf, changed(DISTILL_DP, public={"labels": "other.csv"}))
    assert told.startswith("public.labels: 1 label(s) are none of the conditions: remove their images from the list")
    assert "zebra" not in told


def test_a_condition_that_no_public_picture_shows_is_told(shelf: Path) -> None:
    (shelf / "few.csv").write_text(f"file,label\n001.png,{CONDITIONS.names[0]}\n")
    made = read(shelf, changed(DISTILL_DP, public={"labels": "few.csv"}))
    assert made.told == (
        f"no public image shows {', '.join(CONDITIONS.names[1:])}: the teacher learns it from noisy steps only",
    )


# -- the examples in the documents


def uncommented(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    text = (DOCS / name).read_text()
    return tomllib.loads(text), tomllib.loads(re.sub(r"^# (?=[a-z0-9_]+ = )", "", text, flags=re.MULTILINE))


TABLES: dict[str, tuple[type[Any], ...]] = {
    "cohort": (CohortTable,),
    "networks": (NetworksTable,),
    "teacher": (TeacherTable, LatentConfig),
    "student": (StudentTable,),
    "vetting": (VettingTable,),
    "sampling": (Sampling,),
    "output": (Output,),
}


@pytest.mark.parametrize("name", ["distill.example.toml", "distill-dp.example.toml"])
def test_the_examples_name_every_key_and_say_truly_what_it_is_when_it_is_left_out(name: str) -> None:
    plain, whole = uncommented(name)
    more: dict[str, tuple[type[Any], ...]] = {"privacy": (PrivacyTable,), "public": (PublicTable,)}
    tables = TABLES | (more if "dp" in name else {})
    for table, kinds in tables.items():
        known = {one.name: one for kind in kinds for one in fields(kind) if one.name != "architecture"}
        assert whole[table].keys() == known.keys(), table
        for key, one in known.items():
            if key in plain[table] or one.default in (None, MISSING):
                continue
            left_out = sorted(one.default) if isinstance(one.default, tuple | frozenset) else one.default
            assert whole[table][key] == left_out, f"{table}.{key}"
    assert whole["templates"] == list(distill.TEMPLATES)


@pytest.mark.parametrize("name", ["distill.example.toml", "distill-dp.example.toml"])
def test_the_examples_are_read_as_they_stand_up_to_their_files(shelf: Path, name: str) -> None:
    told = refused(shelf, (DOCS / name).read_text())
    assert re.fullmatch(r"verifier-0\.safetensors: No such file or directory", told), told


def test_whatever_stands_in_the_place_of_a_number_is_a_refusal_or_a_claim(shelf: Path) -> None:
    for table, key in (
        ("teacher", "steps"),
        ("teacher", "guidance"),
        ("vetting", "false_matches"),
        ("output", "pictures"),
    ):
        for wild in ("-1", "nan", "inf", "1" + "0" * 30, "true", '"x"', "[]"):
            document = {**changed(DISTILL, **{table: {key: "HERE"}}), "networks": pinned()}
            try:
                read(shelf, toml(document).replace('"HERE"', wild))
            except (SiteConfigError, ImageFolderError, WeightsError) as error:
                assert str(error)  # noqa: PT017 - one of two ways


def test_the_public_pictures_are_those_of_the_autoencoders_size(shelf: Path) -> None:
    made = read(shelf, DISTILL_DP).mechanism
    assert isinstance(made, DistillDp)
    assert made.public.images.shape[1:] == made.shape == (SIDE, SIDE)
    assert made.public.images.dtype == np.uint8
