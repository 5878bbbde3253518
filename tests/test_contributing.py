"""The walk-through of CONTRIBUTING.md: a new developer's mechanism, from the text alone, in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("agent", "coordinator", "policies", "protos", "deploy", "tests")
BLOCK: Final = re.compile(
    r"(?:^`(?P<path>[\w/.]+)`:\n\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
BY_HAND: Final = ".venv/bin/"  # where the text's commands are installed
SHOWN: Final = """
import agent.console.descriptions as site, coordinator.explanations as federation
from agent.mechanisms.registry import MECHANISMS

print(MECHANISMS["kmedoids"].name, site.MECHANISMS["kmedoids"] == federation.MECHANISMS["kmedoids"])
"""


@dataclass(frozen=True)
class Block:
    """A block of the text: a file, a change of a file, or commands."""

    path: str
    kind: str
    text: str


def walk_through(text: str) -> list[Block]:
    """The blocks of the section that adds a mechanism."""
    section = re.search(r"^## Add a mechanism\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    return [Block(m["path"] or "", m["kind"], m["text"]) for m in BLOCK.finditer(section[1])]


class Copy:
    """A copy of the tree, which the steps of the text change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in PACKAGES:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, folder / name)
        self.environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent), "PYTHONPATH": str(folder)}

    def run(self, words: list[str], text: str = "") -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def follow(self, block: Block) -> str:
        """Do what one block says; what its commands print."""
        if block.kind == "diff":
            return self.run(["git", "apply", "--recount", "-"], block.text)
        if block.path:
            (self.folder / block.path).write_text(block.text)
            return ""
        return "".join(self.run(self.typed(line)) for line in block.text.splitlines())

    def typed(self, line: str) -> list[str]:
        """A command of the text, with the interpreter of this test."""
        words = line.split()
        if words[0] == f"{BY_HAND}lazaret-agent":
            return [sys.executable, "-m", "agent", *words[1:]]
        if words[0] == f"{BY_HAND}python":
            return [sys.executable, *words[1:]]
        assert words[0] in ("mkdir", "touch"), line
        return words


@pytest.mark.timeout(1200)  # it starts tests of its own
def test_a_mechanism_that_is_added_as_the_text_says_is_found_released_and_documented(tmp_path: Path) -> None:
    blocks = walk_through((ROOT / "CONTRIBUTING.md").read_text())
    assert {Path(block.path).name for block in blocks if block.path} == {
        "mechanism.py",
        "options.py",
        "config.py",
        "test_mechanism.py",
    }
    tree = Copy(tmp_path)
    said = [tree.follow(block) for block in blocks]
    assert "--l-diversity" in said[-1]
    assert re.search(r"\b[1-9]\d* passed", said[-1])
    assert "kmedoids" in tree.run([sys.executable, "-m", "agent", "release", "--help"])
    assert "kmedoids" in (tree.folder / "deploy/docs/reference/agent-commands.md").read_text()
    assert tree.run([sys.executable, "-c", SHOWN]) == "kmedoids True\n"


def test_the_text_is_one_folder_of_three_files_and_names_the_mechanism_in_no_other_product_file_than_two() -> None:
    blocks = walk_through((ROOT / "CONTRIBUTING.md").read_text())
    changed = {name for block in blocks for name in re.findall(r"^\+\+\+ b/(.*)$", block.text, re.MULTILINE)}
    assert {name for name in changed if not name.startswith("tests/")} == {
        "agent/mechanisms/kanonymous.py",
        "policies/review/mechanism_terms.py",
    }


def test_every_link_file_and_make_target_of_the_text_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "CONTRIBUTING.md" in (ROOT / "README.md").read_text()
    for name, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text):
        headings = [line.lstrip("# ").lower().replace(" ", "-") for line in (ROOT / name).read_text().splitlines()]
        assert not anchor or anchor in headings, f"{name}#{anchor}"
    named = set(re.findall(r"`((?:agent|coordinator|policies|protos|tests|deploy)/[\w/.-]+)`", text))
    assert len(named) > 10
    for name in sorted(one for one in named if "kmedoids" not in one):
        assert (ROOT / name).exists(), name
    for target in sorted(set(re.findall(r"\bmake ([a-z-]+)`", text))):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_every_decision_says_whether_it_still_holds() -> None:
    decisions = sorted((ROOT / "deploy/docs/adr").glob("*.md"))
    assert len(decisions) >= 18
    for path in decisions:
        title, _, status = path.read_text().splitlines()[:3]
        assert title.startswith(f"# {int(path.name[:4])}. "), path.name
        assert re.match(r"Status: (proposed|accepted|rejected|superseded by decision \d+)[.;]", status), path.name


def test_the_contract_that_no_mechanism_imports_another_names_every_mechanism() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["name"] == "no mechanism imports another")
    folders = {path.parent.name for path in (ROOT / "agent" / "mechanisms").glob("*/mechanism.py")}
    assert set(contract["modules"]) == {f"agent.mechanisms.{name}" for name in folders}
