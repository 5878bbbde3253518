"""What never leaves: tokens and private keys in no message and no log, and no text of an exception at a peer."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

from agent.edges import home as agent_home
from agent.edges.enrol import Given, enrol, over_grpc
from coordinator.intake import Intake
from policies.policy import preset
from policies.register import Register
from protos.token import read_token, token_key
from protos.v1 import gateway_pb2 as pb
from tests.attacks.ground import SERVICE, Code, Ground, call, now, refusal
from tests.support.books import Hospital
from tests.support.federation import SETTINGS, Site, pictures


def private_bytes(folder: Path) -> Iterator[bytes]:
    """Every private key below a folder: its file's text, and the number itself."""
    for path in folder.rglob("*"):
        if path.is_file() and b"PRIVATE KEY" in (body := path.read_bytes()):
            if b"OPENSSH" not in body:  # whose first lines are the same for every key
                yield body.partition(b"PRIVATE KEY-----\n")[2].splitlines()[0]
            load = load_ssh_private_key if b"OPENSSH" in body else load_pem_private_key
            key = load(body, None)
            if isinstance(key, Ed25519PrivateKey):
                yield key.private_bytes_raw()
            elif isinstance(key, ec.EllipticCurvePrivateKey):
                yield key.private_numbers().private_value.to_bytes((key.key_size + 7) // 8)


def test_no_token_and_no_private_key_is_in_a_message_or_a_log(ground: Ground) -> None:
    federation = ground.federation
    home = agent_home.create(
        federation.root / "site-n", SETTINGS.format(site="site-n", listen=ground.target), preset("internal")
    )
    with ground.as_operator() as operator:
        invited = call(operator, "Invite", pb.InviteRequest(site="site-n"))
        shown = len(federation.recorder.messages)  # the operator's own answer has the token: for the telephone
        assert invited.token.encode() in b"".join(federation.recorder.messages)
        enrol(home, Given(invited.invitation, invited.token, invited.fingerprint), over_grpc(), now())
        federation.approve("site-n")
        assert enrol(home, None, over_grpc(), now()).state == "enrolled"
    site = Site(home, Hospital("site-n", key=home.sign_key()), federation)
    door = site.door()
    assert door.renew(now() + dt.timedelta(hours=20), 0.0)
    door.hello()
    site.reserved("grant-1")
    release = site.release("grant-1", pictures())
    ground.honest.add(release.release)
    assert site.door().submit("k", site.seal(release), pictures()).admitted
    token = read_token(invited.token)
    secrets = [invited.token.encode(), token, token_key(token).private_numbers().private_value.to_bytes(32)]
    secrets += list(private_bytes(home.root)) + list(private_bytes(federation.home.root))
    assert len(secrets) >= 3 + 2 * 6
    said = b"".join(federation.recorder.messages[shown:]) + invited.invitation
    logs = [path for path in federation.root.rglob("*.log") if path.is_file()]
    for body in (said, *(path.read_bytes() for path in logs)):
        assert not [len(secret) for secret in secrets if secret in body]
    assert len(said) > 10_000
    assert logs


def test_whatever_breaks_inside_a_peer_hears_a_number_and_nothing_else(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("patient MRN-ZEBRA, /srv/coordinator/keys/intermediate.key")

    monkeypatch.setattr(Register, "reserve", fault)
    monkeypatch.setattr(Intake, "release", fault)
    monkeypatch.setattr(Intake, "outcome", fault)
    envelope = site.seal(site.hospital.reservation("g"))
    sealed = pb.SealedRequest(key="k", envelope=envelope)
    requests = {"Reserve": sealed, "Offer": pb.OfferRequest(sealed=sealed), "Submit": sealed}
    requests["Outcome"] = pb.OutcomeRequest(key="k")
    with ground.as_site(site) as channel, ground.refused():
        for method, request in requests.items():
            error = refusal(lambda method=method, request=request: call(channel, method, request))
            assert error.code() == Code.INTERNAL
            assert error.details().startswith("incident "), method
    assert b"ZEBRA" not in b"".join(ground.federation.recorder.messages)
    assert "ZEBRA" not in ground.log()
    assert ground.log().count('"event": "incident"') == len(requests)


def test_no_method_answers_an_empty_request_with_the_inside_of_the_service(ground: Ground, site: Site) -> None:
    with ground.as_site(site) as channel:
        for method in sorted(m.name for m in SERVICE.methods if m.name not in ("Session", "Fleet")):
            try:
                call(channel, method)
            except grpc.RpcError as error:
                text = str(error.details())
                assert not any(word in text for word in ("Traceback", "Error", "coordinator/", "0x", "File")), text
