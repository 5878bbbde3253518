"""A network leaves a site: of an approved architecture, or not at all; then shelf, pool, report and merge know it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agent.models.weights import pack, unpack
from coordinator.claim_descriptions import UNTESTED, evidence, is_kanonymous, without_epsilon
from coordinator.cli.main import main
from coordinator.explanations import LEVELS
from coordinator.gateway.service import inspect_artifact
from coordinator.pools.architectures import approve_architecture, architecture_of
from coordinator.pools.export import export_pool, list_releases
from coordinator.pools.model_averaging import average_runs
from coordinator.pools.selection import PoolRefusedError, SelectionCriteria
from coordinator.reports.overview import UnsoundReportError, views
from coordinator.storage.release_store import WORDING
from policies.accounting.claims import NoClaim, SubsampledGaussian
from policies.accounting.rdp import epsilon_nano
from policies.statements import Release, claim_json
from protos.artifacts.arrays import pack_images
from protos.artifacts.strict_safetensors import Architecture
from tests.support.image_sets import labels, scene
from tests.support.ledger_world import K5, Hospital
from tests.support.pool_world import MEASURED, World
from tests.support.report_world import page_of

STEPS = SubsampledGaussian(0.05, 2.0, 400)
CONFIG = {"latent": [4, 8, 8], "scale": 0.7512, "conditions": ["none", "edema+effusion"]}
SAID = (
    "empirical only: at most 3.2 % (upper end of a 95 % interval) re-identified by an unseen verifier; "
    "95.5 % or more (lower end of one) of planted copies caught"
)
CROWD = (
    *("patients behind", "patients per image", "behind each image", "behind every image"),
    *("Image sets", "image set(s)", "k-anonym", "is protected by", "are protected by"),
)
UNTRUE = ("known attacks", "attacks were tried", "at the power stated", "No image shows")


def state(seed: int = 0) -> dict[str, Tensor]:
    """As a student's: real numbers, and a counter of whole ones."""
    torch.random.fork_rng()
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3))
    rng = torch.Generator().manual_seed(seed)
    drawn = {
        n: torch.randn(t.shape, generator=rng) if t.is_floating_point() else t for n, t in net.state_dict().items()
    }
    assert {t.dtype for t in drawn.values()} == {torch.float32, torch.int64}
    return drawn


def student(seed: int = 0, config: dict[str, Any] | None = None, **notes: Any) -> bytes:
    return pack("latent-diffusion", config or CONFIG, notes, state(seed))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.register.store.close()


def look(tmp_path: Path, body: bytes, *approved: Architecture) -> list[tuple[str, str]]:
    folder = tmp_path / "architectures"
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(approved):
        (folder / f"{number}.json").write_bytes(one.encode())
    path = tmp_path / "artifact"
    path.write_bytes(body)
    release = Hospital("north").release("g", artifact_type="model", mechanism="distill")
    return [(found.rule, found.detail) for found in inspect_artifact(path, release, folder)]


@pytest.fixture
def shown(tmp_path: Path) -> Architecture:
    """The architecture of a student that was never trained on anybody."""
    (tmp_path / "rehearsal.safetensors").write_bytes(student(seed=99))
    return architecture_of(tmp_path / "rehearsal.safetensors")


# --- what the coordinator looks into


def test_a_file_as_the_agent_writes_it_passes_once_its_architecture_is_approved(
    tmp_path: Path, shown: Architecture
) -> None:
    assert unpack(student(1), "latent-diffusion").config == CONFIG
    assert look(tmp_path, student(1), shown) == []


def test_a_refusal_of_an_unapproved_network_says_who_has_to_do_what(tmp_path: Path) -> None:
    assert look(tmp_path, student(1)) == [
        ("architecture", "no approved architecture has this size: the coordinator's operator approves one with "
                         "`pool architecture`, before a release is made")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "rule", "words"),
    [
        (student(1, {**CONFIG, "scale": 0.7513}), "architecture", "something else than what was approved"),
        (student(1, {**CONFIG, "conditions": ["none", "effusion+edema"]}), "architecture", "something else"),
        (student(1, loss=0.25), "architecture", "no approved architecture"),
        (student(1, {**CONFIG, "patient": "Jane Doe"}), "architecture", "no approved architecture"),
        (pack("an-autoencoder-of-quite-another-kind", CONFIG, {}, state(1)), "architecture", "no approved"),
        (pack("latent-confusion", CONFIG, {}, state(1)), "architecture", "something else"),
        (pack("latent-diffusion", CONFIG, {}, {**state(1), "2.weight": torch.zeros(8, 3)}),
         "architecture", "2.weight must have the shape [3, 8]; the coordinator's operator"),
        (pack("latent-diffusion", CONFIG, {}, {**state(1), "0.bias": torch.full((8,), torch.nan)}),
         "artifact_malformed", "not finite"),
        (pack("latent-diffusion", CONFIG, {}, {**state(1), "0.bias": torch.full((8,), torch.inf)}),
         "artifact_malformed", "not finite"),
        (student(1) + b"\0", "architecture", "no approved architecture"),
        (b"no model", "architecture", "no approved architecture"),
    ],
)  # fmt: skip
def test_whatever_is_not_the_approved_network_is_refused(
    tmp_path: Path, shown: Architecture, body: bytes, rule: str, words: str
) -> None:
    ((found, detail),) = look(tmp_path, body, shown)
    assert (found, words in detail) == (rule, True), detail
    assert "Jane" not in detail


def test_of_several_approved_ones_of_one_size_any_will_do(tmp_path: Path, shown: Architecture) -> None:
    other = Architecture(shown.tensors, shown.told.replace("0.7512", "0.7511"))
    assert look(tmp_path, student(1), other, shown) == []


def test_a_damaged_file_among_the_approved_approves_nothing_and_stops_nothing(
    tmp_path: Path, shown: Architecture
) -> None:
    (tmp_path / "architectures").mkdir()
    (tmp_path / "architectures" / "zz.json").write_bytes(b"{}")
    assert look(tmp_path, student(1), shown) == []
    (tmp_path / "architectures" / "0.json").unlink()
    ((rule, words),) = look(tmp_path, student(1))
    assert rule == "architecture"
    assert words.endswith("; 1 of the coordinator's files cannot be read")


# --- approving


def test_an_operator_sees_and_approves_an_architecture(
    world: World, tmp_path: Path, shown: Architecture, capsys: pytest.CaptureFixture[str]
) -> None:
    file, command = str(tmp_path / "rehearsal.safetensors"), ["--home", str(world.home.root), "pool", "architecture"]
    assert main([*command, file]) == 0
    out = capsys.readouterr()
    assert "kind: latent-diffusion" in out.out
    assert '"edema+effusion"' in out.out
    assert shown.digest() in out.out.replace("\n", "")
    assert "nothing was approved" in out.err
    assert not (world.home.root / "architectures").exists()
    assert main([*command, file, "--approve", "chest-32"]) == 0
    approved = world.home.root / "architectures" / "chest-32.json"
    assert approved.read_bytes() == shown.encode()
    assert main([*command, file, "--approve", "chest-32"]) == 0, "said twice, written once"
    capsys.readouterr()
    assert main([*command, file, "--json"]) == 0
    (tmp_path / "sent.json").write_text(capsys.readouterr().out)
    assert architecture_of(tmp_path / "sent.json") == shown
    (approved.parent / "by-hand.json").write_bytes((tmp_path / "sent.json").read_bytes())
    approved.unlink()
    (tmp_path / "artifact").write_bytes(student(2))
    release = world.north.release("g", artifact_type="model")
    assert inspect_artifact(tmp_path / "artifact", release, approved.parent) == [], (
        "a line end is no other architecture"
    )


def test_what_is_no_clean_network_is_not_approved(
    world: World, tmp_path: Path, shown: Architecture, capsys: pytest.CaptureFixture[str]
) -> None:
    path, command = tmp_path / "model.safetensors", ["--home", str(world.home.root), "pool", "architecture"]
    bad = {
        "no notes": student(0, made="Jane Doe"),
        "not finite": pack("any", {}, {}, {"a": torch.tensor([torch.nan])}),
        "bytes follow": student() + b"\0",
        "not one of plain tensors": (2).to_bytes(8, "little") + b"7 ",
        "out of bounds": b"PK\3\4 a pickle",
    }
    for words, body in bad.items():
        path.write_bytes(body)
        assert main([*command, str(path), "--approve", "x"]) == 1
        told = capsys.readouterr().err
        assert words in told, told
        assert "Jane" not in told
    assert main([*command, str(tmp_path / "missing"), "--approve", "x"]) == 1
    (tmp_path / "other.json").write_text('{"tensors": {}}')
    assert main([*command, str(tmp_path / "other.json"), "--approve", "x"]) == 1
    assert not (world.home.root / "architectures").exists()
    for name in ("../x", "X Y", ".hidden", ""):
        with pytest.raises(PoolRefusedError, match="one short word"):
            approve_architecture(world.home, name, shown)
    approve_architecture(world.home, "one", shown)
    with pytest.raises(PoolRefusedError, match="another architecture"):
        approve_architecture(world.home, "one", Architecture(shown.tensors))


# --- shelf, pool, report


def test_a_model_lies_on_the_shelf_with_both_figures_in_its_certificate(world: World) -> None:
    body = student(1)
    release = world.admit(world.north, "g1", body)
    place = world.home.releases / release.release
    assert sorted(p.name for p in place.iterdir()) == ["certificate.json", "envelope.json", "model.safetensors"]
    assert (place / "model.safetensors").read_bytes() == body
    facts = json.loads((place / "certificate.json").read_text())
    assert (facts["level"], facts["meaning"], facts["tested"]) == ("C", WORDING["C"], SAID)
    assert (facts["reid_rate"], facts["vetting_power"]) == ("0.0312", "0.9559")
    assert "epsilon" not in facts
    images = world.admit(world.north, "g2", pack_images(scene(1, 3), labels(3)), artifact_type="image-set")
    assert (world.home.releases / images.release / "images.tar").exists()


def test_the_same_model_under_two_grants_is_two_releases(world: World) -> None:
    first, second = (world.admit(world.north, grant, student(1)) for grant in ("g1", "g2"))
    for release in (first, second):
        assert (world.home.releases / release.release / "model.safetensors").read_bytes() == student(1)


def test_a_pool_lists_a_model_and_leaves_it_out_with_the_reason(world: World, tmp_path: Path) -> None:
    model = world.admit(world.north, "g1", student(1))
    images = world.admit(world.south, "g2", pack_images(scene(2, 4), labels(4)), artifact_type="image-set")
    rows = {row.id: row for row in list_releases(world.home, world.pool_ledger)}
    assert (rows[model.release].holds, rows[model.release].level) == ("model", "C")
    assert rows[images.release].holds == "images"
    report = export_pool(world.home, world.pool_ledger, tmp_path / "pool", SelectionCriteria())
    assert [(left.release, left.rule) for left in report.left_out] == [(model.release, "model")]
    assert (report.samples, report.level) == (4, "C")
    page = (tmp_path / "pool" / "README.md").read_text()
    assert SAID in page
    assert "there is no guarantee" in page
    (cost,) = report.budgets[0].costs
    assert (cost.kind, cost.epsilon, cost.sets) == ("none", None, None)
    with pytest.raises(PoolRefusedError, match="1 x level, 1 x model"):
        export_pool(world.home, world.pool_ledger, tmp_path / "strict", SelectionCriteria(level="B"))


def test_the_report_prints_both_figures_and_believes_the_statement_alone(world: World) -> None:
    release = world.admit(world.north, "g1", student(1))
    page = page_of(world.register.store, views(world.home.releases), None)
    assert SAID in page
    assert "learned from a secret one" in page
    certificate = world.home.releases / release.release / "certificate.json"
    facts = json.loads(certificate.read_text())
    for forged in ({"vetting_power": "0.999"}, {"reid_rate": "0.0"}):
        certificate.write_text(json.dumps({**facts, **forged}))
        with pytest.raises(UnsoundReportError, match="other figures"):
            views(world.home.releases)
    certificate.write_text(json.dumps({k: v for k, v in facts.items() if k not in ("reid_rate", "vetting_power")}))
    assert SAID in page_of(world.register.store, views(world.home.releases), None)
    certificate.write_text(json.dumps(facts))
    (certificate.parent / "envelope.json").unlink()
    with pytest.raises(UnsoundReportError, match="other figures"):
        views(world.home.releases)


def drawn(world: World, grant: str, seed: int, **more: Any) -> Release:
    """An image set on the shelf; of `distill`, which promises nothing, if no other mechanism is named."""
    body = pack_images(scene(seed, 3), labels(3))
    return world.admit(world.north, grant, body, artifact_type="image-set", **more)


def read(world: World) -> str:
    """The report as a person reads it, without its style sheet and its elements."""
    page = page_of(world.register.store, views(world.home.releases), None)
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.S).split())


def test_books_of_level_c_alone_speak_of_no_crowd_and_of_no_attack_that_was_not_tried(
    world: World, tmp_path: Path
) -> None:
    world.admit(world.north, "g1", student(1))
    for grant, seed in (("g2", 2), ("g3", 3)):
        drawn(world, grant, seed)
    text = read(world)
    assert "Covered by ε 0 of 3; 3 promise nothing" in text
    assert "ε covers 0 of 3 releases. Of the others, 3 promise nothing." in text
    assert "a patient may be in 9 releases without an epsilon, ever" in text
    export_pool(world.home, world.pool_ledger, tmp_path / "pool", SelectionCriteria())
    sheet = (tmp_path / "pool" / "README.md").read_text()
    assert "No image is meant to show a patient; each was made by" in sheet
    assert "- epsilon covers 0 of 2 releases; 2 promise nothing; kinds are never added up." in sheet
    assert "Some releases promise nothing" in sheet
    for words in (text, sheet.replace("k-anonymity does not compose across sites", "")):  # said of every pool (P5)
        assert LEVELS["C"][2] in words
        assert [said for said in (*CROWD, *UNTRUE) if said in words] == []


def test_what_is_k_anonymous_and_what_promises_nothing_are_counted_apart(world: World, tmp_path: Path) -> None:
    drawn(world, "g1", 1, mechanism="ksame", claim=K5)
    drawn(world, "g2", 2)
    drawn(world, "g3", 3)
    opened = world.register.store.state.accounts["north/rdp"].opened
    told = {"epsilon_nano": epsilon_nano(STEPS, float(opened.delta), opened.order), "delta": opened.delta}
    world.admit(world.north, "g4", student(4), "distill-dp", STEPS, vetted_against="public", **told)
    text = read(world)
    assert "Covered by ε 1 of 4; 1 is k-anonymous; 2 promise nothing" in text
    assert "ε covers 1 of 4 releases. Of the others, 1 is k-anonymous; 2 promise nothing. k-anonymity is " in text
    assert [said for said in UNTRUE if said in text] == []
    export_pool(world.home, world.pool_ledger, tmp_path / "pool", SelectionCriteria())
    sheet = (tmp_path / "pool" / "README.md").read_text()
    assert "; 1 is k-anonymous; 2 promise nothing; kinds are never added up." in sheet
    assert "No image is meant to show a patient" in sheet
    export_pool(world.home, world.pool_ledger, tmp_path / "crowd", SelectionCriteria(level="B"))
    strong = (tmp_path / "crowd" / "README.md").read_text()
    assert "No image shows a patient" in strong
    assert "- epsilon covers 0 of 1 releases; 1 is k-anonymous; kinds are never added up." in strong
    assert "promise nothing" not in strong


@pytest.mark.parametrize("more", [{}, {"claim": replace(K5, releases_per_patient=2)}])
def test_a_crowd_at_level_c_is_counted_among_what_promises_nothing(world: World, more: dict[str, Any]) -> None:
    """P5, P6: by a network that saw the patients, or of patients who may be in a second set."""
    parts = dict.fromkeys(("encoder", "generator"), "public" if more else "private")
    facts: dict[str, Any] = {"mechanism": "ksame", "claim": K5, "components": parts, **MEASURED, **more}
    drawn(world, "g1", 1, **facts)
    text = read(world)
    assert "Of the others, 1 promises nothing." in text
    assert "k-anonym" not in text


def test_every_release_without_an_epsilon_is_of_one_of_two_kinds() -> None:
    assert [without_epsilon(*counts) for counts in ((0, 0), (1, 0), (0, 1), (2, 3))] == [
        "", "1 is k-anonymous", "1 promises nothing", "2 are k-anonymous; 3 promise nothing"
    ]  # fmt: skip
    crowd = claim_json(K5)
    assert [level for level in ("A", "A*", "B", "C", "", "D") if is_kanonymous(level, crowd)] == ["B"]
    assert not any(
        is_kanonymous("B", odd) for odd in (claim_json(NoClaim()), claim_json(STEPS), None, "k-anonymous", {})
    )


def test_students_of_two_sites_are_merged_and_the_merge_is_said_to_be_untested(world: World, tmp_path: Path) -> None:
    names = [world.admit(site, f"g-{site.name}", student(n)).release
             for n, site in enumerate((world.north, world.south))]  # fmt: skip
    report = average_runs(world.home, world.pool_ledger, tmp_path / "merged", names)
    raw = (tmp_path / "merged" / "model.safetensors").read_bytes()
    merged = unpack(raw, "latent-diffusion")
    assert (merged.config, merged.notes) == (CONFIG, {})
    first, second = state(0), state(1)
    for name, tensor in merged.state.items():
        mean = first[name] if not tensor.is_floating_point() else (first[name].double() + second[name].double()) / 2
        assert torch.equal(tensor, mean.to(tensor.dtype)), name
    assert report.level == "C"
    assert report.meaning == f"{WORDING['C']}; the merged model itself was not tested"
    assert [part.tested for part in report.ingredients] == [SAID, SAID]
    assert all(cost.kind == "none" for cost in report.budget.costs)
    other = world.admit(world.north, "g-other", student(2, {**CONFIG, "scale": 0.5}))
    with pytest.raises(PoolRefusedError, match="something else"):
        average_runs(world.home, world.pool_ledger, tmp_path / "mixed", [names[0], other.release])


def test_a_student_of_a_noisy_teacher_is_level_a_and_costs_epsilon(world: World) -> None:
    opened = world.register.store.state.accounts["north/rdp"].opened
    told = {"epsilon_nano": epsilon_nano(STEPS, float(opened.delta), opened.order), "delta": opened.delta}
    release = world.admit(world.north, "g1", student(1), "distill-dp", claim=STEPS, vetted_against="public", **told)
    facts = json.loads((world.home.releases / release.release / "certificate.json").read_text())
    assert facts["level"] == "A"
    assert facts["epsilon"] == pytest.approx(told["epsilon_nano"] / 1e9)  # type: ignore[operator]
    assert "tested" not in facts
    (row,) = list_releases(world.home, world.pool_ledger)
    assert (row.holds, row.level, row.epsilon) == ("model", "A", facts["epsilon"])


@pytest.mark.parametrize(
    ("rate", "power", "said"),
    [("0.03", "0.95", ("at most 3 % (upper", "; 95 % or more (lower")),
     ("0.0", "1.0", ("at most 0 % (upper", "; 100 % or more (lower")),
     ("0.0001", "0.99999", ("at most 0.1 % (upper", "; 99.9 % or more (lower")),
     ("0.07", "0.9", ("at most 7 % (upper", "; 90 % or more (lower"))],
)  # fmt: skip
def test_figures_are_rounded_to_the_releases_disadvantage(rate: str, power: str, said: tuple[str, str]) -> None:
    assert all(part in evidence(rate, power) for part in said)


@pytest.mark.parametrize("odd", [None, "", "nan", "inf", "-0.1", "1.5", 0.5, "0.50", "words", ["0.5"]])
def test_a_figure_that_is_none_is_said_to_be_missing(odd: Any) -> None:
    assert evidence(odd, "0.95") == evidence("0.05", odd) == UNTESTED
