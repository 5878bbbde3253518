"""``privimage.toml``: every mistake at once and before anything is priced, nothing taken on a file's own word."""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agent.errors import SiteConfigError
from agent.mechanisms.centroids import config as centroids
from agent.mechanisms.common.config import CohortTable
from agent.mechanisms.common.dp_config import Prepared, PrivacyTable
from agent.mechanisms.privimage import config as privimage
from agent.mechanisms.privimage.config import ModelTable, PublicTable, SemanticsTable, read_privimage
from agent.mechanisms.privimage.diffusion import DiffusionConfig
from agent.mechanisms.privimage.mechanism import PrivImage, Synthetic
from agent.models.diffusion import edm as diffusion
from agent.models.features.extractors import RandomFeatures
from agent.models.image_folder import ImageFolderError
from agent.models.semantics.training import cluster_semantics
from agent.models.weights import WeightsError
from policies.accounting.claims import Composed, GaussianQuery, SubsampledGaussian
from tests.support.mechanism_documents import changed, toml
from tests.support.picture_folders import write_pictures
from tests.support.small_privimage import digest_of, public

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "deploy" / "docs" / "privimage.example.toml"
WRITTEN: Mapping[str, Any] = {
    "mechanism": "privimage",
    "classes": ["0", "1"],
    "cohort": {"modality": "OT"},
    "privacy": {"noise_multiplier": 4.0, "steps": 6, "sampling_rate": 0.25, "public_patients": 200},
    "semantics": {"file": "semantics.safetensors", "keep": 1, "noise": 2.5, "images": 2},
    "public": {"pictures": "pictures"},
    "model": {"kind": "diffusion", "preset": "tiny8", "pretraining_steps": 3},
}


@cache
def semantics_file(bins: int = 3) -> bytes:
    return cluster_semantics(RandomFeatures(1, 8, 2), public(), bins).file


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a configuration names."""
    folder = tmp_path_factory.mktemp("privimage")
    (folder / "semantics.safetensors").write_bytes(semantics_file())
    named = {f"{n:02d}.png": pixels for n, pixels in enumerate(public())}
    return write_pictures(folder, named, {name: f"cluster-{n % 3}" for n, name in enumerate(named)})


def read(shelf: Path, document: Mapping[str, Any] | str = WRITTEN, vouch: bool = True) -> Prepared[PrivImage]:
    path = shelf / "privimage.toml"
    path.write_text(document if isinstance(document, str) else toml(document))
    digest = hashlib.sha256((shelf / "semantics.safetensors").read_bytes()).hexdigest()
    pictures = shelf / "pictures"
    more = {digest_of(pictures)} if pictures.is_dir() and any(pictures.iterdir()) else set()
    return read_privimage(path, frozenset({digest, *more} if vouch else ()))


def refused(shelf: Path, document: Mapping[str, Any] | str) -> str:
    with pytest.raises((SiteConfigError, ImageFolderError, WeightsError)) as caught:
        read(shelf, document)
    return str(caught.value)


# -- what is read


def test_a_configuration_is_a_claim_of_the_histogram_and_every_step(shelf: Path) -> None:
    made = read(shelf)
    assert made.mechanism.claim() == Composed((GaussianQuery(2.5, 1, 1), SubsampledGaussian(0.25, 4.0, 6)))
    assert made.mechanism.sgd.expected_batch == 50.0, "the rate times the public bound, and no number of patients"
    assert (made.selection.modality, made.selection.shape, made.selection.fit) == ("OT", (8, 8), True)
    assert made.mechanism.components() == {"semantics": "public", "pretraining": "public"}
    assert made.told == ()


def test_the_example_in_the_documents_is_read_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise, which takes seconds to find, is that of the note; the accountant's own tests find it again."""
    text = EXAMPLE.read_text()
    (tmp_path / "pictures").mkdir()
    rows = ["file,label"]
    for number in range(80):
        pixels = np.random.default_rng(number).integers(0, 40, (8, 8)) + 2 * number
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "pictures" / f"{number}.png")
        rows.append(f"{number}.png,cluster-{number % 20}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    images = np.stack([np.asarray(Image.open(tmp_path / "pictures" / f"{n}.png")) for n in range(80)])
    raw = cluster_semantics(RandomFeatures(1, 8, 2), images, 20).file
    (tmp_path / "semantics.safetensors").write_bytes(raw)
    asked = []

    def found(*told: Any, **more: Any) -> SubsampledGaussian:
        asked.append((told, more["also"]))
        return SubsampledGaussian(told[2], 7.5, told[3])

    monkeypatch.setattr(privimage, "calibrate", found)
    made = read(tmp_path, text)
    assert asked == [((2.0, 4e-6, 0.25, 150), (GaussianQuery(4.0, 1, 1),))]
    assert len(made.mechanism.classes) == 10
    assert made.mechanism.sgd.noise_multiplier == 7.5
    assert made.mechanism.synthetic.pictures == 1000
    assert "epsilon 2 at delta 4e-06" in made.told[0]
    assert made.mechanism.public.bins.tolist() == [n % 20 for n in sorted(range(80), key=str)]
    pooled = read(tmp_path, text.replace("# pooled =", "pooled ="))
    assert (pooled.mechanism.pooled, pooled.mechanism.drawn) == ("digit", ("digit",))


KEYS: list[tuple[str, type[Any]]] = [
    ("cohort", CohortTable),
    ("privacy", PrivacyTable),
    ("semantics", SemanticsTable),
    ("public", PublicTable),
    ("synthetic", Synthetic),
    ("model", ModelTable),
    ("model", DiffusionConfig),
]


def under(document: dict[str, Any], table: str) -> dict[str, Any]:
    for name in table.split("."):
        document = document.get(name, {})
    return document


@pytest.mark.parametrize(("table", "kind"), KEYS, ids=[f"{table}-{kind.__name__}" for table, kind in KEYS])
def test_the_example_names_every_key_and_says_truly_what_it_is_when_it_is_left_out(
    table: str, kind: type[Any]
) -> None:
    text = EXAMPLE.read_text()
    plain = tomllib.loads(text)
    whole = tomllib.loads(re.sub(r"^# (?=\[[a-z.]+\]|[a-z0-9_]+ = )", "", text, flags=re.MULTILINE))
    assert whole.keys() == {"pooled", *plain}
    for one in fields(kind):
        if one.name == "architecture":  # is named by preset
            continue
        assert one.name in under(whole, table), f"{table}.{one.name}"
        found, left_out = under(whole, table)[one.name], one.default
        if one.name in under(plain, table) or isinstance(found, dict) or left_out in (None, MISSING):
            continue
        assert found == (sorted(left_out) if isinstance(left_out, tuple | frozenset) else left_out), one.name


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ("cohort", CohortTable),
        ("networks", centroids.CodecTable),
        ("privacy", centroids.PrivacyTable),
        ("cells", centroids.CellsTable),
    ],
)
def test_the_example_of_centroids_names_every_key_too(table: str, kind: type[Any]) -> None:
    text = EXAMPLE.with_name("centroids.example.toml").read_text()
    whole = tomllib.loads(re.sub(r"^# (?=[a-z0-9_]+ = )", "", text, flags=re.MULTILINE))
    assert {one.name for one in fields(kind)} == whole[table].keys()


def test_the_claim_is_of_the_file_alone_whatever_lies_around_it(shelf: Path, tmp_path: Path) -> None:
    """P1: not a word of it depends on patients; the same words give the same claim and the same form."""
    first, again = read(shelf), read(shelf)
    assert (first.mechanism.claim(), first.mechanism.form) == (again.mechanism.claim(), again.mechanism.form)
    moved = tmp_path / "elsewhere"
    shutil.copytree(shelf, moved)
    (moved / "patients").mkdir()
    for number in range(40):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(moved / "patients" / f"{number}.png")
    (moved / "vault.db").write_bytes(b"x" * 1000)
    there = read(moved)
    assert (there.mechanism.claim(), there.mechanism.form) == (first.mechanism.claim(), first.mechanism.form)
    other = read(shelf, changed(WRITTEN, synthetic={"pictures": 7}))
    assert other.mechanism.form != first.mechanism.form


def test_few_patients_may_count_as_one_class(shelf: Path) -> None:
    made = read(shelf, changed(WRITTEN, pooled="any")).mechanism
    assert (made.classes, made.drawn, made.model.architecture.classes) == (("0", "1"), ("any",), 1)
    assert made.form != read(shelf).mechanism.form


def test_only_pictures_of_the_classes_are_opened(shelf: Path) -> None:
    assert read(shelf).selection.labels == {"0", "1"}
    assert read(shelf, changed(WRITTEN, cohort={"labels": ["1", "0"]})).selection.labels == {"0", "1"}


def test_the_model_takes_its_own_keys(shelf: Path) -> None:
    model = read(shelf, changed(WRITTEN, model={"lora_rank": 4, "draws": 2, "seed": 5})).mechanism.model
    assert isinstance(model, DiffusionConfig)
    assert (model.lora_rank, model.draws, model.seed) == (4, 2, 5)
    assert model.architecture == diffusion.PRESETS["tiny8"].fitted(1, 2)


def test_public_labels_come_from_a_list_from_folders_or_from_the_query_function(shelf: Path, tmp_path: Path) -> None:
    listed = read(shelf, changed(WRITTEN, public={"labels": "labels.csv"})).mechanism.public
    assert listed.bins.tolist() == [n % 3 for n in range(60)]
    seen = read(shelf).mechanism
    assert np.array_equal(
        seen.public.bins, seen.semantics.probabilities(public().astype(np.float32) / np.float32(255)).argmax(axis=1)
    ), "left out: what the query function says"
    for number in range(60):
        (tmp_path / "pictures" / f"cluster-{number % 3}").mkdir(parents=True, exist_ok=True)
        shutil.copy(shelf / "pictures" / f"{number:02d}.png", tmp_path / "pictures" / f"cluster-{number % 3}")
    shutil.copy(shelf / "semantics.safetensors", tmp_path)
    folders = read(tmp_path, changed(WRITTEN, public={"labels": "folders"})).mechanism.public
    assert sorted(folders.bins.tolist()) == sorted(listed.bins.tolist())


def test_a_query_function_for_which_the_site_does_not_vouch_is_private(shelf: Path) -> None:
    """P6: what the file says of itself counts for nothing."""
    made = read(shelf, vouch=False)
    assert made.mechanism.components() == {"semantics": "private", "pretraining": "private"}
    assert made.told[-1] == digest_of(shelf / "pictures"), "so that it can be vouched for"
    assert read(shelf).mechanism.components()["semantics"] == "public"


# -- what is refused


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown table", {"more": {}}, "unknown table: more"),
    ("an unknown key", {"privacy": {"delta_": 1}}, "privacy: unknown keys: delta_"),
    ("another mechanism", {"mechanism": "ksalsa"}, "mechanism: must be privimage"),
    ("no cohort", {"cohort": None}, "cohort: missing"),
    ("no privacy", {"privacy": None}, "privacy: missing"),
    ("no semantics", {"semantics": None}, "semantics: missing"),
    ("no public pictures", {"public": None}, "public: missing"),
    ("a table that is a number", {"model": 3}, "model: must be a table"),
    ("a privacy that is a number", {"privacy": 3}, "privacy: must be a table"),
    ("a word for a number", {"privacy": {"steps": "many"}}, "privacy.steps: must be a int"),
    ("a fraction of a step", {"privacy": {"steps": 1.5}}, "privacy.steps: must be a int"),
    ("yes for a number", {"semantics": {"noise": True}}, "semantics.noise: must be a float"),
    ("no steps", {"privacy": {"steps": None}}, "privacy.steps: missing"),
    ("both ways to a noise", {"privacy": {"epsilon": 1.0, "delta": 1e-5}}, "write epsilon and delta"),
    ("no way to a noise", {"privacy": {"noise_multiplier": None}}, "or noise_multiplier; not both"),
    ("epsilon alone", {"privacy": {"noise_multiplier": None, "epsilon": 1.0}}, "write epsilon and delta"),
    (
        "a delta of one patient in the cohort",
        {"privacy": {"noise_multiplier": None, "epsilon": 1.0, "delta": 5e-3}},
        "privacy.delta: must be positive, and smaller than 1 / public_patients",
    ),
    (
        "no delta at all",
        {"privacy": {"noise_multiplier": None, "epsilon": 1.0, "delta": 0.0}},
        "privacy.delta: must be positive",
    ),
    ("nobody", {"privacy": {"public_patients": 0}}, "public_patients: at least 1"),
    ("more than everybody", {"privacy": {"public_patients": 10**400}}, "public_patients: at least 1, and at most"),
    ("steps whose price nobody waits for", {"privacy": {"steps": 1_000_000}}, "privacy: steps: at most 100000"),
    ("a label too long to be written", {"classes": ["0", "x" * 33]}, "classes: a label of the set is at most 32"),
    (
        "a label beyond ASCII",
        {"classes": ["0", "Ödem"]},
        "classes: a label of the set is at most 32 plain",
    ),
    ("a label with a line in it", {"classes": ["0", "a\nb"]}, "classes: a label of the set is at most 32"),
    ("a pooled label beyond ASCII", {"pooled": "Größe"}, "pooled: a label of the set is at most 32"),
    ("a pooled label too long", {"pooled": "x" * 33}, "pooled: a label of the set is at most 32"),
    ("more labels than a set has", {"classes": [f"{n}" for n in range(257)]}, "classes: a set has at most 256"),
    ("a rate above one", {"privacy": {"sampling_rate": 1.5}}, r"sampling_rate must lie in \(0, 1\]"),
    ("no clip", {"privacy": {"clip": 0.0}}, "clip and expected_batch must be finite and positive"),
    ("no noise", {"privacy": {"noise_multiplier": 0.0}}, "noise"),
    ("a negative noise", {"privacy": {"noise_multiplier": -1.0}}, "noise_multiplier be finite and positive"),
    ("no classes", {"classes": None}, "classes: the labels to draw, as a list"),
    ("an empty class", {"classes": ["0", ""]}, "classes: the labels to draw, as a list"),
    ("a class that is a number", {"classes": [0, 1]}, "classes: the labels to draw, as a list"),
    ("a class twice", {"classes": ["0", "0"]}, "classes: a label is listed twice"),
    ("pooled as a number", {"pooled": 3}, "pooled: the name of the one class"),
    ("labels of the cohort that are no classes", {"cohort": {"labels": ["7"]}}, "cohort.labels: leave it out"),
    ("a model of no kind", {"model": {"kind": "vae"}}, 'model.kind: "diffusion"'),
    ("the paper's GAN", {"model": {"kind": "gan"}}, 'model.kind: "diffusion"'),
    ("no such preset", {"model": {"preset": "huge"}}, "model.preset: one of tiny8"),
    ("a key of the gan", {"model": {"checkpoint_every": 9}}, "model: unknown keys: checkpoint_every"),
    ("an architecture", {"model": {"architecture": {}}}, "model.architecture: is named by preset"),
    ("a device of no kind", {"model": {"device": "tpu"}}, 'model.device: "cpu", "cuda" or "cuda:NUMBER"'),
    ("a device that is not there", {"model": {"device": "cuda:77"}}, "model.device: this machine has no cuda:77"),
    ("no pre-training", {"model": {"pretraining_steps": 0}}, "pretraining steps: at least 1"),
    ("colour for grey semantics", {"model": {"colour": True}}, "must be of one size"),
    ("a model of another size", {"model": {"preset": "tiny16"}}, "none that can be read and has 16 pixels a side"),
    ("semantics that drown", {"semantics": {"noise": 40.0}}, "would drown the largest of 3 bins"),
    ("more semantics than there are", {"semantics": {"keep": 2}}, "3 semantics are too few"),
    ("no share", {"semantics": {"share": 0.0}}, "semantics: share: above 0, and at most 1"),
    ("a query function without a name", {"semantics": {"file": ""}}, "semantics: file: must name"),
    ("a query function of no name", {"semantics": {"file": "a\0b"}}, "semantics: file: must name"),
    ("pictures without a name", {"public": {"pictures": ""}}, "public: pictures: must name"),
    ("pictures of no name", {"public": {"pictures": "a\0b"}}, "public: pictures: must name"),
    ("a list of no name", {"public": {"labels": "a\0b"}}, "public: labels: must name"),
    ("no votes", {"semantics": {"votes": 0}}, "whole numbers from 1 on"),
    ("no query function", {"semantics": {"file": "gone.safetensors"}}, "gone.safetensors: No such file"),
    ("a query function that is none", {"semantics": {"file": "labels.csv"}}, "not safetensors"),
    ("no images", {"public": {"pictures": "gone"}}, "gone is not a folder"),
    ("no list", {"public": {"labels": "gone.csv"}}, "gone.csv is not a CSV file"),
    ("pictures in no folders", {"public": {"labels": "folders"}}, "are not in a folder"),
    ("a set of nothing", {"synthetic": {"pictures": 0}}, "pictures: 1 to 100000"),
    ("shares of no kind", {"synthetic": {"shares": "mine"}}, "synthetic.shares: mine not in"),
    ("half a split", {"cohort": {"part": "release"}}, "parts are of a split"),
]


@pytest.mark.parametrize(("change", "told"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_what_makes_no_sense_is_refused_before_it_is_priced(shelf: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises((SiteConfigError, ImageFolderError, WeightsError), match=told):
        read(shelf, changed(WRITTEN, **change))


def test_all_problems_are_told_at_once_with_the_file(shelf: Path) -> None:
    wrong = changed(WRITTEN, more={}, classes=None, privacy={"steps": "x"}, model={"preset": "huge"}, cohort=None)
    told = refused(shelf, wrong)
    words = (
        "privimage.toml:",
        "unknown table: more",
        "classes:",
        "privacy.steps:",
        "model.preset:",
        "cohort: missing",
    )
    assert all(word in told for word in words), told


def test_what_is_no_toml_or_no_text_is_refused(shelf: Path) -> None:
    assert "privimage.toml: not TOML" in refused(shelf, "classes = [")
    (shelf / "other.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SiteConfigError, match=r"other\.toml is not UTF-8 text"):
        read_privimage(shelf / "other.toml", frozenset())
    with pytest.raises(SiteConfigError, match=r"gone\.toml cannot be read: file not found"):
        read_privimage(shelf / "gone.toml", frozenset())


def test_an_epsilon_that_cannot_be_kept_says_what_to_change(shelf: Path) -> None:
    """Both ways: the histogram takes more than all of it; or no noise is enough for so many steps."""
    drowned = changed(WRITTEN, privacy={"noise_multiplier": None, "epsilon": 0.05, "delta": 1e-5})
    told = refused(shelf, drowned)
    assert re.search(r"the histogram alone takes epsilon \S+ of 0.05: a larger \[semantics\] noise", told)
    huge = {"noise_multiplier": None, "epsilon": 99.0, "delta": 1e-5}
    assert "epsilon must lie in (0, " in refused(shelf, changed(WRITTEN, privacy=huge))


def test_labels_that_are_pooled_may_be_anything_a_vault_can_hold(shelf: Path) -> None:
    """They are counted, and never written into a set."""
    made = read(shelf, changed(WRITTEN, classes=["Ödem", "x" * 33], pooled="any")).mechanism
    assert made.drawn == ("any",)


def test_a_share_that_is_no_number_is_named(shelf: Path) -> None:
    text = toml(changed(WRITTEN, semantics={"share": "HERE"})).replace('"HERE"', "nan")
    assert "semantics: share:" in refused(shelf, text)


def test_what_takes_time_is_said_before_it_is_begun(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []

    def found(*given: Any, **_: Any) -> SubsampledGaussian:
        assert told == [("price", "finding the noise for epsilon 2 at delta 1e-05")]
        return SubsampledGaussian(given[2], 7.5, given[3])

    monkeypatch.setattr(privimage, "calibrate", found)
    asked = changed(WRITTEN, privacy={"noise_multiplier": None, "epsilon": 2.0, "delta": 1e-5})
    path = shelf / "privimage.toml"
    path.write_text(toml(asked))
    read_privimage(path, frozenset(), lambda *line: told.append(line))
    assert len(told) == 1


def test_labels_that_are_no_semantics_are_counted_and_not_named(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf, tmp_path / "x")
    (tmp_path / "x" / "labels.csv").write_text("file,label\n00.png,cluster-0\n01.png,zebra\n02.png,okapi\n")
    told = refused(tmp_path / "x", changed(WRITTEN, public={"labels": "labels.csv"}))
    assert told.startswith("public.labels: 2 label(s) are no semantics of the query function: use the labels that ")
    assert "zebra" not in told


def test_a_folder_without_a_picture_that_can_be_used_is_refused(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    shutil.copy(shelf / "semantics.safetensors", tmp_path)
    assert "0 image file(s)" in refused(tmp_path, WRITTEN)
    (tmp_path / "pictures" / "a.png").write_bytes(b"no image")
    assert "1 image file(s), and none that can be read" in refused(tmp_path, WRITTEN)


def test_a_file_larger_than_any_network_is_not_read(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf, tmp_path / "x")
    with (tmp_path / "x" / "big.safetensors").open("wb") as stream:
        stream.truncate((1 << 31) + 1)  # sparse
    told = refused(tmp_path / "x", changed(WRITTEN, semantics={"file": "big.safetensors"}))
    assert told == "big.safetensors is larger than 2 GiB"


NUMBERS = {
    "privacy": ("noise_multiplier", "steps", "sampling_rate", "public_patients", "clip", "images_per_patient"),
    "semantics": ("keep", "noise", "votes", "images", "share"),
    "model": ("pretraining_steps", "draws", "lr_finetune", "ema", "lora_rank", "seed", "sampling_steps", "guidance"),
    "synthetic": ("pictures",),
}


@pytest.mark.parametrize(("table", "key"), [(table, key) for table, keys in NUMBERS.items() for key in keys])
def test_whatever_stands_in_the_place_of_a_number_is_a_refusal_or_a_claim(shelf: Path, table: str, key: str) -> None:
    """Nothing else: neither a fault of the program, nor a price that is no number."""
    for wild in ("-1", "0", "nan", "inf", "-inf", "1e308", "1e-308", "1" + "0" * 30, "true", '"x"', "[]", "{}"):
        text = toml(changed(WRITTEN, **{table: {key: "HERE"}})).replace('"HERE"', wild)
        try:
            claim = read(shelf, text).mechanism.claim()
        except (SiteConfigError, ImageFolderError, WeightsError) as error:
            assert str(error)  # noqa: PT017 - one of two ways
        else:
            assert all(0.0 < part.noise_multiplier < math.inf for part in claim.parts[1:])
