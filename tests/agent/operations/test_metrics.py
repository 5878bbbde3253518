"""A site's metrics and health: its own books, its rooms, the log's tally; no patient is named or counted."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.ingest.config import parse_ingestion
from agent.operations.metrics import CATALOGUE, MonitoredSite, live, metrics, ready, watermark
from agent.pacs.dimse.listener_process import Listener
from agent.storage import projects, site_directory
from agent.storage.quarantine import Quarantine
from agent.storage.spool import ReceivedFile, Spool
from coordinator.operations.metrics import CATALOGUE as COORDINATORS
from policies.review.policy import preset
from protos.operations.event_counters import EventCounters
from tests.support.ledger_world import K5, Hospital, open_register
from tests.support.promtool import lint

SITE = (
    'site = "site-a"\ncoordinator = "127.0.0.1:1"\ninput = "../input"\n'
    'modalities = ["OT"]\nsecondary_capture_modalities = []\npublic_components = []\n'
)
INGEST = """
[listener]
ae_title = "LAZARET"
plain_tcp = true
port = 0
workers = 1
least_free_bytes = 1000
full_at = 0.75
callers = [{ ae_title = "PACS", addresses = ["127.0.0.1"] }]
[pacs.main]
aet = "MAIN"
host = "127.0.0.1"
port = 104
calling = "LAZARET"
"""
NOW = dt.datetime.now(dt.UTC)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[MonitoredSite]:
    home = site_directory.create(tmp_path / "site", SITE, preset("internal"))
    hospital = Hospital("site-a")
    register = open_register(home.root / "ledger.db", hospital)
    with register.store:
        asked = hospital.reservation("grant-1", K5)
        assert register.reserve("reserve-1", asked, hospital.seal(asked)).admitted
        ingestion = parse_ingestion(home.root, home.settings(), INGEST)
        yield MonitoredSite(home, ingestion, lambda: NOW, register.store, tally=EventCounters())


def values(watched: MonitoredSite) -> dict[str, float]:
    lines = [line for line in metrics(watched)().decode().splitlines() if line[0] != "#"]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_page_passes_prometheus_own_check_and_no_source_fails(watched: MonitoredSite) -> None:
    assert lint(metrics(watched)()) == []
    found = values(watched)
    assert {value for name, value in found.items() if name.startswith("lazaret_source_faults")} == {0.0}
    assert found["lazaret_grants_held"] == 1
    assert found['lazaret_k_releases_held{unit="patient"}'] == 1


def test_files_that_wait_and_files_that_were_refused_are_counted_by_their_names_alone(
    watched: MonitoredSite,
) -> None:
    inbox, quarantine = projects.project_folders(watched.home, "main")
    room, refused = Spool(inbox, bytes(32)), Quarantine(quarantine, bytes(32))
    for number in range(3):
        room.put(ReceivedFile("dimse", "PACS", b"x" * number, patient_id="SECRET-7"))
    for number in range(2):
        refused.refuse(f"{number:032x}", "truncated", ReceivedFile("dimse", "PACS", b"x", patient_id="SECRET-7"))
    (quarantine / "notes.by.hand").write_text("x")
    found = values(watched)
    assert found['lazaret_queue_files{project="main",queue="inbox"}'] == 3
    assert found['lazaret_queue_files{project="main",queue="quarantine"}'] == 2
    assert found['lazaret_quarantine_files{project="main",reason="truncated"}'] == 2
    assert found['lazaret_queue_oldest_seconds{project="main"}'] >= 0
    assert "SECRET" not in metrics(watched)().decode()


def test_failed_pulls_and_the_link_come_from_the_log(watched: MonitoredSite) -> None:
    found = values(watched)
    assert found['lazaret_pacs_errors_total{archive="main"}'] == 0, "there before the first fault, for increase()"
    assert "lazaret_link_online" not in found
    for event in (
        {"event": "pull_failed", "where": "main"},
        {"event": "pull_failed", "where": "of-old-settings"},
        {"event": "pulled", "where": "main"},
        {"event": "link", "state": "online"},
    ):
        watched.tally.count(event, "error")
    found = values(watched)
    assert found['lazaret_pacs_errors_total{archive="main"}'] == 1
    assert found['lazaret_pacs_last_pull_seconds{archive="main"}'] < 60
    assert found["lazaret_link_online"] == 1
    watched.tally.count({"event": "link", "state": "unreachable"}, "info")
    assert values(watched)["lazaret_link_online"] == 0


def test_a_receiver_that_is_wanted_and_does_not_listen_is_not_ready(watched: MonitoredSite) -> None:
    assert values(watched)["lazaret_listening"] == 0
    assert live(watched)() is None
    assert "does not listen" in str(ready(watched)())
    settings = watched.ingestion.listener
    assert settings is not None
    with Listener(settings, watched.home.root / "inbox" / "main", bytes(32)) as listener:
        up = replace(watched, listener=lambda: listener)
        assert values(up)["lazaret_listening"] == 1
        assert ready(up)() is None
    assert "does not listen" in str(ready(up)())


def test_the_watermark_is_the_receivers_own(watched: MonitoredSite) -> None:
    assert watermark(watched.ingestion, 100_000) == 25_000
    assert watermark(watched.ingestion, 100) == 1000
    assert watermark(replace(watched.ingestion, listener=None), 100) == 2 << 30


def test_a_site_without_an_open_ledger_tells_of_the_rest(watched: MonitoredSite) -> None:
    without = replace(watched, store=None)
    found = values(without)
    assert "lazaret_grants_held" not in found
    assert found["lazaret_disk_free_bytes"] > 0
    assert live(without)() is None


def test_a_ledger_that_was_stopped_is_not_alive(watched: MonitoredSite) -> None:
    assert watched.store is not None
    watched.store.stop()
    assert "restart" in str(live(watched)())


def test_the_same_name_means_the_same_on_both_sides() -> None:
    """But for the site's own name, which a site need not say of itself."""
    theirs = {metric.name: metric for metric in COORDINATORS}
    for metric in CATALOGUE:
        if metric.name in theirs:
            other = theirs[metric.name]
            assert (metric.kind, set(other.labels) - {"site"}) == (other.kind, set(metric.labels) - {"site"})
