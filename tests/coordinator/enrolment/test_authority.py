"""Invitations, requests, approvals, certificates: one desk over a real ledger, with a clock that tests move."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from agent.storage import site_directory
from coordinator import errors as coordinator_errors
from coordinator.admission import AdmissionService
from coordinator.enrolment.authority import MOST_VALID, Authority, Invitation, JoinError, JoinState
from coordinator.storage import directory as homes
from policies.governance import decisions
from policies.ledger.entries import Approved, Enrolled, InvalidEntryError, Issued, Refused
from policies.ledger.store import LedgerStoppedError
from policies.review.policy import preset
from policies.statements import PAYLOAD_TYPE, Enrolment, Return, encode
from protos.common.dsse import MAX_BYTES, EnvelopeError, seal
from protos.identity import certificates, key_files
from protos.identity.join_token import read_token, token_key
from tests.support.ledger_world import Person

HOUR = dt.timedelta(hours=1)
DAY = 24 * HOUR
SITE = 'site = "{}"\ncoordinator = "127.0.0.1:1"\ninput = "in"\nmodalities = ["OT"]\n' + (
    "secondary_capture_modalities = []\npublic_components = []\n"
)


@dataclass
class Desk:
    """A coordinator with its desk, two persons, and the sites that come to it."""

    root: Path
    now: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC).replace(microsecond=0))
    persons: list[Person] = field(default_factory=lambda: [Person("dpo", "compliance"), Person("chief", "hospital")])

    def __post_init__(self) -> None:
        listen = 'listen = "127.0.0.1:0"\naddress = "hub.example:7443"\n'
        self.home = homes.create(self.root / "hub", listen, preset("internal"), self.now)
        self.open()
        for person in self.persons:
            decisions.appoint(self.store, person.name, person.role, person.public)

    def open(self) -> None:
        """As after a restart."""
        self.store = homes.open_ledger(self.home)
        self.intake = AdmissionService.over(self.store, self.home.policy())
        self.authority = Authority(self.home, self.intake, lambda: self.now)

    def restart(self) -> None:
        self.store.close()
        self.open()

    def site(self, name: str = "a", folder: str = "") -> site_directory.SiteDirectory:
        return site_directory.create(self.root / (folder or name), SITE.format(name), preset("internal"))

    def leaf(self, invitation: Invitation) -> x509.Certificate:
        return certificates.leaf_of(json.loads(invitation.body)["certificate"].encode())

    def invited(self, site: site_directory.SiteDirectory) -> x509.Certificate:
        """Invite it; the certificate of its first call."""
        return self.leaf(self.authority.invite(site.settings().site))

    def waiting(self, site: site_directory.SiteDirectory) -> x509.Certificate:
        """Invite it and take its request; the certificate that it asks again with."""
        said = self.authority.join(site.settings().site, self.invited(site), request(site))
        assert said.state == "waiting"
        return certificates.leaf_of(said.waiting_certificate)

    def approve(
        self,
        site: site_directory.SiteDirectory,
        serial: str = "s1",
        persons: int = 2,
        changes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        name, digest = site.settings().site, hashlib.sha256(request(site)).hexdigest()
        said: dict[str, str] = {"serial": serial, "action": "enrol", "subject": name, "value": digest, **changes}
        sealed = [p.approval(origin=self.store.origin, **said) for p in self.persons[:persons]]
        self.authority.enrol(name, serial, sealed)

    def joined(self, site: site_directory.SiteDirectory) -> tuple[x509.Certificate, x509.Certificate]:
        """A site that takes part: the certificate that it asked with, and the one it has."""
        waiting = self.waiting(site)
        self.approve(site, f"s1{site.settings().site.replace('a', '')}")
        said = self.authority.join(site.settings().site, waiting, b"")
        assert said.state == "enrolled"
        return waiting, certificates.leaf_of(said.certificate)

    def entries(self, kind: type) -> list[Any]:
        found = [self.store.line(seq).record.entry for seq in range(self.store.state.size)]
        return [entry for entry in found if isinstance(entry, kind)]


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.store.close()


def request(site: site_directory.SiteDirectory) -> bytes:
    return (site.root / "request.json").read_bytes()


def spliced(csr_pem: bytes, old: bytes, new: bytes) -> bytes:
    """A signing request with other bytes in one place."""
    der = x509.load_pem_x509_csr(csr_pem).public_bytes(Encoding.DER)
    at = der.index(old, der.index(b"spiffe") - 2 if old == b"\x86" else 0)
    body = base64.encodebytes(der[:at] + new + der[at + len(old) :])
    return b"-----BEGIN CERTIFICATE REQUEST-----\n" + body + b"-----END CERTIFICATE REQUEST-----\n"


def public(site: site_directory.SiteDirectory) -> ec.EllipticCurvePublicKey:
    return key_files.ec_key(site.keys / "request.key").public_key()


def test_a_site_joins_by_token_request_two_approvals_and_a_certificate_for_its_own_key(context: Desk) -> None:
    site = context.site()
    invitation = context.authority.invite("a")
    body = json.loads(invitation.body)
    assert (body["site"], body["coordinator"]) == ("a", "hub.example:7443")
    assert body["until"] == int((context.now + HOUR / 2).timestamp())
    assert invitation.fingerprint == certificates.root_fingerprint(context.home.root_crt())
    assert body["root"].encode() == context.home.root_crt()
    root, joining = context.home.root_crt(), certificates.joining_name("a")
    key = token_key(read_token(invitation.token))
    leaf = certificates.checked_chain(body["certificate"].encode(), root, joining, key.public_key(), context.now)
    assert leaf.not_valid_after_utc == context.now + HOUR / 2

    said = context.authority.join("a", leaf, request(site))
    assert (said.state, said.fingerprint) == ("waiting", certificates.fingerprint(request(site)))
    assert not said.certificate
    assert not said.policy
    assert not said.ledger_key
    waiting = certificates.checked_chain(said.waiting_certificate, root, joining, public(site), context.now)
    assert waiting.not_valid_after_utc == context.now + 7 * DAY
    (pending,) = context.authority.enrolments()
    assert (pending.site, pending.state, pending.fingerprint) == ("a", "waiting", said.fingerprint)
    assert pending.digest == hashlib.sha256(request(site)).hexdigest()

    context.approve(site)
    assert context.authority.enrolments()[0].state == "enrolled"
    said = context.authority.join("a", waiting, b"")
    own = certificates.checked_chain(said.certificate, root, certificates.agent_name("a"), public(site), context.now)
    assert said.state == "enrolled"
    assert (said.policy, said.ledger_key) == (context.home.policy_text(), context.store.public)
    (issued,) = context.entries(Issued)
    assert issued.number == f"{own.serial_number:x}"
    assert issued.certificate == hashlib.sha256(own.public_bytes(Encoding.DER)).digest()
    assert context.store.state.admits("a", issued.number)
    (enrolled,) = context.entries(Enrolled)
    assert enrolled.serial == "s1"


def test_the_token_is_stored_nowhere_and_neither_is_its_key(context: Desk) -> None:
    invitation = context.authority.invite("a")
    token = read_token(invitation.token)
    secrets = [token, token.hex().encode(), invitation.token.encode(), invitation.token.replace("-", "").encode()]
    secrets += [base64.b64encode(token), key_files.pem(token_key(token)).split(b"\n")[2]]
    files = [path for path in context.root.rglob("*") if path.is_file()]
    assert (context.home.enrolments / "a.json") in files
    assert (context.home.enrolments / "a.json").stat().st_mode & 0o777 == 0o600
    assert context.home.enrolments.stat().st_mode & 0o777 == 0o700
    for path in files:
        body = path.read_bytes()
        assert not any(secret in body for secret in secrets), path.name
    assert invitation.token.encode() not in invitation.body


@pytest.mark.parametrize("name", ["", "A", "a b", "../a", "coordinator", "a" * 64, "a\n"])
def test_nobody_is_invited_under_what_is_no_name(context: Desk, name: str) -> None:
    with pytest.raises(JoinError):
        context.authority.invite(name)
    assert not list(context.home.enrolments.iterdir())


def test_two_tokens_are_never_the_same(context: Desk) -> None:
    assert len({context.authority.invite("a").token for _ in range(5)}) == 5


def test_a_token_is_good_for_one_request_and_a_second_one_is_written_down(context: Desk) -> None:
    site, thief = context.site(), context.site("a", "thief")
    leaf = context.invited(site)
    first = context.authority.join("a", leaf, request(site))
    again = context.authority.join("a", leaf, request(site))  # the reply was lost
    assert (again.state, again.fingerprint) == (first.state, first.fingerprint)
    for _ in range(3):
        with pytest.raises(JoinError, match="another request"):
            context.authority.join("a", leaf, request(thief))
    assert [e.findings for e in context.entries(Refused)] == [["invitation_used"]]  # once, however often it is tried
    assert context.authority.enrolments()[0].digest == hashlib.sha256(request(site)).hexdigest()
    context.restart()
    with pytest.raises(JoinError, match="another request"):
        context.authority.join("a", leaf, request(thief))
    context.approve(site)
    assert context.authority.join("a", leaf, request(site)).state == "enrolled"


def test_of_two_requests_at_the_same_moment_one_is_taken(context: Desk) -> None:
    sites = [context.site("a", f"site-{i}") for i in range(6)]
    leaf, said = context.invited(sites[0]), list[JoinState | None]()

    def knock(site: site_directory.SiteDirectory) -> None:
        try:
            said.append(context.authority.join("a", leaf, request(site)))
        except JoinError:
            said.append(None)

    threads = [threading.Thread(target=knock, args=(site,)) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([s for s in said if s is not None]) == 1
    assert len(said) == len(sites)


def test_an_invitation_ends_after_half_an_hour_by_the_stored_state_too(context: Desk) -> None:
    site = context.site()
    leaf = context.invited(site)
    context.now += HOUR / 2 - dt.timedelta(seconds=1)
    assert context.authority.enrolments()[0].state == "invited"
    context.now += dt.timedelta(seconds=1)
    with pytest.raises(JoinError, match="ended"):
        context.authority.join("a", leaf, request(site))
    assert context.authority.enrolments() == []
    assert not list(context.home.enrolments.iterdir())
    with pytest.raises(JoinError, match="no open invitation"):
        context.authority.join("a", leaf, request(site))


def test_a_new_invitation_ends_the_one_before(context: Desk) -> None:
    site = context.site()
    old, new = context.invited(site), context.invited(site)
    with pytest.raises(JoinError, match="replaced"):
        context.authority.join("a", old, request(site))
    assert context.authority.join("a", new, request(site)).state == "waiting"
    assert len(context.authority.enrolments()) == 1


def test_a_replaced_request_is_declined_and_kept(context: Desk) -> None:
    first, second = context.site(), context.site("a", "second")
    waiting = context.waiting(first)
    later = context.waiting(second)
    assert context.authority.join("a", waiting, b"").state == "declined"
    assert context.authority.join("a", later, b"").state == "waiting"
    kept = json.loads((context.home.enrolments / "a.json").read_bytes())["earlier"]
    assert [base64.b64decode(k["envelope"]) for k in kept] == [request(first)]
    with pytest.raises(JoinError, match="something else"):
        context.approve(first)
    context.approve(second)
    assert context.store.state.sites["a"].envelope == hashlib.sha256(request(second)).digest()


def test_an_invitation_of_one_site_takes_no_request_of_another(context: Desk) -> None:
    site, other = context.site(), context.site("b")
    leaf, foreign = context.invited(site), context.invited(other)
    with pytest.raises(JoinError, match="another site"):
        context.authority.join("a", leaf, request(other))
    with pytest.raises(JoinError):
        context.authority.join("a", foreign, request(site))
    assert context.authority.join("a", leaf, request(site)).state == "waiting"  # a refused request binds nothing


def test_a_request_for_the_tokens_own_key_is_refused(context: Desk) -> None:
    site, invitation = context.site(), context.authority.invite("a")
    key = token_key(read_token(invitation.token))
    sign = site.sign_key()
    statement = Enrolment(
        "a",
        base64.b64encode(sign.public_key().public_bytes_raw()).decode(),
        certificates.request(key, certificates.agent_name("a")).decode(),
        (site.keys / "node.pub").read_text(),
        site.policy_text(),
    )
    with pytest.raises(JoinError, match="key of your own"):
        context.authority.join("a", context.leaf(invitation), seal(encode(statement), PAYLOAD_TYPE, sign))


BAD_REQUESTS = ["csr of another name", "csr of nobody", "csr of a strange kind", "csr of no version"]


@pytest.mark.parametrize("what", [*BAD_REQUESTS, "signature", "signer", "junk", "empty", "nested", "large"])
def test_a_request_that_cannot_be_used_is_refused_and_the_invitation_stays_open(context: Desk, what: str) -> None:
    site = context.site()
    sign, leaf = site.sign_key(), context.invited(site)
    csr = certificates.request(
        key_files.ec_key(site.keys / "request.key"), certificates.agent_name("b" if "csr" in what else "a")
    )
    odd = {"csr of nobody": b"nothing", "csr of a strange kind": spliced(csr, b"\x86", b"\xa3")}
    odd["csr of no version"] = spliced(csr, b"\x02\x01\x00", b"\x02\x01\x07")
    statement = Enrolment(
        "a",
        base64.b64encode(sign.public_key().public_bytes_raw()).decode(),
        odd.get(what, csr).decode(),
        (site.keys / "node.pub").read_text(),
        site.policy_text(),
    )
    sealed = seal(encode(statement), PAYLOAD_TYPE, context.persons[0].key if what == "signer" else sign)
    if what == "signature":
        document = json.loads(sealed)
        document["signatures"][0]["sig"] = base64.b64encode(bytes(64)).decode()
        sealed = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    bad = {"junk": b"junk", "empty": b"", "nested": b"[" * 200_000, "large": b" " * MAX_BYTES + sealed}.get(
        what, sealed
    )
    with pytest.raises((EnvelopeError, certificates.CertificateError, JoinError)):
        context.authority.join("a", leaf, bad)
    assert context.authority.join("a", leaf, request(site)).state == "waiting"


def test_one_only_asks_with_the_waiting_certificate(context: Desk) -> None:
    site = context.site()
    waiting = context.waiting(site)
    with pytest.raises(JoinError):
        context.authority.join("a", waiting, request(context.site("a", "second")))
    assert context.authority.join("a", waiting, request(site)).state == "waiting"
    with pytest.raises(JoinError):
        context.authority.join("b", waiting, b"")


def test_asking_again_never_makes_the_waiting_longer(context: Desk) -> None:
    site = context.site()
    waiting, end = context.waiting(site), context.now + 7 * DAY
    for _ in range(3):
        context.now += 2 * DAY
        waiting = certificates.leaf_of(context.authority.join("a", waiting, b"").waiting_certificate)
        assert waiting.not_valid_after_utc == end
    context.now = end
    assert context.authority.join("a", waiting, b"").state == "declined"
    with pytest.raises(JoinError, match="no request"):
        context.approve(site)
    assert context.authority.enrolments() == []


@pytest.mark.parametrize("persons", [0, 1])
def test_one_role_is_not_enough_and_what_was_approved_is_kept(context: Desk, persons: int) -> None:
    site = context.site()
    waiting = context.waiting(site)
    with pytest.raises(JoinError, match="more are needed"):
        context.approve(site, persons=persons)
    assert len(context.entries(Approved)) == persons
    assert context.authority.join("a", waiting, b"").state == "waiting"
    context.approve(site)  # those that are written already are handed in again
    assert context.authority.join("a", waiting, b"").state == "enrolled"
    assert len(context.entries(Approved)) == 2


def test_two_persons_of_one_role_are_not_enough(tmp_path: Path) -> None:
    context = Desk(tmp_path, persons=[Person("dpo", "compliance")])
    try:
        second = Person("dpo2", "compliance")
        words = ("s0", "appoint", "dpo2", f"compliance {second.public.hex()}", context.store.origin)
        decisions.approve(context.store, context.persons[0].approval(*words))
        decisions.appoint(context.store, "dpo2", "compliance", second.public, "s0")
        context.persons.append(second)
        context.waiting(site := context.site())
        with pytest.raises(JoinError, match="role of hospital"):
            context.approve(site)
        assert not context.store.state.sites
    finally:
        context.store.close()


def test_nobody_is_enrolled_where_nobody_is_in_office(tmp_path: Path) -> None:
    context = Desk(tmp_path, persons=[])
    try:
        context.waiting(site := context.site())
        with pytest.raises(JoinError, match="compliance and hospital"):
            context.approve(site)
        with pytest.raises(JoinError, match="compliance and hospital"):
            context.authority.enrol("a", "", [])
        assert not context.store.state.sites
    finally:
        context.store.close()


@pytest.mark.parametrize(
    "changes",
    [{"action": "release"}, {"subject": "b"}, {"value": "0" * 64}],
    ids=["action", "subject", "request"],
)
def test_an_approval_of_something_else_counts_for_nothing_and_is_not_written(
    context: Desk, changes: dict[str, str]
) -> None:
    context.waiting(site := context.site())
    with pytest.raises(JoinError, match="something else"):
        context.approve(site, changes=changes)
    assert not context.entries(Approved)
    assert not context.store.state.sites


def test_an_approval_by_nobody_or_for_another_ledger_is_refused(context: Desk) -> None:
    context.waiting(site := context.site())
    digest = hashlib.sha256(request(site)).hexdigest()
    words = ("s1", "enrol", "a", digest)
    person, stranger = context.persons[0], Person("x", "hospital")
    for sealed in (
        stranger.approval(*words, context.store.origin),
        stranger.approval(*words, context.store.origin, name=person.name),
        person.approval(*words, "lazaret/elsewhere"),
    ):
        with pytest.raises(InvalidEntryError):
            context.authority.enrol("a", "s1", [sealed])
    with pytest.raises(JoinError, match="cannot be read"):
        context.authority.enrol("a", "s1", [b"junk"])
    with pytest.raises(JoinError, match="no request"):
        context.authority.enrol("b", "s1", [])
    assert not context.entries(Approved)


def test_approving_again_changes_nothing(context: Desk) -> None:
    site = context.site()
    context.joined(site)
    size = context.store.state.size
    context.approve(site)
    assert context.store.state.size == size


def test_approvals_for_a_site_that_is_in_force_are_not_kept_for_later(context: Desk) -> None:
    site = context.site()
    context.joined(site)
    context.approve(site, "s2")  # "the first got lost, please sign again"
    context.waiting(other := context.site("a", "other"))
    with pytest.raises(JoinError, match="enrolled already"):
        context.approve(other, "s3")
    assert {e.serial for e in context.entries(Approved)} == {"s1"}


@pytest.mark.parametrize("picked_up", [True, False])
def test_approvals_that_were_left_over_do_not_bring_a_revoked_site_back(context: Desk, picked_up: bool) -> None:
    """The operator wrote them by hand, or kept them until after the revocation; and has the stolen request."""
    site = context.site()
    if picked_up:
        context.joined(site)
    else:
        context.waiting(site)
        context.approve(site)
    digest = hashlib.sha256(request(site)).hexdigest()
    for person in context.persons:
        decisions.approve(context.store, person.approval("s2", "enrol", "a", digest, context.store.origin))
    context.authority.revoke("a", "", "stolen")
    with pytest.raises(InvalidEntryError, match="fresh"):
        context.intake.enrol(request(site), "s2")
    with pytest.raises(JoinError, match="make a new key" if picked_up else "fresh"):
        context.authority.join("a", context.invited(site), request(site))
    with pytest.raises(JoinError, match="no request"):
        context.authority.enrol("a", "s2", [])
    assert context.store.state.revoked_sites == {"a"}


def test_a_certificate_is_picked_up_again_while_it_is_good_and_made_anew_when_it_is_not(context: Desk) -> None:
    site = context.site()
    waiting, own = context.joined(site)
    assert certificates.leaf_of(context.authority.join("a", waiting, b"").certificate) == own
    context.now += 17 * HOUR
    later = certificates.leaf_of(context.authority.join("a", waiting, b"").certificate)
    assert later != own
    assert later.not_valid_after_utc == context.now + DAY
    assert [i.number for i in context.entries(Issued)] == [certificates.number_of(c) for c in (own, later)]


def test_a_crash_between_the_entry_and_the_hand_out_costs_nothing(
    context: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = context.site()
    waiting = context.waiting(site)
    context.approve(site)

    def broken(_record: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(context.authority._kept, "write", broken)  # the moment after the entry
    with pytest.raises(OSError, match="disk full"):
        context.authority.join("a", waiting, b"")
    assert len(context.entries(Issued)) == 1
    context.restart()
    said = context.authority.join("a", waiting, b"")
    number = certificates.number_of(certificates.leaf_of(said.certificate))
    assert [context.store.state.admits("a", i.number) for i in context.entries(Issued)] == [True, True]
    assert context.entries(Issued)[1].number == number


def test_nothing_is_handed_out_whose_entry_could_not_be_written(
    context: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = context.site()
    waiting, own = context.joined(site)
    fresh = certificates.request(ec.generate_private_key(ec.SECP256R1()), certificates.agent_name("a"))
    disk = context.store._disk  # the disk under it fails

    def full(_batch: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(type(disk), "commit", lambda _self, batch: full(batch))
    with pytest.raises(LedgerStoppedError):
        context.authority.renew("a", own, fresh)
    monkeypatch.undo()
    context.restart()
    assert len(context.entries(Issued)) == 1
    assert context.authority.join("a", waiting, b"").state == "enrolled"


def test_a_site_that_lost_its_certificate_is_invited_again_and_answered_at_once(context: Desk) -> None:
    site = context.site()
    context.joined(site)
    context.now += 30 * DAY
    assert context.authority.enrolments() == []
    said = context.authority.join("a", context.invited(site), request(site))
    assert said.state == "enrolled"
    assert certificates.leaf_of(said.certificate).not_valid_after_utc == context.now + DAY


def test_a_second_hospital_cannot_take_an_enrolled_ones_name(context: Desk) -> None:
    context.joined(context.site())
    impostor = context.site("a", "impostor")
    waiting = context.waiting(impostor)
    with pytest.raises(ValueError, match="enrolled already"):
        context.approve(impostor, "s2")
    assert context.authority.join("a", waiting, b"").state == "waiting"


def csr(key: ec.EllipticCurvePrivateKey | None = None, site: str = "a") -> bytes:
    return certificates.request(key or ec.generate_private_key(ec.SECP256R1()), certificates.agent_name(site))


def test_a_renewal_is_for_a_fresh_key_and_both_certificates_are_good_until_they_end(context: Desk) -> None:
    site = context.site()
    _, own = context.joined(site)
    context.now += 16 * HOUR
    key = ec.generate_private_key(ec.SECP256R1())
    chain, _ = context.authority.renew("a", own, csr(key))
    root, name = context.home.root_crt(), certificates.agent_name("a")
    leaf = certificates.checked_chain(chain, root, name, key.public_key(), context.now)
    assert leaf.not_valid_after_utc == context.now + DAY
    assert context.store.state.admits("a", certificates.number_of(leaf))
    assert context.store.state.admits("a", certificates.number_of(own))
    with pytest.raises(JoinError, match="fresh key"):
        context.authority.renew("a", leaf, csr(key))
    for bad in (csr(site="b"), b"junk"):
        with pytest.raises(certificates.CertificateError):
            context.authority.renew("a", leaf, bad)


def test_who_is_not_admitted_now_renews_nothing(context: Desk) -> None:
    site = context.site()
    waiting, own = context.joined(site)
    unknown = certificates.leaf_of(
        certificates.issue(csr(), certificates.agent_name("a"), context.home.ca(), context.now)
    )
    for leaf in (waiting, unknown):
        with pytest.raises(JoinError, match="not good"):
            context.authority.renew("a", leaf, csr())
    with pytest.raises(JoinError, match="not good"):
        context.authority.renew("b", own, csr(site="b"))
    context.now += DAY + HOUR
    with pytest.raises(JoinError, match="not good"):
        context.authority.renew("a", own, csr())
    assert len(context.entries(Issued)) == 1


def returning(context: Desk, site: site_directory.SiteDirectory) -> x509.Certificate:
    """A site that takes part: the certificate that it comes back with."""
    waiting = context.waiting(site)
    context.approve(site, "s1")
    said = context.authority.join(site.settings().site, waiting, b"")
    return certificates.leaf_of(said.returning_certificate)


def asking(site: site_directory.SiteDirectory, request: bytes | None = None, name: str = "a") -> bytes:
    """The statement by which a site comes back, for a fresh key unless one is given."""
    return seal(encode(Return(name, (request or csr()).decode())), PAYLOAD_TYPE, site.sign_key())


def test_a_site_that_was_away_for_less_than_thirty_days_comes_back_by_its_signing_key(context: Desk) -> None:
    site = context.site()
    back = returning(context, site)
    assert back.not_valid_after_utc == context.now + 31 * DAY
    assert certificates.uri_of(back) == "spiffe://lazaret/returning/a"
    context.now += 20 * DAY
    assert context.authority.enrolments() == [], "nothing is remembered of its request"
    key = ec.generate_private_key(ec.SECP256R1())
    chain, again = context.authority.come_back("a", back, asking(site, csr(key)))
    root = context.home.root_crt()
    leaf = certificates.checked_chain(chain, root, certificates.agent_name("a"), key.public_key(), context.now)
    assert (leaf.not_valid_after_utc, len(context.entries(Issued))) == (context.now + DAY, 2)
    assert context.store.state.admits("a", certificates.number_of(leaf))
    last = certificates.checked_chain(again, root, certificates.returning_name("a"), key.public_key(), context.now)
    assert last.not_valid_after_utc == context.now + 31 * DAY


def test_only_the_sites_own_word_for_a_fresh_key_brings_it_back(context: Desk) -> None:
    site, other = context.site(), context.site("b")
    back = returning(context, site)
    sent = asking(site)
    for wrong in (
        seal(encode(Return("a", csr().decode())), PAYLOAD_TYPE, other.sign_key()),
        request(site),  # its own, and about something else
        asking(site, name="b"),
        asking(site, csr(site="b")),
        asking(site, certificates.request(key_files.ec_key(site.keys / "request.key"), certificates.agent_name("a"))),
        sent[:-3],
        b"",
    ):
        with pytest.raises(ValueError, match=r"."):
            context.authority.come_back("a", back, wrong)
    assert len(context.entries(Issued)) == 1
    context.authority.come_back("a", back, sent)
    with pytest.raises(JoinError, match="fresh key"):  # whoever sends it again gets nothing
        context.authority.come_back("a", back, sent)
    assert len(context.entries(Issued)) == 2


def test_who_was_revoked_does_not_come_back(context: Desk) -> None:
    site = context.site()
    back = returning(context, site)
    (issued,) = context.entries(Issued)
    context.authority.revoke("a", issued.number, "stolen")
    with pytest.raises(JoinError, match="revoked"):
        context.authority.come_back("a", back, asking(site))
    context.authority.revoke("a", "", "left")
    with pytest.raises(JoinError, match="takes no part"):
        context.authority.come_back("a", back, asking(site))
    assert len(context.entries(Issued)) == 1


def test_who_took_a_later_certificate_does_not_come_back_under_an_older_one(context: Desk) -> None:
    site = context.site()
    back = returning(context, site)
    fresh, _ = context.authority.come_back("a", back, asking(site))
    number = certificates.number_of(certificates.leaf_of(fresh))
    context.authority.come_back("a", back, asking(site))
    context.authority.revoke("a", number, "stolen")
    with pytest.raises(JoinError, match="a later certificate of this site was revoked"):
        context.authority.come_back("a", back, asking(site))


def test_a_key_that_the_coordinator_forgot_brings_nobody_back(context: Desk) -> None:
    site = context.site()
    back = returning(context, site)
    (context.home.enrolments / "a.keys").unlink()  # whether its certificate was revoked cannot be told
    with pytest.raises(JoinError, match="does not know"):
        context.authority.come_back("a", back, asking(site))


def test_coming_back_floods_no_ledger(context: Desk) -> None:
    site = context.site()
    back = returning(context, site)
    for _ in range(MOST_VALID - 1):
        context.authority.come_back("a", back, asking(site))
    with pytest.raises(JoinError, match="too many"):
        context.authority.come_back("a", back, asking(site))


def test_a_site_cannot_flood_the_ledger_with_certificates(context: Desk) -> None:
    _, own = context.joined(context.site())
    for _ in range(MOST_VALID - 1):
        own = certificates.leaf_of(context.authority.renew("a", own, csr())[0])
    with pytest.raises(JoinError, match="too many"):
        context.authority.renew("a", own, csr())
    context.now += 23 * HOUR
    last = own
    context.now += 2 * HOUR  # all have ended; by the desk's own clock nothing is renewed then
    with pytest.raises(JoinError, match="not good"):
        context.authority.renew("a", last, csr())


def test_a_revoked_certificate_is_not_renewed_and_not_handed_out_again(context: Desk) -> None:
    site = context.site()
    waiting, own = context.joined(site)
    context.authority.revoke("a", "0" + certificates.number_of(own).upper(), "stolen")
    assert not context.store.state.admits("a", certificates.number_of(own))
    with pytest.raises(JoinError, match="not good"):
        context.authority.renew("a", own, csr())
    for _ in range(2):  # the key was stolen, and with it what asks again
        said = context.authority.join("a", waiting, b"")
        assert (said.state, said.certificate, said.waiting_certificate) == ("declined", b"", b"")
        with pytest.raises(JoinError, match="make a new key"):
            context.authority.join("a", context.invited(site), request(site))
        context.restart()
    assert len(context.entries(Issued)) == 1
    with pytest.raises(InvalidEntryError):
        context.authority.revoke("a", "abc", "stolen")
    for typo in ("0", "000", " ", "0x1", "all", "a" * 41):  # none of them means every certificate
        with pytest.raises(JoinError, match="hexadecimal"):
            context.authority.revoke("a", typo, "stolen")
    assert len(context.store.state.revoked) == 1


def test_the_key_of_a_revoked_certificate_is_not_renewed_to_and_any_other_is(context: Desk) -> None:
    _, own = context.joined(context.site())
    stolen = ec.generate_private_key(ec.SECP256R1())
    second = certificates.leaf_of(context.authority.renew("a", own, csr(stolen))[0])
    context.authority.revoke("a", certificates.number_of(second), "stolen")
    context.now += 40 * DAY  # longer than a request is kept
    context.authority.enrolments()
    context.restart()
    context.now -= 40 * DAY
    with pytest.raises(JoinError, match="make a new key"):
        context.authority.renew("a", own, csr(stolen))
    assert len(context.entries(Issued)) == 2
    fresh, _ = context.authority.renew("a", own, csr())
    assert context.store.state.admits("a", certificates.number_of(certificates.leaf_of(fresh)))


def test_a_lost_memory_of_keys_is_not_taken_for_an_empty_one(context: Desk) -> None:
    waiting, _ = context.joined(context.site())
    path = context.home.enrolments / "a.keys"
    for bad in (b"junk", b"[]", b'{"1f": 1}'):
        path.write_bytes(bad)
        with pytest.raises(coordinator_errors.CoordinatorConfigError, match=r"a\.keys"):
            context.authority.join("a", waiting, b"")


def test_a_revoked_site_is_out_and_comes_back_by_a_new_request_and_new_approvals_alone(context: Desk) -> None:
    site = context.site()
    waiting, own = context.joined(site)
    leaf = context.invited(site)
    context.authority.revoke("a", "", "key")
    assert not context.store.state.admits("a", certificates.number_of(own))
    assert context.authority.join("a", waiting, b"").state == "declined"
    with pytest.raises(JoinError):
        context.authority.join("a", leaf, request(site))  # the invitation that was open ended too
    with pytest.raises(JoinError, match="no request"):
        context.approve(site, "s2")
    with pytest.raises(JoinError, match="nothing of that site"):
        context.authority.revoke("a", certificates.number_of(own), "key")

    again = context.site("a", "again")
    waiting = context.waiting(again)
    with pytest.raises((JoinError, InvalidEntryError)):
        context.approve(again, "s1")  # that proposal is closed
    context.approve(again, "s3")
    context.restart()
    leaf = certificates.leaf_of(context.authority.join("a", waiting, b"").certificate)
    assert context.store.state.admits("a", certificates.number_of(leaf))
    assert not context.store.state.admits("a", certificates.number_of(own))
    assert context.intake.node_keys["a"] == (again.keys / "node.pub").read_text()


def test_a_site_that_comes_back_may_keep_its_node_key_and_no_other_site_may_have_it(context: Desk) -> None:
    site = context.site()
    context.joined(site)
    context.authority.revoke("a", "", "left")
    (site.keys / "request.key").unlink()
    key_files.write_private(site.keys / "request.key", key_files.pem(ec.generate_private_key(ec.SECP256R1())))
    (site.root / "request.json").write_bytes(site_directory.enrolment(site))
    assert context.authority.join("a", context.invited(site), request(site)).state == "waiting"
    context.approve(site, "s2")
    assert context.store.state.revoked_sites == set()
    other = context.site("b")
    (other.keys / "node.pub").write_bytes((site.keys / "node.pub").read_bytes())
    with pytest.raises(EnvelopeError, match="belongs to another site"):
        context.authority.join("b", context.invited(other), site_directory.enrolment(other))


def test_a_request_that_waits_is_declined_by_revoking_the_site(context: Desk) -> None:
    site = context.site()
    waiting = context.waiting(site)
    context.authority.revoke("a", "", "left")
    assert context.authority.join("a", waiting, b"").state == "declined"
    context.now += 30 * DAY
    assert [(p.site, p.state) for p in context.authority.enrolments()] == [("a", "declined")]  # nothing of it is lost
    kept = json.loads((context.home.enrolments / "a.json").read_bytes())["asked"]
    assert base64.b64decode(kept["envelope"]) == request(site)
    for name in ("b", "../a", ""):
        with pytest.raises(JoinError):
            context.authority.revoke(name, "", "left")


def test_a_file_that_was_changed_by_hand_is_not_believed(context: Desk) -> None:
    site = context.site()
    waiting = context.waiting(site)
    path = context.home.enrolments / "a.json"
    body = path.read_bytes()
    for bad in (b"junk", b"{}", b"[]", body.replace(b'"site": "a"', b'"site": "b"')):
        path.write_bytes(bad)
        with pytest.raises(coordinator_errors.CoordinatorConfigError, match="invite the site again"):
            context.authority.join("a", waiting, b"")
    path.write_bytes(body)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod"):
        context.authority.join("a", waiting, b"")


def test_the_root_key_is_offline_and_nothing_but_the_yearly_ceremony_needs_it(context: Desk) -> None:
    offline = context.home.root / "offline"
    assert {p.name for p in offline.iterdir()} == {"root.key", "root.crt", "README"}
    assert key_files.read_private(offline / "root.key")
    taken = offline.rename(context.root / "medium")
    context.joined(context.site())
    for days, due in ((100, False), (200, True)):
        context.now += days * DAY
        assert (context.home.ca_ends() - context.now < 90 * DAY) is due
    before = context.home.ca()
    homes.renew_intermediate(context.home, taken, context.now)
    assert context.home.ca() != before
    assert context.home.ca_ends() == context.now + 365 * DAY
    _, chain = homes.own_certificate(context.home, context.now)
    key = key_files.ec_key(context.home.keys / "tls.key").public_key()
    certificates.checked_chain(chain, context.home.root_crt(), certificates.COORDINATOR, key, context.now)
    context.joined(context.site("b"))


def test_another_federations_root_renews_nothing(context: Desk, tmp_path: Path) -> None:
    other = homes.create(tmp_path / "other", 'listen = "127.0.0.1:0"\n', preset("internal"), context.now)
    before = context.home.ca()
    with pytest.raises(coordinator_errors.CoordinatorConfigError, match="another federation"):
        homes.renew_intermediate(context.home, other.root / "offline", context.now)
    with pytest.raises(key_files.KeyFileError):
        homes.renew_intermediate(context.home, tmp_path / "nowhere", context.now)
    (other.root / "offline" / "root.crt").write_bytes(context.home.root_crt())
    with pytest.raises(coordinator_errors.CoordinatorConfigError, match="together"):
        homes.renew_intermediate(context.home, other.root / "offline", context.now)
    assert context.home.ca() == before


def test_a_ceremony_that_broke_off_in_the_middle_is_repeated(context: Desk) -> None:
    (context.home.keys / "intermediate.key").write_bytes(
        certificates.make_intermediate(
            ((context.home.root / "offline" / "root.key").read_bytes(), context.home.root_crt()), context.now
        )[0]
    )
    with pytest.raises(certificates.CertificateError, match="together"):
        context.authority.invite("a")
    homes.renew_intermediate(context.home, context.home.root / "offline", context.now)
    context.joined(context.site())


def test_the_coordinators_own_certificate_is_renewed_in_its_last_third(context: Desk) -> None:
    first = homes.own_certificate(context.home, context.now)
    assert homes.own_certificate(context.home, context.now + 15 * HOUR) == first
    second = homes.own_certificate(context.home, context.now + 17 * HOUR)
    assert second != first
    assert context.home.tls() == second
    assert certificates.leaf_of(second[1]).not_valid_after_utc == context.now + 41 * HOUR
    names = certificates.leaf_of(second[1]).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "hub.example"]


def test_the_coordinators_own_certificate_is_for_the_address_at_which_it_listens_now(context: Desk) -> None:
    before = homes.own_certificate(context.home, context.now)[1]
    path = context.home.root / "coordinator.toml"
    path.write_text(path.read_text().replace("hub.example", "moved.example"))
    after = homes.own_certificate(context.home, context.now)[1]
    names = certificates.leaf_of(after).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "moved.example" in names.get_values_for_type(x509.DNSName)
    assert after != before
    assert homes.own_certificate(context.home, context.now)[1] == after


def test_after_a_long_rest_the_coordinator_and_its_operator_have_certificates_again(context: Desk) -> None:
    later = context.now + 100 * DAY
    for made, name, stem in (
        (homes.own_certificate, certificates.COORDINATOR, "tls"),
        (homes.operator_certificate, certificates.OPERATOR, "operator"),
    ):
        key, chain = made(context.home, later)
        public_key = key_files.ec_key(context.home.keys / f"{stem}.key").public_key()
        certificates.checked_chain(chain, context.home.root_crt(), name, public_key, later)
        assert key == key_files.pem(key_files.ec_key(context.home.keys / f"{stem}.key"))
    with pytest.raises(coordinator_errors.CoordinatorConfigError, match="renew"):
        homes.own_certificate(context.home, context.now + 400 * DAY)


def test_a_missing_intermediate_stops_nothing_before_the_certificate_ends(context: Desk) -> None:
    chain = homes.own_certificate(context.home, context.now)[1]
    (context.home.keys / "intermediate.key").unlink()
    assert homes.own_certificate(context.home, context.now + 20 * HOUR)[1] == chain
    with pytest.raises(coordinator_errors.CoordinatorConfigError, match=r"intermediate\.key"):
        homes.own_certificate(context.home, context.now + 25 * HOUR)


@pytest.mark.parametrize("name", ["tls.key", "operator.key", "intermediate.key", "ledger.key"])
def test_the_coordinator_uses_no_key_that_others_can_read(context: Desk, name: str) -> None:
    uses: dict[str, Callable[[], object]] = {
        "ledger.key": context.home.ledger_key,
        "intermediate.key": lambda: context.authority.invite("a"),
        "tls.key": lambda: homes.own_certificate(context.home, context.now),
        "operator.key": lambda: homes.operator_certificate(context.home, context.now),
    }
    (context.home.keys / name).chmod(0o640)
    with pytest.raises(key_files.KeyFileError, match="chmod 600"):
        uses[name]()
    (context.home.keys / name).chmod(0o600)
    uses[name]()
    context.home.keys.chmod(0o750)
    with pytest.raises(key_files.KeyFileError, match="chmod 700"):
        uses[name]()
