"""The homes that an older version wrote: see ``tests/vectors/older/README.md``."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from policies.export import Export

HOMES = Path(__file__).parent.parent / "vectors" / "older" / "homes.tar.xz"


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
    with tarfile.open(HOMES) as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extractall(folder, filter="data")
        else:  # Debian 12's Python has no filters; the archive is this repository's own
            packed.extractall(folder)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return Older(folder)
