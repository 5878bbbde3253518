"""One tree of errors: every exception of ours has a base that says what kind of cause it is, and one name is one
class.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from protos.common import errors
from protos.common.errors import LazaretError, Signal

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agent", "coordinator", "policies", "protos")
BASES = [kind for kind in vars(errors).values() if isinstance(kind, type)]
NOT_OURS = dict.fromkeys(("TurnedAway", "AnotherRoot"), "what httpx expects of a transport")  # class -> why


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class at the top of a module: the module's name and the class."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
            yield from ((module, n) for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef))


def exceptions() -> dict[tuple[str, str], type[BaseException]]:
    """Every exception class of ours, by module and name. What looks like one by its bases is imported and asked."""
    found: dict[tuple[str, str], type[BaseException]] = {}
    for module, node in classes():
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        if bases and (
            node.name.endswith("Error") or any(b.endswith(("Error", "Exception", "Signal")) for b in bases)
        ):
            kind = getattr(import_module(module), node.name)
            if issubclass(kind, BaseException) and module != errors.__name__:
                found[module, node.name] = kind
    return found


@pytest.fixture(scope="module")
def ours() -> dict[tuple[str, str], type[BaseException]]:
    found = exceptions()
    assert len(found) > 140, "the search sees them"
    return found


def test_every_exception_has_one_of_the_bases(ours: dict[tuple[str, str], type[BaseException]]) -> None:
    lost = [name for name, kind in ours.items() if not issubclass(kind, LazaretError | Signal)]
    assert sorted(name for _, name in lost) == sorted(NOT_OURS)


def test_an_error_is_called_one_and_a_signal_is_not(ours: dict[tuple[str, str], type[BaseException]]) -> None:
    for (module, name), kind in ours.items():
        if name in NOT_OURS:
            continue
        assert name.endswith("Error") is issubclass(kind, LazaretError), f"{module}.{name}"


def test_one_name_is_one_class(ours: dict[tuple[str, str], type[BaseException]]) -> None:
    places = defaultdict(list)
    for module, name in ours:
        places[name].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_base_is_swallowed_by_a_handler_of_a_librarys_error() -> None:
    """Many places catch ``ValueError``, ``RuntimeError`` or ``OSError`` of a library: no base may fall to them."""
    for base in BASES:
        assert not issubclass(base, ValueError | RuntimeError | OSError | LookupError | ArithmeticError), base


def test_exit_codes_are_those_that_operators_know(ours: dict[tuple[str, str], type[BaseException]]) -> None:
    assert {kind.exit_code for kind in ours.values() if issubclass(kind, LazaretError)} == {1, 70}


def undefined(source: str, names: set[str]) -> set[str]:
    """What the ``Raises:`` sections of ``source`` name that is neither a class of ``names`` nor another package's."""
    wrong: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        _, _, told = (ast.get_docstring(node) or "").partition("Raises:")
        section = re.split(r"\n\S", told)[0]
        for line in re.findall(r"^    ((?:[\w.]+(?:, | and | or )?)+):", section, re.M):
            wrong |= {name for name in re.split(r", | and | or ", line) if name and "." not in name} - names
    return wrong


def test_a_docstring_names_exceptions_that_there_are() -> None:
    sources = [path.read_text() for package in (*PACKAGES, "deploy") for path in (ROOT / package).rglob("*.py")]
    names = {name for name in vars(builtins) if name[0].isupper()}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).rpartition(".")[2] for alias in node.names}
    assert {name for source in sources for name in undefined(source, names)} == set()
    said = 'def f():\n    """One.\n\n    Raises:\n        GoneError: never.\n    """\n'
    assert undefined(said, names) == {"GoneError"}
