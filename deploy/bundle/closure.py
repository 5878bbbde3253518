"""Which packages one side needs, exactly: the ones that the tests ran with."""

from __future__ import annotations

import importlib.metadata as installed
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from protos.common.errors import ConfigError

# A coordinator's ledger may be in PostgreSQL; nobody should have to look for a driver without a network.
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {"agent": ("agent",), "coordinator": ("coordinator", "postgres")}
_PIN: Final = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")


class BundleError(ConfigError, ValueError):
    """No bundle can be made of this; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One package at one version, and what it needs of the others."""

    name: str  # as packaging.utils.canonicalize_name writes it
    version: str  # with its local part: a build of torch for a processor is another one than for an accelerator
    needs: tuple[str, ...]  # names of other pins

    def __str__(self) -> str:
        """As pip takes it."""
        return f"{self.name}=={self.version}"


def pins(constraints: str) -> dict[str, str]:
    """The versions of a constraints file, by canonical name.

    Raises:
        BundleError: a line pins nothing, or a package stands there twice.
    """
    found: dict[str, str] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in constraints.splitlines())):
        pin = _PIN.fullmatch(line)
        name = canonicalize_name(pin[1]) if pin else ""
        if pin is None or name in found:
            raise BundleError(f"constraints.txt: {line}: each package stands there once, as NAME==VERSION")
        found[name] = pin[2]
    return found


def closure(root: Path, side: str) -> list[Pin]:
    """Everything that one side loads besides ourselves, in the versions of this environment, sorted by name.

    Args:
        root: the repository, with pyproject.toml and constraints.txt.
        side: "agent" or "coordinator".
    Raises:
        BundleError: a package is not installed here, not pinned, or pinned at another version.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS[side] for line in optional[extra])]
    pinned, problems = pins((root / "constraints.txt").read_text()), []
    seen: dict[str, Pin] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    queue = [Requirement(line) for line in wanted]
    while queue:
        asked = queue.pop()
        name, extras = canonicalize_name(asked.name), frozenset(asked.extras)
        if (name, extras) in done:
            continue
        done.add((name, extras))
        try:
            version, more = installed.version(name), list(_needs(name, extras))
        except installed.PackageNotFoundError:
            problems.append(f"{name} is not installed here")
            continue
        if Version(pinned.get(name, "0")).public != Version(version).public:
            problems.append(f"{name} {version} is installed, and constraints.txt says {pinned.get(name, 'nothing')}")
        before = seen[name].needs if name in seen else ()
        needs = {canonicalize_name(one.name) for one in more} - {name}
        seen[name] = Pin(name, version, tuple(sorted(needs | set(before))))
        queue += more
    if problems:
        raise BundleError(f"{'; '.join(sorted(problems))}: make the bundle where `make test` ran")
    return [seen[name] for name in sorted(seen)]


def _needs(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """What a distribution asks for on this machine, with these extras."""
    for line in installed.requires(name) or ():
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield one
