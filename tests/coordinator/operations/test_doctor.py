"""The coordinator's doctor: green when all is well, and every fault that is planted is found."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from coordinator.edges import doctor
from coordinator.edges import home as homes
from coordinator.edges.home import Home
from policies import governance
from policies.forms import FORM
from policies.policy import parse, preset
from policies.register import Register
from policies.store import LedgerUnsound
from protos.web.examined import CERTIFICATE, SECRET
from tests.support.answering import answering
from tests.support.books import Hospital, Person
from tests.support.federation import Federation
from tests.support.older import older
from tests.support.ports import free_port

NOW = dt.datetime.now(dt.UTC)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = homes.create(tmp_path / "hub", f'listen = "127.0.0.1:{free_port()}"\n', preset("controlled"), NOW)
    with homes.open_ledger(made):
        pass
    shutil.rmtree(made.root / "offline")
    return made


def wrong(home: Home) -> dict[str, str]:
    return {finding.name: finding.said for finding in doctor.findings(home, NOW) if finding.state == "fail"}


def test_a_fresh_coordinator_whose_root_is_away_is_green(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert wrong(home) == {}
    arguments = argparse.Namespace(home=home.root, json=False)
    assert doctor.doctor(arguments) == 0
    text = capsys.readouterr().out
    assert "0 failed" in text
    assert str(home.root) not in text
    arguments.json = True
    assert doctor.doctor(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("serve` does not run" in said for said in told.pop("notes").values())
    assert set(told.values()) == {None}


def test_a_root_key_that_lies_on_the_machine_is_a_fault(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    (home.root / "offline").mkdir(mode=0o700)
    (home.root / "offline" / "root.key").write_text("x")
    assert set(wrong(home)) == {"the root's key is away"}
    assert doctor.doctor(argparse.Namespace(home=home.root, json=False)) == 1
    assert "fix: move offline/" in capsys.readouterr().out


def test_everything_that_is_wrong_is_told_at_once(home: Home) -> None:
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


def test_a_ledger_that_serve_would_refuse_is_a_fault_before_serve_is_started(home: Home, tmp_path: Path) -> None:
    name = "forms of the databases"
    found = {finding.name: finding for finding in doctor.findings(Home(older(tmp_path / "old").coordinator), NOW)}
    assert found[name].said == f"ledger: form 1 of {FORM}: `serve` refuses it"
    assert "run `upgrade`" in found[name].fix
    assert name not in wrong(home)
    with sqlite3.connect(home.ledger) as newer:
        newer.execute("UPDATE form SET version_num = ?", (str(FORM + 1),))
    assert "a newer program has upgraded it" in wrong(home)[name]
    home.ledger.unlink()
    (none,) = doctor._forms(home)
    assert (none.state, none.said) == ("note", "no ledger yet")


def edit(home: Home, *statements: str) -> None:
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
def test_an_entry_that_was_changed_or_taken_is_a_fault_as_it_is_for_serve(change: str, home: Home) -> None:
    with homes.open_ledger(home) as store:
        for name, role in (("dpo-1", "compliance"), ("head-1", "hospital")):
            governance.appoint(store, name, role, Person(name, role).public)
        assert wrong(home) == {}, "also while it is held"
    edit(home, change)
    assert set(wrong(home)) == {"the ledger can be read"}
    with pytest.raises(LedgerUnsound), homes.open_ledger(home):
        pass


def test_a_frozen_ledger_is_a_fault_that_names_who_is_awaited(home: Home) -> None:
    with homes.open_ledger(home) as store:
        hospital = Hospital("site-a")
        statement, envelope = hospital.enrolment()
        policy = parse(hospital.policy_text, "policy.toml")
        Register(store, lambda _site: policy).enrol(statement, envelope, policy)
        assert wrong(home) == {}
        store.restore("n1")
    said = wrong(home)
    assert set(said) == {doctor._RECEIPTS}
    assert said[doctor._RECEIPTS] == "frozen: 1 site awaited, and nothing is granted before: site-a"


def test_the_certificate_and_the_secret_that_console_toml_names_are_looked_at(home: Home) -> None:
    table = '[oidc]\nissuer = "https://x.org"\nclient_id = "a"\nclient_secret_file = "none"\npersons = {a = "b"}\n'
    (home.root / "console.toml").write_text(f'certificate = "h.crt"\nkey = "h.key"\n{table}')
    assert set(wrong(home)) == {CERTIFICATE, SECRET}


def test_without_coordinator_toml_nothing_else_is_asked(home: Home) -> None:
    (home.root / "coordinator.toml").write_text("listen = 3\n")
    assert set(wrong(home)) == {"coordinator.toml"}
    assert len(doctor.findings(home, NOW)) == 1


def test_an_intermediate_near_its_end_is_told_in_time(home: Home) -> None:
    told = {finding.name: finding for finding in doctor.findings(home, NOW + dt.timedelta(days=340))}
    assert "ends in 25.0 days" in told["the certificate of intermediate"].said
    assert told["the certificate of intermediate"].state == "fail"
    assert told["the certificate of tls"].state == "note", "made anew at the start"


def test_who_answers_at_the_port_is_told_apart(home: Home, tmp_path: Path) -> None:
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


def test_the_address_that_sites_dial_is_gone_to_as_they_go(home: Home, tmp_path: Path) -> None:
    with Federation(tmp_path / "other") as federation:
        settings = f'listen = "127.0.0.1:{federation.port}"\naddress = "localhost:{federation.port}"\n'
        (federation.home.root / "coordinator.toml").write_text(settings)
        assert [finding.state for finding in doctor._reached(federation.home)] == ["pass"] * 3
        (home.root / "coordinator.toml").write_text(settings)
        assert [finding.state for finding in doctor._reached(home)] == ["pass", "pass", "fail"]
