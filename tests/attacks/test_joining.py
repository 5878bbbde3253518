"""Enrolment: tokens, invitations, requests; through the real port, as a hospital's agent comes."""

from __future__ import annotations

import datetime as dt
import json
import os
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from agent.errors import CoordinatorUnreachableError, SiteConfigError
from agent.gateway import enrolment
from agent.gateway.enrolment import EnrolmentProgress, Given, enrol, over_grpc
from agent.storage import site_directory
from coordinator.enrolment.authority import Authority, Invitation
from policies.review.policy import preset
from policies.statements import PAYLOAD_TYPE, Enrolment, encode, parse
from protos.common.dsse import open_sealed, seal
from protos.identity.certificates import issue, joining_name, make_intermediate, make_root, request, root_fingerprint
from protos.identity.join_token import new_token, read_token, token_key
from protos.identity.key_files import pem
from protos.v1 import gateway_pb2
from tests.attacks.ground import Code, Ground, call, now, refusal
from tests.support.federation_world import SETTINGS, Site


def hospital(ground: Ground, name: str, folder: str = "") -> site_directory.SiteDirectory:
    """A site that was not enrolled yet."""
    settings = SETTINGS.format(site=name, listen=ground.target)
    return site_directory.create(ground.federation.root / (folder or name), settings, preset("internal"))


def invited(ground: Ground, name: str) -> Invitation:
    return ground.federation.authority.invite(name)


def given(invitation: Invitation, **changes: str) -> Given:
    body = json.loads(invitation.body) | {k: v for k, v in changes.items() if k in ("root", "site", "certificate")}
    token, said = changes.get("token", invitation.token), changes.get("said", invitation.fingerprint)
    return Given(json.dumps(body).encode(), token, said)


def come(home: site_directory.SiteDirectory, words: Given) -> EnrolmentProgress:
    """As `lazaret-agent enrol` does, over the wire."""
    return enrol(home, words, over_grpc(), now())


def nobody_joined(ground: Ground, home: site_directory.SiteDirectory) -> None:
    assert home.settings().site not in ground.federation.store.state.sites
    assert not (home.keys / "tls.pem").exists()


def test_a_token_is_good_for_one_request(ground: Ground) -> None:
    first, thief = hospital(ground, "site-n"), hospital(ground, "site-n", "thief")
    invitation = invited(ground, "site-n")
    assert come(first, given(invitation)).state == "waiting"
    with ground.refused("invitation_used"), pytest.raises(SiteConfigError, match="used for another request"):
        come(thief, given(invitation))
    with (
        ground.refused(),
        pytest.raises(SiteConfigError, match="used for another request"),
    ):  # once is enough in the books
        come(thief, given(invitation))
    assert come(first, given(invitation)).state == "waiting", "the first may ask again"
    nobody_joined(ground, thief)
    nobody_joined(ground, first)


def test_a_token_of_a_replaced_invitation_is_refused(ground: Ground) -> None:
    home, old = hospital(ground, "site-n"), invited(ground, "site-n")
    invited(ground, "site-n")
    with ground.refused(), pytest.raises(SiteConfigError, match="replaced by a newer one"):
        come(home, given(old))
    nobody_joined(ground, home)


def test_an_ended_invitation_is_refused_by_the_agent_and_by_the_port(ground: Ground) -> None:
    home, federation = hospital(ground, "site-n"), ground.federation
    then = now() + dt.timedelta(minutes=31)
    invitation = invited(ground, "site-n")
    with pytest.raises(SiteConfigError, match="has expired"):
        enrol(home, given(invitation), over_grpc(), then)
    late = Authority(federation.home, federation.intake, lambda: then)
    vars(federation.service.at.authority).update(_clock=lambda: then)
    with ground.refused(), pytest.raises(SiteConfigError, match="the invitation has ended"):
        come(home, given(invitation))
    assert [p.state for p in late.enrolments()] == []
    nobody_joined(ground, home)


@pytest.mark.parametrize("slip", [0, 1, 15])
def test_a_guessed_token_opens_no_conversation(ground: Ground, slip: int) -> None:
    """A guess with a right checksum, and the invitation's own certificate: the handshake wants the token's key."""
    home, invitation = hospital(ground, "site-n"), invited(ground, "site-n")
    raw = bytearray(read_token(invitation.token))
    raw[slip] ^= 1
    guess = new_token(lambda _count: bytes(raw))
    with pytest.raises(SiteConfigError, match="does not match this invitation"):
        come(home, given(invitation, token=guess))
    chain = json.loads(invitation.body)["certificate"].encode()
    with ground.refused():
        with ground.channel(pem(token_key(read_token(guess))), chain) as channel:
            assert refusal(lambda: call(channel, "Join")).code() == Code.UNAVAILABLE
        own = issue(
            request(token_key(bytes(raw)), joining_name("site-n")),
            joining_name("site-n"),
            make_intermediate(make_root(now()), now()),
            now(),
        )
        with ground.channel(pem(token_key(bytes(raw))), own) as channel:
            assert refusal(lambda: call(channel, "Join")).code() == Code.UNAVAILABLE
    with pytest.raises(SiteConfigError, match="mistyped"):
        come(home, given(invitation, token=invitation.token[:-1] + "A2"[invitation.token[-1] == "A"]))
    nobody_joined(ground, home)


def test_a_certificate_for_joining_that_nobody_was_invited_with_is_refused(ground: Ground) -> None:
    """As after a theft of the intermediate's key: there is no invitation to that key."""
    home, key = hospital(ground, "site-n"), token_key(os.urandom(16))
    name = joining_name("site-n")
    chain = issue(request(key, name), name, ground.federation.home.ca(), now())
    sealed = (home.root / "request.json").read_bytes()
    with ground.refused(), pytest.raises(SiteConfigError, match="no open invitation"):
        over_grpc()(
            grpc.ssl_channel_credentials(ground.federation.home.root_crt(), pem(key), chain), ground.target, sealed
        )
    invited(ground, "site-n")
    with ground.refused(), pytest.raises(SiteConfigError, match="replaced by a newer one"):
        over_grpc()(
            grpc.ssl_channel_credentials(ground.federation.home.root_crt(), pem(key), chain), ground.target, sealed
        )


def test_an_invitation_of_another_site_is_of_no_use(ground: Ground, site: Site) -> None:
    home, invitation = hospital(ground, "site-n"), invited(ground, "site-m")
    with pytest.raises(SiteConfigError, match="another site"):
        come(home, given(invitation))
    with pytest.raises(SiteConfigError, match="does not match this invitation"):
        come(home, given(invitation, site="site-n"))
    token = token_key(read_token(invitation.token))
    chain = json.loads(invitation.body)["certificate"].encode()
    credentials = grpc.ssl_channel_credentials(ground.federation.home.root_crt(), pem(token), chain)
    for sealed in ((home.root / "request.json").read_bytes(), (site.home.root / "request.json").read_bytes()):
        with ground.refused(), pytest.raises(SiteConfigError, match=r"another site|another site's"):
            over_grpc()(credentials, ground.target, sealed)
    nobody_joined(ground, home)


def test_a_swapped_root_in_the_invitation_is_found_by_its_fingerprint(ground: Ground) -> None:
    home, invitation = hospital(ground, "site-n"), invited(ground, "site-n")
    root = make_root(now())
    name, key = joining_name("site-n"), token_key(read_token(invitation.token))
    theirs = issue(request(key, name), name, make_intermediate(root, now()), now()).decode()
    swapped = given(invitation, root=root[1].decode(), certificate=theirs)
    with pytest.raises(SiteConfigError, match="fingerprint does not match"):
        come(home, swapped)
    half = root_fingerprint(root[1])[:19]
    with pytest.raises(SiteConfigError, match="fingerprint does not match"):
        come(home, given(invitation, root=root[1].decode(), certificate=theirs, said=half))
    believed = given(invitation, root=root[1].decode(), certificate=theirs, said=root_fingerprint(root[1]))
    with (
        ground.refused(),
        pytest.raises(CoordinatorUnreachableError),
    ):  # whoever believed it meets a coordinator of another root
        come(home, believed)
    nobody_joined(ground, home)


def test_no_approval_no_certificate_and_one_person_is_not_enough(ground: Ground) -> None:
    home, federation = hospital(ground, "site-n"), ground.federation
    invitation = invited(ground, "site-n")
    come(home, given(invitation))
    assert enrol(home, None, over_grpc(), now()).state == "waiting"
    (pending,) = federation.authority.enrolments()
    with ground.as_operator() as operator:
        for approvals in ([], federation.approvals("site-n", "s1", pending.digest)[:1]):
            made = _approve(approvals)
            assert "more are needed" in refusal(lambda made=made: call(operator, "Approve", made)).details()
        foreign = _approve(federation.approvals("site-n", "s1", "0" * 64))
        assert "something else" in refusal(lambda: call(operator, "Approve", foreign)).details()
    assert enrol(home, None, over_grpc(), now()).state == "waiting"
    nobody_joined(ground, home)


def _approve(approvals: list[bytes]) -> object:
    return gateway_pb2.ApproveRequest(site="site-n", serial="s1", approvals=approvals)


def test_a_request_in_another_sites_name_or_with_its_key_is_not_taken(ground: Ground, site: Site) -> None:
    """The node key of an enrolled site, under a request of one's own."""
    home = hospital(ground, "site-n", "copied")
    theirs = (site.home.keys / "node.pub").read_text()
    copied = site_directory.create(
        ground.federation.root / "thief", SETTINGS.format(site="site-n", listen=ground.target), preset("internal")
    )
    body = _with_node(copied, theirs)
    (copied.root / "request.json").write_bytes(body)
    with ground.refused(), pytest.raises(SiteConfigError, match="node key belongs to another site"):
        come(copied, given(invited(ground, "site-n")))
    nobody_joined(ground, copied)
    assert home.root != copied.root


def _with_node(home: site_directory.SiteDirectory, node: str) -> bytes:
    key = home.sign_key()
    sealed = (home.root / "request.json").read_bytes()
    said = parse(open_sealed(sealed, PAYLOAD_TYPE, {"": key.public_key().public_bytes_raw()}).payload)
    assert isinstance(said, Enrolment)
    return seal(encode(replace(said, node_key=node.strip())), PAYLOAD_TYPE, key)


def test_what_waits_is_kept_without_a_secret(ground: Ground, tmp_path: Path) -> None:
    home, invitation = hospital(ground, "site-n"), invited(ground, "site-n")
    come(home, given(invitation))
    secret = token_key(read_token(invitation.token)).private_numbers().private_value.to_bytes(32)
    for path in (p for p in ground.federation.home.root.rglob("*") if p.is_file() and p.parent.name != "keys"):
        kept = path.read_bytes()
        for word in (invitation.token.encode(), read_token(invitation.token), secret):
            assert word not in kept, path
    assert (home.keys / enrolment.WAITING).stat().st_mode & 0o077 == 0
