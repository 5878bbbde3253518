"""The shelf: what was admitted lies in its place, whole, and nothing else does; also after a crash."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.explanations import LEVELS
from coordinator.storage import release_store
from coordinator.storage.release_store import SEALED, UNSEEN, WORDING, ReleaseStore, certificate
from coordinator.storage.uploads import Uploads
from policies.accounting.claims import DistributedGaussian, assumption
from policies.accounting.rdp import epsilon_nano
from policies.ledger.entries import Admitted, Opened
from policies.ledger_service import ArtifactFindings, LedgerService
from policies.review.policy import parse
from policies.review.rules import Finding, Verdict
from policies.statements import Release, claim_from, claim_json
from protos.artifacts.arrays import pack_images
from protos.common.canonical_json import canonical
from protos.encryption.hpke import fingerprint, make_reader, open_sealed_artifact, seal_to
from tests.support.ledger_world import BOTH, K5, Hospital, open_register, policy
from tests.support.upload_server import staged

PRIVATE, PUBLIC = make_reader()
READERS = f'["{fingerprint(PUBLIC)}"]'


def pictures(seed: int = 0) -> bytes:
    images = np.random.default_rng(seed).integers(0, 256, (3, 8, 8)).astype(np.uint8)
    return pack_images(images, ("0", "1", "2"))


@dataclass
class Desk:
    """Books, uploads and a shelf, as the service holds them; :meth:`restart` is what a crash leads to."""

    root: Path
    register: LedgerService
    hospital: Hospital
    shelf: ReleaseStore = field(init=False)
    uploads: Uploads = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.shelf = ReleaseStore(self.root / "releases", self.register.store)
        self.uploads = Uploads(self.shelf.staging, lambda: 0.0, keep_free=0)

    def upload(self, body: bytes) -> Path:
        return staged(self.uploads, "site-a", body)

    def admit(self, grant: str, body: bytes, *wrong: Finding, **changes: object) -> tuple[Release, bytes, Verdict]:
        reserved = self.hospital.reservation(grant)
        assert self.register.reserve(f"r-{grant}", reserved, self.hospital.seal(reserved)).admitted
        digest = hashlib.sha256(body).hexdigest()
        release = self.hospital.release(grant, artifact_sha256=digest, artifact_bytes=len(body), **changes)
        envelope = self.hospital.seal(release)
        return release, envelope, self.register.admit(f"s-{grant}", release, envelope, ArtifactFindings(wrong))

    def place(self, release: Release) -> Path:
        return self.shelf.root / release.release

    def left(self) -> list[str]:
        return [p.name for p in (self.shelf.staging / "ready").glob("*/*")]


@pytest.fixture
def context(tmp_path: Path) -> Desk:
    text = policy(max_releases_per_patient=9, readers=READERS)
    hospital = Hospital("site-a", text)
    register = open_register(tmp_path / "ledger.db", hospital)
    both = parse(text, "both")
    return Desk(tmp_path, replace(register, policy_of=lambda _site: both), hospital)


def test_an_admitted_set_lies_in_its_place_with_its_images(context: Desk) -> None:
    body = pictures()
    path = context.upload(body)
    release, envelope, verdict = context.admit("g1", body)
    assert verdict.admitted, verdict
    context.shelf.settle(path, release, envelope, verdict)
    place = context.place(release)
    assert (place / "images.tar").read_bytes() == body
    assert len(list((place / "images").glob("*.png"))) == 3
    assert (place / "envelope.json").read_bytes() == envelope
    facts = json.loads((place / "certificate.json").read_text())
    assert (facts["level"], facts["meaning"]) == ("B", WORDING["B"])
    assert "unseen" not in facts
    assert context.left() == []


@pytest.mark.parametrize(("menu", "told"), [("", None), ("5,8,11", [5, 8, 11])])
def test_the_certificate_says_which_k_were_tried_when_the_statement_does(
    context: Desk, menu: str, told: list[int] | None
) -> None:
    body = pictures()
    path = context.upload(body)
    release, envelope, verdict = context.admit("g1", body, menu=menu)
    assert verdict.admitted, verdict
    context.shelf.settle(path, release, envelope, verdict)
    assert json.loads((context.place(release) / "certificate.json").read_text()).get("k_tried") == told


def test_a_refused_one_is_removed(context: Desk) -> None:
    body = pictures()
    path = context.upload(body)
    release, envelope, verdict = context.admit("g1", body, Finding("artifact_malformed", "a test"))
    context.shelf.settle(path, release, envelope, verdict)
    assert context.left() == []
    assert not context.place(release).exists()


def test_an_encrypted_set_is_kept_as_it_is_and_the_certificate_says_so(context: Desk, tmp_path: Path) -> None:
    body = pictures()
    seal_to(PUBLIC, body, tmp_path / "sealed")
    sealed = (tmp_path / "sealed").read_bytes()
    path = context.upload(sealed)
    release, envelope, verdict = context.admit("g1", sealed, reader=fingerprint(PUBLIC))
    assert verdict.admitted, verdict
    context.shelf.settle(path, release, envelope, verdict)
    place = context.place(release)
    assert sorted(p.name for p in place.iterdir()) == [SEALED, "certificate.json", "envelope.json"]
    facts = json.loads((place / "certificate.json").read_text())
    assert (facts["reader"], facts["unseen"]) == (fingerprint(PUBLIC), UNSEEN)
    open_sealed_artifact(PRIVATE, place / SEALED, tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes() == body


def test_a_crash_between_the_verdict_and_the_shelf_is_made_good(context: Desk) -> None:
    body = pictures()
    context.upload(body)
    release, _envelope, verdict = context.admit("g1", body)
    assert verdict.admitted
    context.restart()
    assert (context.place(release) / "images.tar").read_bytes() == body
    assert context.left() == []


def test_a_crash_before_the_verdict_loses_nothing_while_the_upload_is_open(context: Desk) -> None:
    body = pictures()
    path = context.upload(body)
    context.restart()
    assert path.exists()
    release, envelope, verdict = context.admit("g1", body)
    context.shelf.settle(context.uploads.finish("site-a", release.artifact_sha256), release, envelope, verdict)
    assert (context.place(release) / "images.tar").read_bytes() == body


def test_what_nobody_waits_for_and_nobody_admitted_is_removed_at_a_start(context: Desk) -> None:
    body = pictures()
    path = context.upload(body)
    context.uploads.drop("site-a", hashlib.sha256(body).hexdigest())
    assert path.exists()
    context.restart()
    assert context.left() == []


def test_what_cannot_be_placed_now_is_placed_at_the_next_start(
    context: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = pictures()
    path = context.upload(body)
    release, envelope, verdict = context.admit("g1", body)

    def full(*_words: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(release_store, "_unfold", full)
        with pytest.raises(OSError, match="no space"):
            context.shelf.settle(path, release, envelope, verdict)
        assert not context.place(release).exists()
        context.uploads.drop("site-a", release.artifact_sha256)
        context.restart()
        assert path.exists()
    context.restart()
    assert (context.place(release) / "images.tar").read_bytes() == body
    assert context.left() == []


def test_a_file_system_without_links_is_copied_to(context: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_words: object) -> None:
        raise PermissionError("links are not supported")

    monkeypatch.setattr(os, "link", no_links)
    body = pictures()
    path = context.upload(body)
    release, envelope, verdict = context.admit("g1", body)
    context.shelf.settle(path, release, envelope, verdict)
    assert (context.place(release) / "images.tar").read_bytes() == body


def test_the_same_bytes_under_two_grants_are_two_releases(context: Desk) -> None:
    """Also when both were admitted before the first was in its place."""
    body = pictures()
    path = context.upload(body)
    both = [context.admit(grant, body) for grant in ("g1", "g2")]
    for release, envelope, verdict in both:
        assert verdict.admitted, verdict
        context.shelf.settle(path, release, envelope, verdict)
    for release, _envelope, _verdict in both:
        assert (context.place(release) / "images.tar").read_bytes() == body


def test_bytes_that_changed_on_the_disk_are_not_put_on_the_shelf(context: Desk) -> None:
    body = pictures()
    path = context.upload(body)
    release, envelope, verdict = context.admit("g1", body)
    with path.open("r+b") as stream:
        stream.seek(600)
        stream.write(b"\xff\xff\xff\xff")
    context.shelf.settle(path, release, envelope, verdict)
    assert not context.place(release).exists()


def test_what_lies_in_a_releases_place_is_moved_aside_and_never_removed(context: Desk) -> None:
    body = pictures()
    path = context.upload(body)
    release, envelope, verdict = context.admit("g1", body)
    context.place(release).mkdir()
    (context.place(release) / "images.tar").write_bytes(b"somebody's")
    context.shelf.settle(path, release, envelope, verdict)
    assert (context.place(release) / "images.tar").read_bytes() == body
    (aside,) = context.shelf.root.glob(".*.aside")
    assert (aside / "images.tar").read_bytes() == b"somebody's"


def test_a_model_comes_from_a_file_or_from_bytes(context: Desk, tmp_path: Path) -> None:
    model = tmp_path / "round-3.safetensors"
    model.write_bytes(b"weights")
    for _ in range(2):  # a resumed run closes again
        context.shelf.place_model("run-1", model, {"level": "A"}, {"r1": b"{}"})
    context.shelf.place_model("run-2", b"weights", {"level": "A"}, {})
    for run in ("run-1", "run-2"):
        assert (context.shelf.root / run / "model.safetensors").read_bytes() == b"weights"
    assert sorted(p.name for p in (context.shelf.root / "run-1").iterdir()) == [
        "certificate.json",
        "model.safetensors",
        "updates",
    ]
    assert model.exists()


def test_a_certificate_of_shared_noise_prints_what_it_takes_for_granted() -> None:
    opened = Opened("site-a/rdp", 10**12, 8, "8.0", "1e-05")
    for honest in (1, 2):
        claim = DistributedGaussian(0.25, 1.8, 10, sites=3, honest=honest)
        level = "A*" if assumption(claim) else "A"
        entry = Admitted(
            "r", "g", "site-a", "run-1", 1, "federated-masked", level, 1, canonical(claim_json(claim)), bytes(32),
            bytes(32), "",
        )  # fmt: skip
        facts = certificate(entry, opened)
        assert facts["meaning"] == LEVELS[level][1]
        assert facts["epsilon"] > 0
        assert facts.get("assumption", "") == assumption(claim)
    assert "assumption" in facts
    assert "honest" in facts["meaning"]


def test_a_certificate_of_several_claims_prints_one_epsilon_and_only_at_level_a() -> None:
    opened = Opened("site-a/rdp", 10**12, 4, "8.0", "4e-06")
    for level in ("A", "C"):
        entry = Admitted(
            "r", "g", "site-a", "", 0, "privimage", level, 1, canonical(claim_json(BOTH)), bytes(32), bytes(32), "",
        )  # fmt: skip
        facts = certificate(entry, opened)
        assert claim_from(facts["claim"]) == BOTH
        assert facts.get("epsilon") == (epsilon_nano(BOTH, 4e-6, 4) / 1e9 if level == "A" else None)
        assert facts["meaning"] == LEVELS[level][1]


def test_a_claim_without_assumptions_prints_none() -> None:
    assert assumption(K5) == ""
