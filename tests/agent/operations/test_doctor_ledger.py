"""What `serve` would refuse at its start, the site's doctor says before it; and it writes nothing."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli import doctor as doctor_command
from agent.cli import serve
from agent.deidentify.record import Record
from agent.errors import SiteConfigError
from agent.operations.backup import backup, private_of
from agent.operations.doctor import databases
from agent.operations.restore import restore
from agent.runtime import open_runtime, sync_with_coordinator
from agent.storage import projects, read_only_access
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.site_directory import SiteDirectory
from policies.accounting.claims import SubsampledGaussian
from policies.audit.auditor import SKEW
from policies.ledger.store import LedgerTurnedBackError, LedgerUnsoundError
from protos.encryption.key_archive import files_of
from protos.operations.checks import CheckResult, examine
from tests.support.federation_world import Federation, Site


def right_now() -> dt.datetime:
    """Not the time at which this file was collected: a ledger that is written since then lies in its future."""
    return dt.datetime.now(dt.UTC)


SMALL = SubsampledGaussian(0.01, 8.0, 1)


def quiet(_name: str, _detail: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site that has worked: a grant in its ledger, notes in its vault, the coordinator's head seen."""
    with Federation(tmp_path_factory.mktemp("federation")) as federation:
        site = federation.join("site-a")
        toml = site.home.root / "site.toml"
        toml.write_text(toml.read_text().replace('127.0.0.1:1"', f'127.0.0.1:{federation.port}"'))
        with open_runtime(site.home.root, quiet) as runtime:
            sync_with_coordinator(runtime)
            for name in ("g1", "g2"):
                said = site.hospital.reservation(name, SMALL, "federated", f"run-{name}")
                assert runtime.site.ledger.reserve(f"r-{name}", said, runtime.site.seal(said)).admitted
        yield site


@pytest.fixture
def home(working: Site, tmp_path: Path) -> SiteDirectory:
    """A copy of it."""
    return SiteDirectory(Path(shutil.copytree(working.home.root, tmp_path / "site", symlinks=True)))


def ledger(home: SiteDirectory, now: dt.datetime | None = None) -> dict[str, CheckResult]:
    found = examine(
        [("books", lambda: doctor_command.ledgers(home, now or right_now(), lambda _done, _all: None))],
        doctor_command._EXPECTED,
    )
    return {finding.name: finding for finding in found}


def wrong(home: SiteDirectory) -> set[str]:
    told = ledger(home)
    assert not any("the check itself failed" in f.said or str(home.root) in f.said for f in told.values())
    return {name for name, finding in told.items() if finding.state == "fail"}


def opens(home: SiteDirectory) -> None:
    with open_runtime(home.root, quiet):
        pass


def test_a_site_that_opens_is_green_also_while_it_is_open(home: SiteDirectory) -> None:
    assert wrong(home) == set()
    assert {f.state for f in ledger(home).values()} == {"pass"}
    with open_runtime(home.root, quiet):
        assert wrong(home) == set()
    opens(home)


def test_an_entry_of_the_future_is_a_fault_once_it_is_further_off_than_clocks_may_differ(home: SiteDirectory) -> None:
    with contextlib.closing(doctor_command._folded(home, lambda _done, _all: None)) as store:
        latest = dt.datetime.fromtimestamp(store.state.latest, dt.UTC)
    skew = dt.timedelta(seconds=SKEW)
    assert ledger(home, latest - skew)[doctor_command._TIMES].state == "pass"
    found = ledger(home, latest - skew - dt.timedelta(seconds=1))[doctor_command._TIMES]
    assert found.state == "fail"
    assert f"{SKEW + 1} s in the future" in found.said
    assert "set it right (NTP)" in found.said


def test_a_site_that_serves_with_an_entry_of_the_future_says_and_logs_it(
    home: SiteDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_runtime(home.root, quiet) as runtime:
        latest = runtime.site.ledger.store.state.latest
        serve._warn_of_the_future(runtime, latest)
        assert capsys.readouterr().err == ""
        serve._warn_of_the_future(runtime, latest - SKEW - 1)
    assert "in the future" in capsys.readouterr().err
    lines = [json.loads(line) for line in (home.root / "agent.log").read_text().splitlines()]
    (told,) = (line for line in lines if line["event"] == "ledger_in_the_future")
    assert (told["level"], told["seconds"]) == ("warning", SKEW + 1)


def test_to_look_changes_no_byte(home: SiteDirectory) -> None:
    def there() -> dict[str, str]:
        return {
            str(p.relative_to(home.root)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in home.root.rglob("*")
            if p.is_file() and not p.name.endswith(("-wal", "-shm"))  # SQLite's own, empty
        }

    before = there()
    assert wrong(home) == set()
    assert there() == before
    for name in ("ledger.db", "vault.db"):
        (home.root / name).unlink()
    wrong(home)
    assert not (home.root / "ledger.db").exists()
    assert not (home.root / "vault.db").exists()


def test_another_key_of_the_vault_or_of_a_project_is_a_fault(home: SiteDirectory) -> None:
    for key in (home.keys / "vault.key", home.project_keys / "main" / "key"):
        was = key.read_bytes()
        key.write_bytes(secrets.token_bytes(len(was)))
        assert wrong(home) == {doctor_command._VAULT}
        with pytest.raises(VaultError):
            opens(home)
        key.write_bytes(was)
    (home.keys / "vault.key").write_bytes(b"short")
    assert wrong(home) == {doctor_command._VAULT}


def test_a_vault_that_is_no_database_is_a_fault(home: SiteDirectory) -> None:
    (home.root / "vault.db").write_bytes(os.urandom(4096))
    for name in ("vault.db-wal", "vault.db-shm"):
        (home.root / name).unlink(missing_ok=True)
    assert wrong(home) == {doctor_command._VAULT}


def test_watch_that_is_gone_or_cannot_be_read_is_a_fault(home: SiteDirectory) -> None:
    (home.root / "watch" / "seen.json").write_text("{}{")
    assert wrong(home) == {doctor_command._WATCH}
    shutil.rmtree(home.root / "watch")
    assert wrong(home) == {doctor_command._WATCH}
    with pytest.raises(SiteConfigError, match="watch/ is missing"):
        opens(home)


def edit(path: Path, *statements: str) -> None:
    """As somebody with the file would."""
    with sqlite3.connect(path, isolation_level=None) as database:
        for statement in ("DROP TRIGGER entry_is_fixed", "DROP TRIGGER entry_is_kept", *statements):
            database.execute(statement)
    database.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entry SET body = CAST(body || x'00' AS BLOB) WHERE seq = 1",
        "DELETE FROM entry WHERE seq = 1",
        "DELETE FROM entry WHERE seq = (SELECT max(seq) FROM entry)",
        "INSERT INTO entry SELECT (SELECT max(seq) + 1 FROM entry), body FROM entry WHERE seq = 0",
        "UPDATE head SET seal = CAST(x'00' AS BLOB)",
    ],
)
def test_an_entry_that_was_changed_taken_or_put_in_is_a_fault(change: str, home: SiteDirectory) -> None:
    edit(home.root / "ledger.db", change)
    assert wrong(home) == {doctor_command._LEDGER}
    with pytest.raises(LedgerUnsoundError):
        opens(home)


def test_a_ledger_that_is_missing_or_was_begun_anew_is_a_fault(home: SiteDirectory) -> None:
    ledger = home.root / "ledger.db"
    ledger.unlink()
    assert wrong(home) == {doctor_command._LEDGER}
    with pytest.raises(LedgerTurnedBackError, match=r"ledger\.mark exists"):
        opens(home)
    assert wrong(home) == {doctor_command._LEDGER}
    for name in ("ledger.db", "ledger.mark"):  # and the mark, too: the vault knows
        (home.root / name).unlink()
    assert wrong(home) == {doctor_command._LEDGER}
    (forms,) = databases(home)
    assert forms.state == "note"
    with pytest.raises(SiteConfigError, match=r"ledger\.db is older than this vault, or missing"):
        opens(home)
    assert ledger.exists(), "an empty one, by the attempt"
    assert wrong(home) == {doctor_command._HISTORY}


def test_a_release_that_the_vault_does_not_know_is_a_fault_before_another_one_is_asked_for(
    home: SiteDirectory, working: Site
) -> None:
    hospital = working.hospital
    with open_runtime(home.root, quiet) as runtime:
        said = hospital.reservation("k")
        assert runtime.site.ledger.reserve("r-k", said, runtime.site.seal(said)).admitted
        release = hospital.release("k")
        runtime.site.ledger.send(release, runtime.site.seal(release))
    assert wrong(home) == {doctor_command._HISTORY}
    assert f"does not know the patients of {release.release}" in ledger(home)[doctor_command._HISTORY].said
    with open_runtime(home.root, quiet) as runtime:
        runtime.vault.write_note("releases", [{"release": release.release, "clusters": [], "again": []}])
    assert wrong(home) == set()


def test_a_ledger_with_grants_beside_no_vault_is_a_fault(home: SiteDirectory) -> None:
    (home.root / "vault.db").unlink()
    assert wrong(home) == {doctor_command._HISTORY}


def test_an_empty_vault_is_a_fault_beside_a_ledger_with_grants(home: SiteDirectory) -> None:
    for name in ("vault.db-wal", "vault.db-shm"):
        (home.root / name).unlink(missing_ok=True)
    (home.root / "vault.db").write_bytes(b"")
    assert wrong(home) == {doctor_command._VAULT}
    with pytest.raises(SiteConfigError, match="lost or emptied"):
        opens(home)
    assert wrong(home) == {doctor_command._HISTORY}, "the attempt wrote into it"


def test_a_project_without_its_records_is_no_pass(home: SiteDirectory) -> None:
    database = home.root / "projects" / "main.db"
    for name in ("main.db", "main.db-wal", "main.db-shm"):
        (database.parent / name).unlink(missing_ok=True)
    found = ledger(home)[doctor_command._RECORDS]
    assert (found.state, "main" in found.said) == ("note", True)
    database.write_bytes(b"")
    assert wrong(home) == {doctor_command._VAULT}


def test_a_delta_that_the_number_of_patients_forbids_is_a_fault_and_no_number_is_told(
    home: SiteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a million patients are not made for this: what there is is counted, and then more is said."""
    with contextlib.closing(projects.open_vault(home)) as vault:
        vault.keep_all([record(n, n % 3) for n in range(5)])
        assert read_only_access.records(home).most == vault.patients() == 3
    assert wrong(home) == set()
    monkeypatch.setattr(read_only_access, "_patients", lambda _one: 10**6)
    assert wrong(home) == {doctor_command._DELTA}
    assert not any("1000000" in f.said + f.fix for f in ledger(home).values())
    (home.root / "ledger.db").unlink()
    assert doctor_command._DELTA in wrong(home), "also before there is a ledger"


def record(number: int, person: int) -> Record:
    name, digest, study, series = (f"{kind:08x}{number:024x}" for kind in range(4))
    return Record(name, digest, f"{person:032x}", study, "CT", "volume", "", None, b"made", False, series)


@pytest.mark.parametrize("name", ["site.toml", "policy.toml", "keys/federation.toml"])
@pytest.mark.parametrize("how", ["latin", "folder"])
def test_a_file_that_is_no_text_is_a_fault_and_stops_no_doctor(home: SiteDirectory, name: str, how: str) -> None:
    path = home.root / name
    if how == "latin":
        path.write_bytes("# K\u00f6ln\n".encode("latin-1") + path.read_bytes())
    else:
        path.unlink()
        path.mkdir()
    found = doctor_command.findings(home, dt.datetime.now(dt.UTC))
    said = [f.said for f in found if f.state == "fail" and f.said.startswith(f"{name} cannot be read")]
    assert said
    assert not any("the check itself failed" in f.said or str(home.root) in f.said for f in found)


@pytest.mark.parametrize("how", ["nested", "folder"])
def test_a_memory_of_the_coordinator_that_is_nested_or_a_folder_is_a_fault(home: SiteDirectory, how: str) -> None:
    path = home.root / "watch" / "seen.json"
    path.unlink()
    if how == "nested":
        path.write_text("[" * 200_000)
    else:
        path.mkdir()
    assert wrong(home) == {doctor_command._WATCH}


def test_a_site_that_came_back_and_was_not_recovered_is_frozen_and_that_is_a_fault(
    working: Site, tmp_path: Path
) -> None:
    backup(working.home, tmp_path / "backup")
    keys = private_of(files_of(working.home.keys))
    restore(tmp_path / "again", tmp_path / "backup", keys, "ab" * 16)
    home = SiteDirectory(tmp_path / "again")
    assert wrong(home) == {doctor_command._RECEIPTS}
    told = ledger(home)[doctor_command._RECEIPTS]
    assert told.said.startswith("frozen: 1 site awaited")
    assert "run `recover`" in told.fix


def test_all_of_it_stands_in_what_doctor_prints(home: SiteDirectory) -> None:
    (home.keys / "vault.key").write_bytes(secrets.token_bytes(32))
    edit(home.root / "ledger.db", "DELETE FROM entry WHERE seq = 1")
    found = doctor_command.findings(home, dt.datetime.now(dt.UTC))
    failed = {f.name for f in found if f.state == "fail"}
    assert {doctor_command._VAULT, doctor_command._LEDGER} <= failed


def test_how_far_the_fold_is_is_told_to_who_listens(home: SiteDirectory) -> None:
    heard: list[tuple[int, int]] = []
    list(doctor_command.ledgers(home, right_now(), lambda done, of: heard.append((done, of))))
    assert heard[0][0] == 0
    assert heard[0][1] > 2
