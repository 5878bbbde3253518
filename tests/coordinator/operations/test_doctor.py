"""The coordinator's doctor: green when all is well, and every fault that is planted is found."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator.errors import CoordinatorConfigError
from coordinator.operations import doctor
from coordinator.storage import directory as homes
from coordinator.storage.directory import CoordinatorDirectory
from policies.audit.auditor import SKEW
from policies.governance import decisions
from policies.ledger.backends.schema_version import FORM
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import LedgerUnsoundError, Store
from policies.ledger_service import LedgerService
from policies.review.policy import parse, preset
from protos.operations.checks import CheckResult
from protos.web.console_checks import CERTIFICATE, SECRET
from tests.support.answering import answering
from tests.support.federation_world import Federation
from tests.support.ledger_world import Hospital, Person
from tests.support.older import older
from tests.support.ports import free_port
from tests.support.postgres import OWNER, WRITER, throwaway
from tests.support.tcp_proxy import wait_until


def right_now() -> dt.datetime:
    """Not the time at which this file was collected: a ledger that is written since then lies in its future."""
    return dt.datetime.now(dt.UTC)


@pytest.fixture
def home(tmp_path: Path) -> CoordinatorDirectory:
    made = homes.create(tmp_path / "hub", f'listen = "127.0.0.1:{free_port()}"\n', preset("controlled"), right_now())
    with homes.open_ledger(made):
        pass
    shutil.rmtree(made.root / "offline")
    return made


def wrong(home: CoordinatorDirectory) -> dict[str, str]:
    return {finding.name: finding.said for finding in doctor.findings(home, right_now()) if finding.state == "fail"}


def test_a_fresh_coordinator_whose_root_is_away_is_green(
    home: CoordinatorDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wrong(home) == {}
    arguments = argparse.Namespace(home=home.root, json=False)
    assert doctor.doctor(arguments) == 0
    text = capsys.readouterr().out
    assert "0 failed" in text
    assert str(home.root) not in text
    arguments.json = True
    assert doctor.doctor(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("serve` is not running" in said for said in told.pop("notes").values())
    assert set(told.values()) == {None}


def test_a_root_key_that_lies_on_the_machine_is_a_fault(
    home: CoordinatorDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.root / "offline").mkdir(mode=0o700)
    (home.root / "offline" / "root.key").write_text("x")
    assert set(wrong(home)) == {"the root's key is away"}
    assert doctor.doctor(argparse.Namespace(home=home.root, json=False)) == 1
    assert "fix: move offline/" in capsys.readouterr().out


def test_everything_that_is_wrong_is_told_at_once(home: CoordinatorDirectory) -> None:
    (home.keys / "ledger.key").chmod(0o644)
    (home.root / "policy.toml").unlink()
    (home.root / "log.toml").write_text("keep = 0\n")
    (home.root / "console.toml").write_text("listen = 3\n")
    (home.keys / "intermediate.crt").write_text("no certificate")
    (home.root / "ledger.db").unlink()
    names = {
        "policy.toml",
        "keys are private",
        "the certificate of intermediate",
        "the ledger can be read",
        "console.toml",
        "the log's collector answers",
    }
    assert names <= set(wrong(home))


def test_a_ledger_that_serve_would_refuse_is_a_fault_before_serve_is_started(
    home: CoordinatorDirectory, tmp_path: Path
) -> None:
    name = "forms of the databases"
    found = {
        finding.name: finding
        for finding in doctor.findings(CoordinatorDirectory(older(tmp_path / "old").coordinator), right_now())
    }
    assert found[name].said == f"ledger: form 1 of {FORM}: `serve` refuses it"
    assert "run `upgrade`" in found[name].fix
    assert name not in wrong(home)
    with sqlite3.connect(home.ledger) as newer:
        newer.execute("UPDATE form SET version_num = ?", (str(FORM + 1),))
    assert "a newer version has upgraded it" in wrong(home)[name]
    home.ledger.unlink()
    (none,) = doctor._forms(home)
    assert (none.state, none.said) == ("note", "no ledger yet")


def edit(home: CoordinatorDirectory, *statements: str) -> None:
    """As somebody with the file would."""
    with sqlite3.connect(home.ledger, isolation_level=None) as database:
        for statement in ("DROP TRIGGER entry_is_fixed", "DROP TRIGGER entry_is_kept", *statements):
            database.execute(statement)
    database.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entry SET body = CAST(body || x'00' AS BLOB) WHERE seq = 0",
        "DELETE FROM entry WHERE seq = 0",
        "DELETE FROM entry WHERE seq = 1",
    ],
)
def test_an_entry_that_was_changed_or_taken_is_a_fault_as_it_is_for_serve(
    change: str, home: CoordinatorDirectory
) -> None:
    with homes.open_ledger(home) as store:
        for name, role in (("dpo-1", "compliance"), ("head-1", "hospital")):
            decisions.appoint(store, name, role, Person(name, role).public)
        assert wrong(home) == {}, "also while it is held"
    edit(home, change)
    assert set(wrong(home)) == {"the ledger can be read"}
    with pytest.raises(LedgerUnsoundError), homes.open_ledger(home):
        pass


def test_a_frozen_ledger_is_a_fault_that_names_who_is_awaited(home: CoordinatorDirectory) -> None:
    with homes.open_ledger(home) as store:
        hospital = Hospital("site-a")
        statement, envelope = hospital.enrolment()
        policy = parse(hospital.policy_text, "policy.toml")
        LedgerService(store, lambda _site: policy).enrol(statement, envelope, policy)
        assert wrong(home) == {}
        store.restore("n1")
    said = wrong(home)
    assert set(said) == {doctor._RECEIPTS}
    assert said[doctor._RECEIPTS] == "frozen: 1 site awaited, and nothing is granted until then: site-a"


def test_the_certificate_and_the_secret_that_console_toml_names_are_looked_at(home: CoordinatorDirectory) -> None:
    table = '[oidc]\nissuer = "https://x.org"\nclient_id = "a"\nclient_secret_file = "none"\npersons = {a = "b"}\n'
    (home.root / "console.toml").write_text(f'certificate = "h.crt"\nkey = "h.key"\n{table}')
    assert set(wrong(home)) == {CERTIFICATE, SECRET}


def test_a_home_that_still_names_a_listener_for_stock_nodes_is_refused_with_what_to_do(
    home: CoordinatorDirectory,
) -> None:
    (home.root / "coordinator.toml").write_text('listen = "127.0.0.1:0"\nsuperlink = "127.0.0.1:1"\n')
    with pytest.raises(CoordinatorConfigError, match="delete superlink"):
        home.settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing keys: listen"),
        ("listen = 3\nport = 1\n", "unknown keys: port; listen must be a text"),
        ('listen = "here"\n', "listen and address must be host:port"),
        ('listen = "h:1"\naddress = "h:70000"\nledger = "\\u0007"\n', "host:port; ledger is the address"),
        ("listen =", "not TOML"),
    ],
)
def test_coordinator_toml_is_refused_with_every_problem(home: CoordinatorDirectory, text: str, said: str) -> None:
    (home.root / "coordinator.toml").write_text(text)
    with pytest.raises(CoordinatorConfigError, match=said):
        home.settings()


def test_without_coordinator_toml_nothing_else_is_asked(home: CoordinatorDirectory) -> None:
    (home.root / "coordinator.toml").write_text("listen = 3\n")
    assert set(wrong(home)) == {"coordinator.toml"}
    assert len(doctor.findings(home, right_now())) == 1


def test_an_intermediate_near_its_end_is_told_in_time(home: CoordinatorDirectory) -> None:
    told = {finding.name: finding for finding in doctor.findings(home, right_now() + dt.timedelta(days=340))}
    assert "ends in 25.0 days" in told["the certificate of intermediate"].said
    assert told["the certificate of intermediate"].state == "fail"
    assert told["the certificate of tls"].state == "note", "made anew at the start"


def test_who_answers_at_the_port_is_told_apart(home: CoordinatorDirectory, tmp_path: Path) -> None:
    with answering(b"220 mail ready\r\n") as address:
        (home.root / "coordinator.toml").write_text(f'listen = "{address}"\n')
        (found,) = doctor._port(home)
        assert "something else answers" in found.said
    with Federation(tmp_path / "other") as federation:
        own = federation.home
        (own.root / "coordinator.toml").write_text(f'listen = "127.0.0.1:{federation.port}"\n')
        (found,) = doctor._port(own)
        assert (found.state, found.said) == ("pass", "this coordinator's own `serve` answers")
        (home.root / "coordinator.toml").write_text(f'listen = "127.0.0.1:{federation.port}"\n')
        (found,) = doctor._port(home)
        assert found.state == "fail", "another federation's"
    (home.root / "coordinator.toml").write_text('listen = "192.0.2.1:7443"\n')  # RFC 5737
    (found,) = doctor._port(home)
    assert "cannot listen" in found.said


def test_the_address_that_sites_dial_is_gone_to_as_they_go(home: CoordinatorDirectory, tmp_path: Path) -> None:
    with Federation(tmp_path / "other") as federation:
        settings = f'listen = "127.0.0.1:{federation.port}"\naddress = "localhost:{federation.port}"\n'
        (federation.home.root / "coordinator.toml").write_text(settings)
        assert [finding.state for finding in doctor._reached(federation.home)] == ["pass"] * 3
        (home.root / "coordinator.toml").write_text(settings)
        assert [finding.state for finding in doctor._reached(home)] == ["pass", "pass", "fail"]


def of(name: str, home: CoordinatorDirectory, now: dt.datetime | None = None) -> CheckResult:
    (found,) = (finding for finding in doctor.findings(home, now or right_now()) if finding.name == name)
    return found


def test_a_ledger_is_said_to_be_whole_only_by_what_it_was_held_against(
    home: CoordinatorDirectory, tmp_path: Path
) -> None:
    found = of(doctor._WHOLE, home)
    assert (found.state, found.said) == ("pass", "compared with its mark")
    (home.root / "ledger.mark").unlink()
    found = of(doctor._WHOLE, home)
    assert (found.state, found.said) == ("note", "compared with nothing: there is no mark yet: `serve` makes it")
    found = of(doctor._WHOLE, CoordinatorDirectory(older(tmp_path / "old").coordinator))
    assert found.state == "note"
    assert "no mark yet" in found.said


def test_a_ledger_in_postgresql_is_said_to_be_whole_only_where_a_standby_was_asked(tmp_path: Path) -> None:
    with throwaway() as server:
        homes.install_ledger(server.dsn(OWNER), WRITER)
        toml = f'listen = "127.0.0.1:{free_port()}"\nledger = "{server.dsn(WRITER)}"\n'
        home = homes.create(tmp_path / "hub", toml, preset("controlled"), right_now())
        with homes.open_ledger(home):
            pass
        found = of(doctor._WHOLE, home)
        assert found.state == "note"
        assert found.said.startswith("compared with nothing: there is no standby to ask")
        server.set(synchronous_standby_names="nobody")
        found = of(doctor._WHOLE, home)
        assert found.state == "fail"
        assert "add the standby's host" in found.said
        server.set(synchronous_standby_names="")
        path = home.root / "coordinator.toml"
        path.write_text(path.read_text().replace(f"host={server.folder}", f"host={server.folder},/nowhere"))
        found = of(doctor._WHOLE, home)
        assert found.state == "fail"
        assert "no other host of the address answers" in found.said


def dated(home: CoordinatorDirectory, at: int) -> None:
    """Append an entry while the clock says that."""
    disk = open_sqlite(home.ledger)
    with Store(disk, homes.ORIGIN, home.ledger_key(), lambda: at) as store:
        decisions.appoint(store, "dpo-1", "compliance", Person("dpo-1", "compliance").public)


def test_an_entry_of_the_future_is_a_fault_once_it_is_further_off_than_clocks_may_differ(
    home: CoordinatorDirectory,
) -> None:
    moment = right_now().replace(microsecond=0)
    now = int(moment.timestamp())
    assert of(doctor._TIMES, home).state == "pass"
    dated(home, now + SKEW + 1)
    assert of(doctor._TIMES, home, moment + dt.timedelta(seconds=1)).state == "pass"
    found = of(doctor._TIMES, home, moment)
    assert found.state == "fail"
    assert f"{SKEW + 1} s in the future" in found.said
    assert "set it right (NTP)" in found.said


def test_serve_warns_of_an_entry_of_the_future(home: CoordinatorDirectory) -> None:
    day = 86_400
    dated(home, int(right_now().timestamp()) + day)
    words = [sys.executable, "-m", "coordinator", "--home", str(home.root), "serve"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as serve:
        watchdog = threading.Timer(300, serve.kill)
        watchdog.start()
        assert serve.stdout is not None
        assert serve.stdout.readline().startswith("serving")
        serve.terminate()
        assert "in the future of this machine's clock" in serve.communicate()[0]
        assert serve.returncode == 0
        watchdog.cancel()
    lines = [json.loads(line) for line in (home.root / "coordinator.log").read_text().splitlines()]
    (told,) = (line for line in lines if line["event"] == "ledger_in_the_future")
    assert told["level"] == "warning"
    assert day - 3600 < told["seconds"] <= day


OFTEN = """
import sys
from pathlib import Path
from protos.federation import flower_environment as quiet
quiet.configure_environment(Path(sys.argv[2]) / "flower")
from coordinator.cli import main as __main__
from coordinator import daemon as server
server.UPKEEP_S = 0.3
sys.exit(__main__.main())
"""


def test_an_entry_of_the_future_is_logged_again_while_the_coordinator_serves(home: CoordinatorDirectory) -> None:
    """The clock may be set back long after the start."""
    dated(home, int(right_now().timestamp()) + 86_400)
    with subprocess.Popen([sys.executable, "-c", OFTEN, "--home", str(home.root), "serve"]) as serve:
        try:
            log = home.root / "coordinator.log"
            assert wait_until(lambda: log.exists() and log.read_text().count("ledger_in_the_future") >= 3)
        finally:
            serve.terminate()
        assert serve.wait(200) == 0
