"""What is deployed as an example is read by the real programs: our own, Orthanc, PostgreSQL, a shell."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from agent.ingest.config import parse_ingestion
from agent.service.job_rules import read_settings
from agent.storage.site_directory import parse_settings
from deploy.validate import HERE
from policies.review.policy import parse, preset
from protos.operations import confinement
from protos.operations.checks import as_json, failed, note, passed
from protos.operations.confinement import landlock_abi
from protos.web.settings import read
from tests.support.pacs import ENVIRONMENT
from tests.support.peers import need
from tests.support.ports import free_port
from tests.support.postgres import throwaway
from tests.support.steady_sender import echoes

ROOT = HERE.parent
DOCS = HERE / "docs"
SITE = """
site = "site-a"
coordinator = "127.0.0.1:7443"
input = "../input"
modalities = ["CT"]
secondary_capture_modalities = []
public_components = []
"""


def consoles() -> dict[str, str]:
    """Every console.toml that is shown or shipped."""
    found = {path.parent.name: path.read_text() for path in (HERE / "compose").glob("*/console.toml")}
    found |= {p.name: yaml.safe_load(p.read_text())["console"] for p in (HERE / "helm").glob("*.example.yaml")}
    page = (DOCS / "install.md").read_text()
    return found | {"install.md": page.split("```toml\n")[1].partition("```")[0]}


@pytest.mark.parametrize("name", sorted(consoles()))
def test_every_console_that_is_shown_is_one_and_is_where_the_rest_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "console.toml").write_text(consoles()[name])
    settings = read(tmp_path)
    assert settings is not None
    told = tomllib.loads(consoles()[name])
    assert (told["listen"], told["metrics"]) == ("0.0.0.0:8743", "127.0.0.1:9464")


def test_the_rules_for_jobs_of_compose_and_of_the_chart_are_read(tmp_path: Path) -> None:
    values = [HERE / "helm" / name for name in ("lazaret/values.yaml", "agent.example.yaml")]
    texts = [yaml.safe_load(path.read_text())["agent"]["jobs"] for path in values]
    for text in (*texts, (HERE / "compose" / "agent" / "jobs.toml").read_text()):
        (tmp_path / "jobs.toml").write_text(text)
        assert read_settings(tmp_path).memory_gib > 0


@pytest.mark.parametrize("where", ["compose", "helm"])
def test_every_ingest_toml_is_one_and_listens_where_the_network_leads(where: str, tmp_path: Path) -> None:
    compose = yaml.safe_load((HERE / "compose" / "agent" / "compose.yml").read_text())
    values = yaml.safe_load((HERE / "helm" / "agent.example.yaml").read_text())
    files = {"compose": HERE / "compose" / "agent" / "ingest.toml"}
    text = files[where].read_text() if where in files else values["agent"]["ingest"]
    found = parse_ingestion(tmp_path, parse_settings(tmp_path, SITE), text)
    assert found.listener is not None
    assert found.listener.port == 11112
    callers = {address for caller in found.listener.callers for address in map(str, caller.addresses)}
    if where == "compose":
        orthanc = compose["services"]["orthanc"]["networks"]["pacs"]["ipv4_address"]
        assert callers in ({orthanc}, {f"{orthanc}/32"})
        assert tomllib.loads(text)["pacs"]["orthanc"]["host"] == orthanc
        assert any(port.endswith(":11112:11112") for port in compose["services"]["agent"]["ports"])
    else:
        assert {address.partition("/")[0] for address in callers} == {
            address.partition("/")[0] for address in values["network"]["pacs"]
        }


def test_the_orthanc_of_the_compose_file_speaks_with_the_agent_and_with_nobody_else(tmp_path: Path) -> None:
    need("Orthanc")
    config = json.loads((HERE / "compose" / "agent" / "orthanc.json").read_text())
    port = free_port()
    for name in ("StorageDirectory", "IndexDirectory"):
        config[name] = str(tmp_path / "db")
    config["DicomPort"], config["DicomModalities"]["lazaret"]["Host"] = port, "127.0.0.1"
    (tmp_path / "orthanc.json").write_text(json.dumps(config))
    with (tmp_path / "log").open("wb") as log:
        orthanc = subprocess.Popen(
            ["Orthanc", str(tmp_path / "orthanc.json")], stdout=log, stderr=log, env=ENVIRONMENT
        )

    try:
        until = time.monotonic() + 200  # as for every Orthanc of these tests: on a loaded machine it starts slowly
        while not echoes(port, "HOSPITALPACS", caller="LAZARET"):
            said = (tmp_path / "log").read_text()[-2000:]
            assert orthanc.poll() is None, said
            assert time.monotonic() < until, "Orthanc does not answer\n" + said
            time.sleep(0.1)
        assert not echoes(port, "HOSPITALPACS", caller="STRANGER")
        assert not echoes(port, "OTHERPACS", caller="LAZARET")
    finally:
        orthanc.terminate()
        orthanc.wait(30)


@pytest.mark.slow
def test_the_ledger_of_the_compose_file_is_made_by_its_own_words(tmp_path: Path) -> None:
    """roles.sh by a real PostgreSQL, and then the two commands at the head of the file."""
    head = (HERE / "compose" / "coordinator" / "compose.yml").read_text().partition("x-hardened")[0]
    typed = re.sub(r"\s*\\\n#\s*", " ", head)
    install, init = re.findall(r"docker compose run --rm coordinator (.*?)$", typed, flags=re.M)
    with throwaway() as cluster:
        for name in ("owner", "writer"):
            (tmp_path / name).write_text(f"{name}-secret\n")
            cluster.admin(f"DROP OWNED BY lazaret_{name}")
            cluster.admin(f"DROP ROLE lazaret_{name}")
        cluster.admin("CREATE DATABASE lazaret")
        script = (HERE / "compose" / "coordinator" / "roles.sh").read_text().replace("/run/secrets", str(tmp_path))
        environment = {
            **os.environ,
            "PGHOST": str(cluster.folder),
            "POSTGRES_USER": "postgres",
            "POSTGRES_DB": "lazaret",
        }
        environment["PATH"] += f":{cluster.programs}"
        subprocess.run(["sh", "-c", script], check=True, env=environment)
        environment["PYTHONPATH"] = str(ROOT)
        coordinator = [sys.executable, "-m", "coordinator", "--home", str(tmp_path / "home")]
        for words in (install, init):
            line = words.replace("host=postgres ", f"host={cluster.folder} ")
            command = ["bash", "-c", f'exec "$@" {line}', "bash", *coordinator]
            done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    assert "lazaret_writer" in (tmp_path / "home" / "coordinator.toml").read_text()


def test_the_sheets_say_the_ports_that_are_the_programs_own() -> None:
    sheet = (DOCS / "firewall.md").read_text()
    for port in ("11112/tcp", "8743/tcp", "9464/tcp", "8443/tcp", "7443"):
        assert port in sheet
    example = tomllib.loads((DOCS / "ingest.example.toml").read_text())
    assert (example["listener"]["port"], example["stow"]["port"]) == (11112, 8443)
    form = (DOCS / "pacs-request.md").read_text()
    for name in re.findall(r"\[(\w+)\.(?:NAME )?([a-z_]+)", form):
        known = {
            **example["listener"],
            **example["site"],
            **example["pacs"]["main"],
            **example["pacs"]["main"]["tls"],
        }
        assert name[1] in known or name[1] == "NAME", name


_CALL = re.compile(r"(?:^\d+\s+|\] )(\w+)\(", re.M)


def allowed_by(unit: str) -> set[str]:
    """The system calls that a unit's filter allows, its groups spelled out by systemd."""
    text = (HERE / "systemd" / f"{unit}.service").read_text()
    (line,) = re.findall(r"^SystemCallFilter=(.*)$", text, re.M)
    allowed: set[str] = set()
    groups = line.split()
    while groups:
        name = groups.pop()
        if not name.startswith("@"):
            allowed.add(name)
            continue
        listed = subprocess.run(
            ["systemd-analyze", "syscall-filter", name], check=True, capture_output=True, text=True
        )
        groups += [w for line in listed.stdout.splitlines()[1:] for w in line.split("#")[0].split()]
    return allowed


CONFINING = """
from protos.operations import confinement as c
c.confine(c.Allowed(getattr(c, "{calls}"), c.interpreter(), "{spool}"), "required")
"""
INSPECTING = """
import os
from protos.operations.confinement import confine_to_descriptors
confine_to_descriptors(1 << 30, 60, os.getppid())
"""


@pytest.mark.parametrize("unit", ["lazaret-agent", "lazaret-coordinator"])
@pytest.mark.parametrize("calls", ["INTERPRETER", "CONVERSING", "RECEIVING"])
def test_the_units_allow_what_the_confinement_asks_and_what_it_leaves(unit: str, calls: str, tmp_path: Path) -> None:
    need("strace", "systemd-analyze")
    if not landlock_abi():
        pytest.skip("this kernel has no Landlock")
    allowed = allowed_by(unit)
    asked = traced(CONFINING.format(calls=calls, spool=tmp_path), tmp_path)
    assert {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp"} <= asked
    assert {"prctl", "capset"} <= asked
    assert asked - allowed == set()
    assert set(getattr(confinement, calls)) - allowed == set()


def test_the_coordinators_unit_allows_what_the_inspection_asks(tmp_path: Path) -> None:
    need("strace", "systemd-analyze")
    asked = traced(INSPECTING, tmp_path)
    assert {"unshare", "prlimit64"} <= asked
    assert asked - allowed_by("lazaret-coordinator") == set()


def traced(text: str, folder: Path) -> set[str]:
    """The system calls of a program that ends itself."""
    trace, program = folder / "calls", f"import os, sys\nsys.path[0] = {str(ROOT)!r}\n{text}\nos._exit(0)"
    command = [shutil.which("strace") or "strace", "-f", "-qq", "-o", str(trace), sys.executable, "-B", "-c", program]
    subprocess.run(command, check=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    return set(_CALL.findall(trace.read_text()))


def test_a_container_runs_under_its_runtimes_own_profile_which_allows_the_confinement() -> None:
    """Those of Docker, containerd and Podman allow landlock_* and seccomp, from the versions on that these say."""
    for compose in sorted((HERE / "compose").glob("*/compose.yml")):
        assert "seccomp" not in compose.read_text(), "a profile of our own, or none, in the place of the runtime's"
        assert "privileged" not in compose.read_text()
    chart = (HERE / "helm" / "lazaret" / "templates" / "workload.yaml").read_text()
    assert re.search(r"seccompProfile:\n\s+type: RuntimeDefault\n", chart)
    composes, helm = sorted((HERE / "compose").glob("*/compose.yml")), HERE / "helm" / "lazaret"
    assert len(composes) == 2
    for place in (DOCS / "limits.md", *composes, helm / "values.yaml", helm / "templates" / "NOTES.txt"):
        told = " ".join(place.read_text().split())
        for said in ("Docker 23", "containerd 1.6", "Podman 4.2", "landlock_*", "refuse"):
            assert said in told, place.name


@pytest.mark.slow
def test_the_coordinator_asks_nothing_of_the_kernel_that_its_unit_forbids(tmp_path: Path) -> None:
    """Every system call of a coordinator that starts, serves and stops is in the list of its unit."""
    need("strace", "systemd-analyze")
    allowed = allowed_by("lazaret-coordinator")
    coordinator = [sys.executable, "-m", "coordinator", "--home", str(tmp_path / "home")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    listen = f"127.0.0.1:{free_port()}"
    subprocess.run([*coordinator, "init", "--policy", "internal", "--listen", listen], check=True, env=environment)
    trace = [shutil.which("strace") or "strace", "-f", "-qq", "-o", str(tmp_path / "calls")]
    serving = subprocess.Popen([*trace, *coordinator, "serve"], env=environment, stdout=subprocess.PIPE)
    assert serving.stdout is not None
    assert b"serving" in serving.stdout.readline()
    subprocess.run([*coordinator, "enrolments"], check=True, env=environment, capture_output=True)
    (child,) = Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()
    os.kill(int(child), 15)
    serving.wait(60)
    asked = set(_CALL.findall((tmp_path / "calls").read_text()))
    assert len(asked) > 40
    assert asked - allowed == set()


def test_an_update_and_the_way_back_go_by_the_upgrade_of_the_databases_on_every_page() -> None:
    rows = [line for line in (DOCS / "install.md").read_text().splitlines() if line.startswith("| ")]
    (update,) = [row for row in rows if row.startswith("| an update")]
    order = [update.index(f"`{word}") for word in ("systemctl stop", "lazaret-agent upgrade", "systemctl start")]
    assert order == sorted(order)
    assert order[0] < update.index("steps 1 and 2") < order[1]
    (back,) = [row for row in rows if row.startswith("| the way back")]
    assert "restore that snapshot" in back
    assert "deploy/docs/upgrade.md" in back
    steps = (DOCS / "upgrade.md").read_text().partition("## Going back")[2].partition("## Forms")[0]
    assert "restore MOVED/backups/before-upgrade-DATE --keys MOVED/keys" in steps
    (backups,) = [row for row in rows if row.startswith("| backups")]
    assert "deploy/docs/backup.md" in backups


def test_the_pacs_team_is_told_what_leaves_as_the_presets_have_it() -> None:
    text = " ".join((DOCS / "pacs-request.md").read_text().split())
    presets = {name: parse(preset(name), name) for name in ("internal", "controlled", "public")}
    asked = {name: set(policy.approvals) for name, policy in presets.items()}
    assert asked == {"internal": set(), "controlled": set(), "public": {"compliance"}}
    assert "`internal` and `controlled` ask for no person's approval, `public` for the compliance officer's" in text
    assert not any("remodel" in policy.mechanisms for policy in presets.values())
    assert "with other faces; no preset admits it" in text
    assert "wait unchanged, encrypted, in a spool" in text
    assert "two approvals" not in text


def test_the_firewall_sheet_names_every_way_out_of_the_agent() -> None:
    agent = (DOCS / "firewall.md").read_text().partition("## The coordinator")[0]
    assert re.search(r"\| agent \| identity provider, 443/tcp .*`\[oidc\]`", agent)


def test_the_sizing_page_says_first_what_nobody_has_measured() -> None:
    opening = (DOCS / "sizing.md").read_text().partition("## The agent")[0]
    assert "estimated, not measured" in opening
    assert opening.count("estimates") == 3


def test_the_monitoring_page_shows_what_a_doctor_writes_for_a_script() -> None:
    shown = json.loads((DOCS / "monitoring.md").read_text().partition("```json\n")[2].partition("```")[0])
    found = [
        passed("site.toml"),
        failed("C-ECHO to main", "nobody answers", "..."),
        note("GPU and driver", "none"),
    ]
    assert shown == json.loads(as_json(found))
