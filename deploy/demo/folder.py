"""``python -m deploy.demo.folder DIR``: a small hospital to try the commands on, and a public basis.

Writes ``DIR/dicom`` (real handwriting as DICOM, real scanner files, broken ones) and ``DIR/basis.safetensors``,
fitted on public digits that belong to no patient. Prints the SHA-256 of the basis, which a site vouches for in
``site.toml``.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agent.mechanisms.common.linear_codec import fit_basis, save_basis
from deploy.phantoms import digits, scanner_files

COMPONENTS = 24


def public_basis(public: digits.Digits) -> bytes:
    """A PCA basis of the public digits at the size of the DICOM images, as safetensors."""
    pictures = (digits.upsample(public.images) / np.float32(255)).astype(np.float32)
    return save_basis(fit_basis(pictures, COMPONENTS, "public"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; exit 2 when it exists already."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.folder", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--patients", type=int, default=30)
    arguments = parser.parse_args(argv)
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already")
    (arguments.folder / "dicom").mkdir(parents=True)
    digits.write_hospital(arguments.folder / "dicom", 0, 1, arguments.patients, 2, np.random.default_rng(0))
    scanner_files.add_scanner_files(arguments.folder / "dicom")
    basis = public_basis(digits.split(1, arguments.patients, 2).public)
    (arguments.folder / "basis.safetensors").write_bytes(basis)
    sys.stdout.write(hashlib.sha256(basis).hexdigest() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
