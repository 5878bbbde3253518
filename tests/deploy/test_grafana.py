"""Dashboard and alert rules: Prometheus takes them, every metric in them exists, and each alert says what to do."""

from __future__ import annotations

import datetime as dt
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from agent.ingest.config import parse_ingestion
from agent.operations import metrics as agents
from agent.storage import site_directory
from coordinator.gateway.notifications import NotificationStreams
from coordinator.operations import metrics as coordinators
from coordinator.storage import directory as coordinator_home
from policies.review.policy import preset
from protos.operations.event_counters import EventCounters
from protos.operations.metrics import BUILD, FAULTS
from protos.web.health import Health, watched_over
from protos.web.settings import ConsoleSettings
from tests.support.ledger_world import DP, K5, Hospital, open_register
from tests.support.peers import need
from tests.support.ports import free_port
from tests.support.promtool import promtool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "grafana"
KNOWN = {metric.name: metric for metric in (*agents.CATALOGUE, *coordinators.CATALOGUE, BUILD, FAULTS)}
NAME = re.compile(r"\b(?:lazaret|process)_[a-z0-9_]+\b")
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds", "process_max_fds"}
NOW = dt.datetime.now(dt.UTC)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    told = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*told, *(str(rule["expr"]) for rule in rules())]


def test_every_metric_in_dashboard_and_rules_exists_and_every_metric_is_in_one_of_them() -> None:
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    assert used - set(KNOWN) - PROCESS == set()
    assert set(KNOWN) - used == set(), "a metric that nobody looks at"


def test_a_legend_and_a_sentence_use_labels_that_the_metric_has() -> None:
    for panel in panels():
        for target in panel["targets"]:
            names = NAME.findall(target["expr"])
            have = {"instance", "job"} | {label for name in names if name in KNOWN for label in labels(name)}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= have, target
    for rule in rules():
        have = {"instance", "job"} | {label for name in NAME.findall(rule["expr"]) for label in labels(name)}
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= have, rule["alert"]


def labels(name: str) -> set[str]:
    """Of a metric on either side: a site does not say its own name."""
    found = {label for metric in (*agents.CATALOGUE, *coordinators.CATALOGUE) if metric.name == name
             for label in metric.labels}  # fmt: skip
    return found | {label for metric in (BUILD, FAULTS) if metric.name == name for label in metric.labels}


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    assert (dashboard["id"], dashboard["uid"], dashboard["schemaVersion"] >= 36) == (None, "lazaret", True)
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    everything = json.dumps(dashboard)
    assert set(re.findall(r"\$\{?(\w+)", everything)) - {"__all"} <= names
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
    assert all(panel["title"] for panel in panels())
    assert "http" not in everything, "nothing is loaded from anywhere"


def test_every_alert_says_how_grave_it_is_and_what_to_do_and_the_page_explains_it() -> None:
    page = (ROOT / "deploy" / "docs" / "monitoring.md").read_text()
    anchors = {line.lstrip("# ").strip().lower() for line in page.splitlines() if line.startswith("#")}
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (ROOT / file).exists()
        assert anchor in anchors, rule["alert"]
        assert anchor == rule["alert"].lower()


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "deploy" / "docs" / "monitoring.md").read_text()
    assert [name for name in KNOWN if f"`{name}`" not in page] == []


def test_no_rule_and_no_panel_calls_k_anonymity_an_epsilon() -> None:
    for panel in panels():
        if "epsilon" in json.dumps(panel["targets"]):
            assert "k_releases" not in json.dumps(panel["targets"])
            assert all("{{unit}}" in t["legendFormat"] and "{{delta}}" in t["legendFormat"] for t in panel["targets"])


def test_prometheus_takes_the_rules_and_sees_them_fire() -> None:
    promtool("check", "rules", "alerts.yml", cwd=FOLDER)
    promtool("test", "rules", "alerts_test.yml", cwd=FOLDER)


class Quiet:
    def info(self, *_: object, **__: object) -> None: ...


@pytest.fixture
def both(tmp_path: Path) -> Iterator[list[int]]:
    """Both sides' real pages on real ports."""
    settings = 'site = "site-a"\ncoordinator = "127.0.0.1:1"\ninput = "../input"\nmodalities = ["OT"]\n'
    settings += "secondary_capture_modalities = []\npublic_components = []\n"
    site = site_directory.create(tmp_path / "site", settings, preset("internal"))
    hub = coordinator_home.create(tmp_path / "hub", 'listen = "127.0.0.1:1"\n', preset("internal"), NOW)
    hospital = Hospital("site-a")
    mine, theirs = open_register(site.root / "ledger.db", hospital), open_register(hub.ledger, hospital)
    with mine.store, theirs.store:
        for register in (mine, theirs):
            for number, (claim, mechanism, run) in enumerate(((K5, "ksame", ""), (DP, "federated", "run-1"))):
                asked = hospital.reservation(f"grant-{number}", claim, mechanism, run)
                assert register.reserve(f"reserve-{number}", asked, hospital.seal(asked)).admitted
        ingestion = parse_ingestion(site.root, site.settings(), "")
        here = agents.MonitoredSite(site, ingestion, lambda: NOW, mine.store, tally=EventCounters())
        there = coordinators.MonitoredCoordinator(
            hub,
            theirs.store,
            NotificationStreams(Quiet()),
            dict,
            hub.root / "runs",
            hub.root / "uploads",
            lambda: NOW,
            EventCounters(),
        )
        plain = ConsoleSettings(metrics="127.0.0.1:0")
        with (
            watched_over(plain, agents.metrics(here), Health(agents.live(here), agents.ready(here))) as one,
            watched_over(plain, coordinators.metrics(there), Health(coordinators.live(there), lambda: None)) as other,
        ):
            yield [one, other]


@pytest.mark.slow
def test_a_real_prometheus_scrapes_both_sides_and_answers_every_question_of_dashboard_and_rules(
    both: list[int], tmp_path: Path
) -> None:
    need("prometheus")
    port = free_port()
    jobs = [
        {"job_name": f"lazaret-{side}", "static_configs": [{"targets": [f"127.0.0.1:{one}"]}]}
        for side, one in zip(("agent", "coordinator"), both, strict=True)
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FOLDER / "alerts.yml")],
        "scrape_configs": jobs,
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'db'}"]
    with subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL) as process:
        try:
            ask = Asking(f"http://127.0.0.1:{port}/api/v1/query")
            ask.until("sum(up) == 2")
            for expression in expressions():
                ask(expression.replace("$instance", ".*"))
            assert len(ask("lazaret_budget_left_ratio")) == 4
            assert ask("sum(lazaret_source_faults)")[0]["value"][1] == "0"
            fault = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules").json()["data"]["groups"][0]["rules"]
            assert [rule["name"] for rule in fault if rule.get("lastError")] == []
        finally:
            process.terminate()


class Asking:
    """Prometheus' own answers."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, expression: str) -> list[dict[str, Any]]:
        answer = httpx.get(self.where, params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def until(self, expression: str) -> None:
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            try:
                if self(expression):
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(expression)
