"""The site's doctor against a real coordinator, a real proxy and a real PACS: green when all is well, else not."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.cli import doctor as doctor_command
from agent.event_log import open_log
from agent.operations import doctor
from agent.operations.upgrade import upgrade
from agent.pacs.archive import ArchiveConfig, ArchiveError
from agent.pacs.dimse.query_retrieve_scu import echo, knows_us
from agent.storage.encrypted_sqlite import FORMAT
from agent.storage.site_directory import SiteDirectory
from coordinator.gateway.server import ServerTimeInterceptor
from policies.ledger.backends.schema_version import FORM
from protos.operations.checks import CheckResult
from tests.support.archives import rogue_move
from tests.support.collector import Syslogd
from tests.support.connect_proxy import ConnectProxy
from tests.support.federation_world import Federation, Site
from tests.support.older import older
from tests.support.pacs import Pacs, orthanc
from tests.support.ports import free_port


def found(home: SiteDirectory) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in doctor_command.findings(home, dt.datetime.now(dt.UTC))}


def wrong(home: SiteDirectory) -> dict[str, str]:
    return {name: finding.said for name, finding in found(home).items() if finding.state == "fail"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Enrolled at a coordinator that serves and tells its time."""
    with Federation(tmp_path, recorder=ServerTimeInterceptor()) as federation:  # type: ignore[arg-type]
        yield federation.join("site-a")


def ingest(site: Site, text: str) -> None:
    (site.home.root / "ingest.toml").write_text(text)


def listener(port: int) -> str:
    callers = '[{ ae_title = "MAIN", addresses = ["127.0.0.1"] }]'
    return f'[listener]\nae_title = "LAZARET"\nplain_tcp = true\nport = {port}\ncallers = {callers}\n'


def archive(pacs: Pacs, more: str = "") -> str:
    place = f'aet = "{pacs.aet}"\nhost = "{pacs.host}"\nport = {pacs.dicom_port}\ncalling = "LAZARET"\n'
    return f"[pacs.main]\n{place}{more}"


def test_an_enrolled_site_is_green_straight_and_through_the_hospitals_proxy(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wrong(site.home) == {}
    told = found(site.home)
    assert told["nobody reads along (TLS inspection)"].state == "pass"
    assert "s from the coordinator" in told[doctor.AGREES].said
    with ConnectProxy() as proxy:
        settings = site.home.root / "site.toml"
        settings.write_text(f'{settings.read_text()}proxy = "{proxy.address}"\n')
        assert wrong(site.home) == {}
        assert len(proxy.tunnels) >= 4
        arguments = argparse.Namespace(command="doctor", home=site.home.root, json=False)
        assert doctor_command.run(arguments) == 0
        text = capsys.readouterr().out
        assert f"CONNECT through {proxy.address}" in text
        assert "0 failed" in text
        assert str(site.home.root) not in text, "no path of the machine"
        arguments.json = True
        assert doctor_command.run(arguments) == 0
        told = json.loads(capsys.readouterr().out)
        assert told.pop("notes").keys() == {f.name for f in found(site.home).values() if f.state == "note"}
        assert set(told.values()) == {None}
    assert "the way out is open" in wrong(site.home)
    assert doctor_command.run(arguments) == 1


def test_clocks_that_are_apart_are_told_with_the_seconds(tmp_path: Path) -> None:
    behind = ServerTimeInterceptor(lambda: time.time() - 90)
    with Federation(tmp_path, recorder=behind) as federation:  # type: ignore[arg-type]
        site = federation.join("site-a")
        assert set(wrong(site.home)) == {doctor.AGREES}
        assert "before the coordinator" in found(site.home)[doctor.AGREES].said


def test_a_coordinator_that_tells_no_time_is_noted(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        assert found(federation.join("site-a").home)[doctor.AGREES].state == "note"


def test_what_is_wrong_at_home_is_told_all_at_once(site: Site) -> None:
    (site.home.keys / "sign.key").chmod(0o644)
    (site.home.root / "policy.toml").write_text("name = 1")
    (site.home.root / "log.toml").write_text("keep = 0\n")
    (site.home.root / "console.toml").write_text("listen = 3\n")
    (site.home.root / "ingest.toml").write_text("[nonsense]\n")
    names = {"keys are private", "policy.toml", "the log's collector answers", "console.toml", "ingest.toml"}
    assert names <= set(wrong(site.home))


def test_a_broken_site_toml_is_said_once_and_the_rest_is_still_looked_at(site: Site) -> None:
    (site.home.root / "site.toml").write_text("site = 1\n")
    told = wrong(site.home)
    assert "site.toml" in told
    assert sum("site.toml" in said for said in told.values()) <= 2
    assert found(site.home)["SQLite"].state == "pass"


def test_a_certificate_that_ends_soon_or_has_ended_is_told(site: Site) -> None:
    now = dt.datetime.now(dt.UTC)
    (soon,) = doctor.certificate(site.home, now + dt.timedelta(hours=20))
    assert "it ends in 0.2 days" in soon.said
    (ended,) = doctor.certificate(site.home, now + dt.timedelta(days=2))
    assert "it expired at" in ended.said
    assert "run `enrol`" in ended.said


def test_the_logs_collector_is_knocked_at(site: Site, tmp_path: Path) -> None:
    with Syslogd(tmp_path / "pki") as collector:
        ca = collector.authority.ca
        (site.home.root / "log.toml").write_text(f'[syslog]\nto = "localhost:{collector.port}"\nca = "{ca}"\n')
        assert wrong(site.home) == {}
        (site.home.root / "log.toml").write_text(f'[syslog]\nto = "localhost:{collector.port}"\n')
        assert set(wrong(site.home)) == {"the log's collector answers"}


def test_echo_goes_both_ways_with_a_real_pacs(site: Site, tmp_path: Path) -> None:
    port = free_port()
    with orthanc(tmp_path / "pacs") as pacs:
        ingest(site, listener(port) + archive(pacs, 'mode = "move"\n'))
        told = found(site.home)
        assert told["C-ECHO to main"].state == "pass"
        assert told["main knows the destination of C-MOVE"].state == "note", "Orthanc's answer does not tell"
        assert told["the PACS reaches us"].state == "note"
        assert "LAZARET" in told["the PACS reaches us"].said
        ingest(site, listener(port) + archive(pacs).replace('"LAZARET"', '"STRANGER"'))
        assert "does not know this site's AE title" in wrong(site.home)["C-ECHO to main"]
        ingest(site, archive(pacs, 'mode = "move"\n'))
        assert "no listener here" in wrong(site.home)["main knows the destination of C-MOVE"]
    ingest(site, listener(port) + archive(pacs))
    assert "nothing answers" in wrong(site.home)["C-ECHO to main"]


def test_what_the_receiver_wrote_down_tells_whether_the_pacs_reaches_us(site: Site) -> None:
    ingest(site, listener(free_port()))
    log = open_log(site.home.root / "agent.log")
    log.info("listener", state="rejected_calling", count=1)
    assert "may not call from this address" in wrong(site.home)["the PACS reaches us"]
    log.info("listener", state="echoed", count=1)
    assert found(site.home)["the PACS reaches us"].state == "pass"
    (site.home.root / "agent.log").write_text('{"event": "listener", "state": ["x"]}\nnot json\n[]\n')
    assert found(site.home)["the PACS reaches us"].state == "note"


def test_of_what_the_receiver_heard_the_newest_counts_and_an_old_echo_is_a_note(site: Site) -> None:
    ingest(site, listener(free_port()))
    log, now = site.home.root / "agent.log", dt.datetime.now(dt.UTC)

    def heard(*events: tuple[str, float]) -> CheckResult:
        """What is said of these events, so many days ago."""
        lines = [
            {"event": "listener", "state": state, "timestamp": (now - dt.timedelta(days=ago)).isoformat()}
            for state, ago in events
        ]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return found(site.home)["the PACS reaches us"]

    later = heard(("echoed", 3), *[("rejected_calling", 2)] * 5)
    assert later.state == "fail"
    assert "may not call from this address" in later.said
    assert "since then" in later.said
    assert heard(("echoed", 1), ("rejected_calling", 2)).state == "pass", "by their times, not by their lines"
    assert heard(("rejected_calling", 2), ("stored", 1)).state == "pass"
    assert heard(("stored", 2), ("rejected_limit", 1)).state == "pass", "it reached us, and tries again"
    assert heard(("echoed", 6.9)).state == "pass"
    old = heard(("echoed", 7.1))
    assert (old.state, "more than 7 days ago" in old.said) == ("note", True)
    assert heard(("echoed", 30), ("tls_failed", 20)).state == "fail"
    log.write_text(
        '{"event": "listener", "state": "echoed"}\n{"event": "listener", "state": "echoed", "timestamp": 3}\n'
    )
    assert found(site.home)["the PACS reaches us"].state == "note", "a line without a time tells nothing"


def test_databases_that_serve_would_refuse_are_a_fault_before_serve_is_started(site: Site, tmp_path: Path) -> None:
    name = "forms of the databases"
    home = SiteDirectory(older(tmp_path / "old").site)
    old = found(home)[name]
    assert old.said.startswith(f"ledger: form 1 of {FORM}; vault: form 1 of {FORMAT}: `serve` refuses")
    assert "run `upgrade`" in old.fix
    upgrade(home, dt.datetime.now(dt.UTC))
    assert found(home)[name].state == "pass"
    with sqlite3.connect(home.root / "ledger.db") as newer:
        newer.execute("UPDATE form SET version_num = ?", (str(FORM + 1),))
    assert "a newer version has upgraded it" in wrong(home)[name]
    (none,) = doctor.databases(site.home)
    assert (none.state, none.said) == ("note", "no ledger yet; no vault yet")


def test_a_pacs_that_knows_no_such_destination_is_a_fault(site: Site) -> None:
    remote = ArchiveConfig("main", "MAIN", "127.0.0.1", 1, "LAZARET", mode="move")
    for status, known in ((0xA801, False), (0x0000, True)):
        with rogue_move(status) as port:
            assert knows_us(replace(remote, port=port)) is known
    with pytest.raises(ArchiveError):
        echo(replace(remote, port=free_port()))
