"""``python -m deploy.verifier OUT.pyz``: ``lazaret-verify`` as one file, see
:mod:`policies.audit.verifier_archive`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from policies.audit.verifier_archive import ROOT, ForeignImportError, archive, modules_needed

__all__ = ["ROOT", "ForeignImportError", "archive", "main", "modules_needed"]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the archive and print its SHA-256: exit 0 done, 1 it would not run elsewhere, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m deploy.verifier", description="build lazaret-verify as one file")
    parser.add_argument("out", type=Path, metavar="OUT.pyz")
    out: Path = parser.parse_args(argv).out
    try:
        raw = archive()
    except ForeignImportError as error:
        sys.stderr.write(f"not built: {error}\n")
        return 1
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(raw)
        out.chmod(0o755)
    except OSError as error:
        parser.error(f"cannot write {out.name}: {error.strerror}")
    sys.stdout.write(f"{hashlib.sha256(raw).hexdigest()}  {out.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
