"""Sets of several hospitals become one training set with provenance; models of several runs become one model."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file

from coordinator.pools.datasheet import CONFORMS_TO, CONTEXT, OVERLAP, Card, PoolReport
from coordinator.pools.deduplication import PoolImage, merge, near_duplicates, perceptual_hash, pixel_digest, shuffled
from coordinator.pools.export import ExportOptions, as_json, export_pool, list_releases, read_books
from coordinator.pools.model_averaging import average_models, average_runs, shares_of
from coordinator.pools.selection import (
    LEVELS,
    AdmittedRelease,
    PoolLedger,
    PoolRefusedError,
    SelectionCriteria,
    books_of,
    budget,
    select,
    source_of,
    weakest,
)
from coordinator.storage.directory import CoordinatorDirectory
from policies.accounting.accountant import epsilon_of
from policies.accounting.claims import Claim, KAnonymous, NoClaim, SubsampledGaussian
from policies.accounting.rdp import cost, epsilon_nano
from policies.accounting.rounding import epsilon_text
from policies.ledger_service import ArtifactFindings, LedgerService
from policies.statements import claim_from, release_id
from protos.artifacts.arrays import pack_images, pack_vector
from protos.artifacts.strict_safetensors import pack_weights
from tests.support.image_sets import labels, scene
from tests.support.ledger_world import BOTH, Hospital, open_register, policy

K5, K7 = (KAnonymous(k=k, l_diversity=2, releases_per_patient=1) for k in (5, 7))
STEPS = SubsampledGaussian(sampling_rate=0.05, noise_multiplier=2.0, steps=20)
SHARD = 40_960
SETTINGS = 'listen = "127.0.0.1:0"\n'


@dataclass
class World:
    """A ledger with two hospitals, and a shelf as the coordinator lays it out."""

    root: Path
    register: LedgerService = field(init=False)
    home: CoordinatorDirectory = field(init=False)

    def __post_init__(self) -> None:
        often = policy(max_releases_per_patient=9)
        self.north, self.south = Hospital("north", often), Hospital("south", often)
        self.home = CoordinatorDirectory(self.root / "home")
        self.home.releases.mkdir(parents=True)
        (self.home.root / "coordinator.toml").write_text(SETTINGS)
        self.register = open_register(self.home.ledger, self.north, self.south, key=Ed25519PrivateKey.generate())

    @property
    def ledger(self) -> PoolLedger:
        store = self.register.store
        return books_of(store.line(i).record for i in range(store.state.size))

    def reserve(self, hospital: Hospital, grant: str, claim: Claim, run: str = "", modality: str = "OT") -> None:
        asked = hospital.reservation(grant, claim, "federated" if run else "ksame", run)
        asked = dataclasses.replace(asked, modality=modality)
        verdict = self.register.reserve(f"reserve-{grant}", asked, hospital.seal(asked))
        assert verdict.admitted, verdict.findings

    def submit(self, hospital: Hospital, grant: str, body: bytes, **changes: Any) -> tuple[str, bytes]:
        digest = hashlib.sha256(body).hexdigest()
        release = hospital.release(grant, artifact_sha256=digest, artifact_bytes=len(body), **changes)
        envelope = hospital.seal(release)
        verdict = self.register.admit(f"submit-{release.release[8:40]}", release, envelope, ArtifactFindings())
        assert verdict.admitted, verdict.findings
        return release.release, envelope

    def images(
        self, hospital: Hospital, grant: str, images: NDArray[np.uint8], claim: KAnonymous = K5, **more: Any
    ) -> str:
        """An admitted image set on the shelf."""
        self.reserve(hospital, grant, claim, modality=more.get("modality", "OT"))
        named = more.pop("labels", labels(len(images)))
        body = pack_images(images, named)
        release, envelope = self.submit(hospital, grant, body, claim=claim, **more)
        folder = self.home.releases / release
        folder.mkdir()
        (folder / "images.tar").write_bytes(body)
        (folder / "envelope.json").write_bytes(envelope)
        (folder / "certificate.json").write_text("{}")
        return release

    def private(self, hospital: Hospital, grant: str, images: NDArray[np.uint8]) -> str:
        """An admitted image set of level A: several Gaussian claims, granted as one."""
        asked = hospital.reservation(grant, BOTH, "privimage")
        assert self.register.reserve(f"reserve-{grant}", asked, hospital.seal(asked)).admitted
        opened = self.register.store.state.accounts[f"{hospital.name}/rdp"].opened
        nano, body = epsilon_nano(BOTH, float(opened.delta), opened.order), pack_images(images, labels(len(images)))
        facts = {"mechanism": "privimage", "claim": BOTH, "components": dict(asked.components)}
        release, envelope = self.submit(hospital, grant, body, epsilon_nano=nano, delta=opened.delta, **facts)
        folder = self.home.releases / release
        folder.mkdir()
        (folder / "images.tar").write_bytes(body)
        (folder / "envelope.json").write_bytes(envelope)
        (folder / "certificate.json").write_text("{}")
        return release

    def run(self, run: str, vector: NDArray[np.float32], claim: SubsampledGaussian = STEPS) -> None:
        """A finished run of one round of both hospitals, with this model."""
        for hospital in (self.north, self.south):
            grant = f"{run}-{hospital.name}"
            self.reserve(hospital, grant, claim, run)
            opened = self.register.store.state.accounts[f"{hospital.name}/rdp"].opened
            nano = epsilon_nano(claim, float(opened.delta), opened.order)
            facts = {"mechanism": "federated", "artifact_type": "update", "claim": claim, "run": run, "round": 1}
            facts |= {
                "epsilon_nano": nano,
                "delta": opened.delta,
                "components": {"centre": "public", "initial": "public"},
            }
            self.submit(hospital, grant, pack_vector(vector), **facts)
        body = pack_vector(vector)
        self.register.close_round(run, 1, ["north", "south"], hashlib.sha256(body).digest())
        (self.home.releases / run).mkdir()
        (self.home.releases / run / "model.safetensors").write_bytes(body)

    def export(self, name: str = "pool", wanted: SelectionCriteria | None = None, **options: Any) -> PoolReport:
        chosen = ExportOptions(**{"shard_bytes": SHARD, **options})
        return export_pool(self.home, self.ledger, self.root / name, wanted or SelectionCriteria(), chosen)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    w = World(tmp_path)
    yield w
    w.register.store.close()


@pytest.fixture
def pooled(world: World) -> World:
    """Two hospitals with 14 and 20 images, three of which they share."""
    shared = scene(0, 3)
    world.images(world.north, "g-north", np.concatenate([shared, scene(1, 11)]))
    world.images(world.south, "g-south", np.concatenate([scene(2, 15), shared, scene(3, 2)]), K7)
    return world


def named(world: World, hospital: str) -> str:
    return release_id(hospital, f"g-{hospital}", 0)


def samples(pool: Path) -> list[dict[str, Any]]:
    """What a plain reader of the shards sees, in order."""
    out: list[dict[str, Any]] = []
    for shard in sorted(pool.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                key, _, kind = member.name.partition(".")
                body = archive.extractfile(member)
                assert body is not None
                if not out or out[-1]["key"] != key:
                    out.append({"key": key})
                out[-1][kind] = body.read()
    return out


def decoded(png: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image)


def test_a_pool_holds_every_image_once_with_all_of_its_sources(pooled: World) -> None:
    report = pooled.export()
    found = samples(pooled.root / "pool")
    assert report.samples == len(found) == 31
    assert report.duplicates == 3
    originals: dict[bytes, list[tuple[str, int, str]]] = {}
    for hospital, seeds in (("north", ((0, 3), (1, 11))), ("south", ((2, 15), (0, 3), (3, 2)))):
        images = np.concatenate([scene(*s) for s in seeds])
        for i, (image, label) in enumerate(zip(images, labels(len(images)), strict=True)):
            originals.setdefault(pixel_digest(image), []).append((hospital, i, label))
    for sample in found:
        said, image = json.loads(sample["json"]), decoded(sample["png"])
        places = originals.pop(pixel_digest(image))
        assert [(s["site"], s["index"]) for s in said["sources"]] == [(site, i) for site, i, _ in places]
        assert {said["label"]} == {label for *_, label in places}
        assert {s["k"] for s in said["sources"]} == {{"north": 5, "south": 7}[site] for site, *_ in places}
        assert all(s["claim"]["kind"] == "k-anonymous" for s in said["sources"])
    assert not originals
    assert [part.shared for part in report.parts] == [3, 3]


def test_images_with_one_look_and_two_labels_are_left_out_and_counted(world: World) -> None:
    world.images(world.north, "g-north", scene(0, 4), labels=["clear"] * 4)
    world.images(world.south, "g-south", scene(0, 5), labels=["effusion", "clear", "clear", "clear", "clear"])
    report = world.export()
    assert (report.samples, report.contradictions) == (4, 1)
    assert pixel_digest(scene(0, 1)[0]) not in {pixel_digest(decoded(s["png"])) for s in samples(world.root / "pool")}
    assert "1 image left out because hospitals label" in (world.root / "pool" / "README.md").read_text()


def test_the_same_pool_has_the_same_bytes_and_another_seed_another_order(pooled: World) -> None:
    pooled.export("first", seed=7)
    pooled.export("second", seed=7)
    pooled.export("third", seed=8)
    files = {p.name: p.read_bytes() for p in (pooled.root / "first").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (pooled.root / "second").iterdir()}
    first, third = ([s["png"] for s in samples(pooled.root / n)] for n in ("first", "third"))
    assert first != third
    assert sorted(first) == sorted(third)
    assert not any(name.startswith(".") or name.endswith(".done") for name in files)


def test_sites_do_not_cluster_after_the_shuffle(pooled: World) -> None:
    pooled.export()
    order = [json.loads(s["json"])["site"] for s in samples(pooled.root / "pool")]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > 8  # side by side there would be one; 14.6 are expected of 14 and 17 in random order


def test_shards_are_plain_ustar_of_bounded_size(pooled: World) -> None:
    report = pooled.export()
    assert len(report.shards) > 1
    for shard in report.shards:
        path = pooled.root / "pool" / shard.name
        raw = path.read_bytes()
        assert len(raw) == shard.size <= SHARD
        assert hashlib.sha256(raw).hexdigest() == shard.sha256
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            assert len(members) == 3 * shard.samples
            for m in members:
                assert (m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) == (0, 0, 0, "", "", 0o644)
                assert m.isreg()
        assert raw[257:265] == b"ustar\x0000"
    with pytest.raises(PoolRefusedError, match="does not fit"):
        pooled.export("tiny", shard_bytes=20_480)


def test_a_torch_loader_trains_on_the_shards(pooled: World) -> None:
    pooled.export()
    pool = pooled.root / "pool"
    classes = json.loads((pool / "classes.json").read_text())
    assert classes == {"clear": 0, "effusion": 1}

    class Shards(torch.utils.data.IterableDataset[tuple[torch.Tensor, int]]):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
            for s in samples(pool):
                yield torch.from_numpy(decoded(s["png"]).astype(np.float32) / 255), int(s["cls"])
                assert classes[json.loads(s["json"])["label"]] == int(s["cls"])

    batches = list(torch.utils.data.DataLoader(Shards(), batch_size=8))
    assert [len(y) for _, y in batches] == [8, 8, 8, 7]
    assert batches[0][0].shape == (8, 12, 12)
    model = torch.nn.Linear(144, 2)
    loss = torch.nn.functional.cross_entropy(model(batches[0][0].flatten(1)), batches[0][1])
    loss.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(loss.item())


def test_the_checksums_are_those_of_the_files(pooled: World) -> None:
    pooled.export()
    pool = pooled.root / "pool"
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=pool, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in pool.iterdir()} == {"SHA256SUMS"} | {
        line.split("  ")[1] for line in (pool / "SHA256SUMS").read_text().splitlines()
    }


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))


def _other_label(folder: Path) -> None:
    """A set in its proper form, and not the one that was admitted."""
    (folder / "images.tar").write_bytes(pack_images(np.concatenate([scene(0, 3), scene(1, 11)]), ["clear"] * 14))


def _swap(folder: Path) -> None:
    """The folder of another admitted release under this one's name."""
    other = next(p for p in folder.parent.iterdir() if p != folder)
    for name in ("images.tar", "envelope.json"):
        shutil.copy(other / name, folder / name)


TAMPERED: list[tuple[str, Callable[[Path], None]]] = [
    ("changed", lambda folder: _flip(folder / "images.tar")),
    ("changed", _other_label),
    ("changed", lambda folder: _flip(folder / "envelope.json")),
    ("changed", lambda folder: (folder / "envelope.json").unlink()),
    ("changed", _swap),
]


@pytest.mark.parametrize(("why", "tamper"), TAMPERED)
def test_a_tampered_folder_is_refused_by_name(pooled: World, why: str, tamper: Callable[[Path], None]) -> None:
    release = named(pooled, "north")
    tamper(pooled.home.releases / release)
    with pytest.raises(PoolRefusedError, match=f"{release}.*{why}"):
        pooled.export()
    assert not list(pooled.root.glob("pool*"))
    report = pooled.export(wanted=SelectionCriteria(without=frozenset({release})))
    assert [(x.release, x.rule) for x in report.left_out] == [(release, "excluded")]
    assert {part.source.site for part in report.parts} == {"south"}


def test_a_folder_that_the_ledger_does_not_know_is_refused_by_name(pooled: World) -> None:
    shutil.copytree(pooled.home.releases / named(pooled, "north"), pooled.home.releases / "release-planted")
    with pytest.raises(PoolRefusedError, match=r"release-planted.*did not admit"):
        pooled.export()


@pytest.mark.parametrize(("whose", "what"), [("site", "something else"), ("artifact", "another artifact")])
def test_a_statement_must_be_about_the_release_and_its_artifact(pooled: World, whose: str, what: str) -> None:
    mine, other = named(pooled, "north"), pooled.images(pooled.north, "g-more", scene(9, 2))
    envelope = (pooled.home.releases / other / "envelope.json").read_bytes()
    ledger = pooled.ledger
    if whose == "site":  # a ledger that gives this release another one's statement
        entry = dataclasses.replace(ledger.state.releases[mine], envelope=hashlib.sha256(envelope).digest())
    else:  # or another artifact
        mine, entry = other, dataclasses.replace(ledger.state.releases[other], artifact=bytes(32))
    ledger.state.releases[mine] = entry
    with pytest.raises(PoolRefusedError, match=f"{mine}: its statement is about {what}"):
        source_of(ledger, mine, envelope)


def test_an_archive_that_changes_while_the_pool_is_written_stops_it(pooled: World) -> None:
    archive = pooled.home.releases / named(pooled, "north") / "images.tar"

    def meanwhile(what: str, _done: int, _of: int) -> None:
        if what == "shard":
            archive.write_bytes(bytes(archive.stat().st_size))

    with pytest.raises(PoolRefusedError, match="changed while"):
        export_pool(pooled.home, pooled.ledger, pooled.root / "pool", SelectionCriteria(), None, meanwhile)
    assert not list(pooled.root.glob("pool*"))


def test_what_cannot_be_pooled_is_skipped_with_its_reason(pooled: World) -> None:
    encrypted, volumes, lost = (
        pooled.images(pooled.north, f"g-{name}", scene(i, 2)) for i, name in enumerate(("hpke", "volume", "lost"), 40)
    )
    shelf = pooled.home.releases
    (shelf / encrypted / "images.tar").rename(shelf / encrypted / "artifact.hpke")
    (shelf / volumes / "images.tar").rename(shelf / volumes / "volumes.tar")
    shutil.rmtree(shelf / lost)
    report = pooled.export()
    assert {x.release: x.rule for x in report.left_out} == {
        encrypted: "encrypted", volumes: "volumes", lost: "missing",
    }  # fmt: skip
    assert report.samples == 31
    text = (pooled.root / "pool" / "README.md").read_text()
    assert all(f"`{name}` is not in the pool" in text for name in (encrypted, volumes, lost))
    rows = {row.id: row for row in list_releases(pooled.home, pooled.ledger)}
    assert {rows[n].holds for n in (encrypted, volumes, lost)} == {"encrypted", "volumes", "missing"}
    assert rows[named(pooled, "south")].holds == "images"


def test_a_set_that_only_its_reader_can_open_is_skipped_by_the_ledgers_word(pooled: World) -> None:
    release = named(pooled, "north")
    ledger = pooled.ledger
    source = source_of(ledger, release, (pooled.home.releases / release / "envelope.json").read_bytes())
    assert source.reader == ""
    entry = dataclasses.replace(ledger.state.releases[release], reader="ab" * 32)
    ledger.state.releases[release] = entry
    report = export_pool(pooled.home, ledger, pooled.root / "pool", SelectionCriteria())
    assert [(x.release, x.rule) for x in report.left_out] == [(release, "encrypted")]


def test_modalities_and_shapes_do_not_mix_unless_asked(world: World) -> None:
    world.images(world.north, "g-north", scene(0, 3))
    world.images(world.south, "g-south", scene(1, 3), modality="CR")
    with pytest.raises(PoolRefusedError, match=r"more than one modality \(CR, OT\)"):
        world.export()
    world.images(world.south, "g-larger", scene(2, 3, 16))
    everything = SelectionCriteria(mixed=frozenset({"modality"}))
    with pytest.raises(PoolRefusedError, match="more than one shape"):
        world.export(wanted=everything)
    report = world.export(wanted=SelectionCriteria(mixed=frozenset({"modality", "shape"})))
    assert (report.modalities, report.shapes) == (("CR", "OT"), ((12, 12), (16, 16)))
    assert [b.modality for b in report.budgets] == ["", "CR", "OT"]
    assert world.export("one", SelectionCriteria(modalities=frozenset({"CR"}))).samples == 3


def source(release: str = "r", **changes: Any) -> AdmittedRelease:
    values = {
        "release": release, "site": "north", "mechanism": "ksame", "level": "B", "modality": "OT",
        "artifact_type": "image-set", "claim": K5, "grant": f"g-{release}", "kind": "k", "used": 1, "order": 0,
        "delta": None, "epsilon": None, "at": 100, "artifact": "ab" * 32, "envelope": "cd" * 32, "reader": "",
    }  # fmt: skip
    return AdmittedRelease(**{**values, **changes})


def dp(release: str, site: str, used: int, **changes: Any) -> AdmittedRelease:
    values = {"level": "A", "kind": "rdp", "claim": STEPS, "order": 4, "delta": 4e-6, "epsilon": 2.0, **changes}
    return source(release, site=site, used=used, **values)


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (SelectionCriteria(), {"a", "b", "c", "d"}),
        (SelectionCriteria(sites=frozenset({"south"})), {"c"}),
        (SelectionCriteria(mechanisms=frozenset({"privimage"})), {"d"}),
        (SelectionCriteria(level="A"), {"d"}),
        (SelectionCriteria(level="A*"), {"d"}),
        (SelectionCriteria(level="B"), {"a", "b", "d"}),
        (SelectionCriteria(k=6), {"b"}),
        (SelectionCriteria(epsilon=2.0), {"d"}),
        (SelectionCriteria(epsilon=1.999), set()),
        (SelectionCriteria(k=2, epsilon=3.0), {"a", "b", "d"}),
        (SelectionCriteria(since=101), {"b"}),
        (SelectionCriteria(without=frozenset({"a"})), {"b", "c", "d"}),
    ],
)
def test_filters_keep_what_was_asked_for_and_explain_the_rest(wanted: SelectionCriteria, kept: set[str]) -> None:
    sources = [
        source("a"),
        source("b", claim=K7, at=101),
        source("c", site="south", level="C", claim=NoClaim(), kind="none"),
        dp("d", "north", 10, mechanism="privimage"),
    ]
    found, left = select(sources, wanted)
    assert {s.release for s in found} == kept
    assert {x.release for x in left} == {"a", "b", "c", "d"} - kept
    assert all(x.rule and x.why for x in left)


def test_an_epsilon_that_is_not_a_number_is_never_below_a_bound() -> None:
    found, _ = select([dp("d", "north", 10, epsilon=math.nan)], SelectionCriteria(epsilon=5.0))
    assert found == []
    for wrong in ({"epsilon": math.nan}, {"epsilon": 0.0}, {"k": 1}, {"level": "D"}, {"mixed": frozenset({"site"})}):
        with pytest.raises(PoolRefusedError):
            SelectionCriteria(**wrong)


def test_levels_are_ordered_from_strong_to_weak() -> None:
    assert LEVELS == ("A", "A*", "B", "C")
    assert weakest(["A", "A*"]) == "A*"
    assert weakest(["B", "A*"]) == "B"


def test_budgets_add_for_a_patient_of_two_hospitals_and_kinds_do_not() -> None:
    sources = [
        dp("n1", "north", 3 * 10**8, grant="g1"),
        dp("n2", "north", 5 * 10**8, grant="g1"),  # the same grant, further on: not eight
        dp("n3", "north", 2 * 10**8, grant="g2"),
        dp("s1", "south", 4 * 10**8, grant="g3", order=7, delta=1e-6),
        source("k1"), source("k2"), source("k3", site="south"),
    ]  # fmt: skip
    found = budget(sources)
    costs = {(c.site, c.kind): c for c in found.costs}
    north, south = epsilon_of(7 * 10**8, 4e-6, 4), epsilon_of(4 * 10**8, 1e-6, 7)
    assert costs["north", "rdp"].epsilon == north
    assert costs["north", "rdp"].releases == 3
    assert costs["south", "rdp"].epsilon == south
    assert (costs["north", "k"].sets, costs["north", "k"].epsilon) == (2, None)
    worst = {w.kind: w for w in found.worst}
    assert worst["rdp"].epsilon == pytest.approx(north + south, rel=1e-12)
    assert worst["rdp"].delta == pytest.approx(5e-6)
    assert (worst["k"].sets, worst["k"].epsilon, worst["k"].sites) == (3, None, ("north", "south"))


def test_a_kind_without_a_figure_at_one_site_has_none_in_sum() -> None:
    found = budget([source("a", kind="none", claim=NoClaim(), level="C"), dp("b", "south", 10**8)])
    assert {w.kind: w.epsilon is None for w in found.worst} == {"none": True, "rdp": False}
    mixed = budget([dp("a", "north", 10**8), dp("b", "north", 10**8, order=7, grant="g"), dp("c", "south", 10**8)])
    assert [w.epsilon for w in mixed.worst] == [None]


def test_the_datasheet_states_levels_budgets_and_the_overlap(pooled: World) -> None:
    pooled.export(card=Card(license="CC-BY-4.0", cite_as="Nobody 2026", creator="A federation"))
    text = (pooled.root / "pool" / "README.md").read_text()
    assert OVERLAP in text
    assert "budgets ADD" in OVERLAP
    assert "does not compose across sites" in OVERLAP
    assert "at least 5 different patients behind every image" in text
    assert "at least 7 different patients behind every image" in text
    assert "k = 5: there is no epsilon, and it is not 0" in text
    assert "| **in all of: north, south** | k-anonymity | 2 | **2 released groups (does not compose)** |" in text
    assert "epsilon covers 0 of 2 releases" in text
    assert "license: CC-BY-4.0" in text
    plain = pooled.export("plain")
    assert plain.level == "B"
    assert "no license is stated" in (pooled.root / "plain" / "README.md").read_text()


def test_a_set_with_several_claims_has_one_epsilon_in_the_pool_and_in_every_sample(world: World) -> None:
    release = world.private(world.north, "g-private", scene(4, 6))
    report = world.export("private")
    text = (world.root / "private" / "README.md").read_text()
    (cost_,) = report.budgets[0].costs
    truth = epsilon_nano(BOTH, 4e-6, 4) / 1e9
    assert (report.level, cost_.kind) == ("A", "rdp")
    assert cost_.epsilon == pytest.approx(truth, abs=1e-9)
    assert "2 uses of the same patients, paid for together: (1) one set of counts" in text
    assert f"epsilon {epsilon_text(truth)} at delta 4e-06 for this release alone, per patient" in text
    assert "epsilon covers 1 of 1 releases" in text
    found = samples(world.root / "private")
    assert len(found) == 6
    for (said,) in (json.loads(s["json"])["sources"] for s in found):
        assert (said["release"], said["mechanism"], claim_from(said["claim"])) == (release, "privimage", BOTH)


@pytest.mark.parametrize(("level", "kind"), [("A", "rdp"), ("A*", "rdp"), ("B", "none"), ("C", "none")])
def test_a_gaussian_claim_at_another_level_than_a_is_void_in_a_pool(world: World, level: str, kind: str) -> None:
    """P7: a set that was compared with patients promises nothing, though its grant was paid."""
    release = world.private(world.north, "g-private", scene(4, 6))
    ledger = world.ledger
    ledger.state.releases[release] = dataclasses.replace(ledger.state.releases[release], level=level)
    found = source_of(ledger, release, (world.home.releases / release / "envelope.json").read_bytes())
    assert (found.kind, found.epsilon is None, found.delta is None) == (kind, kind == "none", kind == "none")


def test_labels_and_names_cannot_become_markup(world: World) -> None:
    world.images(world.north, "g-north", scene(0, 2), labels=["`<script>x</script>|", "=cmd()"])
    world.export(card=Card(description="see <b>me</b> [x](y) | z"))
    text = (world.root / "pool" / "README.md").read_text()
    assert "<b>" not in text.replace("\\<b", "")
    assert "- `'<script>x</script>|`: 1" in text
    with pytest.raises(PoolRefusedError):
        Card(name="two\nlines")
    with pytest.raises(PoolRefusedError):
        Card(published="tomorrow")


# What the Croissant 1.0 specification asks of each node; a key that is not listed is refused.
NODES: dict[str, tuple[set[str], set[str]]] = {
    "sc:Dataset": (
        {"@context", "@type", "conformsTo", "name", "description", "distribution", "recordSet"},
        {"license", "citeAs", "url", "datePublished", "version", "creator", "rai:personalSensitiveInformation"},
    ),
    "cr:FileObject": ({"@type", "@id", "name", "contentUrl", "contentSize", "encodingFormat", "sha256"}, set()),
    "cr:FileSet": ({"@type", "@id", "name", "containedIn", "encodingFormat", "includes"}, {"description"}),
    "cr:RecordSet": ({"@type", "@id", "name", "field"}, {"key", "description"}),
    "cr:Field": ({"@type", "@id", "name", "dataType", "source"}, {"description", "references"}),
}


def check_node(node: dict[str, Any], ids: set[str]) -> None:
    required, optional = NODES[node["@type"]]
    assert required <= set(node) <= required | optional, set(node) ^ required
    for value in (v for k, v in node.items() if k != "@context"):
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict) and inner.get("@type") in NODES:
                check_node(inner, ids)
            elif isinstance(inner, dict):
                assert all(v["@id"] in ids for v in [inner, *inner.values()] if isinstance(v, dict) and "@id" in v)


def test_the_croissant_description_is_what_the_specification_asks_for(pooled: World) -> None:
    card = Card(
        license="https://creativecommons.org/licenses/by/4.0/", published="2026-11-21", url="https://a.invalid"
    )
    report = pooled.export(card=card)
    pool = pooled.root / "pool"
    document = json.loads((pool / "croissant.json").read_text())
    nodes = [*document["distribution"], *document["recordSet"], *document["recordSet"][0]["field"]]
    ids = [node["@id"] for node in nodes]
    assert len(ids) == len(set(ids))
    check_node(document, set(ids))
    assert document["@context"] == dict(CONTEXT)
    assert document["conformsTo"] == CONFORMS_TO == "http://mlcommons.org/croissant/1.0"
    assert (document["license"], document["datePublished"]) == (card.license, "2026-11-21")
    files = [n for n in document["distribution"] if n["@type"] == "cr:FileObject"]
    assert len(files) == len(report.shards) + 1
    for file in files:
        raw = (pool / file["contentUrl"]).read_bytes()
        assert (hashlib.sha256(raw).hexdigest(), f"{len(raw)} B") == (file["sha256"], file["contentSize"])
    fields = {f["name"]: f for f in document["recordSet"][0]["field"]}
    assert {"key", "image", "label", "site", "release", "level"} <= set(fields)
    rows = [json.loads(line) for line in (pool / "index.jsonl").read_text().splitlines()]
    for name, node in fields.items():
        column = node["source"]["extract"].get("column")
        assert column is None or all(column in row for row in rows), name
    assert [row["key"] for row in rows] == [s["key"] for s in samples(pool)]


def test_mlcroissant_reads_the_pool(pooled: World) -> None:
    mlcroissant = pytest.importorskip("mlcroissant")
    pooled.export(card=Card(license="CC-BY-4.0", published="2026-11-21", url="https://a.invalid", creator="x"))
    dataset = mlcroissant.Dataset(str(pooled.root / "pool" / "croissant.json"))
    assert not dataset.metadata.ctx.issues.errors
    records = list(dataset.records("samples"))
    truth = {s["key"]: json.loads(s["json"]) for s in samples(pooled.root / "pool")}
    assert {r["samples/key"].decode() for r in records} == set(truth)
    for r in records:
        said = truth[r["samples/key"].decode()]
        assert r["samples/site"].decode() == said["site"]
        assert pixel_digest(np.asarray(r["samples/image"])).hex() == said["pixels_sha256"]


def test_nothing_is_exported_where_something_is_already(pooled: World) -> None:
    (pooled.root / "pool").mkdir()
    with pytest.raises(PoolRefusedError, match="exists already"):
        pooled.export()
    (pooled.root / "next.part").mkdir()
    (pooled.root / "next.part" / "precious").write_text("x")
    with pytest.raises(PoolRefusedError, match="not made by this command"):
        pooled.export("next")
    assert (pooled.root / "next.part" / "precious").read_text() == "x"
    (pooled.root / "link.part").symlink_to(pooled.root / "pool")
    with pytest.raises(PoolRefusedError, match="not made by this command"):
        pooled.export("link")


def test_a_full_disk_leaves_nothing_behind(pooled: World) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHARD // 2, limits[1]))
    try:
        with pytest.raises(PoolRefusedError, match="cannot be written: File too large"):
            pooled.export()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(pooled.root.glob("pool*"))
    assert pooled.export().samples == 31


class Killed(BaseException):
    """The process ends here, as after kill -9: nothing is cleaned up."""


def test_an_interrupted_export_goes_on_with_the_shards_it_has(pooled: World) -> None:
    def killed(what: str, done: int, _of: int) -> None:
        if what == "shard" and done == 1:
            raise Killed

    whole = pooled.export("whole")
    out = pooled.root / "pool"
    arguments = (pooled.home, pooled.ledger, out, SelectionCriteria(), ExportOptions(shard_bytes=SHARD))
    with pytest.raises(Killed):
        export_pool(*arguments, killed)
    assert not out.exists()
    first = pooled.root / "pool.part" / "pool-000000.tar"
    os.utime(first, ns=(1, 1))
    report = export_pool(*arguments)
    assert report.shards == whole.shards
    assert (out / "pool-000000.tar").stat().st_mtime_ns == 1  # not written again
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (pooled.root / "whole").iterdir()
    }


@pytest.mark.parametrize("broken", ["shard", "plan"])
def test_what_an_interrupted_export_left_is_used_only_if_it_is_right(pooled: World, broken: str) -> None:
    def killed(what: str, done: int, _of: int) -> None:
        if what == "shard" and done == 2:
            raise Killed

    whole = pooled.export("whole", seed=3)
    arguments = (pooled.home, pooled.ledger, pooled.root / "pool", SelectionCriteria())
    with pytest.raises(Killed):
        export_pool(*arguments, ExportOptions(3 if broken == "shard" else 4, SHARD), killed)
    if broken == "shard":
        _flip(pooled.root / "pool.part" / "pool-000000.tar")
    assert export_pool(*arguments, ExportOptions(3, SHARD)).shards == whole.shards


def test_two_exports_at_once_do_not_share_a_directory(pooled: World) -> None:
    refusals = []

    def meanwhile(what: str, done: int, _of: int) -> None:
        if what == "shard" and done == 0:
            with pytest.raises(PoolRefusedError, match="another process") as refused:
                pooled.export()
            refusals.append(refused)

    report = export_pool(
        pooled.home, pooled.ledger, pooled.root / "pool", SelectionCriteria(), ExportOptions(0, SHARD), meanwhile
    )
    assert len(refusals) == 1
    assert report.samples == 31


def test_the_ledger_is_read_while_somebody_else_writes_it(pooled: World) -> None:
    ledger = read_books(pooled.home)
    assert ledger.state.size == pooled.ledger.state.size
    assert export_pool(pooled.home, ledger, pooled.root / "pool", SelectionCriteria()).samples == 31
    times = {row.id: row.at for row in list_releases(pooled.home, ledger)}
    assert times[named(pooled, "north")] < times[named(pooled, "south")]
    report = pooled.export("late", SelectionCriteria(since=times[named(pooled, "south")]))
    assert [part.source.site for part in report.parts] == ["south"]


def test_every_result_is_plain_json(pooled: World) -> None:
    report = pooled.export()
    plain = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert plain["parts"][0]["source"]["claim"]["kind"] == "k-anonymous"
    assert plain["samples"] == 31
    rows = json.loads(json.dumps(as_json(list_releases(pooled.home, pooled.ledger)), allow_nan=False))
    assert [row["holds"] for row in rows] == ["images", "images"]


def test_colours_and_grey_are_different_pictures_of_different_shapes(world: World) -> None:
    grey = scene(0, 2)
    assert pixel_digest(grey[0]) != pixel_digest(np.stack([grey[0]] * 3, axis=2))
    assert pixel_digest(grey[0]) != pixel_digest(grey[0].reshape(6, 24))


def test_look_alikes_are_counted_by_site_and_kept(world: World) -> None:
    y, x = np.mgrid[0:64, 0:64]
    waves = np.stack([128 + 100 * np.sin(x / (3 + i) + y / (9 - i)) for i in range(4)]).astype(np.uint8)
    brighter = np.clip(waves[:2].astype(int) + 9, 0, 255).astype(np.uint8)
    world.images(world.north, "g-north", np.concatenate([waves, brighter[:1]]), labels=["x"] * 5)
    world.images(world.south, "g-south", brighter[1:], labels=["x"])
    report = world.export()
    assert report.samples == 6
    assert report.near == {"north": (2, 1), "south": (0, 1)}


def test_the_look_of_an_image_survives_scaling_and_brightness_and_not_content() -> None:
    y, x = np.mgrid[0:96, 0:96]
    image = (128 + 90 * np.sin(x / 11) * np.cos(y / 17)).astype(np.uint8)
    half = np.asarray(Image.fromarray(image).resize((48, 48), Image.Resampling.BOX))
    other = (128 + 90 * np.sin(y / 7) * np.cos(x / 23)).astype(np.uint8)
    assert (perceptual_hash(image) ^ perceptual_hash(half)).bit_count() <= 4
    assert (perceptual_hash(image) ^ perceptual_hash(image // 2)).bit_count() <= 4
    assert (perceptual_hash(image) ^ perceptual_hash(other)).bit_count() > 12


def test_near_duplicates_agree_with_a_plain_double_loop() -> None:
    rng = np.random.default_rng(5)
    base = [int(v) for v in rng.integers(0, 1 << 63, 30)]
    looks = base + [v ^ (1 << int(rng.integers(64))) for v in base[:12]]
    groups = [f"g{int(v)}" for v in rng.integers(0, 3, len(looks))]
    expected = {}
    for g in sorted(set(groups)):
        near = [
            {groups[j] == g for j, b in enumerate(looks) if i != j and (a ^ b).bit_count() <= 4}
            for i, a in enumerate(looks) if groups[i] == g
        ]  # fmt: skip
        expected[g] = (sum(True in n for n in near), sum(False in n for n in near))
    assert near_duplicates(looks, groups) == expected
    assert near_duplicates([], []) == {}


def picture(name: str, pixels: bytes, label: str = "x") -> PoolImage:
    return PoolImage(name, 0, pixels, (1, 1), label, 0, 0, 1, b"")


def test_a_release_more_moves_no_two_samples_past_each_other() -> None:
    few = merge([picture("a", bytes([i])) for i in range(20)]).samples
    more = merge([picture("a", bytes([i])) for i in range(40)]).samples
    order = [s.first.pixels for s in shuffled(few, 1)]
    assert [s.first.pixels for s in shuffled(more, 1) if s.first.pixels in set(order)] == order
    assert order != sorted(order)


def tensors(seed: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": rng.normal(size=(7, 3, 5)).astype(np.float32),
        "norm.scale": rng.normal(size=9),
        "half": rng.normal(size=(11,)).astype(np.float16),
        "steps": np.array([3, 1], np.int64),
    }


def model(folder: Path, name: str, values: dict[str, NDArray[Any]]) -> Path:
    path = folder / name / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(pack_weights(values))
    return path


def test_an_average_is_the_float64_mean_rounded_once(tmp_path: Path) -> None:
    paths = [model(tmp_path, f"m{i}", tensors(i)) for i in range(3)]
    out = tmp_path / "out.safetensors"
    shares = [0.5, 0.3, 0.2]
    done = average_models(paths, shares, out)
    made = load_file(out)
    for name, value in made.items():
        if name == "steps":
            assert np.array_equal(value, [3, 1])
            continue
        exact = sum(s * tensors(i)[name].astype(np.float64) for i, s in enumerate(shares))
        assert value.dtype == tensors(0)[name].dtype
        assert np.array_equal(value, np.asarray(exact).astype(value.dtype))
    raw = out.read_bytes()
    assert (done.sha256, done.size) == (hashlib.sha256(raw).hexdigest(), len(raw))
    assert list(done.sources) == [hashlib.sha256(p.read_bytes()).hexdigest() for p in paths]
    with safe_open(out, "np") as opened:
        assert opened.metadata() is None


def bfloat16(folder: Path, name: str, values: torch.Tensor) -> Path:
    """A strict file with one BF16 tensor, which numpy has no type for."""
    count = len(values)
    head = json.dumps(
        {"t": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}, separators=(",", ":")
    )
    head += " " * (-len(head) % 8)
    path = folder / name / "model.safetensors"
    path.parent.mkdir()
    body = values.bfloat16().view(torch.int16).numpy().tobytes()
    path.write_bytes(len(head).to_bytes(8, "little") + head.encode() + body)
    return path


def test_bfloat16_averages_are_the_nearest(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = [torch.from_numpy(rng.normal(size=4096) * 10.0 ** rng.integers(-30, 30, 4096)) for _ in range(2)]
    average_models([bfloat16(tmp_path, f"m{i}", v) for i, v in enumerate(values)], [0.5, 0.5], tmp_path / "out")
    made = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()[-8192:]), dtype=torch.bfloat16)
    exact = 0.5 * values[0].bfloat16().double() + 0.5 * values[1].bfloat16().double()
    step = 2.0 ** (torch.frexp(exact)[1].double() - 8)  # eight bits of significand
    assert bool(((made.double() - exact).abs() <= step / 2).all())


def test_bfloat16_is_rounded_once_where_float32_in_between_would_show(tmp_path: Path) -> None:
    """1 + 2^-8 lies halfway; what is 2^-30 beside it is lost in float32, and then a tie goes to the wrong side."""
    parts = [[2, -2, 2.015625, 2], [2**-6, -(2**-6), 2**-6, 2**-6], [2**-28, -(2**-28), -(2**-28), 0]]
    paths = [bfloat16(tmp_path, f"m{i}", torch.tensor(p, dtype=torch.float64)) for i, p in enumerate(parts)]
    average_models(paths, [0.5, 0.25, 0.25], tmp_path / "out")
    made = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()[-8:]), dtype=torch.bfloat16)
    assert made.tolist() == [1.0078125, -1.0078125, 1.0078125, 1.0]  # the last one is a tie: to even


def _renamed(values: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {("other" if k == "half" else k): v for k, v in values.items()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_renamed, "tensors are missing"),
        (lambda v: {**v, "norm.scale": v["norm.scale"][:8]}, "shape"),
        (lambda v: {**v, "norm.scale": v["norm.scale"].astype(np.float32)}, "type|out of place"),
        (lambda v: {**v, "extra": np.ones(1, np.float32)}, "tensors more"),
        (lambda v: {**v, "steps": np.array([3, 2], np.int64)}, "has no average"),
    ],
)
def test_models_of_another_architecture_are_not_averaged(
    tmp_path: Path, change: Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]], why: str
) -> None:
    paths = [model(tmp_path, "one", tensors(0)), model(tmp_path, "two", change(tensors(1)))]
    with pytest.raises(PoolRefusedError, match=why):
        average_models(paths, [0.5, 0.5], tmp_path / "out")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_stops_the_merge(tmp_path: Path, value: float) -> None:
    paths = [model(tmp_path, f"m{i}", {"w": np.ones(40, np.float32)}) for i in range(2)]
    raw = bytearray(paths[1].read_bytes())
    raw[-8:-4] = np.float32(value).tobytes()
    paths[1].write_bytes(bytes(raw))
    with pytest.raises(PoolRefusedError, match=r"m1.*not finite"):
        average_models(paths, [0.5, 0.5], tmp_path / "out")


def test_an_average_beyond_the_type_is_refused(tmp_path: Path) -> None:
    top = np.full(4, 65_504, np.float16)
    paths = [model(tmp_path, f"m{i}", {"w": top}) for i in range(2)]
    with pytest.raises(PoolRefusedError, match="an average is not finite"):
        average_models(paths, [0.5, 0.6], tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "weights", "why"),
    [
        (["a"], None, "two or more"),
        (["a", "a"], None, "each once"),
        (["a", "b"], [1.0], "one weight for each"),
        (["a", "b"], [1.0, math.nan], "finite"),
        (["a", "b"], [1.0, 0.0], "above 0"),
        (["a", "b"], [9.0, 1.0], "at most 75%"),
    ],
)
def test_weights_are_public_numbers_within_bounds(names: list[str], weights: list[float] | None, why: str) -> None:
    with pytest.raises(PoolRefusedError, match=why):
        shares_of(names, weights)


def test_runs_are_merged_with_the_ledgers_word_on_every_source(world: World) -> None:
    rng = np.random.default_rng(9)
    one, two = rng.normal(size=(2, 1000)).astype(np.float32)
    world.run("first", one)
    world.run("second", two, SubsampledGaussian(0.05, 3.0, 10))
    report = average_runs(world.home, world.ledger, world.root / "merged", ["second", "first"], [1, 3])
    merged = load_file(world.root / "merged" / "model.safetensors")["flat"]
    assert np.array_equal(merged, (0.75 * one.astype(np.float64) + 0.25 * two.astype(np.float64)).astype(np.float32))
    assert [(i.name, i.weight, i.level, i.sites) for i in report.ingredients] == [
        ("first", 0.75, "A", ("north", "south")), ("second", 0.25, "A", ("north", "south")),
    ]  # fmt: skip
    account = world.register.store.state.accounts["north/rdp"].opened
    spent = cost(STEPS, account.order) + cost(SubsampledGaussian(0.05, 3.0, 10), account.order)
    each = epsilon_of(spent, float(account.delta), account.order)
    assert [(c.site, c.epsilon) for c in report.budget.costs] == [("north", each), ("south", each)]
    (worst,) = report.budget.worst
    assert worst.epsilon == pytest.approx(2 * each, rel=1e-12)
    assert worst.sites == ("north", "south")
    said = json.loads((world.root / "merged" / "certificate.json").read_text())
    assert said == json.loads(json.dumps(as_json(report)))
    assert said["overlap"] == OVERLAP
    again = average_runs(world.home, world.ledger, world.root / "again", ["first", "second"], [3, 1])
    assert again.sha256 == report.sha256


def test_a_model_that_the_ledger_does_not_bear_out_is_not_merged(world: World) -> None:
    for name in ("first", "second"):
        world.run(name, np.ones(40, np.float32))
    (world.home.releases / "second" / "model.safetensors").write_bytes(pack_vector(np.zeros(40, np.float32)))
    with pytest.raises(PoolRefusedError, match=r"second.*changed"):
        average_runs(world.home, world.ledger, world.root / "merged", ["first", "second"])
    shutil.rmtree(world.home.releases / "second")
    for other, why in (("second", "not in the release store"), ("third", "did not admit")):
        with pytest.raises(PoolRefusedError, match=f"{other}: .*{why}"):
            average_runs(world.home, world.ledger, world.root / "merged", ["first", other])
    release = world.images(world.north, "g-north", scene(0, 2))
    with pytest.raises(PoolRefusedError, match="not a model"):
        average_runs(world.home, world.ledger, world.root / "merged", ["first", release])
    assert not list(world.root.glob("merged*"))


def test_runs_are_listed_and_do_not_stop_a_pool_of_images(pooled: World) -> None:
    pooled.run("first", np.ones(40, np.float32))
    rows = {row.id: row for row in list_releases(pooled.home, pooled.ledger)}
    assert (rows["first"].holds, rows["first"].level, rows["first"].site) == ("model", "A", "north, south")
    assert pooled.export().samples == 31


@pytest.mark.slow
def test_large_models_are_merged_in_little_memory(tmp_path: Path) -> None:
    values = {"w": np.ones((256, 1 << 18), np.float32)}  # 256 MiB each
    for i in range(3):
        model(tmp_path, f"m{i}", values)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from coordinator.pools.model_averaging import average_models\n"
        "root = Path(sys.argv[1]); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "average_models([root / f'm{i}' / 'model.safetensors' for i in range(3)], [1 / 3] * 3, root / 'out')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert int(done.stdout.split()[-1]) < 120_000  # KiB
