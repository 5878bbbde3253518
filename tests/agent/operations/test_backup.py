"""A site is lost and comes back from a backup: with its books, its vault, and with no budget that it had not."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from agent.cli import backup as backup_commands
from agent.cli.main import main
from agent.deidentify.record import Record
from agent.errors import SiteConfigError
from agent.event_log import open_log
from agent.operations import restore
from agent.operations.backup import backup
from agent.operations.restore import spend_all_grants
from agent.runtime import AgentRuntime, open_runtime, sync_with_coordinator
from agent.service import job_acts, jobs
from agent.service.job_runner import JobRunner
from agent.service.jobs import Event, Job, JobStore
from agent.service.ledger_access import BorrowedLedger
from agent.service.ledger_access import Site as agent_site
from agent.storage import projects
from agent.storage.encrypted_sqlite import EncryptedCheckpointStore, VaultError
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory, create, origin
from coordinator.operations import backup as coordinator_backup
from policies.accounting.claims import SubsampledGaussian
from policies.audit.restore_losses import format_time
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.backends.sqlite import export_file, open_read_only, open_sqlite
from policies.ledger.entries import Recovered
from policies.ledger.export import Export
from policies.ledger.merkle import open_checkpoint
from policies.ledger.store import LedgerTurnedBackError, Store, lines
from policies.statements import Amendment
from protos.encryption import key_archive
from protos.encryption.key_archive import KeyArchiveError, files_of, key_mark
from protos.operations.backup import BackupError, read
from tests.support.federation_world import SETTINGS, Federation, Site
from tests.support.ledger_world import K5, Person, policy

SMALL = SubsampledGaussian(0.01, 8.0, 1)
PASSPHRASE = "four horses and a staple"
NONCE = "ab" * 16


@dataclass
class Ward:
    """A federation, one of its sites, and what that site does."""

    fed: Federation
    site: Site
    grants: list[str] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.site.home.root

    @contextlib.contextmanager
    def runtime(self, root: Path | None = None) -> Iterator[AgentRuntime]:
        with open_runtime(root or self.root, lambda *_: None) as opened:
            opened.gateway._patience_s = 0.0
            yield opened

    def grant(self, runtime: AgentRuntime, name: str, claim: Any = SMALL, mechanism: str = "federated") -> bool:
        """Hold a price in both books, as the pipeline does."""
        run = f"run-{name}" if mechanism == "federated" else ""  # a part in a run is granted once
        said = self.site.hospital.reservation(name, claim, mechanism, run)
        sealed = runtime.site.seal(said)
        if not runtime.site.ledger.reserve(f"reserve-{name}", said, sealed).admitted:
            return False
        return bool(runtime.gateway.reserve(f"reserve-{name}", sealed).admitted)

    def shared(self) -> bytes:
        return export_file(self.fed.home.ledger, self.fed.store.origin, self.fed.home.ledger_key())

    def lose(self, folder: Path) -> dict[str, bytes]:
        """The machine is gone; a copy of ``keys/`` is on a medium."""
        keys = backup_commands.backups.private_of(files_of(self.root / "keys"))
        self.root.rename(folder)
        return keys


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess at a passphrase costs 128 MiB; here it need not (``tests/protos/encryption/test_key_archive.py``)."""
    monkeypatch.setattr(
        key_archive, "_key", lambda words, salt: Scrypt(salt=salt, length=32, n=16, r=8, p=1).derive(words.encode())
    )


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    with Federation(tmp_path / "fed") as fed:
        site = fed.join("site-a")
        toml = site.home.root / "site.toml"
        toml.write_text(toml.read_text().replace('127.0.0.1:1"', f'127.0.0.1:{fed.port}"'))
        made = Ward(fed, site)
        with made.runtime() as runtime:
            for n in range(6):
                pixels = np.full((8, 8), n / 8, np.float32)
                name, person = f"{n + 100:032x}", f"{n + 1:031x}f"
                runtime.vault.keep(Record(name, name, person, "0" * 32, "OT", "image", "0", pixels, b"x", False))
        yield made


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Ward]:
    """A site whose patients may be in three released clusters; its own ledger does not exist yet."""
    three = policy(max_releases_per_patient=3)
    with Federation(tmp_path / "wide") as fed:
        (fed.home.root / "policy.toml").write_text(three)
        fed.intake = type(fed.intake).over(fed.store, fed.home.policy())
        object.__setattr__(fed.authority, "intake", fed.intake) if hasattr(fed.authority, "intake") else None
        site = fed.join("site-b", three)
        toml = site.home.root / "site.toml"
        toml.write_text(toml.read_text().replace('127.0.0.1:1"', f'127.0.0.1:{fed.port}"'))
        (site.home.keys / "federation.toml").write_text(three)
        yield Ward(fed, site)


def no_results(_: Job) -> None:
    """None of these jobs is a prediction (``tests/agent/cli/test_predict_job.py``)."""
    raise AssertionError


def used(root: Path) -> dict[str, int]:
    """What each account of a site has held or spent."""
    home = SiteDirectory(root)
    name = origin(home.settings().site)
    with Store(open_sqlite(root / "ledger.db"), name, home.sign_key(), lambda: 0) as store:
        return {name: account.held + account.spent for name, account in store.state.accounts.items()}


def audited(root: Path) -> Any:
    home = SiteDirectory(root)
    return verify(export_file(root / "ledger.db", origin(home.settings().site), home.sign_key()))


def test_a_site_that_was_lost_comes_back_with_everything_that_was_granted_since_spent(
    ward: Ward, tmp_path: Path
) -> None:
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "before")
        backup(ward.site.home, tmp_path / "backup")
        assert ward.grant(runtime, "lost-1")
        assert ward.grant(runtime, "lost-2")
        runtime.vault.write_note("ledger", runtime.site.ledger.store.state.size)
    owed = used(ward.root)
    keys = ward.lose(tmp_path / "gone")
    done = restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    assert (done.epoch, done.closed, done.gone) == (2, 1, ())
    with ward.runtime() as runtime:
        assert not ward.grant(runtime, "early"), "nothing is granted before the lost is spent"
        assert "frozen" in str(lines(open_read_only(ward.root / "ledger.db"))[-1].record.entry)
        assert runtime.vault.patients() == 6, "the vault opens with the keys of before"
    made = restore.recover(SiteDirectory(ward.root), ward.shared())
    assert (made.lost, made.full) == (2, ())
    assert all(used(ward.root)[name] >= owed[name] for name in owed)
    found = audited(ward.root)
    assert (found.epoch, found.origin) == (2, "lazaret/site-a")
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "after"), "what is left is granted again"
        assert not ward.grant(runtime, "lost-1"), "a lost grant's name is not given again"
    with pytest.raises(SiteConfigError, match="nothing to do"):
        restore.recover(SiteDirectory(ward.root), ward.shared())


def test_jobs_and_networks_come_back_and_what_would_go_on_by_itself_waits_for_a_person(
    ward: Ward, tmp_path: Path
) -> None:
    store = JobStore(ward.root)
    for number, state in enumerate((*jobs.STATES, jobs.DONE), 1):
        (store.fresh_folder(f"f{number}") / "in" / "0-config.toml").write_text("k = 5")
        store.add(Job(0, ("release", "ksame"), "main", (Event(1.0, state),), wanted=""), f"f{number}")
        (store.folder(number) / "out").mkdir()
        (store.folder(number) / "out" / "page.html").write_text("a patient")
        (store.folder(number) / "stdout").write_text("printed")
    (store.folder(1) / "in" / "1-my network").write_text("as older versions named it")
    store.forget(6)
    shutil.rmtree(store.folder(11))  # somebody deleted the last one
    (ward.root / "networks" / "eyes").mkdir(parents=True)
    (ward.root / "networks" / "eyes" / "0.png").write_bytes(b"public")
    backup(ward.site.home, tmp_path / "backup")
    keys = ward.lose(tmp_path / "gone")
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    assert (ward.root / "networks" / "eyes" / "0.png").read_bytes() == b"public"
    there = {path.relative_to(store.folder(1)).as_posix() for path in store.folder(1).rglob("*") if path.is_file()}
    assert there == {"job.json", "in/0-config.toml"}
    store.after_restore(no_results)
    waiting = [job for job in store.all() if job.state == jobs.INTERRUPTED]
    assert [job.number for job in waiting] == [2, 3, 5, 7]
    assert all(job.stopped and "restored from a backup: `jobs retry" in job.reason for job in waiting)
    assert {job.state for job in store.all()} == set(jobs.STATES) - {
        jobs.QUEUED,
        jobs.RUNNING,
        jobs.LEAVING,
        jobs.DONE,
    }
    store.after_restore(no_results)
    assert store.all()[1].history == waiting[0].history, "once"
    assert store.add(Job(0, ("tune",), "main", (Event(1.0, jobs.QUEUED),))).number == 12


def test_a_service_that_starts_after_a_restore_starts_no_job_of_the_backup(ward: Ward, tmp_path: Path) -> None:
    store = JobStore(ward.root)
    for state in (jobs.QUEUED, jobs.RUNNING):
        store.add(Job(0, ("release", "ksame"), "main", (Event(1.0, state),), grant="grant-1"))
    backup(ward.site.home, tmp_path / "backup")
    keys = ward.lose(tmp_path / "gone")
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)  # and a kill before the command went on
    home = SiteDirectory(ward.root)
    JobRunner(home, BorrowedLedger(home), open_log(ward.root / "agent.log")).recover()
    assert all(job.stopped and job.state == jobs.INTERRUPTED for job in store.all())


def test_a_job_gets_no_number_under_which_a_vault_holds_pages(ward: Ward, tmp_path: Path) -> None:
    with contextlib.closing(projects.open_vault(ward.site.home)) as vault:
        vault.place("job/41/page.html").write(b"sealed")
    backup(ward.site.home, tmp_path / "backup")  # of before: it has no jobs
    keys = ward.lose(tmp_path / "gone")
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    home = SiteDirectory(ward.root)
    site = agent_site(home, BorrowedLedger(home), open_log(ward.root / "agent.log"))
    told: dict[str, Any] = {"words": ["tune"], "project": "main", "by": "olga", "price": {}, "cuda": False}
    assert job_acts.add(site, {**told, "key": ""}) == {"number": 42}


def test_no_budget_comes_back_whenever_the_backup_was_made(ward: Ward, tmp_path: Path) -> None:
    """At each point of a site's life a backup; each of them, restored, owes at least what was owed at the end."""
    steps = [(f"g{n}", SubsampledGaussian(0.02, 6.0, n + 1), "federated") for n in range(4)]
    steps.insert(2, ("k", K5, "ksame"))
    with ward.runtime() as runtime:
        for n, (name, claim, mechanism) in enumerate(steps):
            backup(ward.site.home, tmp_path / f"backup-{n}")
            assert ward.grant(runtime, name, claim, mechanism)
            if n == 0:
                runtime.site.ledger.close(name, "restart")
    owed, shared = used(ward.root), ward.shared()
    keys = ward.lose(tmp_path / "gone")
    for n in range(len(steps)):
        root = tmp_path / f"again-{n}" / "site-a"
        restore.restore(root, tmp_path / f"backup-{n}", keys, NONCE)
        made = restore.recover(SiteDirectory(root), shared)
        assert all(used(root)[name] >= owed[name] for name in owed), n
        assert audited(root).epoch == 2
        assert made.lost == len(steps) - n


def test_after_a_lost_release_without_an_epsilon_there_is_no_other_for_its_patients_are_unknown(
    wide: Ward, tmp_path: Path
) -> None:
    with wide.runtime():
        pass
    backup(wide.site.home, tmp_path / "backup")
    with wide.runtime() as runtime:
        limit = runtime.site.ledger.store.state.accounts["site-b/k"].limit
        assert limit == 3
        assert wide.grant(runtime, "k", K5, "ksame")
    keys, shared = wide.lose(tmp_path / "gone"), wide.shared()
    restore.restore(wide.root, tmp_path / "backup", keys, NONCE)
    made = restore.recover(SiteDirectory(wide.root), shared)
    assert (made.lost, made.full) == (3, ("site-b/k",)), "the lost one, and two that nobody can give safely now"
    assert used(wide.root) == {"site-b/k": 3, "site-b/rdp": 0}
    assert audited(wide.root).grants == 3
    with wide.runtime() as runtime:
        assert not wide.grant(runtime, "k-again", K5, "ksame")
        assert wide.grant(runtime, "dp"), "with an epsilon there is no such question"


@pytest.mark.parametrize("between", ["nothing", "the note is lost"])
def test_a_second_restore_forgets_nothing_that_the_first_had_to_make_good(
    wide: Ward, tmp_path: Path, between: str
) -> None:
    with wide.runtime() as runtime:
        assert wide.grant(runtime, "k-open", K5, "ksame")
        backup(wide.site.home, tmp_path / "first")
    keys, shared = wide.lose(tmp_path / "gone"), wide.shared()
    restore.restore(wide.root, tmp_path / "first", keys, NONCE)
    if between != "nothing":
        with contextlib.closing(SiteDatabase(wide.root / "vault.db", keys["vault.key"])) as notes:
            notes.write_note("restored", None)
    backup(SiteDirectory(wide.root), tmp_path / "second")
    wide.lose(tmp_path / "gone-again")
    assert restore.restore(wide.root, tmp_path / "second", keys, "cd" * 16).closed == 0, "it is spent already"
    assert restore.recover(SiteDirectory(wide.root), shared).full == ("site-b/k",), (
        "and its patients are as unknown as before"
    )
    with wide.runtime() as runtime:
        assert not wide.grant(runtime, "k-again", K5, "ksame")


def test_a_recovery_that_died_after_it_spent_a_lost_release_is_not_forgotten_by_the_next_restore(
    wide: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wide.runtime():
        pass
    backup(wide.site.home, tmp_path / "first")
    with wide.runtime() as runtime:
        assert wide.grant(runtime, "k", K5, "ksame")
    keys, shared = wide.lose(tmp_path / "gone"), wide.shared()
    restore.restore(wide.root, tmp_path / "first", keys, NONCE)

    def dies(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(restore, "_amended", dies)
        with pytest.raises(KeyboardInterrupt):
            restore.recover(SiteDirectory(wide.root), shared)
    assert used(wide.root)["site-b/k"] == 1
    backup(SiteDirectory(wide.root), tmp_path / "second")
    wide.lose(tmp_path / "gone-again")
    restore.restore(wide.root, tmp_path / "second", keys, "cd" * 16)
    made = restore.recover(SiteDirectory(wide.root), shared)
    assert made.full == ("site-b/k",), "the ledger knows the grant now; whose pictures it showed is unknown still"
    assert used(wide.root)["site-b/k"] == 3


def test_a_backup_of_before_the_first_desk_brings_no_budget_back(wide: Ward, tmp_path: Path) -> None:
    assert not (wide.root / "ledger.db").exists()
    backup(wide.site.home, tmp_path / "backup")
    with wide.runtime() as runtime:
        assert wide.grant(runtime, "k", K5, "ksame")
        assert wide.grant(runtime, "dp")
    owed = used(wide.root)
    keys, shared = wide.lose(tmp_path / "gone"), wide.shared()
    done = restore.restore(wide.root, tmp_path / "backup", keys, NONCE)
    assert (done.entries, done.epoch) == (0, 2)
    with wide.runtime() as runtime:
        assert not wide.grant(runtime, "early"), "nothing is granted before the lost is spent"
    made = restore.recover(SiteDirectory(wide.root), shared)
    assert made.full == ("site-b/k",)
    assert all(used(wide.root)[name] >= owed[name] for name in owed)
    assert audited(wide.root).epoch == 2
    with wide.runtime() as runtime:
        assert not wide.grant(runtime, "k-again", K5, "ksame")
        assert wide.grant(runtime, "dp-again"), "what is left is granted again"


def test_an_export_of_before_the_site_joined_is_not_believed(tmp_path: Path) -> None:
    with Federation(tmp_path / "fed") as fed:
        fed.join("site-c")
        early = export_file(fed.home.ledger, fed.store.origin, fed.home.ledger_key())
        ward = Ward(fed, fed.join("site-a"))
        backup(ward.site.home, tmp_path / "backup")
        keys = ward.lose(tmp_path / "gone")
        restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
        with pytest.raises(SiteConfigError, match="before this site was enrolled"):
            restore.recover(SiteDirectory(ward.root), early)
        assert restore.recover(SiteDirectory(ward.root), ward.shared()).lost == 0


def test_a_site_that_is_not_enrolled_has_no_backup_that_could_give_it_a_second_budget(tmp_path: Path) -> None:
    home = create(tmp_path / "site-a", SETTINGS.format(site="site-a", listen="127.0.0.1:1"), policy())
    with pytest.raises(SiteConfigError, match="not enrolled yet"):
        backup(home, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    backup(home, tmp_path / "backup", upgrading=True)
    keys = backup_commands.backups.private_of(files_of(home.keys))
    with pytest.raises(BackupError, match="from before this site was enrolled"):
        restore.restore(tmp_path / "again", tmp_path / "backup", keys, NONCE)
    assert not (tmp_path / "again").exists()


def brought_back(ward: Ward, folder: Path, nonce: str) -> None:
    """The coordinator is lost, too, and serves again from that backup."""
    home = ward.fed.home
    keys = coordinator_backup.private_of(files_of(home.keys))
    ward.fed.__exit__(None, None, None)
    home.root.rename(home.root.with_name(f"lost-{nonce[:4]}"))
    coordinator_backup.restore(home.root, folder, keys, nonce)
    ward.fed.__enter__()


def reachable(ward: Ward) -> None:
    """The coordinator's port is another one after each start."""
    toml = ward.root / "site.toml"
    toml.write_text(re.sub(r"127\.0\.0\.1:[0-9]+", f"127.0.0.1:{ward.fed.port}", toml.read_text()))


def test_a_coordinator_that_was_itself_brought_back_meanwhile_is_not_believed(ward: Ward, tmp_path: Path) -> None:
    """Its export is whole and true, and lacks what both had lost."""
    backup(ward.site.home, tmp_path / "backup")
    coordinator_backup.backup(ward.fed.home, tmp_path / "theirs")
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "k", K5, "ksame")
        assert ward.grant(runtime, "dp")
    keys, whole = ward.lose(tmp_path / "gone"), ward.shared()
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    brought_back(ward, tmp_path / "theirs", "ef" * 16)
    reachable(ward)
    with pytest.raises(SiteConfigError, match=r"itself restored.*--spend-everything"):
        restore.recover(SiteDirectory(ward.root), ward.shared())
    with ward.runtime() as runtime:
        sync_with_coordinator(
            runtime
        )  # its certificate is looked after, and it does not say that it has shown everything
        assert ward.fed.store.state.sites_awaited == {"site-a"}
        assert not ward.grant(runtime, "early")
    again = ward.shared()
    with pytest.raises(SiteConfigError, match="itself restored"):
        restore.recover(SiteDirectory(ward.root), again)
    backup(
        SiteDirectory(ward.root), tmp_path / "second"
    )  # its watch/ has met the new epoch; the first backup had not
    ward.lose(tmp_path / "gone-again")
    restore.restore(ward.root, tmp_path / "second", keys, "cd" * 16)
    with pytest.raises(SiteConfigError, match="itself restored"):
        restore.recover(SiteDirectory(ward.root), again)
    ward.root.rename(tmp_path / "gone-thrice")
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    assert restore.recover(SiteDirectory(ward.root), whole).lost == 2, (
        "an export of before that knows what was granted"
    )


def test_a_coordinator_that_still_awaits_this_sites_receipts_is_not_believed(ward: Ward, tmp_path: Path) -> None:
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "before")
    coordinator_backup.backup(ward.fed.home, tmp_path / "theirs")
    brought_back(ward, tmp_path / "theirs", "ef" * 16)
    reachable(ward)
    with ward.runtime() as runtime:
        runtime.gateway.hello()  # it has met the new epoch, and shown nothing yet
        assert runtime.watch.must_present
    backup(ward.site.home, tmp_path / "backup")
    keys = ward.lose(tmp_path / "gone")
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    assert ward.fed.store.state.sites_awaited == {"site-a"}
    with pytest.raises(SiteConfigError, match="itself restored"):
        restore.recover(SiteDirectory(ward.root), ward.shared())
    assert set(spend_all_grants(SiteDirectory(ward.root)).full) == {"site-a/k", "site-a/rdp"}


def test_a_site_that_met_the_coordinators_new_epoch_before_its_backup_recovers_as_ever(
    ward: Ward, tmp_path: Path
) -> None:
    coordinator_backup.backup(ward.fed.home, tmp_path / "theirs")
    brought_back(ward, tmp_path / "theirs", "ef" * 16)
    reachable(ward)
    with ward.runtime() as runtime:
        sync_with_coordinator(runtime)
    backup(ward.site.home, tmp_path / "backup")
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "lost")
    keys = ward.lose(tmp_path / "gone")
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    assert restore.recover(SiteDirectory(ward.root), ward.shared()).lost == 1


def test_without_an_export_everything_is_spent(ward: Ward, tmp_path: Path) -> None:
    backup(ward.site.home, tmp_path / "backup")
    keys = ward.lose(tmp_path / "gone")
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    made = spend_all_grants(SiteDirectory(ward.root))
    assert set(made.full) == {"site-a/k", "site-a/rdp"}
    found = audited(ward.root)
    assert all(a["spent"] >= a["limit"] for a in found.accounts.values())
    with ward.runtime() as runtime:
        assert not ward.grant(runtime, "after")


def test_a_recovery_that_is_interrupted_goes_on_and_counts_each_grant_once(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup(ward.site.home, tmp_path / "backup")
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "k", K5, "ksame")
        assert ward.grant(runtime, "dp")
    keys, shared, owed = ward.lose(tmp_path / "gone"), ward.shared(), used(tmp_path / "gone")
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    take, taken = restore.decisions.recover_grant, []

    def dies(*words: Any) -> bool:
        if taken:
            raise KeyboardInterrupt
        taken.append(words[1])
        return take(*words)

    with monkeypatch.context() as patch:
        patch.setattr(restore.decisions, "recover_grant", dies)
        with pytest.raises(KeyboardInterrupt):
            restore.recover(SiteDirectory(ward.root), shared)
    with ward.runtime() as runtime:
        assert not ward.grant(runtime, "between")
    made = restore.recover(SiteDirectory(ward.root), shared)
    assert made.lost == 2
    assert used(ward.root) == owed
    entries = [line.record.entry for line in lines(open_read_only(ward.root / "ledger.db"))]
    assert sum(isinstance(entry, Recovered) for entry in entries) == 2


def test_only_the_coordinators_own_whole_and_newer_ledger_is_believed(ward: Ward, tmp_path: Path) -> None:
    early = ward.shared()
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "one")
        backup(ward.site.home, tmp_path / "backup")
        assert ward.grant(runtime, "two")
    keys, good = ward.lose(tmp_path / "gone"), ward.shared()
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    with Federation(tmp_path / "other") as other:
        other.join("site-a")
        foreign = export_file(other.home.ledger, other.store.origin, other.home.ledger_key())
    text = good.split(b"\n")
    bad = {
        "of before the backup": early,
        "of another coordinator": foreign,
        "of the site itself": export_file(
            ward.root / "ledger.db", "lazaret/site-a", SiteDirectory(ward.root).sign_key()
        ),
        "without its last entry": b"\n".join([*text[:2], b"entries %d" % (int(text[2].split()[1]) - 1), *text[3:]]),
        "cut": good[:-40],
        "nothing": b"",
    }
    for what, raw in bad.items():
        with pytest.raises(SiteConfigError, match="export"):
            restore.recover(SiteDirectory(ward.root), raw)
        with ward.runtime() as runtime:
            assert not ward.grant(runtime, f"x-{len(what)}"), what
    assert restore.recover(SiteDirectory(ward.root), good).lost == 1


def test_a_policy_that_was_signed_after_the_backup_binds_again(ward: Ward, tmp_path: Path) -> None:
    backup(ward.site.home, tmp_path / "backup")
    with ward.runtime() as runtime:
        text = policy(epsilon="0.5")
        said = Amendment("site-a", 1, text)
        sealed = runtime.site.seal(said)
        assert runtime.site.ledger.amend("amend-1", said, sealed).admitted
        assert runtime.gateway.amend("amend-1", sealed).admitted
    keys, shared = ward.lose(tmp_path / "gone"), ward.shared()
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    assert restore.recover(SiteDirectory(ward.root), shared).amended
    with ward.runtime() as runtime:
        assert runtime.site.ledger.policy_of("site-a").epsilon == 0.5


# -- the backup itself


def test_a_backup_that_is_made_while_the_site_works_fits_together(ward: Ward, tmp_path: Path) -> None:
    """The vault remembers how long the ledger was: a copy in which it is ahead could not be opened."""
    stop, wrong, written = threading.Event(), [], threading.Event()

    def work() -> None:
        try:
            with ward.runtime() as runtime:
                n = 0
                while not stop.is_set():
                    n += 1
                    said = ward.site.hospital.reservation(f"g{n}", SMALL, "federated", f"run-{n}")
                    runtime.site.ledger.reserve(f"reserve-{said.grant}", said, runtime.site.seal(said))
                    runtime.vault.write_note("ledger", runtime.site.ledger.store.state.size)
                    written.set()
                    stop.wait(0.002)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test fails by it
            wrong.append(error)

    keys = backup_commands.backups.private_of(files_of(ward.root / "keys"))
    worker = threading.Thread(target=work)
    worker.start()
    try:
        made = []
        for n in range(4):
            written.clear()
            assert written.wait(60), "it works, also between two backups"
            made.append(backup(ward.site.home, tmp_path / f"backup-{n}"))
    finally:
        stop.set()
        worker.join()
    assert not wrong
    assert made[-1].entries > made[0].entries
    for n, one in enumerate(made):
        root = tmp_path / f"again-{n}" / "site-a"
        done = restore.restore(root, tmp_path / f"backup-{n}", keys, NONCE)
        assert done.entries == one.entries
        public = SiteDirectory(root).sign_key().public_key().public_bytes_raw()
        assert open_checkpoint(one.manifest.checkpoint, public).size == done.entries


@pytest.mark.parametrize("medium", ["of before a renewal", "of before there was a way back"])
def test_a_copy_of_the_keys_from_before_the_last_renewal_restores_the_site(
    ward: Ward, tmp_path: Path, medium: str
) -> None:
    keys = backup_commands.backups.private_of(files_of(ward.root / "keys"))
    if medium == "of before there was a way back":
        del keys["return.pem"]
    with ward.runtime() as runtime:
        assert runtime.gateway.renew(dt.datetime.now(dt.UTC) + dt.timedelta(hours=20), 0.0)
    assert keys["tls.pem"] != (ward.root / "keys" / "tls.pem").read_bytes()
    backup(ward.site.home, tmp_path / "backup")
    ward.lose(tmp_path / "gone")
    assert restore.restore(ward.root, tmp_path / "backup", keys, NONCE).epoch == 2


def test_no_key_and_no_patient_is_in_a_backup(ward: Ward, tmp_path: Path) -> None:
    backup(ward.site.home, tmp_path / "backup")
    raw = b"".join(p.read_bytes() for p in (tmp_path / "backup").rglob("*") if p.is_file())
    secrets = backup_commands.backups.private_of(files_of(ward.root / "keys"))
    assert {"sign.key", "vault.key", "deidentify.key", "node.key", "projects/main/key", "tls.pem"} <= set(secrets)
    for name, body in secrets.items():
        lines_of = [line for line in body.split(b"\n") if len(line) > 30 and not line.startswith(b"-----")]
        certificate = name in ("tls.pem", "return.pem")  # the key comes first; its certificate is public
        assert not any(line in raw for line in lines_of[: 2 if certificate else None]), name
    listed = read((tmp_path / "backup"), ward.site.home.sign_key().public_key().public_bytes_raw()).keys
    assert listed["sign.key"] == key_mark(secrets["sign.key"]), "but which keys belong to it is told"
    assert not any(f"{n + 1:031x}f".encode() in raw for n in range(6)), "pseudonyms are sealed in the vault"


def test_keys_travel_in_a_box_when_asked_and_open_with_the_passphrase_alone(ward: Ward, tmp_path: Path) -> None:
    made = backup(ward.site.home, tmp_path / "backup", PASSPHRASE)
    assert made.keys
    secrets = backup_commands.backups.private_of(files_of(ward.root / "keys"))
    box = (tmp_path / "backup" / "keys.box").read_bytes()
    assert key_archive.open_files(box, PASSPHRASE) == secrets
    raw = b"".join(p.read_bytes() for p in (tmp_path / "backup").rglob("*") if p.is_file())
    assert secrets["vault.key"] not in raw


def test_other_or_missing_keys_restore_nothing(ward: Ward, tmp_path: Path) -> None:
    backup(ward.site.home, tmp_path / "backup")
    keys = ward.lose(tmp_path / "gone")
    with Federation(tmp_path / "other") as other:
        strange = backup_commands.backups.private_of(files_of(other.join("site-a").home.keys))
    bad = {
        "not signed by these keys": {**keys, "sign.key": strange["sign.key"]},
        "these keys differ": {**keys, "vault.key": os.urandom(32)},
        "missing among the keys: deidentify.key": {n: b for n, b in keys.items() if n != "deidentify.key"},
        "sign.key is missing among": {n: b for n, b in keys.items() if n != "sign.key"},
    }
    for words, given in bad.items():
        with pytest.raises((BackupError, SiteConfigError), match=words):
            restore.restore(ward.root, tmp_path / "backup", given, NONCE)
        assert not ward.root.exists()
        assert not ward.root.with_name("site-a.restoring").exists()


def test_a_home_that_is_there_is_never_written_over(ward: Ward, tmp_path: Path) -> None:
    backup(ward.site.home, tmp_path / "backup")
    keys = backup_commands.backups.private_of(files_of(ward.root / "keys"))
    before = {p: p.read_bytes() for p in ward.root.rglob("*") if p.is_file()}
    with pytest.raises(SiteConfigError, match="not empty"):
        restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    assert {p: p.read_bytes() for p in ward.root.rglob("*") if p.is_file()} == before


def test_a_killed_restore_leaves_no_site_and_is_done_again(tmp_path: Path) -> None:
    with Federation(tmp_path / "fed") as fed:  # closed before a child is forked: gRPC has threads
        ward = Ward(fed, fed.join("site-a"))
        backup(ward.site.home, tmp_path / "backup")
        keys = ward.lose(tmp_path / "gone")
    for point in ("copy_files", "_new_epoch", "_settled"):
        child = os.fork()
        if not child:
            setattr(restore, point, lambda *_: os._exit(9))
            with contextlib.suppress(BaseException):
                restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert not ward.root.exists(), "half a site has no name"
    assert restore.restore(ward.root, tmp_path / "backup", keys, NONCE).entries == 0


def test_a_project_that_ended_stays_ended_and_one_whose_key_is_lost_is_told(ward: Ward, tmp_path: Path) -> None:
    home = ward.site.home
    for name in ("lung", "brain"):
        projects.create(home, name)
        projects.open_vault(home, name).close()
    medium = backup_commands.backups.private_of(files_of(home.keys))  # of a day when lung had not ended
    projects.end(home, "lung")
    backup(home, tmp_path / "backup")
    ward.lose(tmp_path / "gone")
    del medium["projects/brain/key"]
    done = restore.restore(ward.root, tmp_path / "backup", medium, NONCE)
    assert done.gone == ("brain",)
    assert projects.names(SiteDirectory(ward.root)) == ("main",)
    assert not (ward.root / "keys" / "projects" / "lung" / "key").exists()
    with pytest.raises(projects.ProjectError, match="has ended"):
        projects.create(SiteDirectory(ward.root), "lung")


def test_what_waited_for_persons_does_not_come_back(ward: Ward, tmp_path: Path) -> None:
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "waits", K5, "ksame")
        runtime.vault.write_note("pending", {"release-x": {"grant": "waits"}})
        runtime.vault.site_place("kept/release-x/artifact").write(b"a made set")
    backup(ward.site.home, tmp_path / "backup")
    keys, shared = ward.lose(tmp_path / "gone"), ward.shared()
    done = restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    assert done.closed == 1
    with contextlib.closing(SiteDatabase(ward.root / "vault.db", keys["vault.key"])) as notes:
        assert notes.note("pending") == {}
        assert EncryptedCheckpointStore(notes, "site/kept/release-x/artifact").read() is None, (
            "nothing private outlives its use"
        )
        assert notes.note("restored")["unsure"], "it may have left after the backup: whose pictures it showed is open"
    assert restore.recover(SiteDirectory(ward.root), shared).lost == 0


@pytest.mark.parametrize("what", ["vault.db", "ledger.db"])
def test_nothing_is_made_good_where_ledger_or_vault_was_lost_again(ward: Ward, tmp_path: Path, what: str) -> None:
    """An empty vault in its place would say that nobody was released, and then match."""
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "early", K5, "ksame")
    backup(ward.site.home, tmp_path / "backup")
    keys, shared = ward.lose(tmp_path / "gone"), ward.shared()
    restore.restore(ward.root, tmp_path / "backup", keys, NONCE)
    for suffix in ("", "-wal", "-shm"):
        (ward.root / f"{what}{suffix}").unlink(missing_ok=True)
    if what == "ledger.db":
        with pytest.raises(LedgerTurnedBackError, match=r"ledger\.mark exists"):
            restore.recover(SiteDirectory(ward.root), shared)
        for name in ("ledger.db", "ledger.mark"):  # and the mark, too: the vault knows
            (ward.root / name).unlink()
    for act in (
        lambda: restore.recover(SiteDirectory(ward.root), shared),
        lambda: spend_all_grants(SiteDirectory(ward.root)),
    ):
        with pytest.raises(
            SiteConfigError, match=r"vault\.db is missing|ledger\.db is older than this vault, or missing"
        ):
            act()
    assert what == "ledger.db" or not (ward.root / "vault.db").exists()


@pytest.mark.parametrize("text", ['# password = "hunter2"', "url = 'https://me:hunter2@pacs.example'"])
def test_no_password_is_in_a_sites_backup_in_clear(ward: Ward, tmp_path: Path, text: str) -> None:
    (ward.root / "ingest.toml").write_text(text + "\n")
    with pytest.raises(SiteConfigError, match=r"ingest\.toml contains a password") as told:
        backup(ward.site.home, tmp_path / "backup")
    assert "hunter2" not in str(told.value)
    assert not list(tmp_path.glob("backup*"))


# -- the commands


def typed(root: Path, *words: str) -> int:
    return main(["--home", str(root), *words])


def test_the_commands_lead_from_a_backup_to_a_site_that_works(
    ward: Ward, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words").write_text(PASSPHRASE + "\n")
    assert typed(ward.root, "upgrade", "--check") == 0
    assert typed(ward.root, "backup", str(tmp_path / "bare")) == 0
    assert "it contains no keys" in capsys.readouterr().out
    sealed = ["--passphrase-file", str(tmp_path / "words")]
    assert typed(ward.root, "backup", str(tmp_path / "full"), "--with-keys", *sealed) == 0
    assert "destroy this backup" in capsys.readouterr().out
    assert typed(ward.root, "backup", str(tmp_path / "full")) == 1
    assert "a new folder" in capsys.readouterr().err
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "lost")
    ward.lose(tmp_path / "gone")
    (tmp_path / "shared.export").write_bytes(ward.shared())
    assert typed(ward.root, "restore", str(tmp_path / "bare")) == 1
    assert "give --keys" in capsys.readouterr().err
    shutil.copytree(tmp_path / "gone" / "keys", tmp_path / "medium")
    assert typed(ward.root, "restore", str(tmp_path / "bare"), "--keys", str(tmp_path / "medium")) == 0
    out = capsys.readouterr().out
    assert "epoch 2" in out
    assert "recover --shared" in out
    assert "opt-out" in out
    assert typed(ward.root, "recover", "--shared", str(tmp_path / "shared.export")) == 0
    assert "1 grant(s)" in capsys.readouterr().out
    ward.root.rename(tmp_path / "gone-again")
    shared = ["--shared", str(tmp_path / "shared.export")]
    assert typed(ward.root, "restore", str(tmp_path / "full"), *sealed, *shared) == 0
    assert "1 grant(s)" in capsys.readouterr().out
    with ward.runtime() as runtime:
        assert ward.grant(runtime, "after")


def test_a_wrong_passphrase_and_a_damaged_vault_are_told(
    ward: Ward, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words").write_text(PASSPHRASE)
    (tmp_path / "others").write_text("another passphrase")
    assert (
        typed(ward.root, "backup", str(tmp_path / "b"), "--with-keys", "--passphrase-file", str(tmp_path / "words"))
        == 0
    )
    ward.lose(tmp_path / "gone")
    assert typed(ward.root, "restore", str(tmp_path / "b"), "--passphrase-file", str(tmp_path / "others")) == 1
    assert "passphrase is wrong" in capsys.readouterr().err
    assert not ward.root.exists()
    with pytest.raises(KeyArchiveError):
        key_archive.seal_files({"a": b"b"}, "short")
    assert issubclass(VaultError, Exception)


def test_a_restored_site_is_told_what_its_own_ledger_lost_beside_grants(
    ward: Ward, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``recover`` brings grants back, out of the coordinator's ledger, and no decision of this site's persons."""
    first, second, local = Person("dpo-1", "compliance"), Person("dpo-2", "compliance"), Person("head-1", "hospital")

    def decide(store: Store, serial: str, *words: str) -> None:
        for person in (first, local):
            decisions.approve(store, person.approval(serial, *words, store.origin))

    with ward.runtime() as runtime:
        store = runtime.site.ledger.store
        for person in (first, local):
            decisions.appoint(store, person.name, person.role, person.public)
        decide(store, "new", "appoint", "dpo-2", f"compliance {second.public.hex()}")
        decisions.appoint(store, "dpo-2", "compliance", second.public, "new")
        backup(ward.site.home, tmp_path / "backup")
        fork = export_file(ward.root / "ledger.db", store.origin, ward.site.home.sign_key())
        decide(store, "low", "limit", "site-a/rdp", "0.5")
        decisions.set_limit(store, "site-a/rdp", "0.5", "low")
        decide(store, "go", "dismiss", "dpo-2", "compliance")
        decisions.dismiss(store, "dpo-2", "go")
        at = format_time(store.line(len(Export.parse(fork).entries) - 1).record.at)
    last = export_file(ward.root / "ledger.db", "lazaret/site-a", ward.site.home.sign_key())
    (tmp_path / "last").write_bytes(last)
    (tmp_path / "shared").write_bytes(ward.shared())
    (tmp_path / "another").write_bytes(ward.shared())
    ward.lose(tmp_path / "gone")
    words = ("restore", str(tmp_path / "backup"), "--keys", str(tmp_path / "gone" / "keys"))
    assert typed(ward.root, *words, "--last", str(tmp_path / "another")) == 1
    assert "nothing was restored" in capsys.readouterr().err
    assert not ward.root.exists()
    assert typed(ward.root, *words) == 0
    said = capsys.readouterr().out
    assert "lowered limit and stricter policy" in said
    assert at in said
    shutil.rmtree(ward.root)
    more = ("--shared", str(tmp_path / "shared"), "--json")
    assert typed(ward.root, *words, "--last", str(tmp_path / "last"), *more) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["what"] for one in document["undone"]] == [
        "limit of site-a/rdp lowered to 0.5",
        "dpo-2 dismissed",
    ]
    assert document["undone"][0]["by"] == ["dpo-1 (compliance)", "head-1 (hospital)"]


def test_a_backup_of_before_the_first_desk_lists_all_that_was_ever_made_stricter(wide: Ward, tmp_path: Path) -> None:
    """It has no ledger, so the accounts that it founds are the ones to compare with."""
    backup(wide.site.home, tmp_path / "backup")
    local = Person("head-1", "hospital")
    with wide.runtime() as runtime:
        store = runtime.site.ledger.store
        decisions.appoint(store, "head-1", "hospital", local.public)
        decisions.approve(store, local.approval("low", "limit", "site-b/k", "1", store.origin))
        decisions.set_limit(store, "site-b/k", "1", "low")
    last = export_file(wide.root / "ledger.db", "lazaret/site-b", wide.site.home.sign_key())
    done = restore.restore(wide.root, tmp_path / "backup", wide.lose(tmp_path / "gone"), NONCE, last)
    assert (done.entries, done.last) == (0, 0)
    assert done.lost is not None
    assert [one.what for one in done.lost.undone] == [
        "head-1 appointed as the first hospital",
        "limit of site-b/k lowered to 1",
    ]
