"""A hospital joins and renews: through a real port, with mutual TLS and the guard that stands before every call."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.cli.main import main
from agent.errors import CoordinatorUnreachableError, SiteConfigError
from agent.gateway import enrolment
from agent.gateway.channel import open_channel
from agent.gateway.credentials import Certified, Credentials, way_back
from agent.gateway.enrolment import EnrolmentProgress, Given, come_back, enrol, over_grpc, return_over_grpc
from agent.storage import site_directory
from coordinator.admission import AdmissionService
from coordinator.enrolment.authority import Authority, Invitation
from coordinator.event_log import open_log
from coordinator.gateway.calls import Call, CallRejectedError
from coordinator.gateway.guard import Guard
from coordinator.gateway.quotas import IdleTimeout
from coordinator.storage import directory as homes
from policies.governance import decisions
from policies.review.policy import preset
from protos.identity import certificates, key_files
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayServicer, GatewayStub, add_GatewayServicer_to_server
from tests.support.ledger_world import Person

HOUR = dt.timedelta(hours=1)
SITE = 'site = "{}"\ncoordinator = "localhost:{}"\ninput = "in"\nmodalities = ["OT"]\n' + (
    "secondary_capture_modalities = []\npublic_components = []\n"
)


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Registration(GatewayServicer):
    """The two calls that enrolment needs, behind the product's guard."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority

    def Join(self, request: Any, call: Call) -> Any:
        try:
            said = self.authority.join(call.peer.site, call.peer.leaf, request.envelope)
        except ValueError as refusal:
            raise CallRejectedError(grpc.StatusCode.FAILED_PRECONDITION, str(refusal), "join") from None
        return gateway_pb2.JoinReply(
            state=said.state,
            fingerprint=said.fingerprint,
            waiting_certificate=said.waiting_certificate,
            certificate=said.certificate,
            policy=said.policy,
            ledger_key=said.ledger_key,
            returning_certificate=said.returning_certificate,
        )

    def Renew(self, request: Any, call: Call) -> Any:
        return self._certified(lambda: self.authority.renew(call.peer.site, call.peer.leaf, request.csr))

    def Return(self, request: Any, call: Call) -> Any:
        return self._certified(lambda: self.authority.come_back(call.peer.site, call.peer.leaf, request.envelope))

    def _certified(self, ask: Callable[[], tuple[bytes, bytes]]) -> Any:
        try:
            chain, returning = ask()
        except ValueError as refusal:
            raise CallRejectedError(grpc.StatusCode.FAILED_PRECONDITION, str(refusal), "renew") from None
        return gateway_pb2.RenewReply(certificate=chain, returning_certificate=returning)


@dataclass
class Hub:
    """A coordinator's registration desk on a real port."""

    root: Path
    persons: list[Person] = field(default_factory=lambda: [Person("dpo", "compliance"), Person("chief", "hospital")])
    life: dt.timedelta = certificates.LEAF_LIFE

    def __enter__(self) -> Hub:
        self.home = homes.create(self.root / "hub", 'listen = "127.0.0.1:0"\n', preset("internal"), now())
        self.store = homes.open_ledger(self.home)
        for person in self.persons:
            decisions.appoint(self.store, person.name, person.role, person.public)
        intake = AdmissionService.over(self.store, self.home.policy())
        self.authority = Authority(self.home, intake, now, life=self.life)
        guard = Guard(
            self._admits,
            intake.report,
            open_log(self.home.root / "coordinator.log"),
            IdleTimeout(),
        )
        self.server = grpc.server(futures.ThreadPoolExecutor(4), interceptors=[guard])
        add_GatewayServicer_to_server(Registration(self.authority), self.server)
        self.port = self.server.add_secure_port("127.0.0.1:0", self._credentials())
        self.server.start()
        return self

    def _admits(self, site: str, number: str) -> bool:
        return self.store.state.admits(site, number)

    def _credentials(self) -> grpc.ServerCredentials:
        def fresh() -> grpc.ServerCertificateConfiguration:
            own = homes.own_certificate(self.home, now())
            return grpc.ssl_server_certificate_configuration([own], root_certificates=self.home.root_crt())

        return grpc.dynamic_ssl_server_credentials(fresh(), fresh, require_client_authentication=True)

    def __exit__(self, *_fault: object) -> None:
        self.server.stop(0).wait()
        self.store.close()

    def site(self, name: str = "a", folder: str = "", port: int = 0) -> site_directory.SiteDirectory:
        return site_directory.create(
            self.root / (folder or name), SITE.format(name, port or self.port), preset("internal")
        )

    def approve(self, site: site_directory.SiteDirectory, serial: str = "s1") -> None:
        name = site.settings().site
        digest = hashlib.sha256((site.root / "request.json").read_bytes()).hexdigest()
        words = (serial, "enrol", name, digest, self.store.origin)
        self.authority.enrol(name, serial, [person.approval(*words) for person in self.persons])

    def joined(self, site: site_directory.SiteDirectory) -> Credentials:
        asked(site, self.authority.invite(site.settings().site))
        self.approve(site, f"s-{site.settings().site}")
        assert asked(site).state == "enrolled"
        return Credentials(site.keys)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path) as made:
        yield made


def asked(
    site: site_directory.SiteDirectory, invitation: Invitation | None = None, /, **changes: Any
) -> EnrolmentProgress:
    """Run ``enrol`` as an operator would, with the product's own call."""
    given = None
    if invitation is not None:
        values = {
            "invitation": invitation.body,
            "token": invitation.token,
            "root_fingerprint": invitation.fingerprint,
        }
        given = Given(**{**values, **changes})
    return enrol(site, given, over_grpc(), now())


def files(site: site_directory.SiteDirectory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in site.keys.iterdir() if path.is_file()}


def renewed(hub: Hub, credentials: Credentials, when: dt.datetime | None = None) -> None:
    """Renew through the port."""
    with open_channel(f"localhost:{hub.port}", credentials.channel_credentials()) as channel:
        stub = GatewayStub(channel)

        def ask(csr: bytes) -> Certified:
            reply = stub.Renew(gateway_pb2.RenewRequest(csr=csr), timeout=120)
            return Certified(reply.certificate, reply.returning_certificate)

        credentials.renew(ask, when or now())


def test_a_hospital_joins_over_the_wire_and_the_key_it_was_born_with_is_in_use(hub: Hub) -> None:
    site = hub.site()
    born = key_files.ec_key(site.keys / "request.key").public_key()
    before = (site.root / "request.json").read_bytes()
    first = asked(site, hub.authority.invite("a"))
    assert first == EnrolmentProgress("waiting", certificates.fingerprint(before))
    assert hub.authority.enrolments()[0].fingerprint == first.fingerprint  # both sides read the same aloud
    with pytest.raises(SiteConfigError, match=r"no certificate|not enrolled"):
        Credentials(site.keys)
    assert asked(site).state == "waiting"
    hub.approve(site)
    assert asked(site) == EnrolmentProgress("enrolled", first.fingerprint)
    credentials = Credentials(site.keys)
    leaf = certificates.checked_chain(
        credentials.chain(), hub.home.root_crt(), certificates.agent_name("a"), born, now()
    )
    assert hub.store.state.admits("a", certificates.number_of(leaf))
    assert credentials.number == certificates.number_of(leaf)
    assert site.coordinator_key() == hub.store.public
    assert site.federation_policy() == hub.home.policy()
    assert not (site.keys / enrolment.WAITING).exists()
    assert all(path.stat().st_mode & 0o077 == 0 for path in site.keys.iterdir() if path.suffix in (".pem", ".key"))


def test_the_token_and_the_keys_never_cross_the_wire(hub: Hub) -> None:
    site, invitation, sent = hub.site(), hub.authority.invite("a"), list[bytes]()

    def heard(credentials: grpc.ChannelCredentials, target: str, envelope: bytes) -> Any:
        sent.append(envelope)
        reply = over_grpc()(credentials, target, envelope)
        sent.append(reply.SerializeToString())
        return reply

    enrol(site, Given(invitation.body, invitation.token, invitation.fingerprint), heard, now())
    keys = [key_files.pem(key_files.ec_key(site.keys / "request.key")), key_files.pem(site.sign_key())]
    secrets = [invitation.token.encode(), *(key.split(b"\n")[1] for key in keys)]
    assert len(sent) == 2
    assert not any(secret in message for secret in secrets for message in sent)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"token": "AAAA-AAAA"}, "mistyped"),
        ({"token": ""}, "mistyped"),
        ({"root_fingerprint": "0" * 32}, "fingerprint"),
        ({"root_fingerprint": ""}, "fingerprint"),
        ({"invitation": b"junk"}, "cannot be read"),
        ({"invitation": b"[]"}, "cannot be read"),
        ({"invitation": b"{}"}, "cannot be read"),
    ],
)
def test_a_slip_of_the_operator_is_said_in_a_sentence_before_anything_is_sent(
    hub: Hub, changes: dict[str, Any], sentence: str
) -> None:
    site = hub.site()
    before = files(site)
    with pytest.raises(SiteConfigError, match=sentence):
        asked(site, hub.authority.invite("a"), **changes)
    assert files(site) == before
    assert hub.authority.enrolments()[0].state == "invited"


def test_the_token_of_another_invitation_is_found_out_at_once(hub: Hub) -> None:
    site = hub.site()
    old, new = hub.authority.invite("a"), hub.authority.invite("a")
    with pytest.raises(SiteConfigError, match="does not match this invitation"):
        asked(site, new, token=old.token)
    with pytest.raises(SiteConfigError, match=r"refuses: .*replaced"):
        asked(site, old)
    assert asked(site, new).state == "waiting"


def test_an_invitation_for_another_site_or_of_another_time_is_refused(hub: Hub) -> None:
    site = hub.site()
    with pytest.raises(SiteConfigError, match="another site"):
        asked(site, hub.authority.invite("b"))
    invitation = hub.authority.invite("a")
    given = Given(invitation.body, invitation.token, invitation.fingerprint)
    with pytest.raises(SiteConfigError, match="has expired"):
        enrol(site, given, over_grpc(), now() + HOUR)
    with pytest.raises(SiteConfigError, match="clock"):
        enrol(site, given, over_grpc(), now() - HOUR)


def test_a_false_coordinator_with_a_root_of_its_own_is_not_believed(hub: Hub, tmp_path: Path) -> None:
    with Hub(tmp_path / "false") as false:
        site = hub.site(port=false.port)
        true, bait = hub.authority.invite("a"), false.authority.invite("a")
        with pytest.raises(SiteConfigError, match="fingerprint"):
            asked(site, bait, root_fingerprint=true.fingerprint)
        body = json.loads(bait.body)
        body["root"] = json.loads(true.body)["root"]
        with pytest.raises(SiteConfigError, match="does not match this invitation"):
            asked(site, bait, root_fingerprint=true.fingerprint, invitation=json.dumps(body).encode())
        with pytest.raises(CoordinatorUnreachableError, match="with that root"):
            asked(site, true)  # it answers at the address, under its own root
        assert not false.store.state.sites
        assert false.authority.enrolments()[0].state == "invited"


def test_nobody_answers_is_said_so(hub: Hub) -> None:
    site, invitation = hub.site(port=1), hub.authority.invite("a")
    with pytest.raises(CoordinatorUnreachableError, match="does not answer"):
        asked(site, invitation)


def test_a_coordinator_that_speaks_of_another_request_is_not_believed(hub: Hub) -> None:
    site, invitation = hub.site(), hub.authority.invite("a")
    given = Given(invitation.body, invitation.token, invitation.fingerprint)

    def swapped(credentials: grpc.ChannelCredentials, target: str, envelope: bytes) -> Any:
        reply = over_grpc()(credentials, target, envelope)
        reply.fingerprint = certificates.fingerprint(b"another")
        return reply

    with pytest.raises(SiteConfigError, match="another request"):
        enrol(site, given, swapped, now())
    assert not (site.keys / enrolment.WAITING).exists()


@pytest.mark.parametrize("part", ["certificate", "policy", "ledger_key", "state", "stranger's certificate"])
def test_an_answer_with_one_bad_part_changes_nothing(hub: Hub, part: str) -> None:
    site, other = hub.site(), hub.site("b")
    asked(site, hub.authority.invite("a"))
    hub.approve(site)
    strangers = hub.joined(other).chain() if "stranger" in part else b""
    before = files(site)

    def bent(credentials: grpc.ChannelCredentials, target: str, envelope: bytes) -> Any:
        reply = over_grpc()(credentials, target, envelope)
        name = part.rpartition(" ")[2]
        values = {"certificate": strangers or b"junk", "policy": "x", "ledger_key": b"short", "state": "done"}
        setattr(reply, name, values[name])
        return reply

    with pytest.raises(SiteConfigError):
        enrol(site, None, bent, now())
    assert files(site) == before
    assert asked(site).state == "enrolled"


def test_asking_without_an_invitation_needs_one_first(hub: Hub) -> None:
    site = hub.site()
    with pytest.raises(SiteConfigError, match="with an invitation"):
        asked(site)
    asked(site, hub.authority.invite("a"))
    kept = (site.keys / enrolment.WAITING).read_bytes()
    for bad in (b"junk", b"{}", b"[]"):
        (site.keys / enrolment.WAITING).write_bytes(bad)
        with pytest.raises(SiteConfigError, match="damaged"):
            asked(site)
    (site.keys / enrolment.WAITING).write_bytes(kept)
    with pytest.raises(SiteConfigError, match="new invitation"):
        enrol(site, None, over_grpc(), now() + 8 * 24 * HOUR)
    (site.keys / enrolment.WAITING).chmod(0o644)
    with pytest.raises(key_files.KeyFileError):
        asked(site)


def test_a_declined_request_is_told_so(hub: Hub) -> None:
    site = hub.site()
    asked(site, hub.authority.invite("a"))
    hub.authority.revoke("a", "", "left")
    assert asked(site).state == "declined"


def test_a_site_never_changes_over_to_another_ledger_key(hub: Hub) -> None:
    site = hub.site()
    hub.joined(site)
    key_files.replace_private(site.keys / "coordinator.pub", b"A" * 43 + b"=")
    with pytest.raises(SiteConfigError, match="another key than before"):
        asked(site, hub.authority.invite("a"))


@pytest.mark.parametrize("died_at", ["coordinator.pub", "federation.toml", "root.crt", "tls.pem"])
def test_a_crash_while_the_answer_is_put_in_place_is_healed_by_asking_again(
    hub: Hub, died_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = hub.site()
    asked(site, hub.authority.invite("a"))
    hub.approve(site)
    write = key_files.replace_private

    def dying(path: Path, body: bytes) -> None:
        if path.name == died_at:
            raise KeyboardInterrupt
        write(path, body)

    for module in ("agent.gateway.enrolment", "agent.gateway.credentials"):
        monkeypatch.setattr(f"{module}.replace_private", dying)
    with pytest.raises(KeyboardInterrupt):
        asked(site)
    monkeypatch.undo()
    with pytest.raises(SiteConfigError):
        Credentials(site.keys)
    assert asked(site).state == "enrolled"
    renewed(hub, Credentials(site.keys))


def test_a_renewal_takes_a_fresh_key_into_use_and_the_old_one_is_gone(hub: Hub) -> None:
    site = hub.site()
    credentials = hub.joined(site)
    old_key, old = credentials.key(), credentials.number
    renewed(hub, credentials)
    assert credentials.key() != old_key
    assert credentials.number != old
    assert hub.store.state.admits("a", credentials.number)
    again = Credentials(site.keys)
    assert (again.key(), again.chain()) == (credentials.key(), credentials.chain())
    assert not any(old_key in body for name, body in files(site).items() if name != "request.key")
    renewed(hub, again)


def test_it_is_time_to_renew_after_two_thirds_of_the_life(hub: Hub) -> None:
    credentials = hub.joined(hub.site())
    start = credentials.not_after - dt.timedelta(hours=24, minutes=5)
    life = credentials.not_after - start
    for jitter in (-0.1, 0.0, 0.1):
        at = start + (2 / 3 + jitter) * life
        assert not credentials.due(at - dt.timedelta(seconds=1), jitter)
        assert credentials.due(at + dt.timedelta(seconds=1), jitter)
    assert credentials.due(credentials.not_after + HOUR)
    for bad in (0.2, -1.0, float("nan")):
        with pytest.raises(ValueError, match="jitter"):
            credentials.due(start, bad)


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Hub]:
    """A coordinator whose certificates last for six seconds."""
    with Hub(tmp_path, life=dt.timedelta(seconds=6)) as made:
        yield made


def ended(site: site_directory.SiteDirectory) -> None:
    """Wait until its certificate has ended."""
    while now() < Credentials(site.keys).not_after:
        time.sleep(0.05)


def test_a_site_that_was_away_comes_back_by_its_signing_key_over_the_wire(brief: Hub) -> None:
    site = brief.site()
    first = brief.joined(site)
    assert not come_back(site, return_over_grpc(), now()), "the certificate is good"
    ended(site)
    with pytest.raises(grpc.RpcError):
        renewed(brief, first)
    assert come_back(site, return_over_grpc(), now())
    again = Credentials(site.keys)
    assert again.number != first.number
    assert brief.store.state.admits("a", again.number)
    before = files(site)["return.pem"]
    ended(site)
    assert come_back(site, return_over_grpc(), now()), "as often as it must"
    assert files(site)["return.pem"] != before


def test_the_certificate_to_come_back_with_makes_no_other_call_and_no_other_makes_its_call(brief: Hub) -> None:
    site = brief.site()
    credentials = brief.joined(site)
    root = credentials.root()
    with open_channel(f"localhost:{brief.port}", credentials.channel_credentials()) as channel:
        with pytest.raises(grpc.RpcError) as told:
            GatewayStub(channel).Return(gateway_pb2.ReturnRequest(), timeout=60)
        assert told.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    ended(site)
    way = way_back(site.keys, now())
    assert way is not None
    with open_channel(f"localhost:{brief.port}", grpc.ssl_channel_credentials(root, *way)) as channel:
        stub = GatewayStub(channel)
        for call in (
            lambda: stub.Join(gateway_pb2.JoinRequest(), timeout=60),
            lambda: stub.Renew(gateway_pb2.RenewRequest(), timeout=60),
            lambda: stub.Hello(gateway_pb2.HelloRequest(), timeout=60),
            lambda: stub.Revoke(gateway_pb2.RevokeRequest(), timeout=60),
        ):
            with pytest.raises(grpc.RpcError) as told:
                call()
            assert told.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_there_is_no_way_back_for_who_was_revoked_or_away_too_long(brief: Hub) -> None:
    site = brief.site()
    credentials = brief.joined(site)
    ended(site)
    before = files(site)
    assert not come_back(site, return_over_grpc(), now() + dt.timedelta(days=31)), "it has ended, too"
    brief.authority.revoke("a", credentials.number, "stolen")
    with pytest.raises(SiteConfigError, match="revoked"):
        come_back(site, return_over_grpc(), now())
    assert files(site) == before


def bad_chains(hub: Hub, tmp_path: Path) -> list[Any]:
    """Answers to a renewal that must not be taken."""
    root = certificates.make_root(now())
    foreign = certificates.make_intermediate(root, now())
    name, mine = certificates.agent_name("a"), hub.home.ca()
    own = ec.generate_private_key(ec.SECP256R1()).public_key()
    return [
        lambda csr: certificates.issue(csr, name, foreign, now()),
        lambda csr: certificates.certify(own, name, mine, now()),
        lambda csr: certificates.certify(
            certificates.requested_key(csr, name), certificates.agent_name("b"), mine, now()
        ),
        lambda csr: certificates.issue(csr, name, mine, now(), life=-HOUR / 30),
        lambda csr: certificates.issue(csr, name, mine, now())[:-50],
        lambda csr: b"",
    ]


def test_an_answer_to_a_renewal_that_is_not_right_leaves_the_old_credentials_at_work(
    hub: Hub, tmp_path: Path
) -> None:
    site = hub.site()
    credentials = hub.joined(site)
    before, number = files(site), credentials.number
    for ask in bad_chains(hub, tmp_path):
        with pytest.raises(SiteConfigError, match="cannot be used"):
            credentials.renew(lambda csr, ask=ask: Certified(ask(csr), b""), now())  # type: ignore[misc]
        assert files(site) == before
        assert credentials.number == number
    renewed(hub, credentials)


def test_a_renewal_that_dies_on_either_side_of_the_rename_leaves_working_credentials(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = hub.site()
    credentials = hub.joined(site)
    write = key_files.replace_private

    def before(_path: Path, _body: bytes) -> None:
        raise KeyboardInterrupt

    def after(path: Path, body: bytes) -> None:
        write(path, body)
        raise KeyboardInterrupt

    for dying in (before, after):
        monkeypatch.setattr("agent.gateway.credentials.replace_private", dying)
        with pytest.raises(KeyboardInterrupt):
            renewed(hub, credentials)
        monkeypatch.undo()
        credentials = Credentials(site.keys)
        renewed(hub, credentials)  # works with whichever the file holds


def test_who_was_revoked_renews_nothing_over_the_same_wire(hub: Hub) -> None:
    credentials = hub.joined(hub.site())
    hub.authority.revoke("a", credentials.number, "stolen")
    with pytest.raises(grpc.RpcError) as refusal:
        renewed(hub, credentials)
    assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert len(hub.store.state.issued) == 1


def test_a_waiting_certificate_may_do_nothing_but_ask(hub: Hub) -> None:
    site = hub.site()
    asked(site, hub.authority.invite("a"))
    kept = json.loads((site.keys / enrolment.WAITING).read_bytes())
    key = key_files.read_private(site.keys / "request.key")
    credentials = grpc.ssl_channel_credentials(kept["root"].encode(), key, kept["certificate"].encode())
    with open_channel(f"localhost:{hub.port}", credentials) as channel, pytest.raises(grpc.RpcError) as refusal:
        GatewayStub(channel).Renew(gateway_pb2.RenewRequest(csr=b"x"), timeout=120)
    assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_an_ended_certificate_makes_no_call_and_the_site_is_invited_again(hub: Hub) -> None:
    site = hub.site()
    credentials = hub.joined(site)
    own = key_files.ec_key(site.keys / "request.key")
    past = now() - dt.timedelta(seconds=90)
    ended = certificates.certify(
        own.public_key(), certificates.agent_name("a"), hub.home.ca(), now(), life=past - now()
    )
    key_files.replace_private(site.keys / "tls.pem", key_files.pem(own) + ended)
    credentials = Credentials(site.keys)
    assert credentials.due(now())
    with pytest.raises(grpc.RpcError):
        renewed(hub, credentials)
    assert asked(site, hub.authority.invite("a")).state == "enrolled"
    renewed(hub, Credentials(site.keys))


def test_a_site_whose_key_was_stolen_comes_back_in_its_own_directory_with_a_key_of_its_own_making(hub: Hub) -> None:
    """The key file is removed; an invitation makes another, and a request that persons have not seen yet."""
    site = hub.site()
    hub.joined(site)
    old, before = (site.keys / "request.key").read_bytes(), (site.root / "request.json").read_bytes()
    hub.authority.revoke("a", Credentials(site.keys).number, "stolen")
    with pytest.raises(SiteConfigError, match="make a new key"):
        asked(site, hub.authority.invite("a"))
    (site.keys / "request.key").unlink()
    with pytest.raises(SiteConfigError, match="with an invitation"):
        asked(site)
    hub.authority.revoke("a", "", "stolen")
    assert asked(site, hub.authority.invite("a")).state == "waiting"
    assert (site.keys / "request.key").read_bytes() != old
    assert (site.keys / "request.key").stat().st_mode & 0o777 == 0o600
    assert (site.root / "request.json").read_bytes() != before
    hub.approve(site, "s-again")
    assert asked(site).state == "enrolled"
    renewed(hub, Credentials(site.keys))


@pytest.mark.parametrize("what", ["empty", "key alone", "chain alone", "another key", "signing key"])
def test_a_damaged_file_of_credentials_is_said_to_be_so(hub: Hub, what: str) -> None:
    site = hub.site()
    credentials = hub.joined(site)
    other = key_files.pem(ec.generate_private_key(ec.SECP256R1()))
    bodies = {
        "empty": b"",
        "key alone": credentials.key(),
        "chain alone": credentials.chain(),
        "another key": other + credentials.chain(),
        "signing key": key_files.pem(site.sign_key()) + credentials.chain(),
    }
    key_files.replace_private(site.keys / "tls.pem", bodies[what])
    with pytest.raises(SiteConfigError, match=r"tls\.pem"):
        Credentials(site.keys)
    (site.keys / "tls.pem").chmod(0o640)
    with pytest.raises(key_files.KeyFileError):
        Credentials(site.keys)


def test_a_site_without_a_certificate_is_told_what_to_do(tmp_path: Path) -> None:
    site = site_directory.create(tmp_path / "a", SITE.format("a", 1), preset("internal"))
    with pytest.raises(SiteConfigError, match="enrol"):
        Credentials(site.keys)
    (site.root / "request.json").unlink()
    with pytest.raises(SiteConfigError, match=r"request\.json"):
        enrol(site, None, over_grpc(), now())


@pytest.mark.parametrize(
    "line",
    [
        *(
            'proxy = "nowhere"',
            "proxy = 1",
            'proxy = "a:99999"',
            'partners = ["x"]',
            "least_partners = 0",
            "other = 1",
        ),
        *('confinement = "none"', "confinement = true", 'device = "cuda:0"', 'engine = "vmap"', "device = 1"),
    ],
)
def test_settings_name_what_is_wrong_in_them(tmp_path: Path, line: str) -> None:
    with pytest.raises(SiteConfigError, match=line.partition(" ")[0]):
        site_directory.parse_settings(tmp_path, SITE.format("a", 1) + line + "\n")
    lines = 'proxy = "proxy.example:3128"\npartners = ["' + "ab" * 32 + '"]\n'
    good = site_directory.parse_settings(tmp_path, SITE.format("a", 1) + lines)
    assert (good.proxy, good.partners, good.least_partners) == ("proxy.example:3128", {"ab" * 32}, 1)
    assert (good.confinement, good.device, good.engine) == ("available", "auto", "own")
    demanding = site_directory.parse_settings(tmp_path, SITE.format("a", 1) + 'confinement = "required"\n')
    assert demanding.confinement == "required"
    chosen = site_directory.parse_settings(tmp_path, SITE.format("a", 1) + 'device = "cpu"\nengine = "opacus"\n')
    assert (chosen.device, chosen.engine) == ("cpu", "opacus")


def test_a_coordinators_key_that_everybody_can_sign_with_is_none(hub: Hub) -> None:
    site = hub.site()
    asked(site, hub.authority.invite("a"))
    hub.approve(site)
    asked(site)
    assert site.coordinator_key() == hub.store.public
    for key in (bytes(32), b"\x01" + bytes(31), hub.store.public[:31]):
        (site.keys / "coordinator.pub").write_text(base64.b64encode(key).decode())
        with pytest.raises(SiteConfigError, match="enrol again"):
            site.coordinator_key()


def test_a_site_tells_the_fingerprint_of_its_own_ledger_and_of_the_coordinators(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """An auditor asks it for the other side's, and the other side for its own."""
    site = hub.site()
    asked(site, hub.authority.invite("a"))
    assert main(["--home", str(site.root), "ledger", "fingerprint", "--coordinator"]) == 1, "it knows none yet"
    hub.approve(site)
    asked(site)
    public = site.sign_key().public_key().public_bytes_raw()
    for words, key in (((), public), (("--coordinator",), hub.store.public)):
        capsys.readouterr()
        assert main(["--home", str(site.root), "ledger", "fingerprint", *words]) == 0
        assert capsys.readouterr().out.strip() == hashlib.sha256(key).hexdigest()
