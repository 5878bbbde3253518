"""A site's own ledger is the hard gate, so it is opened only if it is the very one that the vault knows."""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli import doctor as doctor_command
from agent.cli.main import main
from agent.errors import SiteConfigError
from agent.runtime import AgentRuntime, open_runtime
from agent.service.ledger_access import BorrowedLedger
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory, origin
from policies.accounting.claims import SubsampledGaussian
from policies.governance import decisions
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import LedgerTurnedBackError, Store
from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import Person

SMALL = SubsampledGaussian(0.01, 8.0, 1)
FILES = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.mark")
COMPLIANCE, LOCAL = Person("dpo-1", "compliance"), Person("head-1", "hospital")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Federation(tmp_path / "fed") as fed:
        made = fed.join("site-a")
        with runtime(made) as opened:
            spend(opened, made, "early")
        yield made


def runtime(site: Site) -> contextlib.AbstractContextManager[AgentRuntime]:
    return open_runtime(site.home.root, lambda *_: None)


def spend(opened: AgentRuntime, site: Site, name: str) -> None:
    said = site.hospital.reservation(name, SMALL, "federated", f"run-{name}")
    assert opened.site.ledger.reserve(f"reserve-{name}", said, opened.site.seal(said)).admitted


def typed(home: SiteDirectory, entries: int) -> int:
    """Entries that an operator types without the vault, into whatever lies in the ledger's place."""
    with Store(open_sqlite(home.root / "ledger.db"), origin("site-a"), home.sign_key(), lambda: 0) as store:
        if not store.state.persons:
            for person in (COMPLIANCE, LOCAL):
                decisions.appoint(store, person.name, person.role, person.public)
        for n in range(entries):
            word = COMPLIANCE.approval(f"pad-{n}", "limit", "site-a/rdp", "1.0", store.origin)
            decisions.approve(store, word)
        return store.state.size


def notes(home: SiteDirectory) -> contextlib.closing[SiteDatabase]:
    return contextlib.closing(SiteDatabase(home.root / "vault.db", home.secret("vault")))


def test_a_ledger_that_was_deleted_and_typed_full_again_opens_no_desk_however_long_it_is(site: Site) -> None:
    with runtime(site) as opened:
        size = opened.site.ledger.store.state.size
    for name in FILES:
        (site.home.root / name).unlink(missing_ok=True)
    assert typed(site.home, size + 3) > size
    with pytest.raises(SiteConfigError, match="another one than this vault knows"), runtime(site):
        pass


def test_in_place_of_a_ledger_that_is_gone_no_other_one_is_begun(site: Site) -> None:
    for name in FILES:
        (site.home.root / name).unlink(missing_ok=True)
    with pytest.raises(SiteConfigError, match="older than this vault, or missing"), runtime(site):
        pass
    with Store(open_sqlite(site.home.root / "ledger.db"), origin("site-a"), site.home.sign_key(), lambda: 0) as store:
        assert store.state.size == 0, "nothing was written before it was looked at"


def test_an_older_copy_beside_its_newer_mark_opens_nothing_and_doctor_says_so(site: Site, tmp_path: Path) -> None:
    """Also where the vault is as old as the copy, and knows no better."""
    shutil.copytree(site.home.root, tmp_path / "copy")
    with runtime(site) as opened:
        spend(opened, site, "late")
    for name in (*FILES[:3], *VAULT):
        (site.home.root / name).unlink(missing_ok=True)
        if (tmp_path / "copy" / name).exists():
            shutil.copy(tmp_path / "copy" / name, site.home.root / name)
    with pytest.raises(LedgerTurnedBackError, match="`restore`"), runtime(site):
        pass
    found = [
        f
        for f in doctor_command.ledgers(site.home, dt.datetime.now(dt.UTC), lambda _done, _all: None)
        if f.state == "fail"
    ]
    assert [f.name for f in found] == [doctor_command._LEDGER]
    assert "high-water mark" in found[0].said
    assert (
        main(["--home", str(site.home.root), "ledger", "appoint", "a", "compliance", COMPLIANCE.public.hex()]) == 70
    )


def test_an_older_copy_that_went_another_way_since_opens_no_desk(site: Site, tmp_path: Path) -> None:
    """What was written at the first desk's end is noted, too: the copy is of before that."""
    shutil.copytree(site.home.root, tmp_path / "copy")
    with runtime(site) as opened:
        spend(opened, site, "late")
        size = opened.site.ledger.store.state.size
    for name in FILES:
        (site.home.root / name).unlink(missing_ok=True)
        if (tmp_path / "copy" / name).exists():
            shutil.copy(tmp_path / "copy" / name, site.home.root / name)
    assert typed(site.home, 5) > size
    with pytest.raises(SiteConfigError, match="another one"), runtime(site):
        pass


def test_the_same_ledger_grown_longer_without_a_desk_opens(site: Site) -> None:
    size = typed(site.home, 4)
    with runtime(site) as opened:
        assert opened.site.ledger.store.state.size == size
        assert opened.vault.note("ledger_head")[0] == size


def test_a_vault_of_before_that_knows_the_length_alone_learns_the_root_when_it_is_opened(site: Site) -> None:
    with notes(site.home) as kept:
        known = kept.note("ledger")
        kept.write_note("ledger_head", None)
    with runtime(site) as opened:
        size, root = opened.vault.note("ledger_head")
        assert (size, len(root)) == (known, 64)
    for name in FILES:
        (site.home.root / name).unlink(missing_ok=True)
    typed(site.home, 20)
    with pytest.raises(SiteConfigError, match="another one"), runtime(site):
        pass


def test_a_vault_of_before_still_refuses_a_shorter_ledger(site: Site) -> None:
    with notes(site.home) as kept:
        kept.write_note("ledger_head", None)
        kept.write_note("ledger", kept.note("ledger") + 1)
    with pytest.raises(SiteConfigError, match="older than this vault"), runtime(site):
        pass


VAULT = ("vault.db", "vault.db-wal", "vault.db-shm")


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_vault_that_was_lost_or_emptied_opens_no_desk_beside_a_ledger_with_grants(site: Site, how: str) -> None:
    """Or whose pictures were released and who opted out would be forgotten."""
    for name in VAULT:
        (site.home.root / name).unlink(missing_ok=True)
    if how == "empty":
        (site.home.root / "vault.db").touch(mode=0o600)
    for _ in range(2):  # the attempt makes an empty one, which is no better
        with pytest.raises(SiteConfigError, match=r"lost or emptied.*`restore`"), runtime(site):
            pass


def test_a_desk_that_dies_after_its_first_grant_opens_again(tmp_path: Path) -> None:
    """The vault is told of the ledger before the first grant."""
    with Federation(tmp_path / "fed") as fed:
        made = fed.join("site-a")
        with runtime(made) as opened:
            spend(opened, made, "early")
            shutil.copytree(made.home.root, tmp_path / "killed")
        with open_runtime(tmp_path / "killed", lambda *_: None) as opened:
            assert "early" in opened.site.ledger.store.state.grants


def test_what_is_typed_or_clicked_without_the_vault_begins_no_other_ledger(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    typed_in = ["--home", str(site.home.root), "ledger", "appoint", "dpo-1", "compliance", COMPLIANCE.public.hex()]
    for name in FILES:
        (site.home.root / name).unlink(missing_ok=True)
    assert main(typed_in) == 1
    assert "older than this vault, or missing" in "".join(capsys.readouterr()).replace("\n", " ")
    with pytest.raises(SiteConfigError, match="older than this vault, or missing"), BorrowedLedger(site.home).write():
        pass
    with Store(open_sqlite(site.home.root / "ledger.db"), origin("site-a"), site.home.sign_key(), lambda: 0) as store:
        assert store.state.size == 0


def test_a_person_is_appointed_before_the_first_desk_and_after_it(site: Site, tmp_path: Path) -> None:
    with Federation(tmp_path / "new") as fed:
        for home in (site.home, fed.join("site-a").home):
            words = ["ledger", "appoint", "dpo-1", "compliance", COMPLIANCE.public.hex()]
            assert main(["--home", str(home.root), *words]) == 0
            with BorrowedLedger(home).write() as store:
                assert "dpo-1" in store.state.persons
            with open_runtime(home.root, lambda *_: None):
                pass
