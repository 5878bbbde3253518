"""Through the real service: what must be refused is refused with its own finding, and it is in the ledger."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from agent.errors import CoordinatorUnreachableError, SiteConfigError
from agent.gateway.credentials import Credentials
from coordinator.admission import RequestRejectedError
from coordinator.gateway.calls import CallRejectedError, peer_of
from coordinator.gateway.service import StagedArtifact
from coordinator.storage.directory import operator_certificate
from policies.accounting.claims import Claim, KAnonymous, SubsampledGaussian
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.review.rules import Verdict
from policies.statements import PAYLOAD_TYPE, Approval, Request, Reservation, Settlement, encode, release_id
from protos.common.dsse import seal
from protos.identity.certificates import CA, agent_name, issue, leaf_of, make_intermediate, make_root, request
from protos.identity.key_files import pem, replace_private
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.support.federation_world import Federation, Site, pictures, vector
from tests.support.ledger_world import DP, K5, Hospital, policy
from tests.support.upload_server import staged


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path) as made:
        yield made


@pytest.fixture
def site(federation: Federation) -> Site:
    return federation.join("site-a")


def reservation(grant: str, site: str, run: str, mechanism: str, claim: Claim) -> Reservation:
    return Hospital(site).reservation(grant, claim, mechanism, run)


def rules(verdict: Verdict) -> list[str]:
    assert not verdict.admitted
    return [finding.rule for finding in verdict.findings]


def knock(federation: Federation, credentials: grpc.ChannelCredentials) -> str:
    with grpc.secure_channel(f"127.0.0.1:{federation.port}", credentials) as channel:
        reply = GatewayStub(channel).Hello(gateway_pb2.HelloRequest(), timeout=120)
        return str(reply.policy)


def credentials_for(federation: Federation, name: str, ca: CA) -> grpc.ChannelCredentials:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = issue(request(key, name), name, ca, dt.datetime.now(dt.UTC))
    return grpc.ssl_channel_credentials(federation.home.root_crt(), pem(key), certificate)


def another_authority() -> CA:
    """A root of somebody else's, and its intermediate."""
    now = dt.datetime.now(dt.UTC)
    return make_intermediate(make_root(now), now)


def test_an_honest_set_is_admitted_and_lies_on_the_shelf(federation: Federation, site: Site) -> None:
    site.reserved("grant-1")
    artifact = pictures()
    verdict = site.gateway().submit("submit-r", site.seal(site.release("grant-1", artifact)), artifact)
    assert (verdict.admitted, verdict.level) == (True, "B")
    shelf = federation.home.releases / release_id("site-a", "grant-1", 0)
    assert (shelf / "images.tar").read_bytes() == artifact
    assert json.loads((shelf / "certificate.json").read_text())["level"] == "B"
    assert federation.store.state.grants["grant-1"].state == "spent"
    verify(export_file(federation.home.ledger, "lazaret/coordinator", federation.home.ledger_key()))


def test_no_client_certificate_no_conversation(federation: Federation) -> None:
    with pytest.raises(grpc.RpcError):
        knock(federation, grpc.ssl_channel_credentials(federation.home.root_crt()))


def test_plain_tcp_gets_nothing(federation: Federation) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{federation.port}") as channel, pytest.raises(grpc.RpcError):
        GatewayStub(channel).Hello(gateway_pb2.HelloRequest(), timeout=120)


def test_a_certificate_of_another_ca_gets_nothing(federation: Federation) -> None:
    with pytest.raises(grpc.RpcError):
        knock(federation, credentials_for(federation, agent_name("site-a"), another_authority()))


def test_the_agent_says_what_to_check_when_its_certificate_is_not_accepted(
    federation: Federation, site: Site
) -> None:
    key, name = ec.generate_private_key(ec.SECP256R1()), agent_name("site-a")
    chain = issue(request(key, name), name, another_authority(), dt.datetime.now(dt.UTC))
    replace_private(site.home.keys / "tls.pem", pem(key) + chain)
    with pytest.raises(CoordinatorUnreachableError, match="issued by its CA"):
        site.gateway().hello()


def test_an_agent_without_a_certificate_is_told_how_to_get_one(site: Site) -> None:
    (site.home.keys / "tls.pem").unlink()
    with pytest.raises(SiteConfigError, match="lazaret-agent enrol"):
        site.gateway()


def test_an_unknown_agent_is_refused_and_the_refusal_is_written_down(federation: Federation) -> None:
    """Its certificate is the authority's and in no entry: the guard turns it away. Behind it, the counter does."""
    stranger = federation.join("site-x", approve=False)
    envelope = stranger.seal(reservation("grant-1", "site-x", "", "ksame", K5))
    with pytest.raises(CoordinatorUnreachableError, match="never issued"):
        stranger.gateway().reserve("key", envelope)
    assert federation.findings() == []
    with pytest.raises(RequestRejectedError, match="unknown_site"):
        federation.intake.reserve("site-x", "key", envelope)
    assert federation.findings() == [["unknown_site"]]


def test_a_person_may_not_speak_as_an_agent_nor_an_agent_launch_runs(federation: Federation, site: Site) -> None:
    key, chain = operator_certificate(federation.home, dt.datetime.now(dt.UTC))
    with pytest.raises(grpc.RpcError) as caught:
        knock(federation, grpc.ssl_channel_credentials(federation.home.root_crt(), key, chain))
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "may not make this call" in caught.value.details()
    credentials = Credentials(site.home.keys).channel_credentials()
    channel = grpc.secure_channel(f"127.0.0.1:{federation.port}", credentials)
    with channel, pytest.raises(grpc.RpcError) as caught:
        list(GatewayStub(channel).Launch(gateway_pb2.LaunchRequest(run="x"), timeout=120))
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "may not make this call" in caught.value.details()
    assert federation.findings() == [["wrong_role"]]


def test_who_is_at_the_other_end_is_read_from_the_certificate_or_the_call_is_turned_away(
    federation: Federation, site: Site
) -> None:
    """The hours, the deny-list and the role are the guard's; see test_guard.py."""
    now, chain = dt.datetime.now(dt.UTC), Credentials(site.home.keys).chain()
    good = {"ssl_tls_version": [b"TLSv1.3"], "x509_pem_cert": [chain]}
    assert (peer_of(good).site, peer_of(good).leaf) == ("site-a", leaf_of(chain))
    for auth, rule in (
        ({**good, "ssl_tls_version": [b"TLSv1.2"]}, "old_tls"),
        ({"x509_pem_cert": good["x509_pem_cert"]}, "old_tls"),
        ({**good, "x509_pem_cert": [b"nonsense"]}, "no_name"),
        ({"ssl_tls_version": [b"TLSv1.3"]}, "no_name"),
        ({**good, "x509_pem_cert": [federation.home.ca()[1]]}, "no_name"),
        ({**good, "x509_pem_cert": [two_names(federation, now)]}, "several_names"),
        ({**good, "x509_pem_cert": [federation.home.tls()[1]]}, "no_role"),
    ):
        with pytest.raises(CallRejectedError) as caught:
            peer_of(auth)
        assert caught.value.rule == rule


def two_names(federation: Federation, now: dt.datetime) -> bytes:
    """A certificate of the federation's own CA that bears two URI names."""
    ca_key = load_pem_private_key(federation.home.ca()[0], None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    uris = [x509.UniformResourceIdentifier(agent_name(site)) for site in ("site-a", "site-b")]
    builder = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(x509.Name([]))
    builder = builder.public_key(ca_key.public_key()).serial_number(1).not_valid_before(now - dt.timedelta(1))
    builder = builder.not_valid_after(now + dt.timedelta(1))
    builder = builder.add_extension(x509.SubjectAlternativeName(uris), critical=True)
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_a_statement_for_another_site_is_refused(federation: Federation, site: Site) -> None:
    federation.join("site-b")
    asked = reservation("grant-1", "site-b", "", "ksame", K5)
    assert rules(site.gateway().reserve("key", site.seal(asked))) == ["another_site"]


@pytest.mark.parametrize("word", [Approval, Request])
def test_a_persons_word_is_no_word_of_a_site(
    federation: Federation, site: Site, word: type[Approval | Request]
) -> None:
    said = word("dpo-1", "lazaret/coordinator", "s", "limit", "site-a/rdp", "8.0")
    assert rules(site.gateway().reserve("key", site.seal(said))) == ["another_site"]


def test_an_envelope_sealed_by_another_site_is_refused(federation: Federation, site: Site) -> None:
    other = federation.join("site-b")
    envelope = other.seal(reservation("grant-1", "site-b", "", "ksame", K5))
    assert rules(site.gateway().reserve("key", envelope)) == ["bad_envelope"]


def test_a_changed_envelope_and_a_malformed_statement_are_refused(site: Site) -> None:
    envelope = site.seal(reservation("grant-1", "site-a", "", "ksame", K5))
    assert rules(site.gateway().reserve("k1", envelope.replace(b'"sig":"', b'"sig":"A'))) == ["bad_envelope"]
    raw = encode(reservation("grant-1", "site-a", "", "ksame", K5)).replace(b'"k":5', b'"k":5.0')
    assert rules(site.gateway().reserve("k2", seal(raw, PAYLOAD_TYPE, site.home.sign_key()))) == ["bad_statement"]


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("min_k", {"claim": KAnonymous(3, 2, 1)}),
        ("unknown_mechanism", {"mechanism": "magic"}),
        ("claim_kind", {"claim": DP}),
    ],
)
def test_a_price_for_what_the_policy_does_not_admit_is_refused(
    site: Site, rule: str, changes: dict[str, object]
) -> None:
    asked = replace(reservation("grant-1", "site-a", "", "ksame", K5), **changes)  # type: ignore[arg-type]
    assert rule in rules(site.gateway().reserve("key", site.seal(asked)))


def test_the_sites_own_budget_binds_at_the_coordinator_too(federation: Federation) -> None:
    poor = federation.join("site-c", policy(epsilon="2.0"))
    asked = reservation("grant-1", "site-c", "run-1", "federated", DP)
    assert rules(poor.gateway().reserve("key", poor.seal(asked))) == ["budget"]


def test_a_changed_artifact_byte_is_refused(federation: Federation, site: Site) -> None:
    site.reserved("grant-1")
    artifact = pictures()
    envelope = site.seal(site.release("grant-1", artifact))
    changed = bytearray(artifact)
    changed[len(changed) // 2] ^= 1
    assert rules(site.gateway().submit("submit-r", envelope, bytes(changed))) == ["artifact_changed"]
    assert not (federation.home.releases / release_id("site-a", "grant-1", 0)).exists()


def test_more_or_fewer_bytes_than_the_statement_says_are_refused(federation: Federation, site: Site) -> None:
    site.reserved("grant-1")
    artifact = pictures()
    envelope = site.seal(site.release("grant-1", artifact))
    for index, wrong in enumerate((artifact + b"x", artifact[:-1])):
        with pytest.raises(CoordinatorUnreachableError, match=f"piece 0 has {len(artifact)} bytes"):
            site.gateway().submit(f"key-{index}", envelope, wrong)
    longer = artifact + bytes(1 << 20)
    assert rules(site.gateway().submit("key-2", envelope, longer)) == ["bad_manifest"]
    assert federation.findings() == [["chunk_size"], ["chunk_size"], ["bad_manifest"]]
    assert not federation.store.state.releases


def test_an_announcement_above_the_policy_is_refused_before_it_is_sent(site: Site) -> None:
    site.reserved("grant-1")
    artifact = pictures()
    release = site.release("grant-1", artifact, artifact_bytes=10 << 30)
    assert rules(site.gateway().submit("key", site.seal(release), artifact)) == ["artifact_size"]


@pytest.mark.parametrize("garbage", [b"not a tar", b"", vector(), b"\0" * 4096])
def test_an_artifact_that_is_not_what_it_says_is_refused(site: Site, garbage: bytes) -> None:
    site.reserved("grant-1")
    verdict = site.gateway().submit("key", site.seal(site.release("grant-1", garbage)), garbage)
    assert {"artifact_malformed", "artifact_size"} & set(rules(verdict))


def test_a_replayed_envelope_is_refused_and_a_retry_gets_its_answer(federation: Federation, site: Site) -> None:
    site.reserved("grant-1")
    artifact = pictures()
    envelope = site.seal(site.release("grant-1", artifact))
    assert site.gateway().submit("key-1", envelope, artifact).admitted
    size = federation.store.state.size
    assert site.gateway().submit("key-1", envelope, artifact).admitted
    assert federation.store.state.size == size
    assert "replay" in rules(site.gateway().submit("key-2", envelope, artifact))
    assert len(federation.store.state.releases) == 1


def test_a_key_that_was_used_for_something_else_is_refused(site: Site) -> None:
    site.reserved("grant-1")
    other = reservation("grant-2", "site-a", "", "ksame", K5)
    assert rules(site.gateway().reserve("reserve-grant-1", site.seal(other))) == ["key_reused"]


def test_one_site_cannot_use_anothers_grant(federation: Federation, site: Site) -> None:
    site.reserved("grant-1")
    other, artifact = federation.join("site-b"), pictures()
    envelope = other.seal(other.release("grant-1", artifact))
    assert rules(other.gateway().submit("key", envelope, artifact)) == ["grant_of_another"]


def test_a_claim_that_lies_about_epsilon_is_refused(site: Site) -> None:
    site.reserved("grant-1", DP, "federated", "run-1")
    artifact = vector()
    honest = site.update("grant-1", artifact, 15, run="run-1", round=1)
    assert honest.epsilon_nano is not None
    lie = replace(honest, epsilon_nano=honest.epsilon_nano // 2)
    assert rules(site.gateway().submit("key-1", site.seal(lie), artifact)) == ["epsilon"]
    fewer = replace(honest, claim=SubsampledGaussian(0.25, 3.6, 15))
    assert "claim_not_granted" in rules(site.gateway().submit("key-2", site.seal(fewer), artifact))
    assert site.gateway().submit("key-3", site.seal(honest), artifact).admitted


def test_no_grant_no_release(site: Site) -> None:
    artifact = pictures()
    envelope = site.seal(site.release("grant-none", artifact))
    assert rules(site.gateway().submit("key", envelope, artifact)) == ["no_grant"]


def test_an_expired_grant_is_spent_and_covers_nothing(federation: Federation, site: Site) -> None:
    site.reserved("grant-1")
    settlement = Settlement("grant-1", "site-a", "", "ksame", "expired", "restart", 0)
    site.gateway().settle("settle-grant-1", site.seal(settlement))
    assert federation.store.state.accounts["site-a/k"].spent == 1
    artifact = pictures()
    envelope = site.seal(site.release("grant-1", artifact))
    assert rules(site.gateway().submit("key", envelope, artifact)) == ["grant_closed"]


def test_a_vector_that_is_not_finite_never_counts(site: Site) -> None:
    site.reserved("grant-1", DP, "federated", "run-1")
    good = vector()
    bad = good[:-4] + b"\x00\x00\xc0\x7f"  # NaN
    release = site.update("grant-1", bad, 15, run="run-1", round=1)
    assert rules(site.gateway().submit("key", site.seal(release), bad)) == ["artifact_malformed"]


def test_an_outcome_is_told_to_the_site_whose_key_it_is_and_to_nobody_else(
    federation: Federation, site: Site
) -> None:
    other = federation.join("site-b")
    site.reserved("grant-1")
    sealed = hashlib.sha256(site.seal(site.hospital.reservation("grant-1"))).digest()
    found = site.gateway().outcome("reserve-grant-1", sealed)
    assert found is not None
    assert found.admitted
    assert other.gateway().outcome("reserve-grant-1", sealed) is None
    assert site.gateway().outcome("reserve-grant-9", sealed) is None


def test_an_exception_inside_never_reaches_the_peer_as_text(
    federation: Federation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_args: object) -> None:
        raise RuntimeError("patient MRN-ZEBRA in ward 7")

    monkeypatch.setattr(federation.intake.register.__class__, "reserve", fault)
    with pytest.raises(CoordinatorUnreachableError) as caught:
        site.gateway().reserve("key", site.seal(reservation("grant-1", "site-a", "", "ksame", K5)))
    assert "ZEBRA" not in str(caught.value)
    assert "incident" in str(caught.value)
    assert b"ZEBRA" not in (federation.home.root / "coordinator.log").read_bytes()


def test_an_agent_refuses_a_ledger_signed_by_another_key(federation: Federation, site: Site) -> None:
    public = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    (site.home.keys / "coordinator.pub").write_text(base64.b64encode(public).decode())
    with pytest.raises(CoordinatorUnreachableError, match="another key"):
        site.gateway().hello()


def test_what_a_crash_left_on_the_shelf_is_finished_or_removed(tmp_path: Path) -> None:
    with Federation(tmp_path) as first:
        site = first.join("site-a")
        site.reserved("grant-1")
        artifact = pictures()
        release = site.release("grant-1", artifact)
        envelope = site.seal(release)
        mine = staged(first.uploads, "site-a", artifact)
        staged(first.uploads, "site-a", b"whole, and nobody asked for a verdict")
        staged_artifact = StagedArtifact(release.artifact_sha256, mine.stat().st_size, lambda: [])
        first.intake.admit("site-a", "key", envelope, release, staged_artifact)  # and then the power goes
        waiting = hashlib.sha256(b"whole, and nobody asked for a verdict").hexdigest()
    with Federation(tmp_path) as second:
        assert (second.home.releases / release_id("site-a", "grant-1", 0) / "images.tar").read_bytes() == artifact
        left = [path.name for path in (second.shelf.staging / "ready").glob("*/*")]
        assert left == [waiting], "its upload is still open, and the site may submit it"
        assert len(second.store.state.releases) == 1
