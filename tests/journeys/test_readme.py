"""README and guides tell the truth: their commands run, in order, and their targets, files and links exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import agent.cli.options
import coordinator.cli.options
from agent.federation.run_mechanism import read_mechanism
from agent.mechanisms.common.linear_codec import load_basis
from coordinator.federation.job import Job, with_noise
from deploy.phantoms import scanner_files
from deploy.reproduction import __main__
from policies.ledger.state import Account
from policies.ledger_service import open_accounts
from policies.review.policy import parse, preset
from policies.review.rules import AccountContext
from policies.tasks.task import task_from_toml
from tests.conftest import LONGEST
from tests.support.command_server import python as forking_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "deploy" / "docs"
README = (ROOT / "README.md").read_text()


def _blocks(document: str, language: str = "sh") -> list[str]:
    """The fenced blocks of a document in this language; "" is one that names none. An indent is a list's."""
    found = re.findall(r"^( *)```(\S*)\n(.*?)^\1```$", (ROOT / document).read_text(), flags=re.S | re.M)
    return [textwrap.dedent(body) for _, name, body in found if name == language]


def _typed(script: str, work: Path) -> str:
    """What a shell prints that runs the lines of a page in ``work``; every one of them must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    bin_folder = work / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    modules = {
        "lazaret-agent": "-m agent",
        "lazaret-coordinator": "-m coordinator",
        "lazaret-verify": "-m policies.audit.verify",
    }
    for name, how in {**modules, "python": ""}.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{forking_python()}" {how} "$@"\n')
        (bin_folder / name).chmod(0o755)
    script = re.sub(r"(serve.*) &\n", r"\1 >> serve.log 2>&1 &\n", script)
    process = subprocess.Popen(
        ["bash", "-c", f"set -eu\ntrap 'kill $(jobs -p)' EXIT\n{script}\n"],
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=2800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, textwrap.shorten(said, 4000)
    return said


@pytest.mark.timeout(3000)
def test_the_walk_through_by_hand_works_as_written(tmp_path: Path) -> None:
    *lines, persons = _blocks("deploy/docs/walk.md")
    assert lines[0].startswith('export PATH="$PWD/.venv/bin:$PATH"\n')
    again = "! lazaret-agent --home site-a release ksame --basis hospital/basis.safetensors --modality OT --k 5"
    work = tmp_path / "work"
    served = "test -S site-a/control.sock && test -S coordinator/control.sock"  # both sides, to the end
    said = _typed("\n".join([*lines, again, persons, served]), work)
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


@pytest.mark.timeout(3000)
def test_the_first_release_works_as_written_at_a_hospital_that_is_enrolled(tmp_path: Path) -> None:
    """As it is installed: the command knows the site's folder, and the service runs, as the walk has started it."""
    setup, invite, approve, *_ = _blocks("deploy/docs/walk.md")
    page = _blocks("deploy/docs/first-release.md")
    assert len(page) == 7
    installed = (
        'lazaret-agent() { command lazaret-agent --home site-a "$@"; }\nBASIS=hospital/basis.safetensors MODALITY=OT'
    )
    said = _typed("\n".join([setup, invite, approve, installed, *page]), tmp_path / "work")
    labels, *printed = _blocks("deploy/docs/first-release.md", "text")
    assert (tmp_path / "work" / "hospital" / "dicom" / "labels.csv").read_text().startswith(labels)
    shown = [line for block in printed for line in block.splitlines()]
    varies = re.compile(r"release-[0-9a-f]{32}")
    for line in shown:
        for part in varies.sub("", line).split("…"):
            assert part.strip() in said, line


def test_the_basis_for_k_same_is_fitted_as_written(tmp_path: Path) -> None:
    (code,) = _blocks("deploy/docs/researcher.md", "python")
    (tmp_path / "public").mkdir()
    for seed in range(40):
        noise = np.random.default_rng(seed).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(noise).save(tmp_path / "public" / f"{seed}.png")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env=environment)
    assert load_basis((tmp_path / "basis.safetensors").read_bytes()).shape == (8, 8)


@pytest.mark.parametrize("document", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in DOCS.rglob("*.md"))])
def test_every_command_that_a_document_shows_is_one(document: str) -> None:
    parsers = {
        "lazaret-agent": agent.cli.options.build_parser(),
        "lazaret-coordinator": coordinator.cli.options.build_parser(),
        "python -m deploy.reproduction": __main__._parser(),
    }
    blocks = [*_blocks(document), *_blocks(document, "")]
    lines = [
        line for block in blocks for line in block.splitlines() if line.startswith(tuple(f"{p} " for p in parsers))
    ]
    assert lines or document != "README.md"
    for line in lines:
        plain = re.sub(r"\s(?:\|\||>|&).*", "", re.sub(r'"?\$\(.*?\)"?(?=\s|$)', "0", line))  # what a shell would do
        program = next(p for p in parsers if plain.startswith(f"{p} "))
        words = shlex.split(plain.removeprefix(program), comments=True)
        try:
            parsers[program].parse_args(words)
        except SystemExit:
            pytest.fail(line)


def test_the_make_targets_exist() -> None:
    texts = "\n".join([README, *_blocks("deploy/docs/developer.md", "")])
    for target in set(re.findall(r"(?<!login )\bmake ([a-z-]+)", texts)):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, target


def test_every_file_and_folder_that_the_documents_name_exists() -> None:
    for document in (ROOT / "README.md", ROOT / "policies" / "README.md", ROOT / "protos" / "README.md"):
        for name in re.findall(
            r"`((?:agent|coordinator|policies|protos|tests|deploy)/[\w/.-]+)`", document.read_text()
        ):
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_every_link_of_the_readme_leads_to_a_page_and_a_heading() -> None:
    """Those of the site's pages stop `make docs`."""
    links = re.findall(r"\]\((?!https:)([^)#]+)(?:#([^)]+))?\)", README) + re.findall(r'src="([^"]+)()"', README)
    assert len(links) > 25
    for name, anchor in links:
        assert (ROOT / name).is_file(), name
        headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), flags=re.M) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{name}#{anchor}"


def test_the_readme_can_be_read_in_two_minutes() -> None:
    assert len(README.splitlines()) <= 150


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


def test_the_rows_of_the_threat_model_stand_in_the_order_of_their_numbers() -> None:
    lines = (ROOT / "deploy" / "docs" / "threat-model.md").read_text().splitlines()
    rows = [(m[1], int(m[2])) for line in lines if (m := re.match(r"\| *([A-Z])(\d+) *\|", line))]
    for kind in {kind for kind, _ in rows}:
        numbers = [number for of, number in rows if of == kind]
        assert numbers == list(range(1, len(numbers) + 1)), kind


def test_every_file_that_the_documents_in_deploy_name_exists() -> None:
    for document in sorted((ROOT / "deploy" / "docs").rglob("*.md")):
        for name in re.findall(
            r"`((?:agent|coordinator|policies|protos|tests|deploy)/[\w/-]+\.(?:py|md|json|proto|toml))`",
            document.read_text(),
        ):
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_the_documented_jobs_are_jobs() -> None:
    text = (ROOT / "deploy" / "docs" / "rounds.md").read_text()
    written = re.findall(r"```toml\n(\[task\].*?)```", text, flags=re.S)
    digits, task = (task_from_toml(one, "task.toml") for one in written)
    sums = replace(task, training=replace(task.training, rounds=40, steps_per_round=1, momentum=0.0))
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, flags=re.S)]
    shown = [block for block in blocks if "mechanism" in block]  # the others are parts of jobs
    assert [one["mechanism"] for one in shown] == ["federated", "federated", "federated-masked"]
    account = AccountContext(Account(open_accounts("site-a", parse(preset("internal"), "internal"))[0]))
    for one, meant in zip(shown, (digits, task, sums), strict=True):
        config = {**one.pop("config"), "parameters": one["parameters"], "task": meant.to_table()}
        strategy = json.dumps(one.pop("strategy", {"name": "fedavg"}))
        lists = {key: tuple(one.pop(key)) for key in ("sites", "evaluate") if key in one}
        job = Job(run="shown", config=json.dumps(config), strategy=strategy, **lists, **one)
        job = with_noise(job, dict.fromkeys(lists["sites"], account))
        mechanism = read_mechanism(job.config)
        assert mechanism.claim() == job.claim()
        assert mechanism.network().parameters == job.parameters


def _source(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_presets_are_as_documented() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for name in ("internal", "controlled", "public"):
        found = parse(preset(name), name)
        assert f"{name} k = {found.k_min}, ε = {found.epsilon:g}" in text
        assert found.delta == 4e-6


def test_the_table_of_what_if_is_what_it_says(tmp_path: Path) -> None:
    page = (DOCS / "attributes.md").read_text()
    table = page.partition("| attribute | name | what is done | why |\n")[2].partition("\n\n")[0]
    shown = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in table.splitlines()[1:]]
    assert len(shown) > 10
    agent = [sys.executable, "-m", "agent", "--home", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    init = ["init", "--site", "site-a", "--policy", "internal", "--modality", "CT", "--input", "x"]
    subprocess.run([*agent, *init], check=True, capture_output=True, env=environment)
    scanner_files.add_scanner_files(tmp_path)
    command = [*agent, "what-if", str(tmp_path / "scanner" / "ct.dcm"), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    (told,) = json.loads(done.stdout)
    said = {step["tag"]: [step["tag"], step["name"], step["action"], step["why"]] for step in told["steps"]}
    assert [said.get(row[0]) for row in shown] == shown
