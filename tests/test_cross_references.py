"""Every cross-reference in a docstring or a comment leads to something: a module, a class, a function, a member.

Nothing is imported: modules are files, and what is in them is read from their source.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("agent", "coordinator", "policies", "protos", "deploy", "tests")
REFERENCE: Final = re.compile(r":(?:class|func|mod|meth|attr|data|exc|obj):`~?(?:[^`<]*<)?([^`>]+)>?`")
WITHOUT_MEMBERS: Final = ("Protocol", "Generic", "Enum", "ABC", "NamedTuple", "Exception")  # of the bases of a class
FUNC: Final = ":func:"  # apart from a name, or this file would have references of its own
FILES: Final = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def file_of(module: str) -> Path | None:
    """The file of a module, or of a package."""
    place = ROOT.joinpath(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py", place):
        if path.exists():
            return path
    return None


def named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """What a module or a class defines, also under ``if`` and ``try``, with what defines it."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Assign() | ast.AnnAssign():
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield from ((name.id, node) for name in ast.walk(target) if isinstance(name, ast.Name))
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
            case ast.If() | ast.Try() | ast.With():
                yield from named([*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])])


def set_by_itself(kind: ast.ClassDef) -> set[str]:
    """What the methods of a class set on ``self``."""
    return {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def leads(path: Path, words: list[str]) -> bool:
    """Whether the names lead to something, one within the other, from the module at ``path``."""
    if not words:
        return True
    if path.is_dir() or path.name == "__init__.py":
        folder = path if path.is_dir() else path.parent
        below = file_of(".".join((*folder.relative_to(ROOT).parts, words[0])))
        if below is not None:
            return leads(below, words[1:])
    return not path.is_dir() and within(path, parsed(path).body, words)


def within(path: Path, body: list[ast.stmt], words: list[str]) -> bool:
    """The same from the body of a module or of a class."""
    found = dict(named(body)).get(words[0])
    match found:
        case None:
            return False
        case ast.ClassDef():
            return len(words) == 1 or member(path, found, words[1:])
        case ast.ImportFrom(module=str(module)) if file_of(module) is not None:
            source = next(alias.name for alias in found.names if (alias.asname or alias.name) == words[0])
            place = file_of(module)
            assert place is not None
            return leads(place, [source, *words[1:]])
        case ast.Import() | ast.ImportFrom():
            return True  # another project's, which is not looked into
    return len(words) == 1


def member(path: Path, kind: ast.ClassDef, words: list[str]) -> bool:
    """Whether a class or one of its bases has such a member."""
    if within(path, kind.body, words) or words[0] in set_by_itself(kind):
        return True
    for base in kind.bases:
        told = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")
        if told[-1] not in WITHOUT_MEMBERS and within(path, parsed(path).body, [*told, *words]):
            return True
    return False


def lost(path: Path) -> list[str]:
    """The references of a file that lead to nothing: from the root, the module, or a class of the module."""
    targets = sorted(set(REFERENCE.findall(path.read_text())))
    kinds = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)] if targets else []
    wrong = []
    for target in targets:
        words = target.removesuffix("()").split(".")
        if words[0] in PACKAGES:
            found = leads(ROOT / words[0], words[1:])
        elif words[0] == "":  # beside this module
            found = leads(path.parent, words[1:])
        elif words[0] in sys.stdlib_module_names:
            found = True
        else:
            found = within(path, parsed(path).body, words) or any(member(path, kind, words) for kind in kinds)
        if not found:
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_every_cross_reference_leads_to_something(package: str) -> None:
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == package]
    assert files
    found = {str(path.relative_to(ROOT)): wrong for path in files if (wrong := lost(path))}
    assert found == {}


@pytest.mark.parametrize(
    "target",
    [
        "agent.release.gone", "agent.runtime.site_policy", "policies.ledger.store.LedgerBackend.gone", "gone",
        "protos.common.errors.LazaretError.exit_code.gone", "agent.gone.errors", "Known.gone",
    ],
)  # fmt: skip
def test_a_reference_to_nothing_is_seen(tmp_path: Path, target: str) -> None:
    (tmp_path / "module.py").write_text(f'"""See {FUNC}`{target}`."""\n\n\nclass Known:\n    here: int\n')
    assert lost(tmp_path / "module.py") == [target]


@pytest.mark.parametrize(
    "target",
    [
        "agent.release", "agent.storage.site_ledger.site_policy", "policies.ledger.store.LedgerBackend.head", "Known",
        "Known.here", "here", "protos.common.errors.RefusedError.exit_code", "pathlib.Path", "Known.made",
    ],
)  # fmt: skip
def test_a_reference_to_something_is_not(tmp_path: Path, target: str) -> None:
    made = "    def f(self):\n        self.made = 1\n"
    (tmp_path / "module.py").write_text(f'"""See {FUNC}`~{target}`."""\n\n\nclass Known:\n    here: int\n{made}')
    assert lost(tmp_path / "module.py") == []
