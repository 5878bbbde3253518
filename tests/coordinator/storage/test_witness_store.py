"""Nobody rewrites history unseen: real sites, and a real service whose ledger is forked, rolled back, restored."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256

from agent import runtime
from agent.errors import CoordinatorUnreachableError, LedgerForkError, SiteConfigError
from agent.gateway.client import GatewayClient
from agent.gateway.credentials import Credentials
from agent.gateway.witness import LedgerWitness
from agent.release.budget import return_unused_grant, settle_grant
from agent.release.ports import SiteContext as PipelineSite
from agent.release.recovery import present
from coordinator.admission import AdmissionService
from coordinator.storage.witness_store import Witnesses
from policies.accounting.claims import SubsampledGaussian
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.backends.sqlite import backup_file, export_file
from policies.ledger.entries import Refused, Reserved
from policies.ledger.export import ExportError
from policies.ledger.merkle import open_checkpoint
from policies.ledger.store import AppendRequest
from policies.ledger_service import digest
from policies.review.rules import Verdict
from policies.statements import Amendment, Receipts, encode
from protos.common.dsse import EnvelopeError
from protos.identity.certificates import leaf_of, number_of
from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import DP, Hospital, policy
from tests.support.rolled_back_ledgers import marked_as_it_is
from tests.support.site_without_vault import pipeline_site

SMALL = SubsampledGaussian(0.01, 8.0, 1)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path) as made:
        yield made


def backup(federation: Federation, to: Path) -> None:
    backup_file(federation.home.ledger, to)


def bring_back(federation: Federation, copy: Path) -> Federation:
    """Stop, put the copy in the ledger's place, and serve again: as if the whole machine were turned back.

    Its mark and the heads that sites cosigned are of then, too; else nothing would be served.
    """
    federation.__exit__(None, None, None)
    for path in federation.home.root.glob("ledger.db*"):
        path.unlink()
    shutil.copy(copy, federation.home.ledger)
    marked_as_it_is(federation.home.ledger)
    shutil.rmtree(federation.home.witnesses, ignore_errors=True)
    return federation


def notes(site: Site) -> set[str]:
    return {path.name for path in (site.home.root / "watch").iterdir()}


def grow(federation: Federation, text: str) -> None:
    federation.store.append(text, AppendRequest((Refused("x", "site-a", "", "call", [text], b""),)))


def test_every_contact_moves_the_head_that_is_kept_on_disk(federation: Federation) -> None:
    site = federation.join("site-a")
    site.reserved("g-1", SMALL, "federated", "run")
    first = LedgerWitness(site.home.root / "watch", federation.store.public).seen
    site.reserved("g-2", SMALL, "federated", "run-2")
    assert (
        LedgerWitness(site.home.root / "watch", federation.store.public).seen
        == first + 1
        == federation.store.state.size
    )


def test_a_forked_history_is_refused_for_good_and_both_signed_heads_are_kept(
    federation: Federation, tmp_path: Path
) -> None:
    site = federation.join("site-a")
    backup(federation, tmp_path / "copy.db")
    grow(federation, "one-way")
    site.gateway().hello()
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        grow(federation, "another-way")
        grow(federation, "further")
        for _ in range(2):  # a new process is as wary as the old one
            with pytest.raises(LedgerForkError, match="compliance"):
                site.gateway().hello()
        with pytest.raises(LedgerForkError):
            site.reserved("g", SMALL, "federated", "run")
    public = federation.store.public
    kept = [(site.home.root / "watch" / name).read_text() for name in notes(site) if name.startswith("fork-")]
    heads = [open_checkpoint(note, public) for note in kept]
    assert len(heads) == 2
    assert len({head.root for head in heads}) == 2, "two heads, both signed by the coordinator: the proof of the fork"


def test_a_rolled_back_ledger_is_refused_by_the_site_and_stops_when_it_is_shown_its_own_signature(
    federation: Federation, tmp_path: Path
) -> None:
    a, b = federation.join("site-a"), federation.join("site-b")
    backup(federation, tmp_path / "copy.db")
    a.reserved("g", SMALL, "federated", "run")
    bring_back(federation, tmp_path / "copy.db")
    with federation, pytest.raises(LedgerForkError):
        a.gateway().hello()
    a.home.root.joinpath("watch", "seen.json").write_text(
        a.home.root.joinpath("watch", "seen.json").read_text().replace('"frozen": true', '"frozen": false')
    )
    with federation:
        gateway = a.gateway()
        cosigned = gateway.watch.cosigned("site-a", a.home.sign_key(), 1_700_000_000)
        with pytest.raises(CoordinatorUnreachableError):
            gateway.hello(cosigned)
        assert federation.store.stopped
        with pytest.raises(CoordinatorUnreachableError):
            b.gateway().hello()


def reserve_in_both(site: PipelineSite, of: Site, grant: str, claim: SubsampledGaussian, run: str = "") -> bytes:
    """A part in a run as the product reserves it: here first, and then by the hub for all sites; a run of its own."""
    reservation = of.hospital.reservation(grant, claim, "federated", run or f"run-{grant}")
    envelope = of.seal(reservation)
    assert site.ledger.reserve(f"reserve-{grant}", reservation, envelope).admitted
    intake = of.federation.intake
    assert intake.reserve_run(reservation.run, {of.hospital.name: envelope}, 1)[of.hospital.name].admitted
    return envelope


def test_after_a_restore_sites_show_their_receipts_and_the_lost_spends_are_back(
    federation: Federation, tmp_path: Path
) -> None:
    a, b = federation.join("site-a"), federation.join("site-b")
    agent = pipeline_site(a, tmp_path)
    reserve_in_both(agent, a, "before", SMALL)
    backup(federation, tmp_path / "copy.db")
    reserve_in_both(agent, a, "after", DP)
    before = {name: (x.held, x.spent) for name, x in federation.store.state.accounts.items()}
    older = federation.store.checkpoint()
    agent.gateway.hello("")  # type: ignore[attr-defined]
    b.gateway().hello()
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        federation.store.restore("nonce-1")
        for site, lost in ((a, 1), (b, 0)):
            gateway = site.gateway()
            seen = gateway.watch.cosigned(site.hospital.name, site.home.sign_key(), 1)
            gateway.hello(seen)  # even who cosigns first, what the backup has lost, is no reason to stop
            assert not federation.store.stopped
            assert gateway.watch.must_present
            ledger = pipeline_site(site, tmp_path) if site is b else agent
            moved = PipelineSite(**{n: getattr(ledger, n) for n in PipelineSite.__slots__} | {"gateway": gateway})
            assert present(moved, "lazaret/coordinator", "nonce-1") == lost
            gateway.watch.presented()
            assert not LedgerWitness(site.home.root / "watch", federation.store.public).must_present
        account = federation.store.state.accounts["site-a/rdp"]
        assert sum(before["site-a/rdp"]) == account.held + account.spent
        a.reserved("fresh", SMALL, "federated", "run-9")
        raw = export_file(federation.home.ledger, "lazaret/coordinator", federation.home.ledger_key())
    assert {"epoch-1-last.note", "epoch-2-nonce-1-first.note"} <= notes(a)
    assert verify(raw).epoch == 2
    with pytest.raises(ExportError, match="epoch 2"):
        verify(raw, since=older)


def test_an_epoch_that_the_ledger_does_not_hold_is_no_excuse(federation: Federation, tmp_path: Path) -> None:
    """A coordinator that claims a restore must have written it down, where every auditor sees it."""
    from agent.gateway.witness import Epoch
    from policies.ledger.entries import Record, Restored
    from policies.ledger.entries import encode as encode_record

    site = federation.join("site-a")
    gateway = site.gateway()
    gateway.hello()
    shown = federation.store.prove(0)
    made_up = encode_record(Record(1, "restore-2", Restored(2, 1, bytes(32), "n")))
    for entry, at in ((made_up, 1), (b"junk", 1), (encode_record(Record(1, "k", Restored(2, 7, bytes(32), "n"))), 1)):
        with pytest.raises(LedgerForkError):
            gateway.watch.restored(shown.checkpoint, Epoch(2, entry, at, shown.proof), ())
    assert gateway.watch.memory.epoch == 1


def test_cosigned_heads_reach_the_auditor_and_bind_the_ledger(federation: Federation, tmp_path: Path) -> None:
    site = federation.join("site-a")
    site.reserved("g", SMALL, "federated", "run")
    gateway = site.gateway()
    gateway.hello(gateway.watch.cosigned("site-a", site.home.sign_key(), int(time.time())))
    kept = Witnesses(federation.home.witnesses).notes()
    raw = export_file(federation.home.ledger, "lazaret/coordinator", federation.home.ledger_key(), kept)
    assert verify(raw).witnesses == {"site-a": federation.store.state.size}
    stranger = kept[0].replace("site-a", "site-z")
    forged = export_file(federation.home.ledger, "lazaret/coordinator", federation.home.ledger_key(), (stranger,))
    with pytest.raises(ExportError, match="cosignature"):
        verify(forged)


def test_nobody_cosigns_for_another_site(federation: Federation) -> None:
    a, b = federation.join("site-a"), federation.join("site-b")
    gateway = a.gateway()
    gateway.hello()
    gateway.hello(gateway.watch.cosigned("site-b", b.home.sign_key(), 1))
    gateway.hello("nonsense")
    assert Witnesses(federation.home.witnesses).notes() == ()


def test_a_site_says_nothing_for_another_after_a_restore(federation: Federation) -> None:
    a, b = federation.join("site-a"), federation.join("site-b")
    federation.store.restore("nonce-1")
    word = a.seal(Receipts("site-b", "lazaret/coordinator", "nonce-1", 0))
    gateway = b.gateway()
    gateway.hello()
    assert {f.rule for f in gateway.present("p", word).findings} == {"bad_envelope"}
    own = a.gateway()
    own.hello()
    assert {f.rule for f in own.present("p", word).findings} == {"another_site"}
    assert federation.store.state.sites_awaited == {"site-a", "site-b"}
    assert encode(Receipts("site-b", "lazaret/coordinator", "nonce-1", 0))


def test_a_backup_is_a_ledger_of_one_commit_and_overwrites_nothing(federation: Federation, tmp_path: Path) -> None:
    site = federation.join("site-a")
    site.reserved("g", SMALL, "federated", "run")
    backup_file(federation.home.ledger, tmp_path / "copy.db")
    honest = export_file(federation.home.ledger, "lazaret/coordinator", federation.home.ledger_key())
    assert export_file(tmp_path / "copy.db", "lazaret/coordinator", federation.home.ledger_key()) == honest
    with pytest.raises(FileExistsError):
        backup_file(federation.home.ledger, tmp_path / "copy.db")
    with pytest.raises(FileNotFoundError):
        backup_file(tmp_path / "none.db", tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


@contextlib.contextmanager
def context(site: Site) -> Iterator[runtime.AgentRuntime]:
    """The agent's own desk, as its commands open it, turned to where the coordinator listens now."""
    path = site.home.root / "site.toml"
    path.write_text(
        re.sub(r'coordinator = ".*"', f'coordinator = "127.0.0.1:{site.federation.port}"', path.read_text())
    )
    with runtime.open_runtime(site.home.root, lambda *_: None) as opened:
        yield opened


def price_of_one(opened: runtime.AgentRuntime, site: Site, grant: str, claim: SubsampledGaussian) -> None:
    reserve_in_both(opened.site, site, grant, claim)


def test_the_agents_own_greeting_brings_a_restored_coordinator_back_to_work(
    federation: Federation, tmp_path: Path
) -> None:
    """As it happens: the agent has seen and cosigned what the backup has lost."""
    a, b = federation.join("site-a"), federation.join("site-b")
    with context(a) as opened:
        runtime.sync_with_coordinator(opened)
        backup(federation, tmp_path / "copy.db")
        price_of_one(opened, a, "after", DP)
        runtime.sync_with_coordinator(opened)
        spent = federation.store.state.accounts["site-a/rdp"].held
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        federation.store.restore("nonce-1")
        Witnesses(federation.home.witnesses).forget(2)
        for _ in range(2):  # a second start shows nothing twice
            with context(a) as opened:
                runtime.sync_with_coordinator(opened)
                assert not opened.watch.must_present
        assert federation.store.state.accounts["site-a/rdp"].spent == spent
        assert federation.store.state.sites_awaited == {"site-b"}
        with context(b) as opened:  # enrolled before, never greeted: it is awaited all the same
            runtime.sync_with_coordinator(opened)
            price_of_one(opened, b, "fresh", SMALL)
        kept = Witnesses(federation.home.witnesses).notes()
        raw = export_file(federation.home.ledger, "lazaret/coordinator", federation.home.ledger_key(), kept)
    assert set(verify(raw).witnesses) == {"site-a", "site-b"}


def test_a_ledger_made_anew_with_a_restore_in_it_is_no_restored_one(federation: Federation, tmp_path: Path) -> None:
    """What the site saw before the backup must still be there."""
    a = federation.join("site-a")
    envelope = (a.home.root / "request.json").read_bytes()
    a.gateway().hello()
    federation.__exit__(None, None, None)
    for path in (*federation.home.root.glob("ledger.db*"), federation.home.root / "ledger.mark"):
        path.unlink()
    shutil.rmtree(federation.home.witnesses, ignore_errors=True)
    with federation:
        grow(federation, "another-past")
        for approval in federation.approvals("site-a", "again", hashlib.sha256(envelope).hexdigest()):
            decisions.approve(federation.store, approval)
        federation.intake.enrol(envelope, "again")
        leaf = leaf_of(Credentials(a.home.keys).chain())
        end = int(leaf.not_valid_after_utc.timestamp())
        federation.intake.register.issue("site-a", number_of(leaf), leaf.fingerprint(SHA256()), end)
        for i in range(5):
            grow(federation, f"more-{i}")
        federation.store.restore("nonce-1")
        for _ in range(2):
            with pytest.raises(LedgerForkError):
                a.gateway().hello()


def test_a_yes_that_is_in_no_ledger_is_no_answer(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    site = federation.join("site-a")
    monkeypatch.setattr(AdmissionService, "reserve", lambda *_: Verdict(()))
    with pytest.raises(LedgerForkError, match="cannot prove it"):
        site.reserved("g", SMALL, "federated", "run")
    monkeypatch.undo()
    site.reserved("g", SMALL, "federated", "run")
    real = AdmissionService.outcome
    monkeypatch.setattr(AdmissionService, "outcome", lambda self, peer, key: (real(self, peer, key)[0], 0))  # type: ignore[index]
    with pytest.raises(LedgerForkError, match="cannot prove it"):
        site.reserved("g", SMALL, "federated", "run")


@pytest.mark.parametrize("more", ["twice", "by nobody", "unsigned"])
def test_a_note_that_would_spoil_an_export_is_not_kept_and_stops_nobody(federation: Federation, more: str) -> None:
    site = federation.join("site-a")
    gateway = site.gateway()
    gateway.hello()
    note = gateway.watch.cosigned("site-a", site.home.sign_key(), 1)
    line = note.rstrip("\n").split("\n")[-1] + "\n"
    bad = {"twice": note + line, "by nobody": note + line.replace("site-a", "site-q"), "unsigned": note[: -len(line)]}
    gateway.hello(bad[more])
    assert Witnesses(federation.home.witnesses).notes() == ()
    assert not federation.store.stopped


def test_a_stranger_cannot_stop_the_coordinator_with_an_old_note(federation: Federation, tmp_path: Path) -> None:
    site, stranger = federation.join("site-a"), federation.join("site-x", approve=False)
    backup(federation, tmp_path / "copy.db")
    site.reserved("g", SMALL, "federated", "run")
    gateway = site.gateway()
    gateway.hello()
    note = gateway.watch.cosigned("site-a", site.home.sign_key(), 1)
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        with pytest.raises(CoordinatorUnreachableError, match="never issued"):
            stranger.gateway().hello(note)
        assert not federation.intake.witness("site-x", note)
        assert not federation.store.stopped


def test_a_look_beside_the_serving_agent_writes_nothing(federation: Federation) -> None:
    site = federation.join("site-a")
    site.gateway().hello()
    before = (site.home.root / "watch" / "seen.json").read_bytes()
    grow(federation, "x")
    look = LedgerWitness(site.home.root / "watch", federation.store.public, forgetful=True)
    GatewayClient(f"127.0.0.1:{federation.port}", Credentials(site.home.keys), look, 0.0).hello()
    assert (site.home.root / "watch" / "seen.json").read_bytes() == before


def test_a_forgotten_watch_is_noticed_by_the_vault(federation: Federation) -> None:
    site = federation.join("site-a")
    with context(site) as opened:
        runtime.sync_with_coordinator(opened)
    shutil.rmtree(site.home.root / "watch")
    with pytest.raises(SiteConfigError, match="watch/ is missing"), context(site):
        pass


def test_an_old_amendment_sent_again_changes_nothing(federation: Federation) -> None:
    site = federation.join("site-a")
    gateway, loose, tight = site.gateway(), Amendment("site-a", 1, policy()), Amendment("site-a", 2, policy(k_min=50))
    assert gateway.amend("am-1", site.seal(loose)).admitted
    assert gateway.amend("am-2", site.seal(tight)).admitted
    assert gateway.amend("am-1", site.seal(loose)).admitted, "the same answer as before"
    assert {f.rule for f in gateway.amend("am-3", site.seal(loose)).findings} == {"bad_statement"}
    asked = site.hospital.reservation("g")
    assert {f.rule for f in gateway.reserve("r", site.seal(asked)).findings} == {"min_k"}


def test_a_yes_that_the_ledger_holds_as_a_no_is_no_answer(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = federation.join("site-a")
    honest = AdmissionService.reserve
    monkeypatch.setattr(AdmissionService, "reserve", lambda *a: Verdict(()) if honest(*a).findings else honest(*a))
    with pytest.raises(LedgerForkError, match="cannot prove it"):
        site.reserved("g", SubsampledGaussian(0.5, 0.5, 500), "federated", "run")


def test_a_second_restore_finds_what_the_first_recovered(federation: Federation, tmp_path: Path) -> None:
    a = federation.join("site-a")
    with context(a) as opened:
        runtime.sync_with_coordinator(opened)
        backup(federation, tmp_path / "one.db")
        price_of_one(opened, a, "lost", SMALL)
    for turn in ("nonce-1", "nonce-2"):
        bring_back(federation, tmp_path / ("one.db" if turn == "nonce-1" else "two.db"))
        with federation:
            federation.store.restore(turn)
            with context(a) as opened:
                runtime.sync_with_coordinator(opened)
            assert federation.store.state.sites_awaited == set()
            assert federation.store.state.grants["lost"].state == "spent"
            if turn == "nonce-1":
                backup(federation, tmp_path / "two.db")
    with federation, context(a) as opened:
        price_of_one(opened, a, "fresh", SMALL)


def test_the_same_backup_twice_is_two_restores_to_everybody(federation: Federation, tmp_path: Path) -> None:
    a = federation.join("site-a")
    with context(a) as opened:
        runtime.sync_with_coordinator(opened)
    backup(federation, tmp_path / "copy.db")
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        federation.store.restore("nonce-1")
        with context(a) as opened:
            runtime.sync_with_coordinator(opened)
            price_of_one(opened, a, "g", SMALL)
            runtime.sync_with_coordinator(opened)
            old = opened.watch.cosigned("site-a", a.home.sign_key(), 1)
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        federation.store.restore("nonce-2")
        a.gateway().hello(old)  # of the other epoch 2: no reason to stop
        assert not federation.store.stopped
        with context(a) as opened:
            runtime.sync_with_coordinator(opened)
        assert federation.store.state.grants["g"].state == "spent"
        assert federation.store.state.sites_awaited == set()


def test_a_request_that_was_refused_before_the_restore_is_no_lost_grant(
    federation: Federation, tmp_path: Path
) -> None:
    """The site was killed before it heard the no, and holds the grant for spent."""
    a = federation.join("site-a")
    with context(a) as opened:
        runtime.sync_with_coordinator(opened)
        price_of_one(opened, a, "first", DP)
        asked = a.hospital.reservation("unheard", DP, "federated", "run")
        envelope = a.seal(asked)
        opened.site.ledger.store.append(
            "reserve-unheard",
            AppendRequest(
                (Reserved("unheard", "site-a", "run", "federated", "site-a/rdp", 1, b"{}", digest(envelope)),),
                (envelope,),
            ),
        )
        assert not opened.gateway.reserve("reserve-unheard", envelope).admitted
    backup(federation, tmp_path / "copy.db")
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        federation.store.restore("nonce-1")
        with context(a) as opened:
            runtime.sync_with_coordinator(opened)
        assert federation.store.state.sites_awaited == set()


def test_no_site_is_called_as_the_coordinator_is(federation: Federation) -> None:
    with pytest.raises(EnvelopeError, match="name is reserved"):
        federation.intake.read_enrolment(Hospital("coordinator").enrolment()[1])


def come_to(end: str, opened: runtime.AgentRuntime, of: Site, grant: str) -> None:
    """A grant of a run, and what has become of it in the site's own book."""
    claim = SubsampledGaussian(0.01, 8.0, 4)
    if end == "refused":  # the site was killed before it heard so
        reservation = of.hospital.reservation(grant, claim, "federated", f"run-{grant}")
        envelope = of.seal(reservation)
        assert opened.site.ledger.reserve(f"reserve-{grant}", reservation, envelope).admitted
        said = of.federation.intake.reserve_run(reservation.run, {of.hospital.name: envelope}, 2)
        assert not said[of.hospital.name].admitted
        return
    reserve_in_both(opened.site, of, grant, claim)
    held = opened.site.ledger.store.state.grants[grant].reserved
    assert isinstance(held, Reserved)
    if end == "finished":
        settle_grant(opened.site, grant, replace(claim, steps=2))
    elif end == "freed":
        return_unused_grant(opened.site, held)


@pytest.mark.parametrize("after", [False, True], ids=["before the backup", "after it"])
@pytest.mark.parametrize("end", ["held", "finished", "freed", "refused"])
def test_a_site_that_took_part_in_runs_gets_past_a_restore_whatever_became_of_its_part(
    federation: Federation, tmp_path: Path, end: str, after: bool
) -> None:
    a = federation.join("site-a")
    with context(a) as opened:
        runtime.sync_with_coordinator(opened)
        if not after:
            come_to(end, opened, a, "part")
        backup(federation, tmp_path / "copy.db")
        if after:
            come_to(end, opened, a, "part")
        here = opened.site.ledger.store.state.accounts["site-a/rdp"]
        before = here.held + here.spent
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        federation.store.restore("nonce-1")
        with context(a) as opened:
            runtime.sync_with_coordinator(opened)
            assert federation.store.state.sites_awaited == set()
            assert federation.store.state.recovered["site-a"] == int(after and end != "freed")
            hub = federation.store.state.accounts["site-a/rdp"]
            if end != "refused":
                assert hub.held + hub.spent >= before, "the coordinator's book is the stricter one, or the same"
            reserve_in_both(opened.site, a, "fresh", SMALL)


def test_a_grant_that_the_backup_holds_is_answered_as_known_and_counts_as_not_lost(
    federation: Federation, tmp_path: Path
) -> None:
    """Reserved under a key that the site does not ask for: the receipt itself is answered."""
    a = federation.join("site-a")
    agent = pipeline_site(a, tmp_path)
    reservation = a.hospital.reservation("odd", SMALL, "federated", "run-1")
    envelope = a.seal(reservation)
    assert agent.ledger.reserve("reserve-odd", reservation, envelope).admitted
    assert agent.gateway.reserve("another-key", envelope).admitted
    backup(federation, tmp_path / "copy.db")
    bring_back(federation, tmp_path / "copy.db")
    with federation:
        federation.store.restore("nonce-1")
        gateway = a.gateway()
        gateway.hello()
        size = federation.store.state.size
        assert [f.rule for f in gateway.present("recover-odd", envelope).findings] == ["known"]
        assert federation.store.state.size == size
        assert present(replace(agent, gateway=gateway), "lazaret/coordinator", "nonce-1") == 0
        assert federation.store.state.sites_awaited == set()
