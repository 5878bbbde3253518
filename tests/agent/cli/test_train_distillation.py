"""Networks of a distillation and its release as they are typed, at a site with a coordinator that listens."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent.cli import distillation_review, release_resumable, train_distillation
from agent.mechanisms.distillation import options
from agent.models.diffusion.aligner import aligner_from
from agent.models.diffusion.autoencoder import PRESETS, autoencoder_from
from agent.models.diffusion.latent import KIND as MODEL
from agent.models.diffusion.prompts import TEMPLATES
from agent.models.recognition import verifier_training
from agent.models.recognition.recogniser_training import TooFewPeopleError
from agent.models.recognition.verifier import MADE, Verifier
from agent.models.recognition.verifier_training import VerificationConfig
from agent.models.weights import unpack
from agent.release import pipeline
from agent.storage import projects
from agent.storage.vault import Vault
from coordinator.pools.architectures import approve_architecture, architecture_of
from policies.review.policy import preset
from protos.artifacts.arrays import unpack_images
from tests.support import federation_world
from tests.support.aligners import chests
from tests.support.command_line import Typed, at, typed
from tests.support.distillation_networks import CONDITIONS, SIDE, network_files, public_images
from tests.support.federation_world import Site
from tests.support.latents import tiny_autoencoder_file
from tests.support.mechanism_documents import DISTILL, DISTILL_DP, changed, pinned, toml
from tests.support.picture_folders import write_pictures
from tests.support.release_site import enrolled_site
from tests.support.site_world import permissive
from tests.support.small_distillation import believe_the_vetting
from tests.support.small_privimage import digest_of
from tests.support.unchanged import opened_once, untouched
from tests.support.vault_records import record

__all__ = ["typed"]  # a fixture
PATIENTS = 30


# -- train


@pytest.fixture(scope="module")
def radiographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small made-up chests: what each shows, and whose it is."""
    folder = tmp_path_factory.mktemp("chests")
    images, labels = chests(240, 0, side=SIDE)
    names = ("none", "atelectasis", "cardiomegaly", "consolidation", "edema", "effusion")
    named = {f"{n:03d}.png": pixels for n, pixels in enumerate(images)}
    shown = {name: names[label] for name, label in zip(named, labels, strict=True)}
    return write_pictures(folder, named, shown, {name: f"p{n // 2}" for n, name in enumerate(named)})


def words(network: str, folder: Path, out: Path, *more: object) -> list[object]:
    return ["train", network, "--pictures", folder / "pictures", "--out", out, "--side", SIDE, "--grey", *more]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_autoencoder_is_trained_once_and_its_digest_is_told_again(
    typed: Typed, radiographs: Path, tmp_path: Path
) -> None:
    order = words("autoencoder", radiographs, tmp_path)
    said = typed(*order, "--steps", 2, "--json")
    file = tmp_path / "autoencoder.safetensors"
    assert (said.status, said.err) == (0, ""), said.err
    told = {"network": "autoencoder", "file": file.name, "pictures": 240, "passed_over": 0, "steps": 2}
    assert said.line == {**told, "sha256": digest(file), "trained": True}
    assert autoencoder_from(file.read_bytes()).shape == (SIDE, SIDE)
    again = typed(*order, "--steps", 2)
    assert "nothing to do: the training is complete" in again.out
    assert digest(file) in again.out.splitlines(), "said again, so that it can be pinned"
    other = typed(*order, "--steps", 3)
    assert (other.status, "another configuration" in other.err) == (1, True), "its rates follow from its length"


def test_features_of_the_perceptual_loss_stand_in_the_autoencoders_file(
    typed: Typed, radiographs: Path, tmp_path: Path
) -> None:
    assert typed(*words("features", radiographs, tmp_path, "--steps", 1)).status == 0
    features = tmp_path / "features.safetensors"
    said = typed(*words("autoencoder", radiographs, tmp_path / "a", "--steps", 1, "--features", features))
    assert said.status == 0, said.err
    raw = (tmp_path / "a" / "autoencoder.safetensors").read_bytes()
    assert unpack(raw, "autoencoder").notes["features_sha256"] == digest(features)


@pytest.mark.parametrize(
    ("network", "more", "told"),
    [
        ("autoencoder", ("--preset", "huge"), "no autoencoder of 16 pixels; --preset is one of: tiny16"),
        ("autoencoder", ("--preset", "small64"), "no autoencoder of 16 pixels"),
        ("autoencoder", ("--features", "gone"), "--features: file not found: gone"),
        ("verifier", ("--identities", "gone.csv"), "gone.csv is not a CSV file"),
        ("verifier", ("--identities", "x", "--autoencoder", "gone"), "--autoencoder: file not found: gone"),
        ("verifier", ("--identities", "x", "--autoencoder", "{folder}/labels.csv"), "file"),
        ("aligner", ("--labels", "gone.csv"), "gone.csv is not a CSV file"),
        ("aligner", ("--labels", "folders"), "are not in a folder"),
        ("aligner", ("--labels", "{folder}/labels.csv", "--templates", "gone.txt"), "gone.txt is not UTF-8 text"),
        ("aligner", ("--labels", "{folder}/labels.csv", "--templates", "{folder}/labels.csv"), "templates"),
        ("aligner", ("--labels", "{folder}/labels.csv", "--identities", "gone.csv"), "gone.csv is not a CSV file"),
    ],
)
def test_an_order_that_cannot_be_done_is_a_sentence(
    typed: Typed, radiographs: Path, tmp_path: Path, network: str, more: tuple[str, ...], told: str
) -> None:
    said = typed(
        *words(network, radiographs, tmp_path, "--steps", 1, *(one.format(folder=radiographs) for one in more))
    )
    assert (said.status, told in said.err) == (1, True), said.err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_second_opinion_is_of_another_seed_and_another_trunk(
    typed: Typed, radiographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[VerificationConfig] = []

    def trained(_images: object, whose: Any, config: VerificationConfig, *_: object) -> None:
        asked.append(config)
        assert len(np.unique(whose)) == 120
        raise TooFewPeopleError("enough seen")

    monkeypatch.setattr(train_distillation, "train_verifier", trained)
    order = words("verifier", radiographs, tmp_path, "--identities", radiographs / "who.csv", "--steps", 7)
    for more in ((), ("--second",)):
        said = typed(*order, *more)
        assert (said.status, "refused: enough seen" in said.err) == (1, True)
    first, second = asked
    assert (first.steps, second.steps) == (7, 7)
    assert first.seed != second.seed
    assert first.architecture != second.architecture


def test_an_autoencoder_gives_the_verifier_near_duplicates_of_its_own_kind(
    typed: Typed, radiographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    whole = verifier_training.near_duplicates

    def watched(through: Any) -> Any:
        make = whole(through)
        return lambda images, dice: seen.append(images) or make(images, dice)

    monkeypatch.setattr(train_distillation, "near_duplicates", watched)
    monkeypatch.setattr(Verifier, "demand", lambda _: None)  # one step teaches nothing
    (file := tmp_path / "autoencoder.safetensors").write_bytes(tiny_autoencoder_file())
    order = words("verifier", radiographs, tmp_path / "v", "--identities", radiographs / "who.csv", "--steps", 1)
    said = typed(*order, "--autoencoder", file, "--json")
    assert said.status == 0, said.err
    assert MADE in said.line["verified"]["caught"]
    assert 120 < sum(map(len, seen)) < 240, "of whom it learns and is judged by, and not of the tail's"
    other = tmp_path / "other.safetensors"
    other.write_bytes(tiny_autoencoder_file(seed=6))
    for more in (("--autoencoder", other), ()):
        again = typed(*order, *more)
        assert (again.status, "another configuration" in again.err) == (1, True), (
            "the run's digest knows whose they are"
        )


def test_a_verifier_that_knows_nobody_is_no_file(typed: Typed, radiographs: Path, tmp_path: Path) -> None:
    order = words("verifier", radiographs, tmp_path, "--identities", radiographs / "who.csv", "--steps", 1)
    said = typed(*order)
    assert (said.status, said.out) == (1, "")
    assert "it must reach an area under the curve above" in said.err
    assert not (tmp_path / "verifier-0.safetensors").exists()


def test_an_aligner_says_what_it_knows_and_what_to_write_into_the_configuration(
    typed: Typed, radiographs: Path, tmp_path: Path
) -> None:
    order = words("aligner", radiographs, tmp_path, "--labels", radiographs / "labels.csv", "--steps", 60)
    said = typed(*order, "--identities", radiographs / "who.csv")
    assert said.status == 0, said.err
    names = '["atelectasis", "cardiomegaly", "consolidation", "edema", "effusion", "none"]'
    assert f"conditions = {names}, templates = {json.dumps(list(TEMPLATES))}" in " ".join(said.out.split())
    aligner = aligner_from((tmp_path / "aligner.safetensors").read_bytes())
    assert json.dumps(list(aligner.conditions.names)) == names
    line = typed(*order, "--identities", radiographs / "who.csv", "--json").line
    assert (line["trained"], line["names"]) == (False, json.loads(names))
    assert line["right"]["low"] > line["chance"]


def test_an_aligner_that_knows_nothing_is_no_file(typed: Typed, radiographs: Path, tmp_path: Path) -> None:
    said = typed(*words("aligner", radiographs, tmp_path, "--labels", radiographs / "labels.csv", "--steps", 1))
    assert (said.status, "an aligner must find the condition of more than" in said.err) == (1, True), said.err
    assert not (tmp_path / "aligner.safetensors").exists()


def test_an_autoencoder_of_other_pictures_is_refused_before_one_is_read(
    typed: Typed, radiographs: Path, tmp_path: Path
) -> None:
    (file := tmp_path / "colour.safetensors").write_bytes(tiny_autoencoder_file(3))
    said = typed(*words("verifier", radiographs, tmp_path, "--identities", "x", "--autoencoder", file))
    assert (said.status, "colour.safetensors is of colour images of 16 pixels" in said.err) == (1, True), said.err


def test_what_the_parser_offers_is_what_there_is() -> None:
    assert set(options.NETWORKS) == set(train_distillation.KINDS)
    assert tuple(PRESETS) == options.AUTOENCODERS


# -- release


@pytest.fixture(params=["strict"])
def ward(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An enrolled site with patients; untrained networks, and a vetting that is taken at its word."""
    believe_the_vetting(monkeypatch)
    if request.param == "permissive":
        monkeypatch.setattr(federation_world, "preset", lambda name: permissive(preset(name)))
    shelve(tmp_path)
    digests = [value for key, value in pinned().items() if key.endswith("_sha256")]
    vouched = [*digests, digest_of(tmp_path / "pictures", SIDE)]
    with enrolled_site(tmp_path, [shot(n) for n in range(PATIENTS)], vouched) as site:
        yield site


level_c = pytest.mark.parametrize("ward", ["permissive"], indirect=True)


def shelve(folder: Path) -> None:
    """Both configurations, and what they name."""
    for part, raw in network_files().items():
        (folder / f"{part}.safetensors").write_bytes(raw)
    images, labels = public_images()
    named = {f"{n:02d}.png": pixels for n, pixels in enumerate(images)}
    write_pictures(folder, named, {name: CONDITIONS.names[label] for name, label in zip(named, labels, strict=True)})
    for name, document in (("distill", DISTILL), ("distill-dp", DISTILL_DP)):
        (folder / f"{name}.toml").write_text(toml({**document, "networks": pinned()}))


def shot(number: int) -> Any:
    """The picture of one patient."""
    pixels, labels = public_images(2 * PATIENTS + 40)
    kept = record(number, number, CONDITIONS.names[labels[number]])
    return replace(kept, pixels=(pixels[number + 40] / 255).astype(np.float32), modality="CR")


def released(typed: Typed, site: Site, folder: Path, *more: object, name: str = "distill") -> Any:
    return typed(*at(site), "release", name, "--config", folder / f"{name}.toml", *more)


def sizes(site: Site) -> int:
    return site.federation.store.state.size


def test_a_policy_that_does_not_admit_level_c_is_heard_before_anything_is_read(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vault, "cohort", lambda *_: pytest.fail("read"))
    said = released(typed, ward, tmp_path, "--sheet", tmp_path / "sheet.html", "--json")
    assert said.status == 1, said.out + said.err
    assert {"level", "provenance"} <= {finding["rule"] for finding in said.line["findings"]}
    assert not (tmp_path / "sheet.html").exists()


@level_c
def test_a_release_of_level_c_goes_to_a_verdict_and_the_sheet_is_written_before_anything_leaves(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet, seen = tmp_path / "sheet.html", []
    leave = pipeline.submit

    def leaves(*told: Any) -> Any:
        seen.append(sheet.exists())
        return leave(*told)

    monkeypatch.setattr(pipeline, "submit", leaves)
    monkeypatch.setattr(release_resumable, "gate", lambda *_: pytest.fail("no noise is claimed"))
    said = released(typed, ward, tmp_path, "--sheet", sheet, "--out", tmp_path / "set.tar")
    assert said.status == 0, said.err + said.out
    assert seen == [True]
    assert stat.S_IMODE(sheet.stat().st_mode) == 0o600
    page = sheet.read_text()
    assert "This page shows images of patients" in page
    assert "FOR THIS SITE ONLY" in page
    assert "default-src 'none'" in page
    assert "<script" not in page
    drawn = [base64.b64decode(found) for found in re.findall(r"base64,([A-Za-z0-9+/=]+)", page)]
    assert len(drawn) > 1
    held = {path: path.read_bytes() for path in ward.federation.home.root.rglob("*") if path.is_file()}
    assert any(path.name == "images.tar" for path in held)
    for path, raw in held.items():
        assert "sheet" not in path.name
        assert b"FOR THIS SITE ONLY" not in raw
        assert not [picture for picture in drawn if picture in raw], f"{path.name} holds a picture of the sheet"
    told = " ".join(said.out.split())
    assert "it shows patients, so it stays at this site; delete it when decided" in told
    assert "admitted at level C" in told
    assert re.search(r"effusion: 4 drawn, 3 kept, 1 too similar to a patient; the student learned 2", told)
    assert "re-identified by the second verifier: 0.00% (0.00% to 1.00%) of what leaves" in told
    assert re.search(r"own images: 6 drawn, 2 too similar to a patient; 4 leave, or stand for the model", told)
    assert re.search(
        r"threshold, verifier: odds of \S+; \S+% to \S+% of samples without a similar patient reach it \(95 %\)", told
    )
    assert "level C: there is no guarantee" in told
    images, labels = unpack_images((tmp_path / "set.tar").read_bytes())
    assert images.shape[1:] == (SIDE, SIDE)
    assert set(labels) <= set(CONDITIONS.names)
    with closing(projects.open_vault(ward.home, "main")) as vault:
        names = {head.person for head in vault.heads()}
    log = (ward.home.root / "agent.log").read_text()
    assert not [name for name in names if name in sheet.read_text() + said.out + said.err + log]


@level_c
def test_as_json_the_review_is_a_line_of_its_own_before_the_verdict(typed: Typed, ward: Site, tmp_path: Path) -> None:
    said = released(typed, ward, tmp_path, "--json")
    assert (said.status, said.err) == (0, "")
    first, last = (json.loads(line) for line in said.out.splitlines())
    assert (last["mechanism"], last["level"], last["admitted"]) == ("distill", "C", True)
    review = first["review"]
    assert first["mechanism"] == "distill"
    assert [one["name"] for one in review["conditions"]] == list(CONDITIONS.names)
    for one in review["conditions"]:
        assert one["drawn"] == one["kept"] + sum(one["dropped"].values()) == 4
    assert review["reidentified"]["after"] == {"value": 0.0, "low": 0.0, "high": 0.01}
    assert review["power"]["caught"]["low"] == review["power"]["unseen"]["low"] == 0.95
    left = review["leaving"]
    assert left["drawn"] - sum(left["dropped"].values()) == left["kept"] == left["left"] == 4
    assert review["intervals"].keys() == {"verifier", "unseen"}
    assert all(0.0 <= low <= high <= 1.0 for low, high in review["intervals"].values())
    assert review["thresholds"].keys() == {"verifier", "unseen", "copy", "patch", "moved"}


@level_c
def test_a_sheet_that_cannot_be_written_lets_nothing_leave_and_the_same_order_goes_on(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(distillation_review, "write", full)
        patch.setattr(pipeline, "submit", lambda *_: pytest.fail("left"))
        said = released(typed, ward, tmp_path, "--sheet", tmp_path / "sheet.html")
    assert said.status == 1
    assert "sheet.html: No space left on device: nothing has left" in " ".join(said.err.split())
    grants = list(ward.federation.store.state.grants)
    said = released(typed, ward, tmp_path, "--sheet", tmp_path / "sheet.html")
    assert (said.status, "go on where it was interrupted" in said.out) == (0, True), said.err
    assert list(ward.federation.store.state.grants) == grants, "under the grant that it had"


def test_a_sheet_is_never_written_over_and_needs_a_folder(typed: Typed, ward: Site, tmp_path: Path) -> None:
    before = sizes(ward)
    (tmp_path / "old.html").write_text("old")
    for place in (tmp_path / "old.html", tmp_path / "gone" / "sheet.html"):
        said = released(typed, ward, tmp_path, "--sheet", place)
        assert (said.status, "name a new file for the sheet" in said.err) == (1, True)
    said = released(typed, ward, tmp_path, "--sheet", tmp_path / "x", "--out", tmp_path / "x")
    assert "--sheet and --out are the same file" in said.err
    assert ((tmp_path / "old.html").read_text(), sizes(ward)) == ("old", before)


@level_c
def test_a_model_leaves_as_weights_and_never_in_the_form_of_pictures(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    before = sizes(ward)
    document = {**changed(DISTILL, output={"release": "model"}), "networks": pinned()}
    (tmp_path / "distill.toml").write_text(toml(document))
    said = released(typed, ward, tmp_path, "--form", "dicom")
    assert (said.status, "--form is for images" in said.err, sizes(ward)) == (1, True, before)
    blank = tmp_path / "blank.safetensors"
    said = released(typed, ward, tmp_path, "--blank", blank)
    assert (said.status, sizes(ward)) == (0, before), said.err
    approve_architecture(ward.federation.home, "student", architecture_of(blank))
    said = released(typed, ward, tmp_path, "--out", tmp_path / "model")
    assert said.status == 0, said.err + said.out
    assert unpack((tmp_path / "model").read_bytes(), MODEL).kind == MODEL
    assert "name a new file" in released(typed, ward, tmp_path, "--blank", blank).err
    (tmp_path / "distill.toml").write_text(toml({**DISTILL, "networks": pinned()}))
    assert "--blank is for a model" in released(typed, ward, tmp_path, "--blank", tmp_path / "b").err


@level_c
def test_a_dry_run_weighs_pictures_or_the_model_and_touches_nothing(typed: Typed, ward: Site, tmp_path: Path) -> None:
    opened_once(ward)
    with untouched(ward):
        said = released(typed, ward, tmp_path, "--dry-run", "--json")
        assert (said.status, said.line["would_go"], said.line["samples"]["exact"]) == (0, True, True), said.err
        (tmp_path / "distill.toml").write_text(
            toml({**changed(DISTILL, output={"release": "model"}), "networks": pinned()})
        )
        said = released(typed, ward, tmp_path, "--dry-run")
    assert (said.status, "number  one model" in said.out, "level C" in said.out) == (0, True, True), said.err


@level_c
def test_a_model_that_no_artifact_may_hold_is_refused_before_the_price(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    policy = ward.home.root / "policy.toml"
    policy.write_text(re.sub(r"max_artifact_bytes = \d+", "max_artifact_bytes = 10000", policy.read_text()))
    before = sizes(ward)
    document = {**changed(DISTILL, output={"release": "model"}), "networks": pinned()}
    (tmp_path / "distill.toml").write_text(toml(document))
    said = released(typed, ward, tmp_path)
    assert (said.status, "a smaller preset" in said.err, sizes(ward)) == (1, True, before), said.err
    (tmp_path / "distill.toml").write_text(toml({**changed(DISTILL, output={"pictures": 900}), "networks": pinned()}))
    said = released(typed, ward, tmp_path)
    assert (said.status, "write so many into [output] pictures" in said.err) == (1, True), said.err


def test_a_noisy_teacher_is_audited_priced_and_shown_beside_public_pictures_alone(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(release_resumable, "gate", lambda *told: asked.append(told))
    sheet = tmp_path / "sheet.html"
    said = released(typed, ward, tmp_path, "--sheet", sheet, name="distill-dp")
    assert said.status == 0, said.err + said.out
    assert [told[2] for told in asked] == ["cpu"]
    assert "admitted at level A" in said.out
    assert re.search(r"epsilon \S+ by loss distributions; the ledger charges", said.out)
    assert "No patient is on this page" in sheet.read_text()
    assert "nearest public image" in sheet.read_text()


def test_an_exchanged_network_or_the_other_forms_configuration_prices_nothing(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    before = sizes(ward)
    said = typed(*at(ward), "release", "distill-dp", "--config", tmp_path / "distill.toml")
    assert (said.status, "mechanism: must be distill-dp" in said.err) == (1, True)
    (tmp_path / "verifier.safetensors").write_bytes(network_files()["unseen"])
    said = released(typed, ward, tmp_path)
    assert (said.status, "verifier.safetensors is not the pinned verifier" in said.err) == (1, True)
    assert sizes(ward) == before
