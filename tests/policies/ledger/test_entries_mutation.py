"""The mutation run over the law, in short: a sample is killed, and without the law's tests nothing is.

The long form is ``python -m tests.mutation``: every mutant of ``ledger/state.py``, ``review/rules.py`` and
``review/mechanism_terms.py`` of ``policies``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import policies.ledger.state
from policies.ledger.entries import InvalidEntryError, Opened, Record, Reserved
from tests.mutation.equivalents import EQUIVALENT
from tests.mutation.mutants import mutants

ROOT = Path(__file__).parents[3]
LAW = ("policies.ledger.state", "policies.review.rules")


def source(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text()


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.mutation", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_a_sample_of_the_mutants_is_killed_by_tests_that_fail() -> None:
    code, told = run("--sample", "12")
    assert [m["mutant"] for m in told["mutants"] if not m["killer"]] == []
    assert code == 0
    assert {m["mutant"].split()[0] for m in told["mutants"]} >= {"ledger", "review"}
    assert sum("::test_" in m["killer"] or "::Test" in m["killer"] for m in told["mutants"]) >= 10


def test_without_tests_of_the_law_mutants_survive_and_the_run_says_so() -> None:
    code, told = run("--sample", "3", "--tests", "tests/policies/ledger/test_cbor.py")
    assert code == 1
    assert [m["killer"] for m in told["mutants"]] == [""] * 3


def test_tests_that_fail_anyway_kill_nothing() -> None:
    command = [sys.executable, "-m", "tests.mutation", "--sample", "1", "--tests", "tests/policies/no_such_file.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "as they are" in done.stderr


@pytest.mark.parametrize("module", LAW)
def test_mutants_have_names_of_their_own_and_differ_from_the_law(module: str) -> None:
    made = mutants(module, source(module))
    assert len({m.name for m in made}) == len(made) > 500
    assert all(m.before != m.after for m in made)


def test_every_listed_equivalent_is_a_mutant_that_exists() -> None:
    names = {m.name for module in LAW for m in mutants(module, source(module))}
    assert set(EQUIVALENT) <= names
    assert all(EQUIVALENT.values())


def changed(text: str) -> set[str]:
    """What becomes of a small piece of code."""
    return {m.after for m in mutants("law", f"def f(a, b, c):\n    {text}\n")}


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("return 0 < a <= b", {"0 <= a <= b", "0 >= a <= b", "0 < a < b", "0 < a > b", "0 < a", "a <= b"}),
        ("return a and not b", {"a or not b", "a", "not b", "b"}),
        ("return (a, b) != (b, c)", {"(a,) != (b,)", "(b,) != (c,)", "(a, b) < (b, c)", "(a, b) == (b, c)"}),
        ("a.held -= b", {"a.held += b", "a.held = b", "pass"}),
        ("if a:\n        raise b", {"if True:", "if False:", "pass"}),
        ("yield Finding('min_k', 'words')", {"'min_k~'", "''", "pass"}),
        ("return max(a, b, 1)", {"min(a, b, 1)", "max(b, 1)", "max(a, 1)", "max(a, b)", "2", "0", "return None"}),
        ("return {'x', 'y'}", {"{'x'}", "{'y'}", "'x~'"}),
        ("return a - b", {"a + b", "a", "b"}),
    ],
)
def test_each_kind_of_change_is_made(text: str, after: set[str]) -> None:
    assert after <= changed(text)


def test_what_decides_nothing_is_left_alone() -> None:
    code = '@deco(1)\ndef f(a: int = 3) -> "x":\n    """Words."""\n    raise InvalidEntryError("words")\n'
    assert {m.before for m in mutants("law", code)} == {"3", "raise InvalidEntryError('words')"}


def test_a_mutants_code_is_the_module_with_that_change_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last unit of an account cannot be reserved in the mutant, and all but the last can."""
    text = source(LAW[0])
    mutant = next(m for m in mutants(LAW[0], text) if "0 < e.amount < account.left" in m.after)
    monkeypatch.setitem(sys.modules, "mutated", module := ModuleType("mutated"))
    exec(mutant.code(text, Path("mutated.py")), module.__dict__)
    assert text == source(LAW[0])
    account = Opened("m/k", 9, 0, "", "")
    for law, fits in (
        (policies.ledger.state, {8: True, 9: True, 10: False}),
        (module, {8: True, 9: False, 10: False}),
    ):
        for amount, taken in fits.items():
            state = law.State()
            state.apply(Record(0, "k0", account))
            wanted = Record(0, "k1", Reserved("g", "m", "", "ksame", "m/k", amount, b"{}", b"e"))
            if taken:
                state.apply(wanted)
            else:
                with pytest.raises(InvalidEntryError):
                    state.apply(wanted)
