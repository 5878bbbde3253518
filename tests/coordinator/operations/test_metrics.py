"""The coordinator's metrics and health, over a real ledger and what really lies in its folders."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.gateway.notifications import NotificationStreams
from coordinator.operations.metrics import CATALOGUE, MonitoredCoordinator, live, metrics, ready
from coordinator.storage import directory as homes
from policies.review.policy import preset
from protos.operations.event_counters import EventCounters
from tests.support.ledger_world import DP, Hospital, open_register, policy
from tests.support.promtool import lint

NOW = dt.datetime.now(dt.UTC)


class Quiet:
    def info(self, *_: object, **__: object) -> None: ...


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[MonitoredCoordinator]:
    home = homes.create(tmp_path / "hub", 'listen = "127.0.0.1:7443"\n', preset("internal"), NOW)
    hospital = Hospital("site-a", policy())
    register = open_register(home.ledger, hospital)
    with register.store:
        asked = hospital.reservation("grant-1", DP, "federated", "run-1")
        assert register.reserve("reserve-1", asked, hospital.seal(asked)).admitted
        yield MonitoredCoordinator(
            home,
            register.store,
            NotificationStreams(Quiet()),
            dict,
            home.root / "runs",
            home.root / "uploads",
            lambda: NOW,
            EventCounters(),
        )


def values(watched: MonitoredCoordinator) -> dict[str, float]:
    lines = [line for line in metrics(watched)().decode().splitlines() if line[0] != "#"]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_page_passes_prometheus_own_check_and_no_source_fails(watched: MonitoredCoordinator) -> None:
    assert lint(metrics(watched)()) == []
    found = values(watched)
    assert {value for name, value in found.items() if name.startswith("lazaret_source_faults")} == {0.0}


def test_every_epsilon_bears_unit_relation_and_delta_and_adds_up(watched: MonitoredCoordinator) -> None:
    found = {name: value for name, value in values(watched).items() if name.startswith("lazaret_epsilon_")}
    assert len(found) == 4
    for name in found:
        for label in ('site="site-a"', 'unit="patient"', 'relation="add-or-remove-one"', 'delta="'):
            assert label in name
    by = {name.split("{")[0].rpartition("_")[2]: value for name, value in found.items()}
    assert by["held"] > 0
    assert by["limit"] == pytest.approx(by["spent"] + by["held"] + by["left"])


def test_k_anonymity_is_counted_in_releases_and_never_as_an_epsilon(watched: MonitoredCoordinator) -> None:
    def epsilons() -> dict[str, float]:
        return {name: value for name, value in values(watched).items() if "epsilon" in name}

    before = epsilons()
    with watched.store.exclusive() as state:
        crowd, others = state.accounts["site-a/k"], state.accounts.pop("site-a/rdp")
        crowd.spent += 1
    assert values(watched)['lazaret_k_releases_spent{site="site-a",unit="patient"}'] == 1
    assert epsilons() == {}, "of k-anonymity there is no epsilon, and not one of zero"
    watched.store.state.accounts["site-a/rdp"] = others
    assert epsilons() == before


def test_what_lies_in_the_folders_is_counted(watched: MonitoredCoordinator) -> None:
    for run, files in {
        "run-1": ["job.json"],
        "run-2": ["job.json", "stop"],
        "run-3": ["job.json", "end.json"],
    }.items():
        (watched.runs / run).mkdir(parents=True)
        for name in files:
            (watched.runs / run / name).write_text(json.dumps({"state": "finished"}))
    (watched.staging / "open" / "site-a" / "ab").mkdir(parents=True)
    (watched.staging / "open" / "site-a" / "ab" / "manifest").write_text("x")
    watched.home.witnesses.mkdir()
    (watched.home.witnesses / "site-a.note").write_text("lazaret/coordinator\n1\nroot\n\n")
    found = values(watched)
    states = {state: found[f'lazaret_runs{{state="{state}"}}'] for state in ("open", "stopped", "finished", "failed")}
    assert states == {"open": 1, "stopped": 1, "finished": 1, "failed": 0}
    assert found["lazaret_uploads_open"] == 1
    assert found['lazaret_witness_lag_entries{site="site-a"}'] == watched.store.state.size - 1 > 0
    assert found['lazaret_site_online{site="site-a"}'] == 0
    assert found["lazaret_grants_held"] == 1
    assert found["lazaret_sites_enrolled"] == 1
    assert 364 < found['lazaret_certificate_days_left{site="",which="intermediate"}'] <= 365


def test_a_run_of_a_word_that_nobody_knows_takes_only_the_runs_from_the_page(watched: MonitoredCoordinator) -> None:
    (watched.runs / "run-9").mkdir(parents=True)
    for name in ("job.json", "end.json"):
        (watched.runs / "run-9" / name).write_text("not json")
    found = values(watched)
    assert found['lazaret_source_faults{source="runs"}'] == 1
    assert found['lazaret_source_faults{source="budgets"}'] == 0
    assert not [name for name in found if name.startswith("lazaret_runs")]


def test_a_ledger_that_was_stopped_is_neither_alive_nor_ready_and_the_page_says_so(
    watched: MonitoredCoordinator,
) -> None:
    assert live(watched)() is None
    assert ready(watched)() is None
    watched.store.stop()
    assert "restart" in str(live(watched)())
    assert "restart" in str(ready(watched)())
    found = values(watched)
    assert found["lazaret_ledger_writable"] == 0
    assert found['lazaret_source_faults{source="ledger"}'] == 1
    assert found["lazaret_uploads_open"] == 0


def test_a_certificate_that_has_ended_is_alive_and_not_ready(watched: MonitoredCoordinator) -> None:
    late = replace(watched, now=lambda: NOW + dt.timedelta(days=400))
    assert live(late)() is None
    assert "certificate" in str(ready(late)())


def test_the_names_are_distinct_and_explained() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    assert all(metric.help.endswith(".") for metric in CATALOGUE)
