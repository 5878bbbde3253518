"""The coordinator keeps each site's head, and refuses a site whose own ledger went back without a restore."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.cli.rounds import _listen
from agent.errors import CoordinatorUnreachableError
from agent.federation.service import EndedRuns
from agent.gateway import channel
from agent.operations.backup import backup, private_of
from agent.operations.restore import recover, restore
from agent.runtime import AgentRuntime, open_runtime, sync_with_coordinator
from coordinator.operations import doctor
from coordinator.storage.site_heads import HeadNotShownError, ShownHead, SiteHeads, SiteTurnedBackError
from policies.accounting.claims import SubsampledGaussian
from policies.ledger.backends.sqlite import export_file, open_sqlite
from policies.ledger.entries import Refused
from policies.ledger.store import AppendRequest, Store
from policies.statements import Amendment, Receipts
from protos.artifacts.png import pack_earlier_png
from protos.encryption.key_archive import files_of
from protos.protocol_version import EARLIER_AGENT
from protos.v1 import gateway_pb2
from tests.support.federation_world import Federation, Site, pictures
from tests.support.image_sets import shard_of
from tests.support.rolled_back_ledgers import marked_as_it_is

SMALL = SubsampledGaussian(0.01, 8.0, 1)
NONCE = "ab" * 16


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path / "fed") as made:
        yield made


@pytest.fixture
def site(fed: Federation) -> Site:
    made = fed.join("site-a")
    dials(made, fed)
    return made


def dials(site: Site, fed: Federation) -> None:
    """The port of a coordinator that was started again is another one."""
    toml = site.home.root / "site.toml"
    toml.write_text(re.sub(r'127\.0\.0\.1:\d+"', f'127.0.0.1:{fed.port}"', toml.read_text()))
    assert f":{fed.port}" in toml.read_text()


def context(site: Site) -> contextlib.AbstractContextManager[AgentRuntime]:
    return open_runtime(site.home.root, lambda *_: None)


def public(site: Site) -> bytes:
    return site.home.sign_key().public_key().public_bytes_raw()


def spend(opened: AgentRuntime, site: Site, name: str) -> None:
    said = site.hospital.reservation(name, SMALL, "federated", f"run-{name}")
    sealed = opened.site.seal(said)
    assert opened.site.ledger.reserve(f"reserve-{name}", said, sealed).admitted
    assert opened.site.gateway.reserve(f"reserve-{name}", sealed).admitted


def whole_machine(site: Site, to: Path) -> Path:
    return Path(shutil.copytree(site.home.root, to))


def turned_back(site: Site, copy: Path) -> None:
    shutil.rmtree(site.home.root)
    shutil.copytree(copy, site.home.root)


def wrong(fed: Federation) -> str:
    found = {f.name: f.said for f in doctor.findings(fed.home, dt.datetime.now(dt.UTC)) if f.state == "fail"}
    return found.get(doctor._GO_ON, "")


def awaited(fed: Federation) -> str:
    found = {f.name: f.said for f in doctor.findings(fed.home, dt.datetime.now(dt.UTC)) if f.state == "note"}
    return found.get(doctor._GO_ON, "")


def test_a_site_that_goes_on_is_taken_from_command_to_command(fed: Federation, site: Site) -> None:
    for name in ("g1", "g2"):
        with context(site) as opened:
            sync_with_coordinator(opened)
            spend(opened, site, name)
            sync_with_coordinator(opened)
            size = opened.site.ledger.store.state.size
        assert fed.service.at.site_heads.seen("site-a", public(site)) == size
    assert wrong(fed) == ""


def test_a_machine_that_is_turned_back_whole_is_refused_until_its_own_restore(
    fed: Federation, site: Site, tmp_path: Path
) -> None:
    with context(site) as opened:
        sync_with_coordinator(opened)
    backup(site.home, tmp_path / "backup")
    keys = private_of(files_of(site.home.keys))
    copy = whole_machine(site, tmp_path / "copy")
    with context(site) as opened:
        sync_with_coordinator(opened)
        spend(opened, site, "late")
        sync_with_coordinator(opened)
    turned_back(site, copy)
    with context(site) as opened:  # it finds nothing wrong with itself
        with pytest.raises(CoordinatorUnreachableError, match=r"turned back.*`lazaret-agent restore`"):
            sync_with_coordinator(opened)
        said = opened.site.seal(site.hospital.reservation("again", SMALL, "federated", "run-again"))
        for act in (
            lambda: opened.gateway.reserve("reserve-again", said),
            lambda: opened.gateway.present("recover-x", opened.site.seal(Receipts("site-a", "x", "y", 0))),
            lambda: opened.gateway.submit("submit-x", said, pictures()),
        ):
            with pytest.raises(CoordinatorUnreachableError, match="turned back"):
                act()
        with pytest.raises(grpc.RpcError) as told:  # nor any part in a run
            list(opened.gateway._stub.Fleet(iter([gateway_pb2.FleetPart(path="/x")]), timeout=60))
        assert told.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "site-a" in wrong(fed)
    assert ["turned_back"] in fed.findings()
    exported = export_file(fed.home.ledger, "lazaret/coordinator", fed.home.ledger_key())
    shutil.rmtree(site.home.root)
    restore(site.home.root, tmp_path / "backup", keys, NONCE)
    assert recover(site.home, exported).lost == 1
    for name in ("tls.pem",):  # made anew every day; the backup has none
        shutil.copy(copy / "keys" / name, site.home.keys / name)
    with context(site) as opened:
        sync_with_coordinator(opened)
        spend(opened, site, "after")
    assert wrong(fed) == ""
    once_more = whole_machine(site, tmp_path / "restored")
    with context(site) as opened:
        sync_with_coordinator(opened)
        spend(opened, site, "later")
        sync_with_coordinator(opened)
    turned_back(site, once_more)  # the restore that it shows is not a new one
    with context(site) as opened, pytest.raises(CoordinatorUnreachableError, match="turned back"):
        sync_with_coordinator(opened)


def test_the_refusal_outlives_a_restart_of_the_coordinator(fed: Federation, site: Site, tmp_path: Path) -> None:
    copy = whole_machine(site, tmp_path / "copy")
    with context(site) as opened:
        sync_with_coordinator(opened)
        spend(opened, site, "g")
        sync_with_coordinator(opened)
    turned_back(site, copy)
    with context(site) as opened, pytest.raises(CoordinatorUnreachableError):
        sync_with_coordinator(opened)
    fed.__exit__(None, None, None)
    with fed, pytest.raises(CoordinatorUnreachableError, match="turned back"):
        site.reserved("k")


def test_with_a_release_the_site_shows_the_head_that_holds_it(fed: Federation, site: Site, tmp_path: Path) -> None:
    """So that who turns the machine back to before its last release is found, however short the command was."""
    copy = whole_machine(site, tmp_path / "copy")
    with context(site) as opened:
        sync_with_coordinator(opened)
        reservation = site.hospital.reservation("k")
        sealed = opened.site.seal(reservation)
        assert opened.site.ledger.reserve("reserve-k", reservation, sealed).admitted
        assert opened.gateway.reserve("reserve-k", sealed).admitted
        artifact = pictures()
        release = site.release("k", artifact)
        envelope = opened.site.seal(release)
        opened.site.ledger.send(release, envelope)
        sent = opened.site.ledger.store.state.size
        assert opened.gateway.submit(f"submit-{release.release}", envelope, artifact).admitted
    assert fed.service.at.site_heads.seen("site-a", public(site)) == sent
    turned_back(site, copy)
    with context(site) as opened, pytest.raises(CoordinatorUnreachableError, match="turned back"):
        sync_with_coordinator(opened)


def test_a_site_that_never_showed_a_head_is_taken_without_one(fed: Federation, site: Site) -> None:
    site.gateway().hello()
    site.reserved("k")
    assert fed.service.at.site_heads.behind({"site-a": public(site)}) == ()


def amended(site: Site) -> gateway_pb2.SealedRequest:
    number = int(time.time())
    envelope = site.seal(Amendment("site-a", number, site.hospital.policy_text))
    return gateway_pb2.SealedRequest(key=f"amend-{number}", envelope=envelope)


def no_piece_goes(site: Site, code: grpc.StatusCode, words: str) -> None:
    with pytest.raises(grpc.RpcError, match=words) as told:
        site.gateway()._stub.Upload(iter([gateway_pb2.UploadPart(upload="00" * 32)]), timeout=30)
    assert told.value.code() is code


def nothing_goes(fed: Federation, site: Site, code: grpc.StatusCode, words: str) -> None:
    """Each call that could release a patient is refused, and the ledger stays as it is."""
    size = fed.store.state.size
    sealed = gateway_pb2.SealedRequest(key="reserve-again", envelope=site.seal(site.hospital.reservation("again")))
    stub = site.gateway()._stub
    for act in (
        lambda: stub.Reserve(sealed, timeout=30),
        lambda: stub.Amend(amended(site), timeout=30),
        lambda: stub.Present(sealed, timeout=30),
        lambda: stub.Offer(gateway_pb2.OfferRequest(sealed=sealed, chunks=[bytes(32)]), timeout=30),
        lambda: stub.Submit(sealed, timeout=30),
        lambda: list(stub.Fleet(iter([gateway_pb2.FleetPart(path="/x")]), timeout=60)),
    ):
        with pytest.raises(grpc.RpcError, match=words) as told:
            act()
        assert told.value.code() is code
    assert fed.store.state.size == size


def test_a_site_that_has_shown_a_head_gets_nothing_in_silence(fed: Federation, site: Site) -> None:
    with context(site) as opened:
        sync_with_coordinator(opened)
        size = opened.site.ledger.store.state.size
    site.gateway().hello()
    nothing_goes(fed, site, grpc.StatusCode.OUT_OF_RANGE, f"from {size} entries")
    no_piece_goes(site, grpc.StatusCode.OUT_OF_RANGE, f"from {size} entries")
    assert fed.service.at.site_heads.behind({"site-a": public(site)}) == ()
    assert "calls are refused from: site-a" in awaited(fed)
    with context(site) as opened:  # an honest one has only to greet
        sync_with_coordinator(opened)
        spend(opened, site, "k")
    assert awaited(fed) == ""


def test_a_site_whose_proof_always_leads_from_another_head_gets_nothing(
    fed: Federation, site: Site, tmp_path: Path
) -> None:
    copy = whole_machine(site, tmp_path / "copy")
    with context(site) as opened:
        sync_with_coordinator(opened)
        spend(opened, site, "late")
        sync_with_coordinator(opened)
        kept = opened.site.ledger.store.state.size
    turned_back(site, copy)
    with context(site) as opened:
        for name in range(kept):  # as long as the kept one, and longer
            spent = site.hospital.reservation(f"g{name}", SMALL, "federated", f"run-g{name}")
            assert opened.site.ledger.reserve(f"reserve-g{name}", spent, opened.site.seal(spent)).admitted
        shown = opened.site.ledger.store.prove(1)
    own = gateway_pb2.SiteHead(checkpoint=shown.checkpoint, since=1, proof=shown.proof)
    stub = site.gateway()._stub
    said = site.seal(site.hospital.reservation("again"))
    for _ in range(2):
        reply = stub.Hello(gateway_pb2.HelloRequest(own=own), timeout=30)
        assert reply.own_seen == kept, "so that an honest site can show it from there"
        with pytest.raises(grpc.RpcError, match=f"from {kept} entries") as told:
            stub.Submit(gateway_pb2.SealedRequest(key="submit-x", envelope=said, own=own), timeout=30)
        assert told.value.code() is grpc.StatusCode.OUT_OF_RANGE
        nothing_goes(fed, site, grpc.StatusCode.OUT_OF_RANGE, f"from {kept} entries")
    assert '"site_head_not_shown"' in (fed.home.root / "coordinator.log").read_text()


def test_two_calls_of_one_site_at_once_find_out_and_go_on(fed: Federation, site: Site) -> None:
    """Whichever comes second shows its head from one that is not kept any more, asks, and shows it again."""
    with context(site) as opened:
        sync_with_coordinator(opened)
        reservation = site.hospital.reservation("k")
        sealed = opened.site.seal(reservation)
        assert opened.site.ledger.reserve("reserve-k", reservation, sealed).admitted
        assert opened.gateway.reserve("reserve-k", sealed).admitted
        beside = site.gateway()
        beside.own = opened.site.ledger.store.prove
        beside.hello()
        beside.hello()  # the head that the desk's own door knows of is not the kept one any more
        artifact = pictures()
        release = site.release("k", artifact)
        envelope = opened.site.seal(release)
        opened.site.ledger.send(release, envelope)
        assert opened.gateway.submit(f"submit-{release.release}", envelope, artifact).admitted
        late = beside._own_head()  # of a call that is given up, and arrives all the same
        spend(opened, site, "later")
        opened.gateway.hello()
        beside._stub.Hello(gateway_pb2.HelloRequest(own=late), timeout=30)
        assert fed.service.at.site_heads.to_show("site-a", public(site)) > 0
        spend(opened, site, "between")  # the door shows its head, and asks again
        spend(opened, site, "after")
        beside.hello()  # and this one's is older now
        assert fed.service.at.site_heads.to_show("site-a", public(site)) == 0
        spend(opened, site, "last")


def test_a_look_beside_the_agent_shows_no_head_and_stops_nothing(fed: Federation, site: Site) -> None:
    with context(site) as opened:
        sync_with_coordinator(opened)
        site.gateway().hello(looks=True)  # `doctor`, while `serve` holds the ledger
        spend(opened, site, "k")


def test_an_agent_of_before_heads_is_refused_for_a_site_that_has_shown_one(
    fed: Federation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(channel, "USER_AGENT", EARLIER_AGENT)
        site.gateway().hello()
        site.reserved("before")
    with context(site) as opened:
        sync_with_coordinator(opened)
    monkeypatch.setattr(channel, "USER_AGENT", EARLIER_AGENT)
    with pytest.raises(CoordinatorUnreachableError, match="upgrade this site's agent"):
        site.gateway().hello()
    nothing_goes(fed, site, grpc.StatusCode.FAILED_PRECONDITION, "upgrade this site's agent")
    assert "site-a" in awaited(fed)
    monkeypatch.undo()
    with context(site) as opened:
        sync_with_coordinator(opened)
        spend(opened, site, "k")


def test_a_set_of_before_heads_is_handed_in_by_an_agent_of_today_that_shows_them(fed: Federation, site: Site) -> None:
    """In the protocol of then, and with the head of now."""
    with context(site) as opened:
        sync_with_coordinator(opened)
        reservation = site.hospital.reservation("k")
        sealed = opened.site.seal(reservation)
        assert opened.site.ledger.reserve("reserve-k", reservation, sealed).admitted
        assert opened.gateway.reserve("reserve-k", sealed).admitted
        artifact = shard_of([pack_earlier_png(np.zeros((64, 64), np.uint8))])
        release = site.release("k", artifact)
        envelope = opened.site.seal(release)
        opened.site.ledger.send(release, envelope)
        assert opened.gateway.submit_earlier(f"submit-{release.release}", envelope, artifact).admitted
        sent = opened.site.ledger.store.state.size
    assert fed.service.at.site_heads.seen("site-a", public(site)) == sent


def test_a_site_that_was_turned_back_is_written_down_once(fed: Federation, site: Site, tmp_path: Path) -> None:
    copy = whole_machine(site, tmp_path / "copy")
    with context(site) as opened:
        sync_with_coordinator(opened)
        spend(opened, site, "g")
        sync_with_coordinator(opened)
    turned_back(site, copy)
    with context(site) as opened:
        for _ in range(5):
            with pytest.raises(CoordinatorUnreachableError, match="turned back"):
                sync_with_coordinator(opened)
            with pytest.raises(CoordinatorUnreachableError, match="turned back"):
                site.reserved("k")
    assert fed.findings().count(["turned_back"]) == 1
    log = (fed.home.root / "coordinator.log").read_text().splitlines()
    assert sum('"turned_away"' in line and '"turned_back"' in line for line in log) == 10


def greeted_and_turned_back(site: Site, copy: Path) -> None:
    """The coordinator keeps a head that the machine does not know of any more."""
    whole_machine(site, copy)
    with context(site) as opened:
        sync_with_coordinator(opened)
        spend(opened, site, "late")
        sync_with_coordinator(opened)
    turned_back(site, copy)


def test_a_machine_that_is_turned_back_gets_nothing_before_it_greets_either(
    fed: Federation, site: Site, tmp_path: Path
) -> None:
    """Each call brings the head along, and is judged by it; whoever brings none is asked for it."""
    greeted_and_turned_back(site, tmp_path / "copy")
    nothing_goes(fed, site, grpc.StatusCode.OUT_OF_RANGE, "show it again")
    assert fed.service.at.site_heads.behind({"site-a": public(site)}) == ()
    said = site.seal(site.hospital.reservation("again"))
    acts: tuple[Callable[[AgentRuntime], object], ...] = (
        lambda opened: opened.gateway.reserve("reserve-again", said),
        lambda opened: opened.gateway.present("recover-x", said),
        lambda opened: opened.gateway.amend("amend-1", said),
        lambda opened: opened.gateway.submit("submit-x", said, pictures()),
    )
    for act in acts:
        with context(site) as opened, pytest.raises(CoordinatorUnreachableError, match="turned back"):
            act(opened)
    nothing_goes(fed, site, grpc.StatusCode.PERMISSION_DENIED, "turned back")
    assert fed.findings() == [["turned_back"]]


def test_a_site_that_is_behind_changes_no_policy_and_uploads_nothing(
    fed: Federation, site: Site, tmp_path: Path
) -> None:
    greeted_and_turned_back(site, tmp_path / "copy")
    with context(site) as opened, pytest.raises(CoordinatorUnreachableError, match="turned back"):
        sync_with_coordinator(opened)
    with pytest.raises(grpc.RpcError, match="turned back") as told:
        site.gateway()._stub.Amend(amended(site), timeout=30)
    assert told.value.code() is grpc.StatusCode.PERMISSION_DENIED
    no_piece_goes(site, grpc.StatusCode.PERMISSION_DENIED, "turned back")


def test_a_part_in_a_run_needs_a_head_that_was_shown_since_the_session_began(fed: Federation, site: Site) -> None:
    def fleet(opened: AgentRuntime) -> int:
        try:
            return int(
                next(iter(opened.gateway._stub.Fleet(iter([gateway_pb2.FleetPart(path="/x")]), timeout=60))).status
            )
        except grpc.RpcError as error:
            return 0 if error.code() is grpc.StatusCode.OUT_OF_RANGE else -1

    with context(site) as opened:
        assert fleet(opened) == 503, "a site that never showed one is taken without"
        sync_with_coordinator(opened)
        assert fleet(opened) == 0, "whoever greeted may have been another machine"
        first = opened.gateway.session("test")
        assert next(first).kind == "hello"
        assert fleet(opened) == 0
        opened.gateway.hello()
        assert fleet(opened) == 503
        second = opened.gateway.session("test")
        assert next(second).kind == "hello"
        assert fleet(opened) == 0
        spend(opened, site, "k")  # with the head as well
        assert fleet(opened) == 503
        second.cancel()
        while fed.service.sessions.connected():
            time.sleep(0.01)
        assert fleet(opened) == 0


def test_where_there_is_no_place_for_a_session_the_site_goes_on_without_one(
    fed: Federation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.gateway.notifications.MOST", 0)
    with context(site) as opened:
        sync_with_coordinator(opened)
        assert [
            part.status for part in opened.gateway._stub.Fleet(iter([gateway_pb2.FleetPart(path="/x")]), timeout=60)
        ] == [503]
        site.gateway().hello()
        with pytest.raises(grpc.RpcError, match="show it again"):
            list(opened.gateway._stub.Fleet(iter([gateway_pb2.FleetPart(path="/x")]), timeout=60))


def test_an_agent_shows_its_head_as_soon_as_its_session_begins(fed: Federation, site: Site) -> None:
    """In the session's own thread: a round that is being trained holds no greeting up."""
    woken, again = threading.Event(), threading.Event()

    class Woken:
        def wake(self) -> None:
            woken.set()

    with context(site) as opened:
        sync_with_coordinator(opened)
        session = _listen(opened, Woken(), EndedRuns(), again)
        try:
            while not fed.service.sessions.head_shown("site-a"):
                time.sleep(0.01)
        finally:
            session.close()
    assert woken.is_set()
    assert again.is_set()


def test_what_the_ledger_holds_meanwhile_is_no_fork_when_a_call_is_made_again(fed: Federation, site: Site) -> None:
    """The greeting between the two takes a newer head; the second call's proof leads from there."""
    other = fed.join("site-b")
    with context(site) as opened:
        sync_with_coordinator(opened)
        other.reserved("x")
        beside = site.gateway()
        beside.own = opened.site.ledger.store.prove
        said = site.hospital.reservation("k", SMALL, "federated", "run-k")
        sealed = opened.site.seal(said)
        assert opened.site.ledger.reserve("reserve-k", said, sealed).admitted
        beside.hello()
        beside.hello()
        site.gateway().hello()
        assert opened.gateway.reserve("reserve-k", sealed).admitted


@pytest.mark.parametrize("first", ["reserve", "submit"])
def test_an_agent_whose_first_call_is_no_greeting_greets_first(fed: Federation, site: Site, first: str) -> None:
    with context(site) as opened:
        sync_with_coordinator(opened)
        if first == "submit":
            said = site.hospital.reservation("k")
            sealed = opened.site.seal(said)
            assert opened.site.ledger.reserve("reserve-k", said, sealed).admitted
            assert opened.gateway.reserve("reserve-k", sealed).admitted
    site.gateway().hello()
    with context(site) as opened:
        if first == "reserve":
            spend(opened, site, "k")
            return
        artifact = pictures()
        release = site.release("k", artifact)
        envelope = opened.site.seal(release)
        opened.site.ledger.send(release, envelope)
        assert opened.gateway.submit(f"submit-{release.release}", envelope, artifact).admitted


def test_that_it_was_turned_back_is_written_down_later_when_it_could_not_be_at_once(
    fed: Federation, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeted_and_turned_back(site, tmp_path / "copy")

    def full(_site: str, _rule: str) -> None:
        raise OSError("no room")

    with monkeypatch.context() as for_now:
        for_now.setattr(fed.service.guard, "_report", full)
        with context(site) as opened, pytest.raises(CoordinatorUnreachableError, match="turned back"):
            sync_with_coordinator(opened)
    assert fed.findings() == []
    for _ in range(2):
        with pytest.raises(CoordinatorUnreachableError, match="turned back"):
            site.reserved("k")
    assert fed.findings() == [["turned_back"]]


def test_that_it_was_turned_back_is_written_down_after_a_crash_before_the_entry(
    fed: Federation, site: Site, tmp_path: Path
) -> None:
    greeted_and_turned_back(site, tmp_path / "copy")
    heads = fed.service.at.site_heads
    with context(site) as opened:
        kept = heads.seen("site-a", public(site))
        shown = opened.site.ledger.store.prove(kept)
    with pytest.raises(SiteTurnedBackError):
        heads.take("site-a", public(site), ShownHead(shown.checkpoint, kept, shown.proof))
    fed.__exit__(None, None, None)
    with fed:
        dials(site, fed)
        assert fed.findings() == []
        for _ in range(2):
            with context(site) as opened, pytest.raises(CoordinatorUnreachableError, match="turned back"):
                sync_with_coordinator(opened)
        assert fed.findings() == [["turned_back"]]


def test_a_head_that_is_none_is_written_down_under_a_rule_of_its_own(
    fed: Federation, site: Site, tmp_path: Path
) -> None:
    with context(site) as opened:
        sync_with_coordinator(opened)
    note = Own(tmp_path / "other" / "own.db", Ed25519PrivateKey.generate()).grow(3).shown(0).note
    with pytest.raises(grpc.RpcError, match="not signed by its key"):
        site.gateway()._stub.Hello(gateway_pb2.HelloRequest(own=gateway_pb2.SiteHead(checkpoint=note)), timeout=30)
    assert fed.findings() == [["bad_head"]]
    fed.__exit__(None, None, None)
    (fed.home.site_heads / "site-a.json").write_text("{}")
    with fed:
        dials(site, fed)
        with (
            context(site) as opened,
            pytest.raises(CoordinatorUnreachableError, match=r"cannot read site-heads/site-a\.json"),
        ):
            sync_with_coordinator(opened)
        assert fed.findings() == [["bad_head"], ["bad_head"]]
        assert "site-a" in wrong(fed)


def test_a_site_that_left_stands_in_doctor_no_more(fed: Federation, site: Site, tmp_path: Path) -> None:
    greeted_and_turned_back(site, tmp_path / "copy")
    with context(site) as opened, pytest.raises(CoordinatorUnreachableError):
        sync_with_coordinator(opened)
    assert "site-a" in wrong(fed)
    fed.authority.revoke("site-a", "", "left")
    assert wrong(fed) == ""


# -- what is kept, alone

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
KEYS = {"site-a": PUBLIC}


class Own:
    """A site's ledger, and what it shows."""

    def __init__(self, path: Path, key: Ed25519PrivateKey = KEY, origin: str = "lazaret/site-a") -> None:
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            marked_as_it_is(path)
        self.path, self.store = path, Store(open_sqlite(path), origin, key, lambda: 7)

    def grow(self, count: int, word: str = "x") -> Own:
        for _ in range(count):
            entry = Refused("x", "site-a", "", "call", [word], b"")
            self.store.append(f"{word}-{self.store.state.size}", AppendRequest((entry,)))
        return self

    def shown(self, since: int) -> ShownHead:
        s = self.store.prove(since)
        return ShownHead(s.checkpoint, since, s.proof, s.restored, s.restored_at, s.restored_proof)

    def copy(self, to: Path) -> Own:
        self.store.close()
        to.parent.mkdir()
        shutil.copy(self.path, to)
        self.store = Store(open_sqlite(self.path), self.store.origin, KEY, lambda: 7)
        return Own(to)


@pytest.fixture
def heads(tmp_path: Path) -> SiteHeads:
    return SiteHeads(tmp_path / "site-heads")


def take(heads: SiteHeads, own: Own) -> None:
    heads.take("site-a", PUBLIC, own.shown(heads.seen("site-a", PUBLIC)))


def refused(heads: SiteHeads, own: Own) -> None:
    with pytest.raises(SiteTurnedBackError):
        take(heads, own)
    assert heads.refused("site-a", PUBLIC)
    assert heads.behind(KEYS) == ("site-a",)


def test_a_shorter_ledger_and_a_fork_are_refused_and_the_true_one_is_taken_again(
    heads: SiteHeads, tmp_path: Path
) -> None:
    own = Own(tmp_path / "a" / "own.db").grow(3)
    older = own.copy(tmp_path / "b" / "own.db")
    own.grow(2)
    take(heads, own)
    refused(heads, older)
    refused(heads, older.grow(2, "fork"))
    refused(heads, older.grow(3, "fork"))
    take(heads, own)
    assert heads.refused("site-a", PUBLIC) == ""
    take(heads, own.grow(4))
    assert SiteHeads(tmp_path / "site-heads").seen("site-a", PUBLIC) == own.store.state.size


def test_a_proof_from_another_head_than_the_one_kept_is_asked_for_again(heads: SiteHeads, tmp_path: Path) -> None:
    own = Own(tmp_path / "a" / "own.db").grow(3)
    take(heads, own)
    late = own.grow(2).shown(2)
    with pytest.raises(HeadNotShownError, match="from 3 entries"):
        heads.take("site-a", PUBLIC, late)
    assert (heads.seen("site-a", PUBLIC), heads.behind(KEYS)) == (3, ()), "it may be an honest race"
    assert heads.to_show("site-a", PUBLIC) == 3, "and nothing else is taken meanwhile"
    take(heads, own)
    assert (heads.seen("site-a", PUBLIC), heads.to_show("site-a", PUBLIC)) == (5, 0)
    refused(heads, Own(tmp_path / "b" / "own.db").grow(7, "fork"))
    with pytest.raises(HeadNotShownError):
        heads.take("site-a", PUBLIC, own.grow(1).shown(2))
    assert heads.behind(KEYS) == ("site-a",), "and lets nobody out"


def test_a_call_that_arrives_after_a_later_one_turns_no_site_back(heads: SiteHeads, tmp_path: Path) -> None:
    """A machine that was turned back shows its head from the kept one, and is found."""
    own = Own(tmp_path / "a" / "own.db").grow(3)
    older = own.copy(tmp_path / "b" / "own.db")
    take(heads, own)
    late = own.grow(1).shown(3)
    heads.take("site-a", PUBLIC, late)
    take(heads, own.grow(1))
    with pytest.raises(HeadNotShownError, match="from 5 entries"):
        heads.take("site-a", PUBLIC, late)
    assert (heads.behind(KEYS), heads.to_show("site-a", PUBLIC)) == ((), 5)
    take(heads, own)
    refused(heads, older)


def test_what_was_not_shown_is_not_shown_after_a_restart_either(heads: SiteHeads, tmp_path: Path) -> None:
    own = Own(tmp_path / "a" / "own.db").grow(3)
    heads.unshown("site-a", PUBLIC)
    assert heads.to_show("site-a", PUBLIC) == 0, "of a site that never showed one there is nothing to show"
    take(heads, own)
    heads.unshown("site-a", PUBLIC)
    again = SiteHeads(tmp_path / "site-heads")
    assert again.to_show("site-a", PUBLIC) == 3
    take(again, own)
    assert SiteHeads(tmp_path / "site-heads").to_show("site-a", PUBLIC) == 0


def test_that_a_site_went_back_is_told_once_and_until_it_is_written(heads: SiteHeads, tmp_path: Path) -> None:
    own = Own(tmp_path / "a" / "own.db").grow(3)
    older = own.copy(tmp_path / "b" / "own.db")
    asked: list[bool] = []

    def tell(written: bool) -> int:
        def write() -> bool:
            asked.append(written)
            return written

        SiteHeads(tmp_path / "site-heads").tell("site-a", PUBLIC, write)
        return len(asked)

    take(heads, own.grow(2))
    assert tell(True) == 0, "it did not go back"
    refused(heads, older)
    assert [tell(False), tell(False), tell(True), tell(True)] == [1, 2, 3, 3]
    again = SiteHeads(tmp_path / "site-heads")
    take(again, own)
    refused(again, older)
    assert tell(True) == 4, "and anew when it went back anew"


def test_files_of_sites_that_left_or_were_enrolled_anew_are_passed_over(heads: SiteHeads, tmp_path: Path) -> None:
    own = Own(tmp_path / "a" / "own.db").grow(3)
    older = own.copy(tmp_path / "b" / "own.db")
    take(heads, own.grow(2))
    heads.unshown("site-a", PUBLIC)
    assert heads.awaited(KEYS) == ("site-a",)
    refused(heads, older)
    (tmp_path / "site-heads" / "site-b.json").write_text("{")
    assert heads.behind({**KEYS, "site-b": PUBLIC}) == ("site-a", "site-b")
    for others in ({}, {"site-a": bytes(32)}, {"site-c": PUBLIC}):
        assert heads.behind(others) == heads.awaited(others) == ()


def test_only_a_restore_that_was_never_shown_opens_an_epoch(heads: SiteHeads, tmp_path: Path) -> None:
    own = Own(tmp_path / "a" / "own.db").grow(3)
    first, second, third = (own.copy(tmp_path / name / "own.db") for name in "bcd")
    own.grow(4)
    take(heads, own)
    first.store.restore("aa" * 16)
    take(heads, first)
    between = first.copy(tmp_path / "e" / "own.db")
    second.store.restore("bb" * 16)  # of the same backup: the same number, another restore
    take(heads, second)
    refused(heads, between.grow(9))
    refused(heads, own)
    take(heads, second)
    third.store.restore("cc" * 16)
    shown = third.shown(0)
    for lie in (
        ShownHead(shown.note, 0, shown.proof),
        ShownHead(shown.note, 0, shown.proof, shown.restored, shown.restored_at + 1, shown.restored_proof),
        ShownHead(shown.note, 0, shown.proof, b"x", shown.restored_at, shown.restored_proof),
        ShownHead(shown.note, 0, shown.proof, shown.restored, shown.restored_at, [b"x" * 32]),
    ):
        with pytest.raises(SiteTurnedBackError):
            heads.take("site-a", PUBLIC, lie)
    take(heads, third)
    assert heads.behind(KEYS) == ()


def test_a_head_that_is_not_this_sites_own_is_refused_and_holds_nobody_up(heads: SiteHeads, tmp_path: Path) -> None:
    take(heads, Own(tmp_path / "a" / "own.db").grow(3))
    for other in (
        Own(tmp_path / "b" / "own.db", Ed25519PrivateKey.generate()).grow(5),
        Own(tmp_path / "c" / "own.db", KEY, "lazaret/site-b").grow(5),
    ):
        with pytest.raises(SiteTurnedBackError):
            take(heads, other)
    assert heads.refused("site-a", PUBLIC) == ""


def test_what_cannot_be_read_refuses_the_site_and_another_key_begins_anew(heads: SiteHeads, tmp_path: Path) -> None:
    take(heads, Own(tmp_path / "a" / "own.db").grow(3))
    file = tmp_path / "site-heads" / "site-a.json"
    whole = file.read_text()
    for damaged in ("", "{", "[]", whole.replace("lazaret/site-a", "lazaret/site-b"), whole.replace("note", "nose")):
        file.write_text(damaged)
        again = SiteHeads(tmp_path / "site-heads")
        assert "cannot read site-heads/site-a.json" in again.refused("site-a", PUBLIC)
        with pytest.raises(SiteTurnedBackError, match="put that file back"):
            again.seen("site-a", PUBLIC)
    file.write_text(whole)
    other = Ed25519PrivateKey.generate()
    anew = other.public_key().public_bytes_raw()
    again = SiteHeads(tmp_path / "site-heads")
    assert (again.seen("site-a", anew), again.refused("site-a", anew)) == (0, "")
    again.take("site-a", anew, Own(tmp_path / "b" / "own.db", other).grow(1).shown(0))
    assert again.seen("site-a", anew) == 1
