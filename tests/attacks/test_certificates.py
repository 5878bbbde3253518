"""Who may speak at all: certificates that are forged, ended, revoked, or for something else."""

from __future__ import annotations

import datetime as dt
import ssl
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.gateway.credentials import Credentials
from coordinator.gateway import notifications, service
from coordinator.gateway.calls import AGENT, JOINING, OPERATING
from coordinator.gateway.guard import ROLES
from protos.identity.certificates import (
    agent_name,
    certify,
    joining_name,
    leaf_of,
    make_intermediate,
    make_root,
    request,
)
from protos.identity.key_files import pem
from protos.protocol_version import USER_AGENT
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.attacks.ground import SERVICE, Code, Ground, Kind, Relay, call, forged_leaf, now, refusal, signer_of
from tests.support.federation_world import Site, pictures

HOUR = dt.timedelta(hours=1)
NAME = agent_name("site-a")


def shut_out(ground: Ground, key: bytes, chain: bytes) -> None:
    """Not even the handshake: nobody to name in the ledger."""
    with ground.refused(), ground.channel(key, chain) as channel:
        assert refusal(lambda: call(channel, "Hello")).code() == Code.UNAVAILABLE


def test_a_certificate_of_another_root_is_shut_out(ground: Ground, site: Site) -> None:
    held = Credentials(site.home.keys)
    intermediate = make_intermediate(make_root(now()), now())
    public = leaf_of(held.chain()).public_key()
    shut_out(ground, held.key(), certify(public, NAME, intermediate, now()))
    ground.works(site)


def test_a_self_made_intermediate_that_bears_the_real_ones_name_is_shut_out(ground: Ground, site: Site) -> None:
    root = leaf_of(ground.federation.home.root_crt())
    impostor = signer_of(make_root(now()))  # signs in the root's name, with another key
    key, authority = forged_leaf(root, impostor, [], Kind(authority=True, subject="Lazaret federation CA"))
    leaf_key, leaf = forged_leaf(leaf_of(authority), key, [NAME])
    shut_out(ground, *_pem(leaf_key, leaf + authority))
    shut_out(ground, *_pem(leaf_key, leaf + authority + ground.federation.home.root_crt()))
    ground.works(site)


def test_a_sites_own_certificate_does_not_make_further_ones(ground: Ground, site: Site) -> None:
    held = Credentials(site.home.keys)
    key, leaf = forged_leaf(leaf_of(held.chain()), signer_of((held.key(), held.chain())), [agent_name("site-b")])
    shut_out(ground, *_pem(key, leaf + held.chain()))
    ground.works(site)


def test_an_intermediate_makes_no_further_authority_and_no_name_outside_the_federation(
    ground: Ground, site: Site
) -> None:
    """Its path length is 0 and its name constraint critical: a thief of its key gains no more than its leaves."""
    ca = ground.federation.home.ca()
    below_key, below = forged_leaf(leaf_of(ca[1]), signer_of(ca), [], Kind(authority=True, subject="Below"))
    key, leaf = forged_leaf(leaf_of(below), below_key, [NAME])
    shut_out(ground, *_pem(key, leaf + below + ca[1]))
    key, leaf = forged_leaf(leaf_of(ca[1]), signer_of(ca), ["spiffe://elsewhere/hospital/site-a/agent"])
    shut_out(ground, *_pem(key, leaf + ca[1]))
    ground.works(site)


def test_an_authority_without_a_name_gets_through_the_handshake_and_no_further(ground: Ground, site: Site) -> None:
    """Its leaf looks self-issued, which RFC 5280 (6.1.4) does not count in the path; the ledger knows none of it."""
    ca = ground.federation.home.ca()
    below_key, below = forged_leaf(leaf_of(ca[1]), signer_of(ca), [], Kind(authority=True))
    key, leaf = forged_leaf(leaf_of(below), below_key, [NAME])
    with ground.channel(*_pem(key, leaf + below + ca[1])) as channel, ground.refused("revoked"):
        assert refusal(lambda: call(channel, "Hello")).code() == Code.PERMISSION_DENIED


def test_no_certificate_and_no_tls_are_shut_out(ground: Ground, site: Site) -> None:
    with ground.refused():
        bare = grpc.ssl_channel_credentials(ground.federation.home.root_crt())
        with grpc.secure_channel(ground.target, bare) as channel:
            assert refusal(lambda: call(channel, "Hello")).code() == Code.UNAVAILABLE
        with grpc.insecure_channel(ground.target) as channel:
            assert refusal(lambda: call(channel, "Hello")).code() == Code.UNAVAILABLE
    ground.works(site)


def test_an_expired_certificate_is_shut_out_at_the_handshake(ground: Ground, site: Site) -> None:
    ca = ground.federation.home.ca()
    for left in (-HOUR, dt.timedelta(seconds=-1)):
        key, leaf = forged_leaf(leaf_of(ca[1]), signer_of(ca), [NAME], Kind(left=left))
        shut_out(ground, *_pem(key, leaf + ca[1]))
    ground.works(site)


def test_a_certificate_that_ends_while_its_connection_is_open_makes_no_further_call(
    ground: Ground, site: Site
) -> None:
    short = ground.issued("site-a", NAME, ground.moment(site))
    with ground.channel(*short.pair) as channel:
        assert call(channel, "Hello").policy
        time.sleep(max(0.0, (short.leaf.not_valid_after_utc - now()).total_seconds()) + 0.1)
        with ground.refused("expired"):
            error = refusal(lambda: call(channel, "Hello"))
        assert (error.code(), error.details()) == (Code.UNAUTHENTICATED, "the certificate is not valid now")
    ground.works(site)


def test_a_certificate_that_the_ledger_never_issued_is_turned_away(ground: Ground, site: Site) -> None:
    """As after a theft of the intermediate's key: the signature is right, and no entry knows it."""
    key, leaf = forged_leaf(leaf_of(ground.federation.home.ca()[1]), signer_of(ground.federation.home.ca()), [NAME])
    with ground.channel(*_pem(key, leaf + ground.federation.home.ca()[1])) as channel:
        for method in ("Hello", "Renew", "Session"):
            with ground.refused("revoked"):
                error = refusal(lambda method=method: call(channel, method))
            assert error.code() == Code.PERMISSION_DENIED
            assert "never issued" in error.details()


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        ([NAME, agent_name("site-b")], "several_names"),
        ([NAME, NAME], "several_names"),
        ([], "no_name"),
        (["spiffe://lazaret/hospital/../coordinator"], "no_role"),
        (["spiffe://lazaret/coordinator"], "no_role"),
        (["spiffe://lazaret/hospital/SITE-A/agent"], "no_role"),
    ],
)
def test_a_certificate_with_other_than_one_known_name_is_turned_away(
    ground: Ground, site: Site, names: list[str], rule: str
) -> None:
    """It says no single site's name, so no site is named in the ledger; the log has the rule."""
    ca = ground.federation.home.ca()
    key, leaf = forged_leaf(leaf_of(ca[1]), signer_of(ca), names)
    with ground.refused(), ground.channel(*_pem(key, leaf + ca[1])) as channel:
        code = refusal(lambda: call(channel, "Hello")).code()
    assert code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
    assert f'"rule": "{rule}"' in ground.log()


def test_tls_1_2_is_turned_away_on_every_call(ground: Ground, site: Site) -> None:
    """gRPC's own client over a relay: the same certificate is welcome over TLS 1.3, and not over 1.2."""
    for version, spoken in ((ssl.TLSVersion.TLSv1_3, "TLSv1.3"), (ssl.TLSVersion.TLSv1_2, "TLSv1.2")):
        relay = Relay(ground.federation.port, site.home.keys / "tls.pem", site.home.keys / "root.crt", version)
        options = [("grpc.primary_user_agent", USER_AGENT)]
        with grpc.insecure_channel(relay.target, options) as channel:
            if spoken == "TLSv1.3":
                assert call(channel, "Hello").policy
            else:
                with ground.refused():
                    error = refusal(lambda channel=channel: call(channel, "Hello"))
                assert (error.code(), error.details()) == (Code.UNAUTHENTICATED, "TLS 1.3 is required")
        relay.close()
        assert relay.spoken == [spoken]
    assert '"rule": "old_tls"' in ground.log()


def test_a_revocation_ends_open_streams_at_once_and_the_next_call_of_the_same_connection(
    ground: Ground, site: Site, other: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "UPLOAD_S", 900.0)  # neither is ended for its silence,
    monkeypatch.setattr(notifications, "BEAT_S", 900.0)  # and no beat asks whether the site is welcome
    site.reserved("grant-1")
    artifact, silence = pictures() + bytes(2 << 20), threading.Event()
    with ground.as_site(site) as channel, ground.as_operator() as operator:
        stub = GatewayStub(channel)
        offered = ground.offer(stub, site, site.release("grant-1", artifact), artifact)
        assert offered.upload

        def parts() -> Iterator[gateway_pb2.UploadPart]:
            yield gateway_pb2.UploadPart(upload=offered.upload)
            yield gateway_pb2.UploadPart(chunk=gateway_pb2.Chunk(index=0, data=artifact[: 1 << 20]))
            silence.wait(900)

        session = stub.Session(gateway_pb2.SessionRequest(version="test"), timeout=200)
        assert next(session).kind == "hello"
        upload = stub.Upload.future(parts())
        while ground.federation.service.guard.open_calls()["Upload"] == 0:
            time.sleep(0.01)
        call(operator, "Revoke", gateway_pb2.RevokeRequest(site="site-a", reason="stolen"))
        assert refusal(lambda: list(session)).code() == Code.CANCELLED
        ended = refusal(lambda: upload.result(timeout=200)).code()
        assert ended in (Code.CANCELLED, Code.PERMISSION_DENIED)  # the latter where a part of it came just then
        assert not silence.is_set()
        silence.set()
        before = len(ground.federation.findings())
        for method in ("Hello", "Offer", "Renew", "Session", "Fleet"):
            error = refusal(lambda method=method: call(channel, method))
            assert (error.code(), "revoked" in error.details()) == (Code.PERMISSION_DENIED, True), method
        assert ground.federation.findings()[before:] == [["revoked"]] * 5
    assert ground.federation.store.state.accounts["site-a/k"].held == 1, "as reserved: what is held stays held"
    ground.works(other)


def test_one_certificate_of_a_site_is_revoked_and_the_site_goes_on_with_another(ground: Ground, site: Site) -> None:
    stolen = ground.issued("site-a", NAME, HOUR)
    with ground.channel(*stolen.pair) as channel, ground.as_operator() as operator:
        assert call(channel, "Hello").policy
        number = f"{stolen.leaf.serial_number:x}"
        call(operator, "Revoke", gateway_pb2.RevokeRequest(site="site-a", certificate=number, reason="lost"))
        with ground.refused("revoked"):
            assert refusal(lambda: call(channel, "Hello")).code() == Code.PERMISSION_DENIED
    ground.works(site)


def test_a_certificate_of_before_a_new_enrolment_is_turned_away(ground: Ground, site: Site) -> None:
    old = Credentials(site.home.keys)
    with ground.as_operator() as operator:
        call(operator, "Revoke", gateway_pb2.RevokeRequest(site="site-a", reason="left"))
    site.home.root.rename(site.home.root.with_name("before"))
    again = ground.federation.join("site-a")
    ground.works(again)
    with ground.channel(old.key(), old.chain()) as channel, ground.refused("revoked"):
        assert refusal(lambda: call(channel, "Hello")).code() == Code.PERMISSION_DENIED
    with ground.refused("bad_envelope"):  # and the key of before signs nothing any more
        word = again.hospital.reservation("grant-1")
        site.home = type(site.home)(site.home.root.with_name("before"))
        assert not again.gateway().reserve("k", site.seal(word)).admitted


def methods(*roles: str) -> list[str]:
    return sorted(method for method, role in ROLES.items() if role in roles)


def test_every_method_is_for_one_role_and_a_method_without_one_is_nobodys(ground: Ground, site: Site) -> None:
    assert set(ROLES) == {method.name for method in SERVICE.methods}
    with ground.as_site(site) as channel, ground.refused():
        for path in ("/lazaret.v1.Gateway/Nothing", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"):
            error = refusal(lambda path=path: channel.unary_unary(path)(b"", timeout=120))
            assert error.code() == Code.UNIMPLEMENTED


def test_an_agent_makes_no_operators_call_and_none_of_a_joining_site(ground: Ground, site: Site) -> None:
    barred = methods(OPERATING, JOINING)
    with ground.as_site(site) as channel, ground.refused(*["wrong_role"] * len(barred)):
        for method in barred:
            assert refusal(lambda method=method: call(channel, method)).code() == Code.PERMISSION_DENIED, method


def test_an_operator_makes_no_agents_call(ground: Ground, site: Site) -> None:
    barred = methods(AGENT, JOINING)
    with ground.as_operator() as channel, ground.refused():
        for method in barred:
            assert refusal(lambda method=method: call(channel, method)).code() == Code.PERMISSION_DENIED, method
    assert ground.log().count('"rule": "wrong_role"') == len(barred)


def test_a_joining_certificate_does_nothing_but_ask(ground: Ground, site: Site) -> None:
    """Also one in the name of a site that is enrolled: it speaks for nobody, so no site is named in the ledger."""
    ca, barred = ground.federation.home.ca(), methods(AGENT, OPERATING)
    key, leaf = forged_leaf(leaf_of(ca[1]), signer_of(ca), [joining_name("site-a")])
    with ground.channel(*_pem(key, leaf + ca[1])) as channel, ground.refused():
        for method in barred:
            assert refusal(lambda method=method: call(channel, method)).code() == Code.PERMISSION_DENIED, method
    assert ground.log().count('"rule": "wrong_role"') == len(barred)


def test_a_renewal_is_for_the_peers_own_name_and_a_fresh_key(ground: Ground, site: Site) -> None:
    requests = {"not for": agent_name("site-b"), "fresh key": NAME}
    held = Credentials(site.home.keys)
    with ground.as_site(site) as channel, ground.refused("renew", "renew"):
        for words, name in requests.items():
            csr = request(signer_of((held.key(), held.chain())), name)
            error = refusal(lambda csr=csr: call(channel, "Renew", gateway_pb2.RenewRequest(csr=csr)))
            assert words in error.details()


def _pem(key: ec.EllipticCurvePrivateKey, chain: bytes) -> tuple[bytes, bytes]:
    return pem(key), chain
