"""A made set that is kept: ids found alike later, a kill between two writes, bytes that changed, a patient's no."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import ReviewRejectedError, SiteStorageError
from agent.mechanisms.registry import KSame
from agent.release import history
from agent.release.approval import submit_approved, waiting, withdraw
from agent.release.history import patients_of
from agent.release.pipeline import release_synthetic
from agent.release.ports import ApprovalPending
from agent.release.recovery import recover
from agent.release.resumable import ReleaseInProgressError, abandon
from agent.release.unsent import forget, listed
from agent.storage import projects
from agent.storage.encrypted_sqlite import EncryptedCheckpointStore
from agent.storage.site_database import SiteDatabase
from agent.storage.vault import Vault
from policies.governance import decisions
from policies.statements import Release
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Site as Hospital
from tests.support.ledger_world import Person
from tests.support.release_site import blobs, held, kept, killed, site
from tests.support.site_world import RNG, MemoryCheckpointStore, SiteWorld, approve, ksame, site_world
from tests.support.vault_records import key_of, picture_record

__all__ = ["site", "typed"]  # fixtures
HELD, SPENT = ((1, 0), (1, 0)), ((0, 1), (0, 1))


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    opened = Vault(SiteDatabase(tmp_path / "vault.db", bytes(32)), tmp_path / "main.db", bytes(range(32)))
    yield opened
    opened.close()


def five(tmp_path: Path, vault: Vault, **changes: object) -> SiteWorld:
    """A site of five patients, over a real vault."""
    s = site_world(tmp_path, max_releases_per_patient=9, **changes)
    vault.keep_all([picture_record(n, n) for n in range(5)])
    s.site = replace(s.site, vault=vault)
    return s


def found_alike(vault: Vault, one: int = 0, other: int = 1) -> None:
    """A sender sends a picture of one patient under another's id, too."""
    vault.keep_all([picture_record(one, 100 + one), picture_record(other, 200 + other, picture=100 + one)])


def told_apart(vault: Vault) -> None:
    for one in vault.alike():
        vault.tell_apart(one.name)


def made(s: SiteWorld) -> Release:
    with pytest.raises(ApprovalPending) as caught:
        release_synthetic(s.site, ksame(), "OT", RNG)
    return caught.value.signed.release


def officer(s: SiteWorld) -> Person:
    person = Person("dpo-1", "compliance")
    decisions.appoint(s.site.ledger.store, person.name, person.role, person.public)
    return person


# -- ids found alike


def test_a_kept_set_stays_when_a_cluster_has_fewer_than_k_patients_by_now(tmp_path: Path, vault: Vault) -> None:
    s = five(tmp_path, vault, approvals='["compliance"]')
    person = officer(s)
    release = made(s)
    approve(s, person, release)
    found_alike(vault)
    for _ in range(2):
        with pytest.raises(ReviewRejectedError, match=r"withdraw it, or .*cohort --apart"):
            submit_approved(s.site, release.release)
    assert (list(listed(vault)), s.spent("k")) == ([release.release], HELD)
    assert s.intake.register.store.state.releases == {}
    told_apart(vault)
    assert submit_approved(s.site, release.release)[1].admitted


def test_without_the_rule_a_set_of_four_patients_would_leave_as_k_of_five(
    tmp_path: Path, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule broken on purpose."""
    s = five(tmp_path, vault, approvals='["compliance"]')
    person = officer(s)
    release = made(s)
    approve(s, person, release)
    found_alike(vault)
    monkeypatch.setattr(history, "_patients", lambda members, _alike: len(set(members)))
    assert submit_approved(s.site, release.release)[1].admitted


def test_a_kept_set_that_shows_a_cluster_again_stays_when_that_one_fell_below_k(tmp_path: Path, vault: Vault) -> None:
    s = five(tmp_path, vault)
    first, _ = release_synthetic(s.site, ksame(), "OT", RNG)
    vault.keep_all([picture_record(n, n) for n in range(10, 15)])
    submit = s.gateway.submit

    def silent(*_: object) -> Any:
        s.gateway.shut = True
        return submit(*_)

    s.gateway.submit = silent
    with pytest.raises(Exception, match="no answer"):
        release_synthetic(s.site, ksame(), "OT", RNG)
    (name,) = listed(vault)
    assert patients_of(s.site, name) == {key_of(n, 3) for n in (*range(5), *range(10, 15))}, "shown again"
    s.gateway.shut = False
    del s.gateway.submit
    found_alike(vault)
    with pytest.raises(ReviewRejectedError, match="alike"):
        submit_approved(s.site, name)
    assert (list(listed(vault)), s.spent("k")) == ([name], ((1, 1), (1, 1))), "though it had set out"
    told_apart(vault)
    assert submit_approved(s.site, name)[1].admitted
    assert first.release.release in s.intake.register.store.state.releases


def test_ids_found_alike_while_a_set_is_made_keep_it_here(
    tmp_path: Path, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = five(tmp_path, vault)
    run = KSame.run

    def long(self: KSame, *told: Any) -> Any:
        found_alike(vault)
        return run(self, *told)

    monkeypatch.setattr(KSame, "run", long)
    with pytest.raises(ReviewRejectedError, match="cohort --apart"):
        release_synthetic(s.site, ksame(), "OT", RNG)
    (name,) = listed(vault)
    assert (s.spent("k"), s.intake.register.store.state.releases) == (HELD, {})
    told_apart(vault)
    assert submit_approved(s.site, name)[1].admitted
    assert s.spent("k") == SPENT


# -- between a kill and the going on


def full(*_: object) -> Any:
    raise OSError(28, "No space left on device")


def interrupted(tmp_path: Path, vault: Vault, monkeypatch: pytest.MonkeyPatch) -> SiteWorld:
    s = five(tmp_path, vault)
    with monkeypatch.context() as patch:
        patch.setattr(KSame, "run", full)
        with pytest.raises(OSError, match="No space"):
            release_synthetic(s.site, ksame(), "OT", RNG)
    return s


def test_ids_found_alike_since_a_making_was_interrupted_spend_nothing_until_a_person_decides(
    tmp_path: Path, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = interrupted(tmp_path, vault, monkeypatch)
    found_alike(vault)
    vault.keep_all([picture_record(n, n) for n in range(10, 20)])  # enough, but none of them is in it
    for _ in range(2):
        with pytest.raises(ReleaseInProgressError, match="cohort --apart"):
            release_synthetic(s.site, ksame(), "OT", RNG)
        assert s.spent("k") == HELD
    told_apart(vault)
    signed, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert (verdict.admitted, s.spent("k")) == (True, SPENT)
    assert patients_of(s.site, signed.release.release) == {key_of(n, 3) for n in range(5)}


def test_what_cannot_go_on_is_given_up_when_that_is_said(
    tmp_path: Path, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = interrupted(tmp_path, vault, monkeypatch)
    found_alike(vault)
    with pytest.raises(ReleaseInProgressError, match="--anew"):
        release_synthetic(s.site, ksame(), "OT", RNG)
    abandon(s.site)
    assert s.spent("k") == SPENT


def test_a_newcomer_stands_for_nobody_in_a_making_that_goes_on(
    tmp_path: Path, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path, max_releases_per_patient=9)
    vault.keep_all([picture_record(n, n) for n in range(10, 15)])
    s.site = replace(s.site, vault=vault)
    with monkeypatch.context() as patch:
        patch.setattr(KSame, "run", full)
        with pytest.raises(OSError, match="No space"):
            release_synthetic(s.site, ksame(), "OT", RNG)
    vault.keep(picture_record(1, 99, picture=10))  # an id that sorts before those who take part
    signed, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert (verdict.admitted, s.spent("k")) == (True, SPENT)
    assert patients_of(s.site, signed.release.release) == {key_of(n, 3) for n in range(10, 15)}


# -- a kill between two writes


def of_sets(s: SiteWorld) -> list[str]:
    return sorted(name for name in s.vault.blobs if name.startswith("site/kept/"))


def died_keeping(tmp_path: Path) -> SiteWorld:
    s = site_world(tmp_path)
    s.vault.crash_at = "pending"
    with pytest.raises(KeyboardInterrupt):
        release_synthetic(s.site, ksame(), "OT", RNG)
    s.vault.crash_at = ""
    assert (len(of_sets(s)), listed(s.vault)) == (1, {})
    return s


def test_bytes_that_were_kept_and_not_listed_when_it_was_killed_are_written_anew_or_cleared(tmp_path: Path) -> None:
    s = died_keeping(tmp_path)
    # a BaseException is no kill: it ends nothing, and the making goes on
    assert recover(s.site) == []
    assert (len(of_sets(s)), s.spent("k")) == (1, HELD), "it is of the making that goes on"
    assert release_synthetic(s.site, ksame(), "OT", RNG)[1].admitted
    assert (of_sets(s), s.spent("k")) == ([], SPENT)


def test_bytes_of_a_making_that_is_given_up_are_cleared(tmp_path: Path) -> None:
    s = died_keeping(tmp_path)
    abandon(s.site)
    assert (of_sets(s), s.spent("k")) == ([], SPENT)


def test_a_kill_while_a_set_is_forgotten_leaves_nothing_that_the_next_start_does_not_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cleared, place in enumerate(("first", "second")):
        (tmp_path / place).mkdir()
        s = site_world(tmp_path / place, approvals='["compliance"]')
        release = made(s)
        s.vault.site_place(f"kept/{release.release}/clear").write(b"as before it was sealed to a reader")
        clear, times = MemoryCheckpointStore.clear, list[int]()

        def die(
            self: MemoryCheckpointStore,
            clear: Callable[[MemoryCheckpointStore], None] = clear,
            cleared: int = cleared,
        ) -> None:
            times.append(1)  # noqa: B023 - of this turn
            if len(times) > cleared:  # noqa: B023
                raise KeyboardInterrupt
            clear(self)

        with monkeypatch.context() as patch:
            patch.setattr(MemoryCheckpointStore, "clear", die)
            with pytest.raises(KeyboardInterrupt):
                forget(s.site.vault, release.release)
        assert (listed(s.vault), len(of_sets(s))) == ({}, 2 - cleared)
        recover(s.site)
        assert of_sets(s) == []


# -- bytes that are gone, or other ones


@pytest.mark.parametrize("sent", [False, True])
def test_kept_bytes_that_are_missing_or_other_ones_spend_nothing_and_are_not_handed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    s = site_world(tmp_path, approvals="[]" if sent else '["compliance"]')
    if sent:
        s.gateway.submit = full
        with pytest.raises(OSError, match="No space"):
            release_synthetic(s.site, ksame(), "OT", RNG)
        (name,) = listed(s.vault)
        del s.gateway.submit
    else:
        person = officer(s)
        release = made(s)
        approve(s, person, release)
        name = release.release
    shelf = s.vault.site_place(f"kept/{name}/artifact")
    right = shelf.read()
    assert right is not None
    shelf.clear()
    with pytest.raises(SiteStorageError, match="missing"):
        submit_approved(s.site, name)
    with pytest.raises(SiteStorageError, match="missing"):
        waiting(s.site.vault, name)
    shelf.write(right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(ReviewRejectedError, match="not those that the statement names"):
        submit_approved(s.site, name)
    assert (list(listed(s.vault)), s.spent("k")) == ([name], HELD)
    shelf.write(right)
    assert submit_approved(s.site, name)[1].admitted


def test_a_missing_set_is_a_sentence_and_can_be_withdrawn(typed: Typed, site: Hospital, tmp_path: Path) -> None:
    killed(site, tmp_path, "before-sent")
    (name,) = kept(site)
    with closing(projects.open_vault(site.home, "main")) as vault:
        EncryptedCheckpointStore(vault._notes, f"site/kept/{name}/artifact").clear()
    said = typed(*at(site), "release", "send", name)
    assert (said.status, "missing from the vault" in said.err, held(site), kept(site)) == (
        1,
        True,
        (1, 0),
        [name],
    )
    assert typed(*at(site), "release", "withdraw", name).status == 0
    assert (held(site), kept(site)) == ((0, 1), [])


# -- a patient's no


def test_a_kept_set_goes_at_the_next_start_once_a_patient_in_it_has_opted_out(tmp_path: Path) -> None:
    s = site_world(tmp_path, approvals='["compliance"]')
    release = made(s)
    inside = sorted(patients_of(s.site, release.release))
    s.vault.out = frozenset({"somebody else"})
    assert recover(s.site) == []
    assert (list(listed(s.vault)), len(of_sets(s))) == ([release.release], 1)
    s.vault.out = frozenset({inside[0]})
    assert recover(s.site) == [release.grant]
    assert (listed(s.vault), of_sets(s), s.spent("k")) == ({}, [], SPENT)
    with pytest.raises(ReviewRejectedError, match="no release of that name"):
        withdraw(s.site, release.release)
    assert recover(s.site) == []


def test_whoever_opts_out_hears_what_lies_where_until_when(typed: Typed, site: Hospital, tmp_path: Path) -> None:
    killed(site, tmp_path, "before-sent")
    (name,) = kept(site)
    with closing(projects.open_vault(site.home, "main")) as vault:
        persons = set(vault.note("releases")[0]["clusters"][0][:1])
    projects.opt_out(site.home, next(iter(persons)))
    assert (projects.kept_of(site.home, persons), projects.kept_of(site.home, {"0" * 32})) == (1, 0)
    assert blobs(site) > 0
    said = typed(*at(site), "release", "send", name)
    assert said.status == 1
    assert "opted out" in said.out
    assert (held(site), kept(site), blobs(site)) == ((0, 1), [], 0)
    assert projects.kept_of(site.home, persons) == 0
