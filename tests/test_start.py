"""What a command imports before it does anything: help waits for no library, and what does not learn for no torch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import agent.cli.bundle_options
import agent.cli.options
import coordinator.cli.options
from agent.mechanisms.distillation import options as distillation
from agent.service.jobs import PRIORITIES
from agent.storage.site_directory import MAIN
from policies.governance import options as governance
from policies.ledger.approvals import ROLES
from policies.tasks.task import LOSSES
from tests.support.federation_world import Federation
from tests.support.release_site import filled, ksame_words

ROOT: Final = Path(__file__).parent.parent
HEAVY: Final = frozenset(
    {
        "torch",
        "scipy",
        "numpy",
        "grpc",
        "pydicom",
        "fastapi",
        "flwr",
        "sklearn",
        "cryptography",
        "rich",
        "PIL",
        "apsw",
    }
)
LEARNING: Final = frozenset({"torch", "monai", "sklearn", "matplotlib"})
PARSERS: Final = {"agent": agent.cli.options.build_parser, "coordinator": coordinator.cli.options.build_parser}
HELP: Final = """
import argparse, sys
from {side}.cli.main import main
from {side}.cli.options import build_parser

def helps(parser):
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from helps(one)

shown = list(helps(build_parser()))
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
print(len(shown), *sorted({heavy!r} & set(sys.modules)), file=sys.stderr)
"""
COUNTED: Final = """
import sys
before = set(sys.modules)
from {side}.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
print(len(set(sys.modules) - before), file=sys.stderr)
"""
MOST_MODULES: Final = {"agent": 71, "coordinator": 31}  # measured: 65 and 29, and 10 % of room
LOADED: Final = """
import sys
from {main} import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
found = sorted({heavy!r} & set(sys.modules))
assert not found, found
sys.exit(status)
"""
MATCHED: Final = """
import json, pathlib, sys
side, *commands = sys.argv[1:]
main = __import__(f"{side}.cli.main", fromlist=["_run"])
found = {}

class Module:
    def __init__(self, name):
        self.__dict__["name"] = name
    def __getattr__(self, _attribute):
        return lambda *_: self.name

for package in (f"{side}.cli", f"{side}.operations", "protos.web"):
    room = __import__(package, fromlist=["x"])
    for path in pathlib.Path(room.__path__[0]).glob("*.py"):
        if path.stem not in ("main", "options", "bundle_options", "output", "__init__"):
            sys.modules[f"{package}.{path.stem}"] = one = Module(f"{package}.{path.stem}")
            setattr(room, path.stem, one)
for command in commands:
    found[command] = main.carry_out(type("Arguments", (), {"command": command, "labels": False}))
print(json.dumps(found))
"""
LIGHT: Final = frozenset(
    {
        *("administration", "backup", "cohort", "console", "doctor", "ingest", "ledger", "quarantine"),
        *("jobs", "labels", "ledger_decisions", "made_release", "release_kanonymous", "run_plans", "serve", "setup"),
    }
)
WITH_TORCH: Final = frozenset(  # every other command does without, but for vetting, rounds and heads that come in
    {
        *("release ksalsa", "release anonfaces", "release privimage", "release centroids", "release distill"),
        *(
            "release distill-dp",
            "release model",
            "release remodel",
            "tune",
            "evaluate",
            "predict",
            "draw",
            "audit",
            "deface",
        ),
        *(f"train {network}" for network in (*agent.cli.options.NETWORKS, *distillation.NETWORKS)),
        *(
            "train codebook",
            "train remodeller",
            "task check",
            "task from-bundle",
            "task to-bundle",
            "task preview",
            "weights convert",
        ),
    }
)


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """What the words of all commands are kept as."""
    for one in parser._actions:
        yield one.dest
        for command in one.choices.values() if isinstance(one, argparse._SubParsersAction) else ():
            yield from options(command)


def commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every command, as it is typed."""
    groups = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if not groups:
        yield parser.get_default("command")
    for group in groups:
        for one in group.choices.values():
            yield from commands(one)


def homeless(parser: argparse.ArgumentParser) -> Iterator[tuple[str, bool]]:
    """Every command, and whether it needs no home."""
    groups = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if not groups:
        yield str(parser.get_default("command")), bool(parser.get_default("homeless"))
    for group in groups:
        for one in group.choices.values():
            yield from homeless(one)


@pytest.mark.parametrize("side", ["agent", "coordinator"])
def test_no_help_of_any_command_imports_a_library(side: str) -> None:
    code = HELP.format(side=side, heavy=set(HEAVY))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    shown, *found = done.stderr.split()
    assert not found
    assert int(shown) > len(list(commands(PARSERS[side]())))  # groups have a help, too


@pytest.mark.parametrize("side", MOST_MODULES)
def test_help_loads_few_modules(side: str) -> None:
    code = COUNTED.format(side=side)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = int(done.stderr)
    assert 0.8 * MOST_MODULES[side] <= loaded <= MOST_MODULES[side], "more: import later; far fewer: lower the bound"


@pytest.mark.parametrize("main", ["policies.audit.verify", "protos.encryption.reader_cli"])
def test_the_auditors_and_the_readers_commands_need_cryptography_and_no_other_library(main: str) -> None:
    code = LOADED.format(main=main, heavy=set(HEAVY - {"cryptography"}))
    assert subprocess.run([sys.executable, "-c", code, "--help"], check=False, cwd=ROOT).returncode == 0


def carried_out_by(side: str) -> dict[str, str]:
    """Which module carries out each command, as the match in the side's ``main`` has it; nothing is carried out."""
    done = subprocess.run(
        [sys.executable, "-c", MATCHED, side, *commands(PARSERS[side]())],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("side", ["agent", "coordinator"])
def test_every_command_that_is_typed_is_carried_out_by_one_module(side: str) -> None:
    found = carried_out_by(side)
    assert found.keys() == set(commands(PARSERS[side]()))
    assert len(set(found.values())) >= 8
    assert not {"command", "usage_check", "homeless"} & set(options(PARSERS[side]()))  # the parser's own


def test_what_does_not_learn_imports_no_torch() -> None:
    found = carried_out_by("agent")
    assert found.keys() >= WITH_TORCH
    light = {module for command, module in found.items() if command not in WITH_TORCH}
    assert light == {"protos.web.login_cli", *(f"agent.cli.{name}" for name in LIGHT)}
    code = (
        f"import sys, {', '.join(sorted(light))}; sys.exit(bool({{'torch', 'monai', 'sklearn'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("agent.cli.ledger", HEAVY - {"cryptography", "rich", "apsw"}),
        ("agent.cli.ledger_decisions", HEAVY | {"policies.ledger.store", "structlog"}),
        ("agent.cli.made_release", HEAVY - {"cryptography", "rich"}),
        ("agent.runtime", {"torch", "scipy", "fastapi"}),
        ("agent.cli.cohort", {"torch", "scipy", "nibabel", "highdicom"}),
        ("agent.cli.serve", {"torch", "scipy", "fastapi"}),
        ("agent.cli.ingest", {"torch", "scipy", "fastapi", "grpc"}),
        ("agent.console.app", {"torch", "scipy"}),
        ("agent.client", HEAVY - {"cryptography", "numpy", "rich"} | {"pandas"}),
    ],
)
def test_what_starts_often_imports_nothing_that_it_rarely_needs(module: str, never: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({set(never)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_a_release_that_does_not_learn_imports_no_torch_from_its_price_to_its_verdict(tmp_path: Path) -> None:
    code = LOADED.format(main="agent.cli.main", heavy=set(LEARNING))
    with Federation(tmp_path) as federation:
        site = filled(federation.join("site-a"), tmp_path)
        for words in (
            ["ledger", "show"],
            ksame_words(tmp_path, "--dry-run"),
            ksame_words(tmp_path),
            ["cohort"],
            ["ledger", "amend"],
        ):
            line = [sys.executable, "-c", code, "--home", str(site.home.root), *map(str, words)]
            done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
            assert done.returncode == 0, (words, done.stdout, done.stderr)


@pytest.mark.parametrize("side", ["agent", "coordinator"])
def test_the_help_of_home_names_the_commands_that_need_none(side: str) -> None:
    parser = PARSERS[side]()
    said = (
        str(next(one.help for one in parser._actions if one.dest == "home")).partition("need none: ")[2].split(", ")
    )
    named = {name.removesuffix(" IN OUT") for name in said}
    found = {name for name, bare in homeless(parser) if bare}
    assert {name if name in named else name.partition(" ")[0] for name in found} == named
    assert not [name for name, bare in homeless(parser) if not bare and name.split()[0] in named]


def test_what_the_parsers_write_twice_is_what_there_is() -> None:
    assert agent.cli.options.MAIN == MAIN
    assert agent.cli.options.PRIORITIES == PRIORITIES
    assert tuple(LOSSES) == agent.cli.bundle_options.KINDS
    assert tuple(sorted(ROLES)) == governance.ROLES
