"""A coordinator whose ledger is behind what it acknowledged is frozen; only a restore, in a new epoch, goes on."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.errors import CoordinatorUnreachableError
from agent.gateway.client import GatewayClient
from agent.gateway.credentials import Credentials
from agent.gateway.witness import LedgerWitness
from coordinator.cli.main import main
from coordinator.operations import doctor
from coordinator.operations.backup import backup, private_of, restore
from coordinator.storage.directory import CoordinatorDirectory, open_ledger
from policies.accounting.claims import SubsampledGaussian
from policies.ledger.backends.sqlite import backup_file, open_read_only
from policies.ledger.store import LedgerTurnedBackError, LedgerUnsoundError
from protos.encryption.key_archive import files_of
from tests.support.federation_world import Federation, Site, pictures
from tests.support.rolled_back_ledgers import damaged_logs, marked_as_it_is

SMALL = SubsampledGaussian(0.01, 8.0, 1)
NONCE = "ab" * 16


@pytest.fixture
def fed(tmp_path: Path) -> Federation:
    """Served for a while: a backup, then a head that the site cosigned, and a release on the shelf; and stopped."""
    with Federation(tmp_path / "fed") as made:
        site = made.join("site-a")
        backup_file(made.home.ledger, tmp_path / "early.db")
        site.reserved("k")
        backup_file(made.home.ledger, tmp_path / "reserved.db")
        artifact = pictures()
        release = site.release("k", artifact)
        assert site.gateway().submit(f"submit-{release.release}", site.seal(release), artifact).admitted
        backup_file(made.home.ledger, tmp_path / "admitted.db")
        gateway = site.gateway()
        site.reserved("late", SMALL, "federated", "run")
        gateway.hello()
        gateway.hello(gateway.watch.cosigned("site-a", site.home.sign_key(), 1_700_000_000))
    return made


def bring(fed: Federation, copy: Path) -> None:
    """Put a copy in the ledger's place."""
    for path in fed.home.root.glob("ledger.db*"):
        path.unlink()
    shutil.copy(copy, fed.home.ledger)


def said(home: CoordinatorDirectory) -> str:
    found = {f.name: f.said for f in doctor.findings(home, dt.datetime.now(dt.UTC)) if f.state == "fail"}
    return found.get(doctor._WHOLE, "")


def test_a_stopped_coordinator_opens_and_doctor_is_content_also_while_it_is_open(fed: Federation) -> None:
    assert said(fed.home) == ""
    (found,) = (f for f in doctor.findings(fed.home, dt.datetime.now(dt.UTC)) if f.name == doctor._WHOLE)
    held = "compared with its mark and 1 cosigned head and 1 release in the release store"
    assert (found.state, found.said) == ("pass", held)
    with open_ledger(fed.home):
        assert said(fed.home) == ""


def test_each_witness_alone_freezes_an_older_ledger_and_doctor_says_which(fed: Federation, tmp_path: Path) -> None:
    mark, notes, shelf = fed.home.root / "ledger.mark", fed.home.witnesses, fed.home.releases
    bring(fed, tmp_path / "reserved.db")
    with pytest.raises(LedgerTurnedBackError, match="high-water mark"):
        open_ledger(fed.home)
    assert "high-water mark" in said(fed.home)
    marked_as_it_is(fed.home.ledger)
    with pytest.raises(LedgerTurnedBackError, match=r"witnesses/site-a\.note is this ledger's own head"):
        open_ledger(fed.home)
    assert "site-a.note" in said(fed.home)
    notes.rename(tmp_path / "notes")
    with pytest.raises(LedgerTurnedBackError, match=r"releases/.* was admitted, and is not in the ledger.*`restore`"):
        open_ledger(fed.home)
    assert "was admitted" in said(fed.home)
    shelf.rename(tmp_path / "shelf")
    assert said(fed.home) == ""
    with open_ledger(fed.home):  # a whole machine turned back: the sites have to notice
        pass
    assert mark.exists()


def test_what_is_evidence_and_cannot_be_read_is_a_refusal(fed: Federation) -> None:
    note = fed.home.witnesses / "site-a.note"
    whole = note.read_bytes()
    for damaged in (b"", whole[:40], whole.replace(b"\n", b"\r\n"), b"\xff" + whole):
        note.write_bytes(damaged)
        with pytest.raises(LedgerUnsoundError, match=r"site-a\.note cannot be read"):
            open_ledger(fed.home)
    note.write_bytes(whole)
    (envelope,) = fed.home.releases.glob("[!.]*/envelope.json")
    envelope.write_bytes(envelope.read_bytes() + b" ")
    with pytest.raises(LedgerTurnedBackError, match="releases/"):
        open_ledger(fed.home)


def test_a_frozen_coordinator_ends_with_70_and_says_what_to_do(
    fed: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bring(fed, tmp_path / "early.db")
    words = [sys.executable, "-m", "coordinator", "--home", str(fed.home.root), "serve"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 70
    assert "frozen" in ended.stderr
    assert "`restore`" in ended.stderr
    assert main(["--home", str(fed.home.root), "ledger", "waive", "site-a", "--serial", "s"]) == 70
    assert "frozen" in capsys.readouterr().err


def test_restore_goes_on_where_the_copy_alone_does_not_and_sets_aside_what_is_of_after(
    fed: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bring(fed, tmp_path / "reserved.db")
    assert main(["--home", str(fed.home.root), "ledger", "restore", "--yes"]) == 0
    assert "set aside" in capsys.readouterr().out
    assert not list(fed.home.releases.glob("[!.]*"))
    assert len(list(fed.home.releases.glob(".*.before-2-*"))) == 1
    assert not list(fed.home.witnesses.glob("*.note"))
    with open_ledger(fed.home) as store:
        assert (store.state.epoch, store.state.sites_awaited) == (2, {"site-a"})
    assert said(fed.home) == ""
    with contextlib.closing(open_read_only(fed.home.ledger)) as disk:
        size = disk.head().size  # type: ignore[union-attr]
    bring(fed, tmp_path / "admitted.db")  # longer than what was restored, and of the epoch before
    with contextlib.closing(open_read_only(fed.home.ledger)) as disk:
        assert disk.head().size >= size  # type: ignore[union-attr]
    with pytest.raises(LedgerTurnedBackError):
        open_ledger(fed.home)


def test_a_backup_comes_back_past_the_old_mark_and_a_copy_of_its_file_does_not(
    fed: Federation, tmp_path: Path
) -> None:
    backup(fed.home, tmp_path / "backup")
    keys = private_of(files_of(fed.home.keys))
    with open_ledger(fed.home) as store:
        store.restore("cd" * 16)
    bring(fed, tmp_path / "backup" / "ledger.db")
    with pytest.raises(LedgerTurnedBackError):
        open_ledger(fed.home)
    fed.home.root.rename(tmp_path / "gone")
    shutil.copytree(tmp_path / "backup", fed.home.root)  # by hand, keys and all: no mark came with it
    shutil.copytree(tmp_path / "gone" / "keys", fed.home.keys, dirs_exist_ok=True)
    with pytest.raises(LedgerUnsoundError, match=r"ledger\.mark\) is missing"):
        open_ledger(fed.home)
    shutil.rmtree(fed.home.root)
    assert restore(fed.home.root, tmp_path / "backup", keys, NONCE).epoch == 2
    with open_ledger(fed.home) as store:
        assert store.state.nonce == NONCE
        assert len(store.state.releases) == len(list(fed.home.releases.glob("[!.]*"))) == 1


def test_a_release_that_was_admitted_while_the_backup_was_made_stops_no_restore(
    fed: Federation, tmp_path: Path
) -> None:
    """The ledger is of one moment, and the shelf is copied after it."""
    shutil.copy(tmp_path / "reserved.db", tmp_path / "moment.db")
    backup(fed.home, tmp_path / "backup")
    keys = private_of(files_of(fed.home.keys))
    bring(fed, tmp_path / "moment.db")
    marked_as_it_is(fed.home.ledger)
    early = CoordinatorDirectory(Path(shutil.copytree(fed.home.root, tmp_path / "early")))
    backup(early, tmp_path / "mixed")
    fed.home.root.rename(tmp_path / "gone")
    done = restore(fed.home.root, tmp_path / "mixed", keys, NONCE)
    assert len(done.aside) == 1
    with open_ledger(fed.home):
        pass


# -- a real coordinator, killed under load


def loaded(site: Site, port: int, name: str, acknowledged: list[int], stop: threading.Event) -> None:
    """Ask for one grant after the other, and write down the size of the ledger that each answer proved."""
    watch = LedgerWitness(site.home.root / f"watch-{name}", site.home.coordinator_key())
    gateway = GatewayClient(f"127.0.0.1:{port}", Credentials(site.home.keys), watch, 0.0)
    with contextlib.closing(gateway), contextlib.suppress(CoordinatorUnreachableError):
        n = 0
        while not stop.is_set():
            said = site.hospital.reservation(f"g-{name}-{n}", SMALL, "federated", f"run-{name}-{n}")
            gateway.reserve(f"reserve-{name}-{n}", site.seal(said))
            acknowledged.append(watch.seen)
            n += 1


@pytest.mark.slow
def test_of_ninety_damaged_logs_of_a_killed_coordinator_none_is_served_with_a_loss(tmp_path: Path) -> None:
    with Federation(tmp_path / "fed") as made:
        site = made.join("site-a")
    home = made.home
    words = [sys.executable, "-m", "coordinator", "--home", str(home.root), "serve"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(re.search(r"port (\d+)", process.stdout.readline()).group(1))  # type: ignore[union-attr]
        acknowledged, stop = [0], threading.Event()
        threads = [
            threading.Thread(target=loaded, args=(site, port, f"t{n}", acknowledged, stop), daemon=True)
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        while max(acknowledged) < 120:
            assert process.poll() is None
            threads[0].join(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        stop.set()
        for thread in threads:
            thread.join()
    log = (home.root / "ledger.db-wal").read_bytes()
    ends: dict[str, str] = {}
    for name, damaged in damaged_logs(log).items():
        copy = CoordinatorDirectory(
            Path(shutil.copytree(home.root, tmp_path / "copy", ignore=shutil.ignore_patterns("*-shm", "*-wal")))
        )
        if damaged is not None:
            (copy.root / "ledger.db-wal").write_bytes(damaged)
        try:
            with open_ledger(copy) as store:
                ends[name] = "whole" if store.state.size >= max(acknowledged) else "silent"
        except LedgerUnsoundError:
            ends[name] = "refused"
        shutil.rmtree(copy.root)
    print({end: list(ends.values()).count(end) for end in sorted(set(ends.values()))})
    assert len(ends) == 90
    assert [name for name, end in ends.items() if end == "silent"] == []
    assert list(ends.values()).count("refused") > 60
