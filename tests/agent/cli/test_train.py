"""Train, tune and release as they are typed: what is told, what is written, what is refused, and when."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from agent.cli import options as synthesis_parser
from agent.cli import train as synthesis_commands
from agent.cli.main import main
from agent.deidentify.record import Record
from agent.domain import Image as Picture
from agent.domain import Selection
from agent.errors import CohortTooSmallError
from agent.mechanisms.anonfaces.identity_mixing import Mixing
from agent.mechanisms.ksalsa.style_alignment import Alignment
from agent.mechanisms.registry import AnonFaces, KSalsa
from agent.models.features.extractors import RandomFeatures, features_bytes, features_from
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.recognition.recogniser import recogniser_from
from agent.models.semantics.classifier import semantics_from
from agent.models.stylegan.network import PRESETS, generator_from
from agent.models.stylegan.restyle import encoder_from, fingerprint
from agent.models.training_loop import seeded
from agent.release.pipeline import release_synthetic
from agent.storage import projects
from agent.storage.vault import Vault
from deploy.phantoms.fundus import fundus_patients
from policies.ledger.entries import Admitted
from policies.statements import PAYLOAD_TYPE, Release, parse
from protos.artifacts.arrays import unpack_images
from protos.common.dsse import open_sealed
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Site
from tests.support.mechanism_documents import ANONFACES, KSALSA, changed, lay_networks, toml
from tests.support.networks import codec, pattern_pictures, recogniser
from tests.support.picture_folders import write_pictures
from tests.support.published_weights import tiny_ada
from tests.support.release_site import enrolled_site
from tests.support.site_world import site_world
from tests.support.unchanged import opened_once, untouched
from tests.support.vault_records import key_of, open_vault, record

__all__ = ["typed"]  # a fixture
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty pictures of thirty made-up people, and whose each is."""
    folder = tmp_path_factory.mktemp("public")
    people = fundus_patients(30, np.random.default_rng(0), 32)
    named = {f"{one.number:03d}-{n}.png": photo.pixels for one in people for n, photo in enumerate(one.photographs)}
    return write_pictures(folder, named, identities={name: f"person {int(name[:3])}" for name in named})


def words(network: str, eyes: Path, out: Path, *more: object) -> list[object]:
    return ["train", network, "--pictures", eyes / "pictures", "--out", out, "--side", 32, *more]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- train


def test_a_generator_and_then_its_encoder_are_trained_from_a_folder(typed: Typed, eyes: Path, tmp_path: Path) -> None:
    said = typed(*words("generator", eyes, tmp_path / "g", "--steps", 4), "--json")
    assert said.status == 0
    file = tmp_path / "g" / "generator.safetensors"
    expected = {"network": "generator", "file": file.name, "sha256": digest(file), "pictures": 60, "passed_over": 0}
    assert said.line == {**expected, "steps": 4, "trained": True}
    assert said.err == ""
    generator, _ = generator_from(file.read_bytes())
    assert (generator.architecture.resolution, generator.architecture.channels) == (32, 3)
    assert list((tmp_path / "g").glob("samples-*.png"))

    order = ["train", "encoder", "--pictures", eyes / "pictures", "--out", tmp_path / "e", "--steps", 3, "--json"]
    said = typed(*order, "--generator", file)
    assert (said.status, said.line["sha256"]) == (0, digest(tmp_path / "e" / "encoder.safetensors"))
    encoder, packed = encoder_from((tmp_path / "e" / "encoder.safetensors").read_bytes())
    assert packed.notes["generator"] == fingerprint(generator.requires_grad_(requires_grad=False))
    assert (encoder.architecture.resolution, encoder.architecture.channels) == (32, 3)


def test_features_are_trained_of_grey_pictures_too(typed: Typed, eyes: Path, tmp_path: Path) -> None:
    said = typed(*words("features", eyes, tmp_path, "--steps", 2, "--grey", "--json"))
    raw = (tmp_path / "features.safetensors").read_bytes()
    assert (said.status, said.line["sha256"]) == (0, hashlib.sha256(raw).hexdigest())
    assert features_from(raw, "file").channels == 1


@pytest.fixture(scope="module")
def patterns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small grey pictures of people whom a recogniser comes to know in seconds."""
    folder = tmp_path_factory.mktemp("patterns")
    images, who = pattern_pictures(people=120, pictures=3)
    named = {f"{n:04d}.png": pixels for n, pixels in enumerate(images)}
    return write_pictures(folder, named, identities=dict(zip(named, (f"person {one}" for one in who), strict=True)))


def knowing(folder: Path, out: Path, seed: int, *more: object) -> list[object]:
    """The command of a recogniser that comes to know these people."""
    told = ("--side", 16, "--grey", "--seed", seed, "--identities", folder / "who.csv", "--false-match-rate", 0.05)
    return words("recogniser", folder, out, *told, "--steps", 80, *more)


def test_two_recognisers_of_two_seeds_are_two_opinions_for_one_release(
    typed: Typed, patterns: Path, tmp_path: Path
) -> None:
    judges = []
    for seed in (0, 1):
        said = typed(*knowing(patterns, tmp_path / str(seed), seed), "--json")
        assert said.status == 0, said.err
        file = tmp_path / str(seed) / f"recogniser-{seed}.safetensors"
        assert said.line["sha256"] == digest(file)
        assert 0.0 <= said.line["judged"]["first"]["low"] <= said.line["judged"]["first"]["value"] <= 1.0
        judges.append(recogniser_from(file.read_bytes()))
        assert judges[-1].calibration.false_match_rate == 0.05
    assert len({one.name for one in judges}) == len({one.origin.sha256 for one in judges}) == 2
    AnonFaces(5, 2, codec(1), tuple(judges), Mixing(5))


def test_what_people_are_told_is_what_they_must_do_next(typed: Typed, patterns: Path, tmp_path: Path) -> None:
    said = typed(*knowing(patterns, tmp_path, 0))
    file = tmp_path / "recogniser-0.safetensors"
    assert f"{file}: trained, on 360 images in 80 steps" in said.out
    assert "if no patient of the cohort is in them, vouch for it in site.toml's public_components" in said.out
    assert digest(file) in said.out.splitlines()
    assert re.search(r"on people outside the training: rank-1 \d\.\d+ \[", said.out)


def test_a_recogniser_that_knows_nobody_is_no_file_and_what_it_reached_is_said(
    typed: Typed, eyes: Path, tmp_path: Path
) -> None:
    more = ("--steps", 1, "--identities", eyes / "who.csv", "--false-match-rate", 0.1)
    for _ in range(2):
        said = typed(*words("recogniser", eyes, tmp_path, *more))
        assert (said.status, said.out) == (1, "")
        assert re.search(r"This one matches \d\.\d+ \[.*\] and mistakes .*: train it longer", said.err)
        assert not (tmp_path / "recogniser-0.safetensors").exists()
        assert list(tmp_path.iterdir()), "the checkpoint stays"


def test_a_second_call_has_nothing_to_do_and_more_steps_go_on_from_there(
    typed: Typed, eyes: Path, tmp_path: Path
) -> None:
    first = typed(*words("generator", eyes, tmp_path, "--steps", 2, "--json")).line
    again = typed(*words("generator", eyes, tmp_path, "--steps", 2, "--json")).line
    assert again == {**first, "trained": False}
    assert "nothing to do: the training is complete" in typed(*words("generator", eyes, tmp_path, "--steps", 2)).out
    further = typed(*words("generator", eyes, tmp_path, "--steps", 4, "--json")).line
    assert (further["trained"], further["sha256"] == first["sha256"]) == (True, False)
    whole = typed(*words("generator", eyes, tmp_path / "whole", "--steps", 4, "--json")).line
    assert safetensors.torch.load_file(tmp_path / "generator.safetensors").keys()
    assert further["sha256"] == whole["sha256"], "a run that stopped on the way ends with the same network"
    fewer = typed(*words("generator", eyes, tmp_path, "--steps", 1))
    assert (fewer.status, "already longer" in fewer.err) == (1, True)
    other = typed(*words("generator", eyes, tmp_path, "--steps", 4, "--seed", 1))
    assert (other.status, "another configuration" in other.err) == (1, True)


def test_pictures_that_cannot_be_used_are_counted_and_said(typed: Typed, eyes: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for path in sorted((eyes / "pictures").iterdir())[:4]:
        (tmp_path / "pictures" / path.name).write_bytes(path.read_bytes())
    Image.new("RGB", (31, 99)).save(tmp_path / "pictures" / "small.png")
    y, x = np.mgrid[:40, :40] - 19.5  # a bright disc of 20 pixels in a dark picture of 40
    Image.fromarray((255 * (x**2 + y**2 < 100)).astype(np.uint8)).save(tmp_path / "pictures" / "spot.png")
    (tmp_path / "pictures" / "broken.png").write_bytes(b"x")
    said = typed(*words("features", tmp_path, tmp_path / "f", "--steps", 1))
    told = "3 skipped: not readable, or smaller than 32 pixels a side once their dark border is cut"
    assert told in said.out
    assert "on 4 images" in said.out


ORDERS: list[tuple[str, Sequence[object], str]] = [
    ("not a folder", ("--pictures", "gone"), "gone is not a folder"),
    (
        "a size of which there is no generator",
        ("--side", 48),
        "no generator of 48 pixels; --preset is one of: tiny32",
    ),
    ("a preset of another size", ("--preset", "auto512"), "no generator of 32 pixels"),
    ("no such preset", ("--preset", "huge"), "--preset is one of"),
    ("pictures that are too small", ("--side", 64), "none that can be read and has 64 pixels a side"),
]


@pytest.mark.parametrize(("more", "told"), [order[1:] for order in ORDERS], ids=[order[0] for order in ORDERS])
def test_an_order_that_cannot_be_done_is_a_sentence(
    typed: Typed, eyes: Path, tmp_path: Path, more: Sequence[object], told: str
) -> None:
    said = typed(*words("generator", eyes, tmp_path / "out", "--steps", 1, *more))
    assert said.status == 1
    assert told in said.err
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("network", "more"),
    [
        *(("generator", ("--steps", "0")), ("generator", ("--steps", "-3")), ("generator", ("--seed", "-1"))),
        *(("features", ("--preset", "tiny32")), ("encoder", ())),
        *(("recogniser", ()), ("recogniser", ("--identities", "x", "--false-match-rate", "0.5"))),
        *(("recogniser", ("--identities", "x", "--false-match-rate", "nan")), ("generator", ("--device", "tpu"))),
    ],
)
def test_words_that_mean_nothing_are_a_mistake_of_usage(network: str, more: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", network, "--pictures", str(tmp_path), "--out", str(tmp_path / "o"), *more])
    assert caught.value.code == 2


def test_pictures_that_do_not_differ_are_a_sentence_and_not_a_fault(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        Image.new("RGB", (32, 32), "grey").save(tmp_path / "pictures" / f"{name}.png")
    for network in ("generator", "features"):
        said = typed(*words(network, tmp_path, tmp_path / network, "--steps", 1))
        assert (said.status, "nothing to learn" in said.err) == (1, True), said.err
    (tmp_path / "pictures" / "b.png").unlink()
    said = typed(*words("generator", tmp_path, tmp_path / "one", "--steps", 1))
    assert "fewer than two images" in said.err


def test_a_list_of_too_few_people_says_how_many_it_takes(typed: Typed, eyes: Path, tmp_path: Path) -> None:
    said = typed(*words("recogniser", eyes, tmp_path, "--steps", 1, "--identities", eyes / "who.csv"))
    assert said.status == 1
    assert "the list has 30 people, 0 of them with one image" in said.err
    needed = re.search(r"takes 300 pairs of two people: about (\d+) people with 2 images each", said.err)
    assert needed
    pairs = (int(needed[1]) // 4) * (int(needed[1]) // 4 - 1) // 2 * 4
    assert 300 <= pairs < 400, "no more people than it takes"
    for text in ("file,person\n", "file,identity\n000-0.png,a\n000-0.png,b\n", "file,identity\nnobody.png,a\n"):
        (tmp_path / "who.csv").write_text(text)
        said = typed(*words("recogniser", eyes, tmp_path, "--steps", 1, "--identities", tmp_path / "who.csv"))
        assert (said.status, "who.csv" in said.err) == (1, True)


def test_an_encoder_of_a_published_generator_needs_the_digest_that_its_authors_tell(
    typed: Typed, eyes: Path, tmp_path: Path
) -> None:
    raw = safetensors.torch.save({f"G_ema.{n}": t.contiguous() for n, t in tiny_ada().state_dict().items()})
    (tmp_path / "ada.safetensors").write_bytes(raw)
    order: list[object] = ["train", "encoder", "--pictures", eyes / "pictures", "--out", tmp_path / "e", "--steps", 2]
    order += ["--generator", f"stylegan2-ada:{tmp_path / 'ada.safetensors'}"]
    assert "get the SHA-256" in typed(*order).err
    assert "does not have the SHA-256" in typed(*order, "--sha256", "0" * 64).err
    said = typed(*order, "--sha256", hashlib.sha256(raw).hexdigest().upper(), "--json")
    assert said.status == 0, said.err
    encoder, _ = encoder_from((tmp_path / "e" / "encoder.safetensors").read_bytes())
    assert encoder.architecture.resolution == 16
    for more in (("--side", 32), ("--grey",)):
        assert (
            "the generator draws 16 pixels in colour"
            in typed(*order, "--sha256", digest(tmp_path / "ada.safetensors"), *more).err
        )
    missing = typed(*order[:-1], tmp_path / "gone.safetensors")
    assert (missing.status, "gone.safetensors" in missing.err) == (1, True)
    wrong = typed(*order[:-1], eyes / "who.csv")
    assert (wrong.status, "not safetensors" in wrong.err) == (1, True)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty pictures of bright and of dark noise, in two folders, and the list of what each is."""
    folder, rng = tmp_path_factory.mktemp("shapes"), np.random.default_rng(0)
    shades = ("dark", "bright")
    named = {
        f"{shades[n % 2]}/{n}.png": (rng.random((8, 8)) * 90 + 150 * (n % 2)).astype(np.uint8) for n in range(60)
    }
    return write_pictures(folder, named, {name: name.partition("/")[0] for name in named})


def queried(folder: Path, out: Path, *more: object) -> list[object]:
    return [*words("semantics", folder, out), "--side", 8, "--grey", *more]


def test_semantics_are_learned_from_a_list_or_from_folders_and_what_they_reach_is_said(
    typed: Typed, shapes: Path, tmp_path: Path
) -> None:
    file = tmp_path / "semantics.safetensors"
    said = typed(*queried(shapes, tmp_path, "--labels", shapes / "labels.csv", "--steps", 40))
    assert said.status == 0, said.err
    assert f"{file}: trained, on 60 images in 40 steps" in said.out
    told = r"on images outside the training it names 1.000 \[0.\d+, 1.000\], of 2 labels; always the commonest label "
    assert re.search(told, said.out), said.out
    assert digest(file) in said.out.splitlines()
    found = semantics_from(file.read_bytes())
    assert (found.bins, found.shape) == (("bright", "dark"), (8, 8))
    said = typed(*queried(shapes, tmp_path, "--labels", "folders", "--steps", 40, "--json"))
    assert (said.status, said.line["trained"], said.line["sha256"]) == (0, False, digest(file))
    assert said.line["accuracy"]["value"] == 1.0


def test_semantics_that_learned_nothing_are_said_to_guess(typed: Typed, shapes: Path, tmp_path: Path) -> None:
    rows = ["file,label", *(f"{('dark', 'bright')[n % 2]}/{n}.png,{'abc'[n % 7 % 3]}" for n in range(60))]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    said = typed(*queried(shapes, tmp_path / "out", "--labels", tmp_path / "labels.csv", "--steps", 1))
    assert (said.status, "no better than guessing" in said.out) == (0, True), said.out + said.err


def test_without_labels_semantics_are_clusters_of_features(typed: Typed, shapes: Path, tmp_path: Path) -> None:
    said = typed(*queried(shapes, tmp_path / "random", "--clusters", 2, "--json"))
    assert said.status == 0, said.err
    assert (sum(said.line["sizes"]), min(said.line["sizes"]) > 20, said.line["trained"]) == (60, True, True)
    with seeded(0):
        raw = features_bytes("made", Trunk(TrunkArchitecture(16, 1, 8, 2)), {})
    (tmp_path / "features.safetensors").write_bytes(raw)
    more = ("--clusters", 3, "--features", tmp_path / "features.safetensors")
    said = typed(*queried(shapes, tmp_path / "learned", *more))
    assert said.status == 0, said.err
    assert re.search(r"3 clusters of \d+ to \d+ images", said.out)
    assert semantics_from((tmp_path / "learned" / "semantics.safetensors").read_bytes()).bins[2] == "cluster-2"


def test_an_order_for_semantics_that_cannot_be_done_is_a_sentence(typed: Typed, shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("file,label\ndark/0.png,a\nbright/1.png,b\ndark/2.png,b\n")
    for more, told in (
        (("--labels", "folders", "--features", "x"), "--features works with --clusters only"),
        (("--clusters", 1), "--clusters: give 2 or more"),
        (("--clusters", 61), "do not make 61 clusters"),
        (("--clusters", 2, "--features", shapes / "labels.csv"), "not safetensors"),
        (("--clusters", 2, "--features", shapes / "q"), "--features: file not found: q"),
        (("--labels", tmp_path / "labels.csv"), "1 of 2 labels have fewer: add images"),
        (("--labels", tmp_path / "gone.csv"), "gone.csv is not a CSV file"),
    ):
        said = typed(*queried(shapes, tmp_path / "out", *more, "--steps", 1))
        assert (said.status, told in said.err) == (1, True), said.err
        assert not list(tmp_path.rglob("semantics.safetensors"))
    for wrong in ((), ("--labels", "folders", "--clusters", "2"), ("--clusters", "0")):
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in queried(shapes, tmp_path, *wrong)])
        assert caught.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_an_accelerator_that_is_not_there_is_said_before_a_picture_is_read(typed: Typed, tmp_path: Path) -> None:
    said = typed("train", "generator", "--pictures", tmp_path / "gone", "--out", tmp_path, "--device", "cuda")
    assert (said.status, "no accelerator" in said.err) == (1, True)


def test_training_needs_no_site_and_everything_else_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for order in (["doctor"], ["tune", "--config", "x", "--menu", "2,3", "--out", "y"]):
        with pytest.raises(SystemExit) as caught:
            main(order)
        assert caught.value.code == 2
        assert "--home" in capsys.readouterr().err


def test_a_training_that_was_killed_goes_on_and_ends_with_the_same_network(
    typed: Typed, eyes: Path, tmp_path: Path
) -> None:
    order = [str(word) for word in words("generator", eyes, tmp_path / "killed", "--steps", 16, "--json")]
    child = "import sys; from agent.cli.main import main; main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", child, *order], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoint.safetensors").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "generator.safetensors").exists()  # it was in the middle
    resumed = typed(*order)
    assert (resumed.status, resumed.line["trained"]) == (0, True), resumed.err
    whole = typed(*words("generator", eyes, tmp_path / "whole", "--steps", 16, "--json"))
    assert resumed.line == whole.line


def test_what_the_parser_offers_is_what_there_is() -> None:
    """The parser needs no torch, so it has the names twice."""
    assert tuple(PRESETS) == synthesis_parser.SIZES
    assert set(synthesis_parser.NETWORKS) == set(synthesis_commands.KINDS)


# -- release and tune, at an enrolled site, with a coordinator that listens


def eye(number: int, person: int, pixels: np.ndarray[Any, Any] | None = None, label: str | None = None) -> Record:
    """One grey image of one patient, of their own, and nearly so at every visit: untrained networks know no other."""
    if pixels is None:
        dice, noise = np.random.default_rng(1000 + person), np.random.default_rng(number)
        pixels = np.kron(dice.random((8, 8)), np.ones((4, 4))) + noise.normal(0, 0.004, SIDE)
        pixels = np.clip(pixels, 0, 1)
    kept = record(number, person, "ab"[person % 2] if label is None else label)
    return replace(kept, pixels=np.asarray(pixels, np.float32))


@pytest.fixture
def clinic(tmp_path: Path) -> Iterator[Site]:
    """An enrolled site with 40 patients, and a configuration of both mechanisms beside it."""
    for name, document in (("ksalsa", KSALSA), ("anonfaces", ANONFACES)):
        told = toml(changed(document, cohort={"modality": "OT"}, networks={"passes": 2}))
        (tmp_path / f"{name}.toml").write_text(told)
    digests = lay_networks(tmp_path, channels=1)
    with enrolled_site(tmp_path, [eye(n, n // 2) for n in range(80)], digests) as site:
        yield site


def pseudonyms(site: Site) -> list[str]:
    with closing(projects.open_vault(site.home, "main")) as vault:
        return [patient.pseudonym for patient in vault.cohort("OT", (32, 32)).patients]


@pytest.mark.parametrize("mechanism", ["ksalsa", "anonfaces"])
def test_a_release_goes_from_the_vault_to_a_verdict(
    typed: Typed, clinic: Site, tmp_path: Path, mechanism: str
) -> None:
    opened_once(clinic)
    with untouched(clinic):
        dry = typed(
            *at(clinic), "release", mechanism, "--config", tmp_path / f"{mechanism}.toml", "--dry-run", "--json"
        )
    assert (dry.status, dry.line["would_go"], dry.line["samples"]["exact"]) == (0, True, False), dry.err
    said = typed(*at(clinic), "release", mechanism, "--config", tmp_path / f"{mechanism}.toml", "--json")
    assert (said.status, said.line["admitted"], said.line["mechanism"]) == (0, True, mechanism), said.err
    (artifact,) = [path for path in clinic.federation.home.releases.rglob("*") if path.is_file() and _images(path)]
    images, labels = unpack_images(artifact.read_bytes())
    assert images.shape[1:] == (32, 32)
    assert len(labels) == len(images) <= dry.line["samples"]["most"] <= 8
    assert artifact.stat().st_size <= dry.line["bytes"]["most"]
    again = typed(*at(clinic), "release", mechanism, "--config", tmp_path / f"{mechanism}.toml", "--json")
    assert again.status == 1, "everybody has been released as often as the policy admits"


def _images(path: Path) -> bool:
    try:
        return len(unpack_images(path.read_bytes())[0]) > 0
    except ValueError:
        return False


def test_a_configuration_that_is_wrong_says_so_and_nothing_is_priced(
    typed: Typed, clinic: Site, tmp_path: Path
) -> None:
    size = clinic.federation.store.state.size
    for mechanism, config, told in (
        ("ksalsa", "anonfaces.toml", "mechanism: must be ksalsa"),
        ("anonfaces", "gone.toml", "gone.toml cannot be read"),
    ):
        said = typed(*at(clinic), "release", mechanism, "--config", tmp_path / config)
        assert (said.status, told in said.err) == (1, True), said.err
    assert clinic.federation.store.state.size == size


@pytest.mark.parametrize("mechanism", ["ksalsa", "anonfaces"])
def test_tune_writes_a_page_for_the_site_alone_which_names_nobody(
    typed: Typed, clinic: Site, tmp_path: Path, mechanism: str
) -> None:
    page = tmp_path / "k.html"
    order = (*at(clinic), "tune", "--config", tmp_path / f"{mechanism}.toml", "--menu", "3,5,8,10", "--out", page)
    said = typed(*order, "--json")
    assert said.status == 0, said.err
    assert (said.line["page"], said.line["menu"]) == ("k.html", [3, 5, 8, 10])
    assert said.line["recommended"] in (None, 5, 8, 10)
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    raw = page.read_bytes()
    drawn = [base64.b64decode(found) for found in re.findall(rb"base64,([A-Za-z0-9+/=]+)", raw)]
    names = pseudonyms(clinic)
    assert len(names) == 40
    assert len(drawn) >= 3
    assert not [name for name in names for part in (raw, *drawn) if name.encode() in part]
    assert not [name for name in names if name in said.out + said.err + (clinic.home.root / "agent.log").read_text()]
    refused = typed(*order)
    assert (refused.status, "name a new file" in refused.err) == (1, True)
    assert page.read_bytes() == raw


def test_what_tune_tried_stands_in_the_statement_of_the_next_release(
    typed: Typed, clinic: Site, tmp_path: Path
) -> None:
    config = tmp_path / "ksalsa.toml"
    tuned = typed(*at(clinic), "tune", "--config", config, "--menu", "5,9", "--out", tmp_path / "k.html")
    assert "wrote k.html: it is made from patients, so it stays at this site" in tuned.out
    assert "every later release of this project and modality says which k were tried" in tuned.out
    said = typed(*at(clinic), "release", "ksalsa", "--config", config, "--json")
    assert said.status == 0
    ledger = clinic.federation.store
    (admitted,) = [e for n in range(ledger.state.size) if isinstance(e := ledger.line(n).record.entry, Admitted)]
    sealed = ledger.envelope(admitted.envelope)
    assert sealed is not None
    own = clinic.home.sign_key().public_key().public_bytes_raw()
    statement = parse(open_sealed(sealed, PAYLOAD_TYPE, {"self": own}).payload)
    assert isinstance(statement, Release)
    assert statement.menu == "5,9"


@pytest.mark.parametrize("menu", ["5", "8,5", "5,5", "1,5", "five,six", "", "5,", "-5,5"])
def test_a_menu_that_is_none_is_a_mistake_of_usage(menu: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--home", "x", "tune", "--config", "c", "--out", "o", f"--menu={menu}"])
    assert caught.value.code == 2
    assert "two or more ascending numbers from 2 on" in capsys.readouterr().err


def test_tune_refuses_before_a_patient_is_read(
    typed: Typed, clinic: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vault, "cohort", lambda *_: pytest.fail("read"))
    (tmp_path / "diverse.toml").write_text(
        (tmp_path / "ksalsa.toml").read_text().replace("l_diversity = 2", "l_diversity = 4")
    )
    for config, menu, out, told in (
        ("ksalsa.toml", "5,8", "nowhere/k.html", "in an existing folder"),
        ("diverse.toml", "3,8", "k.html", "l_diversity"),
        ("ksalsa.toml", "300,400", "k.html", "the cohort does not qualify"),
    ):
        order = (*at(clinic), "tune", "--config", tmp_path / config, "--menu", menu, "--out", tmp_path / out)
        said = typed(*order)
        assert (said.status, told in said.err) == (1, True), said.err
        assert not (tmp_path / out).exists()


# -- bad input, through the whole of a release

SIDE = (32, 32)
BLANK = np.full(SIDE, 0.25, np.float32)
SPOT = np.zeros((64, 64), np.float32)  # a field of view of 24 pixels, within black
SPOT[20:44, 20:44] = (np.hypot(*np.mgrid[-11.5:12, -11.5:12]) <= 12).astype(np.float32)
SMALL = np.random.default_rng(0).random((16, 16)).astype(np.float32)


@dataclass(frozen=True)
class Bad:
    """What is in the vault, and what must come of it."""

    records: list[Record]
    raises: type[Exception] | None  # None: it is made
    read: bool = False  # only the pixels show it: the grant is spent
    exact: bool = False  # pictures of exactly this size
    most: int = 99  # patients behind everything that is made, at most


BADS = {
    "nobody": Bad([], CohortTooSmallError),
    "four patients": Bad([eye(n, n) for n in range(4)], CohortTooSmallError),
    "one patient with all the images": Bad([eye(n, max(0, n - 36)) for n in range(40)], CohortTooSmallError),
    "no labels": Bad([eye(n, n, label="") for n in range(12)], CohortTooSmallError),
    "labels of a few": Bad([eye(n, n, label="" if n > 3 else None) for n in range(12)], CohortTooSmallError),
    "one class": Bad([eye(n, n, label="a") for n in range(12)], CohortTooSmallError),
    "a class of one, for two clusters": Bad([eye(n, n, label="ab"[n == 0]) for n in range(12)], CohortTooSmallError),
    "a class of one, for one cluster": Bad([eye(n, n, label="ab"[n == 0]) for n in range(9)], None, most=9),
    "few of the size": Bad([eye(n, n, SMALL if n > 3 else None) for n in range(12)], CohortTooSmallError, exact=True),
    "enough of the size": Bad([eye(n, n, SMALL if n > 7 else None) for n in range(16)], None, exact=True, most=8),
    "too small to be fitted": Bad([eye(n, n, SMALL if n > 3 else None) for n in range(12)], CohortTooSmallError),
    "too small a field": Bad([eye(n, n, SPOT if n > 3 else None) for n in range(12)], CohortTooSmallError, read=True),
    "constant images": Bad([eye(n, n, BLANK) for n in range(12)], CohortTooSmallError, read=True),
    "black images": Bad([eye(n, n, 0 * BLANK) for n in range(12)], CohortTooSmallError, read=True),
    "one constant image": Bad([eye(n, n, BLANK if n == 3 else None) for n in range(12)], None, most=11),
}


@pytest.mark.parametrize("name", ["ksalsa", "anonfaces"])
@pytest.mark.parametrize("bad", BADS.values(), ids=BADS)
def test_bad_input_is_refused_before_budget_is_spent_where_it_can_be_known_and_k_is_never_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Bad, name: str
) -> None:
    mechanism: KSalsa | AnonFaces = AnonFaces(5, 2, codec(1), (recogniser(0), recogniser(1)), Mixing(5))
    if name == "ksalsa":
        mechanism = KSalsa(5, 2, codec(1), RandomFeatures(), RandomFeatures(), Alignment(steps=2))
    s, reads, whole = site_world(tmp_path), [], Vault.cohort
    monkeypatch.setattr(Vault, "cohort", lambda self, *a, **more: (reads.append(1), whole(self, *a, **more))[1])
    (tmp_path / "vault").mkdir()
    with closing(open_vault(tmp_path / "vault")) as vault:
        vault.keep_all(bad.records)
        s.site = replace(s.site, vault=vault)
        selection = Selection("OT", SIDE, fit=not bad.exact)
        before = s.intake.register.store.state.size
        if bad.raises is None:
            signed, verdict = release_synthetic(s.site, mechanism, selection, np.random.default_rng(1))
            behind = [set(cluster) for one in vault.note("releases") for cluster in one["clusters"]]
            assert verdict.admitted
            assert all(len(members) >= 5 for members in behind)
            assert sum(map(len, behind)) == len(set().union(*behind)) <= bad.most
            assert len(unpack_images(signed.artifact)[0]) == len(behind)
            return
        with pytest.raises(bad.raises) as caught:
            release_synthetic(s.site, mechanism, selection, np.random.default_rng(1))
        assert not any(character.isdigit() for character in str(caught.value))
        assert key_of(0, 3)[:20] not in str(caught.value)
        assert (len(reads), s.spent("k")) == ((1, ((0, 1), (0, 1))) if bad.read else (0, ((0, 0), (0, 0))))
        assert bad.read or s.intake.register.store.state.size == before, "nobody outside hears of it"


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -0.1, 1.1])
def test_what_is_no_intensity_gets_no_further_than_the_first_noun(wrong: float) -> None:
    pixels = np.full(SIDE, 0.5, np.float32)
    pixels[3, 3] = wrong
    with pytest.raises(ValueError, match="finite"):
        Picture(pixels, "a")
    with pytest.raises(ValueError, match=r"finite|intensities"):
        codec(1).encode(pixels[None])
