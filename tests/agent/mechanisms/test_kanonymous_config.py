"""A release's configuration: every mistake at once, nothing taken on a file's own word, both examples as printed."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from agent.domain import Split
from agent.errors import ReviewRejectedError, SiteConfigError
from agent.mechanisms.common.config import EXTRACTORS, GENERATORS
from agent.mechanisms.kanonymous_config import KAnonymousConfig, read_synthesis
from agent.mechanisms.registry import AnonFaces, KSalsa
from agent.models.features.extractors import features_bytes
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.stylegan.network import Generator, generator_bytes
from agent.models.stylegan.restyle import Encoder, architecture_for, encoder_bytes, fingerprint
from agent.models.stylegan.restyle_published import ResNetEncoder
from agent.models.training_loop import seeded
from agent.models.weights import WeightsError
from agent.release.pipeline import release_synthetic
from tests.support.distillation_networks import verifier_file
from tests.support.mechanism_documents import ANONFACES, DOCS, KSALSA, changed, lay_networks, sha, toml
from tests.support.networks import files
from tests.support.published_weights import (
    decoder_state,
    head_names,
    norm_names,
    random_state,
    resnet34_body_names,
    shapes_of,
    tiny_ada,
    torch_bytes,
)
from tests.support.site_world import site_world

ROOT = Path(__file__).parents[3]


def read(
    folder: Path, document: Mapping[str, Any], name: str = "", vouched: frozenset[str] | None = None
) -> KAnonymousConfig:
    digests = lay_networks(folder)
    (folder / "release.toml").write_text(toml(document))
    return read_synthesis(folder / "release.toml", name, digests if vouched is None else vouched)


def refused(folder: Path, document: Mapping[str, Any], name: str = "") -> str:
    with pytest.raises((SiteConfigError, WeightsError)) as caught:
        read(folder, document, name)
    return str(caught.value)


# -- what is read


@pytest.mark.parametrize("name", ["ksalsa", "anonfaces"])
def test_the_example_in_the_documents_is_read_as_it_stands(tmp_path: Path, name: str) -> None:
    digests = lay_networks(tmp_path)
    (tmp_path / f"{name}.toml").write_text((DOCS / f"{name}.example.toml").read_text())
    made = read_synthesis(tmp_path / f"{name}.toml", name, digests)
    assert made.mechanism.name == name
    assert (made.mechanism.k, made.mechanism.l_diversity) == (11, 2)
    assert (made.selection.modality, made.selection.shape, made.selection.fit) == ("OP", (32, 32, 3), True)
    assert set(made.mechanism.components().values()) == {"public"}


@pytest.mark.parametrize("name", ["ksalsa", "anonfaces"])
def test_what_the_example_leaves_out_can_be_put_in(tmp_path: Path, name: str) -> None:
    """Every line that is a comment there is a key that exists, but for a device that this machine may not have."""
    text = re.sub(r"^# (?=\[|\w+ = )", "", (DOCS / f"{name}.example.toml").read_text(), flags=re.MULTILINE)
    digests = lay_networks(tmp_path)
    for place, part in enumerate(("verifier", "unseen")):
        (tmp_path / f"{part}-0.safetensors").write_bytes(raw := verifier_file(place))
        text, digests = text.replace(f"{place + 2:064}", sha(raw)), digests | {sha(raw)}
    (tmp_path / "release.toml").write_text(text.replace('device = "cuda"', 'device = "cpu"'))
    made = read_synthesis(tmp_path / "release.toml", name, digests)
    assert made.vetting is not None
    if name == "ksalsa":
        assert made.selection.split == Split("study-1", {"release": 4, "held-out": 1})
        assert (made.selection.part, made.selection.body_part) == ("release", "EYE")
        assert isinstance(made.mechanism, KSalsa)
        assert made.mechanism.views is not None
        assert made.mechanism.codec.passes == 5


def test_a_configuration_of_either_mechanism_is_read_when_none_was_asked_for(tmp_path: Path) -> None:
    assert isinstance(read(tmp_path / "a", KSALSA).mechanism, KSalsa)
    assert isinstance(read(tmp_path / "b", ANONFACES).mechanism, AnonFaces)


def test_paths_are_relative_to_the_configuration_and_may_be_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = lay_networks(tmp_path / "nets")
    (tmp_path / "configuration").mkdir()
    monkeypatch.chdir("/")
    for place in ("../nets", str(tmp_path / "nets")):
        files_ = {key: f"{place}/{key}.safetensors" for key in ("generator", "encoder")}
        (tmp_path / "configuration" / "a.toml").write_text(toml(changed(KSALSA, networks=files_)))
        assert read_synthesis(tmp_path / "configuration" / "a.toml", "ksalsa", digests).mechanism.shape == (32, 32, 3)


def test_the_alignment_and_the_views_are_those_of_the_file(tmp_path: Path) -> None:
    more = {"alignment": {"steps": 7, "lam": 0.25, "grid": {"side": 2}}, "views": {"count": 3, "sigma": 0.2}}
    made = read(tmp_path, changed(KSALSA, **more)).mechanism
    assert isinstance(made, KSalsa)
    assert (made.alignment.steps, made.alignment.lam, made.alignment.grid.side) == (7, 0.25, 2)
    assert made.views is not None
    assert (made.views.count, made.views.sigma) == (3, 0.2)


def test_the_mixing_takes_its_k_from_the_clusters(tmp_path: Path) -> None:
    made = read(tmp_path, changed(ANONFACES, mixing={"rounds": 3})).mechanism
    assert isinstance(made, AnonFaces)
    assert (made.mixing.k, made.mixing.rounds) == (5, 3)


# -- what is refused


@pytest.mark.parametrize("document", [KSALSA, ANONFACES], ids=["ksalsa", "anonfaces"])
def test_a_mistake_in_a_table_is_told_before_a_network_is_looked_for(
    tmp_path: Path, document: Mapping[str, Any]
) -> None:
    (tmp_path / "release.toml").write_text(toml(changed(document, clusters={"k": 1})))
    with pytest.raises(SiteConfigError, match=r"clusters"):  # and not WeightsError: there is no network here
        read_synthesis(tmp_path / "release.toml", "", frozenset())
    (tmp_path / "release.toml").write_text(toml(document))
    with pytest.raises(WeightsError):
        read_synthesis(tmp_path / "release.toml", "", frozenset())


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    wrong = {
        "mechanism": "ksalsa",
        "cohort": {"fit": "yes", "parts": ["train:4"]},
        "clusters": {"k": 1, "l": 2},
        "networks": {"generator": "g", "styles": "random"},
        "alignment": {"steps": 0},
        "views": {"count": 0},
        "mixing": {"rounds": 1},
        "extra": {},
    }
    told = refused(tmp_path, wrong)
    for part in (
        *("unknown table: extra", "mixing: not of ksalsa", "cohort.modality: missing", "cohort.fit: must be a bool"),
        *("clusters: unknown keys: l", "networks: unknown keys: styles", "alignment: ", "views: "),
    ):
        assert part in told, part


CASES: list[tuple[str, Mapping[str, Any], Mapping[str, Any], str]] = [
    ("another mechanism", KSALSA, {"mechanism": "ksame"}, "mechanism: must be ksalsa or anonfaces"),
    ("no mechanism", KSALSA, {"mechanism": None}, "mechanism: must be"),
    ("no cohort", KSALSA, {"cohort": None}, "cohort: missing"),
    ("no networks", ANONFACES, {"networks": None}, "networks: missing"),
    ("a table that is none", KSALSA, {"clusters": 5}, "clusters: must be a table"),
    ("mixing that is none", ANONFACES, {"mixing": 5}, "mixing: must be a table"),
    ("a k of the mixing", ANONFACES, {"mixing": {"k": 7}}, "mixing.k: is set in [clusters]"),
    ("an alignment of faces", ANONFACES, {"alignment": {"steps": 1}}, "alignment: not of anonfaces"),
    ("views of faces", ANONFACES, {"views": {"count": 2}}, "views: not of anonfaces"),
    ("a style of faces", ANONFACES, {"networks": {"style": "random"}}, "networks.style: not of anonfaces"),
    ("k of one", KSALSA, {"clusters": {"k": 1, "l_diversity": 1}}, "clusters: k must be"),
    ("more labels than patients", ANONFACES, {"clusters": {"k": 5, "l_diversity": 6}}, "l_diversity is larger"),
    ("a k that is no number", KSALSA, {"clusters": {"k": "5"}}, "clusters.k: must be a int"),
    ("one recogniser", ANONFACES, {"networks": {"recognisers": ["recogniser-0.safetensors"]}}, "two different"),
    ("the same twice", ANONFACES, {"networks": {"recognisers": ["recogniser-0.safetensors"] * 2}}, "two different"),
    ("no encoder", KSALSA, {"networks": {"encoder": None}}, "networks: the generator needs an encoder"),
    ("no passes", KSALSA, {"networks": {"passes": 0}}, "passes: between"),
    ("no such device", KSALSA, {"networks": {"device": "gpu"}}, "device: "),
    ("a device too many", KSALSA, {"networks": {"device": "cuda:99"}}, "this machine has no cuda:99"),
    ("no modality", KSALSA, {"cohort": {"modality": ""}}, "cohort: a selection has a modality"),
    ("no label", KSALSA, {"cohort": {"labels": [""]}}, "labelled images only"),
    ("labels in one word", KSALSA, {"cohort": {"labels": "01"}}, "cohort.labels: must be a list"),
    ("no instance", KSALSA, {"cohort": {"min_instances": 0}}, "one instance or more"),
    ("parts of nothing", KSALSA, {"cohort": {"parts": ["a:1", "b:1"]}}, "give the split a name"),
    ("a part of nothing", KSALSA, {"cohort": {"part": "a"}}, "give the split a name"),
    ("no step", KSALSA, {"alignment": {"steps": 0}}, "alignment: "),
    ("no such word", KSALSA, {"alignment": {"scale": "loud"}}, "alignment.scale"),
    ("a layer too deep", KSALSA, {"alignment": {"steps": 1, "layer": 40}}, "cannot be aligned"),
    ("a grid too fine", KSALSA, {"alignment": {"steps": 1, "grid": {"side": 7}}}, "cannot be aligned"),
    ("a loss beyond the picture", KSALSA, {"alignment": {"steps": 1, "until": 64}}, "cannot be aligned"),
    ("a file that is not there", KSALSA, {"networks": {"generator": "g.bin"}}, "g.bin: No such file"),
    ("a folder", KSALSA, {"networks": {"encoder": "."}}, "Is a directory"),
    ("an encoder for a generator", KSALSA, {"networks": {"generator": "encoder.safetensors"}}, "holds no generator"),
    ("a generator for features", KSALSA, {"networks": {"style": "generator.safetensors"}}, "holds no features"),
    ("a kind that is unknown", KSALSA, {"networks": {"content": "vgg20:f"}}, "is not a feature network; use one of"),
    ("a kind that draws none", KSALSA, {"networks": {"generator": "vgg19:f"}}, "is not a generator; use one of"),
    ("an encoder too many", KSALSA, {"networks": {"generator": "restyle:f"}}, "which contains one"),
    ("no recogniser", ANONFACES, {"networks": {"recognisers": ["encoder.safetensors"] * 2}}, "holds no recogniser"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "change", "told"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_mistake_is_a_sentence(
    tmp_path: Path, document: Mapping[str, Any], change: Mapping[str, Any], told: str
) -> None:
    assert told in refused(tmp_path, changed(document, **change))


def test_a_configuration_of_the_other_mechanism_is_refused(tmp_path: Path) -> None:
    assert "mechanism: must be ksalsa" in refused(tmp_path, ANONFACES, "ksalsa")
    assert "mechanism: must be anonfaces" in refused(tmp_path, KSALSA, "anonfaces")


@pytest.mark.parametrize(
    "parts",
    [
        *(["train"], ["train:"], [":4"], ["train:x"], ["train:0", "test:1"], ["train:-1", "test:1"], ["train: 4"]),
        *(["train:4.5", "test:1"], ["train:4", "train:1"], ["train:4:5", "test:1"], ["train:4", ""]),
    ],
)
def test_parts_that_are_written_otherwise_are_refused_with_how_to_write_them(
    tmp_path: Path, parts: list[str]
) -> None:
    told = refused(tmp_path, changed(KSALSA, cohort={"split": "s", "parts": parts, "part": "train"}))
    assert 'cohort: parts are written "NAME:SHARE"' in told


@pytest.mark.parametrize(
    "cohort",
    [
        {"split": "s", "parts": ["a:1"], "part": "a"},
        {"split": "s", "parts": ["a:1", "b:1"]},
        {"split": "s", "parts": ["a:1", "b:1"], "part": "c"},
        {"split": "S!", "parts": ["a:1", "b:1"], "part": "a"},
        {"split": "s", "part": "a"},
    ],
)
def test_a_split_that_makes_no_sense_is_refused(tmp_path: Path, cohort: dict[str, Any]) -> None:
    assert "cohort: a split" in refused(tmp_path, changed(KSALSA, cohort=cohort))


@pytest.mark.parametrize("raw", [b"mechanism = ksalsa", b"\xff\xfe", b""])
def test_what_is_no_configuration_is_named_and_nothing_of_it_is_told(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.toml").write_bytes(raw)
    with pytest.raises(SiteConfigError, match=r"a\.toml"):
        read_synthesis(tmp_path / "a.toml", "", frozenset())
    with pytest.raises(SiteConfigError, match=r"b\.toml cannot be read"):
        read_synthesis(tmp_path / "b.toml", "", frozenset())


def test_an_encoder_of_another_generator_is_refused(tmp_path: Path) -> None:
    with seeded(99):
        other = Generator(read(tmp_path, KSALSA).mechanism.codec.generator.architecture)
        encoder = Encoder(architecture_for(other.architecture))
    (tmp_path / "foreign.safetensors").write_bytes(encoder_bytes(encoder, {"generator": fingerprint(other)}))
    told = refused(tmp_path, changed(KSALSA, networks={"encoder": "foreign.safetensors"}))
    assert "trained for another generator" in told


def test_an_encoder_of_another_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grey.safetensors").write_bytes(files(1)[1])
    assert "release.toml: " in refused(tmp_path, changed(KSALSA, networks={"encoder": "grey.safetensors"}))


# -- who vouches (P6)


@pytest.mark.parametrize(
    ("document", "whose"), [(KSALSA, "generator"), (KSALSA, "encoder"), (ANONFACES, "recogniser-1")]
)
def test_what_nobody_vouches_for_is_private_and_not_even_priced(
    tmp_path: Path, document: Mapping[str, Any], whose: str
) -> None:
    """P6 broken on purpose: a network that may have seen the cohort is a function of every patient in it."""
    digests = lay_networks(tmp_path)
    left_out = sha((tmp_path / f"{whose}.safetensors").read_bytes())
    made = read(tmp_path, document, vouched=digests - {left_out})
    assert made.mechanism.components()[whose.partition("-")[0]] == "private"
    s = site_world(tmp_path, patients=12)
    with pytest.raises(ReviewRejectedError, match="provenance"):
        release_synthetic(s.site, made.mechanism, replace(made.selection, modality="OT"), np.random.default_rng(0))
    assert (s.vault.reads, s.spent("k")) == (0, ((0, 0), (0, 0)))


def test_a_file_that_calls_itself_public_is_not_believed(tmp_path: Path) -> None:
    lay_networks(tmp_path)
    boast = {"provenance": "public", "origin": "public"}
    (tmp_path / "boast.safetensors").write_bytes(
        generator_bytes(read(tmp_path, KSALSA).mechanism.codec.generator, boast)
    )
    made = read(tmp_path, changed(KSALSA, networks={"generator": "boast.safetensors"}))
    assert made.mechanism.components()["generator"] == "private"


def learned_features() -> bytes:
    with seeded(3):
        trunk = Trunk(TrunkArchitecture(16, 3, 8, 3))
    return features_bytes("learned", trunk, {})


@cache
def vgg19_file() -> bytes:
    from agent.models.features.vgg import Vgg19
    from agent.models.weights import Origin

    shapes = shapes_of(lambda: Vgg19(Origin("file", "0" * 64)))
    return safetensors.torch.save(random_state(shapes, gain=0.05))


def test_features_are_random_or_of_a_file_or_published(tmp_path: Path) -> None:
    own = learned_features()
    tmp_path.joinpath("f.safetensors").write_bytes(own)
    tmp_path.joinpath("vgg.safetensors").write_bytes(vgg19_file())
    document = changed(KSALSA, networks={"style": "vgg19-unnormalised:vgg.safetensors", "content": "f.safetensors"})
    made = read(tmp_path, document, vouched=lay_networks(tmp_path) | {sha(vgg19_file())}).mechanism
    assert isinstance(made, KSalsa)
    assert (made.style.name, made.style.origin.sha256) == ("vgg19-unnormalised", sha(vgg19_file()))
    assert made.components() == {"encoder": "public", "generator": "public", "style": "public", "content": "private"}
    plain = read(tmp_path, KSALSA).mechanism
    assert isinstance(plain, KSalsa)
    assert plain.style.origin.provenance == "random"
    assert plain.form != made.form


def test_a_published_file_that_nobody_vouches_for_is_not_even_opened(tmp_path: Path) -> None:
    (tmp_path / "vgg.bin").write_bytes(b"anything")
    for key, word in (
        ("style", "vgg19:vgg.bin"),
        ("content", "moco:vgg.bin"),
        ("generator", "stylegan2-ada:vgg.bin"),
    ):
        told = refused(tmp_path, changed(KSALSA, networks={key: word}))
        assert "vgg.bin: get its SHA-256 from its authors" in told


def test_every_kind_of_published_file_is_either_drawn_or_looked_with() -> None:
    from agent.models.published.loading import OFFICIAL

    assert sorted((*GENERATORS, *EXTRACTORS)) == sorted(OFFICIAL)


# -- published generators


def ada_file() -> tuple[bytes, Generator]:
    g = tiny_ada()
    return safetensors.torch.save({f"G_ema.{n}": t.contiguous() for n, t in g.state_dict().items()}), g


def own_encoder(generator: Generator) -> bytes:
    with seeded(4):
        encoder = Encoder(architecture_for(generator.architecture))
        torch.nn.init.normal_(encoder.layers.weight, std=0.05)
    return encoder_bytes(encoder, {"generator": fingerprint(generator)})


def pictures(shape: tuple[int, ...], count: int = 3) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(2).random((count, *shape)).astype(np.float32)


def test_a_published_stylegan_with_an_encoder_of_our_own_is_a_codec(tmp_path: Path) -> None:
    raw, theirs = ada_file()
    from agent.models.published.loading import generator_of

    read_back = generator_of(dict(theirs.state_dict()))  # the sizes that a published file tells may be other words
    encoder = own_encoder(read_back)
    (tmp_path / "ada.safetensors").write_bytes(raw)
    (tmp_path / "e.safetensors").write_bytes(encoder)
    networks = {"generator": "stylegan2-ada:ada.safetensors", "encoder": "e.safetensors", "passes": 2}
    made = read(tmp_path, changed(KSALSA, networks=networks), vouched=frozenset({sha(raw), sha(encoder)})).mechanism
    assert made.shape == (16, 16, 3)
    assert set(made.components().values()) == {"public"}
    assert made.codec.origins["generator"].sha256 == sha(raw)
    codes = made.codec.encode(pictures(made.shape))
    ws = torch.from_numpy(codes).reshape(3, theirs.architecture.num_ws, -1)
    with torch.no_grad():
        theirs_drawn = theirs.synthesis(ws, noise="const")
    ours = made.codec.decode(codes)
    expected = ((theirs_drawn.clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1).numpy()
    assert np.abs(ours.astype(np.float64) - expected).max() <= 1
    with pytest.raises(WeightsError, match="get its SHA-256"):
        read(tmp_path, changed(KSALSA, networks=networks), vouched=frozenset({sha(encoder)}))
    unvouched = read(tmp_path, changed(KSALSA, networks=networks), vouched=frozenset({sha(raw)})).mechanism
    assert unvouched.components()["encoder"] == "private"
    foreign = own_encoder(Generator(theirs.architecture))
    (tmp_path / "e.safetensors").write_bytes(foreign)
    with pytest.raises(SiteConfigError, match="another generator"):
        read(tmp_path, changed(KSALSA, networks=networks), vouched=frozenset({sha(raw), sha(foreign)}))


@cache
def restyle_file() -> bytes:
    """A ReStyle file of 8 px with four heads, in the published layout."""
    decoder = decoder_state(8, {4: 32, 8: 16}, w_dim=512, layers=1)
    shapes = {"conv1.weight": (64, 6, 7, 7), "relu.weight": (64,)} | norm_names("bn1", 64)
    encoder = random_state(shapes | resnet34_body_names() | head_names(4), seed=2, gain=0.02)
    state = {f"decoder.{n}": t for n, t in decoder.items()} | {f"encoder.{n}": t for n, t in encoder.items()}
    return torch_bytes({"state_dict": state, "latent_avg": torch.full((512,), 0.25), "opts": {"input_nc": 6}})


def test_a_published_restyle_file_is_a_codec_by_itself(tmp_path: Path) -> None:
    raw = restyle_file()
    (tmp_path / "restyle.pt").write_bytes(raw)
    networks = {"generator": "restyle:restyle.pt", "encoder": None, "passes": 2}
    made = read(tmp_path, changed(KSALSA, networks=networks), vouched=frozenset({sha(raw)})).mechanism
    assert made.shape == (8, 8, 3)
    assert isinstance(made.codec.encoder, ResNetEncoder)
    assert made.codec.passes == 2
    assert made.components() == {"encoder": "public", "generator": "public", "style": "public", "content": "public"}
    images = pictures(made.shape)
    codes = made.codec.encode(images)
    assert codes.shape == (3, 4 * 512)
    # by hand: w1 = w0 + E(x || G(w0)), w2 = w1 + E(x || G(w1))
    codec, x = made.codec, torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1
    with torch.no_grad():
        w = torch.full((3, 4, 512), 0.25)
        for _ in range(2):
            w = w + codec.encoder(x, codec.generator.synthesis(w, noise="const"))
    assert np.allclose(codes, w.flatten(1).numpy(), atol=1e-4)
    assert made.codec.decode(codes).shape == (3, 8, 8, 3)
    with pytest.raises(WeightsError, match="get its SHA-256"):
        read(tmp_path, changed(KSALSA, networks=networks), vouched=frozenset())


def test_a_published_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    raw, _ = ada_file()
    (tmp_path / "ada.safetensors").write_bytes(raw)
    networks = {"generator": "restyle:ada.safetensors", "encoder": None}
    with pytest.raises(WeightsError):
        read(tmp_path, changed(KSALSA, networks=networks), vouched=frozenset({sha(raw)}))


def test_code_in_a_published_file_never_runs_though_somebody_vouches(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.mkdir, (tmp_path / "ran",)

    out = io.BytesIO()
    torch.save({"state_dict": {"conv1.weight": torch.ones(1)}, "opts": Bomb()}, out)
    (tmp_path / "bomb.pt").write_bytes(out.getvalue())
    for key, word in (("generator", "stylegan2-ada:bomb.pt"), ("style", "vgg19:bomb.pt")):
        with pytest.raises(WeightsError, match="never run"):
            read(
                tmp_path,
                changed(KSALSA, networks={key: word}),
                vouched=lay_networks(tmp_path) | {sha(out.getvalue())},
            )
    assert not (tmp_path / "ran").exists()
