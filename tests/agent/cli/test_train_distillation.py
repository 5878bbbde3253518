"""Networks of a distillation and its release as they are typed, at a site with a coordinator that listens."""

from __future__ import annotations

import csv
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
from PIL import Image

from agent import distill_commands, pipeline, private_commands, synthesis_parser
from agent.edges import projects
from agent.edges.vault import Vault
from agent.nets.alignment import aligner_from
from agent.nets.autoencoder import PRESETS, autoencoder_from
from agent.nets.conditions import TEMPLATES
from agent.nets.latent_diffusion import KIND as MODEL
from agent.nets.siamese import Share
from agent.nets.verifier import MADE, Verifier
from agent.nets.weights import unpack
from agent.stages import distil
from agent.stages.plant import SINGLE
from agent.stages.vet import Power, Vetted
from agent.training import near
from agent.training.recognition import TooFewPeople
from agent.training.verification import VerificationConfig
from coordinator.edges.architectures import approve_architecture, architecture_of
from policies.policy import preset
from protos.artifact import unpack_images
from tests.agent.edges.test_edges_distill import PRIVATE, SMALL, pinned
from tests.agent.edges.test_synthesis import changed, toml
from tests.agent.edges.test_vault import record
from tests.agent.test_synthesis_commands import Typed, at, typed
from tests.support import federation
from tests.support.aligners import chests
from tests.support.distilling import CONDITIONS, SIDE, network_files, public_pictures
from tests.support.federation import Federation, Site
from tests.support.latents import tiny_autoencoder_file
from tests.support.private import digest_of
from tests.support.untouched import opened_once, untouched

__all__ = ["typed"]  # a fixture
PATIENTS = 30


# -- train


@pytest.fixture(scope="module")
def radiographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small made-up chests: what each shows, and whose it is."""
    folder = tmp_path_factory.mktemp("chests")
    images, labels = chests(240, 0, side=SIDE)
    names = ("none", "atelectasis", "cardiomegaly", "consolidation", "edema", "effusion")
    (folder / "pictures").mkdir()
    for column, values in (
        ("label", [names[label] for label in labels]),
        ("identity", [f"p{n // 2}" for n in range(240)]),
    ):
        with (folder / f"{column}.csv").open("w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(("file", column))
            rows.writerows((f"{n:03d}.png", value) for n, value in enumerate(values))
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(folder / "pictures" / f"{number:03d}.png")
    return folder


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
    assert "nothing left to do" in again.out
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
        ("autoencoder", ("--features", "gone"), "--features: there is no such file: gone"),
        ("verifier", ("--identities", "gone.csv"), "gone.csv cannot be read"),
        ("verifier", ("--identities", "x", "--autoencoder", "gone"), "--autoencoder: there is no such file: gone"),
        ("verifier", ("--identities", "x", "--autoencoder", "{folder}/label.csv"), "file"),
        ("aligner", ("--labels", "gone.csv"), "gone.csv cannot be read"),
        ("aligner", ("--labels", "folders"), "lie in no folder"),
        ("aligner", ("--labels", "{folder}/label.csv", "--templates", "gone.txt"), "gone.txt cannot be read"),
        ("aligner", ("--labels", "{folder}/label.csv", "--templates", "{folder}/label.csv"), "templates"),
        ("aligner", ("--labels", "{folder}/label.csv", "--identities", "gone.csv"), "gone.csv cannot be read"),
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
        raise TooFewPeople("enough seen")

    monkeypatch.setattr(distill_commands, "train_verifier", trained)
    order = words("verifier", radiographs, tmp_path, "--identities", radiographs / "identity.csv", "--steps", 7)
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
    whole = near.near_duplicates

    def watched(through: Any) -> Any:
        make = whole(through)
        return lambda images, dice: seen.append(images) or make(images, dice)

    monkeypatch.setattr(distill_commands, "near_duplicates", watched)
    monkeypatch.setattr(Verifier, "demand", lambda _: None)  # one step teaches nothing
    (file := tmp_path / "autoencoder.safetensors").write_bytes(tiny_autoencoder_file())
    order = words("verifier", radiographs, tmp_path / "v", "--identities", radiographs / "identity.csv", "--steps", 1)
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
    order = words("verifier", radiographs, tmp_path, "--identities", radiographs / "identity.csv", "--steps", 1)
    said = typed(*order)
    assert (said.status, said.out) == (1, "")
    assert "a verifier must reach an area under the curve above" in said.err
    assert not (tmp_path / "verifier-0.safetensors").exists()


def test_an_aligner_says_what_it_knows_and_what_to_write_into_the_configuration(
    typed: Typed, radiographs: Path, tmp_path: Path
) -> None:
    order = words("aligner", radiographs, tmp_path, "--labels", radiographs / "label.csv", "--steps", 60)
    said = typed(*order, "--identities", radiographs / "identity.csv")
    assert said.status == 0, said.err
    names = '["atelectasis", "cardiomegaly", "consolidation", "edema", "effusion", "none"]'
    assert f"conditions = {names}, templates = {json.dumps(list(TEMPLATES))}" in " ".join(said.out.split())
    aligner = aligner_from((tmp_path / "aligner.safetensors").read_bytes())
    assert json.dumps(list(aligner.conditions.names)) == names
    line = typed(*order, "--identities", radiographs / "identity.csv", "--json").line
    assert (line["trained"], line["names"]) == (False, json.loads(names))
    assert line["right"]["low"] > line["chance"]


def test_an_aligner_that_knows_nothing_is_no_file(typed: Typed, radiographs: Path, tmp_path: Path) -> None:
    said = typed(*words("aligner", radiographs, tmp_path, "--labels", radiographs / "label.csv", "--steps", 1))
    assert (said.status, "an aligner must find the condition of more than" in said.err) == (1, True), said.err
    assert not (tmp_path / "aligner.safetensors").exists()


def test_an_autoencoder_of_other_pictures_is_refused_before_one_is_read(
    typed: Typed, radiographs: Path, tmp_path: Path
) -> None:
    (file := tmp_path / "colour.safetensors").write_bytes(tiny_autoencoder_file(3))
    said = typed(*words("verifier", radiographs, tmp_path, "--identities", "x", "--autoencoder", file))
    assert (said.status, "colour.safetensors is of colour pictures of 16 pixels" in said.err) == (1, True), said.err


def test_what_the_parser_offers_is_what_there_is() -> None:
    assert set(synthesis_parser.DISTILLING) == set(distill_commands.KINDS)
    assert tuple(PRESETS) == synthesis_parser.AUTOENCODERS


# -- release


def permissive(text: str) -> str:
    """A policy that admits level C, and what is of no public origin."""
    for key, value in (("levels", '["A", "B", "C"]'), ("components", '["public", "private"]')):
        text, found = re.subn(rf"^{key} = [^\n#]*", f"{key} = {value} ", text, flags=re.MULTILINE)
        assert found == 1
    return text


@pytest.fixture(params=["strict"])
def ward(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An enrolled site with patients; untrained networks, and a vetting that is taken at its word."""
    good = Share(0.99, 0.95, 1.0)
    monkeypatch.setattr(distil, "power", lambda *_: Power(good, good, good, dict.fromkeys(SINGLE, good), None))
    monkeypatch.setattr(distil, "measured", lambda *_: Share(0.0, 0.0, 0.01))
    monkeypatch.setattr(distil, "vet", every_fourth_dropped)
    if request.param == "permissive":
        monkeypatch.setattr(federation, "preset", lambda name: permissive(preset(name)))
    shelve(tmp_path)
    with Federation(tmp_path) as joined:
        site = joined.join("site-a")
        with closing(projects.open_vault(site.home, "main")) as vault:
            vault.keep_all([shot(n) for n in range(PATIENTS)])
        digests = [value for key, value in pinned().items() if key.endswith("_sha256")]
        settings = site.home.root / "site.toml"
        vouched = json.dumps([*digests, digest_of(tmp_path / "pictures", SIDE)])
        settings.write_text(settings.read_text().replace("public_components = []", f"public_components = {vouched}"))
        yield site


level_c = pytest.mark.parametrize("ward", ["permissive"], indirect=True)


def every_fourth_dropped(images: np.ndarray[Any, Any], *_: object) -> Vetted:
    """What an untrained verifier says is no use to a test of what is done with it."""
    n = len(images)
    reasons = tuple("" if number % 4 else "verifier" for number in range(n))
    return Vetted(np.linspace(-5.0, 5.0, n), np.zeros(n, np.int64), reasons)


def shelve(folder: Path) -> None:
    """Both configurations, and what they name."""
    for part, raw in network_files().items():
        (folder / f"{part}.safetensors").write_bytes(raw)
    (folder / "pictures").mkdir()
    rows = [("file", "label")]
    for number, (pixels, label) in enumerate(zip(*public_pictures(), strict=True)):
        Image.fromarray(pixels).save(folder / "pictures" / f"{number:02d}.png")
        rows.append((f"{number:02d}.png", CONDITIONS.names[label]))
    with (folder / "labels.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    for name, document in (("distill", SMALL), ("distill-dp", PRIVATE)):
        (folder / f"{name}.toml").write_text(toml({**document, "networks": pinned()}))


def shot(number: int) -> Any:
    """The picture of one patient."""
    pixels, labels = public_pictures(2 * PATIENTS + 40)
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
    leave = pipeline.leave

    def leaves(*told: Any) -> Any:
        seen.append(sheet.exists())
        return leave(*told)

    monkeypatch.setattr(pipeline, "leave", leaves)
    monkeypatch.setattr(private_commands, "gate", lambda *_: pytest.fail("no noise is claimed"))
    said = released(typed, ward, tmp_path, "--sheet", sheet, "--out", tmp_path / "set.tar")
    assert said.status == 0, said.err + said.out
    assert seen == [True]
    assert stat.S_IMODE(sheet.stat().st_mode) == 0o600
    assert "This page shows pictures of patients" in sheet.read_text()
    told = " ".join(said.out.split())
    assert "it shows patients, so it stays at this site; delete it when decided" in told
    assert "admitted at level C" in told
    assert re.search(r"effusion: 4 drawn, 3 kept, 1 too like somebody; the student learned 2", told)
    assert "re-identified by the second verifier: 0.00% (0.00% to 1.00%) of what leaves" in told
    assert re.search(r"own pictures: 6 drawn, 2 too like somebody; 4 leave, or stand for the model", told)
    assert re.search(r"threshold, verifier: odds of \S+; \S+% to \S+% of samples like nobody reach it \(95 %\)", told)
    assert "level C: nothing is promised" in told
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
        patch.setattr(distill_commands, "write", full)
        patch.setattr(pipeline, "leave", lambda *_: pytest.fail("left"))
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
    assert "--sheet and --out name one file" in said.err
    assert ((tmp_path / "old.html").read_text(), sizes(ward)) == ("old", before)


@level_c
def test_a_model_leaves_as_weights_and_never_in_the_form_of_pictures(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    before = sizes(ward)
    document = {**changed(SMALL, output={"release": "model"}), "networks": pinned()}
    (tmp_path / "distill.toml").write_text(toml(document))
    said = released(typed, ward, tmp_path, "--form", "dicom")
    assert (said.status, "--form is of pictures" in said.err, sizes(ward)) == (1, True, before)
    blank = tmp_path / "blank.safetensors"
    said = released(typed, ward, tmp_path, "--blank", blank)
    assert (said.status, sizes(ward)) == (0, before), said.err
    approve_architecture(ward.federation.home, "student", architecture_of(blank))
    said = released(typed, ward, tmp_path, "--out", tmp_path / "model")
    assert said.status == 0, said.err + said.out
    assert unpack((tmp_path / "model").read_bytes(), MODEL).kind == MODEL
    assert "name a new file" in released(typed, ward, tmp_path, "--blank", blank).err
    (tmp_path / "distill.toml").write_text(toml({**SMALL, "networks": pinned()}))
    assert "--blank is of a model" in released(typed, ward, tmp_path, "--blank", tmp_path / "b").err


@level_c
def test_a_dry_run_weighs_pictures_or_the_model_and_touches_nothing(typed: Typed, ward: Site, tmp_path: Path) -> None:
    opened_once(ward)
    with untouched(ward):
        said = released(typed, ward, tmp_path, "--dry-run", "--json")
        assert (said.status, said.line["would_go"], said.line["samples"]["exact"]) == (0, True, True), said.err
        (tmp_path / "distill.toml").write_text(
            toml({**changed(SMALL, output={"release": "model"}), "networks": pinned()})
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
    document = {**changed(SMALL, output={"release": "model"}), "networks": pinned()}
    (tmp_path / "distill.toml").write_text(toml(document))
    said = released(typed, ward, tmp_path)
    assert (said.status, "a smaller preset" in said.err, sizes(ward)) == (1, True, before), said.err
    (tmp_path / "distill.toml").write_text(toml({**changed(SMALL, output={"pictures": 900}), "networks": pinned()}))
    said = released(typed, ward, tmp_path)
    assert (said.status, "write so many into [output] pictures" in said.err) == (1, True), said.err


def test_a_noisy_teacher_is_audited_priced_and_shown_beside_public_pictures_alone(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(private_commands, "gate", lambda *told: asked.append(told))
    sheet = tmp_path / "sheet.html"
    said = released(typed, ward, tmp_path, "--sheet", sheet, name="distill-dp")
    assert said.status == 0, said.err + said.out
    assert [told[2] for told in asked] == ["cpu"]
    assert "admitted at level A" in said.out
    assert re.search(r"epsilon \S+ by loss distributions; the ledger charges", said.out)
    assert "No patient is on this page" in sheet.read_text()
    assert "nearest public picture" in sheet.read_text()


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
