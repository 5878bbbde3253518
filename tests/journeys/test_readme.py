"""The README tells the truth: its commands run, in order, and its targets and files exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import agent.__main__
import coordinator.__main__
from agent.participant import read_mechanism
from agent.phantoms import scanners
from coordinator.plan import Job
from policies.policy import parse, preset
from tests.conftest import LONGEST
from tests.support.command_server import python as forking_python

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "deploy" / "docs"
README = (ROOT / "README.md").read_text()


@pytest.mark.timeout(1500)
def test_the_walk_through_by_hand_works_as_written(tmp_path: Path) -> None:
    block, persons = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
    assert block.startswith('export PATH="$PWD/.venv/bin:$PATH"\n')
    lines = block.replace("serve &\n", "serve > serve.log 2>&1 &\n")
    again = "! lazaret-agent --home site-a release ksame --basis hospital/basis.safetensors --modality OT --k 5"
    script_text = f"set -eu\ntrap 'kill $(jobs -p)' EXIT\n{lines}\n{again}\n{persons}\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    work = tmp_path / "work"
    bin_folder = work / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    modules = {
        "lazaret-agent": "-m agent",
        "lazaret-coordinator": "-m coordinator",
        "lazaret-verify": "-m policies.verify",
    }
    for name, how in {**modules, "python": ""}.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{forking_python()}" {how} "$@"\n')
        (bin_folder / name).chmod(0o755)
    command = ["bash", "-c", script_text]
    process = subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=1400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, textwrap.shorten(said, 4000)
    for word in (
        "site-a is enrolled",
        "admitted at level B",
        "quarantined: too_deep",
        "SOUND: lazaret/coordinator",
        "SOUND: lazaret/site-a",
        "one of each",
        "budget",
    ):
        assert word in said, word
    assert (work / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("document", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in DOCS.glob("*.md"))])
def test_every_command_that_a_document_shows_is_one(document: str) -> None:
    parsers = {"lazaret-agent": agent.__main__._parser(), "lazaret-coordinator": coordinator.__main__._parser()}
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", (ROOT / document).read_text(), flags=re.S)
    lines = [
        line for block in blocks for line in block.splitlines() if line.startswith(tuple(f"{p} " for p in parsers))
    ]
    assert lines or document != "README.md"
    for line in lines:
        plain = re.sub(r"\s(?:\|\||>|&).*", "", re.sub(r'"?\$\(.*?\)"?(?=\s|$)', "0", line))  # what a shell would do
        program, *words = shlex.split(plain, comments=True)
        try:
            parsers[program].parse_args(words)
        except SystemExit:
            pytest.fail(line)


def test_the_make_targets_exist() -> None:
    for target in set(re.findall(r"(?<!login )\bmake ([a-z-]+)", README)):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, target


def test_every_file_and_folder_that_the_documents_name_exists() -> None:
    for document in (ROOT / "README.md", ROOT / "policies" / "README.md", ROOT / "protos" / "README.md"):
        for name in re.findall(
            r"`((?:agent|coordinator|policies|protos|tests|deploy)/[\w/.-]+)`", document.read_text()
        ):
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_the_files_whose_tests_begin_first_exist() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_every_test_that_the_table_of_pitfalls_names_exists() -> None:
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    table = (ROOT / "policies" / "README.md").read_text()
    for name in re.findall(r"`(test_\w+?)(?:…)?`", table):
        assert f"def {name}" in source or (ROOT / "tests" / "policies" / name).exists(), name


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = re.findall(
        r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "deploy" / "docs" / "threat-model.md").read_text()
    )
    assert len(named) > 50
    wrong = [f"{file}::{name}" for file, name in named if f"def {name}(" not in _source(ROOT / file)]
    assert not wrong


def test_every_file_that_the_documents_in_deploy_name_exists() -> None:
    for document in sorted((ROOT / "deploy" / "docs").rglob("*.md")):
        for name in re.findall(
            r"`((?:agent|coordinator|policies|protos|tests|deploy)/[\w/-]+\.(?:py|md|json|proto|toml))`",
            document.read_text(),
        ):
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_the_documented_jobs_are_jobs() -> None:
    text = (ROOT / "deploy" / "docs" / "rounds.md").read_text()
    shown = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, flags=re.S)]
    assert [one["mechanism"] for one in shown] == ["federated", "federated-masked"]
    for one in shown:
        config = one.pop("config")
        assert config["centre"][-1] == "…64 numbers…"
        written = json.dumps({**config, "centre": [0.5] * 64})
        strategy = json.dumps(one.pop("strategy", {"name": "fedavg"}))
        job = Job(run="shown", config=written, strategy=strategy, **{**one, "sites": tuple(one["sites"])})
        mechanism = read_mechanism(job.config)
        assert (mechanism.claim(), mechanism.parameters) == (job.claim(), job.parameters)


def _source(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_presets_are_as_documented() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for name in ("internal", "controlled", "public"):
        found = parse(preset(name), name)
        assert f"{name} k = {found.k_min}, ε = {found.epsilon:g}" in text
        assert found.delta == 4e-6


def test_the_table_of_what_if_is_what_it_says(tmp_path: Path) -> None:
    table = README.partition("| attribute | name | what is done | why |\n")[2].partition("\n\n")[0]
    shown = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in table.splitlines()[1:]]
    assert len(shown) > 10
    agent = [sys.executable, "-m", "agent", "--home", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    init = ["init", "--site", "site-a", "--policy", "internal", "--modality", "CT", "--input", "x"]
    subprocess.run([*agent, *init], check=True, capture_output=True, env=environment)
    scanners.add_scanner_files(tmp_path)
    command = [*agent, "what-if", str(tmp_path / "scanner" / "ct.dcm"), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    (told,) = json.loads(done.stdout)
    said = {step["tag"]: [step["tag"], step["name"], step["action"], step["why"]] for step in told["steps"]}
    assert [said.get(row[0]) for row in shown] == shown
