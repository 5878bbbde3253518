"""The coordinator keeps each site's head, and refuses a site whose own ledger went back without a restore."""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.desk import Desk, greet, open_desk
from agent.edges.backup import backup, private_of
from agent.edges.recover import recover
from agent.edges.restore import restore
from agent.nouns import Unreachable
from coordinator.edges import doctor
from coordinator.edges.site_heads import ShownHead, SiteHeads, SiteTurnedBackError
from policies.claims import SubsampledGaussian
from policies.entries import Refused
from policies.sqlite import export_file, open_sqlite
from policies.statement import Receipts
from policies.store import Draft, Store
from protos.keybox import files_of
from protos.v1 import gateway_pb2 as pb
from tests.support.federation import Federation, Site, pictures
from tests.support.turned_back import marked_as_it_is

SMALL = SubsampledGaussian(0.01, 8.0, 1)
NONCE = "ab" * 16


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path / "fed") as made:
        yield made


@pytest.fixture
def site(fed: Federation) -> Site:
    made = fed.join("site-a")
    toml = made.home.root / "site.toml"
    toml.write_text(toml.read_text().replace('127.0.0.1:1"', f'127.0.0.1:{fed.port}"'))
    assert f":{fed.port}" in toml.read_text()
    return made


def desk(site: Site) -> contextlib.AbstractContextManager[Desk]:
    return open_desk(site.home.root, lambda *_: None)


def public(site: Site) -> bytes:
    return site.home.sign_key().public_key().public_bytes_raw()


def spend(opened: Desk, site: Site, name: str) -> None:
    said = site.hospital.reservation(name, SMALL, "federated", f"run-{name}")
    sealed = opened.site.seal(said)
    assert opened.site.books.reserve(f"reserve-{name}", said, sealed).admitted
    assert opened.site.door.reserve(f"reserve-{name}", sealed).admitted


def whole_machine(site: Site, to: Path) -> Path:
    return Path(shutil.copytree(site.home.root, to))


def turned_back(site: Site, copy: Path) -> None:
    shutil.rmtree(site.home.root)
    shutil.copytree(copy, site.home.root)


def wrong(fed: Federation) -> str:
    found = {f.name: f.said for f in doctor.findings(fed.home, dt.datetime.now(dt.UTC)) if f.state == "fail"}
    return found.get(doctor._GO_ON, "")


def test_a_site_that_goes_on_is_taken_from_command_to_command(fed: Federation, site: Site) -> None:
    for name in ("g1", "g2"):
        with desk(site) as opened:
            greet(opened)
            spend(opened, site, name)
            greet(opened)
            size = opened.site.books.store.state.size
        assert fed.service.at.site_heads.seen("site-a", public(site)) == size
    assert wrong(fed) == ""


def test_a_machine_that_is_turned_back_whole_is_refused_until_its_own_restore(
    fed: Federation, site: Site, tmp_path: Path
) -> None:
    with desk(site) as opened:
        greet(opened)
    backup(site.home, tmp_path / "backup")
    keys = private_of(files_of(site.home.keys))
    copy = whole_machine(site, tmp_path / "copy")
    with desk(site) as opened:
        greet(opened)
        spend(opened, site, "late")
        greet(opened)
    turned_back(site, copy)
    with desk(site) as opened:  # it finds nothing wrong with itself
        with pytest.raises(Unreachable, match=r"turned back.*`lazaret-agent restore`"):
            greet(opened)
        said = opened.site.seal(site.hospital.reservation("again", SMALL, "federated", "run-again"))
        for act in (
            lambda: opened.door.reserve("reserve-again", said),
            lambda: opened.door.present("recover-x", opened.site.seal(Receipts("site-a", "x", "y", 0))),
            lambda: opened.door.submit("submit-x", said, pictures()),
        ):
            with pytest.raises(Unreachable, match="turned back"):
                act()
        with pytest.raises(grpc.RpcError) as told:  # nor any part in a run
            list(opened.door._stub.Fleet(iter([pb.FleetPart(path="/x")]), timeout=60))
        assert told.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "site-a" in wrong(fed)
    assert ["turned_back"] in fed.findings()
    exported = export_file(fed.home.ledger, "lazaret/coordinator", fed.home.ledger_key())
    shutil.rmtree(site.home.root)
    restore(site.home.root, tmp_path / "backup", keys, NONCE)
    assert recover(site.home, exported).lost == 1
    for name in ("tls.pem",):  # made anew every day; the backup has none
        shutil.copy(copy / "keys" / name, site.home.keys / name)
    with desk(site) as opened:
        greet(opened)
        spend(opened, site, "after")
    assert wrong(fed) == ""
    once_more = whole_machine(site, tmp_path / "restored")
    with desk(site) as opened:
        greet(opened)
        spend(opened, site, "later")
        greet(opened)
    turned_back(site, once_more)  # the restore that it shows is not a new one
    with desk(site) as opened, pytest.raises(Unreachable, match="turned back"):
        greet(opened)


def test_the_refusal_outlives_a_restart_of_the_coordinator(fed: Federation, site: Site, tmp_path: Path) -> None:
    copy = whole_machine(site, tmp_path / "copy")
    with desk(site) as opened:
        greet(opened)
        spend(opened, site, "g")
        greet(opened)
    turned_back(site, copy)
    with desk(site) as opened, pytest.raises(Unreachable):
        greet(opened)
    fed.__exit__(None, None, None)
    with fed, pytest.raises(Unreachable, match="turned back"):
        site.reserved("k")


def test_with_a_release_the_site_shows_the_head_that_holds_it(fed: Federation, site: Site, tmp_path: Path) -> None:
    """So that who turns the machine back to before its last release is found, however short the command was."""
    copy = whole_machine(site, tmp_path / "copy")
    with desk(site) as opened:
        greet(opened)
        reservation = site.hospital.reservation("k")
        sealed = opened.site.seal(reservation)
        assert opened.site.books.reserve("reserve-k", reservation, sealed).admitted
        assert opened.door.reserve("reserve-k", sealed).admitted
        artifact = pictures()
        release = site.release("k", artifact)
        envelope = opened.site.seal(release)
        opened.site.books.send(release, envelope)
        sent = opened.site.books.store.state.size
        assert opened.door.submit(f"submit-{release.release}", envelope, artifact).admitted
    assert fed.service.at.site_heads.seen("site-a", public(site)) == sent
    turned_back(site, copy)
    with desk(site) as opened, pytest.raises(Unreachable, match="turned back"):
        greet(opened)


def test_an_older_agent_that_shows_no_head_is_taken_as_before(fed: Federation, site: Site) -> None:
    site.door().hello()
    site.reserved("k")
    assert fed.service.at.site_heads.behind() == ()


# -- what is kept, alone

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()


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
            self.store.append(f"{word}-{self.store.state.size}", Draft((entry,)))
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
    assert heads.behind() == ("site-a",)


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


def test_a_proof_from_another_head_than_the_one_kept_says_nothing(heads: SiteHeads, tmp_path: Path) -> None:
    own = Own(tmp_path / "a" / "own.db").grow(3)
    take(heads, own)
    late = own.grow(2).shown(2)
    heads.take("site-a", PUBLIC, late)
    assert (heads.seen("site-a", PUBLIC), heads.behind()) == (3, ())
    refused(heads, Own(tmp_path / "b" / "own.db").grow(5, "fork"))
    heads.take("site-a", PUBLIC, late)
    assert heads.behind() == ("site-a",), "and lets nobody out"


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
    assert heads.behind() == ()


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
