"""``python -m tests.mutation [--module NAME ...] [--list | --sample N] [--json] [--jobs N] [--tests FILE ...]``.

Changes ``policies/ledger/state.py``, ``review/rules.py`` and ``review/mechanism_terms.py`` one small thing at a
time, and demands that the tests notice every change, but for the equivalents that are listed with their reason. Exit
0 all killed, 1 a survivor or a stale equivalent, 2 usage, or tests that fail on the modules as they are.

A tool of our own, because the two that exist leave out what matters here. mutmut 3.8 runs on this layout (1,201
mutants of both modules, 12 a second on two idle cores), but skips every decorated function, so that the formula of
what is left in an account (``Account.left``, a property), ``Account.limit``, ``Verdict.admitted`` and the tables of a
module (roles, terms of a mechanism) are never changed; it leaves out no statement and no operand of an ``and``, and
turns ``<`` into ``<=`` and never into ``>=``. As a second opinion it left 101 mutants alive: 94 are other words in a
message, three are equivalents of the list here, and four (``rpartition``) are killed since. cosmic-ray 8.7 (1,071)
changes operators and numbers alone, neither statements nor collections, in the files of the working tree, and starts
an interpreter for each: 1.6 s here before the first slow test.

Everything runs in a copy of the tree, so that an edit in the meantime kills nothing; the tests must pass on the
modules as they are before the run and after it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.mutation.equivalents import EQUIVALENT
from tests.mutation.mutants import Mutant, mutants
from tests.mutation.run import ROOT, Outcome, outcomes, prepare, source_of

TESTS: Final = {  # pure, and the ones that speak of the module first
    "policies.ledger.state": ("tests/policies/ledger/test_state_fold.py", "tests/policies/review/test_rules_each.py"),
    "policies.review.rules": (
        "tests/policies/review/test_rules_distilled.py",
        "tests/policies/review/test_rules_each.py",
        "tests/policies/review/test_rules.py",
    ),
    "policies.review.mechanism_terms": (
        "tests/policies/review/test_rules_distilled.py",
        "tests/policies/review/test_rules_each.py",
    ),
}
_COPIED: Final = ("policies", "protos", "tests", "pyproject.toml")


def in_a_copy(words: Sequence[str]) -> int:
    """This command, on a copy of the tree that nobody edits."""
    leave = shutil.ignore_patterns("__pycache__", "corpus", ".hypothesis")
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in _COPIED:
            here, there = ROOT / name, Path(folder) / name
            if here.is_dir():
                shutil.copytree(here, there, ignore=leave)
            else:
                shutil.copyfile(here, there)
        command = [sys.executable, "-m", "tests.mutation", "--here", *words]
        return subprocess.run(command, cwd=folder, check=False).returncode


def sample(every: Sequence[Mutant], count: int) -> list[Mutant]:
    """So many of them, the same ones each time, evenly spread; no equivalents."""
    real = [m for m in every if m.name not in EQUIVALENT]
    return [real[i * len(real) // count] for i in range(count)]


def row(module: str, ran: Sequence[Outcome]) -> dict[str, object]:
    """One line of the table."""
    of = [o for o in ran if o.mutant and o.mutant.module == module]
    equal = [o for o in of if o.mutant and o.mutant.name in EQUIVALENT and not o.killed]
    survived = sum(not o.killed for o in of) - len(equal)
    return {
        "module": module,
        "mutants": len(of),
        "killed": sum(o.killed for o in of),
        "timeouts": sum(o.killer == "timeout" for o in of),
        "survived": survived,
        "equivalent": len(equal),
    }


def stale(ran: Sequence[Outcome], whole: bool) -> list[str]:
    """Listed equivalents that the tests kill, or, after a whole run, that no longer exist."""
    found = {o.mutant.name: o.killed for o in ran if o.mutant}
    return [name for name in EQUIVALENT if found.get(name, whole)]


def said(mutant: Mutant, killer: str) -> dict[str, object]:
    """One mutant in the JSON."""
    name = mutant.name
    return {"mutant": name, "line": mutant.line, "killer": killer, "equivalent": EQUIVALENT.get(name)}


def show(rows: Sequence[dict[str, object]], ran: Sequence[Outcome], seconds: float) -> None:
    """The table, the equivalents with their reasons, the survivors."""
    keys = ("mutants", "killed", "timeouts", "survived", "equivalent")
    print(f"{'module':<17}" + "".join(f"{key:>12}" for key in keys))
    for line in rows:
        print(f"{line['module']:<17}" + "".join(f"{line[key]:>12}" for key in keys))
    print(f"{len(ran)} mutants in {seconds:.0f} s")
    for o in ran:
        if o.mutant and not o.killed:
            reason = EQUIVALENT.get(o.mutant.name)
            print(f"equivalent: {o.mutant.short}\n    {reason}" if reason else f"SURVIVED: {o.mutant.name}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="change the law, and be noticed")
    parser.add_argument("--module", action="append", choices=[*TESTS], help="only this one")
    parser.add_argument("--match", default="", help="only mutants whose name has this in it")
    parser.add_argument("--list", action="store_true", help="name the mutants and run none")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, the same each time")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="instead of the usual ones")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def fails(tests: Sequence[str]) -> bool:
    """Do the tests fail on the modules as they are?"""
    (outcome,) = outcomes([(None, tests)], 1)
    if outcome.killed:
        print(f"the tests fail on the modules as they are: {outcome.killer}", file=sys.stderr)
    return outcome.killed


def main() -> int:
    """The command."""
    told = arguments()
    modules: list[str] = told.module or [*TESTS]
    every = [m for module in TESTS for m in mutants(module, source_of(module).read_text())]
    chosen = [m for m in every if m.module in modules and told.match in m.name]
    if told.sample:
        chosen = sample(chosen, told.sample)
    if told.list:
        print("\n".join(f"{m.line:>4} {m.name}" for m in chosen))
        return 0
    if not told.here:
        return in_a_copy(sys.argv[1:])
    prepare([*TESTS])
    began, ran = time.monotonic(), list[Outcome]()
    tests = told.tests or list(dict.fromkeys(test for module in modules for test in TESTS[module]))
    if fails(tests):
        return 2
    for outcome in outcomes([(m, told.tests or TESTS[m.module]) for m in chosen], told.jobs):
        ran.append(outcome)
        if sys.stderr.isatty():
            print(f"{len(ran)} of {len(chosen)}", end="\r", file=sys.stderr)
    if not told.sample and fails(tests):  # the disk is full, or something else kills all mutants alike
        return 2
    seconds, rows = time.monotonic() - began, [row(module, ran) for module in modules]
    wrong = stale(ran, len(chosen) == len(every))
    if told.json:
        listed = [said(o.mutant, o.killer) for o in ran if o.mutant]
        print(json.dumps({"name": "mutation", "seconds": seconds, "rows": rows, "mutants": listed, "stale": wrong}))
    else:
        show(rows, ran, seconds)
        print("".join(f"STALE equivalent: {name}\n" for name in wrong), end="")
    return int(bool(wrong) or any(line["survived"] for line in rows))


if __name__ == "__main__":
    sys.exit(main())
