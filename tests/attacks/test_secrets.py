"""What never leaves: tokens and private keys in no message and no log, and no text of an exception at a peer."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

from agent.gateway.enrolment import Given, enrol, over_grpc
from agent.storage import site_directory
from coordinator import admission
from coordinator.admission import AdmissionService
from coordinator.enrolment.authority import Authority, JoinError
from coordinator.gateway.calls import AGENT, JOINING, OPERATING
from coordinator.gateway.guard import ROLES
from coordinator.gateway.service import Service
from policies.ledger.merkle import Checkpoint, cosign, sign_checkpoint
from policies.ledger.store import Store
from policies.ledger_service import LedgerService
from policies.review.policy import preset
from protos.identity.certificates import certify, joining_name
from protos.identity.join_token import read_token, token_key
from protos.identity.key_files import pem, replace_private
from protos.v1 import gateway_pb2
from tests.attacks.ground import SERVICE, Code, Ground, call, now, refusal
from tests.support.federation_world import SETTINGS, Federation, Site, pictures
from tests.support.ledger_world import Hospital


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
    home = site_directory.create(
        federation.root / "site-n", SETTINGS.format(site="site-n", listen=ground.target), preset("internal")
    )
    with ground.as_operator() as operator:
        invited = call(operator, "Invite", gateway_pb2.InviteRequest(site="site-n"))
        shown = len(federation.recorder.messages)  # the operator's own answer has the token: for the telephone
        assert invited.token.encode() in b"".join(federation.recorder.messages)
        enrol(home, Given(invited.invitation, invited.token, invited.fingerprint), over_grpc(), now())
        federation.approve("site-n")
        assert enrol(home, None, over_grpc(), now()).state == "enrolled"
    site = Site(home, Hospital("site-n", key=home.sign_key()), federation)
    gateway = site.gateway()
    assert gateway.renew(now() + dt.timedelta(hours=20), 0.0)
    gateway.hello()
    site.reserved("grant-1")
    release = site.release("grant-1", pictures())
    ground.honest.add(release.release)
    assert site.gateway().submit("k", site.seal(release), pictures()).admitted
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

    monkeypatch.setattr(LedgerService, "reserve", fault)
    monkeypatch.setattr(AdmissionService, "release", fault)
    monkeypatch.setattr(AdmissionService, "outcome", fault)
    envelope = site.seal(site.hospital.reservation("g"))
    sealed = gateway_pb2.SealedRequest(key="k", envelope=envelope)
    requests = {"Reserve": sealed, "Offer": gateway_pb2.OfferRequest(sealed=sealed), "Submit": sealed}
    requests["Outcome"] = gateway_pb2.OutcomeRequest(key="k")
    with ground.as_site(site) as channel, ground.refused():
        for method, request in requests.items():
            error = refusal(lambda method=method, request=request: call(channel, method, request))
            assert error.code() == Code.INTERNAL
            assert error.details().startswith("incident "), method
    assert b"ZEBRA" not in b"".join(ground.federation.recorder.messages)
    assert "ZEBRA" not in ground.log()
    assert ground.log().count('"event": "incident"') == len(requests)


def raising(of: type[BaseException], text: str) -> Any:
    """A call that raises it, whatever it is asked."""

    def act(*_: object, **__: object) -> None:
        raise of(text)

    return act


MANAGED = {"Join": "join", "Renew": "renew", "Invite": "invite", "Approve": "enrol", "Revoke": "revoke"}


@pytest.mark.parametrize("method", sorted(MANAGED))
def test_only_errors_that_were_written_for_peers_are_told_in_words(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A library's ValueError is no refusal: its text may quote anything."""
    request = gateway_pb2.RevokeRequest(site="site-n", reason="left") if method == "Revoke" else None
    joining = ec.generate_private_key(ec.SECP256R1())
    waiting = certify(joining.public_key(), joining_name("site-n"), ground.federation.home.ca(), now())
    with (
        ground.as_site(site) as own,
        ground.as_operator() as operator,
        ground.channel(pem(joining), waiting) as joiner,
    ):
        channel = {AGENT: own, OPERATING: operator, JOINING: joiner}[ROLES[method]]
        monkeypatch.setattr(Authority, MANAGED[method], raising(ValueError, "patient MRN-ZEBRA"))
        error = refusal(lambda: call(channel, method, request))
        assert (error.code(), error.details()[:9]) == (Code.INTERNAL, "incident ")
        monkeypatch.setattr(Authority, MANAGED[method], raising(JoinError, "ask for a new invitation"))
        error = refusal(lambda: call(channel, method, request))
        assert (error.code(), error.details()) == (Code.FAILED_PRECONDITION, "ask for a new invitation")
    assert "ZEBRA" not in ground.log()


def test_a_fault_in_the_coordinators_own_files_is_told_to_its_operator_and_to_nobody_else(
    ground: Ground, site: Site
) -> None:
    federation, joining = ground.federation, ec.generate_private_key(ec.SECP256R1())
    waiting = certify(joining.public_key(), joining_name("site-n"), federation.home.ca(), now())
    replace_private(federation.home.enrolments / "site-n.json", b"{}")
    with ground.channel(pem(joining), waiting) as joiner, ground.as_operator() as operator:
        error = refusal(lambda: call(joiner, "Join"))
        assert (error.code(), error.details()[:9]) == (Code.INTERNAL, "incident ")
        error = refusal(lambda: call(operator, "Enrolments"))
        assert error.code() == Code.FAILED_PRECONDITION
        assert "enrolments/site-n.json cannot be read: remove it" in error.details()


def test_a_statement_that_breaks_its_reader_is_refused_without_the_readers_words(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    envelope = site.seal(site.hospital.reservation("g"))
    monkeypatch.setattr(admission, "parse", raising(ValueError, "patient MRN-ZEBRA"))
    with ground.as_site(site) as own, ground.refused("bad_statement"):
        reply = call(own, "Reserve", gateway_pb2.SealedRequest(key="k", envelope=envelope))
    assert [(f.rule, f.detail) for f in reply.findings] == [("bad_statement", "the statement cannot be read")]
    assert b"ZEBRA" not in b"".join(ground.federation.recorder.messages)


def later(ground: Ground, site: Site) -> str:
    """A head that this ledger's key signed and that it does not hold, cosigned by the site: it was turned back."""
    store, key = ground.federation.store, ground.federation.home.ledger_key()
    note = sign_checkpoint(Checkpoint(store.origin, store.state.size + 1, bytes(32), 1, ""), key)
    return note + cosign(note, site.hospital.name, site.home.sign_key(), 1_700_000_000)


FIXED = re.compile(
    r"incident [0-9a-f]{8}: see the coordinator's log"
    "|the ledger is behind what this site has seen|a reason is one short word|this call needs one message"
    "|the first part names the upload|this certificate may not make this call"
    "|the signing request cannot be read|no request of that site waits for approval"
    "|there is no open invitation for this site: ask for a new one"
    "|a site's name is 1 to 63 of a-z, 0-9 and -, and not the coordinator's"
)


def test_after_a_rollback_stopped_the_ledger_every_peer_reads_a_fixed_text(
    ground: Ground, site: Site, other: Site
) -> None:
    """Every method, also one that is refused, of which the refusal can be written down no more."""
    joining = ec.generate_private_key(ec.SECP256R1())
    waiting = certify(joining.public_key(), joining_name("site-n"), ground.federation.home.ca(), now())
    said: list[tuple[str, str]] = []
    with ground.as_site(site) as own, ground.as_site(other) as neighbour, ground.as_operator() as operator:
        error = refusal(lambda: call(own, "Hello", gateway_pb2.HelloRequest(cosigned=later(ground, site))))
        assert (error.code(), error.details()) == (Code.UNAVAILABLE, "the ledger is behind what this site has seen")
        assert ground.federation.store.stopped
        with ground.channel(pem(joining), waiting) as joiner:
            for channel in (own, neighbour, operator, joiner):
                for method in sorted(ROLES):
                    try:
                        call(channel, method)
                    except grpc.RpcError as stopped:
                        said.append((method, str(stopped.details())))
    assert len(said) > 3 * len(ROLES), "next to nothing works any more"
    assert [(method, text) for method, text in said if not FIXED.fullmatch(text)] == []
    log = ground.log()
    assert '"event": "rolled_back"' in log
    assert '"event": "refusal_not_recorded"' in log, "what the ledger lacks is in the log"
    assert "replay" not in log, "the text of the exception"


def test_when_the_guards_own_reporting_fails_the_peer_reads_its_refusal_and_no_more(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object, **__: object) -> None:
        raise RuntimeError("patient MRN-ZEBRA, /srv/coordinator/ledger.db")

    monkeypatch.setattr(Store, "append", fault)
    with ground.as_site(site) as own:
        wrong = refusal(lambda: call(own, "Stop"))
        assert (wrong.code(), wrong.details()) == (
            Code.PERMISSION_DENIED,
            "this certificate may not make this call",
        )
        bad = refusal(lambda: call(own, "Upload"))
        assert (bad.code(), bad.details()) == (Code.INVALID_ARGUMENT, "the first part names the upload")
        assert ground.log().count('"event": "refusal_not_recorded"') == 2
        guard = ground.federation.service.guard
        monkeypatch.setattr(guard, "_log", SimpleNamespace(warning=fault, error=fault, info=fault))
        for method in ("Stop", "Upload", "Hello", "Session", "Reserve"):
            monkeypatch.setattr(guard, "_admits", fault)
            blind = refusal(lambda method=method: call(own, method))
            assert (blind.code(), blind.details()) == (
                Code.INTERNAL,
                "the call failed, and the coordinator cannot log why",
            )
    assert "ZEBRA" not in ground.log()


def test_a_reply_that_cannot_be_written_and_a_stream_that_breaks_off_say_no_more_than_a_number(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(_service: Any, _request: Any, _call: Any) -> Iterator[Any]:
        yield gateway_pb2.Notice(kind="hello")
        raise RuntimeError("patient MRN-ZEBRA")

    monkeypatch.setattr(Service, "Session", broken)
    monkeypatch.setattr(Service, "Hello", lambda *_: "MRN-ZEBRA, which is no reply")
    with Federation(ground.federation.root / "second") as federation:  # whose service has these methods
        second = Ground(federation)
        enrolled = federation.join("site-a")
        with second.as_site(enrolled) as own:
            for method in ("Hello", "Session"):
                error = refusal(lambda method=method: call(own, method))
                assert error.code() == Code.INTERNAL
                assert re.fullmatch(r"incident [0-9a-f]{8}: see the coordinator's log", error.details())
        assert second.log().count('"event": "incident"') == 2
        assert "ZEBRA" not in second.log()
    out, err = capfd.readouterr()
    assert "ZEBRA" not in out + err, "nor does gRPC's own log hear of it"


def test_no_method_answers_an_empty_request_with_the_inside_of_the_service(ground: Ground, site: Site) -> None:
    with ground.as_site(site) as channel:
        for method in sorted(m.name for m in SERVICE.methods if m.name not in ("Session", "Fleet")):
            try:
                call(channel, method)
            except grpc.RpcError as error:
                text = str(error.details())
                assert not any(word in text for word in ("Traceback", "Error", "coordinator/", "0x", "File")), text
