"""The coordinator is lost and comes back: a new epoch, every site's receipts first, nothing given back."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path

import psycopg
import pytest

from agent.release.recovery import present
from coordinator.cli.main import main
from coordinator.errors import CoordinatorConfigError
from coordinator.operations.backup import backup, form, private_of, restore, upgrade
from coordinator.storage.directory import ORIGIN, CoordinatorDirectory, create, open_ledger
from policies.accounting.claims import SubsampledGaussian
from policies.audit.restore_losses import format_time, last_entry
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.backends.postgres import install
from policies.ledger.backends.schema_version import FORM
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Refused, Revoked
from policies.ledger.store import AppendRequest
from policies.ledger_service import LedgerService
from policies.review.policy import parse as parse_policy
from policies.review.policy import preset
from protos.encryption.key_archive import files_of
from protos.operations.backup import BackupError, read
from tests.support.federation_world import Federation, pictures
from tests.support.ledger_world import Hospital, Person
from tests.support.older import Older, older
from tests.support.postgres import OWNER, WRITER, throwaway
from tests.support.site_without_vault import pipeline_site

SMALL = SubsampledGaussian(0.01, 8.0, 1)
NONCE = "ab" * 16
NOW = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)


@pytest.fixture
def before(tmp_path: Path) -> Older:
    return older(tmp_path)


def exported(home: CoordinatorDirectory) -> bytes:
    return export_file(home.ledger, ORIGIN, home.ledger_key())


def test_a_backup_that_is_made_while_it_serves_comes_back_in_a_new_epoch_and_gives_nothing_back(
    tmp_path: Path,
) -> None:
    with Federation(tmp_path / "fed") as fed:
        site = fed.join("site-a")
        site.reserved("k")
        artifact = pictures()
        release = site.release("k", artifact)
        assert site.gateway().submit(f"submit-{release.release}", site.seal(release), artifact).admitted
        made = backup(fed.home, tmp_path / "backup")
        assert made.entries == fed.store.state.size
        said = site.hospital.reservation("lost", SMALL, "federated", "run")
        (tmp_path / "own").mkdir()
        held = pipeline_site(site, tmp_path / "own")
        sealed = site.seal(said)
        assert held.ledger.reserve("reserve-lost", said, sealed).admitted
        assert site.gateway().reserve("reserve-lost", sealed).admitted
        owed = fed.store.state.accounts["site-a/rdp"].held
    keys = private_of(files_of(fed.home.keys))
    fed.home.root.rename(tmp_path / "gone")
    done = restore(fed.home.root, tmp_path / "backup", keys, NONCE)
    assert (done.epoch, done.waiting, done.entries) == (2, ("site-a",), made.entries)
    assert (fed.home.releases / release.release / "images").is_dir(), "what was admitted is on the shelf again"
    with fed:
        gateway = site.gateway()
        gateway.hello()
        assert gateway.watch.must_present
        early = gateway.reserve("reserve-early", site.seal(site.hospital.reservation("early")))
        assert "frozen" in {finding.rule for finding in early.findings}
        object.__setattr__(held, "gateway", gateway)
        assert present(held, gateway.watch.head.origin, NONCE) == 1
        assert fed.store.state.accounts["site-a/rdp"].spent == owed
        assert not fed.store.state.sites_awaited
    assert verify(exported(fed.home)).epoch == 2


def test_a_backup_without_its_keys_or_with_others_or_of_a_site_restores_nothing(
    before: Older, tmp_path: Path
) -> None:
    home = CoordinatorDirectory(before.coordinator)
    backup(home, tmp_path / "backup")
    keys = private_of(files_of(home.keys))
    bad = {
        "ledger.key is missing among": {n: b for n, b in keys.items() if n != "ledger.key"},
        "these keys are missing.*intermediate.key": {n: b for n, b in keys.items() if n != "intermediate.key"},
        "or differ from those": {**keys, "tls.key": b"another"},
    }
    for words, given in bad.items():
        with pytest.raises(BackupError, match=words):
            restore(tmp_path / "again", tmp_path / "backup", given, NONCE)
        assert not (tmp_path / "again").exists()
    with pytest.raises(CoordinatorConfigError, match="not empty"):
        restore(home.root, tmp_path / "backup", keys, NONCE)
    (tmp_path / "backup" / "policy.toml").write_text("k_min = 1")
    with pytest.raises(BackupError, match="changed"):
        restore(tmp_path / "again", tmp_path / "backup", keys, NONCE)


def test_no_private_key_is_in_a_backup(before: Older, tmp_path: Path) -> None:
    home = CoordinatorDirectory(before.coordinator)
    backup(home, tmp_path / "backup")
    raw = b"".join(p.read_bytes() for p in (tmp_path / "backup").rglob("*") if p.is_file())
    assert b"PRIVATE KEY" not in raw
    listed = read(tmp_path / "backup", home.ledger_key().public_key().public_bytes_raw()).keys
    assert set(listed) == {"ledger.key", "intermediate.key", "tls.key", "operator.key"}


@pytest.mark.parametrize(
    "address",
    [
        "host=db dbname=lazaret user=writer password=hunter2",
        "host=db sslpassword=hunter2",
        "postgresql://writer:hunter2@db/lazaret",
        "postgresql://db/lazaret?user=writer&pass%77ord=hunter2",  # as libpq reads it
        "host=db password='hunter2",  # cannot be read: cannot be told
    ],
)
def test_no_password_of_the_ledgers_database_is_in_a_backup(tmp_path: Path, address: str) -> None:
    listen = f'listen = "127.0.0.1:0"\nledger = {json.dumps(address)}\n'
    home = create(tmp_path / "coordinator", listen, preset("internal"), NOW)
    with pytest.raises(CoordinatorConfigError, match=r"coordinator\.toml.*(PGPASSFILE|cannot be read)") as told:
        backup(home, tmp_path / "backup")
    assert "hunter2" not in str(told.value)
    assert not list(tmp_path.glob("backup*"))


def test_no_password_is_in_a_backup_by_an_old_copy_or_a_comment(before: Older, tmp_path: Path) -> None:
    home = CoordinatorDirectory(before.coordinator)
    (home.root / "old.toml").write_text('# ledger = "host=db password=hunter2"\n')
    with pytest.raises(CoordinatorConfigError, match=r"old\.toml holds a password"):
        backup(home, tmp_path / "backup")
    (home.root / "old.toml").write_text('# ledger = "host=db passfile=/etc/lazaret/pgpass"\n')
    assert backup(home, tmp_path / "backup").entries == 18


def test_an_older_coordinator_is_upgraded_after_a_backup_and_its_heads_stay(before: Older) -> None:
    home, told = CoordinatorDirectory(before.coordinator), list[str]()
    assert form(home) == 1
    size, root = upgrade(home, NOW, told.append)
    assert (form(home), size) == (FORM, 18)
    assert exported(home) == before.exported("coordinator")
    assert verify(exported(home), before.head("coordinator")).root == root.hex()
    made = home.root / "backups" / "before-upgrade-20261122-120000"
    assert read(made, home.ledger_key().public_key().public_bytes_raw()).ledger_form == 1
    done = restore(before.root / "again", made, private_of(files_of(home.keys)), NONCE)
    assert (done.epoch, done.waiting) == (2, ("site-a", "site-b")), "an older backup comes back upgraded"
    assert form(CoordinatorDirectory(before.root / "again")) == FORM


def test_sites_go_on_with_an_upgraded_coordinator_without_presenting_anything(before: Older) -> None:
    """An upgrade is no restore: the head that a site saw is extended, in the same epoch."""
    home = CoordinatorDirectory(before.coordinator)
    upgrade(home, NOW, lambda _text: None)
    note = (home.witnesses / "site-a.note").read_text()
    found = verify(export_file(home.ledger, ORIGIN, home.ledger_key(), (note,)), before.head("coordinator"))
    assert (found.epoch, found.witnesses) == (1, {"site-a": 18})


def test_a_ledger_in_postgresql_is_upgraded_by_its_owner_and_comes_back_with_its_database(tmp_path: Path) -> None:
    with throwaway() as server:
        install(server.dsn(OWNER), WRITER)
        listen = f'listen = "127.0.0.1:0"\nledger = {json.dumps(server.dsn(WRITER))}\n'
        home = create(tmp_path / "coordinator", listen, preset("internal"), dt.datetime.now(dt.UTC))
        with open_ledger(home) as store:
            store.append("x", AppendRequest((Refused("x", "site-a", "", "call", ["rule"], b""),)))
        with psycopg.connect(server.dsn(OWNER), autocommit=True) as db:
            db.execute("DROP TABLE lazaret_main.form")
        assert form(home) == 1
        with pytest.raises(CoordinatorConfigError, match="--owner"):
            upgrade(home, NOW, lambda _text: None)
        assert upgrade(home, NOW, lambda _text: None, server.dsn(OWNER))[0] == 1
        assert form(home) == FORM
        made = backup(home, tmp_path / "backup")
        assert (made.entries, made.manifest.ledger_form) == (1, 0)
        assert verify((tmp_path / "backup" / "ledger.export").read_bytes()).size == 1
        assert not (tmp_path / "backup" / "ledger.db").exists()
        keys = private_of(files_of(home.keys))
        home.root.rename(tmp_path / "gone")  # the database was brought back by other means
        assert restore(home.root, tmp_path / "backup", keys, NONCE).epoch == 2


# -- the commands


def typed(root: Path, *words: str) -> int:
    return main(["--home", str(root), *words])


def test_where_nobody_is_awaited_nobody_is_told_to_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "hub"
    made = create(root, 'listen = "127.0.0.1:7443"\n', preset("controlled"), NOW)
    assert typed(root, "upgrade") == 0
    assert capsys.readouterr().out == "no ledger yet; nothing to do\n"
    with open_ledger(made):
        pass
    assert typed(root, "backup", str(tmp_path / "bare")) == 0
    shutil.copytree(made.keys, tmp_path / "medium")
    root.rename(tmp_path / "gone")
    assert typed(root, "restore", str(tmp_path / "bare"), "--keys", str(tmp_path / "medium")) == 0
    said = capsys.readouterr().out
    assert "waiting for nobody" in said
    assert "receipts" not in said


def test_the_commands_tell_what_is_to_be_done(
    before: Older, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = before.coordinator
    assert typed(home, "upgrade", "--check") == 1
    assert "an upgrade is needed" in capsys.readouterr().out
    assert typed(home, "upgrade", "--json") == 0
    assert '"entries": 18' in capsys.readouterr().out
    assert typed(home, "upgrade") == 0
    assert "nothing to do" in capsys.readouterr().out
    (tmp_path / "words").write_text("four horses and a staple")
    assert typed(home, "backup", str(tmp_path / "bare")) == 0
    assert "it contains no keys" in capsys.readouterr().out
    sealed = ["--passphrase-file", str(tmp_path / "words")]
    assert typed(home, "backup", str(tmp_path / "full"), "--with-keys", *sealed) == 0
    shutil.copytree(home / "keys", tmp_path / "medium")
    home.rename(tmp_path / "gone")
    assert typed(home, "restore", str(tmp_path / "bare")) == 1
    assert "give --keys" in capsys.readouterr().err
    assert typed(home, "restore", str(tmp_path / "bare"), "--keys", str(tmp_path / "medium")) == 0
    said = capsys.readouterr().out
    assert "waiting for site-a, site-b" in said
    assert "no budget is granted until they have shown their receipts" in said
    home.rename(tmp_path / "gone-again")
    assert typed(home, "restore", str(tmp_path / "full"), *sealed) == 0
    assert "epoch 2" in capsys.readouterr().out


def stricter(home: CoordinatorDirectory, *words: Person) -> bytes:
    """After a backup: a limit is lowered, a person dismissed, a site revoked; the last export from then."""
    with open_ledger(home) as store:
        for serial, action, subject, value in (
            ("low", "limit", "site-a/rdp", "0.5"),
            ("go", "dismiss", "dpo-2", "compliance"),
        ):
            for person in words[:1] if action == "limit" else words[:2]:
                decisions.approve(store, person.approval(serial, action, subject, value, ORIGIN))
        decisions.set_limit(store, "site-a/rdp", "0.5", "low")
        decisions.dismiss(store, "dpo-2", "go")
        store.append("bar", AppendRequest((Revoked("site-b", "", "stolen"),)))
    return exported(home)


@pytest.fixture
def governed(tmp_path: Path) -> tuple[CoordinatorDirectory, tuple[Person, ...]]:
    """A coordinator with two sites and three persons in office; its ``backup`` and ``medium`` lie beside it."""
    home = create(tmp_path / "hub", 'listen = "127.0.0.1:7443"\n', preset("controlled"), NOW)
    persons = (Person("dpo-9", "compliance"), Person("head-9", "hospital"), Person("dpo-2", "compliance"))
    with open_ledger(home) as store:
        for hospital in (Hospital("site-a"), Hospital("site-b")):
            own = parse_policy(hospital.policy_text, hospital.name)
            LedgerService(store, lambda _site, own=own: own).enrol(*hospital.enrolment(), own)  # type: ignore[misc]
        for person in persons[:2]:
            decisions.appoint(store, person.name, person.role, person.public)
        for person in persons[:2]:
            words = ("new", "appoint", "dpo-2", f"compliance {persons[2].public.hex()}", ORIGIN)
            decisions.approve(store, person.approval(*words))
        decisions.appoint(store, "dpo-2", "compliance", persons[2].public, "new")
    backup(home, tmp_path / "backup")
    shutil.copytree(home.keys, tmp_path / "medium")
    return home, persons


def test_restore_says_in_plain_words_that_whatever_was_made_stricter_is_gone(
    governed: tuple[CoordinatorDirectory, tuple[Person, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, persons = governed
    with open_ledger(home) as store:
        at = format_time(last_entry(store))
    stricter(home, *persons)
    home.root.rename(tmp_path / "gone")
    assert typed(home.root, "restore", str(tmp_path / "backup"), "--keys", str(tmp_path / "medium")) == 0
    said = capsys.readouterr().out
    assert "revocation, dismissal, lowered limit and stricter policy" in said
    assert at in said
    assert "before any person approves anything" in said
    assert "--last" in said
    with open_ledger(home) as store:
        assert f"waive SITE 2-{store.state.nonce}" in said, "what is signed for a site that will not come back"
        assert not store.state.revoked_sites, "it is gone indeed"


def test_a_new_epoch_by_hand_says_the_same(
    governed: tuple[CoordinatorDirectory, tuple[Person, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    home, _ = governed
    with open_ledger(home) as store:
        at = format_time(last_entry(store))
    assert main(["--home", str(home.root), "ledger", "restore", "--yes"]) == 0
    said = capsys.readouterr().out
    assert "revocation, dismissal, lowered limit and stricter policy" in said
    assert at in said


def test_with_the_last_export_restore_lists_exactly_what_is_to_be_typed_again(
    governed: tuple[CoordinatorDirectory, tuple[Person, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, persons = governed
    (tmp_path / "last").write_bytes(stricter(home, *persons))
    home.root.rename(tmp_path / "gone")
    words = (
        "restore",
        str(tmp_path / "backup"),
        "--keys",
        str(tmp_path / "medium"),
        "--last",
        str(tmp_path / "last"),
    )
    assert typed(home.root, *words) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if " UTC  " in line]
    assert ["lowered to 0.5" in table[0], "dpo-2 dismissed" in table[1], "site-b revoked" in table[2]] == [True] * 3
    assert len(table) == 3
    home.root.rename(tmp_path / "gone-again")
    assert typed(home.root, *words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["again"][-1] for one in document["undone"]] == [
        "ledger limit site-a/rdp 0.5 --serial SERIAL",
        "ledger dismiss dpo-2 --serial SERIAL",
        "lazaret-coordinator revoke site-b --reason stolen",
    ]
    assert document["undone"][1]["by"] == ["dpo-9 (compliance)", "head-9 (hospital)"]
    assert document["epoch"] == 2


def test_an_export_that_does_not_begin_with_the_backup_restores_nothing(
    governed: tuple[CoordinatorDirectory, tuple[Person, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, persons = governed
    shutil.copytree(home.root, tmp_path / "fork")
    stricter(home, *persons)
    backup(home, tmp_path / "later")
    with open_ledger(CoordinatorDirectory(tmp_path / "fork")) as store:
        for n in range(40):
            decisions.approve(store, persons[0].approval(f"pad-{n}", "limit", "site-a/rdp", "1.0", ORIGIN))
    (tmp_path / "last").write_bytes(exported(CoordinatorDirectory(tmp_path / "fork")))
    home.root.rename(tmp_path / "gone")
    words = ("restore", str(tmp_path / "later"), "--keys", str(tmp_path / "medium"), "--last", str(tmp_path / "last"))
    assert typed(home.root, *words) == 1
    assert "nothing was restored: it does not begin with the backup's entries" in capsys.readouterr().err
    assert not home.root.exists()
    assert not home.root.with_name(home.root.name + ".restoring").exists()
