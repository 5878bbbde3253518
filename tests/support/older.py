"""The homes that an older version wrote: see ``tests/vectors/older/README.md``."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from policies.ledger.export import Export

VECTORS = Path(__file__).parent.parent / "vectors" / "older"
HOMES = VECTORS / "homes.tar.xz"


@dataclass(frozen=True)
class Older:
    """A copy of them."""

    root: Path

    @property
    def coordinator(self) -> Path:
        return self.root / "coordinator"

    @property
    def site(self) -> Path:
        return self.root / "site-a"

    def exported(self, name: str) -> bytes:
        """What the older version exported of ``coordinator`` or ``site-a``."""
        return (self.root / f"{name}.export").read_bytes()

    def head(self, name: str) -> str:
        """The head that the older version signed."""
        return Export.parse(self.exported(name)).checkpoint


def older(folder: Path) -> Older:
    """Unpack them."""
    _unpack(HOMES, folder)
    return Older(folder)


def form_2(folder: Path) -> Path:
    """Unpack the home of a site whose vault has form 2."""
    _unpack(VECTORS / "form-2.tar.xz", folder)
    return folder / "site"


def typed(folder: Path) -> Path:
    """Unpack what the commands of the version before the folders were moved left behind; the place of all of it."""
    _unpack(VECTORS / "typed.tar.xz", folder)
    return folder


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Debian 12's Python 3.11.2 lacks it
        packed.extractall(folder, **safely)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
