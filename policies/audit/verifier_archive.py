"""The auditor's ``lazaret-verify`` as one file: a zip application that runs where nothing of ours is installed.

It holds exactly the modules that :mod:`policies.audit.verify` needs, found by following its imports: the auditor runs
the same code as we do, and there is no second implementation to drift. It needs Python 3.11 and ``cryptography``. The
build fails when anything else is imported.

The same sources give the same bytes on every machine, so that whoever builds it again can compare the SHA-256.
Therefore ``zipfile`` and not ``zipapp``, which stores the files' times; a fixed order, time and mode for each member;
and no compression, because different versions of zlib compress differently.
"""

from __future__ import annotations

import ast
import io
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from protos.common.errors import InvariantError

ROOT: Final = Path(__file__).resolve().parents[2]
START: Final = "policies.audit.verify"
ALLOWED: Final = sys.stdlib_module_names | {"cryptography"}
SHEBANG: Final = b"#!/usr/bin/env python3\n"
# Both checks end with 2: a machine that cannot run the verifier has not found a ledger unsound, which is 1.
MAIN: Final = f'''"""lazaret-verify FILE [--key HEX] [--from FILE] [--witnesses N] [--artifact FILE] [--json]"""

import importlib.util
import sys

if sys.version_info < (3, 11) or importlib.util.find_spec("cryptography") is None:
    sys.stderr.write("lazaret-verify needs Python 3.11 or newer and the package cryptography\\n")
    sys.exit(2)

from {START} import main  # noqa: E402 - after the check

sys.exit(main())
'''


class ForeignImportError(InvariantError, ValueError):
    """A module that the verifier needs imports something that an auditor's machine does not have."""


def _source(root: Path, module: str) -> Path | None:
    """The file of a module of ours, or None."""
    place = root.joinpath(*module.split("."))
    found = [path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()]
    return found[0] if found else None


def _imported(module: str, source: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What a module imports: each module's full name, and the names taken from it, which may be modules too."""
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if source.name == "__init__.py" else module.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name, tuple(alias.name for alias in node.names)


def modules_needed(root: Path, start: str) -> Mapping[str, Path]:
    """Every module of ours that importing ``start`` may load, with its file; packages on the way included.

    Args:
        root: the folder of our top-level packages.
        start: the full name of a module.
    Raises:
        ForeignImportError: one of them imports what is neither ours, nor Python's, nor ``cryptography``.
    """
    found: dict[str, Path] = {}
    queue = [(start, "the command")]
    while queue:
        module, importer = queue.pop()
        parents = module.split(".")
        for name in (".".join(parents[: i + 1]) for i in range(len(parents))):
            source = _source(root, name)
            if source is None and parents[0] in ALLOWED:
                break
            if source is None:
                raise ForeignImportError(f"{importer} imports {module}, which an auditor's machine does not have")
            if name in found:
                continue
            found[name] = source
            for other, names in _imported(name, source):
                queue.append((other, name))
                queue += [(f"{other}.{n}", name) for n in names if _source(root, f"{other}.{n}") is not None]
    return found


def archive(root: Path = ROOT, start: str = START) -> bytes:
    """The zip application, the same bytes for the same sources.

    Raises:
        ForeignImportError: see :func:`modules_needed`.
    """
    members = {
        source.relative_to(root).as_posix(): source.read_bytes() for source in modules_needed(root, start).values()
    }
    members["__main__.py"] = MAIN.encode()
    return SHEBANG + zip_bytes(members)


def zip_bytes(members: Mapping[str, bytes], runs: Sequence[str] = ()) -> bytes:
    """A zip archive, the same bytes for the same members wherever it is made; ``runs`` are those to be executable."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as opened:
        for name, body in sorted(members.items()):
            member = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            member.create_system = 3  # Unix, whatever built it
            member.external_attr = (0o100755 if name in runs else 0o100644) << 16
            opened.writestr(member, body)
    return out.getvalue()
