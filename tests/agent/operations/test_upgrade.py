"""A site's home that an older version wrote: refused, upgraded after a backup, and nothing in it is another."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections import Counter
from pathlib import Path

import apsw
import pytest

from agent.deidentify.record import keyed_name
from agent.domain import Selection
from agent.errors import SiteConfigError
from agent.ingest.context import IngestContext, open_ingest
from agent.operations import restore
from agent.operations import upgrade as upgrading
from agent.operations.backup import backup, private_of
from agent.operations.upgrade import FormVersions, forms, upgrade
from agent.storage import projects
from agent.storage.encrypted_sqlite import FORMAT, OlderVaultError, VaultError
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.spool import ReceivedFile
from agent.storage.vault import Vault
from policies.audit.verify import verify
from policies.ledger.backends.schema_version import FORM, SchemaVersionError
from policies.ledger.backends.sqlite import export_file, open_sqlite
from policies.ledger.store import Store
from protos.encryption.key_archive import files_of
from protos.operations.backup import read
from tests.support.older import Older, form_2, older
from tests.vectors.older.write_form_2 import ROOT as UIDS
from tests.vectors.older.write_form_2 import picture

NOW = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)


@pytest.fixture
def before(tmp_path: Path) -> Older:
    return older(tmp_path)


def exported(home: SiteDirectory) -> bytes:
    return export_file(home.root / "ledger.db", origin("site-a"), home.sign_key())


def kept(home: SiteDirectory) -> tuple[int, int]:
    """Patients and images in the project main."""
    with contextlib.closing(projects.open_vault(home)) as vault:
        return vault.patients(), len(list(vault.heads()))


def test_an_older_home_is_opened_by_nothing_before_it_is_upgraded(before: Older) -> None:
    home = SiteDirectory(before.site)
    raw = {p.name: p.read_bytes() for p in before.site.iterdir() if p.is_file()}
    assert forms(home) == FormVersions(1, 1)
    with pytest.raises(OlderVaultError, match="lazaret-agent upgrade"):
        projects.open_vault(home)
    with pytest.raises(OlderVaultError):
        projects.opt_out(home, "0" * 32)
    with pytest.raises(SchemaVersionError, match="upgrade"):
        open_sqlite(before.site / "ledger.db")
    assert raw == {n: (before.site / n).read_bytes() for n in raw}, "and by a look nothing is changed"


def test_an_upgrade_keeps_every_entry_head_note_and_image(before: Older) -> None:
    home, told = SiteDirectory(before.site), list[str]()
    done = upgrade(home, NOW, told.append)
    assert (done.before, done.after, done.entries) == (FormVersions(1, 1), FormVersions(FORM, FORMAT), 8)
    assert exported(home) == before.exported("site-a"), "to the byte, signatures and all"
    assert verify(exported(home), before.head("site-a")).root == done.root.hex()
    assert kept(home) == (6, 12)
    with contextlib.closing(SiteDatabase(home.root / "vault.db", home.secret("vault"))) as notes:
        assert notes.note("ledger") == 8
        ((released,),) = [one["clusters"] for one in notes.note("releases")]
        assert len(released) == 5, "who was released is known as before"
    assert [line.split(":")[0] for line in told] == ["backup", "ledger", "vault"]
    again = upgrade(home, NOW)
    assert (again.backup, again.after.newest) == (None, True), "done twice, done once"


def test_the_backup_of_before_is_whole_has_no_key_and_is_itself_of_the_older_form(
    before: Older, tmp_path: Path
) -> None:
    home = SiteDirectory(before.site)
    done = upgrade(home, NOW)
    assert done.backup == home.root / "backups" / "before-upgrade-20261122-120000"
    manifest = read(done.backup, home.sign_key().public_key().public_bytes_raw())
    assert manifest.ledger_form == 1
    assert not any("keys/sign" in name or name.endswith("key") for name in manifest.files)
    done_again = restore.restore(tmp_path / "again", done.backup, private_of(files_of(home.keys)), "cd" * 16)
    assert (done_again.entries, done_again.epoch, done_again.closed) == (8, 2, 1), (
        "an older backup comes back upgraded"
    )
    assert forms(SiteDirectory(tmp_path / "again")).newest
    assert kept(SiteDirectory(tmp_path / "again")) == (6, 12)
    assert verify(exported(SiteDirectory(tmp_path / "again")), before.head("site-a")).epoch == 2


@pytest.mark.parametrize("point", ["before the ledger", "between ledger and vault", "in the vault"])
def test_an_interrupted_upgrade_goes_on(before: Older, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    from agent.operations import upgrade as ledger

    home = SiteDirectory(before.site)
    owner, name = {
        "before the ledger": (ledger, "upgrade_sqlite"),
        "between ledger and vault": (projects, "upgrade"),
        "in the vault": (SiteDatabase, "finish_upgrade"),
    }[point]

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        with pytest.raises(KeyboardInterrupt):
            upgrade(home, NOW)
    assert not forms(home).newest
    with pytest.raises(OlderVaultError):
        projects.open_vault(home)
    assert exported(home) == before.exported("site-a")
    upgrade(home, NOW + dt.timedelta(seconds=1))
    assert exported(home) == before.exported("site-a")
    assert kept(home) == (6, 12)


def test_a_home_of_a_newer_program_is_not_taken_back(before: Older) -> None:
    home = SiteDirectory(before.site)
    upgrade(home, NOW)
    with contextlib.closing(apsw.Connection(str(home.root / "vault.db"))) as newer:
        newer.execute(f"PRAGMA user_version={FORMAT + 1}")
    for act in (lambda: forms(home), lambda: upgrade(home, NOW)):
        with pytest.raises(SiteConfigError, match="cannot be undone"):
            act()
    with pytest.raises(VaultError, match="newer version"):
        projects.open_vault(home)
    with contextlib.closing(apsw.Connection(str(home.root / "ledger.db"))) as newer:
        newer.execute(f"UPDATE form SET version_num = '{FORM + 1}'")
    with pytest.raises(SchemaVersionError, match="cannot be undone"):
        forms(home)


def test_nothing_is_upgraded_while_the_ledger_is_in_use(before: Older) -> None:
    from policies.ledger.backends.sqlite import lock_file
    from policies.ledger.store import LedgerBusyError

    home = SiteDirectory(before.site)
    with lock_file(home.root / "ledger.lock"), pytest.raises(LedgerBusyError):
        upgrade(home, NOW)
    assert forms(home) == FormVersions(1, 1)
    assert not (home.root / "backups").exists()


def test_an_upgraded_site_appends_and_its_auditor_agrees(before: Older) -> None:
    home = SiteDirectory(before.site)
    upgrade(home, NOW)
    with Store(open_sqlite(home.root / "ledger.db"), origin("site-a"), home.sign_key(), lambda: 1) as store:
        store.restore("ef" * 16)
    assert verify(exported(home), before.head("site-a")).size == 9


# -- form 2 of the vault: studies, series and instances were named by their UIDs alone

CT = Selection("CT", (16, 16))


def eligible(way: IngestContext) -> dict[str, int]:
    return {p.pseudonym: len(p.images) for p in way.vault.cohort(CT).patients}


@pytest.mark.parametrize("interrupted", ["", "in a project", "before the end"])
def test_a_vault_of_form_2_goes_on_and_nothing_held_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    home = SiteDirectory(form_2(tmp_path))
    assert forms(home) == FormVersions(0, 2)
    with pytest.raises(OlderVaultError, match="lazaret-agent upgrade"), open_ingest(home, "main"):
        pass
    if interrupted:
        with monkeypatch.context() as patch:
            patch.setattr(
                *(Vault, "_write_series") if interrupted == "in a project" else (SiteDatabase, "finish_upgrade"), dies
            )
            with pytest.raises(KeyboardInterrupt):
                upgrade(home, NOW)
        assert not forms(home).newest
    upgrade(home, NOW + dt.timedelta(seconds=1))
    assert forms(home).newest
    with open_ingest(home, "main") as way:
        who = [way.who.person("", f"PAT-{n}") for n in range(10)]
        heads = list(way.vault.heads())
        assert Counter(head.person for head in heads) == {who[n]: 2 for n in (0, 1, 2, 3, 5, 6, 7)}
        assert all(
            (head.study, head.series, head.name) == tuple(keyed_name(head.person, uid) for uid in head.uids)
            for head in heads
        )
        assert all(way.vault.payload(head.name)[128:132] == b"DICM" for head in heads)
        free = {who[n]: 2 for n in (1, 3, 5, 6, 7)}
        assert eligible(way) == free, "one series stays barred, one study held"
        ((released,),) = [one["clusters"] for one in way.vault.note("releases")]
        assert released == [who[5]]
        (alike,) = way.vault.alike()
        assert (alike.persons, alike.why) == ({who[6], who[7]}, ("picture",))
        (looked_at,) = {head.study for head in heads if head.person == who[3]}
        assert way.vault.looked_at(looked_at)
        assert all(way.known([("wado", "any")])(f"{UIDS}.3.{2 * n + i}") for n in (0, 7) for i in (0, 1))


def test_in_an_upgraded_vault_one_patient_more_changes_nobody_else(tmp_path: Path) -> None:
    home = SiteDirectory(form_2(tmp_path))
    upgrade(home, NOW)
    with open_ingest(home, "main") as way, way.intake() as intake:
        who = [way.who.person("", f"PAT-{n}") for n in range(10)]
        free = {who[n]: 2 for n in (1, 3, 5, 6, 7)}
        for instance, (study, series) in enumerate([(1, 1), (3, 3), (2, 2), (0, 0)], 100):
            uid, data = picture(9, study, series, instance, instance)
            way.inbox.put(ReceivedFile("dimse", "PACS", data, label="1", instance=uid))
        assert intake.run(way.waiting()).kept == 4
        assert eligible(way) == free | {who[9]: 2}, "what the older version held by a UID is held for whoever says it"
        refused = [entry.name for entry in way.quarantine.entries()]
        assert intake.run(way.refused(refused)).kept == 2, "what another patient's UIDs had kept out comes in"
        assert eligible(way) == free | {who[9]: 2, who[8]: 1}
        for name in way.vault.held() | way.vault.barred():
            way.vault.lift(name)
        assert eligible(way) == free | {who[n]: 2 for n in (0, 2, 8)} | {who[9]: 4}
        uid, data = picture(1, 1, 1, 2, 2)
        way.inbox.put(ReceivedFile("dimse", "PACS", data, instance=uid))
        assert intake.run(way.waiting()).duplicates == 1, "what is here is known"
        assert way.vault.relabel({way.name_of(f"{UIDS}.3.2"): "new"}) == 2, "of whoever says that UID"


def dies(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_home_without_ledger_or_vault_has_nothing_to_upgrade(before: Older) -> None:
    for name in ("ledger.db", "vault.db"):
        (before.site / name).unlink()
    assert forms(SiteDirectory(before.site)).newest
    assert upgrading.upgrade(SiteDirectory(before.site), NOW).backup is None
    assert backup(SiteDirectory(before.site), before.root / "small").entries == 0
