"""The units, container files, compose files and the chart are in order, and each check sees what it should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy import validate
from deploy.validate import CHART, HERE, chart, compose, containerfile, render, renderer, unit
from tests.support.peers import need

AGENT = HERE / "systemd" / "lazaret-agent.service"


@pytest.fixture(scope="module")
def how(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    need("go")
    return renderer(tmp_path_factory.mktemp("render"))


@pytest.mark.parametrize("path", sorted((HERE / "systemd").glob("*.service")), ids=lambda p: p.stem)
def test_systemd_finds_nothing_wrong_with_a_unit_and_little_that_it_could_do(path: Path) -> None:
    need("systemd-analyze")
    assert unit(path) == []


@pytest.mark.parametrize(
    ("line", "instead", "why"),
    [
        ("ProtectSystem=strict", "ProtectSystem=sure", "lazaret-agent.service"),
        ("SystemCallErrorNumber=EPERM", "SystemCallFilter=\nCapabilityBoundingSet=~", "exposure"),
        ("MemoryMax=85%", "", "MemoryMax= is missing"),
        ("User=lazaret", "", "User= is missing"),
        ("OOMPolicy=continue", "OOMPolicy=stop", "OOMPolicy=continue is missing"),
    ],
)
def test_a_looser_unit_is_seen(line: str, instead: str, why: str, tmp_path: Path) -> None:
    need("systemd-analyze")
    text = AGENT.read_text()
    assert f"\n{line}\n" in text
    (tmp_path / AGENT.name).write_text(text.replace(f"\n{line}\n", f"\n{instead}\n"))
    assert why in "; ".join(unit(tmp_path / AGENT.name))


@pytest.mark.parametrize("path", sorted((HERE / "containers").glob("*")), ids=lambda p: p.stem)
def test_a_container_is_nobody_and_takes_nothing_from_a_network(path: Path, tmp_path: Path) -> None:
    assert containerfile(path) == []
    text = path.read_text()
    for line in ("USER root", "USER 0:0", "RUN apt-get update", "ADD https://example.org/a /a", "USER lazaret"):
        (tmp_path / "broken").write_text(f"{text}{line}\n")
        assert containerfile(tmp_path / "broken"), line


@pytest.mark.parametrize("side", ["agent", "coordinator"])
def test_compose_reads_the_file_and_no_service_could_do_much(side: str) -> None:
    path = HERE / "compose" / side / "compose.yml"
    need("docker-compose")
    assert compose(path) == []


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("read_only: true", "read_only: false", "file system can be written"),
        ("cap_drop: [ALL]", "cap_drop: [CHOWN]", "capabilities"),
        ('user: "10001:10001"', 'user: "0:0"', "runs as root"),
        ("pids_limit: 1024", "privileged: true", "privileged"),
        ("image: ${AGENT", "imaeg: ${AGENT", "imaeg"),
        ("restart: unless-stopped", "restart: on-failure", "does not come back after a reboot"),
        ("protos.service.control_client", "http.client", "nobody asks it whether it is well"),
        ("mem_limit: ${AGENT_MEMORY:-16g}", "mem_limit: 14g", "do not fit into 14 GiB"),
    ],
)
def test_a_looser_compose_file_is_seen(old: str, new: str, why: str, tmp_path: Path) -> None:
    path = HERE / "compose" / "agent" / "compose.yml"
    need("docker-compose")
    assert old in path.read_text()
    (tmp_path / "compose.yml").write_text(path.read_text().replace(old, new, 1))
    shutil.copy(path.with_name("jobs.toml"), tmp_path)
    assert why in "; ".join(compose(tmp_path / "compose.yml"))


@pytest.mark.parametrize("values", sorted((HERE / "helm").glob("*.example.yaml")), ids=lambda p: p.stem)
def test_the_chart_renders_into_what_kubernetes_takes(values: Path, how: list[str]) -> None:
    assert chart(how, CHART, values) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("workload.yaml", "runAsNonRoot: true", "runAsNonRoot: false", "may run as root"),
        ("workload.yaml", "replicas: 1", "replicaas: 1", "replicaas"),
        ("workload.yaml", "automountServiceAccountToken: false", "", "token of the cluster"),
        ("workload.yaml", "emptyDir:\n            sizeLimit: 4Gi", "hostPath: {path: /tmp}", "mounts the node"),
        ("_parts.tpl", "drop: [ALL]", "drop: [CHOWN]", "capabilities"),
        ("service.yaml", "kind: Service", "kind: ConfigMap", "no Service"),
        ("workload.yaml", "livenessProbe", "lifecycle", "nobody asks it whether it is well"),
        ("_parts.tpl", 'lazaret.home" . }}]', 'lazaret.name" . }}]', "nobody asks it whether it is well"),
        ("config.yaml", ".Values.agent.jobs }}", ".Values.agent.gpus }}", "bounds no job's memory"),
        ("network.yaml", "policyTypes:", "policyTypes: 3 #", "NetworkPolicy"),
        ("config.yaml", "{{- end }}", "", "unexpected"),
    ],
)
def test_a_looser_chart_is_seen(name: str, old: str, new: str, why: str, how: list[str], tmp_path: Path) -> None:
    broken = shutil.copytree(CHART, tmp_path / "lazaret")
    text = (broken / "templates" / name).read_text()
    assert old in text
    (broken / "templates" / name).write_text(text.replace(old, new, 1))
    assert why in "; ".join(chart(how, broken, HERE / "helm" / "agent.example.yaml"))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("site", "", "agent.site: the hospital's short name"),
        ("modalities", [], "agent.modalities: what may come in"),
        ("modalities", ["CT; rm"], "agent.modalities.0"),
        ("coordinator", "gateway", "agent.coordinator"),
        ("policy", "controlled; rm", "agent.policy"),
        ("wrong", 1, "wrong"),
    ],
)
def test_values_that_were_forgotten_or_mistyped_are_named(
    key: str, value: object, why: str, how: list[str], tmp_path: Path
) -> None:
    values = yaml.safe_load((HERE / "helm" / "agent.example.yaml").read_text())
    values["agent"][key] = value
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    assert why in "; ".join(chart(how, CHART, tmp_path / "values.yaml"))


def test_a_job_fits_into_a_pod_beside_the_service(how: list[str], tmp_path: Path) -> None:
    values = yaml.safe_load((HERE / "helm" / "agent.example.yaml").read_text())
    for limit, why in (("31Gi", ""), ("30Gi", "a job of twice 14 GiB and the service do not fit into 30 GiB")):
        values["resources"]["limits"]["memory"] = limit
        values["resources"]["requests"]["memory"] = "16Gi"
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        assert chart(how, CHART, tmp_path / "values.yaml") == ([why] if why else [])


def test_nobody_is_let_in_or_out_whom_the_values_do_not_name(how: list[str], tmp_path: Path) -> None:
    values = yaml.safe_load((HERE / "helm" / "agent.example.yaml").read_text())
    del values["network"]
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    (policy,) = [d["spec"] for d in render(how, CHART, tmp_path / "values.yaml") if d["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert not policy["ingress"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53]


@pytest.mark.parametrize("side", ["agent", "coordinator"])
def test_what_a_pod_does_first_makes_its_home_once_and_brings_settings(
    side: str, how: list[str], tmp_path: Path
) -> None:
    values = yaml.safe_load((HERE / "helm" / f"{side}.example.yaml").read_text())
    values["coordinator" if side == "coordinator" else "agent"]["policy"] = (
        HERE.parent / "policies" / "review" / "presets" / "internal.toml"
    ).read_text()
    values.get("coordinator", {}).update({"ledger": "", "databaseSecret": ""})
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    documents = render(how, CHART, tmp_path / "values.yaml")
    (config,) = [document["data"] for document in documents if document["kind"] == "ConfigMap"]
    (tmp_path / "config").mkdir()
    for name, text in config.items():
        (tmp_path / "config" / name).write_text(text)
    script = (
        config["begin.sh"].replace("/var/lib/lazaret", f"{tmp_path}/state").replace("/config", f"{tmp_path}/config")
    )
    (tmp_path / f"lazaret-{side}").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {side} "$@"\n')
    (tmp_path / f"lazaret-{side}").chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for _ in range(1 if side == "coordinator" else 2):
        subprocess.run(["sh", "-c", script], check=True, env=environment, capture_output=True)
    home = tmp_path / "state" / side
    assert (home / "policy.toml").read_text() == config["policy.toml"]
    assert (home / "console.toml").read_text() == config["console.toml"]
    assert (home / "jobs.toml").exists() is (side == "agent")
    assert (home / "keys").stat().st_mode & 0o777 == 0o700


def test_a_tool_that_is_missing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate.shutil, "which", lambda _name: None)
    assert validate.main([]) == 1
    said = capsys.readouterr().out
    assert said.count("FAIL") == 6
    assert "systemd-analyze is not here (apt install systemd)" in said
