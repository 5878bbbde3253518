"""One mutant, one process: forked from this one once it has imported pytest and everything that never changes.

A mutated module exists in the child's memory only; the files of the tree are read and never written. What kills a
mutant is a failing test, an error at import, or a run of more than the limit.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final, NoReturn

import pytest
from hypothesis import Phase, settings

from tests.mutation.mutants import Mutant

ROOT: Final = Path(__file__).parent.parent.parent
LIMIT: Final = 60  # seconds for one mutant; the unchanged modules take a tenth of it
_UNCHANGED: Final = (  # imported once; none of them imports a module that is mutated
    "policies.accounting.accountant",
    "policies.ledger.cbor",
    "policies.accounting.claims",
    "policies.ledger.entries",
    "policies.ledger.export",
    "policies.ledger.merkle",
    "policies.review.policy",
    "policies.statements",
    "protos.common.dsse",
    "protos.identity.certificates",
    "hypothesis.stateful",
    "cryptography.hazmat.primitives.kdf.hkdf",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant; None is the module as it is."""

    mutant: Mutant | None
    killer: str  # the first failing test, "import", "timeout"; empty when nothing noticed

    @property
    def killed(self) -> bool:
        """Did the tests notice?"""
        return bool(self.killer)


class _Swap(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from code in memory."""

    def __init__(self, module: str, path: Path, code: CodeType) -> None:
        self.module, self.path, self.code = module, path, code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.path))

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)  # our own source with one change


class _FirstFailure:
    """Notes which test noticed."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or "import"


def source_of(module: str) -> Path:
    """The file of a module, which is not imported."""
    return ROOT / f"{module.replace('.', '/')}.py"


def prepare(changed: Sequence[str]) -> None:
    """Import what every child needs.

    Raises:
        RuntimeError: a module that is to be changed was imported with it, so that no change would be seen.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed here
    sys.dont_write_bytecode = False
    phases = (Phase.explicit, Phase.generate)  # the first failing example is enough
    settings.register_profile("mutation", derandomize=True, database=None, deadline=None, phases=phases)
    for name in _UNCHANGED:
        importlib.import_module(name)
    if found := [name for name in changed if name in sys.modules]:
        raise RuntimeError(f"imported too early: {', '.join(found)}")


def _child(mutant: Mutant | None, tests: Sequence[str], answer: int) -> NoReturn:
    signal.alarm(LIMIT)  # its default action ends the process
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    code = 0
    try:
        if mutant is not None:
            path = source_of(mutant.module)
            sys.meta_path.insert(0, _Swap(mutant.module, path, mutant.code(path.read_text(), path)))
        first = _FirstFailure()
        options = ["-x", "-q", "-p", "_hypothesis_pytestplugin", "--hypothesis-profile=mutation", "--capture=no"]
        with tempfile.TemporaryDirectory() as folder:
            options.append(f"--basetemp={folder}/t")
            for test in tests:  # one file after the other: most mutants never see the second
                code = code or int(pytest.main([*options, test], plugins=[first]))
        os.write(answer, (first.name or ("import" if code else "")).encode())
    except BaseException:  # noqa: BLE001 - a change so wild that pytest itself ends is noticed
        code = 1
        os.write(answer, b"import")
    finally:
        os._exit(code)


def outcomes(work: Sequence[tuple[Mutant | None, Sequence[str]]], jobs: int) -> Iterator[Outcome]:
    """Run every mutant against its tests, ``jobs`` at once; they come as they end."""
    running: dict[int, tuple[Mutant | None, int]] = {}
    waiting = list(reversed(work))
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, tests = waiting.pop()
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(reader)
                _child(mutant, tests, writer)
            os.close(writer)
            running[pid] = (mutant, reader)
        pid, status = os.wait()
        mutant, reader = running.pop(pid)
        with open(reader, "rb") as pipe:
            said = pipe.read().decode()
        killer = said or ("timeout" if os.WIFSIGNALED(status) else "import" if status else "")
        yield Outcome(mutant, killer)
