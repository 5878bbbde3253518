"""The tests lie where the code lies: ``tests/<package>/<room>/test_<module>[_<aspect>].py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parent
ROOT: Final = TESTS.parent
MIRRORED: Final = ("agent", "coordinator", "policies", "protos")
# Folders of tests that belong to no single module, with what each holds.
OWN_FOLDERS: Final = {
    "attacks": "what an attacker does to either side",
    "benchmarks": "ratios against named peers",
    "crash": "kills at every moment",
    "deploy": "the tree of deploy/: demo, bundle, docs, reproduction, phantoms",
    "faults": "full disks, cut lines, lost power",
    "fuzz": "foreign bytes",
    "journeys": "real processes, end to end",
    "model": "the formal model",
    "mutation": "changes of the law that a test must notice",
    "scale": "many agents, many releases",
    "support": "builders and peers",
    "torture": "hostile images",
    "vectors": "kept bytes",
}

# Also within the text of a program that a test starts.
IMPORTS_A_TEST: Final = re.compile(
    r"\b(?:from|import) +tests[.\w]*\.test_|\bfrom +tests[.\w]* +import +[^\n]*\btest_"
)


def module_of(test: Path) -> Path | None:
    """The module that ``test`` is named after, the longest name that fits; ``None`` where no module fits."""
    room = ROOT / test.parent.relative_to(TESTS)
    words = test.stem.removeprefix("test_").split("_")
    for end in range(len(words), 0, -1):
        for module in (room / f"{'_'.join(words[:end])}.py", room / "_".join(words[:end]) / "__init__.py"):
            if module.is_file():
                return module
    return None


def test_every_test_lies_where_its_module_lies() -> None:
    tests = [path for package in MIRRORED for path in (TESTS / package).rglob("test_*.py")]
    assert len(tests) > 200
    assert [str(path.relative_to(ROOT)) for path in tests if module_of(path) is None] == []


def test_no_module_imports_a_test_module() -> None:
    """What two tests need is a builder in ``tests/support``."""
    files = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    assert len(files) > 500
    found = [str(path.relative_to(ROOT)) for path in files if IMPORTS_A_TEST.search(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from tests.agent.storage.test_vault import record",
        "from tests.test_start import ROOT",
        "import tests.agent.storage.test_vault as vaults",
        "from tests.agent.storage import builders, test_vault",
        "    from tests.agent.storage.test_vault import (",
    ],
)
def test_an_import_of_a_test_module_is_seen(line: str) -> None:
    assert IMPORTS_A_TEST.search(line)
    assert not IMPORTS_A_TEST.search(line.replace("test_", "builder_"))


def test_the_other_folders_are_those_that_are_listed() -> None:
    files = [path.relative_to(TESTS) for path in TESTS.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    folders = {path.parts[0] for path in files if len(path.parts) > 1}
    assert folders == {*OWN_FOLDERS, *MIRRORED}


def test_a_test_that_is_named_after_nothing_is_seen() -> None:
    assert module_of(TESTS / "agent" / "storage" / "test_nothing_of_ours.py") is None
    assert module_of(TESTS / "agent" / "storage" / "test_vault_after_a_kill.py") == ROOT / "agent/storage/vault.py"
    assert module_of(TESTS / "policies" / "storage" / "test_vault.py") is None
