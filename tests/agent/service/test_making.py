"""Releases, searches and evaluations beside the service that holds the ledger: as alone, and no second writer."""

from __future__ import annotations

import errno
import re
import time
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from agent.errors import CoordinatorUnreachableError, ReviewRejectedError, SiteStorageError
from agent.mechanisms.ksame.mechanism import KSame
from agent.release import approval, budget, recovery
from agent.release.unsent import NotSentError
from agent.service.making import begin_making, open_making
from agent.service.making_lock import MakingBusyError
from agent.storage import projects
from policies.ledger.store import LedgerBusyError, LedgerStoppedError
from policies.statements import Reservation, encode
from protos.common.errors import InvariantError, LazaretError
from protos.service.control_client import ServiceRefusedError, connect
from protos.web import server
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Federation, Site
from tests.support.release_site import entries, filled, held, kept, killed, ksame_words, site
from tests.support.site_serving import receiving, serving
from tests.support.small_mechanisms import KSAME

__all__ = ["site", "typed"]  # fixtures


def quiet(_step: str, _detail: str) -> None:
    """Nobody reads along."""


def test_a_release_says_the_same_and_leaves_the_same_beside_a_service_and_without_one(
    typed: Typed, tmp_path: Path
) -> None:
    """Dry run, release, a second one that the budget refuses, and one of too many patients."""
    found = {}
    for way in ("here", "there"):
        (tmp_path / way).mkdir()
        with Federation(tmp_path / way) as federation:
            site = filled(federation.join("site-a"), tmp_path / way)
            with serving(site) if way == "there" else nullcontext():
                said = [
                    typed(*at(site), *ksame_words(tmp_path / way, *more))
                    for more in (["--dry-run"], ["--dry-run", "--json"], [], [], ["--anew"], ["--k", 900], ["--json"])
                ]
            told = [(one.status, re.sub(r"[0-9a-f]{16,}|\d+ are free|\"free\": \d+", "X", one.out)) for one in said]
            found[way] = (told, [one.err for one in said], entries(site), held(site), kept(site))
    for here, there in zip(*found.values(), strict=True):
        assert here == there
    assert [status for status, _ in found["here"][0]] == [0, 0, 0, 1, 1, 1, 1]
    assert found["here"][2].count("Admitted") == 1


@pytest.mark.parametrize("moment", ["reserved", "making", "keeping"])
def test_a_making_that_is_killed_beside_the_service_goes_on_under_its_grant(
    typed: Typed, site: Site, tmp_path: Path, moment: str
) -> None:
    with serving(site):
        killed(site, tmp_path, moment)
        assert held(site) == (1, 0)
        said = typed(*at(site), *ksame_words(tmp_path, "--json"))
        assert (said.status, said.line["admitted"]) == (0, True), said.err
    assert (held(site), kept(site), entries(site).count("Reserved")) == ((0, 1), [], 1)


@pytest.mark.parametrize("moment", ["reserved", "making", "keeping"])
def test_a_service_that_is_started_again_spends_no_grant_of_what_was_killed(
    typed: Typed, site: Site, tmp_path: Path, moment: str
) -> None:
    with serving(site):
        killed(site, tmp_path, moment)
    with serving(site):  # which finds out how the interrupted ended
        assert held(site) == (1, 0)
        assert typed(*at(site), *ksame_words(tmp_path)).status == 0
    assert (held(site), kept(site), entries(site).count("Reserved")) == ((0, 1), [], 1)


def test_one_making_at_a_time_and_looking_is_free(typed: Typed, site: Site, tmp_path: Path) -> None:
    with serving(site), open_making(site.home.root, quiet) as opened:
        begin_making(opened, anew=False)
        with pytest.raises(MakingBusyError), open_making(site.home.root, quiet):
            pass
        said = typed(*at(site), *ksame_words(tmp_path))
        assert (said.status, "another release, search or evaluation is at work" in said.err) == (1, True)
        assert typed(*at(site), "ledger", "show").status == 0
    assert held(site) == (0, 0)


def test_what_a_making_needs_of_the_ledger_it_can_only_ask_for(site: Site) -> None:
    """P9: it has no second writer."""
    with serving(site), open_making(site.home.root, quiet) as opened:
        asked = Reservation("grant-1", "site-a", "", "ksame", KSAME.claim(), KSAME.components(), "OT")
        with pytest.raises(LedgerStoppedError):
            opened.site.ledger.reserve("reserve-grant-1", asked, opened.site.seal(asked))
        with pytest.raises(InvariantError):
            opened.site.gateway.settle("key", b"")
    assert held(site) == (0, 0)
    assert "Reserved" not in entries(site)


def test_the_service_reserves_only_what_was_noted_and_what_is_of_this_site(site: Site) -> None:
    """A grant whose name is noted nowhere would be held for nobody after a kill."""
    claim, parts = KSAME.claim(), KSAME.components()
    with serving(site), open_making(site.home.root, quiet):
        service = connect(site.home.root)
        assert service is not None
        with service:
            for said in (
                Reservation("grant-1", "site-a", "", "ksame", claim, parts, "OT"),
                Reservation("grant-1", "site-b", "", "ksame", claim, parts, "OT"),
                Reservation("grant-1", "site-a", "run-1", "ksame", claim, parts, "OT"),
            ):
                with pytest.raises(ServiceRefusedError, match=r"noted in the vault|of this site"):
                    service.ask("/makings/reserve", {"statement": encode(said).decode()})
            for text in ("", "{}", "no JSON"):
                with pytest.raises(LazaretError):
                    service.ask("/makings/reserve", {"statement": text})
            service.ask("/makings/expire", {"grant": "grant-none", "reason": "failed"})
    assert held(site) == (0, 0)


def test_a_refused_price_leaves_nothing_behind(
    typed: Typed, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(site: object, reservation: Reservation) -> None:
        raise ReviewRejectedError("coordinator", budget.Verdict((budget.Finding("budget", "none is left"),)))

    with serving(site):
        with monkeypatch.context() as patch:
            patch.setattr(budget, "reserve", refused)
            said = typed(*at(site), *ksame_words(tmp_path))
            assert (said.status, "none is left" in said.out) == (1, True), said.err
        assert typed(*at(site), *ksame_words(tmp_path)).status == 0
    assert (held(site), entries(site).count("Reserved")) == ((0, 1), 1)


def test_what_fails_beside_the_service_is_spent_there(
    typed: Typed, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    with serving(site):
        with monkeypatch.context() as patch:
            patch.setattr(KSame, "run", fails)
            assert typed(*at(site), *ksame_words(tmp_path)).status == 70
        assert held(site) == (0, 1)
    assert entries(site).count("Expired") == 1


def test_the_service_may_be_silent_for_hours_or_be_started_again_between_two_acts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_IDLE_S", 1)
    with serving(site), open_making(site.home.root, quiet) as opened:
        begin_making(opened, anew=False)
        time.sleep(2.5)
        assert opened.site.owner is not None
        opened.site.owner.expire("grant-none", "failed")


@pytest.mark.parametrize(
    "fault",
    [
        CoordinatorUnreachableError("it is away"),
        LedgerBusyError("it is away"),
        SiteStorageError("it is away"),
        OSError(errno.ENOSPC, "it is away"),
    ],
)
def test_what_stands_in_the_services_way_is_no_refusal(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """Of the coordinator, the ledger or the disk: later it may go on, so nothing that is made counts as refused."""

    def fails(*_: object) -> None:
        raise fault

    with serving(site), open_making(site.home.root, quiet) as opened:
        for place, name in ((recovery, "tidy"), (approval, "submit_approved")):
            monkeypatch.setattr(place, name, fails)
        owner = opened.site.owner
        assert owner is not None
        with pytest.raises(CoordinatorUnreachableError, match="it is away"):
            owner.begin()
        with pytest.raises(NotSentError, match=r"it is away.*`release send r-1` sends the same again"):
            owner.submit("r-1")


def test_who_opts_out_while_a_price_is_asked_for_is_deleted_all_the_same(site: Site) -> None:
    """No person is noted yet: the note of the grant has none."""
    with closing(projects.open_vault(site.home)) as vault:
        vault.write_note("unfinished", {"grant": "grant-1"})
        vault.write_project_note("unfinished", {"grant": "grant-1", "form": "0" * 64})
        projects._give_up(vault, {"0" * 32})
        assert vault.note("unfinished") == {"grant": "grant-1"}


def test_beside_a_service_that_only_receives_the_first_release_begins_the_ledger(
    typed: Typed, tmp_path: Path
) -> None:
    with Federation(tmp_path) as federation:
        site = filled(federation.join("site-a"), tmp_path, founded=False)
        with receiving(site):
            assert typed(*at(site), *ksame_words(tmp_path, "--dry-run")).status == 0
            said = typed(*at(site), *ksame_words(tmp_path))
            assert (said.status, "admitted at level B" in said.out) == (0, True), said.err
        assert (held(site), entries(site).count("Admitted")) == ((0, 1), 1)
