"""Private releases and their evaluation as they are typed, at an enrolled site, with a coordinator that listens."""

from __future__ import annotations

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

from agent.cli import evaluate as evaluate_command
from agent.cli import release, release_resumable, rounds, serve
from agent.deidentify.record import Record
from agent.dp import dpsgd
from agent.dp.noise import SystemEntropy
from agent.evaluation.released_set import Effort
from agent.evaluation.utility import Recipe
from agent.mechanisms.privimage import config as privimage
from agent.mechanisms.privimage import mechanism
from agent.models.features.extractors import RandomFeatures
from agent.models.semantics.training import cluster_semantics
from agent.privacy_audit.gate import NoiseAuditError
from agent.release.held_out_evaluation import look
from agent.reports import evaluation
from agent.storage import projects
from agent.storage.vault import Vault
from protos.artifacts.arrays import unpack_images
from protos.artifacts.shards import Png, plain_bytes
from protos.encryption import hpke
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Site
from tests.support.mechanism_documents import CENTROIDS, centroids_codebook, changed, sha, toml
from tests.support.networks import files
from tests.support.picture_folders import write_pictures
from tests.support.release_site import enrolled_site, vouch_for
from tests.support.small_privimage import SMALLEST, digest_of, public
from tests.support.unchanged import opened_once, untouched
from tests.support.vault_records import record

__all__ = ["typed"]  # a fixture
PATIENTS = 200
SMALL: dict[str, Any] = {
    "mechanism": "privimage",
    "classes": ["dark", "bright"],
    "cohort": {"modality": "OT", "split": "study", "parts": ["release:3", "held-out:1"], "part": "release"},
    "privacy": {"noise_multiplier": 4.0, "steps": 6, "sampling_rate": 0.25, "public_patients": 200, "clip": 0.01},
    "semantics": {"file": "semantics.safetensors", "keep": 1, "noise": 1.5},
    "public": {"pictures": "pictures"},
    "model": {"preset": "smallest", "pretraining_steps": 3, "draws": 1, "pretrain_batch": 8, "sampling_steps": 2},
    "synthetic": {"pictures": 20},
}


def shot(number: int, side: int = 8) -> Record:
    """The picture of one patient: dark noise or bright, as the public ones are."""
    pixels = np.random.default_rng(number).integers(0, 90, (8, 8)) + 160 * (number % 2)
    grown = np.kron(pixels, np.ones((side // 8, side // 8))) / 255
    kept = record(number, number, ("dark", "bright")[number % 2])
    return replace(kept, pixels=grown.astype(np.float32))


@pytest.fixture
def ward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An enrolled site with patients and, beside it, the smallest configuration that there is."""
    monkeypatch.setattr(privimage.diffusion, "PRESETS", {"smallest": SMALLEST})
    raw = cluster_semantics(RandomFeatures(1, 8, 2), public(), 3).file
    (tmp_path / "semantics.safetensors").write_bytes(raw)
    write_pictures(tmp_path, {f"{n:02d}.png": pixels for n, pixels in enumerate(public())})
    (tmp_path / "privimage.toml").write_text(toml(SMALL))
    digests = sha(raw), digest_of(tmp_path / "pictures")
    with enrolled_site(tmp_path, [shot(n) for n in range(PATIENTS)], digests) as site:
        yield site


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit of the noise, which has its own tests, is taken as passed."""
    monkeypatch.setattr(release_resumable, "gate", lambda *_: None)


def released(typed: Typed, site: Site, folder: Path, *more: object) -> Any:
    return typed(*at(site), "release", "privimage", "--config", folder / "privimage.toml", *more)


def sizes(site: Site) -> int:
    return site.federation.store.state.size


def test_a_release_goes_from_the_audit_to_a_verdict_and_says_both_epsilons(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(release_resumable, "gate", lambda *told: asked.append(told))
    said = released(typed, ward, tmp_path, "--out", tmp_path / "set.tar")
    assert said.status == 0, said.err
    assert [(type(told[0]), told[2]) for told in asked] == [(SystemEntropy, "cpu")], "the noise of the release itself"
    order = [line.split()[0] for line in said.out.splitlines()]
    assert order.index("audit") < order.index("read") < order.index("make") < order.index("leave")
    assert "admitted at level A" in said.out
    told = re.search(r"epsilon (\S+) at delta \S+ per patient, as the ledger has it; the same .*: (\S+)", said.out)
    assert told, said.out
    spent = ward.federation.store.state.accounts["site-a/rdp"].spent
    assert spent > 0
    assert 0 < float(told[2]) <= float(told[1])
    images, labels = unpack_images((tmp_path / "set.tar").read_bytes())
    assert (images.shape, sorted(set(labels))) == ((20, 8, 8), ["bright", "dark"])
    kept = [path for path in ward.federation.home.releases.rglob("*") if path.is_file()]
    assert (tmp_path / "set.tar").read_bytes() in [path.read_bytes() for path in kept], "as the coordinator has it"
    again = released(typed, ward, tmp_path, "--out", tmp_path / "set.tar")
    assert (again.status, "name a new file" in again.err) == (1, True)


@pytest.mark.usefixtures("sound")
def test_as_json_a_release_is_one_line_with_everything_that_is_said(typed: Typed, ward: Site, tmp_path: Path) -> None:
    said = released(typed, ward, tmp_path, "--json")
    assert (said.status, said.err) == (0, "")
    keys = {"release", "mechanism", "admitted", "level", "epsilon", "delta", "unit", "epsilon_by_loss_distributions"}
    assert said.line.keys() == {*keys, "findings"}
    assert (said.line["mechanism"], said.line["level"], said.line["unit"]) == ("privimage", "A", "patient")
    assert 0 < said.line["epsilon_by_loss_distributions"] <= said.line["epsilon"]


def test_a_dry_run_says_price_number_and_bytes_without_an_audit_and_touches_nothing(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_resumable, "gate", lambda *_: pytest.fail("audited"))
    monkeypatch.setattr(Vault, "cohort", lambda *_: pytest.fail("read"))
    opened_once(ward)
    with untouched(ward):
        said = released(typed, ward, tmp_path, "--dry-run")
        line = released(typed, ward, tmp_path, "--dry-run", "--json").line
    assert said.status == 0, said.err
    assert re.search(r"price  epsilon \S+ by loss distributions; the ledger charges \S+", said.out)
    assert "number  20 images of 8 x 8\n" in said.out
    assert (line["samples"]["most"], line["samples"]["exact"], line["would_go"]) == (20, True, True)
    assert line["bytes"]["most"] == plain_bytes(20, (8, 8), Png())


def test_on_a_machine_whose_noise_is_not_the_claimed_one_nothing_is_priced_or_given_up(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: the gate stands before the price."""

    def fails(*_: object) -> None:
        raise NoiseAuditError("the noise is not the claimed one: nothing was priced")

    monkeypatch.setattr(release_resumable, "gate", fails)
    monkeypatch.setattr(release_resumable, "give_up_earlier", lambda *_: pytest.fail("given up"))
    monkeypatch.setattr(Vault, "cohort", lambda *_: pytest.fail("read"))
    before = sizes(ward)
    for more in ((), ("--anew",), ("--out", tmp_path / "set.tar")):
        said = released(typed, ward, tmp_path, *more)
        assert (said.status, "refused: the noise is not the claimed one" in said.err) == (1, True)
    assert sizes(ward) == before
    assert not (tmp_path / "set.tar").exists()


def test_on_a_machine_whose_noise_is_not_the_claimed_one_no_part_is_taken_in_rounds(
    typed: Typed, ward: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: the gate stands before the first round, and so before the reservation of a run."""
    honest = dpsgd.deviation
    monkeypatch.setattr(dpsgd, "deviation", lambda *told: 0.5 * honest(*told))  # of masked parts alone
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve.flower_environment, "configure_environment", lambda *_: None)
    for later in ("sync_with_coordinator", "close_open_grants", "Participant", "run_service"):
        monkeypatch.setattr(rounds, later, lambda *_: pytest.fail("went on"))
    before = sizes(ward)
    said = typed(*at(ward), "serve", "--modality", "OT")
    assert said.status == 1
    told = " ".join(said.err.split())
    assert 'refused: in two runs it is not so that "the noise has the claimed size, of a masked part"' in told
    assert sizes(ward) == before


@pytest.mark.usefixtures("sound")
def test_what_was_interrupted_goes_on_as_it_was_typed_or_is_given_up_with_anew(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mechanism, "train_privately", gone)
        with pytest.raises(KeyboardInterrupt):
            released(typed, ward, tmp_path)
    (tmp_path / "other.toml").write_text(toml(changed(SMALL, synthetic={"pictures": 21})))
    other = ("release", "privimage", "--config", tmp_path / "other.toml")
    said = typed(*at(ward), *other)
    assert said.status == 1
    assert "finish it with these, or discard it with --anew; its budget stays spent" in said.err
    grants = list(ward.federation.store.state.grants)
    said = released(typed, ward, tmp_path)
    assert (said.status, "go on where it was interrupted" in said.out) == (0, True), said.err
    assert list(ward.federation.store.state.grants) == grants, "under the grant that it had"
    with monkeypatch.context() as patch:
        patch.setattr(mechanism, "train_privately", gone)
        with pytest.raises(KeyboardInterrupt):
            released(typed, ward, tmp_path)
    said = typed(*at(ward), *other, "--anew")
    assert (said.status, "from the start" in said.out) == (0, True), said.err + said.out
    assert len(ward.federation.store.state.grants) == len(grants) + 2


@pytest.mark.usefixtures("sound")
def test_a_wrong_configuration_or_a_query_function_of_nobodys_word_prices_nothing(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    before = sizes(ward)
    (tmp_path / "privimage.toml").write_text(toml(changed(SMALL, semantics={"noise": 90.0})))
    said = released(typed, ward, tmp_path)
    assert (said.status, "would drown" in said.err) == (1, True)
    (tmp_path / "privimage.toml").write_text(toml(changed(SMALL, semantics={"file": "gone"})))
    assert "gone: No such file" in released(typed, ward, tmp_path).err
    assert sizes(ward) == before
    vouch_for(ward)
    (tmp_path / "privimage.toml").write_text(toml(SMALL))
    said = released(typed, ward, tmp_path, "--json")
    assert (said.status, said.line["admitted"], said.line["findings"][0]["rule"]) == (1, False, "provenance")


def tightened(site: Site, key: str, value: str) -> None:
    path = site.home.root / "policy.toml"
    text, found = re.subn(rf"^{key} = .*$", f"{key} = {value}", path.read_text(), flags=re.MULTILINE)
    assert found == 1
    path.write_text(text)


def test_more_pictures_than_an_artifact_may_hold_are_refused_before_the_audit_and_the_price(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sizes(ward)
    tightened(ward, "max_artifact_bytes", "40960")
    with monkeypatch.context() as patch:
        patch.setattr(release_resumable, "gate", lambda *_: pytest.fail("audited"))
        patch.setattr(Vault, "cohort", lambda *_: pytest.fail("read"))
        told = "20 images of this size may take more than the policy's max_artifact_bytes, 40960: {} would fit"
        for more, fitting in (((), 19), (("--form", "dicom"), 15)):
            said = released(typed, ward, tmp_path, *more)
            assert (said.status, told.format(fitting) in said.err) == (1, True), said.err
        (tmp_path / "privimage.toml").write_text(toml(changed(SMALL, classes=["dark", "hell und schön"])))
        said = released(typed, ward, tmp_path)
        assert (said.status, "classes: a label of the set is at most 32 plain characters" in said.err) == (1, True)
    assert sizes(ward) == before
    monkeypatch.setattr(release_resumable, "gate", lambda *_: None)
    (tmp_path / "privimage.toml").write_text(toml(changed(SMALL, synthetic={"pictures": 19})))
    said = released(typed, ward, tmp_path, "--out", tmp_path / "set.tar")
    assert (said.status, (tmp_path / "set.tar").stat().st_size) == (0, 40960), said.err


def test_a_reader_whom_the_policy_does_not_name_is_refused_before_the_audit_and_the_price(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_resumable, "gate", lambda *_: pytest.fail("audited"))
    before, name = sizes(ward), hpke.write_reader(tmp_path, "reader")
    said = released(typed, ward, tmp_path, "--reader", tmp_path / "reader.pub")
    assert (said.status, "policy.toml does not name this recipient" in said.err) == (1, True), said.err
    assert (sizes(ward), len(name)) == (before, 64)


@pytest.mark.usefixtures("sound")
def test_what_the_ledger_will_charge_is_said_before_anything_is_spent(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    said = released(typed, ward, tmp_path)
    opened = ward.federation.store.state.accounts["site-a/rdp"].opened
    first = re.search(
        r" price  epsilon (\S+) by loss distributions; the ledger charges (\S+) \(order (\d+)\)", said.out
    )
    last = re.search(r"epsilon (\S+) at delta \S+ per patient, as the ledger has it; the same .*: (\S+)", said.out)
    assert first, said.out
    assert last, said.out
    assert int(first[3]) == opened.order
    assert float(first[2]) == pytest.approx(float(last[1]), rel=5e-3), "what it says at the end"
    assert float(first[1]) == pytest.approx(float(last[2]), rel=5e-3)
    assert said.out.index("the ledger charges") < said.out.index(" audit  ") < said.out.index(" read  ")


@pytest.mark.usefixtures("sound")
def test_centroids_are_released_as_well(typed: Typed, ward: Site, tmp_path: Path) -> None:
    named = dict(zip(("generator", "encoder", "codebook"), (*files(), centroids_codebook()), strict=True))
    for name, raw in named.items():
        (tmp_path / f"{name}.safetensors").write_bytes(raw)
    vouch_for(ward, *map(sha, named.values()))
    text = CENTROIDS.replace('"OP"', '"CT"').replace("count_noise = 7", "count_noise = 2")
    text = text.replace("noise_multiplier = 4.5", "noise_multiplier = 2.5")
    text = text.replace('["0", "1", "2"]', '["dark", "bright"]') + "k = 2\nmargin = 0\n"
    (tmp_path / "centroids.toml").write_text(text)
    with closing(projects.open_vault(ward.home, "main")) as vault:
        vault.keep_all([replace(shot(300 + n, 32), modality="CT") for n in range(30)])
    order = [*at(ward), "release", "centroids", "--config", tmp_path / "centroids.toml"]
    order += ["--out", tmp_path / "set.tar"]
    written = (ward.home.root / "policy.toml").read_text()
    tightened(ward, "max_artifact_bytes", "10240")
    before, refused = sizes(ward), typed(*order, "--form", "dicom")
    assert "3 images of this size may take more than the policy's max_artifact_bytes, 10240" in refused.err
    assert "2 would fit; take a codebook of so many cells" in refused.err
    assert (refused.status, sizes(ward)) == (1, before)
    (ward.home.root / "policy.toml").write_text(written)
    said = typed(*order)
    assert said.status == 0, said.err
    assert "admitted at level A" in said.out
    assert "as the ledger has it; the same claim by loss distributions" in said.out
    images, labels = unpack_images((tmp_path / "set.tar").read_bytes())
    assert images.shape[1:] == (32, 32)
    assert set(labels) <= {"dark", "bright"}


# -- evaluate


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(Recipe(epochs=2, side=8, width=4), (0,), 20)
    monkeypatch.setattr(evaluate_command, "look", lambda *told: look(*told, effort))


def judged(site: Site, folder: Path, *more: object, part: str = "held-out", config: str = "privimage") -> list[Any]:
    words = [*at(site), "evaluate", "--config", folder / f"{config}.toml", "--set", folder / "set.tar"]
    return [*words, "--part", part, "--out", folder / "page.html", *more]


@pytest.mark.usefixtures("sound", "quick")
def test_a_set_is_judged_by_held_out_patients_on_a_page_for_this_site(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    assert released(typed, ward, tmp_path, "--out", tmp_path / "set.tar").status == 0
    before, page = sizes(ward), tmp_path / "page.html"
    said = typed(*judged(ward, tmp_path))
    assert said.status == 0, said.err
    assert " ".join(said.out.split()).count(evaluation.WARNING) == 1
    assert "the held-out patients of this modality have been evaluated 1 time(s)" in said.out
    assert [line for line in said.out.splitlines() if line.startswith("  look")], "progress"
    assert not re.search(r"\d\.\d", said.out), "no figure is printed: it stands on the page"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    raw = page.read_text()
    assert "Accuracy" in raw
    assert "Fréchet distance" in raw
    assert "part held-out" in raw
    with closing(projects.open_vault(ward.home, "main")) as vault:
        names = {head.person for head in vault.heads()}
    log = (ward.home.root / "agent.log").read_text()
    assert not [name for name in names if name in raw + said.out + said.err + log]
    (event,) = [line for line in map(json.loads, log.splitlines()) if line["event"] == "evaluated"]
    assert event.keys() == {"event", "level", "timestamp", "mechanism", "count"}
    assert sizes(ward) == before, "nothing is priced, and nobody outside hears of it"
    again = typed(*judged(ward, tmp_path))
    assert (again.status, "name a new file" in again.err, page.read_text()) == (1, True, raw)
    page.unlink()
    said = typed(*judged(ward, tmp_path, "--json"))
    told = {"page": "page.html", "part": "held-out", "looks": 2, "missing": {}}
    assert said.line == {**told, "measured": ["utility", "fidelity", "semantics"]}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_is_said_in_one_sentence(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(evaluate_command, "read_images", fails)
    (tmp_path / "set.tar").write_bytes(b"")
    said = typed(*judged(ward, tmp_path))
    told = "refused: memory ran out: free some or take smaller batches, and give the same command again\n"
    assert (said.status, said.err) == (1, told)


@pytest.mark.usefixtures("quick")
def test_patients_who_may_have_been_trained_on_are_not_looked_at(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vault, "cohort", lambda *_: pytest.fail("read"))
    (tmp_path / "whole.toml").write_text(toml(changed(SMALL, cohort={"split": None, "parts": None, "part": None})))
    (tmp_path / "ksalsa.toml").write_text('mechanism = "ksalsa"\n')
    (tmp_path / "set.tar").write_bytes(b"no set")
    trained = "evaluating on training patients would select a model by them: hold a part out"
    for order, told in (
        (judged(ward, tmp_path, config="whole"), trained),
        (judged(ward, tmp_path, part="release"), trained),
        (
            judged(ward, tmp_path, part="test"),
            "no such part; the configuration's split has held-out, release",
        ),
        (judged(ward, tmp_path, config="ksalsa"), "this command evaluates sets of privimage and centroids"),
        (judged(ward, tmp_path, config="gone"), "gone.toml cannot be read"),
        (judged(ward, tmp_path), "set.tar is not a set of images"),
    ):
        said = typed(*order)
        assert (said.status, told in said.err) == (1, True), said.err
    (tmp_path / "set.tar").unlink()
    assert "set.tar: No such file" in typed(*judged(ward, tmp_path)).err
    assert not (tmp_path / "page.html").exists()
    with closing(projects.open_vault(ward.home, "main")) as vault:
        assert vault.note("looks") is None, "nobody was looked at"


@pytest.mark.usefixtures("sound")
def test_a_disk_that_does_not_take_the_set_hides_no_verdict(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(release, "replace_file", full)
    said = released(typed, ward, tmp_path, "--out", tmp_path / "set.tar")
    assert (said.status, "admitted at level A" in said.out) == (1, True)
    assert "the set was released all the same" in " ".join(said.err.split())
    assert not (tmp_path / "set.tar").exists()
