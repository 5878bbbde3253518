"""``make quick``: which tests belong to what was changed, in small repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.quick import ROOT, changed_files, covering, selection, too_long

FILES = (
    "README.md",
    "agent/storage/vault.py",
    "agent/mechanisms/ksame/mechanism.py",
    "agent/domain.py",
    "policies/review/rules.py",
    "tests/agent/storage/test_vault.py",
    "tests/agent/mechanisms/test_registry.py",
    "tests/agent/test_domain.py",
    "tests/agent/test_domain_shapes.py",
    "tests/policies/review/test_rules.py",
    "tests/journeys/test_demo.py",
    "tests/support/ledger_world.py",
)


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / ".gitignore").write_text("build/\n")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("agent/storage/vault.py", ["tests/agent/storage"]),
        ("agent/mechanisms/ksame/mechanism.py", ["tests/agent/mechanisms"]),
        ("agent/console/new.html", []),  # a room without tests
        ("agent/domain.py", ["tests/agent/test_domain.py", "tests/agent/test_domain_shapes.py"]),
        ("tests/agent/test_domain_shapes.py", ["tests/agent/test_domain_shapes.py"]),
        ("tests/agent/storage/test_vault.py", ["tests/agent/storage"]),
        ("tests/journeys/test_demo.py", ["tests/journeys/test_demo.py"]),
        ("tests/journeys/test_gone.py", []),
        ("tests/support/ledger_world.py", []),
        ("README.md", []),
    ],
)
def test_a_file_has_the_covering_its_room(tree: Path, name: str, tests: list[str]) -> None:
    assert list(covering(name, tree)) == tests


def test_changes_are_those_since_main_committed_or_not_new_moved_or_gone(tree: Path) -> None:
    assert changed_files(tree) == []
    git(tree, "checkout", "-q", "-b", "work")
    (tree / "policies/review/rules.py").write_text("committed")
    git(tree, "mv", "agent/storage/vault.py", "agent/storage/safe.py")
    git(tree, "commit", "-q", "-am", "one")
    (tree / "agent/domain.py").unlink()
    (tree / "tests/agent/storage/test_safe.py").write_text("new")
    (tree / "build").mkdir()
    (tree / "build/out.py").write_text("ignored")
    moved = ["agent/storage/safe.py", "agent/storage/vault.py"]
    expected = ["agent/domain.py", *moved, "policies/review/rules.py", "tests/agent/storage/test_safe.py"]
    assert changed_files(tree) == expected
    git(tree, "checkout", "-q", "--orphan", "alone")
    git(tree, "branch", "-q", "-D", "main")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "a clone without main")
    (tree / "README.md").write_text("changed")
    assert changed_files(tree) == ["README.md"]


def test_every_room_is_run_once_and_what_belongs_to_none_is_told(tree: Path) -> None:
    names = ["agent/storage/vault.py", "tests/agent/storage/test_vault.py", "agent/domain.py", "README.md"]
    tests, other = selection(names, tree)
    assert tests == ["tests/agent/storage", "tests/agent/test_domain.py", "tests/agent/test_domain_shapes.py"]
    assert other == ["README.md"]


def test_every_module_of_this_tree_that_has_a_folder_of_tests_finds_it() -> None:
    rooms = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests/agent").glob("*/test_*.py")}
    assert len(rooms) > 10
    for room in rooms:
        assert covering(f"{room}/x.py", ROOT) == (f"tests/{room}",)


def test_a_long_file_runs_only_with_its_own_module() -> None:
    longest = ("agent/storage/test_vault_after_a_kill.py", "agent/mechanisms/privimage/test_mechanism.py")
    rooms = ["tests/agent/storage", "tests/agent/mechanisms"]

    def left_out(*names: str) -> list[str]:
        return too_long(names, rooms, longest)

    assert left_out("agent/storage/spool.py") == [f"tests/{name}" for name in longest]
    assert left_out("agent/storage/vault.py") == ["tests/agent/mechanisms/privimage/test_mechanism.py"]
    assert left_out("tests/agent/storage/test_vault_after_a_kill.py") == left_out("agent/storage/vault.py")
    assert left_out("agent/mechanisms/privimage/mechanism.py") == ["tests/agent/storage/test_vault_after_a_kill.py"]
    assert left_out("agent/mechanisms/ksame/mechanism.py") == [f"tests/{name}" for name in longest]
    assert too_long(["agent/storage/spool.py"], ["tests/agent/storag"], longest) == []


def test_every_long_file_is_one() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
