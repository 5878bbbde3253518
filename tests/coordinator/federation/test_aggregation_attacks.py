"""What an attacker with a real certificate tried and must not get: each of these once worked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.errors import CoordinatorUnreachableError
from agent.gateway.client import GatewayClient
from agent.gateway.credentials import Credentials
from coordinator.admission import RequestRejectedError
from coordinator.event_log import open_log
from coordinator.federation.events import EventStream, RunEvent, RunQueue
from coordinator.federation.job import Job, JobError
from coordinator.federation.run_controller import RunContext, RunController
from coordinator.gateway import service
from coordinator.sandbox.inspector_process import Inspection
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Admitted, Freed, InvalidEntryError, Refused
from policies.ledger.export import ExportError
from policies.ledger.merkle import Checkpoint
from policies.ledger.store import AppendRequest
from policies.ledger_service import LedgerService, digest
from policies.statements import Release, Settlement, claim_json, release_id
from protos.artifacts.arrays import pack_vector
from protos.common.canonical_json import canonical
from protos.common.dsse import EnvelopeError
from protos.protocol_version import USER_AGENT
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.attacks.artifacts import bomb_png, shard
from tests.support.federation_world import Federation, Site, pictures, vector
from tests.support.ledger_world import DP, K5, Hospital, open_register
from tests.support.small_tasks import classification, plain_config
from tests.support.upload_server import staged


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path) as made:
        yield made


@pytest.fixture
def site(federation: Federation) -> Site:
    return federation.join("site-a")


TASK = classification(
    ("0", "1"), rounds=4, sampling_rate=DP.sampling_rate, clip=1.0, images_per_patient=1, public_patients=40
)
CONFIG = json.dumps(plain_config(TASK, 10, DP.noise_multiplier))


def conductor(federation: Federation, *sites: str) -> RunController:
    """The real gate of a run, without Flower around it."""
    host: Any = SimpleNamespace(stopping=threading.Event())
    log = open_log(federation.root / "run.log")
    context = RunContext(federation.root / "runs", host, federation.intake, federation.shelf, log, lambda *_: None)
    return RunController(context, Job("run-1", "federated", CONFIG, 10, sites, 4, 1), EventStream())


def test_a_vector_that_is_not_the_one_in_the_statement_is_not_aggregated(federation: Federation, site: Site) -> None:
    """First submit the honest update, then answer in the round with the same envelope and another vector."""
    site.reserved("grant-1", DP, "federated", "run-1")
    honest = np.linspace(0, 1, 10, dtype=np.float32)
    artifact = pack_vector(honest)
    release = site.update("grant-1", artifact, 15, run="run-1", round=1)
    envelope = site.seal(release)
    assert site.gateway().submit(f"submit-{release.release}", envelope, artifact).admitted
    gate = conductor(federation, "site-a")
    assert gate.admit("site-a", 0, envelope, artifact) is None
    assert gate.admit("site-a", 0, envelope, pack_vector(honest * 1e6)) == "artifact_changed"
    another = site.gateway().submit("another-key", envelope, pack_vector(honest * 2))
    assert "replay" in [f.rule for f in another.findings]
    size = federation.store.state.size
    site.gateway().submit(
        f"submit-{release.release}", envelope, pack_vector(honest * 2)
    )  # the old answer, not a byte
    assert (federation.store.state.size, list(federation.uploads.root.glob("*/*/*"))) == (size, [])
    assert gate.admit("site-a", 0, envelope, pack_vector(honest * 2)) == "artifact_changed"
    assert gate.admit("site-a", 1, envelope, artifact) == "another_round"
    assert gate.admit("site-b", 0, envelope, artifact) == "unknown_site"


@pytest.mark.parametrize("key", ["k" * 1_049_000, "", "a+1", "Dr Müller, born 1950", "a\nb", "A", "../x"])
def test_a_key_of_another_form_is_refused_and_the_ledger_still_opens(federation: Federation, key: str) -> None:
    stranger = federation.join("site-x", approve=False)
    with pytest.raises(RequestRejectedError, match="bad_key"):
        federation.intake.reserve("site-x", key, stranger.seal(stranger.hospital.reservation("g")))
    federation.store.close()
    federation.__enter__()
    verify(export_file(federation.home.ledger, "lazaret/coordinator", federation.home.ledger_key()))


def test_an_entry_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    register = open_register(tmp_path / "ledger.db", Hospital("site-a"))
    size = register.store.state.size
    with pytest.raises(InvalidEntryError):
        register.store.append("k", AppendRequest((Refused("s", "site-a", "x", "call", ["r" * 2_000_000], b""),)))
    assert not register.store.stopped
    assert register.store.state.size == size


def test_an_update_outside_a_run_and_a_set_inside_one_are_not_priced(site: Site) -> None:
    for mechanism, claim, run in (("federated", DP, ""), ("ksame", K5, "run-1")):
        asked = site.hospital.reservation("grant-1", claim, mechanism, run)
        verdict = site.gateway().reserve(f"k-{mechanism}", site.seal(asked))
        assert [f.rule for f in verdict.findings] == ["run"]


def signed(path: Path, release: Release) -> service.StagedArtifact:
    """A finished upload, as the service hands it to the review."""
    return service.StagedArtifact(release.artifact_sha256, path.stat().st_size, lambda: [])


def test_a_crash_with_an_update_on_the_staging_shelf_does_not_stop_the_next_start(tmp_path: Path) -> None:
    with Federation(tmp_path) as first:
        site = first.join("site-a")
        site.reserved("grant-1", DP, "federated", "run-1")
        artifact = vector()
        release = site.update("grant-1", artifact, 15, run="run-1", round=1)
        envelope = site.seal(release)
        mine = staged(first.uploads, "site-a", artifact)
        assert first.intake.admit("site-a", "key", envelope, release, signed(mine, release)).admitted
    with Federation(tmp_path) as second:
        site.federation = second
        size = second.store.state.size
        assert site.gateway().submit("key", envelope, artifact).admitted  # the answer of before
        assert second.store.state.size == size
        second.uploads.expire(-1.0)
    with Federation(tmp_path) as third:
        assert list(third.shelf.staging.glob("*/*/*")) == []
        assert [r.artifact.hex() for r in third.store.state.releases.values()] == [release.artifact_sha256]


def test_a_release_cannot_take_another_sites_name_or_a_models_place(federation: Federation, site: Site) -> None:
    evil, artifact = federation.join("site-b"), pictures()
    evil.reserved("grant-1b")
    for name in ("train-1",):
        envelope = evil.seal(evil.release("grant-1b", artifact, release=name))
        verdict = evil.gateway().submit(f"k-{name}", envelope, artifact)
        assert "release_id" in [f.rule for f in verdict.findings]
    with pytest.raises(JobError, match="run"):
        Job("release-of-a-site", "federated", CONFIG, 10, ("site-a",), 4, 1)
    site.reserved("grant-1")
    assert site.gateway().submit("k", site.seal(site.release("grant-1", artifact)), artifact).admitted


def test_a_copied_or_bad_node_key_is_not_enrolled(federation: Federation, site: Site) -> None:
    node = site.home.keys.joinpath("node.pub").read_text()
    for wrong in (node, "garbage", "ssh-ed25519 AAAA"):
        thief = Hospital("site-t", node_key=wrong)
        with pytest.raises(EnvelopeError):
            federation.intake.enrol(thief.enrolment()[1])
    _, twin = Hospital("site-u", key=site.home.sign_key()).enrolment()
    for approval in federation.approvals("site-u", "twin", digest(twin).hex()):
        decisions.approve(federation.store, approval)
    with pytest.raises(InvalidEntryError, match="another site's"):
        federation.intake.enrol(twin, "twin")


def test_an_image_bomb_without_a_grant_is_not_even_decoded(
    federation: Federation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = shard(("00000.png", bomb_png(8192, 8192)), ("00000.txt", b"0"))
    assert len(bomb) < 1 << 18
    looked: list[Path] = []
    real = service.inspect

    def inspect(path: Path, kind: str, expected: dict[str, object]) -> Inspection:
        looked.append(path)
        return real(path, kind, expected)

    monkeypatch.setattr(service, "inspect", inspect)
    release = site.release("grant-none", bomb)
    assert [f.rule for f in site.gateway().submit("k", site.seal(release), bomb).findings] == ["no_grant"]
    assert looked == []
    site.reserved("grant-1")
    release = site.release("grant-1", bomb)
    assert "artifact_malformed" in [f.rule for f in site.gateway().submit("k2", site.seal(release), bomb).findings]
    assert len(looked) == 1
    assert federation.findings() == [["no_grant"], ["artifact_malformed"]]


def test_silent_streams_of_one_site_do_not_stop_the_others(
    federation: Federation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "UPLOAD_S", 900.0)  # the streams that are let in stay
    other = federation.join("site-b")
    credentials = Credentials(site.home.keys).channel_credentials()
    silence = threading.Event()

    def nothing() -> Iterator[gateway_pb2.UploadPart]:
        silence.wait(900)
        return
        yield

    spoken = [("grpc.primary_user_agent", USER_AGENT)]
    with grpc.secure_channel(f"127.0.0.1:{federation.port}", credentials, spoken) as channel:
        calls = [GatewayStub(channel).Upload.future(nothing()) for _ in range(20)]
        deadline = time.monotonic() + 200
        while sum(call.done() for call in calls) < 18 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert other.gateway().hello()
        turned = [c for c in calls if c.done() and c.code() == grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert len(turned) == 18
        silence.set()


def test_what_a_coordinator_says_is_bounded_before_it_is_written_down(
    federation: Federation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = gateway_pb2.VerdictReply(
        admitted=False, level="A" * 2_000_000, known=True, checkpoint=federation.store.checkpoint()
    )
    lie.findings.extend(gateway_pb2.Finding(rule="r" * 100_000, detail="d" * 100_000) for _ in range(100))
    gateway: GatewayClient = site.gateway()
    monkeypatch.setattr(gateway, "_ask", lambda _call: lie)
    verdict = gateway.outcome("reserve-k", bytes(32))
    assert verdict is not None
    assert len(verdict.level) <= 1
    assert len(verdict.findings) <= 32
    assert {f.rule for f in verdict.findings} == {"unreadable"}


def test_an_agent_refuses_a_ledger_that_has_shrunk(federation: Federation, site: Site) -> None:
    gateway = site.gateway()
    gateway.hello()
    longer = Checkpoint("lazaret/coordinator", gateway.watch.seen + 100, bytes(32))
    gateway.watch.head = longer
    with pytest.raises(CoordinatorUnreachableError, match="not the one this site saw"):
        gateway.hello()


def test_the_shelf_removes_nothing_that_it_did_not_make(federation: Federation, site: Site) -> None:
    """What lies in a release's place is moved aside; a release that was cut short by a crash is put right."""
    folder = federation.home.releases / release_id("site-a", "grant-1", 0)
    folder.mkdir()
    (folder / "images.tar").write_bytes(b"")
    site.reserved("grant-1")
    artifact = pictures()
    site.gateway().submit("k", site.seal(site.release("grant-1", artifact)), artifact)
    assert (folder / "images.tar").read_bytes() == artifact
    (aside,) = federation.home.releases.glob(".*.aside")
    assert (aside / "images.tar").read_bytes() == b""


def test_what_cannot_be_placed_at_a_start_is_kept_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Federation(tmp_path) as first:
        site = first.join("site-a")
        site.reserved("grant-1")
        artifact = pictures()
        release = site.release("grant-1", artifact)
        mine = staged(first.uploads, "site-a", artifact)
        assert first.intake.admit("site-a", "key", site.seal(release), release, signed(mine, release)).admitted

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("coordinator.storage.release_store.replace_file", full)
        with Federation(tmp_path):
            pass
    with Federation(tmp_path) as third:
        assert (third.home.releases / release.release / "images.tar").read_bytes() == artifact


def test_a_reservation_that_comes_in_between_does_not_admit_what_nobody_decoded(
    federation: Federation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = b"not a tar"
    release = site.release("grant-1", garbage)
    examine, asked = LedgerService.dry_run_review, []

    def and_then_reserve(self: LedgerService, *words: object) -> object:
        found = examine(self, *words)  # type: ignore[arg-type]
        if not asked:
            asked.append(words)
            site.reserved("grant-1")
        return found

    monkeypatch.setattr(LedgerService, "dry_run_review", and_then_reserve)
    verdict = site.gateway().submit("k", site.seal(release), garbage)
    assert [f.rule for f in verdict.findings] == ["no_grant"]


def test_a_model_names_only_the_updates_that_its_rounds_counted(federation: Federation, site: Site) -> None:
    """An update that a site merely submitted under the run's name is not part of the model or its certificate."""
    other = federation.join("site-b")
    for one in (site, other):
        one.reserved(f"grant-{one.hospital.name}", DP, "federated", "run-1")
        artifact = vector()
        release = one.update(f"grant-{one.hospital.name}", artifact, 15, run="run-1", round=1)
        assert one.gateway().submit("k", one.seal(release), artifact).admitted
    federation.intake.register.close_round("run-1", 1, ["site-a"], bytes(32))
    assert [a.site for a in conductor(federation, "site-a", "site-b")._updates()] == ["site-a"]


def test_whoever_watches_a_run_hears_of_its_end_though_it_cannot_be_closed(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = conductor(federation, "site-a")

    def full(_end: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(run, "_conduct", lambda _done: RunEvent("run-1", 3, "finished"))
    monkeypatch.setattr(run, "_close", full)
    run.run()
    assert [(e.state, e.reason) for e in run.feed.follow()] == [("failed", "internal")]


def test_runs_are_conducted_in_the_order_in_which_they_stood_in_line() -> None:
    line, order = RunQueue(), []

    def conduct(number: int, standing: threading.Event) -> None:
        with line.take(standing):
            time.sleep(0.05)
            order.append(number)

    threads = []
    for number in range(5):
        standing = threading.Event()
        threads.append(threading.Thread(target=conduct, args=(number, standing)))
        threads[-1].start()
        assert standing.wait(60)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------- an operator who forges the books


def forged(tmp_path: Path, claim: object, mechanism: str, entry_changes: dict[str, object], **changes: object) -> str:
    """A ledger with one honest grant and one admission that the law forbids; what the auditor says."""
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a, key=key)
    run = "run-1" if mechanism == "federated" else ""
    reservation = a.reservation("g", claim, mechanism, run)  # type: ignore[arg-type]
    assert register.reserve("k", reservation, a.seal(reservation)).admitted
    release = a.release("g", **{"mechanism": mechanism, "claim": claim, **changes})
    envelope = a.seal(release)
    entry = Admitted(
        release.release, "g", "site-a", run, release.round, mechanism, "A", 1, canonical(claim_json(release.claim)),
        bytes.fromhex(release.artifact_sha256), digest(envelope), "",
    )  # fmt: skip
    register.store.append("forged", AppendRequest((replace(entry, **entry_changes),), (envelope,)))  # type: ignore[arg-type]
    register.store.close()
    with pytest.raises(ExportError) as caught:
        verify(export_file(tmp_path / "ledger.db", "lazaret/test", key))
    return str(caught.value)


@pytest.mark.parametrize(
    ("entry_changes", "changes"),
    [
        ({"level": "A"}, {}),
        ({"level": "B"}, {"components": {"encoder": "private", "generator": "private"}}),
        ({"level": "B"}, {"modality": "SC"}),
        ({"level": "B"}, {"artifact_type": "update"}),
    ],
)
def test_a_false_level_or_a_forbidden_release_is_found_by_the_auditor(
    tmp_path: Path, entry_changes: dict[str, object], changes: dict[str, object]
) -> None:
    assert "the law does not admit it" in forged(tmp_path, K5, "ksame", entry_changes, **changes)


def test_a_grant_freed_on_the_word_expired_is_found_by_the_auditor(tmp_path: Path) -> None:
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a, key=key)
    reservation = a.reservation("g")
    register.reserve("k", reservation, a.seal(reservation))
    word = a.seal(Settlement("g", "site-a", "", "ksame", "expired", "restart", 0))
    register.store.append("freed", AppendRequest((Freed("g", "refused", digest(word)),), (word,)))
    register.store.close()
    with pytest.raises(ExportError, match="something else"):
        verify(export_file(tmp_path / "ledger.db", "lazaret/test", key))
